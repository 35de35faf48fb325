"""Measure what a vote of sites with different kinds of learner is worth, beside votes of one kind.

    CONSILIENCE_DATA=FOLDER python benchmarks/kinds.py [--divisions N]

Each division cuts a table into sites and test records. The same sites train every kind of learner;
in the mixed vote they take turns. Noise is seeded, as it must be to repeat the page, so that no
number here has a guarantee. Writes benchmarks/kinds.md.
"""

import argparse
import math
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

import defaults
from consilience import (
    Noise,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    WeightedVote,
)
from pages import write_page

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("CONSILIENCE_DATA") or HERE.parent / "data")
EPSILONS = (0.1, 0.5, 2.0)
DIVISIONS = 20
N_SITES, SIZE, N_TEST = 9, 800, 8_000
TABLES = {
    "Adult in public bins": lambda folder: defaults.adult(folder),
    "Credit-card default in public bins": lambda folder: defaults.credit(folder),
}
MIXED = "the three kinds in turn"


def kinds(table, epsilon):
    """Return a site's learners by name; all take the same rows."""
    shared = {"epsilon": epsilon, "delta": 1e-6, "classes": [0, 1]}
    norm = float(table.norm)
    return {
        "logistic regression": PrivateLogisticRegression(**shared, data_norm=norm),
        "support vectors": PrivateLinearSVC(**shared, data_norm=norm),
        "forest": PrivateForestClassifier(**shared, neighbours="replace-one", bounds=(0, 1)),
    }


def measure(model, X, y):
    """Return error and AUC."""
    proba = model.predict_proba(X)[:, 1]
    return {"error": float(np.mean(model.predict(X) != y)), "AUC": float(roc_auc_score(y, proba))}


def divide(table, seed):
    """Return error and AUC of every vote of one division, by (epsilon, kind)."""
    X, y = np.asarray(table.X), np.asarray(table.y)
    order = np.random.default_rng(seed).permutation(len(y))
    sites, rest = order[: N_SITES * SIZE].reshape(N_SITES, -1), order[N_SITES * SIZE :]
    test, found = rest[:N_TEST], {}
    for epsilon in EPSILONS:
        members = defaultdict(list)
        for site, rows in enumerate(sites):
            for name, learner in kinds(table, epsilon).items():
                noise = Noise(seed=seed * N_SITES + site)
                members[name].append(learner.set_params(noise=noise).fit(X[rows], y[rows]))
        every = list(members.values())
        members[MIXED] = [every[site % len(every)][site] for site in range(N_SITES)]
        for name, voters in members.items():
            found[epsilon, name] = measure(WeightedVote().combine(voters), X[test], y[test])
    return found


def show(values):
    """Return mean and standard error."""
    spread = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{np.mean(values):.4f} ± {spread:.4f}"


def tabulate(divisions, metric):
    """Return the table of one measure, and how the mixed vote compares with the best kind."""
    names = list(dict.fromkeys(name for _, name in divisions[0]))
    lines = [f"| {metric} | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |"]
    lines.append("|---" * (len(EPSILONS) + 1) + "|")
    values = {
        (epsilon, name): np.array([one[epsilon, name][metric] for one in divisions])
        for epsilon, name in divisions[0]
    }
    for name in names:
        cells = " | ".join(show(values[epsilon, name]) for epsilon in EPSILONS)
        lines.append(f"| {name} | {cells} |")
    best, cells = (max if metric == "AUC" else min), []
    for epsilon in EPSILONS:
        single = (name for name in names if name != MIXED)
        first = best(single, key=lambda name: values[epsilon, name].mean())
        cells.append(show(values[epsilon, MIXED] - values[epsilon, first]))
    lines.append(f"| in turn, less the best kind | {' | '.join(cells)} |")
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--divisions", type=int, default=DIVISIONS)
    n = parser.parse_args().divisions
    lines = []
    for title, load in TABLES.items():
        table = load(DATA)
        divisions = []
        for seed in range(n):
            divisions.append(divide(table, seed))
            print(f"{title}: {seed + 1} of {n}", flush=True)
        lines += [f"## {title}", ""]
        for metric in ("AUC", "error"):
            lines += [*tabulate(divisions, metric), ""]
    write_page(
        HERE / "kinds.md",
        f"""# Sites with learners of different kinds

`python benchmarks/kinds.py --divisions {n}`: {n} random divisions into {N_SITES} sites of {SIZE} \
records, δ = 1e-6, replace-one, every learner at its defaults, `WeightedVote()`; mean ± standard \
error over divisions, on at most {N_TEST:,} fresh records. In the mixed vote a third of the sites \
trains each kind, as a study with `[alternatives.…]` allows. The last row of each table is the \
difference from the kind that is best in hindsight, in pairs. Noise is seeded, so that the page \
repeats.

{chr(10).join(lines)}""",
    )


if __name__ == "__main__":
    main()
