"""Fixtures shared by all tests: real data if available, a ledger in a temporary folder."""

import os
from pathlib import Path

import pytest

from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger


@pytest.fixture(scope="session")
def data_folder() -> Path:
    folder = os.environ.get("CONSILIENCE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("real data not found: set CONSILIENCE_DATA to the folder that holds it")
    return Path(folder)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.allow("ward", Budget(epsilon=1.0, delta=1e-5))
    return ledger
