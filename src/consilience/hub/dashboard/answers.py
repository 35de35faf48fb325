"""How a page is answered: who may see it, whether a form may be used, and what errors look like."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.exc import InterfaceError, OperationalError

from consilience.hub.dashboard.texts import FIXES, HEADINGS
from consilience.hub.dashboard.visitors import is_own_form, visitor_of
from consilience.hub.dashboard.visits import Visit, read_form
from consilience.protocol import ERRORS, Refusal

_MACHINES = ("/api/", "/healthz", "/metrics", "/docs", "/openapi.json")
_LOCAL_PATH = re.compile(r"/(?!/)[A-Za-z0-9/._~%?=&+-]*")

logger = logging.getLogger("consilience.hub")


class Page(NamedTuple):
    """An address of the dashboard, and who may see it: anyone, someone known, or a coordinator."""

    methods: str
    path: str
    who: str
    show: Callable[[Visit], Response]


def answer_page(page: Page, request: Request, body: bytes) -> Response:
    """Show a page, or an error in its place."""
    visit = Visit(request, request.app.state.hub, None)
    try:
        visit = replace(visit, visitor=visitor_of(visit.hub, request.cookies))
        if request.method == "POST":
            visit = replace(visit, form=read_form(request, body))
            _check_form(visit)
        if page.who != "anyone" and visit.visitor is None:
            return _log_in_first(visit)
        if page.who == "coordinator" and not visit.someone.is_coordinator:
            raise Refusal("not-allowed", "This page is for the study's coordinators.")
        return page.show(visit)
    except Refusal as refusal:
        return _show_error(visit, refusal)
    except (OperationalError, InterfaceError):
        logger.exception("the database did not answer")
        return _show_error(visit, Refusal("unavailable", "The hub's database does not answer."))
    except Exception:
        logger.exception("a page could not be made")
        message = "The hub could not finish this page; its log says why."
        return _show_error(visit, Refusal("unavailable", message))


def answer_refusal(request: Request, refusal: Refusal, *, as_visitor: bool = False) -> Response:
    """Answer a request that goes no further: machines get JSON, browsers a page.

    With `as_visitor`, the database is asked who sent the request, and the page shows it.
    """
    if request.url.path.startswith(_MACHINES):
        return JSONResponse(refusal.body, refusal.status)
    hub = request.app.state.hub
    visitor = visitor_of(hub, request.cookies) if as_visitor else None
    return _show_error(Visit(request, hub, visitor), refusal)


def _show_error(visit: Visit, refusal: Refusal) -> Response:
    return visit.page(
        "error.html",
        refusal.status,
        heading=HEADINGS.get(refusal.code, "This was not possible"),
        message=refusal.message,
        fix=fix_for(refusal),
    )


def fix_for(refusal: Refusal) -> str:
    """Say what someone at a browser can do about a refusal."""
    return FIXES.get(refusal.code, ERRORS[refusal.code][1])


def _log_in_first(visit: Visit) -> Response:
    asked = visit.request.url.path
    if visit.request.method == "POST" or not is_local_path(asked):
        raise Refusal("not-authenticated", "You are not logged in, or your session has ended.")
    return visit.redirect("/login" if asked == "/" else f"/login?next={quote(asked)}")


def is_local_path(path: str) -> bool:
    """Tell whether a path leads to a page of this hub, and nowhere else."""
    return _LOCAL_PATH.fullmatch(path) is not None


def _check_form(visit: Visit) -> None:
    origin = visit.request.headers.get("sec-fetch-site", "same-origin")
    is_own = is_own_form(visit.secret, visit.form.get("token", ""))
    if origin not in ("same-origin", "none") or not is_own:
        raise Refusal(
            "not-allowed",
            "The form did not come from a page that this hub sent to you, or it is too old.",
        )
