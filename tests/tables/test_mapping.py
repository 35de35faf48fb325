"""Local names, units and codes become those of a study, value by value."""

import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience import Categorical, Numeric, ParquetRows, Schema, read_table
from consilience.errors import SettingsError
from consilience.tables import chunks
from consilience.tables.mapping import ColumnRule, Mapped, TableMapping

SCHEMA = Schema(
    [Numeric("age", 0, 120, missing="middle"), Categorical("sex", ("f", "m"))],
    "ill",
    classes=("no", "yes"),
)
FACTS = {
    "columns": {
        "age": {"from": "months", "factor": 1 / 12, "codes": {"-9": ""}},
        "sex": {"from": "Geschlecht", "codes": {"1": "f", "2": "m"}},
        "ill": {"codes": {"0": "no", "1": "yes"}},
    }
}
LOCAL = {"months": [600, -9, 18], "Geschlecht": [1, 2, 2.0], "ill": ["0", "1", "yes"], "x": [1] * 3}
WANTED = {"age": ["50", None, "1.5"], "sex": ["f", "m", "m"], "ill": ["no", "yes", "yes"]}
MAPPING = TableMapping.from_dict(FACTS, SCHEMA)


@pytest.mark.filterwarnings("error")
def test_no_warning_tells_of_a_value_that_a_factor_makes_too_large():
    rule = ColumnRule("months", factor=1e300, offset=-1e308)
    values = pa.array([0.0, 1e300, -1e308, float("inf")])
    assert [float(text) for text in rule.translate(values).to_pylist()] == [
        *(-1e308, float("inf"), -float("inf"), float("inf"))
    ]


def test_a_mapped_table_is_the_table_that_the_study_asks_for():
    made = read_table(Mapped(LOCAL, MAPPING), SCHEMA)
    assert made.to_pydict() == WANTED
    found, wanted = SCHEMA.encode(Mapped(LOCAL, MAPPING)), SCHEMA.encode(WANTED)
    assert np.array_equal(found.X, wanted.X)
    assert np.array_equal(found.y, wanted.y)


def test_a_mapped_column_is_never_read_from_a_local_one_of_the_same_name():
    local = {**LOCAL, "age": [1, 2, 3]}
    assert read_table(Mapped(local, MAPPING), SCHEMA)["age"].to_pylist() == WANTED["age"]
    del local["months"]
    assert "age" not in read_table(Mapped(local, MAPPING), SCHEMA).column_names


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["600", "-9", "x", "", None, "1e3", "0.1", "-0.0"]), min_size=1))
def test_each_value_is_translated_by_itself(values):
    rule = MAPPING.columns["age"]
    together = rule.translate(pa.array(values, pa.string())).to_pylist()
    alone = [rule.translate(pa.array([one], pa.string())).to_pylist()[0] for one in values]
    assert together == alone


def test_a_mapping_is_written_as_it_is_read_and_its_digest_covers_all_of_it():
    again = TableMapping.from_dict(tomllib.loads(MAPPING.to_toml()), SCHEMA)
    assert again == MAPPING
    assert again.digest == MAPPING.digest
    odd = TableMapping({"age": ColumnRule('a"\\\n ä😀\x7f', factor=1e-9, codes={"'": "1"})})
    assert TableMapping.from_dict(tomllib.loads(odd.to_toml()), SCHEMA) == odd
    others = {TableMapping({"age": ColumnRule("a", offset=f)}).digest for f in (0.0, 1e-300)}
    assert len(others) == 2


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"ages": {}}, "[columns.ages] is no column of the study; it has age, sex, ill"),
        ({"age": {"form": "a"}}, "no setting 'form', but from, factor, offset, codes"),
        ({"age": {"from": 3}}, "the name of a local column"),
        ({"age": {"factor": 0}}, "the factor 0"),
        ({"age": {"offset": float("inf")}}, "finite number as offset"),
        ({"age": {"factor": "x"}}, "finite number as factor"),
        ({"age": {"codes": {"old": "high"}}}, "which is no number"),
        ({"sex": {"factor": 2}}, "no column of numbers"),
        ({"sex": {"codes": {"1": "w"}}}, "makes 'w' of '1', which the study does not declare"),
        ({"sex": {"codes": {"1": "f", "1.0": "m"}}}, "two different values of '1'"),
        ({"sex": {"codes": {" ": "f"}}}, "is blank"),
        ({"sex": {"codes": {"1": ["f"]}}}, "becomes no text or number"),
        ({"sex": {"codes": "f"}}, "needs codes ="),
        ({"sex": "f"}, "is no table"),
    ],
)
def test_a_mapping_that_does_not_fit_the_study_is_refused(columns, said):
    with pytest.raises(SettingsError) as refusal:
        TableMapping.from_dict({"columns": columns}, SCHEMA)
    assert said in str(refusal.value)


def test_all_problems_of_a_mapping_are_listed_together(tmp_path):
    (tmp_path / "m.toml").write_text("[columns.a]\n[columns.sex]\nfactor = 1\n[more]\n")
    with pytest.raises(SettingsError) as refusal:
        TableMapping.load(tmp_path / "m.toml", SCHEMA)
    assert all(f"[{part}]" in str(refusal.value) for part in ("columns.a", "columns.sex", "more"))
    with pytest.raises(SettingsError, match="cannot be read"):
        TableMapping.load(tmp_path / "none.toml", SCHEMA)


def test_tables_larger_than_memory_are_mapped_chunk_by_chunk(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({**LOCAL, "Geschlecht": [1, 2, 2]}), path, row_group_size=1)
    rows = ParquetRows(Mapped(path, MAPPING), SCHEMA)
    found = np.concatenate([X for X, _ in rows.chunks()])
    assert np.array_equal(found, SCHEMA.encode(WANTED).X)
    assert chunks.in_chunks(SCHEMA, Mapped(path, MAPPING)) is None
    monkeypatch.setattr(chunks, "IN_MEMORY", 1)
    assert chunks.in_chunks(SCHEMA, Mapped(path, MAPPING)).n_records == 3
