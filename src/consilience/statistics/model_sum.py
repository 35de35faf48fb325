"""ModelSum: each site's own exact linear model, times its records, so that the noise is paid once.

A model is no sum over records, but it is as stable as one: with a ridge that grows with the
records, one of them moves n·w by no more at a large site than at a small one. Proofs:
docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np
from scipy.linalg import helmert

from consilience.aggregators.members import LinearEnsemble
from consilience.errors import SettingsError
from consilience.learners.ball import Ball, into_ball, out_of_ball
from consilience.learners.base import is_positive
from consilience.learners.erm import (
    ChunkedRecords,
    Chunks,
    Logistic,
    Loss,
    Problem,
    Softmax,
    solve,
)
from consilience.privacy.guarantee import Neighbours
from consilience.statistics.base import (
    Array,
    ClassStatistic,
    RowStatistic,
    Summed,
    SumTask,
    add_public,
)
from consilience.statistics.spread import shrink_means
from consilience.tables.public import Public

T = TypeVar("T")

GRAIN_BITS = 16
TOLERANCE = 2.0**-16  # of the gradient of the sum of losses, at every site
# Of the gradient: the tolerance, the quarter of it by which the solver may be wrong, and as much
# for the rounding of n·w, which is below 2^-52 of at most 2^31 gradients.
INEXACT = 1.5 * TOLERANCE
LEAST_RIDGE, MOST_RIDGE = 1e-4, 10.0


def _code(n_classes: int, labels: Array) -> Array:
    return 2.0 * labels - 1.0 if n_classes == 2 else labels


def _encode(ball: Ball, n_classes: int, chunks: Chunks) -> Chunks:
    for X, y in chunks:
        yield into_ball(X, ball), _code(n_classes, y)


def _apply(read: Callable[[Chunks], Chunks], function: Callable[[Chunks], T], chunks: Chunks) -> T:
    return function(read(chunks))


@dataclass(frozen=True)
class _Records:
    """A site's records as the solver reads them, as often as it needs to."""

    task: SumTask
    ball: Ball
    n_classes: int
    n_features: int

    @property
    def n_records(self) -> int:
        """Number of records."""
        return self.task.n_records

    def read(self, chunks: Chunks) -> Chunks:
        """Return encoded blocks of a stream of records."""
        assert self.task.read is not None
        return _encode(self.ball, self.n_classes, self.task.read(chunks))

    def chunks(self) -> Chunks:
        """Yield encoded blocks of records."""
        return self.read(self.task.records.chunks())


class _Partitions(_Records):
    """The same for records that stay with Dask's workers."""

    def gather(self, function: Callable[[Chunks], T], every: int = 1) -> list[T]:
        """Return what `function` makes of the encoded blocks of each partition."""
        assert self.task.read is not None
        encode = partial(_encode, self.ball, self.n_classes)
        own = partial(_apply, self.task.read, partial(_apply, encode, function))
        answers: list[T] = self.task.records.gather(own, every)
        return answers


@dataclass(frozen=True)
class AddModel:
    """Train on all records at once, and return n times the model in whole grains."""

    ball: Ball
    n_classes: int
    ridge: float

    def __call__(self, chunks: Chunks) -> Array:
        """Return n·w of a few records."""
        parts = [(into_ball(X, self.ball), _code(self.n_classes, y)) for X, y in chunks]
        rows = np.concatenate([np.asarray(X) for X, _ in parts])
        return self.train(rows, np.concatenate([y for _, y in parts]), len(rows))

    def train(self, records: Array | ChunkedRecords, y: Array | None, n_records: int) -> Array:
        """Return n·w, each number truncated towards zero."""
        loss = loss_of(self.n_classes)
        if not n_records:
            width = records.shape[1] if isinstance(records, np.ndarray) else records.n_features
            return np.zeros(max(1, self.n_classes - 1) * width, np.int64)
        problem = Problem(loss, self.ridge * n_records)
        found = solve(records, y, problem, tolerance=TOLERANCE * loss.lipschitz).coef
        coef = np.atleast_2d(np.asarray(found, np.longdouble))
        if self.n_classes > 2:  # its rows add up to zero
            coef = helmert(self.n_classes).astype(np.longdouble) @ coef
        return np.asarray(np.trunc(coef.ravel() * (n_records * 2.0**GRAIN_BITS)).astype(np.int64))


def loss_of(n_classes: int) -> Loss:
    """Return the loss of so many classes."""
    return Logistic() if n_classes == 2 else Softmax(n_classes)


@dataclass(eq=False, repr=False, kw_only=True)
class ModelSum(ClassStatistic, RowStatistic):
    """Add up n·w, w each site's own logistic regression: the sites' average, with noise added once.

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    regularization
        Λ of ``mean(loss) + Λ/2 ‖w‖²`` at every site, in coordinates where rows have norm <= 1. One
        record moves n·w by 2/Λ, whatever n is.
    data_norm, intercept_scaling, classes, unit, schema, noise
        As in `Moments`. Only single records are hidden.
    neighbours
        ``"replace-one"``: n·w needs the public number of records.

    Privacy
    -------
    ``guarantee_``: (epsilon, delta) per record under replace-one, against everyone who sees the
    sum. Proof: docs/guarantees/statistics.md.
    """

    makes = LinearEnsemble.kind
    grain: ClassVar[float] = 2.0**-GRAIN_BITS
    adds_records: ClassVar[bool] = False
    shorthand = "model-sum"

    regularization: float = 0.01

    @property
    def holds(self) -> str:
        """What it adds up."""
        return "coefficients of a linear model, times the number of records"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        fits = is_positive(self.regularization) and (
            LEAST_RIDGE <= self.regularization <= MOST_RIDGE
        )
        self._require("regularization", fits, f"a number from {LEAST_RIDGE:g} to {MOST_RIDGE:g}")
        if self.unit != "record" or self.neighbours != "replace-one":
            raise SettingsError(
                "ModelSum hides single records whose number is public: it multiplies a model by "
                "that number. Nothing was trained. Use neighbours='replace-one' without persons, "
                "or another statistic, such as Moments."
            )

    @property
    def _dimension(self) -> int:
        return int(self.n_features_in_) + 1

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return (self.n_classes - 1) * self._dimension

    def weights(self) -> Array:
        """Return 1 for each coefficient."""
        return np.ones(self.length)

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes n·w, or is a part of it.

        Beside the minimum's own move, which the ridge bounds: both minima may be inexact, and both
        are truncated.
        """
        ends = 2 if neighbours is Neighbours.REPLACE_ONE else 1
        steep = loss_of(self.n_classes).lipschitz * (1 + INEXACT)
        return ends * (steep / self.regularization + math.sqrt(self.length) * self.grain)

    def adder(self) -> AddModel:
        """Return the function that trains on a site's records."""
        return AddModel(Ball.of(self), self.n_classes, float(self.regularization))

    def exact_total(self, task: SumTask) -> Array:
        """Return n·w of all records, in whole grains."""
        add = self.adder()
        kind = _Partitions if hasattr(task.records, "gather") else _Records
        records = kind(task, add.ball, self.n_classes, self._dimension)
        return add.train(records, None, task.n_records)

    def finish(self, total: Summed, public: Public | None = None) -> LinearEnsemble:
        """Return the average model, shrunk as a whole by what noise explains of its length."""
        values, n = total.values, total.size or 1.0
        if public is not None:
            values, n = values + add_public(self, public), n + len(np.asarray(public.y))
        mean = shrink_means(values / n, float(total.variance[0]) / n**2)
        coef = mean.reshape(-1, self._dimension)
        if self.n_classes > 2:
            coef = helmert(self.n_classes).T @ coef
        coef, intercept = out_of_ball(coef, self)
        return LinearEnsemble(self.classes_, coef, intercept, np.ones(1), None, ())
