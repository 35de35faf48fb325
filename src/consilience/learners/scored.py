"""Right answers, counted with noise: of any classifier, or beside a training that pays for both.

An accuracy is computed from records, so it can reveal them like any other number. The only one that
leaves a site is a `PrivateAccuracy`. A learner of a study with a ``score_share`` hands one over
beside its model. Proof: docs/guarantees/integration.md.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import column_or_1d

from consilience.errors import SettingsError
from consilience.learners.base import LEAST_EPSILON, Plan, PrivateLearner, Rows, State, is_epsilon
from consilience.learners.implied import UNLIKELY, Bound, Implied
from consilience.learners.inputs import as_chunks
from consilience.learners.tuning import mark_errors
from consilience.privacy.accounting import Event, Laplace
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.mechanisms import Source, laplace_counts
from consilience.privacy.spending import Receipt
from consilience.privacy.vector_noise import noise_variance
from consilience.tables.groups import cap_records, identify
from consilience.tables.schema import Schema
from consilience.tables.values import as_doubles

Array = NDArray[Any]

SHARE = "score_share"  # the setting by which a study asks for a score
MOST_SHARE = 0.5
MOST_COUNTED = 1 << 60


@dataclass(frozen=True)
class PrivateAccuracy:
    """Noisy counts of right predictions and of all, with what they cost.

    Privacy
    -------
    ``guarantee``, per unit and neighbours as named there. Under replace-one ``total`` is the public
    number of records.
    """

    correct: int
    total: int
    events: tuple[Event, ...]
    guarantee: Guarantee
    receipt: Receipt | None = field(default=None, repr=False)

    @property
    def value(self) -> float:
        """The accuracy these counts imply, in [0, 1]."""
        return min(max(self.correct / max(self.total, 1), 0.0), 1.0)

    @property
    def variance(self) -> float:
        """A bound on how far `value` errs, squared: by the noise, and by the number of records."""
        noise = math.fsum(
            noise_variance(event) for event in self.events if isinstance(event, Laplace)
        )
        return noise / max(self.total, 1) ** 2 + 0.25 / max(self.total, 1)


@dataclass(frozen=True)
class RightAnswers:
    """How right answers are counted and hidden, decided from public facts.

    Parameters
    ----------
    unit, neighbours
        Whom the noise hides, and under which relation.
    cap
        How many records of each person count; 1 where records are the unit.
    epsilon
        What the counts may cost; infinity counts exactly and promises nothing.
    """

    unit: Unit
    neighbours: Neighbours
    cap: int
    epsilon: float

    @property
    def counts_wrong(self) -> bool:
        """Whether wrong answers are counted too, because the number of records is not public."""
        return self.unit is Unit.PERSON or self.neighbours is not Neighbours.REPLACE_ONE

    @property
    def event(self) -> Laplace | None:
        """The noise: a unit that is replaced can leave one count and enter the other."""
        if math.isinf(self.epsilon):
            return None
        replaced = self.neighbours is Neighbours.REPLACE_ONE
        moved = float(self.cap * (2 if self.counts_wrong and replaced else 1))
        who: dict[str, Any] = {"unit": self.unit, "neighbours": self.neighbours}
        return Laplace(sensitivity=moved, scale=moved / self.epsilon, **who)

    def draw(self, wrong: Array, persons: Array | None, source: Source) -> Array:
        """Return the noisy number of right answers and, where they are counted, of wrong ones."""
        if persons is not None:
            wrong = wrong[cap_records(persons, self.cap, source.uniform(len(wrong)))]
        counts = np.array([(~wrong).sum(), wrong.sum()], dtype=np.int64)
        counts = counts if self.counts_wrong else counts[:1]
        event = self.event
        return counts if event is None else laplace_counts(counts, event=event, source=source)

    def read(self, counts: Array, n_public: int | None) -> tuple[int, int]:
        """Return the numbers of right answers and of all that noisy counts state."""
        noisy = [int(count) for count in counts]
        return noisy[0], max(1, sum(noisy)) if self.counts_wrong else int(n_public or 1)


@dataclass(frozen=True)
class ScoredTask:
    """What a training is given, and the records that its model is scored on."""

    training: object
    X: Rows
    y: Array
    persons: Array | None


@dataclass(frozen=True)
class ScoredPlan:
    """What a training draws, and the count after it."""

    training: Plan
    count: Laplace | None

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn."""
        return [*self.training.events, *([] if self.count is None else [self.count])]


class Scored(PrivateLearner[Any, Any]):
    """A classifier that also releases how many of its site's records it predicts right.

    ``score_share`` of the budget pays for the count, and ``epsilon`` is what is left for training:
    ``total_epsilon`` is both. The count is of the records of the training, because those that could
    be kept from it are too few to be told from noise. `scored` makes the classes.

    Notes
    -----
    **Privacy.** ``guarantee_``: what training and count cost together, on the same records.
    """

    untunable: ClassVar[str | None] = "a {} with a score has no candidates"
    reads_chunks: ClassVar[bool] = False

    score_share: float
    right_: Array  # the noisy count of right answers and, where it is needed, that of wrong ones

    @property
    def _trained(self) -> Any:
        """The classifier without its score: methods of the class that this one was made of."""
        return super()

    def __reduce__(self) -> Any:
        return _remake, (type(self).__mro__[2], dict(vars(self)))

    @property
    def total_epsilon(self) -> float:
        """What training and count cost together."""
        return float(self.epsilon) / (1 - self.score_share)

    def without_score(self) -> PrivateLearner[Any, Any]:
        """Return an unfitted learner that only trains, as this one does before it is scored."""
        settings = self.get_params(deep=False)
        del settings[SHARE]
        made: PrivateLearner[Any, Any] = type(self).__mro__[2](**settings)
        return made

    def set_budget(self, epsilon: float, delta: float | None = None) -> Self:
        """Set what training and count may cost together; None leaves delta."""
        return cast(Self, self._trained.set_budget(epsilon * (1 - self.score_share), delta))

    @property
    def _counting(self) -> RightAnswers:
        cap = int(getattr(self, "records_per_person", None) or 1) if self.unit == "person" else 1
        spent = self.total_epsilon * self.score_share
        return RightAnswers(Unit(self.unit), Neighbours(self.neighbours), cap, spent)

    @property
    def accuracy_(self) -> PrivateAccuracy:
        """How many of the site's records the model predicts right."""
        counting = self._counting
        event = counting.event
        events = () if event is None else (event,)
        right, n = counting.read(np.ravel(self.right_), getattr(self, "public_size_", None))
        # Part of the fit's own guarantee, and paid for with it.
        return PrivateAccuracy(right, n, events, self.guarantee_, self.receipt_)

    @property
    def training_events(self) -> tuple[Event, ...]:
        """What was drawn to train it, without the count."""
        n_counts = 0 if self._counting.event is None else 1
        return self.events_[: len(self.events_) - n_counts]

    def check_settings(self) -> None:
        """Refuse settings that cannot work, a share that pays for no count among them."""
        self._trained.check_settings()
        must = f"a number above 0 and at most {MOST_SHARE:g}"
        self._require(SHARE, is_share(self.score_share), must)
        spent = self.total_epsilon * self.score_share
        self._require(SHARE, math.isinf(spent) or is_epsilon(spent), f"worth {LEAST_EPSILON:g}")

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[ScoredTask, list[str]]:
        """Check settings and records; return the task and what the guarantee assumes of it."""
        if as_chunks(X, y) is not None:
            raise SettingsError(
                f"A {type(self).__name__} with {SHARE!r} counts its answers on a table in memory, "
                "and was given one in chunks. Nothing was trained or charged. Train on a smaller "
                "table, or in a study without a score."
            )
        training, assumptions = self._trained.make_task(X, y, persons)
        whose = None if persons is None else identify(persons)
        labels = column_or_1d(np.asarray(y))  # as the training reads them
        return ScoredTask(training, as_doubles(X), labels, whose), assumptions

    def _plan(self, task: ScoredTask) -> ScoredPlan:
        return ScoredPlan(self._trained._plan(task.training), self._counting.event)

    def _train(self, task: ScoredTask, plan: ScoredPlan, source: Source) -> None:
        self._trained._train(task.training, plan.training, source)
        judge = copy.copy(self)  # predicts as whoever reads the file will
        judge.schema, judge.guarantee_ = None, self._guarantee(plan.events, ())
        judge._trained.restore_state(self._trained.released_state())
        wrong = mark_errors(judge, task.X, task.y)
        self.right_ = self._counting.draw(wrong, task.persons, source)

    def released_state(self) -> dict[str, Array]:
        """Return the released arrays: those of the model, and each count."""
        names = zip(_COUNTS, np.ravel(self.right_), strict=False)
        return {
            **self._trained.released_state(),
            **{name: np.asarray(count, np.int64) for name, count in names},
        }

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        self.right_ = np.array([state[name] for name in _COUNTS if name in state], np.int64)
        self._trained.restore_state(_without_counts(state))

    def check_state(self, state: State) -> bool:
        """Tell whether this learner could have released these arrays; they may be hostile."""
        counts = {name: state[name] for name in _COUNTS if name in state}
        return (
            tuple(counts) == self._count_names
            and all(one.shape == () and one.dtype == np.int64 for one in counts.values())
            and bool(self._trained.check_state(_without_counts(state)))
        )

    @property
    def _count_names(self) -> tuple[str, ...]:
        return _COUNTS if self._counting.counts_wrong else _COUNTS[:1]

    def implied(self, shapes: Mapping[str, Sequence[int]]) -> Implied | None:
        """Return what is implied of the training, the noise of the count, and its bounds."""
        found: Implied | None = self._trained.implied(_without_counts(shapes))
        if found is None:
            return None
        counting, size = self._counting, getattr(self, "public_size_", None)
        event = counting.event
        far = 0.0 if event is None else -event.scale * math.log(UNLIKELY / 2) + 1
        most = MOST_COUNTED if counting.counts_wrong or size is None else size
        counts = {name: Bound((), -far, most + far) for name in self._count_names}
        events = [*found.events, *([] if event is None else [event])]
        return replace(found, events=events, bounds={**found.bounds, **counts})

    def planned(self, size: int) -> Sequence[Event]:
        """Return what a fit on so many records or persons draws, by public facts alone."""
        event = self._counting.event
        return [*self._trained.planned(size), *([] if event is None else [event])]

    def cost(self, size: int | None) -> float:
        """Return the epsilon that training and count cost together."""
        spent = self._counting.epsilon
        return float(self._trained.cost(size)) + (0.0 if math.isinf(spent) else spent)

    def n_released(self, n_classes: int) -> int:
        """Return how many numbers a fit releases."""
        return int(self._trained.n_released(n_classes)) + len(self._count_names)

    def describe_state(self, schema: Schema) -> str:
        """Say what leaves a site: a model and its score."""
        counted = "right and wrong" if self._counting.counts_wrong else "right"
        return (
            f"{self._trained.describe_state(schema)}; and how many of this site's records the "
            f"model predicts {counted}, with noise that {100 * self.score_share:g} % of the "
            "epsilon pay for"
        )


_COUNTS = ("right", "wrong")  # the names of the arrays


def _without_counts(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in _COUNTS}


def is_share(value: object) -> bool:
    """Tell whether `value` is a share of a budget that can pay for a count."""
    return isinstance(value, int | float) and type(value) is not bool and 0 < value <= MOST_SHARE


def can_be_scored(kind: type[PrivateLearner[Any, Any]]) -> bool:
    """Tell whether learners of a kind can release how many records they predict right."""
    return is_dataclass(kind) and not kind.predicts_number and kind.suits is None


@functools.cache
def scored(kind: type[PrivateLearner[Any, Any]]) -> type[PrivateLearner[Any, Any]]:
    """Return the class of learners of this kind that release a score beside their model.

    It has the name of `kind`, which is what studies and files call it: their settings say that
    there is a score.
    """
    if not can_be_scored(kind):
        raise SettingsError(
            f"A {kind.__name__} releases no score: scores are of classifiers. Nothing was done. "
            f"Leave out {SHARE!r}."
        )
    return with_setting(Scored, kind, SHARE, float)


def with_setting(
    way: type, kind: type[PrivateLearner[Any, Any]], name: str, form: type
) -> type[PrivateLearner[Any, Any]]:
    """Return the class of learners of a kind that are trained in another way, by one setting more.

    It has the name of `kind`.
    """
    made = make_dataclass(
        kind.__name__,
        [(name, form)],
        bases=(way, kind),
        namespace={"__doc__": kind.__doc__, "__module__": way.__module__},
        eq=False,
        repr=False,
        kw_only=True,
    )
    return cast(type[PrivateLearner[Any, Any]], made)


def _remake(kind: type[PrivateLearner[Any, Any]], state: dict[str, Any]) -> object:
    made = object.__new__(scored(kind))
    vars(made).update(state)
    return made
