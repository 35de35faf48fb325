"""The dashboard in Chromium: by keyboard, without scripts, on a phone, in both colour schemes."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from consilience.hub.api.app import create_app
from consilience.hub.auth import hash_password
from consilience.hub.roles import Role
from consilience.protocol import HEADER, digest, sign_request
from reading_pages import CONTRAST, check_page, require_accessible

PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def password() -> str:
    return hash_password(PASSWORD)


@pytest.fixture
def live(tools: Any, tmp_path: Any, password: str) -> Iterator[Any]:
    """A hub over HTTP on this machine, and the world around it."""
    import uvicorn

    app = create_app(tools.quick(tmp_path / "hub"))
    config = uvicorn.Config(app, port=0, log_level="error", ws="none", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started and time.monotonic() < until:
        time.sleep(0.02)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    client: Any = httpx.Client(base_url=address, timeout=30)
    client.app = app
    world = tools.World(client, tmp_path)
    world.address = address
    app.state.hub.store.add_account("bea", password, "operator", role=Role.OPERATOR)
    try:
        yield world
    finally:
        client.close()
        server.should_exit = True
        thread.join(20)


@contextlib.contextmanager
def page_of(chromium: Any, live: Any, *, width: int = 1280, **more: Any) -> Iterator[Any]:
    context = chromium.new_context(
        base_url=live.address, viewport={"width": width, "height": 800}, **more
    )
    context.set_default_timeout(10_000)
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda problem: page.complaints.append(str(problem)))
    try:
        yield page
    finally:
        context.close()


def log_in(page: Any) -> None:
    page.goto("/login")
    page.fill("#name", "bea")
    page.fill("#password", PASSWORD)
    page.press("#password", "Enter")
    page.wait_for_url("**/studies")


def focused(page: Any) -> str:
    return str(
        page.evaluate(
            "(document.activeElement.innerText || document.activeElement.id || '').trim()"
        )
    )


def tab_to(page: Any, text: str) -> None:
    """Press Tab until the element with this text or id has the focus, and check that it shows."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if focused(page) == text:
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"nobody sees that {text!r} has the focus"
            return
    pytest.fail(f"no number of tabs leads to {text!r}")


def seeded(live: Any, tools: Any) -> list[Any]:
    """Fill the hub: a study with a release, and one that is trusted and waits."""
    sha = tools.write_csv(live.folder / "test.csv", tools.table(150, 99))
    study = live.add_study(tools.study_text(test=sha))
    arrived = live.hub.store.files.new()
    arrived.write_bytes((live.folder / "test.csv").read_bytes())
    live.hub.keep_public_file("demo", "test.csv", arrived, sha, "coordinator:ann")
    wards = live.fill(study, 4)
    live.submit(wards[1], wards[1].train(study, sequence=2, epsilon=0.5))
    live.combiner.run(at_once=True)
    live.call(wards[3], "POST", "/api/studies/demo/withdrawals", b"{}")
    live.combiner.run(at_once=True)
    distilled = 'name = "SoftLabelDistillation"\nepsilon = 2.0'
    live.add_study(
        tools.study_text("trusting", aggregator=distilled, hub="trusted", public="ab" * 32)
    )
    return wards


# -------------------------------------------------------------------------------------- by keyboard


def test_a_coordinator_needs_only_the_keyboard(chromium: Any, live: Any, tools: Any) -> None:
    with page_of(chromium, live) as page:
        page.goto("/")
        assert focused(page) == "name"
        page.keyboard.type("bea")
        page.keyboard.press("Tab")
        page.keyboard.type(PASSWORD)
        page.keyboard.press("Enter")
        page.wait_for_url("**/studies")
        assert page.inner_text("main h2") == "There are no studies yet"
        page.keyboard.press("Tab")
        assert focused(page) == "Skip to the content"
        assert page.locator(".skip").bounding_box()["y"] >= 0
        page.keyboard.press("Enter")
        tab_to(page, "Add the first study")
        page.keyboard.press("Enter")
        page.wait_for_url("**/new-study")
        tab_to(page, "text")
        page.keyboard.insert_text(tools.study_text().replace("epsilon_max = 5.0\n", ""))
        tab_to(page, "Check and add the study")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]")
        assert "epsilon_max" in page.inner_text("[role=alert]")
        tab_to(page, "text")
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(tools.study_text())
        tab_to(page, "Check and add the study")
        page.keyboard.press("Enter")
        page.wait_for_url("**/studies/demo*")
        assert "No site has joined yet" in page.inner_text("main")
        tab_to(page, "Invite a site")
        page.keyboard.press("Enter")
        page.wait_for_url("**/invite")
        tab_to(page, "site")
        page.keyboard.type("north")
        page.keyboard.press("Enter")
        page.wait_for_selector(".secret")
        code = page.inner_text(".secret")
        assert f"consilience site join {live.address} {code}" in page.inner_text("pre")
        tab_to(page, "Done")
        page.keyboard.press("Enter")
        page.wait_for_url("**/studies/demo")
        assert code not in page.content()
        assert "1 open invitation" in page.inner_text(".facts")
        tab_to(page, "Log out")
        page.keyboard.press("Enter")
        page.wait_for_url("**/login*")
        assert len(page.complaints) == 1  # Chromium's notice of the study that was refused
        assert "422" in page.complaints[0]


def test_a_site_opens_its_view_without_scripts_and_sees_only_its_own(
    chromium: Any, live: Any, tools: Any
) -> None:
    wards = seeded(live, tools)
    path = "/api/studies/demo/visits"
    signed = {HEADER: sign_request(wards[1].key, live.hub.key.public, "POST", path, digest(b""))}
    link = live.client.post(path, headers=signed).json()["path"]
    with page_of(chromium, live, java_script_enabled=False) as page:
        page.goto(link)
        page.click("button[type=submit]")
        page.wait_for_url("**/studies/demo")
        shown = page.locator("main").inner_text()
        assert "ε = 1.5" in shown
        assert "Your contributions" in shown
        page.click("a:has-text('Contribution 2')")
        assert "What it promises" in page.locator("main").inner_text()
        page.goto(f"/studies/demo/sites/{wards[0].name}")
        assert "What to do" in page.locator("main").inner_text()
        with page.expect_download() as download:
            page.goto("/studies/demo")
            page.click("a:has-text('Download')")
        assert download.value.suggested_filename == "demo-release-2.safetensors"
        page.goto(link)
        page.click("button[type=submit] >> text=Open the view")
        assert "already used" in page.locator("main").inner_text()


# -------------------------------------------------------------------------------- building a study


CODEBOOK = """\
name,kind,low,high,categories,missing
age,numeric,0,,,middle
sex,categorical,,,f|m,ignore
ill,label,,,no|yes,
"""
TESTED = "age,sex,pressure,ill\n" + "".join(
    f"{20 + i},{'fm'[i % 2]},{100 + i},{'no yes'.split()[i // 40]}\n" for i in range(80)
)


def test_a_study_is_built_from_a_code_book_to_its_freezing(
    chromium: Any, live: Any, tmp_path: Path
) -> None:
    (tmp_path / "codebook.csv").write_text(CODEBOOK)
    (tmp_path / "tested.csv").write_text(TESTED)
    with page_of(chromium, live) as page:
        page.goto("/login")
        check_page(page, tmp_path, "login")
        log_in(page)
        page.click("text=Build a study")
        check_page(page, tmp_path, "new")
        page.fill("#name", "heart")
        page.fill("#purpose", "Who falls ill within a year, for wards that plan their beds.")
        page.set_input_files("#codebook", tmp_path / "codebook.csv")
        page.click("text=Begin the draft")
        page.wait_for_url("**/drafts/*")
        assert "“age” needs a lowest and a highest value" in page.inner_text("#problems")
        check_page(page, tmp_path, "draft-with-problems")
        page.click("#parts >> text=Columns")
        check_page(page, tmp_path, "columns")
        page.fill("#high-0", "120")
        page.fill("#name-new", "pressure")
        page.fill("#low-new", "60")
        page.fill("#high-new", "250")
        page.click("text=Save the columns")
        assert page.input_value("#name-2") == "pressure"
        page.click("text=Back to the draft")
        page.click("#parts >> text=Method")
        check_page(page, tmp_path, "method")
        page.check("#learner-PrivateLinearSVC")
        page.click("text=Save the method")
        page.click("text=Back to the draft")
        page.click("#parts >> text=Privacy")
        page.fill("#epsilon_min", "1")
        page.click("text=Save the promise")
        check_page(page, tmp_path, "privacy")
        page.click("text=Back to the draft")
        page.set_input_files("#file-test", tmp_path / "tested.csv")
        page.click("text=Upload test records")
        sha256 = hashlib.sha256(TESTED.encode()).hexdigest()
        assert sha256 in page.inner_text("#files")
        check_page(page, tmp_path, "draft")
        page.click("text=Try on made-up data")
        check_page(page, tmp_path, "trial")
        page.fill("#sites", "3")
        page.fill("#records", "40")
        page.click("button:has-text('Try on made-up data')")
        page.wait_for_selector("#result", timeout=180_000)  # the page loads itself again
        assert "joined: Average" in page.inner_text("#result")
        check_page(page, tmp_path, "tried")
        page.click("text=Back to the draft")
        page.click("text=Make a link")
        check_page(page, tmp_path, "link")
        page.click("text=Back to the draft")
        page.click("#freeze >> text=Freeze >> nth=-1")
        check_page(page, tmp_path, "freeze")
        page.click("text=Freeze the study")
        page.wait_for_url("**/studies/heart*")
        shown = page.inner_text("main")
        assert "The study is open" in shown
        assert "A public file is missing" not in shown
        assert [text for text in page.complaints if "404" not in text] == []
        page.goto("/drafts")
        check_page(page, tmp_path, "drafts")
    study = live.hub.agreed("heart")
    assert (study.learner, study.epsilon_range[0], study.test.sha256) == (
        "PrivateLinearSVC",
        1,
        sha256,
    )


# -------------------------------------------------------------------------- phones, colours, charts


def test_every_page_fits_a_phone_and_can_be_read_in_both_schemes(
    chromium: Any, live: Any, tools: Any
) -> None:
    ward = seeded(live, tools)[1]
    digest_ = live.hub.store.contributions("demo", site=ward.name)[0]["digest"]
    paths = [
        "/login",
        "/studies",
        "/new-study",
        "/audit",
        "/nowhere",
        "/docs",
        "/account",
        "/accounts",
        "/new-account",
        "/studies/trusting",
        "/studies/trusting/aggregate",
    ]
    paths += [
        f"/studies/demo{rest}"
        for rest in ("", "/sites", "/invite", "/close", "/releases/1", "/releases/2")
    ]
    paths += [f"/studies/demo/sites/{ward.name}", f"/studies/demo/sites/{ward.name}/revoke"]
    paths += [f"/studies/demo/contributions/{digest_}"]
    with page_of(chromium, live, width=360) as page:
        page.set_content("<p style='color: #888; background: #fff'>grey</p>")
        assert len(page.evaluate(CONTRAST)) == 1  # the check can also fail
        with pytest.raises(AssertionError, match="color-contrast"):
            require_accessible(page, "grey")
        log_in(page)
        for path in paths:
            page.goto(path)
            for details in page.locator("summary").all():
                details.click()
            for width in (360, 1280):
                page.set_viewport_size({"width": width, "height": 800})
                room = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert page.evaluate(room) <= 0, f"{path} scrolls sideways at {width}"
            page.set_viewport_size({"width": 360, "height": 800})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate(CONTRAST) == [], (path, scheme)
            require_accessible(page, path)
        assert [
            text for text in page.complaints if "404" not in text
        ] == []  # no policy was violated


def test_charts_have_words_and_stay_inside(chromium: Any, live: Any, tools: Any) -> None:
    seeded(live, tools)
    with page_of(chromium, live, width=360) as page:
        log_in(page)
        page.goto("/studies/demo")
        charts = page.locator("svg.chart[role=img]").all()
        assert len(charts) == 2
        for chart in charts:
            assert len(chart.evaluate("e => e.querySelector('title').textContent")) > 10
            for text in chart.locator("text").all():
                box = text.bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= 360
                assert box["height"] >= 11  # it is not shrunk with the screen
