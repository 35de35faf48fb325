"""GradientStep: a public model that all sites' records improve by one step."""

import math

import numpy as np
import pytest
from scipy.special import expit

from consilience import Noise
from consilience.errors import SettingsError
from consilience.learners.ball import into_ball
from consilience.statistics.gradient_step import GradientStep, start_from
from consilience.statistics.total import Total
from consilience.tables.public import Public
from sums import DELTA


def made_up(n, seed, n_classes=2, d=6):
    """Return classes that a softmax of fixed coefficients decides."""
    draw = np.random.default_rng(seed)
    true = np.random.default_rng(1).normal(size=(n_classes, d)) * 4
    X = draw.normal(size=(n, d))
    X /= np.maximum(1, np.linalg.norm(X, axis=1, keepdims=True))
    return X, (X @ true.T + draw.gumbel(size=(n, n_classes))).argmax(axis=1)


def test_the_sum_is_that_of_gradients_cut_one_by_one():
    X, y = made_up(50, 3)
    start = [[1.0, -2.0, 0.0, 0.5, 0.0, 0.0, 0.3]]
    model = GradientStep(epsilon=math.inf, classes=[0, 1], start=start, longest=0.2).fit(X, y)
    rows, signs = into_ball(X, model), 2.0 * y - 1
    scores = X @ np.array(start[0][:-1]) + start[0][-1]
    slopes = -signs * expit(-signs * scores)
    lengths = np.abs(slopes) * np.linalg.norm(rows, axis=1)
    slopes *= np.minimum(1.0, 0.2 / lengths)
    assert model.total_ * model.grain == pytest.approx(slopes @ rows, abs=50 * 2**-13)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_a_step_improves_the_public_model_and_falls_back_to_it(n_classes):
    public, fresh = Public(*made_up(60, 5, n_classes)), made_up(4000, 6, n_classes)
    classes = list(range(n_classes))
    start = start_from(public, classes=classes)

    def error(epsilon, seed=0):
        members = []
        for i in range(8):
            settings = {"classes": classes, "start": start, "noise": Noise(seed=100 * seed + i)}
            learner = GradientStep(epsilon=epsilon, delta=DELTA, **settings)
            members.append(learner.fit(*made_up(600, 10 + i, n_classes)))
        joined = Total().combine(members, public)
        return np.mean(joined.predict(fresh[0]) != fresh[1])

    rows = np.array(start)
    scores = fresh[0] @ rows[:, :-1].T + rows[:, -1]
    found = (scores[:, 0] > 0).astype(int) if n_classes == 2 else scores.argmax(axis=1)
    alone = np.mean(found != fresh[1])
    assert error(2.0) < alone - 0.01
    assert max(error(0.002, seed) for seed in range(3)) < alone + 0.03


def test_a_site_alone_predicts_without_public_records():
    X, y = made_up(500, 2)
    start = start_from(Public(*made_up(40, 5)))
    model = GradientStep(epsilon=1.0, delta=DELTA, classes=[0, 1], start=start).fit(X, y)
    assert np.mean(model.predict(X) == y) > 0.6


@pytest.mark.parametrize(
    "start",
    [
        None,
        [],
        [[0.0, math.nan]],
        [["a", "b"]],
        [[0.0, 1.0]],  # too few columns
        [[0.0] * 7, [0.0] * 7],  # rows of too many classes
    ],
)
def test_a_start_that_does_not_fit_is_refused_before_anything_is_charged(start):
    with pytest.raises(SettingsError, match="start"):
        GradientStep(epsilon=1.0, delta=DELTA, classes=[0, 1], start=start).fit(*made_up(20, 1))


def test_a_length_that_cannot_be_one_is_refused():
    learner = GradientStep(
        epsilon=1.0, delta=DELTA, classes=[0, 1], start=[[0.0] * 7], longest=-1.0
    )
    with pytest.raises(SettingsError, match="longest"):
        learner.fit(*made_up(20, 1))
