"""One request for a page: who asks, for what, and what a form says."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qsl, quote

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from consilience.hub.dashboard.formatting import TEMPLATES
from consilience.hub.dashboard.texts import NOTICES
from consilience.hub.dashboard.visitors import FORM_COOKIE, Visitor, form_token
from consilience.hub.hub import Hub
from consilience.hub.store import Row
from consilience.protocol import Refusal
from consilience.study.study import Study

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
        """Return the study in the address; a site sees only its own."""
        name = self["study"]
        if not self.someone.is_coordinator and name != self.someone.study:
            raise Refusal("not-found", "There is no such study.")
        return self.hub.study(name)

    def page(self, template: str, status: int = 200, /, **facts: object) -> Response:
        """Fill a template."""
        secret = self.secret or secrets.token_urlsafe(24)
        common = {
            "visitor": self.visitor,
            "token": form_token(secret),
            "style": _style_address(),
            "notice": NOTICES.get(self.request.query_params.get("done", "")),
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


def read_form(request: Request, content: bytes) -> dict[str, str]:
    """Return the fields of a form; a file becomes its text."""
    kind = request.headers.get("content-type", "")
    if kind.startswith("multipart/form-data"):
        try:
            head = f"Content-Type: {kind}\r\n\r\n".encode("latin-1")
            parts = BytesParser(policy=HTTP).parsebytes(head + content).iter_parts()
            return {
                str(part.get_param("name", "", "content-disposition")): _text(part)
                for part in parts
            }
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            raise Refusal("malformed", "The form cannot be read.") from None
    try:
        return dict(parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=50))
    except ValueError:
        raise Refusal("malformed", "The form cannot be read.") from None


def _text(part: Message) -> str:
    content = part.get_payload(decode=True)
    return content.decode(errors="replace") if isinstance(content, bytes) else ""
