"""Classes that are chosen by cost cost least."""

import numpy as np
import pytest

import consilience as cs
from consilience.errors import SettingsError

SCHEMA = cs.Schema([cs.Numeric("x", 0, 1)], "ill", classes=("no", "yes"))


def table(n=4000, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.uniform(0, 1, n)
    return {"x": x, "ill": np.where(draw.uniform(0, 1, n) < x, "yes", "no")}


def test_the_class_that_costs_least_on_average_is_named():
    learner = cs.PrivateLogisticRegression(epsilon=5.0, schema=SCHEMA).fit(table())
    rows, truth = {"x": table(seed=1)["x"]}, table(seed=1)["ill"]
    chances = learner.predict_proba(rows)[:, 1]
    for model, X in (
        (learner, rows),
        (cs.Average("equal").combine([learner]), SCHEMA.encode_features(rows)),
    ):
        found = cs.predict_at_cost(model, X, false_positive=2.0, false_negative=6.0)
        assert np.array_equal(found == "yes", chances >= 0.25)
        assert np.array_equal(cs.predict_at_cost(model, X), model.predict(X))

    def cost(found):
        missed = (found == "no") & (truth == "yes")
        return 9.0 * missed.sum() + ((found == "yes") & (truth == "no")).sum()

    wise = cs.predict_at_cost(learner, rows, false_negative=9.0)
    assert cost(wise) < 0.7 * cost(learner.predict(rows))


def test_costs_that_are_none_and_models_without_probabilities_are_refused():
    svm = cs.PrivateLinearSVC(epsilon=1.0, schema=SCHEMA).fit(table())
    with pytest.raises(SettingsError, match="state probabilities"):
        cs.predict_at_cost(svm, {"x": [0.5]})
    learner = cs.PrivateLogisticRegression(epsilon=1.0, schema=SCHEMA).fit(table())
    for cost in (0, -1.0, float("inf"), float("nan"), "much"):
        with pytest.raises(SettingsError, match="false_negative"):
            cs.predict_at_cost(learner, {"x": [0.5]}, false_negative=cost)
