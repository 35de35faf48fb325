"""Whom the hub takes for one: names that people confuse, and addresses of one network."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from consilience.errors import SettingsError
from consilience.hub import auth
from consilience.hub.api.server import Lobby
from consilience.hub.auth import Buckets, Logins, Notes, Rate, hash_password, network_of
from consilience.hub.hub import Settings
from consilience.hub.operating import add_coordinator
from consilience.hub.store.accounts import KNOWN_SECONDS, MOST_KNOWN
from consilience.hub.store.tables import known_addresses, sites
from consilience.protocol import Refusal, check_new_name, fold_name

PASSWORD = "a long password"


@pytest.mark.parametrize(
    "alike",
    ["ward a", "WARD A", "Ward.A", "Ward_-A", "Ward\u00a0A", "Wаrd A", "Ｗard A", "Ward\u200b A"],
)
def test_names_that_people_confuse_are_one_name(alike: str) -> None:
    assert fold_name(alike) == fold_name("Ward A")
    with pytest.raises(Refusal):
        check_new_name(alike, ["Ward A"])
    assert len({fold_name(name) for name in ("ward 1.1", "ward 11", "ward 111", "ward")}) == 4


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("Klinik 1", "KIinik l"),
        ("Klinik 1", "K1|nık I"),
        ("Oslo 10", "0s1o lo"),
        ("Marne", "Mame"),
        ("Warwick", "VVarvvick"),
        ("Modern", "modem"),
    ],
)
def test_names_that_most_typefaces_draw_alike_are_one_name(name: str, alike: str) -> None:
    assert fold_name(alike) == fold_name(name)
    with pytest.raises(Refusal, match="People would take"):
        check_new_name(alike, [name])


@pytest.mark.parametrize("name", [" Ward", "Ward ", "Ward  A", "Wa\u200brd", "Wa\trd", "Wa\nrd"])
def test_new_names_have_no_spaces_or_characters_that_nobody_sees(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        check_new_name(name, [])
    assert refused.value.code == "malformed"


def test_a_site_cannot_take_a_name_that_looks_like_another_ones(world: Any, tools: Any) -> None:
    world.add_study()
    world.ward("Ward A")
    hub = world.hub
    for name, code in (("ward a", "name-taken"), ("Ward  B", "malformed"), ("W B ", "malformed")):
        with pytest.raises(Refusal) as refused:
            hub.invite("demo", "ann", site=name)
        assert refused.value.code == code
        invitation, _ = hub.invite("demo", "ann")
        with pytest.raises(Refusal) as refused:
            hub.enrol(code=invitation, site=name, key="0" * 64, nonce=os.urandom(16).hex())
        assert refused.value.code == code
    assert [row["name"] for row in hub.store.sites("demo")] == ["Ward A"]
    # A name of an earlier version stays good: its site is invited, revoked and enrolled again.
    old = "ward  a"
    renamed = sites.update().values(name=old)
    hub.store.write(lambda db: db.execute(renamed))
    hub.revoke("demo", old, "ann")
    invitation, _ = hub.invite("demo", "ann", site=old)
    row = hub.enrol(code=invitation, site=old, key="1" * 64, nonce="1" * 32)
    assert (row["name"], row["status"]) == (old, "enrolled")


def test_studies_and_coordinators_have_names_that_differ_for_people(
    world: Any, tools: Any, tmp_path: Any
) -> None:
    world.add_study(tools.study_text("demo-1"))
    for name in ("demo--1", "demo-1-"):
        answer = world.client.post(
            "/api/studies", content=tools.study_text(name), headers=world.coordinator
        )
        assert tools.code(answer) == "name-taken"
    for name in ("Ann", "аnn", "a.n.n "):
        with pytest.raises(Refusal):
            world.hub.store.add_account(name, "scrypt:none", "operator")
    with pytest.raises(Refusal):
        world.hub.store.add_account("ann", "scrypt:none", "operator")
    for _ in range(2):  # a new password
        add_coordinator(tmp_path / "other", "ann", PASSWORD)
    with pytest.raises(SettingsError, match="'ann'"):
        add_coordinator(tmp_path / "other", "ANN", PASSWORD)


def test_limits_count_a_network_of_ipv6_once() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2%eth0") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("testclient") == "testclient"
    lobby = Lobby(Settings(folder=None, most_connections_each=2))  # type: ignore[arg-type]
    closed: list[str] = []
    for i in range(4):
        address = f"2001:db8::{i}"
        one: Any = SimpleNamespace(address=address, close=lambda at=address: closed.append(at))
        lobby.enter(one)
    assert closed == ["2001:db8::2", "2001:db8::3"]


def test_the_limit_of_an_account_is_not_forgotten_for_other_names(
    world: Any, monkeypatch: Any
) -> None:
    store = world.hub.store
    store.add_account("bea", hash_password(PASSWORD), "operator")
    monkeypatch.setattr(auth, "fits_password", lambda *_: False)
    monkeypatch.setattr(auth, "MOST_NAMES", 50)
    free, notes = Buckets(Rate(1e6, 1e6)), Notes(store, Rate(1e6, 1e6))
    logins = Logins(store, free, Buckets(Rate(1e-9, 2)), notes)

    def guess(name: str) -> str:
        with pytest.raises(Refusal) as refused:
            logins.log_in(name, "wrong", "10.0.0.1", hours=1)
        return refused.value.code

    # A name without an account has the same limit, or the limit would tell that it has none.
    for name in ("bea", "nobody"):
        assert [guess(name) for _ in range(3)] == ["not-authenticated"] * 2 + ["too-many"]
    for i in range(120):  # until their own limits are used up, too
        for _ in range(3):
            guess(f"x{i}")
    assert guess("bea") == "too-many"


def test_the_fullest_limits_are_forgotten_first(monkeypatch: Any) -> None:
    """Many names used once would else make room for someone whose limit is used up."""
    monkeypatch.setattr(auth, "MOST_NAMES", 50)
    buckets = Buckets(Rate(1e-9, 5))
    assert [buckets.has("mallory") for _ in range(6)] == [True] * 5 + [False]
    for i in range(500):
        assert buckets.has(f"x{i}")
    assert not buckets.has("mallory")
    assert len(buckets._levels) <= 50


def test_a_hub_that_starts_again_knows_where_coordinators_log_in(
    world: Any, monkeypatch: Any
) -> None:
    store = world.hub.store
    store.add_account("bea", hash_password(PASSWORD), "operator")
    monkeypatch.setattr(auth, "fits_password", lambda given, _: given == PASSWORD)

    def start() -> Logins:
        free, notes = Buckets(Rate(1e6, 1e6)), Notes(store, Rate(1e6, 1e6))
        return Logins(store, free, Buckets(Rate(1e-9, 1)), notes)

    start().log_in("bea", PASSWORD, "2001:db8::1", hours=1)
    again = start()
    with pytest.raises(Refusal, match="no account"):
        again.log_in("bea", "wrong", "10.0.0.1", hours=1)
    with pytest.raises(Refusal, match="Too many"):  # the account's limit, for strangers
        again.log_in("bea", PASSWORD, "10.0.0.2", hours=1)
    again.log_in("bea", PASSWORD, "2001:db8::2", hours=1)
    assert not store.knows("bea", "10.0.0.1")
    for i in range(MOST_KNOWN + 5):
        start().log_in("bea", PASSWORD, f"10.0.1.{i}", hours=1)
    assert len(store.fetch_all(known_addresses.select())) == MOST_KNOWN
    assert store.knows("bea", "10.0.1.24")
    assert not store.knows("bea", "2001:db8::/64")
    old = known_addresses.update().values(seen=auth.now(seconds=-KNOWN_SECONDS - 1))
    store.write(lambda db: db.execute(old))
    assert not store.knows("bea", "10.0.1.24")
    start().log_in("bea", PASSWORD, "10.0.2.1", hours=1)
    assert len(store.fetch_all(known_addresses.select())) == 1
    store.set_password("bea", hash_password(PASSWORD), "operator")
    assert not store.knows("bea", "10.0.2.1")  # whoever knew the old password could be there
