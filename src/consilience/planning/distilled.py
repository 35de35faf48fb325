"""What distillation can be expected to bring: a model learned from exact members' votes.

The derivations are in docs/planning-proofs.md, section 5.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from consilience.aggregators.distillation.distill import SoftLabelDistillation, VoteDistillation
from consilience.aggregators.distillation.noise import STRENGTHS, Rows, StatisticPlan
from consilience.learners.erm import Logistic
from consilience.planning.population import NODES, WEIGHTS, Array, Law, Outlook, margin_spread
from consilience.privacy.vector_noise import noise_variance

if TYPE_CHECKING:
    from consilience.planning.joining import Joining

Distillation = VoteDistillation | SoftLabelDistillation


@dataclass(frozen=True)
class DistillationForecast:
    """Predict and bound what one distillation makes of the sites' exact models."""

    joining: Joining
    way: Distillation

    def expect(self) -> Outlook:
        """Return the law of the distilled model and a bound on its expected excess loss."""
        self.way.check_settings()
        facts, strength = self.joining.facts, self.way.regularization
        member, soft, scatter = self._votes()
        outlooks = [
            self._distil(ridge, member, soft, scatter)
            for ridge in (STRENGTHS if strength == "auto" else (float(strength),))
        ]

        def cost(outlook: Outlook) -> float:
            # With labels the strength is chosen by counting errors, as distillation itself does.
            at = facts.smooth(outlook[0].mean, outlook[0].covariance, None)
            return at.loss if at.error is None else at.error

        return min(outlooks, key=cost)

    def _votes(self) -> tuple[Law, Array | None, Array]:
        """Return the mean member, the shares of votes, and the scatter of gradients due to voters.

        Without public records the votes are taken to be those of the best model, and there are no
        shares.
        """
        joining, facts, n = self.joining, self.joining.facts, self.joining.case.n_sites
        sites = joining.case.sites
        member = joining.average(np.array([1 / n] * len(sites)), exact=True)
        kinds = [joining.member(site.n_records, math.inf) for site in sites]
        spread = np.asarray(
            sum(s.count * k.covariance for s, k in zip(sites, kinds, strict=True)) / n
        )
        if not facts.shows_errors:
            return (
                member,
                None,
                facts.hessian(member.mean) @ spread @ facts.hessian(member.mean) / n,
            )
        z, width = facts.rows @ member.mean, np.maximum(margin_spread(facts.rows, spread), 1e-9)
        if self.way.soft == "probabilities":
            at = z[:, None] + width[:, None] * NODES
            soft = special.expit(at) @ WEIGHTS
            slope = Logistic().bend(at, np.ones_like(at)) @ WEIGHTS
        else:
            soft = special.ndtr(z / width)
            slope = np.exp(-((z / width) ** 2) / 2) / math.sqrt(2 * math.pi) / width
        if self.way.majority:
            # The majority of n independent voters, by the normal law of their number.
            sure = (
                (2 * soft - 1) * math.sqrt(n) / (2 * np.sqrt(np.maximum(soft * (1 - soft), 1e-12)))
            )
            return member, special.ndtr(sure), np.zeros_like(spread)
        pull = (facts.rows.T * slope) @ facts.rows
        return member, soft, pull @ spread @ pull / len(facts.rows) ** 2 / n

    def _distil(self, ridge: float, start: Law, soft: Array | None, scatter: Array) -> Outlook:
        """Return law and bound at one ridge."""
        joining, facts, loss = self.joining, self.joining.facts, Logistic()
        asked = copy.copy(self.way)
        asked.regularization = ridge
        plan = asked.plan(Rows(facts.rows, 2, joining.case.n_sites))
        if inside := isinstance(plan, StatisticPlan):
            # Noise is drawn for the contrast of both classes, of which the second has 1/√2.
            variance = plan.variance / 2
        else:
            variance = noise_variance(plan.noise, joining.dimension)
        drawn = variance * (facts.second_moment if inside else np.eye(joining.dimension))
        exact = joining.solve_law(
            ridge, lambda inverse: (0 * inverse, 0 * inverse), start=start.mean, soft=soft
        )
        if soft is None:
            gradients = facts.gradients(exact.mean)
        else:
            gap = special.expit(facts.rows @ exact.mean) - soft
            gradients = np.atleast_2d(np.cov(gap[:, None] * facts.rows, rowvar=False, bias=True))
        scatter = scatter + gradients / joining.n_public

        def covariances(inverse: Array) -> tuple[Array, Array]:
            return inverse @ scatter @ inverse, inverse @ drawn @ inverse if inside else drawn

        law = joining.solve_law(ridge, covariances, start=exact.mean, soft=soft, inside=inside)
        square = float(np.trace(drawn))
        noise = square / (2 * ridge) if inside else loss.curvature / 2 * square
        length = float(exact.mean @ exact.mean)
        sampled = 2 * loss.lipschitz**2 / (ridge * joining.n_public)
        return law, ridge / 2 * length + sampled + noise
