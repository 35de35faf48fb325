"""What the dashboard reads from the database: counts, and pages of rows.

The cost of a page does not grow with the number of rows. Statements that change anything are in
`store`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from consilience.hub.store import Row, Store, now
from consilience.hub.store.audit import entry_hash
from consilience.hub.store.database import fetch_row, fetch_rows
from consilience.hub.store.tables import (
    audit,
    contributions,
    invitations,
    members,
    releases,
    sites,
    studies,
)
from consilience.study.records import PublicFile
from consilience.study.study import Study

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


def study_pages(store: Store, page: int, size: int) -> Paged:
    """Return a page of studies, newest first, each with its counts and current release."""
    query = sa.select(studies).order_by(studies.c.created.desc(), studies.c.name)
    with store.reading() as db:
        listed = _get_page(db, query, page, size)
        names = [row["name"] for row in listed.rows]
        enrolled, accepted = (
            _count_by(db, state.table.c.study, state.table.c.study.in_(names), state == value)
            for state, value in (
                (sites.c.status, "enrolled"),
                (contributions.c.state, "accepted"),
            )
        )
        current = releases.c.study.in_(names), releases.c.state == "current"
        newest = {row["study"]: row for row in fetch_rows(db, sa.select(releases).where(*current))}
    for row in listed.rows:
        name = row["name"]
        row |= {"n_sites": enrolled[name], "n_accepted": accepted[name]}
        row["release"] = newest.get(name)
    return listed


class Numbers(NamedTuple):
    """How many sites and contributions a study has, by state, and how many open invitations."""

    sites: Counter[str]
    contributions: Counter[str]
    invitations: int


def public_files(store: Store, study: Study) -> list[Row]:
    """List a study's public files, what they are used for, and whether the hub has them."""
    parts: dict[str, tuple[PublicFile, list[str]]] = {}
    for part, use in ((study.public, "combining"), (study.test, "measuring releases")):
        if part is not None:
            parts.setdefault(part.sha256, (part, []))[1].append(use)
    return [
        {
            "file": part.file,
            "sha256": part.sha256,
            "uses": " and ".join(uses),
            "there": store.file(part.sha256),
        }
        for part, uses in parts.values()
    ]


def numbers(store: Store, study: str) -> Numbers:
    """Count what a study has."""
    unused = sa.select(invitations.c.hash).where(
        invitations.c.study == study, invitations.c.used.is_(None), invitations.c.expires > now()
    )
    with store.reading() as db:
        return Numbers(
            _count_by(db, sites.c.status, sites.c.study == study),
            _count_by(db, contributions.c.state, contributions.c.study == study),
            _count(db, unused),
        )


def _count_by(
    db: sa.Connection, column: sa.Column[str], *conditions: sa.ColumnElement[bool]
) -> Counter[str]:
    """Count rows by the value of a column."""
    query = sa.select(column, sa.func.count()).where(*conditions).group_by(column)
    return Counter({str(value): int(n) for value, n in db.execute(query)})


def site_pages(store: Store, study: str, page: int, size: int, *, like: str = "") -> Paged:
    """Return a page of a study's sites by name, each with all its contributions, newest first."""
    query = sa.select(sites).where(sites.c.study == study).order_by(sites.c.name)
    if like:
        query = query.where(sa.func.lower(sites.c.name).contains(like.lower(), autoescape=True))
    with store.reading() as db:
        listed = _get_page(db, query, page, size)
        own = _contributions_of(db, study, [row["name"] for row in listed.rows])
    for row in listed.rows:
        row["contributions"] = [one for one in own if one["site"] == row["name"]]
    return listed


def site(store: Store, study: str, name: str) -> Row | None:
    """Return a site with all its contributions, newest first."""
    with store.reading() as db:
        row = fetch_row(db, sa.select(sites).where(sites.c.study == study, sites.c.name == name))
        return row and {**row, "contributions": _contributions_of(db, study, [name])}


def _contributions_of(db: sa.Connection, study: str, names: Sequence[str]) -> list[Row]:
    """Return all contributions of some of a study's sites, newest first."""
    of_sites = contributions.c.study == study, contributions.c.site.in_(names)
    query = sa.select(contributions).where(*of_sites)
    return fetch_rows(db, query.order_by(contributions.c.sequence.desc()))


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


def timeline(store: Store, study: str) -> list[tuple[str, str]]:
    """Return when each contribution was received, and its state."""
    columns = contributions.c.received, contributions.c.state
    query = sa.select(*columns).where(contributions.c.study == study).order_by(columns[0])
    return [(row["received"], row["state"]) for row in store.fetch_all(query)]


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
