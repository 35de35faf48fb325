import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilience import __version__
from consilience.cli.app import app, help_page

ROOT = Path(__file__).parents[2]
COMMANDS = [["demo"], ["plan"], ["simulate"], ["audit"], ["ledger", "show"], ["ledger", "verify"]]
COMMANDS += [["study", verb] for verb in ("new", "check", "show")]
COMMANDS += [
    ["site", verb]
    for verb in ("init", "join", "train", "submit", "fetch", "withdraw", "status", "rotate-key")
]
COMMANDS += [["site", verb] for verb in ("open", "backup", "recover")]
COMMANDS += [["contribution", "show"], ["contribution", "verify"]]
COMMANDS += [["release", verb] for verb in ("show", "verify", "predict", "make")]
COMMANDS += [
    ["hub", verb]
    for verb in ("add-coordinator", "add-study", "invite", "allow", "aggregate", "verify")
]
COMMANDS += [["hub", verb] for verb in ("backup", "restore")]


def shell(*arguments, **environment):
    """Run the installed command as a user does, without a terminal."""
    return subprocess.run(
        [Path(sys.executable).with_name("consilience"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_the_command_page_equals_the_help():
    found = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    program = 'from consilience.cli.app import help_page; print(help_page(), end="")'
    how = f"python -c '{program}' > docs/cli.md"
    assert found == help_page(), f"write it again: {how}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(command):
    shown = CliRunner().invoke(app, [*command, "--help"], prog_name="consilience")
    assert shown.exit_code == 0
    assert f"Example: consilience {' '.join(command)}" in " ".join(shown.output.split())
    assert "--json" in shown.output


def test_help_and_version_answer_from_a_shell_and_load_no_more_than_the_package_does():
    assert shell("--version").stdout == f"consilience {__version__}\n"
    shown = shell("--help")
    assert shown.returncode == 0
    assert "--install-completion" in shown.stdout
    code = """
import sys, consilience
before = set(sys.modules)
import consilience.cli.app
consilience.cli.app.help_page()
added = {name.partition(".")[0] for name in set(sys.modules) - before}
sys.exit(bool(added & {"numpy", "scipy", "sklearn", "opendp", "pyarrow", "rich", "matplotlib"}))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shell_completion_knows_the_commands():
    words = {
        "_CONSILIENCE_COMPLETE": "complete_bash",
        "COMP_WORDS": "consilience led",
        "COMP_CWORD": "1",
    }
    assert shell(**words).stdout.split() == ["ledger"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", "--records", "10", "--epsilon", "1"], 1),
        (["plan", "--records", "10", "--features", "3", "--epsilon", "-1"], 1),
        (["plan", "--records", "many", "--features", "3", "--epsilon", "1"], 2),
        (["plan", "--epsilon", "1"], 2),
        (["plan", "--records", "10", "--nonsense"], 2),
        (["nonsense"], 2),
        (["demo", "--folder", "/dev/null/report"], 1),
        (["demo", "--repeats", "2"], 2),
        (["site", "status", "--folder", "/nowhere"], 1),
        (["study", "check", "/nowhere.toml"], 1),
        (["release", "verify", "/nowhere.safetensors"], 1),
        (["contribution", "verify", "/dev/null"], 1),
        (["hub", "restore", "/nowhere", "--folder", "/nowhere-either"], 1),
        (["ledger", "verify", "/dev/null"], 1),
        (["simulate", "--data", "/nowhere.csv", "--label", "y", "--epsilon", "1"], 1),
        (
            [
                "simulate",
                "--data",
                "/nowhere.csv",
                "--label",
                "y",
                "--epsilon",
                "1",
                "--aggregator",
                "magic",
            ],
            2,
        ),
        (["simulate", "--data", "/nowhere.csv", "--label", "y"], 2),
    ],
)
def test_every_failure_is_one_line_on_standard_error(run, arguments, code):
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert err.startswith("consilience: ")
    assert err.count("\n") == 1


def test_no_command_prints_the_help_and_is_no_success(run):
    for group in ([], ["ledger"]):
        code, out, _ = run(*group)
        assert code == 2
        assert "Commands:" in out


def test_an_unexpected_error_shows_neither_message_nor_values(run):
    def explode():
        record = "MARKED7351"
        raise ValueError(record)

    app.command("explode")(explode)
    try:
        code, out, err = run("explode")
    finally:
        app.registered_commands.pop()
    assert (code, out) == (1, "")
    assert "unexpected ValueError at test_app.py:" in err
    assert "MARKED7351" not in err


@pytest.mark.parametrize(
    ("module", "package"),
    [("fastapi", "consilience[hub]"), ("psycopg", "consilience[hub]"), ("nowhere.at", "nowhere")],
)
def test_a_missing_package_is_named_with_what_to_install(run, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)  # as Python marks what cannot be imported
    app.command("use")(lambda: __import__(module))
    try:
        code, out, err = run("use")
    finally:
        app.registered_commands.pop()
    assert (code, out) == (1, "")
    assert f"pip install '{package}'" in err
    assert err.count("\n") == 1
