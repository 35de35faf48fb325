"""Every reader gives the same table."""

import numpy as np
import pyarrow as pa

from consilience.tables.reading import read_table
from consilience.tables.schema import Categorical, Schema
from tabular import RECORDS, SCHEMA, sources


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
