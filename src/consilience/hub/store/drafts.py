"""Rows about drafts: studies that are still being written, their links and trials."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import NamedTuple

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import (
    Database,
    Row,
    fetch_row,
    get_setting,
    now,
    set_setting,
    writing,
)
from consilience.hub.store.studies import count_arrival
from consilience.hub.store.tables import drafts, files, studies
from consilience.protocol import Refusal

MOST_DRAFTS = 20  # of one account
MOST_IN_HUB = 200
MOST_FILED = 4 << 30  # bytes of the public files that one account's drafts name
LEASE_SECONDS = 30.0  # after which a trial counts as over if its worker was killed
TURN_SECONDS = 60.0  # how long whoever was refused a trial is the next, after it could begin
_TURN = "next trial"
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
    def change_draft(
        self,
        db: sa.Connection,
        draft: str,
        change: Change,
        actor: str,
        is_durable: Callable[[], bool] = lambda: True,
    ) -> list[str]:
        """Change the facts of a draft, with a file that `is_durable` if it comes with one.

        Return the digests of files that nothing names any more.
        """
        before, facts = get_draft(db, draft, change.version), change.facts
        if before["facts"] == facts:
            return []
        said = {"draft": draft, "name": name_of({"facts": facts}), "part": change.part}
        if change.size is not None:
            sha256 = said["sha256"] = facts[change.part]["sha256"]
            _check_room(db, {**before, "facts": facts}, sha256, change.size)
            if not is_durable():  # the same file was removed, because another draft was changed
                raise Refusal("unavailable", "The file was removed while it was checked.")
            if fetch_row(db, sa.select(files).where(files.c.sha256 == sha256)) is None:
                new_file = {"sha256": sha256, "size": change.size, "received": now()}
                db.execute(files.insert().values(**new_file))
                count_arrival(db, sha256)
        new = {"facts": facts, "version": change.version + 1, "changed": now(), "trial": None}
        same = drafts.update().where(drafts.c.id == draft)
        db.execute(same.values(**new, trial_until=None))
        _begin_turn(db, before)
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
        _begin_turn(db, row)
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
    ) -> Refusal | None:
        """Note that a trial of a draft begins, or return why not: a hub has one at a time.

        Its worker renews it every few seconds. The first other account that is refused meanwhile
        is the next, so that nobody who begins one after the other keeps all others waiting. A
        refusal that was raised in here would undo that note.
        """
        get_draft(db, draft, version)
        going_on = fetch_row(db, sa.select(drafts).where(_goes_on()))
        turn = _get_turn(db)
        is_anothers = turn.get("actor", actor) != actor
        if going_on is not None:
            if not is_anothers and going_on["trial"].get("actor") != actor:
                until = now(seconds=LEASE_SECONDS + TURN_SECONDS)
                set_setting(db, _TURN, json.dumps({"actor": actor, "until": until}))
            return Refusal("trial-waits", "A draft is being tried on this hub already.")
        if is_anothers:
            return Refusal(
                "trial-waits",
                "Somebody else wanted to try a draft before you did, and has a minute to begin.",
            )
        same = drafts.update().where(drafts.c.id == draft)
        until = now(seconds=LEASE_SECONDS)
        begun = {**trial, "state": "running", "actor": actor}
        db.execute(same.values(trial=begun, trial_until=until))
        set_setting(db, _TURN, "{}")
        append_entry(db, actor, "draft tried", None, draft=draft)
        return None

    @writing
    def renew_trial(self, db: sa.Connection, draft: str, token: str) -> None:
        """Note that a trial still goes on; if its worker is killed, nobody notes it."""
        row = fetch_row(db, sa.select(drafts).where(drafts.c.id == draft, _goes_on()))
        if row is None or row["trial"]["token"] != token:
            return
        same = drafts.update().where(drafts.c.id == draft)
        db.execute(same.values(trial_until=now(seconds=LEASE_SECONDS)))
        if turn := _get_turn(db):
            until = now(seconds=LEASE_SECONDS + TURN_SECONDS)
            set_setting(db, _TURN, json.dumps({**turn, "until": until}))

    def is_trying(self, draft: str) -> bool:
        """Tell whether the time of a draft's trial is not over."""
        query = sa.select(drafts.c.id).where(drafts.c.id == draft, _goes_on())
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
        if until is None:
            _begin_turn(db, row)
        return True


def _goes_on() -> sa.ColumnElement[bool]:
    """Tell of drafts whether their trial goes on.

    One that would last longer than any can was begun when the clock was wrong.
    """
    until = drafts.c.trial_until
    return (until > now()) & (until <= now(seconds=LEASE_SECONDS))


def _get_turn(db: sa.Connection) -> Row:
    """Return who is the next to try a draft, and until when; nothing if nobody is."""
    turn: Row = json.loads(get_setting(db, _TURN) or "{}")
    is_so = now() < turn.get("until", "") <= now(seconds=LEASE_SECONDS + TURN_SECONDS)
    return turn if is_so else {}


def _begin_turn(db: sa.Connection, ended: Row) -> None:
    """Let the turn of whoever is the next begin, because the trial of a draft has ended."""
    turn = _get_turn(db)
    if ended["trial_until"] is not None and turn:
        until = min(turn["until"], now(seconds=TURN_SECONDS))
        set_setting(db, _TURN, json.dumps({**turn, "until": until}))


def _check_room(db: sa.Connection, changed: Row, sha256: str, size: int) -> None:
    """Refuse a file of this digest and size if the drafts of its account name too much then."""
    others = drafts.c.owner == changed["owner"], drafts.c.id != changed["id"]
    named = [changed["facts"], *db.execute(sa.select(drafts.c.facts).where(*others)).scalars()]
    digests = {facts[part]["sha256"] for facts in named for part in PUBLIC_PARTS if part in facts}
    sizes = sa.select(sa.func.sum(files.c.size)).where(files.c.sha256.in_(digests - {sha256}))
    if (db.execute(sizes).scalar() or 0) + size > MOST_FILED:
        raise Refusal(
            "too-large",
            f"The files of an account's drafts have at most {MOST_FILED >> 30} GiB together. "
            "Delete drafts that are not needed, or do without some of their files.",
        )


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
