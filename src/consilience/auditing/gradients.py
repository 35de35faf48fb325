"""The exact attack on noisy gradients: how far one unit moves the sums, in their noise.

Whoever sees every noisy sum sees more than any release shows. Between two neighbouring tables these
sums differ by known whole numbers, so that the best attack on all of them together is the one on a
single Gaussian that is moved as far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from consilience.auditing.attacked import (
    Array,
    Learner,
    Table,
    make_labels,
    plan_training,
    records_per_unit,
)
from consilience.auditing.checks import check_gaussian
from consilience.auditing.report import Check
from consilience.learners.gradient import COEF_BITS, GradientPlan, Sums
from consilience.learners.perturbation import LinearTask
from consilience.privacy.accounting import GradientSteps
from consilience.privacy.mechanisms import Source, gradient_noise

CONTRADICTING = 500  # records of each kind
_UNWRAPPED = 2.0**58  # grains: of noise so wide that it wraps around, no law can be seen


class Shift(NamedTuple):
    """By how many standard deviations a unit moves everything, and which unit it is."""

    mu: float
    what: str


def attack_gradients(
    twin: Learner, task: LinearTask, plan: GradientPlan, restarts: int, runs: int, source: Source
) -> tuple[Shift, tuple[Check, ...]]:
    """Return the farthest shift that was found, and checks of the noise as it is drawn."""
    shifts = [
        Shift(_distance(twin, plan, *pair, source), what)
        for pair, what in _pairs(twin, task.dimension - bool(twin.get_params()["fit_intercept"]))
    ][: max(restarts, 1) * 4]
    event = plan.event
    if event.gradient_sigma > _UNWRAPPED * event.gradient_grain:
        return max(shifts), ()
    drawn = gradient_noise((max(runs, 1), 4), event=event, source=source)
    checks = check_gaussian(drawn * event.gradient_grain, sigma=event.gradient_sigma)
    return max(shifts), checks


def _pairs(twin: Learner, n_features: int) -> Iterator[tuple[tuple[Table, Table], str]]:
    """Yield neighbouring tables that differ in one unit of long rows, and in words how."""
    norm, unit = 1e6 * twin.get_params()["data_norm"], records_per_unit(twin)
    one = np.zeros(n_features)
    one[0] = norm
    other = np.roll(one, 1)
    first, last = make_labels(twin, 2)
    # Records that contradict each other hold a training where gradients are long.
    rest = [(row, label) for row in (one, other) for label in (first, last)] * CONTRADICTING
    replaced = twin.neighbours == "replace-one"
    for row, label, what in (
        (-one, first, "the opposite row"),
        (other, first, "an orthogonal row"),
        (one, last, "the other label"),
        (-other, last, "an orthogonal row and the other label"),
    ):
        left = [(one, first)] * unit
        right = [(row, label)] * unit if replaced else []
        words = f"replaced by {what}" if replaced else "removed"
        yield (_table(twin, left, rest), _table(twin, right, rest)), f"{unit} long records, {words}"


def _table(
    twin: Learner, unit: list[tuple[Array, object]], rest: list[tuple[Array, object]]
) -> Table:
    rows = [*unit, *rest]
    X, y = np.array([row for row, _ in rows]), np.array([label for _, label in rows])
    if twin.unit != "person":
        return Table(X, y)
    persons = np.array([0] * len(unit) + list(range(1, len(rest) + 1)))
    return Table(X, y, persons)


def _distance(twin: Learner, plan: GradientPlan, one: Table, other: Table, source: Source) -> float:
    """Return how far apart two tables' sums are, along points that a training visits."""
    event: GradientSteps = plan.event
    tasks = [plan_training(twin, table)[0] for table in (one, other)]
    near, far = (Sums(task) for task in tasks)
    moment = _norm(near.moment() - far.moment()) * event.moment_grain / event.moment_sigma
    shape = plan.release(tasks[0], source).shape
    points = [np.zeros(shape), plan.release(tasks[0], source)]
    gaps = []
    for point in points:
        whole = np.trunc(point * 2.0**COEF_BITS)
        gap = _norm(near.gradient(whole) - far.gradient(whole))
        gaps.append(gap * event.gradient_grain / event.gradient_sigma)
    # The first point is always zero; of the others, the one that shows less stands for all.
    return math.hypot(moment, gaps[0], math.sqrt(event.steps - 1) * min(gaps))


def _norm(gap: Array) -> float:
    """Return the length of a symmetric matrix, a vector or a table of whole numbers."""
    return math.sqrt(float(sum(int(value) ** 2 for value in gap.ravel())))
