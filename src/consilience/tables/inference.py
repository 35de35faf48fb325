"""Reading bounds, categories and classes off PUBLIC records.

For a table that anyone may see, its own values can declare a schema. Never do this with records
that need protection: the largest value in a table belongs to somebody.
"""

import math
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from consilience.errors import SettingsError
from consilience.tables.reading import read_table
from consilience.tables.schema import Categorical, Numeric, Schema

DATE = r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])([T ]|$)"
FEW = 20  # texts that may differ in every row of a small table and still be categories


def read_public(
    source: object, label: str, *, drop: Iterable[str] = ()
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Encode public records by their own bounds and categories.

    Parameters
    ----------
    source
        A CSV or Parquet path, a pandas or polars frame, an Arrow table, or a dict of arrays.
    label
        The column to predict.
    drop
        Columns that are not learned from: identifiers, dates of entry, other outcomes.
    """
    table, unused = read_table(source), [drop] if isinstance(drop, str) else list(drop)
    what = f"file {str(source)!r}" if isinstance(source, str | os.PathLike) else "table"
    if label not in table.column_names or label in unused:
        raise SettingsError(
            f"The public {what} has no column {label!r} to learn. Nothing was computed. "
            f"Name one of {[name for name in table.column_names if name not in unused]}."
        )
    if unknown := [name for name in unused if name not in table.column_names]:
        raise SettingsError(
            f"The public {what} has no column {unknown[0]!r} to drop. Nothing was computed. "
            f"Name some of {table.column_names}."
        )
    names = [name for name in table.column_names if name not in (*unused, label)]
    columns = [column for name in names if (column := infer_column(name, table[name])) is not None]
    schema = Schema(columns, label, classes=distinct_texts(table[label]))
    X, y, _ = schema.encode(table)
    return X, y


def infer_column(name: str, values: pa.ChunkedArray) -> Numeric | Categorical | None:
    """Declare a public column by its values; None for a number that never changes."""
    bounds = number_bounds(values)
    if bounds is None:
        return Categorical(name, tuple(list_categories(name, values)), missing="ignore")
    low, high = bounds
    return Numeric(name, low, high, missing="middle") if low < high else None


def number_bounds(values: pa.ChunkedArray) -> tuple[float, float] | None:
    """Return the least and the largest number of a public column; None if some are no numbers."""
    try:
        ends = pc.min_max(pc.cast(_texts(values), pa.float64())).as_py()
    except pa.ArrowInvalid:
        return None
    return (0.0, 0.0) if ends["min"] is None else (ends["min"], ends["max"])


def list_categories(name: str, values: pa.ChunkedArray, most: float = math.inf) -> list[str]:
    """Return the categories of a public column of texts, or refuse one that has none.

    A column that differs in most rows names its records and says nothing about others. Dates do not
    recur either. `most` is the largest number of categories that the caller can use.
    """
    texts = _texts(values).drop_null()
    categories: list[str] = pc.unique(texts).sort().to_pylist()
    if _are_dates(texts):
        problem = "holds dates"
        instead = "or turn it into a number first, such as an age or the days since an event"
    elif FEW < len(categories) and 2 * len(categories) > len(texts):
        problem = "has a different text in most rows, as identifiers, names and free text do"
        instead = "or declare its categories in a schema"
    elif len(categories) > most:
        problem = f"has more than {most} different values, too many for a list of categories"
        instead = "or declare its categories"
    else:
        return categories
    raise SettingsError(
        f"Column {name!r} {problem}; it cannot be encoded as categories. Nothing was computed or "
        f"written. Leave it out (--drop {name}, in Python drop=[{name!r}]), {instead}."
    )


def _are_dates(texts: pa.ChunkedArray) -> bool:
    """Tell whether texts begin like 2024-05-31, all of them."""
    return bool(len(texts) and pc.all(pc.match_substring_regex(texts, DATE)).as_py())


def distinct_texts(values: pa.ChunkedArray) -> list[str]:
    """Return the different values of a public column as texts, sorted, without missing ones."""
    texts: list[str] = pc.unique(_texts(values).drop_null()).sort().to_pylist()
    return texts


def _texts(values: pa.ChunkedArray) -> pa.ChunkedArray:
    texts = pc.utf8_trim_whitespace(pc.cast(values, pa.string()))
    return pc.if_else(pc.equal(texts, ""), None, texts)
