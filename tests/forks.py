"""Hubs and sites for tests to kill: a parent process imports once and forks children.

It forks one child for each line it reads, so that two hundred starts take a minute, not half an
hour. Run as a program, this file is the parent; imported, it starts one.
"""

import ctypes
import json
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from consilience.errors import BudgetExceeded, HubUnavailable, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.privacy.guarantee import Budget
from consilience.site.site import Site

ROTATIONS = 15  # of a site's key; a hub takes 20 keys in a day


class Mother:
    """Starts children of one kind, each a process of its own that knows nothing of earlier ones."""

    def __init__(self, kind: str, log: Path | None = None) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(os.devnull if log is None else log, "ab") as said:
            self._process: Any = subprocess.Popen(
                [sys.executable, __file__, kind], stderr=said, **pipes
            )
        self._is_ready = False

    def start(self, **job: Any) -> int:
        if not self._is_ready:  # mothers that are made together get ready together
            assert self._process.stdout.readline() == "ready\n"
            self._is_ready = True
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def kill(pid: int) -> None:
    """Kill without warning, and return when the process is gone; it may have ended by itself."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    while is_alive(pid):
        time.sleep(0.005)


def lasting_port() -> int:
    """Return a free port below the ephemeral ones, which no outgoing connection can take."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


class HubProcess:
    """A hub in its own process, on a port that stays the same from start to start."""

    def __init__(
        self,
        folder: Path,
        url: str | None = None,
        log: Path | None = None,
        mother: Mother | None = None,
    ) -> None:
        self.port = lasting_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.job = {"folder": str(folder), "port": self.port, "url": url}
        self.mother, self.pid, self.starts = mother or Mother("hub", log), 0, 0

    def start(self) -> None:
        """Start it; every other time it keeps contributions in files however small they are."""
        self.starts += 1
        more = {} if self.starts % 2 else {"small_bytes": -1}
        self.pid = self.mother.start(**self.job, **more)

    def wait(self) -> None:
        until = time.monotonic() + 120
        if self.job.get("cert"):
            self.address = self.address.replace("http:", "https:")
        verify = ssl.create_default_context(cafile=self.job.get("cert"))
        with httpx.Client(base_url=self.address, timeout=5, verify=verify) as client:
            while time.monotonic() < until:
                try:
                    client.get("/healthz")
                    return
                except httpx.TransportError:
                    time.sleep(0.02)
        raise AssertionError("the hub did not start")

    def kill(self) -> None:
        kill(self.pid)

    def end(self) -> None:
        self.mother.end()


class SiteProcess:
    """A site with its own folder, whose process is started and killed again and again."""

    def __init__(self, folder: Path, name: str, columns: dict[str, Any], mother: Mother) -> None:
        self.folder, self.log = folder / name, folder / f"{name}.log"
        table = folder / f"{name}.csv"
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
        table.write_text("\n".join(lines) + "\n")
        self.log.touch()
        self.mother, self.pid = mother, 0
        self.job = {"folder": str(self.folder), "name": name, "table": str(table)}
        self.job |= {"log": str(self.log)}

    def start(self, *, n: int, finish: bool) -> int:
        """Let it work until `n` contributions are submitted; then it ends, or looks around."""
        self.pid = self.mother.start(**self.job, n=n, finish=finish)
        return self.pid

    def kill(self) -> None:
        kill(self.pid)

    def notes(self) -> list[str]:
        return self.log.read_text().splitlines()

    def check(self, answered: dict[str, Any], n: int, *, most_wasted: int) -> int:
        """Compare ledger, files and what the hub has; return how many charges the kills wasted."""
        site = Site(self.folder)
        site.ledger.verify()
        files = sorted((self.folder / "studies" / "demo").glob("contribution-*.safetensors"))
        found = [Contribution.load(file) for file in files]
        assert [one.sequence for one in found] == list(range(1, n + 1))
        charges = {charge.key: charge for charge in site.ledger.charges()}
        paid = [one.sealed.facts["receipt"]["key"] for one in found]
        sealed = {key for key, charge in charges.items() if charge.state == "sealed"}
        assert len(set(paid)) == n
        assert set(paid) == sealed  # no result was paid for and lost, none left without its charge
        wasted = len(charges) - n
        assert 0 <= wasted <= most_wasted
        balance = site.ledger.balance("ward")
        cost = sum(round(charge.epsilon * 10**9) for charge in charges.values())
        assert round(balance.spent.epsilon * 10**9) == cost <= len(charges) * 10**9
        assert balance.spent.epsilon <= balance.limit.epsilon
        assert {
            one.digest: one.sequence for one in found
        } == answered  # each arrived, once, and nothing else did
        for release in (self.folder / "studies" / "demo").glob("release-*.safetensors"):
            Release.load(release)
        for key in self.folder.glob("key*.pem"):
            SigningKey.load(key)
        for facts in self.folder.glob("**/*.json"):
            json.loads(facts.read_text())
        return wasted

    def spend_the_rest(self) -> None:
        """Allow a little more than was spent: one training run fits, and the next is refused."""
        site = Site(self.folder)
        limit = site.ledger.balance("ward").spent.epsilon + 1.5
        site.ledger.allow("ward", Budget(epsilon=limit))
        site.train("demo", self.job["table"], epsilon=1.0)
        with pytest.raises(BudgetExceeded):
            site.train("demo", self.job["table"], epsilon=1.0, anew=True)
        assert site.ledger.balance("ward").spent.epsilon <= limit


def restart(database: Any) -> None:
    """Start a server whose postmaster was killed, as soon as its children are gone."""
    for _ in range(100):
        try:
            database.start()
            return
        except subprocess.CalledProcessError:
            time.sleep(0.1)
    raise AssertionError("PostgreSQL did not start again")


def allow(folder: Path, study: str, budget: Any, *, url: str | None = None) -> None:
    """Set what a hub may spend on a study, as its operator."""
    from consilience.hub import operating

    with operating.opened(folder, url) as hub:
        hub.allow(study, budget, "operator")


def aggregate(
    folder: Path, study: str, *, request: str | None = None, url: str | None = None
) -> Any:
    """Let a hub combine a study, as its operator."""
    from consilience.hub import operating
    from consilience.hub.combining import Combiner

    with operating.opened(folder, url) as hub:
        return Combiner(hub).combine(study, request=request, actor="operator")


def settle(folder: Path, url: str | None) -> None:
    """Wait until a hub has combined all that is due."""
    from consilience.hub.operating import opened

    until = time.monotonic() + 120
    while time.monotonic() < until:
        with opened(folder, url) as hub:
            if not hub.store.due():
                return
        time.sleep(0.1)
    raise AssertionError("the hub did not combine what is due")


def _hub(folder: str, port: int, url: str | None, files: int = 0, **more: Any) -> None:
    from consilience.hub.auth import Rate
    from consilience.hub.hub import Settings
    from consilience.hub.operating import serve

    free = Rate(1e6, 1e6)
    rates = dict.fromkeys(("by_address", "by_key", "by_guess", "by_account"), free)
    rates |= {name: Rate(*more.pop(name)) for name in set(more) & set(rates)}
    listening = {name: more.pop(name) for name in ("cert", "key", "proxies") if name in more}
    quick = {"quiet_seconds": 0.02, "lease_seconds": 1.0, "sweep_after_seconds": 0.0}
    # One of the sites leaves and returns all the time, and all train as often as they can.
    quick |= {"return_seconds": 0.0, "most_daily": 1_000_000}
    settings = Settings(Path(folder), url, **rates, **{**quick, **more})
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    serve(settings, port=port, **listening)


def _site(
    folder: str,
    name: str,
    address: str,
    code: str,
    table: str,
    n: int,
    idle: list[str],
    finish: bool,
    log: str,
    certificate: str | None = None,
    pause: float = 0.0,
) -> None:
    """Act as a site that repeats its last command after every stop, until `n` are submitted."""
    notes = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def step(verb: str, call: Any) -> None:
        os.write(notes, f"{verb}\n".encode())
        try:
            call()
        except HubUnavailable:
            os.write(notes, b"unavailable\n")
            time.sleep(0.02)
        except BaseException as problem:
            os.write(notes, f"FAILED {verb}: {type(problem).__name__} {problem}\n".encode())
            raise
        else:
            os.write(notes, b"done\n")

    if not (Path(folder) / "site.json").exists():
        step(
            "init",
            lambda: Site.init(folder, name=name, dataset="ward", budget=Budget(epsilon=60.0)),
        )
    site = Site(folder)
    verbs = {
        "submit": site.submit,
        "fetch": site.fetch,
        "withdraw": site.withdraw,
        "rotate": lambda _: site.rotate_key(),
    }

    def train() -> None:
        """Train, and as whoever reads that the result of an earlier charge is lost: anew."""
        try:
            site.train("demo", table, epsilon=1.0)
        except SettingsError as problem:
            if "the result is lost" not in str(problem):
                raise
            site.train("demo", table, epsilon=1.0, anew=True)

    turn = 0
    while True:
        if "demo" not in site.studies:
            step("join", lambda: site.join(address, code, certificate=certificate))
            continue
        status = site.status("demo")
        if status["contributions"] > (status["submitted"] or 0):
            step("submit", lambda: site.submit("demo"))
        elif status["contributions"] < n:
            step("train", train)
        elif finish:
            return
        else:
            verb, turn = idle[turn % len(idle)], turn + 1
            if verb == "rotate" and Path(log).read_text().count("rotate\n") >= ROTATIONS:
                verb = "fetch"
            step(verb, lambda verb=verb: verbs[verb]("demo"))
            time.sleep(pause)


def _keyholder(folder: str, log: str) -> None:
    """Serve as a keyholder until it is killed; what it refuses is written down."""
    from consilience.keyholder.desk import serve
    from consilience.keyholder.keyholder import Keyholder

    for done in serve(Keyholder(folder), 0.02, lambda seconds: time.sleep(min(seconds, 0.2))):
        if done.refused:
            with open(log, "a", encoding="utf-8") as file:
                file.write("\n".join(done.refused) + "\n")


def _blind_site(
    folder: str, name: str, address: str, code: str, table: str, goal: str, log: str
) -> None:
    """Act as a site of a blind study, repeating its last command after every stop.

    `goal` is to "join", to "train" and hand nothing over, to hand over "records" once, or to lend
    "noise" for as long as it lives.
    """
    study = "heart-risk"

    def step(call: Any) -> None:
        try:
            call()
        except HubUnavailable:
            time.sleep(0.02)
        except BaseException as problem:
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{name}, {goal}: {type(problem).__name__} {problem}\n")
            raise

    def train() -> None:
        try:
            site.train(study, table, epsilon=1.0)
        except SettingsError as problem:
            if "the result is lost" not in str(problem):
                raise
            site.train(study, table, epsilon=1.0, anew=True)

    def trust() -> None:
        site.trust_keyholders(study, site.study(study).blind.keyholders)

    def lend() -> None:
        """Make another file of noise once the last one is in a batch: it would take its place."""
        if site.submit(study)["state"] == "listed":
            site.mask_noise(study)

    if not (Path(folder) / "site.json").exists():
        budget = Budget(epsilon=900.0, delta=1e-2)
        step(lambda: Site.init(folder, name=name, dataset="ward", budget=budget))
    site = Site(folder)
    while study not in site.studies:
        step(lambda: site.join(address, code))
    if goal == "join":
        return
    while True:
        status = site.status(study)
        if not status["blind"]["confirmed"]:
            step(trust)
        elif not status["contributions"] and goal != "noise":
            step(train)
        elif goal == "train":
            return
        elif status["contributions"] > (status["submitted"] or 0):
            step(lambda: site.submit(study))
        elif goal == "records":
            return
        else:
            step(lend)
            time.sleep(0.3)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _main() -> None:
    import consilience.hub.api.app  # noqa: F401 - for the children

    work = {"hub": _hub, "site": _site, "keyholder": _keyholder, "blind-site": _blind_site}[
        sys.argv[1]
    ]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _say("ready")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(0)
            ctypes.CDLL(None).prctl(
                1, signal.SIGKILL
            )  # no child outlives its parent, nor the parent its test
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                work(**json.loads(line))
            finally:
                os._exit(0)
        _say(str(child))


if __name__ == "__main__":
    _main()
