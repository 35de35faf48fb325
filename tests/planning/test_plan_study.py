"""Plans of a study: what it decides, and trials where no formula applies."""

import json

import numpy as np
import pytest

from consilience import (
    Average,
    Noise,
    PrivateForestClassifier,
    PrivateLogisticRegression,
    PrivateRidge,
    WeightedVote,
)
from consilience.errors import SettingsError
from consilience.planning.advice import Advice
from consilience.planning.plan import plan
from consilience.planning.trial import REPEATS, Trial
from studies import records_parts, study, study_text

FOREST = {
    "learner": "PrivateForestClassifier",
    "aggregator": "WeightedVote",
    "settings": "n_trees = 3\nmax_depth = 2\nrandom_state = 0",
}


@pytest.fixture
def beside(tmp_path):
    """Return a function that writes a study beside its public records and returns its path."""

    def write(**parts):
        path = tmp_path / "study.toml"
        more = parts.pop("more", "") + "\n" + records_parts(tmp_path)
        path.write_text(study_text(**parts, more=more))
        return path

    return write


def test_a_study_decides_learner_settings_aggregator_and_features():
    ours = study(settings="regularization = 0.003", more='weights = "equal"')
    advice = plan(ours, n_records=2000, n_sites=4)
    theirs = plan(
        n_records=2000,
        n_features=ours.schema.n_features,
        epsilon=3.0,
        n_sites=4,
        regularization=0.003,
        classes=[0, 1],
        data_norm=ours.schema.norm,
        aggregator={"Average": Average("equal", classes=[0, 1])},
    )
    assert advice.alone == theirs.alone
    assert advice.joined == theirs.joined
    assert [way.name for way in advice.joined] == ["one site alone", "Average"]


def test_the_table_covers_the_epsilons_that_sites_may_choose():
    advice = plan(study(), n_records=2000)
    assert (advice.rows[0].epsilon, advice.rows[-1].epsilon) == (0.1, 3.0)
    assert advice.alone.epsilon == 3.0
    assert advice.rows[0].n_sites == study().min_sites
    assert plan(study(), n_records=2000, epsilon=0.7).at(0.7).epsilon == 0.7
    with pytest.raises(SettingsError, match=r"from 0\.1 to 3"):
        plan(study(), n_records=2000, epsilon=5.0)


def test_what_the_study_decides_cannot_be_said_a_second_time():
    with pytest.raises(SettingsError, match="regularization, which the study"):
        plan(study(), n_records=100, regularization=0.1)
    with pytest.raises(SettingsError, match="'epsilon'"):
        plan(n_records=100, n_features=3)


def test_public_records_beside_the_study_file_are_used(beside):
    advice = plan(beside(aggregator="PublicBlend"), n_records=500, n_sites=3)
    assert isinstance(advice, Advice)
    assert [way.name for way in advice.joined] == [
        "one site alone",
        "public records alone",
        "PublicBlend",
    ]
    assert advice.alone.error is not None
    assert advice.joined[-1].n_public > 0


def test_trees_are_tried_on_public_records_and_the_advice_says_so(beside):
    trial = plan(beside(**FOREST), n_records=300, n_sites=4)
    assert isinstance(trial, Trial)
    assert {row.way for row in trial.rows} == {
        "always the most frequent class",
        "one site alone",
        "public records alone",
        "WeightedVote",
    }
    assert {row.epsilon for row in trial.rows} == {0.1, 3.0}
    shown = str(trial)
    assert "This is a simulation, not a formula" in shown
    assert "with replacement" in shown
    assert f"{REPEATS} times" in shown
    assert "joining " in trial.sentence
    values = json.loads(json.dumps(trial.as_dict(), allow_nan=False))
    assert values["simulated"] is True
    assert plan(beside(**FOREST), n_records=300, n_sites=4).rows == trial.rows


def test_a_trial_is_judged_by_the_metric_asked_for_and_tells_its_progress(beside):
    told = []
    trial = plan(
        beside(**FOREST),
        n_records=200,
        n_sites=3,
        metric="auc",
        progress=lambda done, total: told.append((done, total)),
    )
    assert "The AUC of WeightedVote is" in trial.sentence
    assert str(trial).startswith(trial.sentence)
    assert told == [(done, 2 * REPEATS) for done in range(1, 2 * REPEATS + 1)]


def test_regression_is_tried_too():
    X = Noise(seed=1).open().normal(600).reshape(200, 3) / 3
    trial = plan(n_records=400, epsilon=1.0, n_sites=3, public=(X, X[:, 0]), learner=PrivateRidge)
    assert {row.metric for row in trial.rows} == {"rmse", "r2"}
    assert "always the mean" in trial.sentence
    assert trial.aggregator == Average().describe().title


def test_less_epsilon_makes_a_trial_worse_and_joining_makes_it_better(beside):
    trial = plan(beside(**FOREST), n_records=200, n_sites=5)
    errors = {(row.epsilon, row.way): row.value for row in trial.rows if row.metric == "error"}
    assert errors[3.0, "one site alone"] < errors[0.1, "one site alone"]
    assert errors[3.0, "WeightedVote"] < errors[3.0, "one site alone"]


@pytest.mark.parametrize(
    "settings",
    [
        {"learner": PrivateForestClassifier, "bounds": (0, 1)},
        {"learner": PrivateLogisticRegression, "classes": [0, 1, 2]},
        {"aggregator": WeightedVote()},
        {"mechanism": "matrix"},
    ],
    ids=["forest", "three classes", "vote", "matrix"],
)
def test_without_labelled_public_records_simulate_is_named(settings):
    with pytest.raises(SettingsError, match=r"consilience simulate study\.toml --data TABLE"):
        plan(n_records=100, n_features=3, epsilon=1.0, **settings)


def test_a_study_of_trees_without_its_public_file_names_simulate():
    with pytest.raises(SettingsError, match=r"consilience simulate study\.toml --data TABLE"):
        plan(study(**FOREST), n_records=100)


def test_too_few_public_records_are_refused():
    few = (np.zeros((9, 2)), np.arange(9) % 2)
    with pytest.raises(SettingsError, match="at least 30"):
        plan(n_records=50, epsilon=1.0, public=few, learner=PrivateForestClassifier, bounds=(0, 1))
