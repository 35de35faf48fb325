"""The hub's addresses for machines. Each endpoint parses the request, asks `Hub` and answers."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from consilience.blind.masked import MOST_NUMBERS
from consilience.files.sealed import software
from consilience.hub import auth
from consilience.hub.api.requests import (
    Anyone,
    Body,
    Command,
    Coordinator,
    Enrolment,
    Freezing,
    Invitation,
    Keyholder,
    LargeBody,
    Login,
    Party,
    Rotation,
    Sender,
    SiteChanging,
    address_of,
    bearer_token,
    check_account,
    coordinator,
    hub_of,
    is_local,
    keyholder_of,
    parse_body,
    receive_body,
    receive_file,
    sender_of,
    signature_of,
    site_changing,
    site_in,
    upload_place,
)
from consilience.hub.blind import require_blind
from consilience.hub.combining import Combiner
from consilience.hub.dashboard.visits import new_link
from consilience.hub.drafts import read_shared
from consilience.hub.roles import Account, Action
from consilience.hub.state import invitation_state
from consilience.hub.store import Row, hashed
from consilience.protocol import Refusal, Signed, digest
from consilience.study.study import Study

FILE = "application/octet-stream"
MOST_IN_PAGE = 1000  # digests of releases
MOST_OPENING = 8 * MOST_NUMBERS + (64 << 10)  # bytes
SHOWN = {
    "study": ("name", "digest", "status", "created", "problem"),
    "site": ("name", "key", "status", "fetch_only", "enrolled"),
    "contribution": ("digest", "site", "sequence", "state", "guarantee", "size", "received"),
    "batch": ("digest", "number", "state", "listed", "changed"),
    "release": ("digest", "sequence", "state", "n_sites", "guarantee", "size", "created"),
}


def _show(kind: str, row: Row) -> Row:
    return {name: row[name] for name in SHOWN[kind]}


# ------------------------------------------------------------------------------------ open to all


def health(_: Request) -> Row:
    """Tell that the hub's process answers."""
    return {"status": "ok", "version": software()}


def ready(request: Request) -> Row:
    """Tell that the hub can write to its database and to its folder."""
    hub_of(request).check_ready()
    return {"status": "ready"}


def metrics(request: Request) -> Response:
    """Return counts, sizes and durations for Prometheus, on this machine or with a token."""
    state, stated = request.app.state, hub_of(request).settings.metrics_token
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not (is_local(request) or (stated and compare_digest(given.encode(), stated.encode()))):
        check_account(request, Action.LOOK)
        coordinator(request)
    text = state.metrics.text(state.hub.store.counts(), state.combiner)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def about(request: Request) -> Row:
    """Return the hub's public key, its version, its time and its limits."""
    hub = hub_of(request)
    return {
        "version": software(),
        "key": hub.key.public,
        "time": time.time(),
        "most_bytes": hub.settings.most_bytes,
    }


def read_draft(request: Request, token: str) -> Response:
    """Return the study file of a draft, to whoever has its link, to check a table against."""
    request.app.state.by_guess.take(auth.network_of(address_of(request)))
    hub = hub_of(request)
    text = read_shared(hub, token, str(request.base_url).rstrip("/"))
    headers = {
        "cache-control": "no-store",
        "content-disposition": "attachment; filename=study.toml",
    }
    return Response(text.encode(), media_type="application/toml", headers=headers)


# ------------------------------------------------------------------------------- for coordinators


def log_in(request: Request, body: Body) -> Row:
    """Exchange an account's name and password for a token."""
    hub = hub_of(request)
    asked = parse_body(Login, body)
    logins: auth.Logins = request.app.state.logins
    token, expires = logins.log_in(
        asked.name,
        asked.password,
        address_of(request),
        hours=hub.settings.session_hours,
        code=asked.code,
    )
    return {"token": token, "expires": expires}


def log_out(request: Request, _: Coordinator) -> Row:
    """End the session of the token."""
    hub_of(request).store.end_session(hashed(bearer_token(request)))
    return {"status": "ended"}


def add_study(request: Request, body: LargeBody, actor: Coordinator) -> Response:
    """Add a study file (TOML)."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise Refusal("study-invalid", "The study file is not UTF-8 text.") from None
    return JSONResponse(_show("study", hub_of(request).add_study(text, actor)), 201)


def list_studies(request: Request, _: Coordinator) -> Row:
    """List the studies that the account is for."""
    account: Account = request.state.account
    rows = hub_of(request).store.studies()
    return {"studies": [_show("study", row) for row in rows if account.sees(row["name"])]}


async def put_file(request: Request, study: str, file: str) -> Row:
    """Upload a file of public records that the study names."""
    hub = hub_of(request)
    actor = await run_in_threadpool(coordinator, request)
    await run_in_threadpool(hub.public_file, study, file)
    async with upload_place(request, actor) as arrived:
        sha256 = await receive_file(request, arrived, hub.settings.most_public_bytes)
        kept = await run_in_threadpool(hub.keep_public_file, study, file, arrived, sha256, actor)
    return {"file": kept.file, "sha256": kept.sha256}


def invite(request: Request, study: str, body: Body, actor: Coordinator) -> Response:
    """Make a one-time invitation; its code is shown once."""
    asked = parse_body(Invitation, body or b"{}")
    code, expires = hub_of(request).invite(
        study, actor, site=asked.site, fetch_only=asked.fetch_only, days=asked.days
    )
    return JSONResponse({"code": code, "expires": expires, "study": study}, 201)


def list_invitations(request: Request, study: str, _: Coordinator) -> Row:
    """List a study's invitations and their states, without their codes."""
    hub = hub_of(request)
    row = hub.study(study)[0]
    listed = hub.store.invitations(study)
    return {"invitations": [{**one, "state": invitation_state(one, row)} for one in listed]}


def list_sites(request: Request, study: str, _: Coordinator) -> Row:
    """List a study's sites."""
    hub = hub_of(request)
    hub.study(study)
    return {"sites": [_show("site", row) for row in hub.store.sites(study)]}


def revoke_key(
    request: Request, study: str, site: str, actor: Coordinator, withdraw: bool = False
) -> Row:
    """Revoke a site's key; with ``withdraw=true`` also withdraw its contribution."""
    return _show("site", hub_of(request).revoke(study, site, actor, withdraw=withdraw))


def combine(request: Request, study: str, body: Body, actor: Coordinator) -> Response:
    """Combine the study now; where that draws noise, the hub's ledger is charged first."""
    asked = parse_body(Command, body)
    combiner: Combiner = request.app.state.combiner
    row = combiner.combine(study, request=asked.key, change=asked.change, actor=actor)
    return JSONResponse(_show("release", row), 201)


def close_study(request: Request, study: str, actor: Coordinator) -> Row:
    """Close a study: it takes no more sites or contributions."""
    return _show("study", hub_of(request).close_study(study, actor))


def read_audit(
    request: Request,
    _: Coordinator,
    after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Row:
    """Return entries of the hash-chained audit log, oldest first."""
    return {"entries": hub_of(request).store.audit(after=after, limit=limit)}


def read_audit_csv(request: Request, _: Coordinator) -> Response:
    """Return the whole audit log as CSV, oldest first."""
    return StreamingResponse(hub_of(request).store.audit_csv(), media_type="text/csv")


# -------------------------------------------------------------------------------------- for sites


def enrol(request: Request, body: Body) -> Response:
    """Enrol the key that signs this request, with a one-time code."""
    asked = parse_body(Enrolment, body)
    request.app.state.by_guess.take(auth.network_of(address_of(request)))
    signed = signature_of(request)
    signed.check_body(digest(body))
    hub = hub_of(request)
    row = hub.enrol(
        code=asked.invitation,
        site=asked.site,
        key=signed.key,
        nonce=signed.nonce,
        fetch_only=asked.fetch_only,
    )
    facts = {"study": row["study"], "digest": hub.agreed(row["study"]).digest}
    facts |= {"hub_key": hub.key.public, "site": _show("site", row)}
    return JSONResponse(facts, 201)


def rotate_key(request: Request, body: Body) -> Row:
    """Replace the site's key in a study: signed by the old key, with a proof by the new one."""
    asked = parse_body(Rotation, body)
    signed, _ = site_changing(request, asked.study, body)
    row = hub_of(request).rotate(asked.study, signed.key, asked.new_key, asked.proof, signed.nonce)
    return _show("site", row)


def read_study(request: Request, study: str, site: Anyone) -> Row:
    """Return the study's file, and which of its public files the hub has."""
    hub = hub_of(request)
    row, agreed = hub.study(study)
    files = [
        {"file": part.file, "sha256": part.sha256, "there": hub.store.file(part.sha256) is not None}
        for part in agreed.files
    ]
    facts = {name: row[name] for name in ("name", "digest", "status", "text")}
    facts |= {"study": agreed.to_dict(), "files": files, "hub_key": hub.key.public}
    if site is not None:
        return {**facts, "site": _show("site", site)}
    withheld = row["changes"] if row["withheld"] else None
    facts |= {"problem": row["problem"], "withheld": withheld, "created": row["created"]}
    return {**facts, "left_out": hub.store.absent(study) or None}


def read_public_file(request: Request, study: str, file: str, _: Anyone) -> Response:
    """Return a file of public records."""
    hub = hub_of(request)
    named = hub.public_file(study, file)
    if hub.store.file(named.sha256) is None:
        raise Refusal("not-found", "The coordinator has not uploaded this file yet.")
    return FileResponse(hub.store.file_path(named.sha256), media_type=FILE)


async def submit(request: Request, study: str) -> Response:
    """Submit a contribution (the file itself); submitting it again changes nothing."""
    state, settings = request.app.state, hub_of(request).settings
    declared = request.headers.get("content-length", str(settings.most_bytes))
    if not (declared.isascii() and declared.isdigit()):
        raise Refusal("malformed", "The declared length of the file is not a number.")
    if len(declared) > 18 or int(declared) > settings.most_bytes:
        raise Refusal("too-large", f"The file is larger than {settings.most_bytes >> 20} MiB.")
    # Nothing is received, and no place is given, before the hub knows who sends.
    run = asyncio.get_running_loop().run_in_executor
    sender = await run(state.checks, sender_of, request, study)
    site = site_in(study, sender[1])
    if int(declared) <= settings.small_bytes:
        uploads: auth.Uploads = state.small_uploads
        async with uploads.place(site):
            content = await receive_body(request, min(settings.small_bytes, settings.most_bytes))
            row, is_new = await run(state.checks, _accept, request, study, sender, content)
    else:
        async with upload_place(request, site) as arrived:
            sha256 = await receive_file(request, arrived, settings.most_bytes)
            row, is_new = await run_in_threadpool(_accept, request, study, sender, arrived, sha256)
    return JSONResponse(_show("contribution", row), 201 if is_new else 200)


def _accept(
    request: Request, study: str, sender: Sender, content: Path | bytes, sha256: str = ""
) -> tuple[Row, bool]:
    """Take a file that arrived, or refuse it and say so in the audit log."""
    signed, site, newest = sender
    sha256 = digest(content) if isinstance(content, bytes) else sha256
    try:
        signed.check_body(sha256)
        return hub_of(request).take(study, site, newest, content, sha256, signed.nonce)
    except Refusal as refusal:
        facts = {"code": refusal.code, "sha256": sha256}
        notes: auth.Notes = request.app.state.notes
        notes.add(f"site:{site['name']}", "contribution refused", study, **facts)
        raise


def list_contributions(request: Request, study: str, site: Anyone) -> Row:
    """List the site's own contributions; a coordinator sees everyone's facts, but no files."""
    own = None if site is None else site["name"]
    rows = hub_of(request).store.contributions(study, site=own)
    return {"contributions": [_show("contribution", row) for row in rows]}


def read_contribution(request: Request, study: str, digest: str, site: Anyone) -> Response:
    """Return one of the site's own contributions (the file itself), for its ledger."""
    if site is None:
        raise Refusal("not-allowed", "The files of contributions are for the sites that sent them.")
    content = hub_of(request).own_contribution(study, site["name"], digest)
    if isinstance(content, bytes):
        return Response(content, media_type=FILE)
    return FileResponse(content, media_type=FILE)


def list_members(request: Request, study: str, site: Anyone) -> Row:
    """List the digests of the contributions that the asking site is to weigh."""
    return {"members": [row["digest"] for row in hub_of(request).members(study, _name_of(site))]}


def read_member(request: Request, study: str, digest: str, site: Anyone) -> Response:
    """Return the file of a contribution that the asking site is to weigh."""
    content = hub_of(request).member(study, _name_of(site), digest)
    if isinstance(content, bytes):
        return Response(content, media_type=FILE)
    return FileResponse(content, media_type=FILE)


def _name_of(site: Row | None) -> str:
    """Return the name of the site that asks, or refuse everyone else."""
    if site is None:
        raise Refusal("not-allowed", "Members are for the site that the study names to weigh them.")
    return str(site["name"])


def withdraw(request: Request, study: str, sender: SiteChanging) -> Row:
    """Withdraw the site's contribution: no later release contains it."""
    signed, _ = sender
    return _show("contribution", hub_of(request).withdraw(study, signed.key, signed.nonce))


def list_releases(request: Request, study: str, _: Anyone) -> Row:
    """List the study's releases, newest first."""
    rows = hub_of(request).store.releases(study)
    return {"releases": [_show("release", row) for row in rows]}


def read_log(
    request: Request, study: str, _: Anyone, after: Annotated[int, Query(ge=0, lt=2**53)] = 0
) -> Row:
    """Return the digests of the releases after the first `after`, oldest first, a page of them."""
    digests = hub_of(request).store.release_digests(study, after=after, most=MOST_IN_PAGE)
    return {"after": after, "digests": digests}


def read_release(request: Request, study: str, sequence: str, _: Anyone) -> Response:
    """Return a release by its number (the file itself)."""
    if not (sequence.isascii() and sequence.isdigit() and len(sequence) < 16):
        raise Refusal("not-found", "A release is named by its number.")
    return _send_release(request, study, int(sequence))


def read_newest_release(request: Request, study: str, _: Anyone) -> Response:
    """Return the current release (the file itself)."""
    return _send_release(request, study, None)


def _send_release(request: Request, study: str, sequence: int | None) -> Response:
    row, path = hub_of(request).release_path(study, sequence)
    facts = {"x-consilience-digest": row["digest"], "x-consilience-sequence": str(row["sequence"])}
    return FileResponse(path, media_type=FILE, headers=facts)


def open_dashboard(request: Request, study: str, site: Anyone) -> Response:
    """Make a one-time link that opens the dashboard for the site that signs this request."""
    if site is None:
        raise Refusal("not-allowed", "Links are for sites; coordinators log in.")
    token, until = new_link(hub_of(request), study, site)
    return JSONResponse({"path": f"/visits/{token}", "expires": until}, 201)


# ------------------------------------------------------------------------------- for blind studies


def freeze_roster(request: Request, study: str, body: LargeBody, actor: Coordinator) -> Response:
    """Freeze the roster of a blind study: the sites that are enrolled now, and no other ever."""
    asked, hub = parse_body(Freezing, body), hub_of(request)
    roster = hub.blind.freeze(hub.study(study)[1], asked.checked_by, actor)
    facts = {"digest": roster.digest, "sites": roster.sealed.facts["sites"]}
    return JSONResponse(facts, 201)


def read_blind(request: Request, agreed: Party) -> Row:
    """Return what a blind study agreed on: the study, its roster and the cards of pad holders."""
    hub = hub_of(request)
    require_blind(agreed)
    row = hub.store.roster(agreed.name)
    return {
        "study": agreed.to_dict(),
        "hub_key": hub.key.public,
        "roster": None if row is None else _as_text(row["content"]),
        "cards": [_as_text(card["content"]) for card in hub.store.cards(agreed.name)],
    }


def _as_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def add_card(request: Request, study: str, body: Body, sender: Keyholder) -> Response:
    """Countersign the roster, as a keyholder; the same card again changes nothing."""
    key, agreed = sender
    with _noting(request, key, "card refused", study):
        is_new = hub_of(request).blind.take_card(agreed, key, body)
    return JSONResponse({"holder": key}, 201 if is_new else 200)


def list_masked(
    request: Request, sender: Keyholder, skip: Annotated[int, Query(ge=0, lt=2**31)] = 0
) -> Row:
    """List signed facts of files that the keyholder has not acknowledged, a page of them."""
    key, agreed = sender
    return {"files": hub_of(request).blind.list_files(agreed, key, skip)}


def acknowledge(request: Request, study: str, body: Body, sender: Keyholder) -> Response:
    """Acknowledge a file, as a keyholder; the same again changes nothing."""
    key, agreed = sender
    with _noting(request, key, "acknowledgement refused", study):
        is_new = hub_of(request).blind.take_acknowledgement(agreed, key, body)
    hub_of(request).changed.set()
    return JSONResponse({"holder": key}, 201 if is_new else 200)


def list_batch(request: Request, study: str, actor: Coordinator) -> Response:
    """List a batch of all files that can be opened together now."""
    hub = hub_of(request)
    row = hub.blind.list_batch(hub.study(study)[1], actor)
    return JSONResponse(_show("batch", row), 201)


def leave_out_batch(request: Request, study: str, number: int, actor: Coordinator) -> Row:
    """Leave a whole batch out of all later releases; nobody can take out one of its files."""
    hub = hub_of(request)
    row = hub.store.leave_out_batch(study, min(number, 2**53), actor)
    hub.changed.set()
    return _show("batch", row)


def list_batches(request: Request, sender: Keyholder) -> Row:
    """List the batches that the keyholder has not opened."""
    key, agreed = sender
    batches = hub_of(request).blind.list_batches(agreed, key)
    return {"batches": [batch.as_dict() for batch in batches]}


async def add_opening(request: Request, study: str) -> Response:
    """Open a batch, as a keyholder (the file itself); the same again changes nothing."""
    settings = hub_of(request).settings
    # Nothing is received, and no place is given, before the hub knows who sends.
    signed, agreed = await run_in_threadpool(keyholder_of, request, study)
    async with upload_place(request, f"{study}/{signed.key}") as arrived:
        sha256 = await receive_file(request, arrived, min(settings.most_bytes, MOST_OPENING))
        is_new = await run_in_threadpool(_take_opening, request, (signed, agreed), arrived, sha256)
    return JSONResponse({"holder": signed.key}, 201 if is_new else 200)


def _take_opening(
    request: Request, sender: tuple[Signed, Study], arrived: Path, sha256: str
) -> bool:
    (signed, agreed), hub = sender, hub_of(request)
    with _noting(request, signed.key, "opening refused", agreed.name):
        signed.check_body(sha256)
        hub.store.spend_nonce(signed.key, signed.nonce)
        small = arrived.stat().st_size <= hub.settings.small_bytes
        content = arrived.read_bytes() if small else arrived
        return hub.take_opening(agreed, signed.key, content, sha256)[1]


@contextmanager
def _noting(request: Request, key: str, action: str, study: str) -> Iterator[None]:
    """Write what a keyholder is refused into the audit log, where the study's page finds it."""
    try:
        yield
    except Refusal as refusal:
        if refusal.code not in ("not-authenticated", "replayed", "unavailable"):
            notes: auth.Notes = request.app.state.notes
            notes.add(f"keyholder:{key}", action, study, code=refusal.code, why=refusal.message)
        raise


# ------------------------------------------------------------------------------------- the routes


class _BareRoute(APIRoute):
    """A route whose endpoint takes a request and the parts of its path, and no dependencies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what hands the endpoint a request."""
        assert not self.dependencies  # nothing would ask them
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def answer(request: Request) -> Response:
            return await endpoint(request, **request.path_params)

        return answer


class Route(NamedTuple):
    """One address: what it lets an account do, its endpoint, and the body that this reads itself.

    Whoever signs the request needs no account: the endpoint asks for the signature.
    """

    method: str
    path: str
    action: Action
    endpoint: Callable[..., Any]
    body: Mapping[str, Any] | None = None
    is_bare: bool = False  # nothing of the request but its path is read for the endpoint

    def add_to(self, app: FastAPI) -> None:
        """Add the route to an application."""
        name, action = self.endpoint.__name__, self.action

        def check(request: Request) -> None:
            check_account(request, action)

        content = {"required": True, "content": self.body}
        app.router.add_api_route(
            self.path,
            self.endpoint,
            route_class_override=_BareRoute if self.is_bare else None,
            methods=[self.method],
            dependencies=[] if action is Action.OPEN else [Depends(check)],
            name=name,
            operation_id=name,
            response_model=None,
            openapi_extra=None if self.body is None else {"requestBody": content},
        )


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": model.model_json_schema()}}


def _bytes(kind: str) -> dict[str, Any]:
    return {kind: {"schema": {"type": "string", "format": "binary"}}}


STUDY = "/api/studies/{study}"
ROUTES = (
    # First, because addresses are tried in this order, and this one is asked for most.
    Route("POST", f"{STUDY}/contributions", Action.OPEN, submit, _bytes(FILE), is_bare=True),
    Route("GET", "/healthz", Action.OPEN, health),
    Route("GET", "/readyz", Action.OPEN, ready),
    Route("GET", "/metrics", Action.OPEN, metrics),
    Route("GET", "/api/hub", Action.OPEN, about),
    Route("POST", "/api/sessions", Action.OPEN, log_in, _json(Login)),
    Route("DELETE", "/api/sessions", Action.LEAVE, log_out),
    Route("POST", "/api/studies", Action.ADD, add_study, _bytes("application/toml")),
    Route("GET", "/api/studies", Action.LOOK, list_studies),
    Route("GET", STUDY, Action.VIEW, read_study),
    Route("POST", f"{STUDY}/close", Action.CHANGE, close_study),
    Route("PUT", STUDY + "/files/{file}", Action.CHANGE, put_file, _bytes(FILE)),
    Route("GET", STUDY + "/files/{file}", Action.VIEW, read_public_file),
    Route("POST", f"{STUDY}/invitations", Action.CHANGE, invite, _json(Invitation)),
    Route("GET", f"{STUDY}/invitations", Action.LOOK, list_invitations),
    Route("GET", f"{STUDY}/sites", Action.LOOK, list_sites),
    Route("DELETE", STUDY + "/sites/{site}/key", Action.CHANGE, revoke_key),
    Route("POST", "/api/enrolments", Action.OPEN, enrol, _json(Enrolment)),
    Route("POST", "/api/keys/rotation", Action.OPEN, rotate_key, _json(Rotation)),
    Route("GET", f"{STUDY}/contributions", Action.VIEW, list_contributions),
    Route("GET", STUDY + "/contributions/{digest}", Action.VIEW, read_contribution),
    Route("GET", f"{STUDY}/members", Action.VIEW, list_members),
    Route("GET", STUDY + "/members/{digest}", Action.VIEW, read_member),
    Route("POST", f"{STUDY}/withdrawals", Action.OPEN, withdraw),
    Route("POST", f"{STUDY}/releases", Action.CHANGE, combine, _json(Command)),
    Route("GET", f"{STUDY}/releases", Action.VIEW, list_releases),
    Route("GET", STUDY + "/releases/{sequence}", Action.VIEW, read_release),
    Route("GET", f"{STUDY}/release", Action.VIEW, read_newest_release),
    Route("GET", f"{STUDY}/log", Action.VIEW, read_log),
    Route("POST", f"{STUDY}/visits", Action.VIEW, open_dashboard),
    Route("GET", f"{STUDY}/blind", Action.VIEW, read_blind),
    Route("POST", f"{STUDY}/blind/roster", Action.CHANGE, freeze_roster, _json(Freezing)),
    Route("POST", f"{STUDY}/blind/cards", Action.OPEN, add_card, _bytes(FILE)),
    Route("GET", f"{STUDY}/blind/files", Action.OPEN, list_masked),
    Route("POST", f"{STUDY}/blind/acknowledgements", Action.OPEN, acknowledge, _bytes(FILE)),
    Route("GET", f"{STUDY}/blind/batches", Action.OPEN, list_batches),
    Route("POST", f"{STUDY}/blind/batches", Action.CHANGE, list_batch),
    Route("POST", STUDY + "/blind/batches/{number}/withdrawal", Action.CHANGE, leave_out_batch),
    Route("POST", f"{STUDY}/blind/openings", Action.OPEN, add_opening, _bytes(FILE)),
    Route("GET", "/api/drafts/{token}", Action.OPEN, read_draft),
    Route("GET", "/api/audit", Action.LOG, read_audit),
    Route("GET", "/api/audit.csv", Action.LOG, read_audit_csv),
)
