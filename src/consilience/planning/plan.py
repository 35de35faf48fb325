"""Advice before training or joining: what accuracy to expect of so many records, sites and public records.

Nothing here touches a private record. Noise is planned by the learner's own `plan_linear`, so
advice and training cannot disagree about it; what the noise does to the result is estimated in
three ways, each stated for what it is:

- *asymptotic*: ridge + sampling + noise, ½ tr(H Cov(f)), with H from public data or a declared
  isotropic one. The one to trust for sizing, as long as the noise moves margins by less than about
  one (`Expectation.asymptotic`). For an average with a weak ridge it can be too high (2.3 times in
  one measured case): each site's noise also lengthens its model, which undoes some of the ridge's
  shrinking.
- *simulated*: the learner's noise drawn around the public model and the problem solved again, or
  for many sites the law of their average (joining.py). Needs public data, and holds at every noise
  level.
- *worst case*: a bound with explicit constants that no data can break (algorithms.md, section I).
  Mostly far off.

What aggregators make of many sites (`Joined`) is *predicted* from the mean and covariance of their
result, which follow from those of one site's model by linear algebra, and *bounded* in expectation
by theorems that hold for all data. That is joining.py; docs/planning.md derives both, and
benchmarks/planning.md compares them with `simulate`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike
from scipy import linalg

from consilience.errors import SettingsError
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, check_settings
from consilience.planning.joining import (
    ALONE,
    PUBLIC,
    Case,
    Joined,
    Joining,
    Site,
    known_ways,
    require,
    site_list,
)
from consilience.planning.population import (
    Array,
    Linear,
    Population,
    SiteNoise,
    from_public,
    isotropic,
    site_noise,
)
from consilience.privacy.mechanisms import Noise, Source
from consilience.tables.schema import Categorical, Numeric, Schema, read_table

GRID = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # of the asked epsilon: the rows of the table
# of simulated models at one site; fewer where several sites are averaged, which steadies them
PAIRS = 20
MOST_SIMULATED = 10  # sites; the average of more is predicted
NOTICEABLE = 1e-3  # nats: joining for less is not worth anyone's budget
LARGEST_N = 4**22  # beyond 10^13
LARGEST = {
    "n_records": LARGEST_N,
    "n_sites": 4**12,
    "n_public": 4**12,
    "epsilon": 4**6,
}  # where a search ends


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What to expect at one epsilon. Losses are in nats above the same learner, exact, on unlimited records.

    ``margin_noise`` is the standard deviation that one site's noise gives a record's margin.
    ``bound`` is the worst case, ``noise_bound`` its noise term alone. Only with public data:
    ``simulated_loss``, the same excess by simulation; ``error`` and ``error_spread``, the expected
    error rate and its standard deviation over draws; and ``exact_error``, that of the learner
    without noise, cross-validated.
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
        """Whether the noise is small enough for the asymptotic estimate: beyond it, only its order is meant."""
        return self.margin_noise <= 1

    @property
    def expected_loss(self) -> float:
        """The best estimate at hand: simulated where there is public data, else asymptotic."""
        return self.excess_loss if self.simulated_loss is None else self.simulated_loss

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "excess_loss": self.excess_loss, "asymptotic": self.asymptotic}


def plan(
    *,
    n_records: int,
    epsilon: float,
    n_features: int | None = None,
    delta: float = 0.0,
    n_sites: int = 1,
    learner: type[Linear] = PrivateLogisticRegression,
    public: tuple[Any, ArrayLike] | None = None,
    curvature: float | None = None,
    signal: float = 2.0,
    n_public: int | None = None,
    aggregator: Any = None,
    sizes: Sequence[int] | None = None,
    epsilons: Sequence[float] | None = None,
    target: float = 0.01,
    failure: float = 0.05,
    seed: int = 0,
    **settings: Any,
) -> Advice:
    """Return what a two-class linear learner can be expected to reach, alone and joined, before anyone spends budget.

    Parameters
    ----------
    n_records, n_features
        Of one site. With public data the number of features is theirs.
    n_sites
        How many such sites average their models.
    learner, settings
        The learner and its settings other than epsilon and delta (regularization, mechanism,
        neighbours, ...).
    public
        (X, y), encoded as the sites will encode theirs.
    curvature, signal
        Without public data: the mean loss' second derivative, the same in all directions (default:
        that of rows of full length spread evenly over all coordinates), and the root mean square of
        the best model's coordinates.
    n_public
        How many public records the hub will have, labelled for those aggregators that need labels;
        by default as many as `public` has.
    aggregator
        One, a list or a dictionary by name, as `simulate` takes them; by default all that are
        known. `Advice.joined` has a prediction and a bound for each.
    sizes, epsilons
        Records and epsilon of each site, if they are not all alike: then `n_records` and `epsilon`
        are those of the site that asks, and `n_sites` is counted.
    target
        The excess loss whose required number of records is reported.
    failure
        Probability with which the worst-case bound of `rows` may fail.
    seed
        Of the simulation, which draws around public data only.

    Privacy
    -------
    No private record is read and nothing is charged. `public` has no protection at all.

    Examples
    --------
    >>> advice = plan(n_records=20_000, n_features=10, epsilon=1.0)
    >>> advice.at(1.0).excess_loss < advice.at(0.1).excess_loss
    True
    >>> plan(n_records=789, n_features=50, epsilon=1.0, n_sites=10, n_public=200).recommended.name
    'public blend'
    """
    if learner not in (PrivateLogisticRegression, PrivateLinearSVC):
        raise SettingsError(
            f"Advice was asked for {learner!r}, but is known for PrivateLogisticRegression and "
            "PrivateLinearSVC only. Nothing was computed. Plan with one of these."
        )
    require("target", target, target > 0, "a number > 0")
    require("failure", failure, 0 < failure < 1, "a number in (0, 1)")
    require("signal", signal, signal > 0, "a number > 0")
    for name, count in (("n_records", n_records), ("n_sites", n_sites)):
        require(
            name, count, isinstance(count, int | np.integer) and count > 0, "a whole number > 0"
        )
    asked = learner(epsilon=epsilon, delta=delta, **settings)
    if asked.neighbours == "add-remove":
        asked.set_params(public_size=n_records)
    check_settings(asked)
    require("epsilon", epsilon, math.isfinite(epsilon), "finite")
    require(
        "mechanism",
        asked.mechanism,
        asked.mechanism != "matrix",
        "'objective', 'output' or 'generalized'",
    )
    require("curvature", curvature, curvature is None or curvature > 0, "a number > 0, or left out")
    whole = n_public is None or (isinstance(n_public, int | np.integer) and n_public > 0)
    require("n_public", n_public, whole, "a whole number > 0, or left out")
    sites, asking = (
        site_list(n_records, epsilon, n_sites, sizes, epsilons),
        Site(1, n_records, epsilon),
    )
    source = Noise(seed=seed).open()
    if public is None:
        fits = isinstance(n_features, int | np.integer) and n_features > 0
        require("n_features", n_features, fits, "a whole number > 0, or public data must be given")
        facts = isotropic(
            asked, int(n_features or 0) + bool(asked.fit_intercept), curvature, signal
        )
    else:
        facts = from_public(asked, *public, source)
        found = len(facts.second_moment) - bool(asked.fit_intercept)
        require(
            "n_features",
            n_features,
            n_features in (None, found),
            f"{found}, as many as the public data has",
        )
    planner = _Planner(facts, asked, failure)
    grid = [float(f"{epsilon * factor:.12g}") for factor in GRID]
    rows = [planner.expect(n_records, n_sites, source, epsilon=one) for one in grid]
    alone = planner.expect(n_records, 1, source) if n_sites > 1 else rows[GRID.index(1.0)]
    asks_to_join = (
        sum(site.count for site in sites) > 1 or n_public is not None or aggregator is not None
    )
    if public is not None and n_public is None:
        n_public = int(np.shape(public[1])[0])
    ways = known_ways(aggregator, asked, sites, n_public) if asks_to_join else {}
    return Advice(tuple(rows), alone, float(target), planner, Case(sites, n_public, asking), ways)


def read_public(source: Any, label: str, *, drop: Iterable[str] = ()) -> tuple[Array, Array]:
    """Encode public records by their own bounds and categories, which only public records may reveal.

    Parameters
    ----------
    source
        A CSV or Parquet path, a pandas or polars frame, an Arrow table, or a dict of arrays.
    label
        The column to learn.
    drop
        Columns that are no features: identifiers, dates of entry, other outcomes.
    """
    table, unused = read_table(source), [drop] if isinstance(drop, str) else list(drop)
    what = f"file {str(source)!r}" if isinstance(source, str | PathLike) else "table"
    if label not in table.column_names or label in unused:
        raise SettingsError(
            f"The public {what} has no column {label!r} to learn. Nothing was computed. "
            f"Name one of {[name for name in table.column_names if name not in unused]}."
        )
    if unknown := [name for name in unused if name not in table.column_names]:
        raise SettingsError(
            f"The public {what} has no column {unknown[0]!r} to drop. Nothing was computed. "
            f"Name some of {table.column_names}."
        )
    columns: list[Numeric | Categorical] = []
    for name in table.column_names:
        if name in unused:
            continue
        texts = pc.utf8_trim_whitespace(pc.cast(table[name], pa.string()))
        texts = pc.if_else(pc.equal(texts, ""), None, texts)
        if name == label:
            classes = pc.unique(texts.drop_null()).sort().to_pylist()
            continue
        try:
            numbers = pc.min_max(pc.cast(texts, pa.float64())).as_py()
        except pa.ArrowInvalid:
            columns.append(
                Categorical(name, pc.unique(texts.drop_null()).sort().to_pylist(), missing="ignore")
            )
        else:
            if numbers["min"] != numbers["max"]:  # a constant says nothing
                columns.append(Numeric(name, numbers["min"], numbers["max"], missing="middle"))
    X, y, _ = Schema(columns, label, classes=classes).encode(table)
    return X, y


@dataclass(frozen=True)
class _Planner:
    """Turn what `plan_linear` would draw into what it does to the result."""

    facts: Population
    learner: Linear
    failure: float
    known: dict[Any, Any] = field(
        default_factory=dict, repr=False, compare=False
    )  # laws that were worked out before

    def noise(self, n_records: int, **settings: float) -> SiteNoise:
        """Return the noise that training on so many records would draw, as the learner itself decides it."""
        return site_noise(self.learner, len(self.facts.second_moment), n_records, **settings)

    def joining(self, case: Case) -> Joining:
        """Return what predicts ways of joining the sites of a case."""
        return Joining(self.facts, self.learner, case, self.known)

    def expect(
        self, n_records: int, n_sites: int, source: Source | None = None, **settings: float
    ) -> Expectation:
        """Return what to expect; by simulation too if there are public records and a source to draw from."""
        facts, noise = self.facts, self.noise(n_records, **settings)
        exact, ridged = (
            facts.model(self.learner.regularization, None),
            facts.model(noise.ridge, None),
        )
        hessian = facts.hessian(ridged)
        inverse = linalg.inv(hessian + noise.ridge * np.eye(noise.dimension))
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
        if facts.error is None or source is None:
            return answer
        if n_sites > MOST_SIMULATED:
            return self._averaged(answer, exact, source)
        root = np.real(linalg.sqrtm(gradients)) / math.sqrt(n_records)
        draws = [
            np.mean([noise.simulated(facts, root, inverse, source) for _ in range(n_sites)], axis=0)
            for _ in range(max(5, PAIRS // n_sites))
        ]
        # What a draw does to first order has a known mean and explains most of what it does; only
        # the rest is noise.
        known = np.array([shift @ hessian @ shift / 2 for _, _, shift in draws])
        surplus = known - (answer.sampling_loss + answer.noise_loss)

        def mean(values: Array) -> float:
            slope = float(np.cov(values, known)[0, 1] / known.var(ddof=1))
            return float(np.mean(values - slope * surplus))

        errors = np.array([[facts.error(f) for f in pair] for *pair, _ in draws])
        losses = np.array([[facts.loss(f) for f in pair] for *pair, _ in draws])
        held_out = facts.exact_error or 0.0
        # Only the added error is measured on the records that made the model; its level comes from
        # held-out ones.
        return replace(
            answer,
            simulated_loss=mean(losses.mean(axis=1)) - facts.loss(exact),
            error=min(1.0, max(0.0, held_out + mean(errors.mean(axis=1)) - facts.error(exact))),
            error_spread=float(errors.std(ddof=1)),
            exact_error=held_out,
        )

    def _averaged(self, answer: Expectation, exact: Array, source: Source) -> Expectation:
        """Complete what to expect of many sites by the law of their average: drawing them all would take minutes."""
        site = Site(answer.n_sites, answer.n_records, answer.epsilon)
        law = self.joining(Case((site,), None, site)).average(np.full(1, 1 / answer.n_sites))
        at, facts = self.facts.smooth(law.mean, law.covariance, None), self.facts
        assert facts.error is not None
        assert at.error is not None
        root = np.real(linalg.sqrtm(law.covariance))
        drawn = [
            facts.error(law.mean + root @ source.normal(len(law.mean))) for _ in range(2 * PAIRS)
        ]
        held_out = facts.exact_error or 0.0
        return replace(
            answer,
            simulated_loss=at.loss - facts.loss(exact),
            error=min(1.0, max(0.0, held_out + at.error - facts.error(exact))),
            error_spread=float(np.std(drawn, ddof=1)),
            exact_error=held_out,
        )

    def bound(self, noise: SiteNoise, reference: Array, n_sites: int = 1) -> float:
        """Return the worst case over all data; by convexity an average is no worse, if it holds for all its sites.

        Sridharan et al. 2008 as used by Hamm et al. 2016, theorem 4; algorithms.md, section I.
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
        """Return the least n from which on the excess loss stays below `target`; infinity beyond `LARGEST_N`."""
        reference = self.facts.model(self.learner.regularization, None)

        def reached(n_records: int) -> bool:
            if not worst_case:
                return self.expect(n_records, n_sites).excess_loss <= target
            # The bound may choose its regularisation; the estimate is of the learner as it is.
            planned = (
                self.noise(n_records, regularization=float(ridge))
                for ridge in np.geomspace(1, 1e-7, 15)
            )
            return any(self.bound(noise, reference, n_sites) <= target for noise in planned)

        # From above: with very few records the ridge alone can hold a model at zero, and its loss
        # low.
        high = LARGEST_N
        if not reached(high):
            return math.inf
        while high > 1 and reached(high // 4):
            high //= 4
        low = high // 4
        while high - low > max(1, high // 50):
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high


@dataclass(frozen=True)
class Advice:
    """Expectations over a grid of epsilons, and of every way of joining; prints as tables and sentences."""

    rows: tuple[Expectation, ...]
    alone: Expectation  # one site at the asked epsilon
    target: float
    _planner: _Planner
    _case: Case
    _ways: Mapping[str, Any]

    @cached_property
    def joined(self) -> tuple[Joined, ...]:
        """What each way of joining can be expected to reach at the asked epsilon; empty for one site on its own."""
        joining = self._planner.joining(self._case)
        return tuple(joining.expect(name, way) for name, way in self._ways.items())

    @property
    def recommended(self) -> Joined | None:
        """The way with the least predicted loss among those that keep a record's epsilon without trust in the hub.

        Baselines included: where joining does not beat them by `NOTICEABLE`, it is to stay alone,
        or with public records alone.
        """
        ours = [one for one in self.joined if one.unit != "site" and not one.trusted]
        head_start = {ALONE: NOTICEABLE, PUBLIC: NOTICEABLE}
        return min(
            ours, key=lambda one: one.excess_loss - head_start.get(one.name, 0.0), default=None
        )

    def required(self, what: str, target: float | None = None, *, name: str | None = None) -> float:
        """Return the least "n_sites", "n_public", "n_records" or "epsilon" for which a way is predicted to suffice.

        All else stays as asked; epsilons of unequal sites, and the hub's, change in proportion. By
        default for the recommended way and the target of the plan. Infinity if not even very many
        suffice.
        """
        name = self.recommended.name if name is None and self.recommended is not None else str(name)
        require(
            "name",
            name,
            name in self._ways,
            f"one of {list(self._ways)}; only plans for several sites have them",
        )
        way: Any = self._ways[name]
        alike = len(self._case.sites) == 1 or what in ("n_public", "epsilon")
        require(
            "what",
            what,
            what in LARGEST and alike,
            f"one of {list(LARGEST)}, the first two if sites are alike",
        )
        target = self.target if target is None else target
        require("target", target, target > 0, "a number > 0")
        base = self.alone.epsilon
        site = self._case.sites[0]
        now = {"n_sites": self._case.n_sites, "n_records": site.n_records, "epsilon": base}

        def reached(value: float) -> bool:
            case, changed = self._case.changed(what, value, base), copy.copy(way)
            if what == "epsilon" and getattr(way, "epsilon", None) is not None:
                changed.epsilon = np.multiply(way.epsilon, value / base).tolist()
            return self._planner.joining(case).expect("", changed).excess_loss <= target

        return _least(
            reached,
            float(now.get(what, self._case.n_public or 1)),
            LARGEST[what],
            what != "epsilon",
        )

    @cached_property
    def needed(self) -> float:
        """Records that each site needs for the target, by the asymptotic estimate."""
        return self.required_n(self.target)

    @cached_property
    def needed_worst_case(self) -> float:
        """Records that each site needs for the target, by the worst-case bound."""
        return self.required_n(self.target, worst_case=True)

    def at(self, epsilon: float) -> Expectation:
        """Return the row of one epsilon of the grid."""
        for row in self.rows:
            if math.isclose(row.epsilon, epsilon):
                return row
        known = ", ".join(f"{row.epsilon:g}" for row in self.rows)
        raise SettingsError(
            f"The 'epsilon' of a row must be one of {known}. Got {epsilon!r} instead."
        )

    def required_n(self, target: float, *, worst_case: bool = False) -> float:
        """Return how many records each site needs for an excess loss of `target`, or infinity beyond 1e13.

        By the asymptotic estimate, or by the worst-case bound at its best regularisation.
        """
        require("target", target, target > 0, "a number > 0")
        return self._planner.required_n(target, self.rows[0].n_sites, worst_case=worst_case)

    @property
    def sentence(self) -> str:
        """What to expect at the asked epsilon, and how many records a better result needs."""
        row = self.at(self.alone.epsilon)
        if row.n_sites == 1:
            who = f"with n={row.n_records:,}"
        else:
            who = f"averaging {row.n_sites} sites of n={row.n_records:,} each"
        parts = [f"At epsilon={row.epsilon:g} {who} expect {_expected(row)}"]
        if row.n_sites > 1:
            parts.append(f"one such site alone: {_expected(self.alone)}")
        if row.exact_error is not None:
            parts.append(f"the same learner without noise: {row.exact_error:.3f}")
        each = "n" if row.n_sites == 1 else "n at each site"
        parts.append(
            f"to reach an excess loss of {self.target:g} you need {each} >= {_count(self.needed)} "
            f"(by the worst-case bound: {_count(self.needed_worst_case)})"
        )
        return "; ".join(parts) + "."

    @cached_property
    def enough(self) -> dict[str, float]:
        """What the recommended way needs for the target, each with all else as asked."""
        best = self.recommended
        if best is None:
            return {}
        whats = ["n_sites"] if len(self._case.sites) == 1 and best.n_sites > 1 else []
        whats += ["epsilon"] if best.n_sites > 0 else []
        whats += ["n_public"] if best.n_public is not None else []
        return {what: self.required(what) for what in whats}

    @property
    def joining_sentence(self) -> str:
        """Which way of joining to take, what it is predicted to bring, and what would be enough for the target."""
        best = self.recommended
        if best is None:
            return ""
        helps = (
            "joining is not predicted to help: stay with"
            if best.name in (ALONE, PUBLIC)
            else "join by"
        )
        parts = [f"Predicted: {helps} {best.name}, {_predicted(best)}"]
        beside = [
            one for one in self.joined if one.name in (ALONE, PUBLIC) and one.name != best.name
        ]
        parts += [f"{one.name}: {_predicted(one)}" for one in beside]
        hidden = [one for one in self.joined if one.unit == "site"]
        if hidden:
            site = min(hidden, key=lambda one: one.excess_loss if one.error is None else one.error)
            parts.append(f"to hide whole sites at that epsilon: {site.name}, {_predicted(site)}")
        if best.excess_loss <= self.target:
            parts.append(f"the excess loss of {self.target:g} that was asked for is reached")
            return "; ".join(parts) + "."
        names = {"n_sites": "sites", "epsilon": "epsilon", "n_public": "public records"}
        enough = {names[what]: value for what, value in self.enough.items() if math.isfinite(value)}
        words = [
            f"{name} >= {f'{n:.2g}' if name == 'epsilon' else _count(n)}"
            for name, n in enough.items()
        ]
        needs = (
            f"{' or '.join(words)}, all else equal"
            if words
            else "more than any one of sites, epsilon and records"
        )
        parts.append(f"for an excess loss of {self.target:g} it needs {needs}")
        return "; ".join(parts) + "."

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a required number beyond 1e13 is None."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "alone": self.alone.as_dict(),
            "target": self.target,
            "required_n": self.needed if math.isfinite(self.needed) else None,
            "required_n_worst_case": self.needed_worst_case
            if math.isfinite(self.needed_worst_case)
            else None,
            "sentence": self.sentence,
            "joined": [one.as_dict() for one in self.joined],
            "recommended": None if self.recommended is None else self.recommended.name,
            "required": {
                what: value if math.isfinite(value) else None for what, value in self.enough.items()
            },
            "advice": self.joining_sentence,
        }

    def __str__(self) -> str:
        public = self.alone.error is not None
        titles = [
            "epsilon",
            *(["error", "±"] if public else []),
            "excess loss",
            "noise/signal",
            "worst case",
        ]
        cells = [
            [
                f"{row.epsilon:g}",
                *([f"{row.error:.3f}", f"{row.error_spread:.3f}"] if public else []),
                f"{row.expected_loss:.4f}{' ' if public or row.asymptotic else '*'}",
                f"{row.noise_per_coordinate / row.signal_per_coordinate:.2f}",
                f"{row.bound:.3g}",
            ]
            for row in self.rows
        ]
        lines = _table(titles, cells)
        if not public and not all(row.asymptotic for row in self.rows):
            lines.append(ROUGH)
        lines += ["", self.sentence]
        if self.joined:
            titles = [
                "way",
                "hides",
                "hub sees",
                *(["error"] if public else []),
                "excess loss",
                "noise part",
                "bound",
            ]
            cells = [
                [
                    one.name,
                    one.unit,
                    "models" if one.trusted else "releases" if one.unit != "none" else "nothing",
                    *([f"{one.error:.3f}"] if public else []),
                    f"{_short(one.excess_loss)}{'*' if one.rough else ' '}",
                    _short(one.noise_loss),
                    f"{one.bound:.3g}",
                ]
                for one in self.joined
            ]
            lines += ["", *_table(titles, cells)]
            if any(one.rough for one in self.joined):
                lines.append(ROUGH)
            if any(one.excess_loss < 0 for one in self.joined):
                lines.append(
                    "below 0: better than the sites' own ridge allows, whatever the number of "
                    "their records"
                )
            lines += ["", self.joining_sentence]
        return "\n".join(lines)


ROUGH = "* the noise moves margins by more than 1: only the order of magnitude is meant"


def _table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in [titles, *cells]]


def _short(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.1e}"


def _least(reached: Callable[[float], bool], now: float, largest: float, whole: bool) -> float:
    """Return the least value that suffices, to 2 percent, searched from `now` on; infinity beyond `largest`."""
    high = now
    if reached(high):
        while high > (1 if whole else 1e-6) and reached(
            max(high // 4 if whole else high / 4, 1 if whole else 0)
        ):
            high = max(high // 4, 1) if whole else high / 4
        low = high // 4 if whole else high / 4
    else:
        while not reached(high):
            low, high = high, high * 4
            if high > largest:
                return math.inf
    while high - low > (max(1, 0.02 * high) if whole else 0.02 * high):
        middle = (low + high) // 2 if whole else (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _expected(row: Expectation) -> str:
    """Word an expectation, and that it is rough where it is."""
    if row.error is not None:
        return f"an error of about {row.error:.3f} ± {row.error_spread:.3f} (excess loss {row.expected_loss:.2g})"
    rough = (
        "" if row.asymptotic else ", a rough figure because the noise moves margins by more than 1"
    )
    return f"an excess loss of about {row.expected_loss:.2g}{rough}"


def _predicted(one: Joined) -> str:
    error = "" if one.error is None else f"error {one.error:.3f}, "
    return f"{error}excess loss {one.excess_loss:.2g}{', roughly' if one.rough else ''}"


def _count(n: float) -> str:
    """Write a number of records with two digits, or that there is none."""
    return f"{float(f'{n:.2g}'):,.0f}" if math.isfinite(n) else "more than 10^13"
