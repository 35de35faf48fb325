"""Measure what few labelled public records give by themselves, and what a blend makes of them.

    CONSILIENCE_DATA=FOLDER python benchmarks/public_alone.py [--quick]

Every draw takes public records, ten sites and test records from a shuffled table; all methods see
the same. Writes benchmarks/public_alone.md.
"""

import argparse
import math
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

import consilience as cs
from accuracy import load_adult, load_covertype, load_mnist
from consilience.evaluation.baselines import public_only
from consilience.evaluation.measures import measures
from consilience.learners.tuning import choose_on_public
from consilience.privacy.mechanisms import Noise
from forests import credit
from pages import write_page

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("CONSILIENCE_DATA") or HERE.parent / "data")
PUBLIC = (50, 200)
EPSILONS = (0.1, 1.0)
DRAWS = 20
N_SITES, N_RECORDS, N_TEST = 10, 500, 4_000
RIDGES = tuple(10.0**power for power in range(-6, 1))
LOADERS = {
    "Adult": load_adult,
    "Adult, encoded by a schema": lambda folder: _schema_encoded(folder),
    "credit default": lambda folder: (credit(folder).encoded, credit(folder).y),
    "MNIST 3 vs 7": load_mnist,
    "Covertype 1 vs 2": load_covertype,
}
BEFORE, ALONE, BEST = "ridge by mistakes", "likelihood (now)", "best ridge in hindsight"


def _schema_encoded(folder):
    from forests import adult

    return adult(folder).encoded, adult(folder).y


def by_mistakes(X, y):
    """Return the ridge that makes the fewest mistakes in five folds: the baseline until now."""
    learner = _learner(math.inf)
    folds = min(5, int(np.bincount(y).min()))
    if folds > 1:
        size = len(y) * (folds - 1) // folds
        grid = {"regularization": RIDGES}
        learner.set_params(
            **choose_on_public(learner, grid, X, y, n_records=size, cv=folds, repeats=1)
        )
    return learner.fit(X, y)


def _learner(epsilon, **settings):
    return cs.PrivateLogisticRegression(
        epsilon=epsilon, classes=[0, 1], **{"regularization": 1e-3, **settings}
    )


def draw(X, y, m, seed):
    """Return the error of every method in one draw."""
    order = np.random.default_rng(seed).permutation(len(y))
    size = min(N_RECORDS, (len(y) - m) // (2 * N_SITES))
    public, test = order[:m], order[m + N_SITES * size :][:N_TEST]
    shown = cs.Public(X[public], y[public])

    def error(model):
        return measures(model, X[test], y[test])["error"]

    found = {BEFORE: error(by_mistakes(shown.X, shown.y))}
    found[ALONE] = error(public_only(_learner(math.inf), shown))
    for ridge in RIDGES:
        found[ridge] = error(_learner(math.inf, regularization=ridge).fit(shown.X, shown.y))
    for epsilon in EPSILONS:
        members = []
        for site in range(N_SITES):
            rows = order[m + site * size : m + (site + 1) * size]
            noise = Noise(seed=seed * N_SITES + site)
            members.append(_learner(epsilon, noise=noise).fit(X[rows], y[rows]))
        found[f"blend, ε = {epsilon:g}"] = error(cs.PublicBlend().combine(members, shown))
    found["always the most frequent class"] = float(min(y[test].mean(), 1 - y[test].mean()))
    return found


def summarise(draws):
    """Return a row of the table: errors, and how much the likelihood changed, in pairs."""
    rows = {name: np.array([one[name] for one in draws]) for name in draws[0]}
    best = min(RIDGES, key=lambda ridge: rows[ridge].mean())
    rows[BEST] = rows[best]
    shown = (BEFORE, ALONE, BEST, *(name for name in rows if str(name).startswith("blend")))
    cells = [f"{rows[name].mean():.4f} ± {_error(rows[name]):.4f}" for name in shown]
    change = rows[ALONE] - rows[BEFORE]
    guess = rows["always the most frequent class"].mean()
    return [*cells, f"{guess:.4f}", f"{change.mean():+.4f} ± {_error(change):.4f}"], shown


def _error(values):
    return values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="two draws, into a temporary folder")
    quick = parser.parse_args().quick
    lines = []
    for title, load in LOADERS.items():
        X, y = load(DATA)
        y = (np.asarray(y) == np.max(y)).astype(int)
        for m in PUBLIC:
            row, shown = summarise([draw(X, y, m, seed) for seed in range(2 if quick else DRAWS)])
            if not lines:
                heads = ["data", "public records", *shown, "most frequent class", "now − before"]
                lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
            lines.append(f"| {title} | {m} | {' | '.join(row)} |")
            print(lines[-1], flush=True)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "scikit-learn"))
    text = f"""# Few public records by themselves

`CONSILIENCE_DATA=… python benchmarks/public_alone.py`, Python {platform.python_version()}, \
{libraries}.

Test error, mean ± standard error over {2 if quick else DRAWS} draws of public records, ten sites \
of at most {N_RECORDS} records and test records. *{BEFORE.capitalize()}* is the baseline "public \
records alone" as it was: the ridge that makes the fewest mistakes in five folds. *Likelihood* is \
the baseline now, the same code as the public part of `PublicBlend`: ridges mixed by their \
cross-validated likelihood. *Best ridge in hindsight* is the one ridge with the least mean test \
error, which nobody can know. The blends join sites at that pure ε (ridge 1e-3).

{chr(10).join(lines)}

Three things changed together. They were chosen on Adult, the odds on the first twelve of these \
draws, and the second on Covertype, too; credit default and MNIST were looked at meanwhile to \
see that nothing gets worse, and decided nothing. The baseline is the blend's public part. \
Candidates that are too sure of themselves on held-out records are shrunk by one factor before \
they are weighed; without this the likelihood favours ridges that are too strong (Covertype, 50 \
records: 0.4045 instead of 0.3702). The odds on the sites' average fall where its known noise \
explains what it says; before, blends erred at ε = 0.1 and 1 on 0.2237 and 0.2262 (Adult), \
0.2158 and 0.2168 (Adult by schema), 0.2207 and 0.2188 (credit default), 0.0409 and 0.0387 \
(MNIST), 0.4038 and 0.3904 (Covertype) with 50 public records, and with 200 on 0.1880 and \
0.1877, 0.1798 and 0.1798, 0.2045 and 0.2044, 0.0271 and 0.0270, 0.2798 and 0.2741. An intercept \
that the ridge hardly touches, sharper mixtures, the single best strength and other ends of the \
grid were within 0.002 on Adult, and what gained on one encoding lost on the other.
"""
    folder = Path(tempfile.mkdtemp()) if quick else HERE
    write_page(folder / "public_alone.md", text)
    print(f"written: {folder / 'public_alone.md'}")


if __name__ == "__main__":
    sys.exit(main())
