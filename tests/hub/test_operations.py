"""Operating a hub: options by flag, environment or file; its log; the audit log as CSV; asking."""

import csv
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from consilience import __version__
from consilience.cli.app import app
from consilience.hub import operating
from consilience.hub.api.log import MOST_TEXT, JsonLines, formatter, request_id
from consilience.hub.auth import new_token
from consilience.protocol import VERSION_HEADER


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["hub", *arguments], env=environment)


def parsed(*arguments: str) -> dict[str, Any]:
    """Return the options of `hub serve` as the command gets them."""
    hub: Any = get_command(app).commands["hub"]  # type: ignore[attr-defined]
    with typer.Context(hub) as parent:
        return dict(hub.commands["serve"].make_context("serve", list(arguments), parent).params)


def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hub.toml"
    file.write_text(
        'port = 1001\nfolder = "there"\nlog-format = "json"\nproxy = ["10.0.0.9", "10.0.0.8"]\n'
        "behind-proxy = true\nepsilon = 3.0\n"  # the last one is of another command
    )
    config = ("--config", str(file))
    assert parsed()["port"] == 8440
    found = parsed(*config)
    assert (found["port"], found["folder"], found["log_format"]) == (1001, Path("there"), "json")
    assert (list(found["proxy"]), found["behind_proxy"]) == (["10.0.0.9", "10.0.0.8"], True)
    assert "epsilon" not in found
    for arguments in (("--port", "1003", *config), (*config, "--port", "1003")):
        assert parsed(*arguments)["port"] == 1003
    monkeypatch.setenv("CONSILIENCE_PORT", "1002")
    assert parsed(*config)["port"] == 1002
    assert parsed(*config, "--port", "1003")["port"] == 1003
    monkeypatch.delenv("CONSILIENCE_PORT")
    monkeypatch.setenv("CONSILIENCE_CONFIG", str(file))
    assert parsed()["port"] == 1001


def test_a_file_with_an_unknown_option_or_a_wrong_value_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "hub.toml"
    for text, said in (
        ("prot = 1", "'prot'"),
        ("password = 'x'", "'password'"),
        ("yes = true", "'yes'"),
        ("port = 'x'", "port"),
        ("port =", "TOML"),
    ):
        file.write_text(text)
        answer = run("serve", "--config", str(file))
        assert answer.exit_code != 0
        assert said in answer.output + str(answer.exception)


def test_every_option_of_serving_has_a_name_in_the_environment() -> None:
    serve: Any = get_command(app).commands["hub"].commands["serve"]  # type: ignore[attr-defined]
    for parameter in serve.params:
        if parameter.name != "help":
            assert str(parameter.envvar).startswith("CONSILIENCE_"), parameter.name


def test_the_log_is_one_bounded_object_a_line_without_what_was_sent() -> None:
    def log(message: str, *values: object, **more: Any) -> Any:
        record = logging.LogRecord("consilience.hub", logging.ERROR, "", 1, message, values, None)
        for name, value in more.items():
            setattr(record, name, value)
        line = JsonLines().format(record)
        assert "\n" not in line
        return json.loads(line)

    assert log("it\nfailed: %s", "x" * 5000)["event"].startswith("it\nfailed: xxx")
    assert len(log("%s", "é" * 5000)["event"]) == MOST_TEXT
    try:
        raise ValueError("a value of a record: 4711")
    except ValueError:
        line = log("a page could not be made", exc_info=sys.exc_info())
    assert line["exception"] == "ValueError"
    assert line["at"][0].startswith("test_operations.py:")
    assert "4711" not in str(line)
    assert "request" not in line
    token = request_id.set("abc")
    assert log("x", facts={"status": 200})["request"] == "abc"
    request_id.reset(token)
    assert not isinstance(formatter("text"), JsonLines)


def test_each_request_is_a_line_with_the_number_that_its_answer_says(
    sqlite_world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "consilience.hub.requests")
    answers = [sqlite_world.client.get(f"/studies/secret-{i}?x=hidden") for i in range(2)]
    numbers = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(numbers)) == 2
    facts = [record.facts for record in caplog.records if record.getMessage() == "request"]
    assert [each["route"] for each in facts] == ["/studies/{study}"] * 2
    assert "hidden" not in caplog.text + str(facts)
    assert "secret-" not in str(facts)
    assert all(VERSION_HEADER not in answer.headers for answer in answers)  # for programs only
    stated = sqlite_world.client.get("/api/studies/secret").headers[VERSION_HEADER]
    assert stated == __version__


def test_the_audit_log_is_a_table(sqlite_world: Any, tmp_path: Path) -> None:
    world = sqlite_world
    world.add_study()
    store = world.hub.store
    store.log("operator", "=cmd()", None, note='a "quoted", text\nof two lines')
    token = new_token(store, "ann", hours=1, kind="test")[0]
    cookie, bearer = {"cookie": f"consilience={token}"}, {"authorization": f"Bearer {token}"}
    page = world.client.get("/audit.csv", headers=cookie)
    assert page.headers["content-type"].startswith("text/csv")
    assert "attachment" in page.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(page.text)))
    entries = store.audit(limit=10_000)
    assert [int(row["number"]) for row in rows] == [each["number"] for each in entries]
    assert [row["hash"] for row in rows] == [each["hash"] for each in entries]
    assert [json.loads(row["facts"]) for row in rows] == [each["facts"] for each in entries]
    assert next(row["action"] for row in rows if "cmd" in row["action"]) == "'=cmd()"
    assert world.client.get("/api/audit.csv", headers=bearer).text == page.text
    only = world.client.get("/audit.csv?study=demo", headers=cookie).text
    assert {row["study"] for row in csv.DictReader(io.StringIO(only))} == {"demo"}
    assert world.client.get("/audit.csv?study=none", headers=cookie).status_code == 404
    assert world.client.get("/api/audit.csv").status_code == 401
    assert "/audit.csv" in world.client.get("/audit", headers=cookie).text
    printed = run("audit", "--csv", "--folder", str(store.folder))
    assert printed.exit_code == 0
    assert len(printed.output.splitlines()) >= len(rows)
    assert printed.output.splitlines()[0] == "number,time,actor,action,study,facts,previous,hash"
    assert "added" in run("audit", "--folder", str(store.folder)).output


def test_the_audit_log_is_read_in_pieces(
    sqlite_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consilience.hub.store.audit.MOST_EXPORTED", 2)
    for _ in range(5):
        sqlite_world.hub.store.log("operator", "looked", None)
    pieces = list(sqlite_world.hub.store.audit_csv())
    n = len(sqlite_world.hub.store.audit(limit=100))
    assert len(pieces) == 1 + (n + 1) // 2
    assert sum(piece.count("\r\n") for piece in pieces) == n + 1


def test_what_cannot_be_undone_is_asked_first(tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path / "hub"))
    assert run("add-account", "eve", "--no-password", *folder).exit_code == 0
    for command in (
        ("disable", "eve", *folder),
        ("restore", str(tmp_path / "copy"), "--folder", str(tmp_path / "new")),
        ("batch", "demo", "--leave-out", "1", *folder),
    ):
        refused = run(*command)
        assert refused.exit_code != 0
        assert "Pass --yes" in refused.output + str(refused.exception)
    with operating.opened(tmp_path / "hub") as hub:
        assert hub.store.account("eve")["status"] == "active"  # type: ignore[index]
    assert run("disable", "eve", "--yes", *folder).exit_code == 0
    with operating.opened(tmp_path / "hub") as hub:
        assert hub.store.account("eve")["status"] == "disabled"  # type: ignore[index]
