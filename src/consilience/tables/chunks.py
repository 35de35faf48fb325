"""Records read from Parquet in chunks, for tables larger than memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from consilience.errors import SettingsError
from consilience.progress import Progress, showing
from consilience.tables.schema import (
    Schema,
    mismatch,
    open_parquet,
    parquet_files,
    quietly,
    require,
)

T = TypeVar("T")


class ParquetRows:
    """Iterate over encoded Parquet records in chunks, as often as needed, without holding them all.

    What a learner's `fit` takes instead of a table that does not fit in memory; it brings its own
    labels. Files are decoded in one thread and read in another while the caller computes.

    Parameters
    ----------
    path
        Parquet file or folder of Parquet files.
    chunk_records
        Upper limit for the records of one chunk.
    keep
        Which records to use, one boolean each in file order: `cap_records` of `persons`. Needed by
        a schema that limits the records of a person.
    named
        Whether a learner is to know the labels by the schema's classes, as studies do, and not by
        their places.
    progress
        Called with the records read in this pass and the number of all. Without it a bar is shown
        where standard error is a terminal.

    Attributes
    ----------
    passes
        How often reading has begun.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema,
        chunk_records: int = 32768,
        keep: Any = None,
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
        self.path, self.schema, self.chunk_records, self.progress = (
            Path(path),
            schema,
            chunk_records,
            progress,
        )
        self.n_features, self.n_records, self.passes = schema.n_features, 0, 0
        self.names = (
            schema.classes if named else None
        )  # of which the labels of chunks are the places
        self._files: dict[Path, tuple[int, int]] = {}
        for file in parquet_files(self.path):
            with open_parquet(file) as opened:
                schema._check(opened.schema_arrow, schema.table_columns, f"File {file.name!r}")
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

    def persons(self) -> NDArray[np.str_]:
        """Return the person id of every record of the file, kept or not, for `cap_records`."""
        name = self.schema.person
        if name is None:
            raise SettingsError(
                "Person ids were asked for, but the schema declares no person column. No record "
                "was read. Declare person='<id column>' and max_records_per_person."
            )
        parts = [np.empty(0, np.str_)]
        for where, batch in self._batches([name]):
            ids, problems = self.schema._persons(batch.column(name))
            if problems:
                raise mismatch(problems, "Give every record an id.", "read", where=where)
            parts.append(ids)
        return np.concatenate(parts)

    def chunks(self) -> Iterator[tuple[NDArray[np.float64], NDArray[Any]]]:
        """Yield (X, y) in file order; the same chunks each time."""
        encode = self.schema._encode_batches
        yield from self._pass(lambda batch, where: encode([batch], self._needed, where)[:2])

    def gather(self, function: Callable[[Iterator[tuple[Any, Any]]], T], every: int = 1) -> list[T]:
        """Return what `function` makes of all (X, y), or of every `every`-th; each X is overwritten by the next.

        For who adds up: what is overwritten stays in the processor's cache.
        """
        blocks = self.schema._blocks(self._pass(self.schema._labelled, every))
        return [function(encoded[:2] for encoded in blocks)]

    @property
    def _needed(self) -> tuple[str, ...]:
        return (*(column.name for column in self.schema.columns), self.schema.label)

    def _pass(self, read: Callable[[pa.RecordBatch, str], T], every: int = 1) -> Iterator[T]:
        """Yield what `read` makes of the records to be used, or of every `every`-th, batch after batch."""
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
        """Yield records to be used, of which file they are, and how many have been come by."""
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
        """Yield which file, and some of its records."""
        for file, version in self._files.items():
            where = f"File {file.name!r}"
            if _version(file) != version:
                fix = "Leave the files alone while they are read, and begin again; a charge already made stands."
                raise mismatch(["it was changed while it was in use"], fix, "learned", where=where)
            with open_parquet(file) as opened:
                batches = opened.iter_batches(
                    self.chunk_records, columns=list(names), use_threads=False
                )
                while (batch := quietly(partial(next, batches, False))) is not False:
                    if batch is None:
                        raise mismatch(["it is damaged"], "Write it again as Parquet.", where=where)
                    yield where, batch


def _version(file: Path) -> tuple[int, int]:
    facts = quietly(file.stat)
    return (-1, -1) if facts is None else (facts.st_size, facts.st_mtime_ns)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, the next of which is made in a thread of its own meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(next, items, None)
        while (item := made.result()) is not None:
            made = pool.submit(next, items, None)
            yield item
