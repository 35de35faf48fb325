"""LeafCounts: how many records of each class are in each leaf of public trees, over all sites.

The trees are drawn from public randomness or grown on public records, so that all of the budget is
spent on what their leaves say. Proofs: docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from sklearn.utils import check_random_state

from consilience.aggregators.members import dense
from consilience.aggregators.pooling import PooledForest, Structure
from consilience.errors import SettingsError
from consilience.learners.base import is_count
from consilience.learners.erm import Chunks
from consilience.learners.trees.binned import BLOCK_RECORDS, TreeTask
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import (
    MOST_LEVELS,
    MOST_TREES,
    Shape,
    are_splits,
    leaf_counts,
    random_trees,
)
from consilience.learners.trees.leaves import NoisyLeaves
from consilience.privacy.guarantee import Neighbours
from consilience.statistics.base import Adder, Array, ClassStatistic, Summed, add_public
from consilience.statistics.label_tables import COUNT_BITS
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

MOST_SEED = 2**32 - 1

Trees = Sequence[Sequence[Sequence[int]]]  # the features of all splits, then their last bins


@dataclass(frozen=True)
class AddLeaves:
    """Count records by tree, leaf and class."""

    bins: Bins
    shape: Shape
    n_classes: int

    def __call__(self, chunks: Chunks) -> Array:
        """Return the sum in whole grains."""
        n_leaves = 2**self.shape.depth
        total = np.zeros((len(self.shape.feature), n_leaves, self.n_classes), np.int64)
        one = np.ones(1, np.int64)
        for X, y in chunks:
            for start in range(0, len(y), BLOCK_RECORDS):
                rows = np.asarray(dense(X[start : start + BLOCK_RECORDS]), np.float64)
                labels = np.asarray(y[start : start + BLOCK_RECORDS], np.int64)
                task = TreeTask(self.bins.codes(rows), labels, self.n_classes)
                total += leaf_counts(task, self.shape, one)
        return total.ravel() << COUNT_BITS


def trees_from(structure: Structure) -> list[list[list[int]]]:
    """Return the trees of a public structure as a study can name them in `trees`.

    `Structure.greedy(public, Bins.of(schema), classes)` grows one on labelled public records.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> from consilience.aggregators.pooling import Structure
    >>> bins = cs.Bins.even(-1, 1, n_features=3, n_bins=8)
    >>> structure = Structure.greedy(cs.Public(X, y), bins, [0, 1], n_trees=2, max_depth=2)
    >>> len(cs.trees_from(structure))
    2
    """
    if structure.guarantee is not None:
        raise SettingsError(
            "The structure was grown on private records, and the guarantee of counts in it says "
            "nothing of them. Nothing was done. Use Structure.random or Structure.greedy."
        )
    return [structure.shape.feature.tolist(), structure.shape.last.tolist()]


@dataclass(eq=False, repr=False, kw_only=True)
class LeafCounts(ClassStatistic):
    """Count classes in the leaves of public trees: a forest that all sites fill together.

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    n_trees, max_depth, max_features, random_state
        Trees that are drawn from public randomness: how many, how deep, on how many features each
        may split, and the seed.
    trees
        Trees that are given instead, from `trees_from`: one list of the features of all trees'
        splits and one of the last bins that go left.
    bins
        Public cut points of each feature. A schema decides them.
    prune
        Whether branches whose gain drowns in noise say what their root says.
    classes, neighbours, unit, schema, noise
        As in `Moments`.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the counts. The trees must be public. Proof: docs/guarantees/statistics.md.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> counted = cs.LeafCounts(epsilon=1.0, delta=1e-6, schema=schema, n_trees=5).fit(table)
    >>> forest = cs.Total().combine([counted])
    >>> forest.predict(schema.transformer().transform({"age": [10, 90]})).tolist()
    ['no', 'yes']
    """

    makes = PooledForest.kind
    grain: ClassVar[float] = 2.0**-COUNT_BITS
    never_opposite: ClassVar[bool] = True
    study_decides: ClassVar[frozenset[str]] = frozenset(("bins",))
    shorthand = "leaf-counts"

    n_trees: int = 20
    max_depth: int = 4
    max_features: int | float | None = None
    random_state: int = 0
    trees: Trees | None = None
    bins: Bins | None = None
    prune: bool = False

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides, the bins among them."""
        return {**super().declared_by(schema), "bins": Bins.of(schema)}

    @property
    def holds(self) -> str:
        """What it counts."""
        return "counts of classes in the leaves of public trees"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        self._require("bins", isinstance(self.bins, Bins), "Bins: pass schema=..., or Bins(...)")
        self._require(
            "n_trees", is_count(self.n_trees, MOST_TREES), f"a whole number to {MOST_TREES:,}"
        )
        self._require(
            "max_depth", is_count(self.max_depth, MOST_LEVELS), f"a whole number to {MOST_LEVELS}"
        )
        wish = self.max_features
        part = isinstance(wish, float) and 0 < wish <= 1
        must = "None, a number of features or a part of them"
        self._require("max_features", wish is None or part or is_count(wish), must)
        seed = type(self.random_state) is int and 0 <= self.random_state <= MOST_SEED
        self._require("random_state", seed, f"a whole number from 0 to {MOST_SEED}")
        must = "what trees_from returned, for the same bins"
        self._require("trees", self.trees is None or self._given() is not None, must)
        known = getattr(self, "n_features_in_", None)
        if known not in (None, len(self._bins.cuts)):
            raise SettingsError(
                f"The 'bins' of LeafCounts are for {len(self._bins.cuts)} features, and the table "
                f"has {known}. Nothing was trained. Use the schema that encoded it."
            )

    @property
    def _bins(self) -> Bins:
        assert isinstance(self.bins, Bins)
        return self.bins

    def _given(self) -> Shape | None:
        """Return the trees of the settings; None if they are none."""
        try:
            feature, last = (np.asarray(part) for part in self.trees or ())
            fits = 1 <= len(feature) <= MOST_TREES and are_splits(feature, last, self._bins)
        except (TypeError, ValueError, IndexError):
            return None
        return Shape.on(self._bins, feature, last) if fits else None

    @property
    def shape(self) -> Shape:
        """The trees."""
        if self.trees is not None:
            given = self._given()
            assert given is not None
            return given
        generator = check_random_state(self.random_state)
        wish, depth = self.max_features, int(self.max_depth)
        return random_trees(self._bins, wish, int(self.n_trees), depth, generator)

    @property
    def _size(self) -> tuple[int, int]:
        """How many trees and leaves there are."""
        if self.trees is not None:
            n_trees, n_splits = np.shape(self.trees[0])
            return n_trees, n_splits + 1
        return int(self.n_trees), 2 ** int(self.max_depth)

    @property
    def fixed_features(self) -> int | None:
        """How many features the bins are for."""
        return len(self._bins.cuts)

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return math.prod(self._size) * self.n_classes

    def weights(self) -> Array:
        """Return 1 for each count."""
        return np.ones(self.length)

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes the counts: one in each tree."""
        moved = 2 if neighbours is Neighbours.REPLACE_ONE else 1
        return math.sqrt(moved * self._size[0])

    def adder(self) -> Adder:
        """Return the function that adds up records."""
        self.check_settings()  # now that the number of features is known
        return AddLeaves(self._bins, self.shape, self.n_classes)

    def finish(self, total: Summed, public: Public | None = None) -> PooledForest:
        """Return the forest; labelled public records are counted in."""
        values = total.values if public is None else total.values + add_public(self, public)
        counts = values.reshape(*self._size, self.n_classes)
        variance = float(total.variance[0])
        leaves = NoisyLeaves(self.shape, self._bins, counts, variance, self.prune)
        return PooledForest(
            shape=leaves.shape,
            bins=leaves.bins,
            classes=self.classes_,
            counts=leaves.counts,
            variance=variance,
            values=leaves.values,
            calibration=leaves.calibration,
            weights=np.ones(1),
            guarantee=None,
            guarantees=(),
        )
