"""What joining sites can be expected to bring: a prediction and a bound for each aggregator.

A *prediction* is the expected loss of a normally distributed model, whose mean and covariance
follow from those of one site's model by linear algebra. A *bound* is a theorem about the expected
loss that holds for all records. docs/planning-proofs.md derives both. Nothing here touches a
private record: only sizes, epsilons, settings and public records are used.

Every aggregator says how it is predicted (`Aggregator.expected`), by calling methods of `Joining`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
from scipy import linalg, optimize
from sklearn.base import clone

from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.labelled import UsesLabels
from consilience.aggregators.members import Member
from consilience.learners.perturbation import output_sensitivity
from consilience.planning.distilled import Distillation, DistillationForecast
from consilience.planning.feature import FeatureForecast
from consilience.planning.noise import SiteNoise, site_noise, site_task
from consilience.planning.population import Array, Law, Linear, Outlook, Population
from consilience.planning.sites import Case, require
from consilience.privacy.guarantee import Unit
from consilience.privacy.vector_noise import calibrate_shared, noise_variance
from consilience.tables.public import Public

MOST_STEPS, SETTLED = 60, 1e-4  # of the iteration that finds a law, and when it has converged
# The ridges that PublicBlend mixes: around zero, and around the average in units of its known
# errors.
BLEND_STRENGTHS = tuple(10.0 ** (half / 2) for half in range(1, -11, -1))
ERROR_STRENGTHS = tuple(10.0**power for power in range(2, -5, -1))
T = TypeVar("T")
ALONE, PUBLIC = "one site alone", "public records alone"
PREDICTABLE = "an aggregator whose result can be predicted for this learner with these records"


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What one way of joining can be expected to reach.

    Losses are in nats above the same reference as those of `Expectation`.

    Attributes
    ----------
    unit
        What the epsilon of this way hides: a record, a person, a whole site, or nothing.
    trusted
        Whether the hub sees exact models.
    excess_loss, error, auc
        Predictions, the latter two only with public data. The excess can be negative, as some ways
        choose a better regularisation than the sites'.
    bias_loss, sampling_loss, noise_loss
        Parts of the excess, by second-order expansion: what remains with unlimited records and
        without noise; what is due to finitely many records at sites and hub; what noise adds.
    bound
        A theorem: no records can make the *expected* excess larger. For public blend and feature
        method it holds for the best of the strengths among which they choose by cross-validation;
        for ways that hide sites it is about the labels that members give, not the true ones.
    """

    name: str
    unit: str
    trusted: bool
    n_sites: int
    n_public: int | None
    excess_loss: float
    bias_loss: float
    sampling_loss: float
    noise_loss: float
    margin_noise: float
    bound: float
    error: float | None = None
    auc: float | None = None

    @property
    def rough(self) -> bool:
        """Whether only the order of magnitude is meant.

        That is so without public data if noise moves margins by more than 1.
        """
        return self.error is None and self.margin_noise > 1

    @property
    def is_baseline(self) -> bool:
        """Whether this is what a site can have without joining."""
        return self.name in BASELINES

    @property
    def keeps_record_privacy(self) -> bool:
        """Whether it keeps the epsilon of a record or person without a trusted hub."""
        return self.unit != Unit.SITE and not self.trusted

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "rough": self.rough}


class Way(Protocol):
    """What `Joining` asks of an aggregator or a baseline."""

    needs_public: ClassVar[bool]

    @property
    def needs_exact_members(self) -> bool:
        """Whether the hub sees exact models."""

    @property
    def hidden_unit(self) -> Unit | None:
        """What its own noise hides; None is the unit of the sites' learners."""

    def expected(self, joining: Any) -> Outlook | None:
        """Return law and bound of the result; None if it cannot be predicted."""


class Baseline:
    """What a site can have without joining."""

    needs_public: ClassVar[bool] = False
    needs_exact_members = False
    hidden_unit: Unit | None = None
    n_sites: ClassVar[int] = 1
    hides_nothing: ClassVar[bool] = False

    def is_predictable(self, learner: Linear, *, public: bool) -> bool:
        """Tell that one site's own model can always be predicted."""
        return True

    def expected(self, joining: Joining) -> Outlook | None:
        """Return law and bound of one site's own model."""
        alone = replace(joining, case=replace(joining.case, sites=(joining.case.asking,)))
        return alone.average(np.ones(1)), alone.average_bound(np.ones(1))


class OwnModel(Baseline):
    """What one site has if it trains without noise and keeps the model to itself."""

    def expected(self, joining: Joining) -> Outlook | None:
        """Return law and bound of one site's exact model."""
        alone = replace(joining, case=replace(joining.case, sites=(joining.case.asking,)))
        one = np.ones(1)
        return alone.average(one, exact=True), alone.average_bound(one, exact=True)


class PublicBaseline(Baseline):
    """What the public records give by themselves."""

    needs_public = True
    n_sites = 0
    hides_nothing = True

    def is_predictable(self, learner: Linear, *, public: bool) -> bool:
        """Tell whether a blend with no members could be predicted, which is what this is."""
        return PublicBlend().is_predictable(learner, public=public)

    def expected(self, joining: Joining) -> Outlook | None:
        """Return law and bound of the best ridge around zero."""
        return joining.blend(None)


BASELINES: dict[str, Baseline] = {ALONE: Baseline(), PUBLIC: PublicBaseline()}


@dataclass(frozen=True)
class Joining:
    """Predict and bound what each way of joining makes of the sites' models.

    The formulas are derived in docs/planning-proofs.md.
    """

    facts: Population
    learner: Linear
    case: Case
    known: dict[Any, Any]  # results computed before, for other cases too

    @property
    def dimension(self) -> int:
        """Number of coefficients, the constant included."""
        return len(self.facts.second_moment)

    @property
    def n_public(self) -> int:
        """Number of public records, where there are any."""
        return int(self.case.n_public or 0)

    def noise(self, n_records: int, epsilon: float) -> SiteNoise:
        """Return the noise that a site would draw."""
        return self._once(
            ("noise", n_records, epsilon),
            lambda: site_noise(self.learner, self.dimension, n_records, epsilon=epsilon),
        )

    def _once(self, key: tuple[object, ...], compute: Callable[[], T]) -> T:
        """Return what is computed once, for all cases."""
        if key not in self.known:
            self.known[key] = compute()
        return cast(T, self.known[key])

    def expect(self, name: str, way: Way) -> Joined:
        """Return the prediction and the bound of one way of joining."""
        outlook = way.expected(self)
        require("aggregator", f"{name}={way!r}", outlook is not None, PREDICTABLE)
        assert outlook is not None
        (law, bound), facts = outlook, self.facts
        exact = facts.model(self.facts.ridge, None)
        at, base = facts.smooth(law.mean, law.covariance, None), facts.loss(exact)
        error = None
        if at.error is not None:
            level = facts.exact_error or 0.0
            level = level + at.error - facts.error(exact) + law.flattered_error
            error = min(1.0, max(0.0, level))
        auc, shown = facts.ranked(law.mean, law.covariance), facts.ranked(exact, None)
        if auc is not None and shown is not None and facts.exact_auc is not None:
            auc = min(1.0, max(0.0, facts.exact_auc + auc - shown + law.flattered_auc))
        baseline = way if isinstance(way, Baseline) else None
        unit = "none" if baseline and baseline.hides_nothing else way.hidden_unit
        return Joined(
            name=name,
            unit=str(unit or self.learner.unit),
            trusted=way.needs_exact_members,
            n_sites=baseline.n_sites if baseline else self.case.n_sites,
            n_public=self.case.n_public if way.needs_public else None,
            excess_loss=at.loss - base + law.flattered,
            bias_loss=facts.loss(law.mean) - base + law.flattered,
            sampling_loss=float(np.sum(at.hessian * law.sampling)) / 2,
            noise_loss=float(np.sum(at.hessian * law.noise)) / 2,
            margin_noise=math.sqrt(max(0.0, float(np.sum(facts.second_moment * law.noise)))),
            bound=bound,
            error=error,
            auc=auc,
        )

    # ------------------------------------------------------------------ laws of models

    def solve_law(
        self,
        ridge: float | Array,
        covariances: Callable[[Array], tuple[Array, Array]],
        *,
        start: Array,
        centre: float | Array = 0.0,
        soft: Array | None = None,
        inside: bool = True,
    ) -> Law:
        """Return the law of argmin loss(f) + ridge/2 |f - centre|² with a disturbed gradient.

        The ridge may be a matrix. `covariances` maps an inverse Hessian to the covariances of the
        result. Mean and covariance are iterated until they agree, because the Hessian is a mean
        over the law itself: where noise saturates the loss, the loss resists noise less. Noise
        that is added to the minimum afterwards is not `inside`.
        """
        nothing = np.zeros((self.dimension, self.dimension))
        law = Law(start, nothing, nothing)
        matrix = ridge * np.eye(self.dimension) if np.ndim(ridge) == 0 else np.asarray(ridge)
        for _ in range(MOST_STEPS):
            at = self.facts.smooth(law.mean, law.covariance if inside else law.sampling, soft)
            inverse = linalg.inv(at.hessian + matrix)
            mean = law.mean - inverse @ (
                at.gradient + matrix @ (law.mean - centre * np.ones(self.dimension))
            )
            new = Law(mean, *covariances(inverse))
            moved = np.trace(np.abs(new.covariance - law.covariance)) + float(
                np.sum(np.square(mean - law.mean))
            )
            law = new
            if moved < SETTLED * (np.trace(law.covariance) + float(law.mean @ law.mean)):
                break
        return law

    def member(self, n_records: int, epsilon: float) -> Law:
        """Return the law of one site's model."""

        def compute() -> Law:
            noise = self.noise(n_records, epsilon)
            ridge = noise.ridge_on(self.facts)
            start = self.facts.model(ridge, None)
            gradients = self.facts.gradients(start) / n_records
            return self.solve_law(
                ridge,
                lambda inverse: (inverse @ gradients @ inverse, noise.covariance(inverse)),
                start=start,
                inside=noise.in_objective,
            )

        return self._once(("law", n_records, epsilon), compute)

    def average(self, shares: Array, *, exact: bool = False) -> Law:
        """Return the law of Σ share·model; `shares` are those of one site of each kind."""
        laws = [
            self.member(site.n_records, math.inf if exact else site.epsilon)
            for site in self.case.sites
        ]
        counts = np.array([site.count for site in self.case.sites])

        def weighted(weights: Array, parts: Iterable[Array]) -> Array:
            return np.asarray(
                sum(weight * part for weight, part in zip(weights, parts, strict=True))
            )

        return Law(
            weighted(counts * shares, (law.mean for law in laws)),
            weighted(counts * shares**2, (law.sampling for law in laws)),
            weighted(counts * shares**2, (law.noise for law in laws)),
        )

    def shares(self, way: Average | UsesLabels) -> Array:
        """Return the weight of one site of each kind, as the aggregator itself decides it."""
        members = [self._member_facts(site.n_records, site.epsilon) for site in self.case.sites]
        public = None
        if self.case.n_public is not None:
            public = Public(
                self.facts.rows[:, : np.asarray(members[0].coef).shape[1]] / members[0].to_user
            )
        weights = way.weigh(members, public)
        return np.asarray(weights / np.sum([s.count for s in self.case.sites] * weights))

    def _member_facts(self, n_records: int, epsilon: float) -> Member:
        """Return the public facts of a site's model, which weights may depend on."""
        learner = clone(self.learner).set_budget(epsilon)
        events = tuple(self.noise(n_records, epsilon).plan.events)
        n_features = self.dimension - bool(learner.fit_intercept)
        coef, intercept = np.zeros((1, n_features)), np.zeros(1)
        return Member(learner, np.arange(2), None, events, n_records, coef, intercept)

    def at_trusted_hub(self, way: Average) -> Outlook:
        """Return law and bound of an average with noise added once (docs/guarantees/average.md)."""
        shares, reaches = self.shares(way), []
        learner = clone(self.learner).set_params(epsilon=math.inf)
        if learner.regularization == "auto":  # as in a study: what noise must hide, a ridge bounds
            learner.set_params(**learner.trusted_settings)
        for site, share in zip(self.case.sites, shares, strict=True):
            task = site_task(learner, self.dimension, site.n_records)
            reaches.append(float(share) * output_sensitivity(learner, task))
        asked = np.atleast_1d(np.asarray(way.epsilon, float))
        fits, given = len(asked) in (1, self.case.n_sites), f"epsilon={way.epsilon!r}"
        require("aggregator", given, fits, "an average with one epsilon, or one for each site")
        least = asked if len(reaches) == len(asked) else np.full(len(reaches), asked.min())
        event = calibrate_shared(
            reaches, least, delta=way.delta, unit=learner.unit, neighbours=learner.neighbours
        )
        variance = noise_variance(event, self.dimension)
        law = self.average(shares, exact=True)
        noise = variance * np.eye(self.dimension)
        drawn = self.learner.loss(2).curvature / 2 * variance * self.dimension
        return law._replace(noise=noise), self.average_bound(shares, exact=True) + drawn

    def scaled(self, law: Law) -> Law:
        """Return the law times the number that fits best, as labelled public records choose it."""

        def loss(log_k: float) -> float:
            k = math.exp(log_k)
            return self.facts.smooth(k * law.mean, k * k * law.covariance, None).loss

        k = math.exp(
            optimize.minimize_scalar(
                loss, bounds=(-9.0, 4.0), method="bounded", options={"xatol": 0.02}
            ).x
        )
        centre = law.times(k)
        at = self.facts.smooth(centre.mean, centre.covariance, None)
        along = centre.mean
        steep = float(along @ at.hessian @ along)
        # One number was learned, so k has the variance of a model with one coefficient.
        variance = (
            float(along @ self.facts.gradients(along) @ along) / steep**2 / self.n_public
            if steep > 0
            else 0.0
        )
        return centre._replace(
            sampling=centre.sampling + min(variance, 1.0) * np.outer(along, along)
        )

    def blend(self, shares: Array | None) -> Outlook:
        """Return law and bound of the best ridge around the scaled average.

        Without shares the ridge is around zero: public records alone.
        """
        one = np.eye(self.dimension)
        zero = Law(np.zeros(self.dimension), 0 * one, 0 * one)
        laws = [
            self._once(("public", t, self.n_public), partial(self._ridged, t * one, zero, t))
            for t in BLEND_STRENGTHS
        ]
        loss, reference = self.learner.loss(2), self.reference_length
        bound = 2 * loss.lipschitz * reference / math.sqrt(self.n_public)
        if shares is not None:
            centre = self.scaled(self.average(shares))
            hessian = self.facts.smooth(centre.mean, centre.covariance, None).hessian
            # Distance is measured in the average's own errors, as the blend does; Bayes' rule
            # would take the strength 1.
            errors = (
                linalg.inv(centre.covariance + 1e-12 * np.trace(centre.covariance) * one)
                / self.n_public
            )
            free = np.array(
                [np.trace(linalg.solve(hessian + t * one, hessian)) for t in BLEND_STRENGTHS]
            )
            for strength in ERROR_STRENGTHS:
                ridge = strength * errors
                like = int(
                    np.argmin(np.abs(free - np.trace(linalg.solve(hessian + ridge, hessian))))
                )
                laws.append(self._ridged(ridge, centre, BLEND_STRENGTHS[like]))
            laws.append(centre)
            bound = min(bound, self.average_bound(shares))
        best = min(
            laws,
            key=lambda law: self.facts.smooth(law.mean, law.covariance, None).loss + law.flattered,
        )
        return best, bound

    def _ridged(self, ridge: Array, centre: Law, like: float) -> Law:
        """Return the law of a model of the public records with a ridge around a centre.

        `like` is the ridge around zero that leaves as many degrees of freedom.
        """
        out, usual = self.facts.held_out(like), self.facts.held_out(self.facts.ridge)
        gradients = out.gradients / self.n_public

        def covariances(inverse: Array) -> tuple[Array, Array]:
            pull = inverse @ ridge
            return (
                inverse @ gradients @ inverse + pull @ centre.sampling @ pull.T,
                pull @ centre.noise @ pull.T,
            )

        law = self.solve_law(
            ridge, covariances, start=self.facts.model(like, None), centre=centre.mean
        )
        return law._replace(
            flattered=max(0.0, out.loss - usual.loss),
            flattered_error=max(0.0, out.error - usual.error),
            flattered_auc=min(0.0, out.auc - usual.auc),
        )

    def feature(self, way: FeatureMethod) -> Outlook:
        """Return law and bound of weights learned on the public records, one for each member."""
        return FeatureForecast(self, way).expect()

    def distilled(self, way: Distillation) -> Outlook:
        """Return law and bound of a model learned from exact members' votes, hiding a site."""
        return DistillationForecast(self, way).expect()

    # ------------------------------------------------------------------ bounds

    @property
    def reference_length(self) -> float:
        """Length of the model that losses are compared with."""
        return float(np.linalg.norm(self.facts.model(self.facts.ridge, None)))

    def average_bound(self, shares: Array, *, exact: bool = False) -> float:
        """Return a bound on the expected excess loss of an average (docs/planning-proofs.md, 2)."""
        total = 0.0
        for site, share in zip(self.case.sites, shares, strict=True):
            noise = self.noise(site.n_records, math.inf if exact else site.epsilon)
            stays, divided = noise.expected_bound()
            sampled = 2 * noise.loss.lipschitz**2 / (noise.ridge * site.n_records)
            alone = noise.ridge / 2 * self.reference_length**2 + sampled + stays
            total += site.count * (share * alone + share**2 * divided)
        return float(total)
