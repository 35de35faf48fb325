import math

import numpy as np
import pytest
from scipy import optimize, sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from consilience import Noise, PrivateLogisticRegression, PrivateRidge
from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend, draw_public, fit_public
from consilience.aggregators.boosting import SiteBoosting
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.labelled import read_labelled
from consilience.aggregators.mixture import Ball, Known, Mixture, Ridge, _noise_along, folds
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.erm import Logistic, Squared
from consilience.tables.public import Public

AGGREGATORS = [FeatureMethod, PublicBlend, SiteBoosting]
each_aggregator = pytest.mark.parametrize("aggregator", AGGREGATORS)


def world(seed, *, epsilon, n_public=50, n_sites=6, d=8, n=400, wrong=0.0, **settings):
    """Make up sites, public records and test records of one logistic model; `wrong` moves the
    sites' own models.
    """
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=d)
    truth *= 12 / np.linalg.norm(truth)

    def draw(n_records, f):
        X = rng.normal(size=(n_records, d)) / math.sqrt(d)
        X /= np.maximum(1, np.linalg.norm(X, axis=1))[:, None]
        return X, (rng.random(n_records) < 1 / (1 + np.exp(-X @ f))).astype(int)

    members = [
        PrivateLogisticRegression(
            epsilon=epsilon, classes=[0, 1], noise=Noise(seed=100 * seed + i), **settings
        ).fit(*draw(n, truth + wrong * rng.normal(size=d)))
        for i in range(n_sites)
    ]
    return members, Public(*draw(n_public, truth)), draw(3000, truth)


def private_members(epsilons=(1.0, 2.0, 0.5), classes=(0, 1), n=300, seeded=True):
    rng = np.random.default_rng(3)
    truth = np.random.default_rng(8).normal(size=(4, len(classes))) * 9
    fitted = []
    for i, epsilon in enumerate(epsilons):
        noise = Noise(seed=i) if seeded else None
        X = rng.uniform(-0.45, 0.45, (n, 4))
        y = np.asarray(classes)[(X @ truth).argmax(axis=1)]
        fitted.append(
            PrivateLogisticRegression(epsilon=epsilon, classes=list(classes), noise=noise).fit(X, y)
        )
    X = rng.uniform(-0.45, 0.45, (120, 4))
    return fitted, Public(X, np.asarray(classes)[(X @ truth).argmax(axis=1)])


# What all aggregators with labelled public records promise


@each_aggregator
def test_a_record_keeps_the_guarantee_of_its_own_site(aggregator):
    members, public = private_members(seeded=False)
    ensemble = aggregator().combine(members, public)
    assert [g.epsilon for g in ensemble.guarantees] == pytest.approx([1.0, 2.0, 0.5])
    assert ensemble.guarantee.epsilon == pytest.approx(2.0)
    assert ensemble.guarantee.holds
    assert "no record" in ensemble.guarantee.assumptions[-1]


@each_aggregator
def test_permuted_members_have_permuted_weights(aggregator):
    members, public = private_members()
    order = [2, 0, 1]
    one, two = (aggregator().combine(m, public) for m in (members, [members[i] for i in order]))
    np.testing.assert_allclose(two.weights, one.weights[order], atol=1e-5)
    np.testing.assert_allclose(two.coef, one.coef, atol=1e-4)


@each_aggregator
def test_the_same_call_gives_the_same_ensemble(aggregator):
    members, public = private_members()
    np.testing.assert_array_equal(*(aggregator().combine(members, public).coef for _ in range(2)))


@each_aggregator
def test_one_member_and_identical_members_agree(aggregator):
    (member,), public = private_members(epsilons=[5.0])
    one = aggregator().combine([member], public)
    many = aggregator().combine([member] * 3, public)
    assert one.weights.shape == (1,)
    assert np.mean(one.predict(public.X) == many.predict(public.X)) > 0.97
    assert np.mean(one.predict(public.X) == public.y) > 0.8


@each_aggregator
def test_regressors_are_combined(aggregator):
    rng = np.random.default_rng(0)
    f = np.array([3.0, -2.0, 1.0])
    members = []
    for epsilon in (2.0, 20.0):
        X = rng.uniform(-0.5, 0.5, (800, 3))
        members.append(
            PrivateRidge(
                epsilon=epsilon, label_bound=4.0, regularization=1e-3, noise=Noise(seed=1)
            ).fit(X, X @ f + 1)
        )
    X = rng.uniform(-0.5, 0.5, (200, 3))
    y = X @ f + 1 + 0.1 * rng.normal(size=200)
    ensemble = aggregator().combine(members, Public(X, y))
    assert ensemble.classes is None
    assert np.mean((ensemble.predict(X) - y) ** 2) < 0.2 * np.var(y)
    robust = aggregator(huber=0.5).combine(members, Public(X, y))
    assert np.mean((robust.predict(X) - y) ** 2) < 0.2 * np.var(y)


@each_aggregator
def test_several_classes_are_combined(aggregator):
    members, public = private_members(epsilons=[5.0, 10.0], classes=("a", "b", "c"))
    ensemble = aggregator().combine(members, public)
    assert ensemble.predict_proba(public.X).shape == (120, 3)
    assert np.mean(ensemble.predict(public.X) == public.y) > 0.7


@each_aggregator
def test_members_may_know_different_classes(aggregator):
    three, public = private_members(epsilons=[5.0, 5.0], classes=(0, 1, 2))
    X, y = np.asarray(public.X), np.asarray(public.y)
    some = y != 2
    two = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1]).fit(X[some], y[some])
    ensemble = aggregator().combine([two, *three], public)
    np.testing.assert_array_equal(ensemble.classes_, [0, 1, 2])
    assert np.mean(ensemble.predict(X) == y) > 0.7
    pair, (only, _) = private_members(epsilons=[5.0])[0], np.unique(y, return_counts=True)
    more = aggregator(classes=[0, 1, 2, 3]).combine(pair, Public(X, y))
    np.testing.assert_array_equal(more.classes_, [0, 1, 2, 3])
    assert set(only) <= set(more.classes_)


@each_aggregator
def test_labels_need_not_be_in_order(aggregator):
    members, public = private_members(epsilons=[5.0, 5.0])
    flipped = aggregator(classes=[1, 0]).combine(members, public)
    plain = aggregator().combine(members, public)
    assert np.mean(flipped.predict(public.X) == plain.predict(public.X)) > 0.97


@each_aggregator
def test_sparse_public_records_give_the_same(aggregator):
    members, public = private_members()
    dense = aggregator().combine(members, public)
    thin = aggregator().combine(members, Public(sparse.csr_array(public.X), public.y))
    np.testing.assert_allclose(thin.coef, dense.coef, atol=1e-4)


@each_aggregator
def test_members_of_another_library_promise_nothing(aggregator):
    members, public = private_members()
    other = LogisticRegression().fit(public.X, public.y)
    assert aggregator().combine([*members, other], public).guarantee is None


@each_aggregator
def test_one_class_among_the_public_records_is_no_failure(aggregator):
    members, public = private_members()
    ensemble = aggregator().combine(members, Public(public.X, np.ones(len(public.y), dtype=int)))
    assert np.isfinite(ensemble.coef).all()


@each_aggregator
@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda X, y: None, SettingsError, "labelled records"),
        (lambda X, y: Public(X), SettingsError, "labelled records"),
        (lambda X, y: Public(X[:0], y[:0]), SchemaMismatch, "fewer than two"),
        (lambda X, y: Public(np.where(X > 0.4, np.nan, X), y), SchemaMismatch, "not all finite"),
        (lambda X, y: Public(X[:, :2], y), SchemaMismatch, "2 features, and the members have 4"),
        (lambda X, y: Public(X, np.where(y == 0, 7, y)), SchemaMismatch, "no member knows"),
        (lambda X, y: Public(X, np.column_stack([y, y])), SchemaMismatch, "one label per record"),
    ],
)
def test_public_records_that_cannot_be_used_are_refused(aggregator, spoil, error, says):
    members, public = private_members()
    with pytest.raises(error, match=says):
        aggregator().combine(members, spoil(public.X, public.y))


@each_aggregator
def test_labels_that_are_no_numbers_are_refused_for_regressors(aggregator):
    X = np.eye(4) / 2
    member = PrivateRidge(epsilon=1.0, label_bound=1.0).fit(X, np.ones(4))
    for labels in (["a", "b", "c", "d"], [1.0, np.nan, 0.0, 1.0]):
        with pytest.raises(SchemaMismatch, match="not a finite number"):
            aggregator().combine([member], Public(X, labels))
    with pytest.raises(SettingsError, match="'huber'"):
        aggregator(huber=-1.0).combine([member], Public(X, np.ones(4)))


@each_aggregator
def test_no_members_and_members_that_are_not_linear_are_refused(aggregator):
    _, public = private_members()
    with pytest.raises(SettingsError, match="at least one member"):
        aggregator().combine([], public)

    class Oracle:
        def predict(self, X):
            return X

    with pytest.raises(SettingsError, match="has none"):
        aggregator().combine([Oracle()], public)


# PublicBlend


def public_only(public):
    """Fit public records alone, the ridge chosen by five folds: the plain way."""
    X, y = np.asarray(public.X), np.asarray(public.y)
    number = np.random.default_rng(0).permutation(len(y)) % 5

    def model(C):
        return LogisticRegression(C=C, solver="newton-cholesky")

    def held_out(C):
        tests = [number == fold for fold in range(5)]
        return sum(
            log_loss(y[t], model(C).fit(X[~t], y[~t]).predict_proba(X[t]), labels=[0, 1])
            for t in tests
        )

    return model(min(10.0 ** np.arange(-2, 5), key=held_out)).fit(X, y)


@pytest.mark.parametrize(("epsilon", "wrong"), [(0.05, 0.0), (2.0, 15.0)])
def test_useless_sites_do_not_harm(epsilon, wrong):
    # Sites of almost pure noise, and sites of another world. Eight worlds; the blend may be worse
    # by chance, so its mean excess error must be within three of its own standard errors of a
    # hundredth.
    excess = []
    for seed in range(8):
        members, public, (X, y) = world(seed, epsilon=epsilon, wrong=wrong)
        blend = PublicBlend().combine(members, public)
        excess.append(np.mean(blend.predict(X) != y) - np.mean(public_only(public).predict(X) != y))
    assert np.mean(excess) <= 0.01 + 3 * np.std(excess) / math.sqrt(8)
    assert np.mean(excess) <= 0.02


def test_good_sites_are_used():
    gain, trust = [], []
    for seed in range(6):
        members, public, (X, y) = world(seed, epsilon=5.0)
        blend = PublicBlend().combine(members, public)
        gain.append(np.mean(public_only(public).predict(X) != y) - np.mean(blend.predict(X) != y))
        trust.append(blend.weights.sum())
    assert np.mean(gain) > 0.01
    assert np.mean(trust) > 0.6


def test_many_public_records_outweigh_the_sites_and_probabilities_are_calibrated():
    members, public, (X, y) = world(1, epsilon=0.1, n_public=3000)
    blend = PublicBlend().combine(members, public)
    alone = public_only(public)
    assert abs(np.mean(blend.predict(X) != y) - np.mean(alone.predict(X) != y)) < 0.01
    assert abs(np.mean(blend.predict_proba(X)[:, 1]) - np.mean(y)) < 0.03


def test_the_odds_on_an_average_follow_what_its_known_noise_leaves_of_it():
    signals = []
    for epsilon in (0.02, 5.0):
        members, public, _ = world(0, epsilon=epsilon)
        task = read_labelled(PublicBlend(), members, public)
        ball = Ball.of(task)
        ridge = Ridge(ball.records(task.X), task.y, task.loss)
        signals.append(Known.of(task, ball, ridge).signal(ball.enter(*task.average), ridge))
    assert signals[0] < 0.5 < 0.8 < signals[1] <= 1


def test_a_candidate_that_is_too_sure_of_itself_is_made_less_so():
    rng = np.random.default_rng(2)
    X = rng.normal(size=(60, 30))
    y = np.where(X[:, 0] + rng.normal(size=60) > 0, 1.0, -1.0)
    ridge = Ridge(X / np.linalg.norm(X, axis=1).max(), y, Logistic())
    strong, weak = (False, 0.03), (False, 1e-5)
    mixed = Mixture.by_cross_validation(ridge, np.zeros(30), [strong, weak], 0)
    assert mixed.scales[1] < 0.5 < mixed.scales[0] <= 1
    free = ridge.fit(np.zeros(30), weak[1])
    alone = Mixture.by_cross_validation(ridge, np.zeros(30), [weak], 0)
    assert alone.fit() == pytest.approx(alone.scales[0] * free, abs=1e-4)


def test_a_ridge_around_a_centre_is_what_a_general_minimiser_finds():
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(40, 3))
    Z /= np.linalg.norm(Z, axis=1).max()
    y, centre = rng.choice([-1.0, 1.0], 40), rng.normal(size=3)
    ridge = Ridge(Z, y, Logistic())

    def objective(f):
        return np.mean(np.log1p(np.exp(-y * (Z @ f)))) + 0.05 / 2 * np.sum((f - centre) ** 2)

    peer = optimize.minimize(objective, centre, method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(ridge.fit(centre, 0.05), peer.x, atol=1e-5)
    assert ridge.fit(centre, math.inf) is centre


@pytest.mark.parametrize(
    "settings", [{}, {"mechanism": "output"}, {"delta": 1e-5}, {"fit_intercept": False}]
)
def test_the_known_noise_along_a_direction_is_the_members_own(settings):
    members, public, _ = world(0, epsilon=1.0, n_sites=1, **settings)
    member = read_labelled(PublicBlend(), members, public).members[0]
    bends = np.array([1e-6, 1e-3, 0.02, 0.25])
    np.testing.assert_allclose(
        _noise_along(member, bends), [member.noise_variance(b) for b in bends], rtol=1e-9
    )


def test_an_exact_members_only_error_is_of_sampling():
    members, public, _ = world(0, epsilon=math.inf, n_sites=2, n=400, fit_intercept=False)
    task = read_labelled(PublicBlend(), members, public)
    ball = Ball.of(task)
    Z = ball.records(task.X)
    known = Known.of(task, ball, Ridge(Z, task.y, task.loss))
    variance = known.axes @ known.axes.T * known.unit**2  # of the mean of two sites of 400 records
    np.testing.assert_allclose(
        variance, np.linalg.inv(2 * 400 * 0.25 * Z.T @ Z / len(Z)), rtol=1e-6
    )


def test_a_ridge_in_known_errors_is_what_a_general_minimiser_finds():
    members, public, _ = world(0, epsilon=2.0, n_public=60)
    task = read_labelled(PublicBlend(), members, public)
    ball = Ball.of(task)
    Z = ball.records(task.X)
    known = Known.of(task, ball, Ridge(Z, task.y, task.loss))
    centre, rows = ball.enter(*task.average), np.arange(60)
    precision = np.linalg.inv(known.axes @ known.axes.T * known.unit**2)

    def objective(f):
        return np.sum(np.log1p(np.exp(-task.y * (Z @ f)))) + 0.3 / 2 * (f - centre) @ precision @ (
            f - centre
        )

    peer = optimize.minimize(objective, centre, method="BFGS", options={"gtol": 1e-8})
    np.testing.assert_allclose(
        known.at(rows).fit(centre, 0.3, None), peer.x, atol=1e-3 * np.linalg.norm(peer.x)
    )
    assert known.at(rows).fit(centre, math.inf, None) is centre


def test_members_of_another_library_leave_the_error_unknown():
    members, public, _ = world(0, epsilon=2.0)
    task = read_labelled(
        PublicBlend(), [*members, LogisticRegression().fit(public.X, public.y)], public
    )
    ball = Ball.of(task)
    assert Known.of(task, ball, Ridge(ball.records(task.X), task.y, task.loss)) is None


def test_the_scale_of_an_average_is_what_a_search_finds_and_never_negative():
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(60, 2)) / 5
    theta = np.array([1.0, 2.0])
    assert Ridge(Z, 3 * Z @ theta, Squared(1.0)).scale_of(theta) == pytest.approx(3, rel=0.01)
    assert Ridge(Z, -3 * Z @ theta, Squared(1.0)).scale_of(theta) == pytest.approx(0, abs=1e-3)
    assert Ridge(Z, np.ones(60), Logistic()).scale_of(0 * theta) == 0
    y = np.where(rng.random(60) < 1 / (1 + np.exp(-4 * Z @ theta)), 1.0, -1.0)
    grid = np.linspace(0, 20, 2001)
    size = np.sqrt(np.mean((Z @ theta) ** 2))
    values = [
        np.mean(np.log1p(np.exp(-y * k * (Z @ theta)))) + 5e-4 * (k * size) ** 2 for k in grid
    ]
    assert Ridge(Z, y, Logistic()).scale_of(theta) == pytest.approx(
        grid[np.argmin(values)], abs=0.02
    )


def test_folds_cover_every_record_once_per_repeat_and_spread_the_classes():
    y = np.array([1.0] * 10 + [-1.0] * 40)
    tests = folds(y, 0)
    np.testing.assert_array_equal(np.sum(tests, axis=0), len(tests) // 5)
    assert {int((y[test] == 1).sum()) for test in tests} == {2}


def test_without_intercepts_at_the_sites_none_is_learned():
    members, public, _ = world(0, epsilon=1.0, fit_intercept=False)
    np.testing.assert_array_equal(PublicBlend().combine(members, public).intercept, [0.0])


def test_the_average_is_the_blend_where_records_say_nothing():
    members, public, _ = world(0, epsilon=math.inf, n_sites=3, n=4000)
    X = np.asarray(public.X)
    blend, average = (
        PublicBlend().combine(members, Public(X[:4], [0, 1, 0, 1])),
        Average().combine(members),
    )
    assert np.isfinite(blend.coef).all()
    assert blend.coef.shape == average.coef.shape


@pytest.mark.parametrize("kind", ["two classes", "three classes", "numbers"])
def test_models_that_public_records_leave_possible_lie_around_the_best_and_closer_with_more(kind):
    """Of 40 draws: 16 times the records would divide the spread by 4, had few of them no ridge."""
    random = np.random.default_rng(3)
    truth = random.normal(size=(4, 3)) * 3

    def spread(n):
        X = random.uniform(-1, 1, (n, 4))
        scores = X @ truth + random.gumbel(size=(n, 3))
        if kind == "numbers":
            y, learner = scores[:, 0], PrivateRidge(epsilon=math.inf, label_bound=20.0)
        else:
            k = 2 if kind == "two classes" else 3
            y = np.argmax(scores[:, :k], axis=1)
            learner = PrivateLogisticRegression(epsilon=math.inf, classes=list(range(k)))
        public = Public(X, y)
        source = Noise(seed=n).open()
        drawn = np.array([draw_public(learner, public, source.normal).coef for _ in range(40)])
        best = fit_public(learner, public).coef
        assert drawn.shape[1:] == best.shape
        off = np.linalg.norm(drawn.mean(axis=0) - best)
        assert off < 0.5 * np.linalg.norm(best)
        return float(drawn.std(axis=0).mean())

    ratio = spread(60) / spread(960)
    assert 1.5 < ratio < 9
