"""Rows about sites: invitations, keys, the nonces of signed requests, and contributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.blind import (
    check_not_frozen,
    has_listed_records,
    withdraw_batches,
)
from consilience.hub.store.database import (
    Database,
    Row,
    Statement,
    fetch_row,
    fetch_rows,
    get_setting,
    now,
    set_setting,
    writing,
)
from consilience.hub.store.studies import get_open_study, offer_newest
from consilience.hub.store.tables import (
    CHANGED,
    IN_USE,
    add_guarantee,
    bodies,
    contributions,
    invitations,
    keys,
    members,
    nonces,
    releases,
    sites,
    studies,
)
from consilience.protocol import CLOCK_SECONDS, Refusal, check_new_name

NONCE_SECONDS = 2 * CLOCK_SECONDS + 1.0  # as long as a request could be sent again
RETURN_SECONDS = 3600.0  # before a site that withdrew twice may submit again
LONGEST_RETURN_SECONDS = 7 * 86400.0
COUNTED_SECONDS = 30 * 86400.0  # withdrawals longer ago are not held against a site
# Each contribution costs a site privacy, so that honest use stays far below these two.
MOST_DAILY = 100  # contributions of a site to a study within a day
MOST_KEYS_DAILY = 20  # of a site in a study: each key is kept, and known for good
MOST_KEPT = 1000  # whose bytes are kept, of those that a site replaced or withdrew
MOST_KEPT_LARGE = 16  # of these, larger than the next
LARGE = 256 << 10  # bytes
MOST_NAMES_TRIED = 3  # that are taken, with one invitation: each tells that someone has the name

_NO_INVITATION = "The invitation does not exist, was already used, or has expired."
_NAME_TAKEN = "The name is taken in this study, or people would take it for one that is."

# Statements that every submission needs, built once. A state is a part of the text where an index
# covers only the rows with this state.
_ACCEPTED = sa.literal_column("'accepted'", sa.Text)
_GONE = sa.literal_column("'withdrawn'", sa.Text)
_SIGNER = sa.select(sites).where(
    sites.c.study == sa.bindparam("study"), sites.c.key == sa.bindparam("key")
)
# Not joined to the above: in SQLite a study's state lies behind its text, which every connection
# but the writer's would have to read again after each write.
_STATUS = Statement(sa.select(studies.c.status).where(studies.c.name == sa.bindparam("of_study")))
_newest = (
    sa.select(sa.func.max(contributions.c.sequence))
    .where(contributions.c.study == sites.c.study, contributions.c.site == sites.c.name)
    .correlate(sites)
    .scalar_subquery()
)
_SENDER = Statement(
    _SIGNER.add_columns(
        *(column.label(f"its_{column.name}") for column in contributions.c)
    ).outerjoin(
        contributions,
        (contributions.c.study == sites.c.study)
        & (contributions.c.site == sites.c.name)
        & (contributions.c.sequence == _newest),
    )
)
_SAME = Statement(
    sa.select(contributions).where(
        contributions.c.digest == sa.bindparam("of_digest"),
        contributions.c.study == sa.bindparam("of_study"),
        contributions.c.site == sa.bindparam("of_site"),
    )
)
_WITHDRAWN = Statement(
    sa.select(contributions.c.state, contributions.c.changed)
    .where(
        contributions.c.study == sa.bindparam("of_study"),
        contributions.c.site == sa.bindparam("of_site"),
        contributions.c.state == _GONE,
    )
    .order_by(contributions.c.sequence.desc())
    .limit(64)
)
_NTH_NEWEST = Statement(
    sa.select(contributions.c.received)
    .where(
        contributions.c.study == sa.bindparam("of_study"),
        contributions.c.site == sa.bindparam("of_site"),
    )
    .order_by(contributions.c.sequence.desc())
    .limit(1)
    .offset(sa.bindparam("n"))
)
_OLD = Statement(
    sa.select(contributions.c.digest, contributions.c.sha256)
    .where(
        contributions.c.study == sa.bindparam("of_study"),
        contributions.c.site == sa.bindparam("of_site"),
        contributions.c.kept,
        contributions.c.size > sa.bindparam("over"),
    )
    .order_by(contributions.c.sequence.desc())
    .limit(64)
    .offset(sa.bindparam("skipped"))
)
_IN_OFFERED = Statement(
    sa.select(members.c.release)
    .join(releases, releases.c.digest == members.c.release)
    .where(
        members.c.contribution == sa.bindparam("of_digest"),
        releases.c.state != "withdrawn",
        releases.c.kept,
    )
    .limit(1)
)
_FORGET = Statement(
    contributions.update()
    .where(contributions.c.digest == sa.bindparam("of_digest"))
    .values(kept=False)
)
_REMOVE_BODY = Statement(bodies.delete().where(bodies.c.sha256 == sa.bindparam("of")))
_SUPERSEDE = Statement(
    contributions.update()
    .where(
        contributions.c.state == _ACCEPTED,
        contributions.c.study == sa.bindparam("of_study"),
        contributions.c.site == sa.bindparam("of_site"),
    )
    .values(state="superseded", changed=sa.bindparam("at"))
)
_COUNT_CHANGE = Statement(
    studies.update()
    .where(studies.c.name == sa.bindparam("of_study"))
    .values(CHANGED | {"changed": sa.bindparam("at")})
)
_ADD_CONTRIBUTION, _ADD_BODY, _ADD_NONCE = (
    Statement(table.insert()) for table in (contributions, bodies, nonces)
)
_OWN = [column.name for column in contributions.c]


def _get_signer(db: sa.Connection, study: str, key: str) -> Row:
    """Return the site whose current key this is, or refuse."""
    row = fetch_row(db, _SIGNER, study=study, key=key)
    if row is not None and row["status"] == "enrolled":
        return row
    if fetch_rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("key-revoked", "The key was replaced or revoked.")
    raise Refusal("not-authenticated", "The key is not enrolled in this study.")


def _get_sender(db: sa.Connection, study: str, key: str) -> tuple[Row, Row | None]:
    """Return the site whose current key this is and its newest contribution, or refuse."""
    rows = _SENDER.fetch(db, study=study, key=key)  # one statement: every submission asks
    if not rows or rows[0]["status"] != "enrolled":
        return _get_signer(db, study, key), None  # says why not
    site = rows[0]
    newest = {name: site.pop(f"its_{name}") for name in _OWN}
    return site, None if newest["digest"] is None else newest


def _spend_nonce(db: sa.Connection, key: str, nonce: str, seconds: float = NONCE_SECONDS) -> None:
    """Store a nonce for as long as its request could be sent again; refuse a known one."""
    try:
        _ADD_NONCE.change(db, key=key, nonce=nonce, expires=now(seconds=seconds))
    except sa.exc.IntegrityError:
        raise Refusal("replayed", "This request was received before.") from None


def _find_same(
    db: sa.Connection, row: Row, site: Row, newest: Row | None, return_seconds: float
) -> Row | None:
    """Compare a contribution with what its site submitted before.

    Return the row of the same contribution if the hub has it, None if the contribution is new, or
    refuse it.
    """
    is_later = newest is None or newest["sequence"] < row["sequence"]
    if not is_later:  # the same digest has the same number
        stated = {"of_digest": row["digest"], "of_study": row["study"], "of_site": row["site"]}
        for same in _SAME.fetch(db, **stated):
            if same["state"] == "withdrawn":
                raise Refusal("stale", "This contribution was withdrawn.")
            return same
    if any(study["status"] != "open" for study in _STATUS.fetch(db, of_study=row["study"])):
        raise Refusal("study-closed", f"The study {row['study']!r} is closed.")
    if site["fetch_only"]:
        raise Refusal("not-allowed", "The site joined this study only to fetch its releases.")
    if newest is not None and not is_later:
        raise Refusal(
            "stale",
            f"The contribution has number {row['sequence']}, but number {newest['sequence']} was "
            "already received.",
        )
    withdrawn = [] if newest is None else _get_withdrawn(db, newest)
    count, until = find_return(site, withdrawn, return_seconds)
    if until is not None:
        raise Refusal(
            "too-soon",
            f"The site withdrew {count} times within 30 days. Its next contribution is accepted "
            f"from {until[:19].replace('T', ' ')} UTC on.",
        )
    return None


def _check_daily(db: sa.Connection, row: Row, most: int) -> None:
    """Refuse a contribution of a site that has submitted too many within a day."""
    nth = _NTH_NEWEST.fetch(db, of_study=row["study"], of_site=row["site"], n=most - 1)
    if nth and nth[0]["received"] > now(seconds=-86400):
        raise Refusal("too-often", f"The site has submitted {most} contributions within a day.")


def _get_withdrawn(db: sa.Connection, row: Row) -> list[Row]:
    """Return what the site of a contribution withdrew from its study, the newest part of it."""
    return _WITHDRAWN.fetch(db, of_study=row["study"], of_site=row["site"])


def find_return(
    site: Row, own: Sequence[Row], first: float = RETURN_SECONDS
) -> tuple[int, str | None]:
    """Return how often a site withdrew of late, and until when it may not submit again.

    Withdrawing is free at any time, but everyone else has to bear it, so coming back is not: after
    the second withdrawal a site waits for the `first` seconds, and twice as long after each further
    one. What was withdrawn before a coordinator enrolled the site again does not count.
    """
    since = max(now(seconds=-COUNTED_SECONDS), site["enrolled"])
    times = [row["changed"] for row in own if row["state"] == "withdrawn"]
    times = [time for time in times if time > since]
    return len(times), find_end(len(times), max(times, default=""), first)


def find_end(count: int, newest: str, first: float = RETURN_SECONDS) -> str | None:
    """Return until when a site may not submit that withdrew `count` times, last at `newest`."""
    if count < 2:
        return None
    seconds = min(first * 2.0 ** min(count - 2, 60), LONGEST_RETURN_SECONDS)
    until = datetime.fromisoformat(newest) + timedelta(seconds=seconds)
    end = until.isoformat(timespec="microseconds")
    return end if end > now() else None


def _withdraw(db: sa.Connection, row: Row, actor: str) -> Row:
    """Withdraw a contribution, and every release that rests on its site.

    The newest release that does not rest on it is current again.
    """
    same = contributions.update().where(contributions.c.digest == row["digest"])
    at = now()
    db.execute(same.values(state="withdrawn", changed=at))
    withdraw_batches(db, row["study"], row["site"], actor)
    # Also releases that rest on what the site contributed earlier.
    own = sa.select(contributions.c.digest).where(
        contributions.c.study == row["study"], contributions.c.site == row["site"]
    )
    containing = sa.select(members.c.release).where(members.c.contribution.in_(own))
    db.execute(releases.update().where(releases.c.digest.in_(containing)).values(state="withdrawn"))
    _COUNT_CHANGE.change(db, of_study=row["study"], at=at)
    facts = {"site": row["site"], "digest": row["digest"]}
    append_entry(db, actor, "contribution withdrawn", row["study"], **facts)
    offer_newest(db, row["study"])
    return {**row, "state": "withdrawn", "changed": at}


class Sites(Database):
    """Sites, how they enrol by invitation, their keys, and what they contributed."""

    return_seconds, most_daily = RETURN_SECONDS, MOST_DAILY
    most_kept, most_kept_large = MOST_KEPT, MOST_KEPT_LARGE

    @writing
    def invite(
        self, db: sa.Connection, /, study: str, code_hash: str, actor: str, **facts: object
    ) -> None:
        """Store an invitation by the hash of its code: `site`, `fetch_only` and when it expires."""
        get_open_study(db, study)
        if not facts["fetch_only"]:
            check_not_frozen(db, study)
        if isinstance(site := facts["site"], str):
            _check_site_name(db, study, site)
        made = {"hash": code_hash, "study": study, "created": now(), "created_by": actor}
        db.execute(invitations.insert().values(**made, **facts))
        append_entry(db, actor, "site invited", study, **facts)

    def invitations(self, study: str) -> list[Row]:
        """Return a study's invitations without their hashes, newest first."""
        shown = [column for column in invitations.c if column.name != "hash"]
        query = sa.select(*shown).where(invitations.c.study == study)
        return self.fetch_all(query.order_by(invitations.c.created.desc()))

    def open_invitation(self, code_hash: str) -> Row | None:
        """Return the invitation of a code that was not used."""
        same = invitations.c.hash == code_hash, invitations.c.used.is_(None)
        return self.fetch_one(sa.select(invitations).where(*same))

    def enrol(self, code_hash: str, site: str, key: str, nonce: str, fetch_only: bool) -> Row:
        """Use an invitation, and add the site with its key to the study."""
        row = self._enrol(code_hash, site, key, nonce, fetch_only)
        if row is None:
            raise Refusal("name-taken", _NAME_TAKEN)
        return row

    @writing
    def _enrol(
        self, db: sa.Connection, code_hash: str, site: str, key: str, nonce: str, fetch_only: bool
    ) -> Row | None:
        """Enrol a site; return None, and count it, if the name is taken.

        A refusal in here would undo the count.
        """
        _spend_nonce(db, key, nonce)
        invitation = fetch_row(db, sa.select(invitations).where(invitations.c.hash == code_hash))
        if invitation is None:
            raise Refusal("invitation", _NO_INVITATION)
        study = invitation["study"]
        known = fetch_row(db, sa.select(sites).where(_is_site(study, site)))
        if invitation["used_by"] == site and known and known["key"] == key:
            return known  # the answer to the first request was lost
        if invitation["used"] is not None or invitation["expires"] <= now():
            raise Refusal("invitation", _NO_INVITATION)
        if invitation["site"] not in (None, site):
            raise Refusal("invitation", "The invitation is for a site with another name.")
        get_open_study(db, study)
        try:
            _check_site_name(db, study, site)
        except Refusal as refusal:  # it names the other site
            if refusal.code != "name-taken":
                raise
            _count_name(db, invitation)
            return None
        # A revoked site returns only with an invitation in its own name, because the site that
        # takes the name also takes over what was spent under it.
        if known and not (known["status"] == "revoked" and invitation["site"] == site):
            _count_name(db, invitation)
            return None
        if not (invitation["fetch_only"] or fetch_only):
            check_not_frozen(db, study)
        _add_key(db, study, site, key)
        facts = {"key": key, "fetch_only": bool(invitation["fetch_only"] or fetch_only)}
        row = {"study": study, "name": site, "enrolled": now(), "status": "enrolled", **facts}
        put = sites.update().where(_is_site(study, site)) if known else sites.insert()
        db.execute(put.values(row))
        used = invitations.update().where(invitations.c.hash == code_hash)
        db.execute(used.values(used=now(), used_by=site))
        append_entry(db, f"site:{site}", "site enrolled", study, **facts)
        return row

    def sites(self, study: str) -> list[Row]:
        """Return a study's sites by name."""
        return self.fetch_all(sa.select(sites).where(sites.c.study == study).order_by(sites.c.name))

    def signer(self, study: str, key: str) -> Row:
        """Return the site whose current key this is, or refuse."""
        with self.reading() as db:
            return _get_signer(db, study, key)

    def spend_nonce(self, key: str, nonce: str, *, seconds: float = NONCE_SECONDS) -> None:
        """Store the nonce of a request that changes nothing else; refuse one that came before."""
        self.write(lambda db: _spend_nonce(db, key, nonce, seconds))

    def is_spent(self, key: str, nonce: str) -> bool:
        """Tell whether a nonce was used before."""
        query = sa.select(nonces).where(nonces.c.key == key, nonces.c.nonce == nonce)
        return self.fetch_one(query) is not None

    @writing
    def rotate(self, db: sa.Connection, study: str, key: str, new: str, nonce: str) -> Row:
        """Replace a site's key by another one that the site has proven to hold."""
        _spend_nonce(db, key, nonce)
        site = _get_signer(db, study, key)
        if not site["fetch_only"]:
            check_not_frozen(db, study)
        own = keys.c.study == study, keys.c.site == site["name"]
        lately = sa.select(sa.func.count()).where(*own, keys.c.added > now(seconds=-86400))
        if (db.execute(lately).scalar() or 0) >= MOST_KEYS_DAILY:
            message = f"The site has had {MOST_KEYS_DAILY} keys in this study within a day."
            raise Refusal("too-often", message)
        _add_key(db, study, site["name"], new)
        _end_key(db, study, key, "rotated")
        db.execute(sites.update().where(_is_site(study, site["name"])).values(key=new))
        append_entry(db, f"site:{site['name']}", "key rotated", study, old=key, new=new)
        return {**site, "key": new}

    @writing
    def revoke(self, db: sa.Connection, study: str, site: str, actor: str, withdraw: bool) -> Row:
        """Revoke a site's key, and with `withdraw` also withdraw its contribution."""
        known = fetch_row(db, sa.select(sites).where(_is_site(study, site)))
        if known is None:
            raise Refusal("not-found", "There is no such site in this study.")
        if known["status"] == "enrolled":
            _end_key(db, study, known["key"], "revoked")
            db.execute(sites.update().where(_is_site(study, site)).values(status="revoked"))
            append_entry(db, actor, "key revoked", study, site=site, key=known["key"])
        if withdraw:
            own = contributions.c.study == study, contributions.c.site == site
            accepted = sa.select(contributions).where(*own, contributions.c.state.in_(IN_USE))
            for row in fetch_rows(db, accepted):
                _withdraw(db, row, actor)
        return {**known, "status": "revoked"}

    # ----------------------------------------------------------------------------- contributions

    def sender(self, study: str, key: str) -> tuple[Row, Row | None]:
        """Return the site with this key and its newest contribution, or refuse."""
        with self.reading() as db:
            return _get_sender(db, study, key)

    def has(self, row: Row, site: Row, newest: Row | None) -> bool:
        """Tell whether a site's contribution is there already; refuse one that cannot be added."""
        with self.reading() as db:
            is_there = _find_same(db, row, site, newest, self.return_seconds) is not None
            if not is_there and newest is not None:
                _check_daily(db, row, self.most_daily)
            return is_there

    @writing
    def submit(
        self,
        db: sa.Connection,
        row: Row,
        key: str,
        nonce: str,
        content: bytes | None = None,
        *,
        is_durable: Callable[[], bool] = lambda: True,
    ) -> tuple[Row, bool]:
        """Accept a contribution whose file `is_durable`, or whose `content` is given.

        Return its row, and whether it is new. Submitting the same digest again changes nothing. A
        higher sequence number supersedes what was there; a lower one is refused.
        """
        study, site, at = row["study"], row["site"], now()
        _spend_nonce(db, key, nonce)
        # Again: the site may have been revoked while its file was checked.
        enrolled, newest = _get_sender(db, study, key)
        if enrolled["name"] != site:
            message = "The contribution names another site than the one that sent it."
            raise Refusal("wrong-site", message)
        same = _find_same(db, row, enrolled, newest, self.return_seconds)
        if same is not None:
            return same, False
        n_superseded = 0
        if newest is not None and not row.get("only_noise"):
            _check_not_listed(db, study, site)
        if newest is not None:
            _check_daily(db, row, self.most_daily)
            n_superseded = _SUPERSEDE.change(db, of_study=study, of_site=site, at=at)
        if not is_durable():  # the same file, sent twice at once, was refused and removed
            raise Refusal("unavailable", "The file was removed while it was checked.")
        full = {"only_noise": False, **row, "state": "accepted", "kept": True}
        full |= {"received": at, "changed": at}
        full["total"] = add_guarantee(newest and newest["total"], row["guarantee"])
        _ADD_CONTRIBUTION.change(db, **full)
        if content is not None:
            _ADD_BODY.change(db, sha256=row["sha256"], content=content)
        _COUNT_CHANGE.change(db, of_study=study, at=at)
        facts = {"digest": row["digest"], "sequence": row["sequence"], "supersedes": n_superseded}
        append_entry(db, f"site:{site}", "contribution accepted", study, **facts)
        return full, True

    def standing(self, study: str, site: str) -> list[Row]:
        """Return what tells how a site stands: its newest contribution, and what it withdrew."""
        own = contributions.c.study == study, contributions.c.site == site
        newest = sa.select(contributions).where(*own).order_by(contributions.c.sequence.desc())
        withdrawn = newest.where(contributions.c.state == _GONE).limit(64)
        with self.reading() as db:
            rows = {row["digest"]: row for row in fetch_rows(db, newest.limit(1))}
            return list((rows | {row["digest"]: row for row in fetch_rows(db, withdrawn)}).values())

    def own_contribution(self, study: str, site: str, digest: str) -> Row | None:
        """Return one of a site's contributions."""
        with self.reading() as db:
            same = _SAME.fetch(db, of_digest=digest, of_study=study, of_site=site)
        return next(iter(same), None)

    @writing
    def forget_old(self, db: sa.Connection, row: Row) -> list[str]:
        """Forget the bytes of what a site replaced long ago; return the digests of its files.

        The rows stay, and so does what a release rests on that is current or may be offered again.
        """
        own, forgotten = {"of_study": row["study"], "of_site": row["site"]}, []
        oldest = _OLD.fetch(db, **own, over=0, skipped=self.most_kept + 1)
        if row["size"] > LARGE:
            oldest += _OLD.fetch(db, **own, over=LARGE, skipped=self.most_kept_large + 1)
        for old in oldest:
            if not _IN_OFFERED.fetch(db, of_digest=old["digest"]):
                _FORGET.change(db, of_digest=old["digest"])
                if not _REMOVE_BODY.change(db, of=old["sha256"]):
                    forgotten.append(old["sha256"])
        return forgotten

    @writing
    def withdraw(self, db: sa.Connection, study: str, key: str, nonce: str) -> Row:
        """Withdraw a site's contribution; doing it again changes nothing."""
        _spend_nonce(db, key, nonce)
        site, newest = _get_sender(db, study, key)
        if newest is None:
            raise Refusal("not-found", "The site has contributed nothing to this study.")
        if newest["state"] == "withdrawn":
            return newest
        row = _withdraw(db, newest, f"site:{site['name']}")
        count, until = find_return(site, _get_withdrawn(db, row), self.return_seconds)
        if until is not None:
            facts = {"site": site["name"], "withdrawals": count, "until": until}
            append_entry(db, "hub", "next contribution delayed", study, **facts)
        return row

    def contributions(self, study: str, *, site: str | None = None) -> list[Row]:
        """Return a study's contributions, or one site's, in the order they were received."""
        query = sa.select(contributions).where(contributions.c.study == study)
        if site is not None:
            query = query.where(contributions.c.site == site)
        return self.fetch_all(query.order_by(contributions.c.received))


def _is_site(study: str, name: str) -> sa.ColumnElement[bool]:
    return (sites.c.study == study) & (sites.c.name == name)


def _check_site_name(db: sa.Connection, study: str, name: str) -> None:
    """Refuse the name of a new site that looks like another one's; known names stay good."""
    names = list(db.execute(sa.select(sites.c.name).where(sites.c.study == study)).scalars())
    if name not in names:
        check_new_name(name, names)


def _count_name(db: sa.Connection, invitation: Row) -> None:
    """Count a name that is taken against its invitation, which is void after a few of them."""
    setting = f"names tried {invitation['hash']}"
    tried = int(get_setting(db, setting) or 0) + 1
    set_setting(db, setting, str(tried))
    if tried >= MOST_NAMES_TRIED:
        used = invitations.update().where(invitations.c.hash == invitation["hash"])
        db.execute(used.values(used=now(), used_by=""))
        append_entry(db, "hub", "invitation void", invitation["study"], names_tried=tried)


def _check_not_listed(db: sa.Connection, study: str, site: str) -> None:
    """Refuse to add the same records up twice."""
    if has_listed_records(db, study, site):
        raise Refusal(
            "listed",
            "The site's records are in a batch that was listed to the keyholders, and would be "
            "added up twice.",
        )


def _add_key(db: sa.Connection, study: str, site: str, key: str) -> None:
    if fetch_rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("name-taken", "The key was enrolled in this study before.")
    db.execute(keys.insert().values(study=study, key=key, site=site, added=now()))


def _end_key(db: sa.Connection, study: str, key: str, reason: str) -> None:
    ended = keys.update().where(keys.c.study == study, keys.c.key == key, keys.c.ended.is_(None))
    db.execute(ended.values(ended=now(), reason=reason))
