"""The figures of Xie's thesis: chapter 3, section 5.2 from a table (`PLOTS`), the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import consilience as cs
from consilience.learners.erm import HuberHinge
from consilience.privacy.mechanisms import Noise
from consilience.privacy.vector_noise import main_share
from experiments.datasets import AXES, Dataset, axes
from experiments.design import Arguments, Figure, Method, Panel, Paper
from experiments.lines import SUMS, as_printed, methods_of_sums, sums
from experiments.xie2016thesis import theorems
from experiments.xie2016thesis.literal import (
    UnscaledFeature,
    draw_weights_noise,
    perturbed_weights,
    plan_weights,
)

Array = NDArray[Any]
MNIST, COVERTYPE = "mnist37", "covertype12"
# Columns as they are, which the thesis does not exclude: rows of length one, or divided by the
# longest.
ROWS, LONGEST = "covertype12_rows", "covertype12_longest"
NAMES = {
    MNIST: "MNIST",
    COVERTYPE: "Covertype",
    ROWS: "Covertype, raw columns, rows of length one",
    LONGEST: "Covertype, raw columns over the longest row",
}
N_SITES, HUBER = 10, 0.5
WHOLE = 8678  # records of the single site of chapter 3; 3,718 are tested on
# Test shares: chapter 3; eleven parts of 789 (8,678 records are one short); 70/30; the 95/5 that
# 5.17 and 5.23 need.
ONE_SITE, ELEVEN, SEVENTY, NINETY_FIVE = 3718 / 12396, 0.2998, 0.3, 24_759 / 495_141
# Our own Λ, chosen in hindsight from two: with noise, and without.
TUNED = dict.fromkeys((COVERTYPE, ROWS, LONGEST), (1e-5, 3e-4)) | {MNIST: (0.1, 0.4)}
TUNED_EXACT = dict.fromkeys((COVERTYPE, ROWS, LONGEST), (1e-5, 1e-4)) | {MNIST: (1e-4, 1e-3)}
POOLED = dict.fromkeys((COVERTYPE, ROWS, LONGEST), 1e-5) | {MNIST: 1e-4}
DELTA = 1e-5  # the thesis names none

PREPARE: dict[str, dict[str, Any]] = {
    MNIST: {"prepare": axes, "prepare_on": "train"},
    COVERTYPE: {},
    ROWS: {},
    LONGEST: {},
}

AS_IN_THE_PAPER: dict[str, Any] = {"mechanism": "objective", "fit_intercept": False}


def svc(ridge: float, calibration: str = "tight", **more: Any) -> cs.PrivateLinearSVC:
    """Return the Huber-smoothed hinge of the thesis, without a constant."""
    given = {"epsilon": math.inf, "huber": HUBER, **AS_IN_THE_PAPER} | more
    return cs.PrivateLinearSVC(regularization=ridge, calibration=calibration, **given)


def logistic(ridge: float, calibration: str = "tight", **more: Any) -> cs.PrivateLogisticRegression:
    """Return logistic regression without a constant."""
    given = {"epsilon": math.inf, **AS_IN_THE_PAPER} | more
    return cs.PrivateLogisticRegression(regularization=ridge, calibration=calibration, **given)


# ------------------------------------------------------------------------- chapter 3: a single site

EPSILONS = tuple(round(0.025 * k, 3) for k in range(1, 16))
QUICK_EPSILONS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.375)
EXACT, PRIVATE = "exact", "private"
DRAWS = (
    4  # of noise on each division: one site is trained in milliseconds, and one draw says little
)
Learners = Callable[[Any], Mapping[str, Any]]


def alone(
    learners: Learners, epsilon: Any = None, m: Callable[[Any], int] = lambda x: WHOLE
) -> Arguments:
    """Return the arguments of one site that trains alone; ε is x unless `epsilon` is given."""

    def arguments(x: Any, data: Dataset) -> dict[str, Any]:
        given = {
            "learner": learners(x),
            "aggregator": {"alone": cs.Average("equal")},
            "baselines": (),
        }
        sizes = {"sizes": [m(x)], "test": ONE_SITE, "epsilon": x if epsilon is None else epsilon}
        return PREPARE[data.name] | given | sizes | {"draws": 1 if epsilon == math.inf else DRAWS}

    return arguments


def printed(arguments: Arguments) -> Arguments:
    """Return the arguments with exactly the noise that the thesis prints."""
    return lambda x, data: as_printed(arguments(x, data))


def both(
    make: Callable[..., Any],
    ridge: Callable[[Any], float] = lambda x: 1e-2,
    epsilon: Any = None,
    m: Callable[[Any], int] = lambda x: WHOLE,
) -> dict[str, Arguments]:
    """Return objective and output perturbation: a run as printed, one with tight calibrations."""

    def literal(x: Any) -> dict[str, Any]:
        return {
            "objective": make(ridge(x), "chaudhuri2011"),
            "output": make(ridge(x), "chaudhuri2011", mechanism="output"),
        }

    def tight(x: Any) -> dict[str, Any]:
        return {
            "objective, tight": make(ridge(x)),
            "output, tight": make(ridge(x), mechanism="output"),
        }

    return {"noise": printed(alone(literal, epsilon, m)), "tight": alone(tight, epsilon, m)}


def by_epsilon(make: Callable[..., Any]) -> dict[str, Arguments]:
    """Return the runs of 3.1 and 3.2."""
    return {
        **both(make),
        "tuned": alone(lambda x: {f"{one:g}": make(one) for one in (0.03, 0.1)}),
        "exact": alone(lambda x: {"exact": make(1e-2), "small": make(1e-4)}, epsilon=math.inf),
    }


def line(
    label: str, role: Any, learner: Any = None, run: str = "noise", level: str | None = None
) -> Method:
    """Return a line of chapter 3: what the only site learned."""
    return Method(label, "alone", role, learner or label, run, level)


SINGLE = (
    line("non-private", "paper", "exact", "exact"),
    line("objective", "paper"),
    line("output", "paper"),
    line("objective, tight", "corrected", run="tight"),
    line("output, tight", "corrected", run="tight"),
    line("objective, tight, Λ tuned in hindsight", "corrected", ("0.03", "0.1"), "tuned"),
    line("non-private, Λ = 1e-4", "baseline", "small", "exact"),
)

PANEL_31 = Panel(
    id="3.1",
    title="MNIST, logistic loss, m = 8678, Λ = 0.01",
    data=MNIST,
    x=EPSILONS,
    quick_x=QUICK_EPSILONS,
    xlabel="ε",
    arguments=by_epsilon(logistic),
    methods=SINGLE,
    quick=5,
    full=20,
)
PANEL_32 = replace(
    PANEL_31,
    id="3.2",
    title="MNIST, Huber loss, h = 0.5, m = 8678, Λ = 0.01",
    arguments=by_epsilon(svc),
)


def draw_huber(place: Any) -> None:
    """Draw the loss for several h."""
    z = np.linspace(-0.5, 2.5, 301)
    for h in (0.05, 0.25, 0.5, 1.0):
        place.plot(z, HuberHinge(h).value(z, np.ones_like(z)), label=f"h = {h:g}")
    place.set_xlabel("y f·x", fontsize=8.5)
    place.set_ylabel("loss", fontsize=8.5)


PANEL_33 = Panel(
    id="3.3",
    title="Huber loss",
    data=MNIST,
    x=(),
    xlabel="",
    arguments={},
    methods=(),
    kind="drawing",
    drawing=draw_huber,
)
LEVELS = {PRIVATE: 0.1, EXACT: math.inf}
PANEL_33_H = Panel(
    id="3.3-h",
    title="MNIST, Huber loss, ε = 0.1",
    data=MNIST,
    x=(0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
    xlabel="h",
    arguments={
        "noise": printed(
            alone(lambda h: {"objective": svc(1e-2, "chaudhuri2011", huber=h)}, LEVELS)
        ),
        "tight": alone(lambda h: {"objective, tight": svc(1e-2, huber=h)}, LEVELS),
    },
    methods=(
        line("objective", "paper", level=PRIVATE),
        line("non-private", "paper", "objective", level=EXACT),
        line("objective, tight", "corrected", run="tight", level=PRIVATE),
    ),
    quick=5,
    full=20,
    note="The thesis plots the loss only; this panel checks what it says about smoother losses.",
)
PANEL_34 = Panel(
    id="3.4",
    title="MNIST, logistic loss, ε = 0.1, Λ = 0.01",
    data=MNIST,
    x=tuple(1735 * k for k in range(1, 6)),
    xlabel="records m",
    arguments={
        **both(logistic, epsilon=LEVELS, m=int),
        "tuned": alone(lambda m: {f"{one:g}": logistic(one) for one in (0.03, 0.1)}, LEVELS, int),
    },
    methods=(
        line("non-private", "paper", "objective", level=EXACT),
        line("objective", "paper", level=PRIVATE),
        line("output", "paper", level=PRIVATE),
        line("objective, tight", "corrected", run="tight", level=PRIVATE),
        line("output, tight", "corrected", run="tight", level=PRIVATE),
        line(
            "objective, tight, Λ tuned in hindsight", "corrected", ("0.03", "0.1"), "tuned", PRIVATE
        ),
    ),
    quick=5,
    full=20,
)
PANEL_35 = Panel(
    id="3.5",
    title="MNIST, logistic loss, ε = 0.1, m = 8678",
    data=MNIST,
    x=tuple(10.0**k for k in range(-13, 3)),
    quick_x=(1e-13, 1e-7, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 100.0),
    xlabel="Λ",
    arguments=both(logistic, float, LEVELS),
    methods=(
        line("objective", "paper", level=PRIVATE),
        line("output", "paper", level=PRIVATE),
        line("non-private", "paper", "objective", level=EXACT),
        line("objective, tight", "corrected", run="tight", level=PRIVATE),
        line("output, tight", "corrected", run="tight", level=PRIVATE),
    ),
    xscale="log",
    quick=4,
    full=20,
)

# Thesis, equation 3.8: a bound on the largest eigenvalue of a Hessian whose largest eigenvalue is
# 1/(2h).
BOUND_38 = math.sqrt(AXES**2 / (4 * HUBER**2) + AXES * (1 + 1 / HUBER))


def kifer(bound: float, delta: float, **more: Any) -> Learners:
    """Return algorithm 3 with Δ = 2·bound/ε.

    The library's own Δ is 2·(1/(2h))/ε, so the rest is added to its ridge. For runs as printed,
    which leave all of ε to the noise.
    """

    def learners(epsilon: float) -> Mapping[str, Any]:
        ridge = 1e-2 + 2 * (bound - 1 / (2 * HUBER)) / (epsilon * WHOLE)
        return {"kifer": svc(ridge, mechanism="generalized", delta=delta, **more)}

    return learners


ADD_REMOVE = {"neighbours": "add-remove", "public_size": WHOLE}
PANEL_36 = Panel(
    id="3.6",
    title="MNIST, Huber loss, h = 0.5, m = 8678, Λ = 0.01",
    data=MNIST,
    x=EPSILONS,
    quick_x=(0.025, 0.1, 0.2, 0.375),
    xlabel="ε  (δ = 1e-5)",
    arguments={
        "pure": printed(alone(kifer(BOUND_38, 0.0, **ADD_REMOVE))),
        "gauss": printed(alone(kifer(BOUND_38, DELTA, **ADD_REMOVE))),
        "pure 1": printed(alone(kifer(1.0, 0.0, **ADD_REMOVE))),
        "gauss 1": printed(alone(kifer(1.0, DELTA, **ADD_REMOVE))),
        "pure replace": printed(alone(kifer(1.0, 0.0))),
        "gauss replace": printed(alone(kifer(1.0, DELTA))),
        "tight": alone(lambda x: {"kifer": svc(1e-2), "gauss": svc(1e-2, delta=DELTA)}),
        "2011": printed(alone(lambda x: {"kifer": svc(1e-2, "chaudhuri2011")})),
        "exact": alone(lambda x: {"kifer": svc(1e-2)}, epsilon=math.inf),
    },
    methods=(
        line("pure ε, λ = 51.5", "paper", "kifer", "pure"),
        line("(ε, δ), λ = 51.5", "paper", "kifer", "gauss"),
        line("algorithm 2", "paper", "kifer", "2011"),
        line("pure ε, λ = 1", "corrected", "kifer", "pure 1"),
        line("(ε, δ), λ = 1", "corrected", "kifer", "gauss 1"),
        line("pure ε, λ = 1, noise for replacement", "corrected", "kifer", "pure replace"),
        line("(ε, δ), λ = 1, noise for replacement", "corrected", "kifer", "gauss replace"),
        line("tight, (ε, δ)", "corrected", "gauss", "tight"),
        line("tight, pure ε", "baseline", "kifer", "tight"),
        line("non-private", "baseline", "kifer", "exact"),
    ),
    quick=5,
    full=20,
    note="δ is not stated in the thesis; 1e-5 here.",
)

# ------------------------------------------------------------------ section 5.2: one table of plots


@dataclass(frozen=True)
class Plot:
    """One plot of section 5.2: what is on the x axis (ε, m, m₀ or N) and what the rest is."""

    id: str
    data: str
    vary: str
    x: Sequence[float]
    quick_x: Sequence[float]
    m: int
    m0: int
    ridge: float
    epsilon: float = 0.1
    test: float = ELEVEN
    full: int = 10
    part: bool = False  # of Covertype, as many records as m = 2,411 can come from
    fixed: bool = False  # one division for all repeats: only noise is drawn again

    @property
    def private(self) -> bool:
        """Whether sites add noise."""
        return self.vary == "epsilon" or math.isfinite(self.epsilon)

    @property
    def fully(self) -> bool:
        """Whether the aggregation records are private too, on a line of its own."""
        return self.private and not self.fixed

    @property
    def leveled(self) -> bool:
        """Whether ε is one level, or two, beside what is on the x axis."""
        return self.private and self.vary != "epsilon"

    def at(self, x: float, data: Dataset, **fixed: Any) -> dict[str, Any]:
        """Return simulate() arguments at one x: records, sites, public records, levels of ε."""
        here: dict[str, Any] = (
            {"m": self.m, "m0": self.m0, "N": N_SITES, "epsilon": self.epsilon}
            | {self.vary: x}
            | fixed
        )
        if self.fixed:
            return one_division(data, self.m) | {"baselines": (), "epsilon": here["epsilon"]}
        given = PREPARE[data.name] | {"test": self.test, "baselines": (), "public": int(here["m0"])}
        given["sizes"] = [int(here["m"])] * int(here["N"])
        given["epsilon"] = {PRIVATE: here["epsilon"]} if self.leveled else here["epsilon"]
        if self.part:
            every = max(1, len(data.y) // 38_000)
            given |= {"X": data.X[::every], "y": data.y[::every]}
        return given

    @property
    def tuned(self) -> dict[str, Any]:
        """The learners that hindsight chooses from."""
        return {f"{one:g}": svc(one) for one in (TUNED if self.private else TUNED_EXACT)[self.data]}

    def runs(self) -> dict[str, Arguments]:
        """Return the thesis' run and ours, on the same divisions."""
        literal = thesis_aggregators(self.ridge, full=self.fully)
        own: dict[str, Any] = {"average": cs.Average("equal"), "feature": cs.FeatureMethod()}
        own |= {"full": cs.FeatureMethod(epsilon=1.0)} if self.fully else {}
        first = next(iter(self.tuned.items()))
        plain = {
            "learner": {"exact": svc(POOLED[self.data])},
            "aggregator": {},
            "epsilon": math.inf,
        }
        one_site = {"m": 1, "N": 1}  # training on public records alone needs no sites
        given = {"learner": {"paper": svc(self.ridge, "chaudhuri2011")}, "aggregator": literal}
        given |= {"draws": DRAWS if self.fully and self.data == MNIST else 1}
        if self.leveled:
            given["epsilon"] = {PRIVATE: self.epsilon, EXACT: math.inf}
        return {
            "paper": lambda x, data: as_printed(self.at(x, data) | given),
            "tuned": lambda x, data: self.at(x, data) | {"learner": self.tuned, "aggregator": own},
            "blend": lambda x, data: (
                self.at(x, data)
                | {"learner": dict([first]), "aggregator": {"blend": cs.PublicBlend()}}
            ),
            "public": lambda x, data: (
                self.at(x, data, **one_site) | plain | {"baselines": ("public-only",)}
            ),
            "pooled": lambda x, data: (
                self.at(x, data, m0=self.m0) | plain | {"baselines": ("pooled-exact",)}
            ),
            SUMS: lambda x, data: sums(self.at(x, data), int(x) if self.vary == "N" else N_SITES),
        }

    def methods(self) -> tuple[Method, ...]:
        """Return what is drawn."""
        level, ridges, word = (
            PRIVATE if self.leveled else None,
            tuple(self.tuned),
            "Λ tuned in hindsight",
        )
        suffix = "Loc" if self.private else "None"
        paper = [Method(f"A-{suffix}", "average", "paper", "paper", "paper", level)]
        paper += [Method(f"F-{suffix}", "feature", "paper", "paper", "paper", level)]
        ours = [Method(f"average, {word}", "average", "corrected", ridges, "tuned", level)]
        ours += [Method(f"feature, {word}", "feature", "corrected", ridges, "tuned", level)]
        if self.fully:
            paper += [Method("F-Full", "full", "paper", "paper", "paper", level)]
            ours += [Method(RESCALED, "rescaled", "corrected", "paper", "paper", level)]
            ours += [Method(f"fully private, {word}", "full", "corrected", ridges, "tuned", level)]
        if self.private:
            ours += methods_of_sums(level)
        ours += [Method("public blend (MAP)", "blend", "corrected", ridges[0], "blend", level)]
        rest = [Method("public records alone", "public-only", "baseline", "exact", "public")]
        rest += [Method("all pooled, no privacy", "pooled-exact", "baseline", "exact", "pooled")]
        if self.leveled:
            rest += [Method("A, no noise", "average", "baseline", "paper", "paper", EXACT)]
            rest += [Method("F, no noise", "feature", "baseline", "paper", "paper", EXACT)]
        return (*paper, *ours, *rest)

    def panel(self) -> Panel:
        """Return the panel."""
        shown = {
            "epsilon": "ε",
            "m": "records per site m",
            "m0": "public records m₀",
            "N": "sites N",
        }[self.vary]
        fixed = {
            "m": f"m = {self.m}",
            "m0": f"m₀ = {self.m0}",
            "N": f"N = {N_SITES}",
            "epsilon": f"ε = {self.epsilon:g}",
        }
        kept = [
            text
            for name, text in fixed.items()
            if name != self.vary and (name != "epsilon" or self.leveled)
        ]
        runs, drawn = self.runs(), self.methods()
        return Panel(
            id=self.id,
            title=f"{NAMES[self.data]}, Λ = {self.ridge:g}"
            + ("" if self.private else ", no noise")
            + (", one division" if self.fixed else ""),
            data=self.data,
            x=tuple(self.x),
            quick_x=tuple(self.quick_x),
            xlabel=f"{shown}  ({', '.join(kept)})",
            arguments={name: runs[name] for name in {method.run: None for method in drawn}},
            methods=drawn,
            quick=4 if self.data == MNIST else 3,
            full=self.full,
            note=NOT_PRIVATE if self.fully else "",
        )


RESCALED = "F-Full, scores rescaled, tight noise"
NOT_PRIVATE = (
    "F-Full is what the thesis runs, and not private: nothing bounds the scores that its noise is "
    f"for (figure fully-private). “{RESCALED}” keeps the promise."
)


_DIVIDED: dict[tuple[str, int, int], dict[str, Any]] = {}


def one_division(data: Dataset, size: int) -> dict[str, Any]:
    """Return ten sites and public records of one size, and test records, the same at every x.

    Where the thesis draws noise again and not the division. Which division it had is unknown.
    """
    key = (data.name, len(data.y), size)
    if key not in _DIVIDED:
        order = Noise(seed=0).open().permutation(len(data.y))
        size = min(size, len(order) // (N_SITES + 2))
        trained, tested = np.split(order, [size * (N_SITES + 1)])
        turn = axes(data.X[np.sort(trained)]) if data.name == MNIST else lambda X: X
        local, public = np.split(trained, [size * N_SITES])
        _DIVIDED[key] = {
            "X": turn(data.X[local]),
            "y": data.y[local],
            "sites": np.repeat(np.arange(N_SITES), size),
            "public": cs.Public(turn(data.X[public]), data.y[public]),
            "test": (turn(data.X[tested]), data.y[tested]),
        }
    return _DIVIDED[key]


def thesis_aggregators(ridge: float, *, full: bool) -> dict[str, Any]:
    """Return equal weights, and weights by logistic regression on scores, exact or private.

    The private ones come twice: as the thesis has them, which is not private, and with scores
    divided by the operator norm of the stacked members, which is.
    """
    same: dict[str, Any] = {"regularization": ridge, "toward": "zero", "scaling": "none"}
    found: dict[str, Any] = {"average": cs.Average("equal"), "feature": cs.FeatureMethod(**same)}
    if full:
        found["full"] = UnscaledFeature(epsilon=1.0, **same)
        found["rescaled"] = cs.FeatureMethod(epsilon=1.0, **same)
    return found


def steps(last: int, first: int, of: int) -> tuple[int, ...]:
    """Return `last`·k/`of` for k from `first` on."""
    return tuple(round(last * k / of) for k in range(first, of + 1))


SITES = (2, 4, 6, 8, 10, 15, 20, 25, 30, 35, 40, 45, 50)
NONE = math.inf
PLOTS = (
    # id, data, on the x axis, its values, those of the quick run, m, m0, Λ, then what differs
    Plot("5.10", MNIST, "m", steps(789, 1, 20), (39, 158, 394, 789), 789, 789, 1e-2, NONE),
    Plot("5.11", COVERTYPE, "m", steps(2411, 9, 20), (1085, 1688, 2411), 2411, 2411, 1e-5,
         NONE, SEVENTY, part=True),
    Plot("5.12", MNIST, "m0", steps(789, 1, 10), (79, 237, 473, 789), 789, 789, 1e-2, NONE),
    Plot("5.13", COVERTYPE, "m0", steps(31509, 1, 10), (3151, 12604, 31509), 31509, 31509, 1e-6,
         NONE, SEVENTY),
    Plot("5.14", MNIST, "N", SITES, (2, 6, 15, 50), 170, 170, 1e-2, NONE, full=100),
    Plot("5.15", COVERTYPE, "N", SITES, (2, 6, 15, 50), 6796, 6796, 1e-6, NONE, SEVENTY),
    Plot("5.16", MNIST, "epsilon", EPSILONS[:10], (0.025, 0.1, 0.2, 0.225, 0.25), 789, 789, 1e-2,
         fixed=True),
    Plot("5.17", COVERTYPE, "epsilon", EPSILONS[:10], (0.025, 0.1, 0.25), 42762, 42762, 1e-7,
         fixed=True),
    Plot("5.23", COVERTYPE, "N", SITES, (2, 10, 50), 9223, 9223, 1e-7, test=NINETY_FIVE),
    Plot("5.24", MNIST, "epsilon", tuple(round(0.025 * k, 3) for k in range(1, 31)),
         (0.025, 0.05, 0.1, 0.15, 0.2, 0.225, 0.25, 0.275, 0.3, 0.4, 0.5, 0.75),
         789, 789, 1e-2),
    Plot("5.25", COVERTYPE, "epsilon", tuple(round(0.025 * k, 3) for k in range(1, 21)),
         (0.025, 0.1, 0.25, 0.5), 31509, 31509, 1e-7, test=SEVENTY),
    Plot("5.26", MNIST, "m", steps(789, 1, 20), (39, 158, 394, 789), 789, 789, 1e-2),
    Plot("5.27", COVERTYPE, "m", steps(31509, 2, 20), (3151, 9453, 31509), 31509, 31509, 1e-7,
         test=SEVENTY),
    Plot("5.28", MNIST, "m0", steps(789, 1, 10), (79, 237, 473, 789), 789, 789, 1e-2, full=50),
    Plot("5.29", COVERTYPE, "m0", steps(31509, 1, 10), (3151, 12604, 31509), 31509, 31509, 1e-7,
         test=SEVENTY),
    Plot("5.30", MNIST, "N", SITES, (2, 10, 25, 50), 170, 170, 1e-2, full=50),
)  # fmt: skip
PANELS = {one.id: one.panel() for one in PLOTS}


def only(panel: Panel, *names: str) -> Panel:
    """Return the panel with these runs alone, and the lines that are from them."""
    runs = {name: panel.runs()[name] for name in names}
    kept = tuple(one for one in panel.methods if one.run in runs)
    return replace(panel, arguments=runs, methods=kept)


# The thesis does not say what was done to Covertype's columns: the same plots with columns as they
# are.
RAW = {"rows": ROWS, "longest": LONGEST}
RAW_NOTE = (
    "“Public records alone” is a weak baseline here: no ridge of its grid is small enough for "
    "columns of such different sizes. 31,509 such records at Λ = 1e-9 have an error of 0.23 in one "
    "division, with rows of length one or over the longest row."
)
UNSCALED_COLUMNS = {
    f"{one.id}-{word}": replace(
        only(
            replace(one, id=f"{one.id}-{word}", data=data).panel(),
            "paper",
            *(() if one.private else ("public",)),
        ),
        note=NOT_PRIVATE if one.private else RAW_NOTE,
    )
    for one in PLOTS
    if one.id in ("5.11", "5.13", "5.15", "5.25")
    for word, data in RAW.items()
}


def in_columns(panel: Panel) -> tuple[Panel, ...]:
    """Return a panel on Covertype, and the same with its columns as they are."""
    return (panel, *(UNSCALED_COLUMNS[f"{panel.id}-{word}"] for word in RAW))


# --------------------------------------------------- sections 5.1 and 5.3, histograms, our controls


def mnist(
    learners: Mapping[str, Any], aggregators: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Return arguments on MNIST with ten sites of 789 records, 789 public ones, and `more`."""
    given = {"sizes": [789] * N_SITES, "public": 789, "test": ELEVEN, "baselines": ()}
    return (
        PREPARE[MNIST] | given | {"learner": dict(learners), "aggregator": dict(aggregators)} | more
    )


PAPER_LEARNER = {"paper": svc(1e-2, "chaudhuri2011")}
LITERAL = thesis_aggregators(1e-2, full=False)
OURS = {"precise": cs.Average(), "feature": cs.FeatureMethod(), "blend": cs.PublicBlend()}
OTHERS_EXACT, OTHERS_TWO = "others exact", "others at 2"


def one_noisy_site(levels: Mapping[str, float]) -> dict[str, Arguments]:
    """Return the runs of 5.2 and 5.3: the first site at ε' = x, the other nine at the level's."""

    def levels_at(x: float) -> dict[str, Any]:
        return {
            "epsilon": {name: [x] + [others] * (N_SITES - 1) for name, others in levels.items()}
        }

    return {
        "paper": lambda x, data: as_printed(mnist(PAPER_LEARNER, LITERAL, **levels_at(x))),
        "ours": lambda x, data: mnist({"tight": svc(1e-2)}, OURS, **levels_at(x)),
        "public": public_only(789),
    }


def one_large_site(levels: Mapping[str, float]) -> dict[str, Arguments]:
    """Return the runs of 5.4 and 5.5: one site has m' = x records, all others 413."""

    def sizes(x: float) -> dict[str, Any]:
        return {"sizes": [int(x)] + [413] * (N_SITES - 1), "public": 413, "epsilon": dict(levels)}

    return {
        "paper": lambda x, data: as_printed(mnist(PAPER_LEARNER, LITERAL, **sizes(x))),
        "ours": lambda x, data: mnist({"tight": svc(1e-2)}, OURS, **sizes(x)),
        "public": public_only(413),
    }


def public_only(m0: int) -> Arguments:
    """Return the run of public records alone."""
    asked = {"sizes": [1], "public": m0, "epsilon": math.inf, "baselines": ("public-only",)}
    return lambda x, data: mnist({"exact": svc(1e-3)}, {}, **asked)


def one_site_methods(level: str, suffix: str, other: str = "") -> tuple[Method, ...]:
    """Return what 5.2 to 5.5 draw; `other` is a second level, for comparison."""
    found = [
        Method(f"A-{suffix}", "average", "paper", "paper", "paper", level),
        Method(f"F-{suffix}", "feature", "paper", "paper", "paper", level),
        Method("average by precision", "precise", "corrected", "tight", "ours", level),
        Method("feature, ours", "feature", "corrected", "tight", "ours", level),
        Method("public blend (MAP)", "blend", "corrected", "tight", "ours", level),
        Method("public records alone", "public-only", "baseline", "exact", "public"),
    ]
    if other:
        found.append(
            Method("A, others without noise", "average", "baseline", "paper", "paper", other)
        )
        found.append(
            Method("F, others without noise", "feature", "baseline", "paper", "paper", other)
        )
    return tuple(found)


PANEL_52 = Panel(
    id="5.2",
    title="MNIST, nine sites without noise",
    data=MNIST,
    x=tuple(round(0.025 * k, 3) for k in range(1, 21)),
    quick_x=(0.025, 0.1, 0.25, 0.5),
    xlabel="ε' of the first site  (m = m₀ = 789)",
    arguments=one_noisy_site({OTHERS_EXACT: math.inf}),
    methods=one_site_methods(OTHERS_EXACT, "None"),
    quick=4,
)
PANEL_53 = replace(
    PANEL_52,
    id="5.3",
    title="MNIST, nine sites at ε = 2",
    arguments=one_noisy_site({OTHERS_TWO: 2.0, OTHERS_EXACT: math.inf}),
    methods=one_site_methods(OTHERS_TWO, "Loc", OTHERS_EXACT),
)
PANEL_54 = replace(
    PANEL_52,
    id="5.4",
    title="MNIST, no noise",
    x=tuple(413 * k for k in range(1, 12)),
    quick_x=(413, 1652, 4543),
    xlabel="records m' of the first site  (m = m₀ = 413)",
    arguments=one_large_site({OTHERS_EXACT: math.inf}),
    methods=one_site_methods(OTHERS_EXACT, "None"),
)
PANEL_55 = replace(
    PANEL_54,
    id="5.5",
    title="MNIST, all sites at ε = 2",
    arguments=one_large_site({OTHERS_TWO: 2.0, OTHERS_EXACT: math.inf}),
    methods=one_site_methods(OTHERS_TWO, "Loc", OTHERS_EXACT),
)


def histogram(panel: Panel, id_: str, repeats: tuple[int, int]) -> Panel:
    """Return a panel without noise at its last x alone, as a histogram of many runs."""
    quick, full = repeats
    return replace(
        only(panel, "paper", "public"), id=id_, x=panel.x[-1:], quick_x=panel.x[-1:],
        kind="histogram", quick=quick, full=full, xlabel="error rate", ylabel="runs",
    )  # fmt: skip


RIDGES = tuple(10.0**k for k in range(0, -9, -1))
_CHOSEN: dict[tuple[str, int], float] = {}


def cross_validated(data: Dataset, size: int) -> float:
    """Return the Λ whose exact local models have the least error in five folds of each site.

    The thesis says of its histograms that Λ was chosen so, and prints one Λ for all their runs.
    """
    key = (data.name, len(data.y))
    if key not in _CHOSEN:
        given = one_division(data, size)
        X, y, site = given["X"], given["y"], given["sites"]
        fold = np.arange(len(y)) % 5
        wrong = {}
        for ridge in RIDGES:
            errors = [
                np.mean(
                    svc(ridge).fit(X[mine & (fold != k)], y[mine & (fold != k)])
                    .predict(X[mine & (fold == k)]) != y[mine & (fold == k)]
                )
                for mine in (site == one for one in range(N_SITES))
                for k in range(5)
            ]  # fmt: skip
            wrong[ridge] = float(np.mean(errors))
        _CHOSEN[key] = min(wrong, key=wrong.__getitem__)  # of equal ones the largest
    return _CHOSEN[key]


def by_cross_validation(panel: Panel, size: int) -> Panel:
    """Return a histogram with the Λ of five folds in place of the one printed."""

    def paper(x: Any, data: Dataset) -> dict[str, Any]:
        ridge = cross_validated(data, size)
        found = {"learner": {"paper": svc(ridge)}}
        found["aggregator"] = thesis_aggregators(ridge, full=False)
        return panel.runs()["paper"](x, data) | found

    arguments = {**panel.runs(), "paper": paper}
    title = f"{NAMES[panel.data]}, Λ by cross-validation, no noise"
    return replace(panel, id=f"{panel.id}-cv", title=title, arguments=arguments)


PANEL_56 = histogram(PANELS["5.10"], "5.6", (16, 360))
PANEL_58 = histogram(PANELS["5.11"], "5.8", (10, 200))
PANEL_56_CV, PANEL_58_CV = by_cross_validation(PANEL_56, 789), by_cross_validation(PANEL_58, 2411)
UNSCALED_COLUMNS |= {
    f"5.8-{word}": histogram(UNSCALED_COLUMNS[f"5.11-{word}"], f"5.8-{word}", (10, 200))
    for word in RAW
}


LOCALS = tuple(Method(f"l{i}", f"site-{i:03}", "paper") for i in range(1, N_SITES + 1))
THREE = (
    Method("G", "pooled-private", "paper"),
    Method("F", "full", "paper"),
    Method("A", "average", "paper"),
)
MODELS = Panel(
    id="5.31",
    title="MNIST, three of the ten ε",
    data=MNIST,
    x=(0.1, 0.5, 1.0),  # ten bars in each of 13 groups cannot be read; the lines have all ten
    xlabel="",
    arguments=lambda x, data: as_printed(
        mnist(
            PAPER_LEARNER,
            thesis_aggregators(1e-2, full=True),
            epsilon=x,
            baselines=("local-mean", "pooled-private"),
        )
    ),
    methods=(*LOCALS, *THREE, Method(RESCALED, "rescaled", "corrected")),
    kind="bars",
    quick=5,
    full=10,
    note="Sizes, Λ and repeats are not stated; those of figure 5.16. F is the fully private "
    "feature method as the thesis runs it, which is not private.",
)
MODELS_BY_EPSILON = replace(
    MODELS,
    id="5.31-5.40",
    title="MNIST, all ten ε",
    x=tuple(round(0.1 * k, 1) for k in range(1, 11)),
    kind="lines",
    xlabel="ε",
    arguments={
        "main": MODELS.arguments,
        "tuned": lambda x, data: mnist(
            {"0.1": svc(0.1), "0.4": svc(0.4)},
            {"average": cs.Average("equal")},
            epsilon=x,
            baselines=("local-mean", "pooled-private"),
        ),
        "blend": lambda x, data: mnist({"0.1": svc(0.1)}, {"blend": cs.PublicBlend()}, epsilon=x),
        "public": public_only(789),
        SUMS: lambda x, data: sums(mnist({}, {}, epsilon=x), N_SITES),
    },
    methods=(
        Method("local model, mean", "local-mean", "paper"),
        *THREE,
        Method("F-Loc", "feature", "paper"),
        Method(RESCALED, "rescaled", "corrected"),
        *methods_of_sums(),
        Method(
            "local, tight, Λ tuned in hindsight", "local-mean", "corrected", ("0.1", "0.4"), "tuned"
        ),
        Method(
            "G, tight, Λ tuned in hindsight", "pooled-private", "corrected", ("0.1", "0.4"), "tuned"
        ),
        Method("A, tight, Λ tuned in hindsight", "average", "corrected", ("0.1", "0.4"), "tuned"),
        Method("public blend (MAP)", "blend", "corrected", "0.1", "blend"),
        Method("public records alone", "public-only", "baseline", "exact", "public"),
    ),
)
PANEL_541 = replace(
    MODELS,
    id="5.41",
    title="MNIST, no noise",
    x=(1,),
    arguments={
        "main": lambda x, data: mnist(
            PAPER_LEARNER,
            LITERAL,
            epsilon=math.inf,
            baselines=("local-mean", "local-exact", "pooled-exact", "public-only"),
        ),
        "blend": lambda x, data: mnist(
            {"1e-3": svc(1e-3)}, {"blend": cs.PublicBlend()}, epsilon=math.inf
        ),
    },
    methods=(
        *LOCALS,
        Method("G", "pooled-exact", "paper"),
        Method("F", "feature", "paper"),
        Method("A", "average", "paper"),
        Method("public blend (MAP)", "blend", "corrected", "1e-3", "blend"),
        Method("local mean", "local-mean", "baseline"),
        Method("public records alone", "public-only", "baseline"),
    ),
    quick=8,
    note="Sizes and Λ are not stated; those of figure 5.16. F is the feature method without noise.",
)

CONTROL = replace(
    Plot(
        "control",
        MNIST,
        "epsilon",
        (0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0),
        (0.025, 0.1, 0.5, 2.0),
        789,
        200,
        1e-2,
    ).panel(),
    xscale="log",
)

# ----------------------------------------------------------------------- scenario 2, and the solver

SCENARIOS = Panel(
    id="scenario-2",
    title="MNIST, noise at sites or aggregator",
    data=MNIST,
    x=(0.1, 1.0, 10.0, 100.0, 1000.0),
    xlabel="ε  (m = m₀ = 789, Λ = 0.01)",
    arguments={
        "sites": lambda x, data: as_printed(mnist(PAPER_LEARNER, LITERAL, epsilon=x, draws=DRAWS)),
        "aggregator": lambda x, data: as_printed(
            mnist(
                {"exact": svc(1e-2)},
                {"average": cs.Average("equal", epsilon=1.0)},
                epsilon=x,
                draws=DRAWS,
            )
        ),
        "enough": lambda x, data: mnist(
            {"exact": svc(1e-2)},
            {"feature": cs.FeatureMethod(epsilon=1.0, mechanism="output", regularization=1e-2)},
            epsilon=x,
            draws=DRAWS,
        ),
        "public": public_only(789),
    },
    methods=(
        Method("A, scenario 1", "average", "paper", "paper", "sites"),
        Method("F, scenario 1", "feature", "paper", "paper", "sites"),
        Method("A, scenario 2", "average", "paper", "exact", "aggregator"),
        Method("F, scenario 2 with enough noise", "feature", "corrected", "exact", "enough"),
        Method("public records alone", "public-only", "baseline", "exact", "public"),
    ),
    xscale="log",
    quick=5,
)
TRUE_SPAN, OTHER_SPAN = "the true records' models", "one record of one site replaced"


def eleven_parts(data: Dataset, repeat: int, seed: int) -> tuple[Array, list[Array], Array]:
    """Return the records on their axes, and which belong to each of ten sites and the hub."""
    order = Noise(seed=seed).open(stream=repeat).permutation(len(data.y))
    size = min(789, len(order) // (N_SITES + 1))
    *parts, public = np.split(order[: size * (N_SITES + 1)], N_SITES + 1)
    return axes(data.X[np.sort(order)])(data.X), parts, public


def span_attack(xs: Sequence[Any], data: Dataset, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Release f of scenario 2 as in the thesis; measure its distance to two tables' spans."""
    rows = []
    for repeat in range(repeats):
        turned, parts, public = eleven_parts(data, repeat, seed)
        size = len(public)
        made = [
            svc(1e-2, classes=(-1, 1)).fit(turned[rows_], data.y[rows_]).coef_[0] for rows_ in parts
        ]
        # The neighbouring table: one record with the other label. (Others may be beyond the hinge,
        # and move nothing.)
        changed = data.y[parts[0]] * np.r_[-1, np.ones(size - 1, dtype=int)]
        other = [svc(1e-2, classes=(-1, 1)).fit(turned[parts[0]], changed).coef_[0], *made[1:]]
        M = np.array(made)
        scores = turned[public] @ M.T
        for x in xs:
            plan = plan_weights(x / main_share(1.0), 1e-2, scores.shape)
            noise = draw_weights_noise(plan, Noise(seed=seed + repeat).open(), N_SITES)
            weights = perturbed_weights(scores, data.y[public], plan.regularization, noise)
            released = weights @ M
            for label, models in ((TRUE_SPAN, M), (OTHER_SPAN, np.array(other))):
                inside = models.T @ np.linalg.lstsq(models.T, released, rcond=None)[0]
                value = float(np.linalg.norm(released - inside) / np.linalg.norm(released))
                rows.append({"x": x, "label": label, "repeat": repeat, "value": value})
    return rows


SPAN = Panel(
    id="scenario-2-span",
    title="distance from the span",
    data=MNIST,
    x=(0.01, 0.1, 1.0, 10.0),
    xlabel="ε of the noise at the aggregator",
    ylabel="relative distance",
    metric="distance",
    arguments={},
    methods=(Method(TRUE_SPAN, "", "paper"), Method(OTHER_SPAN, "", "corrected")),
    xscale="log",
    yscale="log",
    computed=span_attack,
    quick=5,
    full=20,
    note="N = 10 sites of 789 records in 50 dimensions; "
    "who knows all records but one tells which of two it was.",
)
FLIPPED, SCORE, CLAIMED = (
    "lost if one label is flipped",
    "the longest score (assumed: 1)",
    "claimed ε",
)


def unscaled(xs: Sequence[Any], data: Dataset, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Return the lengths of the fully private feature method's scores, and what its noise hides.

    Weights w minimise Σ ℓ(yᵢ w·sᵢ) + nΛ/2 ‖w‖² + b·w, b with density ∝ exp(-ε'‖b‖/2): to each w
    belongs one b. Flipping the label of s moves that b by s (for the logistic loss at every w, for
    the Huber loss where s is beyond its parabola) and leaves the Jacobian as it is. So the loss
    comes as near to ε'‖s‖/2 as one likes, and that is ε'/2 only if scores are no longer than one.
    """
    rows = []
    for repeat in range(repeats):
        turned, parts, public = eleven_parts(data, repeat, seed)
        for x in xs:
            models = [
                svc(
                    1e-2,
                    "chaudhuri2011",
                    epsilon=x,
                    classes=(-1, 1),
                    noise=Noise(seed=seed + 100 * repeat + site),
                )
                for site in range(N_SITES)
            ]
            M = np.array(
                [
                    one.fit(turned[part], data.y[part]).coef_[0]
                    for one, part in zip(models, parts, strict=True)
                ]
            )
            longest = float(np.linalg.norm(turned[public] @ M.T, axis=1).max())
            jacobian = 2 * math.log1p(1 / (2 * HUBER) / (len(public) * 1e-2))
            left = x - jacobian if x > jacobian else x / 2  # below, the rule of 2011 raises Λ
            for label, value in ((FLIPPED, left * longest / 2), (SCORE, longest), (CLAIMED, x)):
                rows.append({"x": x, "label": label, "repeat": repeat, "value": value})
    return rows


UNSCALED = replace(
    SPAN,
    id="unscaled",
    title="MNIST, m = m₀ = 789, Λ = 0.01, ten sites",
    x=(0.025, 0.1, 0.225, 0.25, 0.5, 0.75),
    xlabel="ε of sites and aggregator",
    ylabel="ε, or length of a score",
    metric="epsilon",
    methods=(
        Method(FLIPPED, "", "paper"),
        Method(SCORE, "", "baseline"),
        Method(CLAIMED, "", "baseline"),
    ),
    xscale="linear",
    computed=unscaled,
    note="Exact, for the records that were drawn; "
    "noise and Λ of the rule of 2011, as the thesis prints them.",
)
SIMPLEX, ALLOWED = "Nelder–Mead", "what one record can move the minimum"


def simplex(xs: Sequence[Any], data: Dataset, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Return how far from a site's minimum SciPy's Nelder–Mead stops with default settings."""
    loss, rows = HuberHinge(HUBER), []
    for repeat in range(repeats):
        kept = Noise(seed=seed).open(stream=repeat).permutation(len(data.y))[:789]
        for x in xs:
            X = make_pipeline(
                PCA(min(int(x), *data.X[kept].shape), random_state=seed), Normalizer()
            ).fit_transform(data.X[kept])
            y = data.y[kept].astype(float)
            best = svc(1e-2, classes=(-1, 1)).fit(X, y).coef_[0]
            objective = lambda f, X=X, y=y: float(loss.value(X @ f, y).mean() + 0.005 * f @ f)  # noqa: E731
            found = optimize.minimize(objective, np.zeros(X.shape[1]), method="Nelder-Mead").x
            same = {"x": x, "repeat": repeat}
            rows.append(same | {"label": SIMPLEX, "value": float(np.linalg.norm(found - best))})
            rows.append(same | {"label": ALLOWED, "value": 2 / (len(y) * 1e-2)})
    return rows


SOLVER = Panel(
    id="solver",
    title="MNIST, one site of 789 records, Λ = 0.01, no noise",
    data=MNIST,
    x=(2, 10, 50),
    xlabel="principal components d",
    ylabel="distance to the minimum",
    metric="distance",
    arguments={},
    methods=(Method(SIMPLEX, "", "paper"), Method(ALLOWED, "", "baseline")),
    yscale="log",
    computed=simplex,
    quick=3,
    full=10,
    note="A curiosity: the thesis minimised by SciPy's Nelder–Mead, "
    "from zero and with its standard settings.",
)


def figure(id_: str, caption: str, *panels: Panel) -> Figure:
    """Return a figure whose panels stand beside each other, two in a row at most."""
    return Figure(id_, caption, panels, columns=min(2, max(1, len(panels))))


P = PANELS
WITH = "its two lines are the first two of figure {}, whose panel is shown"
PAPER = Paper(
    name="xie2016thesis",
    title="Distributed learning with differential privacy: average and feature method (thesis)",
    citation="L. Xie: thesis on differentially private distributed learning, "
    "Rutgers University, 2016.",
    figures=(
        figure("3.1", "One site, logistic loss: error against ε", PANEL_31),
        figure("3.2", "One site, Huber loss: error against ε", PANEL_32),
        figure(
            "3.3",
            "The Huber loss for several h, and what h does to the error",
            PANEL_33,
            PANEL_33_H,
        ),
        figure("3.4", "One site: error against the number of records", PANEL_34),
        figure("3.5", "One site: error against Λ", PANEL_35),
        figure(
            "3.6",
            "Generalised objective perturbation, with the thesis' λ and with the right one",
            PANEL_36,
        ),
        figure("5.2", "One private site among nine without noise", PANEL_52),
        figure("5.3", "One site's ε among nine at ε = 2", PANEL_53),
        figure("5.4", "One site's size, no noise", PANEL_54),
        figure("5.5", "One site's size, all at ε = 2", PANEL_55),
        figure("5.6-5.7", "Histograms of the error on MNIST, no noise", PANEL_56, PANEL_56_CV),
        figure(
            "5.8-5.9",
            "Histograms of the error on Covertype, no noise; columns in their ranges, and as they "
            "are",
            *in_columns(PANEL_58),
            PANEL_58_CV,
        ),
        figure("5.10", "Error against m, no noise, MNIST", P["5.10"]),
        figure("5.11", "Error against m, no noise, Covertype", *in_columns(P["5.11"])),
        figure("5.12", "Error against m₀, no noise, MNIST", P["5.12"]),
        figure("5.13", "Error against m₀, no noise, Covertype", *in_columns(P["5.13"])),
        figure("5.14", "Error against N, no noise, MNIST", P["5.14"]),
        figure("5.15", "Error against N, no noise, Covertype", *in_columns(P["5.15"])),
        figure(
            "5.16",
            "Private sites: error against ε, MNIST, one division as in the thesis; figure 5.24 has "
            "the same with divisions drawn again",
            P["5.16"],
        ),
        figure(
            "5.17",
            "Private sites: error against ε, Covertype, 42,762 records per site, one division",
            P["5.17"],
        ),
        figure("5.18", f"Private sites: error against m, MNIST; {WITH.format('5.26')}", P["5.26"]),
        figure(
            "5.19", f"Private sites: error against m, Covertype; {WITH.format('5.27')}", P["5.27"]
        ),
        figure("5.20", f"Private sites: error against m₀, MNIST; {WITH.format('5.28')}", P["5.28"]),
        figure(
            "5.21", f"Private sites: error against m₀, Covertype; {WITH.format('5.29')}", P["5.29"]
        ),
        figure("5.22", f"Private sites: error against N, MNIST; {WITH.format('5.30')}", P["5.30"]),
        figure("5.23", "Private sites: error against N, Covertype", P["5.23"]),
        figure("5.24", "Fully private: error against ε, MNIST", P["5.24"]),
        figure("5.25", "Fully private: error against ε, Covertype", *in_columns(P["5.25"])),
        figure("5.26", "Fully private: error against m, MNIST", P["5.26"]),
        figure("5.27", "Fully private: error against m, Covertype", P["5.27"]),
        figure("5.28", "Fully private: error against m₀, MNIST", P["5.28"]),
        figure("5.29", "Fully private: error against m₀, Covertype", P["5.29"]),
        figure("5.30", "Fully private: error against N, MNIST", P["5.30"]),
        figure(
            "5.31-5.40", "Local, global and distributed models, private", MODELS, MODELS_BY_EPSILON
        ),
        figure("5.41", "Local, global and distributed models, no noise", PANEL_541),
        figure(
            "theorems",
            "Theorems 4.12, 4.14 and 4.16: squared error of the feature method against m, m₀, ε "
            "and N, which the thesis bounds and does not plot",
            *(theorems.panel(vary, 1e-2) for vary in theorems.VALUES),
        ),
        figure("table-6.1", "Table 6.1: which method is better, and which way errors go"),
        figure(
            "control",
            "Not in the thesis: 200 public records, alone and with ten private sites",
            CONTROL,
        ),
        figure(
            "fully-private",
            "Not in the thesis: what its fully private feature method gives away",
            UNSCALED,
        ),
        figure(
            "scenario-2",
            "Noise at the aggregator only: what it costs, and why it hides no site",
            SCENARIOS,
            SPAN,
        ),
        figure("solver", "A curiosity: where Nelder–Mead stops", SOLVER),
    ),
)
