"""The tables of the hub's database, and the steps that bring an older database up to date."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from consilience.privacy.guarantee import Guarantee, compose

tables = sa.MetaData()


class _Facts(sa.TypeDecorator[dict[str, Any]]):
    """Facts as JSON text."""

    impl, cache_ok = sa.Text, True

    def process_bind_param(self, value: dict[str, Any] | None, _: sa.Dialect) -> str:
        return json.dumps(value)

    def process_result_value(self, value: str | None, _: sa.Dialect) -> Any:
        return None if value is None else json.loads(value)  # None: an outer join without a row


def _table(name: str, *columns: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(name, tables, *columns)


def _text(name: str, *more: sa.ForeignKey, **settings: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text, *more, **{"nullable": False, **settings})


def _whole(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


versions = _table("versions", sa.Column("version", sa.Integer, primary_key=True), _text("applied"))
settings = _table("settings", _text("name", primary_key=True), _text("value"))
accounts = _table(  # the name of the table is from when no account had another role
    "coordinators",
    _text("name", primary_key=True),
    _text("password"),
    _text("created"),
    _text("status"),
    _text("role"),
    sa.Column("every_study", sa.Boolean, nullable=False),
    sa.Column("needs_factor", sa.Boolean, nullable=False, server_default=sa.false()),
)
factors = _table(  # second factors: codes of an app
    "factors",
    _text("account", sa.ForeignKey("coordinators.name"), primary_key=True),
    _text("secret"),  # encrypted under the hub's key
    _text("confirmed", nullable=True),
    _whole("step"),  # the newest interval whose code was used
)
recovery_codes = _table(
    "recovery_codes",
    _text("account", sa.ForeignKey("coordinators.name"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    _text("hash"),
)
sessions = _table(
    "sessions",
    _text("hash", primary_key=True),
    _text("coordinator", sa.ForeignKey("coordinators.name")),
    _text("kind"),
    _text("created"),
    _text("expires"),
)
known_addresses = _table(  # from which coordinators have logged in
    "known_addresses",
    _text("coordinator", sa.ForeignKey("coordinators.name"), primary_key=True),
    _text("address", primary_key=True),
    _text("seen"),
)
assignments = _table(  # the studies of accounts that are not for every study
    "assignments",
    _text("account", sa.ForeignKey("coordinators.name"), primary_key=True),
    _text("study", sa.ForeignKey("studies.name"), primary_key=True),
)
identities = _table(  # who logs in at an identity provider as which account
    "identities",
    _text("issuer", primary_key=True),
    _text("subject", primary_key=True),
    _text("account", sa.ForeignKey("coordinators.name"), index=True),
    _text("bound"),
)
studies = _table(
    "studies",
    _text("name", primary_key=True),
    _text("digest", unique=True),
    _text("text"),
    _text("status"),
    _text("created"),
    _text("created_by"),
    _whole("changes"),  # how often its set of members has changed
    _whole("combined"),  # the change up to which it was combined
    _text("changed", nullable=True),
    _text("problem", nullable=True),  # why combining failed, or why its release is withheld
    sa.Column("withheld", sa.Boolean, nullable=False, server_default=sa.false()),
    # How often combining was begun since and neither finished nor given up.
    sa.Column("tries", sa.BigInteger, nullable=False, server_default=sa.text("0")),
)
# What another set of members makes of a study's row: nothing was tried with them.
CHANGED = {"changes": studies.c.changes + 1, "problem": None, "withheld": False, "tries": 0}
# States of contributions that count: taken by themselves, or in a batch that was listed.
IN_USE = ("accepted", "listed")
files = _table("files", _text("sha256", primary_key=True), _whole("size"), _text("received"))
sites = _table(
    "sites",
    _text("study", sa.ForeignKey("studies.name"), primary_key=True),
    _text("name", primary_key=True),
    _text("key"),
    _text("status"),
    sa.Column("fetch_only", sa.Boolean, nullable=False),
    _text("enrolled"),
    sa.Index("sites_by_key", "study", "key"),  # every request of a site looks it up
)
keys = _table(
    "keys",
    _text("study", sa.ForeignKey("studies.name"), primary_key=True),
    _text("key", primary_key=True),
    _text("site"),
    _text("added"),
    _text("ended", nullable=True),
    _text("reason", nullable=True),
)
invitations = _table(
    "invitations",
    _text("hash", primary_key=True),
    _text("study", sa.ForeignKey("studies.name")),
    _text("site", nullable=True),
    sa.Column("fetch_only", sa.Boolean, nullable=False),
    _text("created"),
    _text("created_by"),
    _text("expires"),
    _text("used", nullable=True),
    _text("used_by", nullable=True),
)
contributions = _table(
    "contributions",
    _text("digest", primary_key=True),
    _text("study"),
    _text("site"),
    _whole("sequence"),
    _text("state"),
    _text("sha256"),
    _whole("size"),
    sa.Column("guarantee", _Facts, nullable=False),
    _text("received"),
    _text("changed"),
    # What everything that the site submitted so far promises, so that no page adds it up again.
    sa.Column("total", _Facts),
    sa.Column("kept", sa.Boolean, nullable=False, server_default=sa.true()),  # its bytes
    # Whether it holds a share of noise and no record, in a blind study.
    sa.Column("only_noise", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.ForeignKeyConstraint(["study", "site"], ["sites.study", "sites.name"]),
    sa.UniqueConstraint("study", "site", "sequence"),
    sa.Index(
        "one_accepted",
        "study",
        "site",
        unique=True,
        sqlite_where=sa.text("state = 'accepted'"),
        postgresql_where=sa.text("state = 'accepted'"),
    ),
    sa.Index(
        "withdrawn_contributions",
        "study",
        "site",
        "sequence",
        sqlite_where=sa.text("state = 'withdrawn'"),
        postgresql_where=sa.text("state = 'withdrawn'"),
    ),
    sa.Index(
        "kept_contributions",
        "study",
        "site",
        "sequence",
        sqlite_where=sa.text("kept = 1"),
        postgresql_where=sa.text("kept"),
    ),
    sa.Index(
        "listed_contributions",
        "study",
        "site",
        sqlite_where=sa.text("state = 'listed'"),
        postgresql_where=sa.text("state = 'listed'"),
    ),
)
# A small contribution is kept in the database: one transaction, one disk flush, and no file that a
# crash could leave behind.
bodies = _table(
    "bodies",
    _text("sha256", primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
)
releases = _table(
    "releases",
    _text("digest", primary_key=True),
    _text("study", sa.ForeignKey("studies.name")),
    _whole("sequence"),
    _text("state"),
    _whole("change"),
    _text("request", nullable=True),  # idempotency key of the coordinator's command
    _text("sha256"),
    _whole("size"),
    _whole("n_sites"),
    sa.Column("guarantee", _Facts, nullable=False),
    _text("created"),
    sa.Column("kept", sa.Boolean, nullable=False, server_default=sa.true()),  # its bytes
    sa.UniqueConstraint("study", "sequence"),
    sa.UniqueConstraint("study", "request"),
)
members = _table(
    "members",
    _text("release", sa.ForeignKey("releases.digest"), primary_key=True),
    _text("contribution", sa.ForeignKey("contributions.digest"), primary_key=True, index=True),
)
# A blind study: who takes part, who holds pads, and what keyholders acknowledged and opened.
rosters = _table(
    "rosters",
    _text("study", sa.ForeignKey("studies.name"), primary_key=True),
    _text("digest"),
    sa.Column("content", sa.LargeBinary, nullable=False),
    _text("frozen"),
)
cards = _table(
    "cards",
    _text("study", sa.ForeignKey("studies.name"), primary_key=True),
    _text("holder", primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
    _text("received"),
)
acknowledgements = _table(
    "acknowledgements",
    _text("contribution", sa.ForeignKey("contributions.digest"), primary_key=True),
    _text("holder", primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
    _text("received"),
)
batches = _table(
    "batches",
    _text("digest", primary_key=True),
    _text("study", sa.ForeignKey("studies.name")),
    _whole("number"),
    _text("state"),
    _text("listed"),
    _text("changed"),
    sa.UniqueConstraint("study", "number"),
)
listed = _table(  # which batch a contribution is in: one at most, for good
    "listed",
    _text("contribution", sa.ForeignKey("contributions.digest"), primary_key=True),
    _text("batch", sa.ForeignKey("batches.digest"), index=True),
)
openings = _table(
    "openings",
    _text("batch", sa.ForeignKey("batches.digest"), primary_key=True),
    _text("holder", primary_key=True),
    _whole("number"),  # in the keyholder's log
    _text("digest"),
    _text("sha256"),
    _whole("size"),
    _text("received"),
    sa.Index("openings_by_holder", "holder", "number", unique=True),
)
claims = _table(
    "claims",
    _text("study", sa.ForeignKey("studies.name"), primary_key=True),
    _text("worker"),
    _text("until"),
)
nonces = _table(
    "nonces",
    _text("key", primary_key=True),
    _text("nonce", primary_key=True),
    _text("expires", index=True),
)
audit = _table(
    "audit",
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    _text("time"),
    _text("actor"),
    _text("action"),
    _text("study", nullable=True, index=True),
    _text("facts"),
    _text("previous"),
    _text("hash"),
)


# Studies that are still being written: facts in the layout of a study file, complete or not.
drafts = _table(
    "drafts",
    _text("id", primary_key=True),
    _text("owner", sa.ForeignKey("coordinators.name"), index=True),
    sa.Column("facts", _Facts, nullable=False),
    _whole("version"),  # counts its changes
    _text("created"),
    _text("changed"),
    _text("link", nullable=True, index=True),  # hash of the token of its link for sites
    sa.Column("trial", _Facts, nullable=False),  # what became of its last trial; None: no trial
    _text("trial_until", nullable=True),  # while one goes on: when it is ended at the latest
)


def _keep_small_files(db: sa.Connection) -> None:
    bodies.create(db, checkfirst=True)
    for index in sites.indexes:
        index.create(db, checkfirst=True)


def _file_alerts_by_release(db: sa.Connection) -> None:
    """Say of which release each list of unusual members speaks; it was its study's newest."""
    current = sa.select(releases.c.digest, settings.c.value, settings.c.name).where(
        settings.c.name == sa.literal("alerts ") + releases.c.study, releases.c.state == "current"
    )
    known = [dict(row) for row in db.execute(current).mappings()]
    db.execute(settings.delete().where(settings.c.name.startswith("alerts ")))
    for row in known:
        name = f"alerts {row['digest']}"
        db.execute(settings.insert().values(name=name, value=row["value"]))


def _limit_history(db: sa.Connection) -> None:
    """Add up what each site promised so far, and note whose bytes are kept: so far all."""
    known_addresses.create(db, checkfirst=True)
    there = {column["name"] for column in sa.inspect(db).get_columns("contributions")}
    if "kept" not in there:
        for column in ("total TEXT", "kept BOOLEAN NOT NULL DEFAULT TRUE"):
            db.execute(sa.text(f"ALTER TABLE contributions ADD COLUMN {column}"))
        columns = contributions.c
        query = sa.select(columns.digest, columns.study, columns.site, columns.guarantee)
        totals: dict[tuple[str, str], dict[str, Any]] = {}
        for digest, study, site, own in db.execute(query.order_by(columns.sequence)).all():
            totals[study, site] = add_guarantee(totals.get((study, site)), own)
            same = contributions.update().where(columns.digest == digest)
            db.execute(same.values(total=totals[study, site]))
    for index in contributions.indexes:
        index.create(db, checkfirst=True)


def _limit_releases(db: sa.Connection) -> None:
    """Note which releases' bytes are kept: so far all."""
    if "kept" not in {column["name"] for column in sa.inspect(db).get_columns("releases")}:
        db.execute(sa.text("ALTER TABLE releases ADD COLUMN kept BOOLEAN NOT NULL DEFAULT TRUE"))


def _record_outcomes(db: sa.Connection) -> None:
    """Say of each study whether a release is withheld, and of each release whom it lacks.

    Both used to be inferred. Where the reasons for withholding were lost, the hub judges again.
    """
    if "tries" not in {column["name"] for column in sa.inspect(db).get_columns("studies")}:
        for column in (
            "withheld BOOLEAN NOT NULL DEFAULT FALSE",
            "tries BIGINT NOT NULL DEFAULT 0",
        ):
            db.execute(sa.text(f"ALTER TABLE studies ADD COLUMN {column}"))
    columns = studies.c
    query = sa.select(columns.name, columns.changes, columns.combined, columns.problem)
    for name, changes, combined, problem in db.execute(query).all():
        marked = settings.c.name == f"withheld {name}"
        number = db.execute(sa.select(settings.c.value).where(marked)).scalar()
        db.execute(settings.delete().where(marked))
        if problem is None:
            continue
        same, is_now = studies.update().where(columns.name == name), changes == combined
        current = releases.c.study == name, releases.c.state == "current"
        of_change = sa.select(releases.c.digest).where(*current, releases.c.change == combined)
        lacking = db.execute(of_change).scalar()
        if is_now and number == str(combined):
            is_said = problem.startswith("A release was made and withheld.")
            again = {"problem": None, "changes": changes + 1}
            db.execute(same.values({"withheld": True} if is_said else again))
        elif lacking is not None and " is left out: " in problem:
            db.execute(settings.insert().values(name=f"absent {lacking}", value=problem))
            db.execute(same.values(problem=None))
        elif not is_now:
            db.execute(same.values(problem=None))


def _add_blind_studies(db: sa.Connection) -> None:
    """Say of each contribution whether it holds noise alone: so far none."""
    if "only_noise" not in {each["name"] for each in sa.inspect(db).get_columns("contributions")}:
        column = "only_noise BOOLEAN NOT NULL DEFAULT FALSE"
        db.execute(sa.text(f"ALTER TABLE contributions ADD COLUMN {column}"))
    for made in (rosters, cards, acknowledgements, batches, listed, openings):
        made.create(db, checkfirst=True)
    for index in contributions.indexes:
        index.create(db, checkfirst=True)


def _add_roles(db: sa.Connection) -> None:
    """Give each account a role: so far all were coordinators of every study."""
    if "role" not in {column["name"] for column in sa.inspect(db).get_columns(accounts.name)}:
        for column in (
            "role TEXT NOT NULL DEFAULT 'coordinator'",
            "every_study BOOLEAN NOT NULL DEFAULT TRUE",
        ):
            db.execute(sa.text(f"ALTER TABLE {accounts.name} ADD COLUMN {column}"))
    assignments.create(db, checkfirst=True)


def _add_drafts(db: sa.Connection) -> None:
    drafts.create(db, checkfirst=True)


def _add_identities(db: sa.Connection) -> None:
    identities.create(db, checkfirst=True)


def _add_factors(db: sa.Connection) -> None:
    """Add second factors: so far no account needs one."""
    known = {each["name"] for each in sa.inspect(db).get_columns(accounts.name)}
    if "needs_factor" not in known:
        column = "needs_factor BOOLEAN NOT NULL DEFAULT FALSE"
        db.execute(sa.text(f"ALTER TABLE {accounts.name} ADD COLUMN {column}"))
    for made in (factors, recovery_codes):
        made.create(db, checkfirst=True)


def add_guarantee(before: dict[str, Any] | None, own: dict[str, Any]) -> dict[str, Any]:
    """Return what a contribution promises together with all that its site submitted before."""
    if before is None:
        return own
    return compose(Guarantee.from_dict(before), Guarantee.from_dict(own)).as_dict()


# Each entry leads from one version of the schema to the next.
MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (
    tables.create_all,
    _keep_small_files,
    _file_alerts_by_release,
    _limit_history,
    _limit_releases,
    _record_outcomes,
    _add_blind_studies,
    _add_roles,
    _add_drafts,
    _add_identities,
    _add_factors,
)
