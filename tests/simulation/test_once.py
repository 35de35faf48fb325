"""Statistics in simulations: noise from three places on the same divisions, adapted releases."""

import math

import numpy as np
import pytest

import studies
from consilience import Division, Noise, Runs, SettingsError, Total, simulate
from consilience.evaluation.adaptation import ADAPTED, OWN, RELEASE
from consilience.evaluation.measures import AUC
from consilience.privacy.vector_noise import share_sum
from consilience.simulation.once import TotalOnce
from consilience.simulation.report import name_at_sites
from consilience.statistics.gradient_step import GradientStep
from consilience.statistics.label_tables import LabelTables
from consilience.statistics.moments import Moments
from consilience.study.draft import usual_shares

TABLE = studies.table(500)
RUNS = Runs(repeats=2, seed=3)
UNEVEN = Division(sizes=(40, 60, 140), public=80)
SHARED, HUB = "Total, noise shared (2 of 3)", "Total, noise at a trusted hub"


def sums(n_sites=5, n=40, **settings):
    """Return exact moments of some sites, and the records of all."""
    random = np.random.default_rng(0)
    X = random.normal(size=(n_sites * n, 2)) / 4
    y = (X[:, 0] > 0).astype(int)
    settings = {"epsilon": math.inf, "delta": 1e-6, "classes": [0, 1], **settings}
    return [Moments(**settings).fit(X[s::n_sites], y[s::n_sites]) for s in range(n_sites)], X, y


@pytest.mark.parametrize("shares", [None, 4])
def test_noise_is_that_of_one_sum_or_of_all_shares(shares, monkeypatch):
    members, _, _ = sums()
    planned = Moments(epsilon=1.0, delta=1e-6, classes=[0, 1])
    planned.n_features_in_, planned.classes_ = 2, np.array([0, 1])
    event, told = planned.plan_noise().event, []
    finish = Moments.finish
    monkeypatch.setattr(
        Moments, "finish", lambda self, total, public: told.append(total) or finish(self, total)
    )
    once = TotalOnce(epsilon=1.0, shares=shares)
    exact = sum(member.total_ for member in members) * Moments.grain
    for seed in range(200):
        made = TotalOnce(epsilon=1.0, shares=shares, noise=Noise(seed=seed)).combine(members)
    expected = event.sigma if shares is None else event.sigma * math.sqrt(5 / shares)
    assert np.allclose(told[0].variance, np.square(expected / planned.weights()))
    assert told[0].size == told[0].squares == 200
    noise = np.array([(total.values - exact) * planned.weights() for total in told]) / expected
    # 1,800 standard normal numbers: beyond these once in 10^7.
    assert abs(noise.mean()) < 5.4 / math.sqrt(noise.size)
    assert abs(np.square(noise).mean() - 1) < 5.4 * math.sqrt(2 / noise.size)
    assert not made.guarantee.holds  # seeded
    stated = once.combine(members).guarantee
    cost = event if shares is None else share_sum(event, shares)
    assert (stated.epsilon, stated.delta) == (cost.epsilon, cost.delta)
    assert stated.epsilon <= 1.0
    assert any("follow the protocol" in one for one in stated.assumptions) == bool(shares)


def test_without_noise_it_is_the_total():
    members, X, _ = sums()
    once = TotalOnce(epsilon=math.inf, shares=3).combine(members)
    plain = Total().combine(members)
    assert np.allclose(once.predict_proba(X), plain.predict_proba(X))


def test_sums_that_have_noise_already_are_refused():
    noisy, _, _ = sums(epsilon=1.0)
    with pytest.raises(SettingsError, match="exact sums"):
        TotalOnce().combine(noisy)


def test_four_fifths_of_the_sites_are_usual():
    assert [usual_shares(n) for n in (1, 6, 10, 100)] == [1, 4, 8, 80]


def test_statistics_are_tried_beside_a_study_with_noise_from_all_places():
    names = ["Moments", "GradientStep", "LabelTables"]
    study = studies.study()
    found = simulate(study, TABLE, division=UNEVEN, runs=RUNS, epsilon=[1.0], beside=names, adapt=2)
    for name in names:
        for method in ("Total", SHARED, HUB):
            assert found.values(name, "1", method).shape == (2,)
        assert not found.values(name, "1", study.aggregator).size
    assert found.values(study.learner, "1", study.aggregator).size == 2
    assert not found.values(study.learner, "1", SHARED).size
    alone = simulate(study, TABLE, division=UNEVEN, runs=RUNS, epsilon=[1.0])
    assert set(alone.rows) < set(found.rows)


def test_less_noise_and_a_public_start_show():
    X = np.random.default_rng(1).normal(size=(3000, 4)) / 4
    y = (X @ [2.0, -1, 0, 1] + 0.3 * np.random.default_rng(2).normal(size=3000) > 0).astype(int)
    ways = {"Total": Total(), "shared": TotalOnce(shares=8), "hub": TotalOnce()}
    learners = [Moments(epsilon=0.3, delta=1e-6), GradientStep(epsilon=0.3, delta=1e-6)]
    found = simulate(
        learners, ways, X, y, sites=10, public=40, repeats=4, draws=3, seed=5, epsilon=0.3
    )
    error = {way: found.values("Moments", "0.3", way).mean() for way in ways}
    assert error["hub"] < error["Total"]
    assert error["shared"] < error["Total"]
    step = found.values("GradientStep", "0.3", "shared").mean()
    assert step < found.values("GradientStep", "0.3", "public-only").mean()


def test_adapted_models_are_measured_small_and_large_sites_apart():
    found = simulate(
        studies.study(),
        TABLE,
        division=UNEVEN,
        runs=RUNS,
        epsilon=[1.0],
        beside=["Moments"],
        adapt=2,
    )
    cell = ("Moments", "1")
    for method in ("Total", SHARED, HUB):
        for what in (OWN, RELEASE, ADAPTED):
            every, small, large = (
                found.at_sites(cell, method, what, AUC, group) for group in found.groups
            )
            assert np.allclose(every, (small + large) / 2)
        joined = found.values(*cell, method, AUC.name)
        assert np.allclose(found.at_sites(cell, method, RELEASE, AUC), joined)
    own = [found.at_sites(cell, method, OWN, AUC) for method in ("Total", SHARED, HUB)]
    assert np.array_equal(own[0], own[1])
    assert "small sites" in found.sentence
    assert "adapted beside own" in str(found)
    stated = found.as_dict()["at_sites"]
    assert {row["sites"] for row in stated} == {"all", "small", "large"}
    assert all(row["metric"] == "auc" for row in stated)
    assert name_at_sites("Total", ADAPTED) not in {line.method for line in found.table()}


def test_sites_with_names_are_measured_on_their_own_test_records():
    random = np.random.default_rng(0)
    X = random.normal(size=(900, 2)) / 4
    ids = np.repeat(["north", "south", "west"], 300)
    y = (X[:, 0] > 0).astype(int)
    y[ids == "south"] = 1 - y[ids == "south"]  # another coding
    settings = {"sites": ids, "epsilon": 1.0, "repeats": 2, "seed": 1, "adapt": 3}
    learner = LabelTables(epsilon=1.0, delta=1e-6, columns=[[[0, -0.2], [0, 0.0], [0, 0.2]]])
    found = simulate(learner, {"hub": TotalOnce()}, X, y, **settings)
    own, adapted = (
        found.at_sites(("LabelTables", "1"), "hub", what, AUC).mean() for what in (OWN, ADAPTED)
    )
    assert own > 0.95  # each by its own coding
    assert adapted > 0.9


def test_what_cannot_be_tried_or_adapted_is_refused_before_training():
    with pytest.raises(SettingsError, match="beside"):
        simulate(studies.study(), TABLE, beside=["Momentum"])
    with pytest.raises(SettingsError, match="adapt"):
        simulate(studies.study(), TABLE, adapt=-1)


def test_votes_that_hide_whole_sites_are_tried_beside_a_study():
    """Of the public records of each division; noise shared costs less than noise at every site."""
    found = simulate(
        studies.study(), TABLE, division=UNEVEN, runs=RUNS, epsilon=[1.0], beside=["VoteTally"]
    )
    methods = {row.method for row in found.rows if row.learner == "VoteTally"}
    assert {SHARED, HUB} <= methods
