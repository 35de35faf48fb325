"""Every line of the project that draws noise, and the source it is drawn from.

A mechanism takes the `Event` that was charged and draws exactly the noise that event states, so
what is drawn and what is accounted cannot drift apart. Counts and selection use OpenDP's exact
samplers, the closing step and sums of records those of `exact_noise.py`. The two continuous vector
noises are drawn here with full relative precision: the drawn vector is within `draw_error` · ‖b‖ of
an exact draw, an error the closing step covers (docs/guarantees/closing.md).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, localcontext
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from opendp.domains import atom_domain, vector_domain
from opendp.measurements import make_gaussian, make_laplace, make_noisy_max
from opendp.measures import zero_concentrated_divergence
from opendp.metrics import l1_distance, l2_distance, linf_distance
from opendp.mod import enable_features
from randomgen import ChaCha
from scipy import sparse

from consilience.errors import ConsilienceError, SettingsError
from consilience.privacy.accounting import (
    Closing,
    DiscreteGaussian,
    Gaussian,
    GaussianSum,
    GradientSteps,
    L2Laplace,
    Laplace,
    ObjectiveGaussian,
    ObjectiveL2Laplace,
    Selection,
)
from consilience.privacy.exact_noise import add_laplace, discrete_gaussian

# Not opendp.prelude: it imports scikit-learn, which the trusted core does without.
enable_features("contrib")

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Noise:
    """Say where noise comes from: the operating system, or for tests and experiments a seed.

    A plain value that can be copied, compared and sent to another process; each use opens a
    `Source` of its own.

    Privacy
    -------
    A seed voids the guarantee: anyone who learns it can subtract the noise.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, schema=schema, noise=cs.Noise(seed=1))
    >>> learner.fit(table).guarantee_  # whoever knows the seed can take the noise off
    Guarantee.void('seeded noise')
    """

    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and not (
            isinstance(self.seed, int | np.integer) and 0 <= self.seed < 2**256
        ):
            raise SettingsError(
                f"The 'seed' of Noise must be None or an integer >= 0. Got {self.seed!r} instead."
            )

    def open(self, *, stream: int = 0) -> Source:
        """Open a source with a fresh 256-bit key, or stream number `stream` of the seed."""
        return Source(self.seed, stream)


class Source:
    """A ChaCha20 stream keyed once, used in one process, never copied, stored or sent.

    Privacy
    -------
    Without a seed the key is 256 bits from ``os.urandom``, held nowhere else. The guarantees assume
    that nobody can tell ChaCha20's output from random bits.
    """

    def __init__(self, seed: int | None = None, stream: int = 0) -> None:
        self.seeded = seed is not None
        self._process = os.getpid()
        key = int.from_bytes(os.urandom(32), "little") if seed is None else int(seed)
        self._bits = ChaCha(key=key, counter=stream << 64, rounds=20)

    def __reduce__(self) -> NoReturn:
        raise ConsilienceError(
            "A noise source was to be copied or sent to another process, which would repeat its "
            "noise there. Nothing was sent. Send the Noise value and open it in the process that "
            "draws."
        )

    def words(self, n: int) -> NDArray[np.uint64]:
        """Draw n independent 64-bit words."""
        if os.getpid() != self._process:
            raise ConsilienceError(
                "A noise source opened in another process was used after a fork, which would "
                "repeat its noise. Nothing was drawn. Open a source in the process that draws."
            )
        return np.asarray(self._bits.random_raw(n), dtype=np.uint64)

    def uniform(self, n: int) -> Floats:
        """Draw n uniform numbers in (0, 1) with full relative precision, however close to 0.

        The exponent is geometric (the leading zeros of fresh words) and 51 fraction bits are drawn
        apart, so that -log of a draw has no grid that would reveal the value it is added to.
        """
        zeros = np.zeros(n)
        open_ = np.arange(n)
        while open_.size:
            _, bits = np.frexp((self.words(open_.size) >> np.uint64(11)).astype(np.float64))
            zeros[open_] += 53 - bits
            open_ = open_[bits == 0]
        # The middle of one of 2^51 cells: the 53 bits of a double hold it exactly, so nothing is
        # rounded to 0.5 or 1.
        mantissa = 0.5 + ((self.words(n) >> np.uint64(13)).astype(np.float64) + 0.5) * 2.0**-52
        return np.asarray(np.ldexp(mantissa, -zeros.astype(np.int64)), dtype=np.float64)

    def permutation(self, n: int) -> NDArray[np.intp]:
        """Draw a uniform order of n slots."""
        while True:
            words = self.words(n)
            order = np.argsort(words)
            if (np.diff(words[order]) > 0).all():  # a tie would favour an order
                return np.asarray(order, dtype=np.intp)

    def exponential(self, n: int) -> Floats:
        """Draw n standard exponentials with full relative precision at both ends."""
        half = self.uniform(n) / 2
        large = (self.words(n) & np.uint64(1)).astype(bool)
        return np.where(large, -np.log(half), -np.log1p(-half))

    def normal(self, n: int) -> Floats:
        """Draw n standard normals with full relative precision (Box-Muller on an octant)."""
        pairs = (n + 1) // 2
        radius = np.sqrt(2 * self.exponential(pairs))
        angle = self.uniform(pairs) * (math.pi / 4)
        octant = self.words(pairs)
        swap, left, down = ((octant >> np.uint64(bit)) & np.uint64(1) == 1 for bit in range(3))
        a, b = radius * np.cos(angle), radius * np.sin(angle)
        x, y = np.where(swap, b, a), np.where(swap, a, b)
        return np.concatenate([np.where(left, -x, x), np.where(down, -y, y)])[:n]


def draw_error(dimension: int) -> float:
    """Return how far, relative to its norm, a drawn vector can be from the exact draw it rounds.

    Each coordinate passes through fewer than 32 correctly or faithfully rounded operations; the
    radius of `l2_laplace` and the norm of its direction are sums of `dimension` terms of one sign.
    """
    return (dimension + 32) * 2.0**-52


def l2_laplace(dimension: int, *, event: L2Laplace | ObjectiveL2Laplace, source: Source) -> Floats:
    """Draw a vector of density ∝ exp(-‖b‖₂ / event.scale): uniform direction, Gamma radius.

    Privacy
    -------
    What `event` states; proof in docs/guarantees/l2-laplace.md. Added to a float vector it leaves a
    floating-point gap that `close` must cover. Not hidden: the dimension.
    """
    if dimension == 0:
        return np.zeros(0)
    direction = source.normal(dimension)
    radius = event.scale * source.exponential(dimension).sum()
    return np.asarray(direction * (radius / np.linalg.norm(direction)), dtype=np.float64)


def gaussian(dimension: int, *, event: Gaussian | ObjectiveGaussian, source: Source) -> Floats:
    """Draw a vector of independent N(0, event.sigma²).

    Privacy
    -------
    What `event` states; proof in docs/guarantees/gaussian.md. Floating-point gap and dimension as
    `l2_laplace`.
    """
    return event.sigma * source.normal(dimension)


def close(vector: Floats, *, event: Closing, source: Source) -> Floats:
    """Return `vector` plus exact Laplace noise that hides how it was computed, rounding included.

    Privacy
    -------
    `event.epsilon` for everything that lies between the ideal real-valued output and this vector,
    provided they are within `event.distance` of each other for every data set; proof in
    docs/guarantees/closing.md.
    """
    given = np.asarray(vector, dtype=np.float64)
    _require_finite(given)
    return add_laplace(given.ravel(), event.scale, source).reshape(given.shape)


def laplace_counts(counts: Integers, *, event: Laplace, source: Source) -> Integers:
    """Return integer `counts` plus discrete Laplace noise of scale ``event.scale``.

    Privacy
    -------
    `event.epsilon`, provided that one unit changes the counts by at most `event.sensitivity` in L1.
    Exact: no floating-point gap. Not hidden: how many counts there are. Proof in
    docs/guarantees/laplace.md.
    """
    return _exact(counts, make_laplace, l1_distance(T="i64"), event.scale, source)


def gaussian_counts(counts: Integers, *, event: DiscreteGaussian, source: Source) -> Integers:
    """Return integer `counts` plus discrete Gaussian noise of parameter ``event.sigma``.

    Privacy
    -------
    `event.rho` zero-concentrated, provided that one unit changes the counts by at most
    `event.sensitivity` in L2. Exact. Not hidden: how many counts there are. Proof in
    docs/guarantees/gaussian.md.
    """
    return _exact(counts, make_gaussian, l2_distance(T=float), event.sigma, source)


def noisy_moment(sums: Integers, *, event: GradientSteps, source: Source) -> Integers:
    """Return a symmetric matrix of whole sums, or its diagonal alone, plus the moment's noise.

    Entries beside the diagonal stand for two, so that half the variance hides them as well.

    Privacy
    -------
    The moment's part of `event`, provided that one unit changes the matrix by at most
    `event.moment_sensitivity` in its Frobenius norm. Exact, in grains. Not hidden: how many numbers
    there are. Proof in docs/guarantees/gradient.md.
    """
    sums, sigma = _whole(sums), event.moment_sigma / event.moment_grain
    if sums.ndim == 1:
        return sums + discrete_gaussian(sums.size, sigma, source)
    d = len(sums)
    noise = np.zeros((d, d), np.int64)
    noise[np.tri(d, k=-1, dtype=bool)] = discrete_gaussian(
        d * (d - 1) // 2, sigma / math.sqrt(2), source
    )
    return sums + noise + noise.T + np.diag(discrete_gaussian(d, sigma, source))


def gradient_noise(shape: tuple[int, ...], *, event: GradientSteps, source: Source) -> Integers:
    """Draw the noise of whole sums: of one gradient, or of several in the rows of `shape`.

    Privacy
    -------
    Added to gradients, one of the `event.steps` parts of `event` for each, provided that one unit
    changes its sums by at most `event.gradient_sensitivity` in L2. Exact, in grains. Not hidden:
    how many numbers there are. Proof in docs/guarantees/gradient.md.
    """
    sigma = event.gradient_sigma / event.gradient_grain
    return discrete_gaussian(math.prod(shape), sigma, source).reshape(shape)


def noisy_sum(sums: Integers, widths: Floats, *, event: GaussianSum, source: Source) -> Integers:
    """Return whole sums plus noise, ``event.drawn_sigma * widths[j]`` grains wide for number j.

    Noise and sum are added modulo 2^64.

    Privacy
    -------
    `event.epsilon` at `event.delta`, provided that one unit changes the sums, each divided by its
    width, by at most `event.sensitivity` in L2. Exact. Not hidden: how many numbers there are.
    Proof in docs/guarantees/statistics.md; of shares, for which `event.honest` shares in all must
    stay unknown, in docs/guarantees/shared-noise.md.
    """
    sums, scales = _whole(sums), event.drawn_sigma * np.asarray(widths, np.float64)
    if sums.shape != (event.length,) or scales.shape != sums.shape:
        raise SettingsError(
            "A sum has another number of numbers than its event states. Nothing was drawn."
        )
    if not scales.min(initial=math.inf) >= event.narrowest * (1 - 2**-40):
        raise SettingsError("Noise narrower than its event states was to be drawn. None was.")
    noise = np.zeros(event.length, np.int64)
    for scale in np.unique(scales):  # few: numbers of one kind share their weight
        alike = scales == scale
        noise[alike] = discrete_gaussian(int(alike.sum()), float(scale), source)
    return sums + noise


def select(scores: Floats, *, event: Selection, source: Source) -> int:
    """Return an index drawn with probability ∝ exp(score / event.scale): the exponential mechanism.

    Privacy
    -------
    `event.epsilon`, provided that one unit moves no score by more than `event.sensitivity` (all the
    same way if `event.monotone`). Not hidden: how many candidates there are. Proof in
    docs/guarantees/selection.md.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise SettingsError("Selection needs a non-empty list of finite scores. Nothing was drawn.")
    if source.seeded:
        gumbel = -np.log(source.exponential(values.size))
        return int(np.argmax(values / event.scale + gumbel))
    domain = vector_domain(atom_domain(T=float, nan=False))
    metric = linf_distance(T=float, monotonic=event.monotone == "yes")
    # The zero-concentrated measure selects OpenDP's Gumbel noise, which is the exponential
    # mechanism.
    measurement = make_noisy_max(domain, metric, zero_concentrated_divergence(), scale=event.scale)
    return int(measurement(values.tolist()))


def select_many(
    steps: Integers, grain: int, *, event: Selection, source: Source
) -> NDArray[np.intp]:
    """Draw for each row of `steps` a column, exactly ∝ exp(-steps / (grain · event.scale)).

    Whole steps of 1/`grain` say how far each candidate is from perfect, so that no score is ever
    rounded. A row's draw is decided by 64 random bits and, in the rare case that floating point
    cannot tell on which side of a boundary they fall, by more bits and digits.

    Privacy
    -------
    `event.epsilon` for all rows together, provided that a unit moves the scores of row r by at most
    Sᵣ (all of them the same way if `event.monotone`), and that the Sᵣ add up to at most
    `event.sensitivity`. A unit that leaves one row for another counts as two moves, each monotone,
    of half the cost. Not hidden: how many rows and columns there are. Proof in
    docs/guarantees/tree-selection.md.
    """
    table = np.asarray(steps)
    if table.ndim != 2 or table.shape[1] == 0 or table.dtype.kind not in "iu":
        raise SettingsError(
            "Selection needs a table of whole steps with at least one column. Nothing was drawn."
        )
    n_rows, n_columns = table.shape
    if n_rows == 0:
        return np.zeros(0, dtype=np.intp)
    # Modulo 2^64 the distance from the least is exact, whatever 64-bit numbers these are.
    least = table.min(axis=1, keepdims=True)
    distance = table.astype(np.uint64) - least.astype(np.uint64)
    words = source.words(n_rows)
    with np.errstate(over="ignore"):  # a distance of infinitely many scales has no weight
        sums = np.cumsum(np.exp(-(distance / (grain * event.scale))), axis=1)
    target = words.astype(np.float64) * 2.0**-64 * sums[:, -1]
    found = (sums <= target[:, None]).sum(axis=1)
    # One rounding per summand in each of two sums, and 3 ln(n_columns) + 10 for all else, in units
    # of 2^-52 of the whole (docs/guarantees/tree-selection.md); 2048 leaves a hundredfold margin
    # and costs one draw in 2^40.
    error = (n_columns + 2048) * 2.0**-52 * sums[:, -1]
    rows = np.arange(n_rows)
    below = np.where(found > 0, sums[rows, np.maximum(found - 1, 0)], -math.inf)
    above = sums[rows, np.minimum(found, n_columns - 1)]
    sure = (target - below > error) & (above - target > error)
    rate = 1 / (Fraction(grain) * Fraction(event.scale))
    for row in np.flatnonzero(~sure):
        found[row] = _select_exactly(
            [int(step) for step in distance[row]], rate, int(words[row]), source
        )
    return np.asarray(found, dtype=np.intp)


def _select_exactly(steps: list[int], rate: Fraction, known: int, source: Source) -> int:
    """Decide by interval arithmetic with as many digits and bits as it takes."""
    bits, digits = 64, 40
    while True:
        exact = Context(
            prec=digits, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[]
        )
        with localcontext(exact):  # whatever the caller set up
            # Each of n terms, n sums (at most n) and the edges are off by less than 10^(1 - digits)
            # of themselves.
            error = Decimal(len(steps)) ** 2 * Decimal(10) ** (3 - digits)
            total, sums = Decimal(0), []
            for step in steps:
                exponent = -step * rate
                total += (Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()
                sums.append(total)
            low, high = (Decimal(edge) / Decimal(2) ** bits * total for edge in (known, known + 1))
            found = sum(edge <= low for edge in sums)
            starts = found == 0 or sums[found - 1] + error <= low
            if (
                found < len(steps)
                and starts
                and (found == len(steps) - 1 or high <= sums[found] - error)
            ):
                return found
        known, bits, digits = known << 64 | int(source.words(1)[0]), bits + 64, digits + 20


def _exact(values: Integers, make: Any, metric: Any, scale: float, source: Source) -> Integers:
    """Add noise with an exact OpenDP sampler, or from a seeded source with a float one.

    OpenDP ends a sum beyond 64 bits at the last one. That is post-processing, because the sampler
    itself adds the noise: never draw with it on zeros and add what it drew.
    """
    array = _whole(values)
    if array.size == 0:
        return array
    if source.seeded:
        sign = np.where(source.words(array.size) & np.uint64(1) == 1, -1.0, 1.0)
        unit = (
            source.normal(array.size)
            if make is make_gaussian
            else sign * source.exponential(array.size)
        )
        noisy = np.rint(array + (scale * unit).reshape(array.shape))
        return np.clip(noisy, -(2.0**62), 2.0**62).astype(np.int64)
    # OpenDP's integer Laplace takes 64-bit integers; arrays travel as plain lists.
    measurement = make(vector_domain(atom_domain(T="i64")), metric, scale=scale)
    return np.asarray(measurement(array.ravel().tolist()), dtype=np.int64).reshape(array.shape)


def _whole(values: NDArray[Any]) -> Integers:
    given = np.asarray(values)
    if given.size and (given.dtype.kind not in "iu" or given.max() >= 2**63):
        raise SettingsError(
            "Counts must be integers below 2^63: rounded to one, anything else could change by "
            "more than was declared. Nothing was drawn. Count, or scale to whole numbers, before."
        )
    return given.astype(np.int64)


def _require_finite(values: Floats) -> None:
    if not np.isfinite(values).all():
        raise SettingsError(
            "Noise was to be added to values that are not finite. Nothing was drawn."
        )


def clip_rows(X: Any, norm: float) -> Any:
    """Return the rows of a dense or CSR `X` scaled down to at most `norm`; others keep theirs.

    The bound holds over the reals, not just in floating point: a row whose computed length is
    within rounding of `norm` is shrunk too, by a few units in the last place. Clipping twice is
    clipping once.
    """
    X, factors = clip_factors(X, norm)
    return X if factors is None else _scaled(X, factors)


def clip_factors(X: Any, norm: float) -> tuple[Any, Floats | None]:
    """Return what the rows are multiplied by to clip them, or None if by nothing; and the rows.

    They are `X` itself unless squares of their entries would overflow. Their products stay within
    the bound if they are rounded twice, to the precision of `X`.
    """
    if not 1e-150 <= norm <= 1e150:
        raise SettingsError(
            f"The 'norm' of clip_rows must be a number from 1e-150 to 1e150. Got {norm!r} instead."
        )
    norm = float(norm)  # in 32 bits the slack below would be rounded away
    # Lengths are summed in doubles, so only the last roundings are those of the rows' own
    # precision.
    slack = X.shape[1] * 2.0**-52 + 8 * float(np.finfo(X.dtype).eps)
    lengths = _lengths(X)
    if not math.isfinite(lengths.max(initial=0.0)):
        if not np.isfinite(X.data if sparse.issparse(X) else X).all():
            raise SettingsError(
                "Rows that are not finite were to be clipped. Nothing was clipped. Clean them "
                "first."
            )
        # A square overflowed: bring such rows, and only them, to entries <= norm first.
        largest = abs(X).max(axis=1)
        largest = (largest.toarray() if sparse.issparse(largest) else np.asarray(largest)).ravel()
        X = _scaled(X, norm / np.where(np.isfinite(lengths), norm, largest))
        lengths = np.where(np.isfinite(lengths), lengths, _lengths(X))
    long = lengths > norm * (1 - slack)
    if not long.any():
        return X, None
    return X, np.divide(norm * (1 - 2 * slack), lengths, out=np.ones_like(lengths), where=long)


_AT_ONCE = 1 << 15  # numbers, so that they stay in the processor's cache


def _lengths(X: Any) -> Floats:
    with np.errstate(over="ignore"):
        if sparse.issparse(X):
            X = X.astype(np.float64, copy=False)
            return np.asarray(np.sqrt(X.multiply(X).sum(axis=1)), dtype=np.float64).ravel()
        # A record's length may not depend on the table that it stands in, nor on its layout. The
        # squares of a row lie side by side and are added up by a call of their own: sums and
        # products of whole tables choose their order by the number of rows and by buffers.
        n_rows, n_columns = X.shape
        if n_columns == 0:
            return np.zeros(n_rows)
        squares, together = np.empty(n_rows), max(1, _AT_ONCE // n_columns)
        starts = np.arange(0, together * n_columns, n_columns)
        for start in range(0, n_rows, together):
            rows = X[start : start + together]
            each = np.multiply(rows, rows, dtype=np.float64, order="C").ravel()
            np.add.reduceat(each, starts[: len(rows)], out=squares[start : start + together])
        return np.asarray(np.sqrt(squares))


def _scaled(X: Any, factors: Floats) -> Any:
    column = factors.astype(X.dtype)[:, None]
    return sparse.csr_array(X.multiply(column)) if sparse.issparse(X) else X * column
