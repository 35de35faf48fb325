"""Code books become schemas; bad ones are refused with what to write."""

import json

import pytest

from consilience.errors import SettingsError
from consilience.tables.schema import Categorical, Numeric, Schema

CSV = """\
name,kind,low,high,categories,missing,transform,cuts,missing_values,records
age,numeric,0,120,,middle,,18|40|65,,
income,numeric,1,1e6,,1000,log,6 bins,-1|?,
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


HEAD = "name,kind,low,high,categories,records\nx,numeric,0,1,,\ny,label,,,no|yes,\n"


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
        (f"{HEAD}p,person,,,,2\nq,person,,,,50\n", "b.csv", "second person"),
        (f"{HEAD}p,person,,,a|b,2\n", "b.csv", "settings of 'p'"),
        (f"{HEAD}p,person,,,,\n", "b.csv", "settings of 'p'"),
        ("name,kind,low,missing\ny,label,1,middle\n", "b.csv", "settings of 'y'"),
        ("name,kind,low,high\ny,label,1,\n", "b.csv", "settings of 'y'"),
        ("name,kind,low,categories\ny,label,1,a|b\n", "b.csv", "settings of 'y'"),
        ("name,kind,low,low,high\nx,numeric,0,5,9\n", "b.csv", "each once"),
        ("- {name: x, kind: numeric, low: 0, low: 5, high: 9}", "b.yaml", "twice"),
        ("name,kind,low,high,cuts\nx,numeric,0,100,65\n", "b.csv", "6 bins"),
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


def test_yaml_is_read_as_it_looks(tmp_path):
    """Its older rules would make False, True, 8, 90 and a day of these."""
    text = "- {name: ill, kind: label, categories: [no, yes, 010, 1:30, 2020-07-31, on]}\n"
    column = "- {name: x, kind: numeric, low: -1e-3, high: +2.5}\n"
    more = "- {name: z, kind: categorical, categories: [true, False, 7, null_, 1.50]}\n"
    book = write(tmp_path, text + column + more, "b.yaml")
    schema = Schema.from_codebook(book)
    assert schema.classes == ("no", "yes", "010", "1:30", "2020-07-31", "on")
    assert (schema.columns[0].low, schema.columns[0].high) == (-0.001, 2.5)
    assert schema.columns[1].categories == ("true", "false", "7", "null_", "1.5")


def test_a_cut_alone_is_not_a_number_of_bins(tmp_path):
    for cuts, edges in (("65|", (65.0,)), ("2 bins", (50.0,)), ("18|65", (18.0, 65.0))):
        text = f"name,kind,low,high,categories,cuts\nx,numeric,0,100,,{cuts}\ny,label,,,a|b,\n"
        assert Schema.from_codebook(write(tmp_path, text)).columns[0].edges == edges


@pytest.mark.parametrize(
    "row",
    [
        "age|years,numeric,0,120,",
        "age,numeric,0|18,120,",
        "age,numeric,0,120|65,",
        "age,numeric|skip,0,120,",
        f"age,numeric,0,1{'0' * 400},",
    ],
)
def test_a_bar_stands_in_lists_only_and_no_number_is_huge(tmp_path, row):
    """What stands behind a bar, or beyond all numbers, would be dropped in silence."""
    path = tmp_path / "book.csv"
    path.write_text(f"name,kind,low,high,categories\n{row}\nill,label,,,no|yes\n")
    with pytest.raises(SettingsError, match=r"without a bar|of many digits"):
        Schema.from_codebook(path)


@pytest.mark.parametrize(
    ("low", "says"),
    [("&a [1, 2]\n  high: *a", "by an alias"), (f"-1{'0' * 400}\n  high: 3", "of many digits")],
)
def test_yaml_has_no_aliases_and_no_huge_numbers(tmp_path, low, says):
    """A few hundred characters of aliases stand for gigabytes."""
    path = tmp_path / "book.yaml"
    path.write_text(f"- name: age\n  kind: numeric\n  low: {low}\n")
    with pytest.raises(SettingsError, match=says) as refused:
        Schema.from_codebook(path)
    assert len(str(refused.value)) < 1000
