import json

from consilience import Study, plan


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
    assert "Predicted: joining helps, join by public blend" in out
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


def test_plan_takes_learner_and_features_from_a_study(run, study_file):
    code, out, err = run("plan", study_file, "--records", 900, "--sites", 5, "--json")
    assert (code, err) == (0, "")
    study = Study.load(study_file)
    assert json.loads(out) == json.loads(
        json.dumps(plan(study, n_records=900, n_sites=5).as_dict())
    )
    code, out, _ = run("plan", study_file, "--records", 900, "--epsilon", 0.5)
    assert code == 0
    assert "epsilon=0.5" in out
    code, _, err = run("plan", study_file, "--records", 900, "--mechanism", "output")
    assert code == 2
    assert "The study file decides '--" in err
