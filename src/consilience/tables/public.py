"""Public records: what aggregators and baselines may read."""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from consilience.errors import SchemaMismatch


class Features(Protocol):
    """An encoded table: what NumPy arrays and SciPy's sparse ones have in common."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of records and of features."""

    def __getitem__(self, rows: Any, /) -> Any:
        """Return some of the rows."""

    def __matmul__(self, other: Any, /) -> Any:
        """Return the product with a matrix or vector."""


@dataclass(frozen=True, eq=False)
class Public:
    """Hold records that need no protection, encoded like the sites': labelled, or without `y`.

    Privacy
    -------
    None: whatever is computed from them may be published as it is. Only data that is public anyway
    belongs here.

    Examples
    --------
    >>> import consilience as cs
    >>> public = cs.Public([[0.1, 0.2], [0.3, 0.1]], [0, 1])
    >>> public.X.shape
    (2, 2)
    """

    X: Any
    y: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.X, list | tuple):
            object.__setattr__(self, "X", np.asarray(self.X))
        if getattr(self.X, "ndim", 2) != 2 or (
            self.y is not None and len(self.y) != self.X.shape[0]
        ):
            raise SchemaMismatch(
                "Public records need a table X with one row per record and, if labelled, as many "
                "labels y. Nothing was read. Check their shapes."
            )

    @classmethod
    def of(cls, given: object) -> Self:
        """Return public records that are given as they are, or as a pair of rows and labels."""
        if isinstance(given, cls):
            return given
        if isinstance(given, tuple) and len(given) == 2:
            return cls(*given)
        raise SchemaMismatch(
            f"Public records were given as a {type(given).__name__}. Nothing was read. Pass "
            "Public(X, y), Public(X) or the pair (X, y)."
        )
