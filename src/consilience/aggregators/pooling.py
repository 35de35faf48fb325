"""PooledCounts: one forest with a public structure, whose leaves all sites fill together.

A forest of its own spends a site's budget on finding splits that other sites find again. Here the
structure comes from elsewhere: from public randomness, from public records, or from a forest that
was released anyway. A site spends all of its budget on the leaves, and the hub adds up what the
sites counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Self, Unpack, cast

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted

from consilience.aggregators.base import (
    Aggregator,
    Array,
    Charge,
    Description,
    Ensemble,
    Facts,
    Learner,
    Rebuild,
    Rows,
    Table,
    TakeApart,
    Tensors,
)
from consilience.aggregators.members import are_shares, as_members, cap_shares, joint_guarantee
from consilience.errors import ContributionRejected, SchemaMismatch, SettingsError
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import (
    PrivateForestClassifier,
    Shape,
    Task,
    TreePlan,
    are_splits,
    cap_persons,
    leaf_counts,
    owners,
    random_trees,
)
from consilience.learners.trees.leaves import Calibration, NoisyLeaves
from consilience.privacy.guarantee import Guarantee, compose
from consilience.privacy.mechanisms import Noise, Source
from consilience.tables.public import Public

# how a class' share of a leaf varies from record to record, p(1-p); for the sites' weights
CHANCE = 0.15
MOST_POWER = 1e6  # by which a file may sharpen the mean of its trees


@dataclass(frozen=True)
class Structure:
    """The trees that all sites count over: public, or released before.

    ``guarantee`` is that of the records it was grown on, None if they were public or there were
    none; ``origin`` then identifies the forest that it was taken from.
    """

    shape: Shape
    bins: Bins
    classes: tuple[Any, ...]
    guarantee: Guarantee | None = None
    origin: str | None = None

    @classmethod
    def random(
        cls,
        bins: Bins,
        classes: Sequence[Any],
        *,
        n_trees: int = 20,
        max_depth: int = 4,
        max_features: int | float | str | None = None,
        random_state: int = 0,
    ) -> Self:
        """Draw the splits from public randomness."""
        generator = check_random_state(random_state)
        shape = random_trees(bins, max_features, n_trees, max_depth, generator)
        return cls(shape, bins, tuple(classes))

    @classmethod
    def greedy(
        cls,
        public: Public | tuple[Any, Any],
        bins: Bins,
        classes: Sequence[Any],
        *,
        n_trees: int = 20,
        max_depth: int = 4,
        max_features: int | float | str | None = 0.5,
        random_state: int = 0,
    ) -> Self:
        """Grow the trees on labelled public records, exactly; promises nothing to them."""
        public = Public.of(public)
        if public.y is None:
            raise SettingsError(
                "A structure is grown on labelled public records. Got none with labels. Pass y."
            )
        forest = PrivateForestClassifier(
            epsilon=math.inf,
            n_trees=n_trees,
            max_depth=max_depth,
            max_features=max_features,
            assignment="all",
            bins=bins,
            classes=list(classes),
            random_state=random_state,
        ).fit(public.X, public.y)
        return cls(forest.shape_, bins, tuple(classes))

    @classmethod
    def of(cls, forest: PrivateForestClassifier) -> Self:
        """Take over the trees of a fitted forest, a site's or an earlier release."""
        check_is_fitted(forest)
        forest.check_unchanged()
        if isinstance(forest, PrivateLeafCounts):  # its trees are not its own
            if forest.chosen_beside_ is None:
                return cast(Self, forest.structure)
            # But which trees they are was chosen by its records, and by what others borrowed.
            cost = compose(forest.guarantee_, *forest.borrowed().values())
            return cast(
                Self, replace(forest.structure, guarantee=cost, origin=forest.fingerprint())
            )
        labels = tuple(forest.classes_.tolist())
        return cls(forest.shape_, forest.bins_, labels, forest.guarantee_, forest.fingerprint())


class PrivateLeafCounts(PrivateForestClassifier):
    """Count a site's records in the leaves of a given structure, under differential privacy.

    This is a site's part in `PooledCounts`, and also a forest by itself.

    Parameters
    ----------
    structure
        The `Structure` that all sites of the study count over.
    assignment
        ``"all"`` counts every record in every tree, at a part of the budget; ``"disjoint"`` in one,
        drawn for it, at full budget. ``"auto"``: all with a delta, disjoint without.
    epsilon, delta, prune, calibrate, neighbours, unit, records_per_person, noise
        As in `PrivateForestClassifier`.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the fitted attributes. A structure grown on records of this same site cost what its own
    guarantee says, and that comes on top. Proof: docs/guarantees/integration.md.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        structure: Structure,
        delta: float = 0.0,
        assignment: str = "auto",
        prune: bool = False,
        calibrate: bool = True,
        neighbours: str = "add-remove",
        unit: str = "record",
        records_per_person: int | None = None,
        noise: Noise | None = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            splitter="random",
            assignment=assignment,
            prune=prune,
            calibrate=calibrate,
            neighbours=neighbours,
            unit=unit,
            records_per_person=records_per_person,
            noise=noise,
        )
        self.structure = structure

    def check_settings(self) -> None:
        """Take the trees from the structure, and refuse settings that cannot work."""
        self._require("structure", isinstance(self.structure, Structure), "a Structure")
        self.bins, self.classes = self.structure.bins, list(self.structure.classes)
        self.n_trees, self.max_depth = len(self.structure.shape.feature), self.structure.shape.depth
        super().check_settings()

    def borrowed(self) -> dict[object, Guarantee]:
        """Return what growing the structure cost, unless it was public.

        A structure of unknown origin counts for each object, which may be too often, never too
        seldom.
        """
        grown = self.structure
        known = super().borrowed()
        return (
            known
            if grown.guarantee is None
            else known | {grown.origin or id(grown): grown.guarantee}
        )

    def _train(self, task: Task, plan: TreePlan, source: Source) -> None:
        task, shape = cap_persons(task, self, source), self.structure.shape
        owner = owners(task, plan.n_trees, source) if self._disjoint else None
        self.shape_ = shape
        counts = leaf_counts(task, shape, np.ones(1, np.int64), owner)
        self._release(task, plan, counts, source)


@dataclass(eq=False)
class PooledCounts(Aggregator):
    """Add up what sites counted in the leaves of one structure.

    Members are `PrivateLeafCounts` of one structure, `PrivateForestClassifier` with equal trees
    (``splitter="random"`` and one public `random_state`), or the forest that the structure was
    taken from.

    Parameters
    ----------
    weights
        ``"precision"`` lets a site count for less where its noise is large beside its records;
        ``"equal"`` adds up.
    prune
        Whether branches whose gain drowns in noise say what their root says.

    Privacy
    -------
    Each site's own guarantee, against everyone; the sum is post-processing. Where the structure was
    grown on private records and their forest is not among the members, its epsilon is added. Proof:
    docs/guarantees/integration.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> public = {"splitter": "random", "random_state": 7, "bounds": (-1, 1), "classes": [0, 1]}
    >>> members = [
    ...     cs.PrivateForestClassifier(epsilon=1.0, **public).fit(X[site::2], y[site::2])
    ...     for site in (0, 1)
    ... ]
    >>> cs.PooledCounts().combine(members).predict(X[:5]).shape
    (5,)
    """

    makes = "forest"

    weights: str = "precision"
    _: KW_ONLY
    prune: bool = False

    def __post_init__(self) -> None:
        self._require("weights", self.weights in ("precision", "equal"), "'precision' or 'equal'")

    def problem_with(self, learner: Learner, settings: Mapping[str, Any]) -> str | None:
        """Return why the sites' forests would not have the same trees, or None."""
        shared = learner is PrivateForestClassifier and settings.get("splitter") == "random"
        if shared and type(settings.get("random_state")) is int:
            return None
        return (
            "PooledCounts needs a PrivateForestClassifier with splitter='random' and a random_state"
        )

    def may_weigh(self, weights: Array) -> bool:
        """Tell whether these are shares; what is capped are the counts, not these."""
        return are_shares(weights)

    def describe(self) -> Description:
        """Return its title and what the weights mean."""
        title = "PooledCounts" if self.weights == "precision" else f"PooledCounts ({self.weights})"
        return Description(
            title,
            "The counts of all members are added up; a member's share is that of its counts.",
        )

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> PooledForest:
        """Return the forest of all `members`' counts; `public` records are not used."""
        found = as_members(members)
        forests = [_check_counts(member.learner) for member in found]
        first = forests[0]
        for other in forests[1:]:
            _check_same(first, other)
        scales = np.array(
            [_precision(forest) if self.weights == "precision" else 1.0 for forest in forests]
        )
        if not scales.any():
            scales = np.ones(len(scales))
        scales = self._capped(scales / scales.max(), forests)
        counts = sum(
            scale * forest.counts_ for scale, forest in zip(scales.tolist(), forests, strict=True)
        )
        variance = math.fsum(
            s**2 * forest.leaf_variance_ for s, forest in zip(scales.tolist(), forests, strict=True)
        )
        leaves = NoisyLeaves(first.shape_, first.bins_, np.asarray(counts), variance, self.prune)
        return PooledForest(
            shape=first.shape_,
            bins=first.bins_,
            classes=first.classes_,
            counts=leaves.counts,
            variance=variance,
            values=leaves.values,
            calibration=leaves.calibration,
            weights=_count_shares(scales, forests),
            guarantee=joint_guarantee(found),
            guarantees=tuple(member.guarantee for member in found),
        )

    def _capped(self, scales: Array, forests: Sequence[PrivateForestClassifier]) -> Array:
        """Return scales at which no member has more than its share of all counts."""
        shares = _count_shares(scales, forests)
        capped = cap_shares(shares, self.max_weight)
        return scales if capped is shares else scales * capped / np.maximum(shares, 1e-300)


def _count_shares(scales: Array, forests: Sequence[PrivateForestClassifier]) -> Array:
    """Return which part of the whole pool each member's counts are."""
    whole = np.array([max(float(forest.counts_.sum()), 1.0) for forest in forests]) * scales
    return np.asarray(whole / whole.sum())


def _check_counts(learner: object) -> PrivateForestClassifier:
    if not (isinstance(learner, PrivateForestClassifier) and hasattr(learner, "counts_")):
        raise SettingsError(
            f"A {type(learner).__name__} was given as a member, but it has no leaf counts. "
            "Nothing was combined. Pass fitted PrivateLeafCounts of one structure, or combine "
            "other members by WeightedVote."
        )
    return learner


def _check_same(first: PrivateForestClassifier, other: PrivateForestClassifier) -> None:
    one, two = first.shape_, other.shape_
    checks = {
        "bins": first.bins_ == other.bins_,
        "classes": np.array_equal(first.classes_, other.classes_),
        "number of trees or depth": first.counts_.shape == other.counts_.shape,
        "splits": np.array_equal(one.feature, two.feature) and np.array_equal(one.last, two.last),
    }
    differ = [name for name, same in checks.items() if not same]
    if differ:
        raise SchemaMismatch(
            "Counts of two members were to be added up, but they differ in their "
            f"{' and '.join(differ)}. Nothing was combined. Let all sites count over one "
            "Structure."
        )


def _precision(forest: PrivateForestClassifier) -> float:
    """Return how much a site's counts should weigh.

    With weights a the variance of a leaf's share is ∝ Σ a²(n·p(1-p) + v) / (Σ a·n)², n the site's
    records in a leaf and v its noise: least at a ∝ n / (n·p(1-p) + v). Of n the mean is taken; a
    single leaf's would be mostly noise.
    """
    n = max(float(forest.counts_.sum()), 1.0) / int(forest.counts_[..., 0].size)
    return n * CHANCE / (n * CHANCE + float(forest.leaf_variance_))


@dataclass(frozen=True)
class PooledForest(Ensemble):
    """A forest filled by all sites; predicts like a fitted scikit-learn estimator.

    ``counts`` are the weighted noisy counts (tree, leaf, class), ``variance`` that of their noise.
    Releases of earlier versions have no ``calibration``: they predict the mean of the trees.
    """

    kind: ClassVar[str] = "forest"

    shape: Shape = field(repr=False)
    bins: Bins = field(repr=False)
    classes: Array
    counts: Array = field(repr=False)
    variance: float
    values: Array = field(repr=False)
    calibration: Calibration | None = field(repr=False)
    weights: Array
    guarantee: Guarantee | None
    guarantees: tuple[Guarantee | None, ...] = field(repr=False)

    def shown_rows(self) -> Rows:
        """Return how many trees there are."""
        return [("trees", f"{len(self.values):,}, of {self.values.shape[1]:,} leaves each")]

    def to_parts(self, take_apart: TakeApart) -> tuple[Facts, Tensors]:
        """Return the trees and the classes' shares of their leaves."""
        tensors = {
            "feature": np.asarray(self.shape.feature, np.int64),
            "last": np.asarray(self.shape.last, np.int64),
            "values": np.asarray(self.values, np.float64),
        }
        if self.calibration is not None:
            tensors["calibration"] = np.array([self.calibration.power, *self.calibration.offset])
        return {"bins": self.bins.as_dict(), "n_features": len(self.bins.cuts)}, tensors

    @classmethod
    def from_parts(
        cls,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Array],
        guarantee: Guarantee,
        weights: Array,
        rebuild: Rebuild,
    ) -> Self:
        """Return the forest, if its trees are complete and look only at bins that exist."""
        bins, classes, n_features = Bins(**facts["bins"]), facts["classes"], facts["n_features"]
        feature, last, values = tensors["feature"], tensors["last"], tensors["values"]
        n_trees, n_leaves = values.shape[:2]
        found = tensors.get("calibration")
        fits = (
            values.shape == (n_trees, n_leaves, len(classes))
            and feature.shape == (n_trees, n_leaves - 1)
            and len(bins.sizes) == n_features
            and are_splits(feature, last, bins)
            and tensors.keys() <= {"feature", "last", "values", "calibration"}
            and (found is None or found.shape == (len(classes) + 1,))
            and (found is None or 0 <= found[0] <= MOST_POWER)
            and bool(((values >= 0) & (values <= 1)).all())
        )
        if not fits:
            raise ContributionRejected("tensors")
        shape, no_counts = Shape.on(bins, feature, last), np.zeros((0, 0, 0))
        labels = np.asarray(classes)
        fitted = None if found is None else Calibration(float(found[0]), found[1:])
        return cls(shape, bins, labels, no_counts, math.nan, values, fitted, weights, guarantee, ())

    def predict_proba(self, X: Table) -> Array:
        """Return each class' probability."""
        finite = True if self.bins.missing == "error" else "allow-nan"
        codes = self.bins.codes(check_array(X, dtype=np.float64, ensure_all_finite=finite))
        means = np.zeros((len(codes), len(self.classes)))
        self.shape.add_up(codes, self.values, means)
        return means if self.calibration is None else self.calibration.apply(means)

    def predict(self, X: Table) -> Array:
        """Return the most probable class for each row."""
        return np.asarray(self.classes[self.predict_proba(X).argmax(axis=1)])
