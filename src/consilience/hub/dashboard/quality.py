"""How good a release is on the study's public test records, and what each site counts for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from consilience.evaluation.baselines import compare_rows
from consilience.evaluation.compare import Gap, Joining
from consilience.files.release import Release
from consilience.hub.dashboard import charts
from consilience.hub.dashboard.charts import Interval
from consilience.hub.dashboard.queries import Paged
from consilience.hub.store import Row
from consilience.privacy.guarantee import Guarantee

NOT_COMPARED = (
    "This release was not compared with its baselines record by record, so there is no verdict on "
    "whether joining helps."
)
_WORDS = {
    "better": "Better than",
    "worse": "Worse than",
    "unclear": "Not clearly different from",
}
_ANSWERS = {
    True: "On these records, joining helps.",
    False: "On these records, joining does not help.",
    None: "On these records, joining does not clearly help.",
}


class Quality(NamedTuple):
    """What was measured, as a chart, a table and a verdict."""

    chart: Markup
    measure: str
    rows: Sequence[Row]
    n_records: int
    level: float
    verdicts: Sequence[str]
    has_auc: bool


def show_quality(rows: Sequence[Mapping[str, Any]]) -> Quality | None:
    """Return chart, table and verdict of what was measured; None if nothing was."""
    measure = "error" if any("error" in row for row in rows) else "rmse"
    measured: list[Row] = [
        {**row, "main": row[measure], "auc": row.get("auc"), "kind": row.get("kind", "other")}
        for row in rows
        if measure in row
    ]
    if not measured:
        return None
    percent, level = measure == "error", float(measured[0].get("level", 0.95))
    n_records = int(measured[0].get("n_records", 0))
    intervals = [Interval(str(row["method"]), row["kind"], **row["main"]) for row in measured]
    words = "share of wrong predictions" if percent else "root mean squared error"
    description = "; ".join(
        f"{row.label}: {charts.show_number(row.value, percent)} "
        f"({charts.show_number(row.low, percent)} to {charts.show_number(row.high, percent)})"
        for row in intervals
    )
    title = (
        f"{words.capitalize()} on {n_records:,} public test records, with {level:.0%} intervals; "
        "less is better"
    )
    chart = charts.draw_intervals(intervals, title=title, description=description, percent=percent)
    verdicts = _list_verdicts(compare_rows(rows), percent)
    has_auc = any(row["auc"] for row in measured)
    return Quality(chart, words, measured, n_records, level, verdicts, has_auc)


def _list_verdicts(joining: Joining | None, percent: bool) -> list[str]:
    """Say whether joining helped, by the rule that simulations and certificates use too."""
    if joining is None:
        return [NOT_COMPARED]
    said = [_compare(title, gap, percent) for title, gap in joining.gaps.items()]
    return [*said, _ANSWERS[joining.helps]]


def _compare(title: str, gap: Gap, percent: bool) -> str:
    own, other, low, high = (
        charts.show_number(value, percent)
        for value in (gap.joined, gap.other, gap.gain.low, gap.gain.high)
    )
    # Errors are compared in percentage points, numbers by their squared errors.
    what = "error" if percent else "mean squared error"
    return (
        f"{_WORDS[gap.verdict]} {title}: {own} against {other}. Compared record by record, "
        f"the release lowers the {what} by {low} to {high}."
    )


@dataclass(frozen=True)
class Weights(Paged):
    """A page of a release's sources, and what all weights add up to."""

    whole: float = 1.0


def list_weights(release: Release, page: int, size: int) -> Weights:
    """Return a page of a release's sources, largest weight first."""
    rows = sorted(release.sealed.facts["sources"], key=lambda row: -abs(row["weight"]))
    largest = max((abs(row["weight"]) for row in rows), default=1.0) or 1.0
    page = min(max(1, page), max(1, -(-len(rows) // size)))
    shown = [
        {
            **row,
            "bar": charts.draw_bar(abs(row["weight"]) / largest, negative=row["weight"] < 0),
            "promised": Guarantee.from_dict(dict(row["guarantee"])),
        }
        for row in rows[(page - 1) * size : page * size]
    ]
    return Weights(shown, page, size, len(rows), math.fsum(row["weight"] for row in rows))
