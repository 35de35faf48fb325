"""What a learner's settings imply: every honest fit keeps to it, and lies do not."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sums
from bounded import PrivateRidge
from consilience import (
    PrivateAdaBoostClassifier,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateTreeClassifier,
)
from consilience.learners.implied import UNLIKELY, Bound, Extent
from consilience.learners.registry import LEARNERS
from consilience.privacy.accounting import Gaussian, Laplace, are_alike
from consilience.privacy.mechanisms import Noise
from consilience.privacy.vector_noise import public_sum

LINEAR = (PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge)
TREES = (PrivateForestClassifier, PrivateTreeClassifier, PrivateAdaBoostClassifier)


def records(n, n_classes=2, seed=0):
    source = Noise(seed=seed).open()
    X = 2 * source.uniform(3 * n).reshape(n, 3) - 1
    code = np.minimum((X[:, 0] + 1) / 2 * n_classes, n_classes - 1).astype(int)
    return X, code, np.arange(n) // 2


def fit(learner, n=60, n_classes=2, seed=0):
    X, y, persons = records(n, n_classes, seed)
    more = {"persons": persons} if learner.unit == "person" else {}
    labels = y * 1.0 if learner.predicts_number else y
    return learner.fit(X, labels, **more)


def look(fitted):
    """Return what a fitted learner's public facts imply, and what it did release."""
    state = {name: np.asarray(one) for name, one in fitted.released_state().items()}
    extents = {name: Extent.of([one]) for name, one in state.items()}
    return fitted.implied({name: one.shape for name, one in state.items()}), state, extents


def assert_honest(fitted):
    implied, state, extents = look(fitted)
    assert implied.has_shapes({name: one.shape for name, one in state.items()})
    assert implied.has_events(fitted.events_)
    assert implied.has_numbers(extents), (implied.bounds, extents)


def build(kind, n_classes=2, **changes):
    given = {name: value for name, value in changes.items() if name in kind._get_param_names()}
    if kind.is_linear and given.get("neighbours") == "add-remove":
        given["public_size"] = 50
    if not kind.predicts_number:
        given["classes"] = list(range(n_classes))
    if not kind.is_linear:
        given["bounds"] = (-1, 1)
    return kind(**given)


MECHANISMS = ("objective", "output", "generalized", "matrix", "auto")
WHO = [
    {"neighbours": neighbours, "unit": unit, "records_per_person": 2 if unit == "person" else None}
    for neighbours, unit in itertools.product(("replace-one", "add-remove"), ("record", "person"))
]
BUDGETS = [(0.05, 0.0), (1.0, 0.0), (1.0, 1e-6), (math.inf, 0.0)]


@pytest.mark.parametrize("who", WHO, ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", LINEAR)
def test_honest_linear_fits_keep_to_what_is_implied(kind, mechanism, who):
    for (epsilon, delta), n_classes in itertools.product(BUDGETS, (2, 3)):
        softmax = kind is PrivateLogisticRegression and n_classes > 2
        if mechanism == "matrix" and softmax:
            continue
        settings = {"epsilon": epsilon, "delta": delta, "mechanism": mechanism, **who}
        for more in ({}, {"fit_intercept": False, "data_norm": 3.0, "label_bound": 5.0}):
            assert_honest(fit(build(kind, n_classes, **settings, **more), n_classes=n_classes))


@pytest.mark.parametrize("who", WHO, ids=str)
@pytest.mark.parametrize("kind", TREES)
def test_honest_trees_keep_to_what_is_implied(kind, who):
    for (epsilon, delta), n_classes in itertools.product(BUDGETS, (2, 3)):
        for splitter in ("greedy", "random"):
            settings = {"epsilon": epsilon, "delta": delta, "splitter": splitter, **who}
            assert_honest(fit(build(kind, n_classes, **settings), n_classes=n_classes))
    known = build(kind, **who, epsilon=1.0, public_size=60, assignment="all", prune=True)
    assert_honest(fit(known))


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from((*LINEAR, *TREES)),
    who=st.sampled_from(WHO),
    epsilon=st.floats(1e-3, 20),
    delta=st.sampled_from((0.0, 1e-9, 0.1)),
    regularization=st.floats(1e-6, 10),
    n=st.integers(2, 200),
    seed=st.integers(0, 2**31),
)
def test_honest_fits_of_any_budget_keep_to_what_is_implied(
    kind, who, epsilon, delta, regularization, n, seed
):
    noise = Noise(seed=seed)
    learner = build(
        kind, **who, epsilon=epsilon, delta=delta, regularization=regularization, noise=noise
    )
    assert_honest(fit(learner, n=n, seed=seed))


def test_a_matrix_with_a_seed_is_drawn_again():
    seeded = build(PrivateLogisticRegression, epsilon=1.0, mechanism="matrix", random_state=3)
    assert_honest(fit(seeded))
    seeded.random_state = 4
    assert not look(seeded)[0].has_events(seeded.events_)


@pytest.mark.parametrize("kind", LINEAR)
def test_a_lie_about_coefficients_events_or_size_is_seen(kind):
    fitted = fit(build(kind, epsilon=1.0, noise=Noise(seed=2)), n=500)
    implied, state, _ = look(fitted)
    for factor in (-1000, 1e300):
        assert not implied.has_numbers({k: Extent.of([v * factor]) for k, v in state.items()})
    (main, closing) = fitted.events_
    for lie in (
        [replace(main, strong_convexity=1e300), closing],
        [replace(main, scale=main.scale / 2), closing],
        [main],
        [main, closing, closing],
        [],
    ):
        assert not implied.has_events(lie)
    fitted.public_size_ = 2**59
    assert not look(fitted)[0].has_events(fitted.events_)


@pytest.mark.parametrize("kind", TREES)
def test_a_lie_about_trees_is_seen(kind):
    fitted = fit(build(kind, epsilon=1.0, max_depth=2), n=500)
    implied, state, extents = look(fitted)
    for lie in (state["counts"] * -1000, state["counts"] + 2**40):
        assert not implied.has_numbers({**extents, "counts": Extent.of([lie])})
    shapes = {name: one.shape for name, one in state.items()}
    n_trees, n_leaves, n_classes = shapes["counts"]
    for lie in ((n_trees + 1, n_leaves, n_classes), (n_trees, 2 * n_leaves, n_classes), ()):
        assert not fitted.implied({**shapes, "counts": lie}).has_shapes({**shapes, "counts": lie})
    (event,) = fitted.events_
    assert not implied.has_events([replace(event, times=event.times + 1)])
    fitted.public_size_ = 2**59  # the array that repeats it lies too
    assert not look(fitted)[0].has_numbers({**extents, "size": Extent.of([np.array(2**59)])})


def test_every_learner_of_a_study_says_what_it_implies():
    """A study's learner whose word has to be taken would be a way around the hub's door."""
    cases = {case.kind: case for case in [*sums.STATISTICS, *sums.WHOLE, *sums.MODELS]}
    for kind in LEARNERS.values():
        if (case := cases.get(kind)) is not None:
            assert_honest(sums.make(case).fit(*sums.records(case, 60)))
            continue
        bound = {"label_bound": 1.0} if kind.predicts_number else {}
        assert_honest(fit(build(kind, epsilon=1.0, **bound)))


def test_an_extent_is_that_of_all_blocks():
    numbers = np.arange(-3.0, 7.0)
    whole = Extent.of([numbers])
    assert Extent.of([numbers[:4], numbers[4:], numbers[:0]]) == whole
    assert (whole.low, whole.high, whole.total) == (-3.0, 6.0, 15.0)
    assert not Bound((1,), norm=1e300).holds(Extent.of([np.array([1e308])]))
    assert not Bound((1,)).holds(Extent(math.nan, math.nan, math.nan, math.nan))


def test_draws_stay_within_their_public_sum():
    who = {"unit": "record", "neighbours": "replace-one"}
    source = Noise(seed=1).open()
    laplace = Laplace(sensitivity=1.0, scale=2.0, **who)
    gaussian = Gaussian(sensitivity=1.0, sigma=2.0, at_delta=1e-6, **who)
    for n in (1, 10, 1000):
        u = source.uniform(200 * n).reshape(200, n)
        drawn = -2.0 * np.sign(u - 0.5) * np.log1p(-2 * np.abs(u - 0.5))
        assert np.abs(drawn.sum(axis=1)).max() < public_sum(laplace, n, probability=UNLIKELY)
        normal = source.normal(200 * n).reshape(200, n) * 2
        assert np.abs(normal.sum(axis=1)).max() < public_sum(gaussian, n, probability=UNLIKELY)
    assert public_sum(None, 5, probability=0.1) == 0
    assert public_sum(gaussian, 4, probability=0.1) == 2 * public_sum(gaussian, 1, probability=0.1)


def test_events_are_alike_up_to_a_relative_difference():
    who = {"unit": "record", "neighbours": "replace-one"}
    event = Laplace(sensitivity=1.0, scale=2.0, **who)
    near = replace(event, scale=2.0 * (1 + 1e-7))
    assert are_alike((near,), (event,), slack=1e-6)
    assert are_alike((event,), (near,), slack=1e-6)
    assert not are_alike((near,), (event,), slack=1e-8)
    assert not are_alike((event, event), (event,), slack=1e-6)
    assert not are_alike(("text",), (event,), slack=1e-6)
    assert not are_alike((replace(event, unit="person"),), (event,), slack=1.0)
