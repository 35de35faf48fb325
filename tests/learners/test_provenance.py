"""Learners take tables by a schema, and everything that reads a learner sees what it decides."""

import gc
import math
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MinMaxScaler,
    Normalizer,
    StandardScaler,
)

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
    PrivatePCA,
    PrivateRidge,
    PrivateTreeClassifier,
    PrivateTuning,
    PublicPCA,
    Schema,
    audit,
)
from consilience.errors import (
    ContributionRejected,
    PrivacyLeakWarning,
    SchemaMismatch,
    SettingsError,
)
from consilience.files.sealed import SigningKey
from consilience.learners.base import plan_fit
from consilience.learners.provenance import HOW_ENCODED
from consilience.learners.scored import scored
from consilience.learners.tuned import Tuning, tuned
from consilience.tables import transformer
from consilience.tables.transformer import is_untouched
from studies import study
from studies import table as study_table

COLUMNS = [Numeric("age", 0, 100), Categorical("sex", ("f", "m"))]
CANDIDATES = {"regularization": [1e-3, 1e-2]}
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
        name: value
        for name, value in expected.items()
        if name not in ("noise", "schema") and (name, value) != ("projection", None)
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


def test_labels_in_chunks_are_not_taken_for_classes_where_they_are_places_among_them(tmp_path):
    path = tmp_path / "ward.parquet"
    table = frame().assign(ill=lambda one: (one["ill"] == "yes").astype(int))
    pa.parquet.write_table(pa.Table.from_pandas(table), path)
    fitted = {}
    for classes in ((0, 1), (1, 0)):
        schema = replace(CLASSES, classes=classes)
        learner = with_schema(PrivateLogisticRegression, schema)
        fitted[classes] = learner.fit(ParquetRows(path, schema, named=True)).predict(table)
        if classes != (1, 0):
            learner.fit(ParquetRows(path, schema))
            assert (learner.predict(table) == fitted[classes]).all()
            continue
        with pytest.raises(SettingsError, match="Pass named=True to ParquetRows"):
            learner.fit(ParquetRows(path, schema))
    assert (fitted[0, 1] == fitted[1, 0]).mean() > 0.9


@pytest.mark.parametrize(
    "made",
    [
        lambda one: scored(type(one))(epsilon=8.0, schema=CLASSES, score_share=0.2),
        lambda one: tuned(type(one))(epsilon=8.0, schema=CLASSES, tuning=Tuning(CANDIDATES)),
        lambda one: PrivateTuning(one, CANDIDATES, epsilon=8.0),
    ],
    ids=["scored", "tuned", "tuning"],
)
def test_no_number_of_records_is_too_large_for_a_learner_that_takes_no_chunks(
    made, tmp_path, monkeypatch
):
    """Where it is hidden, a file would tell that it is smaller, which no guarantee says."""
    path = tmp_path / "ward.parquet"
    pa.parquet.write_table(pa.Table.from_pandas(frame()), path)
    monkeypatch.setattr(consilience.tables.chunks, "IN_MEMORY", 10)
    learner = made(with_schema(PrivateLogisticRegression, CLASSES)).fit(path)
    assert learner.predict(frame()).shape == (len(frame()),)


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


# ------------------------------------------------------------- what no guarantee covers


# No row is longer than this.
LEARNER = PrivateLogisticRegression(epsilon=1.0, classes=["no", "yes"], data_norm=1e4)


def numbers():
    """Return raw columns with nothing about them that scaling would leave, and labels."""
    table = frame()
    return np.column_stack([table["age"] + 3.0, table["days"] ** 2]), table["ill"].to_numpy()


def leaks(recorded):
    return [str(one.message) for one in recorded if one.category is PrivacyLeakWarning]


@pytest.mark.parametrize(
    "source",
    [frame(), CLASSES.encode(frame())],
    ids=["a table", "encoded records"],
)
def test_what_a_schema_encoded_assumes_nothing(source):
    learner = PrivateLogisticRegression(epsilon=1.0, schema=CLASSES).fit(source)
    assert learner.guarantee_.assumptions == ()


def test_rows_of_a_schemas_transformer_assume_nothing_and_cannot_be_changed():
    table = frame()
    pipeline = make_pipeline(CLASSES.transformer(), LEARNER).fit(table, table["ill"])
    assert pipeline[-1].guarantee_.assumptions == ()
    rows = CLASSES.transformer().transform(table)
    with pytest.raises(ValueError, match="read-only"):
        rows -= rows.mean(axis=0)
    assert LEARNER.fit(rows, table["ill"]).guarantee_.assumptions == ()
    assert LEARNER.fit(rows.copy(), table["ill"]).guarantee_.assumptions == (HOW_ENCODED,)


def test_a_transformer_keeps_nothing_alive():
    rows = CLASSES.transformer().transform(frame())
    assert is_untouched(rows)
    place = id(rows)
    del rows
    gc.collect()
    assert place not in transformer._made


def test_other_rows_assume_that_they_were_not_made_from_statistics(recwarn):
    assert LEARNER.fit(*numbers()).guarantee_.assumptions == (HOW_ENCODED,)
    assert leaks(recwarn) == []


@pytest.mark.parametrize(
    "step",
    [
        StandardScaler(),
        MinMaxScaler(),
        SimpleImputer(),
        PCA(1),
        PublicPCA(1),
        KBinsDiscretizer(4, quantile_method="averaged_inverted_cdf"),
        ColumnTransformer([("scaled", StandardScaler(), [0])], remainder="passthrough"),
        FeatureUnion([("raw", FunctionTransformer()), ("scaled", StandardScaler())]),
        make_pipeline(FunctionTransformer(), StandardScaler()),
    ],
    ids=lambda step: type(step).__name__,
)
def test_a_step_that_learns_from_the_records_is_named(step):
    X, y = numbers()
    with pytest.warns(PrivacyLeakWarning, match=rf"behind {type(step).__name__} in a pip.*schema="):
        fitted = make_pipeline(step, LEARNER).fit(X, y)
    assert fitted[-1].guarantee_.assumptions == (HOW_ENCODED,)


@pytest.mark.parametrize(
    "step",
    [
        FunctionTransformer(np.log1p),
        Normalizer(),
        FrozenEstimator(PublicPCA(1).fit(np.eye(2))),
        PrivatePCA(epsilon=1.0, n_components=1),
        ColumnTransformer([("log", FunctionTransformer(np.log1p), [0])], remainder="passthrough"),
        "passthrough",
    ],
    ids=str,
)
def test_a_step_that_learns_nothing_here_is_not_accused(step, recwarn):
    X, y = numbers()
    fitted = make_pipeline(step, LEARNER).fit(X, y)
    assert leaks(recwarn) == []
    assert fitted[-1].guarantee_.assumptions == (HOW_ENCODED,)


def test_steps_behind_a_private_one_are_not_before_it(recwarn):
    X, y = numbers()
    with pytest.warns(PrivacyLeakWarning, match="LogisticRegression is fitted behind Standard"):
        make_pipeline(PrivatePCA(epsilon=1.0, n_components=1), StandardScaler(), LEARNER).fit(X, y)
    assert all("PrivatePCA is" not in text for text in leaks(recwarn))


@pytest.mark.parametrize("scaler", [StandardScaler(), MinMaxScaler()])
@pytest.mark.parametrize("as_frame", [False, True])
def test_columns_that_were_scaled_by_themselves_are_seen(scaler, as_frame):
    X, y = numbers()
    scaled = scaler.fit_transform(X)
    with pytest.warns(PrivacyLeakWarning, match=r"scaled by statistics .*keep it where they are"):
        LEARNER.fit(pd.DataFrame(scaled) if as_frame else scaled, y)
    with pytest.warns(PrivacyLeakWarning):
        LEARNER.fit(((X - X.mean(0)) / X.std(0, ddof=1)).astype(np.float32), y)


@pytest.mark.parametrize(
    "rows",
    [
        np.where(np.arange(200)[:, None] % [2, 4] < 1, -1.0, 1.0),  # coded by hand
        np.arange(400).reshape(200, 2) % [2, 3] / [1, 2],  # one column of truth values
        np.zeros((200, 2)),
        Noise(seed=2).open().normal(400).reshape(200, 2),
    ],
    ids=["signs", "truth values", "constants", "a sample"],
)
def test_columns_that_may_have_come_so_are_not_accused(rows, recwarn):
    LEARNER.fit(rows, numbers()[1])
    assert leaks(recwarn) == []


@pytest.mark.parametrize("schema", [None, CLASSES])
def test_searches_and_scores_of_private_records_are_warned_of(schema):
    table = frame()
    X = numbers()[0] if schema is None else table
    learner = LEARNER if schema is None else PrivateLogisticRegression(epsilon=1.0, schema=schema)
    with pytest.warns(PrivacyLeakWarning, match="PrivateTuning"):
        cross_val_score(learner, X, table["ill"], cv=2)
    with pytest.warns(PrivacyLeakWarning, match="PrivateTuning"):
        GridSearchCV(learner, {"regularization": [1e-3, 1e-2]}, cv=2).fit(X, table["ill"])


@pytest.mark.parametrize("settings", [{"epsilon": math.inf}, {"noise": Noise(seed=1)}])
def test_where_nothing_is_promised_nothing_leaks(settings, recwarn):
    X, y = numbers()
    learner = clone(LEARNER).set_params(**settings)
    make_pipeline(StandardScaler(), learner).fit(X, y)
    cross_val_score(learner, X, y, cv=2)
    assert leaks(recwarn) == []


def test_a_warning_points_at_the_line_of_the_caller():
    X, y = numbers()
    with pytest.warns(PrivacyLeakWarning) as recorded:
        make_pipeline(StandardScaler(), LEARNER).fit(X, y)
    assert recorded[0].filename == __file__


def test_a_study_trains_without_the_assumption_and_a_file_may_state_it(ledger):
    agreed = study()
    facts = {"site": "north", "signing": SigningKey.generate(), "dataset": "ward"}
    assert agreed.train(study_table(60), ledger, epsilon=0.2, **facts).guarantee.assumptions == ()
    learner = agreed.build(0.2)
    rows = agreed.schema.encode(study_table(60))
    learner.fit(rows.X, agreed.schema.name_labels(rows.y), ledger=ledger, dataset="ward")
    made = Contribution.make(
        learner, study=agreed.reference, site="north", sequence=1, key=facts["signing"]
    )
    assert agreed.accept(made).guarantee.assumptions == (HOW_ENCODED,)
    learner.guarantee_ = replace(learner.guarantee_, assumptions=("I say so",))
    with pytest.raises(ContributionRejected, match="assumption"):
        Contribution.make(
            learner, study=agreed.reference, site="north", sequence=1, key=facts["signing"]
        )


class Chunks:
    """Rows scaled by their own statistics, which claim to be encoded by a schema."""

    n_features, n_records, names = 2, 300, None

    def __init__(self, schema, X, y):
        self.schema, self.X, self.y = schema, X, y

    def chunks(self):
        yield self.X, self.y


@pytest.mark.filterwarnings("ignore::consilience.errors.PrivacyLeakWarning")
def test_nothing_is_taken_for_encoded_by_its_form():
    schema = Schema([Numeric("a", 0, 100), Numeric("b", 0, 100)], label="y", classes=(0, 1))
    rng = np.random.default_rng(0)
    numbers = {name: rng.uniform(20, 60, 300) for name in "ab"}
    encoded = schema.encode({**numbers, "y": np.arange(300) % 2})
    scaled = StandardScaler().fit_transform(encoded.X)
    rows = schema.transformer().transform(numbers)
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], data_norm=4.0)
    assert HOW_ENCODED not in learner.fit(encoded).guarantee_.assumptions
    assert HOW_ENCODED not in learner.fit(rows, encoded.y).guarantee_.assumptions
    rows.flags.writeable = True
    rows[:] = scaled
    for given in (
        (encoded._replace(X=scaled),),
        (encoded._replace(X=encoded.X.copy()),),
        (rows, encoded.y),
        (Chunks(schema, scaled, encoded.y),),
    ):
        assert HOW_ENCODED in learner.fit(*given).guarantee_.assumptions
