import math

import numpy as np
import pytest
from scipy import sparse

from consilience.aggregators.average import Average
from consilience.evaluation.baselines import LOCAL, OWN
from consilience.evaluation.measures import measures
from consilience.learners.erm import HuberHinge
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.simulation.cell import SITES_TOGETHER
from consilience.simulation.simulate import _set_up, simulate
from consilience.simulation.together import fit_together, measure_together

RNG = np.random.default_rng(3)
N, M = 900, 70
X = RNG.uniform(-0.7, 0.7, (N, 5))
MARGIN = X @ [3.0, -2.0, 1.0, 0.0, 0.5] + 0.3 * RNG.normal(size=N)
TWO, THREE = (MARGIN > 0).astype(int), np.digitize(MARGIN, [-0.5, 0.5])
SITES = np.split(
    RNG.permutation(N)[:800], np.sort(RNG.choice(np.arange(1, 800), M - 1, replace=False))
)  # of 1 to 60
# A site with one record has exact ties between classes, which rounding must not break elsewhere.
EXACT = {
    "epsilon": math.inf,
    "regularization": 1e-2,
    "intercept_scaling": 1.0,
}

CASES = {
    "logistic": (PrivateLogisticRegression(classes=[0, 1], **EXACT), TWO),
    "turned": (
        PrivateLogisticRegression(classes=[1, 0], fit_intercept=False, data_norm=0.5, **EXACT),
        TWO,
    ),
    "softmax": (PrivateLogisticRegression(classes=[0, 1, 2], **EXACT), THREE),
    "guessed": (
        PrivateLogisticRegression(classes=[0, 1], neighbours="add-remove", public_size=9, **EXACT),
        TWO,
    ),
    "svc": (PrivateLinearSVC(classes=[0, 1], **EXACT), TWO),
    "svc-rest": (PrivateLinearSVC(classes=[0, 1, 2], **EXACT), THREE),
    "ridge": (PrivateRidge(label_bound=2.0, **EXACT), MARGIN),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("table", [np.asarray, sparse.csr_array])
def test_models_trained_together_are_those_trained_one_by_one(name, table):
    learner, y = CASES[name]
    given = table(X)
    together = fit_together(learner, given, y, SITES)
    assert len(together) == M
    for one, rows in zip(together, SITES, strict=True):
        alone = type(learner)(**learner.get_params()).fit(given[rows], y[rows])
        assert np.shape(one.coef_) == np.shape(alone.coef_)
        assert np.shape(one.intercept_) == np.shape(alone.intercept_)
        # Both minimise to a gradient of 1e-8 of the ridge; where sizes are hidden it has to be
        # looser.
        scores = [
            one.decision_function(X) if hasattr(one, "classes_") else one.predict(X)
            for one in (one, alone)
        ]
        assert np.max(np.abs(scores[0] - scores[1])) < (1e-3 if name == "guessed" else 1e-6)
        assert one.public_size_ == alone.public_size_
        assert one.guarantee_ == alone.guarantee_
        assert one.get_params() == alone.get_params()


def test_learners_say_whether_they_can_be_trained_together():
    assert all(learner.can_train_together() for learner, _ in CASES.values())
    # Without declared classes, each site would read its own.
    assert not PrivateLogisticRegression(epsilon=math.inf).can_train_together()
    matrix = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1], mechanism="matrix")
    assert not matrix.can_train_together()
    forest = PrivateForestClassifier(epsilon=math.inf, classes=[0, 1])
    assert not forest.can_train_together()


class Shifted(PrivateLogisticRegression):
    """Trains in its own way."""

    def _train(self, task, plan, source):
        super()._train(task, plan, source)
        self.intercept_ = self.intercept_ + 1


class Sharp(PrivateLinearSVC):
    """Has another loss."""

    def loss(self, n_classes):
        return HuberHinge(0.1)


class Named(PrivateLogisticRegression):
    """Trains as its parent does."""

    shorthand = "named"


def test_a_subclass_with_training_of_its_own_is_not_trained_together():
    settings = {"epsilon": math.inf, "classes": [0, 1]}
    assert Named(**settings).can_train_together()
    assert not Shifted(**settings).can_train_together()
    assert not Sharp(**settings).can_train_together()
    asked = {"sites": SITES_TOGETHER, "repeats": 1, "seed": 0, "baselines": [OWN, LOCAL]}
    learners = {
        "parent": PrivateLogisticRegression(**settings),
        "named": Named(**settings),
        "shifted": Shifted(**settings),
    }
    found = simulate(learners, Average("equal"), X, TWO, **asked)
    parent, named, shifted = (found.values(name, "inf", OWN) for name in learners)
    assert np.array_equal(parent, named)
    cut = _set_up(learners, Average("equal"), X, TWO, **asked)[0].cut(0)
    alone = [Shifted(**settings).fit(X[rows], TWO[rows]) for rows in cut.sites]
    wrong = [np.mean(one.predict(cut.X_test) != cut.y_test) for one in alone]
    assert shifted == pytest.approx(np.mean(wrong))
    assert shifted > parent


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("copies", [1, 5])
def test_models_measured_together_have_the_numbers_of_each(name, copies):
    learner, y = CASES[name]
    models = fit_together(learner, X, y, SITES)
    tested, labels = np.repeat(X[800:], copies, axis=0), np.repeat(y[800:], copies)
    if copies > 1 and name != "ridge":
        labels = RNG.permutation(labels)  # equal rows with different labels
    for given in (tested, sparse.csr_array(tested)):
        for one, found in zip(
            models, measure_together(models, given, labels, n_threads=2), strict=True
        ):
            every = measures(one, tested, labels)
            assert found == pytest.approx({metric: every[metric] for metric in found}, abs=1e-12)
            assert set(every) - set(found) <= {"auc", "log_loss", "calibration"}


def test_a_label_that_no_model_knows_counts_as_wrong():
    learner, y = CASES["logistic"]
    models = fit_together(learner, X, y, SITES)
    labels = np.where(np.arange(N) < 50, 7, y)
    for one, found in zip(models, measure_together(models, X, labels), strict=True):
        every = measures(one, X, labels)
        assert found == pytest.approx({metric: every[metric] for metric in found})
        assert "f1" not in found
