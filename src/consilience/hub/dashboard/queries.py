"""What the dashboard asks of the database: counts and pages of rows, read only, at a cost that does not grow with them.

The statements that change anything are in `store`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from consilience.hub.store import Row, Store, now
from consilience.hub.store.audit import entry_hash
from consilience.hub.store.tables import (
    audit,
    contributions,
    invitations,
    members,
    releases,
    sites,
    studies,
)


@dataclass(frozen=True)
class Paged:
    """One page of a list: its rows, its number from 1, and how many there are in all."""

    rows: Sequence[Row]
    page: int
    size: int
    total: int

    @property
    def pages(self) -> int:
        """How many pages there are; an empty list has one."""
        return max(1, -(-self.total // self.size))

    @property
    def first(self) -> int:
        """Number of the first row shown."""
        return (self.page - 1) * self.size + 1

    @property
    def last(self) -> int:
        """Number of the last row shown."""
        return min(self.page * self.size, self.total)


def _rows(db: sa.Connection, query: Any) -> list[Row]:
    return [dict(row) for row in db.execute(query).mappings()]


def _count(db: sa.Connection, query: Any) -> int:
    return int(db.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one())


def _paged(db: sa.Connection, query: Any, order: Sequence[Any], page: int, size: int) -> Paged:
    total = _count(db, query)
    page = min(max(1, page), max(1, -(-total // size)))
    return Paged(
        _rows(db, query.order_by(*order).limit(size).offset((page - 1) * size)), page, size, total
    )


def study_pages(store: Store, page: int, size: int) -> Paged:
    """Return a page of studies, newest first, each with its sites, contributions and newest release."""
    with store.reading() as db:
        found = _paged(
            db, sa.select(studies), (studies.c.created.desc(), studies.c.name), page, size
        )
        names = [row["name"] for row in found.rows]
        enrolled = _numbers(db, sites, sites.c.status == "enrolled", names)
        accepted = _numbers(db, contributions, contributions.c.state == "accepted", names)
        newest = {
            row["study"]: row
            for row in _rows(
                db,
                sa.select(releases).where(
                    releases.c.study.in_(names), releases.c.state == "current"
                ),
            )
        }
    for row in found.rows:
        name = row["name"]
        row |= {
            "n_sites": enrolled.get(name, 0),
            "n_accepted": accepted.get(name, 0),
            "release": newest.get(name),
        }
    return found


def _numbers(db: sa.Connection, table: sa.Table, fits: Any, names: Sequence[str]) -> dict[str, int]:
    query = (
        sa.select(table.c.study, sa.func.count())
        .where(table.c.study.in_(names), fits)
        .group_by(table.c.study)
    )
    return {str(study): int(n) for study, n in db.execute(query)}


@dataclass(frozen=True)
class Numbers:
    """How many sites, contributions and open invitations a study has."""

    sites: dict[str, int]
    contributions: dict[str, int]
    invitations: int

    @property
    def enrolled(self) -> int:
        """Sites whose key is good."""
        return self.sites.get("enrolled", 0)

    @property
    def accepted(self) -> int:
        """Contributions that the next release uses."""
        return self.contributions.get("accepted", 0)


def numbers(store: Store, study: str) -> Numbers:
    """Count what a study has."""
    with store.reading() as db:
        found = []
        for table, column in ((sites, sites.c.status), (contributions, contributions.c.state)):
            query = (
                sa.select(column, sa.func.count()).where(table.c.study == study).group_by(column)
            )
            found.append({str(state): int(n) for state, n in db.execute(query)})
        waiting = sa.select(invitations.c.hash).where(
            invitations.c.study == study,
            invitations.c.used.is_(None),
            invitations.c.expires > now(),
        )
        return Numbers(found[0], found[1], _count(db, waiting))


def site_pages(store: Store, study: str, page: int, size: int, *, like: str = "") -> Paged:
    """Return a page of a study's sites by name, each with all its contributions, newest first."""
    query = sa.select(sites).where(sites.c.study == study)
    if like:
        query = query.where(sa.func.lower(sites.c.name).contains(like.lower(), autoescape=True))
    with store.reading() as db:
        found = _paged(db, query, (sites.c.name,), page, size)
        own = _contributions(db, study, [row["name"] for row in found.rows])
    for row in found.rows:
        row["contributions"] = [one for one in own if one["site"] == row["name"]]
    return found


def site(store: Store, study: str, name: str) -> Row | None:
    """Return a site with all its contributions, newest first."""
    with store.reading() as db:
        found = _rows(db, sa.select(sites).where(sites.c.study == study, sites.c.name == name))
        return {**found[0], "contributions": _contributions(db, study, [name])} if found else None


def _contributions(db: sa.Connection, study: str, names: Sequence[str]) -> list[Row]:
    query = sa.select(contributions).where(
        contributions.c.study == study, contributions.c.site.in_(names)
    )
    rows = _rows(db, query.order_by(contributions.c.sequence.desc()))
    return [{**row, "guarantee": json.loads(row["guarantee"])} for row in rows]


def contribution(store: Store, study: str, digest: str) -> Row | None:
    """Return a contribution, and the numbers of the releases that it is part of."""
    with store.reading() as db:
        query = sa.select(contributions).where(
            contributions.c.study == study, contributions.c.digest == digest
        )
        found = _rows(db, query)
        if not found:
            return None
        used = sa.select(releases.c.sequence, releases.c.state).join(
            members, members.c.release == releases.c.digest
        )
        used = (
            used.where(members.c.contribution == digest)
            .order_by(releases.c.sequence.desc())
            .limit(20)
        )
        return {
            **found[0],
            "guarantee": json.loads(found[0]["guarantee"]),
            "releases": _rows(db, used),
        }


def timeline(store: Store, study: str) -> list[tuple[str, str]]:
    """Return when each contribution came and what became of it."""
    columns = contributions.c.received, contributions.c.state
    with store.reading() as db:
        found = db.execute(
            sa.select(*columns).where(contributions.c.study == study).order_by(columns[0])
        )
        return [(str(received), str(state)) for received, state in found]


def release_pages(store: Store, study: str, page: int, size: int) -> Paged:
    """Return a page of a study's releases, newest first."""
    with store.reading() as db:
        query = sa.select(releases).where(releases.c.study == study)
        found = _paged(db, query, (releases.c.sequence.desc(),), page, size)
    for row in found.rows:
        row["guarantee"] = json.loads(row["guarantee"])
    return found


def audit_pages(store: Store, page: int, size: int, *, study: str | None = None) -> Paged:
    """Return a page of the audit log, newest first, each entry with whether its hash fits it."""
    query = sa.select(audit) if study is None else sa.select(audit).where(audit.c.study == study)
    with store.reading() as db:
        found = _paged(db, query, (audit.c.number.desc(),), page, size)
    for row in found.rows:
        row["fits"] = entry_hash(row) == row["hash"]
        row["facts"] = json.loads(row["facts"])
    return found
