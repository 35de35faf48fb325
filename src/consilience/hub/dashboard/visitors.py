"""Who visits the dashboard, and the tokens of their forms.

Coordinators log in with a password. A site has no password: it signs a request for a link, which
works once within five minutes and opens a view of one study for an hour. Revoking or replacing the
site's key ends the view at once. Links and views are statements that the hub signed, so nothing
secret is stored, and a copy of the database lets nobody in.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from consilience.files.sealed import canonical, is_signed, message_of
from consilience.hub import auth
from consilience.hub.hub import Hub
from consilience.hub.store import Row
from consilience.protocol import Refusal

SITE_COOKIE = f"{auth.COOKIE}-site"
FORM_COOKIE = f"{auth.COOKIE}-form"
LINK_SECONDS = 300  # less than the store remembers a nonce
VIEW_SECONDS = 3600
_MOST = 2000  # characters of a statement


@dataclass(frozen=True)
class Visitor:
    """A coordinator who is logged in, or a site that looks at its own study."""

    name: str
    secret: str  # the cookie that proves it
    study: str | None = None
    site: Row | None = None

    @property
    def is_coordinator(self) -> bool:
        """Whether the visitor is a coordinator, who may see and change every study."""
        return self.study is None

    @property
    def actor(self) -> str:
        """The visitor as the audit log names it."""
        return f"{'coordinator' if self.is_coordinator else 'site'}:{self.name}"


def visitor_of(hub: Hub, cookies: Mapping[str, str]) -> Visitor | None:
    """Return who sends these cookies; None if they belong to nobody."""
    token = cookies.get(auth.COOKIE)
    if token:
        try:
            return Visitor(auth.coordinator_of(hub.store, token), token)
        except Refusal:
            pass
    stated = cookies.get(SITE_COOKIE)
    facts = _read_facts(hub, "view", stated)
    if facts is None or stated is None or hub.store.is_spent(facts["key"], facts["nonce"]):
        return None
    try:
        site = hub.store.signer(facts["study"], facts["key"])
    except Refusal:  # the key was revoked or replaced
        return None
    return Visitor(site["name"], stated, facts["study"], site)


def new_link(hub: Hub, study: str, site: Row) -> tuple[str, str]:
    """Return the last part of a one-time link for an enrolled site, and when it expires."""
    until = time.time() + LINK_SECONDS
    expires = datetime.fromtimestamp(until, UTC).isoformat(timespec="seconds")
    return _sign_facts(hub, "link", study, site["key"], until), expires


def read_link(hub: Hub, token: str) -> dict[str, Any]:
    """Return the facts of a link that has not expired, or refuse."""
    facts = _read_facts(hub, "link", token)
    if facts is None:
        raise Refusal(
            "not-authenticated",
            "The link was not made by this hub, or it is older than five minutes.",
        )
    return facts


def use_link(hub: Hub, token: str) -> tuple[str, dict[str, Any]]:
    """Use a link; return the value of the view's cookie and the link's facts."""
    facts = read_link(hub, token)
    site = hub.store.signer(facts["study"], facts["key"])
    try:
        hub.store.spend_nonce(facts["key"], facts["nonce"])
    except Refusal:
        raise Refusal(
            "not-authenticated", "The link was already used; each link works once."
        ) from None
    hub.store.log(f"site:{site['name']}", "dashboard opened", facts["study"])
    until = time.time() + VIEW_SECONDS
    return _sign_facts(hub, "view", facts["study"], facts["key"], until), facts


def end_view(hub: Hub, visitor: Visitor) -> None:
    """End a site's view; its cookie stops working everywhere."""
    facts = _read_facts(hub, "view", visitor.secret)
    if facts is not None:
        hub.store.spend_nonce(facts["key"], facts["nonce"], seconds=VIEW_SECONDS)


def form_token(secret: str) -> str:
    """Return what every form of a visitor carries; pages of other origins cannot know it."""
    return hashlib.sha256(f"form {secret}".encode(errors="replace")).hexdigest()


def is_own_form(secret: str | None, token: str) -> bool:
    """Tell whether a form came from a page that was sent to this visitor."""
    return secret is not None and hmac.compare_digest(
        form_token(secret).encode(), token.encode(errors="replace")
    )


def _sign_facts(hub: Hub, kind: str, study: str, key: str, until: float) -> str:
    facts = {"study": study, "key": key, "until": until, "nonce": secrets.token_hex(16)}
    text = canonical(facts)
    signature = hub.key.sign(message_of(kind, text))
    return f"{_encode(text.encode())}.{_encode(signature)}"


def _read_facts(hub: Hub, kind: str, token: str | None) -> dict[str, Any] | None:
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
