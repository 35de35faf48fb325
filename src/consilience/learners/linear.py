"""Private linear learners: logistic regression, support-vector classifier, ridge regression.

All three minimise a sum of losses over records scaled into the unit ball, plus a ridge, and differ
only in the loss. This file checks what users hand over and brings it into the unit ball; the noise
is `perturbation.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse, special
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from consilience.errors import GuaranteeVoid, SchemaMismatch, SettingsError
from consilience.learners.base import PrivateLearner, State, StateCheck, is_positive
from consilience.learners.erm import (
    Chunks,
    Huber,
    HuberHinge,
    Logistic,
    Loss,
    Softmax,
    block_records,
)
from consilience.learners.partitions import DaskRows, is_dask
from consilience.learners.perturbation import (
    LinearPlan,
    LinearTask,
    plan_linear,
    public_size,
    train_linear,
)
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source, clip_rows
from consilience.tables.groups import cap_records

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

Array = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class _Ball:
    """How records come into the unit ball: all that `into_ball` asks of a learner, and that a worker may be sent."""

    data_norm: float
    fit_intercept: bool


@dataclass(frozen=True, eq=False)
class _Coding:
    """Turn labels into places among the classes, or with `positive` into signs: +1 for that place."""

    owner: str
    classes: Array
    positive: int | None

    def __call__(self, labels: Array) -> Array:
        codes = np.asarray(labels)
        if not (
            self._places
            and codes.dtype == np.int64
            and codes.view(np.uint64).max(initial=0) < len(self.classes)
        ):
            codes = _codes(self.owner, self.classes, codes)
        return codes if self.positive is None else 2.0 * (codes == self.positive) - 1.0

    @cached_property
    def _places(self) -> bool:
        """Whether labels are places already, as those of chunks are."""
        return bool(np.array_equal(self.classes, np.arange(len(self.classes))))


@dataclass(frozen=True)
class _Scaling:
    """Turn numbers into labels within ±1."""

    owner: str
    label_bound: float

    def __call__(self, labels: Array) -> Array:
        values = np.asarray(labels, dtype=np.float64)
        if not np.isfinite(values).all():
            raise SchemaMismatch(
                f"{self.owner} found a label that is no finite number. Nothing was trained. "
                "Remove such records first."
            )
        return np.clip(values / self.label_bound, -1.0, 1.0)


@dataclass(frozen=True)
class _Mapped:
    """Chunked records seen through the learner's scaling."""

    source: Any
    ball: _Ball
    encode: _Coding | _Scaling
    n_features: int
    n_records: int

    def chunks(self) -> Chunks:
        return _mapped(self.ball, self.encode, self.source.chunks())


class _MappedPartitions(_Mapped):
    """The same where the records lie: only scaling and function travel."""

    def gather(self, function: Callable[[Chunks], T], every: int = 1) -> list[T]:
        found: list[T] = self.source.gather(
            partial(_apply_mapped, self.ball, self.encode, function), every
        )
        return found


def _mapped(ball: _Ball, encode: _Coding | _Scaling, chunks: Chunks) -> Chunks:
    """Yield records as the solver takes them, block by block; a block may be overwritten by the next one."""
    room = np.empty((0, 0))
    for X, y in chunks:
        width = X.shape[1] + ball.fit_intercept
        length = max(len(y), 1) if sparse.issparse(X) else block_records(width)
        if room.shape[1] != width and not sparse.issparse(X):
            by_feature = X.strides[0] < X.strides[1]
            room = np.empty((width, length)).T if by_feature else np.empty((length, width))
        for start in range(0, len(y), length):
            part = slice(start, start + length)
            yield into_ball(X[part].astype(np.float64, copy=False), ball, room), encode(y[part])


def _apply_mapped(ball: _Ball, encode: Any, function: Callable[[Chunks], T], chunks: Chunks) -> T:
    return function(_mapped(ball, encode, chunks))


def in_chunks(X: Any, y: Any) -> Any:
    """Return the source of chunks that `X` is or, being Dask's, holds; None for a table in memory."""
    if is_dask(X):
        return DaskRows(X, y)
    return X if callable(getattr(X, "chunks", None)) else None


def surveyed(learner: Any, source: Any, encode: Callable[[Array], Array]) -> int:
    """Read all chunks once and count their records, so that bad ones are refused before anything is charged."""
    survey = partial(_survey, type(learner).__name__, source.n_features, encode)
    counts = source.gather(survey) if hasattr(source, "gather") else [survey(source.chunks())]
    check_count(learner, source, sum(counts))
    return sum(counts)


def check_count(learner: Any, source: Any, n_records: int) -> None:
    """Refuse a source that holds other than it says."""
    if source.n_records is not None and source.n_records != n_records:
        raise SchemaMismatch(
            f"{type(learner).__name__} was given chunks that hold other than the declared number "
            "of records. Nothing was trained or charged. Mend the source's n_records."
        )
    if n_records == 0 and learner.neighbours == "replace-one":
        raise SchemaMismatch(
            f"{type(learner).__name__} was given chunks without a record. Nothing was trained or "
            "charged. Check them."
        )


def _survey(owner: str, n_features: int, encode: Callable[[Array], Array], chunks: Chunks) -> int:
    n_records = 0
    for X, y in chunks:
        check_chunk(owner, n_features, X, y)
        encode(y)
        n_records += len(y)
    return n_records


def check_chunk(owner: str, n_features: int, X: Any, y: Any, *, finite: bool = True) -> None:
    """Refuse a chunk that cannot be trained on; without `finite` values may be missing, but not infinite."""
    values = X.data if sparse.issparse(X) else X
    if X.shape != (len(y), n_features) or values.dtype.kind not in "fiub":
        problem = "is no table of numbers with one label for each record"
    elif not (np.isfinite(values) if finite else ~np.isinf(values)).all():
        problem = "has a value that is missing or infinite"
    else:
        return
    raise SchemaMismatch(
        f"{owner} was given a chunk that {problem}. Nothing was trained or charged. Mend the "
        "source; a Schema says what missing values become."
    )


def _against_rest(task: LinearTask, code: int) -> LinearTask:
    """Return the two-class problem of one class against all others."""
    if task.records is None:
        return replace(task, y=np.where(task.y == code, 1.0, -1.0))
    records = cast(_Mapped, task.records)
    return replace(
        task, records=replace(records, encode=replace(cast(_Coding, records.encode), positive=code))
    )


def into_ball(X: Any, learner: Any, room: Array | None = None) -> Any:
    """Scale by the declared norm, clip, append the constant column: rows of norm <= 1, always.

    The intercept is a feature like any other, jointly normalised and regularised: without strong
    convexity in every coordinate there is no privacy. The result may lie in `room`, which has as
    many columns as it.
    """
    X = clip_rows(X, learner.data_norm)
    if learner.data_norm != 1.0:
        X = clip_rows(X * (1.0 / learner.data_norm), 1.0)
    if not learner.fit_intercept:
        return X
    half = math.sqrt(0.5) * (1 - 2**-50)
    if sparse.issparse(X):
        return sparse.hstack(
            [X * half, sparse.csr_array(np.full((X.shape[0], 1), half))], format="csr"
        )
    out = np.empty((X.shape[0], X.shape[1] + 1)) if room is None else room[: X.shape[0]]
    np.multiply(X, half, out=out[:, :-1])
    out[:, -1] = half
    return out


def validated(learner: Any, X: Any, y: Any = "no_validation", **settings: Any) -> Any:
    """Validate as scikit-learn does, but never repeat a record's value in an error."""
    try:
        return validate_data(
            learner, X, y, **{"accept_sparse": "csr", "dtype": np.float64, **settings}
        )
    except ValueError as error:
        if "could not convert" not in str(error) and "invalid literal" not in str(error):
            raise
    raise SchemaMismatch(
        f"{type(learner).__name__} was given a table with text where it needs numbers. Nothing "
        "was computed. Encode the table with Schema.encode, which turns declared categories into "
        "columns."
    )


def checked(learner: Any, X: Any, y: Any, **settings: Any) -> tuple[Any, Array]:
    """Validate records to train on; under add-remove even that there are none is about records, so none will do."""
    empty = learner.neighbours == "add-remove" and getattr(learner, "classes", ()) is not None
    X, y = validated(learner, X, y, ensure_min_samples=0 if empty else 1, **settings)
    return X, np.asarray(y)


def person_ids(learner: Any, persons: ArrayLike | None, n_records: int) -> Array | None:
    """Check one id per record where persons are the unit, and none where records are."""
    if learner.unit == "record":
        if persons is not None:
            raise SettingsError(
                f"{type(learner).__name__} was given persons, but hides single records "
                "(unit='record'). Nothing was trained. Set unit='person' and records_per_person, "
                "or drop persons."
            )
        return None
    if persons is None:
        raise SettingsError(
            f"{type(learner).__name__} with unit='person' needs to know whose each record is. "
            "Nothing was trained. Pass persons=..., one id per record."
        )
    ids = np.asarray(persons)
    if ids.shape != (n_records,):
        raise SchemaMismatch(
            "'persons' must hold one id per record. Nothing was trained. Check its length."
        )
    return ids


def check_settings(learner: Any) -> None:
    """Refuse settings that cannot work, before any record is looked at."""
    learner._check_privacy(("objective", "output", "generalized", "matrix"))
    need = learner._require
    for name in ("regularization", "data_norm"):
        value = getattr(learner, name)
        need(name, is_positive(value), "a finite number > 0")
    need("unit", learner.unit in ("record", "person"), "'record' or 'person'")
    cap = learner.records_per_person
    if learner.unit == "person":
        need(
            "records_per_person",
            isinstance(cap, int | np.integer) and cap >= 1,
            "an integer >= 1 with unit='person'",
        )
    size = learner.public_size
    if learner.neighbours == "add-remove" and not (
        isinstance(size, int | np.integer) and size >= 1
    ):
        raise SettingsError(
            f"{type(learner).__name__} with neighbours='add-remove' hides how many records there "
            "are, so the regularisation cannot be scaled by their number. Nothing was trained. "
            "Declare public_size=..., a public guess of it (an integer >= 1); it need not be "
            "right."
        )
    need(
        "calibration",
        learner.calibration in ("tight", "chaudhuri2011", "thesis"),
        "'tight', 'chaudhuri2011' or 'thesis'",
    )
    if learner.calibration == "thesis":
        raise GuaranteeVoid(_THESIS if learner.mechanism == "matrix" else _NO_THESIS)


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


def _capped(task: LinearTask, learner: Any, source: Source) -> LinearTask:
    """Drop, at random, what a person holds beyond the declared cap."""
    if task.persons is None:
        return task
    keep = cap_records(
        task.persons, int(learner.records_per_person), source.uniform(task.n_records)
    )
    return replace(task, X=task.X[keep], y=task.y[keep], n_records=int(keep.sum()))


def out_of_ball(parts: Array, learner: Any) -> tuple[Array, Array]:
    """Return coefficients and intercepts in the user's coordinates from vectors in those of `into_ball`."""
    parts = np.atleast_2d(parts)
    if not learner.fit_intercept:
        return parts / learner.data_norm, np.zeros(len(parts))
    half = math.sqrt(0.5)
    return parts[:, :-1] * (half / learner.data_norm), parts[:, -1] * half


def _linear_output(learner: Any, X: Any) -> Array:
    check_is_fitted(learner)
    X = validated(learner, X, reset=False)
    return np.asarray(X @ learner.coef_.T + learner.intercept_)


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


READ_LABELS = "the set of labels is public: it was read from the training labels"


def declared_classes(learner: Any) -> Array | None:
    """Return the declared labels in their order, or None where they are to be read from the training labels."""
    if learner.classes is None:
        return None
    classes = np.asarray(learner.classes)
    if classes.ndim != 1 or len(np.unique(classes)) < max(2, len(classes)):
        raise SettingsError(
            f"The 'classes' parameter of {type(learner).__name__} must list at least two "
            f"different labels. Got {learner.classes!r} instead."
        )
    return classes


def label_codes(learner: Any, classes: Array, values: Array) -> Array:
    """Return each label's place among the classes."""
    return _codes(type(learner).__name__, classes, values)


def _codes(owner: str, classes: Array, values: Array) -> Array:
    order = np.argsort(classes, kind="stable")
    codes = order[np.minimum(np.searchsorted(classes, values, sorter=order), len(classes) - 1)]
    if not np.array_equal(classes[codes], values):
        raise SchemaMismatch(
            f"{owner} found a label that is not among its declared classes. Nothing was trained. "
            "Add it to 'classes', or remove such records before training."
        )
    return np.asarray(codes)


def classification_task(
    learner: Any, X: Any, y: Any, persons: Any
) -> tuple[LinearTask, list[str], Array]:
    """Check a classifier's settings and data; return its task, assumptions and class list."""
    check_settings(learner)
    classes = declared_classes(learner)
    assumptions: list[str] = []
    source = in_chunks(X, y)
    if source is not None:
        classes, held = check_chunked(learner, source)
    else:
        X, labels = checked(learner, X, y)
        if labels.size:
            check_classification_targets(labels)
        ids = person_ids(learner, persons, X.shape[0])
        if classes is None:
            classes = np.unique(labels)
            assumptions.append(READ_LABELS)
        held = classes
    loss: Loss = learner._loss(len(classes))
    two = len(classes) <= 2
    encode = _Coding(type(learner).__name__, held, 1 if two else None)
    if source is not None:
        task = _chunked_task(learner, source, loss, encode)
    else:
        task = _task(learner, X, labels, ids, loss, encode)
    if not two and loss.n_outputs == 1:
        task = replace(task, n_problems=len(classes))
    return task, assumptions, classes


def check_chunked(learner: Any, source: Any) -> tuple[Array, Array]:
    """Refuse what a table in chunks cannot tell or cannot do; return the classes, and what chunks hold for each."""
    names, classes = getattr(source, "names", None), getattr(learner, "classes", ())
    learner.n_features_in_ = source.n_features
    if (
        names is not None
        and learner.unit == "record"
        and (classes is None or list(classes) == list(names))
    ):
        return np.asarray(names), np.arange(len(names))
    if classes is None or names is not None or learner.unit == "person":
        raise SettingsError(
            f"{type(learner).__name__} was given a table in chunks, which needs declared classes "
            "and unit='record'. Nothing was trained. Pass the classes of the table; persons can "
            "be capped only in one that fits in memory."
        )
    return np.asarray(classes), np.asarray(classes)


def _task(
    learner: Any, X: Any, labels: Array, persons: Array | None, loss: Loss, encode: Any
) -> LinearTask:
    return LinearTask(
        records=None,
        X=into_ball(X, learner),
        y=encode(labels),
        persons=persons,
        loss=loss,
        dimension=_dimension(learner),
        n_records=X.shape[0],
        n_units=X.shape[0] if persons is None else len(np.unique(persons)),
    )


def _chunked_task(learner: Any, source: Any, loss: Loss, encode: Any) -> LinearTask:
    n_records, dimension = surveyed(learner, source, encode), _dimension(learner)
    kind = _MappedPartitions if hasattr(source, "gather") else _Mapped
    ball = _Ball(float(learner.data_norm), bool(learner.fit_intercept))
    return LinearTask(
        records=kind(source, ball, encode, dimension, n_records),
        X=None,
        y=np.zeros(0),
        persons=None,
        loss=loss,
        dimension=dimension,
        n_records=n_records,
        n_units=n_records,
    )


def _dimension(learner: Any) -> int:
    return int(learner.n_features_in_) + bool(learner.fit_intercept)


class _Linear:
    """What the linear learners share beside the fit template."""

    is_linear: ClassVar[bool] = True
    predicts_number: ClassVar[bool] = False
    state_check: ClassVar[StateCheck] = "shapes"  # any finite coefficients are possible
    coef_: Array
    intercept_: Array
    n_features_in_: int

    @classmethod
    def for_schema(cls, schema: Schema, **settings: Any) -> Self:
        """Return an unfitted learner for tables of `schema`, which bounds the norm of a row."""
        return super().for_schema(schema, data_norm=schema.norm, **settings)  # type: ignore[misc,no-any-return]

    @classmethod
    def describe_state(cls, schema: Schema) -> str:
        """Say how many coefficients leave a site."""
        n_classes = 1 if schema.classes is None else len(schema.classes)
        rows = 1 if n_classes <= 2 else n_classes
        return f"{rows * (schema.n_features + 1):,} coefficients of a linear model"

    def can_train_together(self) -> bool:
        """Tell whether exact models of many sites can be trained in one batch."""
        declared = self.predicts_number or self.classes is not None  # type: ignore[attr-defined]
        return self.mechanism != "matrix" and self.unit == "record" and declared  # type: ignore[attr-defined]

    def check_state(self, state: State) -> bool:
        """Tell whether coefficients and intercepts have the shapes that this learner gives them."""
        n_classes = len(getattr(self, "classes_", ()))
        rows = () if n_classes == 0 else (1,) if n_classes <= 2 else (n_classes,)
        shapes = {"coef": (*rows, self.n_features_in_), "intercept": rows or (1,)}
        return set(state) == set(shapes) and all(
            state[name].shape == shape and state[name].dtype == np.float64
            for name, shape in shapes.items()
        )

    def _plan(self, task: LinearTask) -> LinearPlan:
        return plan_linear(self, task)

    def released_state(self) -> dict[str, Array]:
        """Return the released arrays."""
        return {"coef": self.coef_, "intercept": self.intercept_}

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        self.coef_, self.intercept_ = state["coef"], state["intercept"]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.sparse = True
        tags.non_deterministic = math.isfinite(self.epsilon) and self.noise is None  # type: ignore[attr-defined]
        return tags


class _LinearClassifier(_Linear, ClassifierMixin):  # type: ignore[misc]
    """What the two linear classifiers share."""

    classes_: Array
    public_size_: int

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

        `X` may be dense, sparse, a data frame, Dask's with `y` Dask's too, or a table in chunks
        that brings its own labels (`ParquetRows`, `DaskRows`): then every record is read once, and
        refused if need be, before the charge.
        """
        task, assumptions, self.classes_ = classification_task(self, X, y, persons)
        self.public_size_ = public_size(self, task)
        return cast(Self, self._fit(task, assumptions, ledger, dataset, key))

    def decision_function(self, X: Any) -> Array:
        """Return the margin of the second class, or one score per class when there are more than two."""
        scores = _linear_output(self, X)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """Return the class with the highest score for each row."""
        scores = self.decision_function(X)  # first: it says if nothing was fitted
        return best_class(self.classes_, scores)

    def _answers(self, scores: Array) -> tuple[Array, Array | None]:
        """Return what follows from scores, for who needs all of it: classes, and chances where they are known."""
        chances = class_chances(self.classes_, scores) if hasattr(self, "predict_proba") else None
        return best_class(self.classes_, scores), chances


class PrivateLogisticRegression(_LinearClassifier, PrivateLearner[LinearTask, LinearPlan]):
    """Fit a regularised logistic regression, softmax for more than two classes, under differential privacy.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` exact training that promises nothing.
    mechanism
        ``"objective"`` perturbs the objective (default), ``"output"`` the minimum,
        ``"generalized"`` is Kifer's objective perturbation, ``"matrix"`` the provable form of the
        thesis' matrix perturbation.
    regularization
        Λ of ``mean(loss) + Λ/2 ‖f‖²``, in coordinates where rows have norm <= 1.
    data_norm
        Declared bound on the norm of a row. Longer rows are scaled down to it.
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
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Privacy
    -------
    ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone who sees the
    fitted attributes. Not hidden: the number of features, the classes, and under replace-one the
    number of units. Proofs: docs/guarantees/objective.md, output.md, closing.md.

    Examples
    --------
    >>> X = Noise(seed=0).open().uniform(6000).reshape(2000, 3) - 0.5
    >>> y = (X[:, 0] > 0).astype(int)
    >>> PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(X, y).guarantee_
    Guarantee(epsilon=1, delta=0, per record, replace-one)
    """

    shorthand = "logistic"
    has_known_noise = True

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
        scores = self.decision_function(X)  # first: it says if nothing was fitted
        return class_chances(self.classes_, scores)

    def _loss(self, n_classes: int) -> Loss:
        return Logistic() if n_classes <= 2 else Softmax(n_classes)

    def _train(self, task: LinearTask, plan: LinearPlan, source: Source) -> None:
        task = _capped(task, self, source)
        self.coef_, self.intercept_ = out_of_ball(train_linear(task, plan, source), self)


class PrivateLinearSVC(_LinearClassifier, PrivateLearner[LinearTask, LinearPlan]):
    """Fit a linear support-vector classifier with a Huber-smoothed hinge under differential privacy.

    Parameters are those of `PrivateLogisticRegression`, and ``huber``, the half-width of the
    parabola that replaces the hinge's corner. More than two classes are trained one against the
    rest, each at its equal share of the budget.

    Privacy
    -------
    As `PrivateLogisticRegression`; proofs in docs/guarantees/objective.md, output.md, closing.md.
    """

    shorthand = "svm"
    has_known_noise = True

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
        self._require(
            "huber",
            isinstance(self.huber, int | float) and 0 < self.huber <= 1,
            "a number in (0, 1]",
        )
        return HuberHinge(self.huber)

    def _train(self, task: LinearTask, plan: LinearPlan, source: Source) -> None:
        task = _capped(task, self, source)
        if task.n_problems == 1:
            self.coef_, self.intercept_ = out_of_ball(train_linear(task, plan, source), self)
        else:
            parts = [
                train_linear(_against_rest(task, code), plan, source)
                for code in range(task.n_problems)
            ]
            self.coef_, self.intercept_ = out_of_ball(np.stack(parts), self)


class PrivateRidge(_Linear, RegressorMixin, PrivateLearner[LinearTask, LinearPlan]):  # type: ignore[misc]
    """Fit a ridge regression, robust beyond residuals of a declared size, under differential privacy.

    Parameters are those of `PrivateLogisticRegression` without ``classes``, and:

    label_bound
        Declared bound on the absolute label; labels beyond are clipped to it.
    huber
        Residuals larger than ``huber * label_bound`` count linearly. A squared loss has an
        unbounded gradient, which no finite noise can hide; this one is bounded by construction.

    Privacy
    -------
    As `PrivateLogisticRegression`; proofs in docs/guarantees/objective.md, output.md, closing.md.
    """

    shorthand = "ridge"
    predicts_number = True

    @classmethod
    def for_schema(cls, schema: Schema, **settings: Any) -> Self:
        """Return an unfitted learner for tables of `schema`, which bounds rows and labels."""
        return super().for_schema(schema, label_bound=schema.label_bound, **settings)

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
        check_settings(self)
        for name in ("label_bound", "huber"):
            value = getattr(self, name)
            self._require(name, is_positive(value), "a finite number > 0")
        encode, source = _Scaling(type(self).__name__, float(self.label_bound)), in_chunks(X, y)
        if source is not None:
            check_chunked(self, source)
            task = _chunked_task(self, source, self._loss(1), encode)
        else:
            X, labels = checked(self, X, y, y_numeric=True)
            task = _task(
                self, X, labels, person_ids(self, persons, X.shape[0]), self._loss(1), encode
            )
        self.public_size_ = public_size(self, task)
        return self._fit(task, [], ledger, dataset, key)

    def predict(self, X: Any) -> Array:
        """Return the predicted label of each row."""
        return _linear_output(self, X).ravel()

    def _loss(self, n_classes: int) -> Loss:
        return Huber(self.huber, 1.0)

    def _train(self, task: LinearTask, plan: LinearPlan, source: Source) -> None:
        task = _capped(task, self, source)
        self.coef_, self.intercept_ = out_of_ball(
            self.label_bound * train_linear(task, plan, source), self
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
