"""Trees and forests: exact ones against brute force, noisy ones against what was charged."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from consilience import Budget, Ledger, Noise
from consilience.errors import ConsilienceError, SchemaMismatch, SettingsError
from consilience.learners.trees import forest as trees
from consilience.learners.trees import histograms
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import (
    PrivateForestClassifier,
    PrivateTreeClassifier,
    candidates_of,
    plan_trees,
)
from consilience.learners.trees.histograms import STEPS, count, impurities
from consilience.privacy.accounting import Laplace, total

FALSE_ALARM = 1e-6
BOTH = [PrivateTreeClassifier, PrivateForestClassifier]
RELATIONS = ["add-remove", "replace-one"]


def table(n, n_features=3, n_classes=3, seed=0):
    source = Noise(seed=seed).open()
    X = source.uniform(n * n_features).reshape(n, n_features)
    y = np.minimum(
        (X[:, 0] * n_classes + 0.4 * source.normal(n)).clip(0).astype(int), n_classes - 1
    )
    return X, y


# -------------------------------------------------------------------------------------- sensitivity


def steps_of(codes, y, weight, bins, n_classes):
    feature, place, last, single = candidates_of(bins, bins.splittable)
    counts = np.zeros((1, len(bins.splittable), int(bins.sizes.max()), n_classes), np.int64)
    count(codes, y, weight, np.zeros(len(y), np.int64), bins.splittable, counts)
    out = np.empty((1, len(feature)), np.int64)
    impurities(counts, place, last, single, out)
    return out[0]


MIXED = Bins([[1, 2], [1], [1, 2, 3]], categorical=[True, False, False])
RECORDS = st.tuples(
    st.integers(0, 2), st.integers(0, 1), st.integers(0, 3), st.integers(0, 2), st.integers(0, 5000)
)


@settings(max_examples=150, deadline=None)
@given(crowd=st.lists(RECORDS, max_size=8), new=RECORDS, grain=st.sampled_from([1, 7, 256]))
def test_an_arrival_moves_every_impurity_by_nought_to_two_of_its_weight(crowd, new, grain):
    """In whole steps; a weight is at most `grain`, and records may share a cell."""
    rows = np.array([*crowd, new], dtype=np.int64)
    weight = np.minimum(rows[:, 4], grain)
    weight[:-1] = rows[:-1, 4]  # a crowd of records in one cell
    codes, y = rows[:, :3].astype(np.uint8), rows[:, 3].copy()
    after = steps_of(codes, y, weight, MIXED, 3)
    before = steps_of(codes[:-1], y[:-1], weight[:-1], MIXED, 3) if crowd else np.zeros_like(after)
    assert (after >= before).all()
    assert (after - before <= 2 * STEPS * weight[-1]).all()


def test_the_bound_of_two_is_approached_and_not_met():
    bins, weight = Bins([[1.0]]), np.array([10**6, 1])
    codes, y = np.zeros((2, 1), np.uint8), np.array([0, 1])
    (moved,) = steps_of(codes, y, weight, bins, 2) - steps_of(codes[:1], y[:1], weight[:1], bins, 2)
    assert 2 * STEPS * (1 - 1e-5) < moved < 2 * STEPS


@settings(max_examples=60, deadline=None)
@given(crowd=st.lists(RECORDS, min_size=1, max_size=12))
def test_impurities_are_those_of_the_definition_to_the_last_step(crowd):
    rows = np.array(crowd, dtype=np.int64)
    found = steps_of(rows[:, :3].astype(np.uint8), rows[:, 3].copy(), rows[:, 4].copy(), MIXED, 3)
    assert found.tolist() == [
        by_definition(rows, *split) for split in zip(*MIXED.candidates, strict=True)
    ]


def by_definition(rows, feature, last, single):
    left = rows[:, feature] == last if single else rows[:, feature] <= last
    whole = 0
    for child in (rows[left], rows[~left]):
        sizes = [int(child[child[:, 3] == k, 4].sum()) for k in range(3)]
        if sum(sizes):
            whole += math.floor(
                STEPS * (sum(sizes) - Fraction(sum(size**2 for size in sizes), sum(sizes)))
            )
    return whole


# ----------------------------------------------------------------------------------- exact training


def brute_force(rows, bins, depth):
    """Grow a tree by its definition, node by node; return its splits and leaves, left to right."""
    level, splits = [rows], []
    for _ in range(depth):
        below = []
        for node in level:
            scores = [by_definition(node, *split) for split in zip(*bins.candidates, strict=True)]
            feature, last, single = (
                column[scores.index(min(scores))] for column in bins.candidates
            )
            splits.append((int(feature), int(last)))
            left = node[:, feature] == last if single else node[:, feature] <= last
            below += [node[left], node[~left]]
        level = below
    return splits, [[int((leaf[:, 3] == k).sum()) for k in range(3)] for leaf in level]


@settings(max_examples=40, deadline=None)
@given(crowd=st.lists(RECORDS, min_size=1, max_size=25), depth=st.integers(1, 3))
def test_without_privacy_a_tree_is_the_greedy_tree_of_brute_force(crowd, depth):
    rows = np.array(crowd, dtype=np.int64)
    rows[:, 4] = 1
    model = PrivateTreeClassifier(epsilon=math.inf, bins=MIXED, max_depth=depth, classes=[0, 1, 2])
    model.fit(rows[:, :3].astype(float), rows[:, 3])
    splits, leaves = brute_force(rows, MIXED, depth)
    assert (
        list(zip(model.shape_.feature[0].tolist(), model.shape_.last[0].tolist(), strict=True))
        == splits
    )
    assert model.counts_[0].tolist() == leaves
    assert model.public_size_ == len(rows)


@pytest.mark.parametrize("learner", BOTH)
def test_without_privacy_a_separable_problem_is_learned(learner):
    X, _ = table(2000)
    y = (X[:, 0] > 0.5).astype(int) + (X[:, 1] > 0.25)
    fitted = learner(epsilon=math.inf, bounds=(0, 1), max_depth=3).fit(X, y)
    assert fitted.score(X, y) == 1.0
    assert fitted.guarantee_.epsilon == math.inf


@pytest.mark.parametrize("splitter", ["greedy", "random"])
def test_a_disjoint_forest_counts_each_record_once_and_a_shared_one_in_every_tree(splitter):
    X, y = table(500)
    settings_ = {
        "epsilon": math.inf,
        "bounds": (0, 1),
        "n_trees": 4,
        "splitter": splitter,
        "max_depth": 2,
    }
    apart = PrivateForestClassifier(assignment="disjoint", **settings_).fit(X, y)
    together = PrivateForestClassifier(assignment="all", **settings_).fit(X, y)
    assert apart.counts_.sum(axis=(0, 1)).tolist() == np.bincount(y).tolist()
    assert (together.counts_.sum(axis=1) == np.bincount(y)).all()
    sizes = apart.counts_.sum(axis=(1, 2))
    assert stats.chisquare(sizes).pvalue > FALSE_ALARM  # false alarm once in a million
    assert apart.public_size_ == together.public_size_ == 500


def test_a_split_on_categories_sends_one_of_them_left():
    X = np.repeat([[0.0], [1.0], [2.0]], 50, axis=0)
    y = (X[:, 0] == 1.0).astype(int)
    kinds = PrivateTreeClassifier(
        epsilon=math.inf, bins=Bins([[0.5, 1.5]], categorical=[True]), max_depth=1
    ).fit(X, y)
    assert kinds.score(X, y) == 1.0
    ordered = PrivateTreeClassifier(epsilon=math.inf, bins=Bins([[0.5, 1.5]]), max_depth=1).fit(
        X, y
    )
    assert ordered.score(X, y) < 1.0


@pytest.mark.parametrize("missing", ["low", "high"])
def test_missing_values_are_learned_from_where_they_have_a_place(missing):
    X = np.repeat([[math.nan], [0.2], [0.8]], 60, axis=0)
    y = np.isnan(X[:, 0]).astype(int)
    bins = Bins.even(0, 1, n_features=1, n_bins=4, missing=missing)
    assert PrivateTreeClassifier(epsilon=math.inf, bins=bins).fit(X, y).score(X, y) == 1.0
    with pytest.raises(ValueError, match="NaN"):
        PrivateTreeClassifier(epsilon=1.0, bounds=(0, 1)).fit(X, y)


# -------------------------------------------------------------------------------------- metamorphic


SEEDED = {
    "epsilon": 2.0,
    "bounds": (0, 1),
    "max_depth": 3,
    "noise": Noise(seed=4),
    "random_state": 0,
}


def names_carry_over(learner):
    """Tell whether renaming and reordering classes only renames the predictions (row 6)."""
    X, y = table(400)
    exact = {**SEEDED, "epsilon": math.inf}
    plain = learner(classes=[0, 1, 2], **SEEDED).fit(X, y).predict_proba(X)
    names = np.array(["no", "maybe", "yes"])
    named = learner(classes=names, **SEEDED).fit(X, names[y])
    forward = learner(classes=[0, 1, 2], **exact).fit(X, y)
    turned = learner(classes=[2, 0, 1], **exact).fit(X, y)
    return (
        np.array_equal(named.predict_proba(X), plain)
        and np.array_equal(named.predict(X), names[plain.argmax(axis=1)])
        and np.allclose(turned.predict_proba(X)[:, [1, 2, 0]], forward.predict_proba(X), atol=1e-12)
        and np.array_equal(turned.predict(X), forward.predict(X))
    )


@pytest.mark.parametrize("learner", BOTH)
def test_predictions_carry_the_names_of_the_classes(learner):
    assert names_carry_over(learner)


@pytest.mark.parametrize("learner", BOTH)
def test_row_6_raw_labels_in_leaves_are_caught(learner, monkeypatch):
    """A twin whose leaves count labels, not their indices: a label 2 is counted in the third."""
    real, encode, raw = histograms.count_leaves, trees.label_codes, {}

    def remember(self, classes, values):
        if classes.dtype.kind == "i":
            raw.update(zip(encode(self, classes, classes).tolist(), classes.tolist(), strict=True))
        else:
            raw.clear()
        return encode(self, classes, values)

    def twin(y, weight, node, counts):
        real(np.array([raw.get(k, k) for k in y.tolist()], np.int64), weight, node, counts)

    monkeypatch.setattr(trees, "label_codes", remember)
    monkeypatch.setattr(histograms, "count_leaves", twin)
    assert not names_carry_over(learner)


def test_the_order_of_features_does_not_matter():
    X, y = table(600, n_features=4)
    order = np.array([2, 0, 3, 1])
    exact = {**SEEDED, "epsilon": math.inf, "max_features": None}
    one, other = (PrivateTreeClassifier(**exact).fit(rows, y) for rows in (X, X[:, order]))
    assert np.array_equal(one.predict_proba(X), other.predict_proba(X[:, order]))
    assert np.array_equal(one.feature_importances_[order], other.feature_importances_)
    # Further down in small trees splits can be equally good, and the first of them is taken.
    one, other = (
        PrivateForestClassifier(n_trees=4, **exact).fit(rows, y) for rows in (X, X[:, order])
    )
    assert np.array_equal(one.shape_.feature[:, 0], order[other.shape_.feature[:, 0]])
    assert np.array_equal(one.shape_.last[:, 0], other.shape_.last[:, 0])


@pytest.mark.parametrize("learner", BOTH)
def test_rescaling_columns_and_their_bounds_changes_nothing(learner):
    X, y = table(300)
    one = learner(classes=[0, 1, 2], **SEEDED).fit(X, y)
    two = learner(classes=[0, 1, 2], **{**SEEDED, "bounds": [(0, 8), (0, 0.25), (-1, 1)]})
    moved = X * [8, 0.25, 2] - [0, 0, 1]
    assert np.array_equal(one.predict_proba(X), two.fit(moved, y).predict_proba(moved))


# ----------------------------------------------------------------- what is drawn is what is charged


@pytest.mark.statistical
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_on_no_records_leaves_hold_the_noise_that_was_charged_and_splits_are_uniform(
    delta, relation
):
    """Unseeded, from end to end: 1024 leaves of a tree that saw one record at most.

    The false-alarm rate is 1e-6 each.
    """
    n = 0 if relation == "add-remove" else 1
    bins = Bins([[1.0, 2.0, 3.0], [1.0]])
    settings_ = {
        "epsilon": 1.5,
        "delta": delta,
        "neighbours": relation,
        "split_share": 0.5,
        "classes": [0, 1],
    }
    model = PrivateTreeClassifier(bins=bins, max_depth=10, **settings_).fit(
        np.zeros((n, 2)), np.zeros(n, int)
    )
    leaves = model.events_[0].parts[-1]
    grid = np.arange(-4000, 4001)
    if isinstance(leaves, Laplace):
        p = np.exp(-np.abs(grid) / leaves.scale)
    else:
        p = np.exp(-(grid**2) / (2 * leaves.sigma**2))
    edges = np.unique(np.searchsorted(np.cumsum(p / p.sum()), np.arange(1, 12) / 12))
    cells = np.searchsorted(grid[edges], model.counts_.ravel(), side="left")
    mass = np.add.reduceat(p, np.concatenate([[0], edges + 1])) / p.sum()
    seen = np.bincount(cells, minlength=len(mass))
    assert stats.chisquare(seen, mass * seen.sum()).pvalue > FALSE_ALARM
    # Nodes without records: every candidate is as good as any other.
    picked = np.bincount(4 * model.shape_.feature[0] + model.shape_.last[0])[[0, 1, 2, 4]]
    assert picked.sum() == 1023
    assert stats.chisquare(picked).pvalue > FALSE_ALARM
    assert model.leaf_variance_ == pytest.approx(
        np.sum(p * grid**2) / p.sum(), rel=0.06
    )  # of the continuous law


def test_every_tree_and_every_fit_has_noise_of_its_own():
    empty = np.zeros((0, 2)), np.zeros(0, int)
    model = PrivateForestClassifier(
        epsilon=0.1, bounds=(0, 1), classes=[0, 1], n_trees=8, max_depth=3
    )
    counts = np.concatenate([model.fit(*empty).counts_ for _ in range(2)])
    assert len({tree.tobytes() for tree in counts}) == 16


@pytest.mark.parametrize("assignment", ["disjoint", "all"])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_the_published_size_is_near_the_number_of_records(assignment, delta):
    X, y = table(3000)
    model = PrivateForestClassifier(
        epsilon=4.0,
        delta=delta,
        bounds=(0, 1),
        classes=[0, 1, 2],
        n_trees=5,
        max_depth=3,
        assignment=assignment,
    ).fit(X, y)
    # A sum of 120 noisy counts; ten standard deviations are never reached.
    wrong = math.sqrt(model.counts_.size * model.leaf_variance_) / (
        1 if assignment == "disjoint" else 5
    )
    assert 0 < abs(model.public_size_ - 3000) + 1 < 10 * wrong + 2
    declared = PrivateForestClassifier(epsilon=4.0, bounds=(0, 1), neighbours="replace-one").fit(
        X, y
    )
    assert declared.public_size_ == 3000


@settings(max_examples=120, deadline=None)
@given(
    epsilon=st.floats(1e-6, 1e6) | st.sampled_from([np.float32(0.1), np.int64(3), 1]),
    delta=st.sampled_from([0.0, 1e-12, 1e-5, 0.3]),
    relation=st.sampled_from(RELATIONS),
    depth=st.integers(1, 12),
    n_trees=st.integers(1, 60),
    share=st.floats(0.01, 0.99),
    assignment=st.sampled_from(["auto", "disjoint", "all"]),
    splitter=st.sampled_from(["greedy", "random"]),
    cap=st.sampled_from([None, 1, 5, np.int64(3)]),
)
def test_the_guarantee_is_what_was_asked_and_never_more(
    epsilon, delta, relation, depth, n_trees, share, assignment, splitter, cap
):
    who = {} if cap is None else {"unit": "person", "records_per_person": cap}
    model = PrivateForestClassifier(
        epsilon=epsilon,
        delta=delta,
        neighbours=relation,
        max_depth=depth,
        n_trees=n_trees,
        split_share=share,
        assignment=assignment,
        splitter=splitter,
        **who,
    )
    X, y = np.full((9, 1), 0.5), np.arange(9) % 2
    persons = None if cap is None else np.arange(9)
    task, _ = model.set_params(bounds=(0, 1), classes=[0, 1]).make_task(X, y, persons)
    plan = model._plan(task)
    stated = total(plan.events)
    assert stated.epsilon <= epsilon
    assert stated.delta <= delta
    assert (stated.unit, stated.neighbours) == (model.unit, relation)
    whole = epsilon_of_one_tree(plan)
    if delta == 0:
        assert stated.epsilon == pytest.approx(float(epsilon), rel=1e-9), "budget was left unused"
        assert whole == pytest.approx(
            stated.epsilon / (1 if model._disjoint else n_trees), rel=1e-9
        )
    else:
        zero = [event.rho for event in plan.events[0].parts]
        assert plan.events[0].rho == pytest.approx(sum(zero) * (1 if model._disjoint else n_trees))
    assert len(plan.selections) == (depth if splitter == "greedy" else 0)
    assert all(
        event.monotone == ("yes" if relation == "add-remove" else "no") for event in plan.selections
    )
    assert all(event.sensitivity == 2.0 * (cap or 1) for event in plan.selections)


def epsilon_of_one_tree(plan):
    return math.fsum(event.epsilon for event in (*plan.selections, plan.leaves))


def test_a_record_weighs_in_leaves_as_the_proof_says():
    def tree(**settings_):
        return PrivateTreeClassifier(epsilon=1.0, split_share=0.5, **settings_)

    def leaves(**settings_):
        return plan_trees(tree(**settings_), depth=2, runs=1).leaves

    assert leaves().sensitivity == 1.0
    assert leaves(neighbours="replace-one").sensitivity == 2.0
    assert leaves(delta=1e-5).sensitivity == 1.0
    assert leaves(delta=1e-5, neighbours="replace-one").sensitivity == math.sqrt(2)
    assert leaves(unit="person", records_per_person=3, neighbours="replace-one").sensitivity == 6.0
    grained = plan_trees(tree(), depth=2, runs=1, grain=256)
    assert grained.leaves.sensitivity == 256.0
    assert grained.selections == plan_trees(tree(), depth=2, runs=1).selections
    assert grained.leaf_variance == pytest.approx(plan_trees(tree(), depth=2, runs=1).leaf_variance)


def test_a_retry_returns_the_same_forest_and_a_new_fit_another(tmp_path):
    X, y = table(200)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.allow("ward", Budget(epsilon=3.0, neighbours="add-remove"))
    bins = Bins.even(0, 1, n_features=3, n_bins=5)

    def fit(key):
        model = PrivateForestClassifier(epsilon=1.0, bins=bins, classes=[0, 1, 2], prune=True)
        return model.fit(X, y, ledger=ledger, dataset="ward", key=key)

    first, again, other = fit("one"), fit("one"), fit("two")
    for name in ("counts_", "values_", "public_size_", "leaf_variance_", "feature_importances_"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(vars(first.shape_).values(), vars(again.shape_).values(), strict=True)
    )
    assert np.array_equal(first.predict_proba(X), again.predict_proba(X))
    assert not np.array_equal(first.counts_, other.counts_)
    assert ledger.balance("ward").spent.epsilon == pytest.approx(2.0)


# ------------------------------------------------------------------------------------------ persons


@pytest.mark.parametrize("learner", BOTH)
def test_no_person_is_counted_more_often_than_declared_or_in_two_trees(learner):
    persons = np.repeat(np.arange(60), np.arange(60) % 7)
    X = np.zeros((len(persons), 1))
    settings_ = {"unit": "person", "records_per_person": 2, "bounds": (0, 1), "max_depth": 1}
    # The classes are the persons, so that counts tell whose records they are.
    labels = learner(epsilon=math.inf, classes=np.arange(60), **settings_).fit(
        X, persons, persons=persons
    )
    per_tree = labels.counts_.sum(axis=1)
    assert per_tree.sum(axis=0).tolist() == np.minimum(np.arange(60) % 7, 2).tolist()
    assert ((per_tree > 0).sum(axis=0) <= 1).all()


@pytest.mark.parametrize("learner", BOTH)
def test_how_many_records_persons_have_changes_neither_the_plan_nor_the_published_size(learner):
    """Under replace-one the number of persons is public; that of their records is theirs."""
    settings_ = {
        "epsilon": 1.0,
        "classes": [0, 1],
        "bounds": (0, 1),
        "unit": "person",
        "records_per_person": 50,
    }
    model = learner(neighbours="replace-one", **settings_)
    few, many = np.arange(40), np.repeat(np.arange(40), 50)
    plans = []
    for persons in (few, many):
        model.fit(np.zeros((len(persons), 1)), np.zeros(len(persons), int), persons=persons)
        plans.append((model.events_, model.shape_.feature.shape))
        assert model.public_size_ == max(
            1, round(model.counts_.sum() / (1 if model._disjoint else len(model.counts_)))
        )
    assert plans[0] == plans[1]


# ---------------------------------------------------------------------------------- post-processing


@pytest.mark.parametrize("learner", BOTH)
def test_calibration_changes_predictions_and_nothing_that_is_released(learner):
    X, y = table(400)
    plain, sharp = (
        learner(classes=[0, 1, 2], calibrate=calibrate, **SEEDED).fit(X, y)
        for calibrate in (False, True)
    )
    for name, released in plain.released_state().items():
        assert np.array_equal(released, sharp.released_state()[name])
    assert plain.guarantee_ == sharp.guarantee_
    assert not np.allclose(plain.predict_proba(X), sharp.predict_proba(X))
    sharp.calibrate = False
    with pytest.raises(SettingsError, match="changed after it was fitted"):
        sharp.check_unchanged()


def test_a_noisy_forest_decides_better_than_the_majority():
    source = Noise(seed=3).open()
    X = source.uniform(60_000).reshape(10_000, 6)
    y = (X.sum(axis=1) + 0.3 * source.normal(10_000) > 3.6).astype(int)  # about one in four
    forest = PrivateForestClassifier(
        epsilon=0.3, delta=1e-6, public_size=8_000, bounds=(0, 1), classes=[0, 1]
    )
    errors = {}
    for calibrate in (False, True):
        model = forest.set_params(calibrate=calibrate, noise=Noise(seed=1), random_state=0)
        model.fit(X[:8_000], y[:8_000])
        errors[calibrate] = np.mean(model.predict(X[8_000:]) != y[8_000:])
    share = y[8_000:].mean()
    assert errors[False] > share - 0.02  # the mean of the trees hardly ever predicts the rare class
    assert errors[True] < share - 0.03


@pytest.mark.parametrize("learner", BOTH)
def test_importances_sum_to_one_and_favour_what_matters(learner):
    X, _ = table(4000, n_features=5)
    y = (X[:, 3] > 0.5).astype(int)
    fitted = learner(
        epsilon=5.0, bounds=(0, 1), classes=[0, 1], max_depth=2, max_features=None
    ).fit(X, y)
    assert fitted.feature_importances_.sum() == pytest.approx(1.0)
    assert fitted.feature_importances_.argmax() == 3
    assert fitted.score(X, y) > 0.9
    flat = learner(epsilon=math.inf, bounds=(0, 1), classes=[0, 1]).fit(X, np.zeros(len(X), int))
    assert flat.feature_importances_.tolist() == [0.2] * 5


# --------------------------------------------------------------------------------- edges and errors


@pytest.mark.parametrize("learner", BOTH)
@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.parametrize(("n", "n_features"), [(0, 1), (0, 3), (1, 1), (7, 1)])
def test_few_or_no_records_one_class_and_one_feature_train(learner, delta, n, n_features):
    X, y = np.zeros((n, n_features)), np.ones(n, int)
    fitted = learner(epsilon=0.5, delta=delta, bounds=(0, 1), classes=[0, 1]).fit(X, y)
    assert fitted.guarantee_.epsilon == pytest.approx(0.5)
    np.testing.assert_allclose(fitted.predict_proba(np.zeros((2, n_features))).sum(axis=1), 1.0)
    if n:
        with pytest.raises(SchemaMismatch, match="Declare the classes"):
            learner(epsilon=0.5, delta=delta, bounds=(0, 1)).fit(X, y)


@pytest.mark.parametrize("learner", BOTH)
def test_bins_without_cuts_are_refused_before_the_charge(learner, ledger):
    with pytest.raises(SettingsError, match="cut to split at"):
        learner(epsilon=0.1, bins=Bins([[], []])).fit(
            np.zeros((4, 2)), [0, 1, 0, 1], ledger=ledger, dataset="ward"
        )
    assert ledger.charges() == []


def test_features_without_cuts_are_never_drawn():
    X, y = table(100, n_features=6)
    bins = Bins([[], [0.5], [], [], [0.3, 0.6], []])
    for splitter in ("greedy", "random"):
        fitted = PrivateForestClassifier(
            epsilon=1.0, bins=bins, max_features=1, n_trees=30, splitter=splitter
        ).fit(X, y)
        assert set(fitted.shape_.feature.ravel().tolist()) == {1, 4}


@pytest.mark.parametrize(
    "hostile",
    [
        {"max_depth": 0},
        {"max_depth": 17},
        {"max_depth": 2.0},
        {"max_depth": True},
        {"max_depth": "deep"},
        {"split_share": 0},
        {"split_share": 1.0},
        {"split_share": math.nan},
        {"split_share": "half"},
        {"bins": 1},
        {"bins": 300},
        {"bins": "many"},
        {"bounds": None},
        {"bounds": 5},
        {"bounds": (1, 0)},
        {"bounds": (0, math.inf)},
        {"bounds": ("a", "b")},
        {"bounds": ((0, 1), (0,))},
        {"bounds": [(0, 1)] * 5},
        {"public_size": 0},
        {"public_size": 1.5},
        {"splitter": "best"},
        {"max_features": 0},
        {"max_features": 1.5},
        {"max_features": "all"},
        {"random_state": "seed"},
        {"unit": "site"},
        {"unit": "person", "records_per_person": 2.0},
        {"unit": "person", "records_per_person": True},
        {"classes": [1]},
        {"epsilon": 1e-320},
    ],
    ids=str,
)
@pytest.mark.parametrize("learner", BOTH)
def test_a_bad_setting_is_named_before_anything_is_charged(learner, hostile, ledger):
    X, y = table(20)
    with pytest.raises(ConsilienceError) as caught:
        learner(**{"epsilon": 0.1, "bounds": (0, 1), **hostile}).fit(
            X, y, ledger=ledger, dataset="ward"
        )
    name = next(iter(hostile))
    said = {"bins": "bins", "bounds": "bounds", "epsilon": "epsilon"}.get(name, name)
    assert said in str(caught.value) or "records_per_person" in str(caught.value)
    assert ledger.charges() == []


@pytest.mark.parametrize(
    "hostile",
    [{"n_trees": 0}, {"n_trees": 2.5}, {"n_trees": True}, {"assignment": "some"}],
    ids=str,
)
def test_a_bad_setting_of_a_forest_is_named(hostile):
    with pytest.raises(SettingsError, match=next(iter(hostile))):
        PrivateForestClassifier(**{"epsilon": 0.1, "bounds": (0, 1), **hostile}).fit(*table(20))


@pytest.mark.parametrize("learner", BOTH)
@pytest.mark.parametrize("epsilon", [1e-9, 1e9, 1e300])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_the_smallest_and_largest_budgets_train(learner, epsilon, delta):
    X, y = table(50)
    for relation in RELATIONS:
        fitted = learner(
            epsilon=epsilon, delta=delta, bounds=(0, 1), neighbours=relation, max_depth=2
        ).fit(X, y)
        assert fitted.guarantee_.epsilon <= epsilon
        assert np.isfinite(fitted.predict_proba(X)).all()


def test_tables_of_another_width_than_the_bins_are_refused():
    with pytest.raises(SchemaMismatch, match="2 features"):
        PrivateTreeClassifier(epsilon=1.0, bins=Bins([[0.5], [0.5]])).fit(*table(20))


def test_public_randomness_chooses_features_and_keeps_the_guarantee():
    X, y = table(200, n_features=9)
    settings_ = {
        "epsilon": 1.0,
        "bounds": (0, 1),
        "max_features": "sqrt",
        "n_trees": 12,
        "splitter": "random",
    }
    one, two = (PrivateForestClassifier(random_state=3, **settings_).fit(X, y) for _ in range(2))
    assert np.array_equal(one.shape_.feature, two.shape_.feature)
    assert not np.array_equal(one.counts_, two.counts_)
    assert max(len(np.unique(tree)) for tree in one.shape_.feature) <= 3
    assert one.guarantee_.holds


def test_the_auto_settings_look_at_public_facts_alone():
    X, y = table(5000)
    shapes = set()
    for n in (10, 1000, 5000):
        model = PrivateForestClassifier(
            epsilon=1.0, bounds=(0, 1), public_size=4000, classes=[0, 1, 2]
        )
        shapes.add(model.fit(X[:n], y[:n]).shape_.feature.shape)
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("n", "n_features", "classes", "delta", "shape"),
    [
        (300, 10, [0, 1], 0.0, (6, 4)),
        (300, 40, [0, 1], 0.0, (2, 2)),
        (3_000, 12, [0, 1], 0.0, (5, 4)),
        (30_000, 40, [0, 1], 0.0, (60, 5)),
        (30_000, 40, [0, 1, 2, 3], 0.0, (6, 6)),
        (30_000, 10, [0, 1], 0.0, (23, 5)),
        (10**8, 10, [0, 1], 0.0, (60, 6)),
        (300, 10, [0, 1], 1e-6, (16, 4)),
        (300, 40, [0, 1], 1e-6, (10, 2)),
        (300, 40, [0, 1, 2], 1e-6, (5, 4)),
        (3_000, 40, [0, 1], 1e-6, (47, 4)),
        (3_000, 100, [0, 1], 1e-6, (19, 4)),
    ],
)
def test_the_size_of_a_forest_follows_from_budget_records_columns_and_classes(
    n, n_features, classes, delta, shape
):
    X, y = table(50, n_features=n_features)
    model = PrivateForestClassifier(
        epsilon=1.0, delta=delta, bounds=(0, 1), public_size=n, classes=classes
    ).fit(X, y % len(classes))
    n_trees, n_inner = model.shape_.feature.shape
    assert (n_trees, (n_inner + 1).bit_length() - 1) == shape


def test_more_is_spent_on_splits_where_columns_compete_and_leaves_can_spare_it():
    many = ((40, 0.0, 300, 0.7), (41, 0.0, 99, 0.5), (40, 1e-6, 300, 0.5))
    few = ((12, 0.0, 600, 0.5), (12, 0.0, 3_000, 0.7), (12, 0.0, 20_000, 0.5))
    cases = (
        [(*case, 3) for case in many] + [(*case, 2) for case in few] + [(12, 0.0, 3_000, 0.5, 3)]
    )
    for n_features, delta, size, share, n_classes in cases:
        X, y = table(50, n_features=n_features)
        y = y % n_classes
        facts = {"epsilon": 1.0, "delta": delta, "bounds": (0, 1), "classes": range(n_classes)}
        spent = [
            PrivateForestClassifier(**facts, public_size=size, split_share=wish).fit(X, y).events_
            for wish in ("auto", share)
        ]
        assert spent[0] == spent[1]


def test_splits_are_random_where_noise_would_choose_them():
    """Of records times epsilon, times columns, the rule wants 4,000 for splits by records."""
    for n_features, size, wish in ((12, 330, "random"), (12, 340, "greedy"), (40, 330, "greedy")):
        X, y = table(50, n_features=n_features)
        facts = {"epsilon": 1.0, "bounds": (0, 1), "classes": [0, 1, 2], "public_size": size}
        by_rule, named = (
            PrivateForestClassifier(**facts, **more).fit(X, y) for more in ({}, {"splitter": wish})
        )
        assert by_rule.events_ == named.events_
        (whole,) = by_rule.events_
        assert len(whole.parts) == (1 if wish == "random" else 1 + by_rule.shape_.depth)
        assert by_rule.chosen()["splitter"] == wish
        assert ("split_share" in by_rule.chosen()) == (wish == "greedy")


def test_files_and_studies_of_the_first_version_mean_its_rule():
    """Of 40,000 records with pure ε = 0.5: 20,000/1,000 trees of log2(20,000/700) levels."""
    named = {"n_trees": "auto", "max_depth": "auto", "max_features": "auto", "split_share": 0.5}
    named["splitter"] = "greedy"
    meant = PrivateForestClassifier.read_settings(named)
    assert meant == PrivateForestClassifier.first_settings | {"max_features": "auto"}
    assert PrivateForestClassifier.read_settings(named | {"calibrate": True}) == {
        **named,
        "calibrate": True,
    }
    assert "n_trees" not in PrivateTreeClassifier.read_settings({"max_depth": 3})
    X, y = table(50)
    facts = {"epsilon": 0.5, "bounds": (0, 1), "classes": [0, 1, 2], "public_size": 40_000, **meant}
    for delta, shape in ((0.0, (20, 31)), (1e-6, (40, 63))):
        fitted = PrivateForestClassifier(delta=delta, **facts).fit(X, y)
        assert fitted.shape_.feature.shape == shape


def test_one_tree_learns_where_several_would_drown_in_noise():
    """300 records with pure ε = 1 and 30 columns: three trees were as good as a coin."""
    X, y = table(300, n_features=30)
    y = (X[:, 0] > 0.5).astype(int)
    right = {}
    for n_trees in ("auto", 20):
        settings_ = {"bounds": (0, 1), "bins": 4, "classes": [0, 1], "public_size": 300}
        right[n_trees] = np.mean(
            [
                PrivateForestClassifier(
                    epsilon=1.0, n_trees=n_trees, noise=Noise(seed=seed), **settings_
                )
                .fit(X, y)
                .score(X, y)
                for seed in range(8)
            ]
        )
    assert right["auto"] > right[20] + 0.2
