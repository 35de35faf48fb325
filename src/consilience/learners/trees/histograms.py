"""The compiled loops of trees: find bins, count records, send them down, look up leaves.

Counts are whole numbers, so that the order of summation does not matter. A complete tree of depth h
keeps its inner nodes in breadth-first order, node i with children 2i+1 and 2i+2, and its leaves
from left to right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.learners.compiled import compiled

Array = NDArray[Any]

STEPS = 1 << 16  # per record: impurities are rounded down to whole steps, so that they are exact


@compiled
def find_bins(X: Array, cuts: Array, widths: Array, missing: int, out: Array) -> None:
    """Write the number of cuts at or below each value; a missing one is below or above all.

    Cuts are padded with NaN, which is below nothing. Comparing with every cut is faster than a
    binary search: the loop has no branches to predict and runs in vector registers.
    """
    for i in range(X.shape[0]):
        for j in range(X.shape[1]):
            value, found = X[i, j], 0
            for c in range(cuts.shape[1]):
                found += cuts[j, c] <= value
            if missing == 1:
                found += value == value  # false if it is missing: NaN
            elif missing == 2 and value != value:
                found = widths[j] + 1
            out[i, j] = found


@compiled
def descend(
    codes: Array, feature: Array, last: Array, single: Array, level: int, node: Array
) -> None:
    """Send every record from its node at `level` to a child; nodes are counted within a level."""
    first = (1 << level) - 1
    for i in range(node.shape[0]):
        at = first + node[i]
        code = codes[i, feature[at]]
        left = code == last[at] if single[at] else code <= last[at]
        node[i] = 2 * node[i] + (0 if left else 1)


@compiled
def count(
    codes: Array, y: Array, weight: Array, node: Array, features: Array, counts: Array
) -> None:
    """Add each record's weight to `counts` (node, index of the feature, bin, class).

    A single weight holds for all records.
    """
    same = weight.shape[0] == 1
    for i in range(node.shape[0]):
        w = weight[0] if same else weight[i]
        at, k = node[i], y[i]
        for j in range(features.shape[0]):
            counts[at, j, codes[i, features[j]], k] += w


@compiled
def count_leaves(y: Array, weight: Array, node: Array, counts: Array) -> None:
    """Add each record's weight to `counts` (leaf, class)."""
    same = weight.shape[0] == 1
    for i in range(node.shape[0]):
        counts[node[i], y[i]] += weight[0] if same else weight[i]


@compiled
def _steps(part: Array) -> int:
    """Return ⌊STEPS · (n - Σ nₖ²/n)⌋ of a child's class counts, computed in whole numbers."""
    n, squares = 0, 0
    for k in range(part.shape[0]):
        n += part[k]
        squares += part[k] * part[k]
    if n == 0:
        return 0
    rest = n * n - squares
    return (rest // n) * STEPS + (rest % n) * STEPS // n


@compiled
def impurities(counts: Array, place: Array, last: Array, single: Array, out: Array) -> None:
    """Write the impurity of each node's candidate splits; those of a feature are consecutive."""
    n_bins, n_classes = counts.shape[2], counts.shape[3]
    left, right = np.zeros(n_classes, np.int64), np.zeros(n_classes, np.int64)
    whole = np.zeros(n_classes, np.int64)
    for at in range(counts.shape[0]):
        j = -1
        for c in range(place.shape[0]):
            if place[c] != j:
                j = place[c]
                whole[:] = 0
                left[:] = 0
                for b in range(n_bins):
                    for k in range(n_classes):
                        whole[k] += counts[at, j, b, k]
            for k in range(n_classes):
                here = counts[at, j, last[c], k]
                left[k] = here if single[c] else left[k] + here
                right[k] = whole[k] - left[k]
            out[at, c] = _steps(left) + _steps(right)


@compiled
def add_leaves(
    codes: Array, feature: Array, last: Array, single: Array, values: Array, out: Array
) -> None:
    """Add to `out` (record, class) the value of each tree's leaf; a row of each array is a tree."""
    n_inner = feature.shape[1]
    for i in range(codes.shape[0]):
        for tree in range(feature.shape[0]):
            at = 0
            while at < n_inner:
                code = codes[i, feature[tree, at]]
                left = code == last[tree, at] if single[tree, at] else code <= last[tree, at]
                at = 2 * at + (1 if left else 2)
            for k in range(out.shape[1]):
                out[i, k] += values[tree, at - n_inner, k]


@compiled
def wander(
    feature: Array,
    last: Array,
    single: Array,
    left: Array,
    sizes: Array,
    order: Array,
    draws: Array,
    leaf: Array,
) -> None:
    """Send imagined records down all trees, each in its `order`; write where they end in `leaf`.

    A record goes left with probability `left` (tree, inner node), unless its earlier answers leave
    only one side possible: `possible` holds the bins of each feature that they leave.
    """
    possible = np.ones((sizes.shape[0], sizes.max()), np.bool_)
    for i in range(leaf.shape[0]):
        possible[:] = True
        for tree in order[i]:
            at = 0
            for level in range(draws.shape[2]):
                bins, cut = possible[feature[tree, at]], last[tree, at]
                may_left, may_right = False, False
                for b in range(sizes[feature[tree, at]]):
                    goes_left = b == cut if single[tree, at] else b <= cut
                    may_left |= bins[b] and goes_left
                    may_right |= bins[b] and not goes_left
                goes = may_left
                if may_left and may_right:
                    goes = draws[i, tree, level] < left[tree, at]
                for b in range(sizes[feature[tree, at]]):
                    goes_left = b == cut if single[tree, at] else b <= cut
                    bins[b] &= goes_left == goes
                at = 2 * at + (1 if goes else 2)
            leaf[i, tree] = at - feature.shape[1]
