"""Tables in workbooks and in databases, read some thousand rows at a time.

They are opened only where somebody names one as a table of their own. A study's public files are
never read this way: whoever writes a study must not choose what a site's machine opens or asks.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from consilience.errors import SettingsError
from consilience.tables.problems import mismatch, quietly
from consilience.tables.reading import RowSource, read_table

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

BATCH_ROWS = 8192
MOST_TEXT = 1 << 20  # bytes of a file that describes a source
WORKBOOKS = {".xlsx", ".xlsm"}
ALLOWED = {"excel": {"file", "sheet"}, "sql": {"url", "url_env", "password_env", "query"}}


def open_table(table: object) -> object:
    """Return what `read_table` takes for a table that somebody named as their own.

    An Excel file becomes a `Workbook`; a TOML file with a part ``[excel]`` or ``[sql]`` what it
    describes; anything else stays as it is.
    """
    if not isinstance(table, str | os.PathLike):
        return table
    path = Path(table)
    if path.suffix.lower() in WORKBOOKS:
        return Workbook(path)
    return _read_description(path) if path.suffix.lower() == ".toml" else table


class Workbook(RowSource):
    """One sheet of an Excel file, whose first row names the columns.

    Of formulas the last computed values are read. A row without any value is no record.
    """

    def __init__(self, path: Path, sheet: str | None = None) -> None:
        self.path, self.sheet = path, sheet

    def list_columns(self) -> list[str]:
        """Return the names in the first row."""
        with closing(self._rows()) as rows:
            return _name_columns(next(rows, ()))

    def read_batches(self, names: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the records."""
        with closing(self._rows()) as rows:
            yield from _as_batches(_name_columns(next(rows, ())), rows, names)

    def _rows(self) -> Generator[Sequence[Any], None, None]:
        import openpyxl

        if not self.path.is_file():
            raise SettingsError(
                f"There is no file {str(self.path)!r}. No record was read. Check the path."
            )
        book = quietly(partial(openpyxl.load_workbook, self.path, read_only=True, data_only=True))
        if book is None:
            raise _damaged(self.path)
        with closing(book):
            names = [sheet.title for sheet in book.worksheets]
            if self.sheet not in names and (self.sheet is not None or len(names) != 1):
                raise SettingsError(
                    f"The file {self.path.name!r} has {len(names)} sheets, and which one holds the "
                    f"records is not clear. No record was read. Name it in a file TABLE.toml, with "
                    f"[excel], file = {self.path.name!r} and sheet = one of: {', '.join(names)}."
                )
            chosen = book[self.sheet or names[0]]
            chosen.reset_dimensions()  # what a file states of its size leaves out what is beyond
            rows = chosen.iter_rows(values_only=True)
            while (row := quietly(partial(next, rows, False))) is not False:
                if row is None:
                    raise _damaged(self.path)
                if any(value is not None for value in row):
                    yield row


class Query(RowSource):
    """What a database answers to a query; what that changes is rolled back, if it can be.

    Parameters
    ----------
    url
        The database, in the form of SQLAlchemy.
    query
        Order it: the digest of a table depends on the order of its rows.
    """

    def __init__(self, url: URL, query: str) -> None:
        self._url, self.query = url, query  # the first may hold a password

    def __repr__(self) -> str:
        return f"Query({self.query!r})"

    def list_columns(self) -> list[str]:
        """Return the names of the columns of the answer."""
        with closing(self._answer()) as answer:
            return _name_columns(next(answer))

    def read_batches(self, names: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the records as the database sends them."""
        with closing(self._answer()) as answer:
            yield from _as_batches(_name_columns(next(answer)), answer, names)

    def _answer(self) -> Generator[Sequence[Any], None, None]:
        """Yield the names of the columns, then the rows."""
        import sqlalchemy

        def ask() -> tuple[Any, Any]:
            engine = sqlalchemy.create_engine(self._url, poolclass=sqlalchemy.NullPool)
            # Without it, some drivers hold the whole answer in memory.
            connection = engine.connect().execution_options(
                stream_results=True, max_row_buffer=BATCH_ROWS
            )
            return connection, connection.execute(sqlalchemy.text(self.query))

        connection, result = _ask(ask, sqlalchemy.exc.SQLAlchemyError)
        with closing(connection):  # which rolls back whatever the query may have changed
            if not result.returns_rows:
                raise _refused("it returns no rows")
            yield tuple(result.keys())
            while rows := _ask(partial(result.fetchmany, BATCH_ROWS), Exception):
                yield from rows


def _ask(ask: Callable[[], Any], kinds: type[Exception]) -> Any:
    """Return what a database answers, or say that it failed; its words may quote records."""
    reason = ""
    try:
        return ask()
    except ModuleNotFoundError:
        raise
    except kinds as problem:
        reason = type(problem).__name__
    except Exception as problem:  # of a driver
        reason = type(problem).__name__
    raise _refused(f"it failed with {reason}")


def _refused(reason: str) -> SettingsError:
    return SettingsError(
        f"The database did not answer the query: {reason}. No record was used. Check the address, "
        "the environment variables that hold credentials, and the query, with the database's own "
        "tool: what it says is not repeated here, because it may quote a record."
    )


def _read_description(path: Path) -> RowSource:
    """Return the source that a TOML file describes."""
    facts: Mapping[str, Mapping[str, str]] = {}
    try:
        with path.open("rb") as file:
            facts = tomllib.loads(file.read(MOST_TEXT).decode())
    except (OSError, ValueError, RecursionError):
        pass
    kind = next(iter(facts), "")
    part = facts.get(kind, {})
    if len(facts) != 1 or kind not in ALLOWED or not _is_plain(part, ALLOWED[kind]):
        raise SettingsError(
            f"The file {path.name!r} describes no table: it has to have one part, [excel] with "
            "file and sheet, or [sql] with query, url (or url_env) and, if need be, password_env. "
            "No record was read. Correct it."
        )
    if kind == "excel":
        return Workbook(path.parent / part.get("file", ""), part.get("sheet"))
    return _read_query(path, part)


def _is_plain(part: object, allowed: Collection[str]) -> bool:
    return isinstance(part, Mapping) and all(
        key in allowed and isinstance(value, str) for key, value in part.items()
    )


def _read_query(path: Path, part: Mapping[str, str]) -> Query:
    """Return a query; credentials are taken from the environment alone."""
    from sqlalchemy.engine import make_url

    if not part.get("query") or ("url" in part) == ("url_env" in part):
        raise SettingsError(
            f"The file {path.name!r} needs a query, and either url or url_env, the environment "
            "variable that holds the address. No record was read. Correct it."
        )
    given = {
        name: os.environ.get(part[name]) for name in ("url_env", "password_env") if name in part
    }
    if unset := [part[name] for name, value in given.items() if not value]:
        raise SettingsError(
            f"The environment variable {', '.join(unset)}, which {path.name!r} names, is not set. "
            "No record was read. Set it where the command runs."
        )
    url = quietly(lambda: make_url(given.get("url_env") or part["url"]))
    if url is None:
        raise SettingsError(
            f"The address in {path.name!r} is none of a database. No record was read. It has the "
            "form dialect+driver://user@host/database."
        )
    if "url" in part and (url.password is not None or "password" in url.query):
        raise SettingsError(
            f"The file {path.name!r} holds a password. No record was read. Remove it, and name "
            "the environment variable that holds it: password_env."
        )
    if "password_env" in given:
        url = url.set(password=given["password_env"])
    return Query(url, part["query"])


def _name_columns(row: Sequence[Any]) -> list[str]:
    """Return the names of columns; those without one get none, and are read by nobody."""
    return ["" if value is None else str(value).strip() for value in row]


def _as_batches(
    listed: Sequence[str], rows: Iterator[Sequence[Any]], names: Collection[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yield rows as batches of the columns of these names; values keep their own readings."""
    places = [
        (place, name)
        for place, name in enumerate(listed)
        if name and (names is None or name in names)
    ]
    if len({name for _, name in places}) < len(places):
        raise mismatch(["a column is there more than once"], "Give each its own name.", "read")
    while part := list(islice(rows, BATCH_ROWS)):
        columns = {
            name: [row[place] if place < len(row) else None for row in part]
            for place, name in places
        }
        yield from read_table(columns).combine_chunks().to_batches()


def _damaged(path: Path) -> SettingsError:
    return SettingsError(
        f"The file {path.name!r} cannot be read as an Excel file. No record was read. Save it "
        "again as .xlsx."
    )
