"""Count what members say about public records, exactly and in blocks, for any kind of classifier.

Counts are integers and every member keeps its own slot, so that replacing one member changes its
own votes and nothing else, rounding included. Distillation's sensitivities rest on that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special
from sklearn.linear_model import LogisticRegression, Perceptron, RidgeClassifier, SGDClassifier
from sklearn.svm import LinearSVC

from consilience.aggregators.base import Array
from consilience.aggregators.members import (
    LinearEnsemble,
    Member,
    as_members,
    common_classes,
)
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.linear import PrivateLogisticRegression
from consilience.privacy.guarantee import Guarantee
from consilience.tables.public import Features, Public

# Probabilities are rounded to multiples of 1/GRAIN: counts stay integers, whose sums are exact.
GRAIN = 1 << 20
# Classifiers of scikit-learn whose predict is the sign, or the first maximum, of
# X @ coef_.T + intercept_. Our own linear learners say so themselves.
_LINEAR = (LogisticRegression, LinearSVC, RidgeClassifier, SGDClassifier, Perceptron)
_ENTRIES = 1 << 19  # scores held at a time: they fit a processor's cache
_SLOTS = 512  # members at a time
_ROWS = 1 << 14  # records at a time for a member of another kind


@dataclass(frozen=True)
class Tally:
    """What all members together say about each public record, as exact integers.

    Every row of ``counts`` (record, class) sums to ``n_members * unit``. ``votes`` are the counts,
    or how they are counted: members are not asked before somebody looks.

    Privacy
    -------
    None: exact counts are for the hub alone.
    """

    votes: NDArray[np.int64] | Callable[[], NDArray[np.int64]]
    unit: int
    n_members: int
    classes: Array
    public: Public
    own: tuple[Guarantee | None, ...] = field(repr=False)
    declared: bool = True
    # What was computed from it before: it may be asked again and again.
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def fingerprint(self) -> str:
        """Return what tells these counts from others."""
        digest = hashlib.sha256(self.counts.tobytes()).hexdigest()
        return repr((self.unit, self.n_members, np.asarray(self.classes).tolist(), digest))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Counts by (record, class)."""
        return self.votes() if callable(self.votes) else self.votes


@dataclass(frozen=True)
class Question:
    """What an aggregator asks members about public records; equal questions share one tally."""

    soft: str
    classes: tuple[Any, ...] | None
    n_records: int  # the first so many are asked about

    def ask(self, members: Sequence[Any], public: Public) -> Tally:
        """Count what `members` say."""
        if self.n_records < public.X.shape[0]:
            public = Public(public.X[: self.n_records])
        classes = None if self.classes is None else list(self.classes)
        return count_votes(members, public, classes=classes, soft=self.soft)


def count_votes(
    members: Sequence[Any],
    public: Public,
    *,
    classes: Sequence[Any] | None = None,
    soft: str = "votes",
) -> Tally:
    """Count what `members` say about the `public` records, as `ask` says, and at once."""
    tally = ask(members, public, classes=classes, soft=soft)
    tally.counts  # noqa: B018  looked at, so that it is counted here
    return tally


def ask(
    members: Sequence[Any], public: Public, *, classes: Sequence[Any] | None, soft: str
) -> Tally:
    """Return the tally of what `members` say about the `public` records.

    ``soft="probabilities"`` adds up class probabilities instead; a member that has none votes. A
    member that answers with something else than a declared class, or with numbers that are no
    probabilities, counts as undecided.
    """
    found, every, declared = voters(members, classes)
    grain = GRAIN if soft == "probabilities" else 1
    # Divisible by K: an undecided member gives every class the same integer.
    unit = len(every) * grain
    own = tuple(member.guarantee for member in found)
    votes = partial(_count, found, public.X, every, grain)
    return Tally(votes, unit, len(found), every, public, own, declared)


def _count(found: Sequence[Member], X: Features, every: Array, grain: int) -> NDArray[np.int64]:
    """Count in blocks that never hold all votes."""
    counts = np.zeros((X.shape[0], len(every)), dtype=np.int64)
    unit = len(every) * grain
    # A member's block and place in it depend on its number alone. Were members sorted by kind,
    # replacing one would move others, and their rounding with them.
    for begin in range(0, len(found), _SLOTS):
        slots = found[begin : begin + _SLOTS]
        fast = np.array([_is_fast(member, grain) for member in slots])
        if fast.any():
            W, b = _stacked(slots, fast, every, X.shape[1])
            step = max(1, _ENTRIES // b.size)
            for rows in _parts(len(counts), step):
                counts[rows] += _linear_votes(
                    X[rows], W, b, fast, unit if grain > 1 else 0, len(every)
                )
        for slot in np.flatnonzero(~fast).tolist():
            for rows in _parts(len(counts), _ROWS):
                counts[rows] += _votes(slots[slot], X[rows], every, unit, grain)
    return counts


def voters(
    members: Sequence[Any], classes: Sequence[Any] | None
) -> tuple[list[Member], Array, bool]:
    """Return members that can vote, the classes they vote on, and whether those were declared."""
    found = as_members(members)
    if any(member.classes is None for member in found):
        raise SettingsError(
            "Distillation needs classifiers, and a member is none. Nothing was combined."
        )
    every = common_classes(found, classes)
    if every.ndim != 1 or len(np.unique(every)) < max(2, len(every)):
        raise SettingsError(
            "Distillation needs at least two different classes. Nothing was combined. Declare "
            "them in 'classes'."
        )
    return found, every, classes is not None


def _parts(n: int, step: int) -> Iterator[slice]:
    return (slice(begin, begin + step) for begin in range(0, n, step))


def _is_fast(member: Member, grain: int) -> bool:
    """Tell whether a member's answer follows from coefficients times features."""
    learner = member.learner
    if not member.is_linear or learner is None:
        return member.is_linear
    if grain > 1:  # probabilities: only where they are the softmax of the scores
        return isinstance(learner, PrivateLogisticRegression | LinearEnsemble)
    return getattr(learner, "is_linear", False) or isinstance(learner, (*_LINEAR, LinearEnsemble))


def _stacked(
    slots: Sequence[Member], fast: Array, every: Array, n_features: int
) -> tuple[Array, Array]:
    """Return coefficients (slot, K or 1, d) and intercepts.

    Classes that a member does not know score minus infinity. Slots of other members stay zero.
    """
    W, b = (
        np.zeros((len(slots), len(every), n_features)),
        np.full((len(slots), len(every)), -math.inf),
    )
    b[~fast] = 0.0
    for slot in np.flatnonzero(fast).tolist():
        member = slots[slot]
        coef, intercept = member.class_rows()
        if coef.shape[1] != n_features:
            raise SchemaMismatch(
                f"The public records have {n_features} features, and a member was trained on "
                f"{coef.shape[1]}. Nothing was combined. Encode all tables with the study's "
                "schema."
            )
        places = member.places(every)
        W[slot, places], b[slot, places] = coef, intercept
    if len(every) > 2:
        return W, b
    return W[:, 1:] - W[:, :1], b[:, 1:] - b[:, :1]


def _linear_votes(
    X: Features, W: Array, b: Array, fast: Array, unit: int, n_classes: int
) -> NDArray[np.int64]:
    """Return the counts (record, class) of the fast slots; `unit` is 0 for votes."""
    with np.errstate(invalid="ignore", over="ignore"):
        scores = np.asarray(X @ W.reshape(-1, W.shape[2]).T).reshape(X.shape[0], *b.shape)
        scores += b  # in place: of thousands of members, copies would be most of the time
        scores = scores if fast.all() else scores[:, fast]
        if n_classes == 2:
            margin = scores[:, :, 0]
            second = (
                np.nan_to_num(np.rint(special.expit(margin) * unit), nan=unit / 2).sum(axis=1)
                if unit
                else 2.0 * np.count_nonzero(margin > 0, axis=1)
            )
            return np.stack([(unit or 2) * margin.shape[1] - second, second], axis=1).astype(
                np.int64
            )
        if unit:
            return np.asarray(_shares(special.softmax(scores, axis=2), unit).sum(axis=1))
    code = scores.argmax(axis=2)
    return np.stack(
        [n_classes * np.count_nonzero(code == k, axis=1) for k in range(n_classes)], axis=1
    )


def _votes(member: Member, X: Features, every: Array, unit: int, grain: int) -> NDArray[np.int64]:
    """Return the counts (record, class) of one member; another shape is no answer."""
    said = np.zeros((X.shape[0], len(every)))
    if grain > 1 and hasattr(member.learner, "predict_proba"):
        places = member.places(every)
        answer = np.asarray(member.learner.predict_proba(X))
        if answer.shape == (len(said), len(places)):
            said[:, places] = answer
        return _shares(said, unit)
    answer = np.asarray(member.learner.predict(X))
    if answer.shape in ((len(said),), (len(said), 1)):
        labels, inverse = np.unique(answer, return_inverse=True)
        position = {label: k for k, label in enumerate(every.tolist())}
        codes = np.array([position.get(label, -1) for label in labels.tolist()])[inverse.ravel()]
        said[codes >= 0, codes[codes >= 0]] = 1.0
    return _shares(said, unit)


def _shares(said: Array, unit: int) -> NDArray[np.int64]:
    """Round rows of probabilities to integers that sum to `unit`.

    The sensitivity rests on that sum, so it holds for any answer.
    """
    p = np.where(np.isfinite(said) & (said > 0), np.minimum(said, 1e300), 0.0)
    whole = p.sum(axis=-1, keepdims=True)
    p = np.where(whole > 0, p / np.where(whole > 0, whole, 1.0), 1 / said.shape[-1])
    parts = np.floor(p * unit).astype(np.int64)
    left = unit - parts.sum(axis=-1, keepdims=True)
    np.put_along_axis(
        parts, top := p.argmax(axis=-1)[..., None], np.take_along_axis(parts, top, -1) + left, -1
    )
    even = np.broadcast_to(whole > 0, parts.shape)
    return np.asarray(np.where(even, parts, unit // said.shape[-1]))
