"""Fixtures shared by all tests: real data if available, a ledger in a temporary folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"


@pytest.fixture(scope="module")  # its event loop ends with it: other tests start their own
def chromium() -> Iterator[Any]:
    if not os.access(CHROMIUM, os.X_OK):
        notice = "Chromium is not on this machine"
        if os.environ.get("CONSILIENCE_NEEDS_CHROMIUM") == "1":
            pytest.fail(notice)
        pytest.skip(notice)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


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
