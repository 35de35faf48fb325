"""Average: one linear model out of many, weighted equally, by size or by precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple, Self, Unpack

import numpy as np
from scipy.linalg import helmert

from consilience.aggregators.base import (
    Aggregator,
    Array,
    Charge,
    Description,
    Ensemble,
    Joining,
    Learner,
    Outlook,
)
from consilience.aggregators.members import (
    DISJOINT,
    LinearEnsemble,
    Member,
    align_members,
    are_equal_shares,
    are_shares,
    as_members,
    cap_shares,
    class_shares,
    dense,
    joint_guarantee,
    public_sizes,
)
from consilience.errors import SettingsError
from consilience.learners.ball import Ball, intercept_to_user
from consilience.learners.base import (
    LEAST_EPSILON,
    PrivateLearner,
    is_delta,
    is_epsilon,
    is_positive,
)
from consilience.learners.perturbation import LinearTask, output_sensitivity, plan_perturbation
from consilience.privacy.accounting import Closing, Event, Gaussian, L2Laplace
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.mechanisms import Noise, Source, draw_error
from consilience.privacy.spending import Account, state_guarantee
from consilience.privacy.vector_noise import (
    calibrate_shared,
    close_vector,
    closing_event,
    draw_vector,
    public_radius,
    with_sensitivity,
)
from consilience.tables.public import Public

TRUSTED = "the aggregator is trusted: it sees the sites' exact models"


# How members count, in words; WeightedVote uses some of the same rules.
WEIGHING = {
    "equal": "Every member counts the same.",
    "size": "A member counts in proportion to the number of records it was trained on.",
    "precision": "A member with less noise counts for more. More records or a larger epsilon mean "
    "less noise.",
}


ROBUST = {
    "median": "Each coefficient is the median of the members' own: every member counts the same, "
    "and a minority cannot move it far.",
    "trimmed": "Each coefficient is the mean of the members' own without the largest and the "
    "smallest quarter: every member counts the same.",
}


@dataclass(eq=False)
class Average(Aggregator):
    """Average members' coefficients.

    Parameters
    ----------
    weights
        ``"precision"`` weighs by what the known noise scales and sizes imply
        (docs/guarantees/average.md),
        ``"size"`` by the public number of units, ``"equal"`` not at all.
    epsilon, delta
        None: members bring their own noise, and averaging is post-processing. A number, or one per
        member: members are exact models, and the aggregator adds noise once, enough for each site's
        epsilon.
    classes
        The declared classes; otherwise the union of the members'.
    curvature
        Public guess of the mean second derivative along a coordinate, used by ``"precision"`` where
        no public records are given.
    robust
        ``"median"`` or ``"trimmed"`` takes the median of each coefficient, or its mean without the
        outer quarters, over all members alike, so that a minority of wrong members cannot decide;
        `weights` are not used then. It costs accuracy where members are honest: the median of noisy
        coefficients varies by up to a quarter more than their mean. Not with `epsilon`.

    Privacy
    -------
    Without `epsilon`: each site's own guarantee, against everyone. With it: `epsilon` per unit of
    each site against those who see the ensemble, not against the aggregator. Proof:
    docs/guarantees/average.md.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> members = [
    ...     cs.PrivateLogisticRegression(epsilon=epsilon, schema=schema).fit(table)
    ...     for epsilon in (1.0, 2.0, 4.0)
    ... ]
    >>> ensemble = cs.Average("precision").combine(members)
    >>> ensemble.guarantee, ensemble.predict([[-1.0], [1.0]]).tolist()
    (Guarantee(epsilon=4, delta=0, per record, replace-one, 1 assumption), ['no', 'yes'])
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "average": {},
        "average-equal": {"weights": "equal"},
        "average-size": {"weights": "size"},
    }
    combines_coefficients = True
    makes = LinearEnsemble.kind

    weights: str = "precision"
    _: KW_ONLY
    epsilon: float | Sequence[float] | None = None
    delta: float = 0.0
    classes: Sequence[Any] | None = None
    curvature: float = 0.02
    robust: str | None = None
    noise: Noise | None = None

    def __post_init__(self) -> None:
        self._require("weights", self.weights in WEIGHING, "'precision', 'size' or 'equal'")
        self._require("robust", self.robust in (None, *ROBUST), "'median', 'trimmed' or None")
        alone = self.robust is None or self.epsilon is None
        self._require("robust", alone, "None with epsilon: its noise is calibrated to a mean")

    @property
    def takes_branches(self) -> bool:
        """Whether weights follow from sizes alone."""
        return self.weights in ("size", "equal") and self.epsilon is None

    def check_settings(self) -> None:
        """Refuse settings that cannot work, noise that nothing can be hidden by among them."""
        super().check_settings()
        self._require("curvature", is_positive(self.curvature), "a number > 0")
        self._require("delta", is_delta(self.delta), "a number in [0, 1)")
        if self.draws_noise:
            self.member_epsilons(np.asarray(self.epsilon).size)

    @property
    def stays_within_members(self) -> bool:
        """Tell that a mean or a median does, unless noise is added to it."""
        return self.epsilon is None

    def assumed(self) -> tuple[str, ...]:
        """Return what noise at a trusted hub rests on."""
        return (DISJOINT, TRUSTED)

    def may_weigh(self, weights: Array) -> bool:
        """Tell whether these are shares, equal ones where all count the same."""
        if self.weights == "equal" or self.robust is not None:
            return are_equal_shares(weights)
        return are_shares(weights, self.max_weight)

    def with_budget(self, epsilons: Sequence[float]) -> Self:
        """Return a copy with each site's epsilon, if it draws noise; exact if one is infinite."""
        made = super().with_budget(epsilons)
        if self.draws_noise:
            made.epsilon = list(epsilons)
            if math.isinf(min(epsilons)):
                made.epsilon, made.delta = None, 0.0
        return made

    def describe(self) -> Description:
        """Return its title and what the weights mean."""
        if self.robust is not None:
            return Description(f"Average ({self.robust})", ROBUST[self.robust])
        return Description(f"Average ({self.weights})", WEIGHING[self.weights])

    @classmethod
    def alternatives(cls, learner: Learner | None = None) -> Sequence[Mapping[str, Any]]:
        """Return one way for each kind of weights."""
        return [{"weights": weights} for weights in ("equal", "size", "precision")]

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the averages that a plan compares: of noisy models, and with noise at the hub."""
        found = {"average": cls("equal")}
        if len(epsilons) > 1:
            found |= {"average by size": cls("size"), "average by precision": cls()}
        budget = list(epsilons) if len(epsilons) > 1 else epsilons[0]
        found["average, trusted hub"] = cls("size", epsilon=budget, delta=learner.delta)
        return found

    def is_predictable(self, learner: PrivateLearner[Any, Any], *, public: bool) -> bool:
        """Tell that any weighted mean can be predicted."""
        return self.robust is None

    def expected(self, joining: Joining) -> Outlook:
        """Return the law of the weighted mean of the sites' models."""
        if self.epsilon is not None:
            return joining.at_trusted_hub(self)
        shares = joining.shares(self)
        return joining.average(shares), joining.average_bound(shares)

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> LinearEnsemble:
        """Return the weighted average of linear `members`; `public` records improve the weights."""
        self.check_settings()
        found = as_members(members)
        classes, coef, intercept, known = align_members(found, self.classes)
        shares = self.weigh(found, public)
        mass = class_shares(shares, known, coef.shape[1])
        mean = np.einsum("nk,nkd->kd", mass, coef)
        offset = np.einsum("nk,nk->k", mass, intercept)
        own = tuple(member.guarantee for member in found)
        if self.robust is not None:
            mean, offset = (_middle(part, mass > 0, self.robust) for part in (coef, intercept))
        if self.epsilon is None:
            return LinearEnsemble(classes, mean, offset, shares, joint_guarantee(found), own)
        if not known.all():
            raise SettingsError(
                "Noise at the aggregator needs members that all know the same classes. Nothing "
                "was combined. Declare the classes at every site."
            )
        plan = _Central(self, found, shares)
        account = Account(**charge)
        state = self._run(
            lambda source: plan.draw(mean, offset, source),
            plan.events,
            account,
            lambda: [member.fingerprint() for member in found],
        )
        whole, each = plan.guarantees()
        return LinearEnsemble(classes, state["coef"], state["intercept"], shares, whole, each)

    def leave_out(
        self, ensemble: Ensemble, place: int, learner: PrivateLearner[Any, Any]
    ) -> LinearEnsemble | None:
        """Return the mean of the other members, with what noise there is in it.

        Only of a mean, and of members that know the same classes: else a member's weight differs
        from class to class.
        """
        (member,) = as_members([learner])
        known = np.array_equal(np.asarray(member.classes), np.asarray(ensemble.classes))
        if self.robust is not None or not isinstance(ensemble, LinearEnsemble) or not known:
            return None
        share = float(ensemble.weights[place])
        if not share < 1:
            return None
        assert member.coef is not None
        assert member.intercept is not None
        return LinearEnsemble(
            ensemble.classes,
            (ensemble.coef - share * member.coef) / (1 - share),
            (ensemble.intercept - share * member.intercept) / (1 - share),
            np.delete(ensemble.weights, place) / (1 - share),
            ensemble.guarantee,
            (),
        )

    def member_epsilons(self, n_members: int) -> Array:
        """Return the epsilon of each member, where noise is drawn; refuse what cannot be one."""
        self._take_plain_numbers()
        epsilons = np.broadcast_to(np.asarray(self.epsilon, dtype=np.float64), (n_members,))
        if not all(is_epsilon(float(e)) for e in epsilons) or not is_delta(self.delta):
            raise SettingsError(
                f"The 'epsilon' of Average must be finite and >= {LEAST_EPSILON:g}, one number or "
                "one per member, "
                f"and 'delta' lie in [0, 1). Got {self.epsilon!r} and {self.delta!r} "
                "instead. Nothing was combined."
            )
        return epsilons

    def weigh(self, members: Sequence[Member], public: Public | None) -> Array:
        """Return the members' weights."""
        if self.weights == "equal" or self.robust is not None:
            return np.full(len(members), 1 / len(members))
        sizes = public_sizes(members, self.weights, "or")
        if self.weights == "size":
            return cap_shares(sizes / sizes.sum(), self.max_weight)
        curvature = self.curvature if public is None else typical_curvature(members, public)
        return cap_shares(precision_weights(members, curvature), self.max_weight)


def _middle(values: Array, known: Array, robust: str) -> Array:
    """Return each coordinate's median or trimmed mean over the members that know its class."""
    out = np.zeros(values.shape[1:])
    for k in range(values.shape[1]):
        of_class = np.sort(values[known[:, k], k], axis=0)
        if not len(of_class):
            continue
        # A quarter is cut at both ends, so that with three members or more none decides alone.
        cut = (len(of_class) - 1) // 2 if robust == "median" else -(-len(of_class) // 4)
        cut = min(cut, (len(of_class) - 1) // 2)
        out[k] = of_class[cut : len(of_class) - cut].mean(axis=0)
    return out


def precision_weights(members: Sequence[Member], curvature: float) -> Array:
    """Return weights ∝ 1 / (noise variance · shrinkage + sampling variance).

    The sampling variance is that of a typical model with the member's public size. A member that
    its ridge shrinks has little noise, and says as much less.
    """
    inverse = []
    for member in members:
        dimension = np.asarray(member.coef).shape[1]
        sampling = dimension / 100 / max(member.size or 0, 1)
        noise = member.noise_variance(curvature) * member.shrinkage(curvature)
        inverse.append(1 / (member.to_user**2 * (noise + sampling)))
    return np.asarray(inverse) / math.fsum(inverse)


def typical_curvature(members: Sequence[Member], public: Public) -> float:
    """Return how much the loss typically bends along a flat direction of the public records.

    That is the mean of the smaller half of their second moment's eigenvalues, times the largest
    curvature of the logistic loss.
    The noise that survives averaging is the noise along flat directions, so those set the damping.
    """
    scale = members[0].to_user
    X = np.asarray(dense(public.X), dtype=np.float64) * scale
    values = np.linalg.eigvalsh(X.T @ X / max(len(X), 1))
    return float(0.25 * values[: max(1, len(values) // 2)].mean())


def _settings(learner: object) -> list[Any]:
    """Return what a linear learner was asked for, as far as noise and ridge may depend on it."""
    return [
        value
        for name, value in vars(learner).items()
        if name not in ("classes", "noise") and name[-1] != "_"
    ]


class _Move(NamedTuple):
    """How far a member's minimum moves, and how far from it the computed one may be."""

    reach: float  # by one unit's records
    slack: float  # by stopping early
    longest: float  # any minimum
    n_outputs: int
    dimension: int


def common_settings(members: Sequence[Member]) -> tuple[Ball, str, str] | None:
    """Return ball, unit and neighbours of all members; None if not all have the same ones."""
    learners = [m.learner for m in members if hasattr(m.learner, "data_norm")]
    facts = {(Ball.of(o), o.unit, o.neighbours) for o in learners}
    return facts.pop() if len(facts) == 1 and len(learners) == len(members) else None


class TrustedNoise:
    """Noise once, at an aggregator that is trusted with exact members, and what it promises."""

    noise: Noise | None
    event: L2Laplace | Gaussian
    closing: Closing

    @property
    def events(self) -> list[Event]:
        """What will be drawn."""
        return [self.event, self.closing]

    def stated(self, reach: float) -> Guarantee:
        """Return what holds for those who can move the exact result by `reach`."""
        return state_guarantee(
            [with_sensitivity(self.event, reach), self.closing],
            noise=self.noise,
            unit=self.event.unit,
            neighbours=self.event.neighbours,
            assumptions=(DISJOINT, TRUSTED),
        )


class _Central(TrustedNoise):
    """Noise on the average: enough for the site that needs most.

    Proof: docs/guarantees/average.md.
    """

    def __init__(self, average: Average, members: Sequence[Member], weights: Array) -> None:
        epsilons = average.member_epsilons(len(members))
        alike = common_settings(members) is not None and len({m.to_user for m in members}) == 1
        if not (alike and all(m.is_exact for m in members)):
            raise SettingsError(
                "Noise at the aggregator is for exact members (epsilon=math.inf) of this package "
                "with one data_norm, intercept setting, unit and neighbours. Nothing was "
                "combined. Leave out Average's epsilon if members brought noise."
            )
        self.members, self.noise = members, average.noise
        self.outputs, self.features = np.asarray(members[0].coef).shape
        self.intercept = members[0].has_constant
        moves = self._moves()
        if len({move.n_outputs for move in moves}) > 1:
            raise SettingsError(
                "Noise at the aggregator is for members that all have one model per class, or all "
                "one model for all classes. Nothing was combined. Train one kind of learner."
            )
        # One-against-rest members move once per class; softmax members move in one class less.
        self.joint = moves[0].n_outputs == self.outputs
        classes_moved = 1 if self.joint else self.outputs
        reaches = [w * move.reach for w, move in zip(weights, moves, strict=True)]
        self.reach = np.asarray(reaches) * math.sqrt(classes_moved)
        self.dimension = moves[0].dimension * classes_moved
        who = {"unit": members[0].learner.unit, "neighbours": members[0].learner.neighbours}
        self.event = calibrate_shared(self.reach, epsilons, delta=average.delta, **who)
        released = self.outputs * (self.features + self.intercept)
        # Inexact minima and rounding, averaged like the minima themselves; then the draw's own
        # rounding.
        sums = (len(members) + 8) * 2.0**-52
        distance = float(
            sum(w * (m.slack + sums * m.longest) for w, m in zip(weights, moves, strict=True))
        )
        distance *= math.sqrt(classes_moved)
        distance += 2 * draw_error(released) * public_radius(self.event, self.dimension)
        self.closing = closing_event(released, distance, epsilon=float(epsilons.min()), **who)

    def _moves(self) -> list[_Move]:
        """Return how far each member's minimum moves, once for equal settings and sizes."""
        known: dict[Any, _Move] = {}  # thousands of sites may share their settings and size
        moves = []
        for member in self.members:
            size = int(member.size or 1)
            same = (type(member.learner), size, *_settings(member.learner))
            if same not in known:
                loss = member.learner.loss(self.outputs if self.outputs > 1 else 2)
                task = LinearTask(loss, self.features + self.intercept, size, size)
                plan = plan_perturbation(member.learner, task)
                known[same] = _Move(
                    output_sensitivity(member.learner, task),
                    plan.inexactness,
                    plan.longest,
                    loss.n_outputs,
                    task.dimension_of_noise,
                )
            moves.append(known[same])
        return moves

    def guarantees(self) -> tuple[Guarantee, tuple[Guarantee, ...]]:
        """Return the joint guarantee and each site's: its own reach against the common noise."""
        each = {reach: self.stated(reach) for reach in set(self.reach.tolist())}
        whole = self.stated(self.event.sensitivity)
        return whole, tuple(each[reach] for reach in self.reach.tolist())

    def draw(self, coef: Array, intercept: Array, source: Source) -> dict[str, Array]:
        """Add the noise in coordinates of the unit ball, where sensitivities hold."""
        drawn = draw_vector(self.dimension, event=self.event, source=source)
        drawn = drawn.reshape(-1, self.features + self.intercept)
        if self.outputs > 1 and self.joint:
            drawn = helmert(self.outputs).T @ drawn
        scale = self.members[0].to_user
        half = intercept_to_user(self.members[0].learner)
        ball = coef / scale
        if self.intercept:
            ball = np.hstack([ball, (intercept / half)[:, None]])
        ball = close_vector(ball + drawn, event=self.closing, source=source)
        if not self.intercept:
            return {"coef": ball * scale, "intercept": intercept}
        return {"coef": ball[:, :-1] * scale, "intercept": ball[:, -1] * half}
