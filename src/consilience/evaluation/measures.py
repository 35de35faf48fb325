"""Measuring usefulness: how well a model does on public test records, with intervals and beside honest baselines.

Test records are public here: nothing hides them, and each number below may depend on a single one.
A number computed from private test records would be a release that no ledger was charged for;
private test sets are for a later version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats
from sklearn.base import BaseEstimator, is_regressor
from sklearn.utils.multiclass import type_of_target

from consilience.errors import SchemaMismatch, SettingsError
from consilience.privacy.mechanisms import Noise, Source

Array = NDArray[Any]

SMALLEST_CHANCE = 1e-15  # a probability below counts as this one, so that a log-loss is finite


@dataclass(frozen=True)
class Measure:
    """A number with the interval that holds its true value at the evaluation's level."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bin:
    """Records that were predicted with about the same confidence, and how often the prediction was right."""

    n_records: int
    confidence: float
    accuracy: Measure


@dataclass(frozen=True)
class Evaluation:
    """How well one model did. ``measures`` holds what it allows: scores for "auc", probabilities for "log_loss" and
    "calibration", two classes for "f1". ``losses`` is per test record: whether it was wrong, or its
    squared error.
    """  # noqa: D205

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
        return self.measures.get("error") or self.measures["rmse"]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        facts = {
            "n_records": self.n_records,
            "level": self.level,
            "reliability": [asdict(b) for b in self.reliability],
        }
        return {"measures": {name: asdict(one) for name, one in self.measures.items()}, **facts}

    def __str__(self) -> str:
        lines = [f"{'':<12}{'value':>9}{f'{self.level:.0%} interval':>21}"]
        lines += [
            f"{name:<12}{m.value:>9.4f}{m.low:>12.4f} {m.high:.4f}"
            for name, m in self.measures.items()
        ]
        return "\n".join([*lines, f"on {self.n_records:,} public test records"])


def evaluate(
    model: Any,
    X: Any,
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
    DeLong's variance on the logit scale for the AUC, also when one class is told from the rest and
    the classes are averaged; bootstrap for F1 and calibration (the latter corrected for its upward
    bias, so it may lie below the value); normal for means.

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
    scored = _scored(model, X, y, task)
    if not isinstance(scored, _Scored):
        return _of_regression(*scored, level)
    found = {"error": _proportion(int(scored.wrong.sum()), len(scored.wrong), level)}
    source = Noise(seed=seed).open()
    for name, score in scored.f1_scores.items():
        found[name] = _bootstrap(scored.confusion, score, resamples, level, source)
    if scored.scores is not None:
        parts = _auc_parts(scored.scores, scored.codes)
        if parts is not None:
            found["auc"] = _auc_interval(*parts, level)
    reliability: tuple[Bin, ...] = ()
    if scored.chances is not None:
        found["log_loss"] = _mean(scored.log_losses, level)
        confidence = scored.chances.max(axis=1)
        counts, sums = _reliability(confidence, scored.wrong, bins)
        found["calibration"] = _bootstrap(
            counts, _gap_of(counts, sums), resamples, level, source, pivotal=True
        )
        total = counts.sum(axis=1)
        reliability = tuple(
            Bin(int(n), float(s / n), _proportion(int(right), int(n), level))
            for n, s, right in zip(total, sums.sum(axis=1), counts[:, 1], strict=True)
            if n
        )
    return Evaluation(found, len(scored.wrong), level, reliability, scored.wrong)


def measures(model: Any, X: Any, y: ArrayLike, *, task: str | None = None) -> dict[str, float]:
    """Return the values of `evaluate` alone, for many models at once: no interval, no bootstrap, no calibration."""
    scored = _scored(model, X, y, task)
    if not isinstance(scored, _Scored):
        return {name: one.value for name, one in _of_regression(*scored, 0.95).measures.items()}
    found = {"error": float(scored.wrong.mean())}
    found |= {
        name: float(score(scored.confusion[None])[0]) for name, score in scored.f1_scores.items()
    }
    if scored.scores is not None and len(present := np.flatnonzero(np.bincount(scored.codes))) > 1:
        found["auc"] = _auc(scored.scores, scored.codes, present)
    if scored.chances is not None:
        found["log_loss"] = float(scored.log_losses.mean())
    return found


# ------------------------------------------------------------------------------------------------------ what is scored


@dataclass(frozen=True)
class _Scored:
    """A classifier's answers, by the position of each label among all that the model or the test records know."""

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
        own = np.clip(self.chances[np.arange(len(self.codes)), self.codes], SMALLEST_CHANCE, 1)
        return np.asarray(-np.log(own))

    @property
    def f1_scores(self) -> dict[str, Callable[[Array], Array]]:
        """The F1 scores of many confusion matrices at once; of two classes, the second is the one looked for."""

        def each(cells: Array) -> Array:
            right = np.diagonal(cells, axis1=1, axis2=2)
            total = cells.sum(axis=1) + cells.sum(axis=2)
            return np.asarray(2 * right / np.maximum(total, 1))

        def macro(cells: Array) -> Array:  # over the classes that occur, as scikit-learn has it
            occur = (cells.sum(axis=1) + cells.sum(axis=2)) > 0
            return np.asarray(each(cells).sum(axis=1) / np.maximum(occur.sum(axis=1), 1))

        def micro(cells: Array) -> Array:
            return np.asarray(np.trace(cells, axis1=1, axis2=2) / cells.sum(axis=(1, 2)))

        both: dict[str, Callable[[Array], Array]] = {"f1_micro": micro, "f1_macro": macro}
        return {"f1": lambda cells: each(cells)[:, 1], **both} if self.n_classes == 2 else both


def _scored(model: Any, X: Any, y: ArrayLike, task: str | None) -> _Scored | tuple[Array, Array]:
    """Return what a classifier answered, or a regressor's (labels, predictions)."""
    labels, predicted, given_chances, given_scores = np.asarray(y), *_answers(model, X)
    if labels.ndim != 1 or labels.shape != predicted.shape or not len(labels):
        raise SchemaMismatch(
            "The test records need one label each, and there must be one. Nothing was evaluated. "
            "Check their shapes."
        )
    if _task(model, labels, task) == "regression":
        return labels.astype(np.float64), predicted.astype(np.float64)
    known = np.asarray(getattr(model, "classes_", predicted))
    every = np.unique(known)
    for said in (labels, predicted):
        every = every if np.isin(said, every).all() else np.union1d(every, said)

    def columns(values: Any) -> Array | None:
        values = np.asarray(values, dtype=np.float64)
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
    return _Scored(
        np.searchsorted(every, labels),
        np.searchsorted(every, predicted),
        scores,
        chances,
        len(every),
    )


def _answers(model: Any, X: Any) -> tuple[Array, Any, Any]:
    """Return predictions, and chances and scores or None; of a linear model all that follows from scores found once."""
    if hasattr(model, "_answers"):
        scores = model.decision_function(X)
        return (*model._answers(scores), scores)
    asked = (getattr(model, name, None) for name in ("predict_proba", "decision_function"))
    chances, scores = (None if ask is None else ask(X) for ask in asked)
    return np.asarray(model.predict(X)), chances, scores


def _task(model: Any, labels: Array, task: str | None) -> str:
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
    return (
        "regression"
        if by_labels or (isinstance(model, BaseEstimator) and is_regressor(model))
        else "classification"
    )


def _of_regression(labels: Array, predicted: Array, level: float) -> Evaluation:
    squares, spread = np.square(labels - predicted), np.square(labels - labels.mean())
    mean = _mean(squares, level)
    found = {
        "rmse": Measure(*(math.sqrt(max(one, 0.0)) for one in (mean.value, mean.low, mean.high))),
        "mae": _mean(np.abs(labels - predicted), level),
    }
    if (whole := float(spread.mean())) > 0:
        ratio = float(squares.mean()) / whole
        # The ratio of two means moves with each record by (its square - ratio * its spread) / the
        # mean spread.
        found["r2"] = _mean(1 - ratio - (squares - ratio * spread) / whole, level)
    return Evaluation(found, len(labels), level, (), squares)


# ---------------------------------------------------------------------------------------------------------- intervals


def _proportion(count: int, n: int, level: float) -> Measure:
    """Return count / n with the exact binomial interval of Clopper and Pearson."""
    interval = stats.binomtest(count, n).proportion_ci(level, method="exact")
    return Measure(count / n, float(interval.low), float(interval.high))


def _mean(values: Array, level: float) -> Measure:
    value, n = float(values.mean()), len(values)
    half = (
        float(stats.norm.isf((1 - level) / 2) * values.std(ddof=1) / math.sqrt(n))
        if n > 1
        else math.inf
    )
    return Measure(value, value - half, value + half)


def _bootstrap(
    counts: Array,
    statistic: Callable[[Array], Array],
    resamples: int,
    level: float,
    source: Source,
    *,
    pivotal: bool = False,
) -> Measure:
    """Draw the cells of a table of counts again, as drawing its records again would, and return the range."""
    cells, n = counts.ravel(), int(counts.sum())
    drawn, left, mass = np.zeros((resamples, cells.size)), np.full(resamples, float(n)), n
    for i in np.flatnonzero(cells):  # a multinomial is a chain of binomials
        share = cells[i] / mass
        drawn[:, i] = stats.binom.ppf(source.uniform(resamples), left, share) if share < 1 else left
        left, mass = left - drawn[:, i], mass - cells[i]
    value = float(statistic(counts[None])[0])
    low, high = np.quantile(
        statistic(drawn.reshape(resamples, *counts.shape)), ((1 - level) / 2, (1 + level) / 2)
    )
    if pivotal:
        low, high = max(0.0, 2 * value - high), max(0.0, 2 * value - low)
    return Measure(value, float(low), float(high))


def _reliability(confidence: Array, wrong: Array, bins: int) -> tuple[Array, Array]:
    """Return, by (bin, wrong or right), how many records there are and the sum of their confidences."""
    cell = 2 * np.minimum((confidence * bins).astype(int), bins - 1) + ~wrong
    counts = np.bincount(cell, minlength=2 * bins)
    return counts.reshape(bins, 2), np.bincount(cell, confidence, 2 * bins).reshape(bins, 2)


def _gap_of(counts: Array, sums: Array) -> Callable[[Array], Array]:
    """Return the mean gap between confidence and accuracy, for tables of counts like this one."""
    confidence = sums / np.maximum(counts, 1)

    def gap(tables: Array) -> Array:
        by_bin = np.abs((tables * confidence).sum(axis=2) - tables[:, :, 1])
        return np.asarray(by_bin.sum(axis=1) / tables.sum(axis=(1, 2)))

    return gap


def _auc(scores: Array, codes: Array, present: Array) -> float:
    """Return the AUC alone: what the parts of `_auc_parts` sum up to, by counting pairs in order."""
    tasks = [(1, scores)] if scores.ndim == 1 else [(k, scores[:, k]) for k in present]
    found = []
    for k, column in tasks:
        inside, outside = np.sort(column[codes == k]), np.sort(column[codes != k])
        below = sum(
            int(np.searchsorted(outside, inside, side).sum()) for side in ("left", "right")
        )  # twice, ties half
        found.append(below / (2 * len(inside) * len(outside)))
    return float(np.mean(found))


def _auc_parts(scores: Array, codes: Array) -> tuple[Array, Array] | None:
    """Return each record's part in the AUC (they sum to twice it) and its class; None if only one class occurs.

    Of more than two classes, each that occurs is told from the rest, and the results are averaged.
    """
    present = np.unique(codes)
    if len(present) < 2:
        return None
    parts = np.zeros(len(codes))
    tasks = [(1, scores)] if scores.ndim == 1 else [(k, scores[:, k]) for k in present]
    for k, column in tasks:
        inside = codes == k
        ranks = stats.rankdata(column)
        for own in (
            inside,
            ~inside,
        ):  # ranks among all, less those among their own: DeLong's structural components
            better = (ranks[own] - stats.rankdata(column[own])) / (~own).sum()
            parts[own] += (better if own is inside else 1 - better) / own.sum() / len(tasks)
    return parts, codes


def _auc_interval(parts: Array, codes: Array, level: float) -> Measure:
    """Return the AUC with DeLong's interval on the logit scale, or an exact one where the variance says nothing."""
    value = float(parts.sum() / 2)
    groups = [parts[codes == k] for k in np.unique(codes)]
    fewest = min(map(len, groups))
    variance = sum(len(one) * one.var(ddof=1) for one in groups) if fewest > 1 else 0.0
    if variance <= 1e-20 or not 0 < value < 1:
        # All or no pairs are in order. No more is known than so many independent pairs would show.
        exact = _proportion(round(value * fewest), fewest, level)
        return Measure(value, min(exact.low, value), max(exact.high, value))
    half = float(stats.norm.isf((1 - level) / 2) * math.sqrt(variance) / (value * (1 - value)))
    middle = float(special.logit(value))
    return Measure(value, float(special.expit(middle - half)), float(special.expit(middle + half)))


# --------------------------------------------------------------------------------------------------- does joining help


@dataclass(frozen=True)
class Gap:
    """What joining gains over another choice, on the same test records: `other` less `joined`."""

    other: float
    joined: float
    gain: Measure
    p_value: float
    n_records: int
    level: float
    share: bool  # of records misclassified, rather than a mean squared error

    @property
    def verdict(self) -> str:
        """``"better"``, ``"worse"`` or ``"unclear"``: what the interval says of joining."""
        return "better" if self.gain.low > 0 else "worse" if self.gain.high < 0 else "unclear"


def paired_gap(
    other: Evaluation | ArrayLike, joined: Evaluation | ArrayLike, *, level: float = 0.95
) -> Gap:
    """Compare two models on the same records: Bonett and Price's interval (2012) and McNemar's exact test for errors.

    Either argument is an `Evaluation`, or a loss per record: whether it was wrong, or its squared
    error.
    """
    a, b = (
        np.asarray(one.losses if isinstance(one, Evaluation) else one) for one in (other, joined)
    )
    if a.shape != b.shape or a.ndim != 1 or not len(a) or a.dtype != b.dtype:
        raise SchemaMismatch(
            "A paired comparison needs the losses of both models on the same test records. "
            "Nothing was compared. Evaluate both on one table."
        )
    n, z = len(a), float(stats.norm.isf((1 - level) / 2))
    if a.dtype != bool:
        gain = _mean(a.astype(np.float64) - b, level)
        sure = (gain.high - gain.low) / 2 / z  # one standard error
        p_value = float(2 * stats.norm.sf(abs(gain.value) / sure)) if sure > 0 else 1.0
        return Gap(float(a.mean()), float(b.mean()), gain, p_value, n, level, False)
    mended, spoilt = int((a & ~b).sum()), int((b & ~a).sum())
    up, down = (mended + 1) / (n + 2), (spoilt + 1) / (n + 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    gain = Measure((mended - spoilt) / n, max(-1.0, up - down - half), min(1.0, up - down + half))
    p_value = float(stats.binomtest(mended, mended + spoilt).pvalue) if mended + spoilt else 1.0
    return Gap(float(a.mean()), float(b.mean()), gain, p_value, n, level, True)


@dataclass(frozen=True)
class Joining:
    """Whether joining helps one site: only if it clearly beats the site alone and every alternative."""

    site: str
    epsilon: float
    alone: Gap
    alternatives: Mapping[str, Gap]

    @property
    def helps(self) -> bool | None:
        """True if joining is clearly better than all else, False if something is clearly better, None if unclear."""
        verdicts = {self.alone.verdict, *(gap.verdict for gap in self.alternatives.values())}
        return True if verdicts == {"better"} else False if "worse" in verdicts else None

    def __str__(self) -> str:
        gap = self.alone
        clear = {"better": "lower", "worse": "HIGHER", "unclear": "not clearly different"}[
            gap.verdict
        ]
        answer = {True: "helps", False: "does not help", None: "does not clearly help"}[self.helps]
        unit, scale = (" points", 100) if gap.share else ("", 1)
        low, high = scale * gap.gain.low, scale * gap.gain.high
        text = (
            f"Joining {answer} {self.site} at epsilon={self.epsilon:g}: its error is {clear}, "
            f"{_amount(gap, gap.joined)} instead of {_amount(gap, gap.other)} alone, a gain of "
            f"{scale * gap.gain.value:.3g}{unit} ({gap.level:.0%} interval {low:.3g} to "
            f"{high:.3g}, p={gap.p_value:.2g}) on {gap.n_records:,} public test records"
        )
        words = {"better": "errs more", "worse": "errs LESS", "unclear": "errs about as much"}
        others = [
            f"{name} {words[one.verdict]} ({_amount(one, one.other)})"
            for name, one in self.alternatives.items()
        ]
        return "; ".join([text, *others]) + "."


def _amount(gap: Gap, value: float) -> str:
    return f"{value:.1%}" if gap.share else f"{value:.4g}"


def joining_helps(
    alone: Evaluation | ArrayLike,
    joined: Evaluation | ArrayLike,
    *,
    epsilon: float,
    site: str = "this site",
    alternatives: Mapping[str, Evaluation | ArrayLike] | None = None,
    level: float = 0.95,
) -> Joining:
    """Tell one site, in a sentence (`str` of the result), whether joining helps it, by how much and how surely.

    Parameters
    ----------
    alone, joined
        The site's own private model and the ensemble, evaluated on the same public test records.
    alternatives
        What the site could do instead, by name: its own exact model that never leaves it, public
        records alone.
    """
    others = {
        name: paired_gap(one, joined, level=level) for name, one in (alternatives or {}).items()
    }
    return Joining(site, epsilon, paired_gap(alone, joined, level=level), others)


@dataclass(frozen=True)
class HonestTable:
    """Ensembles beside everything they have to beat; prints as a table, with gaps to the first ensemble."""

    rows: tuple[tuple[str, Measure, Gap | None], ...]

    def __str__(self) -> str:
        width = max(len(title) for title, _, _ in self.rows)
        lines = [f"{'':<{width}}   error  interval          gain of joining"]
        for title, found, gap in self.rows:
            shown = (
                ""
                if gap is None
                else f"{gap.gain.value:+.4f} ({gap.gain.low:+.4f} to {gap.gain.high:+.4f})"
            )
            lines.append(
                f"{title:<{width}}  {found.value:.4f}  {found.low:.4f} to {found.high:.4f}  {shown}".rstrip()
            )
        return "\n".join(lines)


def honest_table(
    joined: Mapping[str, Evaluation],
    *,
    public: Evaluation | None,
    alone: Mapping[str, Evaluation],
    pooled_private: Evaluation,
    pooled_exact: Evaluation,
) -> HonestTable:
    """Put ensembles beside the baselines; none can be left out (`public` is None where there are no such records)."""
    if not joined or not alone:
        raise SettingsError(
            "An honest table needs an ensemble and at least one site alone. Nothing was compared."
        )
    first = next(iter(joined.values()))
    others = {"public records alone": public} if public is not None else {}
    others |= {f"{name} alone": one for name, one in alone.items()}
    others |= {"pooled, private": pooled_private, "pooled, no privacy": pooled_exact}
    ours = [(f"joined: {name}", one.main, None) for name, one in joined.items()]
    return HonestTable(
        (*ours, *((name, one.main, paired_gap(one, first)) for name, one in others.items()))
    )


def _require(name: str, value: object, fits: bool, must: str) -> None:
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of evaluate must be {must}. Got {value!r} instead."
        )
