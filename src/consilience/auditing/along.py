"""The attack on models along axes: what axes of the records and the model tell together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.auditing.attacked import Table, plan_training
from consilience.auditing.pairs import Pair
from consilience.auditing.report import Check
from consilience.learners.axes import Projection
from consilience.learners.linear import LinearLearner, ProjectedPlan
from consilience.learners.projection import MomentTask
from consilience.privacy.accounting import L2Laplace
from consilience.privacy.mechanisms import Source

Array = NDArray[np.float64]


def plan_along(twin: LinearLearner, n_records: int) -> ProjectedPlan:
    """Return the plan of a model along axes."""
    _, plan = plan_training(twin, _table(twin, n_records, 0))
    assert isinstance(plan, ProjectedPlan)
    return plan


def attacked_rows(projection: Projection) -> Array:
    """Return two orthogonal rows of length 1 that attacks put in each other's place.

    The first lies along an axis that all know, if there is one.
    """
    known = getattr(projection, "known", None)
    if known is None:
        return np.eye(projection.n_components + 1)[[0, -1]]
    first = known.directions[0] / np.linalg.norm(known.directions[0])
    other = np.eye(len(first))[int(np.abs(first).argmin())]
    other = other - (other @ first) * first
    return np.stack([first, other / max(float(np.linalg.norm(other)), 1e-9)])


def _table(twin: LinearLearner, n_records: int, which: int) -> Table:
    assert twin.projection is not None
    row = attacked_rows(twin.projection)[which]
    X = np.zeros((n_records, len(row)))
    X[0] = row * twin.data_norm
    persons = np.arange(n_records) if twin.unit == "person" else None
    settings: dict[str, Any] = twin.get_params(deep=False)
    bound, classes = settings.get("label_bound"), settings.get("classes")
    ends = [-bound, bound] if bound else [0, 1] if classes is None else np.asarray(classes)
    return Table(X, np.resize(np.asarray(ends), n_records), persons)


def check_free_axes(twin: LinearLearner, n_records: int, source: Source) -> tuple[Check, ...]:
    """Check that axes for which nothing is drawn are the same whatever the records are."""
    assert twin.projection is not None
    found = []
    for which in (0, 1):
        task, plan = plan_training(twin, _table(twin, n_records, which))
        assert isinstance(plan, ProjectedPlan)
        records = MomentTask(task.X, task.persons)
        found.append(twin.projection.find(twin, records, plan.axes, source).steps)
    same = float(np.array_equal(found[0], found[1]))
    return (Check("axes that cost nothing are those of no record", same),)


@dataclass(frozen=True)
class AlongAxes:
    """The loss of the noisy moment beside that of the model, for one axis and any pair.

    The attacker sees more than is released: the moment itself. Far out in a direction B its
    density tells neighbours apart by ⟨B, M - M'⟩ / (‖B‖ scale), and its leading axis is that of B.
    B is chosen so that this is the first column. A row has its coordinate along it, and, where that
    helps, the rest of its length along the second column.
    """

    noise: L2Laplace

    def loss(self, pair: Pair, points: Array) -> Array:
        """Return the privacy loss of moment and model together, at each point."""
        a, b = self._own(pair, points)
        both = a.shape[1] > 0 and b.shape[1] > 0
        moved = np.square(a).sum(axis=1) + (1 - (2 if both else 1) * np.square(b)).sum(axis=1)
        beside = moved / (math.sqrt(2 if both else 1) * self.noise.scale)
        return np.asarray(pair.loss(points) + beside)

    def _own(self, pair: Pair, points: Array) -> tuple[Array, Array]:
        """Return the coordinates of the first's own rows, and of the second's."""
        rows = np.clip(pair.rows(points)[:, :, 0], -1.0, 1.0)
        end = pair.shared + pair.first
        return rows[:, pair.shared : end], rows[:, end:]
