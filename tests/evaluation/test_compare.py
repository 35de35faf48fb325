import math

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression, Ridge

from consilience.errors import SchemaMismatch
from consilience.evaluation.compare import (
    MAJORITY,
    Gap,
    Joining,
    Measure,
    paired_gap,
    repeated_gap,
)
from consilience.evaluation.measures import AUC, evaluate


class Scores:
    """A classifier of two classes that gives prepared scores."""

    classes_ = np.array([0, 1])

    def __init__(self, scores):
        self.scores = scores

    def predict(self, X):
        return (self.scores > 0.5).astype(int)

    def decision_function(self, X):
        return self.scores


class Answers:
    """A classifier of two classes that gives prepared answers."""

    def __init__(self, answers):
        self.answers, self.classes_ = np.asarray(answers), np.array([0, 1])

    def predict(self, X):
        return self.answers


def test_a_paired_gap_is_bonett_and_prices_with_mcnemars_exact_test():
    other = np.array([True] * 30 + [False] * 70)
    joined = np.array([True] * 10 + [False] * 82 + [True] * 8)
    found = paired_gap(other, joined)
    up, down = 21 / 102, 9 / 102
    half = stats.norm.isf(0.025) * math.sqrt((up + down - (up - down) ** 2) / 102)
    assert found.gain.value == pytest.approx(0.12)
    assert (found.gain.low, found.gain.high) == pytest.approx((up - down - half, up - down + half))
    assert found.p_value == pytest.approx(2 * sum(stats.binom.pmf(k, 28, 0.5) for k in range(9)))
    assert found.verdict == "better"
    assert paired_gap(joined, other).verdict == "worse"
    same = paired_gap(other, other)
    assert (same.verdict, same.p_value, same.gain.value) == ("unclear", 1.0, 0.0)


def test_pairing_sees_what_separate_intervals_cannot():
    wrong = np.arange(1000) < 200
    mended = wrong & (np.arange(1000) >= 20)
    a, b = (
        evaluate(Answers(answers.astype(int)), np.zeros((1000, 1)), np.zeros(1000, int))
        for answers in (wrong, mended)
    )
    assert a["error"].low < b["error"].value  # the intervals overlap
    assert paired_gap(a, b).verdict == "better"


@pytest.mark.statistical
def test_the_paired_interval_covers():
    # Nominal 95 %; over 2000 drawn tables of 80 records fewer than 1850 covered has probability
    # below 1e-6.
    rng, covered = np.random.default_rng(1), 0
    for _ in range(2000):
        kind = rng.choice(
            4, size=80, p=[0.1, 0.15, 0.07, 0.68]
        )  # both wrong, only other, only joined, none
        gain = paired_gap((kind == 0) | (kind == 1), (kind == 0) | (kind == 2)).gain
        covered += gain.low <= 0.08 <= gain.high
    assert covered >= 1850


def test_losses_of_different_records_or_kinds_are_not_compared():
    with pytest.raises(SchemaMismatch, match="same test records"):
        paired_gap(np.zeros(3, bool), np.zeros(4, bool))
    with pytest.raises(SchemaMismatch, match="same test records"):
        paired_gap(np.zeros(3, bool), np.zeros(3))


def test_mean_losses_are_compared_by_their_mean_difference():
    squares = np.random.default_rng(0).exponential(size=500)
    found = paired_gap(squares + 1, squares)
    assert found.gain.value == pytest.approx(1)
    assert found.verdict == "better"


def test_regressors_are_compared_in_root_mean_squared_error():
    X, y = make_regression(800, 5, noise=60.0, random_state=0)
    models = [one.fit(X[:40], y[:40]) for one in (LinearRegression(), Ridge(20.0))]
    first, second = (evaluate(model, X[400:], y[400:]) for model in models)
    found = paired_gap(second, first)
    assert (found.other, found.joined) == pytest.approx((second.main.value, first.main.value))
    assert found.gain.value == pytest.approx(second.main.value - first.main.value)
    rng = np.random.default_rng(0)
    rows = rng.integers(400, size=(2000, 400))
    drawn = [
        math.sqrt(second.losses[one].mean()) - math.sqrt(first.losses[one].mean()) for one in rows
    ]
    width = found.gain.high - found.gain.low
    assert width == pytest.approx(2 * 1.96 * np.std(drawn), rel=0.1)


def test_aucs_are_compared_by_delongs_variance_of_their_difference():
    rng = np.random.default_rng(5)
    y = (np.arange(90) < 30).astype(int)
    scores = [np.round(y + rng.normal(size=90), 1), np.round(0.3 * y + rng.normal(size=90), 1)]
    kernels = [
        np.array([[(a > b) + 0.5 * (a == b) for b in s[y == 0]] for a in s[y == 1]]) for s in scores
    ]  # slow and obvious
    difference = kernels[0] - kernels[1]
    variance = difference.mean(axis=1).var(ddof=1) / 30 + difference.mean(axis=0).var(ddof=1) / 60
    first, second = (evaluate(Scores(s), np.zeros((90, 1)), y) for s in scores)
    found = paired_gap(second, first, metric=AUC)
    assert (found.other, found.joined) == pytest.approx((kernels[1].mean(), kernels[0].mean()))
    half = stats.norm.isf(0.025) * math.sqrt(variance)
    # The variance over all records counts their number less one once instead of once per class.
    assert found.gain.value == pytest.approx(difference.mean())
    assert found.gain.high - found.gain.low == pytest.approx(2 * half, rel=0.03)
    assert found.verdict == "better"
    assert paired_gap(first, second, metric=AUC).verdict == "worse"


def test_words_follow_the_direction_of_the_metric():
    better, worse = (
        Gap(0.6, 0.7, Measure(0.1, 0.05, 0.15)),
        Gap(0.8, 0.7, Measure(-0.1, -0.2, -0.05)),
    )
    found = Joining({"alone": better, "public": worse}, "auc")
    assert found.comparison == (
        "higher than alone (0.6, gain +0.050 to +0.150); "
        "LOWER than public (0.8, gain -0.200 to -0.050)"
    )
    repeats = np.array([0.7, 0.71, 0.72])
    assert repeated_gap(repeats - 0.1, repeats, metric=AUC).gain.value == pytest.approx(0.1)
    assert repeated_gap(repeats - 0.1, repeats).gain.value == pytest.approx(-0.1)


def test_errors_that_the_most_frequent_class_explains_are_called_so():
    wrong = np.arange(1000) < 110
    same = Joining({MAJORITY: paired_gap(wrong, wrong)})
    assert "always the most frequent class (11.0%)" in same.caution(has_auc=True)
    assert same.caution(has_auc=True).endswith("; the AUC can.")
    assert "AUC" not in same.caution(has_auc=False)  # of one class there is none
    fewer = Joining({MAJORITY: paired_gap(wrong, wrong & (np.arange(1000) < 50))})
    more = Joining({MAJORITY: paired_gap(wrong, np.arange(1000) < 200)})  # errors tell very well
    for told in (fewer, more, Joining(same.gaps, "auc"), Joining({})):
        assert not told.caution(has_auc=True)


def test_a_repeated_gap_is_students_with_the_correction_for_overlap():
    rng = np.random.default_rng(0)
    joined = rng.normal(size=8)
    other = joined + rng.normal(0.5, 0.1, size=8)
    gaps = other - joined
    found = repeated_gap(other, joined, overlap=0.25)
    half = stats.t.isf(0.025, 7) * gaps.std(ddof=1) * math.sqrt(1 / 8 + 0.25)
    assert found.gain == Measure(
        pytest.approx(gaps.mean()),
        pytest.approx(gaps.mean() - half),
        pytest.approx(gaps.mean() + half),
    )
    plain = repeated_gap(other, joined).gain
    low, high = stats.t.interval(0.95, 7, gaps.mean(), stats.sem(gaps))
    assert (plain.low, plain.high) == pytest.approx((low, high))
    assert repeated_gap(other[:1], joined[:1]).verdict == "unclear"  # nothing is known from one


def test_joining_helps_only_if_it_is_clearly_better_than_every_alternative():
    better, unclear, worse = Measure(1, 0.1, 2), Measure(1, -0.1, 2), Measure(-1, -2, -0.1)

    def helps(*gains):
        return Joining({f"way {i}": Gap(1.0, 0.0, gain) for i, gain in enumerate(gains)}).helps

    assert helps(better, better) is True
    assert helps(better, unclear) is None
    assert helps(better, unclear, worse) is False
    assert helps() is None


def test_the_sentence_names_every_alternative_with_its_loss_and_the_gain():
    n = 2000
    rates = {"alone": 0.30, "joined": 0.20, "exact": 0.25, "public": 0.10, "close": 0.201}
    wrong = {name: np.arange(n) < rate * n for name, rate in rates.items()}

    def join(*names):
        return Joining({name: paired_gap(wrong[name], wrong["joined"]) for name in names})

    good = join("alone", "exact")
    assert (good.helps, good.answer) == (True, "helps")
    assert good.comparison.startswith(
        "lower than alone (30.0%, gain +8.7 to +11.3 percentage points)"
    )
    assert "; lower than exact (25.0%, gain +4." in good.comparison
    beaten = join("alone", "public")
    assert (beaten.helps, beaten.answer) == (False, "does not help")
    assert "HIGHER than public (10.0%, gain -11.3 to -8.7 " in beaten.comparison
    unclear = join("close")
    assert (unclear.helps, unclear.answer) == (None, "does not clearly help")
    assert unclear.comparison.startswith("not clearly different from close (20.1%, gain -")


def test_a_loss_that_is_no_share_is_not_shown_in_percent():
    found = Joining({"alone": Gap(0.51234, 0.4, Measure(0.11, -math.inf, math.inf))}, "rmse")
    assert found.comparison == (
        "not clearly different from alone (0.5123, no interval from one repeat)"
    )
    found = Joining({"alone": Gap(0.51234, 0.4, Measure(0.11, 0.0612, 0.16))}, "rmse")
    assert found.comparison == "lower than alone (0.5123, gain +0.061 to +0.160)"
