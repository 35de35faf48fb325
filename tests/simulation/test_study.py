"""Simulating a study: what a coordinator simulated is what the sites will run."""

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pytest

import consilience as cs
import studies
from consilience import Average, Division, Runs, SettingsError, Study, simulate
from consilience.errors import SchemaMismatch
from consilience.evaluation.baselines import EXACT, GUESS, LOCAL, OWN, POOLED, PUBLIC, TITLES
from consilience.privacy.guarantee import Unit
from consilience.simulation.simulate import _set_up_study

TABLE = studies.table(600)
RUNS = Runs(repeats=2, seed=3)
PERSON = studies.study_text().replace(
    "[schema]", '[schema]\nperson = "id"\nmax_records_per_person = 2'
)


def with_persons(n_persons=240, seed=0):
    """Return a table in which persons have one to four records each."""
    ids = np.repeat(np.arange(n_persons), 1 + np.arange(n_persons) % 4)
    shuffled = np.random.default_rng(seed).permutation(ids)
    return studies.table(len(ids)).append_column("id", pa.array([f"p{i}" for i in shuffled]))


def methods(report):
    return {row.method for row in report.rows}


def test_a_study_is_simulated_with_its_own_learner_aggregator_schema_and_levels():
    study = studies.study(settings="regularization = 0.05")
    found = simulate(study, TABLE, division=Division(sites=3, public=80), runs=RUNS)
    encoded = study.schema.encode(TABLE)
    short = simulate(
        {study.learner: study.build(1.0)},
        {study.aggregator: study.build_aggregator()},
        encoded.X,
        encoded.y,
        sites=3,
        public=80,
        repeats=2,
        seed=3,
        epsilon=[0.1, 0.548, 3.0],
    )
    assert found.rows == short.rows
    assert [level for _, level in found.cells] == ["0.1", "0.548", "3"]
    assert methods(found) >= {*TITLES, study.aggregator}
    again = simulate(study, TABLE, division=Division(sites=3, public=80), runs=RUNS, epsilon=[0.1])
    assert set(again.rows) < set(found.rows)


def test_a_person_is_at_one_site_and_in_one_part_and_has_the_guarantee():
    study, table = Study.from_text(PERSON), with_persons()
    division = Division(sites=3, public=50)
    setup, _ = _set_up_study(study, table, division=division, runs=RUNS)
    persons = setup.divider.records.persons
    for repeat in range(3):
        cut = setup.cut(repeat)
        held = [set(persons[rows]) for rows in cut.sites]
        assert not held[0] & held[1] | held[0] & held[2] | held[1] & held[2]
        used = set.union(*held)
        # Persons who are tested on or public are at no site: no site has a row equal to theirs.
        assert len(used) + len(cut.public.y) <= 240 + 50
        rows = np.flatnonzero(np.isin(persons, list(used)))
        assert np.array_equal(np.sort(np.concatenate(cut.sites)), rows)
        left = np.setdiff1d(np.arange(len(persons)), rows)
        assert len(left) == len(cut.y_test) + len(cut.public.y)
        assert 50 <= len(cut.public.y) < 54  # persons of up to four records are added until enough
    fresh = simulate(study, table, division=division, runs=Runs(repeats=1), epsilon=1.0)
    stated = fresh.guarantees[study.learner, "1", study.aggregator]
    assert stated.unit is Unit.PERSON
    assert stated.epsilon == pytest.approx(1.0)
    assert fresh.guarantee.unit is Unit.PERSON
    assert methods(fresh) >= set(TITLES)
    seeded = [simulate(study, table, division=division, runs=RUNS) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_persons_are_divided_by_site_column_and_sizes_and_not_by_skew():
    study, table = Study.from_text(PERSON), with_persons()
    place = [("north", "south")[int(name[1:]) % 2] for name in table["id"].to_pylist()]
    given = table.append_column("hospital", pa.array(place))
    found = simulate(study, given, division=Division(site_column="hospital"), runs=RUNS)
    assert found.settings["sites"] == 2
    moved = given.set_column(
        given.schema.get_field_index("hospital"), "hospital", pa.array(["north", *place[1:]])
    )
    moved = moved if place[0] != "north" else given.set_column(5, "hospital", ["south", *place[1:]])
    with pytest.raises(SchemaMismatch, match="several sites"):
        simulate(study, moved, division=Division(site_column="hospital"), runs=RUNS)
    sized, _ = _set_up_study(study, table, division=Division(sizes=[20, 30]), runs=RUNS)
    persons = sized.divider.records.persons
    assert [len(np.unique(persons[rows])) for rows in sized.cut(0).sites] == [20, 30]
    with pytest.raises(SettingsError, match="persons are hidden"):
        simulate(study, table, division=Division(label_skew=1.0), runs=RUNS)
    with pytest.raises(SettingsError, match="'site_column'"):
        simulate(study, table, division=Division(site_column="ward"), runs=RUNS)


@pytest.mark.parametrize(
    ("learner", "aggregator", "settings"),
    [
        (
            "PrivateForestClassifier",
            "WeightedVote",
            "n_trees = 3\nmax_depth = 2\npublic_size = 100",
        ),
        (
            "PrivateForestClassifier",
            "PooledCounts",
            'n_trees = 3\nmax_depth = 2\nsplitter = "random"\nrandom_state = 1\npublic_size = 100',
        ),
        ("PrivateAdaBoostClassifier", "WeightedVote", "n_rounds = 2"),
        ("PrivateLinearSVC", "Average", ""),
    ],
)
def test_trees_and_other_learners_of_a_study_are_simulated(learner, aggregator, settings):
    study = studies.study(learner, aggregator, settings=settings)
    found = simulate(study, TABLE, division=Division(sites=3, public=60), runs=RUNS, epsilon=[3.0])
    assert {aggregator, LOCAL, PUBLIC, EXACT} <= methods(found)
    assert found.cells == [(learner, "3")]


def test_a_trusted_hub_is_simulated_at_the_epsilon_of_its_own_noise():
    text = studies.study_text(
        aggregator="SoftLabelDistillation",
        more='epsilon = 0.7\nregularization = 0.01\n[public]\nfile = "public.csv"\nsha256 = "'
        + "0" * 64
        + '"',
        privacy='hub = "trusted"',
    )
    study = Study.from_text(text)
    found = simulate(study, TABLE, division=Division(sites=8, public=100), runs=Runs(repeats=1))
    assert found.cells == [(study.learner, "0.7")]
    stated = found.guarantees[study.learner, "0.7", "SoftLabelDistillation"]
    assert (stated.unit, stated.epsilon) == (Unit.SITE, pytest.approx(0.7))
    assert methods(found) == {"SoftLabelDistillation", GUESS, PUBLIC, OWN, EXACT}
    other = simulate(
        study, TABLE, division=Division(sites=8, public=100), runs=Runs(repeats=1), epsilon=[2.0]
    )
    stated = other.guarantees[study.learner, "2", "SoftLabelDistillation"]
    assert stated.epsilon == pytest.approx(2.0)
    with pytest.raises(SettingsError, match="needs public records"):
        simulate(study, TABLE, runs=RUNS)


def test_public_and_test_records_beside_the_study_are_used(tmp_path):
    parts = studies.records_parts(tmp_path)
    (tmp_path / "study.toml").write_text(studies.study_text(aggregator="PublicBlend", more=parts))
    pcsv.write_csv(TABLE, tmp_path / "table.csv")
    study = Study.load(tmp_path / "study.toml")
    found = simulate(tmp_path / "study.toml", tmp_path / "table.csv", runs=RUNS)
    assert found.settings["public"] == study.public.read(study.schema, tmp_path).X.shape[0]
    assert found.settings["test"] == study.test.read(study.schema, tmp_path).X.shape[0]
    assert sum(found.settings["sizes"]) == TABLE.num_rows
    assert not found.settings["resampled"]
    cut = simulate(
        str(tmp_path / "study.toml"), TABLE, division=Division(public=50, test=0.25), runs=RUNS
    )
    assert (cut.settings["public"], cut.settings["test"]) == (50, 150)


def test_an_aggregator_that_is_defined_elsewhere_is_simulated_by_what_it_says_of_itself():
    class Noisy(Average):
        """An average of exact members with noise of its own, under another name."""

    encoded = studies.study().schema.encode(TABLE)
    learner = cs.PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    given = {"sites": 3, "seed": 1, "repeats": 2, "epsilon": [0.5, 2.0]}
    own, known = (
        simulate(learner, {"a": kind(epsilon=1.0)}, encoded.X, encoded.y, **given)
        for kind in (Noisy, Average)
    )
    assert own.rows == known.rows
    assert POOLED in methods(own)
    assert LOCAL not in methods(own)
