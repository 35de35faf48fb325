"""Every value is read by itself: nothing that stands beside it changes what becomes of it."""

import datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.errors import SchemaMismatch
from consilience.tables.groups import identify
from consilience.tables.reading import read_table
from consilience.tables.schema import Categorical, Numeric, Schema
from consilience.tables.values import as_array, as_texts, find_places, read_numbers

SCHEMA = Schema(
    [
        Numeric("number", -2, 2, missing="indicator"),
        Numeric("binned", 0, 1, cuts=(0.1, 0.3, 0.7), missing="middle"),
        Categorical(
            "category", (1.5, "0.1", 2**53, 7, True, "a"), missing="indicator", unseen="ignore"
        ),
    ],
    "label",
    classes=(0, "1.5", "a"),
    unknown_label=0,
    person="person",
    max_records_per_person=1,
)

plain = st.one_of(
    st.none(),
    st.sampled_from([1, 1.5, 0.1, 7, 7.0, 0.0, -0.0, 2**53, 2.0**53, 1e300, 1e-7, 2.5]),
    st.floats(),
    st.integers(-(2**53), 2**53),
    st.sampled_from(["a", " 7", "0.10", "1.5", "1.50", "-0.0", "", "inf", "true", "1e5"]),
)
decimals = st.sampled_from(
    ["0.1", "0.10", "0.000001", "1.5", "1.25", "0.5", "0.50000000001", "7", "-0.0", "1E+3", "NaN"]
).map(Decimal) | st.decimals(allow_nan=False, allow_infinity=False, places=12)
finite = decimals.filter(Decimal.is_finite)
odd = st.sampled_from(
    [
        *(True, np.True_, np.float32(0.1), np.float16(0.1), np.float64(0.1), np.int8(7), pd.NA),
        *(np.str_("a"), np.uint64(2**63), 2**70, -(2**70), 2.0**70, UUID(int=3), Decimal("inf")),
    ]
)
values = plain | decimals | odd


def records(value, size=6):
    """Draw a table as rows, with a person for every one."""
    ids = value.filter(lambda v: as_texts(as_array([v])).null_count == 0)
    row = st.fixed_dictionaries({name: value for name in SCHEMA.table_columns} | {"person": ids})
    return st.lists(row, min_size=1, max_size=size)


def columns(rows):
    return {name: [row[name] for row in rows] for name in SCHEMA.table_columns}


def as_objects(rows):
    return pd.DataFrame({k: pd.Series(v, dtype=object) for k, v in columns(rows).items()})


def as_files(rows, folder):
    """Each record in a file of its own, of the types that Arrow finds for that record."""
    for i, row in enumerate(rows):
        pq.write_table(pa.table({k: [v] for k, v in row.items()}), Path(folder) / f"{i}.parquet")
    return folder


def as_csv(rows, folder):
    path = Path(folder) / "table.csv"
    pd.DataFrame(columns(rows), dtype=object).to_csv(path, index=False)
    return path


def as_polars(rows):
    """Of the types that polars finds for all records together."""
    return pl.DataFrame(columns(rows), strict=False)


def bits(encoded):
    """Everything that was encoded, to the last bit."""
    X = np.ascontiguousarray(encoded.X).view(np.uint64)
    return list(zip(X.tolist(), encoded.y.tolist(), encoded.persons.tolist(), strict=True))


def check(rows, table_of):
    whole = bits(SCHEMA.encode(table_of(rows)))
    for row, together in zip(rows, whole, strict=True):
        assert bits(SCHEMA.encode(table_of([row]))) == [together]
    return whole


@settings(deadline=None, max_examples=300)
@given(records(values))
def test_objects_of_any_kind_are_read_alike_alone_and_in_company(rows):
    assert check(rows, columns) == check(rows, as_objects)
    assert check(rows, columns) == check(rows, lambda some: pa.table(columns_as_arrow(some)))


def columns_as_arrow(rows):
    return {name: as_array(column) for name, column in columns(rows).items()}


def test_the_categories_of_a_frame_are_read_one_by_one():
    known = [Decimal("1.5"), Decimal("1.25"), 2**53 + 1, 2.5, "a", np.float32(0.1)]
    column = pd.Categorical.from_codes([0, -1, 5, 4], categories=pd.Index(known, dtype=object))
    for given_values in (column, pd.Series(column), pd.CategoricalIndex(column)):
        texts = as_texts(as_array(given_values)).to_pylist()
        assert texts == ["1.5", None, "0.10000000149011612", "a"]


numbers = st.none() | st.floats() | st.integers(-(2**53), 2**53)


@settings(deadline=None)
@given(records(numbers | odd.filter(lambda v: isinstance(v, np.floating))))
def test_numbers_are_read_alike_whatever_type_a_frame_finds_for_all_of_them(rows):
    whole = check(rows, columns)
    assert check(rows, lambda some: pd.DataFrame(columns(some))) == whole
    plain_rows = [{k: v if v is None else float(v) for k, v in row.items()} for row in rows]
    assert check(plain_rows, as_polars) == whole


@settings(deadline=None, max_examples=50)
@given(records(st.floats() | st.integers(-(2**62), 2**62) | finite | st.text("a70.1", min_size=1)))
def test_files_of_one_folder_do_not_change_each_other(rows):
    with TemporaryDirectory() as folder:
        together = bits(SCHEMA.encode(as_files(rows, folder)))
        for i in range(len(rows)):
            assert bits(SCHEMA.encode(Path(folder) / f"{i}.parquet")) == [together[i]]
    assert together == bits(SCHEMA.encode(columns(rows)))


@settings(deadline=None, max_examples=50)
@given(records(st.floats(allow_nan=False) | finite | st.text("a70.1")))
def test_lines_of_a_text_file_do_not_change_each_other(rows):
    rows = [{k: str(v) for k, v in row.items()} | {"person": "p"} for row in rows]
    with TemporaryDirectory() as folder:
        check(rows, lambda some: as_csv(some, folder))


@pytest.mark.parametrize("scale", range(1, 30))
def test_a_decimal_is_the_nearest_double_whatever_the_scale_of_its_column(scale):
    given_values = [Decimal("0.1"), Decimal("0.5"), Decimal("0.3")]
    column = pa.array(given_values, pa.decimal128(38, scale))
    assert read_numbers(column).tolist() == [0.1, 0.5, 0.3]
    assert as_texts(column).to_pylist() == ["0.1", "0.5", "0.3"]


def test_a_number_has_one_spelling_in_every_type():
    for kind in (np.int8, np.uint16, np.float16, np.float32, np.float64, object):
        assert (
            as_texts(as_array(np.array([7, 0, -0.0 if kind is not object else 0], kind)))[0].as_py()
            == "7"
        )
    for value in (2**53, 2**60, 2**63, 2**70):
        assert as_texts(as_array([value])) == as_texts(as_array([float(value)]))
    third = np.float32(0.1)
    assert as_texts(as_array([third])) == as_texts(as_array([float(third)]))
    for kind in (pa.decimal32(5, 2), pa.decimal64(5, 2), pa.decimal128(5, 2), pa.decimal256(60, 2)):
        column = pa.array([Decimal("1.5"), None], kind)
        assert as_texts(column).to_pylist() == ["1.5", None]
        assert find_places(column, ("2", "1.5"))[0].tolist() == [1, -1]


def test_labels_of_every_type_are_read_or_refused_in_words():
    schema = Schema([Numeric("x", 0, 1)], "y", classes=(0, 1.5), unknown_label=0)
    for column in (
        pa.array(np.array([0, 1.5], np.float16)),
        pa.array([Decimal("0"), Decimal("1.5")], pa.decimal32(5, 2)),
        pa.array(["0", "1.5"], pa.string_view()),
        pl.Series([Decimal("0"), Decimal("1.5")]),
        [0, Decimal("1.50")],
    ):
        assert schema.encode({"x": [0, 0], "y": column}).y.tolist() == [0, 1]
    with pytest.raises(SchemaMismatch, match="does not fit the schema"):
        schema.encode({"x": [0, 0], "y": pl.Series([Decimal("0"), "a"], dtype=pl.Object)})


ids = (plain | decimals | odd).filter(lambda v: as_texts(as_array([v])).null_count == 0)


@settings(deadline=None)
@given(st.lists(ids, min_size=1, max_size=8), ids)
def test_the_id_of_one_person_does_not_merge_or_divide_others(persons, another):
    alone, beside = identify(persons), identify([*persons, another])[:-1]
    assert (np.equal.outer(alone, alone) == np.equal.outer(beside, beside)).all()
    texts = [as_texts(as_array([person]))[0].as_py() for person in persons]
    assert (np.equal.outer(alone, alone) == np.equal.outer(texts, texts)).all()


def test_moments_and_days_are_no_ids():
    moments = [datetime.datetime(2020, 1, 1, 8, minute) for minute in range(5)]
    for persons in (
        moments,
        [datetime.date(2019, 1, 1), *moments],
        np.array(moments, "M8[us]"),
        pd.Series(moments),
    ):
        with pytest.raises(SchemaMismatch, match="neither text nor number"):
            identify(persons)


def test_a_text_in_a_frame_is_read_beside_a_number():
    frame = pd.DataFrame({"number": pd.Series([1, "2", None, 1.5], dtype=object)})
    assert read_numbers(as_array(read_table(frame)["number"])).tolist()[:2] == [1.0, 2.0]
