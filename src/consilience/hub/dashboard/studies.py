"""Pages about studies: the list, adding one, showing one, its public files; and the audit log."""

from __future__ import annotations

import hashlib
import mimetypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fastapi import Response
from fastapi.responses import FileResponse, StreamingResponse

from consilience.errors import ConsilienceError
from consilience.hub.blind import require_blind
from consilience.hub.dashboard import charts, queries
from consilience.hub.dashboard.releases import release_facts
from consilience.hub.dashboard.sites import add_totals, show_spending
from consilience.hub.dashboard.texts import list_tasks
from consilience.hub.dashboard.visits import HEADERS, Visit, download, split_form
from consilience.hub.state import SiteState, read_blind, read_studies, read_study
from consilience.hub.store import now
from consilience.hub.store.audit import MOST_WALKED, Chain
from consilience.protocol import ERRORS, Refusal
from consilience.study.pages import of_study as pages_of_study
from consilience.study.study import check

FEW, MANY = 10, 50  # rows of a list within another page, and of a page of its own


def show_studies(visit: Visit) -> Response:
    """List the studies that an account is for."""
    account = visit.someone.account
    only = account.studies if account else ()
    listed = queries.study_pages(visit.hub.store, visit.number(), MANY, only=only)
    asked = [(row, visit.hub.agreed(row["name"])) for row in listed.rows]
    states = read_studies(visit.hub.store, asked)
    return visit.page("studies.html", studies=listed, states=states)


def show_new_study(visit: Visit) -> Response:
    """Ask for a study file."""
    return visit.page("new_study.html", text="", problems=[])


def add_study(visit: Visit) -> Response:
    """Add a study file, or show all its problems."""
    uploaded, pasted = visit.form.get("file", ""), visit.form.get("text", "")
    text = (uploaded if uploaded.strip() else pasted).replace("\r\n", "\n")
    problems = _find_problems(text)
    if not problems:
        try:
            row = visit.hub.add_study(text, visit.someone.actor)
            return visit.redirect(f"/studies/{row['name']}?done=created")
        except Refusal as refusal:
            problems = [f"{refusal.message} {ERRORS[refusal.code][1]}"]
    return visit.page("new_study.html", 422, text=text, problems=problems)


def _find_problems(text: str) -> list[str]:
    if not text.strip():
        return ["There is no text. Paste a study file, or choose one."]
    if "\ufffd" in text:
        return ["The file is not UTF-8 text."]
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", errors="replace", suffix=".toml"
    ) as file:
        file.write(text)
        file.flush()
        try:
            return check(file.name)
        except ConsilienceError as problem:
            return [str(problem)]
        except (TypeError, ValueError, AttributeError, KeyError):
            return ["A setting has a value of the wrong type. Compare it with the documentation."]


def show_study(visit: Visit) -> Response:
    """Show a study: everything to a coordinator; to a site its own part and what is public."""
    row, study = visit.study()
    store, who, name = visit.hub.store, visit.someone, row["name"]
    state = read_study(store, row, study)
    current = state.current
    blind = read_blind(visit.hub.blind, store, study, is_open=state.is_open)
    facts = {
        "row": row,
        "study": study,
        "words": pages_of_study(study),
        "state": state,
        "releases": queries.release_pages(store, name, visit.number("releases"), FEW),
        "hub_key": visit.hub.key.public,
        "blind": blind,
        **release_facts(visit, study, current, page=1, size=FEW),
    }
    if who.site is not None:
        own = SiteState(who.site, state, store.standing(name, who.name))
        spent = show_spending(visit, name, who.name)
        return visit.page("own.html", 200, state.confirmed, **facts, site=own, **spent)
    received = queries.timeline(store, name, row["created"])
    chart = charts.draw_timeline(
        received, since=row["created"], until=now(), title="Contributions over time"
    )
    facts |= {
        "sites": add_totals(queries.site_pages(store, name, 1, FEW)),
        "chart": chart if received else None,
        "todo": list_tasks(state, blind),
    }
    confirmed = state.confirmed | (blind.confirmed if blind is not None else set())
    return visit.page("study.html", 200, confirmed, **facts)


def show_study_text(visit: Visit) -> Response:
    """Return the study's file."""
    row, _ = visit.study()
    return download(row["text"].encode(), "application/toml", f"{row['name']}.toml")


def show_close(visit: Visit) -> Response:
    """Ask whether to close a study."""
    row, study = visit.study()
    return visit.page("close.html", row=row, state=read_study(visit.hub.store, row, study))


def close_study(visit: Visit) -> Response:
    """Close a study."""
    row, _ = visit.study()
    visit.hub.close_study(row["name"], visit.someone.actor)
    return visit.redirect(f"/studies/{row['name']}?done=closed")


def show_roster(visit: Visit, problem: str | None = None, status: int = 200) -> Response:
    """Ask whether to freeze the roster of a blind study."""
    row, study = visit.study()
    require_blind(study)
    keys = visit.hub.store.enrolled_keys(row["name"])
    facts = {"row": row, "keys": sorted(keys.items()), "problem": problem}
    blind = read_blind(visit.hub.blind, visit.hub.store, study, is_open=row["status"] == "open")
    return visit.page("roster.html", status, **facts, blind=blind)


def freeze_roster(visit: Visit) -> Response:
    """Freeze the roster of a blind study."""
    row, study = visit.study()
    who = visit.form.get("checked_by", "").strip()
    sites = visit.hub.store.enrolled_keys(row["name"])
    try:
        visit.hub.blind.freeze(study, dict.fromkeys(sites, who), visit.someone.actor)
    except Refusal as refusal:
        if refusal.code not in ("malformed", "too-few-sites"):
            raise
        return show_roster(visit, refusal.message, refusal.status)
    return visit.redirect(f"/studies/{row['name']}?done=frozen#blind")


def list_batch(visit: Visit) -> Response:
    """List a batch of all files that can be opened together now."""
    row, study = visit.study()
    visit.hub.blind.list_batch(study, visit.someone.actor)
    return visit.redirect(f"/studies/{row['name']}#blind")


def show_leave_out(visit: Visit) -> Response:
    """Ask whether to leave a whole batch out."""
    row, study = visit.study()
    number, is_open = _read_number(visit), row["status"] == "open"
    blind = read_blind(visit.hub.blind, visit.hub.store, study, is_open=is_open)
    batches = [] if blind is None else [one for one in blind.batches if one["number"] == number]
    if not batches:
        raise Refusal("not-found", "The study has no batch with this number.")
    return visit.page("leave_out.html", row=row, batch=batches[0], blind=blind)


def _read_number(visit: Visit) -> int:
    number = visit["number"]
    if not (number.isascii() and number.isdigit() and len(number) < 9):
        raise Refusal("not-found", "A batch is named by its number.")
    return int(number)


def leave_out_batch(visit: Visit) -> Response:
    """Leave a whole batch out of all later releases."""
    row, _ = visit.study()
    number = _read_number(visit)
    visit.hub.store.leave_out_batch(row["name"], number, visit.someone.actor)
    visit.hub.changed.set()
    return visit.redirect(f"/studies/{row['name']}#blind")


def show_audit(visit: Visit) -> Response:
    """Show the audit log, newest first, and whether its chain is whole."""
    asked = visit.request.query_params
    only = visit.hub.study(asked["study"])[0]["name"] if asked.get("study") else None
    chain: Chain = visit.request.app.state.chain
    if asked.get("verify") == "again":
        chain.forget()
        return visit.redirect("/audit" + (f"?study={only}" if only else ""))
    listed = queries.audit_pages(visit.hub.store, visit.number(), MANY, study=only)
    shown = [row["number"] for row in listed.rows]
    verdict = chain.verify(visit.hub.store, most=MOST_WALKED, again=shown)
    return visit.page("audit.html", entries=listed, verdict=verdict, only=only)


def download_audit(visit: Visit) -> Response:
    """Return the audit log, or what it says of one study, as CSV."""
    asked = visit.request.query_params.get("study")
    only = visit.hub.study(asked)[0]["name"] if asked else None
    named = {"content-disposition": 'attachment; filename="audit.csv"'}
    pieces = visit.hub.store.audit_csv(only)
    return StreamingResponse(pieces, headers={**HEADERS, **named}, media_type="text/csv")


# ------------------------------------------------------------------------------------- public files


_START = 2048  # bytes; they contain a form's token and the name of its file


def show_public_file(visit: Visit) -> Response:
    """Return a file of public records."""
    row, _ = visit.study()
    named = visit.hub.public_file(row["name"], visit["file"])
    if visit.hub.store.file(named.sha256) is None:
        raise Refusal("not-found", "The coordinator has not uploaded this file yet.")
    kind = mimetypes.guess_type(named.file)[0] if named.file.endswith((".csv", ".txt")) else None
    path = visit.hub.store.file_path(named.sha256)
    return FileResponse(
        path, media_type=kind or "application/octet-stream", headers=HEADERS, filename=named.file
    )


def take_file(visit: Visit, arrived: Path) -> Response:
    """Take a public file from the form that `arrived` on disk, if it is the one the study names."""
    row, _ = visit.study()
    named = visit.hub.public_file(row["name"], visit["file"])
    with unpacked(visit, arrived) as (inside, digest, _):
        visit.hub.keep_public_file(row["name"], named.file, inside, digest, visit.someone.actor)
    return visit.redirect(f"/studies/{row['name']}?done=uploaded#files")


@contextmanager
def unpacked(visit: Visit, arrived: Path) -> Iterator[tuple[Path, str, str]]:
    """Return the file in a form that `arrived` on disk: where it is, its digest and its name."""
    inside, digest = visit.hub.store.files.new(), hashlib.sha256()
    taken: list[str] = []
    called: list[str] = []
    try:
        with arrived.open("rb") as source, inside.open("wb") as target:

            def begin(name: str, file: str) -> Callable[[bytes], object]:
                taken.append(name)
                called.append(file)
                return keep if name == "file" else ignore

            def keep(piece: bytes) -> None:
                digest.update(piece)
                target.write(piece)

            def ignore(piece: bytes) -> None: ...

            is_whole = split_form(visit.request, iter(partial(source.read, 1 << 20), b""), begin)
        if not is_whole or taken.count("file") != 1:
            raise Refusal("malformed", "The form contains no file, or several.")
        yield inside, digest.hexdigest(), called[taken.index("file")]
    finally:
        inside.unlink(missing_ok=True)


def read_beginning(arrived: Path) -> bytes:
    """Return the beginning of a form: its token comes before its file."""
    with arrived.open("rb") as file:
        return file.read(_START)
