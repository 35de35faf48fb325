"""A schema as a step of scikit-learn's pipelines."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin

from consilience.errors import shield
from consilience.tables.schema import Schema


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
        """Encode the declared columns of anything `read_table` takes."""
        return self.schema.encode_features(X)

    def get_feature_names_out(self, input_features: object = None) -> NDArray[Any]:
        """Return the names of the encoded features."""
        return np.asarray(self.schema.feature_names, dtype=object)

    def __sklearn_is_fitted__(self) -> bool:
        return True
