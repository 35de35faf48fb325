"""The documentation: its programs run and print what they say, its site builds, and can be read
without a network."""

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import nbclient
import nbformat
import pytest

import consilience
from consilience.cli.app import main
from consilience.protocol import ERRORS
from federation import free_port
from forks import HubProcess
from reading_pages import require_accessible

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
RUN = [*TUTORIALS, ROOT / "docs" / "choosing.md"]
BLOCK = re.compile(r"```(python|text|sh|csv \S+)\n(.*?)```", flags=re.S)
pytestmark = pytest.mark.xdist_group("docs")  # which build the site once
ELSEWHERE = re.compile(r"""(?:src|href)=["']?(?:https?:)?//[^"'> ]+\.(?:js|css|woff2?|png|svg)""")


class Reader:
    """Someone who does what a tutorial says, and copies what a command printed into the next."""

    def __init__(self, folder):
        self.names, self.printed, self.said = {}, "", {}
        self.folder, self.hub = folder / "hub", None

    def do(self, kind, text):
        if kind == "text":
            assert self.printed == text
        elif kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, "a tutorial", "exec"), self.names)
            self.printed = out.getvalue()
        elif kind == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                self.run(line)
        else:
            Path(kind.removeprefix("csv ")).write_text(text)

    def run(self, line):
        if line == "consilience hub serve":
            self.hub = HubProcess(self.folder)
            self.hub.start()
            return self.hub.wait()
        for placeholder, value in self.said.items():
            line = line.replace(placeholder, value)
        if self.hub is not None:
            line = line.replace("http://127.0.0.1:8440", self.hub.address)
        program, *words = shlex.split(line)
        assert program == "consilience"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as leaving:
            main(words)
        assert not leaving.value.code, out.getvalue()
        said = out.getvalue()
        if words[1] == "invite":
            self.said["INVITATION"] = re.search(r"\S{40,}", said)[0]
        if words[1] == "submit":
            self.wait_for_release()
        if "--dry-run" in words:
            self.said["DIGEST"] = re.search(r"--approved (\S+)", said)[1]

    def wait_for_release(self):
        """Wait until the hub has combined what it has, if that is enough, or kept it back.

        Of two small hospitals noise makes a release in twenty worse than guessing.
        """
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with contextlib.closing(sqlite3.connect(self.folder / "hub.sqlite")) as db:
                (n,) = db.execute("SELECT count(*) FROM contributions").fetchone()
                (row,) = db.execute("SELECT changes, combined, withheld, problem FROM studies")
            changes, combined, withheld, problem = row
            if n < 2 or combined == changes or withheld:
                return
            time.sleep(0.05)
        raise AssertionError(f"the hub made no release: {problem}")


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
                reader.do(kind, text)
    finally:
        if reader.hub is not None:
            reader.hub.end()


def written():
    """Return every text that the source holds; what is put into it is …."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", None) for part in node.values)
                texts.append("".join(part if isinstance(part, str) else "…" for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_troubleshooting_quotes_messages_that_there_are_and_has_every_error_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables, codes = page.split("## What a hub can answer")
    rows = re.findall(r"^\| (`.*?`) \|", tables, flags=re.MULTILINE)
    said = [
        part for row in rows for quoted in re.findall("`(.*?)`", row) for part in quoted.split("…")
    ]
    source = written()
    assert len(rows) > 30
    assert [part for part in said if part.strip() not in source] == []
    listed = re.findall(r"^\| `([\w-]+)` \| (\d+) \|", codes, flags=re.MULTILINE)
    assert listed == [(code, str(status)) for code, (status, _) in ERRORS.items()]


def test_the_pictures_are_those_that_the_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name, draw in drawn["PICTURES"].items():
        found = (drawn["FOLDER"] / f"{name}.svg").read_text(encoding="utf-8")
        assert found == draw(), "write them again: python docs/pictures.py"


def test_the_notebooks_of_the_tutorials_are_made_of_their_pages():
    made = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
    for page in TUTORIALS:
        found = page.with_suffix(".ipynb").read_text(encoding="utf-8")
        assert found == made["write"](page), "write them again: python docs/notebooks.py"


LONG = [pytest.param(page, marks=pytest.mark.soak) for page in TUTORIALS[1:]]


@pytest.mark.parametrize("page", [TUTORIALS[0], *LONG], ids=lambda page: page.stem)
def test_the_notebook_of_a_tutorial_runs(page, tmp_path, monkeypatch):
    text = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    here = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{os.environ['PATH']}")
    port = str(free_port())  # another hub may be at the usual one
    text = text.replace('\\"serve\\"', f'\\"serve\\", \\"--port\\", \\"{port}\\"')
    notebook = nbformat.reads(text.replace(":8440", f":{port}"), as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import sys; print(sys.executable)"))
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert notebook.cells[-1].outputs[0].text.strip() == sys.executable
    if (tmp_path / "hub").exists():
        assert (tmp_path / "predictions.csv").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation as `make docs` builds it, where every warning is an error."""
    folder = tmp_path_factory.mktemp("docs")
    program = [sys.executable, ROOT / "docs" / "build.py", folder]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "site"


def test_every_public_name_is_documented(site):
    pages = "".join(page.read_text() for page in (site / "docs" / "api").glob("*.html"))
    for name in consilience.__all__:
        assert f'id="consilience.{consilience._MODULE_OF[name]}.{name}"' in pages, name


def test_nothing_is_fetched_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    assert [page.name for page in pages if ELSEWHERE.search(page.read_text())] == []


READ = (
    *("index.html", "docs/tutorials/01-a-private-model.html", "docs/concepts.html"),
    *("docs/choosing.html", "docs/api/05-privacy.html", "docs/comparison.html", "docs/for-it.html"),
)


def test_the_pages_of_the_site_fit_a_phone_and_keep_nobody_out(site, chromium, tmp_path):
    """Each page in both schemes, at one width in each; the pictures are for people who look."""
    for scheme, widths in (("dark", (360, 1280)), ("light", (1280, 360))):
        # The theme remembers a scheme, so that another one needs a browser that knows none.
        with contextlib.closing(chromium.new_context(offline=True, color_scheme=scheme)) as context:
            page = context.new_page()
            for at, name in enumerate(READ):
                width = widths[at % 2]
                page.set_viewport_size({"width": width, "height": 900})
                page.goto((site / name).as_uri())
                picture = f"{Path(name).stem}-{width}-{scheme}.png"
                page.screenshot(path=tmp_path / picture, full_page=True)
                shown = page.evaluate("document.body.dataset.mdColorScheme")
                assert shown == {"dark": "slate", "light": "default"}[scheme]
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
                require_accessible(page, name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_site_is_read_and_searched_from_a_folder(site, chromium, scheme, width):
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    failed = []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto((site / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("label[for=__search].md-header__button" if width < 960 else ".md-search__input")
    page.keyboard.type("lifetime limit")
    page.wait_for_selector(".md-search-result__item a", timeout=60_000)
    assert failed == []
    context.close()
