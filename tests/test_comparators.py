"""The comparators of the experiments: what they draw, what it hides, and broken twins."""

import math

import numpy as np
import pytest
from experiments import comparators
from experiments.comparators import PATE, ClippedAverage
from scipy import special, stats
from scipy.linalg import hadamard

from consilience import Budget, Ledger, Noise
from consilience.aggregators.distillation import noise as hiding
from consilience.aggregators.distillation.tally import count_votes
from consilience.aggregators.members import Member
from consilience.errors import BudgetExceeded, SettingsError
from consilience.privacy.accounting import DiscreteGaussian, gaussian_log_delta
from consilience.tables.public import Public
from voters import made_up, sites, tally_of, vectors


@pytest.mark.parametrize("n_classes", [2, 3])
def test_one_member_moves_the_clipped_average_by_twice_the_norm_at_most(n_classes):
    members = vectors(5, n_classes, 3)
    twin = [Member(None, m.classes, None, (), 5, -m.coef, m.intercept) for m in members]
    made = ClippedAverage(epsilon=math.inf, clip_norm=0.5)
    one = made.combine(members).coef
    other = made.combine([twin[0], *members[1:]]).coef
    event = ClippedAverage(epsilon=1.0, clip_norm=0.5).combine(members).events[0]
    assert event.sensitivity == pytest.approx(2 * 0.5 / 5)
    assert np.linalg.norm(one - other) == pytest.approx(event.sensitivity, rel=1e-6)
    assert ClippedAverage(epsilon=1.0, clip_norm=0.5, neighbours="null-one").combine(
        members
    ).events[0].sensitivity == pytest.approx(0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.7e308])
def test_a_member_that_is_no_vector_does_not_show_in_the_average(value):
    members = vectors(5, 3, 3)
    coef = np.full((3, 3), value)
    coef[1] *= -1
    broken = Member(None, np.arange(3), None, (), 5, coef, np.zeros(3))
    made = ClippedAverage(epsilon=1.0, clip_norm=1.0, data_norm=2.0)
    assert np.isfinite(made.combine([broken, *members]).coef).all()


def test_pate_pays_for_each_query_by_its_rho():
    X, _ = made_up()
    tally = count_votes(vectors(50, 3, 4), Public(X))
    ensemble = PATE(epsilon=1.0, delta=1e-5, n_queries=40).combine(tally)
    (event,) = ensemble.events
    assert isinstance(event, DiscreteGaussian)
    sigma = event.sigma / tally.unit  # in votes
    assert event.rho == pytest.approx(40 / sigma**2)
    assert ensemble.guarantee.epsilon == pytest.approx(1.0)


def test_pate_without_noise_learns_the_majority():
    X, y = made_up(n_records=1000, n_classes=2)
    members = sites(X, y, 21)
    student = PATE(epsilon=math.inf, delta=1e-5, n_queries=300, regularization=1e-4).combine(
        members, Public(X)
    )
    majority = count_votes(members, Public(X)).counts.argmax(axis=1)
    assert np.mean(student.predict(X) == majority) > 0.85


def test_seeded_noise_voids_the_guarantee():
    X, _ = made_up()
    for made in (
        ClippedAverage(epsilon=1.0, clip_norm=1.0, noise=Noise(seed=1)),
        PATE(epsilon=1.0, delta=1e-5, n_queries=10, noise=Noise(seed=1)),
    ):
        ensemble = made.combine(vectors(20, 2, 4), Public(X))
        assert ensemble.guarantee.void_reason == "seeded noise"
        assert ensemble.public_guarantee is None


def test_a_ledger_is_charged_once_and_a_retry_draws_nothing_new(tmp_path):
    ledger = Ledger(tmp_path / "hub.db")
    ledger.allow("study", Budget(epsilon=0.5, unit="site"))
    members, where = vectors(20, 2, 4), {"ledger": ledger, "dataset": "study"}
    made = ClippedAverage(epsilon=0.4, clip_norm=1.0)
    first, again = (made.combine(members, key="c", **where) for _ in range(2))
    np.testing.assert_array_equal(first.coef, again.coef)
    with pytest.raises(BudgetExceeded):
        made.combine(members, key="d", **where)


def test_settings_that_cannot_work_are_refused():
    X, _ = made_up()
    with pytest.raises(SettingsError, match="n_queries"):
        PATE(epsilon=1.0, delta=1e-5, n_queries=10_000).combine(vectors(5, 2, 4), Public(X))
    with pytest.raises(SettingsError, match="delta"):
        PATE(epsilon=1.0, delta=0.0, n_queries=10).combine(vectors(5, 2, 4), Public(X))
    with pytest.raises(SettingsError, match="clip_norm"):
        ClippedAverage(epsilon=1.0, clip_norm=0.0).combine(vectors(5, 2, 4))


def members_of(rows):
    return [
        Member(None, np.arange(2), None, (), 5, np.atleast_2d(row), np.zeros(1)) for row in rows
    ]


def clipped_loss():
    """Return the loss of a member that sends a vector a million times too long, and then its
    opposite.
    """
    rest = [[0.1, 0.2], [0.3, -0.1], [0.0, 0.0]]
    ends = [
        ClippedAverage(epsilon=math.inf, clip_norm=0.5)
        .combine(members_of([[sign * 1e6, 0.0], *rest]))
        .coef
        for sign in (1, -1)
    ]
    event = (
        ClippedAverage(epsilon=1.0, clip_norm=0.5).combine(members_of(rest + rest[:1])).events[0]
    )
    return float(np.linalg.norm(ends[0] - ends[1])) / event.scale


def test_no_vector_moves_the_clipped_average_beyond_epsilon_and_one_that_is_not_clipped_does(
    monkeypatch,
):
    assert 0.98 < clipped_loss() <= 0.99 * (1 + 1e-9)
    monkeypatch.setattr(comparators, "clip_rows", lambda rows, norm: rows)
    assert clipped_loss() > 1e5


def canaries_seen(n_sites=64, epsilon=1.0):
    """Let every site send one of two opposite vectors by a coin, all orthogonal; guess all coins
    from one release.
    """
    axes = hadamard(n_sites) / math.sqrt(n_sites)
    coins = np.array([b"consilience"[i % 11] * (i + 3) % 7 % 2 for i in range(n_sites)]).astype(
        bool
    )
    members = members_of(np.where(coins, 1.0, -1.0)[:, None] * axes)
    released = ClippedAverage(epsilon=epsilon, clip_norm=1.0).combine(members).coef[0]
    return int((((axes @ released) > 0) == coins).sum())


def test_canary_sites_cannot_be_read_off_the_clipped_average_unless_noise_is_for_one_of_many(
    monkeypatch,
):
    # Pure epsilon: correct guesses are dominated by a binomial (Steinke et al. 2023). False alarm
    # rate 1e-6.
    limit = stats.binom.isf(1e-6, 64, special.expit(1.0))
    assert canaries_seen() <= limit
    calibrate = hiding.Plan._calibrate
    monkeypatch.setattr(
        hiding.Plan, "_calibrate", lambda self, sensitivity: calibrate(self, sensitivity / 64)
    )
    assert canaries_seen() > limit


def pate_delta(n_queries, n_classes=3, n_members=7):
    """Return the delta, at the claimed epsilon, of the two most distant votes of one member on all
    queries.
    """
    X = np.full((n_queries, 1), 0.5)
    rng = np.random.default_rng(2)
    votes = rng.integers(0, n_classes, (n_members, n_queries))
    other = votes.copy()
    votes[0], other[0] = 0, 1
    tallies = [tally_of(v, X, n_classes) for v in (votes, other)]
    made = PATE(epsilon=1.0, delta=1e-3, n_queries=n_queries).combine(tallies[0])
    moved = np.linalg.norm((tallies[0].counts - tallies[1].counts).astype(float))
    # The sigmas are tens of units: the discrete Gaussian's profile is the continuous one's to many
    # digits.
    return math.exp(gaussian_log_delta(made.guarantee.epsilon, moved / made.events[0].sigma))


def test_pate_pays_for_all_queries_and_a_twin_that_pays_for_one_is_caught(monkeypatch):
    assert 1e-6 < pate_delta(16) <= 1e-3
    real = comparators.shares_moved
    monkeypatch.setattr(comparators, "shares_moved", lambda *args: real(*args) / math.sqrt(16))
    assert pate_delta(16) > 0.1


def test_an_exact_enumeration_of_one_pate_query_stays_below_delta():
    tallies = [tally_of(np.array([[v], [0], [1]]), np.full((1, 1), 0.5)) for v in (0, 1)]
    made = PATE(epsilon=1.0, delta=1e-2, n_queries=1).combine(tallies[0])
    sigma, reach = made.events[0].sigma, 120
    grid = np.arange(-reach, reach + 1)
    masses = []
    for tally in tallies:
        one, two = (np.exp(-((grid - c) ** 2) / (2 * sigma**2)) for c in tally.counts[0])
        masses.append(np.outer(one / one.sum(), two / two.sum()))

    def delta(epsilon):
        return float(np.maximum(masses[0] - math.exp(epsilon) * masses[1], 0).sum())

    assert 5e-5 < delta(made.guarantee.epsilon) <= 1e-2
    assert delta(made.guarantee.epsilon / 4) > 1e-2
