"""What an additive model says about each column, in the column's own units and categories.

A linear model on encoded rows is additive, and so are boosted stumps: the score is a sum of one
function for each column of the table. These functions are all that it says, and a clinician can
read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from consilience.display.panels import ACROSS, panels
from consilience.errors import SettingsError
from consilience.tables.schema import Categorical, Numeric, Schema

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier

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
        A fitted linear learner, a linear ensemble, or boosted stumps (`PrivateAdaBoostClassifier`
        with ``max_depth=1``), of tables that `schema` encodes.
    schema
        The schema.
    label
        The class whose score is meant, against the mean of the others; the last one by default.
    """
    is_boosted = hasattr(model, "shape_functions")
    score = (
        _stumps(cast("PrivateAdaBoostClassifier", model), schema, label)
        if is_boosted
        else _lines(model, schema, label)
    )
    found, stop = [], 0
    for column in schema.columns:
        start, stop = stop, stop + len(column.feature_names)
        found.append(_shape_of(column, start, score))
    return sorted(found, key=lambda shape: -shape.range)


def plot_shapes(
    model: object, schema: Schema, *, label: object = None, most: int = 12, ax: object = None
) -> Array:
    """Draw the shapes of the columns that matter most; return the array of matplotlib's Axes.

    Parameters are those of `shapes`, and:

    most
        The number of columns that are drawn.
    ax
        Where to draw: an Axes or several, of which each gets one column; a Figure; or None, for a
        new figure of pyplot's.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> model = cs.PrivateLogisticRegression(epsilon=1.0, schema=schema).fit(table)
    >>> [axes.get_title() for axes in cs.plot_shapes(model, schema, ax=Figure())]
    ['age']
    """
    classes = _classes(model)
    what = (
        "prediction" if classes is None else f"score of {classes[-1] if label is None else label}"
    )
    return draw_shapes(shapes(model, schema, label=label)[:most], f"adds to the\n{what}", ax)


def draw_shapes(drawn: Sequence[Shape], what: str, ax: object) -> Array:
    """Draw shapes on `ax` and return the axes; `what` names their scale."""
    found = panels(len(drawn), ax, sharey=True)
    for place, (axes, shape) in enumerate(zip(found, drawn, strict=False)):
        shape.draw(axes)
        if place % ACROSS == 0 or ax is not None:
            axes.set_ylabel(what)
    return found


@dataclass(frozen=True)
class _Score:
    """A score that is a sum over features: what rows of all features add, and where it jumps."""

    of: Callable[[Array], Array]
    width: int
    jumps: Sequence[Array] | None = None  # of each feature, where it is no line

    def add(self, start: int, rows: Array) -> Array:
        """Return what some features add, the first of them at `start`."""
        whole = np.zeros((len(rows), self.width))
        whole[:, start : start + rows.shape[1]] = rows
        return self.of(whole) - self.of(np.zeros((1, self.width)))


def _lines(model: object, schema: Schema, label: object) -> _Score:
    coef = _coefficients(model, schema, label) * _size(schema)
    return _Score(lambda rows: np.asarray(rows @ coef), schema.n_features)


def _stumps(model: PrivateAdaBoostClassifier, schema: Schema, label: object) -> _Score:
    """Read boosted stumps, whose functions are of bins of encoded features."""
    functions, size = model.shape_functions(), _size(schema)
    if model.n_features_in_ != schema.n_features:
        raise _not_of(model, schema)
    said = {j: _against_others(one.T, model.classes_, label) for j, one in functions.items()}

    def add_up(rows: Array) -> Array:
        codes = model.bins_.codes(rows * size)
        return np.asarray(sum((one[codes[:, j]] for j, one in said.items()), np.zeros(len(rows))))

    cuts = [np.asarray(cut, dtype=np.float64) / size for cut in model.bins_.cuts]
    return _Score(add_up, schema.n_features, cuts)


def _size(schema: Schema) -> float:
    return 1 / math.sqrt(len(schema.columns)) if schema.scale == "columns" else 1.0


def _shape_of(column: Numeric | Categorical, start: int, score: _Score) -> Shape:
    width = len(column.feature_names)
    places: tuple[Any, ...]
    if isinstance(column, Categorical):
        places, rows = column.categories, np.eye(len(column.categories), width)
    elif column.edges:
        places, rows = (column.low, *column.edges, column.high), column.bin_features[:-1]
    else:
        middle, half = column.scale(column.low, column.high)
        ends = np.array([-1.0, 1.0])
        if score.jumps is not None:
            cuts = score.jumps[start]
            ends = np.array([-1.0, *cuts[(cuts > -1) & (cuts < 1)], 1.0])
            at = (ends[1:] + ends[:-1]) / 2
        elif column.transform is not None:
            line = np.linspace(column.low, column.high, 100)
            ends = at = (column.apply_transform(line) - middle) / half
        else:
            at = ends
        inner = column.undo_transform(middle + half * ends[1:-1]).tolist()
        places, rows = (column.low, *inner, column.high), at[:, None] * np.eye(1, width)
    values = score.add(start, rows)
    mean = float(np.mean(values))
    missing = None
    if column.missing == "indicator":
        missing = float(score.add(start, np.eye(1, width, width - 1))[0]) - mean
        if isinstance(column, Numeric) and column.edges:
            missing = float(score.add(start, column.bin_features[-1:])[0]) - mean
    return Shape(column.name, places, values - mean, missing)


def _classes(model: object) -> Array | None:
    classes = getattr(model, "classes_", None)
    return None if classes is None else np.asarray(classes)


def _not_of(model: object, schema: Schema) -> SettingsError:
    return SettingsError(
        f"Shapes are those of a fitted linear model, or of boosted stumps, on the "
        f"{schema.n_features} features of the schema; this {type(model).__name__} is none. Nothing "
        "was drawn. Pass a linear learner or ensemble, and the schema by which its rows were "
        "encoded."
    )


def _coefficients(model: object, schema: Schema, label: object) -> Array:
    """Return the coefficients of one score."""
    coef = getattr(model, "coef_", None)
    if coef is None or np.atleast_2d(coef).shape[1] != schema.n_features:
        raise _not_of(model, schema)
    return _against_others(np.atleast_2d(coef), _classes(model), label)


def _against_others(scores: Array, classes: Array | None, label: object) -> Array:
    """Return the row of a class less the mean of the others; one row is that of the last class."""
    if classes is None or (len(scores) == 1 and label is None):
        return np.asarray(scores[0])
    asked = classes[-1] if label is None else label
    if asked not in classes.tolist():
        raise SettingsError(
            f"The model has no class {label!r}; it has {classes.tolist()}. Nothing was drawn."
        )
    place = classes.tolist().index(asked)
    if len(scores) == 1:
        return np.asarray(scores[0] if place else -scores[0])
    return np.asarray(scores[place] - np.delete(scores, place, axis=0).mean(axis=0))
