"""Show that two states of the code give the same numbers, so that stored results stay valid.

Stored results remember a digest of the code that made them. When code moves or is reworded without
changing a number, run the quick reproduction with both states and compare the two folders::

    python -m experiments.equal BEFORE AFTER

This prints the comparison and records it in equal.toml. From then on, results of the first state
count as results of the second. The record names what was compared, so that readers can judge it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq

RECORD = Path(__file__).with_name("equal.toml")
TOLERANCE = 1e-9  # relative to the larger number, or absolute below 1
MEASURED = {"seconds"}  # no two runs agree on times


@cache
def _recorded() -> dict[str, str]:
    """Return, for each digest of an earlier state, the digest of the state that equals it."""
    if not RECORD.exists():
        return {}
    entries = tomllib.loads(RECORD.read_text(encoding="utf-8")).get("equal", [])
    return {before: after for entry in entries for before, after in entry["digests"].items()}


def carried(digest: str | None) -> str | None:
    """Return the newest digest that is recorded as equal to `digest`, which may be itself."""
    seen = set()
    while digest in _recorded() and digest not in seen:
        seen.add(digest)
        digest = _recorded()[digest]
    return digest


@dataclass
class Comparison:
    """What two folders of results have in common, and how far their numbers differ."""

    panels: int = 0
    numbers: int = 0
    largest: float = 0.0
    different: list[str] = field(default_factory=list)  # panels, with their largest difference
    missing: list[str] = field(default_factory=list)  # panels or rows that only one folder has
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every number of both folders agrees within the tolerance."""
        return self.numbers > 0 and not self.different and not self.missing


def compare(before: Path, after: Path) -> Comparison:
    """Compare all panels that two runs with the same seed and repeats have stored."""
    result = Comparison()
    tables = {folder: {_name(p, folder): p for p in _tables(folder)} for folder in (before, after)}
    result.missing = sorted(tables[before].keys() ^ tables[after].keys())
    for name in sorted(tables[before].keys() & tables[after].keys()):
        old, new = (pq.read_table(tables[folder][name]) for folder in (before, after))
        facts, facts_now = (json.loads(table.schema.metadata[b"facts"]) for table in (old, new))
        largest, numbers, lacking = _difference(old.to_pylist(), new.to_pylist())
        result.panels += 1
        result.numbers += numbers
        result.largest = max(result.largest, largest)
        if lacking:
            result.missing.append(f"{name} ({lacking} rows)")
        if largest > TOLERANCE:
            result.different.append(f"{name} ({largest:.3g})")
        (now,) = facts_now["code"]
        result.digests |= {digest: now for digest in facts["code"] if digest != now}
        today = dict(map(tuple, facts_now["functions"]))
        result.digests |= {
            digest: today[function]
            for function, digest in facts["functions"]
            if today.get(function, digest) != digest
        }
    return result


def _tables(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*/*.parquet")


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder).with_suffix(""))


def _difference(before: list[dict], after: list[dict]) -> tuple[float, int, int]:
    """Return the largest difference of two tables, numbers compared, and unmatched rows."""
    values = [
        {
            tuple(sorted((k, str(v)) for k, v in row.items() if k != "value")): row["value"]
            for row in rows
            if row["metric"] not in MEASURED
        }
        for rows in (before, after)
    ]
    common = values[0].keys() & values[1].keys()
    largest = max((_gap(values[0][key], values[1][key]) for key in common), default=0.0)
    return largest, len(common), len(values[0].keys() ^ values[1].keys())


def _gap(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b) / max(1.0, abs(a), abs(b))
    return math.inf if math.isnan(gap) else gap


def record(comparison: Comparison, command: str) -> None:
    """Add a comparison that holds to the record."""
    lines = [
        "",
        "[[equal]]",
        f"command = {json.dumps(command)}",
        f"panels = {comparison.panels}",
        f"numbers = {comparison.numbers}",
        f"largest_difference = {comparison.largest!r}",
        "[equal.digests]",
        *(f'"{before}" = "{after}"' for before, after in sorted(comparison.digests.items())),
    ]
    head = "" if RECORD.exists() else _HEAD
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(head + "\n".join(lines) + "\n")
    _recorded.cache_clear()


_HEAD = (
    "# States of the code that give the same numbers: "
    "results of the first digest of a line count as\n"
    "# results of the second. Written by `python -m experiments.equal`; times are not compared.\n"
)


def main() -> None:
    """Compare two folders; if all numbers agree, record that their code is equivalent."""
    parser = argparse.ArgumentParser(prog="python -m experiments.equal", description=main.__doc__)
    parser.add_argument("before", type=Path, help="results of the earlier state")
    parser.add_argument("after", type=Path, help="results of the present state")
    parser.add_argument("--command", default="make reproduce", help="the command that made both")
    parser.add_argument("--dry-run", action="store_true", help="compare only")
    given = parser.parse_args()
    found = compare(given.before, given.after)
    say = sys.stdout.write
    say(
        f"{found.numbers:,} numbers in {found.panels} panels: "
        f"largest difference {found.largest:.3g}\n"
    )
    for title, names in (("Different", found.different), ("Only in one folder", found.missing)):
        if names:
            say(f"{title}: {', '.join(names)}\n")
    if not found.holds:
        sys.exit("The two states are not equal. Nothing was recorded.")
    if not given.dry_run:
        record(found, given.command)


if __name__ == "__main__":
    main()
