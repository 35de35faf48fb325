"""Classes chosen by what mistakes cost, rather than by which one is more probable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.errors import SettingsError


@dataclass(frozen=True)
class Costs:
    """What a false positive and a false negative cost; the second of two classes is the positive.

    Only their ratio matters.
    """

    false_positive: float = 1.0
    false_negative: float = 1.0

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            if not (isinstance(cost, int | float) and 0 < cost < math.inf):
                raise SettingsError(
                    f"The cost {name!r} must be a finite number > 0. Got {cost!r} instead. Nothing "
                    "was predicted."
                )

    @property
    def threshold(self) -> float:
        """The probability of the second class from which on naming it costs less on average."""
        return 1 / (1 + self.false_negative / self.false_positive)


def predict_at_cost(
    model: object, X: object, *, false_positive: float = 1.0, false_negative: float = 1.0
) -> NDArray[Any]:
    """Return the class of each row that costs least on average, of a model of two classes.

    Costs are a choice of whoever predicts. They change nothing in training, and cost no budget.

    Parameters
    ----------
    model
        A `Release`, an ensemble or a fitted learner that states probabilities.
    X
        What its ``predict_proba`` takes.
    false_positive, false_negative
        What it costs to name the second class of a record of the first, and the reverse.

    Examples
    --------
    >>> from consilience import Numeric, PrivateLogisticRegression, Schema
    >>> schema = Schema([Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> learner = PrivateLogisticRegression(epsilon=1.0, schema=schema).fit(table)
    >>> predict_at_cost(learner, {"age": [45]}, false_negative=20).tolist()
    ['yes']
    """
    costs = Costs(false_positive, false_negative)
    made = getattr(model, "ensemble", model)
    classes, chances_of = getattr(made, "classes_", None), getattr(made, "predict_proba", None)
    if chances_of is None or classes is None or np.shape(classes) != (2,):
        raise SettingsError(
            f"Costs of mistakes are for models of two classes that state probabilities; this "
            f"{type(made).__name__} is none. Nothing was predicted. Use predict."
        )
    return np.asarray(np.asarray(classes)[(chances_of(X)[:, 1] >= costs.threshold).astype(int)])
