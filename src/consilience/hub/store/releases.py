"""Rows about releases, and the claims under which they are made."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_row, fetch_rows, now, writing
from consilience.hub.store.studies import get_study
from consilience.hub.store.tables import claims, contributions, members, releases, settings, studies
from consilience.protocol import Refusal


def restored_setting(dataset: str) -> str:
    """Return the name of the setting that forbids noise after a restore."""
    return f"restored {dataset}"


class Releases(Database):
    """Releases, and which worker is making the next one."""

    def due(self) -> list[Row]:
        """Return the studies whose members changed since they were last combined."""
        return self.fetch_all(sa.select(studies).where(studies.c.changes > studies.c.combined))

    @writing
    def claim(
        self, db: sa.Connection, study: str, worker: str, seconds: float
    ) -> tuple[Row, list[Row]] | None:
        """Return the study's row and all its contributions if `worker` may combine it now.

        Other workers get None until the claim ends, or expires because its worker died.
        """
        row = get_study(db, study)
        held = fetch_row(db, sa.select(claims).where(claims.c.study == study))
        if held is not None and held["until"] > now():
            return None
        db.execute(claims.delete().where(claims.c.study == study))
        until = now(seconds=seconds)
        db.execute(claims.insert().values(study=study, worker=worker, until=until))
        query = sa.select(contributions).where(contributions.c.study == study)
        return row, fetch_rows(db, query.order_by(contributions.c.site))

    @writing
    def renew(self, db: sa.Connection, study: str, worker: str, seconds: float) -> None:
        """Extend a claim while the work goes on."""
        held = claims.update().where(claims.c.study == study, claims.c.worker == worker)
        db.execute(held.values(until=now(seconds=seconds)))

    @writing
    def publish(self, db: sa.Connection, row: Row, digests: Sequence[str], worker: str) -> Row:
        """Add a release whose file is durable, and end the claim under which it was made."""
        study = row["study"]
        _end_claim(db, study, worker)
        # If a member was withdrawn in the meantime, the release is withdrawn from the start.
        query = sa.select(contributions.c.state).where(contributions.c.digest.in_(digests))
        is_gone = any(member["state"] == "withdrawn" for member in fetch_rows(db, query))
        current = releases.update().where(releases.c.study == study, releases.c.state == "current")
        db.execute(current.values(state="superseded"))
        full = {**row, "state": "withdrawn" if is_gone else "current", "created": now()}
        db.execute(releases.insert().values(full))
        rows = [{"release": row["digest"], "contribution": digest} for digest in digests]
        db.execute(members.insert(), rows)
        combined = studies.update().where(studies.c.name == study)
        db.execute(combined.values(combined=row["change"], problem=None))
        facts = {"digest": row["digest"], "sequence": row["sequence"]}
        append_entry(db, "hub", "release published", study, **facts)
        return full

    @writing
    def give_up(
        self, db: sa.Connection, study: str, change: int, worker: str, problem: str | None
    ) -> None:
        """End a claim without a release.

        Either too few sites have contributed, or there is a `problem` that only another change can
        solve.
        """
        _end_claim(db, study, worker)
        combined = studies.update().where(studies.c.name == study, studies.c.combined <= change)
        db.execute(combined.values(combined=change, problem=problem))
        if problem is not None:
            append_entry(db, "hub", "combining failed", study, problem=problem)

    def unclaim(self, study: str, worker: str) -> None:
        """End a claim and leave the work to the next worker."""
        held = claims.delete().where(claims.c.study == study, claims.c.worker == worker)
        self.write(lambda db: db.execute(held))

    def releases(self, study: str) -> list[Row]:
        """Return a study's releases, newest first."""
        query = sa.select(releases).where(releases.c.study == study)
        return self.fetch_all(query.order_by(releases.c.sequence.desc()))

    def next_release(self, study: str) -> int:
        """Return the number that the study's next release gets."""
        newest = sa.select(sa.func.max(releases.c.sequence)).where(releases.c.study == study)
        with self.reading() as db:
            return int(db.execute(newest).scalar() or 0) + 1

    def release(
        self, study: str, sequence: int | None = None, *, request: str | None = None
    ) -> Row | None:
        """Return the current release, or the one with this number or idempotency key."""
        query = sa.select(releases).where(releases.c.study == study)
        if request is not None:
            query = query.where(releases.c.request == request)
        elif sequence is not None:
            query = query.where(releases.c.sequence == sequence)
        else:
            query = query.where(releases.c.state == "current")
        return self.fetch_one(query)

    def may_draw(self, dataset: str) -> bool:
        """Tell whether the ledger is known to hold everything that was charged for a study."""
        return self.remembered(restored_setting(dataset)) is None

    def let_draw(self, dataset: str) -> None:
        """Allow noise again, because someone looked at a restored ledger and set a budget."""
        kept = settings.delete().where(settings.c.name == restored_setting(dataset))
        self.write(lambda db: db.execute(kept))


def _end_claim(db: sa.Connection, study: str, worker: str) -> None:
    held = claims.delete().where(claims.c.study == study, claims.c.worker == worker)
    if not db.execute(held).rowcount:
        raise Refusal("unavailable", "Another worker has taken over this study.")
