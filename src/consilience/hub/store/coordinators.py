"""Rows about coordinators and their sessions."""

from __future__ import annotations

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, now, writing
from consilience.hub.store.tables import coordinators, sessions


class Coordinators(Database):
    """Coordinators, known by name and password, and their sessions, known by a token's hash."""

    @writing
    def add_coordinator(self, db: sa.Connection, name: str, password: str, actor: str) -> None:
        """Add a coordinator, or change a known one's password, which ends all their sessions."""
        known = coordinators.update().where(coordinators.c.name == name)
        if db.execute(known.values(password=password)).rowcount:
            db.execute(sessions.delete().where(sessions.c.coordinator == name))
            append_entry(db, actor, "password changed", None, coordinator=name)
        else:
            row = {"name": name, "password": password, "created": now(), "status": "active"}
            db.execute(coordinators.insert().values(row))
            append_entry(db, actor, "coordinator added", None, coordinator=name)

    def coordinator(self, name: str) -> Row | None:
        """Return a coordinator's row."""
        return self.fetch_one(sa.select(coordinators).where(coordinators.c.name == name))

    @writing
    def add_session(
        self, db: sa.Connection, token_hash: str, coordinator: str, kind: str, expires: str
    ) -> None:
        """Store a session by the hash of its token; delete sessions that have expired."""
        db.execute(sessions.delete().where(sessions.c.expires < now()))
        row = {"hash": token_hash, "coordinator": coordinator, "kind": kind, "expires": expires}
        db.execute(sessions.insert().values(**row, created=now()))
        append_entry(db, f"coordinator:{coordinator}", "logged in", None, kind=kind)

    def session(self, token_hash: str) -> Row | None:
        """Return a session that has not expired."""
        return self.fetch_one(
            sa.select(sessions).where(sessions.c.hash == token_hash, sessions.c.expires > now())
        )

    def end_session(self, token_hash: str) -> None:
        """Delete a session."""
        self.write(lambda db: db.execute(sessions.delete().where(sessions.c.hash == token_hash)))
