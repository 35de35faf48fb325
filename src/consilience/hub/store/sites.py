"""Rows about sites: invitations, keys, and the nonces of their signed requests."""

from __future__ import annotations

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.contributions import own_contributions, withdraw_contribution
from consilience.hub.store.database import Database, Row, fetch_rows, now
from consilience.hub.store.signers import NONCE_SECONDS, get_signer, spend_nonce
from consilience.hub.store.studies import get_open_study
from consilience.hub.store.tables import contributions, invitations, keys, nonces, sites
from consilience.protocol import Refusal

_NO_INVITATION = "The invitation does not exist, was already used, or has expired."


class Sites(Database):
    """Sites, how they enrol by invitation, and their keys."""

    def invite(
        self,
        study: str,
        code_hash: str,
        expires: str,
        actor: str,
        *,
        site: str | None,
        fetch_only: bool,
    ) -> None:
        """Store an invitation by the hash of its code."""

        def work(db: sa.Connection) -> None:
            get_open_study(db, study)
            row: Row = {
                "hash": code_hash,
                "study": study,
                "site": site,
                "fetch_only": fetch_only,
                "created": now(),
                "created_by": actor,
                "expires": expires,
                "used": None,
                "used_by": None,
            }
            db.execute(invitations.insert().values(row))
            facts = {"site": site, "fetch_only": fetch_only, "expires": expires}
            append_entry(db, actor, "site invited", study, **facts)

        self.write(work)

    def invitations(self, study: str) -> list[Row]:
        """Return a study's invitations without their hashes, newest first."""
        shown = [column for column in invitations.c if column.name != "hash"]
        query = sa.select(*shown).where(invitations.c.study == study)
        return self.fetch_all(query.order_by(invitations.c.created.desc()))

    def enrol(self, code_hash: str, site: str, key: str, nonce: str, *, fetch_only: bool) -> Row:
        """Use an invitation, and add the site with its key to the study."""

        def work(db: sa.Connection) -> Row:
            spend_nonce(db, key, nonce)
            invitation = _get_invitation(db, code_hash)
            study = invitation["study"]
            known = fetch_rows(db, sa.select(sites).where(_is_site(study, site)))
            if invitation["used_by"] == site and known and known[0]["key"] == key:
                return known[0]  # the answer to the first request was lost
            _check_invitation(invitation, site)
            get_open_study(db, study)
            # A revoked site returns only with an invitation in its own name, because whoever
            # takes the name also takes over what the site has spent.
            may_return = known and known[0]["status"] == "revoked" and invitation["site"] == site
            if known and not may_return:
                raise Refusal("name-taken", f"There is already a site {site!r} in this study.")
            _add_key(db, study, site, key)
            row: Row = {
                "study": study,
                "name": site,
                "key": key,
                "status": "enrolled",
                "fetch_only": bool(invitation["fetch_only"] or fetch_only),
                "enrolled": known[0]["enrolled"] if known else now(),
            }
            if known:
                db.execute(sites.update().where(_is_site(study, site)).values(row))
            else:
                db.execute(sites.insert().values(row))
            used = invitations.update().where(invitations.c.hash == code_hash)
            db.execute(used.values(used=now(), used_by=site))
            facts = {"key": key, "fetch_only": row["fetch_only"]}
            append_entry(db, f"site:{site}", "site enrolled", study, **facts)
            return row

        return self.write(work)

    def sites(self, study: str) -> list[Row]:
        """Return a study's sites by name."""
        return self.fetch_all(sa.select(sites).where(sites.c.study == study).order_by(sites.c.name))

    def signer(self, study: str, key: str) -> Row:
        """Return the site whose current key this is, or refuse."""
        with self.reading() as db:
            return get_signer(db, study, key)

    def spend_nonce(self, key: str, nonce: str, *, seconds: float = NONCE_SECONDS) -> None:
        """Store the nonce of a request that changes nothing else; refuse one that came before."""
        self.write(lambda db: spend_nonce(db, key, nonce, seconds))

    def is_spent(self, key: str, nonce: str) -> bool:
        """Tell whether a nonce was used before."""
        query = sa.select(nonces).where(nonces.c.key == key, nonces.c.nonce == nonce)
        return self.fetch_one(query) is not None

    def rotate(self, study: str, key: str, new: str, nonce: str) -> Row:
        """Replace a site's key by another one that the site has proven to hold."""

        def work(db: sa.Connection) -> Row:
            spend_nonce(db, key, nonce)
            site = get_signer(db, study, key)
            _add_key(db, study, site["name"], new)
            _end_key(db, study, key, "rotated")
            db.execute(sites.update().where(_is_site(study, site["name"])).values(key=new))
            append_entry(db, f"site:{site['name']}", "key rotated", study, old=key, new=new)
            return {**site, "key": new}

        return self.write(work)

    def revoke(self, study: str, site: str, actor: str, *, withdraw: bool) -> Row:
        """Revoke a site's key, and with `withdraw` also withdraw its contribution."""

        def work(db: sa.Connection) -> Row:
            known = fetch_rows(db, sa.select(sites).where(_is_site(study, site)))
            if not known:
                raise Refusal("not-found", "There is no such site in this study.")
            if known[0]["status"] == "enrolled":
                _end_key(db, study, known[0]["key"], "revoked")
                db.execute(sites.update().where(_is_site(study, site)).values(status="revoked"))
                append_entry(db, actor, "key revoked", study, site=site, key=known[0]["key"])
            if withdraw:
                accepted = own_contributions(study, site).where(contributions.c.state == "accepted")
                for row in fetch_rows(db, accepted):
                    withdraw_contribution(db, row, actor)
            return {**known[0], "status": "revoked"}

        return self.write(work)


def _is_site(study: str, name: str) -> sa.ColumnElement[bool]:
    return (sites.c.study == study) & (sites.c.name == name)


def _get_invitation(db: sa.Connection, code_hash: str) -> Row:
    rows = fetch_rows(db, sa.select(invitations).where(invitations.c.hash == code_hash))
    if not rows:
        raise Refusal("invitation", _NO_INVITATION)
    return rows[0]


def _check_invitation(invitation: Row, site: str) -> None:
    if invitation["used"] is not None or invitation["expires"] <= now():
        raise Refusal("invitation", _NO_INVITATION)
    if invitation["site"] not in (None, site):
        raise Refusal("invitation", "The invitation is for a site with another name.")


def _add_key(db: sa.Connection, study: str, site: str, key: str) -> None:
    if fetch_rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("name-taken", "The key was enrolled in this study before.")
    row: Row = {
        "study": study,
        "key": key,
        "site": site,
        "added": now(),
        "ended": None,
        "reason": None,
    }
    db.execute(keys.insert().values(row))


def _end_key(db: sa.Connection, study: str, key: str, reason: str) -> None:
    ended = keys.update().where(keys.c.study == study, keys.c.key == key, keys.c.ended.is_(None))
    db.execute(ended.values(ended=now(), reason=reason))
