"""Rows about studies and their public files, and about coordinators and their sessions."""

from __future__ import annotations

import sqlalchemy as sa

from consilience.hub.store.audit import append_entry
from consilience.hub.store.database import Database, Row, fetch_row, now, writing
from consilience.hub.store.tables import coordinators, files, sessions, studies
from consilience.protocol import Refusal


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


class Studies(Database):
    """Studies and the public files they name; coordinators, and their sessions by token hash."""

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
        row = {"name": name, "digest": digest, "text": text, "created_by": actor}
        new = {"status": "open", "created": now(), "changes": 0, "combined": 0}
        db.execute(studies.insert().values(**row, **new))
        append_entry(db, actor, "study created", name, digest=digest)
        return get_study(db, name)

    def studies(self) -> list[Row]:
        """Return all studies, oldest first."""
        return self.fetch_all(sa.select(studies).order_by(studies.c.created))

    def study(self, name: str) -> Row | None:
        """Return one study's row."""
        return self.fetch_one(sa.select(studies).where(studies.c.name == name))

    @writing
    def close_study(self, db: sa.Connection, name: str, actor: str) -> Row:
        """Accept nothing more for a study; its releases stay."""
        row = get_study(db, name)
        if row["status"] == "open":
            db.execute(studies.update().where(studies.c.name == name).values(status="closed"))
            append_entry(db, actor, "study closed", name)
        return {**row, "status": "closed"}

    @writing
    def add_file(
        self, db: sa.Connection, sha256: str, size: int, study: str, file: str, actor: str
    ) -> None:
        """Add the row of a public file that is already stored."""
        if fetch_row(db, sa.select(files).where(files.c.sha256 == sha256)) is None:
            db.execute(files.insert().values(sha256=sha256, size=size, received=now()))
            append_entry(db, actor, "public file received", study, file=file, sha256=sha256)
        # A study that could not be combined may have waited for this file.
        waiting = studies.update().where(studies.c.problem.is_not(None))
        db.execute(waiting.values(changes=studies.c.changes + 1, changed=now(), problem=None))

    def file(self, sha256: str) -> Row | None:
        """Return the row of a public file, if the hub has it."""
        return self.fetch_one(sa.select(files).where(files.c.sha256 == sha256))

    # ------------------------------------------------------------------------------ coordinators

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
