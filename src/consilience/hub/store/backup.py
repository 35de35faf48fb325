"""Copies of a store: made while the hub runs, and put back on any database."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, now, set_setting
from consilience.hub.store.releases import restored_setting
from consilience.hub.store.store import Store
from consilience.hub.store.tables import claims, invitations, sessions, settings, tables


def backup_rows(store: Store, target: Path) -> None:
    """Write one state of all rows into an SQLite file in a folder, while the hub runs.

    The copy names no bucket: it gets all files itself, and must never remove one from a bucket
    that the running hub uses.
    """
    if not store.is_sqlite:
        with closing(Store(target)) as copy:
            copy_rows(store, copy)
        return
    with (
        closing(sqlite3.connect(store.url.database or "", timeout=60)) as source,
        closing(sqlite3.connect(target / "hub.sqlite")) as rows,
    ):
        source.backup(rows)
        with rows:
            rows.execute("DELETE FROM settings WHERE name = 'bucket'")


def copy_rows(source: Database, target: Database) -> None:
    """Replace all rows of `target` by those of `source`."""
    with source.snapshot() as old, target.replacing() as new:
        for table in reversed(tables.sorted_tables):
            new.execute(table.delete())
        for table in tables.sorted_tables:
            rows = old.execution_options(stream_results=True).execute(sa.select(table)).mappings()
            for part in rows.partitions(50):  # bodies are the largest rows: a few megabytes
                new.execute(table.insert(), [dict(row) for row in part])
        new.execute(settings.delete().where(settings.c.name == "bucket"))


def copy_files(store: Store, target: Path) -> None:
    """Copy all files.

    Call this after the rows were copied: a file is stored before its row, so no row of the copy
    lacks its file.
    """
    for sha256 in store.filed_digests():
        store.files.copy(sha256, target / "files" / sha256[:2] / sha256[2:])


def void_old_rights(store: Store, datasets: Sequence[str], actor: str) -> None:
    """Void what an old copy must not grant.

    These are invitations, sessions, and noise until someone allows a budget again.
    """

    def void(db: sa.Connection) -> None:
        db.execute(sessions.delete())
        db.execute(claims.delete())
        unused = invitations.update().where(invitations.c.used.is_(None))
        db.execute(unused.values(used=now(), used_by=""))
        for dataset in datasets:
            set_setting(db, restored_setting(dataset), now())
        append_entry(db, actor, "restored from a backup", None)

    store.write(void)
