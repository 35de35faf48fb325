"""What is publicly agreed about a table, and how tables become arrays by that alone.

A `Schema` is agreed before anyone looks at records. Encoding is record-wise: what becomes of one
record depends on the schema and on that record, never on the others, so one changed record changes
one encoded row. See docs/guarantees/preprocessing.md.
"""

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from consilience.errors import SchemaMismatch, SettingsError
from consilience.privacy.mechanisms import clip_rows

Value = str | int | float | bool
T = TypeVar("T")
CHUNK_RECORDS = 65536
BLOCK_RECORDS, BLOCK_ENTRIES = (
    4096,
    1 << 16,
)  # that are encoded while they stay in the processor's cache


@dataclass(frozen=True)
class Numeric:
    """Declare a column of numbers, scaled from its public bounds to [-1, 1]; values beyond them count as the bound.

    Parameters
    ----------
    low, high
        Public bounds in the column's own unit, from domain knowledge.
    missing
        What an absent or unreadable number becomes: an error, the ``"middle"`` of the scale, the
        middle with a second feature that marks it (``"indicator"``), or a number between the
        bounds.
    transform
        ``"log1p"`` applies sign(v)·log(1+|v|) to values and bounds, for heavy tails.
    missing_values
        Further spellings of "absent", such as ``(-1, "?")``.
    """

    name: str
    low: float = math.nan
    high: float = math.nan
    missing: Literal["error", "middle", "indicator"] | float = "error"
    transform: Literal["log1p"] | None = None
    missing_values: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        low, high = _number(self.low), _number(self.high)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise SettingsError(
                f"Column {self.name!r} is numeric with low={self.low!r}, high={self.high!r}; both "
                f"must be finite numbers. No record was read. Write Numeric({self.name!r}, "
                "low=..., high=...) from domain knowledge; reading the bounds off the data would "
                "leak its extreme records."
            )
        of = f"of {self.name!r}"
        require(
            self.transform in {None, "log1p"}, f"transform {of}", self.transform, "None or 'log1p'"
        )
        apart = low < high and self._scale(low, high)[1] > 0
        require(apart, f"high {of}", high, f"above low={low:g} by more than rounding")
        if self.missing not in {"error", "middle", "indicator"}:
            number, wish = (
                _number(self.missing),
                f"'error', 'middle', 'indicator' or a number in [{low:g}, {high:g}]",
            )
            require(low <= number <= high, f"missing {of}", self.missing, wish)
            object.__setattr__(self, "missing", number)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        object.__setattr__(
            self, "missing_values", _spellings(self.missing_values, f"missing_values {of}")
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features."""
        return (
            (self.name, f"{self.name} is missing") if self.missing == "indicator" else (self.name,)
        )

    def _transformed(self, values: Any) -> Any:
        return np.sign(values) * np.log1p(np.abs(values)) if self.transform else values

    def _scale(self, low: float, high: float) -> tuple[float, float]:
        low, high = (
            self._transformed(low) / 2,
            self._transformed(high) / 2,
        )  # halved first: high - low may overflow
        return low + high, high - low

    @property
    def _expects(self) -> str:
        return f"a number in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class Categorical:
    """Declare a column of categories, one-hot in declared order; values are compared as text, so 1, 1.0, "1" agree.

    Parameters
    ----------
    categories
        The public list of categories.
    missing
        What an absent value becomes: an error, all zeros (``"ignore"``), or a feature of its own
        (``"indicator"``).
    unseen
        What a value that is not declared becomes: an error or all zeros (``"ignore"``).
    missing_values
        Further spellings of "absent", such as ``("?",)``.
    """

    name: str
    categories: tuple[Value, ...] = ()
    missing: Literal["error", "ignore", "indicator"] = "error"
    unseen: Literal["error", "ignore"] = "error"
    missing_values: tuple[Value, ...] = ()
    _expects: ClassVar[str] = "a declared category"

    def __post_init__(self) -> None:
        of = f"of {self.name!r}"
        categories = _spellings(self.categories, f"categories {of}")
        if not categories:
            raise SettingsError(
                f"Column {self.name!r} is categorical with no categories; one-hot needs them. No "
                f"record was read. Write Categorical({self.name!r}, categories=(...)) from the "
                "code book; reading them off the data would leak who is in it."
            )
        rules = {"error", "ignore", "indicator"}
        require(
            self.missing in rules, f"missing {of}", self.missing, "'error', 'ignore' or 'indicator'"
        )
        require(
            self.unseen in {"error", "ignore"}, f"unseen {of}", self.unseen, "'error' or 'ignore'"
        )
        object.__setattr__(self, "categories", categories)
        object.__setattr__(
            self, "missing_values", _spellings(self.missing_values, f"missing_values {of}")
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features."""
        names = tuple(f"{self.name}={category}" for category in self.categories)
        return (*names, f"{self.name} is missing") if self.missing == "indicator" else names

    def _places(self, column: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
        """Return which feature is one for each record, -1 for none, and what stands against the column."""
        codes, missing = _places(column, self.categories, self.missing_values)
        if self.missing == "error" and missing.any():
            return codes, [
                f"column {self.name!r} ({self._expects}) has a missing value and missing='error'"
            ]
        if self.unseen == "error" and (codes[~missing] < 0).any():
            undeclared = "has a value that is not declared and unseen='error'"
            return codes, [f"column {self.name!r} ({self._expects}) {undeclared}"]
        if self.missing == "indicator":
            codes[missing] = len(self.categories)
        return codes, []


class Encoded(NamedTuple):
    """Hold encoded records: features, labels, and person ids if the schema names a person column."""

    X: NDArray[np.float64]
    y: NDArray[Any]
    persons: NDArray[np.str_] | None

    def __repr__(self) -> str:
        return "Encoded(X, y, persons)"  # a printed record is a leak


@dataclass(frozen=True)
class Schema:
    """Declare the public facts of a study's records, fixed before anyone looks at them.

    Parameters
    ----------
    columns
        The `Numeric` and `Categorical` columns to learn from.
    label
        Name of the label column: of `classes`, in declared order, or of numbers clipped to
        ±`label_bound`.
    unknown_label
        The class (or number) that a missing or undeclared label counts as. None: an error.
    person, max_records_per_person
        Name of the id column and the number of records kept of each person; both, or neither.
    norm
        Radius of the ball that every encoded record is clipped into.
    scale
        ``"columns"`` divides by the square root of the number of columns, so that every record has
        norm at most 1; ``"clip"`` leaves all to clipping.

    Examples
    --------
    >>> schema = Schema([Numeric("age", 0, 120), Categorical("sex", ("f", "m"))], "ill", classes=(0, 1))
    >>> schema.feature_names
    ('age', 'sex=f', 'sex=m')
    >>> schema.encode({"age": [60, 150], "sex": ["f", "m"], "ill": [0, 1]}).y.tolist()
    [0, 1]
    """

    columns: Sequence[Numeric | Categorical]
    label: str
    _: KW_ONLY
    classes: Sequence[Value] | None = None
    label_bound: float | None = None
    unknown_label: Value | None = None
    person: str | None = None
    max_records_per_person: int | None = None
    norm: float = 1.0
    scale: Literal["columns", "clip"] = "columns"

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        names = self.table_columns
        require(len(self.columns) > 0, "columns", [], "at least one Numeric or Categorical")
        for name in names:
            require(isinstance(name, str) and name != "", "a column name", name, "a non-empty text")
        twice = sorted({name for name in names if names.count(name) > 1})
        require(
            not twice, "columns, label and person", twice, "different columns, each declared once"
        )
        if self.classes is not None:
            require(
                self.label_bound is None,
                "label_bound",
                self.label_bound,
                "left out when classes are declared",
            )
            known = _spellings(self.classes, "classes")
            require(
                len(known) > 1,
                "classes",
                list(known),
                "at least two; a site may lack one, a study may not",
            )
            object.__setattr__(self, "classes", tuple(_plain(value) for value in self.classes))
            allowed = self.unknown_label is None or _spelling(self.unknown_label) in known
            require(
                allowed, "unknown_label", self.unknown_label, "None or one of the declared classes"
            )
        else:
            bound = _number(self.label_bound)
            wish = "positive, or declare classes=(...); reading either off the data would leak"
            require(0 < bound < math.inf, "label_bound", self.label_bound, wish)
            object.__setattr__(self, "label_bound", bound)
            if self.unknown_label is not None:
                number = _number(self.unknown_label)
                require(
                    abs(number) <= bound,
                    "unknown_label",
                    self.unknown_label,
                    f"a number within ±{bound:g}",
                )
                object.__setattr__(self, "unknown_label", number)
        limit = self.max_records_per_person
        if self.person is None:
            require(
                limit is None,
                "max_records_per_person",
                limit,
                "left out, or declared with person='<id column>'",
            )
        else:
            whole = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
            require(
                whole,
                "max_records_per_person",
                limit,
                "a positive whole number when a person column is declared",
            )
        norm = _number(self.norm)
        require(0 < norm < math.inf, "norm", self.norm, "positive and finite")
        object.__setattr__(self, "norm", norm)
        require(self.scale in {"columns", "clip"}, "scale", self.scale, "'columns' or 'clip'")

    @cached_property
    def table_columns(self) -> tuple[str, ...]:
        """Names of the table's columns that encoding reads."""
        person = () if self.person is None else (self.person,)
        return (*(column.name for column in self.columns), self.label, *person)

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def n_features(self) -> int:
        """Number of encoded features; the intercept is the learner's affair."""
        return len(self.feature_names)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values, ready for TOML or JSON; what is None is left out."""
        kinds = {kind: name for name, kind in _KINDS.items()}
        columns = [{"kind": kinds[type(column)], **_facts(column)} for column in self.columns]
        return {**_facts(self), "columns": columns}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; an unknown key is an error, never ignored."""
        columns = []
        for entry in facts.get("columns", ()):
            settings = dict(entry)
            kind = settings.pop("kind", None)
            require(
                kind in _KINDS,
                f"kind of column {settings.get('name')!r}",
                kind,
                f"one of {list(_KINDS)}",
            )
            columns.append(_declare(_KINDS[kind], settings, f"column {settings.get('name')!r}"))
        return _declare(cls, {**facts, "columns": columns}, "the schema")

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of the facts: equal digests mean equal encodings."""
        canonical = json.dumps(
            self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, source: Any) -> Encoded:
        """Encode labelled records from anything `read_table` takes.

        Privacy
        -------
        1-stable: one changed record changes one row of the result, bit for bit. Values beyond a
        bound count as the bound. Not hidden: the number of records; and that a record exists which
        an ``"error"`` policy, or an undeclared label without `unknown_label`, refuses
        (docs/guarantees/preprocessing.md).
        """
        return self._encode(source, self.table_columns)

    def encode_blocks(self, source: Any) -> Iterator[Encoded]:
        """Encode the same a few thousand records at a time, each block overwritten by the next.

        For who adds up: a block stays in the processor's cache, and memory is not asked for and
        given back again and again, which in Dask's workers costs as much as encoding.
        """
        table = read_table(source, self)
        self._check(table.schema, self.table_columns)
        batches = table.select(self.table_columns).to_batches(max_chunksize=CHUNK_RECORDS)
        yield from self._blocks(map(self._labelled, batches))

    def _labelled(
        self, batch: pa.RecordBatch, where: str = "The table"
    ) -> tuple["_Read", NDArray[Any], str]:
        """Read what the columns hold, labels too; of which table or file is named beside it."""
        read, (y, problems) = self._read(batch), self._labels(batch.column(self.label))
        _refuse(read.problems + problems, where)
        return read, y, where

    def _blocks(self, batches: Iterable[tuple["_Read", NDArray[Any], str]]) -> Iterator[Encoded]:
        room = _Room(self)
        for read, y, where in batches:
            for start in range(0, len(y), room.records):
                X, problems = self._fill(read, start, len(y), room)
                _refuse(problems, where)
                yield Encoded(X, y[start : start + len(X)], None)

    def encode_features(self, source: Any) -> NDArray[np.float64]:
        """Encode records whose label and person are absent or of no interest, for prediction or unlabelled data."""
        return self._encode(source, tuple(column.name for column in self.columns)).X

    def _encode(self, source: Any, needed: tuple[str, ...]) -> Encoded:
        table = read_table(source, self)
        self._check(table.schema, needed)
        return self._encode_batches(
            table.select(needed).to_batches(max_chunksize=CHUNK_RECORDS), needed
        )

    def _encode_batches(
        self, batches: Sequence[pa.RecordBatch], needed: tuple[str, ...], where: str = "The table"
    ) -> Encoded:
        X = np.empty((sum(batch.num_rows for batch in batches), self.n_features))
        labels: list[NDArray[Any]] = [np.empty(0, np.float64 if self.classes is None else np.int64)]
        persons: list[NDArray[np.str_]] = [np.empty(0, np.str_)]
        problems: list[str] = []
        room = _Room(self)
        stop = 0
        for batch in batches:
            read = self._read(batch)
            problems += read.problems
            for first in range(0, batch.num_rows, room.records):
                block, wrong = self._fill(read, first, batch.num_rows, room)
                start, stop = stop, stop + len(block)
                X[start:stop] = block
                problems += wrong
            if self.label in needed:
                y, wrong = self._labels(batch.column(self.label))
                labels.append(y)
                problems += wrong
            if self.person in needed:
                ids, wrong = self._persons(batch.column(self.person))
                persons.append(ids)
                problems += wrong
        _refuse(problems, where)
        return Encoded(
            X, np.concatenate(labels), np.concatenate(persons) if self.person in needed else None
        )

    def _read(self, batch: pa.RecordBatch) -> "_Read":
        """Read what the columns hold: numbers, and places among categories."""
        problems: list[str] = []
        numbers: list[NDArray[Any]] = []
        places: dict[int, NDArray[np.int64]] = {}
        found: Any
        stop = 0
        for column in self.columns:
            start, stop = stop, stop + len(column.feature_names)
            values = batch.column(column.name)
            if isinstance(column, Categorical):
                found = quietly(partial(column._places, values))
                if found is not None:
                    places[start] = found[0]
                    problems += found[1]
            else:
                found = quietly(partial(_numbers, values, column.missing_values))
                numbers.append(np.zeros(batch.num_rows) if found is None else found)
            if found is None:
                problems.append(f"column {column.name!r} cannot be read as {column._expects}")
        stacked = np.stack(numbers) if numbers else np.empty((0, batch.num_rows))
        return _Read(stacked, self._scales.beyond(stacked), places, problems)

    def _fill(
        self, read: "_Read", start: int, stop: int, room: "_Room"
    ) -> tuple[NDArray[np.float64], list[str]]:
        """Return the features of a block of records, in the ball and in `room`, and what stands against it.

        A block lies feature by feature, so that every step runs along many records. For a table
        larger than memory this, not reading it, would otherwise be most of the time.
        """
        part = slice(start, min(start + room.records, stop))
        values = room.values[:, : part.stop - start]
        if read.places:
            values[:] = 0.0
        for first, places in read.places.items():
            (known,) = np.nonzero(places[part] >= 0)
            values[first + places[part][known], known] = 1.0
        absent = self._scales.fill(read.numbers[:, part], read.beyond, values)
        if self.scale == "columns":
            values *= 1 / math.sqrt(len(self.columns))
        X = clip_rows(values.T, self.norm)
        return X, [
            f"column {column.name!r} ({column._expects}) has a missing or unreadable value and "
            "missing='error'"
            for column in self.columns
            if column.name in absent
        ]

    @cached_property
    def _spelled(self) -> tuple[str, ...]:
        return _spellings(self.classes or (), "classes")

    @cached_property
    def _scales(self) -> "_Scales":
        places = np.cumsum([0, *(len(column.feature_names) for column in self.columns)])
        chosen = [
            (c, place)
            for c, place in zip(self.columns, places, strict=False)
            if isinstance(c, Numeric)
        ]
        return _Scales([column for column, _ in chosen], [int(place) for _, place in chosen])

    def _persons(self, column: pa.Array) -> tuple[NDArray[np.str_], list[str]]:
        texts = as_texts(column)
        ids = None if texts.null_count else quietly(texts.to_pylist)
        problems = (
            [f"column {self.person!r} has a missing or unreadable person id"] if ids is None else []
        )
        return np.asarray(ids or [], np.str_), problems

    def _check(self, found: pa.Schema, needed: Sequence[str], where: str = "The table") -> None:
        """Refuse a table that lacks columns or has them of the wrong kind, by names and types alone."""
        expects = {column.name: column._expects for column in self.columns}
        expects[self.label] = "a number" if self.classes is None else "a declared class"
        problems = []
        for name in needed:
            count, expected = found.names.count(name), expects.get(name, "a person id")
            if count != 1:
                problems.append(
                    f"column {name!r} is {'there more than once' if count else 'absent'}"
                )
            elif not _readable(
                kind := found.field(name).type, as_number=expected.startswith("a number")
            ):
                outer = str(kind).partition("<")[
                    0
                ]  # what follows may be field names made from records
                problems.append(f"column {name!r} holds {outer} where {expected} is expected")
        if problems:
            raise mismatch(problems, "Mend the table, or the schema for all sites.", where=where)

    def _labels(self, column: pa.Array) -> tuple[NDArray[Any], list[str]]:
        y: NDArray[Any]
        rule: Any = self.unknown_label
        if self.classes is not None:
            known = self._spelled
            index, place, _ = _coded(column, known)
            y = place.take(index)
            unknown, rule = y < 0, None if rule is None else known.index(_spelling(rule))
        else:
            y = np.clip(
                _numbers(column).astype(np.float64, copy=False),
                -_number(self.label_bound),
                self.label_bound,
            )
            unknown = np.isnan(y)
        if rule is None and unknown.any():
            return y, [f"column {self.label!r} has a label that is missing or not declared"]
        y[unknown] = 0 if rule is None else rule
        return y, []


class _Read(NamedTuple):
    """What the columns of some records hold."""

    numbers: NDArray[Any]  # of each numeric column, in a width that holds them all
    beyond: list[int]  # those of which some are missing or beyond a bound
    places: dict[
        int, NDArray[np.int64]
    ]  # which feature of a categorical column is one, by that column's first
    problems: list[str]


class _Room:
    """Memory to encode a block of records in."""

    def __init__(self, schema: Schema) -> None:
        # One feature more than there is: a learner appends its constant, and wants blocks of the
        # same size.
        self.records = min(
            max(BLOCK_ENTRIES // (schema.n_features + 1), BLOCK_RECORDS // 4), BLOCK_RECORDS
        )
        self.values = np.empty((schema.n_features, self.records))


class _Scales:
    """How the numeric columns of a schema become features."""

    def __init__(self, columns: Sequence[Numeric], places: Sequence[int]) -> None:
        self.columns = columns
        self.side_by_side = list(places) == list(range(len(columns)))
        self.places: Any = slice(len(columns)) if self.side_by_side else list(places)
        self.indicators = [
            (j, place + 1) for j, place in enumerate(places) if columns[j].missing == "indicator"
        ]
        scales = [column._scale(column.low, column.high) for column in columns]
        self.middle, self.half = np.reshape(scales, (-1, 2)).T[..., None]
        self.transformed = [j for j, column in enumerate(columns) if column.transform]
        self.may_leave = any(map(self._may_leave, columns))

    @staticmethod
    def _may_leave(column: Numeric) -> bool:
        """Tell whether rounding may carry a value between the bounds out of [-1, 1]."""
        middle, half = column._scale(column.low, column.high)
        ends = [abs((bound - middle) / half) for bound in (column.low, column.high)]
        return (
            column.transform is not None or max(ends) > 1
        )  # rounding keeps order: the bounds speak for all between

    def beyond(self, numbers: NDArray[Any]) -> list[int]:
        """Return the columns that have a value missing or beyond a bound; no other needs to be clipped."""
        if not numbers.size:
            return []
        ends = zip(
            self.columns, numbers.min(axis=1).tolist(), numbers.max(axis=1).tolist(), strict=True
        )
        return [
            j for j, (c, least, most) in enumerate(ends) if not (c.low <= least and most <= c.high)
        ]

    def fill(
        self, numbers: NDArray[Any], beyond: Sequence[int], values: NDArray[np.float64]
    ) -> set[str]:
        """Write their features of a block of records; return who misses a value and must not."""
        refused, absent = set(), {}
        scaled = values[self.places]  # themselves if they lie side by side, else a copy
        scaled[:] = numbers
        for j in beyond:
            column, row = self.columns[j], scaled[j]
            absent[j] = missing = np.isnan(row)
            if isinstance(column.missing, float):
                row[missing] = column.missing
            elif column.missing == "error" and missing.any():
                refused.add(column.name)
            np.clip(row, column.low, column.high, out=row)
        for j in self.transformed:
            scaled[j] = self.columns[j]._transformed(scaled[j])
        if self.middle.any():
            scaled -= self.middle
        if (self.half != 1.0).any():
            scaled /= self.half
        if self.may_leave:
            np.clip(scaled, -1.0, 1.0, out=scaled)
        for j in absent:
            np.nan_to_num(scaled[j], copy=False, nan=0.0)
        if not self.side_by_side:
            values[self.places] = scaled
        for j, place in self.indicators:
            values[place] = absent.get(j, 0.0)
        return refused


_KINDS: dict[str, type[Numeric] | type[Categorical]] = {
    "numeric": Numeric,
    "categorical": Categorical,
}


def read_table(source: Any, schema: Schema | None = None) -> pa.Table:
    """Read records as an Arrow table, only the schema's columns if one is given.

    Parameters
    ----------
    source
        Path of a CSV or Parquet file or of a folder of Parquet files; a pandas or polars frame, an
        Arrow table or record batch, anything else with the Arrow C stream interface; a dict of
        arrays. CSV has a header, commas and UTF-8; its columns arrive as text and are read by the
        schema.
    """
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source), schema)
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, Mapping):
        table, names = None, _chosen(source, schema)
    elif isinstance(source, pa.Table):
        table = source
    elif hasattr(source, "__arrow_c_stream__"):
        frame = hasattr(source, "columns")
        names = _chosen(source.columns, schema) if frame else []
        by_column = hasattr(source, "iloc")  # pandas, whose numbers need no copy that way
        table = None if by_column else quietly(lambda: pa.table(source[names] if frame else source))
    else:
        raise SettingsError(
            f"Cannot read records from {type(source).__name__}: it is none of path, frame, Arrow "
            "table or dict of arrays. No record was read. Pass one of these."
        )
    if table is None:  # also a frame with a column that Arrow cannot take: find out which
        arrays = {str(name): quietly(partial(as_array, source[name])) for name in names}
        if mixed := [
            f"column {name!r} holds values of mixed or unknown kind"
            for name in arrays
            if arrays[name] is None
        ]:
            raise mismatch(mixed, "Give each column one kind of value: numbers, or text.", "read")
        table = quietly(partial(pa.table, arrays))
    if table is None:
        raise mismatch(
            ["its columns differ in length"], "Give every record a value in each column.", "read"
        )
    chosen = set(_chosen(table.column_names, schema))
    return table.select([i for i, name in enumerate(table.column_names) if name in chosen])


def _chosen(names: Iterable[Any], schema: Schema | None) -> list[Any]:
    known = frozenset(() if schema is None else schema.table_columns)
    return [name for name in names if schema is None or str(name) in known]


def _read_file(path: Path, schema: Schema | None) -> pa.Table:
    if path.is_file() and ".csv" in path.suffixes:
        table = quietly(partial(_read_csv, path, schema))
    else:
        files = [open_parquet(file) for file in parquet_files(path)]
        parts = (file.read(columns=_chosen(file.schema_arrow.names, schema)) for file in files)
        table = quietly(lambda: pa.concat_tables(parts, promote_options="permissive"))
    if table is None:
        fix = "Mend it: the same columns in every record, UTF-8 text, a header line in CSV."
        raise mismatch([f"file {path.name!r} is damaged or of another kind"], fix, "read")
    return table


def _read_csv(path: Path, schema: Schema | None) -> pa.Table:
    with pa.input_stream(str(path)) as stream:
        header = next(csv.reader(io.TextIOWrapper(stream, "utf-8-sig", newline="")))
    names = _chosen(header, schema)
    if len(set(names)) < len(names):
        raise LookupError  # becomes the file's SchemaMismatch
    options = pcsv.ConvertOptions(
        include_columns=names, column_types=dict.fromkeys(names, pa.string())
    )
    return pcsv.read_csv(
        path, parse_options=pcsv.ParseOptions(newlines_in_values=True), convert_options=options
    )


def parquet_files(path: Path) -> list[Path]:
    """Return the file, or the files of a folder and those below it, in order of their names."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path] * path.is_file()
    if not files or not (path.is_dir() or path.suffix in {".parquet", ".pq"}):
        raise SettingsError(
            f"Cannot read records from {str(path)!r}: it is no CSV file, Parquet file or folder "
            "with Parquet files. No record was read. Check the path; names end in .csv, .csv.gz, "
            ".parquet or .pq."
        )
    return files


def open_parquet(file: Path) -> pq.ParquetFile:
    """Open a file to read it batch by batch, or refuse it."""
    # Small buffers: with Arrow's defaults, or its dataset scanner, a file written as one row group
    # is all in memory.
    opened = quietly(lambda: pq.ParquetFile(file, pre_buffer=False, buffer_size=65536))
    if opened is None:
        raise mismatch(
            [f"{file.name!r} is damaged or no Parquet"], "Write it again as Parquet.", "read"
        )
    return opened


def as_array(values: Any) -> pa.Array:
    """Return one column as Arrow has it."""
    if isinstance(kind := getattr(values, "dtype", None), np.dtype) and kind.kind in "iuf":
        return pa.array(
            np.asarray(values)
        )  # as it lies; NaN stays NaN, and is missing wherever numbers are read
    array = (
        values
        if isinstance(values, pa.Array | pa.ChunkedArray)
        else pa.array(values, from_pandas=True)
    )
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _readable(kind: pa.DataType, *, as_number: bool) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return _readable(kind.value_type, as_number=as_number)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return text or number or types.is_null(kind) or (types.is_boolean(kind) and not as_number)


def as_texts(column: pa.Array, absent: Sequence[Value] = ()) -> pa.Array:
    """Spell every value one way whatever file it came from: 1, 1.0, " 1" are "1"; True is "true"; blank is null."""
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


def _numbers(column: pa.Array, absent: Sequence[Value] = ()) -> NDArray[Any]:
    """Return values as numbers, NaN where there is none to be read; not for writing, and of the column's own width."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if number and not column.null_count and not absent:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if not (number or pa.types.is_decimal(column.type)):
        column = pc.ascii_trim_whitespace(pc.cast(column, pa.large_string()))
        # Arrow's cast fails as a whole on one bad text: what is no number goes first, judged record
        # by record.
        readable = pc.match_substring_regex(
            column, r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?inf$"
        )
        column = pc.if_else(readable, column, None)
    values = np.array(
        pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64
    )
    if absent:
        values[np.isin(values, _numbers(pa.array(absent, pa.large_string())))] = np.nan
    return values


def _places(
    column: pa.Array, known: Sequence[Value], absent: Sequence[Value] = ()
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return each value's place among the `known` spellings, -1 for none, and whether it is missing."""
    index, place, gone = _coded(column, known, absent)
    return place.take(index), gone.take(index)


def _coded(
    column: pa.Array, known: Sequence[Value], absent: Sequence[Value] = ()
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.bool_]]:
    """Return which distinct value each record holds, their places among the `known` spellings, and which are missing.

    Distinct values are spelled once each, however many records hold them.
    """
    coded = column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
    texts = as_texts(coded.dictionary, absent)
    index = coded.indices
    index = pc.fill_null(index.cast(pa.int64()), -1) if index.null_count else index
    return (
        np.asarray(index),
        np.append(_codes(texts, known), -1),
        np.append(np.asarray(texts.is_null()), True),
    )


def _codes(texts: pa.Array, known: Sequence[Value]) -> NDArray[np.int64]:
    found = pc.index_in(texts, value_set=pa.array(known, pa.large_string()))
    return np.array(pc.fill_null(found, -1), np.int64)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _number(value: Any) -> float:
    """Return a declared number as a float, NaN if it is none; -0.0 becomes 0.0 so that digests agree."""
    value = _plain(value)
    return (
        float(value) + 0.0
        if isinstance(value, int | float) and not isinstance(value, bool)
        else math.nan
    )


def _spelling(value: Value) -> str:
    text = quietly(lambda: as_texts(pa.array([_plain(value)]))[0].as_py())
    if not isinstance(text, str):
        raise SettingsError(
            f"Cannot declare {value!r} as a class, category or missing value: it is blank, or "
            "neither text nor number. No record was read. Declare text, whole numbers or "
            "booleans."
        )
    return text


def _spellings(values: Sequence[Value], setting: str) -> tuple[str, ...]:
    require(not isinstance(values, str), setting, values, "a list of values, not one text")
    texts = tuple(_spelling(value) for value in values)
    require(
        len(set(texts)) == len(texts),
        setting,
        list(values),
        "free of repetition (1, 1.0 and '1' are the same)",
    )
    return texts


def _facts(declared: Any) -> dict[str, Any]:
    facts = {field.name: getattr(declared, field.name) for field in fields(declared)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in facts.items()
        if value is not None
    }


def _declare(kind: type[T], settings: Mapping[str, Any], where: str) -> T:
    known = {field.name: field.default is MISSING for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(settings) - set(known))
    require(not unknown, f"settings of {where}", unknown, f"among {list(known)}")
    absent = sorted(name for name, required in known.items() if required and name not in settings)
    require(not absent, f"settings of {where}", sorted(settings), f"complete; add {absent}")
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
    )


def require(holds: bool, setting: str, given: Any, wish: str) -> None:
    """Refuse a setting that does not hold."""
    if not holds:
        raise SettingsError(
            f"{setting} cannot be {given!r}: it must be {wish}. No record was read. Change it."
        )


def _refuse(problems: Sequence[str], where: str = "The table") -> None:
    if problems:
        fix = "declare what such values become: missing=, unseen=, missing_values=, unknown_label="
        fix = f"Mend the table by a rule that looks at one record at a time, or {fix}."
        raise mismatch(list(dict.fromkeys(problems)), fix, where=where)


def mismatch(
    problems: Sequence[str], fix: str, done: str = "encoded", *, where: str = "The table"
) -> SchemaMismatch:
    """Word an error. Problems name columns and settings; never a value, count or position of a record."""
    return SchemaMismatch(
        f"{where} does not fit the schema: {'; '.join(problems)}. Nothing was {done}. {fix}"
    )


def quietly(call: Callable[[], T]) -> T | None:
    """Return `call()`, or None if it failed: a library's message may quote a record, so it ends here.

    The caller raises its own error after this returns, so that the library's is not even its
    context.
    """
    try:
        return call()
    except MemoryError:
        raise
    except Exception:
        return None
