"""Measure seconds and memory of every aggregator against the number of members.

    CONSILIENCE_DATA=FOLDER python benchmarks/many_members.py [--most 10000]

Writes benchmarks/many_members.md and .png. One thread, so that processor time is what one core
needs. Members are 500 private models of KDD 99 sites, repeated with small differences up to the
number wanted: what a combination costs does not depend on whose they are.
"""

import argparse
import copy
import itertools
import os
import platform
import statistics
import sys
import time
import tracemalloc
from importlib.metadata import version

import matplotlib
import numpy as np
from threadpoolctl import threadpool_limits

from consilience import (
    Average,
    FeatureMethod,
    PrivateLogisticRegression,
    Public,
    PublicBlend,
    SiteBoosting,
    SoftLabelDistillation,
    VoteDistillation,
)
from many_sites import DATA, ROOT, kdd

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pages import write_page

NUMBERS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
N_TRAINED, SIZE, N_PUBLIC, KEPT = 500, 22, 1_000, 20
TIMES = 5  # that a cell is measured, at most
STEEPER = 1.2  # exponents up to here count as linear
TOO_LONG = 150.0  # processor seconds; a cell that is expected to take longer is left out
CLASSES = [-1.0, 1.0]
HIDING = {"epsilon": 1.0, "fit_intercept": False, "classes": CLASSES}
AGGREGATORS = {
    "average": Average(),
    "feature": FeatureMethod(),
    f"feature, max_members={KEPT}": FeatureMethod(max_members=KEPT),
    "PublicBlend": PublicBlend(),
    "boosting": SiteBoosting(),
    "vote distillation": VoteDistillation(**HIDING),
    "soft-label distillation": SoftLabelDistillation(**HIDING),
}
STYLES = ("#009E73", "#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#333333", "#56B4E9")
MARKERS = "^DvoPsX"


def make_members(X, y, n):
    settings = {"epsilon": 1.0, "regularization": 1e-2, "fit_intercept": False, "classes": CLASSES}
    rows = [slice(SIZE * i, SIZE * (i + 1)) for i in range(N_TRAINED)]
    trained = [PrivateLogisticRegression(**settings).fit(X[r], y[r]) for r in rows]
    rng, members = np.random.default_rng(0), []
    for i in range(n):
        member = copy.copy(trained[i % N_TRAINED])
        member.coef_ = member.coef_ * (1 + 0.01 * rng.normal(size=member.coef_.shape))
        members.append(member)
    return members


def measure(aggregator, members, public):
    """Return median elapsed and processor seconds, extra peak memory, and the range."""
    pairs, begun = [], time.perf_counter()
    while len(pairs) < TIMES and (len(pairs) < 1 or time.perf_counter() - begun < 20):
        wall, processor = time.perf_counter(), time.process_time()
        aggregator.combine(members, public)
        pairs.append((time.perf_counter() - wall, time.process_time() - processor))
    tracemalloc.start()
    aggregator.combine(members, public)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    elapsed, processor = zip(*pairs, strict=True)
    middle = statistics.median(elapsed), statistics.median(processor)
    return *middle, peak / 1e6, min(processor), max(processor)


def slope(points, what):
    """Return the exponent between a tenth of the largest number and the largest one."""
    numbers = [n for n in points if n >= max(points) / 10.5]
    values = [points[n][what] for n in numbers]
    return (
        float(np.polyfit(np.log(numbers), np.log(values), 1)[0])
        if len(numbers) > 1
        else float("nan")
    )


def steepest(points, what):
    """Return the largest exponent between neighbouring numbers from 30 on, and the two."""
    numbers = [n for n in points if n >= 30]
    steps = [
        (float(np.log(points[high][what] / points[low][what]) / np.log(high / low)), low, high)
        for low, high in itertools.pairwise(numbers)
    ]
    return max(steps)


def collect(most):
    X, y = kdd(N_TRAINED + 100, SIZE)
    numbers = [n for n in NUMBERS if n <= most]
    members = make_members(X, y, numbers[-1])
    public = Public(X[-N_PUBLIC:], y[-N_PUBLIC:])
    for aggregator in AGGREGATORS.values():
        aggregator.combine(members[:10], public)  # what is loaded once is not counted
    found = {}
    for name, aggregator in AGGREGATORS.items():
        points = {}
        for n in numbers:
            if len(points) > 1:
                before = max(points)
                expected = points[before][1] * (n / before) ** max(1.0, slope(points, 1))
                if expected > TOO_LONG:
                    break
            points[n] = measure(aggregator, members[:n], public)
            print(name, n, *(f"{value:.3g}" for value in points[n]), file=sys.stderr, flush=True)
        found[name] = points
    return found, X.shape[1]


def plot(found, path):
    figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    for axis, what, label in zip(
        axes, (1, 2), ("processor seconds", "peak memory, MB"), strict=True
    ):
        axis.set(xscale="log", yscale="log", xlabel="members", ylabel=label)
        for (name, points), colour, marker in zip(found.items(), STYLES, MARKERS, strict=True):
            values = np.array([points[n] for n in points])
            ranges = np.abs(values[:, 3:].T - values[:, 1]) if what == 1 else None
            axis.errorbar(
                list(points),
                values[:, what],
                ranges,
                color=colour,
                marker=marker,
                capsize=3,
                label=name,
            )
        low, high = 300, max(NUMBERS)
        bottom = axis.get_ylim()[0]
        axis.plot(
            [low, high],
            [bottom, bottom * high / low],
            color="0.5",
            linestyle=":",
            label="linear growth",
        )
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(found, what, form):
    numbers = sorted({n for points in found.values() for n in points})
    lines = [
        "| aggregator | "
        + " | ".join(f"N = {n:,}" for n in numbers)
        + " | exponent at the end | steepest |"
    ]
    lines.append("|---|" + "---:|" * (len(numbers) + 2))
    for name, points in found.items():
        cells = [format(points[n][what], form) if n in points else "" for n in numbers]
        lines.append(
            f"| {name} | "
            + " | ".join(cells)
            + f" | {slope(points, what):.2f} | {steepest(points, what)[0]:.2f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--most", type=int, default=NUMBERS[-1], help="the largest number of members"
    )
    arguments = parser.parse_args()
    if not (DATA / "kdd99.parquet").exists():
        print("Nothing was measured: set CONSILIENCE_DATA to the folder with kdd99.parquet.")
        return 0
    load = os.getloadavg()[0]
    with threadpool_limits(1):
        found, n_features = collect(arguments.most)
    write(found, n_features, max(load, os.getloadavg()[0]), arguments.most)
    return 0


def write(found, n_features, load, most):
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("consilience", "numpy", "scipy", "scikit-learn")
    )
    left_out = [name for name, points in found.items() if max(points) < most]
    empty = (
        f" Empty cells would have taken more than {TOO_LONG:.0f} s: {', '.join(left_out)}."
        if left_out
        else ""
    )
    text = f"""# What combining costs as the number of sites grows

`CONSILIENCE_DATA=… python benchmarks/many_members.py`, \
Python {platform.python_version()}, {packages}; one thread, load average up to {load:.0f}.

Members of d = {n_features} features, {N_PUBLIC:,} public records. Medians of up to five runs, \
bars their range; memory is the peak beyond what was there before `combine`. The exponent is that \
of N over the last factor of ten, 1 being linear; *steepest* is the largest between two \
neighbouring N from 30 on.{empty}

![](many_members.png)

## Processor seconds

{table(found, 1, ".3g")}

## Peak memory, MB

{table(found, 2, ".3g")}

## Elapsed seconds

{table(found, 0, ".3g")}

{reading(found)}"""
    print(text)
    if most == NUMBERS[-1]:
        write_page(ROOT / "benchmarks" / "many_members.md", text)
        plot(found, ROOT / "benchmarks" / "many_members.png")


def reading(found):
    """Say which aggregators grow faster than linearly, and where."""
    fast, linear = [], []
    for name, points in found.items():
        for column, what in ((1, "time"), (2, "memory")):
            exponent, low, high = steepest(points, column)
            if exponent > STEEPER:
                fast.append(f"{name} ({what}: {exponent:.1f} from {low:,} to {high:,} members)")
            if slope(points, column) > STEEPER:
                linear.append(f"{name} ({what}: {slope(points, column):.2f})")
    kept = f"feature, max_members={KEPT}"
    return "\n".join(
        [
            "## Reading",
            "",
            "Over the last factor of ten nothing grows faster than "
            f"linearly{', except ' if linear else '.'}{'; '.join(linear)} An exponent below 1 "
            "says that work which does not depend on N (solving over the public records) still "
            "counts, or that votes are counted in blocks of members.",
            "",
            f"On the way some do: {'; '.join(fast) or 'none'}. The feature method solves for one "
            "weight per member, and its Newton steps form an N × N matrix of second derivatives: "
            "N² numbers, N²·m operations to fill and N³ to factor, for every strength and fold. "
            "From 2²⁰ entries (1,024 members) on, or a quarter of the features' own memory if "
            "that is more, the solver does without the matrix and takes quasi-Newton steps, each "
            f"linear in N. `max_members={KEPT}` avoids both: it picks that many members by "
            "orthogonal matching pursuit, one pass over all members per pick, and solves in "
            f"{KEPT} dimensions. What remains, exponents {slope(found[kept], 1):.2f} (time) and "
            f"{slope(found[kept], 2):.2f} (memory), is computing every member's scores. Vote "
            "counting over fewer than 512 members holds them all at once, from there on blocks "
            "of 512.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
