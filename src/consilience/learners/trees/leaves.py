"""What leaves say: class probabilities from noisy counts, and from many trees one decision.

All of it is computed from released counts and public facts, so it costs no budget. The variance of
the noise is known, and with it how far to trust a node: the fewer its records beside the noise, the
more it says what its ancestors say. The mean over trees that saw different features is too near the
base rate to decide by, so a forest's probabilities are sharpened; `NoisyLeaves` finds
out how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import check_random_state

if TYPE_CHECKING:
    from consilience.learners.trees.bins import Bins
    from consilience.learners.trees.forest import Shape

Array = NDArray[Any]

# How far a node's probabilities are assumed to lie from its parent's; noisy ones are shrunk to it.
SPREAD = 0.15
# The same, where what trees say is averaged, which removes noise, and then calibrated: trees that
# say more rank better. Chosen on the tables of benchmarks/forest_calibration.md.
WIDE_SPREAD = 0.4
# Where the spread is estimated: what is assumed beforehand as a part of p(1-p), and how many nodes'
# word that is worth.
PART, DOUBT = 0.09, 4
IMAGINED = 1000  # records of each class on which a forest is calibrated
ROUNDS = 3  # of fitting their weights to every tree; more change little
DRAWS = 1 << 20  # random numbers held at once
STAKE = 3e-4  # keeps the calibration finite where imagined classes are apart
NEWTON_STEPS = 20


def node_counts(leaves: Array) -> Iterator[tuple[int, Array]]:
    """Yield the height and the counts (tree, node, class) of each level, from the leaves up."""
    height = 0
    yield height, leaves
    while leaves.shape[1] > 1:
        leaves, height = leaves[:, ::2] + leaves[:, 1::2], height + 1
        yield height, leaves


def purity(counts: Array) -> Array:
    """Return Σ nₖ²/n of noisy counts."""
    positive = np.maximum(counts, 0.0)
    n = positive.sum(axis=2)
    return np.asarray(np.where(n > 0, (positive**2).sum(axis=2) / np.where(n > 0, n, 1.0), 0.0))


def probabilities(
    leaves: Array,
    variance: float,
    *,
    prune: bool = False,
    spread: float | None = SPREAD,
    pooled: bool = False,
) -> Array:
    """Estimate class probabilities from noisy counts (tree, leaf, class) of leaves and ancestors.

    From the root down, a node's shares are a mean of its own noisy ones and its parent's, each
    weighted by how well it is known: own shares of n records err by p(1-p)/n for their number and
    by variance/n² for their noise, the parent's by `spread`². Without a `spread`, that of each
    level is estimated from all its nodes, beyond what noise explains. `pooled` trees count the same
    records, or parts of them drawn at random, and have one root. With `prune`, nodes below which no
    split gained more than two standard deviations of its noise predict what their ancestor does.
    """
    levels = list(node_counts(leaves.astype(np.float64)))
    n_trees, n_classes = len(leaves), leaves.shape[2]
    kept = _kept(levels, variance) if prune else [np.ones(1, dtype=bool)] * len(levels)
    parent = np.full((n_trees, 1, n_classes), 1 / n_classes)
    for height, counts in reversed(levels):
        parent = np.repeat(parent, counts.shape[1] // parent.shape[1], axis=1)
        noise, root = variance * 2**height, counts.shape[1] == 1
        if pooled and root:
            counts = np.broadcast_to(counts.mean(axis=0), counts.shape)
            noise /= n_trees
        if spread is not None or root:
            apart: Array | float = (spread or WIDE_SPREAD) ** 2
        else:
            apart = _spread_of(counts, parent, noise)
        positive = np.maximum(counts, 0.0)
        n = positive.sum(axis=2, keepdims=True)
        own = np.where(n > 0, positive / np.where(n > 0, n, 1.0), parent)
        chance = (parent * (1 - parent)).mean(axis=2, keepdims=True) + 1e-3
        error = np.maximum(chance * n + noise, 1e-12)
        known = kept[height][..., None] * apart * n**2 / (apart * n**2 + error)
        parent = parent + known * (own - parent)
    return parent


def _kept(levels: list[tuple[int, Array]], variance: float) -> list[Array]:
    """Tell of each level which nodes stay apart from their parents."""
    kept = [np.ones(counts.shape[:2], dtype=bool) for _, counts in levels]
    for height, counts in levels[1:]:
        below = levels[height - 1][1]
        gain = purity(below)[:, ::2] + purity(below)[:, 1::2] - purity(counts)
        split = gain > 2 * math.sqrt(counts.shape[2] * variance * 2**height)
        if height > 1:
            # A node also stays split if one below it is.
            split |= kept[height - 2].reshape(*split.shape, 4).any(axis=2)
        kept[height - 1] = np.repeat(split, 2, axis=1)
    return kept


def _spread_of(counts: Array, parent: Array, noise: float) -> Array:
    """Return the mean square by which shares of a level's nodes differ from their parents'.

    As a part of each parent's p(1-p), so that rare classes differ by less.
    """
    n_classes, n = counts.shape[2], counts.sum(axis=2, keepdims=True)
    purities = (parent**2).sum(axis=2, keepdims=True)
    chance = np.maximum(n, 0.0) * (1 - purities)
    blur = noise * (n_classes - 2 + n_classes * purities)
    apart = ((counts - n * parent) ** 2).sum(axis=2, keepdims=True) - chance - blur
    size = (1 - purities) * max(float((n**2).mean()) - n_classes * noise, 1.0)
    number = apart.size
    part = (apart.sum() + DOUBT * PART * size.mean()) / ((number + DOUBT) * size.mean())
    return np.asarray(min(max(float(part), 0.0), 1.0) * (1 - purities) / n_classes)


@dataclass(frozen=True)
class Calibration:
    """How the mean of trees becomes a decision: p is proportional to mean^power · exp(offset)."""

    power: float
    offset: Array

    def apply(self, means: Array) -> Array:
        """Return the calibrated probabilities (record, class) of trees' mean ones."""
        return _softmax(self.power * _scores(means) + self.offset)

    @classmethod
    def fit(cls, means: Array, y: Array, weight: Array) -> Self:
        """Return the calibration that fits weighted records best, by Newton's method.

        At the optimum, each class is as probable on average as it is frequent.
        """
        scores, truth = _scores(means), np.eye(means.shape[1])[y]
        columns = np.concatenate(  # (record, class, parameter): the power, then the offsets
            [
                scores[..., None],
                np.broadcast_to(np.eye(scores.shape[1]), (*scores.shape, scores.shape[1])),
            ],
            axis=2,
        )
        start = np.concatenate([[1.0], np.zeros(scores.shape[1])])

        def loss(at: Array) -> tuple[float, Array]:
            p = _softmax(columns @ at)
            stake = STAKE * float(((at - start) ** 2).sum())
            return stake - float(weight @ np.log((p * truth).sum(axis=1) + 1e-300)), p

        at, (value, p) = start, loss(start)
        for _ in range(NEWTON_STEPS):
            slope = np.einsum("i,ik,ikj->j", weight, p - truth, columns) + 2 * STAKE * (at - start)
            mean = np.einsum("ik,ikj->ij", p, columns)
            curve = np.einsum("i,ik,ikj,ikl->jl", weight, p, columns, columns, optimize=True)
            curve += 2 * STAKE * np.eye(len(at)) - np.einsum("i,ij,il->jl", weight, mean, mean)
            step = np.linalg.solve(curve, slope)
            # At the optimum, rounding alone may raise the loss.
            while (found := loss(at - step))[0] > value + 1e-12 and np.abs(step).max() > 1e-9:
                step = step / 2
            at, (value, p) = at - step, found
            if np.abs(step).max() < 1e-9:
                break
        return cls(max(float(at[0]), 0.0), at[1:])  # it may not rank classes the other way round


def _scores(means: Array) -> Array:
    """Return logarithms of probabilities, centred for each record."""
    scores = np.log(np.maximum(means, 1e-12))
    return np.asarray(scores - scores.mean(axis=1, keepdims=True))


def _softmax(scores: Array) -> Array:
    said = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(said / said.sum(axis=1, keepdims=True))


def _imagine(shape: Shape, bins: Bins, target: Array) -> NDArray[np.int64]:
    """Return in which leaf of each tree imagined records of each class are: (class, record, tree).

    All classes are imagined by the same draws, so that their order does not matter.
    """
    from consilience.learners.trees.histograms import wander

    levels = [counts for _, counts in node_counts(target)]
    # Which part of an inner node's records goes left, for each class; nodes are breadth-first.
    left = np.concatenate(
        [
            below[:, ::2] / np.maximum(counts, 1e-300)
            for below, counts in zip(levels[-2::-1], levels[:0:-1], strict=True)
        ],
        axis=1,
    )
    used, place = np.unique(shape.feature, return_inverse=True)
    trees = place.reshape(shape.feature.shape), shape.last, shape.single
    generator, (n_trees, _, n_classes) = check_random_state(0), target.shape
    leaf = np.empty((n_classes, IMAGINED, n_trees), np.int64)
    rows = max(1, DRAWS // (n_trees * shape.depth))
    for first in range(0, IMAGINED, rows):
        part = leaf[:, first : first + rows]
        draws = generator.uniform(size=(part.shape[1], n_trees, shape.depth))
        order = generator.uniform(size=draws.shape[:2]).argsort(axis=1)
        for k in range(n_classes):
            wander(*trees, left[..., k].copy(), bins.sizes[used], order, draws, part[k])
    return leaf


@dataclass(frozen=True, eq=False)
class NoisyLeaves:
    """Released trees with noisy counts (tree, leaf, class), and what follows from them."""

    shape: Shape
    bins: Bins
    counts: Array
    variance: float
    prune: bool = False

    @cached_property
    def values(self) -> Array:
        """What each leaf adds to the mean of all trees."""
        said = probabilities(
            self.counts, self.variance, prune=self.prune, spread=WIDE_SPREAD, pooled=True
        )
        return said / len(said)

    @cached_property
    def calibration(self) -> Calibration:
        """How the mean of all trees becomes probabilities.

        It depends on how the trees agree, which is not in the counts: each is of one tree. So
        records are imagined that fall where the trees say. Each goes down all trees, in an order of
        its own, by the shares of its class, except where an earlier tree has settled the answer.
        Then weights make the imagined records as frequent in every leaf as the counts are. The
        randomness is public, and always the same.
        """
        believed = probabilities(self.counts, self.variance, spread=None, pooled=True)
        size = np.maximum(self.counts.sum(axis=2, dtype=np.float64), 0.0) + 1e-9
        target = size[..., None] * believed
        n_leaves, n_classes = target.shape[1:]
        roots = self.counts.sum(axis=1, keepdims=True)
        base = probabilities(roots, n_leaves * self.variance, spread=WIDE_SPREAD, pooled=True)
        target *= base / np.maximum(target.sum(axis=1, keepdims=True), 1e-300)
        y = np.repeat(np.arange(n_classes), IMAGINED)
        leaf = _imagine(self.shape, self.bins, target).reshape(len(y), -1)
        weight = base[0, 0, y] / IMAGINED
        for _ in range(ROUNDS):
            for at, wanted in zip((leaf * n_classes + y[:, None]).T, target, strict=True):
                held = np.bincount(at, weight, n_leaves * n_classes)
                weight = weight * np.clip(wanted.ravel() / np.maximum(held, 1e-12), 0.2, 5.0)[at]
                weight /= weight.sum()
        means = self.values[np.arange(len(leaf.T)), leaf].sum(axis=1)
        return Calibration.fit(means, y, weight)

    def predict(self, codes: Array) -> Array:
        """Return each class' probability for records by the numbers of their bins."""
        means = np.zeros((len(codes), self.counts.shape[2]))
        return self.calibration.apply(self.shape.add_up(codes, self.values, means))
