"""Adapting a release: never much worse than the better of own model and release, whatever comes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.linear_model import Ridge as PlainRidge

from consilience import Average, Noise, PrivateLogisticRegression, adapt
from consilience.aggregators.members import LinearEnsemble
from consilience.aggregators.mixture import Ridge, folds
from consilience.errors import SchemaMismatch, SettingsError
from consilience.evaluation.adaptation import ADAPTED, OWN, RELEASE, _scale
from consilience.evaluation.measures import AUC, auc_parts
from consilience.learners.erm import Logistic
from consilience.statistics.moments import Moments
from consilience.statistics.total import Total
from consilience.tables.groups import identify
from studies import study, table

rng = np.random.default_rng(7)
TRUTH = rng.normal(size=12)


def records(n, seed, truth=TRUTH, constant=0.0):
    random = np.random.default_rng(seed)
    X = random.uniform(-1, 1, (n, len(truth))) / math.sqrt(len(truth))
    chance = 1 / (1 + np.exp(-4 * (X @ truth) - constant))
    return X, (random.uniform(size=n) < chance).astype(int)


def linear(coef, intercept=0.0, classes=(0, 1)):
    coef = np.atleast_2d(coef)
    offset = np.broadcast_to(intercept, len(coef)).astype(float)
    labels = None if classes is None else np.asarray(classes)
    return LinearEnsemble(labels, coef, offset, np.ones(1), None, ())


def auc(model, X, y):
    return float(auc_parts(model.decision_function(X), y).mean())


FRESH = records(4000, seed=1)


def test_a_good_release_is_followed_and_beats_a_small_sites_own_model():
    gains = []
    for seed in range(2, 8):
        model = adapt(linear(4 * TRUTH), records(60, seed), compare=False)
        gains.append(auc(model, *FRESH) - auc(model.own_, *FRESH))
    assert np.mean(gains) > 0.03
    assert min(gains) >= 0


def test_a_release_that_is_noise_leaves_the_own_model_as_it_is():
    changed = []
    for seed in range(2, 10):
        noise = np.random.default_rng(100 + seed).normal(size=len(TRUTH))
        model = adapt(linear(3 * noise), records(200, seed), compare=False)
        changed.append(auc(model, *FRESH) - auc(model.own_, *FRESH))
    assert min(changed) > -0.005
    assert np.count_nonzero(changed) <= 2


def test_a_release_of_the_opposite_is_not_followed():
    model = adapt(linear(-4 * TRUTH), records(100, seed=3), compare=False)
    assert model.share_ == 0
    assert np.array_equal(model.coef_, model.own_.coef_)


def test_a_release_of_other_records_is_moved_to_those_of_the_site():
    there = TRUTH + 0.7 * np.random.default_rng(0).normal(size=len(TRUTH))
    release = linear(4 * there)
    models = [adapt(release, records(300, seed), compare=False) for seed in range(30, 36)]
    assert min(auc(model, *FRESH) for model in models) > auc(release, *FRESH) + 0.01
    assert np.mean([auc(model, *FRESH) - auc(model.own_, *FRESH) for model in models]) > 0


def test_the_constant_is_refitted_where_the_sites_share_of_a_class_differs():
    X, y = records(300, seed=5, constant=-2.5)
    model = adapt(linear(4 * TRUTH, 1.0), (X, y))
    errors = {name: found["error"].value for name, found in model.comparison_.evaluations.items()}
    assert errors[ADAPTED] < errors[RELEASE] - 0.1


def test_the_scaled_release_is_the_likeliest_by_its_scale_and_constant():
    """The oracle fits both numbers by a general optimiser; the evidence only shrinks the scale."""
    X, y = records(2000, seed=6, constant=-1.0)
    rows = np.hstack([X, np.ones((len(X), 1))]) * math.sqrt(0.5)
    ridge = Ridge(rows, np.where(y > 0, 1.0, -1.0), Logistic())
    theta = _scale(ridge, np.append(TRUTH, 0.0))

    def loss(p):
        z = p[0] * (rows[:, :-1] @ TRUTH) + p[1]
        return np.logaddexp(0, -ridge.y * z).sum()

    best = optimize.minimize(loss, [1.0, 0.0]).x
    assert theta[0] / TRUTH[0] == pytest.approx(best[0], rel=0.03)
    assert np.ptp(theta[:-1] / TRUTH) == pytest.approx(0, abs=1e-9)
    assert theta[-1] * math.sqrt(0.5) == pytest.approx(best[1], abs=0.05)


def test_numbers_are_adapted():
    X, _ = records(240, seed=8)
    y = X @ TRUTH + 0.3 * np.random.default_rng(8).normal(size=len(X))
    release = linear(TRUTH, classes=None)
    small = adapt(release, (X[:25], y[:25]), compare=False)
    fresh = X[100:] @ TRUTH
    rmse = [np.sqrt(np.mean((m.predict(X[100:]) - fresh) ** 2)) for m in (small, small.own_)]
    assert rmse[0] < 0.8 * rmse[1]
    assert small.classes_ is None
    with pytest.raises(SettingsError, match="no class probabilities"):
        small.predict_proba(X)
    shown = adapt(PlainRidge().fit(X[100:], y[100:]), (X[:100], y[:100])).comparison_
    assert shown.metric.name == "rmse"
    assert "RMSE" in shown.sentence


def test_many_classes_are_adapted_with_labels_of_any_kind():
    random = np.random.default_rng(9)
    W = 6 * random.normal(size=(4, 12))
    X, _ = records(3000, seed=9)
    y = np.array(list("abcd"))[np.argmax(X @ W.T + random.gumbel(size=(3000, 4)), axis=1)]
    release = LogisticRegression(C=100).fit(X[1000:], y[1000:])
    model = adapt(release, (X[:80], y[:80]))
    assert list(model.classes_) == list("abcd")
    assert model.coef_.shape == (4, 12)
    assert model.predict_proba(X[:5]).sum(axis=1) == pytest.approx(np.ones(5))
    assert set(model.comparison_.evaluations) == {OWN, RELEASE, ADAPTED}
    right = [np.mean(m.predict(X[80:1000]) == y[80:1000]) for m in (model, model.own_)]
    assert right[0] > right[1]


def test_a_release_that_is_not_linear_enters_by_its_log_odds():
    random = np.random.default_rng(11)
    X = random.uniform(-1, 1, (4000, 2))
    y = ((X[:, 0] * X[:, 1] > 0) ^ (random.uniform(size=4000) < 0.1)).astype(int)
    forest = RandomForestClassifier(60, max_depth=6, random_state=0).fit(X[2000:], y[2000:])
    model = adapt(forest, (X[:150], y[:150]), compare=False)
    assert auc(model.own_, X[150:2000], y[150:2000]) < 0.6  # no line separates these classes
    assert auc(model, X[150:2000], y[150:2000]) > 0.85
    assert not hasattr(model, "coef_")
    assert model.n_features_in_ == 2
    votes = type("Votes", (), {"predict": forest.predict, "classes_": forest.classes_})()
    assert auc(adapt(votes, (X[:150], y[:150]), compare=False), X[150:], y[150:]) > 0.75


# --------------------------------------------------------------------------------- unusual sites


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_tiny_sites_get_a_model(n):
    X, y = records(n, seed=12)
    y[0], y[-1] = 0, 1
    model = adapt(linear(4 * TRUTH), (X, y))
    assert np.isfinite(model.coef_).all()
    assert (model.comparison_ is None) == (n == 1)
    assert model.says[0]


def test_one_record_leaves_the_release_with_another_constant():
    model = adapt(linear(4 * TRUTH), records(1, seed=13))
    assert model.share_ == 1
    assert "too few records" in model.says[0]


def test_a_site_with_one_class_keeps_the_order_of_the_release():
    X, y = records(400, seed=14)
    model = adapt(linear(4 * TRUTH), (X[y == 1][:40], y[y == 1][:40]))
    assert model.share_ == 1
    assert auc(model, *FRESH) > 0.7
    assert model.comparison_.metric.name == "error"
    assert "AUC" not in model.says[0]


def test_a_class_that_only_the_release_knows_stays_possible():
    random = np.random.default_rng(15)
    X, _ = records(600, seed=15)
    y = np.argmax(X @ random.normal(size=(3, 12)).T + 0.1 * random.gumbel(size=(600, 3)), axis=1)
    release = LogisticRegression(C=100).fit(X, y)
    here = np.flatnonzero(y < 2)[:60]
    model = adapt(release, (X[here], y[here]))
    assert model.predict_proba(X).shape == (600, 3)


def test_the_records_of_a_person_are_held_out_together():
    persons = np.repeat(np.arange(17), 5)
    tests = folds(np.zeros(85), 0, persons=persons, times=2)
    assert len(tests) == 10
    for test in tests:
        assert not set(persons[test]) & set(persons[~test])
        assert test.any()
    assert np.sum(tests[:5], axis=0).tolist() == [1] * 85


def test_copies_of_a_person_do_not_make_the_site_surer():
    """Ten copies of 30 records: as records they are 300, as persons they are 30."""
    X, y = records(30, seed=16)
    X, y, persons = np.repeat(X, 10, axis=0), np.repeat(y, 10), np.repeat(np.arange(30), 10)
    known = adapt(linear(4 * TRUTH), (X, y), persons=persons).comparison_
    unknown = adapt(linear(4 * TRUTH), (X, y)).comparison_
    assert known.standard_error(RELEASE, AUC) > 2.5 * unknown.standard_error(RELEASE, AUC)
    # Copies in the other folds give the answer away.
    assert known.evaluations[OWN]["error"].value > unknown.evaluations[OWN]["error"].value


def test_persons_are_read_from_the_table_of_a_schema_that_names_them():
    found = study()
    schema = replace(found.schema, person="who", max_records_per_person=4)
    rows = table(120)
    whose = rows.append_column("who", [[f"p{i // 4}" for i in range(120)]])
    release = linear(np.ones(found.schema.n_features))
    shown = adapt(release, whose, schema=schema).comparison_
    assert shown.persons.tolist() == identify([f"p{i // 4}" for i in range(120)]).tolist()
    assert len(set(shown.persons.tolist())) == 30


# ------------------------------------------------------------------------------- the comparison


def test_own_and_adapted_numbers_are_of_records_that_no_choice_has_seen():
    """Labels at random: on records that were seen, a model of 60 columns would look good."""
    random = np.random.default_rng(17)
    aucs = []
    for _ in range(6):
        X, y = random.uniform(-1, 1, (60, 60)), random.integers(0, 2, 60)
        found = adapt(linear(random.normal(size=60)), (X, y)).comparison_.evaluations
        aucs.append([found[name]["auc"].value for name in (OWN, ADAPTED)])
    assert np.mean(aucs) < 0.56


def test_the_sentence_says_whether_joining_pays():
    pays = adapt(linear(4 * TRUTH), records(150, seed=18))
    assert pays.says[0].startswith("Joining pays for this site: the AUC of the adapted model, 0.")
    assert "higher than this site's own exact model (0." in pays.says[0]
    kept = adapt(linear(-TRUTH), records(150, seed=18))
    assert kept.says[0].startswith("It is not clear whether joining pays for this site")
    assert "the adapted model is the site's own" in kept.says[0]
    assert kept.comparison_.gap().gain.value == 0


def test_it_says_that_it_must_stay_and_shows_no_coefficient():
    model = adapt(linear(4 * TRUTH), records(80, seed=19))
    assert "must not leave the site" in model.says[1]
    assert repr(model) == f"Adapted(share_={model.share_:.2f})"
    shown = model._repr_html_()
    assert "must not leave the site" in shown
    assert "own exact model" in shown
    assert f"{model.coef_[0, 0]:.4f}" not in shown


def test_the_same_records_give_the_same_model():
    first, second = (adapt(linear(TRUTH), records(90, seed=20), compare=False) for _ in range(2))
    assert np.array_equal(first.coef_, second.coef_)


# ------------------------------------------------------------------------------------- the rest


def test_a_table_is_encoded_by_the_schema_of_the_study():
    found = study()
    release = PrivateLogisticRegression(epsilon=1.0, noise=Noise(seed=1), classes=[0, 1])
    rows = found.schema.encode(table(500, seed=5))
    release.fit(rows.X, rows.y)
    model = adapt(release, table(200), schema=found.schema, compare=False)
    again = found.schema.encode(table(200))
    by_hand = adapt(release, (again.X, again.y), compare=False)
    assert np.array_equal(model.coef_, by_hand.coef_)
    assert np.array_equal(model.predict(table(200)), by_hand.predict(again.X))


def test_an_average_without_one_site_is_that_of_the_others():
    members = [
        PrivateLogisticRegression(epsilon=1.0, noise=Noise(seed=i), classes=[0, 1]).fit(
            *records(200 + 50 * i, seed=i)
        )
        for i in range(4)
    ]
    average = Average()
    left = average.leave_out(average.combine(members), 1, members[1])
    others = average.combine([members[0], *members[2:]])
    assert left.coef == pytest.approx(others.coef)
    assert left.intercept == pytest.approx(others.intercept)
    assert left.weights == pytest.approx(others.weights)
    assert Average(robust="median").leave_out(average.combine(members), 1, members[1]) is None
    assert average.leave_out(average.combine(members[:1]), 0, members[0]) is None


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        (np.zeros((4, 12)), {}, "pair"),
        ((np.zeros((0, 12)), np.zeros(0)), {}, "none, or not all finite"),
        ((np.full((3, 12), np.nan), np.zeros(3)), {}, "none, or not all finite"),
        ((np.zeros((3, 5)), np.zeros(3)), {}, "12 features, and the records have 5"),
        ((np.zeros((3, 12)), np.zeros(2)), {}, "one label each"),
        ((np.zeros((3, 12)), np.array([0, 1, 7])), {}, "label that the release does not know"),
        ((np.zeros((3, 12)), np.zeros(3)), {"persons": ["a", "b"]}, "one person each"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(given, settings, said):
    with pytest.raises((SchemaMismatch, SettingsError), match=said) as refused:
        adapt(linear(TRUTH), given, **settings)
    assert "Nothing was learned" in str(refused.value)


def test_what_cannot_predict_is_no_release():
    with pytest.raises(SettingsError, match="cannot predict"):
        adapt(object(), records(5, seed=0))


def test_a_release_of_sums_is_adapted_like_any_other():
    found = [
        Moments(epsilon=2.0, delta=1e-6, classes=[0, 1], data_norm=1.0, noise=Noise(seed=i)).fit(
            *records(400, seed=40 + i)
        )
        for i in range(3)
    ]
    made = Total().combine(found)
    model = adapt(made, records(100, seed=50), compare=False)
    assert auc(model, *FRESH) >= auc(model.own_, *FRESH)
