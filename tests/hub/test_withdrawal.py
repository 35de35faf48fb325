"""Withdrawing is free at any time; the others keep their release, and coming back takes longer."""

import json
from typing import Any

import pytest
import sqlalchemy as sa

from consilience.files.sealed import SigningKey
from consilience.hub.store.database import now, set_setting
from consilience.hub.store.sites import COUNTED_SECONDS, LONGEST_RETURN_SECONDS, find_return
from consilience.hub.store.studies import alerts_setting
from consilience.hub.store.tables import MIGRATIONS, contributions, settings, sites


def withdraw(world: Any, ward: Any) -> Any:
    answer = world.call(ward, "POST", "/api/studies/demo/withdrawals", b"{}")
    assert answer.status_code == 200, answer.text
    return answer


def states(world: Any) -> dict[int, str]:
    return {row["sequence"]: row["state"] for row in world.hub.store.releases("demo")}


def actions(world: Any) -> list[str]:
    return [entry["action"] for entry in world.hub.store.audit(limit=1000)]


def move_back(world: Any, ward: Any, seconds: float) -> None:
    """Let all withdrawals of a site have happened earlier."""
    change = contributions.update().where(
        contributions.c.site == ward.name, contributions.c.state == "withdrawn"
    )
    enrolled = sites.update().where(sites.c.name == ward.name)
    for statement in (
        change.values(changed=now(seconds=-seconds)),
        enrolled.values(enrolled=now(seconds=-(10**8))),
    ):
        world.hub.store.write(lambda db, statement=statement: db.execute(statement))


def test_the_others_keep_the_newest_release_without_the_site(world: Any) -> None:
    study = world.add_study()
    wards = world.fill(study, 2)
    world.combiner.run(at_once=True)
    mallory = world.ward("mallory")
    assert world.submit(mallory, mallory.train(study)).status_code == 201
    world.combiner.run(at_once=True)
    assert states(world) == {1: "superseded", 2: "current"}
    withdraw(world, mallory)  # nothing was combined since
    assert states(world) == {1: "current", 2: "withdrawn"}
    assert world.call(wards[0], "GET", "/api/studies/demo/release").status_code == 200
    assert actions(world)[-1] == "release offered again"
    world.combiner.run(at_once=True)
    assert states(world) == {1: "superseded", 2: "withdrawn", 3: "current"}
    withdraw(world, wards[0])  # all of them rest on this site
    assert set(states(world).values()) == {"withdrawn"}


@pytest.mark.parametrize("newer", [False, True])
def test_a_release_that_is_withdrawn_at_birth_supersedes_nothing(world: Any, newer: bool) -> None:
    """Also if the site has replaced the contribution in it before it withdrew."""
    study = world.add_study()
    world.fill(study, 2)
    world.combiner.run(at_once=True)
    mallory = world.ward("mallory")
    world.submit(mallory, mallory.train(study))
    row, every = world.hub.store.claim("demo", "me", 60)
    made, _ = world.combiner._release(world.hub.study("demo")[1], every, every, None)
    if newer:
        assert world.submit(mallory, mallory.train(study, sequence=2)).status_code == 201
    withdraw(world, mallory)
    assert world.combiner._publish(made, row, None, "me")["state"] == "withdrawn"
    assert states(world) == {1: "current", 2: "withdrawn"}
    world.combiner.run(at_once=True)
    assert states(world) == {1: "superseded", 2: "withdrawn", 3: "current"}


def test_a_site_that_leaves_and_returns_keeps_nobody_without_a_release(
    world: Any, tools: Any
) -> None:
    study = world.add_study()
    world.fill(study, 2)
    world.combiner.run(at_once=True)
    mallory = world.ward("mallory")
    delays = []
    for sequence in range(1, 6):
        assert world.submit(mallory, mallory.train(study, sequence=sequence)).status_code == 201
        world.combiner.run(at_once=True)
        withdraw(world, mallory)
        assert "current" in states(world).values()
        own = world.hub.store.contributions("demo", site="mallory")
        site = world.hub.store.sites("demo")[0]
        count, until = find_return(site, own)
        delays.append(until is not None)
        again = mallory.train(study, sequence=sequence + 1)
        if until is not None:
            answer = world.submit(mallory, again)
            assert tools.code(answer) == "too-soon"
            assert f"withdrew {count} times" in answer.json()["error"]["message"]
            assert until[:19].replace("T", " ") in answer.json()["error"]["message"]
            move_back(world, mallory, 3600 * 2 ** (count - 2) - 60)
            assert tools.code(world.submit(mallory, again)) == "too-soon"
            move_back(world, mallory, 3600 * 2 ** (count - 2) + 1)
            assert withdraw(world, mallory).json()["state"] == "withdrawn"  # always possible
    assert delays == [False, True, True, True, True]
    assert actions(world).count("next contribution delayed") == 4


def test_what_counts_against_a_site_that_withdraws() -> None:
    site = {"enrolled": now(seconds=-(10**8))}
    gone = [{"state": "withdrawn", "changed": now(seconds=-i)} for i in range(100)]
    used = {"state": "accepted", "changed": now()}
    assert find_return(site, [used, gone[0]]) == (1, None)
    count, until = find_return(site, gone)
    assert count == 100
    assert now(seconds=LONGEST_RETURN_SECONDS - 60) < until < now(seconds=LONGEST_RETURN_SECONDS)
    old = [{**row, "changed": now(seconds=-COUNTED_SECONDS - 1)} for row in gone]
    assert find_return(site, old) == (0, None)
    assert find_return({"enrolled": now()}, gone) == (0, None)


def test_a_coordinator_can_let_a_site_return_at_once(sqlite_world: Any, tools: Any) -> None:
    world = sqlite_world
    study = world.add_study()
    ward = world.ward("north")
    for sequence in (1, 2):
        assert world.submit(ward, ward.train(study, sequence=sequence)).status_code == 201
        withdraw(world, ward)
    assert tools.code(world.submit(ward, ward.train(study, sequence=3))) == "too-soon"
    new = SigningKey.generate()
    world.hub.revoke("demo", "north", "coordinator:ann")
    ward.key = new
    body = json.dumps({"invitation": world.invitation(site="north"), "site": "north"}).encode()
    assert world.call(ward, "POST", "/api/enrolments", body).status_code == 201
    assert world.submit(ward, ward.train(study, sequence=3)).status_code == 201


def test_alerts_belong_to_a_release_and_those_of_older_databases_are_found(
    sqlite_world: Any,
) -> None:
    world = sqlite_world
    world.fill(world.add_study(), 2)
    world.combiner.run(at_once=True)
    digest = world.hub.store.release("demo")["digest"]
    for name in ("alerts demo", "alerts gone"):
        world.hub.store.remember(name, json.dumps({"ward 0": "It is far."}))
    world.hub.store.write(MIGRATIONS[2])
    assert world.hub.store.alerts("demo") == {"ward 0": "It is far."}
    names = sa.select(settings.c.name).where(settings.c.name.startswith("alerts"))
    assert [row["name"] for row in world.hub.store.fetch_all(names)] == [alerts_setting(digest)]
    world.hub.store.write(lambda db: set_setting(db, alerts_setting("0" * 64), '{"x": "y"}'))
    withdraw(world, world.wards["ward 0"])
    assert world.hub.store.alerts("demo") == {}
