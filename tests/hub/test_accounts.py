"""Accounts: who may do what, at every address of the dashboard and of the API; and disabling."""

import json
import re
import sqlite3
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from consilience.errors import SettingsError
from consilience.hub import auth
from consilience.hub.api.routes import ROUTES
from consilience.hub.auth import Rate, hash_password, new_token
from consilience.hub.dashboard.pages import PAGES
from consilience.hub.operating import add_coordinator
from consilience.hub.roles import Action, Role
from consilience.hub.store import Store
from consilience.hub.store.tables import versions
from consilience.protocol import Refusal

PASSWORD = "correct horse battery"

# What each account may do: on study demo, on study other, and without a study. Written out here a
# second time, so that a mistake in the rule is not repeated in its test.
EVERYTHING = {"view", "look", "change", "add", "draft", "log", "manage", "own", "leave"}
READING = {"view", "look", "draft", "log", "own", "leave"}
EXPECTED = {
    "olga": (EVERYTHING, EVERYTHING, EVERYTHING),
    "cora": (EVERYTHING - {"manage"},) * 3,
    "dora": (
        {"view", "look", "change", "log", "own", "leave"},
        set(),
        {"view", "look", "own", "leave"},
    ),
    "adam": (READING, READING, READING),
}

SAID = (
    "There is no such study",
    "An auditor reads everything",
    "Accounts are managed",
    "some of the hub",
)
# What needs no account, because it is what gives one a session, or because a signature decides.
WITHOUT_ACCOUNT = {
    ("POST", "/login"),
    ("POST", "/login/code"),
    ("POST", "/visits/{link}"),
    ("POST", "/api/sessions"),
    ("POST", "/api/enrolments"),
    ("POST", "/api/keys/rotation"),
    ("POST", "/api/studies/{study}/contributions"),
    ("POST", "/api/studies/{study}/withdrawals"),
    ("POST", "/api/studies/{study}/blind/cards"),
    ("POST", "/api/studies/{study}/blind/acknowledgements"),
    ("POST", "/api/studies/{study}/blind/openings"),
}


def add_everybody(world: Any) -> None:
    store = world.hub.store
    store.add_account("olga", "scrypt:none", "operator", role=Role.OPERATOR)
    store.add_account("cora", "scrypt:none", "operator")
    store.add_account("dora", "scrypt:none", "operator", only=["demo"])
    store.add_account("adam", "scrypt:none", "operator", role=Role.AUDITOR)


def token_of(world: Any, name: str) -> str:
    return new_token(world.hub.store, name, hours=1, kind="test")[0]


def call(world: Any, method: str, path: str, token: str, **fields: str) -> Any:
    """Send a request with a session as the API and the dashboard take it."""
    if path.startswith("/api"):
        headers = {"authorization": f"Bearer {token}"}
        return world.client.request(method, path, headers=headers)
    headers = {"cookie": f"consilience={token}"}
    own = world.client.get("/account", headers=headers).text
    found = re.search(r'name="token" value="([0-9a-f]{64})"', own)
    assert found is not None, own
    data = {"data": {"token": found[1], **fields}} if method == "POST" else {}
    return world.client.request(method, path, headers=headers, follow_redirects=False, **data)


@pytest.fixture
def everybody(sqlite_world: Any, tools: Any) -> Any:
    sqlite_world.add_study()
    sqlite_world.add_study(tools.study_text("other"))
    add_everybody(sqlite_world)
    return sqlite_world


def addresses() -> list[tuple[str, str, Action]]:
    pages = [(each.methods.split()[0], each.path, each.action) for each in PAGES]
    upload = ("POST", "/studies/{study}/files/{file}", Action.CHANGE)
    routes = [(each.method, each.path, each.action) for each in ROUTES]
    draft = ("POST", "/drafts/{draft}/files/{part}", Action.ADD)
    return [*pages, upload, draft, *routes]


def test_whatever_changes_something_is_for_those_who_may() -> None:
    changing = {Action.CHANGE, Action.ADD, Action.MANAGE, Action.OWN, Action.LEAVE}
    for method, path, action in addresses():
        if method == "GET" or (method, path) == ("POST", "/api/studies/{study}/visits"):
            continue  # the link of a site, which changes nothing
        is_open = (method, path) in WITHOUT_ACCOUNT
        assert is_open if action is Action.OPEN else action in changing, (method, path)
        if "account" in path and action is not Action.OWN:
            assert action is Action.MANAGE


@pytest.mark.parametrize("name", EXPECTED)
def test_every_address_asks_the_role_of_every_account(everybody: Any, name: str) -> None:
    """What an account may not do is refused before the address itself looks at the request."""
    there = {(method, path) for method, path, _ in addresses()}
    for route in everybody.app.routes:
        for method in set(getattr(route, "methods", None) or ()) - {"HEAD"}:
            assert (method, route.path) in there or route.path == "/openapi.json"
    token, tried = token_of(everybody, name), set()
    for method, path, action in addresses():
        if action is Action.OPEN or path in ("/logout", "/api/sessions"):
            continue
        studies = ("demo", "other") if "{study}" in path else (None,)
        for study in studies:
            at = path.replace("{study}", str(study)).replace("{account}", "cora")
            at = re.sub(r"\{\w+\}", "none", at)
            before = everybody.hub.store.counts()
            answer = call(everybody, method, at, token)
            index = 2 if study is None else studies.index(study)
            tried.add((action, study))
            if action.value in EXPECTED[name][index]:
                to_login = answer.headers.get("location", "").startswith("/login")
                assert answer.status_code != 401, (at, answer.text)
                assert not to_login, (method, at)
                assert not any(each in answer.text for each in SAID), (method, at, answer.text)
            else:
                expected = 404 if study and not EXPECTED[name][index] else 403
                assert answer.status_code == expected, (method, at, answer.text)
                assert any(each in answer.text for each in SAID), (method, at, answer.text)
                assert everybody.hub.store.counts() == before, (method, at)
        if everybody.hub.store.study("demo")["status"] != "open":  # an allowed request closed it
            restore = sa.text("UPDATE studies SET status = 'open'")
            everybody.hub.store.write(lambda db, restore=restore: db.execute(restore))
    assert len({action for action, _ in tried}) == len(EVERYTHING) - 1  # all but leaving


def test_lists_hold_what_an_account_is_for(everybody: Any) -> None:
    for name, both in (("olga", True), ("dora", False), ("adam", True)):
        token = token_of(everybody, name)
        listed = call(everybody, "GET", "/api/studies", token).json()["studies"]
        assert {row["name"] for row in listed} == ({"demo", "other"} if both else {"demo"})
        page = call(everybody, "GET", "/studies", token).text
        assert "/studies/demo" in page
        assert ("/studies/other" in page) == both
    dora = token_of(everybody, "dora")
    assert call(everybody, "GET", "/audit?study=demo", dora).status_code == 200
    assert call(everybody, "GET", "/audit?study=other", dora).status_code == 404
    assert call(everybody, "GET", "/audit", dora).status_code == 403


def test_an_auditor_is_offered_nothing_that_changes(everybody: Any) -> None:
    for name, offered in (("adam", False), ("dora", True)):
        page = call(everybody, "GET", "/studies/demo", token_of(everybody, name)).text
        for address in ("/invite", "/close", "New study"):
            assert (address in page) == (offered and address != "New study"), (name, address)
        assert "/accounts" not in page
    assert "/new-study" not in call(everybody, "GET", "/studies", token_of(everybody, "adam")).text
    assert "/accounts" in call(everybody, "GET", "/studies", token_of(everybody, "olga")).text


def test_a_role_holds_from_the_next_request_on(everybody: Any) -> None:
    store, token = everybody.hub.store, token_of(everybody, "cora")
    assert call(everybody, "GET", "/new-study", token).status_code == 200
    store.set_role("cora", "operator", role=Role.COORDINATOR, only=["other"])
    assert call(everybody, "GET", "/new-study", token).status_code == 403
    assert call(everybody, "GET", "/studies/demo", token).status_code == 404
    store.set_role("cora", "operator", role=Role.AUDITOR)
    assert call(everybody, "GET", "/studies/demo", token).status_code == 200
    assert call(everybody, "GET", "/studies/demo/invite", token).status_code == 403
    with pytest.raises(Refusal, match="no study named 'none'"):
        store.set_role("cora", "operator", role=Role.COORDINATOR, only=["none"])
    with pytest.raises(Refusal, match="An auditor is for every study"):
        store.set_role("cora", "operator", role=Role.AUDITOR, only=["demo"])
    assert call(everybody, "GET", "/studies/other", token).status_code == 200  # nothing was changed


def test_disabling_an_account_ends_its_sessions_at_once(everybody: Any, tools: Any) -> None:
    store = everybody.hub.store
    store.set_password("cora", hash_password(PASSWORD), "operator")
    token, other = token_of(everybody, "cora"), token_of(everybody, "dora")
    assert call(everybody, "GET", "/studies", token).status_code == 200
    store.set_status("cora", "operator:olga", active=False)
    store.set_status("cora", "operator:olga", active=False)  # a second time says nothing
    bearer = {"authorization": f"Bearer {token}"}
    assert tools.code(everybody.client.get("/api/studies", headers=bearer)) == "not-authenticated"
    assert call(everybody, "GET", "/studies", other).status_code == 200
    with pytest.raises(Refusal):
        token_of(everybody, "cora")
    facts = {"name": "cora", "password": PASSWORD}
    assert everybody.client.post("/api/sessions", json=facts).status_code == 401
    store.set_status("cora", "operator:olga", active=True)
    assert tools.code(everybody.client.get("/api/studies", headers=bearer)) == "not-authenticated"
    assert everybody.client.post("/api/sessions", json=facts).status_code == 200
    said = [row["action"] for row in store.audit(limit=1000) if row["actor"] == "operator:olga"]
    assert said == ["account disabled", "account enabled"]


@pytest.mark.parametrize("change", ["disable", "role", "studies"])
def test_an_invitation_ends_with_the_right_to_make_it(
    everybody: Any, tools: Any, change: str
) -> None:
    store = everybody.hub.store
    codes = {
        (name, study): everybody.hub.invite(study, f"coordinator:{name}")[0]
        for name in ("cora", "dora")
        for study in ("demo", "other")
    }
    if change == "disable":
        store.set_status("cora", "operator:olga", active=False)
    else:
        only = {"role": None, "studies": ["other"]}[change]
        role = Role.AUDITOR if change == "role" else Role.COORDINATOR
        store.set_role("cora", "operator:olga", role=role, only=only)

    def enrol(by: str, study: str) -> int:
        ward = tools.Ward(f"{by} {study}", everybody.folder)
        body = json.dumps({"invitation": codes[by, study], "site": f"{by} {study}"}).encode()
        return int(everybody.call(ward, "POST", "/api/enrolments", body).status_code)

    assert enrol("cora", "demo") == 403
    assert enrol("cora", "other") == (201 if change == "studies" else 403)
    assert [enrol("dora", study) for study in ("demo", "other")] == [201, 201]
    void = [row for row in store.audit(limit=1000) if row["action"] == "invitations void"]
    assert [row["study"] for row in void] == ["demo", "other"][: 1 if change == "studies" else 2]


def test_a_session_of_a_disabled_account_counts_for_nothing(everybody: Any) -> None:
    """Even one that is still in the table, as in a copy that was put back."""
    token = token_of(everybody, "cora")
    change = sa.text("UPDATE coordinators SET status = 'disabled' WHERE name = 'cora'")
    everybody.hub.store.write(lambda db: db.execute(change))
    bearer = {"authorization": f"Bearer {token}"}
    assert everybody.client.get("/api/studies", headers=bearer).status_code == 401


# --------------------------------------------------------------------------------------- the pages


def test_an_operator_manages_accounts_on_the_dashboard(everybody: Any) -> None:
    olga, store = token_of(everybody, "olga"), everybody.hub.store
    for role, studies in (("nonsense", ""), ("some", "none"), ("", "")):
        answer = call(
            everybody, "POST", "/new-account", olga, name="eve", role=role, studies=studies
        )
        assert answer.status_code in (400, 404)
        assert 'value="eve"' in answer.text
        assert store.account("eve") is None
    made = call(
        everybody, "POST", "/new-account", olga, name="eve", role="some", studies="demo, other"
    )
    password = re.search(r'id="password"[^>]*>([^<]+)<', made.text)
    assert password is not None
    logged_in = everybody.client.post(
        "/api/sessions", json={"name": "eve", "password": password[1]}
    )
    assert logged_in.status_code == 200
    eve = logged_in.json()["token"]
    row = next(row for row in store.accounts() if row["name"] == "eve")
    assert (row["role"], row["studies"]) == ("coordinator", ["demo", "other"])
    page = call(everybody, "GET", "/accounts", olga).text
    assert "demo, other" in page
    changed = call(everybody, "POST", "/accounts/eve", olga, do="role", role="auditor")
    assert changed.headers["location"] == "/accounts/eve?done=role"
    assert call(everybody, "GET", "/studies/demo/close", eve).status_code == 403
    assert call(everybody, "POST", "/accounts/eve", olga, do="disable").status_code == 303
    answer = everybody.client.get("/api/studies", headers={"authorization": f"Bearer {eve}"})
    assert answer.status_code == 401
    assert call(everybody, "POST", "/accounts/eve", olga, do="enable").status_code == 303
    assert call(everybody, "POST", "/accounts/eve", olga, do="nonsense").status_code == 400
    again = call(everybody, "POST", "/accounts/eve", olga, do="password").text
    assert password[1] not in again
    assert (
        everybody.client.post(
            "/api/sessions", json={"name": "eve", "password": password[1]}
        ).status_code
        == 401
    )
    for what in ("disable", "role", "password", "reset", "need-not", "unbind"):
        answer = call(everybody, "POST", "/accounts/olga", olga, do=what, role="auditor")
        assert answer.status_code == 403
    assert store.account("olga")["role"] == "operator"
    assert call(everybody, "GET", "/accounts/nobody", olga).status_code == 404
    assert PASSWORD not in str(store.audit(limit=1000))


def test_strangers_who_guess_keep_nobody_from_changing_the_own_password(everybody: Any) -> None:
    store, logins = everybody.hub.store, everybody.app.state.logins
    store.set_password("cora", hash_password(PASSWORD), "operator")
    cora = token_of(everybody, "cora")
    logins._by_account.rate = Rate(1e-9, 2)
    facts = {"name": "cora", "password": "a wrong password"}
    guesses = [everybody.client.post("/api/sessions", json=facts).status_code for _ in range(3)]
    assert guesses == [401, 401, 429]
    new = {"old": PASSWORD, "new": "another password", "again": "another password"}
    assert call(everybody, "POST", "/account/password", cora, **new).status_code == 303


def test_an_account_without_a_password_takes_as_long_to_guess_as_any_other(
    everybody: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody.hub.accounts.add("sam", None, "operator")
    asked, scrypt = list[str](), auth._scrypt
    monkeypatch.setattr(auth, "_scrypt", lambda *given: asked.append("") or scrypt(*given))
    for name in ("sam", "nobody"):
        facts = {"name": name, "password": PASSWORD}
        assert everybody.client.post("/api/sessions", json=facts).status_code == 401
    assert len(asked) == 2


def test_people_change_their_own_password_with_the_one_until_now(everybody: Any) -> None:
    store = everybody.hub.store
    store.set_password("adam", hash_password(PASSWORD), "operator")
    adam, new = token_of(everybody, "adam"), "another long password"
    for old, first, second in (("wrong", new, new), (PASSWORD, new, "typo"), (PASSWORD, "x", "x")):
        answer = call(
            everybody, "POST", "/account/password", adam, old=old, new=first, again=second
        )
        assert answer.status_code in (400, 403)
        assert 'role="alert"' in answer.text
    answer = call(everybody, "POST", "/account/password", adam, old=PASSWORD, new=new, again=new)
    assert answer.headers["location"] == "/login?done=password"
    assert (
        everybody.client.get(
            "/account", headers={"cookie": f"consilience={adam}"}, follow_redirects=False
        )
        .headers["location"]
        .startswith("/login")
    )
    facts = {"name": "adam", "password": new}
    assert everybody.client.post("/api/sessions", json=facts).status_code == 200


# ---------------------------------------------------------------------------------- older databases


def test_accounts_of_an_earlier_version_keep_what_they_could_do(world: Any, tools: Any) -> None:
    """Before roles, every account could do everything but manage accounts."""
    world.add_study()
    token = token_of(world, "ann")
    store = world.hub.store
    for text in (
        "DROP TABLE assignments",
        "ALTER TABLE coordinators DROP COLUMN role",
        "ALTER TABLE coordinators DROP COLUMN every_study",
    ):
        store.write(lambda db, text=text: db.execute(sa.text(text)))
    newest = versions.delete().where(versions.c.version >= 8)
    store.write(lambda db: db.execute(newest))
    with closing(Store(store.folder, store.url.render_as_string(False))) as again:
        assert again.account("ann")["role"] == "coordinator"
    for path in ("/studies/demo/close", "/new-study", "/audit"):
        assert call(world, "GET", path, token).status_code == 200
    assert call(world, "GET", "/accounts", token).status_code == 403


def test_the_command_makes_coordinators_and_changes_passwords_as_before(tmp_path: Any) -> None:
    for password in (PASSWORD, "another password"):
        add_coordinator(tmp_path, "ann", password)
    with closing(sqlite3.connect(tmp_path / "hub.sqlite")) as db:
        rows = db.execute("SELECT name, role, every_study, status FROM coordinators").fetchall()
    assert rows == [("ann", "coordinator", 1, "active")]
    with pytest.raises(SettingsError, match="slash"):
        add_coordinator(tmp_path, "a/b", PASSWORD)
