"""What the hub stores: rows and files that survive a kill, one audit chain, reliable copies."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa

from consilience.errors import SettingsError
from consilience.files.sealed import SigningKey
from consilience.hub import operating as commands
from consilience.hub.api.app import create_app
from consilience.hub.auth import new_token
from consilience.hub.hub import Hub
from consilience.hub.store import Store, hashed, now
from consilience.hub.store.files import Files
from consilience.privacy.guarantee import Budget
from consilience.protocol import HEADER, Refusal, digest, sign_request
from forks import HubProcess, aggregate, allow, restart, settle


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Any:
    found = Store(tmp_path / "hub", url)
    yield found
    found.close()


def test_a_worker_opens_as_many_connections_as_the_page_says(tmp_path: Path, postgres: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    (most,) = re.findall(r"A worker opens at most (\d+) connections", page)
    store = Store(tmp_path / "hub", postgres.database())
    (engine,) = set(store._engines)
    engine.pool._timeout = 0.1  # in place of half a minute
    with ExitStack() as held:
        for _ in range(int(most)):
            held.enter_context(store.reading())
        with pytest.raises(sa.exc.TimeoutError), store.reading():
            pass
    store.close()


def test_writes_that_wait_together_are_committed_together_and_fail_alone(store: Store) -> None:
    results: list[Any] = [None] * 60

    def work(i: int) -> None:
        def insert(db: sa.Connection) -> int:
            db.execute(
                sa.text("INSERT INTO settings (name, value) VALUES (:name, 'x')"),
                {"name": f"n{i // 2}"},
            )
            return i

        try:
            results[i] = store.write(insert)
        except sa.exc.IntegrityError:
            results[i] = "twice"

    threads = [threading.Thread(target=work, args=(i,)) for i in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("twice") == 30
    with store.reading() as db:
        assert db.execute(sa.text("SELECT count(*) FROM settings WHERE value = 'x'")).scalar() == 30


def test_any_edit_of_the_audit_log_is_noticed(store: Store) -> None:
    for i in range(5):
        store.log("operator", "something", None, number=i)
    assert store.verify()[0] == 5
    edits = [
        "UPDATE audit SET actor = 'nobody' WHERE number = 3",
        "UPDATE audit SET facts = '{}' WHERE number = 3",
        "DELETE FROM audit WHERE number = 3",
        "DELETE FROM audit WHERE number = 5",
        "UPDATE audit SET number = 9 WHERE number = 5",
    ]
    for edit in edits:

        def change(db: sa.Connection, edit: str = edit) -> None:
            kept = db.execute(sa.text("SELECT * FROM audit ORDER BY number")).mappings().all()
            db.execute(sa.text(edit))
            found = [
                dict(row)
                for row in db.execute(sa.text("SELECT * FROM audit ORDER BY number")).mappings()
            ]
            assert found != [dict(row) for row in kept]

        copy = store.audit(limit=100)
        store.write(change)
        with pytest.raises(SettingsError, match="audit log"):
            store.verify()

        def mend(db: sa.Connection, copy: Any = copy) -> None:
            from consilience.files.sealed import canonical
            from consilience.hub.store.tables import audit

            db.execute(audit.delete())
            db.execute(audit.insert(), [{**row, "facts": canonical(row["facts"])} for row in copy])

        store.write(mend)
        assert store.verify()[0] == 5


def test_a_damaged_file_is_noticed(store: Store) -> None:
    arrived, content = store.files.new(), b"public records"
    arrived.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    path = store.files.keep(arrived, sha256)
    store.add_file(sha256, len(content), "demo", "x.csv", "operator")
    store.verify()
    path.write_bytes(b"other records")
    with pytest.raises(SettingsError, match="damaged"):
        store.verify()


def test_what_no_row_names_is_swept_at_the_next_start(tmp_path: Path, url: str | None) -> None:
    store = Store(tmp_path / "hub", url)
    kept, orphan = b"kept", b"orphan"
    for content in (kept, orphan):
        arrived = store.files.new()
        arrived.write_bytes(content)
        store.files.keep(arrived, hashlib.sha256(content).hexdigest())
    store.add_file(hashlib.sha256(kept).hexdigest(), 4, "demo", "x.csv", "operator")
    store.files.new().write_bytes(b"an upload that broke off")
    store.close()
    young = Store(tmp_path / "hub", url)  # another worker may be about to commit the row
    assert young.swept == 0
    young.close()
    late = Store(tmp_path / "hub", url, sweep_after=-1)
    assert late.swept == 2
    assert [path.read_bytes() for path in (tmp_path / "hub" / "files").glob("*/*")] == [kept]
    late.close()


def test_a_newer_database_is_not_touched(tmp_path: Path, url: str | None) -> None:
    store = Store(tmp_path / "hub", url)
    store.write(lambda db: db.execute(sa.text("INSERT INTO versions VALUES (99, 'later')")))
    store.close()
    with pytest.raises(SettingsError, match="version 99"):
        Store(tmp_path / "hub", url)
    with pytest.raises(SettingsError, match="mysql"):
        Store(tmp_path / "hub", "mysql://x/y")


def test_an_older_database_is_brought_up_to_date(
    tmp_path: Path, url: str | None, tools: Any
) -> None:
    store = Store(tmp_path / "hub", url)
    for statement in (
        "DROP TABLE bodies",
        "DROP TABLE drafts",
        "DROP INDEX sites_by_key",
        "DELETE FROM versions WHERE version > 1",
    ):
        store.write(lambda db, statement=statement: db.execute(sa.text(statement)))
    store.close()
    with tools.Client(create_app(tools.quick(tmp_path / "hub", url))) as client:
        world = tools.World(client, tmp_path)
        world.fill(world.add_study(), 2)
        world.combiner.run(at_once=True)
        assert world.hub.store.release("demo")["n_sites"] == 2
        indexes = {
            index["name"] for index in sa.inspect(world.hub.store._engines[0]).get_indexes("sites")
        }
        assert indexes == {"sites_by_key"}


def test_a_contribution_is_kept_in_the_database_if_it_is_small_and_in_a_file_if_not(
    world: Any, tools: Any
) -> None:
    study = world.add_study()
    (ward,) = world.fill(study, 1)
    (row,) = world.hub.store.contributions("demo")
    kept = world.hub.store.content(row["sha256"])
    assert isinstance(kept, bytes)
    assert hashlib.sha256(kept).hexdigest() == row["sha256"]
    settings = replace(world.hub.settings, small_bytes=len(kept) // 2)
    with tools.Client(create_app(settings)) as client:
        again = tools.World(client, world.folder)
        again.submit(ward, ward.train(study, sequence=2))
        newest = again.hub.store.contributions("demo")[-1]
        assert again.hub.store.content(newest["sha256"]).stat().st_size == newest["size"]
        again.hub.store.verify()
        again.hub.store.write(
            lambda db: db.execute(sa.text("UPDATE bodies SET content = :x"), {"x": b"x"})
        )
        with pytest.raises(SettingsError, match="damaged"):
            again.hub.store.verify()


def test_a_kept_file_is_whole_under_its_digest(tmp_path: Path) -> None:
    files = Files(tmp_path)
    arrived = files.new()
    arrived.write_bytes(b"abc")
    sha256 = hashlib.sha256(b"abc").hexdigest()
    assert files.keep(arrived, sha256) == tmp_path / sha256[:2] / sha256[2:]
    assert not arrived.exists()


def test_nonces_are_forgotten_when_their_requests_have_expired(
    store: Store, monkeypatch: Any
) -> None:
    store.spend_nonce("k", "a")
    with pytest.raises(Refusal):
        store.spend_nonce("k", "a")
    store.write(lambda db: db.execute(sa.text("UPDATE nonces SET expires = '2000-01-01'")))
    monkeypatch.setattr("time.monotonic", lambda: 1e12)  # they are looked for once a minute
    store.spend_nonce("k", "b")
    with store.reading() as db:
        assert db.execute(sa.text("SELECT count(*) FROM nonces")).scalar() == 1


def test_a_backup_is_whole_while_sites_submit_and_grants_nothing_old(
    sqlite_world: Any, tools: Any
) -> None:
    world = sqlite_world
    study = world.add_study()
    wards = world.fill(study, 2)
    world.combiner.run(at_once=True)
    invitation = world.invitation()
    done = threading.Event()

    def submit() -> None:
        sequence = 2
        while not done.is_set():
            world.submit(wards[0], wards[0].train(study, sequence=sequence))
            sequence += 1

    thread = threading.Thread(target=submit)
    thread.start()
    number, head = commands.backup(world.folder / "hub", world.folder / "copy")
    done.set()
    thread.join()
    with pytest.raises(SettingsError, match="exists"):
        commands.backup(world.folder / "hub", world.folder / "copy")
    restored, _ = commands.restore(world.folder / "copy", world.folder / "second")
    assert restored == number + 1
    hub = Hub(tools.quick(world.folder / "second"))
    entries = hub.store.audit(limit=1000)
    assert entries[number - 1]["hash"] == head
    assert hub.key.public == world.hub.key.public
    assert hub.store.release("demo") is not None
    with pytest.raises(Refusal) as refused:
        hub.store.enrol(hashed(invitation), "late", "0" * 64, "0" * 32, fetch_only=False)
    assert refused.value.code == "invitation"
    hub.close()
    with pytest.raises(SettingsError, match="not empty"):
        commands.restore(world.folder / "copy", world.folder / "second")


def test_a_restored_hub_draws_no_noise_until_a_budget_is_allowed_again(
    sqlite_world: Any, tools: Any
) -> None:
    world = sqlite_world
    noisy = 'name = "Average"\nepsilon = 1.0\nweights = "equal"'
    world.fill(world.add_study(tools.study_text(hub="trusted", aggregator=noisy)), 2)
    allow(world.folder / "hub", "demo", Budget(epsilon=3.0))
    commands.backup(world.folder / "hub", world.folder / "copy")
    commands.restore(world.folder / "copy", world.folder / "second")
    with pytest.raises(SettingsError, match="restored from a backup"):
        aggregate(world.folder / "second", "demo", request="one")
    allow(world.folder / "second", "demo", Budget(epsilon=2.0))
    assert aggregate(world.folder / "second", "demo", request="one")["sequence"] == 1


def test_a_restored_hub_knows_no_link_of_a_draft_and_no_address_of_an_account(
    sqlite_world: Any,
) -> None:
    store, folder = sqlite_world.hub.store, sqlite_world.folder
    draft = store.add_draft("ann", {"study": {}}, "ann")
    store.share_draft(draft, "the hash of a token", "ann")
    new_token(store, "ann", hours=1, kind="session", address="192.0.2.1")
    commands.backup(folder / "hub", folder / "copy")
    store.share_draft(draft, None, "ann")  # the link is ended after the backup
    commands.restore(folder / "copy", folder / "second")
    with commands.opened(folder / "second") as hub:
        assert hub.store.draft(draft)["link"] is None
        assert not hub.store.knows("ann", "192.0.2.1")


def test_the_operators_commands_work_beside_a_running_hub(
    world: Any, url: str | None, tools: Any
) -> None:
    folder = world.folder / "hub"
    public = tools.write_csv(world.folder / "public.csv", tools.table(50, 3))
    (world.folder / "study.toml").write_text(
        tools.study_text(aggregator='name = "PublicBlend"', public=public)
    )
    row = commands.add_study(folder, world.folder / "study.toml", url=url)
    study = world.hub.study("demo")[1]
    assert row["digest"] == study.digest
    with commands.opened(folder, url) as hub:
        code, expires = hub.invite("demo", "operator", site="north")
    assert expires > now()
    ward = tools.Ward("north", world.folder)
    body = json.dumps({"invitation": code, "site": "north"}).encode()
    assert world.call(ward, "POST", "/api/enrolments", body).status_code == 201
    world.submit(ward, ward.train(study))
    with pytest.raises(SettingsError, match="1 are in use"):
        aggregate(folder, "demo", url=url)
    world.fill(study, 2)
    assert aggregate(folder, "demo", url=url)["n_sites"] == 3
    with commands.opened(folder, url) as hub:
        assert hub.store.verify()[0] > 5
    with pytest.raises(SettingsError, match="certificate"):
        commands.serve(tools.quick(folder, url), host="0.0.0.0")


# ------------------------------------------------------------------------------------------ kill -9


def _survive(
    folder: Path,
    url: str | None,
    tools: Any,
    *,
    n_kills: int,
    n_submissions: int,
    database: Any = None,
) -> None:
    """Submit while the hub and the database are killed; compare the answers with what was kept."""
    text, wards = (
        tools.study_text(min_sites=2),
        [tools.Ward(f"ward {i}", folder, seed=i) for i in range(5)],
    )
    hub = Hub(tools.quick(folder / "hub", url))
    hub.add_study(text, "operator")
    study = hub.study("demo")[1]
    for ward in wards:
        code, _ = hub.invite("demo", "operator")
        hub.enrol(code=code, site=ward.name, key=ward.key.public, nonce=os.urandom(16).hex())
    hub_key = hub.key.public
    hub.close()
    per_ward = n_submissions // len(wards)
    files = {
        (ward.name, sequence): ward.train(study, sequence=sequence)
        for ward in wards
        for sequence in range(1, per_ward + 1)
    }
    generator = np.random.default_rng(0)
    server, answered, go = HubProcess(folder / "hub", url), set(), threading.Semaphore(0)
    server.start()
    server.wait()
    path = "/api/studies/demo/contributions"

    def submit(ward: Any) -> None:
        with httpx.Client(base_url=server.address, timeout=10) as client:
            submit_all(ward, client)

    def submit_all(ward: Any, client: httpx.Client) -> None:
        for sequence in range(1, per_ward + 1):
            go.acquire()
            contribution = files[ward.name, sequence]
            body = contribution.sealed.to_bytes()
            while True:  # as a site does: the same file again until the hub has answered
                header = {HEADER: sign_request(ward.key, hub_key, "POST", path, digest(body))}
                try:
                    answer = client.post(path, content=body, headers=header)
                except httpx.TransportError:
                    time.sleep(0.02)
                    continue
                if answer.status_code == 503 or answer.status_code == 429:
                    time.sleep(0.02)
                    continue
                assert answer.status_code in (200, 201), answer.text
                assert answer.json()["digest"] == contribution.digest
                answered.add(contribution.digest)
                break

    threads = [threading.Thread(target=submit, args=(ward,)) for ward in wards]
    for thread in threads:
        thread.start()
    released = 0
    for kills in range(n_kills):
        while (
            released < (kills + 1) * n_submissions // n_kills
        ):  # so that each kill meets submissions under way
            go.release()
            released += 1
        time.sleep(float(generator.random()) * 0.1)
        if database is not None and kills % 5 == 4:
            os.kill(database.pid(), signal.SIGKILL)
            restart(database)
        server.kill()
        server.start()
        server.wait()
    for thread in threads:
        thread.join()
    settle(folder / "hub", url)
    server.kill()
    server.end()
    hub = Hub(tools.quick(folder / "hub", url, sweep_after_seconds=-1.0))
    rows = hub.store.contributions("demo")
    assert len(answered) == len(wards) * per_ward
    assert {
        row["digest"] for row in rows
    } == answered  # nothing lost, and nothing that was not answered in the end
    assert len({row["digest"] for row in rows}) == len(rows)  # nothing doubled
    newest = {row["site"]: row["sequence"] for row in rows if row["state"] == "accepted"}
    assert newest == {ward.name: per_ward for ward in wards}
    hub.store.verify()
    release = hub.store.release("demo")
    assert release is not None
    assert release["n_sites"] == len(wards)
    changes = [row["change"] for row in hub.store.releases("demo")]
    assert len(set(changes)) == len(changes)
    assert changes[0] == hub.store.study("demo")["changes"] == len(rows)
    contents = [hub.store.content(row["sha256"]) for row in rows]
    n_kept = sum(isinstance(one, bytes) for one in contents) + len(
        list((folder / "hub" / "files").glob("*/*"))
    )
    assert n_kept == len(rows) + len(changes)
    hub.close()


def test_a_killed_hub_loses_and_doubles_nothing(
    tmp_path: Path, url: str | None, tools: Any
) -> None:
    _survive(tmp_path, url, tools, n_kills=6, n_submissions=20)


@pytest.mark.soak
def test_200_kills_during_50_submissions_on_sqlite(tmp_path: Path, tools: Any) -> None:
    _survive(tmp_path, None, tools, n_kills=200, n_submissions=50)


@pytest.mark.soak
def test_200_kills_of_hub_and_database_during_50_submissions(
    tmp_path: Path, durable_postgres: Any, tools: Any
) -> None:
    url = durable_postgres.database()
    _survive(tmp_path, url, tools, n_kills=200, n_submissions=50, database=durable_postgres)


def test_a_hub_over_https_is_a_hub(tmp_path: Path, tools: Any) -> None:
    """Serve with a certificate made here, and read the key over a connection that checks it."""
    pytest.importorskip("cryptography")
    from datetime import UTC, datetime, timedelta
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hub")])
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    begin = datetime.now(UTC) - timedelta(hours=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=1))
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    private.write_bytes(key.private_bytes(*form))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (
        "import sys; from pathlib import Path\n"
        "from consilience.hub.hub import Settings\n"
        "from consilience.hub.operating import serve\n"
        "_, folder, port, cert, key = sys.argv\n"
        "serve(Settings(Path(folder)), port=int(port), cert=cert, key=key)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "hub"), str(port), str(cert), str(private)]
    )
    try:
        import ssl

        trust = ssl.create_default_context(cafile=str(cert))
        until = time.monotonic() + 60
        while True:
            try:
                answer = httpx.get(f"https://127.0.0.1:{port}/api/hub", verify=trust, timeout=5)
                break
            except httpx.TransportError:
                assert time.monotonic() < until
                time.sleep(0.1)
        hub = Hub(tools.quick(tmp_path / "hub"))
        assert (
            answer.json()["key"]
            == hub.key.public
            == SigningKey.load(tmp_path / "hub" / "hub.key").public
        )
        hub.close()
    finally:
        process.terminate()
        assert process.wait(timeout=30) is not None
