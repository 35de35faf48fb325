"""Pages about releases: showing one, how good it is, and asking for one that draws noise."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fastapi import Response
from fastapi.responses import FileResponse
from markupsafe import Markup

from consilience.errors import ConsilienceError
from consilience.evaluation.baselines import compare_rows
from consilience.evaluation.compare import Gap
from consilience.evaluation.measures import AUC, ERROR, RMSE, STATED, Metric
from consilience.files import certificate
from consilience.files.release import KIND, Release
from consilience.files.sealed import SealedFile
from consilience.hub.combining import Combiner
from consilience.hub.dashboard import charts
from consilience.hub.dashboard.charts import Interval
from consilience.hub.dashboard.queries import Paged
from consilience.hub.dashboard.visits import HEADERS, Visit, download, fix_for
from consilience.hub.hub import FORGOTTEN_RELEASE
from consilience.hub.state import read_study, why_gone
from consilience.hub.store import Row
from consilience.privacy.guarantee import Budget, Guarantee
from consilience.protocol import Refusal
from consilience.study.study import Study

MANY = 50  # weights on one page
NOTHING_SHOWN: dict[str, object] = dict.fromkeys(
    ("quality", "weights", "words_of_release", "weighing", "lost")
)
WITHDRAWN = (
    "The hub no longer offers this release: {why}. Copies that were fetched before still exist; "
    "anyone who has one should stop using it."
)

CHANGED = (
    "Nothing was published: contributions have changed since the page was shown. The reasons above "
    "are those of now."
)


def show_release(visit: Visit) -> Response:
    """Show a release: its certificate, how good it is, and whose contributions it is made of."""
    row, study, release = _get_release(visit)
    facts = release_facts(visit, study, release, page=visit.number(), size=MANY)
    facts |= {"row": row, "study": study, "state": read_study(visit.hub.store, row, study)}
    confirmed = () if release["state"] == "withdrawn" else ("released",)
    return visit.page("release.html", 200, confirmed, release=release, **facts)


def download_release_certificate(visit: Visit) -> Response:
    """Return a release's certificate as a file."""
    row, study, release = _get_release(visit)
    gone = WITHDRAWN.format(why=why_gone(study))
    if _is_hidden(visit, release):
        raise Refusal("no-release", gone)
    if not release["kept"]:
        raise Refusal("no-release", FORGOTTEN_RELEASE)
    words = certificate.of_release(_read(str(visit.hub.store.file_path(release["sha256"]))))
    if release["state"] == "withdrawn":
        words = replace(words, sections=[("Withdrawn", [gone], []), *words.sections])
    name = f"{row['name']}-release-{release['sequence']}-certificate"
    return download_certificate(visit, words, name)


def download_release(visit: Visit) -> Response:
    """Return a release itself, unless a member of it was withdrawn."""
    row, _, release = _get_release(visit)
    _, path = visit.hub.release_path(row["name"], release["sequence"])
    name = f"{row['name']}-release-{release['sequence']}.safetensors"
    return FileResponse(path, media_type="application/octet-stream", headers=HEADERS, filename=name)


def download_certificate(visit: Visit, words: certificate.Page, name: str) -> Response:
    """Return a certificate as the kind of file that the address asks for."""
    if visit["kind"] == "html":
        return download(words.as_html().encode(), "text/html", f"{name}.html")
    if visit["kind"] == "txt":
        return download(words.as_text().encode(), "text/plain", f"{name}.txt")
    raise Refusal("not-found", "A certificate is available as html or txt.")


def _get_release(visit: Visit) -> tuple[Row, Study, Row]:
    row, study = visit.study()
    number = visit["number"]
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    release = visit.hub.store.release(row["name"], int(number)) if is_number else None
    if release is None:
        raise Refusal("no-release", "There is no release with this number.")
    return row, study, release


def _is_hidden(visit: Visit, release: Row) -> bool:
    return release["state"] == "withdrawn" and not visit.someone.account


@lru_cache(maxsize=32)
def _read(path: str) -> Release:
    """Return a release of this hub without its tensors.

    A file's name is its digest, so its content never changes.
    """
    return Release(SealedFile(path, KIND).hollow)


def release_facts(
    visit: Visit, study: Study, release: Row | None, *, page: int, size: int
) -> dict[str, object]:
    """Return what templates show of a release; a site does not see one that was withdrawn."""
    if release is None or not release["kept"] or _is_hidden(visit, release):
        return dict(NOTHING_SHOWN)  # a copy: callers add what else their page shows
    try:
        read = _read(str(visit.hub.store.file_path(release["sha256"])))
    except (Refusal, ConsilienceError) as problem:
        return {**NOTHING_SHOWN, "lost": getattr(problem, "message", str(problem))}
    words = certificate.of_release(read)
    shown = [part for part in words.sections if not part[0].startswith(("Whose", "How good"))]
    return {
        "lost": None,
        "quality": show_quality(read.sealed.facts["quality"]),
        "weights": list_weights(read, page, size),
        "weighing": study.build_aggregator().describe().weighing,
        "words_of_release": certificate.Page(words.title, shown),
    }


# ----------------------------------------------------------------- releases that draw noise


def show_aggregate(visit: Visit, status: int = 200, problem: str | None = None) -> Response:
    """Say what a release would cost, and ask whether to make it."""
    row, study = visit.study()
    state = read_study(visit.hub.store, row, study)
    if state.withheld:
        key = secrets.token_hex(8)
        return visit.page("withheld.html", status, key=key, row=row, state=state, problem=problem)
    if not study.draws_noise:
        raise Refusal(
            "not-allowed",
            "The hub makes this study's releases by itself, at no cost, and withholds none now.",
        )
    unit, neighbours = study.hidden
    balance = visit.hub.balance(row["name"])
    return visit.page(
        "aggregate.html",
        status,
        () if balance is None else ("allowed",),
        key=secrets.token_hex(8),
        row=row,
        study=study,
        epsilon=study.aggregator_settings.get("epsilon"),
        delta=study.aggregator_settings.get("delta", 0.0),
        balance=balance,
        state=state,
        unit=unit,
        neighbours=neighbours,
        problem=problem,
    )


def aggregate(visit: Visit) -> Response:
    """Make a release that draws noise, or publish one that the hub withheld.

    Sending the same form twice makes one release.
    """
    row, study = visit.study()
    key = visit.form.get("key", "")
    allowed = study.draws_noise or row["withheld"]
    known = visit.hub.store.release(row["name"], request=key) if key else None
    if not re.fullmatch("[0-9a-f]{16}", key):
        raise Refusal("malformed", "A part of the form is missing.")
    if not (allowed or known):
        raise Refusal("not-allowed", "The hub makes this study's releases by itself, at no cost.")
    try:
        combiner: Combiner = visit.request.app.state.combiner
        shown = visit.form.get("change", "")
        change = int(shown) if shown.isascii() and shown.isdigit() and len(shown) < 16 else None
        actor = visit.someone.actor
        made = combiner.combine(row["name"], request=key, change=change, actor=actor)
    except Refusal as refusal:
        problem: str | None = f"{refusal.message} {fix_for(refusal)}"
        if refusal.code == "withheld":  # the page says why
            problem = None if change is None else CHANGED
        return show_aggregate(visit, refusal.status, problem)
    return visit.redirect(f"/studies/{row['name']}/releases/{made['sequence']}?done=released")


def set_budget(visit: Visit) -> Response:
    """Set what the hub may spend on a study in total."""
    row, study = visit.study()
    try:
        epsilon, delta = (float(visit.form.get(name) or "0") for name in ("epsilon", "delta"))
        unit, neighbours = study.hidden
        budget = Budget(epsilon=epsilon, delta=delta, unit=unit, neighbours=neighbours)
        visit.hub.allow(row["name"], budget, visit.someone.actor)
    except ConsilienceError as problem:
        return show_aggregate(visit, 400, str(problem))
    except ValueError:
        return show_aggregate(visit, 400, "Epsilon and delta must be numbers.")
    return visit.redirect(f"/studies/{row['name']}/aggregate?done=allowed")


# ---------------------------------------------------------------------------- how good a release is


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
    measure: Metric
    metrics: Sequence[Metric]
    rows: Sequence[Row]
    n_records: int
    level: float
    verdicts: Sequence[str]


def show_quality(rows: Sequence[Mapping[str, Any]]) -> Quality | None:
    """Return chart, table and verdict of what was measured; None if nothing was."""
    measure = ERROR if any(ERROR.name in row for row in rows) else RMSE
    measured: list[Row] = [
        {**row, "kind": row.get("kind", "other")} for row in rows if measure.name in row
    ]
    if not measured:
        return None
    percent, level = measure.percent, float(measured[0].get("level", 0.95))
    n_records = int(measured[0].get("n_records", 0))
    intervals = [Interval(str(row["method"]), row["kind"], **row[measure.name]) for row in measured]
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
    metrics = [metric for metric in STATED if any(metric.name in row for row in measured)]
    return Quality(chart, measure, metrics, measured, n_records, level, _list_verdicts(rows))


def _list_verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say whether joining helped, by the rule that simulations and certificates use too."""
    joining = compare_rows(rows)
    if joining is None:
        return [NOT_COMPARED]
    said = [_compare(joining.measure, title, gap) for title, gap in joining.gaps.items()]
    said.append(_ANSWERS[joining.helps])
    ranked = compare_rows(rows, AUC.name)
    if caution := joining.caution(has_auc=ranked is not None):
        said.append(caution)
        if ranked is not None:
            said += [_compare(AUC, title, gap) for title, gap in ranked.gaps.items()]
            said.append(f"By AUC, joining {ranked.answer} on these records.")
    return said


def _compare(metric: Metric, title: str, gap: Gap) -> str:
    own, other = (charts.show_number(one, metric.percent) for one in (gap.joined, gap.other))
    return (
        f"{_WORDS[gap.verdict]} {title}: {metric.title} {own} against {other}. Compared record by "
        f"record, the release gains {metric.show_gain(gap.gain.low, gap.gain.high)}."
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
