"""Pages about accounts: who may log in, with which role; and everybody's own password."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from urllib.parse import quote

from fastapi import Response

from consilience.errors import SettingsError
from consilience.hub.auth import Logins, network_of
from consilience.hub.dashboard.visits import Visit, read_facts, sign_facts
from consilience.hub.roles import Role
from consilience.hub.store import Row
from consilience.protocol import Refusal

BEGUN_SECONDS = 1800  # for setting up a second factor
NO_PROBLEM = ("malformed", "not-found", "name-taken")  # refusals that the form itself repeats
SELF = (
    "You cannot change your own account here; another operator can, or whoever runs commands on "
    "the hub's machine. Your password and second factor are on the page of your account."
)
# What can be chosen on a form: its value, its words, and the role that it means.
CHOICES = (
    ("operator", "Operator: everything, also accounts", Role.OPERATOR),
    ("every", "Coordinator of every study, which may also add studies", Role.COORDINATOR),
    ("some", "Coordinator of these studies only:", Role.COORDINATOR),
    ("auditor", "Auditor: reads everything, also the audit log, and changes nothing", Role.AUDITOR),
)
_ROLES = {value: role for value, _, role in CHOICES}


def _read_role(form: Mapping[str, str]) -> tuple[Role, list[str] | None]:
    """Return the role that was chosen on a form, and the studies if not all."""
    chosen = form.get("role", "")
    if chosen not in _ROLES:
        raise Refusal("malformed", "Choose a role.")
    names = form.get("studies", "").replace(",", " ").split()
    return _ROLES[chosen], names if chosen == "some" else None


def choice_of(row: Row) -> str:
    """Return what was chosen for an account."""
    is_some = row["role"] == Role.COORDINATOR and not row["every_study"]
    return "some" if is_some else "every" if row["role"] == Role.COORDINATOR else str(row["role"])


def show_accounts(visit: Visit) -> Response:
    """List the accounts."""
    return visit.page("accounts.html", accounts=visit.hub.store.accounts())


def show_new_account(visit: Visit, problem: str | None = None, status: int = 200) -> Response:
    """Ask for the name and the role of a new account."""
    return visit.page(
        "new_account.html", status, asked=visit.form, choices=CHOICES, problem=problem
    )


def add_account(visit: Visit) -> Response:
    """Add an account, and show its first password once."""
    name, password = " ".join(visit.form.get("name", "").split()), secrets.token_urlsafe(12)
    try:
        role, only = _read_role(visit.form)
        visit.hub.accounts.add(name, password, visit.someone.actor, role=role, only=only)
    except Refusal as refusal:
        if refusal.code not in NO_PROBLEM:
            raise
        return show_new_account(visit, refusal.message, refusal.status)
    return visit.page("new_password.html", name=name, password=password, is_new=True)


def show_account(visit: Visit, problem: str | None = None, status: int = 200) -> Response:
    """Show one account, and what an operator can change about it."""
    row = next((one for one in visit.hub.store.accounts() if one["name"] == visit["account"]), None)
    if row is None:
        raise Refusal("not-found", "There is no such account.")
    active = row["status"] == "active"
    asked = visit.form if "role" in visit.form else {}
    facts = {"row": row, "choices": CHOICES, "problem": problem, "asked": asked}
    facts |= {"chosen": choice_of(row), "is_own": row["name"] == visit.someone.name}
    sign_on = visit.hub.settings.sign_on
    facts |= {"issuer": sign_on.issuer if sign_on else None}
    confirmed = {"role", "enabled" if active else "disabled"}
    confirmed.add("bound" if row["identities"] else "unbound")
    confirmed.add("needed" if row["needs_factor"] else "need-not")
    confirmed |= set() if row["factor"] else {"reset"}
    return visit.page("account.html", status, confirmed, **facts)


def change_account(visit: Visit) -> Response:
    """Change an account's role, give it a new password, or disable or enable it."""
    name, what, actor = visit["account"], visit.form.get("do", ""), visit.someone.actor
    if name == visit.someone.name:  # the page of the own account asks for the password first
        raise Refusal("not-allowed", SELF)
    store = visit.hub.store
    if what == "role":
        try:
            role, only = _read_role(visit.form)
            store.set_role(name, actor, role=role, only=only)
        except Refusal as refusal:
            if refusal.code not in NO_PROBLEM:
                raise
            return show_account(visit, refusal.message, refusal.status)
        return _back(visit, "role")
    if what in ("disable", "enable"):
        store.set_status(name, actor, active=what == "enable")
        return _back(visit, f"{what}d")
    if what == "bind" and (sign_on := visit.hub.settings.sign_on) is not None:
        subject = visit.form.get("subject", "").strip()
        store.bind(name, sign_on.issuer, subject, actor)
        return _back(visit, "bound")
    if what in ("need", "need-not"):
        store.require_factor(name, actor, needed=what == "need")
        return _back(visit, "needed" if what == "need" else what)
    if what == "reset":
        store.drop_factor(name, actor)
        return _back(visit, "reset")
    if what == "unbind":
        store.unbind(name, actor)
        return _back(visit, "unbound")
    if what == "password":
        password = secrets.token_urlsafe(12)
        visit.hub.accounts.set_password(name, password, actor)
        return visit.page("new_password.html", name=name, password=password, is_new=False)
    raise Refusal("malformed", "A part of the form is missing.")


def _back(visit: Visit, done: str) -> Response:
    return visit.redirect(f"/accounts/{quote(visit['account'])}?done={done}")


# -------------------------------------------------------------------------------- one's own account


def show_own(visit: Visit, problem: str | None = None, status: int = 200) -> Response:
    """Show the visitor's own account."""
    row = visit.hub.store.account(visit.someone.name)
    account = visit.someone.account
    facts = {"has_factor": visit.hub.store.has_factor(visit.someone.name), "problem": problem}
    return visit.page("own_account.html", status, row=row, account=account, **facts)


def show_factor(
    visit: Visit, problem: str | None = None, status: int = 200, **facts: object
) -> Response:
    """Show the visitor's own second factor, or how to set one up."""
    name, store = visit.someone.name, visit.hub.store
    row, account = store.account(name), visit.someone.account
    assert row is not None
    assert account is not None
    known = {
        "is_on": store.has_factor(name),
        "is_required": row["needs_factor"] or store.all_need_factors,
        "must_enrol": account.must_enrol and not facts,
        "problem": problem,
    }
    return visit.page("factor.html", status, **{**known, "codes": None, "enrolment": None, **facts})


def change_factor(visit: Visit) -> Response:
    """Set up the visitor's own second factor, or turn it off."""
    name, what, form, hub = visit.someone.name, visit.form.get("do", ""), visit.form, visit.hub
    logins: Logins = visit.request.app.state.logins
    try:
        if what == "begin":
            logins.check_own(name, form.get("password", ""))
            begun = sign_facts(hub, "factor", time.time() + BEGUN_SECONDS, name=name)
            return show_factor(visit, enrolment=hub.factors.begin(name), begun=begun)
        if what == "confirm":
            if not _has_begun(visit):
                raise Refusal("not-allowed", "It was begun too long ago. Begin again.")
            network = network_of(visit.address)
            secret = visit.someone.secret
            codes = hub.factors.confirm(name, form.get("code", ""), secret, network)
            return show_factor(visit, codes=codes)
        row = hub.store.account(name)
        if what == "remove" and row is not None:
            if row["needs_factor"] or hub.store.all_need_factors:
                raise Refusal("not-allowed", "Your account needs its second factor.")
            logins.check_own(name, form.get("password", ""))
            hub.store.drop_factor(name, visit.someone.actor)
            return visit.redirect("/login")
    except Refusal as refusal:
        again = hub.factors.pending(name) if what == "confirm" and _has_begun(visit) else None
        shown = {"enrolment": again, "begun": form.get("begun")}
        return show_factor(visit, refusal.message, refusal.status, **shown)
    raise Refusal("malformed", "A part of the form is missing.")


def _has_begun(visit: Visit) -> bool:
    """Tell whether a form is from the page that somebody saw who typed the account's password."""
    begun = read_facts(visit.hub, "factor", visit.form.get("begun"))
    return begun is not None and begun["name"] == visit.someone.name


def change_password(visit: Visit) -> Response:
    """Change the visitor's own password, which ends all their sessions."""
    form, name = visit.form, visit.someone.name
    old, new, again = (form.get(part, "") for part in ("old", "new", "again"))
    try:
        if new != again:
            raise Refusal("malformed", "The new password was typed in two ways.")
        visit.request.app.state.logins.check_own(name, old)
        visit.hub.accounts.set_password(name, new, visit.someone.actor)
    except (Refusal, SettingsError) as problem:
        status = problem.status if isinstance(problem, Refusal) else 400
        return show_own(visit, str(getattr(problem, "message", problem)), status)
    return visit.redirect("/login?done=password")
