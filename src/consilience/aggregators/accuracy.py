"""How well a member does on records of its own site, counted apart from its training.

In a study a site hands its score over with its model (`learners/scored.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from consilience.aggregators.base import Array, Charge
from consilience.aggregators.members import Classifier, Member, as_members
from consilience.errors import SchemaMismatch, SettingsError, shielded
from consilience.learners.base import LEAST_EPSILON, is_epsilon
from consilience.learners.scored import PrivateAccuracy, RightAnswers
from consilience.learners.tuning import mark_errors
from consilience.privacy.accounting import Event
from consilience.privacy.guarantee import Neighbours, Unit, compose, compose_disjoint
from consilience.privacy.mechanisms import Noise, Source
from consilience.privacy.spending import Account, run_charged, state_guarantee
from consilience.tables.groups import CAP, identify, is_cap
from consilience.tables.values import as_doubles, to_python

HELD_OUT = (
    "the records that accuracy was counted on were kept from training by slot, whatever they hold"
)


@shielded
def hold_out(
    n_records: int,
    *,
    neighbours: str,
    share: float = 0.2,
    persons: ArrayLike | None = None,
    noise: Noise | None = None,
) -> NDArray[np.bool_]:
    """Mark records to keep from training, so that counting accuracy on them costs nothing more.

    Privacy
    -------
    A record's part never depends on what it holds, nor, under add-remove, on its place or on how
    many others there are: one draw for each slot, or a permutation of the public number of slots
    (docs/guarantees/integration.md).
    """
    if neighbours not in ("replace-one", "add-remove") or not 0 < share < 1:
        raise SettingsError(
            "Holding out needs neighbours 'replace-one' or 'add-remove' and a share in (0, 1). Got "
            f"{neighbours!r} and {share!r} instead."
        )
    source = (Noise() if noise is None else noise).open()
    if source.seeded and (neighbours == "add-remove" or persons is not None):
        raise SettingsError(
            "Under 'add-remove' a seed would move every record after one that is removed to "
            "another part, and whoever knows it could tell; so it would all persons whose ids come "
            "after that of one who is replaced. Nothing was held out. Leave out 'noise', or use "
            "'replace-one' without persons, where the parts of slots may be known."
        )
    slots = np.arange(n_records) if persons is None else identify(persons)
    if len(slots) != n_records:
        raise SchemaMismatch(
            "'persons' must hold one id per record. Nothing was held out. Check its length."
        )
    n_slots = int(slots.max(initial=-1)) + 1
    if neighbours == "add-remove":
        kept: Array = source.uniform(n_slots) < share
    else:
        kept = source.permutation(n_slots) < math.floor(share * n_slots)
    return np.asarray(kept[slots], dtype=np.bool_)


class Counting(Charge, total=False):
    """How `private_accuracy` counts, and where it is charged."""

    neighbours: str | None
    persons: ArrayLike | None
    records_per_person: int | None
    noise: Noise | None


@shielded
def private_accuracy(
    learner: Classifier, X: Any, y: ArrayLike, *, epsilon: float, **settings: Unpack[Counting]
) -> PrivateAccuracy:
    """Count how many of these records `learner` predicts right, and release the count with noise.

    Parameters
    ----------
    learner
        Fitted, on other records of the site (`hold_out`) or on the same: that only decides how
        costs add up.
    neighbours
        The learner's own unless given.
    persons, records_per_person
        Whose each record is, and how many of each person's are kept: persons are then the unit.
    ledger, dataset, key
        As in a learner's ``fit``: charged first, then drawn.
    noise
        ``Noise(seed=...)`` for tests and experiments; voids the guarantee.

    Privacy
    -------
    epsilon per unit and neighbours as set, against everyone. Add-remove: right and wrong
    predictions are both noisy, and a record is in one of the two counts. Replace-one: the number of
    records is public (of persons, where they are the unit, while their records are noisy counts).
    Proof: docs/guarantees/integration.md.
    """
    if not is_epsilon(epsilon):
        raise SettingsError(
            f"The 'epsilon' of private_accuracy must be a finite number >= {LEAST_EPSILON:g}. Got "
            f"{epsilon!r} instead. Nothing was counted. An exact accuracy never leaves a site; "
            "measure it on public records instead."
        )
    relation = _relation(learner, settings.get("neighbours"))
    held = _HeldOut.predict(
        learner, X, y, settings.get("persons"), settings.get("records_per_person")
    )
    unit = Unit.RECORD if held.persons is None else Unit.PERSON
    counting = RightAnswers(unit, relation, held.cap, float(epsilon))
    event = counting.event
    assert event is not None

    # A retry must not state the first count over another table's number.
    n_public = None if counting.counts_wrong else len(held.wrong)

    def draw(source: Source) -> dict[str, Array]:
        return {"counts": counting.draw(held.wrong, held.persons, source)}

    noise = settings.get("noise")
    account = Account(settings.get("ledger"), settings.get("dataset"), settings.get("key"))
    (member,) = as_members([learner])
    state, receipt = run_charged(
        draw,
        (event,),
        noise=noise,
        account=account,
        purpose="private_accuracy",
        means=lambda: repr((member.fingerprint(), held.cap, str(unit), str(relation), n_public)),
    )
    guarantee = state_guarantee((event,), noise=noise, unit=unit, neighbours=relation)
    return PrivateAccuracy(*counting.read(state["counts"], n_public), (event,), guarantee, receipt)


@dataclass(frozen=True)
class _HeldOut:
    """Which predictions are wrong, and whose they are; `cap` of each person's count."""

    wrong: Array
    persons: Array | None
    cap: int

    @classmethod
    def predict(
        cls,
        learner: Classifier,
        X: Any,
        y: ArrayLike,
        persons: ArrayLike | None,
        records_per_person: int | None,
    ) -> Self:
        """Check that records, labels and persons belong together, and predict all records.

        All that can fail because of a record fails here, before anything is charged.
        """
        rows = as_doubles(X)
        labels, cap = (
            np.asarray(y),
            1 if records_per_person is None else to_python(records_per_person),
        )
        if (persons is None) != (records_per_person is None) or not is_cap(cap):
            raise SettingsError(
                f"Hiding persons needs both 'persons' and 'records_per_person', {CAP}; hiding "
                "records needs neither. Nothing was counted."
            )
        n_persons = len(labels) if persons is None else np.size(persons)
        if rows.ndim != 2 or labels.shape != (rows.shape[0],) or n_persons != len(labels):
            raise SchemaMismatch(
                "Records, labels and persons differ in number. Nothing was counted. Check their "
                "shapes."
            )
        ids = None if persons is None else identify(persons)
        return cls(mark_errors(learner, rows, labels), ids, cap)


def _relation(learner: object, neighbours: str | None) -> Neighbours:
    asked = getattr(learner, "neighbours", None) if neighbours is None else neighbours
    if asked not in ("replace-one", "add-remove"):
        raise SettingsError(
            "The 'neighbours' of private_accuracy must be 'replace-one' or 'add-remove', and the "
            f"learner has none of its own. Got {asked!r} instead. Nothing was counted."
        )
    return Neighbours(asked)


@dataclass(frozen=True)
class ScoredMember(Member):
    """A member with an accuracy that its site paid for; its guarantee and events cover both."""

    brought: PrivateAccuracy

    @property
    def accuracy(self) -> PrivateAccuracy:
        """How well it does on its own site's records."""
        return self.brought

    @property
    def training_events(self) -> tuple[Event, ...]:
        """What was drawn to train it."""
        return self.events[: len(self.events) - len(self.brought.events)]


@shielded
def add_accuracy(
    member: object, accuracy: PrivateAccuracy, *, held_out: bool = False
) -> ScoredMember:
    """Join a fitted learner and its accuracy into one member.

    ``held_out=True`` states, as an assumption of the guarantee, that no unit was in training and in
    the count, and by `hold_out`: then the larger of the two epsilons holds. Otherwise they add up.
    """
    (one,) = as_members([member])
    facts = {name: getattr(one, name) for name in Member.__dataclass_fields__}
    if one.guarantee is not None:
        parts = (one.guarantee, accuracy.guarantee)
        facts["guarantee"] = (
            compose_disjoint(*parts, assumption=HELD_OUT) if held_out else compose(*parts)
        )
    facts["events"] = (*one.events, *accuracy.events)
    return ScoredMember(**facts, brought=accuracy)
