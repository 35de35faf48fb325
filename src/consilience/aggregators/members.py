"""What an aggregator may know of a member, and what it makes of many: an ensemble.

Aggregators never see a record of a site. They see what the site released, the public facts written
on it, and what is public anyway. Everything here is post-processing, so a record of site i keeps
the guarantee its own site gave it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from scipy import sparse
from sklearn.utils.validation import check_array

from consilience.aggregators.base import (
    Array,
    Ensemble,
    Facts,
    Rebuild,
    Rows,
    Table,
    TakeApart,
    Tensors,
)
from consilience.errors import ContributionRejected, SchemaMismatch, SettingsError
from consilience.learners.ball import scale_to_user
from consilience.learners.base import PrivateLearner, spell_out
from consilience.learners.linear import best_class, class_chances
from consilience.learners.projection import coordinates
from consilience.learners.scored import PrivateAccuracy
from consilience.privacy.accounting import Event, GradientSteps
from consilience.privacy.guarantee import Guarantee, compose, compose_disjoint
from consilience.privacy.vector_noise import is_vector_noise, minimum_variance, ridge_beside

DISJOINT = (
    "no record, and no person where persons are the unit, is at two sites, and every member is of "
    "another site"
)
# As releases of version 0.1 state it.
DISJOINT_BEFORE = "no record, and no person where persons are the unit, is at two sites"


class Classifier(Protocol):
    """A fitted classifier of any library."""

    @property
    def classes_(self) -> Array:
        """The labels that it knows."""

    def predict(self, X: Table, /) -> Array:
        """Return each row's label."""


@dataclass(frozen=True)
class Member:
    """One site's fitted learner as the hub knows it: what it released, and public facts."""

    learner: Any
    classes: Array | None  # None for a regressor
    guarantee: Guarantee | None  # None for a learner of another library, which promises nothing
    events: tuple[Event, ...]
    size: int | None  # public number of units, where there is one
    coef: Array | None  # (1 or K, d); None for a learner that is not linear
    intercept: Array | None

    @property
    def accuracy(self) -> PrivateAccuracy | None:
        """How well it does on its own site's records, if the site paid for that."""
        return getattr(self.learner, "accuracy_", None)

    @property
    def training_events(self) -> tuple[Event, ...]:
        """What was drawn to train it, without the cost of its accuracy."""
        return tuple(getattr(self.learner, "training_events", self.events))

    def fingerprint(self) -> str:
        """Return what tells this member from others."""
        if isinstance(self.learner, PrivateLearner):
            return self.learner.fingerprint()
        return spell_out([self.coef, self.intercept, self.classes])

    @property
    def model_events(self) -> tuple[Event, ...]:
        """What was drawn for its coefficients; its axes, if it found some, had noise of theirs."""
        learner = self.learner
        is_fitted = isinstance(learner, PrivateLearner) and hasattr(learner, "events_")
        return learner.model_events() if is_fitted else self.events  # plans combine unfitted ones

    @property
    def is_linear(self) -> bool:
        """Whether the member is a vector that can be averaged."""
        return self.coef is not None

    @property
    def to_user(self) -> float:
        """The factor from the unit ball, in which noise is drawn, to coordinates of `coef`."""
        return scale_to_user(self.learner) if hasattr(self.learner, "data_norm") else 1.0

    @property
    def has_constant(self) -> bool:
        """Whether the noise was drawn for a constant too."""
        return bool(getattr(self.learner, "fit_intercept", False))

    @property
    def is_exact(self) -> bool:
        """Whether it is stated to have no noise; a void guarantee says that it brought some."""
        return (
            self.guarantee is not None
            and self.guarantee.holds
            and math.isinf(self.guarantee.epsilon)
        )

    def places(self, every: Array) -> list[int]:
        """Return where its classes are in the list of all."""
        position = {label: k for k, label in enumerate(every.tolist())}
        return [position[label] for label in np.asarray(self.classes).tolist()]

    def class_rows(self) -> tuple[Array, Array]:
        """Return coefficients and intercepts with one row for each of its classes.

        The margin of two classes is split evenly over them; the score of a single class is 0.
        """
        W, b = np.asarray(self.coef), np.asarray(self.intercept)
        n_classes = len(np.asarray(self.classes))
        if n_classes == 1:
            return np.zeros((1, W.shape[1])), np.zeros(1)
        if n_classes == 2:
            return np.vstack([-W, W]) / 2, np.concatenate([-b, b]) / 2
        return W, b

    def noise_variance(self, curvature: float = 0.0) -> float:
        """Return the variance that the events state for each coordinate of the unit ball.

        ``curvature`` is a public guess of the mean second derivative along a coordinate; it damps
        noise that was drawn in the objective (docs/guarantees/average.md). An exact model has
        variance 0.
        """
        assert self.coef is not None
        noises = [
            event
            for event in self.model_events
            if is_vector_noise(event) or isinstance(event, GradientSteps)
        ]
        columns = getattr(self.learner, "noisy_columns", None)
        dimension = (self.coef.shape[1] if columns is None else columns) + self.has_constant
        # One draw for all classes spans one class less; one draw per class (several events) spans
        # one each.
        dimension *= max(1, len(self.coef) - 1) if len(noises) == 1 else 1
        variances = [
            minimum_variance(event, dimension, curvature=curvature * (self.size or 0))
            for event in noises
        ]
        return math.fsum(variances) / max(1, len(variances))

    def shrinkage(self, curvature: float) -> float:
        """Return by what an automatic ridge divides coefficients, along that public `curvature`.

        Such a ridge is stronger at sites with more noise. One that was given is the same for all.
        """
        known = curvature * (self.size or 0)
        if getattr(self.learner, "regularization", None) != "auto" or known <= 0:
            return 1.0
        return 1 + max(map(ridge_beside, self.model_events), default=0.0) / known


def dense(X: Any) -> Array:
    """Return rows as an array, if they are sparse."""
    return np.asarray(X.todense()) if sparse.issparse(X) else X


def as_members(fitted: Sequence[Any]) -> list[Member]:
    """Return contributions, fitted learners or scikit-learn estimators as members."""
    if not isinstance(fitted, Collection):
        raise SettingsError(
            f"A {type(fitted).__name__} was given in place of members. Nothing was combined. Pass "
            "a list of fitted learners or contributions."
        )
    if not len(fitted):
        raise SettingsError(
            "An aggregator needs at least one member. Got none. Nothing was combined."
        )
    members = []
    for given in fitted:
        # A contribution does not predict, but holds a learner that does.
        learner = given if hasattr(given, "predict") else getattr(given, "learner", given)
        if getattr(learner, "stays_at_site", False):
            raise SettingsError(
                f"{type(learner).__name__} models are exact, and depend on all sites of the "
                "release that they follow. They stay at their site. Nothing was computed. Take the "
                "site's contribution."
            )
        if isinstance(given, Member):
            members.append(given)
            continue
        if isinstance(learner, PrivateLearner):
            if learner is given and not hasattr(learner, "guarantee_"):
                raise SettingsError(
                    f"A {type(learner).__name__} was given as a member before it was fitted. "
                    "Nothing was combined. Fit it first."
                )
            learner.check_unchanged()
        if not hasattr(learner, "predict"):
            raise SettingsError(
                f"A {type(learner).__name__} was given as a member, but it cannot predict. "
                "Nothing was combined. Pass fitted learners."
            )
        coef = getattr(learner, "coef_", None)
        members.append(
            Member(
                learner=learner,
                classes=getattr(learner, "classes_", None),
                guarantee=getattr(learner, "guarantee_", None),
                events=getattr(learner, "events_", ()),
                size=getattr(learner, "public_size_", None),
                coef=None if coef is None else np.atleast_2d(coef),
                intercept=None if coef is None else np.atleast_1d(learner.intercept_),
            )
        )
    return members


def joint_guarantee(members: Sequence[Member]) -> Guarantee | None:
    """Return what holds for a record of any site if combining is post-processing.

    A record keeps its own site's guarantee, so this is the largest of them, under the stated
    assumption. What members show of other private records, such as trees that were grown on them,
    comes on top, unless the learner that released it is a member itself. None if a member has no
    guarantee, as those of other libraries.
    """
    stated = [member.guarantee for member in members if member.guarantee is not None]
    if len(stated) < len(members):
        return None
    joint = compose_disjoint(*stated, assumption=DISJOINT)
    learners = [m.learner for m in members if isinstance(m.learner, PrivateLearner)]
    costs = {origin: cost for one in learners for origin, cost in one.borrowed().items()}
    if costs:
        brought = {learner.fingerprint() for learner in learners}
        costs = {origin: cost for origin, cost in costs.items() if origin not in brought}
    return compose(joint, *costs.values()) if costs else joint


def common_classes(members: Sequence[Member], classes: Sequence[Any] | None) -> Array:
    """Return the declared classes, or all that members know; refuse one that is not declared."""
    lists = {id(member.classes): np.asarray(member.classes) for member in members}
    every = (
        np.unique(np.concatenate(list(lists.values()))) if classes is None else np.asarray(classes)
    )
    known = set(every.ravel().tolist())
    if not all(known.issuperset(labels.tolist()) for labels in lists.values()):
        raise SchemaMismatch(
            "A member knows a class that is not declared. Nothing was combined. Declare it in "
            "'classes', or leave out the member."
        )
    return every


def align_members(
    members: Sequence[Member], classes: Sequence[Any] | None = None
) -> tuple[Array | None, Array, Array, Array]:
    """Bring linear members to one list of classes.

    Returns the classes, coef (N, K or 1, d), intercept (N, K or 1) and known (N, K). Two common
    classes keep one row; otherwise every member gets one row per class, a two-class member's margin
    split evenly over its two. ``known`` marks the classes that a member was trained on; its rows of
    other classes are 0.
    """
    if not all(member.is_linear for member in members):
        raise SettingsError(
            "This aggregator combines coefficients, and a member has none. Nothing was combined. "
            "Use voting or distillation for members that are not linear."
        )
    if len({(m.classes is None, np.asarray(m.coef).shape[1]) for m in members}) > 1:
        raise SchemaMismatch(
            "The members differ in their number of features, or regressors are mixed with "
            "classifiers. Nothing was combined. Train all of them on one schema."
        )
    if members[0].classes is None:
        coef = np.stack([np.asarray(m.coef) for m in members])
        intercept = np.stack([np.asarray(m.intercept) for m in members])
        return None, coef, intercept, np.ones((len(members), 1), dtype=bool)
    every = common_classes(members, classes)
    # Thousands of members may share one list of classes.
    different = {id(member.classes): np.asarray(member.classes) for member in members}
    trained_on = {key: np.isin(every, labels) for key, labels in different.items()}
    known = np.stack([trained_on[id(member.classes)] for member in members])
    rows = 1 if len(every) <= 2 else len(every)
    coef = np.zeros((len(members), rows, np.asarray(members[0].coef).shape[1]))
    intercept = np.zeros((len(members), rows))
    for i, member in enumerate(members):
        labels = different[id(member.classes)]
        if rows > 1:
            places = member.places(every)
            coef[i, places], intercept[i, places] = member.class_rows()
        elif len(labels) == 2:
            sign = 1.0 if np.array_equal(labels, every) else -1.0
            coef[i], intercept[i] = (
                sign * np.asarray(member.coef),
                sign * np.asarray(member.intercept),
            )
    return every, coef, intercept, known


def public_sizes(members: Sequence[Member], weights: str, advice: str) -> Array:
    """Return the members' public sizes, at least 1; refuse weights by them if one has none."""
    if any(member.size is None for member in members):
        raise SettingsError(
            f"Weights by {weights} need every member's public size, and one has none. Nothing was "
            f"combined. Use weights='equal', {advice} members trained by this package."
        )
    return np.array([max(member.size or 0, 1) for member in members], dtype=np.float64)


def cap_shares(shares: Array, most: float) -> Array:
    """Return shares of at most `most` each, or equal ones if there are too few members for that.

    What is cut off one share is divided among the others in proportion to theirs.
    """
    most = max(most, 1 / len(shares))
    capped = np.zeros(len(shares), dtype=bool)
    while (shares > most * (1 + 1e-12)).any():
        capped |= shares > most
        rest = np.where(capped, 0.0, shares)
        rest = np.where(capped, 0.0, 1.0) if not rest.any() else rest
        shares = np.where(capped, most, rest * (1 - most * capped.sum()) / max(rest.sum(), 1e-300))
    return shares


def are_shares(weights: Array, most: float = 1.0) -> bool:
    """Tell whether weights are shares of a whole, as `cap_shares` makes them."""
    most = max(most, 1 / len(weights))
    within = (weights >= 0).all() and (weights <= most * (1 + 1e-9)).all()
    return bool(within) and math.isclose(math.fsum(weights), 1.0, rel_tol=1e-9)


def are_equal_shares(weights: Array) -> bool:
    """Tell whether every member weighs the same."""
    return bool(np.allclose(weights, 1 / len(weights), rtol=1e-9, atol=0.0))


def class_shares(shares: Array, known: Array, n_outputs: int) -> Array:
    """Divide each output's weight among the members that know its class; 0 if none does."""
    mass = shares[:, None] * (known if n_outputs > 1 else known.any(axis=1, keepdims=True))
    return np.asarray(mass / np.where(mass.sum(axis=0) > 0, mass.sum(axis=0), 1.0))


@dataclass(frozen=True)
class LinearEnsemble(Ensemble):
    """A linear classifier or regressor made of members."""

    kind: ClassVar[str] = "linear"

    classes: Array | None
    coef: Array
    intercept: Array
    weights: Array
    guarantee: Guarantee | None
    guarantees: tuple[Guarantee | None, ...] = field(repr=False)

    @property
    def coef_(self) -> Array:
        """Coefficients under scikit-learn's name, in the shape that a linear learner gives them."""
        return self.coef if self.classes is not None else self.coef.ravel()

    @property
    def intercept_(self) -> Array:
        """The constant under scikit-learn's name; of a regressor it is one number."""
        return self.intercept if self.classes is not None else self.intercept[0]

    def shown_rows(self) -> Rows:
        """Return the size of the model."""
        return [("linear in", f"{self.coef.shape[1]:,} features")]

    def to_parts(self, take_apart: TakeApart) -> tuple[Facts, Tensors]:
        """Return the coefficients; the members are not needed any more."""
        tensors = {
            "coef": np.asarray(self.coef, np.float64),
            "intercept": np.asarray(self.intercept, np.float64),
        }
        return {"n_features": self.coef.shape[1]}, tensors

    @classmethod
    def from_parts(
        cls,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Array],
        guarantee: Guarantee,
        weights: Array,
        rebuild: Rebuild,
    ) -> Self:
        """Return the ensemble with these coefficients, if their shapes fit the classes."""
        classes = None if facts["classes"] is None else np.asarray(facts["classes"])
        n_rows = 1 if classes is None or len(classes) <= 2 else len(classes)
        coef, intercept = tensors["coef"], tensors["intercept"]
        shapes = (n_rows, facts["n_features"]), (n_rows,)
        if (coef.shape, intercept.shape) != shapes or len(tensors) != 2:
            raise ContributionRejected("tensors")
        return cls(classes, coef, intercept, weights, guarantee, ())

    def _rows(self, X: Table) -> Any:
        """Return records with as many features as this was made for."""
        rows = check_array(X, accept_sparse="csr", dtype=np.float64)
        if rows.shape[1] != self.coef.shape[1]:
            raise SchemaMismatch(
                f"The ensemble was made for {self.coef.shape[1]} features and was given "
                f"{rows.shape[1]}. Nothing was predicted. Encode the table with the study's schema."
            )
        return rows

    def decision_function(self, X: Table) -> Array:
        """Return the margin of the second class, one score per class, or the predicted number."""
        scores = np.asarray(self._rows(X) @ self.coef.T + self.intercept)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Table) -> Array:
        """Return each row's class, or number."""
        return self._decide(self.decision_function(X))

    def predict_apart(self, X: Table) -> Array:
        """Return each row's class, or number, which depends on that row alone, bit for bit."""
        scores = coordinates(self._rows(X), self.coef) + self.intercept
        return self._decide(scores.ravel() if scores.shape[1] == 1 else scores)

    def _decide(self, scores: Array) -> Array:
        return scores if self.classes is None else best_class(self.classes, scores)

    def _answers(self, scores: Array) -> tuple[Array, Array | None]:
        """Return what follows from scores, for who needs all of it."""
        if self.classes is None:
            return scores, None
        return best_class(self.classes, scores), class_chances(self.classes, scores)

    def predict_proba(self, X: Table) -> Array:
        """Return class probabilities: the logistic or softmax function of the scores."""
        if self.classes is None:
            raise SettingsError("A regressor has no class probabilities. Use predict.")
        return class_chances(self.classes, self.decision_function(X))
