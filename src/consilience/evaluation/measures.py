"""How well a model does on public test records: every measure, its direction, its interval.

A `Metric` says what it is called, which way is better, how it is computed, and what each record
contributes to it. Simulations, plans, releases, certificates, the dashboard and the demo all take
their measures from here.

The test records must be public: nothing hides them, and each number may depend on a single one.
A number computed from private test records would be a release that no ledger was charged for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from sklearn.base import BaseEstimator, is_regressor
from sklearn.utils.multiclass import type_of_target

from consilience.errors import SchemaMismatch, SettingsError, shielded
from consilience.evaluation import intervals
from consilience.evaluation.intervals import Bootstrap, Measure
from consilience.privacy.mechanisms import Noise

Array = NDArray[Any]
Number = TypeVar("Number", float, NDArray[Any])
Answers: TypeAlias = Any  # _Classified or _Predicted: a metric is asked of its own kind only

SMALLEST_PROBABILITY = 1e-15  # smaller ones count as this, so that a log-loss is finite
BINS = 10  # of confidence, for calibration


class Predictor(Protocol):
    """A fitted model of any kind: it can at least predict."""

    def predict(self, X: Any, /) -> Any:
        """Return a label or a number for each record."""


# ------------------------------------------------------------------------------------ the measures


@dataclass(frozen=True)
class Interval:
    """How intervals are computed: their level, and the bootstrap and bins of those that need it."""

    level: float
    bootstrap: Bootstrap
    bins: int


@dataclass(frozen=True)
class Metric:
    """One measure of a model. This base is a mean over records, given by `parts`.

    Attributes
    ----------
    name
        Its name in rows, files and tables.
    title, how
        What people call it, and how it is computed.
    higher_is_better, percent
        Which way is better, and whether it is a share of records, shown in percent.
    """

    name: str
    title: str
    how: str
    higher_is_better: bool = False
    percent: bool = False

    @property
    def option(self) -> str:
        """Its name as it is typed on the command line."""
        return self.name.replace("_", "-")

    def parts(self, answers: Answers) -> Array | None:
        """Return one number per record whose mean is the measure; None if there is none."""
        return None

    def value(self, answers: Answers) -> float | None:
        """Return the measure; None where the model does not say enough for it."""
        parts = self.parts(answers)
        return None if parts is None else float(parts.mean())

    def measure(self, answers: Answers, how: Interval) -> Measure | None:
        """Return the measure with its interval."""
        parts = self.parts(answers)
        return None if parts is None else intervals.mean(parts, how.level)

    def gain(self, other: Number, joined: Number) -> Number:
        """Return by how much `joined` is better: positive is better, whatever the direction."""
        better, worse = (joined, other) if self.higher_is_better else (other, joined)
        difference: Number = better - worse
        return difference

    def show(self, value: float) -> str:
        """Return a value as it is written in a sentence."""
        return f"{value:.1%}" if self.percent else f"{value:.4g}"

    def show_gain(self, low: float, high: float) -> str:
        """Return the ends of a gain's interval as they are written in a sentence."""
        if self.percent:
            return f"{100 * low:+.1f} to {100 * high:+.1f} percentage points"
        return f"{low:+.3f} to {high:+.3f}"


class _Error(Metric):
    def parts(self, answers: _Classified) -> Array | None:
        return answers.wrong

    def measure(self, answers: _Classified, how: Interval) -> Measure:
        return intervals.proportion(int(answers.wrong.sum()), len(answers.wrong), how.level)


class _Auc(Metric):
    def parts(self, answers: _Classified) -> Array | None:
        return None if answers.scores is None else auc_parts(answers.scores, answers.codes)

    def value(self, answers: _Classified) -> float | None:
        present = np.flatnonzero(np.bincount(answers.codes))
        if answers.scores is None or len(present) < 2:
            return None
        return _auc(answers.scores, answers.codes, present)

    def measure(self, answers: _Classified, how: Interval) -> Measure | None:
        parts = self.parts(answers)
        return None if parts is None else intervals.auc(parts, answers.codes, how.level)


class _LogLoss(Metric):
    def parts(self, answers: _Classified) -> Array | None:
        return None if answers.chances is None else answers.log_losses


class _Calibration(Metric):
    def value(self, answers: _Classified) -> float | None:
        if answers.chances is None:
            return None
        counts, sums = _reliability(answers, BINS)
        return float(_calibration_gap(counts, sums)(counts[None])[0])

    def measure(self, answers: _Classified, how: Interval) -> Measure | None:
        if answers.chances is None:
            return None
        counts, sums = _reliability(answers, how.bins)
        gap = _calibration_gap(counts, sums)
        return how.bootstrap.interval(counts, gap, how.level, pivotal=True)


class _F1(Metric):
    def value(self, answers: _Classified) -> float | None:
        score = f1_scores(answers.n_classes).get(self.name)
        return None if score is None else float(score(answers.confusion[None])[0])

    def measure(self, answers: _Classified, how: Interval) -> Measure | None:
        score = f1_scores(answers.n_classes).get(self.name)
        if score is None:
            return None
        return how.bootstrap.interval(answers.confusion, score, how.level)


class _Rmse(Metric):
    def parts(self, answers: _Predicted) -> Array | None:
        # How the root of the mean moves with each record, to first order.
        rmse = math.sqrt(float(answers.squares.mean()))
        return answers.squares if not rmse else rmse + (answers.squares - rmse**2) / (2 * rmse)

    def measure(self, answers: _Predicted, how: Interval) -> Measure:
        mean = intervals.mean(answers.squares, how.level)
        return Measure(*(math.sqrt(max(end, 0.0)) for end in (mean.value, mean.low, mean.high)))


class _Mae(Metric):
    def parts(self, answers: _Predicted) -> Array | None:
        return np.asarray(np.abs(answers.labels - answers.predicted))


class _R2(Metric):
    def parts(self, answers: _Predicted) -> Array | None:
        spread = np.square(answers.labels - answers.labels.mean())
        if not (whole := float(spread.mean())) > 0:
            return None
        ratio = float(answers.squares.mean()) / whole
        # The ratio of two means moves with each record by (its square - ratio * its spread) / the
        # mean spread.
        return np.asarray(1 - ratio - (answers.squares - ratio * spread) / whole)


ERROR = _Error(
    "error", "error", "the share of records whose class is predicted wrongly", False, True
)
AUC = _Auc(
    "auc",
    "AUC",
    "how often a record of a class scores higher than a record of another class; of more than two "
    "classes, the mean over all that occur, each against the rest",
    True,
)
LOG_LOSS = _LogLoss(
    "log_loss", "log-loss", "the mean of -log of the probability that was given to the true class"
)
CALIBRATION = _Calibration(
    "calibration",
    "calibration error",
    "the mean gap between the probability of the predicted class and how often it is right, in ten "
    "bins of equal width",
)
RMSE = _Rmse("rmse", "RMSE", "the root of the mean squared error")
MAE = _Mae("mae", "MAE", "the mean absolute error")
R2 = _R2("r2", "R²", "the share of the labels' variance that is explained", True)
_OF_CLASSES: tuple[Metric, ...] = (
    ERROR,
    _F1("f1", "F1", "the F1 score of the second of two classes", True),
    _F1("f1_micro", "micro F1", "the share of records whose class is predicted rightly", True),
    _F1("f1_macro", "macro F1", "the mean of the classes' F1 scores", True),
    AUC,
    LOG_LOSS,
    CALIBRATION,
)
_OF_NUMBERS: tuple[Metric, ...] = (RMSE, MAE, R2)
METRICS: Mapping[str, Metric] = {one.name: one for one in (*_OF_CLASSES, *_OF_NUMBERS)}
# What reports, releases and pages state, in this order.
STATED = (ERROR, AUC, LOG_LOSS, CALIBRATION, RMSE, R2)
# What models may be judged by. Not the calibration: the share of a class, given to every record,
# has none and says nothing. Not F1, which is no mean over records that could be compared in pairs.
DECIDING = (ERROR, AUC, LOG_LOSS, RMSE, MAE, R2)


def find_metric(name: str, *, numeric: bool) -> Metric:
    """Return the measure of this name, written with - or _, by which such models may be judged."""
    fitting = [one for one in DECIDING if (one in _OF_NUMBERS) == numeric]
    for metric in fitting:
        if name in (metric.name, metric.option):
            return metric
    kind = "numbers" if numeric else "classes"
    raise SettingsError(
        f"Models that predict {kind} are compared by one of "
        f"{', '.join(one.option for one in fitting)}. Got {name!r} as 'metric' instead. Nothing "
        "was trained."
    )


# -------------------------------------------------------------------------------- measuring a model


@dataclass(frozen=True)
class Bin:
    """Records predicted with about the same confidence, and how often they were right."""

    n_records: int
    confidence: float
    accuracy: Measure


@dataclass(frozen=True)
class Evaluation:
    """How well one model did.

    ``measures`` holds what the model allows: with scores also "auc", with probabilities also
    "log_loss" and "calibration", with two classes also "f1".
    """

    measures: Mapping[str, Measure]
    n_records: int
    level: float
    reliability: tuple[Bin, ...] = ()
    answers: Answers = field(default=None, repr=False, compare=False)

    def __getitem__(self, name: str) -> Measure:
        return self.measures[name]

    @property
    def main(self) -> Measure:
        """The error, or for a regressor the root mean squared error."""
        return self.measures[main_metric(self.measures)]

    @property
    def losses(self) -> Array:
        """One value per test record: whether it was wrong, or its squared error."""
        losses: Array = self.answers.losses
        return losses

    def parts(self, metric: Metric) -> Array | None:
        """Return one value per test record, with the measure as their mean, if there are such."""
        return metric.parts(self.answers) if metric.name in self.measures else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "measures": {name: asdict(measure) for name, measure in self.measures.items()},
            "n_records": self.n_records,
            "level": self.level,
            "reliability": [asdict(b) for b in self.reliability],
        }

    def __str__(self) -> str:
        lines = [f"{'':<18}{'value':>9}{f'{self.level:.0%} interval':>21}"]
        lines += [
            f"{METRICS[name].title:<18}{m.value:>9.4f}{m.low:>12.4f} {m.high:.4f}"
            for name, m in self.measures.items()
        ]
        return "\n".join([*lines, f"on {self.n_records:,} public test records"])


def main_metric(found: Mapping[str, Any]) -> str:
    """Return the name of what models are compared by unless asked otherwise: "error" or "rmse"."""
    return ERROR.name if ERROR.name in found else RMSE.name


@shielded
def evaluate(
    model: Predictor,
    X: object,
    y: ArrayLike,
    *,
    task: str | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    bins: int = BINS,
    seed: int = 0,
) -> Evaluation:
    """Measure a fitted classifier or regressor on public test records.

    Classifiers need ``predict``; with ``decision_function`` or ``predict_proba`` there is more to
    measure. Intervals: exact binomial (Clopper-Pearson) for the error and each reliability bin;
    DeLong's variance on the logit scale for the AUC, also when each class is compared with the
    rest and the classes are averaged; bootstrap for F1 and calibration (the latter corrected for
    its upward bias, so it may lie below the value); normal for means.

    Parameters
    ----------
    task
        ``"classification"`` or ``"regression"``; read off the model unless given.
    resamples, seed
        Of the bootstrap. The seed is public, so an evaluation repeats.
    bins
        Number of equally wide bins of confidence for reliability and calibration (expected
        calibration error).

    Privacy
    -------
    None for the test records, which must be public. Costs the training records nothing: it is
    post-processing.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> model = cs.PrivateLogisticRegression(epsilon=5.0, classes=[0, 1]).fit(X[200:], y[200:])
    >>> found = cs.evaluate(model, X[:200], y[:200])  # public test records
    >>> bool(found["error"].low <= found["error"].value <= found["error"].high)
    True
    """
    _require("level", level, isinstance(level, float) and 0 < level < 1, "a number in (0, 1)")
    for name, value in (("resamples", resamples), ("bins", bins)):
        _require(
            name, value, isinstance(value, int | np.integer) and value > 0, "a whole number > 0"
        )
    answers = _read_answers(model, X, y, task)
    how = Interval(level, Bootstrap(resamples, Noise(seed=seed).open()), bins)
    found = {metric.name: metric.measure(answers, how) for metric in answers.metrics}
    return Evaluation(
        {name: measure for name, measure in found.items() if measure is not None},
        len(answers.losses),
        level,
        answers.reliability(bins, level),
        answers,
    )


def measures(
    model: Predictor, X: object, y: ArrayLike, *, task: str | None = None
) -> dict[str, float]:
    """Return the values of `evaluate` without intervals, for many models."""
    answers = _read_answers(model, X, y, task)
    found = {metric.name: metric.value(answers) for metric in answers.metrics}
    return {name: value for name, value in found.items() if value is not None}


def f1_scores(n_classes: int) -> dict[str, Callable[[Array], Array]]:
    """Return the F1 scores as functions of many confusion matrices (table, true, predicted).

    Of two classes, the second is the one looked for.
    """

    def by_class(cells: Array) -> Array:
        right = np.diagonal(cells, axis1=1, axis2=2)
        total = cells.sum(axis=1) + cells.sum(axis=2)
        return np.asarray(2 * right / np.maximum(total, 1))

    def macro(cells: Array) -> Array:  # over the classes that occur, as in scikit-learn
        occur = (cells.sum(axis=1) + cells.sum(axis=2)) > 0
        return np.asarray(by_class(cells).sum(axis=1) / np.maximum(occur.sum(axis=1), 1))

    def micro(cells: Array) -> Array:
        return np.asarray(np.trace(cells, axis1=1, axis2=2) / cells.sum(axis=(1, 2)))

    both: dict[str, Callable[[Array], Array]] = {"f1_micro": micro, "f1_macro": macro}
    return {"f1": lambda cells: by_class(cells)[:, 1], **both} if n_classes == 2 else both


# ------------------------------------------------------------------------- what a model answers


@dataclass(frozen=True)
class _Classified:
    """A classifier's answers. Codes are positions among all labels of the model or the test."""

    codes: Array
    predicted: Array
    scores: Array | None  # (n,) of the second of two classes, or (n, K)
    chances: Array | None  # (n, K)
    n_classes: int

    metrics = _OF_CLASSES

    @property
    def wrong(self) -> Array:
        return np.asarray(self.codes != self.predicted)

    losses = wrong

    @property
    def confusion(self) -> Array:
        """Counts by (true class, predicted class)."""
        cells = np.bincount(
            self.codes * self.n_classes + self.predicted, minlength=self.n_classes**2
        )
        return cells.reshape(self.n_classes, self.n_classes)

    @property
    def log_losses(self) -> Array:
        assert self.chances is not None
        own = self.chances[np.arange(len(self.codes)), self.codes]
        return np.asarray(-np.log(np.clip(own, SMALLEST_PROBABILITY, 1)))

    def reliability(self, bins: int, level: float) -> tuple[Bin, ...]:
        """Return the bins that hold records."""
        if self.chances is None:
            return ()
        counts, sums = _reliability(self, bins)
        return tuple(
            Bin(int(n), float(s / n), intervals.proportion(int(right), int(n), level))
            for n, s, right in zip(counts.sum(axis=1), sums.sum(axis=1), counts[:, 1], strict=True)
            if n
        )


@dataclass(frozen=True)
class _Predicted:
    """A regressor's answers."""

    labels: Array
    predicted: Array
    metrics = _OF_NUMBERS

    @property
    def squares(self) -> Array:
        return np.asarray(np.square(self.labels - self.predicted))

    losses = squares

    def reliability(self, bins: int, level: float) -> tuple[Bin, ...]:
        """Return nothing: numbers are predicted without a confidence."""
        return ()


def _read_answers(
    model: Predictor, X: object, y: ArrayLike, task: str | None
) -> _Classified | _Predicted:
    """Return what a model answered."""
    labels, predicted, given_chances, given_scores = np.asarray(y), *_ask(model, X)
    if labels.ndim != 1 or labels.shape != predicted.shape or not len(labels):
        raise SchemaMismatch(
            "The test table needs at least one record and one label per record. Nothing was "
            "evaluated. Check the shapes of X and y."
        )
    if _task(model, labels, task) == "regression":
        return _Predicted(labels.astype(np.float64), predicted.astype(np.float64))
    known = np.asarray(getattr(model, "classes_", predicted))
    every = np.unique(known)
    for seen in (labels, predicted):
        every = every if np.isin(seen, every).all() else np.union1d(every, seen)

    def columns(given: ArrayLike) -> Array | None:
        values = np.asarray(given, dtype=np.float64)
        if values.ndim == 1:  # the margin of the second of two classes
            return values if len(every) == 2 and len(known) == 2 else None
        out = np.full((len(values), len(every)), -np.inf)
        out[:, np.searchsorted(every, known)] = values
        return out

    chances = None if given_chances is None else columns(given_chances)
    if chances is not None:
        chances = np.maximum(chances, 0.0)  # a class that the model does not know has no chance
    scores = chances if given_scores is None else columns(given_scores)
    if scores is not None and scores.ndim == 2 and len(every) == 2:
        scores = scores[:, 1]
    codes, answered = (np.searchsorted(every, seen) for seen in (labels, predicted))
    return _Classified(codes, answered, scores, chances, len(every))


def _ask(model: Predictor, X: object) -> tuple[Array, ArrayLike | None, ArrayLike | None]:
    """Return predictions, probabilities and scores, the latter two None where there are none.

    A linear model of this project computes its scores once and derives the rest from them.
    """
    if hasattr(model, "_answers"):
        scores = model.decision_function(X)  # type: ignore[attr-defined]
        return (*model._answers(scores), scores)
    methods = (getattr(model, name, None) for name in ("predict_proba", "decision_function"))
    chances, scores = (None if method is None else method(X) for method in methods)
    return np.asarray(model.predict(X)), chances, scores


def _task(model: Predictor, labels: Array, task: str | None) -> str:
    _require(
        "task",
        task,
        task in (None, "classification", "regression"),
        "'classification', 'regression' or None",
    )
    if task is not None:
        return task
    if hasattr(model, "classes_"):
        return "regression" if np.ndim(model.classes_) == 0 else "classification"
    by_labels = type_of_target(labels).startswith("continuous")
    by_model = isinstance(model, BaseEstimator) and is_regressor(model)
    return "regression" if by_labels or by_model else "classification"


# ------------------------------------------------------------------------- calibration and AUC


def _reliability(answers: _Classified, bins: int) -> tuple[Array, Array]:
    """Return counts of records, and sums of their confidences, by (bin, wrong or right)."""
    assert answers.chances is not None
    confidence = answers.chances.max(axis=1)
    cell = 2 * np.minimum((confidence * bins).astype(int), bins - 1) + ~answers.wrong
    counts = np.bincount(cell, minlength=2 * bins)
    return counts.reshape(bins, 2), np.bincount(cell, confidence, 2 * bins).reshape(bins, 2)


def _calibration_gap(counts: Array, sums: Array) -> Callable[[Array], Array]:
    """Return the mean gap between confidence and accuracy, as a function of tables of counts.

    The confidence of a cell is taken from the given table; only the counts are drawn again.
    """
    confidence = sums / np.maximum(counts, 1)

    def gap(tables: Array) -> Array:
        by_bin = np.abs((tables * confidence).sum(axis=2) - tables[:, :, 1])
        return np.asarray(by_bin.sum(axis=1) / tables.sum(axis=(1, 2)))

    return gap


def _auc(scores: Array, codes: Array, present: Array) -> float:
    """Return the AUC without an interval: count the pairs in order, in sorted arrays."""
    tasks = [(1, scores)] if scores.ndim == 1 else [(k, scores[:, k]) for k in present]
    values = []
    for k, column in tasks:
        inside, outside = np.sort(column[codes == k]), np.sort(column[codes != k])
        below = sum(  # counts every pair twice, so that a tie counts half
            int(np.searchsorted(outside, inside, side).sum()) for side in ("left", "right")
        )
        values.append(below / (2 * len(inside) * len(outside)))
    return float(np.mean(values))


def auc_parts(scores: Array, codes: Array) -> Array | None:
    """Return each record's part in the AUC, with the AUC as their mean within every class.

    None if only one class occurs. Of more than two classes, each that occurs is compared with the
    rest, and the results are averaged.
    """
    present = np.unique(codes)
    if len(present) < 2:
        return None
    parts = np.zeros(len(codes))
    tasks = [(1, scores)] if scores.ndim == 1 else [(k, scores[:, k]) for k in present]
    for k, column in tasks:
        inside = codes == k
        ranks = stats.rankdata(column)
        value = 0.0
        # A rank among all less the rank among one's own class: DeLong's structural components,
        # weighted so that the variance of their mean is his.
        for own in (inside, ~inside):
            better = (ranks[own] - stats.rankdata(column[own])) / (~own).sum()
            better = better if own is inside else 1 - better
            value = float(better.mean())
            parts[own] += (better - value) * (len(codes) / own.sum()) / len(tasks)
        parts += value / len(tasks)
    return parts


def _require(name: str, value: object, fits: bool, must: str) -> None:
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of evaluate must be {must}. Got {value!r} instead."
        )
