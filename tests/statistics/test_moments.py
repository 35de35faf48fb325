"""Moments: tight sensitivities, least squares when exact, sense when mostly noise."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import Ridge
from sklearn.metrics import log_loss, roc_auc_score

from consilience import Noise
from consilience.learners.ball import into_ball
from consilience.privacy.guarantee import Neighbours
from consilience.statistics.moments import Moments, MomentsRegressor, class_codes, moments_reach
from consilience.statistics.total import Total
from sums import DELTA


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("beta", [0.3, 1.0, 1.5])
def test_the_distance_of_two_records_is_the_largest_that_a_search_finds(beta, gamma):
    """Replace-one, by a maximiser that knows nothing of the formula; it may not do better."""

    def moved(z):
        x, u = (part / max(1.0, np.linalg.norm(part)) for part in (z[:3], z[3:6]))
        y, v = np.tanh(5 * z[6:])
        gap = np.square(np.outer(x, x) - np.outer(u, u)).sum()
        gap += beta**2 * np.square(x * y - u * v).sum() + gamma**2 * (y * y - v * v) ** 2
        return -math.sqrt(gap)

    draw = np.random.default_rng(0)
    best = max(-minimize(moved, draw.normal(size=8), method="BFGS").fun for _ in range(40))
    stated = moments_reach(Neighbours.REPLACE_ONE, beta, gamma)
    assert best <= stated * (1 + 1e-9)
    assert best >= stated * 0.999


@pytest.mark.parametrize("n_classes", [2, 3, 10])
def test_class_codes_are_unit_vectors_that_are_equally_far_apart(n_classes):
    codes = class_codes(n_classes)
    inner = codes @ codes.T
    expected = np.full((n_classes, n_classes), -1 / (n_classes - 1)) + np.eye(n_classes) * (
        1 + 1 / (n_classes - 1)
    )
    assert inner == pytest.approx(expected)


def made_up(n, seed, *, share=0.5):
    """Return two normal classes of which the second has that share."""
    draw = np.random.default_rng(seed)
    y = (draw.random(n) < share).astype(int)
    X = draw.normal(size=(n, 4)) / 5 + np.outer(y, [0.3, -0.1, 0.0, 0.0])
    return X, y


def test_exact_moments_are_a_linear_discriminant_with_true_probabilities():
    X, y = made_up(20_000, 1, share=0.2)
    model = Moments(epsilon=math.inf).fit(X, y)
    fresh, labels = made_up(20_000, 2, share=0.2)
    found = model.predict_proba(fresh)[:, 1]
    odds = (fresh @ [0.3, -0.1, 0, 0] - 0.05) * 25 + math.log(0.2 / 0.8)
    true = 1 / (1 + np.exp(-odds))
    assert np.abs(found - true).mean() < 0.02
    assert log_loss(labels, found) < log_loss(labels, true) + 0.002


def test_exact_moments_of_numbers_are_a_ridge_regression():
    X, _ = made_up(3000, 3)
    y = np.clip(X @ [0.5, -0.2, 0.1, 0.0] + 0.1, -1, 1)
    model = MomentsRegressor(epsilon=math.inf, label_bound=1.0, data_norm=3.0).fit(X, y)
    plain = Ridge(alpha=1e-6).fit(X, y)
    assert model.predict(X) == pytest.approx(plain.predict(X), abs=0.01)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_noise_at_every_site_leaves_a_model_and_honest_probabilities(share):
    fresh, labels = made_up(5000, 99, share=share)
    members = []
    for i in range(10):
        learner = Moments(epsilon=1.0, delta=DELTA, classes=[0, 1], noise=Noise(seed=i))
        members.append(learner.fit(*made_up(1000, i, share=share)))
    joined = Total().combine(members)
    found = joined.predict_proba(fresh)[:, 1]
    assert roc_auc_score(labels, found) > 0.8
    base = np.mean(labels)
    assert log_loss(labels, found) < log_loss(labels, np.full(len(labels), base))


def test_where_noise_drowns_everything_little_is_said():
    """Log-odds stay moderate, but for one draw in twenty."""
    fresh, labels = made_up(3000, 7)
    losses = []
    for seed in range(10):
        noise = Noise(seed=seed)
        model = Moments(epsilon=0.01, delta=DELTA, classes=[0, 1], noise=noise).fit(*made_up(50, 1))
        found = model.predict_proba(fresh)[:, 1]
        losses.append(log_loss(labels, np.clip(found, 1e-9, 1 - 1e-9)))
    assert sorted(losses)[-2] < 1.5


def test_classes_and_sums_are_the_moments_of_the_rows():
    X, y = made_up(30, 5)
    model = Moments(epsilon=math.inf, classes=[0, 1]).fit(X, y)
    rows = into_ball(X, model)
    values = model.total_ * model.grain
    assert values[:15] == pytest.approx((rows.T @ rows)[np.tril_indices(5)], abs=30 * 2**-14)
    assert values[15:] == pytest.approx(rows.T @ (2.0 * y - 1), abs=30 * 2**-14)
