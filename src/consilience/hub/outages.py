"""What the hub needs and may not have for a while: a later attempt may work, whoever makes it.

Nothing that a member, a study or a request can cause is on this list, and every other exception is
a mistake of ours.
"""

from __future__ import annotations

import errno
import sqlite3

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection


class Outage(Exception):
    """Something is away; the text is a sentence that says what."""


class Ended(Outage):
    """A process ended by itself, or something else ended it, before its work was done."""


_NO_DATABASE = "The hub's database does not answer."
_SENTENCES: dict[type[Exception], str] = {
    OperationalError: _NO_DATABASE,
    InterfaceError: _NO_DATABASE,
    NoConnection: _NO_DATABASE,
    MemoryError: "The hub does not have the memory for this at the moment.",
    OSError: "The hub's disk or its bucket does not answer.",
}
_FULL = "The disk of the hub or of its database is full; its operator has to make room."
# How those who write say so: the system, SQLite and PostgreSQL.
_FULL_CODES: dict[str, set[int | str]] = {
    "errno": {errno.ENOSPC, errno.EDQUOT},
    "sqlite_errorcode": {sqlite3.SQLITE_FULL},
    "sqlstate": {"53100"},
}
OUTAGES: tuple[type[Exception], ...] = (Outage, *_SENTENCES)


def describe_outage(problem: Exception) -> str:
    """Say what is away."""
    if isinstance(problem, Outage):
        return str(problem)
    if _is_full(problem):
        return _FULL
    return next(said for kind, said in _SENTENCES.items() if isinstance(problem, kind))


def _is_full(problem: Exception) -> bool:
    """Tell whether there was no room for what was to be written."""
    cause = getattr(problem, "orig", None) or problem  # what SQLAlchemy wraps
    return any(getattr(cause, name, None) in codes for name, codes in _FULL_CODES.items())
