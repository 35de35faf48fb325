"""Noise: where it comes from, how it is distributed, and that what is charged is what is drawn.

Distributions are compared at a false-alarm rate of 1e-6 a test. Sources without a seed are used
where only they run the exact samplers; audit.py's tests go deeper.
"""

import copy
import math
import os
import pickle
import warnings
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse, special, stats

from consilience.errors import ConsilienceError, SettingsError
from consilience.privacy.accounting import (
    Closing,
    DiscreteGaussian,
    Gaussian,
    L2Laplace,
    Laplace,
    ObjectiveL2Laplace,
    Selection,
)
from consilience.privacy.mechanisms import (
    Noise,
    Source,
    clip_rows,
    close,
    draw_error,
    gaussian,
    gaussian_counts,
    l2_laplace,
    laplace_counts,
    select,
)

WHO = {"unit": "record", "neighbours": "add-remove"}
FALSE_ALARM = 1e-6
SOURCES = [None, 20260]  # the operating system, and a seed


def agrees(frequencies, probabilities):
    """Chi-squared test of counts, cells with few expected ones pooled."""
    frequencies, expected = np.asarray(frequencies), np.asarray(probabilities) * np.sum(frequencies)
    few = expected < 10
    frequencies = np.append(frequencies[~few], frequencies[few].sum())
    expected = np.append(expected[~few], max(expected[few].sum(), 1e-9))
    kept = expected > 5
    scale = frequencies[kept].sum() / expected[kept].sum()
    return stats.chisquare(frequencies[kept], expected[kept] * scale).pvalue > FALSE_ALARM


# ------------------------------------------------------------------------------------------- source


class Words(Source):
    """A source whose words are given, last one repeated."""

    def __init__(self, *words):
        super().__init__(0)
        self.given = list(words)

    def words(self, n):
        taken = [self.given.pop(0) if len(self.given) > 1 else self.given[0] for _ in range(n)]
        return np.array(taken, np.uint64)


@pytest.mark.parametrize("seed", [0, 5, 2**256 - 1, int.from_bytes(bytes(range(32)), "little")])
def test_words_are_the_chacha20_key_stream(seed):
    cipher = Cipher(algorithms.ChaCha20(seed.to_bytes(32, "little"), bytes(16)), None).encryptor()
    assert np.array_equal(Source(seed).words(40), np.frombuffer(cipher.update(bytes(320)), "<u8"))


def test_a_seed_repeats_and_streams_differ():
    streams = [Noise(seed=3).open(stream=number).words(4) for number in [*range(40), 2**40, 2**63]]
    assert np.array_equal(streams[7], Noise(seed=3).open(stream=7).words(4))
    assert len({stream.tobytes() for stream in streams}) == len(streams)


def test_two_sources_without_a_seed_differ_and_are_not_marked_seeded():
    one, other = Noise().open(), Noise().open()
    assert not one.seeded
    assert not np.array_equal(one.words(4), other.words(4))
    assert Noise(seed=0).open().seeded


def test_noise_is_a_plain_value():
    assert Noise(seed=np.int64(4)) == Noise(seed=4)
    assert pickle.loads(pickle.dumps(Noise(seed=4))) == copy.deepcopy(Noise(seed=4))


@pytest.mark.parametrize("seed", [-1, 2**256, 1.5, "1"])
def test_a_seed_is_a_number_a_key_can_hold(seed):
    with pytest.raises(SettingsError, match="seed"):
        Noise(seed=seed)


@pytest.mark.parametrize("spread", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("seed", SOURCES)
def test_a_source_is_never_copied_or_sent(spread, seed):
    with pytest.raises(ConsilienceError, match="copied or sent"):
        spread(Source(seed))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_source_is_refused_after_a_fork():
    source = Source()
    source.words(1)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # threads may be running; the child only writes and exits
        child = os.fork()
    if child == 0:  # pragma: no cover - coverage does not follow a fork
        try:
            source.words(1)
            os.write(write, b"drawn")
        except ConsilienceError:
            os.write(write, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"refused"
    assert source.words(1).size == 1


def test_a_source_belongs_to_the_process_that_opened_it(monkeypatch):
    source = Source()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for draw in (
        source.words,
        source.uniform,
        source.normal,
        source.exponential,
        source.permutation,
    ):
        with pytest.raises(ConsilienceError, match="after a fork"):
            draw(3)


# --------------------------------------------------------------------------------- continuous draws


@pytest.mark.statistical
@pytest.mark.parametrize("seed", SOURCES)
@pytest.mark.parametrize(
    ("draw", "distribution"),
    [("uniform", stats.uniform), ("exponential", stats.expon), ("normal", stats.norm)],
)
def test_elementary_draws_have_their_distribution(draw, distribution, seed):
    values = getattr(Source(seed), draw)(50_001)
    assert values.shape == (50_001,)
    assert stats.kstest(values, distribution.cdf).pvalue > FALSE_ALARM
    if draw == "uniform":
        # Low and high bits, and how far they reach towards zero: -log2 is exponential all the way
        # down.
        assert stats.kstest(-np.log(values), stats.expon.cdf).pvalue > FALSE_ALARM
        assert stats.kstest((values * 2**30) % 1, stats.uniform.cdf).pvalue > FALSE_ALARM


def test_a_uniform_is_never_zero_or_one():
    everything = 2**64 - 1
    assert 0 < Words(everything).uniform(1)[0] < 1
    assert 0 < Words(0, 0, 1 << 11, 0).uniform(1)[0] < 1e-40
    # The mantissa is the middle of its cell, so nothing is rounded up to a power of two.
    assert Words(everything, 0).uniform(1)[0] > 0.5


def test_a_uniform_keeps_full_precision_near_zero():
    # 150 leading zero bits, then fraction bits of their own.
    value = Words(0, 0, 1 << 20, 0x123456789ABCDEF0).uniform(1)[0]
    assert 2.0**-151 < value < 2.0**-148
    mantissa, _ = math.frexp(value)
    assert (mantissa * 2**52) % 1 != 0 or (mantissa * 2**40) % 1 != 0


@settings(max_examples=50)
@given(bits=st.integers(0, 2**64 - 1))
def test_a_uniform_does_not_lose_its_last_bit_to_rounding(bits):
    value = Words(2**64 - 1, bits).uniform(1)[0]
    # An odd multiple of 2^-53: the exact middle of one of 2^51 cells between 1/2 and 1.
    assert (Fraction(value) * 2**53) % 2 == 1
    assert abs(Fraction(value) - Fraction(1, 2) - Fraction(bits, 2**65)) <= Fraction(1, 2**53)


def test_exponentials_reach_both_ends():
    # First word: leading zeros of U. Then its fraction, then which half.
    tiny, huge = (Words(0, 1 << 11, 5, half).exponential(1)[0] for half in (0, 1))
    assert 0 < tiny < 1e-30
    assert huge > 70
    assert tiny == pytest.approx(math.exp(-huge), rel=1e-12)


@pytest.mark.statistical
def test_a_permutation_is_uniform():
    source = Source(1)
    orders = Counter(tuple(source.permutation(3).tolist()) for _ in range(6000))
    assert len(orders) == 6
    assert agrees(list(orders.values()), np.full(6, 1 / 6))
    assert np.array_equal(np.sort(source.permutation(1000)), np.arange(1000))


def test_a_tie_is_drawn_again():
    assert np.array_equal(Words(7, 7, 9, 3, 5).permutation(2), [1, 0])


@pytest.mark.statistical
@pytest.mark.parametrize("dimension", [1, 2, 7])
def test_l2_laplace_has_a_gamma_radius_and_a_uniform_direction(dimension):
    event, source = L2Laplace(sensitivity=1.0, scale=2.5, **WHO), Source(dimension)
    draws = np.array([l2_laplace(dimension, event=event, source=source) for _ in range(8000)])
    radius = np.linalg.norm(draws, axis=1)
    assert stats.kstest(radius, stats.gamma(dimension, scale=2.5).cdf).pvalue > FALSE_ALARM
    # Each coordinate of a uniform direction: (1+u)/2 is Beta((d-1)/2, (d-1)/2).
    for column in (draws / radius[:, None]).T:
        if dimension == 1:
            assert stats.binomtest(int((column > 0).sum()), 8000).pvalue > FALSE_ALARM
        else:
            shape = (dimension - 1) / 2
            assert stats.kstest((1 + column) / 2, stats.beta(shape, shape).cdf).pvalue > FALSE_ALARM
    for wrong in (0.9, 1.1):  # the test has power
        assert (
            stats.kstest(radius * wrong, stats.gamma(dimension, scale=2.5).cdf).pvalue < FALSE_ALARM
        )


@pytest.mark.statistical
def test_gaussian_vectors_have_the_sigma_of_their_event():
    event = Gaussian(sensitivity=1.0, sigma=3.0, at_delta=1e-5, **WHO)
    draws = gaussian(20_000, event=event, source=Source(2))
    assert stats.kstest(draws, stats.norm(scale=3.0).cdf).pvalue > FALSE_ALARM
    for wrong in (0.9, 1.1):
        assert stats.kstest(draws * wrong, stats.norm(scale=3.0).cdf).pvalue < FALSE_ALARM


def test_no_dimension_no_noise():
    assert l2_laplace(
        0, event=L2Laplace(sensitivity=1.0, scale=1.0, **WHO), source=Source()
    ).shape == (0,)
    assert gaussian(
        0, event=Gaussian(sensitivity=1.0, sigma=1.0, at_delta=0.1, **WHO), source=Source()
    ).shape == (0,)


def test_objective_noise_is_drawn_at_the_scale_of_its_event():
    facts = {"loss": "logistic", "n_classes": 2, "curvature": 0.25, "lipschitz": 1.0}
    event = ObjectiveL2Laplace(strong_convexity=1.0, records_per_unit=1, scale=2.0, **facts, **WHO)
    plain = L2Laplace(sensitivity=1.0, scale=2.0, **WHO)
    assert np.array_equal(
        l2_laplace(3, event=event, source=Source(1)), l2_laplace(3, event=plain, source=Source(1))
    )


@pytest.mark.parametrize("dimension", [1, 3, 50, 2000])
def test_a_drawn_vector_is_within_draw_error_of_the_exact_one(dimension):
    # The same words through extended precision: the exact draw, as far as 64 bits tell.
    scale = 3.7
    drawn = l2_laplace(
        dimension, event=L2Laplace(sensitivity=1.0, scale=scale, **WHO), source=Source(9)
    )
    source, wide = Source(9), np.longdouble

    def exponential(n):
        half = source.uniform(n).astype(wide) / 2
        return np.where(
            (source.words(n) & np.uint64(1)).astype(bool), -np.log(half), -np.log1p(-half)
        )

    pairs = (dimension + 1) // 2
    radius = np.sqrt(2 * exponential(pairs))
    angle = source.uniform(pairs).astype(wide) * (wide(np.pi) + wide(1.2246467991473532e-16)) / 4
    octant = source.words(pairs)
    swap, left, down = ((octant >> np.uint64(bit)) & np.uint64(1) == 1 for bit in range(3))
    a, b = radius * np.cos(angle), radius * np.sin(angle)
    x, y = np.where(swap, b, a), np.where(swap, a, b)
    direction = np.concatenate([np.where(left, -x, x), np.where(down, -y, y)])[:dimension]
    exact = direction * (wide(scale) * exponential(dimension).sum() / np.sqrt(np.sum(direction**2)))
    error = np.sqrt(np.sum((drawn - exact) ** 2)) / np.sqrt(np.sum(exact**2))
    assert error <= draw_error(dimension)


# ----------------------------------------------------------------------------- counts and selection


@pytest.mark.statistical
@pytest.mark.parametrize("seed", SOURCES)
def test_counts_get_discrete_laplace_noise(seed):
    event = Laplace(sensitivity=1, scale=1.7, **WHO)
    noisy = laplace_counts(np.full((100, 120), 40), event=event, source=Source(seed)) - 40
    assert noisy.shape == (100, 120)
    assert noisy.dtype == np.int64
    if seed is None:
        grid = np.arange(-30, 31)
        assert agrees([(noisy == k).sum() for k in grid], stats.dlaplace(1 / 1.7).pmf(grid))
    else:
        assert np.std(noisy) == pytest.approx(1.7 * math.sqrt(2), rel=0.05)


@pytest.mark.statistical
@pytest.mark.parametrize("seed", SOURCES)
def test_counts_get_discrete_gaussian_noise(seed):
    event = DiscreteGaussian(sensitivity=1, sigma=2.2, at_delta=1e-5, **WHO)
    noisy = gaussian_counts(np.full(12_000, -7), event=event, source=Source(seed)) + 7
    assert noisy.dtype == np.int64
    if seed is None:
        grid = np.arange(-30, 31)
        weights = np.exp(-(grid**2) / (2 * 2.2**2))
        assert agrees([(noisy == k).sum() for k in grid], weights / weights.sum())
    else:
        assert np.std(noisy) == pytest.approx(2.2, rel=0.05)


@pytest.mark.statistical
@pytest.mark.parametrize("seed", SOURCES)
def test_closing_noise_is_laplace_in_every_coordinate(seed):
    event = Closing(dimension=12_000, distance=1e-8, scale=1e-6, **WHO)
    vector = Source(4).normal(12_000)
    closed = close(vector.reshape(3, -1), event=event, source=Source(seed))
    assert closed.shape == (3, 4000)
    assert closed.dtype == np.float64
    noise = closed.ravel() - vector
    assert stats.kstest(noise, stats.laplace(scale=1e-6).cdf).pvalue > FALSE_ALARM
    assert stats.kstest(1.3 * noise, stats.laplace(scale=1e-6).cdf).pvalue < FALSE_ALARM


@pytest.mark.statistical
@pytest.mark.parametrize("seed", SOURCES)
@pytest.mark.parametrize("monotone", ["yes", "no"])
def test_selection_is_the_exponential_mechanism(seed, monotone):
    event = Selection(
        sensitivity=1.0, scale=2.0, monotone=monotone, unit="record", neighbours="add-remove"
    )
    scores, source = np.array([0.0, 1.0, 3.0, -2.0]), Source(seed)
    picked = Counter(select(scores, event=event, source=source) for _ in range(3000))
    assert agrees([picked[i] for i in range(4)], special.softmax(scores / 2.0))


def test_no_counts_no_noise():
    event = Laplace(sensitivity=1, scale=1.0, **WHO)
    assert laplace_counts(np.zeros((0, 3), np.int64), event=event, source=Source()).shape == (0, 3)


@pytest.mark.parametrize("seed", SOURCES)
@pytest.mark.parametrize("scores", [[], [[1.0]], [math.nan, 1.0], [math.inf, 1.0]])
def test_selection_among_nothing_is_refused(scores, seed):
    event = Selection(sensitivity=1.0, scale=1.0, monotone="no", **WHO)
    with pytest.raises(SettingsError, match="finite scores"):
        select(np.array(scores), event=event, source=Source(seed))


@pytest.mark.parametrize("seed", SOURCES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_closing_refuses_what_is_not_finite(value, seed):
    event = Closing(dimension=2, distance=1e-8, scale=1e-6, **WHO)
    with pytest.raises(SettingsError, match="not finite"):
        close(np.array([0.0, value]), event=event, source=Source(seed))


@pytest.mark.parametrize(
    "counts", [[2.7], [2.0], [math.nan], ["2"], [True], np.array([2**64 - 1], np.uint64)]
)
def test_counts_are_integers(counts):
    # A fraction cut off could turn a change of 0.1 into one of 1; a number beyond 2^63 would wrap.
    with pytest.raises(SettingsError, match="integers"):
        laplace_counts(
            np.array(counts), event=Laplace(sensitivity=1, scale=1.0, **WHO), source=Source()
        )
    with pytest.raises(SettingsError, match="integers"):
        gaussian_counts(
            np.array(counts),
            event=DiscreteGaussian(sensitivity=1, sigma=1.0, at_delta=0.1, **WHO),
            source=Source(1),
        )


def test_counts_at_the_edge_of_their_range_saturate():
    event = Laplace(sensitivity=1, scale=5.0, **WHO)
    edge = np.iinfo(np.int64).max
    noisy = laplace_counts(np.full(200, edge), event=event, source=Source())
    assert (noisy > edge - 1000).all()


# ----------------------------------------------------------------------------------------- clipping


def exact_square(row):
    return sum(Fraction(float(value)) ** 2 for value in row)


def as_dense(X):
    return X.toarray() if sparse.issparse(X) else X


ROWS = st.sampled_from([np.float64, np.float32]).flatmap(
    lambda dtype: hnp.arrays(
        dtype,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-4, 4, width=32)
        | st.sampled_from([0.0, 1.0, 0.5, 0.6, 0.8, 1e-30, 1e18]),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    X=ROWS,
    norm=st.sampled_from([1.0, 0.1, 3.0]),
    shape=st.sampled_from([np.asarray, np.asfortranarray, sparse.csr_array]),
)
def test_clipping_bounds_the_norm_over_the_reals_never_lengthens_and_is_idempotent(X, norm, shape):
    given_ = shape(X)
    once = clip_rows(given_, norm)
    twice = as_dense(clip_rows(once, norm))
    assert once.dtype == X.dtype
    once = as_dense(once)
    assert np.array_equal(once, twice)
    assert (np.abs(once) <= np.abs(X)).all()
    for before, after in zip(X, once, strict=True):
        assert exact_square(after) <= Fraction(norm) ** 2
        if exact_square(before) <= Fraction(norm * 0.999) ** 2:
            assert np.array_equal(before, after)
        else:
            assert exact_square(after) >= Fraction(norm * 0.998) ** 2


@pytest.mark.parametrize("norm", [1e-3, 0.1, 1.0, 3.0, 1e4])
@pytest.mark.parametrize("shape", [np.asarray, np.asfortranarray, sparse.csr_array])
def test_one_row_beyond_the_norm_is_noticed_among_any_others(shape, norm):
    direction = np.array([0.6, 0.0, -0.8])
    for length in (0.5, 0.999, 1.001, 1.5, 3.0, 30.0, 1e3):
        X = np.outer([0.1, length, 0.0], direction) * norm
        clipped = as_dense(clip_rows(shape(X), norm))
        np.testing.assert_allclose(clipped[1], min(length, 1.0) * norm * direction, rtol=1e-12)
        assert np.array_equal(clipped[[0, 2]], X[[0, 2]])


@pytest.mark.parametrize("n_features", [1, 7, 37, 300])
def test_a_row_is_clipped_alike_wherever_it_stands(n_features):
    X = np.random.default_rng(6).normal(size=(41, n_features))
    X /= np.linalg.norm(X, axis=1, keepdims=True) * np.linspace(0.5, 1.5, 41)[:, None]
    by_feature = np.asfortranarray(X)  # slices of which lie feature by feature too
    whole = clip_rows(by_feature, 1.0)
    for n_records in (1, 2, 9):
        for place in range(41 - n_records):
            part = slice(place, place + n_records)
            assert np.array_equal(clip_rows(by_feature[part], 1.0), whole[part])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [np.asarray, np.asfortranarray, sparse.csr_array])
def test_rows_a_hair_around_the_norm_end_below_it(shape, dtype):
    rng = np.random.default_rng(5)
    X = rng.normal(size=(400, 37))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    X = (X * (1 + np.linspace(-30, 30, 400)[:, None] * np.finfo(dtype).eps)).astype(dtype)
    clipped = as_dense(clip_rows(shape(X), 1.0))
    assert all(exact_square(row) <= 1 for row in clipped)
    assert np.abs(clipped - X).max() < 200 * np.finfo(dtype).eps


@pytest.mark.parametrize("shape", [np.asarray, np.asfortranarray, sparse.csr_array])
def test_rows_whose_squares_overflow_keep_their_direction(shape):
    clipped = as_dense(clip_rows(shape(np.array([[3e200, 4e200], [0.1, 0.1], [0.0, 0.0]])), 1.0))
    assert clipped[0] == pytest.approx([0.6, 0.8], rel=1e-12)
    assert exact_square(clipped[0]) <= 1
    assert np.array_equal(clipped[1:], [[0.1, 0.1], [0.0, 0.0]])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_wide_sparse_rows_keep_their_sign_and_nearly_their_length(dtype):
    X = sparse.csr_array((np.array([0.5, 2.0], dtype), ([0, 1], [0, 5])), shape=(2, 2**22))
    assert clip_rows(X, 1.0).data == pytest.approx([0.5, 1.0], rel=1e-4)


def test_what_is_short_comes_back_itself():
    X = np.full((3, 2), 0.1)
    assert clip_rows(X, 1.0) is X
    assert clip_rows(np.zeros((0, 3)), 1.0).shape == (0, 3)
    assert clip_rows(np.zeros((2, 0)), 1.0).shape == (2, 0)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf, 1e-200])
def test_a_norm_that_bounds_nothing_is_refused(norm):
    with pytest.raises(SettingsError, match="norm"):
        clip_rows(np.ones((2, 2)), norm)


@pytest.mark.parametrize("shape", [np.asarray, np.asfortranarray, sparse.csr_array])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_refused(shape, value):
    with pytest.raises(SettingsError, match="not finite"):
        clip_rows(shape(np.array([[value, 1.0]])), 1.0)


@pytest.mark.parametrize("n_features", [3, 7, 64, 129])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_row_is_clipped_alike_in_every_table_and_every_layout(n_features, dtype):
    X = (Noise(seed=1).open().normal(40 * n_features).reshape(40, n_features) * 5).astype(dtype)
    whole = clip_rows(X, 1.0)
    assert (np.linalg.norm(whole, axis=1) <= 1).all()
    assert np.array_equal(clip_rows(np.asfortranarray(X), 1.0), whole)
    assert np.array_equal(clip_rows(np.repeat(X, 2, axis=1)[:, ::2], 1.0), whole)
    for row in range(len(X)):
        for layout in (np.ascontiguousarray, np.asfortranarray):
            alone = clip_rows(layout(X[row : row + 1].copy()), 1.0)
            assert np.array_equal(alone, whole[row : row + 1])
            two = clip_rows(layout(X[[row, 0]]), 1.0)
            assert np.array_equal(two[:1], whole[row : row + 1])


@pytest.mark.parametrize("n_columns", [1, 7, 8_191, 8_192, 8_193, 20_000])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_rows_length_depends_on_no_limit_of_a_library(n_columns, dtype):
    """From 8,193 columns on, a single row was summed in another order than several."""
    rows = np.random.default_rng(0).normal(size=(9, n_columns)).astype(dtype)
    rows *= dtype(1 / math.sqrt(n_columns))
    whole, many = clip_rows(rows, 1.0), 4_097 if n_columns < 10 else 17
    for layout in (np.ascontiguousarray, np.asfortranarray):
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(clip_rows(layout(row[None]), 1.0)[0], whole[i])
        crowd = clip_rows(layout(np.resize(rows, (many, n_columns))), 1.0)
        np.testing.assert_array_equal(crowd, np.resize(whole, (many, n_columns)))


def test_rows_without_columns_have_no_length():
    assert clip_rows(np.zeros((3, 0)), 1.0).shape == (3, 0)
