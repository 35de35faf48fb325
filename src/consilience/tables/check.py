"""Which values of a table do not fit a schema: for the eyes of those who hold the table.

What is found here quotes records. It may be shown on the site's own terminal, and belongs in no
error, log or file.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from consilience.progress import Progress, showing
from consilience.tables.encoding import Encoder
from consilience.tables.mapping import Mapped
from consilience.tables.problems import quietly
from consilience.tables.reading import PlainTable, RowSource
from consilience.tables.schema import Categorical, Numeric, Schema
from consilience.tables.values import as_texts
from consilience.text import quote, shorten

MOST_SHOWN = 20
MOST_VALUE, MOST_ALLOWED = 60, 200  # characters of what is shown
Judge = Callable[[pa.Array], NDArray[np.bool_]]


class Misfit(NamedTuple):
    """A value that does not fit: its row, counted from 1 below the header, and what is allowed."""

    row: int
    column: str
    value: str | None
    allowed: str


class TableCheck:
    """What does not fit, as far as it is shown, and how many values of each column do not.

    ``problems`` are sentences about whole columns, which quote no record. ``beyond`` counts the
    numbers of each column that fit because they count as the bound, and ``replaced`` the values
    that fit because they count as missing or as no category, by column and what they are.
    """

    def __init__(self, problems: Iterable[str] = ()) -> None:
        self.n_records, self.problems = 0, list(problems)
        self.misfits: list[Misfit] = []
        self.counts: Counter[str] = Counter()
        self.beyond: Counter[str] = Counter()
        self.replaced: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return "TableCheck(problems, misfits, counts)"  # a printed record is a leak

    @property
    def fits(self) -> bool:
        """Whether the table can be trained on."""
        return self.n_records > 0 and not (self.problems or self.counts)

    def as_dict(self, *, with_values: bool) -> dict[str, Any]:
        """Return the facts; without values it quotes no record."""
        facts: dict[str, Any] = {
            "fits": self.fits,
            "records": self.n_records,
            "problems": self.problems,
            "misfits": dict(self.counts),
            "beyond_bounds": dict(self.beyond),
            "replaced": {name: count for (name, _), count in self.replaced.items()},
        }
        shown = [each._asdict() for each in self.misfits]
        return {**facts, "rows": shown} if with_values else facts

    def describe(self) -> str:
        """Say what does not fit, for the terminal of whoever holds the table."""
        lines = [f"  - {problem}" for problem in self.problems]
        for row, column, value, allowed in self.misfits:
            held = "no value" if value is None else quote(value, MOST_VALUE)
            lines.append(f"  row {row:,}, column {column!r}: {held}; allowed is {allowed}")
        if (more := self.counts.total() - len(self.misfits)) > 0:
            lines.append(f"  … and {more:,} more.")
        lines += [
            f"  {name!r}: {count:,} of {self.n_records:,} values do not fit"
            for name, count in self.counts.items()
        ]
        beyond = [
            f"  {name!r}: {count:,} of {self.n_records:,} numbers are beyond the bounds and count "
            "as the bound"
            for name, count in self.beyond.items()
        ]
        beyond += [
            f"  {name!r}: {count:,} of {self.n_records:,} values {what}"
            for (name, what), count in self.replaced.items()
        ]
        if self.fits:
            return "\n".join([f"All {self.n_records:,} records fit.", *beyond])
        if not self.n_records and not self.problems:
            lines.append("  - the table has no record")
        fix = (
            "Fix values row by row, without statistics of a whole column, or translate names, "
            "units and codes with a mapping file (--mapping)."
        )
        return "\n".join(["The table does not fit the study:", *lines, *beyond, fix])


def check_table(
    schema: Schema,
    table: object,
    *,
    most: int = MOST_SHOWN,
    progress: Progress | None = None,
) -> TableCheck:
    """Find every value of a table that encoding by the schema would refuse.

    Privacy
    -------
    The result quotes records, at most `most` of their values. Nothing is written or charged.
    """
    source = table if isinstance(table, RowSource) else PlainTable(table)
    needed = list(schema.table_columns)
    listed, encoder = source.list_columns(), Encoder(schema)
    found = TableCheck(
        f"column {name!r} is there more than once"
        if name in listed
        else f"column {name!r} is absent{_suggest(name, source, listed)}"
        for name in needed
        if listed.count(name) != 1
    )
    judges, there = _list_judges(schema), [name for name in needed if listed.count(name) == 1]
    with showing("Checking", progress) as report:
        for batch in source.read_batches(there):
            wrong = encoder.find_column_problems(batch.schema, there)
            found.problems += [one for one in wrong.values() if one not in found.problems]
            for name in there:
                if name not in wrong:
                    _judge(found, name, batch.column(name), judges[name], most)
            found.n_records += batch.num_rows
            found.misfits.sort(key=lambda one: one.row)
            del found.misfits[most:]
            report(found.n_records, 0)
    return found


def _list_judges(schema: Schema) -> dict[str, tuple[Judge, str, Numeric | Categorical | None]]:
    """Return who judges the values of each column, what is allowed, and a column to learn from."""
    judges: dict[str, tuple[Judge, str, Numeric | Categorical | None]] = {
        column.name: (column.find_refused, shorten(column.allowed, MOST_ALLOWED), column)
        for column in schema.columns
    }
    judges[schema.label] = (schema.find_refused, shorten(schema.allowed, MOST_ALLOWED), None)
    if schema.person is not None:
        no_id: Judge = lambda values: np.asarray(as_texts(values).is_null())  # noqa: E731
        judges[schema.person] = (no_id, "an id of the person", None)
    return judges


def _judge(
    found: TableCheck,
    name: str,
    values: pa.Array,
    rules: tuple[Judge, str, Numeric | Categorical | None],
    most: int,
) -> None:
    """Enter what does not fit among some values of a column."""
    judge, allowed, column = rules
    refused = quietly(partial(judge, values))
    if refused is None:
        found.problems.append(f"column {name!r} cannot be read")
        return
    (rows,) = np.nonzero(refused)
    if rows.size:
        found.counts[name] += rows.size
    shown = as_texts(values.take(pa.array(rows[:most]))).to_pylist()
    found.misfits += [
        Misfit(found.n_records + int(row) + 1, name, value, allowed)
        for row, value in zip(rows[:most], shown, strict=True)
    ]
    if isinstance(column, Numeric) and (beyond := int(column.find_beyond(values).sum())):
        found.beyond[name] += beyond
    if column is not None and (replaced := int(column.find_replaced(values).sum())):
        found.replaced[name, column.replaced] += replaced


def _suggest(name: str, source: RowSource, listed: Sequence[str]) -> str:
    """Name columns of the table that may be meant by an absent one."""
    if isinstance(source, Mapped) and name in source.mapping.columns:
        local = source.mapping.find_source(name)
        return f": the mapping makes it of {local!r}, which the table lacks"
    if len(listed) == 1 and ";" in listed[0]:
        return ": columns are to be separated by commas, and the header has semicolons"
    plain = {one.casefold().strip(): one for one in reversed(listed)}
    near = difflib.get_close_matches(name.casefold(), plain, n=3, cutoff=0.6)
    if not near:
        return f"; the table has {shorten(', '.join(map(repr, listed)), MOST_ALLOWED)}"
    meant = " or ".join(repr(plain[one]) for one in near)
    return f"; {meant} may be meant: say so in a mapping file"
