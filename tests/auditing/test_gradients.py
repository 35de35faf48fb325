"""The exact attack on noisy gradients comes close to what is claimed, and catches broken twins."""

from dataclasses import replace

import numpy as np
import pytest

from bounded import PrivateRidge
from consilience.auditing.audit import audit
from consilience.auditing.checks import check_gaussian
from consilience.learners import gradient
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression

SETTINGS = {"epsilon": 1.0, "delta": 1e-6, "mechanism": "gradient"}
PERSONS = {"unit": "person", "records_per_person": 3}


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge])
@pytest.mark.parametrize("who", [{}, PERSONS], ids=["record", "person"])
@pytest.mark.parametrize(("neighbours", "least"), [("replace-one", 0.7), ("add-remove", 0.9)])
def test_no_pair_of_tables_shows_more_than_is_claimed(kind, who, neighbours, least):
    report = audit(kind(neighbours=neighbours, **SETTINGS, **who))
    assert report.passed, report
    assert report.attack == "all noisy sums"
    assert report.epsilon_lower >= least * report.claimed.epsilon


def test_softmax_is_attacked_too():
    report = audit(PrivateLogisticRegression(**SETTINGS, classes=[0, 1, 2]))
    assert report.passed
    assert report.epsilon_lower > 0.6


class LongRows(PrivateLogisticRegression):
    """Rows enter twice as long as they may be."""

    def make_task(self, X, y, persons=None):
        task, assumptions = super().make_task(X, y, persons)
        return replace(task, X=2 * task.X), assumptions


class HalfTheNoise(PrivateLogisticRegression):
    """The calibration takes one gradient's length for the distance of two."""

    def _plan(self, task):
        plan = super()._plan(task)
        event = replace(plan.event, gradient_sigma=plan.event.gradient_sigma / 2)
        return replace(plan, event=event)


@pytest.mark.parametrize("twin", [LongRows, HalfTheNoise])
@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
def test_a_broken_twin_is_caught(twin, neighbours):
    assert not audit(twin(neighbours=neighbours, **SETTINGS)).passed


def test_a_twin_that_cuts_gradients_too_late_is_caught(monkeypatch):
    learner = PrivateLogisticRegression(neighbours="add-remove", **SETTINGS)
    honest = gradient._gradient

    def twice(loss, coef, blocks):
        return 2 * honest(loss, coef, blocks)

    monkeypatch.setattr(gradient, "_gradient", twice)
    assert not audit(learner).passed


def test_every_step_has_noise_of_its_own(monkeypatch):
    drawn, real = [], gradient._newton

    def listen(moment, plan, curvature):
        step = real(moment, plan, curvature)

        def heard(noisy, coef):
            drawn.append(noisy / plan.event.gradient_sigma)
            return step(noisy, coef)

        return heard

    monkeypatch.setattr(gradient, "_newton", listen)
    monkeypatch.setattr(gradient.Sums, "gradient", lambda self, coef: np.zeros(10, np.int64))
    X = np.zeros((30, 9))
    for _ in range(20):
        PrivateLogisticRegression(classes=[0, 1], **SETTINGS).fit(X, np.arange(30) % 2)
    noise = np.array(drawn)
    assert noise.shape == (20 * gradient.FEWEST_STEPS, 10)
    assert all(check.passed for check in check_gaussian(noise, sigma=1.0))
    assert np.abs(np.corrcoef(noise)[np.triu_indices(len(noise), 1)]).max() < 0.99
