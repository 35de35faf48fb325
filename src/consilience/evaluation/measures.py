"""How well a model does on public test records, with confidence intervals.

The test records must be public: nothing hides them, and each number may depend on a single one.
A number computed from private test records would be a release that no ledger was charged for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

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

SMALLEST_PROBABILITY = 1e-15  # smaller ones count as this, so that a log-loss is finite


class Predictor(Protocol):
    """A fitted model of any kind: it can at least predict."""

    def predict(self, X: Any, /) -> Any:
        """Return a label or a number for each record."""


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
    "log_loss" and "calibration", with two classes also "f1". ``losses`` has one value per test
    record: whether it was wrong, or its squared error.
    """

    measures: Mapping[str, Measure]
    n_records: int
    level: float
    reliability: tuple[Bin, ...] = ()
    losses: Array = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    def __getitem__(self, name: str) -> Measure:
        return self.measures[name]

    @property
    def main(self) -> Measure:
        """The error, or for a regressor the root mean squared error."""
        return self.measures[main_metric(self.measures)]

    @property
    def parts(self) -> Array:
        """One value per test record, with the main measure as their mean.

        Of a regressor, how the root of the mean moves with each record, to first order.
        """
        rmse = self.main.value
        if self.losses.dtype == bool or not rmse:
            return self.losses
        return np.asarray(rmse + (self.losses - rmse**2) / (2 * rmse))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "measures": {name: asdict(measure) for name, measure in self.measures.items()},
            "n_records": self.n_records,
            "level": self.level,
            "reliability": [asdict(b) for b in self.reliability],
        }

    def __str__(self) -> str:
        lines = [f"{'':<12}{'value':>9}{f'{self.level:.0%} interval':>21}"]
        lines += [
            f"{name:<12}{m.value:>9.4f}{m.low:>12.4f} {m.high:.4f}"
            for name, m in self.measures.items()
        ]
        return "\n".join([*lines, f"on {self.n_records:,} public test records"])


def main_metric(found: Mapping[str, Any]) -> str:
    """Return the name of the metric that models are compared by: "error", or "rmse"."""
    return "error" if "error" in found else "rmse"


@shielded
def evaluate(
    model: Predictor,
    X: object,
    y: ArrayLike,
    *,
    task: str | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    bins: int = 10,
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
    """
    _require("level", level, isinstance(level, float) and 0 < level < 1, "a number in (0, 1)")
    for name, value in (("resamples", resamples), ("bins", bins)):
        _require(
            name, value, isinstance(value, int | np.integer) and value > 0, "a whole number > 0"
        )
    answers = _read_answers(model, X, y, task)
    if not isinstance(answers, _Classified):
        return _evaluate_regression(*answers, level)
    found = {"error": intervals.proportion(int(answers.wrong.sum()), len(answers.wrong), level)}
    bootstrap = Bootstrap(resamples, Noise(seed=seed).open())
    for name, score in f1_scores(answers.n_classes).items():
        found[name] = bootstrap.interval(answers.confusion, score, level)
    if answers.scores is not None:
        parts = _auc_parts(answers.scores, answers.codes)
        if parts is not None:
            found["auc"] = intervals.auc(parts, answers.codes, level)
    reliability: tuple[Bin, ...] = ()
    if answers.chances is not None:
        found["log_loss"] = intervals.mean(answers.log_losses, level)
        counts, sums = _reliability(answers.chances.max(axis=1), answers.wrong, bins)
        gap = _calibration_gap(counts, sums)
        found["calibration"] = bootstrap.interval(counts, gap, level, pivotal=True)
        reliability = _list_bins(counts, sums, level)
    return Evaluation(found, len(answers.wrong), level, reliability, answers.wrong)


def measures(
    model: Predictor, X: object, y: ArrayLike, *, task: str | None = None
) -> dict[str, float]:
    """Return the values of `evaluate` without intervals and calibration, for many models."""
    answers = _read_answers(model, X, y, task)
    if not isinstance(answers, _Classified):
        found = _evaluate_regression(*answers, 0.95).measures
        return {name: measure.value for name, measure in found.items()}
    values = {"error": float(answers.wrong.mean())}
    values |= {
        name: float(score(answers.confusion[None])[0])
        for name, score in f1_scores(answers.n_classes).items()
    }
    if answers.scores is not None:
        present = np.flatnonzero(np.bincount(answers.codes))
        if len(present) > 1:
            values["auc"] = _auc(answers.scores, answers.codes, present)
    if answers.chances is not None:
        values["log_loss"] = float(answers.log_losses.mean())
    return values


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

    @property
    def wrong(self) -> Array:
        return np.asarray(self.codes != self.predicted)

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


def _read_answers(
    model: Predictor, X: object, y: ArrayLike, task: str | None
) -> _Classified | tuple[Array, Array]:
    """Return what a classifier answered, or a regressor's (labels, predictions)."""
    labels, predicted, given_chances, given_scores = np.asarray(y), *_ask(model, X)
    if labels.ndim != 1 or labels.shape != predicted.shape or not len(labels):
        raise SchemaMismatch(
            "The test table needs at least one record and one label per record. Nothing was "
            "evaluated. Check the shapes of X and y."
        )
    if _task(model, labels, task) == "regression":
        return labels.astype(np.float64), predicted.astype(np.float64)
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


def _evaluate_regression(labels: Array, predicted: Array, level: float) -> Evaluation:
    squares, spread = np.square(labels - predicted), np.square(labels - labels.mean())
    mean = intervals.mean(squares, level)
    ends = (mean.value, mean.low, mean.high)
    found = {
        "rmse": Measure(*(math.sqrt(max(end, 0.0)) for end in ends)),
        "mae": intervals.mean(np.abs(labels - predicted), level),
    }
    if (whole := float(spread.mean())) > 0:
        ratio = float(squares.mean()) / whole
        # The ratio of two means moves with each record by (its square - ratio * its spread) / the
        # mean spread.
        found["r2"] = intervals.mean(1 - ratio - (squares - ratio * spread) / whole, level)
    return Evaluation(found, len(labels), level, (), squares)


# ------------------------------------------------------------------------- calibration and AUC


def _reliability(confidence: Array, wrong: Array, bins: int) -> tuple[Array, Array]:
    """Return counts of records, and sums of their confidences, by (bin, wrong or right)."""
    cell = 2 * np.minimum((confidence * bins).astype(int), bins - 1) + ~wrong
    counts = np.bincount(cell, minlength=2 * bins)
    return counts.reshape(bins, 2), np.bincount(cell, confidence, 2 * bins).reshape(bins, 2)


def _list_bins(counts: Array, sums: Array, level: float) -> tuple[Bin, ...]:
    """Return the bins that hold records."""
    return tuple(
        Bin(int(n), float(s / n), intervals.proportion(int(right), int(n), level))
        for n, s, right in zip(counts.sum(axis=1), sums.sum(axis=1), counts[:, 1], strict=True)
        if n
    )


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


def _auc_parts(scores: Array, codes: Array) -> Array | None:
    """Return each record's part in the AUC; they sum to twice it. None if only one class occurs.

    Of more than two classes, each that occurs is compared with the rest, and the results are
    averaged.
    """
    present = np.unique(codes)
    if len(present) < 2:
        return None
    parts = np.zeros(len(codes))
    tasks = [(1, scores)] if scores.ndim == 1 else [(k, scores[:, k]) for k in present]
    for k, column in tasks:
        inside = codes == k
        ranks = stats.rankdata(column)
        # A rank among all less the rank among one's own class: DeLong's structural components.
        for own in (inside, ~inside):
            better = (ranks[own] - stats.rankdata(column[own])) / (~own).sum()
            parts[own] += (better if own is inside else 1 - better) / own.sum() / len(tasks)
    return parts


def _require(name: str, value: object, fits: bool, must: str) -> None:
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of evaluate must be {must}. Got {value!r} instead."
        )
