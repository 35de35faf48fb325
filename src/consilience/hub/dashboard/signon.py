"""Pages about logging in: the form, and the way to an identity provider and back."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from typing import Any

from fastapi import Response

from consilience.hub import auth
from consilience.hub.dashboard.texts import LOGIN_FIXES
from consilience.hub.dashboard.visits import (
    FORM_COOKIE,
    SITE_COOKIE,
    Visit,
    next_page,
    read_facts,
    sign_facts,
)
from consilience.hub.signon import BACK, Provider
from consilience.protocol import ERRORS, Refusal

COOKIE = "consilience_sso"  # what this browser began, until it comes back
SECONDS = 600
CODE_SECONDS = 300  # for typing the code of a second factor
MOST_NEXT = 500  # characters of the page to go on to


def show_form(
    visit: Visit, target: str, name: str = "", problem: str | None = None, status: int = 200
) -> Response:
    """Ask for a name and a password, or offer the identity provider."""
    confirmed = () if visit.visitor or problem else ("out", "password")
    sign_on = visit.hub.settings.sign_on
    return visit.page(
        "login.html",
        status,
        confirmed,
        next=target,
        name=name,
        problem=problem,
        sign_on=sign_on and sign_on.name,
        is_out=visit.request.query_params.get("done") == "out",
    )


def go_on(visit: Visit, answer: Response, token: str) -> Response:
    """Give a browser its session."""
    seconds = int(visit.hub.settings.session_hours * 3600)
    visit.set_cookie(answer, auth.COOKIE, token, seconds)
    for old in (SITE_COOKIE, FORM_COOKIE):
        answer.delete_cookie(old)
    return answer


def ask_code(
    visit: Visit, name: str, stored: str, target: str, problem: str | None = None
) -> Response:
    """Ask whoever knows the password for the code of their second factor."""
    facts = {"name": name, "stored": stored, "next": target[:MOST_NEXT]}
    begun = sign_facts(visit.hub, "code", time.time() + CODE_SECONDS, **facts)
    status = 401 if problem else 200
    return visit.page("code.html", status, begun=begun, problem=problem)


def take_code(visit: Visit) -> Response:
    """Begin the session of whoever knows the password and has the code."""
    begun = read_facts(visit.hub, "code", visit.form.get("begun"))
    if begun is None:
        problem = "The code came too late. Log in again."
        return show_form(visit, "/studies", problem=problem, status=401)
    name, stored, target = begun["name"], begun["stored"], next_page(begun["next"])
    logins: auth.Logins = visit.request.app.state.logins
    code, hours = visit.form.get("code", ""), visit.hub.settings.session_hours
    try:
        token, _ = logins.log_in_second(name, stored, code, visit.address, hours=hours)
    except Refusal as refusal:
        fix = LOGIN_FIXES.get("code") if refusal.code == "not-authenticated" else None
        problem = f"{refusal.message} {fix or ERRORS[refusal.code][1]}"
        return ask_code(visit, name, stored, target, problem)
    return go_on(visit, visit.redirect(target), token)


def begin(visit: Visit) -> Response:
    """Send a browser to the identity provider."""
    provider, target = _provider(visit), next_page(visit.request.query_params.get("next"))
    logins: auth.Logins = visit.request.app.state.logins
    state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
    begun = {"state": state, "asked": nonce, "verifier": verifier, "next": target[:MOST_NEXT]}
    try:
        logins.limit(visit.address)
        address = provider.address_of_login(state, nonce, verifier)
    except Refusal as refusal:
        return _refuse(visit, refusal, target)
    answer = visit.redirect(address)
    answer.set_cookie(
        COOKIE,
        sign_facts(visit.hub, "login", time.time() + SECONDS, **begun),
        max_age=SECONDS,
        path=BACK,
        httponly=True,
        samesite="lax",  # the provider sends the browser back, and the cookie has to come along
        secure=visit.request.url.scheme == "https",
    )
    return answer


def come_back(visit: Visit) -> Response:
    """Begin a session for whom the identity provider sends back."""
    provider, hours = _provider(visit), visit.hub.settings.session_hours
    logins: auth.Logins = visit.request.app.state.logins
    target = "/studies"
    try:
        logins.limit(visit.address)
        begun = _read_begun(visit)
        target = next_page(begun["next"])
        identity = provider.identify(_read_code(visit, begun), begun["asked"], begun["verifier"])
    except Refusal as refusal:
        if refusal.code == "not-authenticated":
            logins.note_failure(visit.address, refusal)
        return _refuse(visit, refusal, target)
    try:
        token, _ = logins.log_in_as(identity, visit.address, hours=hours)
    except Refusal as refusal:
        return _refuse(visit, refusal, target)
    # Not a redirect: browsers send strict cookies only to where a page of the hub itself leads.
    answer = visit.page("signed_in.html", target=target)
    answer.delete_cookie(COOKIE, path=BACK)
    return go_on(visit, answer, token)


def leave(visit: Visit) -> Response:
    """Send a browser to where the identity provider's own session is ended."""
    return visit.redirect(_provider(visit).address_of_logout() or "/login")


def _read_begun(visit: Visit) -> dict[str, Any]:
    """Return what this browser began; a second time it is refused."""
    begun = read_facts(visit.hub, "login", visit.request.cookies.get(COOKIE))
    state = visit.request.query_params.get("state", "").encode()
    if begun is None or not hmac.compare_digest(str(begun["state"]).encode(), state):
        raise Refusal(
            "not-authenticated",
            "This login was not begun in this browser, or more than ten minutes ago.",
        )
    try:
        visit.hub.store.spend_nonce("login", begun["nonce"], seconds=2 * SECONDS)
    except Refusal:
        raise Refusal("not-authenticated", "This login was used before.") from None
    return begun


def _read_code(visit: Visit, begun: Mapping[str, Any]) -> str:
    asked = visit.request.query_params
    issuer = _provider(visit).settings.issuer
    code = asked.get("code", "")
    if not 1 <= len(code) <= 4096 or asked.get("iss", issuer) != issuer:
        raise Refusal("not-authenticated", "The identity provider did not let you log in.")
    return code


def _provider(visit: Visit) -> Provider:
    if visit.hub.provider is None:
        raise Refusal("not-found", "This hub has no identity provider.")
    return visit.hub.provider


def _refuse(visit: Visit, refusal: Refusal, target: str) -> Response:
    fix = LOGIN_FIXES.get("sso") if refusal.code == "not-authenticated" else None
    problem = f"{refusal.message} {fix or ERRORS[refusal.code][1]}"
    answer = show_form(visit, target, "", problem, refusal.status)
    answer.delete_cookie(COOKIE, path=BACK)
    return answer
