"""Shared by all aggregators whose noise hides a whole site.

The hub is trusted with the sites' exact models. Members may be classifiers of any kind: only what
they say about public records is used. Counts are exact integers and every member keeps its own
slot, so that one site moves its own votes and nothing else, rounding included. Proofs:
docs/guarantees/distillation.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from scipy import sparse
from sklearn.utils.validation import check_array

from consilience.aggregators.average import TRUSTED
from consilience.aggregators.base import Aggregator, Array, Learner, Table
from consilience.aggregators.distillation.noise import Rows
from consilience.aggregators.distillation.tally import Question, Tally, ask
from consilience.aggregators.members import DISJOINT, LinearEnsemble, are_equal_shares
from consilience.errors import SettingsError
from consilience.learners.ball import into_ball
from consilience.privacy.accounting import Event
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.mechanisms import Noise
from consilience.privacy.spending import state_guarantee
from consilience.tables.public import Public
from consilience.tables.values import as_doubles

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
    makes = LinearEnsemble.kind

    @property
    def hidden_neighbours(self) -> Neighbours | None:
        """The relation between sites that was asked for."""
        return Neighbours(self.neighbours)

    def assumed(self) -> tuple[str, ...]:
        """Return what hiding a site from those who see the release rests on."""
        return (DISJOINT, TRUSTED, OPEN_RECORDS, READ_CLASSES)

    def may_weigh(self, weights: Array) -> bool:
        """Tell whether every member has one vote."""
        return are_equal_shares(weights)

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
        super().check_settings()
        self._check_budget()
        fits = self.neighbours in ("replace-one", "null-one")
        self._require("neighbours", fits, "'replace-one' or 'null-one'")
        self._require_moderate("data_norm")

    def _tally(self, members: Sequence[Any] | Tally, public: Public | None) -> Tally:
        """Return what `members` are asked about, and count when that is needed."""
        if isinstance(members, Tally):
            return members
        if public is None:
            raise SettingsError(
                f"{type(self).__name__} needs public records for the members to label. Nothing "
                "was combined. Pass public=Public(X)."
            )
        return ask(members, public, classes=self.classes, soft=self.soft)

    def _rows(self, tally: Tally) -> Rows:
        """Return the tally's records in the unit ball, computed once."""
        key = ("rows", self.data_norm, self.fit_intercept)
        if key not in tally.known:
            X = self._in_ball(tally.public.X)
            tally.known[key] = Rows(X, len(tally.classes), tally.n_members)
        return cast(Rows, tally.known[key])

    def _in_ball(self, table: Table) -> Array:
        """Return public records as dense rows of length <= 1, with a constant if one is learned."""
        X = as_doubles(table) if sparse.issparse(table) else table
        X = check_array(X, accept_sparse="csr", dtype=np.float64)
        return np.ascontiguousarray(into_ball(X.toarray() if sparse.issparse(X) else X, self))

    def _guarantee(self, events: Sequence[Event], declared: bool, *extra: str) -> Guarantee:
        """Return what holds for a site."""
        return state_guarantee(
            events,
            noise=self.noise,
            unit=Unit.SITE,
            neighbours=events[0].neighbours if events else Neighbours(self.neighbours),
            assumptions=(DISJOINT, TRUSTED, *extra, *(() if declared else (READ_CLASSES,))),
        )
