"""How much of a noisy vector is signal: empirical Bayes with noise that is known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize_scalar

from consilience.statistics.base import Array

UNEVEN = 0.3  # the square of a label's mean, up to which classes are usually uneven


def likeliest_spread(along: Array, curvature: Array, scatter: Array, most: float) -> float:
    """Return the τ² at which numbers N(0, h²τ² + scatter) are most likely, over all rows.

    It is no more than `most`, which is public: few numbers of wide noise may suggest anything.
    """

    def unlikely(log_spread: float) -> float:
        variance = np.square(curvature) * math.exp(log_spread) + scatter
        return float(np.sum(np.log(variance) + np.square(along) / variance))

    high = math.log(most)
    return math.exp(minimize_in_steps(unlikely, high - 24.0, high))


def shrink_means(means: Array, noise: float, most: float = math.inf) -> Array:
    """Return what is likely left of means without noise of that variance.

    Their own variance is what exceeds the noise, at most `most`.
    """
    own = min(max(float(np.square(means).mean()) - noise, 0.0), most)
    return means * own / max(own + noise, 1e-300)


def minimize_in_steps(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function of one number is least: on a grid first, then between its steps."""
    grid = np.linspace(low, high, 57)
    best = int(np.argmin([function(float(at)) for at in grid]))
    ends = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    return float(minimize_scalar(function, bounds=ends, method="bounded").x)
