"""Thousands of small problems at once, against the solver that takes them one by one."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from consilience.errors import GuaranteeVoid, SettingsError
from consilience.learners import batch
from consilience.learners.batch import SiteProblems, solve_many
from consilience.learners.erm import (
    Huber,
    HuberHinge,
    Logistic,
    Problem,
    PublicFacts,
    Softmax,
    Squared,
    gradient_error,
    solve,
)

LOSSES = [Logistic(), HuberHinge(), HuberHinge(h=0.05), Huber(0.3, 1.0), Softmax(2), Softmax(5)]
name_of = repr


def labels(loss, rng, n):
    if loss.n_outputs > 1:
        return rng.integers(loss.n_outputs, size=n)
    if isinstance(loss, Huber):
        return rng.uniform(-1, 1, size=n)
    return rng.choice([-1.0, 1.0], size=n)


def problem(loss, counts, d, seed=0):
    """Return records in the unit ball, some of them repeated and some zero, their labels and their
    sites.
    """
    rng = np.random.default_rng(seed)
    sites = np.repeat(np.arange(len(counts)), counts)
    X = rng.normal(size=(len(sites), d))
    X /= np.maximum(1, np.linalg.norm(X, axis=1))[:, None]
    X[rng.random(len(X)) < 0.1] = 0
    X[1:][rng.random(max(len(X) - 1, 0)) < 0.2] = X[:1]
    return X, labels(loss, rng, len(X)), sites


def coef_shape(loss, d):
    return (d,) if loss.n_outputs == 1 else (loss.n_outputs, d)


def public_tolerance(loss, counts, d, lam, linear_norm=0.0):
    """1e-8 of the regularisation, or the floor that rounding sets, from the largest site."""
    facts = {"n_records": max(counts, default=0), "n_features": d, "linear_norm": linear_norm}
    lam = float(np.min(lam))
    return max(
        1e-8 * lam,
        8 * gradient_error(PublicFacts(loss, regularization=lam, tolerance=1e-8 * lam, **facts)),
    )


def exact_gradient_norm(X, y, loss, coef, lam, b=0.0):
    """Return the gradient's norm in extended precision, independently of every solver."""
    X, coef = X.astype(np.longdouble), coef.astype(np.longdouble)
    slope = loss.slope(coef @ X.T, y)
    return float(np.linalg.norm((slope @ X + np.longdouble(lam) * coef + b).astype(float)))


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    d=st.integers(1, 60),
    strength=st.floats(-4, 2),
    noise=st.sampled_from([0.0, 0.1, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_site_gets_what_the_single_solver_gives_it(loss, counts, d, strength, noise, seed):
    X, y, sites = problem(loss, counts, d, seed)
    rng = np.random.default_rng(seed)
    lam = 10.0**strength * rng.uniform(1, 2, len(counts))
    b = noise * rng.normal(size=(len(counts), *coef_shape(loss, d))) if noise else None
    norm = 0.0 if b is None else max(float(np.linalg.norm(row)) for row in b)
    tolerance = public_tolerance(loss, counts, d, lam, norm)
    shuffled = rng.permutation(len(X))
    found = solve_many(
        X[shuffled],
        y[shuffled],
        SiteProblems(
            loss,
            sites=sites[shuffled],
            n_sites=len(counts),
            regularization=lam,
            linear=b,
            tolerance=tolerance,
        ),
    )
    assert found.coef.shape == (len(counts), *coef_shape(loss, d))
    for j in range(len(counts)):
        mine, bj = sites == j, None if b is None else b[j]
        one = solve(
            X[mine], y[mine], Problem(loss, regularization=lam[j], linear=bj), tolerance=tolerance
        )
        # Two gradients of at most τ, each off by at most τ/8, are at points at most 2.25τ/λ apart.
        assert np.linalg.norm(found.coef[j] - one.coef) <= 2.25 * tolerance / lam[j]
        assert found.gradient_norm[j] <= tolerance
        exact = exact_gradient_norm(
            X[mine], y[mine], loss, found.coef[j], lam[j], 0.0 if bj is None else bj
        )
        assert exact <= found.gradient_norm[j] + tolerance / 8


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_answers_agree_to_one_part_in_a_million(loss):
    counts = np.random.default_rng(1).integers(0, 40, size=70)
    X, y, sites = problem(loss, counts, 30)
    tolerance = public_tolerance(loss, counts, 30, 0.05)
    found = solve_many(
        X, y, SiteProblems(loss, sites=sites, n_sites=70, regularization=0.05, tolerance=tolerance)
    )
    for j in range(70):
        mine = sites == j
        one = solve(X[mine], y[mine], Problem(loss, regularization=0.05), tolerance=tolerance)
        np.testing.assert_allclose(found.coef[j], one.coef, atol=1e-6)
    assert len(found.alone) == 0


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
@pytest.mark.parametrize("lam", [1e-7, 1e-4, 1e4, 1e9])
@pytest.mark.parametrize("d", [3, 40])
def test_extreme_regularization_still_ends_in_a_certificate(loss, lam, d):
    counts = [0, 1, 2, 22, 22, 30]
    X, y, sites = problem(loss, counts, d)
    tolerance = public_tolerance(loss, counts, d, lam)
    found = solve_many(
        X, y, SiteProblems(loss, sites=sites, n_sites=6, regularization=lam, tolerance=tolerance)
    )
    for j in range(6):
        mine = sites == j
        assert exact_gradient_norm(X[mine], y[mine], loss, found.coef[j], lam) <= tolerance * 9 / 8


@pytest.mark.parametrize("loss", [Logistic(), HuberHinge(), Softmax(4)], ids=name_of)
@pytest.mark.parametrize("d", [4, 50])
def test_a_site_of_one_class_is_like_any_other(loss, d):
    X, _, sites = problem(loss, [22, 22, 5], d)
    y = np.ones(len(X), dtype=np.int64)
    tolerance = public_tolerance(loss, [22], d, 22e-4)
    found = solve_many(
        X, y, SiteProblems(loss, sites=sites, n_sites=3, regularization=22e-4, tolerance=tolerance)
    )
    assert len(found.alone) == 0
    for j in range(3):
        one = solve(
            X[sites == j], y[sites == j], Problem(loss, regularization=22e-4), tolerance=tolerance
        )
        np.testing.assert_allclose(found.coef[j], one.coef, atol=1e-6)


def test_a_site_without_records_gets_the_minimum_of_noise_and_ridge():
    b = np.arange(12.0).reshape(4, 3)
    found = solve_many(
        np.zeros((0, 3)),
        [],
        SiteProblems(
            Logistic(),
            sites=np.zeros(0, int),
            n_sites=4,
            regularization=2.0,
            linear=b,
            tolerance=1e-9,
        ),
    )
    np.testing.assert_array_equal(found.coef, -b / 2)
    nothing = solve_many(
        np.zeros((0, 3)),
        [],
        SiteProblems(
            Softmax(3), sites=np.zeros(0, int), n_sites=0, regularization=2.0, tolerance=1e-9
        ),
    )
    assert nothing.coef.shape == (0, 3, 3)


def test_sparse_single_precision_and_scattered_records_give_the_same_answer():
    X, y, sites = problem(Logistic(), [10] * 50, 20)
    X = X.astype(np.float32).astype(np.float64)
    how = {"n_sites": 50, "regularization": 0.1, "tolerance": 1e-9}
    plain = solve_many(X, y, SiteProblems(Logistic(), sites=sites, **how)).coef
    for other in (sparse.csr_array(X), X.astype(np.float32), np.asfortranarray(X)):
        np.testing.assert_array_equal(
            solve_many(other, y, SiteProblems(Logistic(), sites=sites, **how)).coef, plain
        )
    order = np.arange(500).reshape(50, 10).T.ravel()  # keeps the order within a site
    np.testing.assert_array_equal(
        solve_many(X[order], y[order], SiteProblems(Logistic(), sites=sites[order], **how)).coef,
        plain,
    )


def test_the_answer_depends_neither_on_threads_nor_on_other_sites_records(monkeypatch):
    monkeypatch.setattr(batch, "_ENTRIES", 64 * 22 * 40)  # several blocks
    X, y, sites = problem(Logistic(), [22] * 300, 40)
    how = {"sites": sites, "n_sites": 300, "regularization": 0.01, "tolerance": 1e-9}
    first = solve_many(X, y, SiteProblems(Logistic(), **how), n_threads=1).coef
    for n_threads in (1, 2, 5, None):
        np.testing.assert_array_equal(
            solve_many(X, y, SiteProblems(Logistic(), **how), n_threads=n_threads).coef, first
        )
    others = sites != 7
    X[others], y[others] = X[others][::-1], -y[others]
    np.testing.assert_array_equal(
        solve_many(X, y, SiteProblems(Logistic(), **how)).coef[7], first[7]
    )
    task = batch._Task(X, y, SiteProblems(Logistic(), **how))
    X[others] = np.nan  # the other sites never converge, or never start
    for block in task.blocks():
        task.solve_block(block)
    np.testing.assert_array_equal(task.coef[7, 0], first[7])


def test_sites_that_the_fast_method_misses_or_refuses_are_solved_alone(monkeypatch):
    X, y, sites = problem(Logistic(), [20, 20, 20, 200], 300)
    tolerance = public_tolerance(Logistic(), [200], 300, 0.1)
    how = {"sites": sites, "n_sites": 4, "regularization": 0.1, "tolerance": tolerance}
    found = solve_many(X, y, SiteProblems(Logistic(), **how))
    np.testing.assert_array_equal(found.alone, [3])  # too large
    monkeypatch.setattr(
        batch, "_solve_sites", lambda *arguments: arguments[-1][0].fill(1e-3)
    )  # so that no site is solved
    missed = solve_many(X, y, SiteProblems(Logistic(), **how))
    np.testing.assert_array_equal(missed.alone, [0, 1, 2, 3])
    np.testing.assert_allclose(missed.coef, found.coef, atol=1e-6)


def test_a_certificate_beyond_the_public_radius_does_not_count():
    # The error bound of a computed gradient holds up to that length only.
    X, y, sites = problem(Logistic(), [22] * 3, 30)
    task = batch._Task(X, y, SiteProblems(Logistic(), sites, 3, 0.1, 1e-8))
    task.solve_block(np.arange(3))
    assert np.all(task.length <= task.radius)
    np.testing.assert_allclose(task.length, np.linalg.norm(task.coef, axis=(1, 2)), rtol=1e-12)
    np.testing.assert_allclose(
        task.radius, (math.sqrt(2 * 0.1 * 22 * math.log(2)) + 2e-8) / 0.1, rtol=1e-12
    )


@pytest.mark.parametrize("as_sparse", [False, True])
def test_memory_beyond_the_answer_is_a_few_blocks(as_sparse):
    X, y, sites = problem(Logistic(), [22] * 4000, 60)
    order = np.random.default_rng(0).permutation(len(X))
    X, y, sites = X[order], y[order], sites[order]
    if as_sparse:
        X = sparse.csr_array(X)
    problems = SiteProblems(Logistic(), sites, 4000, regularization=0.1, tolerance=1e-8)
    solve_many(X, y, problems, n_threads=2)
    tracemalloc.start()
    found = solve_many(X, y, problems, n_threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Two threads hold a gathered block each, sparse ones twice; per record a label and its place in
    # the order.
    assert peak <= found.coef.nbytes + 2 * 8 * batch._ENTRIES * (
        3 if as_sparse else 1.2
    ) + 40 * len(y)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"regularization": 0.0}, "regularization"),
        ({"regularization": [1.0, 2.0]}, "regularization"),
        ({"tolerance": 1e-18}, "tolerance"),
        ({"tolerance": [1e-9, 1e-18, 1e-9]}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"linear": np.zeros((2, 4))}, "linear"),
        ({"linear": np.full((3, 4), 1e9)}, "tolerance"),
        ({"sites": [0, 1, 2, 3] * 3}, "sites"),
        ({"sites": [0, 1, 2, -1] * 3}, "sites"),
        ({"sites": [0.0] * 12}, "site"),
        ({"sites": [0] * 11}, "site"),
        ({"loss": Squared(1.0)}, "loss"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_before_a_record_is_read(change, word):
    X, y, sites = problem(Logistic(), [4] * 3, 4)
    how = {
        "loss": Logistic(),
        "sites": sites,
        "n_sites": 3,
        "regularization": 1.0,
        "tolerance": 1e-9,
        **change,
    }
    with pytest.raises(SettingsError, match=word):
        solve_many(np.full_like(X, np.nan), y, SiteProblems(**how))


def test_records_that_are_not_finite_are_refused():
    X, y, sites = problem(Logistic(), [4] * 3, 4)
    X[5, 1] = np.nan
    with pytest.raises(GuaranteeVoid):
        solve_many(
            X,
            y,
            SiteProblems(Logistic(), sites=sites, n_sites=3, regularization=1.0, tolerance=1e-9),
        )
