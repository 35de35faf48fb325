"""What the literal trees of Xiang et al. 2018 lose, computed exactly (docs/decisions/0009)."""

import itertools
import math

import numpy as np
import pytest

from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import (
    PrivateTreeClassifier,
    TreeTask,
    candidates_of,
    plan_trees,
)
from consilience.learners.trees.histograms import STEPS, count, impurities

EPSILON = 1.0
# One more record, (9, 0) of class 0, makes feature 1 the better one to split on.
X = np.array([[1.0, 1.0], [2.0, 9.0], [8.0, 2.0], [9.0, 8.0]])
y = np.array([0, 0, 1, 1])
MORE_X, MORE_Y = np.vstack([X, [[9.0, 0.0]], [[9.0, 0.0]], [[9.0, 0.0]]]), np.append(y, [0, 0, 0])


def gini(labels):
    return 1 - sum(np.mean(labels == k) ** 2 for k in (0, 1)) if len(labels) else 0.0


def literal_split(X, y):
    """The paper's choice: the feature and midpoint of least weighted Gini, no noise."""
    found = []
    for feature in range(X.shape[1]):
        values = np.unique(X[:, feature])
        for cut in (values[1:] + values[:-1]) / 2:
            left = X[:, feature] <= cut
            found.append(
                (left.mean() * gini(y[left]) + (~left).mean() * gini(y[~left]), feature, float(cut))
            )
    return min(found)[1:]


def literal_feature_probability(X, y, feature):
    return 1.0 if literal_split(X, y)[0] == feature else 0.0


def test_the_literal_tree_splits_on_another_feature_with_certainty():
    path = [literal_split(MORE_X[:n], MORE_Y[:n])[0] for n in range(4, 8)]
    change = next(n for n, (a, b) in enumerate(itertools.pairwise(path)) if a != b)
    D, E = 4 + change, 5 + change  # neighbours: one record more
    with np.errstate(divide="ignore"):
        loss = np.log(literal_feature_probability(MORE_X[:D], MORE_Y[:D], path[change])) - np.log(
            literal_feature_probability(MORE_X[:E], MORE_Y[:E], path[change])
        )
    assert loss == math.inf


def test_the_literal_threshold_moves_by_the_range_of_the_feature():
    # One feature on [0, 10]; the last record moves the best midpoint from one end to the other.
    low, high = np.array([0.0, 0.2, 9.8, 10.0]), np.array([0, 1, 1, 1])
    other = np.array([1, 1, 1, 0])
    cuts = [literal_split(low[:, None], labels)[1] for labels in (high, other)]
    # Laplace(1/ε) around each: the largest loss is ε times the distance.
    loss = EPSILON * abs(cuts[0] - cuts[1])
    assert loss > 9 * EPSILON
    # Two replaced labels apart, so even the group privacy of two records, 2ε, is broken.
    assert loss > 2 * EPSILON


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_noise_on_a_label_is_no_noise_on_a_majority(noise):
    """floor(Laplace) added to label 0 or 1 has a loss of 1/scale for one changed majority.

    The counts do not matter: a majority of one record and one of a thousand are equally visible.
    """
    scale = noise
    grid = np.arange(-200, 201)

    def floor_laplace(k):  # Pr[floor(L) = k]
        def cdf(t):
            return np.where(t < 0, np.exp(t / scale) / 2, 1 - np.exp(-t / scale) / 2)

        return cdf(k + 1.0) - cdf(k * 1.0)

    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.nanmax(
            np.abs(np.log(floor_laplace(grid[50:-50])) - np.log(floor_laplace(grid[50:-50] - 1)))
        )
    # The claimed budget of a leaf at height 4 is ε/2^9 (a quarter per level, half of it for the
    # leaf).
    claimed = EPSILON / 2**9
    assert loss > 100 * claimed


def exact_root_probabilities(X, y):
    bins = Bins.even(0, 10, n_features=X.shape[1], n_bins=5)
    features = np.arange(X.shape[1])
    _, place, last, single = candidates_of(bins, features)
    task = TreeTask(bins.codes(X), y.astype(np.int64), 2)
    tree = PrivateTreeClassifier(epsilon=EPSILON, max_depth=1, split_share=0.5)
    plan = plan_trees(tree, depth=1, runs=1)
    counts = np.zeros((1, len(features), 5, 2), np.int64)
    count(task.codes, task.y, np.ones(1, np.int64), np.zeros(len(y), np.int64), features, counts)
    steps = np.empty((1, len(place)), np.int64)
    impurities(counts, place, last, single, steps)
    weights = np.exp(-steps[0] / (STEPS * plan.selections[0].scale))
    return weights / weights.sum(), plan.selections[0].epsilon


def test_our_root_on_the_same_records_keeps_its_promise():
    for n in range(1, len(MORE_Y)):
        p, epsilon = exact_root_probabilities(MORE_X[:n], MORE_Y[:n])
        q, _ = exact_root_probabilities(MORE_X[: n + 1], MORE_Y[: n + 1])
        assert np.abs(np.log(p / q)).max() <= epsilon * (1 + 1e-9)
