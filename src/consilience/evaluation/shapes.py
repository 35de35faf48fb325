"""What a linear model says about each column, in the column's own units and categories.

A linear model on encoded rows is additive: its score is a sum of one function for each column of
the table. These functions are all that it says, and a clinician can read them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from consilience.errors import SettingsError
from consilience.tables.schema import Categorical, Numeric, Schema

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]

MOST_BARS = 12  # categories of a column that are drawn: those that matter most


@dataclass(frozen=True)
class Shape:
    """What one column adds to the score, less its mean over `places`.

    `places` are categories, or numbers: the ends of a line, or the edges of steps, of which there
    is one more than of `values`. `missing` is what an absent value adds, if the column marks it.
    """

    name: str
    places: tuple[Any, ...]
    values: Array
    missing: float | None

    @property
    def range(self) -> float:
        """How much the column can change the score."""
        return float(np.ptp(self.values))

    @property
    def has_steps(self) -> bool:
        """Whether values hold between two places rather than at them."""
        return len(self.places) > len(self.values)

    def draw(self, axes: Axes) -> None:
        """Draw the shape."""
        axes.set_title(self.name, fontsize="medium")
        axes.axhline(0, color="0.6", linewidth=0.8)
        if self.has_steps:
            axes.stairs(self.values, self.places, baseline=None, linewidth=1.8)
            axes.locator_params(axis="x", nbins=5)
        elif all(isinstance(place, float) for place in self.places):
            axes.plot(self.places, self.values, linewidth=1.8)
            axes.locator_params(axis="x", nbins=5)
        else:
            kept = np.sort(np.argsort(-np.abs(self.values), kind="stable")[:MOST_BARS])
            axes.bar(range(len(kept)), self.values[kept], color="tab:blue")
            names = [str(self.places[place]) for place in kept]
            axes.set_xticks(range(len(kept)), names, fontsize="small")
            if sum(map(len, names)) > 30:
                axes.tick_params(axis="x", rotation=60)
            if len(kept) < len(self.places):
                axes.set_title(
                    f"{self.name} ({len(kept)} of {len(self.places)})", fontsize="medium"
                )
        if self.missing is not None:
            axes.axhline(self.missing, color="tab:red", linestyle=":", label="missing")
            axes.legend(fontsize="small")


def shapes(model: object, schema: Schema, *, label: object = None) -> list[Shape]:
    """Return what each column adds to the score, the column that matters most first.

    Parameters
    ----------
    model
        A fitted linear learner, or a linear ensemble, of tables that `schema` encodes.
    schema
        The schema.
    label
        The class whose score is meant, against the mean of the others; the last one by default.
    """
    coef = _coefficients(model, schema, label)
    size = 1 / math.sqrt(len(schema.columns)) if schema.scale == "columns" else 1.0
    found, stop = [], 0
    for column in schema.columns:
        start, stop = stop, stop + len(column.feature_names)
        found.append(_shape_of(column, coef[start:stop] * size))
    return sorted(found, key=lambda shape: -shape.range)


def plot_shapes(model: object, schema: Schema, *, label: object = None, most: int = 12) -> Figure:
    """Return a matplotlib figure of the shapes of the columns that matter most.

    Parameters are those of `shapes`, and `most`, the number of columns that are drawn.
    """
    from matplotlib.figure import Figure

    drawn = shapes(model, schema, label=label)[:most]
    n_columns = min(3, len(drawn))
    n_rows = -(-len(drawn) // n_columns)
    figure = Figure(figsize=(4.2 * n_columns, 2.8 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharey=True)
    for axes, shape in itertools.zip_longest(panels.flat, drawn):
        if shape is None:
            axes.remove()
        else:
            shape.draw(axes)
    classes = _classes(model)
    what = (
        "prediction" if classes is None else f"score of {classes[-1] if label is None else label}"
    )
    for axes in panels[:, 0]:
        axes.set_ylabel(f"adds to the\n{what}")
    return figure


def _shape_of(column: Numeric | Categorical, coef: Array) -> Shape:
    missing = float(coef[-1]) if column.missing == "indicator" else None
    places: tuple[Any, ...]
    if isinstance(column, Categorical):
        places, values = column.categories, coef[: len(column.categories)]
    elif column.edges:
        places = (column.low, *column.edges, column.high)
        values = column.bin_features[:-1] @ coef
    elif column.transform is None:
        places, values = (column.low, column.high), coef[0] * np.array([-1.0, 1.0])
    else:
        middle, half = column.scale(column.low, column.high)
        line = np.linspace(column.low, column.high, 100)
        places = tuple(line.tolist())
        values = coef[0] * (column.apply_transform(line) - middle) / half
    mean = float(np.mean(values))
    return Shape(column.name, places, values - mean, None if missing is None else missing - mean)


def _classes(model: object) -> Array | None:
    classes = getattr(model, "classes_", getattr(model, "classes", None))
    return None if classes is None else np.asarray(classes)


def _coefficients(model: object, schema: Schema, label: object) -> Array:
    """Return the coefficients of one score."""
    coef = getattr(model, "coef_", getattr(model, "coef", None))
    if coef is None or np.atleast_2d(coef).shape[1] != schema.n_features:
        raise SettingsError(
            f"Shapes are those of a fitted linear model on the {schema.n_features} features of the "
            f"schema; this {type(model).__name__} is none. Nothing was drawn. Pass a linear "
            "learner or ensemble, and the schema by which its rows were encoded."
        )
    coef, classes = np.atleast_2d(coef), _classes(model)
    if classes is None or (len(coef) == 1 and label is None):
        return np.asarray(coef[0])
    asked = classes[-1] if label is None else label
    if asked not in classes.tolist():
        raise SettingsError(
            f"The model has no class {label!r}; it has {classes.tolist()}. Nothing was drawn."
        )
    place = classes.tolist().index(asked)
    if len(coef) == 1:
        return np.asarray(coef[0] if place else -coef[0])
    return np.asarray(coef[place] - np.delete(coef, place, axis=0).mean(axis=0))
