"""The exact attack on linear learners: the density of what is released, from its definition.

Noise and ridge come from the plan that would be charged. The attack writes down the density of the
released coefficients, maximises the privacy loss over pairs of neighbouring data sets, and compares
noise recovered from real trainings with the event that pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from consilience.auditing.along import AlongAxes, check_free_axes, plan_along
from consilience.auditing.attacked import (
    Learner,
    Table,
    copy_learner,
    make_labels,
    plan_training,
    records_per_unit,
)
from consilience.auditing.checks import check_gaussian, check_radial
from consilience.auditing.gradients import Shift, attack_gradients
from consilience.auditing.pairs import Pair, Space, gradient_and_hessian, output_basis, search
from consilience.auditing.report import AuditReport, Check
from consilience.auditing.sums import attack_sum
from consilience.errors import SettingsError
from consilience.learners.erm import Problem, solve
from consilience.learners.gradient import GradientPlan
from consilience.learners.linear import LinearLearner
from consilience.learners.perturbation import LinearPlan, LinearTask
from consilience.privacy.accounting import (
    Event,
    Gaussian,
    L2Laplace,
    Objective,
    ObjectiveGaussian,
    ObjectiveL2Laplace,
    total,
)
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.mechanisms import Noise, Source
from consilience.statistics.base import Statistic

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Search:
    """How hard an attack tries; every field is also a keyword of `audit`.

    Parameters
    ----------
    n_features
        Features of the exact attack, 1 to 3; with Gaussian noise in the objective it uses one.
    restarts
        Labels and multiplicities tried by the exact attack; each starts from the best of 48 random
        points.
    runs
        Trainings per data set (sample; default 4000), or trainings whose noise is recovered
        (exact; default 400).
    random_state
        Steers the search, never the noise.
    """

    n_features: int = 2
    restarts: int = 24
    runs: int | None = None
    random_state: int = 0


def attack_exactly(learner: Learner, n_records: int, effort: Search, source: Source) -> AuditReport:
    """Attack a linear learner, or a statistic, by the density of what it releases."""
    rest = Noise(seed=effort.random_state).open(stream=1)
    twin = copy_learner(learner, n_records)
    runs = 400 if effort.runs is None else effort.runs
    if isinstance(twin, Statistic):
        found, drawn, event = attack_sum(twin, runs, rest, source)
        checks = _check_accounting(twin, [event])
        attack = (
            "the noisy sum" if twin.sharing is None else "the sum, with all others' noise known"
        )
        return _report_shift(attack, found, event.guarantee, checks + drawn)
    if twin.projection is not None:
        assert isinstance(twin, LinearLearner)
        return _attack_along(twin, n_records, effort, source)
    table = _make_table(twin, n_records, effort.n_features, rest)
    task, plan = _plan_linear(twin, table)
    checks = _check_accounting(twin, plan.events)
    if isinstance(plan, GradientPlan):
        found, drawn = attack_gradients(twin, task, plan, effort.restarts, runs, source)
        return _report_shift("all noisy sums", found, plan.event.guarantee, checks + drawn)
    if runs:
        checks += _check_recovered_noise(twin, task, plan, runs, source)
    if isinstance(plan.noise, ObjectiveGaussian) and task.dimension > 1:
        # Its divergence is integrated on a grid, which is feasible for one feature.
        narrow = table._replace(X=table.X[:, :1])
        task, plan = _plan_linear(twin.set_params(fit_intercept=False), narrow)
        assert isinstance(plan, LinearPlan)
    reach = max(1.0, float(np.sqrt(np.square(task.X).sum(axis=1)).max()))
    space = Space(task, plan, reach, n_records, twin.neighbours, records_per_unit(twin), rest)
    return replace(_search_pairs(space, effort.restarts), checks=checks)


def _attack_along(
    twin: LinearLearner, n_records: int, effort: Search, source: Source
) -> AuditReport:
    """Attack a model along axes: behind axes that all know, or together with the site's own."""
    plan, rest = plan_along(twin, n_records), Noise(seed=effort.random_state).open(stream=1)
    checks = _check_accounting(twin, plan.events)
    behind = twin.behind_axes()
    if not plan.axes.events:
        checks += check_free_axes(twin, n_records, source)
        report = attack_exactly(behind, n_records, effort, source)
        return replace(report, checks=checks + report.checks)
    noise = plan.axes.noise
    if not (isinstance(noise, L2Laplace) and twin.mechanism == "objective"):
        raise SettingsError(
            "kind='exact' attacks a site's own axes and a model along them together where delta is "
            "0 and mechanism='objective'. Nothing was trained. Use kind='sample'."
        )
    behind = behind.set_params(fit_intercept=False)
    task, alone = _plan_linear(behind, _make_table(behind, n_records, 1, rest))
    assert isinstance(alone, LinearPlan)
    moved = records_per_unit(twin)
    space = Space(task, alone, 1.0, n_records, twin.neighbours, moved, rest)
    n_coef = task.dimension_of_noise
    epsilon, pair, point = search(space, AlongAxes(noise).loss, effort.restarts, n_coef=n_coef)
    return AuditReport(
        attack="exact density of axes and model",
        claimed=total(plan.events).convert(twin.neighbours),
        epsilon_lower=epsilon,
        worst=pair.describe(point),
        checks=checks,
    )


def _report_shift(
    attack: str, found: Shift, claimed: Guarantee, checks: tuple[Check, ...]
) -> AuditReport:
    """Report what the best attack on a Gaussian proves that a unit moves so far."""
    log_delta = partial(_gaussian_log_delta, mu=found.mu)
    return AuditReport(
        attack=attack,
        claimed=claimed,
        epsilon_lower=_crossing(log_delta, claimed),
        delta_lower=math.exp(log_delta(claimed.epsilon)),
        worst=found.what,
        checks=checks,
    )


def _make_table(twin: Learner, n_records: int, n_features: int, rest: Source) -> Table:
    """Return rows far beyond the declared norm.

    What comes back in the task is what the learner really lets into its objective.
    """
    norm = twin.get_params()["data_norm"]
    X = rest.normal(n_records * n_features).reshape(n_records, -1) * 1e6 * norm
    persons = np.arange(n_records) if twin.unit == "person" else None
    return Table(X, make_labels(twin, n_records), persons)


def _plan_linear(twin: Learner, table: Table) -> tuple[LinearTask, LinearPlan | GradientPlan]:
    task, plan = plan_training(twin, table)
    if not isinstance(plan, LinearPlan | GradientPlan):
        raise SettingsError(
            "kind='exact' attacks linear learners. Nothing was trained. Use kind='sample'."
        )
    return task, plan


def _search_pairs(space: Space, restarts: int) -> AuditReport:
    """Search the pair that tells most, in the way that suits the noise."""
    event, task = space.plan.noise, space.task
    assert event is not None
    claimed = event.guarantee.convert(space.neighbours)
    epsilon, delta = 0.0, None
    log_delta: Callable[[float], float] | None = None
    if isinstance(event, ObjectiveL2Laplace):
        attack = "exact density"
        epsilon, pair, point = search(space, Pair.loss, restarts, n_coef=task.dimension_of_noise)
    elif isinstance(event, ObjectiveGaussian):
        attack = "exact profile"
        wide = task.dimension_of_noise > 1  # two coefficients cost a hundred times as much as one
        tries, starts, polish = (max(1, restarts // 4), 12, 8) if wide else (restarts, 48, 40)

        def value(pair: Pair, points: Array) -> Array:
            return pair.log_delta(points, claimed.epsilon)

        _, pair, point = search(space, value, tries, starts=starts, polish=polish)
        log_delta = partial(_profile, pair, point)
    else:
        attack = "sensitivity"
        tries = min(restarts, max(4, restarts // 4))
        shift, pair, point = search(space, Pair.shift, tries, starts=12, polish=20)
        if isinstance(event, L2Laplace):
            epsilon = shift / event.scale
        else:
            log_delta = partial(_gaussian_log_delta, mu=shift / event.sigma)
    if log_delta is not None:
        epsilon, delta = _crossing(log_delta, claimed), math.exp(log_delta(claimed.epsilon))
    return AuditReport(
        attack=attack,
        claimed=claimed,
        epsilon_lower=epsilon,
        delta_lower=delta,
        worst=pair.describe(point),
    )


def _profile(pair: Pair, point: Array, epsilon: float) -> float:
    return float(pair.log_delta(point[None], epsilon)[0])


def _gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Return ln δ of a shift by mu standard deviations (Balle & Wang 2018, eq. 6).

    Written independently of privacy/accounting.py.
    """
    delta = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(
        -mu / 2 - epsilon / mu
    )
    return math.log(max(float(delta), 1e-300))


def _crossing(log_delta: Callable[[float], float], claimed: Guarantee) -> float:
    """Return the epsilon at which the found profile has the claimed delta.

    It is the least epsilon that is still possible.
    """
    target = math.log(claimed.delta)
    if log_delta(0.0) <= target:
        return 0.0
    high = claimed.epsilon
    while log_delta(high) > target:
        high *= 2
        if high > 500:  # e^ε would leave the floating-point numbers: as good as no privacy
            return math.inf
    return float(optimize.brentq(lambda e: log_delta(e) - target, 0.0, high, xtol=1e-12))


def _check_accounting(learner: Learner, events: Sequence[Event]) -> tuple[Check, ...]:
    """Check what needs no attack: that events are charged as claimed and cost what was asked."""
    # Of a share, what is asked for holds among others; what is attacked is the share alone.
    shared = isinstance(learner, Statistic) and learner.sharing is not None
    whole = total(learner.planned(1) if shared else events)
    same = all((e.unit, e.neighbours) == (learner.unit, learner.neighbours) for e in events)
    fits = whole.epsilon <= learner.total_epsilon * (1 + 1e-9) and whole.delta <= learner.delta * (
        1 + 1e-9
    )
    return (
        Check("events are charged under the claimed unit and neighbours", float(same)),
        Check("events cost at most the epsilon and delta asked for", float(fits)),
    )


# ------------------------------------------------------------------ noise of real trainings


def _check_recovered_noise(
    learner: Learner, task: LinearTask, plan: LinearPlan, runs: int, source: Source
) -> tuple[Check, ...]:
    """Train `runs` times and compare the noise in the coefficients with the charged event."""
    problems = [task]
    if task.n_problems > 1:
        problems = [
            replace(task, y=np.where(task.y == code, 1.0, -1.0)) for code in range(task.n_problems)
        ]
    published = np.empty((runs, len(problems), task.loss.n_outputs, task.dimension))
    for run in range(runs):
        learner._train(task, plan, source)
        published[run] = _coefficients_in_ball(learner).reshape(published[run].shape)
    drawn = [
        _recover_noise(problem, plan, published[:, index]) for index, problem in enumerate(problems)
    ]
    event, together = plan.noise, np.concatenate(drawn)
    assert event is not None
    checks = (
        check_gaussian(together, sigma=event.sigma)
        if isinstance(event, Gaussian | ObjectiveGaussian)
        else check_radial(together, scale=event.scale)
    )
    checks = tuple(replace(c, name=f"recovered noise: {c.name}") for c in checks)
    if len(problems) > 1:
        agree = int((np.sign(drawn[0]) == np.sign(drawn[1])).sum())
        p_value = stats.binomtest(agree, drawn[0].size).pvalue
        checks += (Check("recovered noise: classes have noise of their own", float(p_value)),)
    return checks


def _coefficients_in_ball(learner: Learner) -> Array:
    """Return the published coefficients in the coordinates of the unit ball, (output, feature).

    Written independently of the learner's own scaling.
    """
    settings, fitted = learner.get_params(deep=False), vars(learner)
    coef = np.atleast_2d(fitted["coef_"]) * settings["data_norm"]
    if settings["fit_intercept"]:
        scaling = settings["intercept_scaling"]
        constant = np.atleast_1d(fitted["intercept_"]) / scaling
        coef = np.column_stack([coef, constant]) * math.sqrt(1 + scaling**2)
    return np.asarray(coef / settings.get("label_bound", 1.0))


def _recover_noise(problem: LinearTask, plan: LinearPlan, published: Array) -> Array:
    """Return the noise behind published coefficients, (run, coordinate).

    At a minimum the gradient of the objective without noise is minus the noise; noise on the
    output is the distance to the exact minimum.
    """
    runs, basis = len(published), output_basis(problem.loss)
    coef = basis @ published
    if isinstance(plan.noise, Objective):
        X = np.broadcast_to(problem.X, (runs, *problem.X.shape))
        once = np.ones(len(problem.y))
        return -gradient_and_hessian(problem, plan, coef, X, problem.y, once)[0]
    exact = solve(
        problem.X,
        problem.y,
        Problem(problem.loss, regularization=plan.regularization, matrix=plan.matrix),
        tolerance=plan.tolerance,
    ).coef
    gap = coef - basis @ exact.reshape(-1, problem.dimension).astype(np.float64)
    return np.asarray(gap.reshape(runs, -1))
