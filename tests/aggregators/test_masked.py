import numpy as np
import pytest

from consilience.aggregators.accuracy import private_accuracy
from consilience.aggregators.masked import MaskedSum, add_up
from consilience.auditing.checks import check_frequencies
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.linear import PrivateLogisticRegression


def messages(numbers, kind=MaskedSum, grain=1):
    """Run the protocol among sites and return what the hub receives."""
    sites = [
        kind(site, n_sites=len(numbers), length=len(numbers[0]), grain=grain)
        for site in range(len(numbers))
    ]
    for one in sites:
        for other, mask in one.to_send.items():
            sites[other].receive(one.site, mask)
    return {one.site: one.hide(held) for one, held in zip(sites, numbers, strict=True)}


NUMBERS = [[160, -3], [2000, 1500], [11000, 9000], [1, 0]]


def test_totals_are_exact():
    assert add_up(messages(NUMBERS), n_sites=4).tolist() == [13161, 10497]
    rng = np.random.default_rng(0)
    numbers = rng.integers(-(2**40), 2**40, (7, 30)).tolist()
    assert add_up(messages(numbers), n_sites=7).tolist() == np.sum(numbers, axis=0).tolist()


def test_fractions_are_added_to_the_grain():
    total = add_up(messages([[0.5], [0.25], [1 / 3]], grain=1 << 20), n_sites=3, grain=1 << 20)
    assert total[0] == pytest.approx(13 / 12, abs=2**-20)


def looks_uniform(words):
    """Compare every byte of 64-bit words, and the low bits of pairs of sites, with uniform ones."""
    checks = []
    for site in range(words.shape[1]):
        bytes_ = np.ascontiguousarray(words[:, site]).view(np.uint8).reshape(len(words), 8)
        for place in range(8):
            checks.append(
                check_frequencies(
                    np.bincount(bytes_[:, place], minlength=256), np.full(256, 1 / 256)
                )
            )
    low = (words & np.uint64(3)).astype(int)
    for a in range(
        words.shape[1] - 1
    ):  # any proper subset of messages is jointly uniform; the last completes the sum
        for b in range(a):
            checks.append(
                check_frequencies(
                    np.bincount(4 * low[:, a] + low[:, b], minlength=16), np.full(16, 1 / 16)
                )
            )
    return min(check.p_value for check in checks) * len(checks) > 1e-6


class NoMasks(MaskedSum):
    """Sends its numbers without masks."""

    def hide(self, numbers):
        return np.asarray(numbers).astype(np.uint64)


class NarrowMasks(MaskedSum):
    """Draws masks as large as the numbers instead of from the whole group."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.to_send = {other: mask >> np.uint64(40) for other, mask in self.to_send.items()}


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kind", "uniform"), [(MaskedSum, True), (NoMasks, False), (NarrowMasks, False)]
)
def test_what_a_site_sends_is_uniform_whatever_it_holds(kind, uniform):
    """False-alarm rate 1e-6 for all comparisons together."""
    numbers = [[5], [17], [11_000]]
    words = np.array(
        [[m[0] for m in messages(numbers, kind).values()] for _ in range(5000)], dtype=np.uint64
    )
    assert looks_uniform(words) == uniform


class ReusedMasks(MaskedSum):
    """Keeps its masks from one sum to the next."""

    kept = {}

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.to_send = self.kept.setdefault(self.site, self.to_send)


def what_changed(kind):
    """Return how a site's message changes from one sum to the next, after seven new records."""
    before, after = messages([[5], [17], [11]], kind), messages([[5], [24], [11]], kind)
    return int((after[1] - before[1]).view(np.int64)[0])


def test_masks_that_are_used_twice_betray_what_changed():
    assert what_changed(ReusedMasks) == 7
    assert what_changed(MaskedSum) != 7  # equal with probability 2^-64


def test_masks_serve_once():
    sites = [MaskedSum(site, n_sites=3, length=1) for site in range(3)]
    sites[0].hide([1])
    with pytest.raises(SettingsError, match="used up"):
        sites[0].hide([1])


def test_a_message_waits_for_the_masks_of_all_other_sites():
    sites = [MaskedSum(site, n_sites=3, length=1) for site in range(3)]
    sites[2].receive(0, sites[0].to_send[2])
    with pytest.raises(SettingsError, match="missing"):
        sites[2].hide([1])
    for site, mask in ((0, [1]), (2, [1]), (1, [1, 2])):
        with pytest.raises(SettingsError, match="expects one mask"):
            sites[2].receive(site, mask)


def test_without_a_site_nothing_is_added_up():
    sent = messages(NUMBERS)
    del sent[2]
    with pytest.raises(SchemaMismatch, match="masks do not cancel"):
        add_up(sent, n_sites=4)


@pytest.mark.parametrize("wrong", [{"n_sites": 2}, {"site": 3}, {"length": 0}, {"grain": 0}])
def test_sums_that_cannot_hide_are_refused(wrong):
    settings = {"site": 0, "n_sites": 3, "length": 1} | wrong
    with pytest.raises(SettingsError):
        MaskedSum(settings.pop("site"), **settings)


@pytest.mark.parametrize("numbers", [[2.0**60], [np.nan], [1, 2]])
def test_numbers_that_do_not_fit_are_refused_without_being_shown(numbers):
    with pytest.raises(SettingsError, match="takes 1 finite numbers") as raised:
        MaskedSum(0, n_sites=3, length=1).hide(numbers)
    assert str(2**60) not in str(raised.value)


def test_noisy_counts_of_all_sites_make_the_accuracy_of_all():
    """Totals are exact; noise that each site adds and charges beforehand makes them private."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.5, 0.5, (900, 3))
    y = (X[:, 0] > 0).astype(int)
    learner = PrivateLogisticRegression(epsilon=10.0, classes=[0, 1]).fit(X, y)
    found = [private_accuracy(learner, X[s::3], y[s::3], epsilon=1.0) for s in range(3)]
    totals = add_up(messages([[one.correct, one.total] for one in found]), n_sites=3)
    assert totals.tolist() == [sum(one.correct for one in found), sum(one.total for one in found)]
