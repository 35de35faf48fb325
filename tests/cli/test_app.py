import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilience import __version__
from consilience.cli.app import app, help_page, main
from consilience.privacy.accounting import Laplace
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger

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


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        return leaving.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def charged(tmp_path):
    path = tmp_path / "site.sqlite"
    ledger = Ledger(path)
    ledger.allow("ward", Budget(epsilon=2.0))
    event = Laplace(unit="record", neighbours="replace-one", sensitivity=1.0, scale=2.0)
    ledger.charge([event], dataset="ward", key="first", purpose="count")
    return path


def test_the_command_page_equals_the_help():
    found = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    how = "python -c 'from consilience.cli.app import help_page; print(help_page(), end=\"\")' > docs/cli.md"
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


def test_plan_prints_a_table_or_json(run):
    arguments = ("plan", "--records", 8678, "--features", 50, "--epsilon", 0.1)
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "At epsilon=0.1 with n=8,678 expect" in out
    code, out, _ = run(
        *arguments, "--delta", 1e-5, "--learner", "svm", "--mechanism", "output", "--json"
    )
    assert code == 0
    assert json.loads(out)["rows"][3]["epsilon"] == 0.1


def test_plan_reads_public_records(run, tmp_path):
    path = tmp_path / "public.csv"
    path.write_text(
        "a,b,y\n" + "".join(f"{i % 7},{'uv'[i % 2]},{int(i % 7 > 3)}\n" for i in range(70))
    )
    code, out, _ = run(
        "plan", "--records", 500, "--epsilon", 1, "--public", path, "--label", "y", "--sites", 2
    )
    assert code == 0
    assert "error" in out.splitlines()[0]
    code, _, err = run("plan", "--records", 500, "--epsilon", 1, "--public", path)
    assert code == 1
    assert "both --public and --label" in err


def test_plan_covers_aggregators_and_what_they_need(run):
    arguments = (
        "plan",
        "--records",
        789,
        "--features",
        50,
        "--epsilon",
        1,
        "--sites",
        10,
        "--hub-records",
        200,
    )
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "Predicted: join by public blend" in out
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    values = json.loads(out)
    assert values["recommended"] == "public blend"
    assert {"average", "feature method", "soft labels, statistic"} < {
        one["name"] for one in values["joined"]
    }


def test_plan_leaves_out_the_columns_that_are_no_features(run, tmp_path):
    path = tmp_path / "public.csv"
    path.write_text("id,a,y\n" + "".join(f"p{i},{i % 7},{int(i % 7 > 3)}\n" for i in range(70)))
    arguments = (
        "plan",
        "--records",
        500,
        "--epsilon",
        1,
        "--public",
        path,
        "--label",
        "y",
        "--features",
        1,
    )
    code, _, err = run(*arguments)
    assert code == 1
    assert "n_features" in err  # 70 names are 70 features
    assert run(*arguments, "--drop", "id")[0] == 0
    code, _, err = run(*arguments, "--drop", "name")
    assert code == 1
    assert "no column 'name' to drop" in err


@pytest.fixture
def records(tmp_path):
    """Two numbers, a category, a hospital, and a label that follows from the numbers."""
    path = tmp_path / "records.csv"
    lines = [
        f"{i % 17},{i % 11},{'uv'[i % 2]},h{i % 3},{'yes' if i % 17 + i % 11 > 13 else 'no'}"
        for i in range(400)
    ]
    path.write_text("a,b,c,hospital,ill\n" + "\n".join(lines) + "\n")
    return path


def test_simulate_compares_every_aggregator_with_the_honest_baselines_and_writes_files(
    run, records, tmp_path
):
    names = ("average", "average-equal", "average-size", "feature", "blend", "boosting")
    chosen = [word for name in names for word in ("--aggregator", name)]
    data = (
        "simulate",
        "--data",
        records,
        "--label",
        "ill",
        "--epsilon",
        2,
        "--public",
        60,
        "--seed",
        1,
    )
    code, out, err = run(
        *data, "--epsilon", 8, *chosen, "--sites", 3, "--repeats", 2, "--out", tmp_path / "out"
    )
    assert (code, err) == (0, "")
    for title in (
        "public records alone",
        "a site alone",
        "all records pooled",
        *(f"joined: {name}" for name in names),
    ):
        assert title in out
    assert "epsilon=8: joining 3 sites by" in out
    assert "no guarantee: seeded noise" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "results.csv",
        "results.parquet",
        "errors.png",
    }


def test_simulate_goes_on_from_a_checkpoint_on_any_backend(run, records, tmp_path):
    data = (
        "simulate",
        "--data",
        records,
        "--label",
        "ill",
        "--epsilon",
        2,
        "--repeats",
        2,
        "--draws",
        2,
        "--json",
    )
    kept = ("--checkpoint", tmp_path / "kept")
    first, again = (
        run(*data, "--seed", 1, *kept, *how)[1]
        for how in ((), ("--backend", "threading", "--jobs", 2))
    )
    assert json.loads(first)["table"] == json.loads(again)["table"]
    assert json.loads(again)["settings"]["draws"] == 2
    assert len(list((tmp_path / "kept").iterdir())) == 2
    code, _, err = run(*data, *kept)
    assert code == 1
    assert "'seed'" in err


def test_simulate_takes_sites_from_a_column_and_prints_json(run, records):
    data = ("simulate", "--data", records, "--label", "ill", "--epsilon", 2, "--repeats", 1)
    code, out, _ = run(*data, "--site-column", "hospital", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["settings"]["sites"] == 3
    assert values["settings"]["features"] == 4  # the hospital is none
    assert values["guarantee"]["void_reason"] is None
    assert values["files"] == []
    code, _, err = run(*data, "--site-column", "ward")
    assert code == 1
    assert "no column 'ward'" in err
    code, out, _ = run(
        *data, "--size", 40, "--size", 90, "--label-skew", 0.5, "--learner", "svm", "--json"
    )
    assert json.loads(out)["settings"]["sizes"] == [40, 90]


def test_audit_reports_a_passed_attack(run):
    code, out, _ = run("audit", "--epsilon", 1, "--mechanism", "output", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["passed"]
    assert 0 < values["epsilon_lower"] <= 1


def test_ledger_show_tells_limits_and_charges(run, charged):
    code, out, _ = run("ledger", "show", charged)
    assert code == 0
    assert "limit 2, spent 0.5, left 1.5" in out
    assert "reserved" in out
    values = json.loads(run("ledger", "show", charged, "--json")[1])
    assert values["balances"][0]["left"]["epsilon"] == 1.5
    assert values["charges"][0]["purpose"] == "count"


def test_ledger_show_of_a_data_set_that_was_never_charged(run, charged):
    Ledger(charged).allow("clinic", Budget(epsilon=3.0))
    assert "limit 3, spent 0, left 3" in run("ledger", "show", charged, "--dataset", "clinic")[1]
    assert "no limit was ever declared" in run("ledger", "show", charged, "--dataset", "nowhere")[2]


def test_ledger_verify_prints_the_head_and_fails_on_a_strange_one(run, charged):
    code, out, _ = run("ledger", "verify", charged, "--json")
    head = json.loads(out)["head"]
    assert code == 0
    assert run("ledger", "verify", charged, "--head", head)[:2] == (
        0,
        f"The chain is whole. Its head is {head}\n",
    )
    code, out, err = run("ledger", "verify", charged, "--head", "0" * 63 + "1")
    assert (code, out) == (1, "")
    assert "rolled back" in err


def test_looking_for_a_ledger_does_not_create_one(run, tmp_path):
    code, _, err = run("ledger", "show", tmp_path / "none.sqlite")
    assert code == 1
    assert "There is no ledger" in err
    assert list(tmp_path.iterdir()) == []


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
