"""Measure the AUC of private trees, forests and boosting on pooled records against epsilon.

Writes forests.md, forests.png and forests-height.png next to this file. Every method sees the same
splits; noise is drawn anew for every fit from a seed of its own, so that the tables repeat. A seed
voids the guarantee: the models fitted here are measurements, not something to publish.

    python benchmarks/forests.py            10 seeds
    python benchmarks/forests.py --quick    2 seeds, into a temporary folder

Data: the folder CONSILIENCE_DATA, or `data` in the repository. diffprivlib runs in
.venv-diffprivlib, which is made when missing; CONSILIENCE_DIFFPRIVLIB=/path/to/python names an
environment that has it.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

from consilience.learners.linear import PrivateLogisticRegression
from consilience.learners.trees import adaboost
from consilience.learners.trees import forest as trees
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import PrivateForestClassifier, PrivateTreeClassifier
from consilience.privacy.mechanisms import Noise
from consilience.tables.schema import Categorical, Numeric, Schema
from environments import find_peer, open_peer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pages import write_page

HERE = Path(__file__).resolve().parent
EPSILONS = (0.1, 0.5, 2.0)
DELTA = 1e-5
HEIGHTS = (3, 4, 5, 6, 7)
N_TRAIN = 24_000  # credit-card records that are trained on
TIMED = 3  # runs whose fits are timed, too
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#555555",
    "#000000",
)  # Okabe and Ito
Array = np.ndarray


# ----------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """Records in two forms: numbers and codes with public cuts for trees; for linear learners."""

    title: str
    X: Array
    y: Array
    bins: Bins
    encoded: Array
    n_train: int
    split: Callable[[int], tuple[Array, Array]]
    declared: str
    targets: dict[str, tuple[float, ...]]


NT_DOLLARS = (1, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5)  # amounts of money: the 1-2-5 series
MONTHS_LATE = (-1, 0, 1, 2, 3, 4, 6)  # -1 paid duly, 1 one month late, ...


def _credit_column(name: str) -> tuple[tuple[float, ...], Numeric | Categorical]:
    """Return a column's encoding and public cuts, from its description and common sense."""
    codes = {"SEX": (1, 2), "EDUCATION": (1, 2, 3, 4), "MARRIAGE": (1, 2, 3)}
    if name in codes:
        values = codes[name]
        return tuple(v + 0.5 for v in values[:-1]), Categorical(name, values, unseen="ignore")
    if name == "AGE":
        return (25, 30, 35, 40, 45, 50, 60), Numeric(name, 18, 80)
    if name == "LIMIT_BAL":
        return (2e4, 5e4, 1e5, 1.5e5, 2e5, 3e5, 5e5), Numeric(name, 1e4, 1e6, transform="log1p")
    if name.startswith("BILL_AMT"):
        return (0, *NT_DOLLARS), Numeric(name, 0, 1e6, transform="log1p")
    if name.startswith("PAY_AMT"):
        return NT_DOLLARS[:-1], Numeric(name, 0, 1e6, transform="log1p")
    return MONTHS_LATE, Categorical(name, tuple(range(-2, 10)))  # its steps are far from linear


def credit(folder: Path) -> Problem:
    table = pq.read_table(folder / "credit_default.parquet")
    names = [name for name in table.column_names if name not in ("ID", "default_next_month")]
    columns = [_credit_column(name) for name in names]
    bins = Bins(
        [cuts for cuts, _ in columns], [name in ("EDUCATION", "MARRIAGE") for name in names]
    )
    encoded = Schema(
        [column for _, column in columns], "default_next_month", classes=(0, 1)
    ).encode(table)
    X = np.column_stack([table[name].to_numpy() for name in names]).astype(float)

    def split(seed: int) -> tuple[Array, Array]:
        order = np.random.default_rng(seed).permutation(len(X))
        return order[:N_TRAIN], order[N_TRAIN:]

    return Problem(
        "Credit-card default",
        X,
        encoded.y,
        bins,
        encoded.X,
        N_TRAIN,
        split,
        "23 attributes; NT dollars cut at 0, 1 and the 1-2-5 series, age every five years, "
        "months of delay at each of -1 … 4 and 6, education and marriage as categories. Logistic "
        "regression gets money by its logarithm, and months of delay one-hot like the "
        "categories. A random 24,000 of 30,000 records train, the rest test",
        {"forest": (0.70, 0.74, 0.75), "forest zCDP": (0.73, 0.75, 0.755)},
    )


ADULT_CUTS = {
    "age": (20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70),
    "education_num": tuple(range(2, 17)),
    "capital_gain": (1, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4),
    "capital_loss": (1, 5e2, 1e3, 1.5e3, 2e3, 2.5e3, 3e3),
    "hours_per_week": (10, 20, 30, 35, 40, 41, 45, 50, 60),
}
ADULT_BOUNDS = {"age": (17, 90), "education_num": (1, 16), "hours_per_week": (1, 99)}


def adult(folder: Path) -> Problem:
    table = pq.read_table(folder / "adult.parquet")
    names = [n for n in table.column_names if n not in ("fnlwgt", "education", "income", "split")]
    cuts, columns, values = [], [], []
    for name in names:
        if name in ADULT_CUTS:
            cuts.append(ADULT_CUTS[name])
            values.append(table[name].to_numpy().astype(float))
            bounds = ADULT_BOUNDS.get(name, (0, 1e5 if name == "capital_gain" else 5e3))
            columns.append(
                Numeric(name, *bounds, transform=None if name in ADULT_BOUNDS else "log1p")
            )
        else:
            coded = table[name].combine_chunks()
            cuts.append(tuple(k + 0.5 for k in range(len(coded.dictionary) - 1)))
            values.append(coded.indices.to_numpy().astype(float))
            columns.append(Categorical(name, tuple(coded.dictionary.to_pylist())))
    bins = Bins(cuts, [name not in ADULT_CUTS for name in names])
    encoded = Schema(columns, "income", classes=("<=50K", ">50K")).encode(table)
    part = np.asarray(table["split"].to_pylist())
    train, test = np.flatnonzero(part == "train"), np.flatnonzero(part == "test")

    def split(seed: int) -> tuple[Array, Array]:
        return np.random.default_rng(seed).permutation(train), test

    return Problem(
        "Adult, income over 50K",
        np.column_stack(values),
        encoded.y,
        bins,
        encoded.X,
        len(train),
        split,
        "12 attributes (`fnlwgt` and `education`, which `education_num` repeats, dropped); "
        "dollars cut at 1 and round numbers, age every five years, each level of education, "
        "hours around 40, seven columns of published categories. The published split: 32,561 "
        "records train, 16,281 test; seeds change the noise and the order",
        {},
    )


def data_folder() -> Path | None:
    folder = Path(os.environ.get("CONSILIENCE_DATA") or HERE.parent / "data")
    return folder if folder.is_dir() else None


def seed_of(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def auc_of(model: Any, X: Array, y: Array) -> float:
    return float(roc_auc_score(y, model.predict_proba(X)[:, 1]))


# ------------------------------------------------------------------------------------------ methods

PEER_SETTINGS = (
    (10, 5),
    (30, 5),
    (30, 8),
    (100, 5),
)  # trees, depth; the first is diffprivlib's default
PEER_SCRIPT = "peer_forest.py"
PEER, PEER_BEST, PLAIN = "diffprivlib", "diffprivlib best", "plain"


def learners(problem: Problem) -> dict[str, Callable[..., Any]]:
    """Return the tree learners by row name; each takes epsilon, noise and random_state."""
    who = {"bins": problem.bins, "classes": [0, 1]}
    sized = {**who, "public_size": problem.n_train}
    forest, tree = (
        partial(kind, **sized) for kind in (PrivateForestClassifier, PrivateTreeClassifier)
    )
    boost = partial(PrivateAdaBoostClassifier, **who)
    stumps = partial(boost, max_depth=1, n_rounds=30)
    return {
        "forest": forest,
        "forest zCDP": partial(forest, delta=DELTA),
        "random splits": partial(forest, splitter="random"),
        "random splits zCDP": partial(forest, splitter="random", delta=DELTA),
        "tree": tree,
        "tree zCDP": partial(tree, delta=DELTA),
        "AdaBoost": boost,
        "AdaBoost zCDP": partial(boost, delta=DELTA),
        "stumps": stumps,
        "stumps zCDP": partial(stumps, delta=DELTA),
    }


LOGISTIC = {"logistic": 0.0, "logistic δ": DELTA}
REGULARIZATION = 1e-3
TITLES = {
    "forest": "**forest**, pure ε",
    "forest zCDP": "**forest**, δ = 1e-5",
    "random splits": "forest of random splits, pure ε",
    "random splits zCDP": "forest of random splits, δ = 1e-5",
    "tree": "single tree, pure ε",
    "tree zCDP": "single tree, δ = 1e-5",
    "AdaBoost": "AdaBoost, 10 trees of depth 2, pure ε",
    "AdaBoost zCDP": "AdaBoost, 10 trees of depth 2, δ = 1e-5",
    "stumps": "AdaBoost, 30 stumps, pure ε",
    "stumps zCDP": "AdaBoost, 30 stumps, δ = 1e-5",
    "logistic": "logistic regression, pure ε",
    "logistic δ": "logistic regression, δ = 1e-5",
    PEER: "diffprivlib forest, its defaults, pure ε",
    PEER_BEST: "diffprivlib forest, best of four settings in hindsight, pure ε",
    PLAIN: "scikit-learn HistGradientBoosting, **not private**",
}
Found = dict[tuple[str, float], list[float]]


def fit_clocked(model: Any, X: Array, y: Array) -> float:
    """Fit, and return the processor seconds it took."""
    begun = time.process_time()
    model.fit(X, y)
    return time.process_time() - begun


def measure(problem: Problem, runs: int, ask: Any, console: Console) -> tuple[Found, Found]:
    """Return AUC and processor seconds of every method at every epsilon, a number per run."""
    scores: Found = defaultdict(list)
    seconds: Found = defaultdict(list)
    X, y, encoded = problem.X, problem.y, problem.encoded
    for learner in learners(problem).values():  # not counted: the first call compiles
        learner(epsilon=1.0).fit(X[:200], np.arange(200) % 2)
    for run in range(runs):
        train, test = problem.split(run)
        for at, epsilon in enumerate(EPSILONS):
            for place, (name, learner) in enumerate(learners(problem).items()):
                model = learner(
                    epsilon=epsilon, random_state=run, noise=Noise(seed=seed_of(run, place, at))
                )
                scores[name, epsilon].append(
                    auc_of(model.fit(X[train], y[train]), X[test], y[test])
                )
                if run < TIMED:  # with noise of its own: seeded noise is drawn by a faster stand-in
                    fresh = learner(epsilon=epsilon, random_state=run)
                    seconds[name, epsilon].append(fit_clocked(fresh, X[train], y[train]))
            for name, delta in LOGISTIC.items():
                model = PrivateLogisticRegression(
                    epsilon=epsilon,
                    delta=delta,
                    regularization=REGULARIZATION,
                    neighbours="add-remove",
                    public_size=problem.n_train,
                    classes=[0, 1],
                    noise=Noise(seed=seed_of(run, 50 + bool(delta), at)),
                )
                seconds[name, epsilon].append(fit_clocked(model, encoded[train], y[train]))
                scores[name, epsilon].append(auc_of(model, encoded[test], y[test]))
        plain = HistGradientBoostingClassifier(
            max_iter=200,
            learning_rate=0.05,
            categorical_features=list(problem.bins.categorical),
            random_state=run,
        )
        seconds[PLAIN, 0].append(fit_clocked(plain, X[train], y[train]))
        scores[PLAIN, 0].append(auc_of(plain, X[test], y[test]))
        if ask is not None:
            wanted = [(e, settings) for e in EPSILONS for settings in PEER_SETTINGS]
            for (epsilon, settings), fit in zip(
                wanted, ask_peer(ask, problem, train, test, wanted, run), strict=True
            ):
                scores[f"{PEER} {settings}", epsilon].append(fit["auc"])
                seconds[f"{PEER} {settings}", epsilon].append(fit["processor"])
        console.print(f"{problem.title}: run {run + 1} of {runs}")
    for epsilon in EPSILONS if ask is not None else ():
        names = [f"{PEER} {settings}" for settings in PEER_SETTINGS]
        best = max(names, key=lambda name: np.mean(scores[name, epsilon]))
        for row, name in ((PEER, names[0]), (PEER_BEST, best)):
            scores[row, epsilon], seconds[row, epsilon] = (
                scores[name, epsilon],
                seconds[name, epsilon],
            )
    return scores, seconds


# --------------------------------------------------------------------------------------------- peer


def ask_peer(
    ask: Any, problem: Problem, train: Array, test: Array, wanted: list[Any], seed: int
) -> list[dict]:
    """Let diffprivlib fit forests (epsilon, (trees, depth)) on the numbers of the bins.

    The first and last bin are its bounds. It draws splits uniformly between bounds, so in the
    numbers of the bins it cuts where our forests may.
    """
    codes = problem.bins.codes(problem.X)
    with tempfile.TemporaryDirectory() as folder:
        for part, rows in (("train", train), ("test", test)):
            np.save(Path(folder) / f"X_{part}.npy", codes[rows].astype(np.float32))
            np.save(Path(folder) / f"y_{part}.npy", problem.y[rows])
        fits = [
            {"epsilon": e, "n_estimators": n, "max_depth": h, "seed": seed} for e, (n, h) in wanted
        ]
        high = (problem.bins.sizes - 1).astype(float).tolist()
        return list(
            ask({"folder": folder, "low": [0.0] * len(high), "high": high, "fits": fits})["fits"]
        )


# --------------------------------------------------------------------------- noisy and exact counts


def count_errors(problem: Problem, runs: int) -> list[str]:
    """Compare released leaf counts with exact ones: rows of a table."""
    lines = []
    for name in ("forest", "forest zCDP", "tree", "AdaBoost", "AdaBoost zCDP"):
        for epsilon in EPSILONS:
            leaf, whole, sizes, planned = [], [], [], 0.0
            for run in range(runs):
                train, _ = problem.split(run)
                model = learners(problem)[name](
                    epsilon=epsilon, random_state=run
                )  # fresh noise: exact samplers
                heard: list[tuple[Array, Array, Any]] = []
                add_noise = trees.add_noise

                def listen(
                    counts: Array, plan: Any, source: Any, heard=heard, add_noise=add_noise
                ) -> Array:
                    heard.append((counts, add_noise(counts, plan, source), plan))
                    return heard[-1][1]

                with (
                    mock.patch.object(trees, "add_noise", listen),
                    mock.patch.object(adaboost, "add_noise", listen),
                ):
                    model.fit(problem.X[train], problem.y[train])
                for exact, released, plan in heard:
                    off = (released - exact) / plan.grain
                    leaf.append(np.mean(off**2))
                    whole.append(np.mean(off.sum(axis=1) ** 2))
                    sizes.append(np.mean(exact.sum(axis=2)) / plan.grain)
                    planned = math.sqrt(plan.leaf_variance)
            n_trees, leaves = model.counts_.shape[:2]
            lines.append(
                f"| {TITLES[name]} | {epsilon:g} | {n_trees} × {leaves} | {np.mean(sizes):,.0f} | "
                f"{math.sqrt(np.mean(leaf)):.2f} | {planned:.2f} | "
                f"{math.sqrt(np.mean(whole)):.1f} | "
                f"{math.sqrt(np.mean(leaf)) / np.mean(sizes):.1%} |"
            )
    return lines


# ------------------------------------------------------------------------------------------- height

AT_HEIGHTS = {
    "forest": "forest, pure ε",
    "forest zCDP": "forest, δ = 1e-5",
    "tree": "single tree, pure ε",
    "AdaBoost": "AdaBoost, 10 rounds, pure ε",
    "AdaBoost zCDP": "AdaBoost, 10 rounds, δ = 1e-5",
}


def measure_heights(problem: Problem, runs: int, console: Console) -> tuple[dict, dict]:
    scores, seconds = defaultdict(list), defaultdict(list)
    for run in range(runs):
        train, test = problem.split(run)
        for place, name in enumerate(AT_HEIGHTS):
            for at, epsilon in enumerate(EPSILONS):
                for height in HEIGHTS:
                    noise = Noise(seed=seed_of(run, place, at, height))
                    model = learners(problem)[name](
                        epsilon=epsilon, max_depth=height, random_state=run, noise=noise
                    )
                    key = name, epsilon, height
                    model.fit(problem.X[train], problem.y[train])
                    scores[key].append(auc_of(model, problem.X[test], problem.y[test]))
                    if run < TIMED:
                        fresh = learners(problem)[name](
                            epsilon=epsilon, max_depth=height, random_state=run
                        )
                        seconds[key].append(fit_clocked(fresh, problem.X[train], problem.y[train]))
        console.print(f"heights: run {run + 1} of {runs}")
    return scores, seconds


# ------------------------------------------------------------------------------------------- report


def stated(values: list[float]) -> str:
    if not values:
        return "–"
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.4f} ± {error:.4f}"


def accuracy_table(problem: Problem, scores: Found, seconds: Found) -> list[str]:
    lines = [
        f"| AUC | {' | '.join(f'ε = {e:g}' for e in EPSILONS)} | processor s per fit |",
        "|---|" + "---:|" * (len(EPSILONS) + 1),
    ]
    for name, title in TITLES.items():
        if name == PLAIN:
            cells = [stated(scores[name, 0])] * len(EPSILONS)
            spent = [f"{np.median(seconds[name, 0]):.2f}"]
        else:
            cells = [stated(scores[name, e]) for e in EPSILONS]
            spent = [
                f"{np.median(seconds[name, e]):.2f}" if seconds[name, e] else "–" for e in EPSILONS
            ]
        low, high = min(spent), max(spent)
        lines.append(
            f"| {title} | {' | '.join(cells)} | {low if low == high else f'{low} … {high}'} |"
        )
    return lines


def target_lines(problem: Problem, scores: Found) -> list[str]:
    lines = []
    for name, targets in problem.targets.items():
        for epsilon, target in zip(EPSILONS, targets, strict=True):
            values = np.array(scores[name, epsilon])
            mean, error = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
            word = "met" if mean >= target else "**missed**"
            clear = "" if abs(mean - target) > 2 * error else ", within two standard errors of it"
            lines.append(
                f"| {TITLES[name]} | {epsilon:g} | {target:g} | {mean:.4f} ± {error:.4f} | "
                f"{word}{clear} |"
            )
    return lines


def reading(problem: Problem, scores: Found) -> list[str]:
    """Say which method is best at each epsilon, among pure and approximate guarantees."""
    lines = []
    pure = ["forest", "random splits", "tree", "AdaBoost", "stumps", "logistic", PEER_BEST]
    approximate = [
        "forest zCDP",
        "random splits zCDP",
        "tree zCDP",
        "AdaBoost zCDP",
        "stumps zCDP",
        "logistic δ",
    ]
    for title, names in (("pure ε", pure), ("δ = 1e-5", approximate)):
        parts = []
        for epsilon in EPSILONS:
            known = [name for name in names if scores[name, epsilon]]
            first, second = sorted(known, key=lambda name: -np.mean(scores[name, epsilon]))[:2]
            gap = np.array(scores[first, epsilon]) - np.array(scores[second, epsilon])
            error = gap.std(ddof=1) / math.sqrt(len(gap))
            parts.append(
                f"ε = {epsilon:g} {first}, ahead of {second} by {gap.mean():.4f} ± {error:.4f}"
            )
        lines.append(f"- {problem.title}, best with {title}: {'; '.join(parts)}.")
    return lines


def height_table(scores: dict, seconds: dict) -> list[str]:
    lines = [
        f"| AUC (processor ms per fit) | ε | {' | '.join(f'height {h}' for h in HEIGHTS)} | by "
        "default |",
        "|---|---:|" + "---:|" * (len(HEIGHTS) + 1),
    ]
    for name, title in AT_HEIGHTS.items():
        for epsilon in EPSILONS:
            cells = [
                f"{stated(scores[name, epsilon, h])} "
                f"({1e3 * np.median(seconds[name, epsilon, h]):.0f})"
                for h in HEIGHTS
            ]
            auto = stated(scores[name, epsilon]) if (name, epsilon) in scores else "–"
            lines.append(f"| {title} | {epsilon:g} | {' | '.join(cells)} | {auto} |")
    return lines


def plot_scores(problems: list[Problem], found: list[Found], path: Path) -> None:
    figure, axes = plt.subplots(1, len(problems), figsize=(12, 5.2), layout="constrained")
    drawn = {
        "forest zCDP": ("forest, δ = 1e-5", COLORS[0], "-", "o"),
        "forest": ("forest, pure", COLORS[0], "--", "o"),
        "stumps zCDP": ("AdaBoost stumps, δ = 1e-5", COLORS[2], "-", "s"),
        "AdaBoost": ("AdaBoost, pure", COLORS[2], "--", "s"),
        "tree": ("single tree, pure", COLORS[4], "--", "^"),
        "random splits": ("random splits, pure", COLORS[3], "--", "D"),
        "logistic δ": ("logistic, δ = 1e-5", COLORS[6], "-", "v"),
        "logistic": ("logistic, pure", COLORS[6], "--", "v"),
        PEER_BEST: ("diffprivlib forest, best of four", COLORS[1], "--", "X"),
    }
    for axis, problem, scores in zip(axes, problems, found, strict=True):
        for name, (label, color, dashes, marker) in drawn.items():
            known = [e for e in EPSILONS if scores[name, e]]
            means = [np.mean(scores[name, e]) for e in known]
            errors = [
                np.std(scores[name, e], ddof=1) / math.sqrt(len(scores[name, e])) for e in known
            ]
            axis.errorbar(
                known,
                means,
                yerr=errors,
                label=label,
                color=color,
                ls=dashes,
                marker=marker,
                ms=6,
                lw=1.6,
                capsize=2,
            )
        axis.axhline(
            np.mean(scores[PLAIN, 0]), color="black", lw=1, ls=":", label="boosting, not private"
        )
        axis.set(
            xscale="log",
            xlabel="ε",
            ylabel="AUC",
            title=f"{problem.title}, {problem.n_train:,} training records",
        )
        axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_heights(scores: dict, seconds: dict, path: Path) -> None:
    figure, axes = plt.subplots(1, len(EPSILONS) + 1, figsize=(14, 4.4), layout="constrained")
    for place, (name, label) in enumerate(AT_HEIGHTS.items()):
        look: dict[str, Any] = {"color": COLORS[place], "marker": "os^DvX"[place], "label": label}
        for axis, epsilon in zip(axes, EPSILONS, strict=False):
            means = [np.mean(scores[name, epsilon, h]) for h in HEIGHTS]
            errors = [
                np.std(scores[name, epsilon, h], ddof=1) / math.sqrt(len(scores[name, epsilon, h]))
                for h in HEIGHTS
            ]
            axis.errorbar(HEIGHTS, means, yerr=errors, capsize=2, **look)
            axis.set(title=f"ε = {epsilon:g}", xlabel="height", ylabel="AUC", xticks=HEIGHTS)
        times = [1e3 * np.median(seconds[name, EPSILONS[1], h]) for h in HEIGHTS]
        axes[-1].plot(HEIGHTS, times, **look)
    axes[-1].set(
        title=f"time, ε = {EPSILONS[1]:g}",
        xlabel="height",
        ylabel="processor ms per fit",
        xticks=HEIGHTS,
    )
    axes[-1].set(yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def machine(ask: Any) -> str:
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("consilience", "numpy", "numba", "scikit-learn")
    )
    peer = "not installed" if ask is None else ask({"fits": []})["versions"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"- {packages}; Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {cores} cores, "
        f"load average {os.getloadavg()[0]:.1f}, one thread\n- in its own environment: {peer}"
    )


def auto_settings(problem: Problem) -> str:
    parts = []
    for name in ("forest", "forest zCDP", "random splits", "tree"):
        shapes = []
        for epsilon in EPSILONS:
            model = learners(problem)[name](epsilon=epsilon, noise=Noise(seed=0))
            model.fit(problem.X[:50], problem.y[:50])
            shapes.append(f"{model.counts_.shape[0]} × {int(math.log2(model.counts_.shape[1]))}")
        parts.append(f"{TITLES[name].replace('*', '')} {', '.join(shapes)}")
    return "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 seeds, into a temporary folder")
    options = parser.parse_args()
    console = Console(stderr=True)
    folder = data_folder()
    if folder is None:
        console.print(
            "forests.py: no data folder; set CONSILIENCE_DATA to one. Nothing was measured."
        )
        return 0
    runs = 2 if options.quick else 10
    out = Path(tempfile.mkdtemp(prefix="forests-")) if options.quick else HERE
    problems = [credit(folder), adult(folder)]
    with threadpool_limits(limits=1), open_peer(find_peer(console), PEER_SCRIPT) as ask:
        about = machine(ask)
        results = [measure(problem, runs, ask, console) for problem in problems]
        errors = count_errors(problems[0], runs)
        high, times = measure_heights(problems[0], runs, console)
    for name in AT_HEIGHTS:
        for epsilon in EPSILONS:
            high[name, epsilon] = results[0][0][name, epsilon]
    made = f"python benchmarks/forests.py{' --quick' if options.quick else ''}"
    lines = [
        "# Trees, forests and boosting on pooled records",
        "",
        f"Made by `{made}`; do not edit, run it again. AUC on test records, mean ± standard error "
        f"over {runs} seeds (split or order, noise, public randomness). Noise is seeded so that "
        "the tables repeat, which voids the guarantee of these particular fits; times are of "
        "fits with fresh noise.",
        "",
        about,
        '- per record, `neighbours="add-remove"`; δ = 0 (pure ε) or δ = 1e-5 by zero-concentrated '
        "composition (logistic regression: its own (ε, δ) mechanism, "
        f"Λ = {REGULARIZATION:g}, which does well at all three ε); `public_size` is "
        "declared as the number of training records; everything else at its default",
        "- diffprivlib gets the numbers of the bins as features and their ends as bounds: it "
        "draws splits uniformly, so it cuts where ours may. It hands records to trees by their "
        "place",
        *(f"- {problem.title}: {problem.declared}" for problem in problems),
        '- settings chosen by `"auto"`, trees × depth at ε = '
        f"{', '.join(f'{e:g}' for e in EPSILONS)}, "
        f"{problems[0].title}: {auto_settings(problems[0])}",
        "",
        "## Targets",
        "",
        "| learner | ε | AUC at least | found | |",
        "|---|---:|---:|---:|---|",
        *(
            line
            for p, (scores, _) in zip(problems, results, strict=True)
            for line in target_lines(p, scores)
        ),
        "",
        "## Reading",
        "",
        *(
            line
            for p, (scores, _) in zip(problems, results, strict=True)
            for line in reading(p, scores)
        ),
        "",
        "![AUC against epsilon](forests.png)",
    ]
    for problem, (scores, seconds) in zip(problems, results, strict=True):
        lines += ["", f"## {problem.title}", "", *accuracy_table(problem, scores, seconds)]
    lines += [
        "",
        "## Noisy against exact class counts",
        "",
        "Root mean square error of the released counts, in records (Xiang et al. 2018, section 6), "
        "credit-card default. The noise does not depend on the records, so the planned standard "
        "deviation is also what a leaf of any size gets. AdaBoost counts weights.",
        "",
        "| learner | ε | trees × leaves | records per leaf | RMSE of a leaf's class count | "
        "planned | RMSE of a tree's class count | share of a leaf |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *errors,
        "",
        "## Height",
        "",
        "As the paper's figure 4, pooled (sites: [forest_sites.md](forest_sites.md)). Forests "
        "choose their number of trees. A deeper tree spreads the same budget over more levels, "
        "and the same records over more leaves.",
        "",
        "![AUC and time against height](forests-height.png)",
        "",
        *height_table(high, times),
    ]
    text = "\n".join(lines) + "\n"
    write_page(out / "forests.md", text)
    plot_scores(problems, [scores for scores, _ in results], out / "forests.png")
    plot_heights(high, times, out / "forests-height.png")
    print(text)
    console.print(f"Written: forests.md and 2 plots in {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
