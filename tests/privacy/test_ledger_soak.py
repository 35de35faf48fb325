"""The long form of the two proofs in test_ledger.py, with the same checks."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak
SHORT = runpy.run_path(str(Path(__file__).with_name("test_ledger.py")))


def test_eight_processes_of_a_thousand_attempts_spend_exactly_what_fits(tmp_path, record_property):
    found = SHORT["check_race"](tmp_path / "ledger.sqlite", n_processes=8, n_attempts=1000, n_fitting=3000, cost=0.01)
    record_property("attempts_per_second", 8000 / found["seconds"])


def test_two_hundred_kills_lose_and_double_no_charge(tmp_path, record_property):
    found = SHORT["check_kills"](tmp_path / "ledger.sqlite", n_kills=200)
    for name in ("charged", "sealed"):
        record_property(name, len(found[name]))
    record_property("seconds", found["seconds"])
    record_property("kills_that_left_a_journal", found["journals"])
    assert found["journals"] > 20, "the kills fell between operations: the test proved too little"
