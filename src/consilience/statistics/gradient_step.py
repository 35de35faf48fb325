"""GradientStep: one step from a public model, along the gradients of all sites' records.

Labelled public records give a model and its curvature for free. A site adds up the gradients of its
records at that model, each cut to a public length: as many numbers as the model has coefficients,
which need far less noise than a model of the site's own. Proofs: docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy import special
from scipy.linalg import helmert

from consilience.aggregators.blend import fit_public
from consilience.aggregators.members import LinearEnsemble, dense
from consilience.errors import shielded
from consilience.learners.ball import Ball, into_ball, out_of_ball
from consilience.learners.erm import Chunks, Logistic, Loss, Softmax
from consilience.learners.gradient import (
    COEF_BITS,
    GRADIENT_GRAIN,
    add_gradients,
    usual_curvature,
)
from consilience.learners.linear import PrivateLogisticRegression
from consilience.privacy.guarantee import Neighbours
from consilience.statistics.base import (
    Adder,
    Array,
    ClassStatistic,
    RowStatistic,
    Summed,
)
from consilience.statistics.public_model import check_rows, into_steps, read_rows
from consilience.statistics.spread import likeliest_spread
from consilience.tables.public import Public

if TYPE_CHECKING:
    pass

START = "'start' parameter of GradientStep"
COUNT_WEIGHT = 0.05  # of the number of records, where it is not public
# Public records for each column with which half of their own curvature is believed: chosen on the
# tables of benchmarks/joining.md.
FEW = 3.0
FARTHEST = 1.0  # step, as the standard deviation of the log-odds that it adds
MOST_LENGTH = 2.0  # longer gradients there are none of


@dataclass(frozen=True)
class AddGradients:
    """Add up the gradients of records at a public model and, if asked for, count them."""

    ball: Ball
    loss: Loss
    start: Array  # in whole steps
    longest: float
    counts: bool

    def __call__(self, chunks: Chunks) -> Array:
        """Return the sum in whole grains."""
        n_records = 0

        def blocks() -> Chunks:
            nonlocal n_records
            for X, y in chunks:
                n_records += len(y)
                labels = 2.0 * y - 1.0 if self.loss.n_outputs == 1 else y
                yield into_ball(X, self.ball), labels

        contrasts = None if self.loss.n_outputs == 1 else helmert(self.loss.n_outputs)
        total = add_gradients(self.loss, self.start, self.longest, contrasts, blocks()).ravel()
        return np.append(total, round(n_records / GRADIENT_GRAIN)) if self.counts else total


@dataclass(eq=False, repr=False, kw_only=True)
class GradientStep(ClassStatistic, RowStatistic):
    """Add up the gradients of the logistic loss at a public model: one shrunken Newton step.

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    start
        The public model: for two classes one row, for more one row for each class, of coefficients
        and, last, the intercept. `start_from` makes one of labelled public records; simulations
        and trials do so where there is none, and nothing is trained without one.
    longest
        The length to which the gradient of each record is cut, where rows have norm <= 1.
    data_norm
        Declared bound on the norm of a row. Longer rows are scaled down to it.
    intercept_scaling
        The length of the constant feature where rows have norm <= 1.
    classes, neighbours, unit, schema, noise
        As in `Moments`. Under add-remove the number of records is added up too.

    The total needs the labelled public records of the start for its curvature. Without them, as
    for a site alone, a guess takes their place.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the sum. None for public records. Proof: docs/guarantees/statistics.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> start = cs.start_from((X[:100], y[:100]))
    >>> step = cs.GradientStep(epsilon=1.0, delta=1e-6, classes=[0, 1], start=start)
    >>> step.fit(X[100:], y[100:]).guarantee_
    Guarantee(epsilon=1, delta=1e-06, per record, replace-one, 1 assumption)
    >>> cs.Total().combine([step]).predict(X[:5]).shape
    (5,)
    """

    makes = LinearEnsemble.kind
    grain: ClassVar[float] = GRADIENT_GRAIN
    needs_labels: ClassVar[bool] = True
    from_public = ("start", "the model of the public records to start from")
    shorthand = "gradient-step"

    start: Sequence[Sequence[float]] | None = None
    longest: float = 0.25

    @property
    def holds(self) -> str:
        """What it adds up."""
        count = ", one of them a count of records" if self._counts else ""
        return f"sums of gradients at the public model{count}"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        fits = isinstance(self.longest, int | float) and 0.001 <= self.longest <= MOST_LENGTH
        self._require("longest", fits, f"a number from 0.001 to {MOST_LENGTH:g}")
        read_rows(self.start, START)

    def public_settings(self, public: Public) -> dict[str, Any]:
        """Return the model of the public records as the start, unless there is one."""
        if self.start is not None or public.y is None:
            return {}
        declared = None if self.classes is None else list(np.asarray(self.classes).tolist())
        return {"start": start_from(public, classes=declared)}

    @property
    def fixed_features(self) -> int:
        """How many columns the start is for."""
        return int(read_rows(self.start, START).shape[1]) - 1

    @property
    def _loss(self) -> Loss:
        return Logistic() if self.n_classes == 2 else Softmax(self.n_classes)

    @property
    def _counts(self) -> bool:
        return self.neighbours == "add-remove"

    @property
    def length(self) -> int:
        """How many numbers there are: one class less than coefficients, and perhaps a count."""
        return (self.n_classes - 1) * (int(self.n_features_in_) + 1) + self._counts

    def weights(self) -> Array:
        """Return 1 for each coordinate of a gradient, and less for the count."""
        weights = np.ones(self.length)
        if self._counts:
            weights[-1] = COUNT_WEIGHT
        return weights

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes the weighted sum."""
        if neighbours is Neighbours.REPLACE_ONE:
            return 2 * self.longest
        return math.hypot(self.longest, COUNT_WEIGHT if self._counts else 0.0)

    def _start_in_ball(self) -> Array:
        return into_steps(read_rows(self.start, START), Ball.of(self))

    def adder(self) -> Adder:
        """Return the function that adds up records."""
        check_rows(self.start, START, self.n_classes, int(self.n_features_in_))
        start = self._start_in_ball()
        start = start[0] if self.n_classes == 2 else start
        return AddGradients(Ball.of(self), self._loss, start, float(self.longest), self._counts)

    def finish(self, total: Summed, public: Public | None = None) -> LinearEnsemble:
        """Return the start, moved by one Newton step as far as the total stands out from noise."""
        D, outputs = int(self.n_features_in_) + 1, self.n_classes - 1
        start = self._start_in_ball() * 2.0**-COEF_BITS
        gradient = total.values[: outputs * D].reshape(outputs, D)
        size = total.size
        if size is None:
            size = max(float(total.values[-1]), 1.0) if self._counts else 1.0
        curvature, axes = np.linalg.eigh(self._curvature(start, public, size))
        along = gradient @ axes
        noise = np.full(D, float(total.variance[0]))
        # Log-odds do not move farther, in the mean square, than curvature tells.
        most = FARTHEST**2 * usual_curvature(self._loss) * size / float(curvature.sum())
        spread = likeliest_spread(along, curvature, noise, most)
        step = -along * curvature * spread / (np.square(curvature) * spread + noise)
        step = step @ axes.T
        if self.n_classes > 2:
            step = helmert(self.n_classes).T @ step
        coef, intercept = out_of_ball(start + step, self)
        return LinearEnsemble(self.classes_, coef, intercept, np.ones(1), None, ())

    def _curvature(self, start: Array, public: Public | None, size: float) -> Array:
        """Return a cautious second derivative of the loss of so many records, in one contrast.

        Of two classes it is a bound that holds at any distance from the start. It is shrunk to its
        mean as far as there are few public records for so many columns.
        """
        D = start.shape[1]
        if public is None or len(np.asarray(public.y)) == 0:
            return np.asarray(np.eye(D) * (size * 0.2 / D))
        rows = np.asarray(dense(into_ball(public.X, self)), dtype=np.float64)
        scores = rows @ start.T
        if self.n_classes == 2:
            margin = np.maximum(np.abs(scores[:, 0]), 1e-6)
            bend = np.tanh(margin / 2) / (2 * margin)
        else:
            chances = special.softmax(scores, axis=1)
            own = (1 - np.square(chances).sum(axis=1)) / (self.n_classes - 1)
            bend = np.sqrt(own * min(0.5, 1.5 / self.n_classes))
        n = len(rows)
        found = (rows.T * bend) @ rows * (size / n)
        kept = n / (n + FEW * D)
        return np.asarray(kept * found + (1 - kept) * np.eye(D) * (np.trace(found) / D))


@shielded
def start_from(
    public: Public | tuple[Any, Any], *, classes: Sequence[Any] | None = None
) -> list[list[float]]:
    """Return a model of labelled public records as the `start` of a `GradientStep`.

    A logistic regression whose ridge the public records choose by cross-validation.

    Privacy
    -------
    None for the public records.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> start = cs.start_from((X, y))
    >>> len(start), len(start[0])  # one row for two classes: three coefficients and the intercept
    (1, 4)
    """
    learner = PrivateLogisticRegression(epsilon=math.inf, classes=classes)
    model = fit_public(learner, Public.of(public))
    return [
        [*map(float, row), float(offset)]
        for row, offset in zip(model.coef, model.intercept, strict=True)
    ]
