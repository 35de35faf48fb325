"""Rows about second factors: secrets, the codes that were used, and recovery codes."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from consilience.hub.store.accounts import (
    actor_of,
    add_address,
    end_sessions,
    get_account,
)
from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_row, now, writing
from consilience.hub.store.tables import accounts, factors, recovery_codes
from consilience.protocol import Refusal


class Factors(Database):
    """Second factors of accounts."""

    def factor(self, name: str) -> Row | None:
        """Return the second factor of an account, also one that is not confirmed yet."""
        return self.fetch_one(sa.select(factors).where(factors.c.account == name))

    def has_factor(self, name: str) -> bool:
        """Tell whether an account logs in with a second factor."""
        row = self.factor(name)
        return row is not None and row["confirmed"] is not None

    @writing
    def begin_factor(self, db: sa.Connection, name: str, secret: str) -> None:
        """Store a secret that nothing asks for before it is confirmed."""
        get_account(db, name)
        same = factors.c.account == name
        known = fetch_row(db, sa.select(factors).where(same))
        if known is not None and known["confirmed"] is not None:
            raise Refusal("not-allowed", "This account has a second factor already.")
        db.execute(factors.delete().where(same))
        db.execute(factors.insert().values(account=name, secret=secret, confirmed=None, step=0))

    @writing
    def confirm_factor(
        self,
        db: sa.Connection,
        name: str,
        step: int,
        codes: Sequence[str],
        session: str,
        network: str | None = None,
    ) -> None:
        """Turn a second factor on: `step` is used up, and `codes` are hashes of recovery codes.

        Only the `session` that sent the code goes on, by its hash: the password alone began others.
        Of the addresses where the account has logged in, only its `network` is still known.
        """
        same = factors.c.account == name, factors.c.confirmed.is_(None)
        if not db.execute(
            factors.update().where(*same).values(confirmed=now(), step=step)
        ).rowcount:
            raise Refusal("not-allowed", "This account has a second factor already.")
        db.execute(recovery_codes.delete().where(recovery_codes.c.account == name))
        rows = [{"account": name, "number": n, "hash": code} for n, code in enumerate(codes, 1)]
        db.execute(recovery_codes.insert(), rows)
        end_sessions(db, name, but=session)
        if network is not None:
            add_address(db, name, network)
        actor = actor_of(get_account(db, name))
        append_entry(db, actor, "second factor added", None, account=name)

    @writing
    def use_step(self, db: sa.Connection, name: str, step: int) -> bool:
        """Use up a code; tell whether it is later than all that were used."""
        same = factors.c.account == name, factors.c.step < step
        return bool(db.execute(factors.update().where(*same).values(step=step)).rowcount)

    def recovery_code(self, name: str, number: int) -> str | None:
        """Return the hash of a recovery code that was not used."""
        same = recovery_codes.c.account == name, recovery_codes.c.number == number
        row = self.fetch_one(sa.select(recovery_codes).where(*same))
        return None if row is None else str(row["hash"])

    @writing
    def use_recovery_code(self, db: sa.Connection, name: str, number: int) -> bool:
        """Use up a recovery code; tell whether it was there."""
        same = recovery_codes.c.account == name, recovery_codes.c.number == number
        if not db.execute(recovery_codes.delete().where(*same)).rowcount:
            return False
        actor = actor_of(get_account(db, name))
        append_entry(db, actor, "recovery code used", None, account=name, number=number)
        return True

    @writing
    def drop_factor(self, db: sa.Connection, name: str, actor: str) -> None:
        """Forget the second factor of an account, which ends its sessions."""
        get_account(db, name)
        if db.execute(factors.delete().where(factors.c.account == name)).rowcount:
            db.execute(recovery_codes.delete().where(recovery_codes.c.account == name))
            end_sessions(db, name)
            append_entry(db, actor, "second factor removed", None, account=name)

    @writing
    def require_factor(self, db: sa.Connection, name: str, actor: str, *, needed: bool) -> None:
        """Let an account do nothing before it has a second factor, or again without one."""
        get_account(db, name)
        db.execute(accounts.update().where(accounts.c.name == name).values(needs_factor=needed))
        facts = {"account": name, "needed": needed}
        append_entry(db, actor, "second factor required", None, **facts)
