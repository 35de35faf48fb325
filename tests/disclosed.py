"""The tables of docs/guarantees/disclosure.md, and how files and answers are compared with them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "guarantees" / "disclosure.md"
KINDS = ("public", "chance", "noise", "size", "parts", "each")
_ROW = re.compile(r"^\| `([^`|]+)` \| (\w+) \| (.*) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(#[^)]+\)")


class Field(NamedTuple):
    """The kind of a field; of `parts` and `each`, the heading of the table of what is in it."""

    kind: str
    within: str | None


def _read() -> dict[str, dict[str, Field]]:
    found = {}
    for section in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        rows = {}
        for name, kind, why in _ROW.findall(text):
            if kind in KINDS:
                link = _LINK.match(why)
                assert name not in rows, (heading, name)
                assert (link is not None) == (kind in ("parts", "each")), (heading, name)
                assert len(why) >= 12, f"{heading}: {name!r} has no reason"
                rows[name] = Field(kind, link and link[1])
        if rows:
            found[heading] = rows
    assert {row.within for rows in found.values() for row in rows.values()} <= {None, *found}
    return found


TABLES = _read()


def _parts(field: Field, value: Any) -> list[tuple[str, Any]]:
    """Return what a table of its own describes, each with its place."""
    if value is None:
        return []
    if field.kind == "each":
        return sorted(value.items())
    return list(enumerate(value)) if isinstance(value, list) else [("", value)]


def _table(heading: str) -> dict[str, tuple[str, Field]]:
    """Return a table, or several that belong together, as field: (its table, what it is)."""
    return {
        name: (each, field) for each in heading.split(" + ") for name, field in TABLES[each].items()
    }


def listed(heading: str, facts: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return every field that there is, as (table, field); raise AssertionError for others.

    A heading of several tables names them with " + " in between.
    """
    table = _table(heading)
    assert set(facts) <= set(table), (heading, set(facts) - set(table))
    found = {(table[name][0], name) for name in facts}
    for name, value in facts.items():
        field = table[name][1]
        if field.within is not None:
            for _, part in _parts(field, value):
                found |= listed(field.within, part)
    return found


def differing(heading: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> set[str]:
    """Return the fields that are called public and are not the same."""
    return set(_differing(heading, one, two))


def _differing(heading: str, one: Any, two: Any) -> Iterator[str]:
    if set(one) != set(two):
        yield f"{heading}: {set(one) ^ set(two)}"
        return
    for name, (_, field) in ((name, _table(heading)[name]) for name in one):
        if field.kind == "public" and one[name] != two[name]:
            yield f"{heading}: {name}"
        elif field.within is not None:
            parts = [_parts(field, each[name]) for each in (one, two)]
            if [place for place, _ in parts[0]] != [place for place, _ in parts[1]]:
                yield f"{heading}: {name}"
                continue
            for (_, first), (_, second) in zip(*parts, strict=True):
                yield from _differing(field.within, first, second)
