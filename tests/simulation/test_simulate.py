import copy
import json
import math
import struct
import threading
from dataclasses import replace

import joblib
import numpy as np
import pandas as pd
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from experiments.comparators import PATE, ClippedAverage
from matplotlib.figure import Figure
from scipy import sparse
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

from consilience.aggregators.average import Average
from consilience.aggregators.distillation.distill import (
    SoftLabelDistillation,
    VoteDistillation,
)
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.pooling import PooledCounts, PrivateLeafCounts, Structure
from consilience.aggregators.votes import WeightedVote
from consilience.errors import SchemaMismatch, SettingsError
from consilience.evaluation.baselines import (
    BEST,
    EXACT,
    GUESS,
    LOCAL,
    OWN,
    POOLED,
    PUBLIC,
    TITLES,
)
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.privacy.mechanisms import Noise
from consilience.simulation.simulate import _set_up, simulate
from consilience.tables.public import Public

RNG = np.random.default_rng(0)
N = 900
X = RNG.uniform(-0.5, 0.5, (N, 4))
y = (X @ [3.0, -2.0, 1.0, 0.0] + 0.5 * RNG.normal(size=N) > 0).astype(int)
FORMER = {"regularization": 1e-2, "intercept_scaling": 1.0}
LEARNER = PrivateLogisticRegression(epsilon=2.0, **FORMER)
BOTH = {"average": Average(), "equal": Average("equal")}


def run(**settings):
    asked = {"sites": 3, "public": 60, "repeats": 2, "seed": 7} | settings
    learner, aggregator = asked.pop("learner", LEARNER), asked.pop("aggregator", BOTH)
    return simulate(learner, aggregator, asked.pop("X", X), asked.pop("y", y), **asked)


def cuts(n=3, **settings):
    """Return the divisions that a simulation of these settings makes."""
    asked = {"X": X, "y": y, "sites": 3, "test": 0.3, "seed": 1} | settings
    setup, _ = _set_up(LEARNER, Average(), **asked)
    return [setup.cut(repeat) for repeat in range(n)]


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
    assert {"error", "f1", "f1_macro", "auc", "log_loss", "helped"} <= {
        row.metric for row in report.rows
    }


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
    plan, _ = _set_up(LEARNER, BOTH, X, y, sites=3, public=60, seed=7, epsilon=[0.5, 4.0])
    name = type(LEARNER).__name__
    for repeat in range(2):
        cut = plan.cut(repeat)
        members = [
            PrivateLogisticRegression(
                epsilon=4.0, classes=[0, 1], noise=plan.noise(repeat, name, "4", site), **FORMER
            ).fit(X[rows], y[rows])
            for site, rows in enumerate(cut.sites)
        ]
        w = np.mean([np.append(one.coef_, one.intercept_) for one in members], axis=0)
        error = np.mean((cut.X_test @ w[:-1] + w[-1] > 0) != (cut.y_test == 1))
        assert report.values(name, "4", "equal")[repeat] == pytest.approx(error)
        pooled = PrivateLogisticRegression(epsilon=math.inf, **FORMER).fit(
            *(v[np.concatenate(cut.sites)] for v in (X, y))
        )
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
        return np.mean(
            [
                np.std([y[rows].mean() for rows in cut.sites])
                for cut in cuts(8, sites=6, label_skew=shape)
            ]
        )

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
    reports = [
        simulate(LEARNER, Average(), X, y, sites=ids, repeats=1, seed=seed) for seed in range(4)
    ]
    sizes = [report.settings["sizes"][0] for report in reports]
    assert 0 in sizes  # the single record of the first site was tested on
    assert all(len(report.rows) for report in reports)


def test_each_site_may_have_its_own_epsilon():
    mixed = run(seed=None, epsilon=[[0.5, 1.0, 4.0]], repeats=1)
    name = type(LEARNER).__name__
    assert {row.epsilon for row in mixed.rows} == {"0.5 to 4"}
    assert {(row.epsilon_low, row.epsilon_high) for row in mixed.rows} == {(0.5, 4.0)}
    assert mixed.guarantees[name, "0.5 to 4", "average"].epsilon == pytest.approx(4.0)
    assert mixed.guarantees[name, "0.5 to 4", POOLED].epsilon == pytest.approx(
        0.5
    )  # the strictest site's
    named = run(epsilon={"all": 1.0, "mixed": [1.0, 1.0, 8.0]}, repeats=1)
    assert [level for _, level in named.cells] == ["all", "mixed"]


def test_noise_at_a_trusted_aggregator_takes_exact_members_at_each_sites_epsilon():
    found = run(
        seed=None,
        epsilon=[[0.5, 1.0, 4.0]],
        repeats=1,
        aggregator={"central": Average("size", epsilon=1.0)},
    )
    stated = found.guarantees[type(LEARNER).__name__, "0.5 to 4", "central"]
    assert stated.epsilon <= 4.0
    assert any("trusted" in one for one in stated.assumptions)
    own = run(seed=None, repeats=1, aggregator={"central": Average("equal", epsilon=1.0)})
    assert own.guarantees[type(LEARNER).__name__, "2", "central"].epsilon == pytest.approx(1.0)
    assert run(aggregator=Average("equal", epsilon=1.0)) == run(
        aggregator=Average("equal", epsilon=1.0)
    )


def test_private_aggregation_records_have_the_epsilon_of_the_level():
    private = {"private": FeatureMethod(epsilon=1.0)}
    found = run(seed=None, epsilon=[0.5, 4.0], repeats=1, aggregator=private)
    name = type(LEARNER).__name__
    assert [
        found.guarantees[name, level, "private"].epsilon for level in ("0.5", "4")
    ] == pytest.approx([0.5, 4.0])
    own = run(
        seed=None, repeats=1, aggregator={"private": FeatureMethod(epsilon=7.0)}
    )  # the learner's own 2
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
    assert {row.metric for row in ridge.rows} == {
        "rmse",
        "mae",
        "r2",
        "helped",
        "helped_exact",
        "bytes",
    }
    assert ridge.main == "rmse"
    assert "Its RMSE is" in ridge.sentence
    assert "always the mean" in str(ridge)
    words = np.array(["a", "b", "c"])[np.digitize(X[:, 0], [-0.2, 0.2])]
    assert run(y=words, X=sparse.csr_array(X), repeats=1).table("error")
    declared = PrivateLogisticRegression(
        epsilon=5.0, neighbours="add-remove", public_size=200, classes=("c", "b", "a")
    )
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
    figure = Figure(layout="constrained", dpi=150)
    (panel,) = report.plot(ax=figure)
    figure.savefig(tmp_path / "errors.png")
    png = (tmp_path / "errors.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert width > height > 500
    assert "error" in panel.get_ylabel()
    two = run(learner=[LEARNER, PrivateLinearSVC(epsilon=1.0)], repeats=1)
    axes = Figure().subplots(1, 2)
    assert two.plot("auc", ax=axes).tolist() == list(axes)
    assert axes[0].get_legend() is not None
    page = two._repr_html_()
    assert page.count("<svg") == len(two.cells) == 2
    assert two.sentence.split(":")[0] in page


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
    assert (
        "does not help"
        in run(epsilon=0.01, public=300, repeats=6, aggregator=Average("equal")).sentence
    )


def test_the_metric_decides_what_is_sorted_and_judged_by(report):
    found = run(metric="auc", epsilon=[1.0])
    cell = found.cells[0]
    assert found.main == "auc"
    text = str(found).splitlines()
    assert "highest AUC first" in text[0]
    shown = [float(line.split()[0]) for line in text[4 : 4 + len(TITLES) + len(BOTH)]]
    assert shown == sorted(shown, reverse=True)
    sites = [found.values(*cell, f"site-{i:03}") for i in (1, 2, 3)]
    assert found.values(*cell, BEST) == pytest.approx(np.max(sites, axis=0))
    joining = found.joining(*cell, "average")
    assert joining.metric == "auc"
    assert all(
        gap.gain.value == pytest.approx(gap.joined - gap.other) for gap in joining.gaps.values()
    )
    assert f"Its AUC is {joining.gaps[TITLES[GUESS]].joined:.4g}" in found.sentence
    # More sites than are listed are measured one by one where counting is not enough.
    many = run(sites=120, metric="log-loss", epsilon=1.0, repeats=1, aggregator=Average())
    assert many.values(*many.cells[0], LOCAL).size == 1


def test_every_result_has_the_most_frequent_class_beside_it(report):
    setup, _ = _set_up(LEARNER, BOTH, X, y, sites=3, public=60, seed=7)
    cell = report.cells[0]
    for repeat, value in enumerate(report.values(*cell, GUESS)):
        share = np.mean(setup.cut(repeat).y_test)
        assert value == pytest.approx(min(share, 1 - share))
    assert report.values(*cell, GUESS, "auc") == pytest.approx(0.5)
    assert report.values(*cell, GUESS, "calibration") == pytest.approx(0.0, abs=1e-12)


def test_with_few_positives_the_report_says_that_errors_tell_nothing_and_compares_by_auc():
    rare = (X @ [3.0, -2.0, 1.0, 0.0] + RNG.normal(size=N) > 2.1).astype(int)
    assert 0.05 < rare.mean() < 0.15
    strong = PrivateLogisticRegression(epsilon=1.0, regularization=0.1)
    found = run(y=rare, learner=strong, aggregator=Average(), public=None)
    assert "errors do not show here whether anything was learned; the AUC can" in found.sentence
    assert "By AUC, joining" in found.sentence
    assert "--metric auc" in found.sentence
    assert "--metric" not in run(y=rare, learner=strong, public=None, metric="auc").sentence


def test_joining_helps_where_it_should():
    found = run(sites=40, epsilon=30.0, repeats=5, public=None, aggregator=Average("equal"))
    assert "by Average helps. Its error is" in found.sentence


def test_progress_is_told_for_every_cell():
    steps = []
    run(learner=[LEARNER, PrivateLinearSVC(epsilon=1.0)], progress=lambda *step: steps.append(step))
    assert steps == [(i, 4) for i in range(1, 5)]


NAME = type(LEARNER).__name__
TRUSTED = {
    "soft": SoftLabelDistillation(epsilon=1.0, regularization="auto"),
    "vote": VoteDistillation(epsilon=1.0),
    "pate": PATE(epsilon=1.0, delta=1e-5, n_queries=20),
    "clipped": ClippedAverage(epsilon=1.0, clip_norm=5.0),
}


def test_many_sites_are_as_many_loops_and_what_nobody_needs_is_not_trained():
    levels = [0.5, 50.0, math.inf]
    found = run(sites=150, aggregator=TRUSTED, epsilon=levels)
    assert {row.method for row in found.rows} == {*TRUSTED, GUESS, PUBLIC, OWN, EXACT}
    assert LOCAL not in {row.method for row in found.timings}  # no private model was trained
    plan, _ = _set_up(LEARNER, TRUSTED, X, y, sites=150, public=60, seed=7, epsilon=levels)
    for repeat in range(2):
        cut = plan.cut(repeat)
        exact = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1], **FORMER)
        alone = [type(LEARNER)(**exact.get_params()).fit(X[rows], y[rows]) for rows in cut.sites]
        errors = [np.mean(one.predict(cut.X_test) != cut.y_test) for one in alone]
        assert found.values(NAME, "0.5", OWN)[repeat] == pytest.approx(np.mean(errors), abs=1e-9)
        for method in TRUSTED:
            for level, name in zip(levels, ("0.5", "50", "inf"), strict=True):
                made = copy.copy(TRUSTED[method])
                made.epsilon, made.noise = level, plan.noise(repeat, NAME, name, method)
                error = np.mean(made.combine(alone, cut.public).predict(cut.X_test) != cut.y_test)
                assert found.values(NAME, name, method)[repeat] == pytest.approx(error, abs=1e-9)
            helped = found.values(NAME, "inf", method, "helped_exact")[repeat]
            assert helped == pytest.approx(
                np.mean(found.values(NAME, "inf", method)[repeat] < np.array(errors))
            )
    assert (
        run(sites=150, aggregator=TRUSTED, epsilon=levels, backend="threading", n_jobs=2) == found
    )
    assert "with the same privacy" not in found.sentence


def test_private_baselines_are_there_where_they_answer_the_same_question():
    def methods(aggregator, **settings):
        return {
            row.method
            for row in run(repeats=1, epsilon=1.0, aggregator=aggregator, **settings).rows
        } & set(TITLES)

    always, central = {GUESS, PUBLIC, OWN, EXACT}, Average("equal", epsilon=1.0)
    assert methods(TRUSTED) == always
    assert methods({**TRUSTED, "central": central}) == {
        *always,
        POOLED,
    }  # it hides records, as the pool does
    assert methods({**TRUSTED, "average": Average()}) == set(TITLES)
    assert methods(Average(), baselines=[]) == set()
    assert methods(TRUSTED, baselines=[LOCAL, EXACT]) == {LOCAL, EXACT}
    exact = run(
        repeats=1, epsilon=math.inf, aggregator={"central": central, "plain": Average("equal")}
    )
    assert exact.values(NAME, "inf", "central") == exact.values(NAME, "inf", "plain")
    assert "nothing to compare" in run(repeats=1, baselines=[]).sentence


def test_without_an_aggregator_only_baselines_are_computed_and_they_are_the_same(report):
    alone = run(aggregator={}, epsilon=[0.5, 4.0], baselines=[PUBLIC, EXACT])
    assert set(alone.rows) < set(report.rows)
    assert {row.method for row in alone.rows} == {PUBLIC, EXACT}
    assert {row.method for row in alone.timings} == {PUBLIC, EXACT}  # no site was trained
    assert alone.sentence == "The models of this simulation have no guarantee: seeded noise."


def test_draws_repeat_the_noise_on_one_division_and_repeats_stay_the_unit(report):
    both = {**BOTH, "central": Average("equal", epsilon=1.0)}
    found = run(epsilon=[0.5, 4.0], draws=3, aggregator=both)
    assert {row for row in found.rows if row.draw == 0} >= set(report.rows)
    assert {
        row.draw for row in found.rows if row.method in (LOCAL, POOLED, "equal", "site-001")
    } == {0, 1, 2}
    assert {row.draw for row in found.rows if row.method in (PUBLIC, OWN, EXACT)} == {0}
    for method in (LOCAL, "central"):
        rows = [
            row
            for row in found.rows
            if (row.epsilon, row.method, row.metric) == ("0.5", method, "auc")
        ]
        if method == LOCAL:  # every draw is another one
            assert len({row.value for row in rows}) == 6
        means = [
            np.mean([row.value for row in rows if row.repeat == repeat]) for repeat in range(2)
        ]
        assert found.values(NAME, "0.5", method, "auc") == pytest.approx(means)
        (line,) = [
            one for one in found.table("auc") if (one.epsilon, one.method) == ("0.5", method)
        ]
        assert (line.mean, line.sd, line.repeats) == pytest.approx(
            (np.mean(means), np.std(means, ddof=1), 2)
        )
    assert found.settings["draws"] == 3


def test_what_draws_no_noise_is_there_once():
    ways = {"average": Average(), "noisy": Average("equal", epsilon=1.0)}
    asked = {"aggregator": ways, "baselines": [], "draws": 3, "repeats": 1}
    found = run(epsilon=[0.5, math.inf], **asked)
    draws = {
        level: {row.draw for row in found.rows if row.epsilon == level} for level in ("0.5", "inf")
    }
    assert draws == {"0.5": {0, 1, 2}, "inf": {0}}
    # Exact sites, and noise of the aggregator's own, to which no level applies.
    alone = run(learner=PrivateLogisticRegression(epsilon=math.inf), **asked)
    noisy = [row.value for row in alone.rows if (row.method, row.metric) == ("noisy", "log_loss")]
    assert len(set(noisy)) == 3


def test_a_checkpoint_is_used_again_only_for_what_is_the_same(tmp_path):
    base = {"epsilon": [0.5, 4.0], "baselines": [OWN]}
    report = run(**base)

    def kept(**settings):
        """Run, and return the report and the number of cells that were not there."""
        before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        found = run(**base | {"checkpoint": tmp_path} | settings)
        after = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        return found, sum(before.get(path) != time for path, time in after.items())

    assert kept() == (report, 2)
    assert kept() == (report, 0)
    assert kept(n_jobs=2, backend="threading") == (report, 0)
    longer, new = kept(repeats=3)
    assert new == 1
    assert set(report.rows) < set(longer.rows)
    assert kept(learner={NAME: LEARNER, "svm": PrivateLinearSVC(epsilon=1.0)}, repeats=1)[1] == 1
    changes = [
        {"seed": 8},
        {"epsilon": [0.5, 4.1]},
        {"epsilon": {"0.5": 0.5, "4": 4.1}},
        {"learner": PrivateLogisticRegression(epsilon=2.0, regularization=2e-2)},
        {"aggregator": {**BOTH, "average": Average(curvature=0.03)}},
        {"aggregator": dict(reversed(BOTH.items()))},
        {"X": np.where(np.arange(N)[:, None] == 899, X + 1e-9, X)},
        {"y": np.where(np.arange(N) == 899, 1 - y, y)},
        {"sites": 4},
        {"sizes": [100, 100, 100]},
        {"public": 61},
        {"public": Public(X[:60], y[:60])},
        {"test": 0.31},
        {"test": (X[:60], y[:60])},
        {"label_skew": 3.0},
        {"feature_skew": 0.3},
        {"draws": 2},
        {"baselines": [OWN, BEST]},
        {"prepare": PCA(2)},
        {"prepare": PCA(2), "prepare_on": "train"},
        {"prepare": PCA(3)},
        {"prepare": lambda seen: np.asarray},
        {"prepare": lambda seen: lambda features: 1.0 * features},
        {"prepare": lambda seen: lambda features: 2.0 * features},
    ]
    for change in changes:
        assert kept(repeats=1, **change)[1] == 1, change
    assert [kept(repeats=1, **change)[1] for change in changes] == [0] * len(changes)
    held = threading.Lock()
    with pytest.raises(SettingsError, match="cannot be told from others"):
        kept(prepare=lambda seen: held)
    assert kept() == (report, 0)
    for damaged, path in enumerate(sorted(tmp_path.iterdir())):
        path.write_bytes(path.read_bytes()[: 100 * damaged])
    assert kept() == (report, 2)


def test_preparing_learns_from_public_records_or_as_papers_did_from_all_but_the_tested():
    raw = cuts(public=60)
    for where, size in (("public", 60), ("train", N - 270)):
        for cut, plain in zip(cuts(public=60, prepare=PCA(2), prepare_on=where), raw, strict=True):
            known = (
                plain.public.X if where == "public" else X[~np.isin(X[:, 0], plain.X_test[:, 0])]
            )
            assert len(known) == size
            axes = PCA(2).fit(known)
            for prepared, given in (
                (cut.X_test, plain.X_test),
                (cut.public.X, plain.public.X),
                (cut.X, X),
            ):
                assert prepared == pytest.approx(axes.transform(given))
            assert all(np.array_equal(a, b) for a, b in zip(cut.sites, plain.sites, strict=True))
    seen = []

    def scale(records):
        seen.append(len(records))
        length = np.linalg.norm(records, axis=1).max()
        return lambda features: features / length

    found = run(
        prepare=scale,
        public=Public(X[:60], y[:60]),
        test=(X[60:200], y[60:200]),
        X=X[200:],
        y=y[200:],
    )
    assert seen == [60] * 2  # once for each division
    assert found.settings["prepared"] == "public"
    assert run(prepare=PCA(2)).settings["features"] == 2
    loose = make_pipeline(PCA(2, svd_solver="randomized", iterated_power=0), Normalizer())
    assert run(prepare=loose) == run(prepare=loose)


def test_backends_can_be_named(report):
    for backend in ("loky", "threading"):
        assert run(epsilon=[0.5, 4.0], backend=backend, n_jobs=2) == report


def test_forests_are_simulated_with_the_aggregators_of_forests():
    bins = Bins.even(-0.5, 0.5, n_features=4, n_bins=8)
    shared = {"epsilon": 2.0, "bins": bins, "n_trees": 5, "max_depth": 3}
    forest = PrivateForestClassifier(splitter="random", random_state=1, **shared)
    joined = {"vote": WeightedVote(), "pool": PooledCounts()}
    found = run(learner=forest, aggregator=joined, epsilon=[[0.5, 1.0, 8.0], 30.0])
    assert found.table("bytes")[0].mean > 8 * 5 * 2**3 * 2  # at least the counts of all leaves
    name = type(forest).__name__
    assert found.values(name, "30", "pool").mean() < 0.4
    leaves = PrivateLeafCounts(
        epsilon=1.0, structure=Structure.random(bins, [0, 1], n_trees=5, max_depth=3)
    )
    assert run(learner=leaves, aggregator=joined, repeats=1).table()
    boosted = PrivateAdaBoostClassifier(epsilon=8.0, bins=bins, n_rounds=4, max_depth=2)
    assert run(learner=boosted, aggregator=WeightedVote(), repeats=1).table("f1_micro")
    own = PrivateForestClassifier(
        **shared
    )  # public randomness of its own: another at each site, the same in each run
    again = [
        run(learner=own, aggregator=WeightedVote(), backend=backend)
        for backend in (None, "threading")
    ]
    assert again[0] == again[1]
    with pytest.raises(SchemaMismatch, match="splits"):
        run(learner=PrivateForestClassifier(splitter="random", **shared), aggregator=PooledCounts())


def test_a_single_site_is_a_simulation_too():
    alone = run(sites=1, aggregator=Average("equal"))
    assert alone.values(NAME, "2", "Average") == pytest.approx(alone.values(NAME, "2", LOCAL))
    assert "joining 1 sites" in alone.sentence


def test_seconds_and_bytes_are_told_and_seconds_change_no_report(report):
    assert {row.metric for row in report.timings} == {"seconds"}
    assert {row.method for row in report.timings} == {*TITLES, *BOTH} - {BEST, GUESS}
    assert all(one.mean > 0 for one in report.table("seconds"))
    assert {one.mean for one in report.table("bytes")} == {
        8.0 * (4 + 1)
    }  # coefficients and an intercept
    assert replace(report, timings=(), seconds=0.0) == report


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
        ({"draws": 0}, "'draws'"),
        ({"backend": "mpi"}, "'backend'"),
        ({"baselines": ["public-only", "magic"]}, "'baselines'"),
        ({"seed": None, "checkpoint": "kept"}, "'seed'.*noise is fresh"),
        ({"prepare": 3}, "'prepare'"),
        ({"prepare": PCA(2), "prepare_on": "test"}, "'prepare_on'"),
        ({"prepare": PCA(2), "public": None}, "'public'.*prepare_on='train'"),
        ({"learner": LogisticRegression()}, "'learner'"),
        (
            {"learner": PrivateLogisticRegression(epsilon=1.0, noise=Noise(seed=1))},
            "no noise of their own",
        ),
        (
            {
                "learner": PrivateLogisticRegression(
                    epsilon=1.0, unit="person", records_per_person=2
                )
            },
            "unit='record'",
        ),
        ({"learner": [LEARNER, PrivateRidge(epsilon=1.0, label_bound=1.0)]}, "'learner'"),
        ({"learner": [LEARNER, LEARNER]}, "dictionary by name"),
        ({"aggregator": []}, "'aggregator'.*unless baselines are asked for"),
        ({"learner": []}, "'learner'.*at least one"),
        ({"aggregator": {PUBLIC: Average()}}, "'aggregator'"),
        ({"aggregator": Average(noise=Noise(seed=1))}, "'aggregator'"),
        ({"aggregator": "average"}, "'aggregator'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(settings, match):
    with pytest.raises(SettingsError, match=match):
        run(**settings)
