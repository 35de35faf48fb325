import numpy as np
import pytest

from consilience import Noise, PrivateLogisticRegression, PrivateRidge
from consilience.aggregators.boosting import SiteBoosting, _Boost
from consilience.errors import SettingsError
from consilience.learners.erm import Logistic, Squared
from consilience.tables.public import Public


def sites(n_noise=4, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-0.4, 0.4, (2000, 5))
    y = (X @ [6.0, -4, 2, 0, 0] > 0.2 * rng.normal(size=2000)).astype(int)
    good = PrivateLogisticRegression(epsilon=20.0, classes=[0, 1], noise=Noise(seed=99)).fit(
        X[:1000], y[:1000]
    )
    noise = [
        PrivateLogisticRegression(epsilon=20.0, classes=[0, 1], noise=Noise(seed=s)).fit(
            X[:200], rng.integers(0, 2, 200)
        )
        for s in range(n_noise)
    ]
    return [*noise, good], Public(X[1000:1300], y[1000:1300]), (X[1300:], y[1300:])


def test_the_one_good_site_gets_the_weight():
    members, public, (X, y) = sites()
    ensemble = SiteBoosting().combine(members, public)
    assert np.argmax(ensemble.weights) == 4
    assert np.mean(ensemble.predict(X) == y) > 0.9 * np.mean(members[-1].predict(X) == y)


def test_a_round_is_the_weighted_least_squares_fit_of_logitboost():
    rng = np.random.default_rng(0)
    H, y = rng.normal(size=(50, 3)), rng.choice([-1.0, 1.0], 50)
    steps, _ = _Boost(H, y, Logistic(), 0.1).path(np.arange(50), np.arange(0), 2)
    expected, scores = np.zeros(3), np.zeros(50)
    for _ in range(2):  # Friedman, Hastie & Tibshirani 2000, algorithm 3, one column at a time
        p = 1 / (1 + np.exp(-scores))
        weight, response = p * (1 - p), ((y + 1) / 2 - p) / (p * (1 - p))
        fits = [np.sum(weight * h * response) / np.sum(weight * h * h) for h in H.T]
        left = [np.sum(weight * (response - b * h) ** 2) for b, h in zip(fits, H.T, strict=True)]
        best = int(np.argmin(left))
        expected[best] += 0.1 * fits[best]
        scores += 0.1 * fits[best] * H[:, best]
    np.testing.assert_allclose(steps[0], expected, rtol=1e-9)


def test_many_rounds_reach_least_squares():
    rng = np.random.default_rng(0)
    H = rng.normal(size=(80, 3))
    y = H @ [0.3, -0.2, 0.1] + 0.05 * rng.normal(size=80)
    steps, losses = _Boost(H, y, Squared(1.0), 0.5).path(np.arange(80), np.arange(80), 300)
    np.testing.assert_allclose(steps[0], np.linalg.lstsq(H, y, rcond=None)[0], atol=1e-6)
    assert (np.diff(losses) <= 1e-12).all()


def test_held_out_records_stop_it_early():
    members, public, _ = sites()
    shuffled = Public(public.X, np.random.default_rng(5).permutation(public.y))
    few, many = (
        np.abs(SiteBoosting().combine(members, p).weights).sum() for p in (shuffled, public)
    )
    assert few < many


def test_coordinates_help_where_no_site_does():
    members, public, (X, y) = sites()
    without, with_them = (
        np.mean(SiteBoosting(coordinates=c).combine(members[:-1], public).predict(X) == y)
        for c in (False, True)
    )
    assert with_them > max(without, 0.8)


def test_coordinates_and_constant_reach_the_predictions_of_regressors():
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.5, 0.5, (300, 2))
    member = PrivateRidge(epsilon=5.0, label_bound=5.0, noise=Noise(seed=0)).fit(X, X[:, 0])
    y = 3 * X[:, 1] + 1
    ensemble = SiteBoosting(400, coordinates=True).combine([member], Public(X, y))
    assert np.mean((ensemble.predict(X) - y) ** 2) < 0.05


@pytest.mark.parametrize(
    "settings",
    [
        {"n_rounds": 0},
        {"n_rounds": 1.5},
        {"n_rounds": 10**9},
        {"shrinkage": 0.0},
        {"shrinkage": 2.0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    members, public, _ = sites()
    with pytest.raises(SettingsError, match=r"n_rounds|shrinkage"):
        SiteBoosting(**settings).combine(members, public)
