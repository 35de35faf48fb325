import itertools
import json
import math
import os
import tomllib
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from consilience.errors import SchemaMismatch, SettingsError
from consilience.tables.chunks import ParquetRows
from consilience.tables.groups import cap_records, split_sites
from consilience.tables.reading import read_table
from consilience.tables.schema import Categorical, Encoded, Numeric, Schema
from consilience.tables.values import read_numbers

MARK = "MARKED7351"
MARKED_NUMBER = 73519.5

SCHEMA = Schema(
    [
        Numeric("age", 0, 120, missing="indicator"),
        Numeric("income", -10, 1e6, missing="middle", transform="log1p"),
        Categorical("blood", ("A", "B", "0"), missing="indicator", unseen="ignore"),
        Categorical("ward", (1, 2, 3), missing="ignore", unseen="ignore"),
    ],
    "ill",
    classes=("no", "yes"),
    person="pid",
    max_records_per_person=2,
)
RECORDS = {
    "age": [30.0, None, 61.5, 500.0, -3.0],
    "income": [0.0, 1234.5, None, 1e9, -10.0],
    "blood": ["A", "B", None, "0", "unlisted"],
    "ward": [1, 2, 3, None, 9],
    "ill": ["no", "yes", "yes", "no", "no"],
    "pid": [7, 7, 8, 9, 9],
    "unused": ["x", "y", "z", "u", "v"],
}


def one(column, values, **schema):
    """Encode a single column with a harmless label."""
    labels = {"y": [0] * len(values)}
    return Schema([column], "y", classes=(0, 1), **schema).encode({column.name: values} | labels).X


# ----------------------------------------------------------------------------- what encoding yields


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


# --------------------------------------------------------------------------------------- properties


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


names = st.text(min_size=1, max_size=6)
numerics = st.builds(
    lambda name, low, width, missing, transform: Numeric(
        name, low, low + width, missing, transform
    ),
    *(names, st.integers(-1000, 1000), st.integers(1, 1000)),
    *(st.sampled_from(["error", "middle", "indicator"]), st.sampled_from([None, "log1p"])),
)
texts = st.text("abcxyzäß é", min_size=1, max_size=5).map(str.strip).filter(bool)
categoricals = st.builds(
    Categorical, names, st.lists(texts, min_size=1, max_size=4, unique=True).map(tuple)
)
schemas = st.builds(
    lambda columns, classes, norm: Schema(columns, "the label itself", classes=classes, norm=norm),
    st.lists(numerics | categoricals, min_size=1, max_size=4, unique_by=lambda column: column.name),
    st.lists(texts | st.integers(-5, 5), min_size=2, max_size=4, unique_by=str),
    st.floats(0.1, 10),
)


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


@settings(deadline=None)
@given(schemas, st.randoms(use_true_random=False))
def test_a_schema_survives_plain_values_and_its_digest_ignores_their_order(schema, random):
    facts = json.loads(json.dumps(schema.to_dict()))
    shuffled = {key: facts[key] for key in random.sample(list(facts), len(facts))}
    shuffled["columns"] = [
        {key: c[key] for key in random.sample(list(c), len(c))} for c in facts["columns"]
    ]
    assert Schema.from_dict(shuffled) == schema
    assert Schema.from_dict(shuffled).digest == schema.digest


def test_a_schema_reads_from_toml_and_its_digest_is_fixed():
    facts = tomllib.loads("""
        label = "ill"
        classes = [0, 1]
        columns = [
          {kind = "numeric", name = "age", low = 0, high = 120, missing = "middle"},
          {kind = "categorical", name = "sex", categories = ["f", "m"]},
        ]
    """)
    schema = Schema.from_dict(facts)
    assert schema == Schema(
        [Numeric("age", -0.0, 120.0, "middle"), Categorical("sex", ["f", "m"])],
        "ill",
        classes=[0, 1],
    )
    # A changed digest orphans every contribution made under the old one: change it on purpose or
    # not at all.
    assert schema.digest == "fc02122b300f088e7108a60661513ca3851ab586608c1576d0513620db54a3f5"


def test_every_fact_is_in_the_digest():
    base = {
        "columns": [Numeric("a", 0, 1), Categorical("b", ("x", "y"))],
        "label": "y",
        "classes": (0, 1),
    }
    variants = [
        {},
        {"columns": base["columns"][:1]},
        {"columns": base["columns"][::-1]},
        {"columns": [Numeric("a", 0, 1, transform="log1p"), base["columns"][1]]},
        {"columns": [Numeric("a", 0, 1, missing=0.5), base["columns"][1]]},
        {"columns": [Numeric("a", 0, 1, missing_values=("?",)), base["columns"][1]]},
        {"columns": [base["columns"][0], Categorical("b", ("y", "x"))]},
        {"columns": [base["columns"][0], Categorical("b", ("x", "y"), unseen="ignore")]},
        *(
            {"label": "z"},
            {"classes": (1, 0)},
            {"classes": None, "label_bound": 1},
            {"unknown_label": 1},
        ),
        *(
            {"person": "p", "max_records_per_person": 2},
            {"person": "p", "max_records_per_person": 3},
        ),
        *({"norm": 0.5}, {"scale": "clip"}),
    ]
    digests = [Schema(**(base | variant)).digest for variant in variants]
    assert len(set(digests)) == len(variants)


# ------------------------------------------------------------------------------------------ readers


def sources(folder):
    frame = pd.DataFrame({name: pd.Series(values) for name, values in RECORDS.items()})
    table = pa.table(RECORDS)
    frame.to_csv(folder / "pandas.csv", index=False)
    frame.to_csv(folder / "packed.csv.gz", index=False)
    frame.to_csv(folder / "marked.csv", index=False, encoding="utf-8-sig")
    pl.DataFrame(RECORDS).write_csv(folder / "polars.csv")
    pcsv.write_csv(table, folder / "arrow.csv")
    pq.write_table(table, folder / "one.parquet")
    (folder / "parts").mkdir()
    pq.write_table(table.slice(0, 2), folder / "parts" / "a.parquet")
    pq.write_table(table.slice(2), folder / "parts" / "b.parquet")
    yield from (
        folder / "pandas.csv",
        str(folder / "packed.csv.gz"),
        folder / "marked.csv",
        folder / "polars.csv",
    )
    yield from (folder / "arrow.csv", folder / "one.parquet", folder / "parts")
    yield from (
        RECORDS,
        table,
        table.to_batches()[0],
        frame,
        frame.convert_dtypes(),
        frame.set_index("unused"),
    )
    yield frame.astype(
        {"blood": "category", "ward": "category", "ill": "category", "pid": "category"}
    )
    yield frame.astype({"age": "object", "blood": "object"})
    yield pl.DataFrame(RECORDS)
    yield pl.DataFrame(RECORDS).with_columns(
        pl.col("blood").cast(pl.Categorical), pl.col("ill").cast(pl.Enum(["no", "yes"]))
    )
    yield pa.table({name: pa.array(column).dictionary_encode() for name, column in RECORDS.items()})
    yield pa.table(
        {name: pa.chunked_array([column[:1], column[1:]]) for name, column in RECORDS.items()}
    )
    yield pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
    yield {name: np.array(column) for name, column in RECORDS.items() if name != "unused"}


def test_every_reader_gives_the_same_encoding(tmp_path):
    expected = SCHEMA.encode(pa.table(RECORDS))
    for number, source in enumerate(sources(tmp_path)):
        X, y, persons = SCHEMA.encode(source)
        assert np.array_equal(X, expected.X), (number, type(source))
        assert np.array_equal(y, expected.y), (number, type(source))
        assert persons.tolist() == expected.persons.tolist(), (number, type(source))


def test_reading_with_a_schema_takes_only_its_columns(tmp_path):
    for source in sources(tmp_path):
        assert sorted(read_table(source, SCHEMA).column_names) == sorted(SCHEMA.table_columns)
    assert read_table(RECORDS).column_names == list(RECORDS)
    assert read_table(tmp_path / "pandas.csv").num_rows == 5


def test_a_csv_with_only_a_header_is_an_empty_table(tmp_path):
    (tmp_path / "empty.csv").write_text(",".join(SCHEMA.table_columns) + "\n")
    assert SCHEMA.encode(tmp_path / "empty.csv").X.shape == (0, 10)


def test_csv_text_may_hold_commas_quotes_and_line_breaks(tmp_path):
    (tmp_path / "t.csv").write_text('c,y\n"a, ""b""\nc",0\nplain,1\n')
    schema = Schema([Categorical("c", ('a, "b"\nc', "plain"))], "y", classes=(0, 1))
    np.testing.assert_allclose(schema.encode(tmp_path / "t.csv").X, np.eye(2))


# ----------------------------------------------------------------------------------- wrong settings

BAD_SETTINGS = {
    "no bounds": (lambda: Numeric("age"), "low"),
    "one bound": (lambda: Numeric("age", low=0), "high"),
    "bounds as None": (lambda: Numeric("age", None, None), "low"),
    "bounds as text": (lambda: Numeric("age", "0", "1"), "low"),
    "NaN bound": (lambda: Numeric("age", 0, math.nan), "high"),
    "infinite bound": (lambda: Numeric("age", -math.inf, 0), "low"),
    "equal bounds": (lambda: Numeric("age", 1, 1), "high"),
    "bounds the wrong way round": (lambda: Numeric("age", 2, 1), "high"),
    "bounds that the transform merges": (
        lambda: Numeric("age", 1e300, 1.00000000000001e300, transform="log1p"),
        "high",
    ),
    "missing outside the bounds": (lambda: Numeric("age", 0, 1, missing=2), "missing"),
    "missing misspelt": (lambda: Numeric("age", 0, 1, missing="mean"), "missing"),
    "unknown transform": (lambda: Numeric("age", 0, 1, transform="log"), "transform"),
    "no categories": (lambda: Categorical("sex"), "categories"),
    "categories twice": (lambda: Categorical("sex", (1, "1.0")), "categories"),
    "categories as one text": (lambda: Categorical("sex", "fm"), "categories"),
    "blank category": (lambda: Categorical("sex", ("f", " ")), "declare"),
    "categorical missing": (lambda: Categorical("sex", ("f",), missing="middle"), "missing"),
    "categorical unseen": (lambda: Categorical("sex", ("f",), unseen="drop"), "unseen"),
    "no columns": (lambda: Schema([], "y", classes=(0, 1)), "columns"),
    "columns twice": (
        lambda: Schema([Numeric("a", 0, 1), Numeric("a", 0, 2)], "y", classes=(0, 1)),
        "columns",
    ),
    "label among columns": (lambda: Schema([Numeric("y", 0, 1)], "y", classes=(0, 1)), "label"),
    "nameless column": (lambda: Schema([Numeric("", 0, 1)], "y", classes=(0, 1)), "name"),
    "one class": (lambda: Schema([Numeric("a", 0, 1)], "y", classes=("only",)), "classes"),
    "classes twice": (lambda: Schema([Numeric("a", 0, 1)], "y", classes=(1, "1")), "classes"),
    "no classes and no bound": (lambda: Schema([Numeric("a", 0, 1)], "y"), "classes"),
    "classes and bound": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), label_bound=1),
        "label_bound",
    ),
    "bound of zero": (lambda: Schema([Numeric("a", 0, 1)], "y", label_bound=0), "label_bound"),
    "unknown class undeclared": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), unknown_label=2),
        "unknown",
    ),
    "unknown label too big": (
        lambda: Schema([Numeric("a", 0, 1)], "y", label_bound=1, unknown_label=2),
        "unknown",
    ),
    "person without limit": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), person="p"),
        "max_records",
    ),
    "limit without person": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), max_records_per_person=1),
        "person",
    ),
    "norm of zero": (lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), norm=0), "norm"),
    "norm without end": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), norm=math.inf),
        "norm",
    ),
    "unknown scale": (
        lambda: Schema([Numeric("a", 0, 1)], "y", classes=(0, 1), scale="z-score"),
        "scale",
    ),
    "unknown key": (lambda: Schema.from_dict(SCHEMA.to_dict() | {"lable": "y"}), "lable"),
    "absent key": (
        lambda: Schema.from_dict(
            {"columns": [{"kind": "numeric", "name": "a", "low": 0, "high": 1}]}
        ),
        "label",
    ),
    "unknown kind": (
        lambda: Schema.from_dict({"columns": [{"kind": "date", "name": "a"}], "label": "y"}),
        "kind",
    ),
    "column without bounds": (
        lambda: Schema.from_dict({"columns": [{"kind": "numeric", "name": "a"}]}),
        "low",
    ),
    "limit of zero": (lambda: cap_records([1], 0, [0.5]), "limit"),
    "too few draws": (lambda: cap_records([1, 2], 1, [0.5]), "priority"),
    "draws not numbers": (lambda: cap_records([1], 1, [math.nan]), "priority"),
    "no draws": (lambda: split_sites(3, 2), "priority"),
    "no sites": (lambda: split_sites(3, 0, [0.1, 0.2, 0.3]), "sites"),
    "too few site ids": (lambda: split_sites(3, ["a", "b"]), "sites"),
    "not a table": (lambda: read_table(3), "int"),
    "no such file": (lambda: read_table("nowhere/to/be/found.csv"), "found.csv"),
}


@pytest.mark.parametrize(("call", "named"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_a_wrong_setting_is_refused_by_name(call, named):
    with pytest.raises(SettingsError) as caught:
        call()
    message = str(caught.value)
    assert named in message
    assert "No record was read." in message


def test_missing_bounds_say_what_to_write_and_why_they_are_not_read_off_the_data():
    with pytest.raises(
        SettingsError, match=r"Numeric\('age', low=\.\.\., high=\.\.\.\).*would leak"
    ):
        Numeric("age")


# ------------------------------------------------------------ wrong tables, and what errors may say

STRICT = Schema(
    [Numeric("age", 0, 120), Categorical("sex", ("f", "m"))],
    "ill",
    classes=(0, 1),
    person="pid",
    max_records_per_person=1,
)
GOOD = {"age": [50.0, 60.0], "sex": ["f", "m"], "ill": [0, 1], "pid": ["a", "b"]}


def refusal(call):
    """Return the refusal's text after checking that it, and its causes, hold no marked value."""
    with pytest.raises(SchemaMismatch) as caught:
        call()
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None
    assert MARK not in str(error)
    assert "7351" not in repr(error.args)
    assert "does not fit the schema" in str(error)
    assert "Nothing was" in str(error)
    return str(error)


class Opaque:
    def __repr__(self):
        return MARK


BAD_TABLES = {
    "missing number": ({"age": [None, 73515.0]}, ["'age'", "a number in [0, 120]"]),
    "NaN": ({"age": [math.nan, 73515.0]}, ["'age'"]),
    "text for a number": ({"age": [MARK, "1"]}, ["'age'", "a number in [0, 120]"]),
    "mixed kinds": ({"age": [1, MARK]}, ["'age'", "kind"]),
    "objects": ({"age": [Opaque(), Opaque()]}, ["'age'", "kind"]),
    "booleans for numbers": ({"age": [True, False]}, ["'age'", "bool"]),
    "dates for numbers": ({"age": np.array(["2020-07-31"] * 2, "M8[D]")}, ["'age'", "date32"]),
    "lists for categories": ({"sex": [[MARK], [MARK]]}, ["'sex'", "list"]),
    "mappings for categories": ({"sex": [{MARK: 1}, {MARK: 2}]}, ["'sex'", "struct"]),
    "bytes for categories": ({"sex": [MARK.encode()] * 2}, ["'sex'", "binary"]),
    "two dimensions": ({"age": np.full((2, 2), 7351.0)}, ["'age'"]),
    "unequal lengths": ({"age": [7351.0]}, ["length"]),
    "missing category": ({"sex": [None, MARK]}, ["'sex'", "missing"]),
    "unseen category": ({"sex": ["f", MARK]}, ["'sex'", "not declared"]),
    "unknown class": ({"ill": [0, 7351]}, ["'ill'", "not declared"]),
    "missing label": ({"ill": [0, None]}, ["'ill'", "missing"]),
    "missing person": ({"pid": [MARK, None]}, ["'pid'", "person id"]),
}


@pytest.mark.parametrize(("change", "named"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_refused_table_names_columns_and_never_a_value(change, named):
    message = refusal(lambda: STRICT.encode(GOOD | change))
    assert all(part in message for part in named)


def test_a_frame_with_mixed_kinds_names_the_column_and_never_a_value():
    frame = pd.DataFrame(GOOD).astype({"age": object})
    frame.loc[1, "age"] = MARK
    assert "'age'" in refusal(lambda: STRICT.encode(frame))
    doubled = pd.DataFrame(np.full((2, 2), MARK), columns=["age", "age"])
    refusal(lambda: STRICT.encode(doubled))


def test_structural_problems_are_listed_all_at_once():
    wrong = pa.table(
        {"age": pa.array([True]), "ill": pa.array([[7351]]), "other": pa.array([MARK])}
    )
    message = refusal(lambda: STRICT.encode(wrong))
    for part in ("'age' holds bool", "'sex' is absent", "'ill' holds list", "'pid' is absent"):
        assert part in message
    twice = pa.table([pa.array([1.0]), pa.array([2.0])], names=["age", "age"])
    assert "'age' is there more than once" in refusal(lambda: STRICT.encode_features(twice))


def test_value_problems_are_listed_all_at_once_and_once_each():
    table = pa.table(
        GOOD | {"age": pa.array([None, None], pa.float64()), "sex": ["f", MARK], "ill": [0, 7351]}
    )
    message = refusal(lambda: STRICT.encode(pa.concat_tables([table, table])))
    assert message.count("'age'") == message.count("'sex'") == message.count("'ill'") == 1


@pytest.mark.parametrize(
    "text",
    [
        f"age,sex,ill,pid\n{MARK},f,0,a\n",
        f"age,sex,ill,pid\n50,f,0,a\n60,m,1,b,{MARK}\n",
        f"age,sex,ill,pid\n50,f,0,a\n{MARK}\n",
        f"age,sex,age,ill,pid\n50,f,{MARK},0,a\n",
        f"age,sex,ill,pid\n50,{MARK}\udcff,0,a\n",
        f"{MARK},f,0,a\n50,f,0,a\n",
        "",
    ],
    ids=[
        "text for a number",
        "long line",
        "short line",
        "column twice",
        "not UTF-8",
        "no header",
        "empty file",
    ],
)
def test_a_bad_csv_is_refused_without_a_value(tmp_path, text):
    path = tmp_path / "records.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    refusal(lambda: STRICT.encode(path))


def test_a_damaged_parquet_file_is_refused_without_a_value(tmp_path):
    path = tmp_path / "records.parquet"
    path.write_text(MARK)
    refusal(lambda: STRICT.encode(path))
    refusal(lambda: ParquetRows(path, STRICT))
    pq.write_table(
        pa.table(GOOD | {"sex": [MARK * 1000, "m"]}), path, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    refusal(lambda: STRICT.encode(path))
    rows = ParquetRows(path, STRICT, keep=[True, True])
    refusal(lambda: list(rows.chunks()))


def garbled(*texts):
    """Return text that is not UTF-8, as a foreign Parquet writer may leave it."""
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


def test_other_refusals_show_no_value():
    nonsense = garbled(MARK.encode() + b"\xff", b"\xfe")
    assert "'pid'" in refusal(lambda: STRICT.encode(GOOD | {"pid": nonsense}))
    assert "'sex'" in refusal(lambda: STRICT.encode(GOOD | {"sex": nonsense}))
    refusal(lambda: cap_records(nonsense, 1, [0.1, 0.2]))
    refusal(lambda: cap_records([MARK, None], 1, [0.1, 0.2]))
    refusal(lambda: cap_records([MARK, 7351], 1, [0.1, 0.2]))
    refusal(lambda: split_sites(2, [MARK, math.nan]))
    refusal(lambda: split_sites(2, ["a", "b"], persons=[MARK, MARK]))


def test_lenient_policies_never_refuse_a_value():
    lenient = Schema(
        [
            Numeric("age", 0, 120, missing="middle"),
            Categorical("sex", ("f", "m"), missing="ignore", unseen="ignore"),
        ],
        *("ill",),
        classes=(0, 1),
        unknown_label=0,
    )
    strange = [None, "", "f", "50", "1e999", "nan", "-inf", "true", "\x00", "💥", "1.0", MARK]
    for column in (strange, garbled(b"\xff\xfe", b"\x80")):
        X = lenient.encode({"age": column, "sex": column, "ill": column}).X
        assert np.isfinite(X).all()
        assert (np.linalg.norm(X, axis=1) <= 1).all()


# ------------------------------------------------------------------------------- larger than memory


def peaks(path, n_records):
    """Return the size of the table, and the most memory that reading it in chunks took."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {f"v{i}": rng.normal(size=n_records) for i in range(10)}
        | {"y": rng.integers(0, 2, n_records)}
    )
    pq.write_table(
        table, path, row_group_size=n_records, use_dictionary=False
    )  # one row group: the hardest case
    whole = table.nbytes
    del table
    schema = Schema([Numeric(f"v{i}", -4, 4) for i in range(10)], "y", classes=(0, 1))
    rows = ParquetRows(path, schema, chunk_records=8192)
    assert (rows.n_records, rows.n_features) == (n_records, 10)
    pool = pa.default_memory_pool()
    before, arrow, seen = pool.bytes_allocated(), 0, 0
    tracemalloc.start()
    try:
        for X, y in rows.chunks():
            arrow = max(arrow, pool.bytes_allocated() - before)
            seen += len(y)
            assert X.shape == (len(y), 10)
            assert len(y) <= 8192
        numpy = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == n_records
    return whole, arrow, numpy


def test_chunks_take_little_memory_and_no_more_for_more_records(tmp_path):
    whole, arrow, numpy = peaks(tmp_path / "large.parquet", 500_000)
    assert arrow < whole / 8
    assert numpy < whole / 8
    _, arrow_half, numpy_half = peaks(tmp_path / "half.parquet", 250_000)
    assert arrow < 1.2 * arrow_half
    assert numpy < 1.2 * numpy_half


def test_chunks_repeat_and_equal_the_whole(tmp_path):
    for source in sources(tmp_path):
        if isinstance(source, Path) and source.suffix in {".parquet", ""}:
            rows = ParquetRows(
                source, SCHEMA, chunk_records=2, keep=[True, False, True, True, True]
            )
            whole = SCHEMA.encode(source)
            for _ in range(2):
                X, y = together(rows.chunks())
                kept = [0, 2, 3, 4]
                assert np.array_equal(X, whole.X[kept])
                assert np.array_equal(y, whole.y[kept])
                for every in (1, 2, 3):
                    ((X, y),) = rows.gather(
                        lambda blocks: together((X.copy(), y) for X, y in blocks), every
                    )
                    assert np.array_equal(X, whole.X[kept[::every]])
                    assert np.array_equal(y, whole.y[kept[::every]])
            assert rows.n_records == 4
            assert rows.passes == 8
            assert rows.persons().tolist() == whole.persons.tolist()


def together(chunks):
    return tuple(np.concatenate(part) for part in zip(*chunks, strict=True))


def test_chunks_refuse_uncapped_persons_and_wrong_masks(tmp_path):
    pq.write_table(pa.table(RECORDS), tmp_path / "r.parquet")
    with pytest.raises(SettingsError, match="max_records_per_person=2"):
        list(ParquetRows(tmp_path / "r.parquet", SCHEMA).chunks())
    with pytest.raises(SettingsError, match="keep"):
        ParquetRows(tmp_path / "r.parquet", SCHEMA, keep=[True])
    with pytest.raises(SettingsError, match="chunk_records"):
        ParquetRows(tmp_path / "r.parquet", SCHEMA, chunk_records=0)
    unaware = Schema([Numeric("age", 0, 1, missing="middle")], "ill", classes=("no", "yes"))
    with pytest.raises(SettingsError, match="person"):
        ParquetRows(tmp_path / "r.parquet", unaware).persons()
    assert "'sex' is absent" in refusal(lambda: ParquetRows(tmp_path / "r.parquet", STRICT))
    anonymous = pa.table(RECORDS | {"pid": pa.array([None] * 5, pa.string())})
    pq.write_table(anonymous, tmp_path / "r.parquet")
    assert "'pid'" in refusal(ParquetRows(tmp_path / "r.parquet", SCHEMA).persons)


# -------------------------------------------------------------------------------- persons and sites

ids = st.lists(st.integers(0, 5), max_size=40) | st.lists(
    st.sampled_from(["a", "b", "ccc"]), max_size=40
)


@given(ids, st.integers(1, 4), st.randoms(use_true_random=False))
def test_capping_keeps_the_lowest_priorities_of_each_person(persons, limit, random):
    priority = [random.random() for _ in persons]
    keep = cap_records(np.array(persons) if persons else persons, limit, priority)
    for person in set(persons):
        mine = sorted((priority[i], i) for i, p in enumerate(persons) if p == person)
        assert {i for _, i in mine[:limit]} == {
            i for i, p in enumerate(persons) if p == person and keep[i]
        }


@given(ids.filter(bool), st.integers(1, 4), st.randoms(use_true_random=False))
def test_leaving_a_person_out_does_not_change_what_is_kept_of_others(persons, limit, random):
    priority = np.array([random.random() for _ in persons])
    others = np.array([p != persons[0] for p in persons])
    with_all = cap_records(persons, limit, priority)
    without = cap_records([p for p in persons if p != persons[0]], limit, priority[others])
    assert np.array_equal(with_all[others], without)


@pytest.mark.statistical
def test_every_record_of_a_person_is_kept_equally_often():
    # 1 of 3 records in 9000 draws; each count is Binomial(9000, 1/3) with deviation 45, and 5
    # deviations fail by chance with probability below 3 * 6e-7 for a fresh seed; this seed is
    # fixed.
    rng = np.random.default_rng(20)
    persons = np.repeat(np.arange(9000), 3)
    kept = cap_records(persons, 1, rng.random(27000)).reshape(9000, 3)
    assert (kept.sum(axis=1) == 1).all()
    assert (np.abs(kept.sum(axis=0) - 3000) < 5 * 45).all()


def test_ids_are_the_same_person_as_number_and_as_text():
    draws = [0.3, 0.2, 0.1]
    for persons in (
        [7, 7, 8],
        ["7", "7", "8"],
        [7.0, 7.0, 8.0],
        ["7", "7.0", "8"],
        pd.Series([7, 7, 8]),
        pa.array([7, 7, 8]),
    ):
        assert cap_records(persons, 1, draws).tolist() == [False, True, True]


@given(st.integers(0, 50), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_number_of_sites_cuts_records_evenly_by_priority(n_records, sites, random):
    priority = np.array([random.random() for _ in range(n_records)])
    parts = split_sites(n_records, sites, priority)
    assert len(parts) == sites
    assert sorted(np.concatenate(parts).tolist()) == list(range(n_records))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for earlier, later in itertools.pairwise(parts):
        assert not len(later) or priority[earlier].max() <= priority[later].min()


@given(ids.filter(bool), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_person_is_at_one_site(persons, sites, random):
    parts = split_sites(len(persons), sites, [random.random() for _ in persons], persons=persons)
    homes = [{persons[i] for i in part} for part in parts]
    assert sum(map(len, homes)) == len(set(persons))
    assert max(map(len, homes)) - min(map(len, homes)) <= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(persons)))


def test_sites_may_come_from_a_column_or_an_array_in_ascending_order():
    table = pa.table({"hospital": [10, 2, 10, 1], "pid": ["a", "b", "a", "c"]})
    expected = [[3], [1], [0, 2]]
    assert [part.tolist() for part in split_sites(table, "hospital", persons="pid")] == expected
    assert [part.tolist() for part in split_sites(4, np.array([10, 2, 10, 1]))] == expected
    assert [part.tolist() for part in split_sites(4, ["z", "y", "z", "x"])] == expected


# ---------------------------------------------------------------------------------------- real data


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
