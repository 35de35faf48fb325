"""LabelTables: one count for each column and record, and an additive model of noisy counts."""

import math

import numpy as np
import pytest

from consilience import Categorical, Noise, Numeric, Schema
from consilience.aggregators.base import ENSEMBLES
from consilience.errors import ContributionRejected, SchemaMismatch, SettingsError
from consilience.statistics.label_tables import LabelTables, columns_of, find_bins
from consilience.statistics.total import Total
from consilience.tables.public import Public
from sums import DELTA

SCHEMA = Schema(
    [
        Numeric("age", 0, 100, cuts=(18, 40, 65)),
        Numeric("pressure", 50, 250, missing="indicator"),
        Categorical("ward", ("a", "b", "c"), missing="ignore"),
    ],
    "ill",
    classes=("no", "yes"),
)


def people(n, seed=0):
    draw = np.random.default_rng(seed)
    age, ward = draw.uniform(0, 100, n), draw.integers(0, 3, n)
    chance = np.where((age > 65) | (ward == 2), 0.8, 0.15)
    return {
        "age": age,
        "pressure": draw.uniform(50, 250, n),
        "ward": np.array(["a", "b", "c"])[ward],
        "ill": np.where(draw.random(n) < chance, "yes", "no"),
    }


def test_bins_are_those_of_the_schemas_columns():
    table = {
        "age": [10, 18, 39, 64, 65, 99],
        "pressure": [50, 74, 76, 249, None, 150],
        "ward": ["a", "b", "c", "a", None, "c"],
        "ill": ["no"] * 6,
    }
    bins = find_bins(columns_of(SCHEMA), SCHEMA.encode(table).X)
    assert bins[0].tolist() == [0, 1, 1, 2, 3, 3]
    assert bins[1].tolist() == [0, 0, 1, 7, 8, 4]  # the last bin is for missing values
    assert bins[2].tolist() == [1, 2, 3, 1, 0, 3]  # and here the first


def test_exact_counts_are_counts():
    table = people(400)
    model = LabelTables(epsilon=math.inf, schema=SCHEMA).fit(table)
    counts = (model.total_ * model.grain).reshape(-1, 2)
    assert len(counts) == 4 + 9 + 4
    assert counts[:4].sum() == counts[4:13].sum() == counts[13:].sum() == 400
    old = (table["age"] >= 65) & (table["ill"] == "yes")
    assert counts[3, 1] == old.sum()


def test_sites_together_learn_shapes_that_tell():
    members = [
        LabelTables(epsilon=1.0, delta=DELTA, schema=SCHEMA, noise=Noise(seed=i)).fit(
            people(500, seed=i)
        )
        for i in range(10)
    ]
    joined = Total().combine(members)
    fresh = people(4000, seed=99)
    X = SCHEMA.encode(fresh).X
    best = np.where((fresh["age"] > 65) | (fresh["ward"] == "c"), "yes", "no")
    assert np.mean(joined.predict(X) == fresh["ill"]) > np.mean(best == fresh["ill"]) - 0.03
    oldest = joined.values[3] - joined.values[0]
    assert oldest[1] > oldest[0]  # the old are ill more often than the young
    assert joined.predict_proba(X).sum(axis=1) == pytest.approx(np.ones(4000))


def test_public_records_decide_how_far_evidence_adds_up():
    """A column that stands there five times is believed five times too much without them."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 3000)
    one = np.where(draw.random(3000) < 0.8, y, 1 - y) - 0.5
    X = np.tile(one[:, None], 5)
    columns = [[[f, 0.0]] for f in range(5)]
    member = LabelTables(epsilon=math.inf, classes=[0, 1], columns=columns).fit(X, y)
    joined = Total().combine([member], Public(X[:1000], y[:1000]))
    assert joined.predict_proba(X[:1]).max() == pytest.approx(0.8, abs=0.03)


def test_where_all_is_noise_the_class_shares_are_left():
    for seed in range(5):
        model = LabelTables(epsilon=0.01, delta=DELTA, schema=SCHEMA, noise=Noise(seed=seed))
        chances = model.fit(people(60)).predict_proba(people(200, seed=1))
        assert np.ptp(chances[:, 1]) < 0.6


@pytest.mark.parametrize(
    "columns", [None, [], [[]], [[[0, math.nan]]], [[[0.5, 1]]], [[[-1, 1]]], "ab", [[[0, 1, 2]]]]
)
def test_columns_that_are_none_are_refused(columns):
    with pytest.raises(SettingsError, match="columns"):
        LabelTables(epsilon=1.0, delta=DELTA, classes=[0, 1], columns=columns).fit(
            [[0.0], [1.0]], [0, 1]
        )


def test_a_feature_that_is_not_there_is_refused():
    learner = LabelTables(epsilon=1.0, delta=DELTA, classes=[0, 1], columns=[[[3, 0.0]]])
    with pytest.raises(SettingsError, match="does not have"):
        learner.fit([[0.0], [1.0]], [0, 1])


def test_a_release_of_shapes_comes_back_and_a_forged_one_does_not():
    member = LabelTables(epsilon=math.inf, schema=SCHEMA).fit(people(300))
    made = Total().combine([member])
    facts, tensors = made.to_parts(None)
    facts["classes"] = ["no", "yes"]
    kind = ENSEMBLES["additive"]
    again = kind.from_parts(facts, tensors, made.guarantee, made.weights, None)
    X = SCHEMA.encode(people(50, seed=2)).X
    assert np.array_equal(again.predict_proba(X), made.predict_proba(X))
    for changed, numbers in (
        ({"columns": [[[99, 0.0]]]}, tensors),
        ({"columns": "all"}, tensors),
        ({}, {**tensors, "values": tensors["values"][:-1]}),
        ({}, {**tensors, "more": tensors["prior"]}),
    ):
        with pytest.raises(ContributionRejected):
            kind.from_parts({**facts, **changed}, numbers, made.guarantee, made.weights, None)
    with pytest.raises(SchemaMismatch):
        made.predict(X[:, :2])
