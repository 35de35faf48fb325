"""What the feature method can be expected to bring: weights learned on the public records.

The derivations are in docs/planning-proofs.md, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import linalg, optimize

from consilience.aggregators.feature import PRIVATE_REGULARIZATION, FeatureMethod
from consilience.learners.erm import Logistic
from consilience.learners.linear import PrivateLogisticRegression
from consilience.planning.noise import SiteNoise, site_noise
from consilience.planning.population import Array, Law, Outlook

if TYPE_CHECKING:
    from consilience.planning.joining import Joining


class Learned(NamedTuple):
    """What learned weights make of the average.

    ``along`` is the share of its length that is kept. The next three are given along each axis of
    the members' spread: the share of the squared error that is kept, and the variances that
    learning and noise add. ``drawn_along`` is the variance of the noise along the average itself.
    """

    along: float
    kept: Array
    learned: Array
    drawn: Array
    drawn_along: float


@dataclass(frozen=True)
class FeatureForecast:
    """Predict and bound what one `FeatureMethod` makes of the sites' models."""

    joining: Joining
    way: FeatureMethod

    def expect(self) -> Outlook:
        """Return the law of the combined model and a bound on its expected excess loss."""
        joining = self.joining
        shares = joining.shares(self.way)
        sites = joining.case.sites
        counts = np.array([site.count for site in sites])
        laws = [joining.member(site.n_records, site.epsilon) for site in sites]
        spread = np.asarray(
            sum(c * law.covariance for c, law in zip(counts, laws, strict=True)) / counts.sum()
        )
        centre = joining.scaled(joining.average(shares))

        def loss(log_k: float) -> float:
            law = self._combine(centre.times(math.exp(log_k)), spread)
            return joining.facts.smooth(law.mean, law.covariance, None).loss

        # Weights that take noise out of the average let it be longer than it could be by itself.
        more = optimize.minimize_scalar(
            loss, bounds=(-0.2, 1.6), method="bounded", options={"xatol": 0.05}
        ).x
        return self._combine(centre.times(math.exp(more)), spread), self.bound(shares)

    def _combine(self, centre: Law, spread: Array) -> Law:
        """Return the law of the average after the weights have moved it."""
        facts, joining = self.joining.facts, self.joining
        at = facts.smooth(centre.mean, centre.covariance, None)
        values, vectors = linalg.eigh(at.hessian)
        root = np.sqrt(np.maximum(values, 1e-6 * values[-1]))
        # H^½ and H^-½: f = back @ u has coordinates u in which the loss bends equally everywhere.
        out, back = vectors * root, vectors / root
        within, axes = linalg.eigh(out.T @ spread @ out)
        within = np.maximum(within, 0.0)
        back, out = back @ axes, out @ axes  # the members' spread becomes diagonal as well
        step = -back.T @ at.gradient
        energy = step**2 + np.diag(out.T @ centre.covariance @ out)
        sampled = (
            float(np.trace(back.T @ facts.gradients(centre.mean) @ back))
            / joining.dimension
            / joining.n_public
        )
        weights = self._learn(spread, at.hessian, within, energy / sampled)
        shrunk = centre.times(weights.along)
        change = back @ (np.sqrt(weights.kept)[:, None] * out.T)
        unit = shrunk.mean / math.sqrt(max(float(shrunk.mean @ at.hessian @ shrunk.mean), 1e-300))
        return Law(
            shrunk.mean + back @ ((1 - np.sqrt(weights.kept)) * step),
            change @ shrunk.sampling @ change.T + (back * (weights.learned * sampled)) @ back.T,
            change @ shrunk.noise @ change.T
            + (back * weights.drawn) @ back.T
            + weights.drawn_along * np.outer(unit, unit),
        )

    def _learn(self, spread: Array, hessian: Array, within: Array, energy: Array) -> Learned:
        """Return what learned weights make of the average, at the ridge that is used for them."""
        joining, way = self.joining, self.way
        n = joining.case.n_sites
        ranges = [in_span(within, n - 1, kappa) for kappa in kappas(within, n - 1)]
        if way.regularization == "auto" and way.epsilon is None:
            # Cross-validation chooses the ridge, so the best one is assumed.
            kept, learned = min(ranges, key=lambda span: float(span[0] @ energy + span[1].sum()))
            return Learned(1.0, kept, learned, 0 * kept, 0.0)
        mean = joining.average(joining.shares(way)).mean
        drawn, size = 0.0, 1.0
        if way.epsilon is not None:
            noise = self.hub_noise()
            ridge, drawn = noise.ridge, noise.variance / joining.n_public**2
            # Members are brought to length 1, and all of them together to operator norm 1.
            widest = math.sqrt(n * float(linalg.eigvalsh(spread)[-1])) + math.sqrt(
                float(np.trace(spread))
            )
            size = n * float(mean @ mean) + widest**2
        else:
            ridge = float(way.regularization)
            if way.scaling == "public":
                moment = joining.facts.second_moment
                size = float(mean @ moment @ mean) + float(np.sum(moment * spread))
        elsewhere = float(np.sum(hessian * spread)) / size
        along = (n * float(mean @ hessian @ mean)) / size + elsewhere
        toward_zero = way.toward == "zero" or way.epsilon is not None
        most = ranges[0][1]  # the directions that weights can move in at all
        wanted = (elsewhere / (elsewhere + ridge)) ** 2 * most.sum()
        kept, learned = min(ranges, key=lambda span: abs(float(span[1].sum()) - wanted))
        return Learned(
            along / (along + ridge) if toward_zero else 1.0,
            kept,
            learned,
            most * elsewhere * drawn / (elsewhere + ridge) ** 2,
            along * drawn / (along + ridge) ** 2,
        )

    def bound(self, shares: Array) -> float:
        """Return the average's bound and what learning the weights can cost beyond it."""
        joining, sites = self.joining, self.joining.case.sites
        counts = np.array([site.count for site in sites])
        squares = np.array(
            [joining.noise(site.n_records, site.epsilon).longest() ** 2 for site in sites]
        )
        if self.way.epsilon is None:
            length = math.sqrt(float(counts @ squares) * float(counts @ shares**2))
            return joining.average_bound(shares) + 2 * Logistic.lipschitz * length / math.sqrt(
                joining.n_public
            )
        # Members are scaled to length 1, and all of them together into the unit ball.
        square = joining.case.n_sites * float(counts @ (shares**2 * squares))
        noise = self.hub_noise()
        learned = 2 * Logistic.lipschitz**2 / (noise.ridge * joining.n_public)
        return (
            joining.average_bound(shares)
            + noise.ridge / 2 * square
            + learned
            + sum(noise.expected_bound())
        )

    def hub_noise(self) -> SiteNoise:
        """Return the noise that hides the hub's own records when it learns the weights."""
        way, strength = self.way, self.way.regularization
        learner = PrivateLogisticRegression(
            epsilon=float(way.epsilon or 0.0),
            delta=way.delta,
            mechanism="objective",
            regularization=PRIVATE_REGULARIZATION if strength == "auto" else float(strength),
            fit_intercept=False,
        )
        return site_noise(learner, self.joining.case.n_sites, self.joining.n_public)


def kappas(spread: Array, directions: int) -> Array:
    """Return the strengths κ that a ridge on weights can have, from no ridge at all upwards.

    The weights move the model along so many random directions, whose variances are `spread`.
    """
    top = float(spread.max(initial=0.0))
    if directions == 0 or top == 0:
        return np.full(1, math.inf)
    least = math.log(top) - 20

    def surplus(log_kappa: float) -> float:
        return float(np.sum(spread / (spread + math.exp(log_kappa)))) - directions

    if surplus(least) > 0:
        least = optimize.brentq(surplus, least, math.log(top) + 20)
    return np.exp(np.linspace(least, max(math.log(top) + 10, least + 1), 40))


def in_span(spread: Array, directions: int, kappa: float) -> tuple[Array, Array]:
    """Return, along each axis, the share of a squared error that is left, and directions spent.

    For normal directions whose variances are `spread`, and a ridge on the weights: the
    deterministic equivalents of a random ridge regression. Without a ridge they are exact for
    equal variances, otherwise in the limit of many dimensions (docs/planning-proofs.md, 3).
    """
    if math.isinf(kappa):
        return np.ones_like(spread), np.zeros_like(spread)
    share = spread / (spread + kappa)
    ridge = max(directions - float(share.sum()), 0.0) / max(
        directions - float(np.sum(share**2)), 1e-12
    )
    kept = (1 - share) * (1 - ridge * share)
    return kept, 2 * share - 1 + kept
