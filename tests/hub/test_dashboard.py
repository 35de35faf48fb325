"""The dashboard without a browser: addresses, who may see what, forms, hostile input."""

import contextlib
import re
import time
from typing import Any

import pytest
import sqlalchemy as sa

from consilience.aggregators.average import Average
from consilience.aggregators.base import Description
from consilience.aggregators.registry import AGGREGATORS
from consilience.errors import SettingsError
from consilience.evaluation.compare import MAJORITY
from consilience.files.certificate import _quality_sections
from consilience.hub.auth import Rate, hash_password, new_token
from consilience.hub.dashboard import charts
from consilience.hub.dashboard.pages import PAGES
from consilience.hub.dashboard.releases import NOT_COMPARED, show_quality
from consilience.hub.dashboard.visits import HEADERS
from consilience.hub.drafts import DraftDesk
from consilience.hub.roles import Account, Action, Role
from consilience.hub.store.audit import Chain, entry_hash
from consilience.hub.store.tables import audit, contributions, settings, sites
from consilience.privacy.guarantee import Budget
from consilience.study.building import begin

PASSWORD = "correct horse battery"
_HASH: list[str] = []


class Browser:
    """Keeps cookies, follows no redirect by itself, and finds the token of the page it saw last."""

    def __init__(self, world: Any) -> None:
        self.world, self.cookies, self.token = world, {}, ""

    def request(self, method: str, path: str, **content: Any) -> Any:
        headers = {**content.pop("headers", {})}
        if self.cookies:
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        self.world.client._client.cookies.clear()
        answer = self.world.client.request(method, path, headers=headers, **content)
        self.world.client._client.cookies.clear()
        for line in answer.headers.get_list("set-cookie"):
            name, _, value = line.partition(";")[0].partition("=")
            if "Max-Age=0" in line:
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        found = re.search(r'name="token" value="([0-9a-f]{64})"', answer.text)
        self.token = found[1] if found else self.token
        assert answer.status_code < 500, (path, answer.text)
        return answer

    def get(self, path: str, **content: Any) -> Any:
        return self.request("GET", path, **content)

    def post(self, path: str, headers: Any = None, **fields: str) -> Any:
        return self.request(
            "POST", path, data={"token": self.token, **fields}, headers=headers or {}
        )

    def log_in(self) -> "Browser":
        """Log in with a session, without the password check, which is slow on purpose."""
        self.cookies["consilience"], _ = new_token(
            self.world.hub.store, "ann", hours=1, kind="test"
        )
        assert self.get("/studies").status_code == 200
        return self

    def open_as(self, ward: Any, study: str = "demo") -> "Browser":
        link = self.world.call(ward, "POST", f"/api/studies/{study}/visits").json()["path"]
        self.get(link)
        assert self.post(link).headers["location"] == f"/studies/{study}"
        assert self.get(f"/studies/{study}").status_code == 200
        return self


def known(world: Any) -> Any:
    """Let Bea, another coordinator, log in with a password."""
    if not _HASH:
        _HASH.append(hash_password(PASSWORD))
    if world.hub.store.account("bea") is None:
        world.hub.store.add_account("bea", _HASH[0], "operator")
    return world


@pytest.fixture
def hub(sqlite_world: Any) -> Any:
    return sqlite_world


@pytest.fixture
def ann(hub: Any) -> Browser:
    return Browser(hub).log_in()


def filled(world: Any, tools: Any, n_sites: int = 3, **more: Any) -> list[Any]:
    """Add a study with public test records, sites that contributed, and a release."""
    sha = tools.write_csv(world.folder / "test.csv", tools.table(120, 99))
    study = world.add_study(tools.study_text(test=sha, **more))
    arrived = world.hub.store.files.new()
    arrived.write_bytes((world.folder / "test.csv").read_bytes())
    world.hub.keep_public_file("demo", "test.csv", arrived, sha, "coordinator:ann")
    wards = world.fill(study, n_sites)
    world.combiner.run(at_once=True)
    return wards


# --------------------------------------------------------------------------------- coming and going


def test_nobody_is_sent_to_log_in_and_then_to_where_they_wanted(hub: Any) -> None:
    nobody = Browser(known(hub))
    assert nobody.get("/").headers["location"] == "/login"
    assert nobody.get("/audit").headers["location"] == "/login?next=/audit"
    assert 'value="/audit"' in nobody.get("/login?next=/audit").text
    answer = nobody.post("/login", name="bea", password=PASSWORD, next="/audit")
    assert answer.headers["location"] == "/audit"
    cookie = next(
        line for line in answer.headers.get_list("set-cookie") if line.startswith("consilience=")
    )
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert nobody.get("/audit").status_code == 200
    assert nobody.get("/login").headers["location"] == "/studies"


def test_logging_in_leads_nowhere_else(hub: Any) -> None:
    for target in ("//evil.example", "https://evil.example", "/\\evil", "javascript:alert(1)", ""):
        nobody = Browser(known(hub))
        nobody.get("/login", params={"next": target})
        assert (
            nobody.post("/login", name="bea", password=PASSWORD, next=target).headers["location"]
            == "/studies"
        )


def test_a_wrong_password_says_what_to_do_and_lets_nobody_in(hub: Any) -> None:
    nobody = Browser(known(hub))
    nobody.get("/login")
    for name in ("bea", "<b>", "\x00", "x" * 5000):
        answer = nobody.post("/login", name=name, password="wrong")
        assert answer.status_code == 401
        assert "operator" in answer.text
        assert "<b>" not in answer.text
    assert nobody.get("/studies").status_code == 303


def test_guessing_is_slowed_down(tools: Any, tmp_path: Any) -> None:
    with tools.Client(tools_app(tools, tmp_path, by_guess=Rate(0.001, 2))) as client:
        nobody = Browser(known(tools.World(client, tmp_path)))
        nobody.get("/login")
        codes = [nobody.post("/login", name="bea", password="wrong").status_code for _ in range(3)]
    assert codes == [401, 401, 429]


def tools_app(tools: Any, folder: Any, **more: Any) -> Any:
    from consilience.hub.api.app import create_app

    return create_app(tools.quick(folder / "hub", **more))


def test_logging_out_ends_the_session_at_the_hub(hub: Any, ann: Browser) -> None:
    hub.add_study()
    ward = hub.ward("north")
    for visitor, page in ((ann, "/studies"), (Browser(hub).open_as(ward), "/studies/demo")):
        before = dict(visitor.cookies)
        assert visitor.post("/logout").headers["location"].startswith("/login")
        visitor.cookies = before
        assert visitor.get(page).status_code == 303
    Browser(hub).open_as(ward)  # ending one view does not end others


# --------------------------------------------------------------------------------------- every page


def addresses(world: Any) -> dict[str, str]:
    row = world.hub.store.contributions("demo")[0]
    parts = {
        "study": "demo",
        "site": row["site"],
        "digest": row["digest"],
        "number": "1",
        "kind": "html",
        "account": "ann",
    }
    account = Account("ann", Role.COORDINATOR)
    facts = begin("heart", "", {"label": "ill", "classes": ["no", "yes"]})
    listed = world.hub.store.drafts() or [{"id": DraftDesk(world.hub, account).add(facts)}]
    return {**parts, "file": "test.csv", "draft": listed[0]["id"], "part": "test"}


def test_every_page_answers_with_a_strict_policy(world: Any, tools: Any) -> None:
    filled(world, tools)
    ann = Browser(world).log_in()
    for methods, path, action, *_ in PAGES:
        if "GET" not in methods or path in ("/static/{file}", "/visits/{link}", "/"):
            continue
        answer = ann.get(path.format(**addresses(world)))
        expected = 303 if path == "/login" else 403 if path.endswith("/aggregate") else 200
        of_blind = path.endswith(("/roster", "/batches/{number}"))  # and the hub is not
        expected = 404 if of_blind else expected
        expected = 403 if action is Action.MANAGE else expected
        no_provider = path.startswith(("/login/", "/logout/"))  # none is set up
        expected = 404 if no_provider else expected
        assert answer.status_code == expected, (path, action, answer.text)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert answer.headers["x-content-type-options"] == "nosniff"
        kind = answer.headers.get("content-type", "")
        if kind.startswith("text/html") and "content-disposition" not in answer.headers:
            assert " style=" not in answer.text
            assert "<script" not in answer.text
            assert "<style" not in answer.text
            assert answer.text.count("<h1") == 1
            assert 'class="skip"' in answer.text
            assert not re.search(r'(src|href|action)="(https?:)?//', answer.text)
            for table in re.findall(r"<table.*?</table>", answer.text, re.S):
                assert "<caption" in table
            for field in re.findall(
                r'<(?:input|textarea)(?![^>]*type="(?:hidden)")[^>]*id="([^"]+)"', answer.text
            ):
                assert f'<label for="{field}"' in answer.text


def test_downloads_say_what_they_are(hub: Any, tools: Any, ann: Browser) -> None:
    filled(hub, tools)
    digest = addresses(hub)["digest"]
    expected = {
        "/studies/demo/text": ("application/toml", "demo.toml"),
        "/studies/demo/files/test.csv": ("text/csv", "test.csv"),
        "/studies/demo/releases/1/file": ("application/octet-stream", "demo-release-1.safetensors"),
        "/studies/demo/releases/1/certificate.txt": (
            "text/plain",
            "demo-release-1-certificate.txt",
        ),
        "/studies/demo/releases/1/certificate.html": (
            "text/html",
            "demo-release-1-certificate.html",
        ),
        f"/studies/demo/contributions/{digest}/certificate.txt": (
            "text/plain",
            "demo-ward-0-1-certificate.txt",
        ),
    }
    for path, (kind, name) in expected.items():
        answer = ann.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] == kind
        assert answer.headers["content-disposition"].startswith("attachment")
        assert name in answer.headers["content-disposition"]
    assert "epsilon" in ann.get("/studies/demo/releases/1/certificate.txt").text
    assert ann.get("/studies/demo/releases/1/certificate.pdf").status_code == 404
    style = ann.get("/static/style.css")
    assert style.headers["content-type"].startswith("text/css")
    assert "immutable" in style.headers["cache-control"]
    assert ann.get("/static/..%2fpages.py").status_code == 404


NOWHERE = [
    "/nowhere", "/studies/none", "/studies/%00", "/studies/%2e%2e", "/studies/demo/sites/none",
    "/studies/demo/sites/%ff", "/studies/demo/sites/" + "x" * 3000,
    "/studies/demo/contributions/none",
    "/studies/demo/releases/99", "/studies/demo/releases/-1", "/studies/demo/releases/١",
    "/studies/demo/files/none", "/visits/none", "/visits/a.b",
    "/visits/" + "e30." + "A" * 86, "/audit?study=none", "/static/none",
]  # fmt: skip


def test_what_is_not_there_is_a_page_that_says_what_to_do(hub: Any, ann: Browser) -> None:
    hub.add_study()
    for path in NOWHERE:
        answer = ann.get(path)
        assert answer.status_code in (401, 404), path
        assert "What to do" in answer.text
        assert answer.headers["content-type"].startswith("text/html")


def test_machines_still_get_errors_as_json(hub: Any, tools: Any, ann: Browser) -> None:
    assert tools.code(ann.get("/api/nowhere")) == "not-found"
    assert tools.code(ann.request("PUT", "/healthz")) == "wrong-method"
    wrong = ann.request("PUT", "/studies")
    assert (wrong.status_code, wrong.headers["content-type"]) == (405, "text/html; charset=utf-8")


def test_any_number_of_a_page_is_answered(hub: Any, tools: Any, ann: Browser) -> None:
    filled(hub, tools, 2)
    for page in ("-1", "0", "99999999", "1e9", "x", "", "9" * 40, "%00", "٣"):
        for path in ("/studies", "/studies/demo/sites", "/studies/demo/releases/1", "/audit"):
            assert ann.get(f"{path}?page={page}").status_code == 200
        assert ann.get(f"/studies/demo?releases={page}").status_code == 200


# --------------------------------------------------------------------------------- who may see what


def test_pages_of_coordinators_are_closed_to_sites_and_to_nobody(hub: Any, tools: Any) -> None:
    ward = filled(hub, tools)[1]
    site, nobody = Browser(hub).open_as(ward), Browser(hub)
    nobody.get("/login")
    own = hub.hub.store.contributions("demo", site=ward.name)[0]
    facts = {**addresses(hub), "site": own["site"], "digest": own["digest"]}
    for methods, path, action, *_ in PAGES:
        for method in methods.split()[:1]:
            if action is Action.OPEN:
                continue
            data = {"data": {"token": nobody.token}} if method == "POST" else {}
            assert nobody.request(method, path.format(**facts), **data).status_code in (303, 401), (
                path
            )
            data = {"data": {"token": site.token}} if method == "POST" else {}
            if action not in (Action.VIEW, Action.LEAVE):
                assert site.request(method, path.format(**facts), **data).status_code == 403, path
            elif method == "GET" and path != "/":
                assert site.get(path.format(**facts)).status_code == 200, path


def test_a_site_sees_nothing_of_another_but_the_release(world: Any, tools: Any) -> None:
    wards = filled(world, tools)
    other = world.add_study(tools.study_text("other"))
    world.ward("stranger", "other")
    site = Browser(world).open_as(wards[0])
    page = site.get("/studies/demo").text
    rows = {row["site"]: row for row in world.hub.store.contributions("demo")}
    for ward in wards[1:]:
        assert rows[ward.name]["digest"] not in page
        assert ward.key.public[:16] not in page
        assert f"/sites/{ward.name}" not in page
        assert (
            site.get(f"/studies/demo/contributions/{rows[ward.name]['digest']}").status_code == 404
        )
        assert (
            site.get(
                f"/studies/demo/contributions/{rows[ward.name]['digest']}/certificate.txt"
            ).status_code
            == 404
        )
        assert site.get(f"/studies/demo/sites/{ward.name}").status_code == 404
    none = site.get("/studies/demo/sites/none")
    assert (none.status_code, none.text) == (
        404,
        site.get(f"/studies/demo/sites/{wards[1].name}").text,
    )
    assert site.get(f"/studies/{other.name}").text == site.get("/studies/nonexistent").text
    assert site.get("/audit").status_code == 403
    assert site.get("/studies/demo/sites").status_code == 403


def test_a_release_that_was_withdrawn_is_shown_to_no_site(
    hub: Any, tools: Any, ann: Browser
) -> None:
    wards = filled(hub, tools)
    site = Browser(hub).open_as(wards[0])
    hub.call(wards[1], "POST", "/api/studies/demo/withdrawals", b"{}")
    for path in ("file", "certificate.txt"):
        assert site.get(f"/studies/demo/releases/1/{path}").status_code == 404
    page = site.get("/studies/demo/releases/1").text
    assert "no longer available" in page
    assert "How much each site counts" not in page
    assert ann.get("/studies/demo/releases/1/file").status_code == 404
    assert "withdrawn" in ann.get("/studies/demo").text


def test_a_sites_link_works_once_and_its_view_ends_with_its_key(world: Any, tools: Any) -> None:
    ward = filled(world, tools)[0]
    made = world.call(ward, "POST", "/api/studies/demo/visits")
    assert made.status_code == 201
    site = Browser(world)
    assert "Open the view" in site.get(made.json()["path"]).text
    assert site.get(made.json()["path"]).status_code == 200  # looking at it does not use it up
    site.post(made.json()["path"])
    assert site.get("/studies/demo").status_code == 200
    second = Browser(world)
    second.get(made.json()["path"])
    assert second.post(made.json()["path"]).status_code == 401
    assert (
        world.client.post("/api/studies/demo/visits", headers=world.coordinator).status_code == 403
    )
    stranger = tools.Ward("x", world.folder)
    assert world.call(stranger, "POST", "/api/studies/demo/visits").status_code == 401
    world.hub.revoke("demo", ward.name, "coordinator:ann")
    assert site.get("/studies/demo").status_code == 303


def test_a_link_is_good_for_five_minutes_and_cannot_be_forged(hub: Any, monkeypatch: Any) -> None:
    hub.add_study()
    ward = hub.ward("north")
    path = hub.call(ward, "POST", "/api/studies/demo/visits").json()["path"]
    text, _, signature = path.removeprefix("/visits/").partition(".")
    site = Browser(hub)
    assert site.get(f"/visits/{text[:-2]}AA.{signature}").status_code == 401
    site.cookies["consilience-site"] = path.removeprefix("/visits/")  # a link is not a session
    assert site.get("/studies/demo").status_code == 303
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 301)
    assert site.get(path).status_code == 401


# -------------------------------------------------------------------------------------------- forms


def test_a_form_needs_the_token_of_the_page_it_came_from(
    hub: Any, tools: Any, ann: Browser
) -> None:
    wards = filled(hub, tools)
    other = Browser(hub).open_as(wards[0])
    facts = addresses(hub)
    before = hub.hub.store.counts()
    for methods, path, action, *_ in PAGES:
        if methods != "POST" or action in (Action.OPEN, Action.MANAGE):
            continue
        for token in ("", "0" * 64, other.token, "é"):
            answer = ann.request("POST", path.format(**facts), data={"token": token})
            assert answer.status_code == 403, path
        elsewhere = {"sec-fetch-site": "cross-site"}
        assert (
            ann.request(
                "POST", path.format(**facts), data={"token": ann.token}, headers=elsewhere
            ).status_code
            == 403
        )
    assert (
        ann.request("POST", "/studies/demo/files/test.csv", files={"file": b"x"}).status_code == 403
    )
    assert hub.hub.store.counts() == before
    nobody = Browser(hub)
    assert nobody.post("/login", name="bea", password=PASSWORD).status_code == 403


MALFORMED = [
    ("application/x-www-form-urlencoded", b"\xff\xfe=1"),
    ("application/x-www-form-urlencoded", b"&" * 2000),
    ("multipart/form-data", b"x"), ("multipart/form-data; boundary=", b"--\r\n"),
    ("multipart/form-data; boundary=a",
     b"--a\r\nContent-Type: message/rfc822\r\n\r\n--a\r\n\r\n--a--"),
    ("multipart/form-data; boundary=a",
     b'--a\r\nContent-Disposition: form-data; name="token"\r\n\r\n\xff\r\n--a'),
    ("text/plain", b"token=1"), ("application/json", b"{}"),
    ("multipart/form-data; boundary=\xe9", b"--"),
]  # fmt: skip


def test_malformed_forms_are_refused(hub: Any, ann: Browser) -> None:
    hub.add_study()
    for kind, body in MALFORMED:
        for path in ("/new-study", "/login", "/studies/demo/files/x.csv"):
            answer = ann.request(
                "POST", path, content=body, headers={"content-type": kind.encode("latin-1")}
            )
            assert answer.status_code in (400, 403), (kind, body)
    too_large = ann.request("POST", "/new-study", content=b"x" * (1 << 20 | 1))
    assert too_large.status_code == 413
    assert "What to do" in too_large.text


def test_a_study_is_added_by_text_or_file_and_every_problem_is_shown(
    hub: Any, tools: Any, ann: Browser
) -> None:
    text = tools.study_text()
    ann.get("/new-study")
    bad = text.replace("epsilon_max = 5.0", "").replace(
        'name = "demo"', 'name = "<script>"\ncolour = 1'
    )
    answer = ann.request(
        "POST", "/new-study", files={"token": (None, ann.token), "text": (None, bad)}
    )
    assert answer.status_code == 422
    assert "epsilon_max" in answer.text
    assert "colour" in answer.text
    assert "<script>" not in answer.text
    files = {
        "token": (None, ann.token),
        "text": (None, ""),
        "file": ("study.toml", text.replace("\n", "\r\n")),
    }
    answer = ann.request("POST", "/new-study", files=files)
    assert answer.headers["location"] == "/studies/demo?done=created"
    assert "Invite its sites next" in ann.get(answer.headers["location"]).text
    changed = text.replace("A test.", "Another.")
    answer = ann.request(
        "POST", "/new-study", files={"token": (None, ann.token), "text": (None, changed)}
    )
    assert answer.status_code == 422
    assert "already" in answer.text


NO_STUDIES = [
    "", "   ", "x", "[study]\nname = 5", "[study]\nname = [1]", "study = 1",
    "[schema]\ncolumns = 5",
    b"\xff\xfe[study]", "a = " + "[" * 5000,
    "[study]\nname = 'ab'\n[privacy]\nepsilon_min = 'x'\nepsilon_max = []\n[learner]\nname = {}",
]  # fmt: skip


def test_what_is_no_study_is_explained(ann: Browser) -> None:
    for text in NO_STUDIES:
        content = text if isinstance(text, bytes) else text.encode()
        answer = ann.request(
            "POST",
            "/new-study",
            files={"token": (None, ann.token), "file": ("study.toml", content)},
        )
        assert answer.status_code == 422, text
        assert "in this study file" in answer.text


def test_an_invitation_shows_its_code_once(hub: Any, ann: Browser) -> None:
    hub.add_study()
    ann.get("/studies/demo/invite")
    answer = ann.post("/studies/demo/invite", site="north", days="3", fetch_only="yes")
    code = re.search(r'class="secret"[^>]*>([^<]+)<', answer.text)[1]
    assert f"consilience site join http://hub {code} --fetch-only" in answer.text
    assert code not in ann.get("/studies/demo/invite").text
    assert code not in ann.get("/audit").text
    assert "north" in ann.get("/studies/demo/invite").text
    for days in ("0", "-1", "x", "", "nan", "1e999", "400"):
        assert ann.post("/studies/demo/invite", days=days).status_code == 400
    assert ann.post("/studies/demo/invite", site="<b>", days="1").status_code == 400


def test_closing_and_revoking_ask_first(hub: Any, tools: Any, ann: Browser) -> None:
    ward = filled(hub, tools)[0]
    path = f"/studies/demo/sites/{ward.name}/revoke"
    assert "Revoke the key" in ann.get(path).text
    assert hub.hub.store.sites("demo")[0]["status"] == "enrolled"
    ann.post(path, withdraw="yes")
    assert hub.hub.store.sites("demo")[0]["status"] == "revoked"
    assert {row["state"] for row in hub.hub.store.contributions("demo", site=ward.name)} == {
        "withdrawn"
    }
    assert "Invite it again" in ann.get(f"/studies/demo/sites/{ward.name}").text
    assert "cannot be reopened" in ann.get("/studies/demo/close").text
    ann.post("/studies/demo/close")
    assert hub.hub.store.study("demo")["status"] == "closed"
    assert ann.get("/studies/demo/invite").status_code == 409
    assert ann.post("/studies/demo/invite", days="1").status_code == 409
    assert "already closed" in ann.get("/studies/demo/close").text


def test_a_public_file_is_uploaded_if_it_is_the_named_one(
    hub: Any, tools: Any, ann: Browser
) -> None:
    sha = tools.write_csv(hub.folder / "test.csv", tools.table(60, 1))
    hub.add_study(tools.study_text(test=sha))
    content = (hub.folder / "test.csv").read_bytes()
    assert "A public file is missing" in ann.get("/studies/demo").text

    def send(file: bytes) -> Any:
        parts = {"token": (None, ann.token), "file": ("any.csv", file)}
        return ann.request("POST", "/studies/demo/files/test.csv", files=parts)

    for wrong in (b"", b"x", content + b"\n", content[:-1], b"\xff" * 5000):
        assert send(wrong).status_code == 409
    assert send(content).headers["location"] == "/studies/demo?done=uploaded#files"
    assert ann.get("/studies/demo/files/test.csv").content == content
    assert "missing" not in ann.get("/studies/demo").text
    assert not list(hub.hub.store.files.incoming.iterdir())


# ----------------------------------------------------------------------------------- what pages say


def test_empty_states_say_what_to_do_next(hub: Any, ann: Browser) -> None:
    assert "Add the first study" in ann.get("/studies").text
    hub.add_study()
    page = ann.get("/studies/demo").text
    assert "No site has joined yet" in page
    assert "There is no release yet" in page
    hub.ward("north")
    assert "Waiting for contributions" in ann.get("/studies/demo").text
    assert "consilience site train" in ann.get("/studies/demo/sites/north").text
    assert "Your next step" in Browser(hub).open_as(hub.wards["north"]).get("/studies/demo").text


def test_a_study_shows_quality_beside_baselines_and_weights_with_reasons(
    hub: Any, tools: Any, ann: Browser
) -> None:
    filled(hub, tools)
    page = ann.get("/studies/demo").text
    for said in (
        "one site alone (the median site)",
        "Average (equal)",
        "n = 200, epsilon = 1",
        "It does not",
    ):
        assert said in page
    assert page.count('role="img"') == 2
    assert re.search(r"<svg[^>]*role=\"img\".*?<title>[^<]+</title><desc>[^<]+</desc>", page, re.S)
    assert re.search(r"(Better than|Worse than|Not clearly different from) one site alone", page)
    assert re.search(r"joining (helps|does not help|does not clearly help)", page)
    assert "A member with less noise counts for more" in page  # the aggregator's own words


class Meeting(Average):
    """An aggregator that exists only here."""

    def describe(self) -> Description:
        return Description("Meeting (held in a test)", "A member counts if it comes to meetings.")


def test_an_aggregator_that_is_registered_is_shown_in_its_own_words(
    hub: Any, tools: Any, ann: Browser, monkeypatch: Any
) -> None:
    monkeypatch.setitem(AGGREGATORS, "Meeting", Meeting)
    filled(hub, tools, aggregator='name = "Meeting"')
    for path in ("/studies/demo", "/studies/demo/releases/1"):
        page = ann.get(path).text
        assert "A member counts if it comes to meetings." in page
        assert re.search(r'class="row study"><text[^>]*>Meeting', page)  # its row of the chart


def test_what_a_site_spent_is_composed_over_time(hub: Any, tools: Any, ann: Browser) -> None:
    ward = filled(hub, tools)[0]
    study = hub.hub.study("demo")[1]
    hub.submit(ward, ward.train(study, sequence=2, epsilon=0.5))
    page = ann.get(f"/studies/demo/sites/{ward.name}").text
    assert "<strong>ε = 1.5</strong>" in page
    assert "superseded" in page
    assert "ε = 1.5" in Browser(hub).open_as(ward).get("/studies/demo").text


def test_a_release_that_draws_noise_says_its_cost_and_is_made_once(
    hub: Any, tools: Any, ann: Browser
) -> None:
    sha = tools.write_csv(hub.folder / "public.csv", tools.table(100, 5))
    distilled = 'name = "SoftLabelDistillation"\nepsilon = 2.0'
    study = hub.add_study(tools.study_text(aggregator=distilled, hub="trusted", public=sha))
    arrived = hub.hub.store.files.new()
    arrived.write_bytes((hub.folder / "public.csv").read_bytes())
    hub.hub.keep_public_file("demo", "public.csv", arrived, sha, "coordinator:ann")
    hub.fill(study, 3)
    assert "A release can be made" in ann.get("/studies/demo").text
    assert "No budget is set" in ann.get("/studies/demo/aggregate").text
    assert ann.post("/studies/demo/aggregate", key="0" * 16).status_code == 409
    for epsilon in ("x", "0", "-1", "inf", "nan"):
        assert ann.post("/studies/demo/budget", epsilon=epsilon, delta="0").status_code == 400
    assert ann.post("/studies/demo/budget", epsilon="4.9999999", delta="0").status_code == 303
    page = ann.get("/studies/demo/aggregate").text
    assert all(shown in page for shown in ("ε = 5<", "ε = 4.99999<", "ε = 2.99999<"))  # rounded
    assert 'value="4.9999999"' in page  # and what would be sent again is not
    assert "Spend ε = 2" in page
    assert "left after" in page
    key = re.search(r'name="key" value="(\w+)"', page)[1]
    first, second = (ann.post("/studies/demo/aggregate", key=key) for _ in range(2))
    assert (
        first.headers["location"]
        == second.headers["location"]
        == "/studies/demo/releases/1?done=released"
    )
    assert hub.hub.balance("demo").spent.epsilon == pytest.approx(2.0)
    assert "one whole site" in ann.get("/studies/demo/releases/1").text
    assert "Nothing has changed since release 1" in ann.get("/studies/demo/aggregate").text
    ann.get("/studies/demo/aggregate")
    ann.post("/studies/demo/aggregate", key="1" * 16)
    assert "does not pay" in ann.get("/studies/demo/aggregate").text
    assert ann.post("/studies/demo/aggregate", key="2" * 16).status_code == 409
    with contextlib.suppress(SettingsError):
        hub.hub.allow("demo", Budget(epsilon=1.0, unit="site"), "x")  # below what is spent
    assert hub.hub.balance("demo").limit.epsilon == 4.9999999


def test_hostile_names_and_texts_are_shown_as_text(hub: Any, tools: Any, ann: Browser) -> None:
    evil = "<img src=x onerror=alert(1)>\\\"'&"
    text = tools.study_text().replace("A test.", evil.replace("\\", "").replace('"', "'"))
    study = hub.add_study(
        text.replace('"no", "yes"', '"<b>no", "yes"').replace('name = "a"', 'name = "<i>a"')
    )
    hub.ward("north")
    hub.hub.store.log("<u>who", "<s>what", "demo", **{"<q>": evil})
    db_write(hub, sites.update().values(name="<h6>'\"&"))
    for path in (
        "/studies",
        f"/studies/{study.name}",
        "/studies/demo/sites",
        "/studies/demo/sites?like=<h6>",
        "/audit",
    ):
        page = ann.get(path).text
        assert not re.search(r"<(img src=x|b>|i>|u>|s>|q>|h6)", page), path
    assert "&lt;h6&gt;" in ann.get("/studies/demo/sites").text


def db_write(world: Any, statement: Any) -> None:
    with world.hub.store._engines[1].begin() as db:
        db.execute(statement)


def test_the_audit_page_tells_whether_the_chain_is_whole(world: Any, tools: Any) -> None:
    filled(world, tools, 2)
    ann = Browser(world).log_in()
    assert "The chain is whole" in ann.get("/audit").text
    assert "The chain is whole" in ann.get("/audit?study=demo").text
    db_write(world, audit.update().where(audit.c.number == 3).values(actor="somebody else"))
    assert ann.get("/audit?verify=again").headers["location"] == "/audit"
    page = ann.get("/audit").text
    assert "broken at entry 3" in page
    assert "changed" in page


def test_the_audit_page_verifies_what_it_shows_on_every_view(world: Any, tools: Any) -> None:
    filled(world, tools, 2)
    ann = Browser(world).log_in()
    page = ann.get("/audit").text
    assert "and the entries on this page just now" in page
    entry = dict(world.hub.store.fetch_all(audit.select().where(audit.c.number == 3))[0])
    study = "" if entry["study"] is None else f"?study={entry['study']}"
    for change in ({"actor": "eve"}, {"facts": "{}"}, {"hash": "0" * 64}, {"previous": "0" * 64}):
        db_write(world, audit.update().where(audit.c.number == 3).values(**change))
        for path in ("/audit", f"/audit{study}"):
            page = ann.get(path).text
            assert "broken at entry 3" in page, (change, path)
            assert "The chain is whole" not in page
        # A forger who computes the entry's own hash anew is found out by the entry after it.
        forged = {**entry, **change}
        if "hash" not in change:
            fitting = {**forged, "hash": entry_hash(forged)}
            db_write(world, audit.update().where(audit.c.number == 3).values(**fitting))
            assert re.search("broken at entry [34]", ann.get("/audit").text)
        db_write(world, audit.update().where(audit.c.number == 3).values(**entry))
        assert "The chain is whole" in ann.get("/audit").text
    db_write(world, audit.delete().where(audit.c.number == 3))
    assert "broken at entry 3" in ann.get("/audit").text
    db_write(world, audit.insert().values(**entry))
    assert "The chain is whole" in ann.get("/audit").text


def test_a_shortened_log_is_noticed_and_a_long_one_takes_several_looks(sqlite_world: Any) -> None:
    store = sqlite_world.hub.store
    for i in range(20):
        store.log("someone", "something", i=i)
    chain = Chain()
    looks = [chain.verify(store, most=8) for _ in range(4)]
    assert [look.whole for look in looks] == [False, False, True, True]
    assert all(look.broken is None for look in looks)
    last = looks[-1].total
    db_write(sqlite_world, audit.delete().where(audit.c.number == last))
    fresh = Chain()
    assert [fresh.verify(store, most=8).broken for _ in range(4)][-1] == last
    db_write(
        sqlite_world,
        settings.update().where(settings.c.name == "audit").values(value=f"{last - 1} {'0' * 64}"),
    )
    assert chain.verify(store).broken is not None


# --------------------------------------------------------------------------------- many, and charts


def test_a_thousand_sites_are_paged_and_quick(hub: Any, tools: Any, ann: Browser) -> None:
    wards = filled(hub, tools, 2)
    store = hub.hub.store
    with store.reading() as db:
        site = dict(db.execute(sa.select(sites)).mappings().first())
        one = dict(db.execute(sa.select(contributions)).mappings().first())
    many = range(1000)
    rows = [{**site, "name": f"clinic {i:04d}", "key": f"{i:064x}"} for i in many]
    given = [
        {**one, "site": row["name"], "digest": f"{i:064x}", "sha256": f"{i:064x}"}
        for i, row in enumerate(rows)
    ]
    db_write(hub, sites.insert().values(rows))
    db_write(hub, contributions.insert().values(given))
    assert "1–50 of 1,002" in ann.get("/studies/demo/sites").text
    assert "1,001–1,002 of 1,002" in ann.get("/studies/demo/sites?page=99").text
    found = ann.get("/studies/demo/sites?like=CLINIC 0007").text
    assert "clinic 0007" in found
    assert "clinic 0008" not in found
    assert "No site" in ann.get("/studies/demo/sites?like=%25").text
    for path in (
        "/studies",
        "/studies/demo",
        "/studies/demo/sites",
        f"/studies/demo/sites/{wards[0].name}",
        "/audit",
    ):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            ann.get(path)
            times.append(time.perf_counter() - began)
        assert min(times) < 0.3, (path, times)


def test_charts_survive_any_numbers() -> None:
    for low, high in ((0.0, 0.0), (0.2, 0.2), (-3.0, 1e6), (0.499, 0.501)):
        marks = charts.ticks(low, high)
        assert marks[0] <= low
        assert marks[-1] >= high
        assert 2 <= len(marks) <= 12
        row = charts.Interval("<b>", "study", (low + high) / 2, low, high)
        assert "<b>" not in charts.draw_intervals([row], title="t", description="d", percent=True)
    for share in (-1.0, 0.0, 0.5, 7.0, float("inf"), float("nan")):
        assert "%" in charts.draw_bar(share)
    for days in (0, 1, 40, 400, 9000):
        since = f"{2026 - days // 365:04d}-01-01T00:00:00+00:00"
        came = {(since, "accepted"): 1, ("2026-01-02T00:00:00+00:00", "withdrawn"): 1}
        chart = charts.draw_timeline(
            came, since=since, until="2026-02-01T00:00:00+00:00", title="t"
        )
        assert chart.count("<rect") == 2


def quality_rows(gain: tuple[float, float] | None) -> list[dict[str, Any]]:
    """Rows whose own intervals overlap widely, so that only the paired gain can decide."""
    made: list[dict[str, Any]] = []
    for method, kind, value in (
        ("Average", "study", 0.2),
        ("public records alone", "baseline", 0.25),
        ("one site alone (the best on these records)", "baseline", 0.1),
    ):
        error = {"value": value, "low": value - 0.1, "high": value + 0.1}
        row = {"method": method, "kind": kind, "error": error, "n_records": 100, "level": 0.95}
        if kind == "baseline" and gain is not None:
            row["gain"] = {"value": sum(gain) / 2, "low": gain[0], "high": gain[1]}
        made.append(row)
    return made


@pytest.mark.parametrize(
    ("gain", "first", "last"),
    [
        ((0.01, 0.09), "Better than public records alone", "joining helps"),
        ((-0.01, 0.09), "Not clearly different from public", "joining does not clearly help"),
        ((-0.09, -0.01), "Worse than public records alone", "joining does not help"),
    ],
)
def test_the_verdict_is_that_of_the_paired_comparison(
    gain: tuple[float, float], first: str, last: str
) -> None:
    said = show_quality(quality_rows(gain)).verdicts
    assert len(said) == 2  # the best site is known only in hindsight, and is no alternative
    assert said[0].startswith(first)
    assert last in said[1]
    low, high = gain
    assert f"gains {100 * low:+.1f} to {100 * high:+.1f} percentage points" in said[0]


def test_a_page_and_a_certificate_speak_of_an_auc_only_where_there_is_one() -> None:
    """Of one class there is none, and errors tell enough of what is clearly worse than guessing."""

    def read(value: float, *, with_auc: bool) -> list[str]:
        rows = quality_rows((value - 0.02, value + 0.02))
        rows[1]["method"] = MAJORITY
        for row in rows if with_auc else ():
            row["auc"] = {"value": 0.6, "low": 0.55, "high": 0.65}
            row["auc_gain"] = {"value": 0.0, "low": -0.01, "high": 0.01}
        ((_, said, _),) = _quality_sections(rows, {"name": "Average"})
        return [" ".join(show_quality(rows).verdicts), " ".join(map(str, said))]

    for text in read(0.0, with_auc=True):
        assert "whether anything was learned; the AUC can." in text
        assert "By AUC, joining" in text
    for text in read(0.0, with_auc=False):
        assert "whether anything was learned; such test records cannot." in text
        assert "AUC" not in text
    for text in read(-0.25, with_auc=True):
        assert "AUC" not in text


def test_a_release_that_was_not_compared_gets_no_verdict() -> None:
    assert show_quality(quality_rows(None)).verdicts == [NOT_COMPARED]
    assert show_quality([]) is None
