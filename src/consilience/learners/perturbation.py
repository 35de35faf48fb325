"""The noise of one linear problem: what it will be, decided from public facts, and drawing it.

`plan_linear` chooses ridge, noise and tolerance for a learner's settings and sizes without looking
at a record; `train_linear` draws that noise, solves, and closes the gap between what the proof
assumes (an exact minimum over the reals) and what a computer returned. Proofs:
docs/guarantees/objective.md, output.md, closing.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, special
from sklearn.utils import check_random_state

from consilience.errors import SettingsError
from consilience.learners.erm import (
    ChunkedRecords,
    Huber,
    HuberHinge,
    Logistic,
    Loss,
    Problem,
    PublicFacts,
    Softmax,
    check_tolerance,
    gradient_error,
    solve,
)
from consilience.learners.gradient import (
    GradientPlan,
    LinearSettings,
    automatic_ridge,
    plan_gradient,
    usual_score,
)
from consilience.learners.implied import ROUNDING, UNLIKELY
from consilience.privacy.accounting import (
    Closing,
    Event,
    ObjectiveGaussian,
    ObjectiveL2Laplace,
    calibrate_scale,
)
from consilience.privacy.guarantee import Neighbours, Unit, count_is_public
from consilience.privacy.mechanisms import Noise, Source, draw_error
from consilience.privacy.vector_noise import (
    VectorNoise,
    calibrate_event,
    calibrate_vector,
    close_vector,
    closing_event,
    draw_vector,
    is_in_objective,
    main_share,
    noise_variance,
    public_radius,
    public_sum,
)

Array = NDArray[Any]

# Of the un-normalised gradient norm, relative to the total regularisation: near what doubles can
# reach, so that the closing noise stays invisible.
TOLERANCE = 1e-8
MOST_RECORDS = 1 << 31  # of one site
# An objective's ridge is the same in all directions, also where records say little, and is better
# too strong than too weak: it is chosen for coefficients of half the length that is expected.
SHORTER = 0.5
# Nor is anything lost by more of it where the noise exceeds that part of all curvature: there the
# best ridge grows as the square of the noise (docs/guarantees/gradient.md).
KNOWN = 0.15
LEAST = 1e-5  # Λ; with less, rounding errors of a sum over so many records would need noise
PAPERS = 1e-2  # Λ of mechanisms and calibrations that are kept as papers have them
LOSS_NAMES: dict[type, Literal["logistic", "huber-hinge", "softmax", "huber"]] = {
    Logistic: "logistic",
    HuberHinge: "huber-hinge",
    Softmax: "softmax",
    Huber: "huber",
}


@dataclass(frozen=True)
class LinearTask:
    """Records in the unit ball with encoded labels, and the sizes that are public."""

    loss: Loss
    dimension: int  # columns of X, the constant one included
    n_records: int
    n_units: int
    n_problems: int = 1  # one-against-rest problems that share the budget
    X: Any = None  # a plan needs no records
    y: Array = field(default_factory=lambda: np.zeros(0))
    persons: Array | None = None
    records: ChunkedRecords | None = None  # in place of X and y

    @property
    def dimension_of_noise(self) -> int:
        """Dimensions in which records move the minimum; softmax coefficients sum to zero."""
        return self.dimension * max(1, self.loss.n_outputs - 1)


@dataclass(frozen=True)
class LinearPlan:
    """One linear problem's noise, ridge and tolerance; all of it computed from public facts."""

    noise: VectorNoise | None
    closing: Closing | None
    regularization: float  # un-normalised λ of the ridge
    matrix: Array | None
    tolerance: float
    # Public bound on the minimum's norm, unless there are far more records than declared.
    longest: float
    n_problems: int

    @property
    def inexactness(self) -> float:
        """How far an exact learner's coefficients may be from the minimum."""
        return _inexactness(self.tolerance, self.regularization, self.regularization)

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn, for all problems."""
        one = [event for event in (self.noise, self.closing) if event is not None]
        return one * self.n_problems

    def longest_release(self, learner: LinearSettings, task: LinearTask) -> float:
        """Return a length that `release` exceeds with a probability of at most 2 `UNLIKELY`."""
        return _longest_release(learner, task, self)

    def release(self, task: LinearTask, source: Source) -> Array:
        """Draw, solve and close one problem; return (d,) or (K, d) in the unit ball's coordinates.

        Privacy
        -------
        Exactly `events`; docs/guarantees/objective.md, output.md and closing.md.
        """
        return train_linear(task, self, source)


def public_size(learner: LinearSettings, task: LinearTask) -> int:
    """Return the true number of units where it is public, otherwise the declared one."""
    who = {"unit": learner.unit, "neighbours": learner.neighbours}
    exact = count_is_public(learner.unit, **who)
    return max(task.n_units, 1) if exact else int(learner.public_size or 1)


def records_per_unit(learner: LinearSettings) -> int:
    """Return how many records one unit may have."""
    return int(learner.records_per_person or 1) if learner.unit == "person" else 1


def mechanism_of(learner: LinearSettings) -> str:
    """Return the learner's mechanism; "auto" is the one that does better at its delta."""
    if learner.mechanism != "auto":
        return str(learner.mechanism)
    return "gradient" if learner.delta > 0 and learner.calibration == "tight" else "objective"


def plan_linear(learner: LinearSettings, task: LinearTask) -> LinearPlan | GradientPlan:
    """Decide noise and ridge for one problem of `task` at its share of the budget."""
    if mechanism_of(learner) != "gradient" or math.isinf(learner.epsilon):
        return plan_perturbation(learner, task)
    return plan_gradient(
        learner,
        task,
        size=public_size(learner, task),
        per_unit=records_per_unit(learner),
        epsilon=learner.epsilon / task.n_problems,
        delta=learner.delta / task.n_problems,
    )


def plan_for_advice(learner: LinearSettings, task: LinearTask) -> LinearPlan:
    """Return the plan, for a forecast: noisy gradients as if their mean's noise were one draw.

    That is what they amount to, to first order: the points settle where the mean of the gradients,
    noise included, vanishes.
    """
    plan = plan_linear(learner, task)
    if isinstance(plan, LinearPlan):
        return plan
    facts = _Facts(learner, task, plan.regularization, learner.epsilon, learner.delta, 1, 0.0)
    return LinearPlan(
        facts._kind(plan.regularization)(plan.event.sigma),
        closing=None,
        regularization=plan.regularization,
        matrix=None,
        tolerance=TOLERANCE * plan.regularization,
        longest=plan.longest,
        n_problems=plan.n_problems,
    )


def plan_perturbation(learner: LinearSettings, task: LinearTask) -> LinearPlan:
    """Decide noise and ridge where an objective or its minimum is perturbed, or nothing is."""
    epsilon, delta = learner.epsilon / task.n_problems, learner.delta / task.n_problems
    add_remove = learner.neighbours == "add-remove"
    size = public_size(learner, task)
    per_unit = records_per_unit(learner)
    ridge = _asked_ridge(learner, task)
    bound = per_unit * (max(16 * size, 1 << 20) if add_remove else size)
    matrix, least = (
        _random_matrix(learner, task, ridge) if learner.mechanism == "matrix" else (None, 0.0)
    )
    noise: VectorNoise | None = None
    if math.isfinite(epsilon):
        facts = _Facts(learner, task, ridge, epsilon, delta, per_unit, least)
        ridge, noise = facts.output() if learner.mechanism == "output" else facts.objective()
    strong = ridge + least
    radius = public_radius(noise, task.dimension_of_noise)
    in_objective = radius if is_in_objective(noise) else 0.0
    size_of_matrix = 0.0 if matrix is None else float(np.linalg.norm(matrix))
    problem = PublicFacts(
        task.loss,
        n_records=bound,
        n_features=task.dimension,
        regularization=ridge,
        linear_norm=in_objective,
        matrix_norm=size_of_matrix,
        tolerance=TOLERANCE * strong,
    )
    tolerance = max(TOLERANCE * strong, 8 * gradient_error(problem))
    check_tolerance(problem._replace(tolerance=tolerance))  # now, and not after the charge
    closing = None
    if noise is not None:
        released = task.dimension * task.loss.n_outputs
        # Softmax noise passes through one more product, of K terms.
        drawn = draw_error(released + 4 * task.loss.n_outputs) * radius
        # An objective's noise moves the minimum by 1/strong of itself; output noise is added as it
        # is.
        distance = _inexactness(tolerance, strong, ridge)
        distance += drawn / strong if is_in_objective(noise) else 2 * drawn
        closing = closing_event(
            released, distance, epsilon=epsilon, unit=noise.unit, neighbours=noise.neighbours
        )
    longest = (
        in_objective + math.sqrt(in_objective**2 + 2 * ridge * bound * task.loss.at_zero)
    ) / ridge
    return LinearPlan(noise, closing, ridge, matrix, tolerance, longest, task.n_problems)


def _asked_ridge(learner: LinearSettings, task: LinearTask) -> float:
    """Return the un-normalised λ that was asked for."""
    size = public_size(learner, task)
    if not isinstance(learner.regularization, str):
        return float(learner.regularization * size)
    if math.isinf(learner.epsilon):
        return automatic_ridge(task.dimension)
    if learner.mechanism in ("generalized", "matrix") or learner.calibration != "tight":
        return PAPERS * size
    if learner.mechanism != "output":
        return max(automatic_ridge(task.dimension), LEAST * size)
    # Noise on the minimum grows as the ridge falls: with s the noise at a ridge of 1 and h the
    # typical curvature, ½h(s/λ)² for each coordinate and ½λτ² balance at λ³ = hs²/τ², τ being the
    # usual score.
    per_unit = records_per_unit(learner)
    facts = _Facts(
        learner, task, 1.0, learner.epsilon / task.n_problems, learner.delta, per_unit, 0.0
    )
    moved = facts._moved * task.loss.lipschitz
    noise = calibrate_vector(moved, epsilon=facts.budget, delta=facts.delta, **facts._who)
    steep = task.loss.curvature * size * per_unit / task.dimension
    cube = steep * noise_variance(noise, task.dimension_of_noise) / usual_score(task.loss) ** 2
    return max(automatic_ridge(task.dimension), float(np.cbrt(cube)))


def _inexactness(tolerance: float, strong: float, ridge: float) -> float:
    """Return how far a computed minimum may be from the true one.

    The solver vouches for its tolerance and an error of a quarter of it, whatever the number of
    records; rounding the result (or its sum with the noise) to doubles moves it by at most
    tolerance / (16 ridge).
    """
    return 1.25 * tolerance / strong + tolerance / (8 * ridge)


def _longest_release(learner: LinearSettings, task: LinearTask, plan: LinearPlan) -> float:
    loss, ridge = task.loss, plan.regularization
    radius = public_radius(plan.noise, task.dimension_of_noise, probability=UNLIKELY)
    linear = radius if is_in_objective(plan.noise) else 0.0
    per_unit = records_per_unit(learner)
    records = per_unit * max(task.n_units, 1)
    if learner.neighbours == "add-remove":
        # Hidden; where there is noise, `train_linear` cuts its minimum to the planned length.
        records = per_unit * MOST_RECORDS
    # The gradient vanishes at the minimum, and J there is at most J(0).
    longest = min(
        (records * loss.lipschitz + linear) / ridge,
        (linear + math.sqrt(linear**2 + 2 * ridge * records * loss.at_zero)) / ridge,
    )
    if plan.noise is not None:
        longest = min(longest, plan.longest)
    longest += plan.tolerance / ridge + (radius - linear)
    if plan.closing is not None:
        dimension = plan.closing.dimension
        each = public_sum(plan.closing, 1, probability=UNLIKELY / dimension)
        longest += math.sqrt(dimension) * each
    return longest * (1 + ROUNDING)


def output_sensitivity(learner: LinearSettings, task: LinearTask) -> float:
    """Return how far one unit can move the exact minimum of `task`, in the unit ball."""
    per_unit = records_per_unit(learner)
    ridge = _asked_ridge(learner, task)
    return _Facts(learner, task, ridge, math.inf, 0.0, per_unit, 0.0)._sensitivity()


@dataclass(frozen=True)
class _Facts:
    """The public facts of one problem, and the calibrations that rest on them."""

    learner: LinearSettings
    task: LinearTask
    ridge: float
    budget: float  # epsilon, closing noise included
    delta: float
    per_unit: int
    least: float  # strong convexity that a data-independent matrix adds

    @property
    def epsilon(self) -> float:
        """What the main noise may cost."""
        return main_share(self.budget)

    @property
    def _who(self) -> dict[str, Any]:
        return {"unit": Unit(self.learner.unit), "neighbours": Neighbours(self.learner.neighbours)}

    @property
    def _moved(self) -> int:
        return self.per_unit * (2 if self.learner.neighbours == "replace-one" else 1)

    def output(self) -> tuple[float, Any]:
        """Noise on the exact minimum; docs/guarantees/output.md."""
        if self.learner.calibration == "chaudhuri2011":
            sensitivity = self._moved * self.task.loss.lipschitz / self.ridge
        else:
            sensitivity = self._sensitivity()
        return self.ridge, calibrate_vector(
            sensitivity, epsilon=self.budget, delta=self.delta, **self._who
        )

    def _sensitivity(self) -> float:
        loss = self.task.loss
        general = self._moved * loss.lipschitz / self.ridge
        if self.learner.neighbours == "add-remove":
            return general
        # J(f*) <= J(0) and the gradient's bound: two caps on the length of any minimum, both
        # public.
        records = self.per_unit * max(self.task.n_units, 1)
        longest = min(
            math.sqrt(2 * records * loss.at_zero / self.ridge),
            records * loss.lipschitz / self.ridge,
        )
        if isinstance(loss, Logistic):
            general = min(general, self.per_unit * logistic_gap(longest) / self.ridge)
        return min(general, 2 * longest)

    def objective(self) -> tuple[float, Any]:
        """Noise in the objective; docs/guarantees/objective.md."""
        if self.learner.calibration == "chaudhuri2011":
            return self._chaudhuri()
        if self.learner.mechanism == "generalized":
            return self._kifer()
        # A quarter of epsilon at most goes to the Jacobian: where the asked ridge is too small for
        # that, it is raised. Unlike the 2011 case split this is continuous and monotone in epsilon.
        ridge = max(self.ridge, self._ridge_for(self.epsilon / 4) - self.least)
        scale = calibrate_scale(self._kind(ridge), epsilon=self.epsilon)
        # Noise b moves the minimum by ‖b‖/ridge, while a ridge costs about ridge·B²/2 for a minimum
        # of length B: the two balance at ridge ~ √2·E‖b‖/B. The length that J(f) <= J(0) allows any
        # minimum is public, so this is too.
        dimension = self.task.dimension_of_noise
        if isinstance(self.learner.regularization, str):
            longest = SHORTER * usual_score(self.task.loss) * math.sqrt(2 * dimension)
        else:
            longest = math.sqrt(
                2 * self.per_unit * self.task.loss.at_zero / self.learner.regularization
            )
        norm = scale * math.sqrt(dimension if self.delta > 0 else dimension * (dimension + 1))
        balanced = math.sqrt(2) * norm / longest
        if isinstance(self.learner.regularization, str):
            records = self.per_unit * public_size(self.learner, self.task)
            balanced *= 1 + balanced / (KNOWN * self.task.loss.curvature * records)
        ridge = max(ridge, balanced - self.least)
        return ridge, calibrate_event(self._kind(ridge), epsilon=self.epsilon)

    def _ridge_for(self, jacobian: float) -> float:
        """Return the strong convexity at which the log-determinant moves by at most `jacobian`."""
        share, loss = jacobian / self.per_unit, self.task.loss
        if isinstance(loss, Softmax):
            return 1 / (loss.n_classes * _expm1(share / (loss.n_classes - 1)))
        return loss.curvature / _expm1(share)

    def _kind(self, ridge: float) -> Any:
        """Return the event as a function of its noise scale."""
        loss = self.task.loss
        facts = {
            "loss": LOSS_NAMES[type(loss)],
            "n_classes": max(loss.n_outputs, 2),
            "curvature": loss.curvature,
            "lipschitz": loss.lipschitz,
            "strong_convexity": ridge + self.least,
            "records_per_unit": self.per_unit,
            **self._who,
        }
        if self.delta > 0:
            return lambda sigma: ObjectiveGaussian(sigma=sigma, at_delta=self.delta, **facts)
        return lambda scale: ObjectiveL2Laplace(scale=scale, **facts)

    def _chaudhuri(self) -> tuple[float, Any]:
        """Chaudhuri, Monteleoni & Sarwate 2011, algorithm 2, with its exponent e^{ε/4}."""
        plain = self.delta == 0 and self.per_unit == 1 and self.learner.neighbours == "replace-one"
        if (
            not plain
            or isinstance(self.task.loss, Softmax | Huber)
            or mechanism_of(self.learner) != "objective"
        ):
            raise SettingsError(
                "calibration='chaudhuri2011' is the paper's: two classes, pure epsilon, one "
                "record replaced, output or objective perturbation. Nothing was trained. Use "
                "calibration='tight' for anything else."
            )
        curvature, ridge = self.task.loss.curvature, self.ridge
        left = self.epsilon - 2 * math.log1p(curvature / ridge)
        if left <= 0:
            ridge, left = curvature / _expm1(self.epsilon / 4), self.epsilon / 2
        return ridge, self._kind(ridge)(2 / left)

    def _kifer(self) -> tuple[float, Any]:
        """Kifer, Smith & Thakurta 2012, algorithm 1: half of epsilon each for Jacobian and noise.

        Their constants are for add-remove; under replace-one twice as many gradients move. The
        ridge is the one at which our own bound on the Jacobian is ε/2 to first order, which for one
        output is their 2λ/ε.
        """
        loss = self.task.loss
        steps = (1 - 1 / loss.n_classes) if isinstance(loss, Softmax) else loss.curvature
        ridge = self.ridge + 2 * self.per_unit * steps / self.epsilon
        reach = self._moved * loss.lipschitz
        kind = self._kind(ridge)
        if self.delta == 0:
            return ridge, kind(2 * reach / self.epsilon)
        paper = reach * math.sqrt(8 * math.log(2 / self.delta) + 4 * self.epsilon) / self.epsilon
        # Never less noise than our own profile asks for (it asks for less unless there are many
        # classes).
        return ridge, kind(max(paper, calibrate_scale(kind, epsilon=self.epsilon)))


def _expm1(x: float) -> float:
    return math.expm1(min(x, 700.0))  # an epsilon in the thousands is no reason to overflow


@lru_cache  # thousands of sites of one size ask for the same
def logistic_gap(longest: float) -> float:
    """Return the largest gap between two records' logistic gradients within norm `longest`.

    max over 0 <= m <= R of 2σ(m)·sqrt(1 - (m/R)²): 1 at R = 0, 2 in the limit
    (docs/guarantees/output.md). A grid with a Lipschitz margin bounds the maximum from above.
    """
    if longest == 0:
        return 1.0
    m = np.linspace(0.0, min(longest, 40.0), 20001)
    gap = 2 * special.expit(m) * np.sqrt(1 - np.minimum(1.0, m / longest) ** 2)
    # σ' <= 1/4 and the root decreases, so between grid points the product exceeds neither by more
    # than step/2.
    return min(2.0, float(gap.max() + (m[1] - m[0]) / 2))


def _random_matrix(learner: LinearSettings, task: LinearTask, ridge: float) -> tuple[Array, float]:
    """Draw the thesis' positive semi-definite matrix; it is public and costs no privacy."""
    if task.loss.n_outputs > 1:
        raise SettingsError(
            "mechanism='matrix' is for two classes or regression. Nothing was trained. Use "
            "mechanism='objective'."
        )
    seed = int(check_random_state(learner.random_state).randint(2**31))
    factor = Noise(seed=seed).open().normal(task.dimension**2).reshape(task.dimension, -1)
    matrix = factor @ factor.T * (ridge / task.dimension)
    return matrix, max(0.0, 0.999 * float(np.linalg.eigvalsh(matrix)[0]))


def train_linear(task: LinearTask, plan: LinearPlan, source: Source) -> Array:
    """Draw, solve and close one problem; return (d,) or (K, d) in the unit ball's coordinates.

    Privacy
    -------
    Exactly the events of `plan`; docs/guarantees/objective.md, output.md and closing.md.
    """
    drawn = None
    if plan.noise is not None:
        drawn = draw_vector(task.dimension_of_noise, event=plan.noise, source=source)
        if task.loss.n_outputs > 1:
            # Orthonormal coordinates of the classes' sum-zero subspace, where all gradients and the
            # minimum lie.
            drawn = linalg.helmert(task.loss.n_outputs).T @ drawn.reshape(-1, task.dimension)
    in_objective = drawn if is_in_objective(plan.noise) else None
    chunked = task.records is not None
    found = solve(
        task.records if chunked else task.X,
        None if chunked else task.y,
        Problem(
            task.loss, regularization=plan.regularization, linear=in_objective, matrix=plan.matrix
        ),
        tolerance=plan.tolerance,
    )
    coef: Array = found.coef
    if plan.closing is not None:
        # Only a table far beyond its declared size has a longer minimum. Projecting is
        # post-processing of the ideal one and brings the computed one no farther from it, and now
        # storing doubles moves it by a public amount, also if decimal numbers are stored twice.
        coef = coef.astype(np.longdouble)
        coef *= min(1.0, plan.longest / max(np.linalg.norm(coef), np.longdouble(1e-300)))
    coef = np.asarray(coef, dtype=np.float64)
    if drawn is not None and in_objective is None:
        coef = coef + drawn
    return close_vector(coef, event=plan.closing, source=source)
