"""What happened, and what it costs.

An `Event` is a frozen value that records what a mechanism did: the scale of its noise and the
public constants of its proof. Its epsilon is *computed* from those, never stated, so a hub or an
auditor recomputes the guarantee from the events alone, and a calibration is simply the noise scale
at which the event costs what was asked. The meaning of an event never changes; a new bound is a new
event. Each formula is proved on the page of ``docs/guarantees/`` that its docstring names.

This is the only file that imports dp_accounting, and only in the functions that need it.
"""

from __future__ import annotations

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, cast, get_args

from numpy.polynomial.legendre import leggauss
from scipy.optimize import brentq
from scipy.special import erfcx, gammaln, log_ndtr, logsumexp

from consilience.errors import SettingsError
from consilience.privacy.exact_noise import require_drawable
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit, compose, name_the_unit

PROFILE_MARGIN = (
    1e-10  # an epsilon read off a profile may be that much above the one it was calibrated to
)
Loss = Literal["logistic", "huber-hinge", "softmax", "huber"]
_CHOICES = {"loss": get_args(Loss), "monotone": ("yes", "no")}


# Whole numbers with Gaussian noise at least that wide are as private as real ones with a variance
# less by 4, but for that factor in each probability and number (docs/guarantees/gradient.md).
LEAST_SIGMA = 16.0
WHOLE_NUMBERS = 1e-33

_NODES, _SHARES = leggauss(10)
_UNIT = 2.0**-52


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Return ln δ at `epsilon` of Gaussian noise, sensitivity/sigma = `mu`, rounded up.

    Balle & Wang (2018); docs/guarantees/gaussian.md says why every rounding is covered.
    """
    if mu == 0:
        return -math.inf
    x, size = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    slack = _UNIT * (64 + 8 * size * size)
    if mu > 1:
        kept, lost = float(log_ndtr(-x)), epsilon + float(log_ndtr(-x - mu))
        return min(0.0, kept + slack + math.log(-math.expm1(lost - kept - slack)))
    # The two terms nearly cancel for small mu. With R the ratio of the normal tail to its density,
    # δ = φ(x)·(R(x) - R(x+mu)), and -R'(t) = 1 - t·R(t) > 0: an integral that cancels nothing.
    t = x + mu * (_NODES + 1) / 2
    if x > 30:
        falling = (1 - (3 - (15 - (105 - 945 / t**2) / t**2) / t**2) / t**2) / t**2
    else:
        falling = 1 - t * math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2))
    area = mu / 2 * float(_SHARES @ falling)
    return math.log(area) - x * x / 2 - math.log(2 * math.pi) / 2 + slack


def gaussian_sigma(*, epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the least sigma at which Gaussian noise is (epsilon, delta)-private."""
    inner, target = epsilon * (1 - PROFILE_MARGIN), math.log(delta)
    return sensitivity / _largest(lambda mu: gaussian_log_delta(inner, mu) - target)


def _largest(excess: Callable[[float], float]) -> float:
    """Return the largest positive number without `excess`, to 1e-12 relative and from below.

    The number is that of a plain bisection, and the last word of it is asked of `excess` itself. A
    root found beforehand only saves questions whose answer a nearer one gave.
    """

    def fits(number: float) -> bool:
        return excess(number) <= 0

    low, high = 1.0, 1.0
    while not fits(low):
        low /= 2
        if low == 0:
            raise SettingsError(
                "No amount of noise reaches the requested epsilon and delta in floating point. "
                "Nothing was trained. Ask for a larger epsilon or delta."
            )
    while fits(high):
        high *= 2
        if math.isinf(high):
            return low
    below, above = _around(excess, low, high)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        known = middle <= below or (middle < above and fits(middle))
        low, high = (middle, high) if known else (low, middle)
    while not fits(low):  # rounding, where the bisection was not asked
        low *= 1 - 1e-12
    return low


def _around(excess: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Return numbers close to the end of those without `excess`: one of them, and one that is not.

    If none are found, `low` and `high` themselves.
    """

    def bounded(number: float) -> float:
        return min(max(excess(number), -1e6), 1e6)

    root = float(brentq(bounded, low, high, xtol=5e-324, rtol=1e-13, disp=False))
    below, above = root * (1 - 4e-13), root * (1 + 4e-13)
    return (below, above) if excess(below) <= 0 < excess(above) else (low, high)


@dataclass(frozen=True, kw_only=True)
class Event(ABC):
    """One use of a mechanism; subclasses say which, with what is needed to compute its cost."""

    unit: Unit
    neighbours: Neighbours
    _may_be_zero: ClassVar[tuple[str, ...]] = ("sensitivity", "distance")

    def __post_init__(self) -> None:
        name_the_unit(self)
        numbers, choices = _limits(type(self))
        for name, kinds, least, most in numbers:
            value = getattr(self, name)
            fits = isinstance(value, kinds) and not isinstance(value, bool)
            if not (fits and least <= value <= most):
                raise SettingsError(
                    f"The {name!r} of a {type(self).__name__} event must be a finite positive "
                    f"{'whole number' if kinds is int else 'number'} in its range. Got "
                    f"{value!r} instead."
                )
        for name in choices:
            if getattr(self, name) not in _CHOICES[name]:
                raise SettingsError(
                    f"The {name!r} of a {type(self).__name__} event must be one of "
                    f"{', '.join(_CHOICES[name])}. Got {getattr(self, name)!r} instead."
                )

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """The event's own epsilon at its own `delta`."""

    @property
    def delta(self) -> float:
        """The event's delta; zero unless the event has a field of that name."""
        return 0.0

    @property
    def rho(self) -> float | None:
        """Zero-concentrated cost, at most ε²/2 for a pure epsilon; None if there is none."""
        return None if self.delta > 0 else self.epsilon * self.epsilon / 2  # ** would overflow

    @property
    def guarantee(self) -> Guarantee:
        """The event's cost as a guarantee."""
        return Guarantee(
            epsilon=self.epsilon, delta=self.delta, unit=self.unit, neighbours=self.neighbours
        )


@cache
def _limits(kind: type[Event]) -> tuple[list[tuple[str, Any, float, float]], list[str]]:
    """Return each number's name, types and range, and the names of fields that are a choice."""
    numbers: list[tuple[str, Any, float, float]] = []
    for field in fields(kind):
        if field.type in ("float", "int"):
            whole = field.type == "int"
            least = (2 if field.name == "n_classes" else 1) if whole else 5e-324
            least = 0.0 if field.name in kind._may_be_zero else least
            most = 1 - 2**-53 if field.name == "at_delta" else sys.float_info.max
            numbers.append((field.name, int if whole else (float, int), least, most))
    return numbers, [field.name for field in fields(kind) if field.name in _CHOICES]


@dataclass(frozen=True, kw_only=True)
class Laplace(Event):
    """Exact (discrete) Laplace noise, by L1 sensitivity; docs/guarantees/laplace.md."""

    sensitivity: float
    scale: float

    @property
    def epsilon(self) -> float:
        return self.sensitivity / self.scale


@dataclass(frozen=True, kw_only=True)
class L2Laplace(Laplace):
    """Noise of density ∝ exp(-‖b‖₂/scale), by L2 sensitivity; docs/guarantees/l2-laplace.md."""


@dataclass(frozen=True, kw_only=True)
class Gaussian(Event):
    """Gaussian noise, by L2 sensitivity, at a chosen delta; docs/guarantees/gaussian.md."""

    sensitivity: float
    sigma: float
    at_delta: float

    @property
    def epsilon(self) -> float:
        mu = self.sensitivity / self.sigma
        return _epsilon_at(lambda epsilon: gaussian_log_delta(epsilon, mu), self.at_delta, 0.0)

    @property
    def delta(self) -> float:
        return self.at_delta

    @property
    def rho(self) -> float | None:
        mu = self.sensitivity / self.sigma
        return mu * mu / 2


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian(Gaussian):
    """Discrete Gaussian noise on integer counts, by its zCDP; docs/guarantees/gaussian.md."""

    @property
    def epsilon(self) -> float:
        # Bun & Steinke 2016, prop. 1.3: valid for every zCDP mechanism, so also for the discrete
        # Gaussian.
        mu = self.sensitivity / self.sigma
        rho = mu * mu / 2  # ** would overflow
        return rho + 2 * math.sqrt(rho * math.log(1 / self.at_delta))


@dataclass(frozen=True, kw_only=True)
class Selection(Event):
    """Exponential mechanism with Gumbel noise of that scale; docs/guarantees/selection.md.

    Monotone scores (all move the same way between neighbours) cost half.
    """

    sensitivity: float
    scale: float
    monotone: Literal["yes", "no"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.monotone == "yes" and self.neighbours is not Neighbours.ADD_REMOVE:
            raise SettingsError(
                "Scores are monotone only under 'add-remove': a replaced unit can raise one "
                "score and lower another. Nothing was drawn. Use monotone='no', which costs "
                "twice as much."
            )

    @property
    def epsilon(self) -> float:
        return (1 if self.monotone == "yes" else 2) * self.sensitivity / self.scale

    @property
    def rho(self) -> float | None:
        # Cesar & Rogers 2021: an ε-bounded-range mechanism is ε²/8-zCDP. A fact of the exponential
        # mechanism only.
        return self.epsilon * self.epsilon / 8


@dataclass(frozen=True, kw_only=True)
class Closing(Event):
    """Exact Laplace noise that hides how a vector was computed; docs/guarantees/closing.md.

    Two neighbours' computed vectors, given one ideal vector, differ by at most 2·distance in L2,
    hence by 2·√dimension·distance in L1.
    """

    dimension: int
    distance: float
    scale: float

    @property
    def epsilon(self) -> float:
        return 2 * math.sqrt(self.dimension) * self.distance / self.scale


@dataclass(frozen=True, kw_only=True)
class Objective(Event):
    """Objective perturbation of a sum of losses on the unit ball; docs/guarantees/objective.md.

    ``strong_convexity`` is the un-normalised λ of everything in the objective that does not depend
    on records; ``records_per_unit`` how many records one unit holds at most. ``curvature`` and
    ``lipschitz`` are the loss'.
    """

    loss: Loss
    n_classes: int
    curvature: float
    lipschitz: float
    strong_convexity: float
    records_per_unit: int

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {
            "logistic": (0.25, 1.0),
            "huber-hinge": (max(self.curvature, 0.5), 1.0),
            "softmax": (0.5, math.sqrt(2)),
            "huber": (1.0, self.lipschitz),
        }[self.loss]
        if (self.curvature, self.lipschitz) != known or (
            self.loss != "softmax" and self.n_classes != 2
        ):
            raise SettingsError(
                f"An event of the {self.loss} loss must carry that loss' own constants. Got "
                f"curvature={self.curvature!r}, lipschitz={self.lipschitz!r}, "
                f"n_classes={self.n_classes!r} instead."
            )
        if self.neighbours is Neighbours.NULL_ONE:
            raise SettingsError(
                "An objective has no null-one proof. Use 'replace-one' or 'add-remove'."
            )

    @property
    def jacobian(self) -> float:
        """Bound on |log det ratio|: one record moves one determinant factor."""
        if self.loss == "softmax":
            classes = self.n_classes
            one = (classes - 1) * math.log1p(1 / (classes * self.strong_convexity))
        else:
            one = math.log1p(self.curvature / self.strong_convexity)
        return self.records_per_unit * one

    @property
    def moved(self) -> int:
        """How many records of the objective differ between neighbours."""
        return self.records_per_unit * (2 if self.neighbours is Neighbours.REPLACE_ONE else 1)


@dataclass(frozen=True, kw_only=True)
class ObjectiveL2Laplace(Objective):
    """Objective perturbation, density ∝ exp(-‖b‖₂/scale); docs/guarantees/objective.md."""

    scale: float

    @property
    def epsilon(self) -> float:
        if self.loss != "logistic":
            return self.jacobian + self.moved * self.lipschitz / self.scale
        # Joint bound: with p = |ℓ'| a logistic record has ℓ'' = p(1-p), so the gradient and the
        # determinant cannot both be at their worst. p/s + log(1 + p(1-p)/λ) is concave in p; its
        # maximum is a root of a quadratic.
        scale, strong = self.scale, self.strong_convexity
        # Stable form of ((1-2s) + sqrt(1 + 4s² + 4λ)) / 2, which cancels for large s.
        p = 0.5 + (0.25 + strong) / (math.sqrt(0.25 + scale * scale + strong) + scale)
        p = min(1.0, p)
        worst = p / scale + math.log1p(p * (1 - p) / strong)
        replaced = (
            self.records_per_unit / scale if self.neighbours is Neighbours.REPLACE_ONE else 0.0
        )
        return self.records_per_unit * worst + replaced


@dataclass(frozen=True, kw_only=True)
class ObjectiveGaussian(Objective):
    """Objective perturbation, Gaussian, at a chosen delta; docs/guarantees/objective.md."""

    sigma: float
    at_delta: float

    def log_delta(self, epsilon: float) -> float:
        """Return ln δ at `epsilon`; valid from the Jacobian term upwards."""
        rest = self._beyond_jacobian(epsilon)
        if rest < 0:
            return 0.0
        mu, moved = self.lipschitz / self.sigma, self.moved
        if self.loss == "huber":
            # Two-sided slopes: the 2^m corners of the cube of slopes, each at most m gradients
            # long.
            return moved * math.log(2) + gaussian_log_delta(rest, moved * mu)
        # Slopes in [0, L], or a probability simplex: a corner with j active records is at most j
        # gradients long, and there are C(m, j)·(K-1)^j of them.
        other = math.log(self.n_classes - 1)
        terms = [
            gammaln(moved + 1)
            - gammaln(j + 1)
            - gammaln(moved - j + 1)
            + j * other
            + gaussian_log_delta(rest, j * mu)
            for j in range(1, moved + 1)
        ]
        largest = float(max(map(abs, terms)))
        return float(logsumexp(terms)) + 16 * _UNIT * (1 + largest)

    def _beyond_jacobian(self, epsilon: float) -> float:
        """Return what `epsilon` leaves for the noise, rounded down."""
        jacobian = self.jacobian
        return epsilon - jacobian - 4 * _UNIT * (epsilon + jacobian)

    @property
    def epsilon(self) -> float:
        return _epsilon_at(self.log_delta, self.at_delta, self.jacobian)

    @property
    def delta(self) -> float:
        return self.at_delta


@dataclass(frozen=True, kw_only=True)
class SoftObjectiveGaussian(ObjectiveGaussian):
    """One softmax record replaced while votes move the linear term.

    Labels are shares of votes, which move the linear term by at most `sensitivity`. Objective
    perturbation with Gaussian noise, where both may change at once;
    docs/guarantees/distillation.md.
    """

    sensitivity: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.loss, self.records_per_unit, self.neighbours) != (
            "softmax",
            1,
            Neighbours.REPLACE_ONE,
        ):
            raise SettingsError(
                "Noise for a record and its soft labels has a proof for one softmax record, "
                "replaced. Nothing was drawn. Use loss='softmax', records_per_unit=1 and "
                "neighbours='replace-one'."
            )

    def log_delta(self, epsilon: float) -> float:
        """Return ln δ at `epsilon`; valid from the Jacobian term upwards."""
        rest = self._beyond_jacobian(epsilon)
        if rest < 0:
            return 0.0
        # Each of the two records' probabilities is in a simplex of K corners. No corner is free: a
        # soft label is none.
        mu = (self.sensitivity + 2 * self.lipschitz) / self.sigma
        return 2 * math.log(self.n_classes) + gaussian_log_delta(rest, mu)


@dataclass(frozen=True, kw_only=True)
class WholeGaussian(Event):
    """Exact discrete Gaussian noise on whole numbers, by the profile of real ones.

    `length` counts all numbers. The proof is the lemma of docs/guarantees/gradient.md.
    """

    length: int
    at_delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self._widths()
        finest = min(widths)
        require_drawable(max(widths))
        if finest < LEAST_SIGMA:
            raise SettingsError(
                f"The noise of a {type(self).__name__} event must be at least {LEAST_SIGMA:g} "
                f"grains wide, or it has no proof. Got {finest!r} grains instead."
            )

    @abstractmethod
    def _widths(self) -> Sequence[float]:
        """Return the standard deviations of the noise, in grains."""

    @abstractmethod
    def _mu(self, lost: float) -> float:
        """Return by how many standard deviations a unit moves everything.

        Variances are less by `lost` squared grains.
        """

    def log_delta(self, epsilon: float) -> float:
        """Return ln δ at `epsilon`: that of one Gaussian, but for what whole numbers cost."""
        factor = self.length * WHOLE_NUMBERS
        return factor + gaussian_log_delta(max(0.0, epsilon - 2 * factor), self._mu(4.0))

    @property
    def epsilon(self) -> float:
        return _epsilon_at(self.log_delta, self.at_delta, 0.0)

    @property
    def delta(self) -> float:
        return self.at_delta

    @property
    def rho(self) -> float | None:
        mu = self._mu(0.0)
        return mu * mu / 2


@dataclass(frozen=True, kw_only=True)
class GradientSteps(WholeGaussian):
    """Discrete Gaussian noise on sums of records, one after another; docs/guarantees/gradient.md.

    First a second moment, then a gradient at each of `steps` points that depend on what was drawn
    before. Sums are whole multiples of their grain. `ridge`, at its strongest, is no part of the
    cost and says how far the noise moves what is released.
    """

    moment_sensitivity: float
    moment_sigma: float
    moment_grain: float
    gradient_sensitivity: float
    gradient_sigma: float
    gradient_grain: float
    steps: int
    ridge: float

    def _widths(self) -> Sequence[float]:
        return self.moment_sigma / self.moment_grain, self.gradient_sigma / self.gradient_grain

    def _mu(self, lost: float) -> float:
        """Return by how many standard deviations a unit moves everything.

        Variances are less by `lost` squared grains, and twice that for entries beside a moment's
        diagonal: they count twice and have half of its variance.
        """
        moment, gradient = (
            reach / sigma / math.sqrt(1 - lost * (grain / sigma) ** 2)
            for reach, sigma, grain, lost in (
                (self.moment_sensitivity, self.moment_sigma, self.moment_grain, 2 * lost),
                (self.gradient_sensitivity, self.gradient_sigma, self.gradient_grain, lost),
            )
        )
        return math.hypot(moment, math.sqrt(self.steps) * gradient) * (1 + 16 * _UNIT)

    @property
    def sigma(self) -> float:
        """The standard deviation of each coordinate of the gradients' mean."""
        return self.gradient_sigma / math.sqrt(self.steps)


@dataclass(frozen=True, kw_only=True)
class GaussianSum(WholeGaussian):
    """Discrete Gaussian noise on one sum over records; docs/guarantees/statistics.md.

    Number j of the sum is a whole number of grains and has a public weight w_j. A unit moves the
    weighted sum by at most `sensitivity` in L2, and the noise of number j is `sigma` / w_j wide,
    which is at least `narrowest` grains.
    """

    sensitivity: float
    sigma: float
    narrowest: float

    def _widths(self) -> Sequence[float]:
        return (self.narrowest,)

    def _mu(self, lost: float) -> float:
        """Return by how many standard deviations a unit moves the sum."""
        left = math.sqrt(1 - lost / self.narrowest**2)
        return self.sensitivity / (self.sigma * left) * (1 + 16 * _UNIT)

    @property
    def drawn_sigma(self) -> float:
        """How wide the noise is that one site draws, for a weight of one."""
        return self.sigma


@dataclass(frozen=True, kw_only=True)
class SharedSum(GaussianSum):
    """One site's share of the noise on a sum over sites; docs/guarantees/shared-noise.md.

    `shares` of them together are `sigma` wide, for a weight of one, and a single one is at least
    `narrowest` grains wide. The cost is that for whoever knows all shares of a batch but those of
    `honest` sites, this one among them.
    """

    shares: int
    honest: int

    @property
    def alone(self) -> SharedSum:
        """The same draw, seen by everybody else together: this share alone is unknown to them."""
        return replace(self, honest=1)

    @property
    def assumption(self) -> str:
        """What the cost rests on."""
        return (
            f"at least {self.honest} of the sites that are added up with this one and that it "
            "counts on, itself included, and one of the study's keyholders follow the protocol"
        )

    def _mu(self, lost: float) -> float:
        """Return by how many standard deviations of what is unknown a unit moves the sum."""
        left = math.sqrt(1 - lost / (self.honest * self.narrowest**2))
        known = math.sqrt(self.shares / self.honest)
        return known * self.sensitivity / (self.sigma * left) * (1 + 16 * _UNIT)

    @property
    def rho(self) -> float | None:
        # A sum of discrete Gaussians is none, and its zero-concentrated cost was not derived.
        return super().rho if self.honest == 1 else None

    @property
    def drawn_sigma(self) -> float:
        return self.sigma / math.sqrt(self.shares)


@dataclass(frozen=True, kw_only=True)
class Composed(Event):
    """All `parts` on the same records, `times` over; docs/guarantees/composition.md.

    At ``at_delta=0`` epsilons add, and deltas where parts have one; otherwise zero-concentrated
    costs add and are stated at that delta.
    """

    parts: tuple[Event, ...]
    times: int
    at_delta: float
    _may_be_zero: ClassVar[tuple[str, ...]] = ("at_delta",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "parts", tuple(self.parts))
        plain = all(
            isinstance(part, Event) and not isinstance(part, Composed) for part in self.parts
        )
        if not (self.parts and plain):
            raise SettingsError(
                "A Composed event needs parts, each an event of its own. Nothing was drawn."
            )
        if any((part.unit, part.neighbours) != (self.unit, self.neighbours) for part in self.parts):
            raise SettingsError(
                "The parts of a Composed event must hide the same unit under the same neighbour "
                "relation as it does. Nothing was drawn."
            )
        if self.at_delta > 0 and self.rho is None:
            raise SettingsError(
                "A part of a Composed event has no zero-concentrated cost. Use at_delta=0."
            )

    @property
    def epsilon(self) -> float:
        added = self.times * _added(part.epsilon for part in self.parts)
        if self.at_delta == 0:
            return added
        assert self.rho is not None
        whole = zcdp_epsilon(self.rho, self.at_delta)
        return min(whole, added) if all(part.delta == 0 for part in self.parts) else whole

    @property
    def delta(self) -> float:
        return (
            self.at_delta
            if self.at_delta > 0
            else min(1.0, self.times * _added(part.delta for part in self.parts))
        )

    @property
    def rho(self) -> float | None:
        costs = [part.rho for part in self.parts]
        return None if None in costs else self.times * _added(cast(list[float], costs))


def _added(costs: Iterable[float]) -> float:
    try:
        return math.fsum(costs)
    except OverflowError:
        return math.inf


def alone(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return what events cost if everybody else colludes: shares of noise are then all there is."""
    return tuple(event.alone if isinstance(event, SharedSum) else event for event in events)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return an epsilon at `delta` for every mechanism of that zero-concentrated cost.

    By proposition 12 of Canonne et al. (2020). Every order gives a valid bound, so missing the
    optimum costs no privacy.
    """
    if rho == 0 or math.isinf(rho):
        return rho
    least = -math.log(delta)

    def slope(log_more: float) -> float:
        return math.exp(2 * log_more + math.log(rho)) + math.log1p(math.exp(log_more)) - least

    # With the order less one called m, the bound falls until ρm² + ln(1+m) reaches ln(1/δ), and
    # rises from there.
    ends = [
        min((math.log(part) - math.log(rho)) / 2, part + math.log(-math.expm1(-part)))
        for part in (least / 2, least)
    ]
    log_more = (
        ends[0]
        if slope(ends[0]) >= 0
        else ends[1]
        if slope(ends[1]) <= 0
        else float(brentq(slope, *ends))
    )
    more = math.exp(log_more)
    bound = rho * (more + 1) + (least - math.log1p(more)) / more - math.log1p(math.exp(-log_more))
    return max(0.0, bound)


def zcdp_rho(*, epsilon: float, delta: float) -> float:
    """Return the largest zero-concentrated cost that is (epsilon, delta)-private."""
    return _largest(lambda rho: zcdp_epsilon(rho, delta) - epsilon)


def _epsilon_at(log_delta: Callable[[float], float], delta: float, least: float) -> float:
    """Return the epsilon >= least where a falling profile reaches `delta`, from above."""
    target = math.log(delta)
    if log_delta(least) <= target:
        return least
    high = max(1.0, 2 * least)
    while log_delta(high) > target:
        high *= 2
        if math.isinf(high):
            return math.inf

    def gap(epsilon: float) -> float:
        return max(log_delta(epsilon), -1e6) - target

    root = float(brentq(gap, least, high, xtol=5e-324, rtol=1e-15, maxiter=5000, disp=False))
    step = max(root * 2**-52, 5e-324)
    while log_delta(root) > target:  # doubling steps: ends soon wherever the root lies
        root, step = root + step, 2 * step
    return root


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        L2Laplace,
        Laplace,
        Gaussian,
        DiscreteGaussian,
        Selection,
        Closing,
        ObjectiveL2Laplace,
        ObjectiveGaussian,
        SoftObjectiveGaussian,
        GradientSteps,
        GaussianSum,
        SharedSum,
        Composed,
    )
}


def calibrate_scale(cost: Callable[[float], Event], *, epsilon: float) -> float:
    """Return the least scale (or sigma) at which the event ``cost(scale)`` costs `epsilon`."""

    def excess(inverse: float) -> float:
        if math.isinf(1 / inverse):
            return math.inf
        event = cost(1 / inverse)
        if isinstance(
            event, ObjectiveGaussian
        ):  # the profile answers without inverting it at each step
            return event.log_delta(epsilon * (1 - PROFILE_MARGIN)) - math.log(event.delta)
        return event.epsilon - epsilon

    return 1 / _largest(excess)


def total(events: Iterable[Event], neighbours: Neighbours | str | None = None) -> Guarantee:
    """Return the additive guarantee of all `events` on the same records, as ledgers enforce.

    With `neighbours` each event is converted to that relation by itself, as a ledger charges it.
    Converting the sum would state a larger delta.
    """
    stated = (event.guarantee for event in events)
    return compose(*(one if neighbours is None else one.convert(neighbours) for one in stated))


def as_counted(
    events: Iterable[Event], unit: Unit | str, neighbours: Neighbours | str
) -> tuple[Event, ...]:
    """Return `events` as a limit per `unit` under `neighbours` counts them.

    What hides a whole site, replaced by any other, hides every record and every person of it too,
    whether replaced, added or removed, and at the same cost: all these pairs of tables are pairs of
    tables that a site may have. Other events stay as they are (docs/guarantees/ledger.md).
    """
    part, relation = Unit(unit), Neighbours(neighbours)
    within = part is not Unit.SITE and relation is not Neighbours.NULL_ONE
    whole = (Unit.SITE, Neighbours.REPLACE_ONE)
    return tuple(
        replace(event, unit=part, neighbours=relation)
        if within and (event.unit, event.neighbours) == whole
        else event
        for event in events
    )


def total_rho(events: Sequence[Event], neighbours: Neighbours) -> float | None:
    """Return the summed zero-concentrated cost under `neighbours`, or None where an event has none.

    An add-remove cost becomes four times as large under replace-one: the divergence of a two-step
    path in a geometry where distances, not their squares, add.
    """
    costs: list[float] = []
    for event in events:
        if event.rho is None:
            return None
        if event.neighbours is not neighbours:
            event.guarantee.convert(neighbours)  # refuses what no theorem converts
            costs.append(4 * event.rho)
        else:
            costs.append(event.rho)
    return math.fsum(costs)


def report(events: Sequence[Event], *, delta: float) -> dict[str, float]:
    """Return epsilon at `delta` for all `events` together, by each accountant that applies.

    ``sum`` adds (its own delta may be smaller than `delta`), ``zcdp`` converts Σρ through Rényi
    orders, ``pld`` composes privacy-loss distributions. For reports: the ledger enforces additive
    quantities only.
    """
    if not 0 < delta < 1:
        raise SettingsError(f"A report's 'delta' must lie in (0, 1). Got {delta!r} instead.")
    whole = total(events)
    answer: dict[str, float] = {}
    if whole.delta <= delta:
        answer["sum"] = whole.epsilon
    from dp_accounting import ZCDpEvent
    from dp_accounting.pld import privacy_loss_distribution
    from dp_accounting.rdp import RdpAccountant

    rho = total_rho(events, whole.neighbours)
    if rho is not None:
        accountant = RdpAccountant()
        accountant.compose(ZCDpEvent(rho))
        answer["zcdp"] = float(accountant.get_epsilon(delta))
    if whole.epsilon <= _LARGEST_PLD:
        joint = privacy_loss_distribution.identity()
        for event in events:
            joint = joint.compose(_loss_distribution(event, whole.neighbours))
        answer["pld"] = float(joint.get_epsilon_for_delta(delta))
    return answer


_LARGEST_PLD = 200.0  # its grid has 10 000 cells for each unit of epsilon


def _loss_distribution(event: Event, neighbours: Neighbours) -> Any:
    from dp_accounting.pld import common, privacy_loss_distribution

    if type(event) is Gaussian and event.sensitivity > 0:
        double = (
            2 if event.neighbours is not neighbours else 1
        )  # a Gaussian's mu doubles on a two-step path
        return privacy_loss_distribution.from_gaussian_mechanism(
            event.sigma / event.sensitivity / double
        )
    stated = event.guarantee.convert(neighbours)
    return privacy_loss_distribution.from_privacy_parameters(
        common.DifferentialPrivacyParameters(stated.epsilon, stated.delta)
    )


def events_to_json(events: Iterable[Event]) -> str:
    """Return the events as canonical JSON: sorted keys, no spaces, exact floats."""
    return json.dumps([_to_plain(event) for event in events], sort_keys=True, separators=(",", ":"))


def _to_plain(event: Event) -> dict[str, Any]:
    facts = {field.name: getattr(event, field.name) for field in fields(event)}
    if isinstance(event, Composed):
        facts["parts"] = [_to_plain(part) for part in event.parts]
    return {"event": type(event).__name__, **facts}


def _from_plain(row: dict[str, Any]) -> Event:
    facts = {name: value for name, value in row.items() if name != "event"}
    kind = EVENTS[row["event"]]
    if kind is Composed:
        facts["parts"] = tuple(_from_plain(part) for part in facts["parts"])
    return kind(**facts)


def are_alike(stated: object, planned: object, *, slack: float) -> bool:
    """Tell whether events, or lists of them, are equal up to a relative difference of numbers."""
    if isinstance(planned, tuple):
        return (
            isinstance(stated, tuple)
            and len(stated) == len(planned)
            and all(are_alike(*pair, slack=slack) for pair in zip(stated, planned, strict=True))
        )
    if isinstance(planned, Event):
        return type(stated) is type(planned) and all(
            are_alike(getattr(stated, field.name), getattr(planned, field.name), slack=slack)
            for field in fields(planned)
        )
    if isinstance(planned, float) and isinstance(stated, float | int):
        low, high = sorted((float(stated), planned))
        return high <= low * (1 + slack)
    return bool(stated == planned)


def events_from_json(text: str) -> tuple[Event, ...]:
    """Rebuild events written by `events_to_json`; nothing is ever imported."""
    try:
        return _read_short(text) if len(text) <= _SHORT else _read_events(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SettingsError(
            "These are not events this version knows. Nothing was read. "
            "Ask for the file again, or install the version that wrote it."
        ) from None


def _read_events(text: str) -> tuple[Event, ...]:
    return tuple(_from_plain(row) for row in cast(list[dict[str, Any]], json.loads(text)))


# Every check of a file reads its events, and sites with the same settings have the same ones.
_SHORT = 4096  # characters
_read_short = lru_cache(maxsize=1024)(_read_events)
