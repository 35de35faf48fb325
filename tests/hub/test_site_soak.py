"""A site that is killed at random and repeats its last command, while the hub is killed too."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilience.errors import BudgetExceeded
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.hub.hub import Hub
from consilience.privacy.guarantee import Budget
from consilience.site.site import Site
from forks import HubProcess, Mother, is_alive, kill, restart, settle

N_SITES = 5
# What a site does while it waits for its next training: most look again, one leaves, one changes
# its key.
IDLE = (
    ["fetch", "submit"],
    ["fetch", "submit"],
    ["withdraw", "fetch"],
    ["rotate", "fetch"],
    ["submit", "fetch"],
)


class Ward:
    """A site with its own folder, whose process is started and killed again and again."""

    def __init__(self, i: int, folder: Path, server: HubProcess, code: str, tools: Any) -> None:
        self.folder, self.log = folder / f"site {i}", folder / f"site {i}.log"
        table = folder / f"records {i}.csv"
        tools.write_csv(table, tools.table(200, i))
        self.log.touch()
        self.job = {
            "folder": str(self.folder),
            "name": f"ward {i}",
            "address": server.address,
            "code": code,
        }
        self.job |= {"table": str(table), "idle": IDLE[i], "log": str(self.log)}

    def notes(self) -> list[str]:
        return self.log.read_text().splitlines()

    def check(self, answered: dict[str, Any], kills_while_training: int, n: int) -> int:
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
        assert 0 <= wasted <= kills_while_training
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
            site.train("demo", self.job["table"], epsilon=1.0)
        assert site.ledger.balance("ward").spent.epsilon <= limit


def _survive(
    folder: Path,
    url: str | None,
    tools: Any,
    *,
    n_kills: int,
    n_submissions: int,
    database: Any = None,
) -> dict[str, Any]:
    """Kill sites, and less often the hub and its database; then compare what everyone has."""
    hub = Hub(tools.quick(folder / "hub", url))
    hub.add_study(tools.study_text(min_sites=2), "operator")
    codes = [hub.invite("demo", "operator")[0] for _ in range(N_SITES)]
    hub.close()
    server, mother, per_site = (
        HubProcess(folder / "hub", url),
        Mother("site"),
        n_submissions // N_SITES,
    )
    server.start()
    server.wait()
    wards = [Ward(i, folder, server, codes[i], tools) for i in range(N_SITES)]
    generator = np.random.default_rng(0)
    killed: Counter[str] = Counter()
    training = [0] * N_SITES
    for k in range(n_kills):
        i = k % N_SITES
        ward = wards[i]
        pid = mother.start(**ward.job, n=1 + k * per_site // n_kills, finish=False)
        before = len(ward.notes())
        # A fifth is killed while it starts, three of ten while they wait for their next training,
        # the rest at work.
        moment = generator.random()
        awaited = () if moment < 0.2 else ward.job["idle"] if moment < 0.5 else ("",)
        until = time.monotonic() + 120
        while awaited and not any(
            note.startswith(tuple(awaited)) for note in ward.notes()[before:]
        ):
            assert is_alive(pid) and time.monotonic() < until, (k, ward.notes()[before:][-5:])  # noqa: PT018
            time.sleep(0.002)
        time.sleep(float(generator.random() ** 2) * (0.2 if moment < 0.5 else 0.6))
        assert is_alive(pid), ward.notes()[-3:]
        if database is not None and k % 25 == 24:
            os.kill(database.pid(), signal.SIGKILL)
            killed["database"] += 1
            restart(database)
        if k % 10 == 9:
            server.kill()
            killed["hub"] += 1
            if (
                k % 20 == 9
            ):  # half of the times the site sees the hub come back, else both are gone at once
                server.start()
                server.wait()
                time.sleep(float(generator.random()) * 0.1)
        kill(pid)
        if k % 20 == 19:
            server.start()
            server.wait()
        notes = ward.notes()
        last = (
            "between" if len(notes) == before or notes[-1] in ("done", "unavailable") else notes[-1]
        )
        killed[f"site: {last}"] += 1
        training[i] += last in ("train", "between")
    for ward in wards:
        pid = mother.start(**ward.job, n=per_site, finish=True)
        until = time.monotonic() + 120
        while is_alive(pid):
            assert time.monotonic() < until
            time.sleep(0.02)
    mother.end()
    assert not [note for ward in wards for note in ward.notes() if note.startswith("FAILED")]
    settle(folder / "hub", url)
    hub = Hub(tools.quick(folder / "hub", url, sweep_after_seconds=-1.0))
    rows = hub.store.contributions("demo")
    wasted = 0
    for i, ward in enumerate(wards):
        answered = {row["digest"]: row["sequence"] for row in rows if row["site"] == f"ward {i}"}
        wasted += ward.check(answered, training[i], per_site)
        # while the hub is there: a rotation that was stopped is completed first
        ward.spend_the_rest()
    server.kill()
    server.end()
    assert len(rows) == N_SITES * per_site
    states = Counter((row["site"], row["state"]) for row in rows)
    assert max(states[f"ward {i}", "accepted"] for i in range(N_SITES)) == 1
    assert all(states[f"ward {i}", "accepted"] == 1 for i in (0, 1, 3, 4))
    hub.store.verify()
    contents = [hub.store.content(row["sha256"]) for row in rows]
    n_kept = sum(isinstance(one, bytes) for one in contents) + len(
        list((folder / "hub" / "files").glob("*/*"))
    )
    assert n_kept == len(rows) + len(hub.store.releases("demo"))
    hub.close()
    return {"kills": dict(killed), "submissions": len(rows), "wasted charges": wasted}


def test_a_killed_site_resumes_and_pays_once(tmp_path: Path, tools: Any) -> None:
    """What is killed most here is the site, which knows nothing of the hub's database."""
    _survive(tmp_path, None, tools, n_kills=15, n_submissions=10)


@pytest.mark.soak
def test_200_kills_of_sites_during_50_submissions_on_sqlite(
    tmp_path: Path, tools: Any, record_property: Any
) -> None:
    record_property("numbers", _survive(tmp_path, None, tools, n_kills=200, n_submissions=50))


@pytest.mark.soak
def test_200_kills_of_sites_hub_and_database(
    tmp_path: Path, durable_postgres: Any, tools: Any, record_property: Any
) -> None:
    url = durable_postgres.database()
    numbers = _survive(
        tmp_path, url, tools, n_kills=200, n_submissions=50, database=durable_postgres
    )
    record_property("numbers", numbers)
