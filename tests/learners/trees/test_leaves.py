"""Leaves: what noisy counts say, against definitions, limits and worlds whose truth is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience import Noise
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import Shape
from consilience.learners.trees.leaves import (
    WIDE_SPREAD,
    Calibration,
    NoisyLeaves,
    node_counts,
    probabilities,
)

WAYS = [{}, {"spread": WIDE_SPREAD, "pooled": True}, {"spread": None, "pooled": True}]

# --------------------------------------------------------------------------------------- shrinkage


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(-50, 500), min_size=24, max_size=24),
    variance=st.sampled_from([0.0, 1.0, 400.0, 1e12]),
    prune=st.booleans(),
)
def test_leaves_say_probabilities_whatever_the_counts(counts, variance, prune, way):
    said = probabilities(np.array(counts).reshape(2, 4, 3), variance, prune=prune, **way)
    assert (said >= 0).all()
    np.testing.assert_allclose(said.sum(axis=2), 1.0)
    if variance == 1e12:
        np.testing.assert_allclose(said, 1 / 3, atol=1e-3)  # nothing is known, so nothing is said


def test_branches_that_drown_in_noise_are_pruned_and_others_kept():
    counts = np.array([[[400, 10], [10, 400], [90, 110], [110, 90]]])
    grown, pruned = (probabilities(counts, 900.0, prune=prune) for prune in (False, True))
    assert np.array_equal(pruned[0, :2], grown[0, :2])
    assert np.array_equal(pruned[0, 2], pruned[0, 3])
    assert not np.array_equal(grown[0, 2], grown[0, 3])


def test_a_split_that_gains_nothing_is_kept_for_one_below_that_does():
    # Neither half is purer than the whole; only the quarters of the left half are.
    counts = np.array([[[400, 0], [0, 400], [200, 200], [201, 199]]])
    pruned = probabilities(counts, 100.0, prune=True)
    assert pruned[0, 0, 0] > 0.9 > 0.1 > pruned[0, 1, 0]
    assert np.array_equal(pruned[0, 2], pruned[0, 3])
    flat = probabilities(
        np.array([[[200, 200], [201, 199], [199, 201], [200, 200]]]), 100.0, prune=True
    )
    assert np.ptp(flat, axis=1).max() == 0
    deep = np.zeros((1, 16, 2), np.int64)
    deep[0, :, 0] = deep[0, :, 1] = 50
    deep[0, 6:8] = [[300, 0], [0, 300]]
    said = probabilities(deep, 10.0, prune=True)[0, :, 0]
    assert said[6] > 0.9 > 0.1 > said[7]
    assert len(np.unique(said[8:])) == 1


@pytest.mark.parametrize("way", WAYS)
def test_without_noise_large_leaves_say_their_own_shares(way):
    counts = np.array([[[900_000, 100_000], [200_000, 800_000]], [[600_000, 400_000]] * 2])
    counts[1, 0] = [500_000, 500_000]
    own = counts / counts.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(probabilities(counts, 0.0, **way), own, atol=1e-3)


def test_in_endless_noise_every_leaf_says_the_base_rate():
    """Many trees know the base rate well even where no leaf is known."""
    source = Noise(seed=0).open()
    exact = np.tile([[4000, 1000], [2000, 5000]], (4000, 1, 1))
    noisy = exact + np.rint(1e4 * source.normal(exact.size)).reshape(exact.shape)
    said = probabilities(noisy, 1e8, spread=None, pooled=True)
    np.testing.assert_allclose(said, 0.5, atol=0.05)
    assert said.std(axis=(0, 1)).max() < 0.03
    for way in WAYS:
        assert np.ptp(probabilities(noisy, 1e14, **way), axis=(0, 1)).max() < 1e-4


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(0, 300), min_size=24, max_size=24),
    variance=st.sampled_from([0.0, 25.0, 1e4]),
    place=st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 2)),
)
def test_a_record_of_another_class_moves_its_leaf_towards_that_class(counts, variance, place):
    before = np.array(counts).reshape(2, 4, 3)
    tree, leaf, k = place
    after = before.copy()
    other = (k + 1) % 3
    moved = min(5, int(after[tree, leaf, other]))
    after[tree, leaf, other] -= moved
    after[tree, leaf, k] += moved
    for way in WAYS[:2]:
        was, is_now = (probabilities(some, variance, **way)[place] for some in (before, after))
        assert is_now >= was - 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_more_noise_moves_a_leaf_from_its_own_share_to_its_ancestors(way):
    counts = np.tile([[90, 10], [50, 50], [10, 90], [50, 50]], (3, 1, 1))
    said = [probabilities(counts, v, **way)[0, 0, 0] for v in (0.0, 25.0, 400.0, 1e6)]
    assert said == sorted(said, reverse=True)
    assert said[0] > 0.8
    assert said[-1] < 0.6


def test_the_spread_is_estimated_by_the_noise_that_was_declared():
    """Leaves whose shares differ by 0.1: the estimate beats no shrinking, and all shrinking, and
    an estimate that believes in no noise.
    """
    source = Noise(seed=1).open()
    truth = 0.3 + 0.1 * np.where(source.uniform(800) < 0.5, -1, 1).reshape(400, 2)
    exact = 200 * np.stack([1 - truth, truth], axis=2)
    noisy = np.rint(exact + 30 * source.normal(exact.size).reshape(exact.shape))

    def miss(said):
        return np.mean((said - truth) ** 2)

    estimated = miss(probabilities(noisy, 900.0, spread=None, pooled=True)[..., 1])
    assert estimated < 0.8 * miss(np.maximum(noisy, 0)[..., 1] / np.maximum(noisy.sum(axis=2), 1))
    assert estimated < 0.8 * miss(0.3)
    assert estimated < 0.9 * miss(probabilities(noisy, 0.0, spread=None, pooled=True)[..., 1])


def test_pooled_trees_have_one_root():
    counts = np.array([[[100, 0]], [[0, 100]], [[50, 50]]])
    apart = probabilities(counts, 1.0)
    assert apart[0, 0, 0] > 0.8 > 0.2 > apart[1, 0, 0]
    assert np.allclose(probabilities(counts, 1.0, pooled=True), 0.5)


# ------------------------------------------------------------------------------------- calibration


def stumps(features):
    """Return trees of one split each, on these features of two bins."""
    feature = np.array(features)[:, None]
    return Shape(feature, np.zeros_like(feature), np.zeros(feature.shape, bool))


COINS = Bins([[0.5]] * 6)
LIKELY = np.array([[0.7, 0.3], [0.3, 0.7]])  # of a feature, in each class


def counted(features, base, n=1_000_000):
    """Return exact counts (tree, leaf, class) of features that are independent in each class."""
    return np.array([np.rint(n * LIKELY * np.array(base)) for _ in features])


def posterior(codes, base):
    """Return Bayes' probabilities where features are independent in each class."""
    joint = np.array(base) * LIKELY[codes].prod(axis=1)
    return joint / joint.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("base", [(0.5, 0.5), (0.85, 0.15)])
def test_trees_on_independent_features_are_calibrated_to_bayes_rule(base):
    features = list(range(6))
    leaves = NoisyLeaves(stumps(features), COINS, counted(features, base), 0.0)
    codes = (np.arange(64)[:, None] >> np.arange(6) & 1).astype(np.uint8)
    truth, said = posterior(codes, base), leaves.predict(codes)
    np.testing.assert_allclose(said.sum(axis=1), 1.0)
    assert np.abs(said - truth).max() < 0.12
    mean = leaves.shape.add_up(codes, leaves.values, np.zeros((64, 2)))
    assert np.abs(mean - truth).max() > 0.2  # which the mean of the trees is far from


def test_copies_of_one_tree_are_not_taken_for_more_than_one():
    leaves = NoisyLeaves(stumps([2] * 6), COINS, counted([2] * 6, (0.6, 0.4)), 0.0)
    assert leaves.calibration.power == pytest.approx(1.0, abs=0.1)
    codes = np.array([[0] * 6, [1] * 6], np.uint8)
    np.testing.assert_allclose(
        leaves.predict(codes), posterior(codes[:, :1], (0.6, 0.4)), atol=0.03
    )


def test_classes_are_predicted_as_often_as_they_occur():
    source, base = Noise(seed=2).open(), (0.7, 0.3)
    features = list(range(6))
    noisy = counted(features, base, n=20_000)
    noisy = np.rint(noisy + 100 * source.normal(noisy.size).reshape(noisy.shape))
    leaves = NoisyLeaves(stumps(features), COINS, noisy, 1e4)
    codes = np.concatenate(
        [
            (source.uniform(6 * n).reshape(n, 6) < LIKELY[1, k]).astype(np.uint8)
            for k, n in ((0, 7000), (1, 3000))
        ]
    )
    assert leaves.predict(codes).mean(axis=0) == pytest.approx(base, abs=0.03)


def test_in_endless_noise_a_forest_says_one_thing_to_all():
    source, features = Noise(seed=5).open(), list(range(6))
    noisy = np.rint(1e6 * source.normal(24)).reshape(6, 2, 2)
    leaves = NoisyLeaves(stumps(features), COINS, noisy, 1e16)
    codes = (np.arange(64)[:, None] >> np.arange(6) & 1).astype(np.uint8)
    assert np.ptp(leaves.predict(codes), axis=0).max() < 1e-3


def test_categories_and_deep_trees_lead_every_imagined_record_to_one_place():
    """A later tree asks what an earlier one settled: all imagined records answer alike."""
    bins = Bins([[1, 2, 3]], categorical=[True])
    feature = np.zeros((2, 3), np.int64)
    last = np.array([[0, 1, 1], [1, 0, 0]])
    shape = Shape.on(bins, feature, last)
    # Leaves of the first tree: nothing, {0}, {1}, {2, 3}; of the second: nothing, {1}, {0}, {2, 3}.
    counts = np.zeros((2, 4, 2), np.int64)
    counts[0, 1:] = [[90_000, 10_000], [10_000, 90_000], [50_000, 50_000]]
    counts[1, 1:] = counts[0, [2, 1, 3]]
    leaves = NoisyLeaves(shape, bins, counts, 0.0)
    said = leaves.predict(np.array([[0], [1], [2], [3]], np.uint8))[:, 0]
    np.testing.assert_allclose(said, [0.9, 0.1, 0.5, 0.5], atol=0.03)


def test_a_calibration_finds_the_power_and_the_offset_that_made_the_records():
    source = Noise(seed=4).open()
    means = source.uniform(60_000).reshape(20_000, 3)
    means /= means.sum(axis=1, keepdims=True)
    truth = Calibration(2.5, np.array([0.5, 0.0, -0.5]))
    p = truth.apply(means)
    y = (source.uniform(20_000)[:, None] > p.cumsum(axis=1)).sum(axis=1).clip(max=2)
    weight = np.full(20_000, 1 / 20_000)
    found = Calibration.fit(means, y, weight)
    assert found.power == pytest.approx(2.5, abs=0.15)
    np.testing.assert_allclose(found.offset, truth.offset, atol=0.1)
    shares = np.bincount(y) / len(y)
    np.testing.assert_allclose(found.apply(means).mean(axis=0), shares, atol=1e-3)
    best, near = (Calibration(found.power * by, found.offset).apply(means) for by in (1, 1.2))
    assert np.log(best)[np.arange(20_000), y].mean() > np.log(near)[np.arange(20_000), y].mean()


def test_levels_add_up():
    levels = list(node_counts(np.arange(16).reshape(1, 8, 2)))
    assert [height for height, _ in levels] == [0, 1, 2, 3]
    assert all((counts.sum(axis=1) == [56, 64]).all() for _, counts in levels)
