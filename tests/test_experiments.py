"""Run the papers' experiments in miniature on made-up data; check that verdicts can fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from experiments import (
    __main__,
    datasets,
    design,
    equal,
    frozen,
    kinds,
    report,
    statements,
    verdicts,
)
from experiments.run import SEEDS, Settings, collect, miniature, plan, run, select, stored

import consilience as cs
from consilience.simulation.digest import CODE, code_digest

PAPERS = {paper.name: paper for paper in design.papers()}


def rows_of(lines, xs=(1.0, 2.0, 3.0)):
    """A tidy table from the repeats of each label at each x."""
    return [
        {"label": label, "x": x, "repeat": repeat, "value": value}
        for label, by_x in lines.items()
        for x, values in zip(xs, by_x, strict=True)
        for repeat, value in enumerate(values)
    ]


def judged(kind, lines, xs=(1.0, 2.0, 3.0), **settings):
    asked = {"paper": "a", "figure": "1", "panel": "1", "claim": "", "source": ""}
    asked |= {"explanation": "", "kind": kind}
    return verdicts.judge(statements.Statement(**asked, **settings), {"1": rows_of(lines, xs)})


def verdict(kind, lines, xs=(1.0, 2.0, 3.0), **settings):
    return judged(kind, lines, xs, **settings).verdict


def around(*means, repeats=5, spread=0.01):
    """Repeats with exactly these means, and a spread."""
    wave = spread * np.cos(np.arange(repeats) * 2.0)
    wave -= wave.mean()
    return [list(mean + np.roll(wave, place)) for place, mean in enumerate(means)]


# ------------------------------------------------------------------------------ papers in miniature


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_runs_in_miniature_and_its_report_and_pictures_are_written(name, tmp_path):
    """Two panels at most, spread over the paper: the others differ from these in numbers."""
    _run_in_miniature(name, tmp_path, 2)


@pytest.mark.soak
@pytest.mark.parametrize("name", PAPERS)
def test_every_panel_of_a_paper_runs_in_miniature(name, tmp_path):
    _run_in_miniature(name, tmp_path, len(select([name])))


def _run_in_miniature(name, tmp_path, most):
    paper, settings = PAPERS[name], miniature(tmp_path)
    everything = select([name])
    chosen = everything[:: -(-len(everything) // most)]
    run(chosen, settings)
    page = report.write([paper], settings, chosen).read_text(encoding="utf-8")
    for _, figure, panel in chosen:
        assert f'id="{name}-{figure.id}"' in page
        assert (
            panel.kind == "drawing" or (tmp_path / name / f"{panel.id}.parquet").stat().st_size > 0
        )
        for ending in ("svg", "png"):
            assert (tmp_path / name / f"figure-{figure.id}.{ending}").stat().st_size > 1000
            assert (tmp_path / name / f"figure-{figure.id}-paper.{ending}").stat().st_size > 1000
    assert "MADE-UP" in page
    assert "voids every guarantee" in page
    assert 'src="http' not in page  # self-contained


@pytest.mark.parametrize("name", PAPERS)
def test_every_panel_of_a_paper_can_be_planned(name, tmp_path):
    for _, _, panel in select([name]):
        assert panel.kind == "drawing" or panel.computed or plan(panel, miniature(tmp_path))


@pytest.mark.parametrize("name", PAPERS)
def test_every_figure_and_panel_has_a_statement_about_lines_that_are_drawn(name):
    paper = PAPERS[name]
    found = statements.statements(paper)
    panels = {panel.id: panel for figure in paper.figures for panel in figure.panels}
    assert {statement.figure for statement in found} == {figure.id for figure in paper.figures}
    assert {id_ for id_, panel in panels.items() if panel.kind != "drawing"} <= {
        panel for one in found for panel in (one.panel, *one.variants.values())
    }
    for statement in found:
        labels = {method.label for method in panels[statement.panel].methods}
        assert statement.kind in kinds.KINDS
        assert {statement.a, statement.b} - {""} <= labels, statement.claim
        assert statement.claim.strip()
        assert len(statement.explanation) > 10


@pytest.mark.parametrize("name", PAPERS)
def test_a_figure_list_draws_what_the_paper_drew_and_more_under_names_of_their_own(name):
    for figure in PAPERS[name].figures:
        for panel in figure.panels:
            if panel.kind == "drawing":
                continue
            labels = [method.label for method in panel.methods]
            assert len(set(labels)) == len(labels)
            assert "paper" in {method.role for method in panel.methods}
            assert panel.computed or {method.run for method in panel.methods} == set(panel.runs())
            assert panel.data in datasets.LOADERS


def test_what_is_finished_is_taken_and_a_changed_argument_is_another_point(tmp_path):
    chosen, settings = select(["xie2016/3a"]), miniature(tmp_path)
    first = run(chosen, settings)
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("points/*.parquet")}
    assert run(chosen, settings) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("points/*.parquet")} == stored
    next(iter(stored)).unlink()
    assert run(chosen, settings) == first  # the table has it
    (tmp_path / "xie2016" / "3a.parquet").unlink()
    assert run(chosen, settings) == first  # seeded: the lost point comes back as it was
    assert all(path.exists() for path in stored)
    same = {point.key for point in plan(chosen[0][2], settings)}
    assert same == {path.stem for path in stored}
    other = {point.key for point in plan(chosen[0][2], replace(miniature(tmp_path), seeds=(1,)))}
    assert not same & other


def test_the_tidy_table_has_every_drawn_line_at_every_x_and_repeat(tmp_path):
    settings = miniature(tmp_path)
    (paper, _, panel), *_ = select(["xie2016/3a"])
    run([(paper, paper.figures[0], panel)], settings)
    table = pq.read_table(tmp_path / paper.name / f"{panel.id}.parquet")
    rows = table.to_pylist()
    assert {row["label"] for row in rows} == {method.label for method in panel.methods}
    assert len(rows) == len(panel.methods) * len(settings.values(panel)) * settings.repeats(panel)
    facts = json.loads(table.schema.metadata[b"facts"])
    assert facts["seeds"] == list(settings.seeds)
    assert min(facts["points"].values()) > 0
    assert facts["code"] == [code_digest()]
    assert {name for name, _ in facts["functions"]} == {
        "experiments.datasets:axes",
        "experiments.datasets:mnist37",
    }


def test_points_that_differ_in_epsilon_only_share_one_simulation():
    (_, _, panel), *_ = select(["xie2016/3a"])
    settings = miniature(Path())
    whole = type(settings)(Path(), full=True, n_jobs=1)
    data = datasets.made_up(panel.data)

    class Made(type(settings)):
        def data(self, name):
            return data

    points = plan(panel, Made(**vars(whole)))
    by_run = {(point.run, point.seed): point for point in points}
    assert len(points) == len(by_run) == 7 * len(SEEDS)
    assert list(by_run["paper", SEEDS[0]].levels) == list(panel.x)
    assert len(by_run["paper", SEEDS[0]].arguments["epsilon"]) == len(panel.x)
    repeats = [by_run["paper", seed].arguments["repeats"] for seed in SEEDS]
    assert repeats == [4, 3, 3]


def test_repeats_are_divided_over_several_master_seeds_and_told_apart(tmp_path):
    (paper, figure, panel), *_ = select(["xie2016/3a"])
    settings = replace(miniature(tmp_path), seeds=SEEDS)
    (rows,) = run([(paper, figure, panel)], settings).values()
    assert {(row["seed"], row["repeat"]) for row in rows} == {(SEEDS[0], 0), (SEEDS[1], 0)}
    assert {one.shape[1] for _, one in kinds.Lines.of(rows).values.values()} == {2}
    first = [row["value"] for row in rows if row["seed"] == SEEDS[0]]
    assert first != [row["value"] for row in rows if row["seed"] == SEEDS[1]]


def test_where_the_division_is_fixed_each_draw_of_noise_is_a_repeat(tmp_path):
    (paper, _, panel), *_ = select(["xie2016/3a"])
    fixed = replace(panel, division="fixed", arguments={"paper": panel.runs()["paper"]})
    fixed = replace(fixed, methods=[one for one in panel.methods if one.run == "paper"])
    settings = replace(miniature(tmp_path), seeds=SEEDS[:2])
    points = plan(fixed, settings)
    assert {(one.arguments["repeats"], one.arguments["draws"]) for one in points} == {(1, 2)}
    for point in points:
        path = settings.path(paper, point)
        path.parent.mkdir(parents=True, exist_ok=True)
        report = cs.simulate(**point.arguments, n_jobs=1)
        columns = ("repeat", "draw", "learner", "epsilon", "kind", "method", "metric", "value")
        table = pa.Table.from_pylist(
            [{name: getattr(row, name) for name in columns} for row in report.rows]
        )
        facts = {"seconds": 1, "peak_bytes": 1, "code": "", "sizes": [1]}
        facts |= {"sites": 1, "public": 1, "test": 1}
        pq.write_table(table.replace_schema_metadata({"facts": json.dumps(facts)}), path)
    rows = collect(paper, fixed, points, settings)
    assert {(one["seed"], one["division"], one["repeat"], one["draw"]) for one in rows} == {
        (seed, 0, draw, 0) for seed in SEEDS[:2] for draw in (0, 1)
    }


def test_a_run_that_has_used_its_minutes_stops_and_the_same_command_goes_on(tmp_path, capsys):
    chosen, settings = select(["xie2016/3a"]), miniature(tmp_path)
    assert run(chosen, replace(settings, until=0.0)) == {}
    assert "Left for the same command: xie2016/3a" in " ".join(capsys.readouterr().err.split())
    assert run(chosen, settings).keys() == {("xie2016", "3a")}


def test_a_committed_table_is_enough_to_go_on_and_fresh_renews_only_what_is_old(folder):
    chosen = select(["xie2016/3a"])
    settings = replace(miniature(folder), seeds=(7,))
    points = folder / "xie2016" / "points"
    shutil.rmtree(points)
    (before,) = run(chosen, settings).values()
    assert not points.exists()
    tell(folder, code=["another"])
    assert run(chosen, settings) == {("xie2016", "3a"): before}
    assert not points.exists()
    run(chosen, replace(settings, fresh=True))
    computed = {path: path.stat().st_mtime_ns for path in points.glob("*.parquet")}
    assert computed
    (folder / "xie2016" / "3a.parquet").unlink()
    run(chosen, replace(settings, fresh=True))
    assert {path: path.stat().st_mtime_ns for path in points.glob("*.parquet")} == computed


@pytest.mark.parametrize("panel", ["xiang2018/votes-equal", "hamm2016/2", "hospitals/heart-trees"])
def test_a_point_has_the_same_name_before_and_after_it_was_computed(panel, tmp_path):
    """Bins, for example, cache what they computed; a worker must find the same name."""
    chosen, settings = select([panel]), miniature(tmp_path)
    before = [point.key for point in plan(chosen[0][2], settings)]
    run(chosen, settings)
    assert [point.key for point in plan(chosen[0][2], settings)] == before


def test_panels_that_ask_for_the_same_share_their_points(tmp_path):
    chosen, settings = select(["hospitals/heart-error", "hospitals/heart-auc"]), miniature(tmp_path)
    tables = run(chosen, settings)
    assert len(list(tmp_path.rglob("points/*.parquet"))) == len(plan(chosen[0][2], settings)) == 2
    metrics = {row["metric"] for rows in tables.values() for row in rows}
    assert metrics == {"error", "auc"}


def test_all_code_that_a_simulation_runs_through_makes_an_older_point_stale(tmp_path):
    """Otherwise an outdated number would pass for a current one.

    What only runs, stores or shows cells need not be part of the digest.
    """
    files, here = set(), Path(cs.__file__).parent
    for name in cs.__all__:
        getattr(cs, name)  # load all modules first: that runs their code, but computes no number
    sys.setprofile(
        lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None
    )
    try:
        for panel in (
            "xie2016/3a",
            "hamm2016/levels-har",
            "xiang2018/votes-equal",
            "hospitals/heart-error",
        ):
            run(select([panel]), miniature(tmp_path))
    finally:
        sys.setprofile(None)
    within = {
        str(Path(file).relative_to(here)) for file in files if Path(file).is_relative_to(here)
    }
    for part in ("aggregators/", "learners/", "privacy/", "simulation/simulate.py"):
        assert any(file.startswith(part) for file in within)  # the profiler sees what it should
    carriers = {
        "errors.py",  # the words of errors
        "files/durable.py",
        "progress.py",
        "simulation/report.py",
        "simulation/sweep.py",
    }
    assert [file for file in within - carriers if not file.startswith(CODE)] == []


def test_an_unknown_figure_is_refused_with_what_there_is():
    with pytest.raises(SystemExit, match=r"no 'xie2016/99'.*xie2016/3"):
        select(["xie2016/99"])


def test_a_table_stands_for_the_panels_that_it_reads():
    chosen = select(["xie2016thesis/table-6.1"])
    read = {
        one.panel
        for one in statements.statements(PAPERS["xie2016thesis"])
        if one.figure == "table-6.1"
    }
    assert {panel.id for _, _, panel in chosen} == read
    assert len(chosen) == len(read) < len(select(["xie2016thesis"]))


# --------------------------------------------------------------------------------------- statements

MINIMAL = """[[statement]]
figure = "1"
kind = "falls"
a = "A"
claim = "It falls."
source = "section 1"
explanation = "So it is."
"""


@pytest.mark.parametrize("name", PAPERS)
def test_what_a_paper_claims_is_quoted_with_its_page(name):
    found = [one for one in statements.statements(PAPERS[name]) if one.by == "paper"]
    assert [one.name for one in found if not one.quote] == []


def test_all_duplicates_name_a_statement_that_there_is():
    everything = [one for paper in PAPERS.values() for one in statements.statements(paper)]
    statements.duplicates(everything)
    assert len({one.name for one in everything}) == len(everything)


@pytest.mark.parametrize("name", PAPERS)
def test_variants_are_panels_with_the_lines_that_the_statement_is_about(name):
    panels = {panel.id: panel for figure in PAPERS[name].figures for panel in figure.panels}
    for one in statements.statements(PAPERS[name]):
        for variant in one.variants.values():
            labels = {method.label for method in panels[variant].methods}
            assert {one.a, one.b} - {""} <= labels, one.name


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ('quotation = "x"', "has a field 'quotation'"),
        ('quote = "it falls"', "only one of `quote` and `page`"),
        ('quote = "it falls"\npage = "p. 1"\nby = "us"', "is ours and yet quotes the paper"),
        (f'quote = "{"x" * 301}"\npage = "p. 1"', "has 301 characters"),
        ('by = "them"', "`by` of .* is 'them'"),
        ('page = " "', "Write a text"),
        ('tolerance = "much"', "Write a number"),
        ("practical = -0.1", "is negative"),
        ("x = [2, 1]", r"Write \[lowest, highest\]"),
        ('depends = "scaling"', "only one of `depends` and `variants`"),
        ('depends = "scaling"\nvariants = {raw = "2", ours = "3"}', "include panel '1'"),
        (MINIMAL, "several statements are 'p/1 falls A'"),
    ],
)
def test_a_slip_in_a_statement_is_an_error(added, said):
    assert statements.parse("p", MINIMAL)[0].name == "p/1 falls A"
    with pytest.raises(ValueError, match=said):
        statements.parse("p", MINIMAL + added)


def test_a_label_of_all_statements_is_stated_once():
    text = '[paper]\nlabel = "what survives of the text"\n' + MINIMAL
    assert statements.parse("p", text)[0].label == "what survives of the text"
    assert not statements.parse("p", text + 'by = "us"\n')[0].label


def test_a_duplicate_is_of_a_statement_that_is_none_by_the_same_side():
    def found(**extra):
        more = "".join(f'{name} = "{value}"\n' for name, value in extra.items())
        return statements.parse("p", MINIMAL + more)[0]

    first, second = found(), found(id="again", duplicate_of="p/1 falls A")
    assert statements.duplicates([first, second]) == {"p/again": "p/1 falls A"}
    for wrong, said in (
        (found(id="again", duplicate_of="p/2"), "which there is not"),
        (found(id="third", duplicate_of="p/again"), "itself a duplicate"),
        (found(id="again", duplicate_of="p/1 falls A", by="us"), "not by the same side"),
    ):
        with pytest.raises(ValueError, match=said):
            statements.duplicates([first, second, wrong])


# ------------------------------------------------------------------------------------- frozen rules


def test_rules_and_statements_are_as_they_were_frozen_and_logged():
    """Run `python -m experiments.frozen "why"` after a change, and commit what it writes."""
    assert frozen.unlogged() == []


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Copies of the frozen state and its log that a test may change."""
    for name in ("FROZEN", "LOG"):
        path = Path(shutil.copy(getattr(frozen, name), tmp_path))
        monkeypatch.setattr(frozen, name, path)
    return tmp_path


def test_a_changed_statement_or_rule_is_noticed_until_it_is_logged_with_its_verdicts(copies):
    one, another = list(frozen.present().statements)[:2]
    text = frozen.FROZEN.read_text(encoding="utf-8")
    digest = frozen.present().statements[one]
    text = text.replace(f'["{digest}", "', '["0000000000000000", "was ')
    text = text.replace(frozen.present().rules, "0" * 16)
    lines = [line for line in text.splitlines() if not line.startswith(f'"{another}"')]
    frozen.FROZEN.write_text("\n".join(lines), encoding="utf-8")
    assert frozen.unlogged() == ["the rules", *sorted([one, another])]
    assert frozen.freeze("A slip of the pen.", copies) == ["the rules", *sorted([one, another])]
    assert frozen.unlogged() == []
    assert frozen.freeze("Nothing.", copies) == []
    last = frozen.changes()[-1]
    assert (last["why"], last["of"]) == ("A slip of the pen.", "rules")
    assert last["what"] == "The rules; 1 statement added; 1 statement changed"
    verdict = {name: (before, after) for name, before, after in last["verdicts"]}[one]
    assert verdict[0].startswith("was ")
    assert verdict[1] == verdicts.OPEN


def test_freezing_by_hand_without_a_line_in_the_log_is_noticed(copies):
    log = frozen.LOG.read_text(encoding="utf-8").replace(frozen.present().rules, "0" * 16)
    frozen.LOG.write_text(log, encoding="utf-8")
    assert frozen.unlogged() == ["the log's digest of rules"]


def test_words_may_be_improved_and_claims_may_not():
    one = statements.parse("p", MINIMAL)[0]
    same = replace(one, explanation="Better.", source="section 2", quote="it", page="p. 1")
    assert frozen._judged(same) == frozen._judged(one)
    for changed in ({"claim": "It rises."}, {"margin": 0.1}, {"by": "us"}, {"practical": 0.1}):
        assert frozen._judged(replace(one, **changed)) != frozen._judged(one)


def test_findings_rest_on_statements_that_there_are():
    told = tomllib.loads(report.FINDINGS.read_text(encoding="utf-8"))["finding"]
    names = {one.name for paper in PAPERS.values() for one in statements.statements(paper)}
    assert len(told) == 5
    assert {name for one in told for name in one["statements"]} <= names


# --------------------------------------------------------------------- what a folder has, and shows


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the miniature of xie2016/3a, by another seed than usual."""
    out = tmp_path_factory.mktemp("finished")
    run(select(["xie2016/3a"]), replace(miniature(out), seeds=(7,)))
    return out


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def page_of(folder, papers=None, chosen=()):
    return report.write(papers or design.papers(), Settings(folder), chosen).read_text(
        encoding="utf-8"
    )


def tell(folder, **facts):
    """Change what the table of 3a says about itself; None takes a fact away."""
    path = folder / "xie2016" / "3a.parquet"
    table = pq.read_table(path)
    told = json.loads(table.schema.metadata[b"facts"]) | facts
    told = {name: fact for name, fact in told.items() if fact is not None}
    pq.write_table(table.replace_schema_metadata({"facts": json.dumps(told)}), path)


def test_a_panel_is_marked_when_the_code_has_changed_since_it_was_stored(folder):
    def stale():
        return stored(PAPERS["xie2016"], PAPERS["xie2016"].panel("3a"), Settings(folder)).facts[
            "stale"
        ]

    assert not stale()
    for changed in (
        {"code": ["another"]},
        {"code": [code_digest(), "another"]},
        {"functions": [["experiments.datasets:axes", "another text"]]},
        {"functions": [["experiments.datasets:gone", ""]]},
    ):
        tell(folder, **{"code": [code_digest()], "functions": []} | changed)
        assert stale(), changed
    for then in (False, True):  # tables of before the digests were kept
        tell(folder, code=None, functions=None, stale=then)
        assert stale() == then
    assert "(earlier code)" in page_of(folder)


def test_a_function_counts_as_changed_when_one_that_it_calls_has_changed(tmp_path, monkeypatch):
    from experiments.run import _now

    monkeypatch.syspath_prepend(tmp_path)
    texts = set()
    for number, inner in enumerate(("return SCALE * x", "return SCALE + x", "return SCALE + x")):
        scale = 1 if number < 2 else 2
        name = f"experiments_of_a_test_{number}"
        (tmp_path / f"{name}.py").write_text(
            f"SCALE = {scale}\ndef inner(x):\n    {inner}\n"
            "def outer(seen):\n    return lambda X: inner(X)\n"
        )
        texts.add(_now(f"{name}:outer"))
    assert len(texts) == 3


def test_a_table_of_another_definition_counts_as_not_run(folder, capsys):
    paper = PAPERS["xie2016"]
    figure = next(one for one in paper.figures if one.id == "3")
    panel = figure.panels[0]
    renamed = (replace(panel.methods[0], label="another"), *panel.methods[1:])
    picture = folder / "xie2016" / "figure-3.png"
    picture.write_bytes(b"of all panels")
    for change in (
        {"methods": renamed},
        {"methods": panel.methods[1:]},
        {"x": (1, 2)},
        {"metric": "auc"},
    ):
        panels = (replace(panel, **change), *figure.panels[1:])
        page = page_of(folder, [replace(paper, figures=(replace(figure, panels=panels),))])
        assert "Stored numbers of xie2016/3a belong to an earlier definition" in page, change
        assert 'id="xie2016-3"' not in page
        assert "Run these panels again" in capsys.readouterr().err
    assert picture.read_bytes() == b"of all panels"


def test_folders_may_mix_the_full_and_the_quick_run(folder):
    paper = PAPERS["xie2016"]
    figure = next(one for one in paper.figures if one.id == "3")
    tables = folder / "xie2016"
    shutil.copy(
        tables / "3a.parquet", tables / "3b.parquet"
    )  # pretend that 3b was run: it has the same lines, and below the same x
    panels = (
        figure.panels[0],
        replace(figure.panels[1], x=figure.panels[0].x, quick_x=None),
        *figure.panels[2:],
    )
    tell(folder, full=True, seeds=list(SEEDS[:2]))
    page = page_of(folder, [replace(paper, figures=(replace(figure, panels=panels),))])
    assert (
        "make reproduce FIGURE=xie2016/3a FULL=1; make reproduce FIGURE=xie2016/3b SEED=7" in page
    )
    assert "Not all panels are from the full run" in page


def test_what_was_made_up_and_its_seed_are_known_from_what_is_stored(folder):
    page = page_of(folder)  # whose settings are those of the quick run
    assert "MADE-UP" in page
    assert "A miniature." in page
    assert "<code>7</code>" in page
    assert "make reproduce FIGURE=xie2016/3a SEED=7" in page


def test_a_report_leaves_out_figures_of_which_nothing_was_run(folder):
    page = page_of(folder)
    assert page.count("<article ") == 1
    assert 'id="xie2016thesis"' not in page
    assert not (folder / "xie2016thesis").exists()
    page = page_of(folder, chosen=select(["xie2016thesis/3.3"]))
    assert page.count("<article ") == 2
    assert 'id="xie2016thesis-3.3"' in page


def test_the_page_is_found_through_filtered_and_accessible_without_a_network(folder, chromium):
    page_of(folder)
    for scheme, width in (("light", 1400), ("dark", 390)):
        context = chromium.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True
        )
        page = context.new_page()
        errors = []
        page.on("pageerror", lambda error, errors=errors: errors.append(error))
        page.goto((folder / "report.html").as_uri())
        everything = page.locator("li.claim").count()
        assert page.inner_text("#found") == f"All {everything} claims"
        page.select_option("select[name=by]", "us")
        ours = page.locator("li.claim:visible").count()
        assert 0 < ours < everything
        page.fill("#words", "nothing like it")
        assert page.inner_text("#found") == f"0 of {everything} claims"
        assert page.locator("article:visible").count() == 0
        page.click("button[type=reset]")
        page.wait_for_function("document.querySelectorAll('li.claim[hidden]').length === 0")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert Axe().run(page).response["violations"] == []
        assert errors == []
        context.close()


def test_no_picture_with_fewer_panels_replaces_one_with_more(folder):
    drawn = folder / "xie2016" / "figure-3.png"
    page_of(folder)
    whole = drawn.read_bytes()
    drawn.write_bytes(b"of all panels")
    other = pq.read_table(folder / "xie2016" / "3a.parquet").slice(0, 1)
    pq.write_table(other, folder / "xie2016" / "3b.parquet")  # answers another question
    assert "data:image/svg" in page_of(folder)
    assert drawn.read_bytes() == b"of all panels"
    (folder / "xie2016" / "3b.parquet").unlink()
    page_of(folder)
    assert drawn.read_bytes() == whole


def started(monkeypatch, *words):
    """Return what the command says when it gives up."""
    monkeypatch.setattr(sys, "argv", ["experiments", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    return end.value.code


def test_a_miniature_is_no_full_run(monkeypatch, capsys):
    assert started(monkeypatch, "--full", "--miniature") == 2
    assert "exclude each other" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "below"):
        assert "Nothing was run. Name another folder" in started(
            monkeypatch, "--miniature", "--out", out, "xie2016/3a"
        )


def test_an_error_of_the_library_is_a_sentence(tmp_path, monkeypatch):
    said = started(
        monkeypatch,
        "--miniature",
        "--jobs=1",
        "--seed=-1",
        "--out",
        tmp_path,
        "hospitals/heart-trees",
    )
    assert "Got -1 instead. Finished points are kept." in said


def test_an_interrupted_run_says_that_it_can_go_on(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments",
        "--miniature",
        "--jobs=1",
        "--out",
        str(tmp_path),
        "xie2016",
    ]
    with subprocess.Popen(
        command, cwd=design.HERE.parent, stderr=subprocess.PIPE, text=True
    ) as running:
        end = time.monotonic() + 100
        while not list(tmp_path.rglob("points/*.parquet")) and time.monotonic() < end:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=100)[1]
    assert running.returncode == 130
    assert "Stopped. Finished points are kept; the same command goes on." in said
    assert "Traceback" not in said


# ----------------------------------------------------------------------------------------- verdicts

LOW, HIGH = around(0.1, 0.1, 0.1), around(0.2, 0.2, 0.2)
FALLING, RISING = around(0.3, 0.2, 0.1), around(0.1, 0.2, 0.3)
SHAKY, STEADY = around(0.1, repeats=12, spread=0.3)[0], around(0.1, repeats=12)[0]
BELL = np.random.default_rng(1).normal(size=200)


@pytest.mark.parametrize(
    ("kind", "true", "false", "settings"),
    [
        ("below", {"a": LOW, "b": HIGH}, {"a": HIGH, "b": LOW}, {"b": "b", "margin": 0.05}),
        ("falls", {"a": FALLING}, {"a": RISING}, {}),
        ("rises", {"a": RISING}, {"a": FALLING}, {}),
        ("flat", {"a": LOW}, {"a": RISING}, {"tolerance": 0.05}),
        ("close", {"a": LOW, "b": LOW}, {"a": LOW, "b": HIGH}, {"b": "b", "tolerance": 0.03}),
        ("near", {"a": LOW}, {"a": HIGH}, {"value": 0.1, "tolerance": 0.03}),
        ("crosses", {"a": RISING, "b": HIGH}, {"a": FALLING, "b": HIGH}, {"b": "b"}),
        (
            "spike",
            {"a": around(0.1, 0.4, 0.1)},
            {"a": around(0.3, 0.1, 0.3)},
            {"at": 2.0, "margin": 0.1},
        ),
        (
            "dip",
            {"a": around(0.3, 0.1, 0.3, repeats=12)},
            {"a": around(0.3, 0.2, 0.1, repeats=12)},
            {},
        ),
        (
            "varies",
            {"a": around(0.3, 0.2, 0.1, repeats=12)},
            {"a": around(0.1, 0.1, 0.1, repeats=12)},
            {"margin": 0.05},
        ),
        ("less affected", {"a": LOW, "b": FALLING}, {"a": FALLING, "b": LOW}, {"b": "b"}),
        (
            "steadier",
            {
                "a": around(0.1, 0.1, 0.1, repeats=12),
                "b": around(0.1, 0.1, 0.1, repeats=12, spread=0.3),
            },
            {
                "a": around(0.1, 0.1, 0.1, repeats=12, spread=0.3),
                "b": around(0.1, 0.1, 0.1, repeats=12),
            },
            {"b": "b"},
        ),
        (
            "changes by",
            {"a": FALLING},
            {"a": around(0.5, 0.4, 0.2)},
            {"value": -0.2, "tolerance": 0.03},
        ),
        (
            "same curve",
            {"a": RISING, "b": RISING},
            {"a": RISING, "b": FALLING},
            {"b": "b", "tolerance": 0.05},
        ),
        (
            "ratio",
            {"a": HIGH, "b": LOW},
            {"a": LOW, "b": HIGH},
            {"b": "b", "value": 2.0, "tolerance": 0.3},
        ),
        (
            "slope",
            {"a": around(1.0, 1 / 2, 1 / 3)},
            {"a": around(1.0, 1 / 4, 1 / 9)},
            {"value": -1.0, "tolerance": 0.2},
        ),
        (
            "slope at most",
            {"a": around(1.1, 0.35, 0.21), "b": LOW},
            {"a": around(1.1, 0.6, 0.43), "b": LOW},
            {"b": "b", "value": -2.0, "tolerance": 0.2},
        ),
        (
            "spread",
            {"a": around(0.1, 0.1, 0.1, repeats=12, spread=0.1 * 2**0.5)},
            {"a": around(0.1, 0.1, 0.1, repeats=12, spread=0.3 * 2**0.5)},
            {"value": 0.1, "tolerance": 0.05},
        ),
        (
            "spread falls",
            {"a": [SHAKY, STEADY, STEADY]},
            {"a": [STEADY, STEADY, SHAKY]},
            {},
        ),
        (
            "same distribution",
            {"a": [BELL], "b": [BELL[::-1]]},
            {"a": [BELL], "b": [BELL + 1.0]},
            {"b": "b", "tolerance": 0.2},
        ),
        (
            "same shape",
            {"a": [BELL], "b": [BELL[::-1] + 9]},
            {"a": [BELL], "b": [np.sign(BELL) * 3]},
            {"b": "b", "tolerance": 0.2},
        ),
        (
            "other distribution",
            {"a": [BELL], "b": [BELL + 1.0]},
            {"a": [BELL], "b": [BELL[::-1]]},
            {"b": "b", "tolerance": 0.2},
        ),
    ],
)
def test_each_kind_of_statement_can_hold_and_can_fail(kind, true, false, settings):
    xs = tuple(float(x) for x in range(1, 1 + len(true["a"])))
    assert verdict(kind, true, xs, a="a", **settings) == verdicts.HOLDS
    assert verdict(kind, false, xs, a="a", **settings) == verdicts.FAILS


def test_all_kinds_are_tried_above():
    tried = test_each_kind_of_statement_can_hold_and_can_fail.pytestmark[0].args[1]
    assert {case[0] for case in tried} == set(kinds.KINDS)


def test_a_slope_without_a_logarithm_or_few_trials_of_a_distribution_are_too_little_to_tell():
    below = {"a": LOW, "b": HIGH}
    found = judged("slope", below, a="a", b="b", value=-1.0, tolerance=0.1)
    assert found.verdict == verdicts.FEW
    assert "has no logarithm" in found.measured
    found = judged("same shape", {"a": [[0.1] * 5], "b": [[0.1] * 5]}, (1.0,), a="a", b="b")
    assert "5 repeats" in found.measured


def test_two_equal_distributions_are_told_apart_in_one_run_of_twenty_at_most(monkeypatch):
    """A permutation test: false alarms in at most 5 % of runs; of 60, over 9 in 1 of 1000."""
    monkeypatch.setattr(kinds, "PERMUTATIONS", 199)
    monkeypatch.setattr(kinds, "RESAMPLES", 1)
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(60):
        pairs = rng.normal(size=(2, 20)) + rng.normal(size=20)  # what a division has in common
        alarms += kinds._compared(*pairs)[2] < 0.05
    assert alarms <= 9


def test_an_exact_slope_has_the_interval_of_its_noise():
    """The jackknife's 95 % interval covers -1 in 200 runs; fewer than 180 in 1 of 1000."""
    rng, xs = np.random.default_rng(0), np.array([1.0, 2.0, 4.0, 8.0])
    covered = 0
    for _ in range(200):
        trials = (1 / xs)[:, None] * rng.lognormal(0, 0.2, (4, 15))
        by_repeat = {"a": trials.tolist()}
        evidence = kinds.KINDS["slope"](
            statements.Statement("a", "1", "1", "slope", "", "", "", a="a", value=-1.0),
            kinds.Lines.of(rows_of(by_repeat, tuple(xs))),
        )
        low, high = verdicts.interval(evidence.whole)
        covered += low <= 0 <= high
    assert covered >= 180


def test_what_is_unclear_is_split_into_too_little_and_too_small_to_matter():
    close = {"a": around(0.1, 0.1, 0.1, spread=0.001), "b": around(0.1, 0.1, 0.1, spread=-0.001)}
    far = {"a": around(0.1, 0.1, 0.1, spread=0.1), "b": around(0.1, 0.1, 0.1, spread=-0.1)}
    for lines, word in ((close, verdicts.EQUAL), (far, verdicts.FEW)):
        assert verdict("below", lines, a="a", b="b", practical=0.005) == word
    assert verdict("below", close, a="a", b="b") == verdicts.FEW  # no metric, so no size
    certain = {"a": around(0.1, 0.1, 0.1, spread=0), "b": around(0.102, 0.102, 0.102, spread=0)}
    found = judged("below", certain, a="a", b="b", practical=0.005)
    assert (found.verdict, found.size[:19]) == (verdicts.HOLDS, "too small to matter")
    assert judged("below", {"a": LOW, "b": HIGH}, a="a", b="b", practical=0.005).size.startswith(
        "large enough"
    )


@pytest.mark.parametrize("name", PAPERS)
def test_half_a_point_matters_of_every_share_and_score_that_a_panel_shows(name):
    panels = [panel for figure in PAPERS[name].figures for panel in figure.panels]
    shown = {method.metric or panel.metric for panel in panels for method in panel.methods}
    without = {metric for metric in shown if metric not in verdicts.PRACTICAL}
    assert not {metric for metric in without if metric.startswith(("error", "auc", "f1"))}


def test_a_claim_that_holds_under_one_reading_of_the_paper_holds_in_part():
    tables = {"1": rows_of({"a": LOW, "b": LOW}), "2": rows_of({"a": LOW, "b": HIGH})}
    tables["3"] = rows_of({"a": HIGH, "b": LOW})

    def found(*panels):
        one = statements.parse(
            "p",
            MINIMAL.replace('"falls"', '"below"')
            + 'b = "b"\npractical = 0.005\ndepends = "the scale"\nvariants = {'
            + ", ".join(f'"as {panel}" = "{panel}"' for panel in panels)
            + "}\n",
        )[0]
        return verdicts.judge(replace(one, a="a"), tables)

    assert found("1", "2").verdict == verdicts.PARTLY
    assert found("1", "2").depends
    assert found("1", "3").verdict == verdicts.FAILS
    assert found("1", "4").verdict == verdicts.EQUAL  # which was not run
    assert not found("1", "4").depends
    assert [answer for answer, _ in found("1", "2").answers] == ["as 1", "as 2"]


def test_seeds_that_disagree_are_shown():
    agree = [row | {"seed": seed} for seed in (1, 2) for row in rows_of({"a": LOW, "b": HIGH})]
    turned = rows_of({"a": HIGH, "b": LOW})
    differ = [row for row in agree if row["seed"] == 1] + [row | {"seed": 2} for row in turned]
    one = statements.Statement("p", "1", "1", "below", "", "", "", a="a", b="b")
    assert verdicts.judge(one, {"1": agree}).seeds == ()
    found = verdicts.judge(one, {"1": differ})
    assert [(seed, one.verdict) for seed, one in found.seeds] == [
        (1, verdicts.HOLDS),
        (2, verdicts.FAILS),
    ]


def test_a_spread_over_noise_is_that_within_divisions_that_are_fixed():
    rows = [
        {"label": "a", "x": x, "repeat": draw, "division": 0, "seed": seed, "value": place + noise}
        for seed, place in enumerate((0.0, 100.0, 200.0))
        for x in (1.0, 2.0)
        for draw, noise in enumerate(around(0.0, repeats=6, spread=2**0.5)[0])
    ]
    lines = kinds.Lines.of(rows)
    assert lines.values["a"][1].shape == (2, 18)
    assert lines.spreads["a"] == pytest.approx(
        np.std(around(0.0, repeats=6, spread=2**0.5), ddof=1)
    )


def test_at_most_one_in_twenty_of_the_clear_verdicts_is_there_by_chance():
    """Benjamini-Hochberg: of 100 verdicts over nothing none passes in 19 of 20 families."""
    rng, families = np.random.default_rng(0), 0

    def verdict_with(name, p, duplicate=""):
        one = statements.Statement("p", "1", "1", "below", "", "", "", id=name)
        return verdicts.Verdict(
            replace(one, duplicate_of=duplicate),
            verdicts.HOLDS if p < 0.05 else verdicts.FEW,
            "",
            p=p,
        )

    for _ in range(100):
        nothing = [verdict_with(str(i), p) for i, p in enumerate(rng.random(100))]
        families += bool(verdicts.clear(nothing))
    assert families <= 14  # more in 1 of 1000, if 5 are expected
    sure = [verdict_with(str(i), 1e-6) for i in range(50)]
    weak = [verdict_with(f"weak {i}", 0.049) for i in range(10)]
    again = verdict_with("again", 0.9, "p/0")
    assert verdicts.clear(sure) == {f"p/{i}" for i in range(50)}
    assert len(verdicts.clear(sure + weak)) == 60
    assert len(verdicts.clear(sure[:1] + weak)) == 11
    assert verdicts.clear([sure[0], weak[0], *nothing[:40]]) == {"p/0"}
    assert "p/again" in verdicts.clear([*sure, again])


def test_one_clear_counterexample_makes_it_part_only():
    mixed = {"a": around(0.1, 0.1, 0.3), "b": around(0.4, 0.4, 0.2)}
    assert verdict("below", mixed, a="a", b="b") == verdicts.PARTLY
    assert (
        verdict("falls", {"a": around(0.5, 0.3, 0.4, 0.1)}, (1.0, 2.0, 3.0, 4.0), a="a")
        == verdicts.PARTLY
    )


def test_a_whole_that_speaks_against_it_is_not_saved_by_a_point():
    assert verdict("falls", {"a": around(0.3, 0.1, 0.6)}, a="a") == verdicts.FAILS


def test_differences_that_cancel_are_no_equality():
    assert (
        verdict(
            "close", {"a": FALLING[::2], "b": RISING[::2]}, (1.0, 2.0), a="a", b="b", tolerance=0.05
        )
        == verdicts.FAILS
    )
    assert verdict("flat", {"a": around(0.1, 0.5, 0.1)}, a="a", tolerance=0.05) == verdicts.FAILS


def test_the_worse_of_two_ends_is_held_to_more():
    """One end is clear, the other only at 95 %: with two ends, that happens by chance."""
    pattern = np.tile([-1.0, 1.0], 5) / np.std(np.tile([-1.0, 1.0], 5), ddof=1)
    last = 0.5 + pattern * 0.01 + 2.45 * 0.01 / np.sqrt(10)
    lines = {"a": [[0.1] * 10, last.tolist()], "b": [[0.3] * 10, [0.5] * 10]}
    assert verdict("crosses", lines, (1.0, 2.0), a="a", b="b") == verdicts.PARTLY


def test_a_line_that_falls_and_stays_has_no_minimum():
    """The lowest of many equal points is lower than the last by chance: others must find it."""
    rng, found = np.random.default_rng(0), []
    for _ in range(100):
        line = [[0.5] * 10, *(0.1 + 0.01 * rng.standard_normal((12, 10))).tolist()]
        found.append(verdict("dip", {"a": line}, tuple(range(13)), a="a") == verdicts.HOLDS)
    assert np.mean(found) <= 0.05


def test_a_smaller_effect_than_stated_holds_in_part():
    assert verdict("below", {"a": LOW, "b": HIGH}, a="a", b="b", margin=0.5) == verdicts.PARTLY


def test_noise_alone_is_no_support():
    noisy = {"a": around(0.1, 0.1, 0.1, spread=0.5), "b": around(0.11, 0.11, 0.11, spread=-0.5)}
    assert verdict("below", noisy, a="a", b="b") == verdicts.FEW


def test_paired_differences_see_what_spreads_hide():
    """Two lines that both jump from repeat to repeat, one always a little below the other."""
    jumps = [0.1, 0.9, 0.2, 0.8, 0.5]
    lines = {
        "a": [jumps] * 3,
        "b": [[value + 0.01 + 0.001 * i for i, value in enumerate(jumps)]] * 3,
    }
    assert verdict("below", lines, a="a", b="b") == verdicts.HOLDS


def test_what_was_not_run_or_has_one_repeat_gets_no_verdict():
    assert verdict("below", {"a": LOW, "b": HIGH}, a="a", b="b", x=(7, 9)) == verdicts.OPEN
    assert verdict("below", {"a": [[0.1]] * 3, "b": [[0.2]] * 3}, a="a", b="b") == verdicts.OPEN
    with pytest.raises(LookupError, match="no line 'c'"):
        verdict("below", {"a": LOW, "b": HIGH}, a="a", b="c")


# --------------------------------------------------------------------------------------------- data


# The large ones are left to `make reproduce`, which checks row counts as well.
@pytest.mark.parametrize("name", ["mnist37", "har", "credit_default", "heart_disease", "eicu_demo"])
def test_made_up_records_are_of_the_real_ones_kind(name, data_folder, monkeypatch):
    monkeypatch.setenv("CONSILIENCE_DATA", str(data_folder))
    real, made = datasets.LOADERS[name](), datasets.made_up(name)
    assert set(np.unique(made.y)) == set(np.unique(real.y))
    for part in ("sites", "persons", "test"):
        assert (getattr(real, part) is None) == (getattr(made, part) is None), part
    assert real.X.shape[0] == len(real.y)
    assert not real.columns or len(real.columns) == real.X.shape[1]


def test_what_has_no_data_is_left_out_and_the_rest_is_run(tmp_path, monkeypatch, capsys):
    for variable in ("CONSILIENCE_DATA", "SCIKIT_LEARN_DATA"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setitem(
        datasets.LOADERS, "heart_disease", lambda: datasets.made_up("heart_disease")
    )
    datasets.load.cache_clear()
    paper, settings = PAPERS["hospitals"], Settings(tmp_path / "out", n_jobs=1)
    chosen = {
        panel.id: (paper, figure, panel) for figure in paper.figures for panel in figure.panels
    }
    assert set(run([chosen["heart-trees"], chosen["eicu-trees"]], settings)) == {
        ("hospitals", "heart-trees")
    }
    said = " ".join(capsys.readouterr().err.split())
    assert "eicu_demo is not available" in said
    assert "Left out: hospitals/eicu-trees." in said
    with pytest.raises(SystemExit, match="Nothing was run"):
        run([chosen["eicu-trees"]], settings)
    datasets.load.cache_clear()


def test_a_data_set_that_cannot_be_downloaded_is_no_traceback(tmp_path):
    nowhere = {
        "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "",
        "CONSILIENCE_DATA": str(tmp_path),
    }
    command = [sys.executable, "-m", "experiments", "--out", str(tmp_path), "hospitals/heart-trees"]
    env = os.environ | nowhere | {"SCIKIT_LEARN_DATA": str(tmp_path)}
    done = subprocess.run(
        command, env=env, cwd=design.HERE.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "heart_disease is not available" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_edition_of_a_data_set_is_noticed(tmp_path, monkeypatch):
    import pandas as pd

    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path))
    pd.DataFrame({"ID": [1], "X1": [2.0], "default_next_month": [1]}).to_parquet(
        tmp_path / "credit_default.parquet"
    )
    pd.DataFrame({"digit": [1]}).to_parquet(tmp_path / "mnist.parquet")
    (tmp_path / "har.parquet").write_text("no table")
    for name, said in (
        ("credit_default", "another edition"),
        ("mnist37", "lacks columns"),
        ("har", "cannot be read"),
    ):
        datasets.load.cache_clear()
        with pytest.raises(datasets.Unavailable, match=rf"{said}.*remove this one"):
            datasets.load(name)


def test_a_changed_comparator_makes_an_older_point_stale(tmp_path):
    chosen = select(["hamm2016/levels-har"])
    run(chosen, miniature(tmp_path))
    paper, _, panel = chosen[0]
    facts = stored(paper, panel, miniature(tmp_path)).facts
    kinds = {name for name, _ in facts["functions"] if name.startswith("experiments.comparators:")}
    assert kinds
    path = tmp_path / paper.name / f"{panel.id}.parquet"
    table = pq.read_table(path)
    facts["functions"] = [[n, "0" * 64 if n in kinds else d] for n, d in facts["functions"]]
    pq.write_table(table.replace_schema_metadata({"facts": json.dumps(facts)}), path)
    assert stored(paper, panel, miniature(tmp_path)).facts["stale"]


# ---------------------------------------------------------------- states of the code that are equal


def test_equal_states_of_the_code_are_found_recorded_and_carried_over(tmp_path, monkeypatch):
    monkeypatch.setattr(equal, "RECORD", tmp_path / "equal.toml")
    equal._recorded.cache_clear()
    chosen = select(["xie2016/3a"])
    before, after = tmp_path / "before", tmp_path / "after"
    for out in (before, after):
        run(chosen, miniature(out))
    path = before / "xie2016" / "3a.parquet"
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"facts"])
    facts |= {
        "code": ["0" * 64],
        "functions": [[name, f"{i:064}"] for i, (name, _) in enumerate(facts["functions"], 1)],
    }
    pq.write_table(table.replace_schema_metadata({"facts": json.dumps(facts)}), path)
    paper, _, panel = chosen[0]
    assert stored(paper, panel, miniature(before)).facts["stale"]
    found = equal.compare(before, after)
    assert found.holds
    assert (found.panels, found.largest) == (1, 0.0)
    equal.record(found, "a test")
    assert not stored(paper, panel, miniature(before)).facts["stale"]
    assert equal.carried("0" * 64) == code_digest()
    equal._recorded.cache_clear()


def test_states_that_differ_in_one_number_or_row_are_not_equal(tmp_path):
    run(select(["xie2016/3a"]), miniature(tmp_path / "before"))
    table = pq.read_table(tmp_path / "before" / "xie2016" / "3a.parquet")
    rows = table.to_pylist()
    rows[0]["value"] += 1e-6
    for name, changed in {"number": rows, "row": table.to_pylist()[1:]}.items():
        (tmp_path / name / "xie2016").mkdir(parents=True)
        made = pa.Table.from_pylist(changed).replace_schema_metadata(table.schema.metadata)
        pq.write_table(made, tmp_path / name / "xie2016" / "3a.parquet")
        assert not equal.compare(tmp_path / "before", tmp_path / name).holds
    assert not equal.compare(tmp_path / "before", tmp_path / "nothing").holds
