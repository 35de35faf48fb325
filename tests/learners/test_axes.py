"""Models along axes: exact projections, one charge for axes and model, and twins that cheat."""

import numpy as np
import pytest
from scipy import sparse

from consilience import (
    Noise,
    OwnAxes,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    Public,
    PublicAxes,
)
from consilience.auditing.audit import audit
from consilience.errors import SettingsError
from consilience.learners import axes as axes_module
from consilience.learners.axes import Axes, register_projection
from consilience.learners.projection import MomentPlan, PublicPCA
from consilience.privacy.accounting import total

DIGEST = "a" * 64
rng = np.random.default_rng(3)
X = rng.normal(size=(600, 6)) * np.array([0.5, 0.4, 0.05, 0.05, 0.05, 0.05])
Y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
KNOWN = PublicAxes.among(Public(X[:200]), 2, DIGEST)
OWN = OwnAxes(2, 0.25)


def learner(projection, **settings):
    return PrivateLogisticRegression(
        **{"epsilon": 1.0, "classes": [0, 1], "projection": projection, **settings}
    )


def test_a_rows_coordinates_are_exact_and_the_same_in_any_table():
    width, k = 300, 7
    directions = np.linalg.qr(rng.normal(size=(width, k)))[0].T
    known = Axes.of(directions)
    rows = rng.normal(size=(500, width))
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    together = known.project(rows)
    for i in (0, 3, 499):
        assert np.array_equal(known.project(rows[i : i + 1])[0], together[i])
    assert np.array_equal(known.project(rows[::-1])[::-1], together)
    assert np.array_equal(known.project(sparse.csr_array(rows)), together)
    steps = np.trunc(rows[0] * 2.0**30).astype(object)
    exact = [sum(a * b for a, b in zip(steps, axis, strict=True)) for axis in known.steps.tolist()]
    assert [float(one) / 2**50 for one in exact] == together[0].tolist()


def test_no_row_gets_longer_and_a_constant_stays():
    for width, k in ((2, 1), (6, 6), (40, 3)):
        directions = np.linalg.qr(rng.normal(size=(width, k)))[0].T
        known = Axes.of(directions)
        assert np.linalg.norm(known.directions, 2) < 1
        along = directions[0] / np.linalg.norm(directions[0])
        assert np.linalg.norm(known.project(along[None])) <= 1
        rows = np.hstack([along[None] * 0.6, [[0.8]]])
        assert known.project(rows)[0, -1] == 0.8


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("mechanism", ["objective", "output", "auto"])
@pytest.mark.parametrize("projection", [KNOWN, OWN], ids=["public", "own"])
def test_what_is_planned_is_drawn_and_costs_what_was_asked(projection, mechanism, delta):
    fitted = learner(projection, mechanism=mechanism, delta=delta).fit(X, Y)
    assert fitted.coef_.shape == (1, 6)
    assert list(fitted.events_) == list(fitted.planned(len(X)))
    cost = total(fitted.events_)
    assert cost.epsilon == pytest.approx(1.0, rel=1e-9)
    assert cost.epsilon <= 1.0 * (1 + 1e-12)
    assert cost.delta <= delta * (1 + 1e-12)
    found = fitted.implied({"coef": (1, 6), "intercept": (1,)})
    assert found.has_events(fitted.events_)
    assert np.linalg.norm(fitted.coef_) <= found.bounds["coef"].norm
    assert fitted.regularization_ > 0
    model = fitted.model_events()
    assert list(model) == list(fitted.behind_axes().planned(len(X)))


@pytest.mark.parametrize("projection", [KNOWN, OWN], ids=["public", "own"])
def test_without_noise_a_model_along_all_axes_is_the_model(projection):
    every = PublicAxes.of(np.eye(6), DIGEST) if projection is KNOWN else OwnAxes(6, 0.5)
    exact = learner(None, epsilon=np.inf, regularization=1e-2).fit(X, Y)
    along = learner(every, epsilon=np.inf, regularization=1e-2).fit(X, Y)
    assert along.coef_ == pytest.approx(exact.coef_, rel=1e-3, abs=1e-3)
    assert along.intercept_ == pytest.approx(exact.intercept_, abs=1e-3)


class Chunks:
    """The table in chunks."""

    n_features, n_records = 6, len(Y)

    def chunks(self):
        for start in range(0, len(Y), 100):
            yield X[start : start + 100], Y[start : start + 100]


@pytest.mark.parametrize("projection", [KNOWN, OWN], ids=["public", "own"])
def test_tables_in_memory_in_chunks_and_sparse_give_one_model(projection):
    made = learner(projection, noise=Noise(seed=5), delta=1e-6, mechanism="objective")
    whole = made.fit(X, Y).coef_.copy()
    assert made.fit(Chunks()).coef_ == pytest.approx(whole, rel=1e-6, abs=1e-9)
    assert made.fit(sparse.csr_array(X), Y).coef_ == pytest.approx(whole, rel=1e-6, abs=1e-9)


def test_persons_and_hidden_sizes_are_protected_along_axes_too():
    persons = np.arange(len(Y)) // 2
    made = learner(OWN, unit="person", records_per_person=2).fit(X, Y, persons=persons)
    assert made.guarantee_.unit == "person"
    hidden = learner(OWN, neighbours="add-remove", public_size=500).fit(X, Y)
    assert hidden.guarantee_.neighbours == "add-remove"
    for fitted in (made, hidden):
        assert fitted.guarantee_.epsilon == pytest.approx(1.0)
        assert len(fitted.events_) == 4


def test_axes_of_other_columns_are_refused_before_anything_is_charged():
    narrow = PublicAxes.of(np.eye(3)[:2], DIGEST)
    with pytest.raises(SettingsError, match="3 columns"):
        learner(narrow).fit(X, Y)
    with pytest.raises(SettingsError, match="'projection'"):
        learner("public").fit(X, Y)
    with pytest.raises(SettingsError, match="n_components"):
        learner(OwnAxes(7, 0.5)).fit(X, Y)


# --------------------------------------------------------------------------------------- attacks


def test_the_exact_attack_on_axes_and_model_together_stays_within_their_cost():
    for settings in ({}, {"neighbours": "add-remove", "public_size": 100}):
        made = learner(OwnAxes(1, 0.5), mechanism="objective", regularization=0.05, **settings)
        report = audit(made, n_records=40, restarts=6, runs=0)
        assert report.passed
        assert 0.6 < report.epsilon_lower <= 1.0


def test_the_exact_attack_on_a_model_along_public_axes_is_that_on_its_learner():
    made = learner(KNOWN, mechanism="objective", regularization=0.05)
    report = audit(made, n_records=40, restarts=4, runs=0)
    assert report.passed
    assert report.epsilon_lower > 0.5


class UnchargedAxes(OwnAxes):
    """A broken twin: axes of the records, for which nothing is drawn or charged."""

    kind = "uncharged"

    def plan(self, learner):
        return MomentPlan()

    def left(self, epsilon, delta):
        return epsilon, delta

    def find(self, learner, records, plan, source):
        rows = records.X[:, : learner.n_features_in_]
        return Axes.of(PublicPCA(self.n_components).fit(rows).components_)


class HalfCharged(OwnAxes):
    """A broken twin: the learner behind the axes has the whole budget once more."""

    kind = "half"

    def left(self, epsilon, delta):
        return epsilon, delta


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(axes_module, "PROJECTIONS", dict(axes_module.PROJECTIONS))
    for twin in (UnchargedAxes, HalfCharged):
        register_projection(twin)


def test_axes_of_the_records_without_a_charge_are_caught_by_sampling():
    """The false-alarm rate of each sampled audit is 0.1 %; the noise is real."""
    settings = {"mechanism": "output", "regularization": 0.1, "fit_intercept": False}
    honest = audit(learner(OwnAxes(1, 0.5), **settings), kind="sample", n_records=4, runs=400)
    assert honest.passed
    twin = audit(learner(UnchargedAxes(1, 0.5), **settings), kind="sample", n_records=4, runs=400)
    assert not twin.passed


def test_two_budgets_under_one_charge_are_caught_by_the_exact_attack():
    settings = {"mechanism": "objective", "regularization": 0.05}
    report = audit(learner(HalfCharged(1, 0.8), **settings), n_records=40, restarts=6, runs=0)
    assert not report.passed


def test_a_projection_is_registered_once(registered):
    with pytest.raises(SettingsError, match="already registered"):
        register_projection(type("Other", (OwnAxes,), {"kind": "private"}))


def test_a_support_vector_classifier_of_three_classes_trains_along_axes():
    labels = np.digitize(X[:, 0], [-0.3, 0.3])
    made = PrivateLinearSVC(epsilon=5.0, classes=[0, 1, 2], projection=OWN).fit(X, labels)
    assert made.coef_.shape == (3, 6)
    assert total(made.events_).epsilon == pytest.approx(5.0)
