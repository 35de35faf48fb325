"""Files, ledgers and site folders that earlier versions wrote are read, verified and used."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from consilience import Ledger
from consilience.files.certificate import of_contribution, of_release
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SealedFile
from consilience.privacy.accounting import Laplace
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.site.site import Site

FOLDER = Path(__file__).parents[1] / "fixtures" / "version-0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
STUDIES = sorted(EXPECTED["contributions"])
ENSEMBLES = {
    **dict.fromkeys(("logistic", "classes", "ridge", "distilled"), "linear"),
    **dict.fromkeys(("svm", "tree", "adaboost"), "vote"),
    "forest": "forest",
}


@pytest.fixture
def site(tmp_path):
    return Site(shutil.copytree(FOLDER / "site", tmp_path / "site"))


def check_file(file, model, expected):
    assert file.digest == expected["digest"]
    assert file.study == expected["study"]
    assert file.guarantee == Guarantee.from_dict(expected["guarantee"])
    X = np.array(expected["features"])
    # Sums in another order differ in the last bits; nothing else may.
    if "probabilities" in expected:
        np.testing.assert_allclose(model.predict_proba(X), expected["probabilities"], rtol=1e-12)
        assert np.asarray(model.predict(X)).tolist() == expected["predictions"]
    elif isinstance(expected["predictions"][0], float):
        np.testing.assert_allclose(model.predict(X), expected["predictions"], rtol=1e-12)
    else:
        assert np.asarray(model.predict(X)).tolist() == expected["predictions"]


@pytest.mark.parametrize("study", STUDIES)
def test_a_contribution_is_verified_and_predicts_the_same(study):
    path, trusted = FOLDER / "contributions" / f"{study}.safetensors", study == "distilled"
    contribution = Contribution.load(path, trusted=trusted).verify()
    expected = EXPECTED["contributions"][study]
    check_file(contribution, contribution.learner, expected)
    in_blocks = Contribution.inspect(SealedFile(path, "contribution"), trusted=trusted)
    assert in_blocks.guarantee == contribution.guarantee
    assert contribution.digest in of_contribution(contribution).as_text()


@pytest.mark.parametrize("study", STUDIES)
def test_a_release_is_verified_and_predicts_the_same(study):
    release = Release.load(FOLDER / "releases" / f"{study}.safetensors").verify()
    check_file(release, release.ensemble, EXPECTED["releases"][study])
    assert release.ensemble.kind == ENSEMBLES[study]
    page = of_release(release).as_text()
    assert release.digest in page
    assert ("on the study's public test records" in page) == bool(release.sealed.facts["quality"])


def test_some_release_says_how_good_it_is():
    releases = [Release.load(FOLDER / "releases" / f"{study}.safetensors") for study in STUDIES]
    assert any(release.sealed.facts["quality"] for release in releases)


def test_a_ledger_is_verified_pays_no_training_twice_and_charges_on(site):
    ledger = Ledger(site.folder / "ledger.sqlite")
    head = ledger.verify()
    charges = ledger.charges("patients")
    assert len(charges) == 6
    spent = ledger.balance("patients").spent
    old = charges[0]
    assert ledger.sealed(old.key) is not None
    repeated = {"dataset": "patients", "key": old.key, "purpose": old.purpose}
    assert ledger.within(old.study).charge(old.events, **repeated) == old
    assert ledger.verify() == head
    event = Laplace(sensitivity=1.0, scale=2.0, unit=Unit.RECORD, neighbours=Neighbours.REPLACE_ONE)
    ledger.charge([event], dataset="patients", key="one more", purpose="a test")
    assert ledger.verify() != head
    assert ledger.balance("patients").spent.epsilon == pytest.approx(spent.epsilon + 0.5)


@pytest.mark.parametrize("study", sorted(set(STUDIES) - {"forest"}))
def test_a_site_finds_its_studies_contributions_and_releases(site, study):
    assert site.study(study).digest == EXPECTED["releases"][study]["study"]["digest"]
    expected = EXPECTED["contributions"][study]["digest"]
    trusted = study == "distilled"
    assert Contribution.load(site.contribution(study), trusted=trusted).digest == expected
    assert site.release(study).digest == EXPECTED["releases"][study]["digest"]
    assert site.status(study)
