"""The hub over HTTP: one route table, one shape of error. Parse, ask `Hub`, answer.

The only file with ``async``: bodies are streamed here, to memory if they are small and to disk if
they are files; everything else runs in worker threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from consilience.files.sealed import software
from consilience.hub import auth
from consilience.hub.auth import Buckets
from consilience.hub.combining import Combiner
from consilience.hub.hub import Hub, Settings
from consilience.hub.pages import add_pages, turned_away
from consilience.hub.store import Row, hashed
from consilience.protocol import ERRORS, HEADER, Refusal, Signed, digest, read_request

MOST_JSON = 1 << 20
# small contributions that are checked at a time: more threads would only fight over one interpreter
TAKERS = 4
FILE = "application/octet-stream"
SHOWN = {
    "study": ("name", "digest", "status", "created", "problem"),
    "site": ("name", "key", "status", "fetch_only", "enrolled"),
    "contribution": ("digest", "site", "sequence", "state", "guarantee", "size", "received"),
    "release": ("digest", "sequence", "state", "n_sites", "guarantee", "size", "created"),
}

Sender = tuple[Signed, Row, list[Row]]

logger = logging.getLogger("consilience.hub")
ModelT = TypeVar("ModelT", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Login(_Body):
    """A coordinator's name and password."""

    name: str = Field(max_length=200)
    password: str = Field(max_length=1000)


class Invitation(_Body):
    """Whom an invitation is for, and how long it is good."""

    site: str | None = None
    fetch_only: bool = False
    days: float = 7.0


class Enrolment(_Body):
    """A site's one-time code and name; the key that signs the request is the one that is enrolled."""

    invitation: str = Field(max_length=200)
    site: str = Field(max_length=100)
    fetch_only: bool = False


class Rotation(_Body):
    """A site's new key, and its signature over old and new key."""

    study: str = Field(max_length=64)
    new_key: str = Field(max_length=64)
    proof: str = Field(max_length=128)


class Command(_Body):
    """The coordinator's wish for a release now; the same key again returns the same release."""

    key: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")


@dataclass(frozen=True)
class Caller:
    """Who asks: a coordinator, or a site with its row and the signature of its request."""

    actor: str
    site: Row | None = None
    signed: Signed | None = None


# ------------------------------------------------------------------------------------------------------------ the app


def create_app(settings: Settings) -> FastAPI:
    """Return the hub as an ASGI application; its worker runs between start-up and shut-down."""
    hub = Hub(settings)
    combiner = Combiner(hub)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if settings.combine_itself:
            combiner.start()
        yield
        await run_in_threadpool(combiner.stop)
        hub.close()

    app = FastAPI(
        title="consilience hub",
        version=software(),
        description="Collects signed contributions of sites and publishes signed releases. See docs/protocol.md.",
        lifespan=lifespan,
        redoc_url=None,
        separate_input_output_schemas=False,
        responses={
            "default": {
                "description": "Refused",
                "content": {"application/json": {"schema": _ERROR_SCHEMA}},
            }
        },
    )
    app.state.hub, app.state.combiner, app.state.metrics = hub, combiner, Metrics()
    app.state.by_key, app.state.by_guess = Buckets(settings.by_key), Buckets(settings.by_guess)
    app.state.uploads, app.state.takers = (
        asyncio.Semaphore(settings.most_uploads),
        asyncio.Semaphore(TAKERS),
    )
    for kind, answer in _HANDLERS.items():
        app.add_exception_handler(kind, answer)
    for method, path, endpoint, more in ROUTES:
        name = endpoint.__name__
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=name,
            operation_id=name,
            response_model=None,
            **more,
        )
    add_pages(app, body=small_body, caller=anyone, receive=_receive)
    app.add_middleware(Gate, metrics=app.state.metrics, buckets=Buckets(settings.by_address))
    return app


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "fix"],
            "properties": {
                "code": {"enum": sorted(ERRORS)},
                "message": {"type": "string"},
                "fix": {"type": "string"},
            },
        }
    },
}


async def _refuse(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, Refusal)
    return _answer(problem)


async def _unmatched(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    code = {404: "not-found", 405: "wrong-method", 413: "too-large"}.get(
        problem.status_code, "malformed"
    )
    message = {
        "not-found": "There is nothing at this address.",
        "wrong-method": "The address knows other methods.",
    }
    return _answer(Refusal(code, message.get(code, "The request cannot be read.")))


async def _malformed(_: Request, problem: Exception) -> Response:
    return _answer(Refusal("malformed", "The request lacks a part, or has one of the wrong kind."))


async def _database(_: Request, problem: Exception) -> Response:
    logger.error("the database did not answer: %s", type(problem).__name__)
    return _answer(Refusal("unavailable", "The hub's database does not answer."))


async def _broken(_: Request, problem: Exception) -> Response:
    return _answer(
        Refusal("unavailable", "The hub could not finish this request; its log says more.")
    )


def _answer(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.body, refusal.status)


_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    Refusal: _refuse,
    HTTPException: _unmatched,
    RequestValidationError: _malformed,
    ClientDisconnect: _malformed,
    OperationalError: _database,
    InterfaceError: _database,
    Exception: _broken,
}


# ------------------------------------------------------------------------------------------------- reading, asking who


async def small_body(request: Request) -> bytes:
    """Read a body that has to fit into memory."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_JSON:
            raise Refusal("too-large", f"The body is larger than {MOST_JSON >> 10} KiB.")
        parts.append(part)
    return b"".join(parts)


async def _receive(
    request: Request, arrived: Path, most: int, *, small: int = -1
) -> tuple[str, Path | bytes]:
    """Stream a body to disk, or to memory if it has at most `small` bytes; return its SHA-256 and where it is."""
    settings: Settings = request.app.state.hub.settings
    read, size, parts, file = hashlib.sha256(), 0, [], None
    with ExitStack() as opened:
        try:
            async with asyncio.timeout(settings.upload_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refusal("too-large", f"The file is larger than {most >> 20} MiB.")
                    read.update(part)
                    parts.append(part)
                    if size > small:
                        file = file or opened.enter_context(arrived.open("wb"))
                        file.writelines(parts)
                        parts.clear()
        except TimeoutError:
            raise Refusal("malformed", "The upload took too long.") from None
    request.app.state.metrics.received += size
    return read.hexdigest(), arrived if file else b"".join(parts)


def _target(request: Request) -> str:
    """Return what a site signs as the path: exactly what stands in the request's first line."""
    query = request.scope["query_string"]
    path = request.scope.get("raw_path") or request.scope["path"].encode()
    return str((path + (b"?" + query if query else b"")).decode("latin-1"))


def _signed(request: Request) -> Signed:
    return read_request(request.headers.get(HEADER), request.method, _target(request))


def _signed_by(request: Request) -> Signed:
    """Return who signed a request, unless too many came from there; the nonce is still to be spent."""
    signed = _signed(request)
    request.app.state.by_key.take(signed.key)
    return signed


def _sender(request: Request, study: str) -> Sender:
    """Return who signed a contribution that is about to come, its site, and what that submitted before."""
    signed = _signed_by(request)
    return signed, *request.app.state.hub.store.sender(_named(study), signed.key)


def _named(study: str) -> str:
    """Return a study's name as it may be asked for; one that cannot exist becomes one that does not."""
    return study if study.isascii() and study.isprintable() and len(study) <= 64 else "-"


def coordinator(request: Request) -> str:
    """Return who is logged in, or refuse."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise Refusal("not-authenticated", "A coordinator's token is needed here.")
    return f"coordinator:{auth.coordinator_of(request.app.state.hub.store, token.strip())}"


Body = Annotated[bytes, Depends(small_body)]
Coordinator = Annotated[str, Depends(coordinator)]


def site_changing(request: Request, study: str, body: Body) -> Caller:
    """Return the site that signed a request whose own transaction spends the nonce."""
    signed = _signed_by(request)
    signed.check_body(digest(body))
    site = request.app.state.hub.store.signer(_named(study), signed.key)
    return Caller(f"site:{site['name']}", site, signed)


def anyone(request: Request, study: str, body: Body) -> Caller:
    """Return a coordinator, or the site that signed a request to read."""
    if "authorization" in request.headers:
        actor = coordinator(request)
        request.app.state.hub.study(study)
        return Caller(actor)
    caller = site_changing(request, study, body)
    assert caller.signed is not None
    request.app.state.hub.store.spend_nonce(caller.signed.key, caller.signed.nonce)
    return caller


SiteChanging = Annotated[Caller, Depends(site_changing)]
Anyone = Annotated[Caller, Depends(anyone)]


def _parsed(model: type[ModelT], body: bytes) -> ModelT:
    try:
        return model.model_validate_json(body)
    except (ValidationError, ValueError):
        names = ", ".join(model.model_fields)
        raise Refusal("malformed", f"The body must be a JSON object of: {names}.") from None


def _shown(kind: str, row: Row) -> Row:
    return {name: row[name] for name in SHOWN[kind]}


def _all(kind: str, rows: Sequence[Row]) -> list[Row]:
    return [_shown(kind, row) for row in rows]


# ------------------------------------------------------------------------------------------------------- open to all


def health(request: Request) -> Row:
    """Tell that the hub and its database answer."""
    request.app.state.hub.store.counts()
    return {"status": "ok", "version": software()}


def metrics(request: Request) -> Response:
    """Return counts, sizes and durations for Prometheus."""
    state = request.app.state
    text = state.metrics.text(state.hub.store.counts(), state.combiner.seconds)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def about(request: Request) -> Row:
    """Return the hub's public key, its version, its time and its limits."""
    hub: Hub = request.app.state.hub
    facts = {"version": software(), "key": hub.key.public, "time": time.time()}
    return facts | {"most_bytes": hub.settings.most_bytes}


# --------------------------------------------------------------------------------------------------- the coordinator's


def log_in(request: Request, body: Body) -> Row:
    """Exchange a coordinator's name and password for a token."""
    hub: Hub = request.app.state.hub
    asked = _parsed(Login, body)
    request.app.state.by_guess.take(_address(request))
    token, expires = auth.log_in(
        hub.store, asked.name, asked.password, hours=hub.settings.session_hours
    )
    return {"token": token, "expires": expires}


def log_out(request: Request, _: Coordinator) -> Row:
    """End the session of the token."""
    token = request.headers["authorization"].partition(" ")[2].strip()
    request.app.state.hub.store.end_session(hashed(token))
    return {"status": "ended"}


def add_study(request: Request, body: Body, actor: Coordinator) -> Response:
    """Take a study file (TOML)."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise Refusal("study-invalid", "The study file is not UTF-8 text.") from None
    return JSONResponse(_shown("study", request.app.state.hub.add_study(text, actor)), 201)


def list_studies(request: Request, _: Coordinator) -> Row:
    """List all studies."""
    return {"studies": _all("study", request.app.state.hub.store.studies())}


async def put_file(request: Request, study: str, file: str) -> Row:
    """Take a file of public records that the study names."""
    hub: Hub = request.app.state.hub
    actor = await run_in_threadpool(coordinator, request)
    await run_in_threadpool(hub.public_file, study, file)
    arrived = hub.store.files.new()
    try:
        async with request.app.state.uploads:
            sha256, _ = await _receive(request, arrived, hub.settings.most_public_bytes)
            found = await run_in_threadpool(
                hub.keep_public_file, study, file, arrived, sha256, actor
            )
    finally:
        arrived.unlink(missing_ok=True)
    return {"file": found.file, "sha256": found.sha256}


def invite(request: Request, study: str, body: Body, actor: Coordinator) -> Response:
    """Make a one-time invitation; its code is shown once."""
    asked = _parsed(Invitation, body or b"{}")
    options = {"site": asked.site, "fetch_only": asked.fetch_only, "days": asked.days}
    code, expires = request.app.state.hub.invite(study, actor, **options)
    return JSONResponse({"code": code, "expires": expires, "study": study}, 201)


def list_invitations(request: Request, study: str, _: Coordinator) -> Row:
    """List a study's invitations, without their codes."""
    hub: Hub = request.app.state.hub
    hub.study(study)
    return {"invitations": hub.store.invitations(study)}


def list_sites(request: Request, study: str, _: Coordinator) -> Row:
    """List a study's sites."""
    hub: Hub = request.app.state.hub
    hub.study(study)
    return {"sites": _all("site", hub.store.sites(study))}


def revoke_key(
    request: Request, study: str, site: str, actor: Coordinator, withdraw: bool = False
) -> Row:
    """End a site's key; with ``withdraw=true`` also its contributions."""
    return _shown("site", request.app.state.hub.revoke(study, site, actor, withdraw=withdraw))


def combine(request: Request, study: str, body: Body, actor: Coordinator) -> Response:
    """Combine the study now, charging the hub's ledger first where noise is drawn."""
    asked = _parsed(Command, body)
    row = request.app.state.combiner.command(study, asked.key, actor)
    return JSONResponse(_shown("release", row), 201)


def close_study(request: Request, study: str, actor: Coordinator) -> Row:
    """Take nothing more for a study; its releases stay."""
    return _shown("study", request.app.state.hub.close_study(study, actor))


def read_audit(
    request: Request,
    _: Coordinator,
    after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Row:
    """Return entries of the hash-chained audit log, oldest first."""
    return {"entries": request.app.state.hub.store.audit(after=after, limit=limit)}


# ---------------------------------------------------------------------------------------------------------- the sites'


def enrol(request: Request, body: Body) -> Response:
    """Enrol the key that signs this request, by a one-time code."""
    asked = _parsed(Enrolment, body)
    request.app.state.by_guess.take(_address(request))
    signed = _signed(request)
    signed.check_body(digest(body))
    hub: Hub = request.app.state.hub
    who = {"site": asked.site, "key": signed.key, "nonce": signed.nonce}
    row = hub.enrol(code=asked.invitation, fetch_only=asked.fetch_only, **who)
    return JSONResponse(
        {"study": row["study"], "hub_key": hub.key.public, "site": _shown("site", row)}, 201
    )


def rotate_key(request: Request, body: Body) -> Row:
    """Replace the site's key in a study: signed by the old one, with a proof by the new one."""
    asked = _parsed(Rotation, body)
    signed = site_changing(request, asked.study, body).signed
    assert signed is not None
    hub: Hub = request.app.state.hub
    return _shown(
        "site", hub.rotate(asked.study, signed.key, asked.new_key, asked.proof, signed.nonce)
    )


def read_study(request: Request, study: str, caller: Anyone) -> Row:
    """Return the study's file, and which of its public files the hub has."""
    hub: Hub = request.app.state.hub
    row, found = hub.study(study)
    parts = [part for part in (found.public, found.test) if part is not None]
    files = [
        {"file": part.file, "sha256": part.sha256, "there": hub.store.file(part.sha256) is not None}
        for part in parts
    ]
    facts = {
        "name": row["name"],
        "digest": row["digest"],
        "status": row["status"],
        "text": row["text"],
    }
    facts["study"] = found.to_dict()
    facts |= {"files": files, "hub_key": hub.key.public}
    if caller.site is not None:
        return {**facts, "site": _shown("site", caller.site)}
    return {**facts, "problem": row["problem"], "created": row["created"]}


def read_public_file(request: Request, study: str, file: str, caller: Anyone) -> Response:
    """Return a file of public records."""
    hub: Hub = request.app.state.hub
    found = hub.public_file(study, file)
    if hub.store.file(found.sha256) is None:
        raise Refusal("not-found", "The coordinator has not uploaded this file yet.")
    return FileResponse(hub.store.files.path(found.sha256), media_type=FILE)


async def submit(request: Request, study: str) -> Response:
    """Take a contribution (the file itself); the same file again changes nothing."""
    hub: Hub = request.app.state.hub
    most = hub.settings.most_bytes
    declared = request.headers.get("content-length", str(most))
    if not (declared.isascii() and declared.isdigit()):
        raise Refusal("malformed", "The length of the file is no number.")
    if len(declared) > 18 or int(declared) > most:
        raise Refusal("too-large", f"The file is larger than {most >> 20} MiB.")
    small, sender = hub.settings.small_bytes, None
    if int(declared) > small:  # a stranger's file is not even received
        sender = await run_in_threadpool(_sender, request, study)
    arrived = hub.store.files.new()
    try:
        async with request.app.state.uploads:
            sha256, content = await _receive(request, arrived, most, small=small)
            async with request.app.state.takers if isinstance(content, bytes) else nullcontext():
                row, new = await run_in_threadpool(_take, request, study, sender, content, sha256)
    finally:
        if sender is not None:
            arrived.unlink(missing_ok=True)
    return JSONResponse(_shown("contribution", row), 201 if new else 200)


def _take(
    request: Request, study: str, sender: Sender | None, content: Path | bytes, sha256: str
) -> tuple[Row, bool]:
    signed, site, before = sender or _sender(request, study)
    signed.check_body(sha256)
    hub: Hub = request.app.state.hub
    return hub.take(study, site, before, content, sha256, signed.nonce)


def list_contributions(request: Request, study: str, caller: Anyone) -> Row:
    """List the site's own contributions; a coordinator sees everyone's facts, and nobody's files."""
    own = None if caller.site is None else caller.site["name"]
    return {
        "contributions": _all(
            "contribution", request.app.state.hub.store.contributions(study, site=own)
        )
    }


def withdraw(request: Request, study: str, caller: SiteChanging) -> Row:
    """Take what the site contributed out of all that follows."""
    assert caller.signed is not None
    signed = caller.signed
    return _shown("contribution", request.app.state.hub.withdraw(study, signed.key, signed.nonce))


def list_releases(request: Request, study: str, caller: Anyone) -> Row:
    """List the study's releases, newest first."""
    return {"releases": _all("release", request.app.state.hub.store.releases(study))}


def read_release(request: Request, study: str, sequence: str, caller: Anyone) -> Response:
    """Return a release by its number (the file itself)."""
    if not (sequence.isascii() and sequence.isdigit() and len(sequence) < 16):
        raise Refusal("not-found", "A release has a number.")
    return _release(request.app.state.hub, study, int(sequence))


def read_newest_release(request: Request, study: str, caller: Anyone) -> Response:
    """Return the newest release (the file itself)."""
    return _release(request.app.state.hub, study, None)


def _release(hub: Hub, study: str, sequence: int | None) -> Response:
    row, path = hub.release_path(study, sequence)
    facts = {"x-consilience-digest": row["digest"], "x-consilience-sequence": str(row["sequence"])}
    return FileResponse(path, media_type=FILE, headers=facts)


def _address(request: Request) -> str:
    return request.client.host if request.client else "nowhere"


def _takes(model: type[BaseModel] | None = None, kind: str = "application/json") -> dict[str, Any]:
    """Describe a body that an endpoint reads by itself."""
    schema: Any = (
        {"type": "string", "format": "binary"} if model is None else model.model_json_schema()
    )
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}
    }


STUDY = "/api/studies/{study}"
ROUTES: tuple[tuple[str, str, Callable[..., Any], dict[str, Any]], ...] = (
    ("GET", "/healthz", health, {}),
    ("GET", "/metrics", metrics, {}),
    ("GET", "/api/hub", about, {}),
    ("POST", "/api/sessions", log_in, _takes(Login)),
    ("DELETE", "/api/sessions", log_out, {}),
    ("POST", "/api/studies", add_study, _takes(kind="application/toml")),
    ("GET", "/api/studies", list_studies, {}),
    ("GET", STUDY, read_study, {}),
    ("POST", f"{STUDY}/close", close_study, {}),
    ("PUT", STUDY + "/files/{file}", put_file, _takes(kind=FILE)),
    ("GET", STUDY + "/files/{file}", read_public_file, {}),
    ("POST", f"{STUDY}/invitations", invite, _takes(Invitation)),
    ("GET", f"{STUDY}/invitations", list_invitations, {}),
    ("GET", f"{STUDY}/sites", list_sites, {}),
    ("DELETE", STUDY + "/sites/{site}/key", revoke_key, {}),
    ("POST", "/api/enrolments", enrol, _takes(Enrolment)),
    ("POST", "/api/keys/rotation", rotate_key, _takes(Rotation)),
    ("POST", f"{STUDY}/contributions", submit, _takes(kind=FILE)),
    ("GET", f"{STUDY}/contributions", list_contributions, {}),
    ("POST", f"{STUDY}/withdrawals", withdraw, {}),
    ("POST", f"{STUDY}/releases", combine, _takes(Command)),
    ("GET", f"{STUDY}/releases", list_releases, {}),
    ("GET", STUDY + "/releases/{sequence}", read_release, {}),
    ("GET", f"{STUDY}/release", read_newest_release, {}),
    ("GET", "/api/audit", read_audit, {}),
)


# ------------------------------------------------------------------------------------------------- around every request


class Metrics:
    """Counts of this worker since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.received = 0

    def text(self, counts: dict[tuple[str, str], int], combining: Sequence[float]) -> str:
        """Return everything in the format that Prometheus reads."""
        lines = ["# TYPE consilience_requests_total counter"]
        for (method, route, status), n in sorted(self.requests.items()):
            lines.append(
                f'consilience_requests_total{{method="{method}",route="{route}",status="{status}"}} {n}'
            )
        lines.append("# TYPE consilience_request_seconds_total counter")
        for (method, route), seconds in sorted(self.seconds.items()):
            lines.append(
                f'consilience_request_seconds_total{{method="{method}",route="{route}"}} {seconds:.6f}'
            )
        lines += [
            "# TYPE consilience_received_bytes_total counter",
            f"consilience_received_bytes_total {self.received}",
        ]
        lines += [
            "# TYPE consilience_combined_total counter",
            f"consilience_combined_total {len(combining)}",
        ]
        lines += ["# TYPE consilience_combining_seconds_total counter"]
        lines += [
            f"consilience_combining_seconds_total {sum(combining):.6f}",
            "# TYPE consilience_rows gauge",
        ]
        for (table, state), n in sorted(counts.items()):
            lines.append(f'consilience_rows{{table="{table}",state="{state}"}} {n}')
        return "\n".join(lines) + "\n"


class Gate:
    """Limit each address, count each answer, and add the headers that every answer has."""

    def __init__(self, app: ASGIApp, metrics: Metrics, buckets: Buckets) -> None:
        self.app, self.metrics, self.buckets = app, metrics, buckets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def answering(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                headers.append((b"x-content-type-options", b"nosniff"))
                if scope["path"].startswith("/api/"):
                    headers.append((b"cache-control", b"no-store"))
            await send(message)

        try:
            if scope["path"] != "/healthz":
                self.buckets.take((scope.get("client") or ("nowhere",))[0])
            await self.app(scope, receive, answering)
        except Refusal as refusal:
            await turned_away(Request(scope), refusal)(scope, receive, answering)
        finally:
            route = getattr(scope.get("route"), "path", "")
            method = (
                scope["method"]
                if scope["method"] in ("GET", "POST", "PUT", "DELETE", "HEAD")
                else "other"
            )
            self.metrics.requests[method, route, status] += 1
            self.metrics.seconds[method, route] += time.perf_counter() - began
