"""Compare what `plan` predicts with what `simulate` finds, on made-up records and MNIST.

    CONSILIENCE_DATA=FOLDER python benchmarks/planning.py [--quick]

Writes benchmarks/planning.md and .png. One quantity is varied at a time: sites N, epsilon, public
records m0, and for distillation the number of small sites M. Losses are nats beyond the best linear
model that all records give; plans see a public table of their own and nothing else. Seeds are
fixed, so that the table repeats.
"""

import argparse
import math
import os
import platform
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
from matplotlib.ticker import LogLocator
from threadpoolctl import threadpool_limits

from consilience import (
    Average,
    FeatureMethod,
    PrivateLogisticRegression,
    PublicBlend,
    SoftLabelDistillation,
)
from consilience.evaluation.measures import measures
from consilience.planning.plan import plan
from consilience.privacy.mechanisms import clip_rows
from consilience.simulation.simulate import simulate
from pages import write_page

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("CONSILIENCE_DATA", ROOT / "data"))
LEARNER, ALONE, PUBLIC = "PrivateLogisticRegression", "one site alone", "public records alone"
JOINED = {
    "average": Average("equal"),
    "feature method": FeatureMethod(),
    "public blend": PublicBlend(),
}
REPEATS = (12, 4)  # of a whole and of a quick run
SIMULATED = {ALONE: "local-mean", PUBLIC: "public-only"}
COLOURS = {
    ALONE: "#999999",
    PUBLIC: "#333333",
    "average": "#0072B2",
    "feature method": "#D55E00",
    "public blend": "#009E73",
    "soft labels, output": "#CC79A7",
    "soft labels, statistic": "#E69F00",
}
MARKERS = dict(zip(COLOURS, "vsoD^PX", strict=True))


def made_up(n, seed, d=10, slope=3.0):
    """Records of a logistic model with directions of unequal spread."""
    draw = np.random.default_rng(seed)
    X = clip_rows(draw.normal(size=(n, d)) * np.linspace(1.5, 0.5, d) / math.sqrt(d) / 1.6, 1.0)
    weights = np.random.default_rng(99).normal(size=d) * slope
    return X, (draw.random(n) < 1 / (1 + np.exp(-(X @ weights + 0.5)))).astype(int)


def mnist():
    """Training digits 3 and 7 on 50 components of the test images, which are public here."""
    table = pq.read_table(DATA / "mnist.parquet")
    pixels = np.frombuffer(b"".join(table["pixels"].to_pylist()), np.uint8).reshape(-1, 784) / 255.0
    label, split = table["label"].to_numpy(), np.asarray(table["split"].to_pylist())
    public = pixels[split == "test"]
    centre = public.mean(axis=0)
    axes = np.linalg.eigh(np.cov(public, rowvar=False))[1][:, -50:]
    norm = np.median(np.linalg.norm((public - centre) @ axes, axis=1))
    chosen = (split == "train") & np.isin(label, (3, 7))
    return clip_rows((pixels[chosen] - centre) @ axes / norm, 1.0), (label[chosen] == 7).astype(int)


class Task:
    """Records to simulate with, test and public records, and the settings varied around."""

    def __init__(self, title, pool, test, public, *, ridge, usual, sweeps):
        self.title, self.pool, self.test, self.public = title, pool, test, public
        self.ridge, self.usual, self.sweeps = ridge, usual, sweeps
        exact = {
            r: PrivateLogisticRegression(epsilon=math.inf, regularization=r)
            for r in (ridge, 1e-3, 1e-4, 1e-5)
        }
        losses = {r: measures(one.fit(*pool), *test)["log_loss"] for r, one in exact.items()}
        self.best, self.floor = min(losses.values()), losses[ridge] - min(losses.values())

    def cell(self, repeats, *, distil=False, **change):
        """Results by way: predicted and found loss, its error, predicted and found error rate."""
        facts = self.usual | change
        n, sites, epsilon, public = (facts[name] for name in ("n", "sites", "epsilon", "public"))
        ways = JOINED
        if distil:
            ways = {
                "soft labels, output": SoftLabelDistillation(
                    epsilon=epsilon, regularization=1e-2, mechanism="output"
                ),
                "soft labels, statistic": SoftLabelDistillation(
                    epsilon=epsilon, regularization=1e-2
                ),
            }
        settings = {"regularization": self.ridge}
        advice = plan(
            n_records=n,
            epsilon=epsilon,
            n_sites=sites,
            n_public=public,
            public=self.public,
            aggregator=ways,
            **settings,
        )
        trained = math.inf if distil else epsilon  # distillation adds its noise to exact members
        report = simulate(
            PrivateLogisticRegression(epsilon=trained, **settings),
            ways,
            *self.pool,
            sites=sites,
            sizes=[n] * sites,
            public=public,
            test=self.test,
            repeats=repeats,
            seed=7,
        )
        found = {}
        for one in advice.joined:
            if distil and one.name in SIMULATED:
                continue
            name = SIMULATED.get(one.name, one.name)
            loss, error = (
                report.values(LEARNER, f"{trained:g}", name, metric)
                for metric in ("log_loss", "error")
            )
            spread = loss.std(ddof=1) / math.sqrt(repeats)
            predicted = one.excess_loss + self.floor
            found[one.name] = (
                predicted,
                loss.mean() - self.best,
                spread,
                one.error,
                error.mean(),
                one.bound,
            )
        return found


def tasks(quick):
    sweeps = {
        "N": ("sites", (2, 5, 10) if quick else (2, 5, 10, 20), False),
        "ε": ("epsilon", (0.3, 3.0) if quick else (0.1, 0.3, 1.0, 3.0), False),
        "m0": ("public", (100, 400) if quick else (50, 200, 800), False),
        "M": ("sites", (20, 40) if quick else (20, 60, 180), True),
    }
    yield Task(
        "made-up records, 10 features",
        made_up(60_000, 11),
        made_up(6000, 7),
        made_up(4000, 3),
        ridge=1e-3,
        usual={"n": 500, "sites": 10, "epsilon": 1.0, "public": 200},
        sweeps=sweeps,
    )
    if not (DATA / "mnist.parquet").exists():
        return
    X, y = mnist()
    order = np.random.default_rng(0).permutation(len(y))
    test, public, pool = np.split(order, [2000, 3500])
    yield Task(
        "MNIST 3 against 7, 50 components",
        (X[pool], y[pool]),
        (X[test], y[test]),
        (X[public], y[public]),
        ridge=1e-2,
        usual={"n": 789, "sites": 10, "epsilon": 1.0, "public": 200},
        sweeps=sweeps | {"N": ("sites", (2, 5, 10), False)},
    )


def run(task, repeats):
    for name, (what, values, distil) in task.sweeps.items():
        for value in values:
            change = {what: value} | ({"n": 40, "epsilon": 4.0, "public": 500} if distil else {})
            started = time.perf_counter()
            found = task.cell(repeats // 2 if distil else repeats, distil=distil, **change)
            print(
                f"{task.title}: {name} = {value:g}, {time.perf_counter() - started:.0f} s",
                flush=True,
            )
            yield name, value, found


def chart(results, path):
    rows, columns = len(results), 4
    figure, panels = plt.subplots(rows, columns, figsize=(15, 4.1 * rows + 0.8), squeeze=False)
    labels = {
        "N": "sites N",
        "ε": "epsilon",
        "m0": "public records m0",
        "M": "sites M of 40 records, distilled",
    }
    for row, (title, cells) in zip(panels, results.items(), strict=True):
        for axes, name in zip(row, labels, strict=True):
            points = [(value, found) for sweep, value, found in cells if sweep == name]
            x = [value for value, _ in points]
            for way in points[0][1]:
                predicted, found, spread = (
                    np.array([one[way][i] for _, one in points]) for i in range(3)
                )
                style = {"color": COLOURS[way], "markersize": 7}
                dashed = (
                    (0, (4, 3)) if way == PUBLIC else "-"
                )  # it often coincides with the blend's
                axes.plot(
                    x,
                    predicted,
                    linewidth=1.8,
                    color=COLOURS[way],
                    linestyle=dashed,
                    zorder=3 if dashed != "-" else 2,
                )
                low = np.minimum(spread, 0.9 * np.abs(found))
                axes.errorbar(
                    x, found, (low, spread), fmt=MARKERS[way], capsize=3, label=way, **style
                )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
            axes.set_xlabel(labels[name])
            axes.grid(color="#dddddd", linewidth=0.7, which="major")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"{title}\nloss beyond the best linear model", fontsize=10)
    handles = {}
    for axes in panels.ravel():
        handles |= {
            name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    figure.suptitle(
        "Lines: predicted by plan. Markers: found by simulate, mean and its standard error.",
        fontsize=12,
    )
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=7, frameon=False, fontsize=10
    )
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    figure.savefig(path, dpi=130)


def slope(points, way, i):
    """Least-squares slope on logarithmic scales."""
    return float(
        np.polyfit(
            np.log([v for v, _ in points]), np.log([max(f[way][i], 1e-9) for _, f in points]), 1
        )[0]
    )


def page(results, repeats, seconds):
    lines = [
        "# Predicted and found",
        "",
        f"`CONSILIENCE_DATA=… python benchmarks/planning.py`, Python {platform.python_version()}, "
        f"NumPy {np.__version__}; {seconds / 60:.0f} minutes on one busy core. Derivations: "
        "[docs/planning-proofs.md](../docs/planning-proofs.md).",
        "",
        "Loss: nats beyond the best linear model that all records give (on test records; ridge "
        f"the best of four). Found: `simulate`, {repeats} repeats ({repeats // 2} with M), mean ± "
        "standard error. Predicted: `plan` with a public table of other records (4,000 made-up, "
        "1,500 of MNIST), nothing else. ε per record, for M per site. Local ridge: 1e-3 "
        "(made-up), 1e-2 (MNIST); distilled: 1e-2, M sites of 40 records, 500 public records, ε "
        "= 4. Bound: the theorem on the expected loss beyond the sites' own ridge, which no "
        "expectation may exceed (for M: on the labels that members give).",
        "",
        "![](planning.png)",
        "",
    ]
    ratios = {}
    for title, cells in results.items():
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        usual = "n = 500" if title.startswith("made") else "n = 789"
        lines += [f"Where not varied: {usual}, N = 10, ε = 1, m0 = 200.", ""]
        lines += [
            "| varied | way | predicted | found | ratio | error predicted | error found | bound |"
        ]
        lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
        for name, value, found in cells:
            for way, (predicted, loss, spread, wrong, error, bound) in found.items():
                ratios.setdefault(way, []).append(predicted / loss)
                numbers = f"{predicted:.4f} | {loss:.4f} ± {spread:.4f} | {predicted / loss:.2f}"
                lines.append(
                    f"| {name} = {value:g} | {way} | {numbers} | {wrong:.3f} | {error:.3f} | "
                    f"{bound:.3g} |"
                )
        lines += [
            "",
            "Slopes on logarithmic scales, predicted / found:",
            "",
            "| way | N | ε | m0 | M |",
            "|---|---|---|---|---|",
        ]
        for way in COLOURS:
            words = []
            for sweep in ("N", "ε", "m0", "M"):
                points = [
                    (value, found) for one, value, found in cells if one == sweep and way in found
                ]
                words.append(
                    f"{slope(points, way, 0):+.2f} / {slope(points, way, 1):+.2f}" if points else ""
                )
            lines.append(f"| {way} | {' | '.join(words)} |")
        lines.append("")
    lines += [
        "## Predicted over found, all cells",
        "",
        "| way | least | median | most | cells |",
        "|---|---:|---:|---:|---:|",
    ]
    for way, found in ratios.items():
        numbers = f"{min(found):.2f} | {np.median(found):.2f} | {max(found):.2f} | {len(found)}"
        lines.append(f"| {way} | {numbers} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few repeats and cells, nothing is written"
    )
    quick = parser.parse_args().quick
    repeats, started = REPEATS[quick], time.perf_counter()
    with threadpool_limits(1):
        results = {task.title: list(run(task, repeats)) for task in tasks(quick)}
    text = page(results, repeats, time.perf_counter() - started)
    if quick:
        chart(results, Path(tempfile.mkdtemp(prefix="planning-")) / "planning.png")
        print(text)
        return
    chart(results, ROOT / "benchmarks" / "planning.png")
    write_page(ROOT / "benchmarks" / "planning.md", text)


if __name__ == "__main__":
    main()
