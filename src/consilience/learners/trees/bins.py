"""Public cut points: where a tree may split, declared before anyone looks at a record.

A cut that is computed from the data, such as a midpoint between two records or a quantile, would
reveal those records. So every feature is cut at public places: evenly between declared bounds, at
the quantiles of public records, or between declared categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from consilience.errors import SchemaMismatch, SettingsError
from consilience.tables.public import Public
from consilience.tables.schema import Numeric, Schema

Missing = Literal["error", "low", "high"]

MOST_BINS = 255  # of a feature, so that a bin is a byte; one more is for missing values


@dataclass(frozen=True)
class Bins:
    """Declare the cut points of each feature: a value's bin is the number of cuts at or below it.

    Parameters
    ----------
    cuts
        For each feature ascending numbers; none for a feature that is never split.
    categorical
        For each feature whether its bins are categories, split one against all others, rather than
        ordered.
    missing
        ``"error"``, or the end at which missing values get a bin of their own: ``"low"`` or
        ``"high"``.

    Examples
    --------
    >>> Bins.even(0, 100, n_features=2, n_bins=4).cuts
    ((25.0, 50.0, 75.0), (25.0, 50.0, 75.0))
    """

    cuts: Sequence[Sequence[float]]
    categorical: Sequence[bool] | None = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        try:
            cuts = tuple(tuple(float(cut) for cut in feature) for feature in self.cuts)
        except (TypeError, ValueError):
            cuts = ((np.nan,),)
        apart = all(np.isfinite(one).all() and (np.diff(one) > 0).all() for one in cuts)
        if not (cuts and apart and max(map(len, cuts)) < MOST_BINS):
            raise SettingsError(
                f"Bins need ascending finite cuts for each feature, at most {MOST_BINS - 1} of "
                "them. Nothing was trained. Declare them from domain knowledge or public records."
            )
        given = [False] * len(cuts) if self.categorical is None else self.categorical
        kinds = () if np.ndim(given) != 1 else tuple(bool(kind) for kind in given)
        if len(kinds) != len(cuts) or self.missing not in ("error", "low", "high"):
            raise SettingsError(
                "Bins need one truth value in 'categorical' for each feature, and 'missing' to "
                "be 'error', 'low' or 'high'. Nothing was trained."
            )
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "categorical", kinds)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, as files hold them; ``Bins(**values)`` undoes it."""
        return {
            "cuts": [list(feature) for feature in self.cuts],
            "categorical": list(self.categorical or ()),
            "missing": self.missing,
        }

    @classmethod
    def even(
        cls,
        low: ArrayLike,
        high: ArrayLike,
        *,
        n_features: int,
        n_bins: int = 16,
        missing: Missing = "error",
    ) -> Self:
        """Cut each feature evenly between public bounds, the same for all or one for each.

        Values beyond a bound fall into the first or the last bin.
        """
        _check_count(n_bins)
        lows, highs = (
            np.broadcast_to(np.asarray(end, dtype=float), (n_features,)) for end in (low, high)
        )
        if not (np.isfinite(lows).all() and np.isfinite(highs).all() and (lows < highs).all()):
            raise SettingsError(
                "The bounds of a feature must be finite numbers, low below high. Nothing was "
                "trained. Declare them from domain knowledge; reading them off the data would "
                "leak its extreme records."
            )
        cuts = [
            np.linspace(a, b, n_bins + 1)[1:-1].tolist() for a, b in zip(lows, highs, strict=True)
        ]
        return cls(cuts, missing=missing)

    @classmethod
    def of(cls, schema: Schema, *, n_bins: int = 16) -> Self:
        """Cut the features of `schema`: numbers by their own cuts, or evenly; others in two."""
        _check_count(n_bins)
        size = 1 / np.sqrt(len(schema.columns)) if schema.scale == "columns" else 1.0
        even, mark = np.linspace(-1, 1, n_bins + 1)[1:-1] * size, [size / 2]
        cuts: list[Any] = []
        for column in schema.columns:
            names = len(column.feature_names)
            if isinstance(column, Numeric) and not column.edges:
                cuts += [even] + [mark] * (names - 1)
            elif isinstance(column, Numeric):
                # A question about a cut is answered by a positive or a negative number.
                cuts += [[0.0]] * len(column.edges) + [mark] * (names - len(column.edges))
            else:
                cuts += [mark] * names
        return cls(cuts)

    @classmethod
    def quantiles(
        cls, public: Public | tuple[Any, Any], *, n_bins: int = 16, missing: Missing = "error"
    ) -> Self:
        """Cut each feature at the quantiles of public records."""
        _check_count(n_bins)
        X = np.asarray(Public.of(public).X, dtype=float)
        cuts: list[list[float]] = []
        for x in (column[np.isfinite(column)] for column in X.T):
            ends = np.unique(np.quantile(x, np.arange(1, n_bins) / n_bins)) if len(x) else x
            # Below a cut at the least value there would be nothing.
            cuts.append([cut for cut in ends.tolist() if cut > x.min()])
        return cls(cuts, missing=missing)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of bins of each feature."""
        return np.array(
            [len(one) + 1 + (self.missing != "error") for one in self.cuts], dtype=np.int64
        )

    @cached_property
    def splittable(self) -> NDArray[np.int64]:
        """The features that have more than one bin."""
        return np.flatnonzero(self.sizes > 1)

    @cached_property
    def candidates(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Every possible split: its feature, the last bin or the category that goes left, its kind.

        The kind is True for a split of one category against all others.
        """
        assert self.categorical is not None
        rows = []
        for feature, (size, kind) in enumerate(
            zip(self.sizes.tolist(), self.categorical, strict=True)
        ):
            # With two categories, either one against the other is the same split.
            rows += [
                (feature, bin_, kind and size > 2)
                for bin_ in range(size if kind and size > 2 else size - 1)
            ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].astype(np.bool_)

    def codes(self, X: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Return the bin of each value, (record, feature)."""
        from consilience.learners.trees.histograms import find_bins

        if X.shape[1] != len(self.cuts):
            raise SchemaMismatch(
                f"Bins are declared for {len(self.cuts)} features, and the table has "
                f"{X.shape[1]}. Nothing was computed. Declare bins for each feature, or encode "
                "the table with the study's schema."
            )
        widths = np.array([len(one) for one in self.cuts], dtype=np.int64)
        table = np.full((len(widths), max(1, widths.max())), np.nan)
        for row, one in zip(table, self.cuts, strict=True):
            row[: len(one)] = one
        out = np.empty(X.shape, dtype=np.uint8)
        find_bins(
            np.ascontiguousarray(X),
            table,
            widths,
            {"error": 0, "low": 1, "high": 2}[self.missing],
            out,
        )
        return out


def _check_count(n_bins: int) -> None:
    if not (isinstance(n_bins, int | np.integer) and 2 <= n_bins <= MOST_BINS):
        raise SettingsError(
            f"The number of bins must be a whole number from 2 to {MOST_BINS}. Got {n_bins!r} "
            "instead."
        )
