"""PublicBlend: labelled public records and the sites' average, each trusted as far as cross-validation says.

Everything here reads what sites released and records that are public, so for a record of a site it
is post-processing. This file also holds what all aggregators with labelled records share: reading
them beside the members (`read_labelled`), and fitting ridges around a centre, weighed by
cross-validation (`Mixture`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array

from consilience.aggregators.average import precision_weights, typical_curvature
from consilience.aggregators.base import Aggregator, Description, Learner
from consilience.aggregators.members import (
    LinearEnsemble,
    Member,
    aligned,
    as_members,
    joint_guarantee,
)
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.ball import HALF
from consilience.learners.base import PrivateLearner, is_positive
from consilience.learners.erm import Huber, Logistic, Loss, Softmax, Squared, gradient_error, solve
from consilience.learners.linear import PrivateLogisticRegression
from consilience.privacy.ledger import Ledger
from consilience.tables.public import Public

Array = NDArray[Any]

SOLVED_TO = 1e-7  # relative gradient; public records need an answer, not a certificate
N_FOLDS = 5
NEGLIGIBLE = 1e-3  # of the best candidate's weight
EXPECTED_WITHIN = 0.5  # powers of ten: a Cauchy density, so that records can always overrule it
FEW_RECORDS = 5000  # beyond, a coarser grid: the likelihood is sharp and the solver's time counts


@dataclass(frozen=True)
class Labelled:
    """Labelled aggregation records beside the members they will combine, encoded for the one solver."""

    members: list[Member]
    classes: Array | None
    coef: Array  # (N, 1 or K, d)
    intercept: Array  # (N, 1 or K)
    shares: Array  # (N,), by precision where it is known
    mass: Array  # (N, 1 or K): the shares among those members that know the class
    X: Any
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
        """Coefficients (1 or K, d) and intercepts of the members' precision-weighted average (E.2)."""
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


def read_labelled(
    aggregator: Any, members: Sequence[Any], public: Public | None, *, weigh_by_public: bool = True
) -> Labelled:
    """Check labelled records against the members and encode both; nothing about them is chosen here."""
    name, found = type(aggregator).__name__, as_members(members)
    if public is None or public.y is None:
        raise SettingsError(
            f"{name} fits to labelled records, and was given none. Nothing was combined. Pass "
            "Public(X, y), or use Average, which needs no records."
        )
    huber = aggregator.huber
    if huber is not None and not is_positive(huber):
        raise SettingsError(
            f"The 'huber' parameter of {name} must be None or a number > 0. Got {huber!r} instead."
        )
    classes, coef, intercept, known = aligned(found, aggregator.classes)
    X, labels = _checked(public, name, coef.shape[2])
    shares = prior_shares(found, Public(X) if weigh_by_public else None)
    mass = shares[:, None] * (known if coef.shape[1] > 1 else known.any(axis=1, keepdims=True))
    mass = mass / np.where(mass.sum(axis=0) > 0, mass.sum(axis=0), 1.0)
    y, loss, scale = _encoded(labels, classes, huber, name)
    return Labelled(found, classes, coef, intercept, shares, mass, X, labels, y, loss, scale)


def _checked(public: Public, name: str, n_features: int) -> tuple[Any, Array]:
    try:
        X = check_array(public.X, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
    except ValueError:
        raise SchemaMismatch(
            f"{name} was given aggregation records that are fewer than two, or not all finite "
            "numbers. Nothing was combined. Encode the table with the study's schema, which says "
            "what becomes of missing values."
        ) from None
    if X.shape[1] != n_features:
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


def _encoded(
    labels: Array, classes: Array | None, huber: float | None, name: str
) -> tuple[Array, Loss, float]:
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
    return (
        (np.where(codes == 1, 1.0, -1.0), Logistic(), 1.0)
        if len(classes) <= 2
        else (
            codes,
            Softmax(len(classes)),
            1.0,
        )
    )


def prior_shares(members: Sequence[Member], public: Public | None) -> Array:
    """Return the members' weights before any label is looked at: by precision, or equal where sizes are unknown."""
    if any(member.size is None for member in members):
        return np.full(len(members), 1 / len(members))
    return precision_weights(
        members, 0.02 if public is None else typical_curvature(members, public)
    )


@dataclass(frozen=True)
class Ridge:
    """Σ loss + (t·m/2)‖θ - centre‖² over records Z of norm <= 1, as `erm.solve` takes it."""

    Z: Any
    y: Array
    loss: Loss

    def at(self, rows: Array | None) -> Ridge:
        """Return the same over the chosen rows, or over all."""
        return self if rows is None else Ridge(self.Z[rows], self.y[rows], self.loss)

    def fit(self, centre: Array, strength: float, start: Array | None = None) -> Array:
        """Return the minimum; an infinite strength gives the centre itself."""
        if math.isinf(strength):
            return centre
        Z, y = self.Z, self.y
        ridge = strength * max(len(y), 1)
        linear = -ridge * centre
        rounding = gradient_error(
            self.loss,
            n_records=len(y),
            n_features=Z.shape[1],
            regularization=ridge,
            linear_norm=float(np.linalg.norm(linear)),
        )
        tolerance = max(SOLVED_TO * len(y) * math.sqrt(strength), 4 * rounding)
        found = solve(
            Z,
            y,
            self.loss,
            regularization=ridge,
            linear=linear,
            tolerance=tolerance,
            start=centre if start is None else start,
        )
        return np.asarray(found.coef, dtype=np.float64)

    def losses(self, theta: Array) -> Array:
        """Return the loss of each row."""
        return np.asarray(self.loss.value(np.asarray(theta @ self.Z.T), self.y))

    def scale_of(self, theta: Array) -> float:
        """Return the k >= 0 for which kθ fits best: θ says where to, the records how far."""
        z = np.asarray(theta @ self.Z.T)
        size = math.sqrt(float(np.mean(z * z)))
        if size == 0:
            return 0.0

        def objective(k: float) -> float:
            # The slight ridge keeps k finite where the average makes no mistake.
            return float(np.mean(self.loss.value(k / size * z, self.y))) + 5e-4 * k * k

        high = 1.0
        while objective(2 * high) < objective(high) and high < 64:
            high *= 2
        return (
            float(optimize.minimize_scalar(objective, bounds=(0.0, 2 * high), method="bounded").x)
            / size
        )


def folds(y: Array, random_state: Any) -> list[Array]:
    """Return the held-out rows of stratified cross-validation, repeated more often the fewer records there are."""
    generator, n_folds = check_random_state(random_state), min(N_FOLDS, len(y))
    tests = []
    for _ in range(int(np.clip(500 // len(y), 1, 3))):
        order = generator.permutation(len(y))
        order = order[np.argsort(y[order], kind="stable")]
        number = np.empty(len(y), dtype=np.int64)
        number[order] = np.arange(len(y)) % n_folds
        tests += [number == fold for fold in range(n_folds)]
    return tests


@dataclass(frozen=True)
class Known:
    """What is known of the average's error before any label is looked at: how far off it is in which direction.

    A ridge of strength s is (s/2) Σ (error along an axis)²/(variance along it), so s = 1 is the
    density of noise and sampling error, and the fit what Bayes' rule makes of average and records.
    """

    ridge: Ridge  # over records in the axes' coordinates
    axes: Array  # (p, p): θ = u·axesᵀ
    inverse: Array
    unit: float  # the length of u that is one standard error

    @classmethod
    def of(cls, task: Labelled, ball: Ball, plain: Ridge) -> Known | None:
        """Read the error off the members' known noise and sizes; None if one has none."""
        if any(member.size is None for member in task.members):
            return None
        moment = plain.Z.T @ plain.Z / len(plain.y)
        values, turned = np.linalg.eigh(
            np.asarray(moment.todense() if sparse.issparse(moment) else moment)
        )
        values = np.maximum(
            values, 1e-3 * values.mean()
        )  # a direction that no public record has is not known flat
        variance = np.zeros(len(values))
        for member, share in zip(task.members, task.shares, strict=True):
            scale = ball.scale_of(member)
            bend = plain.loss.curvature * values * scale**2
            variance += (share * scale) ** 2 * (
                _noise_along(member, bend) + 1 / (max(member.size or 0, 1) * bend)
            )
        spread = np.sqrt(variance)
        records = np.asarray(plain.Z @ (turned * spread))
        unit = 1 / ((float(np.linalg.norm(records, axis=1).max()) or 1.0) * (1 + 1e-12))
        ridge = Ridge(records * unit, plain.y, plain.loss)
        return cls(ridge, turned * (spread * unit), (turned / (spread * unit)), 1 / unit)

    def at(self, rows: Array | None) -> Known:
        """Return the same over the chosen rows, or over all."""
        return self if rows is None else replace(self, ridge=self.ridge.at(rows))

    def fit(self, centre: Array, strength: float, start: Array | None) -> Array:
        """Return the minimum of the records' loss and the ridge around the centre."""
        if math.isinf(strength):
            return centre
        begin = None if start is None else start @ self.inverse
        strength = strength / (max(len(self.ridge.y), 1) * self.unit**2)
        return np.asarray(self.ridge.fit(centre @ self.inverse, strength, begin) @ self.axes.T)


def _noise_along(member: Member, bend: Array) -> Array:
    """Return the variance of a member's noise along directions of these curvatures: 1/√variance is linear in them."""
    flat, steep = member.noise_variance(0.0), member.noise_variance(1.0)
    if flat == 0:
        return np.zeros(len(bend))
    return np.asarray((flat**-0.5 + (steep**-0.5 - flat**-0.5) * bend) ** -2)


@dataclass(frozen=True)
class Mixture:
    """Ridges around a centre, at several strengths, mixed in proportion to their held-out likelihood.

    A choice among candidates is as noisy as the cross-validation it rests on; with 50 records that
    costs more than the candidates differ. A mixture weighted by exp(-total held-out loss) moves
    with that noise continuously, and as the loss is convex it is never worse than the same mixture
    of the candidates' losses.
    """

    ridge: Ridge
    centre: Array  # the members' average; records say how far to go in its direction
    candidates: tuple[tuple[bool, float], ...]  # (around the centre rather than around 0, strength)
    weights: Array
    known: Known | None = (
        None  # what strengths around the centre are measured in, if not in the ridge's t
    )

    @classmethod
    def by_cross_validation(
        cls,
        ridge: Ridge,
        centre: Array,
        candidates: Sequence[tuple[bool, float]],
        random_state: Any,
        *,
        prior: Array | None = None,
        known: Known | None = None,
    ) -> Mixture:
        """Weigh `candidates`, sorted by centre and falling strength, on held-out records."""
        weights = np.ones(len(candidates)) if prior is None else prior
        mixture = cls(ridge, centre, tuple(candidates), weights, known=known)
        tests = folds(ridge.y, random_state)
        total = np.zeros(len(candidates))
        for test in tests:
            held_out = ridge.at(test)
            total += [
                held_out.losses(theta).sum() for theta in mixture._fits(np.flatnonzero(~test))
            ]
        loss = total / (
            len(tests) / min(N_FOLDS, len(ridge.y))
        )  # of all records, each held out once
        worse = loss - loss.min()
        if ridge.loss.n_outputs == 1 and not ridge.loss.monotone:
            # A residual's log-likelihood is its square over twice the variance, and the best
            # candidate tells that.
            worse = worse * len(ridge.y) / max(2 * loss.min(), np.finfo(float).tiny)
        weights = weights * np.exp(-worse)
        weights = np.where(weights < NEGLIGIBLE * weights.max(), 0.0, weights)
        return cls(ridge, centre, mixture.candidates, weights / weights.sum(), known)

    @property
    def trust(self) -> float:
        """Weight of the candidates around the members' average; the rest is around zero: records alone."""
        return float(
            sum(w for w, (around, _) in zip(self.weights, self.candidates, strict=True) if around)
        )

    def fit(self, rows: Array | None = None) -> Array:
        """Return the mixture fitted to the chosen rows, or to all."""
        fits = self._fits(rows)
        return np.asarray(
            sum(weight * theta for weight, theta in zip(self.weights, fits, strict=True))
        )

    def _fits(self, rows: Array | None) -> Iterator[Array]:
        ridge, known = self.ridge.at(rows), None if self.known is None else self.known.at(rows)
        scale = ridge.scale_of(self.centre)
        centre = scale * self.centre
        last, theta = None, centre
        for weight, (around, strength) in zip(self.weights, self.candidates, strict=True):
            if weight > 0:
                start = theta if around == last else None
                if around and known is not None:
                    # What is scaled is scaled with its error.
                    theta = known.fit(centre, strength / scale**2 if scale > 0 else math.inf, start)
                else:
                    theta = ridge.fit(centre if around else np.zeros_like(centre), strength, start)
                last = around
            yield theta


def is_logistic(learner: PrivateLearner[Any, Any] | Learner) -> bool:
    """Tell whether members minimise the logistic loss, which predictions with records need."""
    kind = learner if isinstance(learner, type) else type(learner)
    return issubclass(kind, PrivateLogisticRegression)


class PublicBlend(Aggregator):
    """Blend labelled public records with the members' average: what to use when there are such records.

    The logistic (softmax, squared) loss of the public records plus a ridge around a centre: the
    members' precision-weighted average, scaled to fit, or zero. Around the average the ridge is
    measured in the errors that the members' known noise and sizes imply, so that each direction
    moves as far as it is uncertain. Over both centres and all strengths of the ridge the results
    are mixed in proportion to their cross-validated likelihood, with even odds on the two centres
    and, around the average, most on the strength that the known errors imply. Public records alone
    and the average alone are both among them.

    Parameters
    ----------
    classes
        The declared classes; otherwise the union of the members'.
    huber
        Regressors only: residuals beyond this size count linearly. None: squared loss.
    random_state
        Public randomness: which public records are held out together.

    The ensemble's ``weights`` add up to the share of the mixture that rests on the members'
    average; the rest is public records alone. A half or less says that joining did not help.

    Privacy
    -------
    Each site's own guarantee, against everyone: post-processing. None for the public records.
    Proof: docs/guarantees/feature.md.
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"blend": {}}
    needs_public = needs_labels = combines_coefficients = True

    def __init__(
        self,
        *,
        classes: Sequence[Any] | None = None,
        huber: float | None = None,
        random_state: Any = 0,
    ) -> None:
        self.classes = classes
        self.huber = huber
        self.random_state = random_state

    def describe(self) -> Description:
        """Return its title and what the weights mean."""
        return Description(
            "PublicBlend",
            "Members are averaged by their precision; the public records then decide how far the "
            "average is followed.",
        )

    @classmethod
    def alternatives(cls, learner: Learner | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the default settings."""
        return [{}]

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the default settings, where their result can be predicted."""
        return {"public blend": cls()} if public and is_logistic(learner) else {}

    def is_predictable(self, learner: PrivateLearner[Any, Any], *, public: bool) -> bool:
        """Tell whether there are public records and the loss is logistic."""
        return public and is_logistic(learner)

    def expected(self, joining: Any) -> tuple[Any, float] | None:
        """Return the law of the best ridge around the scaled average."""
        found: tuple[Any, float] = joining.blend(joining.shares(self))
        return found

    def weigh(self, members: Sequence[Member], public: Public | None) -> Array:
        """Return the members' weights before any label is looked at."""
        return prior_shares(members, public)

    def combine(
        self,
        members: Sequence[Any],
        public: Public | None = None,
        *,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> LinearEnsemble:
        """Return the blend of linear `members` and labelled `public` records."""
        task = read_labelled(self, members, public)
        ball = Ball.around(task)
        ridge = Ridge(ball.records(task.X), task.y, task.loss)
        known = Known.of(task, ball, ridge)
        step = 0.5 if len(task.y) <= FEW_RECORDS else 1.0
        alone = np.arange(0.5, -5.1, -step)
        around = alone if known is None else np.arange(2.0, -4.1, -step)
        # How much is expected of a strength before any label is looked at; the average alone is one
        # step beyond.
        expected = np.ones(len(around) + 1)
        if known is not None:
            expected /= 1 + (np.array([around[0] + step, *around]) / EXPECTED_WITHIN) ** 2
        prior = np.concatenate([expected / expected.sum(), np.full(len(alone), 1 / len(alone))])
        candidates = [
            (True, math.inf),
            *((True, t) for t in 10.0**around),
            *((False, t) for t in 10.0**alone),
        ]
        centre = ball.enter(*task.average)
        mixture = Mixture.by_cross_validation(
            ridge, centre, candidates, self.random_state, prior=prior, known=known
        )
        return task.ensemble(*ball.leave(mixture.fit()), task.shares * mixture.trust)


@dataclass(frozen=True)
class Ball:
    """Coordinates in which public records, with a constant if one is learned, have norm <= 1."""

    norm: float
    with_intercept: bool
    outputs: int
    label_scale: float

    @classmethod
    def around(cls, task: Labelled) -> Ball:
        """Return the smallest ball around the records; they are public, so their norm is."""
        squares = task.X.multiply(task.X) if sparse.issparse(task.X) else np.square(task.X)
        longest = math.sqrt(float(np.asarray(squares.sum(axis=1)).max())) or 1.0
        return cls(longest * (1 + 1e-12), task.with_intercept, task.n_outputs, task.label_scale)

    def records(self, X: Any) -> Any:
        """Return (x / norm, 1) / √2, or x / norm."""
        X = X * (1 / self.norm)
        if not self.with_intercept:
            return X
        half, one = HALF, np.ones((X.shape[0], 1))
        return (
            sparse.csr_array(sparse.hstack([X, one]) * half)
            if sparse.issparse(X)
            else np.hstack([X, one]) * half
        )

    def scale_of(self, member: Member) -> float:
        """Return what a coordinate of the member's own unit ball is multiplied by to become one of this ball."""
        return (
            member.to_user
            * self.norm
            / self.label_scale
            * (math.sqrt(2) if self.with_intercept else 1.0)
        )

    def enter(self, coef: Array, intercept: Array) -> Array:
        """Return the coefficients (p,) or (K, p) that give the same scores on `records`."""
        theta = coef * (self.norm / self.label_scale)
        if self.with_intercept:
            theta = np.hstack([theta, intercept[:, None] / self.label_scale]) * math.sqrt(2)
        return np.asarray(theta[0] if self.outputs == 1 else theta)

    def leave(self, theta: Array) -> tuple[Array, Array]:
        """Return coefficients (1 or K, d) and intercepts (1 or K,) of the user's coordinates."""
        theta = np.atleast_2d(theta) * self.label_scale
        if not self.with_intercept:
            return theta / self.norm, np.zeros(len(theta))
        theta = theta * HALF
        return theta[:, :-1] / self.norm, theta[:, -1]
