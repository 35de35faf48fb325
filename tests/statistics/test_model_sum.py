"""ModelSum: n times a site's model, which one record moves as little as at the smallest site."""

import math

import dask.array as da
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from consilience import Budget, Ledger, Noise
from consilience.errors import SettingsError
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.learners.ball import into_ball
from consilience.learners.partitions import DaskRows
from consilience.statistics.model_sum import ModelSum
from consilience.statistics.total import Total
from consilience.tables.public import Public
from sums import DELTA, MODELS, Chunks, exact, make, records


def known(statistic, X, y):
    """Return n·w by another solver, a row for each output."""
    model = exact(statistic, X, y)
    ridge = make(statistic).regularization * len(y)
    rows = into_ball(X, model)
    other = LogisticRegression(C=1 / ridge, fit_intercept=False, tol=1e-10, max_iter=10_000)
    return other.fit(rows, y).coef_ * len(y)


@pytest.mark.parametrize("statistic", MODELS)
def test_a_site_adds_its_own_exact_model_times_its_records(statistic):
    X, y = records(statistic, 300, seed=1)
    model = exact(statistic, X, y)
    found = (model.total_ * model.grain).reshape(statistic.classes - 1, -1)
    expected = known(statistic, X, y)
    if statistic.classes > 2:
        assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(expected), rel=1e-4)
    else:
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("statistic", MODELS)
def test_memory_chunks_and_dask_agree_as_closely_as_the_proof_needs(statistic):
    X, y = records(statistic, 300, seed=3)
    whole = exact(statistic, X, y)
    parts = DaskRows(da.from_array(X, chunks=(100, -1)), da.from_array(y, chunks=100))
    allowed = (
        make(statistic).fit(X, y).unit_reach()
        - 2 * math.sqrt(1.0 if statistic.classes == 2 else 2.0) / make(statistic).regularization
    )
    for source in (Chunks(X, y, 77), parts):
        gap = (exact(statistic, source).total_ - whole.total_) * whole.grain
        assert np.linalg.norm(gap) <= allowed


@pytest.mark.parametrize("statistic", MODELS)
@pytest.mark.parametrize("n", [2, 30, 1000])
def test_no_record_moves_the_sum_farther_than_stated_whatever_the_size(statistic, n):
    draw = np.random.default_rng(n)
    for seed in range(10):
        X, y = records(statistic, n, seed=seed)
        one = exact(statistic, X, y)
        X, y = X.copy(), y.copy()
        X[0], y[0] = draw.normal(size=3) * 10, (y[0] + 1) % statistic.classes
        other = exact(statistic, X, y)
        moved = np.linalg.norm((one.total_ - other.total_) * one.grain)
        assert moved <= make(statistic).fit(X, y).unit_reach()


def test_the_total_is_the_average_by_size_and_public_records_join_it():
    statistic = MODELS[0]
    parts = [records(statistic, n, seed=n) for n in (100, 300)]
    members = [exact(statistic, *part) for part in parts]
    joined = Total("equal").combine(members)
    alone = [Total().combine([member]) for member in members]
    mean = (100 * alone[0].coef + 300 * alone[1].coef) / 400
    assert joined.coef == pytest.approx(mean, rel=1e-6)
    with_public = Total("equal").combine(members[:1], Public(*parts[1]))
    assert with_public.coef == pytest.approx(mean, rel=1e-4)


def test_noise_shrinks_the_average_and_sites_beat_one():
    statistic = MODELS[0]
    X, y = records(statistic, 3000, seed=99)

    def error(model):
        return float(np.mean(model.predict(X) != y))

    members = [
        make(statistic, regularization=0.02, epsilon=1.0, noise=Noise(seed=i)).fit(
            *records(statistic, 300, seed=i)
        )
        for i in range(12)
    ]
    joined = error(Total().combine(members))
    assert joined < 0.15
    assert joined < np.mean([error(member) for member in members]) - 0.1


@pytest.mark.parametrize("statistic", MODELS)
def test_a_model_survives_its_file(statistic, tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.allow("ward", Budget(epsilon=1.0, delta=1e-5))
    model = make(statistic, epsilon=0.5)
    model.fit(*records(statistic, 50), ledger=ledger, dataset="ward")
    assert ledger.balance("ward").spent.epsilon == pytest.approx(0.5)
    study = {"name": "toy", "digest": "0" * 64}
    file = Contribution.make(
        model, study=study, site="north", sequence=1, key=SigningKey.generate()
    )
    file.save(tmp_path / "sum")
    again = Contribution.load(tmp_path / "sum")
    assert np.array_equal(again.learner.total_, model.total_)
    X, _ = records(statistic, 20)
    assert np.array_equal(again.learner.predict(X), model.predict(X))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"regularization": 0.0}, "regularization"),
        ({"regularization": 1e-9}, "regularization"),
        ({"regularization": "auto"}, "regularization"),
        ({"unit": "person", "records_per_person": 2}, "'record' or 'site'"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, word):
    settings = {"classes": [0, 1], "epsilon": 1.0, "delta": DELTA, **changes}
    with pytest.raises(SettingsError, match=word):
        ModelSum(**settings).fit([[0.1], [0.2]], [0, 1])


# ------------------------------------------------------------------------------- other relations


def test_where_the_number_of_records_is_hidden_each_site_counts_once():
    added = make(MODELS[0], neighbours="add-remove", regularization=2.0)
    X, y = records(MODELS[0], 300, seed=1)
    models = [exact(added, X[:n], y[:n]) for n in (300, 20)]
    for model, n in zip(models, (300, 20), strict=True):
        other = LogisticRegression(C=0.5, fit_intercept=False, tol=1e-10)
        expected = other.fit(into_ball(X[:n], model), y[:n]).coef_
        assert model.summed().values == pytest.approx(expected.ravel(), abs=1e-3)
        assert model.summed().size == 1.0
    mean = (models[0].summed().values + models[1].summed().values) / 2
    joined = Total().combine(models)
    ball = models[0]
    rows = into_ball(X, ball)
    assert joined.predict(X).tolist() == (rows @ mean > 0).astype(int).tolist()
    made = make(MODELS[0], neighbours="add-remove", regularization=2.0).fit(X, y)
    assert not hasattr(made, "public_size_")
    assert made.guarantee_.neighbours == "add-remove"


def test_a_model_that_hides_its_whole_site_is_cut():
    X, y = records(MODELS[0], 300, seed=1)
    for most in (0.5, 1e4):
        cut = make(MODELS[0], unit="site", max_norm=most)
        model, whole = exact(cut, X, y), exact(MODELS[0], X, y)
        found, w = model.summed().values, whole.summed().values / 300
        short = min(1.0, most / np.linalg.norm(w))
        assert found == pytest.approx(w * short, abs=1e-4)
        assert np.linalg.norm(found) <= most
        assert cut.fit(X, y).guarantee_.unit == "site"
        assert not hasattr(cut, "public_size_")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": "site"}, "Set both, or neither"),
        ({"max_norm": 1.0}, "Set both, or neither"),
        ({"max_norm": -1.0, "unit": "site"}, "max_norm"),
        ({"max_norm": 1.0, "unit": "site", "neighbours": "add-remove"}, "take part by name"),
        ({"neighbours": "add-remove", "regularization": 1e-4}, "from 0.001"),
    ],
)
def test_relations_that_cannot_work_are_refused(changes, said):
    with pytest.raises(SettingsError, match=said):
        make(MODELS[0], **changes).check_settings()
