"""What --learner and --aggregator accept: every registered class, by either of its names."""

import json

import pytest
import typer

from consilience.aggregators.average import Average
from consilience.aggregators.registry import AGGREGATORS
from consilience.aggregators.registry import register as register_aggregator
from consilience.cli.options import (
    LearnerOptions,
    build_aggregator,
    find_learner,
    list_aggregators,
    list_learners,
)
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression
from consilience.learners.registry import LEARNERS
from consilience.learners.registry import register as register_learner


def test_learners_have_short_names_and_class_names():
    assert find_learner("logistic") is find_learner("PrivateLogisticRegression")
    assert find_learner("svm") is PrivateLinearSVC
    assert set(LEARNERS) < set(list_learners())
    with pytest.raises(typer.BadParameter, match=r"'magic' is not one of .*logistic"):
        find_learner("magic")


def test_aggregators_have_short_names_and_class_names():
    assert build_aggregator("average-equal").weights == "equal"
    assert type(build_aggregator("Average")) is Average
    assert set(AGGREGATORS) < set(list_aggregators())
    with pytest.raises(typer.BadParameter, match=r"'magic' is not one of average, "):
        build_aggregator("magic")


def test_a_learner_gets_the_options_it_takes_and_refuses_the_others():
    made = LearnerOptions(learner="svm", regularization=0.1).build(epsilon=2.0)
    assert (made.epsilon, made.regularization, made.mechanism) == (2.0, 0.1, "auto")
    forest = LearnerOptions(learner="PrivateForestClassifier").build(epsilon=2.0)
    assert forest.neighbours == "add-remove"
    with pytest.raises(typer.BadParameter, match="no such setting"):
        LearnerOptions(learner="PrivateForestClassifier", regularization=0.1).build(epsilon=2.0)


def test_what_a_test_registers_can_be_named_in_a_command(run, records):
    class ToyRegression(PrivateLogisticRegression):
        shorthand = "toy"

    class ToyAverage(Average):
        shorthands = {"toy-average": {"weights": "equal"}}

    register_learner(ToyRegression)
    register_aggregator(ToyAverage)
    try:
        code, out, err = run(
            *("simulate", "--data", records, "--label", "ill", "--epsilon", 2, "--repeats", 1),
            *("--learner", "toy", "--aggregator", "toy-average", "--aggregator", "ToyAverage"),
            *("--sites", 3, "--json"),
        )
        planned = run("plan", "--records", 99, "--features", 2, "--epsilon", 1, "--learner", "toy")
        audited = run("audit", "--epsilon", 1, "--learner", "ToyRegression", "--json")
    finally:
        del LEARNERS["ToyRegression"], AGGREGATORS["ToyAverage"]
    assert (code, err) == (0, "")
    assert "toy-average" in out
    assert (planned[0], audited[0]) == (0, 0)
    assert json.loads(audited[1])["passed"]
