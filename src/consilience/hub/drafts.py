"""What a hub does for drafts: keeping studies that are still being written, and freezing them."""

from __future__ import annotations

import copy
import secrets
from pathlib import Path

from consilience.errors import ConsilienceError
from consilience.hub.hub import Hub
from consilience.hub.roles import Account
from consilience.hub.store import Row, hashed
from consilience.hub.store.drafts import PUBLIC_PARTS, Change, name_of, require_version
from consilience.protocol import Refusal
from consilience.study import building
from consilience.study.building import Facts, find_problems
from consilience.study.check import FILE_NAME
from consilience.tables.reading import has_more_records
from consilience.text import printable

MOST_TOKEN = 100  # characters
_COMMENT = "A draft of a study, from {url}. Nobody has agreed to it, and it may still change."


class DraftDesk:
    """Everything that is asked of a hub about drafts, for one account."""

    def __init__(self, hub: Hub, account: Account) -> None:
        self.hub, self.store, self.account = hub, hub.store, account

    def list(self) -> list[Row]:
        """Return the drafts that the account may see."""
        sees_all = self.account.opens("")
        return self.store.drafts(None if sees_all else self.account.name)

    def get(self, draft: str) -> Row:
        """Return a draft that the account may see, or refuse."""
        row = self.store.draft(draft)
        if not self.account.opens(row["owner"]):
            raise Refusal("not-found", "There is no such draft.")
        return row

    def add(self, facts: Facts) -> str:
        """Add a draft and return its id."""
        return self.store.add_draft(self.account.name, facts, self.account.actor)

    def change(self, draft: str, version: int, part: str, new: Facts) -> None:
        """Replace top-level parts of a draft's facts; None removes one."""
        facts = copy.deepcopy(self.get(draft)["facts"]) | new
        facts = {name: value for name, value in facts.items() if value is not None}
        self._keep(draft, Change(version, part, building.limited(facts)))

    def keep_file(self, draft: str, version: int, part: str, arrived: Path, facts: Facts) -> None:
        """Keep a file of public records and name it in a draft."""
        row, settings = self.get(draft), self.hub.settings
        name, sha256 = facts["file"], facts["sha256"]
        if part not in PUBLIC_PARTS:
            raise Refusal("not-found", "A draft has no such file.")
        if not FILE_NAME.fullmatch(name):
            raise Refusal(
                "malformed",
                "The file's name must consist of letters, digits, spaces and ._-, and end with "
                ".csv, .csv.gz, .parquet or .pq. Rename the file.",
            )
        size, most = arrived.stat().st_size, settings.most_public_records
        if has_more_records(arrived, name, most, settings.most_public_bytes):
            raise Refusal("too-large", f"The file has more than {most:,} records, or is too large.")
        require_version(row, version)
        new = building.limited({**row["facts"], part: {**facts, "labelled": True}})
        self.store.files.keep(arrived, sha256)
        try:
            self._keep(draft, Change(version, part, new, size))
        except Refusal:  # its bytes would stay until the next start
            self.store.remove_unnamed(sha256)
            raise

    def _keep(self, draft: str, change: Change) -> None:
        for sha256 in self.store.change_draft(draft, change, self.account.actor):
            self.store.remove_unnamed(sha256)

    def text(self, row: Row, url: str) -> str:
        """Return the study file of a draft, which says that it is one."""
        return building.write(row["facts"], printable(_COMMENT.format(url=url)))

    def share(self, draft: str) -> str:
        """Return the token of a new link, by which whoever has it can read the study file."""
        self.get(draft)
        token = secrets.token_hex(24)  # without hyphens, because it is used on command lines
        self.store.share_draft(draft, hashed(token), self.account.actor)
        return token

    def unshare(self, draft: str) -> None:
        """End the link of a draft."""
        self.get(draft)
        self.store.share_draft(draft, None, self.account.actor)

    def delete(self, draft: str) -> None:
        """Delete a draft, and its files that nothing else names."""
        self.get(draft)
        for sha256 in self.store.remove_draft(draft, self.account.actor):
            self.store.remove_unnamed(sha256)

    def freeze(self, draft: str, version: int) -> str:
        """Make a study of a draft, as it was shown, and return its name."""
        row = self.get(draft)
        require_version(row, version)
        if problems := find_problems(row["facts"]):
            raise Refusal("study-invalid", problems[0].text)
        try:
            study = building.read(row["facts"])
        except ConsilienceError as problem:
            raise Refusal("study-invalid", str(problem)) from None
        known = self.store.study(study.name)
        if known is not None and known["digest"] != study.digest:
            raise Refusal("name-taken", f"There is already a study named {study.name!r}.")
        self.hub.add_study(building.write(row["facts"]), self.account.actor)
        self.store.remove_draft(draft, self.account.actor, study.name)
        self.hub.changed.set()
        return study.name


def read_shared(hub: Hub, token: str, url: str) -> str:
    """Return the study file of the draft whose link has this token, or refuse."""
    row = hub.store.shared_draft(hashed(token)) if len(token) <= MOST_TOKEN else None
    if row is None:
        raise Refusal("not-found", "There is no draft with this link, or the link was ended.")
    comment = f"{name_of(row)}: {_COMMENT.format(url=url)}"
    return building.write(row["facts"], printable(comment))
