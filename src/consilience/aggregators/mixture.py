"""Ridges around a centre, mixed in proportion to their cross-validated likelihood.

Everything here reads what sites released and records that are public, so for a record of a site it
is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize, sparse
from sklearn.utils import check_random_state

from consilience.aggregators.base import Array
from consilience.aggregators.labelled import Labelled
from consilience.aggregators.members import Member, dense
from consilience.learners.erm import Loss, Problem, PublicFacts, gradient_error, solve

SOLVED_TO = 1e-7  # relative gradient; public records need an answer, not a certificate
N_FOLDS = 5
NEGLIGIBLE = 1e-3  # of the best candidate's weight
FEW_RECORDS = 5000  # beyond, strengths are tried in coarser steps


@dataclass(frozen=True)
class Ball:
    """Coordinates in which public records, with a constant if one is learned, have norm <= 1."""

    norm: float
    with_intercept: bool
    outputs: int
    label_scale: float

    @classmethod
    def around(cls, X: Any, *, with_intercept: bool, outputs: int, label_scale: float) -> Ball:
        """Return the smallest ball around the records; they are public, so their norm is."""
        squares = X.multiply(X) if sparse.issparse(X) else np.square(X)
        longest = math.sqrt(float(np.asarray(squares.sum(axis=1)).max())) or 1.0
        return cls(longest * (1 + 1e-12), with_intercept, outputs, label_scale)

    @classmethod
    def of(cls, task: Labelled) -> Ball:
        """Return the ball around the records that members are combined by."""
        return cls.around(
            task.X,
            with_intercept=task.with_intercept,
            outputs=task.n_outputs,
            label_scale=task.label_scale,
        )

    def records(self, X: Any) -> Any:
        """Return (x / norm, 1) / √2, or x / norm."""
        X = X * (1 / self.norm)
        if not self.with_intercept:
            return X
        half, one = math.sqrt(0.5), np.ones((X.shape[0], 1))
        return (
            sparse.csr_array(sparse.hstack([X, one]) * half)
            if sparse.issparse(X)
            else np.hstack([X, one]) * half
        )

    def scale_of(self, member: Member) -> float:
        """Return the factor from coordinates of the member's unit ball to those of this ball."""
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
        theta = theta * math.sqrt(0.5)
        return theta[:, :-1] / self.norm, theta[:, -1]


@dataclass(frozen=True)
class Ridge:
    """Σ loss + (t·m/2)‖θ - centre‖² over records Z of norm <= 1, as `erm.solve` takes it."""

    Z: Any  # dense or sparse rows
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
            PublicFacts(
                self.loss,
                n_records=len(y),
                n_features=Z.shape[1],
                regularization=ridge,
                linear_norm=float(np.linalg.norm(linear)),
            )
        )
        tolerance = max(SOLVED_TO * len(y) * math.sqrt(strength), 4 * rounding)
        found = solve(
            Z,
            y,
            Problem(self.loss, regularization=ridge, linear=linear),
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


def folds(
    y: Array, random_state: int | None, *, persons: Array | None = None, times: int | None = None
) -> list[Array]:
    """Return the held-out rows of stratified cross-validation; few records are divided often.

    All records of one of the `persons`, numbered from 0 on, are held out together. `times` says how
    often the records are divided.
    """
    persons = np.arange(len(y)) if persons is None else persons
    first = np.unique(persons, return_index=True)[1]
    generator, n_folds = check_random_state(random_state), min(N_FOLDS, len(first))
    tests = []
    for _ in range(int(np.clip(500 // len(y), 1, 3)) if times is None else times):
        order = generator.permutation(len(first))
        order = order[np.argsort(y[first][order], kind="stable")]
        number = np.empty(len(first), dtype=np.int64)
        number[order] = np.arange(len(first)) % n_folds
        tests += [number[persons] == fold for fold in range(n_folds)]
    return tests


@dataclass(frozen=True)
class Known:
    """What is known of the average's error in each direction before any label is used.

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
        values, turned = np.linalg.eigh(np.asarray(dense(moment)))
        # A direction that no public record has is not known to be flat.
        values = np.maximum(values, 1e-3 * values.mean())
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

    def signal(self, centre: Array, plain: Ridge) -> float:
        """Return the share of the average's scores, over the records, that its error leaves over.

        Labels are not used. A score that all records share says nothing about any of them.
        """
        scores = centre @ dense(plain.Z).T
        seen = np.sum((scores - scores.mean(axis=-1, keepdims=True)) ** 2)
        expected = np.sum((self.ridge.Z - self.ridge.Z.mean(axis=0)) ** 2) * self.unit**2
        return max(0.0, 1 - len(np.atleast_2d(scores)) * float(expected / seen)) if seen else 0.0

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
    """Return the variance of a member's noise along directions of these curvatures.

    1/√variance is linear in the curvature, so two values determine it.
    """
    flat, steep = member.noise_variance(0.0), member.noise_variance(1.0)
    if flat == 0:
        return np.zeros(len(bend))
    return np.asarray((flat**-0.5 + (steep**-0.5 - flat**-0.5) * bend) ** -2)


def step_between(n_records: int) -> float:
    """Return how far apart strengths are, in powers of ten.

    Of many records the likelihood is sharp, and the solver's time counts.
    """
    return 0.5 if n_records <= FEW_RECORDS else 1.0


def strengths_alone(n_records: int) -> Array:
    """Return the ridges of a fit to public records alone, as powers of ten, strongest first."""
    return np.arange(0.5, -5.1, -step_between(n_records))


def _held_out(loss: Loss, scores: Array, y: Array) -> tuple[float, float]:
    """Return the number in (0, 1] that suits held-out scores best, and their loss times it.

    A weak ridge is too sure of itself and still may point the right way. Its likelihood should say
    the latter, because what it is too sure of can be corrected. Numbers are predicted as they are.
    """

    def total(k: float) -> float:
        return float(loss.value(k * scores, y).sum())

    whole = total(1.0)
    if loss.n_outputs == 1 and not loss.monotone:
        return 1.0, whole
    found = optimize.minimize_scalar(total, bounds=(0.0, 1.0), method="bounded")
    return (float(found.x), float(found.fun)) if found.fun < whole else (1.0, whole)


def weigh(
    loss: Loss, held_out: Sequence[Array], y: Array, *, times: float, prior: Array
) -> tuple[Array, Array]:
    """Return candidates' weights by their likelihood, and what makes each of them less sure.

    `held_out` are each candidate's scores of records that it was not fitted to, every record
    `times` times.
    """
    found = [_held_out(loss, scores, y) for scores in held_out]
    scales, total = (np.array(part) for part in zip(*found, strict=True))
    total = total / times  # of all records, each held out once
    worse = total - total.min()
    if loss.n_outputs == 1 and not loss.monotone:
        # A residual's log-likelihood is its square over twice the variance, and the best candidate
        # tells that.
        worse = worse * (len(y) / times) / max(2 * total.min(), np.finfo(float).tiny)
    weights = prior * np.exp(-worse)
    weights = np.where(weights < NEGLIGIBLE * weights.max(), 0.0, weights)
    return weights / weights.sum(), scales


@dataclass(frozen=True)
class Mixture:
    """Ridges around a centre at several strengths, mixed by their held-out likelihood.

    A choice among candidates is as noisy as the cross-validation it rests on; with 50 records that
    costs more than the candidates differ. A mixture weighted by exp(-total held-out loss) moves
    with that noise continuously, and as the loss is convex it is never worse than the same mixture
    of the candidates' losses. Candidates that are too sure of themselves on held-out records are
    made less so, all scores by one factor, before they are weighed.
    """

    ridge: Ridge
    centre: Array  # the members' average; records say how far to go in its direction
    candidates: tuple[tuple[bool, float], ...]  # (around the centre rather than around 0, strength)
    weights: Array
    # What strengths around the centre are measured in, if not in the ridge's t.
    known: Known | None = None
    # What each candidate is multiplied by: less than 1 if it is too sure of itself.
    scales: Array | None = None

    @classmethod
    def by_cross_validation(
        cls,
        ridge: Ridge,
        centre: Array,
        candidates: Sequence[tuple[bool, float]],
        random_state: int | None,
        *,
        prior: Array | None = None,
        known: Known | None = None,
    ) -> Mixture:
        """Weigh `candidates`, sorted by centre and falling strength, on held-out records."""
        weights = np.ones(len(candidates)) if prior is None else prior
        mixture = cls(ridge, centre, tuple(candidates), weights, known=known)
        tests = folds(ridge.y, random_state)
        scores = [
            [theta @ ridge.at(test).Z.T for theta in mixture._fits(np.flatnonzero(~test))]
            for test in tests
        ]
        held_out = [np.concatenate(of_one, axis=-1) for of_one in zip(*scores, strict=True)]
        labels = np.concatenate([ridge.y[test] for test in tests])
        times = len(tests) / min(N_FOLDS, len(ridge.y))
        weights, scales = weigh(ridge.loss, held_out, labels, times=times, prior=weights)
        return cls(ridge, centre, mixture.candidates, weights, known, scales)

    @property
    def trust(self) -> float:
        """Weight of the candidates around the members' average; the others use records alone."""
        return float(
            sum(w for w, (around, _) in zip(self.weights, self.candidates, strict=True) if around)
        )

    def fit(self, rows: Array | None = None) -> Array:
        """Return the mixture fitted to the chosen rows, or to all."""
        fits = self._fits(rows)
        shares = self.weights if self.scales is None else self.weights * self.scales
        return np.asarray(sum(share * theta for share, theta in zip(shares, fits, strict=True)))

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
