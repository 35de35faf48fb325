"""Encoding records by a schema alone, record by record.

What becomes of a record depends on the schema and on that record, never on other records: one
changed record changes one encoded row. See docs/guarantees/preprocessing.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from consilience.privacy.mechanisms import clip_rows
from consilience.tables.problems import mismatch, quietly, refuse
from consilience.tables.reading import read_table
from consilience.tables.schema import Categorical, Encoded, Numeric, Schema
from consilience.tables.values import (
    as_array,
    as_number,
    as_texts,
    find_places,
    is_readable,
    read_numbers,
    spell,
    spell_all,
)

CHUNK_RECORDS = 65536
FEW, SEEN = 20, 1000  # records that are looked at for warnings: at least, and about at most
# Records, and numbers, that are encoded together so that they stay in the processor's cache.
BLOCK_RECORDS, BLOCK_ENTRIES = 4096, 1 << 16


class Remembered:
    """Arrays that were made here, as long as they live: no other array is taken for one."""

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[NDArray[Any]]] = {}

    def add(self, rows: NDArray[Any]) -> None:
        """Remember this very array."""
        place = id(rows)
        self._made[place] = weakref.ref(rows, lambda _: self._made.pop(place, None))

    def __contains__(self, rows: object) -> bool:
        made = self._made.get(id(rows))
        return made is not None and made() is rows


ENCODED = Remembered()  # by `Schema.encode`


class _Read(NamedTuple):
    """What the columns of some records hold."""

    numbers: NDArray[Any]  # of each numeric column, in a width that holds them all
    beyond: list[int]  # those of which some are missing or beyond a bound
    # Of each categorical column, by its first feature: which of its features is one.
    places: dict[int, NDArray[np.int64]]
    bins: dict[int, tuple[Numeric, NDArray[np.int64]]]  # of each column with cuts
    problems: list[str]


class _Room:
    """Memory to encode a block of records in."""

    def __init__(self, schema: Schema) -> None:
        # Counts one feature more: a learner appends its constant and needs blocks of the same size.
        self.records = min(
            max(BLOCK_ENTRIES // (schema.n_features + 1), BLOCK_RECORDS // 4), BLOCK_RECORDS
        )
        self.values = np.empty((schema.n_features, self.records))


class _Scales:
    """How the numeric columns of a schema become features."""

    def __init__(self, columns: Sequence[Numeric], places: Sequence[int]) -> None:
        self.columns = columns
        self.side_by_side = list(places) == list(range(len(columns)))
        self.places: slice | list[int] = slice(len(columns)) if self.side_by_side else list(places)
        self.indicators = [
            (j, place + 1) for j, place in enumerate(places) if columns[j].missing == "indicator"
        ]
        scales = [column.scale(column.low, column.high) for column in columns]
        self.middle, self.half = np.reshape(scales, (-1, 2)).T[..., None]
        self.transformed = [j for j, column in enumerate(columns) if column.transform]
        self.may_leave = any(map(self._may_leave, columns))

    @staticmethod
    def _may_leave(column: Numeric) -> bool:
        """Tell whether rounding may carry a value between the bounds out of [-1, 1]."""
        middle, half = column.scale(column.low, column.high)
        ends = [abs((bound - middle) / half) for bound in (column.low, column.high)]
        # Rounding keeps order, so that no value between the bounds goes further than they do.
        return column.transform is not None or max(ends) > 1

    def beyond(self, numbers: NDArray[Any]) -> list[int]:
        """Return the columns with a missing value or one beyond a bound, which need clipping."""
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
        """Write the features of a block; return the columns that lack a value and may not."""
        refused, absent = set(), {}
        scaled = values[self.places]  # a view if the columns lie side by side, else a copy
        np.add(numbers, 0.0, out=scaled)  # -0.0 becomes 0.0, as it does in texts
        for j in beyond:
            column, row = self.columns[j], scaled[j]
            absent[j] = missing = np.isnan(row)
            if isinstance(column.missing, float):
                row[missing] = column.missing
            elif column.missing == "error" and missing.any():
                refused.add(column.name)
            np.clip(row, column.low, column.high, out=row)
        for j in self.transformed:
            scaled[j] = self.columns[j].apply_transform(scaled[j])
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


def is_mostly_beyond(numbers: NDArray[Any], low: ArrayLike, high: ArrayLike) -> bool:
    """Tell whether more than half of some numbers lie beyond a bound; too few say nothing."""
    enough = len(numbers) >= FEW
    return enough and 2 * int(((numbers < low) | (numbers > high)).sum()) > numbers.size


ReadBatch = tuple[_Read, NDArray[Any], str]  # what columns and labels hold, and of which file


class Encoder:
    """Encodes tables by a schema; what it needs of the schema is computed once."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._classes = spell_all(schema.classes or (), "classes")
        first = np.cumsum([0, *(len(column.feature_names) for column in schema.columns)]).tolist()
        numeric = [
            (column, place)
            for column, place in zip(schema.columns, first, strict=False)
            if isinstance(column, Numeric) and not column.edges
        ]
        self._scales = _Scales([column for column, _ in numeric], [place for _, place in numeric])

    def encode_all(self, source: object) -> Iterator[Encoded]:
        """Encode labelled records block by block."""
        batches = self._batches(source, self.schema.table_columns)
        yield from self.encode_blocks(map(self.read_batch, batches))

    def read_batch(self, batch: pa.RecordBatch, where: str = "The table") -> ReadBatch:
        """Read what the columns and labels of a batch hold; errors name `where` it is from."""
        read, (y, problems) = self._read(batch), self._labels(batch.column(self.schema.label))
        refuse(read.problems + problems, where)
        return read, y, where

    def encode_blocks(self, batches: Iterable[ReadBatch]) -> Iterator[Encoded]:
        """Encode what `read_batch` read, a block at a time; each is overwritten by the next."""
        room = _Room(self.schema)
        for read, y, where in batches:
            for start in range(0, len(y), room.records):
                X, problems = self._fill(read, start, len(y), room)
                refuse(problems, where)
                yield Encoded(X, y[start : start + len(X)], None)

    def encode(self, source: object, needed: tuple[str, ...]) -> Encoded:
        """Encode the `needed` columns of anything `read_table` takes."""
        encoded = self.encode_batches(self._batches(source, needed), needed)
        ENCODED.add(encoded.X)
        return encoded

    def _batches(self, source: object, needed: tuple[str, ...]) -> list[pa.RecordBatch]:
        table = read_table(source, self.schema)
        self.check_columns(table.schema, needed)
        batches: list[pa.RecordBatch] = table.select(needed).to_batches(CHUNK_RECORDS)
        return batches

    def read(self, source: object, labels: object) -> pa.Table:
        """Read the columns of anything `read_table` takes, and labels that are none of them."""
        table, name = read_table(source, self.schema), self.schema.label
        if labels is None:
            return table
        column = quietly(partial(as_array, labels))
        if column is None or len(column) != table.num_rows:
            fix = "Pass one label for each row, as text or number."
            raise mismatch(["its labels are not one for each record, in one column"], fix)
        if name in table.column_names:
            table = table.drop_columns([name])
        return table.append_column(name, column)

    def encode_batches(
        self, batches: Sequence[pa.RecordBatch], needed: tuple[str, ...], where: str = "The table"
    ) -> Encoded:
        """Encode the `needed` columns of batches; errors name `where` they are from."""
        X = np.empty((sum(batch.num_rows for batch in batches), self.schema.n_features))
        labels: list[NDArray[Any]] = [
            np.empty(0, np.float64 if self.schema.classes is None else np.int64)
        ]
        persons: list[NDArray[np.object_]] = [np.empty(0, np.object_)]
        problems: list[str] = []
        room = _Room(self.schema)
        stop = 0
        for batch in batches:
            read = self._read(batch)
            problems += read.problems
            for first in range(0, batch.num_rows, room.records):
                block, wrong = self._fill(read, first, batch.num_rows, room)
                start, stop = stop, stop + len(block)
                X[start:stop] = block
                problems += wrong
            if self.schema.label in needed:
                y, wrong = self._labels(batch.column(self.schema.label))
                labels.append(y)
                problems += wrong
            if self.schema.person in needed:
                ids, wrong = self.read_persons(batch.column(self.schema.person))
                persons.append(ids)
                problems += wrong
        refuse(problems, where)
        return Encoded(
            X,
            np.concatenate(labels),
            np.concatenate(persons) if self.schema.person in needed else None,
        )

    def _read(self, batch: pa.RecordBatch) -> _Read:
        """Read what the columns hold: numbers, and places among categories."""
        problems: list[str] = []
        numbers: list[NDArray[Any]] = []
        places: dict[int, NDArray[np.int64]] = {}
        bins: dict[int, tuple[Numeric, NDArray[np.int64]]] = {}
        stop = 0
        for column in self.schema.columns:
            start, stop = stop, stop + len(column.feature_names)
            values = batch.column(column.name)
            if isinstance(column, Categorical):
                features = quietly(partial(column.find_features, values))
                unreadable = features is None
                if features is not None:
                    places[start] = features[0]
                    problems += features[1]
            else:
                read = quietly(partial(read_numbers, values, column.missing_values))
                unreadable = read is None
                found = np.zeros(batch.num_rows) if read is None else read
                if column.edges:
                    codes, wrong = column.find_bins(found)
                    bins[start] = column, codes
                    problems += wrong
                else:
                    numbers.append(found)
            if unreadable:
                problems.append(f"column {column.name!r} cannot be read as {column.expects}")
        stacked = np.stack(numbers) if numbers else np.empty((0, batch.num_rows))
        return _Read(stacked, self._scales.beyond(stacked), places, bins, problems)

    def _fill(
        self, read: _Read, start: int, stop: int, room: _Room
    ) -> tuple[NDArray[np.float64], list[str]]:
        """Return the features of a block of records, clipped into the ball, and problems with it.

        The block is in `room` and lies there feature by feature, so that every step runs along many
        records: otherwise encoding a table larger than memory would take longer than reading it.
        """
        part = slice(start, min(start + room.records, stop))
        values = room.values[:, : part.stop - start]
        if read.places:
            values[:] = 0.0
        for first, places in read.places.items():
            (known,) = np.nonzero(places[part] >= 0)
            values[first + places[part][known], known] = 1.0
        for first, (column, bins) in read.bins.items():
            features = column.bin_features
            values[first : first + features.shape[1]] = features[bins[part]].T
        absent = self._scales.fill(read.numbers[:, part], read.beyond, values)
        if self.schema.scale == "columns":
            values *= 1 / math.sqrt(len(self.schema.columns))
        X = clip_rows(values.T, self.schema.norm)
        return X, [
            column.describe_missing() for column in self._scales.columns if column.name in absent
        ]

    def find_misfits(self, table: pa.Table) -> list[str]:
        """Return the numbers of which more than half of some are beyond their declared bounds."""
        numeric = [column for column in self.schema.columns if isinstance(column, Numeric)]
        bounds = {c.name: (c.low, c.high, c.missing_values) for c in numeric}
        if self.schema.classes is None:
            bound = as_number(self.schema.label_bound)
            bounds[self.schema.label] = (-bound, bound, ())
        # Ten pieces, for a table may be sorted.
        starts = range(0, table.num_rows, max(SEEN // 10, table.num_rows // 10 + 1))
        pieces = [part for at in starts for part in table.slice(at, SEEN // 10).to_batches()]
        misfits = []
        for name, (low, high, missing) in bounds.items():
            parts = [read_numbers(piece.column(name), missing) for piece in pieces]
            if parts and is_mostly_beyond(np.concatenate(parts), low, high):
                misfits.append(name)
        return misfits

    def read_persons(self, column: pa.Array) -> tuple[NDArray[np.object_], list[str]]:
        """Return the person ids of a column, and problems with them.

        As objects: an array of NumPy's texts would drop what is not visible at their ends.
        """
        texts = quietly(partial(as_texts, column))
        ids = None if texts is None or texts.null_count else quietly(texts.to_pylist)
        problems = (
            [f"column {self.schema.person!r} has a missing or unreadable person id"]
            if ids is None
            else []
        )
        return np.array(ids or [], np.object_), problems

    def check_columns(
        self, table: pa.Schema, needed: Sequence[str], where: str = "The table"
    ) -> None:
        """Refuse a table that lacks columns or has them of a wrong type; no value is read."""
        problems = list(self.find_column_problems(table, needed).values())
        if problems:
            raise mismatch(problems, "Correct the table, or the schema for all sites.", where=where)

    def find_column_problems(self, table: pa.Schema, needed: Sequence[str]) -> dict[str, str]:
        """Return the columns that a table lacks or has of a wrong type, and a sentence of each."""
        expects = {column.name: column.expects for column in self.schema.columns}
        expects[self.schema.label] = (
            "a number" if self.schema.classes is None else "a declared class"
        )
        problems = {}
        for name in needed:
            count, expected = table.names.count(name), expects.get(name, "a person id")
            if count != 1:
                problems[name] = (
                    f"column {name!r} is {'there more than once' if count else 'absent'}"
                )
            elif not is_readable(
                kind := table.field(name).type, as_number=expected.startswith("a number")
            ):
                # What follows "<" may be field names made from records.
                outer = str(kind).partition("<")[0]
                problems[name] = f"column {name!r} holds {outer} where {expected} is expected"
        return problems

    def _labels(self, column: pa.Array) -> tuple[NDArray[Any], list[str]]:
        y = quietly(partial(self._read_labels, column))
        name = self.schema.label
        if y is None:
            return np.zeros(len(column)), [f"column {name!r} cannot be read as labels"]
        rule = self.schema.unknown_label
        unknown = np.isnan(y) if self.schema.classes is None else y < 0
        if rule is None and unknown.any():
            return y, [f"column {name!r} has a label that is missing or not declared"]
        if rule is not None:
            named = self.schema.classes is not None
            y[unknown] = self._classes.index(spell(rule)) if named else rule
        return y, []

    def _read_labels(self, column: pa.Array) -> NDArray[Any]:
        """Return places among the classes, -1 where there is none, or numbers within the bound."""
        if self.schema.classes is not None:
            return find_places(column, self._classes)[0]
        numbers = read_numbers(column).astype(np.float64, copy=False) + 0.0
        return np.clip(numbers, -as_number(self.schema.label_bound), self.schema.label_bound)
