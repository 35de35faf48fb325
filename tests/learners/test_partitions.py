"""Training on Dask: sums travel, records and noise do not, and the result is that of memory."""

import math
import pickle
from decimal import Decimal

import numpy as np
import pytest
from scipy import sparse

dask = pytest.importorskip("dask")
pd = pytest.importorskip("pandas")
pytest.importorskip("distributed")

import dask.array as da  # noqa: E402
import dask.dataframe as dd  # noqa: E402

from consilience import (  # noqa: E402
    Categorical,
    DaskRows,
    Numeric,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateRidge,
    Schema,
)
from consilience.errors import SchemaMismatch, SettingsError  # noqa: E402
from consilience.learners.inputs import as_chunks  # noqa: E402
from consilience.privacy.mechanisms import Noise  # noqa: E402

MARK = "Zyzzyva7351"
SCHEMA = Schema(
    [Numeric("a", -1, 1, missing="middle"), Categorical("b", ("x", "y"))],
    "ill",
    classes=("no", "yes"),
)


@pytest.fixture(autouse=True)
def in_threads():
    with dask.config.set(scheduler="threads", num_workers=2):
        yield


def arrays(n_records=3000):
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.4, 0.4, (n_records, 4))
    return X, (X @ [3, -2, 1, 0] + 0.1 * rng.normal(size=n_records) > 0).astype(int)


def frame(n_records=3000):
    X, y = arrays(n_records)
    columns = {
        "ill": np.where(y, "yes", "no"),
        "a": X[:, 0],
        "b": np.where(X[:, 1] > 0, "x", "y"),
        "other": MARK,
    }
    made = pd.DataFrame(columns)
    made.loc[::50, "a"] = np.nan
    return made


LEARNERS = [
    PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], noise=Noise(seed=1)),
    PrivateLogisticRegression(
        epsilon=1.0, classes=[0, 1, 2], mechanism="output", noise=Noise(seed=1)
    ),
    PrivateLogisticRegression(
        epsilon=math.inf,
        regularization=1e-2,
        classes=[0, 1],
        neighbours="add-remove",
        public_size=10,
    ),
    PrivateLinearSVC(epsilon=1.0, classes=[0, 1, 2], delta=1e-6, noise=Noise(seed=1)),
    PrivateRidge(epsilon=1.0, mechanism="generalized", noise=Noise(seed=1), label_bound=1.0),
]


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("kind", ["array", "frame"])
def test_training_on_dask_is_training_in_memory(learner, kind):
    X, y = arrays()
    whole = type(learner)(**learner.get_params()).fit(X, y)
    if kind == "array":
        there = learner.fit(da.from_array(X, chunks=(700, 3)), da.from_array(y, chunks=700))
    else:
        table = dd.from_pandas(pd.DataFrame(X).assign(y=y), npartitions=7)
        there = learner.fit(table[[0, 1, 2, 3]], table["y"])
    # Each is as close to the minimum as the solver vouches for, relative to the minimum's length.
    near = 2e-8 * float(np.linalg.norm(whole.coef_))
    np.testing.assert_allclose(there.coef_, whole.coef_, rtol=0, atol=near)
    assert there.events_ == whole.events_
    assert there.guarantee_ == whole.guarantee_
    assert there.n_features_in_ == 4


def test_two_worker_processes_give_what_memory_gives_and_the_guarantee_is_the_same(ledger):
    from distributed import Client, LocalCluster

    X, y, _ = SCHEMA.encode(frame())
    settings = {"epsilon": 0.5, "classes": ["no", "yes"]}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
        dask.config.set(scheduler="distributed"),
    ):
        rows = DaskRows(dd.from_pandas(frame(), npartitions=5), schema=SCHEMA, named=True)
        there = PrivateLogisticRegression(**settings).fit(rows, ledger=ledger, dataset="ward")
        exact = PrivateLogisticRegression(**{**settings, "epsilon": math.inf}).fit(rows)
    names = np.array(["no", "yes"])[y]
    here = PrivateLogisticRegression(**settings).fit(X, names)
    assert there.guarantee_.promises_same(here.guarantee_)
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.5)
    here = PrivateLogisticRegression(**{**settings, "epsilon": math.inf}).fit(X, names)
    np.testing.assert_allclose(exact.coef_, here.coef_, atol=2.5e-8)
    assert exact.classes_.tolist() == ["no", "yes"]


def test_what_travels_holds_no_noise_no_learner_and_no_record(monkeypatch):
    sent = []
    gather = DaskRows.gather

    def listening(self, function, every=1):
        sent.append(pickle.dumps(function))
        return gather(self, function, every)

    monkeypatch.setattr(DaskRows, "gather", listening)
    X, y = arrays()
    seed = 0x5EED5EED5EED
    for learner in LEARNERS:
        learner = type(learner)(
            **{**learner.get_params(), "noise": Noise(seed=seed), "epsilon": 1.0}
        )
        learner.fit(da.from_array(X, chunks=(700, 4)), da.from_array(y, chunks=700))
    assert len(sent) > 10
    for content in sent:
        for word in (
            b"Noise",
            b"Source",
            b"ChaCha",
            b"Private",
            b"mechanisms",
            seed.to_bytes(6, "little"),
        ):
            assert word not in content.replace(b"PrivateLogisticRegression", b"").replace(
                b"PrivateLinearSVC", b""
            ).replace(b"PrivateRidge", b"")  # the learner's name, for errors
        assert len(content) < 2000


def test_forests_read_partitions_one_at_a_time():
    from consilience import Bins

    X, y, _ = SCHEMA.encode(frame())
    rows = DaskRows(dd.from_pandas(frame(), npartitions=4), schema=SCHEMA)
    settings = {
        "epsilon": 1.0,
        "classes": [0, 1],
        "bins": Bins.of(SCHEMA),
        "max_depth": 2,
        "noise": Noise(seed=1),
    }
    here, there = (PrivateForestClassifier(**settings).fit(*table) for table in ((X, y), (rows,)))
    assert np.array_equal(here.counts_, there.counts_)


def test_a_share_of_each_partition_is_taken_before_anything_is_made_of_it():
    table = frame(9000)
    rows = DaskRows(dd.from_pandas(table, npartitions=2), schema=SCHEMA)
    found = rows.gather(lambda chunks: [(X.copy(), y.copy()) for X, y in chunks], every=7)
    expected = SCHEMA.encode(pd.concat([table[:4500][::7], table[4500:][::7]]))
    assert np.array_equal(np.concatenate([X for parts in found for X, _ in parts]), expected.X)
    assert np.array_equal(np.concatenate([y for parts in found for _, y in parts]), expected.y)
    X, y = arrays(100)
    ((given,),) = DaskRows(da.from_array(X, chunks=100), da.from_array(y, chunks=100)).gather(
        list, every=9
    )
    assert np.array_equal(given[0], X[::9])
    assert np.array_equal(given[1], y[::9])


def test_chunks_of_partitions_can_be_kept():
    table = frame(9000)
    rows = DaskRows(dd.from_pandas(table, npartitions=2), schema=SCHEMA)
    X, y = (np.concatenate(parts) for parts in zip(*rows.chunks(), strict=True))
    whole = SCHEMA.encode(table)
    assert np.array_equal(X, whole.X)
    assert np.array_equal(y, whole.y)


def bad_frames():
    good = frame(100)
    yield (
        "'a'",
        good.assign(a=[MARK] + ["0.1"] * 99),
        Schema([Numeric("a", -1, 1)], "ill", classes=("no", "yes")),
    )
    yield "'b'", good.assign(b=[*good["b"][:-1], MARK]), SCHEMA
    yield "'ill'", good.assign(ill=[*good["ill"][:-1], MARK]), SCHEMA


@pytest.mark.parametrize(
    ("column", "table", "schema"), [*bad_frames()], ids=["number", "category", "label"]
)
def test_a_bad_partition_is_refused_before_the_charge_and_never_quoted(
    column, table, schema, ledger, capfd, caplog
):
    rows = DaskRows(dd.from_pandas(table, npartitions=3), schema=schema)
    with pytest.raises(SchemaMismatch) as caught:
        PrivateLogisticRegression(epsilon=0.5, classes=[0, 1]).fit(
            rows, ledger=ledger, dataset="ward"
        )
    assert ledger.charges() == []
    assert column in str(caught.value)
    for said in (str(caught.value), *capfd.readouterr(), caplog.text):
        assert MARK not in said
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_other_libraries_errors_are_named_and_not_quoted(ledger):
    def broken(part):
        raise RuntimeError(MARK)

    X, y = arrays(100)
    table = da.from_array(X, chunks=(50, 4))
    learner = PrivateLogisticRegression(epsilon=0.5, classes=[0, 1])
    for given in (
        table.map_blocks(broken, dtype=float),
        da.from_array(X.astype(str).astype(object), chunks=(50, 4)),
    ):
        with pytest.raises(SchemaMismatch) as caught:
            learner.fit(given, da.from_array(y, chunks=50), ledger=ledger, dataset="ward")
        assert MARK not in str(caught.value)
        assert caught.value.__context__ is None
    assert ledger.charges() == []


def test_what_is_no_table_is_refused():
    X, y = arrays(100)
    here, there = da.from_array(X, chunks=(50, 4)), da.from_array(y, chunks=50)
    for arguments, settings in (
        ((X, y), {}),
        ((here,), {}),
        ((here, y), {}),
        ((here, there), {"schema": SCHEMA}),
    ):
        with pytest.raises(SettingsError, match="No record was read"):
            DaskRows(*arguments, **settings)
    with pytest.raises(SchemaMismatch, match="lacks the columns"):
        DaskRows(dd.from_pandas(frame(10)[["a", "ill"]], npartitions=1), schema=SCHEMA)
    with pytest.raises(SchemaMismatch, match="partitions"):
        DaskRows(here, da.from_array(y, chunks=25))
    with pytest.raises(SchemaMismatch, match="one label for each record"):
        PrivateRidge(epsilon=1.0, label_bound=1.0).fit(here, da.from_array(y, chunks=(60, 40)))
    person = Schema(
        [Numeric("a", -1, 1)], "ill", classes=("no", "yes"), person="b", max_records_per_person=1
    )
    with pytest.raises(SettingsError, match="person"):
        DaskRows(dd.from_pandas(frame(10), npartitions=1), schema=person)
    assert as_chunks(X, y) is None


@pytest.mark.parametrize("kind", ["frame", "array"])
@pytest.mark.parametrize("mechanism", ["objective", "gradient"])
def test_labels_with_a_second_dimension_are_refused_before_the_charge(kind, mechanism, ledger):
    X, y = arrays(300)
    table = pd.DataFrame(X)
    given = {
        "frame": (dd.from_pandas(table, 3), dd.from_pandas(pd.DataFrame({"y": y}), 3)),
        "array": (da.from_array(X, (100, 4)), da.from_array(y[:, None], (100, 1))),
    }[kind]
    for classes in ([0, 1], [0, 1, 2]):
        learner = PrivateLogisticRegression(
            epsilon=1.0, delta=1e-6, mechanism=mechanism, classes=classes
        )
        with pytest.raises(SchemaMismatch, match=r"frame\['y'\] instead of frame\[\['y'\]\]"):
            learner.fit(*given, ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == 0


@pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
@pytest.mark.parametrize("form", ["coo", "csc", "bsr", "dia"])
def test_partitions_of_sparse_rows_of_any_kind_train_alike(form):
    X, y = arrays(4000)
    blocks = [
        dask.delayed(sparse.csr_matrix(X[start : start + 1000]).asformat)(form)
        for start in range(0, 4000, 1000)
    ]
    rows = da.concatenate(
        [da.from_delayed(block, (1000, 4), meta=sparse.csr_matrix((0, 4))) for block in blocks]
    )
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], noise=Noise(seed=1))
    found = learner.fit(rows, da.from_array(y, 1000)).coef_
    whole = PrivateLogisticRegression(**learner.get_params()).fit(sparse.csr_array(X), y)
    np.testing.assert_allclose(found, whole.coef_, atol=1e-6)


def test_a_value_of_another_kind_changes_no_other_record_of_its_partition():
    """Arrow would find one type for a partition: every decimal would get the digits of the last."""
    column = Categorical("b", ("1.5", "2.5"), missing="ignore", unseen="ignore")
    schema = Schema(
        [Numeric("a", 0, 1, cuts=(0.1, 0.5), missing="middle"), column], "ill", classes=(0, 1)
    )

    def rows(b, a):
        values = {"a": [*[Decimal("0.1")] * 9, a], "b": [*[Decimal("1.5")] * 9, b], "ill": [1] * 10}
        with dask.config.set({"dataframe.convert-string": False}):
            table = dd.from_pandas(pd.DataFrame(values, dtype=object), npartitions=2)
            return np.concatenate([X for X, _ in DaskRows(table, schema=schema).chunks()])

    alike = rows(Decimal("1.5"), Decimal("0.1"))
    for b, a in (
        (Decimal("1.25"), Decimal("0.000001")),
        ("1.5", "x"),
        (1.5, 1),
        (np.float32(1), 2),
    ):
        assert np.array_equal(rows(b, a)[:-1], alike[:-1])


def test_partitions_of_different_types_are_encoded_alike():
    schema = Schema([Categorical("a", (2**53, 7, "0.5"))], "ill", classes=(0, 1))
    parts = [
        pd.DataFrame({"a": np.array([2**53, 7]), "ill": [0, 1]}),
        pd.DataFrame({"a": np.array([2.0**53, 7.0]), "ill": [0.0, 1.0]}),
        pd.DataFrame({"a": pd.Series([Decimal(2**53), "7"], dtype=object), "ill": ["0", True + 0]}),
    ]
    encoded = [schema.encode(part) for part in parts]
    for other in encoded[1:]:
        assert np.array_equal(other.X, encoded[0].X)
        assert np.array_equal(other.y, encoded[0].y)
