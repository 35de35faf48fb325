"""What every aggregator says about itself, and what it makes of its members: an ensemble.

An aggregator knows what it needs (public records, labels, exact members), what it draws and whom
that hides, how it weighs its members, and how to combine them. Studies, simulations, plans, the
command line, the hub and the dashboard ask the object; none of them keeps a list of names.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from consilience.display.html import bars, card
from consilience.errors import ConsilienceError, SettingsError, shield
from consilience.learners.base import PrivateLearner, Settings, spell_out
from consilience.privacy.accounting import Event
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source
from consilience.privacy.spending import Account, run_charged
from consilience.tables.public import Features, Public
from consilience.tables.schema import Schema
from consilience.text import shorten

if TYPE_CHECKING:
    from consilience.aggregators.average import Average
    from consilience.aggregators.distillation.distill import Distillation
    from consilience.aggregators.distillation.tally import Question
    from consilience.aggregators.feature import FeatureMethod
    from consilience.aggregators.labelled import UsesLabels

Array = NDArray[Any]
Table = ArrayLike | Features  # records, dense or sparse
Learner = type[PrivateLearner[Any, Any]]
Facts = dict[str, Any]
Rows = list[tuple[str, str]]
Tensors = dict[str, Array]
# How a fitted learner becomes plain facts and tensors, and how it is rebuilt from them.
TakeApart = Callable[[Any], tuple[Facts, Tensors]]
Outlook = tuple[Any, float]  # the law of a combined model, and a bound on its loss
Rebuild = Callable[[Mapping[str, Any], Mapping[str, Array]], Any]


@dataclass(frozen=True)
class Description:
    """An aggregator in words: a title for tables and charts, and a sentence on how it weighs."""

    title: str
    weighing: str


class Ensemble(ABC):
    """What aggregators make: it predicts like a fitted scikit-learn estimator.

    ``guarantee`` holds for one record at any site, ``guarantees`` are the members' own, and
    ``weights`` are the members' shares. A subclass that defines `kind` can be released: files
    store it under that name, as the plain facts and tensors that `to_parts` returns.
    """

    kind: ClassVar[str]
    classes: Array | None
    weights: Array
    guarantee: Guarantee | None
    guarantees: tuple[Guarantee | None, ...]
    members: tuple[Any, ...] = ()  # the learners that it keeps; none if it needs them no more

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "kind" in vars(cls):
            ENSEMBLES[cls.kind] = cls
        shield(cls)

    @property
    def classes_(self) -> Array:
        """Labels in the order of scores and probabilities, under scikit-learn's name."""
        return np.asarray(self.classes)

    @abstractmethod
    def predict(self, X: Table) -> Array:
        """Return each row's class, or number."""

    def shown_rows(self) -> Rows:
        """Return what a page shows of it beside classes, members and guarantee."""
        return []

    def _repr_html_(self) -> str:
        rows: Rows = [("guarantee", repr(self.guarantee) if self.guarantee else "none")]
        if self.classes is not None:
            rows.append(("classes", shorten(", ".join(map(str, self.classes.tolist())))))
        names = ((f"member {place}", w) for place, w in enumerate(self.weights.tolist(), 1))
        chart = bars(names, "Weight of each member") if len(self.weights) > 1 else ""
        return card(type(self).__name__, ("", [], [*rows, *self.shown_rows()]), chart=chart)

    @abstractmethod
    def to_parts(self, take_apart: TakeApart) -> tuple[Facts, Tensors]:
        """Return what a release holds: plain facts and tensors.

        `take_apart` does the same for a learner, for ensembles that keep their members.
        """

    @classmethod
    @abstractmethod
    def from_parts(
        cls,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Array],
        guarantee: Guarantee,
        weights: Array,
        rebuild: Rebuild,
    ) -> Self:
        """Return the ensemble that `to_parts` took apart.

        The parts come from a file of unknown origin: raise `ContributionRejected` for anything
        that no aggregator could have made.
        """


ENSEMBLES: dict[str, type[Ensemble]] = {}


class _Rehearsed(ConsilienceError):
    """Everything before a charge went well."""


class Charge(TypedDict, total=False):
    """Where the noise that combining draws is charged."""

    ledger: Ledger | None
    dataset: str | None
    key: str | None


class Joining(Protocol):
    """What aggregators ask of a plan, which predicts what they make of the sites' models.

    A law is planning's own: aggregators only pass it on.
    """

    def shares(self, way: Average | UsesLabels) -> Array:
        """Return the weight of one site of each kind."""

    def average(self, shares: Array) -> Any:
        """Return the law of the weighted mean of the sites' models."""

    def average_bound(self, shares: Array) -> float:
        """Return a bound on the loss of that mean."""

    def at_trusted_hub(self, way: Average) -> Outlook:
        """Return law and bound of the mean of exact models, with noise added once."""

    def blend(self, shares: Array) -> Outlook:
        """Return law and bound of the best ridge around the scaled mean."""

    def feature(self, way: FeatureMethod) -> Outlook:
        """Return law and bound of weights learned on the public records."""

    def distilled(self, way: Distillation) -> Outlook:
        """Return law and bound of a model learned from the members' votes."""


Combine = Callable[..., Ensemble]


def _with_public(combine: Combine) -> Combine:
    """Return a method `combine` that also takes public records as a pair of rows and labels."""

    @functools.wraps(combine)
    def call(
        self: Aggregator, members: Sequence[Any], public: object = None, **charge: Unpack[Charge]
    ) -> Ensemble:
        return combine(self, members, None if public is None else Public.of(public), **charge)

    return call


class Aggregator(Settings, ABC):
    """Combine what sites handed over into one ensemble.

    The attributes and methods below are all that the rest of the package asks. A subclass with
    settings ``epsilon`` and ``noise`` that follow the usual meaning (an epsilon of None or infinity
    draws no noise) needs to override few of them.
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # command-line name: settings
    needs_public: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    combines_coefficients: ClassVar[bool] = False  # so members must be linear
    combines_kinds: ClassVar[bool] = False  # members may be learners of different kinds
    asks_votes: ClassVar[bool] = False  # `combine` also takes the `Tally` that `question` counts
    weighing: ClassVar[str] = "The aggregator decides how members count."
    max_weight: float = 1.0  # of any member before labels are used; the study sets it
    # What its own noise hides; None is the members' own unit, a record or a person.
    hidden_unit: ClassVar[Unit | None] = None
    makes: ClassVar[str | None] = None  # the kind of ensemble that `combine` returns; None: any
    _is_rehearsal: bool = False

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "combine" in vars(cls):
            cls.combine = _with_public(cls.combine)  # type: ignore[method-assign]
        shield(cls, ("combine",))

    # ------------------------------------------------------------------ what it needs and hides

    @property
    def draws_noise(self) -> bool:
        """Whether combining draws noise with these settings, which must then be charged."""
        epsilon = getattr(self, "epsilon", None)
        return epsilon is not None and bool(np.isfinite(epsilon).all())

    @property
    def needs_exact_members(self) -> bool:
        """Whether it adds the noise itself and must be trusted with the sites' exact models."""
        return self.draws_noise

    @property
    def takes_branches(self) -> bool:
        """Whether ensembles of which nobody knows the noise can be members beside others."""
        return False

    @property
    def weighs_accuracy(self) -> bool:
        """Whether weights depend on accuracies: on public records, or that members bring."""
        return False

    @property
    def hidden_neighbours(self) -> Neighbours | None:
        """The neighbour relation of its own noise; None is the members' own."""
        return None

    @property
    def stays_within_members(self) -> bool:
        """Whether no coefficient that it makes is beyond all of its members' own."""
        return False

    def assumed(self) -> tuple[str, ...]:
        """Return what its guarantees may assume beside what those of its members do."""
        return ()

    def may_weigh(self, weights: Array) -> bool:
        """Tell whether members can have got these weights; any, if labels decide them."""
        return True

    def may_make(
        self,
        ensemble: Ensemble,
        learners: Sequence[PrivateLearner[Any, Any]],
        sizes: Sequence[int | None],
    ) -> bool:
        """Tell whether this can come of members of these sizes, as far as public facts tell.

        `learners` are what a site trains at the least epsilon that it may choose, and at the
        largest.
        """
        return self.makes in (None, ensemble.kind)

    def problem_with(self, learner: Learner, settings: Mapping[str, Any]) -> str | None:
        """Return why it cannot combine learners of this kind with these settings, or None."""
        if self.combines_coefficients and not learner.is_linear:
            name = type(self).__name__
            return f"{name} combines linear learners; use WeightedVote or PooledCounts for trees"
        return None

    # ------------------------------------------------------------------ how it is set up

    @classmethod
    def for_schema(cls, schema: Schema, **settings: Any) -> Self:
        """Return the aggregator with these settings and the schema's classes, if it takes them."""
        if schema.classes is not None and "classes" in inspect.signature(cls).parameters:
            settings["classes"] = list(schema.classes)
        return cls(**settings)

    def with_budget(self, epsilons: Sequence[float]) -> Self:
        """Return a copy that spends the smallest of the sites' epsilons, if it draws noise."""
        return self._with(epsilon=min(epsilons)) if self.draws_noise else self._with()

    def with_noise(self, noise: Noise | None, random_state: int) -> Self:
        """Return a copy that draws this noise, and public randomness where none was set.

        None leaves the noise as it is.
        """
        changes: dict[str, object] = {}
        if noise is not None and hasattr(self, "noise"):
            changes["noise"] = noise
        if getattr(self, "random_state", 0) is None:
            changes["random_state"] = random_state
        return self._with(**changes)

    def _with(self, **changes: object) -> Self:
        """Return a copy with these settings changed."""
        made = copy.copy(self)
        vars(made).update(changes)
        return made

    def at_site(self, schema: Schema) -> Self:
        """Return a copy that weighs members at a site whose own records are private."""
        raise SettingsError(
            f"{type(self).__name__} weighs no members at a site. Nothing was done. Leave out 'at', "
            "or use FeatureMethod."
        )

    def weigher(self, epsilon: float, delta: float) -> PrivateLearner[Any, Any]:
        """Return what learns the members' weights at a site, from `weighed_rows`."""
        raise NotImplementedError

    def weighed_rows(self, members: Sequence[Any], X: Table) -> Array:
        """Return what the members say of each record, scaled by public facts."""
        raise NotImplementedError

    def combine_weighed(
        self, members: Sequence[Any], weigher: PrivateLearner[Any, Any]
    ) -> Ensemble:
        """Return the ensemble of `members` with the weights that a fitted `weigher` learned."""
        raise NotImplementedError

    # ------------------------------------------------------------------ how others show it

    def describe(self) -> Description:
        """Return its title and how it weighs members, in words."""
        return Description(type(self).__name__, self.weighing)

    @classmethod
    def alternatives(cls, learner: Learner | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the settings with which a release by another aggregator is compared.

        Only settings that draw no noise. With a `learner`, only those worth comparing for it.
        """
        return ()

    # ------------------------------------------------------------------ what to expect of it

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the variants that a plan compares by default, by name.

        `epsilons` has one entry for each kind of site; `public` says whether there are public
        records. Only variants whose result can be predicted.
        """
        return {}

    def is_predictable(self, learner: PrivateLearner[Any, Any], *, public: bool) -> bool:
        """Tell whether `expected` knows what this aggregator makes of such learners."""
        return False

    def expected(self, joining: Joining) -> Outlook | None:
        """Return the law of the combined model and a bound on its loss; None if unpredictable.

        `joining` does the computing.
        """
        return None

    # ------------------------------------------------------------------ what it does

    def _run(
        self,
        draw: Callable[[Source], Tensors],
        events: Sequence[Event],
        account: Account,
        members: Callable[[], Sequence[str]],
    ) -> Tensors:
        """Charge, then draw; `members` returns fingerprints of what the result is made of."""
        settings = self._spelled()  # refused here if it cannot be spelled, not after the charge
        if self._is_rehearsal:
            members()
            raise _Rehearsed
        state, _ = run_charged(
            draw,
            events,
            noise=self.noise,
            account=account,
            purpose=type(self).__name__,
            means=lambda: repr((type(self).__name__, settings, list(members()))),
        )
        return state

    def _spelled(self) -> str:
        """Return the settings that say how a result is read."""
        return spell_out({k: v for k, v in vars(self).items() if k != "noise"})

    def question(self, public: Public) -> Question | None:
        """Return what members are asked about the public records; None if they are not asked."""
        return None

    def leave_out(
        self, ensemble: Ensemble, place: int, learner: PrivateLearner[Any, Any]
    ) -> Ensemble | None:
        """Return what the other members make, for the site whose member `learner` is at `place`.

        A site adapts a release to records that the release has seen; where its own part can be
        subtracted, what remains has not seen them. None where it cannot.
        """
        return None

    def rehearse(self, members: Sequence[Any], public: Public | None = None) -> None:
        """Do all of `combine` that comes before a charge, and raise what it would raise.

        Nothing is charged or drawn, so this tells who breaks combining where it draws noise.
        """
        try:
            self._with(_is_rehearsal=True).combine(members, public)
        except _Rehearsed:
            return

    @abstractmethod
    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> Ensemble:
        """Return the ensemble of `members`: contributions, fitted learners or `Member` values.

        Where noise is drawn, `dataset` is charged in `ledger` first; a retry with the same `key`
        returns the first result and charges nothing.
        """
