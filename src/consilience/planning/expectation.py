"""What to expect of one learner at one epsilon, alone or averaged over equal sites.

The noise is planned by the learner's own `plan_linear`, so advice and training cannot disagree
about it. What the noise does to the result is estimated in three ways:

- *asymptotic*: ridge + sampling + noise, ½ tr(H Cov(f)), with H from public data or an assumed
  isotropic one. This is the one to trust for sizing, as long as the noise moves margins by less
  than about one (`Expectation.asymptotic`). For an average with a weak ridge it can be too high
  (2.3 times in one measured case): each site's noise also lengthens its model, which undoes some
  of the ridge's shrinking.
- *simulated*: the learner's noise is drawn around the public model and the problem solved again,
  or, for many sites, the law of their average is used (joining.py). This needs public data, and
  holds at every noise level.
- *worst case*: a bound with explicit constants that no data can break. It is mostly far above what
  happens. It adds Λ/2 |f0|² for the ridge, the generalisation bound of Sridharan et al. (2008) as
  used by Hamm et al. (2016, theorem 4), and the noise term of `SiteNoise.bound`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from scipy import linalg

from consilience.planning.joining import Joining
from consilience.planning.noise import SiteNoise, site_noise
from consilience.planning.population import Array, Linear, Population
from consilience.planning.sites import Case, Site
from consilience.privacy.mechanisms import Source

# Pairs of simulated models at one site; fewer where several sites are averaged, which steadies
# the result.
PAIRS = 20
MOST_SIMULATED = 10  # sites; the average of more is predicted
LARGEST_N = 4**22  # where the search for a number of records ends: beyond 10^13


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What to expect at one epsilon.

    Losses are in nats above the same learner, without noise, on unlimited records.

    Attributes
    ----------
    margin_noise
        Standard deviation that one site's noise gives a record's margin.
    bound, noise_bound
        The worst case, and its noise term alone.
    simulated_loss
        The same excess loss by simulation. Only with public data, like all that follow.
    error, error_spread
        Expected error rate, and its standard deviation over draws.
    exact_error
        Cross-validated error rate of the learner without noise.
    """

    epsilon: float
    n_records: int
    n_sites: int
    ridge_loss: float
    sampling_loss: float
    noise_loss: float
    margin_noise: float
    noise_per_coordinate: float
    signal_per_coordinate: float
    bound: float
    noise_bound: float
    simulated_loss: float | None = None
    error: float | None = None
    error_spread: float | None = None
    exact_error: float | None = None

    @property
    def excess_loss(self) -> float:
        """The asymptotic estimate: ridge, sampling and noise together."""
        return self.ridge_loss + self.sampling_loss + self.noise_loss

    @property
    def asymptotic(self) -> bool:
        """Whether the noise is small enough for the asymptotic estimate.

        Beyond that only its order of magnitude is meant.
        """
        return self.margin_noise <= 1

    @property
    def expected_loss(self) -> float:
        """The best available estimate: simulated if there is public data, else asymptotic."""
        return self.excess_loss if self.simulated_loss is None else self.simulated_loss

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "excess_loss": self.excess_loss, "asymptotic": self.asymptotic}


@dataclass(frozen=True)
class Planner:
    """Turn the noise that `plan_linear` would draw into its effect on the result."""

    facts: Population
    learner: Linear
    failure: float
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def noise(self, n_records: int, **settings: float) -> SiteNoise:
        """Return the noise of training on so many records, as the learner itself plans it."""
        return site_noise(self.learner, len(self.facts.second_moment), n_records, **settings)

    def joining(self, case: Case) -> Joining:
        """Return what predicts the ways of joining the sites of a case."""
        return Joining(self.facts, self.learner, case, self.known)

    def expect(
        self, n_records: int, n_sites: int, source: Source | None = None, **settings: float
    ) -> Expectation:
        """Return what to expect; also by simulation if there are public records and a source."""
        facts, noise = self.facts, self.noise(n_records, **settings)
        ridge = noise.ridge_on(facts)
        exact, ridged = facts.model(facts.ridge, None), facts.model(ridge, None)
        hessian = facts.hessian(ridged)
        inverse = linalg.inv(hessian + ridge * np.eye(noise.dimension))
        gradients = facts.gradients(exact)
        sampled = inverse @ gradients @ inverse / n_records
        spread = noise.covariance(inverse)
        answer = Expectation(
            epsilon=settings.get("epsilon", self.learner.epsilon),
            n_records=n_records,
            n_sites=n_sites,
            ridge_loss=facts.loss(ridged) - facts.loss(exact),
            sampling_loss=float(np.sum(hessian * sampled)) / 2 / n_sites,
            noise_loss=float(np.sum(hessian * spread)) / 2 / n_sites,
            margin_noise=math.sqrt(float(np.sum(facts.second_moment * spread))),
            noise_per_coordinate=math.sqrt(float(np.trace(spread)) / noise.dimension / n_sites),
            signal_per_coordinate=float(np.linalg.norm(exact)) / math.sqrt(noise.dimension),
            bound=self.bound(noise, exact, n_sites),
            noise_bound=noise.bound(self.failure / 2),
        )
        if not facts.shows_errors or source is None:
            return answer
        if n_sites > MOST_SIMULATED:
            return self._predict_average(answer, exact, source)
        root = np.real(linalg.sqrtm(gradients)) / math.sqrt(n_records)
        draws = [
            np.mean(
                [noise.draw_models(facts, root, inverse, source) for _ in range(n_sites)], axis=0
            )
            for _ in range(max(5, PAIRS // n_sites))
        ]
        return self._measure_draws(answer, draws, hessian, exact)

    def _measure_draws(
        self, answer: Expectation, draws: list[Array], hessian: Array, exact: Array
    ) -> Expectation:
        """Complete what to expect by the losses and errors of simulated models.

        The effect of a draw to first order has a known mean and explains most of its whole effect,
        so it serves as a control variate: only the rest is subject to chance.
        """
        facts = self.facts
        known = np.array([shift @ hessian @ shift / 2 for _, _, shift in draws])
        surplus = known - (answer.sampling_loss + answer.noise_loss)

        def mean(values: Array) -> float:
            slope = float(np.cov(values, known)[0, 1] / known.var(ddof=1))
            return float(np.mean(values - slope * surplus))

        errors = np.array([[facts.error(f) for f in pair] for *pair, _ in draws])
        losses = np.array([[facts.loss(f) for f in pair] for *pair, _ in draws])
        loss, error = mean(losses.mean(axis=1)), mean(errors.mean(axis=1))
        return self._complete(answer, exact, loss, error, errors)

    def _complete(
        self, answer: Expectation, exact: Array, loss: float, error: float, drawn: Array
    ) -> Expectation:
        """Add the loss and error of noisy models, and the spread of errors that were `drawn`.

        Only the added error is measured on the records that made the model; its level comes from
        held-out ones.
        """
        held_out = self.facts.exact_error or 0.0
        return replace(
            answer,
            simulated_loss=loss - self.facts.loss(exact),
            error=min(1.0, max(0.0, held_out + error - self.facts.error(exact))),
            error_spread=float(drawn.std(ddof=1)),
            exact_error=held_out,
        )

    def _predict_average(self, answer: Expectation, exact: Array, source: Source) -> Expectation:
        """Complete what to expect of many sites by the law of their average.

        Simulating all of them would take minutes.
        """
        site = Site(answer.n_sites, answer.n_records, answer.epsilon)
        law = self.joining(Case((site,), None, site)).average(np.full(1, 1 / answer.n_sites))
        at, facts = self.facts.smooth(law.mean, law.covariance, None), self.facts
        assert at.error is not None
        root = np.real(linalg.sqrtm(law.covariance))
        drawn = [
            facts.error(law.mean + root @ source.normal(len(law.mean))) for _ in range(2 * PAIRS)
        ]
        return self._complete(answer, exact, at.loss, at.error, np.array(drawn))

    def bound(self, noise: SiteNoise, reference: Array, n_sites: int = 1) -> float:
        """Return the worst case over all data, but for the failure probability.

        By convexity an average is no worse, if the bound holds at all of its sites: Λ/2 |f0|² +
        16 (32 + ln(2/p)) L²/(Λ n) + 2 T, with T the noise term at probability p/2.
        """
        failure = self.failure / n_sites
        sampling = (
            16
            * (32 + math.log(2 / failure))
            * noise.loss.lipschitz**2
            / (noise.ridge * noise.n_records)
        )
        return (
            noise.ridge / 2 * float(reference @ reference) + sampling + 2 * noise.bound(failure / 2)
        )

    def required_n(self, target: float, n_sites: int, *, worst_case: bool) -> float:
        """Return the least n from which on the excess loss stays below `target`.

        On, that is, to more records than there are: of 10¹⁰ and more, the rounding of sums has to
        be hidden by noise, too. Infinity if no number up to `LARGEST_N` reaches it.
        """
        reference = self.facts.model(self.facts.ridge, None)

        def reached(n_records: int) -> bool:
            if not worst_case:
                return self.expect(n_records, n_sites).excess_loss <= target
            # The bound may choose its regularisation; the estimate is of the learner as it is.
            planned = (
                self.noise(n_records, regularization=float(ridge))
                for ridge in np.geomspace(1, 1e-7, 15)
            )
            return any(self.bound(noise, reference, n_sites) <= target for noise in planned)

        # Search from above: with very few records the ridge alone can hold a model at zero, and
        # its loss low.
        high = LARGEST_N
        while not reached(high):
            if high == 1:
                return math.inf
            high //= 4
        while high > 1 and reached(high // 4):
            high //= 4
        low = high // 4
        while high - low > max(1, high // 50):
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high
