"""Reading tables from files, frames and arrays, as Arrow tables."""

import csv
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from consilience.errors import SettingsError
from consilience.tables.problems import mismatch, quietly
from consilience.tables.values import as_array, as_texts, is_readable

if TYPE_CHECKING:
    from consilience.tables.schema import Schema


MOST_FOOTER = 8 << 20  # bytes of a Parquet file's list of row groups
FIRST_BYTES = 256 << 10  # of a file of which only the first records are read
BATCH_RECORDS = 32768  # that are read together


class RowSource(ABC):
    """A table that is read batch by batch; `read_table` and learners take one like any table."""

    @abstractmethod
    def list_columns(self) -> list[str]:
        """Return the names of the columns; no record is read where that can be avoided."""

    @abstractmethod
    def read_batches(self, names: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the records, of all columns or of those of these names that there are."""


class PlainTable(RowSource):
    """A path, frame, Arrow table or dict, as `read_table` takes them."""

    def __init__(self, table: object) -> None:
        self.table = table

    def list_columns(self) -> list[str]:
        """Return the names of the columns; of a file, its first lines or its footer are read."""
        if not isinstance(self.table, str | os.PathLike):
            return list(_read_object(self.table, None).column_names)
        path = Path(self.table)
        if _is_csv(path):
            return _read_header(path) or []
        with open_parquet(parquet_files(path)[0]) as opened:
            return list(opened.schema_arrow.names)

    def read_batches(self, names: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the records; a Parquet file is never in memory as a whole."""
        if not isinstance(self.table, str | os.PathLike):
            yield from _read_object(self.table, names).to_batches(BATCH_RECORDS)
        elif _is_csv(Path(self.table)):
            yield from _read_file(Path(self.table), names).to_batches(BATCH_RECORDS)
        else:
            for file in parquet_files(Path(self.table)):
                yield from parquet_batches(file, names, BATCH_RECORDS)


def read_table(source: object, schema: "Schema | None" = None) -> pa.Table:
    """Read records as an Arrow table; with a schema, only its columns.

    Parameters
    ----------
    source
        Path of a CSV or Parquet file or of a folder of Parquet files; a pandas or polars frame, an
        Arrow table or record batch, anything else with the Arrow C stream interface; a dict of
        arrays. CSV files must have a header, commas and UTF-8; their columns stay texts, which the
        schema reads.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [61, 47], "ill": ["yes", "no"], "note": ["a", "b"]}
    >>> cs.read_table(table, schema).column_names
    ['age', 'ill']
    """
    names = None if schema is None else frozenset(schema.table_columns)
    if isinstance(source, RowSource):
        return concatenate(source, names)
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source), names)
    return _read_object(source, names)


def _read_object(source: Any, wanted: Collection[str] | None) -> pa.Table:
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, Mapping):
        table, names = None, _chosen(source, wanted)
    elif isinstance(source, pa.Table):
        table = source
    elif hasattr(source, "__arrow_c_stream__") and getattr(source, "ndim", 2) != 1:
        frame = hasattr(source, "columns")
        names = _chosen(source.columns, wanted) if frame else []
        by_column = hasattr(source, "iloc")  # pandas, whose numbers need no copy that way
        table = None if by_column else quietly(lambda: pa.table(source[names] if frame else source))
    else:
        raise SettingsError(
            f"Cannot read records from {type(source).__name__}: it is none of path, frame, Arrow "
            "table or dict of arrays, which name their columns. No record was read. Pass one of "
            "these."
        )
    if table is None and len(set(names)) < len(names):
        raise mismatch(
            ["two of its columns have one name"], "Pass a frame in which each has its own.", "read"
        )
    if table is None:  # or a frame with a column that Arrow cannot convert: find out which
        arrays = {str(name): quietly(partial(as_array, source[name])) for name in names}
        if unknown := [
            f"column {name!r} holds values that are neither text nor number"
            for name in arrays
            if arrays[name] is None
        ]:
            fix = "Pass numbers or text, and a list of them also where there is a single one."
            raise mismatch(unknown, fix, "read")
        table = quietly(partial(pa.table, arrays))
    if table is None:
        raise mismatch(
            ["its columns differ in length"], "Give every record a value in each column.", "read"
        )
    chosen = set(_chosen(table.column_names, wanted))
    return table.select([i for i, name in enumerate(table.column_names) if name in chosen])


def _chosen(names: Iterable[Any], wanted: Collection[str] | None) -> list[Any]:
    return [name for name in names if wanted is None or str(name) in wanted]


def _is_csv(path: Path) -> bool:
    return path.is_file() and ".csv" in path.suffixes


def _read_file(path: Path, wanted: Collection[str] | None) -> pa.Table:
    if _is_csv(path):
        header = _read_header(path) or []
        if wanted and len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
            found = [f"file {path.name!r} has one column, whose name looks like several"]
            raise mismatch(found, "Write it with commas between the columns.", "read")
        table = quietly(partial(_read_csv, path, wanted))
    else:
        files = [open_parquet(file) for file in parquet_files(path)]
        parts = (file.read(columns=_chosen(file.schema_arrow.names, wanted)) for file in files)
        table = quietly(lambda: _concatenate(list(parts)))
    if table is None:
        fix = "Repair it: the same columns in every record, UTF-8 text, a header line in CSV."
        raise mismatch([f"file {path.name!r} is damaged or of another kind"], fix, "read")
    return table


def concatenate(source: RowSource, names: Collection[str] | None) -> pa.Table:
    """Return the records of a source as one table, of all columns or of those of these names."""
    parts = [pa.Table.from_batches([batch]) for batch in source.read_batches(names)]
    listed = source.list_columns() if not parts else []
    return _concatenate(parts or [pa.table({name: [] for name in _chosen(listed, names)})])


def _concatenate(parts: list[pa.Table]) -> pa.Table:
    """Return the records of several files as one table.

    A column of several types becomes texts, value by value: numbers of one file are not to be
    rounded because of the type that a column has in another.
    """
    for name in {name for part in parts for name in part.column_names}:
        kinds = {part.schema.field(name).type for part in parts if name in part.column_names}
        kinds.discard(pa.null())
        if len(kinds) > 1 and all(is_readable(kind, as_number=False) for kind in kinds):
            for i, part in enumerate(parts):
                if (place := part.schema.get_field_index(name)) >= 0:
                    parts[i] = part.set_column(place, name, as_texts(as_array(part[name])))
    return pa.concat_tables(parts, promote_options="default")


def _read_header(path: Path) -> list[str] | None:
    """Return the names in the first line of a CSV file, or None if it cannot be read."""

    def read() -> list[str]:
        with pa.input_stream(str(path)) as stream:
            return next(csv.reader(io.TextIOWrapper(stream, "utf-8-sig", newline="")))

    return quietly(read)


def _read_csv(path: Path, wanted: Collection[str] | None) -> pa.Table:
    header = _read_header(path)
    names = _chosen(header or (), wanted)
    if header is None or len(set(names)) < len(names):
        raise LookupError  # becomes the file's SchemaMismatch
    options = pcsv.ConvertOptions(
        include_columns=names, column_types=dict.fromkeys(names, pa.string())
    )
    return pcsv.read_csv(
        path, parse_options=pcsv.ParseOptions(newlines_in_values=True), convert_options=options
    )


def has_more_records(path: Path, name: str, most: int, most_bytes: int) -> bool:
    """Tell whether a file has more records than `most`, or CSV lines of more than `most_bytes`.

    What `name` ends in says how to read it. No record is held in memory: Parquet files state their
    number, and lines are counted as they are unpacked. A damaged file is refused when it is read.
    """

    def counted() -> bool:
        if ".csv" not in Path(name).suffixes:
            with path.open("rb") as file:
                file.seek(-8, os.SEEK_END)
                length, magic = file.read(4), file.read(4)
            is_long = magic == b"PAR1" and int.from_bytes(length, "little") > MOST_FOOTER
            return is_long or pq.read_metadata(path).num_rows > most
        lines, size = 0, 0
        packing = "gzip" if name.endswith(".gz") else None
        with pa.input_stream(str(path), compression=packing) as stream:
            while lines <= most + 1 and size <= most_bytes and (part := stream.read(1 << 20)):
                lines += max(part.count(end) for end in (b"\n", b"\r"))
                size += len(part)
        return lines > most + 1 or size > most_bytes  # one line is the header

    return bool(quietly(counted))


def read_first(path: Path, name: str, folder: Path) -> tuple[object, int] | None:
    """Return the first records of a file with this name as a table, and how many others it states.

    It takes little memory, whatever the file is: a few hundred KiB of a CSV file are read, and none
    if its beginning cannot be cut off safely, because a value may go on in the next line; of a
    Parquet file, whose pages can be of any size once unpacked, only the columns, without records.
    What is cut off goes into `folder`.
    """
    if ".csv" not in Path(name).suffixes:
        with open_parquet(path) as opened:
            return opened.schema_arrow.empty_table(), opened.metadata.num_rows
    packing = "gzip" if name.endswith(".gz") else None
    with pa.input_stream(str(path), compression=packing) as stream:
        start = quietly(lambda: stream.read(FIRST_BYTES)) or b""
        if len(start) == FIRST_BYTES:
            start = start[: start.rfind(b"\n") + 1] if b'"' not in start else b""
            if not start:
                return None
    cut = folder / Path(name).name.removesuffix(".gz")  # errors name it
    cut.write_bytes(start)
    return cut, 0


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


def parquet_batches(
    file: Path, names: Collection[str] | None, most: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a Parquet file, at most so many together; of all columns, or of some."""
    with open_parquet(file) as opened:
        columns = _chosen(opened.schema_arrow.names, names)
        batches = opened.iter_batches(most, columns=columns, use_threads=False)
        while (batch := quietly(partial(next, batches, False))) is not False:
            if batch is None:
                fix = "Write it again as Parquet."
                raise mismatch(["it is damaged"], fix, where=f"File {file.name!r}")
            yield batch
