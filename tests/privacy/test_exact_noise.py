"""Exact noise: doubles decide as infinite precision would, and what they cannot decide, decimals do
with as many bits as it takes.
"""

import decimal
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from consilience.auditing.checks import check_frequencies
from consilience.errors import SettingsError
from consilience.privacy import exact_noise
from consilience.privacy.exact_noise import add_laplace, discrete_gaussian
from consilience.privacy.mechanisms import Source

FALSE_ALARM = 1e-6
LAST = 2**64 - 1


class Given(Source):
    """A source that draws given words after its uniform numbers."""

    def __init__(self, *words):
        super().__init__(0)
        self.given = list(words)

    def words(self, n):
        taken, self.given = self.given[:n], self.given[n:]
        assert len(taken) == n, "more words were drawn than were given"
        return np.array(taken, np.uint64)


@pytest.fixture
def in_decimals(monkeypatch):
    """Return a function after which nothing is left to doubles."""
    return lambda: monkeypatch.setattr(exact_noise, "ERROR", 2.0**60)


@pytest.mark.parametrize("sigma", [0.7, 50.0, 2.0**35 + 0.3])
def test_doubles_and_decimals_draw_the_same_gaussian(sigma, in_decimals):
    fast = discrete_gaussian(300, sigma, Source(3))
    in_decimals()
    np.testing.assert_array_equal(fast, discrete_gaussian(300, sigma, Source(3)))


@pytest.mark.parametrize("scale", [1e-9, 0.3, 7e5])
def test_doubles_and_decimals_draw_the_same_laplace(scale, in_decimals):
    values = np.array([0.0, 1.0, -1.0, 0.1, -1e-7, 123.456, 2.0**-60, -(2.0**70)] * 20)
    fast = add_laplace(values, scale, Source(3))
    in_decimals()
    np.testing.assert_array_equal(fast, add_laplace(values, scale, Source(3)))


def test_the_callers_decimal_settings_do_not_matter(in_decimals):
    in_decimals()
    drawn = discrete_gaussian(20, 9.5, Source(1))
    with decimal.localcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP)):
        np.testing.assert_array_equal(drawn, discrete_gaussian(20, 9.5, Source(1)))


@pytest.mark.parametrize("sigma", [0.5, 3.0, 20.25])
def test_gaussian_numbers_have_their_exact_frequencies(sigma):
    drawn, reach = discrete_gaussian(100_000, sigma, Source()), math.ceil(12 * sigma)
    grid = np.arange(-reach, reach + 1)
    mass = np.exp(-np.square(grid / sigma) / 2)
    counts = np.bincount(drawn + reach, minlength=len(grid))
    assert check_frequencies(counts, mass / mass.sum()).p_value > FALSE_ALARM
    wider = np.exp(-np.square(grid / sigma) / 2.2)
    assert check_frequencies(counts, wider / wider.sum()).p_value < FALSE_ALARM


def test_large_gaussian_numbers_are_normal_and_whole():
    drawn = discrete_gaussian(50_000, 4e10, Source())
    assert drawn.dtype == np.int64
    assert stats.kstest(drawn / 4e10, "norm").pvalue > FALSE_ALARM
    assert stats.kstest(drawn % 1000 / 1000, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("value", [0.0, 0.37, -5.1])
def test_laplace_sums_are_rounded_down_whatever_the_sign_of_the_noise(value, monkeypatch):
    """On a coarse grid: each multiple has the probability of the cell above it."""
    monkeypatch.setattr(exact_noise, "GRID_BITS", 1)  # a grid of 1/2 for a scale of 0.6
    drawn = add_laplace(np.full(100_000, value), 0.6, Source())
    cells = np.arange(-40, 41)
    np.testing.assert_array_equal(drawn * 2, np.rint(drawn * 2))
    edges = stats.laplace(loc=value, scale=0.6).cdf(np.append(cells, 41) / 2)
    counts = np.bincount((drawn * 2).astype(int) + 40, minlength=len(cells))
    assert check_frequencies(counts, np.diff(edges)).p_value > FALSE_ALARM


def test_the_grid_of_a_sum_is_public():
    values = np.random.default_rng(0).normal(size=1000)
    drawn = add_laplace(values, 0.75, Source())
    steps = drawn * 2.0**24
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert np.abs(drawn - values).mean() == pytest.approx(0.75, rel=0.2)


def test_a_sum_that_is_too_large_for_its_grid_is_rounded_once():
    drawn = add_laplace(np.full(4, 2.0**60), 1.0, Source())
    np.testing.assert_array_equal(drawn, np.full(4, 2.0**60))


def cut_cell():
    """Return an offset and a uniform number in the middle of whose cell a floor changes."""
    uniform = float(Source(5).uniform(1)[0])
    offset = 1 + Fraction(mpmath.nstr(mpmath.log(mpmath.mpf(uniform)), 45))
    return offset, uniform


def test_an_undecided_draw_takes_more_bits_of_the_same_number():
    """A larger uniform number is a smaller exponential one, and the middle of the cell decides."""
    with mpmath.workdps(60):
        offset, uniform = cut_cell()
    one = Fraction(1)
    assert exact_noise._decide(offset, one, uniform, Given(0)) == 1
    assert exact_noise._decide(offset, one, uniform, Given(LAST)) == 0
    # The first half of the cell, to the last bit; and only then are more words asked for.
    assert exact_noise._decide(offset, one, uniform, Given(2**63 - 2**20)) == 1
    assert exact_noise._decide(offset, one, uniform, Given(2**63 + 2**20)) == 0
    assert exact_noise._decide(offset, one, uniform, Given(2**63, LAST)) == 0


@pytest.mark.parametrize("scale", [1.0, 2.0**24 - 1, 2.0**40])
def test_rounding_stays_within_half_of_its_bound(scale):
    """The middle of a cell and both of its ends, against 60 digits."""
    uniform = Source(2).uniform(2000)
    uniform = np.concatenate([uniform, 1 - uniform * 2.0**-40, uniform * 2.0**-300])
    _, exponent = np.frexp(uniform)
    scaled = -scale * np.log(uniform)
    with mpmath.workdps(60):
        for u, e, found in zip(uniform, exponent, scaled, strict=True):
            for side in (-1, 1):
                end = mpmath.mpf(float(u)) + side * mpmath.mpf(2) ** (int(e) - 53)
                off = abs(-scale * mpmath.log(end) - mpmath.mpf(float(found)))
                assert off < exact_noise.ERROR / 2 * (1 + scale + float(found))


def test_few_draws_are_left_to_decimals(monkeypatch):
    decided = []
    decide = exact_noise._decide
    monkeypatch.setattr(exact_noise, "_decide", lambda *a: decided.append(a) or decide(*a))
    discrete_gaussian(20_000, 4e10, Source(0))
    assert 0 < len(decided) < 100


WIDE = [2.0**41 + 1, 2.0**63, 2.0**70 + 2.0**20, 2.0**84, exact_noise.MOST_SIGMA]


@pytest.mark.parametrize("sigma", WIDE)
def test_no_draw_ends_at_the_last_number_that_64_bits_hold(sigma):
    """What is cut off before it is added to a sum would show the sum."""
    drawn = discrete_gaussian(2_000, sigma, Source())
    assert len(np.unique(drawn)) == 2_000
    if sigma >= 2.0**66:  # modulo 2^64 it is uniform
        assert stats.kstest(drawn / 2.0**64 + 0.5, "uniform").pvalue > FALSE_ALARM
    low = drawn & (2**30 - 1)
    assert stats.kstest(low / 2**30, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("sigma", [2.0**40 + 0.3, 2.0**62 + 1, 2.0**90])
def test_doubles_and_decimals_draw_the_same_wide_gaussian(sigma, in_decimals):
    fast = discrete_gaussian(200, sigma, Source(3))
    in_decimals()
    np.testing.assert_array_equal(fast, discrete_gaussian(200, sigma, Source(3)))


@pytest.mark.parametrize("sigma", [0.5, 3.0, 20.25])
def test_numbers_in_two_parts_have_their_exact_frequencies(sigma, monkeypatch):
    """Where the lower part matters: with few bits in the upper one."""
    monkeypatch.setattr(exact_noise, "SAFE_BITS", -1)
    drawn, reach = discrete_gaussian(100_000, sigma, Source()), math.ceil(12 * sigma)
    mass = np.exp(-np.square(np.arange(-reach, reach + 1) / sigma) / 2)
    counts = np.bincount(drawn + reach, minlength=len(mass))
    assert check_frequencies(counts, mass / mass.sum()).p_value > FALSE_ALARM


@pytest.mark.parametrize("sigma", [exact_noise.MOST_SIGMA * 1.01, math.inf, math.nan])
def test_noise_that_cannot_be_drawn_is_refused(sigma):
    with pytest.raises(SettingsError, match="grains wide"):
        discrete_gaussian(1, sigma, Source())


def test_a_number_far_beyond_its_noise_is_what_its_sum_is_rounded_to():
    """Its steps on the grid would overflow, and the sum be no number."""
    values = np.array([1e300, -1e300, 1.7e308, 0.0])
    drawn = add_laplace(values, 1e-20, Source())
    np.testing.assert_array_equal(drawn[:3], values[:3])
    assert 0 < abs(drawn[3]) < 1e-17
