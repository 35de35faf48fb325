"""Losses, and the one solver that every linear learner goes through.

Nothing here is random and nothing here is private. :func:`solve` minimises the un-normalised sum

    F(f) = Σ_j loss(f·x_j, y_j) + (λ/2)‖f‖² + ½ fᵀM f + b·f,        ‖x_j‖ ≤ 1,

until the gradient *that it can vouch for* is shorter than a public tolerance. The privacy proofs of the linear
learners need exactly that, for every data set and every b, so a miss is never an outcome: the solver goes on, with a
method that has an a-priori bound, until the tolerance is met. What is refused (a tolerance below the arithmetic's own
error) is refused before a record is read.

All sources of records are read as a stream of blocks that fit the processor's cache. A block is touched once for
margins, slopes and gradient; a dense array is never copied.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import linalg, sparse
from threadpoolctl import ThreadpoolController

from consilience.errors import SettingsError

Array = NDArray[Any]


class Loss(Protocol):
    """A convex loss of the outputs z = f·x, with the public constants that privacy proofs use (at ‖x‖ ≤ 1).

    Outputs are a vector with one entry per record, or for several classes an array (class, record).
    """

    @property
    def lipschitz(self) -> float:
        """Return the supremum of the gradient's norm."""

    @property
    def curvature(self) -> float:
        """Return the supremum of the second derivative."""

    @property
    def at_zero(self) -> float:
        """Return the largest loss at f = 0."""

    @property
    def monotone(self) -> bool:
        """Tell whether the slope keeps one sign, whatever the output."""

    @property
    def n_outputs(self) -> int:
        """Return the number of outputs per record: 1, or the number of classes."""

    def value(self, z: Array, y: Array) -> Array:
        """Return each record's loss."""

    def slope(self, z: Array, y: Array) -> Array:
        """Return the first derivative, shaped like `z`."""

    def bend(self, z: Array, y: Array) -> Array:
        """Return the second derivative: like `z`, or (class, class, record)."""


@dataclass(frozen=True)
class Logistic:
    """ln(1 + exp(-yz)) for y in {-1, +1}."""

    lipschitz: ClassVar[float] = 1.0
    curvature: ClassVar[float] = 0.25
    at_zero: ClassVar[float] = math.log(2)
    monotone: ClassVar[bool] = True
    n_outputs: ClassVar[int] = 1

    def value(self, z: Array, y: Array) -> Array:
        """Return ln(1 + exp(-yz)) without overflow."""
        margin = y * z
        return np.maximum(-margin, 0) + np.log1p(np.exp(-np.abs(margin)))

    def slope(self, z: Array, y: Array) -> Array:
        """Return -y / (1 + exp(yz)), accurate relative to itself in both tails."""
        odds = y * z
        np.minimum(odds, 700, out=odds)  # exp(700) is finite, and its inverse is below anything we add it to
        np.exp(odds, out=odds)
        odds += 1
        return np.divide(-y, odds, out=odds)

    def bend(self, z: Array, y: Array) -> Array:
        """Return e/(1+e)² with e = exp(-|z|): the form p(1-p) would cancel."""
        e = np.exp(-np.abs(z))
        return e / np.square(1 + e)


@dataclass(frozen=True)
class HuberHinge:
    """Hinge loss with its corner at yz = 1 replaced by a parabola of half-width `h`; C¹ only."""

    h: float = 0.5
    lipschitz: ClassVar[float] = 1.0
    at_zero: ClassVar[float] = 1.0
    monotone: ClassVar[bool] = True
    n_outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.h <= 1:
            raise SettingsError(f"The 'h' parameter of HuberHinge must be in (0, 1]. Got {self.h!r} instead.")

    @property
    def curvature(self) -> float:
        """Return 1/(2h)."""
        return 1 / (2 * self.h)

    def value(self, z: Array, y: Array) -> Array:
        """Return 0, (1+h-yz)²/(4h) or 1-yz."""
        short = np.maximum(1 + self.h - y * z, 0)
        bent = np.minimum(short, 2 * self.h)
        return np.square(bent) / (4 * self.h) + (short - bent)

    def slope(self, z: Array, y: Array) -> Array:
        """Return -y times (1+h-yz)/(2h) clipped to [0, 1]."""
        short = y * z
        np.subtract(1 + self.h, short, out=short)
        short *= self.curvature
        np.clip(short, 0, 1, out=short)
        short *= -y
        return short

    def bend(self, z: Array, y: Array) -> Array:
        """Return 1/(2h) inside the parabola, 0 outside: one member of the generalised derivative."""
        if _WIN:
            return (self.slope(z + _WIN, y) - self.slope(z - _WIN, y)) / (2 * _WIN)
        return np.where(np.abs(1 - y * z) < self.h, self.curvature, 0.0)


@dataclass(frozen=True)
class Softmax:
    """Cross-entropy of `n_classes` outputs; y holds the class codes 0, 1, …"""

    n_classes: int
    lipschitz: ClassVar[float] = math.sqrt(2)
    curvature: ClassVar[float] = 0.5
    monotone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.n_classes < 2:
            raise SettingsError(f"The 'n_classes' parameter of Softmax must be >= 2. Got {self.n_classes!r} instead.")

    @property
    def at_zero(self) -> float:
        """Return ln K."""
        return math.log(self.n_classes)

    @property
    def n_outputs(self) -> int:
        """Return K."""
        return self.n_classes

    def value(self, z: Array, y: Array) -> Array:
        """Return ln Σ exp(z) - z_y."""
        shifted = z - z.max(axis=0)
        return np.log(np.exp(shifted).sum(axis=0)) - shifted[y, np.arange(len(y))]

    def slope(self, z: Array, y: Array) -> Array:
        """Return p - e_y."""
        p = self._probabilities(z)
        p[y, np.arange(len(y))] -= 1
        return p

    def bend(self, z: Array, y: Array) -> Array:
        """Return diag(p) - ppᵀ."""
        p = self._probabilities(z)
        bend = -p[:, None] * p
        diagonal = np.arange(self.n_classes)
        bend[diagonal, diagonal] += p
        return bend

    def _probabilities(self, z: Array) -> Array:
        p = z - z.max(axis=0)
        np.exp(p, out=p)
        p /= p.sum(axis=0)
        return p


@dataclass(frozen=True)
class Squared:
    """(z-y)²/2 for |y| <= `label_bound`; its gradient is bounded only where f is."""

    label_bound: float
    lipschitz: ClassVar[float] = math.inf
    curvature: ClassVar[float] = 1.0
    monotone: ClassVar[bool] = False
    n_outputs: ClassVar[int] = 1

    @property
    def at_zero(self) -> float:
        """Return Y²/2."""
        return self.label_bound**2 / 2

    def value(self, z: Array, y: Array) -> Array:
        """Return half the squared residual."""
        return np.square(z - y) / 2

    def slope(self, z: Array, y: Array) -> Array:
        """Return the residual."""
        return z - y

    def bend(self, z: Array, y: Array) -> Array:
        """Return 1."""
        return np.ones_like(z)


@dataclass(frozen=True)
class Huber:
    """Squared loss that goes on linearly beyond residuals of size `threshold`, for |y| <= `label_bound`."""

    threshold: float
    label_bound: float
    curvature: ClassVar[float] = 1.0
    monotone: ClassVar[bool] = False
    n_outputs: ClassVar[int] = 1

    @property
    def lipschitz(self) -> float:
        """Return the threshold."""
        return self.threshold

    @property
    def at_zero(self) -> float:
        """Return the loss of the residual Y."""
        bent = min(self.threshold, self.label_bound)
        return bent * (self.label_bound - bent / 2)

    def value(self, z: Array, y: Array) -> Array:
        """Return r²/2 or k(|r| - k/2)."""
        residual = np.abs(z - y)
        bent = np.minimum(residual, self.threshold)
        return bent * (residual - bent / 2)

    def slope(self, z: Array, y: Array) -> Array:
        """Return the residual clipped to [-k, k]."""
        return np.clip(z - y, -self.threshold, self.threshold)

    def bend(self, z: Array, y: Array) -> Array:
        """Return 1 where the loss is square, 0 where it is linear."""
        return np.where(np.abs(z - y) < self.threshold, 1.0, 0.0)


class ChunkedRecords(Protocol):
    """Records that are read again and again, a chunk at a time: a table larger than memory."""

    @property
    def n_records(self) -> int:
        """Return the number of records in all chunks."""

    @property
    def n_features(self) -> int:
        """Return the number of columns of every chunk."""

    def chunks(self) -> Iterator[tuple[Any, Array]]:
        """Yield (X, y), X a dense or CSR array; every call starts anew and yields the same."""


@dataclass(frozen=True)
class _InMemory:
    X: Any
    y: Array

    @property
    def n_records(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_features(self) -> int:
        return int(self.X.shape[1])

    def chunks(self) -> Iterator[tuple[Any, Array]]:
        yield self.X, self.y


@dataclass(frozen=True)
class Solution:
    """What the solver vouches for: at `coef` the computed gradient is no longer than `gradient_norm`.

    `coef` is float64, or longdouble where the tolerance asked for more than float64 can certify. `passes` counts how
    often all records were read.
    """

    coef: Array
    gradient_norm: float
    passes: int


# A block of about half a megabyte stays in the second-level cache between its two products. The upper limit is part
# of the error bound: it is the length of the longest unsplit sum.
_WIN = 0
_SINGLE = 1e-5
_BLOCK_ENTRIES = 1 << 16
_BLOCK_RECORDS = 4096


@dataclass
class _Objective:
    """F, with every record counted `weight` times, evaluated in the precision of `dtype`."""

    records: ChunkedRecords
    loss: Loss
    regularization: float
    linear: Array | None
    matrix: Array | None
    weight: float = 1.0
    dtype: DTypeLike = np.float64
    passes: int = field(default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        d, k = self.records.n_features, self.loss.n_outputs
        return (d,) if k == 1 else (k, d)

    @property
    def affords_hessian(self) -> bool:
        # The Hessian and its factor together stay below half of the records' own memory (or 4 MB).
        entries = math.prod(self.shape) ** 2
        return entries <= max(self.records.n_records * self.records.n_features // 4, 1 << 18)

    def _blocks(self) -> Iterator[tuple[Any, Array]]:
        self.passes += 1
        for X, y in self.records.chunks():
            length = _BLOCK_RECORDS if sparse.issparse(X) else _BLOCK_ENTRIES // max(X.shape[1], 1)
            length = min(max(length, 64), _BLOCK_RECORDS)
            for begin in range(0, X.shape[0], length):
                block = X[begin : begin + length]
                yield block if block.dtype == self.dtype else block.astype(self.dtype), y[begin : begin + length]

    def gradient(self, coef: Array) -> Array:
        """Return the gradient at `coef`; :func:`gradient_error` bounds its error."""
        # Sums of blocks are added in pairs, so that the error grows with the logarithm of the number of blocks.
        sums: list[Array] = []
        for index, (X, y) in enumerate(self._blocks(), start=1):
            sums.append(self.loss.slope(coef @ X.T, y) @ X)
            while index % 2 == 0:
                last = sums.pop()
                sums[-1] += last
                index //= 2
        total = self.regularization * coef
        if self.linear is not None:
            total += self.linear
        if self.matrix is not None:
            total += self.matrix.astype(self.dtype) @ coef
        if sums:
            total += self.weight * functools.reduce(np.add, reversed(sums))
        return total

    def inverse_hessian(self, coef: Array) -> Callable[[Array], Array]:
        """Return the map g -> H⁻¹g at `coef`, with only the diagonal of H where all of it is too large to keep."""
        coef = coef.astype(np.float64)
        if not self.affords_hessian:
            diagonal = np.full(self.shape, self.regularization)
            for X, y in self._blocks():
                bend = self.loss.bend(coef @ X.T, y)
                bend = bend if bend.ndim == 1 else np.einsum("kkj->kj", bend)
                diagonal += self.weight * (bend @ (X.multiply(X) if sparse.issparse(X) else np.square(X)))
            return lambda gradient: gradient / diagonal
        d, k = self.records.n_features, self.loss.n_outputs
        # Half precision of the sum is enough for a direction, unless λ would drown in its rounding.
        single = self.regularization > _SINGLE * self.weight * self.records.n_records
        hessian = np.zeros((k, d, k, d), np.float32 if single else np.float64)
        for X, y in self._blocks():
            bend = self.loss.bend(coef @ X.T, y).reshape(k, k, -1).astype(hessian.dtype)
            X = X.astype(hessian.dtype)
            for a in range(k):
                hessian[a, :, a:] += _gram(X, bend[a, a:])
        hessian = hessian.reshape(k * d, k * d).astype(np.float64)
        hessian *= self.weight
        if self.matrix is not None:
            hessian += self.matrix
        diagonal = np.einsum("ii->i", hessian)
        shift = self.regularization
        while True:
            diagonal += shift
            try:
                factor = linalg.cholesky(hessian, lower=False, check_finite=False)
                break
            except linalg.LinAlgError:  # λ below the rounding of H: any definite matrix will do
                shift = 1e-14 * float(diagonal.max())

        def apply(gradient: Array) -> Array:
            flat = gradient.ravel().astype(np.float64)
            return linalg.cho_solve((factor, False), flat, check_finite=False).reshape(gradient.shape)

        return apply

    def use(self, dtype: DTypeLike) -> None:
        """Go on in another precision."""
        self.dtype = dtype

    def thinned(self, stride: int) -> _Objective:
        """Return the estimate of F from every `stride`-th record."""
        self.passes += 1
        parts = [(X[::stride], y[::stride]) for X, y in self.records.chunks()]
        stack = sparse.vstack if sparse.issparse(parts[0][0]) else np.concatenate
        records = _InMemory(stack([X for X, _ in parts]), np.concatenate([y for _, y in parts]))
        weight = self.records.n_records / records.n_records
        return _Objective(records, self.loss, self.regularization, self.linear, self.matrix, weight)


def _gram(X: Any, weights: Array) -> Array:
    """Return Xᵀ diag(w) X for every row w of `weights`, as (feature, row, feature)."""
    if sparse.issparse(X):
        return np.stack([(X.T @ X.multiply(w[:, None])).toarray() for w in weights], axis=1)
    wide = weights.T[:, :, None] * X[:, None, :]
    return np.asarray(X.T @ wide.reshape(len(X), -1)).reshape(X.shape[1], *wide.shape[1:])


def gradient_error(
    loss: Loss,
    *,
    n_records: int,
    n_features: int,
    regularization: float,
    linear_norm: float = 0.0,
    matrix_norm: float = 0.0,
    tolerance: float = 0.0,
    dtype: DTypeLike = np.float64,
) -> float:
    """Bound the rounding error of the computed gradient by public facts alone.

    The bound holds, whatever the records, at every f with F(f) <= F(0) and at every f where the gradient is at most
    twice `tolerance`. `linear_norm` bounds ‖b‖, `matrix_norm` the Frobenius norm of M.

    Notes
    -----
    u is the unit roundoff, γ(k) = ku/(1-ku) the error of k roundings in any order (Higham 2002, lemma 3.1), K the
    number of outputs, c and l0 the loss's curvature and value at zero, n records in the unit ball.

    1. F(f) <= F(0) gives (λ/2)‖f‖² - ‖b‖‖f‖ <= n·l0, so ‖f‖ <= φ = (‖b‖ + √(‖b‖² + 2λn·l0))/λ; a gradient of 2τ
       adds 2τ/λ, by strong convexity.
    2. An output is off by γ(d)|x|·|f| <= γ(d)φ (jointly, for K outputs: Cauchy-Schwarz in each, then over classes);
       softmax's shift by the maximum costs (1+√K)uφ more. The slope moves c times as much.
    3. Slopes are at most s = min(L, √(2c·l0) + cφ): a nonnegative loss of curvature c has |l'(0)|² <= 2c·l(0).
       Evaluating one costs (8+K)u(s+c): exp within 4u, K additions, a quotient, and for the Huber-hinge the rounding
       of 1+h-yz, at most 4(1+h)u, times c.
    4. Summing s·x runs through at most `_BLOCK_RECORDS` additions in a block and 2·log2(n)+2 between blocks, each
       relative to Σ|s|‖x‖ <= ns. Regulariser, M and b add one product and at most three sums.
    """
    u = float(np.finfo(dtype).eps) / 2
    n, k, lam = n_records, loss.n_outputs, regularization

    def gamma(roundings: float) -> float:
        return roundings * u / (1 - roundings * u)

    radius = (linear_norm + math.sqrt(linear_norm**2 + 2 * lam * n * loss.at_zero) + 2 * tolerance) / lam
    steepest = min(loss.lipschitz, math.sqrt(2 * loss.curvature * loss.at_zero) + loss.curvature * radius)
    slope = loss.curvature * gamma(n_features + k + 1) * radius + (8 + k) * u * (steepest + loss.curvature)
    summing = gamma(min(n, _BLOCK_RECORDS) + 2 * math.log2(n + 1) + 2) * (steepest + slope)
    fixed = gamma(4) * (lam * radius + linear_norm + n * steepest) + gamma(n_features + 4) * matrix_norm * radius
    return n * (slope + summing) + fixed


def certified_gradient(
    records: Any,
    y: ArrayLike | None,
    loss: Loss,
    coef: ArrayLike,
    *,
    regularization: float,
    linear: ArrayLike | None = None,
    matrix: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
) -> Array:
    """Return the gradient of F at `coef`, evaluated in `dtype` within :func:`gradient_error` of the exact one."""
    objective = _objective(records, y, loss, regularization, linear, matrix, dtype)
    return objective.gradient(np.asarray(coef, dtype))


def solve(
    records: Any,
    y: ArrayLike | None,
    loss: Loss,
    *,
    regularization: float,
    tolerance: float,
    linear: ArrayLike | None = None,
    matrix: ArrayLike | None = None,
    start: ArrayLike | None = None,
) -> Solution:
    """Minimise F until its gradient, computed at the returned point, is at most `tolerance` long.

    `records` is a dense or CSR array with its labels in `y`, or :class:`ChunkedRecords` with ``y=None``. BLAS is held
    to one thread meanwhile: parallelism belongs to the caller, who has many problems.

    Raises
    ------
    SettingsError
        If `regularization` is not positive, or `tolerance` lies below four times the rounding error of extended
        precision. Neither depends on the records.
    """
    objective = _objective(records, y, loss, regularization, linear, matrix, np.float64)
    errors = [
        gradient_error(
            loss,
            n_records=objective.records.n_records,
            n_features=objective.records.n_features,
            regularization=regularization,
            linear_norm=0.0 if objective.linear is None else float(np.linalg.norm(objective.linear)),
            matrix_norm=0.0 if objective.matrix is None else float(np.linalg.norm(objective.matrix)),
            tolerance=tolerance,
            dtype=dtype,
        )
        for dtype in (np.float64, np.longdouble)
    ]
    if not tolerance >= 4 * errors[1]:
        raise SettingsError(
            f"The 'tolerance' parameter of solve must be at least {4 * errors[1]:.3g}, four times the rounding error "
            f"of this problem's gradient. Got {tolerance!r} instead. Nothing was read. Raise it, or the regularization."
        )
    with _blas().limit(limits=1, user_api="blas"):
        coef, norm, inverse = _climb(objective, max(tolerance, 4 * errors[0]), start)
        if tolerance < 4 * errors[0]:
            objective.use(np.longdouble)
            coef, norm, _ = _descend(objective, coef.astype(np.longdouble), tolerance, inverse)
    return Solution(coef, norm, objective.passes)


_SUBSET_PER_FEATURE = 20
_SUBSET_SHARE = 8
_SUBSET_RECORDS = 1 << 15
_SUBSET_ACCURACY = 0.03


def _climb(objective: _Objective, tolerance: float, start: ArrayLike | None = None):
    n, d = objective.records.n_records, objective.records.n_features
    stride = n // max(_SUBSET_PER_FEATURE * d, min(n // _SUBSET_SHARE, _SUBSET_RECORDS), 1)
    coef = np.zeros(objective.shape) if start is None else np.array(start, np.float64)
    inverse = None
    if stride >= 3 and objective.affords_hessian:
        subset = objective.thinned(stride)
        if start is None:
            # Solve the subset no better than it resembles the whole.
            noise = math.sqrt(2 * objective.loss.curvature * objective.loss.at_zero / subset.records.n_records) * n
            coef, _, _ = _climb(subset, max(tolerance, _SUBSET_ACCURACY * noise))
        inverse = subset.inverse_hessian(coef)
    return _descend(objective, coef, tolerance, inverse)


_MEMORY = 20  # quasi-Newton pairs kept
_HESSIAN = 3
_HC = 16
_STALL = 0.25  # Newton decrement (squared) that must remain at most after a pass, or the Hessian is taken anew
_STRICT_AFTER = 100
_PLAIN_AFTER = 10_000


def _descend(
    objective: _Objective, coef: Array, tolerance: float, inverse: Callable[[Array], Array] | None = None
) -> tuple[Array, float, Callable[[Array], Array]]:
    gradient = objective.gradient(coef)
    inverse = inverse or objective.inverse_hessian(coef)
    pairs: deque[tuple[Array, Array, float]] = deque(maxlen=_MEMORY)
    lipschitz = objective.regularization + objective.records.n_records * objective.weight * objective.loss.curvature
    lipschitz += 0.0 if objective.matrix is None else float(np.linalg.norm(objective.matrix))
    before = math.inf
    begun = objective.passes
    d, k = objective.records.n_features, objective.loss.n_outputs
    hcost = d * (k + 1) / _HC
    while (norm := _norm(gradient)) > tolerance:
        used = objective.passes - begun
        if used > _PLAIN_AFTER:
            coef = coef - gradient / lipschitz
            gradient = objective.gradient(coef)
            continue
        direction = -_two_loop(gradient, pairs, inverse)
        slope = float(np.vdot(gradient, direction))
        rate = -slope / before  # of the squared decrement
        left = math.inf if rate >= 1 else 2 * math.log(tolerance / norm) / math.log(max(rate, 1e-9))
        if objective.affords_hessian and left > _HESSIAN + hcost or slope >= 0:
            inverse = objective.inverse_hessian(coef)
            pairs.clear()
            direction = -inverse(gradient)
            slope = float(np.vdot(gradient, direction))
        before = -slope
        overshoot = 0.5 if used < _STRICT_AFTER else 0.0
        low, high, step = (0.0, slope), (math.inf, 0.0), 1.0
        for _ in range(60):
            trial = coef + step * direction
            ahead = objective.gradient(trial)
            if _norm(ahead) <= tolerance:
                break
            there = float(np.vdot(ahead, direction))
            if there > -overshoot * slope:
                high = (step, there)
            elif there < 0.9 * slope:
                low = (step, there)
            else:
                break
            if high[0] == math.inf:
                step *= 4
            else:
                share = low[1] / (low[1] - high[1])
                step = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
        move, change = trial - coef, ahead - gradient
        product = float(np.vdot(move, change))
        if product > 0:
            pairs.append((move, change, product))
        coef, gradient = trial, ahead
    return coef, norm, inverse


def _two_loop(gradient: Array, pairs: deque[tuple[Array, Array, float]], inverse: Callable[[Array], Array]) -> Array:
    result = gradient.copy()
    shares = []
    for move, change, product in reversed(pairs):
        share = np.vdot(move, result) / product
        result -= share * change
        shares.append(share)
    result = inverse(result)
    for (move, change, product), share in zip(pairs, reversed(shares), strict=True):
        result += (share - np.vdot(change, result) / product) * move
    return result


def _norm(gradient: Array) -> float:
    """Return the norm, rounded up by more than its own error."""
    u = float(np.finfo(gradient.dtype).eps)
    return float(np.sqrt(np.vdot(gradient, gradient))) * (1 + (gradient.size + 4) * u)


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def _objective(
    records: Any,
    y: ArrayLike | None,
    loss: Loss,
    regularization: float,
    linear: ArrayLike | None,
    matrix: ArrayLike | None,
    dtype: DTypeLike,
) -> _Objective:
    if not 0 < regularization < math.inf:
        raise SettingsError(f"The 'regularization' parameter must be positive. Got {regularization!r} instead.")
    if y is not None:
        X = records if sparse.issparse(records) else np.asarray(records)
        records = _InMemory(X, np.asarray(y, np.int64 if loss.n_outputs > 1 else np.float64))
    return _Objective(
        records,
        loss,
        regularization,
        None if linear is None else np.asarray(linear, dtype),
        None if matrix is None else np.asarray(matrix, dtype),
        dtype=dtype,
    )
