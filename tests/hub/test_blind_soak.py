"""A hub that sees sums only and its keyholders are killed at random: nothing is opened twice."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blindhub import BlindHub
from consilience.errors import HubUnavailable
from consilience.files.release import Release
from consilience.hub.hub import Hub
from consilience.keyholder.keyholder import Keyholder
from forks import HubProcess, Mother, kill, settle

N_SITES, LATE = 5, 4


def _survive(folder: Path, tools: Any, *, n_kills: int) -> dict[str, Any]:
    """Let sites hand over while hub and keyholders are killed; then compare what everyone has.

    One site comes late: the others lend the noise without which its records could not be opened.
    """
    server = HubProcess(folder / "hub")
    server.job["batch_seconds"] = 0.0
    hub = Hub(tools.quick(folder / "hub"))

    def send(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        answer = httpx.request(
            method, server.address + path, content=body, headers=headers, timeout=30
        )
        return answer.status_code, answer.content

    server.start()
    server.wait()
    blind = BlindHub(hub, folder, send, n=N_SITES, shares=2, spare=1, address=server.address)
    blind.freeze()
    mother, log = Mother("keyholder"), folder / "refused"
    places = [str(each.folder) for each in blind.keyholders]
    pids = [mother.start(folder=place, log=str(log)) for place in places]
    stopped, sent = threading.Event(), Counter[int]()

    def state_of(site: int) -> str | None:
        rows = hub.store.contributions(blind.name, site=f"site {site}")
        return max(rows, key=lambda row: int(row["sequence"]))["state"] if rows else None

    def hand_over(site: int) -> None:
        """Hand over records first and then noise, each when the file before is in a batch."""
        if state_of(site) not in (None, "listed"):
            return
        epsilon = None if sent[site] else 1.0
        made = blind.mask(site, epsilon=epsilon, sequence=sent[site] + 1)
        while True:  # the same file until the hub has answered
            with suppress(HubUnavailable):
                blind.submit(site, made)
                break
            time.sleep(0.02)
        sent[site] += 1

    def newest() -> int:
        return hub.store.counts()["audit", ""]

    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stopped.is_set():
                for site in range(N_SITES):
                    if site != LATE:
                        hand_over(site)
                time.sleep(0.01)
        except BaseException as problem:
            failures.append(problem)
            raise

    sites = threading.Thread(target=work)
    sites.start()
    generator, killed = np.random.default_rng(0), Counter[str]()
    for _ in range(n_kills):
        # Each kill meets work under way: some entries of the log after the one before.
        awaited, until = newest() + int(generator.integers(0, 4)), time.monotonic() + 20
        while newest() < awaited and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(float(generator.random()) * 0.1)
        victim = int(generator.integers(3))
        killed["hub" if victim == 2 else "keyholder"] += 1
        if victim == 2:
            server.kill()
            time.sleep(float(generator.random()) * 0.05)
            server.start()
            server.wait()
        else:
            kill(pids[victim])
            pids[victim] = mother.start(folder=places[victim], log=str(log))
    _wait(lambda: "opened" in {row["state"] for row in hub.store.batches(blind.name)}, failures)
    hand_over(LATE)
    _wait(lambda: state_of(LATE) == "listed", failures)
    stopped.set()
    sites.join()
    assert not failures
    _wait(lambda: {row["state"] for row in hub.store.batches(blind.name)} == {"opened"}, failures)
    settle(folder / "hub", None)
    server.kill()
    server.end()
    for pid in pids:
        kill(pid)
    mother.end()
    numbers = _compare(blind, hub, sum(sent.values()))
    assert not log.exists(), log.read_text()
    hub.close()
    return {"kills": dict(killed), **numbers}


def _compare(blind: BlindHub, hub: Hub, n_sent: int) -> dict[str, Any]:
    """Check that every file is in one batch at most, and each batch opened once by everybody."""
    hub.store.verify()
    batches = hub.store.batches(blind.name)
    rows = hub.store.contributions(blind.name)
    inside = [file["digest"] for batch in batches for file in batch["files"]]
    waiting = [row["digest"] for row in rows if row["state"] == "accepted"]
    assert len(rows) == n_sent
    assert len(set(inside)) == len(inside)
    assert {*inside, *waiting} == {row["digest"] for row in rows}
    for batch in batches:
        files = [file["site"] for file in batch["files"]]
        assert len(set(files)) == len(files) >= blind.shares + blind.spare
    for keyholder in blind.keyholders:
        log = Keyholder(keyholder.folder).log()  # verified when it is opened
        assert sorted(entry.batch for entry in log) == sorted(batch["digest"] for batch in batches)
        assert sum(entry.n_files for entry in log) == len(inside)
        numbers = {entry.batch: entry.number for entry in log}
        for batch in batches:
            (opening,) = [o for o in batch["openings"] if o["holder"] == keyholder.key.public]
            assert opening["number"] == numbers[batch["digest"]]
    row = hub.store.release(blind.name)
    assert row is not None
    release = Release.load(hub.store.file_path(row["sha256"]), key=hub.key.public)
    assert {source.digest for source in release.sources} == set(inside)
    held = [source.site for source in release.sources if source.guarantee.epsilon > 0]
    assert sorted(held) == [f"site {i}" for i in range(N_SITES)]
    assert hub.store.study(blind.name)["problem"] is None
    return {"batches": len(batches), "files": len(rows)}


def _wait(is_done: Callable[[], bool], failures: list[BaseException]) -> None:
    until = time.monotonic() + 120
    while not is_done():
        assert not failures
        assert time.monotonic() < until
        time.sleep(0.05)


def test_killed_hubs_and_keyholders_open_nothing_twice(tmp_path: Path, tools: Any) -> None:
    numbers = _survive(tmp_path, tools, n_kills=8)
    assert numbers["batches"] >= 2


@pytest.mark.soak
def test_200_kills_of_hub_and_keyholders(tmp_path: Path, tools: Any, record_property: Any) -> None:
    record_property("numbers", _survive(tmp_path, tools, n_kills=200))
