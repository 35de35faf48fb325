"""Compare draws with the law that they should follow.

Each check rejects a correct sampler once in a million.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from consilience.auditing.report import Check

Array = NDArray[np.float64]


def check_radial(draws: ArrayLike, *, scale: float) -> tuple[Check, ...]:
    """Compare vectors (draw, coordinate) with the density ∝ exp(-‖b‖/scale).

    Their radius has a Gamma law and their direction is uniform.
    """
    b = np.asarray(draws, dtype=np.float64)
    radius = np.sqrt(np.square(b).sum(axis=1))
    size = Check(
        "radius is Gamma",
        float(stats.kstest(radius, stats.gamma(b.shape[1], scale=scale).cdf).pvalue),
    )
    return (size, *_check_direction(b, radius))


def check_gaussian(draws: ArrayLike, *, sigma: float) -> tuple[Check, ...]:
    """Compare vectors (draw, coordinate) with independent N(0, sigma²)."""
    b = np.asarray(draws, dtype=np.float64)
    radius = np.sqrt(np.square(b).sum(axis=1))
    size = Check(
        "radius is chi", float(stats.kstest(radius, stats.chi(b.shape[1], scale=sigma).cdf).pvalue)
    )
    return (size, *_check_direction(b, radius))


def _check_direction(b: Array, radius: Array) -> tuple[Check, ...]:
    positive = int((b > 0).sum())  # coordinates of a uniform direction have independent signs
    signs = Check("signs are even", float(stats.binomtest(positive, b.size).pvalue))
    if b.shape[1] == 1:
        return (signs,)
    share = np.square(b[:, 0] / np.where(radius > 0, radius, 1.0))
    beta = stats.beta(0.5, (b.shape[1] - 1) / 2)
    return signs, Check("direction is uniform", float(stats.kstest(share, beta.cdf).pvalue))


def check_frequencies(counts: ArrayLike, probabilities: ArrayLike) -> Check:
    """Compare counts of outcomes with their exact probabilities by a chi-square test.

    Rare outcomes are counted together.
    """
    seen, expected = (
        np.asarray(counts, dtype=np.float64),
        np.asarray(probabilities, dtype=np.float64),
    )
    n = seen.sum()
    expected = expected * n
    rare = expected < 10
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], n - expected[~rare].sum())
    if expected[-1] < 10:  # too little for a cell of its own: the most common outcome takes it
        most = int(np.argmax(expected[:-1]))
        seen[most] += seen[-1]
        expected[most] += expected[-1]
        seen, expected = seen[:-1], expected[:-1]
    statistic = float((np.square(seen - expected) / expected).sum())
    return Check("frequencies are exact", float(stats.chi2.sf(statistic, max(1, len(seen) - 1))))
