"""Members that are unlike the others are named, and honest ones hardly ever are."""

import numpy as np
import pytest

from bounded import PrivateRidge
from consilience import (
    Noise,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
)
from consilience.aggregators.average import Average
from consilience.aggregators.members import as_members
from consilience.aggregators.outliers import find_far, find_heavy
from consilience.aggregators.votes import WeightedVote
from consilience.tables.public import Public


def table(n, seed, flip=False):
    source = Noise(seed=seed).open()
    X = 2 * source.uniform(3 * n).reshape(n, 3) - 1
    return X, ((X[:, 0] + X[:, 1] > 0) ^ flip).astype(int)


def linear(seed, epsilon=1.0, n=300, flip=False):
    learner = PrivateLogisticRegression(
        epsilon=epsilon, regularization=1e-2, classes=[0, 1], noise=Noise(seed=seed)
    )
    return learner.fit(*table(n, seed, flip))


def forest(seed, flip=False, epsilon=2.0, n=800):
    learner = PrivateForestClassifier(
        epsilon=epsilon, classes=[0, 1], bounds=(-1, 1), noise=Noise(seed=seed), random_state=seed
    )
    return learner.fit(*table(n, seed, flip))


def far(members, aggregator, *records):
    ensemble = aggregator.combine(members)
    return find_heavy(ensemble) | find_far(members, *records)


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


@pytest.mark.parametrize(("epsilon", "n"), [(1.0, 200), (0.5, 100), (0.1, 1000)])
def test_honest_forests_are_not_named_for_their_noise(epsilon, n):
    """They err in whole leaves, which varies far more than the choice of public records does."""
    public = Public(table(1000, 999)[0])
    for seed in range(0, 120, 6):
        members = [forest(seed + i, epsilon=epsilon, n=n) for i in range(6)]
        assert find_far(members, public) == {}


def test_a_member_with_most_of_the_weight_is_named():
    members = [linear(seed, n=n) for seed, n in enumerate((100, 100, 3000))]
    (text,) = far(members, Average("size")).values()
    assert "94%" in text
    assert far(members[1:], Average("size")) == {}  # of two, one always has more
    assert np.argmax(Average("size").combine(members).weights) == 2


@pytest.mark.parametrize("learner", [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge])
def test_one_wrong_coefficient_among_many_is_named_with_its_column(learner):
    """Averaged over 60 coefficients the change is small."""
    settings = {} if learner is PrivateRidge else {"classes": [0, 1]}
    members = []
    for seed in range(8):
        source = Noise(seed=seed).open()
        X = (2 * source.uniform(60 * 600).reshape(600, 60) - 1) / 8
        y = (X[:, 0] + X[:, 1] > 0).astype(int)
        members.append(learner(epsilon=5.0, noise=Noise(seed=seed), **settings).fit(X, y))
    names = [f"measure {i}" for i in range(60)]
    assert find_far(members, names=names) == {}
    noise = as_members(members)[3]
    deviation = noise.to_user * noise.noise_variance() ** 0.5
    changed = np.array(members[3].coef_)
    changed.reshape(-1)[17] += 25 * deviation  # less than 5 in the root mean square of all 61
    members[3].coef_ = changed
    for given, title in ((names, "coefficient of 'measure 17'"), ([], "coefficient of 18")):
        (place, text), *more = find_far(members, names=given).items()
        assert (place, more) == (3, [])
        assert title in text


@pytest.mark.parametrize("data_norm", [1.0, 1000.0])
def test_the_constant_is_compared_on_the_scale_of_its_noise(data_norm):
    for seed in range(0, 60, 3):
        members = []
        for i in range(3):
            X, y = table(200, seed + i)
            learner = PrivateLogisticRegression(
                epsilon=0.05, classes=[0, 1], data_norm=data_norm, noise=Noise(seed=seed + i)
            )
            members.append(learner.fit(data_norm * X, y))
        assert far(members, Average("equal")) == {}


@pytest.mark.parametrize("learner", [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge])
def test_labelled_records_show_a_model_that_no_likely_noise_makes_of_such_records(learner):
    """It is no farther from the others than its noise allows, and the opposite of them."""
    settings = {} if learner is PrivateRidge else {"classes": [0, 1]}
    settings |= {**learner.first_settings, "epsilon": 0.5, "regularization": 1e-4}
    members = []
    for seed in range(4):
        fitted = learner(noise=Noise(seed=seed), **settings)
        members.append(fitted.fit(*table(2000, seed)))
    X, y = table(1000, 99)
    assert find_far(members, Public(X, y)) == {}
    members[1].coef_ = -members[1].coef_
    assert find_far(members) == {}
    (place, text), *more = find_far(members, Public(X[:30], y[:30]), Public(X, y)).items()
    assert (place, more) == (1, [])
    assert "Were its records like the public ones" in text
    assert find_far(members, Public(X), Public(X[:100], y[:100])) == {}  # too few labels


def test_sites_whose_records_all_differ_from_the_public_ones_are_not_named():
    members = [linear(seed, 5.0, n=1000) for seed in range(4)]
    X, y = table(1000, 99)
    assert find_far(members, Public(X, 1 - y)) == {}


def test_a_wrong_guess_of_a_hidden_number_of_records_is_no_alert():
    members = []
    for seed, n in enumerate((300, 4000, 4000, 4000)):
        learner = PrivateLogisticRegression(
            epsilon=5.0, classes=[0, 1], neighbours="add-remove", public_size=4000
        )
        learner.set_params(noise=Noise(seed=seed), regularization=0.1)
        members.append(learner.fit(*table(n, seed)))
    # Its coefficients are shorter than the others', which is another alert.
    assert "Were its records" not in str(find_far(members, Public(*table(1000, 99))))
