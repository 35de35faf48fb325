"""Hubs with several processes: workers on one database, files in a bucket, backups."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import sqlalchemy as sa

from consilience.errors import SettingsError
from consilience.files.release import Release
from consilience.files.sealed import Sealed
from consilience.hub import operating as commands
from consilience.hub.api.app import create_app
from consilience.hub.hub import Hub
from consilience.hub.store import Store
from consilience.hub.store.files import Bucket
from consilience.privacy.guarantee import Budget
from consilience.protocol import HEADER, digest, sign_request
from forks import HubProcess, aggregate, allow

CONTRIBUTIONS = "/api/studies/demo/contributions"


def use_bucket(folder: Path, address: str, *, url: str | None = None) -> int:
    with commands.opened(folder, url) as hub:
        return hub.store.use_bucket(address, "operator")


# ------------------------------------------------------------------------------------------ backups


@pytest.mark.parametrize("there", [None, "postgresql"])
def test_a_backup_of_any_database_is_restored_on_any_other(
    world: Any, url: str | None, there: str | None, request: Any, tools: Any
) -> None:
    world.fill(world.add_study(), 2)
    world.combiner.run(at_once=True)
    number, head = commands.backup(world.folder / "hub", world.folder / "copy", url=url)
    other = request.getfixturevalue("postgres").database() if there else None
    length, _ = commands.restore(world.folder / "copy", world.folder / "second", url=other)
    assert length == number + 1
    assert (world.folder / "second" / "hub.sqlite").exists() == (other is None)
    with tools.Client(create_app(tools.quick(world.folder / "second", other))) as client:
        hub = client.app.state.hub
        assert hub.store.audit(after=number - 1, limit=1)[0]["hash"] == head
        assert hub.store.contributions("demo") == world.hub.store.contributions("demo")
        row, path = hub.release_path("demo")
        assert Release.load(path, key=world.hub.key.public).digest == row["digest"]
    if other is not None:
        with pytest.raises(SettingsError, match="has rows of a hub"):
            commands.restore(world.folder / "copy", world.folder / "third", url=other)


# ---------------------------------------------------------------------- room for their connections


def test_workers_that_postgresql_has_no_room_for_are_told_so(postgres: Any, tmp_path: Path) -> None:
    url = postgres.database()
    with closing(Store(tmp_path / "hub", url)) as first, closing(Store(tmp_path, url)) as second:
        assert first.find_shortage() is None
        assert second.find_shortage() is None
        with first.reading() as db:
            db.execute(sa.text("ALTER ROLE hub CONNECTION LIMIT 119"))
            db.commit()
        try:
            said = first.find_shortage()
        finally:
            with first.reading() as db:
                db.execute(sa.text("ALTER ROLE hub CONNECTION LIMIT -1"))
                db.commit()
    assert said is not None
    assert "allows this hub 119 connections, and may be asked for 120" in said
    assert "60 by each of 2 running workers" in said


def test_a_database_in_a_file_has_room_for_any_worker(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        assert store.find_shortage() is None


# ---------------------------------------------------------------------------- what workers agree on


@pytest.mark.parametrize(
    "url", ["postgresql"], indirect=True
)  # SQLite has the key in the database's folder
def test_a_worker_without_the_hubs_key_does_not_start(world: Any, url: str, tools: Any) -> None:
    with pytest.raises(SettingsError, match=r"Copy hub\.key"):
        Hub(tools.quick(world.folder / "stranger", url))
    assert not (world.folder / "stranger" / "hub.key").exists()
    (world.folder / "other").mkdir()
    hub = Hub(
        tools.quick(world.folder / "other")
    )  # has a key of its own, from a database of its own
    hub.close()
    with pytest.raises(SettingsError, match=r"Copy hub\.key"):
        Hub(tools.quick(world.folder / "other", url))
    hub = Hub(tools.quick(world.second_folder(), url))
    assert hub.key.public == world.hub.key.public
    hub.close()


@pytest.mark.parametrize(
    "url", ["postgresql"], indirect=True
)  # SQLite has the ledger in the database's folder
def test_a_worker_without_the_hubs_ledger_draws_nothing(world: Any, url: str, tools: Any) -> None:
    noisy = 'name = "Average"\nepsilon = 1.0\nweights = "equal"'
    world.fill(world.add_study(tools.study_text(hub="trusted", aggregator=noisy)), 2)
    allow(world.folder / "hub", "demo", Budget(epsilon=3.0), url=url)
    folder = world.second_folder()
    shutil.copytree(world.folder / "hub" / "files", folder / "files")
    for ask in (
        lambda: allow(folder, "demo", Budget(epsilon=3.0), url=url),
        lambda: aggregate(folder, "demo", request="one", url=url),
    ):
        with pytest.raises(SettingsError, match="not the one that was charged so far"):
            ask()
    assert aggregate(world.folder / "hub", "demo", request="one", url=url)["sequence"] == 1
    # A ledger that was put back to an earlier state is noticed, too.
    kept = folder / "kept.ledger"
    world.hub.ledger.backup(kept)
    assert aggregate(world.folder / "hub", "demo", request="two", url=url)["sequence"] == 2
    for path in (world.folder / "hub").glob("hub.ledger*"):
        path.unlink()
    shutil.copy(kept, world.folder / "hub" / "hub.ledger")
    with pytest.raises(SettingsError, match="not the one that was charged so far"):
        aggregate(world.folder / "hub", "demo", request="three", url=url)


# ------------------------------------------------------------------------------------------- bucket

IN_FILES = pytest.param(
    {"small_bytes": -1}, id="in files"
)  # what is in the database needs no bucket


@pytest.mark.parametrize("world", [IN_FILES], indirect=True)
def test_files_in_a_bucket_serve_workers_on_several_machines(
    world: Any, url: str | None, bucket: Any, tools: Any
) -> None:
    study = world.add_study()
    wards = world.fill(study, 2)
    assert use_bucket(world.folder / "hub", "s3://shared/hubs/one", url=url) == 2
    kept = {one.key.removeprefix("hubs/one/") for one in bucket.objects.all()}
    assert kept == {row["sha256"] for row in world.hub.store.contributions("demo")}
    folder = world.second_folder() if url is not None else world.folder / "hub"
    with tools.Client(
        create_app(tools.quick(folder, url, small_bytes=-1))
    ) as client:  # a worker that has seen none of it
        second = tools.World(client, world.folder)
        second.wards = world.wards
        assert isinstance(second.hub.store.files, Bucket)
        second.submit(wards[0], wards[0].train(study, sequence=2))
        second.combiner.run(at_once=True)
        assert second.hub.store.release("demo")["n_sites"] == 2
        assert len(list(bucket.objects.all())) == 4
        row, path = second.hub.release_path("demo")
        path.unlink()  # a copy; the next reader fetches another
        assert second.call(wards[1], "GET", "/api/studies/demo/release").status_code == 200
        second.hub.store.verify()
        path.unlink()
        bucket.put_object(Key=f"hubs/one/{row['sha256']}", Body=b"something else")
        with pytest.raises(SettingsError, match="missing or damaged"):
            second.hub.store.verify()
        assert list(second.hub.store.files.incoming.iterdir()) == []


@pytest.mark.parametrize("sqlite_world", [IN_FILES], indirect=True)
def test_what_no_row_names_is_swept_from_the_bucket_and_nothing_of_others(
    sqlite_world: Any, bucket: Any
) -> None:
    world = sqlite_world
    world.fill(world.add_study(), 1)
    bucket.put_object(Key="a/notes.txt", Body=b"not a hub's")
    use_bucket(world.folder / "hub", "s3://shared/a")
    bucket.put_object(Key=f"a/{'0' * 64}", Body=b"left by a hub that died between file and row")
    files = Bucket(world.folder / "hub" / "files", "s3://shared/a")
    named = {row["sha256"] for row in world.hub.store.contributions("demo")}
    assert files.sweep(named, 3600.0) == 0  # it may be on its way to a row
    assert files.sweep(named, -1.0) == 1
    assert {one.key for one in bucket.objects.all()} == {
        "a/notes.txt",
        *(f"a/{name}" for name in named),
    }
    with pytest.raises(SettingsError, match="files of another hub"):
        files.check(set())


@pytest.mark.parametrize("sqlite_world", [IN_FILES], indirect=True)
def test_a_bucket_that_cannot_be_used_changes_nothing(
    sqlite_world: Any, bucket: Any, tools: Any
) -> None:
    world = sqlite_world
    study = world.add_study()
    (ward,) = world.fill(study, 1)
    for wrong, words in (
        ("s3://absent", "cannot be used"),
        ("https://shared", "Got 'https"),
        ("s3://x", "Got"),
    ):
        with pytest.raises(SettingsError, match=words):
            use_bucket(world.folder / "hub", wrong)
    assert world.hub.store.remembered("bucket") is None
    use_bucket(world.folder / "hub", "s3://shared")
    with tools.Client(create_app(tools.quick(world.folder / "hub", small_bytes=-1))) as client:
        again = tools.World(client, world.folder)
        bucket.objects.all().delete()
        bucket.delete()
        answer = again.submit(ward, ward.train(study, sequence=2))
        assert tools.code(answer) == "unavailable"
        assert len(again.hub.store.contributions("demo")) == 1  # no row without its file
        boto3.client("s3").create_bucket(Bucket="shared")
        assert again.submit(ward, ward.train(study, sequence=2)).status_code == 201


@pytest.mark.parametrize("sqlite_world", [IN_FILES], indirect=True)
def test_a_backup_of_a_hub_with_a_bucket_is_whole_by_itself(
    sqlite_world: Any, bucket: Any, tools: Any
) -> None:
    world = sqlite_world
    world.fill(world.add_study(), 2)
    use_bucket(world.folder / "hub", "s3://shared/a")
    commands.backup(world.folder / "hub", world.folder / "copy")
    bucket.objects.all().delete()
    commands.restore(world.folder / "copy", world.folder / "second")
    hub = Hub(tools.quick(world.folder / "second"))
    assert not isinstance(hub.store.files, Bucket)
    hub.store.verify()
    hub.close()


# ---------------------------------------------------------------------------- two workers, one dies


def _crowd(world: Any, url: str, tools: Any, n_sites: int, n_threads: int) -> None:
    """Submit through two workers, one of which is killed: every change is combined once."""
    study = world.add_study()
    wards = [world.ward(f"site {i}") for i in range(n_sites)]
    keys, trained = {ward.name: ward.key for ward in wards}, wards[0].train(study).sealed
    facts = {name: value for name, value in trained.facts.items() if name not in ("key", "tensors")}
    bodies = {
        name: Sealed.seal("contribution", {**facts, "site": name}, trained.tensors, key).to_bytes()
        for name, key in keys.items()
    }
    workers = [HubProcess(folder, url) for folder in (world.folder / "hub", world.second_folder())]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.wait()
    half, turn, done = threading.Event(), cycle(range(2)), []

    def submit(name: str) -> int:
        until = time.monotonic() + 120
        with httpx.Client(timeout=30) as client:
            while (
                time.monotonic() < until
            ):  # as a site behind a proxy: the other worker after a failure
                address = workers[next(turn)].address
                header = sign_request(
                    keys[name], world.hub.key.public, "POST", CONTRIBUTIONS, digest(bodies[name])
                )
                try:
                    answer = client.post(
                        address + CONTRIBUTIONS, content=bodies[name], headers={HEADER: header}
                    )
                except httpx.TransportError:
                    continue
                if answer.status_code == 503:
                    continue
                done.append(name)
                if len(done) >= n_sites // 2:
                    half.set()
                return int(answer.status_code)
        raise AssertionError("no worker answered")

    with ThreadPoolExecutor(n_threads) as pool:
        answers = [pool.submit(submit, name) for name in bodies]
        assert half.wait(120)
        workers[0].kill()
        assert {answer.result() for answer in answers} <= {
            200,
            201,
        }  # 200: it had stored the file, and died before it answered
    until = time.monotonic() + 60
    while world.hub.store.due() and time.monotonic() < until:
        time.sleep(0.05)
    workers[1].kill()
    for worker in workers:
        worker.end()
    hub = Hub(tools.quick(world.folder / "hub", url))
    rows = hub.store.contributions("demo")
    assert sorted(row["site"] for row in rows) == sorted(bodies)
    assert {row["state"] for row in rows} == {"accepted"}
    combined = [row["change"] for row in hub.store.releases("demo")]
    assert len(set(combined)) == len(combined)  # no change twice
    assert max(combined) == n_sites == hub.store.release("demo")["n_sites"]
    hub.store.verify()
    hub.close()


def test_two_workers_combine_every_change_once_while_one_is_killed(
    postgres: Any, tmp_path: Any, bucket: Any, tools: Any
) -> None:
    url = postgres.database()
    with tools.Client(create_app(tools.quick(tmp_path / "hub", url))) as client:
        use_bucket(tmp_path / "hub", "s3://shared/demo", url=url)
        _crowd(tools.World(client, tmp_path), url, tools, 24, 12)


@pytest.mark.soak
def test_two_workers_bear_five_hundred_submissions_at_once(
    postgres: Any, tmp_path: Any, bucket: Any, tools: Any
) -> None:
    url = postgres.database()
    with tools.Client(create_app(tools.quick(tmp_path / "hub", url))) as client:
        use_bucket(tmp_path / "hub", "s3://shared/demo", url=url)
        _crowd(tools.World(client, tmp_path), url, tools, 500, 500)
