"""Shapes of additive models: they add up to the scores, in the columns' own units."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

import consilience as cs
from consilience.errors import SettingsError
from consilience.learners.shapes import plot_shapes, shapes
from consilience.tables.schema import Categorical, Numeric, Schema

COLUMNS = [
    Numeric("age", 0, 100, cuts=(20, 60)),
    Numeric("income", 1, 1e4, transform="log", missing="indicator"),
    Numeric("weight", 40, 140),
    Categorical("sex", ("f", "m")),
]
SCHEMA = Schema(COLUMNS, "ill", classes=("no", "yes"))


def records(n=3000):
    draw = cs.Noise(seed=3).open()
    age, weight = draw.uniform(n) * 100, 40 + draw.uniform(n) * 100
    income = np.exp(draw.uniform(n) * math.log(1e4))
    return {
        "age": age,
        "income": np.where(np.arange(n) % 7 == 0, np.nan, income),
        "weight": weight,
        "sex": np.where(draw.uniform(n) < 0.5, "f", "m"),
        "ill": np.where((age > 60) ^ (draw.uniform(n) < 0.1), "yes", "no"),
    }


@pytest.fixture(scope="module")
def model():
    encoded = SCHEMA.encode(records())
    labels = np.asarray(SCHEMA.classes)[encoded.y]
    return cs.PrivateLogisticRegression(epsilon=math.inf, regularization=1e-4).fit(
        encoded.X, labels
    )


def test_the_column_that_matters_comes_first_with_its_step(model):
    first = shapes(model, SCHEMA)[0]
    assert (first.name, first.places) == ("age", (0, 20, 60, 100))
    assert first.has_steps
    young, middle, old = first.values
    assert old - middle > 3
    assert abs(young - middle) < 0.5


def test_shapes_add_up_to_scores_but_for_a_constant(model):
    by_name = {shape.name: shape for shape in shapes(model, SCHEMA)}
    rows = {
        "age": [10, 30, 90],
        "income": [1, math.nan, 1e4],
        "weight": [40, 140, 140],
        "sex": ["f", "m", "m"],
        "ill": ["no"] * 3,
    }
    income = by_name["income"]
    added = [
        by_name["age"].values,
        np.array([income.values[0], income.missing, income.values[-1]]),
        by_name["weight"].values[[0, 1, 1]],
        by_name["sex"].values[[0, 1, 1]],
    ]
    scores = model.decision_function(SCHEMA.encode(rows).X)
    np.testing.assert_allclose(np.ptp(np.sum(added, axis=0) - scores), 0, atol=1e-9)


def test_a_figure_is_drawn_for_learners_ensembles_and_regressors(model):
    figure = Figure()
    panels = plot_shapes(model, SCHEMA, ax=figure)
    assert panels.tolist() == figure.axes
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "age"
    assert sorted(titles) == ["age", "income", "sex", "weight"]
    assert "score of yes" in figure.axes[0].get_ylabel()
    alone = Figure().subplots()
    assert plot_shapes(model, SCHEMA, ax=alone).tolist() == [alone]
    assert alone.get_title() == "age"
    ensemble = cs.Average("equal").combine([model, model])
    assert shapes(ensemble, SCHEMA)[0].name == "age"
    flipped = shapes(model, SCHEMA, label="no")[0]
    np.testing.assert_allclose(flipped.values, -shapes(model, SCHEMA)[0].values)


def test_several_classes_are_compared_with_the_others():
    X = SCHEMA.encode(records()).X
    labels = np.where(X[:, 0] > 0.2, "a", np.where(X[:, -1] > 0, "b", "c"))
    fitted = cs.PrivateLogisticRegression(epsilon=math.inf, regularization=1e-4).fit(X, labels)
    assert shapes(fitted, SCHEMA, label="a")[0].name == "age"
    assert shapes(fitted, SCHEMA, label="b")[0].name == "sex"


def test_models_that_are_not_linear_and_unknown_classes_are_refused(model):
    with pytest.raises(SettingsError, match="linear"):
        shapes(object(), SCHEMA)
    with pytest.raises(SettingsError, match="features"):
        shapes(model, Schema(COLUMNS[:1], "ill", classes=("no", "yes")))
    with pytest.raises(SettingsError, match="no class"):
        shapes(model, SCHEMA, label="perhaps")


def test_shapes_of_stumps_are_in_the_columns_units_and_add_up_to_the_log_odds():
    stumps = cs.PrivateAdaBoostClassifier(
        epsilon=math.inf, max_depth=1, n_rounds=20, schema=SCHEMA, random_state=0
    ).fit(records())
    found = {shape.name: shape for shape in shapes(stumps, SCHEMA)}
    assert found["age"].places == (0, 20, 60, 100)
    assert found["income"].places[0] == 1
    assert found["income"].places[-1] == pytest.approx(1e4)
    assert 1 < found["income"].places[1] < 1e4
    rows = {
        "age": [10, 30, 90],
        "income": [2, math.nan, 9000],
        "weight": [41, 139, 139],
        "sex": ["f", "m", "m"],
    }
    income, weight = found["income"], found["weight"]
    added = [
        found["age"].values,
        np.array([income.values[0], income.missing, income.values[-1]]),
        weight.values[[0, -1, -1]],
        found["sex"].values[[0, 1, 1]],
    ]
    odds = np.log(stumps.predict_proba(rows))
    np.testing.assert_allclose(
        np.ptp(np.sum(added, axis=0) - odds[:, 1] + odds[:, 0]), 0, atol=1e-9
    )
    drawn = stumps.plot_shapes(ax=Figure())
    assert sorted(axes.get_title() for axes in drawn) == ["age", "income", "sex", "weight"]
