"""Second factors: setting one up, logging in with it, losing it, and being required to have one."""

import re
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyotp
import pytest
import sqlalchemy as sa

from consilience.hub.auth import Rate, new_token
from consilience.hub.factors import FactorDesk
from consilience.hub.store import Store
from consilience.hub.store.tables import versions
from consilience.protocol import Refusal

PASSWORD = "correct horse battery"


class Clock:
    """The time that codes are made for."""

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def time(self) -> float:
        return self.at

    def code(self, secret: str, steps: int = 0) -> str:
        return pyotp.TOTP(secret).at(int(self.at) + 30 * steps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("consilience.hub.factors.time", clock)
    return clock


@pytest.fixture
def world(sqlite_world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("consilience.hub.auth._COST", (16, 8, 1))  # the same hash, and quick
    sqlite_world.hub.accounts.add("bea", PASSWORD, "operator")
    for buckets in (sqlite_world.app.state.by_guess, sqlite_world.app.state.logins._by_account):
        buckets.rate = Rate(1000.0, 1000.0)
    return sqlite_world


def enrol(
    world: Any, clock: Clock, name: str = "bea", *, cookie: str = ""
) -> tuple[str, list[str]]:
    secret = world.hub.factors.begin(name).secret
    codes = world.hub.factors.confirm(name, clock.code(secret), cookie.partition("=")[2])
    clock.at += 30
    return secret, codes


def api_login(world: Any, **more: str) -> Any:
    return world.client.post("/api/sessions", json={"name": "bea", "password": PASSWORD, **more})


def form(world: Any, page: str, path: str, cookie: str, **fields: str) -> Any:
    shown = world.client.get(page, headers={"cookie": cookie})
    token = re.search(r'name="token" value="([0-9a-f]{64})"', shown.text)
    assert token is not None, shown.text
    sent = "; ".join([cookie, *(c.split(";")[0] for c in shown.headers.get_list("set-cookie"))])
    return world.client.post(
        path,
        data={"token": token[1], **fields},
        headers={"cookie": sent.strip("; ")},
        follow_redirects=False,
    )


def hidden(page: str) -> str:
    found = re.search(r'name="begun" value="([^"]+)"', page)
    assert found is not None
    return found[1]


def session(world: Any, name: str, kind: str = "session") -> str:
    return f"consilience={new_token(world.hub.store, name, hours=1, kind=kind)[0]}"


def entries(world: Any, action: str) -> list[Any]:
    return [each for each in world.hub.store.audit(limit=1000) if each["action"] == action]


def test_somebody_sets_a_second_factor_up_and_logs_in_with_it(world: Any, clock: Clock) -> None:
    mine = session(world, "bea")
    assert "It is off." in world.client.get("/account", headers={"cookie": mine}).text
    at = "/account/factor"
    assert form(world, at, at, mine, do="begin", password="wrong one").status_code == 403
    page = form(world, at, at, mine, do="begin", password=PASSWORD)
    secret = re.search(r'id="secret">([A-Z2-7]{32})<', page.text)
    assert secret is not None
    assert "<svg" in page.text
    assert "style=" not in page.text
    assert "<script" not in page.text
    assert api_login(world).status_code == 200  # before it is confirmed, nothing asks for it
    begun = hidden(page.text)
    assert secret[1] not in form(world, at, at, mine, do="confirm", code="000000").text
    fitting = clock.code(secret[1])  # somebody who has the session and not the password
    assert form(world, at, at, mine, do="confirm", code=fitting).status_code == 403
    wrong = form(world, at, at, mine, do="confirm", code="000000", begun=begun)
    assert wrong.status_code == 400
    assert secret[1] in wrong.text  # it can be typed again
    done = form(world, at, at, mine, do="confirm", code=fitting, begun=hidden(wrong.text))
    recovery = re.findall(r'"digest">(\d-[a-z0-9-]{14})<', done.text)
    assert len(recovery) == 8
    assert form(world, at, at, mine, do="begin", password=PASSWORD).status_code == 403
    # From now on the password alone is not enough, and the code that was typed is used up.
    assert api_login(world).status_code == 401
    assert "code is needed" in api_login(world).json()["error"]["message"]
    assert api_login(world, code=clock.code(secret[1])).status_code == 401
    clock.at += 30
    asked = form(world, "/login?next=/account", "/login", "", name="bea", password=PASSWORD)
    assert asked.status_code == 200
    assert "consilience=" not in str(asked.headers.get_list("set-cookie"))
    begun = re.search(r'name="begun" value="([^"]+)"', asked.text)
    assert begun is not None
    target = "/login/code"
    wrong = form(world, "/login", target, "", begun=begun[1], code="000000")
    assert wrong.status_code == 401
    code = clock.code(secret[1])
    for made_up in ("x", begun[1][:-4] + "AAAA"):
        answer = form(world, "/login", target, "", begun=made_up, code=code)
        assert answer.status_code == 401
    answer = form(world, "/login", target, "", begun=begun[1], code=f" {code[:3]} {code[3:]} ")
    assert answer.status_code == 303, answer.text
    assert "consilience=" in answer.headers["set-cookie"]
    again = form(world, "/login", target, "", begun=begun[1], code=code)
    assert again.status_code == 401
    assert entries(world, "login failed")[-1]["facts"]["by"] == "second factor"
    assert len(entries(world, "second factor added")) == 1
    stored = str(world.hub.store.fetch_all(sa.text("SELECT * FROM factors")))
    assert secret[1] not in stored
    assert secret[1] not in str(world.hub.store.audit(limit=1000))


def test_no_code_works_twice_nor_does_one_from_before(world: Any, clock: Clock) -> None:
    secret, _ = enrol(world, clock)
    use = world.hub.factors.use
    assert not use("bea", clock.code(secret, -2))  # too old, and used up
    assert not use("bea", clock.code(secret, 2))
    assert use("bea", clock.code(secret, 1))  # a clock that is ahead
    assert not use("bea", clock.code(secret, 1))
    assert not use("bea", clock.code(secret))  # earlier than one that was used
    clock.at += 60
    assert use("bea", clock.code(secret, -0))
    for nonsense in ("", "abc", "１２３４５６", "-1", "1-", "99999999999-a", "1" * 10_000):
        assert not use("bea", nonsense)
    assert not use("nobody", "000000")


def test_of_many_who_send_one_code_together_one_gets_in(world: Any, clock: Clock) -> None:
    secret, _ = enrol(world, clock)
    code, found = clock.code(secret), []
    senders = [
        threading.Thread(target=lambda: found.append(world.hub.factors.use("bea", code)))
        for _ in range(6)
    ]
    for each in senders:
        each.start()
    for each in senders:
        each.join()
    assert sorted(found) == [False] * 5 + [True]


def test_a_recovery_code_works_once_in_place_of_a_code(world: Any, clock: Clock) -> None:
    _, codes = enrol(world, clock)
    assert api_login(world, code=codes[1].replace("-", "-", 1).upper()).status_code == 200
    assert api_login(world, code=codes[1]).status_code == 401
    assert api_login(world, code=codes[0][0] + codes[2][1:]).status_code == 401
    assert entries(world, "recovery code used")[-1]["facts"]["number"] == 2
    hashes = world.hub.store.fetch_all(sa.text("SELECT hash FROM recovery_codes"))
    assert len(hashes) == 7
    assert all(row["hash"].startswith("scrypt:") for row in hashes)


def test_guesses_at_codes_are_limited_for_each_account(world: Any, clock: Clock) -> None:
    secret, _ = enrol(world, clock)
    world.app.state.logins._by_code.rate = Rate(1e-9, 3)
    answers = [api_login(world, code="000000").status_code for _ in range(4)]
    assert answers == [401, 401, 401, 429]
    assert api_login(world, code=clock.code(secret)).status_code == 429


def test_a_thief_of_the_password_keeps_no_owner_out(world: Any, clock: Clock) -> None:
    secret = world.hub.factors.begin("bea").secret
    world.hub.factors.confirm("bea", clock.code(secret), network="testclient")  # at the owner's
    clock.at += 30
    logins = world.app.state.logins
    logins._by_code.rate = Rate(1e-9, 3)
    for _ in range(4):  # the thief, elsewhere
        with pytest.raises(Refusal):
            logins.log_in("bea", PASSWORD, "203.0.113.9", hours=1, code="000000")
    with pytest.raises(Refusal, match="Too many"):
        logins.log_in("bea", PASSWORD, "203.0.113.9", hours=1, code=clock.code(secret))
    assert logins.log_in("bea", PASSWORD, "testclient", hours=1, code=clock.code(secret))


def test_a_new_password_or_disabling_ends_what_was_begun(world: Any, clock: Clock) -> None:
    secret, _ = enrol(world, clock)
    asked = form(world, "/login", "/login", "", name="bea", password=PASSWORD)
    begun = re.search(r'name="begun" value="([^"]+)"', asked.text)
    assert begun is not None
    world.hub.accounts.set_password("bea", "another password", "operator")
    code = clock.code(secret)
    answer = form(world, "/login", "/login/code", "", begun=begun[1], code=code)
    assert answer.status_code == 401
    assert "begin again" in answer.text


def test_an_account_that_needs_one_can_do_nothing_before(world: Any, clock: Clock) -> None:
    store, mine = world.hub.store, session(world, "bea")
    assert world.client.get("/studies", headers={"cookie": mine}).status_code == 200
    store.require_factor("bea", "operator:olga", needed=True)
    away = world.client.get("/studies", headers={"cookie": mine}, follow_redirects=False)
    assert (away.status_code, away.headers["location"]) == (303, "/account/factor")
    bearer = {"authorization": f"Bearer {mine.partition('=')[2]}"}
    assert world.client.get("/api/studies", headers=bearer).status_code == 403
    assert world.client.get("/account", headers={"cookie": mine}).status_code == 200
    sso = session(world, "bea", "sso")  # the provider has its own rule
    assert world.client.get("/studies", headers={"cookie": sso}).status_code == 200
    secret, _ = enrol(world, clock, cookie=mine)
    assert world.client.get("/studies", headers={"cookie": mine}).status_code == 200
    at = "/account/factor"
    refused = form(world, at, at, mine, do="remove", password=PASSWORD)
    assert refused.status_code == 403
    store.require_factor("bea", "operator:olga", needed=False)
    assert form(world, at, at, mine, do="remove", password=PASSWORD).status_code == 303
    assert api_login(world).status_code == 200
    assert [e["facts"]["needed"] for e in entries(world, "second factor required")] == [True, False]
    assert not world.hub.factors.use("bea", clock.code(secret))


@pytest.mark.parametrize("needed", [True, False])
def test_a_second_factor_ends_the_sessions_that_a_password_alone_began(
    world: Any, clock: Clock, needed: bool
) -> None:
    world.hub.store.require_factor("bea", "operator:olga", needed=needed)
    thief, mine = api_login(world).json()["token"], session(world, "bea")
    bearer = {"authorization": f"Bearer {thief}"}
    before = world.client.get("/api/studies", headers=bearer).status_code
    assert before == (403 if needed else 200)
    at = "/account/factor"
    page = form(world, at, at, mine, do="begin", password=PASSWORD).text
    secret = re.search(r'id="secret">([A-Z2-7]{32})<', page)
    assert secret is not None
    sent = {"code": clock.code(secret[1]), "begun": hidden(page)}
    assert form(world, at, at, mine, do="confirm", **sent).status_code == 200
    assert world.client.get("/api/studies", headers=bearer).status_code == 401
    assert world.client.get("/studies", headers={"cookie": mine}).status_code == 200


def test_a_hub_can_require_one_of_everybody(tmp_path: Any, tools: Any, clock: Clock) -> None:
    from consilience.hub.api.app import create_app

    settings = replace(tools.quick(tmp_path / "hub", None), all_need_factors=True)
    with tools.Client(create_app(settings)) as client:
        world = tools.World(client, tmp_path)
        answer = client.get("/api/studies", headers=world.coordinator)
        assert answer.status_code == 403
        assert "second factor" in answer.json()["error"]["message"]
        token = world.coordinator["authorization"].removeprefix("Bearer ")
        enrol(world, clock, "ann", cookie=f"consilience={token}")
        assert client.get("/api/studies", headers=world.coordinator).status_code == 200


def test_an_operator_resets_what_somebody_has_lost(world: Any, clock: Clock) -> None:
    from consilience.hub.roles import Role

    world.hub.store.add_account("olga", "none", "operator", role=Role.OPERATOR)
    enrol(world, clock)
    mine, olga = session(world, "bea"), session(world, "olga")
    page = world.client.get("/accounts/bea", headers={"cookie": olga}).text
    assert "Reset the second factor" in page
    answer = form(world, "/accounts/bea", "/accounts/bea", olga, do="reset")
    assert answer.headers["location"] == "/accounts/bea?done=reset"
    away = world.client.get("/account", headers={"cookie": mine}, follow_redirects=False)
    assert away.status_code == 303  # its sessions have ended
    assert api_login(world).status_code == 200
    assert entries(world, "second factor removed")[-1]["actor"] == "operator:olga"
    for what, needed in (("need", True), ("need-not", False)):
        form(world, "/accounts/bea", "/accounts/bea", olga, do=what)
        assert bool(world.hub.store.account("bea")["needs_factor"]) == needed


def test_a_copy_of_the_database_does_not_hold_the_secret(world: Any, clock: Clock) -> None:
    from consilience.files.sealed import SigningKey

    secret, _ = enrol(world, clock)
    thief = FactorDesk(world.hub.store, SigningKey.generate())
    with pytest.raises(Refusal, match="cannot be read"):
        thief.use("bea", clock.code(secret))


def test_a_database_of_before_needs_no_second_factor(world: Any) -> None:
    store = world.hub.store
    for text in (
        "DROP TABLE factors",
        "DROP TABLE recovery_codes",
        "ALTER TABLE coordinators DROP COLUMN needs_factor",
    ):
        store.write(lambda db, text=text: db.execute(sa.text(text)))
    store.write(lambda db: db.execute(versions.delete().where(versions.c.version >= 11)))
    with closing(Store(store.folder, store.url.render_as_string(False))) as again:
        assert again.factor("bea") is None
    assert api_login(world).status_code == 200
