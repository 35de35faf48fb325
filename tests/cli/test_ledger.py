import json

import pytest

from consilience.privacy.accounting import Laplace
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger


@pytest.fixture
def charged(tmp_path):
    path = tmp_path / "site.sqlite"
    ledger = Ledger(path)
    ledger.allow("ward", Budget(epsilon=2.0))
    event = Laplace(unit="record", neighbours="replace-one", sensitivity=1.0, scale=2.0)
    ledger.charge([event], dataset="ward", key="first", purpose="count")
    return path


def test_ledger_show_tells_limits_and_charges(run, charged):
    code, out, _ = run("ledger", "show", charged)
    assert code == 0
    assert "limit 2, spent 0.5, left 1.5" in out
    assert "reserved" in out
    values = json.loads(run("ledger", "show", charged, "--json")[1])
    assert values["balances"][0]["left"]["epsilon"] == 1.5
    assert values["charges"][0]["purpose"] == "count"


def test_what_was_spent_is_shown_rounded_up_and_what_is_left_rounded_down(run, charged):
    ledger = Ledger(charged)
    ledger.allow("ward", Budget(epsilon=2.0000001))
    event = Laplace(unit="record", neighbours="replace-one", sensitivity=1.2, scale=6e6)
    ledger.charge([event], dataset="ward", key="second", purpose="count")  # 0.0000002
    out = run("ledger", "show", charged)[1]
    assert "limit 2.00001, spent 0.500001, left 1.49999" in out
    assert "epsilon=2e-07 " in out
    shown = ledger._repr_html_()
    assert all(text in shown for text in ("2.00001", "0.500001", "1.49999"))


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
