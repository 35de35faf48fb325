"""ModelSum: each site's own exact linear model, added up, so that the noise is paid once.

A model is no sum over records, but it is as stable as one: with a ridge that grows with the
records, one of them moves n·w by no more at a large site than at a small one; with a ridge that
does not, it moves w by no more whatever n is; and a model that is cut to a length hides its whole
site. Proofs: docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

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
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.statistics.base import (
    MOST_RECORDS,
    ROUNDING,
    Array,
    ClassStatistic,
    RowStatistic,
    Summed,
    SumTask,
    add_public,
)
from consilience.statistics.spread import shrink_means
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

T = TypeVar("T")

GRAIN_BITS = 16
TOLERANCE = 2.0**-16  # of the gradient of the sum of losses, at every site
# Of the gradient: the tolerance, the quarter of it by which the solver may be wrong, and as much
# for the rounding of n·w, which is below 2^-52 of at most 2^31 gradients.
INEXACT = 1.5 * TOLERANCE
LEAST_RIDGE, MOST_RIDGE = 1e-4, 10.0  # of a mean of losses
LEAST_SUM_RIDGE, MOST_SUM_RIDGE = 1e-3, 1e6  # of a sum of them
LEAST_LENGTH, MOST_LENGTH = 1e-3, 1e4


def code_labels(n_classes: int, labels: Array) -> Array:
    """Return labels as the loss of so many classes takes them."""
    return 2.0 * labels - 1.0 if n_classes == 2 else labels


def _encode(ball: Ball, n_classes: int, chunks: Chunks) -> Chunks:
    for X, y in chunks:
        yield into_ball(X, ball), code_labels(n_classes, y)


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


def read_site(task: SumTask, ball: Ball, n_classes: int, n_features: int) -> ChunkedRecords:
    """Return a site's records for the solver, wherever they are."""
    kind = _Partitions if hasattr(task.records, "gather") else _Records
    return kind(task, ball, n_classes, n_features)


def train_model(
    records: Array | ChunkedRecords, y: Array | None, n_classes: int, ridge: float
) -> Array:
    """Return the minimum of the sum of losses with this ridge, a row for each output.

    Its gradient is at most `TOLERANCE` of that of a record.
    """
    loss = loss_of(n_classes)
    found = solve(records, y, Problem(loss, ridge), tolerance=TOLERANCE * loss.lipschitz).coef
    return np.atleast_2d(np.asarray(found, np.longdouble))


@dataclass(frozen=True)
class AddModel:
    """Train on all records at once, and return the model in whole grains.

    ``counts_records``: it is multiplied by their number. ``grows``: so is the ridge. ``longest`` is
    the length to which it is cut; None cuts nothing.
    """

    ball: Ball
    n_classes: int
    ridge: float
    counts_records: bool = True
    grows: bool = True
    longest: float | None = None

    def __call__(self, chunks: Chunks) -> Array:
        """Return the part of a site with a few records."""
        parts = [(into_ball(X, self.ball), code_labels(self.n_classes, y)) for X, y in chunks]
        rows = np.concatenate([np.asarray(X) for X, _ in parts])
        return self.train(rows, np.concatenate([y for _, y in parts]), len(rows))

    def train(self, records: Array | ChunkedRecords, y: Array | None, n_records: int) -> Array:
        """Return a site's part, each number truncated towards zero."""
        if not n_records:
            width = records.shape[1] if isinstance(records, np.ndarray) else records.n_features
            return np.zeros(max(1, self.n_classes - 1) * width, np.int64)
        ridge = self.ridge * (n_records if self.grows else 1)
        coef = train_model(records, y, self.n_classes, ridge)
        if self.n_classes > 2:  # its rows add up to zero
            coef = helmert(self.n_classes).astype(np.longdouble) @ coef
        if self.longest is not None:
            length = float(np.linalg.norm(coef.astype(np.float64)))
            coef = coef * min(1.0, self.longest / max(length, 1e-300) * ROUNDING)
        times = n_records if self.counts_records else 1
        return np.asarray(np.trunc(coef.ravel() * (times * 2.0**GRAIN_BITS)).astype(np.int64))


def loss_of(n_classes: int) -> Loss:
    """Return the loss of so many classes."""
    return Logistic() if n_classes == 2 else Softmax(n_classes)


@dataclass(eq=False, repr=False, kw_only=True)
class ModelSum(ClassStatistic, RowStatistic):
    """Add up each site's own logistic regression w: the sites' average, with noise added once.

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    regularization
        Under replace-one, Λ of ``mean(loss) + Λ/2 ‖w‖²`` at every site, in coordinates where rows
        have norm <= 1: n·w is added up, and one record moves it by 2/Λ, whatever n is. Under
        add-remove, where n is hidden, λ of ``sum(loss) + λ/2 ‖w‖²``: w is added up, and one record
        moves it by 1/λ.
    max_norm
        None hides single records. A number hides whole sites: w, with Λ as under replace-one, is
        cut to this length, and each site counts the same.
    data_norm, intercept_scaling, classes, schema, noise
        As in `Moments`.
    unit
        ``"record"``, or ``"site"`` with `max_norm`. Persons are not hidden.
    neighbours
        Of whole sites only ``"replace-one"``: they take part by name.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the sum. Proof: docs/guarantees/statistics.md.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> summed = cs.ModelSum(epsilon=1.0, delta=1e-6, schema=schema).fit(table)
    >>> summed.guarantee_, cs.Total().combine([summed]).predict([[-1.0], [1.0]]).tolist()
    (Guarantee(epsilon=1, delta=1e-06, per record, replace-one), ['no', 'yes'])
    """

    makes = LinearEnsemble.kind
    grain: ClassVar[float] = 2.0**-GRAIN_BITS
    adds_records: ClassVar[bool] = False
    units: ClassVar[tuple[str, ...]] = ("record", "site")
    first_settings: ClassVar[Mapping[str, Any]] = {"max_norm": None}
    shorthand = "model-sum"

    regularization: float = 0.01
    max_norm: float | None = None

    @classmethod
    def hidden_by(cls, schema: Schema, settings: Mapping[str, Any]) -> Unit:
        """Return a whole site if models are cut to a length, and otherwise what is usual."""
        cut = settings.get("max_norm") is not None
        return Unit.SITE if cut else super().hidden_by(schema, settings)

    @property
    def holds(self) -> str:
        """What it adds up."""
        times = ", times the number of records" if self._counts_records else ""
        return f"coefficients of a linear model{times}"

    @property
    def _counts_records(self) -> bool:
        return self.unit == Unit.RECORD and self.neighbours == Neighbours.REPLACE_ONE

    @property
    def counts_sites(self) -> bool:
        """Whether each site counts once: where how many records it has is hidden."""
        return not self._counts_records

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        fits = is_positive(self.regularization) and (
            LEAST_RIDGE <= self.regularization <= MOST_RIDGE
        )
        add_remove = self.neighbours == Neighbours.ADD_REMOVE
        least, most = (LEAST_SUM_RIDGE, MOST_SUM_RIDGE) if add_remove else (LEAST_RIDGE, MOST_RIDGE)
        fits = is_positive(self.regularization) and least <= self.regularization <= most
        self._require("regularization", fits, f"a number from {least:g} to {most:g}")
        fits = self.max_norm is None or (
            is_positive(self.max_norm) and LEAST_LENGTH <= self.max_norm <= MOST_LENGTH
        )
        self._require("max_norm", fits, f"None, or a number from {LEAST_LENGTH} to {MOST_LENGTH}")
        if (self.unit == Unit.SITE) != (self.max_norm is not None):
            raise SettingsError(
                f"ModelSum hides whole sites (unit='site') if 'max_norm' says to which length each "
                f"model is cut, and records otherwise. Got unit={self.unit!r} and max_norm="
                f"{self.max_norm!r} instead. Nothing was trained. Set both, or neither."
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
        """Return the L2 norm by which one unit changes what is added up.

        Beside the minimum's own move, which the ridge bounds: both minima may be inexact, and both
        are truncated. A model that is cut is no longer than its bound after that either.
        """
        ends = 2 if neighbours is Neighbours.REPLACE_ONE else 1
        if self.max_norm is not None:
            return float(ends * self.max_norm)
        lipschitz, rounded = loss_of(self.n_classes).lipschitz, math.sqrt(self.length) * self.grain
        if self.counts_sites:  # one record less: its own slope, and two inexact minima
            return lipschitz * (1 + 2 * INEXACT) / self.regularization + rounded
        return ends * (lipschitz * (1 + INEXACT) / self.regularization + rounded)

    @property
    def longest_part(self) -> float:
        """The L2 norm of what one record, or one site if sites count, adds at most."""
        if self.max_norm is None and self.counts_sites:
            # w is no worse than 0, whose loss is n·ln K.
            most = MOST_RECORDS * math.log(self.n_classes)
            return math.sqrt(2 * most / self.regularization) * (1 + INEXACT)
        return super().longest_part

    def adder(self) -> AddModel:
        """Return the function that trains on a site's records."""
        return AddModel(
            Ball.of(self),
            self.n_classes,
            float(self.regularization),
            counts_records=self._counts_records,
            grows=self.neighbours == Neighbours.REPLACE_ONE,
            longest=self.max_norm,
        )

    def exact_total(self, task: SumTask) -> Array:
        """Return what the site adds, in whole grains."""
        add = self.adder()
        records = read_site(task, add.ball, self.n_classes, self._dimension)
        return add.train(records, None, task.n_records)

    def finish(self, total: Summed, public: Public | None = None) -> LinearEnsemble:
        """Return the average model, shrunk as a whole by what noise explains of its length."""
        values, n = total.values, total.size or 1.0
        if public is not None:
            held = 1 if self.counts_sites else len(np.asarray(public.y))
            values, n = values + add_public(self, public), n + held
        mean = shrink_means(values / n, float(total.variance[0]) / n**2)
        coef = mean.reshape(-1, self._dimension)
        if self.n_classes > 2:
            coef = helmert(self.n_classes).T @ coef
        coef, intercept = out_of_ball(coef, self)
        return LinearEnsemble(self.classes_, coef, intercept, np.ones(1), None, ())
