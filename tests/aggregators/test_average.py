import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from consilience import (
    Budget,
    Ledger,
    Noise,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateRidge,
    PublicBlend,
    WeightedVote,
)
from consilience.aggregators.average import TRUSTED, Average
from consilience.aggregators.members import DISJOINT, as_members, cap_shares
from consilience.errors import BudgetExceeded, SchemaMismatch, SettingsError
from consilience.privacy.vector_noise import CLOSING_SHARE
from consilience.tables.public import Public


def table(n, seed, d=4, classes=2):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-0.4, 0.4, (n, d))
    return X, (X @ np.random.default_rng(99).normal(size=(d, classes)) * 9).argmax(axis=1)


def sites(sizes, epsilons, learner=PrivateLogisticRegression, **settings):
    settings.setdefault("classes", [0, 1])
    return [
        learner(epsilon=epsilon, **settings).fit(*table(n, seed))
        for seed, (n, epsilon) in enumerate(zip(sizes, epsilons, strict=True))
    ]


def test_equal_weights_average_the_coefficients():
    members = sites([200, 300], [1.0, 2.0])
    ensemble = Average("equal").combine(members)
    np.testing.assert_allclose(ensemble.coef, (members[0].coef_ + members[1].coef_) / 2)
    np.testing.assert_allclose(
        ensemble.intercept, (members[0].intercept_ + members[1].intercept_) / 2
    )
    np.testing.assert_allclose(ensemble.weights, [0.5, 0.5])


def test_weights_by_size_are_the_public_sizes():
    np.testing.assert_allclose(
        Average("size").combine(sites([100, 300], [1.0, 1.0])).weights, [0.25, 0.75]
    )


def test_precision_prefers_the_site_with_less_noise():
    weights = Average().combine(sites([400, 400, 400], [0.05, 0.5, 5.0])).weights
    assert weights[0] < weights[1] < weights[2]
    assert weights.sum() == pytest.approx(1)


def test_precision_follows_the_noise_that_members_really_have():
    X, y = table(400, 3)
    output = {"mechanism": "output", "regularization": 1e-2}
    members = sites([400, 400], [0.5, 2.0], **output)
    (quiet,) = as_members(members[1:])
    spread = [
        PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], noise=Noise(seed=s), **output)
        .fit(X, y)
        .coef_
        for s in range(400)
    ]
    # 1600 coordinates of one variance: its estimate has a relative error of about 5 %.
    assert np.var(spread, axis=0).mean() == pytest.approx(
        quiet.noise_variance() * quiet.to_user**2, rel=0.25
    )
    # The sampling variance is the same for both, so the louder site's weight is a bit above 1/17.
    weights = Average().combine(members).weights
    assert 1 / 18 < weights[0] < 1 / 12


def test_a_record_keeps_the_guarantee_of_its_own_site():
    ensemble = Average().combine(sites([200, 300], [1.0, 2.0]))
    assert [g.epsilon for g in ensemble.guarantees] == pytest.approx([1.0, 2.0])
    assert ensemble.guarantee.epsilon == pytest.approx(2.0)
    assert DISJOINT in ensemble.guarantee.assumptions


def test_permuted_members_have_permuted_weights():
    members = sites([100, 200, 400], [1.0, 0.5, 2.0])
    order = [2, 0, 1]
    one, two = Average().combine(members), Average().combine([members[i] for i in order])
    np.testing.assert_allclose(two.weights, one.weights[order])
    np.testing.assert_allclose(two.coef, one.coef)


def test_one_member_is_its_own_average():
    (member,) = sites([200], [1.0])
    X, _ = table(20, 7)
    np.testing.assert_allclose(
        Average().combine([member]).predict_proba(X), member.predict_proba(X)
    )


def test_a_class_is_averaged_over_the_members_that_know_it():
    X, y = table(600, 1, classes=3)
    some = y != 2
    two = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1]).fit(X[some], y[some])
    three = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1, 2]).fit(X, y)
    ensemble = Average("equal").combine([two, three])
    np.testing.assert_array_equal(ensemble.classes_, [0, 1, 2])
    np.testing.assert_allclose(ensemble.coef[2], three.coef_[2])
    np.testing.assert_allclose(ensemble.coef[1], (two.coef_[0] / 2 + three.coef_[1]) / 2)
    assert np.mean(ensemble.predict(X) == y) > 0.8


def test_regressors_are_averaged_and_have_no_probabilities():
    X, _ = table(300, 0)
    members = [
        PrivateRidge(epsilon=e, label_bound=1.0).fit(X, X @ np.ones(4) / 4) for e in (1.0, 5.0)
    ]
    ensemble = Average().combine(members)
    assert ensemble.predict(X).shape == (300,)
    with pytest.raises(SettingsError, match="no class probabilities"):
        ensemble.predict_proba(X)


def test_members_of_another_library_promise_nothing():
    X, y = table(200, 0)
    ensemble = Average("equal").combine([LogisticRegression().fit(X, y), *sites([200], [1.0])])
    assert ensemble.guarantee is None
    with pytest.raises(SettingsError, match="public size"):
        Average().combine([LogisticRegression().fit(X, y)])


def test_what_cannot_be_averaged_is_refused():
    members = sites([100], [1.0])
    other = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(*table(100, 1, d=5))
    with pytest.raises(SettingsError, match="at least one member"):
        Average().combine([])
    with pytest.raises(SchemaMismatch, match="number of features"):
        Average().combine([*members, other])
    with pytest.raises(SettingsError, match="cannot predict"):
        Average().combine([3.0])
    with pytest.raises(SettingsError, match="'weights'"):
        Average("best")
    with pytest.raises(SchemaMismatch, match="not declared"):
        Average(classes=[0, 7]).combine(members)


def test_public_records_set_the_curvature():
    X, _ = table(500, 5)
    members = sites([100, 3000], [1.0, 0.2])
    assert not np.allclose(
        Average().combine(members).weights, Average().combine(members, Public(X)).weights
    )


# Noise at a trusted aggregator


def test_central_noise_covers_the_intercept_of_regressors_with_a_label_bound():
    X, _ = table(300, 0)
    member = PrivateRidge(epsilon=math.inf, label_bound=10.0, intercept_scaling=1.0)
    member.fit(X, X @ np.ones(4) * 10)
    drawn = [
        Average("equal", epsilon=1.0, noise=Noise(seed=s)).combine([member]) for s in range(300)
    ]
    slopes, constants = (
        np.std([e.coef[0] for e in drawn], axis=0),
        np.std([e.intercept for e in drawn]),
    )
    # One variance in every coordinate of the ball; 300 draws tell a standard deviation to about 4
    # %.
    assert constants == pytest.approx(slopes.mean(), rel=0.3)


def test_central_noise_is_calibrated_to_the_site_that_needs_most():
    # Exact sensitivities of the Huber-hinge: 2/(nΛ). The thesis' single n_i would be one of the
    # others.
    members = sites([100, 400], [math.inf, math.inf], learner=PrivateLinearSVC, regularization=0.1)
    ensemble = Average("equal", epsilon=1.0).combine(members)
    first, second = ensemble.guarantees
    assert ensemble.guarantee.epsilon == pytest.approx(1.0)
    assert first.epsilon == pytest.approx(1.0)
    assert second.epsilon == pytest.approx((1 - CLOSING_SHARE) / 4 + CLOSING_SHARE)
    assert TRUSTED in ensemble.guarantee.assumptions


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_central_noise_keeps_each_sites_own_epsilon(delta):
    members = sites([100, 400, 100], [math.inf] * 3)
    asked = [1.0, 0.1, 3.0]
    ensemble = Average("equal", epsilon=asked, delta=delta).combine(members)
    assert all(g.epsilon <= e * (1 + 1e-9) for g, e in zip(ensemble.guarantees, asked, strict=True))
    assert max(g.epsilon / e for g, e in zip(ensemble.guarantees, asked, strict=True)) > 0.98
    assert ensemble.guarantee.epsilon == pytest.approx(max(g.epsilon for g in ensemble.guarantees))


def test_central_noise_tells_sites_of_one_size_apart_by_their_settings():
    strong, weak = (sites([200], [math.inf], regularization=one)[0] for one in (1.0, 1e-3))
    own = Average("equal", epsilon=1.0).combine([strong, weak, strong]).guarantees
    assert own[0] == own[2]
    assert (
        own[0].epsilon < 0.1 < own[1].epsilon
    )  # the longer minimum moves farther, and the noise is for it


def test_central_noise_is_as_large_as_stated():
    members = sites(
        [150, 150],
        [math.inf] * 2,
        learner=PrivateLinearSVC,
        regularization=0.1,
        fit_intercept=False,
    )
    exact = Average("equal").combine(members).coef[0]
    draws = [
        Average("equal", epsilon=1.0, noise=Noise(seed=s)).combine(members).coef[0] - exact
        for s in range(300)
    ]
    scale = 2 / (150 * 0.1) / 2 / 0.99
    # ‖b‖ is Gamma(4)·scale: mean 4, standard deviation 2; 300 draws, six standard errors.
    assert np.linalg.norm(draws, axis=1).mean() / scale == pytest.approx(
        4, abs=6 * 2 / math.sqrt(300)
    )


def test_central_noise_is_charged_once_and_a_retry_draws_nothing(ledger):
    members = sites([200, 200], [math.inf] * 2)
    average = Average("equal", epsilon=0.4)
    one = average.combine(members, ledger=ledger, dataset="ward", key="release 1")
    two = average.combine(members, ledger=ledger, dataset="ward", key="release 1")
    np.testing.assert_array_equal(one.coef, two.coef)
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.4)


def test_central_noise_refuses_members_that_brought_their_own():
    with pytest.raises(SettingsError, match="exact members"):
        Average(epsilon=1.0).combine(sites([100, 100], [1.0, 1.0]))
    with pytest.raises(SettingsError, match="'epsilon' of Average"):
        Average(epsilon=-1.0).combine(sites([100], [math.inf]))


def test_seeded_central_noise_is_void():
    ensemble = Average("equal", epsilon=1.0, noise=Noise(seed=0)).combine(sites([100], [math.inf]))
    assert not ensemble.guarantee.holds


def test_no_single_record_moves_the_average_further_than_charged():
    # Extreme neighbours of the smaller site; the broken twin divides by the larger site's size.
    rng = np.random.default_rng(0)
    most = 0.0
    for _ in range(40):
        X = rng.choice([-1.0, 1.0], (6, 1))
        y = rng.integers(0, 2, 6)
        fits = []
        for x, label in ((1.0, 1), (rng.choice([-1.0, 1.0]), 0)):
            learner = PrivateLinearSVC(
                epsilon=math.inf, classes=[0, 1], fit_intercept=False, regularization=1.0
            )
            X[0], y[0] = x, label
            fits.append(learner.fit(X, y).coef_.copy())
        most = max(most, float(np.abs(fits[0] - fits[1]).max()) / 2)
    assert 2 / (2 * 60) < most <= 2 / (2 * 6) * (1 + 1e-9)


def test_a_release_beyond_the_hubs_budget_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "hub.db")
    ledger.allow("study", Budget(epsilon=0.1))
    with pytest.raises(BudgetExceeded):
        Average("equal", epsilon=0.4).combine(
            sites([200], [math.inf]), ledger=ledger, dataset="study"
        )


def test_noise_at_the_aggregator_refuses_members_that_move_in_different_ways():
    """With three classes softmax members move once, one-against-rest members once per class."""
    source = Noise(seed=1).open()
    X, y = source.uniform(240).reshape(80, 3) - 0.5, np.arange(80) % 3
    members = [
        kind(epsilon=math.inf, classes=[0, 1, 2]).fit(X, y)
        for kind in (PrivateLogisticRegression, PrivateLinearSVC)
    ]
    for mixed in (members, members[::-1]):
        with pytest.raises(SettingsError, match="one kind of learner"):
            Average("equal", epsilon=1.0).combine(mixed)


def poisoned(members, scale):
    """Return the members and a last one that claims the opposite, `scale` times as loudly."""
    wrong = sites([400], [1.0])[0]
    wrong.coef_, wrong.intercept_ = members[0].coef_ * scale, members[0].intercept_ * scale
    return [*members, wrong]


@pytest.mark.parametrize("robust", ["median", "trimmed"])
def test_a_robust_average_hardly_moves_for_one_wrong_member(robust):
    members = sites([400] * 4, [5.0] * 4)
    X, y = table(2000, 77)
    honest = Average(robust=robust).combine(members)
    assert (honest.predict(X) != y).mean() < 0.15
    for scale in (-1.0, -1e3, -1e100):
        spoilt = Average(robust=robust).combine(poisoned(members, scale))
        assert (spoilt.predict(X) != y).mean() < 0.2
        np.testing.assert_allclose(spoilt.weights, 0.2)
        assert spoilt.guarantee.epsilon == max(m.guarantee_.epsilon for m in members)
    assert (Average().combine(poisoned(members, -1e3)).predict(X) != y).mean() > 0.8


def test_a_robust_average_is_the_median_or_the_trimmed_mean_of_each_coefficient():
    members = sites([100] * 5, [1.0] * 5)
    rows = np.sort([member.coef_[0] for member in members], axis=0)
    np.testing.assert_array_equal(Average(robust="median").combine(members).coef[0], rows[2])
    trimmed = Average(robust="trimmed").combine(members).coef[0]
    np.testing.assert_allclose(trimmed, rows[2])  # two of five are cut at both ends
    four = Average(robust="trimmed").combine(members[:4]).coef[0]
    expected = np.sort([member.coef_[0] for member in members[:4]], axis=0)[1:3].mean(axis=0)
    np.testing.assert_allclose(four, expected)
    pair = Average(robust="median").combine(members[:2]).coef[0]
    np.testing.assert_allclose(pair, (members[0].coef_[0] + members[1].coef_[0]) / 2)


def test_a_robust_average_asks_only_members_that_know_a_class():
    some = sites([200, 200], [5.0, 5.0], classes=[0, 1, 2])
    others = sites([200], [5.0], classes=[0, 1])
    ensemble = Average(robust="median").combine([*some, *others], None)
    np.testing.assert_allclose(ensemble.coef[2], (some[0].coef_[2] + some[1].coef_[2]) / 2)


def test_a_robust_average_draws_no_noise():
    with pytest.raises(SettingsError, match="robust"):
        Average(robust="median", epsilon=1.0)
    with pytest.raises(SettingsError, match="robust"):
        Average(robust="mode")
    assert "median" in Average(robust="median").describe().title
    assert not Average(robust="median").is_predictable(None, public=False)


def test_no_member_weighs_more_than_the_study_allows():
    members = sites([100, 100, 100, 9700], [1.0] * 4)
    for weights in ("size", "precision"):
        average = Average(weights)
        assert average.combine(members).weights[3] > 0.8
        average.max_weight = 0.4
        shares = average.combine(members).weights
        np.testing.assert_allclose(shares, [0.2, 0.2, 0.2, 0.4])
        average.max_weight = 0.1  # four members cannot weigh a tenth each
        np.testing.assert_allclose(average.combine(members).weights, 0.25)


def test_shares_are_capped_in_proportion_and_free_ones_are_the_same_numbers():
    shares = np.array([0.6, 0.3, 0.1])
    assert cap_shares(shares, 1.0) is shares
    assert cap_shares(shares, 0.6) is shares
    np.testing.assert_allclose(cap_shares(shares, 0.5), [0.5, 0.375, 0.125])
    np.testing.assert_allclose(cap_shares(shares, 0.4), [0.4, 0.4, 0.2])
    np.testing.assert_allclose(cap_shares(np.array([1.0, 0.0, 0.0]), 0.5), [0.5, 0.25, 0.25])
    rng = np.random.default_rng(0)
    for n in (2, 5, 50):
        drawn = rng.dirichlet(np.full(n, 0.1))
        for most in (0.01, 0.3, 0.9):
            capped = cap_shares(drawn, most)
            assert capped.sum() == pytest.approx(1)
            assert capped.max() <= max(most, 1 / n) * (1 + 1e-9)
            assert (np.diff(capped[np.argsort(drawn)]) >= -1e-12).all()


def test_a_linear_ensemble_has_the_fitted_attributes_of_a_linear_learner():
    member = sites([300], [1.0])[0]
    X, y = table(300, 0)
    number = PrivateRidge(epsilon=1.0, label_bound=2.0).fit(X, y * 1.0)
    for learner in (member, number):
        ensemble = Average("equal").combine([learner])
        np.testing.assert_allclose(ensemble.coef_, learner.coef_)
        np.testing.assert_allclose(ensemble.intercept_, learner.intercept_)
        assert ensemble.coef_.shape == np.shape(learner.coef_)
        assert np.shape(ensemble.intercept_) == np.shape(learner.intercept_)
    assert Average("equal").combine([member]).classes_.tolist() == [0, 1]


def test_public_records_can_be_a_pair_of_rows_and_labels():
    members, (X, y) = sites([200, 300], [1.0, 2.0]), table(200, 9)
    for aggregator in (Average(), PublicBlend(), WeightedVote("accuracy")):
        one, other = (aggregator.combine(members, public=p) for p in (Public(X, y), (X, y)))
        assert np.array_equal(one.weights, other.weights)
        assert np.array_equal(one.predict(X), other.predict(X))
    with pytest.raises(SchemaMismatch, match=r"given as a list.*pair \(X, y\)"):
        Average().combine(members, public=[X, y])
