"""A public linear model that sites' records are held against, with scores that are exact.

Rows and coefficients lie on public grids, so that no order of adding rounds a score: what a record
adds to a sum cannot depend on the table it stands in (docs/guarantees/gradient.md).
"""

from __future__ import annotations

import numpy as np

from consilience.errors import SettingsError
from consilience.learners.ball import Ball
from consilience.learners.base import LARGEST
from consilience.learners.gradient import COEF_BITS, LONGEST_COEF
from consilience.statistics.base import Array


def read_rows(given: object, what: str) -> Array:
    """Return rows of coefficients and, last, intercepts; refuse anything else."""
    try:
        rows = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        rows = np.zeros(0)
    if not (rows.ndim == 2 and rows.shape[1] > 1 and (np.abs(rows) <= LARGEST).all()):
        raise SettingsError(
            f"The {what} must be a public model: a list of rows of numbers within ±{LARGEST:g}, "
            "coefficients and last the intercept; one row for two classes, otherwise one for each. "
            "Nothing was trained. Use start_from(public), or the coefficients of a release."
        )
    return rows


def check_rows(given: object, what: str, n_classes: int, n_features: int) -> None:
    """Refuse rows that do not fit the classes and the columns."""
    shape = (1 if n_classes == 2 else n_classes, n_features + 1)
    if read_rows(given, what).shape != shape:
        raise SettingsError(
            f"The {what} must have {shape[0]} rows of {shape[1]} numbers for these columns and "
            "classes. Nothing was trained. Use the model of the same columns."
        )


def into_steps(rows: Array, ball: Ball) -> Array:
    """Return coefficients in whole steps of their grid, in coordinates of the unit ball."""
    inside = np.hstack(
        [rows[:, :-1] * (ball.data_norm / ball.row_factor), rows[:, -1:] / ball.constant]
    )
    largest = max(1.0, float(np.abs(inside).max()))  # squares of such numbers may overflow
    far = LONGEST_COEF / max(LONGEST_COEF, largest * float(np.linalg.norm(inside / largest)))
    return np.asarray(np.trunc(inside * (far * 2.0**COEF_BITS)))
