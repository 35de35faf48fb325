"""Labelled records beside the members that they help to combine: read, checked and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.validation import check_array

from consilience.aggregators.average import TRUSTED, precision_weights, typical_curvature
from consilience.aggregators.base import Aggregator, Array, Learner
from consilience.aggregators.members import (
    DISJOINT,
    LinearEnsemble,
    Member,
    align_members,
    as_members,
    cap_shares,
    class_shares,
    joint_guarantee,
)
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.base import PrivateLearner, is_positive
from consilience.learners.erm import Huber, Logistic, Loss, Softmax, Squared
from consilience.learners.linear import PrivateLogisticRegression
from consilience.tables.public import Public
from consilience.tables.values import as_doubles


@dataclass(frozen=True)
class Labelled:
    """Labelled aggregation records and the members to combine, encoded for the solver."""

    members: list[Member]
    classes: Array | None
    coef: Array  # (N, 1 or K, d)
    intercept: Array  # (N, 1 or K)
    shares: Array  # (N,), by precision where it is known
    mass: Array  # (N, 1 or K): the shares among those members that know the class
    X: Any  # dense or sparse rows
    labels: Array  # as they were given
    y: Array  # signs, codes, or labels divided by label_scale
    loss: Loss
    label_scale: float

    @property
    def n_outputs(self) -> int:
        """Number of scores per record."""
        return int(self.coef.shape[1])

    @property
    def with_intercept(self) -> bool:
        """Whether members have a constant: only then one is learned."""
        return bool(self.intercept.any())

    @property
    def average(self) -> tuple[Array, Array]:
        """Coefficients (1 or K, d) and intercepts of the members' precision-weighted average."""
        return np.einsum("nk,nkd->kd", self.mass, self.coef), np.einsum(
            "nk,nk->k", self.mass, self.intercept
        )

    def margins(self) -> Array:
        """Return each member's scores of the records, (N, 1 or K, m), in the labels' scale."""
        flat = self.coef.reshape(-1, self.coef.shape[2])
        scores = np.asarray(self.X @ flat.T).T.reshape(*self.intercept.shape, -1)
        return np.asarray((scores + self.intercept[:, :, None]) / self.label_scale)

    def ensemble(self, coef: Array, intercept: Array, weights: Array) -> LinearEnsemble:
        """Return the ensemble of these coefficients, with the guarantees of post-processing."""
        own = tuple(member.guarantee for member in self.members)
        return LinearEnsemble(
            self.classes, coef, intercept, weights, joint_guarantee(self.members), own
        )


@dataclass(eq=False, kw_only=True)
class UsesLabels(Aggregator):
    """An aggregator of linear members that fits to labelled records."""

    needs_public = needs_labels = combines_coefficients = True
    makes = LinearEnsemble.kind

    classes: Sequence[Any] | None = None
    huber: float | None = None
    random_state: int | None = 0

    def check_settings(self) -> None:
        """Refuse settings that cannot work."""
        super().check_settings()
        fits = self.huber is None or is_positive(self.huber)
        self._require("huber", fits, "None or a number > 0")
        self._check_random_state()

    def assumed(self) -> tuple[str, ...]:
        """Return what combining members and labelled records, or noise on both, rests on."""
        return (DISJOINT, TRUSTED)

    @classmethod
    def alternatives(cls, learner: Learner | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the default settings."""
        return [{}]

    def weigh(self, members: Sequence[Member], public: Public | None) -> Array:
        """Return the members' weights before any label is used."""
        return cap_shares(prior_shares(members, public), self.max_weight)


def read_labelled(
    aggregator: UsesLabels,
    members: Sequence[Any],
    public: Public | None,
    *,
    weigh_by_public: bool = True,
) -> Labelled:
    """Check labelled records against the members and encode both."""
    name, found = type(aggregator).__name__, as_members(members)
    if public is None or public.y is None:
        raise SettingsError(
            f"{name} fits to labelled records, and was given none. Nothing was combined. Pass "
            "Public(X, y), or use Average, which needs no records."
        )
    aggregator.check_settings()
    classes, coef, intercept, known = align_members(found, aggregator.classes)
    X, labels = read_features(public, name, coef.shape[2])
    shares = aggregator.weigh(found, Public(X) if weigh_by_public else None)
    mass = class_shares(shares, known, coef.shape[1])
    y, loss, scale = encode_labels(labels, classes, aggregator.huber, name)
    return Labelled(found, classes, coef, intercept, shares, mass, X, labels, y, loss, scale)


def read_features(public: Public, name: str, n_features: int | None) -> tuple[Any, Array]:
    """Check labelled records of any number of features, or of as many as members have."""
    try:
        X = as_doubles(public.X) if sparse.issparse(public.X) else public.X
        X = check_array(X, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
    except ValueError:
        raise SchemaMismatch(
            f"{name} was given aggregation records that are fewer than two, or not all finite "
            "numbers. Nothing was combined. Encode the table with the study's schema, which says "
            "what becomes of missing values."
        ) from None
    if n_features is not None and X.shape[1] != n_features:
        raise SchemaMismatch(
            f"{name} was given aggregation records of {X.shape[1]} features, and the members have "
            f"{n_features}. Nothing was combined. Encode the table with the study's schema."
        )
    labels = np.asarray(public.y)
    if labels.ndim != 1:
        raise SchemaMismatch(
            f"{name} needs one label per record. Nothing was combined. Pass y as one column."
        )
    return X, labels


def encode_labels(
    labels: Array, classes: Array | None, huber: float | None, name: str
) -> tuple[Array, Loss, float]:
    """Return labels as the solver takes them, their loss, and what numbers were divided by."""
    if classes is None:
        try:
            numbers = np.asarray(labels, dtype=np.float64)
        except ValueError:
            numbers = np.full(1, np.nan)
        if not np.isfinite(numbers).all():
            raise SchemaMismatch(
                f"{name} combines regressors, and a label is not a finite number. Nothing was "
                "combined. Leave out records without a label."
            )
        scale = float(np.abs(numbers).max()) or 1.0
        return numbers / scale, Squared(1.0) if huber is None else Huber(huber / scale, 1.0), scale
    if not np.isin(labels, classes).all():
        raise SchemaMismatch(
            f"{name} was given a label that no member knows. Nothing was combined. Declare it in "
            "'classes', or leave out such records."
        )
    order = np.argsort(classes, kind="stable")
    codes = order[np.searchsorted(classes, labels, sorter=order)]
    if len(classes) <= 2:
        return np.where(codes == 1, 1.0, -1.0), Logistic(), 1.0
    return codes, Softmax(len(classes)), 1.0


def prior_shares(members: Sequence[Member], public: Public | None) -> Array:
    """Return the weights before any label is used: by precision, or equal without sizes."""
    if any(member.size is None for member in members):
        return np.full(len(members), 1 / len(members))
    return precision_weights(
        members, 0.02 if public is None else typical_curvature(members, public)
    )


def is_logistic(learner: PrivateLearner[Any, Any] | Learner) -> bool:
    """Tell whether members minimise the logistic loss, which predictions with records need."""
    kind = learner if isinstance(learner, type) else type(learner)
    return issubclass(kind, PrivateLogisticRegression)
