"""Exports predict what the release predicts, on encoded rows and on raw columns."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from sklearn.linear_model import LinearRegression, LogisticRegression

import consilience as cs
from consilience.errors import SettingsError
from consilience.files.export import to_python

COLUMNS = [
    cs.Numeric("age", 0, 100, cuts=(20, 60), missing="indicator"),
    cs.Numeric("income", 1, 1e4, transform="log", missing="indicator", missing_values=(-1,)),
    cs.Numeric("change", -50, 50, transform="log1p", missing="middle"),
    cs.Numeric("weight", 40, 140, missing=70.0),
    cs.Numeric("height", 50, 220),
    cs.Numeric("dose", 0, 8, cuts=4, missing=3.0),
    cs.Categorical("sex", ("f", "m"), missing="indicator", missing_values=("?",)),
    cs.Categorical("ward", ("1", "2", "3"), missing="ignore", unseen="ignore"),
]
KINDS = {
    "two": cs.Schema(COLUMNS, "ill", classes=("no", "yes")),
    "three": cs.Schema(COLUMNS, "ill", classes=(1, 2, 3), scale="clip", norm=3.0),
    "number": cs.Schema(COLUMNS, "ill", label_bound=2.0),
}


def table(n=60):
    draw = np.random.default_rng(4)
    hole = lambda values, every: np.where(np.arange(n) % every == 0, np.nan, values)  # noqa: E731
    return {
        "age": hole(draw.uniform(-10, 120, n), 7),
        "income": np.where(np.arange(n) % 5 == 0, -1, hole(np.exp(draw.uniform(0, 11, n)), 6)),
        "change": hole(draw.uniform(-70, 70, n), 8),
        "weight": hole(draw.uniform(30, 150, n), 9),
        "height": draw.uniform(40, 230, n),
        "dose": hole(draw.choice([0.0, 2.0, 4.0, 5.0, 8.0], n), 4),
        "sex": draw.choice(["f", "m", "", "?"], n),
        "ward": draw.choice(["1", "2", "3", "", "9"], n),
    }


def ensemble(kind):
    """Return an ensemble with coefficients that no learning makes small."""
    schema, draw = KINDS[kind], np.random.default_rng(5)
    rows = 3 if kind == "three" else 1
    learner = (cs.PrivateRidge if kind == "number" else cs.PrivateLogisticRegression)(
        epsilon=math.inf, schema=schema
    )
    labels = {"two": ["no", "yes"], "three": [1, 2, 3], "number": [0.5, 1.5]}[kind]
    full = {**table(), "ill": (labels * 30)[:60]}
    fitted = learner.fit(full)
    fitted.coef_ = draw.normal(size=np.shape(fitted.coef_))
    fitted.intercept_ = draw.normal(size=rows) if kind != "number" else 0.3
    return cs.Average("equal").combine([_Plain(fitted)])


class _Plain:
    """A linear model of another library, so that no file says what it should be."""

    def __init__(self, learner):
        self.coef_, self.intercept_ = learner.coef_, learner.intercept_
        if hasattr(learner, "classes_"):
            self.classes_ = learner.classes_

    def predict(self, X):
        raise NotImplementedError


def by_hand(card, records):
    """Return the scores of a scorecard, read as docs/export.md says."""
    scores = []
    for one in card["scores"]:
        total = np.full(len(records["age"]), one["intercept"])
        for part in one["columns"]:
            for row, value in enumerate(records[part["column"]].tolist()):
                total[row] += points_of(part, value)
        scores.append(total)
    return np.array(scores).T


def points_of(part, value):
    absent = (
        value == "" or value != value or str(value).removesuffix(".0") in part["missing_values"]
    )
    if absent:
        return part["missing"]
    if part["kind"] == "categories":
        return part["points"].get(value, part["other"])
    if part["kind"] == "bins":
        return part["points"][sum(value >= edge for edge in part["edges"])]
    change = {
        None: lambda x: x,
        "log": math.log,
        "log1p": lambda x: math.copysign(math.log1p(abs(x)), x),
    }[part["transform"]]
    low, high = change(part["low"]), change(part["high"])
    at = (change(min(max(value, part["low"]), part["high"])) - low) / (high - low)
    return part["points"][0] + at * (part["points"][1] - part["points"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_export_predicts_what_the_ensemble_predicts(kind, tmp_path):
    model, schema, records = ensemble(kind), KINDS[kind], table()
    X = schema.encode_features(records)
    scores = model.decision_function(X).reshape(len(X), -1)
    assert np.ptp(scores) > 2

    card = json.loads(json.dumps(cs.scorecard(model, schema), allow_nan=False))
    np.testing.assert_allclose(by_hand(card, records), scores, atol=1e-9)

    plain = cs.to_scikit_learn(model)
    assert type(plain) is (LinearRegression if kind == "number" else LogisticRegression)
    whole = cs.to_scikit_learn(model, schema)
    assert np.array_equal(plain.predict(X), whole.predict(records))
    space = {}
    exec(compile(to_python(model, schema), "model.py", "exec"), space)
    assert space["FEATURES"] == list(schema.feature_names)

    raw = {
        name: values.reshape(-1, 1).astype(object if name in ("sex", "ward") else float)
        for name, values in records.items()
    }
    for made in (
        ReferenceEvaluator(cs.to_onnx(model, schema)).run(None, raw),
        ReferenceEvaluator(cs.to_onnx(model)).run(None, {"X": np.asarray(X)}),
    ):
        np.testing.assert_allclose(made[0], scores, atol=1e-9)
        if kind != "number":
            np.testing.assert_allclose(made[1], model.predict_proba(X), atol=1e-9)
            assert made[2].tolist() == model.predict(X).tolist()
    if kind == "number":
        np.testing.assert_allclose(plain.predict(X), model.predict(X))
        return
    for other in (plain, space["load"]()):
        assert other.predict(X).tolist() == model.predict(X).tolist()
        np.testing.assert_allclose(other.predict_proba(X), model.predict_proba(X), atol=1e-12)


def test_a_record_that_the_schema_refuses_has_no_score():
    model, schema = ensemble("two"), KINDS["two"]
    records = {name: values[:2].reshape(-1, 1) for name, values in table().items()}
    raw = {
        name: values.astype(object if name in ("sex", "ward") else float)
        for name, values in records.items()
    }
    raw["height"] = np.array([[np.nan], [180.0]])
    raw["sex"] = np.array([["f"], ["other"]], dtype=object)
    scores, *_ = ReferenceEvaluator(cs.to_onnx(model, schema)).run(None, raw)
    assert np.isnan(scores).all()
    columns = {one["column"]: one for one in cs.scorecard(model, schema)["scores"][0]["columns"]}
    assert columns["height"]["missing"] is None
    assert columns["sex"]["other"] is None


def test_what_is_not_linear_or_of_another_schema_is_refused():
    model = ensemble("two")
    with pytest.raises(SettingsError, match="features and the schema"):
        cs.scorecard(model, cs.Schema(COLUMNS[:1], "ill", classes=("no", "yes")))
    folder = Path(__file__).parents[1] / "fixtures" / "version-0.1" / "releases"
    with pytest.raises(SettingsError, match="no linear model"):
        cs.to_scikit_learn(cs.Release.load(folder / "forest.safetensors"))
    linear = cs.Release.load(folder / "classes.safetensors")
    X = np.zeros((1, linear.ensemble.coef.shape[1]))
    assert cs.to_scikit_learn(linear).predict(X) == linear.predict(X)
