"""What the hub needs and may not have for a while: a later attempt may work, whoever makes it.

Nothing that a member, a study or a request can cause is on this list, and every other exception is
a mistake of ours.
"""

from __future__ import annotations

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
OUTAGES: tuple[type[Exception], ...] = (Outage, *_SENTENCES)


def describe_outage(problem: Exception) -> str:
    """Say what is away."""
    if isinstance(problem, Outage):
        return str(problem)
    return next(said for kind, said in _SENTENCES.items() if isinstance(problem, kind))
