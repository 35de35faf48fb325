"""Rows about sites: invitations, keys, and the nonces of their signed requests."""

from __future__ import annotations

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.contributions import (
    NONCE_SECONDS,
    get_signer,
    own_contributions,
    spend_nonce,
    withdraw_contribution,
)
from consilience.hub.store.database import Database, Row, fetch_row, fetch_rows, now, writing
from consilience.hub.store.studies import get_open_study
from consilience.hub.store.tables import invitations, keys, nonces, sites
from consilience.protocol import Refusal

_NO_INVITATION = "The invitation does not exist, was already used, or has expired."


class Sites(Database):
    """Sites, how they enrol by invitation, and their keys."""

    @writing
    def invite(
        self, db: sa.Connection, /, study: str, code_hash: str, actor: str, **facts: object
    ) -> None:
        """Store an invitation by the hash of its code: `site`, `fetch_only`, and when it expires."""
        get_open_study(db, study)
        made = {"hash": code_hash, "study": study, "created": now(), "created_by": actor}
        db.execute(invitations.insert().values(**made, **facts))
        append_entry(db, actor, "site invited", study, **facts)

    def invitations(self, study: str) -> list[Row]:
        """Return a study's invitations without their hashes, newest first."""
        shown = [column for column in invitations.c if column.name != "hash"]
        query = sa.select(*shown).where(invitations.c.study == study)
        return self.fetch_all(query.order_by(invitations.c.created.desc()))

    @writing
    def enrol(
        self, db: sa.Connection, code_hash: str, site: str, key: str, nonce: str, fetch_only: bool
    ) -> Row:
        """Use an invitation, and add the site with its key to the study."""
        spend_nonce(db, key, nonce)
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
        # A revoked site returns only with an invitation in its own name, because the site that
        # takes the name also takes over what was spent under it.
        if known and not (known["status"] == "revoked" and invitation["site"] == site):
            raise Refusal("name-taken", f"There is already a site {site!r} in this study.")
        _add_key(db, study, site, key)
        facts = {"key": key, "fetch_only": bool(invitation["fetch_only"] or fetch_only)}
        row = {**(known or {"study": study, "name": site, "enrolled": now()}), **facts}
        row["status"] = "enrolled"
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
            return get_signer(db, study, key)

    def spend_nonce(self, key: str, nonce: str, *, seconds: float = NONCE_SECONDS) -> None:
        """Store the nonce of a request that changes nothing else; refuse one that came before."""
        self.write(lambda db: spend_nonce(db, key, nonce, seconds))

    def is_spent(self, key: str, nonce: str) -> bool:
        """Tell whether a nonce was used before."""
        query = sa.select(nonces).where(nonces.c.key == key, nonces.c.nonce == nonce)
        return self.fetch_one(query) is not None

    @writing
    def rotate(self, db: sa.Connection, study: str, key: str, new: str, nonce: str) -> Row:
        """Replace a site's key by another one that the site has proven to hold."""
        spend_nonce(db, key, nonce)
        site = get_signer(db, study, key)
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
        for row in own_contributions(db, study, site) if withdraw else ():
            if row["state"] == "accepted":
                withdraw_contribution(db, row, actor)
        return {**known, "status": "revoked"}


def _is_site(study: str, name: str) -> sa.ColumnElement[bool]:
    return (sites.c.study == study) & (sites.c.name == name)


def _add_key(db: sa.Connection, study: str, site: str, key: str) -> None:
    if fetch_rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("name-taken", "The key was enrolled in this study before.")
    db.execute(keys.insert().values(study=study, key=key, site=site, added=now()))


def _end_key(db: sa.Connection, study: str, key: str, reason: str) -> None:
    ended = keys.update().where(keys.c.study == study, keys.c.key == key, keys.c.ended.is_(None))
    db.execute(ended.values(ended=now(), reason=reason))
