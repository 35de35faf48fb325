"""Made-up records that fit a schema, from a public formula: there is nobody to protect."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.privacy.mechanisms import Noise, Source
from consilience.tables.schema import Numeric, Schema

Array = NDArray[Any]

SIGNAL = 1.0  # standard deviations of what the columns say about the label, beside chance of 1


def make_table(schema: Schema, n: int, *, seed: int) -> dict[str, Any]:
    """Return a table of n made-up records, whose label depends on all columns and on chance.

    Numbers lie between their bounds, more often in the middle; categories are equally frequent; a
    person has as many records as the schema allows. The same seed gives the same table.
    """
    draw = Noise(seed=seed).open()
    columns: dict[str, Any] = {}
    for column in schema.columns:
        if isinstance(column, Numeric):
            place = (draw.uniform(n) + draw.uniform(n)) / 2
            columns[column.name] = column.low + place * (column.high - column.low)
        else:
            chosen = (draw.uniform(n) * len(column.categories)).astype(int)
            columns[column.name] = np.asarray(column.categories, dtype=object)[chosen]
    columns[schema.label] = _make_labels(schema, schema.encode_features(columns), draw)
    if schema.person is not None and schema.max_records_per_person is not None:
        columns[schema.person] = [f"p{i // schema.max_records_per_person}" for i in range(n)]
    return columns


def _make_labels(schema: Schema, X: Array, draw: Source) -> Any:
    """Return labels by a linear rule of the features, with chance."""
    n, n_features = X.shape
    n_scores = 1 if schema.classes is None else len(schema.classes)
    scores = X @ draw.normal(n_features * n_scores).reshape(n_features, n_scores)
    spread = scores.std(axis=0)
    scores = (scores - scores.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    scores = SIGNAL * scores + draw.normal(n * n_scores).reshape(n, n_scores)
    if schema.classes is None:
        assert schema.label_bound is not None
        return schema.label_bound * np.tanh(scores[:, 0] / 4)
    return [schema.classes[place] for place in np.argmax(scores, axis=1)]
