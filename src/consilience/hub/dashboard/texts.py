"""What the dashboard says: notices, headings, what to do about errors, what a study waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from consilience.hub.dashboard.queries import Numbers
from consilience.hub.store import Row
from consilience.study.study import Study

NOTICES = {
    "created": "The study is open. Invite its sites next.",
    "closed": "The study is closed. Its releases remain available.",
    "revoked": "The key is revoked. The site can no longer sign anything in this study.",
    "released": "The release was made and signed.",
    "allowed": "The budget is set.",
    "uploaded": "The file was uploaded, and its digest is the one that the study names.",
    "out": "You are logged out.",
}
HEADINGS = {
    "not-found": "This page does not exist",
    "no-release": "This release does not exist",
    "not-allowed": "You cannot do this",
    "not-authenticated": "Please log in",
    "unavailable": "The hub cannot answer right now",
    "too-many": "Too many attempts",
    "study-closed": "The study is closed",
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
LOGIN_FIXES = {"not-authenticated": "Check both, or ask the hub's operator for a new password."}


class Task(NamedTuple):
    """What a study waits for: a heading, a text, and a link to where it can be done."""

    heading: str
    text: str
    link: str | None = None
    action: str | None = None
    alarm: bool = False


def list_tasks(
    row: Row, study: Study, numbers: Numbers, current: Row | None, files: Sequence[Row]
) -> list[Task]:
    """Return what has to happen before a study's next release."""
    at, n_accepted = f"/studies/{row['name']}", numbers.contributions["accepted"]
    tasks = []
    if row["problem"]:
        text = f"{row['problem']} The hub tries again after the next change."
        tasks.append(Task("Combining failed", text, alarm=True))
    if row["status"] != "open":
        return tasks
    for file in files:
        if not file["there"]:
            text = f"{file['file']} is needed for {file['uses']}. No release is made without it."
            tasks.append(Task("A public file is missing", text, f"{at}#files", "Upload it"))
    if not numbers.sites:
        text = (
            "Each site joins with a one-time invitation, and at least "
            f"{study.min_sites} sites must contribute."
        )
        if numbers.invitations:
            text += f" Open invitations: {numbers.invitations}."
        tasks.append(Task("No site has joined yet", text, f"{at}/invite", "Invite a site"))
    elif n_accepted < study.min_sites:
        text = (
            f"{n_accepted} of {numbers.sites['enrolled']} enrolled sites have contributed, and a "
            f"release needs {study.min_sites}. Sites train and submit on their own; you do not "
            "have to start anything here."
        )
        tasks.append(Task("Waiting for contributions", text, f"{at}/invite", "Invite another site"))
    elif study.draws_noise and (current is None or current["change"] < row["changes"]):
        text = (
            "This study's aggregator adds random noise, which costs privacy budget, so the hub "
            "makes a release only when you ask for one. The next page shows the cost."
        )
        tasks.append(Task("A release can be made", text, f"{at}/aggregate", "Make a release"))
    elif not row["problem"] and row["combined"] < row["changes"]:
        tasks.append(Task("A new release is being made", "Reload this page in a moment."))
    return tasks
