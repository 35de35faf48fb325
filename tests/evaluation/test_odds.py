"""Intervals of odds ratios cover what the model would be without noise, as often as they say."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import consilience as cs
from consilience.aggregators.average import _Central
from consilience.aggregators.members import as_members
from consilience.errors import SettingsError
from consilience.learners.axes import PublicAxes
from consilience.privacy.vector_noise import _radial_quantile

SCHEMA = cs.Schema(
    [
        cs.Numeric("age", 0, 100),
        cs.Categorical("sex", ("f", "m", "d")),
        cs.Numeric("dose", 1, 64, transform="log"),
        cs.Numeric("bmi", 10, 50, cuts=(20, 30)),
    ],
    "ill",
    classes=("no", "yes"),
)
RUNS = 150
SETTINGS = {"mechanism": "output", "regularization": 0.05, "schema": SCHEMA}


def table(n=400):
    draw = np.random.default_rng(3)
    age = draw.uniform(0, 100, n)
    return {
        "age": age,
        "sex": draw.choice(["f", "m", "d"], n),
        "dose": draw.uniform(1, 64, n),
        "bmi": draw.uniform(10, 50, n),
        "ill": np.where(age + draw.normal(0, 30, n) > 50, "yes", "no"),
    }


def test_a_coordinate_of_radial_noise_has_the_stated_quantile():
    assert _radial_quantile(1, 0.95) == pytest.approx(-math.log(0.05), abs=1e-5)  # Laplace
    draw = np.random.default_rng(0)
    for d in (2, 9):
        directions = draw.normal(size=(200_000, d))
        unit = directions[:, 0] / np.linalg.norm(directions, axis=1)
        drawn = np.abs(draw.gamma(d, size=len(unit)) * unit)
        # The standard error of this share is 0.0005; the seed is fixed.
        assert (drawn <= _radial_quantile(d, 0.95)).mean() == pytest.approx(0.95, abs=0.0025)


@pytest.mark.statistical
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_intervals_cover_the_model_without_noise_as_often_as_they_say(delta):
    """Of 150 fits, each ratio's interval misses 5 %: a share beyond these bounds has chance 1e-6.

    There are 6 ratios in each of two runs, so that the test fails wrongly with a chance below
    1.2e-5; the seeds are fixed.
    """
    records = table()
    exact = cs.PrivateLogisticRegression(epsilon=math.inf, **SETTINGS).fit(records)
    truth = [row.value for row in cs.odds_ratios(exact, SCHEMA).rows]
    covered = np.zeros((RUNS, len(truth)))
    for seed in range(RUNS):
        learner = cs.PrivateLogisticRegression(
            epsilon=1.0, delta=delta, noise=cs.Noise(seed=seed), **SETTINGS
        ).fit(records)
        found = cs.odds_ratios(learner, SCHEMA).rows
        covered[seed] = [r.low <= t <= r.high for r, t in zip(found, truth, strict=True)]
    low, high = stats.binom.interval(1 - 1e-6, RUNS, 0.95)
    hits = covered.sum(axis=0)
    assert len(truth) == 6
    assert ((low <= hits) & (hits <= high)).all(), hits


def test_changes_are_named_and_an_exact_model_has_exact_ratios():
    exact = cs.PrivateLogisticRegression(epsilon=math.inf, **SETTINGS).fit(table())
    found = cs.odds_ratios(exact, SCHEMA)
    assert [f"{row.column}: {row.change}" for row in found.rows] == [
        "age: for each unit more",
        "sex: m against f",
        "sex: d against f",
        "dose: for each doubling",
        "bmi: from 20 on against below 20",
        "bmi: from 30 on against below 20",
    ]
    assert all(row.low == row.value == row.high for row in found.rows)
    rows = {"age": [30, 31], "sex": ["f", "f"], "dose": [4, 4], "bmi": [25, 25]}
    low, high = exact.decision_function(rows)
    assert found.rows[0].value == pytest.approx(math.exp(high - low))
    rows = {"age": [30, 30], "sex": ["f", "f"], "dose": [4, 8], "bmi": [25, 25]}
    low, high = exact.decision_function(rows)
    assert found.rows[3].value == pytest.approx(math.exp(high - low))
    assert "dose: for each doubling" in str(found)
    assert "not that records are a sample" in found._repr_html_()


def test_a_trusted_hubs_average_has_intervals_of_the_hubs_noise():
    settings = {"regularization": 0.05, "intercept_scaling": 1.0, "schema": SCHEMA}
    members = [
        cs.PrivateLogisticRegression(epsilon=math.inf, **settings).fit(table(n)) for n in (300, 400)
    ]
    exact = cs.Average("equal").combine(members)
    truth = np.log([row.value for row in cs.odds_ratios(exact, SCHEMA, learner=members[0]).rows])
    covered = []
    for seed in range(60):
        way = cs.Average("equal", epsilon=2.0, noise=cs.Noise(seed=seed))
        events = _Central(way, as_members(members), np.full(2, 0.5)).events
        release = SimpleNamespace(
            ensemble=way.combine(members), events=events, aggregator="Average"
        )
        found = cs.odds_ratios(release, SCHEMA, learner=members[0]).rows
        ends = np.log([(row.low, row.high) for row in found])
        covered.append((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
    low, high = stats.binom.interval(1 - 1e-6, 60, 0.95)  # for each ratio; the seeds are fixed
    hits = np.sum(covered, axis=0)
    assert ((low <= hits) & (hits <= high)).all(), hits


def test_where_the_law_is_not_known_there_is_no_interval_and_a_reason():
    for delta, mechanism in ((0.0, "objective"), (1e-6, "gradient")):
        learner = cs.PrivateLogisticRegression(
            epsilon=1.0, delta=delta, mechanism=mechanism, schema=SCHEMA
        ).fit(table())
        found = cs.odds_ratios(learner, SCHEMA)
        assert all(row.low is row.high is None for row in found.rows)
        assert "depends on the records" in found.note
    file = Path(__file__).parents[1] / "fixtures" / "version-0.1" / "releases"
    release = cs.Release.load(file / "logistic.safetensors")
    n = release.ensemble.coef.shape[1]
    plain = cs.Schema([cs.Numeric(f"x{i}", 0, 1) for i in range(n)], "y", classes=(0, 1))
    found = cs.odds_ratios(release, plain, learner=learner)
    assert "before models were combined" in found.note
    assert all(row.low is None for row in found.rows)
    svm = cs.PrivateLinearSVC(epsilon=1.0, schema=SCHEMA).fit(table())
    with pytest.raises(SettingsError, match="logistic regression of two classes"):
        cs.odds_ratios(svm, SCHEMA)


def test_noise_along_axes_gives_no_intervals():
    axes = PublicAxes.of(np.eye(SCHEMA.n_features)[:3], "0" * 64)
    learner = cs.PrivateLogisticRegression(epsilon=5.0, projection=axes, **SETTINGS)
    found = cs.odds_ratios(learner.fit(table()), SCHEMA)
    assert "along axes" in found.note
    assert all(row.low is None for row in found.rows)
