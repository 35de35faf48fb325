"""What is attacked: a copy of the learner, its plan, and made-up records that fit it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from consilience.errors import SettingsError
from consilience.learners.base import Plan, PrivateLearner, plan_fit

Array = NDArray[Any]
Learner = PrivateLearner[Any, Any]


class Table(NamedTuple):
    """Made-up records of one site, with the persons they belong to where persons are the unit."""

    X: Array
    y: Array
    persons: Array | None = None


def copy_learner(learner: Learner, n_records: int) -> Learner:
    """Return an unfitted copy with fresh noise, and a public size where one is needed."""
    twin: Learner = clone(learner).set_params(noise=None)
    twin.schema = None  # made-up records are encoded already
    if twin.get_params().get("label_bound", 1.0) is None:
        twin.set_params(label_bound=1.0)  # made-up labels have the scale that is declared
    needs_size = twin.neighbours == "add-remove" and "public_size" in twin.get_params()
    if needs_size and twin.is_linear and twin.get_params()["public_size"] is None:
        twin.set_params(public_size=n_records)
    return twin


def plan_training(twin: Learner, table: Table) -> tuple[Any, Plan]:
    """Return the task and plan that the learner's own code makes of a table, without training."""
    persons = {} if table.persons is None else {"persons": table.persons}
    task, plan = plan_fit(twin, table.X, table.y, **persons)
    if not plan.events:
        raise SettingsError(
            "An audit needs a claim to attack, but this learner promises nothing (epsilon=inf). "
            "Nothing was attacked. Audit it with a finite epsilon."
        )
    return task, plan


def records_per_unit(learner: Learner) -> int:
    """Return how many records one unit may have."""
    return int(learner.get_params()["records_per_person"]) if learner.unit == "person" else 1


def make_labels(learner: Learner, n: int) -> Array:
    """Return n made-up labels that show every declared class, or both ends of the label bound."""
    settings = learner.get_params(deep=False)
    if "label_bound" in settings:
        return np.resize(np.array([-1.0, 1.0]) * settings["label_bound"], n)
    classes = settings.get("classes")
    return np.resize(np.array([0, 1]) if classes is None else np.asarray(classes), n)
