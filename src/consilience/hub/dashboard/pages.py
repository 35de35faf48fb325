"""The dashboard's addresses: which page is where and who may see it; logging in and out."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import FileResponse

from consilience.hub import auth
from consilience.hub.dashboard import releases, sites, studies
from consilience.hub.dashboard.texts import LOGIN_FIXES
from consilience.hub.dashboard.visits import (
    FORM_COOKIE,
    SITE_COOKIE,
    STATIC,
    VIEW_SECONDS,
    Page,
    Visit,
    end_view,
    is_local_path,
    read_link,
    use_link,
)
from consilience.hub.store import hashed
from consilience.protocol import ERRORS, Refusal


def show_static(visit: Visit) -> Response:
    """Return the stylesheet or the icon."""
    if visit["file"] not in ("style.css", "icon.svg"):
        raise Refusal("not-found", "There is nothing at this address.")
    headers = {
        "cache-control": "public, max-age=31536000, immutable",
        "content-security-policy": "default-src 'none'",
    }
    return FileResponse(STATIC / visit["file"], headers=headers)


def show_api(visit: Visit) -> Response:
    """Describe the addresses for machines, without a script."""
    described = visit.request.app.openapi()["paths"]
    addresses = [
        {"method": method.upper(), "path": path, "text": what["description"]}
        for path, methods in described.items()
        for method, what in methods.items()
    ]
    return visit.page("api.html", addresses=addresses)


def show_home(visit: Visit) -> Response:
    """Send visitors to their first page."""
    who = visit.someone
    return visit.redirect("/studies" if who.is_coordinator else f"/studies/{who.study}")


def show_login(visit: Visit) -> Response:
    """Ask for a coordinator's name and password."""
    if visit.visitor is not None and visit.visitor.is_coordinator:
        return visit.redirect("/studies")
    target = _next_page(visit.request.query_params.get("next"))
    confirmed = () if visit.visitor else ("out",)
    return visit.page("login.html", 200, confirmed, next=target, name="", problem=None)


def log_in(visit: Visit) -> Response:
    """Begin a coordinator's session."""
    settings, request = visit.hub.settings, visit.request
    name, target = visit.form.get("name", "").strip(), _next_page(visit.form.get("next"))
    try:
        password, address = visit.form.get("password", ""), request.client
        logins: auth.Logins = request.app.state.logins
        token, _ = logins.log_in(
            name[:200],
            password,
            address.host if address else "nowhere",
            hours=settings.session_hours,
        )
    except Refusal as refusal:
        fix = LOGIN_FIXES.get(refusal.code, ERRORS[refusal.code][1])
        problem = f"{refusal.message} {fix}"
        return visit.page("login.html", refusal.status, next=target, name=name, problem=problem)
    answer = visit.redirect(target)
    visit.set_cookie(answer, auth.COOKIE, token, int(settings.session_hours * 3600))
    answer.delete_cookie(SITE_COOKIE)
    answer.delete_cookie(FORM_COOKIE)
    return answer


def log_out(visit: Visit) -> Response:
    """End the session."""
    if visit.someone.is_coordinator:
        visit.hub.store.end_session(hashed(visit.someone.secret))
    else:
        end_view(visit.hub, visit.someone)
    answer = visit.redirect("/login?done=out")
    answer.delete_cookie(auth.COOKIE)
    answer.delete_cookie(SITE_COOKIE)
    return answer


def _next_page(path: str | None) -> str:
    return path if path and is_local_path(path) else "/studies"


def show_link(visit: Visit) -> Response:
    """Ask a site whether to open its view, so that merely fetching the link does not use it up."""
    facts = read_link(visit.hub, visit["link"])
    site = visit.hub.store.signer(facts["study"], facts["key"])
    return visit.page("visit.html", site=site["name"], study=facts["study"])


def open_view(visit: Visit) -> Response:
    """Use a site's link and open its view."""
    view, facts = use_link(visit.hub, visit["link"], visit.request.app.state.notes)
    if visit.visitor is not None and visit.visitor.is_coordinator:
        visit.hub.store.end_session(hashed(visit.visitor.secret))
    answer = visit.redirect(f"/studies/{facts['study']}")
    answer.delete_cookie(auth.COOKIE)
    visit.set_cookie(answer, SITE_COOKIE, view, VIEW_SECONDS)
    return answer


# ------------------------------------------------------------------------------------ the addresses


READ = "GET HEAD"
STUDY = "/studies/{study}"
SITE = f"{STUDY}/sites/{{site}}"
CONTRIBUTION = f"{STUDY}/contributions/{{digest}}"
RELEASE = f"{STUDY}/releases/{{number}}"
PAGES = (
    Page(READ, "/static/{file}", "anyone", show_static),
    Page(READ, "/docs", "anyone", show_api),
    Page(READ, "/", "known", show_home),
    Page(READ, "/login", "anyone", show_login),
    Page("POST", "/login", "anyone", log_in),
    Page("POST", "/logout", "known", log_out),
    Page(READ, "/visits/{link}", "anyone", show_link),
    Page("POST", "/visits/{link}", "anyone", open_view),
    Page(READ, "/studies", "coordinator", studies.show_studies),
    Page(READ, "/new-study", "coordinator", studies.show_new_study),
    Page("POST", "/new-study", "coordinator", studies.add_study, is_large=True),
    Page(READ, STUDY, "known", studies.show_study),
    Page(READ, f"{STUDY}/text", "known", studies.show_study_text),
    Page(READ, f"{STUDY}/files/{{file}}", "known", studies.show_public_file),
    Page(READ, f"{STUDY}/invite", "coordinator", sites.show_invite),
    Page("POST", f"{STUDY}/invite", "coordinator", sites.invite),
    Page(READ, f"{STUDY}/close", "coordinator", studies.show_close),
    Page("POST", f"{STUDY}/close", "coordinator", studies.close_study),
    Page(READ, f"{STUDY}/roster", "coordinator", studies.show_roster),
    Page("POST", f"{STUDY}/roster", "coordinator", studies.freeze_roster),
    Page("POST", f"{STUDY}/batches", "coordinator", studies.list_batch),
    Page("POST", f"{STUDY}/batches/{{number}}", "coordinator", studies.leave_out_batch),
    Page(READ, f"{STUDY}/aggregate", "coordinator", releases.show_aggregate),
    Page("POST", f"{STUDY}/aggregate", "coordinator", releases.aggregate),
    Page("POST", f"{STUDY}/budget", "coordinator", releases.set_budget),
    Page(READ, f"{STUDY}/sites", "coordinator", sites.show_sites),
    Page(READ, SITE, "known", sites.show_site),
    Page(READ, f"{SITE}/revoke", "coordinator", sites.show_revoke),
    Page("POST", f"{SITE}/revoke", "coordinator", sites.revoke_key),
    Page(READ, CONTRIBUTION, "known", sites.show_contribution),
    Page(
        READ,
        f"{CONTRIBUTION}/certificate.{{kind}}",
        "known",
        sites.download_contribution_certificate,
    ),
    Page(READ, RELEASE, "known", releases.show_release),
    Page(READ, f"{RELEASE}/certificate.{{kind}}", "known", releases.download_release_certificate),
    Page(READ, f"{RELEASE}/file", "known", releases.download_release),
    Page(READ, "/audit", "coordinator", studies.show_audit),
)
