import json
import math
import struct

import joblib
import numpy as np
import pandas as pd
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from consilience.aggregators.average import Average
from consilience.aggregators.feature import FeatureMethod
from consilience.data import Public
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.privacy.mechanisms import Noise
from consilience.simulate import BEST, EXACT, LOCAL, OWN, POOLED, PUBLIC, TITLES, _plan, simulate

RNG = np.random.default_rng(0)
N = 900
X = RNG.uniform(-0.5, 0.5, (N, 4))
y = (X @ [3.0, -2.0, 1.0, 0.0] + 0.5 * RNG.normal(size=N) > 0).astype(int)
LEARNER = PrivateLogisticRegression(epsilon=2.0, regularization=1e-2)
BOTH = {"average": Average(), "equal": Average("equal")}


def run(**settings):
    asked = {"sites": 3, "public": 60, "repeats": 2, "seed": 7} | settings
    learner, aggregator = asked.pop("learner", LEARNER), asked.pop("aggregator", BOTH)
    return simulate(learner, aggregator, asked.pop("X", X), asked.pop("y", y), **asked)


def cuts(n=3, **settings):
    """Return the divisions that a simulation of these settings makes."""
    asked = dict.fromkeys(("public", "seed", "epsilon", "sizes", "label_skew", "feature_skew"))
    asked |= {"X": X, "y": y, "sites": 3, "test": 0.3, "seed": 1} | settings
    plan = _plan(LEARNER, Average(), **asked)
    return [plan.cut(repeat) for repeat in range(n)]


@pytest.fixture(scope="module")
def report():
    return run(epsilon=[0.5, 4.0])


def test_every_result_has_the_three_models_of_the_thesis_and_public_records_alone(report):
    found = {(row.epsilon, row.method, row.repeat) for row in report.rows if row.metric == "error"}
    for level in ("0.5", "4"):
        for method in (*TITLES, "average", "equal", "site-001", "site-002", "site-003"):
            assert {(level, method, repeat) for repeat in range(2)} <= found
    kinds = {row.method: row.kind for row in report.rows}
    assert kinds[PUBLIC] == "public"
    assert {kinds[name] for name in (LOCAL, BEST, OWN)} == {"local"}
    assert {kinds[name] for name in (POOLED, EXACT)} == {"global"}
    assert kinds["average"] == "distributed"
    assert {"error", "f1", "f1_macro", "auc", "log_loss", "helped"} <= {row.metric for row in report.rows}


def test_mean_and_best_are_those_of_the_single_sites(report):
    for level in ("0.5", "4"):
        name = type(LEARNER).__name__
        single = np.array([report.values(name, level, f"site-{i:03}") for i in (1, 2, 3)])
        assert report.values(name, level, LOCAL) == pytest.approx(single.mean(axis=0))
        assert report.values(name, level, BEST) == pytest.approx(single.min(axis=0))
        helped = (report.values(name, level, "equal") < single).mean(axis=0)
        assert report.values(name, level, "equal", "helped") == pytest.approx(helped)


def test_a_seeded_report_is_the_same_on_every_backend_and_in_every_order(report):
    for backend, jobs in (("loky", 2), ("threading", 3)):
        with joblib.parallel_config(backend, n_jobs=jobs):
            assert run(epsilon=[0.5, 4.0]) == report
    key = lambda row: (row.repeat, row.epsilon, row.method, row.metric)  # noqa: E731
    turned = run(epsilon=[4.0, 0.5], aggregator=dict(reversed(BOTH.items())))
    assert sorted(turned.rows, key=key) == sorted(report.rows, key=key)
    assert run(epsilon=[0.5, 4.0], seed=8).rows != report.rows


def test_adding_a_method_or_a_level_leaves_the_other_cells_as_they_are(report):
    alone = run(epsilon=4.0, aggregator={"average": Average()})
    assert set(alone.rows) <= set(report.rows)
    learners = {"svm": PrivateLinearSVC(epsilon=1.0), type(LEARNER).__name__: LEARNER}
    more = run(epsilon=4.0, aggregator={"average": Average()}, learner=learners)
    assert set(alone.rows) <= set(more.rows)
    # What needs no privacy is divided and trained the same at every level.
    for method in (PUBLIC, OWN, EXACT):
        name = type(LEARNER).__name__
        assert np.array_equal(report.values(name, "0.5", method), report.values(name, "4", method))


def test_a_report_can_be_recomputed_by_hand(report):
    """The slow obvious way: divide, train at each site with its seed, average, count errors."""
    plan = _plan(LEARNER, BOTH, X, y, 3, 60, 0.3, 7, [0.5, 4.0], None, None, None)
    name = type(LEARNER).__name__
    for repeat in range(2):
        cut = plan.cut(repeat)
        members = [
            PrivateLogisticRegression(epsilon=4.0, classes=[0, 1], noise=plan.noise(repeat, name, "4", site)).fit(
                X[rows], y[rows]
            )
            for site, rows in enumerate(cut.sites)
        ]
        w = np.mean([np.append(one.coef_, one.intercept_) for one in members], axis=0)
        error = np.mean((cut.X_test @ w[:-1] + w[-1] > 0) != (cut.y_test == 1))
        assert report.values(name, "4", "equal")[repeat] == pytest.approx(error)
        pooled = PrivateLogisticRegression(epsilon=math.inf).fit(*(v[np.concatenate(cut.sites)] for v in (X, y)))
        error = np.mean(pooled.predict(cut.X_test) != cut.y_test)
        assert report.values(name, "4", EXACT)[repeat] == pytest.approx(error)


def test_a_seed_voids_the_guarantee_and_without_one_it_holds(report):
    assert report.guarantee.void_reason == "seeded noise"
    assert "no guarantee: seeded noise" in report.sentence
    assert not any(one.holds for one in report.guarantees.values())
    fresh = run(seed=None, epsilon=[0.5, 2.0], repeats=1)
    assert fresh.guarantee.holds
    assert fresh.guarantee.epsilon == pytest.approx(2.0)
    name = type(LEARNER).__name__
    assert fresh.guarantees[name, "0.5", "average"].epsilon == pytest.approx(0.5)
    assert fresh.guarantees[name, "0.5", POOLED].epsilon == pytest.approx(0.5)
    assert "no guarantee" not in fresh.sentence
    assert run(seed=None, repeats=1).rows != run(seed=None, repeats=1).rows


def test_divisions_are_disjoint_complete_and_new_in_each_repeat():
    for cut in cuts(public=50):
        used = np.concatenate(cut.sites)
        assert len(np.unique(used)) == len(used) == N - 270 - 50
        assert [len(rows) for rows in cut.sites] == [194, 193, 193]
        assert (len(cut.y_test), len(cut.public.y)) == (270, 50)
    first, second, _ = cuts()
    assert not np.array_equal(first.sites[0], second.sites[0])
    assert all(np.array_equal(a, b) for a, b in zip(first.sites, cuts()[0].sites, strict=True))


def test_sizes_are_honoured_with_and_without_skew():
    for skew in ({}, {"label_skew": 0.3}, {"feature_skew": 0.8}):
        for cut in cuts(sites=10, sizes=[30, 200, 70], **skew):
            assert [len(rows) for rows in cut.sites] == [30, 200, 70]
            assert len(np.unique(np.concatenate(cut.sites))) == 300


def test_label_skew_makes_classes_uneven_and_a_large_value_hardly():
    def spread(shape):
        return np.mean([np.std([y[rows].mean() for rows in cut.sites]) for cut in cuts(8, sites=6, label_skew=shape)])

    even = np.mean([np.std([y[rows].mean() for rows in cut.sites]) for cut in cuts(8, sites=6)])
    assert spread(0.1) > 0.3 > spread(1.0) > 0.1 > spread(1e4)
    assert even < 0.1
    for cut in cuts(8, sites=6, label_skew=0.1):  # every record is still used once
        assert len(np.unique(np.concatenate(cut.sites))) == N - 270


def test_feature_skew_separates_sites_along_a_direction():
    def apart(strength):
        found = []
        for cut in cuts(4, sites=4, feature_skew=strength):
            centres = np.array([X[rows].mean(axis=0) for rows in cut.sites])
            found.append(np.linalg.norm(centres - centres.mean(axis=0)))
        return np.mean(found)

    assert apart(1.0) > 2 * apart(0.3) > 2 * apart(0.0)


def test_sites_by_id_come_from_an_array_or_a_column():
    ids = np.array(["north", "south", "east"])[np.arange(N) % 3]
    for cut in cuts(sites=ids):
        assert [set(ids[rows]) for rows in cut.sites] == [{"east"}, {"north"}, {"south"}]
    frame = pd.DataFrame(X, columns=list("abcd")).assign(hospital=ids)
    by_column = run(X=frame, sites="hospital", repeats=1)
    assert by_column == run(sites=ids, repeats=1)
    assert by_column.settings["sites"] == 3
    missing = [None, *ids[1:]]
    with pytest.raises(SchemaMismatch, match="id is missing"):
        run(sites=missing)


def test_a_site_left_without_records_takes_no_part():
    ids = np.where(np.arange(N) < 1, 0, 1 + np.arange(N) % 2)
    reports = [simulate(LEARNER, Average(), X, y, sites=ids, repeats=1, seed=seed) for seed in range(4)]
    sizes = [report.settings["sizes"][0] for report in reports]
    assert 0 in sizes  # the single record of the first site was tested on
    assert all(len(report.rows) for report in reports)


def test_each_site_may_have_its_own_epsilon():
    mixed = run(seed=None, epsilon=[[0.5, 1.0, 4.0]], repeats=1)
    name = type(LEARNER).__name__
    assert {row.epsilon for row in mixed.rows} == {"0.5 to 4"}
    assert {(row.epsilon_low, row.epsilon_high) for row in mixed.rows} == {(0.5, 4.0)}
    assert mixed.guarantees[name, "0.5 to 4", "average"].epsilon == pytest.approx(4.0)
    assert mixed.guarantees[name, "0.5 to 4", POOLED].epsilon == pytest.approx(0.5)  # the strictest site's
    named = run(epsilon={"all": 1.0, "mixed": [1.0, 1.0, 8.0]}, repeats=1)
    assert [level for _, level in named.cells] == ["all", "mixed"]


def test_noise_at_a_trusted_aggregator_takes_exact_members_at_each_sites_epsilon():
    found = run(seed=None, epsilon=[[0.5, 1.0, 4.0]], repeats=1, aggregator={"central": Average("size", epsilon=1.0)})
    stated = found.guarantees[type(LEARNER).__name__, "0.5 to 4", "central"]
    assert stated.epsilon <= 4.0
    assert any("trusted" in one for one in stated.assumptions)
    own = run(seed=None, repeats=1, aggregator={"central": Average("equal", epsilon=1.0)})
    assert own.guarantees[type(LEARNER).__name__, "2", "central"].epsilon == pytest.approx(1.0)
    assert run(aggregator=Average("equal", epsilon=1.0)) == run(aggregator=Average("equal", epsilon=1.0))


def test_private_aggregation_records_have_the_epsilon_of_the_level():
    private = {"private": FeatureMethod(epsilon=1.0)}
    found = run(seed=None, epsilon=[0.5, 4.0], repeats=1, aggregator=private)
    name = type(LEARNER).__name__
    assert [found.guarantees[name, level, "private"].epsilon for level in ("0.5", "4")] == pytest.approx([0.5, 4.0])
    own = run(seed=None, repeats=1, aggregator={"private": FeatureMethod(epsilon=7.0)})  # the learner's own 2
    assert own.guarantees[name, "2", "private"].epsilon == pytest.approx(7.0)


def test_without_privacy_all_is_exact():
    found = run(epsilon=math.inf, seed=None, repeats=1)
    name = type(LEARNER).__name__
    assert found.values(name, "inf", LOCAL) == found.values(name, "inf", OWN)
    assert found.values(name, "inf", POOLED) == found.values(name, "inf", EXACT)
    assert math.isinf(found.guarantee.epsilon)


def test_public_and_test_records_may_be_given():
    separate = (X[:200], y[:200])
    public = Public(X[200:260], y[200:260])
    found = run(X=X[260:], y=y[260:], public=public, test=separate)
    assert found.settings["test"] == 200
    assert found.settings["public"] == 60
    assert sum(found.settings["sizes"]) == N - 260
    unlabelled = run(public=Public(X[:60]), repeats=1)
    assert PUBLIC not in {row.method for row in unlabelled.rows}
    none = run(public=None, repeats=1)
    assert PUBLIC not in {row.method for row in none.rows}
    assert "no labelled public records" in none.sentence


def test_regressors_multiclass_learners_and_sparse_records_can_be_simulated():
    ridge = run(learner=PrivateRidge(epsilon=3.0, label_bound=2.0), y=X[:, 0] * 2, repeats=2)
    assert {row.metric for row in ridge.rows} == {"rmse", "mae", "r2", "helped", "helped_exact"}
    assert ridge.main == "rmse"
    assert "Its rmse is" in ridge.sentence
    words = np.array(["a", "b", "c"])[np.digitize(X[:, 0], [-0.2, 0.2])]
    assert run(y=words, X=sparse.csr_array(X), repeats=1).table("error")
    declared = PrivateLogisticRegression(epsilon=5.0, neighbours="add-remove", public_size=200, classes=("c", "b", "a"))
    assert run(learner=declared, y=words, repeats=1, aggregator=Average("equal")).table("error")


def test_learners_and_aggregators_form_a_grid():
    found = run(learner=[LEARNER, PrivateLinearSVC(epsilon=1.0)], repeats=1)
    assert found.cells == [("PrivateLogisticRegression", "2"), ("PrivateLinearSVC", "1")]
    single = run(aggregator=Average(), repeats=1)
    assert "Average" in {row.method for row in single.rows}


def test_the_table_summarises_and_files_hold_every_row(report, tmp_path):
    (line,) = [one for one in report.table("auc") if (one.epsilon, one.method) == ("4", "average")]
    values = report.values(line.learner, "4", "average", "auc")
    assert (line.mean, line.sd) == pytest.approx((values.mean(), values.std(ddof=1)))
    assert line.se == pytest.approx(line.sd / math.sqrt(2))
    assert "site-001" not in {one.method for one in report.table()}
    assert "site-001" in {one.method for one in report.table(single_sites=True)}
    report.to_csv(tmp_path / "all.csv")
    report.to_parquet(tmp_path / "all.parquet")
    for found in (pcsv.read_csv(tmp_path / "all.csv"), pq.read_table(tmp_path / "all.parquet")):
        assert found.num_rows == len(report.rows)
        assert found["value"].to_pylist() == [row.value for row in report.rows]
    json.dumps(report.as_dict(), allow_nan=False)
    json.dumps(run(repeats=1).as_dict(), allow_nan=False)  # one repeat has no spread
    with pytest.raises(SettingsError, match="metric"):
        report.table("beauty")


def test_the_chart_is_drawn(report, tmp_path):
    report.plot(tmp_path / "errors.png")
    png = (tmp_path / "errors.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert width > height > 500
    run(learner=[LEARNER, PrivateLinearSVC(epsilon=1.0)], repeats=1).plot(tmp_path / "two.png", "auc")


def test_the_sentence_says_so_when_joining_does_not_help(report):
    text = str(report)
    for title in TITLES.values():
        assert title in text
    assert "best in hindsight of 2 aggregators" in report.sentence
    # With a single repeat there is no interval, so nothing is clear.
    single = run(repeats=1).sentence
    assert "does not clearly help" in single
    assert "no interval from one repeat" in single
    # Hardly any private signal, and public records in plenty: joining cannot help.
    assert "does not help" in run(epsilon=0.01, public=300, repeats=6, aggregator=Average("equal")).sentence


def test_joining_helps_where_it_should():
    found = run(sites=40, epsilon=30.0, repeats=5, public=None, aggregator=Average("equal"))
    assert "by Average helps. Its error is" in found.sentence


def test_progress_is_told_for_every_cell():
    steps = []
    run(learner=[LEARNER, PrivateLinearSVC(epsilon=1.0)], progress=lambda *step: steps.append(step))
    assert steps == [(i, 4) for i in range(1, 5)]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sites": 0}, "'sites'"),
        ({"sites": 2.5}, "'sites'"),
        ({"sites": [1, 2]}, "'sites'"),
        ({"sites": "hospital"}, "'sites'"),
        ({"sites": np.arange(N) % 3, "sizes": [3]}, "sites are given by id"),
        ({"sites": np.arange(N) % 3, "label_skew": 1.0}, "sites are given by id"),
        ({"sizes": [1, 0]}, "'sizes'"),
        ({"sizes": [500, 500]}, "1000 records in all"),
        ({"sites": 800}, "at least one record per site"),
        ({"repeats": 0}, "'repeats'"),
        ({"n_jobs": 0}, "'n_jobs'"),
        ({"test": 1.5}, "'test'"),
        ({"test": (X[:, :2], y)}, "'test'"),
        ({"public": -3}, "'public'"),
        ({"public": Public(X[:, :2], y)}, "'public'"),
        ({"epsilon": [0.0]}, "'epsilon'"),
        ({"epsilon": [[1.0, 2.0]]}, "one per site"),
        ({"epsilon": [1.0, 1.0]}, "different names"),
        ({"epsilon": []}, "'epsilon'"),
        ({"label_skew": 0.0}, "'label_skew'"),
        ({"feature_skew": 1.5}, "'feature_skew'"),
        ({"feature_skew": 0.5, "label_skew": 1.0}, "'feature_skew'"),
        ({"seed": -1}, "'seed'"),
        ({"learner": LogisticRegression()}, "'learner'"),
        ({"learner": PrivateLogisticRegression(epsilon=1.0, noise=Noise(seed=1))}, "no noise of their own"),
        ({"learner": PrivateLogisticRegression(epsilon=1.0, unit="person", records_per_person=2)}, "unit='record'"),
        ({"learner": [LEARNER, PrivateRidge(epsilon=1.0)]}, "'learner'"),
        ({"learner": [LEARNER, LEARNER]}, "dictionary by name"),
        ({"aggregator": []}, "'aggregator'"),
        ({"aggregator": {PUBLIC: Average()}}, "'aggregator'"),
        ({"aggregator": Average(noise=Noise(seed=1))}, "'aggregator'"),
        ({"aggregator": "average"}, "'aggregator'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(settings, match):
    with pytest.raises(SettingsError, match=match):
        run(**settings)
