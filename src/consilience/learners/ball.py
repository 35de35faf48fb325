"""Into the unit ball, where linear learners are trained and noise is drawn, and out of it again.

Rows are divided by their declared norm and clipped, so that every row has a length of at most 1. An
intercept becomes one more feature with the value s, the ``intercept_scaling``; then both are
multiplied by 1/√(1 + s²), so that the longer row still has a length of at most 1. Coefficients go
the other way, back into the coordinates of the user's columns and labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from consilience.privacy.mechanisms import clip_factors, clip_rows

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = Any  # a dense array, or SciPy's sparse rows


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
    intercept_scaling: float = 1.0

    @classmethod
    def of(cls, bounds: Bounded) -> Ball:
        """Return the bounds that a learner or an aggregator declares."""
        scaling = float(getattr(bounds, "intercept_scaling", 1.0))
        # A NumPy number of 32 bits would round the slack away.
        return cls(float(bounds.data_norm), bool(bounds.fit_intercept), scaling)

    @property
    def row_factor(self) -> float:
        """What a row of norm <= 1 is multiplied by to make room for the constant."""
        return math.sqrt(1 / (1 + self.intercept_scaling**2)) if self.fit_intercept else 1.0

    @property
    def constant(self) -> float:
        """The value of the constant feature, 0 if there is none."""
        return self.intercept_scaling * self.row_factor if self.fit_intercept else 0.0


def into_ball(X: Rows, bounds: Bounded, room: Array | None = None) -> Rows:
    """Scale by the declared norm, clip, append the constant column: rows of norm <= 1, always.

    The intercept is a feature like any other, jointly normalised and regularised: without strong
    convexity in every coordinate there is no privacy. The result may be written into `room`, which
    must have as many columns.
    """
    ball = Ball.of(bounds)
    # What the rows are multiplied by beside clipping. The slack absorbs the roundings of doing so.
    slack = 1 - 2**-50
    factor = 1.0 if ball.data_norm == 1 else slack / ball.data_norm
    factor *= ball.row_factor * slack if ball.fit_intercept else 1.0
    constant = ball.constant * slack
    if sparse.issparse(X):
        X = clip_rows(X, ball.data_norm)
        X = X if factor == 1 else X * factor
        if not ball.fit_intercept:
            return X
        ones = sparse.csr_array(np.full((X.shape[0], 1), constant))
        return sparse.hstack([X, ones], format="csr")
    X, factors = clip_factors(X, ball.data_norm)
    if factors is None and factor == 1:
        return X
    # All in one product: rows are written once.
    scale = factor if factors is None else (factors * factor)[:, None]
    if not ball.fit_intercept:
        return X * scale
    out = np.empty((X.shape[0], X.shape[1] + 1)) if room is None else room[: X.shape[0]]
    np.multiply(X, scale, out=out[:, :-1])
    out[:, -1] = constant
    return out


def out_of_ball(vectors: Array, bounds: Bounded) -> tuple[Array, Array]:
    """Return coefficients and intercepts in the user's coordinates from vectors in the ball's."""
    vectors = np.atleast_2d(vectors)
    ball = Ball.of(bounds)
    if not ball.fit_intercept:
        return vectors / ball.data_norm, np.zeros(len(vectors))
    return vectors[:, :-1] * (ball.row_factor / ball.data_norm), vectors[:, -1] * ball.constant


def scale_to_user(learner: Bounded) -> float:
    """Return what a coordinate of the ball is multiplied by to become a user's coefficient.

    A regressor's labels were divided by its ``label_bound``, which the scale takes back.
    """
    ball = Ball.of(learner)
    return ball.row_factor / ball.data_norm * label_bound(learner)


def intercept_to_user(learner: Bounded) -> float:
    """Return what the constant's coordinate is multiplied by to become a user's intercept."""
    return Ball.of(learner).constant * label_bound(learner)


def label_bound(learner: object) -> float:
    """Return what a regressor's labels are divided by; 1 for a classifier."""
    return float(getattr(learner, "label_bound", 1.0))
