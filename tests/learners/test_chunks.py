"""Tables larger than memory: training in chunks is training in memory, and what is bad is refused
before the charge.
"""

import math
import subprocess
import sys
import textwrap
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import sparse
from sklearn.base import clone

import consilience.study.records
from bounded import PrivateRidge
from consilience import (
    Bins,
    Categorical,
    Numeric,
    ParquetRows,
    PrivateAdaBoostClassifier,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateTreeClassifier,
    Schema,
)
from consilience.errors import GuaranteeVoid, SchemaMismatch, SettingsError
from consilience.files.sealed import SigningKey
from consilience.learners import erm
from consilience.learners.ball import Ball
from consilience.learners.encoded import EncodedPartitions, LabelCodes
from consilience.learners.projection import PrivatePCA
from consilience.learners.trees import binned as coded
from consilience.learners.trees import forest as trees
from consilience.privacy.mechanisms import Noise
from studies import study
from studies import table as study_table

MARK = "Zyzzyva7351"
COLUMNS = [
    Numeric("age", 0, 100, missing="indicator"),
    Numeric("pressure", -1, 1, missing=0.25),
    Numeric("dose", 0, 1e4, transform="log1p", missing="middle", missing_values=(-9,)),
    Categorical("ward", ("a", "b", "c"), missing="indicator", unseen="ignore"),
]
TWO = Schema(COLUMNS, "ill", classes=("no", "yes"))
THREE = Schema(COLUMNS, "ill", classes=("no", "yes", "gone"), unknown_label="gone")
NUMBER = Schema(COLUMNS, "days", label_bound=10.0, unknown_label=0.0)


def table(n_records=1500, seed=0):
    """Return records with text, gaps and labels of every kind; label 'ill' depends on the age."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(-5, 105, n_records)
    ill = np.where(rng.random(n_records) < 0.9, age > 50, rng.random(n_records) < 0.5)
    return pa.table(
        {
            "days": (age / 10 + rng.normal(size=n_records)).astype(np.float32),
            "pressure": pa.array(rng.normal(size=n_records), mask=rng.random(n_records) < 0.1),
            "age": pa.array(age.astype(np.float32), mask=rng.random(n_records) < 0.1),
            "dose": np.where(rng.random(n_records) < 0.1, -9, rng.integers(0, 9999, n_records)),
            "ward": pa.array(
                rng.choice(["a", "b", "c", "elsewhere"], n_records),
                mask=rng.random(n_records) < 0.1,
            ),
            "ill": np.where(ill, "yes", "no"),
        }
    )


@pytest.fixture
def folder(tmp_path):
    """Write the table as files of unlike types, with row groups that no chunk size divides, and one
    without rows.
    """
    whole, place = table(), tmp_path / "ward"
    (place / "late").mkdir(parents=True)
    pq.write_table(whole.slice(0, 700), place / "0.parquet", row_group_size=97)
    pq.write_table(whole.slice(0, 0), place / "1.parquet")
    text = whole.slice(700, 1).set_column(2, "age", pa.array(["61.5"]))
    pq.write_table(text.select([5, 4, 3, 2, 1, 0]), place / "2.parquet")
    whole = pa.concat_tables([whole.slice(0, 700), whole.slice(701)])
    pq.write_table(whole.slice(700), place / "late" / "3.parquet", row_group_size=400)
    return place


LINEAR = [
    (PrivateLogisticRegression, TWO, {"mechanism": "objective"}),
    (PrivateLogisticRegression, TWO, {"mechanism": "output", "fit_intercept": False}),
    (PrivateLogisticRegression, TWO, {"mechanism": "generalized", "delta": 1e-6}),
    (PrivateLogisticRegression, TWO, {"mechanism": "matrix", "random_state": 3}),
    (
        PrivateLogisticRegression,
        TWO,
        {"neighbours": "add-remove", "public_size": 1000, "data_norm": 0.7},
    ),
    (PrivateLogisticRegression, TWO, {"calibration": "chaudhuri2011"}),
    (PrivateLogisticRegression, THREE, {"mechanism": "objective", "delta": 1e-6}),
    (
        PrivateLogisticRegression,
        THREE,
        {"mechanism": "output", "neighbours": "add-remove", "public_size": 9},
    ),
    (PrivateLinearSVC, TWO, {"mechanism": "objective"}),
    (PrivateLinearSVC, TWO, {"mechanism": "matrix", "random_state": 3}),
    (PrivateLinearSVC, THREE, {"mechanism": "output"}),
    (PrivateLinearSVC, THREE, {"mechanism": "generalized", "delta": 1e-6}),
    (PrivateRidge, NUMBER, {"mechanism": "objective", "label_bound": 10.0}),
    (PrivateRidge, NUMBER, {"mechanism": "output", "label_bound": 4.0, "delta": 1e-6}),
    (
        PrivateRidge,
        NUMBER,
        {"mechanism": "generalized", "neighbours": "add-remove", "public_size": 10**6},
    ),
    (PrivateRidge, NUMBER, {"mechanism": "matrix", "random_state": 3}),
]
TREES = [
    (PrivateTreeClassifier, {"max_depth": 3}),
    (PrivateForestClassifier, {"n_trees": 5, "max_depth": 3}),
    (
        PrivateForestClassifier,
        {"n_trees": 5, "max_depth": 3, "neighbours": "replace-one", "max_features": 2},
    ),
    (PrivateForestClassifier, {"n_trees": 3, "max_depth": 2, "delta": 1e-6}),
    (
        PrivateForestClassifier,
        {"n_trees": 4, "max_depth": 3, "splitter": "random", "random_state": 1},
    ),
    (PrivateForestClassifier, {"delta": 1e-6, "public_size": 2000}),
    (PrivateAdaBoostClassifier, {"n_rounds": 3}),
]


def encoded(schema, folder):
    parts = [schema.encode(file) for file in sorted(folder.rglob("*.parquet"))]
    return np.concatenate([part.X for part in parts]), np.concatenate([part.y for part in parts])


def both(learner, schema, folder, chunk_records=61, **settings):
    """Fit in memory and in chunks; return the two."""
    if schema.classes is not None:
        settings["classes"] = list(range(len(schema.classes)))
    X, y = encoded(schema, folder)
    return [
        learner(**settings).fit(X, y),
        learner(**settings).fit(ParquetRows(folder, schema, chunk_records)),
    ]


@pytest.mark.parametrize(("learner", "schema", "settings"), LINEAR)
def test_linear_training_in_chunks_is_training_in_memory(learner, schema, settings, folder):
    whole, chunked = both(learner, schema, folder, **settings, epsilon=1.0, noise=Noise(seed=1))
    # The same noise, the closing one included, on minima that are each within 1e-8 of the exact
    # one, up to its size.
    size = settings.get("label_bound", 1.0) / settings.get("data_norm", 1.0)
    np.testing.assert_allclose(chunked.coef_, whole.coef_, rtol=1e-7, atol=1e-7 * size)
    np.testing.assert_allclose(chunked.intercept_, whole.intercept_, rtol=1e-7, atol=1e-7 * size)
    assert chunked.events_ == whole.events_
    assert chunked.public_size_ == whole.public_size_
    assert chunked.n_features_in_ == whole.n_features_in_


@pytest.mark.filterwarnings("ignore::consilience.errors.RecordsWarning")
@pytest.mark.parametrize(("learner", "schema", "settings"), LINEAR)
def test_the_minimum_is_the_same_to_the_solvers_tolerance_and_so_is_the_guarantee(
    learner, schema, settings, folder
):
    exact = {name: value for name, value in settings.items() if name != "calibration"}
    whole, chunked = both(learner, schema, folder, chunk_records=1000, **exact, epsilon=math.inf)
    # Both gradients are within 1e-8 of the ridge of zero, so both coefficients within 1e-8 of the
    # minimum.
    size = settings.get("label_bound", 1.0) / settings.get("data_norm", 1.0)
    np.testing.assert_allclose(chunked.coef_, whole.coef_, atol=2.5e-8 * size)
    one, other = both(learner, schema, folder, **settings, epsilon=0.5)
    assert one.guarantee_.promises_same(other.guarantee_)
    assert 0 < one.guarantee_.epsilon <= 0.5 * (1 + 1e-9)
    assert one.events_ == other.events_


@pytest.mark.parametrize(("learner", "settings"), TREES)
@pytest.mark.parametrize("schema", [TWO, THREE], ids=["two", "three"])
def test_trees_from_chunks_are_trees_from_memory(learner, settings, schema, folder):
    settings = {"random_state": 2, **settings, "bins": Bins.of(schema)}
    for epsilon in (1.0, math.inf):
        whole, chunked = both(
            learner, schema, folder, **settings, epsilon=epsilon, noise=Noise(seed=1)
        )
        assert np.array_equal(whole.shape_.feature, chunked.shape_.feature)
        assert np.array_equal(whole.shape_.last, chunked.shape_.last)
        assert np.array_equal(whole.counts_, chunked.counts_)
        assert whole.public_size_ == chunked.public_size_
        assert whole.events_ == chunked.events_
    one, other = both(learner, schema, folder, **settings, epsilon=0.5)
    assert one.guarantee_.promises_same(other.guarantee_)


@pytest.mark.parametrize("limit", ["NODES_KEPT", "MOST_COUNTS", "BLOCK_RECORDS"])
def test_limits_of_memory_change_no_tree(limit, folder, monkeypatch):
    settings = {
        "n_trees": 5,
        "max_depth": 3,
        "bins": Bins.of(TWO),
        "epsilon": math.inf,
        "noise": Noise(seed=4),
    }
    before = both(PrivateForestClassifier, TWO, folder, **settings)
    monkeypatch.setattr(trees if limit == "MOST_COUNTS" else coded, limit, 100)
    for one, other in zip(
        before, both(PrivateForestClassifier, TWO, folder, **settings), strict=True
    ):
        assert np.array_equal(one.counts_, other.counts_)
        assert np.array_equal(one.shape_.last, other.shape_.last)


def test_a_file_of_codes_returns_what_it_was_given_and_has_no_name():
    rng = np.random.default_rng(0)
    for n_classes in (2, 256, 257, 65536):
        codes, y = rng.integers(0, 256, (1000, 3), dtype=np.uint8), rng.integers(0, n_classes, 1000)
        filed = coded.FiledTask(3, n_classes)
        for start in range(0, 1000, 170):
            filed.append(codes[start : start + 170], y[start : start + 170])
        back = filed.load()
        assert np.array_equal(back.codes, codes)
        assert np.array_equal(back.y, y)
        assert filed.n_units == 1000
        assert not isinstance(filed._file.name, str)  # a number: no path leads to it


def test_named_labels_are_those_of_the_schema(folder):
    X, y = encoded(TWO, folder)
    rows = ParquetRows(folder, TWO, named=True)
    for classes in (None, ["no", "yes"]):
        chunked = PrivateLogisticRegression(epsilon=math.inf, classes=classes).fit(rows)
        assert chunked.classes_.tolist() == ["no", "yes"]
        assert (chunked.predict(X) == np.array(["no", "yes"])[y]).mean() > 0.8
        assert chunked.guarantee_.assumptions == ()
    forest = PrivateForestClassifier(epsilon=math.inf, bins=Bins.of(TWO)).fit(rows)
    assert forest.classes_.tolist() == ["no", "yes"]
    for classes in (["yes", "no"], [0, 1]):
        with pytest.raises(SettingsError, match="classes of the table"):
            PrivateLogisticRegression(epsilon=1.0, classes=classes).fit(rows)


@pytest.mark.parametrize(
    "methods",
    [("PrivateLogisticRegression", "Average"), ("PrivateForestClassifier", "WeightedVote")],
)
def test_a_study_trains_on_large_parquet_in_chunks_and_promises_the_same(
    methods, tmp_path, ledger, monkeypatch
):
    agreed, path, made, read = study(*methods), tmp_path / "study.parquet", [], []
    pq.write_table(study_table(400), path)
    passed = ParquetRows._pass
    monkeypatch.setattr(ParquetRows, "_pass", lambda *given: read.append(given) or passed(*given))
    for limit in (consilience.tables.chunks.IN_MEMORY, 100):
        monkeypatch.setattr(consilience.tables.chunks, "IN_MEMORY", limit)
        settings = {
            "epsilon": 0.2,
            "site": "north",
            "signing": SigningKey.generate(),
            "dataset": "ward",
        }
        made.append(agreed.accept(agreed.train(path, ledger, **settings)))
        assert bool(read) is (limit == 100)
    assert made[0].guarantee == made[1].guarantee


# ------------------------------------------------------------------- refused, and before the charge


class Chunks:
    """A source that yields what it is told."""

    def __init__(self, *chunks, n_features=2, n_records=None):
        self.given, self.n_features = chunks, n_features
        self.n_records = sum(len(y) for _, y in chunks) if n_records is None else n_records

    def chunks(self):
        return iter(self.given)


GOOD = np.full((4, 2), 0.1), np.array([0, 1, 0, 1])
LEARNERS = [
    PrivateLogisticRegression(epsilon=0.5, classes=[0, 1]),
    PrivateLinearSVC(epsilon=0.5, classes=[0, 1, 2]),
    PrivateRidge(epsilon=0.5, label_bound=1.0),
    PrivateTreeClassifier(epsilon=0.5, bounds=(0, 1), classes=[0, 1]),
    PrivateForestClassifier(epsilon=0.5, bounds=(0, 1), classes=[0, 1]),
    PrivateAdaBoostClassifier(epsilon=0.5, bounds=(0, 1), classes=[0, 1]),
]
BAD = {
    "not a number": Chunks(GOOD, (np.array([[0.1, np.nan]]), np.array([0]))),
    "infinite": Chunks(GOOD, (np.array([[0.1, np.inf]]), np.array([0]))),
    "sparse and infinite": Chunks((sparse.csr_array([[0.1, np.inf]]), np.array([0]))),
    "another width": Chunks(GOOD, (np.ones((1, 3)), np.array([0]))),
    "another length": Chunks(GOOD, (np.ones((2, 2)), np.array([0]))),
    "text": Chunks(GOOD, (np.array([[MARK, MARK]]), np.array([0]))),
    "a label": Chunks(GOOD, (np.ones((1, 2)), np.array([np.inf]))),
    "a number of records": Chunks(GOOD, GOOD, n_records=7),
    "nothing": Chunks(n_records=0),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: type(learner).__name__)
def test_a_bad_chunk_is_refused_before_anything_is_charged(learner, what, ledger):
    learner.set_params(neighbours="replace-one")
    with pytest.raises(SchemaMismatch, match="Nothing was trained") as caught:
        learner.fit(BAD[what], ledger=ledger, dataset="ward")
    assert MARK not in str(caught.value)
    assert ledger.charges() == []


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: type(learner).__name__)
def test_persons_and_undeclared_classes_are_refused_before_a_record_is_read(learner, ledger):
    source = Chunks(GOOD)
    source.chunks = lambda: pytest.fail("a record was read")
    if not isinstance(learner, PrivateRidge):
        with pytest.raises(SettingsError, match="declared classes"):
            type(learner)(**{**learner.get_params(), "classes": None}).fit(
                source, ledger=ledger, dataset="ward"
            )
    with pytest.raises(SettingsError, match="unit='record'"):
        type(learner)(**{**learner.get_params(), "unit": "person", "records_per_person": 2}).fit(
            source
        )


@pytest.mark.parametrize(
    "learner",
    [*LEARNERS, PrivatePCA(epsilon=1.0, n_components=1)],
    ids=lambda one: type(one).__name__,
)
def test_records_that_were_capped_per_person_are_not_trained_on_as_single_ones(learner, ledger):
    source = Chunks(GOOD)
    source.schema = replace(TWO, person="id", max_records_per_person=1)
    source.chunks = lambda: pytest.fail("a record was read")
    with pytest.raises(SettingsError, match="records depend on one another"):
        clone(learner).fit(source, ledger=ledger, dataset="ward")
    assert ledger.charges() == []


def refused(ledger, folder, schema=TWO):
    learner = PrivateLogisticRegression(epsilon=0.5, classes=[0, 1])
    with pytest.raises(SchemaMismatch) as caught:
        learner.fit(ParquetRows(folder, schema, 50), ledger=ledger, dataset="ward")
    assert ledger.charges() == []
    assert caught.value.__cause__ is None
    assert MARK not in str(caught.value)
    return str(caught.value)


def test_a_file_that_does_not_fit_is_named_with_its_column_and_never_a_value(folder, ledger):
    bad = folder / "late" / "9.parquet"
    pq.write_table(table(5).drop_columns(["dose"]), bad)
    message = refused(ledger, folder)
    assert "'9.parquet'" in message
    assert "'dose' is absent" in message
    pq.write_table(table(5).set_column(2, "age", pa.array([[1.0]] * 5)), bad)
    message = refused(ledger, folder)
    assert "'9.parquet'" in message
    assert "'age' holds list" in message
    pq.write_table(
        table(200).set_column(5, "ill", pa.array(["no"] * 199 + [MARK])), bad, row_group_size=30
    )
    message = refused(ledger, folder)
    assert "'9.parquet'" in message
    assert "'ill'" in message
    strict = Schema([Numeric("age", 0, 100), Numeric("dose", 0, 100)], "ill", classes=("no", "yes"))
    bad.unlink()
    message = refused(ledger, folder, strict)
    assert "'0.parquet'" in message
    assert "'age'" in message
    assert "'dose'" not in message
    bad.write_bytes(MARK.encode())
    assert "'9.parquet'" in refused(ledger, folder)


def test_a_damaged_row_group_is_refused_before_the_charge(folder, ledger):
    path = folder / "late" / "3.parquet"
    content = bytearray(path.read_bytes())
    content[100:4000] = b"\xff" * 3900
    path.write_bytes(content)
    assert "'3.parquet'" in refused(ledger, folder)


def test_a_file_that_changes_between_passes_stops_the_training(folder):
    rows = ParquetRows(folder, TWO)
    list(rows.chunks())
    pq.write_table(table(700, seed=9), folder / "0.parquet")
    with pytest.raises(SchemaMismatch, match=r"0\.parquet.*changed"):
        list(rows.chunks())


def test_no_records_at_all_are_a_table_under_add_remove(tmp_path):
    pq.write_table(table(0), tmp_path / "none.parquet")
    rows = ParquetRows(tmp_path / "none.parquet", TWO)
    settings = {"epsilon": 1.0, "classes": [0, 1], "neighbours": "add-remove", "public_size": 50}
    fitted = PrivateLogisticRegression(**settings).fit(rows)
    assert fitted.coef_.shape == (1, TWO.n_features)
    forest = PrivateForestClassifier(**settings, bins=Bins.of(TWO)).fit(rows)
    assert forest.predict(TWO.encode(table(3)).X).shape == (3,)


# ------------------------------------------------------------------------- progress, passes, memory


def test_progress_goes_to_the_end_of_each_pass_and_nothing_is_shown_where_there_is_no_terminal(
    folder, capfd
):
    seen = []
    rows = ParquetRows(folder, TWO, 200, progress=lambda done, total: seen.append((done, total)))
    PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(rows)
    assert {total for _, total in seen} == {1500}
    assert [done for done, _ in seen].count(1500) >= rows.passes >= 3
    n_linear, passes = len(seen), rows.passes
    PrivateForestClassifier(epsilon=1.0, classes=[0, 1], bins=Bins.of(TWO), max_depth=3).fit(rows)
    assert (
        rows.passes == passes + 1
    )  # trees read the files once, and then one pass per level and one for the leaves
    assert [done for done, _ in seen[n_linear:]].count(1500) == 1 + 3 + 1
    PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(ParquetRows(folder, TWO))
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_shown_on_a_terminal(folder):
    pty = pytest.importorskip("pty")
    import os

    code = f"""
        from consilience import Numeric, ParquetRows, Schema
        pressure = Numeric("pressure", -1, 1, missing="middle")
        schema = Schema([pressure], "ill", classes=("no", "yes"))
        print(sum(len(y) for _, y in ParquetRows({str(folder)!r}, schema, 100).chunks()))
    """
    main, side = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=side,
        check=True,
        text=True,
        env={**os.environ, "TERM": "xterm"},  # a dumb terminal is shown no bar
    )
    os.close(side)
    shown = os.read(main, 1 << 16).decode()
    os.close(main)
    assert done.stdout == "1500\n"
    assert "Reading ward, pass 1" in shown


def test_reading_stops_when_nobody_wants_more(folder):
    import threading

    before = threading.active_count()
    chunks = ParquetRows(folder, TWO, 10).chunks()
    next(chunks)
    chunks.close()
    assert threading.active_count() <= before


def test_a_thinned_table_holds_copies_and_an_even_share_whatever_the_chunks():
    X, y = np.arange(300.0).reshape(100, 3), np.arange(100)
    for length in (1, 7, 100):
        parts = erm._thin(
            10, ((X[i : i + length], y[i : i + length]) for i in range(0, 100, length))
        )
        assert np.concatenate([labels for _, labels in parts]).tolist() == list(range(0, 100, 10))
        assert all(not np.shares_memory(rows, X) for rows, _ in parts)


PEAK = """
    import resource, sys
    import numpy as np
    from consilience import (
        Bins, Numeric, ParquetRows, PrivateForestClassifier, PrivateLogisticRegression,
        PrivateRidge, Schema
    )
    schema = Schema([Numeric(f"v{i}", -4, 4) for i in range(10)], "y", classes=(0, 1))
    settings = {"epsilon": 1.0, "classes": [0, 1]}
    if sys.argv[1] == "forest":
        learner = PrivateForestClassifier(**settings, bins=Bins.of(schema), n_trees=4, max_depth=3)
    else:
        learner = PrivateLogisticRegression(**settings)
    learner.fit(ParquetRows(sys.argv[2], schema, 4096))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learner.fit(ParquetRows(sys.argv[3], schema, 4096))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("learner", ["linear", "forest"])
def test_sixteen_times_the_records_take_hardly_more_memory(learner, tmp_path):
    rng = np.random.default_rng(0)
    for name, n_records in (("small", 50_000), ("large", 800_000)):
        columns = {f"v{i}": rng.standard_normal(n_records, dtype=np.float32) for i in range(10)}
        made = pa.table({**columns, "y": rng.integers(0, 2, n_records)})
        pq.write_table(made, tmp_path / f"{name}.parquet", row_group_size=n_records)
    paths = [str(tmp_path / f"{name}.parquet") for name in ("small", "large")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), learner, *paths],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    # Encoded, the large table takes 64 MB, its codes 9 MB; a subset of 2^15 records is 3 MB,
    # dictionary pages 10 MB.
    assert int(done.stdout) < 32 << 20


# --------------------------------------------------------------------------------------- partitions


class Partitions(Chunks):
    """A source whose parts compute by themselves, as workers do."""

    def gather(self, function, every=1):
        return [function(iter([(X[::every], y[::every])])) for X, y in self.given]


def test_sums_over_partitions_are_as_exact_as_the_bound_says():
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.2, 0.2, (5000, 4))
    y = rng.integers(0, 2, 5000)
    cuts = [0, 1, 2, 3, 900, 901, 4000, 4000, 5000]
    source = Partitions(*((X[a:b], y[a:b]) for a, b in pairwise(cuts)), n_features=4)
    signs = LabelCodes("test", np.array([0, 1]), 1)
    ball = Ball(1.0, False)
    records = EncodedPartitions(source, ball, signs, 4, 5000)
    assert records.gather(lambda chunks: sum(len(labels) for _, labels in chunks)) == [
        1,
        1,
        1,
        897,
        1,
        3099,
        0,
        1000,
    ]
    coef = rng.normal(size=4)
    there = erm.certified_gradient(
        records, None, erm.Problem(erm.Logistic(), regularization=5.0), coef
    )
    exact = erm.certified_gradient(
        X, signs(y), erm.Problem(erm.Logistic(), regularization=5.0), coef, dtype=np.longdouble
    )
    bound = erm.gradient_error(
        erm.PublicFacts(erm.Logistic(), n_records=5000, n_features=4, regularization=5.0)
    )
    assert np.linalg.norm(there - exact) <= bound
    whole = erm.solve(X, signs(y), erm.Problem(erm.Logistic(), regularization=5.0), tolerance=1e-7)
    parts = erm.solve(
        records, None, erm.Problem(erm.Logistic(), regularization=5.0), tolerance=1e-7
    )
    np.testing.assert_allclose(parts.coef, whole.coef, atol=2e-7 / 5.0)
    wide = erm.solve(
        records, None, erm.Problem(erm.Logistic(), regularization=5.0), tolerance=1e-11
    )  # beyond doubles
    assert wide.coef.dtype == np.longdouble


def test_a_worker_of_another_precision_is_refused():
    with pytest.raises(GuaranteeVoid, match="architecture"):
        erm._slopes(erm.Logistic(), np.zeros(2), np.float64, 1e-30, iter([]))
