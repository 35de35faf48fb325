"""The hub's database: connections, write transactions, and the facts that all workers share.

All write transactions are serial, because the audit log is one chain. Writes that wait at the same
time are committed together, so that a crowd pays for one disk flush.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import sqlalchemy as sa

from consilience.errors import SettingsError
from consilience.hub.store.tables import MIGRATIONS, nonces, settings, versions
from consilience.protocol import CLOCK_SECONDS

T = TypeVar("T")
P = ParamSpec("P")
DatabaseT = TypeVar("DatabaseT", bound="Database")
Row = dict[str, Any]
Work = Callable[[sa.Connection], Any]
Waiting = tuple[Work, Future[Any]]
Outcome = tuple[Any, Exception | None]

MOST_TOGETHER = 256  # writes that share one transaction
_POOL = {"pool_size": 8, "max_overflow": 40}  # connections that are kept, and more at a busy time
WORKER_CONNECTIONS = 60  # these, and a few for each process in which a worker combines
_WORKER = "consilience worker"
_LOCK = 0x434E534C  # "CNSL": PostgreSQL's writers take this advisory lock one after the other
_NO_DATABASE = (sa.exc.OperationalError, sa.exc.InterfaceError)
# How many connections the hub's role may have to its database, and how many workers have some.
_ROOM = sa.text(
    """
    SELECT least(
        current_setting('max_connections')::int
            - current_setting('superuser_reserved_connections')::int
            - coalesce(current_setting('reserved_connections', true)::int, 0),
        (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user),
        (SELECT nullif(datconnlimit, -1) FROM pg_database WHERE datname = current_database())
    ), (
        SELECT count(DISTINCT application_name) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE :worker
    )
    """
)
_FORGET_NONCES = nonces.delete().where(nonces.c.expires < sa.bindparam("now"))


class Statement:
    """A statement that every submission needs: compiled once, and run by the driver itself.

    SQLAlchemy takes many times as long as the database for each statement.
    """

    def __init__(self, query: sa.Select[Any] | sa.Insert | sa.Update | sa.Delete) -> None:
        self._query, self._compiled = query, dict[str, _Compiled]()

    def fetch(self, db: sa.Connection, **values: object) -> list[Row]:
        """Return the rows that the statement selects."""
        cursor, compiled = self._execute(db, values)
        rows = [dict(zip(compiled.columns, row, strict=True)) for row in cursor.fetchall()]
        cursor.close()
        for row in rows:
            for name, convert in compiled.read.items():
                row[name] = convert(row[name])
        return rows

    def change(self, db: sa.Connection, **values: object) -> int:
        """Return how many rows the statement changed."""
        cursor, _ = self._execute(db, values)
        changed: int = cursor.rowcount
        cursor.close()
        return changed

    def _execute(self, db: sa.Connection, values: Row) -> tuple[Any, _Compiled]:
        dialect = db.dialect
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            compiled = self._compiled[dialect.name] = _compile(self._query, dialect)
        given = {**compiled.values, **values}
        for name, convert in compiled.write.items():
            given[name] = convert(given[name])
        return _run(db, compiled.text, given), compiled


def _run(db: sa.Connection, text: str, values: Row) -> Any:
    """Let the driver itself run a statement; return its cursor, or raise SQLAlchemy's errors."""
    cursor = db.connection.cursor()
    try:
        cursor.execute(text, values)
    except db.dialect.loaded_dbapi.Error as problem:
        cursor.close()
        kind = db.dialect.loaded_dbapi.Error
        raise sa.exc.DBAPIError.instance(text, None, problem, kind) from problem
    return cursor


class _Compiled(NamedTuple):
    """A statement's text for one kind of database, and which values have to be converted."""

    text: str
    values: Row
    write: dict[str, Callable[[Any], Any]]
    columns: list[str]
    read: dict[str, Callable[[Any], Any]]


def _compile(
    query: sa.Select[Any] | sa.Insert | sa.Update | sa.Delete, dialect: sa.Dialect
) -> _Compiled:
    kind: Any = type(dialect)
    named = kind(paramstyle="named" if dialect.name == "sqlite" else "pyformat")
    compiled = query.compile(dialect=named)
    columns: Any = query.selected_columns if isinstance(query, sa.Select) else {}
    types = {name: bind.type.dialect_impl(named) for name, bind in compiled.binds.items()}
    write = {name: types[name].bind_processor(named) for name in compiled.params}
    read = {
        name: column.type.dialect_impl(named).result_processor(named, None)
        for name, column in columns.items()
    }
    return _Compiled(
        str(compiled),
        dict(compiled.params),
        {name: convert for name, convert in write.items() if convert is not None},
        list(columns.keys()),
        {name: convert for name, convert in read.items() if convert is not None},
    )


_SETTING = Statement(sa.select(settings.c.value).where(settings.c.name == sa.bindparam("of_name")))
_SET = Statement(
    settings.update()
    .where(settings.c.name == sa.bindparam("of_name"))
    .values(value=sa.bindparam("to"))
)


def now(*, seconds: float = 0.0) -> str:
    """Return the current time, plus `seconds`, as rows hold it; these texts sort by time."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


def clock(db: sa.Connection, *, seconds: float = 0.0) -> str:
    """Return the same by the one clock that all workers on a database share, which is its own."""
    if db.dialect.name == "sqlite":
        return now(seconds=seconds)
    at: datetime = db.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
    return (at.astimezone(UTC) + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


def hashed(secret: str) -> str:
    """Return what is stored of a token or code.

    Tokens and codes are long and random, so a plain hash reveals nothing about them.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def fetch_rows(db: sa.Connection, query: sa.Executable, **values: object) -> list[Row]:
    """Return the rows of a query as dictionaries."""
    return [dict(row) for row in db.execute(query, values).mappings()]


def fetch_row(db: sa.Connection, query: sa.Executable, **values: object) -> Row | None:
    """Return the first row of a query, if there is one."""
    return next(iter(fetch_rows(db, query, **values)), None)


def get_setting(db: sa.Connection, name: str) -> str | None:
    """Return a fact about the whole hub; None if it was never set."""
    return next((str(row["value"]) for row in _SETTING.fetch(db, of_name=name)), None)


def set_setting(db: sa.Connection, name: str, value: str) -> None:
    """Set a fact about the whole hub."""
    if not _SET.change(db, of_name=name, to=value):
        db.execute(settings.insert().values(name=name, value=value))


def writing(
    method: Callable[Concatenate[DatabaseT, sa.Connection, P], T],
) -> Callable[Concatenate[DatabaseT, P], T]:
    """Run a method in a write transaction, whose connection is its first argument.

    See `Database.write`: the method may run twice, so it must only read and change the database.
    """

    @wraps(method)
    def run(self: DatabaseT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.write(lambda db: method(self, db, *args, **kwargs))

    return run


class Database:
    """A connection to SQLite (the default, a file in the hub's folder) or PostgreSQL (by URL).

    Any number of processes may share one database.
    """

    def __init__(self, folder: str | os.PathLike[str], url: str | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.url = sa.make_url(url or f"sqlite:///{self.folder / 'hub.sqlite'}")
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if not self.is_sqlite and self.url.get_backend_name() != "postgresql":
            raise SettingsError(
                f"The hub cannot keep its rows in {self.url.get_backend_name()!r}. Nothing was "
                "opened. Use sqlite:///... or postgresql+psycopg://..."
            )
        self._engines = self._open()
        self._writer, self._waiting = threading.Lock(), deque[Waiting]()
        self._forget_at = 0.0  # when expired nonces are next removed, by the monotonic clock

    def close(self) -> None:
        """Close all connections."""
        for engine in self._engines:
            engine.dispose()

    def _open(self) -> tuple[sa.Engine, sa.Engine]:
        """Return the engines for reading and for writing."""
        if not self.is_sqlite:
            checked = {"pool_pre_ping": True, "isolation_level": "READ COMMITTED"}
            engine = sa.create_engine(self.url, **_POOL, **checked)
            return engine, engine
        file = Path(self.url.database or "")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # SQLite gives its other files the same rights
        if stat.S_IMODE(file.stat().st_mode) != 0o600:  # an earlier version left it to the umask
            file.chmod(0o600)
        return self._open_sqlite("BEGIN"), self._open_sqlite("BEGIN IMMEDIATE")

    def _open_sqlite(self, begin: str) -> sa.Engine:
        arguments = {"timeout": 60.0, "check_same_thread": False}
        engine = sa.create_engine(self.url, **_POOL, connect_args=arguments)
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", lambda db: _run(db, begin, {}).close())
        return engine

    def find_shortage(self) -> str | None:
        """Count this process among the workers; say so if all may open too many connections.

        Others are seen by the names that their connections have since they asked this.
        """
        if self.is_sqlite:
            return None
        named, engine = {"application_name": f"{_WORKER} {secrets.token_hex(8)}"}, self._engines[0]
        sa.event.listen(engine, "do_connect", lambda *given: given[3].update(named))
        engine.dispose()  # the next connections have the name
        with engine.connect() as db:
            most, workers = db.execute(_ROOM, {"worker": f"{_WORKER} %"}).one()
        needed = WORKER_CONNECTIONS * workers
        if needed <= most:
            return None
        return (
            f"PostgreSQL allows this hub {most} connections, and may be asked for {needed}: "
            f"{WORKER_CONNECTIONS} by each of {workers} running workers. Beyond that, requests are "
            "answered with 'unavailable'. Raise max_connections, or the limit of the role or the "
            "database, or run fewer workers."
        )

    @writing
    def migrate(self, db: sa.Connection) -> None:
        """Create the tables, or bring those of an older version up to date."""
        versions.create(db, checkfirst=True)
        at = db.execute(sa.select(sa.func.max(versions.c.version))).scalar() or 0
        if at > len(MIGRATIONS):
            raise SettingsError(
                f"The hub's database has version {at}, and this program knows versions up to "
                f"{len(MIGRATIONS)}. Nothing was changed. Use the program that wrote it, or a "
                "newer one."
            )
        for number, migrate in enumerate(MIGRATIONS[at:], start=at + 1):
            migrate(db)
            db.execute(versions.insert().values(version=number, applied=now()))

    # --------------------------------------------------------------------------- reading, writing

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """Open a connection for reading."""
        return self._engines[0].connect()

    def snapshot(self) -> AbstractContextManager[sa.Connection]:
        """Open a connection whose statements all see the same state of the database."""
        engine = self._engines[0]
        if not self.is_sqlite:  # SQLite's transactions always see one state
            engine = engine.execution_options(isolation_level="REPEATABLE READ")
        return engine.connect()

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Do `work` in a serial transaction and return after the commit.

        Writes that arrive while a transaction is being committed wait, and the next transaction
        takes all of them. Work that raises is undone alone. It may then run a second time, so it
        must do nothing but read and change the database.
        """
        mine: Future[T] = Future()
        self._waiting.append((work, mine))
        while not mine.done():
            with self._writer:
                if not mine.done():
                    self._write_waiting()
        return mine.result()

    def _write_waiting(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_TOGETHER))]
        try:
            try:
                outcomes = self._transaction(batch, _do)
            except _NO_DATABASE:
                raise  # the database is away: repeating the work would fail as well
            except Exception:  # one piece was refused: repeat all, each in its own savepoint
                outcomes = self._transaction(batch, _try)
        except BaseException as problem:
            for _, future in batch:
                future.set_exception(problem)
            return
        for (_, future), (result, failure) in zip(batch, outcomes, strict=True):
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    def _transaction(
        self, batch: Sequence[Waiting], do: Callable[[sa.Connection, Work], Outcome]
    ) -> list[Outcome]:
        with self._engines[1].begin() as db:
            if not self.is_sqlite:
                db.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            db.info["head"] = None  # of the audit log, once this transaction has added to it
            outcomes = [do(db, work) for work, _ in batch]
            if (at := time.monotonic()) >= self._forget_at:
                self._forget_at = at + CLOCK_SECONDS / 5
                db.execute(_FORGET_NONCES, {"now": now()})
            if db.info["head"] is not None:
                set_setting(db, "audit", db.info["head"])
        return outcomes

    def fetch_all(self, query: sa.Executable) -> list[Row]:
        """Return all rows of a query."""
        with self.reading() as db:
            return fetch_rows(db, query)

    def fetch_one(self, query: sa.Executable) -> Row | None:
        """Return the first row of a query, if there is one."""
        with self.reading() as db:
            return fetch_row(db, query)

    # ------------------------------------------------------------------- facts that workers share

    def remembered(self, name: str) -> str | None:
        """Return a fact about the whole hub that some worker stored."""
        with self.reading() as db:
            return get_setting(db, name)

    def remember(self, name: str, value: str) -> None:
        """Store a fact about the whole hub."""
        self.write(lambda db: set_setting(db, name, value))

    @writing
    def agree(self, db: sa.Connection, name: str, value: str) -> str:
        """Return what the first worker stored under this name: `value` if this is the first."""
        known = get_setting(db, name)
        if known is None:
            set_setting(db, name, value)
        return known or value


def _do(db: sa.Connection, work: Work) -> Outcome:
    return work(db), None


def _try(db: sa.Connection, work: Work) -> Outcome:
    """Do work that may be refused, in a savepoint; if it is refused, nothing of it stays."""
    head, part = db.info["head"], db.begin_nested()
    try:
        result = work(db)
        part.commit()
    except _NO_DATABASE:
        raise
    except Exception as problem:
        part.rollback()
        db.info["head"] = head
        return None, problem
    return result, None


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself
    for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {setting}")
