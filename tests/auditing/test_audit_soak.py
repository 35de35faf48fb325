"""The audits' long form: every loss, relation and mechanism with 60 restarts, and a million draws.

Prints one line per configuration (``pytest -m soak -s``), from which docs/guarantees/audit.md takes
its numbers. No seed is fixed here beyond the search's own.
"""

import numpy as np
import pytest

from bounded import PrivateRidge
from consilience.auditing.audit import audit
from consilience.auditing.checks import check_frequencies, check_gaussian, check_radial
from consilience.auditing.sampled import audit_samples
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression
from consilience.privacy import accounting
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.mechanisms import Noise, gaussian, l2_laplace, select

pytestmark = pytest.mark.soak

WHO = {"unit": "record", "neighbours": "replace-one"}
LEARNERS = {
    "logistic": (PrivateLogisticRegression, {}),
    "huber-hinge": (PrivateLinearSVC, {}),
    "softmax": (PrivateLogisticRegression, {"classes": [0, 1, 2]}),
    "huber": (PrivateRidge, {}),
}
UNITS = {"record": {}, "person": {"unit": "person", "records_per_person": 2}}


def attack(name, learner, **settings):
    report = audit(learner, **{"restarts": 60, **settings})
    share = report.epsilon_lower / report.claimed.epsilon
    found = f"{report.epsilon_lower:.4f} of {report.claimed.epsilon:.4f} = {share:.4f}"
    print(f"SOAK {name}: {found}, delta {report.delta_lower}")  # noqa: T201
    assert report.passed, str(report)
    return share


@pytest.mark.parametrize("n_records", [3, 1000])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("loss", LEARNERS)
def test_objective_perturbation_keeps_its_epsilon(loss, unit, neighbours, epsilon, n_records):
    kind, facts = LEARNERS[loss]
    learner = kind(epsilon=epsilon, neighbours=neighbours, **facts, **UNITS[unit])
    share = attack(
        f"objective {loss} {unit} {neighbours} {epsilon} n={n_records}",
        learner,
        n_records=n_records,
    )
    assert share > 0.6


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize(
    "settings",
    [
        {"mechanism": "generalized"},
        {"mechanism": "matrix", "random_state": 3},
        {"data_norm": 100.0},
        {"regularization": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", ["logistic", "huber-hinge", "huber"])
def test_other_calibrations_keep_their_epsilon(loss, settings, neighbours):
    kind, facts = LEARNERS[loss]
    attack(
        f"{settings} {loss} {neighbours}",
        kind(epsilon=1.0, neighbours=neighbours, **facts, **settings),
        n_features=3,
    )


@pytest.mark.parametrize("delta", [1e-2, 1e-6])
@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("loss", LEARNERS)
def test_gaussian_objective_perturbation_keeps_its_delta(loss, unit, neighbours, delta):
    kind, facts = LEARNERS[loss]
    learner = kind(epsilon=1.0, delta=delta, neighbours=neighbours, **facts, **UNITS[unit])
    attack(
        f"gaussian {loss} {unit} {neighbours} {delta}",
        learner,
        restarts=8 if loss == "softmax" else 24,
    )


@pytest.mark.parametrize("n_records", [3, 100])
@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("loss", LEARNERS)
def test_no_pair_moves_the_minimum_by_more_than_the_sensitivity(loss, unit, neighbours, n_records):
    kind, facts = LEARNERS[loss]
    learner = kind(epsilon=1.0, mechanism="output", neighbours=neighbours, **facts, **UNITS[unit])
    attack(
        f"output {loss} {unit} {neighbours} n={n_records}",
        learner,
        n_records=n_records,
        restarts=24,
    )


@pytest.mark.parametrize("mechanism", ["objective", "output"])
def test_a_sampled_learner_keeps_its_epsilon(mechanism):
    learner = PrivateLinearSVC(
        epsilon=1.0, mechanism=mechanism, fit_intercept=False, regularization=1.0
    )
    attack(f"sample {mechanism}", learner, kind="sample", n_records=10, runs=50_000)


def test_a_million_laplace_draws_tell_three_percent():
    source, n = Noise().open(), 1_000_000
    claimed = Guarantee(epsilon=1.0, delta=0.0, **WHO)

    def draw():
        return source.exponential(n) * np.where(source.words(n) % 2, 1.0, -1.0)

    for factor, right in ((1.0, True), (1.03, False)):
        report = audit_samples(draw() / factor, 1 + draw() / factor, claimed=claimed)
        print(f"SOAK laplace control x{factor}: {report.epsilon_lower:.4f}")  # noqa: T201
        assert report.passed is right


@pytest.mark.parametrize("dimension", [1, 3, 50])
def test_a_hundred_thousand_vectors_follow_their_law(dimension):
    event, source = accounting.L2Laplace(sensitivity=1.0, scale=0.7, **WHO), Noise().open()
    draws = np.stack([l2_laplace(dimension, event=event, source=source) for _ in range(100_000)])
    assert all(c.passed for c in check_radial(draws, scale=0.7))
    assert not all(c.passed for c in check_radial(draws, scale=0.95 * 0.7))
    normal = accounting.Gaussian(sensitivity=1.0, sigma=0.7, at_delta=1e-5, **WHO)
    draws = gaussian(1_000_000, event=normal, source=source)[:, None]
    assert all(c.passed for c in check_gaussian(draws, sigma=0.7))
    assert not all(c.passed for c in check_gaussian(draws, sigma=0.95 * 0.7))


def test_exact_selection_is_the_exponential_mechanism():
    event, source = (
        accounting.Selection(sensitivity=1.0, scale=1.5, monotone="no", **WHO),
        Noise().open(),
    )
    scores = np.array([0.0, 1.0, 4.0, 2.5])
    counts = np.bincount(
        [select(scores, event=event, source=source) for _ in range(100_000)], minlength=4
    )
    assert check_frequencies(counts, np.exp(scores / 1.5) / np.exp(scores / 1.5).sum()).passed
