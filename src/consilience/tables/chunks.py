"""Records read from Parquet in chunks, for tables larger than memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from consilience.errors import SettingsError
from consilience.progress import Progress, showing
from consilience.tables.encoding import Encoder
from consilience.tables.mapping import Mapped, TableMapping
from consilience.tables.problems import mismatch, quietly, require
from consilience.tables.reading import open_parquet, parquet_batches, parquet_files
from consilience.tables.schema import Schema

T = TypeVar("T")
# Encoded values of a table that are held in memory: one gibibyte. A larger Parquet table is read in
# chunks.
IN_MEMORY = 1 << 27


class ParquetRows:
    """Iterate over encoded Parquet records in chunks, as often as needed, without holding them all.

    What a learner's `fit` takes instead of a table that does not fit in memory; it brings its own
    labels. Files are decoded in one thread and read in another while the caller computes.

    Parameters
    ----------
    path
        Parquet file or folder of Parquet files, or one of these as a `Mapped` table.
    chunk_records
        Upper limit for the records of one chunk.
    keep
        Which records to use, one boolean each in file order: `cap_records` of `persons`. Needed by
        a schema that limits the records of a person.
    named
        Whether learners see the schema's classes as labels, as in studies, instead of their
        indices.
    progress
        Called with the number of records read in this pass and the total. By default a bar is
        shown if standard error is a terminal.

    Attributes
    ----------
    passes
        How often reading has begun.

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow as pa
    >>> import pyarrow.parquet as pq
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> file = tempfile.mkdtemp() + "/ward.parquet"
    >>> pq.write_table(pa.table(table), file)
    >>> rows = cs.ParquetRows(file, schema, named=True)
    >>> cs.PrivateLogisticRegression(epsilon=1.0, classes=["no", "yes"]).fit(rows).guarantee_
    Guarantee(epsilon=1, delta=0, per record, replace-one)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Mapped,
        schema: Schema,
        chunk_records: int = 32768,
        keep: ArrayLike | None = None,
        *,
        named: bool = False,
        progress: Progress | None = None,
    ) -> None:
        require(
            isinstance(chunk_records, int) and chunk_records > 0,
            "chunk_records",
            chunk_records,
            "positive",
        )
        self.path, self._mapping = _take_apart(path)
        self.schema, self._encoder = schema, Encoder(schema)
        self.chunk_records, self.progress = chunk_records, progress
        self.n_features, self.n_records, self.passes = schema.n_features, 0, 0
        # The labels of chunks are indices into these.
        self.names = schema.classes if named else None
        self._files: dict[Path, tuple[int, int]] = {}
        for file in parquet_files(self.path):
            with open_parquet(file) as opened:
                columns = schema.table_columns
                mapped = self._mapping.apply(_no_records(opened.schema_arrow), columns)
                self._encoder.check_columns(mapped.schema, columns, f"File {file.name!r}")
                self.n_records += opened.metadata.num_rows
            self._files[file] = _version(file)
        self.keep = None if keep is None else np.asarray(keep, np.bool_)
        if self.keep is not None:
            require(
                self.keep.shape == (self.n_records,),
                "keep",
                "this array",
                "one boolean for each record",
            )
            self.n_records = int(self.keep.sum())

    def persons(self) -> NDArray[np.object_]:
        """Return the person id of every record of the file, kept or not, for `cap_records`."""
        name = self.schema.person
        if name is None:
            raise SettingsError(
                "Person ids were asked for, but the schema declares no person column. No record "
                "was read. Declare person='<id column>' and max_records_per_person."
            )
        parts = [np.empty(0, np.object_)]
        for where, batch in self._batches([name]):
            ids, problems = self._encoder.read_persons(batch.column(name))
            if problems:
                raise mismatch(problems, "Give every record an id.", "read", where=where)
            parts.append(ids)
        return np.concatenate(parts)

    def chunks(self) -> Iterator[tuple[NDArray[np.float64], NDArray[Any]]]:
        """Yield (X, y) in file order; the same chunks each time."""
        encode = self._encoder.encode_batches
        yield from self._pass(lambda batch, where: encode([batch], self._needed, where)[:2])

    def gather(self, function: Callable[[Iterator[tuple[Any, Any]]], T], every: int = 1) -> list[T]:
        """Return what `function` makes of all records, or of every `every`-th, as (X, y).

        For callers that sum over the chunks: each X is overwritten by the next, so that it stays in
        the processor's cache.
        """
        blocks = self._encoder.encode_blocks(self._pass(self._encoder.read_batch, every))
        return [function(encoded[:2] for encoded in blocks)]

    @property
    def _needed(self) -> tuple[str, ...]:
        return (*(column.name for column in self.schema.columns), self.schema.label)

    def _pass(self, read: Callable[[pa.RecordBatch, str], T], every: int = 1) -> Iterator[T]:
        """Yield what `read` makes of the records in use, or of every `every`-th, batch by batch."""
        if self.schema.person is not None and self.keep is None:
            raise SettingsError(
                "Chunks were asked for under "
                f"max_records_per_person={self.schema.max_records_per_person}, but no record has "
                "been capped. No record was read. Pass keep=cap_records(rows.persons(), ...)."
            )
        self.passes += 1
        with showing(f"Reading {self.path.name}, pass {self.passes}", self.progress) as progress:
            for made, done in _ahead(
                (read(batch, where), done) for batch, where, done in self._kept(every)
            ):
                yield made
                progress(done, self.n_records)

    def _kept(self, every: int) -> Iterator[tuple[pa.RecordBatch, str, int]]:
        """Yield the records in use, which file they are from, and how many were read so far."""
        stop = done = 0
        for where, batch in _ahead(self._batches(self._needed)):
            start, stop = stop, stop + batch.num_rows
            if self.keep is not None:
                batch = batch.filter(pa.array(self.keep[start:stop]))
            first, done = -done % every, done + batch.num_rows
            if every > 1:
                batch = batch.take(pa.array(np.arange(first, batch.num_rows, every)))
            if batch.num_rows:
                yield batch, where, done

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the name of a file and some of its records."""
        for file, version in self._files.items():
            where = f"File {file.name!r}"
            if _version(file) != version:
                fix = (
                    "Do not change files while they are read, and start again. A charge that was "
                    "already made stays spent."
                )
                raise mismatch(["it was changed while it was in use"], fix, "learned", where=where)
            local = {self._mapping.find_source(name) for name in names}
            for batch in parquet_batches(file, local, self.chunk_records):
                yield where, self._mapping.apply(batch, names)


def _take_apart(table: object) -> tuple[Path, TableMapping]:
    """Return the path of a table, and how it is mapped."""
    if isinstance(table, Mapped):
        return Path(cast(str, table.table)), table.mapping
    return Path(cast(str, table)), TableMapping()


def _no_records(columns: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array([], field.type) for field in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _version(file: Path) -> tuple[int, int]:
    facts = quietly(file.stat)
    return (-1, -1) if facts is None else (facts.st_size, facts.st_mtime_ns)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield `items` while a thread makes the next one."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(next, items, None)
        while (item := made.result()) is not None:
            made = pool.submit(next, items, None)
            yield item


def in_chunks(schema: Schema, table: object) -> ParquetRows | None:
    """Return a table in chunks if it is Parquet and too large for memory; otherwise None.

    A table whose schema names persons is always held in memory: the number of records of each
    person is limited there.
    """
    named = table.table if isinstance(table, Mapped) else table
    if schema.person is not None or not isinstance(named, str | os.PathLike):
        return None
    path = Path(named)
    if not (path.is_dir() or path.suffix in {".parquet", ".pq"}):
        return None
    rows = ParquetRows(table if isinstance(table, Mapped) else path, schema, named=True)
    return rows if rows.n_records * rows.n_features > IN_MEMORY else None
