"""Many small problems at once: one linear model for each of thousands of small sites.

:func:`solve_many` minimises, for every site, the objective of
:func:`consilience.learners.erm.solve` and vouches for the same thing, a gradient shorter than a
public tolerance. What differs is the price. A small problem solved alone costs mostly calls; here
sites go through Newton's method side by side, each in a lane of the processor's vector registers,
and a site with fewer records than features is solved in as many unknowns as it has records. No
number of one site enters the arithmetic of another.

Newton's method proposes, the certificate decides: every gradient is computed anew from the records
at the returned point, by code that knows nothing of the iteration, and a site whose gradient is too
long goes to `erm.solve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import joblib
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from consilience.errors import SettingsError
from consilience.learners.compiled import compiled
from consilience.learners.erm import (
    Huber,
    HuberHinge,
    Logistic,
    Loss,
    Matrix,
    Problem,
    PublicFacts,
    Softmax,
    gradient_error,
    solve,
)

Array = NDArray[Any]

# sites side by side: eight vectors of four; fewer cost more loop overhead, more leave the cache
_LANES = 32
_UNKNOWNS = 160  # of the largest system solved here; beyond, LAPACK is faster than plain loops
_RECORDS = 4096  # of the largest site solved here; `gradient_error` allows for no longer sum
_ENTRIES = 1 << 20  # of the largest site solved here, and of a block of sites: 8 MB
# of a site solved in as many unknowns as features: its records are copied into a lane
_PRIMAL_ENTRIES = 1 << 15
_ITERATIONS = 60  # steps; Newton's method needs about seven
_TRIALS = 40  # evaluations along one direction

_LOGISTIC, _HUBER_HINGE, _HUBER, _SOFTMAX = range(4)


def _summing(function: Callable[..., Any]) -> Any:
    """Compile, sums in any order, which the error bounds allow too."""
    return compiled(function, fast={"contract", "reassoc"})


@dataclass(frozen=True)
class Solutions:
    """One row per site: at `coef` the computed gradient is no longer than `gradient_norm`.

    `alone` lists the sites that went through `erm.solve`: too large, or missed by the fast method.
    """

    coef: Array
    gradient_norm: Array
    alone: Array


class SiteProblems(NamedTuple):
    """One problem per site: λ, the tolerance and b of each, and which records are its own.

    `sites` holds the site, 0 to n_sites - 1, of each record; records of a site need not be
    neighbours, but no copy is made of dense float64 records that are. `regularization` and
    `tolerance` are one number, or one per site; `linear` is (site, feature), or (site, class,
    feature) where the loss has several outputs.
    """

    loss: Loss
    sites: ArrayLike
    n_sites: int
    regularization: ArrayLike
    tolerance: ArrayLike
    linear: ArrayLike | None = None


def solve_many(
    X: Matrix, y: ArrayLike, problems: SiteProblems, *, n_threads: int | None = None
) -> Solutions:
    """Minimise Σ loss + (λ/2)‖f‖² + b·f over each site's records, to within its tolerance.

    The result is shaped as `linear` is. A site without records gets -b/λ. Finite records in the
    unit ball and encoded labels are the caller's promise.

    `n_threads` defaults to the cores this process may use. The answer does not depend on it.

    Raises
    ------
    SettingsError
        If a parameter cannot work: in particular a tolerance below four times the rounding error of
        the gradient in double precision. None of this depends on the records beyond the sites'
        sizes.
    GuaranteeVoid
        If the records are not finite.
    """
    X = sparse.csr_array(X) if sparse.issparse(X) else np.asarray(X)
    task = _Task(X, np.asarray(y), problems)
    with ThreadPoolExecutor(n_threads or joblib.cpu_count()) as pool:
        list(pool.map(task.solve_block, task.blocks()))
    # Where a norm is not a number this is false, and the solver it goes to says why.
    certified = (task.gradient_norm <= task.tolerance) & (task.length <= task.radius)
    alone = np.flatnonzero(~certified)
    for site in alone.tolist():
        task.solve_alone(site)
    return Solutions(
        task.coef[:, 0] if task.loss.n_outputs == 1 else task.coef, task.gradient_norm, alone
    )


class _Task:
    """The checked sites of one call, and the arrays that blocks of sites write into."""

    def __init__(self, X: Matrix, y: Array, problems: SiteProblems) -> None:
        loss, n_sites = problems.loss, problems.n_sites
        self.X, self.loss = X, loss
        self.shape = _shape_of(loss)
        self.y = np.asarray(y, np.float64)
        self._divide(y, np.asarray(problems.sites), n_sites)
        self.regularization = _per_site("regularization", problems.regularization, n_sites)
        self.tolerance = _per_site("tolerance", problems.tolerance, n_sites)
        self.coef = np.empty((n_sites, loss.n_outputs, X.shape[1]))  # zeros would be paged in first
        self.linear, self.linear_norm = None, np.zeros(n_sites)
        if problems.linear is not None:
            self.linear = self._read_linear(np.asarray(problems.linear, np.float64))
            lengths = np.sqrt(np.einsum("mkd,mkd->m", self.linear, self.linear))
            self.linear_norm = lengths * (1 + 1e-9)
        self._check_tolerance()
        # The certificate's rounding error is known up to this length, and the minimum is shorter:
        # `gradient_error`, 1.
        reach = self.linear_norm + np.sqrt(
            np.square(self.linear_norm) + 2 * self.regularization * self.counts * loss.at_zero
        )
        self.radius = (reach + 2 * self.tolerance) / self.regularization
        self.gradient_norm = np.full(n_sites, math.inf)
        self.length = np.zeros(n_sites)

    def _divide(self, y: Array, sites: Array, n_sites: int) -> None:
        """Find how many records each site has, and where they are."""
        n = self.X.shape[0]
        if y.shape != (n,) or sites.shape != (n,) or not np.issubdtype(sites.dtype, np.integer):
            raise SettingsError(
                f"solve_many needs one label and one integer site for each of {n} records. "
                f"Got shapes {y.shape} and {sites.shape}, dtype {sites.dtype}. No record was read."
            )
        counts = (
            np.bincount(sites, minlength=n_sites)
            if n and sites.min() >= 0
            else np.zeros(n_sites, np.int64)
        )
        if len(counts) != n_sites or counts.sum() != n:
            raise SettingsError(
                "The 'sites' parameter of solve_many must lie in 0 to n_sites - 1 = "
                f"{n_sites - 1}. No record was read."
            )
        self.counts = counts
        self.begins = np.cumsum(counts) - counts
        self.order = None if np.all(sites[1:] >= sites[:-1]) else np.argsort(sites, kind="stable")

    def _read_linear(self, given: Array) -> Array:
        n_sites, outputs, d = self.coef.shape
        if given.shape != (self.coef.shape if outputs > 1 else (n_sites, d)):
            raise SettingsError(
                f"The 'linear' parameter of solve_many must have a row for each of {n_sites} "
                f"sites, shaped like the coefficients. Got shape {given.shape} instead. No "
                "record was read."
            )
        return np.ascontiguousarray(given.reshape(self.coef.shape))

    def _check_tolerance(self) -> None:
        # One bound for all sites of like settings, from the longest b; only where that is too much,
        # each by itself.
        longest = float(self.linear_norm.max(initial=0.0))
        facts = np.stack([self.counts, self.regularization, self.tolerance])
        order = np.lexsort(facts)
        new = np.ones(len(order), bool)
        new[1:] = np.any(facts[:, order[1:]] != facts[:, order[:-1]], axis=0)
        fine = np.array(
            [self._floor(site, longest) <= self.tolerance[site] for site in order[new]], bool
        )
        for site in order[~np.repeat(fine, np.diff(np.append(np.flatnonzero(new), len(order))))]:
            floor = self._floor(site, float(self.linear_norm[site]))
            if not floor <= self.tolerance[site]:
                raise SettingsError(
                    f"The 'tolerance' parameter of solve_many must be at least {floor:.3g} for "
                    f"site {site}, four times the rounding error of its gradient. Got "
                    f"{float(self.tolerance[site])!r} instead. No record was read. Raise it or "
                    "the regularization."
                )

    def _floor(self, site: int, linear_norm: float) -> float:
        return 4 * gradient_error(
            PublicFacts(
                self.loss,
                n_records=int(self.counts[site]),
                n_features=self.X.shape[1],
                regularization=float(self.regularization[site]),
                linear_norm=linear_norm,
                tolerance=float(self.tolerance[site]),
            )
        )

    def blocks(self) -> Iterator[Array]:
        """Yield sites of similar size to solve together, at most `_ENTRIES` entries of records."""
        d, k = self.X.shape[1], self.loss.n_outputs
        narrow = self.counts < d
        small = (self.counts <= _RECORDS) & (
            self.counts * d <= np.where(narrow, _ENTRIES, _PRIMAL_ENTRIES)
        )
        chosen = np.flatnonzero(small & (np.where(narrow, self.counts, d) * k <= _UNKNOWNS))
        chosen = chosen[np.argsort(self.counts[chosen], kind="stable")]
        filled = np.cumsum(self.counts[chosen] * max(d, 1) + d)  # an empty site has coefficients
        begin = 0
        while begin < len(chosen):
            room = filled[begin - 1] + _ENTRIES if begin else _ENTRIES
            end = max(int(np.searchsorted(filled, room, side="right")), begin + 1)
            if begin + _LANES < end < len(chosen):
                end -= (end - begin) % _LANES
            yield chosen[begin:end]
            begin = end

    def block(self, sites: Array) -> _Block:
        """Return the records of `sites` and where each begins, without a copy if possible."""
        counts, begins = self.counts[sites], self.begins[sites]
        if self.order is None and not sparse.issparse(self.X):
            if self.X.dtype == np.float64 and self.X.flags.c_contiguous:
                return _Block(self.X, self.y, sites, begins, counts)
        ends = np.cumsum(counts)
        rows = np.repeat(begins - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
        if self.order is not None:
            rows = self.order[rows]
        X = self.X[rows].toarray() if sparse.issparse(self.X) else self.X[rows]
        X = np.ascontiguousarray(X, np.float64)
        return _Block(X, self.y[rows], sites, ends - counts, counts)

    def solve_block(self, sites: Array) -> None:
        """Solve and certify `sites`."""
        linear = np.zeros((0, 1, 1)) if self.linear is None else self.linear
        terms = _Terms(self.regularization, self.tolerance, linear)
        out = (self.coef, self.gradient_norm, self.length)
        _solve_sites(self.shape, self.block(sites), terms, out)

    def solve_alone(self, site: int) -> None:
        """Hand one site to the solver that does not give up."""
        rows = slice(self.begins[site], self.begins[site] + self.counts[site])
        chosen = rows if self.order is None else self.order[rows]
        b = None if self.linear is None else self.linear[site]
        solution = solve(
            self.X[chosen],
            self.y[chosen],
            Problem(
                self.loss,
                regularization=float(self.regularization[site]),
                linear=b if b is None or self.loss.n_outputs > 1 else b[0],
            ),
            tolerance=float(self.tolerance[site]),
        )
        self.coef[site] = solution.coef
        self.gradient_norm[site] = solution.gradient_norm


class _Shape(NamedTuple):
    """A loss as compiled code knows it."""

    code: int
    parameter: float
    curvature: float


class _Block(NamedTuple):
    """Records and labels of some sites of ascending size: which, from which row on, how many."""

    X: Array
    y: Array
    sites: Array
    begins: Array
    counts: Array


class _Terms(NamedTuple):
    """The rest of every site's objective, and its tolerance; `linear` may be empty."""

    ridges: Array
    tolerances: Array
    linear: Array


class _Lanes(NamedTuple):
    """Problems side by side: their matrix, outputs at u = 0, labels, λ, goals; room for a Hessian.

    If `dual`, the matrix is W = XXᵀ/λ and f = (Xᵀu - b)/λ, else W = X and f = u - b/λ.
    """

    dual: bool
    W: Array
    z0: Array
    y: Array
    ridge: Array
    goal: Array
    H: Array


class _Work(NamedTuple):
    """Room for one step: of records, of unknowns (`r`, `q`, `du`), and of one number per lane.

    In the primal form `q` is the gradient; in the dual one the gradient is Xᵀr, and q = Wr.
    `first` and `second` are the regulariser's derivatives along the step.
    """

    slope: Array
    bend: Array
    dz: Array
    before: Array
    r: Array
    q: Array
    du: Array
    squared: Array
    first: Array
    second: Array
    step: Array


def _shape_of(loss: Loss) -> _Shape:
    match loss:
        case Logistic():
            return _Shape(_LOGISTIC, 0.0, loss.curvature)
        case HuberHinge():
            return _Shape(_HUBER_HINGE, loss.h, loss.curvature)
        case Huber():
            return _Shape(_HUBER, loss.threshold, loss.curvature)
        case Softmax():
            return _Shape(_SOFTMAX, 0.0, loss.curvature)
    raise SettingsError(
        "The 'loss' parameter of solve_many must be Logistic, HuberHinge, Huber or Softmax. Got "
        f"{loss!r} instead. No record was read. Use erm.solve for each site."
    )


def _per_site(name: str, values: ArrayLike, n_sites: int) -> Array:
    array = np.asarray(values, np.float64)
    if array.shape not in ((), (n_sites,)) or not np.all((array > 0) & np.isfinite(array)):
        raise SettingsError(
            f"The '{name}' parameter of solve_many must be a positive number, or one for each of "
            f"{n_sites} sites. No record was read."
        )
    return np.ascontiguousarray(np.broadcast_to(array, n_sites))


# Below, arrays end in an axis of sites, the lanes, and loops over that axis come last: the compiler
# turns them into vector instructions. Shorter sites are padded with records that are zero, whose
# label makes slope and step zero too.


@compiled
def _exp(x):  # type: ignore[no-untyped-def]
    """Return exp(x) for -700 < x <= 0 to 2 units in the last place; it vectorises."""
    k = math.floor(x * 1.4426950408889634 + 0.5)
    r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10
    p = 1 / 479001600.0
    for c in (
        39916800.0,
        3628800.0,
        362880.0,
        40320.0,
        5040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0,
        1.0,
        1.0,
    ):
        p = p * r + 1 / c
    return p * np.int64((np.int64(k) + 1023) << 52).view(np.float64)


@compiled
def _evaluate(shape, z, y, slope, bend):  # type: ignore[no-untyped-def]
    """Write the slopes at `z` and, as `bend`, second derivatives (softmax: probabilities)."""
    code, parameter = shape.code, shape.parameter
    outputs, n, lanes = z.shape
    if code == _SOFTMAX:
        top, total = np.empty(lanes), np.empty(lanes)
        for i in range(n):
            for s in range(lanes):
                top[s] = z[0, i, s]
                total[s] = 0.0
            for c in range(1, outputs):
                for s in range(lanes):
                    top[s] = max(top[s], z[c, i, s])
            for c in range(outputs):
                for s in range(lanes):
                    e = _exp(max(z[c, i, s] - top[s], -600.0))
                    bend[c, i, s] = e
                    total[s] += e
            for s in range(lanes):
                total[s] = 1 / total[s] if y[i, s] >= 0 else 0.0
            for c in range(outputs):
                for s in range(lanes):
                    p = bend[c, i, s] * total[s]
                    bend[c, i, s] = p
                    slope[c, i, s] = p - 1 if y[i, s] == c else p
    elif code == _LOGISTIC:
        for i in range(n):
            for s in range(lanes):
                margin = y[i, s] * z[0, i, s]
                e = _exp(-min(abs(margin), 600.0))
                share = 1 / (1 + e)
                slope[0, i, s] = -y[i, s] * share * (e if margin > 0 else 1.0)
                bend[0, i, s] = e * share * share
    elif code == _HUBER_HINGE:
        for i in range(n):
            for s in range(lanes):
                short = (1 + parameter - y[i, s] * z[0, i, s]) / (2 * parameter)
                slope[0, i, s] = -y[i, s] * min(max(short, 0.0), 1.0)
                bend[0, i, s] = 0.5 / parameter if 0 < short < 1 else 0.0
    else:
        for i in range(n):
            for s in range(lanes):
                residual = z[0, i, s] - y[i, s]
                slope[0, i, s] = min(max(residual, -parameter), parameter)
                bend[0, i, s] = 1.0 if abs(residual) < parameter else 0.0


@compiled
def _inner(u, v, total):  # type: ignore[no-untyped-def]
    """Write each lane's inner product of `u` and `v` into `total`."""
    total[:] = 0.0
    for c in range(u.shape[0]):
        for i in range(u.shape[1]):
            for s in range(u.shape[2]):
                total[s] += u[c, i, s] * v[c, i, s]


@compiled
def _apply(W, v, out):  # type: ignore[no-untyped-def]
    """Write W·v into `out`, for each output."""
    for c in range(v.shape[0]):
        for i in range(W.shape[0]):
            out[c, i] = 0.0
            for j in range(W.shape[1]):
                for s in range(W.shape[2]):
                    out[c, i, s] += W[i, j, s] * v[c, j, s]


@compiled
def _factor(H):  # type: ignore[no-untyped-def]
    """Replace H's upper triangle by its Cholesky factor, the diagonal by its reciprocal.

    Four rows above are taken off at a time: the lanes of a matrix do not fit the first-level cache.
    """
    n, _, lanes = H.shape
    for i in range(n):
        whole = i - i % 4
        for j in range(i, n):
            for k in range(0, whole, 4):
                for s in range(lanes):
                    H[i, j, s] -= (H[k, i, s] * H[k, j, s] + H[k + 1, i, s] * H[k + 1, j, s]) + (
                        H[k + 2, i, s] * H[k + 2, j, s] + H[k + 3, i, s] * H[k + 3, j, s]
                    )
            for k in range(whole, i):
                for s in range(lanes):
                    H[i, j, s] -= H[k, i, s] * H[k, j, s]
        for s in range(lanes):
            H[i, i, s] = 1 / math.sqrt(max(H[i, i, s], 1e-300))
        for j in range(i + 1, n):
            for s in range(lanes):
                H[i, j, s] *= H[i, i, s]


@compiled
def _substitute(U, v):  # type: ignore[no-untyped-def]
    """Replace v by (UᵀU)⁻¹v, U as `_factor` leaves it."""
    n, _, lanes = U.shape
    for i in range(n):
        for s in range(lanes):
            v[i, s] *= U[i, i, s]
        for j in range(i + 1, n):
            for s in range(lanes):
                v[j, s] -= U[i, j, s] * v[i, s]
    for i in range(n - 1, -1, -1):
        for j in range(i + 1, n):
            for s in range(lanes):
                v[i, s] -= U[i, j, s] * v[j, s]
        for s in range(lanes):
            v[i, s] *= U[i, i, s]


@compiled
def _curve(code, bend, v, out):  # type: ignore[no-untyped-def]
    """Write Cᵀv into `out`; a record's second derivative is CCᵀ, C = √bend or diag(√p) - p√pᵀ."""
    outputs, n, lanes = bend.shape
    mean = np.zeros(lanes)
    for i in range(n):
        if code == _SOFTMAX:
            mean[:] = 0.0
            for c in range(outputs):
                for s in range(lanes):
                    mean[s] += bend[c, i, s] * v[c, i, s]
        for c in range(outputs):
            for s in range(lanes):
                out[c, i, s] = math.sqrt(bend[c, i, s]) * (v[c, i, s] - mean[s])


@compiled
def _uncurve(code, bend, v, out):  # type: ignore[no-untyped-def]
    """Write Cv into `out`."""
    outputs, n, lanes = bend.shape
    mean = np.zeros(lanes)
    for i in range(n):
        if code == _SOFTMAX:
            mean[:] = 0.0
            for c in range(outputs):
                for s in range(lanes):
                    mean[s] += math.sqrt(bend[c, i, s]) * v[c, i, s]
        for c in range(outputs):
            for s in range(lanes):
                root = math.sqrt(bend[c, i, s])
                out[c, i, s] = root * v[c, i, s] - (
                    bend[c, i, s] * mean[s] if code == _SOFTMAX else 0.0
                )


@compiled
def _dual_gradient(problem, u, work):  # type: ignore[no-untyped-def]
    """Write r, where Xᵀr is the gradient, q = Wr, and the gradient's squared norm, λ r·q."""
    W, ridge = problem.W, problem.ridge
    slope, r, q, squared = work.slope, work.r, work.q, work.squared
    outputs, n, lanes = slope.shape
    for c in range(outputs):
        for i in range(n):
            for s in range(lanes):
                r[c, i, s] = slope[c, i, s] + u[c, i, s]
    _apply(W, r, q)
    _inner(r, q, squared)
    for s in range(lanes):
        squared[s] *= ridge[s]


@compiled
def _dual_step(code, problem, work):  # type: ignore[no-untyped-def]
    """Write Newton's step for f = (Xᵀu - b)/λ: with W = XXᵀ/λ, (1 + CCᵀW)du = -r.

    That is du = C(1 + CᵀWC)⁻¹Cᵀq - r. The matrix has no eigenvalue below 1, whatever the records.
    """
    W, H = problem.W, problem.H
    bend, r, q, du, dz = work.bend, work.r, work.q, work.du, work.dz
    outputs, n, lanes = bend.shape
    root, alike = np.sqrt(bend), np.empty(lanes)
    for i in range(n):
        for j in range(n if code == _SOFTMAX else 0):
            alike[:] = 0.0
            for c in range(outputs):
                for s in range(lanes):
                    alike[s] += bend[c, i, s] * bend[c, j, s]
            for c in range(outputs):
                for e in range(c, outputs):
                    for s in range(lanes):
                        product = (
                            alike[s] - bend[e, i, s] - bend[c, j, s] + (1.0 if c == e else 0.0)
                        )
                        H[c * n + i, e * n + j, s] = (
                            root[c, i, s] * root[e, j, s] * product * W[i, j, s]
                        )
        for j in range(n if code == _SOFTMAX else i, n):
            for s in range(lanes):
                H[i, j, s] = root[0, i, s] * root[0, j, s] * W[i, j, s]
    for j in range(outputs * n):
        for s in range(lanes):
            H[j, j, s] += 1
    _factor(H)
    _curve(code, bend, q, dz)
    _substitute(H, dz.reshape(outputs * n, lanes))
    _uncurve(code, bend, dz, du)
    for c in range(outputs):
        for i in range(n):
            for s in range(lanes):
                du[c, i, s] -= r[c, i, s]
    _apply(W, du, dz)


@compiled
def _primal_gradient(problem, u, work):  # type: ignore[no-untyped-def]
    """Write the gradient into `q`, and its squared norm."""
    W, ridge = problem.W, problem.ridge
    slope, q, squared = work.slope, work.q, work.squared
    outputs, n, lanes = slope.shape
    for c in range(outputs):
        for j in range(W.shape[1]):
            for s in range(lanes):
                q[c, j, s] = ridge[s] * u[c, j, s]
        for i in range(n):
            for j in range(W.shape[1]):
                for s in range(lanes):
                    q[c, j, s] += slope[c, i, s] * W[i, j, s]
    _inner(q, q, squared)


@compiled
def _primal_step(code, problem, work):  # type: ignore[no-untyped-def]
    """Write Newton's step for f = u - b/λ, with the records themselves as W."""
    W, H, ridge = problem.W, problem.H, problem.ridge
    bend, q, du, dz = work.bend, work.q, work.du, work.dz
    outputs, n, lanes = bend.shape
    d = W.shape[1]
    H[:] = 0.0
    weight = np.empty(lanes)
    for i in range(n):
        for c in range(outputs):
            for e in range(c, outputs):
                for s in range(lanes):
                    weight[s] = bend[c, i, s]
                    if code == _SOFTMAX:
                        weight[s] *= (1.0 if c == e else 0.0) - bend[e, i, s]
                for j in range(d):
                    for k in range(j if c == e else 0, d):
                        for s in range(lanes):
                            H[c * d + j, e * d + k, s] += weight[s] * W[i, j, s] * W[i, k, s]
    for j in range(outputs * d):
        for s in range(lanes):
            H[j, j, s] += ridge[s]
    _factor(H)
    for c in range(outputs):
        for j in range(d):
            for s in range(lanes):
                du[c, j, s] = -q[c, j, s]
    _substitute(H, du.reshape(outputs * d, lanes))
    _apply(W, du, dz)


@compiled
def _search(shape, y, z, trial, work):  # type: ignore[no-untyped-def]
    """Write the outputs of a near-minimum along `dz` per lane into `trial`, and its step.

    Evaluating the loss of a small site costs next to nothing beside a step, and with λ small one
    step of good length saves many: secants of the derivative, kept within a bracket. Leaves slopes
    and bends of the point found.
    """
    slope, bend, dz = work.slope, work.bend, work.dz
    first, second, step = work.first, work.second, work.step
    outputs, n, lanes = z.shape
    low, high, down, rise = (
        np.zeros(lanes),
        np.full(lanes, np.inf),
        np.empty(lanes),
        np.empty(lanes),
    )
    _inner(slope, dz, down)
    for s in range(lanes):
        down[s] += first[s]
    at_low, at_high = down.copy(), np.zeros(lanes)
    step[:] = 1.0
    for attempt in range(_TRIALS):
        for c in range(outputs):
            for i in range(n):
                for s in range(lanes):
                    trial[c, i, s] = z[c, i, s] + step[s] * dz[c, i, s]
        _evaluate(shape, trial, y, slope, bend)
        _inner(slope, dz, rise)
        busy = False
        for s in range(lanes):
            here = rise[s] + first[s] + step[s] * second[s]
            if attempt == _TRIALS - 1 or not abs(here) > 0.1 * abs(down[s]):
                continue
            busy = True
            if here > 0:
                high[s], at_high[s] = step[s], here
            elif high[s] == np.inf:
                # The secant falls short where the derivative flattens out; twice as far is right as
                # often as not.
                reach = (
                    2 * (step[s] - low[s]) * here / (at_low[s] - here)
                    if here > at_low[s]
                    else np.inf
                )
                low[s], at_low[s] = step[s], here
                step[s] += min(max(reach, 0.5 * step[s]), 7 * step[s])
                continue
            else:
                low[s], at_low[s] = step[s], here
            share = at_low[s] / (at_low[s] - at_high[s])
            step[s] = low[s] + min(max(share, 0.1), 0.9) * (high[s] - low[s])
        if not busy:
            return


@compiled
def _room(problem, u):  # type: ignore[no-untyped-def]
    z0, lanes = problem.z0, u.shape[2]
    return _Work(
        np.empty_like(z0),
        np.empty_like(z0),
        np.empty_like(z0),
        np.empty_like(z0),
        np.empty_like(u),
        np.empty_like(u),
        np.empty_like(u),
        np.empty(lanes),
        np.empty(lanes),
        np.empty(lanes),
        np.empty(lanes),
    )


@compiled
def _direct(code, problem, u, moving, work):  # type: ignore[no-untyped-def]
    """Write Newton's step and the regulariser's slopes along it; zero in lanes that stand still."""
    du, dz, first, second = work.du, work.dz, work.first, work.second
    if problem.dual:
        _dual_step(code, problem, work)
        _inner(u, dz, first)
        _inner(du, dz, second)
    else:
        _primal_step(code, problem, work)
        _inner(u, du, first)
        _inner(du, du, second)
        for s in range(len(first)):
            first[s] *= problem.ridge[s]
            second[s] *= problem.ridge[s]
    for s in range(len(first)):
        if not moving[s]:
            du[:, :, s] = 0.0
            dz[:, :, s] = 0.0
            first[s] = second[s] = 0.0


@compiled
def _count_bends(z, past, work):  # type: ignore[no-untyped-def]
    """Where the loss is linear it has no curvature, and the step no bound: count what was met."""
    slope, bend, before = work.slope, work.bend, work.before
    for i in range(z.shape[1]):
        for s in range(z.shape[2]):
            moved = z[0, i, s] - past[0, i, s]
            if moved != 0:
                bend[0, i, s] = max(bend[0, i, s], (slope[0, i, s] - before[0, i, s]) / moved)


@compiled
def _descend(shape, problem, u):  # type: ignore[no-untyped-def]
    """Minimise from u = 0 until every lane's gradient is shorter than its goal.

    Outputs follow u step by step; when all seem done they are computed anew, for rounding may have
    led them astray. A lane that is done, or has used up its own `_ITERATIONS`, stands still, so
    none depends on how long others take.
    """
    outputs, m, lanes = u.shape
    code, z0, y, goal = shape.code, problem.z0, problem.y, problem.goal
    work = _room(problem, u)
    slope, bend, before, du = work.slope, work.bend, work.before, work.du
    squared, step = work.squared, work.step
    z, trial = z0.copy(), np.empty_like(z0)
    taken, moving, anew = np.zeros(lanes), np.empty(lanes, np.bool_), True
    _evaluate(shape, z, y, slope, bend)
    is_bent = code == _HUBER_HINGE or code == _HUBER
    if code != _SOFTMAX:
        bend[:] = shape.curvature  # nothing is known yet, and at 0 the Huber-hinge has none
    while True:
        if problem.dual:
            _dual_gradient(problem, u, work)
        else:
            _primal_gradient(problem, u, work)
        busy = False
        for s in range(lanes):
            moving[s] = squared[s] > goal[s] * goal[s] and taken[s] < _ITERATIONS
            taken[s] += moving[s]
            busy = busy or moving[s]
        if not busy:
            if anew:
                return
            anew = True
            _apply(problem.W, u, z)
            z += z0
            _evaluate(shape, z, y, slope, bend)
            continue
        anew = False
        _direct(code, problem, u, moving, work)
        if is_bent:
            before[:] = slope
        _search(shape, y, z, trial, work)
        z, trial = trial, z
        if is_bent:
            _count_bends(z, trial, work)
        for c in range(outputs):
            for j in range(m):
                for s in range(lanes):
                    u[c, j, s] += step[s] * du[c, j, s]


@_summing
def _dot(u, v):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(len(u)):
        total += u[j] * v[j]
    return total


@_summing
def _add(X, weights, total):  # type: ignore[no-untyped-def]
    """Add the weighted rows of X to `total`, four at a time, which halves memory traffic."""
    n = len(X)
    whole = n - n % 4
    for i in range(0, whole, 4):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        p, q, r, s = X[i], X[i + 1], X[i + 2], X[i + 3]
        for j in range(len(total)):
            total[j] += (a * p[j] + b * q[j]) + (c * r[j] + d * s[j])
    for i in range(whole, n):
        a, p = weights[i], X[i]
        for j in range(len(total)):
            total[j] += a * p[j]


@_summing
def _gram(X, ridge, W, lane):  # type: ignore[no-untyped-def]
    """Write XXᵀ/λ into a lane of W, in tiles of two by two."""
    n = len(X)
    for i in range(0, n, 2):
        k = min(i + 1, n - 1)
        u, v = X[i], X[k]
        for j in range(0, i + 1, 2):
            m = min(j + 1, n - 1)
            p, q = X[j], X[m]
            up = uq = vp = vq = 0.0
            for c in range(len(u)):
                up += u[c] * p[c]
                uq += u[c] * q[c]
                vp += v[c] * p[c]
                vq += v[c] * q[c]
            W[i, j, lane] = W[j, i, lane] = up / ridge
            W[i, m, lane] = W[m, i, lane] = uq / ridge
            W[k, j, lane] = W[j, k, lane] = vp / ridge
            W[k, m, lane] = W[m, k, lane] = vq / ridge


@compiled
def _certify(shape, X, y, regulariser, f, slope):  # type: ignore[no-untyped-def]
    """Return the norms of the gradient at `f` and of `f`, rounded up.

    Outputs become slopes in `slope`. The exponential is the C library's, the gradient nobody
    else's.
    """
    code, parameter = shape.code, shape.parameter
    ridge, b = regulariser
    outputs, d = f.shape
    g, n = np.empty((outputs, d)), len(X)
    for c in range(outputs):
        for j in range(d):
            g[c, j] = ridge * f[c, j] + b[c, j]
        for i in range(n):
            slope[c, i] = _dot(X[i], f[c])
    for i in range(n):
        if code == _SOFTMAX:
            top, total = slope[0, i], 0.0
            for c in range(1, outputs):
                top = max(top, slope[c, i])
            for c in range(outputs):
                slope[c, i] = math.exp(slope[c, i] - top)
                total += slope[c, i]
            for c in range(outputs):
                slope[c, i] = slope[c, i] / total - (1.0 if y[i] == c else 0.0)
        elif code == _LOGISTIC:
            slope[0, i] = -y[i] / (math.exp(min(y[i] * slope[0, i], 300.0)) + 1)
        elif code == _HUBER_HINGE:
            short = (1 + parameter - y[i] * slope[0, i]) / (2 * parameter)
            slope[0, i] = -y[i] * min(max(short, 0.0), 1.0)
        else:
            slope[0, i] = min(max(slope[0, i] - y[i], -parameter), parameter)
    squared = length = 0.0
    for c in range(outputs):
        _add(X, slope[c], g[c])
        squared += _dot(g[c], g[c])
        length += _dot(f[c], f[c])
    up = 1 + (outputs * d + 4) * 2.220446049250313e-16
    return math.sqrt(squared) * up, math.sqrt(length) * up


@compiled
def _solve_sites(shape, block, terms, out):  # type: ignore[no-untyped-def]
    """Solve and certify the sites of a block; write coefficients, gradients and lengths."""
    X, y, sites, begins, counts = block
    ridges, tolerances, linear = terms
    coef, norm, length = out
    outputs, d = coef.shape[1:]
    zero = np.zeros((outputs, d))
    most = counts[-1] if len(counts) else 0
    breadth = min(most, d)
    # Fresh memory for every group of sites would cost as much as a factorisation.
    widest = min(_LANES, len(sites))
    for_W, for_H = np.empty(most * breadth * widest), np.empty((outputs * breadth) ** 2 * widest)
    for begin in range(0, len(sites), _LANES):
        lanes = min(_LANES, len(sites) - begin)
        n = counts[begin + lanes - 1]
        dual = n < d
        m = n if dual else d
        W = for_W[: n * m * lanes].reshape(n, m, lanes)
        H = for_H[: (outputs * m) ** 2 * lanes].reshape(outputs * m, outputs * m, lanes)
        z, u = np.zeros((outputs, n, lanes)), np.zeros((outputs, m, lanes))
        labels = np.full((n, lanes), -1.0 if shape.code == _SOFTMAX else 0.0)
        ridge, goal, work = np.empty(lanes), np.empty(lanes), np.empty((outputs, n))
        for s in range(lanes):
            site, first, size = sites[begin + s], begins[begin + s], counts[begin + s]
            ridge[s], goal[s] = ridges[site], 0.2 * tolerances[site]
            for i in range(size):
                labels[i, s] = y[first + i]
            if size < n:
                W[size:, :, s] = 0.0
            if dual:
                W[:, size:, s] = 0.0
                _gram(X[first : first + size], ridge[s], W, s)
            else:
                for i in range(size):
                    for j in range(d):
                        W[i, j, s] = X[first + i, j]
            for c in range(outputs if len(linear) else 0):
                for i in range(size):
                    z[c, i, s] = -_dot(X[first + i], linear[site, c]) / ridge[s]
        if n:
            _descend(shape, _Lanes(dual, W, z, labels, ridge, goal, H), u)
        for s in range(lanes):
            site, first, size = sites[begin + s], begins[begin + s], counts[begin + s]
            f, b, records = (
                coef[site],
                linear[site] if len(linear) else zero,
                X[first : first + size],
            )
            for c in range(outputs):
                for j in range(d):
                    f[c, j] = (0.0 if dual else u[c, j, s]) - b[c, j] / ridge[s]
                if dual:
                    for i in range(size):
                        work[c, i] = u[c, i, s] / ridge[s]
                    _add(records, work[c], f[c])
            norm[site], length[site] = _certify(
                shape, records, y[first : first + size], (ridge[s], b), f, work
            )
