"""Every learner passes scikit-learn's own checks; the few that noise makes meaningless are listed
with the reason.
"""

import math
import warnings
from functools import partial

import pytest
from sklearn.utils.estimator_checks import check_estimator

from bounded import PrivateRidge
from consilience import PrivateLinearSVC, PrivateLogisticRegression
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.forest import PrivateForestClassifier, PrivateTreeClassifier

LEARNERS = [
    PrivateLogisticRegression,
    PrivateLinearSVC,
    PrivateRidge,
    partial(PrivateTreeClassifier, bounds=(-5, 5)),
    partial(PrivateForestClassifier, bounds=(-5, 5), assignment="all"),
    partial(PrivateAdaBoostClassifier, bounds=(-5, 5)),
]
# The suite asks for scores on 30 to 300 records. At these epsilons the lowest of them, forests' on
# three classes, is reached with six standard deviations to spare: trees and rounds share an
# epsilon, a linear fit has its own.
EPSILON, EPSILON_OF_TREES = 5.0, 50.0
DEALT = partial(  # records are dealt out by draws; few trees, so that each has records enough
    PrivateForestClassifier, bounds=(-5, 5), assignment="disjoint", n_trees=3
)
TWO_FITS = "compares two fits of the same data, which differ because each draws its own noise"
MEANINGLESS_UNDER_NOISE = {
    "check_classifier_data_not_an_array": TWO_FITS,
    "check_regressor_data_not_an_array": TWO_FITS,
    "check_supervised_y_2d": TWO_FITS,
    "check_regressors_int": TWO_FITS,
    "check_fit_idempotent": TWO_FITS,
}


def failures(learner: object) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite warns about what it skips
        results = check_estimator(learner, on_fail=None)
    assert len(results) > 40, "the suite did not run"
    return {result["check_name"] for result in results if result["status"] == "failed"}


@pytest.mark.parametrize("learner", LEARNERS)
def test_exact_training_passes_every_check(learner):
    assert failures(learner(epsilon=math.inf)) == set()


@pytest.mark.parametrize("learner", [*LEARNERS, DEALT])
def test_private_training_fails_only_checks_that_compare_two_fits(learner):
    epsilon = EPSILON_OF_TREES if isinstance(learner, partial) else EPSILON
    failed = set().union(*(failures(learner(epsilon=epsilon)) for _ in range(3)))
    assert failed <= set(MEANINGLESS_UNDER_NOISE)
    assert len(failed) <= 4


class Unexcused(PrivateRidge):
    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = False
        return tags


def test_ridge_also_passes_the_score_check_it_is_excused_from_once_its_bounds_are_declared():
    # At the defaults (norm 1, labels within 1) scikit-learn's data are clipped, hence the tag
    # `poor_score`.
    declared = {"data_norm": 10.0, "label_bound": 5.0, "regularization": 1e-4}
    assert failures(Unexcused(epsilon=math.inf, **declared)) == set()
    assert failures(Unexcused(epsilon=math.inf)) == {"check_regressors_train"}
