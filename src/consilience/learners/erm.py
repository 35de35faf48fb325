"""Losses, and the one solver that every linear learner goes through.

Nothing here is random and nothing here is private. :func:`solve` minimises the un-normalised sum

    F(f) = Σ_j loss(f·x_j, y_j) + (λ/2)‖f‖² + ½ fᵀM f + b·f,        ‖x_j‖ ≤ 1,

until the gradient *that it can vouch for* is shorter than a public tolerance. The privacy proofs of
the linear learners need exactly that, for every data set and every b, so a miss is never an
outcome: the solver goes on, with a method that has an a-priori bound, until the tolerance is met.
Nor is a table ever too large for its tolerance: where doubles cannot vouch for it, extended
precision does, and where that cannot, decimal numbers do, slowly.

All sources of records are read as a stream of blocks that fit the processor's cache. A block is
touched once for margins, slopes and gradient; a dense array is never copied.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import linalg, sparse
from threadpoolctl import ThreadpoolController

from consilience.errors import GuaranteeVoid, SettingsError

Array = NDArray[np.floating[Any]]
Labels = NDArray[Any]
Matrix: TypeAlias = "NDArray[Any] | sparse.csr_array"
Decimals = NDArray[np.object_]
Inverse = Callable[[Array], Array]
Chunks = Iterator[tuple[Matrix, Labels]]
T = TypeVar("T")
NumbersT = TypeVar("NumbersT", Array, Decimals)


class Loss(Protocol):
    """A convex loss of outputs z = f·x, with the constants that privacy proofs use (‖x‖ ≤ 1).

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

    def value(self, z: Array, y: Labels) -> Array:
        """Return each record's loss."""

    def slope(self, z: Array, y: Labels) -> Array:
        """Return the first derivative, shaped like `z`."""

    def bend(self, z: Array, y: Labels) -> Array:
        """Return the second derivative: like `z`, or (class, class, record)."""


@dataclass(frozen=True)
class Logistic:
    """ln(1 + exp(-yz)) for y in {-1, +1}."""

    lipschitz: ClassVar[float] = 1.0
    curvature: ClassVar[float] = 0.25
    at_zero: ClassVar[float] = math.log(2)
    monotone: ClassVar[bool] = True
    n_outputs: ClassVar[int] = 1

    def value(self, z: Array, y: Labels) -> Array:
        """Return ln(1 + exp(-yz)) without overflow."""
        margin = y * z
        return np.maximum(-margin, 0) + np.log1p(np.exp(-np.abs(margin)))

    def slope(self, z: Array, y: Labels) -> Array:
        """Return -y / (1 + exp(yz)), accurate relative to itself up to yz = 300."""
        odds = y * z
        # Nothing overflows or turns subnormal (slow), and exp(-300) is nothing.
        np.minimum(odds, 300, out=odds)
        np.exp(odds, out=odds)
        odds += 1
        return np.divide(-y, odds, out=odds)

    def bend(self, z: Array, y: Labels) -> Array:
        """Return e/(1+e)² with e = exp(-|z|): the form p(1-p) would cancel."""
        e = np.exp(-np.abs(z))
        bend: Array = e / np.square(1 + e)
        return bend


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
            raise SettingsError(
                f"The 'h' parameter of HuberHinge must be in (0, 1]. Got {self.h!r} instead."
            )

    @property
    def curvature(self) -> float:
        """Return 1/(2h)."""
        return 1 / (2 * self.h)

    def value(self, z: Array, y: Labels) -> Array:
        """Return 0, (1+h-yz)²/(4h) or 1-yz."""
        short = np.maximum(1 + self.h - y * z, 0)
        bent = np.minimum(short, 2 * self.h)
        value: Array = np.square(bent) / (4 * self.h) + (short - bent)
        return value

    def slope(self, z: Array, y: Labels) -> Array:
        """Return -y times (1+h-yz)/(2h) clipped to [0, 1]."""
        short = y * z
        np.subtract(1 + self.h, short, out=short)
        short *= self.curvature
        np.clip(short, 0, 1, out=short)
        short *= -y
        return short

    def bend(self, z: Array, y: Labels) -> Array:
        """Return 1/(2h) inside the parabola, 0 outside: one generalised derivative."""
        return np.where(np.abs(1 - y * z) < self.h, self.curvature, 0.0)


@dataclass(frozen=True)
class Softmax:
    """Cross-entropy of `n_classes` outputs; y holds the class codes from 0 on."""

    n_classes: int
    lipschitz: ClassVar[float] = math.sqrt(2)
    curvature: ClassVar[float] = 0.5
    monotone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.n_classes < 2:
            raise SettingsError(
                f"The 'n_classes' parameter of Softmax must be >= 2. Got {self.n_classes!r} "
                "instead."
            )

    @property
    def at_zero(self) -> float:
        """Return ln K."""
        return math.log(self.n_classes)

    @property
    def n_outputs(self) -> int:
        """Return K."""
        return self.n_classes

    def value(self, z: Array, y: Labels) -> Array:
        """Return ln Σ exp(z) - z_y."""
        shifted = z - z.max(axis=0)
        value: Array = np.log(np.exp(shifted).sum(axis=0)) - shifted[_at(z, y)]
        return value

    def slope(self, z: Array, y: Labels) -> Array:
        """Return p - e_y."""
        p = self._probabilities(z)
        p[_at(z, y)] -= 1
        return p

    def bend(self, z: Array, y: Labels) -> Array:
        """Return diag(p) - ppᵀ."""
        p = self._probabilities(z)
        bend = -p[:, None] * p
        diagonal = np.arange(self.n_classes)
        bend[diagonal, diagonal] += p
        return bend

    def _probabilities(self, z: Array) -> Array:
        p: Array = z - z.max(axis=0)
        np.exp(p, out=p)
        # One class after another: `sum` adds a single record's classes in another order, and a
        # record's slope may not depend on the table that it stands in.
        p /= functools.reduce(np.add, p)
        return p


def _at(z: Array, y: Labels) -> tuple[Labels, Labels]:
    """Return where each record's own class is in `z`."""
    check_labels(y, z.shape[1])
    return y, np.arange(len(y))


def check_labels(y: Labels, n_records: int) -> None:
    """Refuse labels of another shape than one for each record.

    NumPy would compare each of them with all records, whose slopes would depend on one another.
    """
    if y.shape != (n_records,):
        raise GuaranteeVoid(
            "Labels are not one for each record, so that slopes of different records would mix. "
            "Nothing was learned. Pass labels in one dimension."
        )


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

    def value(self, z: Array, y: Labels) -> Array:
        """Return half the squared residual."""
        return np.square(z - y) / 2

    def slope(self, z: Array, y: Labels) -> Array:
        """Return the residual."""
        return z - y

    def bend(self, z: Array, y: Labels) -> Array:
        """Return 1."""
        return np.ones_like(z)


@dataclass(frozen=True)
class Huber:
    """Squared loss, linear beyond residuals of size `threshold`, for |y| <= `label_bound`."""

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

    def value(self, z: Array, y: Labels) -> Array:
        """Return r²/2 or k(|r| - k/2)."""
        residual = np.abs(z - y)
        bent = np.minimum(residual, self.threshold)
        return bent * (residual - bent / 2)

    def slope(self, z: Array, y: Labels) -> Array:
        """Return the residual clipped to [-k, k]."""
        return np.clip(z - y, -self.threshold, self.threshold)

    def bend(self, z: Array, y: Labels) -> Array:
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

    def chunks(self) -> Chunks:
        """Yield (X, y), X a dense or CSR array; every call starts anew and yields the same."""


class PartitionedRecords(ChunkedRecords, Protocol):
    """Records that stay where they are: only sums over their parts travel."""

    def gather(self, function: Callable[[Chunks], T], every: int = 1) -> list[T]:
        """Return `function` of each partition's chunks, or of every `every`-th record of it."""


@dataclass(frozen=True)
class _InMemory:
    X: Matrix
    y: Labels

    @property
    def n_records(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_features(self) -> int:
        return int(self.X.shape[1])

    def chunks(self) -> Chunks:
        yield self.X, self.y


Records: TypeAlias = "ArrayLike | sparse.csr_array | ChunkedRecords"


class Problem(NamedTuple):
    """What is minimised over the records: loss, λ, b and M of F."""

    loss: Loss
    regularization: float
    linear: ArrayLike | None = None
    matrix: ArrayLike | None = None


class PublicFacts(NamedTuple):
    """What :func:`gradient_error` may know of a problem; the norms bound ‖b‖ and ‖M‖_F."""

    loss: Loss
    n_records: int
    n_features: int
    regularization: float
    linear_norm: float = 0.0
    matrix_norm: float = 0.0
    tolerance: float = 0.0


@dataclass(frozen=True)
class Solution:
    """What the solver guarantees: at `coef` the gradient is at most `gradient_norm` long.

    `coef` is float64, longdouble where the tolerance asked for more than float64 can certify, or
    decimal numbers (dtype object) where it asked for more than longdouble can. `passes` counts how
    often all records were read.
    """

    coef: Array | Decimals
    gradient_norm: float
    passes: int


# A block of about half a megabyte stays in the second-level cache between its two products. The
# upper limit is part of the error bound: it is the length of the longest unsplit sum.
_BLOCK_ENTRIES = 1 << 16
_BLOCK_RECORDS = 4096

# A subset for the first approximation: a share of all records, within limits that make its Hessian
# worth having.
_SUBSET_SHARE = 16
_SUBSET_RECORDS_PER_FEATURE = 20
_SUBSET_RECORDS = 1 << 15

# For tolerances that extended precision cannot certify: 100 digits are enough for any number of
# records that a computer can hold, with any regularisation.
_DECIMAL = Context(prec=100, Emin=MIN_EMIN, Emax=MAX_EMAX)

_MEMORY = 20  # steps from which the quasi-Newton direction learns
_STRICT_AFTER = 100  # passes; see _descend
_PLAIN_AFTER = 10_000


@dataclass
class _Total:
    """F of these records, each counted `weight` times, evaluated in the precision of `dtype`."""

    records: ChunkedRecords
    loss: Loss
    regularization: float
    linear: Array | None
    matrix: Array | None
    dtype: DTypeLike
    weight: float = 1.0
    passes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        d, k = self.records.n_features, self.loss.n_outputs
        return (d,) if k == 1 else (k, d)

    @property
    def steepness(self) -> float:
        """Bound the largest eigenvalue of the Hessian anywhere."""
        bound = self.regularization + self.weight * self.records.n_records * self.loss.curvature
        return bound if self.matrix is None else bound + float(np.linalg.norm(self.matrix))

    @property
    def affords_hessian(self) -> bool:
        # The Hessian and its factor together stay below half of the records' own memory, or 16 MB.
        entries = math.prod(self.shape) ** 2
        return entries <= max(self.records.n_records * self.records.n_features // 4, 1 << 20)

    def _gather(self, function: Callable[[Chunks], T]) -> list[T]:
        self.passes += 1
        # isinstance of a Protocol would take small tasks a fifth of their time.
        if hasattr(self.records, "gather"):
            return cast(PartitionedRecords, self.records).gather(function)
        return [function(self.records.chunks())]

    def gradient(self, coef: Array) -> Array:
        """Return the gradient at `coef`; :func:`gradient_error` bounds its error."""
        unit = float(np.finfo(self.dtype).eps)
        sums = self._gather(functools.partial(_slopes, self.loss, coef, self.dtype, unit))
        total = self.regularization * coef
        if self.linear is not None:
            total += self.linear
        if self.matrix is not None:
            total += self.matrix.astype(self.dtype, copy=False) @ coef
        whole = _paired(one for one in sums if one is not None)
        if whole is not None:
            total += self.weight * whole
        return total

    def decimal_gradient(self, coef: Decimals) -> Decimals:
        """Return the gradient at `coef`, all in decimal numbers; within `gradient_error`."""
        floats = {
            each.name: Decimal(value)
            for each in fields(cast(Any, self.loss))
            if isinstance(value := getattr(self.loss, each.name), float)
        }
        exact = replace(cast(Any, self.loss), **floats)
        sums = self._gather(functools.partial(_decimal_slopes, exact, coef))
        with localcontext(_DECIMAL):
            total: Decimals = coef * Decimal(self.regularization)
            if self.linear is not None:
                total += _as_decimal(self.linear)
            if self.matrix is not None:
                total += _as_decimal(self.matrix) @ coef
            whole = _paired(one for one in sums if one is not None)
            if whole is not None:
                total += whole * Decimal(self.weight)
            return total

    def inverse_hessian(self, coef: Array) -> Inverse:
        """Return the map g -> H⁻¹g at `coef`; if H is too large to keep, by its diagonal alone."""
        double = replace(self, dtype=np.float64)
        build = double._dense_inverse if self.affords_hessian else double._diagonal_inverse
        inverse = build(coef.astype(np.float64))
        self.passes = double.passes
        return inverse

    def _dense_inverse(self, coef: Array) -> Inverse:
        d, k = self.records.n_features, self.loss.n_outputs
        # H only gives a direction, so single precision will do, unless λ would drown in its
        # rounding.
        single = self.regularization > 1e-5 * self.steepness
        bends = functools.partial(_bends, self.loss, coef, np.float32 if single else np.float64)
        hessian = functools.reduce(np.add, self._gather(bends), np.zeros((k, d, k, d)))
        hessian = self.weight * hessian.reshape(k * d, k * d)
        if self.matrix is not None:
            hessian += self.matrix
        diagonal = np.einsum("ii->i", hessian)
        diagonal += self.regularization
        shift = 1e-14 * diagonal.max()
        # LAPACK itself: what SciPy checks around it takes longer than a small factor.
        factor, failed = linalg.lapack.dpotrf(hessian)
        while failed:
            # λ is below the rounding of H; any definite matrix gives a descent.
            diagonal += shift
            shift *= 10
            factor, failed = linalg.lapack.dpotrf(hessian)

        def inverse(gradient: Array) -> Array:
            flat = gradient.ravel().astype(np.float64)
            return np.asarray(linalg.lapack.dpotrs(factor, flat)[0]).reshape(gradient.shape)

        return inverse

    def _diagonal_inverse(self, coef: Array) -> Inverse:
        if self.records.n_records < self.records.n_features:
            # Few records span few directions, and a multiple of the gradient does not leave them.
            return lambda gradient: gradient / self.steepness
        diagonal = np.full(self.shape, self.regularization)
        if self.matrix is not None:
            diagonal += np.diag(self.matrix)
        for part in self._gather(functools.partial(_squares, self.loss, coef)):
            diagonal += self.weight * np.reshape(part, self.shape)
        return lambda gradient: gradient / diagonal

    def thinned(self, stride: int) -> _Total:
        """Return the estimate of F from every `stride`-th record."""
        if hasattr(self.records, "gather"):
            # Thinned by those who read the records, so that none is encoded for nothing.
            self.passes += 1
            gathered = cast(PartitionedRecords, self.records).gather(
                functools.partial(_thin, 1), stride
            )
        else:
            gathered = self._gather(functools.partial(_thin, stride))
        parts = [part for found in gathered for part in found]
        stack = sparse.vstack if sparse.issparse(parts[0][0]) else np.concatenate
        records = _InMemory(stack([X for X, _ in parts]), np.concatenate([y for _, y in parts]))
        return replace(
            self, records=records, weight=self.weight * self.records.n_records / records.n_records
        )


def block_records(n_features: int) -> int:
    """Return how many dense records are added up at a time: those that fit in the cache."""
    return min(max(_BLOCK_ENTRIES // max(n_features, 1), 64), _BLOCK_RECORDS)


def _blocks(chunks: Chunks, loss: Loss, dtype: DTypeLike) -> Chunks:
    label_dtype = np.float64 if loss.n_outputs == 1 else np.int64
    for X, y in chunks:
        check_labels(y, X.shape[0])
        length = _BLOCK_RECORDS if sparse.issparse(X) else block_records(X.shape[1])
        for begin in range(0, X.shape[0], length):
            part = slice(begin, begin + length)
            yield X[part].astype(dtype, copy=False), y[part].astype(label_dtype, copy=False)


def _paired(items: Iterable[NumbersT]) -> NumbersT | None:
    """Return the pairwise sum: each term passes at most log2(n) + 1 additions; None if empty."""
    sums: list[NumbersT] = []
    for index, item in enumerate(items, start=1):
        sums.append(item)
        while index % 2 == 0:
            last = sums.pop()
            sums[-1] = sums[-1] + last
            index //= 2
    return functools.reduce(np.add, reversed(sums)) if sums else None


def _slopes(loss: Loss, coef: Array, dtype: DTypeLike, unit: float, chunks: Chunks) -> Array | None:
    """Return Σ slope·x; `unit` is the rounding unit that the error bound assumes of `dtype`."""
    if float(np.finfo(dtype).eps) != unit:
        raise GuaranteeVoid(
            "A worker's extended precision is not the client's, and the error bound would not "
            "hold. Nothing was learned. Use workers of the client's architecture."
        )
    return _paired(loss.slope(coef @ X.T, y) @ X for X, y in _blocks(chunks, loss, dtype))


def _as_decimal(numbers: Array | Labels) -> Decimals:
    return np.asarray(np.frompyfunc(Decimal, 1, 1)(numbers), object)


def _decimal_slopes(loss: Loss, coef: Decimals, chunks: Chunks) -> Decimals | None:
    """Return Σ slope·x in decimal numbers, for a loss whose constants are such."""

    def products() -> Iterator[Decimals]:
        for X, y in _blocks(chunks, loss, np.float64):
            dense = cast(sparse.csr_array, X).toarray() if sparse.issparse(X) else X
            rows = _as_decimal(cast(Labels, dense))
            labels = _as_decimal(y) if loss.n_outputs == 1 else y
            outputs = cast(Array, coef @ rows.T)
            yield cast(Decimals, loss.slope(outputs, labels)) @ rows

    with localcontext(_DECIMAL):
        return _paired(products())


def _curved(loss: Loss, coef: Array, chunks: Chunks) -> Iterator[tuple[Matrix, Array]]:
    k = loss.n_outputs
    for X, y in _blocks(chunks, loss, np.float64):
        if k == 1 and not coef.any():
            # Nothing is known yet: the largest curvature is the safe one (the Huber-hinge has none
            # at 0).
            bend = np.full(y.shape, loss.curvature)
        else:
            bend = loss.bend(coef @ X.T, y)
            bend[np.abs(bend) < 1e-20] = 0  # products with subnormal numbers are ten times slower
        yield X, bend.reshape(k, k, -1)


def _bends(loss: Loss, coef: Array, dtype: DTypeLike, chunks: Chunks) -> Array:
    """Return Σ bend·xxᵀ of all records; blocks of outputs below the diagonal stay zero."""
    k, d = loss.n_outputs, coef.shape[-1]
    hessian = np.zeros((k, d, k, d), dtype)
    for X, bend in _curved(loss, coef, chunks):
        X, bend = X.astype(dtype, copy=False), bend.astype(dtype, copy=False)
        for a in range(k):
            hessian[a, :, a:] += _gram(X, bend[a, a:])
    return hessian


def _squares(loss: Loss, coef: Array, chunks: Chunks) -> Array:
    """Return the diagonal of Σ bend·xxᵀ."""
    total = np.zeros((loss.n_outputs, coef.shape[-1]))
    for X, bend in _curved(loss, coef, chunks):
        square = cast(sparse.csr_array, X).multiply(X) if sparse.issparse(X) else np.square(X)
        total += np.einsum("kkj->kj", bend) @ square
    return total


def _thin(stride: int, chunks: Chunks) -> list[tuple[Matrix, Labels]]:
    """Return every `stride`-th record; copies, as a view would keep the whole chunk in memory."""
    parts, at = [], 0
    for X, y in chunks:
        first = -at % stride
        at += X.shape[0]
        if first < X.shape[0]:
            parts.append((X[first::stride].copy(), y[first::stride].copy()))
    return parts


def _gram(X: Matrix, weights: Array) -> Array:
    """Return Xᵀ diag(w) X for every row w of `weights`, as (feature, row, feature)."""
    if sparse.issparse(X):
        rows = cast(sparse.csr_array, X)
        return np.stack([(rows.T @ rows.multiply(w[:, None])).toarray() for w in weights], axis=1)
    if len(weights) == 1:  # a curvature, so not negative: a product with itself is half the work
        half = X * np.sqrt(weights[0])[:, None]
        return np.asarray(half.T @ half)[:, None]
    wide = weights.T[:, :, None] * X[:, None, :]
    return np.asarray(X.T @ wide.reshape(len(X), -1)).reshape(X.shape[1], *wide.shape[1:])


def _unit(dtype: DTypeLike) -> float:
    """Return the unit roundoff of `dtype`."""
    if dtype is Decimal:
        return 0.5 * 10.0 ** (1 - _DECIMAL.prec)
    return float(np.finfo(dtype).eps) / 2


def gradient_error(facts: PublicFacts, dtype: DTypeLike = np.float64) -> float:
    """Bound the rounding error of the gradient computed in `dtype` by public facts alone.

    The bound holds, whatever the records, at every f with F(f) <= F(0) and at every f where the
    gradient is at most twice the tolerance.

    Notes
    -----
    u is the unit roundoff, γ(k) = ku/(1-ku) the error of k roundings in any order (Higham 2002,
    lemma 3.1), K the number of outputs, c and l0 the loss's curvature and value at zero, n records
    in the unit ball.

    1. F(f) <= F(0) gives (λ/2)‖f‖² - ‖b‖‖f‖ <= n·l0, so ‖f‖ <= φ = (‖b‖ + √(‖b‖² + 2λn·l0))/λ; a
       gradient of 2τ adds 2τ/λ, by strong convexity.
    2. An output is off by γ(d)|x|·|f| <= γ(d)φ (jointly, for K outputs: Cauchy-Schwarz in each,
       then over classes); softmax's shift by the maximum costs (1+√K)uφ more. The slope moves c
       times as much.
    3. Slopes are at most s = min(L, √(2c·l0) + cφ): a nonnegative loss of curvature c has |l'(0)|²
       <= 2c·l(0). Evaluating one costs (8+K)u(s+c): exp within 4u, K additions, a quotient, and for
       the Huber-hinge the rounding of 1+h-yz, at most 4(1+h)u, times c.
    4. Summing s·x runs through at most `_BLOCK_RECORDS` additions in a block and 2·log2(n)+2
       between blocks, each relative to Σ|s|‖x‖ <= ns: log2+1 between those of one partition, log2+1
       between partitions (`_paired`), and neither has more parts than records. Regulariser, M and b
       add one product and at most three sums.
    """
    u = _unit(dtype)
    loss, n, n_features, lam, linear_norm, matrix_norm, tolerance = facts
    k = loss.n_outputs

    def gamma(roundings: float) -> float:
        return roundings * u / (1 - roundings * u)

    radius = (
        linear_norm + math.sqrt(linear_norm**2 + 2 * lam * n * loss.at_zero) + 2 * tolerance
    ) / lam
    steepest = min(
        loss.lipschitz, math.sqrt(2 * loss.curvature * loss.at_zero) + loss.curvature * radius
    )
    slope = loss.curvature * gamma(n_features + k + 1) * radius + (8 + k) * u * (
        steepest + loss.curvature
    )
    summing = gamma(min(n, _BLOCK_RECORDS) + 2 * math.log2(n + 1) + 2) * (steepest + slope)
    fixed = (
        gamma(4) * (lam * radius + linear_norm + n * steepest)
        + gamma(n_features + 4) * matrix_norm * radius
    )
    return n * (slope + summing) + fixed


def check_tolerance(facts: PublicFacts) -> None:
    """Refuse a tolerance that the solver could not reach in decimal numbers."""
    steepness = facts.regularization + facts.n_records * facts.loss.curvature + facts.matrix_norm
    # What a plain step of `_refine` gains has to exceed the rounding.
    least = 4 * gradient_error(facts, Decimal) * steepness / facts.regularization
    if not facts.tolerance >= least:
        raise SettingsError(
            f"The 'tolerance' parameter of solve must be at least {least:.3g}, four times the "
            f"rounding error of this problem's gradient. Got {facts.tolerance!r} instead. No "
            "record was read. Raise it or the regularization."
        )


def certified_gradient(
    records: Records,
    y: ArrayLike | None,
    problem: Problem,
    coef: ArrayLike,
    *,
    dtype: DTypeLike = np.float64,
) -> Array:
    """Return the gradient of F at `coef` in `dtype`, within `gradient_error` of the exact one."""
    return _total_over(records, y, problem, dtype).gradient(np.asarray(coef, dtype))


def solve(
    records: Records,
    y: ArrayLike | None,
    problem: Problem,
    *,
    tolerance: float,
    start: ArrayLike | None = None,
) -> Solution:
    """Minimise F until its gradient, computed at the returned point, is at most `tolerance` long.

    `records` is a dense or CSR array with its labels in `y`, or :class:`ChunkedRecords` with
    ``y=None``; finite records in the unit ball are the caller's promise. BLAS is held to one thread
    meanwhile, in the whole process: parallelism belongs to the caller, who has many problems.

    Raises
    ------
    SettingsError
        If a parameter cannot work: in particular a `tolerance` that is not positive, or so small
        that 100 digits are too few, which no number of records makes a planned one.
    GuaranteeVoid
        If the records are not finite.
    """
    total = _total_over(records, y, problem, np.float64)
    facts = PublicFacts(
        total.loss,
        n_records=total.records.n_records,
        n_features=total.records.n_features,
        regularization=total.regularization,
        linear_norm=0.0 if total.linear is None else float(np.linalg.norm(total.linear)),
        matrix_norm=0.0 if total.matrix is None else float(np.linalg.norm(total.matrix)),
        tolerance=tolerance,
    )
    check_tolerance(facts)
    floors = [4 * gradient_error(facts, dtype) for dtype in (np.float64, np.longdouble)]
    with one_blas_thread():
        coef, norm, inverse = _climb(total, max(tolerance, floors[0]), start)
        if tolerance < floors[0]:
            total = replace(total, dtype=np.longdouble)
            reached = max(tolerance, floors[1])
            coef, norm, inverse = _descend(total, coef.astype(np.longdouble), reached, inverse)
        if tolerance < floors[1]:
            exact, norm = _refine(total, coef, tolerance, inverse)
            return Solution(exact, norm, total.passes)
    return Solution(coef, norm, total.passes)


def one_blas_thread() -> AbstractContextManager[object]:
    """Return a context in which BLAS keeps to one thread, in the whole process."""
    libraries = [lib for lib in _blas().lib_controllers if lib.user_api == "blas"]
    if all(lib.num_threads == 1 for lib in libraries):
        return nullcontext()
    limited: AbstractContextManager[object] = _blas().limit(limits=1, user_api="blas")
    return limited


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()  # looking for the libraries takes milliseconds


def _total_over(
    records: Records, y: ArrayLike | None, problem: Problem, dtype: DTypeLike
) -> _Total:
    loss, regularization, linear, matrix = problem
    if not 0 < regularization < math.inf:
        raise SettingsError(
            f"The 'regularization' parameter must be positive. Got {regularization!r} instead."
        )
    if matrix is not None and loss.n_outputs > 1:
        raise SettingsError(
            f"The 'matrix' parameter needs a loss of one output. Got {loss!r}. Leave it out."
        )
    if y is not None:
        X = sparse.csr_array(records) if sparse.issparse(records) else np.asarray(records)
        records = _InMemory(X, np.asarray(y))
    b = None if linear is None else np.asarray(linear, dtype)
    M = None if matrix is None else np.asarray(matrix, np.float64)
    return _Total(cast(ChunkedRecords, records), loss, regularization, b, M, dtype)


def _climb(
    total: _Total, tolerance: float, start: ArrayLike | None = None
) -> tuple[Array, float, Inverse]:
    """Descend on a subset first: its solution is a cheap start, its Hessian a cheap metric."""
    n, d = total.records.n_records, total.records.n_features
    coef: Array = np.zeros(total.shape) if start is None else np.array(start, np.float64)
    stride = n // max(_SUBSET_RECORDS_PER_FEATURE * d, min(n // _SUBSET_SHARE, _SUBSET_RECORDS), 1)
    if stride < 3 or not total.affords_hessian:
        return _descend(total, coef, tolerance, total.inverse_hessian(coef))
    subset = total.thinned(stride)
    if start is None:
        # Nothing is gained by solving the subset better than it resembles the whole: its gradient
        # differs from the whole one by about n/√m typical slopes.
        loss, m = total.loss, subset.records.n_records
        resemblance = total.weight * n * math.sqrt(2 * loss.curvature * loss.at_zero / m)
        coef, _, _ = _climb(subset, max(tolerance, 0.03 * resemblance))
    return _descend(total, coef, tolerance, subset.inverse_hessian(coef))


def _descend(
    total: _Total, coef: Array, tolerance: float, inverse: Inverse
) -> tuple[Array, float, Inverse]:
    """Follow quasi-Newton directions in the metric of a Hessian that is renewed when that pays.

    Steps are accepted by the slope along the direction alone: near the solution differences of F
    drown in rounding, slopes do not. A step that ends between 0.9 of the initial slope and 0 has
    lowered the convex F by at least 0.095·slope²/(steepness·‖direction‖²), which makes
    limited-memory quasi-Newton steps converge linearly from anywhere (Liu & Nocedal 1989). At first
    a slope turned positive is accepted too: one pass less in practice, not covered by the proof,
    hence given up after `_STRICT_AFTER` passes. Should rounding defeat even that, plain steps
    g/steepness remain: as ‖g‖ > tolerance >= 4·error, each lowers F by tolerance²/(4·steepness) at
    least.
    """
    k, d = total.loss.n_outputs, total.records.n_features
    hessian_cost = d * (k + 1) / 16 + 3  # in passes, measured
    begun = total.passes
    steps: deque[tuple[Array, Array, float]] = deque(maxlen=_MEMORY)
    gradient = total.gradient(coef)
    before = math.inf
    while (norm := _norm(gradient)) > tolerance:
        passes = total.passes - begun
        if passes > _PLAIN_AFTER:
            coef = coef - gradient / total.steepness
            gradient = total.gradient(coef)
            continue
        direction = _direction(gradient, steps, inverse, rescale=not total.affords_hessian)
        slope = float(np.vdot(gradient, direction))
        # The squared Newton decrement, -slope, tells the pace, and the pace how many passes are
        # left.
        pace = -slope / before
        left = 2 * math.log(tolerance / norm) / math.log(max(pace, 1e-9)) if pace < 1 else math.inf
        if left > hessian_cost and total.affords_hessian:
            inverse = total.inverse_hessian(coef)
            steps.clear()
            direction = -inverse(gradient)
            slope = float(np.vdot(gradient, direction))
        if slope >= 0:
            steps.clear()
            direction = -gradient / total.steepness
            slope = float(np.vdot(gradient, direction))
        before = -slope
        trial, ahead = _step(
            total, coef, direction, slope, tolerance, 0.5 if passes < _STRICT_AFTER else 0.0
        )
        move, change = trial - coef, ahead - gradient
        product = float(np.vdot(move, change))
        if product > 0:
            steps.append((move, change, product))
        coef, gradient = trial, ahead
    return coef, norm, inverse


def _refine(
    total: _Total, coef: Array, tolerance: float, inverse: Inverse
) -> tuple[Decimals, float]:
    """Go on in decimal numbers from where extended precision ended.

    A step in the metric of the last Hessian, or of a new one, is taken if it shortens the gradient
    by a tenth. If neither does, a plain step g/steepness takes its place: with Hessians between λ
    and steepness it shortens the gradient by the factor 1 - λ/steepness, and the caller saw to it
    that rounding, of a gradient longer than the tolerance, is less than half of that. So this ends.
    """
    at = _as_decimal(coef.astype(np.float64))
    gradient = total.decimal_gradient(at)
    while (norm := _decimal_norm(gradient)) > tolerance:
        for renew in (False, True):
            inverse = total.inverse_hessian(at.astype(np.float64)) if renew else inverse
            with localcontext(_DECIMAL):
                # As a number of about 1, lest it underflows.
                scaled = (gradient / Decimal(norm)).astype(np.float64)
                trial = at - _as_decimal(inverse(scaled)) * Decimal(norm)
            ahead = total.decimal_gradient(trial)
            if shorter := _decimal_norm(ahead) <= 0.9 * norm:
                break
        if not shorter:
            with localcontext(_DECIMAL):
                trial = at - gradient / Decimal(total.steepness)
            ahead = total.decimal_gradient(trial)
        at, gradient = trial, ahead
    return at, norm


def _direction(
    gradient: Array, steps: deque[tuple[Array, Array, float]], inverse: Inverse, *, rescale: bool
) -> Array:
    """Return the L-BFGS direction over the metric `inverse` (Nocedal & Wright 2006, alg. 7.4).

    A metric that is no Hessian has no scale of its own: `rescale` takes it from the last step.
    """
    result = -gradient
    shares = []
    for move, change, product in reversed(steps):
        shares.append(np.vdot(move, result) / product)
        result -= shares[-1] * change
    result = inverse(result)
    if steps and rescale:
        _, change, product = steps[-1]
        result *= product / np.vdot(change, inverse(change))
    for (move, change, product), share in zip(steps, reversed(shares), strict=True):
        result += (share - np.vdot(change, result) / product) * move
    return result


def _step(
    total: _Total,
    coef: Array,
    direction: Array,
    slope: float,
    tolerance: float,
    overshoot: float,
) -> tuple[Array, Array]:
    """Return a point where the slope is within [0.9, -overshoot] of the first; its gradient."""
    low, low_slope, high, high_slope, step = 0.0, slope, math.inf, 0.0, 1.0
    for _ in range(60):
        trial = coef + step * direction
        gradient = total.gradient(trial)
        there = float(np.vdot(gradient, direction))
        if 0.9 * slope <= there <= -overshoot * slope or _norm(gradient) <= tolerance:
            break
        if there < 0:
            low, low_slope = step, there
        else:
            high, high_slope = step, there
        share = low_slope / (low_slope - high_slope)
        step = 4 * step if high == math.inf else low + min(max(share, 0.1), 0.9) * (high - low)
    return trial, gradient


def _decimal_norm(gradient: Decimals) -> float:
    """Return the norm of decimal numbers, rounded up by more than its own error."""
    with localcontext(_DECIMAL):
        return float((gradient * gradient).sum().sqrt()) * (1 + 1e-15)


def _norm(gradient: Array) -> float:
    """Return the norm, rounded up by more than its own error."""
    norm = math.sqrt(float(np.vdot(gradient, gradient)))
    if not math.isfinite(norm):
        raise GuaranteeVoid(
            "The gradient is not finite: some record or parameter is not, or is outside the unit "
            "ball. Nothing was learned. Clean and scale the records before training."
        )
    return norm * (1 + (gradient.size + 4) * float(np.finfo(np.float64).eps))
