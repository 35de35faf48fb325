import json


def test_audit_reports_a_passed_attack(run):
    code, out, _ = run("audit", "--epsilon", 1, "--mechanism", "output", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["passed"]
    assert 0 < values["epsilon_lower"] <= 1


def test_audit_attacks_the_learner_of_a_study(run, study_file):
    code, out, err = run("audit", study_file, "--json")
    assert (code, err) == (0, "")
    # The weakest promise that the study allows; a hundredth of it pays for rounding errors.
    assert 2.9 < json.loads(out)["claimed"]["epsilon"] <= 3.0
    code, out, _ = run("audit", study_file, "--epsilon", 0.5, "--attack", "exact", "--json")
    assert 0.49 < json.loads(out)["claimed"]["epsilon"] <= 0.5
    assert json.loads(out)["passed"]
    code, _, err = run("audit", study_file, "--regularization", 0.1)
    assert code == 2
    assert "The study file decides '--" in err
