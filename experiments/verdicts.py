"""Judge whether the statements in `expected.toml` hold in our numbers.

Every statement becomes one or more paired quantities, computed repeat by repeat so that what
methods share (the division, the local models) cancels, and each is oriented so that "positive" is
what the paper claims. A t interval over the repeats says whether a quantity speaks for the claim,
against it, or neither. README.md states the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from .statements import Statement

Array = NDArray[Any]
HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
UNDECIDED, OPEN = "undecided", "not run"
LEVEL = 0.95
Where = Literal["for", "against", "open"]


class NotRun(LookupError):
    """What a statement is about is not among the x values of this run."""


@dataclass(frozen=True)
class Lines:
    """The numbers of one panel: for each label, its x values and a row of repeats per x.

    Each number is the mean of its draws. ``spreads`` are standard deviations over all trials
    (repeats and draws) at each x: the papers' error bars.
    """

    values: Mapping[str, tuple[list[Any], Array]]
    spreads: Mapping[str, Array]

    @classmethod
    def of(cls, table: Iterable[Mapping[str, Any]]) -> Lines:
        """Arrange a tidy table."""
        found: dict[str, dict[Any, dict[int, list[float]]]] = {}
        for row in table:
            by_repeat = found.setdefault(row["label"], {}).setdefault(row["x"], {})
            by_repeat.setdefault(row["repeat"], []).append(row["value"])
        arranged, spreads = {}, {}
        for label, by_x in found.items():
            common = sorted(set.intersection(*(set(one) for one in by_x.values())))
            means = [[np.mean(one[repeat]) for repeat in common] for one in by_x.values()]
            trials = [np.concatenate(list(one.values())) for one in by_x.values()]
            arranged[label] = (list(by_x), np.array(means, dtype=float))
            spreads[label] = np.array(
                [np.std(one, ddof=1) if len(one) > 1 else 0.0 for one in trials]
            )
        return cls(arranged, spreads)

    def get(self, label: str, within: Sequence[float] | None = None) -> tuple[list[Any], Array]:
        """Return the x values in a range, and the repeats of each."""
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


@dataclass(frozen=True)
class Verdict:
    """A judged statement: one word, the measured number in words, and how single points spoke."""

    statement: Statement
    verdict: str
    measured: str
    points: str = ""


@dataclass(frozen=True)
class Evidence:
    """Quantities that are positive where the claim is true: overall and for single points."""

    whole: Array
    points: Sequence[tuple[Any, Array]] = ()
    measured: str = ""
    equivalence: bool = False  # then `whole` and `points` are signed gaps, to lie within ± `limit`
    limit: float = 0.0  # else `whole` is to exceed it; points only need the right sign
    looks: int = 1  # of how many quantities `whole` is the worst one

    @property
    def level(self) -> float:
        """The level at which the whole is judged."""
        return 1 - (1 - LEVEL) / self.looks


def judge(statement: Statement, table: Iterable[Mapping[str, Any]] | None) -> Verdict:
    """Return the verdict on one statement from the tidy table of its panel."""
    rows = None if table is None else list(table)
    if not rows:
        return Verdict(statement, OPEN, "its panel was not run")
    try:
        evidence = KINDS[statement.kind](statement, Lines.of(rows))
    except NotRun as missing:
        return Verdict(statement, OPEN, str(missing))
    if len(evidence.whole) < 2:
        return Verdict(statement, OPEN, f"{evidence.measured}; one repeat has no interval")
    n = max(len(evidence.points), 1)
    within = evidence.limit if evidence.equivalence else None
    whole = _speaks(evidence.whole, evidence.level, within)
    # Many points get many chances to err: each is held to its share of the error (Bonferroni).
    spoken = [(x, _speaks(gaps, 1 - (1 - LEVEL) / n, within)) for x, gaps in evidence.points]
    said = [where for _, where in spoken]
    if evidence.equivalence and set(said) == {"against"}:
        whole = "against"  # gaps that cancel in the mean are no equality
    enough = evidence.equivalence or interval(evidence.whole, evidence.level)[0] > evidence.limit
    if whole == "for" and enough and "against" not in said:
        verdict = HOLDS
    elif whole == "for" or (whole == "open" and "for" in said):
        verdict = PARTLY
    else:
        verdict = FAILS if whole == "against" or "against" in said else UNDECIDED
    return Verdict(statement, verdict, _in_words(evidence, whole), _counted(spoken))


def interval(gaps: Array, level: float = LEVEL) -> tuple[float, float]:
    """Return the t interval of a mean over repeats; without spread it is a point."""
    mean, n = float(np.mean(gaps)), len(gaps)
    half = float(stats.t.isf((1 - level) / 2, n - 1)) * float(np.std(gaps, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def _speaks(gaps: Array, level: float, within: float | None) -> Where:
    low, high = interval(gaps, level)
    if within is not None:
        return (
            "for"
            if -within <= low and high <= within
            else "against"
            if high < -within or low > within
            else "open"
        )
    return "for" if low > 0 else "against" if high < 0 else "open"


def _in_words(evidence: Evidence, whole: Where) -> str:
    low, high = interval(evidence.whole, evidence.level)
    sure = {
        "for": "clear",
        "against": "the opposite is clear",
        "open": f"not clear from {len(evidence.whole)} repeats",
    }
    said = sure[whole]
    if whole == "for" and not evidence.equivalence and low <= evidence.limit:
        said = f"clear, but not that it is {evidence.limit:g} or more"
    what = f"{100 * evidence.level:g} % interval" + (
        "" if evidence.equivalence else " in the claimed direction"
    )
    return f"{evidence.measured}; {what} {low:+.3g} to {high:+.3g}: {said}"


def _counted(spoken: Sequence[tuple[Any, Where]]) -> str:
    if not spoken:
        return ""
    words = []
    for where, what in (("for", "as claimed"), ("open", "undecided"), ("against", "opposite")):
        at = [x for x, said in spoken if said == where]
        if at:
            shown = f" ({', '.join(f'{x:g}' if isinstance(x, float) else str(x) for x in at)})"
            words.append(f"{len(at)} {what}" + (shown if where != "for" else ""))
    return f"of {len(spoken)} points: " + ", ".join(words)


# ------------------------------------------------------------------------------- kinds of statement


def _below(s: Statement, lines: Lines) -> Evidence:
    """Line `a` is below line `b`, by `margin` or more, at every x in the range."""
    xs, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    gaps = b - a
    measured = (
        f"{s.b} minus {s.a} is {gaps.mean():+.4g} on average "
        f"({a.mean():.4g} against {b.mean():.4g})"
    )
    return Evidence(gaps.mean(axis=0), list(zip(xs, gaps, strict=True)), measured, limit=s.margin)


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
    return Evidence(sign * _change(a), steps, f"{measured} at {xs[-1]:g}", limit=s.margin)


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
    return Evidence(_less_sure(first, last), [(xs[0], first), (xs[-1], last)], measured, looks=2)


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
    return Evidence(gaps, [(xs[i], a[place] - a[i]) for i in around], measured, limit=s.margin)


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
    return Evidence(_less_sure(first, last), [(xs[0], first), (xs[-1], last)], measured, looks=2)


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
    return Evidence(gaps, (), measured)


def _steadier(s: Statement, lines: Lines) -> Evidence:
    """Line `a` varies less between repeats than line `b`, by mean absolute deviation at each x."""
    xs, a = lines.get(s.a, s.x)
    _, b = lines.get(s.b, s.x)
    # Levene's: deviations are compared pair by pair, which needs no normal errors.
    gaps = np.abs(b - b.mean(axis=1, keepdims=True)) - np.abs(a - a.mean(axis=1, keepdims=True))
    spread = (
        [float(np.sqrt(one.var(axis=1, ddof=1).mean())) for one in (a, b)]
        if a.shape[1] > 1
        else [math.nan] * 2
    )
    measured = (
        f"standard deviation over repeats {spread[0]:.3g} for {s.a}, {spread[1]:.3g} for {s.b}"
    )
    return Evidence(gaps.mean(axis=0), list(zip(xs, gaps, strict=True)), measured)


KINDS: dict[str, Callable[[Statement, Lines], Evidence]] = {
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
}
