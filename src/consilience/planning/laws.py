"""The law of a model: its mean and covariance over draws of records and of noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from consilience.planning.population import Array


class Law(NamedTuple):
    """Mean and covariance of a model over draws of records and of noise.

    ``flattered`` and ``flattered_error`` are loss and error that the public table does not show
    because the model was fitted to it.
    """

    mean: Array
    sampling: Array
    noise: Array
    flattered: float = 0.0
    flattered_error: float = 0.0

    @property
    def covariance(self) -> Array:
        """Covariance due to records and noise together."""
        return np.asarray(self.sampling + self.noise)

    def times(self, k: float) -> Law:
        """Return the law of k times the model."""
        return Law(k * self.mean, k * k * self.sampling, k * k * self.noise)


Outlook = tuple[Law, float]  # the law of a model, and a bound on its expected excess loss
