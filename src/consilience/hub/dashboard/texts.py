"""What the dashboard says: notices, errors, what a study waits for, and values in templates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from consilience.files.certificate import UNITS
from consilience.hub.dashboard import charts
from consilience.hub.state import BlindState, StudyState
from consilience.privacy.guarantee import Guarantee, Unit, show_bound, show_left
from consilience.text import printable

# What a page says after a form, if the page finds that it is so.
NOTICES = {
    "created": "The study is open. Invite its sites next.",
    "closed": "The study is closed.",
    "frozen": "The roster is frozen. Its keyholders can sign it now.",
    "revoked": "The key is revoked. The site can no longer sign anything in this study.",
    "released": "The release was made and signed.",
    "allowed": "The budget is set.",
    "uploaded": "The file is here, and its digest is the one that the study names.",
    "out": "You are logged out.",
    "password": "The password is changed. Log in with the new one.",
    "role": "The role is changed.",
    "disabled": "The account is disabled, and its sessions have ended.",
    "enabled": "The account is enabled again.",
    "needed": "The account needs a second factor from now on.",
    "need-not": "The account needs no second factor.",
    "reset": "The second factor is removed.",
    "bound": "The identity is bound to the account.",
    "unbound": "The identity is removed: the provider no longer logs anybody in to this account.",
}
HEADINGS = {
    "not-found": "This page does not exist",
    "no-release": "This release does not exist",
    "not-allowed": "You cannot do this",
    "not-authenticated": "Please log in",
    "unavailable": "The hub cannot answer right now",
    "too-many": "Too many attempts",
    "study-closed": "The study is closed",
    "trial-waits": "Drafts are tried one at a time",
    "wrong-method": "This page does not exist",
}
FIXES = {
    "not-found": "Check the address, or start again from the first page. A site can see only its "
    "own study.",
    "not-allowed": "Go back, reload the page and try again. If that does not help, ask a "
    "coordinator.",
    "not-authenticated": "Coordinators log in with name and password. A site opens its view with "
    "a new link.",
    "malformed": "Go back and correct what the message above says.",
    "budget": "If the sites agree, set a larger budget for this study below.",
    "wrong-method": "Start again from the first page.",
    "no-release": "The study's page lists its releases.",
}
LOGIN_FIXES = {
    "not-authenticated": "Check both, or ask the hub's operator for a new password.",
    "code": "Wait for the next code of your app, or ask an operator for help.",
    "sso": "Try again, or show this message to the hub's operator.",
}


class Task(NamedTuple):
    """What a study waits for: a heading, a text, and a link to where it can be done."""

    heading: str
    text: str
    link: str | None = None
    action: str | None = None
    alarm: bool = False


def list_tasks(state: StudyState, blind: BlindState | None = None) -> list[Task]:
    """Return what a coordinator should know or do about a study."""
    row, study, current = state.row, state.study, state.current
    at, tasks = f"/studies/{row['name']}", []
    if state.withheld:
        task = Task("A release is withheld", state.withheld, f"{at}/aggregate", "Look at it")
        tasks.append(task._replace(alarm=True))
    if state.failed:
        tasks.append(Task("Combining failed", state.failed, alarm=True))
    if state.absent and current is not None:
        text = f"{state.absent} Release {current['sequence']} is made of the others."
        tasks.append(Task("A contribution is left out", text, f"{at}#sites", "Sites", alarm=True))
    if state.alerts and current is not None:
        text = " ".join(f"{site!r}: {why}" for site, why in state.alerts.items())
        text += " Its records may be unlike the others', or it may be wrong; ask the site."
        text += f" It is in release {current['sequence']}."
        tasks.append(Task("A contribution is unlike the others", text, f"{at}#weights", "Weights"))
    if state.returning:
        text = " ".join(one.text for one in state.returning)
        tasks.append(Task("A site withdraws again and again", text, f"{at}#sites", "Sites"))
    if state.is_open or state.is_enough:
        for file in state.missing:
            text = f"{file['file']} is needed for {file['uses']}. No release is made without it."
            tasks.append(Task("A public file is missing", text, f"{at}#files", "Upload it"))
    if blind is not None:
        task = Task("What this study waits for", blind.awaited, f"{at}#blind", "Its batches")
        if blind.roster is None and state.sites and state.is_open:
            task = task._replace(link=f"{at}/roster", action="Freeze the roster")
        tasks.append(task)
        if blind.refusals:
            text = (
                "The hub refused something that a keyholder sent. If that keyholder cannot say "
                "why, do not rely on it: ask the sites before the next batch is opened."
            )
            task = Task("A keyholder was refused", text, f"{at}#blind", "What it was")
            tasks.append(task._replace(alarm=True))
    if state.is_open and not state.sites:
        text = (
            "Each site joins with a one-time invitation, and at least "
            f"{study.min_sites} sites must contribute."
        )
        if state.invitations:
            text += f" Open invitations: {state.invitations}."
        tasks.append(Task("No site has joined yet", text, f"{at}/invite", "Invite a site"))
    elif state.is_open and not state.is_enough:
        task = Task("Waiting for contributions", state.waiting)
        if not state.has_roster:
            task = task._replace(link=f"{at}/invite", action="Invite another site")
        tasks.append(task)
    elif not state.is_enough:
        if current is None:
            tasks.append(Task("There will be no further release", state.next_release))
    elif state.lacks_weights:
        text = f"{state.next_release} If it has not joined, it needs an invitation in its own name."
        heading = "The contributions have to be weighed"
        tasks.append(Task(heading, text if state.is_open else state.next_release))
    elif study.draws_noise and state.can_draw:
        text = (
            "This study's aggregator adds random noise, which costs privacy budget, so the hub "
            "makes a release only when you ask for one. The next page shows the cost."
        )
        tasks.append(Task("A release can be made", text, f"{at}/aggregate", "Make a release"))
    elif state.is_due:
        tasks.append(Task("A new release is being made", "Reload this page in a moment."))
    return tasks


# ------------------------------------------------------------------------------ values in templates


KINDS = {"study": "this release", "baseline": "baseline", "other": "another way to combine"}


def _when(text: str | None) -> Markup:
    """Return a time to the minute, in UTC."""
    if not text:
        return Markup("—")
    at = datetime.fromisoformat(text)
    shown = f"{at:%Y-%m-%d}<span class=hour> {at:%H:%M} UTC</span>"
    return Markup(f'<time datetime="{escape(text)}">{shown}</time>')  # noqa: S704  built from a parsed time


def _day(text: str) -> Markup:
    return Markup(f'<time datetime="{escape(text)}">{datetime.fromisoformat(text):%Y-%m-%d}</time>')  # noqa: S704


def _promise(value: Guarantee | Mapping[str, Any] | None) -> str:
    """Return a guarantee in one short line."""
    if value is None:
        return "—"
    stated = value if isinstance(value, Guarantee) else Guarantee.from_dict(dict(value))
    if math.isinf(stated.epsilon):
        return "none against the hub"
    delta = f", δ = {show_bound(stated.delta, 3)}" if stated.delta else ""
    return f"ε = {show_bound(stated.epsilon, 4)}{delta}"


def _weight(value: float) -> str:
    if value and abs(value) < 0.0001:
        return "< 0.0001" if value > 0 else "> −0.0001"
    return f"{value:.3f}" if not value or abs(value) >= 0.01 else f"{value:.2g}"


def _bytes(size: int) -> str:
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} bytes"


def _measured(value: Mapping[str, float] | None, percent: bool) -> str:
    return "—" if value is None else charts.show_number(value["value"], percent)


def _between(value: Mapping[str, float] | None, percent: bool) -> str:
    ends = () if value is None else (value["low"], value["high"])
    return " to ".join(charts.show_number(end, percent) for end in ends) or "—"


def _fact(value: object) -> str:
    """Shorten a fact of the audit log; the log itself has all of it."""
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:.*", text):
        return f"{text[:10]} {text[11:16]} UTC"
    return f"{text[:16]}…" if len(text) > 40 and " " not in text else text


def _plain(value: object) -> str:
    """Return a number of a study file without a needless zero."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _finalize(value: object) -> object:
    """Show text of others, which is no markup, in characters that can be seen."""
    return printable(value, lines=True) if type(value) is str else value


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "when": _when,
    "day": _day,
    "promise": _promise,
    "bound": show_bound,
    "left": show_left,
    "protected": lambda unit: UNITS[Unit(unit)],
    "bytes": _bytes,
    "weight": _weight,
    "measured": _measured,
    "between": _between,
    "segment": partial(quote, safe=""),
    "fact": _fact,
    "plain": _plain,
}
TEMPLATES.globals |= {"bar": charts.draw_bar, "KINDS": KINDS, "isinf": math.isinf}
