"""Shared by all aggregators whose noise hides a whole site.

The hub is trusted with the sites' exact models. Members may be classifiers of any kind: only what
they say about public records is used. Counts are exact integers and every member keeps its own
slot, so that one site moves its own votes and nothing else, rounding included. Proofs:
docs/guarantees/distillation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from scipy import sparse
from sklearn.utils.validation import check_array

from consilience.aggregators.average import TRUSTED
from consilience.aggregators.base import Aggregator, Array, Learner, Table
from consilience.aggregators.distillation.noise import Rows
from consilience.aggregators.distillation.tally import Question, Tally, count_votes, voters
from consilience.aggregators.members import DISJOINT, LinearEnsemble
from consilience.errors import SettingsError
from consilience.learners.ball import into_ball
from consilience.learners.base import is_positive
from consilience.privacy.accounting import Event
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.mechanisms import Noise, Source
from consilience.privacy.spending import Account, run_charged, state_guarantee
from consilience.tables.public import Public

OPEN_RECORDS = "the records that members labelled are public"
READ_CLASSES = "the set of labels is public: it was read from the members"


@dataclass(frozen=True)
class DistilledEnsemble(LinearEnsemble):
    """A linear classifier that hides any one site; predicts like a fitted scikit-learn estimator.

    ``guarantee`` is per site, ``public_guarantee`` per record of the aggregation data where that is
    protected too. ``statistic`` is the noisy statistic, if that was released: more models may be
    computed from it at no cost.
    """

    events: tuple[Event, ...] = ()
    regularization: float = math.nan
    public_guarantee: Guarantee | None = None
    statistic: Array | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Ballot:
    """What members are asked about, and all that is known before they are; `count` asks them."""

    count: Callable[[], Tally]
    public: Public
    classes: Array
    declared: bool
    own: tuple[Guarantee | None, ...]
    # Belongs to the tally, which may be asked again and again; see `Tally.known`.
    known: dict[Any, Any] = field(default_factory=dict)


class HidesSites(Aggregator):
    """An aggregator whose noise hides a whole site. Subclasses set these attributes."""

    epsilon: float
    delta: float
    neighbours: str
    data_norm: float
    fit_intercept: bool
    classes: Sequence[Any] | None
    noise: Noise | None
    soft: str = "votes"
    hidden_unit = Unit.SITE

    @property
    def hidden_neighbours(self) -> Neighbours | None:
        """The relation between sites that was asked for."""
        return Neighbours(self.neighbours)

    def problem_with(self, learner: Learner, settings: Mapping[str, Any]) -> str | None:
        """Return why such learners cannot take part, or None."""
        if learner.predicts_number:
            return f"{type(self).__name__} combines classifiers; use Average for regression"
        return super().problem_with(learner, settings)

    def question(self, public: Public) -> Question | None:
        """Ask about all public records, if members are asked at all."""
        return self._ask_about(public.X.shape[0]) if self.asks_votes else None

    def _ask_about(self, n_records: int) -> Question:
        classes = None if self.classes is None else tuple(self.classes)
        return Question(self.soft, classes, n_records)

    def check_settings(self) -> None:
        """Refuse settings that cannot work."""
        epsilon, delta = self.epsilon, self.delta
        infinite = isinstance(epsilon, float) and epsilon == math.inf
        self._require("epsilon", infinite or is_positive(epsilon), "a number > 0, or math.inf")
        no_delta = not isinstance(delta, bool) and delta == 0
        fits = no_delta or (is_positive(delta) and delta < 1)
        self._require("delta", fits, "a number in [0, 1)")
        fits = self.neighbours in ("replace-one", "null-one")
        self._require("neighbours", fits, "'replace-one' or 'null-one'")
        self._require("data_norm", is_positive(self.data_norm), "a finite number > 0")
        fits = self.noise is None or isinstance(self.noise, Noise)
        self._require("noise", fits, "None or a Noise value")

    def _ballot(self, members: Sequence[Any] | Tally, public: Public | None) -> Ballot:
        """Return what `members` are asked about; a tally was asked before."""
        if isinstance(members, Tally):
            tally = members
            facts = (tally.public, tally.classes, tally.declared, tally.own, tally.known)
            return Ballot(lambda: tally, *facts)
        if public is None:
            raise SettingsError(
                f"{type(self).__name__} needs public records for the members to label. Nothing "
                "was combined. Pass public=Public(X)."
            )
        found, every, declared = voters(members, self.classes)
        return Ballot(
            lambda: count_votes(found, public, classes=every.tolist(), soft=self.soft),
            public,
            every,
            declared,
            tuple(member.guarantee for member in found),
        )

    def _rows(self, ballot: Ballot) -> Rows:
        """Return the ballot's records in the unit ball, computed once for each tally."""
        key = ("rows", self.data_norm, self.fit_intercept)
        if key not in ballot.known:
            X = self._in_ball(ballot.public.X)
            ballot.known[key] = Rows(X, len(ballot.classes), len(ballot.own))
        return cast(Rows, ballot.known[key])

    def _in_ball(self, table: Table) -> Array:
        """Return public records as dense rows of length <= 1, with a constant if one is learned."""
        X = check_array(table, accept_sparse="csr", dtype=np.float64)
        return np.ascontiguousarray(into_ball(X.toarray() if sparse.issparse(X) else X, self))

    def _run(
        self, draw: Callable[[Source], dict[str, Array]], events: Sequence[Event], account: Account
    ) -> dict[str, Array]:
        """Charge, then draw."""
        state, _ = run_charged(
            draw, events, noise=self.noise, account=account, purpose=type(self).__name__
        )
        return state

    def _guarantee(self, events: Sequence[Event], declared: bool, *extra: str) -> Guarantee:
        """Return what holds for a site."""
        return state_guarantee(
            events,
            noise=self.noise,
            unit=Unit.SITE,
            neighbours=events[0].neighbours if events else Neighbours(self.neighbours),
            assumptions=(DISJOINT, TRUSTED, *extra, *(() if declared else (READ_CLASSES,))),
        )
