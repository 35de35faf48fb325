"""VoteTally: distillation whose votes nobody counts, because sites add them up with noise."""

import base64
import hashlib
import math
import zlib

import dask.array as da
import numpy as np
import pytest

from consilience import Budget, Ledger, Noise
from consilience.aggregators.distillation.distill import SoftLabelDistillation
from consilience.errors import BudgetExceeded, GuaranteeVoid, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.learners.linear import PrivateLogisticRegression
from consilience.learners.partitions import DaskRows
from consilience.privacy.accounting import Laplace
from consilience.simulation.once import TotalOnce
from consilience.statistics import vote_tally
from consilience.statistics.total import Total
from consilience.statistics.vote_tally import VoteTally, pack_rows, unpack_rows, whiten
from consilience.tables.public import Public
from sums import ASKED, DELTA, WHOLE, Chunks, exact, make, records

VOTES = [case for case in WHOLE if case.kind is VoteTally]
TWO = VOTES[0]


def asked(statistic):
    return Public(unpack_rows(statistic.settings["records"]) * 2.0**-15)


@pytest.mark.parametrize("statistic", VOTES)
def test_without_noise_it_is_the_distillation_of_a_trusted_hub(statistic):
    tables = [records(statistic, 40, seed=i) for i in range(30)]
    classes = statistic.settings["classes"]
    found = Total().combine([exact(statistic, *each) for each in tables])
    members = [
        PrivateLogisticRegression(
            epsilon=math.inf, classes=classes, regularization=1e-4, intercept_scaling=0.3
        ).fit(*each)
        for each in tables
    ]
    hub = SoftLabelDistillation(
        epsilon=math.inf, regularization=1e-3, classes=classes, fit_intercept=True
    )
    hub.intercept_scaling = 0.3
    hub.soft = statistic.settings.get("soft", "votes")
    expected = hub.combine(members, asked(statistic))
    made = [exact(make(statistic, strength=1e-3), *each) for each in tables]
    found = Total().combine(made)
    assert found.coef == pytest.approx(expected.coef, abs=2e-3)
    assert found.intercept == pytest.approx(expected.intercept, abs=2e-3)


@pytest.mark.parametrize("statistic", VOTES)
def test_one_site_is_one_vote_whatever_it_holds(statistic):
    K, sizes = statistic.classes, []
    for n in (0, 1, 7, 400):
        X, y = records(statistic, max(n, 1), seed=n)
        made = make(statistic).set_params(epsilon=math.inf)
        made.fit(X, y)
        sizes.append(float(np.linalg.norm(made.summed().values)))
        assert made.summed().size == 1.0
        assert not hasattr(made, "public_size_")
    assert max(sizes) <= math.sqrt(1 - 1 / K) + 1e-6
    X, _ = records(statistic, 50)
    far = [exact(statistic, 0 * X, np.full(50, k)).summed().values for k in (0, 1)]
    if statistic.settings.get("soft") != "probabilities":
        assert np.linalg.norm(far[0] - far[1]) == pytest.approx(math.sqrt(2), rel=1e-6)


def test_chunks_memory_and_dask_say_the_same():
    X, y = records(TWO, 300, seed=2)
    whole = exact(TWO, X, y).total_
    assert np.array_equal(exact(TWO, Chunks(X, y, 50)).total_, whole)
    rows = DaskRows(da.from_array(X, chunks=(100, 3)), da.from_array(y, chunks=100))
    assert np.array_equal(exact(TWO, rows).total_, whole)


def test_public_records_travel_as_one_text():
    X = records(TWO, 30, seed=3)[0]
    packed = pack_rows(Public(2 * X), data_norm=2.0)
    assert packed == pack_rows(Public(X))
    assert unpack_rows(packed) * 2.0**-15 == pytest.approx(X, abs=2.0**-15)
    white = whiten(packed, 0.3)
    assert white.Y.T @ white.Y / 30 == pytest.approx(np.eye(4), abs=1e-9)
    assert white.reach == pytest.approx(1.0, abs=1e-9)


def test_the_axes_are_the_same_on_every_machine():
    """A digest of their bits: whoever computes others adds up numbers along other axes."""
    rows = (np.arange(120) * 7919 % 20_011 - 10_000).reshape(30, 4)
    found = hashlib.sha256(whiten(longer(rows), 0.3).Y.tobytes()).hexdigest()
    assert found == "f81f0c10f7fe086fad5f2f8f597c3dbc331dbe3fb2628c0d6ea858266c3b6352"


def test_columns_that_repeat_each_other_are_asked_about_once():
    X = records(TWO, 30, seed=3)[0]
    packed = pack_rows(Public(np.hstack([X, X]) / 2))
    assert whiten(packed, 0.3).Y.shape == (30, 4)
    model = make(TWO, records=packed)
    wide = np.hstack([X, X]) / 2
    assert model.fit(wide, X[:, 0] > 0).length == 4
    assert (model.set_params(noise=None).predict(wide)).shape == (30,)


def bomb():
    return base64.b64encode(zlib.compress(bytes(1 << 26), 9)).decode()


def longer(steps):
    head = np.array(steps.shape, "<u4").tobytes()
    return base64.b64encode(zlib.compress(head + steps.astype("<i2").tobytes())).decode()


@pytest.mark.parametrize(
    "text",
    [
        *(None, 3, "", "no records", "AAAA", bomb()),
        *(ASKED[:-8], longer(np.full((2, 3), 30_000)), longer(np.zeros((2, 3)))[:-4]),
    ],
)
def test_what_is_no_public_record_is_refused(text):
    with pytest.raises(SettingsError, match="records"):
        make(TWO, records=text).check_settings()


def test_settings_that_cannot_work_are_refused(monkeypatch):
    for changes, said in (
        ({"unit": "record"}, "'site'"),
        ({"neighbours": "add-remove"}, "sites take part by name"),
        ({"soft": "loud"}, "'votes' or 'probabilities'"),
        ({"strength": 0}, "'auto'"),
        ({"regularization": 1e-9}, "regularization"),
    ):
        with pytest.raises(SettingsError, match=said):
            make(TWO, **changes).check_settings()
    with pytest.raises(SettingsError, match="have 3 columns"):
        make(TWO).fit(np.zeros((4, 2)), [0, 1, 0, 1])
    monkeypatch.setattr(vote_tally, "MOST_STEPS", 10)
    unpack_rows.cache_clear()
    whiten.cache_clear()
    with pytest.raises(SettingsError, match="reasonable time"):
        make(TWO).check_settings()


def test_a_ledger_counts_a_whole_site_as_each_of_its_records(tmp_path):
    """The same cost under any limit: per record or person, replaced, added or removed."""
    X, y = records(TWO, 60, seed=4)
    for unit in ("record", "person", "site"):
        for neighbours in ("replace-one", "add-remove"):
            ledger = Ledger(tmp_path / f"{unit}-{neighbours}.sqlite")
            limit = Budget(epsilon=1.5, delta=1e-5, unit=unit, neighbours=neighbours)
            ledger.allow("ward", limit)
            if (unit, neighbours) == ("site", "add-remove"):
                with pytest.raises(GuaranteeVoid):
                    make(TWO).fit(X, y, ledger=ledger, dataset="ward")
                continue
            made = make(TWO).fit(X, y, ledger=ledger, dataset="ward")
            spent = ledger.balance("ward").spent
            assert spent.epsilon == pytest.approx(1.0)
            assert spent.delta == pytest.approx(DELTA)
            assert ledger.balance("ward").cost(made.guarantee_).epsilon == pytest.approx(1.0)
            facts = {"study": {"name": "s", "digest": "0" * 64}, "site": "a", "sequence": 1}
            path = tmp_path / f"{unit}-{neighbours}"
            Contribution.make(made, **facts, key=SigningKey.generate()).save(path)
            assert Contribution.load(path).guarantee.unit == "site"
            with pytest.raises(BudgetExceeded):
                make(TWO).fit(X, y, ledger=ledger, dataset="ward")
            ledger.verify()


def test_what_hides_a_record_is_no_charge_for_a_whole_site(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.allow("ward", Budget(epsilon=1.5, delta=1e-5, unit="site"))
    event = Laplace(unit="record", neighbours="replace-one", sensitivity=1.0, scale=2.0)
    with pytest.raises(GuaranteeVoid, match="per record"):
        ledger.charge([event], dataset="ward", key="a", purpose="count")
    other = Laplace(unit="site", neighbours="null-one", sensitivity=1.0, scale=2.0)
    ledger.allow("beds", Budget(epsilon=1.5))
    with pytest.raises(GuaranteeVoid, match="per site"):
        ledger.charge([other], dataset="beds", key="b", purpose="count")


def test_noise_once_over_many_sites_agrees_with_a_trusted_hub():
    classes, public = TWO.settings["classes"], Public(records(TWO, 200, seed=90)[0])
    tables = [records(TWO, 40, seed=i) for i in range(40)]
    X, y = records(TWO, 2000, seed=91)
    settings = {"delta": 1e-5, "classes": classes, "records": pack_rows(public)}
    sums = [VoteTally(epsilon=math.inf, **settings).fit(*each) for each in tables]
    once = TotalOnce(epsilon=4.0, shares=32, noise=Noise(seed=1)).combine(sums)
    members = [
        PrivateLogisticRegression(epsilon=math.inf, classes=classes).fit(*each) for each in tables
    ]
    distil = SoftLabelDistillation(
        epsilon=4.0, delta=1e-5, regularization="auto", classes=classes, noise=Noise(seed=1)
    )
    hub = distil.combine(members, public)
    right = [float((model.predict(X) == y).mean()) for model in (once, hub)]
    assert min(right) > 0.9
    assert right[0] == pytest.approx(right[1], abs=0.05)
