"""Logging in at a real identity provider in a process of its own: npm's oidc-provider.

test_signon.py has more ways to go wrong, at a provider that does whatever a test wants. This one
keeps to the standards, so each token here was really issued and signed, if not for this login.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote_plus, urlencode, urlsplit

import httpx
import pytest
from joserfc.jwk import RSAKey

from consilience.hub.auth import COOKIE as SESSION
from consilience.hub.signon import BACK
from federation import wait_for
from forks import lasting_port
from logins import CLIENT, SECRET, Browser, encode, make_world, open_world, try_login

pytestmark = pytest.mark.soak

PACKAGE, BEFORE = "oidc-provider@9.13.3", "2026-11-01"  # the day fixes what it depends on
SCRIPT = Path(__file__).parents[1] / "identity_provider.mjs"
HUB = "http://localhost:8440"
OTHER = "another client"
UNREACHABLE = r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|TIMED?OUT"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the script beside the package that it imports."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not on this machine")
    folder = tmp_path_factory.mktemp("provider")
    options = ["--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    options += ["--fetch-retries=1", "--fetch-timeout=30000", f"--before={BEFORE}"]
    command = [npm, "install", *options, PACKAGE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode and re.search(UNREACHABLE, done.stderr):
        pytest.skip("the npm registry cannot be reached")
    assert done.returncode == 0, done.stderr
    shutil.copy(SCRIPT, folder)
    return folder


def new_key() -> dict[str, Any]:
    return dict(RSAKey.generate_key(2048, {"use": "sig"}, auto_kid=True).as_dict(private=True))


class Provider:
    """A process of the provider, which can be started again with other settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.hub = folder, lasting_port(), HUB
        self.issuer = f"http://127.0.0.1:{self.port}"
        self.key = new_key()
        self._process: Any = None

    def start(self, *, algorithm: str = "RS256", **changes: Any) -> None:
        self.stop()
        client = {
            "redirect_uris": [self.hub + BACK],
            "post_logout_redirect_uris": [f"{self.hub}/login"],
            "id_token_signed_response_alg": algorithm,
        }
        settings = {
            "issuer": self.issuer,
            "port": self.port,
            "account": "s-1",
            "key": self.key,
            "algorithms": ["RS256", algorithm],
            "clients": [
                {"client_id": name, "client_secret": SECRET, **client} for name in (CLIENT, OTHER)
            ],
            "secondsSlow": 0,
            **changes,
        }
        with (self.folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                ["node", SCRIPT.name],
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._process.stdin.write(json.dumps(settings))
        self._process.stdin.close()
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError((self.folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def let_in(self, address: str, subject: str = "s-1") -> str:
        """Follow a browser's way through the provider; return where it is sent in the end."""
        with httpx.Client() as browser:
            for _ in range(5):
                answer = browser.get(address)
                assert answer.is_redirect, answer.text
                address = str(answer.next_request.url)  # type: ignore[union-attr]
                if address.startswith(HUB):
                    return address
        raise AssertionError(f"the provider leads to {address}")

    def ask_code(self, client: str = CLIENT, **parts: str | None) -> dict[str, str]:
        """Log in for a client of the test's own; return what the provider sends back."""
        asked = {
            "client_id": client,
            "response_type": "code",
            "scope": "openid",
            "redirect_uri": HUB + BACK,
            "code_challenge_method": "S256",
            **parts,
        }
        sent = urlencode({name: value for name, value in asked.items() if value is not None})
        return read_query(self.let_in(f"{self.issuer}/auth?{sent}"))

    def exchange(self, code: str, client: str = CLIENT, **parts: str) -> Any:
        asked = {"grant_type": "authorization_code", "redirect_uri": HUB + BACK, "code": code}
        auth = (quote_plus(client), quote_plus(SECRET))  # RFC 6749, 2.3.1
        return httpx.post(f"{self.issuer}/token", data={**asked, **parts}, auth=auth).json()

    def issue(self, nonce: str, client: str = CLIENT) -> str:
        """Return an ID token that the provider issues."""
        verifier = secrets.token_urlsafe(32)
        code = self.ask_code(client, nonce=nonce, code_challenge=challenge(verifier))["code"]
        return str(self.exchange(code, client, code_verifier=verifier)["id_token"])

    def stand_in(self, token: str) -> None:
        """Answer with this token the next time."""
        assert httpx.post(f"{self.issuer}/stand-in", content=token).status_code == 204


def challenge(verifier: str) -> str:
    return encode(hashlib.sha256(verifier.encode()).digest())


def read_query(address: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}


@pytest.fixture
def provider(installed: Path) -> Iterator[Provider]:
    provider = Provider(installed)
    try:
        provider.start()
        yield provider
    finally:
        provider.stop()


@pytest.fixture
def world(provider: Provider, tmp_path: Path, tools: Any) -> Iterator[Any]:
    with open_world(provider, tmp_path, tools) as world:
        yield world


def refused(browser: Browser, back: str, caplog: pytest.LogCaptureFixture) -> str:
    """Return why the hub refuses a login, as it tells its own log."""
    caplog.clear()
    answer = browser.get(back)
    assert answer.status_code == 401, answer.text
    assert SESSION not in browser.cookies
    (why,) = [each.getMessage() for each in caplog.records if each.name == "consilience.hub"]
    return why.removeprefix("A login by the identity provider was refused: ").rstrip(".")


def test_people_log_in_at_the_provider_and_out_again(world: Any) -> None:
    browser, answer = try_login(world)
    assert answer.status_code == 200, answer.text
    assert "bea" in browser.get("/account").text
    browser.post("/logout", "/account")
    answer = httpx.get(browser.get("/logout/sso").headers["location"])
    assert answer.status_code == 200, answer.text  # it knows the hub and where to lead afterwards
    assert "logout" in answer.text.lower()


def test_the_provider_lets_nobody_in_without_a_challenge(world: Any) -> None:
    begun = Browser(world.client)
    asked = read_query(begun.begin())
    for without in ({"code_challenge": None}, {"code_challenge_method": "plain"}):
        answer = world.provider.ask_code(**{**asked, "client": CLIENT, **without})
        assert answer["error"] == "invalid_request", answer
        assert "code" not in answer
    assert begun.get(f"{BACK}?{urlencode(answer)}").status_code == 401
    assert SESSION not in begun.cookies


def test_a_code_is_of_no_use_with_another_verifier(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    provider, verifier = world.provider, secrets.token_urlsafe(32)
    for given in ({}, {"code_verifier": verifier[::-1]}, {"code_verifier": verifier}):
        code = provider.ask_code(code_challenge=challenge(verifier))["code"]
        answer = provider.exchange(code, **given)
        is_right = given.get("code_verifier") == verifier
        assert ("id_token" in answer) == is_right, answer
        assert (answer.get("error") == "invalid_grant") != is_right
    caught = read_query(provider.let_in(Browser(world.client).begin()))["code"]
    browser = Browser(world.client)
    own = provider.let_in(browser.begin())
    back = own.replace(read_query(own)["code"], caught)
    assert refused(browser, back, caplog) == "the provider refused the code"


def test_a_login_is_of_the_browser_that_began_it(world: Any) -> None:
    browser, other = Browser(world.client), Browser(world.client)
    back = world.provider.let_in(browser.begin())
    other.begin()
    assert other.get(back).status_code == 401
    assert SESSION not in other.cookies
    assert browser.get(back).status_code == 200


def test_a_token_is_of_one_login_and_one_client(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    provider = world.provider
    for client, is_same, why in (
        (CLIENT, False, "InvalidClaim: nonce"),
        (OTHER, True, "InvalidClaim: aud"),
        (CLIENT, True, None),
    ):
        browser = Browser(world.client)
        address = browser.begin()
        nonce = read_query(address)["nonce"]
        provider.stand_in(provider.issue(nonce if is_same else nonce[::-1], client))
        back = provider.let_in(address)
        if why is None:  # it was not for standing in that the others were refused
            assert browser.get(back).status_code == 200
        else:
            assert refused(browser, back, caplog) == why
    # Nor does the provider give the hub a token for a code of another client.
    code = provider.ask_code(OTHER, code_challenge=challenge("v" * 43))["code"]
    assert provider.exchange(code, code_verifier="v" * 43)["error"] == "invalid_grant"


def test_a_provider_by_another_name_is_refused(
    world: Any, tmp_path: Path, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert try_login(world)[1].status_code == 200  # from now on the hub knows where to ask
    world.provider.start(issuer=f"http://localhost:{world.provider.port}")
    browser = Browser(world.client)
    back = world.provider.let_in(browser.begin())
    assert browser.get(back).status_code == 401  # it says its name on the way back
    back = world.provider.let_in(browser.begin())
    assert refused(browser, re.sub(r"&iss=[^&]*", "", back), caplog) == "InvalidClaim: iss"
    with make_world(world.provider, tmp_path / "new", tools) as client:
        assert client.get("/login/sso", follow_redirects=False).status_code == 503
    world.provider.start()
    assert try_login(world)[1].status_code == 200


def test_a_token_that_has_expired_is_refused(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    world.provider.start(secondsSlow=3600 + 120)  # tokens live for an hour
    browser = Browser(world.client)
    assert refused(browser, world.provider.let_in(browser.begin()), caplog) == "ExpiredToken: exp"
    world.provider.start(secondsSlow=3600 - 120)
    assert try_login(world)[1].status_code == 200


def test_a_token_that_is_signed_by_the_shared_secret_is_refused(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.provider.start(algorithm="HS256")
    browser = Browser(world.client)
    back = world.provider.let_in(browser.begin())
    assert refused(browser, back, caplog) == "UnsupportedAlgorithm"


def test_the_provider_leaves_no_token_unsigned(provider: Provider) -> None:
    """So only test_signon.py can show that the hub would refuse one."""
    with pytest.raises(RuntimeError, match="idTokenSigningAlgValues"):
        provider.start(algorithm="none")


def test_the_provider_changes_its_keys(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    provider = world.provider
    assert try_login(world)[1].status_code == 200
    browser = Browser(world.client)
    address = browser.begin()
    old = provider.issue(read_query(address)["nonce"])
    provider.key = new_key()
    provider.start()
    assert try_login(world)[1].status_code == 200
    provider.stand_in(old)
    assert refused(browser, provider.let_in(address), caplog) == "InvalidKeyId"


@contextmanager
def serving(folder: Path, port: int, settings: dict[str, str]) -> Iterator[str]:
    """Start a hub as its operator would, whose account bea is the provider's s-1."""
    environment = os.environ | settings

    def command(*words: str) -> list[str]:
        return [
            str(Path(sys.executable).with_name("consilience")),
            "hub",
            *words,
            "--folder",
            str(folder),
        ]

    for words in (("add-account", "bea", "--no-password"), ("bind", "bea", "--subject", "s-1")):
        subprocess.run(command(*words), env=environment, check=True, capture_output=True)
    with (folder.parent / "hub.log").open("ab") as log:
        serve = command("serve", "--port", str(port))
        hub = subprocess.Popen(serve, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://localhost:{port}"
        wait_for(lambda: answers(f"{address}/healthz"), 120, "the hub")
        yield address
    finally:
        hub.terminate()
        hub.wait(30)


def answers(address: str) -> bool:
    try:
        return httpx.get(address).is_success
    except httpx.TransportError:
        return False


def test_chromium_logs_in_at_a_hub_and_a_provider_that_are_processes_of_their_own(
    provider: Provider, tmp_path: Path, chromium: Any
) -> None:
    """The two are different sites to a browser, which decides what cookies go along."""
    port = lasting_port()
    provider.hub = f"http://localhost:{port}"
    provider.start()
    settings = {
        "CONSILIENCE_PUBLIC_URL": provider.hub,
        "CONSILIENCE_OIDC_ISSUER": provider.issuer,
        "CONSILIENCE_OIDC_CLIENT_ID": CLIENT,
        "CONSILIENCE_OIDC_SECRET": SECRET,
    }
    with serving(tmp_path / "hub", port, settings) as address:
        page = chromium.new_context(base_url=address).new_page()
        try:
            page.goto("/account")
            page.click("text=single sign-on")
            page.wait_for_url("**/account")
            assert "bea" in page.inner_text("main")
            cookies = {each["name"]: each for each in page.context.cookies(address)}
            assert cookies[SESSION]["sameSite"] == "Strict"
        finally:
            page.context.close()
