"""A site sees every value that does not fit before anything is charged."""

import traceback

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience import Categorical, Numeric, Schema
from consilience.errors import SchemaMismatch
from consilience.tables.check import check_table
from consilience.tables.mapping import ColumnRule, Mapped, TableMapping

SCHEMA = Schema(
    [
        Numeric("age", 0, 120, missing_values=("-1",)),
        Numeric("weight", 20, 300, missing="middle", cuts=3),
        Categorical("sex", ("f", "m"), missing="indicator"),
        Categorical("ward", ("1", "2"), unseen="ignore"),
    ],
    "ill",
    classes=(0, 1),
    person="patient",
    max_records_per_person=2,
)
GOOD = {"age": "50", "weight": "80", "sex": "f", "ward": "1", "ill": "0", "patient": "a"}
VALUES = st.sampled_from(["50", "-1", "500", "x", "", None, "f", "w", "0", "1", "2", "1.0", "a"])


def table(*rows):
    return pa.table(
        {name: pa.array([{**GOOD, **row}[name] for row in rows], pa.string()) for name in GOOD}
    )


def test_every_value_that_does_not_fit_is_listed_with_its_row_and_what_is_allowed():
    rows = [{}, {"age": "-1"}, {"sex": "w", "age": "old"}, {"ill": "2"}, {"patient": None}]
    found = check_table(SCHEMA, table(*rows, {"age": "130"}))
    assert [tuple(each) for each in found.misfits] == [
        (2, "age", "-1", "a number from 0 to 120"),
        (3, "age", "old", "a number from 0 to 120"),
        (3, "sex", "w", "'f', 'm'"),
        (4, "ill", "2", "'0', '1'"),
        (5, "patient", None, "an id of the person"),
    ]
    assert (found.n_records, found.fits, dict(found.beyond)) == (6, False, {"age": 1})
    said = found.describe()
    assert "row 3, column 'age': “old”; allowed is a number from 0 to 120" in said
    assert "'age': 2 of 6 values do not fit" in said
    assert "'age': 1 of 6 numbers are beyond the bounds and count as the bound" in said


def test_values_that_count_as_missing_or_as_no_category_are_counted():
    """They fit, and whoever holds the table knows better than the study whether they should."""
    rows = [
        {},
        {"weight": "heavy"},
        {"weight": ""},
        {"weight": None},
        {"ward": "ICU"},
        {"ward": ""},
    ]
    found = check_table(SCHEMA, table(*rows, {"age": "x"}))
    assert found.as_dict(with_values=False)["replaced"] == {"weight": 1, "ward": 1}
    said = check_table(SCHEMA, table(*rows[:3])).describe()
    assert "'weight': 1 of 3 values are no numbers and count as missing" in said
    assert "heavy" not in said


def test_the_list_is_short_and_the_counts_are_whole():
    found = check_table(SCHEMA, table(*[{"age": "x", "sex": "y"}] * 500), most=3)
    assert [each.row for each in found.misfits] == [1, 1, 2]
    assert found.counts == {"age": 500, "sex": 500}
    assert "… and 997 more." in found.describe()
    assert check_table(SCHEMA, table({"age": "x"}), most=0).misfits == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, VALUES)), max_size=4))
def test_a_table_fits_if_and_only_if_it_can_be_encoded(rows):
    made = table(*rows)
    found = check_table(SCHEMA, made)
    if not rows:
        assert not found.fits  # nobody can train on nothing
        return
    try:
        SCHEMA.encode(made)
    except SchemaMismatch:
        assert not found.fits
    else:
        assert found.fits


def test_absent_columns_are_named_with_those_that_may_be_meant():
    renamed = table({}).rename_columns(["Age", "weight", "gender", "ward", "ill", "patient"])
    found = check_table(SCHEMA, renamed)
    assert not found.fits
    assert "column 'age' is absent; 'Age' may be meant" in found.problems[0]
    assert "column 'sex' is absent; the table has 'Age', 'weight'" in found.problems[1]
    mapped = Mapped(renamed, TableMapping({"sex": ColumnRule("sexe")}))
    assert "the mapping makes it of 'sexe', which the table lacks" in str(
        check_table(SCHEMA, mapped).problems
    )


def test_semicolons_and_columns_of_a_wrong_type_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("age;weight;sex\n1;2;f\n")
    assert "the header has semicolons" in check_table(SCHEMA, tmp_path / "a.csv").describe()
    twice = table({}).append_column("age", pa.array(["1"]))
    assert check_table(SCHEMA, twice).problems == ["column 'age' is there more than once"]
    lists = table({}).set_column(0, "age", pa.array([[1]]))
    assert "holds list where a number" in check_table(SCHEMA, lists).problems[0]


def test_a_parquet_file_is_checked_piece_by_piece(tmp_path):
    rows = [{"age": str(i)} for i in range(100)] + [{"age": "?"}]
    pq.write_table(table(*rows), tmp_path / "t.parquet", row_group_size=10)
    found = check_table(SCHEMA, tmp_path / "t.parquet")
    assert [(each.row, each.value) for each in found.misfits] == [(101, "?")]


def test_what_was_found_shows_no_record_where_it_is_printed_by_accident():
    records = table({"age": "secret-31"})
    found = check_table(SCHEMA, records)
    assert "secret-31" not in repr(found) + str(found.as_dict(with_values=False))
    assert "secret-31" in str(found.as_dict(with_values=True))
    with pytest.raises(SchemaMismatch) as refusal:
        SCHEMA.encode(records)
    assert "secret-31" not in "".join(traceback.format_exception(refusal.value))


def test_numbers_as_labels_are_judged_too():
    schema = Schema([Numeric("age", 0, 120)], "cost", label_bound=3.0)
    found = check_table(schema, {"age": [1.0, np.nan], "cost": ["1", "dear"]})
    assert found.counts == {"age": 1, "cost": 1}
    assert found.misfits[-1].allowed == "a number from -3 to 3"
