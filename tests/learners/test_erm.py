"""The solver against closed forms, SciPy, scikit-learn, extended precision, and problems built to
break it.
"""

import math
import tracemalloc
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse
from sklearn.linear_model import LogisticRegression

from consilience.errors import GuaranteeVoid, SettingsError
from consilience.learners import erm
from consilience.learners.erm import (
    Huber,
    HuberHinge,
    Logistic,
    Problem,
    PublicFacts,
    Softmax,
    Squared,
    certified_gradient,
    gradient_error,
    solve,
)

MARGIN_LOSSES = [Logistic(), HuberHinge(), HuberHinge(h=0.05)]
REGRESSION_LOSSES = [Squared(2.0), Huber(0.3, 2.0)]
LOSSES = [*MARGIN_LOSSES, *REGRESSION_LOSSES, Softmax(2), Softmax(4)]
name_of = repr


@dataclass(frozen=True)
class Chunks:
    """A table handed out in unequal chunks, as a file reader would."""

    X: np.ndarray
    y: np.ndarray
    length: int

    @property
    def n_records(self):
        return self.X.shape[0]

    @property
    def n_features(self):
        return self.X.shape[1]

    def chunks(self):
        for begin in range(0, self.n_records, self.length):
            yield self.X[begin : begin + self.length], self.y[begin : begin + self.length]


def labels(loss, rng, n):
    if loss.n_outputs > 1:
        return rng.integers(loss.n_outputs, size=n)
    if isinstance(loss, Logistic | HuberHinge):
        return rng.choice([-1.0, 1.0], size=n)
    return rng.uniform(-loss.label_bound, loss.label_bound, size=n)


def problem(loss, n, d, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    X /= np.maximum(1, np.linalg.norm(X, axis=1))[:, None]
    return X, labels(loss, rng, n)


def coef_shape(loss, d):
    return (d,) if loss.n_outputs == 1 else (loss.n_outputs, d)


def objective(X, y, loss, lam, b=0.0, M=None):
    def value(flat):
        f = flat.reshape(coef_shape(loss, X.shape[1]))
        quadratic = 0.0 if M is None else f @ M @ f / 2
        return loss.value(f @ X.T, y).sum() + lam / 2 * (f * f).sum() + quadratic + (b * f).sum()

    return value


# Losses


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_slope_and_bend_are_the_derivatives_of_value(loss):
    rng = np.random.default_rng(1)
    n, k, step = 500, loss.n_outputs, 1e-6
    z = rng.normal(scale=2, size=n if k == 1 else (k, n))
    y = labels(loss, rng, n)
    bend = loss.bend(z, y)
    for a in range(k):
        shift = np.full(n, step) if k == 1 else step * np.eye(k)[:, [a]]
        slope = (loss.value(z + shift, y) - loss.value(z - shift, y)) / (2 * step)
        second = (loss.slope(z + shift, y) - loss.slope(z - shift, y)) / (2 * step)
        # Central differences: rounding 1e-16/1e-6 in values up to 10; kinks of second order are hit
        # by no sample.
        np.testing.assert_allclose(
            loss.slope(z, y) if k == 1 else loss.slope(z, y)[a], slope, atol=1e-8
        )
        np.testing.assert_allclose(bend if k == 1 else bend[a], second, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_public_constants_bound_what_records_in_the_unit_ball_can_do(loss):
    rng = np.random.default_rng(2)
    n, k = 4000, loss.n_outputs
    z = rng.standard_cauchy(size=n if k == 1 else (k, n)) * 3
    y = labels(loss, rng, n)
    slopes = np.abs(loss.slope(z, y)) if k == 1 else np.linalg.norm(loss.slope(z, y), axis=0)
    bends = (
        loss.bend(z, y)
        if k == 1
        else np.linalg.eigvalsh(loss.bend(z, y).transpose(2, 0, 1)).max(axis=1)
    )
    assert slopes.max() <= loss.lipschitz
    assert bends.max() <= loss.curvature + 1e-15
    assert loss.value(np.zeros_like(z), y).max() <= loss.at_zero + 1e-15
    if loss.monotone:
        assert np.all(loss.slope(z, y) * y <= 0)


@pytest.mark.parametrize("loss", [*MARGIN_LOSSES, Softmax(3)], ids=name_of)
@pytest.mark.parametrize("size", [50.0, 1e3, 1e8, 1e300])
def test_losses_survive_huge_outputs(loss, size):
    if loss.n_outputs == 1:
        z, y = np.array([size, -size, size, -size]), np.array([1.0, 1.0, -1.0, -1.0])
    else:
        z, y = np.array([[size, -size], [0.0, 0.0], [-size, size]]), np.array([0, 0])
    for evaluated in (loss.value(z, y), loss.slope(z, y), loss.bend(z, y)):
        assert np.all(np.isfinite(evaluated))
    np.testing.assert_allclose(
        loss.value(z, y)[1], size if loss.n_outputs == 1 else 2 * size, rtol=0.1
    )
    assert loss.value(z, y)[0] < 1e-20


def test_logistic_derivatives_keep_their_relative_accuracy_in_the_tails():
    z = np.array([-250.0, -40.0, 40.0, 250.0])
    e = np.exp(-np.abs(z))
    np.testing.assert_allclose(Logistic().bend(z, np.ones(4)), e / (1 + e) ** 2, rtol=1e-15)
    np.testing.assert_allclose(Logistic().slope(z, np.ones(4))[2:], -e[2:], rtol=1e-15)


# Answers


def test_squared_loss_gives_the_closed_form_of_ridge():
    X, y = problem(Squared(2.0), 300, 7)
    rng = np.random.default_rng(3)
    b, root = rng.normal(size=7), rng.normal(size=(7, 7))
    M = root @ root.T
    solution = solve(
        X, y, Problem(Squared(2.0), regularization=0.5, linear=b, matrix=M), tolerance=1e-9
    )
    exact = np.linalg.solve(X.T @ X + 0.5 * np.eye(7) + M, X.T @ y - b)
    # A gradient of τ means a distance of at most τ/λ.
    assert np.linalg.norm(solution.coef - exact) <= 1e-9 / 0.5 + 1e-13


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_answers_agree_with_scipy(loss):
    X, y = problem(loss, 200, 5)
    lam, shape = 1.0, coef_shape(loss, 5)
    b = np.random.default_rng(4).normal(size=shape)
    solution = solve(X, y, Problem(loss, regularization=lam, linear=b), tolerance=1e-9)
    value = objective(X, y, loss, lam, b)
    peer = optimize.minimize(
        value,
        np.zeros(math.prod(shape)),
        jac=lambda f: certified_gradient(
            X, y, Problem(loss, regularization=lam, linear=b), f.reshape(shape)
        ).ravel(),
        method="L-BFGS-B",
        options={"ftol": 0.0, "gtol": 1e-10, "maxiter": 5000, "maxcor": 50},
    )
    assert value(solution.coef.ravel()) <= peer.fun + 1e-10
    np.testing.assert_allclose(solution.coef.ravel(), peer.x, atol=1e-5)


def test_logistic_agrees_with_scikit_learn():
    X, y = problem(Logistic(), 3000, 12)
    solution = solve(X, y, Problem(Logistic(), regularization=3.0), tolerance=1e-8)
    peer = LogisticRegression(C=1 / 3.0, fit_intercept=False, tol=1e-12, max_iter=1000).fit(X, y)
    np.testing.assert_allclose(solution.coef, peer.coef_[0], atol=1e-6)


def test_softmax_agrees_with_scikit_learn_and_sums_to_zero_over_classes():
    X, y = problem(Softmax(4), 3000, 6)
    solution = solve(X, y, Problem(Softmax(4), regularization=3.0), tolerance=1e-8)
    peer = LogisticRegression(C=1 / 3.0, fit_intercept=False, tol=1e-12, max_iter=1000).fit(X, y)
    np.testing.assert_allclose(solution.coef, peer.coef_, atol=1e-6)
    assert np.abs(solution.coef.sum(axis=0)).max() <= 1e-8


def test_a_start_near_the_answer_saves_passes_and_does_not_change_it():
    X, y = problem(Logistic(), 5000, 10)
    cold = solve(X, y, Problem(Logistic(), regularization=1.0), tolerance=1e-7)
    warm = solve(X, y, Problem(Logistic(), regularization=1.0), tolerance=1e-7, start=cold.coef)
    assert warm.passes < cold.passes
    assert np.linalg.norm(warm.coef - cold.coef) <= 2e-7


# Certificates


def certified(X, y, loss, *, lam, b=None, tolerance, source=None):
    """Solve, and recompute the gradient independently of the solver's own bookkeeping."""
    records, given = (X, y) if source is None else source
    solution = solve(
        records, given, Problem(loss, regularization=lam, linear=b), tolerance=tolerance
    )
    dense = X.toarray() if sparse.issparse(X) else X
    slope = loss.slope(solution.coef.astype(np.longdouble) @ dense.T.astype(np.longdouble), y)
    exact = (
        slope @ dense.astype(np.longdouble)
        + np.longdouble(lam) * solution.coef
        + (0 if b is None else b)
    )
    error = gradient_error(
        PublicFacts(
            loss,
            n_records=len(y),
            n_features=X.shape[1],
            regularization=lam,
            linear_norm=0.0 if b is None else float(np.linalg.norm(b)),
            tolerance=tolerance,
        )
    )
    assert solution.gradient_norm <= tolerance
    assert float(np.sqrt((exact**2).sum())) <= tolerance + error
    return solution


def degenerate(X, y, kind):
    X, y = X.copy(), y.copy()
    d = X.shape[1]
    if kind == "zero columns":
        X[:, : max(1, d // 2)] = 0
    elif kind == "duplicated columns":
        X[:, d // 2 :] = X[:, : d - d // 2]
        X /= 2
    elif kind == "one class":
        y[:] = y[0] if len(y) else 0
    elif kind == "separable" and y.dtype == float:
        X[:, 0] = np.sign(y) / 2
        X[:, 1:] /= 2
    elif kind == "all records equal":
        X[:] = X[:1]
    return X, y


KINDS = [
    "plain",
    "zero columns",
    "duplicated columns",
    "one class",
    "separable",
    "all records equal",
]


@settings(max_examples=400, deadline=None)
@given(
    loss=st.sampled_from([*LOSSES, Softmax(10)]),
    n=st.sampled_from([0, 1, 2, 7, 60, 400]),
    d=st.sampled_from([1, 2, 5, 30]),
    strength=st.sampled_from([1e-8, 1e-4, 1e-2, 1.0, 1e6]),
    noise=st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_gradient_is_certified_whatever_the_problem(loss, n, d, strength, noise, kind, seed):
    X, y = degenerate(*problem(loss, n, d, seed), kind)
    lam = max(n, 1) * strength
    b = np.random.default_rng(seed).normal(size=coef_shape(loss, d))
    b *= noise / np.linalg.norm(b)
    # The smallest tolerance that extended precision vouches for would be refused by few; take what
    # learners use (1e-9 per record), or the public floor where λ and b leave no such accuracy.
    floor = 4.1 * gradient_error(
        PublicFacts(
            loss, n_records=n, n_features=d, regularization=lam, linear_norm=noise * 1.0001
        ),
        dtype=np.longdouble,
    )
    certified(X, y, loss, lam=lam, b=b, tolerance=max(1e-9 * max(n, 1), floor))


@pytest.mark.parametrize("loss", [Logistic(), HuberHinge(), Softmax(3)], ids=name_of)
def test_few_passes_suffice_on_ordinary_problems(loss):
    X, y = problem(loss, 20_000, 20)
    solution = certified(X, y, loss, lam=20_000 * 1e-3, tolerance=1e-9 * 20_000)
    assert solution.passes <= 15


def test_no_records_leave_the_noise_over_the_regularization():
    b = np.array([3.0, -4.0])
    solution = solve(
        np.empty((0, 2)),
        np.empty(0),
        Problem(Logistic(), regularization=2.0, linear=b),
        tolerance=1e-12,
    )
    np.testing.assert_allclose(solution.coef, -b / 2, rtol=1e-15)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
@pytest.mark.parametrize(("strict", "plain"), [(0, 10_000), (0, 3)])
def test_the_guaranteed_methods_reach_the_tolerance_alone(loss, strict, plain, monkeypatch):
    monkeypatch.setattr(erm, "_STRICT_AFTER", strict)
    monkeypatch.setattr(erm, "_PLAIN_AFTER", plain)
    X, y = problem(loss, 300, 4)
    certified(X, y, loss, lam=60.0, b=np.full(coef_shape(loss, 4), 3.0), tolerance=1e-7)


def test_more_features_than_memory_for_a_hessian_still_converge():
    X, y = problem(Logistic(), 150, 3000)
    certified(X, y, Logistic(), lam=0.15, tolerance=1e-7)


@pytest.mark.parametrize(
    ("loss", "n", "d", "strength", "noise", "seed"),
    [
        (HuberHinge(h=0.001), 3000, 30, 1e-4, 1e6, 3510079461),
        (Softmax(10), 60, 600, 1e-8, 0.0, 374834488),
    ],
    ids=str,
)
def test_problems_that_once_hung_are_solved(loss, n, d, strength, noise, seed):
    # The first: a Hessian indefinite in single precision. The second: a diagonal metric that left
    # the records' span.
    X, y = degenerate(*problem(loss, n, d, seed), "all records equal")
    b = np.random.default_rng(seed).normal(size=coef_shape(loss, d))
    b *= noise / np.linalg.norm(b)
    assert (
        certified(X, y, loss, lam=n * strength, b=b, tolerance=max(1e-9 * n, 1e-4 * noise)).passes
        < 500
    )


def test_extended_precision_takes_over_where_double_cannot_vouch():
    X, y = problem(Logistic(), 50, 5)
    solution = certified(X, y, Logistic(), lam=0.5, b=np.full(5, 1e6), tolerance=1e-9)
    assert solution.coef.dtype == np.longdouble


def decimal_gradient(X, y, loss, coef, lam, b):
    """The gradient from its definition, record by record, in 150 digits."""
    with localcontext(Context(prec=150)):
        rows = [[Decimal(float(value)) for value in row] for row in X]
        total = [Decimal(lam) * f + Decimal(float(v)) for f, v in zip(coef, b, strict=True)]
        for row, label in zip(rows, y, strict=True):
            z = sum((f * x for f, x in zip(coef, row, strict=True)), Decimal(0))
            label = Decimal(float(label))
            if isinstance(loss, Logistic):
                slope = -label / (1 + (label * z).exp())
            elif isinstance(loss, HuberHinge):
                h = Decimal(loss.h)
                slope = -label * min(max((1 + h - label * z) / (2 * h), Decimal(0)), Decimal(1))
            else:
                k = Decimal(loss.threshold)
                slope = min(max(z - label, -k), k)
            total = [t + slope * x for t, x in zip(total, row, strict=True)]
        return float(sum(t * t for t in total).sqrt())


@pytest.mark.parametrize("loss", [Logistic(), HuberHinge(0.3), Huber(0.2, 1.0)], ids=name_of)
def test_decimal_numbers_take_over_where_extended_precision_cannot_vouch(loss):
    X, y = problem(loss, 60, 4)
    b, lam, tolerance = np.full(4, 2.0), 0.01, 1e-35
    part = Problem(loss, regularization=lam, linear=b)
    solution = solve(X, y, part, tolerance=tolerance)
    assert solution.gradient_norm <= tolerance
    assert decimal_gradient(X, y, loss, solution.coef, lam, b) <= 1.25 * tolerance
    near = solve(X, y, part, tolerance=1e-9)
    assert np.linalg.norm(solution.coef.astype(np.float64) - near.coef) <= 2e-9 / lam


def test_decimal_numbers_solve_for_several_classes_sparse_and_matrix():
    X, y = problem(Softmax(3), 60, 4)
    softmax = Problem(Softmax(3), regularization=0.1)
    for records in (X, sparse.csr_array(X)):
        assert solve(records, y, softmax, tolerance=1e-35).gradient_norm <= 1e-35
    X, y = problem(Logistic(), 60, 4)
    curved = Problem(Logistic(), regularization=0.1, matrix=np.eye(4))
    deep, near = (solve(X, y, curved, tolerance=t).coef for t in (1e-35, 1e-9))
    assert np.linalg.norm(deep.astype(np.float64) - near) <= 1e-8


def test_plain_steps_alone_reach_the_tolerance_in_decimal_numbers(monkeypatch):
    X, y = problem(Logistic(), 30, 3)
    monkeypatch.setattr(erm._Total, "inverse_hessian", lambda *_: lambda gradient: -gradient)
    total = erm._total_over(X, y, Problem(Logistic(), regularization=2.0), np.float64)
    _, norm = erm._refine(total, np.zeros(3), 1e-30, lambda gradient: -gradient)
    assert norm <= 1e-30


@pytest.mark.parametrize(
    "settings",
    [
        {"tolerance": 1e-100},
        {"tolerance": 0.0},
        {"tolerance": math.nan},
        {"regularization": 0.0},
        {"regularization": math.nan},
    ],
    ids=name_of,
)
def test_settings_that_cannot_work_are_refused_before_a_record_is_read(settings):
    class Unreadable:
        n_records, n_features = 10, 2

        def chunks(self):
            raise AssertionError("a record was read")

    with pytest.raises(SettingsError):
        solve(
            Unreadable(),
            None,
            Problem(Logistic(), settings.get("regularization", 1.0)),
            tolerance=settings.get("tolerance", 1e-6),
        )


def test_a_matrix_is_refused_for_several_classes():
    with pytest.raises(SettingsError, match="one output"):
        solve(
            np.eye(2),
            [0, 1],
            Problem(Softmax(2), regularization=1.0, matrix=np.eye(2)),
            tolerance=1e-6,
        )


def test_records_that_are_not_finite_never_pass_as_solved():
    with pytest.raises(GuaranteeVoid):
        solve([[np.nan]], [1.0], Problem(Logistic(), regularization=1.0), tolerance=1e-6)


# Sources


@settings(max_examples=25, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    n=st.sampled_from([3, 100, 3000]),
    length=st.sampled_from([1, 7, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_dense_sparse_chunked_and_permuted_records_give_one_answer(loss, n, length, seed):
    X, y = problem(loss, n, 6, seed)
    X[np.random.default_rng(seed).random(X.shape) < 0.5] = 0
    order = np.random.default_rng(seed).permutation(n)
    lam, tolerance = 0.01 * n, 1e-9 * n
    dense = certified(X, y, loss, lam=lam, tolerance=tolerance)
    for source in [
        (np.asfortranarray(X), y),
        (sparse.csr_array(X), y),
        (sparse.csr_matrix(X), y),
        (Chunks(X, y, max(length, n // 50)), None),
        (Chunks(sparse.csr_array(X), y, max(length, n // 50)), None),
        (X[order], y[order]),
    ]:
        other = certified(X, y, loss, lam=lam, tolerance=tolerance, source=source)
        assert np.linalg.norm(other.coef - dense.coef) <= 2.001 * tolerance / lam


def test_single_precision_records_are_solved_in_double():
    X, y = problem(Logistic(), 2000, 8)
    X = X.astype(np.float32)
    single = certified(X, y, Logistic(), lam=2.0, tolerance=1e-8)
    np.testing.assert_array_equal(
        single.coef,
        solve(X.astype(float), y, Problem(Logistic(), regularization=2.0), tolerance=1e-8).coef,
    )


# Rounding


@settings(max_examples=80, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    n=st.sampled_from([1, 10, 300, 9000]),
    d=st.sampled_from([1, 3, 40]),
    strength=st.sampled_from([1e-6, 1e-3, 1.0]),
    noise=st.sampled_from([0.0, 10.0, 1e6]),
    kind=st.sampled_from([*KINDS, "aligned", "alternating"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rounding_stays_within_the_public_bound(loss, n, d, strength, noise, kind, seed):
    rng = np.random.default_rng(seed)
    X, y = degenerate(*problem(loss, n, d, seed), kind)
    if kind == "aligned":
        X = np.abs(X)  # no cancellation in the sum: its rounding is as large as it gets
    elif kind == "alternating":
        X *= np.where(np.arange(d) % 2, 1, -1) * np.where(np.arange(n) % 2, 1, -1)[:, None]
    lam = n * strength
    shape = coef_shape(loss, d)
    b, f = rng.normal(size=shape), rng.normal(size=shape)
    b *= noise / np.linalg.norm(b)
    # The largest coefficients that the bound admits.
    f *= (noise + math.sqrt(noise**2 + 2 * lam * n * loss.at_zero)) / lam / np.linalg.norm(f)
    double, extended = (
        certified_gradient(X, y, Problem(loss, regularization=lam, linear=b), f, dtype=dtype)
        for dtype in (np.float64, np.longdouble)
    )
    bounds = [
        gradient_error(
            PublicFacts(loss, n_records=n, n_features=d, regularization=lam, linear_norm=noise),
            dtype=dtype,
        )
        for dtype in (np.float64, np.longdouble)
    ]
    assert float(np.sqrt(((double - extended) ** 2).sum())) <= sum(bounds)
    assert bounds[1] < bounds[0] / 1000


def test_the_bound_leaves_room_for_the_tolerance_that_learners_use():
    for n, strength in [(8_678, 1e-2), (8_678, 1e-3), (346_598, 1e-2), (346_598, 1e-4)]:
        lam = n * strength
        error = gradient_error(
            PublicFacts(
                Logistic(), n_records=n, n_features=54, regularization=lam, linear_norm=2500.0
            )
        )
        assert 4 * error <= max(1e-8 * lam, 1e-9 * n)


# Memory


@pytest.mark.parametrize(
    ("loss", "layout"), [(Logistic(), "C"), (Logistic(), "F"), (Softmax(4), "C")], ids=str
)
def test_dense_records_are_not_copied(loss, layout):
    X, y = problem(loss, 120_000, 40)
    X = np.asarray(X, order=layout)
    solve(X[:100], y[:100], Problem(loss, regularization=1.0), tolerance=1e-6)
    tracemalloc.start()
    solve(X, y, Problem(loss, regularization=120.0), tolerance=1e-4)
    extra = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert extra <= 0.4 * X.nbytes


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_labels_of_another_shape_mix_no_records(loss):
    X, y = problem(loss, 60, 4)
    for labels in (y[:, None], y[None, :], y[:1], y[:59]):
        with pytest.raises(GuaranteeVoid, match="one for each record"):
            solve(X, labels, Problem(loss, regularization=0.1), tolerance=1e-6)
        if isinstance(loss, Softmax):
            with pytest.raises(GuaranteeVoid, match="one for each record"):
                loss.slope(np.zeros((loss.n_classes, 60)), labels)
