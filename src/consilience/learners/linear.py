"""Private linear learners: logistic regression, support-vector classifier, ridge regression.

All three minimise a sum of losses over records scaled into the unit ball (`ball.py`), plus a ridge,
and differ only in the loss. What users pass is checked in `inputs.py`; the noise is planned and
drawn in `perturbation.py`.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from consilience.errors import ContributionRejected, GuaranteeVoid, SettingsError
from consilience.learners.axes import Axes, Projection
from consilience.learners.ball import (
    Ball,
    intercept_to_user,
    into_ball,
    label_bound,
    out_of_ball,
    scale_to_user,
)
from consilience.learners.base import (
    Choices,
    PrivateLearner,
    Rows,
    State,
    StateCheck,
    is_count,
    is_positive,
)
from consilience.learners.encoded import (
    EncodedChunks,
    EncodedPartitions,
    Encoding,
    LabelCodes,
    LabelScale,
)
from consilience.learners.erm import Huber, HuberHinge, Logistic, Loss, Softmax
from consilience.learners.gradient import GradientPlan, automatic_ridge
from consilience.learners.implied import ROUNDING, Bound, Implied
from consilience.learners.inputs import (
    READ_LABELS,
    Chunked,
    as_chunks,
    check_persons,
    chunk_classes,
    count_records,
    declared_classes,
    read_classes,
    validate_records,
    validate_table,
    warn_of_far_values,
    warn_of_long_rows,
)
from consilience.learners.perturbation import (
    MOST_RECORDS,
    LinearPlan,
    LinearTask,
    mechanism_of,
    plan_linear,
    public_size,
)
from consilience.learners.projection import MomentPlan, MomentTask, coordinates
from consilience.privacy.accounting import Event, total
from consilience.privacy.guarantee import Unit
from consilience.privacy.mechanisms import Noise, Source
from consilience.tables.groups import cap_records

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

Array: TypeAlias = NDArray[Any]

_THESIS = (
    "The thesis' matrix perturbation (Xie 2016, eq. 6.1) was asked for. It has no guarantee at "
    "any delta < 1: with two records (x, +1) and (x, -1) the gradient at 0 vanishes, so the "
    "answer is 0 whatever matrix was drawn; replace the second record by (x', -1) with another "
    "x' and the answer is almost surely not 0. Nothing was trained. Use mechanism='matrix' with "
    "calibration='tight', which adds the linear noise that makes it private."
)
_NO_THESIS = (
    "calibration='thesis' names the thesis' matrix perturbation and applies to "
    "mechanism='matrix' only. Nothing was trained. Use calibration='tight'."
)
MECHANISMS = ("auto", "objective", "output", "generalized", "matrix", "gradient")
MOST_DRAWN_AGAIN = 1 << 10  # columns of a random matrix that is checked: a second's work at most
UNSEEDED = 64.0  # the factor by which an unknown random matrix may move a convexity or a length
# What the batch in `simulation/together.py` does in its own way, for models and their scores.
_TRAINING = (
    *("fit", "make_task", "loss", "_fit", "_plan", "_train", "_dimension"),
    *("_task_in_memory", "_task_in_chunks", "_cap_persons", "check_settings"),
    *("restore_state", "_scores", "decision_function", "predict", "_answers", "_solve"),
)


def best_class(classes: Array, scores: Array) -> Array:
    """Return the class with the highest score, of two the second where its margin is positive."""
    codes = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
    return np.asarray(classes[np.minimum(codes, len(classes) - 1)])


def class_chances(classes: Array, scores: Array) -> Array:
    """Return class probabilities: the logistic or softmax function of scores."""
    if len(classes) == 1:
        return np.ones((len(scores), 1))
    if scores.ndim == 1:
        return np.column_stack([special.expit(-scores), special.expit(scores)])
    return np.asarray(special.softmax(scores, axis=1))


@dataclass(frozen=True)
class ProjectedPlan:
    """What finding axes draws, and then a training behind them."""

    axes: MomentPlan
    behind: LinearPlan | GradientPlan
    dimension: int  # behind the axes, the constant included

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn."""
        return [*self.axes.events, *self.behind.events]

    def longest_release(self, learner: LinearLearner, task: LinearTask) -> float:
        """Return a length that coefficients exceed as rarely as without axes, which lengthen none.

        Axes are at most 1 long.
        """
        behind = replace(task, dimension=self.dimension)
        return self.behind.longest_release(learner.behind_axes(), behind)


def _along(task: LinearTask, axes: Axes, dimension: int) -> LinearTask:
    """Return the task with its records projected."""
    if task.records is None:
        return replace(task, dimension=dimension, X=axes.project(task.X))
    records = replace(cast(EncodedChunks, task.records), axes=axes, n_features=dimension)
    return replace(task, dimension=dimension, records=records)


@dataclass(eq=False, repr=False, kw_only=True)
class LinearLearner(PrivateLearner[LinearTask, LinearPlan | GradientPlan | ProjectedPlan]):
    """What the linear learners share: settings, tasks and released coefficients."""

    is_linear: ClassVar[bool] = True
    state_check: ClassVar[StateCheck] = "shapes"  # any finite coefficients are possible
    first_settings: ClassVar[Mapping[str, Any]] = {
        "mechanism": "objective",
        "regularization": 1e-2,
        "intercept_scaling": 1.0,
    }
    # The ridge bounds how far a record moves an exact minimum, and so the noise that hides it.
    trusted_settings: ClassVar[Mapping[str, Any]] = {
        "regularization": 1e-2,
        "intercept_scaling": 1.0,
    }

    epsilon: float
    delta: float = 0.0
    mechanism: str = "auto"
    regularization: float | str = "auto"
    data_norm: float = 1.0
    fit_intercept: bool = True
    intercept_scaling: float = 0.3
    neighbours: str = "replace-one"
    public_size: int | None = None
    unit: str = "record"
    records_per_person: int | None = None
    calibration: str = "tight"
    random_state: Any = None
    schema: Schema | None = None
    projection: Projection | None = None
    noise: Noise | None = None

    coef_: Array = field(init=False)
    intercept_: Array = field(init=False)
    n_features_in_: int = field(init=False)
    public_size_: int = field(init=False)

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides, the bound on the norm of a row among them."""
        return {**super().declared_by(schema), "data_norm": schema.norm}

    def describe_state(self, schema: Schema) -> str:
        """Say how many coefficients leave a site."""
        n_classes = 1 if schema.classes is None else len(schema.classes)
        rows = 1 if n_classes <= 2 else n_classes
        return f"{rows * (schema.n_features + 1):,} coefficients of a linear model"

    def describe_size(self) -> str:
        """Say which number of records or persons a file states."""
        if self.may_state(Unit(self.unit)):
            return super().describe_size()
        return f"the declared number of {self.unit}s ({self.public_size:,}); the true one is hidden"

    def choices(self, n_features: int, size: int | None) -> Choices:
        """Return mechanism, steps and ridge, where settings leave them to public facts."""
        if self.projection is not None:
            return self.behind_axes().choices(self.projection.n_components, size)
        found: dict[str, int | float | str] = {}
        if size is None or self.unchecked() is not None:
            return found
        learner = copy.copy(self)
        learner.n_features_in_ = n_features
        plan = plan_linear(self, learner._public_task(size, self._n_classes))
        if self.mechanism == "auto" and math.isfinite(self.epsilon):  # exact: none is used
            found["mechanism"] = mechanism_of(self)
        if isinstance(plan, GradientPlan):
            found["steps"] = plan.event.steps
        if isinstance(self.regularization, str):
            found["regularization"] = plan.regularization / size
        return found

    def sizes_of_choices(self, size: int | None) -> Sequence[int | None]:
        """Return the public number of units: the declared one where the true one is hidden."""
        hidden = not self.may_state(Unit(self.unit))
        return super().sizes_of_choices(self.public_size if hidden else size)

    def can_train_together(self) -> bool:
        """Tell whether exact models of many sites can be trained in one batch.

        A subclass that trains or predicts in its own way cannot: the batch would pass it over.
        """
        cls = type(self)
        known = next(base for base in cls.__mro__ if base.__module__ == __name__)
        alike = all(getattr(cls, name, None) is getattr(known, name, None) for name in _TRAINING)
        declared = getattr(self, "classes", ()) is not None
        plain = self.mechanism != "matrix" and self.projection is None
        return alike and plain and self.unit == "record" and declared

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        self._check_privacy(MECHANISMS)
        self._check_random_state()
        fits = self.projection is None or isinstance(self.projection, Projection)
        self._require("projection", fits, "None or a projection, such as OwnAxes")
        size = self.public_size
        fits = size is None or is_count(size, MOST_RECORDS)
        self._require("public_size", fits, f"None or a whole number from 1 to {MOST_RECORDS:,}")
        automatic = isinstance(self.regularization, str) and self.regularization == "auto"
        fits = automatic or is_positive(self.regularization)
        self._require("regularization", fits, "'auto' or a finite number > 0")
        self._require_moderate("data_norm", *(() if automatic else ("regularization",)))
        scaling = self.intercept_scaling
        fits = is_positive(scaling) and 1e-3 <= scaling <= 1e3
        self._require("intercept_scaling", fits, "a number from 0.001 to 1000")
        if self.mechanism == "gradient" and not self.delta and math.isfinite(self.epsilon):
            raise SettingsError(
                "mechanism='gradient' adds Gaussian noise, which needs delta > 0. Nothing was "
                "trained. Set delta (say 1e-6), or use mechanism='objective'."
            )
        if self.neighbours == "add-remove" and not is_count(self.public_size):
            raise SettingsError(
                f"{type(self).__name__} with neighbours='add-remove' hides how many records there "
                "are, so the regularisation cannot be scaled by their number. Nothing was "
                "trained. Declare public_size=..., a public guess of it (an integer >= 1); it "
                "need not be right."
            )
        self._require(
            "calibration",
            self.calibration in ("tight", "chaudhuri2011", "thesis"),
            "'tight', 'chaudhuri2011' or 'thesis'",
        )
        if self.calibration == "thesis":
            raise GuaranteeVoid(_THESIS if self.mechanism == "matrix" else _NO_THESIS)

    @abstractmethod
    def loss(self, n_classes: int) -> Loss:
        """Return the loss of one record; a regressor's does not depend on the classes."""

    def _task_in_memory(
        self, X: Rows, labels: Array, persons: Array | None, loss: Loss, encode: Encoding
    ) -> LinearTask:
        warn_of_long_rows(self, X, float(self.data_norm))
        return LinearTask(
            loss,
            self._dimension,
            n_records=X.shape[0],
            n_units=X.shape[0] if persons is None else len(np.unique(persons)),
            X=into_ball(X, self),
            y=encode(labels),
            persons=persons,
        )

    def _task_in_chunks(self, source: Chunked, loss: Loss, encode: Encoding) -> LinearTask:
        n_records, dimension = count_records(self, source, encode), self._dimension
        kind = EncodedPartitions if hasattr(source, "gather") else EncodedChunks
        ball = Ball.of(self)
        records = kind(source, ball, encode, dimension, n_records)
        return LinearTask(loss, dimension, n_records, n_records, records=records)

    @property
    def _n_classes(self) -> int:
        known = getattr(self, "classes_", getattr(self, "classes", None))
        return 0 if known is None else len(known)

    @property
    def _dimension(self) -> int:
        return int(self.n_features_in_) + bool(self.fit_intercept)

    def _cap_persons(self, task: LinearTask, source: Source) -> LinearTask:
        """Drop, at random, what a person holds beyond the declared cap."""
        if task.persons is None:
            return task
        cap = int(self.records_per_person or 1)
        keep = cap_records(task.persons, cap, source.uniform(task.n_records))
        return replace(task, X=task.X[keep], y=task.y[keep], n_records=int(keep.sum()))

    def _scores(self, X: Rows) -> Array:
        check_is_fitted(self)
        X = validate_table(self, X, reset=False)
        return np.asarray(X @ self.coef_.T + self.intercept_)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        n_classes = len(getattr(self, "classes_", ()))
        rows = () if n_classes == 0 else (1,) if n_classes <= 2 else (n_classes,)
        return {"coef": (*rows, self.n_features_in_), "intercept": rows or (1,)}

    def implied(self, shapes: Mapping[str, Sequence[int]]) -> Implied:
        """Return the noise that was planned, and a bound on the length of the coefficients.

        A minimum of mean loss and ridge is at most Lipschitz constant over ridge long, and noise
        makes it longer by a known length. A random matrix that is large, or without a declared
        seed, is not drawn again; it moves events and length by a limited factor.
        """
        self.check_settings()
        if not is_count(getattr(self, "public_size_", None)):
            raise ContributionRejected("size")
        task = self._public_task(int(self.public_size_), len(getattr(self, "classes_", ())))
        n_problems = task.n_problems
        unknown = self.unchecked() is not None
        learner = copy.copy(self).set_params(mechanism="objective") if unknown else self
        plan, factor = learner._plan_training(task), UNSEEDED if unknown else 1.0
        longest = plan.longest_release(learner, task) * math.sqrt(n_problems) * factor
        lengths = {
            "coef": longest * scale_to_user(self),
            "intercept": longest * intercept_to_user(self),
        }
        bounds = {name: Bound(shape, norm=lengths[name]) for name, shape in self._shapes.items()}
        return Implied(plan.events, bounds, slack=factor if unknown else ROUNDING)

    def unchecked(self) -> str | None:
        """Return why the random matrix of such a fit cannot be drawn again, if it cannot."""
        if self.projection is not None:
            return self.behind_axes().unchecked()
        if self.mechanism != "matrix":
            return None
        if not isinstance(self.random_state, int | np.integer):
            return "mechanism='matrix' needs a random_state, so that others can draw the matrix too"
        if self._dimension > MOST_DRAWN_AGAIN:
            return f"mechanism='matrix' is for at most {MOST_DRAWN_AGAIN:,} columns"
        return None

    def planned(self, size: int) -> Sequence[Event]:
        """Return what a fit on so many records or persons draws, by public facts alone."""
        self.check_settings()
        return self._plan_training(self._public_task(size, self._n_classes)).events

    def _public_task(self, size: int, n_classes: int) -> LinearTask:
        """Return the task as a plan needs it: without records."""
        loss = self.loss(n_classes)
        n_problems = n_classes if n_classes > 2 and loss.n_outputs == 1 else 1
        return LinearTask(loss, self._dimension, size, size, n_problems)

    def cost(self, size: int | None) -> float:
        """Return the epsilon that is asked for; less where the noise is a paper's.

        The papers' constants are safe, and our own accounting of their noise is lower, by an amount
        that depends on the ridge and so on the number of records.
        """
        papers = self.mechanism == "generalized" or self.calibration == "chaudhuri2011"
        if not papers or size is None or math.isinf(self.epsilon):
            return super().cost(size)
        task = self._public_task(size, len(getattr(self, "classes", None) or ()))
        return total(self._plan_training(task).events).epsilon

    def check_state(self, state: State) -> bool:
        """Tell whether coefficients and intercepts have the shapes that this learner gives them."""
        shapes = self._shapes
        return set(state) == set(shapes) and all(
            state[name].shape == shape and state[name].dtype == np.float64
            for name, shape in shapes.items()
        )

    @property
    def regularization_(self) -> float:
        """Λ as it was used, raised where the noise asked for it; of noisy gradients the largest.

        It follows from settings and public facts, and so anyone can compute it again.
        """
        check_is_fitted(self, "coef_")
        if self.projection is not None:
            return self.behind_axes().regularization_
        task = self._public_task(self.public_size_, len(getattr(self, "classes_", ())))
        return plan_linear(self, task).regularization / self.public_size_

    def strength(self, n_records: int, dimension: int) -> float:
        """Return Λ of exact training on so many records, of so many columns with the constant."""
        if isinstance(self.regularization, str):
            return automatic_ridge(dimension) / max(n_records, 1)
        return float(self.regularization)

    def behind_axes(self) -> Self:
        """Return the learner that is trained on rows along the axes, with what is left to it."""
        projection = self.projection
        if projection is None:
            return self
        behind = copy.copy(self)
        behind.projection, behind.n_features_in_ = None, projection.n_components
        behind.epsilon, behind.delta = projection.left(self.epsilon, self.delta)
        return behind

    @property
    def noisy_columns(self) -> int:
        """How many coefficients of each class have noise of their own, without the intercept."""
        return int(self.behind_axes().n_features_in_)

    def model_events(self) -> tuple[Event, ...]:
        """Return what was drawn for the coefficients, and not for the axes."""
        n_axes = 0 if self.projection is None else len(self.projection.plan(self).events)
        return super().model_events()[n_axes:]

    def _plan(self, task: LinearTask) -> LinearPlan | GradientPlan | ProjectedPlan:
        return self._plan_training(task)

    def _plan_training(self, task: LinearTask) -> LinearPlan | GradientPlan | ProjectedPlan:
        if self.projection is None:
            return plan_linear(self, task)
        axes, behind = self.projection.plan(self), self.behind_axes()
        dimension = behind._dimension
        plan = plan_linear(behind, replace(task, dimension=dimension))
        return ProjectedPlan(axes, plan, dimension)

    def _train(
        self, task: LinearTask, plan: LinearPlan | GradientPlan | ProjectedPlan, source: Source
    ) -> None:
        if not isinstance(plan, ProjectedPlan):
            self._solve(self._cap_persons(task, source), plan, source)
            return
        assert self.projection is not None
        records = MomentTask(task.X if task.records is None else task.records, task.persons)
        axes, behind = self.projection.find(self, records, plan.axes, source), self.behind_axes()
        along = self._cap_persons(_along(task, axes, plan.dimension), source)
        behind._solve(along, plan.behind, source)
        self.coef_, self.intercept_ = axes.lift(behind.coef_), behind.intercept_

    @abstractmethod
    def _solve(self, task: LinearTask, plan: LinearPlan | GradientPlan, source: Source) -> None:
        """Draw what was planned for records, train on them, and set the coefficients."""

    def released_state(self) -> dict[str, Array]:
        """Return the released arrays."""
        return {"coef": self.coef_, "intercept": self.intercept_}

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        self.coef_, self.intercept_ = state["coef"], state["intercept"]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = math.isfinite(self.epsilon) and self.noise is None
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class LinearClassifier(ClassifierMixin, LinearLearner):  # type: ignore[misc]
    """What the two linear classifiers share."""

    untunable: ClassVar[str | None] = None

    classes: ArrayLike | None = None
    classes_: Array = field(init=False)

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[LinearTask, list[str]]:
        """Check settings and data; return the task and the guarantee's assumptions."""
        self.check_settings()
        classes = declared_classes(self)
        assumptions: list[str] = []
        source = as_chunks(X, y)
        if source is not None:
            classes, held = chunk_classes(self, source, persons)
        else:
            X, labels = validate_records(self, X, y)
            ids = check_persons(self, persons, X.shape[0])
            # Declared classes say what a label may be: what else could be said of labels would
            # depend on the records.
            if classes is None:
                classes = read_classes(labels)
                assumptions.append(READ_LABELS)
            held = classes
        loss = self.loss(len(classes))
        two = len(classes) <= 2
        encode = LabelCodes(type(self).__name__, held, 1 if two else None)
        if source is not None:
            task = self._task_in_chunks(source, loss, encode)
        else:
            task = self._task_in_memory(X, labels, ids, loss, encode)
        if not two and loss.n_outputs == 1:
            task = replace(task, n_problems=len(classes))
        self.classes_, self.public_size_ = classes, public_size(self, task)
        return task, assumptions

    def decision_function(self, X: Rows) -> Array:
        """Return the margin of the second of two classes, or one score for each of more classes."""
        scores = self._scores(X)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Rows) -> Array:
        """Return the class with the highest score for each row."""
        scores = self.decision_function(X)  # first: it raises if nothing was fitted
        return best_class(self.classes_, scores)

    def predict_apart(self, X: Rows) -> Array:
        """Return the class of each row, which depends on that row alone, bit for bit."""
        check_is_fitted(self)
        scores = coordinates(validate_table(self, X, reset=False), self.coef_) + self.intercept_
        return best_class(self.classes_, scores.ravel() if scores.shape[1] == 1 else scores)

    def _answers(self, scores: Array) -> tuple[Array, Array | None]:
        """Return the classes that follow from scores, and their probabilities where known."""
        chances = class_chances(self.classes_, scores) if hasattr(self, "predict_proba") else None
        return best_class(self.classes_, scores), chances


def _against_rest(task: LinearTask, code: int) -> LinearTask:
    """Return the two-class problem of one class against all others."""
    if task.records is None:
        return replace(task, y=np.where(task.y == code, 1.0, -1.0))
    records = cast(EncodedChunks, task.records)
    encode = replace(cast(LabelCodes, records.encode), positive=code)
    return replace(task, records=replace(records, encode=encode))


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateLogisticRegression(LinearClassifier):
    """Fit a logistic regression (softmax for more than two classes) under differential privacy.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact training that promises nothing.
    mechanism
        ``"gradient"`` follows noisy gradients, which needs a positive delta and then does best;
        ``"objective"`` perturbs the objective; ``"auto"`` (default) is the first where it can be
        and otherwise the second. ``"output"`` perturbs the minimum, ``"generalized"`` is Kifer's
        objective perturbation, ``"matrix"`` the provable form of the thesis' matrix perturbation.
    regularization
        Λ of ``mean(loss) + Λ/2 ‖f‖²``, in coordinates where rows have norm <= 1. ``"auto"``
        (default) chooses it from public facts alone: budget, number of records, dimension and loss;
        ``regularization_`` says what it chose.
    data_norm
        Declared bound on the norm of a row. Longer rows are scaled down to it.
    fit_intercept, intercept_scaling
        Whether there is an intercept, and the length of its constant feature where rows have norm
        <= 1. A short one leaves more of the unit ball to the records, so that less noise is heard;
        the ridge then pulls more at the intercept.
    classes
        The declared labels. Without it they are read from `y`, and the guarantee says so.
    neighbours, public_size
        ``"replace-one"``: the number of records is public. ``"add-remove"``: it is not, and
        `public_size` declares a public guess that scales the regularisation.
    unit, records_per_person
        ``"person"`` hides all of a person's records, of which at most `records_per_person` are
        used.
    calibration
        ``"tight"``, or ``"chaudhuri2011"`` for the paper's own noise.
    random_state
        Public randomness only (the matrix of ``mechanism="matrix"``); keeps the guarantee.
    schema
        A `Schema` by which tables are encoded in `fit` and `predict`, which then take a frame, a
        path or anything else that `Schema.encode` takes. It decides `data_norm`, `classes`, `unit`
        and `records_per_person`.
    projection
        `PublicAxes`, `MomentAxes` or `OwnAxes`: rows are projected on these axes before training,
        and coefficients are mapped back into the columns. Axes of the records themselves are part
        of the charge.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the fitted attributes. Not hidden: the number of features, the classes, and under
    replace-one the number of units. Proofs: docs/guarantees/objective.md, output.md, closing.md.

    Examples
    --------
    >>> from consilience import Numeric, Schema
    >>> schema = Schema([Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> learner = PrivateLogisticRegression(epsilon=1.0, schema=schema).fit(table)
    >>> learner.guarantee_
    Guarantee(epsilon=1, delta=0, per record, replace-one)
    >>> learner.predict({"age": [10, 90]}).tolist()
    ['no', 'yes']
    """

    shorthand = "logistic"
    has_known_noise = True

    def predict_proba(self, X: Rows) -> Array:
        """Return each class' probability under the fitted model."""
        scores = self.decision_function(X)  # first: it says if nothing was fitted
        return class_chances(self.classes_, scores)

    def loss(self, n_classes: int) -> Loss:
        """Return the loss of one record."""
        return Logistic() if n_classes <= 2 else Softmax(n_classes)

    def _solve(self, task: LinearTask, plan: LinearPlan | GradientPlan, source: Source) -> None:
        self.coef_, self.intercept_ = out_of_ball(plan.release(task, source), self)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateLinearSVC(LinearClassifier):
    """Fit a linear support-vector classifier (Huber-smoothed hinge) under differential privacy.

    Parameters are those of `PrivateLogisticRegression`, and:

    huber
        The half-width of the parabola that replaces the hinge's corner.

    More than two classes are trained one against the rest, each at its equal share of the budget.

    Notes
    -----
    **Privacy.** As `PrivateLogisticRegression`; proofs in docs/guarantees/objective.md, output.md,
    closing.md.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> learner = cs.PrivateLinearSVC(epsilon=1.0, schema=schema).fit(table)
    >>> learner.predict({"age": [10, 90]}).tolist()
    ['no', 'yes']
    """

    shorthand = "svm"
    has_known_noise = True
    first_settings: ClassVar[Mapping[str, Any]] = {
        **LinearLearner.first_settings,
        "huber": 0.5,
    }
    trusted_settings: ClassVar[Mapping[str, Any]] = {
        **LinearLearner.trusted_settings,
        "huber": 0.5,
    }
    huber: float = 1.0

    def loss(self, n_classes: int) -> Loss:
        """Return the loss of one record."""
        self._require(
            "huber",
            isinstance(self.huber, int | float) and 0 < self.huber <= 1,
            "a number in (0, 1]",
        )
        return HuberHinge(self.huber)

    def _solve(self, task: LinearTask, plan: LinearPlan | GradientPlan, source: Source) -> None:
        if task.n_problems == 1:
            self.coef_, self.intercept_ = out_of_ball(plan.release(task, source), self)
        else:
            parts = [
                plan.release(_against_rest(task, code), source) for code in range(task.n_problems)
            ]
            self.coef_, self.intercept_ = out_of_ball(np.stack(parts), self)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateRidge(RegressorMixin, LinearLearner):  # type: ignore[misc]
    """Fit a ridge regression, robust to large residuals, under differential privacy.

    Parameters are those of `PrivateLogisticRegression` without ``classes``, and:

    label_bound
        Declared bound on the absolute label, from domain knowledge; labels beyond are clipped to
        it. It has no default: a bound that is too large drowns the labels in noise, and one that is
        too small clips them to nothing.
    huber
        Residuals larger than ``huber * label_bound`` count linearly. A squared loss has an
        unbounded gradient, which no finite noise can hide; this one is bounded by construction.

    Notes
    -----
    **Privacy.** As `PrivateLogisticRegression`; proofs in docs/guarantees/objective.md, output.md,
    closing.md.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "days", label_bound=60)
    >>> table = {"age": [15, 35, 65, 85] * 500, "days": [1, 3, 9, 20] * 500}
    >>> learner = cs.PrivateRidge(epsilon=1.0, schema=schema).fit(table)
    >>> young, old = learner.predict({"age": [10, 90]})
    >>> bool(young < old)
    True
    """

    shorthand = "ridge"
    predicts_number = True
    first_settings: ClassVar[Mapping[str, Any]] = {
        **LinearLearner.first_settings,
        "huber": 1.0,
    }
    trusted_settings: ClassVar[Mapping[str, Any]] = {
        **LinearLearner.trusted_settings,
        "huber": 1.0,
    }
    label_bound: float | None = None
    huber: float = 0.25

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides, the bound on labels among them."""
        return {**super().declared_by(schema), "label_bound": schema.label_bound}

    def check_settings(self) -> None:
        """Refuse settings that cannot work, the lack of a bound among them."""
        super().check_settings()
        if self.label_bound is None:
            raise SettingsError(
                f"{type(self).__name__} needs a bound on the absolute label, beyond which labels "
                "are clipped. Nothing was trained or charged. Declare label_bound=... from domain "
                "knowledge, or a Schema that has it; the largest label found belongs to somebody."
            )
        self._require_moderate("label_bound", "huber")

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[LinearTask, list[str]]:
        """Check settings and data; return the task, which assumes nothing."""
        self.check_settings()
        encode = LabelScale(type(self).__name__, label_bound(self))
        source = as_chunks(X, y)
        if source is not None:
            chunk_classes(self, source, persons)
            task = self._task_in_chunks(source, self.loss(1), encode)
        else:
            X, labels = validate_records(self, X, y, y_numeric=True)
            bound = label_bound(self)
            what = f"labels are beyond label_bound={bound:g}"
            warn_of_far_values(self, labels, -bound, bound, what)
            ids = check_persons(self, persons, X.shape[0])
            task = self._task_in_memory(X, labels, ids, self.loss(1), encode)
        self.public_size_ = public_size(self, task)
        return task, []

    def predict(self, X: Rows) -> Array:
        """Return the predicted label of each row."""
        return self._scores(X).ravel()

    def loss(self, n_classes: int) -> Loss:
        """Return the loss of one record."""
        return Huber(self.huber, 1.0)

    def _solve(self, task: LinearTask, plan: LinearPlan | GradientPlan, source: Source) -> None:
        self.coef_, self.intercept_ = out_of_ball(
            label_bound(self) * plan.release(task, source), self
        )
        self.coef_, self.intercept_ = self.coef_.ravel(), self.intercept_[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # Rows beyond data_norm and labels beyond label_bound are clipped, so undeclared scales fit
        # poorly.
        tags.regressor_tags.poor_score = True
        return tags

    def released_state(self) -> dict[str, Array]:
        """Return the released arrays."""
        return {"coef": self.coef_, "intercept": np.atleast_1d(self.intercept_)}

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        self.coef_, self.intercept_ = state["coef"], state["intercept"][0]
