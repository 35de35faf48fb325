"""Promises that every learner keeps: charges once and before drawing, states its guarantee, leaks
nothing.
"""

import inspect
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.base import clone

import consilience
from bounded import PrivateRidge
from consilience import (
    Average,
    Budget,
    Ledger,
    Noise,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    Public,
    adapt,
    choose_on_public,
    evaluate,
    plan,
    predict_at_cost,
    simulate,
    start_from,
)
from consilience.aggregators.accuracy import private_accuracy
from consilience.aggregators.base import ENSEMBLES
from consilience.errors import (
    BudgetExceeded,
    ConsilienceError,
    LedgerDamaged,
    SchemaMismatch,
    SettingsError,
)
from consilience.learners import base, registry
from consilience.learners.ball import Ball, into_ball
from consilience.learners.projection import PrivatePCA
from consilience.learners.provenance import HOW_ENCODED
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.forest import PrivateForestClassifier, PrivateTreeClassifier
from consilience.privacy.mechanisms import Source

LEARNERS = [PrivateLogisticRegression, PrivateLinearSVC, PrivateRidge]
TREES = [PrivateTreeClassifier, PrivateForestClassifier, PrivateAdaBoostClassifier]
EVERY = [*LEARNERS, *TREES]
CLASSIFIERS = [*LEARNERS[:2], *TREES]
MECHANISMS = ["objective", "output", "generalized", "matrix", "auto"]


def make(learner, **settings):
    """Return a learner with the relation of the others and, for trees, the bounds they need."""
    return learner(
        **({"neighbours": "replace-one", "bounds": (-1, 1)} if learner in TREES else {}) | settings
    )


def released(fitted):
    """Return all that a fitted learner keeps of its records, as bytes."""
    return {name: array.tobytes() for name, array in fitted.released_state().items()}


@pytest.fixture
def table():
    source = Noise(seed=7).open()
    X = source.normal(300 * 4).reshape(300, 4) / 4
    return X, (X[:, 0] + 0.2 * source.normal(300) > 0).astype(int)


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("neighbours", ["replace-one", "add-remove"])
def test_the_guarantee_is_never_weaker_than_asked(learner, mechanism, delta, neighbours, table):
    fitted = learner(
        epsilon=0.7, delta=delta, mechanism=mechanism, neighbours=neighbours, public_size=300
    ).fit(*table)
    guarantee = fitted.guarantee_
    assert guarantee.holds
    assert 0 < guarantee.epsilon <= 0.7
    assert guarantee.delta <= delta
    assert (guarantee.unit, guarantee.neighbours) == ("record", neighbours)
    if mechanism in ("objective", "output"):
        assert guarantee.epsilon == pytest.approx(0.7, rel=1e-9), "budget was left unused"
    assert np.isfinite(fitted.coef_).all()


@pytest.mark.parametrize("learner", EVERY)
def test_a_fit_charges_exactly_once_and_a_refit_charges_again(learner, ledger, table):
    model = make(learner, epsilon=0.25)
    model.fit(*table, ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.25)
    assert model.receipt_["dataset"] == "ward"
    model.fit(*table, ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.5)


@pytest.mark.parametrize("learner", EVERY)
def test_the_charge_is_committed_before_any_noise_is_drawn(learner, ledger, table, monkeypatch):
    spent_at_first_draw = []
    words = Source.words

    def watched(self, n):
        spent_at_first_draw.append(Ledger(ledger.path).balance("ward").spent.epsilon)
        return words(self, n)

    monkeypatch.setattr(Source, "words", watched)
    make(learner, epsilon=0.25).fit(*table, ledger=ledger, dataset="ward")
    assert spent_at_first_draw
    assert min(spent_at_first_draw) == pytest.approx(0.25)


@pytest.mark.parametrize("learner", EVERY)
def test_a_retry_with_the_same_key_returns_the_first_result_without_a_second_charge(
    learner, ledger, table
):
    first = make(learner, epsilon=0.25).fit(*table, ledger=ledger, dataset="ward", key="k")
    again = make(learner, epsilon=0.25).fit(*table, ledger=ledger, dataset="ward", key="k")
    assert released(first) == released(again)
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.25)


@pytest.mark.parametrize("learner", EVERY)
def test_an_exhausted_budget_stops_the_fit_before_it_starts(learner, ledger, table, monkeypatch):
    monkeypatch.setattr(base.Noise, "open", lambda *_, **__: pytest.fail("noise was drawn"))
    model = make(learner, epsilon=1.5)
    with pytest.raises(BudgetExceeded):
        model.fit(*table, ledger=ledger, dataset="ward")
    assert not hasattr(model, "guarantee_")
    assert ledger.balance("ward").spent.epsilon == 0


@pytest.mark.parametrize("learner", EVERY)
@pytest.mark.parametrize(
    "settings",
    [{"noise": Noise(seed=1), "epsilon": 0.5}, {"epsilon": math.inf}],
    ids=["seeded", "infinite"],
)
def test_what_has_no_guarantee_cannot_be_charged(learner, settings, ledger, table):
    with pytest.raises(SettingsError, match="Nothing was trained or charged"):
        make(learner, **settings).fit(*table, ledger=ledger, dataset="ward")
    assert ledger.charges() == []


def test_a_ledger_without_a_data_set_name_is_refused(ledger, table):
    with pytest.raises(SettingsError, match="dataset="):
        PrivateRidge(epsilon=0.5, label_bound=1.0).fit(*table, ledger=ledger)


@pytest.mark.parametrize("learner", EVERY)
def test_a_ledger_that_cannot_be_written_stops_the_fit(learner, ledger, table, monkeypatch):
    if os.geteuid() == 0:
        ledger.path.write_bytes(b"not a database at all, rather something else entirely" * 100)
    else:
        ledger.path.chmod(0o400)
    model = make(learner, epsilon=0.5)
    with pytest.raises(LedgerDamaged):
        model.fit(*table, ledger=Ledger(ledger.path), dataset="ward")
    assert not hasattr(model, "guarantee_")


@pytest.mark.parametrize("learner", EVERY)
def test_a_seed_voids_the_guarantee_and_repeats_the_noise(learner, table):
    seeded = make(learner, epsilon=0.5, noise=Noise(seed=3))
    assert not seeded.fit(*table).guarantee_.holds
    # A forest's features are public randomness, and are drawn again.
    seeded.set_params(random_state=0).fit(*table)
    assert released(clone(seeded).fit(*table)) == released(seeded)


@pytest.mark.parametrize("learner", EVERY)
def test_random_state_is_public_randomness_and_keeps_noise_fresh(learner, table):
    settings = {"mechanism": "matrix"} if learner in LEARNERS else {}
    one, two = (
        make(learner, epsilon=0.5, random_state=0, **settings).fit(*table) for _ in range(2)
    )
    assert one.guarantee_.holds
    assert released(one) != released(two)


@pytest.mark.parametrize("learner", EVERY)
def test_no_random_state_stays_in_a_fitted_learner(learner, table):
    fitted = make(learner, epsilon=0.5).fit(*table)
    kept = {type(value).__name__ for value in vars(fitted).values()}
    assert not kept & {"Source", "Generator", "ChaCha", "RandomState"}
    params = set(fitted.get_params()) | (
        set(TREES[1](epsilon=0.5).get_params()) if learner in TREES else set()
    )
    assert set(vars(fitted)) - params <= {
        *(
            {"bins_", "shape_", "counts_", "values_", "leaf_variance_", "_leaves"}
            if learner in TREES
            else {"coef_", "intercept_"}
        ),
        "n_features_in_",
        "feature_names_in_",
        "classes_",
        "events_",
        "guarantee_",
        "public_size_",
        "receipt_",
        "_fitted_with",  # the settings, in words
    }
    if "_leaves" in vars(fitted):  # released parts under one name, and what follows from them
        fitted.predict(table[0])
        leaves = dict(vars(fitted._leaves))
        assert leaves.pop("shape") is fitted.shape_
        assert leaves.pop("bins") is fitted.bins_
        assert leaves.pop("counts") is fitted.counts_
        assert leaves.pop("variance") == fitted.leaf_variance_
        assert leaves.keys() == {"prune", "values", "calibration"}
        assert set(vars(leaves["calibration"])) == {"power", "offset"}


@pytest.mark.parametrize("learner", EVERY)
def test_worker_processes_draw_different_noise(learner, table):
    from joblib import Parallel, delayed

    fits = Parallel(n_jobs=2)(
        delayed(clone(make(learner, epsilon=0.5)).fit)(*table) for _ in range(4)
    )
    assert len({str(released(fitted)) for fitted in fits}) == 4


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0, 1e6])
def test_rescaling_the_data_and_its_declared_norm_changes_nothing_private(learner, scale, table):
    X, y = table
    plain = learner(epsilon=0.5, noise=Noise(seed=1), data_norm=1.0).fit(X, y)
    scaled = learner(epsilon=0.5, noise=Noise(seed=1), data_norm=scale).fit(X * scale, y)
    np.testing.assert_allclose(scaled.coef_ * scale, plain.coef_, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("learner", LEARNERS)
def test_rows_beyond_the_declared_norm_are_clipped_not_refused(learner, table):
    X, y = table
    long = np.vstack([X, [[1e9, 0, 0, 0]]])
    clipped = np.vstack([X, [[1.0, 0, 0, 0]]])
    labels = np.append(y, 1)
    one, two = (
        learner(epsilon=0.5, noise=Noise(seed=1)).fit(rows, labels) for rows in (long, clipped)
    )
    np.testing.assert_allclose(one.coef_, two.coef_, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("make", [np.asarray, sparse.csr_array])
def test_no_finite_value_is_too_large_to_train_on(learner, make):
    X = np.array([[1e300, 0.0], [0.0, -1e200], [0.1, 0.2]] * 5)
    fitted = learner(epsilon=math.inf, data_norm=1e-10).fit(make(X), [0, 1, 1] * 5)
    assert np.isfinite(fitted.coef_).all()


@pytest.mark.parametrize("learner", EVERY)
def test_a_budget_of_exactly_epsilon_admits_a_fit_at_epsilon(learner, tmp_path, table):
    for number, epsilon in enumerate((0.1, 0.3, 0.7, 1.1)):
        for mechanism in ("objective", "output") if learner in LEARNERS else ("trees",):
            ledger = Ledger(tmp_path / f"{number}-{mechanism}.db")
            ledger.allow("ward", Budget(epsilon=epsilon, delta=1e-5))
            settings = {"mechanism": mechanism} if learner in LEARNERS else {}
            make(learner, epsilon=epsilon, delta=1e-5, **settings).fit(
                *table, ledger=ledger, dataset="ward"
            )
            assert ledger.balance("ward").left.epsilon == 0


@pytest.mark.parametrize("learner", LEARNERS)
def test_dense_sparse_and_data_frames_train_alike(learner, table):
    import pandas
    import polars
    import pyarrow

    X, y = table
    names = [f"c{i}" for i in range(4)]
    frame = pandas.DataFrame(X, columns=names)
    forms = [
        X,
        sparse.csr_array(X),
        sparse.csc_matrix(X),
        frame,
        polars.DataFrame(dict(frame)),
        pyarrow.table(frame),
    ]
    fits = [learner(epsilon=1.0, noise=Noise(seed=1)).fit(form, y) for form in forms]
    for fitted in fits[1:]:
        np.testing.assert_allclose(fitted.coef_, fits[0].coef_, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0},
        {"epsilon": -1},
        {"epsilon": math.nan},
        {"epsilon": "1"},
        {"epsilon": True},
        {"delta": 1.0},
        {"delta": -0.1},
        {"delta": math.nan},
        {"mechanism": "laplace"},
        {"regularization": 0},
        {"regularization": math.nan},
        {"data_norm": 0},
        {"data_norm": math.inf},
        {"neighbours": "both"},
        {"neighbours": "add-remove"},
        {"unit": "family"},
        {"unit": "person"},
        {"calibration": "loose"},
        {"calibration": "thesis"},
        {"noise": 3},
        {"unit": "person", "records_per_person": 0},
    ],
    ids=str,
)
def test_a_bad_setting_is_named_before_anything_happens(learner, settings, table):
    with pytest.raises(ConsilienceError) as caught:
        learner(**{"epsilon": 0.5, **settings}).fit(*table)
    assert any(name in str(caught.value) for name in settings)


@pytest.mark.parametrize("learner", EVERY)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(learner, value, table):
    X, y = table
    X = X.copy()
    X[3, 2] = value
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        make(learner, epsilon=0.5).fit(X, y)


@pytest.mark.parametrize("learner", EVERY)
def test_no_error_repeats_a_record(learner, table):
    X, y = table
    marked = "TOPSECRET-4711"
    cells = X.astype(object)
    cells[5, 1] = marked
    attempts = [
        lambda: make(learner, epsilon=0.5).fit(cells, y),
        lambda: make(learner, epsilon=0.5, unit="person", records_per_person=2).fit(
            X, y, persons=[marked] * 3
        ),
        lambda: make(learner, epsilon=0.5).fit(X, y, persons=[marked] * len(y)),
        lambda: make(learner, epsilon=0.5).fit(X, y).predict(cells),
    ]
    if learner in CLASSIFIERS:
        odd = y.astype(object)
        odd[0] = marked
        attempts.append(
            lambda: make(learner, epsilon=0.5, classes=["0", "1"]).fit(X, odd.astype(str))
        )
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what is tested
            attempt()
        error: BaseException | None = caught.value
        while error is not None:
            assert marked not in str(error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("learner", EVERY)
def test_a_fitted_learner_refuses_rows_of_another_width(learner, table):
    fitted = make(learner, epsilon=0.5).fit(*table)
    with pytest.raises(ValueError, match="features"):
        fitted.predict(np.zeros((2, 9)))


@pytest.mark.parametrize("learner", EVERY)
def test_one_record_and_a_zero_row_train(learner):
    settings = {"classes": [0, 1]} if learner in CLASSIFIERS else {}
    fitted = make(learner, epsilon=0.5, **settings).fit(np.zeros((1, 3)), [1])
    assert np.isfinite(fitted.predict(np.zeros((2, 3)))).all()


@pytest.mark.parametrize("learner", CLASSIFIERS)
def test_a_site_that_lacks_a_class_trains_and_can_predict_it(learner, table):
    X, _ = table
    fitted = make(learner, epsilon=5.0, classes=["ill", "well", "unsure"]).fit(
        X, np.repeat("well", len(X))
    )
    assert list(fitted.classes_) == ["ill", "well", "unsure"]
    scores = (
        fitted.predict_proba(X) if hasattr(fitted, "predict_proba") else fitted.decision_function(X)
    )
    assert scores.shape == (len(X), 3)
    assert fitted.guarantee_.assumptions == (HOW_ENCODED,)


@pytest.mark.parametrize("learner", CLASSIFIERS)
def test_an_undeclared_label_is_refused(learner, table):
    X, y = table
    with pytest.raises(SchemaMismatch, match="declared classes"):
        make(learner, epsilon=0.5, classes=[0, 2]).fit(X, y)


@pytest.mark.parametrize("learner", CLASSIFIERS)
def test_labels_read_from_the_data_are_an_assumption(learner, table):
    assert (
        "read from the training labels"
        in make(learner, epsilon=0.5).fit(*table).guarantee_.assumptions[0]
    )
    declared = make(learner, epsilon=0.5, classes=[0, 1]).fit(*table)
    assert declared.guarantee_.assumptions == (HOW_ENCODED,)


@pytest.mark.parametrize("learner", CLASSIFIERS)
def test_renaming_the_labels_renames_the_predictions(learner, table):
    X, y = table
    seeded = {"epsilon": 1.0, "noise": Noise(seed=2), "random_state": 0}
    plain = make(learner, classes=[0, 1], **seeded).fit(X, y).predict(X)
    named = (
        make(learner, classes=["no", "yes"], **seeded).fit(X, np.array(["no", "yes"])[y]).predict(X)
    )
    assert np.array_equal(np.array(["no", "yes"])[plain], named)


@pytest.mark.parametrize("learner", LEARNERS[:2])
def test_the_order_of_declared_classes_is_the_order_of_the_scores(learner, table):
    X, y = table
    forward = learner(epsilon=math.inf, classes=[0, 1]).fit(X, y)
    backward = learner(epsilon=math.inf, classes=[1, 0]).fit(X, y)
    assert np.array_equal(forward.predict(X), backward.predict(X))
    np.testing.assert_allclose(forward.coef_, -backward.coef_, atol=1e-6)


@pytest.mark.parametrize("learner", EVERY)
def test_an_empty_site_is_an_error_where_its_size_is_public_and_noise_where_it_is_not(learner):
    settings = {"classes": [0, 1]} if learner in CLASSIFIERS else {}
    empty = np.zeros((0, 3)), np.zeros(0, dtype=int)
    with pytest.raises(ValueError, match="0 sample"):
        make(learner, epsilon=0.5, **settings).fit(*empty)
    settings |= {"public_size": 100} if "public_size" in learner._get_param_names() else {}
    fitted = make(learner, epsilon=0.5, neighbours="add-remove", **settings).fit(*empty)
    assert np.isfinite(fitted.predict(np.zeros((2, 3)))).all()
    assert fitted.guarantee_.epsilon == pytest.approx(0.5)


@pytest.mark.parametrize("learner", EVERY)
def test_hiding_persons_uses_few_records_of_each_and_scales_the_noise(learner, table):
    X, y = table
    persons = np.repeat(np.arange(100), 3)
    by_person = make(learner, epsilon=1.0, unit="person", records_per_person=2).fit(
        X, y, persons=persons
    )
    assert by_person.guarantee_.unit == "person"
    with pytest.raises(SettingsError, match="persons="):
        make(learner, epsilon=1.0, unit="person", records_per_person=2).fit(X, y)
    with pytest.raises(SettingsError, match="unit='person'"):
        make(learner, epsilon=1.0).fit(X, y, persons=persons)


def test_a_crash_after_the_charge_keeps_the_charge(tmp_path):
    """One process imports once and forks for every learner, which dies while it trains."""
    script = f"""
import os, sys, numpy as np
from consilience import {", ".join(one.__name__ for one in EVERY)}, Ledger
from consilience.learners import perturbation
from consilience.learners.trees import adaboost, forest
perturbation.solve = forest.add_noise = adaboost.add_noise = lambda *a, **k: os._exit(9)
X = np.linspace(-0.5, 0.5, 40).reshape(10, 4)
for kind in ({", ".join(one.__name__ for one in EVERY)}):
    if (child := os.fork()) == 0:
        needed = {{"neighbours": "replace-one", "bounds": (-1, 1)}}
        trees = ({", ".join(one.__name__ for one in TREES)})
        bound = {{"label_bound": 1.0}} if kind.predicts_number else {{}}
        learner = kind(epsilon=0.25, **(needed if kind in trees else bound))
        ledger = Ledger(f"{tmp_path}/{{kind.__name__}}.db")
        learner.fit(X, [0, 1] * 5, ledger=ledger, dataset="ward", key="crash")
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    ledgers = [Ledger(tmp_path / f"{learner.__name__}.db") for learner in EVERY]
    for ledger in ledgers:
        ledger.allow("ward", Budget(epsilon=1.0))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "9\n" * len(EVERY), run.stderr
    for ledger in ledgers:
        assert ledger.balance("ward").spent.epsilon == pytest.approx(0.25)
        ledger.verify()


def test_the_receipt_names_charge_and_cost(ledger, table):
    fitted = PrivateLogisticRegression(epsilon=0.25, delta=1e-6).fit(
        *table, ledger=ledger, dataset="ward"
    )
    text = json.dumps(fitted.receipt_)
    assert "ward" in text
    assert ledger.charges()[0].hash in text


def test_a_budget_in_rho_takes_what_has_a_rho(tmp_path, table):
    ledger = Ledger(tmp_path / "rho.db")
    ledger.allow("ward", Budget(rho=0.5))
    PrivateLogisticRegression(epsilon=0.5, delta=1e-6, mechanism="output").fit(
        *table, ledger=ledger, dataset="ward"
    )
    assert 0 < ledger.balance("ward").spent.rho < 0.125


# ------------------------------------------------------------------------- all of a fit, or nothing


@pytest.mark.parametrize("learner", EVERY)
def test_a_fit_whose_seal_fails_leaves_the_learner_as_it_was(learner, table, tmp_path, monkeypatch):
    X, y = table
    books = Ledger(tmp_path / "books.sqlite")
    books.allow("ward", Budget(epsilon=9.0))
    model = make(learner, epsilon=1.0)
    model.fit(X, y, ledger=books, dataset="ward")
    before, kept = dict(vars(model)), released(model)

    def fail(*_):
        raise LedgerDamaged("The disk is full.")

    monkeypatch.setattr(Ledger, "seal", fail)
    with pytest.raises(LedgerDamaged):
        model.set_params(epsilon=1.0).fit(X[:, :2], y, ledger=books, dataset="ward")
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[name] is before[name] for name in before)
    assert released(model) == kept
    new = make(learner, epsilon=1.0)
    with pytest.raises(LedgerDamaged):
        new.fit(X, y, ledger=books, dataset="ward")
    assert not [name for name in vars(new) if name.endswith("_") and not name.startswith("_")]


# ----------------------------------------------------------------- values in the errors of others

SECRET = ("Ängström-4711", 8.4711002233e17)


def everything_said(call):
    """Return the texts of the error of a call, if there is one, and of all that it drags along."""
    try:
        call()
    except Exception as problem:
        said, waiting = [], [problem]
    else:
        return ""
    while waiting:
        error = waiting.pop()
        said.append(repr(error) + str(error))
        waiting += [each for each in (error.__cause__, error.__context__) if each is not None]
    return " ".join(said)


def spoiled(kind):
    """Return a table and labels that no learner can use, because of one value."""
    X = np.zeros((60, 3))
    y = np.arange(60) % 2
    text, number = SECRET
    if kind == "text in the table":
        X = X.astype(object)
        X[3, 1] = text
    elif kind == "a flat table":
        X = np.full(60, number)
    elif kind == "a text":
        X = text
    elif kind == "ragged rows":
        X = [[0.0, 0.0, 0.0], [text]] * 30
    elif kind == "a number too long":
        X = [[10**400 + int(number), 0, 0]] * 60
    elif kind == "text in the labels":
        y = [text, *y[1:].tolist()]
    elif kind == "labels of two kinds":
        y = [text, None, *y[2:].tolist()]
    elif kind == "labels in rows":
        y = np.full((60, 2), number)
    elif kind == "continuous labels":
        y = np.linspace(0, number, 60)
    elif kind == "missing labels":
        y = [number, float("nan")] * 30
    return X, y


KINDS = (
    *("text in the table", "a flat table", "a text", "ragged rows", "a number too long"),
    *("text in the labels", "labels of two kinds", "labels in rows", "continuous labels"),
    "missing labels",
)


def shows_secret(said):
    text, number = SECRET
    return text in said or "4711" in said or str(int(number)) in said


@pytest.mark.filterwarnings("ignore:The number of unique classes")
@pytest.mark.parametrize("learner", EVERY)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("declared", [True, False])
def test_no_error_repeats_a_value_of_a_record(learner, kind, declared, table):
    settings = {"classes": [0, 1]} if declared and learner is not PrivateRidge else {}
    X, y = spoiled(kind)
    model = make(learner, epsilon=1.0, noise=Noise(seed=1), **settings)
    assert not shows_secret(everything_said(lambda: model.fit(X, y)))
    fitted = make(learner, epsilon=1.0, noise=Noise(seed=1), **settings).fit(*table)
    for method in ("predict", "predict_proba", "decision_function", "score"):
        if hasattr(fitted, method):
            given = (X, y) if method == "score" else (X,)
            asked = partial(getattr(fitted, method), *given)
            assert not shows_secret(everything_said(asked))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("combined", [True, False], ids=["ensemble", "learner"])
def test_no_error_of_ensembles_and_measures_repeats_a_value(kind, combined, table):
    trained = [PrivateLogisticRegression(epsilon=9.0, classes=[0, 1]).fit(*table) for _ in range(2)]
    model = Average("equal").combine(trained) if combined else trained[0]
    X, y = spoiled(kind)
    asked = (
        lambda: model.predict(X),
        lambda: model.predict_proba(X),
        lambda: private_accuracy(
            model, X, y, epsilon=1.0, neighbours="replace-one", noise=Noise(seed=1)
        ),
        lambda: evaluate(model, X, y),
    )
    for ask in asked:
        assert not shows_secret(everything_said(ask))


def test_the_search_for_values_finds_them_where_nothing_is_shielded():
    from sklearn.linear_model import LogisticRegression

    found = everything_said(lambda: LogisticRegression().fit(*spoiled("text in the table")))
    assert shows_secret(found)


SEES_RECORDS = ("fit", "predict", "predict_proba", "decision_function", "score", "transform")
TABLES = {"X", "y", "X_public", "records", "public"}  # how parameters are called that take them


def test_everything_public_that_is_given_records_is_shielded():
    """A class or a function that is added is found here, whether or not anybody thought of it."""
    public = [getattr(consilience, name) for name in consilience.__all__]
    kinds = [each for each in public if inspect.isclass(each)]
    for kind in [*kinds, *ENSEMBLES.values(), *registry.LEARNERS.values()]:
        for name in SEES_RECORDS:
            method = inspect.getattr_static(kind, name, None)
            if inspect.isfunction(method):
                assert hasattr(method, "_is_shielded"), f"{kind.__name__}.{name}"


def asking(fitted):
    """Return, for each public function that is given records, how it is asked."""
    learner = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    return {
        "adapt": lambda X, y: adapt(fitted, (X, y), compare=False),
        "choose_on_public": lambda X, y: choose_on_public(learner, {"data_norm": [1.0]}, X, y),
        "evaluate": lambda X, y: evaluate(fitted, X, y),
        "plan": lambda X, y: plan(n_records=100, epsilon=1.0, public=(np.asarray(X, object), y)),
        "predict_at_cost": lambda X, y: predict_at_cost(fitted, X),
        "simulate": lambda X, y: simulate(learner, Average(), X, y),
        "start_from": lambda X, y: start_from(Public(X, y)),
    }


@pytest.mark.filterwarnings("ignore:The number of unique classes")
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"ragged rows", "a text"}))
def test_no_error_of_a_public_function_or_an_adapted_model_repeats_a_value(kind, table):
    fitted = PrivateLogisticRegression(epsilon=9.0, classes=[0, 1]).fit(*table)
    known = {
        name
        for name in consilience.__all__
        if inspect.isfunction(getattr(consilience, name))
        and TABLES & set(inspect.signature(getattr(consilience, name)).parameters)
    }
    ask, (X, y) = asking(fitted), spoiled(kind)
    assert set(ask) == known
    for each in ask.values():
        assert not shows_secret(everything_said(partial(each, X, y)))
    adapted = adapt(fitted, (table[0][:50], table[1][:50]), compare=False)
    for name in ("predict", "predict_proba", "decision_function"):
        assert not shows_secret(everything_said(partial(getattr(adapted, name), X)))


# --------------------------------------------------------------- what a second attack had found


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_retry_with_other_settings_is_refused_instead_of_signed(learner, table, tmp_path):
    X, y = table
    books = Ledger(tmp_path / "books.sqlite")
    books.allow("ward", Budget(epsilon=9.0))
    charge = {"ledger": books, "dataset": "ward", "key": "k"}
    first = learner(epsilon=1.0, data_norm=1.0).fit(X, y, **charge)
    again = learner(epsilon=1.0, data_norm=1.0).fit(X, y, **charge)
    assert released(again) == released(first)
    with pytest.raises(SettingsError, match="the key of another result"):
        learner(epsilon=1.0, data_norm=50.0).fit(X, y, **charge)


@pytest.mark.parametrize("learner", CLASSIFIERS)
def test_declared_labels_of_any_kind_and_variety_train_in_silence(learner, recwarn):
    X = Noise(seed=3).open().uniform(120).reshape(40, 3) - 0.5
    many = make(learner, epsilon=1.0, classes=list(range(30)))
    many.fit(X, np.arange(40) % 21)
    halves = make(learner, epsilon=1.0, classes=[0.0, 0.5, 1.0])
    halves.fit(X, np.where(np.arange(40) == 3, 0.5, np.arange(40) % 2))
    assert not recwarn.list


def test_a_label_beyond_all_bounds_is_clipped_in_silence(recwarn):
    X, y = np.zeros((20, 2)), np.zeros(20)
    y[3] = 1e308
    PrivateRidge(epsilon=1.0, label_bound=0.1).fit(X, y)
    PrivateRidge(epsilon=1.0, label_bound=1.0).fit(X, np.zeros(20)).predict(
        np.full((2, 2), 1.7e308)
    )
    assert not recwarn.list


@pytest.mark.parametrize("learner", EVERY)
def test_persons_are_one_wherever_their_ids_are_compared(learner, table):
    X, y = table
    settings = {"unit": "person", "records_per_person": 2, "noise": Noise(seed=1), "epsilon": 1.0}
    ids = [f"p{i % 100}" for i in range(len(y))]
    spelled = [f" {name} " if i % 2 else name for i, name in enumerate(ids)]
    one, two = (make(learner, **settings).fit(X, y, persons=each) for each in (ids, spelled))
    assert one.public_size_ == two.public_size_
    assert released(one) == released(two)


class DatabaseProblem(Exception):
    """An error that is none of the usual kinds, as database drivers raise it."""


@pytest.mark.parametrize("learner", EVERY)
def test_errors_of_a_source_of_chunks_are_shielded_whatever_their_kind(learner):
    class Rows:
        n_features, n_records = 3, 60

        def chunks(self):
            raise DatabaseProblem(f"invalid input: {SECRET[0]}")

    settings = {} if learner is PrivateRidge else {"classes": [0, 1]}
    model = make(learner, epsilon=1.0, **settings)
    assert not shows_secret(everything_said(lambda: model.fit(Rows())))


# ---------------------------------------------------------------- what a third attack had found


class Chunked:
    """A table in chunks of 100 records, as users may write one."""

    names = n_records = None

    def __init__(self, X, y):
        self.X, self.y, self.n_features = X, y, X.shape[1]

    def chunks(self):
        for start in range(0, len(self.y), 100):
            yield self.X[start : start + 100], self.y[start : start + 100]


def split_entries(X):
    """Return CSR rows that store every entry in three parts, which cancel but for the entry."""
    parts = np.repeat(X.ravel(), 3)
    parts[1::3], parts[2::3] = 2.0**52, -(2.0**52)  # whatever is added to these first is rounded
    columns = np.repeat(np.tile(np.arange(X.shape[1]), len(X)), 3)
    return sparse.csr_array((parts, columns, 3 * X.shape[1] * np.arange(len(X) + 1)), X.shape)


FORMS = {
    "float32": lambda X: X.astype(np.float32),
    "sparse float32": lambda X: sparse.csr_array(X.astype(np.float32)),
    "sparse whole numbers": lambda X: sparse.csr_array(X.astype(np.int8)),
    "sparse columns": sparse.csc_array,
    "sparse, in parts": split_entries,
}


def in_doubles(X):
    """Return the table that a form of it means."""
    dense = X.copy()
    if sparse.issparse(X) and X.format == "csr":
        dense.sum_duplicates()
    return (dense.toarray() if sparse.issparse(dense) else dense).astype(np.float64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("learner", [*EVERY, PrivatePCA])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "memory"])
def test_numbers_of_any_kind_train_as_the_doubles_they_mean(learner, form, chunked):
    whole = Noise(seed=5).open().normal(300 * 4).reshape(300, 4) / 3
    X = FORMS[form](np.rint(whole) if "whole" in form else whole)
    y = (whole[:, 0] > 0).astype(int)
    if chunked and sparse.issparse(X) and X.format != "csr":
        pytest.skip("chunks are rows")
    if sparse.issparse(X) and learner in TREES and not chunked:
        pytest.skip("trees refuse sparse tables in memory")
    declared = {"n_components": 2} if learner is PrivatePCA else {}
    if learner in CLASSIFIERS:
        declared["classes"] = [0, 1]
    model = make(learner, epsilon=1.0, noise=Noise(seed=1), **declared)
    if learner in TREES:
        model.set_params(random_state=0)
    given, doubles = (
        (X, in_doubles(X)) if not chunked else (Chunked(X, y), Chunked(in_doubles(X), y))
    )
    labels = None if chunked else y
    found = released(clone(model).fit(given, labels))
    expected = clone(model).fit(doubles, labels).released_state()
    for name, array in expected.items():
        # Sparse and dense products may be added up in another order.
        np.testing.assert_allclose(
            np.frombuffer(found[name], array.dtype), array.ravel(), atol=1e-7
        )


@pytest.mark.parametrize("learner", [*LEARNERS, PrivatePCA])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "memory"])
def test_parts_that_add_up_to_infinity_are_refused_before_the_charge(learner, chunked, tmp_path):
    books = Ledger(tmp_path / "books.sqlite")
    books.allow("ward", Budget(epsilon=9.0))
    X = sparse.csr_array((np.full(4, 1e308), [0, 0, 0, 1], [0, 2, 4]), (2, 2))
    y = np.array([0, 1])
    declared = {"n_components": 2} if learner is PrivatePCA else {}
    if learner in CLASSIFIERS:
        declared["classes"] = [0, 1]
    given = (Chunked(X, y), None) if chunked else (X, y)
    with pytest.raises(ValueError, match="infinit"):
        learner(epsilon=1.0, **declared).fit(*given, ledger=books, dataset="ward")
    assert books.balance("ward").spent.epsilon == 0


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64, int])
def test_rows_are_no_longer_than_a_bound_of_few_bits(kind):
    X = 3 * Noise(seed=1).open().normal(3000 * 5).reshape(3000, 5)
    rows = into_ball(
        X, PrivateLogisticRegression(epsilon=1.0, data_norm=kind(1), fit_intercept=False)
    )
    assert max(sum(Fraction(value) ** 2 for value in row) for row in rows.tolist()) <= 1


# --------------------------------------------------------------- what a fourth attack had found

COLUMNS_OF_LABELS = {
    "one column": lambda y: y[:, None],
    "two columns": lambda y: np.column_stack([y, y]),
    "one row": lambda y: y[None, :],
    "lists": lambda y: [np.array([label]) for label in y],
    "a number": lambda y: y[0],
}


class Formed(Chunked):
    """Chunks whose rows and labels are given another form, as users may write them."""

    def __init__(self, X, y, rows=np.asarray, labels=np.asarray):
        super().__init__(X, y)
        self.rows, self.labels = rows, labels

    def chunks(self):
        for X, y in super().chunks():
            yield self.rows(X), self.labels(y)


def in_chunks(learner, n_classes=2, **settings):
    """Return a learner of tables in chunks, which declares what their records cannot tell."""
    if learner is PrivatePCA:
        settings["n_components"] = 2
    elif learner is not PrivateRidge:
        settings["classes"] = list(range(n_classes))
    return make(learner, epsilon=1.0, **settings)


@pytest.mark.parametrize("form", COLUMNS_OF_LABELS)
@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize(
    ("learner", "settings"),
    [(one, {}) for one in (*EVERY, PrivatePCA)]
    + [(one, {"mechanism": "gradient", "delta": 1e-6}) for one in LEARNERS],
)
def test_labels_of_another_shape_are_refused_before_the_charge(
    learner, settings, n_classes, form, table, ledger
):
    source = Formed(*table, labels=COLUMNS_OF_LABELS[form])
    with pytest.raises(SchemaMismatch, match="one label for each record"):
        in_chunks(learner, n_classes, **settings).fit(source, ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == 0


ROWS = {
    "frame": lambda X: pd.DataFrame(X),
    "lists": lambda X: X.tolist(),
    "matrix": np.matrix,
    "bytes in another order": lambda X: X.astype(">f8"),
    **{
        kind.__name__: kind
        for kind in (
            sparse.bsr_matrix,
            sparse.coo_array,
            sparse.coo_matrix,
            sparse.csc_matrix,
            sparse.dia_matrix,
            sparse.dok_matrix,
            sparse.lil_matrix,
        )
    },
}
LABELS = {
    "lists": lambda y: y.tolist(),
    "series": lambda y: pd.Series(y, index=[f"r{i}" for i in range(len(y))]),
    "reversed": lambda y: pd.Series(y, index=np.arange(len(y))[::-1]),
    "categories": pd.Categorical,
    "nullable": lambda y: pd.array(y, dtype="Int64"),
    "objects": lambda y: y.astype(object),
    "index": pd.Index,
}


@pytest.mark.parametrize(
    "forms",
    [*({"rows": form} for form in ROWS.values()), *({"labels": form} for form in LABELS.values())],
    ids=[*ROWS, *(f"labels: {form}" for form in LABELS)],
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # np.matrix
@pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
@pytest.mark.parametrize("learner", [*EVERY, PrivatePCA])
def test_chunks_of_any_kind_train_as_the_tables_that_they_mean(learner, forms, table):
    model = in_chunks(learner, 3, noise=Noise(seed=1))
    if learner in TREES:
        model.set_params(random_state=0)
    found = released(clone(model).fit(Formed(*table, **forms)))
    expected = clone(model).fit(Chunked(*table)).released_state()
    for name, array in expected.items():
        # Sparse and dense products may be added up in another order.
        np.testing.assert_allclose(
            np.frombuffer(found[name], array.dtype), array.ravel(), atol=1e-7
        )


@pytest.mark.parametrize("learner", [*EVERY, PrivatePCA])
def test_persons_beside_a_table_in_chunks_are_refused(learner, table, ledger):
    for source in (Chunked(*table), table[0]):
        y = None if isinstance(source, Chunked) else table[1]
        with pytest.raises(SettingsError, match="hides single records"):
            in_chunks(learner).fit(source, y, persons=table[1], ledger=ledger, dataset="ward")


@pytest.mark.parametrize("norm", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("intercept", [True, False])
def test_a_row_in_the_ball_depends_on_itself_alone_in_every_layout(norm, intercept):
    """The grid of noisy gradients would turn a difference of one bit into one of 2^-16."""
    X = 2 * Noise(seed=1).open().normal(400 * 7).reshape(400, 7)
    X[3] *= 1e200
    X[4] = 0.0
    ball = Ball(norm, intercept, 0.3)
    for make in (np.asarray, sparse.csr_array):
        alone = [into_ball(make(X[i : i + 1]), ball) for i in range(len(X))]
        alone = np.vstack([row.toarray() if sparse.issparse(row) else row for row in alone])
        tables = [X, np.repeat(X, 2, axis=0)[::2]]
        tables += [np.asfortranarray(X)] if make is np.asarray else []
        for table in tables:
            for part in (slice(0, 400), slice(1, 3), slice(2, 300)):
                rows = into_ball(make(table[part]), ball)
                rows = rows.toarray() if sparse.issparse(rows) else rows
                assert np.array_equal(rows, alone[part])


def test_classes_that_one_odd_label_could_round_are_refused():
    """NumPy makes doubles of all labels if one is a double: 2^53 + 1 would become 2^53."""
    for classes in ([2**53, 2**53 + 1], [0, -(2**60)], [0.0, 1e300], [1, 2**70]):
        with pytest.raises(SettingsError, match="as text"):
            PrivateLogisticRegression(epsilon=1.0, classes=classes).fit(np.zeros((2, 1)), classes)
