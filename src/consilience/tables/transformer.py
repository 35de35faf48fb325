"""A schema as a step of scikit-learn's pipelines."""

from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags

from consilience.errors import shield
from consilience.tables.encoding import Remembered
from consilience.tables.schema import Schema

_made = Remembered()


def is_untouched(rows: object) -> bool:
    """Tell whether a `SchemaTransformer` made this very array and nobody may write to it."""
    return rows in _made and not cast(NDArray[Any], rows).flags.writeable


@shield
class SchemaTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Encode tables by a schema as a step of a scikit-learn pipeline.

    Nothing is learned from records: `fit` only notes how many features there will be.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def fit(self, X: object, y: object = None) -> Self:
        """Note the number of features; no record is read."""
        self.n_features_out_ = self.schema.n_features
        return self

    def transform(self, X: object) -> NDArray[np.float64]:
        """Encode the declared columns of anything `read_table` takes.

        The array cannot be written to unless somebody lifts that, so that a learner behind this
        step knows that no other one changed it.
        """
        rows = self.schema.encode_features(X)
        rows.flags.writeable = False
        _made.add(rows)
        return rows

    def get_feature_names_out(self, input_features: object = None) -> NDArray[Any]:
        """Return the names of the encoded features."""
        return np.asarray(self.schema.feature_names, dtype=object)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags
