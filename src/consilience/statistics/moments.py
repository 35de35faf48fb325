"""Moments: Σxxᵀ and Σxy, from which least squares follow for classes and for numbers.

Rows lie in the unit ball and are truncated to a grid, so that sums of products are whole numbers.
Proofs: docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy import sparse
from scipy.linalg import helmert

from consilience.aggregators.members import LinearEnsemble
from consilience.learners.ball import Ball, into_ball, out_of_ball
from consilience.learners.erm import Chunks, block_records
from consilience.learners.gradient import ROW_BITS, whole_rows
from consilience.learners.projection import PublicPCA
from consilience.privacy.guarantee import Neighbours
from consilience.statistics.base import (
    Adder,
    Array,
    ClassStatistic,
    NumberStatistic,
    RowStatistic,
    Summed,
    add_public,
)
from consilience.statistics.spread import UNEVEN, likeliest_spread, shrink_means
from consilience.tables.public import Public

if TYPE_CHECKING:
    pass

LABEL_WEIGHT = 1.0  # β, of x·y beside xxᵀ
SQUARE_WEIGHT = 0.5  # γ, of y²
# Of the largest eigenvalue that noise alone would have: eigenvalues are raised by so much, because
# a direction is not known to be flat where noise may have flattened it.
CAUTION = 0.5
# Of a score's mean square: the least that is taken to lie within classes and to be explained.
LEAST_WITHIN, LEAST_EXPLAINED = 0.05, 0.05


@dataclass(frozen=True)
class AddMoments:
    """Add up Σxxᵀ (its lower triangle, row after row), Σxc and, of numbers, Σy²."""

    ball: Ball
    codes: Array | None  # of classes, in whole steps; None: labels are numbers

    def __call__(self, chunks: Chunks) -> Array:
        """Return the sum in whole grains."""
        total = np.zeros((), np.int64)
        for rows, labels in _blocks(self.ball, self.codes, chunks):
            second = rows.T @ rows
            second = second.toarray() if sparse.issparse(second) else second
            parts = [second[np.tril_indices(len(second))], np.asarray(labels.T @ rows).ravel()]
            if self.codes is None:
                parts.append(np.square(labels).sum(axis=0))
            total = total + np.concatenate(parts).astype(np.int64)
        return np.asarray(total)


def _blocks(ball: Ball, codes: Array | None, chunks: Chunks) -> Iterator[tuple[Any, Array]]:
    """Yield rows and labels in whole steps; an empty table is one empty block."""
    for X, y in chunks:
        length = block_records(X.shape[1])
        for start in range(0, max(X.shape[0], 1), length):
            part = slice(start, start + length)
            rows = whole_rows(into_ball(X[part], ball))
            if codes is not None:
                yield rows, codes[y[part]]
            else:
                yield rows, np.trunc(y[part] * 2.0**ROW_BITS)[:, None]


def class_codes(n_classes: int) -> Array:
    """Return a unit vector for each class, all equally far apart: ±1 for two."""
    codes = helmert(n_classes).T * math.sqrt(n_classes / (n_classes - 1))
    return np.asarray(-codes if n_classes == 2 else codes)


def moments_reach(neighbours: Neighbours, beta: float, gamma: float = 0.0) -> float:
    """Return how far one record moves (xxᵀ, βxy, γy²) for ‖x‖ ≤ 1 and |y| ≤ 1.

    Entries beside the diagonal count twice, as in the Frobenius norm.
    """
    b, c = beta * beta, gamma * gamma
    if neighbours is Neighbours.ADD_REMOVE:
        return math.sqrt(1 + b + c)
    opposite = 2 + 2 * b + b * b / 2 if b <= 2 else 4 * b
    return math.sqrt(max(opposite, 2 + b + c))


@dataclass(eq=False, repr=False, kw_only=True)
class _Moments(RowStatistic):
    """What moments of classes and of numbers share."""

    makes = LinearEnsemble.kind
    grain: ClassVar[float] = 4.0**-ROW_BITS

    @property
    def holds(self) -> str:
        """What it adds up."""
        return "sums of products of columns and labels"

    @property
    def _dimension(self) -> int:
        return int(self.n_features_in_) + 1

    @property
    def _outputs(self) -> int:
        return 1

    @property
    def _extra(self) -> int:
        return 0

    @property
    def length(self) -> int:
        """How many numbers there are."""
        D = self._dimension
        return D * (D + 1) // 2 + self._outputs * D + self._extra

    def weights(self) -> Array:
        """Return √2 beside the diagonal, which counts twice, and β for products with labels."""
        D = self._dimension
        second = np.full((D, D), math.sqrt(2))
        np.fill_diagonal(second, 1.0)
        labels = np.full(self._outputs * D, LABEL_WEIGHT)
        return np.concatenate(
            [second[np.tril_indices(D)], labels, np.full(self._extra, SQUARE_WEIGHT)]
        )

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes the weighted sum."""
        return moments_reach(neighbours, LABEL_WEIGHT, SQUARE_WEIGHT if self._extra else 0.0)

    def second_moment(self, total: Summed) -> Array:
        """Return Σxxᵀ of a total with its noise, in the unit ball, the constant column last."""
        D = self._dimension
        second = np.zeros((D, D))
        second[np.tril_indices(D)] = total.values[: D * (D + 1) // 2]
        return np.asarray(second + np.tril(second, -1).T)

    def principal_axes(self, total: Summed, n_components: int) -> PublicPCA:
        """Return the principal axes of all records behind a total, without the constant column.

        Privacy
        -------
        Post-processing of the total: it has the guarantee of what is in that.
        """
        return PublicPCA.of_moment(self.second_moment(total)[:-1, :-1], n_components)

    def _solve(self, total: Summed, public: Public | None) -> _Solution:
        """Return the least-squares coefficients in the unit ball, and what they explain."""
        D, values, size = self._dimension, total.values, total.size
        counted = size if self.unit == "record" else None
        if public is not None:
            values = values + add_public(self, public)
            counted = None if counted is None else counted + len(np.asarray(public.y))
        corner = D * (D + 1) // 2
        second = self.second_moment(replace(total, values=values))
        constant = Ball.of(self).constant
        if counted is not None:  # the constant's own square is known without noise
            second[-1, -1] = counted * constant**2
        n = max(second[-1, -1] / constant**2, 1.0)
        labels = values[corner : corner + self._outputs * D].reshape(self._outputs, D)
        sigma = math.sqrt(total.variance[0])
        noise = float(total.variance[corner])
        # A class code is one long; of numbers the mean square is among the sums.
        scatter = min(max(values[-1] / n, 1e-6), 1.0) if self._extra else 1.0
        return _Solution.of(second, labels, sigma, noise, n, scatter)


@dataclass(frozen=True)
class _Solution:
    """Coefficients, one row for each output, and what is known of their scores."""

    coef: Array
    n: float
    with_labels: Array  # mean of score ⊗ label, as far as noise does not explain it
    squares: Array  # mean of score ⊗ score
    score_means: Array  # times the constant feature, as the label means are
    label_means: Array
    score_noise: float  # variance of the noise in one of these means
    label_noise: float

    @classmethod
    def of(
        cls, second: Array, labels: Array, sigma: float, noise: float, n: float, square: float
    ) -> _Solution:
        """Solve for noisy moments: `sigma` is that of the diagonal, `noise` the labels' variance.

        In the eigenbasis of the second moment, its eigenvalues h raised where noise may have
        lowered them, Σxy_j is N(0, h²τ² + noise + h·square): a coefficient's part, the noise, and
        what records scatter whose labels have that mean square. τ² is the likeliest; the
        coefficient is then shrunk as it should be.
        """
        D = len(second)
        values, axes = np.linalg.eigh(second)
        plain = np.maximum(values, 0.0)
        raised = plain + CAUTION * sigma * math.sqrt(2 * D)
        along = labels @ axes
        scatter = noise + square * np.maximum(plain, 1e-12 * n)
        # The mean square of a score is that of a label at most.
        tau = likeliest_spread(along, raised, scatter, square * n / max(float(raised.sum()), 1e-9))
        gain = raised * tau / (np.square(raised) * tau + scatter)
        coef = along * gain
        # Less what noise explains on average, and one standard deviation more: noise alone must
        # say little.
        length = float(np.square(coef).sum()) / len(coef)
        explained = coef @ along.T
        explained -= (noise * gain.sum() + math.sqrt(noise * length)) * np.eye(len(coef))
        squares = (coef * raised) @ coef.T
        return cls(
            coef @ axes.T,
            n,
            explained / n,
            squares / n,
            coef @ axes.T @ second[-1] / n,
            labels[:, -1] / n,
            length * sigma**2 / 2 / n**2,
            noise / n**2,
        )


def _at_least(matrix: Array, least: float) -> Array:
    """Return the symmetric matrix with no eigenvalue below `least`."""
    values, axes = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray((axes * np.maximum(values, least)) @ axes.T)


@dataclass(eq=False, repr=False, kw_only=True)
class Moments(ClassStatistic, _Moments):
    """Add up second moments and products with labels: a least-squares classifier of a sum.

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    data_norm
        Declared bound on the norm of a row. Longer rows are scaled down to it.
    intercept_scaling
        The length of the constant feature where rows have norm <= 1.
    classes
        The declared labels. Without it they are read from `y`, and the guarantee says so.
    neighbours, unit, schema, noise
        As in `PrivateLogisticRegression`. A person's records are scaled down together so that they
        count as one record at most; `records_per_person` is not used.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the sum. Proof: docs/guarantees/statistics.md.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> sums = [cs.Moments(epsilon=1.0, delta=1e-6, schema=schema).fit(table) for _ in range(3)]
    >>> joined = cs.Total().combine(sums)
    >>> joined.guarantee, joined.predict([[-1.0], [1.0]]).tolist()
    (Guarantee(epsilon=1, delta=1e-06, per record, replace-one, 1 assumption), ['no', 'yes'])
    """

    shorthand = "moments"

    @property
    def _outputs(self) -> int:
        return self.n_classes - 1

    def adder(self) -> Adder:
        """Return the function that adds up records."""
        codes = np.trunc(class_codes(self.n_classes) * 2.0**ROW_BITS)
        return AddMoments(Ball.of(self), codes)

    def finish(self, total: Summed, public: Public | None = None) -> LinearEnsemble:
        """Return the least-squares classifier, its scores turned into log-odds.

        Scores of one class are taken to be normal with the classes' own means and one common
        covariance, all of which follow from the moments.
        """
        found, K = self._solve(total, public), self.n_classes
        codes = class_codes(K)
        constant = Ball.of(self).constant
        uneven = UNEVEN * constant**2
        means = shrink_means(found.label_means, found.label_noise, uneven) / constant
        chances = np.maximum(1 / K + (K - 1) / K * codes @ means, 0.05 / K)
        chances = chances / chances.sum()
        usual = max(float(np.trace(found.squares)) / (K - 1), 1e-12)
        # Of least squares with a constant, scores have the mean of the labels. Where they are
        # shrunk they have a part of it, which is believed unless their own mean stands out from
        # noise. Scores of mean square u have no mean beyond √u, nearly.
        part = min(1.0, 3 * math.sqrt(usual))
        apart = found.score_means - part * means * constant
        apart = shrink_means(apart, found.score_noise, usual * constant**2) / constant
        middle = np.clip(part * means + apart, -0.9 * math.sqrt(usual), 0.9 * math.sqrt(usual))
        explained = _at_least(found.with_labels - np.outer(middle, means), LEAST_EXPLAINED * usual)
        apart = (K - 1) / K * codes @ explained / chances[:, None]  # of the classes from the middle
        within = found.squares - np.outer(middle, middle) - (apart.T * chances) @ apart
        # Not to know the middle makes scores as uncertain as if they scattered so much more.
        unknown = found.score_noise / constant**2 * np.eye(K - 1)
        inverse = np.linalg.inv(_at_least(within, LEAST_WITHIN * usual) + unknown)
        centres = middle + apart
        slopes = centres @ inverse
        offsets = np.log(chances) - np.einsum("ij,ij->i", slopes, centres) / 2
        coef, intercept = out_of_ball(slopes @ found.coef, self)
        intercept = intercept + offsets
        if K == 2:
            coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
        return LinearEnsemble(self.classes_, coef, intercept, np.ones(1), None, ())


@dataclass(eq=False, repr=False, kw_only=True)
class MomentsRegressor(NumberStatistic, _Moments):
    """Add up second moments and products with a number: a ridge regression of a sum.

    Parameters are those of `Moments` without ``classes``, and:

    label_bound
        Declared bound on the absolute label; labels beyond are clipped to it.

    Notes
    -----
    **Privacy.** As `Moments`.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> summed = cs.MomentsRegressor(epsilon=1.0, delta=1e-6, label_bound=2.0).fit(X, X.sum(axis=1))
    >>> cs.Total().combine([summed]).predict(X[:5]).shape
    (5,)
    """

    shorthand = "moments-ridge"

    @property
    def _extra(self) -> int:
        return 1

    def adder(self) -> Adder:
        """Return the function that adds up records."""
        return AddMoments(Ball.of(self), None)

    def finish(self, total: Summed, public: Public | None = None) -> LinearEnsemble:
        """Return the ridge regression."""
        found = self._solve(total, public)
        coef, intercept = out_of_ball(found.coef * float(self.label_bound or 0.0), self)
        return LinearEnsemble(None, coef, intercept, np.ones(1), None, ())
