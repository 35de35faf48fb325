"""The sampled attack: train many times on two neighbours and tell their outputs apart.

It works for every learner and looks inside nothing but what is released. The bound on epsilon holds
with confidence 99.9 %, by Clopper-Pearson. Which pair of neighbours is attacked depends on the
learner (`make_attack`): linear learners get a unit at the edge of the declared norm, trees get the
pairs of trees.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from consilience.auditing.along import attacked_rows
from consilience.auditing.attacked import (
    Learner,
    Table,
    copy_learner,
    make_labels,
    plan_training,
    records_per_unit,
)
from consilience.auditing.report import AuditReport
from consilience.learners.axes import Projection
from consilience.learners.base import Plan
from consilience.privacy.accounting import total
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.privacy.mechanisms import Source

Array = NDArray[np.float64]

CONFIDENCE = 0.999  # of a sampled lower bound
RUNS = 4000  # trainings per data set
PILOT_SHARE = 0.2  # of the runs, to choose among several pairs of data sets


@dataclass(frozen=True)
class Attack:
    """Two neighbouring tables, and what an attacker looks at in a learner fitted to one of them."""

    first: Table
    second: Table
    read: Callable[[Learner, Plan], Array]
    name: str


def attack_by_sampling(
    learner: Learner, n_records: int, runs: int | None, source: Source
) -> AuditReport:
    """Train many times on two neighbours and report the largest epsilon that could be shown.

    Where there are several pairs of neighbours, a pilot with a part of the runs chooses the one
    that looks most telling; only the other runs count, so the choice costs no confidence.
    """
    twin, runs = copy_learner(learner, n_records), RUNS if runs is None else runs
    attacks = make_attacks(twin, n_records)
    if len(attacks) > 1:
        pilot = max(10, int(PILOT_SHARE * runs / len(attacks)))
        scores = [_run(attack, twin, pilot, source)[0] for attack in attacks]
        attacks = [attacks[int(np.argmax(scores))]]
        runs -= pilot * len(scores)
    (attack,) = attacks
    report = _run(attack, twin, runs, source)[1]
    return replace(report, worst=f"{attack.name}: {report.worst}")


def _run(attack: Attack, twin: Learner, runs: int, source: Source) -> tuple[float, AuditReport]:
    """Return how far apart the outputs of two neighbours are, and what that proves.

    The distance is that of the first view's means, in standard deviations.
    """
    draws = []
    for table in (attack.first, attack.second):
        task, plan = plan_training(twin, table)
        outputs = []
        for _ in range(runs):
            twin._train(task, plan, source)
            outputs.append(attack.read(twin, plan))
        draws.append(np.stack(outputs))
    claimed = total(plan.events).convert(Neighbours(twin.neighbours))
    first, second = (draw[:, 0] for draw in draws)
    spread = math.hypot(float(first.std()), float(second.std()))
    distance = abs(float(first.mean() - second.mean())) / max(spread, 1e-300)
    return distance, audit_samples(draws[0], draws[1], claimed=claimed)


@singledispatch
def make_attacks(twin: Learner, n_records: int) -> Sequence[Attack]:
    """Return the pairs of neighbours on which learners of this kind are attacked.

    The usual pair differs in one extreme unit: a record at the edge of the declared norm, or as
    many copies of it as a person may have.
    """
    if twin.projection is not None:
        return [_along_axes(twin, twin.projection, n_records)]
    moved, y = records_per_unit(twin), make_labels(twin, n_records + 1)
    sides: list[Table] = []
    for label in (y[0], y[1]):
        # One feature: noise in further ones would only hide more.
        X = np.zeros((n_records - 1 + moved, 1))
        X[:moved, 0] = twin.get_params().get("data_norm", 1.0)
        labels = np.concatenate([np.repeat(label, moved), y[2 : n_records + 1]])
        ids = np.concatenate([np.zeros(moved, int), np.arange(1, n_records)])
        absent = moved if twin.neighbours == "add-remove" and sides else 0
        persons = ids[absent:] if twin.unit == "person" else None
        sides.append(Table(X[absent:], labels[absent:], persons))
    other = "its absence" if twin.neighbours == "add-remove" else "the same with another label"
    name = f"a unit at the edge of the declared norm against {other}"
    return [Attack(sides[0], sides[1], read_released, name)]


def _along_axes(twin: Learner, projection: Projection, n_records: int) -> Attack:
    """Return neighbours whose leading axes differ: a unit at the edge in one column or another."""
    moved, y = records_per_unit(twin), make_labels(twin, n_records + 1)
    labels = np.concatenate([np.repeat(y[0], moved), y[2 : n_records + 1]])
    ids = np.concatenate([np.zeros(moved, int), np.arange(1, n_records)])
    sides: list[Table] = []
    for row in attacked_rows(projection):
        X = np.zeros((len(labels), len(row)))
        X[:moved] = row * twin.get_params().get("data_norm", 1.0)
        absent = moved if twin.neighbours == "add-remove" and sides else 0
        persons = ids[absent:] if twin.unit == "person" else None
        sides.append(Table(X[absent:], labels[absent:], persons))
    other = "its absence" if twin.neighbours == "add-remove" else "one across it"
    return Attack(sides[0], sides[1], read_released, f"a unit along one axis against {other}")


def read_released(learner: Learner, plan: Plan) -> Array:
    """Return everything that was released, as one vector."""
    return np.concatenate([np.ravel(part) for part in learner.released_state().values()])


def audit_samples(
    first: ArrayLike,
    second: ArrayLike,
    *,
    claimed: Guarantee,
    confidence: float = CONFIDENCE,
    n_events: int = 4,
) -> AuditReport:
    """Bound epsilon from below by a mechanism's outputs (run, coordinate) on two neighbours.

    Half of the runs choose the `n_events` most telling events: thresholds on coordinates, on the
    direction between the means, and on the distance from a mean. The other half counts them. The
    bounds are Clopper and Pearson's at `confidence`, with Bonferroni's correction for the number of
    events and for the two probabilities of each.
    """
    a, b = (
        np.asarray(x, dtype=np.float64).reshape(len(np.asarray(x)), -1) for x in (first, second)
    )
    half = min(len(a), len(b)) // 2
    middle, other = a[:half].mean(axis=0), b[:half].mean(axis=0)

    def views(x: Array) -> Array:
        far = [np.sqrt(np.square(x - centre).sum(axis=1)) for centre in (middle, other, 0 * middle)]
        return np.column_stack([x, x @ (other - middle), *far])

    (a_choose, a_count), (b_choose, b_count) = ((views(x[:half]), views(x[half:])) for x in (a, b))
    level = (1 - confidence) / (2 * n_events)
    candidates: list[tuple[float, int, float, bool, bool]] = []
    for view in range(a_choose.shape[1]):
        pooled = np.concatenate([a_choose[:, view], b_choose[:, view]])
        tails = np.concatenate(
            [np.geomspace(5 / half, 0.5, 40), 1 - np.geomspace(5 / half, 0.5, 40)]
        )
        for cut in np.unique(np.quantile(pooled, np.clip(tails, 0, 1))):
            for above in (False, True):
                hits = [int(_event(x[:, view], cut, above).sum()) for x in (a_choose, b_choose)]
                for swap in (False, True):
                    top, bottom = hits[::-1] if swap else hits
                    score = _log_ratio(top, bottom, half, half, level, claimed.delta)
                    candidates.append((score, view, float(cut), above, swap))
    best: tuple[float, str] = (0.0, "no event distinguished them")
    for _, view, cut, above, swap in sorted(candidates, reverse=True)[:n_events]:
        hits = [int(_event(x[:, view], cut, above).sum()) for x in (a_count, b_count)]
        sizes = [len(a_count), len(b_count)]
        (top, bottom), (n_top, n_bottom) = (hits[::-1], sizes[::-1]) if swap else (hits, sizes)
        bound = _log_ratio(top, bottom, n_top, n_bottom, level, claimed.delta)
        if bound > best[0]:
            side = "above" if above else "at most"
            best = bound, f"output {side} {cut:.4g}: {top}/{n_top} runs against {bottom}/{n_bottom}"
    return AuditReport(attack="sample", claimed=claimed, epsilon_lower=best[0], worst=best[1])


def _event(values: Array, cut: float, above: bool) -> NDArray[np.bool_]:
    return values > cut if above else values <= cut


def _log_ratio(
    top: int, bottom: int, n_top: int, n_bottom: int, level: float, delta: float
) -> float:
    """Return a lower confidence bound of ln((P - delta) / Q), zero where there is none."""
    least = float(special.betaincinv(top, n_top - top + 1, level)) if top else 0.0
    most = (
        float(special.betaincinv(bottom + 1, n_bottom - bottom, 1 - level))
        if bottom < n_bottom
        else 1.0
    )
    return max(0.0, math.log((least - delta) / most)) if least > delta else 0.0
