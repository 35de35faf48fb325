"""Tuning: free on public records; on private ones each record is used once, and the whole is
charged once.
"""

import math
import warnings
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import sparse, stats
from sklearn.base import ClassifierMixin
from sklearn.utils.estimator_checks import check_estimator
from threadpoolctl import threadpool_limits

from consilience.aggregators.members import LinearEnsemble
from consilience.aggregators.pooling import PrivateLeafCounts, Structure
from consilience.errors import BudgetExceeded, ConsilienceError, SchemaMismatch, SettingsError
from consilience.learners.base import PrivateLearner
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.learners.projection import PublicPCA, coordinates
from consilience.learners.provenance import HOW_ENCODED
from consilience.learners.trees import adaboost
from consilience.learners.trees.bins import Bins
from consilience.learners.tuning import (
    DISJOINT,
    PREDICTED_AT_ONCE,
    PrivateTuning,
    _units,
    choose_on_public,
    mark_errors,
)
from consilience.privacy.accounting import Laplace, total
from consilience.privacy.guarantee import Budget, compose_disjoint
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source

GRID = {"regularization": [1e-4, 1e-2, 1.0]}


def table(n_records: int, seed: int = 4, n_features: int = 4) -> tuple[np.ndarray, np.ndarray]:
    source = Noise(seed=seed).open()
    X = source.normal(n_records * n_features).reshape(n_records, -1) / (2 * math.sqrt(n_features))
    return X, (X[:, 0] + 0.1 * source.normal(n_records) > 0).astype(int)


def logistic(**settings) -> PrivateLogisticRegression:
    return PrivateLogisticRegression(**{"epsilon": 1.0, "classes": [0, 1], **settings})


# -------------------------------------------------------------------- what each record goes through


class Watched(PrivateLogisticRegression):
    """Notes which records, by their first column, each training saw and what it cost."""

    seen: list[tuple[np.ndarray, float, float]] = []

    def fit(self, X, y=None, **options):
        fitted = super().fit(X, y, **options)
        cost = self.guarantee_
        self.seen.append((np.asarray(X)[:, 0].copy(), cost.epsilon, cost.delta))
        return fitted


class Everyone(PrivateTuning):
    """The broken twin (row 14 of docs/guarantees/audit.md): every candidate sees all, and one
    training is paid.
    """

    def _parts(self, task, n_parts, source):
        return [np.ones(len(task.y), dtype=bool)] * n_parts


class SplitPersons(PrivateTuning):
    """Another broken twin: cuts between records although it promises to hide persons."""

    def _slots(self, task):
        return np.arange(len(task.y)), len(task.y)


def dearest_record(tuning: PrivateTuning, X, y, **options) -> tuple[float, float]:
    """Return the largest epsilon and delta any record, or person, met in all trainings of one
    tuning.
    """
    Watched.seen.clear()
    owner = dict(zip(X[:, 0], options.get("persons", X[:, 0]), strict=True))
    tuning.fit(X, y, **options)
    epsilon, delta = Counter(), Counter()
    for rows, cost, slack in Watched.seen:
        for who in {owner[row] for row in rows}:
            epsilon[who] += cost
            delta[who] += slack
    return max(epsilon.values()), max(delta.values())


@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_no_record_meets_more_than_what_is_charged(neighbours, delta, tmp_path):
    X, y = table(300)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.allow("ward", Budget(epsilon=5.0, delta=1e-5, neighbours=neighbours))
    learner = Watched(epsilon=9.0, classes=[0, 1], neighbours=neighbours, public_size=300)
    tuning = PrivateTuning(learner, GRID, epsilon=0.8, delta=delta)
    met = dearest_record(tuning, X, y, ledger=ledger, dataset="ward")
    charged = ledger.balance("ward").spent
    assert met[0] <= charged.epsilon * (1 + 1e-12)
    assert met[1] <= charged.delta
    assert charged.epsilon == 0.8
    assert len(ledger.charges()) == 1
    assert len(Watched.seen) == 3


def test_the_twin_that_trains_everyone_on_everything_is_caught():
    X, y = table(300)
    learner = Watched(epsilon=1.0, classes=[0, 1])
    honest, broken = (kind(learner, GRID, epsilon=0.8) for kind in (PrivateTuning, Everyone))
    assert dearest_record(honest, X, y)[0] <= 0.8 * (1 + 1e-12)
    assert dearest_record(broken, X, y)[0] == pytest.approx(3 * 0.8), (
        "three trainings for the price of one"
    )
    assert broken.guarantee_.epsilon == pytest.approx(0.8), "the twin claims what it does not keep"


def test_all_records_of_a_person_go_to_one_part():
    X, y = table(400)
    persons = np.arange(400) % 80
    learner = Watched(epsilon=1.0, classes=[0, 1], unit="person", records_per_person=3)
    tuning, broken = (kind(learner, GRID, epsilon=0.8) for kind in (PrivateTuning, SplitPersons))
    assert dearest_record(tuning, X, y, persons=persons)[0] <= 0.8 * (1 + 1e-12)
    assert [len(rows) for rows, *_ in Watched.seen] == [100, 100, 100], (
        "20 persons of five records each"
    )
    assert tuning.guarantee_.unit == "person"
    assert dearest_record(broken, X, y, persons=persons)[0] > 1.6


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"delta": 1e-6},
        {"delta": 1e-6, "mechanism": "output"},
        {"delta": 1e-6, "mechanism": "generalized"},
        {"mechanism": "output"},
        {"calibration": "chaudhuri2011"},
        {"neighbours": "add-remove", "public_size": 200},
        {"unit": "person", "records_per_person": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("learner", [PrivateLogisticRegression, PrivateLinearSVC])
def test_the_charged_part_costs_at_least_as_much_as_every_other_in_every_quantity(
    learner, settings
):
    """The ledger adds up the events of one part; this is why that pays for all of them."""
    X, y = table(200)
    persons = np.arange(200) // 2 if settings.get("unit") == "person" else None
    plans = []

    class Spied(PrivateTuning):
        def _plan(self, task):
            plans.append(super()._plan(task))
            return plans[-1]

    settings = dict(settings)
    delta = settings.pop("delta", 0.0)
    template = learner(epsilon=1.0, classes=[0, 1], **settings)
    tuned = Spied(template, GRID, epsilon=0.7, delta=delta).fit(X, y, persons=persons)
    (plan,) = plans
    parts = [*plan.trainings, (plan.selection,)]
    assert len(parts) == 4
    charged = _units(plan.events)
    for part in parts:
        assert all(cost <= most for cost, most in zip(_units(part), charged, strict=True))
    joint = compose_disjoint(*(total(part) for part in parts), assumption=DISJOINT)
    assert tuned.guarantee_.epsilon == pytest.approx(joint.epsilon, rel=1e-12)
    assert tuned.guarantee_.delta == joint.delta == delta
    assert joint.assumptions == (DISJOINT,)
    assert tuned.guarantee_.assumptions == (HOW_ENCODED, DISJOINT)
    assert tuned.guarantee_.epsilon <= 0.7 * (1 + 2**-50)


def test_candidates_whose_costs_cannot_be_compared_are_refused(ledger):
    X, y = table(200)
    mixed = [{"mechanism": "output"}, {"mechanism": "generalized"}]
    with pytest.raises(SettingsError, match="one 'mechanism'"):
        PrivateTuning(logistic(), mixed, epsilon=0.5, delta=1e-6).fit(
            X, y, ledger=ledger, dataset="ward"
        )
    assert ledger.charges() == []


# ------------------------------------------------------------------------------------------- ledger


def test_tuning_is_charged_once_before_anything_is_drawn(ledger, monkeypatch):
    spent_at_draws = []
    words = Source.words

    def watched(self, n):
        spent_at_draws.append(Ledger(ledger.path).balance("ward").spent.epsilon)
        return words(self, n)

    X, y = table(300)
    monkeypatch.setattr(Source, "words", watched)
    tuned = PrivateTuning(logistic(), GRID, epsilon=0.5).fit(X, y, ledger=ledger, dataset="ward")
    assert set(spent_at_draws) == {0.5}
    (charge,) = ledger.charges("ward")
    assert (charge.purpose, charge.state) == ("PrivateTuning", "sealed")
    assert tuned.receipt_ == tuned.best_learner_.receipt_
    assert tuned.best_learner_.guarantee_ == tuned.guarantee_
    tuned.fit(X, y, ledger=ledger, dataset="ward")
    assert ledger.balance("ward").left.epsilon == 0
    with pytest.raises(BudgetExceeded):
        tuned.fit(X, y, ledger=ledger, dataset="ward")


def test_a_retry_with_the_same_key_returns_the_first_choice_without_drawing(ledger, monkeypatch):
    X, y = table(300)
    labels = np.array(["no", "yes"])[y]
    learner = logistic(classes=["yes", "no"])
    first = PrivateTuning(learner, GRID, epsilon=0.5).fit(
        X, labels, ledger=ledger, dataset="ward", key="k"
    )
    monkeypatch.setattr(Source, "words", lambda *_: pytest.fail("noise was drawn"))
    again = PrivateTuning(learner, GRID, epsilon=0.5).fit(
        X, labels, ledger=ledger, dataset="ward", key="k"
    )
    assert again.best_params_ == first.best_params_
    assert np.array_equal(again.best_learner_.coef_, first.best_learner_.coef_)
    assert np.array_equal(again.predict(X), first.predict(X))
    assert ledger.balance("ward").spent.epsilon == 0.5


def test_a_budget_that_is_too_small_stops_before_any_training(ledger, monkeypatch):
    X, y = table(300)
    monkeypatch.setattr(Source, "words", lambda *_: pytest.fail("noise was drawn"))
    tuning = PrivateTuning(logistic(), GRID, epsilon=1.5)
    with pytest.raises(BudgetExceeded):
        tuning.fit(X, y, ledger=ledger, dataset="ward")
    assert not hasattr(tuning, "best_learner_")
    assert ledger.charges() == []


# ---------------------------------------------------------------------------------------- selection


class Constant(ClassifierMixin, PrivateLearner):
    """Always answers `label`; costs what it is told to."""

    classes = (0, 1)

    def __init__(
        self,
        *,
        epsilon,
        label=0,
        neighbours="replace-one",
        noise=None,
        unit="record",
        records_per_person=1,
    ):
        self.epsilon, self.label, self.neighbours, self.noise = epsilon, label, neighbours, noise
        self.unit, self.records_per_person = unit, records_per_person

    def make_task(self, X, y, persons=None):
        self.classes_ = np.array([0, 1])
        return None, []

    def _plan(self, task):
        event = Laplace(
            unit=self.unit, neighbours=self.neighbours, sensitivity=1.0, scale=1 / self.epsilon
        )
        return type("Plan", (), {"events": [event]})()

    def _train(self, task, plan, source):
        pass

    def released_state(self):
        return {}

    def restore_state(self, state):
        pass

    def predict(self, X):
        return np.full(len(X), self.label)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("settings", "exponent", "n_slots"),
    [
        ({}, 0.5, 12),
        ({"neighbours": "add-remove"}, 1.0, 6),
        ({"unit": "person", "records_per_person": 2}, 0.25, 12),
    ],
    ids=str,
)
def test_the_choice_follows_the_exponential_mechanism(settings, exponent, n_slots):
    """Two constant candidates that err 0 and z times: odds e^(exponent·ε·z), exact binomial test at
    1e-6.
    """
    n_fits, per_person = 500, settings.get("records_per_person", 1)
    wrong_chosen, expected = 0, []
    for seed in range(n_fits):
        tuning = PrivateTuning(
            Constant(epsilon=1.0, **settings),
            {"label": [0, 1]},
            epsilon=0.9,
            noise=Noise(seed=seed),
        )
        n = n_slots * per_person
        persons = np.repeat(np.arange(n_slots), per_person) if per_person > 1 else None
        tuning.fit(np.zeros((n, 1)), np.zeros(n), persons=persons)
        wrong_chosen += tuning.best_index_
        judged = tuning._parts(  # the first thing that is drawn, so a fresh source repeats it
            type("Task", (), {"y": np.zeros(n), "persons": persons})(), 3, Noise(seed=seed).open()
        )[-1].sum()
        expected.append(1 / (1 + math.exp(exponent * 0.9 * judged)))
    # Given the parts, the number is a sum of independent draws of these chances: at most binomial
    # in spread.
    mean = np.mean(expected)
    assert stats.binomtest(wrong_chosen, n_fits, mean).pvalue > 1e-6
    for mutant in (0.5, 2.0):
        other = np.mean([1 / (1 + (1 / p - 1) ** mutant) for p in expected])
        assert stats.binomtest(wrong_chosen, n_fits, other).pvalue < 1e-6, "the test has no power"


def test_errors_are_counted_on_each_record_alone():
    """BLAS rounds a row depending on the shape of its table, so all tables have one shape."""
    X, y = table(3000, n_features=51)
    learner = logistic(noise=Noise(seed=1)).fit(X, y)
    labels = np.where(learner.decision_function(X) > 0, 0, 1)  # all wrong
    for kept in (0, 1, 7, 1023, 1024, 1025, 2999):
        assert mark_errors(learner, X[:kept], labels[:kept]).sum() == kept
    block = X[:PREDICTED_AT_ONCE]
    scores = learner.decision_function(block)
    for shift in (1, 3, 64, 777):  # nor does its place in that table matter
        moved = np.roll(block, shift, axis=0)
        assert np.array_equal(np.roll(learner.decision_function(moved), -shift), scores)
    assert mark_errors(learner, sparse.csr_array(X), labels).sum() == 3000


@pytest.mark.parametrize("n_threads", [1, 3, 7])
def test_no_number_of_threads_makes_an_answer_depend_on_its_place(n_threads):
    """Threads of BLAS share the rows of a table, and round the last ones of each part otherwise."""
    source = Noise(seed=3).open()
    record, weights = source.normal(784), source.normal(784)

    class Other:  # of another library
        def predict(self, X):
            self.scores = X @ weights
            return (self.scores > 0).astype(int)

    other, rows = Other(), np.tile(record, (PREDICTED_AT_ONCE, 1))
    learner = logistic(noise=Noise(seed=1)).fit(rows[:9] / 100, np.arange(9) % 2)
    learner.coef_ = weights[None]
    # Whatever is rounded otherwise than one product after another is beyond the boundary.
    learner.intercept_ = -coordinates(record[None], learner.coef_)[0]
    made = LinearEnsemble(learner.classes_, learner.coef_, learner.intercept_, np.ones(1), None, ())
    with threadpool_limits(n_threads):
        mark_errors(other, rows, np.zeros(len(rows)))
        assert len(np.unique(other.scores)) == 1
        for one in (learner, made):
            assert not mark_errors(one, rows, np.zeros(len(rows))).any()
            assert not mark_errors(one, sparse.csr_array(rows), np.zeros(len(rows))).any()


def test_a_subclass_is_asked_by_its_own_predict():
    class Contrary(PrivateLogisticRegression):
        def predict(self, X):
            return 1 - super().predict(X)

    X, y = table(300)
    learner = Contrary(epsilon=1.0, classes=[0, 1], noise=Noise(seed=1)).fit(X, y)
    assert not mark_errors(learner, X, learner.predict(X)).any()


def test_a_good_candidate_is_found_and_kept():
    X, y = table(6000)
    tuned = PrivateTuning(
        logistic(), {"regularization": [1e-2, 1e4]}, epsilon=2.0, noise=Noise(seed=1)
    ).fit(X, y)
    assert tuned.best_params_ == {"regularization": 1e-2}
    assert tuned.best_learner_.regularization == 1e-2
    assert tuned.score(X, y) > 0.85
    assert np.array_equal(tuned.predict(X), tuned.best_learner_.predict(X))
    assert tuned.predict_proba(X).shape == (6000, 2)
    assert tuned.decision_function(X).shape == (6000,)
    assert list(tuned.classes_) == [0, 1]
    assert not hasattr(
        PrivateTuning(PrivateLinearSVC(epsilon=1.0), GRID, epsilon=1.0), "predict_proba"
    )
    assert not tuned.guarantee_.holds, "seeded"


def test_candidates_that_were_not_chosen_are_not_kept():
    X, y = table(300)
    tuned = PrivateTuning(logistic(), GRID, epsilon=1.0).fit(X, y)
    released = {
        "best_index_",
        "best_params_",
        "best_learner_",
        "chosen_beside_",
        "events_",
        "guarantee_",
        "receipt_",
        "n_features_in_",
    }
    assert set(vars(tuned)) - set(tuned.get_params(deep=False)) == released | {
        "_learners",
        "_fitted_with",
    }
    assert tuned._learners == ()
    assert tuned.best_learner_.noise is None


def test_labels_read_from_the_data_are_an_assumption_and_every_part_knows_them_all():
    X, y = table(60)
    y = y.copy()
    y[7] = 2  # one record of a third class is in one part at most
    tuned = PrivateTuning(PrivateLogisticRegression(epsilon=1.0), GRID, epsilon=1.0).fit(X, y)
    assert list(tuned.classes_) == [0, 1, 2]
    assert any("read from the training labels" in text for text in tuned.guarantee_.assumptions)


def test_under_add_remove_parts_are_drawn_for_each_record_and_may_be_empty():
    learner = logistic(neighbours="add-remove", public_size=100)
    for n_records in (0, 1, 2):
        X, y = table(5)
        tuned = PrivateTuning(learner, GRID, epsilon=1.0).fit(X[:n_records], y[:n_records])
        assert tuned.best_learner_.public_size == 25
        assert tuned.guarantee_.neighbours == "add-remove"


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "candidates",
    [
        [],
        {},
        {"epsilon": [1, 2]},
        [{"delta": 0.1}],
        {"noise": [Noise()]},
        {"unit": ["person"]},
        {"depth": [3]},
    ],
    ids=str,
)
def test_candidates_that_would_change_the_guarantee_are_refused(candidates, ledger):
    X, y = table(100)
    if candidates == {}:
        candidates = {"regularization": []}
    with pytest.raises(ValueError, match=r"Candidates|empty|non-empty"):
        PrivateTuning(logistic(), candidates, epsilon=0.5).fit(X, y, ledger=ledger, dataset="ward")
    with pytest.raises(ValueError, match=r"Candidates|empty|non-empty"):
        choose_on_public(logistic(), candidates, X, y)
    assert ledger.charges() == []


def test_what_cannot_be_tuned_is_refused_with_a_reason(ledger):
    X, y = table(100)
    fit = {"ledger": ledger, "dataset": "ward"}
    with pytest.raises(SettingsError, match="classifiers"):
        PrivateTuning(PrivateRidge(epsilon=1.0, label_bound=1.0), GRID, epsilon=0.5).fit(
            X, y, **fit
        )
    with pytest.raises(SettingsError, match="fewer candidates"):
        PrivateTuning(logistic(), GRID, epsilon=0.5).fit(X[:3], y[:3], **fit)
    with pytest.raises(SettingsError, match="delta"):
        PrivateTuning(Constant(epsilon=1.0), {"label": [0, 1]}, epsilon=0.5, delta=1e-6).fit(
            X, y, **fit
        )
    with pytest.raises(SettingsError, match="public_size"):
        PrivateTuning(logistic(neighbours="add-remove"), GRID, epsilon=0.5).fit(X, y, **fit)
    for wrong in ({"epsilon": 0}, {"epsilon": 0.5, "delta": 1.0}, {"epsilon": 0.5, "noise": 3}):
        with pytest.raises(SettingsError, match=list(wrong)[-1]):
            PrivateTuning(logistic(), GRID, **wrong).fit(X, y, **fit)
    with pytest.raises(SettingsError, match="at least 1"):
        choose_on_public(logistic(), GRID, X, y, n_records=-5)
    assert ledger.charges() == []


def test_tuning_cannot_be_nested(ledger):
    X, y = table(400)
    inner = PrivateTuning(logistic(), GRID, epsilon=1.0)
    for candidates in (
        {"learner__regularization": [1e-3]},
        {"learner__neighbours": ["add-remove"]},
    ):
        with pytest.raises(SettingsError, match="another PrivateTuning"):
            PrivateTuning(inner, candidates, epsilon=0.5).fit(X, y, ledger=ledger, dataset="ward")
    assert ledger.charges() == []


class Nested(PrivateLogisticRegression):
    """A learner with another one inside, as users may write one."""

    def get_params(self, deep=True):
        return super().get_params(deep) | ({"inside__neighbours": "replace-one"} if deep else {})


def test_what_is_promised_is_tunable_under_no_name(ledger):
    X, y = table(100)
    tuning = PrivateTuning(
        Nested(epsilon=1.0, classes=[0, 1]), {"inside__neighbours": ["add-remove"]}, epsilon=0.5
    )
    with pytest.raises(SettingsError, match="other than those of the guarantee"):
        tuning.fit(X, y, ledger=ledger, dataset="ward")
    assert ledger.charges() == []


@pytest.mark.parametrize("place", [0, 150, -1])
def test_every_candidate_checks_every_record_before_the_charge(place, tmp_path):
    X, y = table(300)
    X, y = np.clip(X, -1, 1), np.where(np.arange(300) == np.arange(300)[place], 7, y)
    ledger = Ledger(tmp_path / "books.sqlite")
    ledger.allow("ward", Budget(epsilon=1.0, neighbours="add-remove"))
    structure = Structure.random(Bins.even(-1, 1, n_features=X.shape[1]), [0, 1], n_trees=2)
    counts = PrivateLeafCounts(epsilon=1.0, structure=structure)
    with pytest.raises(SchemaMismatch, match="a label that is not among its declared classes"):
        PrivateTuning(counts, {"assignment": ["all", "disjoint"]}, epsilon=1.0).fit(
            X, y, ledger=ledger, dataset="ward"
        )
    assert ledger.charges() == []


def test_a_limit_on_records_is_met_before_the_charge(monkeypatch, tmp_path):
    X, y = table(300)
    monkeypatch.setattr(adaboost, "MOST_RECORDS", 120)  # a part has about a hundred, or more
    ledger = Ledger(tmp_path / "books.sqlite")
    ledger.allow("ward", Budget(epsilon=1.0, neighbours="add-remove"))
    boost = adaboost.PrivateAdaBoostClassifier(epsilon=1.0, classes=[0, 1], bounds=(-1, 1))
    with pytest.raises(SettingsError, match="at most 120 records"):
        PrivateTuning(boost, {"max_depth": [1, 2]}, epsilon=1.0).fit(
            X, y, ledger=ledger, dataset="ward"
        )
    assert ledger.charges() == []


def test_no_error_repeats_a_record():
    X, y = table(50)
    marked = "TOPSECRET-4711"
    cells, odd = X.astype(object), y.astype(object).astype("<U20")
    cells[5, 1] = odd[3] = marked
    attempts = [
        (lambda: PrivateTuning(logistic(), GRID, epsilon=0.5).fit(cells, y), SchemaMismatch),
        (
            lambda: PrivateTuning(logistic(classes=["0", "1"]), GRID, epsilon=0.5).fit(X, odd),
            SchemaMismatch,
        ),
        (
            lambda: PrivateTuning(logistic(), GRID, epsilon=0.5).fit(X, y, persons=[marked] * 50),
            SettingsError,
        ),
    ]
    for attempt, kind in attempts:
        with pytest.raises(ConsilienceError) as caught:
            attempt()
        assert isinstance(caught.value, kind)
        assert marked not in str(caught.value)


def test_scikit_learns_checks_pass_and_private_ones_fail_only_where_two_fits_are_compared():
    two_fits = {
        "check_classifier_data_not_an_array",
        "check_supervised_y_2d",
        "check_fit_idempotent",
    }
    candidates = {"regularization": [1e-3]}
    learner = PrivateLogisticRegression(epsilon=1.0)
    exact = PrivateTuning(
        learner, candidates, epsilon=math.inf, noise=Noise(seed=2)
    )  # seeded: the parts are drawn
    private = PrivateTuning(learner, candidates, epsilon=5.0)
    for tuning, expected in ((exact, set()), (private, two_fits)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the suite warns about what it skips
            results = check_estimator(tuning, on_fail=None)
        assert len(results) > 40
        assert {r["check_name"] for r in results if r["status"] == "failed"} <= expected


# ------------------------------------------------------------------------------------------- public


def test_public_choice_regularises_more_for_a_smaller_private_table_or_epsilon():
    X, y = table(400)
    grid = {"regularization": [1e-3, 1e-2, 1e-1, 1.0]}
    learner = logistic(mechanism="output")

    def chosen(n_records, epsilon):
        return choose_on_public(
            learner.set_params(epsilon=epsilon), grid, X, y, n_records=n_records
        )["regularization"]

    few, many = chosen(100, 0.5), chosen(50_000, 0.5)
    assert few > many
    assert chosen(1000, 0.05) > chosen(1000, 50.0)


def test_public_choice_is_repeatable_and_takes_lists_frames_and_persons():
    pandas = pytest.importorskip("pandas")
    X, y = table(200)
    first = choose_on_public(logistic(), GRID, X, y, n_records=500)
    assert choose_on_public(
        logistic(), [{"regularization": r} for r in GRID["regularization"]], X, y, n_records=500
    )
    assert first == choose_on_public(logistic(), GRID, X, y, n_records=500)
    assert first == choose_on_public(logistic(), GRID, X.tolist(), list(y), n_records=500)
    assert first == choose_on_public(logistic(), GRID, pandas.DataFrame(X), y, n_records=500)
    assert first == choose_on_public(logistic(), GRID, sparse.csr_array(X), y, n_records=500)
    by_person = logistic(unit="person", records_per_person=2)
    persons = [f"p{i // 2}" for i in range(200)]
    assert choose_on_public(by_person, GRID, X, y, n_records=500, persons=persons, repeats=1) in [
        {"regularization": r} for r in GRID["regularization"]
    ]
    ridge = choose_on_public(
        PrivateRidge(epsilon=1.0, label_bound=1.0), GRID, X, X[:, 0], n_records=500, cv=3, repeats=1
    )
    assert ridge["regularization"] in GRID["regularization"]


def test_on_real_digits_the_public_choice_is_near_the_best_and_noiseless_validation_is_not(
    data_folder,
):
    """MNIST 3 against 7 on 20 public axes: 500 public digits choose Λ for 1,000 private ones at
    ε=1.
    """
    digits = pq.read_table(data_folder / "mnist.parquet")
    label, split = digits["label"].to_numpy(), np.array(digits["split"].to_pylist())
    kept = np.flatnonzero(np.isin(label, [3, 7]))
    pixels = np.frombuffer(b"".join(digits["pixels"].take(kept).to_pylist()), np.uint8)
    X = pixels.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(-1, 196)
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    y, train = label[kept], split[kept] == "train"
    public, private = np.flatnonzero(train)[:500], np.flatnonzero(train)[500:1500]
    X = PublicPCA(20).fit(X[public]).transform(X)
    grid = {"regularization": [1e-4, 1e-2, 1.0]}
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[3, 7])
    chosen = choose_on_public(learner, grid, X[public], y[public], n_records=1000, repeats=2)[
        "regularization"
    ]
    exact = PrivateLogisticRegression(epsilon=math.inf, classes=[3, 7])
    noiseless = choose_on_public(exact, grid, X[public], y[public], repeats=1)["regularization"]

    def error(value):
        scores = []
        for seed in range(8):
            fitted = learner.set_params(regularization=value, noise=Noise(seed=seed)).fit(
                X[private], y[private]
            )
            scores.append(fitted.score(X[~train], y[~train]))
        return 1 - np.mean(scores)

    errors = {value: error(value) for value in grid["regularization"]}
    assert errors[chosen] < min(errors.values()) + 0.01, (chosen, errors)
    assert errors[noiseless] > errors[chosen] + 0.04, (noiseless, errors)


class Scores(ClassifierMixin):
    """A linear classifier that keeps the scores it computed."""

    def predict(self, X):
        self.seen.append((X.shape, X.flags.c_contiguous, X @ np.linspace(-1, 1, X.shape[1])))
        return (self.seen[-1][2] > 0).astype(int)


@pytest.mark.parametrize("n", [1, 500, *range(1022, 1026), 2047, 2048])
def test_a_record_is_scored_alike_whatever_the_number_and_the_layout_of_the_others(n):
    whole = table(2048, n_features=20)[0]
    expected = np.concatenate(
        [part @ np.linspace(-1, 1, 20) for part in (whole[:1024].copy(), whole[1024:].copy())]
    )
    wide = np.zeros((n, 40))
    wide[:, ::2] = whole[:n]
    columns = np.asfortranarray(whole[:n])
    layouts = (whole[:n].copy(), columns, columns[np.arange(n)], wide[:, ::2], columns[::-1][::-1])
    for X in layouts:
        learner = Scores()
        learner.seen = []
        mark_errors(learner, X, np.zeros(n, int))
        assert {(shape, rowwise) for shape, rowwise, _ in learner.seen} == {((1024, 20), True)}
        found = np.concatenate([scores for _, _, scores in learner.seen])[:n]
        assert found.tobytes() == expected[:n].tobytes()
