import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics
from sklearn.datasets import make_classification, make_regression
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.svm import LinearSVC

from consilience.aggregators.average import Average
from consilience.errors import SchemaMismatch, SettingsError
from consilience.evaluation.measures import (
    DECIDING,
    METRICS,
    evaluate,
    find_metric,
    measures,
)
from consilience.learners.linear import PrivateLogisticRegression, PrivateRidge


class Answers:
    """A classifier that gives prepared answers and, if asked to, prepared scores or chances."""

    def __init__(self, answers, classes=None, scores=None, chances=None):
        self.answers = np.asarray(answers)
        if classes is not None:
            self.classes_ = np.asarray(classes)
        if scores is not None:
            self.decision_function = lambda X: np.asarray(scores)
        if chances is not None:
            self.predict_proba = lambda X: np.asarray(chances)

    def predict(self, X):
        return self.answers


def table(n_classes, n=600, seed=0):
    X, y = make_classification(
        n,
        6,
        n_informative=4,
        n_classes=n_classes,
        n_clusters_per_class=1,
        flip_y=0.2,
        random_state=seed,
    )
    return X[: n // 2], y[: n // 2], X[n // 2 :], y[n // 2 :]


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("names", ["numbers", "texts"])
def test_every_measure_equals_scikit_learns(n_classes, names):
    X, y, X_test, y_test = table(n_classes)
    if names == "texts":
        y, y_test = (np.array(["bear", "cat", "ant"])[one] for one in (y, y_test))
    model = LogisticRegression().fit(X, y)
    found = evaluate(model, X_test, y_test)
    chances, answers = model.predict_proba(X_test), model.predict(X_test)
    expected = {
        "error": 1 - metrics.accuracy_score(y_test, answers),
        "f1_micro": metrics.f1_score(y_test, answers, average="micro"),
        "f1_macro": metrics.f1_score(y_test, answers, average="macro"),
        "log_loss": metrics.log_loss(y_test, chances),
        "calibration": slow_calibration(chances, answers == y_test),
    }
    if n_classes == 2:
        expected["f1"] = metrics.f1_score(y_test, answers, pos_label=model.classes_[1])
        expected["auc"] = metrics.roc_auc_score(y_test, chances[:, 1])
    else:
        # By the decision function, which scikit-learn only takes as chances for more than two
        # classes.
        scores = model.decision_function(X_test)
        expected["auc"] = np.mean(
            [
                metrics.roc_auc_score(y_test == label, scores[:, k])
                for k, label in enumerate(model.classes_)
            ]
        )
    assert {name: one.value for name, one in found.measures.items()} == pytest.approx(
        expected, abs=1e-12
    )
    values = measures(model, X_test, y_test)
    assert values == pytest.approx({name: expected[name] for name in values}, abs=1e-12)
    assert set(found.measures) == set(values)
    for name, one in found.measures.items():
        assert one.low < one.high, name
        if name != "calibration":
            assert one.low <= one.value <= one.high, name


@pytest.mark.parametrize("n_classes", [2, 3])
def test_what_models_are_judged_by_is_a_mean_over_records(n_classes):
    X, y, X_test, y_test = table(n_classes)
    found = evaluate(LogisticRegression().fit(X, y), X_test, y_test)
    numbers = evaluate(LinearRegression().fit(X, X[:, 0] + y), X_test, X_test[:, 0] + y_test)
    for metric in DECIDING:
        of = found if metric.name in found.measures else numbers
        assert of.parts(metric).mean() == pytest.approx(of[metric.name].value)
        assert len(of.parts(metric)) == len(y_test)


def test_a_metric_is_found_by_its_name_as_it_is_typed():
    assert find_metric("log-loss", numeric=False) is find_metric("log_loss", numeric=False)
    assert find_metric("auc", numeric=False).higher_is_better
    assert find_metric("r2", numeric=True).higher_is_better
    assert not find_metric("rmse", numeric=True).higher_is_better
    for name, numeric in (("rmse", False), ("error", True), ("calibration", False), ("f1", False)):
        with pytest.raises(SettingsError, match="compared by one of"):
            find_metric(name, numeric=numeric)


def test_every_metric_says_its_name_and_how_it_is_computed():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.title
        assert len(metric.how) > 20


def slow_calibration(chances, right, bins=10):
    total = 0.0
    for k in range(bins):
        inside = (chances.max(axis=1) >= k / bins) & (
            (chances.max(axis=1) < (k + 1) / bins) | (k == bins - 1)
        )
        if inside.any():
            total += inside.mean() * abs(chances.max(axis=1)[inside].mean() - right[inside].mean())
    return total


def test_the_error_interval_is_exact_and_covers_by_enumeration():
    n, level = 30, 0.9
    covered = dict.fromkeys((0.02, 0.2, 0.5, 0.97), 0.0)
    for k in range(n + 1):
        truth = np.zeros(n, int)
        answers = (np.arange(n) < k).astype(int)
        found = evaluate(Answers(answers, [0, 1]), np.zeros((n, 1)), truth, level=level)["error"]
        tail = (1 - level) / 2
        assert found.low == pytest.approx(0.0 if k == 0 else stats.beta.ppf(tail, k, n - k + 1))
        assert found.high == pytest.approx(1.0 if k == n else stats.beta.isf(tail, k + 1, n - k))
        for p in covered:
            covered[p] += stats.binom.pmf(k, n, p) * (found.low <= p <= found.high)
    assert min(covered.values()) >= level


def test_the_auc_interval_is_delongs_on_the_logit_scale():
    rng = np.random.default_rng(3)
    y = (np.arange(60) < 25).astype(int)
    scores = np.round(y + rng.normal(size=60), 1)  # with ties
    kernel = np.array(
        [[(a > b) + 0.5 * (a == b) for b in scores[y == 0]] for a in scores[y == 1]]
    )  # slow and obvious
    auc = kernel.mean()
    variance = kernel.mean(axis=1).var(ddof=1) / 25 + kernel.mean(axis=0).var(ddof=1) / 35
    half = stats.norm.isf(0.025) * math.sqrt(variance) / (auc * (1 - auc))
    found = evaluate(Answers(y, [0, 1], scores=scores), np.zeros((60, 1)), y)["auc"]
    logit = math.log(auc / (1 - auc))
    expected = [auc, *(1 / (1 + math.exp(-one)) for one in (logit - half, logit + half))]
    assert [found.value, found.low, found.high] == pytest.approx(expected, abs=1e-12)


def test_a_perfect_auc_is_not_called_certain():
    y = (np.arange(40) < 10).astype(int)
    found = evaluate(Answers(y, [0, 1], scores=y - 0.5), np.zeros((40, 1)), y)["auc"]
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.025 ** (1 / 10))  # what ten pairs in order show


def test_the_bootstrap_of_counts_is_that_of_records():
    X, y, X_test, y_test = table(2)
    model = LogisticRegression().fit(X, y)
    answers, rng = model.predict(X_test), np.random.default_rng(0)
    rows = rng.integers(len(y_test), size=(4000, len(y_test)))
    truth, answer = y_test[rows] == 1, answers[rows] == 1
    drawn = 2 * (truth & answer).sum(axis=1) / (truth.sum(axis=1) + answer.sum(axis=1))
    found = evaluate(model, X_test, y_test, resamples=4000)["f1"]
    # Quantiles of 4000 draws with a standard deviation near 0.025 have errors near 0.001.
    assert [found.low, found.high] == pytest.approx(
        list(np.quantile(drawn, (0.025, 0.975))), abs=0.006
    )


def test_an_evaluation_repeats_and_depends_on_its_seed_only_through_the_bootstrap():
    X, y, X_test, y_test = table(2)
    model = LogisticRegression().fit(X, y)
    first, again, other = (evaluate(model, X_test, y_test, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first["f1"].low != other["f1"].low
    assert first["auc"] == other["auc"]


def test_reliability_bins_hold_every_record_with_exact_intervals():
    X, y, X_test, y_test = table(2)
    found = evaluate(LogisticRegression().fit(X, y), X_test, y_test, bins=5)
    assert sum(one.n_records for one in found.reliability) == found.n_records == len(y_test)
    assert all(
        one.accuracy.low <= one.accuracy.value <= one.accuracy.high for one in found.reliability
    )
    confidences = [one.confidence for one in found.reliability]
    assert confidences == sorted(confidences)
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_calibrated_model_has_an_interval_near_zero_and_an_overconfident_one_has_not():
    rng = np.random.default_rng(0)
    p = rng.uniform(size=4000)
    y = (rng.uniform(size=4000) < p).astype(int)
    answers = (p > 0.5).astype(int)
    chances = np.column_stack([1 - p, p])
    honest = evaluate(Answers(answers, [0, 1], chances=chances), np.zeros((4000, 1)), y)[
        "calibration"
    ]
    assert honest.low < 0.01
    sure = np.where(answers == 1, 0.99, 0.01)
    boaster = evaluate(
        Answers(answers, [0, 1], chances=np.column_stack([1 - sure, sure])), np.zeros((4000, 1)), y
    )
    assert boaster["calibration"].low > 0.15


def test_what_a_model_cannot_say_is_not_measured():
    X, y, X_test, y_test = table(2)
    margins = evaluate(LinearSVC().fit(X, y), X_test, y_test)
    assert set(margins.measures) == {"error", "f1", "f1_micro", "f1_macro", "auc"}
    answers = evaluate(Answers(y_test), X_test, y_test)
    assert set(answers.measures) == {"error", "f1", "f1_micro", "f1_macro"}
    assert answers["error"].value == 0


def test_strange_labels_count_as_wrong_and_a_single_class_has_no_auc():
    chances = np.tile([0.25, 0.75], (4, 1))
    model = Answers([1, 1, 1, 0], [0, 1], chances=chances)
    strange = evaluate(model, np.zeros((4, 1)), [1, 1, 7, 7])
    assert strange["error"].value == 0.5
    assert strange["log_loss"].value == pytest.approx(
        (2 * -math.log(0.75) + 2 * -math.log(1e-15)) / 4
    )
    single = evaluate(model, np.zeros((4, 1)), [1, 1, 1, 1])
    assert "auc" not in single.measures
    assert "auc" not in measures(model, np.zeros((4, 1)), [1, 1, 1, 1])


def test_regression_equals_scikit_learn_and_its_intervals_a_bootstrap():
    X, y = make_regression(800, 5, noise=60.0, random_state=0)
    model = LinearRegression().fit(X[:400], y[:400])
    found, answers, truth = evaluate(model, X[400:], y[400:]), model.predict(X[400:]), y[400:]
    expected = {
        "rmse": metrics.root_mean_squared_error,
        "mae": metrics.mean_absolute_error,
        "r2": metrics.r2_score,
    }
    rng = np.random.default_rng(0)
    rows = rng.integers(400, size=(400, 400))
    for name, function in expected.items():
        assert found[name].value == pytest.approx(function(truth, answers))
        spread = np.std([function(truth[one], answers[one]) for one in rows])
        assert found[name].high - found[name].low == pytest.approx(2 * 1.96 * spread, rel=0.2), name
    assert measures(model, X[400:], y[400:])["rmse"] == found.main.value
    assert "r2" not in evaluate(model, X[400:], np.ones(400), task="regression").measures


def test_learners_and_ensembles_of_this_project_are_evaluated_like_any_other():
    X, y, X_test, y_test = table(2)
    members = [
        PrivateLogisticRegression(epsilon=math.inf, data_norm=9).fit(X[i::3], y[i::3])
        for i in range(3)
    ]
    ensemble = Average().combine(members)
    found = evaluate(ensemble, X_test, y_test)
    assert found["error"].value == pytest.approx(np.mean(ensemble.predict(X_test) != y_test))
    assert {"auc", "log_loss", "calibration"} <= set(found.measures)
    ridge = [
        PrivateRidge(epsilon=math.inf, data_norm=9, label_bound=1.0).fit(X[i::2], X[i::2, 0] / 9)
        for i in range(2)
    ]
    assert set(evaluate(Average().combine(ridge), X_test, X_test[:, 0] / 9).measures) == {
        "rmse",
        "mae",
        "r2",
    }


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"level": 1.5}, "level"),
        ({"resamples": 0}, "resamples"),
        ({"bins": 0}, "bins"),
        ({"task": "sorting"}, "task"),
    ],
)
def test_bad_settings_are_refused(settings, match):
    with pytest.raises(SettingsError, match=match):
        evaluate(Answers([0, 1]), np.zeros((2, 1)), [0, 1], **settings)


def test_labels_that_do_not_fit_are_refused():
    for labels, answers in itertools.product(([], [0, 1, 1]), ([0, 1],)):
        with pytest.raises(SchemaMismatch, match="one label per record"):
            evaluate(Answers(answers), np.zeros((2, 1)), labels)


def test_an_evaluation_prints_as_a_table():
    text = str(evaluate(Answers([0, 1, 1, 1]), np.zeros((4, 1)), [0, 1, 1, 0]))
    assert "95% interval" in text
    assert "on 4 public test records" in text
