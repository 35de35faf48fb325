"""Rows about accounts: who may log in, with which role and for which studies; and sessions."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from consilience.hub.roles import Account, Role
from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import (
    Database,
    Row,
    fetch_row,
    fetch_rows,
    get_setting,
    now,
    set_setting,
    writing,
)
from consilience.hub.store.tables import (
    accounts,
    assignments,
    factors,
    identities,
    invitations,
    known_addresses,
    sessions,
    studies,
)
from consilience.protocol import Refusal, check_new_name

MOST_KNOWN = 20  # addresses at which an account's limit does not count
KNOWN_SECONDS = 90 * 86400.0


def actor_of(row: Row) -> str:
    """Return an account as the audit log names it."""
    return f"{row['role']}:{row['name']}"


def get_account(db: sa.Connection, name: str) -> Row:
    """Return an account's row, or refuse."""
    row = fetch_row(db, sa.select(accounts).where(accounts.c.name == name))
    if row is None:
        raise Refusal("not-found", "There is no such account.")
    return row


class Accounts(Database):
    """Accounts, the studies that they are for, and their sessions."""

    all_need_factors = False  # whether nobody may log in by password alone

    @writing
    def add_account(
        self,
        db: sa.Connection,
        name: str,
        password: str,
        actor: str,
        *,
        role: Role = Role.COORDINATOR,
        only: Collection[str] | None = None,
    ) -> None:
        """Add an account for every study, or `only` for some; `password` is a hash."""
        check_new_name(name, db.execute(sa.select(accounts.c.name)).scalars())
        row = {"name": name, "password": password, "created": now(), "status": "active"}
        db.execute(accounts.insert().values(**row, role=role, every_study=only is None))
        _assign(db, name, role, only)
        facts = {"account": name, "role": str(role), "studies": _said(only)}
        append_entry(db, actor, "account added", None, **facts)

    @writing
    def set_role(
        self,
        db: sa.Connection,
        name: str,
        actor: str,
        *,
        role: Role,
        only: Collection[str] | None = None,
    ) -> None:
        """Change an account's role and studies; both hold from its next request on."""
        get_account(db, name)
        same = accounts.update().where(accounts.c.name == name)
        db.execute(same.values(role=role, every_study=only is None))
        _assign(db, name, role, only)
        _void_invitations(db, name, actor, () if role is Role.AUDITOR else only)
        facts = {"account": name, "role": str(role), "studies": _said(only)}
        append_entry(db, actor, "role changed", None, **facts)

    @writing
    def set_password(self, db: sa.Connection, name: str, password: str, actor: str) -> None:
        """Change an account's password, which ends all its sessions."""
        get_account(db, name)
        db.execute(accounts.update().where(accounts.c.name == name).values(password=password))
        end_sessions(db, name)
        append_entry(db, actor, "password changed", None, account=name)

    @writing
    def set_status(self, db: sa.Connection, name: str, actor: str, *, active: bool) -> None:
        """Disable an account, which ends its sessions and invitations, or enable it again."""
        row, status = get_account(db, name), "active" if active else "disabled"
        if row["status"] == status:
            return
        db.execute(accounts.update().where(accounts.c.name == name).values(status=status))
        if not active:
            end_sessions(db, name)
            _void_invitations(db, name, actor, ())
        append_entry(
            db, actor, f"account {'enabled' if active else 'disabled'}", None, account=name
        )

    def account(self, name: str) -> Row | None:
        """Return an account's row."""
        return self.fetch_one(sa.select(accounts).where(accounts.c.name == name))

    def accounts(self) -> list[Row]:
        """Return all accounts by name, each with the studies that it is for."""
        with self.snapshot() as db:
            rows = fetch_rows(db, sa.select(accounts).order_by(accounts.c.name))
            for row in rows:
                row["studies"] = None if row["every_study"] else _studies_of(db, row["name"])
                row["identities"] = _identities_of(db, row["name"])
                confirmed = factors.c.account == row["name"], factors.c.confirmed.is_not(None)
                row["factor"] = fetch_row(db, sa.select(factors).where(*confirmed)) is not None
        return rows

    # ------------------------------------------------------------------------------- identities

    @writing
    def bind(self, db: sa.Connection, name: str, issuer: str, subject: str, actor: str) -> None:
        """Let whom an identity provider calls `subject` log in to an account."""
        get_account(db, name)
        if not (1 <= len(subject) <= 255 and subject.isprintable()):
            raise Refusal("malformed", "A subject has 1 to 255 printable characters.")
        same = identities.c.issuer == issuer, identities.c.subject == subject
        if (known := fetch_row(db, sa.select(identities).where(*same))) is not None:
            if known["account"] == name:
                return
            raise Refusal("name-taken", "This identity belongs to another account.")
        _bind(db, name, (issuer, subject), actor, "an operator")

    @writing
    def unbind(self, db: sa.Connection, name: str, actor: str) -> None:
        """Remove an account's identity at the provider, which ends its sessions.

        Afterwards only an operator binds it: by its address alone it would be bound again at once.
        """
        get_account(db, name)
        set_setting(db, _by_hand(name), now())
        for one in _identities_of(db, name):
            append_entry(db, actor, "identity removed", None, account=name, **one)
        db.execute(identities.delete().where(identities.c.account == name))
        end_sessions(db, name)

    @writing
    def identified(
        self, db: sa.Connection, issuer: str, subject: str, email: str | None
    ) -> Row | None:
        """Return the account of an identity, also if it is disabled.

        An identity without one, and with a verified address, is bound to the account whose name is
        the address, unless that account has another identity of the same provider, or had one that
        was removed.
        """
        same = identities.c.issuer == issuer, identities.c.subject == subject
        query = sa.select(accounts).join(identities, identities.c.account == accounts.c.name)
        if (row := fetch_row(db, query.where(*same))) is not None or email is None:
            return row
        row = fetch_row(db, _ACTIVE.where(accounts.c.name == email))
        if row is None or any(one["issuer"] == issuer for one in _identities_of(db, email)):
            return None
        if get_setting(db, _by_hand(email)) is not None:
            return None
        _bind(db, email, (issuer, subject), actor_of(row), "its verified address")
        return row

    # --------------------------------------------------------------------------------- sessions

    @writing
    def add_session(
        self,
        db: sa.Connection,
        token_hash: str,
        name: str,
        kind: str,
        expires: str,
        *,
        address: str | None = None,
        password: str | None = None,
    ) -> None:
        """Store a session by the hash of its token, and the `address` where it began.

        `password` is the stored hash that was compared: if it has changed since, or the account was
        disabled, the session is refused. Sessions and addresses that have expired are deleted.
        """
        row = fetch_row(db, _ACTIVE.where(accounts.c.name == name))
        if row is None or password not in (None, row["password"]):
            raise Refusal("not-authenticated", "The password was changed while it was compared.")
        if address is not None:
            add_address(db, name, address)
        db.execute(sessions.delete().where(sessions.c.expires < now()))
        new = {"hash": token_hash, "coordinator": name, "kind": kind, "expires": expires}
        db.execute(sessions.insert().values(**new, created=now()))
        append_entry(db, actor_of(row), "logged in", None, kind=kind)

    def knows(self, name: str, address: str) -> bool:
        """Tell whether an account was logged in from an address of late."""
        known = known_addresses.c
        same = known.coordinator == name, known.address == address
        query = sa.select(known_addresses).where(*same, known.seen > now(seconds=-KNOWN_SECONDS))
        return self.fetch_one(query) is not None

    def session(self, token_hash: str) -> Account | None:
        """Return the account of a session that has not expired."""
        same = sessions.c.hash == token_hash, sessions.c.expires > now()
        query = _ACTIVE.join(sessions, sessions.c.coordinator == accounts.c.name).where(*same)
        with self.reading() as db:
            if (row := fetch_row(db, query)) is None:
                return None
            only = None if row["every_study"] else frozenset(_studies_of(db, row["name"]))
            must_enrol = self._must_enrol(db, row, token_hash)
        return Account(row["name"], Role(row["role"]), only, must_enrol)

    def _must_enrol(self, db: sa.Connection, row: Row, token_hash: str) -> bool:
        """Tell whether a session is of no use before its account has a second factor.

        An identity provider has its own rule for its sessions.
        """
        if not (row["needs_factor"] or self.all_need_factors):
            return False
        confirmed = factors.c.account == row["name"], factors.c.confirmed.is_not(None)
        if fetch_row(db, sa.select(factors.c.account).where(*confirmed)) is not None:
            return False
        kind = db.execute(sa.select(sessions.c.kind).where(sessions.c.hash == token_hash)).scalar()
        return kind != "sso"

    @writing
    def end_session(self, db: sa.Connection, token_hash: str) -> None:
        """Delete a session."""
        same = sessions.c.hash == token_hash
        if (row := fetch_row(db, sa.select(sessions).where(same))) is not None:
            db.execute(sessions.delete().where(same))
            actor = actor_of(get_account(db, row["coordinator"]))
            append_entry(db, actor, "logged out", None, kind=row["kind"])


_ACTIVE = sa.select(accounts).where(accounts.c.status == "active")


def _assign(db: sa.Connection, name: str, role: Role, only: Collection[str] | None) -> None:
    """Make an account one for these studies only."""
    if only is not None and role is not Role.COORDINATOR:
        raise Refusal("malformed", f"An {role} is for every study, and cannot be limited to some.")
    db.execute(assignments.delete().where(assignments.c.account == name))
    there = set(db.execute(sa.select(studies.c.name)).scalars())
    for study in sorted(set(only or ())):
        if study not in there:
            raise Refusal("not-found", f"There is no study named {study!r}.")
        db.execute(assignments.insert().values(account=name, study=study))


def _void_invitations(
    db: sa.Connection, name: str, actor: str, allowed: Collection[str] | None
) -> None:
    """Void an account's unused invitations to all studies but those that it is still for."""
    if allowed is None:
        return
    own = invitations.c.created_by.in_([f"{role}:{name}" for role in Role])
    unused = own & invitations.c.used.is_(None) & (invitations.c.expires > now())
    unused &= invitations.c.study.not_in(list(allowed))
    counted = sa.select(invitations.c.study, sa.func.count()).where(unused)
    for study, number in db.execute(counted.group_by(invitations.c.study)).all():
        append_entry(db, actor, "invitations void", study, account=name, number=int(number))
    db.execute(invitations.update().where(unused).values(used=now(), used_by=""))


def _by_hand(name: str) -> str:
    """Return the setting that says that only an operator binds an account."""
    return f"bound by hand {name}"


def _bind(db: sa.Connection, name: str, identity: tuple[str, str], actor: str, by: str) -> None:
    issuer, subject = identity
    row = {"issuer": issuer, "subject": subject, "account": name, "bound": now()}
    db.execute(identities.insert().values(row))
    facts = {"account": name, "issuer": issuer, "subject": subject, "by": by}
    append_entry(db, actor, "identity bound", None, **facts)


def _identities_of(db: sa.Connection, name: str) -> list[Row]:
    query = sa.select(identities.c.issuer, identities.c.subject)
    return fetch_rows(db, query.where(identities.c.account == name).order_by(identities.c.subject))


def _said(only: Collection[str] | None) -> str:
    return "every study" if only is None else ", ".join(sorted(set(only))) or "none"


def _studies_of(db: sa.Connection, name: str) -> list[str]:
    query = sa.select(assignments.c.study).where(assignments.c.account == name)
    return list(db.execute(query.order_by(assignments.c.study)).scalars())


def end_sessions(db: sa.Connection, name: str, but: str = "") -> None:
    """End all sessions of an account `but` one, and forget where it was logged in."""
    db.execute(sessions.delete().where(sessions.c.coordinator == name, sessions.c.hash != but))
    db.execute(known_addresses.delete().where(known_addresses.c.coordinator == name))


def add_address(db: sa.Connection, name: str, address: str) -> None:
    """Remember where an account logged in: the newest addresses, for a while."""
    known = known_addresses.c
    same = (known.coordinator == name) & (known.address == address)
    old = known.seen < now(seconds=-KNOWN_SECONDS)
    db.execute(known_addresses.delete().where(same | old))
    row = {"coordinator": name, "address": address, "seen": now()}
    db.execute(known_addresses.insert().values(row))
    own = sa.select(known.address).where(known.coordinator == name)
    rest = own.order_by(known.seen.desc()).limit(MOST_KNOWN).offset(MOST_KNOWN)
    oldest = list(db.execute(rest).scalars())
    of_own = known.coordinator == name, known.address.in_(oldest)
    db.execute(known_addresses.delete().where(*of_own))
