"""Advice before training or joining: what accuracy to expect of so many records at this epsilon.

Nothing here touches a private record. Noise is planned by the learner's own `plan_linear`, so advice and training
cannot disagree about it; what the noise does to the result is estimated in three ways, each stated for what it is:

- *asymptotic*: ridge + sampling + noise, ½ tr(H Cov(f)), with H from public data or a declared isotropic one. The one
  to trust for sizing, as long as the noise moves margins by less than about one (`Expectation.asymptotic`). For an
  average with a weak ridge it can be too high (2.3 times in one measured case): each site's noise also lengthens its
  model, which undoes some of the ridge's shrinking.
- *simulated*: the learner's noise drawn around the public model and the problem solved again. Needs public data, and
  holds at every noise level.
- *worst case*: a bound with explicit constants that no data can break (algorithms.md, section I). Mostly far off.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, special
from sklearn.base import clone

from consilience.data import Categorical, Numeric, Schema, read_table
from consilience.errors import SettingsError
from consilience.learners.erm import Loss, solve
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, check_settings, classification_task
from consilience.learners.perturbation import LinearPlan, LinearTask, plan_linear
from consilience.privacy.accounting import Gaussian, Objective, ObjectiveGaussian
from consilience.privacy.mechanisms import Noise, Source, gaussian, l2_laplace

Array = NDArray[np.float64]
Linear = PrivateLogisticRegression | PrivateLinearSVC

GRID = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # of the asked epsilon: the rows of the table
MOST_PUBLIC = 4000  # public records used; more would only take longer
PAIRS = 20  # of simulated models at one site; fewer where several sites are averaged, which steadies them
FOLDS = 5
LARGEST_N = 4**22  # beyond 10^13


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What to expect at one epsilon. Losses are in nats above the same learner, exact, on unlimited records.

    ``margin_noise`` is the standard deviation that one site's noise gives a record's margin. ``bound`` is the worst
    case, ``noise_bound`` its noise term alone. Only with public data: ``simulated_loss``, the same excess by
    simulation; ``error`` and ``error_spread``, the expected error rate and its standard deviation over draws; and
    ``exact_error``, that of the learner without noise, cross-validated.
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


@dataclass(frozen=True)
class _Facts:
    """What is publicly known about the records, in the coordinates of the unit ball."""

    hessian: Callable[[Array], Array]  # of the mean loss at a model
    gradients: Array  # covariance of one record's gradient
    second_moment: Array
    model: Callable[[float, Array | None], Array]  # exact minimum at a ridge Λ and a linear term
    loss: Callable[[Array], float]
    error: Callable[[Array], float] | None = None
    exact_error: float | None = None


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
    target: float = 0.01,
    failure: float = 0.05,
    seed: int = 0,
    **settings: Any,
) -> Advice:
    """Return what a two-class linear learner can be expected to reach, before anyone spends budget on it.

    Parameters
    ----------
    n_records, n_features
        Of one site. With public data the number of features is theirs.
    n_sites
        How many such sites average their models.
    learner, settings
        The learner and its settings other than epsilon and delta (regularization, mechanism, neighbours, ...).
    public
        (X, y), encoded as the sites will encode theirs.
    curvature, signal
        Without public data: the mean loss' second derivative, the same in all directions (default: that of rows of
        full length spread evenly over all coordinates), and the root mean square of the best model's coordinates.
    target
        The excess loss whose required number of records is reported.
    failure
        Probability with which the worst-case bound may fail.
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
    """
    if learner not in (PrivateLogisticRegression, PrivateLinearSVC):
        raise SettingsError(
            f"Advice was asked for {learner!r}, but is known for PrivateLogisticRegression and PrivateLinearSVC only. "
            "Nothing was computed. Plan with one of these."
        )
    _require("target", target, target > 0, "a number > 0")
    _require("failure", failure, 0 < failure < 1, "a number in (0, 1)")
    _require("signal", signal, signal > 0, "a number > 0")
    for name, count in (("n_records", n_records), ("n_sites", n_sites)):
        _require(name, count, isinstance(count, int | np.integer) and count > 0, "a whole number > 0")
    asked = learner(epsilon=epsilon, delta=delta, **settings)
    if asked.neighbours == "add-remove":
        asked.set_params(public_size=n_records)
    check_settings(asked)
    _require("epsilon", epsilon, math.isfinite(epsilon), "finite")
    _require("mechanism", asked.mechanism, asked.mechanism != "matrix", "'objective', 'output' or 'generalized'")
    _require("curvature", curvature, curvature is None or curvature > 0, "a number > 0, or left out")
    source = Noise(seed=seed).open()
    if public is None:
        fits = isinstance(n_features, int | np.integer) and n_features > 0
        _require("n_features", n_features, fits, "a whole number > 0, or public data must be given")
        facts = _isotropic(asked, int(n_features or 0) + bool(asked.fit_intercept), curvature, signal)
    else:
        facts = _from_public(asked, *public, source)
        found = len(facts.second_moment) - bool(asked.fit_intercept)
        _require("n_features", n_features, n_features in (None, found), f"{found}, as many as the public data has")
    planner = _Planner(facts, asked, failure)
    grid = [float(f"{epsilon * factor:.12g}") for factor in GRID]
    rows = [planner.expect(n_records, n_sites, source, epsilon=one) for one in grid]
    alone = planner.expect(n_records, 1, source) if n_sites > 1 else rows[GRID.index(1.0)]
    return Advice(tuple(rows), alone, float(target), planner)


def read_public(path: str | os.PathLike[str], label: str) -> tuple[Array, Array]:
    """Encode a file of public records by its own bounds and categories, which only public records may reveal."""
    table = read_table(path)
    if label not in table.column_names:
        raise SettingsError(
            f"The public file {str(path)!r} has no column {label!r} to learn. Nothing was computed. "
            f"Name one of {table.column_names}."
        )
    columns: list[Numeric | Categorical] = []
    for name in table.column_names:
        texts = pc.utf8_trim_whitespace(pc.cast(table[name], pa.string()))
        texts = pc.if_else(pc.equal(texts, ""), None, texts)
        if name == label:
            classes = pc.unique(texts.drop_null()).sort().to_pylist()
            continue
        try:
            numbers = pc.min_max(pc.cast(texts, pa.float64())).as_py()
        except pa.ArrowInvalid:
            columns.append(Categorical(name, pc.unique(texts.drop_null()).sort().to_pylist(), missing="ignore"))
        else:
            if numbers["min"] != numbers["max"]:  # a constant says nothing
                columns.append(Numeric(name, numbers["min"], numbers["max"], missing="middle"))
    X, y, _ = Schema(columns, label, classes=classes).encode(table)
    return X, y


def _require(name: str, value: object, fits: bool, must: str) -> None:
    if not fits:
        raise SettingsError(f"The {name!r} parameter of plan must be {must}. Got {value!r} instead.")


def _isotropic(learner: Linear, dimension: int, curvature: float | None, signal: float) -> _Facts:
    """Return the facts of a quadratic loss that bends equally in all directions."""
    largest = learner._loss(2).curvature
    bend = largest / dimension if curvature is None else curvature
    best = np.full(dimension, signal)
    one = np.eye(dimension)
    return _Facts(
        hessian=lambda f: bend * one,
        gradients=bend * one,  # of a well-specified model
        second_moment=bend / largest * one,
        model=lambda ridge, linear: (bend * best - (0.0 if linear is None else linear)) / (bend + ridge),
        loss=lambda f: bend / 2 * float(np.sum(np.square(f - best))),
    )


def _from_public(learner: Linear, X: Any, y: ArrayLike, source: Source) -> _Facts:
    """Return the facts that the public records show, all of them at the learner's own scaling."""
    task, _, classes = classification_task(clone(learner).set_params(unit="record"), X, y, None)
    if len(classes) != 2:
        raise SettingsError(
            f"Advice was asked for with public data of {len(classes)} classes, but is known for two. Nothing was "
            "computed. Plan for one class against the others."
        )
    some = np.sort(source.permutation(task.n_records)[:MOST_PUBLIC])
    rows = task.X[some].toarray() if hasattr(task.X, "toarray") else task.X[some]
    labels, loss, ridge = np.asarray(task.y)[some], task.loss, learner.regularization

    def fitted(lam: float, linear: Array | None = None, keep: Any = slice(None)) -> Array:
        part = labels[keep]
        pull = None if linear is None else len(part) * linear
        found = solve(rows[keep], part, loss, regularization=len(part) * lam, tolerance=1e-7 * len(part), linear=pull)
        return np.asarray(found.coef, np.float64)

    def error(f: Array, keep: Any = slice(None)) -> float:
        return float(np.mean((rows[keep] @ f > 0) != (labels[keep] > 0)))

    def hessian(f: Array) -> Array:
        return np.asarray((rows.T * loss.bend(rows @ f, labels)) @ rows / len(rows))

    model = fitted(ridge)
    slopes = loss.slope(rows @ model, labels)[:, None] * rows
    folds = np.arange(len(rows)) % FOLDS
    held_out = [error(fitted(ridge, keep=folds != k), folds == k) for k in range(FOLDS) if (folds == k).any()]
    return _Facts(
        hessian=hessian,
        gradients=np.atleast_2d(np.cov(slopes, rowvar=False, bias=True)),
        second_moment=rows.T @ rows / len(rows),
        model=fitted,
        loss=lambda f: float(np.mean(loss.value(rows @ f, labels))),
        error=error,
        exact_error=float(np.mean(held_out)),
    )


@dataclass(frozen=True)
class _Planner:
    """Turn what `plan_linear` would draw into what it does to the result."""

    facts: _Facts
    learner: Linear
    failure: float

    def noise(self, n_records: int, **settings: float) -> _Noise:
        """Return the noise that training on so many records would draw, as the learner itself decides it."""
        learner = clone(self.learner).set_params(**settings)
        if learner.neighbours == "add-remove":
            learner.set_params(public_size=n_records)
        n_units = n_records // learner.records_per_person if learner.unit == "person" else n_records
        nothing = np.zeros(0)
        task = LinearTask(
            None, None, nothing, None, learner._loss(2), len(self.facts.second_moment), n_records, max(1, n_units)
        )
        return _Noise(plan_linear(learner, task), task.loss, n_records, task.dimension)

    def expect(self, n_records: int, n_sites: int, source: Source | None = None, **settings: float) -> Expectation:
        """Return what to expect; by simulation too if there are public records and a source to draw from."""
        facts, noise = self.facts, self.noise(n_records, **settings)
        exact, ridged = facts.model(self.learner.regularization, None), facts.model(noise.ridge, None)
        hessian = facts.hessian(ridged)
        inverse = linalg.inv(hessian + noise.ridge * np.eye(noise.dimension))
        sampled = inverse @ facts.gradients @ inverse / n_records
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
            bound=self.bound(noise, exact),
            noise_bound=noise.bound(self.failure / 2),
        )
        if facts.error is None or source is None:
            return answer
        root = np.real(linalg.sqrtm(facts.gradients)) / math.sqrt(n_records)
        draws = [
            np.mean([noise.simulated(facts, root, inverse, source) for _ in range(n_sites)], axis=0)
            for _ in range(max(5, PAIRS // n_sites))
        ]
        # What a draw does to first order has a known mean and explains most of what it does; only the rest is noise.
        known = np.array([shift @ hessian @ shift / 2 for _, _, shift in draws])
        surplus = known - (answer.sampling_loss + answer.noise_loss)

        def mean(values: Array) -> float:
            slope = float(np.cov(values, known)[0, 1] / known.var(ddof=1))
            return float(np.mean(values - slope * surplus))

        errors = np.array([[facts.error(f) for f in pair] for *pair, _ in draws])
        losses = np.array([[facts.loss(f) for f in pair] for *pair, _ in draws])
        held_out = facts.exact_error or 0.0
        # Only the added error is measured on the records that made the model; its level comes from held-out ones.
        return replace(
            answer,
            simulated_loss=mean(losses.mean(axis=1)) - facts.loss(exact),
            error=min(1.0, max(0.0, held_out + mean(errors.mean(axis=1)) - facts.error(exact))),
            error_spread=float(errors.std(ddof=1)),
            exact_error=held_out,
        )

    def bound(self, noise: _Noise, reference: Array) -> float:
        """Return the worst case for one site, over all data; an average of such sites is no worse, by convexity.

        Sridharan et al. 2008 as used by Hamm et al. 2016, theorem 4; algorithms.md, section I.
        """
        sampling = 16 * (32 + math.log(2 / self.failure)) * noise.loss.lipschitz**2 / (noise.ridge * noise.n_records)
        return noise.ridge / 2 * float(reference @ reference) + sampling + 2 * noise.bound(self.failure / 2)

    def required_n(self, target: float, n_sites: int, *, worst_case: bool) -> float:
        """Return the least n from which on the excess loss stays below `target`; infinity beyond `LARGEST_N`."""
        reference = self.facts.model(self.learner.regularization, None)

        def reached(n_records: int) -> bool:
            if not worst_case:
                return self.expect(n_records, n_sites).excess_loss <= target
            # The bound may choose its regularisation; the estimate is of the learner as it is.
            planned = (self.noise(n_records, regularization=float(ridge)) for ridge in np.geomspace(1, 1e-7, 15))
            return any(self.bound(noise, reference) <= target for noise in planned)

        # From above: with very few records the ridge alone can hold a model at zero, and its loss low.
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
class _Noise:
    """The planned noise of one site's training, seen from the mean objective."""

    plan: LinearPlan
    loss: Loss
    n_records: int
    dimension: int

    @property
    def ridge(self) -> float:
        return self.plan.regularization / self.n_records

    @property
    def in_objective(self) -> bool:
        return isinstance(self.plan.noise, Objective)

    @property
    def normal(self) -> bool:
        return isinstance(self.plan.noise, Gaussian | ObjectiveGaussian)

    def covariance(self, inverse: Array) -> Array:
        """Return the covariance that the noise gives the model, to first order; `inverse` is the inverse Hessian."""
        event: Any = self.plan.noise
        # A vector of density exp(-|b|/scale) has variance (D + 1) scale² per coordinate (algorithms.md 0.3).
        variance = event.sigma**2 if self.normal else (self.dimension + 1) * event.scale**2
        spread = inverse @ inverse / self.n_records**2 if self.in_objective else np.eye(self.dimension)
        assert self.plan.closing is not None  # where there is noise, there is closing noise
        return np.asarray(variance * spread + 2 * self.plan.closing.scale**2 * np.eye(self.dimension))

    def bound(self, failure: float) -> float:
        """Return how far the noise can lift the regularised objective, but for that probability: T of section I."""
        event: Any = self.plan.noise
        if self.normal:
            radius = event.sigma * math.sqrt(2 * special.gammainccinv(self.dimension / 2, failure))
        else:
            radius = event.scale * special.gammainccinv(self.dimension, failure)
        if self.in_objective:
            return float(radius**2 / (self.n_records**2 * self.ridge))
        return float((self.loss.curvature + self.ridge) / 2 * radius**2)

    def simulated(self, facts: _Facts, root: Array, inverse: Array, source: Source) -> tuple[Array, Array, Array]:
        """Return two models as trained on other records like the public ones, with noise as planned, and their shift.

        The second has the first one's draws with the sign reversed, which are as likely: what is linear in the noise
        cancels from their mean. The shift is what the draws do to first order.
        """
        event: Any = self.plan.noise
        pull = root @ source.normal(self.dimension)
        drawn = (gaussian if self.normal else l2_laplace)(self.dimension, event=event, source=source)
        if self.in_objective:
            pull, drawn = pull + drawn / self.n_records, np.zeros(self.dimension)
        return facts.model(self.ridge, pull) + drawn, facts.model(self.ridge, -pull) - drawn, drawn - inverse @ pull


@dataclass(frozen=True)
class Advice:
    """Expectations over a grid of epsilons; prints as a table and a sentence."""

    rows: tuple[Expectation, ...]
    alone: Expectation  # one site at the asked epsilon
    target: float
    _planner: _Planner

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
        raise SettingsError(f"The 'epsilon' of a row must be one of {known}. Got {epsilon!r} instead.")

    def required_n(self, target: float, *, worst_case: bool = False) -> float:
        """Return how many records each site needs for an excess loss of `target`, or infinity beyond 1e13.

        By the asymptotic estimate, or by the worst-case bound at its best regularisation.
        """
        _require("target", target, target > 0, "a number > 0")
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

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a required number beyond 1e13 is None."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "alone": self.alone.as_dict(),
            "target": self.target,
            "required_n": self.needed if math.isfinite(self.needed) else None,
            "required_n_worst_case": self.needed_worst_case if math.isfinite(self.needed_worst_case) else None,
            "sentence": self.sentence,
        }

    def __str__(self) -> str:
        public = self.alone.error is not None
        titles = ["epsilon", *(["error", "±"] if public else []), "excess loss", "noise/signal", "worst case"]
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
        widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in [titles, *cells]]
        if not public and not all(row.asymptotic for row in self.rows):
            lines.append("* the noise moves margins by more than 1: only the order of magnitude is meant")
        return "\n".join([*lines, "", self.sentence])


def _expected(row: Expectation) -> str:
    """Word an expectation, and that it is rough where it is."""
    if row.error is not None:
        return f"an error of about {row.error:.3f} ± {row.error_spread:.3f} (excess loss {row.expected_loss:.2g})"
    rough = "" if row.asymptotic else ", a rough figure because the noise moves margins by more than 1"
    return f"an excess loss of about {row.expected_loss:.2g}{rough}"


def _count(n: float) -> str:
    """Write a number of records with two digits, or that there is none."""
    return f"{float(f'{n:.2g}'):,.0f}" if math.isfinite(n) else "more than 10^13"
