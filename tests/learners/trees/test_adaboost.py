import itertools
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from sklearn.ensemble import AdaBoostClassifier
from sklearn.tree import DecisionTreeClassifier

from consilience import Noise
from consilience.errors import SettingsError
from consilience.learners.trees import adaboost
from consilience.learners.trees.adaboost import GRAIN, PrivateAdaBoostClassifier
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import TreeTask, candidates_of, leaf_counts, random_trees
from consilience.learners.trees.histograms import STEPS, count, impurities
from consilience.privacy.accounting import DiscreteGaussian, Laplace


def made_up(n=4000, n_classes=2, seed=0):
    source = Noise(seed=seed).open()
    X = source.uniform(3 * n).reshape(n, 3)
    score = X[:, 0] + X[:, 1] ** 2 + 0.2 * source.normal(n)
    return X, np.searchsorted(np.quantile(score, np.arange(1, n_classes) / n_classes), score)


@pytest.mark.parametrize("algorithm", ["real", "discrete"])
@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_it_learns_within_its_budget(algorithm, n_classes, delta):
    X, y = made_up(n_classes=n_classes)
    model = PrivateAdaBoostClassifier(
        epsilon=4.0, delta=delta, algorithm=algorithm, bounds=(0, 1), classes=range(n_classes)
    ).fit(X, y)
    assert model.guarantee_.holds
    assert model.guarantee_.epsilon == pytest.approx(4.0, rel=1e-9)
    assert model.guarantee_.epsilon <= 4.0
    assert model.guarantee_.delta == delta
    assert model.score(X, y) > (0.75 if n_classes == 2 else 0.6)
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1.0)


def test_without_noise_it_does_as_well_as_the_textbook():
    X, y = made_up(8000)
    test, labels = made_up(4000, seed=1)
    ours = PrivateAdaBoostClassifier(
        epsilon=math.inf, n_rounds=20, bounds=(0, 1), classes=[0, 1]
    ).fit(X, y)
    theirs = AdaBoostClassifier(DecisionTreeClassifier(max_depth=2), n_estimators=20).fit(X, y)
    assert ours.score(test, labels) > theirs.score(test, labels) - 0.01
    assert math.isinf(ours.guarantee_.epsilon)


def test_a_weight_depends_on_its_own_record_alone():
    source = Noise(seed=1).open()
    scores, y = source.normal(300).reshape(100, 3), (source.words(100) % 3).astype(np.int64)
    whole = adaboost._weights(scores, y)
    assert whole.min() >= 0
    assert whole.max() == GRAIN  # records on the wrong side count fully
    for kept in (slice(0, 50), slice(3, 4), slice(20, None)):
        np.testing.assert_array_equal(adaboost._weights(scores[kept], y[kept]), whole[kept])


# ---------------------------------------------- exact audit of one round, and twins that it catches

BINS = Bins.even(0, 1, n_features=1, n_bins=3)
POINTS = [(code, k) for code in range(3) for k in range(2)]
SCORES = {0: (0.0, 1.4), 1: (0.3, -0.4), 2: (0.0, 0.0)}  # what earlier trees say about each bin


def capped_weights(scores, y):
    return adaboost._weights(scores, y)


def normalised_weights(scores, y):
    w = np.exp(-(scores[np.arange(len(y)), y] - scores[np.arange(len(y)), 1 - y]))
    return np.floor(GRAIN * w / w.max()).astype(np.int64) if len(w) else np.zeros(0, np.int64)


def uncapped_weights(scores, y):
    return np.floor(
        GRAIN * np.exp(-(scores[np.arange(len(y)), y] - scores[np.arange(len(y)), 1 - y]))
    ).astype(np.int64)


def one_round(records, weigh, neighbours):
    """Return log-probabilities of the root's split and the exact leaf sums for each split."""
    codes = np.array([[code] for code, _ in records], np.uint8).reshape(-1, 1)
    y = np.array([k for _, k in records], np.int64)
    weight = weigh(np.array([SCORES[code] for code, _ in records]).reshape(-1, 2), y)
    learner = PrivateAdaBoostClassifier(
        epsilon=1.0, n_rounds=1, max_depth=1, neighbours=neighbours, bins=BINS
    )
    plan = learner._plan(TreeTask(codes, y, 2))
    _, place, last, single = candidates_of(BINS, np.arange(1))
    counts = np.zeros((1, 1, 3, 2), np.int64)
    count(codes, y, weight, np.zeros(len(y), np.int64), np.arange(1), counts)
    steps = np.empty((1, len(place)), np.int64)
    impurities(counts, place, last, single, steps)
    log = -steps[0] / (STEPS * GRAIN * plan.selections[0].scale)
    log -= np.logaddexp.reduce(log)
    sums = []
    for cut in range(len(place)):
        shape = random_trees(Bins([[BINS.cuts[0][cut]]]), None, 1, 1, np.random.RandomState(0))
        assert shape.last[0, 0] == 0
        split = (codes > cut).astype(np.uint8)
        sums.append(leaf_counts(TreeTask(split, y, 2), shape, weight))
    return log, np.array(sums), plan


def loss_of(D, E, weigh, neighbours):
    """Return the largest loss of a round: of the split, plus the L1 distance of the leaf sums.

    The latter is reached in the tails of Laplace noise.
    """
    p, a, plan = one_round(D, weigh, neighbours)
    q, b, _ = one_round(E, weigh, neighbours)
    assert isinstance(plan.leaves, Laplace)
    leaves = np.abs(a - b).sum(axis=(1, 2)) / plan.leaves.scale
    return max(float((p - q + leaves).max()), float((q - p + leaves).max()))


def worst(weigh, neighbours):
    found = 0.0
    for n in range(4):
        for D in itertools.combinations_with_replacement(POINTS, n):
            if neighbours == "add-remove":
                others = [(*D, point) for point in POINTS]
            else:
                others = [(*D[:i], point, *D[i + 1 :]) for i in range(n) for point in POINTS]
            found = max([found, *(loss_of(list(D), list(E), weigh, neighbours) for E in others)])
    return found


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_the_exact_loss_of_a_round_is_within_its_budget(neighbours):
    assert 0.6 < worst(capped_weights, neighbours) <= 1 + 1e-9


@pytest.mark.parametrize("weigh", [normalised_weights, uncapped_weights])
def test_twins_with_other_weights_are_caught(weigh):
    assert worst(weigh, "add-remove") > 1.2


def test_the_noise_is_the_noise_that_is_charged():
    pure = PrivateAdaBoostClassifier(epsilon=1.0)._plan(
        TreeTask(np.zeros((3, 1), np.uint8), np.zeros(3, int), 2)
    )
    (whole,) = pure.events
    assert isinstance(pure.leaves, Laplace)
    assert pure.leaves in whole.parts
    assert whole.times == 3  # by rule: few rounds where each costs its full share
    assert pure.leaves.scale == pytest.approx(GRAIN / (0.5 * 1.0 / 3))
    mixed, named = (
        PrivateAdaBoostClassifier(epsilon=1.0, delta=delta, **more)._plan(
            TreeTask(np.zeros((3, 1), np.uint8), np.zeros(3, int), 2)
        )
        for delta, more in ((1e-6, {}), (0.0, {"n_rounds": 10}))
    )
    assert isinstance(mixed.leaves, DiscreteGaussian)
    assert mixed.n_trees == named.n_trees == 10
    assert mixed.leaf_variance < named.leaf_variance


def test_stumps_add_up_to_one_function_per_feature():
    X, y = made_up()
    model = PrivateAdaBoostClassifier(
        epsilon=3.0, max_depth=1, n_rounds=12, bounds=(0, 1), classes=[0, 1]
    ).fit(X, y)
    codes = model.bins_.codes(X)
    scores = sum(function[codes[:, j]] for j, function in model.shape_functions().items())
    odds = np.log(model.predict_proba(X))
    np.testing.assert_allclose(scores[:, 1] - scores[:, 0], odds[:, 1] - odds[:, 0], atol=1e-9)
    panels = model.plot_shapes(feature_names=["a", "b", "c"], ax=Figure())
    assert {axis.get_title() for axis in panels} <= {"a", "b", "c"}
    with pytest.raises(SettingsError, match="max_depth=1"):
        PrivateAdaBoostClassifier(epsilon=3.0, bounds=(0, 1)).fit(X, y).shape_functions()


def test_more_records_than_sums_can_hold_are_refused(monkeypatch):
    monkeypatch.setattr(adaboost, "MOST_RECORDS", 100)
    X, y = made_up(200)
    with pytest.raises(SettingsError, match="at most 100 records"):
        PrivateAdaBoostClassifier(epsilon=1.0, bounds=(0, 1)).fit(X, y)


def test_a_refusal_by_the_number_of_records_is_assumed_where_the_number_is_private():
    X, y = made_up(50)
    settings = {"epsilon": 1.0, "bounds": (0, 1)}
    hidden = PrivateAdaBoostClassifier(**settings).fit(X, y).guarantee_
    assert any("4,194,304 records is public" in each for each in hidden.assumptions)
    shown = PrivateAdaBoostClassifier(**settings, neighbours="replace-one").fit(X, y).guarantee_
    assert not any("records is public" in each for each in shown.assumptions)


@pytest.mark.parametrize(
    "settings",
    [{"algorithm": "samme"}, {"learning_rate": 0.0}, {"n_rounds": 0}, {"max_depth": "auto"}],
)
def test_settings_that_cannot_work_are_refused(settings):
    X, y = made_up(50)
    with pytest.raises(SettingsError, match="must be"):
        PrivateAdaBoostClassifier(epsilon=1.0, **settings).fit(X, y)
