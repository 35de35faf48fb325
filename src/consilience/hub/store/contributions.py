"""Rows about contributions: who signed them, accepting, superseding and withdrawing them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_row, fetch_rows, now, writing
from consilience.hub.store.tables import (
    bodies,
    contributions,
    keys,
    members,
    nonces,
    releases,
    sites,
    studies,
)
from consilience.protocol import CLOCK_SECONDS, Refusal

NONCE_SECONDS = 2 * CLOCK_SECONDS + 1.0  # as long as a request could be sent again

# Statements that every submission needs, built once.
_SIGNER = (
    sa.select(sites, studies.c.status.label("study_status"))
    .join(studies, studies.c.name == sites.c.study)
    .where(sites.c.study == sa.bindparam("study"), sites.c.key == sa.bindparam("key"))
)
_SENDER = (
    _SIGNER.add_columns(*(column.label(f"its_{column.name}") for column in contributions.c))
    .outerjoin(
        contributions,
        (contributions.c.study == sites.c.study) & (contributions.c.site == sites.c.name),
    )
    .order_by(contributions.c.sequence.desc())
)
_OWN = (
    sa.select(contributions)
    .where(
        contributions.c.study == sa.bindparam("study"), contributions.c.site == sa.bindparam("site")
    )
    .order_by(contributions.c.sequence.desc())
)
_SUPERSEDE = (
    contributions.update()
    .where(
        contributions.c.state == "accepted",
        contributions.c.study == sa.bindparam("of_study"),
        contributions.c.site == sa.bindparam("of_site"),
    )
    .values(state="superseded", changed=sa.bindparam("at"))
)
_COUNT_CHANGE = (
    studies.update()
    .where(studies.c.name == sa.bindparam("of_study"))
    .values(changes=studies.c.changes + 1, changed=sa.bindparam("at"))
)
_ADD_CONTRIBUTION, _ADD_BODY, _ADD_NONCE = contributions.insert(), bodies.insert(), nonces.insert()


def get_signer(db: sa.Connection, study: str, key: str) -> Row:
    """Return the site whose current key this is, or refuse."""
    row = fetch_row(db, _SIGNER, study=study, key=key)
    if row is not None and row["status"] == "enrolled":
        return row
    if fetch_rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("key-revoked", "The key was replaced or revoked.")
    raise Refusal("not-authenticated", "The key is not enrolled in this study.")


def get_sender(db: sa.Connection, study: str, key: str) -> tuple[Row, list[Row]]:
    """Return the site whose current key this is and its contributions, newest first, or refuse."""
    rows = fetch_rows(db, _SENDER, study=study, key=key)  # one statement: every submission asks
    if not rows or rows[0]["status"] != "enrolled":
        return get_signer(db, study, key), []  # says why not
    names = [column.name for column in contributions.c]
    own = [row for row in rows if row["its_digest"] is not None]
    return rows[0], [{name: row[f"its_{name}"] for name in names} for row in own]


def own_contributions(db: sa.Connection, study: str, site: str) -> list[Row]:
    """Return one site's contributions, newest first."""
    return fetch_rows(db, _OWN, study=study, site=site)


def spend_nonce(db: sa.Connection, key: str, nonce: str, seconds: float = NONCE_SECONDS) -> None:
    """Store a nonce for as long as its request could be sent again; refuse a known one."""
    try:
        db.execute(_ADD_NONCE, {"key": key, "nonce": nonce, "expires": now(seconds=seconds)})
    except sa.exc.IntegrityError:
        raise Refusal("replayed", "This request was received before.") from None


def parse_guarantee(row: Row) -> Row:
    """Return a row with its guarantee as a dictionary instead of JSON text."""
    return {**row, "guarantee": json.loads(row["guarantee"])}


def fetch_guarantees(db: sa.Connection, query: sa.Executable) -> list[Row]:
    """Return the rows of a query with their guarantees as dictionaries."""
    return [parse_guarantee(row) for row in fetch_rows(db, query)]


def find_same(row: Row, enrolled: Row, before: Sequence[Row]) -> Row | None:
    """Compare a contribution with what its site submitted before, newest first.

    Return the row of the same contribution if the hub has it, None if the contribution is new, or
    refuse it.
    """
    same = next((other for other in before if other["digest"] == row["digest"]), None)
    if same is not None:
        if same["state"] == "withdrawn":
            raise Refusal("stale", "This contribution was withdrawn.")
        return parse_guarantee(same)
    if enrolled["study_status"] != "open":
        raise Refusal("study-closed", f"The study {row['study']!r} is closed.")
    if enrolled["fetch_only"]:
        raise Refusal("not-allowed", "The site joined this study only to fetch its releases.")
    if before and before[0]["sequence"] >= row["sequence"]:
        raise Refusal(
            "stale",
            f"The contribution has number {row['sequence']}, but number {before[0]['sequence']} "
            "was already received.",
        )
    return None


def withdraw_contribution(db: sa.Connection, row: Row, actor: str) -> Row:
    """Withdraw a contribution, and every release that rests on its site."""
    same = contributions.update().where(contributions.c.digest == row["digest"])
    db.execute(same.values(state="withdrawn", changed=now()))
    # Also releases that rest on what the site contributed earlier.
    own = sa.select(contributions.c.digest).where(
        contributions.c.study == row["study"], contributions.c.site == row["site"]
    )
    containing = sa.select(members.c.release).where(members.c.contribution.in_(own))
    db.execute(releases.update().where(releases.c.digest.in_(containing)).values(state="withdrawn"))
    db.execute(_COUNT_CHANGE, {"of_study": row["study"], "at": now()})
    facts = {"site": row["site"], "digest": row["digest"]}
    append_entry(db, actor, "contribution withdrawn", row["study"], **facts)
    return {**row, "state": "withdrawn"}


class Contributions(Database):
    """What sites contributed."""

    def sender(self, study: str, key: str) -> tuple[Row, list[Row]]:
        """Return the site with this key and its contributions, newest first, or refuse."""
        with self.reading() as db:
            return get_sender(db, study, key)

    @writing
    def submit(
        self, db: sa.Connection, row: Row, key: str, nonce: str, content: bytes | None = None
    ) -> tuple[Row, bool]:
        """Accept a contribution whose file is durable, or whose `content` is given.

        Return its row, and whether it is new. Submitting the same digest again changes nothing. A
        higher sequence number supersedes what was there; a lower one is refused.
        """
        study, site, at = row["study"], row["site"], now()
        spend_nonce(db, key, nonce)
        # Again: the site may have been revoked while its file was checked.
        enrolled, before = get_sender(db, study, key)
        if enrolled["name"] != site:
            message = "The contribution names another site than the one that sent it."
            raise Refusal("wrong-site", message)
        same = find_same(row, enrolled, before)
        if same is not None:
            return same, False
        n_superseded = 0
        if before:
            supersede = {"of_study": study, "of_site": site, "at": at}
            n_superseded = db.execute(_SUPERSEDE, supersede).rowcount
        full = {**row, "state": "accepted", "received": at, "changed": at}
        db.execute(_ADD_CONTRIBUTION, full)
        if content is not None:
            db.execute(_ADD_BODY, {"sha256": row["sha256"], "content": content})
        db.execute(_COUNT_CHANGE, {"of_study": study, "at": at})
        facts = {"digest": row["digest"], "sequence": row["sequence"], "supersedes": n_superseded}
        append_entry(db, f"site:{site}", "contribution accepted", study, **facts)
        return parse_guarantee(full), True

    @writing
    def withdraw(self, db: sa.Connection, study: str, key: str, nonce: str) -> Row:
        """Withdraw a site's contribution; doing it again changes nothing."""
        spend_nonce(db, key, nonce)
        site, own = get_sender(db, study, key)
        if not own:
            raise Refusal("not-found", "The site has contributed nothing to this study.")
        if own[0]["state"] == "withdrawn":
            return parse_guarantee(own[0])
        return parse_guarantee(withdraw_contribution(db, own[0], f"site:{site['name']}"))

    def contributions(self, study: str, *, site: str | None = None) -> list[Row]:
        """Return a study's contributions, or one site's, in the order they were received."""
        query = sa.select(contributions).where(contributions.c.study == study)
        if site is not None:
            query = query.where(contributions.c.site == site)
        with self.reading() as db:
            return fetch_guarantees(db, query.order_by(contributions.c.received))
