"""Who signed a request: the site with the current key, and the nonce that works once."""

from __future__ import annotations

import sqlalchemy as sa

from consilience.hub.store.database import Row, fetch_rows, now
from consilience.hub.store.tables import contributions, keys, nonces, sites, studies
from consilience.protocol import CLOCK_SECONDS, Refusal

NONCE_SECONDS = 2 * CLOCK_SECONDS + 1.0  # as long as a request could be sent again

# Statements that every submission needs, built once.
_SIGNER = (
    sa.select(sites, studies.c.status.label("study_status"))
    .join(studies, studies.c.name == sites.c.study)
    .where(sites.c.study == sa.bindparam("study"), sites.c.key == sa.bindparam("key"))
)
_SENDER = (
    _SIGNER.add_columns(*(column.label(f"its_{column.name}") for column in contributions.c))
    .outerjoin(
        contributions,
        (contributions.c.study == sites.c.study) & (contributions.c.site == sites.c.name),
    )
    .order_by(contributions.c.sequence.desc())
)
_ADD_NONCE = nonces.insert()


def get_signer(db: sa.Connection, study: str, key: str) -> Row:
    """Return the site whose current key this is, or refuse."""
    rows = fetch_rows(db, _SIGNER, study=study, key=key)
    if rows and rows[0]["status"] == "enrolled":
        return rows[0]
    if fetch_rows(db, sa.select(keys).where(keys.c.study == study, keys.c.key == key)):
        raise Refusal("key-revoked", "The key was replaced or revoked.")
    raise Refusal("not-authenticated", "The key is not enrolled in this study.")


def get_sender(db: sa.Connection, study: str, key: str) -> tuple[Row, list[Row]]:
    """Return the site whose current key this is and its contributions, newest first, or refuse."""
    rows = fetch_rows(db, _SENDER, study=study, key=key)
    if not rows or rows[0]["status"] != "enrolled":
        return get_signer(db, study, key), []  # refuses, and says why
    names = [column.name for column in contributions.c]
    return rows[0], [
        {name: row[f"its_{name}"] for name in names}
        for row in rows
        if row["its_digest"] is not None
    ]


def spend_nonce(db: sa.Connection, key: str, nonce: str, seconds: float = NONCE_SECONDS) -> None:
    """Store a nonce for as long as its request could be sent again; refuse a known one."""
    try:
        db.execute(_ADD_NONCE, {"key": key, "nonce": nonce, "expires": now(seconds=seconds)})
    except sa.exc.IntegrityError:
        raise Refusal("replayed", "This request was received before.") from None
