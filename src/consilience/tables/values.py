"""Values as they come from any file or frame: as texts in one spelling, and as numbers.

Each value is read by itself, so that no record's reading depends on another record. No library may
therefore choose the type of a column by looking at all of its values.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse

from consilience.errors import SettingsError
from consilience.tables.problems import quietly, require

Value = str | int | float | bool
MOST_DIGITS = 400  # of a number that is written out: more than a double can have


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


def as_array(values: object) -> pa.Array:
    """Return a column as an Arrow array: of the type that it has or else, value by value, as texts.

    A type may be the container's, which is the same for all records, and never one that is found by
    looking at the values.
    """
    kind = getattr(values, "dtype", None)
    if getattr(values, "ndim", 1) != 1 or isinstance(values, str | bytes | Mapping):
        raise TypeError
    if isinstance(values, pa.Array | pa.ChunkedArray):
        array = values
    elif hasattr(values, "__arrow_c_stream__") and not hasattr(values, "iloc"):
        array = pa.chunked_array(values)
    elif kind is None or kind == np.dtype(object):
        array = read_objects(list(cast(Iterable[Any], values)))
    elif isinstance(kind, np.dtype):
        # No copy. NaN stays NaN, and counts as missing wherever numbers are read.
        array = pa.array(np.asarray(values))
    elif hasattr(kind, "categories"):
        codes = np.asarray(cast(Any, getattr(values, "cat", values)).codes)
        known = as_array(kind.categories)
        array = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), known)
    elif hasattr(getattr(values, "array", values), "__arrow_array__"):
        array = pa.array(values, from_pandas=True)
    else:
        array = as_array(np.asarray(values))
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def read_objects(values: list[Any]) -> pa.Array:
    """Return objects of Python as an Arrow array in which each depends on itself alone.

    Arrow would find one type for them all, and one value of another kind, or with more decimals,
    would change how every other one is read. Values of one simple kind keep its type; others become
    texts in their one spelling, from which the same numbers are read.
    """
    kinds = set(map(type, values)) - {type(None)}
    for simple, declared in (
        ({int}, pa.int64()),
        ({float}, pa.float64()),
        ({str, float}, pa.large_string()),  # NaN is an absent text, too
    ):
        if kinds <= simple:
            array = quietly(lambda kind=declared: pa.array(values, kind, from_pandas=True))  # type: ignore[misc]
            if array is not None:
                return array
    texts: list[str | None] = [None] * len(values)
    for kind in kinds:
        here = [i for i, value in enumerate(values) if type(value) is kind]
        for i, text in zip(here, _spell_kind(kind, [values[i] for i in here]), strict=True):
            texts[i] = text
    return pa.array(texts, pa.large_string())


def _spell_kind(kind: type, values: list[Any]) -> Iterable[str | None]:
    """Spell objects of one kind; absent ones are None, and what is no text or number is refused."""
    if issubclass(kind, str):
        return map(str.__str__, values)
    if issubclass(kind, bool | np.bool_):
        return ("true" if value else "false" for value in values)
    if issubclass(kind, int | np.integer):
        return (str(int(value)) for value in values)
    if issubclass(kind, float | np.floating):
        texts: list[str | None] = as_texts(pa.array(map(float, values), pa.float64())).to_pylist()
        return texts
    if issubclass(kind, Decimal):
        return map(_spell_decimal, values)
    if issubclass(kind, UUID):
        return map(str, values)
    if all(pa.array([value], from_pandas=True).null_count for value in values):
        return [None] * len(values)
    raise TypeError


def _spell_decimal(value: Decimal) -> str | None:
    """Return a decimal without the zeros behind its last digit, however many its column has."""
    if not value.is_finite():
        return None if value.is_nan() else str(float(value))
    # One that doubles cannot hold is not written out: it may have millions of digits.
    text = format(value, "f") if abs(value.adjusted()) < MOST_DIGITS else str(value)
    return text.rstrip("0").rstrip(".") if "." in text and "E" not in text else text


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

    1, 1.0 and " 1" become "1", True becomes "true", and blank becomes null. A number's text depends
    on its value, not on the type that its column has: that type may depend on other records.
    """
    if isinstance(column, pa.DictionaryArray):
        return as_texts(column.dictionary, absent).take(column.indices)
    if pa.types.is_floating(column.type):
        texts = _spell_floats(pc.cast(column, pa.float64()))
    elif pa.types.is_integer(column.type):
        texts = pc.cast(column, pa.large_string())
    elif pa.types.is_decimal(column.type):
        texts = read_objects(column.to_pylist())
    else:
        texts = pc.ascii_trim_whitespace(pc.cast(column, pa.large_string()))
        texts = pc.replace_substring_regex(texts, r"^([+-]?[0-9]+)\.0+$", r"\1")
        for word, spelled in (("True", "true"), ("False", "false"), ("-0", "0")):
            texts = pc.if_else(pc.equal(texts, word), spelled, texts)
    gone = pc.is_in(texts, value_set=pa.array(["", *absent], pa.large_string()))
    return pc.if_else(gone, None, texts)


def _spell_floats(column: pa.Array) -> pa.Array:
    column = pc.if_else(pc.is_nan(column), None, column)
    size = pc.abs(column)
    whole = pc.and_(pc.equal(pc.floor(column), column), pc.less(size, 2.0**63))
    integers = pc.cast(pc.if_else(whole, column, None), pa.int64(), safe=False)
    texts = pc.coalesce(pc.cast(integers, pa.large_string()), pc.cast(column, pa.large_string()))
    large = pc.fill_null(pc.and_(pc.greater_equal(size, 2.0**63), pc.is_finite(column)), False)
    digits = [str(int(value)) for value in column.filter(large).to_pylist()]
    return pc.replace_with_mask(texts, large, pa.array(digits, pa.large_string()))


def read_numbers(column: pa.Array, absent: Sequence[Value] = ()) -> NDArray[Any]:
    """Return values as numbers, NaN where none can be read.

    Where possible this is a view of the column, in its own width: do not write to it.
    """
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if number and not column.null_count and not absent:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if pa.types.is_decimal(column.type):
        # Arrow's cast of a decimal rounds by its scale, which another record may have set.
        column = pc.cast(column, pa.large_string())
    elif not number:
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
    if pa.types.is_decimal(column.type):  # of 32 or 64 bits: Arrow cannot encode them
        column = pc.cast(column, pa.decimal256(76, column.type.scale))
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
    return spell_all([value], "a value")[0]


def spell_all(values: Sequence[Value], setting: str) -> tuple[str, ...]:
    """Return the spellings of declared values, which must differ."""
    require(not isinstance(values, str), setting, values, "a list of values, not one text")
    texts = quietly(lambda: as_texts(read_objects(list(values))).to_pylist()) or [None] * len(
        values
    )
    for text, value in zip(texts, values, strict=True):
        if text is None or (isinstance(value, float) and not math.isfinite(value)):
            raise SettingsError(
                f"Cannot declare {value!r} as a class, category or missing value: it is blank, or "
                "neither text nor number. No record was read. Declare text, whole numbers or "
                "booleans."
            )
    require(
        len(set(texts)) == len(texts),
        setting,
        list(values),
        "free of repetition (1, 1.0 and '1' are the same)",
    )
    return tuple(texts)
