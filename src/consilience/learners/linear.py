"""Private linear learners: logistic regression, support-vector classifier, ridge regression.

All three minimise a sum of losses over records scaled into the unit ball, plus a ridge, and differ only in the loss.
What is drawn is decided by `plan_linear` from public facts; `train_linear` draws it, solves, and closes the gap
between what the proof assumes (an exact minimum over the reals) and what a computer returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, sparse, special
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from consilience.data import cap_records
from consilience.errors import GuaranteeVoid, SchemaMismatch, SettingsError
from consilience.privacy.accounting import (
    Closing,
    Event,
    Gaussian,
    L2Laplace,
    Objective,
    ObjectiveGaussian,
    ObjectiveL2Laplace,
    calibrate_scale,
    gaussian_sigma,
)
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source, clip_rows, close, draw_error, gaussian, l2_laplace

from .base import PrivateLearner, is_positive
from .erm import ChunkedRecords, Huber, HuberHinge, Logistic, Loss, Softmax, gradient_error, solve

Array = NDArray[Any]

CLOSING_SHARE = 0.01  # of epsilon; covers a distance of about 1e-8, so its noise is invisible
TOLERANCE = 1e-8  # un-normalised gradient norm relative to the total regularisation (design.md, decision 7)
# The public radius of a draw: exceeded with probability 2^-256, the chance of guessing the key it was drawn from.
RADIUS_PROBABILITY = 2.0**-256
LOSS_NAMES: dict[type, Literal["logistic", "huber-hinge", "softmax", "huber"]] = {
    Logistic: "logistic",
    HuberHinge: "huber-hinge",
    Softmax: "softmax",
    Huber: "huber",
}


# ------------------------------------------------------------------------------------------------------------ records


@dataclass(frozen=True)
class LinearTask:
    """Records in the unit ball with encoded labels, and the sizes that are public."""

    records: ChunkedRecords | None
    X: Any
    y: Array
    persons: Array | None
    loss: Loss
    dimension: int  # columns of X, the constant one included
    n_records: int
    n_units: int
    n_problems: int = 1  # one-against-rest problems that share the budget

    @property
    def dimension_of_noise(self) -> int:
        """Dimensions in which records move the minimum: softmax coefficients sum to zero over the classes."""
        return self.dimension * max(1, self.loss.n_outputs - 1)

    def against_rest(self, code: int) -> LinearTask:
        """Return the two-class problem of one class against all others."""
        if self.records is None:
            return replace(self, y=_signs(self.y, code))
        records = cast(_Mapped, self.records)
        return replace(self, records=replace(records, encode=lambda y: _signs(records.encode(y), code)))


def _signs(codes: Array, positive: int) -> Array:
    return np.where(codes == positive, 1.0, -1.0)


@dataclass(frozen=True)
class _Mapped:
    """Chunked records seen through the learner's scaling."""

    source: ChunkedRecords
    learner: Any
    encode: Any
    n_features: int

    @property
    def n_records(self) -> int:
        return self.source.n_records

    def chunks(self) -> Iterator[tuple[Any, Array]]:
        for X, y in self.source.chunks():
            yield _into_ball(X, self.learner), self.encode(y)


def _into_ball(X: Any, learner: Any) -> Any:
    """Scale by the declared norm, clip, append the constant column: rows of norm <= 1, always.

    The intercept is a feature like any other, jointly normalised and regularised: without strong convexity in
    every coordinate there is no privacy.
    """
    if learner.data_norm != 1.0:
        X = X * (1.0 / learner.data_norm)
    X = clip_rows(X, 1.0)
    if not learner.fit_intercept:
        return X
    half = math.sqrt(0.5) * (1 - 2**-50)
    if sparse.issparse(X):
        return sparse.hstack([X * half, sparse.csr_array(np.full((X.shape[0], 1), half))], format="csr")
    out = np.empty((X.shape[0], X.shape[1] + 1))
    np.multiply(X, half, out=out[:, :-1])
    out[:, -1] = half
    return out


def _checked(learner: Any, X: Any, y: Any, **labels: Any) -> tuple[Any, Array]:
    """Validate as scikit-learn does, but never repeat a record's value in an error."""
    empty = learner.neighbours == "add-remove" and getattr(learner, "classes", ()) is not None
    try:
        X, y = validate_data(
            learner,
            X,
            y,
            accept_sparse="csr",
            dtype=np.float64,
            # Under add-remove even "the table is empty" is about the records, so an empty table trains.
            ensure_min_samples=0 if empty else 1,
            **labels,
        )
    except ValueError as error:
        if "could not convert" in str(error) or "invalid literal" in str(error):
            raise SchemaMismatch(
                f"{type(learner).__name__} was given a table with text where it needs numbers. Nothing was trained. "
                "Encode the table with Schema.encode, which turns declared categories into columns."
            ) from None
        raise
    return X, np.asarray(y)


def _persons(learner: Any, persons: ArrayLike | None, n_records: int) -> Array | None:
    if learner.unit == "record":
        if persons is not None:
            raise SettingsError(
                f"{type(learner).__name__} was given persons, but hides single records (unit='record'). "
                "Nothing was trained. Set unit='person' and records_per_person, or drop persons."
            )
        return None
    if persons is None:
        raise SettingsError(
            f"{type(learner).__name__} with unit='person' needs to know whose each record is. Nothing was trained. "
            "Pass persons=..., one id per record."
        )
    ids = np.asarray(persons)
    if ids.shape != (n_records,):
        raise SchemaMismatch("'persons' must hold one id per record. Nothing was trained. Check its length.")
    return ids


def _check_settings(learner: Any) -> None:
    learner._check_privacy(("objective", "output", "generalized", "matrix"))
    need = learner._require
    for name in ("regularization", "data_norm"):
        value = getattr(learner, name)
        need(name, is_positive(value), "a finite number > 0")
    need("unit", learner.unit in ("record", "person"), "'record' or 'person'")
    cap = learner.records_per_person
    if learner.unit == "person":
        need("records_per_person", isinstance(cap, int | np.integer) and cap >= 1, "an integer >= 1 with unit='person'")
    size = learner.public_size
    if learner.neighbours == "add-remove" and not (isinstance(size, int | np.integer) and size >= 1):
        raise SettingsError(
            f"{type(learner).__name__} with neighbours='add-remove' hides how many records there are, so the "
            "regularisation cannot be scaled by their number. Nothing was trained. Declare public_size=..., a public "
            "guess of it (an integer >= 1); it need not be right."
        )
    need(
        "calibration",
        learner.calibration in ("tight", "chaudhuri2011", "thesis"),
        "'tight', 'chaudhuri2011' or 'thesis'",
    )
    if learner.calibration == "thesis":
        raise GuaranteeVoid(_THESIS if learner.mechanism == "matrix" else _NO_THESIS)


_THESIS = (
    "The thesis' matrix perturbation (Xie 2016, eq. 6.1) was asked for. It has no guarantee at any delta < 1: with "
    "two records (x, +1) and (x, -1) the gradient at 0 vanishes, so the answer is 0 whatever matrix was drawn; replace "
    "the second record by (x', -1) with another x' and the answer is almost surely not 0. Nothing was trained. Use "
    "mechanism='matrix' with calibration='tight', which adds the linear noise that makes it private."
)
_NO_THESIS = (
    "calibration='thesis' names the thesis' matrix perturbation and applies to mechanism='matrix' only. Nothing was "
    "trained. Use calibration='tight'."
)


# --------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class LinearPlan:
    """One linear problem's noise, ridge and tolerance; all of it computed from public facts."""

    noise: L2Laplace | Gaussian | ObjectiveL2Laplace | ObjectiveGaussian | None
    closing: Closing | None
    regularization: float  # un-normalised λ of the ridge
    matrix: Array | None
    tolerance: float
    n_problems: int

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn, for all problems."""
        one = [event for event in (self.noise, self.closing) if event is not None]
        return one * self.n_problems


def plan_linear(learner: Any, task: LinearTask) -> LinearPlan:
    """Decide noise and ridge for one problem of `task` at its share of the budget."""
    epsilon, delta = learner.epsilon / task.n_problems, learner.delta / task.n_problems
    # Under replace-one the number of units is public; under add-remove only the declared size is.
    add_remove = learner.neighbours == "add-remove"
    size = int(learner.public_size) if add_remove else task.n_units
    ridge = learner.regularization * max(size, 1)
    per_unit = int(learner.records_per_person) if learner.unit == "person" else 1
    bound = per_unit * (max(16 * size, 1 << 20) if add_remove else max(size, 1))
    matrix, least = _random_matrix(learner, task, ridge) if learner.mechanism == "matrix" else (None, 0.0)
    noise: Any = None
    if math.isfinite(epsilon):
        facts = _Facts(learner, task, ridge, (1 - CLOSING_SHARE) * epsilon, delta, per_unit, least)
        ridge, noise = facts.output() if learner.mechanism == "output" else facts.objective()
    strong = ridge + least
    radius = 0.0 if noise is None else _radius(noise, task.dimension_of_noise)
    in_objective = radius if isinstance(noise, Objective) else 0.0
    size_of_matrix = 0.0 if matrix is None else float(np.linalg.norm(matrix))
    rounding = gradient_error(
        task.loss,
        n_records=bound,
        n_features=task.dimension,
        regularization=ridge,
        linear_norm=in_objective,
        matrix_norm=size_of_matrix,
        tolerance=TOLERANCE * strong,
    )
    tolerance = max(TOLERANCE * strong, 8 * rounding)
    closing = None
    if noise is not None:
        released = task.dimension * task.loss.n_outputs
        drawn = draw_error(released) * radius
        # An objective's noise moves the minimum by 1/strong of itself; output noise is added as it is.
        distance = (tolerance + rounding) / strong + (drawn / strong if isinstance(noise, Objective) else 2 * drawn)
        closing = Closing(
            unit=noise.unit,
            neighbours=noise.neighbours,
            dimension=released,
            distance=distance,
            scale=2 * math.sqrt(released) * distance / (CLOSING_SHARE * epsilon),
        )
    return LinearPlan(noise, closing, ridge, matrix, tolerance, task.n_problems)


@dataclass(frozen=True)
class _Facts:
    """The public facts of one problem, and the calibrations that rest on them."""

    learner: Any
    task: LinearTask
    ridge: float
    epsilon: float
    delta: float
    per_unit: int
    least: float  # strong convexity that a data-independent matrix adds

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
        if self.delta > 0:
            sigma = gaussian_sigma(epsilon=self.epsilon, delta=self.delta, sensitivity=sensitivity)
            return self.ridge, Gaussian(sensitivity=sensitivity, sigma=sigma, at_delta=self.delta, **self._who)
        return self.ridge, L2Laplace(sensitivity=sensitivity, scale=sensitivity / self.epsilon, **self._who)

    def _sensitivity(self) -> float:
        loss = self.task.loss
        general = self._moved * loss.lipschitz / self.ridge
        if self.learner.neighbours == "add-remove":
            return general
        # J(f*) <= J(0) and the gradient's bound: two caps on the length of any minimum, both public.
        records = self.per_unit * max(self.task.n_units, 1)
        longest = min(math.sqrt(2 * records * loss.at_zero / self.ridge), records * loss.lipschitz / self.ridge)
        if isinstance(loss, Logistic):
            general = min(general, self.per_unit * logistic_gap(longest) / self.ridge)
        return min(general, 2 * longest)

    def objective(self) -> tuple[float, Any]:
        """Noise in the objective; docs/guarantees/objective.md."""
        if self.learner.calibration == "chaudhuri2011":
            return self._chaudhuri()
        if self.learner.mechanism == "generalized":
            return self._kifer()
        # Spend at most the share kappa of epsilon on the Jacobian, by adding ridge where the asked one is too
        # small. Unlike the 2011 case split this is continuous and monotone in epsilon.
        kappa = 0.25 if self.delta > 0 else 0.5
        ridge = max(self.ridge, self._ridge_for(kappa * self.epsilon) - self.least)
        kind = self._kind(ridge)
        return ridge, kind(calibrate_scale(kind, epsilon=self.epsilon))

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
        """Chaudhuri, Monteleoni & Sarwate 2011, algorithm 2, with e^{ε/4} where the thesis prints another exponent."""
        plain = self.delta == 0 and self.per_unit == 1 and self.learner.neighbours == "replace-one"
        if not plain or isinstance(self.task.loss, Softmax | Huber) or self.learner.mechanism != "objective":
            raise SettingsError(
                "calibration='chaudhuri2011' is the paper's: two classes, pure epsilon, one record replaced, output or "
                "objective perturbation. Nothing was trained. Use calibration='tight' for anything else."
            )
        curvature, ridge = self.task.loss.curvature, self.ridge
        left = self.epsilon - 2 * math.log1p(curvature / ridge)
        if left <= 0:
            ridge, left = curvature / _expm1(self.epsilon / 4), self.epsilon / 2
        return ridge, self._kind(ridge)(2 / left)

    def _kifer(self) -> tuple[float, Any]:
        """Kifer, Smith & Thakurta 2012, algorithm 1: half of epsilon each for Jacobian and noise.

        Their constants are for add-remove; under replace-one twice as many gradients move. The ridge is the one
        at which our own bound on the Jacobian is ε/2 to first order, which for one output is their 2λ/ε.
        """
        loss = self.task.loss
        steps = (1 - 1 / loss.n_classes) if isinstance(loss, Softmax) else loss.curvature
        ridge = self.ridge + 2 * self.per_unit * steps / self.epsilon
        reach = self._moved * loss.lipschitz
        kind = self._kind(ridge)
        if self.delta == 0:
            return ridge, kind(2 * reach / self.epsilon)
        paper = reach * math.sqrt(8 * math.log(2 / self.delta) + 4 * self.epsilon) / self.epsilon
        # Never less noise than our own profile asks for (it asks for less unless there are many classes).
        return ridge, kind(max(paper, calibrate_scale(kind, epsilon=self.epsilon)))


def _expm1(x: float) -> float:
    return math.expm1(min(x, 700.0))  # an epsilon in the thousands is no reason to overflow


def logistic_gap(longest: float) -> float:
    """Return the largest gap between two records' logistic gradients at a point of norm <= `longest`.

    max over 0 <= m <= R of 2σ(m)·sqrt(1 - (m/R)²): 1 at R = 0, 2 in the limit (docs/guarantees/output.md). A grid
    with a Lipschitz margin bounds the maximum from above.
    """
    if longest == 0:
        return 1.0
    m = np.linspace(0.0, min(longest, 40.0), 20001)
    gap = 2 * special.expit(m) * np.sqrt(1 - np.minimum(1.0, m / longest) ** 2)
    # σ' <= 1/4 and the root decreases, so between grid points the product exceeds neither by more than step/2.
    return min(2.0, float(gap.max() + (m[1] - m[0]) / 2))


def _random_matrix(learner: Any, task: LinearTask, ridge: float) -> tuple[Array, float]:
    """Draw the thesis' positive semi-definite matrix from public randomness; it adds no privacy and costs none."""
    if task.loss.n_outputs > 1:
        raise SettingsError(
            "mechanism='matrix' is for two classes or regression. Nothing was trained. Use mechanism='objective'."
        )
    seed = int(check_random_state(learner.random_state).randint(2**31))
    factor = Noise(seed=seed).open().normal(task.dimension**2).reshape(task.dimension, -1)
    matrix = factor @ factor.T * (ridge / task.dimension)
    return matrix, max(0.0, 0.999 * float(np.linalg.eigvalsh(matrix)[0]))


def _radius(noise: Any, dimension: int) -> float:
    if isinstance(noise, Gaussian | ObjectiveGaussian):
        return float(noise.sigma * math.sqrt(2 * special.gammainccinv(dimension / 2, RADIUS_PROBABILITY)))
    return float(noise.scale * special.gammainccinv(dimension, RADIUS_PROBABILITY))


# -------------------------------------------------------------------------------------------------------------- train


def train_linear(task: LinearTask, plan: LinearPlan, source: Source) -> Array:
    """Draw, solve and close one problem; returns (d,) or (K, d) in the coordinates of the unit ball.

    Privacy
    -------
    Exactly the events of `plan`; docs/guarantees/objective.md, output.md and closing.md.
    """
    drawn = None
    if plan.noise is not None:
        draw: Any = gaussian if isinstance(plan.noise, Gaussian | ObjectiveGaussian) else l2_laplace
        drawn = draw(task.dimension_of_noise, event=plan.noise, source=source)
        if task.loss.n_outputs > 1:
            # Orthonormal coordinates of the classes' sum-zero subspace, where all gradients and the minimum lie.
            drawn = linalg.helmert(task.loss.n_outputs).T @ drawn.reshape(-1, task.dimension)
    in_objective = drawn if isinstance(plan.noise, Objective) else None
    chunked = task.records is not None
    found = solve(
        task.records if chunked else task.X,
        None if chunked else task.y,
        task.loss,
        regularization=plan.regularization,
        linear=in_objective,
        matrix=plan.matrix,
        tolerance=plan.tolerance,
    )
    coef = np.asarray(found.coef, dtype=np.float64)
    if drawn is not None and in_objective is None:
        coef = coef + drawn
    return coef if plan.closing is None else close(coef, event=plan.closing, source=source)


def _capped(task: LinearTask, learner: Any, source: Source) -> LinearTask:
    """Drop, at random, what a person holds beyond the declared cap."""
    if task.persons is None:
        return task
    keep = cap_records(task.persons, int(learner.records_per_person), source.uniform(task.n_records))
    return replace(task, X=task.X[keep], y=task.y[keep], n_records=int(keep.sum()))


def _set_coefficients(learner: Any, parts: Array) -> None:
    """Set coef_ and intercept_ in the user's coordinates from vectors in the unit ball's."""
    parts = np.atleast_2d(parts)
    if learner.fit_intercept:
        half = math.sqrt(0.5)
        learner.coef_, learner.intercept_ = parts[:, :-1] * (half / learner.data_norm), parts[:, -1] * half
    else:
        learner.coef_, learner.intercept_ = parts / learner.data_norm, np.zeros(len(parts))


def _linear_output(learner: Any, X: Any) -> Array:
    check_is_fitted(learner)
    X = validate_data(learner, X, accept_sparse="csr", dtype=np.float64, reset=False)
    return np.asarray(X @ learner.coef_.T + learner.intercept_)


def _classification(learner: Any, X: Any, y: Any, persons: Any) -> tuple[LinearTask, list[str], Array]:
    """Check a classifier's settings and data; return its task, assumptions and class list."""
    _check_settings(learner)
    assumptions: list[str] = []
    if learner.classes is not None:
        classes = np.asarray(learner.classes)
        if classes.ndim != 1 or len(np.unique(classes)) < max(2, len(classes)):
            raise SettingsError(
                f"The 'classes' parameter of {type(learner).__name__} must list at least two different labels. "
                f"Got {learner.classes!r} instead."
            )
    if hasattr(X, "chunks"):
        _check_chunked(learner)
        learner.n_features_in_ = X.n_features
        labels, ids, n_records = np.zeros(0), None, int(X.n_records)
    else:
        X, labels = _checked(learner, X, y)
        if labels.size:
            check_classification_targets(labels)
        n_records, ids = X.shape[0], _persons(learner, persons, X.shape[0])
        if learner.classes is None:
            classes = np.unique(labels)
            assumptions.append("the set of labels is public: it was read from the training labels")
    order = np.argsort(classes, kind="stable")

    def encode(values: Array) -> Array:
        position = np.minimum(np.searchsorted(classes, values, sorter=order), len(classes) - 1)
        codes = order[position]
        if not np.array_equal(classes[codes], values):
            raise SchemaMismatch(
                f"{type(learner).__name__} found a label that is not among its declared classes. Nothing was trained. "
                "Add it to 'classes', or remove such records before training."
            )
        return np.asarray(codes)

    loss: Loss = learner._loss(len(classes))
    two = len(classes) <= 2
    task = _task(learner, X, labels, ids, n_records, loss, (lambda y: _signs(encode(y), 1)) if two else encode)
    if not two and loss.n_outputs == 1:
        task = replace(task, n_problems=len(classes))
    return task, assumptions, classes


def _check_chunked(learner: Any) -> None:
    if getattr(learner, "classes", ()) is None or learner.unit == "person":
        raise SettingsError(
            f"{type(learner).__name__} was given a table in chunks, which needs declared classes and unit='record'. "
            "Nothing was trained. Pass classes=...; persons can be capped only in a table that fits in memory."
        )


def _task(
    learner: Any, X: Any, labels: Array, persons: Array | None, n_records: int, loss: Loss, encode: Any
) -> LinearTask:
    chunked = hasattr(X, "chunks")
    dimension = learner.n_features_in_ + bool(learner.fit_intercept)
    return LinearTask(
        records=_Mapped(X, learner, encode, dimension) if chunked else None,
        X=None if chunked else _into_ball(X, learner),
        y=encode(labels),
        persons=persons,
        loss=loss,
        dimension=dimension,
        n_records=n_records,
        n_units=n_records if persons is None else len(np.unique(persons)),
    )


# ----------------------------------------------------------------------------------------------------------- learners


class _Linear:
    """What the linear learners share beside the fit template."""

    coef_: Array
    intercept_: Array

    def _plan(self, task: LinearTask) -> LinearPlan:
        return plan_linear(self, task)

    def _state(self) -> dict[str, Array]:
        return {"coef": self.coef_, "intercept": self.intercept_}

    def _restore(self, state: dict[str, Array]) -> None:
        self.coef_, self.intercept_ = state["coef"], state["intercept"]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.sparse = True
        tags.non_deterministic = math.isfinite(self.epsilon) and self.noise is None  # type: ignore[attr-defined]
        return tags


class _LinearClassifier(_Linear, ClassifierMixin):  # type: ignore[misc]
    """What the two linear classifiers share."""

    classes_: Array

    def fit(
        self,
        X: Any,
        y: ArrayLike | None = None,
        *,
        persons: ArrayLike | None = None,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> Self:
        """Train; with a ledger, charge `dataset` first. A retry with the same `key` returns the first result.

        `X` may be dense, sparse, a data frame, or a table in chunks that brings its own labels.
        """
        task, assumptions, self.classes_ = _classification(self, X, y, persons)
        return cast(Self, self._fit(task, assumptions, ledger, dataset, key))

    def decision_function(self, X: Any) -> Array:
        """Return the margin of the second class, or one score per class when there are more than two."""
        scores = _linear_output(self, X)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """Return the class with the highest score for each row."""
        scores = self.decision_function(X)
        if len(self.classes_) == 1:
            return np.repeat(self.classes_, len(scores))
        codes = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[codes])


class PrivateLogisticRegression(_LinearClassifier, PrivateLearner[LinearTask, LinearPlan]):
    """Fit a regularised logistic regression, softmax for more than two classes, under differential privacy.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact training that promises nothing.
    mechanism
        ``"objective"`` perturbs the objective (default), ``"output"`` the minimum, ``"generalized"`` is Kifer's
        objective perturbation, ``"matrix"`` the provable form of the thesis' matrix perturbation.
    regularization
        Λ of ``mean(loss) + Λ/2 ‖f‖²``, in coordinates where rows have norm <= 1.
    data_norm
        Declared bound on the norm of a row. Longer rows are scaled down to it.
    classes
        The declared labels. Without it they are read from `y`, and the guarantee says so.
    neighbours, public_size
        ``"replace-one"``: the number of records is public. ``"add-remove"``: it is not, and `public_size` declares
        a public guess that scales the regularisation.
    unit, records_per_person
        ``"person"`` hides all of a person's records, of which at most `records_per_person` are used.
    calibration
        ``"tight"``, or ``"chaudhuri2011"`` for the paper's own noise.
    random_state
        Public randomness only (the matrix of ``mechanism="matrix"``); keeps the guarantee.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Privacy
    -------
    ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone who sees the fitted attributes.
    Not hidden: the number of features, the classes, and under replace-one the number of units. Proofs:
    docs/guarantees/objective.md, output.md, closing.md.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-0.5, 0.5, (2000, 3))
    >>> y = (X[:, 0] > 0).astype(int)
    >>> PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(X, y).guarantee_
    Guarantee(epsilon=1, delta=0, per record, replace-one)
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float = 0.0,
        mechanism: str = "objective",
        regularization: float = 1e-2,
        data_norm: float = 1.0,
        fit_intercept: bool = True,
        classes: ArrayLike | None = None,
        neighbours: str = "replace-one",
        public_size: int | None = None,
        unit: str = "record",
        records_per_person: int | None = None,
        calibration: str = "tight",
        random_state: Any = None,
        noise: Noise | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.mechanism = mechanism
        self.regularization = regularization
        self.data_norm = data_norm
        self.fit_intercept = fit_intercept
        self.classes = classes
        self.neighbours = neighbours
        self.public_size = public_size
        self.unit = unit
        self.records_per_person = records_per_person
        self.calibration = calibration
        self.random_state = random_state
        self.noise = noise

    def predict_proba(self, X: Any) -> Array:
        """Return each class' probability under the fitted model."""
        scores = self.decision_function(X)
        if len(self.classes_) == 1:
            return np.ones((len(scores), 1))
        if scores.ndim == 1:
            scores = np.column_stack([np.zeros_like(scores), scores])
        return np.asarray(special.softmax(scores, axis=1))

    def _loss(self, n_classes: int) -> Loss:
        return Logistic() if n_classes <= 2 else Softmax(n_classes)

    def _train(self, task: LinearTask, plan: LinearPlan, source: Source) -> None:
        task = _capped(task, self, source)
        _set_coefficients(self, train_linear(task, plan, source))


class PrivateLinearSVC(_LinearClassifier, PrivateLearner[LinearTask, LinearPlan]):
    """Fit a linear support-vector classifier with a Huber-smoothed hinge under differential privacy.

    Parameters are those of `PrivateLogisticRegression`, and ``huber``, the half-width of the parabola that replaces
    the hinge's corner. More than two classes are trained one against the rest, each at its equal share of the
    budget.

    Privacy
    -------
    As `PrivateLogisticRegression`; proofs in docs/guarantees/objective.md, output.md, closing.md.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        huber: float = 0.5,
        delta: float = 0.0,
        mechanism: str = "objective",
        regularization: float = 1e-2,
        data_norm: float = 1.0,
        fit_intercept: bool = True,
        classes: ArrayLike | None = None,
        neighbours: str = "replace-one",
        public_size: int | None = None,
        unit: str = "record",
        records_per_person: int | None = None,
        calibration: str = "tight",
        random_state: Any = None,
        noise: Noise | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.huber = huber
        self.delta = delta
        self.mechanism = mechanism
        self.regularization = regularization
        self.data_norm = data_norm
        self.fit_intercept = fit_intercept
        self.classes = classes
        self.neighbours = neighbours
        self.public_size = public_size
        self.unit = unit
        self.records_per_person = records_per_person
        self.calibration = calibration
        self.random_state = random_state
        self.noise = noise

    def _loss(self, n_classes: int) -> Loss:
        self._require("huber", isinstance(self.huber, int | float) and 0 < self.huber <= 1, "a number in (0, 1]")
        return HuberHinge(self.huber)

    def _train(self, task: LinearTask, plan: LinearPlan, source: Source) -> None:
        task = _capped(task, self, source)
        if task.n_problems == 1:
            _set_coefficients(self, train_linear(task, plan, source))
        else:
            parts = [train_linear(task.against_rest(code), plan, source) for code in range(task.n_problems)]
            _set_coefficients(self, np.stack(parts))


class PrivateRidge(_Linear, RegressorMixin, PrivateLearner[LinearTask, LinearPlan]):  # type: ignore[misc]
    """Fit a ridge regression, robust beyond residuals of a declared size, under differential privacy.

    Parameters are those of `PrivateLogisticRegression` without ``classes``, and:

    label_bound
        Declared bound on the absolute label; labels beyond are clipped to it.
    huber
        Residuals larger than ``huber * label_bound`` count linearly. A squared loss has an unbounded gradient, which
        no finite noise can hide; this one is bounded by construction.

    Privacy
    -------
    As `PrivateLogisticRegression`; proofs in docs/guarantees/objective.md, output.md, closing.md.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        label_bound: float = 1.0,
        huber: float = 1.0,
        delta: float = 0.0,
        mechanism: str = "objective",
        regularization: float = 1e-2,
        data_norm: float = 1.0,
        fit_intercept: bool = True,
        neighbours: str = "replace-one",
        public_size: int | None = None,
        unit: str = "record",
        records_per_person: int | None = None,
        calibration: str = "tight",
        random_state: Any = None,
        noise: Noise | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.label_bound = label_bound
        self.huber = huber
        self.delta = delta
        self.mechanism = mechanism
        self.regularization = regularization
        self.data_norm = data_norm
        self.fit_intercept = fit_intercept
        self.neighbours = neighbours
        self.public_size = public_size
        self.unit = unit
        self.records_per_person = records_per_person
        self.calibration = calibration
        self.random_state = random_state
        self.noise = noise

    def fit(
        self,
        X: Any,
        y: ArrayLike | None = None,
        *,
        persons: ArrayLike | None = None,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> Self:
        """Train; arguments as in `PrivateLogisticRegression.fit`."""
        _check_settings(self)
        for name in ("label_bound", "huber"):
            value = getattr(self, name)
            self._require(name, is_positive(value), "a finite number > 0")
        if hasattr(X, "chunks"):
            _check_chunked(self)
            self.n_features_in_ = X.n_features
            labels, ids, n_records = np.zeros(0), None, int(X.n_records)
        else:
            X, labels = _checked(self, X, y, y_numeric=True)
            n_records, ids = X.shape[0], _persons(self, persons, X.shape[0])
        task = _task(self, X, labels, ids, n_records, Huber(self.huber, 1.0), self._scaled)
        return self._fit(task, [], ledger, dataset, key)

    def predict(self, X: Any) -> Array:
        """Return the predicted label of each row."""
        return _linear_output(self, X).ravel()

    def _scaled(self, labels: Array) -> Array:
        return np.clip(np.asarray(labels, dtype=np.float64) / self.label_bound, -1.0, 1.0)

    def _train(self, task: LinearTask, plan: LinearPlan, source: Source) -> None:
        task = _capped(task, self, source)
        _set_coefficients(self, self.label_bound * train_linear(task, plan, source))
        self.coef_, self.intercept_ = self.coef_.ravel(), self.intercept_[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # Rows beyond data_norm and labels beyond label_bound are clipped, so undeclared scales fit poorly.
        tags.regressor_tags.poor_score = True
        return tags

    def _state(self) -> dict[str, Array]:
        return {"coef": self.coef_, "intercept": np.atleast_1d(self.intercept_)}

    def _restore(self, state: dict[str, Array]) -> None:
        self.coef_, self.intercept_ = state["coef"], state["intercept"][0]
