"""The figures of Hamm et al. 2016 on distillation, with their printed noise and with ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import clone

import consilience as cs
from consilience.aggregators.distillation.tally import count_votes
from consilience.tables.public import Public
from experiments.comparators import PATE, ClippedAverage
from experiments.datasets import Dataset
from experiments.design import Arguments, Figure, Method, Panel, Paper

Array = NDArray[Any]

STRENGTH = 1e-4  # the paper's λ, of local and global classifiers
DELTA = 1e-5
TEST_SHARE = 0.145  # of the URLs, whose publisher set none apart
INVERSE = (0, 0.1, 1, 10, 100)  # 1/ε; 0 is no noise
DRAWS = {
    "har": 5,
    "kdd99": 2,
    "malicious_url": 5,
}  # of noise on each division; × divisions of a full run = 100
FULL = {name: 100 // draws for name, draws in DRAWS.items()}
HAR, KDD, URL = "har", "kdd99", "malicious_url"


# ---------------------------------------------------------------------------- records into the ball


def principal_axes(seen: Any) -> Callable[[Any], Array]:
    """Return the map to the 50 principal axes of `seen`; nine in ten rows fit the unit ball."""
    n, d = seen.shape
    mean = np.asarray(seen.mean(axis=0)).ravel()
    moment = seen.T @ seen
    moment = (moment.toarray() if sparse.issparse(moment) else np.asarray(moment)) / n - np.outer(
        mean, mean
    )
    axes = np.linalg.eigh(moment)[1][:, -min(50, d) :]
    usual = _usual_length(seen @ axes - mean @ axes)
    return lambda X: _cut((X @ axes - mean @ axes) / usual)


def logarithms(seen: Any) -> Callable[[Any], Any]:
    """Return the map to logarithms of counts, scaled by `seen` and fitted to the unit ball."""
    largest = np.log1p(seen.max(axis=0).toarray().ravel())
    scale = np.where(largest > 0, largest, 1.0)

    def scaled(X: Any) -> Any:
        X = X.copy()
        X.data = np.log1p(X.data) / scale[X.indices]
        return X

    usual = _usual_length(scaled(seen))
    return lambda X: _cut(scaled(X) / usual)


def _lengths(X: Any) -> Array:
    squares = X.multiply(X).sum(axis=1) if sparse.issparse(X) else np.einsum("ij,ij->i", X, X)
    return np.sqrt(np.asarray(squares).ravel())


def _usual_length(X: Any) -> float:
    return float(np.quantile(_lengths(X), 0.9))


def _cut(X: Any) -> Any:
    shares = 1 / np.maximum(1.0, _lengths(X) * (1 + 1e-12))
    return (
        sparse.csr_array(sparse.diags_array(shares) @ X)
        if sparse.issparse(X)
        else X * shares[:, None]
    )


# --------------------------------------------------------------------------------- simulate() calls


@dataclass(frozen=True)
class Task:
    """How one data set is divided: records per party, auxiliary records, preprocessing."""

    records: int
    auxiliary: int
    prepare: Callable[[Any], Callable[[Any], Any]]


TASKS = {HAR: Task(6, 1000, principal_axes), KDD: Task(22, 43_000, logarithms),
         URL: Task(6, 12_400, principal_axes)}  # fmt: skip


@dataclass(frozen=True)
class Divided:
    """The parties' records, the auxiliary ones in random order, and how to test."""

    X: Any
    y: Array
    shared: Any
    labels: Array
    test: float | tuple[Any, Array]


_HELD: dict[tuple[str, int], Divided] = {}


def divided(data: Dataset) -> Divided:
    """Set auxiliary records apart, the same ones in every repeat.

    simulate() cannot cut a `Public` without labels.
    """
    key = (data.name, len(data.y))
    if key not in _HELD:
        _HELD.clear()  # one data set at a time
        kept: Callable[[Any], Any] = (
            sparse.csr_array if data.name == KDD else lambda X: X
        )  # nine in ten values are 0
        X, task = kept(data.X), TASKS[data.name]
        order = cs.Noise(seed=2016).open().permutation(len(data.y))
        shared, rest = np.split(order, [min(task.auxiliary, len(order) // 7)])
        rest = np.sort(rest)
        test = TEST_SHARE if data.test is None else (kept(data.test[0]), data.test[1])
        _HELD[key] = Divided(X[rest], data.y[rest], X[shared], data.y[shared], test)
    return _HELD[key]


def call(
    aggregator: Mapping[str, Any],
    *,
    parties: int,
    strength: float = STRENGTH,
    factor: float = 1.0,
    of: Callable[[float], float] = lambda x: math.inf if x == 0 else 1 / x,
    baselines: tuple[str, ...] = (),
    labelled: bool = False,
    by_auxiliary: bool = False,
) -> Arguments:
    """Return a run: ε is `factor` times `of(x)`, which is 1/x by default.

    `strength` is λ of the parties' classifiers. With `by_auxiliary`, x is the number of
    auxiliary records that are used.
    """

    def arguments(x: Any, data: Dataset) -> dict[str, Any]:
        own = divided(data)
        n = min(own.shared.shape[0], int(x) if by_auxiliary else 10**9)
        local = cs.PrivateLogisticRegression(
            epsilon=math.inf, regularization=strength, fit_intercept=False
        )
        return {
            "X": own.X,
            "y": own.y,
            "test": own.test,
            "learner": {"paper": local},
            "aggregator": dict(aggregator),
            "sizes": [TASKS[data.name].records] * parties,
            "public": Public(own.shared[:n], own.labels[:n] if labelled else None),
            "prepare": TASKS[data.name].prepare,
            "epsilon": factor * of(x),
            "draws": 1 if labelled else DRAWS[data.name],
            "baselines": baselines,
        }

    return arguments


def soft(**settings: Any) -> cs.SoftLabelDistillation:
    """Return algorithm 2, by default with the paper's noise; each call's levels set ε."""
    usual = {"mechanism": "output", "calibration": "hamm2016", "fit_intercept": False}
    return cs.SoftLabelDistillation(epsilon=1.0, **(usual | settings))


def vote(**settings: Any) -> cs.VoteDistillation:
    """Return algorithm 1 with the paper's noise."""
    return cs.VoteDistillation(epsilon=1.0, calibration="hamm2016", fit_intercept=False, **settings)


def statistic(delta: float = 0.0) -> cs.SoftLabelDistillation:
    """Return the mechanism we recommend: noise on the one statistic that holds the votes."""
    own = {
        "mechanism": "statistic",
        "calibration": "tight",
        "regularization": "auto",
        "delta": delta,
    }
    return soft(**own)


def average() -> cs.Average:
    """Return Pathak's average of exact classifiers, whose noise hides one record."""
    return cs.Average("equal", epsilon=1.0)


PAPERS = {"vote": vote(), "soft": soft(), "avg": average()}
OURS = {"tight": soft(calibration="tight"), "statistic": statistic(), "gaussian": statistic(DELTA)}


def main(parties: int, references: tuple[str, ...] = ("local-exact",)) -> Mapping[str, Arguments]:
    """Return the runs of a panel of figures 2 to 4."""
    return {
        "main": call(PAPERS | OURS, parties=parties, baselines=("pooled-exact",)),
        # One party is like another, so that 200 tell what the mean of all is; and the paper's
        # auxiliary records have no labels, so that what labels would be worth is no part of the
        # other run.
        "reference": call(
            {"avg": average()},
            parties=200,
            of=lambda x: math.inf,
            baselines=references,
            labelled=True,
        ),
    }


INDIV = Method("indiv", "local-exact", "paper", run="reference")
LABELS = Method("auxiliary records alone, labelled", "public-only", "baseline", run="reference")
MAIN = (
    Method("batch", "pooled-exact", "paper"),
    Method("soft", "soft", "paper"),
    Method("avg", "avg", "paper"),
    Method("vote", "vote", "paper"),
    INDIV,
    Method("soft, tight noise", "tight", "corrected"),
    Method("statistic, pure ε", "statistic", "corrected"),
    Method("statistic, δ = 1e-5", "gaussian", "corrected"),
)


def panel(identity: str, data: str, parties: int, quick: int, *, first: bool = False) -> Panel:
    """Return one panel of figures 2 to 4; the `first` also shows labelled auxiliary records."""
    return Panel(
        id=identity,
        title=f"M = {parties:,}",
        data=data,
        x=INVERSE,
        xlabel="privacy 1/ε",
        arguments=main(parties, ("local-exact", "public-only") if first else ("local-exact",)),
        methods=(*MAIN, LABELS) if first else MAIN,
        quick=quick,
        full=FULL[data],
        metric="f1_micro",  # with one label a record this is the accuracy
        better="high",
        ylabel="accuracy",
        xscale="symlog",
    )


FEW = (0, 1, 10)  # points of the quick run where the middle of three panels is concerned
FIGURE_2 = panel("2", HAR, 1000, quick=4, first=True)
FIGURE_3 = (
    panel("3a", KDD, 5000, quick=3, first=True),
    replace(panel("3b", KDD, 10_000, quick=3), quick_x=FEW),
    panel("3c", KDD, 20_000, quick=3),
)
FIGURE_4 = (
    panel("4a", URL, 5000, quick=3, first=True),
    replace(panel("4b", URL, 10_000, quick=3), quick_x=FEW),
    panel("4c", URL, 20_000, quick=3),
)

# -------------------------------------------------------------------- how long the printed noise is

NOISE, PRINTED = "noise of soft labels, measured", "the same, by the paper's formula"
OWN, LONGEST = "the classifier without noise, measured", "the longest classifier there can be"


def lengths(xs: Sequence[Any], data: Dataset, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Return the lengths of the noiseless soft-label classifier and of the printed noise."""
    own, found = divided(data), []
    place = principal_axes(own.shared)
    X, auxiliary, classes = place(own.X), Public(place(own.shared)), np.unique(own.y)
    parties = min(1000, len(own.y) // 6)
    for repeat in range(repeats):
        order = cs.Noise(seed=seed).open(stream=repeat).permutation(len(own.y))[: 6 * parties]
        local = cs.PrivateLogisticRegression(
            epsilon=math.inf, regularization=STRENGTH, fit_intercept=False, classes=classes
        )
        votes = count_votes(
            [clone(local).fit(X[one], own.y[one]) for one in order.reshape(-1, 6)], auxiliary
        )
        usual: dict[str, Any] = {
            "mechanism": "output",
            "calibration": "hamm2016",
            "fit_intercept": False,
        }
        exact = cs.SoftLabelDistillation(epsilon=math.inf, **usual).combine(votes).coef
        for x in xs:
            noise = cs.Noise(seed=seed + repeat)
            noisy = (
                cs.SoftLabelDistillation(epsilon=1 / x, noise=noise, **usual).combine(votes).coef
            )
            values = {
                NOISE: float(np.linalg.norm(noisy - exact)),
                PRINTED: 2 * exact.size / (parties * STRENGTH) * x,
                OWN: float(np.linalg.norm(exact)),
                LONGEST: math.sqrt(2 * math.log(len(classes)) / STRENGTH),
            }
            found += [
                {"x": x, "label": label, "repeat": repeat, "value": v}
                for label, v in values.items()
            ]
    return found


LENGTHS = Panel(
    id="lengths",
    title="HAR, M = 1,000",
    data=HAR,
    x=(0.001, 0.01, 0.1, 1, 10, 100),
    quick_x=(0.01, 0.1, 1),
    xlabel="privacy 1/ε",
    arguments={},
    methods=(
        Method(NOISE, "noise", "paper"),
        Method(PRINTED, "formula", "baseline"),
        Method(OWN, "exact", "baseline"),
        Method(LONGEST, "bound", "baseline"),
    ),
    quick=2,
    full=5,
    metric="length",
    ylabel="length",
    xscale="log",
    yscale="log",
    computed=lengths,
)

# ------------------------------------------------- what else the printed constants could have meant

LENGTH = 9.0  # of a HAR record on its 50 axes: nine in ten are shorter
CLASSES = 6


def variant(factor: float, strength: float = STRENGTH, local: float = STRENGTH) -> Arguments:
    """Return soft labels with `factor` times less noise than the library's at λ = `strength`."""
    return call(
        {"soft": soft(regularization=strength)}, parties=1000, strength=local, factor=factor
    )


# The library draws what its proof needs; the paper's constant in other coordinates is that at
# another ε.
VARIANTS = {
    "printed": variant(1.0),
    # Rows of length up to R: λ‖w‖² is λ/R² in the ball, which asks for R² times the noise; printed
    # there is R times.
    "long": variant(LENGTH, STRENGTH / LENGTH**2, STRENGTH / LENGTH**2),
    # One vector of d dimensions for each class is √K shorter in all than one of K·d.
    "class": variant(math.sqrt(CLASSES)),
    # λ beside the sum over records: λ/N beside the mean, which asks for N times the printed noise.
    "sum": variant(1000.0, STRENGTH / 1000, STRENGTH / 6),
    "hundred": variant(100.0),
    "thousand": variant(1000.0),
    "reference": main(1000)["reference"],
}
FIGURE_VARIANTS = replace(
    FIGURE_2,
    id="variants",
    title="HAR: soft labels, other readings of the constants",
    arguments=VARIANTS,
    methods=(
        Method("soft, as printed", "soft", "paper", run="printed"),
        INDIV,
        Method("rows not normalised (length 9)", "soft", "paper", run="long"),
        Method("noise for each class, d = 50", "soft", "paper", run="class"),
        Method("λ beside the sum", "soft", "paper", run="sum"),
        Method("noise divided by 100", "soft", "baseline", run="hundred"),
        Method("noise divided by 1,000", "soft", "baseline", run="thousand"),
    ),
    quick=3,
    note="All lines but the first two have LESS noise than their ε needs: "
    "readings of the paper, not methods.",
)

# ---------------------------------------------------------- whom the average hides, and comparators


def clipped(norm: float) -> ClippedAverage:
    """Return the average that hides a whole party."""
    return ClippedAverage(epsilon=1.0, clip_norm=norm)


COMPARED = {"avg": average()} | {f"clip {norm:g}": clipped(norm) for norm in (3.0, 30.0)}
COMPARED |= {
    "clip 10, δ": ClippedAverage(epsilon=1.0, clip_norm=10.0, delta=DELTA),
    "pate": PATE(epsilon=1.0, delta=DELTA, n_queries=100, regularization=1e-2, fit_intercept=False),
    "gaussian": statistic(DELTA),
}
LEVELS = replace(
    FIGURE_2,
    id="levels-har",
    title="HAR, M = 1,000",
    arguments={"main": call(COMPARED, parties=1000), "reference": main(1000)["reference"]},
    methods=(
        Method("avg, hides a record", "avg", "paper"),
        INDIV,
        Method("average, hides a party, cut at 3", "clip 3", "corrected"),
        Method("average, hides a party, cut at 30", "clip 30", "corrected"),
        Method("average, hides a party, cut at 10, δ = 1e-5", "clip 10, δ", "corrected"),
        Method("PATE, 100 queries, δ = 1e-5", "pate", "corrected"),
        Method("statistic, δ = 1e-5", "gaussian", "corrected"),
    ),
    quick=3,
)
LEVELS_URL = replace(
    LEVELS,
    id="levels-url",
    title="URL substitute, M = 20,000",
    data=URL,
    arguments={"main": call(COMPARED, parties=20_000), "reference": main(1000)["reference"]},
    full=FULL[URL],
)

# -------------------------------------------------------------------- numbers of parties, and rates

TWO = (5000, 20_000)
PARTIES = replace(
    FIGURE_3[0],
    id="parties",
    title="KDD, M = 5,000 and 20,000",
    x=(0.1, 1, 10, 100),
    quick_x=(0.1, 1),
    quick=3,
    arguments={f"{m}": call({"soft": soft(), "avg": average()}, parties=m) for m in TWO},
    methods=tuple(
        Method(f"{name}, M = {m:,}", name, "paper", run=f"{m}")
        for name in ("soft", "avg")
        for m in TWO
    ),
)


def rate(parties: int, aggregator: Mapping[str, Any], voters: int) -> Arguments:
    """Return a run whose x is ε times the number of those whose votes share one label."""
    return call(aggregator, parties=parties, of=lambda x: x / voters)


RATES = Panel(
    id="product",
    title="URL substitute",
    data=URL,
    x=(3e3, 1e4, 3e4, 1e5, 3e5, 1e6),
    quick_x=(3e4, 3e5),
    xlabel="ε M for soft, ε for vote",
    arguments={f"soft {m}": rate(m, {"soft": soft()}, m) for m in TWO}
    | {f"vote {m}": rate(m, {"vote": vote()}, 1) for m in TWO},
    methods=tuple(
        Method(f"{name}, M = {m:,}", name, "paper", run=f"{name} {m}")
        for name in ("soft", "vote")
        for m in TWO
    ),
    quick=3,
    full=FULL[URL],
    metric="f1_micro",
    better="high",
    ylabel="accuracy",
    xscale="log",
)
LOSS = replace(
    RATES,
    id="loss",
    arguments={name: run for name, run in RATES.runs().items() if name.startswith("soft")},
    methods=RATES.methods[:2],
    metric="log_loss",
    better="low",
    ylabel="log-loss on test records",
    yscale="log",
)
AUXILIARY_SIZES = (50, 100, 200, 500, 1000)


def by_auxiliary(epsilon: float) -> Arguments:
    """Return a run with the number of auxiliary records on the x axis."""
    return call(
        {"soft": soft(), "statistic": statistic(DELTA)},
        parties=1000,
        of=lambda x: epsilon,
        by_auxiliary=True,
    )


SIZES = replace(
    FIGURE_2,
    id="sizes",
    title="HAR, M = 1,000",
    x=AUXILIARY_SIZES,
    quick_x=(50, 200, 1000),
    xlabel="auxiliary records N",
    xscale="log",
    arguments={"exact": by_auxiliary(math.inf), "private": by_auxiliary(1.0)},
    methods=(
        Method("soft, no noise", "soft", "paper", run="exact"),
        Method("soft, ε = 1", "soft", "paper", run="private"),
        Method("statistic, ε = 1, δ = 1e-5", "statistic", "corrected", run="private"),
    ),
    quick=3,
)

# --------------------------------------------------------------------- privacy of auxiliary records

N_AUXILIARY, N_PARTIES = 1000, 1000
EXTENDED = (N_AUXILIARY + N_PARTIES - 1) / N_AUXILIARY  # 1.999, the paper's factor
FIGURE_AUXILIARY = replace(
    FIGURE_2,
    id="auxiliary",
    title="HAR, M = N = 1,000",
    x=(0.001, 0.002, 0.004, 0.01, 0.02),
    quick_x=(0.001, 0.004, 0.02),
    xlabel="1/ε  (vote: at 1,000 times the ε)",
    xscale="log",
    arguments={
        "party": call({"soft": soft()}, parties=1000),
        "both": call({"soft": soft(protect_public=True)}, parties=1000),
        "paid": call({"soft": soft(protect_public=True)}, parties=1000, factor=EXTENDED),
        "vote": call(
            {"vote": vote(), "both": vote(protect_public=True)}, parties=1000, factor=1000.0
        ),
    },
    methods=(
        Method("soft", "soft", "paper", run="party"),
        Method("soft, auxiliary record hidden too", "soft", "paper", run="both"),
        Method("the same at 1.999 ε", "soft", "paper", run="paid"),
        Method("vote", "vote", "paper", run="vote"),
        Method("vote, auxiliary record hidden too", "both", "paper", run="vote"),
    ),
)

PAPER = Paper(
    name="hamm2016",
    title="Learning privately from multiparty data (votes and soft labels)",
    citation="J. Hamm, P. Cao, M. Belkin: Learning privately from multiparty data. ICML 2016.",
    figures=(
        Figure("2", "Accuracy against privacy on activity recognition, six classes", (FIGURE_2,)),
        Figure(
            "3",
            "Accuracy against privacy on network intrusion, by number of parties",
            FIGURE_3,
            columns=3,
        ),
        Figure(
            "4",
            "Accuracy against privacy on malicious URLs, by number of parties",
            FIGURE_4,
            columns=3,
        ),
        Figure(
            "parties", "Not drawn like this in the paper: more parties, side by side", (PARTIES,)
        ),
        Figure(
            "lengths",
            "Not in the paper: how long its noise is, beside the classifier it is added to",
            (LENGTHS,),
        ),
        Figure(
            "variants",
            "Not in the paper: can another reading of the constants give figure 2?",
            (FIGURE_VARIANTS,),
        ),
        Figure(
            "levels",
            "Not in the paper: an average that hides a record, one that hides a party, and PATE",
            (LEVELS, LEVELS_URL),
            columns=2,
        ),
        Figure(
            "rates",
            "Not in the paper: what the rates of section 4 say, measured",
            (RATES, LOSS),
            columns=2,
        ),
        Figure("sizes", "Not in the paper: how many auxiliary records it takes", (SIZES,)),
        Figure(
            "auxiliary",
            "Not in the paper: the price of hiding an auxiliary record too",
            (FIGURE_AUXILIARY,),
        ),
    ),
)
