"""What distillation draws: noise that hides one site, calibrated before the votes are seen.

Each plan states its events first; `draw` then sees the counts. Proofs:
docs/guarantees/distillation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import helmert

from consilience.aggregators.base import Array
from consilience.aggregators.distillation.tally import Tally
from consilience.errors import SettingsError
from consilience.learners.erm import (
    Logistic,
    Loss,
    Problem,
    PublicFacts,
    Softmax,
    gradient_error,
    solve,
)
from consilience.learners.perturbation import TOLERANCE
from consilience.privacy.accounting import (
    Closing,
    Event,
    ObjectiveL2Laplace,
    SoftObjectiveGaussian,
)
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.mechanisms import Source, draw_error
from consilience.privacy.vector_noise import (
    VectorNoise,
    calibrate_event,
    calibrate_vector,
    close_vector,
    closing_event,
    draw_vector,
    main_share,
    noise_variance,
    public_radius,
    vector_event,
)

if TYPE_CHECKING:
    from consilience.aggregators.distillation.distill import Distillation
    from consilience.aggregators.distillation.site_level import HidesSites


STRENGTHS = tuple(10.0 ** (-half / 2) for half in range(13))  # "auto": from 1 down to 1e-6
# Of the public second moment, relative to the largest: flatter directions say nothing.
LEAST_EIGENVALUE = 1e-9


@dataclass(frozen=True)
class Rows:
    """Public records in the unit ball, and the facts about them that calibrations use."""

    X: Array
    n_classes: int
    n_members: int

    @property
    def logistic(self) -> bool:
        """Whether there is one vector of coefficients."""
        return self.n_classes == 2

    @property
    def loss(self) -> Loss:
        """What a record costs."""
        return Logistic() if self.logistic else Softmax(self.n_classes)

    @property
    def contrasts(self) -> Array:
        """Orthonormal rows that span what can differ between classes, as shares sum to one."""
        return np.asarray(helmert(self.n_classes))

    @cached_property
    def largest_mean(self) -> float:
        """`bound_mean` of the records."""
        return bound_mean(self.X)

    @cached_property
    def whitened(self) -> Whitened:
        """The records in directions of equal size."""
        values, vectors = np.linalg.eigh(self.X.T @ self.X / len(self.X))
        kept = values > LEAST_EIGENVALUE * values[-1]
        if not kept.any():
            raise SettingsError(
                "The public records are all zero. Nothing was combined. Check their encoding."
            )
        roots, vectors = np.sqrt(values[kept]), vectors[:, kept]
        Y = self.X @ (vectors / roots)
        return Whitened(Y, roots, vectors, bound_mean(Y))


class Whitened(NamedTuple):
    """Records Y = X V / roots, whose second moment is the identity, and `bound_mean` of them."""

    Y: Array
    roots: Array
    vectors: Array
    largest_mean: float


def bound_mean(Y: Array) -> float:
    """Bound (1/n)·‖Σ tᵢ yᵢᵀ‖ over all tᵢ of length <= 1, from above and over the reals."""
    n, d = Y.shape
    moment = Y.T @ Y / n
    spread = float(np.trace(moment))
    spectral = math.sqrt(
        max(float(np.linalg.eigvalsh(moment)[-1]), 0.0) + (n + 16 * d) * 2.0**-52 * spread
    )
    lengths = np.sqrt(np.einsum("ij,ij->i", Y, Y))
    return float(min(spectral, lengths.mean() * (1 + (n + d) * 2.0**-52)))


def shares_moved(n_classes: int, neighbours: str) -> float:
    """Bound how far a member's shares of a record move: e_a to e_b, or to the even split."""
    return math.sqrt(2) if neighbours == "replace-one" else math.sqrt(1 - 1 / n_classes)


def statistic(counts: Array, whole: int, Y: Array) -> Array:
    """Return (1/n) Σ (share - 1/K) yᵀ as (K, d), rounded by at most `statistic_error`."""
    n, n_classes = counts.shape
    centred = (counts - whole // n_classes).astype(np.float64)  # exact: below 2^53
    return np.asarray(centred.T @ Y / (float(whole) * n))


def linear_term(rows: Rows, counts: Array, whole: int) -> Array:
    """Return (1/n) Σ share xᵀ as (K, d): where votes enter the objective."""
    return np.asarray(statistic(counts, whole, rows.X) + rows.X.mean(axis=0) / rows.n_classes)


def statistic_error(Y: Array, n_classes: int) -> float:
    """Bound the rounding of the statistic and its contrasts (Frobenius norm) by public facts."""
    n = len(Y)
    size = math.sqrt(n_classes * float(np.einsum("ij,ij->", Y, Y)) / n)
    return (n + n_classes**2 + 32) * 2.0**-52 * size


def minimum(
    rows: Rows, S: Array, ridge: float, tolerance: float, start: Array | None = None
) -> Array:
    """Return the minimum of Σ lse(W x) - n<S, W> + (ridge/2)‖W‖².

    For a vector S it is the minimum of the logistic form.

    The solver knows labels, so every record gets the first class, and the linear term takes it away
    again.
    """
    n = len(rows.X)
    loss: Loss
    linear = -n * S
    if S.ndim == 1:
        loss, y = Logistic(), np.full(n, -1.0)
    else:
        loss, y = Softmax(rows.n_classes), np.zeros(n, dtype=np.int64)
        linear[0] += rows.X.sum(axis=0)
    found = solve(
        rows.X,
        y,
        Problem(loss, regularization=ridge, linear=linear),
        tolerance=tolerance,
        start=start,
    )
    return np.asarray(found.coef, dtype=np.float64)


def loose_tolerance(rows: Rows, target: Array, strength: float) -> float:
    """Return a tolerance for post-processing, which owes nobody an exact minimum."""
    n, d = rows.X.shape
    linear_norm = n * (float(np.linalg.norm(target)) + 1)
    rounding = gradient_error(
        PublicFacts(
            rows.loss,
            n_records=n,
            n_features=d,
            regularization=strength * n,
            linear_norm=linear_norm,
        )
    )
    return float(max(1e-7 * n, 8 * rounding))


class Plan:
    """What will be drawn, decided from public facts."""

    def __init__(self, settings: HidesSites, rows: Rows) -> None:
        self.rows = rows
        self.epsilon, self.delta = settings.epsilon, settings.delta
        self.noise: VectorNoise | None = None
        self.closing: Closing | None = None
        self.private = math.isfinite(settings.epsilon)
        self.who: dict[str, Any] = {
            "unit": Unit.SITE,
            "neighbours": Neighbours(settings.neighbours),
        }

    @property
    def events(self) -> list[Event]:
        """What is to be charged before anything is drawn."""
        return [event for event in (self.noise, self.closing) if event is not None]

    def _set_tolerance(self, loss: Loss, ridge: float, *, linear_norm: float) -> float:
        """Set the solver's tolerance well above the rounding of a gradient, and return that."""
        n, d = self.rows.X.shape
        rounding: float = gradient_error(
            PublicFacts(
                loss,
                n_records=n,
                n_features=d,
                regularization=ridge,
                linear_norm=linear_norm,
                tolerance=TOLERANCE * ridge,
            )
        )
        # The statistic's rounding holds for any records, as ‖x‖ <= 1.
        rounding += n * statistic_error(np.ones((n, 1)), self.rows.n_classes)
        self.tolerance = max(TOLERANCE * ridge, 8 * rounding)
        return rounding

    def _calibrate(self, sensitivity: float) -> None:
        self.noise = calibrate_vector(
            sensitivity, epsilon=self.epsilon, delta=self.delta, **self.who
        )

    def _close(self, dimension: int, distance: float) -> None:
        self.closing = closing_event(dimension, distance, epsilon=self.epsilon, **self.who)

    def _drawn(self, dimension: int, source: Source) -> Array:
        if self.noise is None:
            return np.zeros(dimension)
        return draw_vector(dimension, event=self.noise, source=source)

    def _closed(self, vector: Array, source: Source) -> Array:
        return close_vector(vector, event=self.closing, source=source)


class StatisticPlan(Plan):
    """Noise on the statistic through which votes enter the objective."""

    def __init__(self, settings: Distillation, rows: Rows) -> None:
        super().__init__(settings, rows)
        self.settings = settings
        self.whitened, self.roots, self.vectors, largest_mean = rows.whitened
        self.dimension = len(rows.contrasts) * len(self.roots)
        if self.private:
            moved = shares_moved(rows.n_classes, settings.neighbours)
            self._calibrate(moved * largest_mean / rows.n_members)
            drawn = 2 * draw_error(self.dimension) * public_radius(self.noise, self.dimension)
            self._close(self.dimension, statistic_error(self.whitened, rows.n_classes) + drawn)

    @property
    def variance(self) -> float:
        """Variance of the noise in each contrast and whitened direction, as the event states it."""
        return noise_variance(self.noise, self.dimension)

    def draw(self, tally: Tally, source: Source) -> dict[str, Array]:
        """Return the noisy statistic and the model learned from it."""
        contrasts = self.rows.contrasts
        exact = statistic(tally.counts, tally.n_members * tally.unit, self.whitened)
        noisy = contrasts @ exact + self._drawn(self.dimension, source).reshape(len(contrasts), -1)
        noisy = self._closed(noisy, source)
        labelled = None
        if tally.public.y is not None:
            labelled = (self.rows.X, tally.public.y, tally.classes)
        return learn(self.rows, noisy, self.variance, self.settings.regularization, labelled)


# Rows, their labels, and the classes.
Labelled: TypeAlias = tuple[Array, ArrayLike, Array]


def learn(
    rows: Rows,
    noisy: Array,
    variance: float,
    strength: float | str,
    labelled: Labelled | None = None,
) -> dict[str, Array]:
    """Return what follows from noisy contrasts in whitened directions: statistic and coefficients.

    Solved at the given strength or, if that is "auto", at the best of a grid, by labels or by the
    noise's `variance`. Post-processing: nothing but what is released enters.
    """
    white = rows.whitened
    S = rows.contrasts.T @ noisy * white.roots @ white.vectors.T
    S = S + rows.X.mean(axis=0) / rows.n_classes
    target = S[1] if rows.logistic else S
    if strength != "auto":
        strengths = [float(strength)]
    elif labelled is None:
        strengths = [_least_loss(rows, noisy, variance)]
    else:
        strengths = list(STRENGTHS)
    best, coef, chosen = math.inf, None, dict[str, Array]()
    for each in strengths:
        coef = minimum(rows, target, each * len(rows.X), loose_tolerance(rows, target, each), coef)
        wrong = 0.0 if labelled is None else _error(labelled[0] @ coef.T, *labelled[1:])
        if wrong < best:
            best, chosen = wrong, {"coef": coef, "regularization": np.array(each)}
    return {"statistic": S, **chosen}


def _least_loss(rows: Rows, noisy: Array, variance: float) -> float:
    """Return the λ with the least estimated loss, given the noisy statistic and its variance.

    To second order around W = 0 the loss is that of a linear model: in whitened contrasts with
    curvature e/K along a direction of eigenvalue e, the minimum is W = √e·c/(e/K + λ), and Stein's
    estimate of its loss is unbiased.
    """
    e = rows.whitened.roots**2
    square = np.square(noisy).sum(axis=0)
    noise = variance * len(noisy)
    losses = []
    for strength in STRENGTHS:
        slope = e / (e / rows.n_classes + strength)
        losses.append(((slope**2 / rows.n_classes / 2 - slope) * square + slope * noise).sum())
    return float(STRENGTHS[int(np.argmin(losses))])


def _error(z: Array, y: ArrayLike, classes: Array) -> float:
    said = (z > 0).astype(int) if z.ndim == 1 else z.argmax(axis=1)
    return float(np.mean(classes[said] != np.asarray(y)))


class OutputPlan(Plan):
    """Noise on the minimum of the distilled loss (Hamm et al. 2016, algorithms 1 and 2)."""

    def __init__(self, settings: Distillation, rows: Rows) -> None:
        super().__init__(settings, rows)
        self.settings = settings
        n, d = rows.X.shape
        self.ridge = float(settings.regularization) * n
        self.paper = settings.calibration == "hamm2016"
        self.classes_drawn = 1 if rows.logistic else rows.n_classes - (not self.paper)
        rounding = self._set_tolerance(rows.loss, self.ridge, linear_norm=2.0 * n)
        if self.private:
            self._calibrate(self._paper_sensitivity() if self.paper else self._sensitivity())
            distance = (self.tolerance + rounding) / self.ridge
            # Class means are sums of K; then the difference, and the sum with the noise, are
            # rounded.
            distance += (rows.n_classes + 4) * 2.0**-52 * (self._longest(1.0) + distance)
            radius = public_radius(self.noise, self.classes_drawn * d)
            released = d * rows.loss.n_outputs
            self._close(released, distance + 2 * draw_error(released + 4 * rows.n_classes) * radius)

    @property
    def _steepest(self) -> float:
        return 1.0 if self.rows.logistic else math.sqrt(2)

    def _longest(self, reach: float) -> float:
        """Bound the length of any minimum: J(W) <= J(0), and the gradient vanishes."""
        strength = float(self.settings.regularization)
        return min(
            math.sqrt(2 * math.log(self.rows.n_classes) / strength),
            self._steepest * reach / strength,
        )

    def _sensitivity(self) -> float:
        settings, rows, n = self.settings, self.rows, len(self.rows.X)
        voters = 1 if settings.majority else rows.n_members
        # Two classes have one vector of coefficients: a share of votes moves by 1 where the pair of
        # them moves by √2.
        pair = math.sqrt(2) if rows.logistic else 1.0
        relation = "replace-one" if settings.majority else settings.neighbours
        moved = shares_moved(rows.n_classes, relation) / pair / voters
        reach = 1.0
        if settings.protect_public:
            gap = ((n - 1) * moved + 2 * self._steepest) / n
        else:
            reach = min(1.0, rows.largest_mean)
            gap = moved * reach
        return float(min(gap / float(settings.regularization), 2 * self._longest(reach)))

    def _paper_sensitivity(self) -> float:
        """Return the paper's sensitivity, or the true one if that is larger.

        The paper takes gradients to have length 1, where √2 is possible.
        """
        n, m = len(self.rows.X), self.rows.n_members
        extended = (n + m - 1) / n if self.settings.protect_public else 1.0
        voters = 1 if self.settings.majority else m / extended
        return max(2 / (voters * float(self.settings.regularization)), self._sensitivity())

    def draw(self, tally: Tally, source: Source) -> dict[str, Array]:
        """Return the noisy minimum."""
        rows, settings = self.rows, self.settings
        # The minimum has no noise: one tally that is asked at many budgets and draws has it
        # computed once.
        asked = (
            settings.majority,
            settings.data_norm,
            settings.fit_intercept,
            self.ridge,
            self.tolerance,
        )
        if asked not in tally.known:
            tally.known[asked] = self._minimum(tally)
        coef = tally.known[asked]
        drawn = self._drawn(self.classes_drawn * rows.X.shape[1], source)
        if not rows.logistic:
            coef = coef - coef.mean(axis=0)  # where the exact minimum is: nearer to it
            drawn = drawn.reshape(self.classes_drawn, -1)
            drawn = drawn if self.paper else rows.contrasts.T @ drawn
        return {
            "coef": self._closed(coef + drawn, source),
            "regularization": np.array(float(settings.regularization)),
        }

    def _minimum(self, tally: Tally) -> Array:
        rows, counts, whole = self.rows, tally.counts, tally.n_members * tally.unit
        if self.settings.majority:
            # A tie of two classes goes to the second, as in the paper; of more, to the first.
            code = (
                (counts[:, 1] >= counts[:, 0]).astype(int)
                if rows.logistic
                else counts.argmax(axis=1)
            )
            whole = rows.n_classes
            counts = np.zeros_like(counts)
            counts[np.arange(len(code)), code] = whole
        S = linear_term(rows, counts, whole)
        return minimum(rows, S[1] if rows.logistic else S, self.ridge, self.tolerance)


class ObjectivePlan(Plan):
    """Noise in the objective: hides a site, a record of the aggregation data, or both at once.

    Neighbours are two steps apart, and the same noise pays for each: one record with all its
    labels, and one member's votes on the others, which only move the linear term. Pure epsilons of
    two steps add: `noise` states the first, `shift` the second. Deltas do not add, so one event
    states both for Gaussian noise.
    """

    def __init__(self, settings: Distillation, rows: Rows) -> None:
        super().__init__(settings, rows)
        n, d = rows.X.shape
        K = rows.n_classes
        self.loss = Softmax(K)
        self.shift: Event | None = None
        # Two classes as a softmax of two: W = (-w/2, w/2) has half the square of w.
        self.ridge = float(settings.regularization) * n * (2 if rows.logistic else 1)
        radius = 0.0
        if self.private:
            epsilon = main_share(settings.epsilon)
            # At most half of epsilon for the Jacobian, by more ridge where the asked one is too
            # small.
            self.ridge = max(self.ridge, 1 / (K * math.expm1(min(epsilon / 2 / (K - 1), 700.0))))
            moved = (n - 1) * shares_moved(K, settings.neighbours) / rows.n_members
            facts: dict[str, Any] = {
                "loss": "softmax",
                "n_classes": K,
                "curvature": self.loss.curvature,
                "lipschitz": self.loss.lipschitz,
                "strong_convexity": self.ridge,
                "records_per_unit": 1,
                **self.who,
            }
            if settings.delta > 0:
                facts |= {"sensitivity": moved, "at_delta": settings.delta}
                self.noise = calibrate_event(
                    lambda sigma: SoftObjectiveGaussian(sigma=sigma, **facts), epsilon=epsilon
                )
            else:
                jacobian = ObjectiveL2Laplace(scale=1.0, **facts).jacobian
                scale = (moved + 2 * self.loss.lipschitz) / (epsilon - jacobian) * (1 + 1e-12)
                self.noise = ObjectiveL2Laplace(scale=scale, **facts)
                self.shift = vector_event(moved, scale, delta=0.0, **self.who)
            radius = public_radius(self.noise, (K - 1) * d)
        rounding = self._set_tolerance(self.loss, self.ridge, linear_norm=2.0 * n + radius)
        if self.private:
            # An eighth more for storing the minimum in doubles, as in learners/perturbation.py.
            distance = (
                1.125 * self.tolerance + rounding + draw_error(K * d + 4 * K) * radius
            ) / self.ridge
            self._close(K * d, distance)

    @property
    def events(self) -> list[Event]:
        """The noise; if pure, paid twice: for the record and for the votes on the others."""
        return [*super().events, *([] if self.shift is None else [self.shift])]

    def draw(self, tally: Tally, source: Source) -> dict[str, Array]:
        """Return the minimum of the noisy objective."""
        rows = self.rows
        n, d = rows.X.shape
        S = linear_term(rows, tally.counts, tally.n_members * tally.unit)
        drawn = rows.contrasts.T @ self._drawn((rows.n_classes - 1) * d, source).reshape(-1, d)
        W = self._closed(minimum(rows, S - drawn / n, self.ridge, self.tolerance), source)
        strength = self.ridge / n / (2 if rows.logistic else 1)
        return {"coef": W[1] - W[0] if rows.logistic else W, "regularization": np.array(strength)}
