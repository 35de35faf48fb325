"""Who visits the dashboard, what is asked, and how a page is answered.

People log in with a password. A site has no password: it signs a request for a link, which
works once within five minutes and opens a view of one study for an hour. Revoking or replacing the
site's key ends the view at once. Links and views are statements that the hub signed, so nothing
secret is stored, and a copy of the database lets nobody in.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl, quote

from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from consilience.files.sealed import canonical, is_signed, message_of
from consilience.hub import auth
from consilience.hub.dashboard.texts import FIXES, HEADINGS, NOTICES, TEMPLATES
from consilience.hub.hub import Hub
from consilience.hub.outages import OUTAGES, describe_outage
from consilience.hub.roles import Account, Action, check_site
from consilience.hub.store import Row
from consilience.protocol import ERRORS, Refusal
from consilience.study.study import Study

SITE_COOKIE = f"{auth.COOKIE}-site"
FORM_COOKIE = f"{auth.COOKIE}-form"
LINK_SECONDS = 300  # less than the store remembers a nonce
VIEW_SECONDS = 3600
_MOST = 2000  # characters of a statement


@dataclass(frozen=True)
class Visitor:
    """An account that is logged in, or a site that looks at its own study."""

    name: str
    secret: str  # the cookie that proves it
    account: Account | None = None
    study: str | None = None
    site: Row | None = None

    @property
    def kind(self) -> str:
        """What the visitor is called."""
        return "site" if self.account is None else str(self.account.role)

    @property
    def actor(self) -> str:
        """The visitor as the audit log names it."""
        return f"{self.kind}:{self.name}"

    def check(self, action: Action, study: str | None) -> None:
        """Refuse what the visitor may not do."""
        if self.account is not None:
            self.account.check(action, study)
        else:
            check_site(action)
            if study is not None and study != self.study:
                raise Refusal("not-found", "There is no such study.")

    def may(self, action: str, study: str | None = None) -> bool:
        """Tell whether an account may do what a page offers; sites may do none of it."""
        return self.account is not None and self.account.may(Action(action), study)


def visitor_of(hub: Hub, cookies: Mapping[str, str]) -> Visitor | None:
    """Return who sends these cookies; None if they belong to nobody."""
    token = cookies.get(auth.COOKIE)
    if token:
        try:
            account = auth.account_of(hub.store, token)
            return Visitor(account.name, token, account)
        except Refusal:
            pass
    stated = cookies.get(SITE_COOKIE)
    facts = read_facts(hub, "view", stated)
    if facts is None or stated is None or hub.store.is_spent(facts["key"], facts["nonce"]):
        return None
    try:
        site = hub.store.signer(facts["study"], facts["key"])
    except Refusal:  # the key was revoked or replaced
        return None
    return Visitor(site["name"], stated, None, facts["study"], site)


def new_link(hub: Hub, study: str, site: Row) -> tuple[str, str]:
    """Return the last part of a one-time link for an enrolled site, and when it expires."""
    until = time.time() + LINK_SECONDS
    expires = datetime.fromtimestamp(until, UTC).isoformat(timespec="seconds")
    return sign_facts(hub, "link", until, study=study, key=site["key"]), expires


def read_link(hub: Hub, token: str) -> dict[str, Any]:
    """Return the facts of a link that has not expired, or refuse."""
    facts = read_facts(hub, "link", token)
    if facts is None:
        raise Refusal(
            "not-authenticated",
            "The link was not made by this hub, or it is older than five minutes.",
        )
    return facts


def use_link(hub: Hub, token: str, notes: auth.Notes) -> tuple[str, dict[str, Any]]:
    """Use a link; return the value of the view's cookie and the link's facts."""
    facts = read_link(hub, token)
    site = hub.store.signer(facts["study"], facts["key"])
    try:
        hub.store.spend_nonce(facts["key"], facts["nonce"])
    except Refusal:
        raise Refusal(
            "not-authenticated", "The link was already used; each link works once."
        ) from None
    notes.add(f"site:{site['name']}", "dashboard opened", facts["study"])
    until = time.time() + VIEW_SECONDS
    return sign_facts(hub, "view", until, study=facts["study"], key=facts["key"]), facts


def end_view(hub: Hub, visitor: Visitor) -> None:
    """End a site's view; its cookie stops working everywhere."""
    facts = read_facts(hub, "view", visitor.secret)
    if facts is not None:
        hub.store.spend_nonce(facts["key"], facts["nonce"], seconds=VIEW_SECONDS)


def _form_token(secret: str) -> str:
    """Return what every form of a visitor carries; pages of other origins cannot know it."""
    return hashlib.sha256(f"form {secret}".encode(errors="replace")).hexdigest()


def sign_facts(hub: Hub, kind: str, until: float, **facts: str) -> str:
    """Return a statement of this hub for one purpose, with a nonce, that expires."""
    text = canonical({**facts, "until": until, "nonce": secrets.token_hex(16)})
    signature = hub.key.sign(message_of(kind, text))
    return f"{_encode(text.encode())}.{_encode(signature)}"


def read_facts(hub: Hub, kind: str, token: str | None) -> dict[str, Any] | None:
    """Return the facts that this hub signed for this purpose, unless they have expired."""
    text, dot, signature = (token or "")[:_MOST].partition(".")
    try:
        stated = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
        signed = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    except ValueError:
        return None
    if not dot or not is_signed(message_of(kind, stated), signed, hub.key.public):
        return None
    facts: dict[str, Any] = json.loads(stated)
    return facts if facts["until"] > time.time() else None


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


# -------------------------------------------------------------------------------------- one request


STATIC = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Visit:
    """A request for a page, its visitor and the fields of its form."""

    request: Request
    hub: Hub
    visitor: Visitor | None
    form: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return str(self.request.path_params[name])

    @property
    def someone(self) -> Visitor:
        """The visitor, on pages that need one."""
        assert self.visitor is not None
        return self.visitor

    @property
    def secret(self) -> str | None:
        """What the tokens of the visitor's forms are made from."""
        return self.visitor.secret if self.visitor else self.request.cookies.get(FORM_COOKIE)

    def number(self, name: str = "page") -> int:
        """Return a number from the address, or 1."""
        text = self.request.query_params.get(name, "1")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1

    def study(self) -> tuple[Row, Study]:
        """Return the study in the address, which the visitor may see."""
        return self.hub.study(self["study"])

    def page(
        self,
        template: str,
        status: int = 200,
        confirmed: Collection[str] = (),
        /,
        **facts: object,
    ) -> Response:
        """Fill a template.

        An address may say what was done before; the page repeats it only if it is among what was
        `confirmed` from the database.
        """
        done = self.request.query_params.get("done", "")
        secret = self.secret or secrets.token_urlsafe(24)
        common = {
            "visitor": self.visitor,
            "token": _form_token(secret),
            "style": _style_address(),
            "notice": NOTICES.get(done) if done in confirmed else None,
            "path": self.request.url.path,
        }
        text = TEMPLATES.get_template(template).render({**common, **facts})
        answer = Response(text, status, HEADERS, "text/html; charset=utf-8")
        if self.secret is None:
            self.set_cookie(answer, FORM_COOKIE, secret, None)
        return answer

    def set_cookie(self, answer: Response, name: str, value: str, seconds: int | None) -> None:
        """Set a cookie that no script can read and that other sites' links do not send."""
        secure = self.request.url.scheme == "https"
        answer.set_cookie(
            name, value, max_age=seconds, httponly=True, samesite="strict", secure=secure
        )

    @property
    def address(self) -> str:
        """The network address of the visitor."""
        return self.request.client.host if self.request.client else "nowhere"

    def redirect(self, path: str) -> Response:
        """Send the browser to another page."""
        return RedirectResponse(path, 303, HEADERS)


@lru_cache(maxsize=1)
def _style_address() -> str:
    """Return the stylesheet's address, which changes with its content so browsers can cache it."""
    content = (STATIC / "style.css").read_bytes()
    return f"/static/style.css?{hashlib.sha256(content).hexdigest()[:12]}"


def download(content: bytes, kind: str, name: str) -> Response:
    """Return text as a file to be saved."""
    named = {"content-disposition": f"attachment; filename*=utf-8''{quote(name)}"}
    return Response(content, headers={**HEADERS, **named}, media_type=f"{kind}; charset=utf-8")


MOST_FIELDS = 50


def read_form(request: Request, content: bytes, most: int = MOST_FIELDS) -> dict[str, str]:
    """Return the fields of a form, or of its beginning; a file becomes its text."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        parts: dict[str, bytearray] = {}

        def begin(name: str, _: str) -> Callable[[bytes], object]:
            parts[name] = bytearray()
            return parts[name].extend

        split_form(request, [content], begin, most)
        return {name: value.decode(errors="replace") for name, value in parts.items()}
    try:
        return dict(parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=most))
    except ValueError:
        raise Refusal("malformed", "The form cannot be read.") from None


Begin = Callable[[str, str], Callable[[bytes], object]]


def split_form(
    request: Request, content: Iterable[bytes], begin: Begin, most: int = MOST_FIELDS
) -> bool:
    """Hand each part of a form with files to what `begin` returns for its name and its file's.

    Return whether the form ended. Headers of a part are limited by python-multipart.
    """
    _, options = parse_options_header(request.headers.get("content-type", ""))
    parts = _Parts(begin, most)
    calls = {name: getattr(parts, name) for name in dir(_Parts) if name.startswith("on_")}
    try:
        parser = MultipartParser(options.get(b"boundary", b""), cast(Any, calls))
        for piece in content:
            parser.write(piece)
    except FormParserError:
        raise Refusal("malformed", "The form cannot be read.") from None
    return parts.is_whole


class _Parts:
    """What python-multipart calls while it reads a form."""

    def __init__(self, begin: Begin, most: int) -> None:
        self.begin, self.most = begin, most
        self.write: Callable[[bytes], object]
        self.count, self.is_whole = 0, False
        self.field, self.value = b"", b""

    def on_part_begin(self) -> None:
        self.count += 1
        self.name: bytes | None = None
        self.file = b""
        if self.count > self.most:
            raise Refusal("malformed", f"The form has more than {self.most} fields.")

    def on_header_begin(self) -> None:
        self.field, self.value = b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self.field += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def on_header_end(self) -> None:
        if self.field.lower() == b"content-disposition":
            _, options = parse_options_header(self.value)
            self.name, self.file = options.get(b"name"), options.get(b"filename", b"")

    def on_headers_finished(self) -> None:
        if self.name is None:
            raise Refusal("malformed", "A field of the form has no name.")
        names = (name.decode(errors="replace") for name in (self.name, self.file))
        self.write = self.begin(*names)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.write(data[start:end])

    def on_end(self) -> None:
        self.is_whole = True


# --------------------------------------------------------------------------------------- its answer


_MACHINES = ("/api/", "/healthz", "/readyz", "/metrics", "/openapi.json")
_LOCAL_PATH = re.compile(r"/(?!/)[A-Za-z0-9/._~%?=&+-]*")

logger = logging.getLogger("consilience.hub")


class Page(NamedTuple):
    """An address of the dashboard, and what it lets its visitor do.

    Only a page for accounts can have large forms: its visitor is known before one is read.
    """

    methods: str
    path: str
    action: Action
    show: Callable[[Visit], Response]
    is_large: bool = False
    most_fields: int = MOST_FIELDS


def answer_page(page: Page, request: Request, body: bytes) -> Response:
    """Show a page, or an error in its place."""

    def show(visit: Visit) -> Response:
        if request.method == "POST":
            visit = replace(visit, form=read_form(request, body, page.most_fields))
            _check_form(visit)
        return _turn_away(page, visit) or page.show(visit)

    return _answer(request, show)


def refuse_visitor(page: Page, request: Request) -> Response | None:
    """Answer a visitor who may not see a page, before the form is read; None if they may."""
    may_see = Response()
    answer = _answer(request, lambda visit: _turn_away(page, visit) or may_see)
    return None if answer is may_see else answer


def _turn_away(page: Page, visit: Visit) -> Response | None:
    if page.action is Action.OPEN:
        return None
    if visit.visitor is None:
        return _log_in_first(visit)
    study = visit.request.path_params.get("study")
    if page.action is Action.LOG:
        study = visit.request.query_params.get("study") or None
    account = visit.visitor.account
    must_enrol = account is not None and account.must_enrol and not account.may(page.action, study)
    if must_enrol and visit.request.method != "POST":
        return visit.redirect("/account/factor")
    visit.visitor.check(page.action, study)
    return None


def _answer(request: Request, show: Callable[[Visit], Response]) -> Response:
    visit = Visit(request, request.app.state.hub, None)
    try:
        visit = replace(visit, visitor=visitor_of(visit.hub, request.cookies))
        return show(visit)
    except Refusal as refusal:
        return _show_error(visit, refusal)
    except OUTAGES as problem:
        logger.exception("a page could not be made")
        return _show_error(visit, Refusal("unavailable", describe_outage(problem)))
    except Exception:
        logger.exception("a page could not be made")
        message = "The hub made a mistake in this page; its log says where."
        return _show_error(visit, Refusal("failed", message))


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


def next_page(path: str | None) -> str:
    """Return the page that an address names if it is one of this hub, or the first page."""
    return path if path and is_local_path(path) else "/studies"


def _check_form(visit: Visit) -> None:
    """Refuse a form that is not from a page that was sent to this visitor."""
    origin = visit.request.headers.get("sec-fetch-site", "same-origin")
    token = visit.form.get("token", "").encode(errors="replace")
    is_own = visit.secret and hmac.compare_digest(_form_token(visit.secret).encode(), token)
    if origin not in ("same-origin", "none") or not is_own:
        raise Refusal(
            "not-allowed",
            "The form did not come from a page that this hub sent to you, or it is too old.",
        )
