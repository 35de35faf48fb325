"""Every registered statistic goes over every road, and all roads lead to the same release."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from scipy import stats
from sklearn.base import clone

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
def test_a_blind_hub_opens_the_plain_total_of_a_statistic(name: str, folder: Path) -> None:
    """Noise is small beside thousands of records, so that a total is far larger than its noise.

    Sites are of unequal size and, where a statistic lets them, of unequal epsilon. The squares of
    all errors, in units of their noise, add up as chance lets them but in 2 of 10⁹ runs.
    """
    kind, most = LEARNERS[name], WIDE.get(name, 40.0)
    assert issubclass(kind, Statistic)
    asked = [most, most, most if kind.counts_alike else most / 2]
    wards = Wards(
        folder,
        n=3,
        n_keyholders=1,
        statistic=name,
        settings=study_settings(name, folder),
        least=min(asked),
        most=most,
        takes_number=kind.predicts_number,
    )
    public, test = read_records(wards.study, folder)
    tables = [mostly_old_men(n, seed) for seed, n in enumerate((2500, 1500, 500))]
    given = list(enumerate(zip(asked, tables, strict=True)))
    files = [wards.mask(i, epsilon=epsilon, rows=rows) for i, (epsilon, rows) in given]
    release = wards.release(files, public=public, test=test)
    assert release.total is not None
    assert release.total.files == 3
    check_answers(name, wards.study, check_release(wards.study, release))

    parts = [sum_of(file).behind(release.total.words) for file in files]
    plain = sum(
        sum_of(file).scale * plain_sum(wards.study, rows)
        for file, rows in zip(files, tables, strict=True)
    )
    noise = np.sqrt(np.sum([part.variance for part in parts], axis=0))
    off = float(np.square((parts[0].values - plain) / noise).sum())
    assert stats.chi2.ppf(1e-9, noise.size) < off < stats.chi2.isf(1e-9, noise.size)
    if not sum_of(files[0]).counts_sites:
        assert np.abs(plain / noise).max() > 200


def mostly_old_men(n: int, seed: int) -> pa.Table:
    """Return some of `n` records, in which columns and classes are far from even."""
    rows = table(n, seed=seed)
    return rows.filter(pc.or_(pc.greater(rows["age"], 60), pc.equal(rows["sex"], "m")))


def sum_of(file: Contribution) -> Statistic:
    assert isinstance(file.learner, Statistic)
    return file.learner


def plain_sum(study: Study, rows: pa.Table) -> Any:
    """Return what the statistic adds up of a table, without noise, scale or mask."""
    one = clone(study.build(study.epsilon_range[1]))
    one.sharing = None
    exact = one.set_params(epsilon=math.inf, delta=0.0, schema=study.schema)
    return exact.fit(rows).summed().values


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
