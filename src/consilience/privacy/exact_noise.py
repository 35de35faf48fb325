"""Exact Laplace and Gaussian noise, many numbers at once.

Everything is a comparison with exponential numbers over the reals, of which a source has drawn the
first 51 bits. Doubles settle a comparison wherever their error cannot matter. In the rare other
case more bits are drawn, and decimal numbers of as many digits as it takes settle it. So what is
drawn has exactly the law that is stated, whatever doubles can hold. Proof:
docs/guarantees/exact-noise.md.
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, localcontext
from fractions import Fraction
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from consilience.errors import SettingsError

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

# Relative to 1 + E. What the bits not yet drawn, a logarithm within 4 units in the last place and
# the operations after it can move an exponential number E by is less than half of this.
ERROR = 2.0**-48
GRID_BITS = 24  # of a Laplace scale, to which a sum is rounded
SAFE_BITS = 40  # of a sigma up to which a double holds whatever number is drawn
MOST_SIGMA = 2.0 ** (SAFE_BITS + 63)  # of wider noise the lowest bits are drawn apart: one word


class Bits(Protocol):
    """Where noise comes from; `consilience.privacy.mechanisms.Source` is one."""

    def words(self, n: int) -> Words:
        """Draw n independent 64-bit words."""

    def uniform(self, n: int) -> Floats:
        """Draw the middles of n cells of uniform numbers: the exponent and 51 more bits."""


def add_laplace(values: Floats, scale: float, bits: Bits) -> Floats:
    """Return `values` plus Laplace noise over the reals, the sum rounded down to a public grid.

    The grid is a power of two, about 2^-24 of `scale`. A result that is too large for it is rounded
    once more to a double: both are functions of the exact sum.
    """
    grid = math.ldexp(1.0, max(math.frexp(scale)[1] - GRID_BITS, -1022))
    with np.errstate(over="ignore"):
        steps = values / grid
    # Numbers so large that their steps overflow are what a sum with any noise is rounded to.
    far = np.isinf(steps)
    steps[far] = 0.0
    signs, whole = _signs(values.size, bits), np.rint(steps)  # what is left of the steps is exact
    sizes = _floors(signs * (steps - whole), scale / grid, bits)
    # The negative of a number that was rounded down was rounded up, one step too high.
    found = whole + np.where(signs > 0, sizes, -sizes - 1)
    return np.where(far, values, found * grid)


def discrete_gaussian(n: int, sigma: float, bits: Bits) -> Integers:
    """Draw n whole numbers of mass ∝ exp(-j²/(2·sigma²)), modulo 2^64.

    A discrete Laplace number ±k of scale sigma is kept with probability exp(-(k/sigma - 1)²/2)
    (Canonne, Kamath & Steinke 2020, with exponential numbers in place of coin flips). Where k may
    be too large for a double, it is q·2^m + r, and r is drawn apart. Nothing is cut off: numbers
    beyond 64 bits wrap around, as sums do that they are added to.
    """
    require_drawable(sigma)
    m = max(0, math.frexp(sigma)[1] - SAFE_BITS)
    scale = math.ldexp(sigma, -m)
    kept: list[Words] = []
    missing = n
    while missing > 0:
        tried = missing * 4 // 3 + 32  # 0.76 are kept
        signs, sizes = _signs(tried, bits), _floors(np.zeros(tried), scale, bits)
        low = bits.words(tried) >> np.uint64(64 - m) if m else np.zeros(tried, np.uint64)
        good = _exceeds(sizes, low, m, sigma, bits)
        good &= (sizes > 0) | (low > 0) | (signs > 0)  # there is only one zero
        whole = (sizes.astype(np.uint64) << np.uint64(m)) + low
        kept.append(np.where(signs > 0, whole, -whole)[good])
        missing -= len(kept[-1])
    return np.concatenate([np.zeros(0, np.uint64), *kept])[:n].view(np.int64)


def require_drawable(sigma: float) -> None:
    """Refuse Gaussian noise that is wider than any that can be drawn, best before a charge."""
    if not 0 < sigma <= MOST_SIGMA:
        raise SettingsError(
            f"Exact noise is at most {MOST_SIGMA:g} grains wide. Got {sigma:g} instead. Nothing "
            "was drawn. Ask for a larger epsilon or delta, or count fewer records of a person."
        )


def _signs(n: int, bits: Bits) -> Floats:
    flips = np.unpackbits(bits.words(-(-n // 64)).view(np.uint8), count=n)
    return np.where(flips == 1, -1.0, 1.0)


def _floors(offsets: Floats, scale: float, bits: Bits) -> Floats:
    """Return ⌊offset + scale·E⌋ of new exponential numbers E, for offsets in [-1, 1]."""
    uniform = bits.uniform(offsets.size)
    scaled = -scale * np.log(uniform)
    at = offsets + scaled
    found = np.floor(at)
    error = ERROR * (1 + scale + scaled)
    for index in np.flatnonzero(np.minimum(at - found, found + 1 - at) <= error):
        found[index] = _decide(
            Fraction(float(offsets[index])), Fraction(scale), float(uniform[index]), bits
        )
    return found


def _exceeds(sizes: Floats, low: Words, m: int, sigma: float, bits: Bits) -> NDArray[np.bool_]:
    """Tell which of new exponential numbers exceed (k/sigma - 1)²/2 + r/sigma, k = size·2^m + r.

    The second term makes a uniform r one of a discrete Laplace number.
    """
    scale, rest = math.ldexp(sigma, -m), np.ldexp(low.astype(np.float64), -m)
    limits = np.square((sizes + rest) / scale - 1) / 2 + rest / scale
    uniform = bits.uniform(sizes.size)
    beyond = -np.log(uniform) - limits
    for index in np.flatnonzero(np.abs(beyond) <= ERROR * (1 + limits)):
        r = int(low[index])
        k = (int(sizes[index]) << m) + r
        limit = (k / Fraction(sigma) - 1) ** 2 / 2 + r / Fraction(sigma)
        beyond[index] = _decide(-limit, Fraction(1), float(uniform[index]), bits)
    return np.asarray(beyond >= 0)


def _decide(offset: Fraction, scale: Fraction, uniform: float, bits: Bits) -> int:
    """Return ⌊offset + scale·E⌋, E = -ln U and U in the cell whose middle is `uniform`."""
    mantissa, exponent = math.frexp(uniform)
    # U is between known and known + 1 steps of 2^-drawn.
    known, drawn, digits = int(math.ldexp(mantissa, 53)) >> 1, 52 - exponent, 60
    while True:
        exact = Context(
            prec=digits, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[]
        )
        with localcontext(exact):  # whatever the caller set up
            ends = [
                _ratio(offset) - _ratio(scale) * (Decimal(edge) / Decimal(2) ** drawn).ln()
                for edge in (known + 1, known)
            ]
            # Fewer than ten roundings, of numbers no larger than this.
            size = 2 + abs(_ratio(offset)) + _ratio(scale) + abs(ends[1] - _ratio(offset))
            error = size * Decimal(10) ** (2 - digits)
            low, high = math.floor(ends[0] - error), math.floor(ends[1] + error)
        if low == high:
            return low
        known, drawn, digits = known << 64 | int(bits.words(1)[0]), drawn + 64, digits + 25


def _ratio(number: Fraction) -> Decimal:
    return Decimal(number.numerator) / Decimal(number.denominator)
