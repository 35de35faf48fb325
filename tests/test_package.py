"""The package as its readers meet it: exports, proof pages, links, the README's own program."""

import ast
import doctest
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.csv
import pytest
import typer

import consilience
import consilience.errors
import studies
from consilience.cli.app import app
from consilience.learners.provenance import HOW_ENCODED
from consilience.privacy.accounting import EVENTS

ROOT = Path(__file__).parent.parent
MODULES = [module.name for module in pkgutil.walk_packages(consilience.__path__, "consilience.")]


def test_every_exported_name_exists_and_is_in_order():
    assert consilience.__all__ == sorted(consilience.__all__)
    for name in consilience.__all__:
        assert callable(getattr(consilience, name)), f"{name} is no class or function"


def test_importing_a_module_never_hides_the_function_of_its_name():
    for name in MODULES:
        if name != "consilience.adapters.flower":
            importlib.import_module(name)
    for name in consilience.__all__:
        assert callable(getattr(consilience, name))


def test_type_checkers_and_the_interpreter_see_the_same_names():
    tree = ast.parse(Path(consilience.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.asname: node.module.removeprefix("consilience.")
        for node in block.body
        for alias in node.names
    }
    assert declared == consilience._MODULE_OF


def test_every_error_is_exported():
    kinds = ((name, kind) for name, kind in vars(consilience.errors).items() if type(kind) is type)
    errors = {name for name, kind in kinds if issubclass(kind, Exception)}
    assert len(errors) >= 8
    assert errors <= set(consilience.__all__)


def test_a_misspelled_name_is_no_attribute_and_completion_lists_the_others():
    with pytest.raises(AttributeError, match="no attribute 'Studdy'"):
        consilience.Studdy  # noqa: B018
    assert set(consilience.__all__) <= set(dir(consilience))


def test_importing_the_package_loads_nothing_that_takes_time():
    heavy = ("numpy", "scipy", "sklearn", "pyarrow", "dp_accounting", "opendp", "typer")
    heavy += ("numba", "matplotlib", "dask", "ray", "boto3", "flwr")
    program = f"import sys, consilience; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


def test_every_public_name_has_an_example():
    """The next test runs them; the API reference shows them."""
    shown = {name: inspect.getdoc(getattr(consilience, name)) for name in consilience.__all__}
    assert [name for name, text in shown.items() if ">>> " not in (text or "")] == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    if name == "consilience.adapters.flower":
        pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_every_event_names_its_proof_page_and_the_page_exists(event):
    (page,) = re.findall(r"docs/guarantees/[a-z0-9-]+\.md", event.__doc__)
    assert len((ROOT / page).read_text()) > 1000


def test_every_proof_page_named_in_the_code_exists():
    named = {
        page
        for file in (ROOT / "src").rglob("*.py")
        for page in re.findall(r"docs/guarantees/[\w-]+\.md", file.read_text())
    }
    assert len(named) >= 10
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_every_private_learner_says_in_its_notes_what_is_private_and_where_the_proof_is():
    learners = [
        getattr(consilience, name) for name in consilience.__all__ if name.startswith("Private")
    ]
    assert len(learners) >= 5
    for learner in learners:
        assert "Notes\n    -----\n    **Privacy.** " in learner.__doc__, learner
        assert "docs/guarantees/" in learner.__doc__, learner


def test_links_between_documents_lead_somewhere():
    broken = []
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


@pytest.mark.parametrize("number", [0, 1])
def test_the_readme_programs_run_and_print_what_they_say(number, tmp_path, monkeypatch, capsys):
    program = PROGRAMS[number]
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    if number == 0:
        assert printed == re.findall(r"print\(.*#\s(.*)", program)
    else:
        assert printed[0] == (
            "Guarantee(epsilon=4, delta=0, per record, replace-one, 2 assumptions)"
        )
        assert printed[1] == f"- assuming that {HOW_ENCODED}"
        assert len(printed) == 3


def test_the_readme_program_about_a_study_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("shared").mkdir()
    text = studies.study_text().replace("heart-risk", "ward-study")
    for file in ("study.toml", "shared/study.toml"):
        Path(file).write_text(text)
    for seed, name in enumerate(("ward.csv", "public.csv")):
        pyarrow.csv.write_csv(studies.table(300, seed=seed), name)
    site = consilience.Site.init(
        "site", name="north", dataset="ward", budget=consilience.Budget(epsilon=1.0)
    )
    site.join_folder("shared")
    results = {}
    exec(compile(PROGRAMS[2], "README.md", "exec"), results)
    assert results["contribution"].guarantee.epsilon == pytest.approx(1.0)
    assert results["report"].sentence
    assert results["advice"].rows
    assert capsys.readouterr().out == ""
    # The same training is only reported again; for another one the budget is spent now.
    another = PROGRAMS[2].replace("epsilon=1.0", "epsilon=0.9")
    exec(compile(another, "README.md", "exec"), {})
    assert "Nothing was trained" in capsys.readouterr().out


def test_commands_in_the_documents_exist_with_their_options():
    root = typer.main.get_command(app)
    unknown, checked = [], 0
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}
    for page in pages - {ROOT / "docs" / "protocol.md"}:  # its strings start in the same way
        text = page.read_text().replace("\\\n", " ")
        for words in re.findall(r"(?<=[\n`])consilience ([a-z][^\n`#]*)", text):
            command, options = root, re.findall(r"(?<=\s)--[a-z-]+", words)
            for word in words.split():
                command = getattr(command, "commands", {}).get(word) or command
            known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
            checked += 1
            if command is root or not set(options) <= known:
                unknown.append(f"{page.name}: consilience {words}")
    assert unknown == []
    assert checked > 50


def test_the_glossary_defines_the_words_it_is_made_for():
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    words = "site hub record person schema study mechanism event guarantee budget ledger learner"
    for word in [*words.split(), "audit"]:
        assert f"**{word}**" in glossary


# ------------------------------------------------------------------------------- what is installed


@pytest.fixture(scope="module")
def packages():
    spec = importlib.util.spec_from_file_location("packages", ROOT / ".ci" / "packages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_package_that_setup_installs_has_its_hashes_and_no_address(packages):
    text = packages.HASHED.read_text()
    hashed, pins = packages.read_pins(packages.HASHED), packages.read_pins()
    needed = packages.closure("consilience[dev]", packages.SYSTEMS).keys() - {"consilience"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = declared["dependencies"] + declared["optional-dependencies"]["dev"]
    named = {re.match(r"[\w-]+", line)[0].lower() for line in lines} - {"consilience"}
    assert needed | named <= hashed.keys()  # on Linux and macOS, with every supported Python
    assert hashed.items() <= pins.items()
    blocks = re.split(r"(?<!\\)\n", text.removeprefix(packages.HEAD).strip())
    assert len(blocks) == len(hashed)
    assert all(re.fullmatch(r"\S+==\S+( \\\n +--hash=sha256:\w{64})+", one) for one in blocks)
    for file in (packages.HASHED, *ROOT.glob("constraints*.txt")):
        assert "://" not in file.read_text()


def test_hashes_of_an_index_are_those_of_wheels_that_can_be_installed_here(packages):
    files = {
        "a": "thing_one-1.2-py3-none-any.whl",
        "b": "thing_one-1.2-cp312-cp312-manylinux_2_28_x86_64.whl",
        "c": "thing_one-1.2-cp38-abi3-macosx_11_0_arm64.whl",
        "d": "thing_one-1.2-cp312-cp312-win_amd64.whl",
        "e": "thing_one-1.2-cp39-cp39-manylinux_2_28_x86_64.whl",
        "f": "thing_one-1.2.1-py3-none-any.whl",
        "0": "thing_one-1.2.tar.gz",
    }
    page = "\n".join(f'<a href="../x/{file}#sha256={64 * k}">' for k, file in files.items())
    assert packages.hashes(page, "thing-one", "1.2") == [64 * "a", 64 * "b", 64 * "c"]


def test_the_list_of_an_installation_names_what_its_sites_and_hubs_run_on(packages):
    found = packages.make_sbom()
    assert (found["bomFormat"], found["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "consilience",
    )
    listed = {one["name"].lower(): one for one in found["components"]}
    assert {"numpy", "cryptography", "fastapi", "httpx", "boto3", "starlette"} <= listed.keys()
    assert not {"pytest", "ruff", "consilience"} & listed.keys()
    assert listed["numpy"]["version"] == importlib.metadata.version("numpy")
    known = {one["bom-ref"] for one in [*listed.values(), found["metadata"]["component"]]}
    assert {one["ref"] for one in found["dependencies"]} == known
    assert {to for one in found["dependencies"] for to in one["dependsOn"]} <= known
    assert found == packages.make_sbom()


def test_a_wheel_is_installed_beside_packages_of_known_hash(packages):
    text = packages.part(packages.INSTALLED)
    needed = {one["name"] for one in packages.make_sbom()["components"]}
    assert text.count("==") == len(needed)
    assert set(text.splitlines()) <= set(packages.HASHED.read_text().splitlines())
    blocks = re.split(r"(?<!\\)\n", text.strip())
    assert all(re.fullmatch(r"\S+==\S+( \\\n +--hash=sha256:\w{64})+", one) for one in blocks)
