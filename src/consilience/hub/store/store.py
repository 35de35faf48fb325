"""Everything the hub remembers: rows in one database, and bytes in a content-addressed folder.

Three rules let a killed hub recover by itself. Bytes are durable before, or with, the row that
names them. The hub answers after the commit. Every change, its audit entry and its nonce are one
transaction.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import sqlalchemy as sa

from consilience.errors import SettingsError
from consilience.hub.store.accounts import Accounts
from consilience.hub.store.audit import AuditLog, Chain, append_entry
from consilience.hub.store.blind import Blind
from consilience.hub.store.database import Database, fetch_row, now, set_setting, writing
from consilience.hub.store.drafts import Drafts
from consilience.hub.store.factors import Factors
from consilience.hub.store.files import Bucket, Files, is_whole
from consilience.hub.store.sites import Sites
from consilience.hub.store.studies import Studies, restored_setting
from consilience.hub.store.tables import (
    audit,
    bodies,
    claims,
    contributions,
    drafts,
    files,
    invitations,
    known_addresses,
    openings,
    releases,
    sessions,
    settings,
    sites,
    studies,
    tables,
)
from consilience.protocol import Refusal
from consilience.study.records import file_digest

_BODY = sa.select(bodies.c.content).where(bodies.c.sha256 == sa.bindparam("of"))


class Store(AuditLog, Accounts, Factors, Studies, Sites, Blind, Drafts):
    """Open the hub's database and folder, or create them.

    Opening brings the tables up to date and removes files that a crash left behind. Any number of
    processes may share one database and one folder. The statements are grouped by topic in the
    modules of the base classes.
    """

    def __init__(
        self, folder: str | os.PathLike[str], url: str | None = None, *, sweep_after: float = 3600.0
    ) -> None:
        super().__init__(folder, url)
        try:
            self.migrate()
            bucket, place = self.remembered("bucket"), self.folder / "files"
            self.files = Files(place) if bucket is None else Bucket(place, bucket)
            self.swept = self.files.sweep(self._named_digests(), sweep_after)
        except BaseException:
            self.close()
            raise

    def content(self, sha256: str) -> Path | bytes:
        """Return the bytes with this digest if the database has them, else the path of the file."""
        content = self._content(sha256)
        return content if isinstance(content, bytes) else self.file_path(sha256)

    def _content(self, sha256: str) -> Path | bytes:
        """Return the same, or the path that the file would have."""
        with self.reading() as db:
            content = db.execute(_BODY, {"of": sha256}).scalar()
        return self.files.path(sha256) if content is None else bytes(content)

    def file_path(self, sha256: str) -> Path:
        """Return the path of a file that a row names; refuse one that was removed or changed."""
        path = self.files.path(sha256)
        if not is_whole(path, sha256):
            said = "is damaged" if path.exists() else "is missing"
            raise Refusal(
                "unavailable",
                f"The hub's file {sha256[:12]}… {said}. Its operator has to put it back, from a "
                "backup or a copy.",
            )
        return path

    @writing
    def remove_unnamed(self, db: sa.Connection, sha256: str) -> None:
        """Remove a file unless a row names it; no row is added meanwhile."""
        for table in (files, contributions, releases, openings):
            if fetch_row(db, sa.select(table.c.sha256).where(table.c.sha256 == sha256)) is not None:
                return
        with suppress(OSError):  # the next start removes what is left
            self.files.remove(sha256)

    def _named_digests(self) -> set[str]:
        """Return the digests of the bytes that some row says the hub has."""
        holders = (files, contributions, releases, openings)
        queries = {table: sa.select(table.c.sha256) for table in holders}
        for table in (contributions, releases):
            queries[table] = queries[table].where(table.c.kept)
        named = sa.union(*queries.values())
        return {row["sha256"] for row in self.fetch_all(named)}

    def filed_digests(self) -> set[str]:
        """Return the digests of what is kept in files, not in the database."""
        in_database = {row["sha256"] for row in self.fetch_all(sa.select(bodies.c.sha256))}
        return self._named_digests() - in_database

    def verify(self) -> tuple[int, str]:
        """Walk the audit log and compare every file with its digest.

        Return the log's length and head. Raise `SettingsError` that names the first entry, or the
        first file, that is missing or was changed.
        """
        chain = Chain()
        verdict = chain.verify(self)
        if verdict.broken is not None:
            raise SettingsError(
                f"The audit log does not hold: entry {verdict.broken} is missing or was changed. "
                "Nothing was repaired. Compare the database with a backup."
            )
        for sha256 in sorted(self._named_digests()):
            is_whole = _content_digest(self._content(sha256)) == sha256
            if not is_whole and sha256 in self._named_digests():  # not forgotten meanwhile
                raise SettingsError(
                    f"The hub's file {sha256[:16]}… is missing or damaged. Nothing was repaired. "
                    "Restore it from a backup, or ask its site to submit it again."
                )
        return chain.number, chain.head

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of rows of each table, by state where it has one."""
        states = (studies.c.status, sites.c.status, contributions.c.state, releases.c.state)
        with self.reading() as db:
            newest = db.execute(sa.select(sa.func.max(audit.c.number))).scalar()
            counts = {
                (state.table.name, str(value)): int(n)
                for state in states
                for value, n in db.execute(sa.select(state, sa.func.count()).group_by(state))
            }
        return {**counts, ("audit", ""): newest or 0}

    def use_bucket(self, address: str, actor: str) -> int:
        """Copy all files to a bucket, and use it from the next start on; return how many."""
        bucket, digests = Bucket(self.folder / "files", address), self.filed_digests()
        bucket.check(digests)
        for sha256 in sorted(digests):
            arrived = bucket.new()
            self.files.copy(sha256, arrived)
            bucket.keep(arrived, sha256)
        self._name_bucket(address, actor)
        return len(digests)

    @writing
    def _name_bucket(self, db: sa.Connection, address: str, actor: str) -> None:
        set_setting(db, "bucket", address)
        append_entry(db, actor, "files moved to a bucket", None, bucket=address)

    # ------------------------------------------------------------------------------------- copies

    def copy_to(self, target: Path) -> None:
        """Write one state of all rows, and all files, into a folder while the hub runs.

        The copy names no bucket: it gets all files itself, and must never remove one from a bucket
        that the running hub uses. Files are copied after the rows: a file is stored before its row,
        so no row of the copy lacks its file, except one that the hub forgot meanwhile.
        """
        if self.is_sqlite:
            (target / "hub.sqlite").touch(mode=0o600)
            with (
                closing(sqlite3.connect(self.url.database or "", timeout=60)) as source,
                closing(sqlite3.connect(target / "hub.sqlite")) as rows,
            ):
                source.backup(rows)
                with rows:
                    rows.execute("DELETE FROM settings WHERE name = 'bucket'")
        else:
            with closing(Store(target)) as copy:
                copy.take_rows(self)
        for sha256 in self.filed_digests():
            with suppress(FileNotFoundError):  # forgotten meanwhile, or `verify` will tell
                self.files.copy(sha256, target / "files" / sha256[:2] / sha256[2:])
        with closing(Store(target)) as copy:
            forgotten = copy._named_digests() - self._named_digests()
            if forgotten:
                copy._forget(forgotten)

    @writing
    def _forget(self, db: sa.Connection, digests: set[str]) -> None:
        """Note that the bytes with these digests are not kept."""
        for table in (contributions, releases):
            db.execute(table.update().where(table.c.sha256.in_(digests)).values(kept=False))

    def take_rows(self, source: Database) -> None:
        """Replace all rows by those of `source`, outside the queue of writes."""
        with source.snapshot() as old, self._engines[1].begin() as new:
            for table in reversed(tables.sorted_tables):
                new.execute(table.delete())
            old = old.execution_options(stream_results=True)
            for table in tables.sorted_tables:
                rows = old.execute(sa.select(table)).mappings()
                for part in rows.partitions(50):  # bodies are the largest rows: a few megabytes
                    new.execute(table.insert(), [dict(row) for row in part])
            new.execute(settings.delete().where(settings.c.name == "bucket"))

    @writing
    def void_old_rights(self, db: sa.Connection, datasets: Sequence[str], actor: str) -> None:
        """Void what an old copy must not grant.

        These are invitations, sessions, known addresses, links of drafts, and noise until someone
        allows a budget again.
        """
        db.execute(sessions.delete())
        db.execute(known_addresses.delete())
        db.execute(drafts.update().values(link=None))
        db.execute(claims.delete())
        unused = invitations.update().where(invitations.c.used.is_(None))
        db.execute(unused.values(used=now(), used_by=""))
        for dataset in datasets:
            set_setting(db, restored_setting(dataset), now())
        append_entry(db, actor, "restored from a backup", None)


def _content_digest(content: Path | bytes) -> str | None:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    return file_digest(content) if content.exists() else None
