"""A site's records: read in chunks where they are many, capped per person, cut into sites.

Random numbers come in as arguments (`priority`); none is drawn here. What records become is `schema.py`'s.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from consilience.errors import SchemaMismatch, SettingsError
from consilience.schema import (
    Categorical,
    Encoded,
    Numeric,
    Schema,
    as_array,
    as_texts,
    mismatch,
    open_parquet,
    parquet_files,
    quietly,
    read_table,
    require,
)

__all__ = ["Categorical", "Encoded", "Numeric", "ParquetRows", "Public", "Schema"]
__all__ += ["cap_records", "read_table", "split_sites"]

T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Public:
    """Hold records that need no protection, encoded like the sites': labelled, or without `y`.

    Privacy
    -------
    None: whatever is computed from them may be published as it is. Only data that is public anyway belongs here.
    """

    X: Any
    y: Any = None

    def __post_init__(self) -> None:
        if getattr(self.X, "ndim", 2) != 2 or (self.y is not None and len(self.y) != self.X.shape[0]):
            raise SchemaMismatch(
                "Public records need a table X with one row per record and, if labelled, as many labels y. "
                "Nothing was read. Check their shapes."
            )


class ParquetRows:
    """Iterate over encoded Parquet records in chunks, as often as needed, without holding them all.

    What a learner's `fit` takes instead of a table that does not fit in memory; it brings its own labels. Files are
    decoded in one thread and read in another while the caller computes.

    Parameters
    ----------
    path
        Parquet file or folder of Parquet files.
    chunk_records
        Upper limit for the records of one chunk.
    keep
        Which records to use, one boolean each in file order: `cap_records` of `persons`. Needed by a schema that
        limits the records of a person.
    named
        Whether a learner is to know the labels by the schema's classes, as studies do, and not by their places.
    progress
        Called with the records read in this pass and the number of all. Without it a bar is shown where standard
        error is a terminal.

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
        require(isinstance(chunk_records, int) and chunk_records > 0, "chunk_records", chunk_records, "positive")
        self.path, self.schema, self.chunk_records, self.progress = Path(path), schema, chunk_records, progress
        self.n_features, self.n_records, self.passes = schema.n_features, 0, 0
        self.names = schema.classes if named else None  # of which the labels of chunks are the places
        self._files: dict[Path, tuple[int, int]] = {}
        for file in parquet_files(self.path):
            with open_parquet(file) as opened:
                schema._check(opened.schema_arrow, schema.table_columns, f"File {file.name!r}")
                self.n_records += opened.metadata.num_rows
            self._files[file] = _version(file)
        self.keep = None if keep is None else np.asarray(keep, np.bool_)
        if self.keep is not None:
            require(self.keep.shape == (self.n_records,), "keep", "this array", "one boolean for each record")
            self.n_records = int(self.keep.sum())

    def persons(self) -> NDArray[np.str_]:
        """Return the person id of every record of the file, kept or not, for `cap_records`."""
        name = self.schema.person
        if name is None:
            raise SettingsError(
                "Person ids were asked for, but the schema declares no person column. No record was read. "
                "Declare person='<id column>' and max_records_per_person."
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
                f"Chunks were asked for under max_records_per_person={self.schema.max_records_per_person}, but no "
                "record has been capped. No record was read. Pass keep=cap_records(rows.persons(), ...)."
            )
        self.passes += 1
        with showing(f"Reading {self.path.name}, pass {self.passes}", self.progress) as progress:
            for made, done in _ahead((read(batch, where), done) for batch, where, done in self._kept(every)):
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
                batches = opened.iter_batches(self.chunk_records, columns=list(names), use_threads=False)
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


@contextmanager
def showing(what: str, progress: Progress | None) -> Iterator[Progress]:
    """Yield `progress`, or without one a bar where standard error is a terminal and nothing elsewhere."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def cap_records(persons: ArrayLike, limit: int, priority: ArrayLike) -> NDArray[np.bool_]:
    """Mark the records to keep: at most `limit` of each person, uniformly at random, independently for each person.

    Parameters
    ----------
    priority
        One independent uniform draw for each record; the lowest of each person are kept.
    """
    require(isinstance(limit, int) and limit > 0, "limit", limit, "a positive whole number")
    ids = _ids(persons)
    order = np.lexsort((_priorities(priority, len(ids)), ids))
    _, first, size = np.unique(ids[order], return_index=True, return_counts=True)
    keep = np.empty(len(ids), np.bool_)
    keep[order] = np.arange(len(ids)) - np.repeat(first, size) < limit
    return keep


def split_sites(
    records: Any, sites: int | str | ArrayLike, priority: ArrayLike | None = None, *, persons: Any = None
) -> list[NDArray[np.intp]]:
    """Cut records into sites; return the indices of each site's records, ascending.

    Parameters
    ----------
    records
        The Arrow table, or the number of records.
    sites
        A number of sites of (nearly) equal size in records, or in persons if `persons` is given; or the site of each
        record, as an array or as a column of the table: one site for each distinct value, in ascending order.
    priority
        One independent uniform draw for each record; needed when `sites` is a number.
    persons
        Person of each record, array or column name. All records of a person go to the same site; a site column that
        says otherwise is an error.
    """
    n_records = getattr(records, "num_rows", records)
    sites, persons = (records[given] if isinstance(given, str) else given for given in (sites, persons))
    person = np.arange(n_records) if persons is None else _ids(persons)
    if isinstance(sites, int | np.integer):
        require(
            int(sites) > 0 and not isinstance(sites, bool), "sites", sites, "a positive number, or one id per record"
        )
        # The draw of a person's first record, not the lowest of all: that would favour persons with many records.
        _, first, member = np.unique(person, return_index=True, return_inverse=True)
        order = np.argsort(_priorities(priority, n_records)[first], kind="stable")
        site_of = np.empty(len(first), np.intp)
        for site, part in enumerate(np.array_split(order, sites)):
            site_of[part] = site
        return [np.flatnonzero(site_of[member] == site) for site in range(sites)]
    ids = _ids(sites)
    require(ids.shape == person.shape == (n_records,), "sites and persons", "these arrays", "one id for each record")
    if persons is not None and np.unique(np.stack([person, ids]), axis=1).shape[1] > np.unique(person).size:
        fix = "Give each person one site, or split without persons."
        raise mismatch(["a person has records at several sites"], fix, "split")
    return [np.flatnonzero(ids == site) for site in np.unique(ids)]


def _ids(values: Any) -> NDArray[np.intp]:
    """Return the rank of each id among the distinct ones."""
    ranks = quietly(partial(_ranks, values))
    if ranks is None:
        raise mismatch(["a person or site id is missing or of mixed kind"], "Give every record an id.", "selected")
    return ranks


def _ranks(values: Any) -> NDArray[np.intp] | None:
    array = as_array(values)
    texts = as_texts(array)
    ids = (array if pa.types.is_integer(array.type) else texts).dictionary_encode()
    order: NDArray[np.intp] = np.unique(ids.dictionary.to_numpy(zero_copy_only=False), return_inverse=True)[1]
    return None if texts.null_count else order[ids.indices.to_numpy()]


def _priorities(priority: ArrayLike | None, n_records: int) -> NDArray[np.float64]:
    draws = np.asarray(() if priority is None else priority, np.float64)
    usable = draws.shape == (n_records,) and not np.isnan(draws).any()
    require(usable, "priority", None if priority is None else "this array", "one uniform draw for each record")
    return draws
