"""The learners that studies, files and commands can name; `register` adds one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from consilience.errors import SettingsError
from consilience.learners.base import PrivateLearner
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.learners.scored import SHARE, scored
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.forest import PrivateForestClassifier, PrivateTreeClassifier

LearnerT = TypeVar("LearnerT", bound=type[PrivateLearner[Any, Any]])

LEARNERS: dict[str, type[PrivateLearner[Any, Any]]] = {}


def register(learner: LearnerT) -> LearnerT:
    """Let files and studies name a learner by its class name; usable as a decorator.

    A file that names a registered learner is rebuilt by it, so `check_state` must refuse every
    array that the learner could not have released.
    """
    name = learner.__name__
    if LEARNERS.get(name, learner) is not learner:
        raise SettingsError(
            f"A learner named {name!r} is already registered. Nothing was changed. Choose another "
            "class name."
        )
    if learner.check_state is PrivateLearner.check_state:
        raise SettingsError(
            f"The learner {name!r} defines no check_state, so files of others could not be "
            "checked. It was not registered. Define check_state."
        )
    LEARNERS[name] = learner
    return learner


def find_kind(name: str, settings: Mapping[str, Any]) -> type[PrivateLearner[Any, Any]]:
    """Return the class that these settings of a learner are of: with a score, if they ask for one.

    Raise a `KeyError` if no learner has that name.
    """
    return scored(LEARNERS[name]) if SHARE in settings else LEARNERS[name]


for _learner in (
    PrivateLogisticRegression,
    PrivateLinearSVC,
    PrivateRidge,
    PrivateTreeClassifier,
    PrivateForestClassifier,
    PrivateAdaBoostClassifier,
):
    register(_learner)
