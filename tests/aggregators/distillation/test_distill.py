import itertools
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import optimize, sparse, special, stats
from scipy.linalg import hadamard
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from consilience import Budget, Ledger, Noise, PrivateLogisticRegression
from consilience.aggregators.average import TRUSTED
from consilience.aggregators.distillation import distill
from consilience.aggregators.distillation import noise as hiding
from consilience.aggregators.distillation import tally as votes
from consilience.aggregators.distillation.distill import (
    ROW_BY_ROW,
    SoftLabelDistillation,
    VoteDistillation,
)
from consilience.aggregators.distillation.site_level import OPEN_RECORDS, READ_CLASSES
from consilience.aggregators.distillation.tally import Tally, count_votes
from consilience.aggregators.members import Member
from consilience.errors import BudgetExceeded, SchemaMismatch, SettingsError
from consilience.privacy.accounting import (
    Closing,
    Gaussian,
    L2Laplace,
    SoftObjectiveGaussian,
    gaussian_log_delta,
    total,
)
from consilience.tables.public import Public
from voters import made_up, sites, tally_of, vectors


class Says:
    """A member with prescribed answers, record by record, whatever the records are."""

    def __init__(self, labels, classes=(0, 1), probabilities=None):
        self.classes_, self.labels = np.asarray(classes), np.asarray(labels)
        if probabilities is not None:
            self.predict_proba = lambda X: np.asarray(probabilities)

    def predict(self, X):
        return (
            self.labels[X[:, 0].astype(int)]
            if len(self.labels) > 1
            else np.repeat(self.labels, len(X))
        )


# Counting


def test_a_tally_that_is_asked_many_times_answers_as_if_it_were_new():
    """What has no noise is computed once; settings that change it must not be mixed up."""
    X, y = made_up()
    tally = count_votes(sites(X, y, 20), Public(X), classes=[0, 1, 2])
    noise = {"noise": Noise(seed=1)}
    asked = [
        SoftLabelDistillation(epsilon=5.0, mechanism="output", **noise),
        VoteDistillation(epsilon=5.0, **noise),
        SoftLabelDistillation(epsilon=50.0, mechanism="output", **noise),
        SoftLabelDistillation(epsilon=5.0, mechanism="output", regularization=1e-3, **noise),
        SoftLabelDistillation(epsilon=5.0, mechanism="output", fit_intercept=False, **noise),
        SoftLabelDistillation(epsilon=5.0, mechanism="output", data_norm=0.5, **noise),
        SoftLabelDistillation(epsilon=5.0, mechanism="output", calibration="hamm2016", **noise),
    ]
    for settings_ in asked * 2:
        new = Tally(
            tally.counts, tally.unit, tally.n_members, tally.classes, tally.public, tally.own
        )
        np.testing.assert_array_equal(settings_.combine(tally).coef, settings_.combine(new).coef)


def test_counts_are_those_of_asking_every_member():
    X, y = made_up()
    names = np.array(["a", "b", "c"])[y]
    members = sites(X, names, 30)
    tally = count_votes(members, Public(X))
    asked = np.stack([member.predict(X) for member in members])
    np.testing.assert_array_equal(
        tally.counts, 3 * (asked[:, :, None] == np.array(["a", "b", "c"])).sum(axis=0)
    )


def test_probabilities_are_added_up_to_a_millionth():
    X, y = made_up()
    members = sites(
        X, y, 12, kinds=[GaussianNB, LogisticRegression, PrivateLogisticRegressionExact]
    )
    tally = count_votes(members, Public(X), soft="probabilities")
    mean = np.mean([member.predict_proba(X) for member in members], axis=0)
    np.testing.assert_allclose(tally.counts / (tally.n_members * tally.unit), mean, atol=4e-6)


class PrivateLogisticRegressionExact(PrivateLogisticRegression):
    def __init__(self):
        super().__init__(epsilon=math.inf)


def test_a_linear_kernel_machine_is_not_mistaken_for_one_vector_per_class():
    X, y = made_up()
    member = SVC(kernel="linear").fit(
        X, y
    )  # three pairs of classes: as many coefficients as classes
    tally = count_votes([member], Public(X))
    np.testing.assert_array_equal(tally.counts.argmax(axis=1), member.predict(X))


def test_members_with_fewer_classes_are_aligned_by_label():
    X, y = made_up()
    some = y > 0
    pair = LogisticRegression().fit(X[some], y[some])
    lone = DummyClassifier().fit(X[y == 2], y[y == 2])
    tally = count_votes([pair, lone], Public(X), classes=[0, 1, 2])
    said = np.stack([pair.predict(X), np.full(len(X), 2)])
    np.testing.assert_array_equal(tally.counts, 3 * (said[:, :, None] == np.arange(3)).sum(axis=0))
    two = count_votes([lone, lone], Public(X), classes=[1, 2])
    np.testing.assert_array_equal(two.counts, np.tile([0, 4], (len(X), 1)))


@pytest.mark.parametrize("soft", ["votes", "probabilities"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_counts_do_not_depend_on_the_size_of_blocks(monkeypatch, soft, n_classes):
    X, _ = made_up(n_records=90)
    members = vectors(40, n_classes, 4)
    whole = count_votes(members, Public(X), soft=soft)
    for name, value in (("_SLOTS", 7), ("_ENTRIES", 100), ("_ROWS", 11)):
        monkeypatch.setattr(votes, name, value)
    np.testing.assert_array_equal(count_votes(members, Public(X), soft=soft).counts, whole.counts)
    np.testing.assert_array_equal(
        count_votes(members, Public(sparse.csr_array(X)), soft=soft).counts, whole.counts
    )


def test_all_votes_are_never_held_at_once(monkeypatch):
    monkeypatch.setattr(votes, "_ENTRIES", 1 << 16)
    X, _ = made_up(n_records=6_000, n_features=3, n_classes=2)
    members = vectors(2_000, 2, 3)
    tracemalloc.start()
    count_votes(members, Public(X))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(X) * len(members) / 2  # bytes: half of one byte per vote


@given(said=hnp.arrays(np.float64, (5, 3), elements=st.floats(width=64)))
def test_whatever_a_member_says_its_shares_sum_to_one_vote(said):
    shares = votes._shares(said, 3 * votes.GRAIN)
    assert (shares >= 0).all()
    np.testing.assert_array_equal(shares.sum(axis=1), 3 * votes.GRAIN)


def test_an_answer_that_is_no_declared_class_counts_as_undecided():
    rows = Public(np.array([[0.0], [1.0]]))
    said = [Says([0, 7]), Says([0, 1], probabilities=[[np.nan, np.nan], [0.25, 0.75]])]
    np.testing.assert_array_equal(count_votes(said, rows, classes=[0, 1]).counts, [[4, 0], [1, 3]])
    soft = count_votes(said, rows, classes=[0, 1], soft="probabilities").counts / votes.GRAIN
    np.testing.assert_allclose(soft, [[3, 1], [1.5, 2.5]])


def test_replacing_a_member_by_one_of_another_kind_moves_no_other_vote():
    X, y = made_up()
    members = sites(X, y, 25)
    some = y < 2
    for other in (DecisionTreeClassifier(), LogisticRegression()):
        swapped = [*members[:7], other.fit(X[some], y[some]), *members[8:]]
        gap = (
            count_votes(swapped, Public(X), classes=[0, 1, 2]).counts
            - count_votes(members, Public(X)).counts
        )
        assert np.abs(gap).max() <= 3
        assert np.linalg.norm(gap, axis=1).max() <= 3 * math.sqrt(2)


@pytest.mark.parametrize("soft", ["votes", "probabilities"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_whatever_vector_replaces_a_member_it_moves_one_vote(monkeypatch, soft, n_classes):
    monkeypatch.setattr(votes, "_SLOTS", 16)
    X, _ = made_up(n_records=90)
    members = vectors(40, n_classes, 4)
    one = count_votes(members, Public(X), soft=soft, classes=list(range(n_classes)))
    rows = 1 if n_classes == 2 else n_classes
    for value in (np.nan, np.inf, 1e308, -1e308, 0.0):
        other = Member(
            None, np.arange(n_classes), None, (), 5, np.full((rows, 4), value), np.full(rows, value)
        )
        lone = Member(
            None, np.array([n_classes - 1]), None, (), 5, np.full((1, 4), value), np.zeros(1)
        )
        for put in (other, lone):
            for place in (0, 15, 16, 39):
                swapped = [*members[:place], put, *members[place + 1 :]]
                two = count_votes(swapped, Public(X), soft=soft, classes=list(range(n_classes)))
                gap = two.counts - one.counts
                assert (gap.sum(axis=1) == 0).all()
                assert np.linalg.norm(gap, axis=1).max() <= one.unit * math.sqrt(2)
                assert (two.counts >= 0).all()


def test_an_answer_of_another_shape_counts_as_undecided():
    rows = Public(np.array([[0.0], [1.0]]))
    wrong = [Says([0, 1], probabilities=np.ones((2, 5))), Says([0, 1], probabilities=[0.5])]
    np.testing.assert_array_equal(
        count_votes(wrong, rows, classes=[0, 1], soft="probabilities").counts, 2 * votes.GRAIN
    )

    class Silent(Says):
        def predict(self, X):
            return self.labels[:1]

    np.testing.assert_array_equal(count_votes([Silent([0, 1])], rows, classes=[0, 1]).counts, 1)


class ByRank:
    """A member that compares records with one another: it says yes to the larger half of whatever
    it is shown.
    """

    classes_ = np.array([0, 1])

    def predict(self, X):
        return (X[:, 0] > np.median(X[:, 0])).astype(int)


def test_a_member_that_compares_records_needs_the_stated_assumption():
    X = np.arange(9.0)[:, None] / 10
    other = X.copy()
    other[0] = 1.0  # one record replaced, from the smallest to the largest
    gap = count_votes([ByRank()], Public(other)).counts - count_votes([ByRank()], Public(X)).counts
    assert np.count_nonzero(gap[1:].any(axis=1)) > 0
    made = SoftLabelDistillation(epsilon=1.0, regularization=0.1, protect_public=True)
    assert ROW_BY_ROW in made.combine([ByRank()], Public(X)).public_guarantee.assumptions
    assert (
        ROW_BY_ROW
        not in SoftLabelDistillation(epsilon=1.0)
        .combine([ByRank()], Public(X))
        .guarantee.assumptions
    )


# The statistic


def direct(X, shares, strength):
    """Minimise the weighted loss as the paper writes it, without our solver."""
    K = shares.shape[1]

    def objective(flat):
        W = flat.reshape(K, -1) if K > 2 else np.stack([np.zeros(X.shape[1]), flat])
        loss = -(shares * special.log_softmax(X @ W.T, axis=1)).sum(axis=1).mean()
        return loss + strength / 2 * flat @ flat

    size = (K if K > 2 else 1) * X.shape[1]
    return optimize.minimize(objective, np.zeros(size), method="BFGS", options={"gtol": 1e-7})


@pytest.mark.parametrize("n_classes", [2, 3])
def test_without_noise_both_mechanisms_minimise_the_papers_weighted_loss(n_classes):
    X, _ = made_up(n_records=80, n_features=3)
    tally = count_votes(vectors(9, n_classes, 3), Public(X))
    best = direct(X, tally.counts / (9 * tally.unit), 0.01)
    for mechanism in ("statistic", "output"):
        made = SoftLabelDistillation(
            epsilon=math.inf, mechanism=mechanism, regularization=0.01, fit_intercept=False
        ).combine(tally)
        np.testing.assert_allclose(made.coef.ravel(), best.x, atol=2e-4)
        assert made.guarantee.epsilon == math.inf


def test_the_intercept_and_the_norm_are_undone_in_the_released_coefficients():
    X, _ = made_up(n_records=200, n_features=3)
    members = vectors(9, 2, 3)
    plain = SoftLabelDistillation(epsilon=math.inf, regularization=1e-6).combine(members, Public(X))
    far = [Member(None, m.classes, None, (), 5, m.coef / 10, m.intercept) for m in members]
    scaled = SoftLabelDistillation(epsilon=math.inf, regularization=1e-6, data_norm=10.0).combine(
        far, Public(10 * X)
    )
    np.testing.assert_allclose(scaled.coef * 10, plain.coef, rtol=1e-3)
    agreed = count_votes(members, Public(X)).counts.argmax(axis=1)
    assert np.mean(plain.predict(X) == agreed) > 0.8


def largest_change(X, n_classes, n_members, neighbours):
    """Try every pair of a member's votes on every record: the change of whitened contrasts."""
    settings_ = SoftLabelDistillation(epsilon=1.0, neighbours=neighbours, fit_intercept=False)
    plan = hiding.StatisticPlan(settings_, hiding.Rows(X, n_classes, n_members))
    patterns = np.array(list(itertools.product(range(n_classes), repeat=len(X))))
    contrasts = hiding.Rows(X, n_classes, n_members).contrasts
    hot = (patterns[:, :, None] == np.arange(n_classes)).astype(float)  # (pattern, record, class)
    values = contrasts @ np.einsum("pik,id->pkd", hot, plan.whitened) / (len(X) * n_members)
    flat = values.reshape(len(values), -1)
    if neighbours == "replace-one":
        squares = (flat**2).sum(axis=1)
        worst = math.sqrt((squares[:, None] + squares - 2 * flat @ flat.T).max())
    else:
        even = np.full((len(X), n_classes), 1 / n_classes)
        null = (contrasts @ (even.T @ plan.whitened) / (len(X) * n_members)).ravel()
        worst = float(np.linalg.norm(flat - null, axis=1).max())
    return worst, plan.noise


@pytest.mark.parametrize("neighbours", ["replace-one", "null-one"])
@pytest.mark.parametrize(("n_classes", "n_records"), [(2, 8), (3, 5), (4, 4)])
def test_no_change_of_one_members_votes_exceeds_the_sensitivity_and_some_attain_it(
    neighbours, n_classes, n_records
):
    for seed in range(5):
        X, _ = made_up(n_records=n_records, n_features=2, seed=seed)
        worst, event = largest_change(X, n_classes, 7, neighbours)
        assert worst <= event.sensitivity
        assert worst / event.scale <= 0.99 * (
            1 + 1e-9
        )  # the loss of the densest pair: what is left is for closing
    # Where all records are parallel, a member that changes its mind everywhere moves the statistic
    # by all of it.
    worst, event = largest_change(np.full((n_records, 1), 0.5), n_classes, 7, neighbours)
    assert worst == pytest.approx(event.sensitivity, rel=1e-9)
    assert worst / event.scale == pytest.approx(0.99, rel=1e-9)


@pytest.mark.parametrize("neighbours", ["replace-one", "null-one"])
def test_the_sensitivity_holds_and_is_attained_where_records_span_few_directions(neighbours):
    source = Noise(seed=2).open()
    for n_classes, n_records in ((2, 7), (3, 5)):
        for flat in (
            0.0,
            1e-12,
            1e-5,
            3e-5,
            1e-4,
        ):  # around the cut of small eigenvalues, 1e-9 = (3.2e-5)²
            line = source.normal(4)
            X = np.outer(np.full(n_records, 0.6), line / np.linalg.norm(line))
            X += flat * source.normal(n_records * 4).reshape(n_records, 4)
            worst, event = largest_change(X, n_classes, 5, neighbours)
            assert worst <= event.sensitivity
            if (
                flat < 1e-9
            ):  # one direction, all records of one size: a member can be all wrong along it
                assert worst == pytest.approx(event.sensitivity, rel=1e-6)


def test_along_directions_that_are_dropped_nothing_is_released():
    # The second feature is 1e-7 of the first. Two tallies that differ in it alone, under the same
    # noise, look the same.
    X = np.column_stack([np.full(6, 0.8), 1e-7 * np.array([1.0, -1, 2, -2, 3, -3])])
    one = np.array([[0, 1, 0, 1, 0, 1]] * 3)
    two = one[:, [1, 0, 3, 2, 5, 4]]
    released = [
        SoftLabelDistillation(
            epsilon=1.0, regularization=0.1, fit_intercept=False, noise=Noise(seed=1)
        ).combine(tally_of(votes, X, 2))
        for votes in (one, two)
    ]
    exact = [np.mean(votes.mean(axis=0) * X[:, 1]) for votes in (one, two)]
    assert abs(exact[0] - exact[1]) > 1e-7
    np.testing.assert_allclose(released[0].statistic, released[1].statistic, atol=1e-14)
    np.testing.assert_allclose(released[0].coef, released[1].coef, atol=1e-12)


class TunesOnExactVotes(hiding.StatisticPlan):
    """Twin: choose λ by agreement with the exact counts."""

    def draw(self, tally, source):
        agreed = Public(tally.public.X, tally.counts.argmax(axis=1))
        return super().draw(replace(tally, public=agreed), source)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_chosen_strength_is_a_function_of_what_is_released(monkeypatch, labelled):
    """Two worlds that release the same noisy statistic end with the same model, bit for bit; in a
    twin they do not.
    """
    X, y = made_up(n_records=80, n_classes=3)
    tallies = [tally_of((y + shift) % 3 * np.ones((4, 1), dtype=int), X, 3) for shift in (0, 1)]
    tallies = [
        Tally(t.counts, 3, 4, t.classes, Public(X, y if labelled else None), t.own) for t in tallies
    ]
    made = SoftLabelDistillation(epsilon=1.0, regularization="auto")
    fixed = 0.05 * Noise(seed=3).open().normal(10).reshape(2, 5)
    monkeypatch.setattr(hiding.Plan, "_closed", lambda self, vector, source: fixed)
    one, two = (made.combine(tally) for tally in tallies)
    np.testing.assert_array_equal(one.coef, two.coef)
    assert one.regularization == two.regularization
    monkeypatch.setattr(distill, "StatisticPlan", TunesOnExactVotes)
    one, two = (made.combine(tally) for tally in tallies)
    assert one.regularization != two.regularization


def test_a_twin_with_half_the_noise_is_caught_by_the_same_search():
    worst, event = largest_change(np.full((5, 1), 0.5), 3, 7, "replace-one")
    twin = L2Laplace(
        unit=event.unit,
        neighbours=event.neighbours,
        sensitivity=event.sensitivity,
        scale=event.scale / 2,
    )
    assert worst / twin.scale > 1.9


def test_gaussian_noise_keeps_delta_for_the_worst_pair_and_half_of_it_does_not():
    settings_ = SoftLabelDistillation(epsilon=1.0, delta=1e-5, fit_intercept=False)
    plan = hiding.StatisticPlan(settings_, hiding.Rows(np.full((5, 1), 0.5), 2, 7))
    gap = math.sqrt(2) / 7  # all votes of one member flipped
    assert math.exp(gaussian_log_delta(1.0, gap / plan.noise.sigma)) <= 1e-5
    assert math.exp(gaussian_log_delta(1.0, 2 * gap / plan.noise.sigma)) > 1e-3


@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_the_sensitivity_is_the_published_one_for_whitened_records(n_classes):
    X, _ = made_up()
    for neighbours, k in (
        ("replace-one", math.sqrt(2)),
        ("null-one", math.sqrt(1 - 1 / n_classes)),
    ):
        settings_ = SoftLabelDistillation(epsilon=1.0, neighbours=neighbours)
        event = hiding.StatisticPlan(settings_, hiding.Rows(X, n_classes, 50)).noise
        assert event.sensitivity == pytest.approx(k / 50, rel=1e-9)
        assert event.sensitivity >= k / 50 * (1 - 1e-15)


def noise_of(aggregator, tally, n_draws):
    """Return the noise of many releases, recovered in whitened contrasts."""
    exact = SoftLabelDistillation(epsilon=math.inf, fit_intercept=False).combine(tally).statistic
    plan = hiding.StatisticPlan(
        aggregator, hiding.Rows(tally.public.X, len(tally.classes), tally.n_members)
    )
    found = []
    for seed in range(n_draws):
        aggregator.noise = Noise(seed=seed)
        gap = aggregator.combine(tally).statistic - exact
        assert (
            np.abs(gap.sum(axis=0)).max() < 1e-9
        )  # how votes divide: nothing is drawn where nothing can move
        found.append((plan.rows.contrasts @ gap @ plan.vectors / plan.roots).ravel())
    return np.array(found), plan


@pytest.mark.statistical
@pytest.mark.parametrize("n_classes", [2, 3])
def test_released_statistics_carry_exactly_the_noise_that_is_charged(n_classes):
    X, _ = made_up(n_records=60, n_features=3)
    tally = count_votes(vectors(9, n_classes, 3), Public(X))
    drawn, plan = noise_of(
        SoftLabelDistillation(epsilon=1.0, regularization=0.1, fit_intercept=False), tally, 400
    )
    lengths = np.linalg.norm(drawn, axis=1)
    # False alarm rate 1e-6.
    assert (
        stats.kstest(lengths, stats.gamma(plan.dimension, scale=plan.noise.scale).cdf).pvalue > 1e-6
    )
    assert (
        stats.kstest(lengths / 2, stats.gamma(plan.dimension, scale=plan.noise.scale).cdf).pvalue
        < 1e-6
    )
    settings_ = SoftLabelDistillation(
        epsilon=1.0, delta=1e-5, regularization=0.1, fit_intercept=False
    )
    drawn, plan = noise_of(settings_, tally, 200)
    assert stats.kstest(drawn.ravel(), stats.norm(0, plan.noise.sigma).cdf).pvalue > 1e-6
    assert stats.kstest(drawn.ravel() / 2, stats.norm(0, plan.noise.sigma).cdf).pvalue < 1e-6


def canary_guesses(epsilon, n_sites=128):
    """Let every site be a canary that tosses a coin between two opposite votes; guess all coins
    from one release.
    """
    patterns = hadamard(n_sites) > 0
    coins = np.array([b"consilience"[i % 11] * (i + 3) % 7 % 2 for i in range(n_sites)]).astype(
        bool
    )
    members = [
        Says((pattern == coin).astype(int)) for pattern, coin in zip(patterns, coins, strict=True)
    ]
    X = np.hstack(
        [np.arange(n_sites)[:, None], np.eye(n_sites)]
    )  # the first column is the record's number
    tally = count_votes(members, Public(X), classes=[0, 1])
    aggregator = SoftLabelDistillation(epsilon=epsilon, regularization=1.0, fit_intercept=False)
    released = aggregator.combine(
        Tally(tally.counts, tally.unit, n_sites, tally.classes, Public(X[:, 1:]), tally.own)
    ).statistic
    says = np.where(patterns, 1.0, -1.0) @ (released[1] - released[0])
    return int(((says > 0) == coins).sum())


def test_canary_sites_cannot_be_read_off_one_release():
    # Pure epsilon: correct guesses are dominated by a binomial (Steinke et al. 2023). False alarm
    # rate 1e-6.
    limit = stats.binom.isf(1e-6, 128, special.expit(1.0))
    assert canary_guesses(1.0) <= limit


def test_noise_for_a_mean_on_what_is_a_sum_is_caught_by_the_canaries(monkeypatch):
    moved = hiding.shares_moved
    monkeypatch.setattr(
        hiding, "shares_moved", lambda n_classes, neighbours: moved(n_classes, neighbours) / 128
    )
    assert canary_guesses(1.0) > stats.binom.isf(1e-6, 128, special.expit(1.0))


# The other mechanisms


def exact_minimum(votes, X, n_classes, strength, majority=False):
    kind = VoteDistillation if majority else SoftLabelDistillation
    made = kind(epsilon=math.inf, mechanism="output", regularization=strength, fit_intercept=False)
    return made.combine(tally_of(votes, X, n_classes)).coef


@pytest.mark.parametrize("majority", [False, True])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_one_member_moves_the_minimum_by_at_most_the_output_sensitivity(n_classes, majority):
    n_members, strength, worst = 3, 5.0, 0.0
    kind = VoteDistillation if majority else SoftLabelDistillation
    source = Noise(seed=5).open()
    for seed in range(12):
        X, _ = made_up(n_records=6, n_features=2, seed=seed)
        X = X / np.linalg.norm(X, axis=1)[:, None] * (1 - 1e-12)
        if seed == 0:
            X = np.tile([1 - 1e-9, 0.0], (6, 1))
        settings_ = kind(
            epsilon=1.0, mechanism="output", regularization=strength, fit_intercept=False
        )
        limit = hiding.OutputPlan(settings_, hiding.Rows(X, n_classes, n_members)).noise.sensitivity
        votes = (source.uniform(n_members * 6) * n_classes).astype(int).reshape(n_members, 6)
        votes[1] *= seed > 0
        votes[2] = (votes[1] + 1) % n_classes
        other = votes.copy()
        votes[0], other[0] = votes[1], votes[2]
        gap = exact_minimum(votes, X, n_classes, strength, majority) - exact_minimum(
            other, X, n_classes, strength, majority
        )
        share = np.linalg.norm(gap) / limit
        assert share <= 1 + 1e-6
        worst = max(worst, share)
    assert worst > 0.9


@pytest.mark.parametrize("n_classes", [2, 3])
def test_a_member_that_becomes_undecided_moves_the_minimum_by_the_null_one_sensitivity(n_classes):
    X = np.full((4, 1), 1 - 1e-12)
    settings_ = {
        "mechanism": "output",
        "regularization": 5.0,
        "fit_intercept": False,
        "neighbours": "null-one",
    }
    event = hiding.OutputPlan(
        SoftLabelDistillation(epsilon=1.0, **settings_), hiding.Rows(X, n_classes, 3)
    ).noise
    worst = 0.0
    for said in itertools.product(range(n_classes), repeat=4):
        tally = tally_of(np.array([said, [0] * 4, [1] * 4]), X, n_classes)
        mine = n_classes * np.eye(n_classes, dtype=np.int64)[list(said)]
        null = Tally(tally.counts - mine + 1, n_classes, 3, tally.classes, tally.public, tally.own)
        exact = [
            SoftLabelDistillation(epsilon=math.inf, **settings_).combine(t).coef
            for t in (tally, null)
        ]
        worst = max(worst, float(np.linalg.norm(exact[0] - exact[1])) / event.sensitivity)
    assert 0.9 < worst <= 1 + 1e-6


@given(
    n_records=st.integers(1, 200),
    n_members=st.integers(1, 200),
    n_classes=st.integers(2, 6),
    majority=st.booleans(),
    protect=st.booleans(),
    strength=st.floats(1e-4, 10),
)
def test_the_papers_noise_is_never_less_than_the_proof_asks_for(**facts):
    """For several classes a gradient is √2 long, in the paper 1: with few records its constant is
    below the proof's.
    """
    strength, protect = facts.pop("strength"), facts.pop("protect")
    paper, tight = (
        output_event(
            **facts, protect_public=protect, regularization=strength, calibration=calibration
        )
        for calibration in ("hamm2016", "tight")
    )
    assert paper >= tight


def output_event(n_records=50, n_members=40, n_classes=2, majority=False, **settings_):
    kind = VoteDistillation if majority else SoftLabelDistillation
    X = np.zeros((n_records, 3))
    X[:, 0] = 1 - 1e-9
    made = kind(epsilon=1.0, mechanism="output", fit_intercept=False, **settings_)
    return hiding.OutputPlan(made, hiding.Rows(X, n_classes, n_members)).noise.sensitivity


def test_output_sensitivities_are_those_of_the_table():
    # Parallel records of length 1 leave the public second moment nothing to save.
    near = {"rel": 1e-6}
    assert output_event(regularization=0.9) == pytest.approx(1 / (40 * 0.9), **near)
    assert output_event(regularization=0.9, neighbours="null-one") == pytest.approx(
        1 / (80 * 0.9), **near
    )
    assert output_event(regularization=0.9, n_classes=3) == pytest.approx(
        math.sqrt(2) / (40 * 0.9), **near
    )
    assert output_event(regularization=0.9, majority=True) == pytest.approx(1 / 0.9, **near)
    assert output_event(regularization=0.9, majority=True, n_classes=3) == pytest.approx(
        math.sqrt(2) / 0.9, **near
    )
    assert output_event(majority=True) == pytest.approx(
        2 * math.sqrt(2 * math.log(2) / 1e-4), **near
    )
    paper = {"calibration": "hamm2016", "regularization": 0.9}
    assert output_event(**paper) == pytest.approx(2 / (40 * 0.9), **near)
    assert output_event(majority=True, **paper) == pytest.approx(2 / 0.9, **near)
    assert output_event(protect_public=True, **paper) == pytest.approx(
        2 / (40 * 0.9) * 89 / 50, **near
    )
    assert output_event(protect_public=True, regularization=0.9) == pytest.approx(
        129 / 50 / (40 * 0.9), **near
    )
    assert output_event(protect_public=True, regularization=0.9, majority=True) == pytest.approx(
        51 / 45, **near
    )


def test_output_noise_hides_a_site_and_an_auxiliary_record_that_change_together():
    strength, n_members = 0.5, 4
    source = Noise(seed=8).open()
    settings_ = SoftLabelDistillation(
        epsilon=1.0,
        mechanism="output",
        regularization=strength,
        fit_intercept=False,
        protect_public=True,
    )
    for n_classes in (2, 3):
        limit = hiding.OutputPlan(
            settings_, hiding.Rows(np.zeros((5, 2)), n_classes, n_members)
        ).noise.sensitivity
        for seed in range(15):
            X, _ = made_up(n_records=5, n_features=2, seed=seed)
            X = X / np.linalg.norm(X, axis=1)[:, None] * (1 - 1e-12)
            votes = (source.uniform(n_members * 5) * n_classes).astype(int).reshape(n_members, 5)
            Z, other = X.copy(), votes.copy()
            other[0] = (votes[0] + 1) % n_classes
            Z[0], other[:, 0] = -X[0] if seed % 2 else X[0], (votes[:, 0] + 1) % n_classes
            gap = exact_minimum(votes, X, n_classes, strength) - exact_minimum(
                other, Z, n_classes, strength
            )
            assert np.linalg.norm(gap) <= limit * (1 + 1e-6)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_noise_in_the_objective_pays_for_a_record_and_a_site_at_once(n_classes):
    X, _ = made_up(n_records=70)
    made = SoftLabelDistillation(epsilon=1.0, regularization=0.05, protect_public=True)
    plan = hiding.ObjectivePlan(made, hiding.Rows(made._in_ball(X), n_classes, 30))
    assert total(plan.events).epsilon == pytest.approx(1.0, rel=1e-9)
    assert total(plan.events).epsilon <= 1.0
    gradient = 69 * math.sqrt(2) / 30 + 2 * math.sqrt(2)
    jacobian = (n_classes - 1) * math.log1p(1 / (n_classes * plan.ridge))
    assert jacobian + gradient / plan.noise.scale == pytest.approx(0.99, rel=1e-9)


def exact_loss(theta, first, second, ridge, scale):
    """Return the exact privacy loss of the minimum `theta` (2 classes, 1 feature) between two
    problems (x, shares).

    Written from the definition: the noise that makes theta the minimum, its density, and the
    Jacobian.
    """

    def parts(x, shares):
        p = special.expit(x * theta * math.sqrt(2))  # theta is the contrast: W = (-theta, theta)/√2
        slope = (x * (p - shares)).sum() * math.sqrt(2) + ridge * theta
        return abs(slope) / scale, math.log(2 * (x**2 * p * (1 - p)).sum() + ridge)

    (one, det_one), (two, det_two) = parts(*first), parts(*second)
    return (two - one) + (det_one - det_two)


def largest_loss(plan, n_members, halved=1.0):
    source, worst = Noise(seed=6).open(), 0.0
    for theta in np.linspace(-4, 4, 41):
        for attempt in range(30):
            votes = (source.uniform(n_members * 4) > 0.5).astype(float).reshape(n_members, 4)
            x = np.where(source.uniform(4) > 0.5, 1.0, -1.0) if attempt else np.ones(4)
            other, z = votes.copy(), x.copy()
            votes[0], other[0] = x > 0, x < 0
            z[0] = x[0] if attempt % 2 == 0 else 0.0
            votes[:, 0], other[:, 0] = x[0] > 0, x[0] < 0
            first, second = (x, votes.mean(axis=0)), (z, other.mean(axis=0))
            for pair in ((first, second), (second, first)):
                worst = max(worst, exact_loss(theta, *pair, plan.ridge, plan.noise.scale * halved))
    return worst


def softmax_loss(C, first, second, ridge, scale):
    """Return the exact loss at contrasts C (K - 1, d) between two problems (X, shares), from the
    definition.
    """
    logs = []
    for X, shares in (first, second):
        K, d = shares.shape[1], X.shape[1]
        H = hiding.Rows(X, K, 1).contrasts
        p = special.softmax(X @ (H.T @ C).T, axis=1)
        b = H @ ((p - shares).T @ X) + ridge * C
        hessian = ridge * np.eye((K - 1) * d)
        for x, q in zip(X, p, strict=True):
            hessian += np.kron(H @ (np.diag(q) - np.outer(q, q)) @ H.T, np.outer(x, x))
        logs.append(np.linalg.slogdet(hessian)[1] - np.linalg.norm(b) / scale)
    return logs[0] - logs[1]


def test_the_exact_loss_stays_below_epsilon_for_several_classes_and_features():
    made = SoftLabelDistillation(
        epsilon=2.0, regularization=0.2, fit_intercept=False, protect_public=True
    )
    plan = hiding.ObjectivePlan(made, hiding.Rows(np.ones((4, 2)), 3, 2))
    rng, eye, worst = np.random.default_rng(5), np.eye(3), 0.0
    for _ in range(1500):
        X = rng.normal(size=(4, 2))
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        votes = rng.integers(0, 3, (2, 4))
        other, Z = votes.copy(), X.copy()
        other[0] = (votes[0] + rng.integers(1, 3, 4)) % 3
        Z[0], other[:, 0] = rng.choice([-1, 1]) * X[rng.integers(4)], rng.integers(0, 3, 2)
        C = rng.normal(size=(2, 2)) * 10.0 ** rng.uniform(-1, 1.5)
        pair = (X, eye[votes].mean(axis=0)), (Z, eye[other].mean(axis=0))
        worst = max(worst, abs(softmax_loss(C, *pair, plan.ridge, plan.noise.scale)))
    assert 0.4 * 2 < worst <= 0.99 * 2


def test_the_exact_loss_of_noise_in_the_objective_stays_below_epsilon_and_half_the_noise_does_not():
    made = SoftLabelDistillation(
        epsilon=1.0, regularization=0.5, fit_intercept=False, protect_public=True
    )
    plan = hiding.ObjectivePlan(made, hiding.Rows(np.ones((4, 1)), 2, 3))
    assert 0.5 < largest_loss(plan, 3) <= 0.99
    assert largest_loss(plan, 3, halved=0.5) > 1.0


def test_a_protected_release_states_both_guarantees():
    X, _ = made_up(n_records=150)
    members = vectors(30, 2, 4)
    for mechanism in ("statistic", "output"):
        made = SoftLabelDistillation(
            epsilon=1.0, mechanism=mechanism, protect_public=True, regularization=0.1
        )
        ensemble = made.combine(members, Public(X))
        assert (ensemble.guarantee.unit, ensemble.public_guarantee.unit) == ("site", "record")
        assert ensemble.public_guarantee.epsilon == ensemble.guarantee.epsilon == pytest.approx(1.0)
        assert OPEN_RECORDS not in ensemble.guarantee.assumptions


@pytest.mark.parametrize("n_classes", [2, 4])
def test_gaussian_noise_in_the_objective_is_calibrated_to_one_profile(n_classes):
    X, _ = made_up(n_records=70)
    made = SoftLabelDistillation(epsilon=1.0, delta=1e-5, regularization=0.05, protect_public=True)
    plan = hiding.ObjectivePlan(made, hiding.Rows(made._in_ball(X), n_classes, 30))
    assert [type(event) for event in plan.events] == [SoftObjectiveGaussian, Closing]
    assert total(plan.events).epsilon == pytest.approx(1.0, rel=1e-9)
    assert total(plan.events).delta == 1e-5
    mu = (69 * math.sqrt(2) / 30 + 2 * math.sqrt(2)) / plan.noise.sigma
    jacobian = (n_classes - 1) * math.log1p(1 / (n_classes * plan.ridge))
    assert n_classes**2 * math.exp(gaussian_log_delta(0.99 - jacobian, mu)) == pytest.approx(
        1e-5, rel=1e-6
    )
    # Pure noise has a deviation of scale·√(D + 1) in each of D dimensions: beyond twenty or so this
    # is less.
    pure = hiding.ObjectivePlan(
        SoftLabelDistillation(epsilon=1.0, regularization=0.05, protect_public=True),
        hiding.Rows(X, n_classes, 30),
    )
    assert plan.noise.sigma < math.sqrt(20) * pure.noise.scale


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(1e6, 0.0), (1e9, 1e-3)]
)  # Gaussian noise fades with the root
def test_noise_in_the_objective_fades_to_the_exact_minimum(epsilon, delta):
    X, _ = made_up(n_records=300)
    for n_classes in (2, 3):
        tally = count_votes(vectors(30, n_classes, 4), Public(X))
        exact = SoftLabelDistillation(epsilon=math.inf, regularization=0.05).combine(tally)
        near = SoftLabelDistillation(
            epsilon=epsilon, delta=delta, regularization=0.05, protect_public=True
        ).combine(tally)
        np.testing.assert_allclose(near.coef, exact.coef, atol=1e-3)


# Releases


def test_a_release_states_epsilon_per_site_and_what_it_rests_on():
    X, y = made_up()
    ensemble = SoftLabelDistillation(epsilon=0.7, delta=1e-6).combine(sites(X, y, 20), Public(X))
    assert ensemble.guarantee.epsilon == pytest.approx(0.7)
    assert (ensemble.guarantee.delta, ensemble.guarantee.unit) == (1e-6, "site")
    assert {TRUSTED, OPEN_RECORDS, READ_CLASSES} <= set(ensemble.guarantee.assumptions)
    declared = SoftLabelDistillation(epsilon=0.7, classes=[0, 1, 2]).combine(
        sites(X, y, 20), Public(X)
    )
    assert READ_CLASSES not in declared.guarantee.assumptions
    assert ensemble.predict_proba(X).shape == (len(X), 3)
    assert [type(event).__name__ for event in ensemble.events] == ["Gaussian", "Closing"]


def test_null_one_is_written_into_the_guarantee_and_draws_less():
    X, _ = made_up()
    tally = count_votes(vectors(20, 2, 4), Public(X))
    one, other = (
        SoftLabelDistillation(epsilon=1.0, neighbours=n).combine(tally)
        for n in ("replace-one", "null-one")
    )
    assert other.guarantee.neighbours == "null-one"
    assert other.events[0].scale == pytest.approx(one.events[0].scale / 2)


def test_seeded_noise_voids_the_guarantee():
    X, _ = made_up()
    for made in (
        SoftLabelDistillation(epsilon=1.0, noise=Noise(seed=1)),
        SoftLabelDistillation(
            epsilon=1.0, regularization=0.1, protect_public=True, noise=Noise(seed=1)
        ),
        VoteDistillation(epsilon=1.0, noise=Noise(seed=1)),
    ):
        ensemble = made.combine(vectors(20, 2, 4), Public(X))
        assert ensemble.guarantee.void_reason == "seeded noise"
        assert ensemble.public_guarantee is None or not ensemble.public_guarantee.holds


def test_a_ledger_is_charged_once_and_a_retry_draws_nothing_new(tmp_path):
    X, _ = made_up()
    ledger = Ledger(tmp_path / "hub.db")
    ledger.allow("study", Budget(epsilon=1.5, unit="site"))
    members, where = vectors(20, 2, 4), {"ledger": ledger, "dataset": "study"}
    first = SoftLabelDistillation(epsilon=1.0).combine(members, Public(X), key="a", **where)
    again = SoftLabelDistillation(epsilon=1.0).combine(members, Public(X), key="a", **where)
    np.testing.assert_array_equal(first.coef, again.coef)
    assert again.regularization == first.regularization
    with pytest.raises(BudgetExceeded):
        SoftLabelDistillation(epsilon=1.0).combine(members, Public(X), key="b", **where)


def test_strength_is_chosen_by_the_noise_where_there_are_no_labels():
    X, _ = made_up(n_records=400)
    weights = Noise(seed=3).open().normal(12).reshape(3, 4)
    members = [
        Member(None, np.arange(3), None, (), 5, weights + m.coef, np.zeros(3))
        for m in vectors(300, 3, 4)
    ]
    tally = count_votes(members, Public(X))
    chosen = [
        SoftLabelDistillation(epsilon=e, regularization="auto", noise=Noise(seed=2))
        .combine(tally)
        .regularization
        for e in (0.05, 0.2, 1.0, 1000.0)
    ]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 100 * chosen[-1]


def test_strength_is_chosen_by_public_labels_where_there_are_some():
    X, y = made_up(n_records=1000)
    members = sites(X, y, 60)
    settings_ = {"epsilon": 0.5, "noise": Noise(seed=4)}
    tally = count_votes(members, Public(X, y))
    best = SoftLabelDistillation(regularization="auto", **settings_).combine(tally)
    errors = [
        np.mean(SoftLabelDistillation(regularization=s, **settings_).combine(tally).predict(X) != y)
        for s in hiding.STRENGTHS
    ]
    assert np.mean(best.predict(X) != y) <= min(errors) + 0.01


def test_many_weak_members_of_mixed_kinds_teach_a_good_one():
    X, y = made_up(n_records=2000)
    members = sites(
        X, y, 200, kinds=[DecisionTreeClassifier, GaussianNB, LogisticRegression]
    )  # ten records each
    alone = np.mean([np.mean(member.predict(X[:300]) == y[:300]) for member in members])
    joined = SoftLabelDistillation(epsilon=1.0, delta=1e-6, regularization="auto").combine(
        members, Public(X[:300])
    )
    assert np.mean(joined.predict(X) == y) > alone + 0.03


# Comparators


def test_the_papers_noise_is_the_tight_one_at_least_doubled():
    X, _ = made_up()
    tally = count_votes(vectors(20, 2, 4), Public(X))
    tight, paper = (
        SoftLabelDistillation(
            epsilon=1.0, mechanism="output", regularization=0.1, calibration=c
        ).combine(tally)
        for c in ("tight", "hamm2016")
    )
    assert paper.events[0].scale >= 2 * tight.events[0].scale
    assert paper.guarantee.epsilon == pytest.approx(tight.guarantee.epsilon)


# Refusals


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0.0},
        {"epsilon": True},
        {"delta": 1.0},
        {"mechanism": "objective"},
        {"neighbours": "add-remove"},
        {"regularization": "none"},
        {"regularization": "auto", "mechanism": "output"},
        {"regularization": "auto", "protect_public": True},
        {"neighbours": "null-one", "protect_public": True},
        {"calibration": "hamm2016"},
        {"soft": "scores"},
        {"data_norm": -1.0},
        {"noise": 3},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    X, _ = made_up()
    with pytest.raises(SettingsError):
        SoftLabelDistillation(**{"epsilon": 1.0, **wrong}).combine(vectors(5, 2, 4), Public(X))


def test_members_that_do_not_fit_are_refused():
    X, _ = made_up()
    made = SoftLabelDistillation(epsilon=1.0)
    with pytest.raises(SettingsError, match="public records"):
        made.combine(vectors(5, 2, 4))
    with pytest.raises(SchemaMismatch, match="not declared"):
        SoftLabelDistillation(epsilon=1.0, classes=[0, 1]).combine(vectors(5, 3, 4), Public(X))
    with pytest.raises(SchemaMismatch, match="features"):
        made.combine(vectors(5, 2, 3), Public(X))
    with pytest.raises(SettingsError, match="classifiers"):
        made.combine([Member(None, None, None, (), 5, np.ones((1, 4)), np.zeros(1))], Public(X))
    with pytest.raises(SettingsError, match="two different classes"):
        made.combine([Says([1, 1], classes=[1])], Public(X))
    with pytest.raises(SettingsError, match="all zero"):
        SoftLabelDistillation(epsilon=1.0, fit_intercept=False).combine(
            vectors(5, 2, 4), Public(0 * X)
        )
    with pytest.raises(SettingsError, match="mechanism"):
        VoteDistillation(epsilon=1.0, mechanism="statistic").combine(vectors(5, 2, 4), Public(X))


@settings(max_examples=25, deadline=None)
@given(epsilon=st.floats(1e-3, 50), more=st.floats(1.01, 10))
def test_more_epsilon_never_means_more_noise(epsilon, more):
    X, _ = made_up(n_records=40)
    rows = hiding.Rows(X, 3, 25)
    scales = []
    for value in (epsilon, epsilon * more):
        pure = hiding.StatisticPlan(SoftLabelDistillation(epsilon=value), rows).noise
        gauss = hiding.StatisticPlan(SoftLabelDistillation(epsilon=value, delta=1e-5), rows).noise
        assert isinstance(gauss, Gaussian)
        scales.append((pure.scale, gauss.sigma))
    assert scales[1][0] < scales[0][0]
    assert scales[1][1] < scales[0][1]
