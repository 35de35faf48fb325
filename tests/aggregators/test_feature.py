import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize
from sklearn.linear_model import LogisticRegression, Ridge

from consilience import Noise, PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.feature import (
    FeatureMethod,
    TrustedAggregator,
    _Features,
    branch,
    independent,
    record_reach,
    select,
    site_gain,
)
from consilience.aggregators.labelled import read_labelled
from consilience.aggregators.members import as_members
from consilience.errors import BudgetExceeded, GuaranteeVoid, SchemaMismatch, SettingsError
from consilience.learners.erm import Logistic
from consilience.learners.perturbation import LinearTask, plan_linear
from consilience.privacy.accounting import ObjectiveL2Laplace
from consilience.tables.public import Public

F = np.array([6.0, -4.0, 2.0, 0.0, 3.0])


def records(n, seed, f=F):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-0.4, 0.4, (n, len(f)))
    return X, (X @ f + 0.3 > 0.3 * rng.normal(size=n)).astype(int)


def site(epsilon, seed, n=500, *, random_labels=False, **settings):
    """Train a site; pass noise=Noise(seed=...) if accuracy matters and the guarantee does not."""
    X, y = records(n, seed)
    if random_labels:
        y = np.random.default_rng(seed).integers(0, 2, n)
    settings = {"regularization": 1e-2, "intercept_scaling": 1.0, **settings}
    return PrivateLogisticRegression(epsilon=epsilon, classes=[0, 1], **settings).fit(X, y)


def test_the_papers_version_minimises_the_papers_objective():
    members, public = [site(1.0, s) for s in range(3)], Public(*records(80, 50))
    ensemble = FeatureMethod(regularization=0.1, toward="zero", scaling="none").combine(
        members, public
    )
    features = np.column_stack([m.decision_function(public.X) for m in members])
    sign = 2.0 * public.y - 1

    def objective(omega):
        return np.mean(np.log1p(np.exp(-sign * (features @ omega)))) + 0.05 * omega @ omega

    peer = optimize.minimize(objective, np.zeros(3), method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(ensemble.weights, peer.x, atol=1e-5)
    np.testing.assert_allclose(
        ensemble.coef[0],
        sum(w * m.coef_[0] for w, m in zip(peer.x, members, strict=True)),
        atol=1e-4,
    )
    np.testing.assert_allclose(ensemble.decision_function(public.X), features @ peer.x, atol=1e-4)


def test_an_infinitely_strong_prior_is_the_scaled_average():
    members, public = [site(1.0, s) for s in range(3)], Public(*records(80, 50))
    strong = FeatureMethod(regularization=1e9).combine(members, public)
    average = Average().combine(members, public)
    ratio = strong.weights / average.weights
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    assert ratio[0] > 0


def test_the_one_good_site_is_found_among_noise():
    members = [
        *(site(10.0, s, random_labels=True, noise=Noise(seed=s)) for s in range(3)),
        site(10.0, 9, noise=Noise(seed=9)),
    ]
    public, (X, y) = Public(*records(200, 50)), records(2000, 60)
    best = np.mean(members[-1].predict(X) == y)
    for method in (FeatureMethod(), FeatureMethod(n_bags=10), FeatureMethod(max_members=2)):
        ensemble = method.combine(members, public)
        spread = [np.std(member.decision_function(X)) for member in members]
        assert np.argmax(ensemble.weights * spread) == 3
        assert np.mean(ensemble.predict(X) == y) > best - 0.03
    assert np.mean(Average().combine(members).predict(X) == y) < best


def test_selection_keeps_the_best_and_skips_its_copies():
    good, other = site(20.0, 1, noise=Noise(seed=1)), site(20.0, 2, n=60, noise=Noise(seed=2))
    members = [site(20.0, 5, random_labels=True, noise=Noise(seed=5)), good, good, other]
    task = read_labelled(FeatureMethod(), members, Public(*records(200, 50)))
    assert 1 in select(task, 1)
    assert set(select(task, 2)) != {1, 2}
    assert set(independent(task, 3)) in ({0, 1, 3}, {0, 2, 3})
    weights = FeatureMethod(max_members=2).combine(members, Public(*records(200, 50))).weights
    assert np.count_nonzero(weights) == 2


def test_selecting_more_members_than_there_are_takes_all():
    members, public = [site(1.0, s) for s in range(3)], Public(*records(80, 50))
    all_of_them = FeatureMethod(max_members=9).combine(members, public)
    np.testing.assert_allclose(all_of_them.coef, FeatureMethod().combine(members, public).coef)


@pytest.mark.parametrize(
    "settings",
    [
        {"regularization": "best"},
        {"regularization": -1.0},
        {"toward": "one"},
        {"scaling": "all"},
        {"mechanism": "noise"},
        {"max_members": 0},
        {"epsilon": 1.0, "max_members": 2, "mechanism": "output"},
        {"selection_share": 1.0},
        {"selection_share": "half"},
        {"noise": 3},
        {"n_bags": -1},
        {"n_bags": 10**9},
        {"epsilon": 0.0},
        {"epsilon": math.inf},
        {"epsilon": 1.0, "delta": 1.5},
        {"delta": 1e-6},
        {"epsilon": 1.0, "n_bags": 5},
        {"data_norm": 0.0},
        {"label_bound": -1.0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(SettingsError, match="of FeatureMethod must be"):
        FeatureMethod(**settings).combine([site(1.0, 0)], Public(*records(50, 1)))


# Several levels


def test_ensembles_are_members_of_the_next_level():
    regions = [[site(e, 10 * r + s, n=300) for s in range(3)] for r, e in enumerate((0.5, 2.0))]
    public = Public(*records(100, 50))
    nodes = []
    for members in regions:
        found = as_members(members)
        nodes.append(branch(Average().combine(found), found))
    assert [node.size for node in nodes] == [900, 900]
    assert nodes[0].noise_variance() > nodes[1].noise_variance() > 0
    for top in (Average(), FeatureMethod(), PublicBlend()):
        ensemble = top.combine(nodes, public)
        assert ensemble.guarantee.epsilon == pytest.approx(2.0)
        assert [g.epsilon for g in ensemble.guarantees] == pytest.approx([0.5, 2.0])
    assert Average().combine(nodes).weights[1] > 0.5


def test_equal_members_make_a_branch_of_a_share_of_their_variance():
    found = as_members([site(1.0, s) for s in range(4)])
    node = branch(Average("equal").combine(found), found)
    assert node.noise_variance() == pytest.approx(found[0].noise_variance(0.02) / 4)
    with pytest.raises(SettingsError, match="2 members"):
        branch(Average().combine(found), found[:2])


# Private aggregation records


def test_private_aggregation_records_have_a_guarantee_of_their_own():
    members, private = [site(1.0, s) for s in range(3)], Public(*records(400, 50))
    ensemble = FeatureMethod(epsilon=3.0).combine(members, private)
    assert ensemble.aggregation_guarantee.epsilon == pytest.approx(3.0)
    assert [g.epsilon for g in ensemble.guarantees] == pytest.approx([1.0] * 3)
    assert ensemble.guarantee.epsilon == pytest.approx(3.0)
    assert FeatureMethod().combine(members, private).aggregation_guarantee is None


def test_private_aggregation_is_charged_once_before_drawing(ledger, monkeypatch):
    members, private = [site(1.0, s) for s in range(3)], Public(*records(400, 50))
    order = []
    charge, draw = type(ledger).charge, PrivateLogisticRegression._train
    monkeypatch.setattr(
        type(ledger), "charge", lambda *a, **k: (order.append("charge"), charge(*a, **k))[1]
    )
    monkeypatch.setattr(
        PrivateLogisticRegression, "_train", lambda *a: (order.append("draw"), draw(*a))[1]
    )
    method = FeatureMethod(epsilon=0.5)
    one = method.combine(members, private, ledger=ledger, dataset="ward", key="k")
    two = method.combine(members, private, ledger=ledger, dataset="ward", key="k")
    assert order == ["charge", "draw", "charge"]
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.5)
    np.testing.assert_array_equal(one.coef, two.coef)
    with pytest.raises(BudgetExceeded):
        FeatureMethod(epsilon=0.6).combine(members, private, ledger=ledger, dataset="ward", key="l")


def test_what_cannot_be_stated_together_is_refused_before_charging(ledger):
    X, y = records(200, 0)
    person = PrivateLogisticRegression(
        epsilon=1.0, classes=[0, 1], unit="person", records_per_person=1
    )
    person.fit(X, y, persons=np.arange(200))
    with pytest.raises(GuaranteeVoid, match="per person and per record"):
        FeatureMethod(epsilon=0.5).combine([person], Public(X, y), ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == 0


def test_a_member_that_is_no_vector_is_refused_before_charging(ledger):
    members = [site(1.0, s) for s in range(2)]
    members[1].coef_ = members[1].coef_ * np.nan
    with pytest.raises(SettingsError, match="not all numbers within"):
        FeatureMethod(epsilon=0.5).combine(
            members, Public(*records(40, 50)), ledger=ledger, dataset="ward"
        )
    assert ledger.balance("ward").spent.epsilon == 0


def test_the_best_regressor_is_chosen_where_the_budget_allows():
    X, _ = records(500, 0)
    good, wrong = X @ F, -(X @ F)
    members = [
        PrivateRidge(epsilon=20.0, label_bound=4.0, noise=Noise(seed=s)).fit(X, y)
        for s, y in enumerate((wrong, good, wrong))
    ]
    method = FeatureMethod(epsilon=50.0, label_bound=4.0, max_members=1, noise=Noise(seed=2))
    np.testing.assert_array_equal(
        np.flatnonzero(method.combine(members, Public(X, good)).weights), [1]
    )


def test_with_ample_budget_the_private_weights_are_the_exact_ones():
    members, private = (
        [site(5.0, s, noise=Noise(seed=s)) for s in range(2)],
        Public(*records(3000, 50)),
    )
    loose = FeatureMethod(epsilon=1e4, regularization=1e-6, noise=Noise(seed=0)).combine(
        members, private
    )
    exact = FeatureMethod(toward="zero").combine(members, private)
    X, _ = records(500, 70)
    assert np.mean(loose.predict(X) == exact.predict(X)) > 0.95


def test_regressors_and_several_classes_work_on_private_records():
    X, _ = records(500, 0)
    members = [
        PrivateRidge(epsilon=5.0, label_bound=4.0, noise=Noise(seed=s)).fit(X, X @ F)
        for s in range(2)
    ]
    ensemble = FeatureMethod(
        epsilon=50.0, label_bound=4.0, regularization=1e-4, noise=Noise(seed=2)
    ).combine(members, Public(X, X @ F))
    assert np.mean((ensemble.predict(X) - X @ F) ** 2) < 0.5 * np.var(X @ F)
    y = np.digitize(X @ F, [-0.5, 0.5])
    members = [
        PrivateLogisticRegression(epsilon=20.0, classes=[0, 1, 2], noise=Noise(seed=s)).fit(X, y)
        for s in range(2)
    ]
    ensemble = FeatureMethod(epsilon=50.0, max_members=1, noise=Noise(seed=3)).combine(
        members, Public(X, y)
    )
    assert np.mean(ensemble.predict(X) == y) > 0.6
    assert np.count_nonzero(ensemble.weights) == 1


@pytest.mark.parametrize("scaled", [True, False])
def test_private_features_lie_in_the_unit_ball_and_nothing_is_left_to_clipping(scaled):
    members = [site(0.1, s, noise=Noise(seed=s)) for s in range(4)]
    rng = np.random.default_rng(0)
    # Records along the members' worst direction, at the declared norm and beyond.
    M = np.array([np.append(m.coef_[0], m.intercept_) for m in members])
    worst = np.linalg.svd(M)[2][0][:-1]
    X = np.vstack([worst / np.linalg.norm(worst), -3 * worst, rng.normal(size=(50, 5))])
    y = rng.integers(0, 2, len(X))
    task = read_labelled(FeatureMethod(), members, Public(X, y), weigh_by_public=False)
    features = _Features.on_private(task, np.arange(4), 1.0, scaled=scaled)
    lengths = np.linalg.norm(features.records, axis=1)
    assert lengths.max() <= 1
    assert lengths.max() > 0.5


def test_features_that_are_not_rescaled_overspend_and_rescaled_ones_do_not():
    # Objective perturbation: the noise that yields f on D and the one that yields it on D' differ
    # by the gradients of the changed record, and cost their distance over the scale. The broken
    # twin is the papers' x' = M x, unscaled.
    members = [site(0.2, s, noise=Noise(seed=s)) for s in range(3)]
    X, y = records(60, 50)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    task = read_labelled(FeatureMethod(), members, Public(X, y), weigh_by_public=False)
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], fit_intercept=False)
    ours = _Features.on_private(task, np.arange(3), 1.0, scaled=False).records
    (event,) = [e for e in learner.fit(ours, y).events_ if isinstance(e, ObjectiveL2Laplace)]
    twin = task.margins()[:, 0].T

    def spent(features):
        gradients = np.abs(Logistic().slope(np.zeros(60), task.y))[:, None] * features
        return max(np.linalg.norm(a + b) for a in gradients for b in gradients) / event.scale

    assert spent(ours) < 1.0
    assert spent(twin) > 1.0


# Noise at the aggregator over exact members


def exact_site(seed, n=40, **settings):
    return site(math.inf, seed, n, **settings)


def test_the_thesis_aggregator_only_scenario_is_refused_with_the_reason(ledger):
    members, private = [exact_site(s) for s in range(2)], Public(*records(40, 50))
    with pytest.raises(GuaranteeVoid, match=r"not the sites.*span"):
        FeatureMethod(epsilon=0.5).combine(members, private, ledger=ledger, dataset="ward")
    with pytest.raises(GuaranteeVoid, match="mechanism='output'"):
        FeatureMethod(epsilon=0.5).combine([site(1.0, 0), members[0]], private)
    assert ledger.balance("ward").spent.epsilon == 0


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_output_noise_protects_sites_and_aggregation_records(ledger, delta):
    members, private = (
        [exact_site(s, n) for s, n in enumerate((40, 400))],
        Public(*records(100, 50)),
    )
    method = FeatureMethod(epsilon=0.5, delta=delta, mechanism="output", regularization=0.1)
    ensemble = method.combine(members, private, ledger=ledger, dataset="ward", key="k")
    again = method.combine(members, private, ledger=ledger, dataset="ward", key="k")
    np.testing.assert_array_equal(ensemble.coef, again.coef)
    assert ensemble.guarantee.epsilon == pytest.approx(0.5)
    assert ensemble.guarantees[1].epsilon < ensemble.guarantees[0].epsilon <= 0.5 + 1e-9
    assert ensemble.aggregation_guarantee.epsilon <= 0.5 + 1e-9
    assert any("trusted" in a for a in ensemble.guarantee.assumptions)
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.5)


def test_output_noise_is_for_exact_two_class_members_only():
    private, found = Public(*records(40, 50)), as_members([exact_site(0)])
    for members in (
        [branch(Average().combine(found), found)],
        [site(1.0, 0)],
        [exact_site(0), exact_site(1, data_norm=2.0)],
        [exact_site(0, neighbours="add-remove", public_size=40)],
    ):
        with pytest.raises(SettingsError, match="exact two-class members"):
            FeatureMethod(epsilon=1.0, mechanism="output").combine(members, private)


def test_seeded_noise_is_void_and_has_the_stated_size():
    members, private = (
        [exact_site(s, fit_intercept=False) for s in range(2)],
        Public(*records(100, 50)),
    )
    draws = []
    for seed in range(200):
        method = FeatureMethod(
            epsilon=1.0, mechanism="output", regularization=1.0, noise=Noise(seed=seed)
        )
        ensemble = method.combine(members, private)
        draws.append(ensemble.coef[0])
    assert not ensemble.guarantee.holds
    assert not ensemble.aggregation_guarantee.holds
    plan = TrustedAggregator(method, read_labelled(method, members, private), True)
    lengths = np.linalg.norm(np.array(draws) - plan.exact()[1], axis=1) / plan.event.scale
    # Gamma(5): standard deviation √5, six standard errors.
    assert lengths.mean() == pytest.approx(5, abs=6 * math.sqrt(5 / 200))


def test_no_changed_record_moves_the_result_further_than_charged():
    # Extreme neighbours, searched: tiny sites and aggregation data, records at the ends of a line
    # or on a circle.
    rng = np.random.default_rng(4)
    most_site = most_record = 0.0

    def extreme(n, d):
        angle = rng.choice(8, n) * math.pi / 4
        return (
            np.column_stack([np.cos(angle), np.sin(angle)])
            if d == 2
            else rng.choice([-1.0, 1.0], (n, 1))
        )

    def f_of(tables, private, site_strength, method):
        settings = {
            "epsilon": math.inf,
            "classes": [0, 1],
            "fit_intercept": False,
            "regularization": site_strength,
        }
        members = [PrivateLinearSVC(**settings).fit(*table) for table in tables]
        plan = TrustedAggregator(method, read_labelled(method, members, private), True)
        return plan.exact()[1], plan

    for _ in range(250):
        d, n, m0 = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(2, 5))
        site_strength, strength = 10.0 ** rng.integers(-2, 2, 2)
        method = FeatureMethod(epsilon=1.0, mechanism="output", regularization=float(strength))
        tables = [(extreme(n, d), rng.integers(0, 2, n)) for _ in range(int(rng.integers(1, 4)))]
        X0, y0 = extreme(m0, d), rng.integers(0, 2, m0)
        f, plan = f_of(tables, Public(X0, y0), float(site_strength), method)
        X, y = tables[0][0].copy(), tables[0][1].copy()
        X[0], y[0] = extreme(1, d)[0], 1 - y[0]
        moved, _ = f_of([(X, y), *tables[1:]], Public(X0, y0), float(site_strength), method)
        most_site = max(most_site, np.linalg.norm(f - moved) / plan.site_reach[0])
        X0, y0 = X0.copy(), y0.copy()
        X0[0], y0[0] = extreme(1, d)[0], 1 - y0[0]
        moved, _ = f_of(tables, Public(X0, y0), float(site_strength), method)
        most_record = max(most_record, np.linalg.norm(f - moved) / plan.record_reach)
    assert 0.1 < most_site <= 1
    assert 0.3 < most_record <= 1


def test_calibrating_to_aggregation_records_alone_does_not_cover_a_site():
    # The broken twin: with many aggregation records their own sensitivity vanishes, a site's does
    # not.
    X, y = records(4, 0)
    X0, y0 = records(5000, 50)
    method = FeatureMethod(epsilon=1.0, mechanism="output", regularization=0.1)
    f = []
    for label in (0, 1):
        changed = y.copy()
        changed[0] = label
        members = [
            PrivateLogisticRegression(
                epsilon=math.inf, regularization=1e-2, intercept_scaling=1.0, classes=[0, 1]
            ).fit(X, changed),
            exact_site(3),
        ]
        plan = TrustedAggregator(method, read_labelled(method, members, Public(X0, y0)), True)
        f.append(plan.exact()[1])
    moved = np.linalg.norm(f[0] - f[1])
    assert plan.record_reach < moved <= plan.site_reach[0]


def test_members_are_as_inexact_as_an_average_takes_them_to_be():
    X0, y0 = records(200, 50)
    method = FeatureMethod(epsilon=1.0, mechanism="output", regularization=0.1)
    members = [exact_site(seed) for seed in (1, 2)]
    plan = TrustedAggregator(method, read_labelled(method, members, Public(X0, y0)), True)
    task = LinearTask(members[0].loss(2), plan.features, 200, 200)
    of_site = plan_linear(members[0], task)
    assert of_site.inexactness == pytest.approx(1.375 * of_site.tolerance / of_site.regularization)
    gain = site_gain(plan.strength) / plan.stretch
    sizes = [member.public_size_ for member in members]
    slack = [
        1.375 * one.tolerance / one.regularization
        for one in (plan_linear(members[0], replace(task, n_records=n, n_units=n)) for n in sizes)
    ]
    assert plan.closing.distance >= gain * math.fsum(slack)


def test_the_sensitivity_formulas_are_those_of_the_proof():
    # E.6 in the papers' coordinates: X' = √N·R, Λ₀ = Λ''·X'^2, δ = 1.
    strength, n, stretch = 0.2, 30, 7.0
    raw = strength * stretch**2
    B = math.sqrt(2 * math.log(2) / raw)
    assert B * stretch < 1 / strength  # the cap used below is the one in force
    assert site_gain(strength) / stretch == pytest.approx(B + stretch * (1 + B * stretch / 4) / raw)
    assert record_reach(strength, n) == pytest.approx(stretch * 2 * stretch / (n * raw))


def test_private_records_of_another_schema_are_refused_before_charging(ledger):
    with pytest.raises(SchemaMismatch, match="features"):
        FeatureMethod(epsilon=0.5).combine(
            [site(1.0, 0)], Public(np.ones((9, 2)), np.ones(9)), ledger=ledger, dataset="ward"
        )
    assert ledger.balance("ward").spent.epsilon == 0


def model(coef, *, number=False):
    """Return a fitted model of another library with these coefficients."""
    made = Ridge() if number else LogisticRegression()
    made.coef_ = np.asarray(coef, float) if number else np.asarray([coef], float)
    made.intercept_ = 0.0 if number else np.zeros(1)
    if not number:
        made.classes_ = np.array([0, 1])
    return made


@pytest.mark.parametrize("coef", [[1.7e308, -1.7e308], [1e155, 0.0], [math.nan, 1.0], [1e97, 0.0]])
@pytest.mark.parametrize("most", [None, 1])
def test_members_that_make_no_number_of_a_record_are_refused_before_charging(coef, most, ledger):
    """A choice counted such a record as -2^63, at any epsilon; or training failed, and was paid."""
    X, y = np.full((40, 2), 0.3), np.arange(40) % 2
    for number in (False, True):
        members = [model(coef, number=number), model([1.0, 1.0], number=number)]
        with pytest.raises(SettingsError, match="Nothing was combined or charged"):
            FeatureMethod(epsilon=0.5, max_members=most, data_norm=1e4).combine(
                members, Public(X, y), ledger=ledger, dataset="ward"
            )
    assert ledger.balance("ward").spent.epsilon == 0


@pytest.mark.parametrize("scaling", ["public", "none"])
@pytest.mark.parametrize("tiny", [0.0, 5e-324, 1e-310, 1e-99])
def test_members_of_nearly_nothing_leave_a_combination_of_numbers(tiny, scaling):
    X, y = records(40, 50)
    tail = [1.0] * (X.shape[1] - 1)
    members = [model([tiny, *[0.0] * len(tail)]), model([0.0, *tail])]
    for most in (None, 1):
        found = FeatureMethod(epsilon=1.0, max_members=most, scaling=scaling).combine(
            members, Public(X, y)
        )
        assert np.isfinite(found.coef).all()
