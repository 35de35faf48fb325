"""Values as they come from any file or frame: as texts in one spelling, and as numbers.

Each value is read by itself, so that no record's reading depends on another record.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from consilience.errors import SettingsError
from consilience.tables.problems import quietly, require

Value = str | int | float | bool


def as_doubles(table: Any) -> Any:
    """Return a table of numbers as doubles: dense, or CSR rows that store each column once.

    Every product and length is then rounded as the proofs say. What is not a table of numbers is
    returned as it is: the check that follows refuses it.
    """
    if not sparse.issparse(table):
        values = np.asarray(table)
        return values.astype(np.float64, copy=False) if values.dtype.kind in "fiub" else values
    if table.dtype.kind not in "fiub":
        return table
    given = table.tocsr()
    # A new object, for SciPy remembers what was once true of arrays that may have changed since.
    rows = sparse.csr_array(
        (given.data.astype(np.float64, copy=False), given.indices, given.indptr), shape=given.shape
    )
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    return rows


def as_array(values: ArrayLike) -> pa.Array:
    """Return a column as an Arrow array."""
    if isinstance(kind := getattr(values, "dtype", None), np.dtype) and kind.kind in "iuf":
        # No copy. NaN stays NaN, and counts as missing wherever numbers are read.
        return pa.array(np.asarray(values))
    array = (
        values
        if isinstance(values, pa.Array | pa.ChunkedArray)
        else pa.array(values, from_pandas=True)
    )
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def is_readable(kind: pa.DataType, *, as_number: bool) -> bool:
    """Tell whether values of an Arrow type can be read as numbers, or as texts."""
    types = pa.types
    if types.is_dictionary(kind):
        return is_readable(kind.value_type, as_number=as_number)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return text or number or types.is_null(kind) or (types.is_boolean(kind) and not as_number)


def as_texts(column: pa.Array, absent: Sequence[Value] = ()) -> pa.Array:
    """Spell values in one way, whatever file they came from.

    1, 1.0 and " 1" become "1", True becomes "true", and blank becomes null.
    """
    if isinstance(column, pa.DictionaryArray):
        return as_texts(column.dictionary, absent).take(column.indices)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        whole = pc.and_(pc.equal(pc.floor(column), column), pc.less(pc.abs(column), 2.0**53))
        integers = pc.cast(pc.if_else(whole, column, None), pa.int64(), safe=False)
        texts = pc.coalesce(
            pc.cast(integers, pa.large_string()), pc.cast(column, pa.large_string())
        )
    elif pa.types.is_integer(column.type):
        texts = pc.cast(column, pa.large_string())
    else:
        texts = pc.ascii_trim_whitespace(pc.cast(column, pa.large_string()))
        texts = pc.replace_substring_regex(texts, r"^([+-]?[0-9]+)\.0+$", r"\1")
        for word in ("True", "False"):
            texts = pc.if_else(pc.equal(texts, word), word.lower(), texts)
    gone = pc.is_in(texts, value_set=pa.array(["", *absent], pa.large_string()))
    return pc.if_else(gone, None, texts)


def read_numbers(column: pa.Array, absent: Sequence[Value] = ()) -> NDArray[Any]:
    """Return values as numbers, NaN where none can be read.

    Where possible this is a view of the column, in its own width: do not write to it.
    """
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if number and not column.null_count and not absent:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if not (number or pa.types.is_decimal(column.type)):
        column = pc.ascii_trim_whitespace(pc.cast(column, pa.large_string()))
        # Arrow's cast fails as a whole on one bad text, so texts that are no numbers are removed
        # first, each judged by itself.
        readable = pc.match_substring_regex(
            column, r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?inf$"
        )
        column = pc.if_else(readable, column, None)
    values = np.array(
        pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64
    )
    if absent:
        values[np.isin(values, read_numbers(pa.array(absent, pa.large_string())))] = np.nan
    return values


def find_places(
    column: pa.Array, known: Sequence[Value], absent: Sequence[Value] = ()
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the index of each value among the `known` spellings, or -1, and if it is missing.

    Distinct values are spelled once each, however many records hold them.
    """
    coded = column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
    texts, index = as_texts(coded.dictionary, absent), coded.indices
    places = pc.index_in(texts, value_set=pa.array(known, pa.large_string()))
    index = np.asarray(pc.fill_null(index.cast(pa.int64()), -1) if index.null_count else index)
    # Index -1, of a record without a value, finds what is appended.
    place = np.append(np.array(pc.fill_null(places, -1), np.int64), -1)
    return place.take(index), np.append(np.asarray(texts.is_null()), True).take(index)


def to_python(value: object) -> Any:
    """Return a number of NumPy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def as_number(value: object) -> float:
    """Return a declared number as a float, NaN if it is none; -0.0 becomes 0.0: equal digests."""
    value = to_python(value)
    return (
        float(value) + 0.0
        if isinstance(value, int | float) and not isinstance(value, bool)
        else math.nan
    )


def spell(value: Value) -> str:
    """Return the one spelling of a declared value."""
    text = quietly(lambda: as_texts(pa.array([to_python(value)]))[0].as_py())
    if not isinstance(text, str) or (isinstance(value, float) and not math.isfinite(value)):
        raise SettingsError(
            f"Cannot declare {value!r} as a class, category or missing value: it is blank, or "
            "neither text nor number. No record was read. Declare text, whole numbers or "
            "booleans."
        )
    return text


def _spell_together(values: Sequence[Value]) -> tuple[str, ...]:
    """Return the spellings of values of one kind in one go, or nothing if `spell` has to judge."""
    if len({type(value) for value in values}) != 1:  # Arrow would make them of one kind
        return ()
    texts = quietly(lambda: as_texts(pa.array(list(map(to_python, values)))).to_pylist())
    return () if texts is None or None in texts else tuple(texts)


def spell_all(values: Sequence[Value], setting: str) -> tuple[str, ...]:
    """Return the spellings of declared values, which must differ."""
    require(not isinstance(values, str), setting, values, "a list of values, not one text")
    texts = _spell_together(values) or tuple(spell(value) for value in values)
    require(
        len(set(texts)) == len(texts),
        setting,
        list(values),
        "free of repetition (1, 1.0 and '1' are the same)",
    )
    return texts
