"""Odds ratios of a logistic model, with intervals for what they would be without noise.

An interval needs the law of the noise in the released coefficients. It is known where noise was
added to the coefficients themselves, and not where it was drawn in an objective or in gradients:
there the ratios stand without intervals, and the reason is stated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.display.html import card
from consilience.errors import SettingsError
from consilience.learners.ball import scale_to_user
from consilience.learners.linear import PrivateLogisticRegression
from consilience.privacy.accounting import Closing, Event
from consilience.privacy.vector_noise import is_added, quantile_along
from consilience.tables.schema import Categorical, Numeric, Schema

Array = NDArray[Any]

COVERS = (
    "Each interval is for the ratio of the same model without noise. It covers the noise, and not "
    "that records are a sample; nor does it undo the ridge, which draws ratios to 1."
)
_CLOSING = 30.0  # scales of the closing noise, beyond which it is in e^-30 of all draws


@dataclass(frozen=True)
class OddsRatio:
    """By what the odds of the second class are multiplied, and its interval where one is known."""

    column: str
    change: str
    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        ends = "" if self.low is None else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.3g}{ends}"


@dataclass(frozen=True)
class OddsRatios:
    """The odds ratios of a model, and what their intervals cover, or why there are none."""

    of: object
    rows: tuple[OddsRatio, ...]
    level: float
    note: str

    def __str__(self) -> str:
        width = max(len(f"{row.column}: {row.change}") for row in self.rows)
        lines = [f"{f'{row.column}: {row.change}':{width}}  {row}" for row in self.rows]
        return "\n".join([f"Odds ratios of {self.of}", *lines, "", self.note])

    def _repr_html_(self) -> str:
        rows = [(row.column, row.change, str(row)) for row in self.rows]
        return card(f"Odds ratios of {self.of}", ("", [self.note], rows))


@dataclass(frozen=True)
class _Law:
    """The law of noise on one coordinate of a user's coefficients, per unit of a contrast."""

    noise: Event | None  # None: the model is exact
    closing: float
    scale: float
    dimension: int

    def reach(self, contrast: Array, level: float) -> float:
        """Return how far noise moves a contrast of coefficients, but for a chance of 1 - level."""
        length = float(np.linalg.norm(contrast))
        if self.noise is None or length == 0:
            return 0.0
        far = quantile_along(self.noise, self.dimension, level)
        return self.scale * (length * far + float(np.abs(contrast).sum()) * self.closing * _CLOSING)


def odds_ratios(
    model: object, schema: Schema, *, learner: object = None, level: float = 0.95
) -> OddsRatios:
    """Return by what each column multiplies the odds, with intervals where the noise is known.

    Parameters
    ----------
    model
        A fitted `PrivateLogisticRegression`, a contribution of one, or a `Release` of such models,
        of two classes.
    schema
        The schema by which its rows are encoded.
    learner
        Of a release: the learner of its study, whose settings say how noise was scaled.
    level
        The level of the intervals.

    Examples
    --------
    >>> from consilience import Categorical, PrivateLogisticRegression, Schema
    >>> schema = Schema([Categorical("sex", ("f", "m"))], "ill", classes=("no", "yes"))
    >>> table = {"sex": ["f", "m"] * 2000, "ill": ["no", "no", "no", "yes"] * 1000}
    >>> learner = PrivateLogisticRegression(epsilon=1.0, schema=schema, mechanism="output")
    >>> ratio = odds_ratios(learner.fit(table), schema).rows[0]
    >>> ratio.change, ratio.low < ratio.value < ratio.high
    ('m against f', True)
    """
    if not 0 < level < 1:
        raise SettingsError(f"The 'level' must lie between 0 and 1. Got {level!r} instead.")
    made = getattr(model, "ensemble", getattr(model, "learner", model))
    trained = made if learner is None else learner
    coef, classes = getattr(made, "coef_", None), getattr(made, "classes_", None)
    two = classes is not None and np.ndim(classes) == 1 and len(np.asarray(classes)) == 2
    fits = coef is not None and np.shape(coef) == (1, schema.n_features)
    logistic = isinstance(trained, PrivateLogisticRegression) or not hasattr(trained, "loss")
    if not (two and fits and logistic):
        raise SettingsError(
            "Odds ratios are those of a logistic regression of two classes, on the "
            f"{schema.n_features} features of the schema; this {type(made).__name__} is none. "
            "Nothing was computed."
        )
    law = _find_law(model, made, trained, schema.n_features)
    known, note = (None, law) if isinstance(law, str) else (law, COVERS)
    rows = tuple(_ratios(np.asarray(coef)[0], schema, known, level))
    return OddsRatios(np.asarray(classes).tolist()[1], rows, level, note)


def _find_law(model: object, made: object, trained: object, n_features: int) -> _Law | str:
    """Return the law of the noise in the coefficients, or why it is not known."""
    if not isinstance(trained, PrivateLogisticRegression):
        return "There are no intervals: give the learner of the study, which says how noise scales."
    if made is not model and hasattr(model, "ensemble"):
        events: Sequence[Event] = getattr(model, "events", ())
        if not events:
            return (
                "There are no intervals: sites added the noise before models were combined, and a "
                "release does not state it."
            )
        if getattr(model, "aggregator", None) != "Average":
            return "There are no intervals: the aggregator did not add its noise to coefficients."
    else:
        if trained.tuning is not None:
            return (
                "There are no intervals: the model was chosen among candidates by its answers, "
                "which depend on its noise."
            )
        if trained.projection is not None:
            return "There are no intervals: the noise was added along axes, not to these columns."
        events = tuple(getattr(trained, "training_events", trained.events_))
        if trained.mechanism != "output" and events:
            return (
                "There are no intervals: the noise was drawn in the training, and how it moves the "
                "coefficients depends on the records. Train with mechanism='output' for noise of a "
                "known law, which is larger."
            )
    main = [event for event in events if is_added(event)]
    closing = [event.scale for event in events if isinstance(event, Closing)]
    if len(main) > 1 or len(main) + len(closing) != len(events):
        return "There are no intervals: more was drawn than noise on the coefficients."
    dimension = n_features + bool(trained.fit_intercept)
    noise = main[0] if main else None
    return _Law(noise, sum(closing), scale_to_user(trained), dimension)


def _ratios(coef: Array, schema: Schema, law: _Law | None, level: float) -> Iterator[OddsRatio]:
    size = 1 / math.sqrt(len(schema.columns)) if schema.scale == "columns" else 1.0
    stop = 0
    for column in schema.columns:
        start, stop = stop, stop + len(column.feature_names)
        for change, contrast in _contrasts(column):
            contrast = contrast * size
            value = float(coef[start:stop] @ contrast)
            reach = math.nan if law is None else law.reach(contrast, level)
            ends = (None, None) if law is None else (_exp(value - reach), _exp(value + reach))
            yield OddsRatio(column.name, change, _exp(value), *ends)


def _exp(value: float) -> float:
    return math.exp(min(max(value, -700.0), 700.0))


def _contrasts(column: Numeric | Categorical) -> Iterator[tuple[str, Array]]:
    """Yield changes of a column in words, each with the features that it changes."""
    width = len(column.feature_names)
    unit = np.eye(width)
    if isinstance(column, Categorical):
        first = column.categories[0]
        for place, other in enumerate(column.categories[1:], 1):
            yield f"{other} against {first}", unit[place] - unit[0]
    elif column.edges:
        bins = column.bin_features[:-1]
        ends = [column.low, *column.edges, column.high]
        for place in range(1, len(bins)):
            words = f"from {ends[place]:g} on against below {ends[1]:g}"
            yield words, bins[place] - bins[0]
    else:
        half = column.scale(column.low, column.high)[1]
        if column.transform == "log":
            yield "for each doubling", unit[0] * math.log(2) / half
        elif column.transform is None:
            yield "for each unit more", unit[0] / half
        else:
            yield f"{column.high:g} against {column.low:g}", unit[0] * 2
