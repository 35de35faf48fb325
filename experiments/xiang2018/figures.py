"""The figures of Xiang et al. 2018 on forests and boosting, drawn with trees that are private.

The paper's own trees are not private (docs/decisions/0009), so no line here shows them. "As in the
paper" means its shape: 100 trees of the given height, its budgets, its weights, votes by label. In
each tree our learner draws the splits and adds noise to the counts. Figures "rmse" and "leaks" show
what the paper's own steps would have done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier

import consilience as cs
from consilience.aggregators.pooling import PrivateLeafCounts, Structure
from consilience.auditing.sampled import audit_samples
from experiments.datasets import Dataset
from experiments.design import Arguments, Figure, Method, Panel, Paper

N_PARTIES, N_PUBLIC, N_TREES, DELTA = 5, 500, 100, 1e-5
SIZE = 4700  # records of each of five parties: (0.8 · 30,000 - 500) / 5
BUDGETS, BETWEEN = (10, 50, 100), (25, 75)
SMALL = (0.1, 0.5, 2.0)
HEIGHTS = (3, 4, 5, 6, 7)
# A party's budgets, five to a group, by the group's median.
GROUPS = {
    int(np.median(group)): group
    for group in (
        (10, 1, 2, 1, 12),
        (5, 10, 15, 20, 25),
        (12, 23, 24, 39, 100),
        (10, 25, 50, 75, 100),
        (3, 69, 72, 73, 86),
        (5, 12, 78, 98, 98),
        (70, 75, 80, 90, 100),
        (90, 85, 81, 85, 97),
    )
}
UNEVEN = (160, 1_000, 3_300, 8_540, 10_500)

# Public cuts, by the publisher's description: money at the 1-2-5 series, months of delay one by
# one, categories.
MONEY = (1, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5)
CUTS = [
    (2e4, 5e4, 1e5, 1.5e5, 2e5, 3e5, 5e5),
    (1.5,),
    (1.5, 2.5, 3.5),
    (1.5, 2.5),
    (25, 30, 35, 40, 45, 50, 60),
]
CUTS += [(-1, 0, 1, 2, 3, 4, 6)] * 6 + [(0, *MONEY)] * 6 + [MONEY[:-1]] * 6
BINS = cs.Bins(CUTS, [False, False, True, True] + [False] * 19)

# ------------------------------------------------------------------------------- learners and votes


def n_trees(data: Dataset) -> int:
    """Return the paper's 100 trees; fewer for the few made-up records of a test."""
    return min(N_TREES, len(data.y) // 100)


def paper_forest(height: int, number: int) -> cs.PrivateForestClassifier:
    """Return 100 trees on all records, each with 1/100 of the budget and 4/5 of the features."""
    shape: dict[str, Any] = {
        "n_trees": number,
        "max_depth": height,
        "max_features": 0.8,
        "assignment": "all",
    }
    return cs.PrivateForestClassifier(epsilon=1.0, **shape, bins=BINS)


def paper_boosting(height: int, number: int) -> cs.PrivateAdaBoostClassifier:
    """Return 100 rounds, each tree with a say of half the log-odds of being right."""
    shape: dict[str, Any] = {
        "n_rounds": number,
        "max_depth": height,
        "algorithm": "discrete",
        "learning_rate": 1.0,
    }
    return cs.PrivateAdaBoostClassifier(epsilon=1.0, **shape, bins=BINS)


def forest(delta: float, height: int | str = "auto") -> cs.PrivateForestClassifier:
    """Return this library's forest; it chooses the number of trees, and the height unless given."""
    return cs.PrivateForestClassifier(
        epsilon=1.0, delta=delta, max_depth=height, bins=BINS, public_size=SIZE
    )


def boosting(delta: float, height: int = 2) -> cs.PrivateAdaBoostClassifier:
    """Return this library's boosting: ten small trees that add up log-odds."""
    return cs.PrivateAdaBoostClassifier(epsilon=1.0, delta=delta, max_depth=height, bins=BINS)


def leaf_counts(delta: float) -> PrivateLeafCounts:
    """Return counts over twenty random trees of height 4 that all parties share."""
    return PrivateLeafCounts(epsilon=1.0, delta=delta, structure=Structure.random(BINS, (0, 1)))


PAPER_VOTE = cs.WeightedVote(
    "accuracy", voting="hard"
)  # accuracy · exp(share of records); labels are counted
LEARNERS = {"forest": (paper_forest, forest), "boosting": (paper_boosting, boosting)}


def divided(**further: Any) -> dict[str, Any]:
    """Return the simulate() arguments of all panels: a fifth to test, 500 public, five parties."""
    return {"test": 0.2, "public": N_PUBLIC, "sites": N_PARTIES, "baselines": (), **further}


# ----------------------------------------------------------------------------------------- figure 4


def by_height(kind: str) -> Mapping[str, Arguments]:
    """Return the runs of figure 4: the paper's budgets, ours with and without δ, no noise."""
    as_in_paper, ours = LEARNERS[kind]

    def paper(x: Any, data: Dataset) -> dict[str, Any]:
        votes = {"vote": PAPER_VOTE, "shares": cs.WeightedVote("accuracy", voting="soft")}
        levels = {f"{one:g}": float(one) for one in (*BUDGETS, math.inf)}
        asked = {
            "learner": {"paper": as_in_paper(x, n_trees(data))},
            "aggregator": votes,
            "epsilon": levels,
        }
        return divided(**asked, baselines=("local-mean",))

    def between(x: Any, data: Dataset) -> dict[str, Any]:
        asked = {
            "learner": {"paper": as_in_paper(x, n_trees(data))},
            "aggregator": {"vote": PAPER_VOTE},
        }
        return divided(**asked, epsilon={f"{one:g}": float(one) for one in BETWEEN})

    def own(x: Any, data: Dataset) -> dict[str, Any]:
        learners = {"delta": ours(DELTA, x), "pure": ours(0.0, x)}
        levels = {f"{one:g}": one for one in SMALL}
        return divided(learner=learners, aggregator={"vote": cs.WeightedVote()}, epsilon=levels)

    def reference(x: Any, data: Dataset) -> dict[str, Any]:
        asked = {"learner": {"exact": ours(DELTA, x)}, "aggregator": {}}
        return divided(**asked, epsilon=math.inf, baselines=("public-only", "pooled-exact"))

    return {"paper": paper, "between": between, "own": own, "reference": reference}


FIGURE_4 = (
    Method("budget 10", "vote", "paper", "paper", "paper", "10"),
    Method("budget 25", "vote", "paper", "paper", "between", "25"),
    Method("budget 50", "vote", "paper", "paper", "paper", "50"),
    Method("budget 75", "vote", "paper", "paper", "between", "75"),
    Method("budget 100", "vote", "paper", "paper", "paper", "100"),
    Method("ε = 0.1, δ", "vote", "corrected", "delta", "own", "0.1"),
    Method("ε = 0.5, δ", "vote", "corrected", "delta", "own", "0.5"),
    Method("ε = 2, δ", "vote", "corrected", "delta", "own", "2"),
    Method("ε = 2, pure", "vote", "corrected", "pure", "own", "2"),
    Method("as in the paper, no noise", "vote", "baseline", "paper", "paper", "inf"),
    Method("one party alone, budget 10", "local-mean", "baseline", "paper", "paper", "10"),
    Method("one party alone, budget 100", "local-mean", "baseline", "paper", "paper", "100"),
    Method("budget 10, probabilities added up", "shares", "baseline", "paper", "paper", "10"),
    Method("public records alone", "public-only", "baseline", "exact", "reference"),
    Method("all pooled, no privacy", "pooled-exact", "baseline", "exact", "reference"),
)
NOT_THEIRS = (
    "The paper's trees are not private and not drawn; "
    "these have its shape, budgets, weights and votes."
)
AUC: dict[str, Any] = {"metric": "auc", "better": "high"}
F1: dict[str, Any] = {"metric": "f1_micro", "ylabel": "micro-averaged F1"}
PANEL_4A = Panel(
    id="4a",
    title="CRFsDP: forests",
    data="credit_default",
    x=HEIGHTS,
    quick_x=(3, 7),
    xlabel="maximum height",
    ylabel="AUC",
    arguments=by_height("forest"),
    methods=FIGURE_4,
    note=NOT_THEIRS,
    **AUC,
)
PANEL_4B = replace(
    PANEL_4A, id="4b", title="CAdaBoostDP: boosting", arguments=by_height("boosting")
)
PANEL_4C, PANEL_4D = replace(PANEL_4A, id="4c", **F1), replace(PANEL_4B, id="4d", **F1)

# ----------------------------------------------------------------------------------------- figure 5


def by_group(kind: str) -> Mapping[str, Arguments]:
    """Return the runs of figure 5: the paper's personal budgets; ours with 1/100, for one tree."""
    as_in_paper, ours = LEARNERS[kind]

    def paper(x: Any, data: Dataset) -> dict[str, Any]:
        asked = {
            "learner": {"paper": as_in_paper(6, n_trees(data))},
            "aggregator": {"vote": PAPER_VOTE},
        }
        return divided(
            **asked, epsilon=[float(one) for one in GROUPS[x]], baselines=("local-mean",)
        )

    def own(x: Any, data: Dataset) -> dict[str, Any]:
        votes = {"vote": cs.WeightedVote(), "accuracy": cs.WeightedVote("accuracy")}
        asked = {"learner": {"delta": ours(DELTA), "pure": ours(0.0)}, "aggregator": votes}
        return divided(
            **asked,
            epsilon=[one / N_TREES for one in GROUPS[x]],
            baselines=("local-best", "pooled-private"),
        )

    return {"paper": paper, "own": own, "reference": _exact(ours)}


def _exact(ours: Any) -> Arguments:
    def reference(x: Any, data: Dataset) -> dict[str, Any]:
        asked = {"learner": {"exact": ours(DELTA)}, "aggregator": {}}
        return divided(**asked, epsilon=math.inf, baselines=("public-only", "pooled-exact"))

    return reference


def figure_5(name: str) -> tuple[Method, ...]:
    """Return the methods of figure 5; `name` is the paper's name of its learner."""
    return (
        Method(name, "vote", "paper", "paper", "paper"),
        Method("ε = budget/100, δ, weights n·ε", "vote", "corrected", "delta", "own"),
        Method("ε = budget/100, δ, the paper's weights", "accuracy", "corrected", "delta", "own"),
        Method("ε = budget/100, pure, weights n·ε", "vote", "corrected", "pure", "own"),
        Method("one party alone, its budget", "local-mean", "baseline", "paper", "paper"),
        Method(
            "pooled at the least ε = budget/100, δ", "pooled-private", "baseline", "delta", "own"
        ),
        Method("public records alone", "public-only", "baseline", "exact", "reference"),
        Method("all pooled, no privacy", "pooled-exact", "baseline", "exact", "reference"),
    )


PANEL_5A = replace(
    PANEL_4A,
    id="5a",
    x=tuple(GROUPS),
    quick_x=(2, 15, 50, 85),
    xlabel="median of the five parties' budgets",
    arguments=by_group("forest"),
    methods=figure_5("CRFsDP"),
)
PANEL_5B = replace(
    PANEL_5A,
    id="5b",
    title="CAdaBoostDP: boosting",
    arguments=by_group("boosting"),
    methods=figure_5("CAdaBoostDP"),
)
PANEL_5C, PANEL_5D = replace(PANEL_5A, id="5c", **F1), replace(PANEL_5B, id="5d", **F1)

# ----------------------------------------------------------------------------- figure 6 and table 2


def timed(where: Any) -> Mapping[str, Arguments]:
    """Return runs for times and bytes; `where` gives sites or sizes, and maybe height, of an x."""

    def paper(x: Any, data: Dataset) -> dict[str, Any]:
        given, number = where(x), n_trees(data)
        height = given.pop("height", 6)
        learners = {
            "CRFsDP": paper_forest(height, number),
            "CAdaBoostDP": paper_boosting(height, number),
        }
        return asked(learners, 10.0) | given

    def own(x: Any, data: Dataset) -> dict[str, Any]:
        given = where(x)
        given.pop("height", None)  # ours choose their own
        learners = {"delta": forest(DELTA), "pure": forest(0.0), "boosting": boosting(DELTA)}
        return asked(learners, 0.5) | given

    def asked(learners: dict[str, Any], epsilon: float) -> dict[str, Any]:
        votes = {"vote": PAPER_VOTE}
        return divided(
            learner=learners, aggregator=votes, epsilon=epsilon, baselines=("local-mean",)
        )

    return {"paper": paper, "own": own}


def costs(method: str, metric: str) -> tuple[Method, ...]:
    """Return one line per learner of what a party (or the hub) spends."""
    return (
        Method("CRFsDP", method, "paper", "CRFsDP", "paper", metric=metric),
        Method("CAdaBoostDP", method, "paper", "CAdaBoostDP", "paper", metric=metric),
        Method("forest, ε = 0.5, δ", method, "corrected", "delta", "own", metric=metric),
        Method("forest, ε = 0.5, pure", method, "corrected", "pure", "own", metric=metric),
        Method("boosting, ε = 0.5, δ", method, "corrected", "boosting", "own", metric=metric),
    )


SECONDS: dict[str, Any] = {
    "metric": "seconds",
    "ylabel": "seconds",
    "yscale": "log",
    "data": "credit_default",
}
PANEL_6A = Panel(
    id="6a",
    title="all records, divided",
    x=(3, 4, 5, 6, 7),
    quick_x=(3, 7),
    xlabel="parties",
    arguments=timed(lambda x: {"sites": int(x)}),
    methods=(
        *costs("local-mean", "seconds"),
        Method("the hub, CRFsDP", "vote", "baseline", "CRFsDP", "paper"),
        Method("the hub, CAdaBoostDP", "vote", "baseline", "CAdaBoostDP", "paper"),
    ),
    note="Training of one party; parties work at the same time, then the hub integrates (grey).",
    **SECONDS,
)
PANEL_6B = replace(
    PANEL_6A,
    id="6b",
    title="3,350 records per party",
    arguments=timed(lambda x: {"sizes": [3_350] * int(x)}),
)
BYTES = Panel(
    id="2a",
    title="sent by one party",
    data="credit_default",
    x=HEIGHTS,
    quick_x=(3, 5),
    xlabel="maximum height",
    arguments=timed(lambda x: {"sizes": [300] * N_PARTIES, "height": int(x)}),
    methods=costs("vote", "bytes"),
    metric="bytes",
    ylabel="bytes",
    yscale="log",
    full=3,
    note="300 records per party, since what is sent does not depend on their number.",
)
LENGTHS = Panel(
    id="2b",
    title="time of one party",
    x=(600, 1_200, 2_350, 4_700),
    quick_x=(600, 4_700),
    xlabel="records per party",
    arguments=timed(lambda x: {"sizes": [int(x)] * N_PARTIES}),
    methods=costs("local-mean", "seconds"),
    **SECONDS,
)

# ----------------------------------------------------------- not in the paper: which vote, and when


def votes(where: dict[str, Any]) -> Mapping[str, Arguments]:
    """Return runs of our learners at small ε, with every integration."""

    def vote(x: Any, data: Dataset) -> dict[str, Any]:
        ways = {
            "n·ε": cs.WeightedVote(),
            "hard": cs.WeightedVote(voting="hard"),
            "equal": cs.WeightedVote("equal"),
            "paper": PAPER_VOTE,
            "paper soft": cs.WeightedVote("accuracy"),
        }
        honest = ("local-mean", "local-best", "pooled-private", "public-only", "pooled-exact")
        asked = {"learner": {"delta": forest(DELTA)}, "aggregator": ways, "epsilon": float(x)}
        return divided(**asked, baselines=honest) | where

    def other(x: Any, data: Dataset) -> dict[str, Any]:
        asked = {"learner": {"pure": forest(0.0), "boosting": boosting(DELTA)}, "epsilon": float(x)}
        wanted = ("pooled-private", "pooled-exact")
        return divided(**asked, aggregator={"n·ε": cs.WeightedVote()}, baselines=wanted) | where

    def counts(x: Any, data: Dataset) -> dict[str, Any]:
        asked = {
            "learner": {"counts": leaf_counts(DELTA)},
            "aggregator": {"counts": cs.PooledCounts()},
        }
        return divided(**asked, epsilon=float(x)) | where

    return {"vote": vote, "other": other, "counts": counts}


EQUAL = Panel(
    id="votes-equal",
    title="five equal parties",
    data="credit_default",
    x=(0.1, 0.5, 2.0, 10.0),
    xlabel="ε of every party",
    xscale="log",
    arguments=votes({}),
    quick=5,
    methods=(
        Method("the paper's weights, labels", "paper", "paper", "delta", "vote"),
        Method("the paper's weights, probabilities", "paper soft", "paper", "delta", "vote"),
        Method("weights n·ε, probabilities", "n·ε", "corrected", "delta", "vote"),
        Method("weights n·ε, labels", "hard", "corrected", "delta", "vote"),
        Method("equal weights, probabilities", "equal", "corrected", "delta", "vote"),
        Method("counts added up, random trees", "counts", "corrected", "counts", "counts"),
        Method("boosting, weights n·ε", "n·ε", "corrected", "boosting", "other"),
        Method("one party alone, on average", "local-mean", "baseline", "delta", "vote"),
        Method("the best party alone", "local-best", "baseline", "delta", "vote"),
        Method("records pooled, private", "pooled-private", "baseline", "delta", "vote"),
        Method("records pooled, pure ε", "pooled-private", "baseline", "pure", "other"),
        Method(
            "records pooled, boosting, no privacy", "pooled-exact", "baseline", "boosting", "other"
        ),
        Method("public records alone", "public-only", "baseline", "delta", "vote"),
    ),
    note="Forests with δ = 1e-5 unless stated.",
    **AUC,
)
UNEQUAL = replace(
    EQUAL,
    id="votes-uneven",
    title="160 to 10,500 records",
    arguments=votes({"sites": 5, "sizes": list(UNEVEN)}),
)

# -------------------------------------- what the paper's steps would do: counts, and what they lose


def nothing(x: Any, data: Dataset) -> dict[str, Any]:
    """Return no arguments: these panels are computed without a simulation."""
    return {}


def count_errors(
    heights: Sequence[Any], data: Dataset, repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Return the root mean square error of released leaf counts at ε = 1, formula and measured."""
    found = []
    X, y = data.X[:SIZE], data.y[:SIZE]
    for repeat in range(repeats):
        for height in heights:
            noise = {"noise": cs.Noise(seed=seed + 1000 * repeat + height), "random_state": repeat}
            same = {"epsilon": 1.0, "max_depth": height, "bins": BINS, "classes": [0, 1], **noise}
            trees = cs.PrivateForestClassifier(delta=DELTA, n_trees=40, **same).fit(X, y)
            # 64 trees with ε = 1 each see all records, so their counts err as those of trees that
            # share none.
            single = {"n_trees": 64, "assignment": "all", "max_features": 0.5, "epsilon": 64.0}
            pure = cs.PrivateForestClassifier(**same | single).fit(X, y)
            # A node has half of its budget for itself and gives a quarter to each child;
            # sensitivity of a count is 1.
            values = {LITERAL: math.sqrt(2) * 2 * 4**height}
            for label, one in ((PURE, pure), (ZCDP, trees)):
                exact = PrivateLeafCounts(
                    epsilon=math.inf, structure=Structure.of(one), assignment="all"
                ).fit(X, y)
                values[f"{label}, measured"] = float(
                    np.sqrt(np.mean((one.counts_ - exact.counts_) ** 2.0))
                )
                values[f"{label}, formula"] = math.sqrt(one.leaf_variance_)
            values[MEAN] = len(y) / 2 / 2**height
            found += [
                {"x": height, "label": label, "repeat": repeat, "value": v}
                for label, v in values.items()
            ]
    return found


LITERAL = "the paper's division of ε = 1, formula"
PURE, ZCDP = "tree, pure ε = 1", "40 trees, ε = 1, δ"
MEAN = "a leaf's records of a class, on average"
RMSE = Panel(
    id="rmse",
    title="noise of a leaf's class count",
    data="credit_default",
    x=HEIGHTS,
    xlabel="maximum height",
    arguments=nothing,
    computed=count_errors,
    methods=(
        Method(LITERAL, "formula", "paper"),
        Method(f"{PURE}, measured", "pure", "corrected"),
        Method(f"{PURE}, formula", "pure formula", "baseline"),
        Method(f"{ZCDP}, measured", "zcdp", "corrected"),
        Method(f"{ZCDP}, formula", "zcdp formula", "baseline"),
        Method(MEAN, "records", "baseline"),
    ),
    quick=5,
    metric="rmse",
    ylabel="records",
    yscale="log",
    note="One party of 4,700 records. "
    "Formula for the paper: √2/ε' with ε' = ε/(2·4^height) left at a leaf.",
)

# Two features; with the fifth record a CART splits on the other one.
TWO = (
    np.array([[1.0, 1.0], [2.0, 9.0], [8.0, 2.0], [9.0, 8.0], [9.0, 0.0]]),
    np.array([0, 0, 1, 1, 0]),
)
# One feature on [0, 10]; with the last record the best midpoint moves from one end to the other.
ONE = (
    np.array([[0.0], [0.0], [0.2], [9.8], [10.0], [10.0], [10.0]]),
    np.array([0, 0, 1, 1, 0, 0, 0]),
)
FEATURE, THRESHOLD = (
    "the paper's split: its feature, attacked",
    "the paper's split: its threshold, exact",
)
OURS, CLAIM = "our tree on the same records, attacked", "claimed"
N_DRAWS = 4_000


def root_of(records: tuple[Any, Any], n: int) -> tuple[int, float]:
    """Return feature and threshold of the CART on the first `n` records, the paper's start."""
    root = (
        DecisionTreeClassifier(max_depth=1, random_state=0)
        .fit(records[0][:n], records[1][:n])
        .tree_
    )
    return int(root.feature[0]), float(root.threshold[0])


def losses(epsilons: Sequence[Any], data: Dataset, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Return privacy losses on data sets that differ in one record: by attack, or exact."""
    found = []
    bins = cs.Bins.even(0, 10, n_features=2, n_bins=5)
    for repeat in range(repeats):
        for epsilon in epsilons:
            claimed = cs.Guarantee(
                epsilon=epsilon, delta=0.0, unit="record", neighbours="add-remove"
            )
            # No noise is added to which feature is split: every draw is the same.
            chosen = [np.full(N_DRAWS, root_of(TWO, n)[0]) for n in (4, 5)]
            moved = abs(root_of(ONE, 6)[1] - root_of(ONE, 7)[1])
            ours = [
                _draws(bins, epsilon, n, cs.Noise(seed=seed + 100 * repeat + n)) for n in (4, 5)
            ]
            values = {
                FEATURE: audit_samples(*chosen, claimed=claimed).epsilon_lower,
                THRESHOLD: epsilon * moved,  # of Laplace(1/ε) around each
                OURS: audit_samples(*ours, claimed=claimed).epsilon_lower,
                CLAIM: epsilon,
            }
            found += [
                {"x": epsilon, "label": label, "repeat": repeat, "value": v}
                for label, v in values.items()
            ]
    return found


def _draws(bins: cs.Bins, epsilon: float, n: int, noise: cs.Noise) -> Any:
    """Return what that many one-split trees, each with its own ε, release about `n` records."""
    many: dict[str, Any] = {
        "n_trees": N_DRAWS,
        "assignment": "all",
        "max_features": None,
        "max_depth": 1,
    }
    trees = cs.PrivateForestClassifier(
        epsilon=epsilon * N_DRAWS, **many, bins=bins, classes=[0, 1], noise=noise
    )
    trees.fit(TWO[0][:n], TWO[1][:n])
    return np.column_stack(
        [trees.shape_.feature, trees.shape_.last, trees.counts_.reshape(N_DRAWS, -1)]
    )


LEAKS = Panel(
    id="leaks",
    title="one record more or less",
    data="credit_default",
    x=(0.1, 0.5, 1.0, 2.0),
    xlabel="claimed ε of one split",
    arguments=nothing,
    computed=losses,
    methods=(
        Method(FEATURE, "feature", "paper"),
        Method(THRESHOLD, "threshold", "paper"),
        Method(OURS, "ours", "corrected"),
        Method(CLAIM, "claimed", "baseline"),
    ),
    metric="epsilon",
    ylabel="ε that is really lost, at least",
    xscale="log",
    yscale="symlog",
    note="Five or seven made-up records, no data set; docs/decisions/0009 and "
    "tests/learners/trees/test_literal_trees.py have more.",
)

PAPER = Paper(
    name="xiang2018",
    title="Collaborative ensemble learning under differential privacy (forests, boosting)",
    citation="Xiang et al.: Collaborative ensemble learning under differential privacy. 2018.",
    figures=(
        Figure(
            "4",
            "AUC and F1 against the maximum height, five parties with the same budget",
            (PANEL_4A, PANEL_4B, PANEL_4C, PANEL_4D),
            columns=2,
        ),
        Figure(
            "5",
            "AUC and F1 against the median of personal budgets",
            (PANEL_5A, PANEL_5B, PANEL_5C, PANEL_5D),
            columns=2,
        ),
        Figure(
            "6", "Execution time against the number of parties", (PANEL_6A, PANEL_6B), columns=2
        ),
        Figure("table-2", "Communication and time of one party", (BYTES, LENGTHS), columns=2),
        Figure("rmse", "Error of noisy class counts (section 6), formula and measured", (RMSE,)),
        Figure(
            "votes", "Not in the paper: which integration, at small ε", (EQUAL, UNEQUAL), columns=2
        ),
        Figure("leaks", "Not in the paper: what a split of the paper's trees gives away", (LEAKS,)),
    ),
)
