"""Measure what hides whole sites without a trusted hub, beside distillation at a trusted one.

    CONSILIENCE_DATA=FOLDER python benchmarks/site_level.py [--divisions 8]

Writes benchmarks/site_level.md. Sites, features and public records are those of
benchmarks/distillation.py. All methods see the same divisions, so that differences are paired.
Nothing is tuned: every λ of a distilled model is chosen by the known noise, without labels.
"""

import argparse
import math
import platform
import time
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from consilience import Noise
from consilience.aggregators.distillation.distill import SoftLabelDistillation, VoteDistillation
from consilience.aggregators.distillation.tally import count_votes
from consilience.aggregators.members import LinearEnsemble
from consilience.learners.ball import Ball, into_ball, out_of_ball
from consilience.learners.batch import SiteProblems, solve_many
from consilience.learners.erm import Logistic, Softmax
from consilience.simulation.once import TotalOnce
from consilience.statistics.vote_tally import VoteTally, pack_rows
from consilience.tables.public import Public
from distillation import har, kdd
from pages import write_page

ROOT = Path(__file__).resolve().parents[1]
DELTA, STRENGTH, SCALING = 1e-5, 1e-4, 0.3
EPSILONS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
SITES, N_PUBLIC, N_TEST = {"KDD": 5_000}, {"KDD": 2_000}, 20_000
DRAWS = 2
CHECKED = 3  # sites whose vote is compared with that of the other solver
HUB, VOTE = "trusted hub, soft labels", "trusted hub, majority vote"
SHARED, ONCE, EACH = "noise shared", "noise once", "noise at every site"
METHODS = (HUB, VOTE, SHARED, ONCE, EACH)


class Cell:
    """One division: local models trained once, for the hub and for the tally."""

    def __init__(self, X, y, public, private, test, n_sites, n_records, name):
        public, test = public[: N_PUBLIC.get(name)], test[:N_TEST]
        self.X, self.y, self.classes = X[test], y[test], list(range(int(y.max()) + 1))
        self.public = Public(X[public])
        ball, K = Ball(1.0, True, SCALING), len(self.classes)
        loss, target = (Logistic(), 2.0 * y - 1) if K == 2 else (Softmax(K), y)
        local = solve_many(
            into_ball(X[private], ball),
            target[private],
            SiteProblems(
                loss,
                sites=np.repeat(np.arange(n_sites), n_records),
                n_sites=n_sites,
                regularization=n_records * STRENGTH,
                tolerance=1e-6 * n_records * STRENGTH,
            ),
        ).coef
        ones = np.ones(1)
        members = [
            LinearEnsemble(np.arange(K), *out_of_ball(w, ball), ones, None, ()) for w in local
        ]
        self.alone = float(np.mean([self.right(one) for one in members[:: max(1, n_sites // 50)]]))
        self.tally = count_votes(members, self.public, classes=self.classes)
        settings = {"classes": self.classes, "records": pack_rows(self.public), "delta": DELTA}
        blank = VoteTally(epsilon=math.inf, regularization=STRENGTH, **settings)
        self.sums = []
        for i, w in enumerate(local):
            rows = slice(i * n_records, (i + 1) * n_records)
            if i < CHECKED:  # by the statistic's own solver; the others by the batch's
                fitted = VoteTally(**blank.get_params(deep=False))
                fitted.fit(X[private[rows]], y[private[rows]])
                adder, model = fitted.adder(), fitted
            part = adder.count(np.atleast_2d(w))
            if i < CHECKED:
                moved = np.linalg.norm(part - fitted.total_) * fitted.grain
                assert moved < 0.1, "two solvers vote differently"
            one = VoteTally(**blank.get_params(deep=False))
            one.n_features_in_, one.classes_ = model.n_features_in_, model.classes_
            one.events_, one.receipt_, one.guarantee_ = (), None, model.guarantee_
            one.total_ = part
            self.sums.append(one)

    def right(self, model):
        """Return the share of test records that a model is right on."""
        return float((np.asarray(model.predict(self.X)) == self.y).mean())

    def measure(self, method, epsilon, seed):
        """Return the accuracy of one draw."""
        noise = Noise(seed=seed)
        asked = {"epsilon": epsilon, "delta": DELTA, "classes": self.classes, "noise": noise}
        if method == HUB:
            made = SoftLabelDistillation(regularization="auto", **asked)
            return self.right(made.combine(self.tally))
        if method == VOTE:
            return self.right(VoteDistillation(**asked).combine(self.tally))
        n = len(self.sums)
        shares = {ONCE: None, SHARED: max(1, n * 4 // 5), EACH: 1}[method]
        once = TotalOnce(epsilon=epsilon, shares=shares, noise=noise)
        return self.right(once.combine(self.sums))


def divide(name, seed):
    """Return one division of a data set."""
    if name == "HAR":
        return Cell(*har(seed, even_axes=False), name)
    return Cell(*kdd(seed, SITES[name]), name)


def mean_and_error(values):
    """Return the mean over divisions and its standard error."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


def report(name, n_divisions):
    """Return the section of a data set."""
    begun = time.process_time()
    found = {(m, e): [] for m in METHODS for e in EPSILONS}
    alone, exact = [], []
    for seed in range(n_divisions):
        cell = divide(name, seed)
        alone.append(cell.alone)
        exact.append(cell.measure(HUB, 1e6, 0))
        for (method, epsilon), values in found.items():
            draws = [cell.measure(method, epsilon, 100 * seed + draw) for draw in range(DRAWS)]
            values.append(np.mean(draws))
        print(name, seed, f"{time.process_time() - begun:.0f} s", flush=True)
    lines = [
        f"## {name}: {len(cell.sums):,} sites, {len(cell.public.X):,} public records, "
        f"{len(cell.classes)} classes",
        "",
        f"Accuracy on test records. One site alone {np.mean(alone):.3f}, distilled without noise "
        f"{np.mean(exact):.3f}.",
        "",
        "| method | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |",
        "|---|" + "---:|" * len(EPSILONS),
    ]
    for method in METHODS:
        cells = [mean_and_error(found[method, e]) for e in EPSILONS]
        lines.append(f"| {method} | " + " | ".join(f"{m:.3f} ± {s:.3f}" for m, s in cells) + " |")
    for method in (SHARED, ONCE, EACH):
        gaps = [np.subtract(found[method, e], found[HUB, e]) for e in EPSILONS]
        shown = [f"{m:+.4f} ± {s:.4f}" for m, s in map(mean_and_error, gaps)]
        lines.append(f"| {method} − soft labels | " + " | ".join(shown) + " |")
        if method == SHARED:
            missed = [e for e, gap in zip(EPSILONS, gaps, strict=True) if np.mean(gap) < -0.01]
    verdict = (
        f"more than .01 below at ε = {', '.join(f'{e:g}' for e in missed)}"
        if missed
        else "within .01 at every ε of the table"
    )
    lines += ["", f"With shared noise the tally is {verdict}.", ""]
    return "\n".join(lines), time.process_time() - begun


def main():
    """Measure all data sets and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divisions", type=int, default=8)
    asked = parser.parse_args()
    parts = [report(name, asked.divisions) for name in ("HAR", "KDD")]
    sections, seconds = zip(*parts, strict=True)
    text = (
        "# Hiding whole sites without a trusted hub\n\n"
        f"`python benchmarks/site_level.py --divisions {asked.divisions}`, "
        f"{sum(seconds) / 60:.0f} minutes of one processor, Python {platform.python_version()}. "
        f"`VoteTally` beside `SoftLabelDistillation` (mechanism `statistic`) and "
        "`VoteDistillation` at a trusted hub, at the same (ε, δ) per site, δ = 1e-5, on the same "
        f"sites, votes and public records; {asked.divisions} divisions, {DRAWS} draws of noise on "
        "each. After ± stands the standard error over divisions, of differences that of paired "
        f"ones. Of N sites any 0.8·N shares of noise are enough for (ε, δ) where noise is shared, "
        "so that its standard deviation is 1.12 times that of noise once. Local models: λ = "
        f"{STRENGTH:g}. The distilled model's λ is chosen by the known noise. Noise is seeded, so "
        "that the table repeats.\n\n" + "\n".join(sections)
    )
    write_page(ROOT / "benchmarks" / "site_level.md", text)
    print(text)


if __name__ == "__main__":
    with threadpool_limits(limits=1):
        main()
