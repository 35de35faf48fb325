"""Sums over records: each record adds the same in any table, and no unit moves them too far."""

import math
from dataclasses import fields

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import clone

import consilience.statistics.registry  # noqa: F401  statistics are learners that are known
from consilience import (
    Budget,
    Categorical,
    GradientStep,
    LabelTables,
    Ledger,
    Moments,
    Noise,
    Numeric,
    Schema,
    Score,
)
from consilience.errors import GuaranteeVoid, SettingsError
from consilience.learners.ball import Ball
from consilience.learners.erm import Logistic
from consilience.learners.gradient import add_gradients
from consilience.learners.partitions import DaskRows
from consilience.learners.registry import LEARNERS
from consilience.privacy.accounting import GaussianSum, events_from_json, events_to_json
from consilience.privacy.guarantee import Neighbours
from consilience.privacy.mechanisms import noisy_sum
from consilience.privacy.spending import Account, Spending
from consilience.privacy.vector_noise import calibrate_sum
from consilience.statistics import base
from consilience.statistics.base import NumberStatistic, Sharing, Statistic
from consilience.statistics.score import AddScores
from consilience.statistics.vote_tally import VoteTally, pack_rows
from consilience.tables.public import Public
from sums import DELTA, STATISTICS, Chunks, exact, make, records

BOTH = [Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE]


def weighted(statistic, X, y, **whose):
    """Return the exact weighted sum of a table, in the units of the sensitivity."""
    fitted = exact(statistic, X, y, **whose)
    return fitted.total_ * fitted.grain * fitted.weights()


@pytest.mark.parametrize("statistic", STATISTICS)
@given(seed=st.integers(0, 2**32 - 1), length=st.floats(0.01, 3.0))
@settings(max_examples=25, deadline=None)
def test_a_record_adds_the_same_alone_and_in_any_table(statistic, seed, length):
    X, y = records(statistic, 40, seed=seed)
    X = X * length
    together = exact(statistic, X, y).total_
    order = np.random.default_rng(seed).permutation(40)
    assert np.array_equal(exact(statistic, X[order], y[order]).total_, together)
    single = sum(exact(statistic, X[i : i + 1], y[i : i + 1]).total_ for i in range(40))
    assert np.array_equal(single, together)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_memory_chunks_sparse_rows_and_dask_add_up_to_the_same(statistic):
    X, y = records(statistic, 300, seed=3)
    whole = exact(statistic, X, y).total_
    assert np.array_equal(exact(statistic, Chunks(X, y, 77)).total_, whole)
    if not statistic.takes_bins:
        assert np.array_equal(exact(statistic, sparse.csr_array(X), y).total_, whole)
    parts = DaskRows(da.from_array(X, chunks=(100, -1)), da.from_array(y, chunks=100))
    assert np.array_equal(exact(statistic, parts).total_, whole)


@pytest.mark.parametrize("neighbours", BOTH)
@pytest.mark.parametrize("statistic", STATISTICS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_pair_of_records_moves_the_sum_farther_than_stated(statistic, neighbours, seed):
    """Rows are opposite, equal or at any angle, of the greatest length and beyond."""
    draw = np.random.default_rng(seed)
    X, y = records(statistic, 2, seed=seed)
    X *= draw.choice([0.5, 1.0, 1e3])
    if draw.random() < 0.7:
        angle = draw.choice([-1.0, -0.5, 0.0, 0.5, draw.uniform(-1, 1)])
        X[1] = angle * X[0] + math.sqrt(max(0.0, 1 - angle**2)) * X[1]
    one, other = (weighted(statistic, X[i : i + 1], y[i : i + 1]) for i in (0, 1))
    moved = one if neighbours is Neighbours.ADD_REMOVE else one - other
    unit = make(statistic, neighbours=str(neighbours))
    unit.fit(X, y)
    assert np.linalg.norm(moved) <= unit.unit_reach() * (1 + 1e-12)


@pytest.mark.parametrize("neighbours", BOTH)
@pytest.mark.parametrize("statistic", STATISTICS)
@given(seed=st.integers(0, 2**32 - 1), counts=st.tuples(st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=30, deadline=None)
def test_no_person_moves_the_sum_farther_than_stated(statistic, neighbours, seed, counts):
    X, y = records(statistic, sum(counts), seed=seed)
    X *= 5.0
    split = counts[0]
    if seed % 2:  # all of a person's records alike, and the two persons opposite
        X[:split], X[split:], y[:split], y[split:] = X[0], -X[0], y[0], y[-1]
    who = {"unit": "person", "records_per_person": 9}
    parts = [
        weighted(make(statistic, **who), X[rows], y[rows], persons=np.zeros(len(X[rows])))
        for rows in (slice(0, split), slice(split, None))
    ]
    moved = parts[0] if neighbours is Neighbours.ADD_REMOVE else parts[0] - parts[1]
    unit = make(statistic, neighbours=str(neighbours), **who)
    unit.fit(X, y, persons=np.arange(len(y)))
    assert np.linalg.norm(moved) <= unit.unit_reach() * (1 + 1e-12)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_persons_with_one_record_each_count_as_records_do(statistic):
    X, y = records(statistic, 30, seed=1)
    who = {"unit": "person", "records_per_person": 1}
    persons = exact(make(statistic, **who), X, y, persons=np.arange(30)).total_
    assert np.array_equal(persons, exact(statistic, X, y).total_)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_table_without_records_adds_up_to_zero(statistic):
    X, y = records(statistic, 4, seed=1)
    model = make(statistic, neighbours="add-remove", epsilon=math.inf, delta=0.0)
    assert not model.fit(X[:0], y[:0]).total_.any()
    hidden = make(statistic, neighbours="add-remove").fit(X, y)
    assert not hasattr(hidden, "public_size_")  # how many there are is not public


@pytest.mark.parametrize("kind", LEARNERS.values(), ids=list(LEARNERS))
def test_no_setting_hides_what_every_learner_says_of_itself(kind):
    """A setting named as a property would be asked in its place."""
    hidden = [
        (each.name, parent.__name__)
        for each in fields(kind)
        for parent in kind.__mro__[1:]
        if isinstance(parent.__dict__.get(each.name), property)
    ]
    assert hidden == []


@pytest.mark.parametrize("neighbours", BOTH)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_charge_is_what_was_asked_and_is_made_first(statistic, neighbours, tmp_path):
    X, y = records(statistic, 50, seed=1)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.allow("ward", Budget(epsilon=1.0, delta=1e-5, neighbours=str(neighbours)))
    model = make(statistic, epsilon=0.5, neighbours=str(neighbours))
    model.fit(X, y, ledger=ledger, dataset="ward")
    assert model.guarantee_.epsilon == pytest.approx(0.5, rel=1e-9)
    assert model.guarantee_.epsilon <= 0.5
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.5)
    assert model.predict(X).shape == (50,)
    assert np.isfinite(model.total_).all()


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.statistical
def test_the_noise_of_every_number_is_as_wide_as_stated(statistic):
    """χ² of all numbers over 60 draws; a false alarm once in 10⁹."""
    X, y = records(statistic, 20, seed=1)
    plain = exact(statistic, X, y)
    gaps = []
    for seed in range(60):
        noisy = make(statistic, epsilon=0.7, noise=Noise(seed=seed)).fit(X, y)
        gaps.append((noisy.total_ - plain.total_) * noisy.grain / np.sqrt(noisy.noise_variance()))
    squares = np.square(gaps).sum(axis=0)
    n = np.size(gaps)
    assert abs(squares.sum() - n) < 6.5 * math.sqrt(2 * n)
    assert squares.max() < 60 + 12 * math.sqrt(120)
    assert squares.min() > 60 - 5.2 * math.sqrt(120)


def test_a_sum_needs_a_delta_and_an_epsilon_that_its_noise_fits():
    X, y = records(STATISTICS[0], 20, seed=1)
    with pytest.raises(SettingsError, match="needs delta > 0"):
        make(STATISTICS[0], delta=0.0).fit(X, y)
    with pytest.raises(SettingsError, match="too wide for 64-bit sums"):
        make(STATISTICS[0], epsilon=1e-8, delta=1e-12).fit(X, y)


def test_the_event_of_a_sum_costs_what_a_gaussian_costs_and_survives_a_file():
    widths = np.array([1e6, 2e6])
    event = calibrate_sum(
        2.0, widths, epsilon=1.0, delta=DELTA, unit="record", neighbours="replace-one"
    )
    assert event.epsilon == pytest.approx(1.0, rel=1e-9)
    assert event.epsilon <= 1.0
    assert events_from_json(events_to_json([event])) == (event,)
    coarse = calibrate_sum(
        2.0, np.array([1.0]), epsilon=1.0, delta=DELTA, unit="record", neighbours="replace-one"
    )
    assert coarse.narrowest >= 16  # coarse grains need more noise, and get it
    assert coarse.epsilon < 1.0
    with pytest.raises(SettingsError, match="at least 16"):
        GaussianSum(
            sensitivity=1.0,
            sigma=1.0,
            narrowest=2.0,
            length=1,
            at_delta=DELTA,
            unit="record",
            neighbours="replace-one",
        )


def test_noise_that_is_not_the_events_is_not_drawn():
    event = calibrate_sum(
        1.0, np.full(3, 1e6), epsilon=1.0, delta=DELTA, unit="record", neighbours="replace-one"
    )
    source = Noise(seed=1).open()
    for sums, widths in (
        (np.zeros(2, np.int64), np.full(2, 1e6)),
        (np.zeros(3, np.int64), np.ones(3)),
    ):
        with pytest.raises(SettingsError):
            noisy_sum(sums, widths, event=event, source=source)


# ------------------------------------------------------------------ what a seventh attack had found


def test_a_public_model_that_overflows_meets_no_record(tmp_path):
    """What it made of a record was no number, and that became -2^63 in the sum.

    It showed at any epsilon whether any record of sparse rows has a value in a column, and how many
    blocks of records there are.
    """
    X, y = records(STATISTICS[3], 20, seed=1)
    ledger = Ledger(tmp_path / "books.sqlite")
    ledger.allow("ward", Budget(epsilon=9.0, delta=1e-3))
    for kind, name in ((GradientStep, "start"), (Score, "model")):
        for row in ([1.7e308, 0, 0, 0], [0, 0, 0, 1.7e308], [1e300, 1, 1, 1], [math.nan, 0, 0, 0]):
            far = kind(epsilon=1.0, delta=DELTA, classes=[0, 1], data_norm=1e10, **{name: [row]})
            with pytest.raises(SettingsError, match="within ±1e"):
                far.fit(X, y, ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == 0


@pytest.mark.parametrize("scaling", [1e-100, 0.3, 1e100])
@pytest.mark.parametrize("norm", [1e-100, 1.0, 1e100])
@pytest.mark.parametrize("largest", [1e-100, 1e100])
def test_the_largest_public_models_have_exact_scores(scaling, norm, largest):
    rows = [[largest, -largest, largest / 3, largest]]
    settings = {"data_norm": norm, "intercept_scaling": scaling, "neighbours": "add-remove"}
    draw = np.random.default_rng(2)
    X, y = draw.normal(size=(70, 3)) * norm, draw.integers(0, 2, 70)
    for kind, name in ((GradientStep, "start"), (Score, "model")):
        made = kind(epsilon=math.inf, classes=[0, 1], **settings, **{name: rows})
        whole = made.fit(X, y).total_
        parts = [clone(made).fit(X[i : i + 1], y[i : i + 1]).total_ for i in range(70)]
        assert np.array_equal(np.sum(parts, axis=0), whole)
        moved = np.linalg.norm(np.array(parts) * made.grain * made.weights(), axis=1)
        assert moved.max() <= made.reach(Neighbours.ADD_REMOVE)


@pytest.mark.parametrize("steps", [math.nan, math.inf, 2.0**60])
def test_no_sum_is_made_at_coefficients_whose_scores_are_not_exact(steps):
    X, y = np.full((4, 2), 0.5), np.array([1.0, -1.0, 1.0, -1.0])
    with pytest.raises(GuaranteeVoid, match="too long for exact scores"):
        add_gradients(Logistic(), np.array([steps, 0.0]), 0.25, None, iter([(X, y)]))
    count = AddScores(Ball(1.0, True, 0.3), np.array([[steps, 0.0, 0.0]]), 4)
    with pytest.raises(GuaranteeVoid, match="too long for exact scores"):
        count(iter([(X, (y > 0).astype(int))]))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (GradientStep, {"classes": [0, 1], "start": [[1.0, 1.0]]}),
        (Score, {"classes": [0, 1], "model": [[1.0, 1.0]]}),
        (Score, {"classes": [0, 1, 2], "model": [[1.0, 1.0, 1.0, 0.0]]}),
        (LabelTables, {"classes": [0, 1], "columns": [[[7, 0.0]]]}),
    ],
)
def test_settings_that_do_not_fit_the_table_are_refused_before_the_charge(kind, wrong, tmp_path):
    X, y = records(STATISTICS[3], 20, seed=1)
    ledger = Ledger(tmp_path / "books.sqlite")
    ledger.allow("ward", Budget(epsilon=9.0, delta=1e-3))
    for table in ((X, y), (Chunks(X, y, 7),)):
        with pytest.raises(SettingsError, match="Nothing was trained"):
            kind(epsilon=1.0, delta=DELTA, **wrong).fit(*table, ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == 0


@pytest.mark.parametrize(
    ("kind", "neighbours"),
    [
        (kind, neighbours)
        for kind in LEARNERS.values()
        if issubclass(kind, Statistic)
        for neighbours in BOTH
        if kind.adds_records or neighbours is Neighbours.REPLACE_ONE
    ],
)
def test_the_page_to_approve_says_how_many_numbers_leave(kind, neighbours):
    columns = [Numeric("age", 0, 120, cuts=4), Categorical("sex", ("f", "m", "x"))]
    number = issubclass(kind, NumberStatistic)
    labels = {"label_bound": 2.0} if number else {"classes": ("no", "yes")}
    schema = Schema(columns, label="ill", **labels)
    more = {GradientStep: "start", Score: "model"}
    row = {more[kind]: [[0.1] * (schema.n_features + 1)]} if kind in more else {}
    if kind is VoteTally:
        row = {"records": pack_rows(Public(np.eye(schema.n_features)))}
    made = kind.for_schema(
        schema, epsilon=1.0, delta=DELTA, neighbours=str(neighbours), **row, noise=Noise(seed=1)
    )
    said = made.describe_state(schema)
    ill = [0.5, 1.0] if number else ["no", "yes"]
    rows = schema.encode({"age": [3, 90], "sex": ["f", "x"], "ill": ill}).X
    made.fit(rows, np.array(ill))
    assert said.startswith(f"{len(made.total_):,} ")
    counted = kind is GradientStep and neighbours is Neighbours.ADD_REMOVE
    assert ("a count of records" in said) == counted


@pytest.mark.parametrize("neighbours", BOTH)
def test_what_is_refused_for_its_number_of_records_is_assumed_to_be_public(neighbours, monkeypatch):
    """Under add-remove a refusal told the number, and that there was one told something of it."""
    monkeypatch.setattr(base, "ROOM", 2.0**46)
    X, y = records(STATISTICS[0], 60, seed=1)
    made = Moments(epsilon=1.0, delta=DELTA, classes=[0, 1], neighbours=str(neighbours))
    made.sharing = Sharing(3, 3.0, 256)
    with pytest.raises(SettingsError, match="takes at most 11 records") as refused:
        made.mask(Chunks(X, y, 20), lambda *_: b"", Spending(Account()))
    assert "60" not in str(refused.value)
    hidden = neighbours is Neighbours.ADD_REMOVE
    assert any("at most 11 records" in one for one in made.assumed()) == hidden
    made.sharing = Sharing(3, 3.0, 256, only_noise=True)
    assert len(made.assumed()) == 1
