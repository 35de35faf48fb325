"""Compare times of private forests with scikit-learn's and diffprivlib's, up to 5 million records.

Writes forest_speed.md and forest_speed.png next to this file. One thread everywhere; repeats are
interleaved, medians and ratios are of processor time, so that other work on the machine disturbs
little.

    python benchmarks/forest_speed.py            9 repeats, up to 5 million records
    python benchmarks/forest_speed.py --quick    3 repeats, up to 300,000, in a temporary folder

Data: the folder CONSILIENCE_DATA, or `data` in the repository. diffprivlib runs in
.venv-diffprivlib, which is made when missing; CONSILIENCE_DIFFPRIVLIB=/path/to/python names an
environment that has it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from sklearn.ensemble import RandomForestClassifier
from threadpoolctl import threadpool_limits

from consilience.learners.trees import forest as trees
from consilience.learners.trees import histograms
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.privacy.mechanisms import Noise
from environments import find_peer, open_peer
from forests import (
    COLORS,
    DELTA,
    HERE,
    PEER_SCRIPT,
    Problem,
    auc_of,
    credit,
    data_folder,
    machine,
    plt,
    seed_of,
)
from pages import write_page

N_TREES = 10
DEPTHS = (5, 8, 10)
EPSILONS = (0.5, 2.0)  # timed at the first
TARGET = 0.5
TIMES = 3  # that a size below a million is fitted
LEAST = 100_000  # records from which on time is compared with size
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000, 5_000_000)
ROWS, PREDICT_DEPTH, PREDICT_TARGET = 1_000_000, 10, 2.0
PURE, ZCDP, PLAIN, PEER = "pure", "zCDP", "scikit-learn", "diffprivlib"
TITLES = {
    PURE: "ours, pure ε",
    ZCDP: f"ours, δ = {DELTA:g}",
    PLAIN: "scikit-learn RandomForest, not private",
    PEER: "diffprivlib, pure ε",
}
Array = np.ndarray
Times = tuple[float, float]  # elapsed, processor


def ours(
    problem: Problem, depth: int, delta: float, epsilon: float = EPSILONS[0], **further: Any
) -> Any:
    return PrivateForestClassifier(
        epsilon=epsilon,
        delta=delta,
        n_trees=N_TREES,
        max_depth=depth,
        bins=problem.bins,
        classes=[0, 1],
        **further,
    )


def plain(depth: int, seed: int = 0) -> Any:
    return RandomForestClassifier(N_TREES, max_depth=depth, n_jobs=1, random_state=seed)


def clocks(function: Any) -> Times:
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - processor


def medians(pairs: list[Times]) -> Times:
    return float(np.median([wall for wall, _ in pairs])), float(
        np.median([spent for _, spent in pairs])
    )


# --------------------------------------------------------------------------------------------- fits


class Peer:
    """diffprivlib's process with the arrays it fits, written once."""

    def __init__(self, ask: Any, problem: Problem, train: Array, test: Array, folder: Path) -> None:
        codes = problem.bins.codes(problem.X)
        for part, rows in (("train", train), ("test", test)):
            np.save(folder / f"X_{part}.npy", codes[rows].astype(np.float32))
            np.save(folder / f"y_{part}.npy", problem.y[rows])
        high = (problem.bins.sizes - 1).astype(float).tolist()
        self.facts = {"folder": str(folder), "low": [0.0] * len(high), "high": high}
        self.ask = ask

    def fit(self, depth: int, seed: int, epsilon: float = EPSILONS[0]) -> dict[str, float]:
        wanted = {"epsilon": epsilon, "n_estimators": N_TREES, "max_depth": depth, "seed": seed}
        return dict(self.ask({**self.facts, "fits": [wanted]})["fits"][0])


def measure_fits(
    problem: Problem, repeats: int, ask: Any, console: Console
) -> dict[tuple[str, int], Times]:
    """Time fits on all 30,000 records."""
    X, y = problem.X, problem.y
    found: dict[tuple[str, int], list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        every = np.arange(len(y))
        peer = None if ask is None else Peer(ask, problem, every, every[:1000], Path(folder))
        for depth in DEPTHS:
            for repeat in range(-1, repeats):
                runs = {
                    PURE: clocks(lambda d=depth: ours(problem, d, 0.0).fit(X, y)),
                    PLAIN: clocks(lambda d=depth, seed=repeat + 1: plain(d, seed).fit(X, y)),
                    ZCDP: clocks(lambda d=depth: ours(problem, d, DELTA).fit(X, y)),
                }
                if peer is not None:
                    answer = peer.fit(depth, repeat + 1)
                    runs[PEER] = answer["seconds"], answer["processor"]
                for name, times in runs.items():
                    if repeat >= 0:  # the first is not counted
                        found.setdefault((name, depth), []).append(times)
            console.print(f"depth {depth} timed")
    return {key: medians(times) for key, times in found.items()}


def measure_scores(
    problem: Problem, runs: int, ask: Any, console: Console
) -> dict[tuple[str, int, float], list[float]]:
    """Return AUC of the same settings on held-out records."""
    X, y = problem.X, problem.y
    found: dict[Any, list[float]] = {}
    for run in range(runs):
        train, test = problem.split(run)
        with tempfile.TemporaryDirectory() as folder:
            peer = None if ask is None else Peer(ask, problem, train, test, Path(folder))
            for depth in DEPTHS:
                model = plain(depth, run).fit(X[train], y[train])
                found.setdefault((PLAIN, depth, math.inf), []).append(
                    auc_of(model, X[test], y[test])
                )
                for epsilon in EPSILONS:
                    for name, delta in ((PURE, 0.0), (ZCDP, DELTA)):
                        noise = Noise(seed=seed_of(run, depth, round(10 * epsilon), bool(delta)))
                        model = ours(problem, depth, delta, epsilon, random_state=run, noise=noise)
                        score = auc_of(model.fit(X[train], y[train]), X[test], y[test])
                        found.setdefault((name, depth, epsilon), []).append(score)
                    if peer is not None:
                        score = peer.fit(depth, run, epsilon)["auc"]
                        found.setdefault((PEER, depth, epsilon), []).append(score)
        console.print(f"AUC: run {run + 1} of {runs}")
    return found


# -------------------------------------------------------------------------------------------- parts

PARTS = {
    "noise on leaves (OpenDP)": (trees, ("add_noise",)),
    "drawing splits": (trees, ("select_many",)),
    "counting": (histograms, ("count", "count_leaves")),
    "impurities": (histograms, ("impurities",)),
    "sending records down": (histograms, ("descend",)),
    "finding bins": (histograms, ("find_bins",)),
}


def measure_parts(problem: Problem, repeats: int) -> list[str]:
    """Return rows that show where a fit's processor time goes.

    Functions that this version of the library does not have are left out.
    """
    lines = []
    for name, delta in ((PURE, 0.0), (ZCDP, DELTA)):
        for depth in DEPTHS:
            wholes: list[float] = []
            spent: dict[str, list[float]] = {part: [] for part in PARTS}
            for _ in range(repeats):
                clock = dict.fromkeys(PARTS, 0.0)
                with ExitStack() as stack:
                    for part, (module, functions) in PARTS.items():
                        for function in (one for one in functions if hasattr(module, one)):
                            timed = _timed(getattr(module, function), clock, part)
                            stack.enter_context(mock.patch.object(module, function, timed))
                    wholes.append(
                        clocks(
                            lambda d=depth, by=delta: ours(problem, d, by).fit(problem.X, problem.y)
                        )[1]
                    )
                for part, seconds in clock.items():
                    spent[part].append(seconds)
            whole = float(np.median(wholes))
            parts = [float(np.median(values)) for values in spent.values()]
            cells = [
                f"{1e3 * value:.0f} ({value / whole:.0%})" for value in (*parts, whole - sum(parts))
            ]
            lines.append(f"| {depth} | {TITLES[name]} | {1e3 * whole:.0f} | {' | '.join(cells)} |")
    return lines


def _timed(function: Any, clock: dict[str, float], part: str) -> Any:
    def timed(*given: Any, **named: Any) -> Any:
        begun = time.process_time()
        result = function(*given, **named)
        clock[part] += time.process_time() - begun
        return result

    return timed


# --------------------------------------------------------------------------------------------- size


def enlarged(problem: Problem, n: int) -> tuple[Array, Array]:
    """Draw records with replacement until there are n."""
    rows = np.random.default_rng(n).integers(0, len(problem.y), n)
    return problem.X[rows], problem.y[rows]


def one_size(n: int, depth: int, delta: float) -> dict[str, float]:
    """Fit on n records in this process, started for this size; return seconds and memory."""
    problem = credit(data_folder() or Path())
    ours(problem, depth, delta).fit(problem.X[:200], problem.y[:200])
    X, y = enlarged(problem, n)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _peak_bytes()
    wall, processor = clocks(lambda: ours(problem, depth, delta).fit(X, y))
    peak = _peak_bytes()
    return {
        "n": n,
        "wall": wall,
        "processor": processor,
        "data": X.nbytes + y.nbytes,
        "before": before,
        "peak": peak,
    }


def _peak_bytes() -> int:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return 1024 * int(line.split()[1])


def measure_sizes(sizes: tuple[int, ...], console: Console) -> dict[str, list[dict[str, float]]]:
    one_thread = {
        name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    }
    found: dict[str, list[dict[str, float]]] = {PURE: [], ZCDP: []}
    for n in sizes:
        for name, delta in ((PURE, 0.0), (ZCDP, DELTA)):
            command = [sys.executable, __file__, "--one", str(n), str(delta)]
            times = [
                json.loads(
                    subprocess.run(
                        command, env={**os.environ, **one_thread}, check=True, stdout=-1
                    ).stdout
                )
                for _ in range(TIMES if n < 1e6 else 1)
            ]
            best = sorted(times, key=lambda one: one["processor"])[len(times) // 2]
            found[name].append(best)
        console.print(f"{n:,} records fitted")
    return found


def slope(rows: list[dict[str, float]]) -> float:
    """Return the exponent b of seconds ∝ n^b, from `LEAST` records on."""
    chosen = [row for row in rows if row["n"] >= LEAST]
    return float(
        np.polyfit(np.log([r["n"] for r in chosen]), np.log([r["processor"] for r in chosen]), 1)[0]
    )


# --------------------------------------------------------------------------------------- prediction


def measure_prediction(problem: Problem, repeats: int, n: int) -> dict[str, Times]:
    X, _ = enlarged(problem, n)
    models = {
        PURE: ours(problem, PREDICT_DEPTH, 0.0).fit(problem.X, problem.y),
        PLAIN: plain(PREDICT_DEPTH).fit(problem.X, problem.y),
    }
    times: dict[str, list[Times]] = {name: [] for name in models}
    for repeat in range(-1, repeats):
        for name, model in models.items():
            pair = clocks(lambda m=model: m.predict_proba(X))
            if repeat >= 0:
                times[name].append(pair)
    return {name: medians(pairs) for name, pairs in times.items()}


# ------------------------------------------------------------------------------------------- report


def fit_table(times: dict, scores: dict) -> tuple[list[str], list[str]]:
    """Return the table's rows and the sentences about its targets."""
    lines, verdicts = [], []
    for depth in DEPTHS:
        base = {name: times[name, depth][1] for name in TITLES if (name, depth) in times}
        for name, title in TITLES.items():
            if name not in base:
                continue
            wall, processor = times[name, depth]
            ratios = [
                f"{base[name] / base[other]:.2f}" if other in base else "–"
                for other in (PLAIN, PEER)
            ]
            if name == PLAIN:
                cells = [stated(scores[name, depth, math.inf])] * len(EPSILONS)
            else:
                cells = [stated(scores[name, depth, e]) for e in EPSILONS]
            lines.append(
                f"| {depth} | {title} | {1e3 * wall:.0f} | {1e3 * processor:.0f} | "
                f"{' | '.join(ratios)} | {' | '.join(cells)} |"
            )
            if name in (PURE, ZCDP):
                for other in (PLAIN, PEER):
                    if other in base:
                        ratio = base[name] / base[other]
                        word = "met" if ratio <= TARGET else "**missed**"
                        verdicts.append(
                            f"| {title} | {depth} | {TITLES[other]} | {ratio:.2f} | {word} |"
                        )
    return lines, verdicts


def stated(values: list[float]) -> str:
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.4f}"


def size_table(sizes: dict[str, list[dict[str, float]]]) -> list[str]:
    lines = []
    for pure, zcdp in zip(sizes[PURE], sizes[ZCDP], strict=True):
        cells = []
        for row in (pure, zcdp):
            cells += [
                f"{row['wall']:.3f}",
                f"{row['processor']:.3f}",
                f"{1e9 * row['processor'] / row['n']:.0f}",
                f"{(row['peak'] - row['before']) / 1e6:.0f}",
            ]
        lines.append(f"| {int(pure['n']):,} | {pure['data'] / 1e6:.0f} | {' | '.join(cells)} |")
    return lines


def plot(times: dict, sizes: dict, path: Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    names = [name for name in TITLES if (name, DEPTHS[0]) in times]
    for place, name in enumerate(names):
        at = np.arange(len(DEPTHS)) + (place - (len(names) - 1) / 2) * 0.2
        heights = [1e3 * times[name, depth][1] for depth in DEPTHS]
        bars = left.bar(at, heights, 0.19, label=TITLES[name], color=COLORS[(0, 5, 6, 1)[place]])
        left.bar_label(bars, [f"{height:.0f}" for height in heights], fontsize=8)
    left.set_xticks(range(len(DEPTHS)), [f"depth {depth}" for depth in DEPTHS])
    left.set(
        yscale="log",
        ylabel="processor ms per fit",
        title=f"30,000 × 23, {N_TREES} trees, one thread",
    )
    left.set_ylim(top=left.get_ylim()[1] * 6)
    left.legend(fontsize=8, loc="upper left")
    for name, marker, color in ((PURE, "o", COLORS[0]), (ZCDP, "s", COLORS[5])):
        rows = sizes[name]
        n = np.array([row["n"] for row in rows])
        label = f"{TITLES[name]}: n^{slope(rows):.2f} from 100,000 on"
        middle.loglog(
            n, [row["processor"] for row in rows], marker=marker, color=color, label=label
        )
        memory = [max((row["peak"] - row["before"]) / 1e6, 1) for row in rows]
        right.loglog(n, memory, marker=marker, color=color, label=TITLES[name])
    line = np.array([row["n"] for row in sizes[PURE]])
    middle.loglog(
        line, sizes[PURE][-1]["processor"] * line / line[-1], ":", color="black", label="∝ n"
    )
    middle.set(
        xlabel="records",
        ylabel="processor s per fit",
        title=f"{N_TREES} trees of depth {DEPTHS[0]}",
    )
    right.loglog(
        line,
        [row["data"] / 1e6 for row in sizes[PURE]],
        ":",
        color="black",
        label="the records themselves",
    )
    right.set(xlabel="records", ylabel="MB", title="peak memory beyond the records")
    for axis in (middle, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="3 repeats, up to 300,000 records, into a temporary folder",
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with threadpool_limits(limits=1):
            print(json.dumps(one_size(int(options.one[0]), DEPTHS[0], float(options.one[1]))))
        return 0
    console = Console(stderr=True)
    folder = data_folder()
    if folder is None:
        console.print(
            "forest_speed.py: no data folder; set CONSILIENCE_DATA to one. Nothing was measured."
        )
        return 0
    out = Path(tempfile.mkdtemp(prefix="forest-speed-")) if options.quick else HERE
    repeats, runs = (3, 2) if options.quick else (9, 5)
    sizes = SIZES[:4] if options.quick else SIZES
    problem = credit(folder)
    with threadpool_limits(limits=1), open_peer(find_peer(console), PEER_SCRIPT) as ask:
        about = machine(ask)
        times = measure_fits(problem, repeats, ask, console)
        scores = measure_scores(problem, runs, ask, console)
        parts = measure_parts(problem, repeats)
        prediction = measure_prediction(problem, repeats, ROWS // 10 if options.quick else ROWS)
    grown = measure_sizes(sizes, console)
    rows, verdicts = fit_table(times, scores)
    fast = prediction[PURE][0]
    largest = {name: grown[name][-1] for name in grown}
    lines = [
        "# Speed of private forests",
        "",
        f"Made by `python benchmarks/forest_speed.py{' --quick' if options.quick else ''}`; do "
        "not edit, run it again.",
        "",
        about,
        f"- credit-card default, 30,000 × 23, {N_TREES} trees, one thread, ε = {EPSILONS[0]:g}. "
        "Ours starts from the numbers, so its time includes finding their bins; diffprivlib gets "
        "the bins as numbers. Noise is fresh and the guarantee real. scikit-learn tries √23 "
        "features at each split, by its default; ours all (pure) or half of them for each tree "
        "(δ)",
        f"- medians of {repeats} interleaved repeats after one that is not counted; ratios of "
        "processor time. AUC: the same settings on 24,000 training and 6,000 test records, mean "
        f"± standard error of {runs} splits, seeded",
        "",
        f"## Targets: at most {TARGET:g} × the time of either",
        "",
        "| ours | depth | against | ratio | |",
        "|---|---:|---|---:|---|",
        *verdicts,
        "",
        f"Linear in the number of records: seconds grow as n^{slope(grown[PURE]):.2f} (pure) and "
        f"n^{slope(grown[ZCDP]):.2f} (δ) from 100,000 records on; {int(largest[PURE]['n']):,} "
        f"records take {largest[PURE]['processor']:.1f} s and {largest[ZCDP]['processor']:.1f} s "
        "of processor time.",
        "",
        f"Prediction of {ROWS // 10 if options.quick else ROWS:,} records by {N_TREES} trees of "
        f"depth {PREDICT_DEPTH}: {fast:.2f} s elapsed, {prediction[PURE][1]:.2f} s of processor "
        f"time, target {PREDICT_TARGET:g} s: {'met' if fast < PREDICT_TARGET else '**missed**'}; "
        f"scikit-learn {prediction[PLAIN][0]:.2f} s, processor {prediction[PLAIN][1]:.2f} s, "
        f"ratio {prediction[PURE][1] / prediction[PLAIN][1]:.2f}.",
        "",
        "![Time of a fit, against depth and number of records](forest_speed.png)",
        "",
        "## Fits",
        "",
        f"| depth | learner | elapsed ms | processor ms | × scikit-learn | × diffprivlib "
        f"| {' | '.join(f'AUC, ε = {e:g}' for e in EPSILONS)} |",
        "|---:|---|---:|---:|---:|---:|" + "---:|" * len(EPSILONS),
        *rows,
        "",
        "## Where the time goes",
        "",
        "Processor ms of a fit and its parts. Every leaf and class costs one exact draw, so a "
        f"forest of depth h costs {N_TREES} · 2^h · 2 of them, whatever the number of records: "
        f"{N_TREES * 2 ** DEPTHS[-1] * 2:,} at depth {DEPTHS[-1]}.",
        "",
        f"| depth | learner | whole | {' | '.join(PARTS)} | the rest |",
        "|---:|---|---:|" + "---:|" * (len(PARTS) + 1),
        *parts,
        "",
        "## Number of records",
        "",
        f"{N_TREES} trees of depth {DEPTHS[0]}; records drawn from the 30,000 with replacement. "
        "Each fit has a process of its own; extra memory is the peak during the fit beyond what "
        "the process, records included, held before. Median of three up to 300,000, one fit "
        "beyond.",
        "",
        "| records | their MB | pure: elapsed s | processor s | ns per record | extra MB "
        "| δ: elapsed s | processor s | ns per record | extra MB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *size_table(grown),
    ]
    text = "\n".join(lines) + "\n"
    write_page(out / "forest_speed.md", text)
    plot(times, grown, out / "forest_speed.png")
    print(text)
    console.print(f"Written: forest_speed.md and forest_speed.png in {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
