"""Into the unit ball, where linear learners are trained and noise is drawn, and out of it again.

Rows are divided by their declared norm and clipped, so that every row has a length of at most 1. An
intercept becomes one more feature with the value 1; then both are multiplied by √½ = `HALF`, so
that the longer row still has a length of at most 1. Coefficients go the other way, back into the
coordinates of the user's columns and labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from consilience.privacy.mechanisms import clip_rows

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = Any  # a dense array, or SciPy's sparse rows

HALF = math.sqrt(0.5)


class Bounded(Protocol):
    """Anything that declares how long a row may be and whether there is an intercept."""

    @property
    def data_norm(self) -> float:
        """The declared bound on the norm of a row."""

    @property
    def fit_intercept(self) -> bool:
        """Whether a constant feature is appended."""


@dataclass(frozen=True)
class Ball:
    """The declared bounds alone: all that a worker process needs to bring records into the ball."""

    data_norm: float
    fit_intercept: bool


def into_ball(X: Rows, bounds: Bounded, room: Array | None = None) -> Rows:
    """Scale by the declared norm, clip, append the constant column: rows of norm <= 1, always.

    The intercept is a feature like any other, jointly normalised and regularised: without strong
    convexity in every coordinate there is no privacy. The result may be written into `room`, which
    must have as many columns.
    """
    norm = float(bounds.data_norm)  # a NumPy number of 32 bits would round the slack away
    X = clip_rows(X, norm)
    if norm != 1.0:
        X = clip_rows(X * (1.0 / norm), 1.0)
    if not bounds.fit_intercept:
        return X
    half = HALF * (1 - 2**-50)
    if sparse.issparse(X):
        return sparse.hstack(
            [X * half, sparse.csr_array(np.full((X.shape[0], 1), half))], format="csr"
        )
    out = np.empty((X.shape[0], X.shape[1] + 1)) if room is None else room[: X.shape[0]]
    np.multiply(X, half, out=out[:, :-1])
    out[:, -1] = half
    return out


def out_of_ball(vectors: Array, bounds: Bounded) -> tuple[Array, Array]:
    """Return coefficients and intercepts in the user's coordinates from vectors in the ball's."""
    vectors = np.atleast_2d(vectors)
    if not bounds.fit_intercept:
        return vectors / bounds.data_norm, np.zeros(len(vectors))
    return vectors[:, :-1] * (HALF / bounds.data_norm), vectors[:, -1] * HALF


def scale_to_user(learner: object) -> float:
    """Return what a coordinate of the ball is multiplied by to become a user's coefficient.

    A regressor's labels were divided by its ``label_bound``, which the scale takes back. A model of
    another library declares nothing, and its coefficients are the user's already.
    """
    half = HALF if getattr(learner, "fit_intercept", False) else 1.0
    return float(half / getattr(learner, "data_norm", 1.0) * label_bound(learner))


def label_bound(learner: object) -> float:
    """Return what a regressor's labels are divided by; 1 for a classifier."""
    return float(getattr(learner, "label_bound", 1.0))
