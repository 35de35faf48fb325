"""Everything the hub remembers: rows in one database, and bytes in a content-addressed folder.

Three rules let a killed hub recover by itself. Bytes are durable before, or with, the row that
names them. The hub answers after the commit. Every change, its audit entry and its nonce are one
transaction.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import sqlalchemy as sa

from consilience.errors import SettingsError
from consilience.hub.store.audit import AuditLog, Chain, append_entry
from consilience.hub.store.database import set_setting, writing
from consilience.hub.store.files import Bucket, Files
from consilience.hub.store.releases import Releases
from consilience.hub.store.sites import Sites
from consilience.hub.store.studies import Studies
from consilience.hub.store.tables import (
    audit,
    bodies,
    contributions,
    files,
    releases,
    sites,
    studies,
)
from consilience.study.records import file_digest

_BODY = sa.select(bodies.c.content).where(bodies.c.sha256 == sa.bindparam("of"))


class Store(AuditLog, Studies, Sites, Releases):
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
        with self.reading() as db:
            content = db.execute(_BODY, {"of": sha256}).scalar()
        return self.files.path(sha256) if content is None else bytes(content)

    def _named_digests(self) -> set[str]:
        """Return the digests that some row names."""
        tables = (files, contributions, releases)
        named = sa.union(*(sa.select(table.c.sha256) for table in tables))
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
            if _content_digest(self.content(sha256)) != sha256:
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


def _content_digest(content: Path | bytes) -> str | None:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    return file_digest(content) if content.exists() else None
