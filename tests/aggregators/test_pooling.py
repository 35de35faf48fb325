import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression

from consilience import Budget, Ledger, Noise, PrivateLogisticRegression
from consilience.aggregators import pooling
from consilience.aggregators.members import DISJOINT
from consilience.aggregators.outliers import find_heavy
from consilience.aggregators.pooling import CHANCE, PooledCounts, PrivateLeafCounts, Structure
from consilience.aggregators.votes import WeightedVote
from consilience.errors import BudgetExceeded, SchemaMismatch, SettingsError
from consilience.learners.trees import forest as trees
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import PrivateForestClassifier, Shape
from consilience.learners.trees.leaves import NoisyLeaves
from consilience.privacy.accounting import total
from consilience.tables.public import Public

BINS = Bins.even(-1, 1, n_features=3, n_bins=8)


def table(n, seed, d=3):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, d))
    return X, (X @ [3.0, -2.0, 1.0] + 0.3 * rng.normal(size=n) > 0).astype(int)


def structure(seed=0, **settings):
    settings = {"n_trees": 4, "max_depth": 3} | settings
    return Structure.random(BINS, [0, 1], random_state=seed, **settings)


def counted(n=300, seed=0, epsilon=1.0, scaffold=None, **settings):
    scaffold = structure() if scaffold is None else scaffold
    return PrivateLeafCounts(epsilon=epsilon, structure=scaffold, **settings).fit(*table(n, seed))


# --------------------------------------------------------------------------------------- structures


def test_one_public_seed_gives_every_site_the_same_trees():
    one, two, other = structure(3), structure(3), structure(4)
    np.testing.assert_array_equal(one.shape.feature, two.shape.feature)
    np.testing.assert_array_equal(one.shape.last, two.shape.last)
    assert not np.array_equal(one.shape.last, other.shape.last)
    assert one.shape.feature.shape == (4, 7)


def test_forests_with_random_splits_and_one_seed_can_be_pooled_as_they_are():
    settings = {
        "splitter": "random",
        "assignment": "all",
        "bins": BINS,
        "classes": [0, 1],
        "random_state": 5,
    }
    members = [
        PrivateForestClassifier(epsilon=e, n_trees=3, max_depth=2, **settings).fit(*table(200, s))
        for s, e in enumerate((0.5, 2.0))
    ]
    ensemble = PooledCounts("equal").combine(members)
    np.testing.assert_array_equal(ensemble.counts, members[0].counts_ + members[1].counts_)
    assert ensemble.variance == pytest.approx(members[0].leaf_variance_ + members[1].leaf_variance_)


def test_a_structure_of_public_records_is_the_greedy_one_and_costs_nothing():
    X, y = table(400, 9)
    found = Structure.greedy(Public(X, y), BINS, [0, 1], n_trees=3, max_depth=2, max_features=None)
    assert found.guarantee is None
    assert (found.shape.feature[:, 0] == 0).all()  # the first feature is the most informative
    ensemble = PooledCounts().combine([counted(scaffold=found, epsilon=0.5)])
    assert ensemble.guarantee.epsilon == pytest.approx(0.5)
    with pytest.raises(SettingsError, match="labelled"):
        Structure.greedy(Public(X), BINS, [0, 1])


def forest(epsilon=1.0, seed=0, n=500):
    settings = {"bins": BINS, "classes": [0, 1], "n_trees": 3, "max_depth": 2}
    return PrivateForestClassifier(epsilon=epsilon, **settings).fit(*table(n, seed))


def test_a_structure_of_a_sites_forest_is_paid_for_by_that_site():
    """With the forest among the members its own guarantee covers its trees; without, they come on
    top.
    """
    grown = forest(1.0)
    others = [counted(seed=s, epsilon=0.5, scaffold=Structure.of(grown)) for s in (1, 2)]
    together = PooledCounts().combine([grown, *others])
    assert together.guarantee.epsilon == pytest.approx(1.0)
    assert [g.epsilon for g in together.guarantees] == pytest.approx([1.0, 0.5, 0.5])
    assert PooledCounts().combine(others).guarantee.epsilon == pytest.approx(1.5)


def test_a_seeded_forest_voids_what_is_built_on_it():
    grown = PrivateForestClassifier(
        epsilon=1.0, bins=BINS, classes=[0, 1], n_trees=2, max_depth=2, noise=Noise(seed=1)
    )
    scaffold = Structure.of(grown.fit(*table(100, 0)))
    assert not PooledCounts().combine([counted(scaffold=scaffold)]).guarantee.holds


# -------------------------------------------------------------------------------------- leaf counts


def slow_counts(scaffold, X, y):
    """Walk every record down every tree."""
    codes, shape = scaffold.bins.codes(X), scaffold.shape
    out = np.zeros((len(shape.feature), 2**shape.depth, len(scaffold.classes)), dtype=int)
    for tree, record in itertools.product(range(len(shape.feature)), range(len(y))):
        node = 0
        for _ in range(shape.depth):
            code, last = codes[record, shape.feature[tree, node]], shape.last[tree, node]
            left = code == last if shape.single[tree, node] else code <= last
            node = 2 * node + (1 if left else 2)
        out[tree, node - (2**shape.depth - 1), scaffold.classes.index(y[record])] += 1
    return out


def test_without_noise_every_record_is_counted_in_every_tree():
    X, y = table(60, 2)
    scaffold = structure()
    found = PrivateLeafCounts(epsilon=math.inf, structure=scaffold, assignment="all").fit(X, y)
    np.testing.assert_array_equal(found.counts_, slow_counts(scaffold, X, y))
    apart = PrivateLeafCounts(epsilon=math.inf, structure=scaffold, assignment="disjoint").fit(X, y)
    assert apart.counts_.sum() == 60
    assert (apart.counts_ <= found.counts_).all()
    assert found.public_size_ == apart.public_size_ == 60


def test_categories_and_missing_values_are_counted_where_the_bins_say():
    bins = Bins([[0.5, 1.5, 2.5], [0.0]], categorical=[True, False], missing="high")
    scaffold = Structure.random(bins, ["a", "b"], n_trees=3, max_depth=2, random_state=1)
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.integers(0, 4, 50).astype(float), rng.normal(size=50)])
    X[::7, 1] = np.nan
    y = np.where(rng.uniform(size=50) < 0.5, "a", "b")
    found = PrivateLeafCounts(epsilon=math.inf, structure=scaffold, assignment="all").fit(X, y)
    np.testing.assert_array_equal(found.counts_, slow_counts(scaffold, X, y))
    ensemble = PooledCounts().combine([found])
    np.testing.assert_allclose(ensemble.predict_proba(X), found.predict_proba(X))
    assert set(ensemble.predict(X)) <= {"a", "b"}


def test_the_whole_budget_goes_to_the_leaves():
    found = counted(epsilon=0.5, assignment="all")
    assert found.leaf_variance_ == pytest.approx(2 * (4 / 0.5) ** 2)
    assert counted(epsilon=0.5, assignment="disjoint").leaf_variance_ == pytest.approx(
        2 * (1 / 0.5) ** 2
    )
    assert found.guarantee_.epsilon == pytest.approx(0.5)
    assert total(found.events_).epsilon == pytest.approx(0.5)
    with_delta = counted(epsilon=0.5, delta=1e-5)
    assert with_delta.guarantee_.epsilon <= 0.5
    assert with_delta.guarantee_.delta == 1e-5


def test_leaf_counts_are_charged_first_and_drawn_once(tmp_path):
    ledger = Ledger(tmp_path / "site.ledger")
    ledger.allow("ward", Budget(epsilon=1.0, neighbours="add-remove"))
    learner, charged = (
        PrivateLeafCounts(epsilon=0.6, structure=structure()),
        {"ledger": ledger, "dataset": "ward"},
    )
    first = clone(learner).fit(*table(100, 0), key="once", **charged)
    again = clone(learner).fit(*table(100, 0), key="once", **charged)
    np.testing.assert_array_equal(first.counts_, again.counts_)
    assert ledger.balance("ward").left.epsilon == pytest.approx(0.4)
    with pytest.raises(BudgetExceeded):
        clone(learner).fit(*table(100, 0), **charged)


def test_another_structure_can_be_set_before_a_second_fit():
    learner = PrivateLeafCounts(epsilon=1.0, structure=structure())
    learner.fit(*table(50, 0))
    learner.set_params(structure=structure(1, n_trees=2, max_depth=1)).fit(*table(50, 0))
    assert learner.counts_.shape == (2, 2, 2)
    with pytest.raises(SettingsError, match="a Structure"):
        PrivateLeafCounts(epsilon=1.0, structure=None).fit(*table(50, 0))


def test_persons_have_at_most_their_cap_and_their_records_stay_hidden():
    X, y = table(60, 0)
    persons = np.repeat(np.arange(6), 10)
    settings = {
        "structure": structure(),
        "unit": "person",
        "records_per_person": 2,
        "assignment": "all",
    }
    exact = PrivateLeafCounts(epsilon=math.inf, **settings).fit(X, y, persons=persons)
    assert exact.counts_.sum(axis=(1, 2)).tolist() == [12] * 4
    noisy = PrivateLeafCounts(epsilon=1.0, neighbours="replace-one", **settings).fit(
        X, y, persons=persons
    )
    assert noisy.public_size_ == max(
        1, round(float(noisy.counts_.sum() / 4))
    )  # nothing but the noisy counts
    assert noisy.guarantee_.unit == "person"


# ------------------------------------------------------------------------------------------ pooling


def test_pooled_exact_counts_are_those_of_all_records_together():
    X, y = table(300, 4)
    scaffold = structure()
    parts = [slice(0, 20), slice(20, 120), slice(120, 300)]
    settings = {"epsilon": math.inf, "structure": scaffold, "assignment": "all"}
    members = [PrivateLeafCounts(**settings).fit(X[part], y[part]) for part in parts]
    whole = PrivateLeafCounts(**settings).fit(X, y)
    for weights in ("precision", "equal"):
        ensemble = PooledCounts(weights).combine(members)
        np.testing.assert_allclose(ensemble.counts, whole.counts_)
        np.testing.assert_allclose(ensemble.predict_proba(X), whole.predict_proba(X))
        assert ensemble.variance == 0


def test_precision_weighs_noise_against_records():
    members = [counted(2000, 0, 2.0, assignment="all"), counted(1000, 1, 0.5, assignment="all")]
    n = [m.counts_.sum() / (4 * 8) for m in members]
    expected = np.array(
        [k * CHANCE / (k * CHANCE + m.leaf_variance_) for k, m in zip(n, members, strict=True)]
    )
    ensemble = PooledCounts().combine(members)
    scales = expected / expected.max()
    counts = scales * [m.counts_.sum() for m in members]  # a share is that of a member's counts
    np.testing.assert_allclose(ensemble.weights, counts / counts.sum())
    np.testing.assert_allclose(
        ensemble.counts, sum(s * m.counts_ for s, m in zip(scales, members, strict=True))
    )
    assert ensemble.variance == pytest.approx(
        sum(s**2 * m.leaf_variance_ for s, m in zip(scales, members, strict=True))
    )
    leaves = NoisyLeaves(ensemble.shape, ensemble.bins, ensemble.counts, ensemble.variance)
    np.testing.assert_allclose(ensemble.values, leaves.values)
    np.testing.assert_allclose(ensemble.calibration.offset, leaves.calibration.offset)


def test_the_stated_variance_is_that_of_the_noise():
    """60 sums of 64 counts: the variance's estimate has a relative error of about 4 %; 25 % is six
    of them.
    """
    X, y = table(50, 0)
    scaffold = structure()
    exact = slow_counts(scaffold, X, y)
    errors, stated = [], set()
    for run in range(60):
        settings = {"structure": scaffold, "assignment": "all"}
        members = [
            PrivateLeafCounts(epsilon=e, noise=Noise(seed=10 * run + i), **settings).fit(X, y)
            for i, e in enumerate((4.0, 8.0))
        ]
        ensemble = PooledCounts("equal").combine(members)
        errors.append(ensemble.counts - 2 * exact)
        stated.add(ensemble.variance)
    assert np.var(errors) == pytest.approx(stated.pop(), rel=0.25)


def test_many_small_sites_together_beat_the_average_site():
    scaffold = structure(n_trees=10)
    X, y = table(2000, 99)
    members = [counted(300, s, 0.5, scaffold, noise=Noise(seed=s)) for s in range(10)]
    alone = [np.mean(m.predict(X) == y) for m in members]
    assert np.mean(PooledCounts().combine(members).predict(X) == y) > np.mean(alone) + 0.03


def test_order_of_members_does_not_matter():
    members = [counted(100 * s, s, s) for s in (1, 2, 3)]
    X, _ = table(20, 7)
    one, two = PooledCounts().combine(members), PooledCounts().combine(members[::-1])
    np.testing.assert_allclose(one.predict_proba(X), two.predict_proba(X))
    np.testing.assert_allclose(one.weights, two.weights[::-1])


def test_pruned_pools_are_the_pruned_probabilities():
    members = [counted(200, s, 0.3) for s in range(2)]
    found = PooledCounts("equal", prune=True).combine(members)
    leaves = NoisyLeaves(found.shape, found.bins, found.counts, found.variance, prune=True)
    np.testing.assert_allclose(found.values, leaves.values)


def test_a_record_keeps_the_guarantee_of_its_own_site():
    ensemble = PooledCounts().combine([counted(epsilon=0.5), counted(seed=1, epsilon=2.0)])
    assert [g.epsilon for g in ensemble.guarantees] == pytest.approx([0.5, 2.0])
    assert ensemble.guarantee.epsilon == pytest.approx(2.0)
    assert DISJOINT in ensemble.guarantee.assumptions
    assert not PooledCounts().combine([counted(noise=Noise(seed=0))]).guarantee.holds


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (structure(1), "splits"),
        (structure(n_trees=2), "number of trees or depth"),
        (structure(max_depth=2), "number of trees or depth"),
        (
            Structure.random(
                Bins.even(-2, 1, n_features=3, n_bins=8), [0, 1], n_trees=4, max_depth=3
            ),
            "bins",
        ),
        (Structure.random(BINS, [1, 0], n_trees=4, max_depth=3), "classes"),
    ],
)
def test_members_of_other_structures_are_refused(other, problem):
    with pytest.raises(SchemaMismatch, match=problem):
        PooledCounts().combine([counted(), counted(scaffold=other)])


def test_members_without_leaf_counts_are_refused():
    for other in (LogisticRegression(), PrivateLogisticRegression(epsilon=1.0)):
        with pytest.raises(SettingsError, match="no leaf counts"):
            PooledCounts().combine([counted(), other.fit(*table(50, 0))])
    with pytest.raises(SettingsError, match="'precision' or 'equal'"):
        PooledCounts("most")


# ------------------------------------------------------------------------------------------- audits

STUMPS = Structure(
    Shape(np.zeros((2, 1), np.int64), np.array([[0], [1]]), np.zeros((2, 1), np.bool_)),
    Bins([[0.5, 1.5]]),
    (0, 1),
)
RECORDS = [(x, label) for x in (0.0, 1.0) for label in (0, 1)]
EPSILON = 0.7


def worlds(records, monkeypatch, *, assignment, neighbours, place=None, halve=False):
    """Return the scale of the noise and every (probability, exact counts) it may be added to.

    A record's tree is uniform and drawn for itself alone (`place` None), or given by a broken
    twin's rule.
    """
    X, y = (
        np.array([[x] for x, _ in records]).reshape(-1, 1),
        np.array([k for _, k in records], dtype=int),
    )
    n = len(records)
    every = (
        list(itertools.product((0, 1), repeat=n))
        if place is None
        else [tuple(place(i, n) for i in range(n))]
    )
    out = []
    for owner in every if assignment == "disjoint" else every[:1]:
        seen = []

        def look(counts, plan, source, seen=seen):
            seen.append((counts.ravel(), plan.leaves.scale / (2 if halve else 1)))
            return counts

        monkeypatch.setattr(trees, "add_noise", look)
        monkeypatch.setattr(
            pooling, "owners", lambda task, n_trees, source, owner=owner: np.array(owner, dtype=int)
        )
        settings = {"assignment": assignment, "neighbours": neighbours}
        PrivateLeafCounts(epsilon=EPSILON, structure=STUMPS, **settings).fit(X, y)
        monkeypatch.undo()
        out.append(seen[0])
    share = 1 / len(out)
    return out[0][1], [(share, counts) for counts, _ in out]


OUTPUTS = np.array(
    list(itertools.product((0, 1, 2), repeat=8))
)  # beyond all counts the ratio stays what it is


def log_likelihood(scale, mixture):
    return np.log(
        sum(p * np.exp(-np.abs(OUTPUTS - counts).sum(axis=1) / scale) for p, counts in mixture)
    )


def worst_loss(monkeypatch, neighbours, **how):
    """Return the greatest loss over all tables of up to two records, all neighbours and all
    outputs.
    """
    how |= {"neighbours": neighbours}
    sizes = (0, 1, 2) if neighbours == "add-remove" else (1, 2)
    kept = {}

    def logs(records):
        if records not in kept:
            kept[records] = log_likelihood(*worlds(records, monkeypatch, **how))
        return kept[records]

    loss = 0.0
    for n in sizes[:-1] if neighbours == "add-remove" else sizes:
        for records in itertools.combinations_with_replacement(RECORDS, n):
            for record, at in itertools.product(
                RECORDS, range(n + 1 if neighbours == "add-remove" else n)
            ):
                rest = records[at:] if neighbours == "add-remove" else records[at + 1 :]
                loss = max(
                    loss, float(np.abs(logs(records) - logs((*records[:at], record, *rest))).max())
                )
    return loss


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
@pytest.mark.parametrize("assignment", ["all", "disjoint"])
def test_the_loss_of_leaf_counts_is_at_most_epsilon_by_enumeration(
    assignment, neighbours, monkeypatch
):
    loss = worst_loss(monkeypatch, neighbours, assignment=assignment)
    assert loss <= EPSILON * (1 + 1e-9)
    assert loss > 0.8 * EPSILON  # the enumeration has power


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_half_the_noise_is_caught_by_enumeration(neighbours, monkeypatch):
    assert worst_loss(monkeypatch, neighbours, assignment="all", halve=True) > 1.9 * EPSILON


def test_records_assigned_to_trees_by_position_are_caught_by_enumeration(monkeypatch):
    """Row 4: an additional record moves others to another tree."""
    by_position = {"assignment": "disjoint", "place": lambda i, n: min(1, i // max(1, n // 2))}
    assert worst_loss(monkeypatch, "add-remove", **by_position) > 1.9 * EPSILON


def in_another_world(learner, X, y):
    """Return what another table would have released, had its noise come out so that the releases
    are equal.
    """
    other = type(learner)(**learner.get_params()).fit(X, y)
    other.restore_state(learner.released_state())
    return other


class BySizeOfTheTable(PooledCounts):
    """Weighs by how many records a site really has."""

    def combine(self, members, public=None):
        found = super().combine(members, public)
        sizes = np.array([len(member.seen) for member in members], dtype=float)
        return replace(found, weights=sizes / sizes.sum())


def looks_beyond_releases(aggregator):
    """Whether two worlds in which every site released the same differ in their ensembles."""
    first = [counted(60, s) for s in range(3)]
    second = [in_another_world(learner, *table(60 + s, 70 + s)) for s, learner in enumerate(first)]
    seen = []
    for members, more in ((first, 0), (second, 1)):
        for s, member in enumerate(members):
            member.seen = np.zeros(60 + more * s)
        found = aggregator.combine(members)
        seen.append(
            np.concatenate(
                [found.weights, found.counts.ravel(), found.values.ravel(), [found.variance]]
            )
        )
    return not np.array_equal(*seen)


@pytest.mark.parametrize("weights", ["precision", "equal"])
def test_equal_releases_make_equal_ensembles(weights):
    assert not looks_beyond_releases(PooledCounts(weights))


def test_weights_from_the_records_are_caught():
    assert looks_beyond_releases(BySizeOfTheTable())


class TellsItsSize(PrivateLeafCounts):
    """Row 10: the number of records, under a relation that hides it."""

    def _train(self, task, plan, source):
        super()._train(task, plan, source)
        self.public_size_ = len(task.y)


def extras(kind):
    """Return fitted attributes that differ between worlds whose noisy counts are the same, and that
    hold a source.
    """
    X, y = table(41, 0)
    found = [
        kind(epsilon=1.0, structure=structure(), noise=Noise(seed=s)).fit(X[:n], y[:n])
        for s, n in ((0, 40), (1, 41))
    ]
    names = {
        name
        for name in vars(found[0])
        if repr(vars(found[0])[name]) != repr(vars(found[1]).get(name))
    }
    sizes = [one.public_size_ == max(1, round(float(one.counts_.sum()))) for one in found]
    # what leaves say is computed from counts_
    return names - {"counts_", "values_", "_leaves", "noise", "public_size_"} | (
        set() if all(sizes) else {"public_size_"}
    )


def test_nothing_but_noisy_counts_leaves_the_site():
    assert extras(PrivateLeafCounts) == set()
    assert extras(TellsItsSize) == {"public_size_"}


# ------------------------------------------------------------------------- the cost of a structure


def grown(seed, epsilon=5.0):
    forest = PrivateForestClassifier(
        epsilon=epsilon, n_trees=1, max_depth=1, bins=BINS, classes=[0, 1], assignment="all"
    )
    return forest.fit(*table(400, seed))


def with_trees_of(other, forest):
    """Return `other` with the trees of `forest`: equal splits by chance."""
    other.shape_ = forest.shape_
    return other


def test_a_structure_is_paid_for_even_if_another_greedy_forest_has_equal_splits():
    origin = grown(0)
    scaffold = Structure.of(origin)
    members = [counted(200, seed, scaffold=scaffold) for seed in (1, 2)]
    stranger = with_trees_of(grown(3, epsilon=1.0), origin)
    assert PooledCounts().combine(members).guarantee.epsilon == pytest.approx(6.0)
    assert PooledCounts().combine([*members, stranger]).guarantee.epsilon == pytest.approx(6.0)
    assert PooledCounts().combine([*members, origin]).guarantee.epsilon == pytest.approx(5.0)


def test_different_structures_of_equal_cost_are_both_paid_for():
    first, second = grown(0), grown(1)
    second = with_trees_of(second, first)
    scaffolds = [Structure.of(first), Structure.of(second)]
    assert scaffolds[0].guarantee == scaffolds[1].guarantee
    members = [counted(200, 5, scaffold=scaffold) for scaffold in scaffolds]
    assert PooledCounts().combine(members).guarantee.epsilon == pytest.approx(11.0)
    again = [counted(200, seed, scaffold=scaffolds[0]) for seed in (1, 2)]
    assert PooledCounts().combine(again).guarantee.epsilon == pytest.approx(6.0)


def test_a_structure_taken_from_leaf_counts_costs_what_it_cost_them():
    origin = grown(0, epsilon=5.0)
    first = counted(200, 1, scaffold=Structure.of(origin))
    second = counted(200, 2, scaffold=Structure.of(first))
    assert PooledCounts().combine([second]).guarantee.epsilon == pytest.approx(6.0)


def test_votes_pay_for_the_structures_of_their_members_too():
    members = [counted(200, seed, scaffold=Structure.of(grown(10 * seed))) for seed in (1, 2)]
    members[1].structure = replace(members[1].structure, shape=members[0].structure.shape)
    members[1].remember_settings()  # as if it had been fitted so
    assert WeightedVote().combine(members[:1]).guarantee.epsilon == pytest.approx(6.0)
    together = WeightedVote().combine(members).guarantee
    assert together.epsilon == pytest.approx(11.0)
    assert "every member is of another site" in together.assumptions[-1]


def test_a_member_whose_counts_are_most_of_the_pool_is_heavy():
    members = [counted(100, 0), counted(100, 1), counted(5000, 2)]
    for weights in ("precision", "equal"):
        ensemble = PooledCounts(weights).combine(members)
        assert ensemble.weights[2] > 0.9
        assert list(find_heavy(ensemble)) == [2]
