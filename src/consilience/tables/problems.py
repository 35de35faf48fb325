"""What is wrong with settings or with a table, in words that quote no record."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from consilience.errors import SchemaMismatch, SettingsError

T = TypeVar("T")


def require(holds: bool, setting: str, given: object, wish: str) -> None:
    """Refuse a setting that is not as it must be."""
    if not holds:
        raise SettingsError(
            f"{setting} cannot be {given!r}: it must be {wish}. No record was read. Change it."
        )


def refuse(problems: Sequence[str], where: str = "The table") -> None:
    """Raise an error if records hold values that the schema does not allow."""
    if problems:
        fix = (
            "Fix values row by row; do not use statistics of the whole column. Or declare what "
            "such values become: missing=, unseen=, missing_values=, unknown_label=."
        )
        raise mismatch(list(dict.fromkeys(problems)), fix, where=where)


def mismatch(
    problems: Sequence[str], fix: str, done: str = "encoded", *, where: str = "The table"
) -> SchemaMismatch:
    """Return an error. Problems name columns and settings, never a record's value or position."""
    return SchemaMismatch(
        f"{where} does not fit the schema: {'; '.join(problems)}. Nothing was {done}. {fix}"
    )


def quietly(call: Callable[[], T]) -> T | None:
    """Return `call()`, or None if it failed.

    A library's message may quote a record, so it must not travel on. The caller raises its own
    error after this returns, so that the library's is not even its context.
    """
    try:
        return call()
    except MemoryError:
        raise
    except Exception:
        return None
