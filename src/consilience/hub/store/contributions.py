"""Rows about contributions: accepting, superseding and withdrawing them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_rows, now
from consilience.hub.store.signers import get_sender, get_signer, spend_nonce
from consilience.hub.store.tables import bodies, contributions, members, releases, studies
from consilience.protocol import Refusal

# Statements that every submission needs, built once.
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
_ADD_CONTRIBUTION, _ADD_BODY = contributions.insert(), bodies.insert()


def parse_guarantee(row: Row) -> Row:
    """Return a row with its guarantee as a dictionary instead of JSON text."""
    return {**row, "guarantee": json.loads(row["guarantee"])}


def own_contributions(study: str, site: str) -> sa.Select[tuple[object, ...]]:
    """Return the query for one site's contributions."""
    return sa.select(contributions).where(
        contributions.c.study == study, contributions.c.site == site
    )


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
        newest = before[0]["sequence"]
        raise Refusal(
            "stale",
            f"The contribution has number {row['sequence']}, but number {newest} was already "
            "received.",
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

    def submit(
        self, row: Row, key: str, nonce: str, content: bytes | None = None
    ) -> tuple[Row, bool]:
        """Accept a contribution whose file is durable, or whose `content` is given.

        Return its row, and whether it is new. Submitting the same digest again changes nothing. A
        higher sequence number supersedes what was there; a lower one is refused.
        """
        study, site = row["study"], row["site"]

        def work(db: sa.Connection) -> tuple[Row, bool]:
            spend_nonce(db, key, nonce)
            # Again: the site may have been revoked while its file was checked.
            enrolled, before = get_sender(db, study, key)
            if enrolled["name"] != site:
                raise Refusal(
                    "wrong-site", "The contribution names another site than the one that sent it."
                )
            same = find_same(row, enrolled, before)
            if same is not None:
                return same, False
            at, n_superseded = now(), 0
            if before:
                supersede = {"of_study": study, "of_site": site, "at": at}
                n_superseded = db.execute(_SUPERSEDE, supersede).rowcount
            full = {**row, "state": "accepted", "received": at, "changed": at}
            db.execute(_ADD_CONTRIBUTION, full)
            if content is not None:
                db.execute(_ADD_BODY, {"sha256": row["sha256"], "content": content})
            db.execute(_COUNT_CHANGE, {"of_study": study, "at": at})
            facts = {"digest": row["digest"], "sequence": row["sequence"]}
            facts["supersedes"] = n_superseded
            append_entry(db, f"site:{site}", "contribution accepted", study, **facts)
            return parse_guarantee(full), True

        return self.write(work)

    def withdraw(self, study: str, key: str, nonce: str) -> Row:
        """Withdraw a site's contribution; doing it again changes nothing."""

        def work(db: sa.Connection) -> Row:
            spend_nonce(db, key, nonce)
            site = get_signer(db, study, key)["name"]
            query = own_contributions(study, site).order_by(contributions.c.sequence.desc())
            newest = next(iter(fetch_rows(db, query)), None)
            if newest is None:
                raise Refusal("not-found", "The site has contributed nothing to this study.")
            if newest["state"] != "withdrawn":
                newest = withdraw_contribution(db, newest, f"site:{site}")
            return parse_guarantee(newest)

        return self.write(work)

    def contributions(self, study: str, *, site: str | None = None) -> list[Row]:
        """Return a study's contributions, or one site's, in the order they were received."""
        query = sa.select(contributions).where(contributions.c.study == study)
        if site is not None:
            query = query.where(contributions.c.site == site)
        return list(map(parse_guarantee, self.fetch_all(query.order_by(contributions.c.received))))
