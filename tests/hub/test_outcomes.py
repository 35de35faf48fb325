"""What the hub says of an attempt to combine a study follows from what happened to it."""

import gzip
import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from consilience.hub.api.requests import Command
from consilience.hub.children import LEAST_BYTES, TookTooLong
from consilience.hub.combining import MOST_TRIES, Combiner
from consilience.hub.hub import Hub
from consilience.hub.leases import renewing
from consilience.hub.outages import OUTAGES, Ended, Outage, describe_outage
from consilience.hub.state import Returning
from consilience.hub.store.database import now
from consilience.hub.store.tables import MIGRATIONS, claims, settings, studies
from consilience.privacy.guarantee import Budget
from consilience.protocol import Refusal
from consilience.tables.reading import MOST_FOOTER, has_more_records

COMBINING = "consilience.hub.combining"
DOCS = Path(__file__).parents[2] / "docs"
NOISY = 'name = "Average"\nepsilon = 1.0\nweights = "equal"'


class Stopped:
    """Processes in which an attempt begins as usual, and ends as it is told."""

    def __init__(self, hub: Hub, ended: Callable[[], Exception]) -> None:
        self.hub, self.ended = hub, ended

    def work(self, asked: Any, worker: str, *, is_asked: bool) -> Any:
        assert self.hub.store.claim(asked.study, worker, 15.0) is not None
        raise self.ended()


def stop(world: Any, patch: pytest.MonkeyPatch, ended: Callable[[], Exception]) -> None:
    patch.setattr(world.combiner, "_children", Stopped(world.hub, ended))


def ask(world: Any, key: str, **more: Any) -> Any:
    place = "/api/studies/demo/releases"
    return world.client.post(place, json={"key": key, **more}, headers=world.coordinator)


def read_page(world: Any, path: str = "/studies/demo") -> str:
    token = world.coordinator["authorization"].split()[1]
    answer = world.client.get(path, headers={"cookie": f"consilience={token}"})
    assert answer.status_code == 200, answer.text
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.text)).replace("&#39;", "'")


def fill_noisy_study(world: Any, tools: Any) -> Any:
    study = world.add_study(tools.study_text(hub="trusted", aggregator=NOISY))
    world.hub.allow("demo", Budget(epsilon=100.0), "operator")
    return study, world.fill(study, 3)


def unnamed_files(world: Any) -> set[str]:
    """Return the digests of files that no row names."""
    files = world.hub.store.files.folder
    found = {path.parent.name + path.name for path in files.glob("??/*")}
    return found - world.hub.store.filed_digests()


# ------------------------------------------------------------------------ what a page and a row say


@pytest.mark.parametrize("has_release", [False, True])
def test_a_study_with_noise_that_was_stopped_says_so_and_that_nobody_tries_again(
    sqlite_world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, has_release: bool
) -> None:
    world = sqlite_world
    study, wards = fill_noisy_study(world, tools)
    if has_release:
        assert ask(world, "first").status_code == 201
    with monkeypatch.context() as patch:
        stop(world, patch, TookTooLong)
        assert tools.code(ask(world, "second")) == "cannot-combine"
    page = read_page(world)
    assert "Combining failed" in page
    assert "it took longer than 600 seconds. Nobody tries again unasked" in page
    assert "left out" not in page
    assert "The hub tries again" not in page
    assert world.submit(wards[0], wards[0].train(study, sequence=2)).status_code == 201
    page = read_page(world)
    assert "A release can be made" in page
    assert "Combining failed" not in page  # that was with other contributions
    facts = world.client.get("/api/studies/demo", headers=world.coordinator).json()
    assert facts["problem"] is None


def test_who_is_left_out_of_a_release_is_said_while_it_is_current_whatever_fails_later(
    sqlite_world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sqlite_world
    study = world.add_study()
    wards = world.fill(study, 3)
    accept = Combiner._members

    def refuse_one(self: Any, *arguments: Any) -> Any:
        members, _ = accept(self, *arguments)
        return members[1:], {"ward 0": "It does not fit."}

    with monkeypatch.context() as patch:
        patch.setattr(Combiner, "_members", refuse_one)
        world.combiner.run(at_once=True)
    said = "The contribution of 'ward 0' is left out: It does not fit. Release 1 is made of the"
    assert said in read_page(world)
    assert world.submit(wards[1], wards[1].train(study, sequence=2)).status_code == 201
    with monkeypatch.context() as patch:
        stop(world, patch, TookTooLong)
        world.combiner.run(at_once=True)
    page = read_page(world)
    assert said in page
    assert "Combining failed" in page
    assert "The hub tries again after the next change" in page
    assert world.submit(wards[1], wards[1].train(study, sequence=3)).status_code == 201
    world.combiner.run(at_once=True)
    assert "left out" not in read_page(world)


def test_why_a_release_is_withheld_is_said_until_it_is_published(
    sqlite_world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed attempt to publish replaces no reason, and adds nothing to what can be published."""
    world = sqlite_world
    world.fill(world.add_study(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(f"{COMBINING}.Candidate.find_reasons", lambda _: ["It errs too often."])
        world.combiner.run(at_once=True)
    change = world.hub.store.study("demo")["changes"]
    for ended in (TookTooLong, *[lambda: Ended("It ended.")] * MOST_TRIES):
        with monkeypatch.context() as patch:
            stop(world, patch, ended)
            assert ask(world, "publish", change=change).status_code in (409, 503)
        for path in ("/studies/demo", "/studies/demo/aggregate"):
            page = read_page(world, path)
            assert "It errs too often." in page
            assert "stopped" not in page
        facts = world.client.get("/api/studies/demo", headers=world.coordinator).json()
        assert facts["withheld"] == change
        assert "It errs too often." in facts["problem"]
    assert ask(world, "publish", change=change).status_code == 201
    facts = world.client.get("/api/studies/demo", headers=world.coordinator).json()
    assert (facts["withheld"], facts["problem"]) == (None, None)


def test_a_problem_of_contributions_that_were_replaced_meanwhile_is_not_said(world: Any) -> None:
    study = world.add_study()
    ward, _ = world.fill(study, 2)
    row, _ = world.hub.store.claim("demo", "me", 15)
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    world.hub.store.give_up("demo", row["changes"], "me", "It failed.", withheld=True)
    row = world.hub.store.study("demo")
    assert (row["problem"], row["withheld"]) == (None, False)
    assert world.combiner.combine("demo")["sequence"] == 1


def test_an_earlier_versions_rows_are_read_as_what_happened(world: Any, tools: Any) -> None:
    store, withheld = world.hub.store, "A release was made and withheld. It errs."
    for name in ("shown", "lost", "failed", "lacking"):
        study = world.add_study(tools.study_text(name))
        world.fill(study, 2)
        world.combiner.run(at_once=True)
    stated = {
        "shown": withheld,
        "lost": "Combining it was stopped.",
        "failed": "It fails.",
        "lacking": "The contribution of 'x' is left out: it is.",
    }

    @store.write
    def before(db: sa.Connection) -> None:
        for name, problem in stated.items():
            db.execute(studies.update().where(studies.c.name == name).values(problem=problem))
        for name in ("shown", "lost"):
            db.execute(settings.insert().values(name=f"withheld {name}", value="2"))
        db.execute(sa.text("ALTER TABLE studies DROP COLUMN withheld"))
        db.execute(sa.text("ALTER TABLE studies DROP COLUMN tries"))
        MIGRATIONS[5](db)

    rows = {row["name"]: row for row in store.studies()}
    said = {name: (row["problem"], row["withheld"]) for name, row in rows.items()}
    assert said == {
        "shown": (withheld, True),
        "lost": (None, False),
        "failed": ("It fails.", False),
        "lacking": (None, False),
    }
    assert [row["name"] for row in store.due()] == ["lost"]  # whose reasons nobody can be shown
    assert store.absent("lacking") == stated["lacking"]


# ---------------------------------------------------------------------------- one key, one release


@pytest.mark.parametrize("withdraws", [False, True])
def test_a_key_that_was_answered_while_another_request_waited_has_one_answer(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, withdraws: bool
) -> None:
    """Two clicks, or a retry at another worker: the second gets its turn after the first."""
    _, wards = fill_noisy_study(world, tools)
    attempt, first = Combiner._attempt, list[Any]()

    def wait(self: Combiner, *arguments: Any) -> Any:
        monkeypatch.setattr(Combiner, "_attempt", attempt)
        first.append(Combiner(world.hub).combine("demo", request="one"))
        if withdraws:
            world.call(wards[0], "POST", "/api/studies/demo/withdrawals", b"{}")
        return attempt(self, *arguments)

    monkeypatch.setattr(Combiner, "_attempt", wait)
    answer = ask(world, "one")
    assert answer.status_code == 201, answer.text
    assert answer.json()["digest"] == first[0]["digest"]
    assert world.hub.balance("demo").spent.epsilon == pytest.approx(1.0)
    assert unnamed_files(world) == set()


def test_a_release_that_is_refused_leaves_no_file(world: Any) -> None:
    study = world.add_study()
    ward, _ = world.fill(study, 2)
    row, every = world.hub.store.claim("demo", "slow", 0.0)
    made, _ = world.combiner._release(study, every, every, None)
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    assert world.combiner.combine("demo")["sequence"] == 1
    with pytest.raises(Refusal, match="Another worker"):
        world.combiner._publish(made, row, None, "slow")
    assert unnamed_files(world) == set()


def test_a_key_names_the_release_that_was_made_under_it(world: Any) -> None:
    """Where no noise is drawn, the hub may have made the release already, under no key."""
    study = world.add_study()
    ward, _ = world.fill(study, 2)
    assert ask(world, "made").json()["sequence"] == 1
    assert ask(world, "found").json()["sequence"] == 1
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    assert ask(world, "made").json()["sequence"] == 1
    assert ask(world, "found").json()["sequence"] == 2
    for said in ((DOCS / "protocol.md").read_text(), Command.__doc__):
        assert "the same `key` returns the same release" not in said
        assert "the same key again returns the same release" not in said


# -------------------------------------------------------------------------------------- outages


def test_every_outage_is_told_as_one(sqlite_world: Any, tools: Any, monkeypatch: Any) -> None:
    """Machines, pages and combining have one list of what a later attempt may find in order."""
    world = sqlite_world
    world.fill(world.add_study(), 2)
    made: list[Exception] = [Ended("It ended."), Outage("It did not start.")]
    for kind in OUTAGES:
        is_sql = issubclass(kind, sa.exc.DBAPIError)
        made.append(kind("SELECT", None, Exception()) if is_sql else kind("It is away."))
    for problem in made:

        def fail(*_: Any, problem: Exception = problem) -> None:
            raise problem

        for place in ("hub.check_ready", "combiner.combine"):
            with monkeypatch.context() as patch:
                owner, name = place.split(".")
                patch.setattr(getattr(world, owner), name, lambda *_, fail=fail, **__: fail())
                asked = ask(world, "k") if owner == "combiner" else world.client.get("/readyz")
            assert tools.code(asked) == "unavailable", problem
            assert asked.json()["error"]["message"] == describe_outage(problem)
        with monkeypatch.context() as patch:
            patch.setattr(f"{COMBINING}.collect", lambda *_, fail=fail, **__: fail())
            world.combiner.run(at_once=True)
        row = world.hub.store.study("demo")
        assert row["problem"] is None, problem
        assert row["tries"] == (1 if isinstance(problem, Ended | MemoryError) else 0)
        world.hub.store.write(lambda db: db.execute(studies.update().values(tries=0)))


@pytest.mark.parametrize("noisy", [False, True])
def test_a_process_that_ends_again_and_again_is_not_called_want_of_memory(
    sqlite_world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, noisy: bool
) -> None:
    world = sqlite_world
    if noisy:
        fill_noisy_study(world, tools)
    else:
        world.fill(world.add_study(), 2)
    with monkeypatch.context() as patch:
        stop(world, patch, lambda: Ended("The process ended."))
        for _ in range(MOST_TRIES - 1):
            asked = ask(world, "k")
            assert tools.code(asked) == "unavailable"
            assert "The process ended." in asked.text
            assert world.hub.store.study("demo")["problem"] is None
        asked = ask(world, "k")
    assert tools.code(asked) == "cannot-combine"
    assert "each time something ended the process" in asked.text
    page = read_page(world)
    assert "each time something ended the process" in page
    assert "left out" not in page
    assert ("Nobody tries again unasked" in page) == noisy
    assert ask(world, "k").status_code == 201
    assert "Combining failed" not in read_page(world)


def test_attempts_that_took_the_hub_with_them_are_counted(
    world: Any, url: str | None, tools: Any
) -> None:
    """A worker that is killed leaves its claim, and the next one knows how often that happened."""
    study = world.add_study()
    ward, _ = world.fill(study, 2)
    for _ in range(MOST_TRIES):
        assert world.hub.store.claim("demo", "killed", 0.0) is not None
    again = Hub(tools.quick(world.folder / "hub", url))
    Combiner(again).run(at_once=True)
    row = again.store.study("demo")
    again.close()
    assert "each time something ended the process" in row["problem"]
    assert world.hub.store.due() == []
    assert world.submit(ward, ward.train(study, sequence=2)).status_code == 201
    world.combiner.run(at_once=True)
    assert world.hub.store.study("demo")["problem"] is None
    assert world.hub.store.release("demo")["sequence"] == 1


# --------------------------------------------------------------------------------------- claims


def test_a_claim_that_reaches_into_the_far_future_is_as_good_as_none(world: Any) -> None:
    world.fill(world.add_study(), 2)
    tomorrow = {"study": "demo", "worker": "ahead", "until": now(seconds=86400)}
    world.hub.store.write(lambda db: db.execute(claims.insert().values(tomorrow)))
    assert world.combiner.combine("demo")["sequence"] == 1


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)  # SQLite has no other clock
def test_claims_go_by_the_databases_clock(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fill(world.add_study(), 2)
    for module in ("studies", "database"):
        monkeypatch.setattr(
            f"consilience.hub.store.{module}.now",
            lambda *, seconds=0.0: now(seconds=seconds - 86400),
        )
    assert world.hub.store.claim("demo", "behind", 0.4) is not None
    monkeypatch.undo()
    assert world.hub.store.claim("demo", "other", 15) is None
    time.sleep(0.5)
    assert world.hub.store.claim("demo", "other", 15) is not None


def test_a_claim_is_renewed_although_the_database_was_away() -> None:
    renewed = list[int]()

    def renew() -> None:
        renewed.append(1)
        if len(renewed) == 1:
            raise sa.exc.OperationalError("UPDATE", None, Exception())

    with renewing(renew, 0.1, "the study demo"):
        until = time.monotonic() + 10
        while len(renewed) < 3:
            assert time.monotonic() < until
            time.sleep(0.02)


# ------------------------------------------------------------------------- files and their parts


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz"])
@pytest.mark.parametrize("sqlite_world", [{"most_public_records": 100}], indirect=True)
def test_a_file_of_many_records_is_refused_before_anyone_reads_it(
    sqlite_world: Any, tools: Any, kind: str
) -> None:
    """Equal records take almost no space in a file, and all of it in memory."""
    world = sqlite_world
    for n, is_kept in ((101, False), (100, True)):
        path = world.folder / f"test-{n}.{kind}"
        if kind == "parquet":
            table = pa.table({"a": [0.5] * n, "b": [0.5] * n, "y": ["no"] * n})
            pq.write_table(table, path)
        else:
            text = ("a,b,y\n" + "0.5,0.5,no\n" * n).encode()
            path.write_bytes(gzip.compress(text) if kind == "csv.gz" else text)
        content = path.read_bytes()
        sha = hashlib.sha256(content).hexdigest()
        text = tools.study_text(f"demo-{n}", test=sha).replace("test.csv", f"test.{kind}")
        world.add_study(text)
        place = f"/api/studies/demo-{n}/files/test.{kind}"
        answer = world.client.put(place, content=content, headers=world.coordinator)
        assert (answer.status_code == 200) == is_kept, answer.text
        if not is_kept:
            assert tools.code(answer) == "too-large"
            assert world.hub.store.file(sha) is None
    assert unnamed_files(world) == set()


def test_a_packed_file_is_measured_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    path.write_bytes(gzip.compress(b"a,b,y\n" + b"0" * (8 << 20)))
    assert has_more_records(path, "test.csv.gz", 100, 4 << 20)
    assert not has_more_records(path, "test.csv.gz", 100, 16 << 20)
    assert not has_more_records(path, "test.parquet", 100, 1)  # damaged: refused when it is read
    path.write_bytes(b"PAR1" + (MOST_FOOTER + 1).to_bytes(4, "little") + b"PAR1")
    assert has_more_records(path, "test.parquet", 100, 1)  # reading its footer alone is too much


def test_whoever_asks_for_a_part_of_a_file_gets_all_of_it(world: Any) -> None:
    """A part that there is not has no answer of the one shape that refusals have."""
    ward, _ = world.fill(world.add_study(), 2)
    world.combiner.run(at_once=True)
    whole = world.call(ward, "GET", "/api/studies/demo/release")
    for part in ("bytes=99999999-", "bytes=a-b", "bytes=0-9"):
        headers = {**world.coordinator, "range": part}
        answer = world.client.get("/api/studies/demo/release", headers=headers)
        assert (answer.status_code, answer.content) == (200, whole.content)
        assert "accept-ranges" not in answer.headers


# --------------------------------------------------------------------------- names, and the machine


def test_a_name_completes_no_sentence() -> None:
    said = Returning("None of the sites", 2, None).text
    assert said == "The site 'None of the sites' withdrew 2 times within 30 days."


def test_the_documented_unit_leaves_the_hub_alone_if_a_process_is_ended() -> None:
    unit = (DOCS / "deployment.md").read_text().partition("[Service]")[2].partition("[Install]")[0]
    assert "OOMPolicy=continue" in unit
    assert int(re.search(r"MemoryMax=(\d+)G", unit)[1]) << 30 >= 4 * LEAST_BYTES
