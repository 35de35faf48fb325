"""Score: what a public model achieves on records that stay where they are."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from consilience import Categorical, Noise, Numeric, PrivateLogisticRegression, Schema
from consilience.aggregators.average import Average
from consilience.aggregators.votes import WeightedVote
from consilience.errors import ContributionRejected, SchemaMismatch, SettingsError
from consilience.evaluation.own_records import describe_scores
from consilience.statistics.score import Score, ScoredModel, model_of, subgroups_of
from consilience.statistics.total import Total
from sums import DELTA

ROW = [[2.0, -1.0, 0.5, 0.3]]


def people(n, seed):
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(n, 3))
    X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    scores = X @ ROW[0][:3] + ROW[0][3]
    return X, (draw.random(n) < 1 / (1 + np.exp(-2 * scores))).astype(int), scores


def score(epsilon=math.inf, seed=0, n=2000, **more):
    delta = 0.0 if math.isinf(epsilon) else DELTA
    noise = Noise(seed=seed)
    settings = {"classes": [0, 1], "model": ROW, "noise": noise, **more}
    return Score(epsilon=epsilon, delta=delta, **settings).fit(*people(n, seed)[:2])


def test_exact_counts_give_the_measures_of_the_pooled_records():
    joined = Total().combine([score(seed=i, bins=1000) for i in range(3)])
    parts = [people(2000, i) for i in range(3)]
    y, scores = (np.concatenate([part[k] for part in parts]) for k in (1, 2))
    assert joined.accuracy.value == pytest.approx(np.mean((scores >= 0) == y), abs=0.002)
    assert joined.auc.value == pytest.approx(roc_auc_score(y, scores), abs=0.002)
    low, high = joined.auc.interval()
    assert 0.005 < high - low < 0.05


@pytest.mark.statistical
def test_intervals_cover_the_truth_as_often_as_they_say():
    """95 % intervals of 60 totals; fewer than 48 hits have a chance below 1e-5."""
    _, y, scores = people(200_000, 777)
    truth, right = roc_auc_score(y, scores), np.mean((scores >= 0) == y)
    hits = np.zeros(2)
    for i in range(60):
        members = [score(1.0, seed=1000 + 4 * i + k, n=400) for k in range(4)]
        joined = Total().combine(members)
        for k, (found, true) in enumerate(((joined.auc, truth), (joined.accuracy, right))):
            low, high = found.interval()
            hits[k] += low <= true <= high
    assert hits.min() >= 48


def test_probabilities_are_recalibrated_and_rise():
    """The model's log-odds are half of the true ones."""
    joined = Total().combine([score(seed=i) for i in range(3)])
    assert (np.diff(joined.calibrated) >= -1e-12).all()
    X, y, _ = people(5000, 99)
    found = joined.predict_proba(X)[:, 1]
    sure = found > 0.85
    assert sure.sum() > 100
    assert y[sure].mean() == pytest.approx(found[sure].mean(), abs=0.04)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bins": 7}, "bins"),
        ({"bins": 2.0}, "bins"),
        ({"model": [[1.0, 2.0]]}, "model"),
        ({"model": None}, "model"),
        ({"model": [[0.0] * 4] * 2}, "model"),
        ({"subgroups": []}, "subgroups"),
        ({"subgroups": [[3, 0.0]]}, "subgroups"),
        ({"subgroups": "sex"}, "subgroups"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, word):
    with pytest.raises(SettingsError, match=word):
        score(n=50, **changes)


def test_a_scored_model_comes_back_and_a_forged_one_does_not():
    made = Total().combine([score(1.0, n=300)])
    facts, tensors = made.to_parts(None)
    facts["classes"] = [0, 1]
    again = ScoredModel.from_parts(facts, tensors, made.guarantee, made.weights, None)
    X = people(30, 1)[0]
    assert np.array_equal(again.predict_proba(X), made.predict_proba(X))
    assert again.auc == made.auc
    for name, value in (
        ("counts", tensors["counts"][:-1]),
        ("variance", -np.ones(1)),
        ("model", tensors["model"][:, :-1]),
    ):
        with pytest.raises(ContributionRejected):
            ScoredModel.from_parts(facts, {**tensors, name: value}, None, made.weights, None)
    with pytest.raises(SchemaMismatch):
        made.predict(X[:, :2])


MODEL = [[2.0, -1.0, 0.5, 0.3], [-1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 2.0, -0.3]]


def three_classes(n, seed):
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(n, 3))
    X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    scores = X @ np.array(MODEL)[:, :3].T + np.array(MODEL)[:, 3]
    y = (2 * scores + draw.gumbel(size=scores.shape)).argmax(axis=1)
    return X, y, scores


def three(seed, epsilon=math.inf, n=2000, **more):
    delta = 0.0 if math.isinf(epsilon) else DELTA
    settings = {"classes": [0, 1, 2], "model": MODEL, "noise": Noise(seed=seed), **more}
    return Score(epsilon=epsilon, delta=delta, **settings).fit(*three_classes(n, seed)[:2])


def test_three_classes_have_the_measures_of_the_pooled_records():
    joined = Total().combine([three(seed, bins=1000) for seed in range(3)])
    parts = [three_classes(2000, seed) for seed in range(3)]
    y, scores = (np.concatenate([part[k] for part in parts]) for k in (1, 2))
    assert joined.accuracy.value == pytest.approx(np.mean(scores.argmax(axis=1) == y), abs=0.002)
    others = [np.delete(scores, k, axis=1).max(axis=1) for k in range(3)]
    aucs = [roc_auc_score(y == k, scores[:, k] - others[k]) for k in range(3)]
    assert joined.auc.value == pytest.approx(np.mean(aucs), abs=0.003)
    X, _, fresh = three_classes(500, 9)
    assert (joined.predict(X) == fresh.argmax(axis=1)).all()
    assert joined.predict_proba(X).sum(axis=1) == pytest.approx(np.ones(500))
    for label in range(3):
        told = dict(joined.reliability(label))
        assert len(told) == 1000


def test_subgroups_are_measured_apart_and_together_make_all():
    marks = [[0, 0.0], [0, 0.5]]
    joined = Total().combine([three(seed, subgroups=marks, bins=1000) for seed in range(3)])
    parts = [three_classes(2000, seed) for seed in range(3)]
    X, y, scores = (np.concatenate([part[k] for part in parts]) for k in range(3))
    right = scores.argmax(axis=1) == y
    place = (X[:, 0] >= 0.0).astype(int) + (X[:, 0] >= 0.5)
    for k, group in enumerate(joined.groups):
        assert group.accuracy.value == pytest.approx(right[place == k].mean(), abs=0.003)
    plain = Total().combine([three(seed, bins=1000) for seed in range(3)])
    assert joined.accuracy == plain.accuracy
    assert joined.auc.value == pytest.approx(plain.auc.value)
    assert plain.groups == ()


@pytest.mark.statistical
def test_intervals_of_subgroups_and_of_calibration_cover_the_truth():
    """95 % intervals of 60 totals; fewer than 48 hits have a chance below 1e-5 each."""
    X, y, scores = people(200_000, 777)
    low = X[:, 1] < 0
    truth = roc_auc_score(y[low], scores[low])
    chance = 1 / (1 + np.exp(-scores))
    share = y[(chance >= 0.5) & (chance < 0.6)].mean()
    hits = np.zeros(2)
    for i in range(60):
        members = [
            score(2.0, seed=5000 + 4 * i + k, n=800, bins=10, subgroups=[[1, 0.0]])
            for k in range(4)
        ]
        joined = Total().combine(members)
        found = joined.groups[0].auc, joined.reliability(1)[5][1]
        for k, (one, true) in enumerate(zip(found, (truth, share), strict=True)):
            low_end, high_end = one.interval()
            hits[k] += low_end <= true <= high_end
    assert hits.min() >= 48


def test_the_first_class_is_calibrated_as_the_second_is_not():
    joined = score(n=500)._alone
    second = joined.reliability(1)
    first = joined.reliability(0)
    for (middle, one), (other, two) in zip(second, reversed(first), strict=True):
        assert middle == pytest.approx(1 - other)
        if one.error:  # of a bin with records
            assert one.value == pytest.approx(1 - two.value)


def test_a_page_names_subgroups_by_their_column():
    schema = Schema(
        [Numeric("age", 0, 100, cuts=(40, 65)), Categorical("sex", ("f", "m"))],
        "ill",
        classes=("no", "yes"),
    )
    n = schema.n_features
    table = {
        "age": np.linspace(1, 99, 400),
        "sex": np.resize(["f", "m"], 400),
        "ill": np.where(np.linspace(1, 99, 400) > 60, "yes", "no"),
    }
    model = [[1.0] * n + [0.0]]
    made = Score(
        epsilon=math.inf, schema=schema, model=model, subgroups=subgroups_of(schema, "sex")
    ).fit(table)
    headings = [heading for heading, *_ in describe_scores(Total().combine([made]), schema)]
    assert headings[1:4] == ["sex: none of the categories", "sex: f", "sex: m"]
    assert headings[-1] == "Calibration of yes"
    with pytest.raises(SettingsError, match="no column"):
        subgroups_of(schema, "weight")
    with pytest.raises(SettingsError, match="no scores"):
        describe_scores(object(), schema)


def test_the_model_of_a_release_can_be_scored():
    X, y, _ = people(300, 1)
    member = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1]).fit(X, y)
    average = Average("equal").combine([member])
    rows = model_of(average)
    scored = Score(epsilon=math.inf, classes=[0, 1], model=rows).fit(X, y)
    assert (scored.predict(X) == average.predict(X)).all()
    with pytest.raises(SettingsError, match="no linear classifier"):
        model_of(WeightedVote().combine([member]))


def test_a_release_of_one_table_of_counts_stays_readable():
    made = Total().combine([score(1.0, n=300)])
    facts, tensors = made.to_parts(None)
    facts["classes"] = [0, 1]
    old = {**tensors, "counts": tensors["counts"][0, 0]}
    again = ScoredModel.from_parts(facts, old, made.guarantee, made.weights, None)
    assert again.auc == made.auc
