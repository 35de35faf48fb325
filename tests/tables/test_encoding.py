"""What encoding yields, record by record, on made-up and on real tables."""

import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from consilience.tables.chunks import ParquetRows
from consilience.tables.groups import cap_records, split_sites
from consilience.tables.reading import read_table
from consilience.tables.schema import Categorical, Encoded, Numeric, Schema
from consilience.tables.values import read_numbers
from tabular import MARK, MARKED_NUMBER, RECORDS, SCHEMA, one


def test_numbers_are_scaled_by_the_declared_bounds_and_values_beyond_count_as_the_bound():
    X = one(Numeric("v", 10, 30), [10.0, 15.0, 20.0, 30.0, -1e300, math.inf, -math.inf])
    np.testing.assert_allclose(X[:, 0], [-1, -0.5, 0, 1, -1, 1, -1], atol=1e-13)


def test_log1p_is_applied_to_values_and_bounds_alike():
    X = one(Numeric("v", -100, 100, transform="log1p"), [-100.0, 0.0, 9.0, 100.0])
    np.testing.assert_allclose(X[:, 0], [-1, 0, math.log(10) / math.log(101), 1], atol=1e-13)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("middle", [[1], [0]]),
        ("indicator", [[1, 0], [0, 1]]),
        (20, [[1], [0.5]]),
        (0, [[1], [-0.5]]),
    ],
)
def test_a_missing_number_becomes_what_the_schema_says(missing, expected):
    for absent in (None, math.nan):
        np.testing.assert_allclose(
            one(Numeric("v", -10, 30, missing=missing), [30.0, absent]), expected, atol=1e-13
        )


def test_unreadable_text_in_a_number_column_counts_as_missing():
    X = one(
        Numeric("v", -4, 4, missing="middle"),
        ["-4", " 2.0 ", "?", "", "4,5", "+1e0", "inf", "nan", "0x10"],
    )
    np.testing.assert_allclose(X[:, 0], [-1, 0.5, 0, 0, 0, 0.25, 1, 0, 0], atol=1e-13)


@given(st.from_regex(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", fullmatch=True))
def test_numbers_in_text_are_read_as_python_reads_them(text):
    assert read_numbers(pa.array([text, "1", MARK]))[0] == float(text)


def test_whether_one_text_is_readable_does_not_change_how_another_is_read():
    # Arrow's own parser takes all of these, until one bad text makes it fail as a whole.
    for text in ("Infinity", "INF", "nan", "inf", "-inf", "+1", "1e999"):
        alone, beside = (
            one(Numeric("v", 0, 1, missing="middle"), [text, *more])[0, 0] for more in ([], [MARK])
        )
        assert alone == beside


def test_a_column_without_any_value_is_all_missing():
    np.testing.assert_allclose(
        one(Numeric("v", 0, 1, missing="indicator"), [None, None]), [[0, 1], [0, 1]]
    )
    np.testing.assert_allclose(
        one(Categorical("v", (1, 2), missing="ignore"), [None, None]), [[0, 0], [0, 0]]
    )


def test_further_spellings_of_missing_can_be_declared():
    np.testing.assert_allclose(
        one(Numeric("v", 0, 8, missing="middle", missing_values=(-1,)), [-1, 8, 0])[:, 0],
        [0, 1, -1],
    )
    as_text = one(
        Numeric("v", 0, 8, missing="middle", missing_values=(-1, "?")), ["-1.00", "8", "?"]
    )
    np.testing.assert_allclose(as_text[:, 0], [0, 1, 0])
    X = one(
        Categorical("c", ("a", "b"), missing="indicator", missing_values=("?",)), ["a", "?", "b"]
    )
    np.testing.assert_allclose(X, np.eye(3)[[0, 2, 1]])


def test_categories_are_one_hot_in_declared_order_and_absent_ones_follow_their_rule():
    column = Categorical("c", ("b", "a"), missing="indicator", unseen="ignore")
    np.testing.assert_allclose(
        one(column, ["a", "b", None, "other"]), [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]]
    )
    ignore = Categorical("c", ("b", "a"), missing="ignore", unseen="ignore")
    np.testing.assert_allclose(
        one(ignore, ["a", "b", None, "other"]), [[0, 1], [1, 0], [0, 0], [0, 0]]
    )


@pytest.mark.parametrize("declared", [(1, 2), ("1", "2"), (1.0, 2.0), (" 1", "2.0")])
@pytest.mark.parametrize(
    "values",
    [[1, 2], [1.0, 2.0], ["1", "2"], ["1.0", " 2"], pd.Categorical([1, 2]), np.array([1, 2], "u1")],
)
def test_categories_compare_as_text_whatever_type_the_file_gave_them(declared, values):
    assert Categorical("c", declared) == Categorical("c", ("1", "2"))
    np.testing.assert_allclose(one(Categorical("c", declared), values), np.eye(2))


def test_booleans_are_categories_in_every_spelling():
    for values in ([False, True], ["false", "true"], ["False", "True"]):
        np.testing.assert_allclose(one(Categorical("c", (False, True)), values), np.eye(2))


def test_column_scaling_divides_by_the_root_of_the_number_of_columns():
    X, y, persons = SCHEMA.encode(RECORDS)
    assert SCHEMA.feature_names == (
        *("age", "age is missing", "income", "blood=A", "blood=B", "blood=0", "blood is missing"),
        *("ward=1", "ward=2", "ward=3"),
    )
    assert X.shape == (5, SCHEMA.n_features) == (5, 10)
    assert X.dtype == np.float64
    assert X.flags.c_contiguous
    np.testing.assert_allclose(X[1], np.array([0, 1, X[1, 2] * 2, 0, 1, 0, 0, 0, 1, 0]) / 2)
    assert y.tolist() == [0, 1, 1, 0, 0]
    assert y.dtype == np.int64
    assert persons is not None
    assert persons.tolist() == ["7", "7", "8", "9", "9"]


def test_clip_scaling_leaves_short_records_alone_and_cuts_long_ones():
    schema = Schema(
        [Numeric("a", -1, 1), Numeric("b", -1, 1)], "y", classes=(0, 1), scale="clip", norm=0.5
    )
    X = schema.encode({"a": [0.3, 3.0], "b": [0.0, 4.0], "y": [0, 0]}).X
    np.testing.assert_allclose(X, [[0.3, 0.0], [0.5 / math.sqrt(2)] * 2], atol=1e-13)


def test_labels_follow_the_declared_order_and_a_site_may_lack_a_class():
    schema = Schema([Numeric("v", 0, 1)], "y", classes=("late", "early", "never"))
    assert schema.encode({"v": [0, 0], "y": ["never", "late"]}).y.tolist() == [2, 0]


def test_unknown_label_takes_in_every_undeclared_label():
    schema = Schema([Numeric("v", 0, 1)], "y", classes=(0, "ill"), unknown_label="ill")
    assert schema.encode({"v": [0] * 4, "y": [0, 1, 4, None]}).y.tolist() == [0, 1, 1, 1]


def test_regression_labels_are_clipped_to_their_bound():
    schema = Schema([Numeric("v", 0, 1)], "y", label_bound=2, unknown_label=0)
    y = schema.encode({"v": [0] * 4, "y": [1.5, -9.0, math.inf, None]}).y
    assert y.tolist() == [1.5, -2.0, 2.0, 0.0]
    assert y.dtype == np.float64


def test_an_empty_table_encodes_to_no_records():
    empty = {name: [] for name in RECORDS}
    X, y, persons = SCHEMA.encode(empty)
    assert X.shape == (0, 10)
    assert y.shape == (0,)
    assert y.dtype == np.int64
    assert persons.shape == (0,)


def test_features_encode_without_label_and_person():
    bare = {name: RECORDS[name] for name in ("age", "income", "blood", "ward")}
    assert np.array_equal(SCHEMA.encode_features(bare), SCHEMA.encode(RECORDS).X)


def test_a_printed_encoding_shows_no_record():
    assert (
        repr(Encoded(np.array([[MARKED_NUMBER]]), np.array([1]), np.array([MARK])))
        == "Encoded(X, y, persons)"
    )


@settings(deadline=None)
@given(
    hnp.arrays(
        np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-2, 2)
    ),
    st.floats(1e-3, 3),
)
def test_clipping_ends_inside_the_ball_never_lengthens_and_is_idempotent(X, radius):
    names = [f"v{i}" for i in range(X.shape[1])]
    schema = Schema(
        [Numeric(name, -1, 1) for name in names], "y", classes=(0, 1), scale="clip", norm=radius
    )
    scaled = np.clip(X, -1, 1)
    clipped = schema.encode_features(dict(zip(names, X.T, strict=True)))
    assert np.array_equal(schema.encode_features(dict(zip(names, clipped.T, strict=True))), clipped)
    assert (np.abs(clipped) <= np.abs(scaled)).all()
    for row, before in zip(clipped, scaled, strict=True):
        assert (
            sum(Fraction(v) ** 2 for v in row.tolist()) <= Fraction(radius) ** 2
        )  # in exact arithmetic
        assert max(math.hypot(*row), np.linalg.norm(row)) <= radius  # and however it is summed
        if sum(Fraction(v) ** 2 for v in before.tolist()) <= Fraction(radius * (1 - 1e-13)) ** 2:
            assert np.array_equal(row, before)  # short rows, zero among them, stay as they are


numbers = st.none() | st.floats() | st.integers(-(10**6), 10**6).map(float)
words = st.none() | st.sampled_from(["A", "B", "0", "C", ""])
record = st.tuples(
    numbers,
    numbers,
    words,
    st.none() | st.integers(0, 5),
    st.sampled_from(["no", "yes"]),
    st.integers(0, 4),
)


def table_of(records):
    kinds = [pa.float64(), pa.float64(), pa.string(), pa.int64(), pa.string(), pa.int64()]
    columns = list(zip(*records, strict=True)) or [[]] * 6
    return pa.table(
        [pa.array(c, k) for c, k in zip(columns, kinds, strict=True)],
        names=list(SCHEMA.table_columns),
    )


@settings(deadline=None)
@given(st.lists(record, max_size=30), st.data())
def test_encoding_is_record_wise_bit_for_bit(records, data):
    whole = SCHEMA.encode(table_of(records))
    order = data.draw(st.permutations(range(len(records))))
    permuted = SCHEMA.encode(table_of([records[i] for i in order]))
    assert np.array_equal(permuted.X, whole.X[order])
    assert np.array_equal(permuted.y, whole.y[order])
    assert permuted.persons.tolist() == whole.persons[order].tolist()
    for i, single in enumerate(records):
        assert np.array_equal(SCHEMA.encode(table_of([single])).X[0], whole.X[i])
    assert np.isfinite(whole.X).all()
    assert (np.linalg.norm(whole.X, axis=1) <= SCHEMA.norm).all()


@pytest.mark.parametrize("width", [1, 7, 8, 9, 127, 129, 300])
def test_wide_records_are_encoded_alike_alone_and_in_company(width):
    values = np.random.default_rng(width).normal(size=(12, width)) * 1.5
    names = [f"v{i}" for i in range(width)]
    schema = Schema(
        [Numeric(name, -1, 1, transform="log1p") for name in names],
        "y",
        classes=(0, 1),
        scale="clip",
    )
    table = pa.table(
        {name: values[:, i] for i, name in enumerate(names)} | {"y": np.zeros(12, int)}
    )
    whole = schema.encode(table).X
    assert all(np.array_equal(schema.encode(table.slice(i, 1)).X[0], whole[i]) for i in range(12))


# bounds at which rounding does its worst, a transform, a value beyond
AWKWARD = [
    (0, 98, None, 99),
    (0.1, 0.3, None, 0.0),
    (0.1, 0.3, "log1p", 1.0),
    (1e16, 1e16 + 2, None, 1e17),
]
AWKWARD += [
    (-1e308, 1e308, None, math.inf),
    (-1, 1, None, -1.5),
    (0, 2, None, 3),
    (-7.3, 1e6, "log1p", -8.0),
]


@pytest.mark.parametrize(("low", "high", "transform", "beyond"), AWKWARD)
def test_a_value_that_is_missing_or_beyond_its_bound_changes_no_other_record(
    low, high, transform, beyond
):
    schema = Schema(
        [Numeric("v", low, high, missing="middle", transform=transform)], "y", classes=(0, 1)
    )
    share = np.linspace(0, 1, 5000)
    values = np.clip(low * (1 - share) + high * share, low, high)
    alone = schema.encode_features({"v": values})
    for odd in (beyond, math.nan):
        assert np.array_equal(schema.encode_features({"v": np.append(values, odd)})[:-1], alone)
    assert np.array_equal(schema.encode_features({"v": [-math.inf, math.inf]}), alone[[0, -1]])


def test_blocks_hold_the_same_bits_and_take_the_place_of_each_other():
    n_records = 10_000
    table = {name: np.resize(np.array(RECORDS[name], dtype=object), n_records) for name in RECORDS}
    schema = Schema(SCHEMA.columns, SCHEMA.label, classes=SCHEMA.classes)
    whole = schema.encode(table)
    blocks, labels, stop = [], [], 0
    for X, y, persons in schema.encode_blocks(table):
        start, stop = stop, stop + len(y)
        assert np.array_equal(X, whole.X[start:stop])
        blocks.append(X)
        labels.append(y)
        assert persons is None
    assert np.array_equal(np.concatenate(labels), whole.y)
    assert len(blocks) > 2
    assert all(np.shares_memory(blocks[0], X) for X in blocks)


def test_numbers_of_a_frame_are_read_where_they_lie():
    frame = pd.DataFrame({"a": np.arange(5.0), "b": np.arange(5)}, index=list("vwxyz"))
    read = read_table(frame)
    assert read.column_names == ["a", "b"]
    for name in frame:
        assert np.shares_memory(read[name].chunk(0).to_numpy(), frame[name].to_numpy())


def real(name):
    folder = os.environ.get("CONSILIENCE_DATA")
    if not folder or not (Path(folder) / name).is_file():
        pytest.skip(f"{name} not found: set CONSILIENCE_DATA to the folder that holds it")
    return Path(folder) / name


def test_adult_encodes_from_its_code_book():
    path = real("adult.parquet")
    work = "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov".split()
    work += ["Without-pay", "Never-worked"]
    schema = Schema(
        [
            Numeric("age", 17, 90),
            Numeric("capital_gain", 0, 1e5, transform="log1p"),
            Numeric("hours_per_week", 1, 99),
            Categorical("workclass", work, missing="indicator", missing_values=("?",)),
            Categorical("sex", ("Female", "Male")),
        ],
        *("income",),
        classes=("<=50K", ">50K"),
    )
    X, y, _ = schema.encode(path)
    assert X.shape == (48842, 3 + 9 + 2)
    assert np.bincount(y).tolist() == [37155, 11687]
    rows = ParquetRows(path, schema, 10_000)
    chunked = np.concatenate([part for part, _ in rows.chunks()])
    assert np.array_equal(chunked, X)


def test_heart_disease_encodes_with_its_missing_values_and_splits_by_hospital():
    path = real("heart_disease.parquet")
    schema = Schema(
        [
            Numeric("age", 0, 100),
            Numeric("chol", 100, 600, missing="indicator", missing_values=(0,)),
            Categorical("cp", (1, 2, 3, 4)),
            Categorical("thal", (3, 6, 7), missing="indicator"),
        ],
        *("num",),
        classes=(0, "disease"),
        unknown_label="disease",
    )
    X, y, _ = schema.encode(path)
    assert X.shape == (920, 1 + 2 + 4 + 4)
    assert np.bincount(y).tolist() == [411, 509]
    sizes = [len(part) for part in split_sites(read_table(path), "site")]
    assert sizes == [303, 294, 123, 200]


def test_eicu_encodes_by_person_with_its_code_for_not_measured():
    path = real("eicu_demo.parquet")
    schema = Schema(
        [
            Numeric("age", 0, 90, missing=90),  # "> 89" is how the publisher hides the oldest
            Numeric("aps_heartrate", 20, 220, missing="indicator", missing_values=(-1,)),
            Categorical("gender", ("Female", "Male"), missing="ignore", unseen="ignore"),
        ],
        *("hospitaldischargestatus",),
        classes=("Alive", "Expired"),
        unknown_label="Alive",
        person="uniquepid",
        max_records_per_person=1,
    )
    X, y, persons = schema.encode(path)
    assert X.shape == (2520, 5)
    assert np.bincount(y).tolist() == [2308, 212]
    keep = cap_records(persons, 1, np.random.default_rng(0).random(2520))
    assert keep.sum() == len(set(persons[keep])) == 1841
    rows = ParquetRows(path, schema, keep=keep)
    assert rows.n_records == 1841
    assert np.array_equal(np.concatenate([part for part, _ in rows.chunks()]), X[keep])
