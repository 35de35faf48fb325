"""The dashboard's addresses: which page is where and who may see it; logging in and out."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import FileResponse

from consilience.hub import auth
from consilience.hub.dashboard import accounts, drafts, releases, signon, sites, studies
from consilience.hub.dashboard.signon import show_form
from consilience.hub.dashboard.texts import LOGIN_FIXES
from consilience.hub.dashboard.visits import (
    SITE_COOKIE,
    STATIC,
    VIEW_SECONDS,
    Page,
    Visit,
    end_view,
    next_page,
    read_link,
    use_link,
)
from consilience.hub.roles import Action
from consilience.hub.signon import BACK
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
    return visit.redirect("/studies" if who.account else f"/studies/{who.study}")


def show_login(visit: Visit) -> Response:
    """Ask for a name and a password."""
    if visit.visitor is not None and visit.visitor.account:
        return visit.redirect("/studies")
    return show_form(visit, next_page(visit.request.query_params.get("next")))


def log_in(visit: Visit) -> Response:
    """Begin an account's session."""
    settings, request = visit.hub.settings, visit.request
    name, target = visit.form.get("name", "").strip(), next_page(visit.form.get("next"))
    try:
        logins: auth.Logins = request.app.state.logins
        password, hours = visit.form.get("password", ""), settings.session_hours
        token, _ = logins.log_in(name[:200], password, visit.address, hours=hours)
    except auth.CodeNeeded as needed:
        return signon.ask_code(visit, name[:200], needed.stored, target)
    except Refusal as refusal:
        fix = LOGIN_FIXES.get(refusal.code, ERRORS[refusal.code][1])
        problem = f"{refusal.message} {fix}"
        return show_form(visit, target, name, problem, refusal.status)
    return signon.go_on(visit, visit.redirect(target), token)


def log_out(visit: Visit) -> Response:
    """End the session."""
    if visit.someone.account:
        visit.hub.store.end_session(hashed(visit.someone.secret))
    else:
        end_view(visit.hub, visit.someone)
    answer = visit.redirect("/login?done=out")
    answer.delete_cookie(auth.COOKIE)
    answer.delete_cookie(SITE_COOKIE)
    return answer


def show_link(visit: Visit) -> Response:
    """Ask a site whether to open its view, so that merely fetching the link does not use it up."""
    facts = read_link(visit.hub, visit["link"])
    site = visit.hub.store.signer(facts["study"], facts["key"])
    return visit.page("visit.html", site=site["name"], study=facts["study"])


def open_view(visit: Visit) -> Response:
    """Use a site's link and open its view."""
    view, facts = use_link(visit.hub, visit["link"], visit.request.app.state.notes)
    if visit.visitor is not None and visit.visitor.account:
        visit.hub.store.end_session(hashed(visit.visitor.secret))
    answer = visit.redirect(f"/studies/{facts['study']}")
    answer.delete_cookie(auth.COOKIE)
    visit.set_cookie(answer, SITE_COOKIE, view, VIEW_SECONDS)
    return answer


# ------------------------------------------------------------------------------------ the addresses


READ = "GET HEAD"
STUDY = "/studies/{study}"
SITE = f"{STUDY}/sites/{{site}}"
DRAFT = "/drafts/{draft}"
CONTRIBUTION = f"{STUDY}/contributions/{{digest}}"
RELEASE = f"{STUDY}/releases/{{number}}"
PAGES = (
    Page(READ, "/static/{file}", Action.OPEN, show_static),
    Page(READ, "/docs", Action.OPEN, show_api),
    Page(READ, "/", Action.VIEW, show_home),
    Page(READ, "/login", Action.OPEN, show_login),
    Page("POST", "/login", Action.OPEN, log_in),
    Page("POST", "/login/code", Action.OPEN, signon.take_code),
    Page("GET", "/login/sso", Action.OPEN, signon.begin),
    Page("GET", BACK, Action.OPEN, signon.come_back),
    Page("GET", "/logout/sso", Action.OPEN, signon.leave),
    Page("POST", "/logout", Action.LEAVE, log_out),
    Page(READ, "/visits/{link}", Action.OPEN, show_link),
    Page("POST", "/visits/{link}", Action.OPEN, open_view),
    Page(READ, "/studies", Action.LOOK, studies.show_studies),
    Page(READ, "/new-study", Action.ADD, studies.show_new_study),
    Page("POST", "/new-study", Action.ADD, studies.add_study, is_large=True),
    Page(READ, "/drafts", Action.DRAFT, drafts.show_drafts),
    Page(READ, "/new-draft", Action.ADD, drafts.show_new_draft),
    Page("POST", "/new-draft", Action.ADD, drafts.add_draft, is_large=True),
    Page(READ, DRAFT, Action.DRAFT, drafts.show_draft),
    Page("POST", DRAFT, Action.ADD, drafts.change_basics),
    Page(READ, f"{DRAFT}/text", Action.DRAFT, drafts.show_draft_text),
    Page(READ, f"{DRAFT}/columns", Action.DRAFT, drafts.show_columns),
    Page(
        "POST",
        f"{DRAFT}/columns",
        Action.ADD,
        drafts.change_columns,
        is_large=True,
        most_fields=drafts.FIELDS,
    ),
    Page("POST", f"{DRAFT}/label", Action.ADD, drafts.change_label),
    Page("POST", f"{DRAFT}/codebook", Action.ADD, drafts.change_codebook, is_large=True),
    Page("POST", f"{DRAFT}/files/{{part}}/remove", Action.ADD, drafts.remove_file),
    Page(READ, f"{DRAFT}/method", Action.DRAFT, drafts.show_method),
    Page("POST", f"{DRAFT}/method", Action.ADD, drafts.change_method, is_large=True),
    Page(READ, f"{DRAFT}/privacy", Action.DRAFT, drafts.show_privacy),
    Page("POST", f"{DRAFT}/privacy", Action.ADD, drafts.change_privacy),
    Page(READ, f"{DRAFT}/trial", Action.DRAFT, drafts.show_trial),
    Page("POST", f"{DRAFT}/trial", Action.ADD, drafts.start_trial),
    Page("POST", f"{DRAFT}/prepare", Action.ADD, drafts.prepare),
    Page("POST", f"{DRAFT}/trial/end", Action.ADD, drafts.end_trial),
    Page("POST", f"{DRAFT}/share", Action.ADD, drafts.share),
    Page("POST", f"{DRAFT}/unshare", Action.ADD, drafts.unshare),
    Page(READ, f"{DRAFT}/freeze", Action.ADD, drafts.show_freeze),
    Page("POST", f"{DRAFT}/freeze", Action.ADD, drafts.freeze),
    Page(READ, f"{DRAFT}/delete", Action.ADD, drafts.show_delete),
    Page("POST", f"{DRAFT}/delete", Action.ADD, drafts.delete),
    Page(READ, STUDY, Action.VIEW, studies.show_study),
    Page(READ, f"{STUDY}/text", Action.VIEW, studies.show_study_text),
    Page(READ, f"{STUDY}/files/{{file}}", Action.VIEW, studies.show_public_file),
    Page(READ, f"{STUDY}/invite", Action.CHANGE, sites.show_invite),
    Page("POST", f"{STUDY}/invite", Action.CHANGE, sites.invite),
    Page(READ, f"{STUDY}/close", Action.CHANGE, studies.show_close),
    Page("POST", f"{STUDY}/close", Action.CHANGE, studies.close_study),
    Page(READ, f"{STUDY}/roster", Action.CHANGE, studies.show_roster),
    Page("POST", f"{STUDY}/roster", Action.CHANGE, studies.freeze_roster),
    Page("POST", f"{STUDY}/batches", Action.CHANGE, studies.list_batch),
    Page(READ, f"{STUDY}/batches/{{number}}", Action.CHANGE, studies.show_leave_out),
    Page("POST", f"{STUDY}/batches/{{number}}", Action.CHANGE, studies.leave_out_batch),
    Page(READ, f"{STUDY}/aggregate", Action.CHANGE, releases.show_aggregate),
    Page("POST", f"{STUDY}/aggregate", Action.CHANGE, releases.aggregate),
    Page("POST", f"{STUDY}/budget", Action.CHANGE, releases.set_budget),
    Page(READ, f"{STUDY}/sites", Action.LOOK, sites.show_sites),
    Page(READ, SITE, Action.VIEW, sites.show_site),
    Page(READ, f"{SITE}/revoke", Action.CHANGE, sites.show_revoke),
    Page("POST", f"{SITE}/revoke", Action.CHANGE, sites.revoke_key),
    Page(READ, CONTRIBUTION, Action.VIEW, sites.show_contribution),
    Page(
        READ,
        f"{CONTRIBUTION}/certificate.{{kind}}",
        Action.VIEW,
        sites.download_contribution_certificate,
    ),
    Page(READ, RELEASE, Action.VIEW, releases.show_release),
    Page(
        READ, f"{RELEASE}/certificate.{{kind}}", Action.VIEW, releases.download_release_certificate
    ),
    Page(READ, f"{RELEASE}/file", Action.VIEW, releases.download_release),
    Page(READ, "/audit", Action.LOG, studies.show_audit),
    Page(READ, "/audit.csv", Action.LOG, studies.download_audit),
    Page(READ, "/account", Action.OWN, accounts.show_own),
    Page(READ, "/account/factor", Action.OWN, accounts.show_factor),
    Page("POST", "/account/factor", Action.OWN, accounts.change_factor),
    Page("POST", "/account/password", Action.OWN, accounts.change_password),
    Page(READ, "/accounts", Action.MANAGE, accounts.show_accounts),
    Page(READ, "/new-account", Action.MANAGE, accounts.show_new_account),
    Page("POST", "/new-account", Action.MANAGE, accounts.add_account),
    Page(READ, "/accounts/{account}", Action.MANAGE, accounts.show_account),
    Page("POST", "/accounts/{account}", Action.MANAGE, accounts.change_account),
)
