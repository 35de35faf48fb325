import json


def test_audit_reports_a_passed_attack(run):
    code, out, _ = run("audit", "--epsilon", 1, "--mechanism", "output", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["passed"]
    assert 0 < values["epsilon_lower"] <= 1
