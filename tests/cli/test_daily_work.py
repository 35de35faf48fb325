"""What people look up every day: what is next, what is left, and where the key is."""

import fcntl
import io
import json
import stat
import sys
import time

import pyarrow.csv
import pytest

import studies
from consilience.files.contribution import Contribution
from consilience.site.site import Site


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self):
        return True


@pytest.fixture
def ward(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "study.toml").write_text(studies.study_text())
    pyarrow.csv.write_csv(studies.table(60), "table.csv")
    for name in ("site", "south"):
        folder = ("--folder", name)
        run("site", "init", "--name", name, "--dataset", "ward", "--epsilon", 3, *folder)
        run("site", "join", "shared", *folder)
    return tmp_path


def train(run, *folder):
    asked = ("site", "train", "heart-risk", "table.csv", "--epsilon", 1, *folder)
    digest = json.loads(run(*asked, "--dry-run", "--json")[1])["digest"]
    assert run(*asked, "--approved", digest)[0] == 0


def stopped(seconds):
    raise KeyboardInterrupt


def status(run):
    said = run("site", "status")[1]
    return said, json.loads(run("site", "status", "--json")[1])["studies"][0]


def test_status_says_what_is_next_and_what_the_budget_is_enough_for(run, ward, monkeypatch):
    said, facts = status(run)
    assert f"heart-risk in folder {ward / 'shared'}: 0 trained" in said
    assert "enough for: 30 at epsilon 0.1, or 1 at epsilon 3" in said
    assert "next: consilience site check heart-risk TABLE" in said
    train(run)
    said, facts = status(run)
    assert (facts["next"], facts["trainings_left"]) == (
        "consilience site submit heart-risk",
        {"0.1": 20, "3.0": 0},
    )
    run("site", "submit", "heart-risk")
    assert "site fetch heart-risk" in status(run)[1]["next"]
    assert "shared folder offers no release" in run("site", "fetch", "heart-risk")[2]
    train(run, "--folder", "south")
    run("site", "submit", "heart-risk", "--folder", "south")
    code, said, noted = run("release", "make", "shared")
    assert (code, "A new key that signs releases" in noted) == (0, True)
    (key,) = (ward / "home").rglob("heart-risk-*.pem")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not list((ward / "shared").rglob("*.pem"))
    watch = ("site", "watch", "heart-risk", "--times", 2, "--every", 0.001, "--json")
    code, said, told = run(*watch, "--adapt", "table.csv")
    assert (code, json.loads(said)["releases"]) == (0, [1])
    assert "Release 1 of heart-risk is here" in told
    assert list((ward / "site").rglob("adapted-0001.html"))
    assert json.loads(run(*watch)[1])["releases"] == []  # it was told of before
    assert status(run)[1]["next"] == "consilience site adapt heart-risk TABLE"
    code, _, noted = run("release", "make", "shared")  # the same key is found again
    assert (code, noted) == (0, "")
    monkeypatch.setattr(time, "sleep", stopped)
    code, said, _ = run(*watch[:3], "--json")
    assert (code, json.loads(said)["releases"]) == (0, [2])


def test_watching_goes_on_while_another_command_is_at_work(run, ward, monkeypatch):
    """And what could not be adapted is adapted when the next question is asked."""
    for folder in ((), ("--folder", "south")):
        train(run, *folder)
        run("site", "submit", "heart-risk", *folder)
    table, elsewhere, locks, told = ward / "table.csv", ward / "elsewhere.csv", [], []
    between = [
        lambda: locks.append(flock(ward / "site")),
        lambda: locks.pop().close(),
        lambda: told.append(run("release", "make", "shared")[2]),  # with what was said before
        lambda: elsewhere.rename(table),
    ]
    monkeypatch.setattr(time, "sleep", lambda _: between.pop(0)())
    table.rename(elsewhere)
    watch = ("site", "watch", "heart-risk", "--times", 5, "--every", 0.001, "--json")
    code, said, warned = run(*watch, "--adapt", "table.csv")
    assert (code, json.loads(said)["releases"]) == (0, [1])
    assert "Another command is at work" in told[0]
    assert warned.count("Asked again in 0.001 minutes") == 1  # without the table
    assert list((ward / "site").rglob("adapted-0001.html"))


def flock(folder):
    lock = (folder / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_a_site_that_only_fetches_is_told_to_fetch(run, ward):
    run("site", "init", "--name", "reader", "--dataset", "w", "--epsilon", 1, "--folder", "reader")
    run("site", "join", "shared", "--fetch-only", "--folder", "reader")
    facts = json.loads(run("site", "status", "--folder", "reader", "--json")[1])["studies"][0]
    assert facts["next"].startswith("consilience site fetch")
    assert facts["trainings_left"] is None


def test_submitting_shows_the_file_and_asks_on_a_terminal(run, ward, monkeypatch):
    train(run)
    digest = Contribution.load(Site("site").contribution("heart-risk")).digest
    code, _, failed = run("site", "submit", "heart-risk", "--approved", "0" * 64)
    assert (code, f"{digest}, was not approved. Nothing was sent" in failed) == (1, True)
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, said, failed = run("site", "submit", "heart-risk")
    assert (code, "was not approved" in failed, "Contribution" in said) == (1, True, True)
    assert not list((ward / "shared").glob("*.safetensors"))
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert run("site", "submit", "heart-risk")[0] == 0
    assert run("site", "submit", "heart-risk", "--approved", digest)[0] == 0
