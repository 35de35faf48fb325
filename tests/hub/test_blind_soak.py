"""Sites, keyholders and a hub that sees sums only are killed at random: nothing is opened twice.

Ten sites, each in a process of its own, with k = 3 and t = 1. Four hand over and make a batch; one
has trained and is never seen again; four late ones make a second batch; one is alone, and waits
until others lend it noise. What would have to be refused is tried while all of them work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.csv
import pytest

from blindhub import BlindHub
from consilience.blind.masked import KIND, Batch, MaskedFile
from consilience.errors import ConsilienceError, ContributionRejected, HubUnavailable
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.hub.hub import Hub
from consilience.keyholder.keyholder import Keyholder
from consilience.site.blind import alone_account
from consilience.site.site import Site
from forks import HubProcess, Mother, is_alive, kill, settle
from studies import table

EARLY, GONE, LATE, ALONE = range(4), 4, range(5, 9), 9
N_SITES, STUDY = 10, "heart-risk"
REFUSALS = ("overlapping", "too few", "counted twice", "made up", "transplanted", "another study")


@dataclass
class Play:
    """All processes of one study, and whoever kills them."""

    folder: Path
    tools: Any
    n_kills: int
    killed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    sites: dict[int, int] = field(default_factory=dict)  # the process of each that works
    goals: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = HubProcess(self.folder / "hub")
        self.server.job["batch_seconds"] = 0.0
        self.hub = Hub(self.tools.quick(self.folder / "hub"))
        self.draw, self.log = np.random.default_rng(0), self.folder / "refused"
        self.server.start()
        self.mothers = {kind: Mother(kind) for kind in ("keyholder", "blind-site")}
        self.server.wait()
        address = self.server.address
        self.blind = BlindHub(
            self.hub, self.folder, self.send, n=0, shares=3, spare=1, address=address
        )
        self.codes = {i: self.hub.invite(STUDY, "operator")[0] for i in range(N_SITES)}
        for i in range(N_SITES):
            pyarrow.csv.write_csv(table(200, seed=i), self.folder / f"site-{i}.csv")
        self.places = [str(each.folder) for each in self.blind.keyholders]
        self.holders: list[int] = []

    def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Send a request of the test's own, which the hub may miss."""
        address = self.server.address + path
        try:
            answer = httpx.request(method, address, content=body, headers=headers, timeout=30)
        except httpx.HTTPError:
            raise HubUnavailable("The hub was killed.") from None
        return answer.status_code, answer.content

    # ------------------------------------------------------------------------------- processes

    def start_keyholder(self, i: int) -> int:
        """Start a keyholder again, on its folder."""
        return self.mothers["keyholder"].start(folder=self.places[i], log=str(self.log))

    def start_site(self, i: int, goal: str) -> None:
        """Let a site work towards a goal."""
        self.goals[i] = goal
        self.sites[i] = self.mothers["blind-site"].start(
            folder=str(self.place(i)),
            name=f"site {i}",
            address=self.server.address,
            code=self.codes[i],
            table=str(self.folder / f"site-{i}.csv"),
            goal=goal,
            log=str(self.log),
        )

    def stop_site(self, i: int) -> None:
        """End a site's process for good."""
        kill(self.sites.pop(i))

    def place(self, i: int) -> Path:
        """Return a site's folder."""
        return self.folder / f"site-{i}"

    def kill_one(self) -> None:
        """Kill the hub, a keyholder or a site that is at work, and start it again."""
        working = [i for i, pid in self.sites.items() if is_alive(pid)]
        victim = int(self.draw.integers(3 + (2 if working else 0)))
        if victim == 0:
            self.server.kill()
            time.sleep(float(self.draw.random()) * 0.05)
            self.server.start()
            self.server.wait()
        elif victim < 3:
            kill(self.holders[victim - 1])
            self.holders[victim - 1] = self.start_keyholder(victim - 1)
        else:
            i = working[int(self.draw.integers(len(working)))]
            kill(self.sites[i])
            self.start_site(i, self.goals[i])
        self.killed[("hub", "keyholder", "keyholder", "site", "site")[victim]] += 1

    def run_until(self, is_done: Callable[[], bool], n_kills: int) -> None:
        """Kill at random, at least so many times, until something has come about."""
        until = time.monotonic() + 300 + 2 * n_kills
        left = n_kills
        while left > 0 or not is_done():
            assert time.monotonic() < until
            assert not self.log.exists(), self.log.read_text()
            time.sleep(float(self.draw.random()) * 0.4)
            if left > 0:
                self.kill_one()
                left -= 1

    # ------------------------------------------------------------------------------- what is there

    def batches(self) -> list[Any]:
        """Return the hub's batches."""
        return self.hub.store.batches(STUDY)

    def are_opened(self, sites: Iterable[int], *, records: bool = True) -> bool:
        """Tell whether files of all these sites are in batches that everybody opened."""
        opened = {
            file["site"]
            for batch in self.batches()
            if batch["state"] == "opened"
            for file in batch["files"]
            if self.read(file).has_records == records
        }
        return opened >= {f"site {i}" for i in sites}

    def is_quiet(self) -> bool:
        """Tell whether every batch is opened, and no other can be listed of the files that wait."""
        waiting = self.hub.blind.find_waiting(self.blind.study)
        unseen = any("acknowledged" in reason for reason in waiting.reasons.values())
        opened = all(batch["state"] == "opened" for batch in self.batches())
        return opened and not waiting.chosen and not unseen

    def read(self, row: Any) -> Contribution:
        """Return a file as the hub has it."""
        return Contribution.load(self.hub.store.content(row["sha256"]))


def play(folder: Path, tools: Any, *, n_kills: int) -> dict[str, Any]:
    """Let the sites do their parts while everybody is killed; return how often what happened."""
    game = Play(folder, tools, n_kills)
    for i in range(N_SITES):
        game.start_site(i, "join")
    wait(lambda: not any(map(is_alive, game.sites.values())))
    game.sites.clear()
    game.blind.freeze()
    game.holders = [game.start_keyholder(i) for i in range(len(game.places))]
    part = n_kills // 4
    game.start_site(GONE, "train")
    for i in EARLY:
        game.start_site(i, "records")
    game.run_until(lambda: game.are_opened(EARLY), part)
    wait(lambda: not is_alive(game.sites[GONE]))
    del game.sites[GONE]
    for i in LATE:
        game.start_site(i, "records")
    game.run_until(lambda: game.are_opened(LATE), part)
    attack(game)
    game.start_site(ALONE, "records")
    game.run_until(lambda: not is_alive(game.sites[ALONE]), part)
    n_waiting = len(game.batches())
    assert not game.are_opened([ALONE])
    for i in (*EARLY, *LATE):
        game.start_site(i, "noise")
    game.run_until(lambda: game.are_opened([ALONE]), n_kills - 3 * part)
    assert len(game.batches()) > n_waiting == 2
    for i in (*EARLY, *LATE):
        game.stop_site(i)
    attack(game)
    wait(game.is_quiet)
    settle(folder / "hub", None)
    game.server.kill()
    game.server.end()
    for pid in game.holders:
        kill(pid)
    for mother in game.mothers.values():
        mother.end()
    assert not game.log.exists(), game.log.read_text()
    numbers = compare(game)
    game.hub.close()
    return {"kills": dict(game.killed), "refused": dict(game.refused), **numbers}


# ------------------------------------------------------------------------------- what is refused


def attack(game: Play) -> None:
    """Ask the keyholders, while they work, for everything that they must never do."""
    first, second = ([game.read(row) for row in batch["files"]] for batch in game.batches()[:2])
    site = Site(game.place(0))
    fresh = {"sequence": 9000, "nonce": "5" * 64}
    roster = MaskedFile.of(first[0].sealed).facts["blind"]["roster"]
    own = next(one for one in first if one.site == "site 0").sealed
    other = next(one for one in first if one.site == "site 1").sealed
    again = forge(own, site.key, sequence=9001, nonce="6" * 64)  # a second file of the first site
    hostile: list[tuple[str, Any, str]] = [
        ("overlapping", batch_of([*first[:3], second[0]]), "opened before"),
        ("too few", batch_of(first[:3]), "4 are needed"),
        (
            "counted twice",
            batch_of([*first[:3], Contribution.load(again.to_bytes())]),
            "acknowledged all",
        ),
        (
            "made up",
            forge(own, SigningKey.generate(), site="site 77", **fresh),
            "not on the roster",
        ),
        (
            "transplanted",
            forge(own, site.key, seeds=other.facts["blind"]["seeds"], **fresh),
            "not sealed for it",
        ),
        (
            "another study",
            forge(own, site.key, study={"name": STUDY, "digest": "a" * 64}, **fresh),
            "signed no roster",
        ),
    ]
    assert roster == game.hub.blind.roster(game.blind.study).digest
    for place in game.places:
        keyholder = Keyholder(place)
        for what, given, problem in hostile:
            asked = keyholder.open if isinstance(given, Batch) else keyholder.acknowledge
            given = given if isinstance(given, Batch) else MaskedFile.of(given)
            with pytest.raises(ContributionRejected, match=problem):
                asked(given)
            game.refused[what] += 1
    for what, given, _ in hostile[3:]:
        client, content = game.blind.client(site.key), given.to_bytes()
        with pytest.raises(ConsilienceError) as caught:  # at the hub, from a site that is enrolled
            client.submit(STUDY, Contribution.load(content), content)
        assert not isinstance(caught.value, HubUnavailable)
        game.refused[f"{what}, by the hub"] += 1


def batch_of(files: Sequence[Contribution]) -> Batch:
    return Batch.of(MaskedFile.of(file.sealed) for file in files)


def forge(sealed: Sealed, key: SigningKey, **changes: Any) -> Sealed:
    """Return a file with other facts, signed anew."""
    facts = {name: value for name, value in sealed.facts.items() if name not in ("key", "tensors")}
    blind = {name: changes.pop(name) for name in ("nonce", "seeds") if name in changes}
    facts |= {**changes, "blind": {**facts["blind"], **blind}}
    return Sealed.seal(KIND, facts, sealed.tensors, key)


# ------------------------------------------------------------------------------- at the end


def compare(game: Play) -> dict[str, Any]:
    """Compare hub, keyholders, ledgers and files: nothing twice, nothing lost, nothing unpaid."""
    hub, blind = game.hub, game.blind
    hub.store.verify()
    batches, rows = game.batches(), hub.store.contributions(STUDY)
    inside = [file["digest"] for batch in batches for file in batch["files"]]
    assert len(set(inside)) == len(inside)
    assert set(inside) == {row["digest"] for row in rows if row["state"] == "listed"}
    for batch in batches:
        sites = [file["site"] for file in batch["files"]]
        assert len(set(sites)) == len(sites) >= blind.shares + blind.spare
    for keyholder in blind.keyholders:
        log = Keyholder(keyholder.folder).log()  # verified when it is opened
        assert sorted(entry.batch for entry in log) == sorted(batch["digest"] for batch in batches)
        assert sum(entry.n_files for entry in log) == len(inside)
    release = Release.load(
        hub.store.file_path(hub.store.release(STUDY)["sha256"]), key=hub.key.public
    )
    assert {source.digest for source in release.sources} == set(inside)
    held = sorted(one.site for one in release.sources if one.guarantee.epsilon > 0)
    assert held == sorted(f"site {i}" for i in (*EARLY, *LATE, ALONE))
    wasted = sum(check_site(game, i, rows) for i in range(N_SITES))
    assert wasted <= game.killed["site"]
    n_noise = sum(not game.read(row).has_records for row in rows)
    return {"batches": len(batches), "files": len(rows), "noise": n_noise, "wasted": wasted}


def check_site(game: Play, i: int, rows: Sequence[Any]) -> int:
    """Compare a site's ledger and files with the hub's; return the charges that kills wasted."""
    site = Site(game.place(i))
    site.ledger.verify()
    files = [Contribution.load(path) for path in sorted(site.folder.glob("studies/*/contr*.saf*"))]
    here = {file.digest: file for file in files}
    assert len({file.sequence for file in files}) == len(files)
    there = {row["digest"] for row in rows if row["site"] == f"site {i}"}
    assert there <= here.keys()
    # What was made last may not have been sent when the site was stopped for good.
    missing = [here[digest].sequence for digest in here.keys() - there]
    assert missing in ([], [max(file.sequence for file in files)])
    if i == GONE:
        assert not there
    paid = [file.sealed.facts["receipt"]["key"] for file in files if file.has_records]
    charges = {charge.key: charge for charge in site.ledger.charges("ward")}
    sealed = {key for key, charge in charges.items() if charge.state == "sealed"}
    assert len(paid) == len(set(paid)) == 1  # each has handed over its records once
    assert set(paid) == sealed  # nothing was paid for and lost, and nothing left without its charge
    assert len(site.ledger.charges(alone_account("ward"))) == len(charges)
    return len(charges) - len(paid)


def wait(is_done: Callable[[], bool]) -> None:
    """Wait for something that comes about by itself."""
    until = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.soak
def test_ten_sites_two_keyholders_and_a_hub_are_killed(tmp_path: Path, tools: Any) -> None:
    numbers = play(tmp_path, tools, n_kills=12)
    assert sum(numbers["kills"].values()) == 12
    assert {*REFUSALS} <= numbers["refused"].keys()


@pytest.mark.soak
def test_200_kills_of_sites_keyholders_and_hub(
    tmp_path: Path, tools: Any, record_property: Any
) -> None:
    record_property("numbers", play(tmp_path, tools, n_kills=200))
