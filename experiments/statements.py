"""What `expected.toml` holds: checkable sentences, in whose words they are, and how they count.

Reading checks every field, so that a slip in a file is an error and never another verdict.
README.md explains the fields; `verdicts.py` judges the statements.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from .design import Paper

LONGEST_QUOTE = 300  # characters: a sentence that the claim can be held against, not a passage


@dataclass(frozen=True)
class Statement:
    """One checkable sentence: its `kind`, a name in `verdicts.KINDS`, and the kind's arguments.

    What judges it is apart from what explains it (`WORDS`): words may be improved at any time,
    the rest is frozen.
    """

    paper: str
    figure: str
    panel: str
    kind: str
    claim: str
    source: str
    explanation: str
    a: str = ""
    b: str = ""
    x: tuple[float, float] | None = None
    at: float | None = None
    value: float | None = None
    margin: float = 0.0
    tolerance: float = 0.0
    by: str = "paper"  # or "us": whose expectation it is
    quote: str = ""  # the paper's own words, and
    page: str = ""  # where they stand
    id: str = ""  # in place of the name that its arguments give
    duplicate_of: str = ""  # the name of a statement that claims the same
    depends: str = ""  # the choice on which the paper is silent
    variants: Mapping[str, str] = field(default_factory=dict)  # each answer to it, and its panel
    practical: float | None = None  # a smaller difference does not matter
    label: str = ""  # what kind of evidence the sentence is, where it is not a whole text

    @cached_property
    def name(self) -> str:
        """What duplicates, logs and reports call it: the paper, the place, what is compared."""
        if self.id:
            return f"{self.paper}/{self.id}"
        told = [f"{self.figure}" if self.panel == self.figure else f"{self.figure} {self.panel}"]
        told += [self.kind, *filter(None, (self.a, self.b))]
        told += [] if self.at is None else [f"at {self.at:g}"]
        told += [] if self.x is None else [f"from {self.x[0]:g} to {self.x[1]:g}"]
        return f"{self.paper}/{' '.join(told)}"


WORDS = ("claim", "source", "explanation", "quote", "page", "label")
_TEXTS = {"by", "depends", "duplicate_of", "figure", "id", "kind", "panel", "a", "b", *WORDS}
_NUMBERS = {"at", "value", "margin", "tolerance", "practical"}


def statements(paper: Paper) -> list[Statement]:
    """Read and check a paper's expected.toml."""
    path = paper.folder / "expected.toml"
    return parse(paper.name, path.read_text(encoding="utf-8"))


def parse(paper: str, text: str) -> list[Statement]:
    """Read the statements of a paper from the text of its expected.toml."""
    given = tomllib.loads(text)
    whole = given.pop("paper", {})
    _known(paper, "[paper]", whole, {"label"})
    found = [
        _statement(paper, entry if entry.get("by") == "us" else {**whole, **entry})
        for entry in given["statement"]
    ]
    names = Counter(one.name for one in found)
    if twice := [name for name, n in names.items() if n > 1]:
        raise _wrong(paper, f"several statements are {twice[0]!r}", "Give each of them an `id`.")
    return found


def duplicates(found: Sequence[Statement]) -> dict[str, str]:
    """Return the name of each statement of all papers that repeats another, with that other's."""
    by_name = {one.name: one for one in found}
    repeated = {one.name: one.duplicate_of for one in found if one.duplicate_of}
    for name, first in repeated.items():
        other, paper = by_name.get(first), by_name[name].paper
        if other is None:
            raise _wrong(paper, f"{name!r} is a duplicate of {first!r}, which there is not")
        if other.duplicate_of:
            raise _wrong(paper, f"{name!r} is a duplicate of {first!r}, itself a duplicate")
        if other.by != by_name[name].by:
            raise _wrong(paper, f"{name!r} and {first!r} are not by the same side")
    return repeated


def _statement(paper: str, entry: dict[str, Any]) -> Statement:
    where = f"the statement {entry.get('claim', '')!r}"
    _known(paper, where, entry, {one.name for one in fields(Statement)} - {"paper"})
    if lacking := {"figure", "kind", "claim", "source", "explanation"} - entry.keys():
        raise _wrong(paper, f"{where} lacks {', '.join(sorted(lacking))}")
    for name in entry.keys() & _TEXTS:
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise _wrong(paper, f"`{name}` of {where} is {entry[name]!r}", "Write a text.")
    for name in entry.keys() & _NUMBERS:
        if isinstance(entry[name], bool) or not isinstance(entry[name], int | float):
            raise _wrong(paper, f"`{name}` of {where} is {entry[name]!r}", "Write a number.")
    if "x" in entry:
        entry["x"] = tuple(entry["x"])
        if len(entry["x"]) != 2 or entry["x"][0] > entry["x"][1]:
            raise _wrong(paper, f"`x` of {where} is {entry['x']}", "Write [lowest, highest].")
    found = Statement(paper=paper, **{"panel": entry["figure"], **entry})
    _consistent(found, where)
    return found


def _consistent(one: Statement, where: str) -> None:
    if one.by not in ("paper", "us"):
        raise _wrong(one.paper, f"`by` of {where} is {one.by!r}", 'It is "paper" or "us".')
    if bool(one.quote) != bool(one.page):
        raise _wrong(one.paper, f"{where} has only one of `quote` and `page`")
    if one.quote and one.by == "us":
        raise _wrong(one.paper, f"{where} is ours and yet quotes the paper")
    if len(one.quote) > LONGEST_QUOTE:
        said = f"the quote of {where} has {len(one.quote)} characters"
        raise _wrong(one.paper, said, f"Keep to {LONGEST_QUOTE}: the words that claim it.")
    if min(one.margin, one.tolerance) < 0 or (one.practical is not None and one.practical <= 0):
        raise _wrong(one.paper, f"a margin, tolerance or practical size of {where} is negative")
    if bool(one.depends) != bool(one.variants):
        raise _wrong(one.paper, f"{where} has only one of `depends` and `variants`")
    if one.variants and (len(one.variants) < 2 or one.panel not in one.variants.values()):
        said = f"the variants of {where} are not two or more that include panel {one.panel!r}"
        raise _wrong(one.paper, said)


def _known(paper: str, where: str, entry: Mapping[str, Any], names: set[str]) -> None:
    if unknown := sorted(set(entry) - names):
        said = f"{where} has a field {unknown[0]!r}"
        raise _wrong(paper, said, f"The fields are {', '.join(sorted(names))}.")


def _wrong(paper: str, said: str, remedy: str = "") -> ValueError:
    return ValueError(f"experiments/{paper}/expected.toml: {said}. {remedy}".rstrip())
