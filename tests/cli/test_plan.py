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
    assert "--drop id" in err  # 70 names are no features
    assert "--features must be 1" in run(*arguments[:-1], 5, "--drop", "id")[2]
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


def test_plan_begins_with_what_to_expect_against_what_and_what_to_change(run, tmp_path):
    path = tmp_path / "public.csv"
    rows = [f"{i % 17},{i % 11},{int(i % 17 + i % 11 > 18)}\n" for i in range(300)]
    path.write_text("a,b,y\n" + "".join(rows))
    asked = ("plan", "--records", 300, "--epsilon", 0.2, "--public", path, "--label", "y")
    for sites in (1, 6):
        code, out, _ = run(*asked, "--sites", sites, "--metric", "auc")
        first = out.splitlines()[0]
        assert code == 0
        assert "errors (AUC 0." in first
        assert "a site's own exact model" in first
        assert "always the most frequent class" in first
        assert "twice " in first.lower()  # the epsilon, or anything
    assert "Joining " in first
    assert "labelled public records" in run(*asked[:5], "--features", 3, "--metric", "auc")[2]
    assert "public records are needed" in run(*asked[:5], "--features", 3)[1].splitlines()[0]


def test_problems_name_options_as_they_are_typed(run, records):
    assert "--records must be" in run("plan", "--records", 0, "--features", 2, "--epsilon", 1)[2]
    assert "--features must be" in run("plan", "--records", 9, "--epsilon", 1)[2]
    data = ("simulate", "--data", records, "--label", "ill", "--epsilon", 1)
    assert "--repeats must be" in run(*data, "--repeats", 0)[2]
    assert "--label-skew must be" in run(*data, "--label-skew", -1)[2]
