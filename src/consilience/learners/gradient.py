"""Noisy gradients: the mechanism of linear learners that makes the most of a positive delta.

A noisy second moment says how steep the loss is in which direction. Then a few gradients are summed
at points that follow from what was drawn before, each record's part cut to a declared length. Every
record is rounded to a public grid first, so that sums are whole numbers: no order of adding rounds
them, exact discrete noise hides them, and all that follows may round as it likes. Proofs:
docs/guarantees/gradient.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from consilience.errors import GuaranteeVoid
from consilience.learners.erm import (
    Chunks,
    Huber,
    HuberHinge,
    Loss,
    Matrix,
    PartitionedRecords,
    block_records,
    check_labels,
    one_blas_thread,
)
from consilience.privacy.accounting import Event, GradientSteps
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.mechanisms import Source, gradient_noise, noisy_moment
from consilience.privacy.vector_noise import calibrate_steps

if TYPE_CHECKING:
    from consilience.learners.perturbation import LinearTask

Array = NDArray[Any]

# Fixed on Adult, MNIST, HAR and heart disease, with Covertype, KDD, eICU and credit-card default in
# view too, so that none of them is unseen by the rule.
FEWEST_STEPS, MOST_STEPS = 5, 50
PACE = 3.5  # steps where the records' curvature is as large as the noise
AVERAGED = 0.25  # of the points, the last ones: their mean has less noise than any of them
MOMENT_SHARE = 0.1
PRIOR = 700.0  # a public guess of the squared length of coefficients, where there is no noise
CAUTIOUS = 10  # classes of whose moment all noise counts; fixed on HAR and MNIST, also unbalanced
WIDEST = 256  # columns of a whole second moment; of more, only the diagonal is bought

# Rows lie on a grid of 2⁻¹⁶ and slopes on one of 2⁻¹⁵: 2³¹ records' products add up to less than
# 2⁶³, and those of a block to less than 2⁵³, where doubles add exactly in any order.
ROW_BITS = 16
SLOPE_BITS = 15
MOMENT_GRAIN = 4.0**-ROW_BITS
GRADIENT_GRAIN = 2.0 ** -(ROW_BITS + SLOPE_BITS)
COEF_BITS = 20
LONGEST_COEF = 2.0 ** (53 - COEF_BITS - ROW_BITS - 1)  # up to twice as long ones have exact scores
ROUNDING = 1 - 2.0**-40  # of a slope that was cut: covers every rounding before it is truncated


class LinearSettings(Protocol):
    """What a plan reads of a linear learner."""

    epsilon: float
    delta: float
    mechanism: str
    regularization: float | str
    neighbours: str
    public_size: int | None
    unit: str
    records_per_person: int | None
    calibration: str
    random_state: object


def usual_score(loss: Loss) -> float:
    """Return a public guess of the standard deviation of scores: of logits, or of scaled labels."""
    if isinstance(loss, Huber):
        return 0.7
    return 1.5 if loss.n_outputs == 1 else 2.2


def longest_gradient(loss: Loss) -> float:
    """Return the length to which a record's gradient is cut.

    Where nothing was learned yet a record's slope is ½ (logistic), 1 (hinge) or nearly 1 (softmax,
    over all classes); only records on the wrong side are steeper.
    """
    if isinstance(loss, HuberHinge):
        return 0.8
    return min(0.4, loss.lipschitz) if loss.n_outputs == 1 else 0.5


def usual_curvature(loss: Loss) -> float:
    """Return how much a record adds to the curvature, at most or, of many classes, usually.

    A softmax is as curved as two of its classes that share a record; where there are many, few do.
    """
    return min(loss.curvature, 1.5 / loss.n_outputs) if loss.n_outputs > 1 else loss.curvature


def caution(loss: Loss) -> float:
    """Return how much of what the moment's noise may hide counts as curvature.

    All of it, of one output or of many. Each of a few classes needs only a part: the steps of a
    metric that is too steep are too short, and classes that are not equally frequent then all look
    like the most frequent one. The more classes there are, the more noise has a step.
    """
    return min(1.0, loss.n_outputs / CAUTIOUS) if loss.n_outputs > 1 else 1.0


def public_steps(noise: float, curvature: float) -> int:
    """Return the number of steps where one alone would have that noise, from public facts.

    Many steps come closer to the minimum and, where the records say little, closer to the noise,
    too. So they grow with the `curvature` that all records may add, slowly: by its cube root.
    """
    return min(max(round(PACE * float(np.cbrt(curvature / noise))), FEWEST_STEPS), MOST_STEPS)


@dataclass(frozen=True)
class GradientPlan:
    """What will be drawn and how the points follow; all of it computed from public facts."""

    event: GradientSteps
    longest: float  # coefficients are cut to that length
    n_problems: int
    least: float | None  # λ of an automatic ridge where the records say much, and it is weaker

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn, for all problems."""
        return [self.event] * self.n_problems

    @property
    def regularization(self) -> float:
        """The un-normalised λ of the ridge, where it is strongest."""
        return self.event.ridge

    def ridge_along(self, curvature: Array) -> Array:
        """Return λ in each direction, to whose curvature the records add that much.

        Of a coefficient that is N(0, τ²), known through a gradient with noise of standard deviation
        s, the best estimate is that of a ridge of (s/τ)²/h where the curvature is h. An automatic
        ridge is that, and no more than its λ = s/τ where h is too small to be known.
        """
        if self.least is None:
            return np.full_like(curvature, self.regularization)
        noisy = self.regularization - self.least
        return np.asarray(self.least + noisy**2 / (noisy + curvature))

    def longest_release(self, learner: LinearSettings, task: LinearTask) -> float:
        """Return a length that no release exceeds."""
        return self.longest * (1 + 2.0**-40)

    def release(self, task: LinearTask, source: Source) -> Array:
        """Draw and descend; return (d,) or (K, d) in the unit ball's coordinates.

        Privacy
        -------
        Exactly `event`; docs/guarantees/gradient.md.
        """
        with one_blas_thread():
            return _descend(Sums(task), self, source)


def plan_gradient(
    learner: LinearSettings,
    task: LinearTask,
    *,
    size: int,
    per_unit: int,
    epsilon: float,
    delta: float,
) -> GradientPlan:
    """Decide noise and ridge for one problem at its share of the budget."""
    replaced, d = learner.neighbours == "replace-one", task.dimension
    # Two moments have a nonnegative inner product, two gradients may be opposite.
    moment = per_unit * (math.sqrt(2) if replaced else 1.0)
    gradient = per_unit * (2.0 if replaced else 1.0) * longest_gradient(task.loss)
    calibrated = functools.partial(
        calibrate_steps,
        (moment, gradient),
        (MOMENT_GRAIN, GRADIENT_GRAIN),
        epsilon=epsilon,
        delta=delta,
        share=MOMENT_SHARE,
    )
    steps = public_steps(calibrated(steps=1)[1], per_unit * size * usual_curvature(task.loss))
    moment_sigma, sigma = calibrated(steps=steps)
    least = automatic_ridge(d) if isinstance(learner.regularization, str) else None
    if isinstance(learner.regularization, str):
        ridge = automatic_ridge(d, sigma / math.sqrt(steps), usual_score(task.loss))
    else:
        ridge = learner.regularization * size
    event = GradientSteps(
        moment_sensitivity=moment,
        moment_sigma=moment_sigma,
        moment_grain=MOMENT_GRAIN,
        gradient_sensitivity=gradient,
        gradient_sigma=sigma,
        gradient_grain=GRADIENT_GRAIN,
        steps=steps,
        length=(d * (d + 1) // 2 if d <= WIDEST else d) + steps * d * task.loss.n_outputs,
        ridge=ridge,
        at_delta=delta,
        unit=Unit(learner.unit),
        neighbours=Neighbours(learner.neighbours),
    )
    # With a ridge of λ in every direction J of a minimum is at most J(0), which bounds its length.
    longest = math.sqrt(2 * per_unit * size * task.loss.at_zero / ridge)
    return GradientPlan(event, longest, task.n_problems, least)


def automatic_ridge(dimension: int, noise: float = 0.0, score: float = 1.0) -> float:
    """Return λ for a gradient with noise of that standard deviation in each coordinate.

    Coefficients that are `PRIOR`^½ long, in all directions together, ask for a ridge of d/PRIOR
    without noise; of very many columns most are usually 0. With noise of standard deviation s a
    direction in which the records add h to the curvature is known up to s/h, and nothing can be
    learned where that exceeds a usual `score`: there, where h < s/score, the ridge prevails.
    """
    return noise / score + min(dimension, WIDEST) / PRIOR


class Sums:
    """Exact sums over the records of a task."""

    def __init__(self, task: LinearTask) -> None:
        self.loss, self.dimension = task.loss, task.dimension
        self._records = task.records
        self._once: list[_Block] = []
        if task.records is None:
            self._once = list(_blocks(task.loss, [(task.X, task.y)]))

    def moment(self) -> Array:
        """Return Σxxᵀ, or its diagonal if there are too many columns, in whole numbers."""
        return self._gather(functools.partial(_moment, self.dimension))

    def gradient(self, coef: Array) -> Array:
        """Return Σ of the records' cut gradients at `coef`, in whole numbers."""
        return self._gather(functools.partial(_gradient, self.loss, coef))

    def _gather(self, function: Callable[[Iterator[_Block]], Array]) -> Array:
        if self._records is None:
            return function(iter(self._once))
        whole = functools.partial(_of_chunks, self.loss, function)
        if hasattr(self._records, "gather"):
            parts = cast(PartitionedRecords, self._records).gather(whole)
            return functools.reduce(np.add, parts)
        return whole(self._records.chunks())


class _Block(NamedTuple):
    """Rows in whole steps of their grid, their labels, and how long a slope of each may be."""

    rows: Matrix
    y: Array
    limits: Array


def _of_chunks(loss: Loss, function: Callable[[Iterator[_Block]], Array], chunks: Chunks) -> Array:
    return function(_blocks(loss, chunks))


def add_gradients(
    loss: Loss, coef: Array, longest: float, contrasts: Array | None, chunks: Chunks
) -> Array:
    """Return the sum of gradients at a public point, each cut to `longest`, in whole grains.

    `coef` is in whole steps of its grid. With `contrasts`, one row for each, a softmax's slopes are
    brought to these before they are cut.
    """
    return _gradient(loss, coef, _blocks(loss, chunks, longest), contrasts)


def check_steps(coef: Array) -> None:
    """Refuse coefficients whose scores would not be exact; they must be public, as all are here.

    A score that is no number would become the most negative whole number, whatever hides the sum.
    """
    longest = 2 * LONGEST_COEF * 2.0**COEF_BITS
    squares = np.square(np.atleast_2d(coef)).sum(axis=1)  # of each class
    if not float(squares.max()) <= longest * longest:
        raise GuaranteeVoid(
            "Coefficients are too long for exact scores, or are no numbers. Nothing was added up. "
            "Choose a stronger regularization, or a shorter public model."
        )


def whole_rows(X: Matrix) -> Matrix:
    """Return rows in whole steps of the grid, truncated: no row gets longer."""
    rows: Any = X * 2.0**ROW_BITS
    whole: Matrix = rows.trunc() if sparse.issparse(rows) else np.trunc(rows, out=rows)
    return whole


def _blocks(
    loss: Loss, chunks: Iterable[tuple[Any, Array]], longest: float | None = None
) -> Iterator[_Block]:
    """Yield rows in whole steps, and how long slopes may be for gradients of that length."""
    longest = longest_gradient(loss) if longest is None else longest
    kind = np.float64 if loss.n_outputs == 1 else np.int64
    for X, y in chunks:
        check_labels(y, X.shape[0])
        length = block_records(X.shape[1])
        for start in range(0, X.shape[0], length):
            part = slice(start, start + length)
            rows = whole_rows(X[part])
            lengths = np.sqrt(_squared_lengths(rows)) * 2.0**-ROW_BITS
            with np.errstate(divide="ignore"):
                limits = longest / lengths
            yield _Block(rows, y[part].astype(kind, copy=False), limits)


def _squared_lengths(rows: Matrix) -> Array:
    if sparse.issparse(rows):
        return np.ravel(_squared(rows).sum(axis=1))
    return np.asarray(np.einsum("ij,ij->i", rows, rows))


def _moment(dimension: int, blocks: Iterator[_Block]) -> Array:
    whole = dimension <= WIDEST
    total = np.zeros((dimension, dimension) if whole else dimension, np.int64)
    for rows, _, _ in blocks:
        part: Any = rows.T @ rows if whole else _squared(rows).sum(axis=0)
        total += np.asarray(part.todense() if sparse.issparse(part) else part).astype(np.int64)
    return total


def _squared(rows: Matrix) -> Matrix:
    return cast(Any, rows).multiply(rows) if sparse.issparse(rows) else np.square(rows)


def _gradient(
    loss: Loss, coef: Array, blocks: Iterator[_Block], contrasts: Array | None = None
) -> Array:
    """Return Σ slope·x; `coef` is in whole steps of its grid, so that scores are exact."""
    check_steps(coef)
    shape = coef.shape if contrasts is None else (len(contrasts), coef.shape[1])
    total = np.zeros(shape, np.int64)
    scaled = coef.T * 2.0 ** -(ROW_BITS + COEF_BITS)  # exact, as a power of two is
    for rows, y, limits in blocks:
        slopes = loss.slope(np.asarray((rows @ scaled).T, order="C"), y)
        if contrasts is not None:
            slopes = _contrast(contrasts, slopes)
        if slopes.ndim == 1:
            np.minimum(np.maximum(slopes, -limits, out=slopes), limits, out=slopes)
        else:
            with np.errstate(divide="ignore"):
                slopes *= np.minimum(1.0, limits / _lengths(slopes))
        slopes *= 2.0**SLOPE_BITS * ROUNDING
        total += np.asarray(np.trunc(slopes, out=slopes) @ rows).astype(np.int64)
    return total


def _contrast(contrasts: Array, slopes: Array) -> Array:
    """Return contrasts of slopes, added up one class after another as `Softmax` does."""
    parts = (column[:, None] * slope for column, slope in zip(contrasts.T, slopes, strict=True))
    return functools.reduce(np.add, parts)


def _lengths(slopes: Array) -> Array:
    """Return the length of each record's slopes, class after class (see `Softmax`)."""
    return np.asarray(np.sqrt(functools.reduce(np.add, np.square(slopes))))


def _descend(sums: Sums, plan: GradientPlan, source: Source) -> Array:
    """Follow noisy gradients in the metric of the noisy moment; everything after a draw is free."""
    event = plan.event
    moment = noisy_moment(sums.moment(), event=event, source=source) * MOMENT_GRAIN
    step = _newton(moment, plan, sums.loss)
    outputs = sums.loss.n_outputs
    coef = np.zeros((sums.dimension,) if outputs == 1 else (outputs, sums.dimension))
    noise = gradient_noise((event.steps, *coef.shape), event=event, source=source)
    last: list[Array] = []
    for drawn in range(event.steps):
        # Rounded and short enough for exact scores.
        coef = np.trunc(_cut(coef, min(plan.longest, LONGEST_COEF)) * 2.0**COEF_BITS)
        gradient = (sums.gradient(coef) + noise[drawn]) * GRADIENT_GRAIN
        coef *= 2.0**-COEF_BITS
        if outputs > 1:  # slopes of all classes add up to 0; only noise does not
            gradient = gradient - gradient.mean(axis=0)
        coef = coef - step(gradient, coef)
        if drawn >= event.steps - max(1, round(AVERAGED * event.steps)):
            last.append(coef)
    return _cut(np.mean(last, axis=0), plan.longest)


def _cut(coef: Array, longest: float) -> Array:
    """Return `coef`, or in its direction a vector that is so long."""
    length = math.sqrt(float(np.vdot(coef, coef)))
    return coef if length <= longest else coef * (longest / length)


def _newton(moment: Array, plan: GradientPlan, loss: Loss) -> Callable[[Array, Array], Array]:
    """Return the map (gradient, f) -> H⁻¹(gradient + Λf) for a cautious H.

    Cautious: the moment's, the ridge Λ, and what the moment's noise may hide.
    """
    noise, curvature = plan.event.moment_sigma, usual_curvature(loss)
    hidden = caution(loss) * curvature * noise
    if moment.ndim == 1:
        steep = curvature * np.maximum(moment, 0.0)
        ridge = plan.ridge_along(steep)
        whole = steep + 2 * hidden + ridge
        return lambda gradient, coef: (gradient + ridge * coef) / whole
    d = len(moment)
    diagonal = np.diag(np.diag(moment))
    beside = moment - diagonal
    # What is beside the diagonal counts as far as it exceeds what noise alone would be there.
    square, expected = float(np.square(beside).sum()), d * (d - 1) * noise**2 / 2
    beside *= max(0.0, 1 - expected / square) if square > 0 else 0.0
    values, vectors = np.linalg.eigh(diagonal + beside)
    steep = curvature * np.maximum(values, 0.0)
    ridge = plan.ridge_along(steep)
    # A symmetric matrix of such noise has no eigenvalue beyond √(2d) times its standard deviation.
    whole = steep + hidden * math.sqrt(2 * d) + ridge
    return lambda gradient, coef: (
        ((gradient @ vectors + ridge * (coef @ vectors)) / whole) @ vectors.T
    )
