"""Private trees and forests: splits are drawn at random, leaf counts are noisy.

A tree is complete, of a declared depth, and cut at public places. Its splits are drawn level by
level by the exponential mechanism on the Gini impurity, and its leaves hold noisy whole numbers.
Everything that users see (probabilities, pruning, importances) is computed from these. The nodes of
a level share no record, so a level costs as much as one node. Proofs: docs/guarantees/trees.md.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import ClassifierMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted

from consilience.errors import ContributionRejected, SettingsError
from consilience.learners.base import (
    Choices,
    PrivateLearner,
    Rows,
    State,
    StateCheck,
    is_count,
    is_positive,
)
from consilience.learners.implied import ROUNDING, UNLIKELY, Bound, Implied
from consilience.learners.inputs import (
    READ_LABELS,
    as_chunks,
    check_count,
    check_persons,
    check_values,
    chunk_classes,
    declared_classes,
    label_codes,
    read_chunks,
    read_classes,
    validate_records,
    validate_table,
    warn_of_far_values,
)
from consilience.learners.trees.binned import FiledTask, Part, TreeTask
from consilience.learners.trees.bins import MOST_BINS, Bins
from consilience.learners.trees.leaves import NoisyLeaves, node_counts, probabilities, purity
from consilience.privacy.accounting import (
    Composed,
    DiscreteGaussian,
    Event,
    Laplace,
    Selection,
    zcdp_rho,
)
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.mechanisms import (
    Noise,
    Source,
    gaussian_counts,
    laplace_counts,
    select_many,
)
from consilience.privacy.vector_noise import RADIUS_PROBABILITY, public_sum
from consilience.tables.encoding import SEEN
from consilience.tables.groups import cap_records
from consilience.tables.schema import Schema

Array = NDArray[Any]
Task = TreeTask | FiledTask
RandomState = Any  # as scikit-learn takes it: None, a whole number or a generator


class Generator(Protocol):
    """The draws of public randomness that trees need, as of `check_random_state`."""

    def randint(self, low: int, high: int, size: int) -> Array:
        """Return whole numbers in [low, high)."""

    def uniform(self, *, size: int) -> Array:
        """Return numbers in [0, 1)."""

    def permutation(self, n: int) -> Array:
        """Return the numbers below `n` in random order."""


# What `n_trees` and `max_depth` may name: today's rule, and that which version 0.1 called "auto".
RULES = ("auto", "first")
MOST_LEVELS = 16
MOST_TREES = 1 << 14  # in a file, and so in a training
# The epsilon of a level over that of the level above, whose nodes hold twice as many records.
GROWTH = 2 ** (1 / 3)
DRAWN = 1 << 20  # records whose trees are drawn at once
# Counts held at once; a level that needs more is counted in several passes, some trees in each.
MOST_COUNTS = 1 << 25
MOST_COUNTED = 1 << 60  # below which counts in files, and their sums, must be
MARGIN = 1 - 1e-12  # the share of the budget that is planned, so that rounding cannot exceed it


@dataclass(frozen=True)
class TreePlan:
    """What one tree draws: a selection for each level, and noise on its leaves."""

    selections: tuple[Selection, ...]
    leaves: Laplace | DiscreteGaussian | None
    events: tuple[Event, ...]
    depth: int
    grain: int = 1  # a record's greatest weight, in the whole numbers that are counted
    n_trees: int = 1
    at_random: bool = False  # whether splits come from public randomness

    @property
    def leaf_variance(self) -> float:
        """Variance of the noise in a leaf's count of one class, in records."""
        if self.leaves is None:
            return 0.0
        scale = (
            self.leaves.sigma
            if isinstance(self.leaves, DiscreteGaussian)
            else math.sqrt(2) * self.leaves.scale
        )
        return (scale / self.grain) ** 2


def plan_trees(
    learner: TreeLearner,
    *,
    depth: int,
    runs: int,
    share: float | None = None,
    grain: int = 1,
    n_trees: int = 1,
) -> TreePlan:
    """Divide the budget over the levels and leaves of `runs` trees that see the same records.

    Splits get that `share` of it, or what the learner's setting says; without one they are random.
    """
    if math.isinf(learner.epsilon):
        return TreePlan((), None, (), depth, grain, n_trees, at_random=share == 0)
    replaced = learner.neighbours == "replace-one"
    who: dict[str, Any] = {"unit": Unit(learner.unit), "neighbours": Neighbours(learner.neighbours)}
    cap = int(learner.records_per_person or 1) if learner.unit == "person" else 1
    share = float(learner.split_share) if share is None else share
    growth = GROWTH ** np.arange(depth if share else 0)
    asked, delta = float(learner.epsilon) * MARGIN, float(learner.delta)
    leaves: Laplace | DiscreteGaussian
    if delta > 0:
        rho = zcdp_rho(epsilon=asked, delta=delta) / runs * MARGIN
        budgets = np.sqrt(8 * share * rho * growth**2 / max(1.0, (growth**2).sum()))
        moved = cap * grain * (math.sqrt(2) if replaced else 1.0)
        sigma = moved / math.sqrt(2 * (1 - share) * rho)
        leaves = DiscreteGaussian(sensitivity=moved, sigma=sigma, at_delta=delta, **who)
    else:
        epsilon = asked / runs
        budgets = share * epsilon * growth / max(1.0, growth.sum())
        moved = cap * grain * (2.0 if replaced else 1.0)
        leaves = Laplace(sensitivity=moved, scale=moved / ((1 - share) * epsilon), **who)
    n_counts = n_trees * 2**depth << 12  # of as many classes as a file can name
    noise = public_sum(leaves, n_counts, probability=RADIUS_PROBABILITY)
    if noise > MOST_COUNTED / 2:
        raise SettingsError(
            f"The noise of a {type(learner).__name__} with these settings would be wider than any "
            "count that a file can hold. Nothing was trained or charged. Ask for a larger epsilon, "
            "or fewer or smaller trees, or let a person count with fewer records."
        )
    # A record that is added raises the impurity of every split by 0 to 2. One that is replaced may
    # raise some and lower others.
    facts: dict[str, Any] = {
        "sensitivity": 2.0 * cap,
        "monotone": "no" if replaced else "yes",
        **who,
    }
    reach = 2.0 * cap * (2 if replaced else 1)
    selections = tuple(Selection(scale=reach / budget, **facts) for budget in budgets.tolist())
    whole = Composed(parts=(*selections, leaves), times=runs, at_delta=delta, **who)
    return TreePlan(selections, leaves, (whole,), depth, grain, n_trees, at_random=share == 0)


@dataclass(frozen=True)
class Shape:
    """Where trees split, as arrays (tree, inner node).

    ``feature``, the ``last`` bin (or the one category) that goes left, and whether it is a
    ``single`` category.
    """

    feature: NDArray[np.int64]
    last: NDArray[np.int64]
    single: NDArray[np.bool_]

    @classmethod
    def on(cls, bins: Bins, feature: Array, last: Array) -> Self:
        """Return splits whose kind follows from `bins`."""
        categories = np.asarray(bins.categorical) & (bins.sizes > 2)
        return cls(feature, last, categories[feature])

    @property
    def depth(self) -> int:
        """Number of splits from the root to a leaf."""
        return int(self.feature.shape[1] + 1).bit_length() - 1

    def add_up(self, codes: Array, values: Array, out: Array) -> Array:
        """Add `values` (tree, leaf, class) of each record's leaves to `out` (record, class)."""
        from consilience.learners.trees.histograms import add_leaves

        add_leaves(codes, self.feature, self.last, self.single, values, out)
        return out


def are_splits(feature: Array, last: Array, bins: Bins) -> bool:
    """Tell whether arrays from a file (tree, inner node) are complete trees on existing bins."""
    n_leaves = feature.shape[1] + 1
    depth = n_leaves.bit_length() - 1
    return bool(
        feature.dtype == last.dtype == np.int64
        and feature.shape == last.shape
        and 1 <= depth <= MOST_LEVELS
        and n_leaves == 2**depth
        and feature.min() >= 0
        and feature.max() < len(bins.sizes)
        and last.min() >= 0
        and not (last >= bins.sizes[feature]).any()
    )


def candidates_of(bins: Bins, features: Array) -> tuple[Array, Array, Array, Array]:
    """Return the possible splits on `features`: feature, its index there, last bin, kind."""
    feature, last, single = bins.candidates
    kept = np.isin(feature, features)
    if not kept.any():
        raise no_cuts()
    return feature[kept], np.searchsorted(features, feature[kept]), last[kept], single[kept]


def no_cuts() -> SettingsError:
    """Return the error for bins at which no tree can split."""
    return SettingsError(
        "No feature has a cut to split at. Nothing was trained. Declare bins that have cuts."
    )


def random_trees(
    bins: Bins, wish: int | float | str | None, n_trees: int, depth: int, generator: Generator
) -> Shape:
    """Draw splits from public randomness: a tree's features, then for each split one of its cuts.

    `wish` says how many features a tree may split on, as in `some_features`.
    """
    trees = []
    for _ in range(n_trees):
        features = some_features(wish, bins.splittable, generator)
        feature, _, last, single = candidates_of(bins, features)
        kinds, start, width = np.unique(feature, return_index=True, return_counts=True)
        which = generator.randint(0, len(kinds), 2**depth - 1)
        step = np.floor(generator.uniform(size=len(which)) * width[which]).astype(np.int64)
        at = start[which] + step
        trees.append(Shape(feature[at][None], last[at][None], single[at][None]))
    return stack_trees(trees)


@dataclass(frozen=True)
class Dealt:
    """The records that trees are grown on: each iteration of `parts` goes through all of them.

    ``weight`` is one weight for all records, or one for each.
    """

    parts: Callable[[], Iterator[Part]]
    n_classes: int
    weight: NDArray[np.int64]

    @classmethod
    def of(
        cls, task: Task, n_trees: int, weight: NDArray[np.int64], owner: Array | None = None
    ) -> Self:
        """Give each tree the records that it owns or, without `owner`, all of them."""
        return cls(task.passes(owner, n_trees), task.n_classes, weight)


def grow(
    dealt: Dealt, plan: TreePlan, bins: Bins, features: Sequence[Array], source: Source
) -> tuple[Shape, NDArray[np.int64]]:
    """Draw the splits of one tree for each of `features`, and return them and exact leaf counts.

    All trees go through the records together, once for each level and once for the leaves.
    """
    from consilience.learners.trees.histograms import STEPS, count, impurities

    options = [candidates_of(bins, some) for some in features]
    n_inner = 2**plan.depth - 1
    shape = Shape(
        *(np.zeros((len(features), n_inner), kind) for kind in (np.int64, np.int64, np.bool_))
    )
    sizes = [(len(some), int(bins.sizes[some].max()), dealt.n_classes) for some in features]
    for level in range(plan.depth):
        here = slice(2**level - 1, 2 ** (level + 1) - 1)
        together = max(1, MOST_COUNTS // (2**level * max(math.prod(size) for size in sizes)))
        for first in range(0, len(features), together):
            group = range(first, min(first + together, len(features)))
            counts = {tree: np.zeros((2**level, *sizes[tree]), np.int64) for tree in group}
            for part in dealt.parts():
                if part.tree in counts:
                    send_down(part, shape, level)
                    count(
                        part.codes,
                        part.y,
                        dealt.weight,
                        part.node,
                        features[part.tree],
                        counts[part.tree],
                    )
            for tree in group:
                feature, place, last, single = options[tree]
                steps = np.empty((2**level, len(feature)), np.int64)
                impurities(counts[tree], place, last, single, steps)
                if plan.selections:
                    chosen = select_many(
                        steps, STEPS * plan.grain, event=plan.selections[level], source=source
                    )
                else:
                    chosen = steps.argmin(axis=1)
                shape.feature[tree, here], shape.last[tree, here] = feature[chosen], last[chosen]
                shape.single[tree, here] = single[chosen]
    return shape, _count_leaves(dealt, shape)


def leaf_counts(
    task: Task, shape: Shape, weight: Array, owner: Array | None = None
) -> NDArray[np.int64]:
    """Count the records of each class in each leaf of each tree."""
    return _count_leaves(Dealt.of(task, len(shape.feature), weight, owner), shape)


def _count_leaves(dealt: Dealt, shape: Shape) -> NDArray[np.int64]:
    from consilience.learners.trees.histograms import count_leaves

    counts = np.zeros((len(shape.feature), 2**shape.depth, dealt.n_classes), np.int64)
    for part in dealt.parts():
        send_down(part, shape, shape.depth)
        count_leaves(part.y, dealt.weight, part.node, counts[part.tree])
    return counts


def send_down(part: Part, shape: Shape, level: int) -> None:
    """Send the records of a tree down to their nodes at `level`."""
    from consilience.learners.trees.histograms import descend

    tree = part.tree
    for above in range(part.level, level):
        descend(
            part.codes, shape.feature[tree], shape.last[tree], shape.single[tree], above, part.node
        )
    part.level = level


def add_noise(counts: NDArray[np.int64], plan: TreePlan, source: Source) -> NDArray[np.int64]:
    """Return leaf counts with the noise that was planned."""
    if isinstance(plan.leaves, DiscreteGaussian):
        return gaussian_counts(counts, event=plan.leaves, source=source)
    return (
        counts if plan.leaves is None else laplace_counts(counts, event=plan.leaves, source=source)
    )


def declared_bins(learner: TreeLearner, n_features: int) -> Bins:
    """Return the learner's bins, or even ones between its bounds for all columns or for each."""
    if isinstance(learner.bins, Bins):
        return learner.bins
    try:
        shape = np.asarray(learner.bounds, dtype=float).shape
    except (TypeError, ValueError):
        shape = ()
    if learner.bounds is None or shape not in ((2,), (n_features, 2)):
        absent = learner.bounds is None
        problem = "missing" if absent else "neither one (low, high) nor one for each column"
        raise SettingsError(
            f"{type(learner).__name__} cuts features between declared bounds, and 'bounds' is "
            f"{problem}. "
            "Nothing was trained or charged. Pass schema=schema, or bounds=(low, high) from domain "
            "knowledge, or bins=Bins(...). Bounds computed from the data would leak its extreme "
            "records."
        )
    low, high = np.asarray(learner.bounds, dtype=float).T
    return Bins.even(low, high, n_features=n_features, n_bins=learner.bins)


def _write_bins(
    learner: TreeLearner, source: Any, bins: Bins, held: Array, *, finite: bool
) -> FiledTask:
    """Read chunks once, checking every record, and keep their bins in a file."""
    task = FiledTask(source.n_features, len(held), getattr(source, "progress", None))
    owner = type(learner).__name__
    for X, y in read_chunks(owner, source.n_features, source.chunks()):
        check_values(owner, X, finite=finite)
        rows: Any = X
        codes = bins.codes(rows.toarray() if sparse.issparse(X) else X)
        task.append(codes, label_codes(owner, held, y))
    check_count(learner, source, task.n_records)
    return task


def cap_persons(task: Task, learner: TreeLearner, source: Source) -> Task:
    """Drop, at random, the records of a person beyond the declared cap."""
    if isinstance(task, FiledTask) or task.persons is None:
        return task
    keep = cap_records(
        task.persons, int(learner.records_per_person or 1), source.uniform(len(task.y))
    )
    return replace(task, codes=task.codes[keep], y=task.y[keep], persons=task.persons[keep])


@dataclass(eq=False, repr=False, kw_only=True)
class TreeLearner(ClassifierMixin, PrivateLearner[Task, TreePlan]):  # type: ignore[misc]
    """What tree learners share: how they fit, predict and keep what was released."""

    default_neighbours: ClassVar[str] = "add-remove"
    state_check: ClassVar[StateCheck] = "rows"  # a row of each array is one tree
    study_decides: ClassVar[frozenset[str]] = frozenset(("bins", "bounds"))
    untunable: ClassVar[str | None] = None
    named_features: ClassVar[tuple[str, ...]] = ("sqrt",)  # values of max_features

    epsilon: float
    delta: float = 0.0
    max_depth: int | str = "auto"
    max_features: int | float | str | None = None
    split_share: float | str = 0.5
    bins: int | Bins = 16
    bounds: ArrayLike | None = None
    classes: ArrayLike | None = None
    neighbours: str = "add-remove"
    unit: str = "record"
    records_per_person: int | None = None
    random_state: RandomState = None
    schema: Schema | None = None
    noise: Noise | None = None

    classes_: Array = field(init=False)
    bins_: Bins = field(init=False)
    shape_: Shape = field(init=False)
    counts_: NDArray[np.int64] = field(init=False)
    values_: Array = field(init=False)
    public_size_: int = field(init=False)

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[Task, list[str]]:
        """Check settings and data; return the task and the guarantee's assumptions.

        The bins of a table in chunks are kept in a temporary file that is removed after training.
        """
        self.check_settings()
        classes, assumptions, source = declared_classes(self), [], as_chunks(X, y)
        missing = isinstance(self.bins, Bins) and self.bins.missing != "error"
        if source is not None:
            classes, held = chunk_classes(self, source, persons)
        else:
            finite = "allow-nan" if missing else True
            X, labels = validate_records(self, X, y, accept_sparse=False, ensure_all_finite=finite)
            # Declared classes say what a label may be: what else could be said of labels would
            # depend on the records.
            if classes is None:
                classes = read_classes(labels)
                assumptions.append(READ_LABELS)
        bins = declared_bins(self, self.n_features_in_)
        if not len(bins.splittable):
            raise no_cuts()
        if source is None and self.bounds is not None:
            low, high = np.asarray(self.bounds, dtype=float).T
            some = X[:: max(1, len(X) // SEEN)]
            warn_of_far_values(self, some, low, high, "values are beyond 'bounds'")
        task: Task
        if source is not None:
            task = _write_bins(self, source, bins, held, finite=not missing)
        else:
            ids = check_persons(self, persons, len(labels))
            whose = None if ids is None else np.unique(ids, return_inverse=True)[1]
            codes = label_codes(type(self).__name__, classes, labels).astype(np.int64)
            task = TreeTask(bins.codes(X), codes, len(classes), whose)
        self.classes_, self.bins_ = classes, bins
        return task, assumptions

    def n_released(self, n_classes: int) -> int:
        """Return how many counts all leaves have, in as many trees as were asked for."""
        self.check_settings()  # a study asks this before anybody is charged
        asked = zip((getattr(self, "n_trees", 1), self.max_depth), MOST_SUGGESTED, strict=True)
        trees, depth = (most if isinstance(wish, str) else int(wish) for wish, most in asked)
        return trees * int(2**depth) * max(1, n_classes)

    def implied(self, shapes: Mapping[str, Sequence[int]]) -> Implied:
        """Return the noise that was planned for trees of this shape, and bounds on their counts.

        A count is not below zero by more than its noise, nor above the number of records, which is
        the public one, or differs from it by the noise of all counts together.
        """
        self.check_settings()
        size = getattr(self, "public_size_", 0)
        if not is_count(size):
            raise ContributionRejected("size")
        form = (*shapes.get("counts", ()), 0, 0)
        plan = self._public_plan(form[0], max(1, form[1]).bit_length() - 1)
        counts = (plan.n_trees, 2**plan.depth, len(self.classes_))
        inner, one = (plan.n_trees, 2**plan.depth - 1), plan.grain
        n_counts = math.prod(counts)
        each = public_sum(plan.leaves, 1, probability=UNLIKELY / n_counts)
        every = public_sum(plan.leaves, n_counts, probability=UNLIKELY)
        low, high = self._totals(plan, int(size), every)
        return Implied(
            plan.events,
            {
                "feature": Bound(inner),
                "last": Bound(inner),
                "counts": Bound(
                    counts,
                    low=-each - 1,
                    high=one * (int(size) + 1) + every + each,
                    total=(low - every - 1, high + every + 1),
                ),
                "size": Bound((), low=int(size), high=int(size)),
                **self._bounds(plan, counts),
            },
        )

    def planned(self, size: int) -> Sequence[Event]:
        """Return what a fit on so many records or persons draws, by public facts alone."""
        self.check_settings()
        self.public_size_ = size
        return self._public_plan(1, 1).events

    @classmethod
    def for_schema(cls, schema: Schema, *, n_bins: int = 16, **settings: Any) -> Self:
        """Return an unfitted learner for tables of `schema`, cut into `n_bins` by its bounds."""
        learner = super().for_schema(schema, bins=Bins.of(schema, n_bins=n_bins), **settings)
        learner.check_settings()
        return learner

    def adopt_schema(self) -> None:
        """Take classes, unit and cuts from the schema."""
        super().adopt_schema()
        if isinstance(self.schema, Schema) and is_count(self.bins, MOST_BINS) and self.bins != 1:
            self.bins = Bins.of(self.schema, n_bins=cast(int, self.bins))

    def check_schema(self) -> None:
        """Refuse bounds beside a schema, and what else contradicts it."""
        super().check_schema()
        if self.schema is not None:
            self._require("bounds", self.bounds is None, "left out beside a schema, which has them")
            fits = isinstance(self.bins, Bins)
            self._require("bins", fits, f"a whole number from 2 to {MOST_BINS}, or Bins")

    def describe_state(self, schema: Schema) -> str:
        """Say what leaves a site."""
        return "the splits of trees and noisy counts in their leaves"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        self._check_privacy(("trees",))
        self._check_random_state()
        need, depth = self._require, self.max_depth
        fits = depth in RULES or (is_count(depth) and int(depth) <= MOST_LEVELS)
        need("max_depth", fits, f"a whole number from 1 to {MOST_LEVELS}, or 'auto'")
        size = getattr(self, "public_size", None)
        need("public_size", size is None or is_count(size), "None or a whole number >= 1")
        self._check_split_share()
        share, named = self.max_features, self.named_features
        fits = share in (None, *named) or (is_count(share) or (is_positive(share) and share <= 1))  # type: ignore[operator]
        words = ", ".join(map(repr, named))
        need("max_features", fits, f"a whole number >= 1, a share in (0, 1], {words} or None")

    def _splitter(self, size: int | None) -> str:
        """Return how splits are drawn, by public facts."""
        if self.splitter != "auto":
            return str(self.splitter)
        if size is None or math.isinf(self.epsilon):
            return "greedy"
        columns = len(declared_bins(self, self.n_features_in_).splittable)
        shared = self.delta > 0 and not self._disjoint
        least = LEAST_FOR_GREED[1 if shared else 0]
        return "random" if _strength(self, size) * columns < least else "greedy"

    def _check_split_share(self) -> None:
        fits = is_positive(self.split_share) and float(self.split_share) < 1
        self._require("split_share", fits, "a number in (0, 1)")

    def check_state(self, state: State) -> bool:
        """Tell whether trees are complete and split only at bins that exist.

        Compiled code indexes arrays by these numbers without looking again.
        """
        common = ("feature", "last", "counts", "size")
        if not state.keys() >= set(common):
            return False
        feature, last, counts, size = (state[name] for name in common)
        if not (feature.ndim == 2 and feature.shape == last.shape and counts.ndim == 3):
            return False
        n_trees, n_leaves, n_classes = counts.shape
        if not (
            counts.dtype == np.int64
            and n_classes == len(self.classes_)
            and 1 <= n_trees <= MOST_TREES
            and feature.shape == (n_trees, n_leaves - 1)
            and are_splits(feature, last, declared_bins(self, self.n_features_in_))
            and -MOST_COUNTED < counts.min()
            and counts.max() < MOST_COUNTED
        ):
            return False
        if not (size.shape == () and size.dtype == np.int64 and 1 <= int(size) < MOST_COUNTED):
            return False
        rest = {name: state[name] for name in state if name not in common}
        return self._check_values(rest, counts.shape)

    def released_state(self) -> dict[str, Array]:
        """Return what all trees release."""
        shape, size = self.shape_, np.array(self.public_size_)
        return {"feature": shape.feature, "last": shape.last, "counts": self.counts_, "size": size}

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        self.bins_ = declared_bins(self, self.n_features_in_)
        self.shape_ = Shape.on(self.bins_, state["feature"], state["last"])
        self.counts_, self.public_size_ = state["counts"], int(state["size"])

    def _state_size(self, task: Task, noisy: float) -> None:
        """State how many records there are: exactly where that is public, otherwise `noisy`."""
        exact = self.may_state(Unit.RECORD)
        self.public_size_ = max(1, task.n_records if exact else round(float(noisy)))

    def describe_size(self) -> str:
        """Say which number of records a file states."""
        if self.may_state(Unit.RECORD):
            return super().describe_size()
        return "a number of records with noise; the exact one is hidden"

    @abstractmethod
    def _public_plan(self, n_trees: int, depth: int) -> TreePlan:
        """Return the plan as far as public facts decide it, and for the rest these trees."""

    @abstractmethod
    def _totals(self, plan: TreePlan, size: int, noise: float) -> tuple[float, float]:
        """Return between what the exact counts add up, if the size may be wrong by `noise`."""

    @abstractmethod
    def _bounds(self, plan: TreePlan, shape: tuple[int, ...]) -> dict[str, Bound]:
        """Return the bounds of what one kind of learner releases beside splits, size and counts."""

    @abstractmethod
    def _check_values(self, state: State, shape: tuple[int, ...]) -> bool:
        """Check what one kind of learner releases beside splits, size and counts of `shape`."""

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return each class' probability."""
        return self._probabilities(self._codes(X))

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable class for each row."""
        best = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def _codes(self, X: ArrayLike) -> NDArray[np.uint8]:
        check_is_fitted(self, "guarantee_")  # set last: a fit that was not charged leaves none
        finite = True if self.bins_.missing == "error" else "allow-nan"
        return self.bins_.codes(
            validate_table(self, X, reset=False, accept_sparse=False, ensure_all_finite=finite)
        )

    @abstractmethod
    def _probabilities(self, codes: Array) -> Array:
        """Return the probability of each class from the codes of records."""

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = isinstance(self.bins, Bins) and self.bins.missing != "error"
        tags.non_deterministic = math.isfinite(self.epsilon) and self.noise is None
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateForestClassifier(TreeLearner):
    """Fit a forest of greedy or random trees under differential privacy.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` trains exactly and promises nothing.
        With a delta, costs add up as zero-concentrated differential privacy, which helps when many
        trees see the same records.
    n_trees, max_depth
        Number of trees, and of splits from root to leaf: every tree is complete, whatever the data.
        ``"auto"`` chooses by the budget, the public number of records, columns and classes;
        ``"first"`` is what version 0.1 meant by it.
    max_features
        How many features each tree may split on, drawn from public randomness: a number, a share,
        ``"sqrt"``, or None for all. ``"auto"``: half of them if trees share records and would
        otherwise be alike, else all.
    splitter
        ``"greedy"`` draws splits by impurity, ``"random"`` from public randomness, which leaves all
        budget to the leaves: for few records or little budget. ``"auto"`` chooses by records times
        epsilon and the number of columns.
    assignment
        ``"disjoint"`` gives each record to one tree, at full budget; ``"all"`` gives all of them to
        every tree, at a part of it. ``"auto"``: all with a delta, disjoint without.
    split_share
        Part of the budget spent on splits. ``"auto"``: more than half of it without a delta, if
        there are enough records to fill leaves, and columns that noise could confuse, else half.
    bounds, bins
        Declared (low, high) of all columns, or one pair for each, and the number of even bins
        between them; or `Bins`, which need no bounds.
    prune
        Whether branches whose gain drowns in noise predict what their root predicts: easier to
        read, a little less accurate.
    calibrate
        Whether probabilities are sharpened to decide well, by what the released counts say of all
        trees together. False: the plain mean of the trees, as files of version 0.1 predict; it is
        too near the base rate.
    classes, unit, records_per_person, noise
        As in `PrivateLogisticRegression`.
    neighbours, public_size
        ``"add-remove"`` hides the number of records, and `public_size` may declare a public guess
        of it, which only ``"auto"`` uses. ``"replace-one"``: it is public.
    random_state
        Public randomness only: features of each tree, random splits. Keeps the guarantee.
    schema
        As in `PrivateLogisticRegression`; it decides the bins, of which `bins` is then the number
        for each column, and stands in place of `bounds`.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the fitted attributes, of which ``public_size_`` is the noisy sum of leaf counts. Not
    hidden: bins, classes, shape, and under replace-one the number of units. Proof:
    docs/guarantees/trees.md.

    Examples
    --------
    >>> X = Noise(seed=0).open().uniform(6000).reshape(2000, 3)
    >>> y = (X[:, 0] > X[:, 1]).astype(int)
    >>> PrivateForestClassifier(epsilon=1.0, bounds=(0, 1), classes=[0, 1]).fit(X, y).guarantee_
    Guarantee(epsilon=1, delta=0, per record, add-remove, 1 assumption)
    """

    shorthand: ClassVar[str | None] = "forest"
    first_settings: ClassVar[Mapping[str, Any]] = {
        "n_trees": "first",
        "max_depth": "first",
        "split_share": 0.5,
        "splitter": "greedy",
        "calibrate": False,
    }
    named_features: ClassVar[tuple[str, ...]] = ("sqrt", "auto")

    n_trees: int | str = "auto"
    max_features: int | float | str | None = "auto"
    split_share: float | str = "auto"
    splitter: str = "auto"
    assignment: str = "auto"
    prune: bool = False
    calibrate: bool = True
    public_size: int | None = None

    leaf_variance_: float = field(init=False)
    _leaves: NoisyLeaves = field(init=False)

    @property
    def _disjoint(self) -> bool:
        return self.assignment == "disjoint" or (self.assignment == "auto" and self.delta == 0)

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        need, number = self._require, self.n_trees
        fits = number in RULES or is_count(number, MOST_TREES)
        need("n_trees", fits, f"a whole number from 1 to {MOST_TREES}, or 'auto'")
        need(
            "splitter",
            self.splitter in ("auto", "greedy", "random"),
            "'auto', 'greedy' or 'random'",
        )
        need(
            "assignment",
            self.assignment in ("auto", "disjoint", "all"),
            "'auto', 'disjoint' or 'all'",
        )

    def _share(self, size: int | None) -> float:
        """Return the part of the budget for splits, by public facts; 0 where they are random."""
        if self._splitter(size) == "random":
            return 0.0
        if self.split_share != "auto":
            return float(self.split_share)
        if self.delta > 0 or size is None:
            return 0.5
        columns = len(declared_bins(self, self.n_features_in_).splittable)
        if columns <= FEW_COLUMNS and self._n_classes > 2:
            return 0.5
        least, most = FOR_SPLITS if columns > FEW_COLUMNS else FOR_SPLITS_OF_FEW
        return MOST_ON_SPLITS if least <= size * self.epsilon < most else 0.5

    def _check_split_share(self) -> None:
        if self.split_share != "auto":
            fits = is_positive(self.split_share) and float(self.split_share) < 1
            self._require("split_share", fits, "a number in (0, 1), or 'auto'")

    @classmethod
    def read_settings(cls, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return what settings mean that a file, or a study of the first version, names."""
        found = super().read_settings(named)
        if "calibrate" not in named:  # nothing of version 0.1 names it
            for name in ("n_trees", "max_depth"):
                found |= {name: "first"} if found.get(name) == "auto" else {}
        return found

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic |= self._disjoint and self.noise is None  # records' trees are drawn
        return tags

    def _plan(self, task: Task) -> TreePlan:
        size = self.public_size if self.neighbours == "add-remove" else task.n_units
        return self._plan_trees(*_suggest_size(self, size), None if self._hides_size else size)

    def choices(self, n_features: int, size: int | None) -> Choices:
        """Return trees, depth and how both are used, where settings leave them to public facts.

        Where persons are hidden by whose number was chosen, trees and depth are left out: the form
        of the counts states them.
        """
        learner = copy(self)
        learner.n_features_in_ = n_features
        found: dict[str, int | float | str] = {}
        if size is not None or not self._hides_size:
            suggested = _suggest_size(learner, size)
            for name, chosen in zip(("n_trees", "max_depth"), suggested, strict=True):
                if isinstance(getattr(self, name), str):
                    found[name] = chosen
        if self.max_features == "auto":
            columns = declared_bins(learner, n_features).splittable
            found["max_features"] = _n_features(learner._wish, len(columns))
        if self.assignment == "auto":
            found["assignment"] = "disjoint" if self._disjoint else "all"
        exact = math.isinf(self.epsilon)  # spends nothing
        known = None if self._hides_size else size
        splitter = learner._splitter(known)
        if self.splitter == "auto":
            found["splitter"] = splitter
        if self.split_share == "auto" and splitter == "greedy" and not exact:
            found["split_share"] = learner._share(known)
        return found

    def sizes_of_choices(self, size: int | None) -> Sequence[int | None]:
        """Return the declared number of records under add-remove, and otherwise the true one."""
        if math.isinf(self.epsilon):
            return (None,)
        if self.neighbours == "add-remove":
            return (self.public_size,)
        return (None,) if self._hides_size and size is not None else super().sizes_of_choices(size)

    @property
    def _n_classes(self) -> int:
        known = getattr(self, "classes_", self.classes)
        return 2 if known is None else len(cast(Any, known))

    @property
    def _wish(self) -> int | float | str | None:
        """How many features a tree may split on, as `some_features` takes it."""
        if self.max_features != "auto":
            return self.max_features
        return None if self._disjoint else 0.5

    @property
    def _hides_size(self) -> bool:
        """Whether only the site knows how many persons it has, by which it chose."""
        replaced = self.neighbours == "replace-one" and self.unit == "person"
        return replaced and math.isfinite(self.epsilon)

    def _plan_trees(self, n_trees: int, depth: int, size: int | None) -> TreePlan:
        """Return the plan of these trees, or of those that the settings declare."""
        n_trees = n_trees if isinstance(self.n_trees, str) else int(self.n_trees)
        depth = depth if isinstance(self.max_depth, str) else int(self.max_depth)
        runs = 1 if self._disjoint else n_trees
        share = self._share(size)
        return plan_trees(self, depth=depth, runs=runs, share=share, n_trees=n_trees)

    def _public_plan(self, n_trees: int, depth: int) -> TreePlan:
        if self._hides_size:
            most_trees, most_depth = MOST_SUGGESTED
            return self._plan_trees(
                min(max(1, n_trees), most_trees), min(max(1, depth), most_depth), None
            )
        size = self.public_size if self.neighbours == "add-remove" else self.public_size_
        return self._plan_trees(*_suggest_size(self, size), size)

    def _totals(self, plan: TreePlan, size: int, noise: float) -> tuple[float, float]:
        copies = 1 if self._disjoint else plan.n_trees
        return copies * (size - 1 if size > 1 else 0), copies * (size + 1)

    def _bounds(self, plan: TreePlan, shape: tuple[int, ...]) -> dict[str, Bound]:
        low, high = (plan.leaf_variance * (1 + side * ROUNDING) for side in (-1, 1))
        return {"variance": Bound((), low=low, high=high)}

    def _train(self, task: Task, plan: TreePlan, source: Source) -> None:
        task = cap_persons(task, self, source)
        generator = check_random_state(self.random_state)
        owner = owners(task, plan.n_trees, source) if self._disjoint else None
        one, wish, splittable = np.ones(1, np.int64), self._wish, self.bins_.splittable
        if not plan.at_random:
            features = [some_features(wish, splittable, generator) for _ in range(plan.n_trees)]
            dealt = Dealt.of(task, plan.n_trees, one, owner)
            self.shape_, counts = grow(dealt, plan, self.bins_, features, source)
        else:
            self.shape_ = random_trees(self.bins_, wish, plan.n_trees, plan.depth, generator)
            counts = leaf_counts(task, self.shape_, one, owner)
        self._release(task, plan, counts, source)

    def _release(self, task: Task, plan: TreePlan, counts: Array, source: Source) -> None:
        """Set what is released of exact leaf counts: noisy ones, and a size that follows."""
        self.counts_ = add_noise(counts, plan, source)
        self._state_size(task, self.counts_.sum() / (1 if self._disjoint else plan.n_trees))
        self.leaf_variance_ = plan.leaf_variance

    def released_state(self) -> dict[str, Array]:
        """Return the trees and the variance of their leaves' noise."""
        return {**super().released_state(), "variance": np.array(self.leaf_variance_)}

    def _check_values(self, state: State, shape: tuple[int, ...]) -> bool:
        if set(state) != {"variance"}:
            return False
        variance = state["variance"]
        fits = variance.shape == () and variance.dtype == np.float64
        return fits and 0 <= float(variance) < 1e300

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        super().restore_state(state)
        self.leaf_variance_ = float(state["variance"])
        counts, variance = self.counts_, self.leaf_variance_
        self._leaves = NoisyLeaves(self.shape_, self.bins_, counts, variance, self.prune)
        self.values_ = (
            self._leaves.values
            if self.calibrate
            else probabilities(counts, variance, prune=self.prune) / len(counts)
        )

    def _probabilities(self, codes: Array) -> Array:
        if self.calibrate:
            return self._leaves.predict(codes)
        return self.shape_.add_up(codes, self.values_, np.zeros((len(codes), len(self.classes_))))

    @property
    def feature_importances_(self) -> Array:
        """How much impurity splits on each feature removed, by the released counts; sums to one."""
        check_is_fitted(self)
        gains = np.zeros(self.n_features_in_)
        levels = list(node_counts(self.counts_))
        for (_, below), (height, counts) in pairwise(levels):
            gain = purity(below)[:, ::2] + purity(below)[:, 1::2] - purity(counts)
            first = 2 ** (self.shape_.depth - height) - 1
            np.add.at(
                gains, self.shape_.feature[:, first : first + gain.shape[1]], np.maximum(gain, 0.0)
            )
        return gains / gains.sum() if gains.sum() > 0 else np.full(len(gains), 1 / len(gains))


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateTreeClassifier(PrivateForestClassifier):
    """Fit one greedy tree under differential privacy: small enough to read.

    Parameters are those of `PrivateForestClassifier` that concern a single tree.

    Notes
    -----
    **Privacy.** As `PrivateForestClassifier`; proof in docs/guarantees/trees.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> tree = cs.PrivateTreeClassifier(epsilon=1.0, bounds=(-1, 1), classes=[0, 1]).fit(X, y)
    >>> tree.guarantee_
    Guarantee(epsilon=1, delta=0, per record, add-remove, 1 assumption)
    """

    shorthand: ClassVar[str | None] = "tree"

    first_settings: ClassVar[Mapping[str, Any]] = {
        name: value
        for name, value in PrivateForestClassifier.first_settings.items()
        if name != "n_trees"
    }

    n_trees: int | str = field(default=1, init=False)
    max_features: int | float | str | None = None
    splitter: str = "greedy"
    assignment: str = field(default="all", init=False)


MOST_SUGGESTED = (60, 6)  # trees and levels
# Fixed on tables of 12, 13 and 50 columns. With fewer records times epsilon leaves need their half,
# or else noise names a rare class; with more of them, few columns are told apart anyway.
MOST_ON_SPLITS, FEW_COLUMNS = 0.7, 20
FOR_SPLITS, FOR_SPLITS_OF_FEW = (100, math.inf), (1_000, 10_000)
# Of strength times columns: with less, noise chooses splits anyway. Of many columns most say
# little, so that a split by the records is worth more. The second is for trees that share records.
LEAST_FOR_GREED = (4000, 1500)


def _strength(learner: PrivateForestClassifier, size: int) -> float:
    """Return records times epsilon or, where costs add up as zCDP, times √ρ."""
    if learner.delta > 0 and not learner._disjoint:
        return size * math.sqrt(zcdp_rho(epsilon=learner.epsilon, delta=learner.delta))
    return size * learner.epsilon


def _suggest_size(learner: PrivateForestClassifier, size: int | None) -> tuple[int, int]:
    """Return the number and the depth of trees that suit a budget and public facts of a table.

    The rule was measured, not derived (benchmarks/defaults.md). It depends on the number of records
    times epsilon (or times √ρ): a node's best split should still stand out of the noise. Trees that
    share no record differ by their splits alone: the more columns there are, the more of them say
    something new. Many classes are told apart by one tree better than by the mean of trees that saw
    a part of the records each. `"first"` is the rule of version 0.1.
    """
    disjoint = learner._disjoint
    greedy = learner._splitter(None if learner._hides_size else size) == "greedy"
    if size is None or math.isinf(learner.epsilon):
        return (10 if disjoint and greedy else 20), 4

    def between(low: int, value: float, high: int) -> int:
        return round(min(max(low, value), high))

    columns = len(declared_bins(learner, learner.n_features_in_).splittable)
    first = "first" in (learner.n_trees, learner.max_depth)
    strength = _strength(learner, size)
    if learner.delta > 0 and not disjoint:
        if first:
            depth = between(2, math.log2(strength / 60), 6) if greedy else 4
            return between(10, strength / 12, 40), depth
        if not greedy:
            return between(10, strength / 3, 40), 4
        trees, levels = (10, 2) if learner._n_classes <= 2 else (5, 4)
        n_trees = between(trees, strength / max(10, columns / 4), 60)
        return n_trees, between(levels, math.log2(strength / 30), 6)
    if first:
        if not greedy:
            return between(20, strength / 100, 60), 4
        return between(3, strength / 1000, 20), between(2, math.log2(strength / 700), 6)
    if not greedy:
        return between(3, math.sqrt(strength) / 3, 60), 4
    two = min(strength / 120, max(5, columns * strength**0.75 / 1000))
    n_trees, each = between(1, two, 60), 106 / math.sqrt(columns)
    if learner._n_classes > 2:
        n_trees, each = between(1, strength / 5000, 60), 15.0
    asked = n_trees if isinstance(learner.n_trees, str) else int(learner.n_trees)
    return n_trees, between(2, math.log2(strength / max(100, each * asked)), 6)


def owners(task: Task, n_trees: int, source: Source) -> Array:
    """Draw the tree of each record, or person, independently of all others and of its position."""
    owner = np.empty(task.n_units, np.min_scalar_type(n_trees))
    for start in range(0, task.n_units, DRAWN):
        part = owner[start : start + DRAWN]
        part[:] = source.words(len(part)) % np.uint64(n_trees)
    return owner if task.persons is None else owner[task.persons]


def some_features(
    wish: int | float | str | None, features: Array | int, generator: Generator
) -> Array:
    """Draw from public randomness which `features` (or of how many) a tree may split on."""
    among = np.arange(features) if isinstance(features, int) else features
    if wish is None:
        return among
    chosen = generator.permutation(len(among))[: _n_features(wish, len(among))]
    return np.asarray(among[np.sort(chosen)], dtype=np.int64)


def _n_features(wish: int | float | str | None, among: int) -> int:
    """Return how many of so many features are wished for."""
    if wish is None:
        return among
    if isinstance(wish, str):
        number = math.sqrt(among)
    else:
        number = wish if is_count(wish) else wish * among
    return min(among, max(1, math.ceil(number)))


def stack_trees(shapes: Sequence[Shape]) -> Shape:
    """Return trees of equal depth as one forest."""
    return Shape(
        *(
            np.concatenate([getattr(shape, name) for shape in shapes])
            for name in ("feature", "last", "single")
        )
    )
