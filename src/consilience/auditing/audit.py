"""Attack a learner's privacy and report the largest epsilon that an attack could prove.

An audit shows that a guarantee is false, or that a search for its failure came back empty; it never
shows that one is true (that is what docs/guarantees/ is for). Three attacks, each able to fail and
shown to in tests/test_mutations.py:

* ``"exact"`` takes noise and ridge from the plan that would be charged, writes the density of the
  released coefficients down from the definition of the loss, maximises the privacy loss over pairs
  of neighbouring data sets, and compares noise recovered from real trainings with the event that
  pays for it;
* ``"sample"`` trains many times on two neighbours and bounds epsilon by Clopper-Pearson; it looks
  inside nothing;
* `audit_samples` and the ``check_`` functions do the same for draws of a single mechanism.

Slopes and curvatures are written out here a second time, independent of learners/erm.py. All
records are made up.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, optimize, special, stats
from sklearn.base import clone
from threadpoolctl import threadpool_limits

from consilience.errors import SettingsError
from consilience.learners.erm import Huber, HuberHinge, Logistic, Softmax, solve
from consilience.learners.perturbation import LinearPlan, LinearTask
from consilience.privacy.accounting import L2Laplace, ObjectiveGaussian, ObjectiveL2Laplace, total
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.privacy.mechanisms import Noise, Source

Array = NDArray[Any]
Kind = Literal["exact", "sample"]

FALSE_ALARM = 1e-6  # of one check on a correct sampler
SLACK = 1e-6  # relative; covers the rounding of the attack itself, far below any real failure
CONFIDENCE = 0.999  # of a sampled lower bound
LARGEST_COEFFICIENT = 50.0
STEP = 1e-6  # of finite differences


@dataclass(frozen=True)
class Check:
    """One comparison of draws with the law they should follow."""

    name: str
    p_value: float

    @property
    def passed(self) -> bool:
        """Whether the draws are compatible with that law; false once in a million for a correct sampler."""
        return self.p_value >= FALSE_ALARM


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an attack found, beside what was claimed.

    ``epsilon_lower`` is proven (exact) or holds with confidence 99.9 % (sample); ``delta_lower`` is
    the delta found at the claimed epsilon, where the claim has one. ``worst`` describes the pair of
    made-up data sets that did it.
    """

    attack: str
    claimed: Guarantee
    epsilon_lower: float
    delta_lower: float | None = None
    worst: str = ""
    checks: tuple[Check, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether neither the attack nor a check contradicts the claim."""
        return self.epsilon_lower <= self.claimed.epsilon * (1 + SLACK) and all(
            c.passed for c in self.checks
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "attack": self.attack,
            "passed": self.passed,
            "epsilon_lower": "inf" if math.isinf(self.epsilon_lower) else self.epsilon_lower,
            "delta_lower": self.delta_lower,
            "claimed": self.claimed.as_dict(),
            "worst": self.worst,
            "checks": [
                {"name": c.name, "p_value": c.p_value, "passed": c.passed} for c in self.checks
            ],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        verdict = (
            "PASSED: no attack reached the claim" if self.passed else "FAILED: the claim is false"
        )
        share = self.epsilon_lower / self.claimed.epsilon if self.claimed.epsilon else math.inf
        lines = [
            f"Audit ({self.attack}) {verdict}",
            f"  claimed   {self.claimed!r}",
            f"  found     epsilon >= {self.epsilon_lower:.6g} ({share:.1%} of the claim)",
        ]
        if self.delta_lower is not None:
            lines.append(f"            delta >= {self.delta_lower:.3g} at the claimed epsilon")
        lines += [f"  worst     {self.worst}"] if self.worst else []
        lines += [
            f"  {'ok' if c.passed else 'FAILED':<9} {c.name} (p = {c.p_value:.2g})"
            for c in self.checks
        ]
        return "\n".join(lines)


def audit(
    learner: Any,
    *,
    kind: Kind = "exact",
    n_records: int = 100,
    n_features: int = 2,
    restarts: int = 24,
    runs: int | None = None,
    random_state: int = 0,
    noise: Noise | None = None,
) -> AuditReport:
    """Attack `learner` on small made-up data sets and report the largest epsilon found; nobody's records are needed.

    Parameters
    ----------
    learner
        An unfitted (or fitted) private learner; a copy is attacked, with its own settings.
    kind
        ``"exact"`` for linear learners, ``"sample"`` for any.
    n_records
        Public number of records (of persons, for ``unit="person"``) of the attacked data sets.
    n_features
        Features of the exact attack, 1 to 3; with Gaussian noise in the objective it uses one.
    restarts
        Labels and multiplicities tried by the exact attack; each starts from the best of 48 random
        points.
    runs
        Trainings per data set (sample; default 4000), or trainings whose noise is recovered (exact;
        default 400).
    random_state
        Steers the search, never the noise.
    noise
        ``Noise(seed=...)`` makes a run repeatable; the default is real noise.

    Examples
    --------
    >>> from consilience.learners.linear import PrivateLogisticRegression
    >>> audit(PrivateLogisticRegression(epsilon=1.0), restarts=2, runs=50).passed
    True
    """
    begun = time.perf_counter()
    if kind not in ("exact", "sample"):
        raise SettingsError(
            f"The 'kind' parameter of audit must be 'exact' or 'sample'. Got {kind!r} instead."
        )
    source = (Noise() if noise is None else noise).open()
    with threadpool_limits(
        limits=1, user_api="blas"
    ):  # many tiny problems: threads would only wait for each other
        if kind == "sample":
            report = _sample(learner, n_records, 4000 if runs is None else runs, source)
        else:
            runs = 400 if runs is None else runs
            report = _exact(learner, n_records, n_features, restarts, runs, random_state, source)
    return replace(report, seconds=time.perf_counter() - begun)


# --------------------------------------------------------------------------------------------------- what is attacked


def _twin(learner: Any, n_records: int) -> Any:
    twin = clone(learner).set_params(noise=None)
    if twin.neighbours == "add-remove" and getattr(twin, "public_size", 1) is None:
        twin.set_params(public_size=n_records)
    return twin


def _planned(twin: Any, X: Array, y: Array, persons: Array | None) -> tuple[Any, Any]:
    """Return the task and plan that the learner's own code makes of these records, stopping before the charge."""
    caught: list[Any] = []
    twin._fit = lambda task, *_: caught.append(task)
    try:
        if persons is None:
            twin.fit(X, y)
        else:
            twin.fit(X, y, persons=persons)
    finally:
        del twin._fit
    plan = twin._plan(caught[0])
    if not plan.events:
        raise SettingsError(
            "An audit needs a claim to attack, but this learner promises nothing (epsilon=inf)."
        )
    return caught[0], plan


def _records_per_unit(learner: Any) -> int:
    return int(learner.records_per_person) if getattr(learner, "unit", "record") == "person" else 1


def _labels(learner: Any, n: int) -> Array:
    """Return n made-up labels that show every declared class."""
    if hasattr(learner, "label_bound"):
        return np.resize(np.array([-1.0, 1.0]) * learner.label_bound, n)
    classes = (
        np.array([0, 1])
        if getattr(learner, "classes", None) is None
        else np.asarray(learner.classes)
    )
    return np.resize(classes, n)


def _exact(
    learner: Any,
    n_records: int,
    n_features: int,
    restarts: int,
    runs: int,
    random_state: int,
    source: Source,
) -> AuditReport:
    if not hasattr(learner, "mechanism") or not hasattr(learner, "fit_intercept"):
        raise SettingsError(
            "kind='exact' attacks linear learners. Nothing was trained. Use kind='sample'."
        )
    twin = _twin(learner, n_records)
    rest = Noise(seed=random_state).open(stream=1)
    # Rows far beyond the declared norm: what comes back is what the learner really lets into its
    # objective.
    X = rest.normal(n_records * n_features).reshape(n_records, -1) * 1e6 * twin.data_norm
    persons = np.arange(n_records) if twin.unit == "person" else None
    task, plan = _planned(twin, X, _labels(twin, n_records), persons)
    if not isinstance(plan, LinearPlan):
        raise SettingsError(
            "kind='exact' attacks linear learners. Nothing was trained. Use kind='sample'."
        )
    checks = _accounted(twin, plan) + (_recovered(twin, task, plan, runs, source) if runs else ())
    if isinstance(plan.noise, ObjectiveGaussian) and task.dimension > 1:
        narrow = twin.set_params(fit_intercept=False)
        task, plan = _planned(narrow, X[:, :1], _labels(twin, n_records), persons)
    reach = max(1.0, float(np.sqrt(np.square(task.X).sum(axis=1)).max()))
    space = _Space(task, plan, reach, n_records, twin.neighbours, _records_per_unit(twin), rest)
    event = plan.noise
    assert event is not None
    claimed = event.guarantee.convert(twin.neighbours)
    log_delta: Callable[[float], float] | None = None
    if isinstance(event, ObjectiveL2Laplace):
        attack = "exact density"
        epsilon, pair, point = _search(space, _Pair.loss, restarts, n_coef=task.dimension_of_noise)
    elif isinstance(event, ObjectiveGaussian):
        attack, wide = (
            "exact profile",
            task.dimension_of_noise > 1,
        )  # two coefficients cost a hundred times one
        tries, starts, polish = (max(1, restarts // 4), 12, 8) if wide else (restarts, 48, 40)
        _, pair, point = _search(
            space,
            lambda pair, x: pair.log_delta(x, claimed.epsilon),
            tries,
            starts=starts,
            polish=polish,
        )
        log_delta = lambda e: float(pair.log_delta(point[None], e)[0])  # noqa: E731
    else:
        attack = "sensitivity"
        shift, pair, point = _search(
            space, _Pair.shift, min(restarts, max(4, restarts // 4)), starts=12, polish=20
        )
        epsilon = shift / event.scale if isinstance(event, L2Laplace) else 0.0
        if not isinstance(event, L2Laplace):
            log_delta = partial(_gaussian_log_delta, mu=shift / event.sigma)
    delta = None
    if log_delta is not None:
        epsilon, delta = _crossing(log_delta, claimed), math.exp(log_delta(claimed.epsilon))
    return AuditReport(
        attack=attack,
        claimed=claimed,
        epsilon_lower=epsilon,
        delta_lower=delta,
        worst=pair.tell(point),
        checks=checks,
    )


def _gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Return ln δ of a shift by mu standard deviations (Balle & Wang 2018, eq. 6), written apart from accounting."""
    delta = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(
        -mu / 2 - epsilon / mu
    )
    return math.log(max(float(delta), 1e-300))


def _crossing(log_delta: Callable[[float], float], claimed: Guarantee) -> float:
    """Return the epsilon at which the found profile has the claimed delta: the least epsilon that is still possible."""
    target = math.log(claimed.delta)
    if log_delta(0.0) <= target:
        return 0.0
    high = claimed.epsilon
    while log_delta(high) > target:
        high *= 2
        if high > 500:  # e^ε would leave the floating-point numbers: as good as no privacy
            return math.inf
    return float(optimize.brentq(lambda e: log_delta(e) - target, 0.0, high, xtol=1e-12))


def _accounted(learner: Any, plan: LinearPlan) -> tuple[Check, ...]:
    """Check what needs no attack: events under the claimed unit and relation that cost no more than was asked."""
    whole = total(plan.events)
    same = all((e.unit, e.neighbours) == (learner.unit, learner.neighbours) for e in plan.events)
    fits = whole.epsilon <= learner.epsilon * (1 + 1e-9) and whole.delta <= learner.delta * (
        1 + 1e-9
    )
    return (
        Check("events are charged under the claimed unit and neighbours", float(same)),
        Check("events cost at most the epsilon and delta asked for", float(fits)),
    )


# --------------------------------------------------------------------------------------------- losses, a second time


def _slopes_and_bends(loss: Any, z: Array, y: Array) -> tuple[Array, Array]:
    """Return ℓ' as (batch, record, output) and ℓ'' as (batch, record, output, output) at the outputs z."""
    if isinstance(loss, Softmax):
        p = special.softmax(z, axis=2)
        own = y[:, None] == np.arange(loss.n_classes)
        return p - own, p[..., None] * np.eye(loss.n_classes) - p[..., None] * p[..., None, :]
    y = y[:, None]
    if isinstance(loss, Logistic):
        slope, bend = -y * special.expit(-y * z), special.expit(z) * special.expit(-z)
    elif isinstance(loss, HuberHinge):
        short = 1 + loss.h - y * z
        slope = -y * np.clip(short / (2 * loss.h), 0, 1)
        bend = ((short >= 0) & (short <= 2 * loss.h)) / (2 * loss.h)
    elif isinstance(loss, Huber):
        slope, bend = (
            np.clip(z - y, -loss.threshold, loss.threshold),
            (np.abs(z - y) <= loss.threshold).astype(float),
        )
    else:
        raise SettingsError(
            f"The audit knows no loss {type(loss).__name__}. Write its derivatives down here first."
        )
    return slope, bend[..., None]


def _basis(loss: Any) -> Array:
    """Return orthonormal coordinates of the outputs' subspace in which gradients and minima lie."""
    return np.asarray(linalg.helmert(loss.n_outputs)) if loss.n_outputs > 1 else np.ones((1, 1))


def _gradient_and_hessian(
    task: LinearTask, plan: LinearPlan, coef: Array, X: Array, y: Array, copies: Array
) -> tuple[Array, Array]:
    """Return both for a batch of problems, flattened: coef (batch, coordinate of `_basis`, d), X (batch, record, d)."""
    (batch, m, d), basis = coef.shape, _basis(task.loss)
    slope, bend = _slopes_and_bends(task.loss, X @ (coef.swapaxes(1, 2) @ basis), y)
    gradient = (copies[:, None] * (slope @ basis.T)).swapaxes(1, 2) @ X
    bend = copies[:, None] * (basis @ bend @ basis.T).reshape(batch, len(y), m * m)
    square = (X[..., None] * X[..., None, :]).reshape(batch, len(y), d * d)
    hessian = (
        (bend.swapaxes(1, 2) @ square)
        .reshape(batch, m, m, d, d)
        .swapaxes(2, 3)
        .reshape(batch, m * d, m * d)
    )
    fixed = plan.regularization * np.eye(m * d) + (0.0 if plan.matrix is None else plan.matrix)
    return gradient.reshape(batch, m * d) + coef.reshape(batch, m * d) @ fixed, hessian + fixed


# ------------------------------------------------------------------------------------------------- pairs of data sets


@dataclass(frozen=True)
class _Space:
    """All pairs of neighbouring data sets that the attack may try."""

    task: LinearTask
    plan: LinearPlan
    reach: float
    n_records: int
    neighbours: str
    moved: int
    source: Source

    def pairs(self) -> Iterator[_Pair]:
        """Yield pairs without end: labels, multiplicities and who has the extra unit, drawn at random."""
        room = max(0, self.n_records - 1)
        for groups in itertools.cycle(range(min(3, room) + 1)):
            # Numbers of equal records, log-uniform; all records not mentioned are zero rows, which
            # move nothing.
            copies = np.floor(
                np.exp(self.source.uniform(groups) * math.log(room // max(groups, 1) + 1))
            )
            first, second = self.moved, self.moved
            if self.neighbours == "add-remove":
                first, second = (self.moved, 0) if self.source.words(1)[0] % 2 else (0, self.moved)
            labels = self._labels(groups + first + second)
            yield _Pair(
                self, np.concatenate([copies, np.ones(first + second)]), labels, groups, first
            )

    def _labels(self, n: int) -> Array:
        words = self.source.words(n)
        if isinstance(self.task.loss, Softmax):
            return np.asarray(words % np.uint64(self.task.loss.n_classes), dtype=np.int64)
        if isinstance(self.task.loss, Huber):
            return (
                np.round(2 * self.source.uniform(n) - 1, 2)
                if words[:1] % 2
                else np.where(words & 2, 1.0, -1.0)
            )
        return np.where(words % 2, 1.0, -1.0)


@dataclass(frozen=True)
class _Pair:
    """Two neighbours with fixed labels: `shared` groups of records, then the first's own, then the second's own.

    A point of the search holds a row for each record, shrunk into the ball, and perhaps
    coefficients.
    """

    space: _Space
    copies: Array
    labels: Array
    shared: int
    first: int

    @property
    def _sides(self) -> tuple[Array, Array]:
        index = np.arange(len(self.labels))
        own = (index >= self.shared) & (index < self.shared + self.first)
        return (index < self.shared) | own, ~own

    @property
    def n_row_entries(self) -> int:
        return len(self.labels) * self.space.task.dimension

    def rows(self, points: Array) -> Array:
        entries = points[:, : self.n_row_entries].reshape(len(points), len(self.labels), -1)
        lengths = np.sqrt(np.square(entries).sum(axis=2, keepdims=True))
        return np.asarray(entries * (self.space.reach / np.maximum(1.0, lengths)))

    def derivatives(self, coef: Array, X: Array) -> Iterator[tuple[Array, Array]]:
        """Yield gradient and Hessian of the first data set's objective, then of the second's."""
        for side in self._sides:
            space = self.space
            yield _gradient_and_hessian(
                space.task, space.plan, coef, X[:, side], self.labels[side], self.copies[side]
            )

    def loss(self, points: Array) -> Array:
        """Return log p(θ|first) - log p(θ|second) for p ∝ exp(-‖b‖/s)·det J, where θ is the minimum that b leads to."""
        event: Any = self.space.plan.noise
        coef = points[:, self.n_row_entries :].reshape(len(points), -1, self.space.task.dimension)
        logs = [
            np.linalg.slogdet(hessian)[1] - np.sqrt(np.square(gradient).sum(axis=1)) / event.scale
            for gradient, hessian in self.derivatives(coef, self.rows(points))
        ]
        return np.asarray(logs[0] - logs[1])

    def log_delta(self, points: Array, epsilon: float) -> Array:
        """Return ln of the hockey-stick divergence at epsilon, for Gaussian b and one or two coefficients.

        With one coefficient b is a monotone function of it, and cells of a grid have exact
        probabilities: a true lower bound. With two (three classes, one feature) the integral is a
        midpoint sum.
        """
        event: Any = self.space.plan.noise
        n_coef, sigma, X = self.space.task.dimension_of_noise, event.sigma, self.rows(points)
        slopes = float(self.copies.sum()) * self.space.task.loss.lipschitz * self.space.reach
        edge = math.asinh((9 * sigma + slopes) / self.space.plan.regularization)
        steps = np.linspace(-edge, edge, 4001 if n_coef == 1 else 101)
        grid = np.sinh(steps if n_coef == 1 else (steps[1:] + steps[:-1]) / 2)
        nodes = np.stack([axis.ravel() for axis in np.meshgrid(*[grid] * n_coef)], axis=1)
        answers = []
        for rows in X:
            mass = []
            wide = np.broadcast_to(rows, (len(nodes), *rows.shape))
            for gradient, hessian in self.derivatives(nodes[:, :, None], wide):
                if n_coef == 1:
                    t = gradient[:, 0] / sigma
                    below, above = special.ndtr(t), special.ndtr(-t)
                    mass.append(np.where(t[1:] < 0, np.diff(below), -np.diff(above)))
                else:
                    cells = np.prod(
                        np.meshgrid(*[np.diff(np.sinh(steps))] * n_coef), axis=0
                    ).ravel()
                    density = np.exp(-np.square(gradient).sum(axis=1) / (2 * sigma**2)) / (
                        2 * math.pi * sigma**2
                    )
                    mass.append(density * np.linalg.det(hessian) * cells)
            answers.append(np.maximum(mass[0] - math.exp(epsilon) * mass[1], 0).sum())
        return np.asarray(np.log(np.maximum(answers, 1e-300)))

    def shift(self, points: Array) -> Array:
        """Return how far apart the two minima are, as the project's own solver finds them."""
        task, plan = self.space.task, self.space.plan
        answers = []
        for rows in self.rows(points):
            minima = []
            for side in self._sides:
                copies = self.copies[side].astype(int)
                X, y = np.repeat(rows[side], copies, axis=0), np.repeat(self.labels[side], copies)
                settings = {"regularization": plan.regularization, "tolerance": plan.tolerance}
                minima.append(solve(X, y, task.loss, matrix=plan.matrix, **settings).coef)
            answers.append(np.linalg.norm(np.asarray(minima[0] - minima[1], dtype=np.float64)))
        return np.asarray(answers)

    def tell(self, point: Array) -> str:
        """Describe the pair in words."""
        rows = self.rows(point[None])[0]
        texts = [
            f"{f'{int(m)} x ' if m > 1 else ''}({', '.join(f'{v:.3g}' for v in row)}; {label:g})"
            for row, label, m in zip(rows, self.labels, self.copies, strict=True)
        ]
        own = self.shared + self.first
        groups = [
            ", ".join(part) or "nothing"
            for part in (texts[: self.shared], texts[self.shared : own], texts[own:])
        ]
        coef = ", ".join(f"{v:.3g}" for v in point[self.n_row_entries :])
        at = f" at coefficients ({coef})" if coef else ""
        return f"(row; label) {groups[1]} against {groups[2]}; both also hold {groups[0]}, the rest zero rows{at}"


def _search(
    space: _Space,
    value: Callable[[_Pair, Array], Array],
    restarts: int,
    *,
    n_coef: int = 0,
    starts: int = 48,
    polish: int = 200,
) -> tuple[float, _Pair, Array]:
    """Maximise `value` over pairs and points: random starts, then L-BFGS-B from the best of each pair."""
    results: list[tuple[float, _Pair, Array]] = []
    for pair in itertools.islice(space.pairs(), max(1, restarts)):
        n_rows = pair.n_row_entries
        points = space.source.normal(starts * (n_rows + n_coef)).reshape(starts, -1)
        points[:, n_rows:] *= 0.1 * np.exp(math.log(100.0) * space.source.uniform(starts))[:, None]
        bounds = [(-3.0, 3.0)] * n_rows + [(-LARGEST_COEFFICIENT, LARGEST_COEFFICIENT)] * n_coef
        steps = np.vstack([np.zeros(n_rows + n_coef), STEP * np.eye(n_rows + n_coef)])

        def climb(x: Array, pair: _Pair = pair, steps: Array = steps) -> tuple[float, Array]:
            values = value(pair, x + steps)
            return -float(values[0]), (values[0] - values[1:]) / STEP

        start = points[int(np.argmax(value(pair, points)))]
        end = optimize.minimize(
            climb, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": polish}
        )
        # A kinked loss may end the climb worse than it began.
        results += [(float(value(pair, x[None])[0]), pair, x) for x in (start, np.asarray(end.x))]
    return max(results, key=lambda result: result[0])


# -------------------------------------------------------------------------------------------------------- real draws


def _recovered(
    learner: Any, task: LinearTask, plan: LinearPlan, runs: int, source: Source
) -> tuple[Check, ...]:
    """Train `runs` times, work out the noise from the published coefficients, and compare it with the charged event."""
    event: Any = plan.noise
    problems = [task]
    if task.n_problems > 1:
        problems = [
            replace(task, y=np.where(task.y == code, 1.0, -1.0)) for code in range(task.n_problems)
        ]
    basis = _basis(task.loss)
    published = np.empty((runs, len(problems), task.loss.n_outputs, task.dimension))
    for run in range(runs):
        learner._train(task, plan, source)
        coef = np.atleast_2d(learner.coef_) * learner.data_norm
        if learner.fit_intercept:
            coef = np.column_stack([coef, np.atleast_1d(learner.intercept_)]) * math.sqrt(2)
        published[run] = (coef / getattr(learner, "label_bound", 1.0)).reshape(published[run].shape)
    drawn = []
    for index, problem in enumerate(problems):
        coef = basis @ published[:, index]
        if isinstance(event, ObjectiveL2Laplace | ObjectiveGaussian):
            X = np.broadcast_to(problem.X, (runs, *problem.X.shape))
            noise = -_gradient_and_hessian(
                problem, plan, coef, X, problem.y, np.ones(len(problem.y))
            )[0]
        else:
            ridge: dict[str, Any] = {"regularization": plan.regularization, "matrix": plan.matrix}
            exact = solve(
                problem.X, problem.y, problem.loss, tolerance=plan.tolerance, **ridge
            ).coef
            noise = (coef - basis @ exact.reshape(-1, task.dimension).astype(np.float64)).reshape(
                runs, -1
            )
        drawn.append(noise)
    together = np.concatenate(drawn)
    sigma = getattr(event, "sigma", None)
    checks = (
        check_radial(together, scale=event.scale)
        if sigma is None
        else check_gaussian(together, sigma=sigma)
    )
    checks = tuple(replace(c, name=f"recovered noise: {c.name}") for c in checks)
    if len(problems) > 1:
        agree = int((np.sign(drawn[0]) == np.sign(drawn[1])).sum())
        p_value = stats.binomtest(agree, drawn[0].size).pvalue
        checks += (Check("recovered noise: classes have noise of their own", float(p_value)),)
    return checks


def check_radial(draws: ArrayLike, *, scale: float) -> tuple[Check, ...]:
    """Compare vectors (draw, coordinate) with the density ∝ exp(-‖b‖/scale): Gamma radius, uniform direction."""
    b = np.asarray(draws, dtype=np.float64)
    radius = np.sqrt(np.square(b).sum(axis=1))
    size = Check(
        "radius is Gamma",
        float(stats.kstest(radius, stats.gamma(b.shape[1], scale=scale).cdf).pvalue),
    )
    return (size, *_check_direction(b, radius))


def check_gaussian(draws: ArrayLike, *, sigma: float) -> tuple[Check, ...]:
    """Compare vectors (draw, coordinate) with independent N(0, sigma²)."""
    b = np.asarray(draws, dtype=np.float64)
    radius = np.sqrt(np.square(b).sum(axis=1))
    size = Check(
        "radius is chi", float(stats.kstest(radius, stats.chi(b.shape[1], scale=sigma).cdf).pvalue)
    )
    return (size, *_check_direction(b, radius))


def _check_direction(b: Array, radius: Array) -> tuple[Check, ...]:
    positive = int((b > 0).sum())  # coordinates of a uniform direction have independent signs
    signs = Check("signs are even", float(stats.binomtest(positive, b.size).pvalue))
    if b.shape[1] == 1:
        return (signs,)
    share = np.square(b[:, 0] / np.where(radius > 0, radius, 1.0))
    beta = stats.beta(0.5, (b.shape[1] - 1) / 2)
    return signs, Check("direction is uniform", float(stats.kstest(share, beta.cdf).pvalue))


def check_frequencies(counts: ArrayLike, probabilities: ArrayLike) -> Check:
    """Compare counts of outcomes with their exact probabilities by chi-square; rare outcomes are counted together."""
    seen, expected = (
        np.asarray(counts, dtype=np.float64),
        np.asarray(probabilities, dtype=np.float64),
    )
    n = seen.sum()
    expected = expected * n
    rare = expected < 10
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], n - expected[~rare].sum())
    if expected[-1] < 10:  # too little is left for a cell of its own: the commonest takes it
        most = int(np.argmax(expected[:-1]))
        seen[most] += seen[-1]
        expected[most] += expected[-1]
        seen, expected = seen[:-1], expected[:-1]
    statistic = float((np.square(seen - expected) / expected).sum())
    return Check("frequencies are exact", float(stats.chi2.sf(statistic, max(1, len(seen) - 1))))


# -------------------------------------------------------------------------------------------------------- Monte Carlo


def _sample(learner: Any, n_records: int, runs: int, source: Source) -> AuditReport:
    """Train on two neighbours that differ in one extreme unit, and tell their published attributes apart."""
    twin = _twin(learner, n_records)
    person, moved = getattr(twin, "unit", "record") == "person", _records_per_unit(twin)
    y = _labels(twin, n_records + 1)
    sides: list[tuple[Array, Array, Array | None]] = []
    for label in (y[0], y[1]):
        X = np.zeros(
            (n_records - 1 + moved, 1)
        )  # one feature: noise in further ones would only hide
        X[:moved, 0] = getattr(twin, "data_norm", 1.0)
        labels = np.concatenate([np.repeat(label, moved), y[2 : n_records + 1]])
        ids = np.concatenate([np.zeros(moved, int), np.arange(1, n_records)])
        absent = moved if twin.neighbours == "add-remove" and sides else 0
        sides.append((X[absent:], labels[absent:], ids[absent:] if person else None))
    draws = []
    for X, labels, persons in sides:
        task, plan = _planned(twin, X, labels, persons)
        out = []
        for _ in range(runs):
            twin._train(task, plan, source)
            out.append(np.concatenate([np.ravel(part) for part in twin.released_state().values()]))
        draws.append(np.stack(out))
    claimed = total(plan.events).convert(Neighbours(twin.neighbours))
    report = audit_samples(draws[0], draws[1], claimed=claimed)
    pair = "its absence" if twin.neighbours == "add-remove" else "the same with another label"
    return replace(
        report, worst=f"a unit at the edge of the declared norm against {pair}: {report.worst}"
    )


def audit_samples(
    first: ArrayLike,
    second: ArrayLike,
    *,
    claimed: Guarantee,
    confidence: float = CONFIDENCE,
    n_events: int = 4,
) -> AuditReport:
    """Bound epsilon from below by outputs (run, coordinate) of a mechanism on two neighbouring inputs.

    Half of the runs choose the `n_events` most telling events: thresholds on coordinates, on the
    direction between the means, and on the distance from a mean. The other half counts them, by
    Clopper-Pearson at `confidence`, Bonferroni over events and over the two probabilities of each.
    """
    a, b = (
        np.asarray(x, dtype=np.float64).reshape(len(np.asarray(x)), -1) for x in (first, second)
    )
    half = min(len(a), len(b)) // 2
    middle, other = a[:half].mean(axis=0), b[:half].mean(axis=0)

    def views(x: Array) -> Array:
        far = [np.sqrt(np.square(x - centre).sum(axis=1)) for centre in (middle, other, 0 * middle)]
        return np.column_stack([x, x @ (other - middle), *far])

    (a_choose, a_count), (b_choose, b_count) = ((views(x[:half]), views(x[half:])) for x in (a, b))
    level = (1 - confidence) / (2 * n_events)
    candidates: list[tuple[float, int, float, bool, bool]] = []
    for view in range(a_choose.shape[1]):
        pooled = np.concatenate([a_choose[:, view], b_choose[:, view]])
        tails = np.concatenate(
            [np.geomspace(5 / half, 0.5, 40), 1 - np.geomspace(5 / half, 0.5, 40)]
        )
        for cut in np.unique(np.quantile(pooled, np.clip(tails, 0, 1))):
            for above in (False, True):
                hits = [int(_event(x[:, view], cut, above).sum()) for x in (a_choose, b_choose)]
                for swap in (False, True):
                    top, bottom = hits[::-1] if swap else hits
                    score = _log_ratio(top, bottom, half, half, level, claimed.delta)
                    candidates.append((score, view, float(cut), above, swap))
    best: tuple[float, str] = (0.0, "no event told them apart")
    for _, view, cut, above, swap in sorted(candidates, reverse=True)[:n_events]:
        hits = [int(_event(x[:, view], cut, above).sum()) for x in (a_count, b_count)]
        sizes = [len(a_count), len(b_count)]
        (top, bottom), (n_top, n_bottom) = (hits[::-1], sizes[::-1]) if swap else (hits, sizes)
        bound = _log_ratio(top, bottom, n_top, n_bottom, level, claimed.delta)
        if bound > best[0]:
            side = "above" if above else "at most"
            best = bound, f"output {side} {cut:.4g}: {top}/{n_top} runs against {bottom}/{n_bottom}"
    return AuditReport(attack="sample", claimed=claimed, epsilon_lower=best[0], worst=best[1])


def _event(values: Array, cut: float, above: bool) -> Array:
    return values > cut if above else values <= cut


def _log_ratio(
    top: int, bottom: int, n_top: int, n_bottom: int, level: float, delta: float
) -> float:
    """Return a lower confidence bound of ln((P - delta) / Q), zero where there is none."""
    least = float(special.betaincinv(top, n_top - top + 1, level)) if top else 0.0
    most = (
        float(special.betaincinv(bottom + 1, n_bottom - bottom, 1 - level))
        if bottom < n_bottom
        else 1.0
    )
    return max(0.0, math.log((least - delta) / most)) if least > delta else 0.0
