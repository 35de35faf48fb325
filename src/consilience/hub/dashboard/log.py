"""The page of the audit log."""

from __future__ import annotations

from fastapi import Response

from consilience.hub.dashboard import queries
from consilience.hub.dashboard.visits import Visit
from consilience.hub.store.audit import MOST_WALKED, Chain

MANY = 50  # entries on one page


def show_audit(visit: Visit) -> Response:
    """Show the audit log, newest first, and whether its chain is whole."""
    asked = visit.request.query_params
    only = visit.hub.study(asked["study"])[0]["name"] if asked.get("study") else None
    chain: Chain = visit.request.app.state.chain
    if asked.get("verify") == "again":
        chain.forget()
        return visit.redirect("/audit" + (f"?study={only}" if only else ""))
    listed = queries.audit_pages(visit.hub.store, visit.number(), MANY, study=only)
    verdict = chain.verify(visit.hub.store, most=MOST_WALKED)
    return visit.page("audit.html", entries=listed, verdict=verdict, only=only)
