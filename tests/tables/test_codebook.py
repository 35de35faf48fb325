"""Code books become schemas; bad ones are refused with what to write."""

import json

import pytest

from consilience.errors import SettingsError
from consilience.tables.schema import Categorical, Numeric, Schema

CSV = """\
name,kind,low,high,categories,missing,transform,cuts,missing_values,records
age,numeric,0,120,,middle,,18|40|65,,
income,numeric,1,1e6,,1000,log,6,-1|?,
sex,categorical,,,f|m,indicator,,,,
note,skip,,,,,,,,
pid,person,,,,,,,,3
ill,label,,,no|yes,,,,,
"""
ENTRIES = [
    {"name": "age", "kind": "numeric", "low": 0, "high": 120, "missing": "middle"}
    | {"cuts": [18, 40, 65]},
    {"name": "income", "kind": "numeric", "low": 1, "high": 1e6, "missing": 1000}
    | {"transform": "log", "cuts": 6, "missing_values": [-1, "?"]},
    {"name": "sex", "kind": "categorical", "categories": ["f", "m"], "missing": "indicator"},
    {"name": "note", "kind": "skip"},
    {"name": "pid", "kind": "person", "records": 3},
    {"name": "ill", "kind": "label", "categories": ["no", "yes"]},
]
EXPECTED = Schema(
    [
        Numeric("age", 0, 120, missing="middle", cuts=(18, 40, 65)),
        Numeric("income", 1, 1e6, 1000, "log", (-1, "?"), cuts=6),
        Categorical("sex", ("f", "m"), missing="indicator"),
    ],
    "ill",
    classes=("no", "yes"),
    person="pid",
    max_records_per_person=3,
)


def write(folder, text, name="codebook.csv"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_table_and_a_list_declare_the_same(tmp_path):
    assert Schema.from_codebook(write(tmp_path, CSV)) == EXPECTED
    for name in ("book.yaml", "book.yml", "book.json"):
        assert Schema.from_codebook(write(tmp_path, json.dumps(ENTRIES), name)) == EXPECTED


def test_a_label_that_is_a_number_has_a_bound_and_settings_may_be_added(tmp_path):
    book = write(tmp_path, "name,kind,low,high\nage,numeric,0,120\ncost,label,-5,10\n")
    schema = Schema.from_codebook(book, norm=2.0, scale="clip")
    assert (schema.label, schema.label_bound, schema.norm) == ("cost", 10, 2)


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("", "b.csv", "'name' and 'kind'"),
        ("variable,type\nage,number\n", "b.csv", "'name' and 'kind'"),
        ("name,kind\nage,number\n", "b.csv", "kind of 'age'"),
        ("name,kind,low,high\nage,numeric,0,9\n", "b.csv", "'label'"),
        ("name,kind,low,high\nage,numeric,a,9\nill,label,0,1\n", "b.csv", "'age'"),
        ("name,kind\nage,numeric,0,9\n", "b.csv", "no longer"),
        ("name,kind,categories\na,label,1|2\nb,label,1|2\n", "b.csv", "second label"),
        ("name,kind,colour\na,categorical,red\n", "b.csv", "label"),
        ('name,kind\n"a,numeric\n', "b.csv", "'name' and 'kind'"),
        ("age: numeric", "b.yaml", "no list"),
        ("- age\n- sex", "b.yaml", "no list"),
        ("- {name: a, kind: numeric, low: 0, high: 1", "b.yaml", "no list"),
        ("!!python/object/apply:os.system ['true']", "b.yaml", "no list"),
        ("- {kind: label, categories: [1, 2]}", "b.yaml", "column"),
    ],
)
def test_a_bad_code_book_is_refused_with_what_to_write(tmp_path, text, name, says):
    with pytest.raises(SettingsError, match=says):
        Schema.from_codebook(write(tmp_path, text, name))


def test_a_code_book_that_is_absent_or_no_text_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        Schema.from_codebook(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot be read"):
        Schema.from_codebook(tmp_path / "bytes.csv")
