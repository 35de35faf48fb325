"""What the dashboard says: notices, headings, what to do about errors, and what a study waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from consilience.hub.dashboard.queries import Numbers
from consilience.hub.store import Row
from consilience.study.study import Study

NOTICES = {
    "created": "The study is open. Invite its sites next.",
    "closed": "The study is closed. Its releases stay.",
    "revoked": "The key is revoked: the site can no longer sign anything in this study.",
    "released": "The release is made and signed.",
    "allowed": "The budget is set.",
    "uploaded": "The file is here, and it is the one that the study names.",
    "out": "You are logged out.",
}
HEADINGS = {
    "not-found": "There is no such page",
    "no-release": "There is no such release",
    "not-allowed": "This is not open to you",
    "not-authenticated": "Please log in",
    "unavailable": "The hub cannot answer now",
    "too-many": "Too many attempts",
    "study-closed": "The study is closed",
    "wrong-method": "There is no such page",
}
FIXES = {
    "not-found": "Check the address, or begin again from the first page. A site sees its own study only.",
    "not-allowed": "Go back, load the page again and repeat what you did; if it stays so, ask a coordinator.",
    "not-authenticated": "Coordinators log in with name and password. A site opens its view with a fresh link.",
    "malformed": "Go back and correct what the sentence above names.",
    "budget": "Set a larger budget for this study below, if its sites agree to that.",
    "wrong-method": "Begin again from the first page.",
    "no-release": "Look at the study's page for the releases there are.",
}
LOGIN_FIXES = {"not-authenticated": "Check both, or ask the hub's operator for a new password."}


class Task(NamedTuple):
    """What a study waits for, in a heading and a sentence, and where to do it."""

    heading: str
    text: str
    link: str | None = None
    action: str | None = None
    alarm: bool = False


def list_tasks(
    row: Row, study: Study, numbers: Numbers, current: Row | None, files: Sequence[Row]
) -> list[Task]:
    """Return what stands between a study and its next release."""
    at = f"/studies/{row['name']}"
    found = []
    if row["problem"]:
        found.append(
            Task(
                "Combining failed", f"{row['problem']} The next change is tried again.", alarm=True
            )
        )
    if row["status"] != "open":
        return found
    for file in files:
        if not file["there"]:
            text = f"{file['file']} is needed for {file['uses']}. No release is made without it."
            found.append(Task("A public file is missing", text, f"{at}#files", "Upload it"))
    if not numbers.sites:
        waiting = f" {numbers.invitations} open so far." if numbers.invitations else ""
        text = f"Each site joins with a one-time invitation, and at least {study.min_sites} must contribute.{waiting}"
        found.append(Task("No site has joined yet", text, f"{at}/invite", "Invite a site"))
    elif numbers.accepted < study.min_sites:
        text = (
            f"{numbers.accepted} of {numbers.enrolled} enrolled sites have contributed, and a "
            f"release needs {study.min_sites}. Sites train and submit by themselves; there is "
            "nothing to start here."
        )
        found.append(Task("Waiting for contributions", text, f"{at}/invite", "Invite another site"))
    elif study.draws_noise and (current is None or current["change"] < row["changes"]):
        text = "This study's aggregator draws noise, so the hub makes no release unasked. The next page says the cost."
        found.append(Task("A release can be made", text, f"{at}/aggregate", "Make a release"))
    elif not row["problem"] and row["combined"] < row["changes"]:
        found.append(Task("A new release is being made", "Load this page again in a moment."))
    return found
