"""The sampled attack on trees: which neighbours are worst for them, and what tells them apart.

A tree releases where it splits and noisy counts in its leaves. Two pairs of tables attack them:

- *a lonely unit*: all other records lie at the lowest corner of the bins and have the first class;
  the unit lies at the highest corner and has another. Every numeric split separates them, so the
  unit's cell of the leaf counts holds nothing but the unit and noise.
- *a crowd*: half of the other records lie at the lowest corner with the first class, half at the
  highest with the second. Any split separates them perfectly, until a unit is added that is low in
  half of the features and high in the others: splits on the first half are then worse by almost as
  much as one record can change them.

The attacker knows every record but the unit, and the plan. From the released shape it follows which
cells the unit would be counted in, and weighs what it sees there by the log-likelihood ratio of the
planned noise. Any such weighing gives a valid attack; a good one makes it strong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from consilience.auditing.attacked import Learner, Table, records_per_unit
from consilience.auditing.sampled import Attack, make_attacks
from consilience.learners.base import Plan
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.forest import (
    PrivateForestClassifier,
    Shape,
    TreeLearner,
    TreePlan,
    declared_bins,
)
from consilience.privacy.accounting import DiscreteGaussian

Array = NDArray[np.float64]
Codes = NDArray[Any]
Trees = PrivateForestClassifier | PrivateAdaBoostClassifier
FEATURES = 2  # of tables for learners whose bins do not say how many there are


@make_attacks.register(TreeLearner)
def _(twin: TreeLearner, n_records: int) -> Sequence[Attack]:
    """Return the two pairs of neighbours on which trees are attacked."""
    if twin.get_params()["classes"] is None:
        twin.set_params(classes=[0, 1])
    low, high = _corners(twin)
    # A lonely unit, far from all others.
    first_class = np.zeros(n_records - 1, dtype=np.int64)
    lonely = _Scene(twin, np.tile(low, (n_records - 1, 1)), first_class, high)
    # A unit that spoils splits on half of the features.
    second = np.arange(n_records - 1) % 2
    spoilt = np.arange(len(low)) < max(1, len(low) // 2)
    crowd = np.where(second[:, None] == 1, high, low)
    mixed = _Scene(twin, crowd, second, np.where(spoilt, low, high), spoilt)
    return [
        lonely.attack("a unit far from all other records"),
        mixed.attack("a unit that spoils half of the splits"),
    ]


class _Scene:
    """Known records, and one unit that is present or not, or has another class."""

    def __init__(
        self, twin: TreeLearner, X: Array, labels: Codes, unit: Array, spoilt: Codes | None = None
    ) -> None:
        settings = twin.get_params(deep=False)
        self.classes = np.asarray(settings["classes"])
        self.X, self.labels, self.unit = X, labels, unit
        self.by_person = twin.unit == "person"
        self.moved = records_per_unit(twin)  # records of the unit
        self.present = len(self.classes) - 1  # the unit's class
        self.instead = 0 if twin.neighbours == "replace-one" else None  # in the other table
        if self.instead is not None and len(self.classes) > 2:
            self.instead = 1
        bins = declared_bins(twin, X.shape[1])
        self.unit_codes = bins.codes(unit[None])[0]
        # Equal records are counted together.
        rows = np.column_stack([bins.codes(X), labels])
        self.rows, self.sizes = np.unique(rows, axis=0, return_counts=True)
        self.spoilt = np.zeros(X.shape[1], dtype=bool) if spoilt is None else spoilt

    def attack(self, name: str) -> Attack:
        """Return the attack on the table with the unit and on its neighbour."""
        other = "its absence" if self.instead is None else "the same with another class"
        sides = [self._table(self.present), self._table(self.instead)]
        return Attack(sides[0], sides[1], self.read, f"{name} against {other}")

    def _table(self, code: int | None) -> Table:
        moved = 0 if code is None else self.moved
        X = np.vstack([np.tile(self.unit, (moved, 1)), self.X])
        labels = np.concatenate([np.full(moved, code or 0), self.labels])
        persons = np.concatenate([np.zeros(moved, int), np.arange(1, len(self.X) + 1)])
        return Table(X, self.classes[labels], persons if self.by_person else None)

    def read(self, learner: Learner, plan: Plan) -> Array:
        """Return what an attacker looks at: log-likelihood ratios, and the released size."""
        assert isinstance(plan, TreePlan)
        assert isinstance(learner, PrivateForestClassifier | PrivateAdaBoostClassifier)
        leaves = self._weigh_leaves(learner, plan)
        roots = -self.spoilt[learner.shape_.feature[:, 0]].astype(float)
        if plan.selections:
            reach = plan.selections[0].sensitivity * (1 if self.instead is None else 2)
            roots *= reach / plan.selections[0].scale
        both = leaves + roots
        # Where every tree sees all records, the ratios of trees add up. Where the unit is in one
        # unknown tree, the likelihoods are averaged.
        mixed = special.logsumexp(both) - np.log(len(both))
        return np.array([both.sum(), mixed, leaves.sum(), roots.sum(), learner.public_size_])

    def _weigh_leaves(self, learner: Trees, plan: TreePlan) -> Array:
        """Return, for each tree, the log-likelihood ratio of the counts in the unit's cells."""
        shape, counts = learner.shape_, learner.counts_
        trees, leaves = np.arange(len(counts)), _find_leaves(shape, self.unit_codes)
        # In a forest of disjoint trees each record is in one of them; what is expected is known.
        share = 1.0 if plan.n_trees <= plan.events[0].times else 1 / plan.n_trees  # type: ignore[attr-defined]
        ratio = np.zeros(len(counts))
        for code, sign in ((self.present, 1), (self.instead, -1)):
            if code is None:
                continue
            seen = counts[trees, leaves, code].astype(float)
            for row, size in zip(self.rows, self.sizes, strict=True):
                if row[-1] == code:
                    theirs = _find_leaves(shape, row[:-1])
                    weight = _record_weights(learner, plan, theirs, code)
                    seen -= (theirs == leaves) * size * weight * share
            moved = self.moved * _record_weights(learner, plan, leaves, code)
            ratio += sign * _log_ratio(seen, moved, plan)
        return ratio


def _record_weights(learner: Trees, plan: TreePlan, leaves: Codes, code: int) -> Array:
    """Return what a record of a class adds to its leaf in each tree.

    In boosting a record weighs min(1, exp(-margin)), where the margin is by the trees before.
    """
    if isinstance(learner, PrivateForestClassifier):
        return np.ones(len(leaves))
    said = learner.values_[np.arange(len(leaves)), leaves]
    scores = np.cumsum(said, axis=0) - said
    others = np.delete(scores, code, axis=1).max(axis=1)
    return np.asarray(np.floor(plan.grain * np.exp(-np.maximum(scores[:, code] - others, 0.0))))


def _log_ratio(seen: Array, moved: Array, plan: TreePlan) -> Array:
    """Return ln P(seen | the unit's records are counted) - ln P(seen | they are not)."""
    event = plan.leaves
    assert event is not None
    if isinstance(event, DiscreteGaussian):
        return np.asarray((seen**2 - (seen - moved) ** 2) / (2 * event.sigma**2))
    return np.asarray((np.abs(seen) - np.abs(seen - moved)) / event.scale)


def _find_leaves(shape: Shape, codes: Codes) -> Codes:
    """Return the leaf of one record in each tree; written independently of the learner's code."""
    trees, node = np.arange(len(shape.feature)), np.zeros(len(shape.feature), dtype=np.int64)
    for _ in range(shape.depth):
        code, last = codes[shape.feature[trees, node]], shape.last[trees, node]
        left = np.where(shape.single[trees, node], code == last, code <= last)
        node = 2 * node + np.where(left, 1, 2)
    return np.asarray(node - (2**shape.depth - 1))


def _corners(twin: TreeLearner) -> tuple[Array, Array]:
    """Return the records in the lowest and in the highest bin of every feature."""
    bounds = twin.get_params()["bounds"]
    n_features = len(bounds) if np.ndim(bounds) == 2 else FEATURES
    cuts = declared_bins(twin, n_features).cuts
    low = np.array([feature[0] - 1 if len(feature) else 0.0 for feature in cuts])
    high = np.array([feature[-1] + 1 if len(feature) else 0.0 for feature in cuts])
    return low, high
