"""Pages about sites: inviting and revoking them, what they spent, their contributions."""

from __future__ import annotations

import math
from urllib.parse import quote

from fastapi import Response

from consilience.files import certificate
from consilience.files.contribution import KIND, Contribution
from consilience.files.sealed import SealedFile
from consilience.hub.dashboard import queries
from consilience.hub.dashboard.releases import download_certificate
from consilience.hub.dashboard.visits import Visit
from consilience.hub.hub import FORGOTTEN
from consilience.hub.state import SiteState, invitation_state, read_study
from consilience.hub.store import Row
from consilience.privacy.guarantee import Guarantee
from consilience.protocol import DIGEST, SITE_NAME, Refusal
from consilience.study.study import Study

MANY = 50  # rows on one page
MOST_CHECKED = 8 << 20  # bytes of a contribution that are read again for its certificate


# -------------------------------------------------------------------------------------- inviting


def show_invite(visit: Visit, problem: str | None = None, status: int = 200) -> Response:
    """Ask whom to invite, and list the invitations so far."""
    row, _ = visit.study()
    if row["status"] != "open":
        raise Refusal("study-closed", f"The study {row['name']!r} is closed.")
    listed = visit.hub.store.invitations(row["name"])[:MANY]
    for one in listed:
        one["state"] = invitation_state(one, row)
    asked = visit.form or visit.request.query_params
    is_frozen = visit.hub.store.roster(row["name"]) is not None
    facts = {"row": row, "problem": problem, "invitations": listed, "asked": asked}
    return visit.page("invite.html", status, **facts, is_frozen=is_frozen)


def invite(visit: Visit) -> Response:
    """Make an invitation and show its code, once."""
    row, _ = visit.study()
    site = visit.form.get("site", "").strip() or None
    fetch_only = visit.form.get("fetch_only") == "yes"
    try:
        days = float(visit.form.get("days", "7"))
    except ValueError:
        days = math.nan
    try:
        code, expires = visit.hub.invite(
            row["name"], visit.someone.actor, site=site, fetch_only=fetch_only, days=days
        )
    except Refusal as refusal:
        if refusal.code != "malformed":
            raise
        return show_invite(visit, refusal.message, 400)
    facts = {"row": row, "code": code, "expires": expires, "site": site, "fetch_only": fetch_only}
    return visit.page("invited.html", **facts, address=str(visit.request.base_url).rstrip("/"))


# ----------------------------------------------------------------------------------------- sites


def show_sites(visit: Visit) -> Response:
    """List a study's sites."""
    row, study = visit.study()
    like = visit.request.query_params.get("like", "").strip()[:100]
    like = like if like.isprintable() else ""  # no name has it, and PostgreSQL takes no zero byte
    listed = queries.site_pages(visit.hub.store, row["name"], visit.number(), MANY, like=like)
    state = read_study(visit.hub.store, row, study)
    return visit.page("sites.html", row=row, state=state, sites=add_totals(listed), like=like)


def show_site(visit: Visit) -> Response:
    """Show one site of a study."""
    row, study, site = _get_site(visit)
    facts = show_spending(visit, row["name"], site.row["name"])
    return visit.page("site.html", 200, site.confirmed, row=row, study=study, site=site, **facts)


def show_revoke(visit: Visit) -> Response:
    """Ask whether to revoke a site's key."""
    row, _, site = _get_site(visit)
    return visit.page("revoke.html", row=row, site=site)


def revoke_key(visit: Visit) -> Response:
    """Revoke a site's key."""
    row, _, site = _get_site(visit)
    withdraw = visit.form.get("withdraw") == "yes"
    name = site.row["name"]
    visit.hub.revoke(row["name"], name, visit.someone.actor, withdraw=withdraw)
    return visit.redirect(f"/studies/{row['name']}/sites/{quote(name)}?done=revoked")


def _get_site(visit: Visit) -> tuple[Row, Study, SiteState]:
    row, study = visit.study()
    name, who = visit["site"], visit.someone
    may_see = SITE_NAME.fullmatch(name) and (who.account or who.name == name)
    site = queries.site(visit.hub.store, row["name"], name) if may_see else None
    if site is None:
        raise Refusal("not-found", "There is no such site in this study.")
    state = read_study(visit.hub.store, row, study)
    return row, study, SiteState(site, state, visit.hub.store.standing(row["name"], name))


def show_spending(visit: Visit, study: str, site: str) -> dict[str, object]:
    """Return a page of a site's contributions, newest first, and the total of all of them."""
    store, page = visit.hub.store, visit.number("contributions")
    listed = queries.contribution_pages(store, study, site, page, MANY)
    for row in listed.rows:
        _add_guarantees(row)
    newest = queries.newest_contribution(store, study, site)
    return {"spent": listed, "whole": newest and Guarantee.from_dict(newest["total"])}


def _add_guarantees(row: Row) -> Row:
    row["own"], row["total"] = (Guarantee.from_dict(row[name]) for name in ("guarantee", "total"))
    return row


def add_totals(listed: queries.Paged) -> queries.Paged:
    """Add to each site what its contribution promises, and what all of them add up to."""
    for row in listed.rows:
        newest = row["newest"] and _add_guarantees(row["newest"])
        row["total"] = newest and newest["total"]
    return listed


# --------------------------------------------------------------------------------- contributions


def show_contribution(visit: Visit) -> Response:
    """Show a contribution's certificate to its site and to coordinators."""
    row, study, own, words = _get_contribution(visit)
    return visit.page("contribution.html", row=row, study=study, contribution=own, words=words)


def download_contribution_certificate(visit: Visit) -> Response:
    """Return a contribution's certificate as a file."""
    row, _, own, words = _get_contribution(visit)
    name = f"{row['name']}-{own['site'].replace(' ', '-')}-{own['sequence']}-certificate"
    return download_certificate(visit, words, name)


def _get_contribution(visit: Visit) -> tuple[Row, Study, Row, certificate.Page]:
    row, study = visit.study()
    digest, who = visit["digest"], visit.someone
    is_digest = DIGEST.fullmatch(digest)
    own = queries.contribution(visit.hub.store, row["name"], digest) if is_digest else None
    if own is None or not (who.account or who.name == own["site"]):
        raise Refusal("not-found", "There is no such contribution in this study.")
    if not own["kept"]:
        raise Refusal("not-found", FORGOTTEN)
    content = visit.hub.store.content(own["sha256"])
    if own["size"] <= MOST_CHECKED:
        loaded = Contribution.load(content, trusted=study.trusted)
    else:  # its tensors were checked when it arrived
        loaded = Contribution(SealedFile(content, KIND).hollow)
    return row, study, own, certificate.of_contribution(loaded)
