"""A study's learner with candidates, of which each site keeps the one that did best on its records.

Training and choice are those of `PrivateTuning`. What is added is all that others need for planning
and checking them from public facts alone. Proof: docs/guarantees/tuning.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, Self, cast

from numpy.typing import ArrayLike
from sklearn.model_selection import ParameterGrid

from consilience.errors import ContributionRejected, SettingsError
from consilience.learners.base import SHOWN_SIZES, PrivateLearner, Rows, spell_out
from consilience.learners.implied import Implied
from consilience.learners.inputs import as_chunks
from consilience.learners.scored import SHARE, with_setting
from consilience.learners.tuning import (
    DISJOINT,
    NOT_TUNABLE,
    PrivateTuning,
    TuningPlan,
    TuningTask,
    plan_parts,
)
from consilience.privacy.accounting import Event, events_to_json
from consilience.privacy.mechanisms import Source
from consilience.tables.schema import Schema

MOST_CANDIDATES = 10  # each trains on a part of its own, and is planned again by every reader
_FIXED = NOT_TUNABLE | {"tuning", "projection", "data_norm", "random_state", SHARE}


@dataclass(frozen=True)
class Tuning:
    """The settings that sites choose among, as a study states them.

    Parameters
    ----------
    values
        Lists of values by the name of the setting; all their combinations are candidates.
    of_part
        Whether the learner that has it is one of the candidates already, trained on a part.
    """

    values: Mapping[str, Sequence[Any]]
    of_part: bool = False

    @classmethod
    def read(cls, values: object) -> Tuning:
        """Return the tuning that facts of a study or a file describe; they may be hostile."""
        listed = isinstance(values, Mapping) and all(
            isinstance(name, str)
            and isinstance(each, list)
            and all(map(_is_value, each))
            and 1 <= len(set(map(repr, each))) == len(each)
            for name, each in values.items()
        )
        stated = cast(Mapping[str, list[Any]], values) if listed else {}
        if not 2 <= math.prod(map(len, stated.values())) <= MOST_CANDIDATES:
            raise SettingsError(
                "Candidates must be lists of different numbers, texts or truth values by the "
                f"names of settings, with 2 to {MOST_CANDIDATES} combinations, such as "
                "regularization = [0.001, 0.01]. Nothing was computed."
            )
        return cls({name: list(each) for name, each in stated.items()})

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """The settings of each candidate."""
        return [dict(one) for one in ParameterGrid(dict(self.values))]

    @property
    def n_parts(self) -> int:
        """Into how many parts a table is cut: one for each candidate, and one to choose by."""
        return len(self.candidates) + 1

    def part_of(self, size: int) -> int:
        """Return how many of so many records or persons train one candidate."""
        return size if self.of_part else max(1, size // self.n_parts)

    def as_dict(self) -> dict[str, list[Any]]:
        """Return the values, as a study states them."""
        return {name: list(each) for name, each in self.values.items()}

    def problem_with(self, kind: type[PrivateLearner[Any, Any]]) -> str | None:
        """Return why learners of a kind cannot have these candidates, or None."""
        if kind.untunable is not None:
            return kind.untunable.format(kind.__name__)
        unknown = sorted(set(self.values) - (set(kind._get_param_names()) - _FIXED))
        if unknown:
            return (
                f"sites cannot choose {', '.join(map(repr, unknown))[:200]}, which {kind.__name__} "
                "does not have or which other parts of the study decide"
            )
        return None

    def describe_candidates(self) -> str:
        """Name the candidates, in the words of those who wrote the study."""
        return "; ".join(
            f"{name} = {' or '.join(map(str, each))}" for name, each in self.values.items()
        )

    def describe(self) -> str:
        """Say in words how one of the candidates is chosen."""
        n = self.n_parts
        return (
            f"the site's table is cut at random into {n} parts: each of {n - 1} candidates is "
            "trained on one, and the one is kept that does best on the last, by a choice with noise"
        )

    def describe_cost(self) -> str:
        """Say what the choice costs beside a training."""
        return (
            "nothing beside the training: each record or person is in one part, drawn at random, "
            "and meets either one training or the choice"
        )

    def explain(self, learner: str) -> str:
        """Say in sentences what sites choose, and what that costs and releases."""
        return (
            f"Sites choose the settings of {learner} among {self.describe_candidates()}: "
            f"{self.describe()}. This costs {self.describe_cost()}. Released is "
            f"{self.describe_release()}."
        )

    def describe_release(self) -> str:
        """Say what leaves a site of the choice."""
        return (
            "which candidate was chosen, with noise, beside the model that was trained with it on "
            "its part; no model of another candidate and no number of wrong answers"
        )


def _is_value(value: object) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return type(value) in (str, int, float, bool) and finite and len(str(value)) <= 100


@dataclass(frozen=True)
class TunedTask:
    """What is tuned, and the records."""

    tuner: PrivateTuning
    records: TuningTask


class Tuned(PrivateLearner[TunedTask, TuningPlan]):
    """A classifier whose settings are chosen among candidates on the records that it is fitted to.

    Before a fit the settings are the study's; after one those of the candidate that was chosen, and
    sizes are those of its part. `tuned` makes the classes.

    Privacy
    -------
    ``guarantee_``: that of `PrivateTuning`, against everyone who sees model and settings.
    """

    reads_chunks: ClassVar[bool] = False

    tuning: Tuning

    def __reduce__(self) -> tuple[object, ...]:
        return _remake, (type(self).__mro__[2], dict(vars(self)))

    # ------------------------------------------------------------------ its candidates

    def without_tuning(self) -> PrivateLearner[Any, Any]:
        """Return an unfitted learner of these settings, on all records."""
        settings = self.get_params(deep=False)
        del settings["tuning"]
        made: PrivateLearner[Any, Any] = type(self).__mro__[2](**settings)
        self._tell(made)
        return made

    def _tell(self, made: PrivateLearner[Any, Any]) -> None:
        """Tell another learner the public facts that this one was told."""
        for name in ("n_features_in_", "classes_"):
            if hasattr(self, name):
                setattr(made, name, getattr(self, name))

    def _of_part(self) -> dict[str, Any]:
        """Return the settings that a part changes: the declared number of records."""
        declared = getattr(self, "public_size", None)
        return {} if declared is None else {"public_size": self.tuning.part_of(declared)}

    def candidates(self) -> list[PrivateLearner[Any, Any]]:
        """Return what is trained on the parts, each at the whole budget."""
        part = self._of_part()
        return [self.without_tuning().set_params(**one, **part) for one in self.tuning.candidates]

    def possible(self) -> list[Self]:
        """Return the learners that a file may state: one for each candidate."""
        settings, part = self.get_params(deep=False), self._of_part()
        chosen = {"tuning": replace(self.tuning, of_part=True)}
        each = [type(self)(**settings | one | part | chosen) for one in self.tuning.candidates]
        for one in each:
            self._tell(one)
        return each

    @property
    def best_index_(self) -> int:
        """Which candidate has these settings."""
        every = self.tuning.candidates
        own = spell_out({name: getattr(self, name) for name in every[0]})
        found = [i for i, one in enumerate(every) if spell_out(one) == own]
        if not found:
            raise ContributionRejected("candidates")
        return found[0]

    def _plan_parts(self, size: int) -> TuningPlan:
        """Return what parts of so many records or persons cost; public facts alone decide it."""
        trainings = [tuple(one.planned(size)) for one in self.candidates()]
        cap = int(getattr(self, "records_per_person", None) or 1) if self.unit == "person" else 1
        return plan_parts(trainings, self.unit, self.neighbours, cap)

    def stated_tuning(self) -> dict[str, Any]:
        """Return what a file states of the choice."""
        # Before a training, the noise of a part of any size shows the form of the fact.
        selection = self._plan_parts(getattr(self, "public_size_", SHOWN_SIZES[0])).selection
        drawn = [] if selection is None else [selection]
        return {"candidates": self.tuning.as_dict(), "selection": events_to_json(drawn)}

    # ------------------------------------------------------------------ training

    def check_settings(self) -> None:
        """Refuse candidates that cannot work."""
        self._require("tuning", isinstance(self.tuning, Tuning), "a Tuning")
        for one in self.candidates():
            one.check_settings()

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[TunedTask, list[str]]:
        """Check settings and records; return the task and what the guarantee assumes of it."""
        name = type(self).__name__
        if self.tuning.of_part:
            raise SettingsError(
                f"This {name} was chosen among candidates already, and would forget them. Nothing "
                "was trained or charged. Build it anew from its study."
            )
        if as_chunks(X, y) is not None:
            raise SettingsError(
                f"A {name} with candidates cuts a table in memory into parts, and was given one in "
                "chunks. Nothing was trained or charged. Train on a smaller table, or in a study "
                "without [tuning]."
            )
        tuner = PrivateTuning(
            self.without_tuning(),
            self.tuning.candidates,
            epsilon=self.epsilon,
            delta=float(getattr(self, "delta", 0.0)),
            noise=self.noise,
        )
        records, assumptions = tuner.make_task(X, y, persons)
        self.n_features_in_, self.classes_ = int(tuner.n_features_in_), records.classes
        return TunedTask(tuner, records), assumptions

    def _fit(self, task: TunedTask, assumptions: Sequence[str], *account: object) -> Self:
        task.tuner._fit(task.records, assumptions, *account)
        self._take(task.tuner)
        self.events_, self.receipt_ = task.tuner.events_, task.tuner.receipt_
        self.guarantee_ = task.tuner.guarantee_
        self.remember_settings()
        return self

    def _plan(self, task: TunedTask) -> TuningPlan:
        return task.tuner._plan(task.records)

    def _train(self, task: TunedTask, plan: TuningPlan, source: Source) -> None:
        task.tuner._train(task.records, plan, source)
        self._take(task.tuner)

    def _take(self, tuner: PrivateTuning) -> None:
        """Become the candidate that was chosen."""
        best = tuner.best_learner_
        for name, value in {**tuner.best_params_, **self._of_part()}.items():
            setattr(self, name, value)
        self.tuning = replace(self.tuning, of_part=True)
        if hasattr(best, "public_size_"):
            self.public_size_ = best.public_size_
        self.restore_state(best.released_state())

    # ------------------------------------------------------------------ what others know of it

    def _alone(self) -> PrivateLearner[Any, Any]:
        """Return the candidate that was chosen as if it had been trained by itself on its part."""
        made = self.without_tuning()
        if hasattr(self, "public_size_"):
            vars(made)["public_size_"] = self.public_size_
        return made

    def model_events(self) -> tuple[Event, ...]:
        """Return what was drawn for the model that was chosen."""
        alone = self._alone()
        alone.events_ = () if math.isinf(self.epsilon) else tuple(alone.planned(self.public_size_))
        return alone.model_events()

    def implied(self, shapes: Mapping[str, Sequence[int]]) -> Implied | None:
        """Return the events of the costliest part, and the bounds of the chosen candidate."""
        self.check_settings()
        self.best_index_  # noqa: B018  it refuses settings that are no candidate's
        found = self._alone().implied(shapes)
        if found is None:
            raise ContributionRejected("candidates")
        plan = self._plan_parts(self.public_size_)
        return replace(found, events=plan.events, others=plan.as_costly())

    def planned(self, size: int) -> Sequence[Event]:
        """Return what is charged for a fit on so many records or persons, by public facts alone."""
        return self._plan_parts(self.tuning.part_of(size)).events

    def cost(self, size: int | None) -> float:
        """Return the epsilon of the costliest part."""
        return max(one.cost(size) for one in self.candidates())

    def unchecked(self) -> str | None:
        """Return why nobody could plan a candidate again, if nobody could."""
        if getattr(self, "_hides_size", False):
            return (
                "candidates whose plan follows from a hidden number of persons cannot be planned "
                'again: leave out [tuning], or choose neighbours = "add-remove"'
            )
        return next((said for one in self.candidates() if (said := one.unchecked())), None)

    def assumed(self) -> tuple[str, ...]:
        """Return what any candidate assumes, and that parts are disjoint."""
        every = [said for one in self.candidates() for said in one.assumed()]
        return tuple(dict.fromkeys([*every, DISJOINT]))

    def n_released(self, n_classes: int) -> int:
        """Return how many numbers the largest candidate releases."""
        return max(one.n_released(n_classes) for one in self.candidates())

    def can_train_together(self) -> bool:
        """Tell whether exact models of many sites can be trained in one batch: no."""
        return False

    def describe_state(self, schema: Schema) -> str:
        """Say what leaves a site: the model and the choice."""
        every = (one.describe_state(schema) for one in self.candidates())
        return f"{', or '.join(dict.fromkeys(every))}; and {self.tuning.describe_release()}"

    def describe_size(self) -> str:
        """Say which number a file states: that of a part."""
        said = self.candidates()[0].describe_size()
        return said if said == "none" else f"{said}, of one of {self.tuning.n_parts} parts"

    def describe_choices(self, n_features: int, size: int | None) -> str | None:
        """Say what follows from settings that are "auto", of each candidate before a fit."""
        if self.tuning.of_part:
            return super().describe_choices(n_features, size)
        every = [one.describe_choices(n_features, size) for one in self.candidates()]
        return "; or ".join(dict.fromkeys(one for one in every if one)) or None


@functools.cache
def tuned(kind: type[PrivateLearner[Any, Any]]) -> type[PrivateLearner[Any, Any]]:
    """Return the class of learners of this kind that sites choose among candidates.

    It has the name of `kind`, which is what studies and files call it.
    """
    if kind.untunable is not None or not is_dataclass(kind):
        reason = kind.untunable or "{} has no candidates"
        raise SettingsError(f"{reason.format(kind.__name__)}. Nothing was done.")
    return with_setting(Tuned, kind, "tuning", Tuning)


def _remake(kind: type[PrivateLearner[Any, Any]], state: dict[str, Any]) -> object:
    made = object.__new__(tuned(kind))
    vars(made).update(state)
    return made
