"""What a result promises rests on the settings, seeds and members that it was made with."""

import contextlib
import copy
import math
import pickle
from collections import deque
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import ParameterGrid

from consilience.aggregators.accuracy import add_accuracy, hold_out, private_accuracy
from consilience.aggregators.average import Average
from consilience.aggregators.distillation.distill import SoftLabelDistillation
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.pooling import PooledCounts, PrivateLeafCounts, Structure
from consilience.aggregators.votes import WeightedVote
from consilience.errors import SettingsError
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.learners.base import LEAST_DELTA, LEAST_EPSILON, spell_out
from consilience.learners.linear import PrivateLogisticRegression, PrivateRidge
from consilience.learners.projection import PrivatePCA
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.learners.tuning import PrivateTuning
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, gradient_noise, noisy_moment
from consilience.tables.groups import MOST_RECORDS, cap_records
from consilience.tables.public import Public
from consilience.tables.schema import Numeric, Schema

draw = Noise(seed=0).open()
X = draw.uniform(800).reshape(400, 2) * 2 - 1
y = (X[:, 0] > 0).astype(int)
BINS = Bins.even(-1, 1, n_features=2)


def exact(n=400, **settings):
    known = {"epsilon": math.inf, "classes": [0, 1], **settings}
    return PrivateLogisticRegression(**known).fit(X[:n], y[:n])


def forest(**settings):
    known = {"epsilon": 3.0, "classes": [0, 1], "bins": BINS, "n_trees": 2, "max_depth": 2}
    return PrivateForestClassifier(**known, random_state=0, **settings).fit(X, y)


@pytest.fixture
def books(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for unit in ("record", "site"):
        for relation in ("replace-one", "add-remove"):
            budget = Budget(epsilon=100.0, unit=unit, neighbours=relation)
            if (unit, relation) != ("site", "add-remove"):
                ledger.allow(f"{unit} {relation}", budget)
    return ledger


# ------------------------------------------------------------------------- settings after the fit

CHANGES = [
    {"regularization": 1.0},
    {"data_norm": 3.0},
    {"classes": [1, 0]},
    {"unit": "person", "records_per_person": 1},
    {"neighbours": "add-remove", "public_size": 10**9},
    {"epsilon": 1.0},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_learner_whose_settings_were_changed_is_used_nowhere(change):
    member = exact(regularization=1e-4)
    assert Average("equal", epsilon=1.0).combine([member, exact()]).guarantee.holds
    member.set_params(**change)
    with pytest.raises(SettingsError, match="changed after it was fitted"):
        Average("equal", epsilon=1.0).combine([member, exact()])
    with pytest.raises(SettingsError, match="changed after it was fitted"):
        Contribution.make(
            member,
            study={"name": "s", "digest": "0" * 64},
            site="north",
            sequence=1,
            key=SigningKey.generate(),
            trusted=True,
        )


def test_a_structure_cannot_be_swapped_for_a_cheaper_one():
    counts = PrivateLeafCounts(epsilon=1.0, structure=Structure.of(forest())).fit(X, y)
    assert PooledCounts().combine([counts]).guarantee.epsilon == pytest.approx(4.0)
    counts.set_params(structure=Structure.random(BINS, [0, 1], n_trees=2, max_depth=2))
    with pytest.raises(SettingsError, match="changed after"):
        PooledCounts().combine([counts])
    trees = forest()
    trees.set_params(bins=Bins.even(-5, 5, n_features=2))
    with pytest.raises(SettingsError, match="changed after"):
        Structure.of(trees)


def test_copies_and_learners_that_are_set_back_or_fitted_again_are_fine():
    member = exact()
    for same in (
        copy.deepcopy(member),
        pickle.loads(pickle.dumps(member)),
        clone(member).fit(X, y),
    ):
        Average("equal").combine([same, member])
    Average("equal").combine([member.set_params(data_norm=2.0).fit(X, y), exact(data_norm=2.0)])
    member.set_params(data_norm=1.0).set_params(data_norm=2.0)
    Average("equal").combine([member, exact(data_norm=2.0)])
    counted = forest()
    again = pickle.loads(pickle.dumps(counted))
    assert PooledCounts().combine([again]).guarantee.epsilon == pytest.approx(3.0)


# -------------------------------------------------------------------------- choosing and borrowing


def test_a_learner_that_exact_errors_chose_is_no_exact_minimum():
    tuning = PrivateTuning(
        PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]),
        {"regularization": [1e-3, 1e-1]},
        epsilon=math.inf,
    ).fit(X, y)
    assert not tuning.best_learner_.guarantee_.holds
    with pytest.raises(SettingsError):
        Average("equal", epsilon=1.0).combine([tuning.best_learner_, exact()])


def test_tuning_passes_on_what_its_learner_borrowed_and_assumed():
    counts = PrivateLeafCounts(epsilon=1.0, structure=Structure.of(forest()))
    tuning = PrivateTuning(counts, {"prune": [False, True]}, epsilon=1.0).fit(X, y)
    alone = WeightedVote("equal").combine([clone(counts).fit(X, y)]).guarantee
    assert alone.epsilon == pytest.approx(4.0)
    assert WeightedVote("equal").combine([tuning]).guarantee.epsilon == pytest.approx(4.0)
    boost = PrivateAdaBoostClassifier(epsilon=1.0, classes=[0, 1], bins=BINS)
    tuned = PrivateTuning(boost, {"max_depth": [1, 2]}, epsilon=1.0).fit(X, y)
    assert set(boost.assumed()) <= set(tuned.guarantee_.assumptions)
    assert boost.assumed()


# ------------------------------------------------------------------------------------------- seeds


def test_every_seed_that_decides_about_records_voids_or_is_refused():
    person = {"unit": "person", "records_per_person": 1, "neighbours": "add-remove"}
    learner = PrivateLogisticRegression(
        epsilon=math.inf, classes=[0, 1], public_size=400, noise=Noise(seed=5), **person
    ).fit(X, y, persons=np.arange(400) // 2)
    assert not learner.guarantee_.holds
    with pytest.raises(SettingsError):
        Average("equal", epsilon=1.0).combine([learner, learner])
    assert exact(noise=Noise(seed=5)).guarantee_.holds  # nothing was drawn
    with pytest.raises(SettingsError, match="a seed would move"):
        hold_out(400, neighbours="add-remove", noise=Noise(seed=7))
    with pytest.raises(SettingsError, match="a seed would move"):  # another id, another rank
        hold_out(400, neighbours="replace-one", persons=np.arange(400), noise=Noise(seed=7))
    kept = hold_out(400, neighbours="replace-one", noise=Noise(seed=7))
    model = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(X[~kept], y[~kept])
    counted = private_accuracy(model, X[kept], y[kept], epsilon=1.0)
    assert add_accuracy(model, counted, held_out=True).guarantee.holds


# ------------------------------------------------------------------------------------------ retries


def test_a_retry_that_means_something_else_is_refused(books):
    where = {"ledger": books, "dataset": "record add-remove", "key": "k"}

    def counts(structure):
        return PrivateLeafCounts(epsilon=1.0, structure=structure)

    private, public = Structure.of(forest()), Structure.random(BINS, [0, 1], n_trees=2, max_depth=2)
    first = counts(private).fit(X, y, **where)
    assert np.array_equal(counts(private).fit(X, y, **where).counts_, first.counts_)
    with pytest.raises(SettingsError, match="key of another result"):
        counts(public).fit(X, y, **where)

    def grown(bins):
        known = {"epsilon": 1.0, "classes": [0, 1], "n_trees": 2, "max_depth": 2}
        return PrivateForestClassifier(**known, bins=bins, random_state=0)

    grown(BINS).fit(X, y, **where | {"key": "forest"})
    with pytest.raises(SettingsError, match="key of another result"):
        grown(Bins.even(-9, 9, n_features=2)).fit(X, y, **where | {"key": "forest"})


def test_a_retry_of_tuning_with_another_learner_is_refused(books):
    where = {"ledger": books, "dataset": "record replace-one", "key": "k"}

    def tuning(**settings):
        learner = PrivateLogisticRegression(epsilon=1.0, **{"classes": [0, 1]} | settings)
        return PrivateTuning(learner, {"regularization": [1e-3, 1e-1]}, epsilon=1.0)

    tuning().fit(X, y, **where)
    tuning().fit(X, y, **where)
    for other in ({"data_norm": 9.0}, {"classes": [1, 0]}):
        with pytest.raises(SettingsError, match="key of another result"):
            tuning(**other).fit(X, y, **where)


def test_a_retry_of_combining_other_members_is_refused(books):
    small, large = exact(100), exact(400)
    where = {"ledger": books, "dataset": "record replace-one", "key": "k"}
    first = Average("equal", epsilon=1.0).combine([small, large], **where)
    again = Average("equal", epsilon=1.0).combine([small, large], **where)
    assert np.array_equal(first.coef, again.coef)
    with pytest.raises(SettingsError, match="key of another result"):
        Average("equal", epsilon=1.0).combine([large, small], **where)
    public, where = Public(X[:50]), where | {"dataset": "site replace-one", "key": "votes"}
    members = [exact(n) for n in (60, 120, 180, 240)]
    SoftLabelDistillation(epsilon=1.0, classes=[0, 1]).combine(members, public, **where)
    SoftLabelDistillation(epsilon=1.0, classes=[0, 1]).combine(members, public, **where)
    # Members that say the same would be no others.
    others = [clone(one).fit(X, 1 - y) for one in members]
    for classes, who in (([1, 0], members), ([0, 1], others)):
        with pytest.raises(SettingsError, match="key of another result"):
            SoftLabelDistillation(epsilon=1.0, classes=classes).combine(who, public, **where)


def test_a_retry_of_counting_for_another_model_is_refused(books):
    where = {"ledger": books, "dataset": "record replace-one", "key": "k"}
    good, bad = exact(), exact(classes=[0, 1], data_norm=50.0, regularization=100.0)
    private_accuracy(good, X, y, epsilon=1.0, **where)
    private_accuracy(good, X, y, epsilon=1.0, **where)
    with pytest.raises(SettingsError, match="key of another result"):
        private_accuracy(bad, X, y, epsilon=1.0, **where)


# --------------------------------------------------------------- what a fourth attack had found


def test_tuning_passes_on_what_losing_candidates_borrowed(monkeypatch):
    grown = forest()
    private, public = (
        Structure.of(grown),
        Structure.random(BINS, [0, 1], n_trees=2, max_depth=2, random_state=1),
    )
    counts = PrivateLeafCounts(epsilon=1.0, structure=public)
    for best in (0, 1):
        monkeypatch.setattr("consilience.learners.tuning.select", lambda *_, best=best, **__: best)
        tuning = PrivateTuning(counts, {"structure": [private, public]}, epsilon=1.0).fit(X, y)
        for member in (tuning, tuning.best_learner_):
            assert list(member.borrowed().values()) == [grown.guarantee_]
            assert WeightedVote("equal").combine([member]).guarantee.epsilon == pytest.approx(4.0)
        # Which structure was chosen is a private fact too, which others borrow with it.
        other = clone(counts).set_params(structure=Structure.of(tuning.best_learner_)).fit(X, y)
        assert PooledCounts().combine([other]).guarantee.epsilon == pytest.approx(5.0)
    again = clone(tuning.best_learner_).set_params(structure=public).fit(X, y)
    assert tuning.best_learner_.set_params(structure=public).fit(X, y).borrowed() == {}
    assert again.borrowed() == {}


@pytest.mark.parametrize("epsilon", [1.0, math.inf])
def test_tuning_assumes_what_its_candidates_assume_at_its_own_epsilon(epsilon):
    boost = PrivateAdaBoostClassifier(epsilon=epsilon, classes=[0, 1], bins=BINS)
    tuned = PrivateTuning(boost, {"max_depth": [1, 2]}, epsilon=1.0).fit(X, y)
    assert set(clone(boost).set_params(epsilon=1.0).assumed()) <= set(tuned.guarantee_.assumptions)


KINDS = {
    "series": pd.Series,
    "index": pd.Index,
    "categories": pd.Categorical,
    "frame": lambda pair: pd.DataFrame([pair]).iloc[0],
    "deque": deque,
    "array": np.array,
    "list": list,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::consilience.errors.RecordsWarning")
def test_settings_of_any_kind_are_told_apart_by_their_values(kind, books):
    make = KINDS[kind]
    where = {"ledger": books, "dataset": "record replace-one", "key": "k"}
    average = {"weights": "equal", "epsilon": 1.0}
    members = [exact(), exact(300)]
    Average(**average, classes=make([0, 1])).combine(members, **where)
    Average(**average, classes=make([0, 1])).combine(members, **where)
    with pytest.raises(SettingsError, match="key of another result"):
        Average(**average, classes=make([1, 0])).combine(members, **where)
    where |= {"dataset": "record add-remove", "key": "forest"}
    trees = PrivateForestClassifier(epsilon=1.0, classes=[0, 1], n_trees=2, max_depth=2)
    fitted = clone(trees).set_params(bounds=make([0, 1])).fit(X, y, **where)
    with pytest.raises(SettingsError, match="key of another result"):
        clone(trees).set_params(bounds=make([0, 9])).fit(X, y, **where)
    with pytest.raises(SettingsError, match="changed after it was fitted"):
        WeightedVote("equal").combine([fitted.set_params(bounds=make([0, 9]))])


def test_a_retry_of_tuning_other_candidates_is_refused_whatever_holds_them(books):
    where = {"ledger": books, "dataset": "record replace-one"}
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    for make in (ParameterGrid, dict, lambda grid: deque(ParameterGrid(grid))):
        here = where | {"key": make.__name__}
        grids = [make({"data_norm": [1.0 * scale, 2.0 * scale]}) for scale in (1, 1000)]
        tuned = PrivateTuning(learner, grids[0], epsilon=1.0).fit(X, y, **here)
        with pytest.raises(SettingsError, match="key of another result"):
            PrivateTuning(learner, grids[1], epsilon=1.0).fit(X, y, **here)
        with pytest.raises(SettingsError, match="changed after it was fitted"):
            tuned.set_params(candidates=grids[1]).check_unchanged()


class Unreadable(PrivateLogisticRegression):
    """A learner with a setting that nobody reads."""

    def __init__(self, *, extra=None, epsilon=1.0, classes=(0, 1)):
        super().__init__(epsilon=epsilon, classes=classes)
        self.extra = extra


@pytest.mark.parametrize(
    "value",
    [object(), iter([1]), lambda: 1, (one for one in "ab")],
    ids=lambda value: type(value).__name__,
)
def test_a_setting_that_cannot_be_told_from_another_is_refused_before_the_charge(value, books):
    charged = len(books.charges())
    with pytest.raises(SettingsError, match="cannot be written down"):
        Unreadable(extra=value).fit(X, y, ledger=books, dataset="record replace-one")
    average = Average("equal", epsilon=1.0)
    average.extra = value
    with pytest.raises(SettingsError, match="cannot be written down"):
        average.combine([exact(), exact(300)], ledger=books, dataset="record replace-one")
    assert len(books.charges()) == charged


def test_settings_are_spelled_by_value():
    spelled = [
        *([1, 2], (2, 1), {1, 2}, {1: 2}, {"1": 2}, b"1", 1j, None, True),
        *(np.array([1, 2]), np.array([1.0, 2]), sparse.csr_array([[1, 2]]), np.float32(1)),
        *(date(2026, 1, 2), timedelta(3), pd.Timestamp("2026"), Fraction(1, 3), Decimal("0.1")),
        *(pd.Series([5, 6]), pd.DataFrame({"a": [5, 6]}), deque([7]), range(3), Average, exact()),
    ]
    assert len({spell_out(value) for value in spelled}) == len(spelled)
    assert spell_out({3, 1, 2}) == spell_out({2, 3, 1})
    assert spell_out(np.random.default_rng(0)) == spell_out(np.random.default_rng(1))


class Chunked:
    """A table in chunks, as users may write one."""

    n_features, n_records = 2, 400

    def chunks(self):
        yield X, y


EXTREMES = [1e-320, 1e-200, 1e-101, 1e101, 1e151, 1e307]


@pytest.mark.parametrize("value", EXTREMES)
def test_settings_beyond_what_arithmetic_can_hold_are_refused_before_the_charge(value, books):
    where = {"ledger": books, "dataset": "record replace-one"}
    common = {"epsilon": 1.0, "classes": [0, 1]}
    trials = [
        (PrivatePCA(epsilon=1.0, n_components=1, data_norm=value), (X,)),
        (PrivatePCA(epsilon=1.0, n_components=1, data_norm=value), (Chunked(),)),
        *(
            (PrivateLogisticRegression(**common, **{name: value}, **more), given)
            for name in ("data_norm", "regularization")
            for more in ({}, {"mechanism": "output"}, {"mechanism": "gradient", "delta": 1e-6})
            for given in ((X, y), (Chunked(),))
        ),
        *(
            (PrivateRidge(epsilon=1.0, **{"label_bound": 1.0, name: value}), (X, y))
            for name in ("label_bound", "huber", "data_norm")
        ),
    ]
    for learner, given in trials:
        with pytest.raises(SettingsError, match="from 1e-100 to 1e100"):
            learner.fit(*given, **where)
    noisy = [PrivateLogisticRegression(**common).fit(X[part::2], y[part::2]) for part in (0, 1)]
    for name in ("data_norm", "regularization"):
        method = FeatureMethod(epsilon=1.0, **{"regularization": 0.1, name: value})
        with pytest.raises(SettingsError, match="from 1e-100 to 1e100"):
            method.combine(noisy, Public(X, y), **where)
    with pytest.raises(SettingsError, match="from 1e-100 to 1e100"):
        SoftLabelDistillation(epsilon=1.0, classes=[0, 1], data_norm=value).combine(
            noisy, Public(X[:50]), ledger=books, dataset="site replace-one"
        )
    assert books.charges() == []


@pytest.mark.parametrize("value", [1e-100, 1e100])
@pytest.mark.filterwarnings("ignore::consilience.errors.RecordsWarning")
def test_the_most_extreme_settings_train(value, books):
    where = {"ledger": books, "dataset": "record replace-one"}
    for learner, given in (
        (PrivatePCA(epsilon=1.0, n_components=1, data_norm=value), (Chunked(),)),
        (PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], data_norm=value), (Chunked(),)),
        (PrivateRidge(epsilon=1.0, label_bound=value), (X, y)),
    ):
        state = learner.fit(*given, **where).released_state()
        assert all(np.isfinite(array).all() for array in state.values())


# --------------------------------------------------------------- what a fifth attack had found

GRADIENT = {"mechanism": "gradient", "delta": 1e-6, "regularization": "auto"}
TUNED = {"regularization": [1e-3, 1e-1]}
RETRIED = {
    "gradient": lambda: PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], **GRADIENT),
    "ridge": lambda: PrivateRidge(epsilon=1.0, **GRADIENT, label_bound=1.0),
    "objective": lambda: PrivateLogisticRegression(epsilon=1.0),
    "forest": lambda: PrivateForestClassifier(
        epsilon=1.0, bounds=(-1, 1), neighbours="replace-one", random_state=0
    ),
    "boosting": lambda: PrivateAdaBoostClassifier(
        epsilon=1.0, bounds=(-1, 1), neighbours="replace-one", random_state=0
    ),
    "axes": lambda: PrivatePCA(epsilon=1.0, n_components=1),
    "tuning": lambda: PrivateTuning(PrivateLogisticRegression(epsilon=1.0), TUNED, epsilon=1.0),
    "tuned gradients": lambda: PrivateTuning(
        PrivateLogisticRegression(epsilon=1.0, **GRADIENT),
        {"data_norm": [1.0, 2.0]},
        epsilon=1.0,
        delta=1e-6,
    ),
    "tuned trees": lambda: PrivateTuning(
        PrivateForestClassifier(
            epsilon=1.0, bounds=(-1, 1), neighbours="replace-one", random_state=0
        ),
        {"max_depth": [2, 3]},
        epsilon=1.0,
    ),
}


@pytest.fixture
def account(tmp_path):
    books = Ledger(tmp_path / "retries.sqlite")
    books.allow("d", Budget(epsilon=100.0, delta=1e-3))
    return {"ledger": books, "dataset": "d", "key": "k"}


def kept(fitted):
    """All that a fit has set, in one form."""
    return {
        name: kept(value) if hasattr(value, "released_state") else repr(value)
        for name, value in vars(fitted).items()
    }


@pytest.mark.parametrize("make", RETRIED.values(), ids=RETRIED)
def test_a_retry_sets_all_that_the_first_fit_set(make, account):
    """What lacks its events would count as noise-free, and outvote everybody else."""
    assert kept(make().fit(X, y, **account)) == kept(make().fit(X, y, **account))


@pytest.mark.parametrize("make", RETRIED.values(), ids=RETRIED)
def test_a_retry_with_another_table_never_relabels_the_first_numbers(make, account):
    table = pd.DataFrame(X, columns=["a", "b"])
    first = make().fit(table, y, **account)
    assert kept(make().fit(table, y, **account)) == kept(first)
    others = {"other order": table[["b", "a"]], "other names": table.set_axis(["c", "d"], axis=1)}
    for other in others.values():
        with pytest.raises(SettingsError, match="key of another result"):
            make().fit(other, y, **account)
    if hasattr(getattr(first, "best_learner_", first), "public_size_"):
        stated = getattr(first, "best_learner_", first).public_size_
        try:
            again = make().fit(table[:300], y[:300], **account)
        except SettingsError:
            return
        assert getattr(again, "best_learner_", again).public_size_ == stated


@pytest.mark.parametrize("name", ["objective", "forest", "tuning", "tuned trees"])
def test_a_retry_with_other_labels_never_relabels_the_first_numbers(name, account):
    """Also where the set of labels is read from them."""
    RETRIED[name]().fit(X, y, **account)
    with pytest.raises(SettingsError, match="key of another result"):
        RETRIED[name]().fit(X, np.where(y, "ill", "well"), **account)


@pytest.mark.parametrize("name", ["gradient", "ridge"])
def test_a_retry_with_another_number_of_persons_is_refused(name, tmp_path):
    books = Ledger(tmp_path / "persons.sqlite")
    books.allow("d", Budget(epsilon=100.0, delta=1e-3, unit="person"))
    where = {"ledger": books, "dataset": "d", "key": "k"}
    settings = {"unit": "person", "records_per_person": 2}
    for whose in (np.arange(400), np.arange(400)):
        RETRIED[name]().set_params(**settings).fit(X, y, persons=whose, **where)
    with pytest.raises(SettingsError, match=r"another (result|training)"):
        RETRIED[name]().set_params(**settings).fit(X, y, persons=np.arange(400) // 2, **where)


class Keyed:
    """A container that `dict` takes, and that says nothing else of itself."""

    def __init__(self, **held):
        self.held = held

    def keys(self):
        return self.held.keys()

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held.values())

    def __len__(self):
        return len(self.held)


APART = [
    (pd.Series({"a": 1}), pd.Series({"b": 1})),
    (pd.Series([1], name="a"), pd.Series([1], name="b")),
    (pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})),
    (pd.DataFrame({"a": [1]}, index=["x"]), pd.DataFrame({"a": [1]}, index=["y"])),
    (pl.DataFrame({"a": [1]}), pl.DataFrame({"b": [1]})),
    (pl.Series("a", [1]), pl.Series("b", [1])),
    (Keyed(a=1), Keyed(b=1)),
    ({1: 2}, {"int 1": 2}),
    ({1: 2}, {"1": 2}),
    ({"a": 1}, [["str 'a'", "1"]]),
    ({1, 2}, [1, 2]),
    (np.longdouble(1) / 3, np.float64(1) / 3),
    (np.array([np.longdouble(1) / 3]), np.array([np.longdouble(1) / 7])),
    (np.zeros(1, [("a", int)]), np.zeros(1, [("b", int)])),
]


@pytest.mark.parametrize(("one", "other"), APART, ids=lambda value: type(value).__name__)
def test_settings_that_differ_in_a_label_alone_are_told_apart(one, other):
    assert spell_out(one) == spell_out(copy.deepcopy(one))
    assert spell_out(one) != spell_out(other)
    assert spell_out([one]) != spell_out([other])


def test_candidates_in_rows_of_a_frame_are_told_apart_by_their_names(account):
    def rows(name):
        return [row for _, row in pd.DataFrame({name: [2.0, 3.0]}).iterrows()]

    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    tuned = PrivateTuning(learner, rows("data_norm"), epsilon=1.0).fit(X, y, **account)
    PrivateTuning(learner, rows("data_norm"), epsilon=1.0).fit(X, y, **account)
    with pytest.raises(SettingsError, match="key of another result"):
        PrivateTuning(learner, rows("intercept_scaling"), epsilon=1.0).fit(X, y, **account)
    with pytest.raises(SettingsError, match="changed after it was fitted"):
        tuned.set_params(candidates=rows("intercept_scaling")).check_unchanged()


def test_no_contribution_is_made_of_a_private_choice_and_the_refusal_says_what_to_do(account):
    tuning = RETRIED["tuning"]().fit(X, y, **account)
    for chosen in (tuning, tuning.best_learner_):
        with pytest.raises(SettingsError, match="choose_on_public"):
            Contribution.make(
                chosen,
                study={"name": "s", "digest": "0" * 64},
                site="north",
                sequence=1,
                key=SigningKey.generate(),
            )


@pytest.mark.parametrize("make", RETRIED.values(), ids=RETRIED)
def test_a_second_fit_keeps_nothing_of_the_first(make):
    names = pd.DataFrame(X, columns=["a", "b"])
    model = make().fit(names, y)
    model.fit(X, y)
    assert vars(model).keys() == vars(make().fit(X, y)).keys()


@pytest.mark.parametrize("make", RETRIED.values(), ids=RETRIED)
def test_no_budget_is_too_small_for_the_arithmetic_behind_the_charge(make, account):
    """It would fail there, blame the records, or state more than was asked for."""
    tiny = [{"epsilon": e} for e in (9e-10, 1e-30, 1e-300, 5e-324)]
    for bad in (*tiny, {"delta": 1e-301}, {"delta": 5e-324}):
        with pytest.raises(SettingsError, match=f"'{next(iter(bad))}' parameter"):
            make().set_params(**bad).fit(X, y, **account)
    assert account["ledger"].charges() == []
    for delta in (LEAST_DELTA, 1e-6):
        least = make().set_params(epsilon=LEAST_EPSILON, delta=delta)
        stated = least.fit(X, y, **account | {"key": repr(delta)}).guarantee_
        assert stated.epsilon <= LEAST_EPSILON * (1 + 1e-12)
        assert stated.delta <= delta


@pytest.mark.parametrize("make", RETRIED.values(), ids=RETRIED)
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.longdouble])
def test_numbers_of_numpy_count_as_the_same_ones_of_python(make, kind, account):
    epsilon = kind(0.1)
    model = make().set_params(epsilon=epsilon).fit(X, y, **account)
    assert type(model.epsilon) is float
    assert model.guarantee_.epsilon <= float(epsilon)
    again = make().set_params(epsilon=float(epsilon)).fit(X, y, **account)
    assert again.guarantee_ == model.guarantee_


def test_a_size_of_eight_bits_does_not_overflow():
    known = {"epsilon": 50.0, "classes": [0, 1], "bounds": (-1, 1), "random_state": 0}
    small, plain = (
        PrivateForestClassifier(**known, public_size=kind(200)).fit(X, y)
        for kind in (np.uint8, int)
    )
    assert small.events_ == plain.events_
    assert type(small.public_size) is int


# ---------------------------------------------------------------- what a sixth attack had found

OF_PERSONS = {name: make for name, make in RETRIED.items() if not name.startswith("tun")}


@pytest.mark.parametrize("make", OF_PERSONS.values(), ids=OF_PERSONS)
def test_no_study_lets_a_person_count_with_more_records_than_noise_can_hide(make, account):
    for cap in (MOST_RECORDS + 1, 10**11, True, 2.0):
        with pytest.raises(SettingsError, match="from 1 to 10,000"):
            make().set_params(unit="person", records_per_person=cap).fit(
                X, y, persons=np.arange(400), **account
            )
        with pytest.raises(SettingsError, match="from 1 to 10,000"):
            Schema([Numeric("a", 0, 1)], "b", label_bound=1, person="c", max_records_per_person=cap)
        with pytest.raises(SettingsError, match="from 1 to 10,000"):
            cap_records(["a"], cap, [0.5])
        with pytest.raises(SettingsError, match="from 1 to 10,000"):
            private_accuracy(exact(), X, y, epsilon=1.0, persons=y, records_per_person=cap)
    assert account["ledger"].charges() == []


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("name", ["gradient", "ridge"])
def test_the_widest_noise_that_can_be_planned_hides_its_sums(name, neighbours):
    """Cut off at 64 bits and then added, it was the same number in nearly all fits."""
    widest = {"epsilon": LEAST_EPSILON, "delta": LEAST_DELTA, "public_size": 400}
    model = RETRIED[name]().set_params(
        **widest,
        neighbours=neighbours,
        unit="person",
        records_per_person=MOST_RECORDS,
        fit_intercept=False,
    )
    fits = [model.fit(X, y, persons=np.arange(400)).coef_.ravel().copy() for _ in range(30)]
    assert len(np.unique(np.array(fits)[:, 0])) == 30
    (event,) = model.events_
    source, zeros = Noise().open(), np.zeros(200, np.int64)
    assert len(np.unique(gradient_noise((50, 4), event=event, source=source))) == 200
    assert len(np.unique(noisy_moment(zeros, event=event, source=source))) == 200


@pytest.mark.parametrize("name", ["forest", "boosting"])
def test_trees_whose_counts_fit_in_no_file_are_refused_before_the_charge(name, tmp_path):
    books = Ledger(tmp_path / "trees.sqlite")
    books.allow("d", Budget(epsilon=100.0, delta=1e-3, unit="person"))
    where = {"ledger": books, "dataset": "d", "persons": np.arange(400)}
    forest = {"n_trees": 64, "max_depth": 1, "assignment": "all"}
    size = forest if name == "forest" else {"n_rounds": 8}
    made = 0
    for epsilon in np.geomspace(LEAST_EPSILON, 1.0, 4):
        for cap in (1, 100, MOST_RECORDS):
            held = len(books.charges())
            model = RETRIED[name]().set_params(
                **size, epsilon=float(epsilon), unit="person", records_per_person=cap
            )
            with contextlib.suppress(SettingsError):
                model.fit(X, y, **where)
            charged = len(books.charges()) > held
            assert charged == hasattr(model, "counts_")
            if charged:
                assert model.check_state(model.released_state())
                made += 1
    assert 4 < made < 12


def test_a_retry_of_counting_another_number_of_records_is_refused(books):
    where = {"ledger": books, "dataset": "record replace-one", "key": "k"}
    model = exact()
    first = private_accuracy(model, X, y, epsilon=1.0, **where)
    assert private_accuracy(model, X, y, epsilon=1.0, **where) == first
    with pytest.raises(SettingsError, match="key of another result"):
        private_accuracy(model, X[:40], y[:40], epsilon=1.0, **where)
