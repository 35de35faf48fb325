"""Trying a draft on made-up records: a simulation in a process of its own, one in a hub at a time.

The process may have half of the memory that combining may have, and five minutes. A draft is data:
nothing of it can run anything but the learners and aggregators of this package.
"""

from __future__ import annotations

import logging
import math
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilience.errors import ConsilienceError
from consilience.hub.children import (
    LEAST_BYTES,
    Children,
    TookTooLong,
    find_memory,
)
from consilience.hub.hub import Hub, Settings
from consilience.hub.leases import renewing
from consilience.hub.outages import Ended
from consilience.hub.store import Row, Store
from consilience.hub.store.drafts import LEASE_SECONDS, Change
from consilience.protocol import Refusal
from consilience.study import building

if TYPE_CHECKING:
    from consilience.simulation.report import Report

TRIAL_SECONDS = 300.0
MOST_SITES, MOST_RECORDS, REPEATS = 30, 2000, 5
LEAST_SITES, LEAST_RECORDS = 2, 20
N_PUBLIC = 200
TEST_SHARE = 0.3
_TELL_SECONDS = 0.5

logger = logging.getLogger("consilience.hub")


class Trials:
    """The trials of one worker; the database knows whether another worker has one."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._running: dict[str, tuple[Children, threading.Thread]] = {}
        self._lock = threading.Lock()

    def start(self, row: Row, version: int, sites: int, records: int, actor: str) -> None:
        """Begin to try a draft with so many sites, each with so many made-up records."""
        if not (LEAST_SITES <= sites <= MOST_SITES and LEAST_RECORDS <= records <= MOST_RECORDS):
            raise Refusal(
                "malformed",
                f"A draft is tried with {LEAST_SITES} to {MOST_SITES} sites, each with "
                f"{LEAST_RECORDS:,} to {MOST_RECORDS:,} records.",
            )
        self._begin(row, version, {"sites": sites, "records": records}, actor)

    def prepare(self, row: Row, version: int, actor: str) -> None:
        """Begin to compute what the statistic of a draft starts from, of its public records."""
        self._begin(row, version, {"sites": 0, "records": 0}, actor)

    def _begin(self, row: Row, version: int, asked: Row, actor: str) -> None:
        token, draft = secrets.token_hex(8), row["id"]
        size = asked["sites"], asked["records"]
        asked = {**asked, "token": token, "done": 0, "cells": 0}
        memory = max(LEAST_BYTES, find_memory(self.hub.settings) // 2)
        limited = replace(self.hub.settings, combine_seconds=TRIAL_SECONDS, combine_bytes=memory)
        children = Children(begin_trial, limited)
        arguments = (draft, token, row["facts"], *size)
        change = Change(version, "method", row["facts"])
        run = children, arguments, change, actor
        thread = threading.Thread(target=self._run, args=run, daemon=True)
        with self._lock:
            refusal = self.hub.store.begin_trial(draft, version, asked, actor)
            if refusal is not None:
                raise refusal
            # Nobody wants what still goes on: its draft was changed or deleted.
            for unwanted, _ in self._running.values():
                unwanted.stop()
            self._running[token] = children, thread
        thread.start()

    def _run(
        self, children: Children, arguments: tuple[Any, ...], change: Change, actor: str
    ) -> None:
        draft, token, _, sites, _ = arguments
        renew = partial(self.hub.store.renew_trial, draft, token)
        try:
            with renewing(renew, LEASE_SECONDS, "a trial"):
                outcome = {"state": "done", **children.work(*arguments)}
        except Exception as problem:
            outcome = {"state": "failed", "problem": _describe(problem, is_trial=sites > 0)}
            if not isinstance(problem, Refusal | TookTooLong | MemoryError):
                logger.exception("a draft could not be tried")
        finally:
            children.stop()
            with self._lock:
                self._running.pop(token, None)
        try:
            statistic = outcome.pop("statistic", None)
            # It is over, also where what was computed is what the draft has already.
            over = {"state": "prepared"} if statistic else outcome
            wanted = self.hub.store.note_trial(draft, token, over)
            if wanted and statistic:
                facts = {**change.facts, "statistic": statistic}
                self.hub.store.change_draft(draft, change._replace(facts=facts), actor)
        except Exception:  # the trial counts as over when its time has passed
            logger.exception("the outcome of a trial was not kept")

    def end(self, row: Row) -> None:
        """End the trial of a draft, if it goes on."""
        trial = row["trial"] or {}
        if trial.get("state") == "running":
            self.hub.store.note_trial(row["id"], trial["token"], {"state": "ended"})
        with self._lock:
            running = self._running.get(trial.get("token", ""))
        if running is not None:
            running[0].stop()

    def stop(self) -> None:
        """End all trials of this worker."""
        with self._lock:
            running = list(self._running.values())
        for children, thread in running:
            children.stop()
            thread.join(10.0)


def _describe(problem: Exception, *, is_trial: bool) -> str:
    """Say why a trial, or what computes a start from public records, brought no result."""
    less = "Try fewer sites or records" if is_trial else "Use a smaller file of public records"
    if isinstance(problem, Refusal):
        return problem.message
    if isinstance(problem, TookTooLong):
        said = f"It took more than {TRIAL_SECONDS / 60:g} minutes and was ended. {less}"
        elsewhere = ", or run consilience simulate with the study file on another machine"
        return f"{said}{elsewhere if is_trial else ''}."
    if isinstance(problem, MemoryError):
        return f"It needed more memory than the hub allows. {less}."
    if isinstance(problem, Ended):
        return f"Its process was ended by the machine, perhaps for want of memory. {less}."
    return "It could not be finished, and the hub's log says why."


# ----------------------------------------------------------------------------- in the other process


def begin_trial(settings: Settings) -> Callable[..., Row]:
    """Open the database in a process of its own, and return what tries a draft there."""
    store = Store(settings.folder, settings.url, sweep_after=math.inf)

    def work(draft: str, token: str, facts: building.Facts, sites: int, records: int) -> Row:
        told = [-math.inf]

        def tell(done: int, cells: int) -> None:
            if done < cells and time.monotonic() - told[0] < _TELL_SECONDS:
                return
            told[0] = time.monotonic()
            if not store.note_trial(draft, token, {"done": done, "cells": cells}):
                raise Refusal("draft-changed", "The draft was changed, and its trial was ended.")

        try:
            if not sites:
                return {"statistic": prepare_statistic(store, facts)}
            return try_draft(facts, sites, records, tell)
        except ConsilienceError as problem:
            raise Refusal("malformed", str(problem)) from None

    return work


def prepare_statistic(store: Store, facts: building.Facts) -> building.Facts:
    """Return a draft's statistic with what it starts from, computed from the public records."""
    from consilience.learners.registry import LEARNERS
    from consilience.study.draft import find_start
    from consilience.study.records import PublicFile
    from consilience.tables.schema import Schema

    statistic, schema = facts["statistic"], Schema.from_dict(facts["schema"])
    kind, file = LEARNERS[statistic["name"]], PublicFile(**facts["public"])
    assert kind.from_public is not None
    with tempfile.TemporaryDirectory() as folder:
        # The ending of its name says how to read it.
        Path(folder, file.file).symlink_to(store.file_path(file.sha256))
        public = file.read(schema, folder)
    made = {**statistic, kind.from_public[0]: find_start(kind, schema, public)}
    return dict(building.limited({**facts, "statistic": made})["statistic"])


def try_draft(
    facts: building.Facts, sites: int, records: int, tell: Callable[[int, int], None]
) -> Row:
    """Return what a simulation of a draft finds on made-up records, in words and numbers."""
    from consilience.simulation.division import Division
    from consilience.simulation.made_up import make_table
    from consilience.simulation.simulate import Runs, simulate

    study = building.read(facts)
    public = N_PUBLIC if study.public is not None else 0
    n = math.ceil((sites * records + public + 1) / (1 - TEST_SHARE)) + 1
    table = make_table(study.schema, n, seed=1)
    division = Division(sites=sites, public=public or None, test=TEST_SHARE)
    report = simulate(
        study, table, division=division, runs=Runs(repeats=REPEATS, n_jobs=1, progress=tell)
    )
    metric = report.measure
    verdicts = [line for line in report.sentence.splitlines() if " at epsilon=" in line]
    return {
        "tables": [_tabulate(report, learner) for learner in dict(report.cells)],
        "metric": metric.title,
        "percent": metric.percent,
        "higher": metric.higher_is_better,
        "verdicts": [f"{line.partition('. ')[0].rstrip('.')}." for line in verdicts],
        "sentence": report.sentence,
        "repeats": REPEATS,
        "seconds": round(report.seconds, 1),
    }


def _tabulate(report: Report, learner: str) -> Row:
    """Return the means and standard errors of a learner's methods at each level, best first."""
    lines = [line for line in report.table() if line.learner == learner]
    levels = list(dict.fromkeys(line.epsilon for line in lines))
    found = {
        (line.method, line.epsilon): (line.mean, line.se if math.isfinite(line.se) else None)
        for line in lines
    }
    kinds = {line.method: line.kind for line in lines}
    sign = -1.0 if report.measure.higher_is_better else 1.0

    def order(method: str) -> float:
        means = [found[method, level][0] for level in levels if (method, level) in found]
        return sign * sum(means) / len(means)

    rows = [
        {
            "title": report.title_of(method),
            "joined": kinds[method] == "distributed",
            "cells": [found.get((method, level)) for level in levels],
        }
        for method in sorted(kinds, key=order)
    ]
    return {"learner": learner, "levels": levels, "rows": rows}
