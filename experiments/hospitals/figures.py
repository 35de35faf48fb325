"""Compare every aggregator on real hospitals and on the same records shuffled over the sites.

This is not a paper's experiment. The papers divided their records at random, so that all sites were
alike; here the sites are hospitals or regions. "Paper" marks the papers' ways of joining,
"corrected" this library's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import consilience as cs
from consilience.aggregators.pooling import PrivateLeafCounts, Structure
from experiments.datasets import Dataset
from experiments.design import Arguments, Figure, Method, Panel, Paper

DELTA = 1e-5
FIRST: dict[str, Any] = {"mechanism": "objective", "intercept_scaling": 1.0}  # as it was designed
EPSILONS = (0.5, 1.0, 2.0, 5.0)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FEWEST = 20  # stays of a hospital that takes part

# ---------------------------------------------------------------- what is publicly known of columns

HEART: tuple[tuple[float, ...], ...] = (
    (20, 90), (), (1, 2, 3, 4), (80, 200), (100, 600), (), (0, 1, 2), (60, 210), (), (-3, 7),
    (1, 2, 3), (0, 3), (3, 6, 7),
)  # fmt: skip
EICU: tuple[tuple[float, ...], ...] = (
    (15, 90), (), (), (), (), (1, 4), (1, 6), (1, 5), (), (0, 8000), (0, 40), (32, 42), (5, 60),
    (110, 170), (20, 200), (40, 200), (6.9, 7.7), (15, 60), (0, 12), (1, 5), (30, 500), (10, 100),
    (0, 150), (30, 600), (0, 25), (21, 100),
)  # fmt: skip
KNOWN = {"heart_disease": HEART, "eicu_demo": EICU}


def schema(data: Dataset) -> cs.Schema:
    """Return bounds and categories from common medical knowledge; missing means the middle."""
    columns: list[cs.Numeric | cs.Categorical] = []
    for place, name in enumerate(data.columns):
        known = KNOWN[data.name][place] if place < len(KNOWN[data.name]) else ()
        if len(known) > 2:
            columns.append(cs.Categorical(name, known, missing="ignore", unseen="ignore"))
        else:
            columns.append(cs.Numeric(name, *(known or (0, 1)), missing="middle"))
    return cs.Schema(columns, "label", classes=(0, 1))


def encoded(data: Dataset, by: str) -> tuple[dict[str, Any], Any]:
    """Return simulate() arguments with one record per person of each site, and their sites."""
    whose = data.sites if by == "hospital" or data.regions is None else data.regions
    assert whose is not None
    known = np.array([isinstance(one, str | int | np.integer) for one in whose.tolist()])
    if data.persons is not None:
        known &= np.isin(np.arange(len(data.y)), np.unique(data.persons, return_index=True)[1])
    names, place, counts = np.unique(
        whose[known].astype(str), return_inverse=True, return_counts=True
    )
    enough = counts[place] >= FEWEST
    rows = np.flatnonzero(known)[enough]
    X = schema(data).encode_features(
        {name: data.X[rows, at] for at, name in enumerate(data.columns)}
    )
    return {"X": X, "y": data.y[rows]}, names[place[enough]]


def shuffled(sites: Any, share: float) -> Any:
    """Return sites of the same sizes after shuffling that share of the records."""
    source = cs.Noise(seed=1).open()  # public: who changes places is no secret
    moved = np.sort(source.permutation(len(sites))[: round(share * len(sites))])
    out = np.array(sites)
    out[moved] = out[moved][source.permutation(len(moved))]
    return out


# --------------------------------------------------------------------------------------------- runs

PUBLIC = {"heart_disease": 60, "eicu_demo": 150}
HONEST = ("local-mean", "local-best", "pooled-private")


def linear(where: Any) -> Arguments:
    """Return a run of logistic regression with every aggregator; `where` gives the records."""

    def run(x: Any, data: Dataset) -> dict[str, Any]:
        ways = {
            "average": cs.Average("equal"),
            "precision": cs.Average("precision"),
            "feature": cs.FeatureMethod(),
            "blend": cs.PublicBlend(),
            "boosting": cs.SiteBoosting(),
            "vote": cs.WeightedVote("equal", voting="hard"),
            "soft": cs.WeightedVote(),
        }
        learner = cs.PrivateLogisticRegression(
            epsilon=1.0, delta=DELTA, regularization=0.05, **FIRST
        )
        return {"learner": {"logistic": learner}, "aggregator": ways, "baselines": HONEST} | where(
            x, data
        )

    return run


def trees(where: Any) -> Arguments:
    """Return a run of forests."""

    def run(x: Any, data: Dataset) -> dict[str, Any]:
        ways = {"vote": cs.WeightedVote("equal", voting="hard"), "soft": cs.WeightedVote()}
        learner = cs.PrivateForestClassifier(
            epsilon=1.0, delta=DELTA, bins=cs.Bins.of(schema(data)), public_size=150
        )
        return {"learner": {"forest": learner}, "aggregator": ways, "baselines": HONEST} | where(
            x, data
        )

    return run


def counts(where: Any) -> Arguments:
    """Return a run of counts over random trees that all sites share."""

    def run(x: Any, data: Dataset) -> dict[str, Any]:
        structure = Structure.random(cs.Bins.of(schema(data)), (0, 1))
        learner = PrivateLeafCounts(epsilon=1.0, delta=DELTA, structure=structure)
        ways = {"counts": cs.PooledCounts()}
        return {"learner": {"counts": learner}, "aggregator": ways, "baselines": ()} | where(
            x, data
        )

    return run


def reference(where: Any) -> Arguments:
    """Return a run without noise: what all records would give, with a ridge that suits them all."""

    def run(x: Any, data: Dataset) -> dict[str, Any]:
        learner = cs.PrivateLogisticRegression(epsilon=1.0, regularization=1e-3, **FIRST)
        asked = {
            "learner": {"exact": learner},
            "aggregator": {},
            "baselines": ("public-only", "pooled-exact"),
        }
        return where(x, data) | asked | {"epsilon": math.inf}

    return run


def by_epsilon(by: str) -> Arguments:
    """Return records and sites as they are, ε on the x axis."""

    def where(x: Any, data: Dataset) -> dict[str, Any]:
        records, sites = encoded(data, by)
        return {**records, "sites": sites, "public": PUBLIC[data.name], "epsilon": float(x)}

    return where


def by_share(by: str, epsilon: float) -> Arguments:
    """Return the same records at one ε, a share of them shuffled over the sites."""

    def where(x: Any, data: Dataset) -> dict[str, Any]:
        records, sites = encoded(data, by)
        return {
            **records,
            "sites": shuffled(sites, x),
            "public": PUBLIC[data.name],
            "epsilon": epsilon,
        }

    return where


def of_linear(where: Any) -> Mapping[str, Arguments]:
    """Return the runs of a panel about logistic regression."""
    return {"linear": linear(where), "reference": reference(where)}


def of_trees(where: Any) -> Mapping[str, Arguments]:
    """Return the runs of a panel about trees."""
    return {"trees": trees(where), "counts": counts(where), "reference": reference(where)}


WITHOUT_SITES = (
    Method("public records alone", "public-only", "baseline", "exact", "reference"),
    Method("all pooled, no privacy", "pooled-exact", "baseline", "exact", "reference"),
)
LINEAR = (
    Method("average", "average", "paper", "logistic", "linear"),
    Method("feature method", "feature", "paper", "logistic", "linear"),
    Method("vote by label", "vote", "paper", "logistic", "linear"),
    Method("average by precision", "precision", "corrected", "logistic", "linear"),
    Method("public blend (MAP)", "blend", "corrected", "logistic", "linear"),
    Method("boosting over sites", "boosting", "corrected", "logistic", "linear"),
    Method("probabilities, weights n·ε", "soft", "corrected", "logistic", "linear"),
    Method("a site alone, on average", "local-mean", "baseline", "logistic", "linear"),
    Method("the best site alone", "local-best", "baseline", "logistic", "linear"),
    Method("all pooled, private", "pooled-private", "baseline", "logistic", "linear"),
    *WITHOUT_SITES,
)
TREES = (
    Method("forests, vote by label", "vote", "paper", "forest", "trees"),
    Method("forests, probabilities", "soft", "corrected", "forest", "trees"),
    Method("counts added up, random trees", "counts", "corrected", "counts", "counts"),
    Method("a site's forest alone, on average", "local-mean", "baseline", "forest", "trees"),
    Method("forest of all pooled, private", "pooled-private", "baseline", "forest", "trees"),
    *WITHOUT_SITES,
)
PROBABLE = tuple(
    one for one in LINEAR if one.name != "vote"
)  # labels have no log-loss worth drawing

SHUFFLED = "share of the records shuffled over equally large sites"
HEART_ERROR = Panel(
    id="heart-error",
    title="logistic regression: error",
    data="heart_disease",
    x=EPSILONS,
    xlabel="ε of every hospital",
    arguments=of_linear(by_epsilon("hospital")),
    methods=LINEAR,
    quick=6,
    full=50,
)
AUC: dict[str, Any] = {"metric": "auc", "better": "high", "ylabel": "AUC"}
HEART_AUC = replace(HEART_ERROR, id="heart-auc", title="logistic regression: AUC", **AUC)
HEART_LOSS = replace(
    HEART_ERROR,
    id="heart-loss",
    title="logistic regression: log-loss",
    metric="log_loss",
    ylabel="log-loss",
    methods=PROBABLE,
)
HEART_TREES = replace(
    HEART_AUC,
    id="heart-trees",
    title="heart disease: AUC",
    arguments=of_trees(by_epsilon("hospital")),
    methods=TREES,
)
HEART_MIXED = replace(
    HEART_AUC,
    id="heart-shuffled",
    title="logistic regression, no noise",
    x=SHARES,
    quick_x=(0.0, 0.5, 1.0),
    xlabel=SHUFFLED,
    arguments=of_linear(by_share("hospital", math.inf)),
)
HEART_MIXED_5 = replace(
    HEART_MIXED,
    id="heart-shuffled-5",
    title="logistic regression, ε = 5",
    arguments=of_linear(by_share("hospital", 5.0)),
)
HEART_MIXED_TREES = replace(
    HEART_MIXED,
    id="heart-shuffled-trees",
    title="heart disease, no noise",
    arguments=of_trees(by_share("hospital", math.inf)),
    methods=TREES,
)


def of_eicu(panel: Panel, arguments: Mapping[str, Arguments]) -> Panel:
    """Return a panel of the heart data for the regions of the intensive-care data."""
    words = {
        "id": panel.id.replace("heart", "eicu"),
        "xlabel": panel.xlabel.replace("hospital", "region"),
    }
    return replace(panel, **words, data="eicu_demo", arguments=arguments, quick=4)


EICU_AUC = of_eicu(HEART_AUC, of_linear(by_epsilon("region")))
EICU_LOSS = of_eicu(HEART_LOSS, of_linear(by_epsilon("region")))
EICU_TREES = replace(
    of_eicu(HEART_TREES, of_trees(by_epsilon("region"))), title="intensive care: AUC"
)
EICU_MIXED = of_eicu(HEART_MIXED, of_linear(by_share("region", math.inf)))

PAPER = Paper(
    name="hospitals",
    title="Real hospitals: what differences between sites do to each way of joining",
    citation="A study of this project. "
    "Data: UCI Heart Disease (four hospitals), eICU demo (four regions).",
    figures=(
        Figure(
            "heart",
            "Heart disease, four hospitals, against ε",
            (HEART_ERROR, HEART_AUC, HEART_LOSS),
            columns=3,
        ),
        Figure(
            "heart-mixed",
            "Heart disease, hospitals more and more alike",
            (HEART_MIXED, HEART_MIXED_5),
            columns=2,
        ),
        Figure(
            "eicu",
            "Death in intensive care, four regions of the United States",
            (EICU_AUC, EICU_LOSS, EICU_MIXED),
            columns=3,
        ),
        Figure(
            "trees",
            "Trees, on the same records",
            (HEART_TREES, HEART_MIXED_TREES, EICU_TREES),
            columns=3,
        ),
    ),
)
