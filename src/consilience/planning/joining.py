"""What joining sites can be expected to bring, by every aggregator: a prediction and a bound for each.

A *prediction* is the expected loss of a normal model whose mean and covariance follow from those of
one site's model by linear algebra; a *bound* is a theorem about the expected loss that holds for
all records. docs/planning.md derives both. Nothing here touches a private record: sizes, epsilons,
settings and public records are all that is used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import linalg, optimize, special
from sklearn.base import clone

from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend, prior_shares
from consilience.aggregators.distillation.distill import SoftLabelDistillation, VoteDistillation
from consilience.aggregators.distillation.noise import STRENGTHS, Rows
from consilience.aggregators.feature import PRIVATE_REGULARIZATION, FeatureMethod
from consilience.aggregators.members import Member
from consilience.errors import SettingsError
from consilience.learners.erm import Logistic
from consilience.learners.linear import PrivateLogisticRegression
from consilience.learners.perturbation import output_sensitivity
from consilience.planning.population import (
    NODES,
    WEIGHTS,
    Array,
    Linear,
    Population,
    SiteNoise,
    margin_spread,
    site_noise,
    site_task,
)
from consilience.privacy.vector_noise import calibrate_shared, noise_variance
from consilience.tables.public import Public

MOST_STEPS, SETTLED = 60, 1e-4  # of a law: when it is found
# The ridges that PublicBlend mixes: around zero, and around the average in units of its known
# errors.
BLEND_STRENGTHS = tuple(10.0 ** (half / 2) for half in range(1, -11, -1))
ERROR_STRENGTHS = tuple(10.0**power for power in range(2, -5, -1))
ALONE, PUBLIC = "one site alone", "public records alone"


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What one way of joining can be expected to reach. Losses are in nats above the same reference as `Expectation`.

    ``unit`` is what the epsilon of this way hides: a record, a whole site, or nothing. ``trusted``
    tells whether the hub sees exact models. ``excess_loss`` and ``error`` (with public data only)
    are predictions; the excess can be negative, as some ways choose a better ridge than the sites'.
    Its parts, by second-order expansion: ``bias_loss`` remains with unlimited records and no noise;
    ``sampling_loss`` is of finitely many records, at sites and hub; ``noise_loss`` of the noise.
    ``bound`` is a theorem: no records can make the *expected* excess larger. It holds for the best
    of the strengths among which public blend and feature method choose by cross-validation, and for
    site-level units it is about the labels that members give, not the true ones.
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

    @property
    def rough(self) -> bool:
        """Whether only the order of magnitude is meant: no public data, and noise that moves margins by more than 1."""
        return self.error is None and self.margin_noise > 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "rough": self.rough}


@dataclass(frozen=True)
class Site:
    """So many sites that are alike."""

    count: int
    n_records: int
    epsilon: float


@dataclass(frozen=True)
class Case:
    """Who would join, and how many public records the hub has."""

    sites: tuple[Site, ...]
    n_public: int | None
    asking: Site

    @property
    def n_sites(self) -> int:
        """Number of sites of all kinds."""
        return sum(site.count for site in self.sites)

    def changed(self, what: str, value: float, base: float) -> Case:
        """Return the case with one quantity changed; epsilons in proportion, `value` being that of `base`."""
        if what == "n_public":
            return replace(self, n_public=int(value))
        if what == "epsilon":
            asking, *sites = (
                replace(s, epsilon=s.epsilon * value / base) for s in (self.asking, *self.sites)
            )
            return replace(self, sites=tuple(sites), asking=asking)
        (site,) = self.sites
        return replace(
            self, sites=(replace(site, **{"count" if what == "n_sites" else what: int(value)}),)
        )


def site_list(
    n_records: int, epsilon: float, n_sites: int, sizes: Any, epsilons: Any
) -> tuple[Site, ...]:
    """Return the kinds of sites that `plan` was asked about: one kind, or each site its own."""
    if sizes is None and epsilons is None:
        return (Site(n_sites, n_records, epsilon),)
    count = len(sizes if sizes is not None else epsilons)
    sizes = [n_records] * count if sizes is None else list(sizes)
    epsilons = [epsilon] * count if epsilons is None else list(epsilons)
    require(
        "n_sites", n_sites, n_sites in (1, count), f"left out where sites are listed, or {count}"
    )
    fits = all(isinstance(n, int | np.integer) and n > 0 for n in sizes)
    require("sizes", sizes, fits and count > 0, "a list of whole numbers > 0")
    fits = len(epsilons) == len(sizes) and all(math.isfinite(e) and e > 0 for e in epsilons)
    require("epsilons", epsilons, fits, "as many finite numbers > 0 as there are sizes")
    return tuple(Site(1, int(n), float(e)) for n, e in zip(sizes, epsilons, strict=True))


def known_ways(
    given: Any, learner: Linear, sites: Sequence[Site], n_public: int | None
) -> dict[str, Any]:
    """Return the baselines and the aggregators to predict, by name; by default all that fit learner and records."""
    logistic, epsilon = (
        isinstance(learner, PrivateLogisticRegression),
        min(site.epsilon for site in sites),
    )
    hidden: dict[str, Any] = {"epsilon": epsilon, "delta": learner.delta}
    budgets = [site.epsilon for site in sites] if len(sites) > 1 else epsilon
    ways: dict[str, Any] = {"average": Average("equal")}
    if len(sites) > 1:
        ways |= {"average by size": Average("size"), "average by precision": Average()}
    ways["average, trusted hub"] = Average("size", epsilon=budgets, delta=learner.delta)
    if logistic and n_public is not None:
        ways |= {
            "feature method": FeatureMethod(),
            "feature, private records": FeatureMethod(**hidden),
        }
        ways["public blend"] = PublicBlend()
        paper: dict[str, Any] = {"calibration": "hamm2016", "epsilon": epsilon}
        ways["vote, 2016 noise"] = VoteDistillation(**paper)
        ways["soft labels, 2016 noise"] = SoftLabelDistillation(mechanism="output", **paper)
        ways["soft labels, statistic"] = SoftLabelDistillation(regularization="auto", **hidden)
    if given is not None:
        listed = given if isinstance(given, list | tuple) else [given]
        ways = (
            dict(given)
            if isinstance(given, Mapping)
            else {type(one).__name__: one for one in listed}
        )
        distinct = isinstance(given, Mapping) or len(ways) == len(listed)
        require("aggregator", given, distinct, "a dictionary by name where two are of one kind")
        for name, one in ways.items():
            known = isinstance(one, Average) or (
                isinstance(
                    one, FeatureMethod | PublicBlend | VoteDistillation | SoftLabelDistillation
                )
                and logistic
                and n_public is not None
                and not getattr(one, "protect_public", False)
                and getattr(one, "max_members", None) is None
                and not (
                    isinstance(one, FeatureMethod)
                    and one.epsilon is not None
                    and one.mechanism == "output"
                )
            )
            must = "one whose result can be predicted: Average; with n_public, and PrivateLogisticRegression at the "
            must += (
                "sites, also FeatureMethod, PublicBlend, VoteDistillation or SoftLabelDistillation"
            )
            require("aggregator", f"{name}={one!r}", known, must)
    return {ALONE: ALONE, **({PUBLIC: PUBLIC} if logistic and n_public is not None else {}), **ways}


class Law(NamedTuple):
    """Mean and covariance of a model over draws of records and of noise."""

    mean: Array
    sampling: Array
    noise: Array
    flattered: float = (
        0.0  # loss that the public table does not show, because the model was fitted to it
    )
    flattered_error: float = 0.0

    @property
    def covariance(self) -> Array:
        """Of records and noise together."""
        return np.asarray(self.sampling + self.noise)

    def times(self, k: float) -> Law:
        """Return the law of k times the model."""
        return Law(k * self.mean, k * k * self.sampling, k * k * self.noise)


@dataclass(frozen=True)
class Joining:
    """Predict and bound what each way of joining makes of the sites' models. Formulas: docs/planning.md."""

    facts: Population
    learner: Linear
    case: Case
    known: dict[Any, Any]  # what was worked out before, also for other cases

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
        key = ("noise", n_records, epsilon)
        if key not in self.known:
            self.known[key] = site_noise(self.learner, self.dimension, n_records, epsilon=epsilon)
        found: SiteNoise = self.known[key]
        return found

    def expect(self, name: str, way: Any) -> Joined:
        """Return the prediction and the bound of one way of joining."""
        facts, trusted, unit = self.facts, False, str(self.learner.unit)
        if isinstance(way, VoteDistillation | SoftLabelDistillation):
            (law, bound), trusted, unit = self.distilled(way), True, "site"
        elif isinstance(way, FeatureMethod):
            law, bound = self.feature(way)
        elif isinstance(way, Average) and way.epsilon is not None:
            (law, bound), trusted = self.at_trusted_hub(way), True
        elif isinstance(way, Average):
            shares = self.shares(way)
            law, bound = self.average(shares), self.average_bound(shares)
        elif way == ALONE:
            first = replace(self, case=replace(self.case, sites=(self.case.asking,)))
            law, bound = first.average(np.ones(1)), first.average_bound(np.ones(1))
        else:
            law, bound = self.blend(None if way == PUBLIC else self.shares(way))
            unit = "none" if way == PUBLIC else unit
        exact = facts.model(self.learner.regularization, None)
        at, base = facts.smooth(law.mean, law.covariance, None), facts.loss(exact)
        error = None
        if facts.error is not None and at.error is not None:
            found = (facts.exact_error or 0.0) + at.error - facts.error(exact) + law.flattered_error
            error = min(1.0, max(0.0, found))
        return Joined(
            name=name,
            unit=unit,
            trusted=trusted,
            n_sites=1 if way == ALONE else 0 if way == PUBLIC else self.case.n_sites,
            n_public=None if isinstance(way, Average) or way == ALONE else self.case.n_public,
            excess_loss=at.loss - base + law.flattered,
            bias_loss=facts.loss(law.mean) - base + law.flattered,
            sampling_loss=float(np.sum(at.hessian * law.sampling)) / 2,
            noise_loss=float(np.sum(at.hessian * law.noise)) / 2,
            margin_noise=math.sqrt(max(0.0, float(np.sum(facts.second_moment * law.noise)))),
            bound=bound,
            error=error,
        )

    # ----------------------------------------------------------------------------------------- laws of models

    def settled(
        self,
        ridge: float | Array,
        covariances: Callable[[Array], tuple[Array, Array]],
        *,
        start: Array,
        centre: float | Array = 0.0,
        soft: Array | None = None,
        inside: bool = True,
    ) -> Law:
        """Return the law of argmin loss(f) + ridge/2 |f - centre|² whose gradient is disturbed.

        A ridge may be a matrix. `covariances` gives those of the result, for an inverse Hessian;
        both are repeated until they fit: the Hessian is the mean over the law, so that noise which
        saturates the loss finds less resistance. Noise that is added afterwards is not `inside`.
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
        key = ("law", n_records, epsilon)
        if key not in self.known:
            noise = self.noise(n_records, epsilon)
            start = self.facts.model(noise.ridge, None)
            gradients = self.facts.gradients(start) / n_records
            self.known[key] = self.settled(
                noise.ridge,
                lambda inverse: (inverse @ gradients @ inverse, noise.covariance(inverse)),
                start=start,
                inside=noise.in_objective,
            )
        found: Law = self.known[key]
        return found

    def average(self, shares: Array, *, exact: bool = False) -> Law:
        """Return the law of Σ share·model, `shares` being those of one site of each kind."""
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

    def shares(self, way: Any) -> Array:
        """Return the weight of one site of each kind, as the aggregator itself decides it from public facts."""
        members = []
        for site in self.case.sites:
            learner = clone(self.learner).set_params(epsilon=site.epsilon)
            events = tuple(self.noise(site.n_records, site.epsilon).plan.events)
            d = self.dimension - bool(learner.fit_intercept)
            members.append(
                Member(
                    learner,
                    np.arange(2),
                    None,
                    events,
                    site.n_records,
                    np.zeros((1, d)),
                    np.zeros(1),
                )
            )
        public = None
        if self.case.n_public is not None:
            public = Public(
                self.facts.rows[:, : np.asarray(members[0].coef).shape[1]] / members[0].to_user
            )
        found = (
            way._weights(members, public)
            if isinstance(way, Average)
            else prior_shares(members, public)
        )
        return np.asarray(found / np.sum([s.count for s in self.case.sites] * found))

    def at_trusted_hub(self, way: Average) -> tuple[Law, float]:
        """Return law and bound of an average to which noise is added once (docs/guarantees/average.md)."""
        shares, reaches = self.shares(way), []
        learner = clone(self.learner).set_params(epsilon=math.inf)
        for site, share in zip(self.case.sites, shares, strict=True):
            task = site_task(learner, self.dimension, site.n_records)
            reaches.append(float(share) * output_sensitivity(learner, task))
        asked = np.atleast_1d(np.asarray(way.epsilon, float))
        fits = len(asked) in (1, self.case.n_sites)
        require(
            "aggregator",
            f"epsilon={way.epsilon!r}",
            fits,
            "an average with one epsilon, or one for each site",
        )
        least = asked if len(reaches) == len(asked) else np.full(len(reaches), asked.min())
        who = {"unit": learner.unit, "neighbours": learner.neighbours}
        noise_once = calibrate_shared(reaches, least, delta=way.delta, **who)
        variance = noise_variance(noise_once, self.dimension)
        law = self.average(shares, exact=True)
        noise = variance * np.eye(self.dimension)
        drawn = self.learner._loss(2).curvature / 2 * variance * self.dimension
        return law._replace(noise=noise), self.average_bound(shares, exact=True) + drawn

    def scaled(self, law: Law) -> Law:
        """Return the law multiplied by the number that fits best, as labelled public records would choose it."""

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
        # One number was learned: k has the variance of a model with one coefficient.
        variance = (
            float(along @ self.facts.gradients(along) @ along) / steep**2 / self.n_public
            if steep > 0
            else 0.0
        )
        return centre._replace(
            sampling=centre.sampling + min(variance, 1.0) * np.outer(along, along)
        )

    def blend(self, shares: Array | None) -> tuple[Law, float]:
        """Return law and bound of the best ridge around the scaled average, or around zero: public records alone."""
        one = np.eye(self.dimension)
        laws = []
        for t in BLEND_STRENGTHS:
            key = ("public", t, self.n_public)
            if key not in self.known:
                self.known[key] = self._ridged(
                    t * one, Law(np.zeros(self.dimension), 0 * one, 0 * one), t
                )
            laws.append(self.known[key])
        loss, reference = self.learner._loss(2), self.reference_length
        bound = 2 * loss.lipschitz * reference / math.sqrt(self.n_public)
        if shares is not None:
            centre = self.scaled(self.average(shares))
            hessian = self.facts.smooth(centre.mean, centre.covariance, None).hessian
            # Measured in the average's own errors, as the blend does: 1 is what Bayes' rule would
            # take.
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
        """Return the law of the public records' model with a ridge around a centre, as free as a ridge `like`."""
        out, usual = self.facts.held_out(like), self.facts.held_out(self.learner.regularization)
        gradients = out.gradients / self.n_public

        def covariances(inverse: Array) -> tuple[Array, Array]:
            pull = inverse @ ridge
            return (
                inverse @ gradients @ inverse + pull @ centre.sampling @ pull.T,
                pull @ centre.noise @ pull.T,
            )

        law = self.settled(
            ridge, covariances, start=self.facts.model(like, None), centre=centre.mean
        )
        return law._replace(
            flattered=max(0.0, out.loss - usual.loss),
            flattered_error=max(0.0, out.error - usual.error),
        )

    def feature(self, way: FeatureMethod) -> tuple[Law, float]:
        """Return law and bound of weights learned on the public records, one for each member."""
        shares = self.shares(way)
        counts = np.array([site.count for site in self.case.sites])
        laws = [self.member(site.n_records, site.epsilon) for site in self.case.sites]
        spread = np.asarray(
            sum(c * law.covariance for c, law in zip(counts, laws, strict=True)) / counts.sum()
        )
        centre = self.scaled(self.average(shares))

        def loss(log_k: float) -> float:
            law = self._feature(way, centre.times(math.exp(log_k)), spread)
            return self.facts.smooth(law.mean, law.covariance, None).loss

        # Weights that take noise out of the average let it be longer than it could be by itself.
        more = optimize.minimize_scalar(
            loss, bounds=(-0.2, 1.6), method="bounded", options={"xatol": 0.05}
        ).x
        return self._feature(way, centre.times(math.exp(more)), spread), self.feature_bound(
            way, shares
        )

    def _feature(self, way: FeatureMethod, centre: Law, spread: Array) -> Law:
        at = self.facts.smooth(centre.mean, centre.covariance, None)
        values, vectors = linalg.eigh(at.hessian)
        root = np.sqrt(np.maximum(values, 1e-6 * values[-1]))
        out, back = (
            vectors * root,
            vectors / root,
        )  # H^½ and H^-½: f = back @ u in coordinates where the loss is round
        within, axes = linalg.eigh(out.T @ spread @ out)
        within = np.maximum(within, 0.0)
        back, out = back @ axes, out @ axes  # ... and the members' spread is diagonal
        step = -back.T @ at.gradient
        energy = step**2 + np.diag(out.T @ centre.covariance @ out)
        sampled = (
            float(np.trace(back.T @ self.facts.gradients(centre.mean) @ back))
            / self.dimension
            / self.n_public
        )
        along, kept, learned, drawn, drawn_along = self.weights_ridge(
            way, spread, at.hessian, within, energy / sampled
        )
        shrunk = centre.times(along)
        change = back @ (np.sqrt(kept)[:, None] * out.T)
        unit = shrunk.mean / math.sqrt(max(float(shrunk.mean @ at.hessian @ shrunk.mean), 1e-300))
        return Law(
            shrunk.mean + back @ ((1 - np.sqrt(kept)) * step),
            change @ shrunk.sampling @ change.T + (back * (learned * sampled)) @ back.T,
            change @ shrunk.noise @ change.T
            + (back * drawn) @ back.T
            + drawn_along * np.outer(unit, unit),
        )

    def weights_ridge(
        self, way: FeatureMethod, spread: Array, hessian: Array, within: Array, energy: Array
    ) -> tuple[float, Array, Array, Array, float]:
        """Return what learned weights make of the average.

        Kept of its length; along each axis of the members' spread, kept of the squared error, and
        variance from learning and from noise; and the noise along the average itself.
        """
        n = self.case.n_sites
        ranges = [in_span(within, n - 1, kappa) for kappa in kappas(within, n - 1)]
        if way.regularization == "auto" and way.epsilon is None:
            kept, learned = min(ranges, key=lambda one: float(one[0] @ energy + one[1].sum()))
            return 1.0, kept, learned, 0 * kept, 0.0
        mean = self.average(self.shares(way)).mean
        drawn, size = 0.0, 1.0
        if way.epsilon is not None:
            noise = self.hub_noise(way)
            ridge, drawn = noise.ridge, noise_variance(noise.plan.noise, n) / self.n_public**2
            # Members are brought to length 1, and all of them together to operator norm 1.
            widest = math.sqrt(n * float(linalg.eigvalsh(spread)[-1])) + math.sqrt(
                float(np.trace(spread))
            )
            size = n * float(mean @ mean) + widest**2
        else:
            ridge = float(way.regularization)
            if way.scaling == "public":
                moment = self.facts.second_moment
                size = float(mean @ moment @ mean) + float(np.sum(moment * spread))
        elsewhere = float(np.sum(hessian * spread)) / size
        along = (n * float(mean @ hessian @ mean)) / size + elsewhere
        toward_zero = way.toward == "zero" or way.epsilon is not None
        most = ranges[0][1]  # the directions that weights can move in at all
        wanted = (elsewhere / (elsewhere + ridge)) ** 2 * most.sum()
        kept, learned = min(ranges, key=lambda one: abs(float(one[1].sum()) - wanted))
        return (
            along / (along + ridge) if toward_zero else 1.0,
            kept,
            learned,
            most * elsewhere * drawn / (elsewhere + ridge) ** 2,
            along * drawn / (along + ridge) ** 2,
        )

    def distilled(self, way: Any) -> tuple[Law, float]:
        """Return law and bound of a model learned from exact members' votes, with noise that hides a site."""
        way._check()
        facts, n = self.facts, self.case.n_sites
        member = self.average(np.array([1 / n] * len(self.case.sites)), exact=True)
        kinds = [self.member(site.n_records, math.inf) for site in self.case.sites]
        spread = np.asarray(
            sum(s.count * k.covariance for s, k in zip(self.case.sites, kinds, strict=True)) / n
        )
        soft, scatter = None, facts.hessian(member.mean) @ spread @ facts.hessian(member.mean) / n
        if facts.error is not None:
            z, width = facts.rows @ member.mean, np.maximum(margin_spread(facts.rows, spread), 1e-9)
            soft = special.ndtr(z / width)
            pull = (
                facts.rows.T * (np.exp(-((z / width) ** 2) / 2) / math.sqrt(2 * math.pi) / width)
            ) @ facts.rows
            if way.soft == "probabilities":
                at = z[:, None] + width[:, None] * NODES
                soft = special.expit(at) @ WEIGHTS
                pull = (
                    facts.rows.T * (Logistic().bend(at, np.ones_like(at)) @ WEIGHTS)
                ) @ facts.rows
            scatter = pull @ spread @ pull / len(facts.rows) ** 2 / n
            if way.majority:
                sure = (
                    (2 * soft - 1)
                    * math.sqrt(n)
                    / (2 * np.sqrt(np.maximum(soft * (1 - soft), 1e-12)))
                )
                soft, scatter = special.ndtr(sure), np.zeros_like(spread)
        found = []
        for ridge in STRENGTHS if way.regularization == "auto" else (float(way.regularization),):
            found.append(self._distilled(way, ridge, member, soft, scatter))

        def cost(one: tuple[Law, float]) -> float:
            # With labels the strength is chosen by counting errors, as distillation itself does.
            at = facts.smooth(one[0].mean, one[0].covariance, None)
            return at.loss if at.error is None else at.error

        return min(found, key=cost)

    def _distilled(
        self, way: Any, ridge: float, start: Law, soft: Any, scatter: Array
    ) -> tuple[Law, float]:
        facts, loss = self.facts, Logistic()
        asked = copy.copy(way)
        asked.regularization = ridge
        plan = asked._plan(Rows(facts.rows, 2, self.case.n_sites))
        inside = way.mechanism == "statistic"
        # Noise is drawn for the contrast of both classes, of which the second class has 1/√2.
        variance = plan.variance / 2 if inside else noise_variance(plan.noise, self.dimension)
        drawn = variance * (facts.second_moment if inside else np.eye(self.dimension))
        exact = self.settled(
            ridge, lambda inverse: (0 * inverse, 0 * inverse), start=start.mean, soft=soft
        )
        if soft is None:
            gradients = facts.gradients(exact.mean)
        else:
            gap = special.expit(facts.rows @ exact.mean) - soft
            gradients = np.atleast_2d(np.cov(gap[:, None] * facts.rows, rowvar=False, bias=True))
        scatter = scatter + gradients / self.n_public

        def covariances(inverse: Array) -> tuple[Array, Array]:
            return inverse @ scatter @ inverse, inverse @ drawn @ inverse if inside else drawn

        law = self.settled(ridge, covariances, start=exact.mean, soft=soft, inside=inside)
        square = float(np.trace(drawn))
        noise = square / (2 * ridge) if inside else loss.curvature / 2 * square
        length = float(exact.mean @ exact.mean)
        return law, ridge / 2 * length + 2 * loss.lipschitz**2 / (ridge * self.n_public) + noise

    # ------------------------------------------------------------------------------------------------- bounds

    @property
    def reference_length(self) -> float:
        """Length of the model that losses are compared with."""
        return float(np.linalg.norm(self.facts.model(self.learner.regularization, None)))

    def average_bound(self, shares: Array, *, exact: bool = False) -> float:
        """Return what the expected excess loss of an average cannot exceed (docs/planning.md, 2)."""
        total = 0.0
        for site, share in zip(self.case.sites, shares, strict=True):
            noise = self.noise(site.n_records, math.inf if exact else site.epsilon)
            stays, divided = noise.expected_bound()
            sampled = 2 * noise.loss.lipschitz**2 / (noise.ridge * site.n_records)
            alone = noise.ridge / 2 * self.reference_length**2 + sampled + stays
            total += site.count * (share * alone + share**2 * divided)
        return float(total)

    def feature_bound(self, way: FeatureMethod, shares: Array) -> float:
        """Return the average's bound and what learning the weights can cost beyond (docs/planning.md, 3)."""
        counts = np.array([site.count for site in self.case.sites])
        squares = np.array(
            [self.noise(site.n_records, site.epsilon).longest() ** 2 for site in self.case.sites]
        )
        if way.epsilon is None:
            length = math.sqrt(float(counts @ squares) * float(counts @ shares**2))
            return self.average_bound(shares) + 2 * Logistic.lipschitz * length / math.sqrt(
                self.n_public
            )
        square = self.case.n_sites * float(
            counts @ (shares**2 * squares)
        )  # members of length 1, and all in the ball
        noise = self.hub_noise(way)
        learned = 2 * Logistic.lipschitz**2 / (noise.ridge * self.n_public)
        return (
            self.average_bound(shares)
            + noise.ridge / 2 * square
            + learned
            + sum(noise.expected_bound())
        )

    def hub_noise(self, way: FeatureMethod) -> SiteNoise:
        """Return the noise that hides the hub's own records when it learns the weights."""
        n, strength = self.case.n_sites, way.regularization
        learner = PrivateLogisticRegression(
            epsilon=float(way.epsilon or 0.0),
            delta=way.delta,
            regularization=PRIVATE_REGULARIZATION if strength == "auto" else float(strength),
            fit_intercept=False,
        )
        return site_noise(learner, n, self.n_public)


def kappas(spread: Array, directions: int) -> Array:
    """Return the strengths κ that a ridge on weights over so many random directions can have, from none on."""
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
    """Return, along each axis, the share of a squared error that weights leave, and the directions they spend.

    For normal directions whose variances are `spread`, and a ridge on the weights: the
    deterministic equivalents of a random ridge regression. Exact without a ridge for equal
    variances, otherwise as dimensions grow (docs/planning.md, 3).
    """
    if math.isinf(kappa):
        return np.ones_like(spread), np.zeros_like(spread)
    share = spread / (spread + kappa)
    ridge = max(directions - float(share.sum()), 0.0) / max(
        directions - float(np.sum(share**2)), 1e-12
    )
    kept = (1 - share) * (1 - ridge * share)
    return kept, 2 * share - 1 + kept


def require(name: str, value: object, fits: bool, must: str) -> None:
    """Refuse a parameter of `plan`."""
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of plan must be {must}. Got {value!r} instead."
        )
