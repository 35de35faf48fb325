"""WeightedVote: classifiers of any kind vote, with weights from public or paid-for facts.

Xiang et al. (2018) weigh the sites' forests by accuracy times exp(n/N). Accuracies of sites are
nearly equal and exp(n/N) lies between 1 and e, so these weights are nearly equal too. The default
weighs by what a member's quality does depend on: how many records it was trained on, and with how
much noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Self, Unpack

import numpy as np

from consilience.aggregators.average import WEIGHING
from consilience.aggregators.base import (
    Aggregator,
    Array,
    Charge,
    Description,
    Ensemble,
    Facts,
    Learner,
    Rebuild,
    Rows,
    Table,
    TakeApart,
    Tensors,
)
from consilience.aggregators.members import (
    Classifier,
    LinearEnsemble,
    Member,
    are_equal_shares,
    are_shares,
    as_members,
    cap_shares,
    common_classes,
    joint_guarantee,
    public_sizes,
)
from consilience.errors import ContributionRejected, SettingsError
from consilience.learners.base import is_positive
from consilience.privacy.accounting import total
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.tables.public import Public

WEIGHTS = {  # how members count, in words
    "size-epsilon": "A member counts for more the more records it was trained on and the larger "
    "its epsilon.",
    "size": WEIGHING["size"],
    "accuracy-size": "A member counts for more the better it does on the public records, or by the "
    "score of its own site if there are none, and the more records it has.",
    "accuracy": "A member counts for more the better it does on the public records, or by the "
    "score of its own site if there are none; its size matters little.",
    "equal": WEIGHING["equal"],
}
# beyond which less noise makes hardly a better member: a choice, to which results are not sensitive
EPSILON_CAP = 1.0
SPREAD = 0.05  # how far accuracies of sites are taken to differ, for the shrinking of noisy ones
_ROWS = 1 << 14  # records at a time where class sets differ
_SQUARINGS = 40  # after 2^40 steps a chain of classes has settled


@dataclass(eq=False)
class WeightedVote(Aggregator):
    """Let members vote.

    Parameters
    ----------
    weights
        ``"size-epsilon"``: number of units × min(epsilon, `epsilon_cap`). ``"size"``, ``"equal"``.
        ``"accuracy-size"``: accuracy × size; ``"accuracy"``: accuracy × exp(size / total size), as
        in Xiang et al. (2018). An accuracy is measured on labelled public records, or brought by
        the member, never otherwise: its study's learner has a ``score_share``, or it is a
        `ScoredMember`. Or numbers, one per member, that are public.
    voting
        ``"soft"`` adds up probabilities (the label, of a member that has none), ``"hard"`` labels.
    classes
        The declared classes; otherwise the union of the members'. A member's say is about the
        classes it knows.
    epsilon_cap
        Above it, a larger epsilon earns no more weight.

    A member without a public size is an error where sizes count: whatever stood in for it would
    decide how much a site is heard, and nobody would see. Use ``"equal"``, or declare numbers.

    Privacy
    -------
    Each site's own guarantee, against everyone: weights read sizes, epsilons and accuracies that
    were released, and public records. Nothing is promised to public records. Proof:
    docs/guarantees/integration.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> tree = {"epsilon": 2.0, "bounds": (-1, 1), "classes": [0, 1]}
    >>> members = [cs.PrivateTreeClassifier(**tree).fit(X[i::3], y[i::3]) for i in range(3)]
    >>> cs.WeightedVote().combine(members).predict(X[:5]).shape
    (5,)
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "vote": {},
        "vote-equal": {"weights": "equal"},
    }
    makes = "vote"
    combines_kinds = True

    weights: str | Sequence[float] = "size-epsilon"
    _: KW_ONLY
    voting: str = "soft"
    classes: Sequence[Any] | None = None
    epsilon_cap: float = EPSILON_CAP

    def __post_init__(self) -> None:
        must = f"one of {', '.join(WEIGHTS)}, or a number for each member"
        fits = not isinstance(self.weights, str) or self.weights in WEIGHTS
        self._require("weights", fits, must)
        self._require("voting", self.voting in ("soft", "hard"), "'soft' or 'hard'")
        fits = self.epsilon_cap == math.inf or is_positive(self.epsilon_cap)
        self._require("epsilon_cap", fits, "a number > 0")

    def check_settings(self) -> None:
        """Refuse settings that cannot work, numbers that can be no weights among them."""
        super().check_settings()
        if not isinstance(self.weights, str):
            raw = np.asarray(self.weights, dtype=object)
            numbers = raw.ndim == 1 and all(is_positive(one) or one == 0 for one in raw)
            fits = numbers and any(is_positive(one) for one in raw)
            self._require("weights", fits, "numbers >= 0, not all 0, one for each member")

    @property
    def weighs_accuracy(self) -> bool:
        """Whether weights depend on how well members do."""
        return isinstance(self.weights, str) and self.weights.startswith("accuracy")

    def problem_with(self, learner: Learner, settings: Mapping[str, Any]) -> str | None:
        """Return why such learners cannot vote, or None."""
        if learner.predicts_number:
            return "WeightedVote combines classifiers; use Average for regression"
        return None

    def may_weigh(self, weights: Array) -> bool:
        """Tell whether these are shares, equal ones where all count the same."""
        if isinstance(self.weights, str) and self.weights == "equal":
            return are_equal_shares(weights)
        return are_shares(weights, self.max_weight)

    def describe(self) -> Description:
        """Return its title and what the weights mean."""
        if not isinstance(self.weights, str):
            return Description(
                "WeightedVote (declared)", "A member counts as the study declares it."
            )
        return Description(f"WeightedVote ({self.weights})", WEIGHTS[self.weights])

    @classmethod
    def alternatives(cls, learner: Learner | None = None) -> Sequence[Mapping[str, Any]]:
        """Return two kinds of weights, for members whose coefficients cannot be averaged."""
        if learner is not None and learner.is_linear:
            return []
        return [{"weights": weights} for weights in ("equal", "size-epsilon")]

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> VoteEnsemble:
        """Return the ensemble of `members`; labelled `public` records measure their accuracies."""
        self.check_settings()
        found = as_members(members)
        classes = _declared(found, self.classes)
        shares = cap_shares(self._weights(found, public), self.max_weight)
        own = tuple(member.guarantee for member in found)
        learners = tuple(_voter(member) for member in found)
        return VoteEnsemble(learners, classes, shares, self.voting, joint_guarantee(found), own)

    def _weights(self, members: Sequence[Member], public: Public | None) -> Array:
        if not isinstance(self.weights, str):
            raw = np.asarray(self.weights, dtype=np.float64)
            if raw.shape != (len(members),) or not (
                np.isfinite(raw).all() and (raw >= 0).all() and raw.any()
            ):
                raise SettingsError(
                    f"The weights must be one number >= 0 for each of {len(members)} members, not "
                    "all 0. Nothing was combined."
                )
            return np.asarray(raw / raw.sum())
        raw = np.ones(len(members))
        if self.weights != "equal":
            raw = public_sizes(members, self.weights, "declare a number for each member, or use")
        if self.weights == "accuracy":
            raw = np.exp(raw / raw.sum())
        if self.weights == "size-epsilon":
            raw = raw * np.minimum(_epsilons(members), self.epsilon_cap)
        if self.weighs_accuracy:
            raw = raw * _accuracies(members, public)
        whole = raw.sum()
        return np.asarray(raw / whole if whole > 0 else np.full(len(raw), 1 / len(raw)))


def _declared(members: Sequence[Member], classes: Sequence[Any] | None) -> Array:
    """Return the classes that are voted on."""
    if any(member.classes is None for member in members):
        raise SettingsError(
            "Voting needs classifiers, and a member is none. Nothing was combined. Use Average."
        )
    return common_classes(members, classes)


def _voter(member: Member) -> Any:
    """Return what predicts for a member: its learner, or one made of its coefficients."""
    if member.learner is not None:
        return member.learner
    coef, intercept = np.asarray(member.coef), np.asarray(member.intercept)
    return LinearEnsemble(member.classes, coef, intercept, np.ones(1), member.guarantee, ())


def _epsilons(members: Sequence[Member]) -> Array:
    """Return the epsilon of each member's training, also if a seed voided its guarantee."""
    stated = [total(m.training_events) if m.training_events else None for m in members]
    mixed = len({guarantee.neighbours for guarantee in stated if guarantee is not None}) > 1
    return np.array(
        [
            math.inf
            if g is None
            else g.convert(Neighbours.REPLACE_ONE).epsilon
            if mixed
            else g.epsilon
            for g in stated
        ]
    )


def _accuracies(members: Sequence[Member], public: Public | None) -> Array:
    """Return each member's accuracy on public records, or its own, shrunk to the mean if noisy."""
    if public is not None and public.y is not None and len(public.y) > 0:
        y = np.asarray(public.y)
        return np.array(
            [np.mean(np.asarray(_voter(member).predict(public.X)) == y) for member in members]
        )
    brought = [one for one in (member.accuracy for member in members) if one is not None]
    if len(brought) < len(members):
        raise SettingsError(
            "Weights by accuracy need labelled public records, or members that bring a private "
            "accuracy, and a member brings none. Nothing was combined. Pass public=Public(X, y), "
            "let a study's learner have a score_share, or let each site use private_accuracy and "
            "add_accuracy; an exact accuracy on a site's records would not be private."
        )
    values, variance = np.array([[one.value, one.variance] for one in brought]).T
    mean = np.average(values, weights=1 / variance)
    return np.asarray(mean + (values - mean) * SPREAD**2 / (SPREAD**2 + variance))


@dataclass(frozen=True)
class VoteEnsemble(Ensemble):
    """Classifiers that vote; predicts like a fitted scikit-learn estimator."""

    kind: ClassVar[str] = "vote"

    members: tuple[Any, ...] = field(repr=False)
    classes: Array
    weights: Array
    voting: str
    guarantee: Guarantee | None
    guarantees: tuple[Guarantee | None, ...] = field(repr=False)

    def shown_rows(self) -> Rows:
        """Return who votes, and how."""
        kinds = dict.fromkeys(type(member).__name__ for member in self.members)
        return [("members", f"{len(self.members):,}: {', '.join(kinds)}"), ("votes", self.voting)]

    def to_parts(self, take_apart: TakeApart) -> tuple[Facts, Tensors]:
        """Return all members, each with the number of its place before its tensors' names."""
        parts = [take_apart(member) for member in self.members]
        tensors = {
            f"m{i}.{name}": tensor
            for i, (_, state) in enumerate(parts)
            for name, tensor in state.items()
        }
        learners = [
            {name: value for name, value in part.items() if name != "events"} for part, _ in parts
        ]
        n_features = parts[0][0]["n_features"]
        return {"learners": learners, "voting": self.voting, "n_features": n_features}, tensors

    @classmethod
    def from_parts(
        cls,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Array],
        guarantee: Guarantee,
        weights: Array,
        rebuild: Rebuild,
    ) -> Self:
        """Return the ensemble, if every member could be rebuilt and knows only its classes."""
        classes, learners = np.asarray(facts["classes"]), []
        for i, part in enumerate(facts["learners"]):
            state = {
                name.split(".", 1)[1]: tensor
                for name, tensor in tensors.items()
                if name.startswith(f"m{i}.")
            }
            learners.append(rebuild({**part, "events": "[]"}, state))
        if len(learners) != len(weights) or facts["voting"] not in ("soft", "hard"):
            raise ContributionRejected("members")
        if len(tensors) != sum(len(learner.released_state()) for learner in learners):
            raise ContributionRejected("tensors")
        if not all(np.isin(learner.classes_, classes).all() for learner in learners):
            raise ContributionRejected("classes")
        if any(learner.n_features_in_ != facts["n_features"] for learner in learners):
            raise ContributionRejected("features")
        return cls(tuple(learners), classes, weights, facts["voting"], guarantee, ())

    def predict_proba(self, X: Table) -> Array:
        """Return the weighted mean of the members' probabilities (`_settle` if classes differ)."""
        sets: dict[tuple[int, ...], Array] = {}
        for member, weight in zip(self.members, self.weights.tolist(), strict=True):
            places, said = self._said(member, X)
            sets[places] = sets.get(places, 0.0) + weight * said
        n = len(next(iter(sets.values())))
        if len(sets) == 1:
            out = np.zeros((n, len(self.classes)))
            ((places, said),) = sets.items()
            out[:, list(places)] = said
            return out
        parts = [slice(begin, begin + _ROWS) for begin in range(0, max(n, 1), _ROWS)]
        return np.concatenate(
            [_settle({s: p[rows] for s, p in sets.items()}, len(self.classes)) for rows in parts]
        )

    def predict(self, X: Table) -> Array:
        """Return the most probable class for each row."""
        return np.asarray(self.classes[self.predict_proba(X).argmax(axis=1)])

    def _said(self, member: Classifier, X: Table) -> tuple[tuple[int, ...], Array]:
        """Return the positions of a member's classes, ascending, and its probabilities."""
        known = np.asarray(member.classes_).tolist()
        place = {label: k for k, label in enumerate(self.classes.tolist())}
        places = [place[label] for label in known]
        if self.voting == "soft" and hasattr(member, "predict_proba"):
            said = np.asarray(member.predict_proba(X), dtype=np.float64)
        else:
            labels = np.asarray(member.predict(X))
            said = np.stack([labels == label for label in known], axis=1).astype(np.float64)
        # Whatever a member of another library answers, it has one say: nothing negative, nothing
        # infinite, in sum one.
        said = np.where(np.isfinite(said) & (said > 0), np.minimum(said, 1e300), 0.0)
        whole = said.sum(axis=1, keepdims=True)
        said = np.where(whole > 0, said / np.where(whole > 0, whole, 1.0), 1 / len(known))
        order = np.argsort(places)
        return tuple(places[at] for at in order), said[:, order]


def _settle(sets: dict[tuple[int, ...], Array], n_classes: int) -> Array:
    """Return the probabilities that no member would move on.

    A member knows how likely its own classes are among themselves, and nothing about others. So it
    moves what lies on its own to where it says, and leaves the rest: a chain of classes, whose rest
    is the answer. If all know all classes it is the weighted mean. Groups of classes between which
    nobody compares keep what they began with.
    """
    rows = len(next(iter(sets.values())))
    chain = np.zeros((rows, n_classes, n_classes))
    for places, said in sets.items():
        inside, weight = np.array(places), said.sum(axis=1, keepdims=True)
        outside = np.setdiff1d(np.arange(n_classes), inside)
        chain[:, inside[:, None], inside[None, :]] += said[:, None, :]
        chain[:, outside, outside] += weight
    for _ in range(_SQUARINGS):
        chain = chain @ chain
        chain /= chain.sum(axis=2, keepdims=True)
    known = sorted({place for places in sets for place in places})
    return np.asarray(chain[:, known].mean(axis=1))
