"""The dashboard's addresses: which page is where, and who may see it."""

from __future__ import annotations

from consilience.hub.dashboard.access import (
    log_in,
    log_out,
    open_view,
    show_home,
    show_link,
    show_login,
    show_static,
)
from consilience.hub.dashboard.answers import Page
from consilience.hub.dashboard.files import show_public_file
from consilience.hub.dashboard.log import show_audit
from consilience.hub.dashboard.releases import (
    aggregate,
    download_release,
    download_release_certificate,
    set_budget,
    show_aggregate,
    show_release,
)
from consilience.hub.dashboard.sites import (
    download_contribution_certificate,
    invite,
    revoke_key,
    show_contribution,
    show_invite,
    show_revoke,
    show_site,
    show_sites,
)
from consilience.hub.dashboard.studies import (
    add_study,
    close_study,
    show_close,
    show_new_study,
    show_studies,
    show_study,
    show_study_text,
)

READ = "GET HEAD"
STUDY = "/studies/{study}"
SITE = f"{STUDY}/sites/{{site}}"
CONTRIBUTION = f"{STUDY}/contributions/{{digest}}"
RELEASE = f"{STUDY}/releases/{{number}}"
PAGES = (
    Page(READ, "/static/{file}", "anyone", show_static),
    Page(READ, "/", "known", show_home),
    Page(READ, "/login", "anyone", show_login),
    Page("POST", "/login", "anyone", log_in),
    Page("POST", "/logout", "known", log_out),
    Page(READ, "/visits/{link}", "anyone", show_link),
    Page("POST", "/visits/{link}", "anyone", open_view),
    Page(READ, "/studies", "coordinator", show_studies),
    Page(READ, "/new-study", "coordinator", show_new_study),
    Page("POST", "/new-study", "coordinator", add_study),
    Page(READ, STUDY, "known", show_study),
    Page(READ, f"{STUDY}/text", "known", show_study_text),
    Page(READ, f"{STUDY}/files/{{file}}", "known", show_public_file),
    Page(READ, f"{STUDY}/invite", "coordinator", show_invite),
    Page("POST", f"{STUDY}/invite", "coordinator", invite),
    Page(READ, f"{STUDY}/close", "coordinator", show_close),
    Page("POST", f"{STUDY}/close", "coordinator", close_study),
    Page(READ, f"{STUDY}/aggregate", "coordinator", show_aggregate),
    Page("POST", f"{STUDY}/aggregate", "coordinator", aggregate),
    Page("POST", f"{STUDY}/budget", "coordinator", set_budget),
    Page(READ, f"{STUDY}/sites", "coordinator", show_sites),
    Page(READ, SITE, "known", show_site),
    Page(READ, f"{SITE}/revoke", "coordinator", show_revoke),
    Page("POST", f"{SITE}/revoke", "coordinator", revoke_key),
    Page(READ, CONTRIBUTION, "known", show_contribution),
    Page(READ, f"{CONTRIBUTION}/certificate.{{kind}}", "known", download_contribution_certificate),
    Page(READ, RELEASE, "known", show_release),
    Page(READ, f"{RELEASE}/certificate.{{kind}}", "known", download_release_certificate),
    Page(READ, f"{RELEASE}/file", "known", download_release),
    Page(READ, "/audit", "coordinator", show_audit),
)
