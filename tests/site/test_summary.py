"""A study of a summary goes from files to a table, and a site compares its own at home."""

import csv
import json
import stat

import numpy as np
import pyarrow.compute as pc
import pyarrow.csv
import pytest

from consilience import Budget
from consilience.cli.app import main
from consilience.errors import SettingsError
from consilience.evaluation.table_one import ALL
from consilience.files.contribution import Contribution
from consilience.files.log import ReleaseLog
from consilience.files.sealed import SigningKey
from consilience.site.site import Site
from consilience.statistics.score import subgroups_of
from consilience.study.collect import Publication
from consilience.study.study import Study, check
from studies import blind_text, records_parts, study_text, table

NAMES = ("north", "south", "west")


def summary_text(name="Summary", more=""):
    text = study_text(privacy="delta = 1e-6")
    return f'{text[: text.index("[learner]")]}[statistic]\nname = "{name}"\n{more}'


def own_table(seed):
    """Return a site's table; that of the last site has pressures that were measured otherwise."""
    made = table(1500, seed=seed)
    if seed == 2:
        place = made.column_names.index("pressure")
        higher = pc.multiply(made.column("pressure"), 1.15)
        made = made.set_column(place, "pressure", higher)
    return made


def release_of(folder, text, tables):
    """Return sites that contributed to a study and fetched its release, and the release's file."""
    shared, sites = folder / "shared", []
    shared.mkdir()
    (shared / "study.toml").write_text(text)
    for name, records in zip(NAMES, tables, strict=False):
        budget = Budget(epsilon=3.0, delta=1e-5)
        site = Site.init(folder / name, name=name, dataset="ward", budget=budget)
        site.join_folder(shared)
        site.train("heart-risk", records, epsilon=3.0)
        site.submit("heart-risk")
        sites.append(site)
    files = sorted(shared.glob("contribution-*.safetensors"))
    release = Study.from_text(text).combine(
        [Contribution.load(file) for file in files],
        publication=Publication(SigningKey.generate(), 1, log=ReleaseLog()),
    )
    release.save(shared / release.filename)
    for site in sites:
        site.fetch("heart-risk")
    return sites, shared / release.filename


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Three sites that contributed to a summary and fetched it."""
    folder = tmp_path_factory.mktemp("summary")
    return folder, *release_of(folder, summary_text(), map(own_table, range(3)))


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return (leaving.value.code or 0), printed.out, printed.err


def test_the_command_line_shows_the_table_of_a_release(world, tmp_path, capsys):
    folder, _, release = world
    outs = (
        "--html",
        tmp_path / "t.html",
        "--csv",
        tmp_path / "t.csv",
        "--plot",
        tmp_path / "t.png",
    )
    code, text, problem = run(
        capsys, "release", "summary", release, folder / "shared" / "study.toml", *outs
    )
    assert code == 0, problem
    assert "pressure" in text
    assert "median" in text
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    (mean,) = [
        row
        for row in rows
        if (row["column"], row["what"]) == ("age", "mean") and row["group"] == ALL
    ]
    truth = np.mean([pc.mean(own_table(seed)["age"]).as_py() for seed in range(3)])
    assert float(mean["low"]) - 2 <= truth <= float(mean["high"]) + 2
    assert (tmp_path / "t.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    code, text, _ = run(capsys, "release", "summary", release, folder / "north", "--json")
    assert code == 0
    assert json.loads(text)["groups"][-1] == ALL
    code, text, _ = run(capsys, "release", "show", release)
    assert code == 0
    assert "Summary" in text or "sums of all sites" in text


def test_a_site_learns_at_home_where_it_differs_and_nothing_leaves(world, tmp_path, capsys):
    folder, sites, _ = world
    spent = [site.ledger.balance("ward").spent for site in sites]
    shared = sorted((folder / "shared").iterdir())
    found = [
        {
            each.column
            for each in site.compare_summary("heart-risk", own_table(seed)).comparison.differences
        }
        for seed, site in enumerate(sites)
    ]
    assert "pressure" in found[2]
    assert "age" not in found[2]
    assert [site.ledger.balance("ward").spent for site in sites] == spent
    assert sorted((folder / "shared").iterdir()) == shared
    page = folder / "west" / "studies" / "heart-risk" / "summary-0001.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "This page stays here" in page.read_text()
    pyarrow.csv.write_csv(own_table(2), tmp_path / "west.csv")
    site = ("--folder", folder / "west")
    code, text, problem = run(
        capsys, "site", "compare-summary", "heart-risk", tmp_path / "west.csv", *site
    )
    assert code == 0, problem
    assert "pressure" in text
    assert "differ" in text


def test_what_is_no_summary_is_not_shown_as_one(tmp_path, capsys):
    tables = [table(300, seed=seed) for seed in range(2)]
    sites, release = release_of(tmp_path, summary_text("Moments"), tables)
    with pytest.raises(SettingsError, match="no summary"):
        sites[0].compare_summary("heart-risk", tables[0])
    code, _, problem = run(capsys, "release", "summary", release, tmp_path / "north")
    assert code != 0
    assert "is no summary" in problem


def test_a_study_with_test_records_measures_the_most_frequent_answer(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(summary_text(more=records_parts(tmp_path)))
    assert check(path) == []
    path.write_text(summary_text("NumberSummary"))
    assert any("NumberSummary cannot predict" in problem for problem in check(path))
    path.write_text(summary_text().replace("delta = 1e-6", "delta = 1e-6\nmax_weight = 0.5"))
    assert any("counts alike" in problem for problem in check(path))


def test_all_sites_of_a_blind_summary_have_one_epsilon(tmp_path):
    path = tmp_path / "study.toml"
    text = blind_text(("a" * 64, "b" * 64), statistic="Summary")
    path.write_text(text)
    assert any("one epsilon" in problem for problem in check(path))
    path.write_text(text.replace("epsilon_min = 0.1", "epsilon_min = 3.0"))
    assert check(path) == []


def test_the_command_line_shows_scores_on_the_sites_own_records(tmp_path, capsys):
    marks = subgroups_of(Study.from_text(summary_text()).schema, "sex")
    more = f"model = [[1.5, 0.0, 0.0, 1.5, 0.0]]\nsubgroups = {json.dumps(marks)}"
    tables = [table(800, seed=seed) for seed in range(2)]
    _, release = release_of(tmp_path, summary_text("Score", more), tables)
    page = tmp_path / "scores.html"
    code, text, problem = run(
        capsys, "release", "scores", release, tmp_path / "north", "--html", page
    )
    assert code == 0, problem
    for word in ("accuracy", "AUC", "sex: f", "sex: m", "Calibration of 1"):
        assert word in text
    assert "AUC" in page.read_text()
    code, _, problem = run(capsys, "release", "summary", release, tmp_path / "north")
    assert code != 0
    assert "is no summary" in problem
