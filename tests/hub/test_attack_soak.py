"""A live hub behind nginx that is attacked and killed while honest sites work with it.

Members with valid keys send files that must be refused, strangers do all at once what once stopped
a hub, and workers and sites are killed at random. In the end nothing is lost and nothing false is
there. The short form differs from the long one by its numbers alone.
"""

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.hub.api.app import create_app
from consilience.hub.auth import hash_password
from consilience.hub.hub import Hub
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from consilience.protocol import HEADER, digest, sign_request
from consilience.study.check import check_release
from forgery import Forge, Liar
from forks import HubProcess, Mother, SiteProcess, is_alive, settle
from proxies import (
    CONTRIBUTIONS,
    PASSWORD,
    Proxy,
    log_in,
    nginx,
    server_text,
    several_workers_text,
    submit,
)

# What sites do between trainings; one of them withdraws what it sent, one renews its key.
IDLE = (["fetch", "submit"], ["withdraw", "fetch"], ["rotate", "fetch"], ["submit", "fetch"])
N_LIARS = 4
N_IDLE = 1100
BROKEN = "/api/studies/broken/contributions"
GUESSES, GUESSES_EACH_SECOND = 10.0, 1 / 60  # at one account


@dataclass(frozen=True)
class Size:
    """How long a run is."""

    n_files: int
    n_kills: int
    n_trainings: int  # of each site
    n_rows: int  # of a file that is far too large
    seconds: float  # in which it must be over


SHORT = Size(n_files=200, n_kills=4, n_trainings=2, n_rows=1 << 18, seconds=300.0)
LONG = Size(n_files=100_000, n_kills=200, n_trainings=10, n_rows=5 << 20, seconds=3600.0)


# ----------------------------------------------------------------------------- who attacks, and how


class Liars:
    """Members who send one lie after the other, each until the hub has said what it thinks of it.

    A worker that is killed answers nothing, so that the file is sent again.
    """

    def __init__(
        self, proxy: Proxy, liars: list[dict[str, Liar]], n_files: int, hub_key: str
    ) -> None:
        self.proxy, self.n_files, self.hub_key = proxy, n_files, hub_key
        self.refused, self.again = Counter[str](), Counter[str]()
        self.taken = list[tuple[int, int, bytes]]()
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=self._work, args=(i, each), daemon=True)
            for i, each in enumerate(liars)
        ]

    @property
    def n_refused(self) -> int:
        return sum(self.refused.copy().values())

    def _work(self, i: int, liars: dict[str, Liar]) -> None:
        connection = self._connect(i)
        for number in range(i, self.n_files, len(self.threads)):
            # Two of three go to the study of the honest sites.
            study, liar = list(liars.items())[number // len(self.threads) % 3 == 2]
            kind, body = liar.file(number)
            while not self.stopped.is_set():
                try:
                    status, answer = self._send(connection, liar.key, study, body)
                except (OSError, http.client.HTTPException) as problem:
                    self.again[type(problem).__name__] += 1
                    connection.close()
                    connection = self._connect(i)
                    continue
                if 400 <= status < 500 and status != 429:
                    self.refused[kind] += 1
                    break
                if status in (429, 502, 503, 504):
                    self.again[str(status)] += 1
                    self.stopped.wait(0.02)
                    continue
                self.taken.append((number, status, answer[:300]))
                break
        connection.close()

    def _connect(self, i: int) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1",
            self.proxy.port,
            timeout=60,
            source_address=(f"127.9.0.{i + 1}", 0),
            context=self.proxy.trust,
        )

    def _send(
        self, connection: http.client.HTTPSConnection, key: SigningKey, study: str, body: bytes
    ) -> tuple[int, bytes]:
        path = f"/api/studies/{study}/contributions"
        header = sign_request(key, self.hub_key, "POST", path, digest(body))
        connection.request("POST", path, body, {HEADER: header})
        answer = connection.getresponse()
        return answer.status, answer.read()


class Attack:
    """Strangers and one member who do all at once what once stopped a hub, until told to stop."""

    def __init__(
        self,
        proxy: Proxy,
        workers: list[HubProcess],
        member: Any,
        huge: bytes,
        changer: Any,
        changes: list[bytes],
    ) -> None:
        self.proxy, self.workers, self.member, self.huge = proxy, workers, member, huge
        self.changer, self.changes = changer, iter(changes)
        self.stopped, self.answers = threading.Event(), Counter[str]()
        self.statuses = Counter[tuple[str, int]]()
        self.threads = [
            threading.Thread(target=self._repeat, args=(work, number), daemon=True)
            for work, n in (
                (self.sit_idle, 1),
                (self.crowd, 1),
                (self.measure, 1),
                (self.change, 1),
                (self.shake_hands, 1),
                (self.trickle, 4),
                (self.send_much, 1),
                (self.send_form, 1),
                (self.guess, 2),
                (self.hog, 1),
                (self.send_junk, 1),
                (self.send_huge, 1),
                (self.read_slowly, 2),
            )
            for number in range(n)
        ]

    def _repeat(self, work: Callable[[str], None], number: int) -> None:
        turn = 0
        while not self.stopped.is_set():
            turn += 1
            with suppress(httpx.HTTPError, OSError):
                work(f"127.{number + 1}.{turn // 200 % 200}.{turn % 200 + 1}")
            self.answers[work.__name__] += 1
            self.stopped.wait(1.0)

    def sit_idle(self, source: str) -> None:
        """Hold connections, half of them within a header."""
        with ExitStack() as held:
            for i in range(60):
                one = held.enter_context(self.proxy.connect(source))
                one.sendall(b"GET / HTTP/1.1\r\n" if i % 2 else b"G")
            self.stopped.wait(8.0)

    def crowd(self, source: str) -> None:
        """Hold 1,100 connections to a worker itself, past the proxy, from many addresses."""
        network, _, host = source.rpartition(".")
        worker = self.workers[int(host) % len(self.workers)]
        with ExitStack() as held:
            for i in range(N_IDLE):
                address = f"{network.replace('127.', '127.1', 1)}.{i // 200 + 1}"
                one = socket.create_connection(
                    ("127.0.0.1", worker.port), timeout=10, source_address=(address, 0)
                )
                held.enter_context(one).sendall(b"GET / HTTP/1.1\r\n" if i % 2 else b"")
            self.statuses["crowd", N_IDLE] += 1
            self.stopped.wait(8.0)

    def measure(self, source: str) -> None:
        """Ask for what operators measure, as a stranger."""
        with self.proxy.client(source) as client:
            self.statuses["metrics", client.get("/metrics").status_code] += 1

    def change(self, source: str) -> None:
        """Submit again to the study that cannot be combined, so that it is tried again."""
        body = next(self.changes, None)
        while body is not None and not self.stopped.is_set():
            header = sign_request(
                self.changer.key, self.changer.hub_key, "POST", BROKEN, digest(body)
            )
            with suppress(httpx.TransportError), self.proxy.client(source) as client:
                status = client.post(BROKEN, content=body, headers={HEADER: header}).status_code
                self.statuses["change", status] += 1
                if status in (200, 201):
                    break
            self.stopped.wait(0.1)

    def shake_hands(self, source: str) -> None:
        """Hold connections on which no TLS handshake ends."""
        address = ("127.0.0.1", self.proxy.port)
        with ExitStack() as held:
            for _ in range(200):
                one = socket.create_connection(address, timeout=10, source_address=(source, 0))
                held.enter_context(one).sendall(b"\x16\x03\x01")
            self.stopped.wait(8.0)

    def trickle(self, source: str) -> None:
        """Send one byte of a small file, as somebody who is not enrolled."""
        header = sign_request(
            SigningKey.generate(), self.member.hub_key, "POST", CONTRIBUTIONS, "0" * 64
        )
        self._send_slowly(source, header)

    def hog(self, source: str) -> None:
        """Do the same as an enrolled site."""
        key, hub_key = self.member.key, self.member.hub_key
        self._send_slowly(source, sign_request(key, hub_key, "POST", CONTRIBUTIONS, "0" * 64))

    def _send_slowly(self, source: str, header: str) -> None:
        head = f"POST {CONTRIBUTIONS} HTTP/1.1\r\nHost: hub\r\n{HEADER}: {header}\r\n"
        with self.proxy.connect(source) as connection:
            connection.sendall(f"{head}Content-Length: 60000\r\n\r\n".encode())
            for _ in range(20):
                connection.sendall(b"x")
                if self.stopped.wait(0.5):
                    break

    def read_slowly(self, source: str) -> None:
        """Ask for many pages on one connection and read a byte a second."""
        with self.proxy.connect(source) as connection:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: hub\r\n\r\n" * 20)
            for _ in range(20):
                connection.recv(1)
                if self.stopped.wait(1.0):
                    break

    def send_much(self, source: str) -> None:
        """Upload a file of public records without a cookie."""

        def parts() -> Iterator[bytes]:
            for _ in range(1024):
                yield b"x" * (1 << 20)

        with self.proxy.client(source) as client:
            client.post("/studies/demo/files/x.csv", content=parts())

    def send_form(self, source: str) -> None:
        """Send a login form of many parts."""
        kind = {"content-type": "multipart/form-data; boundary=b"}
        with self.proxy.client(source) as client:
            client.post("/login", content=b"--b\r\na: b\r\n" * 30_000, headers=kind)

    def guess(self, source: str) -> None:
        with self.proxy.client(source) as client:
            asked = {"name": "bea", "password": "a wrong one"}
            self.statuses["guess", client.post("/api/sessions", json=asked).status_code] += 1

    def send_junk(self, source: str) -> None:
        """Submit, as an enrolled site, what is no contribution."""
        with self.proxy.client(source) as client:
            submit(client, self.member, random.randbytes(2000))

    def send_huge(self, source: str) -> None:
        """Submit, as an enrolled site, a hundred megabytes where four kilobytes are honest."""
        with self.proxy.client(source) as client:
            submit(client, self.member, self.huge)
        self.stopped.wait(60.0)


# ---------------------------------------------------------------------------------------- the siege


def forest_text(tools: Any) -> str:
    text = tools.study_text("trees").replace('"Average"', '"WeightedVote"')
    learner = '"PrivateForestClassifier"\nn_trees = 3\nmax_depth = 2'
    text = text.replace('"PrivateLogisticRegression"', learner)
    return str(text.replace("[privacy]", '[privacy]\nneighbours = "add-remove"'))


def enrol_liars(world: Any, tools: Any) -> list[dict[str, Liar]]:
    """Let members enrol in both studies and contribute once; return what each sends later."""
    studies = [world.hub.agreed("demo"), world.hub.agreed("trees")]
    honest: dict[tuple[str, int], Any] = {}
    for study in studies:
        for i in range(N_LIARS):
            ward = world.ward(f"liar {i}", study.name)
            ledger = Ledger(world.folder / f"{ward.name} {study.name}.ledger")
            ledger.allow("ward", Budget(epsilon=1000.0, neighbours=study.neighbours))
            facts = {"site": ward.name, "signing": ward.key, "dataset": "ward"}
            made = study.train(tools.table(200, 1), ledger, epsilon=1.0, **facts)
            assert world.submit(ward, made, study.name).status_code == 201
            honest[study.name, i] = made.sealed
    return [
        {
            here: Liar(
                honest[here, i],
                world.wards[f"liar {i}"].key,
                honest[here, (i + 1) % N_LIARS].to_bytes(),
                honest[there, i].to_bytes(),
            )
            for here, there in (("demo", "trees"), ("trees", "demo"))
        }
        for i in range(N_LIARS)
    ]


def break_study(world: Any, tools: Any, changes: int) -> tuple[Any, list[bytes]]:
    """Add a study with a member that breaks combining, as a hub of an earlier version took it.

    Return its honest member, and files by which that one changes what is to be combined.
    """
    study = world.add_study(tools.study_text("broken"))
    north, wrong = world.ward("north", "broken"), world.ward("wrong", "broken")
    forged = Forge(wrong.train(study).sealed, wrong.key)
    forged.tensors = {name: tensor * 1e300 for name, tensor in forged.tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("consilience.files.contribution._check_implied", lambda *_: None)
        assert world.submit(wrong, forged.to_bytes(), "broken").status_code == 201
    made = [north.train(study, sequence=i + 1) for i in range(changes)]
    return north, [one.sealed.to_bytes() for one in made]


def enlarge(liar: Liar, n_rows: int) -> bytes:
    """Return a file with a right signature and far more numbers than its study allows."""
    forge = Forge(liar.honest, liar.key)
    for name, tensor in forge.tensors.items():
        forge.tensors[name] = np.resize(tensor, (n_rows, *tensor.shape[1:]))
    return forge.to_bytes()


def ask(client: httpx.Client, path: str) -> float:
    """Ask for a page until a worker answers; return how long that took."""
    began = time.monotonic()
    while True:
        with suppress(httpx.TransportError):
            answer = client.get(path)
            if answer.status_code == 200:
                return time.monotonic() - began
            assert answer.status_code in (502, 503, 504), (path, answer.text)
        assert time.monotonic() - began < 30.0, path
        time.sleep(0.05)


def serve(folder: Path, url: str | None, stack: ExitStack) -> tuple[list[HubProcess], Proxy]:
    """Start a worker, or two on PostgreSQL, behind the nginx of the page."""
    mother = Mother("hub", folder / "log")
    stack.callback(mother.end)
    workers = [HubProcess(folder / "hub", url, mother=mother) for _ in range(1 + bool(url))]
    for worker in workers:
        # Members may send as fast as they can, so that all of what they send is looked at. A file
        # on its way to a row must outlive the start of the other worker.
        worker.job |= {
            "proxies": ["127.0.0.1"],
            "by_guess": (0.2, 10.0),
            "by_account": (GUESSES_EACH_SECOND, GUESSES),
            "sweep_after_seconds": 60.0,
        }
        worker.start()
        stack.callback(worker.kill)
    for worker in workers:
        worker.wait()
    ports = zip(("127.0.0.1:8440", "127.0.0.1:8441"), workers, strict=False)
    changes = {old: f"127.0.0.1:{worker.port}" for old, worker in ports}
    text = server_text() if url is None else several_workers_text()
    return workers, stack.enter_context(nginx(folder / "nginx", text, changes))


def _withstand(folder: Path, url: str | None, tools: Any, size: Size) -> dict[str, Any]:
    """Attack and kill; then compare what everybody has. Return what happened."""
    began = time.monotonic()
    with ExitStack() as stack:
        mother = Mother("site")
        stack.callback(mother.end)
        served = stack.enter_context(tools.Client(create_app(tools.quick(folder / "hub", url))))
        world = tools.World(served, folder)
        world.add_study()
        world.add_study(forest_text(tools))
        world.hub.store.add_account("bea", hash_password(PASSWORD), "operator")
        liars = enrol_liars(world, tools)
        member = world.ward("mallory")
        north, changes = break_study(world, tools, size.n_kills)
        kept = {row["digest"] for name in ("demo", "trees") for row in rows(world.hub, name)}
        workers, proxy = serve(folder, url, stack)
        client = stack.enter_context(proxy.client("127.0.0.99"))
        assert log_in(client, "bea", PASSWORD).status_code == 303

        sites = [
            SiteProcess(folder, f"ward {i}", tools.table(200, i), mother) for i in range(len(IDLE))
        ]
        for site, idle in zip(sites, IDLE, strict=True):
            site.job |= {"address": proxy.address, "certificate": str(proxy.certificate)}
            site.job |= {
                "code": world.hub.invite("demo", "operator")[0],
                "idle": idle,
                "pause": 1.0,
            }
            site.start(n=1, finish=False)
            stack.callback(site.kill)
        lies = Liars(proxy, liars, size.n_files, world.hub.key.public)
        huge = enlarge(liars[0]["demo"], size.n_rows)
        attack = Attack(proxy, workers, member, huge, north, changes)
        stack.callback(lies.stopped.set)
        stack.callback(attack.stopped.set)
        for thread in (*lies.threads, *attack.threads):
            thread.start()

        attacked = time.monotonic()
        killed, slowest = _kill_at_random(workers, sites, lies, client, size)
        for thread in lies.threads:
            thread.join(max(1.0, size.seconds - (time.monotonic() - began)))
            assert not thread.is_alive()
        attacked = time.monotonic() - attacked
        for site in sites:  # each ends its work while strangers still attack
            site.kill()
            killed[site.job["name"]] += 1
            site.start(n=size.n_trainings, finish=True)
        for site in sites:
            while is_alive(site.pid):
                assert time.monotonic() - began < size.seconds, site.notes()[-3:]
                time.sleep(0.02)
        attack.stopped.set()
        for thread in attack.threads:
            thread.join(60)
        assert ask(client, "/readyz") < 30.0
        _check_answers(attack, workers, time.monotonic() - began)
        with proxy.client("127.0.0.99") as known:  # whatever strangers guessed
            assert log_in(known, "bea", PASSWORD).status_code == 303
        settle(folder / "hub", url)

        assert lies.taken == []
        assert lies.n_refused == size.n_files
        assert killed.total() >= size.n_kills
        assert slowest < 20.0
        wasted = _check_sites(world.hub, sites, size.n_trainings, killed, kept)
        resident = [_resident(worker.pid) for worker in workers]
        assert max(resident) < 1 << 30
        for worker in workers:
            worker.kill()
        noted = _check_logs(folder, world.hub, workers, (time.monotonic() - began) / 60 + 1)
        n_releases = _check_hub(folder, url, tools)
    return {
        "seconds of attack": attacked,
        "seconds in all": time.monotonic() - began,
        "refused": dict(lies.refused),
        "sent again": dict(lies.again),
        "killed": dict(killed),
        "wasted charges": wasted,
        "slowest page": slowest,
        "releases": n_releases,
        "audit log": dict(noted),
        "MiB resident": [one >> 20 for one in resident],
        "attacks": dict(attack.answers),
    }


def _kill_at_random(
    workers: list[HubProcess],
    sites: list[SiteProcess],
    lies: Liars,
    client: httpx.Client,
    size: Size,
) -> tuple[Counter[str], float]:
    """Kill workers and sites in turn, spread over all files; a coordinator looks after each.

    Return who was killed how often, and how long the slowest page took.
    """
    rng, began = random.Random(0), time.monotonic()
    killed, slowest = Counter[str](), 0.0
    for k in range(size.n_kills):
        while lies.n_refused < k * size.n_files // size.n_kills:
            assert time.monotonic() - began < size.seconds
            assert lies.taken == []
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        if k % 2:
            site = rng.choice(sites)
            site.kill()
            killed[site.job["name"]] += 1
            site.start(n=1 + k * size.n_trainings // size.n_kills, finish=False)
        else:
            worker = rng.choice(workers)
            worker.kill()
            killed["hub"] += 1
            time.sleep(rng.random() * 0.2)
            worker.start()
        slowest = max(slowest, ask(client, "/studies"), ask(client, "/studies/demo"))
    return killed, slowest


def _check_answers(attack: Attack, workers: list[HubProcess], seconds: float) -> None:
    """Strangers measure nothing, and their guesses at an account are few, from any address."""
    statuses = attack.statuses
    assert statuses["crowd", N_IDLE] > 0
    measured = {status for name, status in statuses if name == "metrics"}
    assert measured & {401, 403}
    assert measured <= {401, 403, 429, 502, 503, 504}
    starts = sum(worker.starts for worker in workers)  # one that starts again has forgotten them
    most = starts * GUESSES + len(workers) * seconds * GUESSES_EACH_SECOND
    assert 0 < statuses["guess", 401] <= most
    # On a machine that is slow enough, all guesses of the short form may be among those allowed.
    assert statuses["guess", 429] > 0 or statuses["guess", 401] <= starts * GUESSES
    assert {status for name, status in statuses if name == "guess"} <= {401, 429, 502, 503, 504}


def _check_logs(folder: Path, hub: Hub, workers: list[HubProcess], minutes: float) -> Counter[str]:
    """Refusals fill neither the log nor the audit log; return what is in the latter how often."""
    starts = sum(worker.starts for worker in workers)
    said = (folder / "log").read_text()
    assert "Traceback" not in said
    assert len(said.splitlines()) < 100 * (starts + minutes * len(workers))
    noted = Counter(one["action"] for one in hub.store.audit(limit=1_000_000))
    # A worker that starts again has forgotten what it noted.
    of_each = starts * 20 + minutes * len(workers)
    assert 0 < noted["contribution refused"] <= of_each * (2 * N_LIARS + 1)
    assert noted["login failed"] <= of_each
    return noted


def rows(hub: Hub, study: str) -> list[Any]:
    return list(hub.store.contributions(study))


def _check_sites(
    hub: Hub, sites: list[SiteProcess], n: int, killed: Counter[str], kept: set[str]
) -> int:
    """Compare what each honest site has with what the hub has of it, and nothing else is there."""
    assert not [note for site in sites for note in site.notes() if note.startswith("FAILED")]
    wasted, found = 0, rows(hub, "demo")
    for site in sites:
        name = site.job["name"]
        answered = {row["digest"]: row["sequence"] for row in found if row["site"] == name}
        wasted += site.check(answered, n, most_wasted=killed[name])
        kept |= set(answered)
    assert {row["digest"] for study in ("demo", "trees") for row in rows(hub, study)} == kept
    accepted = Counter(row["site"] for row in found if row["state"] == "accepted")
    assert set(accepted.values()) == {1}
    assert {f"ward {i}" for i, idle in enumerate(IDLE) if "withdraw" not in idle} <= set(accepted)
    return wasted


def _check_hub(folder: Path, url: str | None, tools: Any) -> int:
    """Verify all that is kept: rows, files, audit log and every release. Return their number."""
    hub = Hub(tools.quick(folder / "hub", url, sweep_after_seconds=-1.0))
    hub.store.verify()
    assert list((folder / "hub" / "files" / "incoming").iterdir()) == []
    n = 0
    for name in ("demo", "trees"):
        study = hub.agreed(name)
        for row in hub.store.releases(name):
            n += 1
            path = hub.store.files.path(row["sha256"])
            release = Release.load(path, key=hub.key.public)
            assert release.digest == row["digest"]
            check_release(study, release)
        assert hub.store.release(name) is not None
    # The study beside them is tried whenever it changes, and says who is wrong.
    assert hub.store.release("broken") is None
    assert "wrong" in hub.store.study("broken")["problem"]
    assert len(hub.store.contributions("broken", site="north")) > 0
    hub.close()
    return n


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_an_attack_on_a_live_hub_behind_nginx(tmp_path: Path, postgres: Any, tools: Any) -> None:
    _withstand(tmp_path, postgres.database(), tools, SHORT)


@pytest.mark.soak
def test_100000_hostile_files_and_200_kills_behind_nginx(
    tmp_path: Path, url: str | None, tools: Any, record_property: Any
) -> None:
    record_property("numbers", _withstand(tmp_path, url, tools, LONG))
