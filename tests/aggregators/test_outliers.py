"""Members that are unlike the others are named, and honest ones hardly ever are."""

import numpy as np
import pytest

from consilience import Noise, PrivateForestClassifier, PrivateLogisticRegression
from consilience.aggregators.average import Average
from consilience.aggregators.outliers import find_far
from consilience.aggregators.votes import WeightedVote
from consilience.tables.public import Public


def table(n, seed, flip=False):
    source = Noise(seed=seed).open()
    X = 2 * source.uniform(3 * n).reshape(n, 3) - 1
    return X, ((X[:, 0] + X[:, 1] > 0) ^ flip).astype(int)


def linear(seed, epsilon=1.0, n=300, flip=False):
    learner = PrivateLogisticRegression(epsilon=epsilon, classes=[0, 1], noise=Noise(seed=seed))
    return learner.fit(*table(n, seed, flip))


def forest(seed, flip=False):
    learner = PrivateForestClassifier(
        epsilon=2.0, classes=[0, 1], bounds=(-1, 1), noise=Noise(seed=seed), random_state=seed
    )
    return learner.fit(*table(800, seed, flip))


def far(members, aggregator, *records):
    return find_far(members, aggregator.combine(members), *records)


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 20.0])
def test_honest_members_are_not_named_whatever_their_noise(epsilon):
    for seed in range(0, 80, 4):
        members = [linear(seed + i, epsilon, n=100 * (i + 1)) for i in range(4)]
        assert far(members, Average("equal")) == {}


def test_coefficients_far_beyond_their_noise_are_named():
    members = [linear(seed, 20.0) for seed in range(4)]
    members[2].coef_ = -1000 * members[2].coef_
    (place, text), *more = far(members, Average("equal")).items()
    assert (place, more) == (2, [])
    assert "median" in text


def test_trees_that_contradict_the_others_on_public_records_are_named():
    members = [forest(seed, flip=seed == 1) for seed in range(4)]
    public = Public(table(300, 99)[0])
    assert list(far(members, WeightedVote("equal"), None, public)) == [1]
    assert far(members, WeightedVote("equal")) == {}  # nothing to ask them about
    assert far([forest(seed) for seed in range(4)], WeightedVote("equal"), public) == {}


def test_a_member_with_most_of_the_weight_is_named():
    members = [linear(seed, n=n) for seed, n in enumerate((100, 100, 3000))]
    (text,) = far(members, Average("size")).values()
    assert "94%" in text
    assert far(members[1:], Average("size")) == {}  # of two, one always has more
    assert np.argmax(Average("size").combine(members).weights) == 2
