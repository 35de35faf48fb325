"""The reference of study files says what the code reads, all of it."""

import re
import tomllib
from pathlib import Path

import pytest

from consilience.aggregators.registry import AGGREGATORS
from consilience.learners.registry import LEARNERS
from consilience.study import toml
from consilience.study.reference import EXAMPLE, study_page
from consilience.study.study import Study

ROOT = Path(__file__).parents[2]
PAGE = study_page()


def test_the_page_equals_the_code():
    program = "from consilience.study.reference import study_page; print(study_page(), end='')"
    how = f'python -c "{program}" > docs/study-reference.md'
    found = (ROOT / "docs" / "study-reference.md").read_text(encoding="utf-8")
    assert found == PAGE, f"write it again: {how}"


def test_its_example_is_a_valid_study_and_its_defaults_change_nothing():
    study, facts = Study.from_text(EXAMPLE), tomllib.loads(EXAMPLE)
    for part in ("study", "privacy"):
        optional = {
            name: key.default for name, key in toml.LAYOUT[part].items() if not key.is_required
        }
        facts[part] = optional | facts[part]
    assert Study.from_dict(facts).digest == study.digest


@pytest.mark.parametrize("part", toml.PARTS)
def test_every_part_has_a_section(part):
    assert re.search(rf"^## `\[{part}(\.NAME)?\]`$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("name", [*LEARNERS, *AGGREGATORS])
def test_everything_registered_has_a_section(name):
    assert PAGE.count(f"\n### `{name}`\n") == 1


def test_every_setting_has_a_form_and_a_meaning():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| `\w+`[,` \w]* \|", line)]
    assert len(rows) > 100
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    assert [row for row in cells if len(row) != 4 or "" in row] == []
