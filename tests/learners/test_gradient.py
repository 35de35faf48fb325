"""Noisy gradients: exact sums, a cost that is never below the truth, and models worth having."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from bounded import PrivateRidge
from consilience.errors import SettingsError
from consilience.learners import gradient
from consilience.learners.erm import Huber, HuberHinge, Logistic, Softmax
from consilience.learners.gradient import (
    GRADIENT_GRAIN,
    LONGEST_COEF,
    MOMENT_GRAIN,
    GradientPlan,
    _blocks,
    _gradient,
    _moment,
    longest_gradient,
    public_steps,
    usual_curvature,
    usual_score,
)
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression
from consilience.privacy.accounting import GradientSteps, gaussian_log_delta
from consilience.privacy.mechanisms import Noise, gradient_noise, noisy_moment

WHO = {"unit": "record", "neighbours": "replace-one"}
LONGEST = longest_gradient(Logistic())
LOSSES = [Logistic(), HuberHinge(0.5), Huber(1.0, 1.0), Softmax(3), Softmax(9)]


def steps(**changes):
    facts = {
        "moment_sensitivity": math.sqrt(2),
        "moment_sigma": 16.0,
        "moment_grain": MOMENT_GRAIN,
        "gradient_sensitivity": 1.0,
        "gradient_sigma": 18.0,
        "gradient_grain": GRADIENT_GRAIN,
        "steps": 20,
        "length": 500,
        "ridge": 1.0,
        "at_delta": 1e-6,
        **WHO,
    }
    return GradientSteps(**facts | changes)


def table(n=400, d=6, seed=0, classes=2):
    draw = Noise(seed=seed).open()
    X = draw.normal(n * d).reshape(n, d)
    X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    scores = X[:, :classes] + 0.1 * draw.normal(n * classes).reshape(n, classes)
    return X, scores.argmax(axis=1)


def in_grains(loss, X, y, coef):
    """Return the whole sums at `coef`, which is put on its grid first."""
    whole = np.trunc(coef * 2.0**gradient.COEF_BITS)
    return _gradient(loss, whole, _blocks(loss, iter([(X, y)])))


def labels(loss, n, seed=1):
    bits = Noise(seed=seed).open().words(n)
    if loss.n_outputs > 1:
        return (bits % np.uint64(loss.n_outputs)).astype(np.int64)
    return np.where(bits % np.uint64(2) == 0, 1.0, -1.0)


def coefficients(loss, d, size=3.0, seed=2):
    shape = (d,) if loss.n_outputs == 1 else (loss.n_outputs, d)
    return size * Noise(seed=seed).open().normal(math.prod(shape)).reshape(shape)


# --------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0, 50.0])
@pytest.mark.parametrize("who", [{}, {"unit": "person", "records_per_person": 3}])
def test_all_of_the_budget_is_used_and_no_more(neighbours, epsilon, who):
    X, y = table()
    learner = PrivateLogisticRegression(
        epsilon=epsilon,
        delta=1e-6,
        mechanism="gradient",
        neighbours=neighbours,
        public_size=400,
        classes=[0, 1],
        **who,
    )
    persons = np.arange(400) // 2 if who else None
    stated = learner.fit(X, y, persons=persons).guarantee_
    assert stated.delta == 1e-6
    assert (1 - 1e-6) * epsilon <= stated.epsilon <= epsilon


def test_a_sequence_costs_as_much_as_one_gaussian():
    event = steps()
    mu = math.sqrt(2 / 16**2 + 20 / 18**2)
    for epsilon in (0.1, 1.0, 4.0):
        one = gaussian_log_delta(epsilon, mu)
        assert one <= event.log_delta(epsilon) <= one + 1e-9
    assert event.rho == pytest.approx(mu**2 / 2)
    assert event.sigma == pytest.approx(18 / math.sqrt(20))


def enumerated_delta(epsilon, shifts, sigmas):
    """Return δ of independent discrete Gaussians moved by whole `shifts`, by adding masses up."""
    losses, masses = np.zeros(1), np.ones(1)
    for shift, sigma in zip(shifts, sigmas, strict=True):
        x = np.arange(-int(12 * sigma), int(12 * sigma) + 1)
        mass = np.exp(-(x**2) / (2 * sigma**2))
        mass /= mass.sum()
        loss = ((x - shift) ** 2 - x**2) / (2 * sigma**2)
        losses = (losses[:, None] + loss).ravel()
        masses = (masses[:, None] * mass).ravel()
    return float(np.sum(masses * np.maximum(0.0, -np.expm1(epsilon - losses))))


@pytest.mark.parametrize("sigma", [16.0, 16.7, 40.0])
@pytest.mark.parametrize("shift", [1, 7, 40])
def test_whole_numbers_never_cost_more_than_is_stated(sigma, shift):
    grained = {"moment_grain": 1.0, "gradient_grain": 1.0, "length": 2, "steps": 1}
    event = steps(
        moment_sensitivity=float(shift),
        moment_sigma=2 * sigma,
        gradient_sensitivity=float(shift),
        gradient_sigma=sigma,
        **grained,
    )
    for epsilon in (0.05, 0.5, 2.0):
        found = enumerated_delta(epsilon, (shift, shift), (2 * sigma, sigma))
        assert found <= math.exp(event.log_delta(epsilon)) * (1 + 1e-9)


def test_noise_narrower_than_the_proof_allows_is_refused():
    with pytest.raises(SettingsError, match="16 grains wide"):
        steps(gradient_sigma=15 * GRADIENT_GRAIN)


def test_noise_has_the_variance_that_is_stated():
    event, source = steps(moment_grain=1 / 64, gradient_grain=1 / 64), Noise().open()
    drawn = gradient_noise((4, 5000), event=event, source=source)
    assert drawn.shape == (4, 5000)
    assert drawn.std() / 64 == pytest.approx(18.0, rel=0.03)
    matrix = noisy_moment(np.zeros((150, 150), np.int64), event=event, source=source)
    assert np.array_equal(matrix, matrix.T)
    beside = matrix[np.triu_indices(150, 1)]
    assert beside.std() / 64 == pytest.approx(16 / math.sqrt(2), rel=0.03)
    diagonal = noisy_moment(np.zeros(5000, np.int64), event=event, source=source)
    assert diagonal.std() / 64 == pytest.approx(16.0, rel=0.05)


def test_noise_too_wide_for_doubles_is_exact_too():
    """Wider than the sampler of doubles reaches, at a tiny epsilon: whole numbers all the same."""
    event = steps(gradient_sigma=2.0**15)
    drawn = gradient_noise((4, 500), event=event, source=Noise().open())
    assert drawn.std() * GRADIENT_GRAIN == pytest.approx(2.0**15, rel=0.1)
    assert len(np.unique(drawn % 2**6)) > 32


def test_a_moment_of_anything_but_whole_numbers_is_refused():
    with pytest.raises(SettingsError, match="integers"):
        noisy_moment(np.eye(2) / 3, event=steps(), source=Noise().open())


# --------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_record_adds_the_same_alone_and_in_any_table(loss):
    X, _ = table(n=97, d=7, seed=3)
    y, coef = labels(loss, 97), coefficients(loss, 7)
    alone = sum(in_grains(loss, X[i : i + 1], y[i : i + 1], coef) for i in range(97))
    for rows in (X, np.asfortranarray(X), np.repeat(X, 2, axis=0)[::2], sparse.csr_array(X)):
        assert np.array_equal(in_grains(loss, rows, y, coef), alone)
    order = Noise(seed=4).open().permutation(97)
    assert np.array_equal(in_grains(loss, X[order], y[order], coef), alone)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_record_adds_more_than_its_sensitivity(loss, data):
    numbers = st.floats(-1, 1, allow_subnormal=True)
    row = np.array(data.draw(st.lists(numbers, min_size=4, max_size=4)))
    row /= max(1.0, float(np.linalg.norm(row)) * (1 + 2**-50))
    size = data.draw(st.sampled_from([0.0, 1e-3, 1.0, 1e3, 2.0**15]))
    coef = coefficients(loss, 4, size, seed=data.draw(st.integers(0, 50)))
    coef = gradient._cut(coef, 1.99 * LONGEST_COEF)  # twice that is refused
    whole = in_grains(loss, row[None], labels(loss, 1, data.draw(st.integers(0, 9))), coef)
    exact = sum(int(v) ** 2 for v in whole.ravel())
    assert exact <= (longest_gradient(loss) / GRADIENT_GRAIN) ** 2
    moment = _moment(4, _blocks(loss, iter([(row[None], np.ones(1))])))
    assert sum(int(v) ** 2 for v in moment.ravel()) <= MOMENT_GRAIN**-2


def test_steep_records_are_cut_and_others_are_not():
    X = np.array([[1.0, 0.0], [0.0, 0.3]])
    cut, whole = (
        np.linalg.norm(in_grains(Logistic(), X[i : i + 1], np.ones(1), np.zeros(2)))
        for i in range(2)
    )
    assert cut * GRADIENT_GRAIN == pytest.approx(LONGEST, rel=1e-4)
    assert whole * GRADIENT_GRAIN == pytest.approx(0.15, rel=1e-3)
    far = in_grains(Logistic(), X[:1], np.ones(1), np.array([-9.0, 0.0]))
    assert np.linalg.norm(far) * GRADIENT_GRAIN <= LONGEST


def test_sums_are_those_of_whole_numbers():
    X, y = table(n=5000, d=5, seed=5)
    rows = [[int(v) for v in row] for row in np.trunc(X * 2.0**gradient.ROW_BITS)]
    found = _moment(5, _blocks(Logistic(), iter([(X, y)])))
    for i in range(5):
        for j in range(5):
            assert int(found[i, j]) == sum(row[i] * row[j] for row in rows)


# ----------------------------------------------------------------------------------------- training

EVERY = [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge]


def build(kind, **more):
    usual = {"epsilon": 1.0, "delta": 1e-6, "mechanism": "gradient"}
    known = {} if kind is PrivateRidge else {"classes": [0, 1, 2]}
    return kind(**usual | known | more)


@pytest.mark.parametrize("kind", EVERY)
def test_memory_sparse_rows_and_chunks_give_the_same_model(kind, monkeypatch):
    import dask.array as da

    X, y = table(n=600, d=5, classes=3)
    seeded = Noise(seed=9)
    whole = build(kind, noise=seeded).fit(X, y)
    others = [(sparse.csr_array(X), y), (np.asfortranarray(X), y)]
    others.append((da.from_array(X, (250, 5)), da.from_array(y, 250)))
    for rows, codes in others:
        other = build(kind, noise=seeded).fit(rows, codes)
        assert np.array_equal(other.coef_, whole.coef_)
        assert np.array_equal(other.intercept_, whole.intercept_)


@pytest.mark.parametrize("kind", EVERY)
def test_what_is_released_keeps_to_what_is_implied(kind):
    X, y = table(classes=3)
    learner = build(kind).fit(X, y)
    implied = learner.implied({name: part.shape for name, part in learner.released_state().items()})
    assert tuple(implied.events) == learner.events_
    for name, part in learner.released_state().items():
        assert np.linalg.norm(part) <= implied.bounds[name].norm


def test_wide_tables_buy_the_diagonal_alone(monkeypatch):
    monkeypatch.setattr(gradient, "WIDEST", 4)
    X, y = table(n=3000, d=6)
    learner = build(PrivateLogisticRegression, classes=[0, 1]).fit(X, y)
    assert learner.events_[0].length == 7 + learner.events_[0].steps * 7
    assert learner.score(X, y) > 0.8


def test_it_learns_more_than_perturbing_the_objective():
    X, y = table(n=1500, d=30, seed=8)
    scores = {
        mechanism: np.mean(
            [
                PrivateLogisticRegression(
                    epsilon=0.5,
                    delta=1e-6,
                    mechanism=mechanism,
                    classes=[0, 1],
                    noise=Noise(seed=s),
                )
                .fit(X, y)
                .score(X, y)
                for s in range(10)
            ]
        )
        for mechanism in ("gradient", "objective")
    }
    assert scores["gradient"] > scores["objective"] + 0.02


def test_empty_and_one_sided_tables_are_no_trouble():
    X, y = table(n=40)
    for some in (slice(0, 0), slice(0, 1), y == 1):
        learner = build(PrivateLogisticRegression, classes=[0, 1], neighbours="add-remove")
        learner.set_params(public_size=40).fit(X[some], y[some])
        assert np.isfinite(learner.coef_).all()


def test_pure_epsilon_is_refused_and_auto_perturbs_the_objective():
    X, y = table()
    with pytest.raises(SettingsError, match="delta > 0"):
        build(PrivateLogisticRegression, delta=0.0, classes=[0, 1]).fit(X, y)
    for delta, kind in ((0.0, "ObjectiveL2Laplace"), (1e-6, "GradientSteps")):
        learner = build(PrivateLogisticRegression, delta=delta, mechanism="auto", classes=[0, 1])
        assert type(learner.fit(X, y).events_[0]).__name__ == kind


def test_the_number_of_steps_follows_from_public_facts_and_grows_with_what_records_say():
    X, y = table()
    for epsilon, size in ((1e-3, 10), (1.0, 400), (1e3, 10**6)):
        learner = build(
            PrivateLogisticRegression,
            epsilon=epsilon,
            neighbours="add-remove",
            public_size=size,
            classes=[0, 1],
        )
        here, there = (learner.fit(X[:n], y[:n]).events_[0] for n in (400, 30))
        assert here == there  # the true number is hidden
    assert public_steps(1e9, 1.0) == gradient.FEWEST_STEPS
    assert public_steps(1e-9, 1.0) == gradient.MOST_STEPS
    assert public_steps(1.0, 8.0) == 2 * gradient.PACE
    assert [usual_curvature(loss) for loss in (Logistic(), Softmax(3), Softmax(10))] == [
        0.25,
        0.5,
        0.15,
    ]


def test_the_automatic_ridge_follows_from_public_facts_alone():
    X, y = table()
    ridges = []
    for epsilon in (0.1, 1.0, 10.0):
        auto = build(
            PrivateLogisticRegression, epsilon=epsilon, regularization="auto", classes=[0, 1]
        )
        here, there = auto.fit(X, y).events_[0], auto.fit(X[::-1] / 2, 1 - y).events_[0]
        assert here == there
        assert auto.regularization_ == here.ridge / len(y)
        ridges.append(here.ridge)
    assert all(a > b for a, b in pairwise(ridges))
    exact = PrivateLogisticRegression(
        epsilon=math.inf, regularization="auto", classes=[0, 1], fit_intercept=False
    ).fit(X, y)
    assert exact.score(X, y) > 0.9


def test_without_noise_an_automatic_ridge_grows_with_the_columns():
    ridges = [gradient.automatic_ridge(d) for d in (7, 70, 256, 10**6)]
    assert ridges == [0.01, 0.1, 256 / 700, 256 / 700]
    X, y = table(n=300, d=6)
    wide = np.hstack([X, np.zeros((300, 64))])
    found = [
        PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1]).fit(rows, y)
        for rows in (X, wide)
    ]
    assert [one.regularization_ * 300 for one in found] == pytest.approx([7 / 700, 71 / 700])
    assert [one.strength(300, d) for one, d in zip(found, (7, 71), strict=True)] == [
        one.regularization_ for one in found
    ]


def test_few_classes_that_are_not_equally_frequent_are_told_apart():
    """Steps of a metric as steep as for many classes leave all records to the frequent class."""
    source = Noise(seed=0).open()
    n, d = 300, 20
    y = np.searchsorted([0.79, 0.99], source.uniform(n), side="right")
    X = 0.05 * source.normal(n * d).reshape(n, d) + 0.8 * np.eye(d)[0] + 0.3 * np.eye(d)[1 + y]
    missed = []
    for seed in range(8):
        learner = build(
            PrivateLogisticRegression,
            epsilon=2.0,
            regularization="auto",
            classes=[0, 1, 2],
            noise=Noise(seed=seed),
        )
        missed.append(np.mean(learner.fit(X, y).predict(X)[y == 1] != 1))
    assert np.mean(missed) < 0.3  # about 0.7 with all caution
    assert [gradient.caution(loss) for loss in (Logistic(), Softmax(3), Softmax(20))] == [
        1.0,
        0.3,
        1.0,
    ]


def test_an_automatic_ridge_is_weaker_where_the_records_say_more():
    plan = planned(regularization="auto")[0]
    strongest, prior = plan.regularization, plan.least
    curvature = np.array([0.0, 1.0, 1e3, 1e9])
    ridge = plan.ridge_along(curvature)
    assert ridge[0] == pytest.approx(strongest)
    assert (np.diff(ridge) < 0).all()
    assert ridge[-1] == pytest.approx(prior, rel=1e-5)
    # What is stated of the noise is at most a third too little.
    assert ((strongest + curvature) / (ridge + curvature) <= 4 / 3 + 1e-9).all()
    # Where the records say much, it estimates a coefficient as its posterior mean does.
    noise, deviation, steep = plan.event.sigma, usual_score(Logistic()), 1e3
    ratio = steep / (steep + ridge[2] - prior)
    assert ratio == pytest.approx(steep**2 / (steep**2 + (noise / deviation) ** 2), rel=1e-5)


@pytest.mark.parametrize("widest", [256, 4])
def test_a_ridge_that_was_given_is_the_same_in_every_direction(widest, monkeypatch):
    monkeypatch.setattr(gradient, "WIDEST", widest)
    X, y = table(n=3000, d=6)
    X[:, 1:] *= 0.1  # so that directions differ in what the records say of them
    settings_ = {"classes": [0, 1], "fit_intercept": False, "regularization": 0.05}
    noisy = build(PrivateLogisticRegression, epsilon=1e5, **settings_).fit(X, y)
    exact = PrivateLogisticRegression(epsilon=math.inf, **settings_).fit(X, y)
    assert np.allclose(noisy.coef_, exact.coef_, atol=0.02)
    plan = planned(regularization=0.05)[0]
    assert (plan.ridge_along(np.array([0.0, 1e9])) == plan.regularization).all()


# ------------------------------------------------------------------------------------ broken twins


def shift_of(twin_sums, plan, X, Z, y):
    """Return by how many standard deviations replacing record 0 by Z moves a gradient at zero."""
    loss, coef = Logistic(), np.zeros(X.shape[1])
    other = X.copy()
    other[0] = Z
    labels_ = np.where(y > 0, 1.0, -1.0)
    gap = twin_sums(loss, other, labels_, coef) - twin_sums(loss, X, labels_, coef)
    return float(np.linalg.norm(gap.astype(float))) * GRADIENT_GRAIN / plan.event.gradient_sigma


def planned(**more):
    X, y = table(n=50, d=3)
    X[0] = [1.0, 0.0, 0.0]
    learner = build(PrivateLogisticRegression, classes=[0, 1], fit_intercept=False, **more)
    task, _ = learner.make_task(X, y)
    plan = learner._plan(task)
    assert isinstance(plan, GradientPlan)
    return plan, X, y


def test_the_worst_pair_moves_a_gradient_by_what_is_charged_and_no_more():
    plan, X, y = planned()
    claimed = plan.event.gradient_sensitivity / plan.event.gradient_sigma
    found = shift_of(in_grains, plan, X, -X[0], y)
    assert 0.999 * claimed <= found <= claimed


def uncut(loss, X, y, coef):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient, "longest_gradient", lambda loss: 1e9)
        return in_grains(loss, X, y, coef)


def cut_together(loss, X, y, coef):
    """Cut the sum instead of each record's part."""
    whole = uncut(loss, X, y, coef).astype(float)
    most = LONGEST * len(X) / GRADIENT_GRAIN
    return whole * min(1.0, most / max(float(np.linalg.norm(whole)), 1e-300))


@pytest.mark.parametrize("twin", [uncut, cut_together])
def test_a_twin_that_does_not_cut_each_record_is_caught(twin):
    plan, X, y = planned()
    Z = np.array([-0.9, 0.0, 0.0])
    claimed = plan.event.gradient_sensitivity / plan.event.gradient_sigma
    slopes = 0.5  # of every record at zero: a longer cut lets all of it through
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient, "longest_gradient", lambda loss: slopes / 4)
        honest = shift_of(in_grains, plan, X, Z, y)
    assert honest <= claimed / 3
    assert shift_of(twin, plan, X, Z, y) > 3 * honest


def test_a_twin_that_charges_add_remove_for_replaced_records_is_caught():
    plan, X, y = planned()
    broken = replace(plan.event, gradient_sensitivity=LONGEST)
    found = shift_of(in_grains, plan, X, -X[0], y)
    assert found > 1.9 * broken.gradient_sensitivity / broken.gradient_sigma


def test_a_twin_that_rounds_to_nearest_is_caught():
    rows = Noise(seed=6).open().normal(300).reshape(100, 3)
    rows *= (1 - 2**-50) / np.linalg.norm(rows, axis=1, keepdims=True)
    ours = np.vstack([each.rows for each in _blocks(Logistic(), iter([(rows, np.ones(100))]))])
    twin = np.rint(rows * 2.0**gradient.ROW_BITS)
    assert (np.square(ours).sum(axis=1) <= MOMENT_GRAIN**-1).all()
    assert (np.square(twin).sum(axis=1) > MOMENT_GRAIN**-1).any()
