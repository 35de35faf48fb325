"""Many selections at once: exact probabilities, decided by 64 bits and, where those are too few, by
more.
"""

import decimal
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from consilience.errors import SettingsError
from consilience.privacy import mechanisms
from consilience.privacy.accounting import Selection
from consilience.privacy.mechanisms import Noise, Source, select_many

FALSE_ALARM = 1e-6
LAST = 2**64 - 1


def event(scale):
    return Selection(
        sensitivity=2.0, scale=scale, monotone="yes", unit="record", neighbours="add-remove"
    )


class Words(Source):
    """A source whose words are given."""

    def __init__(self, *words):
        super().__init__(0)
        self.given = list(words)

    def words(self, n):
        taken, self.given = self.given[:n], self.given[n:]
        assert len(taken) == n, "more words were drawn than were given"
        return np.array(taken, np.uint64)


def by_definition(steps, grain, scale, word):
    """Return the column whose interval holds all of the 64-bit cell, in 60 digits; None where the
    cell is cut.
    """
    with mpmath.workdps(60):
        rate = 1 / (mpmath.mpf(grain) * mpmath.mpf(scale))
        weights = [mpmath.exp(-(step - min(steps)) * rate) for step in steps]
        edges = [mpmath.fsum(weights[: k + 1]) for k in range(len(steps))]
        low, high = (
            mpmath.mpf(edge) / mpmath.mpf(2) ** 64 * edges[-1] for edge in (word, word + 1)
        )
        found, slip = sum(edge <= low for edge in edges), mpmath.mpf(10) ** -50
        starts = found == 0 or edges[found - 1] + slip < low
        return found if starts and (found == len(steps) - 1 or high < edges[found] - slip) else None


tables = st.lists(st.integers(0, 2**20), min_size=1, max_size=12)
words = st.one_of(st.integers(0, LAST), st.sampled_from([0, 1, 2**63 - 1, 2**63, LAST - 1, LAST]))


@settings(max_examples=300, deadline=None)
@given(
    steps=tables,
    grain=st.sampled_from([1, 3, 65536]),
    scale=st.floats(1e-3, 1e6),
    word=words,
    more=words,
)
def test_floating_point_and_decimals_give_the_column_of_the_definition(
    steps, grain, scale, word, more
):
    expected, more = by_definition(steps, grain, scale, word), [more, more, 1, 2**62, 5]
    rate = 1 / (Fraction(grain) * Fraction(scale))
    exactly = mechanisms._select_exactly([s - min(steps) for s in steps], rate, word, Words(*more))
    quickly = select_many(np.array([steps]), grain, event=event(scale), source=Words(word, *more))
    assert quickly.tolist() == [exactly]
    if expected is not None:
        assert exactly == expected


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("scale", [0.05, 1.0, 1e5])
def test_columns_come_with_the_probabilities_of_the_exponential_mechanism(seed, scale):
    row = np.array([7, 0, 65536, 40000, 7, 200_000])
    drawn = select_many(np.tile(row, (40_000, 1)), 65536, event=event(scale), source=Source(seed))
    expected = special.softmax(-row / (65536 * scale)) * len(drawn)
    seen = np.bincount(drawn, minlength=len(row))
    kept = expected > 5
    assert seen[~kept].sum() <= expected[~kept].sum() + 40
    scaled = expected[kept] * seen[kept].sum() / expected[kept].sum()
    assert stats.chisquare(seen[kept], scaled).pvalue > FALSE_ALARM


def test_rows_are_drawn_apart():
    many = select_many(np.zeros((20_000, 2), int), 1, event=event(1.0), source=Source(3))
    pairs = np.bincount(2 * many[::2] + many[1::2], minlength=4)
    assert stats.chisquare(pairs).pvalue > FALSE_ALARM
    mixed = select_many(
        np.array([[0, 10**6], [10**6, 0]] * 50), 1, event=event(1.0), source=Source(3)
    )
    assert mixed.tolist() == [0, 1] * 50


def test_a_seed_changes_where_words_come_from_and_nothing_else():
    steps = np.arange(300).reshape(60, 5)
    one, again = (
        select_many(steps, 4, event=event(1.0), source=Noise(seed=5).open()) for _ in range(2)
    )
    given = select_many(
        steps, 4, event=event(1.0), source=Words(*Noise(seed=5).open().words(60).tolist())
    )
    assert one.tolist() == again.tolist() == given.tolist()


@pytest.mark.parametrize(
    ("given", "column"),
    [
        ((2**63, 0, 0, 1), 1),  # the boundary itself, then a bit above it
        ((2**63 - 1, LAST, LAST, 0), 0),  # as close below it as 192 bits can be
        ((2**63 - 1, LAST, LAST - 1), 0),
        ((0,), 0),
        ((LAST,), 1),
    ],
)
def test_draws_on_a_boundary_take_as_many_words_as_they_need_and_no_more(given, column):
    source = Words(*given)
    assert select_many(np.array([[5, 5]]), 1, event=event(1.0), source=source).tolist() == [column]
    assert source.given == []


def test_certain_draws_take_one_word_and_no_decimals(monkeypatch):
    monkeypatch.setattr(
        mechanisms, "_select_exactly", lambda *_: pytest.fail("decimals for a certain draw")
    )
    for word in (1, 2**40, 2**62, 2**63 + 2**30):
        select_many(np.zeros((1, 3), int), 1, event=event(1.0), source=Words(word))


def test_decimals_alone_have_the_same_probabilities(monkeypatch):
    """Every draw is forced into doubt: the answers stay the same, word for word."""
    steps = Noise(seed=1).open().words(400 * 6).reshape(400, 6) % np.uint64(3000)
    quickly = select_many(steps, 1000, event=event(0.5), source=Source(9))
    calls, exactly = [], mechanisms._select_exactly
    monkeypatch.setattr(
        mechanisms, "_select_exactly", lambda *args: calls.append(1) or exactly(*args)
    )
    monkeypatch.setattr(mechanisms.np, "cumsum", lambda table, axis: np.full(table.shape, np.nan))
    slowly = select_many(steps, 1000, event=event(0.5), source=Source(9))
    assert len(calls) == 400
    assert slowly.tolist() == quickly.tolist()


def test_decimals_heed_no_setting_of_the_caller():
    with decimal.localcontext() as context:
        context.prec, context.rounding, context.Emin = 2, decimal.ROUND_UP, -5
        context.traps[decimal.Inexact] = True
        assert select_many(
            np.array([[0, 3, 1]]), 1, event=event(1.0), source=Words(LAST)
        ).tolist() == [2]
        assert select_many(
            np.array([[5, 5]]), 1, event=event(1.0), source=Words(2**63, 7)
        ).tolist() == [1]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
def test_every_whole_number_is_far_enough_from_every_other(dtype):
    ends = np.iinfo(dtype)
    for row, best in (
        ([ends.min, ends.max], 0),
        ([ends.max, ends.min], 1),
        ([ends.max, ends.max - 1, ends.max], 1),
    ):
        table = np.array([row] * 50, dtype=dtype)
        assert select_many(table, 1, event=event(1e-3), source=Source(1)).tolist() == [best] * 50


def test_a_thousandth_of_a_step_at_the_end_of_the_range_is_not_lost():
    # 2^63 - 2 and 2^63 - 1 round to the same double; their weights at this scale differ by a factor
    # of e.
    table = np.array([[2**63 - 1, 2**63 - 2]] * 20_000)
    seen = select_many(table, 1, event=event(1.0), source=Source(2)).mean()
    assert abs(seen - special.expit(1.0)) < 5 * 0.5 / math.sqrt(20_000)


@pytest.mark.parametrize(
    ("scale", "columns"), [(1e-300, {1}), (5e-324, {1}), (1e300, {0, 1, 2}), (1e-9, {1})]
)
def test_the_smallest_and_largest_scales_pick_the_best_or_anything(scale, columns):
    drawn = select_many(
        np.tile([[9, 3, 10**15]], (300, 1)), 65536, event=event(scale), source=Source(4)
    )
    assert set(drawn.tolist()) == columns


@pytest.mark.parametrize("n", [1, 2, 300, 5000])
def test_rounding_stays_within_the_bound_of_the_proof(n):
    """Sums and targets of floating point, against 50 digits: off by at most (n + 3 ln n + 10)·2⁻⁵²
    of the whole.
    """
    source = Noise(seed=n).open()
    for spread in (0.01, 5.0, 900.0):
        steps = np.floor(source.uniform(n) * spread * 1e6).astype(np.int64)
        steps -= steps.min()
        scale = 1e6 / 3
        sums = np.cumsum(np.exp(-(steps / (3 * scale))))
        with mpmath.workdps(50):
            weights = [
                mpmath.exp(-mpmath.mpf(int(step)) / (3 * mpmath.mpf(scale))) for step in steps
            ]
            edge, worst = mpmath.mpf(0), 0.0
            for weight, found in zip(weights, sums.tolist(), strict=True):
                edge += weight
                worst = max(worst, abs(float((mpmath.mpf(found) - edge) * 2**52)))
        assert worst / sums[-1] <= (n + 3 * math.log(n) + 8) / 2


@pytest.mark.parametrize(
    "table",
    [
        np.zeros(3, int),
        np.zeros((2, 0), int),
        np.zeros((2, 2)),
        np.array([[True]]),
        [["a"]],
        [[0.5]],
    ],
)
def test_what_is_not_a_table_of_whole_steps_is_refused(table):
    with pytest.raises(SettingsError, match="whole steps"):
        select_many(table, 1, event=event(1.0), source=Words())


def test_no_rows_need_no_draws():
    assert select_many(np.zeros((0, 3), int), 1, event=event(1.0), source=Words()).shape == (0,)


@settings(max_examples=100, deadline=None)
@given(steps=tables, data=st.data(), scale=st.floats(0.1, 100))
def test_an_arrival_that_moves_all_steps_one_way_costs_epsilon(steps, data, scale):
    moves = [data.draw(st.integers(0, 2 * 100)) for _ in steps]
    one = special.log_softmax(-np.array(steps) / (100 * scale))
    other = special.log_softmax(-(np.array(steps) + moves) / (100 * scale))
    assert np.abs(one - other).max() <= event(scale).epsilon * (1 + 1e-9) + 1e-12
