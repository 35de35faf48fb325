"""Choosing settings: on public records for free, or on private records for a charge.

A setting chosen by looking at private records is a release like any other. `choose_on_public` looks
at public ones only. `PrivateTuning` is Chaudhuri, Monteleoni & Sarwate 2011, algorithm 3: each
candidate is trained on a part of the records of its own and judged on one more part, so that each
record is used once and the whole costs one epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import ClassifierMixin, clone, is_classifier
from sklearn.model_selection import GroupKFold, ParameterGrid, check_cv
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from consilience.errors import SettingsError, shielded
from consilience.learners.base import PrivateLearner, Rows, plan_fit
from consilience.learners.erm import one_blas_thread
from consilience.learners.implied import ROUNDING
from consilience.learners.inputs import (
    READ_LABELS,
    check_persons,
    read_classes,
    validate_records,
)
from consilience.privacy.accounting import Event, Selection, total, total_rho
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit, compose_disjoint
from consilience.privacy.ledger import NANO, spent_units
from consilience.privacy.mechanisms import Noise, Source, select
from consilience.tables.groups import cap_records, identify

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

Array = NDArray[Any]
Candidates = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]

# Rows, always: libraries round a row's score by the shape and layout of the table it stands in.
PREDICTED_AT_ONCE = 1024
CHOSEN = "its settings were chosen by exact errors"
DISJOINT = "each record, or person, is in one part of the tuning: drawn by slot, whatever it holds"
# What a candidate must not change: it decides what is promised, or is public and the same for all.
NOT_TUNABLE = frozenset(
    {
        "epsilon",
        "delta",
        "noise",
        "neighbours",
        "unit",
        "records_per_person",
        "public_size",
        "classes",
        "schema",
    }
)


def _listed(learner: Any, candidates: Candidates) -> list[dict[str, Any]]:
    """Return the candidates one by one; a mapping of lists stands for all their combinations."""
    try:
        grid = ParameterGrid(candidates) if isinstance(candidates, Mapping) else candidates
        listed = [dict(candidate) for candidate in grid]
    except (ValueError, TypeError):  # an empty list of values, or no list
        listed = []
    # What a parameter is follows from the last part of its name, whatever learner is inside.
    known = {name for name in learner.get_params() if name.split("__")[-1] not in NOT_TUNABLE}
    wrong = sorted({name for candidate in listed for name in candidate} - known)
    if not listed or wrong:
        raise SettingsError(
            f"Candidates must be one or more sets of parameters of {type(learner).__name__} other "
            f"than those of the guarantee. {f'These are not: {wrong}' if listed else 'Got none'}. "
            "Nothing was trained or charged. Pass for instance {'regularization': [1e-3, 1e-2]}."
        )
    return listed


# ------------------------------------------------------------------------------------------- public


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """How training is rehearsed on public records; every field is a keyword of `choose_on_public`.

    Parameters
    ----------
    n_records
        How many records the private table has, or about how many, if that is not public. Unless
        given, as many as the public table.
    cv, repeats, seed
        Folds, draws of noise in each fold, and the seed of both.
    """

    n_records: int | None = None
    cv: int = 5
    repeats: int = 3
    seed: int = 0

    def run(
        self, y: Array, persons: Array | None, *, stratified: bool
    ) -> Iterator[tuple[Array, Array | None, Array, Noise]]:
        """Yield the rows to train on, whose each is, the rows to test on, and the noise."""
        size = self.n_records or len(y)
        if min(size, self.repeats) < 1:
            raise SettingsError(
                "'n_records' and 'repeats' must be at least 1. Nothing was trained. Correct the "
                "call."
            )
        source = Noise(seed=self.seed).open()
        shuffled = source.permutation(len(y))
        groups = None if persons is None else persons[shuffled]
        folds = (
            check_cv(self.cv, y[shuffled], classifier=stratified)
            if groups is None
            else GroupKFold(self.cv)
        )
        for train, test in folds.split(shuffled, y[shuffled], groups):
            for _ in range(self.repeats):
                order = shuffled[train][source.permutation(len(train))]
                rows, copy = np.resize(order, size), np.arange(size) // len(order)
                # A copy is another person's.
                whose = None if persons is None else persons[rows] + copy * len(y)
                yield rows, whose, shuffled[test], Noise(seed=int(source.words(1)[0]))


@shielded
def choose_on_public(
    learner: Any,
    candidates: Candidates,
    X_public: Any,
    y_public: ArrayLike,
    *,
    persons: ArrayLike | None = None,
    **rehearsal: Any,
) -> dict[str, Any]:
    """Return the candidate that does best when private training is rehearsed on public records.

    Each candidate is trained at the learner's own epsilon, noise and all, on tables as large as the
    private one: a training fold is repeated, or cut, to `n_records`. What is judged is thus the
    compromise between noise and regularisation that the private table will meet, which is not that
    of noiseless training (docs/guarantees/tuning.md has numbers). A repeated fold has the private
    table's noise but its own sampling error.

    Parameters
    ----------
    persons
        Whose each public record is; needed by a learner with ``unit="person"``. Persons are never
        cut in two.
    n_records, cv, repeats, seed
        As in `Rehearsal`.

    Privacy
    -------
    Costs nothing, because no private record is seen, and promises nothing to the public ones.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    >>> candidates = {"regularization": [1e-3, 10.0]}
    >>> cs.choose_on_public(learner, candidates, X, y, n_records=2000, seed=1)
    {'regularization': 0.001}
    """
    listed, y = _listed(learner, candidates), np.asarray(y_public)
    X = X_public if hasattr(X_public, "shape") else np.asarray(X_public)
    ids = None if persons is None else identify(persons)
    scores = np.zeros(len(listed))
    rehearsals = Rehearsal(**rehearsal).run(y, ids, stratified=is_classifier(learner))
    for rows, whose, test, noise in rehearsals:
        given = {} if whose is None else {"persons": whose}
        # The noise is the same for all candidates, which compares them fairly.
        for i, settings in enumerate(listed):
            fitted = clone(learner).set_params(**settings, noise=noise)
            fitted.fit(_take(X, rows), y[rows], **given)
            scores[i] += fitted.score(_take(X, test), y[test])
    return listed[int(scores.argmax())]


def _take(X: Any, rows: Array) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else X[rows]


# ------------------------------------------------------------------------------------------ private


@dataclass(frozen=True)
class TuningTask:
    """All records, whose each is, and the declared labels."""

    X: Any
    y: Array
    persons: Array | None
    classes: Array


@dataclass(frozen=True)
class TuningPlan:
    """What each part of the records will meet: one training each, or the selection."""

    trainings: tuple[tuple[Event, ...], ...]
    selection: Selection | None
    # Of the costliest part: a record is in one part, so they are all that it can cost.
    events: Sequence[Event]

    def as_costly(self) -> Sequence[Sequence[Event]]:
        """Return trainings that cost as much, up to rounding, in which machines differ."""
        most = _units(self.events)
        return [each for each in self.trainings if np.allclose(_units(each), most, ROUNDING, 0)]


def plan_parts(
    trainings: Sequence[tuple[Event, ...]], unit: str, neighbours: str, cap: int
) -> TuningPlan:
    """Return what parts cost that meet these trainings, or the choice among them.

    `cap` is the number of records that a unit may have; public facts alone decide it all.
    """
    costliest = _costliest(trainings)
    # Selecting may cost as much as the costliest training: all of epsilon, unless that has less
    # rho than it would.
    rho = total_rho(costliest, Neighbours(neighbours))
    most = min(total(costliest).epsilon, math.inf if rho is None else math.sqrt(8 * rho))
    # One unit more adds errors to every candidate, or none.
    monotone = neighbours == "add-remove"
    selection = Selection(
        unit=Unit(unit),
        neighbours=Neighbours(neighbours),
        sensitivity=float(cap),
        scale=(1 if monotone else 2) * cap / most,
        monotone="yes" if monotone else "no",
    )
    return TuningPlan(tuple(trainings), selection, costliest)


def _part(task: TuningTask, rows: Array) -> dict[str, Any]:
    whose = {} if task.persons is None else {"persons": task.persons[rows]}
    return {"X": task.X[rows], "y": task.y[rows], **whose}


def _units(events: Sequence[Event]) -> tuple[float, float, float]:
    """Return a ledger's charge: epsilon and rho in whole units (no rho: infinite), and delta."""
    whole = total(events)
    rho = total_rho(events, whole.neighbours)
    return (
        spent_units(whole.epsilon, NANO),
        whole.delta,
        math.inf if rho is None else spent_units(rho, NANO),
    )


def _costliest(parts: Sequence[tuple[Event, ...]]) -> tuple[Event, ...]:
    """Return the part whose charge is the largest in each of epsilon, delta and rho."""
    worst = max(parts, key=lambda events: (_units(events), total(events).epsilon))
    if any(
        cost > most
        for events in parts
        for cost, most in zip(_units(events), _units(worst), strict=True)
    ):
        raise SettingsError(
            "No candidate costs at least as much as each other one in epsilon, delta and rho, so "
            "that one charge could stand for all. Nothing was trained or charged. Tune one "
            "'mechanism' and 'calibration' at a time."
        )
    return worst


def mark_errors(learner: Any, X: Any, y: Array) -> Array:
    """Mark wrong predictions, each of which depends on one record.

    BLAS rounds a row's score by the shape of its table, by the order in which that is stored and,
    where threads share it, by the row's place. Learners that add up their products themselves say
    so by `predict_apart`; others are asked in tables of one form, which one thread works on.
    """
    predict = _answering(learner)
    with one_blas_thread():
        found = [
            predict(_one_shape(X[i : i + PREDICTED_AT_ONCE]))
            for i in range(0, len(y), PREDICTED_AT_ONCE)
        ]
    return np.asarray(np.concatenate([*found, y[:0]])[: len(y)] != y)


def _answering(learner: object) -> Callable[[Rows], Array]:
    """Return `predict_apart`, unless a subclass has a `predict` of its own."""
    owner = next((each for each in type(learner).__mro__ if "predict" in vars(each)), object)
    name = "predict_apart" if "predict_apart" in vars(owner) else "predict"
    return cast(Callable[[Rows], Array], getattr(learner, name))


def _one_shape(rows: Any) -> Any:
    """Return the rows with empty ones below them, always stored row by row."""
    if sparse.issparse(rows):
        missing = (PREDICTED_AT_ONCE - rows.shape[0], rows.shape[1])
        return sparse.vstack([rows, sparse.csr_array(missing)]).tocsr()
    table = np.zeros((PREDICTED_AT_ONCE, rows.shape[1]), order="C")
    table[: len(rows)] = rows
    return table


def _has(method: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    decorate: Callable[[Callable[..., Array]], Callable[..., Array]]
    decorate = available_if(lambda tuning: hasattr(tuning.learner, method))
    return decorate


class PrivateTuning(ClassifierMixin, PrivateLearner[TuningTask, TuningPlan]):  # type: ignore[misc]
    """Train candidates on parts of the records and keep the privately chosen best one.

    This is algorithm 3 of Chaudhuri et al. (2011).

    With k candidates the winner has seen one in k+1 of the records. Prefer `choose_on_public` where
    there are public records, and a handful of candidates where there are none.

    Parameters
    ----------
    learner
        The classifier to tune. Its epsilon, delta and noise are replaced by those given here; its
        neighbours, unit, records_per_person, public_size and classes hold for the whole table.
    candidates
        Sets of its parameters: a list of dictionaries, or one dictionary of lists for all
        combinations.
    epsilon, delta
        What the tuned learner costs in total, the trainings of all candidates included.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Attributes
    ----------
    best_params_, best_learner_
        The chosen candidate, and the learner trained with it on its part; the others are forgotten.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours of the learner, against
    everyone who sees any fitted attribute; charged once. Not hidden: the candidates. Proof:
    docs/guarantees/tuning.md.

    Examples
    --------
    >>> from consilience.learners.linear import PrivateLogisticRegression
    >>> X = np.linspace(-0.7, 0.7, 6000).reshape(-1, 2)
    >>> learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    >>> tuning = PrivateTuning(learner, {"regularization": [1e-3, 1e-1]}, epsilon=1.0)
    >>> tuning.fit(X, X[:, 0] > 0).guarantee_
    Guarantee(epsilon=1, delta=0, per record, replace-one, 2 assumptions)
    """

    reads_chunks: ClassVar[bool] = False

    best_index_: int
    best_params_: dict[str, Any]
    best_learner_: Any
    _learners: tuple[Any, ...]

    def __init__(
        self,
        learner: Any,
        candidates: Candidates,
        *,
        epsilon: float,
        delta: float = 0.0,
        noise: Noise | None = None,
    ) -> None:
        self.learner = learner
        self.candidates = candidates
        self.epsilon = epsilon
        self.delta = delta
        self.noise = noise

    @property
    def neighbours(self) -> str:  # type: ignore[override]
        """The learner's neighbour relation."""
        return str(self.learner.neighbours)

    @property
    def unit(self) -> str:  # type: ignore[override]
        """The learner's privacy unit."""
        return str(self.learner.unit)

    @property
    def schema(self) -> Schema | None:  # type: ignore[override]
        """The learner's schema: tables are encoded once, and candidates get their rows."""
        schema: Schema | None = getattr(self.learner, "schema", None)
        return schema

    def adopt_schema(self) -> None:
        """Leave it to the learner, whose settings these are."""

    def check_schema(self) -> None:
        """Refuse a setting of the learner that contradicts its schema."""
        if isinstance(self.learner, PrivateLearner):
            self.learner.check_schema()

    @property
    def classes_(self) -> Array:
        """The labels, in the order of the scores."""
        check_is_fitted(self, "best_learner_")
        return np.asarray(self.best_learner_.classes_)

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[TuningTask, list[str]]:
        """Check settings and records; return the task and the guarantee's assumptions."""
        if not is_classifier(self.learner) or not isinstance(self.learner, PrivateLearner):
            raise SettingsError(
                "PrivateTuning counts wrong predictions, so it tunes this project's classifiers "
                f"and nothing else. Got {type(self.learner).__name__}. Nothing was trained or "
                "charged. Tune it with choose_on_public."
            )
        if isinstance(self.learner, PrivateTuning):
            raise SettingsError(
                "PrivateTuning was given another PrivateTuning to tune, whose parts of parts no "
                "proof covers. Nothing was trained or charged. Pass its learner, and the "
                "candidates of both."
            )
        self._check_privacy(("selection",))
        X, y = validate_records(self, X, y)
        assumptions, classes = [], getattr(self.learner, "classes", None)
        if classes is None:
            classes = read_classes(y)
            assumptions.append(READ_LABELS)
        persons = check_persons(self, persons, X.shape[0])
        task = TuningTask(X, y, persons, np.asarray(classes))
        return task, [*assumptions, *self.assumed()]

    def _fit(self, task: TuningTask, assumptions: Sequence[str], *account: Any) -> Self:
        try:
            super()._fit(task, assumptions, *account)
        finally:
            self._learners = ()  # candidates that were not chosen are not released
        # The best learner is what is released, so it carries what tuning promises and the proof
        # that it was paid.
        best, promised = self.best_learner_, self.guarantee_
        if math.isinf(promised.epsilon) and promised.holds:
            # Which one is best follows from exact errors: it is no exact minimum of its records.
            promised = Guarantee.void(CHOSEN, unit=self.unit, neighbours=self.neighbours)
        best.guarantee_, best.receipt_ = promised, self.receipt_
        best.chosen_beside_ = self.chosen_beside_ = self.borrowed()
        if self.schema is not None:
            best.schema = self.schema  # it predicts for tables
        best.remember_settings()
        return self

    def _meaning(self) -> str:
        """Return what says how to read the numbers of the chosen candidate, whichever it is."""
        return " ".join([super()._meaning(), *(learner._meaning() for learner in self._learners)])

    @property
    def _cap(self) -> int:
        return int(self.learner.records_per_person) if self.unit == "person" else 1

    def _candidates(self, classes: Array | None = None) -> tuple[Any, ...]:
        """Return untrained learners with the candidates' settings, each at the full budget."""
        learner, listed = self.learner, _listed(self.learner, self.candidates)
        facts: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "noise": None}
        facts["schema"] = None  # candidates are given encoded rows
        if classes is not None:
            facts["classes"] = classes
        if getattr(learner, "public_size", None) is not None:
            facts["public_size"] = max(1, learner.public_size // (len(listed) + 1))
        known = learner.get_params()
        self._require(
            "delta", "delta" in known or not self.delta, f"0, for {type(learner).__name__} has none"
        )
        shared = {name: value for name, value in facts.items() if name in known}
        return tuple(clone(learner).set_params(**settings, **shared) for settings in listed)

    def _slots(self, task: TuningTask) -> tuple[Array, int]:
        """Return the slot of each record and how many there are: a record's row, or its person."""
        if task.persons is None:
            return np.arange(len(task.y)), len(task.y)
        persons, slots = np.unique(task.persons, return_inverse=True)
        return slots, len(persons)

    def _plan(self, task: TuningTask) -> TuningPlan:
        self._learners = self._candidates(task.classes)
        n_parts = len(self._learners) + 1
        slots, n_slots = self._slots(task)
        if self.neighbours == "replace-one" and n_slots < n_parts:
            raise SettingsError(
                f"PrivateTuning cuts the table into {n_parts} parts, which is more than it has "
                f"{self.unit}s (n_samples={n_slots}). Nothing was trained or charged. Try fewer "
                "candidates."
            )
        # Which records a candidate will meet is drawn after the charge, so each checks them all.
        for learner in self._learners:
            plan_fit(learner, **_part(task, np.ones(len(task.y), np.bool_)))
        if math.isinf(self.epsilon):
            return TuningPlan((), None, ())
        # A part's cost follows from its size alone, so any slots serve to find it; which they will
        # be is not drawn yet.
        some = _part(task, slots < n_slots // n_parts)
        trainings = tuple(tuple(plan_fit(learner, **some)[1].events) for learner in self._learners)
        for learner, events in zip(self._learners, trainings, strict=True):
            learner.events_ = events  # on a retry it is not trained, and still has this noise
        return plan_parts(trainings, self.unit, self.neighbours, self._cap)

    def _parts(self, task: TuningTask, n_parts: int, source: Source) -> list[Array]:
        """Draw the part of each slot, whatever it holds; return a mask of the records in each."""
        slots, n_slots = self._slots(task)
        if self.neighbours == "replace-one":
            # Parts of public sizes; a replaced unit inherits its slot.
            rank = np.argsort(source.permutation(n_slots))
            part = np.minimum(rank // (n_slots // n_parts), n_parts - 1)
        else:  # independently for each, so that one more or less moves no other
            part = source.words(n_slots) % np.uint64(n_parts)
        return [part[slots] == i for i in range(n_parts)]

    def _train(self, task: TuningTask, plan: TuningPlan, source: Source) -> None:
        parts = self._parts(task, len(self._learners) + 1, source)
        for learner, rows in zip(self._learners, parts, strict=False):
            if source.seeded:
                learner.set_params(noise=Noise(seed=int(source.words(1)[0])))
            learner.fit(**_part(task, rows))
        judged = np.flatnonzero(parts[-1])
        if task.persons is not None:
            judged = judged[
                cap_records(task.persons[judged], self._cap, source.uniform(len(judged)))
            ]
        errors = [
            mark_errors(learner, task.X[judged], task.y[judged]).sum() for learner in self._learners
        ]
        scores = -np.asarray(errors, dtype=np.float64)
        self._keep(
            int(scores.argmax())
            if plan.selection is None
            else select(scores, event=plan.selection, source=source)
        )

    def _keep(self, best: int) -> None:
        self.best_index_ = best
        self.best_params_ = _listed(self.learner, self.candidates)[best]
        self.best_learner_ = self._learners[best]

    def _guarantee(self, events: Sequence[Event], assumptions: Sequence[str]) -> Guarantee:
        whole = super()._guarantee(events, assumptions)
        return compose_disjoint(whole, assumption=DISJOINT) if events else whole

    def assumed(self) -> tuple[str, ...]:
        """Return what any candidate assumes of any table."""
        every = [said for learner in self._candidates() for said in learner.assumed()]
        return tuple(dict.fromkeys(every))

    def borrowed(self) -> dict[object, Guarantee]:
        """Return what the candidates show of other private records; the choice depends on all."""
        return {
            origin: cost
            for learner in self._candidates()
            for origin, cost in learner.borrowed().items()
        }

    def released_state(self) -> dict[str, Array]:
        """Return the released arrays."""
        return {
            "best": np.array([self.best_index_]),
            **{f"of_{k}": v for k, v in self.best_learner_.released_state().items()},
        }

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        self._keep(int(state["best"][0]))
        self.best_learner_.restore_state(
            {name[3:]: value for name, value in state.items() if name.startswith("of_")}
        )

    def predict(self, X: Any) -> Array:
        """Return the best learner's predictions."""
        check_is_fitted(self, "best_learner_")
        return np.asarray(self.best_learner_.predict(X))

    @_has("predict_proba")
    def predict_proba(self, X: Any) -> Array:
        """Return the best learner's probabilities."""
        check_is_fitted(self, "best_learner_")
        return np.asarray(self.best_learner_.predict_proba(X))

    @_has("decision_function")
    def decision_function(self, X: Any) -> Array:
        """Return the best learner's scores."""
        check_is_fitted(self, "best_learner_")
        return np.asarray(self.best_learner_.decision_function(X))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = get_tags(self.learner).input_tags.sparse
        tags.non_deterministic = self.noise is None  # even without privacy: the parts are drawn
        return tags
