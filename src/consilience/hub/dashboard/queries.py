"""What the dashboard reads from the database: counts, and pages of rows.

The cost of a page does not grow with the number of rows. Statements that change anything are in
`store`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from consilience.hub.store import Row, Store, now
from consilience.hub.store.audit import entry_hash
from consilience.hub.store.database import fetch_row, fetch_rows
from consilience.hub.store.tables import (
    IN_USE,
    audit,
    contributions,
    members,
    releases,
    sites,
    studies,
)

Select = sa.Select[Any]


@dataclass(frozen=True)
class Paged:
    """One page of a list: its rows, its number from 1, and how many rows there are in total."""

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


def _count(db: sa.Connection, query: Select) -> int:
    return int(db.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one())


def _get_page(db: sa.Connection, query: Select, page: int, size: int) -> Paged:
    """Return one page of an ordered query; a page that does not exist becomes the nearest one."""
    total = _count(db, query.order_by(None))
    page = min(max(1, page), max(1, -(-total // size)))
    rows = fetch_rows(db, query.limit(size).offset((page - 1) * size))
    return Paged(rows, page, size, total)


def study_pages(
    store: Store, page: int, size: int, *, only: Collection[str] | None = None
) -> Paged:
    """Return a page of studies, or `only` of some, newest first."""
    query = sa.select(studies).order_by(studies.c.created.desc(), studies.c.name)
    if only is not None:
        query = query.where(studies.c.name.in_(only))
    with store.reading() as db:
        return _get_page(db, query, page, size)


def site_pages(store: Store, study: str, page: int, size: int, *, like: str = "") -> Paged:
    """Return a page of a study's sites by name, each with its newest and its used contribution."""
    query = sa.select(sites).where(sites.c.study == study).order_by(sites.c.name)
    if like:
        query = query.where(sa.func.lower(sites.c.name).contains(like.lower(), autoescape=True))
    with store.reading() as db:
        listed = _get_page(db, query, page, size)
        names = [row["name"] for row in listed.rows]
        of_sites = contributions.c.study == study, contributions.c.site.in_(names)
        used = sa.select(contributions).where(*of_sites, contributions.c.state.in_(IN_USE))
        accepted = {row["site"]: row for row in fetch_rows(db, used)}
        others = [name for name in names if name not in accepted]
        newest = {name: _get_newest(db, study, name) for name in others}
    for row in listed.rows:
        row["accepted"] = accepted.get(row["name"])
        row["newest"] = row["accepted"] or newest[row["name"]]
    return listed


def _get_newest(db: sa.Connection, study: str, site: str) -> Row | None:
    own = contributions.c.study == study, contributions.c.site == site
    query = sa.select(contributions).where(*own).order_by(contributions.c.sequence.desc())
    return fetch_row(db, query.limit(1))


def newest_contribution(store: Store, study: str, site: str) -> Row | None:
    """Return a site's newest contribution."""
    with store.reading() as db:
        return _get_newest(db, study, site)


def site(store: Store, study: str, name: str) -> Row | None:
    """Return a site's row."""
    return store.fetch_one(sa.select(sites).where(sites.c.study == study, sites.c.name == name))


def contribution_pages(store: Store, study: str, site: str, page: int, size: int) -> Paged:
    """Return a page of a site's contributions, newest first."""
    own = contributions.c.study == study, contributions.c.site == site
    query = sa.select(contributions).where(*own).order_by(contributions.c.sequence.desc())
    with store.reading() as db:
        return _get_page(db, query, page, size)


def contribution(store: Store, study: str, digest: str) -> Row | None:
    """Return a contribution, and the releases that contain it."""
    same = contributions.c.study == study, contributions.c.digest == digest
    containing = (
        sa.select(releases.c.sequence, releases.c.state)
        .join(members, members.c.release == releases.c.digest)
        .where(members.c.contribution == digest)
        .order_by(releases.c.sequence.desc())
        .limit(20)
    )
    with store.reading() as db:
        row = fetch_row(db, sa.select(contributions).where(*same))
        return row and {**row, "releases": fetch_rows(db, containing)}


def timeline(store: Store, study: str, since: str) -> Counter[tuple[str, str]]:
    """Count contributions by when they were received, to the hour or to the day, and by state."""
    is_young = since > now(seconds=-8 * 86400)
    at = sa.func.substr(contributions.c.received, 1, 13 if is_young else 10)
    query = sa.select(at, contributions.c.state, sa.func.count())
    query = query.where(contributions.c.study == study).group_by(at, contributions.c.state)
    end = ":00:00+00:00" if is_young else "T00:00:00+00:00"
    with store.reading() as db:
        return Counter({(f"{time}{end}", state): int(n) for time, state, n in db.execute(query)})


def release_pages(store: Store, study: str, page: int, size: int) -> Paged:
    """Return a page of a study's releases, newest first."""
    query = sa.select(releases).where(releases.c.study == study)
    with store.reading() as db:
        return _get_page(db, query.order_by(releases.c.sequence.desc()), page, size)


def audit_pages(store: Store, page: int, size: int, *, study: str | None = None) -> Paged:
    """Return a page of the audit log, newest first, and for each entry whether its hash fits."""
    query = sa.select(audit) if study is None else sa.select(audit).where(audit.c.study == study)
    with store.reading() as db:
        listed = _get_page(db, query.order_by(audit.c.number.desc()), page, size)
    for row in listed.rows:
        row["fits"] = entry_hash(row) == row["hash"]
        row["facts"] = json.loads(row["facts"])
    return listed
