import json
import math

import numpy as np
import pytest
from scipy import stats

from consilience.errors import SettingsError
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.plan import plan, read_public
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise

N_FEATURES = 10


def records(n, seed, slope=3.0):
    """Made-up records of a well-specified logistic model with directions of unequal spread."""
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(n, N_FEATURES)) * np.linspace(1.5, 0.5, N_FEATURES) / math.sqrt(N_FEATURES) / 1.6
    X /= np.maximum(1, np.linalg.norm(X, axis=1, keepdims=True))
    weights = np.random.default_rng(99).normal(size=N_FEATURES) * slope
    return X, (draw.random(n) < 1 / (1 + np.exp(-(X @ weights + 0.5)))).astype(int)


PUBLIC = records(4000, 3)
TEST = records(40_000, 7)


def losses(learner, margins, y):
    """The loss that the learner minimises, written down a second time."""
    z = np.where(y == 1, margins, -margins)
    if isinstance(learner, PrivateLogisticRegression):
        return np.logaddexp(0, -z)
    h = learner.huber
    return np.where(z > 1 + h, 0, np.where(z < 1 - h, 1 - z, (1 + h - z) ** 2 / (4 * h)))


def risk(learner, coef=None, intercept=None):
    X, y = TEST
    margins = X @ np.ravel(learner.coef_ if coef is None else coef)
    margins = margins + float(np.ravel(learner.intercept_ if intercept is None else intercept)[0])
    return losses(learner, margins, y).mean(), np.mean((margins > 0) != (y == 1))


def measured(kind, n, epsilon, *, repeats, sites=1, **settings):
    """Mean excess loss and error of really trained models over the exact model on very many records."""
    exact = risk(kind(epsilon=math.inf, **{**settings, "delta": 0.0}).fit(*records(200_000, 5)))[0]
    found = []
    for repeat in range(repeats):
        models = [
            kind(epsilon=epsilon, noise=Noise(seed=1000 * repeat + site), **settings).fit(
                *records(n, 100 + 1000 * repeat + site)
            )
            for site in range(sites)
        ]
        mean = [np.mean([getattr(m, name) for m in models], axis=0) for name in ("coef_", "intercept_")]
        found.append(risk(models[0], *mean))
    loss, error = np.mean(found, axis=0)
    return loss - exact, error


# Fixed seeds, so these comparisons never alarm by chance. Cells are such that the excess is well above the sampling
# error of `measured`; where margins move by more than 1 no factor is promised, see the test below. An error is known
# to 0.02, three standard deviations of one counted on 4000 public records, and to 3 of the mean of 25 real trainings.
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kind", "n", "epsilon", "settings"),
    [
        (PrivateLogisticRegression, 1000, 2.0, {"regularization": 1e-3}),
        (PrivateLogisticRegression, 5000, 0.5, {"regularization": 1e-3}),
        (PrivateLogisticRegression, 20_000, 0.1, {"regularization": 1e-3}),
        (PrivateLogisticRegression, 1000, 0.5, {"regularization": 1e-2}),
        (PrivateLogisticRegression, 5000, 0.5, {"regularization": 1e-3, "delta": 1e-5}),
        (PrivateLogisticRegression, 1000, 2.0, {"regularization": 1e-2, "mechanism": "output"}),
        (PrivateLogisticRegression, 5000, 2.0, {"regularization": 1e-3, "mechanism": "output", "delta": 1e-5}),
        (PrivateLinearSVC, 1000, 0.5, {"regularization": 1e-2}),
    ],
)
def test_expected_loss_and_error_are_those_of_real_trainings(kind, n, epsilon, settings):
    row = plan(n_records=n, epsilon=epsilon, public=PUBLIC, learner=kind, **settings).at(epsilon)
    excess, error = measured(kind, n, epsilon, repeats=25, **settings)
    assert row.asymptotic
    assert excess / 2 < row.excess_loss < 2 * excess
    assert excess / 2 < row.simulated_loss < 2 * excess
    assert abs(row.error - error) < 0.02 + 3 * row.error_spread / math.sqrt(25)


def test_expected_loss_of_joined_sites_is_that_of_real_averages():
    settings = {"regularization": 1e-2}
    advice = plan(n_records=500, epsilon=0.5, n_sites=8, public=PUBLIC, **settings)
    excess, error = measured(PrivateLogisticRegression, 500, 0.5, repeats=40, sites=8, **settings)
    row = advice.at(0.5)
    assert excess / 2 < row.excess_loss < 2 * excess
    assert excess / 2 < row.simulated_loss < 2 * excess
    assert abs(row.error - error) < 0.02 + 3 * row.error_spread / math.sqrt(25)
    assert row.error < advice.alone.error


def test_for_an_average_with_a_weak_ridge_the_asymptotic_estimate_is_too_high_and_the_simulated_one_holds():
    # A limit of the method, kept in sight: over 40 repeats the excess was 0.0028 ± 0.0011, the estimate 0.0064.
    settings = {"regularization": 1e-3}
    row = plan(n_records=1000, epsilon=1.0, n_sites=8, public=PUBLIC, **settings).at(1.0)
    excess, _ = measured(PrivateLogisticRegression, 1000, 1.0, repeats=40, sites=8, **settings)
    assert row.asymptotic
    assert row.excess_loss > 2 * excess
    assert excess / 2 < row.simulated_loss < 2 * excess


def test_with_too_much_noise_the_asymptotic_estimate_says_so_and_the_simulated_one_holds():
    settings = {"regularization": 1e-3, "mechanism": "output"}
    row = plan(n_records=1000, epsilon=0.1, public=PUBLIC, **settings).at(0.1)
    excess, _ = measured(PrivateLogisticRegression, 1000, 0.1, repeats=25, **settings)
    assert not row.asymptotic
    assert row.excess_loss > 5 * excess
    assert excess / 2 < row.simulated_loss < 2 * excess


@pytest.mark.statistical
@pytest.mark.parametrize("mechanism", ["objective", "output", "generalized"])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_the_worst_case_is_never_exceeded(mechanism, delta, epsilon):
    # The bound holds but for probability 5e-7 in each of 12 x 20 trainings: a false alarm in 1e-4, and seeds are fixed.
    n, settings = 500, {"mechanism": mechanism, "delta": delta, "fit_intercept": False}
    X, y = records(n, 11)
    advice = plan(n_records=n, n_features=N_FEATURES, epsilon=epsilon, failure=1e-6, **settings)
    ridge = advice._planner.noise(n).ridge

    def objective(coef):  # without intercept the learner's coordinates are ours
        return losses(PrivateLogisticRegression(epsilon=1), X @ coef, y).mean() + ridge / 2 * coef @ coef

    exact = PrivateLogisticRegression(epsilon=math.inf, regularization=ridge, fit_intercept=False).fit(X, y)
    least = objective(exact.coef_.ravel())
    gaps = [
        objective(PrivateLogisticRegression(epsilon=epsilon, noise=Noise(seed=s), **settings).fit(X, y).coef_.ravel())
        - least
        for s in range(20)
    ]
    assert max(gaps) <= advice.at(epsilon).noise_bound
    assert advice.at(epsilon).bound > 2 * advice.at(epsilon).noise_bound


def test_bounds_have_the_constants_of_the_specification():
    # algorithms.md, section I: T = (c + Λ)/2 (Q_d(p) S/ε)² and T = Q_d(p)²/(β² n² Λ), with Q by an outside library.
    n, p, ridge = 3000, 0.02, 1e-2
    for mechanism in ("output", "objective"):
        advice = plan(
            n_records=n, n_features=4, epsilon=1.0, failure=2 * p, mechanism=mechanism, regularization=ridge, signal=1.5
        )
        event = advice._planner.noise(n).plan.noise
        quantile = stats.gamma.ppf(1 - p, 5)
        if mechanism == "output":
            term = (0.25 + ridge) / 2 * (quantile * event.sensitivity / event.epsilon) ** 2
        else:
            term = quantile**2 * event.scale**2 / (n**2 * ridge)
        row = advice.at(1.0)
        assert row.noise_bound == pytest.approx(term, rel=1e-9)
        reference = (0.05 * 1.5 / (0.05 + ridge)) ** 2 * 5
        generic = ridge / 2 * reference + 16 * (32 + math.log(1 / p)) / (ridge * n) + 2 * term
        assert row.bound == pytest.approx(generic, rel=1e-9)


def test_without_public_data_the_estimate_is_the_textbook_formula():
    # d/(2n) + ½ tr(H⁻¹ Cov(b)/n²) in the limit of no ridge (algorithms.md, section I).
    # The closing noise comes on top: with a ridge this small against n it is not negligible.
    n, d, bend = 10**6, 20, 0.02
    advice = plan(n_records=n, n_features=d - 1, epsilon=1.0, curvature=bend, regularization=1e-6)
    row, noise = advice.at(1.0), advice._planner.noise(n).plan
    drawn = d * (d + 1) * noise.noise.scale**2 / (2 * bend * n**2)
    assert row.sampling_loss == pytest.approx(d / (2 * n), rel=1e-3)
    assert row.noise_loss == pytest.approx(drawn + bend * d * noise.closing.scale**2, rel=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"delta": 1e-6},
        {"mechanism": "output"},
        {"neighbours": "add-remove", "public_size": 400},
        {"calibration": "chaudhuri2011"},
        {"unit": "person", "records_per_person": 1},
    ],
)
def test_planned_noise_is_the_noise_that_training_charges(tmp_path, settings):
    X, y = records(400, 1)
    limit = Budget(
        epsilon=1.0,
        delta=settings.get("delta", 0.0),
        neighbours=settings.get("neighbours", "replace-one"),
        unit=settings.get("unit", "record"),
    )
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.allow("ward", limit)
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], **settings)
    persons = {"persons": np.arange(400)} if learner.unit == "person" else {}
    learner.fit(X, y, ledger=ledger, dataset="ward", **persons)
    advice = plan(n_records=400, n_features=N_FEATURES, epsilon=1.0, classes=[0, 1], **settings)
    assert tuple(advice._planner.noise(400).plan.events) == ledger.charges()[0].events


def test_more_epsilon_or_more_records_never_mean_more_loss():
    advice = plan(n_records=5000, n_features=20, epsilon=1.0)
    by_epsilon = [row.excess_loss for row in advice.rows]
    by_n = [plan(n_records=n, n_features=20, epsilon=1.0).at(1.0).excess_loss for n in (1000, 5000, 25_000)]
    assert by_epsilon == sorted(by_epsilon, reverse=True)
    assert by_n == sorted(by_n, reverse=True)


def test_required_n_is_just_enough():
    advice = plan(n_records=5000, n_features=20, epsilon=0.5)
    n = advice.required_n(0.02)
    reached = plan(n_records=int(n), n_features=20, epsilon=0.5).at(0.5).excess_loss
    missed = plan(n_records=int(0.97 * n), n_features=20, epsilon=0.5).at(0.5).excess_loss
    assert reached <= 0.02 < missed
    assert advice.required_n(0.02, worst_case=True) > 100 * n
    assert advice.required_n(0.01) > n
    assert advice.required_n(1e-14) == math.inf


def test_advice_prints_a_table_and_a_sentence_and_travels_as_json():
    bare = plan(n_records=8678, n_features=50, epsilon=0.1)
    assert "At epsilon=0.1 with n=8,678 expect an excess loss of about" in str(bare)
    assert "only the order of magnitude is meant" in str(bare)
    joined = plan(n_records=500, epsilon=1.0, n_sites=3, public=records(300, 4))
    assert "averaging 3 sites of n=500 each" in str(joined)
    assert "one such site alone" in str(joined)
    for advice in (bare, joined):
        assert str(advice).count("\n") >= len(advice.rows)
        values = json.loads(json.dumps(advice.as_dict(), allow_nan=False))
        assert len(values["rows"]) == 7
        assert values["required_n"] < values["required_n_worst_case"]
    assert plan(n_records=50, n_features=2, epsilon=0.1, target=1e-14).as_dict()["required_n"] is None


def test_the_same_seed_gives_the_same_advice():
    first, second, third = (plan(n_records=500, epsilon=1.0, public=records(300, 4), seed=s) for s in (1, 1, 2))
    assert first.rows == second.rows
    assert first.rows != third.rows


def test_a_public_file_is_encoded_by_its_own_bounds(tmp_path):
    path = tmp_path / "public.csv"
    path.write_text("age,ward,same,ill\n20,a,1,no\n60,b,1,yes\n,a,1,no\n40,,1,yes\n")
    X, y = read_public(path, "ill")
    assert X.shape == (4, 3)
    assert (X[:, 0] * math.sqrt(2)).tolist() == pytest.approx([-1, 1, 0, 0])
    assert y.tolist() == [0, 1, 0, 1]
    with pytest.raises(SettingsError, match="no column 'label'"):
        read_public(path, "label")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_records": 0}, "n_records"),
        ({"n_records": 10.5}, "n_records"),
        ({"n_sites": 0}, "n_sites"),
        ({"n_features": None}, "n_features"),
        ({"n_features": 0}, "n_features"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"target": 0}, "target"),
        ({"failure": 1.0}, "failure"),
        ({"signal": 0}, "signal"),
        ({"curvature": -1}, "curvature"),
        ({"mechanism": "matrix"}, "mechanism"),
        ({"learner": PrivateRidge}, "PrivateRidge"),
        ({"public": records(50, 1), "n_features": 3}, "10, as many as the public data has"),
        ({"public": (PUBLIC[0][:60], np.arange(60) % 3), "n_features": None}, "3 classes"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(SettingsError, match=message):
        plan(**{"n_records": 100, "n_features": 5, "epsilon": 1.0, **change})


def test_only_epsilons_of_the_table_can_be_looked_up():
    with pytest.raises(SettingsError, match=r"one of 0\.1, 0\.2"):
        plan(n_records=100, n_features=5, epsilon=1.0).at(0.3)
