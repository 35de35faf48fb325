import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification

from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.votes import WeightedVote
from consilience.evaluation.baselines import (
    BEST_ROW,
    MEDIAN_ROW,
    PUBLIC_ROW,
    assess,
    compare_rows,
    public_only,
)
from consilience.evaluation.compare import MAJORITY, paired_gap
from consilience.evaluation.measures import measures
from consilience.learners.linear import PrivateLogisticRegression, PrivateRidge
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.tables.public import Public


def table(n=90, seed=0):
    X, y = make_classification(n, 6, flip_y=0.1, random_state=seed)
    return X / np.linalg.norm(X, axis=1).max(), y


def logistic(**settings):
    return PrivateLogisticRegression(
        epsilon=math.inf, regularization=10.0, classes=[0, 1], **settings
    )


def test_public_records_alone_are_what_a_blend_makes_of_them_without_sites():
    X, y = table(900)
    (X, X_test), (y, y_test) = np.split(X, [90]), np.split(y, [90])
    found = public_only(logistic(), Public(X, y))
    blend = PublicBlend()
    useless = logistic(data_norm=1.0).fit(X, y)
    useless.coef_, useless.intercept_ = 0 * useless.coef_, 0 * useless.intercept_ + 1e-9
    # An average that says nothing, shrunk to nothing, leaves the fits to public records alone.
    joined = blend.combine([useless], Public(X, y))
    assert np.corrcoef(found.decision_function(X), joined.decision_function(X))[0, 1] > 0.999
    # Near the best of many ridges, which nobody knows beforehand, and far from the worst.
    grid = [logistic().set_params(regularization=10.0**k).fit(X, y) for k in range(-6, 1)]
    own, *others = (measures(one, X_test, y_test)["log_loss"] for one in (found, *grid))
    assert own <= min(others) + 0.25 * (max(others) - min(others))


def test_few_and_uneven_public_records_give_a_model_too():
    X, y = table()
    one = (np.arange(len(y)) == 0).astype(int)
    assert np.mean(public_only(logistic(), Public(X, one)).predict(X) == one) > 0.95
    same = public_only(logistic(), Public(X, np.zeros(len(y), int)))
    assert set(same.predict(X)) == {0}
    assert public_only(logistic(), Public(X[:3], np.array([0, 1, 1]))).predict(X).shape == y.shape
    three = public_only(logistic().set_params(classes=[0, 1, 2]), Public(X, y))
    assert three.predict_proba(X).shape == (len(y), 3)


def test_learners_of_persons_regressors_and_trees_have_a_public_baseline_too():
    X, y = table()
    person = logistic(unit="person", records_per_person=3)
    assert np.array_equal(
        public_only(person, Public(X, y)).coef, public_only(logistic(), Public(X, y)).coef
    )
    ridge = PrivateRidge(epsilon=math.inf, regularization=1e-3, label_bound=1.0)
    found = public_only(ridge, Public(X, X[:, 0]))
    assert found.predict(X) == pytest.approx(X[:, 0], abs=0.01)
    bounds = [(-1, 1)] * X.shape[1]
    forest = PrivateForestClassifier(
        epsilon=math.inf, bounds=bounds, classes=[0, 1], public_size=90, random_state=0
    )
    assert public_only(forest, Public(X, y)).predict(X).shape == y.shape


def row(method, kind, error, gain=None):
    found = {"method": method, "kind": kind, "error": {"value": error, "low": 0.0, "high": 1.0}}
    return (
        found
        if gain is None
        else {**found, "gain": dict(zip(("value", "low", "high"), gain, strict=True))}
    )


def test_the_verdict_of_a_release_is_read_from_the_gains_of_its_rows():
    release = row("Average (size)", "study", 0.2)
    public = row(PUBLIC_ROW, "baseline", 0.3, (0.1, 0.05, 0.15))
    median = row(MEDIAN_ROW, "baseline", 0.25, (0.05, 0.01, 0.09))
    best = row(BEST_ROW, "baseline", 0.1, (-0.1, -0.15, -0.05))
    other = row("PublicBlend", "other", 0.1, (-0.1, -0.15, -0.05))
    found = compare_rows([release, public, median, best, other])
    assert found.helps  # neither the best in hindsight nor other ways to join are alternatives
    assert found.comparison == (
        f"lower than {PUBLIC_ROW} (30.0%, gain +5.0 to +15.0 percentage points); "
        f"lower than {MEDIAN_ROW} (25.0%, gain +1.0 to +9.0 percentage points)"
    )
    worse = row(PUBLIC_ROW, "baseline", 0.1, (-0.1, -0.15, -0.05))
    assert compare_rows([release, worse, median]).helps is False


@pytest.mark.parametrize("rows", [[], ["study"], ["baseline"], ["study", "baseline"]])
def test_releases_that_were_not_compared_record_by_record_have_no_verdict(rows):
    assert compare_rows([row("any", kind, 0.2) for kind in rows]) is None


class Study:
    """What `assess` asks of a study."""

    schema, epsilon_range, trusted = SimpleNamespace(classes=[0, 1]), (1.0, 2.0), False
    draws_noise = False

    def build(self, epsilon):
        return logistic().set_params(epsilon=epsilon)

    def build_aggregator(self):
        return Average("size", classes=[0, 1])


def test_every_row_but_the_release_has_its_gain_on_the_same_test_records():
    X, y = table(900)
    members = [logistic().fit(X[i:300:3], y[i:300:3]) for i in range(3)]
    ensemble, test = Average("size").combine(members), Public(X[400:], y[400:])
    given = {"members": members, "public": Public(X[300:400], y[300:400])}
    rows = assess(ensemble, study=Study(), test=test, **given)
    kinds = {found["method"]: found["kind"] for found in rows}
    assert kinds == {
        "Average (size)": "study",
        MAJORITY: "baseline",
        PUBLIC_ROW: "baseline",
        MEDIAN_ROW: "baseline",
        BEST_ROW: "baseline",
        **dict.fromkeys(
            (
                "Average (equal)",
                "Average (precision)",
                "PublicBlend",
                "FeatureMethod",
                "SiteBoosting",
            ),
            "other",
        ),
    }
    assert "gain" not in rows[0]
    best = min(members, key=lambda member: np.mean(member.predict(test.X) != test.y))
    gap = paired_gap(best.predict(test.X) != test.y, ensemble.predict(test.X) != test.y)
    assert next(found for found in rows if found["method"] == BEST_ROW)["gain"] == asdict(gap.gain)
    assert compare_rows(rows) is not None
    by_rank = compare_rows(rows, "auc")
    assert set(by_rank.gaps) == {MAJORITY, PUBLIC_ROW, MEDIAN_ROW}
    majority = by_rank.gaps[MAJORITY]
    assert (majority.other, majority.verdict) == (0.5, "better")
    assert majority.joined == rows[0]["auc"]["value"]
    assert {"auc", "log_loss", "calibration"} <= set(rows[0])
    share = np.mean(test.y)
    constant = next(found for found in rows if found["method"] == MAJORITY)
    assert constant["error"]["value"] == pytest.approx(min(share, 1 - share))
    assert assess(ensemble, study=Study(), test=None, **given) == []


@pytest.mark.parametrize("setting", ["trusted", "draws_noise"])
def test_members_that_are_not_private_by_themselves_are_not_measured(setting):
    X, y = table(600)
    members = [logistic().fit(X[i:300:3], y[i:300:3]) for i in range(3)]
    study, test = Study(), Public(X[400:], y[400:])
    setattr(study, setting, True)
    rows = assess(
        Average("size").combine(members),
        study=study,
        members=members,
        public=Public(X[300:400], y[300:400]),
        test=test,
    )
    assert [found["method"] for found in rows] == ["Average (size)", MAJORITY, PUBLIC_ROW]


def test_trees_are_compared_with_what_combines_trees():
    X, y = table(600)
    forest = PrivateForestClassifier(
        epsilon=2.0, bounds=[(-1, 1)] * 6, classes=[0, 1], public_size=100, n_trees=3, max_depth=2
    )
    members = [clone(forest).fit(X[i:300:3], y[i:300:3]) for i in range(3)]
    study = Study()
    study.build = lambda epsilon: clone(forest)
    study.build_aggregator = lambda: WeightedVote("size")
    rows = assess(
        WeightedVote("size").combine(members),
        study=study,
        members=members,
        public=Public(X[300:400], y[300:400]),
        test=Public(X[400:], y[400:]),
    )
    others = [found["method"] for found in rows if found["kind"] == "other"]
    assert others == ["WeightedVote (equal)", "WeightedVote (size-epsilon)"]
