"""Every known failure of privacy software, put back on purpose, is caught; the real code passes the
same check.

The numbers are the rows of the table in docs/guarantees/audit.md.
Rows 4 and 6 are about trees. A twin is broken here and nowhere else: by a subclass or by
monkeypatch.
"""

import math
import os
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from bounded import PrivateRidge
from consilience.auditing.attacked import Table, plan_training
from consilience.auditing.audit import audit
from consilience.auditing.checks import check_frequencies, check_gaussian, check_radial
from consilience.auditing.pairs import gradient_and_hessian
from consilience.auditing.sampled import audit_samples
from consilience.errors import BudgetExceeded, ConsilienceError, GuaranteeVoid, SettingsError
from consilience.learners import linear, perturbation
from consilience.learners.erm import HuberHinge, Problem, solve
from consilience.learners.inputs import READ_LABELS
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression
from consilience.privacy import accounting, vector_noise
from consilience.privacy.guarantee import Budget, Guarantee, Neighbours, compose
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import (
    Noise,
    Source,
    close,
    draw_error,
    gaussian,
    gaussian_counts,
    l2_laplace,
    laplace_counts,
    select,
)

SEEDED = Noise(seed=7)
WHO = {"unit": "record", "neighbours": "replace-one"}
# Settings that leave the twins something to break: a strong ridge hides what they do.
FORMER = {"mechanism": "objective", "regularization": 1e-2, "intercept_scaling": 1.0}
FORMER_SVC = {**FORMER, "huber": 0.5}
ONE = Guarantee(epsilon=1.0, delta=0.0, **WHO)
X = np.array([[0.5, 0.1], [-0.4, 0.3], [0.2, -0.9], [0.6, 0.6]])
y = np.array([0, 1, 1, 0])


def passes(checks):
    return all(check.passed for check in checks)


# ---------------------------------------------------------- rows 1 and 2: what enters the objective


class CurvatureTimesNorm(PrivateLinearSVC):
    """Row 1: rows of norm R enter as they are, and the Hessian is bounded by c·R where c·R² is
    true.
    """

    def _plan(self, task):
        plan, norm = super()._plan(task), self.data_norm
        curvature = plan.noise.curvature * norm
        left = plan.noise.epsilon - math.log1p(curvature / plan.regularization)
        event = replace(plan.noise, scale=plan.noise.moved * norm / left)
        for name, value in (("curvature", curvature), ("lipschitz", norm)):
            object.__setattr__(
                event, name, value
            )  # the event's own check would refuse constants that are not the loss'
        return replace(plan, noise=event)


def test_row_1_curvature_times_norm_is_caught(monkeypatch):
    settings = {"epsilon": 1.0, "data_norm": 10.0, "regularization": 0.2, "fit_intercept": False}
    assert audit(PrivateLinearSVC(**settings), restarts=8, runs=0).passed
    monkeypatch.setattr(
        linear, "into_ball", lambda X, learner: perturbation_clip(X, learner.data_norm)
    )
    report = audit(CurvatureTimesNorm(**settings), restarts=8, runs=0)
    assert not report.passed
    assert report.epsilon_lower > 1.5


def perturbation_clip(X, norm):
    return X * np.minimum(1.0, norm / np.linalg.norm(X, axis=1, keepdims=True))


def test_row_1_scaling_rows_and_their_norm_changes_nothing_but_the_unit():
    one = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], noise=SEEDED).fit(X, y)
    ten = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], data_norm=8.0, noise=SEEDED).fit(
        8 * X, y
    )
    np.testing.assert_allclose(8 * ten.coef_, one.coef_, rtol=1e-6)
    np.testing.assert_allclose(ten.intercept_, one.intercept_, rtol=1e-6)


class FreeIntercept(PrivateLogisticRegression):
    """Row 2: the ridge leaves the intercept out, and the accounting does not know it."""

    def _plan(self, task):
        plan = super()._plan(task)
        lifted = np.zeros((task.dimension, task.dimension))
        lifted[-1, -1] = -(1 - 1e-3) * plan.regularization
        return replace(plan, matrix=lifted)


def test_row_2_an_unregularised_intercept_is_caught():
    report = audit(FreeIntercept(epsilon=1.0), restarts=8, runs=0)
    assert not report.passed
    assert report.epsilon_lower > 1.5
    assert audit(PrivateLogisticRegression(epsilon=1.0), restarts=8, runs=0).passed


# ------------------------------------------------------------------------- row 3: copied generators


class CopiedSource(Source):
    """Row 3: a generator that lets itself be sent to other processes, and used there."""

    def __reduce__(self):
        return _revive, (self._bits.state,)

    def words(self, n):
        return np.asarray(self._bits.random_raw(n), dtype=np.uint64)


def _revive(state):
    source = CopiedSource(0)
    source._bits.state = state
    return source


def repeats_when_sent(source):
    """Whether another process could draw what this one draws."""
    try:
        copy = pickle.loads(pickle.dumps(source))
    except ConsilienceError:
        return False
    return bool((copy.words(4) == source.words(4)).all())


def repeats_after_fork(source):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, source.words(2).tobytes())
        finally:
            os._exit(0)
    os.close(write)
    drawn = os.read(read, 16)
    os.close(read)
    os.waitpid(child, 0)
    return drawn == source.words(2).tobytes()


@pytest.mark.parametrize("copied", [repeats_when_sent, repeats_after_fork])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_row_3_a_generator_copied_across_processes_is_caught(copied):
    assert copied(CopiedSource())
    assert not copied(Source())


class SameNoiseForEveryClass(PrivateLinearSVC):
    """Row 3, as found in use: each class' worker starts from the same copy of the generator."""

    def _train(self, task, plan, source):
        copy = Noise(seed=int(source.words(1)[0]))
        parts = [
            perturbation.train_linear(
                replace(task, y=np.where(task.y == code, 1.0, -1.0)), plan, copy.open()
            )
            for code in range(task.n_problems)
        ]
        self.coef_, self.intercept_ = linear.out_of_ball(np.stack(parts), self)


def test_row_3_the_same_noise_for_every_class_is_caught():
    settings = {"epsilon": 3.0, "classes": [0, 1, 2]}
    report = audit(SameNoiseForEveryClass(**settings), restarts=1, runs=100, noise=SEEDED)
    assert [c.name for c in report.checks if not c.passed] == [
        "recovered noise: classes have noise of their own"
    ]
    assert audit(PrivateLinearSVC(**settings), restarts=1, runs=100, noise=SEEDED).passed


# ------------------------------------- rows 5, 10: what a fitted learner holds beside its guarantee


def extras(kind):
    """Fitted attributes, other than the noised ones, that change when a record is removed or the
    noise is redrawn.

    Under add-remove nothing but the coefficients may: not a count, not a score, not a seed.
    """
    learners = [kind(epsilon=1.0, neighbours="add-remove", public_size=10) for _ in range(2)]
    for learner, n in zip(learners, (3, 4), strict=True):
        learner.fit(X[:n], y[:n])
    first, second = (
        {name: repr(value) for name, value in vars(learner).items()} for learner in learners
    )
    return {name for name in first | second if first.get(name) != second.get(name)} - {
        "coef_",
        "intercept_",
    }


class KeepsItsSeed(PrivateLogisticRegression):
    """Row 5: the noise can be drawn again from what was published."""

    def _train(self, task, plan, source):
        self.seed_ = int(source.words(1)[0])
        super()._train(task, plan, Noise(seed=self.seed_).open())


class KeepsItsAccuracy(PrivateLogisticRegression):
    """Row 10: training accuracy, computed from records, without noise."""

    def _train(self, task, plan, source):
        super()._train(task, plan, source)
        self.training_accuracy_ = float(np.mean(task.y == 1.0))


class TellsItsSize(PrivateLogisticRegression):
    """Row 10: the number of records, released under a relation that hides it."""

    def _train(self, task, plan, source):
        super()._train(task, plan, source)
        self.size = np.array([task.n_records])

    def released_state(self):
        return {**super().released_state(), "size": self.size}


@pytest.mark.parametrize("twin", [KeepsItsSeed, KeepsItsAccuracy])
def test_rows_5_and_10_attributes_beyond_the_release_are_caught(twin):
    assert extras(twin)


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge])
def test_rows_5_and_10_real_learners_keep_nothing_else(kind):
    assert extras(kind) == set()
    fitted = kind(epsilon=1.0).fit(X, y)
    assert set(fitted.released_state()) == {"coef", "intercept"}
    assert not any(isinstance(value, Source) for value in vars(fitted).values())


def test_row_10_an_unnoised_size_is_caught_by_sampling():
    settings = {"epsilon": 1.0, "neighbours": "add-remove"}
    report = audit(TellsItsSize(**settings), kind="sample", n_records=10, runs=300, noise=SEEDED)
    assert not report.passed
    assert report.epsilon_lower > 2
    assert audit(
        PrivateLogisticRegression(**settings), kind="sample", n_records=10, runs=300, noise=SEEDED
    ).passed


# ----------------------------------------------------------------------- row 7: neighbour relations


class OtherRelation(PrivateLogisticRegression):
    """Row 7: noise for add-remove under a learner that says replace-one."""

    def _plan(self, task):
        asked, self.neighbours, self.public_size = self.neighbours, "add-remove", task.n_units
        try:
            return super()._plan(task)
        finally:
            self.neighbours, self.public_size = asked, None


def test_row_7_events_under_another_relation_are_caught():
    report = audit(OtherRelation(epsilon=1.0), restarts=4, runs=0)
    assert [c.name for c in report.checks if not c.passed] == [
        "events are charged under the claimed unit and neighbours"
    ]


def test_row_7_replace_one_at_the_add_remove_scale_is_caught(monkeypatch):
    assert audit(PrivateLinearSVC(epsilon=1.0), restarts=8, runs=0).passed
    monkeypatch.setattr(accounting.Objective, "moved", property(lambda self: self.records_per_unit))
    report = audit(PrivateLinearSVC(epsilon=1.0), restarts=8, runs=0)
    assert not report.passed
    assert report.epsilon_lower > 1.3


def histogram_loss(scale):
    """Exact loss of a histogram with discrete Laplace noise when one record moves from one bin to
    another.
    """
    outputs = np.arange(-40, 41)
    one = np.abs(outputs - 1) - np.abs(outputs)  # loss·scale of one count that falls by one
    return (np.abs(one).max() + np.abs(one).max()) / scale


def test_row_7_a_plain_sum_over_both_relations_is_caught():
    event = accounting.Laplace(unit="record", neighbours="add-remove", sensitivity=1.0, scale=1.0)
    other = Guarantee(epsilon=1.0, delta=0.0, **WHO)
    naive = event.guarantee.epsilon + other.epsilon
    assert histogram_loss(event.scale) + other.epsilon > naive
    assert histogram_loss(event.scale) + other.epsilon <= compose(event.guarantee, other).epsilon
    with pytest.raises(GuaranteeVoid):
        other.convert(Neighbours.ADD_REMOVE)


def test_row_7_monotone_selection_under_replace_one_is_caught():
    """One record moves from candidate to candidate: scores move both ways, and the monotone price
    is half the loss.
    """

    def loss(scale):
        first, second = (np.exp(np.array(s) / scale) for s in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]))
        return np.abs(np.log(first / first.sum()) - np.log(second / second.sum())).max()

    add_remove = {**WHO, "neighbours": "add-remove"}
    half = accounting.Selection(sensitivity=1.0, scale=1, monotone="yes", **add_remove)
    whole = accounting.Selection(sensitivity=1.0, scale=2, monotone="no", **WHO)
    with pytest.raises(SettingsError, match="monotone only under"):
        accounting.Selection(sensitivity=1.0, scale=1, monotone="yes", **WHO)
    assert half.epsilon == whole.epsilon == 1.0
    crowded = np.exp(np.array([[1.0, 0.0], [0.0, 1.0]]) / half.scale)
    odds = np.log(crowded / crowded.sum(axis=1, keepdims=True))
    assert np.ptp(odds[:, 0]) == pytest.approx(
        1.0
    )  # two equal candidates: the claim is met with equality
    lopsided = np.array([[-9.0, 0.0], [-8.0, -1.0]])  # a rare candidate, which one record favours
    odds = lopsided / half.scale - np.log(np.exp(lopsided / half.scale).sum(axis=1, keepdims=True))
    assert np.ptp(odds[:, 0]) > 1.9 * half.epsilon
    odds = lopsided / whole.scale - np.log(
        np.exp(lopsided / whole.scale).sum(axis=1, keepdims=True)
    )
    assert np.ptp(odds[:, 0]) <= whole.epsilon
    assert loss(whole.scale) <= whole.epsilon


# ------------------------------------------------------------------------- row 8: public facts only


class NormFromRecords(PrivateLogisticRegression):
    """Row 8: the norm is the longest row of the private table."""

    def make_task(self, X, y, persons=None):
        self.data_norm = float(np.linalg.norm(X, axis=1).max())
        return super().make_task(X, y, persons)


class ClassesFromRecords(PrivateLogisticRegression):
    """Row 8: the declared classes are forgotten."""

    def fit(self, X, y, **more):
        self.classes = None
        return super().fit(X, y, **more)


def one_row_at_a_time(learner):
    """Whether replacing one record changes one encoded row and nothing of the plan."""
    changed = X.copy()
    changed[0] = 30.0, -40.0
    (task, plan), (other, other_plan) = (
        plan_training(learner, Table(rows, y)) for rows in (X, changed)
    )
    same_rows = np.array_equal(task.X[1:], other.X[1:])
    return (
        same_rows
        and plan.events == other_plan.events
        and plan.regularization == other_plan.regularization
    )


def one_class_may_be_absent(learner):
    """Whether a site that lacks a class trains a model of the same shape, under the same claim."""
    shapes = [learner.fit(X, labels).coef_.shape for labels in (y + 1, np.array([0, 1, 2, 0]))]
    return shapes[0] == shapes[1] and READ_LABELS not in learner.guarantee_.assumptions


def test_row_8_a_norm_read_from_records_is_caught():
    assert not one_row_at_a_time(NormFromRecords(epsilon=1.0, classes=[0, 1]))
    assert one_row_at_a_time(PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]))


def test_row_8_classes_read_from_records_are_caught():
    assert not one_class_may_be_absent(ClassesFromRecords(epsilon=1.0, classes=[0, 1, 2]))
    assert one_class_may_be_absent(PrivateLogisticRegression(epsilon=1.0, classes=[0, 1, 2]))


# ----------------------------------------------------------------- rows 9 and 14: charge every draw


class ChargesAfterwards(PrivateLogisticRegression):
    """Row 9: train, then pay."""

    def _fit(self, task, assumptions, ledger, dataset, key):
        self._train(task, self._plan(task), Noise().open())
        return super()._fit(task, assumptions, ledger, dataset, key)


class TunesForFree(PrivateLogisticRegression):
    """Row 14: three trainings on the private records, one of them charged."""

    def _train(self, task, plan, source):
        for _ in range(3):
            super()._train(task, plan, source)


def trained_models(kind, path):
    """How many of four concurrent learners with a budget for one train.

    A refused fit restores what it had, so coefficients left behind would be no sign.
    """
    ledger = Ledger(path)
    ledger.allow("ward", Budget(epsilon=1.0))
    trained = set()

    class Watched(kind):
        def _train(self, task, plan, source):
            trained.add(id(self))
            super()._train(task, plan, source)

    learners = [Watched(epsilon=1.0, classes=[0, 1]) for _ in range(4)]

    def train(learner):
        try:
            learner.fit(X, y, ledger=ledger, dataset="ward")
        except BudgetExceeded:
            pass

    threads = [threading.Thread(target=train, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(trained)


def test_row_9_paying_afterwards_is_caught(tmp_path):
    assert trained_models(ChargesAfterwards, tmp_path / "broken.sqlite") == 4
    assert trained_models(PrivateLogisticRegression, tmp_path / "real.sqlite") == 1


def draws_and_charges(learner, monkeypatch, path):
    """Count the noise vectors drawn by one training and the events charged for it."""
    drawn = []
    for name in ("l2_laplace", "gaussian", "close"):
        real = getattr(vector_noise, name)
        monkeypatch.setattr(
            vector_noise,
            name,
            lambda *a, real=real, **k: (drawn.append(k["event"]), real(*a, **k))[1],
        )
    ledger = Ledger(path)
    ledger.allow("ward", Budget(epsilon=1.0, delta=1e-3))
    learner.fit(X, y, ledger=ledger, dataset="ward")
    monkeypatch.undo()
    (charge,) = ledger.charges("ward")
    return drawn, list(charge.events)


@pytest.mark.parametrize("settings", [{}, {"delta": 1e-4}, {"mechanism": "output"}], ids=str)
def test_row_14_trainings_that_are_not_charged_are_caught(settings, monkeypatch, tmp_path):
    settings = {"epsilon": 1.0, "classes": [0, 1], "mechanism": "objective", **settings}
    drawn, charged = draws_and_charges(
        TunesForFree(**settings), monkeypatch, tmp_path / "broken.sqlite"
    )
    assert len(drawn) == 3 * len(charged)
    drawn, charged = draws_and_charges(
        PrivateLogisticRegression(**settings), monkeypatch, tmp_path / "real.sqlite"
    )
    assert drawn == charged


# ------------------------------------------------------- rows 11, 12, 13: solver and floating point


def distance_kept(task, plan):
    """Whether what the solver returns is as close to the ideal minimum as the closing event says,
    whatever b.
    """
    kept = True
    for seed in range(20):
        found = perturbation.train_linear(
            task, replace(plan, closing=None), Noise(seed=seed).open()
        )
        b = l2_laplace(task.dimension, event=plan.noise, source=Noise(seed=seed).open())
        arguments = (task, plan, found[None, None], task.X[None], task.y, np.ones(len(task.y)))
        gradient, _ = gradient_and_hessian(*arguments)
        kept &= bool(
            np.linalg.norm(gradient[0] + b) / plan.noise.strong_convexity <= plan.closing.distance
        )
    return kept


def test_row_11_a_solver_that_stops_early_is_caught(monkeypatch):
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], **FORMER)
    task, plan = plan_training(learner, Table(X, y))
    assert plan.closing.distance < 1e-6
    assert distance_kept(task, plan)
    monkeypatch.setattr(
        perturbation, "solve", lambda *a, **k: solve(*a, **{**k, "tolerance": 1e-4})
    )
    assert not distance_kept(task, plan)


def naive_laplace(value, scale, source, n):
    """Row 12: inversion of uniforms on a grid, added in floating point."""
    grid = ((source.words(n) >> np.uint64(50)).astype(np.float64) + 1) / 2.0**14
    return value - scale * np.log(grid) * np.where(source.words(n) % 2, 1.0, -1.0)


def reachable(outputs, scale):
    """Whether each output is one that the naive sampler can reach from the value 0."""
    table = scale * np.log(np.arange(1, 2**14 + 1) / 2.0**14)
    return np.isin(outputs, np.concatenate([table, -table])).astype(float)


def test_row_12_naive_float_noise_is_caught():
    source, event = SEEDED.open(), accounting.Closing(dimension=1, distance=0.5, scale=1.0, **WHO)
    naive = [reachable(naive_laplace(value, 1.0, source, 2000), 1.0) for value in (0.0, 1.0)]
    report = audit_samples(*naive, claimed=ONE)
    assert not report.passed
    exact = [
        close(np.full(2000, value), event=event, source=Noise().open()) for value in (0.0, 1.0)
    ]
    assert audit_samples(*[reachable(x, 1.0) for x in exact], claimed=ONE).passed
    assert audit_samples(*exact, claimed=ONE).passed


def test_row_12_a_release_without_closing_is_caught():
    """Without the closing step the same b gives the same bits, which expose the solver's work."""
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    task, plan = plan_training(learner, Table(X, y))

    def bits_hidden(plan):
        real = vector_noise.l2_laplace
        fixed = real(task.dimension, event=plan.noise, source=SEEDED.open())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vector_noise, "l2_laplace", lambda *a, **k: fixed)
            return not np.array_equal(
                *(perturbation.train_linear(task, plan, Noise().open()) for _ in range(2))
            )

    assert any(isinstance(event, accounting.Closing) for event in plan.events)
    assert bits_hidden(plan)
    assert not bits_hidden(replace(plan, closing=None))


def test_row_13_a_floating_point_sum_is_caught():
    """Replace one record in [0, 1] by another: the true sum moves by 1 at most, a running float sum
    by 2.
    """

    def float_sum(records):
        running = np.float16(0)
        for record in records:
            running = np.float16(running + np.float16(record))
        return float(running)

    rest = [1.0] * 255 + [0.13] * 8
    assert abs(float_sum([1.0, *rest]) - float_sum([0.0, *rest])) > 1.9
    counts = [
        np.array([int(np.count_nonzero(np.array([first, *rest]) > 0.5))]) for first in (1.0, 0.0)
    ]
    assert abs(counts[0] - counts[1]) <= 1
    noisy = laplace_counts(
        counts[0],
        event=accounting.Laplace(sensitivity=1.0, scale=1.0, **WHO),
        source=Noise().open(),
    )
    assert noisy.dtype == np.int64


# ----------------------------------------------------------------------- half the noise, everywhere

VECTOR = {
    "l2_laplace": (
        l2_laplace,
        accounting.L2Laplace(sensitivity=1.0, scale=2.0, **WHO),
        check_radial,
        "scale",
    ),
    "gaussian": (
        gaussian,
        accounting.Gaussian(sensitivity=1, sigma=2.0, at_delta=1e-5, **WHO),
        check_gaussian,
        "sigma",
    ),
}


@pytest.mark.parametrize("name", VECTOR)
def test_half_the_vector_noise_is_caught(name):
    mechanism, event, check, size = VECTOR[name]
    source = SEEDED.open()
    whole = np.stack([mechanism(3, event=event, source=source) for _ in range(500)])
    less = replace(event, **{size: 1.0})
    half = np.stack([mechanism(3, event=less, source=source) for _ in range(500)])
    assert passes(check(whole, **{size: 2.0}))
    assert not passes(check(half, **{size: 2.0}))


@pytest.mark.parametrize("name", ["close", "laplace_counts", "select"])
def test_half_the_exact_noise_is_caught_by_sampling(name):
    """At claimed ε = 1, 8 000 draws a side tell half the noise from all of it."""
    n, source = 8_000, Noise().open()
    near, far = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)

    def draw(size):
        if name == "close":
            event = accounting.Closing(dimension=1, distance=0.5, scale=size, **WHO)
            return [close(v.astype(float), event=event, source=source) for v in (near, far)]
        if name == "laplace_counts":
            event = accounting.Laplace(sensitivity=1.0, scale=size, **WHO)
            return [laplace_counts(v, event=event, source=source) for v in (near, far)]
        event, seeded = (
            accounting.Selection(sensitivity=1.0, scale=2 * size, monotone="no", **WHO),
            SEEDED.open(),
        )
        scores = [np.array([0.0, 3.0]), np.array([1.0, 2.0])]
        return [
            np.array([select(s, event=event, source=seeded) for _ in range(n // 2)]) for s in scores
        ]

    assert audit_samples(*draw(1.0), claimed=ONE).passed
    assert not audit_samples(*draw(0.5), claimed=ONE).passed


def test_half_the_discrete_gaussian_noise_is_caught_by_frequencies():
    grid = np.arange(-40, 41)
    weights = np.exp(-np.square(grid) / (2 * 3.0**2))
    results = []
    for sigma in (3.0, 1.5):
        event = accounting.DiscreteGaussian(sensitivity=1.0, sigma=sigma, at_delta=0.01, **WHO)
        drawn = gaussian_counts(np.zeros(3000, dtype=np.int64), event=event, source=Noise().open())
        counts = np.bincount(np.clip(drawn, -40, 40) + 40, minlength=81)
        results.append(check_frequencies(counts, weights / weights.sum()).passed)
    assert results == [True, False]


def test_half_the_selection_noise_is_caught_by_frequencies():
    event, source = (
        accounting.Selection(sensitivity=1.0, scale=0.5, monotone="no", **WHO),
        SEEDED.open(),
    )
    scores = np.array([0.0, 1.0, 2.0])
    counts = np.bincount(
        [select(scores, event=event, source=source) for _ in range(2000)], minlength=3
    )
    assert not check_frequencies(counts, np.exp(scores) / np.exp(scores).sum()).passed
    assert check_frequencies(counts, np.exp(scores / 0.5) / np.exp(scores / 0.5).sum()).passed


class HalfTheNoise(PrivateLinearSVC):
    """Charge for all of the noise, draw half."""

    def _train(self, task, plan, source):
        size = "sigma" if hasattr(plan.noise, "sigma") else "scale"
        less = replace(plan.noise, **{size: getattr(plan.noise, size) / 2})
        super()._train(task, replace(plan, noise=less), source)


@pytest.mark.parametrize(
    "settings",
    [{}, {"delta": 1e-4}, {"mechanism": "output"}, {"mechanism": "output", "delta": 1e-4}],
    ids=["objective", "objective gaussian", "output", "output gaussian"],
)
def test_half_the_noise_in_a_learner_is_caught(settings):
    settings = {**FORMER_SVC, **settings}
    report = audit(HalfTheNoise(epsilon=1.0, **settings), restarts=1, runs=150, noise=SEEDED)
    assert not report.passed
    assert next(c.name for c in report.checks if not c.passed).startswith("recovered noise: radius")
    assert audit(
        PrivateLinearSVC(epsilon=1.0, **settings), restarts=1, runs=150, noise=SEEDED
    ).passed


def test_half_the_noise_in_a_learner_is_caught_by_sampling():
    settings = {
        "epsilon": 2.0,
        "mechanism": "output",
        "fit_intercept": False,
        "regularization": 1.0,
    }
    report = audit(HalfTheNoise(**settings), kind="sample", n_records=10, runs=1000, noise=SEEDED)
    assert not report.passed, str(report)
    assert audit(
        PrivateLinearSVC(**settings), kind="sample", n_records=10, runs=1000, noise=SEEDED
    ).passed


# -------------------------------------------------------------------------- proofs and their limits


def test_a_dropped_jacobian_is_caught(monkeypatch):
    hidden = PrivateLinearSVC(epsilon=1.0, neighbours="add-remove", **FORMER_SVC)
    assert audit(hidden, runs=0, n_records=3).passed
    monkeypatch.setattr(accounting.Objective, "jacobian", property(lambda self: 0.0))
    report = audit(hidden, runs=0, n_records=3)
    assert not report.passed
    assert report.epsilon_lower > 1.2


def test_the_joint_logistic_bound_holds_and_is_nearly_reached():
    """The bound of ObjectiveL2Laplace for the logistic loss (docs/guarantees/objective.md) is
    confirmed.
    """
    shares = []
    for settings in (
        {},
        {"neighbours": "add-remove"},
        {"epsilon": 4.0, "neighbours": "add-remove"},
    ):
        report = audit(
            PrivateLogisticRegression(**{"epsilon": 1.0, **settings}), restarts=12, runs=0
        )
        assert report.passed, str(report)
        shares.append(report.epsilon_lower / report.claimed.epsilon)
    assert max(shares) > 0.9, shares


def test_a_logistic_price_without_its_determinant_is_caught(monkeypatch):
    """Twin of the joint bound: the two gradients are paid for, log(1 + p(1-p)/λ) is not."""
    learner = PrivateLogisticRegression(epsilon=1.0, neighbours="add-remove", regularization=1e-4)
    assert audit(learner, restarts=12, runs=0, n_records=10).passed
    price = property(lambda self: self.moved * self.lipschitz / self.scale)
    monkeypatch.setattr(accounting.ObjectiveL2Laplace, "epsilon", price)
    # Nor is the ridge raised for its sake; at the ridge that the rule asks for, the determinant
    # hardly matters.
    monkeypatch.setattr(perturbation._Facts, "_ridge_for", lambda self, jacobian: 0.0)
    assert not audit(learner, restarts=12, runs=0, n_records=10).passed


def test_too_small_a_delta_is_caught(monkeypatch):
    """Twin of the Gaussian profile: half the sigma that the proof asks for."""
    hidden = PrivateLinearSVC(epsilon=1.0, delta=1e-3, neighbours="add-remove", **FORMER_SVC)
    real = accounting.ObjectiveGaussian.log_delta
    monkeypatch.setattr(
        accounting.ObjectiveGaussian,
        "log_delta",
        lambda self, e: real(replace(self, sigma=2 * self.sigma), e),
    )
    report = audit(hidden, restarts=4, runs=0)
    assert not report.passed
    assert report.delta_lower > 1e-3


def test_half_the_sensitivity_is_caught(monkeypatch):
    real = perturbation._Facts._sensitivity
    monkeypatch.setattr(perturbation._Facts, "_sensitivity", lambda self: real(self) / 2)
    assert not audit(PrivateLinearSVC(epsilon=1.0, mechanism="output"), restarts=2, runs=0).passed


def test_the_thesis_matrix_perturbation_is_not_private():
    """Two records (x, ±1): the minimum is 0 whatever matrix was drawn; not so once one of them is
    replaced.
    """
    source = SEEDED.open()
    first, second = np.array([[0.6, 0.3], [0.6, 0.3]]), np.array([[0.6, 0.3], [-0.2, 0.7]])
    norms = []
    for _ in range(40):
        factor = source.normal(4).reshape(2, 2)
        problem = Problem(HuberHinge(0.5), regularization=1e-3, matrix=factor @ factor.T)
        labels = np.array([1.0, -1.0])
        norms.append(
            [
                np.linalg.norm(solve(X, labels, problem, tolerance=1e-11).coef)
                for X in (first, second)
            ]
        )
    zero, moved = np.array(norms).T
    assert zero.max() == 0.0
    assert moved.min() > 1e-6
    assert not audit_samples(zero, moved, claimed=replace(ONE, epsilon=0.5)).passed
    with pytest.raises(GuaranteeVoid):
        PrivateLogisticRegression(epsilon=1.0, mechanism="matrix", calibration="thesis").fit(X, y)


def test_wishart_noise_for_principal_components_is_not_private():
    """A + W with W ⪰ 0 never falls below A: an output that does shows that A was not the input."""
    source, n = SEEDED.open(), 1500
    inputs = [
        np.diag([1.0, 0.0]),
        np.diag([0.0, 1.0]),
    ]  # second moments of one record each: replace-one neighbours
    samples = []
    for second_moment in inputs:
        factors = source.normal(n * 6).reshape(n, 2, 3) / math.sqrt(
            2
        )  # Wishart, d + 1 degrees of freedom
        released = second_moment + factors @ factors.swapaxes(1, 2)
        samples.append(np.linalg.eigvalsh(released - inputs[0])[:, 0])
    assert samples[0].min() > 0
    report = audit_samples(*samples, claimed=ONE)
    assert not report.passed
    assert report.epsilon_lower > 2
    # The Gaussian mechanism on the same matrices, at its own (ε, δ), passes the same attack.
    event = accounting.Gaussian(sensitivity=math.sqrt(2), sigma=5.0, at_delta=0.01, **WHO)
    sound = []
    for second_moment in inputs:
        upper = gaussian(3 * n, event=event, source=source).reshape(n, 3)
        noise = np.stack([np.stack([u[[0, 1]], u[[1, 2]]]) for u in upper])
        sound.append(np.linalg.eigvalsh(second_moment + noise - inputs[0])[:, 0])
    assert audit_samples(*sound, claimed=event.guarantee).passed


def test_the_drawing_error_covers_what_a_float_can_lose():
    """Row 12 again: a coarser grid than the stated error would be seen as repeated mantissas."""
    assert draw_error(1) < 1e-13
    small = Noise(seed=1).open().uniform(200_000)
    assert len(np.unique(small)) == len(small)
    coarse = (Noise(seed=1).open().words(200_000) >> np.uint64(48)).astype(np.float64) / 2.0**16
    assert len(np.unique(coarse)) < len(coarse)
