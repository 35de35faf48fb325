"""Rows about drafts: studies that are still being written, their links and trials."""

from __future__ import annotations

import json
import secrets
from typing import NamedTuple

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_row, now, writing
from consilience.hub.store.tables import drafts, files, studies
from consilience.protocol import Refusal

MOST_DRAFTS = 20  # of one account
MOST_IN_HUB = 200
PUBLIC_PARTS = ("public", "test")
_BRIEF = (drafts.c.id, drafts.c.owner, drafts.c.facts, drafts.c.created, drafts.c.changed)


class Change(NamedTuple):
    """New facts in place of a version of a draft, and the size of the file that came with them."""

    version: int
    part: str
    facts: Row
    size: int | None = None


def get_draft(db: sa.Connection, draft: str, version: int | None = None) -> Row:
    """Return a draft's row, or refuse; also if it was changed since a `version` of it was shown."""
    row = fetch_row(db, sa.select(drafts).where(drafts.c.id == draft))
    if row is None:
        raise Refusal("not-found", "There is no such draft.")
    if version is not None:
        require_version(row, version)
    return row


def require_version(row: Row, version: int) -> None:
    """Refuse what was asked of an older version of a draft."""
    if version != row["version"]:
        raise Refusal(
            "draft-changed",
            "The draft was changed since this page was shown, and nothing of the form was kept.",
        )


def name_of(row: Row) -> str:
    """Return what a draft is called, which need not be unique."""
    return str(row["facts"]["study"].get("name") or "without a name")


class Drafts(Database):
    """Drafts of studies, each of one account."""

    @writing
    def add_draft(self, db: sa.Connection, owner: str, facts: Row, actor: str) -> str:
        """Add a draft and return its id."""
        counted = sa.select(sa.func.count()).select_from(drafts)
        of_owner = db.execute(counted.where(drafts.c.owner == owner)).scalar_one()
        if of_owner >= MOST_DRAFTS or db.execute(counted).scalar_one() >= MOST_IN_HUB:
            raise Refusal(
                "too-many-drafts",
                f"An account can have {MOST_DRAFTS} drafts, and all accounts together "
                f"{MOST_IN_HUB}.",
            )
        row: Row = {"id": secrets.token_hex(8), "owner": owner, "facts": facts, "version": 1}
        new = {"created": now(), "changed": now(), "trial": None}
        db.execute(drafts.insert().values(**row, **new))
        append_entry(db, actor, "draft created", None, draft=row["id"], name=name_of(row))
        return str(row["id"])

    @writing
    def change_draft(self, db: sa.Connection, draft: str, change: Change, actor: str) -> list[str]:
        """Change the facts of a draft; return the digests of files that nothing names any more."""
        before, facts = get_draft(db, draft, change.version), change.facts
        if before["facts"] == facts:
            return []
        said = {"draft": draft, "name": name_of({"facts": facts}), "part": change.part}
        if change.size is not None:
            sha256 = said["sha256"] = facts[change.part]["sha256"]
            if fetch_row(db, sa.select(files).where(files.c.sha256 == sha256)) is None:
                new_file = {"sha256": sha256, "size": change.size, "received": now()}
                db.execute(files.insert().values(**new_file))
        new = {"facts": facts, "version": change.version + 1, "changed": now(), "trial": None}
        same = drafts.update().where(drafts.c.id == draft)
        db.execute(same.values(**new, trial_until=None))
        append_entry(db, actor, "draft changed", None, **said)
        return _forget_files(db, before["facts"])

    @writing
    def remove_draft(
        self, db: sa.Connection, draft: str, actor: str, study: str | None = None
    ) -> list[str]:
        """Remove a draft, which perhaps became a study; return the digests of files nobody names.

        Removing it again changes nothing.
        """
        row = fetch_row(db, sa.select(drafts).where(drafts.c.id == draft))
        if row is None:
            return []
        db.execute(drafts.delete().where(drafts.c.id == draft))
        action = "draft deleted" if study is None else "draft frozen"
        append_entry(db, actor, action, study, draft=draft, name=name_of(row))
        return _forget_files(db, row["facts"])

    @writing
    def share_draft(
        self, db: sa.Connection, draft: str, token_hash: str | None, actor: str
    ) -> None:
        """Give a draft a link, which ends an earlier one; None ends it only."""
        row = get_draft(db, draft)
        db.execute(drafts.update().where(drafts.c.id == draft).values(link=token_hash))
        action = "draft shared" if token_hash else "draft no longer shared"
        append_entry(db, actor, action, None, draft=draft, name=name_of(row))

    def draft(self, draft: str) -> Row:
        """Return a draft's row, or refuse."""
        with self.reading() as db:
            return get_draft(db, draft)

    def drafts(self, owner: str | None = None) -> list[Row]:
        """Return drafts, of one owner or all, those changed last first, without their columns."""
        query = sa.select(*_BRIEF).order_by(drafts.c.changed.desc())
        return self.fetch_all(query if owner is None else query.where(drafts.c.owner == owner))

    def shared_draft(self, token_hash: str) -> Row | None:
        """Return the draft whose link has this hash."""
        return self.fetch_one(sa.select(drafts).where(drafts.c.link == token_hash))

    # ------------------------------------------------------------------------------------ trials

    @writing
    def begin_trial(
        self, db: sa.Connection, draft: str, version: int, trial: Row, actor: str
    ) -> None:
        """Note that a trial of a draft begins; one goes on at a time in the whole hub."""
        get_draft(db, draft, version)
        if fetch_row(db, sa.select(drafts.c.id).where(drafts.c.trial_until > now())) is not None:
            raise Refusal("unavailable", "Another draft is being tried on this hub.")
        same = drafts.update().where(drafts.c.id == draft)
        until = now(seconds=trial["seconds"])
        db.execute(same.values(trial={**trial, "state": "running"}, trial_until=until))
        append_entry(db, actor, "draft tried", None, draft=draft)

    def is_trying(self, draft: str) -> bool:
        """Tell whether the time of a draft's trial is not over."""
        query = sa.select(drafts.c.id).where(drafts.c.id == draft, drafts.c.trial_until > now())
        return self.fetch_one(query) is not None

    @writing
    def note_trial(self, db: sa.Connection, draft: str, token: str, facts: Row) -> bool:
        """Add to what is known of a trial; tell whether it is still wanted."""
        row = fetch_row(db, sa.select(drafts).where(drafts.c.id == draft))
        if row is None or row["trial_until"] is None or row["trial"]["token"] != token:
            return False
        trial = {**row["trial"], **facts}
        until = row["trial_until"] if trial["state"] == "running" else None
        same = drafts.update().where(drafts.c.id == draft)
        db.execute(same.values(trial=trial, trial_until=until))
        return True


def _forget_files(db: sa.Connection, facts: Row) -> list[str]:
    """Forget the files of a draft that neither a study nor a draft names; return their digests."""
    gone = []
    for part in PUBLIC_PARTS:
        sha256 = facts.get(part, {}).get("sha256")
        if sha256 is None or _is_named(db, sha256):
            continue
        db.execute(files.delete().where(files.c.sha256 == sha256))
        gone.append(sha256)
    return gone


def _is_named(db: sa.Connection, sha256: str) -> bool:
    """Tell whether a study or a draft names a file."""
    in_study = sa.select(studies.c.name).where(studies.c.text.contains(sha256, autoescape=True))
    in_draft = sa.select(drafts.c.id).where(
        sa.cast(drafts.c.facts, sa.Text).contains(json.dumps(sha256), autoescape=True)
    )
    return any(fetch_row(db, query.limit(1)) is not None for query in (in_study, in_draft))
