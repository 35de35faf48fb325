"""Rows about blind studies: the roster, cards, acknowledgements, batches and openings."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_row, fetch_rows, now, writing
from consilience.hub.store.studies import get_open_study, get_study, offer_newest
from consilience.hub.store.tables import (
    CHANGED,
    acknowledgements,
    audit,
    batches,
    bodies,
    cards,
    contributions,
    invitations,
    listed,
    members,
    openings,
    releases,
    rosters,
    sites,
    studies,
)
from consilience.protocol import Refusal

NOT_FROZEN = "The coordinator has not frozen the roster of this study yet."
FROZEN = (
    "The roster of this study is frozen: keyholders signed its sites and their keys, so neither "
    "can change any more."
)
_LISTED = sa.literal_column("'listed'", sa.Text)  # part of the text: an index covers only these
_ACCEPTED = sa.literal_column("'accepted'", sa.Text)
_DIFFERS = "Something else of this keyholder is here already, and there can be only one."


def get_roster(db: sa.Connection, study: str) -> Row | None:
    """Return the row of a study's roster, if it is frozen."""
    return fetch_row(db, sa.select(rosters).where(rosters.c.study == study))


def check_not_frozen(db: sa.Connection, study: str) -> None:
    """Refuse a change of sites or keys after the roster was frozen."""
    if get_roster(db, study) is not None:
        raise Refusal("roster-frozen", FROZEN)


def has_listed_records(db: sa.Connection, study: str, site: str) -> bool:
    """Tell whether a site's records are in a batch that was listed to keyholders."""
    own = contributions.c.study == study, contributions.c.site == site
    in_batch = contributions.c.state == _LISTED, contributions.c.only_noise.is_(False)
    return fetch_row(db, sa.select(contributions.c.digest).where(*own, *in_batch)) is not None


def withdraw_batches(db: sa.Connection, study: str, site: str, actor: str) -> None:
    """Withdraw every batch that a site is in: nobody can take one file out of a sum.

    The others of such a batch can hand over again, which costs them as much again.
    """
    own = contributions.c.study == study, contributions.c.site == site
    query = (
        sa.select(batches)
        .join(listed, listed.c.batch == batches.c.digest)
        .join(contributions, contributions.c.digest == listed.c.contribution)
        .where(*own, batches.c.state != "withdrawn")
    )
    for row in fetch_rows(db, query):
        leave_out(db, row, actor, site=site)


def leave_out(db: sa.Connection, row: Row, actor: str, **why: str) -> None:
    """Withdraw a batch, and every release that rests on it."""
    at, same = now(), batches.c.digest == row["digest"]
    db.execute(batches.update().where(same).values(state="withdrawn", changed=at))
    inside = sa.select(listed.c.contribution).where(listed.c.batch == row["digest"])
    still = contributions.c.digest.in_(inside), contributions.c.state == "listed"
    db.execute(contributions.update().where(*still).values(state="superseded", changed=at))
    resting = sa.select(members.c.release).where(members.c.contribution.in_(inside))
    db.execute(releases.update().where(releases.c.digest.in_(resting)).values(state="withdrawn"))
    _count_change(db, row["study"])
    facts = {"batch": row["digest"], "number": row["number"], **why}
    append_entry(db, actor, "batch withdrawn", row["study"], **facts)
    offer_newest(db, row["study"])


def _count_change(db: sa.Connection, study: str) -> None:
    changed = studies.update().where(studies.c.name == study)
    db.execute(changed.values(CHANGED | {"changed": now()}))


class Blind(Database):
    """Rosters, cards of pad holders, acknowledgements, batches and openings of blind studies."""

    # --------------------------------------------------------------------- the roster and its cards

    def enrolled_keys(self, study: str) -> dict[str, str]:
        """Return the keys of enrolled sites that may contribute, by name."""
        with self.reading() as db:
            return _enrolled_keys(db, study)

    @writing
    def freeze_roster(
        self, db: sa.Connection, row: Row, card: Row, keys: Mapping[str, str], actor: str
    ) -> Row:
        """Freeze a study's roster and add the hub's own card; the first roster stays.

        It is refused if other sites or `keys` than those on it are enrolled by now.
        """
        study = row["study"]
        if (known := get_roster(db, study)) is not None:
            return known
        get_open_study(db, study)
        if keys != _enrolled_keys(db, study):
            raise Refusal("unavailable", "A site enrolled or left while the roster was made.")
        frozen = {**row, "frozen": now()}
        db.execute(rosters.insert().values(frozen))
        db.execute(cards.insert().values({**card, "study": study, "received": now()}))
        open_ones = invitations.c.study == study, invitations.c.used.is_(None)
        unused = invitations.update().where(*open_ones, invitations.c.fetch_only.is_(False))
        db.execute(unused.values(used=now(), used_by=""))
        append_entry(db, actor, "roster frozen", study, digest=row["digest"], sites=len(keys))
        return frozen

    def roster(self, study: str) -> Row | None:
        """Return the row of a study's roster, if it is frozen."""
        with self.reading() as db:
            return get_roster(db, study)

    def count_waiting(self) -> dict[str, int]:
        """Return how many files wait for a batch, by study; a study where none waits is absent."""
        waits = contributions.c.study == rosters.c.study, contributions.c.state == _ACCEPTED
        query = sa.select(rosters.c.study, sa.func.count()).join(contributions, sa.and_(*waits))
        with self.reading() as db:
            return {name: n for name, n in db.execute(query.group_by(rosters.c.study))}

    @writing
    def add_card(self, db: sa.Connection, study: str, holder: str, content: bytes) -> bool:
        """Add a keyholder's card; return whether it is new. Another one than before is refused."""
        own = cards.c.study == study, cards.c.holder == holder
        if (known := fetch_row(db, sa.select(cards).where(*own))) is not None:
            _require_same(known["content"], content)
            return False
        row = {"study": study, "holder": holder, "content": content, "received": now()}
        db.execute(cards.insert().values(row))
        append_entry(db, f"keyholder:{holder}", "roster countersigned", study)
        return True

    def cards(self, study: str) -> list[Row]:
        """Return the cards of all pad holders that have signed a study's roster."""
        query = sa.select(cards).where(cards.c.study == study)
        return self.fetch_all(query.order_by(cards.c.received))

    # ---------------------------------------------------------------------------- acknowledgements

    def unacknowledged(self, study: str, holder: str, most: int, skip: int = 0) -> list[Row]:
        """Return contributions in use that a keyholder has not acknowledged, oldest first."""
        done = sa.select(acknowledgements.c.contribution).where(
            acknowledgements.c.contribution == contributions.c.digest,
            acknowledgements.c.holder == holder,
        )
        query = sa.select(contributions).where(
            contributions.c.study == study, contributions.c.state == "accepted", ~done.exists()
        )
        in_order = query.order_by(contributions.c.received, contributions.c.digest)
        return self.fetch_all(in_order.limit(most).offset(skip))

    @writing
    def acknowledge(
        self, db: sa.Connection, study: str, digest: str, holder: str, content: bytes
    ) -> bool:
        """Add a keyholder's acknowledgement of a contribution; return whether it is new."""
        same = contributions.c.study == study, contributions.c.digest == digest
        if fetch_row(db, sa.select(contributions.c.digest).where(*same)) is None:
            raise Refusal("rejected", "It acknowledges a file that this study does not have.")
        own = acknowledgements.c.contribution == digest, acknowledgements.c.holder == holder
        if (known := fetch_row(db, sa.select(acknowledgements).where(*own))) is not None:
            _require_same(known["content"], content)
            return False
        row = {"contribution": digest, "holder": holder, "content": content, "received": now()}
        db.execute(acknowledgements.insert().values(row))
        facts = {"contribution": digest}
        append_entry(db, f"keyholder:{holder}", "file acknowledged", study, **facts)
        return True

    def acknowledged(self, study: str, state: str = "accepted") -> list[tuple[Row, dict[str, str]]]:
        """Return contributions that wait for a batch, and when each keyholder acknowledged them.

        In the state "superseded" they are those that were replaced before they were in any.
        """
        in_one = sa.exists().where(listed.c.contribution == contributions.c.digest)
        own = contributions.c.study == study, contributions.c.state == state, ~in_one
        with self.snapshot() as db:
            rows = fetch_rows(db, sa.select(contributions).where(*own))
            query = sa.select(acknowledgements).join(contributions).where(*own)
            times: dict[str, dict[str, str]] = {}
            for row in fetch_rows(db, query):
                times.setdefault(row["contribution"], {})[row["holder"]] = row["received"]
        return [(row, times.get(row["digest"], {})) for row in rows]

    # ------------------------------------------------------------------------ batches and openings

    @writing
    def list_batch(
        self, db: sa.Connection, study: str, batch: str, digests: Collection[str], actor: str
    ) -> Row:
        """List a batch to the keyholders: from now on all of its files leave, or all stay."""
        known = fetch_row(db, sa.select(batches).where(batches.c.digest == batch))
        if known is not None:
            return known
        inside = contributions.c.study == study, contributions.c.digest.in_(digests)
        waiting = contributions.update().where(*inside, contributions.c.state == "accepted")
        at = now()
        if db.execute(waiting.values(state="listed", changed=at)).rowcount != len(digests):
            raise Refusal("unavailable", "A file of the batch was replaced or withdrawn meanwhile.")
        count = sa.select(sa.func.count()).where(batches.c.study == study)
        number = int(db.execute(count).scalar_one()) + 1
        row = {"digest": batch, "study": study, "number": number, "state": "listed"}
        row |= {"listed": at, "changed": at}
        db.execute(batches.insert().values(row))
        db.execute(listed.insert(), [{"contribution": each, "batch": batch} for each in digests])
        facts = {"batch": batch, "number": number, "files": len(digests)}
        append_entry(db, actor, "batch listed", study, **facts)
        return row

    def batches(self, study: str) -> list[Row]:
        """Return a study's batches by number, each with its `files` and its `openings`."""
        query = sa.select(batches).where(batches.c.study == study).order_by(batches.c.number)
        files = sa.select(contributions, listed.c.batch).join(
            listed, listed.c.contribution == contributions.c.digest
        )
        files = files.where(contributions.c.study == study).order_by(contributions.c.digest)
        opened = sa.select(openings).join(batches).where(batches.c.study == study)
        with self.snapshot() as db:
            rows = [{**row, "files": [], "openings": []} for row in fetch_rows(db, query)]
            by_digest = {row["digest"]: row for row in rows}
            for row in fetch_rows(db, files):
                by_digest[row["batch"]]["files"].append(row)
            for row in fetch_rows(db, opened):
                by_digest[row["batch"]]["openings"].append(row)
        return rows

    @writing
    def add_opening(
        self,
        db: sa.Connection,
        row: Row,
        keyholders: Collection[str],
        content: bytes | None = None,
        is_durable: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Add a keyholder's opening of a batch; return whether it is new.

        When all `keyholders` have opened the batch, its study is due. A number of the keyholder's
        log that another batch has here shows that its log was put back, and is refused.
        """
        batch = fetch_row(db, sa.select(batches).where(batches.c.digest == row["batch"]))
        if batch is None or batch["state"] == "withdrawn":
            raise Refusal("rejected", "It opens a batch that the hub does not list.")
        own = openings.c.holder == row["holder"]
        same = sa.select(openings).where(own, openings.c.batch == row["batch"])
        if (known := fetch_row(db, same)) is not None:
            if known["digest"] != row["digest"]:
                raise Refusal("rejected", _DIFFERS)
            return False
        numbered = sa.select(openings).where(own, openings.c.number == row["number"])
        if fetch_row(db, numbered) is not None:
            raise Refusal(
                "rejected",
                "This keyholder has opened another batch under the same number of its log: its log "
                "was put back to an older state, or it has two.",
            )
        if not is_durable():  # the same file, sent twice at once, was refused and removed
            raise Refusal("unavailable", "The file was removed while it was checked.")
        db.execute(openings.insert().values({**row, "received": now()}))
        if content is not None:
            db.execute(bodies.insert().values(sha256=row["sha256"], content=content))
        facts = {"batch": row["batch"], "number": batch["number"], "digest": row["digest"]}
        append_entry(db, f"keyholder:{row['holder']}", "batch opened", batch["study"], **facts)
        query = sa.select(openings.c.holder).where(openings.c.batch == row["batch"])
        if set(db.execute(query).scalars()) == set(keyholders):
            own_row = batches.update().where(batches.c.digest == row["batch"])
            db.execute(own_row.values(state="opened", changed=now()))
            _count_change(db, batch["study"])
        return True

    def refusals(self, study: str, most: int = 10) -> list[Row]:
        """Return what keyholders of a study sent and were refused, newest first."""
        query = sa.select(audit).where(
            audit.c.study == study,
            audit.c.actor.startswith("keyholder:"),
            audit.c.action.endswith(" refused"),
        )
        rows = self.fetch_all(query.order_by(audit.c.number.desc()).limit(most))
        return [{**row, "facts": json.loads(row["facts"])} for row in rows]

    @writing
    def leave_out_batch(self, db: sa.Connection, study: str, number: int, actor: str) -> Row:
        """Leave a whole batch out of every later release."""
        get_study(db, study)
        own = batches.c.study == study, batches.c.number == number
        row = fetch_row(db, sa.select(batches).where(*own))
        if row is None:
            raise Refusal("not-found", "The study has no batch with this number.")
        if row["state"] != "withdrawn":
            leave_out(db, row, actor)
        return {**row, "state": "withdrawn"}


def _enrolled_keys(db: sa.Connection, study: str) -> dict[str, str]:
    own = sites.c.study == study, sites.c.status == "enrolled", sites.c.fetch_only.is_(False)
    query = sa.select(sites.c.name, sites.c.key).where(*own)
    return {str(name): str(key) for name, key in db.execute(query)}


def _require_same(known: bytes, content: bytes) -> None:
    if bytes(known) != content:
        raise Refusal("rejected", _DIFFERS)
