"""Pages about releases: showing one, downloading it, and asking for one that draws noise."""

from __future__ import annotations

import re
import secrets
from functools import lru_cache

from fastapi import Response
from fastapi.responses import FileResponse

from consilience.errors import ConsilienceError
from consilience.files import certificate
from consilience.files.release import KIND, Release
from consilience.files.sealed import SealedFile
from consilience.hub.dashboard import queries
from consilience.hub.dashboard.answers import fix_for
from consilience.hub.dashboard.files import list_files
from consilience.hub.dashboard.quality import list_weights, show_quality
from consilience.hub.dashboard.visits import HEADERS, Visit, download
from consilience.hub.store import Row
from consilience.privacy.guarantee import Budget, Neighbours, Unit
from consilience.protocol import Refusal
from consilience.study.study import Study

MANY = 50  # weights on one page


def show_release(visit: Visit) -> Response:
    """Show a release: its certificate, how good it is, and whose contributions it is made of."""
    row, study, release = _get_release(visit)
    facts = release_facts(visit, study, release, page=visit.number(), size=MANY)
    return visit.page("release.html", row=row, study=study, release=release, **facts)


def download_release_certificate(visit: Visit) -> Response:
    """Return a release's certificate as a file."""
    row, _, release = _get_release(visit)
    if _is_hidden(visit, release):
        message = "A member of this release was withdrawn, and so was the release."
        raise Refusal("no-release", message)
    words = certificate.of_release(_read(str(visit.hub.store.files.path(release["sha256"]))))
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
    return release["state"] == "withdrawn" and not visit.someone.is_coordinator


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
    if release is None or _is_hidden(visit, release):
        return {"quality": None, "weights": None, "words_of_release": None, "weighing": None}
    read = _read(str(visit.hub.store.files.path(release["sha256"])))
    words = certificate.of_release(read)
    shown = [part for part in words.sections if not part[0].startswith(("Whose", "How good"))]
    return {
        "quality": show_quality(read.sealed.facts["quality"]),
        "weights": list_weights(read, page, size),
        "weighing": study.build_aggregator().describe().weighing,
        "words_of_release": certificate.Page(words.title, shown),
    }


# ----------------------------------------------------------------- releases that draw noise


def show_aggregate(visit: Visit, status: int = 200, problem: str | None = None) -> Response:
    """Say what a release would cost, and ask whether to make it."""
    row, study = visit.study()
    if not study.draws_noise:
        raise Refusal(
            "not-allowed",
            "The hub makes this study's releases by itself, at no cost, after every change.",
        )
    unit, neighbours = hidden_unit(study)
    return visit.page(
        "aggregate.html",
        status,
        key=secrets.token_hex(8),
        row=row,
        study=study,
        epsilon=study.aggregator_settings.get("epsilon"),
        delta=study.aggregator_settings.get("delta", 0.0),
        balance=visit.hub.balance(row["name"]),
        numbers=queries.numbers(visit.hub.store, row["name"]),
        current=visit.hub.store.release(row["name"]),
        files=list_files(visit.hub, study),
        unit=unit,
        neighbours=neighbours,
        problem=problem,
    )


def aggregate(visit: Visit) -> Response:
    """Make a release that draws noise; sending the same form twice makes one release."""
    row, study = visit.study()
    key = visit.form.get("key", "")
    if not study.draws_noise or not re.fullmatch("[0-9a-f]{16}", key):
        raise Refusal("malformed", "A part of the form is missing.")
    try:
        made = visit.request.app.state.combiner.command(row["name"], key, visit.someone.actor)
    except Refusal as refusal:
        return show_aggregate(visit, refusal.status, f"{refusal.message} {fix_for(refusal)}")
    return visit.redirect(f"/studies/{row['name']}/releases/{made['sequence']}?done=released")


def set_budget(visit: Visit) -> Response:
    """Set what the hub may spend on a study in total."""
    row, study = visit.study()
    try:
        epsilon, delta = (float(visit.form.get(name) or "0") for name in ("epsilon", "delta"))
        unit, neighbours = hidden_unit(study)
        budget = Budget(epsilon=epsilon, delta=delta, unit=unit, neighbours=neighbours)
        visit.hub.allow(row["name"], budget, visit.someone.actor)
    except ConsilienceError as problem:
        return show_aggregate(visit, 400, str(problem))
    except ValueError:
        return show_aggregate(visit, 400, "Epsilon and delta must be numbers.")
    return visit.redirect(f"/studies/{row['name']}/aggregate?done=allowed")


def hidden_unit(study: Study) -> tuple[Unit, Neighbours]:
    """Return whom the noise of a study's aggregator hides, and how."""
    aggregator = study.build_aggregator()
    neighbours = aggregator.hidden_neighbours or Neighbours(study.neighbours)
    return aggregator.hidden_unit or study.unit, neighbours
