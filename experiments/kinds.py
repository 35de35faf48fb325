"""The kinds of statements, and what each of them measures in the numbers of a panel.

Every statement becomes one or more paired quantities, computed trial by trial so that what methods
share (the division, the local models) cancels, and each is oriented so that "positive" is what is
claimed; or, where two distributions are compared, a test. `verdicts.py` judges what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from consilience import Noise

from .statements import Statement

Array = NDArray[Any]
Where = Literal["for", "against", "open"]
LEVEL = 0.95
PERMUTATIONS = 1999
RESAMPLES = 1000
FEWEST = 8  # trials, below which two distributions are not compared


class NotRun(LookupError):
    """What a statement is about is not among the x values of this run."""


class Unclear(ValueError):
    """The numbers do not allow the statement to be measured, whatever it says."""


@dataclass(frozen=True)
class Lines:
    """The numbers of one panel: for each label, its x values and a row of trials per x.

    A trial is one repeat: a division of the records, on which several draws of noise are averaged.
    Where the division is fixed it is one draw of noise. ``spreads`` are standard deviations over
    all trials and draws at each x: the papers' error bars. ``seeds`` and ``divisions`` say, for
    each trial, which master seed it is from, and which trials share a division.
    """

    values: Mapping[str, tuple[list[Any], Array]]
    spreads: Mapping[str, Array]
    seeds: Mapping[str, Array]
    divisions: Mapping[str, Array]
    metrics: Mapping[str, str]

    @classmethod
    def of(cls, table: Iterable[Mapping[str, Any]]) -> Lines:
        """Arrange a tidy table; those of before there were several seeds lack their columns."""
        found: dict[str, dict[Any, dict[tuple[int, int], list[float]]]] = {}
        division: dict[tuple[int, int], int] = {}
        metrics = {}
        for row in table:
            trial = (row.get("seed", 0), row["repeat"])
            by_trial = found.setdefault(row["label"], {}).setdefault(row["x"], {})
            by_trial.setdefault(trial, []).append(row["value"])
            division[trial] = row.get("division", row["repeat"])
            metrics[row["label"]] = row.get("metric", "")
        arranged, spreads, seeds, divisions = {}, {}, {}, {}
        for label, by_x in found.items():
            common = sorted(set.intersection(*(set(one) for one in by_x.values())))
            means = [[np.mean(one[trial]) for trial in common] for one in by_x.values()]
            arranged[label] = (list(by_x), np.array(means, dtype=float))
            seeds[label] = np.array([seed for seed, _ in common])
            places = {(seed, division[seed, one]): 0 for seed, one in common}
            places = {place: number for number, place in enumerate(places)}
            divisions[label] = np.array([places[seed, division[seed, one]] for seed, one in common])
            spreads[label] = np.array([_bar(one, division) for one in by_x.values()])
        return cls(arranged, spreads, seeds, divisions, metrics)

    def get(self, label: str, within: Sequence[float] | None = None) -> tuple[list[Any], Array]:
        """Return the x values in a range, and the trials of each."""
        if label not in self.values:
            raise LookupError(
                f"There is no line {label!r}; there are {sorted(self.values)}. Fix expected.toml."
            )
        xs, values = self.values[label]
        kept = [
            i
            for i, x in enumerate(xs)
            if within is None or within[0] * (1 - 1e-9) <= x <= within[1] * (1 + 1e-9)
        ]
        if not kept:
            raise NotRun(f"no x from {within} was run")
        return [xs[i] for i in kept], values[kept]

    def deviations(self, label: str, values: Array) -> Array:
        """Return by how much each trial of a line is off the mean, or off that of its division."""
        return values - _means(values, self.divisions[label])


def _means(values: Array, divisions: Array) -> Array:
    """Return the mean at each x, or, where trials share a division, that of the division."""
    if len(set(divisions)) == len(divisions):
        return values.mean(axis=1, keepdims=True)
    own = np.equal.outer(divisions, divisions).astype(float)
    return np.asarray(values @ (own / own.sum(axis=0)))


def _bar(by_trial: Mapping[tuple[int, int], list[float]], division: Mapping[Any, int]) -> float:
    """Return the standard deviation of all draws at one x; within divisions if these are fixed."""
    numbers = np.concatenate(list(by_trial.values()))
    places = [(seed, division[seed, one]) for seed, one in by_trial]
    if len(numbers) < 2:
        return 0.0
    if len(set(places)) == len(places):
        return float(np.std(numbers, ddof=1))
    known = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return _pooled(numbers[None], np.array([known[place] for place in places]))


def _pooled(values: Array, divisions: Array) -> float:
    """Return the standard deviation over trials, within divisions if these are fixed."""
    off = values - _means(values, divisions)
    shared = len(set(divisions)) if len(set(divisions)) < len(divisions) else 1
    free = values.shape[1] - shared
    return float(np.sqrt((off**2).sum(axis=1).mean() / free)) if free > 0 else math.nan


@dataclass(frozen=True)
class Evidence:
    """Quantities that are positive where the claim is true: overall and for single points."""

    whole: Array
    points: Sequence[tuple[Any, Array]] = ()
    measured: str = ""
    equivalence: bool = False  # then `whole` and `points` are signed gaps, to lie within ± `limit`
    limit: float = 0.0  # else `whole` is to exceed it; points only need the right sign
    looks: int = 1  # of how many quantities `whole` is the worst one
    in_metric: bool = False  # whether `whole` is a difference in the metric of the panel

    @property
    def level(self) -> float:
        """The level at which the whole is judged."""
        return 1 - (1 - LEVEL) / self.looks


@dataclass(frozen=True)
class Tested:
    """The outcome of a test, where no quantity per trial is behind it."""

    where: Where
    p: float
    measured: str


# -------------------------------------------------------------------------------------------- kinds


def _below(s: Statement, lines: Lines) -> Evidence:
    """Line `a` is below line `b`, by `margin` or more, at every x in the range."""
    xs, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    gaps = b - a
    measured = (
        f"{s.b} minus {s.a} is {gaps.mean():+.4g} on average "
        f"({a.mean():.4g} against {b.mean():.4g})"
    )
    points = list(zip(xs, gaps, strict=True))
    return Evidence(gaps.mean(axis=0), points, measured, limit=s.margin, in_metric=True)


def _change(values: Array) -> Array:
    """Return each repeat's change from the first to the last x."""
    if len(values) < 2:
        raise NotRun("a change needs two x values")
    return np.asarray(values[-1] - values[0])


def _trend(s: Statement, lines: Lines, sign: int) -> Evidence:
    xs, a = lines.get(s.a, s.x)
    measured = (
        f"{s.a} changes by {_change(a).mean():+.4g} "
        f"from {a[0].mean():.4g} at {xs[0]:g} to {a[-1].mean():.4g}"
    )
    steps = [
        (x, sign * (after - before)) for x, before, after in zip(xs[1:], a[:-1], a[1:], strict=True)
    ]
    measured = f"{measured} at {xs[-1]:g}"
    return Evidence(sign * _change(a), steps, measured, limit=s.margin, in_metric=True)


def _falls(s: Statement, lines: Lines) -> Evidence:
    """Line `a` falls over the range by `margin` or more; points are steps between x values."""
    return _trend(s, lines, -1)


def _rises(s: Statement, lines: Lines) -> Evidence:
    """Line `a` rises over the range, by `margin` or more."""
    return _trend(s, lines, 1)


def _flat(s: Statement, lines: Lines) -> Evidence:
    """Line `a` changes by at most `tolerance` over the range, and at any x from its mean."""
    xs, a = lines.get(s.a, s.x)
    measured = (
        f"{s.a} changes by {_change(a).mean():+.4g} (means from {a.mean(axis=1).min():.4g} to "
    )
    measured += f"{a.mean(axis=1).max():.4g}; allowed ±{s.tolerance:g})"
    centre = a.mean(axis=0)
    return Evidence(
        _change(a),
        [(x, row - centre) for x, row in zip(xs, a, strict=True)],
        measured,
        True,
        s.tolerance,
    )


def _close(s: Statement, lines: Lines) -> Evidence:
    """Lines `a` and `b` differ by no more than `tolerance`."""
    xs, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    gaps = b - a
    measured = f"{s.b} minus {s.a} is {gaps.mean():+.4g} on average (allowed ±{s.tolerance:g})"
    return Evidence(
        gaps.mean(axis=0), list(zip(xs, gaps, strict=True)), measured, True, s.tolerance
    )


def _near(s: Statement, lines: Lines) -> Evidence:
    """Line `a` has `value` within `tolerance`, at x = `at` or on average over the range."""
    _, a = lines.get(s.a, (s.at, s.at) if s.at is not None else s.x)
    expected = float(s.value or 0.0)
    measured = f"{s.a} is {a.mean():.4g} (stated {expected:g}, allowed ±{s.tolerance:g})"
    return Evidence(a.mean(axis=0) - expected, (), measured, True, s.tolerance)


def _crosses(s: Statement, lines: Lines) -> Evidence:
    """Line `a` starts below `b` at the first x of the range and ends above it at the last."""
    xs, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    if len(xs) < 2:
        raise NotRun("a crossing needs two x values")
    first, last = b[0] - a[0], a[-1] - b[-1]
    measured = (
        f"{s.b} minus {s.a} is {first.mean():+.4g} at {xs[0]:g} "
        f"and {-last.mean():+.4g} at {xs[-1]:g}"
    )
    points = [(xs[0], first), (xs[-1], last)]
    return Evidence(_less_sure(first, last), points, measured, looks=2, in_metric=True)


def _less_sure(*several: Array) -> Array:
    """Return the quantity that speaks least for the claim, since all of them have to."""
    return min(several, key=lambda gaps: float(gaps.mean() / (gaps.std() + 1e-12)))


def _spike(s: Statement, lines: Lines) -> Evidence:
    """Line `a` at x = `at` is higher than at the x values beside it by `margin` or more."""
    xs, a = lines.get(s.a, s.x)
    place = next((i for i, x in enumerate(xs) if math.isclose(x, s.at or 0.0)), None)
    if place is None or len(xs) < 2:
        raise NotRun(f"x = {s.at:g} or its neighbours were not run")
    around = [i for i in (place - 1, place + 1) if 0 <= i < len(xs)]
    gaps = a[place] - a[around].mean(axis=0)
    beside = " and ".join(f"{a[i].mean():.4g} at {xs[i]:g}" for i in around)
    measured = f"{s.a} is {a[place].mean():.4g} at {xs[place]:g} beside {beside}"
    points = [(xs[i], a[place] - a[i]) for i in around]
    return Evidence(gaps, points, measured, limit=s.margin, in_metric=True)


def _dip(s: Statement, lines: Lines) -> Evidence:
    """Line `a` has a minimum inside the range: its lowest inner x is lower than both ends."""
    xs, a = lines.get(s.a, s.x)
    if len(xs) < 3:
        raise NotRun("a minimum inside needs three x values")
    means, judged = _halves(a)
    place = 1 + int(means[1:-1].argmin())
    first, last = judged[0] - judged[place], judged[-1] - judged[place]
    measured = f"{s.a} is {a[0].mean():.4g} at {xs[0]:g}, "
    measured += f"lowest inside {a[place].mean():.4g} at {xs[place]:g}, "
    measured += f"{a[-1].mean():.4g} at {xs[-1]:g}"
    points = [(xs[0], first), (xs[-1], last)]
    return Evidence(_less_sure(first, last), points, measured, looks=2, in_metric=True)


def _halves(a: Array) -> tuple[Array, Array]:
    """Return the means of every second repeat, to choose an x, and the other repeats, to judge it.

    If the same numbers chose and judged the x, noise alone would show highs and lows. With many
    repeats this would also happen if each were judged where all the others are lowest, because
    these agree on where that is.
    """
    return a[:, ::2].mean(axis=1), a[:, 1::2]


def _varies(s: Statement, lines: Lines) -> Evidence:
    """Line `a` depends on x: its highest and lowest values differ by `margin` or more."""
    xs, a = lines.get(s.a, s.x)
    if len(xs) < 2:
        raise NotRun("a difference needs two x values")
    means, judged = _halves(a)
    low, high = int(means.argmin()), int(means.argmax())
    measured = (
        f"{s.a} has means from {a[low].mean():.4g} at {xs[low]:g} "
        f"to {a[high].mean():.4g} at {xs[high]:g}"
    )
    return Evidence(
        judged[high] - judged[low] - s.margin,
        (),
        f"{measured}, the difference less {s.margin:g} counts",
        in_metric=True,
    )


def _less_affected(s: Statement, lines: Lines) -> Evidence:
    """Line `a` changes less over the range than line `b` does."""
    _, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    change_a, change_b = _change(a), _change(b)
    gaps = np.sign(change_b.mean()) * change_b - np.sign(change_a.mean()) * change_a
    measured = (
        f"over the range {s.a} changes by {change_a.mean():+.4g} "
        f"and {s.b} by {change_b.mean():+.4g}"
    )
    return Evidence(gaps, (), measured, in_metric=True)


def _steadier(s: Statement, lines: Lines) -> Evidence:
    """Line `a` varies less between trials than line `b`, by mean absolute deviation at each x."""
    xs, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    # Levene's: deviations are compared pair by pair, which needs no normal errors.
    gaps = np.abs(lines.deviations(s.b, b)) - np.abs(lines.deviations(s.a, a))
    spread = [_pooled(one, lines.divisions[label]) for one, label in ((a, s.a), (b, s.b))]
    measured = (
        f"standard deviation over repeats {spread[0]:.3g} for {s.a}, {spread[1]:.3g} for {s.b}"
    )
    return Evidence(gaps.mean(axis=0), list(zip(xs, gaps, strict=True)), measured)


def _changes_by(s: Statement, lines: Lines) -> Evidence:
    """Line `a` changes by `value`, within `tolerance`, from the first x to the last."""
    xs, a = lines.get(s.a, s.x)
    expected, change = float(s.value or 0.0), _change(a)
    measured = (
        f"{s.a} changes by {change.mean():+.4g} from x = {xs[0]:g} to {xs[-1]:g} "
        f"(stated {expected:+g}, allowed ±{s.tolerance:g})"
    )
    return Evidence(change - expected, (), measured, True, s.tolerance)


def _same_curve(s: Statement, lines: Lines) -> Evidence:
    """Lines `a` and `b` differ by no more than `tolerance` at any x: the worst one decides."""
    xs, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    gaps = b - a
    reach = np.abs(gaps.mean(axis=1)) + gaps.std(axis=1) / math.sqrt(gaps.shape[1])
    worst = int(reach.argmax())
    measured = (
        f"{s.b} minus {s.a} is farthest from 0 at {xs[worst]:g}, "
        f"{gaps[worst].mean():+.4g} (allowed ±{s.tolerance:g})"
    )
    points = list(zip(xs, gaps, strict=True))
    return Evidence(gaps[worst], points, measured, True, s.tolerance, looks=len(xs))


def _ratio(s: Statement, lines: Lines) -> Evidence:
    """Line `a` is `value` times line `b`, within `tolerance` (a share of `value`)."""
    _, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    expected = float(s.value or 1.0)

    def ratio(kept: Array) -> float:
        return float(a[:, kept].mean() / b[:, kept].mean()) / expected - 1

    if not b.mean():
        raise Unclear(f"{s.b} is 0 on average")
    measured = (
        f"{s.a} is {a.mean() / b.mean():.4g} times {s.b} "
        f"({a.mean():.4g} and {b.mean():.4g}; stated {expected:g} ± {100 * s.tolerance:g} %)"
    )
    return Evidence(_jackknife(ratio, a.shape[1]), (), measured, True, s.tolerance)


def _spread(s: Statement, lines: Lines) -> Evidence:
    """Line `a` has the standard deviation `value` over trials, within `tolerance`."""
    _, a = lines.get(s.a, (s.at, s.at) if s.at is not None else s.x)
    expected, divisions = float(s.value or 0.0), lines.divisions[s.a]
    found = _jackknife(lambda kept: _pooled(a[:, kept], divisions[kept]), a.shape[1])
    measured = (
        f"the standard deviation of {s.a} is {_pooled(a, divisions):.3g} "
        f"(stated {expected:g}, allowed ±{s.tolerance:g})"
    )
    return Evidence(found - expected, (), measured, True, s.tolerance)


def _spread_falls(s: Statement, lines: Lines) -> Evidence:
    """Line `a` varies less from trial to trial at the last x than at the first."""
    xs, a = lines.get(s.a, s.x)
    off = np.abs(lines.deviations(s.a, a))
    ends = [_pooled(a[[place]], lines.divisions[s.a]) for place in (0, -1)]
    measured = (
        f"the standard deviation of {s.a} is {ends[0]:.3g} at {xs[0]:g} "
        f"and {ends[1]:.3g} at {xs[-1]:g}"
    )
    return Evidence(-_change(off), (), measured)


def _slopes(s: Statement, lines: Lines) -> tuple[Array, str]:
    """Return the log-log slope of `a`, less `b` if there is one, as a number for each trial."""
    xs, a = lines.get(s.a, s.x)
    above = ""
    if s.b:
        a, above = a - lines.get(s.b, s.x)[1], f" above {s.b}"
    if len(xs) < 3 or min(xs) <= 0:
        raise NotRun("a slope needs three x values above 0")

    def slope(kept: Array) -> float:
        means = a[:, kept].mean(axis=1)
        if means.min() <= 0:
            where = xs[int(means.argmin())]
            raise Unclear(f"{s.a}{above} is not clearly above 0 at {where:g}: it has no logarithm")
        return float(np.polyfit(np.log(xs), np.log(means), 1)[0])

    found = _jackknife(slope, a.shape[1])
    measured = (
        f"{s.a}{above} goes like x to the power of {slope(np.arange(a.shape[1])):.3g} "
        f"from {xs[0]:g} to {xs[-1]:g}"
    )
    return found, measured


def _slope(s: Statement, lines: Lines) -> Evidence:
    """On log-log axes line `a`, less `b` if given, has the slope `value` within `tolerance`."""
    found, measured = _slopes(s, lines)
    expected = float(s.value or 0.0)
    measured += f" (stated {expected:g}, allowed ±{s.tolerance:g})"
    return Evidence(found - expected, (), measured, True, s.tolerance)


def _slope_at_most(s: Statement, lines: Lines) -> Evidence:
    """On log-log axes the slope is `value` or less, as an upper bound O(x^value) says."""
    found, measured = _slopes(s, lines)
    expected = float(s.value or 0.0)
    measured += f" (stated at most {expected:g}, allowed {s.tolerance:g} more)"
    return Evidence(expected + s.tolerance - found, (), measured)


def _jackknife(measure: Callable[[Array], float], n: int) -> Array:
    """Return a number per trial whose mean and spread are those of a measure of all trials.

    These are Tukey's pseudo-values, for measures that are no means: each trial is left out once.
    """
    every = np.arange(n)
    if n < 2:
        return np.array([measure(every)])
    whole = measure(every)
    return np.array([n * whole - (n - 1) * measure(np.delete(every, i)) for i in range(n)])


def _pair(s: Statement, lines: Lines) -> tuple[Array, Array]:
    """Return the trials of two lines at the one x at which their distributions are compared."""
    within = (s.at, s.at) if s.at is not None else s.x
    (xs, a), (_, b) = lines.get(s.a, within), lines.get(s.b, within)
    if len(xs) != 1:
        raise LookupError(f"{s.name} has {len(xs)} x values. State one: `at`. Fix expected.toml.")
    if a.shape[1] < FEWEST:
        raise Unclear(f"{a.shape[1]} repeats; distributions are compared from {FEWEST} on")
    return a[0], b[0]


def _distance(a: Array, b: Array, weights: Array) -> Array:
    """Return the largest gap between two distribution functions, for each row of weights."""
    grid = np.unique(np.concatenate([a, b]))
    below = np.less_equal.outer(a, grid).astype(float) - np.less_equal.outer(b, grid)
    return np.asarray(np.abs(weights @ below).max(axis=1))


def _compared(a: Array, b: Array) -> tuple[float, Array, float]:
    """Return the distance of two distributions, the same of resampled pairs, and a p value.

    Trials are paired. Where nothing tells the two apart, which of a pair is which is a coin's
    choice: Kolmogorov-Smirnov by permutation. The seed is fixed, so the same numbers always give
    the same verdict.
    """
    source, n = Noise(seed=0).open(), len(a)
    found = float(_distance(a, b, np.full((1, n), 1 / n))[0])
    signs = np.where(source.uniform(PERMUTATIONS * n) < 0.5, -1.0, 1.0).reshape(-1, n)
    swapped = _distance(a, b, signs / n)
    p = (1 + int((swapped >= found - 1e-12).sum())) / (1 + PERMUTATIONS)
    drawn = (source.uniform(RESAMPLES * n) * n).astype(int).reshape(-1, n)
    again = _distance(a, b, np.array([np.bincount(row, minlength=n) for row in drawn]) / n)
    return found, again, p


def _as_distributed(s: Statement, a: Array, b: Array, what: str) -> Tested:
    found, again, p = _compared(a, b)
    bound = float(np.quantile(again, 1 - (1 - LEVEL) / 2))  # resampling makes distances larger
    measured = (
        f"the {what} of {s.a} and {s.b} differ by {found:.3g} at most (97.5 % bound {bound:.3g}, "
        f"allowed {s.tolerance:g}); permutation test: p = {p:.2g}"
    )
    if bound <= s.tolerance:
        far = (1 + int((again > s.tolerance).sum())) / (1 + RESAMPLES)
        return Tested("for", 2 * far, measured)
    against = p < 1 - LEVEL and found > s.tolerance
    return Tested("against" if against else "open", p, measured)


def _same_distribution(s: Statement, lines: Lines) -> Tested:
    """Trials of `a` and `b` at `at` have distribution functions within `tolerance`."""
    return _as_distributed(s, *_pair(s, lines), "distribution functions")


def _same_shape(s: Statement, lines: Lines) -> Tested:
    """Trials have such distribution functions once each is moved to mean 0."""
    a, b = _pair(s, lines)
    return _as_distributed(s, a - a.mean(), b - b.mean(), "distribution functions around the means")


def _other_distribution(s: Statement, lines: Lines) -> Tested:
    """Trials of `a` and `b` at `at` have distribution functions that are not within `tolerance`."""
    turned: dict[Where, Where] = {"for": "against", "against": "for", "open": "open"}
    same = _same_distribution(s, lines)
    return Tested(turned[same.where], same.p, same.measured)


KINDS: dict[str, Callable[[Statement, Lines], Evidence | Tested]] = {
    "below": _below,
    "falls": _falls,
    "rises": _rises,
    "flat": _flat,
    "close": _close,
    "near": _near,
    "crosses": _crosses,
    "spike": _spike,
    "dip": _dip,
    "varies": _varies,
    "less affected": _less_affected,
    "steadier": _steadier,
    "changes by": _changes_by,
    "same curve": _same_curve,
    "ratio": _ratio,
    "slope": _slope,
    "slope at most": _slope_at_most,
    "spread": _spread,
    "spread falls": _spread_falls,
    "same distribution": _same_distribution,
    "same shape": _same_shape,
    "other distribution": _other_distribution,
}
