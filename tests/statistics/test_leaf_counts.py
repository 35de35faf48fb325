"""LeafCounts: the counts of a forest whose trees are public, as a sum."""

import json
import math

import numpy as np
import pytest

from consilience import Noise
from consilience.aggregators.pooling import PooledCounts, PrivateLeafCounts, Structure
from consilience.errors import SettingsError
from consilience.learners.trees.bins import Bins
from consilience.statistics.leaf_counts import LeafCounts, trees_from
from consilience.statistics.total import Total
from consilience.tables.public import Public
from sums import DELTA

BINS = Bins.even(-1, 1, n_features=3, n_bins=8)
TREES = {"n_trees": 6, "max_depth": 3}


def people(n, seed):
    draw = np.random.default_rng(seed)
    X = draw.uniform(-1, 1, (n, 3))
    return X, (X @ [3.0, -2.0, 1.0] + 0.3 * draw.normal(size=n) > 0).astype(int)


def leaves(n=400, seed=0, epsilon=math.inf, **more):
    delta = 0.0 if math.isinf(epsilon) else DELTA
    settings = {"classes": [0, 1], "bins": BINS, "noise": Noise(seed=seed), **TREES, **more}
    return LeafCounts(epsilon=epsilon, delta=delta, **settings).fit(*people(n, seed))


def pooled(structure, n_sites=4, epsilon=math.inf, n=400):
    delta = 0.0 if math.isinf(epsilon) else DELTA
    members = [
        PrivateLeafCounts(
            epsilon=epsilon,
            delta=delta,
            structure=structure,
            assignment="all",
            neighbours="replace-one",
            noise=Noise(seed=seed),
        ).fit(*people(n, seed))
        for seed in range(n_sites)
    ]
    return PooledCounts("equal").combine(members)


def test_exact_counts_make_the_forest_that_pooled_counts_make():
    structure = Structure.random(BINS, [0, 1], random_state=7, **TREES)
    joined = Total().combine([leaves(seed=seed, random_state=7) for seed in range(4)])
    known = pooled(structure)
    assert np.array_equal(joined.counts, known.counts)
    X = people(50, 99)[0]
    assert joined.predict_proba(X) == pytest.approx(known.predict_proba(X))


def test_trees_of_public_records_travel_in_settings():
    X, y = people(300, 50)
    structure = Structure.greedy(Public(X, y), BINS, [0, 1], **TREES)
    trees = json.loads(json.dumps(trees_from(structure)))
    joined = Total().combine([leaves(seed=seed, trees=trees) for seed in range(4)])
    assert np.array_equal(joined.counts, pooled(structure).counts)


def test_the_same_budget_buys_less_noise_than_the_forest_has():
    """The sum's event is the exact Gaussian profile; the forest's goes by way of ρ.

    These shares are in docs/guarantees/statistics.md.
    """
    structure = Structure.random(BINS, [0, 1], random_state=0, **TREES)
    for epsilon, saved in ((0.1, 0.154), (1.0, 0.131), (3.0, 0.118)):
        variance = Total().combine([leaves(epsilon=epsilon)]).variance
        forests = pooled(structure, n_sites=1, epsilon=epsilon).variance
        assert 1 - variance / forests == pytest.approx(saved, abs=5e-4)


def test_sites_together_learn_what_one_cannot():
    X, y = people(4000, 99)
    members = [leaves(300, seed, epsilon=0.5) for seed in range(10)]

    def error(model):
        return float(np.mean(model.predict(X) != y))

    joined = error(Total().combine(members))
    assert joined < 0.2
    assert joined < np.mean([error(member) for member in members]) - 0.05


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bins": None}, "bins"),
        ({"bins": Bins.even(-1, 1, n_features=2)}, "features"),
        ({"n_trees": 0}, "n_trees"),
        ({"max_depth": 17}, "max_depth"),
        ({"max_features": 0}, "max_features"),
        ({"max_features": True}, "max_features"),
        ({"random_state": -1}, "random_state"),
        ({"random_state": None}, "random_state"),
        ({"trees": [[[0]], [[99]]]}, "trees"),
        ({"trees": [[[0, 1]], [[1, 1]]]}, "trees"),
        ({"trees": [[[0.5]], [[1]]]}, "trees"),
        ({"trees": "oak"}, "trees"),
        ({"trees": []}, "trees"),
        ({"trees": [[], []]}, "trees"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, word):
    with pytest.raises(SettingsError, match=word):
        leaves(40, **changes)


def test_a_structure_of_private_records_is_refused():
    grown = PrivateLeafCounts(
        epsilon=1.0, structure=Structure.random(BINS, [0, 1], **TREES), assignment="all"
    ).fit(*people(100, 1))
    grown.chosen_beside_ = {"another": grown.guarantee_}
    with pytest.raises(SettingsError, match="private records"):
        trees_from(Structure.of(grown))
