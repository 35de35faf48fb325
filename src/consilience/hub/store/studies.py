"""Rows about studies: public files, releases and the claims to make them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import (
    Database,
    Row,
    clock,
    fetch_row,
    fetch_rows,
    now,
    set_setting,
    writing,
)
from consilience.hub.store.tables import (
    CHANGED,
    batches,
    claims,
    contributions,
    files,
    listed,
    members,
    releases,
    settings,
    studies,
)
from consilience.protocol import Refusal, check_new_name

MOST_OLD = 20  # releases that are not current and whose bytes are kept whatever became of them


def get_study(db: sa.Connection, name: str) -> Row:
    """Return a study's row, or refuse."""
    row = fetch_row(db, sa.select(studies).where(studies.c.name == name))
    if row is None:
        raise Refusal("not-found", "There is no such study.")
    return row


def get_open_study(db: sa.Connection, name: str) -> Row:
    """Return the row of a study that is open, or refuse."""
    row = get_study(db, name)
    if row["status"] != "open":
        raise Refusal("study-closed", f"The study {name!r} is closed.")
    return row


def restored_setting(dataset: str) -> str:
    """Return the name of the setting that forbids noise after a restore."""
    return f"restored {dataset}"


def alerts_setting(release: str) -> str:
    """Return the name of the setting that lists what is unusual in the release with a digest."""
    return f"alerts {release}"


def absent_setting(release: str) -> str:
    """Return the name of the setting that says who is left out of the release with a digest."""
    return f"absent {release}"


def describe_absent(absent: Mapping[str, str]) -> str:
    """Say which sites' contributions are left out, and why."""
    return " ".join(
        f"The contribution of {site!r} is left out: {why.rstrip('.')}."
        for site, why in absent.items()
    )


def count_arrival(db: sa.Connection, sha256: str) -> None:
    """Count a public file that arrived, on whatever way, as a change of studies that wait for it.

    These name the file and could not be combined. So may one that is claimed at this moment:
    whoever has the claim may have looked for the file before it came, and would state in a later
    transaction that it is missing.
    """
    names_it = studies.c.text.contains(sha256, autoescape=True)
    is_claimed = sa.select(claims.c.study).where(claims.c.study == studies.c.name).exists()
    waiting = studies.update().where(studies.c.problem.is_not(None) | is_claimed, names_it)
    db.execute(waiting.values(CHANGED | {"changed": now()}))


def alerts_of(db: sa.Connection, digests: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return by release what is unusual about its members, by site."""
    names = {alerts_setting(digest): digest for digest in digests}
    rows = fetch_rows(db, sa.select(settings).where(settings.c.name.in_(names)))
    return {names[row["name"]]: json.loads(row["value"]) for row in rows}


def absent_of(db: sa.Connection, digests: Sequence[str]) -> dict[str, str]:
    """Say by release whose contributions are left out of it, and why."""
    names = {absent_setting(digest): digest for digest in digests}
    rows = fetch_rows(db, sa.select(settings).where(settings.c.name.in_(names)))
    return {names[row["name"]]: row["value"] for row in rows}


def offer_newest(db: sa.Connection, study: str) -> None:
    """Offer the newest release that was not withdrawn, if no release is current."""
    own = sa.select(releases).where(releases.c.study == study, releases.c.state != "withdrawn")
    newest = fetch_row(db, own.order_by(releases.c.sequence.desc()).limit(1))
    if newest is not None and newest["state"] == "superseded":
        same = releases.update().where(releases.c.digest == newest["digest"])
        db.execute(same.values(state="current"))
        facts = {"digest": newest["digest"], "sequence": newest["sequence"]}
        append_entry(db, "hub", "release offered again", study, **facts)


def _rests_on_withdrawn(db: sa.Connection, digests: Sequence[str]) -> bool:
    """Tell whether a site withdrew one of these contributions, or a later one of its own."""
    later = contributions.alias()
    withdrawn = sa.select(later.c.digest).where(
        later.c.study == contributions.c.study,
        later.c.site == contributions.c.site,
        later.c.sequence >= contributions.c.sequence,
        later.c.state == "withdrawn",
    )
    gone = sa.select(contributions.c.digest).where(
        contributions.c.digest.in_(digests), withdrawn.exists()
    )
    if fetch_row(db, gone) is not None:
        return True
    # Or that a batch of theirs was withdrawn as a whole.
    in_batch = sa.select(batches.c.digest).join(listed, listed.c.batch == batches.c.digest)
    left_out = in_batch.where(listed.c.contribution.in_(digests), batches.c.state == "withdrawn")
    return fetch_row(db, left_out) is not None


class Studies(Database):
    """Studies, their public files and releases, and who makes the next one."""

    most_old = MOST_OLD

    @writing
    def add_study(self, db: sa.Connection, name: str, digest: str, text: str, actor: str) -> Row:
        """Add a study; adding it again changes nothing, another study of that name is refused."""
        same = (studies.c.name == name) | (studies.c.digest == digest)
        known = fetch_row(db, sa.select(studies).where(same))
        if known is not None:
            if known["digest"] == digest:
                return known
            raise Refusal(
                "name-taken", f"There is already another study named {name!r}; nothing was changed."
            )
        check_new_name(name, db.execute(sa.select(studies.c.name)).scalars())
        row = {"name": name, "digest": digest, "text": text, "created_by": actor}
        new = {"status": "open", "created": now(), "changes": 0, "combined": 0}
        db.execute(studies.insert().values(**row, **new))
        append_entry(db, actor, "study created", name, digest=digest)
        return get_study(db, name)

    def studies(self) -> list[Row]:
        """Return all studies, oldest first."""
        return self.fetch_all(sa.select(studies).order_by(studies.c.created))

    def study_names(self) -> list[str]:
        """Return the names of all studies."""
        with self.reading() as db:
            return list(db.execute(sa.select(studies.c.name)).scalars())

    def study(self, name: str) -> Row | None:
        """Return one study's row."""
        return self.fetch_one(sa.select(studies).where(studies.c.name == name))

    @writing
    def close_study(self, db: sa.Connection, name: str, actor: str) -> Row:
        """Accept no more sites or contributions; what is there can still be combined."""
        row = get_study(db, name)
        if row["status"] == "open":
            db.execute(studies.update().where(studies.c.name == name).values(status="closed"))
            append_entry(db, actor, "study closed", name)
        return {**row, "status": "closed"}

    @writing
    def add_file(
        self, db: sa.Connection, sha256: str, size: int, study: str, file: str, actor: str
    ) -> None:
        """Add the row of a public file that was just stored; it may replace one that was lost."""
        if fetch_row(db, sa.select(files).where(files.c.sha256 == sha256)) is None:
            db.execute(files.insert().values(sha256=sha256, size=size, received=now()))
        append_entry(db, actor, "public file received", study, file=file, sha256=sha256)
        count_arrival(db, sha256)

    def file(self, sha256: str) -> Row | None:
        """Return the row of a public file, if the hub has it."""
        return self.fetch_one(sa.select(files).where(files.c.sha256 == sha256))

    # --------------------------------------------------------------------- releases and claims

    def due(self) -> list[Row]:
        """Return the studies whose members changed since they were last combined."""
        return self.fetch_all(sa.select(studies).where(studies.c.changes > studies.c.combined))

    @writing
    def claim(
        self, db: sa.Connection, study: str, worker: str, seconds: float
    ) -> tuple[Row, list[Row]] | None:
        """Return the study's row and all its contributions if `worker` may combine it now.

        Other workers get None until the claim ends, or expires because its worker died. Whatever
        ends the worker, the study's row then says that it was tried once more.
        """
        row = get_study(db, study)
        held = fetch_row(db, sa.select(claims).where(claims.c.study == study))
        # A claim that reaches farther than any can was made when the clock was wrong.
        if held is not None and clock(db) < held["until"] < clock(db, seconds=2 * seconds):
            return None
        db.execute(claims.delete().where(claims.c.study == study))
        until = clock(db, seconds=seconds)
        db.execute(claims.insert().values(study=study, worker=worker, until=until))
        db.execute(studies.update().where(studies.c.name == study).values(tries=row["tries"] + 1))
        query = sa.select(contributions).where(contributions.c.study == study)
        return row, fetch_rows(db, query.order_by(contributions.c.site))

    @writing
    def renew(self, db: sa.Connection, study: str, worker: str, seconds: float) -> None:
        """Extend a claim while the work goes on."""
        held = claims.update().where(claims.c.study == study, claims.c.worker == worker)
        db.execute(held.values(until=clock(db, seconds=seconds)))

    @writing
    def publish(
        self,
        db: sa.Connection,
        row: Row,
        digests: Sequence[str],
        worker: str,
        *,
        absent: Mapping[str, str] | None = None,
        alerts: Mapping[str, str] | None = None,
        is_durable: Callable[[], bool] = lambda: True,
    ) -> Row:
        """Add a release whose file `is_durable`, and end the claim under which it was made.

        `absent` says why the contributions of some sites are not in it, `alerts` what is unusual
        about some that are.
        """
        study = row["study"]
        _end_claim(db, study, worker)
        if not is_durable():  # the same file, made twice at once, was refused and removed
            raise Refusal("unavailable", "The release's file was removed while it was published.")
        # If a member was withdrawn in the meantime, the release is withdrawn from the start, and
        # the one before it stays.
        is_gone = _rests_on_withdrawn(db, digests)
        if not is_gone:
            current = releases.c.study == study, releases.c.state == "current"
            db.execute(releases.update().where(*current).values(state="superseded"))
        full = {**row, "state": "withdrawn" if is_gone else "current", "created": now()}
        db.execute(releases.insert().values(full))
        rows = [{"release": row["digest"], "contribution": digest} for digest in digests]
        db.execute(members.insert(), rows)
        combined = studies.update().where(studies.c.name == study)
        db.execute(combined.values(combined=row["change"], problem=None, withheld=False))
        if absent:
            set_setting(db, absent_setting(row["digest"]), describe_absent(absent))
        if alerts:
            set_setting(db, alerts_setting(row["digest"]), json.dumps(dict(alerts)))
        facts = {"digest": row["digest"], "sequence": row["sequence"], "state": full["state"]}
        append_entry(db, "hub", "release published", study, **facts)
        for action, sites in (("left out of a release", absent), ("unusual in a release", alerts)):
            for site, why in (sites or {}).items():
                append_entry(
                    db, "hub", action, study, sequence=row["sequence"], site=site, reason=why
                )
        return full

    def alerts(self, study: str) -> dict[str, str]:
        """Return what is unusual about members of the study's current release, by site."""
        current = self.release(study)
        with self.reading() as db:
            return alerts_of(db, [current["digest"]]).get(current["digest"], {}) if current else {}

    def absent(self, study: str) -> str:
        """Say whose contributions are left out of the study's current release, and why."""
        current = self.release(study)
        with self.reading() as db:
            return absent_of(db, [current["digest"]]).get(current["digest"], "") if current else ""

    @writing
    def give_up(
        self,
        db: sa.Connection,
        study: str,
        change: int,
        worker: str,
        problem: str | None,
        *,
        withheld: bool = False,
    ) -> None:
        """End a claim without a release.

        Either too few sites have contributed, or there is a `problem` that only another change can
        solve, or a release was `withheld` that a coordinator can ask for. Why it was withheld stays
        where it is until another change or its publication, whatever else is tried meanwhile.
        """
        _end_claim(db, study, worker)
        row = get_study(db, study)
        is_known = (row["combined"], row["problem"]) == (change, problem)
        combined = studies.update().where(studies.c.name == study, studies.c.combined <= change)
        db.execute(combined.values(combined=change))
        if row["withheld"]:
            return
        if row["changes"] == change:  # else it is not about what is in use
            db.execute(combined.values(problem=problem, withheld=withheld))
        if problem is not None and not is_known:  # whoever asks again adds nothing to the log
            action = "release withheld" if withheld else "combining failed"
            append_entry(db, "hub", action, study, problem=problem)

    @writing
    def unclaim(
        self, db: sa.Connection, study: str, worker: str, *, is_counted: bool = False
    ) -> int:
        """End a claim and leave the work to the next worker; return how often it was tried in vain.

        The attempt counts only if the study itself may have ended it.
        """
        held = claims.delete().where(claims.c.study == study, claims.c.worker == worker)
        if db.execute(held).rowcount and not is_counted:
            db.execute(studies.update().where(studies.c.name == study).values(tries=0))
        return int(get_study(db, study)["tries"])

    def releases(self, study: str) -> list[Row]:
        """Return a study's releases, newest first."""
        query = sa.select(releases).where(releases.c.study == study)
        return self.fetch_all(query.order_by(releases.c.sequence.desc()))

    def forget_releases(self, study: str) -> list[str]:
        """Forget the bytes of old releases; return the digests of their files. The rows stay.

        The newest few are kept, and so is every release that may be offered again. That is never
        one with all sites of a newer release: whoever withdraws the newer one withdraws both.
        """
        own = releases.c.study == study, releases.c.kept
        query = sa.select(releases).where(*own).order_by(releases.c.sequence.desc())
        of_site = (
            sa.select(contributions.c.site)
            .join(members, members.c.contribution == contributions.c.digest)
            .where(members.c.release == sa.bindparam("of_digest"))
        )
        forgotten: list[Row] = []
        with self.snapshot() as db:
            rows = fetch_rows(db, query)
            n_old, smallest = 0, list[frozenset[str]]()
            for row in rows if len(rows) > self.most_old else ():
                is_old, may_return = row["state"] != "current", row["state"] != "withdrawn"
                if may_return:
                    sites = frozenset(db.execute(of_site, {"of_digest": row["digest"]}).scalars())
                    may_return = not any(newer <= sites for newer in smallest)
                    if may_return:
                        smallest.append(sites)
                n_old += is_old
                if is_old and not may_return and n_old > self.most_old:
                    forgotten.append(row)
        if forgotten:
            digests = [row["digest"] for row in forgotten]
            gone = releases.update().where(releases.c.digest.in_(digests)).values(kept=False)
            self.write(lambda db: db.execute(gone))
        return [row["sha256"] for row in forgotten]

    def release_digests(self, study: str, *, after: int = 0, most: int | None = None) -> list[str]:
        """Return the digests of a study's releases after the first `after`, oldest first."""
        query = sa.select(releases.c.digest).where(releases.c.study == study)
        query = query.order_by(releases.c.sequence).offset(after).limit(most)
        with self.reading() as db:
            return list(db.execute(query).scalars())

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
    db.execute(studies.update().where(studies.c.name == study).values(tries=0))
