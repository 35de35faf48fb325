"""Columns that are cut into bins: what becomes of a number, for linear learners and for trees."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.errors import SchemaMismatch
from consilience.learners.trees.bins import Bins
from consilience.tables.schema import Categorical, Numeric, Schema
from consilience.tables.steps import MOST_BINS, bin_features

COLUMNS = [
    Numeric("age", 0, 100, cuts=(18, 40, 65)),
    Numeric("income", 1, 1e6, transform="log", cuts=6, missing="indicator"),
    Numeric("weight", 0, 200),
    Numeric("visits", 0, 50, cuts=5, missing=7),
    Categorical("sex", ("f", "m")),
]
SCHEMA = Schema(COLUMNS, "ill", classes=(0, 1))
NUMBERS = st.floats(allow_nan=False) | st.sampled_from([0, 18, 39.999, 40, 65, 100, 1e3])


def table(ages, incomes=None):
    n = len(ages)
    given = [50.0] * n if incomes is None else incomes
    rest = {"weight": [70] * n, "visits": [None] * n, "sex": ["f"] * n, "ill": [0] * n}
    return {"age": list(ages), "income": given, **rest}


@pytest.mark.parametrize("n_bins", [2, 3, 10, MOST_BINS])
def test_close_bins_resemble_each_other_and_each_has_the_length_one(n_bins):
    features = bin_features(n_bins)
    assert features.shape == (n_bins, n_bins - 1)
    apart = np.abs(np.subtract.outer(np.arange(n_bins), np.arange(n_bins)))
    np.testing.assert_allclose(features @ features.T, 1 - 2 * apart / (n_bins - 1), atol=1e-12)


def test_a_number_of_bins_cuts_evenly_on_the_scale_of_the_transform():
    assert Numeric("a", 0, 100, cuts=4).edges == (25, 50, 75)
    assert Numeric("a", 1, 1e6, transform="log", cuts=6).edges == (10, 1e2, 1e3, 1e4, 1e5)
    assert Numeric("a", -99, 99, transform="log1p", cuts=4).edges == (-9, 0, 9)


def test_a_value_is_in_the_bin_that_begins_at_or_below_it():
    X = SCHEMA.encode(table([-5, 17.9, 18, 39, 40, 65, 1e9, math.inf])).X[:, :3] * math.sqrt(5)
    np.testing.assert_allclose(X, bin_features(4)[[0, 0, 1, 1, 2, 3, 3, 3]], atol=1e-9)


def test_what_is_missing_is_neutral_marked_or_the_declared_number():
    row = SCHEMA.encode(table([50], [None])).X[0] * math.sqrt(5)
    names = dict(zip(SCHEMA.feature_names, row, strict=True))
    assert names["income is missing"] == pytest.approx(1)
    assert not any(value for name, value in names.items() if name.startswith("income>"))
    np.testing.assert_allclose(
        [value for name, value in names.items() if name.startswith("visits")], bin_features(5)[0]
    )
    with pytest.raises(SchemaMismatch, match=r"'age'.*missing='error'"):
        SCHEMA.encode(table([math.nan]))


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.data())
def test_a_record_is_encoded_alone_as_in_company_and_no_longer_than_one(ages, data):
    X = SCHEMA.encode(table(ages)).X
    one = data.draw(st.integers(0, len(ages) - 1))
    assert SCHEMA.encode(table([ages[one]])).X[0].tobytes() == X[one].tobytes()
    assert max(math.hypot(*row) for row in X.tolist()) <= 1


def test_trees_split_at_every_cut():
    ages = [5, 20, 50, 70]
    codes = Bins.of(SCHEMA).codes(SCHEMA.encode(table(ages)).X)
    assert codes[:, :3].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_schema_with_cuts_is_written_and_read_and_one_without_keeps_its_digest():
    assert Schema.from_dict(SCHEMA.to_dict()) == SCHEMA
    plain = Schema([Numeric("age", 0, 1)], "ill", classes=(0, 1))
    assert "cuts" not in plain.to_dict()["columns"][0]
