"""The noise that a site's training would draw, and what it does to the site's model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from sklearn.base import clone

from consilience.learners.erm import Loss
from consilience.learners.perturbation import LinearPlan, LinearTask, plan_for_advice
from consilience.planning.population import Array, Linear, Population
from consilience.privacy.mechanisms import Source
from consilience.privacy.vector_noise import (
    draw_vector,
    is_in_objective,
    noise_variance,
    public_radius,
)


def site_task(learner: Linear, dimension: int, n_records: int) -> LinearTask:
    """Return the task of training on so many records, without any records in it."""
    n_units = (
        n_records // int(learner.records_per_person or 1) if learner.unit == "person" else n_records
    )
    return LinearTask(learner.loss(2), dimension, n_records, max(1, n_units))


def site_noise(learner: Linear, dimension: int, n_records: int, **settings: float) -> SiteNoise:
    """Return the noise of training on so many records, as the learner itself plans it."""
    learner = clone(learner).set_params(**settings)
    if learner.neighbours == "add-remove":
        learner.set_params(public_size=n_records)
    task = site_task(learner, dimension, n_records)
    return SiteNoise(plan_for_advice(learner, task), task.loss, n_records, dimension)


@dataclass(frozen=True)
class SiteNoise:
    """The planned noise of one site's training, expressed for the mean objective."""

    plan: LinearPlan
    loss: Loss
    n_records: int
    dimension: int

    @property
    def ridge(self) -> float:
        """Λ of the mean objective, which the mechanism may have raised."""
        return self.plan.regularization / self.n_records

    def ridge_on(self, facts: Population) -> float:
        """Return the Λ to forecast with, which those facts can bear.

        An automatic Λ falls with the number of records. What the few of a public table show at the
        Λ of many more is how closely so few can be fitted.
        """
        return max(self.ridge, facts.ridge)

    @property
    def in_objective(self) -> bool:
        """Whether the noise is part of what is minimised, rather than added to the minimum."""
        return is_in_objective(self.plan.noise)

    @property
    def variance(self) -> float:
        """Variance of each coordinate of the noise as it is drawn."""
        return noise_variance(self.plan.noise, self.dimension)

    def covariance(self, inverse: Array) -> Array:
        """Return the model's covariance due to noise, to first order, from the inverse Hessian."""
        if self.plan.noise is None:
            return np.zeros_like(inverse)
        spread = (
            inverse @ inverse / self.n_records**2 if self.in_objective else np.eye(self.dimension)
        )
        closed = noise_variance(self.plan.closing) * np.eye(self.dimension)
        return np.asarray(self.variance * spread + closed)

    def expected_bound(self) -> tuple[float, float]:
        """Return two bounds on what noise adds to the expected loss.

        The first part remains when sites are averaged; the second is divided by their number.
        """
        square = self.dimension * self.variance
        closed = self.dimension * self.loss.curvature * noise_variance(self.plan.closing) / 2
        if self.in_objective:
            return square / (2 * self.n_records**2 * self.ridge), closed
        return 0.0, self.loss.curvature / 2 * square + closed

    def longest(self) -> float:
        """Return a bound on the root mean square of the model's length."""
        exact = min(self.loss.lipschitz / self.ridge, math.sqrt(2 * self.loss.at_zero / self.ridge))
        drawn = math.sqrt(self.dimension * self.variance)
        return exact + (drawn / (self.n_records * self.ridge) if self.in_objective else drawn)

    def bound(self, failure: float) -> float:
        """Return how far noise can lift the regularised objective, but for a failure probability.

        With r the quantile of the noise's length: r²/(n²Λ) for noise in the objective,
        (c + Λ)/2 r² for noise on the output, where c bounds the curvature of the loss.
        """
        assert self.plan.noise is not None
        radius = public_radius(self.plan.noise, self.dimension, probability=failure)
        if self.in_objective:
            return float(radius**2 / (self.n_records**2 * self.ridge))
        return float((self.loss.curvature + self.ridge) / 2 * radius**2)

    def draw_models(
        self, facts: Population, root: Array, inverse: Array, source: Source
    ) -> tuple[Array, Array, Array]:
        """Draw two models as trained on other records like the public ones, and their shift.

        The second model has the first one's draws with the sign reversed, which are as likely:
        whatever is linear in the noise cancels from their mean. The shift is the effect of the
        draws to first order.
        """
        assert self.plan.noise is not None
        pull = root @ source.normal(self.dimension)
        drawn = draw_vector(self.dimension, event=self.plan.noise, source=source)
        if self.in_objective:
            pull, drawn = pull + drawn / self.n_records, np.zeros(self.dimension)
        return (
            facts.model(self.ridge_on(facts), pull) + drawn,
            facts.model(self.ridge_on(facts), -pull) - drawn,
            drawn - inverse @ pull,
        )
