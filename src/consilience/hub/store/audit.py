"""The audit log: a hash chain, so that no entry can be changed or removed unnoticed.

Every entry holds the hash of the one before it. The number and hash of the newest entry, the head,
are also kept apart from the log, so that a log that was cut short is noticed too.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from consilience.files.sealed import canonical
from consilience.hub.store.database import Database, Row, Statement, get_setting, now
from consilience.hub.store.tables import audit

GENESIS = "0" * 64
MOST_EXPORTED = 1_000  # entries that are in memory at once
MOST_WALKED = 5_000  # entries that one look at the dashboard verifies
_ADD_ENTRY = Statement(audit.insert())


def append_entry(
    db: sa.Connection, actor: str, action: str, study: str | None, **facts: object
) -> None:
    """Append an entry in a write transaction, which stores the new head when it is committed."""
    number, previous = (db.info["head"] or get_setting(db, "audit") or f"0 {GENESIS}").split()
    entry: Row = {
        "number": int(number) + 1,
        "time": now(),
        "actor": actor,
        "action": action,
        "study": study,
        "facts": canonical(facts),
        "previous": previous,
    }
    entry["hash"] = entry_hash(entry)
    _ADD_ENTRY.change(db, **entry)
    db.info["head"] = f"{entry['number']} {entry['hash']}"


def entry_hash(entry: Mapping[str, object]) -> str:
    """Return the hash that an entry must have."""
    text = canonical({name: value for name, value in entry.items() if name != "hash"})
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Verdict:
    """How many entries were verified, and the first one that is missing or was changed."""

    verified: int
    total: int
    broken: int | None = None
    since: str | None = None  # when the walk began at the first entry

    @property
    def whole(self) -> bool:
        """Whether all entries were verified, up to the head that is kept apart from the log."""
        return self.broken is None and self.verified == self.total


class Chain:
    """Walks the audit log and remembers how far it came, so that later looks cost less."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def forget(self) -> None:
        """Start again from the first entry."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        self.number, self.head, self.since = 0, GENESIS, now()

    def verify(
        self, database: Database, *, most: int | None = None, again: Collection[int] = ()
    ) -> Verdict:
        """Verify what was added since the last look, at most `most` entries of it.

        The entries numbered `again` are verified whether or not an earlier look came past them:
        they may have been changed since.
        """
        with self._lock, database.snapshot() as db:
            if self.number == 0:
                self._start()
            stated, head = (get_setting(db, "audit") or f"0 {GENESIS}").split()
            total, number, previous, walked = int(stated), self.number, self.head, 0
            query = sa.select(audit).where(audit.c.number > number).order_by(audit.c.number)
            for row in db.execute(query.limit(most)).mappings():
                entry = dict(row)
                if (
                    entry["number"] != number + 1
                    or entry["previous"] != previous
                    or entry["hash"] != entry_hash(entry)
                ):
                    return Verdict(number, total, number + 1)
                number, previous, walked = number + 1, entry["hash"], walked + 1
            self.number, self.head = number, previous
            broken = _find_broken(db, again, int(stated), head)
            if broken is not None:
                self._start()  # what was verified no longer holds
                return Verdict(0, total, broken)
        is_at_end = most is None or walked < most or number >= total
        if is_at_end and (number, previous) != (total, head):
            return Verdict(number, total, min(number, total) + 1)
        return Verdict(number, total, since=self.since)


def _find_broken(db: sa.Connection, numbers: Collection[int], total: int, head: str) -> int | None:
    """Return the first entry among these, or next to one, that is missing or does not fit."""
    wanted = sorted({each for n in numbers for each in (n, n + 1) if each <= total})
    near = {each for n in wanted for each in (n - 1, n)}
    query = sa.select(audit).where(audit.c.number.in_(near))
    entries = {row["number"]: dict(row) for row in db.execute(query).mappings()}
    hashes = {0: GENESIS, **{n: entry["hash"] for n, entry in entries.items()}}
    for n in wanted:
        entry = entries.get(n)
        if (
            entry is None
            or entry["previous"] != hashes.get(n - 1)
            or entry["hash"] != entry_hash(entry)
        ):
            return n
    return total if total in wanted and hashes[total] != head else None


class AuditLog(Database):
    """What is read from and added to the audit log."""

    def log(self, actor: str, action: str, study: str | None = None, **facts: object) -> None:
        """Add an entry that belongs to no other change."""
        self.write(lambda db: append_entry(db, actor, action, study, **facts))

    def audit(self, *, after: int = 0, limit: int = 100) -> list[Row]:
        """Return entries of the audit log, oldest first."""
        query = sa.select(audit).where(audit.c.number > after).order_by(audit.c.number)
        rows = self.fetch_all(query.limit(limit))
        return [{**row, "facts": json.loads(row["facts"])} for row in rows]

    def audit_csv(self, study: str | None = None) -> Iterator[str]:
        """Yield the audit log as CSV, oldest first, in pieces; or what it says of one study.

        A value that a spreadsheet would take for a formula begins with an apostrophe.
        """
        query = sa.select(audit).order_by(audit.c.number)
        if study is not None:
            query = query.where(audit.c.study == study)
        number, columns = 0, [column.name for column in audit.columns]
        yield ",".join(columns) + "\r\n"
        while rows := self.fetch_all(query.where(audit.c.number > number).limit(MOST_EXPORTED)):
            number, text = rows[-1]["number"], io.StringIO()
            csv.writer(text).writerows([_cell(row[name]) for name in columns] for row in rows)
            yield text.getvalue()


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
