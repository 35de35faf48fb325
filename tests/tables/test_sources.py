"""Workbooks and databases are tables like others; credentials and records stay where they are."""

import datetime
import re
import sqlite3
import traceback
import zipfile

import openpyxl
import pytest

from consilience import Categorical, Numeric, Schema, read_table
from consilience.errors import ConsilienceError, SettingsError
from consilience.tables import sources
from consilience.tables.check import check_table
from consilience.tables.mapping import ColumnRule, Mapped, TableMapping
from consilience.tables.sources import open_table

SCHEMA = Schema([Numeric("age", 0, 120), Categorical("sex", ("f", "m"))], "ill", classes=(0, 1))
ROWS = [("age", "sex", "ill", "born"), *[(i % 90, "fm"[i % 2], i % 2, None) for i in range(25)]]


@pytest.fixture
def book(tmp_path):
    made = openpyxl.Workbook()
    for row in ROWS:
        made.active.append(row)
    made.active.append((None, None))
    made.active.append((7.5, "m", True, datetime.date(2020, 1, 1)))
    made.save(tmp_path / "ward.xlsx")
    return tmp_path / "ward.xlsx"


@pytest.fixture
def database(tmp_path):
    with sqlite3.connect(tmp_path / "ward.db") as db:
        db.execute("create table ward (age real, sex text, ill integer, born text)")
        db.executemany("insert into ward values (?, ?, ?, ?)", ROWS[1:])
    db.close()

    def describe(query="select * from ward order by rowid", more=""):
        file = tmp_path / "ward.toml"
        url = "" if "url_env" in more else f'url = "sqlite:///{tmp_path}/ward.db"\n'
        file.write_text(f'[sql]\n{url}query = "{query}"\n{more}')
        return file

    return describe


def test_a_workbook_is_a_table(book):
    table = open_table(book)
    assert table.list_columns() == ["age", "sex", "ill", "born"]
    found = check_table(SCHEMA, table)  # "true" is no class, and nobody reads the dates
    assert (found.n_records, dict(found.counts)) == (26, {"ill": 1})
    rows = read_table(table, SCHEMA)
    assert rows["age"].to_pylist()[-2:] == ["24", "7.5"]
    assert SCHEMA.encode_features(table).shape == (26, 3)


def test_what_a_workbook_states_of_its_size_leaves_out_no_record(book, tmp_path):
    with zipfile.ZipFile(book) as old, zipfile.ZipFile(tmp_path / "stale.xlsx", "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(
                name, re.sub(rb'<dimension ref="[^"]*"', b'<dimension ref="A1:B9"', content)
            )
    for table in (open_table(book), open_table(tmp_path / "stale.xlsx")):
        assert table.list_columns() == ["age", "sex", "ill", "born"]
        assert len(read_table(table, SCHEMA)) == 26


def test_a_sheet_of_several_is_named(book, tmp_path):
    made = openpyxl.load_workbook(book)
    made.create_sheet("notes")
    made.save(book)
    with pytest.raises(SettingsError, match=r"2 sheets.*Sheet, notes"):
        open_table(book).list_columns()
    (tmp_path / "t.toml").write_text('[excel]\nfile = "ward.xlsx"\nsheet = "Sheet"\n')
    assert open_table(tmp_path / "t.toml").list_columns()[0] == "age"


def test_a_query_is_a_table_read_in_pieces(database, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_ROWS", 7)
    table = open_table(database())
    assert [batch.num_rows for batch in table.read_batches({"age"})] == [7, 7, 7, 4]
    assert check_table(SCHEMA, table).fits
    assert SCHEMA.encode(table).X.shape == (25, 3)
    mapped = Mapped(table, TableMapping({"age": ColumnRule("age", factor=2.0)}))
    assert read_table(mapped, SCHEMA)["age"].to_pylist()[24] == "48"


def test_an_empty_answer_has_columns_and_no_record(database):
    empty = open_table(database("select * from ward where age > 900"))
    assert not check_table(SCHEMA, empty).fits
    assert read_table(empty, SCHEMA).num_rows == 0


def test_a_query_changes_nothing(database):
    with pytest.raises(SettingsError, match="returns no rows"):
        list(open_table(database("delete from ward")).read_batches())
    assert check_table(SCHEMA, open_table(database())).n_records == 25


def test_credentials_come_from_the_environment_and_are_shown_nowhere(database, monkeypatch):
    with pytest.raises(SettingsError, match=r"WARD_URL, which 'ward.toml' names, is not set"):
        open_table(database(more='url_env = "WARD_URL"'))
    monkeypatch.setenv("WARD_URL", "sqlite:////nowhere/SECRET/x.db?password=SECRET")
    table = open_table(database(more='url_env = "WARD_URL"'))
    with pytest.raises(SettingsError, match="did not answer") as refusal:
        table.list_columns()
    shown = "".join(traceback.format_exception(refusal.value)) + repr(table)
    assert "SECRET" not in shown
    file = database()
    file.write_text('[sql]\nurl = "postgresql://a:SECRET@b/c"\nquery = "select 1"\n')
    with pytest.raises(SettingsError, match="holds a password") as refusal:
        open_table(file)
    assert "SECRET" not in str(refusal.value)


def test_what_a_database_says_is_not_repeated_because_it_may_quote_a_record(database):
    table = open_table(database("select json_extract(sex, '$') as age from ward"))
    with pytest.raises(SettingsError) as refusal:
        read_table(table)
    assert "OperationalError" in str(refusal.value)
    assert "malformed" not in "".join(traceback.format_exception(refusal.value))


@pytest.mark.parametrize(
    "text", ["", "[sql]\n", '[csv]\nfile = "a"', "[sql]\nquery = 3", '[excel]\npath = "a"', "]"]
)
def test_a_file_that_describes_no_table_is_refused(tmp_path, text):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"describes no table|needs a query"):
        open_table(tmp_path / "t.toml")


def test_damaged_and_absent_workbooks_are_refused(tmp_path):
    (tmp_path / "a.xlsx").write_text("no workbook")
    with pytest.raises(SettingsError, match="cannot be read as an Excel file"):
        open_table(tmp_path / "a.xlsx").list_columns()
    with pytest.raises(SettingsError, match="no file"):
        open_table(tmp_path / "b.xlsx").list_columns()


def test_a_study_cannot_make_a_machine_open_a_workbook_or_ask_a_database(database, book):
    for public in (database(), book):
        with pytest.raises(ConsilienceError, match="no CSV file"):
            read_table(public)
