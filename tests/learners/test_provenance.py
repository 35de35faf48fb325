"""Learners take tables by a schema, and everything that reads a learner sees what it decides."""

import math
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

import consilience.tables.chunks
from consilience import (
    Average,
    Bins,
    Categorical,
    Contribution,
    Noise,
    Numeric,
    ParquetRows,
    PrivateAdaBoostClassifier,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateRidge,
    PrivateTreeClassifier,
    PrivateTuning,
    Schema,
    audit,
)
from consilience.errors import SchemaMismatch, SettingsError
from consilience.files.sealed import SigningKey
from consilience.learners.base import plan_fit

COLUMNS = [Numeric("age", 0, 100), Categorical("sex", ("f", "m"))]
CLASSES = Schema(COLUMNS, "ill", classes=("no", "yes"), norm=0.8)
NUMBERS = Schema(COLUMNS, "days", label_bound=30.0, norm=0.8)
PERSONS = Schema(COLUMNS, "ill", classes=("no", "yes"), person="who", max_records_per_person=2)
CLASSIFIERS = [
    PrivateLogisticRegression,
    PrivateLinearSVC,
    PrivateTreeClassifier,
    PrivateForestClassifier,
    PrivateAdaBoostClassifier,
]
EVERY = [*CLASSIFIERS, PrivateRidge]


def frame(n=200):
    ages = Noise(seed=3).open().uniform(n) * 100
    return pd.DataFrame(
        {
            "age": ages,
            "sex": np.where(np.arange(n) % 3, "f", "m"),
            "ill": np.where(ages > 50, "yes", "no"),
            "days": ages / 4,
            "who": [f"p{i // 3}" for i in range(n)],
            "unused": "text",
        }
    )


def schema_of(kind):
    return NUMBERS if kind.predicts_number else CLASSES


def by_hand(kind, schema, seed=1, **settings):
    """Fit the way that a schema saves: declare every bound, encode, pass arrays."""
    learner = kind.for_schema(
        schema,
        epsilon=2.0,
        delta=0.0,
        neighbours="replace-one",
        noise=Noise(seed=seed),
        **settings,
    )
    rows = schema.encode(frame())
    persons = {} if rows.persons is None else {"persons": rows.persons}
    return learner.fit(rows.X, schema.name_labels(rows.y), **persons)


def with_schema(kind, schema, seed=1, **settings):
    return kind(
        epsilon=2.0, neighbours="replace-one", noise=Noise(seed=seed), schema=schema, **settings
    )


def released(learner):
    return {name: array.tolist() for name, array in learner.released_state().items()}


def randomness(kind):
    return {"random_state": 0} if "random_state" in kind._get_param_names() else {}


@pytest.mark.parametrize("kind", EVERY)
def test_a_table_is_encoded_as_by_hand_and_predicted_for_as_by_hand(kind):
    schema = schema_of(kind)
    ours = with_schema(kind, schema, **randomness(kind)).fit(frame())
    theirs = by_hand(kind, schema, **randomness(kind))
    assert released(ours) == released(theirs)
    encoded = schema.encode(frame()).X
    assert ours.predict(frame()).tolist() == theirs.predict(encoded).tolist()
    if hasattr(ours, "predict_proba"):
        assert ours.predict_proba(frame()).tolist() == theirs.predict_proba(encoded).tolist()
    without = frame().drop(columns=[schema.label])
    assert ours.predict(without).tolist() == ours.predict(frame()).tolist()


@pytest.mark.parametrize("kind", EVERY)
def test_the_schema_decides_every_bound_and_a_clone_keeps_them(kind):
    schema = schema_of(kind)
    learner = kind(epsilon=1.0, schema=schema)
    decided = kind.for_schema(schema, epsilon=1.0, delta=0.0, neighbours=learner.neighbours)
    expected = decided.get_params() | {"schema": schema}
    for made in (
        learner,
        clone(learner),
        clone(clone(learner)),
        pickle.loads(pickle.dumps(learner)),
    ):
        assert made.get_params() == expected
    late = kind(epsilon=1.0).set_params(schema=schema)
    assert late.get_params() == expected
    assert learner.stated_settings() == {
        name: value for name, value in expected.items() if name not in ("noise", "schema")
    }


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateForestClassifier])
def test_persons_come_from_the_schemas_column(kind):
    ours = with_schema(kind, PERSONS, **randomness(kind)).fit(frame())
    theirs = by_hand(kind, PERSONS, **randomness(kind))
    assert (ours.unit, ours.records_per_person) == ("person", 2)
    assert released(ours) == released(theirs)
    with pytest.raises(SettingsError, match=r"names a column of persons.*Nothing was trained"):
        with_schema(kind, PERSONS).fit(frame(), persons=np.arange(200))


def readers(tmp_path):
    table = frame()
    pa.csv.write_csv(pa.Table.from_pandas(table), tmp_path / "ward.csv")
    pa.parquet.write_table(pa.Table.from_pandas(table), tmp_path / "ward.parquet")
    yield from (tmp_path / "ward.csv", str(tmp_path / "ward.parquet"), pl.from_pandas(table))
    yield from (pa.Table.from_pandas(table), table.to_dict("list"), CLASSES.encode(table))


def test_whatever_a_schema_reads_is_taken(tmp_path):
    expected = None
    for source in readers(tmp_path):
        fitted = with_schema(PrivateLogisticRegression, CLASSES).fit(source)
        expected = expected or released(fitted)
        assert released(fitted) == expected
        assert fitted.predict(source).tolist() == fitted.predict(frame()).tolist()


def test_labels_may_be_given_beside_the_table():
    table = frame()
    ours = with_schema(PrivateLogisticRegression, CLASSES).fit(table)
    beside = with_schema(PrivateLogisticRegression, CLASSES).fit(
        table.drop(columns=["ill"]), table["ill"]
    )
    assert released(ours) == released(beside)
    swapped = with_schema(PrivateLogisticRegression, CLASSES).fit(
        table, np.where(table["ill"] == "no", "yes", "no")
    )
    assert np.sign(swapped.coef_[0, 0]) == -np.sign(ours.coef_[0, 0])
    assert ours.score(table, table["ill"]) > 0.9
    with pytest.raises(SchemaMismatch, match="not one for each record"):
        with_schema(PrivateLogisticRegression, CLASSES).fit(table, table["ill"][:-1])
    exact = PrivateLogisticRegression(epsilon=math.inf, regularization=1e-3, schema=CLASSES)
    assert cross_val_score(exact, table, table["ill"], cv=3).min() > 0.9


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        (PrivateLogisticRegression, {"data_norm": 2.0}, "data_norm=2.0 and a schema"),
        (PrivateLogisticRegression, {"classes": [0, 1]}, r"classes=\[0, 1\] and a schema"),
        (PrivateLogisticRegression, {"unit": "person"}, "unit='person' and a schema"),
        (PrivateRidge, {"label_bound": 3.0}, "label_bound=3.0 and a schema"),
        (PrivateTreeClassifier, {"bounds": (0, 1)}, "'bounds' parameter .* left out"),
        (PrivateTreeClassifier, {"bins": 1}, "'bins' parameter"),
    ],
)
def test_what_contradicts_the_schema_is_refused_in_words_by_fit(kind, settings, problem):
    learner = kind(epsilon=1.0, schema=schema_of(kind), **settings)
    with pytest.raises(SettingsError, match=problem):
        learner.fit(frame())
    with pytest.raises(SettingsError, match="'schema' parameter"):
        kind(epsilon=1.0, schema="study.toml").fit(frame())


def test_the_number_of_bins_and_bins_themselves_may_be_given():
    learner = PrivateTreeClassifier(epsilon=1.0, schema=CLASSES, bins=8)
    assert learner.bins == Bins.of(CLASSES, n_bins=8)
    own = Bins.of(CLASSES, n_bins=3)
    assert PrivateTreeClassifier(epsilon=1.0, schema=CLASSES, bins=own).bins is own


def test_a_table_is_not_taken_for_encoded_rows_nor_rows_for_a_table():
    learner = with_schema(PrivateLogisticRegression, CLASSES)
    with pytest.raises(SettingsError, match="Cannot read records from ndarray"):
        learner.fit(np.zeros((4, 3)), ["no", "yes"] * 2)
    with pytest.raises(SchemaMismatch, match="column 'sex' is absent"):
        learner.fit(frame().drop(columns=["sex"]))
    assert not hasattr(learner, "coef_")


def test_encoded_records_are_taken_as_they_are_and_once():
    records = CLASSES.encode(frame())
    ours = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], noise=Noise(seed=1)).fit(records)
    theirs = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], noise=Noise(seed=1))
    assert released(ours) == released(theirs.fit(records.X, records.y))
    with pytest.raises(SettingsError, match="a second time"):
        theirs.fit(records, records.y)


def test_a_large_parquet_file_is_read_in_chunks(tmp_path, monkeypatch):
    path = tmp_path / "ward.parquet"
    pa.parquet.write_table(pa.Table.from_pandas(frame()), path)
    whole = with_schema(PrivateLogisticRegression, CLASSES).fit(path)
    monkeypatch.setattr(consilience.tables.chunks, "IN_MEMORY", 10)
    parts = with_schema(PrivateLogisticRegression, CLASSES).fit(path)
    assert parts.classes_.tolist() == ["no", "yes"]
    assert np.allclose(parts.coef_, whole.coef_)
    other = Schema(COLUMNS, "ill", classes=("no", "yes"))
    with pytest.raises(SettingsError, match="another schema"):
        with_schema(PrivateLogisticRegression, other).fit(ParquetRows(path, CLASSES, named=True))


def test_dask_tables_are_encoded_where_they_lie():
    dd = pytest.importorskip("dask.dataframe")
    table = dd.from_pandas(frame(), npartitions=2)
    ours = with_schema(PrivateLogisticRegression, CLASSES).fit(table)
    whole = with_schema(PrivateLogisticRegression, CLASSES).fit(frame())
    assert np.allclose(ours.coef_, whole.coef_)


@pytest.mark.parametrize("kind", EVERY)
def test_a_file_states_what_it_states_without_a_schema(kind, ledger):
    schema = schema_of(kind)
    charge = {"ledger": ledger, "dataset": "ward"}
    ours = kind(epsilon=0.25, neighbours="replace-one", schema=schema).fit(frame(), **charge)
    plain = kind.for_schema(schema, epsilon=0.25, delta=0.0, neighbours="replace-one")
    rows = schema.encode(frame())
    plain.fit(rows.X, schema.name_labels(rows.y), **charge)
    files = [
        Contribution.make(
            learner,
            study={"name": "s", "digest": "0" * 64},
            site="north",
            sequence=1,
            key=SigningKey.generate(),
        )
        for learner in (ours, plain)
    ]
    facts = [
        {
            name: value
            for name, value in file.sealed.facts.items()
            if name not in ("receipt", "created", "nonce", "key", "tensors", "size", "guarantee")
        }
        for file in files
    ]
    assert facts[0] == facts[1]
    loaded = files[0].learner
    assert loaded.schema is None
    assert loaded.predict(rows.X).tolist() == ours.predict(frame()).tolist()


def test_whatever_takes_learners_takes_those_with_a_schema():
    learner = PrivateLogisticRegression(epsilon=5.0, schema=CLASSES)
    members = [clone(learner).fit(frame()) for _ in range(3)]
    encoded = CLASSES.encode(frame()).X
    assert Average().combine(members).predict(encoded).shape == (200,)
    assert audit(learner, n_records=50).passed
    task, plan = plan_fit(learner, frame(), None)
    assert (task.n_records, len(plan.events)) == (200, len(members[0].events_))
    tuned = PrivateTuning(learner, {"regularization": [1e-3, 1e-2]}, epsilon=5.0).fit(frame())
    assert set(tuned.predict(frame())) <= {"no", "yes"}
    assert tuned.best_learner_.predict(frame()).tolist() == tuned.predict(frame()).tolist()
    assert tuned.guarantee_.epsilon == pytest.approx(5.0)


def test_parameters_and_schema_may_not_change_after_fit():
    learner = PrivateLogisticRegression(epsilon=1.0, schema=CLASSES).fit(frame())
    learner.check_unchanged()
    learner.schema = Schema(COLUMNS, "ill", classes=("no", "yes"), norm=0.8, scale="clip")
    with pytest.raises(SettingsError, match="changed after it was fitted"):
        learner.check_unchanged()
