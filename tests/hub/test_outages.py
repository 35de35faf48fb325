"""What is away is named as what it is."""

import errno
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from consilience.hub.outages import OUTAGES, describe_outage


def test_a_full_disk_is_named_whoever_finds_it(tmp_path: Path) -> None:
    """An operator who reads that a database does not answer looks in the wrong place."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'hub.sqlite'}")
    with engine.connect() as db:
        db.execute(sa.text("CREATE TABLE rows (bytes BLOB)"))
        db.execute(sa.text("PRAGMA max_page_count = 3"))
        with pytest.raises(OperationalError) as full:
            db.execute(sa.text("INSERT INTO rows VALUES (zeroblob(1000000))"))
    engine.dispose()
    assert full.value.orig.sqlite_errorcode == sqlite3.SQLITE_FULL  # type: ignore[union-attr]

    class DiskFull(Exception):
        sqlstate = "53100"

    for problem in (
        full.value,
        OperationalError("INSERT", {}, DiskFull()),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
    ):
        assert isinstance(problem, OUTAGES)
        assert describe_outage(problem) == (
            "The disk of the hub or of its database is full; its operator has to make room."
        )


def test_whatever_else_is_away_is_not_called_a_full_disk() -> None:
    for problem, said in (
        (OperationalError("SELECT", {}, Exception()), "The hub's database does not answer."),
        (OSError(errno.EIO, "I/O error"), "The hub's disk or its bucket does not answer."),
        (OSError("gone"), "The hub's disk or its bucket does not answer."),
    ):
        assert describe_outage(problem) == said
