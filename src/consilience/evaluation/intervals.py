"""Confidence intervals: one function for each kind of number, used by everything that measures.

Every function takes the confidence level and returns a `Measure`: a value with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from consilience.privacy.mechanisms import Source

Array = NDArray[Any]


@dataclass(frozen=True)
class Measure:
    """A number with a confidence interval for its true value."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bootstrap:
    """How often a table of counts is drawn again, and from which randomness."""

    resamples: int
    source: Source

    def interval(
        self,
        counts: Array,
        statistic: Callable[[Array], Array],
        level: float,
        *,
        pivotal: bool = False,
    ) -> Measure:
        """Return the statistic of a table of counts, with the range it has in resampled tables.

        Drawing the cells of the table again is the same as drawing its records again, and takes
        time that does not grow with their number. A pivotal interval reflects the range around the
        value, which corrects a statistic that is biased upwards.
        """
        cells, n = counts.ravel(), int(counts.sum())
        drawn, left = np.zeros((self.resamples, cells.size)), np.full(self.resamples, float(n))
        mass = n
        for i in np.flatnonzero(cells):  # a multinomial draw is a chain of binomial draws
            share = cells[i] / mass
            uniform = self.source.uniform(self.resamples) if share < 1 else None
            drawn[:, i] = left if uniform is None else stats.binom.ppf(uniform, left, share)
            left, mass = left - drawn[:, i], mass - cells[i]
        value = float(statistic(counts[None])[0])
        low, high = np.quantile(
            statistic(drawn.reshape(self.resamples, *counts.shape)),
            ((1 - level) / 2, (1 + level) / 2),
        )
        if pivotal:
            low, high = max(0.0, 2 * value - high), max(0.0, 2 * value - low)
        return Measure(value, float(low), float(high))


def proportion(count: int, n: int, level: float) -> Measure:
    """Return count / n with the exact binomial interval of Clopper and Pearson."""
    interval = stats.binomtest(count, n).proportion_ci(level, method="exact")
    return Measure(count / n, float(interval.low), float(interval.high))


def mean(values: Array, level: float) -> Measure:
    """Return the mean with its normal interval; from a single value nothing is known."""
    value, n = float(values.mean()), len(values)
    half = (
        float(stats.norm.isf((1 - level) / 2) * values.std(ddof=1) / math.sqrt(n))
        if n > 1
        else math.inf
    )
    return Measure(value, value - half, value + half)


def mean_of_repeats(values: Array, overlap: float, level: float) -> Measure:
    """Return the mean over repeats with Student's interval, corrected for overlapping repeats.

    Repeats that divide the same records anew are not independent. Nadeau and Bengio (2003) add
    `overlap`, the number of test records over that of training records, to 1 / repeats.
    """
    value, n = float(values.mean()), len(values)
    if n < 2:
        return Measure(value, -math.inf, math.inf)
    spread = values.std(ddof=1) * math.sqrt(1 / n + overlap)
    half = float(stats.t.isf((1 - level) / 2, n - 1) * spread)
    return Measure(value, value - half, value + half)


def auc(parts: Array, codes: Array, level: float) -> Measure:
    """Return the AUC with DeLong's interval on the logit scale.

    `parts` are the records' parts in it, with the AUC as their mean within each class, and `codes`
    their classes. Where the variance says nothing (all pairs in order, or none, or a class with a
    single record) the interval is the exact one of as many independent pairs as the smallest class
    has records.
    """
    value = float(parts.mean())
    groups = [parts[codes == k] for k in np.unique(codes)]
    fewest = min(map(len, groups))
    variance = 0.0
    if fewest > 1:
        variance = sum(len(group) * group.var(ddof=1) for group in groups) / len(parts) ** 2
    if variance <= 1e-20 or not 0 < value < 1:
        exact = proportion(round(value * fewest), fewest, level)
        return Measure(value, min(exact.low, value), max(exact.high, value))
    half = float(stats.norm.isf((1 - level) / 2) * math.sqrt(variance) / (value * (1 - value)))
    middle = float(special.logit(value))
    return Measure(value, float(special.expit(middle - half)), float(special.expit(middle + half)))


def paired_shares(only_first: int, only_second: int, n: int, level: float) -> Measure:
    """Return the difference of two shares of the same records, by Bonett and Price (2012)."""
    z = float(stats.norm.isf((1 - level) / 2))
    up, down = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    value = (only_first - only_second) / n
    return Measure(value, max(-1.0, up - down - half), min(1.0, up - down + half))
