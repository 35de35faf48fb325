"""Turn a site's table into arrays by public facts alone: the first step of the data flow.

A `Schema` is agreed before anyone looks at records. Encoding is record-wise: what becomes of one record depends on the
schema and on that record, never on the others, so one changed record changes one encoded row. Random numbers come in
as arguments (`priority`); none is drawn here. See docs/guarantees/preprocessing.md.
"""

import csv
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from consilience.errors import SchemaMismatch, SettingsError
from consilience.privacy.mechanisms import clip_rows

__all__ = ["Categorical", "Encoded", "Numeric", "ParquetRows", "Public", "Schema"]
__all__ += ["cap_records", "read_table", "split_sites"]

Value = str | int | float | bool
T = TypeVar("T")
CHUNK_RECORDS = 65536
BLOCK_RECORDS = 4096  # whose numbers are scaled while they stay in the processor's cache
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Numeric:
    """Declare a column of numbers, scaled from its public bounds to [-1, 1]; values beyond them count as the bound.

    Parameters
    ----------
    low, high
        Public bounds in the column's own unit, from domain knowledge.
    missing
        What an absent or unreadable number becomes: an error, the ``"middle"`` of the scale, the middle with a second
        feature that marks it (``"indicator"``), or a number between the bounds.
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
                f"Column {self.name!r} is numeric with low={self.low!r}, high={self.high!r}; both must be finite "
                f"numbers. No record was read. Write Numeric({self.name!r}, low=..., high=...) from domain knowledge; "
                "reading the bounds off the data would leak its extreme records."
            )
        of = f"of {self.name!r}"
        _require(self.transform in {None, "log1p"}, f"transform {of}", self.transform, "None or 'log1p'")
        apart = low < high and self._scale(low, high)[1] > 0
        _require(apart, f"high {of}", high, f"above low={low:g} by more than rounding")
        if self.missing not in {"error", "middle", "indicator"}:
            number, wish = _number(self.missing), f"'error', 'middle', 'indicator' or a number in [{low:g}, {high:g}]"
            _require(low <= number <= high, f"missing {of}", self.missing, wish)
            object.__setattr__(self, "missing", number)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        object.__setattr__(self, "missing_values", _spellings(self.missing_values, f"missing_values {of}"))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features."""
        return (self.name, f"{self.name} is missing") if self.missing == "indicator" else (self.name,)

    def _transformed(self, values: Any) -> Any:
        return np.sign(values) * np.log1p(np.abs(values)) if self.transform else values

    def _scale(self, low: float, high: float) -> tuple[float, float]:
        low, high = self._transformed(low) / 2, self._transformed(high) / 2  # halved first: high - low may overflow
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
        What an absent value becomes: an error, all zeros (``"ignore"``), or a feature of its own (``"indicator"``).
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
                f"Column {self.name!r} is categorical with no categories; one-hot needs them. No record was read. "
                f"Write Categorical({self.name!r}, categories=(...)) from the code book; reading them off the data "
                "would leak who is in it."
            )
        rules = {"error", "ignore", "indicator"}
        _require(self.missing in rules, f"missing {of}", self.missing, "'error', 'ignore' or 'indicator'")
        _require(self.unseen in {"error", "ignore"}, f"unseen {of}", self.unseen, "'error' or 'ignore'")
        object.__setattr__(self, "categories", categories)
        object.__setattr__(self, "missing_values", _spellings(self.missing_values, f"missing_values {of}"))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features."""
        names = tuple(f"{self.name}={category}" for category in self.categories)
        return (*names, f"{self.name} is missing") if self.missing == "indicator" else names

    def _fill(self, column: pa.Array, out: NDArray[np.float64]) -> list[str]:
        """Write the features of `column` into `out`; return what stands against it."""
        codes, missing = _places(column, self.categories, self.missing_values)
        if self.missing == "error" and missing.any():
            return [f"column {self.name!r} ({self._expects}) has a missing value and missing='error'"]
        if self.unseen == "error" and (codes[~missing] < 0).any():
            return [f"column {self.name!r} ({self._expects}) has a value that is not declared and unseen='error'"]
        if self.missing == "indicator":
            codes[missing] = len(self.categories)
        (known,) = np.nonzero(codes >= 0)
        out[known, codes[known]] = 1.0
        return []


class Encoded(NamedTuple):
    """Hold encoded records: features, labels, and person ids if the schema names a person column."""

    X: NDArray[np.float64]
    y: NDArray[Any]
    persons: NDArray[np.str_] | None

    def __repr__(self) -> str:
        return "Encoded(X, y, persons)"  # a printed record is a leak


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


@dataclass(frozen=True)
class Schema:
    """Declare the public facts of a study's records, fixed before anyone looks at them.

    Parameters
    ----------
    columns
        The `Numeric` and `Categorical` columns to learn from.
    label
        Name of the label column: of `classes`, in declared order, or of numbers clipped to ±`label_bound`.
    unknown_label
        The class (or number) that a missing or undeclared label counts as. None: an error.
    person, max_records_per_person
        Name of the id column and the number of records kept of each person; both, or neither.
    norm
        Radius of the ball that every encoded record is clipped into.
    scale
        ``"columns"`` divides by the square root of the number of columns, so that every record has norm at most 1;
        ``"clip"`` leaves all to clipping.

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
        _require(len(self.columns) > 0, "columns", [], "at least one Numeric or Categorical")
        for name in names:
            _require(isinstance(name, str) and name != "", "a column name", name, "a non-empty text")
        twice = sorted({name for name in names if names.count(name) > 1})
        _require(not twice, "columns, label and person", twice, "different columns, each declared once")
        if self.classes is not None:
            _require(self.label_bound is None, "label_bound", self.label_bound, "left out when classes are declared")
            known = _spellings(self.classes, "classes")
            _require(len(known) > 1, "classes", list(known), "at least two; a site may lack one, a study may not")
            object.__setattr__(self, "classes", tuple(_plain(value) for value in self.classes))
            allowed = self.unknown_label is None or _spelling(self.unknown_label) in known
            _require(allowed, "unknown_label", self.unknown_label, "None or one of the declared classes")
        else:
            bound = _number(self.label_bound)
            wish = "positive, or declare classes=(...); reading either off the data would leak"
            _require(0 < bound < math.inf, "label_bound", self.label_bound, wish)
            object.__setattr__(self, "label_bound", bound)
            if self.unknown_label is not None:
                number = _number(self.unknown_label)
                _require(abs(number) <= bound, "unknown_label", self.unknown_label, f"a number within ±{bound:g}")
                object.__setattr__(self, "unknown_label", number)
        limit = self.max_records_per_person
        if self.person is None:
            _require(limit is None, "max_records_per_person", limit, "left out, or declared with person='<id column>'")
        else:
            whole = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
            _require(whole, "max_records_per_person", limit, "a positive whole number when a person column is declared")
        norm = _number(self.norm)
        _require(0 < norm < math.inf, "norm", self.norm, "positive and finite")
        object.__setattr__(self, "norm", norm)
        _require(self.scale in {"columns", "clip"}, "scale", self.scale, "'columns' or 'clip'")

    @property
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
            _require(kind in _KINDS, f"kind of column {settings.get('name')!r}", kind, f"one of {list(_KINDS)}")
            columns.append(_declare(_KINDS[kind], settings, f"column {settings.get('name')!r}"))
        return _declare(cls, {**facts, "columns": columns}, "the schema")

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of the facts: equal digests mean equal encodings."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, source: Any) -> Encoded:
        """Encode labelled records from anything `read_table` takes.

        Privacy
        -------
        1-stable: one changed record changes one row of the result, bit for bit. Values beyond a bound count as the
        bound. Not hidden: the number of records; and that a record exists which an ``"error"`` policy, or an
        undeclared label without `unknown_label`, refuses (docs/guarantees/preprocessing.md).
        """
        return self._encode(source, self.table_columns)

    def encode_features(self, source: Any) -> NDArray[np.float64]:
        """Encode records whose label and person are absent or of no interest, for prediction or unlabelled data."""
        return self._encode(source, tuple(column.name for column in self.columns)).X

    def _encode(self, source: Any, needed: tuple[str, ...]) -> Encoded:
        table = read_table(source, self)
        self._check(table.schema, needed)
        return self._encode_batches(table.select(needed).to_batches(max_chunksize=CHUNK_RECORDS), needed)

    def _encode_batches(
        self, batches: Sequence[pa.RecordBatch], needed: tuple[str, ...], where: str = "The table"
    ) -> Encoded:
        one_hot = any(isinstance(column, Categorical) for column in self.columns)  # writes its ones only
        X = (np.zeros if one_hot else np.empty)((sum(batch.num_rows for batch in batches), self.n_features))
        labels: list[NDArray[Any]] = [np.empty(0, np.float64 if self.classes is None else np.int64)]
        persons: list[NDArray[np.str_]] = [np.empty(0, np.str_)]
        problems: list[str] = []
        stop = 0
        for batch in batches:
            start, stop = stop, stop + batch.num_rows
            problems += self._features(batch, X[start:stop])
            if self.label in needed:
                y, wrong = self._labels(batch.column(self.label))
                labels.append(y)
                problems += wrong
            if self.person in needed:
                ids, wrong = self._persons(batch.column(self.person))
                persons.append(ids)
                problems += wrong
        if problems:
            fix = "declare what such values become: missing=, unseen=, missing_values=, unknown_label="
            fix = f"Mend the table by a rule that looks at one record at a time, or {fix}."
            raise _mismatch(list(dict.fromkeys(problems)), fix, where=where)
        return Encoded(X, np.concatenate(labels), np.concatenate(persons) if self.person in needed else None)

    def _features(self, batch: pa.RecordBatch, out: NDArray[np.float64]) -> list[str]:
        problems: list[str] = []
        stop = 0
        numbers: list[NDArray[Any]] = []
        for column in self.columns:
            start, stop = stop, stop + len(column.feature_names)
            values, found = batch.column(column.name), None
            if isinstance(column, Categorical):
                found = _quietly(partial(column._fill, values, out[:, start:stop]))
            else:
                read = _quietly(partial(_numbers, values, column.missing_values))
                numbers.append(np.zeros(len(out)) if read is None else read)
                found = None if read is None else []
            problems += [f"column {column.name!r} cannot be read as {column._expects}"] if found is None else found
        return problems + self._scaled(numbers, out)

    def _scaled(self, numbers: Sequence[NDArray[Any]], out: NDArray[np.float64]) -> list[str]:
        """Write the features of all numeric columns together, then bring all features into the ball, block by block.

        For a table larger than memory this, not reading it, would otherwise be most of the time.
        """
        absent: set[str] = set()
        size = math.sqrt(len(self.columns)) if self.scale == "columns" else 1.0
        for start in range(0, len(out), BLOCK_RECORDS):
            part = out[start : start + BLOCK_RECORDS]
            if numbers:
                absent |= self._scales.fill([values[start : start + BLOCK_RECORDS] for values in numbers], part)
            part /= size
            clipped = clip_rows(part, self.norm)
            if clipped is not part:
                part[:] = clipped
        return [
            f"column {column.name!r} ({column._expects}) has a missing or unreadable value and missing='error'"
            for column in self.columns
            if column.name in absent
        ]

    @cached_property
    def _spelled(self) -> tuple[str, ...]:
        return _spellings(self.classes or (), "classes")

    @cached_property
    def _scales(self) -> "_Scales":
        places = np.cumsum([0, *(len(column.feature_names) for column in self.columns)])
        chosen = [(c, place) for c, place in zip(self.columns, places, strict=False) if isinstance(c, Numeric)]
        return _Scales([column for column, _ in chosen], [int(place) for _, place in chosen])

    def _persons(self, column: pa.Array) -> tuple[NDArray[np.str_], list[str]]:
        texts = _texts(column)
        ids = None if texts.null_count else _quietly(texts.to_pylist)
        problems = [f"column {self.person!r} has a missing or unreadable person id"] if ids is None else []
        return np.asarray(ids or [], np.str_), problems

    def _check(self, found: pa.Schema, needed: Sequence[str], where: str = "The table") -> None:
        """Refuse a table that lacks columns or has them of the wrong kind, by names and types alone."""
        expects = {column.name: column._expects for column in self.columns}
        expects[self.label] = "a number" if self.classes is None else "a declared class"
        problems = []
        for name in needed:
            count, expected = found.names.count(name), expects.get(name, "a person id")
            if count != 1:
                problems.append(f"column {name!r} is {'there more than once' if count else 'absent'}")
            elif not _readable(kind := found.field(name).type, as_number=expected.startswith("a number")):
                outer = str(kind).partition("<")[0]  # what follows may be field names made from records
                problems.append(f"column {name!r} holds {outer} where {expected} is expected")
        if problems:
            raise _mismatch(problems, "Mend the table, or the schema for all sites.", where=where)

    def _labels(self, column: pa.Array) -> tuple[NDArray[Any], list[str]]:
        y: NDArray[Any]
        rule: Any = self.unknown_label
        if self.classes is not None:
            known = self._spelled
            y, _ = _places(column, known)
            unknown, rule = y < 0, None if rule is None else known.index(_spelling(rule))
        else:
            y = np.clip(_numbers(column).astype(np.float64, copy=False), -_number(self.label_bound), self.label_bound)
            unknown = np.isnan(y)
        if rule is None and unknown.any():
            return y, [f"column {self.label!r} has a label that is missing or not declared"]
        y[unknown] = 0 if rule is None else rule
        return y, []


class _Scales:
    """How the numeric columns of a schema become features: their constants side by side."""

    def __init__(self, columns: Sequence[Numeric], places: Sequence[int]) -> None:
        self.columns, self.places = columns, np.array(places)
        facts = [(c.low, c.high, *c._scale(c.low, c.high)) for c in columns]
        self.low, self.high, self.middle, self.half = np.array(facts).T[:, :, None]
        self.off_centre = bool(self.middle.any())
        self.marked = np.array([c.missing == "indicator" for c in columns])
        self.side_by_side = bool(np.array_equal(self.places, np.arange(len(columns))))

    def fill(self, numbers: Sequence[NDArray[Any]], out: NDArray[np.float64]) -> set[str]:
        """Write the features of one block of records; return the columns that miss a value and must not."""
        values = np.empty((len(self.columns), len(out)))
        for row, number in zip(values, numbers, strict=True):
            row[:] = number
        missing = np.isnan(values)
        refused = set()
        for j in np.flatnonzero(missing.any(axis=1)).tolist():
            column = self.columns[j]
            if column.missing == "error":
                refused.add(column.name)
            elif isinstance(column.missing, float):
                values[j, missing[j]] = column.missing
        np.clip(values, self.low, self.high, out=values)
        for j, column in enumerate(self.columns):
            if column.transform:
                values[j] = column._transformed(values[j])
        if self.off_centre:
            values -= self.middle
        values /= self.half
        np.clip(values, -1.0, 1.0, out=values)
        if missing.any():
            np.nan_to_num(values, copy=False, nan=0.0)
        if self.side_by_side:
            out[:, : len(self.columns)] = values.T
        else:
            out[:, self.places] = values.T
        if self.marked.any():
            out[:, self.places[self.marked] + 1] = missing[self.marked].T
        return refused


_KINDS: dict[str, type[Numeric] | type[Categorical]] = {"numeric": Numeric, "categorical": Categorical}


def read_table(source: Any, schema: Schema | None = None) -> pa.Table:
    """Read records as an Arrow table, only the schema's columns if one is given.

    Parameters
    ----------
    source
        Path of a CSV or Parquet file or of a folder of Parquet files; a pandas or polars frame, an Arrow table or
        record batch, anything else with the Arrow C stream interface; a dict of arrays.
        CSV has a header, commas and UTF-8; its columns arrive as text and are read by the schema.
    """
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source), schema)
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, Mapping):
        table, names = None, _chosen(source, schema)
    elif hasattr(source, "__arrow_c_stream__"):
        frame = hasattr(source, "columns") and not isinstance(source, pa.Table)
        names = _chosen(source.columns, schema) if frame else []
        table = _quietly(lambda: pa.table(source[names] if frame else source))
    else:
        raise SettingsError(
            f"Cannot read records from {type(source).__name__}: it is none of path, frame, Arrow table or dict of "
            "arrays. No record was read. Pass one of these."
        )
    if table is None:  # a dict, or a frame with a column that Arrow cannot take: find out which
        arrays = {str(name): _quietly(partial(_array, source[name])) for name in names}
        if mixed := [
            f"column {name!r} holds values of mixed or unknown kind" for name in arrays if arrays[name] is None
        ]:
            raise _mismatch(mixed, "Give each column one kind of value: numbers, or text.", "read")
        table = _quietly(partial(pa.table, arrays))
    if table is None:
        raise _mismatch(["its columns differ in length"], "Give every record a value in each column.", "read")
    return table.select([i for i, name in enumerate(table.column_names) if _chosen([name], schema)])


def _chosen(names: Iterable[Any], schema: Schema | None) -> list[Any]:
    return [name for name in names if schema is None or str(name) in schema.table_columns]


def _read_file(path: Path, schema: Schema | None) -> pa.Table:
    if path.is_file() and ".csv" in path.suffixes:
        table = _quietly(partial(_read_csv, path, schema))
    else:
        files = [_open_parquet(file) for file in _parquet_files(path)]
        parts = (file.read(columns=_chosen(file.schema_arrow.names, schema)) for file in files)
        table = _quietly(lambda: pa.concat_tables(parts, promote_options="permissive"))
    if table is None:
        fix = "Mend it: the same columns in every record, UTF-8 text, a header line in CSV."
        raise _mismatch([f"file {path.name!r} is damaged or of another kind"], fix, "read")
    return table


def _read_csv(path: Path, schema: Schema | None) -> pa.Table:
    with pa.input_stream(str(path)) as stream:
        header = next(csv.reader(io.TextIOWrapper(stream, "utf-8-sig", newline="")))
    names = _chosen(header, schema)
    if len(set(names)) < len(names):
        raise LookupError  # becomes the file's SchemaMismatch
    options = pcsv.ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, pa.string()))
    return pcsv.read_csv(path, parse_options=pcsv.ParseOptions(newlines_in_values=True), convert_options=options)


def _parquet_files(path: Path) -> list[Path]:
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path] * path.is_file()
    if not files or not (path.is_dir() or path.suffix in {".parquet", ".pq"}):
        raise SettingsError(
            f"Cannot read records from {str(path)!r}: it is no CSV file, Parquet file or folder with Parquet files. "
            "No record was read. Check the path; names end in .csv, .csv.gz, .parquet or .pq."
        )
    return files


def _open_parquet(file: Path) -> pq.ParquetFile:
    # Small buffers: with Arrow's defaults, or its dataset scanner, a file written as one row group is all in memory.
    opened = _quietly(lambda: pq.ParquetFile(file, pre_buffer=False, buffer_size=65536))
    if opened is None:
        raise _mismatch([f"{file.name!r} is damaged or no Parquet"], "Write it again as Parquet.", "read")
    return opened


class ParquetRows:
    """Iterate over encoded Parquet records in chunks, as often as needed, without holding them all.

    What a learner's `fit` takes instead of a table that does not fit in memory; it brings its own labels. Files are
    decoded in one thread and encoded in another while the caller computes.

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
        _require(isinstance(chunk_records, int) and chunk_records > 0, "chunk_records", chunk_records, "positive")
        self.path, self.schema, self.chunk_records, self.progress = Path(path), schema, chunk_records, progress
        self.n_features, self.n_records, self.passes = schema.n_features, 0, 0
        self.names = schema.classes if named else None  # of which the labels of chunks are the places
        self._files: dict[Path, tuple[int, int]] = {}
        for file in _parquet_files(self.path):
            with _open_parquet(file) as opened:
                schema._check(opened.schema_arrow, schema.table_columns, f"File {file.name!r}")
                self.n_records += opened.metadata.num_rows
            self._files[file] = _version(file)
        self.keep = None if keep is None else np.asarray(keep, np.bool_)
        if self.keep is not None:
            _require(self.keep.shape == (self.n_records,), "keep", "this array", "one boolean for each record")
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
                raise _mismatch(problems, "Give every record an id.", "read", where=where)
            parts.append(ids)
        return np.concatenate(parts)

    def chunks(self) -> Iterator[tuple[NDArray[np.float64], NDArray[Any]]]:
        """Yield (X, y) in file order; the same chunks each time."""
        if self.schema.person is not None and self.keep is None:
            raise SettingsError(
                f"Chunks were asked for under max_records_per_person={self.schema.max_records_per_person}, but no "
                "record has been capped. No record was read. Pass keep=cap_records(rows.persons(), ...)."
            )
        self.passes += 1
        done = 0
        with showing(f"Reading {self.path.name}, pass {self.passes}", self.progress) as progress:
            for X, y in _ahead(self._encoded()):
                if len(y):
                    yield X, y
                done += len(y)
                progress(done, self.n_records)

    def _encoded(self) -> Iterator[tuple[NDArray[np.float64], NDArray[Any]]]:
        stop = 0
        needed = (*(column.name for column in self.schema.columns), self.schema.label)
        for where, batch in _ahead(self._batches(needed)):
            start, stop = stop, stop + batch.num_rows
            X, y, _ = self.schema._encode_batches([batch], needed, where)
            if self.keep is not None:
                X, y = X[self.keep[start:stop]], y[self.keep[start:stop]]
            yield X, y

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield which file, and some of its records."""
        for file, version in self._files.items():
            where = f"File {file.name!r}"
            if _version(file) != version:
                fix = "Leave the files alone while they are read, and begin again; a charge already made stands."
                raise _mismatch(["it was changed while it was in use"], fix, "learned", where=where)
            with _open_parquet(file) as opened:
                batches = opened.iter_batches(self.chunk_records, columns=list(names), use_threads=False)
                while (batch := _quietly(partial(next, batches, False))) is not False:
                    if batch is None:
                        raise _mismatch(["it is damaged"], "Write it again as Parquet.", where=where)
                    yield where, batch


def _version(file: Path) -> tuple[int, int]:
    facts = _quietly(file.stat)
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
    _require(isinstance(limit, int) and limit > 0, "limit", limit, "a positive whole number")
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
        _require(
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
    _require(ids.shape == person.shape == (n_records,), "sites and persons", "these arrays", "one id for each record")
    if persons is not None and np.unique(np.stack([person, ids]), axis=1).shape[1] > np.unique(person).size:
        fix = "Give each person one site, or split without persons."
        raise _mismatch(["a person has records at several sites"], fix, "split")
    return [np.flatnonzero(ids == site) for site in np.unique(ids)]


def _ids(values: Any) -> NDArray[np.intp]:
    """Return the rank of each id among the distinct ones."""
    ranks = _quietly(partial(_ranks, values))
    if ranks is None:
        raise _mismatch(["a person or site id is missing or of mixed kind"], "Give every record an id.", "selected")
    return ranks


def _ranks(values: Any) -> NDArray[np.intp] | None:
    array = _array(values)
    texts = _texts(array)
    ids = (array if pa.types.is_integer(array.type) else texts).dictionary_encode()
    order: NDArray[np.intp] = np.unique(ids.dictionary.to_numpy(zero_copy_only=False), return_inverse=True)[1]
    return None if texts.null_count else order[ids.indices.to_numpy()]


def _priorities(priority: ArrayLike | None, n_records: int) -> NDArray[np.float64]:
    draws = np.asarray(() if priority is None else priority, np.float64)
    usable = draws.shape == (n_records,) and not np.isnan(draws).any()
    _require(usable, "priority", None if priority is None else "this array", "one uniform draw for each record")
    return draws


def _array(values: Any) -> pa.Array:
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, from_pandas=True)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _readable(kind: pa.DataType, *, as_number: bool) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return _readable(kind.value_type, as_number=as_number)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return text or number or types.is_null(kind) or (types.is_boolean(kind) and not as_number)


def _texts(column: pa.Array, absent: Sequence[Value] = ()) -> pa.Array:
    """Spell every value one way whatever file it came from: 1, 1.0, " 1" are "1"; True is "true"; blank is null."""
    if isinstance(column, pa.DictionaryArray):
        return _texts(column.dictionary, absent).take(column.indices)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        whole = pc.and_(pc.equal(pc.floor(column), column), pc.less(pc.abs(column), 2.0**53))
        integers = pc.cast(pc.if_else(whole, column, None), pa.int64(), safe=False)
        texts = pc.coalesce(pc.cast(integers, pa.large_string()), pc.cast(column, pa.large_string()))
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
        # Arrow's cast fails as a whole on one bad text: what is no number goes first, judged record by record.
        readable = pc.match_substring_regex(column, r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?inf$")
        column = pc.if_else(readable, column, None)
    values = np.array(pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
    if absent:
        values[np.isin(values, _numbers(pa.array(absent, pa.large_string())))] = np.nan
    return values


def _places(
    column: pa.Array, known: Sequence[Value], absent: Sequence[Value] = ()
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return each value's place among the `known` spellings, -1 for none, and whether it is missing.

    Distinct values are spelled once each, however many records hold them.
    """
    coded = column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
    texts = _texts(coded.dictionary, absent)
    place, gone = np.append(_codes(texts, known), -1), np.append(np.asarray(texts.is_null()), True)
    index = coded.indices
    index = np.asarray(pc.fill_null(index.cast(pa.int64()), -1) if index.null_count else index)
    return place[index], gone[index]


def _codes(texts: pa.Array, known: Sequence[Value]) -> NDArray[np.int64]:
    found = pc.index_in(texts, value_set=pa.array(known, pa.large_string()))
    return np.array(pc.fill_null(found, -1), np.int64)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _number(value: Any) -> float:
    """Return a declared number as a float, NaN if it is none; -0.0 becomes 0.0 so that digests agree."""
    value = _plain(value)
    return float(value) + 0.0 if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _spelling(value: Value) -> str:
    text = _quietly(lambda: _texts(pa.array([_plain(value)]))[0].as_py())
    if not isinstance(text, str):
        raise SettingsError(
            f"Cannot declare {value!r} as a class, category or missing value: it is blank, or neither text nor "
            "number. No record was read. Declare text, whole numbers or booleans."
        )
    return text


def _spellings(values: Sequence[Value], setting: str) -> tuple[str, ...]:
    _require(not isinstance(values, str), setting, values, "a list of values, not one text")
    texts = tuple(_spelling(value) for value in values)
    _require(len(set(texts)) == len(texts), setting, list(values), "free of repetition (1, 1.0 and '1' are the same)")
    return texts


def _facts(declared: Any) -> dict[str, Any]:
    facts = {field.name: getattr(declared, field.name) for field in fields(declared)}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in facts.items() if value is not None
    }


def _declare(kind: type[T], settings: Mapping[str, Any], where: str) -> T:
    known = {field.name: field.default is MISSING for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(settings) - set(known))
    _require(not unknown, f"settings of {where}", unknown, f"among {list(known)}")
    absent = sorted(name for name, required in known.items() if required and name not in settings)
    _require(not absent, f"settings of {where}", sorted(settings), f"complete; add {absent}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})


def _require(holds: bool, setting: str, given: Any, wish: str) -> None:
    if not holds:
        raise SettingsError(f"{setting} cannot be {given!r}: it must be {wish}. No record was read. Change it.")


def _mismatch(problems: Sequence[str], fix: str, done: str = "encoded", *, where: str = "The table") -> SchemaMismatch:
    """Word an error. Problems name columns and settings; never a value, count or position of a record."""
    return SchemaMismatch(f"{where} does not fit the schema: {'; '.join(problems)}. Nothing was {done}. {fix}")


def _quietly(call: Callable[[], T]) -> T | None:
    """Return `call()`, or None if it failed: a library's message may quote a record, so it ends here.

    The caller raises its own error after this returns, so that the library's is not even its context.
    """
    try:
        return call()
    except MemoryError:
        raise
    except Exception:
        return None
