"""The hub's doors: who is asked before anything is given, what waits in vain, what is written."""

import asyncio
import json
import logging
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from consilience.errors import SettingsError
from consilience.files.sealed import SigningKey
from consilience.hub import auth
from consilience.hub.api.app import create_app
from consilience.hub.api.requests import MOST_STRANGE
from consilience.hub.api.server import LineLimit
from consilience.hub.auth import Rate, hash_password
from consilience.hub.operating import PORT, serve
from consilience.hub.store import Store
from consilience.protocol import HEADER, Refusal, digest, rotation_message, sign_request
from forks import HubProcess

PASSWORD = "correct horse battery"
CONTRIBUTIONS = "/api/studies/demo/contributions"
DOCS = Path(__file__).parents[2] / "docs"


# ------------------------------------------------------------ who is asked before anything is given


def test_no_route_takes_more_than_a_little_from_a_stranger(sqlite_world: Any, tools: Any) -> None:
    """Every address, every method: an endless body is refused before much of it was taken."""
    world = sqlite_world
    world.add_study()
    routes = {
        (method, route.path)
        for route in world.app.routes
        for method in getattr(route, "methods", None) or ()
    }
    assert {("POST", "/studies/{study}/files/{file}"), ("POST", "/new-study")} <= routes
    for method, path in sorted(routes):
        for name, value in (("study", "demo"), ("file", "x.csv"), ("site", "north")):
            path = path.replace(f"{{{name}}}", value)
        taken = []

        async def endless(taken: list[int] = taken) -> Any:
            for _ in range(1000):
                taken.append(1024)
                yield b"x" * 1024

        stranger = sign_request(SigningKey.generate(), world.hub.key.public, method, path, "0" * 64)
        answer = world.client.request(
            method, path, content=endless(), headers={HEADER: stranger}, follow_redirects=False
        )
        assert sum(taken) <= MOST_STRANGE + 1024, (method, path)
        assert answer.status_code < 500, (method, path)
    assert list(world.hub.store.files.incoming.iterdir()) == []


def test_a_small_file_takes_no_place_before_its_sender_is_known(
    sqlite_world: Any, tools: Any, monkeypatch: Any
) -> None:
    world = sqlite_world
    study = world.add_study()
    ward = world.ward("north")
    body = ward.train(study).sealed.to_bytes()
    assert len(body) < world.hub.settings.small_bytes
    senders = []
    place = auth.Uploads.place

    def watched(uploads: Any, sender: str) -> Any:
        senders.append(sender)
        return place(uploads, sender)

    monkeypatch.setattr(auth.Uploads, "place", watched)
    for key in (SigningKey.generate(), world.hub.key):
        assert tools.code(world.submit(ward, body, key=key)) == "not-authenticated"
    assert senders == []
    assert world.submit(ward, body).status_code == 201
    assert senders == ["demo/north"]


def test_a_sender_holds_few_places_and_waits_briefly_for_one() -> None:
    async def main() -> None:
        uploads = auth.Uploads(most=3, each=2, wait_seconds=0.05)
        async with uploads.place("a"), uploads.place("a"):
            with pytest.raises(auth.Refusal, match="2 files"):
                async with uploads.place("a"):
                    pass
            async with uploads.place("b"):
                with pytest.raises(auth.Refusal) as refused:
                    async with uploads.place("c"):
                        pass
                assert refused.value.code == "unavailable"
        async with uploads.place("a"), uploads.place("c"):
            pass

    asyncio.run(main())


@pytest.mark.parametrize(
    "sqlite_world", [{"patience_seconds": 0.2, "least_rate": 1e6}], indirect=True
)
def test_a_body_that_trickles_in_is_refused(sqlite_world: Any, tools: Any) -> None:
    world = sqlite_world
    world.add_study()
    ward = world.ward("north")

    async def trickle() -> Any:
        for _ in range(100):
            yield b"x"
            await asyncio.sleep(0.02)

    header = sign_request(ward.key, world.hub.key.public, "POST", CONTRIBUTIONS, "0" * 64)
    for length in ({}, {"content-length": "100"}):  # on disk and in memory
        began = time.monotonic()
        answer = world.client.post(
            CONTRIBUTIONS, content=trickle(), headers={HEADER: header, **length}
        )
        assert tools.code(answer) == "too-slow"
        assert time.monotonic() - began < 1.5
    assert tools.code(world.client.post("/api/sessions", content=trickle())) == "too-slow"


def test_a_form_costs_time_in_proportion_to_its_length(sqlite_world: Any) -> None:
    """300 KB of parts cost six seconds of processor time once."""
    from starlette.requests import Request

    from consilience.hub.dashboard.visits import read_form

    kind = [(b"content-type", b"multipart/form-data; boundary=b")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": kind})
    hostile = (
        b"--b\r\n" * 60_000,
        b"--b\r\n" + b"a: b\r\n" * 50_000,
        b'--b\r\ncontent-disposition: form-data; name="' + b"a" * 300_000,
        b"--b\r\ncontent-disposition:" + b' name="' * 50_000,
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n' * 5_000,
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + b"\r\n--c" * 60_000,
    )
    for content in hostile:
        began = time.process_time()
        with suppress(Refusal):
            read_form(request, content)
        assert time.process_time() - began < 0.3
    honest = b'--b\r\nContent-Disposition: form-data; name="token"\r\n\r\nabc\r\n--b\r\n'
    honest += (
        b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n\r\ny\r\n--b--'
    )
    assert read_form(request, honest) == {"token": "abc", "file": "x\r\n\r\ny"}
    answer = sqlite_world.client.post("/login", content=b"a" * 300_000)
    assert answer.status_code == 413


# --------------------------------------------------------------------------------------- logging in


@pytest.fixture(scope="module")
def password() -> str:
    return hash_password(PASSWORD)


def _log_in(world: Any, name: str, password: str) -> Any:
    return world.client.post("/api/sessions", json={"name": name, "password": password})


@pytest.mark.parametrize("sqlite_world", [{"by_account": Rate(1e-6, 3)}], indirect=True)
def test_an_account_has_a_limit_of_its_own(
    sqlite_world: Any, tools: Any, password: str, monkeypatch: Any
) -> None:
    world = sqlite_world
    for name in ("bea", "cyd"):
        world.hub.store.add_account(name, password, "operator")
    assert _log_in(world, "bea", PASSWORD).status_code == 200
    from_elsewhere = "consilience.hub.api.routes.address_of"
    guesses = []
    for i in range(4):  # each from another address
        monkeypatch.setattr(from_elsewhere, lambda _, i=i: f"10.0.0.{i}")
        guesses.append(tools.code(_log_in(world, "bea", "wrong")))
    assert guesses == ["not-authenticated", "not-authenticated", "too-many", "too-many"]
    assert _log_in(world, "cyd", PASSWORD).status_code == 200
    monkeypatch.undo()  # where she has logged in before, nobody keeps her out
    assert _log_in(world, "bea", PASSWORD).status_code == 200


@pytest.mark.parametrize("sqlite_world", [{"by_note": Rate(1e-6, 2)}], indirect=True)
def test_failed_logins_and_refused_files_are_in_the_audit_log_and_do_not_fill_it(
    sqlite_world: Any, tools: Any, password: str, monkeypatch: Any
) -> None:
    world = sqlite_world
    world.hub.store.add_account("bea", password, "operator")
    world.add_study()
    ward = world.ward("north")
    for _ in range(3):
        assert tools.code(_log_in(world, "bea", "wrong")) == "not-authenticated"
        assert tools.code(_log_in(world, "hunter2", "bea")) == "not-authenticated"
        assert tools.code(world.submit(ward, b"no contribution")) == "rejected"
    entries = world.hub.store.audit(limit=1000)
    failed = [(one["actor"], one["facts"]) for one in entries if one["action"] == "login failed"]
    address = {"address": "127.0.0.1"}
    assert failed == [("coordinator:bea", address), ("stranger", address)] * 2
    assert "hunter2" not in str(entries)
    refused = [one for one in entries if one["action"] == "contribution refused"]
    facts = {"code": "rejected", "sha256": digest(b"no contribution")}
    assert [(one["actor"], one["study"], one["facts"]) for one in refused] == [
        ("site:north", "demo", facts)
    ] * 2
    clock = [0.0]  # writing an entry takes as long as the machine is busy
    monkeypatch.setattr(auth.time, "monotonic", lambda: clock[0])
    notes = auth.Notes(world.hub.store, Rate(1, 1))
    for _ in range(5):
        notes.add("site:north", "contribution refused", "demo")
    clock[0] = 1.0
    notes.add("site:north", "contribution refused", "demo")
    monkeypatch.undo()
    assert world.hub.store.audit(limit=1000)[-1]["facts"] == {"left out before": 4}
    world.hub.store.verify()


def test_a_password_is_stored_with_its_cost_and_old_hashes_still_fit(monkeypatch: Any) -> None:
    old = (
        "scrypt:c2FsdHNhbHRzYWx0c2FsdHNh:"  # as version 0.1 wrote it
        + auth._scrypt(PASSWORD, b"saltsaltsaltsaltsa", (2**15, 8, 3))
    )
    assert auth.fits_password(PASSWORD, old)
    assert not auth.fits_password("wrong", old)
    stored = hash_password(PASSWORD)
    assert stored.startswith("scrypt:32768:8:3:")
    monkeypatch.setattr(auth, "_COST", (2**10, 8, 1))  # a later version with another cost
    assert auth.fits_password(PASSWORD, stored)
    assert not auth.fits_password(PASSWORD, old)
    assert not auth.fits_password(PASSWORD, "scrypt:none")


def test_guesses_leave_threads_to_others(sqlite_world: Any, monkeypatch: Any) -> None:
    """Passwords are checked one after the other; those that wait take few of the threads."""
    world, gate = sqlite_world, threading.Event()
    monkeypatch.setattr(auth, "fits_password", lambda *_: gate.wait(30) and False)
    logins = world.app.state.logins
    refused: list[str] = []

    def guess() -> None:
        try:
            logins.log_in("bea", "x", "10.0.0.1", hours=1)
        except auth.Refusal as refusal:
            refused.append(refusal.code)

    threads = [threading.Thread(target=guess) for _ in range(20)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(refused) < 20 - auth.MOST_GUESSES and time.monotonic() < until:
        time.sleep(0.01)
    assert refused == ["too-many"] * (20 - auth.MOST_GUESSES)
    gate.set()
    for thread in threads:
        thread.join()


# -------------------------------------------------------------------------- what strangers are told


def test_metrics_are_for_this_machine_and_for_those_with_a_token(
    tmp_path: Path, tools: Any, monkeypatch: Any
) -> None:
    settings = tools.quick(tmp_path / "hub", metrics_token="a secret")
    with tools.Client(create_app(settings)) as client:
        world = tools.World(client, tmp_path)
        assert client.get("/metrics").status_code == 200
        passed_on = {"x-forwarded-for": "127.0.0.1"}  # by a proxy that the hub was not told of
        assert tools.code(client.get("/metrics", headers=passed_on)) == "not-authenticated"
        monkeypatch.setattr("consilience.hub.api.requests.address_of", lambda _: "10.0.0.1")
        assert tools.code(client.get("/metrics")) == "not-authenticated"
        for token, status in (("a secret", 200), ("another", 401), ("", 401)):
            bearer = {"authorization": f"Bearer {token}"}
            assert client.get("/metrics", headers=bearer).status_code == status
        assert client.get("/metrics", headers=world.coordinator).status_code == 200


def test_the_api_page_loads_nothing_from_elsewhere(sqlite_world: Any) -> None:
    answer = sqlite_world.client.get("/docs")
    assert answer.status_code == 200
    assert "<script" not in answer.text
    assert "://" not in answer.text.replace("http://hub", "")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in sqlite_world.client.get("/openapi.json").json()["paths"]:
        assert path in answer.text


def test_https_is_for_good(sqlite_world: Any) -> None:
    name = "strict-transport-security"
    assert name not in sqlite_world.client.get("/login").headers
    assert "max-age=" in sqlite_world.client.get("https://hub/login").headers[name]


def test_being_alive_is_not_being_ready(sqlite_world: Any, tools: Any, monkeypatch: Any) -> None:
    world, store = sqlite_world, sqlite_world.hub.store
    assert world.client.get("/readyz").json() == {"status": "ready"}
    assert store.remembered("ready") is not None
    monkeypatch.setattr("consilience.hub.hub.READY_SECONDS", -1.0)
    world.hub._ready_until = 0.0
    incoming = store.files.incoming
    monkeypatch.setattr(store.files, "incoming", incoming / "absent")
    assert tools.code(world.client.get("/readyz")) == "unavailable"
    assert world.client.get("/healthz").status_code == 200
    monkeypatch.setattr(store.files, "incoming", incoming)
    assert world.client.get("/readyz").status_code == 200
    store.close()
    monkeypatch.setattr(store, "write", lambda _: (_ for _ in ()).throw(_gone()))
    assert tools.code(world.client.get("/readyz")) == "unavailable"
    assert world.client.get("/healthz").status_code == 200


def _gone() -> Exception:
    from sqlalchemy.exc import OperationalError

    return OperationalError("", {}, Exception("disk is full"))


def test_a_mistake_of_ours_is_a_500_and_in_the_log(
    sqlite_world: Any, tools: Any, monkeypatch: Any, caplog: Any
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise TypeError("unsupported operand")

    world = sqlite_world
    monkeypatch.setattr(world.hub.store, "studies", fail)
    answer = world.client.get("/api/studies", headers=world.coordinator)
    assert (answer.status_code, tools.code(answer)) == (500, "failed")
    assert "operand" not in answer.text
    monkeypatch.setattr("consilience.hub.dashboard.visits.is_local_path", fail)
    caplog.clear()
    assert world.client.get("/login?next=/x").status_code == 500
    assert "unsupported operand" in caplog.text


def test_only_the_owner_can_read_the_database(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(Store(tmp_path / "hub")) as store:
            store.remember("a", "b")
            rights = {
                path.name: stat.S_IMODE(path.stat().st_mode)
                for path in (tmp_path / "hub").glob("hub.sqlite*")
            }
            assert len(rights) == 3
            assert set(rights.values()) == {0o600}
            (tmp_path / "hub" / "hub.sqlite").chmod(0o644)  # as an earlier version left it
            (tmp_path / "copy").mkdir()
            store.copy_to(tmp_path / "copy")
        Store(tmp_path / "hub").close()
        for folder in ("hub", "copy"):
            assert stat.S_IMODE((tmp_path / folder / "hub.sqlite").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_the_counters_of_combining_do_not_grow(sqlite_world: Any) -> None:
    world = sqlite_world
    world.fill(world.add_study(), 2)
    world.combiner.run(at_once=True)
    assert world.combiner.combined == 1
    assert isinstance(world.combiner.seconds, float)
    assert "consilience_combined_total 1" in world.client.get("/metrics").text


def test_the_hub_listens_on_one_port_everywhere() -> None:
    from consilience.cli.hub import Listening

    assert Listening().port == PORT
    for page in ("deployment.md", "cli.md"):
        assert f"{PORT}" in (DOCS / page).read_text()
    assert f"proxy_pass http://127.0.0.1:{PORT};" in (DOCS / "deployment.md").read_text()


def test_the_hub_speaks_plain_http_to_no_other_machine(tmp_path: Path, tools: Any) -> None:
    for proxies in ((), ("10.0.0.9",)):
        with pytest.raises(SettingsError, match="without a certificate"):
            serve(tools.quick(tmp_path / "hub"), host="0.0.0.0", proxies=proxies)
    with pytest.raises(SettingsError, match="network address"):
        serve(tools.quick(tmp_path / "hub"), proxies=["proxy.example.org"])


# ---------------------------------------------------------------------------- connections that wait


def test_a_log_has_few_lines_of_each_kind() -> None:
    limit, written = LineLimit(most=3), []

    def log(text: str, *values: object) -> None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, values, None)
        if limit.filter(record):
            written.append(record.getMessage())

    for i in range(1000):
        log("no %d", i)
        log("other")
    assert written == ["no 0", "other", "no 1", "other", "no 2", "other"]
    for known in limit._kinds.values():
        known[0] -= 61.0
    log("no %d", 7)
    assert written[-1] == "no 7 (997 more lines like this before)"
    for i in range(10_000):
        log(f"always another {i}")
    assert len(written) < 600


@contextmanager
def _process(folder: Path, log: Path, **settings: Any) -> Iterator[HubProcess]:
    hub = HubProcess(folder, log=log)
    hub.job |= settings
    hub.start()
    try:
        hub.wait()
        yield hub
    finally:
        hub.kill()
        hub.end()


def test_idle_connections_neither_stop_the_hub_nor_fill_its_log(tmp_path: Path) -> None:
    """1,100 connections, half of them in the middle of a header, against 1,024 open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    limits = {"files": 1024, "header_seconds": 2.0, "most_connections_each": 10_000}
    held = []
    with _process(tmp_path / "hub", tmp_path / "log", **limits) as hub:
        try:
            for i in range(1100):
                held.append(socket.create_connection(("127.0.0.1", hub.port), timeout=20))
                if i % 2:
                    held[-1].sendall(b"GET / HTTP/1.1\r\n")
            assert httpx.get(f"{hub.address}/readyz", timeout=10).status_code == 200
            until = time.monotonic() + 20
            waiting = list(held)
            while waiting and time.monotonic() < until:  # all are closed, though they say a word
                waiting = [one for one in waiting if not _is_closed(one)]
                time.sleep(0.2)
            assert waiting == []
            assert httpx.get(f"{hub.address}/readyz", timeout=10).status_code == 200
        finally:
            for one in held:
                one.close()
    assert len((tmp_path / "log").read_text().splitlines()) < 100


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        connection.send(b"a")
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_an_address_has_its_own_share_of_connections(tmp_path: Path) -> None:
    with _process(tmp_path / "hub", tmp_path / "log", most_connections_each=5) as hub:
        first = [socket.create_connection(("127.0.0.1", hub.port), timeout=5) for _ in range(5)]
        more = [socket.create_connection(("127.0.0.1", hub.port), timeout=5) for _ in range(5)]
        until = time.monotonic() + 10
        while not all(map(_is_closed, first)) and time.monotonic() < until:
            time.sleep(0.05)
        assert all(map(_is_closed, first))
        assert httpx.get(f"{hub.address}/healthz").status_code == 200
        for one in (*first, *more):
            one.close()


def test_the_rest_of_a_body_that_nobody_reads_does_not_keep_a_connection(tmp_path: Path) -> None:
    with _process(tmp_path / "hub", tmp_path / "log", header_seconds=1.0) as hub:
        connection = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
        head = f"POST {CONTRIBUTIONS} HTTP/1.1\r\nhost: hub\r\ncontent-length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + b"x")
        assert b" 401 " in connection.recv(1000)
        began = time.monotonic()
        while not _is_closed(connection) and time.monotonic() - began < 20:
            time.sleep(0.1)  # and a byte more each time
        assert 0.2 < time.monotonic() - began < 10
        connection.close()


def test_a_new_key_gives_a_site_no_new_share(sqlite_world: Any) -> None:
    world = sqlite_world
    study = world.add_study()
    ward = world.ward("north")
    world.app.state.by_key = auth.Buckets(Rate(1e-6, 6))
    contribution = ward.train(study)
    answers = []
    for _ in range(6):
        answers.append(world.submit(ward, contribution).status_code)
        old, new = ward.key, SigningKey.generate()
        proof = new.sign(rotation_message(old.public, new.public)).hex()
        body = json.dumps({"study": "demo", "new_key": new.public, "proof": proof}).encode()
        if world.call(ward, "POST", "/api/keys/rotation", body, key=old).status_code == 200:
            ward.key = new
            contribution = ward.train(study, sequence=contribution.sequence + 1)
    assert answers[0] == 201
    assert answers.count(429) >= 2


def test_strangers_who_guess_leave_room_for_a_coordinator_where_she_logged_in_before(
    sqlite_world: Any, password: str, monkeypatch: Any
) -> None:
    world, gate = sqlite_world, threading.Event()
    world.hub.store.add_account("bea", password, "operator")
    logins = world.app.state.logins
    logins.log_in("bea", PASSWORD, "10.0.0.9", hours=1)
    checked = auth.fits_password

    def slow(given: str, stored: str) -> bool:
        return checked(given, stored) if given == PASSWORD else gate.wait(30) and False

    monkeypatch.setattr(auth, "fits_password", slow)

    def guess(i: int) -> None:
        with suppress(auth.Refusal):
            logins.log_in(f"nobody {i}", "x", f"10.0.1.{i}", hours=1)

    threads = [threading.Thread(target=guess, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    try:
        assert logins.log_in("bea", PASSWORD, "10.0.0.9", hours=1)[0]
    finally:
        gate.set()
        for thread in threads:
            thread.join()
