"""The hub as an ASGI application: one route table for machines, the pages, one shape of error."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from consilience.files.sealed import software
from consilience.hub.api.metrics import Gate, Metrics
from consilience.hub.api.requests import (
    MOST_KNOWN,
    MOST_STRANGE,
    hub_of,
    receive_body,
    receive_file,
    upload_place,
)
from consilience.hub.api.routes import ROUTES
from consilience.hub.auth import Buckets, Logins, Notes, Uploads
from consilience.hub.combining import Combiner
from consilience.hub.dashboard.drafts import take_draft_file
from consilience.hub.dashboard.pages import PAGES
from consilience.hub.dashboard.studies import read_beginning, take_file
from consilience.hub.dashboard.visits import (
    Page,
    Visit,
    answer_page,
    answer_refusal,
    refuse_visitor,
    visitor_of,
)
from consilience.hub.hub import Hub, Settings
from consilience.hub.outages import OUTAGES, describe_outage
from consilience.hub.roles import Action
from consilience.hub.store.audit import Chain
from consilience.hub.trials import Trials
from consilience.protocol import ERRORS, Refusal

# Threads that check small contributions. More of them compete for the one interpreter: with 16
# connections two take half as long again as one, which loses nothing while it waits for the disk.
MOST_CHECKED_TOGETHER = 1
DESCRIPTION = (
    "Collects signed contributions of sites and publishes signed releases. See docs/protocol.md."
)
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
_REFUSED = {"description": "Refused", "content": {"application/json": {"schema": _ERROR_SCHEMA}}}

logger = logging.getLogger("consilience.hub")


def create_app(settings: Settings) -> FastAPI:
    """Return the hub as an ASGI application; its worker runs from start-up to shut-down."""
    hub = Hub(settings)
    combiner, trials = Combiner(hub), Trials(hub)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if settings.combine_itself:
            combiner.start()
        yield
        await run_in_threadpool(trials.stop)
        await run_in_threadpool(combiner.stop)
        hub.close()

    app = FastAPI(
        title="consilience hub",
        version=software(),
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # the dashboard has a page for it, which loads nothing from elsewhere
        redoc_url=None,
        separate_input_output_schemas=False,
        responses={"default": _REFUSED},
    )
    state = app.state
    state.hub, state.combiner, state.metrics, state.chain = hub, combiner, Metrics(), Chain()
    state.trials = trials
    state.by_key, state.by_guess = Buckets(settings.by_key), Buckets(settings.by_guess)
    state.notes = Notes(hub.store, settings.by_note)
    by_account = Buckets(settings.by_account)
    state.logins = Logins(hub.store, state.by_guess, by_account, state.notes, hub.factors.use)
    limits = settings.most_uploads_each, settings.patience_seconds
    state.uploads = Uploads(settings.most_uploads, *limits)
    state.small_uploads = Uploads(4 * settings.most_uploads, *limits)
    state.checks = ThreadPoolExecutor(MOST_CHECKED_TOGETHER, "checks")
    for refused in (Refusal, HTTPException):
        app.add_exception_handler(refused, _refuse)
    for failed in _FAILURES:
        app.add_exception_handler(failed, _fail)
    for route in ROUTES:
        route.add_to(app)
    _add_pages(app)
    app.add_middleware(Gate, metrics=state.metrics, buckets=Buckets(settings.by_address))
    return app


def _add_pages(app: FastAPI) -> None:
    """Add the dashboard to the hub."""
    for page in PAGES:
        app.add_api_route(
            page.path, _endpoint(page), methods=page.methods.split(), include_in_schema=False
        )
    for upload in (
        Upload("/studies/{study}/files/{file}", Action.CHANGE, take_file),
        Upload("/drafts/{draft}/files/{part}", Action.ADD, take_draft_file),
    ):
        receiver = _receiver(upload)
        app.add_api_route(upload.path, receiver, methods=["POST"], include_in_schema=False)


def _endpoint(page: Page) -> Callable[..., Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        if page.is_large and (refused := await run_in_threadpool(refuse_visitor, page, request)):
            return refused
        body = await receive_body(request, MOST_KNOWN if page.is_large else MOST_STRANGE)
        return await run_in_threadpool(answer_page, page, request, body)

    return answer


class Upload(NamedTuple):
    """An address that takes a form with a large file."""

    path: str
    action: Action
    take: Callable[[Visit, Path], Response]


def _receiver(upload: Upload) -> Callable[..., Awaitable[Response]]:
    async def receive(request: Request) -> Response:
        return await _upload_file(upload, request)

    return receive


async def _upload_file(upload: Upload, request: Request) -> Response:
    """Stream a form with a file to disk, then let its page take it."""

    def take(visit: Visit) -> Response:
        return upload.take(visit, arrived)

    hub, page = hub_of(request), Page("POST", request.url.path, upload.action, take)
    if refused := await run_in_threadpool(refuse_visitor, page, request):
        return refused
    visitor = await run_in_threadpool(visitor_of, hub, request.cookies)
    if visitor is None:  # logged out since
        raise Refusal("not-authenticated", "You are not logged in, or your session has ended.")
    async with upload_place(request, visitor.actor) as arrived:
        await receive_file(request, arrived, hub.settings.most_public_bytes)
        beginning = await run_in_threadpool(read_beginning, arrived)
        return await run_in_threadpool(answer_page, page, request, beginning)


# --------------------------------------------------------------------- what goes wrong on the way


def _refuse(request: Request, problem: Exception) -> Response:
    """Answer a refusal, or an address or method that does not exist."""
    if isinstance(problem, HTTPException):
        problem = Refusal(*_NO_ROUTE.get(problem.status_code, _UNREADABLE))
    assert isinstance(problem, Refusal)
    return answer_refusal(request, problem, as_visitor=True)


def _fail(request: Request, problem: Exception) -> Response:
    """Answer a request that cannot be read, or one during which something failed."""
    if isinstance(problem, OUTAGES):
        refusal = Refusal("unavailable", describe_outage(problem))
        logger.error("%s: %s", refusal.message, type(problem).__name__)
        return answer_refusal(request, refusal)
    is_theirs = isinstance(problem, RequestValidationError | ClientDisconnect)
    refusal = Refusal(*(_MALFORMED if is_theirs else _OUR_MISTAKE))
    return answer_refusal(request, refusal)  # the server logs what was raised


_UNREADABLE = ("malformed", "The request cannot be read.")
_MALFORMED = ("malformed", "A part of the request is missing or has the wrong type.")
_NO_ROUTE = {
    404: ("not-found", "There is nothing at this address."),
    405: ("wrong-method", "This address does not take this method."),
    413: ("too-large", "The request cannot be read."),
}
_OUR_MISTAKE = ("failed", "The hub made a mistake in this request; its log says where.")
_FAILURES = (RequestValidationError, ClientDisconnect, *OUTAGES, Exception)
