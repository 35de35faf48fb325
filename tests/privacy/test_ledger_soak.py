"""The long form of the two proofs in test_ledger.py, with the same checks; ``-rP`` shows the
numbers.
"""

import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak
SHORT = runpy.run_path(str(Path(__file__).with_name("test_ledger.py")))


def test_eight_processes_of_a_thousand_attempts_spend_exactly_what_fits(tmp_path):
    found = SHORT["check_race"](
        tmp_path / "ledger.sqlite", n_processes=8, n_attempts=1000, n_fitting=3000, cost=0.01
    )
    sys.stdout.write(
        f"{len(found['charged'])} charged, {len(found['refused'])} refused, "
        f"{8000 / found['seconds']:.0f} attempts/s\n"
    )


def test_two_hundred_kills_lose_and_double_no_charge(tmp_path):
    found = SHORT["check_kills"](tmp_path / "ledger.sqlite", n_kills=200)
    sys.stdout.write(
        f"{len(found['charged'])} charges and {len(found['sealed'])} seals confirmed, "
        f"{found['journals']} of 200 kills fell into an operation, {found['seconds']:.0f} s\n"
    )
    assert found["journals"] > 20, "the kills fell between operations: the test proved too little"
