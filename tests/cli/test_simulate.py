import json
import sys

import studies
from consilience import Division, Runs, Study, simulate


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
    assert "--seed" in err


def test_simulate_takes_sites_from_a_column_and_prints_json_and_needs_no_charts(
    run, records, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python marks what is not there
    data = ("simulate", "--data", records, "--label", "ill", "--epsilon", 2, "--repeats", 1)
    code, out, _ = run(*data, "--site-column", "hospital", "--json", "--out", tmp_path / "out")
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".csv", ".parquet"]
    values = json.loads(out)
    assert code == 0
    assert values["settings"]["sites"] == 3
    assert values["settings"]["features"] == 4  # the hospital is not one of them
    assert values["guarantee"]["void_reason"] is None
    assert len(values["files"]) == 2
    code, _, err = run(*data, "--site-column", "ward")
    assert code == 1
    assert "no column 'ward'" in err
    code, out, _ = run(
        *data, "--size", 40, "--size", 90, "--label-skew", 0.5, "--learner", "svm", "--json"
    )
    assert json.loads(out)["settings"]["sizes"] == [40, 90]


def test_simulate_takes_learner_aggregator_schema_and_levels_from_a_study(run, study_file):
    data = ("simulate", study_file, "--data", study_file.with_name("table.csv"), "--sites", 3)
    short = ("--repeats", 1, "--seed", 1, "--json")
    code, out, err = run(*data, *short)
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["settings"]["sites"] == 3
    study, table = Study.load(study_file), studies.table(400)
    same = simulate(study, table, division=Division(sites=3), runs=Runs(repeats=1, seed=1))
    assert values["table"] == json.loads(json.dumps(same.as_dict()))["table"]
    values = json.loads(run(*data, *short, "--epsilon", 0.5, "--epsilon", 2)[1])
    assert {row["epsilon"] for row in values["table"]} == {"0.5", "2"}


def test_simulate_refuses_options_that_the_study_decides(run, study_file):
    data = ("simulate", study_file, "--data", study_file.with_name("table.csv"))
    for option in (("--learner", "svm"), ("--aggregator", "blend"), ("--label", "ill")):
        code, _, err = run(*data, *option)
        assert code == 2
        assert "The study file decides '--" in err
        assert option[0] in err


def test_simulate_drops_columns_and_judges_by_the_metric_asked_for(run, records):
    lines = records.read_text().splitlines()
    named = [f"{line},{'name' if i == 0 else f'p{i}'}" for i, line in enumerate(lines)]
    records.write_text("\n".join(named) + "\n")
    data = ("simulate", "--data", records, "--label", "ill", "--epsilon", 2, "--repeats", 2)
    code, _, err = run(*data, "--sites", 3)
    assert code == 1
    assert "--drop name" in err
    code, out, _ = run(*data, "--sites", 3, "--drop", "name", "--drop", "c", "--metric", "auc")
    assert code == 0
    assert "highest AUC first" in out
    assert "always the most frequent class" in out
    code, out, _ = run(*data, "--sites", 3, "--drop", "name", "--json")
    assert json.loads(out)["settings"]["metric"] == "error"
    assert json.loads(out)["settings"]["features"] == 2 + 2 + 3  # numbers, c, hospital
