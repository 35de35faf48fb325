"""Plans of statistics: which will pay, with which noise, among how many sites and for whom."""

import json

import numpy as np
import pytest

from consilience import plan
from consilience.errors import SettingsError
from consilience.evaluation.adaptation import ADAPTED, OWN, RELEASE
from consilience.planning import paying
from consilience.planning.advice import Advice
from consilience.planning.paying import AT_SITES, SHARED, Asked, Paying
from studies import records_parts, study, study_text

MOMENTS = study_text("Moments", "Total", privacy="delta = 1e-6")


@pytest.fixture(scope="module")
def tried():
    """A plan on made-up records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paying, "REPEATS", 3)
        patch.setattr(paying, "N_TEST", 1000)
        return plan(study(), n_records=60, n_sites=12, epsilon=2.0, sums=True)


def test_every_statistic_is_tried_with_both_kinds_of_noise_and_three_sizes(tried):
    assert isinstance(tried, Paying)
    main = {(cell.statistic, cell.noise) for cell in tried.found}
    assert {
        (name, noise) for name in ("Moments", "LabelTables") for noise in (SHARED, AT_SITES)
    } <= (main)
    assert {cell.n_records for cell in tried.found} == {15, 60, 240}
    assert {cell.n_sites for cell in tried.found} == {3, 6, 12, 24}
    assert {cell.epsilon for cell in tried.found} == {0.1, 2.0, 3.0}
    for of_cell in tried.found.values():
        assert {name: len(values) for name, values in of_cell.items()} == {
            OWN: 3,
            RELEASE: 3,
            ADAPTED: 3,
        }
    same = {cell.n_records: of_cell[OWN].tolist() for cell, of_cell in tried.found.items()}
    assert all(
        of_cell[OWN].tolist() == same[cell.n_records] for cell, of_cell in tried.found.items()
    )


def test_the_first_sentence_says_what_pays_and_the_numbers_follow(tried):
    first, text = str(tried).splitlines()[0], str(tried)
    assert first.startswith("Joining is ")
    assert "12 sites of 60 records at epsilon=2" in first
    assert tried.best.statistic in first
    assert tried.best.noise in first
    assert "made-up records, not a formula" in text
    stated = json.loads(json.dumps(tried.as_dict()))
    assert stated["sentence"] == tried.sentence
    assert len(stated["rows"]) == len(tried.found)


def test_less_noise_makes_a_better_release(tried):
    shared, alone = (
        np.mean(
            [
                of_cell[RELEASE].mean()
                for cell, of_cell in tried.found.items()
                if cell.noise == noise
            ]
        )
        for noise in (SHARED, AT_SITES)
    )
    assert shared > alone


def test_a_study_of_a_statistic_with_public_records_is_tried_on_them(tmp_path, monkeypatch):
    monkeypatch.setattr(paying, "REPEATS", 2)
    monkeypatch.setattr(paying, "N_TEST", 500)
    path = tmp_path / "study.toml"
    path.write_text(MOMENTS + "\n" + records_parts(tmp_path))
    found = plan(path, n_records=40, n_sites=4)
    assert "labelled public records, with labels" in found.how
    assert "GradientStep" in {cell.statistic for cell in found.found}
    assert found.found.keys() == plan(path, n_records=40, n_sites=4).found.keys()


def test_studies_of_models_are_answered_as_before():
    assert isinstance(plan(study(), n_records=500), Advice)
    with pytest.raises(SettingsError, match="sums"):
        plan(n_records=500, n_features=3, epsilon=1.0, sums=True)


def test_shares_are_the_studys_for_its_own_number_of_sites():
    asked = Asked(100, 10, 1.0, (1.0,), shares=7)
    assert [asked.shares_of(n) for n in (5, 10, 20)] == [4, 7, 16]
