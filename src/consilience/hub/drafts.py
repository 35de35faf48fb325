"""What a hub does for drafts: keeping studies that are still being written, and freezing them."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from consilience.errors import ConsilienceError
from consilience.hub.hub import Hub
from consilience.hub.roles import Account, Action, Role
from consilience.hub.store import Row, hashed
from consilience.hub.store.drafts import PUBLIC_PARTS, Change, name_of, require_version
from consilience.protocol import Refusal, check_new_name
from consilience.study import building
from consilience.study.building import Facts, Problem, find_problems
from consilience.study.check import FILE_NAME
from consilience.study.records import PublicFile, find_misfit
from consilience.tables.reading import has_more_records
from consilience.tables.schema import Schema
from consilience.text import printable, quote

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
        is_durable = lambda: self.store.files.holds(sha256)  # noqa: E731
        try:
            self._keep(draft, Change(version, part, new, size), is_durable)
        except Refusal:  # its bytes would stay until the next start
            self.store.remove_unnamed(sha256)
            raise

    def _keep(
        self, draft: str, change: Change, is_durable: Callable[[], bool] = lambda: True
    ) -> None:
        for sha256 in self.store.change_draft(draft, change, self.account.actor, is_durable):
            self.store.remove_unnamed(sha256)
        if change.size is not None:
            self.hub.changed.set()  # a study may have waited for this very file

    def find_problems(self, facts: Facts) -> Sequence[Problem]:
        """Return all that keeps a draft from becoming a study here, in the order of the parts."""
        found = find_problems(facts)
        if not any(each.part == "basics" for each in found):
            found += self._find_name_problem(facts)
        if not any(each.part == "columns" for each in found):
            found += self._find_file_problems(facts)
        order = list(building.PARTS)
        return sorted(found, key=lambda problem: order.index(problem.part))

    def _find_name_problem(self, facts: Facts) -> Iterator[Problem]:
        name = facts["study"]["name"]
        known = self.store.study(name)
        with suppress(ConsilienceError):  # it has other problems
            if known is not None and known["digest"] == building.read(facts).digest:
                return  # the hub was stopped while it was frozen
        try:
            check_new_name(name, self.store.study_names())
        except Refusal as refusal:
            yield Problem("basics", f"No study of this hub can have this name: {refusal.message}")

    def _find_file_problems(self, facts: Facts) -> Iterator[Problem]:
        schema = json.dumps(facts["schema"])
        for part in PUBLIC_PARTS:
            if part not in facts:
                continue
            file = PublicFile(**facts[part])
            try:
                why = _find_misfit(file, schema, self.store.file_path(file.sha256))
            except Refusal as refusal:  # it was removed from the disk
                why = refusal.message
            if why is not None:
                yield Problem("files", f"{quote(file.file)} cannot be used: {why}")

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
        if problems := self.find_problems(row["facts"]):
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


@lru_cache(maxsize=64)  # every page of a draft asks
def _find_misfit(file: PublicFile, schema: str, path: Path) -> str | None:
    return find_misfit(file, Schema.from_dict(json.loads(schema)), path)


def _may_share(hub: Hub, owner: str) -> bool:
    """Tell whether a draft's account may still add studies: its link is worth no more than that."""
    row = hub.store.account(owner)
    if row is None or row["status"] != "active":
        return False
    studies = None if row["every_study"] else frozenset[str]()
    return Account(owner, Role(row["role"]), studies).may(Action.ADD)


def read_shared(hub: Hub, token: str, url: str) -> str:
    """Return the study file of the draft whose link has this token, or refuse."""
    row = hub.store.shared_draft(hashed(token)) if len(token) <= MOST_TOKEN else None
    if row is None or not _may_share(hub, row["owner"]):
        raise Refusal("not-found", "There is no draft with this link, or the link was ended.")
    comment = f"{name_of(row)}: {_COMMENT.format(url=url)}"
    return building.write(row["facts"], printable(comment))
