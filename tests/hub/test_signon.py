"""Logging in at an identity provider: a real one, in a thread, that can be told to misbehave."""

import base64
import hashlib
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, quote_plus, urlsplit

import flask
import httpx
import pytest
import sqlalchemy as sa
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from consilience.errors import SettingsError
from consilience.hub.auth import COOKIE as SESSION
from consilience.hub.auth import Rate, new_token
from consilience.hub.dashboard import signon as pages
from consilience.hub.operating import opened, read_secret
from consilience.hub.roles import Role
from consilience.hub.signon import BACK, SignOn
from consilience.hub.store.tables import versions
from consilience.protocol import Refusal
from logins import CLIENT, SECRET, Browser, encode, make_world, open_world, try_login

with warnings.catch_warnings():  # the provider is built on modules that Authlib will move
    warnings.simplefilter("ignore")
    from authlib.deprecate import AuthlibDeprecationWarning  # its import sets a filter of its own

    warnings.simplefilter("ignore", AuthlibDeprecationWarning)
    import oidc_provider_mock
    from oidc_provider_mock import _server

pytestmark = pytest.mark.filterwarnings("ignore:get_jwt_config:DeprecationWarning")


def decode(part: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(part + "=="))


@dataclass
class Provider:
    """What the tests see of a provider, and how its ID tokens are changed on their way."""

    app: Any
    issuer: str = ""
    claims: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    key: Any = None  # signs in place of the provider's own
    asked: list[Any] = field(default_factory=list)
    challenges: dict[str, str] = field(default_factory=dict)
    storage: Any = None

    def watch(self) -> Any:
        self.storage = flask.g.oidc_provider_mock_storage
        self.asked.append((flask.request.method, flask.request.path))
        if flask.request.path == "/oauth2/token":  # RFC 7636, which this provider leaves out
            verifier = flask.request.form.get("code_verifier", "")
            stated = self.challenges.get(flask.request.form.get("code", ""))
            if stated != encode(hashlib.sha256(verifier.encode()).digest()):
                return flask.jsonify({"error": "invalid_grant"}), 400
            basic = base64.b64encode(f"{CLIENT}:{quote_plus(SECRET)}".encode()).decode()
            assert flask.request.headers["authorization"] == f"Basic {basic}"
        return None

    def change(self, answer: Any) -> Any:
        if flask.request.path != "/oauth2/token" or answer.status_code != 200:
            return answer
        content = json.loads(answer.get_data())
        header, claims, _ = content["id_token"].split(".")
        header, claims = decode(header) | self.header, decode(claims) | self.claims
        claims = {name: value for name, value in claims.items() if value is not None}
        if header["alg"] == "none":
            texts = [encode(json.dumps(part).encode()) for part in (header, claims)]
            content["id_token"] = ".".join([*texts, ""])
        elif self.claims or self.header or self.key is not None:
            key = self.key or RSAKey.import_key(self.storage.jwk.as_dict(is_private=True))
            content["id_token"] = jwt.encode(header, claims, key, [header["alg"]])
        answer.set_data(json.dumps(content))
        return answer

    def let_in(self, address: str, subject: str = "s-1") -> str:
        """Log somebody in, as a browser would; return where the provider sends it."""
        asked = parse_qs(urlsplit(address).query)
        assert asked["code_challenge_method"] == ["S256"]
        answer = httpx.post(address, data={"sub": subject}, follow_redirects=False)
        assert answer.status_code == 302, answer.text
        back = answer.headers["location"]
        self.challenges[parse_qs(urlsplit(back).query)["code"][0]] = asked["code_challenge"][0]
        return str(back)


@pytest.fixture
def provider() -> Iterator[Provider]:
    app = oidc_provider_mock.app()
    one = Provider(app)
    app.before_request(one.watch)
    app.after_request(one.change)
    with _server._threaded_server(app, poll_interval=0.01) as server:
        one.issuer = f"http://localhost:{server.server_port}"
        yield one


@pytest.fixture
def world(provider: Provider, tmp_path: Path, tools: Any) -> Iterator[Any]:
    with open_world(provider, tmp_path, tools) as world:
        yield world


def entries(world: Any, action: str) -> list[Any]:
    return [each for each in world.hub.store.audit(limit=1000) if each["action"] == action]


def test_people_log_in_at_the_provider_and_out_again(world: Any) -> None:
    browser = Browser(world.client)
    login = browser.get("/login?next=/account")
    assert "/login/sso?next=/account" in login.text
    assert "<script" not in login.text
    address = browser.begin("/account")
    asked = parse_qs(urlsplit(address).query)
    assert asked["redirect_uri"] == ["http://localhost:8440" + BACK]
    assert (asked["scope"], asked["response_type"]) == (["openid"], ["code"])
    answer = browser.get(world.provider.let_in(address))
    assert answer.status_code == 200
    assert 'content="0;url=/account"' in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    cookie = next(c for c in answer.headers.get_list("set-cookie") if c.startswith(SESSION + "="))
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert "bea" in browser.get("/account").text
    assert entries(world, "logged in")[-1]["facts"]["kind"] == "sso"
    out = browser.post("/logout", "/account")
    assert out.headers["location"] == "/login?done=out"
    assert browser.get("/account").status_code == 303
    browser.cookies = {}
    assert "/logout/sso" in browser.get("/login?done=out").text
    assert browser.get("/logout/sso").headers["location"].startswith(world.provider.issuer)


def test_an_identity_without_an_account_is_named_to_its_owner(world: Any) -> None:
    _, answer = try_login(world, "stranger-7")
    assert answer.status_code == 401
    assert "stranger-7" in answer.text
    assert entries(world, "login failed")[-1]["facts"]["subject"] == "stranger-7"
    store = world.hub.store
    store.bind("ann", world.provider.issuer, "stranger-7", "operator:olga")
    browser, answer = try_login(world, "stranger-7")
    assert answer.status_code == 200
    assert "ann" in browser.get("/account").text
    with pytest.raises(Refusal, match="another account"):
        store.bind("bea", world.provider.issuer, "stranger-7", "operator")
    store.unbind("ann", "operator:olga")
    assert browser.get("/account").status_code == 303  # its sessions have ended
    assert try_login(world, "stranger-7")[1].status_code == 401
    said = [each["action"] for each in store.audit(limit=1000) if each["actor"] == "operator:olga"]
    assert said == ["identity bound", "identity removed"]


def test_a_disabled_account_is_refused(world: Any) -> None:
    browser, answer = try_login(world)
    assert answer.status_code == 200
    world.hub.store.set_status("bea", "operator", active=False)
    assert browser.get("/account").status_code == 303
    browser, answer = try_login(world)
    assert answer.status_code == 401
    assert SESSION not in browser.cookies
    assert entries(world, "login failed")[-1]["actor"] == "coordinator:bea"


STRANGER = RSAKey.generate_key(2048, auto_kid=True)
WRONG: dict[str, dict[str, Any]] = {
    "nonce": {"claims": {"nonce": "another"}},
    "no nonce": {"claims": {"nonce": None}},
    "issuer": {"claims": {"iss": "https://elsewhere.example.org"}},
    "no issuer": {"claims": {"iss": None}},
    "audience": {"claims": {"aud": "another client"}},
    "no audience": {"claims": {"aud": None}},
    "for others too": {"claims": {"aud": [CLIENT, "another"], "azp": "another"}},
    "expired": {"claims": {"exp": int(time.time()) - 3600}},
    "never expires": {"claims": {"exp": None}},
    "from the future": {"claims": {"iat": int(time.time()) + 3600}},
    "of nobody": {"claims": {"sub": ""}},
    "unsigned": {"header": {"alg": "none"}},
    "signed by a stranger": {"key": STRANGER},
    "signed by a shared secret": {"header": {"alg": "HS256"}, "key": OctKey.import_key("x" * 32)},
    "of another answer": {"claims": {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"}},
}


def test_a_token_that_is_not_for_this_login_is_refused(world: Any) -> None:
    world.app.state.by_guess.rate = Rate(1000.0, 1000.0)
    for wrong, changes in WRONG.items():
        for name in ("claims", "header", "key"):
            default: Any = None if name == "key" else {}
            setattr(world.provider, name, changes.get(name, default))
        browser, answer = try_login(world)
        assert answer.status_code == 401, (wrong, answer.text)
        assert "is not valid" in answer.text, wrong
        assert SESSION not in browser.cookies
    assert entries(world, "login failed")[-1]["facts"]["by"] == "identity provider"
    world.provider.claims, world.provider.header, world.provider.key = {}, {}, None
    assert try_login(world)[1].status_code == 200


def test_the_provider_changes_its_keys(world: Any) -> None:
    assert try_login(world)[1].status_code == 200
    asked = world.provider.asked.count(("GET", "/jwks"))
    assert try_login(world)[1].status_code == 200
    assert world.provider.asked.count(("GET", "/jwks")) == asked  # keys are remembered
    known = world.provider.storage.jwk
    world.provider.storage.jwk = type(known).import_key(STRANGER.as_dict(private=True))
    assert try_login(world)[1].status_code == 200
    assert world.provider.asked.count(("GET", "/jwks")) == asked + 1


def test_a_login_is_of_the_browser_that_began_it_and_works_once(world: Any) -> None:
    world.app.state.by_guess.rate = Rate(1000.0, 1000.0)
    browser, other = Browser(world.client), Browser(world.client)
    back = world.provider.let_in(browser.begin())
    assert other.get(back).status_code == 401  # it began nothing
    other.begin()
    assert other.get(back).status_code == 401  # it began another login
    state = parse_qs(urlsplit(back).query)["state"][0]
    assert browser.get(back.replace(state, state[::-1])).status_code == 401
    begun = browser.begin()
    cookies, back = dict(browser.cookies), world.provider.let_in(begun)
    assert browser.get(back).status_code == 200
    browser.cookies = cookies
    again = browser.get(back)
    assert again.status_code == 401
    assert "used before" in again.text
    # The provider takes a code once too.
    code, browser.cookies = parse_qs(urlsplit(back).query)["code"][0], {}
    state = parse_qs(urlsplit(browser.begin()).query)["state"][0]
    assert browser.get(f"{BACK}?code={code}&state={state}").status_code == 401


def test_a_code_that_was_given_to_another_login_is_of_no_use(world: Any) -> None:
    """PKCE: whoever catches a code has not the verifier that its login began with."""
    world.app.state.by_guess.rate = Rate(1000.0, 1000.0)
    caught = world.provider.let_in(Browser(world.client).begin())
    browser = Browser(world.client)
    own = world.provider.let_in(browser.begin())
    code, other = (parse_qs(urlsplit(back).query)["code"][0] for back in (own, caught))
    n_asked = world.provider.asked.count(("POST", "/oauth2/token"))
    answer = browser.get(own.replace(quote(code, safe=""), quote(other, safe="")))
    assert answer.status_code == 401
    assert SESSION not in browser.cookies
    assert world.provider.asked.count(("POST", "/oauth2/token")) == n_asked + 1  # it was tried


def test_what_the_provider_refuses_is_not_repeated_on_the_page(world: Any) -> None:
    for more in ("error=<b>denied", "code=", "code=x&iss=https://elsewhere.example.org"):
        browser = Browser(world.client)
        state = parse_qs(urlsplit(browser.begin()).query)["state"][0]
        answer = browser.get(f"{BACK}?state={state}&{more}")
        assert answer.status_code == 401
        assert "denied" not in answer.text
    assert ("POST", "/oauth2/token") not in world.provider.asked


def test_a_login_leads_to_pages_of_the_hub_only(world: Any) -> None:
    world.app.state.by_guess.rate = Rate(1000.0, 1000.0)
    for target in ("https://evil.example", "//evil.example", "/\\evil.example", "javascript:evil"):
        browser = Browser(world.client)
        page = browser.get(world.provider.let_in(browser.begin(target)))
        assert 'content="0;url=/studies"' in page.text
        assert "evil" not in page.text


def test_a_verified_address_of_a_named_domain_finds_its_account_once(
    provider: Provider, tmp_path: Path, tools: Any
) -> None:
    with make_world(provider, tmp_path, tools, "example.org") as client:
        world = tools.World(client, tmp_path)
        world.provider = provider
        world.app.state.by_guess.rate = Rate(1000.0, 1000.0)
        for name in ("eve@example.org", "eve@example.com"):
            world.hub.store.add_account(name, "none", "operator")
        for email, verified in (
            ("eve@example.org", "true"),  # a text is no truth
            ("eve@example.com", True),  # another domain
            ("nobody@example.org", True),
        ):
            provider.claims = {"email": email, "email_verified": verified}
            assert try_login(world)[1].status_code == 401
        provider.claims = {"email": "Eve@Example.org", "email_verified": True}
        browser, answer = try_login(world)
        assert answer.status_code == 200
        assert "eve@example.org" in browser.get("/account").text
        assert try_login(world, "s-2")[1].status_code == 401  # somebody else got the address
        provider.claims = {}
        assert try_login(world)[1].status_code == 200  # from now on the identity is known
        # Whom an operator unbinds, the address does not bind again; nor somebody who has it now.
        world.hub.store.unbind("eve@example.org", "operator:olga")
        provider.claims = {"email": "eve@example.org", "email_verified": True}
        assert try_login(world)[1].status_code == 401
        assert try_login(world, "s-2")[1].status_code == 401
        world.hub.store.bind("eve@example.org", provider.issuer, "s-2", "operator:olga")
        assert try_login(world, "s-2")[1].status_code == 200


def test_without_a_rule_an_address_means_nothing(world: Any) -> None:
    world.hub.store.add_account("eve@example.org", "none", "operator")
    world.provider.claims = {"email": "eve@example.org", "email_verified": True}
    assert try_login(world, "s-9")[1].status_code == 401


def test_a_provider_that_is_down_or_another_one_stops_nobody_with_a_password(
    provider: Provider, tmp_path: Path, tools: Any
) -> None:
    for part, issuer in (("down", "http://localhost:9"), ("other", provider.issuer + "/")):
        wrong = replace(provider, issuer=issuer)
        with make_world(wrong, tmp_path / part, tools) as client:
            answer = client.get("/login/sso", follow_redirects=False)
            assert answer.status_code == 503
            assert 'id="password"' in answer.text


def test_logins_are_limited_for_each_address(world: Any) -> None:
    world.app.state.by_guess.rate = Rate(0.0, 2)
    answers = [world.client.get("/login/sso", follow_redirects=False) for _ in range(3)]
    assert [each.status_code for each in answers] == [303, 303, 429]


def test_a_hub_without_a_provider_has_no_such_pages(sqlite_world: Any) -> None:
    assert "/login/sso" not in sqlite_world.client.get("/login").text
    for path in ("/login/sso", BACK, "/logout/sso"):
        assert sqlite_world.client.get(path).status_code == 404


def test_an_operator_binds_an_identity_on_the_dashboard(world: Any) -> None:
    world.hub.store.add_account("olga", "none", "operator", role=Role.OPERATOR)
    browser = Browser(world.client)
    browser.cookies[SESSION] = (new_token(world.hub.store, "olga", hours=1, kind="test")[0], "/")
    answer = browser.post("/accounts/ann", "/accounts/ann", do="bind", subject="s-5")
    assert answer.headers["location"] == "/accounts/ann?done=bound"
    assert "s-5" in browser.get("/accounts/ann?done=bound").text
    assert try_login(world, "s-5")[1].status_code == 200
    answer = browser.post("/accounts/ann", "/accounts/ann", do="unbind")
    assert answer.headers["location"] == "/accounts/ann?done=unbound"
    assert try_login(world, "s-5")[1].status_code == 401


def test_settings_that_would_be_unsafe_are_refused(tmp_path: Path) -> None:
    for issuer, url in (
        ("http://login.example.org", "https://hub"),
        ("https://login.example.org", "http://hub.example.org"),
        ("https://login.example.org", ""),
    ):
        with pytest.raises(SettingsError, match="must begin with https"):
            SignOn(issuer, "hub", url)
    with pytest.raises(SettingsError, match="client id"):
        SignOn("https://login.example.org", "", "https://hub")
    assert SECRET not in repr(SignOn("https://login.example.org", "hub", "https://hub", SECRET))
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_secret("NONE", file)
    file.chmod(0o600)
    assert read_secret("NONE", file) == SECRET
    with pytest.raises(SettingsError, match="cannot be read"):
        read_secret("NONE", tmp_path / "missing")


def test_a_database_of_before_gets_the_table(tmp_path: Path) -> None:
    with opened(tmp_path) as hub:
        hub.store.write(lambda db: db.execute(sa.text("DROP TABLE identities")))
        hub.store.write(lambda db: db.execute(versions.delete().where(versions.c.version >= 10)))
    with opened(tmp_path) as hub:
        hub.accounts.add("eve", None, "operator")
        hub.store.bind("eve", "https://login.example.org", "s", "operator")
        row = hub.store.identified("https://login.example.org", "s", None)
        assert row is not None
        assert row["name"] == "eve"


def test_the_cookie_of_an_attempt_is_for_its_way_back_only(world: Any) -> None:
    answer = world.client.get("/login/sso", follow_redirects=False)
    cookie = next(c for c in answer.headers.get_list("set-cookie") if c.startswith(pages.COOKIE))
    assert f"Path={BACK}" in cookie
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
