"""The dashboard's words and numbers: templates, how values are written, what to do next, what weights mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from consilience.files.release import Release
from consilience.hub import charts
from consilience.hub.charts import Interval
from consilience.hub.overview import Numbers, Paged
from consilience.hub.store import Row, now
from consilience.privacy.guarantee import Guarantee
from consilience.study.study import Study

NOTICES = {
    "created": "The study is open. Invite its sites next.",
    "closed": "The study is closed. Its releases stay.",
    "revoked": "The key is revoked: the site can no longer sign anything in this study.",
    "released": "The release is made and signed.",
    "allowed": "The budget is set.",
    "uploaded": "The file is here, and it is the one that the study names.",
    "out": "You are logged out.",
}
HEADINGS = {
    "not-found": "There is no such page",
    "no-release": "There is no such release",
    "not-allowed": "This is not open to you",
    "not-authenticated": "Please log in",
    "unavailable": "The hub cannot answer now",
    "too-many": "Too many attempts",
    "study-closed": "The study is closed",
    "wrong-method": "There is no such page",
}
FIXES = {
    "not-found": "Check the address, or begin again from the first page. A site sees its own study only.",
    "not-allowed": "Go back, load the page again and repeat what you did; if it stays so, ask a coordinator.",
    "not-authenticated": "Coordinators log in with name and password. A site opens its view with a fresh link.",
    "malformed": "Go back and correct what the sentence above names.",
    "budget": "Set a larger budget for this study below, if its sites agree to that.",
    "wrong-method": "Begin again from the first page.",
    "no-release": "Look at the study's page for the releases there are.",
}
LOGIN_FIXES = {"not-authenticated": "Check both, or ask the hub's operator for a new password."}
WEIGHING = {
    "equal": "Every member counts the same.",
    "size": "A member counts in proportion to the number of records it was trained on.",
    "precision": "A member counts for more the less noise it carries: more records or a larger epsilon mean less.",
    "size-epsilon": "A member counts for more the more records it was trained on and the larger its epsilon.",
    "accuracy-size": "A member counts for more the better it does on the public records and the more records it has.",
}
BY_METHOD = {
    "PublicBlend": "Members are averaged by their precision; the public records then decide how far the average is "
    "followed.",
    "FeatureMethod": "Weights are learned on the public records: a member gets what its predictions add to the "
    "others', which can be nothing, or less than nothing.",
    "SiteBoosting": "Members are added one by one, each for what it corrects on the public records.",
    "PooledCounts": "The counts of all members are added up; a member's share is that of its counts.",
    "SoftLabelDistillation": "Every member votes once on each public record; the release learns the noisy mean vote.",
    "VoteDistillation": "Every member votes once on each public record; the release learns the noisy majority.",
}


def over_time(came: Sequence[tuple[str, str]], since: str) -> Markup:
    """Return the chart of a study's contributions."""
    return charts.over_time(came, since=since, until=now(), title="Contributions over time")


# ---------------------------------------------------------------------------------------------------- how good it is


class Quality(NamedTuple):
    """What was measured on the study's public test records."""

    chart: Markup
    measure: str
    rows: Sequence[Row]
    n_records: int
    level: float
    verdicts: Sequence[str]
    has_auc: bool


KINDS = {"study": "this release", "baseline": "baseline", "other": "another aggregator"}


def quality(rows: Sequence[Mapping[str, Any]]) -> Quality | None:
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


# ---------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Weights(Paged):
    """A page of a release's sources, and what all weights add up to."""

    whole: float = 1.0


def weights(release: Release, page: int, size: int) -> Weights:
    """Return a page of a release's sources, largest weight first."""
    rows = sorted(release.sealed.facts["sources"], key=lambda row: -abs(row["weight"]))
    largest = max((abs(row["weight"]) for row in rows), default=1.0) or 1.0
    page = min(max(1, page), max(1, -(-len(rows) // size)))
    shown = [
        {
            **row,
            "bar": charts.bar(abs(row["weight"]) / largest, negative=row["weight"] < 0),
            "promised": Guarantee.from_dict(dict(row["guarantee"])),
        }
        for row in rows[(page - 1) * size : page * size]
    ]
    return Weights(shown, page, size, len(rows), math.fsum(row["weight"] for row in rows))


def weighing(study: Study) -> str:
    """Say by what rule a study's aggregator weighs its members."""
    usual = {"Average": "precision", "WeightedVote": "size-epsilon"}.get(study.aggregator)
    by = study.aggregator_settings.get("weights", usual)
    return WEIGHING.get(str(by)) or BY_METHOD.get(study.aggregator, "")


# --------------------------------------------------------------------------------------------------- what to do next


class Todo(NamedTuple):
    """What a study waits for, in a heading and a sentence, and where to do it."""

    heading: str
    text: str
    link: str | None = None
    action: str | None = None
    alarm: bool = False


def todo(
    row: Row, study: Study, numbers: Numbers, current: Row | None, files: Sequence[Row]
) -> list[Todo]:
    """Return what stands between a study and its next release."""
    at = f"/studies/{row['name']}"
    found = []
    if row["problem"]:
        found.append(
            Todo(
                "Combining failed", f"{row['problem']} The next change is tried again.", alarm=True
            )
        )
    if row["status"] != "open":
        return found
    for file in files:
        if not file["there"]:
            text = f"{file['file']} is needed for {file['uses']}. No release is made without it."
            found.append(Todo("A public file is missing", text, f"{at}#files", "Upload it"))
    if not numbers.sites:
        waiting = f" {numbers.invitations} open so far." if numbers.invitations else ""
        text = f"Each site joins with a one-time invitation, and at least {study.min_sites} must contribute.{waiting}"
        found.append(Todo("No site has joined yet", text, f"{at}/invite", "Invite a site"))
    elif numbers.accepted < study.min_sites:
        text = (
            f"{numbers.accepted} of {numbers.enrolled} enrolled sites have contributed, and a "
            f"release needs {study.min_sites}. Sites train and submit by themselves; there is "
            "nothing to start here."
        )
        found.append(Todo("Waiting for contributions", text, f"{at}/invite", "Invite another site"))
    elif study.draws_noise and (current is None or current["change"] < row["changes"]):
        text = "This study's aggregator draws noise, so the hub makes no release unasked. The next page says the cost."
        found.append(Todo("A release can be made", text, f"{at}/aggregate", "Make a release"))
    elif not row["problem"] and row["combined"] < row["changes"]:
        found.append(Todo("A new release is being made", "Load this page again in a moment."))
    return found


# ---------------------------------------------------------------------------------------------- how values are written


def _when(text: str | None) -> Markup:
    """Return a time to the minute, in UTC."""
    if not text:
        return Markup("—")
    at = datetime.fromisoformat(text)
    shown = f"{at:%Y-%m-%d}<span class=hour> {at:%H:%M} UTC</span>"
    return Markup(f'<time datetime="{escape(text)}">{shown}</time>')  # noqa: S704  built from a parsed time


def _day(text: str) -> Markup:
    return Markup(f'<time datetime="{escape(text)}">{datetime.fromisoformat(text):%Y-%m-%d}</time>')  # noqa: S704


def _promise(value: Guarantee | Mapping[str, Any] | None) -> str:
    """Return a guarantee in one short line."""
    if value is None:
        return "—"
    found = value if isinstance(value, Guarantee) else Guarantee.from_dict(dict(value))
    if math.isinf(found.epsilon):
        return "none against the hub"
    delta = f", δ = {found.delta:.3g}" if found.delta else ""
    return f"ε = {found.epsilon:.4g}{delta}"


def _weight(value: float) -> str:
    if value and abs(value) < 0.0001:
        return "< 0.0001" if value > 0 else "> −0.0001"
    return f"{value:.3f}" if not value or abs(value) >= 0.01 else f"{value:.2g}"


def _bytes(size: int) -> str:
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} bytes"


def _measured(value: Mapping[str, float] | None, percent: bool) -> str:
    if value is None:
        return "—"
    return f"{charts.shown(value['value'], percent)}"


def _between(value: Mapping[str, float] | None, percent: bool) -> str:
    if value is None:
        return "—"
    return f"{charts.shown(value['low'], percent)} to {charts.shown(value['high'], percent)}"


def _fact(value: Any) -> str:
    """Return a fact of the audit log, shortened: the log itself holds it whole."""
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:.*", text):
        return f"{text[:10]} {text[11:16]} UTC"
    return f"{text[:16]}…" if len(text) > 40 and " " not in text else text


def _segment(text: str) -> str:
    return quote(text, safe="")


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "when": _when,
    "day": _day,
    "promise": _promise,
    "bytes": _bytes,
    "weight": _weight,
    "measured": _measured,
    "between": _between,
    "segment": _segment,
    "fact": _fact,
}
TEMPLATES.globals |= {"bar": charts.bar, "KINDS": KINDS, "isinf": math.isinf}
