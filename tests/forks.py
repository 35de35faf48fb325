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


class Mother:
    """Starts children of one kind, each a process of its own that knows nothing of earlier ones."""

    def __init__(self, kind: str, log: Path | None = None) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(os.devnull if log is None else log, "ab") as said:
            self._process: Any = subprocess.Popen(
                [sys.executable, __file__, kind], stderr=said, **pipes
            )
        assert self._process.stdout.readline() == "ready\n"

    def start(self, **job: Any) -> int:
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


def _lasting_port() -> int:
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

    def __init__(self, folder: Path, url: str | None = None, log: Path | None = None) -> None:
        self.port = _lasting_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.job = {"folder": str(folder), "port": self.port, "url": url}
        self.mother, self.pid, self.starts = Mother("hub", log), 0, 0

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
    settings = Settings(
        Path(folder),
        url,
        quiet_seconds=0.02,
        lease_seconds=1.0,
        sweep_after_seconds=0.0,
        return_seconds=0.0,  # one of the sites leaves and returns all the time
        **rates,
        **more,
    )
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
) -> None:
    """Act as a site that repeats its last command after every stop, until `n` are submitted."""
    from consilience.errors import HubUnavailable
    from consilience.privacy.guarantee import Budget
    from consilience.site.site import Site

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
    turn = 0
    while True:
        if "demo" not in site.studies:
            step("join", lambda: site.join(address, code))
            continue
        status = site.status("demo")
        if status["contributions"] > (status["submitted"] or 0):
            step("submit", lambda: site.submit("demo"))
        elif status["contributions"] < n:
            step("train", lambda: site.train("demo", table, epsilon=1.0))
        elif finish:
            return
        else:
            verb, turn = idle[turn % len(idle)], turn + 1
            step(verb, lambda verb=verb: verbs[verb]("demo"))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _main() -> None:
    import consilience.hub.api.app  # noqa: F401 - for the children
    import consilience.site.site  # noqa: F401 - for the children

    work = {"hub": _hub, "site": _site}[sys.argv[1]]
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
