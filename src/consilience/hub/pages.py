"""The dashboard: pages for coordinators, and for a site what the study shows it. Parse, ask `Hub`, fill a template.

Nothing here needs a script in the browser. A page is sent with a policy that forbids scripts and
everything from elsewhere; a form is accepted only with the token of the visitor to whom its page
was sent.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mimetypes
import re
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from consilience.errors import ConsilienceError
from consilience.files import certificate
from consilience.files.contribution import KIND as CONTRIBUTION
from consilience.files.contribution import Contribution
from consilience.files.release import KIND as RELEASE
from consilience.files.release import Release
from consilience.files.sealed import SealedFile
from consilience.hub import auth, overview, showing
from consilience.hub.forms import beginning, file_within, read_form
from consilience.hub.hub import DIGEST, SITE_NAME, Hub
from consilience.hub.overview import Chain
from consilience.hub.store import Row, hashed, now
from consilience.hub.visitors import (
    FORM_COOKIE,
    SITE_COOKIE,
    VIEW_SECONDS,
    Visitor,
    end_view,
    form_token,
    is_own_form,
    new_link,
    read_link,
    use_link,
    visitor_of,
)
from consilience.privacy.guarantee import Budget, Guarantee, Neighbours, Unit, compose
from consilience.protocol import ERRORS, Refusal
from consilience.study.pages import of_study as pages_of_study
from consilience.study.study import DISTILLATIONS, PublicFile, Study, check

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
FEW, MANY = 10, 50  # rows of a list inside another page, and of a page of its own
MOST_CHECKED = 8 << 20  # bytes of a contribution that are read again for its certificate
_MACHINES = ("/api/", "/healthz", "/metrics", "/docs", "/openapi.json")
_WITHIN = re.compile(r"/(?!/)[A-Za-z0-9/._~%?=&+-]*")

logger = logging.getLogger("consilience.hub")


@dataclass(frozen=True)
class Visit:
    """One request for a page: who asks, for what, and what a form says."""

    request: Request
    hub: Hub
    visitor: Visitor | None
    form: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return str(self.request.path_params[name])

    @property
    def someone(self) -> Visitor:
        """Who asks, on pages that are not for nobody."""
        assert self.visitor is not None
        return self.visitor

    @property
    def secret(self) -> str | None:
        """What the tokens of the visitor's forms are made from."""
        return self.visitor.secret if self.visitor else self.request.cookies.get(FORM_COOKIE)

    def number(self, name: str = "page") -> int:
        """Return a number of the address, or 1."""
        text = self.request.query_params.get(name, "1")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1

    def study(self) -> tuple[Row, Study]:
        """Return the study of the address; for a site there is only its own."""
        name = self["study"]
        if not self.someone.is_coordinator and name != self.someone.study:
            raise Refusal("not-found", "There is no such study.")
        return self.hub.study(name)

    def page(self, template: str, status: int = 200, **facts: Any) -> Response:
        """Fill a template."""
        secret = self.secret or secrets.token_urlsafe(24)
        notice = showing.NOTICES.get(self.request.query_params.get("done", ""))
        common = {
            "visitor": self.visitor,
            "token": form_token(secret),
            "style": _style(),
            "notice": notice,
        }
        text = showing.TEMPLATES.get_template(template).render(
            {**common, "path": self.request.url.path, **facts}
        )
        answer = Response(text, status, HEADERS, "text/html; charset=utf-8")
        if self.secret is None:
            self.set_cookie(answer, FORM_COOKIE, secret, None)
        return answer

    def set_cookie(self, answer: Response, name: str, value: str, seconds: int | None) -> None:
        """Give the browser a cookie that no script reads and no other site's link or form sends."""
        secure = self.request.url.scheme == "https"
        answer.set_cookie(
            name, value, max_age=seconds, httponly=True, samesite="strict", secure=secure
        )

    def elsewhere(self, path: str) -> Response:
        """Send the browser to another page."""
        return RedirectResponse(path, 303, HEADERS)


Page = Callable[[Visit], Response]
Receive = Callable[[Request, Path, int], Awaitable[Any]]


# ------------------------------------------------------------------------------------------- adding them to the hub


def add_pages(
    app: FastAPI, *, body: Callable[..., Any], caller: Callable[..., Any], receive: Receive
) -> None:
    """Add the dashboard to the hub.

    `body` reads a request's body, `receive` streams a large one to disk, `caller` says which site
    signed it.
    """
    app.state.chain = Chain()
    for methods, path, who, page in PAGES:
        app.add_api_route(
            path, _endpoint(page, who, body), methods=methods.split(), include_in_schema=False
        )

    def open_dashboard(request: Request, study: str, who: Any = Depends(caller)) -> Response:  # noqa: B008
        """Make a one-time link that opens the dashboard for the site that signs this request."""
        if who.site is None:
            raise Refusal("not-allowed", "A link is for sites; coordinators log in.")
        token, until = new_link(request.app.state.hub, study, who.site)
        return JSONResponse({"path": f"/visits/{token}", "expires": until}, 201)

    async def upload(request: Request) -> Response:
        """Stream a form with a file to disk; everything else about it is `take_file`'s."""
        hub: Hub = request.app.state.hub
        arrived = hub.store.files.new()

        def take(visit: Visit) -> Response:
            return take_file(visit, arrived)

        try:
            async with request.app.state.uploads:
                await receive(request, arrived, hub.settings.most_public_bytes)
                first = await run_in_threadpool(beginning, arrived)
                return await run_in_threadpool(_endpoint(take, "coordinator", body), request, first)
        finally:
            arrived.unlink(missing_ok=True)

    app.add_api_route(f"{STUDY}/files/{{file}}", upload, methods=["POST"], include_in_schema=False)
    app.add_api_route(
        "/api/studies/{study}/visits",
        open_dashboard,
        methods=["POST"],
        operation_id="open_dashboard",
    )
    app.add_exception_handler(HTTPException, _unmatched)
    app.add_exception_handler(Refusal, _refused)


def _endpoint(page: Page, who: str, body: Callable[..., Any]) -> Callable[..., Response]:
    def answer(request: Request, content: bytes = Depends(body)) -> Response:
        visit = Visit(request, request.app.state.hub, None)
        try:
            visit = Visit(request, visit.hub, visitor_of(visit.hub, request.cookies))
            if request.method == "POST":
                visit = Visit(request, visit.hub, visit.visitor, read_form(request, content))
                _check_form(visit)
            if who != "anyone" and visit.visitor is None:
                return _log_in_first(visit)
            if who == "coordinator" and not visit.someone.is_coordinator:
                raise Refusal("not-allowed", "This page is for the study's coordinators.")
            return page(visit)
        except Refusal as refusal:
            return _error(visit, refusal)
        except (OperationalError, InterfaceError):
            logger.exception("the database did not answer")
            return _error(visit, Refusal("unavailable", "The hub's database does not answer."))
        except Exception:
            logger.exception("a page could not be made")
            return _error(
                visit,
                Refusal("unavailable", "The hub could not finish this page; its log says more."),
            )

    return answer


def _unmatched(request: Request, problem: Exception) -> Response:
    """Answer what no route fits: with a page, or for machines with the shape of error that they know."""
    assert isinstance(problem, HTTPException)
    code = {404: "not-found", 405: "wrong-method", 413: "too-large"}.get(
        problem.status_code, "malformed"
    )
    message = {
        "not-found": "There is nothing at this address.",
        "wrong-method": "The address knows other methods.",
    }
    return _refused(request, Refusal(code, message.get(code, "The request cannot be read.")))


def _refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    hub: Hub = request.app.state.hub
    return turned_away(request, refusal, lambda: visitor_of(hub, request.cookies))


def turned_away(
    request: Request, refusal: Refusal, visitor: Callable[[], Visitor | None] = lambda: None
) -> Response:
    """Answer a request that goes no further; by default without asking the database who sent it."""
    if request.url.path.startswith(_MACHINES):
        return JSONResponse(refusal.body, refusal.status)
    return _error(Visit(request, request.app.state.hub, visitor()), refusal)


def _error(visit: Visit, refusal: Refusal) -> Response:
    heading = showing.HEADINGS.get(refusal.code, "That was not possible")
    fix = showing.FIXES.get(refusal.code, ERRORS[refusal.code][1])
    return visit.page(
        "error.html", refusal.status, heading=heading, message=refusal.message, fix=fix
    )


def _log_in_first(visit: Visit) -> Response:
    asked = visit.request.url.path
    if visit.request.method == "POST" or not _WITHIN.fullmatch(asked):
        raise Refusal("not-authenticated", "Nobody is logged in here, or the session has ended.")
    return visit.elsewhere("/login" if asked == "/" else f"/login?next={quote(asked)}")


def _check_form(visit: Visit) -> None:
    elsewhere = visit.request.headers.get("sec-fetch-site", "same-origin") not in (
        "same-origin",
        "none",
    )
    if elsewhere or not is_own_form(visit.secret, visit.form.get("token", "")):
        raise Refusal(
            "not-allowed",
            "The form did not come from a page that this hub sent to you, or is too old.",
        )


@lru_cache(maxsize=1)
def _style() -> str:
    """Return the stylesheet's address: it changes with its content, so that browsers may keep it."""
    content = (STATIC / "style.css").read_bytes()
    return f"/static/style.css?{hashlib.sha256(content).hexdigest()[:12]}"


def static(visit: Visit) -> Response:
    """Return the stylesheet or the icon."""
    if visit["file"] not in ("style.css", "icon.svg"):
        raise Refusal("not-found", "There is nothing at this address.")
    kept = {
        "cache-control": "public, max-age=31536000, immutable",
        "content-security-policy": "default-src 'none'",
    }
    return FileResponse(STATIC / visit["file"], headers=kept)


# -------------------------------------------------------------------------------------------------- coming and going


def home(visit: Visit) -> Response:
    """Send everyone to where they begin."""
    who = visit.someone
    return visit.elsewhere("/studies" if who.is_coordinator else f"/studies/{who.study}")


def login(visit: Visit) -> Response:
    """Ask for a coordinator's name and password."""
    if visit.visitor is not None and visit.visitor.is_coordinator:
        return visit.elsewhere("/studies")
    return visit.page(
        "login.html", next=_next(visit.request.query_params.get("next")), name="", problem=None
    )


def log_in(visit: Visit) -> Response:
    """Begin a coordinator's session."""
    settings, request = visit.hub.settings, visit.request
    name, target = visit.form.get("name", "").strip(), _next(visit.form.get("next"))
    try:
        request.app.state.by_guess.take(request.client.host if request.client else "nowhere")
        password = visit.form.get("password", "")
        token, _ = auth.log_in(visit.hub.store, name[:200], password, hours=settings.session_hours)
    except Refusal as refusal:
        problem = (
            f"{refusal.message} {showing.LOGIN_FIXES.get(refusal.code, ERRORS[refusal.code][1])}"
        )
        return visit.page("login.html", refusal.status, next=target, name=name, problem=problem)
    answer = visit.elsewhere(target)
    visit.set_cookie(answer, auth.COOKIE, token, int(settings.session_hours * 3600))
    answer.delete_cookie(SITE_COOKIE)
    answer.delete_cookie(FORM_COOKIE)
    return answer


def log_out(visit: Visit) -> Response:
    """End the session."""
    if visit.someone.is_coordinator:
        visit.hub.store.end_session(hashed(visit.someone.secret))
    else:
        end_view(visit.hub, visit.someone)
    answer = visit.elsewhere("/login?done=out")
    answer.delete_cookie(auth.COOKIE)
    answer.delete_cookie(SITE_COOKIE)
    return answer


def _next(path: str | None) -> str:
    return path if path and _WITHIN.fullmatch(path) else "/studies"


def visiting(visit: Visit) -> Response:
    """Ask a site whether to open its view: a link that something fetched ahead must not be used up by that."""
    facts = read_link(visit.hub, visit["link"])
    site = visit.hub.store.signer(facts["study"], facts["key"])
    return visit.page("visit.html", site=site["name"], study=facts["study"])


def visited(visit: Visit) -> Response:
    """Use a site's link up and open its view."""
    view, facts = use_link(visit.hub, visit["link"])
    if visit.visitor is not None and visit.visitor.is_coordinator:
        visit.hub.store.end_session(hashed(visit.visitor.secret))
    answer = visit.elsewhere(f"/studies/{facts['study']}")
    answer.delete_cookie(auth.COOKIE)
    visit.set_cookie(answer, SITE_COOKIE, view, VIEW_SECONDS)
    return answer


# ------------------------------------------------------------------------------------------------------------ studies


def studies(visit: Visit) -> Response:
    """List the studies."""
    found = overview.study_pages(visit.hub.store, visit.number(), MANY)
    for row in found.rows:
        row["min_sites"] = visit.hub.study(row["name"])[1].min_sites
    return visit.page("studies.html", studies=found)


def new_study(visit: Visit) -> Response:
    """Ask for a study file."""
    return visit.page("new_study.html", text="", problems=[])


def add_study(visit: Visit) -> Response:
    """Take a study file, or show everything that stands against it."""
    text = (visit.form.get("file", "").strip() and visit.form["file"]) or visit.form.get("text", "")
    text = text.replace("\r\n", "\n")
    problems = _problems(text)
    if not problems:
        try:
            row = visit.hub.add_study(text, visit.someone.actor)
            return visit.elsewhere(f"/studies/{row['name']}?done=created")
        except Refusal as refusal:
            problems = [f"{refusal.message} {ERRORS[refusal.code][1]}"]
    return visit.page("new_study.html", 422, text=text, problems=problems)


def _problems(text: str) -> list[str]:
    if not text.strip():
        return ["there is no text: paste a study file, or choose one"]
    if "\ufffd" in text:
        return ["the file is not UTF-8 text"]
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
            return ["a setting has a value of the wrong kind: compare it with the documentation"]


def study(visit: Visit) -> Response:
    """Show a study: to a coordinator everything, to a site what is public in it and its own."""
    row, found = visit.study()
    store, who = visit.hub.store, visit.someone
    released = overview.release_pages(store, row["name"], visit.number("releases"), FEW)
    current = store.release(row["name"])
    facts: dict[str, Any] = {
        "row": row,
        "study": found,
        "words": pages_of_study(found),
        "files": _files(visit.hub, found),
        "releases": released,
        "current": current,
        "hub_key": visit.hub.key.public,
    }
    facts |= _release_facts(visit, found, current, page=1, size=FEW)
    if who.site is not None:
        own = overview.site(store, row["name"], who.name)
        assert own is not None
        return visit.page("own.html", **facts, site=own, spent=_spent(own["contributions"]))
    numbers = overview.numbers(store, row["name"])
    came = overview.timeline(store, row["name"])
    facts |= {
        "numbers": numbers,
        "sites": _with_totals(overview.site_pages(store, row["name"], 1, FEW)),
        "chart": showing.over_time(came, row["created"]) if came else None,
        "came": len(came),
        "todo": showing.todo(row, found, numbers, current, facts["files"]),
    }
    return visit.page("study.html", **facts)


def _files(hub: Hub, found: Study) -> list[Row]:
    parts: dict[str, tuple[PublicFile, list[str]]] = {}
    for part, use in ((found.public, "combining"), (found.test, "measuring releases")):
        if part is not None:
            parts.setdefault(part.sha256, (part, []))[1].append(use)
    listed: list[Row] = []
    for part, uses in parts.values():
        there = hub.store.file(part.sha256)
        listed.append(
            {"file": part.file, "sha256": part.sha256, "uses": " and ".join(uses), "there": there}
        )
    return listed


def study_text(visit: Visit) -> Response:
    """Return the study's file."""
    row, _ = visit.study()
    return _download(row["text"].encode(), "application/toml", f"{row['name']}.toml")


def public_file(visit: Visit) -> Response:
    """Return a file of public records."""
    row, _ = visit.study()
    found = visit.hub.public_file(row["name"], visit["file"])
    if visit.hub.store.file(found.sha256) is None:
        raise Refusal("not-found", "The coordinator has not uploaded this file yet.")
    kind = mimetypes.guess_type(found.file)[0] if found.file.endswith((".csv", ".txt")) else None
    path = visit.hub.store.files.path(found.sha256)
    return FileResponse(
        path, media_type=kind or "application/octet-stream", headers=HEADERS, filename=found.file
    )


def take_file(visit: Visit, arrived: Path) -> Response:
    """Take a file of public records from the form that `arrived` on disk, if it is the one that the study names."""
    row, _ = visit.study()
    named = visit.hub.public_file(row["name"], visit["file"])
    begin, end = file_within(arrived, visit.request.headers.get("content-type", ""))
    inside, digest = visit.hub.store.files.new(), hashlib.sha256()
    try:
        with arrived.open("rb") as source, inside.open("wb") as target:
            source.seek(begin)
            while begin < end and (part := source.read(min(1 << 20, end - begin))):
                begin += len(part)
                digest.update(part)
                target.write(part)
        visit.hub.keep_public_file(
            row["name"], named.file, inside, digest.hexdigest(), visit.someone.actor
        )
    finally:
        inside.unlink(missing_ok=True)
    return visit.elsewhere(f"/studies/{row['name']}?done=uploaded#files")


def _download(content: bytes, kind: str, name: str) -> Response:
    named = {"content-disposition": f"attachment; filename*=utf-8''{quote(name)}"}
    return Response(content, headers={**HEADERS, **named}, media_type=f"{kind}; charset=utf-8")


# --------------------------------------------------------------------------------------------- what a coordinator does


def inviting(visit: Visit) -> Response:
    """Ask whom to invite, and list the invitations there are."""
    row, _ = visit.study()
    return _invitation(visit, row, None)


def invite(visit: Visit) -> Response:
    """Make an invitation and show its code, this once."""
    row, _ = visit.study()
    site = visit.form.get("site", "").strip() or None
    try:
        days = float(visit.form.get("days", "7"))
    except ValueError:
        days = math.nan
    options: dict[str, Any] = {
        "site": site,
        "fetch_only": visit.form.get("fetch_only") == "yes",
        "days": days,
    }
    try:
        code, expires = visit.hub.invite(row["name"], visit.someone.actor, **options)
    except Refusal as refusal:
        if refusal.code != "malformed":
            raise
        return _invitation(visit, row, refusal.message, 400)
    address = str(visit.request.base_url).rstrip("/")
    return visit.page(
        "invited.html", row=row, code=code, expires=expires, address=address, **options
    )


def _invitation(visit: Visit, row: Row, problem: str | None, status: int = 200) -> Response:
    if row["status"] != "open":
        raise Refusal("study-closed", f"The study {row['name']!r} is closed.")
    listed = visit.hub.store.invitations(row["name"])[:MANY]
    asked = visit.form or visit.request.query_params
    facts = {"row": row, "problem": problem, "invitations": listed, "now": now(), "asked": asked}
    return visit.page("invite.html", status, **facts)


def closing(visit: Visit) -> Response:
    """Ask whether to close a study."""
    row, _ = visit.study()
    return visit.page("close.html", row=row, numbers=overview.numbers(visit.hub.store, row["name"]))


def close(visit: Visit) -> Response:
    """Close a study."""
    row, _ = visit.study()
    visit.hub.close_study(row["name"], visit.someone.actor)
    return visit.elsewhere(f"/studies/{row['name']}?done=closed")


def aggregating(visit: Visit) -> Response:
    """Say what a release would cost, and ask whether to make it."""
    row, found = visit.study()
    if not found.draws_noise:
        raise Refusal(
            "not-allowed",
            "This study's releases are made by the hub itself, at no cost, after every change.",
        )
    return visit.page(
        "aggregate.html", key=secrets.token_hex(8), **_cost(visit, row, found), problem=None
    )


def aggregate(visit: Visit) -> Response:
    """Make a release that draws noise; the same form sent twice makes one."""
    row, found = visit.study()
    key = visit.form.get("key", "")
    if not found.draws_noise or not re.fullmatch("[0-9a-f]{16}", key):
        raise Refusal("malformed", "The form lacks a part.")
    try:
        made = visit.request.app.state.combiner.command(row["name"], key, visit.someone.actor)
    except Refusal as refusal:
        problem = f"{refusal.message} {showing.FIXES.get(refusal.code, ERRORS[refusal.code][1])}"
        facts = {"key": secrets.token_hex(8), **_cost(visit, row, found), "problem": problem}
        return visit.page("aggregate.html", refusal.status, **facts)
    return visit.elsewhere(f"/studies/{row['name']}/releases/{made['sequence']}?done=released")


def allow(visit: Visit) -> Response:
    """Set what the hub may spend on a study in all."""
    row, found = visit.study()
    try:
        epsilon, delta = (float(visit.form.get(name) or "0") for name in ("epsilon", "delta"))
        visit.hub.allow(
            row["name"], Budget(epsilon=epsilon, delta=delta, **_hidden(found)), visit.someone.actor
        )
    except (ConsilienceError, ValueError) as problem:
        said = (
            str(problem)
            if isinstance(problem, ConsilienceError)
            else "Epsilon and delta must be numbers."
        )
        facts = {"key": secrets.token_hex(8), **_cost(visit, row, found), "problem": said}
        return visit.page("aggregate.html", 400, **facts)
    return visit.elsewhere(f"/studies/{row['name']}/aggregate?done=allowed")


def _hidden(found: Study) -> dict[str, Any]:
    """Return whom the noise of a study's aggregator hides, and how."""
    if found.aggregator in DISTILLATIONS:
        return {"unit": Unit.SITE, "neighbours": Neighbours(found.build_aggregator().neighbours)}
    unit = Unit.RECORD if found.schema.person is None else Unit.PERSON
    return {"unit": unit, "neighbours": Neighbours(found.neighbours)}


def _cost(visit: Visit, row: Row, found: Study) -> dict[str, Any]:
    settings = found.aggregator_settings
    return {
        "row": row,
        "study": found,
        "epsilon": settings.get("epsilon"),
        "delta": settings.get("delta", 0.0),
        "balance": visit.hub.balance(row["name"]),
        "numbers": overview.numbers(visit.hub.store, row["name"]),
        "current": visit.hub.store.release(row["name"]),
        "files": _files(visit.hub, found),
        **_hidden(found),
    }


# -------------------------------------------------------------------------------------------------------------- sites


def sites(visit: Visit) -> Response:
    """List a study's sites."""
    row, found = visit.study()
    like = visit.request.query_params.get("like", "").strip()[:100]
    listed = overview.site_pages(visit.hub.store, row["name"], visit.number(), MANY, like=like)
    return visit.page("sites.html", row=row, study=found, sites=_with_totals(listed), like=like)


def site(visit: Visit) -> Response:
    """Show one site of a study."""
    row, found, own = _site(visit)
    return visit.page(
        "site.html", row=row, study=found, site=own, spent=_spent(own["contributions"])
    )


def revoking(visit: Visit) -> Response:
    """Ask whether to revoke a site's key."""
    row, _, own = _site(visit)
    return visit.page("revoke.html", row=row, site=own)


def revoke(visit: Visit) -> Response:
    """Revoke a site's key."""
    row, _, own = _site(visit)
    taking_out = visit.form.get("withdraw") == "yes"
    visit.hub.revoke(row["name"], own["name"], visit.someone.actor, withdraw=taking_out)
    return visit.elsewhere(f"/studies/{row['name']}/sites/{quote(own['name'])}?done=revoked")


def _site(visit: Visit) -> tuple[Row, Study, Row]:
    row, found = visit.study()
    name, who = visit["site"], visit.someone
    seen = SITE_NAME.fullmatch(name) and (who.is_coordinator or who.name == name)
    own = overview.site(visit.hub.store, row["name"], name) if seen else None
    if own is None:
        raise Refusal("not-found", "There is no such site in this study.")
    return row, found, own


def _spent(contributions: Sequence[Row]) -> list[Row]:
    """Return a site's contributions, newest first, each with all that was submitted up to it."""
    promised: list[Guarantee] = []
    rows = []
    for row in sorted(contributions, key=lambda one: one["sequence"]):
        promised.append(Guarantee.from_dict(row["guarantee"]))
        rows.append({**row, "own": promised[-1], "total": compose(*promised)})
    return rows[::-1]


def _with_totals(listed: overview.Paged) -> overview.Paged:
    for row in listed.rows:
        spent = _spent(row["contributions"])
        row |= {
            "accepted": next((one for one in spent if one["state"] == "accepted"), None),
            "newest": spent[0] if spent else None,
            "total": spent[0]["total"] if spent else None,
        }
    return listed


# ------------------------------------------------------------------------------------------ certificates and releases


def contribution(visit: Visit) -> Response:
    """Show a contribution's certificate to its site and to coordinators."""
    row, found, own, words = _contribution(visit)
    return visit.page("contribution.html", row=row, study=found, contribution=own, words=words)


def contribution_certificate(visit: Visit) -> Response:
    """Return a contribution's certificate as a file."""
    row, _, own, words = _contribution(visit)
    name = f"{row['name']}-{own['site'].replace(' ', '-')}-{own['sequence']}-certificate"
    return _certificate(visit, words, name)


def _contribution(visit: Visit) -> tuple[Row, Study, Row, certificate.Page]:
    row, found = visit.study()
    digest, who = visit["digest"], visit.someone
    own = (
        overview.contribution(visit.hub.store, row["name"], digest)
        if DIGEST.fullmatch(digest)
        else None
    )
    if own is None or not (who.is_coordinator or who.name == own["site"]):
        raise Refusal("not-found", "There is no such contribution in this study.")
    content = visit.hub.store.content(own["sha256"])
    if own["size"] <= MOST_CHECKED:
        loaded = Contribution.load(content, trusted=found.trusted)
    else:  # its tensors were checked when it came
        loaded = Contribution(SealedFile(content, CONTRIBUTION).hollow)
    return row, found, own, certificate.of_contribution(loaded)


def release(visit: Visit) -> Response:
    """Show a release: its certificate, how good it is, and whose contributions it is made of."""
    row, found, one = _release(visit)
    facts = _release_facts(visit, found, one, page=visit.number(), size=MANY)
    return visit.page("release.html", row=row, study=found, one=one, **facts)


def release_certificate(visit: Visit) -> Response:
    """Return a release's certificate as a file."""
    row, _, one = _release(visit)
    if one["state"] == "withdrawn" and not visit.someone.is_coordinator:
        raise Refusal(
            "no-release", "A member of this release was withdrawn, and the release with it."
        )
    words = certificate.of_release(_read(str(visit.hub.store.files.path(one["sha256"]))))
    return _certificate(visit, words, f"{row['name']}-release-{one['sequence']}-certificate")


def release_file(visit: Visit) -> Response:
    """Return a release itself, unless a member of it was withdrawn."""
    row, _, one = _release(visit)
    _, path = visit.hub.release_path(row["name"], one["sequence"])
    name = f"{row['name']}-release-{one['sequence']}.safetensors"
    return FileResponse(path, media_type="application/octet-stream", headers=HEADERS, filename=name)


def _release(visit: Visit) -> tuple[Row, Study, Row]:
    row, found = visit.study()
    number = visit["number"]
    fits = number.isascii() and number.isdigit() and len(number) < 10
    one = visit.hub.store.release(row["name"], int(number)) if fits else None
    if one is None:
        raise Refusal("no-release", "There is no release of this number.")
    return row, found, one


@lru_cache(maxsize=32)
def _read(path: str) -> Release:
    """Return a release of this hub without its tensors; a file's name is its digest, so it never changes."""
    return Release(SealedFile(path, RELEASE).hollow)


def _release_facts(
    visit: Visit, found: Study, one: Row | None, *, page: int, size: int
) -> dict[str, Any]:
    """Return what the parts about a release need; a site does not see one whose member was withdrawn."""
    if one is None or (one["state"] == "withdrawn" and not visit.someone.is_coordinator):
        return {"quality": None, "weights": None, "words_of_release": None, "weighing": None}
    read = _read(str(visit.hub.store.files.path(one["sha256"])))
    words = certificate.of_release(read)
    shown = [part for part in words.sections if not part[0].startswith(("Whose", "How good"))]
    return {
        "quality": showing.quality(read.sealed.facts["quality"]),
        "weights": showing.weights(read, page, size),
        "weighing": showing.weighing(found),
        "words_of_release": certificate.Page(words.title, shown),
    }


def _certificate(visit: Visit, words: certificate.Page, name: str) -> Response:
    if visit["kind"] == "html":
        return _download(words.as_html().encode(), "text/html", f"{name}.html")
    if visit["kind"] == "txt":
        return _download(words.as_text().encode(), "text/plain", f"{name}.txt")
    raise Refusal("not-found", "A certificate comes as html or txt.")


# -------------------------------------------------------------------------------------------------------------- the log


def audit(visit: Visit) -> Response:
    """Show the audit log, newest first, and whether its chain is whole."""
    asked = visit.request.query_params
    only = asked.get("study", "")
    row = visit.hub.study(only)[0] if only else None
    listed = overview.audit_pages(
        visit.hub.store, visit.number(), MANY, study=row["name"] if row else None
    )
    chain: Chain = visit.request.app.state.chain
    if asked.get("verify") == "again":
        chain.forget()
        return visit.elsewhere("/audit" + (f"?study={row['name']}" if row else ""))
    verdict = chain.verify(visit.hub.store)
    return visit.page(
        "audit.html", entries=listed, verdict=verdict, only=row["name"] if row else None
    )


STUDY = "/studies/{study}"
SITE = f"{STUDY}/sites/{{site}}"
PAGES: tuple[tuple[str, str, str, Page], ...] = (
    ("GET HEAD", "/static/{file}", "anyone", static),
    ("GET HEAD", "/", "known", home),
    ("GET HEAD", "/login", "anyone", login),
    ("POST", "/login", "anyone", log_in),
    ("POST", "/logout", "known", log_out),
    ("GET HEAD", "/visits/{link}", "anyone", visiting),
    ("POST", "/visits/{link}", "anyone", visited),
    ("GET HEAD", "/studies", "coordinator", studies),
    ("GET HEAD", "/new-study", "coordinator", new_study),
    ("POST", "/new-study", "coordinator", add_study),
    ("GET HEAD", STUDY, "known", study),
    ("GET HEAD", f"{STUDY}/text", "known", study_text),
    ("GET HEAD", f"{STUDY}/files/{{file}}", "known", public_file),
    ("GET HEAD", f"{STUDY}/invite", "coordinator", inviting),
    ("POST", f"{STUDY}/invite", "coordinator", invite),
    ("GET HEAD", f"{STUDY}/close", "coordinator", closing),
    ("POST", f"{STUDY}/close", "coordinator", close),
    ("GET HEAD", f"{STUDY}/aggregate", "coordinator", aggregating),
    ("POST", f"{STUDY}/aggregate", "coordinator", aggregate),
    ("POST", f"{STUDY}/budget", "coordinator", allow),
    ("GET HEAD", f"{STUDY}/sites", "coordinator", sites),
    ("GET HEAD", SITE, "known", site),
    ("GET HEAD", f"{SITE}/revoke", "coordinator", revoking),
    ("POST", f"{SITE}/revoke", "coordinator", revoke),
    ("GET HEAD", f"{STUDY}/contributions/{{digest}}", "known", contribution),
    (
        "GET HEAD",
        f"{STUDY}/contributions/{{digest}}/certificate.{{kind}}",
        "known",
        contribution_certificate,
    ),
    ("GET HEAD", f"{STUDY}/releases/{{number}}", "known", release),
    ("GET HEAD", f"{STUDY}/releases/{{number}}/certificate.{{kind}}", "known", release_certificate),
    ("GET HEAD", f"{STUDY}/releases/{{number}}/file", "known", release_file),
    ("GET HEAD", "/audit", "coordinator", audit),
)
