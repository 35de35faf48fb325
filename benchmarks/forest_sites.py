"""Measure what sites gain by joining their private forests, equal and uneven.

Writes forest_sites.md, forest_sites.png and forest_sites-paper.png next to this file. Every
integration sees the same splits and, where it takes forests, the same fitted forests. Noise is
seeded so that the tables repeat; a seed voids the guarantee, so these models are measurements, not
something to publish.

    python benchmarks/forest_sites.py            10 seeds
    python benchmarks/forest_sites.py --quick    2 seeds, into a temporary folder

Data: the folder CONSILIENCE_DATA, or `data` in the repository.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.numpy import save as save_tensors
from sklearn.metrics import f1_score, roc_auc_score
from threadpoolctl import threadpool_limits

from consilience.aggregators.pooling import PooledCounts, PrivateLeafCounts, Structure
from consilience.aggregators.votes import WeightedVote
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.privacy.mechanisms import Noise
from consilience.tables.public import Public
from forests import (
    COLORS,
    DELTA,
    HEIGHTS,
    HERE,
    N_TRAIN,
    Problem,
    auc_of,
    credit,
    data_folder,
    machine,
    plt,
    seed_of,
)
from pages import write_page

Array = np.ndarray
N_PUBLIC = 500  # labelled public records, taken from the test records
UNEVEN = {  # of 24,000 records
    5: (160, 1_000, 3_300, 8_540, 11_000),
    10: (160, 220, 300, 450, 700, 1_100, 1_800, 3_000, 5_270, 11_000),
}
UNEVEN = {n: tuple(size * N_TRAIN // 24_000 for size in sizes) for n, sizes in UNEVEN.items()}
# Budgets of the groups of Xiang et al. (2018). Their code divides them by 100 trees; here they are
# divided by 50, so that they span 0.02 to 2.
GROUPS = (
    (10, 1, 2, 1, 12),
    (5, 10, 15, 20, 25),
    (12, 23, 24, 39, 100),
    (10, 25, 50, 75, 100),
    (3, 69, 72, 73, 86),
    (5, 12, 78, 98, 98),
    (70, 75, 80, 90, 100),
    (90, 85, 81, 85, 97),
)
GROUP_SCALE = 50
PARTIES = (2, 3, 5, 7, 10, 15, 20)
DELTAS = {"pure ε": 0.0, "δ = 1e-5": DELTA}


@dataclass(frozen=True)
class Setting:
    """How many records each site has, and the budget it chose."""

    title: str
    sizes: tuple[int, ...]
    epsilons: tuple[float, ...]

    @property
    def uneven(self) -> bool:
        return len(set(self.sizes)) > 1

    @property
    def place(self) -> int:
        return SETTINGS.index(self)


def _settings() -> list[Setting]:
    found = []
    for n_sites, sizes in UNEVEN.items():
        equal = (N_TRAIN // n_sites,) * n_sites
        found += [
            Setting(f"{n_sites} equal, all ε = {e:g}", equal, (e,) * n_sites)
            for e in (0.1, 0.5, 2.0)
        ]
        found += [
            Setting(f"{n_sites} uneven, all ε = {e:g}", sizes, (e,) * n_sites)
            for e in (0.1, 0.5, 2.0)
        ]
        for low in (0.5, 0.1):
            rising = tuple(np.geomspace(low, 2.0, n_sites).round(2).tolist())
            mixed = (*rising[1::2], *rising[::2])
            found += [
                Setting(f"{n_sites} uneven, ε {low:g} … 2, larger sites more", sizes, rising),
                Setting(f"{n_sites} uneven, ε {low:g} … 2, larger sites less", sizes, rising[::-1]),
                Setting(f"{n_sites} uneven, ε {low:g} … 2, mixed", sizes, mixed),
            ]
    return found


SETTINGS = _settings()


@dataclass(frozen=True)
class Split:
    """Records of one run: sites' parts of the training records, public and test records."""

    problem: Problem
    run: int

    @cached_property
    def parts(self) -> tuple[Array, Array, Array]:
        train, test = self.problem.split(self.run)
        return train, test[:N_PUBLIC], test[N_PUBLIC:]

    def sites(self, sizes: tuple[int, ...]) -> list[Array]:
        return np.split(self.parts[0][: sum(sizes)], np.cumsum(sizes)[:-1])

    @property
    def public(self) -> Public:
        rows = self.parts[1]
        return Public(self.problem.X[rows], self.problem.y[rows])

    def auc(self, model: Any) -> float:
        return auc_of(model, self.problem.X[self.parts[2]], self.problem.y[self.parts[2]])


def forest(split: Split, rows: Array, epsilon: float, delta: float, **further: Any) -> Any:
    """Fit a forest on some records; the site's number of records is declared as its public size."""
    model = PrivateForestClassifier(
        epsilon=epsilon,
        delta=delta,
        bins=split.problem.bins,
        classes=[0, 1],
        public_size=len(rows),
        **further,
    )
    return model.fit(split.problem.X[rows], split.problem.y[rows])


def boosted(split: Split, rows: Array, epsilon: float, delta: float, **further: Any) -> Any:
    model = PrivateAdaBoostClassifier(
        epsilon=epsilon, delta=delta, bins=split.problem.bins, classes=[0, 1], **further
    )
    return model.fit(split.problem.X[rows], split.problem.y[rows])


def drawn_from(*parts: int) -> dict[str, Any]:
    """Return noise and public randomness that repeat."""
    return {"noise": Noise(seed=seed_of(*parts)), "random_state": seed_of(*parts)}


# ------------------------------------------------------------------------------------- integrations

BEST, DEFAULT = "best single site", "n·ε"
VOTES = {
    DEFAULT: ("size-epsilon", "soft"),
    "n": ("size", "soft"),
    "equal": ("equal", "soft"),
    "paper: acc·exp(n/N)": ("accuracy", "soft"),
    "acc·n": ("accuracy-size", "soft"),
    "n·ε, hard": ("size-epsilon", "hard"),
    "paper, hard": ("accuracy", "hard"),
}
POOLED = ("counts, random trees", "counts, public trees", "counts, a site's trees")
TOGETHER = ("records pooled, least ε", "records pooled, largest ε")
PUBLIC_ALONE = ("public records", "alone")
COLUMNS = (BEST, *VOTES, *POOLED, *TOGETHER)


def integrate(split: Split, setting: Setting, delta: float) -> dict[str, float]:
    """Return the AUC of every integration, and of every site by itself."""
    base = (split.run, setting.place, bool(delta))
    rows = split.sites(setting.sizes)
    facts = list(enumerate(zip(rows, setting.epsilons, strict=True)))
    members = [
        forest(split, part, e, delta, **drawn_from(*base, site)) for site, (part, e) in facts
    ]
    found = {f"site {site}": split.auc(member) for site, member in enumerate(members)}
    for name, (weights, voting) in VOTES.items():
        public = split.public if weights.startswith("accuracy") else None
        found[name] = split.auc(WeightedVote(weights, voting=voting).combine(members, public))
    strongest = int(
        np.argmax([n * min(e, 1.0) for n, e in zip(setting.sizes, setting.epsilons, strict=True)])
    )
    structures = (
        Structure.random(split.problem.bins, (0, 1), random_state=split.run),
        Structure.greedy(split.public, split.problem.bins, (0, 1), random_state=split.run),
        Structure.of(members[strongest]),
    )
    for at, (name, structure) in enumerate(zip(POOLED, structures, strict=True)):
        counted = [
            PrivateLeafCounts(
                epsilon=e,
                delta=delta,
                structure=structure,
                noise=Noise(seed=seed_of(*base, site, 100 + at)),
            ).fit(split.problem.X[part], split.problem.y[part])
            if at < 2 or site != strongest
            else members[strongest]
            for site, (part, e) in facts
        ]
        found[name] = split.auc(PooledCounts().combine(counted))
    whole = np.concatenate(rows)
    ends = min(setting.epsilons), max(setting.epsilons)
    for at, (name, epsilon) in enumerate(zip(TOGETHER, ends, strict=True), 200):
        found[name] = split.auc(forest(split, whole, epsilon, delta, **drawn_from(*base, at)))
    return found


def measure_settings(
    problem: Problem, runs: int, console: Console
) -> dict[tuple[str, str], dict[str, Array]]:
    """Return for each guarantee and setting the AUC of each column, one number per run."""
    collected: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in range(runs):
        split = Split(problem, run)
        for kind, delta in DELTAS.items():
            for setting in SETTINGS:
                for name, value in integrate(split, setting, delta).items():
                    collected[kind, setting.title][name].append(value)
        console.print(f"integrations: run {run + 1} of {runs}")
        alone = PrivateForestClassifier(
            epsilon=math.inf,
            n_trees=20,
            max_depth=4,
            max_features=0.5,
            assignment="all",
            bins=problem.bins,
            classes=[0, 1],
            random_state=run,
        ).fit(split.public.X, split.public.y)
        collected[PUBLIC_ALONE]["exact"].append(split.auc(alone))
    found = {}
    for key, columns in collected.items():
        values = {name: np.array(one) for name, one in columns.items()}
        # The best site is chosen in hindsight, by its mean on the test records: nobody could choose
        # better.
        if key != PUBLIC_ALONE:
            values[BEST] = max(
                (one for name, one in values.items() if name.startswith("site ")), key=np.mean
            )
        found[key] = values
    return found


# ---------------------------------------------------------------------------- figures 4 to 6, bytes


def scores_of(split: Split, ensemble: Any) -> tuple[float, float, float]:
    """Return AUC of the probabilities, AUC of the labels as in the paper, and micro-averaged F1."""
    X, y = split.problem.X[split.parts[2]], split.problem.y[split.parts[2]]
    chance = ensemble.predict_proba(X)
    label = chance.argmax(axis=1)
    return (
        float(roc_auc_score(y, chance[:, 1])),
        float(roc_auc_score(y, label)),
        float(f1_score(y, label, average="micro")),
    )


FITS = {
    "forest, pure ε": (forest, 0.0),
    "forest, δ": (forest, DELTA),
    "AdaBoost, δ": (boosted, DELTA),
}
Points = dict[Any, list[tuple[float, ...]]]


def joined(split: Split, kind: str, setting: Setting, **further: Any) -> tuple[float, ...]:
    """Fit at every site and integrate; return scores and processor seconds of site and hub."""
    fit, delta = FITS[kind]
    sites, members = split.sites(setting.sizes), []
    begun = time.process_time()
    for rows, epsilon in zip(sites, setting.epsilons, strict=True):
        members.append(fit(split, rows, epsilon, delta, **further))
    trained = time.process_time()
    ensemble = WeightedVote().combine(members)
    combined = time.process_time()
    return *scores_of(split, ensemble), (trained - begun) / len(sites), combined - trained


def measure_figures(problem: Problem, runs: int, console: Console) -> tuple[Points, Points, Points]:
    heights, groups, parties = defaultdict(list), defaultdict(list), defaultdict(list)
    for run in range(runs):
        split = Split(problem, run)
        for kind in FITS:
            for epsilon in (0.5, 2.0):
                for height in HEIGHTS:
                    setting = Setting("", (N_TRAIN // 5,) * 5, (epsilon,) * 5)
                    heights[kind, epsilon, height].append(
                        joined(split, kind, setting, max_depth=height)
                    )
            for number, group in enumerate(GROUPS):
                setting = Setting(
                    "", (N_TRAIN // 5,) * 5, tuple(one / GROUP_SCALE for one in group)
                )
                groups[kind, number].append(joined(split, kind, setting))
            for number in PARTIES:
                setting = Setting("", (N_TRAIN // number,) * number, (0.5,) * number)
                parties[kind, number].append(joined(split, kind, setting))
        console.print(f"figures: run {run + 1} of {runs}")
    return heights, groups, parties


def size_of(arrays: dict[str, Array]) -> int:
    return len(save_tensors({name: np.ascontiguousarray(value) for name, value in arrays.items()}))


def measure_bytes(problem: Problem) -> list[str]:
    """Return a table's rows: what a site sends and receives, as safetensors files."""
    lines, split = [], Split(problem, 0)
    for n_sites in UNEVEN:
        setting = Setting("", (N_TRAIN // n_sites,) * n_sites, (0.5,) * n_sites)
        sites = split.sites(setting.sizes)
        for kind, (fit, delta) in FITS.items():
            members = [fit(split, rows, 0.5, delta) for rows in sites]
            sent = [size_of(member.released_state()) for member in members]
            every = {
                f"{site} {k}": v
                for site, m in enumerate(members)
                for k, v in m.released_state().items()
            }
            got = size_of({**every, "weights": np.ones(n_sites)})
            shape = members[0].counts_.shape
            lines.append(
                f"| {n_sites} | {kind}, vote | {shape[0]} × {int(math.log2(shape[1]))} | – | "
                f"{np.mean(sent):,.0f} | {got:,} |"
            )
        structure = Structure.random(problem.bins, (0, 1))
        trees = {"feature": structure.shape.feature, "last": structure.shape.last}
        counts = [
            PrivateLeafCounts(epsilon=0.5, structure=structure).fit(
                problem.X[rows], problem.y[rows]
            )
            for rows in sites
        ]
        ensemble = PooledCounts().combine(counts)
        sent = np.mean(
            [size_of({"counts": one.counts_, "size": np.array(one.public_size_)}) for one in counts]
        )
        got = size_of({"counts": ensemble.counts, "variance": np.array(ensemble.variance)})
        lines.append(
            f"| {n_sites} | pooled counts | 20 × 4 | {size_of(trees):,} | {sent:,.0f} | {got:,} |"
        )
    return lines


# ------------------------------------------------------------------------------------------- report


def stated(values: Any) -> str:
    one = np.asarray(values)
    return f"{one.mean():.4f} ± {one.std(ddof=1) / math.sqrt(len(one)):.4f}"


def setting_tables(found: dict) -> list[str]:
    lines = []
    for kind in DELTAS:
        lines += ["", f"## Integrations, {kind}", "", f"| sites | {' | '.join(COLUMNS)} |"]
        lines.append("|---|" + "---:|" * len(COLUMNS))
        for setting in SETTINGS:
            values = found[kind, setting.title]
            means = {name: values[name].mean() for name in (*VOTES, *POOLED)}
            top = max(means, key=means.get)
            cells = [
                f"**{stated(values[name])}**" if name == top else stated(values[name])
                for name in COLUMNS
            ]
            lines.append(f"| {setting.title} | {' | '.join(cells)} |")
    return lines


def compared(left: Array, right: Array) -> tuple[float, float]:
    gap = left - right
    return float(gap.mean()), float(gap.std(ddof=1) / math.sqrt(len(gap)))


def verdict(left: Array, right: Array) -> tuple[str, str, float]:
    gap, error = compared(left, right)
    word = "beats it" if gap > 2 * error else "loses" if gap < -2 * error else "level"
    return f"{gap:+.4f} ± {error:.4f}, {word}", word, gap


def gain_table(found: dict) -> tuple[list[str], list[str]]:
    """Return rows of uneven settings against the best single site, and their summary."""
    lines, sentences = [], []
    for kind in DELTAS:
        counted = {True: [0, 0, 0], False: [0, 0, 0]}
        losers: list[str] = []
        for setting in (one for one in SETTINGS if one.uneven):
            values = found[kind, setting.title]
            best = max((*VOTES, *POOLED), key=lambda name: values[name].mean())
            (cell, word, gap), (its, _, _) = (
                verdict(values[name], values[BEST]) for name in (DEFAULT, best)
            )
            enough = min(setting.epsilons) >= 0.5
            counted[enough][("beats it", "level", "loses").index(word)] += 1
            if enough and gap <= 0:
                losers.append(f"{setting.title} ({cell})")
            lines.append(f"| {kind} | {setting.title} | {cell} | {best} | {its} |")
        for enough, text in ((True, "every ε ≥ 0.5"), (False, "ε down to 0.1")):
            beats, level, loses = counted[enough]
            sentences.append(
                f"- {kind}, uneven sites, {text}: the default vote (n·ε, soft) clearly beats the "
                f"best single site in {beats} of {beats + level + loses} settings, is level in "
                f"{level}, clearly loses in {loses}."
                + (f" Mean not above it: {'; '.join(losers)}." if enough and losers else "")
                + (" Its mean is above in every one." if enough and not losers else "")
            )
    return lines, sentences


def why(found: dict) -> list[str]:
    """Say how much pooling all records gains over the best site, at every ε >= 0.5."""
    lines = []
    for kind in DELTAS:
        room, gain = [], []
        for setting in (one for one in SETTINGS if one.uneven and min(one.epsilons) >= 0.5):
            values = found[kind, setting.title]
            room.append(compared(values[TOGETHER[1]], values[BEST])[0])
            gain.append(compared(values[DEFAULT], values[BEST])[0])
        lines.append(
            f"- {kind}: in the settings at every ε ≥ 0.5, pooling all records at the largest ε of "
            f"any site would gain {min(room):+.4f} to {max(room):+.4f} over the best single site; "
            f"the default vote gains {min(gain):+.4f} to {max(gain):+.4f}. One site holds 11,000 "
            "of the 24,000 records, so where the vote is only level there is hardly anything to "
            "gain."
        )
    return lines


def vote_sentences(found: dict) -> list[str]:
    """Compare weights and ways of voting over all settings."""
    lines = []
    for kind in DELTAS:
        parts = []
        for name in (*list(VOTES)[1:], *POOLED):
            for text, chosen in (("uneven", True), ("equal", False)):
                gaps = [
                    compared(found[kind, s.title][name], found[kind, s.title][DEFAULT])
                    for s in SETTINGS
                    if s.uneven == chosen
                ]
                mean = np.mean([gap for gap, _ in gaps])
                clear = [np.sign(gap) for gap, error in gaps if abs(gap) > 2 * error]
                parts.append(
                    f"| {kind} | {name} | {text} | {mean:+.4f} | {clear.count(1)} | "
                    f"{clear.count(-1)} | {len(gaps)} |"
                )
        lines += parts
    return lines


def figure_tables(heights: Points, groups: Points, parties: Points) -> list[str]:
    n_runs = len(next(iter(heights.values())))

    def cell(points: list[tuple[float, ...]]) -> str:
        table = np.array(points)
        labels = f"{table[:, 1].mean():.3f} / {table[:, 2].mean():.3f}"
        return f"{stated(table[:, 0])} / {labels} ({1e3 * np.median(table[:, 3]):.0f})"

    lines = [
        "",
        "## The paper's figures",
        "",
        "Each cell: AUC of the probabilities ± standard error / AUC of the labels, as the paper "
        f"has it / micro-averaged F1 (processor ms at a site); {n_runs} splits. Noise is fresh "
        "here, so that times are those of a private fit. Labels say little: at 22 % defaults, "
        "probabilities that noise shrinks to their mean rarely pass one half, and then all "
        "labels are the same and their AUC is 0.5. Integration is the default vote.",
        "",
        "### Height, five equal sites (figure 4)",
        "",
        f"| learner | ε | {' | '.join(f'height {h}' for h in HEIGHTS)} |",
        "|---|---:|" + "---:|" * len(HEIGHTS),
    ]
    for kind in FITS:
        for epsilon in (0.5, 2.0):
            cells = [cell(heights[kind, epsilon, height]) for height in HEIGHTS]
            lines.append(f"| {kind} | {epsilon:g} | {' | '.join(cells)} |")
    lines += [
        "",
        "### Personal budgets, five equal sites (figure 5)",
        "",
        f"The groups of the authors' public code, divided by {GROUP_SCALE}, by their median.",
        "",
        f"| ε of the sites | median | {' | '.join(FITS)} |",
        "|---|---:|" + "---:|" * len(FITS),
    ]
    for number in sorted(range(len(GROUPS)), key=lambda at: np.median(GROUPS[at])):
        cells = [cell(groups[kind, number]) for kind in FITS]
        text = ", ".join(f"{one / GROUP_SCALE:g}" for one in GROUPS[number])
        lines.append(
            f"| {text} | {np.median(GROUPS[number]) / GROUP_SCALE:g} | {' | '.join(cells)} |"
        )
    lines += [
        "",
        "### Number of sites, 24,000 records in equal parts, ε = 0.5 (figure 6)",
        "",
        "| sites | records each | "
        + " | ".join(f"{kind} | all sites one after another, ms" for kind in FITS)
        + " | combine, ms |",
        "|---:|---:|" + "---:|---:|" * len(FITS) + "---:|",
    ]
    for number in PARTIES:
        cells = []
        for kind in FITS:
            spent = number * np.median([point[3] for point in parties[kind, number]])
            cells += [cell(parties[kind, number]), f"{1e3 * spent:.0f}"]
        combine = np.median([point[4] for kind in FITS for point in parties[kind, number]])
        lines.append(
            f"| {number} | {N_TRAIN // number:,} | {' | '.join(cells)} | {1e3 * combine:.1f} |"
        )
    return lines


def plot_settings(found: dict, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(14, 7.5), sharey=True, layout="constrained")
    look = {
        BEST: ("black", "|", 13),
        DEFAULT: (COLORS[0], "o", 7),
        "paper: acc·exp(n/N)": (COLORS[1], "X", 7),
        "equal": (COLORS[4], "s", 5),
        POOLED[0]: (COLORS[3], "<", 6),
        POOLED[1]: (COLORS[5], ">", 6),
        POOLED[2]: (COLORS[2], "D", 5),
        TOGETHER[0]: ("#777777", ".", 7),
    }
    for axis, kind in zip(axes, DELTAS, strict=True):
        for row, setting in enumerate(SETTINGS):
            for name, (color, marker, size) in look.items():
                mean = found[kind, setting.title][name].mean()
                axis.plot(mean, row, marker, color=color, ms=size, mew=2 if marker == "|" else 1)
            axis.axhline(row, color="#eeeeee", lw=0.8, zorder=0)
        axis.set(title=kind, xlabel="AUC", xlim=(0.595, 0.78))
        axis.set_yticks(range(len(SETTINGS)), [setting.title for setting in SETTINGS])
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    names = {
        name: name if name in (BEST, *POOLED, *TOGETHER) else f"vote by {name}" for name in look
    }
    handles = [
        plt.Line2D(
            [],
            [],
            color=color,
            marker=marker,
            ls="",
            ms=size,
            mew=2 if marker == "|" else 1,
            label=names[name],
        )
        for name, (color, marker, size) in look.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_figures(heights: Points, groups: Points, parties: Points, path: Path) -> None:
    figure, axes = plt.subplots(1, 4, figsize=(17, 4.8), layout="constrained")
    order = sorted(range(len(GROUPS)), key=lambda at: np.median(GROUPS[at]))
    medians = [np.median(GROUPS[at]) / GROUP_SCALE for at in order]

    def drawn(axis: Any, x: Any, points: list, **look: Any) -> None:
        values = np.array([[point[0] for point in one] for one in points])
        axis.errorbar(
            x,
            values.mean(1),
            yerr=values.std(1, ddof=1) / math.sqrt(values.shape[1]),
            capsize=2,
            **look,
        )

    for at, kind in enumerate(FITS):
        look: dict[str, Any] = {"color": COLORS[(0, 1, 2)[at]], "marker": "osD"[at], "label": kind}
        for epsilon, dashes in ((0.5, "--"), (2.0, "-")):
            drawn(
                axes[0],
                HEIGHTS,
                [heights[kind, epsilon, height] for height in HEIGHTS],
                **{**look, "ls": dashes},
            )
        drawn(axes[1], medians, [groups[kind, number] for number in order], **look)
        drawn(axes[2], PARTIES, [parties[kind, number] for number in PARTIES], **look)
        spent = [
            1e3 * np.median([point[3] for point in parties[kind, number]]) for number in PARTIES
        ]
        axes[3].plot(PARTIES, spent, **look)
        axes[3].plot(
            PARTIES,
            np.multiply(spent, PARTIES),
            ls=":",
            color=look["color"],
            marker=look["marker"],
            mfc="none",
        )
    axes[0].set(
        title="five sites (dashed ε = 0.5, solid 2)", xlabel="height", ylabel="AUC", xticks=HEIGHTS
    )
    axes[1].set(
        title="personal budgets, five sites",
        xlabel="median ε of the sites",
        ylabel="AUC",
        xscale="log",
    )
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2)
    axes[1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[1].minorticks_off()
    axes[2].set(title="24,000 records, ε = 0.5", xlabel="number of sites", ylabel="AUC")
    axes[3].set(
        title="time (dotted: all sites in turn)",
        xlabel="number of sites",
        ylabel="processor ms",
        yscale="log",
    )
    for axis in axes[2:]:
        axis.set_xticks(PARTIES)
    for axis in axes:
        axis.grid(alpha=0.3)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 seeds, into a temporary folder")
    options = parser.parse_args()
    console = Console(stderr=True)
    folder = data_folder()
    if folder is None:
        console.print(
            "forest_sites.py: no data folder; set CONSILIENCE_DATA to one. Nothing was measured."
        )
        return 0
    runs = 2 if options.quick else 10
    out = Path(tempfile.mkdtemp(prefix="forest-sites-")) if options.quick else HERE
    problem = credit(folder)
    about = machine(None).splitlines()[0]
    with threadpool_limits(limits=1):
        for delta in DELTAS.values():  # not counted: the first call compiles
            forest(Split(problem, 0), np.arange(200), 1.0, delta)
        found = measure_settings(problem, runs, console)
        figures = measure_figures(problem, max(2, runs // 2), console)
        sizes = measure_bytes(problem)
    gains, sentences = gain_table(found)
    made = f"python benchmarks/forest_sites.py{' --quick' if options.quick else ''}"
    lines = [
        "# Forests across sites",
        "",
        f"Made by `{made}`; do not edit, run it again. AUC on test records, mean ± standard error "
        f"over {runs} splits, the same for every column. Noise is seeded so that the tables of "
        "integrations repeat, which voids the guarantee of these particular fits.",
        "",
        about,
        f"- credit-card default: 24,000 records over the sites, {N_PUBLIC} labelled public ones "
        "for the integrations that measure accuracy or grow trees on them, 5,500 to test; bins "
        "as in [forests.md](forests.md)",
        f"- uneven sites hold {', '.join(map(str, UNEVEN[5]))} or "
        f"{', '.join(map(str, UNEVEN[10]))} records",
        "- per record, add-remove; a site's forest chooses trees and depth from its ε and "
        "declared number of records; the vote reads the noisy number the forest released",
        "- *best single site* is chosen in hindsight, by its mean AUC on the test records. "
        "*Records pooled*: one forest on all records at the least or the largest ε of the sites, "
        "which needs sites that show their records to someone. *Counts*: `PooledCounts` over 20 "
        "random trees of depth 4, 20 trees grown on the public records, or the trees of the "
        "forest of the site with the largest n·min(ε, 1). In bold the best integration of the row",
        f"- an exact forest on the {N_PUBLIC} public records alone has "
        f"{stated(found[PUBLIC_ALONE]['exact'])}: what *counts, public trees* reaches at small ε "
        "is mostly theirs",
        "",
        "## Does joining pay?",
        "",
        *sentences,
        *why(found),
        "",
        "Gain over the best single site, uneven settings; *beats*, *loses*: by more than two "
        "standard errors of the paired difference.",
        "",
        "| guarantee | sites | default vote (n·ε, soft) | best integration, in hindsight | its "
        "gain |",
        "|---|---|---:|---|---:|",
        *gains,
        "",
        "Other integrations against the default vote: mean difference over settings, and in how "
        "many it is clearly higher or lower.",
        "",
        "| guarantee | integration | settings | mean difference | clearly higher | clearly lower "
        "| of |",
        "|---|---|---|---:|---:|---:|---:|",
        *vote_sentences(found),
        "",
        "![AUC of integrations in every setting; hard votes lie to the left of "
        "it](forest_sites.png)",
        *setting_tables(found),
        *figure_tables(*figures),
        "",
        "![Height, personal budgets, number of sites](forest_sites-paper.png)",
        "",
        "## Bytes",
        "",
        "Sizes of safetensors files with what a learner releases (`released_state()`) and with "
        "what the hub sends back, ε = 0.5, equal sites. Splits and counts travel as "
        "64-bit numbers; bytes and 32 bits would do.",
        "",
        "| sites | integration | trees × depth | received before | sent by a site | received by "
        "a site |",
        "|---:|---|---:|---:|---:|---:|",
        *sizes,
    ]
    text = "\n".join(lines) + "\n"
    write_page(out / "forest_sites.md", text)
    plot_settings(found, out / "forest_sites.png")
    plot_figures(*figures, out / "forest_sites-paper.png")
    print(text)
    console.print(f"Written: forest_sites.md and 2 plots in {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
