"""Ordered bins as features: what a linear learner needs to fit a shape with steps.

A column that is cut into k bins becomes k features. Only the products of two bins' features matter
to a linear learner with a ridge. Here bins i and j have

    .7·(1 − 2|i − j| / (k − 1)) + .3·[i = j].

The first part is that of the k − 1 questions "is the value at or beyond this cut?", answered by ±1:
a ridge then keeps every step from bin to bin small. The second is that of k marks, one for each
bin, which lets a single bin differ from its neighbours. Together they would be 2k − 1 features. The
rows of the lower triangular factor have the same products, with k features.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

STEPS = 0.7  # the share of the questions; the rest is that of the marks
MOST_BINS = 100  # of a column: features, and so noise, grow with them


@cache
def bin_features(n_bins: int) -> NDArray[np.float64]:
    """Return the features of each bin, (bin, feature); every row has the length 1.

    The first feature falls from bin to bin, so that a tree can split at every cut by it alone.
    """
    apart = np.abs(np.subtract.outer(np.arange(n_bins), np.arange(n_bins)))
    products = STEPS * (1 - 2 * apart / (n_bins - 1)) + (1 - STEPS) * np.eye(n_bins)
    # Cholesky's factor, column by column. A library's would round differently elsewhere, and sites
    # would encode the same record differently.
    rows = np.zeros_like(products)
    for j in range(n_bins):
        rest = products[j:, j].copy()
        for earlier in range(j):
            rest -= rows[j:, earlier] * rows[j, earlier]
        rows[j:, j] = rest / np.sqrt(rest[0])
    rows.flags.writeable = False
    return rows
