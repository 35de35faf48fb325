"""A linear model in forms that need nothing of this package: a scorecard, scikit-learn, ONNX.

What is exported is the coefficients of a release and the public schema, so that an export is
post-processing: it costs nothing, and hides what the release hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from consilience.errors import SettingsError
from consilience.tables.schema import Categorical, Numeric, Schema

if TYPE_CHECKING:
    from onnx import ModelProto

    from consilience.files.release import Release

Array = NDArray[Any]

FORM = "consilience scorecard 1"
LINKS = {
    "identity": "the score is the prediction",
    "logistic": "the probability of the class is 1 / (1 + exp(-score)), that of the other the rest",
    "softmax": "probabilities are exp(score), divided by their sum over the classes",
}
_OPSETS = (("", 17), ("ai.onnx.ml", 3))  # runtimes since 2022 have these
_IR_VERSION = 8  # of ONNX files, the first with these operators


class _Column(NamedTuple):
    """What one column adds to each score, (place, output): None where a record is refused."""

    column: Numeric | Categorical
    points: Array
    missing: Array | None
    other: Array | None  # of a category that is not declared

    @classmethod
    def of(cls, column: Numeric | Categorical, coef: Array) -> Self:
        """Read it off the coefficients of the column's features, (output, feature)."""
        width = len(column.feature_names)
        zero, marked = np.zeros(len(coef)), np.eye(1, width, width - 1) @ coef.T
        if isinstance(column, Categorical):
            points = np.eye(len(column.categories), width) @ coef.T
            missing = {"error": None, "ignore": zero, "indicator": marked[0]}[column.missing]
            return cls(column, points, missing, zero if column.unseen == "ignore" else None)
        if column.edges:
            points = column.bin_features[:-1] @ coef.T
        else:
            points = np.array([[-1.0], [1.0]]) * coef[:, 0]
        rules = {"error": None, "middle": zero, "indicator": marked[0]}
        made = cls(column, points, None, None)
        if isinstance(column.missing, float):
            return made._replace(missing=made.add(column.missing))
        return made._replace(missing=rules[column.missing])

    def add(self, value: float) -> Array:
        """Return what a number adds to each score."""
        column = self.column
        assert isinstance(column, Numeric)
        if column.edges:
            return np.asarray(self.points[np.searchsorted(column.edges, value, side="right")])
        middle, half = column.scale(column.low, column.high)
        at = (column.apply_transform(value) - middle) / half
        return np.asarray(self.points.mean(axis=0) + at * (self.points[1] - self.points[0]) / 2)

    def card(self, output: int) -> dict[str, Any]:
        """Return it as a scorecard states it, for one score."""
        column, points = self.column, self.points[:, output].tolist()
        missing, other = (
            None if one is None else float(one[output]) for one in (self.missing, self.other)
        )
        stated: dict[str, Any] = {"column": column.name}
        if isinstance(column, Categorical):
            pairs = dict(zip(map(str, column.categories), points, strict=True))
            stated |= {"kind": "categories", "points": pairs, "other": other}
        elif column.edges:
            stated |= {"kind": "bins", "edges": list(column.edges), "points": points}
        else:
            ends = {"low": column.low, "high": column.high, "transform": column.transform}
            stated |= {"kind": "line", **ends, "points": points}
        return {**stated, "missing": missing, "missing_values": list(column.missing_values)}


@dataclass(frozen=True)
class Linear:
    """A linear model as exports write it: coefficients (output, feature), constants, classes."""

    coef: Array
    intercept: Array
    classes: Array | None

    @classmethod
    def of(cls, model: object) -> Self:
        """Read a release, an ensemble or a fitted learner, or refuse what is not linear."""
        made = getattr(model, "ensemble", model)
        coef, classes = getattr(made, "coef_", None), getattr(made, "classes_", None)
        if getattr(made, "stays_at_site", False):
            raise SettingsError(
                "An adapted model is as exact as its site's records, and stays there. Nothing was "
                "exported. Export the release."
            )
        numeric = classes is None or np.ndim(classes) == 0
        if coef is None or not (numeric or len(np.asarray(classes)) > 1):
            raise SettingsError(
                f"A {type(made).__name__} is no linear model of at least two classes or of a "
                "number, and only these can be exported. Nothing was written. Use `release "
                "predict`, which works with every release."
            )
        found = np.atleast_2d(coef), np.atleast_1d(getattr(made, "intercept_", 0.0))
        return cls(*found, None if numeric else np.asarray(classes))

    @property
    def link(self) -> str:
        """How predictions follow from scores."""
        if self.classes is None:
            return "identity"
        return "logistic" if len(self.coef) == 1 else "softmax"

    def columns(self, schema: Schema) -> Iterator[_Column]:
        """Yield what each column of a table adds to the scores."""
        if self.coef.shape[1] != schema.n_features:
            raise SettingsError(
                f"The model has {self.coef.shape[1]} features and the schema {schema.n_features}. "
                "Nothing was exported. Use the schema of the model's study."
            )
        size = 1 / math.sqrt(len(schema.columns)) if schema.scale == "columns" else 1.0
        stop = 0
        for column in schema.columns:
            start, stop = stop, stop + len(column.feature_names)
            yield _Column.of(column, self.coef[:, start:stop] * size)


def describe_origin(release: Release) -> dict[str, str]:
    """Return what an exported file states of the release that it was made of."""
    return {
        "study": str(release.study["name"]),
        "study digest": str(release.study["digest"]),
        "release": str(release.sequence),
        "release digest": release.digest,
        "signed by key": release.sealed.key,
        "guarantee": str(release.guarantee),
    }


def to_scikit_learn(
    model: object, schema: Schema | None = None
) -> LogisticRegression | LinearRegression | Pipeline:
    """Return a fitted model of scikit-learn's that predicts what a linear release predicts.

    Parameters
    ----------
    model
        A `Release`, an ensemble or a fitted learner, if it is linear.
    schema
        With a schema the result is a pipeline, whose first step encodes tables by it; without one
        the result predicts for encoded rows.

    Examples
    --------
    >>> from consilience import Numeric, PrivateLogisticRegression, Schema
    >>> schema = Schema([Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> learner = PrivateLogisticRegression(epsilon=1.0, schema=schema).fit(table)
    >>> to_scikit_learn(learner, schema).predict({"age": [10, 90]}).tolist()
    ['no', 'yes']
    """
    found = Linear.of(model)
    if found.classes is None:
        made = LinearRegression()
        made.coef_, made.intercept_ = found.coef.ravel(), float(found.intercept[0])
    else:
        made = LogisticRegression()
        made.coef_, made.intercept_ = found.coef.copy(), found.intercept.copy()
        made.classes_ = found.classes
    made.n_features_in_ = found.coef.shape[1]
    if schema is None:
        return made
    list(found.columns(schema))  # refuses another number of features
    return make_pipeline(schema.transformer(), made)


def to_python(model: object, schema: Schema) -> str:
    """Return a Python module that makes the model of scikit-learn and needs nothing else.

    Its function ``load`` returns the fitted model, of rows with the features that it names.
    """
    found = Linear.of(model)
    list(found.columns(schema))
    kind = "LinearRegression" if found.classes is None else "LogisticRegression"
    flat = found.classes is None
    lines = [
        '"""A linear model, written by `consilience release export`.',
        "",
        "`load()` returns it fitted. Its rows have the features below, as the study's schema",
        "encodes them.",
        '"""',
        "",
        "import numpy as np",
        f"from sklearn.linear_model import {kind}",
        "",
        f"FEATURES = {list(schema.feature_names)!r}",
        f"COEF = {(found.coef.ravel() if flat else found.coef).tolist()!r}",
        f"INTERCEPT = {(float(found.intercept[0]) if flat else found.intercept.tolist())!r}",
        *([] if flat else [f"CLASSES = {np.asarray(found.classes).tolist()!r}"]),
        "",
        "",
        "def load():",
        f"    model = {kind}()",
        "    model.coef_ = np.array(COEF)",
        f"    model.intercept_ = {'INTERCEPT' if flat else 'np.array(INTERCEPT)'}",
        *([] if flat else ["    model.classes_ = np.array(CLASSES)"]),
        "    model.n_features_in_ = len(FEATURES)",
        "    return model",
    ]
    return "\n".join(lines) + "\n"


def scorecard(model: object, schema: Schema, **about: object) -> dict[str, Any]:
    """Return a linear model as points that each column adds to a score, in the column's units.

    docs/export.md describes the result, which is plain JSON. A score is the ``intercept`` and one
    number of points for each column.

    Parameters
    ----------
    model
        A `Release`, an ensemble or a fitted learner, if it is linear.
    schema
        The schema by which its rows are encoded.
    about
        Further facts to state, such as the release that it was made of.

    Examples
    --------
    >>> from consilience import Numeric, PrivateLogisticRegression, Schema
    >>> schema = Schema([Numeric("age", 0, 100, cuts=(50,))], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> learner = PrivateLogisticRegression(epsilon=1.0, schema=schema).fit(table)
    >>> card = scorecard(learner, schema)
    >>> young, old = card["scores"][0]["columns"][0]["points"]
    >>> young < old
    True
    """
    found = Linear.of(model)
    columns = list(found.columns(schema))
    names: Sequence[Any]
    if found.classes is None:
        names = [schema.label]
    else:
        names = found.classes.tolist()[1 if len(found.coef) == 1 else 0 :]
    return {
        "form": FORM,
        **about,
        "label": schema.label,
        "classes": None if found.classes is None else found.classes.tolist(),
        "link": found.link,
        "meaning": LINKS[found.link],
        "scores": [
            {
                "of": name,
                "intercept": float(found.intercept[place]),
                "columns": [each.card(place) for each in columns],
            }
            for place, name in enumerate(names)
        ],
    }


def to_onnx(
    model: object, schema: Schema | None = None, *, about: Mapping[str, str] | None = None
) -> ModelProto:
    """Return a linear model as an ONNX graph in double precision; needs ``consilience[onnx]``.

    Parameters
    ----------
    model
        A `Release`, an ensemble or a fitted learner, if it is linear.
    schema
        With a schema there is one input for each column, with a row for each record: a DOUBLE, in
        which a missing value is NaN, or a STRING, in which it is empty. Without one the input
        ``X`` has encoded rows.
    about
        Facts for the file's metadata.

    Notes
    -----
    Outputs are ``scores`` and, of classifiers, ``probabilities`` and ``label``. A record that the
    schema refuses has NaN as its score: its label means nothing.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, schema=schema).fit(table)
    >>> [each.name for each in cs.to_onnx(learner, schema).graph.output]
    ['scores', 'probabilities', 'label']
    """
    from onnx import TensorProto, checker, helper

    found = Linear.of(model)
    graph = _Graph()
    if schema is None:
        inputs = [
            helper.make_tensor_value_info("X", TensorProto.DOUBLE, [None, found.coef.shape[1]])
        ]
        added = graph.node("MatMul", "X", graph.constant(found.coef.T))
    else:
        inputs, parts = [], []
        for place, each in enumerate(found.columns(schema)):
            name = each.column.name
            categorical = isinstance(each.column, Categorical)
            kind = TensorProto.STRING if categorical else TensorProto.DOUBLE
            inputs.append(helper.make_tensor_value_info(name, kind, [None, 1]))
            graph.prefix = f"c{place}"
            parts.append(_onnx_category(graph, each) if categorical else _onnx_number(graph, each))
        graph.prefix = "all"
        added = graph.node("Sum", *parts)
    outputs = [helper.make_tensor_value_info("scores", TensorProto.DOUBLE, [None, len(found.coef)])]
    graph.node("Add", added, graph.constant(found.intercept), out="scores")
    if found.classes is not None:
        outputs += _onnx_classes(graph, found)
    made = helper.make_model(
        helper.make_graph(graph.nodes, "consilience", inputs, outputs, graph.constants),
        opset_imports=[helper.make_opsetid(*one) for one in _OPSETS],
        ir_version=_IR_VERSION,
        producer_name="consilience",
    )
    helper.set_model_props(made, dict(about or {}))
    checker.check_model(made, full_check=True)
    return made


class _Graph:
    """Nodes and constants of an ONNX graph, with names that are used once."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.prefix = "all"

    def name(self) -> str:
        return f"{self.prefix}.{len(self.nodes) + len(self.constants)}"

    def constant(self, values: object) -> str:
        from onnx import numpy_helper

        array = np.asarray(values)
        if array.dtype.kind == "U":
            array = array.astype(object)
        self.constants.append(numpy_helper.from_array(array, self.name()))
        return str(self.constants[-1].name)

    def node(
        self,
        kind: str,
        *inputs: str,
        out: str | None = None,
        domain: str | None = None,
        **settings: object,
    ) -> str:
        from onnx import helper

        out = out or self.name()
        made = helper.make_node(kind, list(inputs), [out], domain=domain)
        made.attribute.extend(helper.make_attribute(*one) for one in settings.items())
        self.nodes.append(made)
        return out

    def cast(self, value: str) -> str:
        from onnx import TensorProto

        return self.node("Cast", value, to=TensorProto.DOUBLE)


def _or_nan(points: Array | None, n_outputs: int) -> Array:
    return np.full((1, n_outputs), np.nan) if points is None else points[None]


def _onnx_number(graph: _Graph, each: _Column) -> str:
    """Add what a column of numbers adds to each score."""
    column, n_outputs = each.column, each.points.shape[1]
    assert isinstance(column, Numeric)
    value = column.name
    absent = graph.node("IsNaN", value)
    for spelling in column.missing_values:
        try:
            number = float(spelling)
        except ValueError:  # texts cannot be in a column of numbers
            continue
        same = graph.node("Equal", value, graph.constant(np.float64(number)))
        absent = graph.node("Or", absent, same)
    value = graph.node("Where", absent, graph.constant(np.float64(column.low)), value)
    if column.edges:
        above = graph.node("GreaterOrEqual", value, graph.constant(np.array([column.edges])))
        steps = graph.constant(np.diff(each.points, axis=0))
        added = graph.node("MatMul", graph.cast(above), steps)
        added = graph.node("Add", added, graph.constant(each.points[:1]))
    else:
        value = graph.node("Min", value, graph.constant(np.float64(column.high)))
        value = graph.node("Max", value, graph.constant(np.float64(column.low)))
        if column.transform == "log":
            value = graph.node("Log", value)
        elif column.transform == "log1p":
            longer = graph.node("Add", graph.node("Abs", value), graph.constant(np.float64(1)))
            value = graph.node("Mul", graph.node("Sign", value), graph.node("Log", longer))
        middle, half = column.scale(column.low, column.high)
        value = graph.node("Sub", value, graph.constant(np.float64(middle)))
        slope = graph.constant((each.points[1:] - each.points[:1]) / 2 / half)
        value = graph.node("Mul", value, slope)
        added = graph.node("Add", value, graph.constant(each.points.mean(axis=0, keepdims=True)))
    return graph.node("Where", absent, graph.constant(_or_nan(each.missing, n_outputs)), added)


def _onnx_category(graph: _Graph, each: _Column) -> str:
    """Add what a column of categories adds to each score."""
    column, n_outputs = each.column, each.points.shape[1]
    assert isinstance(column, Categorical)
    absent = ["", *(str(one) for one in column.missing_values if str(one))]
    known = [str(one) for one in column.categories]
    flat = graph.node("Reshape", column.name, graph.constant(np.array([-1], np.int64)))
    marks = graph.node(
        "OneHotEncoder", flat, domain="ai.onnx.ml", cats_strings=[*known, *absent], zeros=1
    )
    marks = graph.cast(marks)
    n = len(known)
    picked = [_some(graph, marks, 0, n), _some(graph, marks, n, n + len(absent))]
    is_known, is_absent = (
        graph.node(
            "Greater",
            graph.node("ReduceSum", one, graph.constant(np.array([1], np.int64)), keepdims=1),
            graph.constant(np.float64(0)),
        )
        for one in picked
    )
    added = graph.node("MatMul", picked[0], graph.constant(each.points))
    missing, other = (graph.constant(_or_nan(one, n_outputs)) for one in (each.missing, each.other))
    rest = graph.node("Where", is_absent, missing, other)
    return graph.node("Where", is_known, added, rest)


def _some(graph: _Graph, marks: str, start: int, stop: int) -> str:
    """Return the columns of a table between two places."""
    bounds = (graph.constant(np.array([one], np.int64)) for one in (start, stop, 1))
    return graph.node("Slice", marks, *bounds)


def _onnx_classes(graph: _Graph, found: Linear) -> list[Any]:
    """Add probabilities and labels; return their descriptions."""
    from onnx import TensorProto, helper

    classes = np.asarray(found.classes)
    if len(found.coef) == 1:
        both = graph.node("Concat", graph.node("Neg", "scores"), "scores", axis=1)
        graph.node("Sigmoid", both, out="probabilities")
    else:
        graph.node("Softmax", "scores", out="probabilities", axis=1)
    best = graph.node("ArgMax", "probabilities", axis=1, keepdims=0)
    whole = classes.dtype.kind in "iub"
    listed = classes.astype(np.int64) if whole else classes.astype(str)
    graph.node("Gather", graph.constant(listed), best, out="label")
    kind = TensorProto.INT64 if whole else TensorProto.STRING
    shape = [None, len(classes)]
    return [
        helper.make_tensor_value_info("probabilities", TensorProto.DOUBLE, shape),
        helper.make_tensor_value_info("label", kind, [None]),
    ]
