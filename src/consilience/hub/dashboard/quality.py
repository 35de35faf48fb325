"""How good a release is: what was measured on the study's public test records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from consilience.hub.dashboard import charts
from consilience.hub.dashboard.charts import Interval
from consilience.hub.store import Row


class Quality(NamedTuple):
    """What was measured on the study's public test records."""

    chart: Markup
    measure: str
    rows: Sequence[Row]
    n_records: int
    level: float
    verdicts: Sequence[str]
    has_auc: bool


def measure_quality(rows: Sequence[Mapping[str, Any]]) -> Quality | None:
    """Return chart, table and verdict of what was measured; None if nothing was."""
    measure = "error" if any("error" in row for row in rows) else "rmse"
    found = [
        {**row, "main": row[measure], "auc": row.get("auc"), "kind": row.get("kind", "other")}
        for row in rows
        if measure in row
    ]
    if not found:
        return None
    percent, level = measure == "error", float(found[0].get("level", 0.95))
    n_records = int(found[0].get("n_records", 0))
    listed = [Interval(str(row["method"]), row["kind"], **row["main"]) for row in found]
    words = "share of wrong predictions" if percent else "root mean squared error"
    description = "; ".join(
        f"{one.label}: {charts.shown(one.value, percent)} "
        f"({charts.shown(one.low, percent)} to {charts.shown(one.high, percent)})"
        for one in listed
    )
    title = f"{words.capitalize()} on {n_records:,} public test records, with {level:.0%} intervals; less is better"
    chart = charts.intervals(listed, title=title, description=description, percent=percent)
    verdicts = _verdicts(listed, percent)
    return Quality(
        chart, words, found, n_records, level, verdicts, any(row["auc"] for row in found)
    )


def _verdicts(rows: Sequence[Interval], percent: bool) -> list[str]:
    """Say, without flattery, whether joining helped."""
    own = next((row for row in rows if row.kind == "study"), None)
    if own is None:
        return []
    said = []
    for row in rows:
        if row.kind != "baseline" or "best" in row.label:
            continue
        numbers = f"{charts.shown(own.value, percent)} against {charts.shown(row.value, percent)}"
        if own.high < row.low:
            said.append(
                f"Clearly better than {row.label}: {numbers}, and the intervals do not overlap."
            )
        elif own.value < row.value:
            said.append(
                f"Better than {row.label}: {numbers}; the intervals overlap, so this may be chance."
            )
        else:
            said.append(
                f"Not better than {row.label}: {numbers}. On these records joining does not help."
            )
    return said
