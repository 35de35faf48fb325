"""Rules and statements are frozen: whoever changes one after numbers were seen says so, and why.

`frozen.toml` has a digest of the rules and of each statement, with its last verdict. A test
compares it with what is there. After a change::

    python -m experiments.frozen "why it was changed"

This writes the change into `changes.toml`, with the verdicts before and after, and freezes the new
state. The report prints the digest of all of it and the whole log.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import inspect
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from consilience.simulation.digest import statements_of

from . import kinds, run, verdicts
from .design import HERE, papers
from .statements import WORDS, Statement, statements

FROZEN, LOG = HERE / "frozen.toml", HERE / "changes.toml"
RULES = (kinds, verdicts)  # the modules that decide


@dataclass(frozen=True)
class State:
    """The rules' digest, and digest and verdict of each statement by name."""

    rules: str
    statements: Mapping[str, str]
    verdicts: Mapping[str, str] = field(default_factory=dict)

    def digest(self, of: str = "") -> str:
        """Return the digest of all statements of a paper, or with the rules of everything."""
        parts = [f"{name} {one}" for name, one in sorted(self.statements.items())]
        parts = [one for one in parts if not of or one.startswith(f"{of}/")]
        return _digest(parts if of else [self.rules, *parts])

    def parts(self) -> dict[str, str]:
        """Return the digests that a change is logged with: the rules', and each paper's."""
        names = sorted({name.partition("/")[0] for name in self.statements})
        return {"rules": self.rules, **{name: self.digest(name) for name in names}}


def present() -> State:
    """Return the state of rules and statements as they are now."""
    rules = _digest([statements_of(inspect.getsource(module)) for module in RULES])
    found = [one for paper in papers() for one in statements(paper)]
    return State(rules, {one.name: _digest(_judged(one)) for one in found})


def frozen() -> State:
    """Return the state that was frozen last."""
    given = tomllib.loads(FROZEN.read_text(encoding="utf-8"))
    entries = {name: one for part in given["statements"].values() for name, one in part.items()}
    return State(
        given["rules"],
        {name: digest for name, (digest, _) in entries.items()},
        {name: verdict for name, (_, verdict) in entries.items()},
    )


def changes() -> list[dict[str, Any]]:
    """Return the log, oldest first."""
    found: list[dict[str, Any]] = tomllib.loads(LOG.read_text(encoding="utf-8"))["change"]
    return found


def unlogged() -> list[str]:
    """Return what is not as it was frozen, or was frozen without a line in the log."""
    then, now = frozen(), present()
    found = ["the rules"] if then.rules != now.rules else []
    found += sorted(
        name
        for name in then.statements.keys() | now.statements.keys()
        if then.statements.get(name) != now.statements.get(name)
    )
    logged: dict[str, str] = {}
    for change in changes():
        logged |= change.get("digests", {})
    return found or [
        f"the log's digest of {part}"
        for part, digest in now.parts().items()
        if logged.get(part) != digest
    ]


def judged_now(out: Path) -> dict[str, str]:
    """Return the verdict on each statement by the tables of a folder."""
    found = {}
    for paper in papers():
        panels = [panel for figure in paper.figures for panel in figure.panels]
        settings = run.Settings(out)
        there = {panel.id: run.stored(paper, panel, settings) for panel in panels}
        tables = {id_: one.rows for id_, one in there.items() if one is not None and one.fits}
        for one in statements(paper):
            found[one.name] = verdicts.judge(one, tables).verdict
    return found


def freeze(why: str, out: Path) -> list[str]:
    """Log every change since the last freeze with its verdicts, and freeze what is there now.

    Verdicts that changed because numbers were computed again are logged too. A verdict is kept
    while the panel of its statement has no numbers that fit.
    """
    then, now, judged = frozen(), present(), judged_now(out)
    changed = unlogged()
    moved = {
        name: (then.verdicts.get(name, ""), judged.get(name, ""))
        for name in sorted(then.verdicts.keys() | judged.keys())
        if name in changed
        or judged.get(name, verdicts.OPEN) not in (verdicts.OPEN, then.verdicts.get(name))
    }
    if not changed and not moved:
        return []
    kept = {
        name: then.verdicts.get(name, one) if one == verdicts.OPEN else one
        for name, one in judged.items()
    }
    now, rules = State(now.rules, now.statements, kept), then.rules != now.rules
    of = "rules" if rules else "statements" if changed else "numbers"
    lines = [
        "",
        "[[change]]",
        f"date = {datetime.datetime.now(datetime.UTC).date()}",
        f"of = {_text(of)}",
        f"what = {_text(_in_words(then, now, rules))}",
        f"why = {_text(why)}",
        f"seen = {_text('the tables in experiments/results')}",
        "verdicts = [",
        *(f"    [{_text(name)}, {_text(b)}, {_text(a)}]," for name, (b, a) in moved.items()),
        "]",
        "[change.digests]",
        *(
            f"{part} = {_text(digest)}"
            for part, digest in now.parts().items()
            if part != "rules" or rules
        ),
    ]
    with LOG.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    _write(now)
    return changed or list(moved)


def _write(state: State) -> None:
    lines = [
        "# Digests of the rules and of every statement, and the verdicts when they were frozen.",
        "# Written by `python -m experiments.frozen`.",
        f'rules = "{state.rules}"',
    ]
    for paper in sorted({name.partition("/")[0] for name in state.statements}):
        lines += ["", f"[statements.{paper}]"]
        lines += [
            f"{_text(name)} = {_text([digest, state.verdicts.get(name, '')])}"
            for name, digest in sorted(state.statements.items())
            if name.startswith(f"{paper}/")
        ]
    FROZEN.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_words(then: State, now: State, rules: bool) -> str:
    new = now.statements.keys() - then.statements.keys()
    gone = then.statements.keys() - now.statements.keys()
    same = then.statements.keys() & now.statements.keys()
    other = [name for name in same if then.statements[name] != now.statements[name]]
    said = {"added": len(new), "removed": len(gone), "changed": len(other)}
    told = [f"{n} statement{'s' if n > 1 else ''} {what}" for what, n in said.items() if n]
    return "; ".join([*(["The rules"] if rules else []), *told]) or "No statement: numbers only"


def _judged(one: Statement) -> list[str]:
    """Return what decides about a statement's verdict, and what it claims."""
    given = {name: value for name, value in asdict(one).items() if value not in ("", None, {}, 0.0)}
    words = set(WORDS) - {"claim"}
    return [f"{name} {value!r}" for name, value in sorted(given.items()) if name not in words]


def _digest(parts: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps([str(one) for one in parts]).encode()).hexdigest()[:16]


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    """Log and freeze what has changed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.frozen", description=main.__doc__)
    parser.add_argument("why", help="the reason, in a sentence, for readers of the report")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of tables")
    given = parser.parse_args()
    changed = freeze(given.why, given.out)
    say = sys.stdout.write
    say("Nothing has changed.\n" if not changed else f"Logged: {', '.join(changed)}.\n")


if __name__ == "__main__":
    main()
