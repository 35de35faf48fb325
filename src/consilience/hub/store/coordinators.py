"""Rows about coordinators and their sessions."""

from __future__ import annotations

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_rows, now
from consilience.hub.store.tables import coordinators, sessions


class Coordinators(Database):
    """Coordinators, known by name and password, and their sessions, known by a token's hash."""

    def add_coordinator(self, name: str, password: str, actor: str) -> None:
        """Add a coordinator, or change a known one's password, which ends all their sessions."""

        def work(db: sa.Connection) -> None:
            named = coordinators.c.name == name
            known = fetch_rows(db, sa.select(coordinators).where(named))
            if known:
                db.execute(coordinators.update().where(named).values(password=password))
                db.execute(sessions.delete().where(sessions.c.coordinator == name))
            else:
                row = {"name": name, "password": password, "created": now(), "status": "active"}
                db.execute(coordinators.insert().values(row))
            action = "password changed" if known else "coordinator added"
            append_entry(db, actor, action, None, coordinator=name)

        self.write(work)

    def coordinator(self, name: str) -> Row | None:
        """Return a coordinator's row."""
        return self.fetch_one(sa.select(coordinators).where(coordinators.c.name == name))

    def add_session(self, token_hash: str, coordinator: str, kind: str, expires: str) -> None:
        """Store a session by the hash of its token; delete sessions that have expired."""

        def work(db: sa.Connection) -> None:
            db.execute(sessions.delete().where(sessions.c.expires < now()))
            row = {
                "hash": token_hash,
                "coordinator": coordinator,
                "kind": kind,
                "created": now(),
                "expires": expires,
            }
            db.execute(sessions.insert().values(row))
            append_entry(db, f"coordinator:{coordinator}", "logged in", None, kind=kind)

        self.write(work)

    def session(self, token_hash: str) -> Row | None:
        """Return a session that has not expired."""
        return self.fetch_one(
            sa.select(sessions).where(sessions.c.hash == token_hash, sessions.c.expires > now())
        )

    def end_session(self, token_hash: str) -> None:
        """Delete a session."""
        self.write(lambda db: db.execute(sessions.delete().where(sessions.c.hash == token_hash)))
