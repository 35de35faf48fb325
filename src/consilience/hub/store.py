"""Everything the hub remembers: every SQL statement, and the folder of files.

Rows live in one database (SQLite by default, PostgreSQL by URL), bytes in a content-addressed
folder, small ones in the database too. Three rules make a killed hub recover by itself: bytes are
durable before, or with, the row that names them; an answer is given after the commit; every change,
its audit entry and its nonce are one transaction. All writing transactions are serial (the audit
log is one chain), and those that wait together are committed together, so that a crowd pays for one
disk flush.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from consilience.errors import SettingsError
from consilience.files.sealed import canonical
from consilience.hub.files import Bucket, Files
from consilience.hub.tables import (
    MIGRATIONS,
    audit,
    bodies,
    claims,
    contributions,
    coordinators,
    files,
    invitations,
    keys,
    members,
    nonces,
    releases,
    sessions,
    settings,
    sites,
    studies,
    tables,
    versions,
)
from consilience.protocol import CLOCK_SECONDS, Refusal

T = TypeVar("T")
Row = dict[str, Any]
Waiting = tuple[Callable[[sa.Connection], Any], Future[Any]]
Done = tuple[Any, Exception | None]
_DATABASE = (sa.exc.OperationalError, sa.exc.InterfaceError)  # the database itself does not answer

GENESIS = "0" * 64
NONCE_SECONDS = 2 * CLOCK_SECONDS + 1.0
MOST_WAITING = 256  # writes that one transaction takes
_LOCK = 0x434E534C  # "CNSL": the advisory lock under which PostgreSQL's writers are serial


# Statements that every submission needs, built once.
_SIGNER = sa.select(sites, studies.c.status.label("study_status")).join(
    studies, studies.c.name == sites.c.study
)
_SIGNER = _SIGNER.where(sites.c.study == sa.bindparam("study"), sites.c.key == sa.bindparam("key"))
_SENDER = _SIGNER.add_columns(*(column.label(f"its_{column.name}") for column in contributions.c))
_SENDER = _SENDER.outerjoin(
    contributions, (contributions.c.study == sites.c.study) & (contributions.c.site == sites.c.name)
).order_by(contributions.c.sequence.desc())
_SUPERSEDE = contributions.update().where(
    contributions.c.state == "accepted",
    contributions.c.study == sa.bindparam("of_study"),
    contributions.c.site == sa.bindparam("of_site"),
)
_SUPERSEDE = _SUPERSEDE.values(state="superseded", changed=sa.bindparam("at"))
_MOVE = studies.update().where(studies.c.name == sa.bindparam("of_study"))
_MOVE = _MOVE.values(changes=studies.c.changes + 1, changed=sa.bindparam("at"))
_FORGET_NONCES = nonces.delete().where(nonces.c.expires < sa.bindparam("now"))
_ADD_NONCE, _ADD_ENTRY, _ADD_CONTRIBUTION = nonces.insert(), audit.insert(), contributions.insert()
_BODY, _ADD_BODY = (
    sa.select(bodies.c.content).where(bodies.c.sha256 == sa.bindparam("of")),
    bodies.insert(),
)
_SETTING = sa.select(settings.c.value).where(settings.c.name == sa.bindparam("of_name"))
_SET = (
    settings.update()
    .where(settings.c.name == sa.bindparam("of_name"))
    .values(value=sa.bindparam("to"))
)


def now(*, seconds: float = 0.0) -> str:
    """Return the time, or one later or earlier than it, as rows hold it; such texts sort by time."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


def hashed(secret: str) -> str:
    """Return what is stored of a token or code: it is long and random, so a plain hash tells nothing."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Store:
    """Open the hub's database and folder, or create them; bring the schema up to date; sweep what a crash left.

    Any number of processes may share one database and one folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], url: str | None = None, *, sweep_after: float = 3600.0
    ) -> None:
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.url = sa.make_url(url or f"sqlite:///{self.folder / 'hub.sqlite'}")
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if not self.is_sqlite and self.url.get_backend_name() != "postgresql":
            raise SettingsError(
                f"The hub was to keep its rows in {self.url.get_backend_name()!r}. Nothing was "
                "opened. Use sqlite:///... or postgresql+psycopg://..."
            )
        self._engines = self._open()
        self._writer, self._waiting = threading.Lock(), deque[Waiting]()
        self._forget_at = (
            0.0  # when nonces that have expired are next removed, by the monotonic clock
        )
        try:
            self._migrate()
            bucket, place = self.remembered("bucket"), self.folder / "files"
            self.files = Files(place) if bucket is None else Bucket(place, bucket)
            self.swept = self.files.sweep(self._named(), sweep_after)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all connections back."""
        for engine in self._engines:
            engine.dispose()

    # ------------------------------------------------------------------------------------- connections, transactions

    def _open(self) -> tuple[sa.Engine, sa.Engine]:
        """Return the engines of readers and of writers."""
        if not self.is_sqlite:
            engine = sa.create_engine(
                self.url,
                pool_pre_ping=True,
                pool_size=8,
                max_overflow=40,
                isolation_level="READ COMMITTED",
            )
            return engine, engine
        Path(self.url.database or "").parent.mkdir(parents=True, exist_ok=True)
        found = []
        for begin in ("BEGIN", "BEGIN IMMEDIATE"):
            arguments = {"timeout": 60.0, "check_same_thread": False}
            engine = sa.create_engine(
                self.url, pool_size=8, max_overflow=40, connect_args=arguments
            )
            sa.event.listen(engine, "connect", _prepare_sqlite)
            sa.event.listen(engine, "begin", _beginning(begin))
            found.append(engine)
        return found[0], found[1]

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Look at one state of the database."""
        with self._engines[0].connect() as db:
            yield db

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Do `work` in a serial transaction, perhaps one that others' work shares; return after the commit.

        Whoever comes while a transaction is being committed waits; the next one takes all who wait.
        Work that raises is undone alone; it may then be done twice, so it must do nothing but look
        at the database and change it.
        """
        mine: Future[T] = Future()
        self._waiting.append((work, mine))
        while not mine.done():
            with self._writer:
                if not mine.done():
                    self._write_waiting()
        return mine.result()

    def _write_waiting(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_WAITING))]
        try:
            try:
                done = self._transaction(batch, _do)
            except _DATABASE:
                raise  # nobody's work was done, and nobody's would be
            # somebody's work was refused: all of it again, each undone by itself where it must be
            except Exception:
                done = self._transaction(batch, _try)
        except BaseException as problem:
            for _, future in batch:
                future.set_exception(problem)
            return
        for (_, future), (result, failed) in zip(batch, done, strict=True):
            if failed is None:
                future.set_result(result)
            else:
                future.set_exception(failed)

    def _transaction(self, batch: Sequence[Waiting], do: Callable[..., Done]) -> list[Done]:
        with self._engines[1].begin() as db:
            if not self.is_sqlite:
                db.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            db.info["head"] = None
            done = [do(db, work) for work, _ in batch]
            if (at := time.monotonic()) >= self._forget_at:
                self._forget_at = at + CLOCK_SECONDS / 5
                db.execute(_FORGET_NONCES, {"now": now()})
            if db.info["head"] is not None:
                _set(db, "audit", db.info["head"])
        return done

    def _rows(self, query: Any) -> list[Row]:
        with self.reading() as db:
            return _rows(db, query)

    def _one(self, query: Any) -> Row | None:
        return next(iter(self._rows(query)), None)

    def _migrate(self) -> None:
        def work(db: sa.Connection) -> None:
            versions.create(db, checkfirst=True)
            at = db.execute(sa.select(sa.func.max(versions.c.version))).scalar() or 0
            if at > len(MIGRATIONS):
                raise SettingsError(
                    f"The hub's database has version {at} and this program knows "
                    f"{len(MIGRATIONS)}. Nothing was changed. Use the program that wrote it, or a "
                    "newer one."
                )
            for number, migrate in enumerate(MIGRATIONS[at:], start=at + 1):
                migrate(db)
                db.execute(versions.insert().values(version=number, applied=now()))

        self.write(work)

    def _named(self) -> set[str]:
        with self.reading() as db:
            return {
                row[0]
                for table in (files, contributions, releases)
                for row in db.execute(sa.select(table.c.sha256))
            }

    def _filed(self) -> set[str]:
        """Return the digests of what is kept in files."""
        with self.reading() as db:
            return self._named() - {row[0] for row in db.execute(sa.select(bodies.c.sha256))}

    # ------------------------------------------------------------------------------------------- settings, the log

    def setting(self, name: str, make: Callable[[], str]) -> str:
        """Return a setting, made once for all workers."""

        def work(db: sa.Connection) -> str:
            found = _setting(db, name)
            if found is None:
                found = make()
                _set(db, name, found)
            return found

        known = self._one(sa.select(settings).where(settings.c.name == name))
        return str(known["value"]) if known else self.write(work)

    def log(self, actor: str, action: str, study: str | None = None, **facts: Any) -> None:
        """Add an entry to the audit log that belongs to no other change."""
        self.write(lambda db: _log(db, actor, action, study, **facts))

    def audit(
        self, *, after: int = 0, limit: int = 100, study: str | None = None, newest: bool = False
    ) -> list[Row]:
        """Return entries of the audit log, oldest first unless `newest`."""
        query = sa.select(audit).where(audit.c.number > after).limit(limit)
        query = query.order_by(audit.c.number.desc() if newest else audit.c.number)
        rows = self._rows(query if study is None else query.where(audit.c.study == study))
        return [{**row, "facts": json.loads(row["facts"])} for row in rows]

    def verify(self) -> tuple[int, str]:
        """Walk the audit chain and compare every file with its name; return the log's length and head.

        Raises `SettingsError` that names the first entry, or the first file, which is not what it
        was.
        """
        number, previous = 0, GENESIS
        with self.reading() as db:
            for row in db.execute(sa.select(audit).order_by(audit.c.number)).mappings():
                number += 1
                entry = dict(row)
                if (
                    entry["number"] != number
                    or entry["previous"] != previous
                    or entry["hash"] != _digest(entry)
                ):
                    raise SettingsError(
                        f"The audit log was to be verified: entry {number} is missing or was "
                        "changed. Nothing was repaired. Compare with a backup."
                    )
                previous = entry["hash"]
            if (_setting(db, "audit") or f"0 {GENESIS}") != f"{number} {previous}":
                raise SettingsError(
                    f"The audit log was to be verified: entries after {number} are missing. "
                    "Nothing was repaired. Compare with a backup."
                )
        for sha256 in sorted(self._named()):
            found = self.content(sha256)
            there = isinstance(found, bytes) or found.exists()
            if not there or _content_digest(found) != sha256:
                raise SettingsError(
                    f"The hub's files were to be verified: {sha256[:16]}… is missing or damaged. "
                    "Nothing was repaired. Take it from a backup, or ask its site to submit "
                    "again."
                )
        return number, previous

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many rows each table holds, by state where it has one."""
        found: dict[tuple[str, str], int] = {}
        with self.reading() as db:
            for table, column in (
                (studies, "status"), (sites, "status"), (contributions, "state"), (releases, "state")
            ):  # fmt: skip
                state = table.c[column]
                for value, n in db.execute(sa.select(state, sa.func.count()).group_by(state)):
                    found[table.name, str(value)] = int(n)
            found["audit", ""] = int(
                db.execute(sa.select(sa.func.coalesce(sa.func.max(audit.c.number), 0))).scalar_one()
            )
        return found

    # ------------------------------------------------------------------------------------------------- coordinators

    def add_coordinator(self, name: str, password: str, actor: str) -> None:
        """Add a coordinator, or give an old one a new password, which ends all sessions."""

        def work(db: sa.Connection) -> None:
            known = _rows(db, sa.select(coordinators).where(coordinators.c.name == name))
            if known:
                db.execute(
                    coordinators.update()
                    .where(coordinators.c.name == name)
                    .values(password=password)
                )
                db.execute(sessions.delete().where(sessions.c.coordinator == name))
            else:
                row = {"name": name, "password": password, "created": now(), "status": "active"}
                db.execute(coordinators.insert().values(row))
            _log(
                db,
                actor,
                "password changed" if known else "coordinator added",
                None,
                coordinator=name,
            )

        self.write(work)

    def coordinator(self, name: str) -> Row | None:
        """Return a coordinator's row."""
        return self._one(sa.select(coordinators).where(coordinators.c.name == name))

    def add_session(self, token_hash: str, coordinator: str, kind: str, expires: str) -> None:
        """Remember a session by the hash of its token; forget those that have expired."""

        def work(db: sa.Connection) -> None:
            db.execute(sessions.delete().where(sessions.c.expires < now()))
            row = {
                "hash": token_hash,
                "coordinator": coordinator,
                "kind": kind,
                "created": now(),
                "expires": expires,
            }
            db.execute(sessions.insert().values(row))
            _log(db, f"coordinator:{coordinator}", "logged in", None, kind=kind)

        self.write(work)

    def session(self, token_hash: str) -> Row | None:
        """Return a session that has not expired."""
        return self._one(
            sa.select(sessions).where(sessions.c.hash == token_hash, sessions.c.expires > now())
        )

    def end_session(self, token_hash: str) -> None:
        """Forget a session."""
        self.write(lambda db: db.execute(sessions.delete().where(sessions.c.hash == token_hash)))

    # ------------------------------------------------------------------------------------------- studies and files

    def add_study(self, name: str, digest: str, text: str, actor: str) -> Row:
        """Add a study; the same one again changes nothing, another of that name is refused."""

        def work(db: sa.Connection) -> Row:
            known = _rows(
                db,
                sa.select(studies).where((studies.c.name == name) | (studies.c.digest == digest)),
            )
            if known and known[0]["digest"] == digest:
                return known[0]
            if known:
                raise Refusal(
                    "name-taken", f"There is another study {name!r} already; nothing was changed."
                )
            row: Row = {
                "name": name,
                "digest": digest,
                "text": text,
                "status": "open",
                "created": now(),
            }
            row |= {
                "created_by": actor,
                "changes": 0,
                "combined": 0,
                "changed": None,
                "problem": None,
            }
            db.execute(studies.insert().values(row))
            _log(db, actor, "study created", name, digest=digest)
            return row

        return self.write(work)

    def studies(self) -> list[Row]:
        """Return all studies, oldest first."""
        return self._rows(sa.select(studies).order_by(studies.c.created))

    def study(self, name: str) -> Row | None:
        """Return one study's row."""
        return self._one(sa.select(studies).where(studies.c.name == name))

    def close_study(self, name: str, actor: str) -> Row:
        """Take nothing more for a study; releases stay."""

        def work(db: sa.Connection) -> Row:
            row = _study(db, name)
            if row["status"] == "open":
                db.execute(studies.update().where(studies.c.name == name).values(status="closed"))
                _log(db, actor, "study closed", name)
            return {**row, "status": "closed"}

        return self.write(work)

    def add_file(self, sha256: str, size: int, study: str, file: str, actor: str) -> None:
        """Remember a public file that is in the folder already."""

        def work(db: sa.Connection) -> None:
            if not _rows(db, sa.select(files).where(files.c.sha256 == sha256)):
                db.execute(files.insert().values(sha256=sha256, size=size, received=now()))
                _log(db, actor, "public file received", study, file=file, sha256=sha256)
            # A study that could not be combined may have waited for the file.
            waiting = studies.update().where(studies.c.problem.is_not(None))
            db.execute(waiting.values(changes=studies.c.changes + 1, changed=now(), problem=None))

        self.write(work)

    def file(self, sha256: str) -> Row | None:
        """Return the row of a public file, if the hub has it."""
        return self._one(sa.select(files).where(files.c.sha256 == sha256))

    # ------------------------------------------------------------------------------------ invitations, sites, keys

    def invite(
        self,
        study: str,
        code_hash: str,
        expires: str,
        actor: str,
        *,
        site: str | None,
        fetch_only: bool,
    ) -> None:
        """Remember an invitation by the hash of its code."""

        def work(db: sa.Connection) -> None:
            _open_study(db, study)
            row: Row = {
                "hash": code_hash,
                "study": study,
                "site": site,
                "fetch_only": fetch_only,
                "created": now(),
            }
            row |= {"created_by": actor, "expires": expires, "used": None, "used_by": None}
            db.execute(invitations.insert().values(row))
            _log(
                db, actor, "site invited", study, site=site, fetch_only=fetch_only, expires=expires
            )

        self.write(work)

    def invitations(self, study: str) -> list[Row]:
        """Return a study's invitations without their hashes, newest first."""
        shown = [column for column in invitations.c if column.name != "hash"]
        query = sa.select(*shown).where(invitations.c.study == study)
        return self._rows(query.order_by(invitations.c.created.desc()))

    def enrol(self, code_hash: str, site: str, key: str, nonce: str, *, fetch_only: bool) -> Row:
        """Use an invitation once, and remember the site's key in the study it is for."""

        def work(db: sa.Connection) -> Row:
            _spend(db, key, nonce)
            found = next(
                iter(_rows(db, sa.select(invitations).where(invitations.c.hash == code_hash))), None
            )
            if found is None:
                raise Refusal(
                    "invitation", "The invitation does not exist, was used, or has expired."
                )
            study = found["study"]
            known = _rows(db, sa.select(sites).where(sites.c.study == study, sites.c.name == site))
            if found["used_by"] == site and known and known[0]["key"] == key:
                return known[0]  # the answer to the first request was lost
            if found["used"] is not None or found["expires"] <= now():
                raise Refusal(
                    "invitation", "The invitation does not exist, was used, or has expired."
                )
            if found["site"] not in (None, site):
                raise Refusal("invitation", "The invitation is for a site of another name.")
            _open_study(db, study)
            # A revoked site comes back only by an invitation in its own name: its past goes with
            # the name.
            if known and not (known[0]["status"] == "revoked" and found["site"] == site):
                raise Refusal("name-taken", f"There is a site {site!r} in this study already.")
            _new_key(db, study, site, key)
            only = bool(found["fetch_only"] or fetch_only)
            row: Row = {
                "study": study,
                "name": site,
                "key": key,
                "status": "enrolled",
                "fetch_only": only,
            }
            row["enrolled"] = known[0]["enrolled"] if known else now()
            if known:
                db.execute(
                    sites.update().where(sites.c.study == study, sites.c.name == site).values(row)
                )
            else:
                db.execute(sites.insert().values(row))
            invited = invitations.update().where(invitations.c.hash == code_hash)
            db.execute(invited.values(used=now(), used_by=site))
            _log(db, f"site:{site}", "site enrolled", study, key=key, fetch_only=only)
            return row

        return self.write(work)

    def sites(self, study: str) -> list[Row]:
        """Return a study's sites by name."""
        return self._rows(sa.select(sites).where(sites.c.study == study).order_by(sites.c.name))

    def signer(self, study: str, key: str) -> Row:
        """Return the site whose current key this is, or refuse."""
        with self.reading() as db:
            return _signer(db, study, key)

    def spend_nonce(self, key: str, nonce: str, *, seconds: float = NONCE_SECONDS) -> None:
        """Remember a request that changes nothing else, or refuse one that came before."""
        self.write(lambda db: _spend(db, key, nonce, seconds))

    def is_spent(self, key: str, nonce: str) -> bool:
        """Tell whether a nonce was spent."""
        return (
            self._one(sa.select(nonces).where(nonces.c.key == key, nonces.c.nonce == nonce))
            is not None
        )

    def rotate(self, study: str, key: str, new: str, nonce: str) -> Row:
        """Replace a site's key by another that it has proven to hold."""

        def work(db: sa.Connection) -> Row:
            _spend(db, key, nonce)
            site = _signer(db, study, key)
            _new_key(db, study, site["name"], new)
            _end_key(db, study, key, "rotated")
            db.execute(
                sites.update()
                .where(sites.c.study == study, sites.c.name == site["name"])
                .values(key=new)
            )
            _log(db, f"site:{site['name']}", "key rotated", study, old=key, new=new)
            return {**site, "key": new}

        return self.write(work)

    def revoke(self, study: str, site: str, actor: str, *, withdraw: bool) -> Row:
        """End a site's key, and on demand everything it contributed."""

        def work(db: sa.Connection) -> Row:
            known = _rows(db, sa.select(sites).where(sites.c.study == study, sites.c.name == site))
            if not known:
                raise Refusal("not-found", "There is no such site in this study.")
            if known[0]["status"] == "enrolled":
                _end_key(db, study, known[0]["key"], "revoked")
                revoked = sites.update().where(sites.c.study == study, sites.c.name == site)
                db.execute(revoked.values(status="revoked"))
                _log(db, actor, "key revoked", study, site=site, key=known[0]["key"])
            if withdraw:
                for row in _rows(db, _own(study, site).where(contributions.c.state == "accepted")):
                    _withdraw(db, row, actor)
            return {**known[0], "status": "revoked"}

        return self.write(work)

    # ------------------------------------------------------------------------------------------------ contributions

    def sender(self, study: str, key: str) -> tuple[Row, list[Row]]:
        """Return the site whose current key this is and what it submitted before, newest first, or refuse."""
        with self.reading() as db:
            return _sender(db, study, key)

    def content(self, sha256: str) -> Path | bytes:
        """Return the bytes of this digest if they are kept in the database, else the file that has them, or would."""
        with self.reading() as db:
            found = db.execute(_BODY, {"of": sha256}).scalar()
        return self.files.path(sha256) if found is None else bytes(found)

    def submit(
        self, row: Row, key: str, nonce: str, content: bytes | None = None
    ) -> tuple[Row, bool]:
        """Take a contribution whose file is durable, or its content; return its row, and whether it is new.

        The same digest again changes nothing. A newer sequence number supersedes, an older one is
        refused.
        """
        study, site = row["study"], row["site"]

        def work(db: sa.Connection) -> tuple[Row, bool]:
            _spend(db, key, nonce)
            enrolled, before = _sender(
                db, study, key
            )  # again: it may have been revoked while the file was checked
            if enrolled["name"] != site:
                raise Refusal(
                    "wrong-site", "The contribution names another site than the one that sent it."
                )
            same = standing(row, enrolled, before)
            if same is not None:
                return same, False
            at, n_superseded = now(), 0
            if before:
                n_superseded = db.execute(
                    _SUPERSEDE, {"of_study": study, "of_site": site, "at": at}
                ).rowcount
            full = {**row, "state": "accepted", "received": at, "changed": at}
            db.execute(_ADD_CONTRIBUTION, full)
            if content is not None:
                db.execute(_ADD_BODY, {"sha256": row["sha256"], "content": content})
            db.execute(_MOVE, {"of_study": study, "at": at})
            facts = {
                "digest": row["digest"],
                "sequence": row["sequence"],
                "supersedes": n_superseded,
            }
            _log(db, f"site:{site}", "contribution accepted", study, **facts)
            return _read(full), True

        return self.write(work)

    def withdraw(self, study: str, key: str, nonce: str) -> Row:
        """Take what a site contributed out of all that follows; once more changes nothing."""

        def work(db: sa.Connection) -> Row:
            _spend(db, key, nonce)
            site = _signer(db, study, key)["name"]
            newest = next(
                iter(_rows(db, _own(study, site).order_by(contributions.c.sequence.desc()))), None
            )
            if newest is None:
                raise Refusal("not-found", "The site has contributed nothing to this study.")
            return _read(
                newest if newest["state"] == "withdrawn" else _withdraw(db, newest, f"site:{site}")
            )

        return self.write(work)

    def contributions(
        self, study: str, *, site: str | None = None, state: str | None = None
    ) -> list[Row]:
        """Return a study's contributions, or one site's, in the order they were received."""
        query = (
            sa.select(contributions)
            .where(contributions.c.study == study)
            .order_by(contributions.c.received)
        )
        query = query if site is None else query.where(contributions.c.site == site)
        return [
            _read(row)
            for row in self._rows(
                query if state is None else query.where(contributions.c.state == state)
            )
        ]

    # ----------------------------------------------------------------------------------------- combining, releases

    def due(self) -> list[Row]:
        """Return the studies whose members changed since they were last combined."""
        return self._rows(sa.select(studies).where(studies.c.changes > studies.c.combined))

    def claim(self, study: str, worker: str, seconds: float) -> tuple[Row, list[Row]] | None:
        """Return the study's row and all its contributions if `worker` may combine it now.

        Others get None until the claim ends, or runs out because its worker died.
        """

        def work(db: sa.Connection) -> tuple[Row, list[Row]] | None:
            row = _study(db, study)
            held = _rows(db, sa.select(claims).where(claims.c.study == study))
            if held and held[0]["until"] > now():
                return None
            db.execute(claims.delete().where(claims.c.study == study))
            db.execute(
                claims.insert().values(study=study, worker=worker, until=now(seconds=seconds))
            )
            every = sa.select(contributions).where(contributions.c.study == study)
            return row, [_read(one) for one in _rows(db, every.order_by(contributions.c.site))]

        return self.write(work)

    def renew(self, study: str, worker: str, seconds: float) -> None:
        """Keep a claim while the work goes on."""

        def work(db: sa.Connection) -> None:
            held = claims.update().where(claims.c.study == study, claims.c.worker == worker)
            db.execute(held.values(until=now(seconds=seconds)))

        self.write(work)

    def publish(self, row: Row, digests: Sequence[str], worker: str) -> Row:
        """Add a release whose file is durable, and end the claim under which it was made."""
        study = row["study"]

        def work(db: sa.Connection) -> Row:
            self._holds(db, study, worker)
            # A member that was withdrawn meanwhile must not come back with the release that it was
            # part of.
            states = _rows(
                db, sa.select(contributions.c.state).where(contributions.c.digest.in_(digests))
            )
            gone = any(one["state"] == "withdrawn" for one in states)
            current = releases.update().where(
                releases.c.study == study, releases.c.state == "current"
            )
            db.execute(current.values(state="superseded"))
            full = {**row, "state": "withdrawn" if gone else "current", "created": now()}
            db.execute(
                releases.insert().values({**full, "guarantee": json.dumps(row["guarantee"])})
            )
            db.execute(
                members.insert(),
                [{"release": row["digest"], "contribution": one} for one in digests],
            )
            combined = studies.update().where(studies.c.name == study)
            db.execute(combined.values(combined=row["change"], problem=None))
            db.execute(claims.delete().where(claims.c.study == study))
            _log(
                db,
                "hub",
                "release published",
                study,
                digest=row["digest"],
                sequence=row["sequence"],
            )
            return full

        return self.write(work)

    def give_up(self, study: str, change: int, worker: str, problem: str | None) -> None:
        """End a claim without a release: too few sites, or `problem`, which only another change can solve."""

        def work(db: sa.Connection) -> None:
            self._holds(db, study, worker)
            combined = studies.update().where(studies.c.name == study, studies.c.combined <= change)
            db.execute(combined.values(combined=change, problem=problem))
            db.execute(claims.delete().where(claims.c.study == study))
            if problem is not None:
                _log(db, "hub", "combining failed", study, problem=problem)

        self.write(work)

    def unclaim(self, study: str, worker: str) -> None:
        """End a claim and leave the work to whoever comes next."""
        self.write(
            lambda db: db.execute(
                claims.delete().where(claims.c.study == study, claims.c.worker == worker)
            )
        )

    @staticmethod
    def _holds(db: sa.Connection, study: str, worker: str) -> None:
        held = _rows(
            db, sa.select(claims).where(claims.c.study == study, claims.c.worker == worker)
        )
        if not held:
            raise Refusal("unavailable", "Another worker has taken over this study.")

    def next_release(self, study: str) -> int:
        """Return the number that the study's next release gets."""
        query = sa.select(sa.func.coalesce(sa.func.max(releases.c.sequence), 0)).where(
            releases.c.study == study
        )
        with self.reading() as db:
            return int(db.execute(query).scalar_one()) + 1

    def releases(self, study: str) -> list[Row]:
        """Return a study's releases, newest first."""
        query = (
            sa.select(releases)
            .where(releases.c.study == study)
            .order_by(releases.c.sequence.desc())
        )
        return [_read(row) for row in self._rows(query)]

    def release(
        self, study: str, sequence: int | None = None, *, request: str | None = None
    ) -> Row | None:
        """Return the current release, or the one with this number or idempotency key."""
        query = sa.select(releases).where(releases.c.study == study)
        if request is not None:
            query = query.where(releases.c.request == request)
        elif sequence is not None:
            query = query.where(releases.c.sequence == sequence)
        else:
            query = query.where(releases.c.state == "current")
        found = self._one(query)
        return None if found is None else _read(found)

    # --------------------------------------------------------------------------------------- what all workers share

    def remembered(self, name: str) -> str | None:
        """Return a fact about the whole hub that some worker wrote down."""
        with self.reading() as db:
            return _setting(db, name)

    def remember(self, name: str, value: str) -> None:
        """Write a fact about the whole hub down."""
        self.write(lambda db: _set(db, name, value))

    def agree(self, name: str, value: str) -> str:
        """Return what the first worker said of this name; `value` if this is the first."""

        def work(db: sa.Connection) -> str:
            known = _setting(db, name)
            if known is None:
                _set(db, name, value)
            return known or value

        return self.remembered(name) or self.write(work)

    def use_bucket(self, address: str, actor: str) -> int:
        """Copy all files to a bucket and keep them there from the next start on; return how many."""
        bucket, named = Bucket(self.folder / "files", address), self._filed()
        bucket.check(named)
        for sha256 in sorted(named):
            arrived = bucket.new()
            self.files.copy(sha256, arrived)
            bucket.keep(arrived, sha256)

        def work(db: sa.Connection) -> None:
            _set(db, "bucket", address)
            _log(db, actor, "files moved to a bucket", None, bucket=address)

        self.write(work)
        return len(named)

    # ---------------------------------------------------------------------------------------------- backup, restore

    def backup(self, target: Path) -> None:
        """Write one state of all rows into an SQLite file in a folder, whatever the database is, while the hub runs.

        The copy names no bucket: it gets all files itself, and must never sweep one that the
        running hub uses.
        """
        if self.is_sqlite:
            with (
                closing(sqlite3.connect(self.url.database or "", timeout=60)) as source,
                closing(sqlite3.connect(target / "hub.sqlite")) as copy,
            ):
                source.backup(copy)
                with copy:
                    copy.execute("DELETE FROM settings WHERE name = 'bucket'")
        else:
            with closing(Store(target)) as filled:
                filled.fill(self)

    def fill(self, source: Store) -> None:
        """Take over all rows of another store in place of one's own."""
        reading = source._engines[0]
        if not source.is_sqlite:  # where one state is what every statement sees anyway
            reading = reading.execution_options(isolation_level="REPEATABLE READ")
        with reading.connect() as one, self._engines[1].begin() as other:
            for table in reversed(tables.sorted_tables):
                other.execute(table.delete())
            for table in tables.sorted_tables:
                found = (
                    one.execution_options(stream_results=True).execute(sa.select(table)).mappings()
                )
                for part in found.partitions(
                    50
                ):  # of bodies, which are the largest rows, a few megabytes
                    other.execute(table.insert(), [dict(row) for row in part])
            other.execute(settings.delete().where(settings.c.name == "bucket"))

    def copy_files(self, target: Path) -> None:
        """Copy all files, after the rows: a file is there before its row, so that no row of the copy lacks one."""
        for sha256 in self._filed():
            self.files.copy(sha256, target / "files" / sha256[:2] / sha256[2:])

    def after_restore(self, datasets: Sequence[str], actor: str) -> None:
        """Void what an old copy must not grant: invitations, sessions, and noise until someone allows it again."""

        def work(db: sa.Connection) -> None:
            db.execute(sessions.delete())
            db.execute(claims.delete())
            unused = invitations.update().where(invitations.c.used.is_(None))
            db.execute(unused.values(used=now(), used_by=""))
            for dataset in datasets:
                _set(db, f"restored {dataset}", now())
            _log(db, actor, "restored from a backup", None)

        self.write(work)

    def may_draw(self, dataset: str) -> bool:
        """Tell whether the ledger's record of a study is known to be whole."""
        return (
            self._one(sa.select(settings).where(settings.c.name == f"restored {dataset}")) is None
        )

    def let_draw(self, dataset: str) -> None:
        """Remember that someone has looked at a restored ledger and allowed a budget anew."""
        self.write(
            lambda db: db.execute(settings.delete().where(settings.c.name == f"restored {dataset}"))
        )


# ------------------------------------------------------------------------------------------------ parts of transactions


def _do(db: sa.Connection, work: Callable[[sa.Connection], Any]) -> Done:
    return work(db), None


def _try(db: sa.Connection, work: Callable[[sa.Connection], Any]) -> Done:
    """Do work that may be refused; then nothing of it stays."""
    head, part = db.info["head"], db.begin_nested()
    try:
        result = work(db)
        part.commit()
    except _DATABASE:
        raise
    except Exception as problem:
        part.rollback()
        db.info["head"] = head
        return None, problem
    return result, None


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself
    for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {setting}")


def _beginning(statement: str) -> Callable[[sa.Connection], None]:
    return lambda db: _ignore(db.exec_driver_sql(statement))


def _ignore(_: Any) -> None:
    return None


def _rows(db: sa.Connection, query: Any, **values: Any) -> list[Row]:
    return [dict(row) for row in db.execute(query, values).mappings()]


def _read(row: Row) -> Row:
    return {**row, "guarantee": json.loads(row["guarantee"])}


def _setting(db: sa.Connection, name: str) -> str | None:
    return db.execute(_SETTING, {"of_name": name}).scalar()


def _set(db: sa.Connection, name: str, value: str) -> None:
    if not db.execute(_SET, {"of_name": name, "to": value}).rowcount:
        db.execute(settings.insert().values(name=name, value=value))


def _log(db: sa.Connection, actor: str, action: str, study: str | None, **facts: Any) -> None:
    """Append to the chain; the head is written down with the transaction, so that a shortened log is noticed."""
    number, previous = (db.info["head"] or _setting(db, "audit") or f"0 {GENESIS}").split()
    entry: Row = {
        "number": int(number) + 1,
        "time": now(),
        "actor": actor,
        "action": action,
        "study": study,
    }
    entry |= {"facts": canonical(facts), "previous": previous}
    entry["hash"] = _digest(entry)
    db.execute(_ADD_ENTRY, entry)
    db.info["head"] = f"{entry['number']} {entry['hash']}"


def _digest(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        canonical({k: v for k, v in entry.items() if k != "hash"}).encode()
    ).hexdigest()


def _content_digest(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _study(db: sa.Connection, name: str) -> Row:
    found = _rows(db, sa.select(studies).where(studies.c.name == name))
    if not found:
        raise Refusal("not-found", "There is no such study.")
    return found[0]


def _open_study(db: sa.Connection, name: str) -> Row:
    row = _study(db, name)
    if row["status"] != "open":
        raise Refusal("study-closed", f"The study {name!r} is closed.")
    return row


def _own(study: str, site: str) -> Any:
    return sa.select(contributions).where(
        contributions.c.study == study, contributions.c.site == site
    )


def _signer(db: sa.Connection, study: str, key: str) -> Row:
    found = _rows(db, _SIGNER, study=study, key=key)
    if found and found[0]["status"] == "enrolled":
        return found[0]
    if _rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("key-revoked", "The key was replaced or revoked.")
    raise Refusal("not-authenticated", "The key is not enrolled in this study.")


def _sender(db: sa.Connection, study: str, key: str) -> tuple[Row, list[Row]]:
    found = _rows(db, _SENDER, study=study, key=key)
    if not found or found[0]["status"] != "enrolled":
        return _signer(db, study, key), []  # says why not
    names = [column.name for column in contributions.c]
    return found[0], [
        {name: row[f"its_{name}"] for name in names}
        for row in found
        if row["its_digest"] is not None
    ]


def _new_key(db: sa.Connection, study: str, site: str, key: str) -> None:
    if _rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("name-taken", "The key was enrolled in this study before.")
    row: Row = {
        "study": study,
        "key": key,
        "site": site,
        "added": now(),
        "ended": None,
        "reason": None,
    }
    db.execute(keys.insert().values(row))


def _end_key(db: sa.Connection, study: str, key: str, reason: str) -> None:
    ended = keys.update().where(keys.c.study == study, keys.c.key == key, keys.c.ended.is_(None))
    db.execute(ended.values(ended=now(), reason=reason))


def _spend(db: sa.Connection, key: str, nonce: str, seconds: float = NONCE_SECONDS) -> None:
    """Remember a nonce for as long as its request could be sent again."""
    try:
        db.execute(_ADD_NONCE, {"key": key, "nonce": nonce, "expires": now(seconds=seconds)})
    except sa.exc.IntegrityError:
        raise Refusal("replayed", "The request came before.") from None


def standing(row: Row, enrolled: Row, before: Sequence[Row]) -> Row | None:
    """Compare a contribution with what its site submitted before, newest first.

    Return the row of one that is there already, refuse what will not be taken, or return None.
    """
    same = next((one for one in before if one["digest"] == row["digest"]), None)
    if same is not None:
        if same["state"] == "withdrawn":
            raise Refusal("stale", "The contribution was withdrawn.")
        return _read(same)
    if enrolled["study_status"] != "open":
        raise Refusal("study-closed", f"The study {row['study']!r} is closed.")
    if enrolled["fetch_only"]:
        raise Refusal("not-allowed", "The site joined this study only to fetch its releases.")
    if before and before[0]["sequence"] >= row["sequence"]:
        newest = before[0]["sequence"]
        raise Refusal(
            "stale",
            f"The contribution has number {row['sequence']}, and number {newest} was received.",
        )
    return None


def _withdraw(db: sa.Connection, row: Row, actor: str) -> Row:
    db.execute(
        contributions.update()
        .where(contributions.c.digest == row["digest"])
        .values(state="withdrawn", changed=now())
    )  # fmt: skip
    # No release that rests on the site stays on offer, nor one that rests on what it contributed
    # before.
    own = sa.select(contributions.c.digest).where(
        contributions.c.study == row["study"], contributions.c.site == row["site"]
    )
    containing = sa.select(members.c.release).where(members.c.contribution.in_(own))
    db.execute(releases.update().where(releases.c.digest.in_(containing)).values(state="withdrawn"))
    db.execute(_MOVE, {"of_study": row["study"], "at": now()})
    _log(db, actor, "contribution withdrawn", row["study"], site=row["site"], digest=row["digest"])
    return {**row, "state": "withdrawn"}
