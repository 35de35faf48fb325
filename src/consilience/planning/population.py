"""What is publicly known about a population of records, and what a site's noise does to a model of it.

Planning needs no private record: a population is either a public table that stands for it, or a
declared loss that bends equally in all directions. All of it is in the coordinates of the unit
ball, where noise is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, special
from sklearn.base import clone

from consilience.errors import SettingsError
from consilience.learners.erm import Logistic, Loss, solve
from consilience.learners.linear import (
    PrivateLinearSVC,
    PrivateLogisticRegression,
    classification_task,
)
from consilience.learners.perturbation import LinearPlan, LinearTask, plan_linear
from consilience.privacy.mechanisms import Source
from consilience.privacy.vector_noise import (
    draw_vector,
    is_in_objective,
    noise_variance,
    public_radius,
)

Array = NDArray[np.float64]
Linear = PrivateLogisticRegression | PrivateLinearSVC

MOST_PUBLIC = 4000  # public records used; more would only take longer
FOLDS = 5
NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)  # for means over a normal variable
WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Smoothed(NamedTuple):
    """The mean loss over a normal model: its value, its error, and the means of gradient and Hessian."""

    loss: float
    error: float | None
    gradient: Array
    hessian: Array


class HeldOut(NamedTuple):
    """How much better a model fits the very records that stand for the population, and gradients free of that."""

    loss: float
    error: float
    gradients: Array


@dataclass(frozen=True)
class Population:
    """What is publicly known about the records, in the coordinates of the unit ball."""

    hessian: Callable[[Array], Array]  # of the mean loss at a model
    gradients: Callable[[Array], Array]  # covariance of one record's gradient at a model
    rows: Array  # records, or directions that have their second moment
    smooth: Callable[
        [Array, Array, Array | None], Smoothed
    ]  # of mean, covariance, and shares of votes as labels
    second_moment: Array
    model: Callable[[float, Array | None], Array]  # exact minimum at a ridge Λ and a linear term
    loss: Callable[[Array], float]
    held_out: Callable[[float], HeldOut]  # at a ridge Λ
    error: Callable[[Array], float] | None = None
    exact_error: float | None = None


def isotropic(
    learner: Linear, dimension: int, curvature: float | None, signal: float
) -> Population:
    """Return the facts of a quadratic loss that bends equally in all directions."""
    largest = learner._loss(2).curvature
    bend = largest / dimension if curvature is None else curvature
    best = np.full(dimension, signal)
    one = np.eye(dimension)

    def smooth(mean: Array, covariance: Array, soft: Array | None) -> Smoothed:
        gap = mean - best
        return Smoothed(
            bend / 2 * float(gap @ gap + np.trace(covariance)), None, bend * gap, bend * one
        )

    return Population(
        hessian=lambda f: bend * one,
        gradients=lambda f: bend * one,  # of a well-specified model
        rows=math.sqrt(min(1.0, dimension * bend / largest)) * one,
        smooth=smooth,
        second_moment=bend / largest * one,
        model=lambda ridge, linear: (
            (bend * best - (0.0 if linear is None else linear)) / (bend + ridge)
        ),
        loss=lambda f: bend / 2 * float(np.sum(np.square(f - best))),
        held_out=lambda ridge: HeldOut(0.0, 0.0, bend * one),
    )


def from_public(learner: Linear, X: Any, y: ArrayLike, source: Source) -> Population:
    """Return the facts that the public records show, all of them at the learner's own scaling."""
    task, _, classes = classification_task(clone(learner).set_params(unit="record"), X, y, None)
    if len(classes) != 2:
        raise SettingsError(
            f"Advice was asked for with public data of {len(classes)} classes, but is known for "
            "two. Nothing was computed. Plan for one class against the others."
        )
    some = np.sort(source.permutation(task.n_records)[:MOST_PUBLIC])
    rows = task.X[some].toarray() if hasattr(task.X, "toarray") else task.X[some]
    labels, loss, ridge = np.asarray(task.y)[some], task.loss, learner.regularization

    def fitted(lam: float, linear: Array | None = None, keep: Any = slice(None)) -> Array:
        part = labels[keep]
        pull = None if linear is None else len(part) * linear
        found = solve(
            rows[keep],
            part,
            loss,
            regularization=len(part) * lam,
            tolerance=1e-7 * len(part),
            linear=pull,
        )
        return np.asarray(found.coef, np.float64)

    def error(f: Array, keep: Any = slice(None)) -> float:
        return float(np.mean((rows[keep] @ f > 0) != (labels[keep] > 0)))

    def hessian(f: Array) -> Array:
        return np.asarray((rows.T * loss.bend(rows @ f, labels)) @ rows / len(rows))

    def gradients(f: Array) -> Array:
        return np.atleast_2d(
            np.cov(loss.slope(rows @ f, labels)[:, None] * rows, rowvar=False, bias=True)
        )

    def smooth(mean: Array, covariance: Array, soft: Array | None) -> Smoothed:
        z, spread = rows @ mean, margin_spread(rows, covariance)
        at, y = z[:, None] + spread[:, None] * NODES, labels[:, None]
        kind, sign = (loss, y) if soft is None else (Logistic(), np.full_like(y, -1.0))
        slope, bend = kind.slope(at, sign) @ WEIGHTS, kind.bend(at, sign) @ WEIGHTS
        wrong = np.where(
            spread > 0, special.ndtr(-labels * z / np.maximum(spread, 1e-300)), labels * z < 0
        )
        return Smoothed(
            loss=float(np.mean(loss.value(at, y) @ WEIGHTS)),
            error=float(np.mean(wrong)),
            gradient=rows.T @ (slope if soft is None else slope - soft) / len(rows),
            hessian=(rows.T * bend) @ rows / len(rows),
        )

    folds = np.arange(len(rows)) % FOLDS

    @cache
    def outside(ridge: float) -> Array:
        """Each record's margin by a model of the others."""
        z = np.zeros(len(rows))
        for k in range(min(FOLDS, len(rows))):
            z[folds == k] = rows[folds == k] @ fitted(ridge, keep=folds != k)
        return z

    @cache
    def held_out(ridge: float) -> HeldOut:
        z, f = outside(ridge), fitted(ridge)
        scatter = np.atleast_2d(
            np.cov(loss.slope(z, labels)[:, None] * rows, rowvar=False, bias=True)
        )
        bend = (rows.T * loss.bend(z, labels)) @ rows / len(rows)
        inverse = linalg.inv(bend + ridge * np.eye(rows.shape[1]))
        # A model of four fifths of the records has an excess of its own, which is not meant here.
        own = (
            float(np.sum(bend * (inverse @ scatter @ inverse))) / 2 / (len(rows) * (1 - 1 / FOLDS))
        )
        gap = float(np.mean(loss.value(z, labels)) - np.mean(loss.value(rows @ f, labels)))
        return HeldOut(
            max(0.0, gap - own), float(np.mean((z > 0) != (labels > 0))) - error(f), scatter
        )

    return Population(
        hessian=hessian,
        gradients=gradients,
        rows=rows,
        smooth=smooth,
        second_moment=rows.T @ rows / len(rows),
        model=fitted,
        loss=lambda f: float(np.mean(loss.value(rows @ f, labels))),
        held_out=held_out,
        error=error,
        exact_error=held_out(ridge).error + error(fitted(ridge)),
    )


def margin_spread(rows: Array, covariance: Array) -> Array:
    """Return the standard deviation of each row's margin under a model of this covariance."""
    return np.asarray(np.sqrt(np.maximum(np.einsum("ij,ij->i", rows @ covariance, rows), 0.0)))


def site_task(learner: Linear, dimension: int, n_records: int) -> LinearTask:
    """Return the task of training on so many records, without any."""
    n_units = (
        n_records // int(learner.records_per_person or 1) if learner.unit == "person" else n_records
    )
    return LinearTask(
        None, None, np.zeros(0), None, learner._loss(2), dimension, n_records, max(1, n_units)
    )


def site_noise(learner: Linear, dimension: int, n_records: int, **settings: float) -> SiteNoise:
    """Return the noise that training on so many records would draw, as the learner itself decides it."""
    learner = clone(learner).set_params(**settings)
    if learner.neighbours == "add-remove":
        learner.set_params(public_size=n_records)
    task = site_task(learner, dimension, n_records)
    return SiteNoise(plan_linear(learner, task), task.loss, n_records, dimension)


@dataclass(frozen=True)
class SiteNoise:
    """The planned noise of one site's training, seen from the mean objective."""

    plan: LinearPlan
    loss: Loss
    n_records: int
    dimension: int

    @property
    def ridge(self) -> float:
        """Λ of the mean objective, as the mechanism may have raised it."""
        return self.plan.regularization / self.n_records

    @property
    def in_objective(self) -> bool:
        """Whether the noise is part of what is minimised, rather than added to the minimum."""
        return is_in_objective(self.plan.noise)

    def covariance(self, inverse: Array) -> Array:
        """Return the covariance that the noise gives the model, to first order; `inverse` is the inverse Hessian."""
        if self.plan.closing is None:  # where there is noise, there is closing noise
            return np.zeros_like(inverse)
        spread = (
            inverse @ inverse / self.n_records**2 if self.in_objective else np.eye(self.dimension)
        )
        closed = noise_variance(self.plan.closing) * np.eye(self.dimension)
        return np.asarray(noise_variance(self.plan.noise, self.dimension) * spread + closed)

    def expected_bound(self) -> tuple[float, float]:
        """Return what noise adds to the expected loss at most: what averaging leaves, and what it divides by N."""
        if self.plan.closing is None:
            return 0.0, 0.0
        square = self.dimension * noise_variance(self.plan.noise, self.dimension)
        closed = self.dimension * self.loss.curvature * self.plan.closing.scale**2
        if self.in_objective:
            return square / (2 * self.n_records**2 * self.ridge), closed
        return 0.0, self.loss.curvature / 2 * square + closed

    def longest(self) -> float:
        """Return a bound on the root mean square of the model's length."""
        exact = min(self.loss.lipschitz / self.ridge, math.sqrt(2 * self.loss.at_zero / self.ridge))
        drawn = math.sqrt(self.dimension * noise_variance(self.plan.noise, self.dimension))
        return exact + (drawn / (self.n_records * self.ridge) if self.in_objective else drawn)

    def bound(self, failure: float) -> float:
        """Return how far the noise can lift the regularised objective, but for that probability: T of section I."""
        radius = public_radius(self.plan.noise, self.dimension, probability=failure)
        if self.in_objective:
            return float(radius**2 / (self.n_records**2 * self.ridge))
        return float((self.loss.curvature + self.ridge) / 2 * radius**2)

    def simulated(
        self, facts: Population, root: Array, inverse: Array, source: Source
    ) -> tuple[Array, Array, Array]:
        """Return two models as trained on other records like the public ones, with noise as planned, and their shift.

        The second has the first one's draws with the sign reversed, which are as likely: what is
        linear in the noise cancels from their mean. The shift is what the draws do to first order.
        """
        assert self.plan.noise is not None
        pull = root @ source.normal(self.dimension)
        drawn = draw_vector(self.dimension, event=self.plan.noise, source=source)
        if self.in_objective:
            pull, drawn = pull + drawn / self.n_records, np.zeros(self.dimension)
        return (
            facts.model(self.ridge, pull) + drawn,
            facts.model(self.ridge, -pull) - drawn,
            drawn - inverse @ pull,
        )
