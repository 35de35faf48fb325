"""Where trees may split: bins agree with a search, missing values have one, no record is read."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience import Categorical, Noise, Numeric, Public, Schema
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.trees.bins import MOST_BINS, Bins

cuts = st.lists(st.floats(-1e6, 1e6), max_size=20, unique=True).map(sorted)
values = st.floats(allow_nan=False, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(features=st.lists(cuts, min_size=1, max_size=4), data=st.data())
def test_a_bin_is_the_number_of_cuts_at_or_below_a_value(features, data):
    # Values on the cuts themselves, too: that is where searching errs.
    rows = data.draw(
        st.lists(
            st.tuples(*(values | st.sampled_from(one or [0.0]) for one in features)), min_size=1
        )
    )
    X = np.array(rows, dtype=float)
    expected = np.column_stack(
        [np.searchsorted(one, x, side="right") for one, x in zip(features, X.T, strict=True)]
    )
    for missing, shift in (("error", 0), ("high", 0), ("low", 1)):
        codes = Bins(features, missing=missing).codes(X)
        assert codes.dtype == np.uint8
        assert np.array_equal(codes, expected + shift)


@pytest.mark.parametrize(("missing", "place"), [("low", 0), ("high", 3)])
def test_missing_values_have_a_bin_of_their_own_at_the_declared_end(missing, place):
    bins = Bins([[1.0, 2.0], []], missing=missing)
    codes = bins.codes(np.array([[math.nan, math.nan], [0.0, 0.0], [9.0, 9.0]]))
    assert codes[0, 0] == place
    assert (codes[1:, 0] != place).all()
    assert bins.sizes.tolist() == [4, 2]
    assert (codes < bins.sizes).all()
    assert bins.splittable.tolist() == [0, 1]  # missing values are distinguished from others


def test_no_value_leaves_the_range_of_bins_even_where_none_is_declared_for_it():
    bins = Bins([[0.0], [0.0, 1.0, 2.0]])
    codes = bins.codes(
        np.array([[math.nan, math.nan], [math.inf, math.inf], [-math.inf, -math.inf]])
    )
    assert (codes < bins.sizes).all()
    assert codes[1].tolist() == [1, 3]


def test_candidates_are_every_cut_once_and_every_category_against_the_rest():
    bins = Bins([[1, 2, 3], [], [0.5, 1.5], [0.5]], categorical=[False, False, True, True])
    feature, last, single = bins.candidates
    assert list(zip(feature.tolist(), last.tolist(), single.tolist(), strict=True)) == [
        (0, 0, False),
        (0, 1, False),
        (0, 2, False),
        (2, 0, True),
        (2, 1, True),
        (2, 2, True),
        (3, 0, False),  # of two categories, either against the other is the same split
    ]
    assert bins.splittable.tolist() == [0, 2, 3]


def test_a_byte_holds_the_largest_number_of_bins():
    bins = Bins.even(0, 1, n_features=1, n_bins=MOST_BINS, missing="high")
    codes = bins.codes(np.array([[0.0], [1.0], [math.nan]]))
    assert codes.ravel().tolist() == [0, 254, 255]
    with pytest.raises(SettingsError, match="254"):
        Bins([np.arange(MOST_BINS)])


def test_even_bins_hold_equal_shares_of_the_range_and_all_beyond_it():
    bins = Bins.even([0, -10], [1, 10], n_features=2, n_bins=4)
    assert bins.cuts == ((0.25, 0.5, 0.75), (-5.0, 0.0, 5.0))
    assert bins.codes(np.array([[-7.0, -70.0], [7.0, 70.0]])).tolist() == [[0, 0], [3, 3]]


def test_a_schema_gives_numbers_even_bins_and_marks_two():
    columns = [
        Numeric("age", 0, 100, missing="indicator"),
        Categorical("ward", ("a", "b", "c"), missing="indicator"),
        Numeric("pulse", 40, 200),
    ]
    for scale in ("columns", "clip"):
        schema = Schema(columns, "ill", classes=(0, 1), scale=scale, norm=10.0)
        bins = Bins.of(schema, n_bins=4)
        assert bins.sizes.tolist() == [4, 2, 2, 2, 2, 2, 4]
        table = {
            "age": [10, 40, 60, 90, None],
            "ward": ["a", "b", "c", None, "a"],
            "pulse": [41, 100, 130, 199, 500],
            "ill": [0, 1, 0, 1, 0],
        }
        codes = bins.codes(schema.encode(table).X)
        assert codes[:4, 0].tolist() == [0, 1, 2, 3]
        assert codes[:, 1].tolist() == [0, 0, 0, 0, 1]
        assert codes[:, 2:6].argmax(axis=1).tolist() == [0, 1, 2, 3, 0]
        assert codes[:, 2:6].sum() == 5
        assert codes[:, 6].tolist() == [0, 1, 2, 3, 3]


def test_quantiles_cut_public_records_into_equal_parts():
    x = Noise(seed=0).open().normal(4000)
    X = np.column_stack(
        [
            np.exp(x),
            np.repeat([0.0, 1.0], [1999, 2001]),
            np.full(4000, 3.0),
            np.where(x > 0, x, math.nan),
        ]
    )
    bins = Bins.quantiles(Public(X), n_bins=8, missing="low")
    sizes = np.bincount(bins.codes(X)[:, 0], minlength=9)
    assert sizes[0] == 0
    assert np.ptp(sizes[1:]) <= 1
    assert bins.sizes.tolist()[1:3] == [3, 2]  # two values need one cut, one value none
    assert np.bincount(bins.codes(X)[:, 1]).tolist() == [0, 1999, 2001]
    assert Bins.quantiles(Public(np.full((3, 1), math.nan)), missing="low").cuts == ((),)


@pytest.mark.parametrize(
    "given",
    [
        {"cuts": []},
        {"cuts": [[1, 1]]},
        {"cuts": [[2, 1]]},
        {"cuts": [[math.nan]]},
        {"cuts": [[math.inf]]},
        {"cuts": "abc"},
        {"cuts": 5},
        {"cuts": [5]},
        {"cuts": [[1]], "categorical": [True, False]},
        {"cuts": [[1]], "categorical": True},
        {"cuts": [[1]], "missing": "middle"},
        {"cuts": [[1]], "missing": None},
    ],
    ids=str,
)
def test_bins_that_cannot_be_are_refused(given):
    with pytest.raises(SettingsError, match="Nothing was trained"):
        Bins(**given)


@pytest.mark.parametrize(
    ("low", "high", "n_bins"),
    [
        (1, 0, 4),
        (0, 0, 4),
        (0, math.inf, 4),
        (math.nan, 1, 4),
        (0, 1, 1),
        (0, 1, 256),
        (0, 1, 2.5),
        (0, 1, True),
    ],
)
def test_bounds_and_numbers_of_bins_that_cannot_be_are_refused(low, high, n_bins):
    with pytest.raises(SettingsError):
        Bins.even(low, high, n_features=2, n_bins=n_bins)


def test_rows_of_another_width_are_refused():
    with pytest.raises(SchemaMismatch, match="2 features"):
        Bins.even(0, 1, n_features=2).codes(np.zeros((1, 3)))


def test_bins_are_plain_values():
    bins = Bins.even(0, 1, n_features=2, n_bins=4)
    assert bins.sizes.tolist() == [4, 4]
    assert copy.deepcopy(bins) == bins == Bins(np.array([[0.25, 0.5, 0.75]] * 2))
    assert hash(bins) == hash(copy.deepcopy(bins))
