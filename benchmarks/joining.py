"""Measure what sites gain by handing over sums: own model, release and adapted model side by side.

    CONSILIENCE_DATA=FOLDER python benchmarks/joining.py [--divisions N] [CASE ...]

Each division cuts a table into sites, public records and test records. All methods see the same
divisions, so that differences are paired. Divisions are kept in a temporary folder, so that more
can be added; the page benchmarks/joining.md is written of all that are there. Noise is seeded, so
that the page repeats, and no number here has a guarantee.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from sklearn.metrics import roc_auc_score  # noqa: E402

import accuracy  # noqa: E402
import consilience as cs  # noqa: E402
import defaults  # noqa: E402
import forests  # noqa: E402
from consilience import Noise, PrivateLogisticRegression, Public, PublicBlend  # noqa: E402
from consilience.aggregators.average import Average  # noqa: E402
from consilience.aggregators.blend import fit_public  # noqa: E402
from consilience.simulation.once import TotalOnce  # noqa: E402
from consilience.statistics.gradient_step import GradientStep, start_from  # noqa: E402
from consilience.statistics.label_tables import LabelTables, columns_of  # noqa: E402
from consilience.statistics.moments import Moments  # noqa: E402
from consilience.statistics.total import Total  # noqa: E402
from pages import write_page  # noqa: E402

DATA = Path(os.environ.get("CONSILIENCE_DATA") or HERE.parent / "data")
KEPT = Path(tempfile.gettempdir()) / "consilience-joining"
DELTA = 1e-6
DIVISIONS = 20
N_TEST = 8_000
SCALE = 1  # sizes are divided by it: more than 1 only to try the script
ADAPTED = 4  # sites of a division that adapt a release: the smallest and the largest
EXACT = PrivateLogisticRegression(epsilon=math.inf, classes=[0, 1])
PUBLIC, OWN = "public records alone", "own exact model"
AT_SITES, SHARED = "noise at sites", "noise shared"
BLEND, AVERAGE = "PublicBlend", "Average by precision"
Array = np.ndarray


@dataclass(frozen=True)
class Table:
    """Encoded records, and where columns are cut for `LabelTables`."""

    X: Array
    y: Array
    columns: list
    order: Array | None = None  # what sites differ in


def _marks(table):
    """Return the schema's columns as `LabelTables` takes them, for rows in the unit ball."""
    columns = columns_of(table.schema)
    return [[[feature, cut / table.norm] for feature, cut in marks] for marks in columns]


@cache
def mnist():
    return Table(*accuracy.load_mnist(DATA), [])


@cache
def adult():
    problem = forests.adult(DATA)
    return Table(problem.encoded, np.asarray(problem.y), [])


@cache
def binned_adult():
    table, raw = defaults.adult(DATA), pq.read_table(DATA / "adult.parquet")
    order = raw["education_num"].to_numpy() / 16 + raw["age"].to_numpy() / 90
    return Table(table.X / table.norm, np.asarray(table.y), _marks(table), order)


@cache
def credit():
    problem = forests.credit(DATA)
    return Table(problem.encoded, np.asarray(problem.y), [])


@cache
def binned_credit():
    table = defaults.credit(DATA)
    return Table(table.X / table.norm, np.asarray(table.y), _marks(table))


@dataclass(frozen=True)
class Case:
    """A table, its sites, and what is asked, by place of the noise and epsilon."""

    title: str
    load: Callable
    sizes: tuple[int, ...]
    n_public: int
    metric: str
    shares: int
    epsilons: tuple[float, ...]
    asked: dict = field(default_factory=dict)
    asked_adapted: dict = field(default_factory=dict)

    def better(self, one, other):
        """Tell whether one number is at least as good as another, as they are shown."""
        return one <= other if self.metric == "error" else one >= other

    @property
    def sign(self):
        """1 where more is better."""
        return -1 if self.metric == "error" else 1


ALL = (0.1, 0.25, 0.5, 1.0)
CASES = {
    "mnist-public": Case(
        "MNIST 3 vs 7, ten sites of 789 records, 50 public",
        mnist,
        (789,) * 10,
        50,
        "error",
        8,
        ALL,
        {
            AT_SITES: dict(zip(ALL, (0.038, 0.036, 0.034, 0.032), strict=True)),
            SHARED: dict(zip(ALL, (0.037, 0.034, 0.031, 0.028), strict=True)),
        },
    ),
    "mnist": Case(
        "MNIST 3 vs 7, ten sites of 789 records, no public records",
        mnist,
        (789,) * 10,
        0,
        "error",
        8,
        ALL,
        {SHARED: dict(zip(ALL, (0.040, 0.035, 0.031, 0.027), strict=True))},
    ),
    "adult-public": Case(
        "Adult in public bins, ten sites of 800 records, 200 public",
        binned_adult,
        (800,) * 10,
        200,
        "AUC",
        8,
        (0.1, 0.5, 1.0),
        {
            AT_SITES: {0.1: 0.875, 0.5: 0.879, 1.0: 0.881},
            SHARED: {0.1: 0.877, 0.5: 0.884, 1.0: 0.887},
        },
    ),
    "credit-public": Case(
        "Credit-card default, six sites of 300 to 3,000 records, 200 public",
        credit,
        (300, 500, 800, 1_500, 2_000, 3_000),
        200,
        "AUC",
        4,
        (0.1, 0.5, 1.0),
        {
            AT_SITES: {0.1: 0.733, 0.5: 0.749, 1.0: 0.751},
            SHARED: {0.1: 0.737, 0.5: 0.753, 1.0: 0.757},
        },
    ),
    "adult-100": Case(
        "Adult in public bins, a hundred sites of 348 records, no public records",
        binned_adult,
        (348,) * 100,
        0,
        "AUC",
        80,
        ALL,
        {SHARED: {0.25: 0.875, 0.5: 0.885, 1.0: 0.892}},
        {SHARED: {0.1: 0.870, 0.25: 0.880, 0.5: 0.887, 1.0: 0.893}},
    ),
    "adult-plain-100": Case(
        "Adult without bins, a hundred sites of 348 records, no public records",
        adult,
        (348,) * 100,
        0,
        "AUC",
        80,
        ALL,
        {SHARED: {0.25: 0.875, 0.5: 0.885, 1.0: 0.892}},
        {SHARED: {0.1: 0.870, 0.25: 0.880, 0.5: 0.887, 1.0: 0.893}},
    ),
}


def divide(case, table, seed):
    """Return the rows of each site, of the public records and of the test records."""
    order = np.random.default_rng(seed).permutation(len(table.y))
    sizes = [max(n // SCALE, 40) for n in case.sizes]
    ends = np.cumsum([*sizes, max(case.n_public // SCALE, 40) if case.n_public else 0])
    *sites, public, rest = np.split(order, ends)
    return sites, public, rest[:N_TEST]


def measure(case, model, X, y):
    """Return the error, or the AUC, of a model on test records."""
    if case.metric == "error":
        return float(np.mean(model.predict(X) != y))
    scores = getattr(model, "decision_function", None)
    scores = model.predict_proba(X)[:, 1] if scores is None else np.asarray(scores(X))
    return float(roc_auc_score(y, scores if scores.ndim == 1 else scores[:, 1] - scores[:, 0]))


def statistics(table, public):
    """Return the statistics that are tried, by name."""
    known = {"epsilon": math.inf, "delta": DELTA, "classes": [0, 1]}
    found = {"Moments": Moments(**known)}
    if table.columns:
        found["LabelTables"] = LabelTables(**known, columns=table.columns)
    if public is not None:
        start = start_from(public, classes=[0, 1])
        found["GradientStep"] = GradientStep(**known, start=start)
    return found


def releases(case, table, rows, public, seed):
    """Yield (method, place of the noise, epsilon, release) of one division."""
    sites = [(table.X[each], table.y[each]) for each in rows]

    def train(kind, at):
        made = []
        for place, site in enumerate(sites):
            noise = Noise(seed=seed * 10_000 + place)
            made.append(at(kind, noise).fit(*site))
        return made

    def noisy(epsilon):
        return lambda kind, noise: remake(kind, epsilon=epsilon, noise=noise)

    for name, statistic in statistics(table, public).items():
        exact = train(statistic, lambda kind, noise: remake(kind))
        for epsilon in case.epsilons:
            members = train(statistic, noisy(epsilon))
            yield name, AT_SITES, epsilon, Total().combine(members, public)
            once = TotalOnce(epsilon=epsilon, shares=case.shares, noise=Noise(seed=seed))
            yield name, SHARED, epsilon, once.combine(exact, public)
    learner = PrivateLogisticRegression(epsilon=1.0, delta=DELTA, classes=[0, 1])
    for epsilon in case.epsilons:
        models = train(learner, noisy(epsilon))
        yield AVERAGE, AT_SITES, epsilon, Average().combine(models)
        if public is not None:
            blend = PublicBlend(random_state=0).combine(models, public)
            yield BLEND, AT_SITES, epsilon, blend


def remake(learner, **changes):
    """Return an untrained copy with other settings."""
    made = type(learner)(**{**learner.get_params(deep=False), **changes})
    return made


def run(case, seed):
    """Return [method, place, epsilon, what, number] of one division, all on the same records."""
    table = case.load()
    rows, shared, tested = divide(case, table, seed)
    X, y = table.X[tested], table.y[tested]
    public = Public(table.X[shared], table.y[shared]) if case.n_public else None
    found = []
    if public is not None:
        alone = measure(case, fit_public(EXACT, public), X, y)
        found.append([PUBLIC, "", None, "release", alone])
    by_size = np.argsort(case.sizes, kind="stable")
    half = ADAPTED // 2
    chosen = {int(at): "small" for at in by_size[:half]}
    chosen |= {int(at): "large" for at in by_size[-half:]}
    own = {}
    for method, place, epsilon, release in releases(case, table, rows, public, seed):
        found.append([method, place, epsilon, "release", measure(case, release, X, y)])
        for at, size in chosen.items():
            if method == AVERAGE:
                continue  # a site that would do best with its own model
            model = cs.adapt(release, (table.X[rows[at]], table.y[rows[at]]), compare=False)
            if at not in own:
                own[at] = measure(case, model.own_, X, y)
                found.append([OWN, "", None, f"own {size}", own[at]])
            found.append([method, place, epsilon, f"adapted {size}", measure(case, model, X, y)])
    return found


# --------------------------------------------------------------------------- sites that differ

UNLIKE = {
    "alike": "ten sites of 800 records of one population",
    "labels": "label shift: the share of positive labels rises from 5 % at the first site to 50 % "
    "at the last",
    "records": "covariate shift: sites are stretches of the table in the order of education and "
    "age",
    "coding": "another coding: the first site has its labels the wrong way round",
    "large": "the first site has 8,000 records, ten times as many as each other one",
}
UNLIKE_EPSILON, UNLIKE_FRESH, UNLIKE_SHARES = 1.0, 1_500, 8
MEASURED = (0, 1, 5, 9)


def divide_unlike(kind, table, seed):
    """Return own and fresh records of ten sites, and the rows of 200 public records."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(table.y))
    shared, order = order[:200], order[200:]
    sizes = [8_000 if kind == "large" and at == 0 else 800 for at in range(10)]
    if kind == "records":
        along = table.order / table.order.std() + 0.7 * random.normal(size=len(table.y))
        parts = [
            random.permutation(part)
            for part in np.array_split(order[np.argsort(along[order], kind="stable")], 10)
        ]
    elif kind == "labels":
        left, parts = {k: list(order[table.y[order] == k]) for k in (0, 1)}, []
        for share in np.linspace(0.05, 0.5, 10):
            n_positive = round(share * (800 + UNLIKE_FRESH // 3))
            rows = [left[1].pop() for _ in range(n_positive)]
            rows += [left[0].pop() for _ in range(800 + UNLIKE_FRESH // 3 - n_positive)]
            parts.append(random.permutation(rows))
    else:
        ends = np.cumsum(sizes)
        fresh = order[ends[-1] :][:UNLIKE_FRESH]
        parts = [np.concatenate([part, fresh]) for part in np.split(order, ends)[:-1]]
    sites = []
    for at, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        part, fresh = part[:size], part[size:][:UNLIKE_FRESH]
        y = 1 - table.y if kind == "coding" and at == 0 else table.y
        sites.append(((table.X[part], y[part]), (table.X[fresh], y[fresh])))
    return sites, shared


def run_unlike(kind, seed):
    """Return [method, place, site, own, release, adapted] of one division, each by AUC."""
    table = binned_adult()
    sites, shared = divide_unlike(kind, table, seed)
    public = Public(table.X[shared], table.y[shared])
    known = {"epsilon": math.inf, "delta": DELTA, "classes": [0, 1]}
    start = start_from(public, classes=[0, 1])
    found, case = [], CASES["adult-public"]

    def train(learner, epsilon):
        return [
            remake(learner, epsilon=epsilon, noise=Noise(seed=seed * 10_000 + at)).fit(*own)
            for at, (own, _) in enumerate(sites)
        ]

    def releases():
        for name, statistic, given in (
            ("Moments, no public records", Moments(**known), None),
            ("GradientStep, 200 public", GradientStep(**known, start=start), public),
        ):
            yield name, AT_SITES, Total().combine(train(statistic, UNLIKE_EPSILON), given)
            noise = Noise(seed=seed)
            once = TotalOnce(epsilon=UNLIKE_EPSILON, shares=UNLIKE_SHARES, noise=noise)
            yield name, SHARED, once.combine(train(statistic, math.inf), given)
        learner = PrivateLogisticRegression(epsilon=1.0, delta=DELTA, classes=[0, 1])
        models = train(learner, UNLIKE_EPSILON)
        yield AVERAGE, AT_SITES, Average().combine(models)

    for name, place, release in releases():
        for at in MEASURED:
            own, (X, y) = sites[at]
            model = cs.adapt(release, own, compare=False)
            numbers = [measure(case, one, X, y) for one in (model.own_, release, model)]
            found.append([name, place, at, *numbers])
    return found


def unlike_section(divisions):
    """Return the section about sites that differ, of the divisions of each kind."""
    lines = [
        "\nAdult in public bins, ten sites, ε = 1; own, release and adapted "
        "are AUC on fresh records of the site's own kind (of the first site, and the mean of three "
        f"others), and ± is the paired standard error of adapted less own. Shared noise: "
        f"{UNLIKE_SHARES} shares of 10.\n",
        "Adapting hardly ever costs a site anything, however unlike it is: where the release is no "
        "use, as with labels the wrong way round, the adapted model is the own one. A release does "
        "not show by itself that it is no use, so that a site should adapt it and not just use it. "
        "One site of ten with another coding costs the others one or two thousandths of AUC. Sites "
        "with few positive labels gain most. A site with ten times the records of each other one "
        "gains nothing; the others gain by it.\n",
    ]
    heads = "release | noise | first site: own / release / adapted | adapted − own | "
    heads += "other sites: own / release / adapted | adapted − own"
    for kind, rows_of in divisions.items():
        lines += [f"**{UNLIKE[kind].capitalize()}** ({len(rows_of)} divisions).\n"]
        lines += [f"| {heads} |", "|---" * 6 + "|"]
        for name, place in dict.fromkeys((row[0], row[1]) for row in rows_of[0]):
            cells = []
            for first in (True, False):
                means = np.array(
                    [
                        np.mean(
                            [
                                row[3:]
                                for row in rows
                                if (row[0], row[1]) == (name, place) and (row[2] == 0) == first
                            ],
                            axis=0,
                        )
                        for rows in rows_of
                    ]
                )
                gap = means[:, 2] - means[:, 0]
                cells.append(" / ".join(f"{value:.3f}" for value in means.mean(axis=0)))
                cells.append(f"{gap.mean():+.4f} ± {error_of(gap):.4f}")
            lines.append(f"| {name} | {place} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- the page


def mean_of(values):
    return float(np.mean(values))


def error_of(values):
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


class Found:
    """The numbers of one case, one for each division."""

    def __init__(self, case, divisions):
        self.case = case
        self.by = defaultdict(list)
        for rows in divisions:
            cell = defaultdict(list)
            for method, place, epsilon, what, value in rows:
                cell[method, place, epsilon, what].append(value)
                if " " in what:
                    cell[method, place, epsilon, what.split()[0]].append(value)
            for key, values in cell.items():
                self.by[key].append(float(np.mean(values)))

    def get(self, method, place, epsilon, what):
        values = self.by.get((method, place, epsilon, what))
        values = self.by.get((method, "", None, what)) if values is None else values
        return None if values is None else np.array(values)

    def methods(self, place):
        seen = dict.fromkeys(m for m, p, _, what in self.by if p == place and what == "release")
        return list(seen)

    def best(self, place, epsilon, what="release", among=None):
        names = among or [m for m in self.methods(place) if m not in (BLEND, AVERAGE)]
        return max(names, key=lambda m: self.case.sign * mean_of(self.get(m, place, epsilon, what)))


def cell(values):
    return "" if values is None else f"{mean_of(values):.4f} ± {error_of(values):.4f}"


def table_of(found):
    """Return the table of a case."""
    case = found.case
    lines = [
        f"| {case.metric} | " + " | ".join(f"ε = {e:g}" for e in case.epsilons) + " |",
        "|---" * (len(case.epsilons) + 1) + "|",
    ]

    def line(title, method, place, what):
        cells = [cell(found.get(method, place, e, what)) for e in case.epsilons]
        if any(cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")

    line("own exact model", OWN, "", "own")
    if len(set(case.sizes)) > 1:
        line("own exact model, small sites", OWN, "", "own small")
        line("own exact model, large sites", OWN, "", "own large")
    line("public records alone", PUBLIC, "", "release")
    for place in (AT_SITES, SHARED):
        for method in found.methods(place):
            line(f"{method}, {place}: release", method, place, "release")
        if place in case.asked:
            asked = case.asked[place]
            cells = " | ".join(f"{asked[e]:.3f}" if e in asked else "" for e in case.epsilons)
            lines.append(f"| *asked of a release, {place}* | {cells} |")
    for place in (AT_SITES, SHARED):
        for method in found.methods(place):
            line(f"{method}, {place}: adapted", method, place, "adapted")
            if len(set(case.sizes)) > 1:
                line("— small sites", method, place, "adapted small")
                line("— large sites", method, place, "adapted large")
        if place in case.asked_adapted:
            asked = case.asked_adapted[place]
            cells = " | ".join(f"{asked[e]:.3f}" if e in asked else "" for e in case.epsilons)
            lines.append(f"| *asked of an adapted model, {place}* | {cells} |")
    return "\n".join(lines)


def verdicts(found, method_of):
    """Yield (place, what, epsilon, method, reached, asked, enough) for everything asked."""
    case = found.case
    for asked_of, what in ((case.asked, "release"), (case.asked_adapted, "adapted")):
        for place, asked in asked_of.items():
            for epsilon, least in asked.items():
                method = method_of(found, place)
                values = found.get(method, place, epsilon, what)
                shown = round(mean_of(values), 3)
                yield place, what, epsilon, method, values, least, case.better(shown, least)


def usual_method(found, place):
    """Return the statistic that is judged: one for each case, by what a study would default to."""
    methods = found.methods(place)
    return "GradientStep" if "GradientStep" in methods else "Moments"


def gain_of(gap):
    """Return a paired difference with its standard error, and whether it is clear."""
    clear = error_of(gap) <= abs(mean_of(gap)) / 4 or not gap.any()
    return f"{mean_of(gap):+.4f} ± {error_of(gap):.4f}{'' if clear else ' (not clear)'}"


def words_of(found):
    """Return what holds and what does not, in words."""
    case, lines = found.case, []
    every = list(verdicts(found, usual_method))
    kept = sum(one[-1] for one in every)
    lines.append(f"{every[0][3]} reaches {kept} of {len(every)} numbers that were asked for.")
    for place, what, epsilon, _, values, least, holds in every:
        if not holds:
            lines.append(
                f"Missed: {what}, {place}, ε = {epsilon:g}: {mean_of(values):.4f} ± "
                f"{error_of(values):.4f}, asked {least:.3f}."
            )
    for other in (PUBLIC, BLEND, AVERAGE):
        for place in (AT_SITES, SHARED):
            gains = []
            for epsilon in case.epsilons:
                theirs = found.get(other, AT_SITES, epsilon, "release")
                if theirs is not None:
                    mine = found.get(usual_method(found, place), place, epsilon, "release")
                    gains.append(gain_of(case.sign * (mine - theirs)))
            if gains:
                lines.append(
                    f"What its release gains over {other}, paired, {place}, by ε: "
                    f"{', '.join(gains)}."
                )
    for place in (AT_SITES, SHARED):
        gains = []
        for epsilon in case.epsilons:
            method = usual_method(found, place)
            own, adapted = (
                found.get(OWN, "", None, "own"),
                found.get(method, place, epsilon, "adapted"),
            )
            gains.append(gain_of(case.sign * (adapted - own)))
        lines.append(
            f"What an adapted model gains over the own one, paired, {place}, by ε: "
            f"{', '.join(gains)}."
        )
    return " ".join(lines)


INTRODUCTION = f"""# What joining by sums brings

`CONSILIENCE_DATA=… python benchmarks/joining.py --divisions 24`: random divisions of each table, \
δ = {DELTA:g}, replace-one; mean and standard error over divisions. Each section says how many of \
them were measured.

A site asks whether what it gets is better than what it has. *Own* is its own exact model, a \
mixture of ridges by cross-validation. *Release* is what the hub publishes. *Adapted* is \
`cs.adapt` of the release and the site's exact records; the site's own part was not subtracted \
from the release before. Own and adapted models are the mean of four sites of a division, the \
two smallest and the two largest. All are measured on the same {N_TEST:,} test records. *Noise \
at sites*: every site draws all noise that it needs. *Noise shared*: every site draws a share, \
and the stated number of shares makes a whole (docs/guarantees/shared-noise.md); simulated by \
the law of the total. MNIST by 50 public principal axes, credit-card default by its schema. All \
methods of a table see the same encoding, own models too.

The judged statistic is `GradientStep` where there are labelled public records and `Moments` \
where there are none, chosen after the first division of each table. A difference is called not \
clear where its paired standard error is more than a quarter of it; one that is nearly zero stays \
so with any number of divisions. Noise is seeded, so that no number here has a guarantee.

On MNIST an adapted model gains nothing, and loses nothing: with 789 records along 50 axes the own \
exact model of a site has an error of 0.018, and no release, with its noise, comes near it (0.023 \
at best), so that held-out records give no site a reason to follow one. Of everything asked for, \
one number is missed: Adult without bins, adapted, ε = 1. The same table in public bins, which any \
study may declare, reaches it with every ε.

"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join([*CASES, *UNLIKE])}; all")
    parser.add_argument("--divisions", type=int, default=DIVISIONS)
    asked = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    for seed in range(asked.divisions):
        for name in asked.cases or [*CASES, *UNLIKE]:
            file = KEPT / f"{name}-{seed}.json"
            if not file.exists():
                found = run(CASES[name], seed) if name in CASES else run_unlike(name, seed)
                file.write_text(json.dumps(found))
    parts = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", earlier(), re.MULTILINE))
    for name, case in CASES.items():
        if divisions := read_kept(name):
            found = Found(case, divisions)
            parts[case.title] = (
                f"\n{len(divisions)} divisions, {case.shares} shares of {len(case.sizes)}.\n\n"
                f"{table_of(found)}\n\n{words_of(found)}\n\n"
            )
    if unlike := {kind: rows for kind in UNLIKE if (rows := read_kept(kind))}:
        parts["Sites that differ"] = unlike_section(unlike)
    text = "".join(f"## {title}\n{part}" for title, part in parts.items())
    write_page(HERE / "joining.md", INTRODUCTION + text)
    print(HERE / "joining.md")


def earlier():
    """Return the page as it is: sections of which no division was measured now stay."""
    page = HERE / "joining.md"
    return page.read_text(encoding="utf-8") if page.exists() else ""


def read_kept(name):
    """Return all divisions of a case that were measured."""
    files = sorted(KEPT.glob(f"{name}-[0-9]*.json"))
    return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    main()
