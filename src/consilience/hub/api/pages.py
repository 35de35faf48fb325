"""The dashboard's addresses, added to the application."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from consilience.hub.api.requests import Body, hub_of
from consilience.hub.api.uploads import receive_file, upload_slot
from consilience.hub.dashboard.answers import Page, answer_page
from consilience.hub.dashboard.files import take_file
from consilience.hub.dashboard.forms import read_beginning
from consilience.hub.dashboard.pages import PAGES
from consilience.hub.dashboard.visits import Visit


def add_pages(app: FastAPI) -> None:
    """Add the dashboard to the hub."""
    for page in PAGES:
        app.add_api_route(
            page.path, _endpoint(page), methods=page.methods.split(), include_in_schema=False
        )
    upload = "/studies/{study}/files/{file}"
    app.add_api_route(upload, _upload_file, methods=["POST"], include_in_schema=False)


def _endpoint(page: Page) -> Callable[..., Response]:
    def answer(request: Request, body: Body) -> Response:
        return answer_page(page, request, body)

    return answer


async def _upload_file(request: Request) -> Response:
    """Stream a form with a file to disk, then let its page take it."""
    most = hub_of(request).settings.most_public_bytes
    async with upload_slot(request) as arrived:
        await receive_file(request, arrived, most)
        beginning = await run_in_threadpool(read_beginning, arrived)

        def take(visit: Visit) -> Response:
            return take_file(visit, arrived)

        page = Page("POST", request.url.path, "coordinator", take)
        return await run_in_threadpool(answer_page, page, request, beginning)
