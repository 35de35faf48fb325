"""The dashboard's addresses: which page is where, and who may see it."""

from __future__ import annotations

from consilience.hub.dashboard import access, files, releases, sites, studies
from consilience.hub.dashboard.answers import Page

READ = "GET HEAD"
STUDY = "/studies/{study}"
SITE = f"{STUDY}/sites/{{site}}"
CONTRIBUTION = f"{STUDY}/contributions/{{digest}}"
RELEASE = f"{STUDY}/releases/{{number}}"
PAGES = (
    Page(READ, "/static/{file}", "anyone", access.show_static),
    Page(READ, "/", "known", access.show_home),
    Page(READ, "/login", "anyone", access.show_login),
    Page("POST", "/login", "anyone", access.log_in),
    Page("POST", "/logout", "known", access.log_out),
    Page(READ, "/visits/{link}", "anyone", access.show_link),
    Page("POST", "/visits/{link}", "anyone", access.open_view),
    Page(READ, "/studies", "coordinator", studies.show_studies),
    Page(READ, "/new-study", "coordinator", studies.show_new_study),
    Page("POST", "/new-study", "coordinator", studies.add_study),
    Page(READ, STUDY, "known", studies.show_study),
    Page(READ, f"{STUDY}/text", "known", studies.show_study_text),
    Page(READ, f"{STUDY}/files/{{file}}", "known", files.show_public_file),
    Page(READ, f"{STUDY}/invite", "coordinator", sites.show_invite),
    Page("POST", f"{STUDY}/invite", "coordinator", sites.invite),
    Page(READ, f"{STUDY}/close", "coordinator", studies.show_close),
    Page("POST", f"{STUDY}/close", "coordinator", studies.close_study),
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
