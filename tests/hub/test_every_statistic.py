"""Every registered statistic goes over every road, and all roads lead to the same release."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilience import Budget, Ledger
from consilience.adapters.relay import Collection
from consilience.cli.app import main
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.learners.registry import LEARNERS
from consilience.statistics.base import Statistic
from consilience.study.check import check_release
from consilience.study.collect import Publication, read_records
from consilience.study.study import Study
from studies import table
from sums import REGISTERED, WIDE, study_settings, sum_text
from wards import Wards

N_SITES = 2


def epsilon_of(name: str) -> float:
    return WIDE.get(name, 3.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shared"
    made.mkdir()
    return made


def test_the_list_of_statistics_is_that_of_the_registry() -> None:
    kinds = {
        name
        for name, kind in LEARNERS.items()
        if issubclass(kind, Statistic) and kind.__module__.startswith("consilience.")
    }
    assert set(REGISTERED) == kinds


@pytest.mark.parametrize("name", REGISTERED)
def test_hub_folder_and_relay_make_the_same_release_of_a_statistic(
    name: str, folder: Path, tmp_path: Path, sqlite_world: Any
) -> None:
    text = sum_text(name, folder)
    study = sqlite_world.add_study(text)
    wards = [sqlite_world.ward(f"north {i}", study.name) for i in range(N_SITES)]
    parts = [train(study, ward, tmp_path) for ward in wards]
    public, test = read_records(study, folder)
    own = study.combine(parts, public, test, publication=Publication(SigningKey.generate()))
    releases = [
        through_hub(sqlite_world, study, wards, parts, folder),
        through_folder(folder, text, parts, tmp_path / "coordinator.pem"),
        through_relay(tmp_path / "relay", folder, text, wards, parts),
    ]
    for release in releases:
        check_release(study, release)
        assert release.sealed.facts["ensemble"] == own.sealed.facts["ensemble"]
        assert release.sealed.tensors.keys() == own.sealed.tensors.keys()
        for tensor, values in own.sealed.tensors.items():
            assert np.array_equal(release.sealed.tensors[tensor], values), tensor
        assert [one.digest for one in release.sources] == [part.digest for part in parts]
    check_answers(name, study, own)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_blind_hub_makes_a_release_of_a_statistic(name: str, folder: Path) -> None:
    """Noise is small beside the records, as in a large study: a total may be far larger."""
    epsilon = WIDE.get(name, 40.0)
    wards = Wards(
        folder,
        n=3,
        n_keyholders=1,
        statistic=name,
        settings=study_settings(name, folder),
        least=epsilon,
        most=epsilon,  # a summary needs one epsilon for all
        takes_number=LEARNERS[name].predicts_number,
    )
    public, test = read_records(wards.study, folder)
    files = [wards.mask(i, epsilon=epsilon, rows=table(200, seed=i)) for i in range(3)]
    release = wards.release(files, public=public, test=test)
    assert release.total is not None
    assert release.total.files == 3
    check_answers(name, wards.study, check_release(wards.study, release))


def check_answers(name: str, study: Study, release: Release) -> None:
    """Noise is real and small here: what most of 500 new records say is far from chance.

    A summary answers every record alike.
    """
    rows = table(500, seed=7)
    answers, ill = release.predict(study.schema.encode(rows).X), rows["ill"].to_numpy()
    assert answers.shape == (500,)
    assert np.isfinite(answers).all()
    if "Summary" in name:
        assert len(set(answers.tolist())) == 1
    elif study.schema.classes is None:
        assert np.corrcoef(answers, ill)[0, 1] > 0.3
    else:
        assert (answers == ill).mean() > 0.6


def train(study: Study, ward: Any, folder: Path) -> Contribution:
    ledger = Ledger(folder / f"{ward.name}.sqlite")
    epsilon = epsilon_of(study.learner)
    relation = "add-remove" if study.unit == "site" else study.neighbours
    ledger.allow("ward", Budget(epsilon=1000.0, delta=1e-5, neighbours=relation))
    facts = {"site": ward.name, "signing": ward.key, "dataset": "ward"}
    return study.train(table(400, seed=ward.seed), ledger, epsilon=epsilon, **facts)


def through_hub(
    world: Any, study: Study, wards: list[Any], parts: list[Contribution], folder: Path
) -> Release:
    for part in study.files:
        arrived = world.hub.store.files.new()
        arrived.write_bytes((folder / part.file).read_bytes())
        world.hub.keep_public_file(study.name, part.file, arrived, part.sha256, "operator")
    for ward, part in zip(wards, parts, strict=True):
        assert world.submit(ward, part, study.name).status_code == 201
    world.combiner.run(at_once=True)
    return Release.load(world.hub.release_path(study.name)[1], key=world.hub.key.public)


def through_folder(folder: Path, text: str, parts: list[Contribution], key: Path) -> Release:
    (folder / "study.toml").write_text(text)
    for i, part in enumerate(parts):
        part.save(folder / f"contribution-{i}-0001.safetensors")
    with pytest.raises(SystemExit) as ended:
        main(["release", "make", str(folder), "--key", str(key)])
    assert (ended.value.code or 0) == 0
    return Release.load(folder / "release-0001.safetensors", key=SigningKey.load(key).public)


def through_relay(
    place: Path, folder: Path, text: str, wards: list[Any], parts: list[Contribution]
) -> Release:
    place.mkdir()
    (place / "study.toml").write_text(text)
    for file in folder.glob("*.csv"):
        (place / file.name).write_bytes(file.read_bytes())
    (place / "sites.json").write_text(json.dumps({ward.name: ward.key.public for ward in wards}))
    into = Collection(place)
    for i, part in enumerate(parts):
        into.keep(f"node-{i}", part.sealed.to_bytes())
    return Release.load(into.combine(), key=into.key.public)
