"""A site that is killed at random and repeats its last command, while the hub is killed too."""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilience.hub.hub import Hub
from forks import HubProcess, Mother, SiteProcess, is_alive, kill, restart, settle

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
    wards = [SiteProcess(folder, f"ward {i}", tools.table(200, i), mother) for i in range(N_SITES)]
    for ward, code, idle in zip(wards, codes, IDLE, strict=True):
        ward.job |= {"address": server.address, "code": code, "idle": idle}
    generator = np.random.default_rng(0)
    killed: Counter[str] = Counter()
    training = [0] * N_SITES
    for k in range(n_kills):
        i = k % N_SITES
        ward = wards[i]
        pid = ward.start(n=1 + k * per_site // n_kills, finish=False)
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
        pid = ward.start(n=per_site, finish=True)
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
        wasted += ward.check(answered, per_site, most_wasted=training[i])
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
