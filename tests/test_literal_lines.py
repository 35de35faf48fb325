"""Lines that are drawn as in a paper: its noise to the digit, and what the library refuses."""

import math

import numpy as np
import pytest
from experiments.lines import as_printed, sums
from experiments.xie2016thesis.figures import svc
from experiments.xie2016thesis.literal import UnscaledFeature, perturbed_weights, plan_weights
from experiments.xie2016thesis.theorems import squared

import consilience as cs
from consilience.errors import GuaranteeVoid
from consilience.learners.erm import HuberHinge
from consilience.learners.perturbation import LinearTask, plan_linear
from consilience.privacy.mechanisms import Noise
from consilience.privacy.vector_noise import main_share

SETTINGS = {"regularization": 1e-2, "toward": "zero", "scaling": "none"}


def made(seed, n=60, d=5):
    source = Noise(seed=seed).open()
    X = source.normal(n * d).reshape(n, d)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = np.where(X[:, 0] + 0.3 * source.normal(n) > 0, 1, -1)
    return X, y


def members(n=4, epsilon=0.5):
    return [
        svc(1e-2, "chaudhuri2011", epsilon=epsilon, classes=(-1, 1), noise=Noise(seed=i)).fit(
            *made(i)
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("epsilon", [0.1, 0.25])
def test_noise_as_printed_is_that_of_the_rule_of_2011_to_the_digit(epsilon):
    n, ridge, curvature = 789, 1e-2, 1.0
    left = epsilon - 2 * math.log1p(curvature / (n * ridge))
    whole = n * ridge
    if left <= 0:
        left, whole = epsilon / 2, curvature / math.expm1(epsilon / 4)
    given = as_printed({"epsilon": {"level": [epsilon, math.inf]}, "sizes": [n]})
    first, exact = given["epsilon"]["level"]
    learner = svc(ridge, "chaudhuri2011", epsilon=first)
    plan = plan_linear(learner, LinearTask(HuberHinge(0.5), 50, n, n))
    assert plan.noise.scale == pytest.approx(2 / left, rel=1e-9)
    assert plan.regularization == pytest.approx(whole, rel=1e-9)
    assert exact == math.inf
    assert given["sizes"] == [n]


def test_private_weights_are_the_minimum_on_scores_of_any_length():
    X, y = made(1)
    scores = 40.0 * X
    noise = Noise(seed=3).open().normal(5) * 30
    w = perturbed_weights(scores, y, 0.6, noise)
    gradient = scores.T @ (-y / (1 + np.exp(y * (scores @ w)))) + 0.6 * w + noise
    assert np.abs(gradient).max() < 1e-5


def test_the_noise_of_private_weights_does_not_look_at_the_length_of_scores():
    plan = plan_weights(0.05 / main_share(1.0), 1e-2, (789, 10))
    assert plan.noise.scale == pytest.approx(2 / 0.025, rel=1e-9)  # below 0.062 half of ε is left
    assert plan.regularization == pytest.approx(0.25 / math.expm1(0.0125), rel=1e-9)


def test_weights_from_unscaled_scores_need_a_seed_and_promise_nothing():
    X, y = made(9)
    public = cs.Public(X, y)
    with pytest.raises(GuaranteeVoid, match="hides no record"):
        UnscaledFeature(epsilon=0.5, **SETTINGS).combine(members(), public)
    literal = UnscaledFeature(epsilon=0.5, noise=Noise(seed=1), **SETTINGS)
    found = literal.combine(members(), public)
    assert found.guarantee is None
    assert found.aggregation_guarantee is None
    rescaled = cs.FeatureMethod(epsilon=0.5, noise=Noise(seed=1), **SETTINGS)
    assert squared(found.coef, rescaled.combine(members(), public).coef) > 1e-6
    exact = cs.FeatureMethod(**SETTINGS).combine(members(), public)
    near = UnscaledFeature(epsilon=1e7, noise=Noise(seed=1), **SETTINGS).combine(members(), public)
    assert np.allclose(near.coef, exact.coef, rtol=1e-3, atol=1e-4)


def test_sums_are_tried_with_noise_at_sites_and_shared():
    X, y = made(5, n=600)
    given = sums({"sizes": [80] * 4, "public": 80, "test": 0.2, "epsilon": 1.0}, 4)
    report = cs.simulate(given.pop("learner"), given.pop("aggregator"), X, y, seed=1, **given)
    errors = {(row.learner, row.method): row.value for row in report.rows if row.metric == "error"}
    tried = {("moments", "at sites"), ("moments", "shared")}
    tried |= {("gradient", "at sites"), ("gradient", "shared")}
    assert tried <= errors.keys()
    assert max(errors["gradient", way] for way in ("at sites", "shared")) < 0.4
