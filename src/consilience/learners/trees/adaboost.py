"""Boosting by trees under differential privacy.

Records that earlier trees get wrong count more. In the textbook, weights are normalised over all
records, so that one record moves all weights. Here a record's weight depends only on that record
and on trees already released, and lies in [0, 1], so that every weighted count keeps the
sensitivity of a plain one (docs/guarantees/adaboost.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from consilience.errors import SettingsError
from consilience.learners.base import Choices, Rows, State, is_count, is_positive
from consilience.learners.implied import Bound
from consilience.learners.shapes import Shape, draw_shapes, plot_shapes
from consilience.learners.trees.binned import FiledTask, TreeTask
from consilience.learners.trees.forest import (
    Dealt,
    Task,
    TreeLearner,
    TreePlan,
    add_noise,
    cap_persons,
    grow,
    plan_trees,
    some_features,
    stack_trees,
)
from consilience.learners.trees.leaves import probabilities
from consilience.privacy.guarantee import Unit
from consilience.privacy.mechanisms import Source

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

Array = NDArray[Any]

GRAIN = 256  # weights are whole multiples of 1/GRAIN: their sums are exact
MOST_ROUNDS = 1000  # each reads the table again, and shares the budget with all others
MOST_RECORDS = 1 << 22  # so that GRAIN times their number, squared, is a 64-bit integer
LARGEST_SAY = 2.0  # the most that a leaf adds to a score, before the rate


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateAdaBoostClassifier(TreeLearner):
    """Boost small trees under differential privacy.

    Each round grows a tree on weighted records and releases its noisy leaf counts, from which the
    values of its leaves are computed. Rounds share the budget; with a delta their costs add up as
    zero-concentrated differential privacy.

    Parameters
    ----------
    epsilon, delta
        The budget; ``delta=0`` is pure, ``epsilon=math.inf`` trains exactly and promises nothing.
    n_rounds, max_depth
        Number of rounds, and of splits from root to leaf. Few rounds of small trees work best:
        ``"auto"`` is 3 with pure ε, where each round costs its full share, and 10 otherwise.
    algorithm, learning_rate
        ``"real"``: every leaf adds its own log-odds. ``"discrete"``: every tree casts a vote,
        weighted by its noisy accuracy. Both are multiplied by the rate.
    max_features, split_share, bins, bounds, classes, neighbours, unit, records_per_person,
    random_state, schema, noise
        As in `PrivateForestClassifier`.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the fitted attributes. Not hidden: bins, classes, shape, and under replace-one the
    number of records. Proof: docs/guarantees/adaboost.md.

    Examples
    --------
    >>> from consilience import Noise
    >>> X = Noise(seed=0).open().uniform(6000).reshape(2000, 3)
    >>> y = (X[:, 0] > X[:, 1]).astype(int)
    >>> PrivateAdaBoostClassifier(epsilon=1.0, bounds=(0, 1), classes=[0, 1]).fit(X, y).guarantee_
    Guarantee(epsilon=1, delta=0, per record, add-remove, 2 assumptions)
    """

    shorthand: ClassVar[str | None] = "adaboost"
    untunable: ClassVar[str | None] = (
        "a {} takes a limited number of records, which cannot be checked of files that state the "
        "number of a part"
    )

    first_settings: ClassVar[Mapping[str, Any]] = {"n_rounds": 10}

    n_rounds: int | str = "auto"
    max_depth: int | str = 2
    algorithm: str = "real"
    learning_rate: float = 0.5

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        fits = self.n_rounds == "auto" or is_count(self.n_rounds, MOST_ROUNDS)
        self._require("n_rounds", fits, f"a whole number from 1 to {MOST_ROUNDS:,}, or 'auto'")
        self._require("max_depth", is_count(self.max_depth), "a whole number")
        self._require("algorithm", self.algorithm in ("real", "discrete"), "'real' or 'discrete'")
        rate = self.learning_rate
        self._require("learning_rate", is_positive(rate) and rate <= 1, "a number in (0, 1]")

    @property
    def _rounds(self) -> int:
        if not isinstance(self.n_rounds, str):
            return int(self.n_rounds)
        return 3 if self.delta == 0 and math.isfinite(self.epsilon) else 10

    def choices(self, n_features: int, size: int | None) -> Choices:
        """Return the number of rounds, where settings leave it to the budget."""
        return {"n_rounds": self._rounds} if isinstance(self.n_rounds, str) else {}

    def sizes_of_choices(self, size: int | None) -> Sequence[int | None]:
        """Return None: no choice depends on how many records there are."""
        return (None,)

    def n_released(self, n_classes: int) -> int:
        """Return how many counts all leaves have, in as many rounds as there will be."""
        self.check_settings()
        return self._rounds * int(2 ** int(self.max_depth)) * max(1, n_classes)

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[Task, list[str]]:
        """Check settings and records; return the task and what the guarantee assumes of it."""
        task, assumptions = super().make_task(X, y, persons)
        return task, [*assumptions, *self.assumed()]

    def assumed(self) -> tuple[str, ...]:
        """Return that more records than sums can hold are refused, where their number is hidden."""
        few = f"that there are at most {MOST_RECORDS:,} records is public"
        return () if self.may_state(Unit.RECORD) else (few,)

    def _plan(self, task: Task) -> TreePlan:
        if task.n_records > MOST_RECORDS:
            raise SettingsError(
                f"{type(self).__name__} takes at most {MOST_RECORDS:,} records, so that sums of "
                "weights stay exact. Nothing was trained. Use PrivateForestClassifier, which "
                "takes two billion."
            )
        return self._public_plan(self._rounds, int(self.max_depth))

    def _public_plan(self, n_trees: int, depth: int) -> TreePlan:
        runs = self._rounds
        return plan_trees(self, depth=int(self.max_depth), runs=runs, grain=GRAIN, n_trees=runs)

    def _totals(self, plan: TreePlan, size: int, noise: float) -> tuple[float, float]:
        # In the first round every record weighs one, later less.
        low = GRAIN * (size - 1) if size > 1 else 0
        return low - noise, plan.n_trees * (GRAIN * (size + 1) + noise)

    def _bounds(self, plan: TreePlan, shape: tuple[int, ...]) -> dict[str, Bound]:
        most = float(self.learning_rate) * LARGEST_SAY
        return {"values": Bound(shape, low=-most, high=most)}

    def _train(self, task: Task, plan: TreePlan, source: Source) -> None:
        task = cap_persons(task.load() if isinstance(task, FiledTask) else task, self, source)
        assert isinstance(task, TreeTask)
        generator = check_random_state(self.random_state)
        scores = np.zeros((len(task.y), task.n_classes))
        shapes, values, counts = [], [], []
        for _ in range(self._rounds):
            weight = _weights(scores, task.y)
            features = some_features(self.max_features, self.bins_.splittable, generator)
            dealt = Dealt.of(task, 1, weight)
            shape, exact = grow(dealt, plan, self.bins_, [features], source)
            shapes.append(shape)
            counts.append(add_noise(exact, plan, source))
            values.append(self._say(counts[-1] / GRAIN, plan.leaf_variance))
            shapes[-1].add_up(task.codes, values[-1], scores)
        self.shape_ = stack_trees(shapes)
        self.counts_, self.values_ = np.concatenate(counts), np.concatenate(values)
        # In the first round every record weighs one: the sum of its noisy counts is a noisy number
        # of records.
        self._state_size(task, counts[0].sum() / GRAIN)

    def _say(self, counts: Array, variance: float) -> Array:
        """Return what each leaf adds to the scores, from noisy counts; classes sum to zero."""
        p = probabilities(counts, variance)
        n_classes = p.shape[2]
        if n_classes == 1:
            return np.zeros_like(p)
        if self.algorithm == "real":
            said = np.log(np.maximum(p, 1e-3))
            said -= said.mean(axis=2, keepdims=True)
        else:
            best = p.argmax(axis=2)[..., None]
            positive = np.maximum(counts, 0.0)
            right = np.take_along_axis(positive, best, 2).sum() / max(float(positive.sum()), 1e-9)
            right = min(max(float(right), 1e-9), 1 - 1e-9)
            stage = (math.log(right / (1 - right)) + math.log(n_classes - 1)) / 2
            said = np.where(np.arange(n_classes) == best, stage, -stage / (n_classes - 1))
        return np.asarray(self.learning_rate * np.clip(said, -LARGEST_SAY, LARGEST_SAY))

    def shape_functions(self) -> dict[int, Array]:
        """Return for each feature what each of its bins adds to each class: (bin, class).

        Trees of depth 1 look at one feature each, so that the model is a sum of such functions.
        """
        check_is_fitted(self)
        if self.shape_.depth != 1:
            raise SettingsError(
                "Only stumps add up to one function per feature. Train with max_depth=1."
            )
        functions: dict[int, Array] = {}
        columns = (
            self.shape_.feature[:, 0],
            self.shape_.last[:, 0],
            self.shape_.single[:, 0],
            self.values_,
        )
        for feature, last, single, (left, right) in zip(*columns, strict=True):
            bins = np.arange(self.bins_.sizes[feature])
            goes_left = bins == last if single else bins <= last
            said = np.where(goes_left[:, None], left, right)
            functions[int(feature)] = functions.get(int(feature), 0.0) + said
        return dict(sorted(functions.items()))

    def plot_shapes(
        self,
        *,
        schema: Schema | None = None,
        feature_names: Sequence[str] | None = None,
        ax: object = None,
    ) -> Array:
        """Draw the last class' shape functions, the strongest first; return the array of Axes.

        With a schema, given here or to the learner, in the columns' own units; otherwise feature by
        feature. `ax` is where to draw: an Axes or several, a Figure, or None for a new figure.
        """
        schema = self.schema if schema is None else schema
        if schema is not None:
            return plot_shapes(self, schema, ax=ax)
        functions = self.shape_functions()
        names = getattr(self, "feature_names_in_", None) if feature_names is None else feature_names
        found = [
            self._shape(f"feature {j}" if names is None else str(names[j]), j, one)
            for j, one in functions.items()
        ]
        found.sort(key=lambda shape: -shape.range)
        return draw_shapes(found, f"adds to the score\nof {self.classes_[-1]}", ax)

    def _shape(self, name: str, j: int, function: Array) -> Shape:
        """Return what a feature adds to the last class' score, bin by bin."""
        said = function[:, -1] - function[:, :-1].mean(axis=1)
        cuts = np.array(self.bins_.cuts[j])
        if self.shape_.single[self.shape_.feature == j].any() or len(cuts) < 2:
            return Shape(name, tuple(range(len(said))), said, None)
        width = cuts[1] - cuts[0], cuts[-1] - cuts[-2]
        places = tuple(np.concatenate([[cuts[0] - width[0]], cuts, [cuts[-1] + width[1]]]).tolist())
        offset, kept = int(self.bins_.missing == "low"), len(cuts) + 1
        apart = {"low": said[0], "high": said[-1]}.get(self.bins_.missing)
        missing = None if apart is None else float(apart)
        return Shape(name, places, said[offset : offset + kept], missing)

    def released_state(self) -> dict[str, Array]:
        """Return the trees and what each leaf adds to the scores."""
        return {**super().released_state(), "values": self.values_}

    def _check_values(self, state: State, shape: tuple[int, ...]) -> bool:
        if set(state) != {"values"}:
            return False
        values = state["values"]
        return (
            values.shape == shape
            and values.dtype == np.float64
            and bool(np.abs(values).max() < 1e6)
        )

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        super().restore_state(state)
        self.values_ = state["values"]

    def _probabilities(self, codes: Array) -> Array:
        scores = self.shape_.add_up(codes, self.values_, np.zeros((len(codes), len(self.classes_))))
        return np.asarray(special.softmax(scores, axis=1))


def _weights(scores: Array, y: Array) -> NDArray[np.int64]:
    """Return min(1, exp(-margin)) in whole steps; each depends on one record alone."""
    rows = np.arange(len(y))
    others = np.where(np.arange(scores.shape[1]) == y[:, None], -np.inf, scores).max(axis=1)
    margin = np.maximum(scores[rows, y] - others, 0.0)
    return np.asarray(np.floor(GRAIN * np.exp(-margin)), dtype=np.int64)
