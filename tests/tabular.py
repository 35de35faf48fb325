"""Schemas, records and readers that the tests of tables share."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from consilience.errors import SchemaMismatch
from consilience.tables.schema import Categorical, Numeric, Schema

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


STRICT = Schema(
    [Numeric("age", 0, 120), Categorical("sex", ("f", "m"))],
    "ill",
    classes=(0, 1),
    person="pid",
    max_records_per_person=1,
)


GOOD = {"age": [50.0, 60.0], "sex": ["f", "m"], "ill": [0, 1], "pid": ["a", "b"]}


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
