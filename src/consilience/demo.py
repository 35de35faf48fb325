"""Ten made-up hospitals learn one classifier together: the whole idea in a few seconds, beside the honest baselines.

The patients do not exist. `cohort` computes them from a fixed public formula, chosen so that joining can help; whether
it helps with other records is what `consilience.plan` is for. Noise is real and unseeded, so the guarantees of the
main run hold, and every run differs a little.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.aggregators.average import Average
from consilience.aggregators.members import LinearEnsemble
from consilience.data import Categorical, Numeric, Public, Schema
from consilience.errors import SettingsError
from consilience.learners.linear import PrivateLogisticRegression
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise

Array = NDArray[Any]

N_PATIENTS = 12_000
N_PUBLIC = 200
N_RECORDS = (300, 400, 500, 650, 800, 950, 1100, 1350, 1500, 1850)  # of each site
EPSILONS = (0.5, 2.0, 0.5, 2.0, 1.5, 1.5, 1.0, 1.0, 1.0, 0.5)  # each site's own choice; it allows twice that in all
REGULARIZATION = 1e-3
DATASET = "patients"

SCHEMA = Schema(
    [
        Numeric("age", 30, 95),
        Numeric("systolic", 90, 150),
        Numeric("cholesterol", 3.5, 7.5),
        Numeric("admissions", 0, 5),
        Numeric("smoker", 0, 1),
        Numeric("diabetic", 0, 1),
        Categorical("sex", ("female", "male")),
        Categorical("ward", ("medical", "surgical", "cardiac")),
    ],
    "readmitted",
    classes=("no", "yes"),
)

PUBLIC, ALONE, BEST, OWN = "public", "site-private", "best-site-private", "site-exact"
EQUAL, PRECISION, POOLED, EXACT = "average-equal", "average-precision", "pooled-private", "pooled-exact"
TITLES = {
    PUBLIC: f"{N_PUBLIC} public records alone",
    ALONE: "one site alone, private (mean of ten)",
    BEST: "one site alone, private (best, in hindsight)",
    EQUAL: "ten sites joined, private, equal weights",
    PRECISION: "ten sites joined, private, by precision",
    OWN: "one site alone, no privacy (mean of ten)",
    POOLED: f"all records pooled, private at epsilon={min(EPSILONS):g}",
    EXACT: "all records pooled, no privacy",
}


def cohort(n_patients: int = N_PATIENTS) -> dict[str, Array]:
    """Return made-up patients: the same ones every time, computed from a public formula and about no one."""
    draw = Noise(seed=1840).open()  # public randomness; nothing here needs hiding

    def chance(probability: Array | float) -> Array:
        return np.asarray(draw.uniform(n_patients) < probability)

    age = np.clip(62 + 16 * draw.normal(n_patients), 18, 100)
    smoker, diabetic = chance(0.3), chance(0.1 + 0.003 * (age - 18))
    systolic = 118 + 0.35 * (age - 60) + 6 * diabetic + 16 * draw.normal(n_patients)
    cholesterol = 5.4 + 0.5 * smoker + draw.normal(n_patients)
    admissions = np.floor(1.3 * draw.exponential(n_patients) * (1 + 0.02 * (age - 60)))
    male = chance(0.5)
    ward = np.searchsorted([0.5, 0.8], draw.uniform(n_patients))
    score = (
        -1.6
        + 0.05 * (age - 62)
        + 0.025 * (systolic - 118)
        + 0.5 * (cholesterol - 5.4)
        + 0.8 * (np.minimum(admissions, 5) - 1)
        + 1.3 * smoker
        + 1.2 * diabetic
        + 0.3 * male
        + np.array([0.0, -0.5, 0.9])[ward]
    )
    return {
        "age": age,
        "systolic": systolic,
        "cholesterol": cholesterol,
        "admissions": admissions,
        "smoker": smoker.astype(int),
        "diabetic": diabetic.astype(int),
        "sex": np.where(male, "male", "female"),
        "ward": np.array(["medical", "surgical", "cardiac"])[ward],
        "readmitted": np.where(chance(1 / (1 + np.exp(-score))), "yes", "no"),
    }


@dataclass(frozen=True)
class SiteState:
    """One site of the main run: what it allowed, spent and got."""

    name: str
    n_records: int
    budget: float
    spent: float
    left: float
    error_alone: float
    weight: float
    head: str


@dataclass(frozen=True)
class Method:
    """One way to learn: its error on the test records in the main run and over all repeats."""

    name: str
    title: str
    private: bool
    error: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class DemoReport:
    """The outcome of `demo`; prints as two tables and a verdict."""

    methods: tuple[Method, ...]
    sites: tuple[SiteState, ...]
    repeats: int
    verdict: str
    files: tuple[str, ...]
    seconds: float

    def method(self, name: str) -> Method:
        """Return the method of that name."""
        return next(method for method in self.methods if method.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            "Readmission of made-up patients: they are computed from a formula and are about no one.",
            "",
            f"{'site':<8} {'records':>7}  {'budget':>6} {'spent':>6} {'left':>6}  {'error alone':>11}  {'weight':>6}",
        ]
        lines += [
            f"{s.name:<8} {s.n_records:>7,}  {s.budget:>6g} {s.spent:>6g} {s.left:>6g}  {s.error_alone:>11.1%}  "
            f"{s.weight:>6.1%}"
            for s in self.sites
        ]
        width = max(len(method.title) for method in self.methods)
        lines += ["", f"{'error on test records':<{width}}  this run   mean  10-90 % of {self.repeats} repeats"]
        lines += [
            f"{m.title:<{width}}  {m.error:>8.1%}  {m.mean:.1%}  {m.low:.1%} to {m.high:.1%}" for m in self.methods
        ]
        return "\n".join([*lines, "", self.verdict])


@dataclass(frozen=True)
class _Cut:
    """One division of the patients: public, test, and each site's own."""

    X: Array
    y: Array
    public: Array
    test: Array
    sites: tuple[Array, ...]

    def train(self, epsilon: float, part: Array, **charge: Any) -> PrivateLogisticRegression:
        learner = PrivateLogisticRegression(epsilon=epsilon, regularization=REGULARIZATION, classes=(0, 1))
        return learner.fit(self.X[part], self.y[part], **charge)

    def join(self, models: Sequence[PrivateLogisticRegression], weights: str) -> LinearEnsemble:
        """Average the sites' models; post-processing, so nothing is drawn or charged."""
        return Average(weights).combine(models, Public(self.X[self.public]))

    def error(self, model: Any) -> float:
        return float(np.mean(model.predict(self.X[self.test]) != self.y[self.test]))


def demo(
    folder: str | Path = "demo-report", *, repeats: int = 20, progress: Callable[[int, int], None] | None = None
) -> DemoReport:
    """Train at ten sites, each under its own budget and ledger; average; compare; write tables and a chart.

    The main run is charged to ledgers in ``folder/ledgers``. The other ``repeats - 1`` are rehearsals with another
    cut and other noise, not charged: with real patients each would cost the whole epsilon again.

    Privacy
    -------
    Main run: each record of site i has its site's own epsilon (pure, replace-one) against everyone who sees the
    site's model or the average, if no patient is at two sites. The errors printed here are not part of that: they
    come from test records, which are made up.
    """
    if repeats < 2:
        raise SettingsError(f"The 'repeats' parameter of demo must be at least 2. Got {repeats!r} instead.")
    started = time.perf_counter()
    folder = Path(folder)
    (folder / "ledgers").mkdir(parents=True, exist_ok=True)
    for old in (folder / "ledgers").glob("site-*.sqlite*"):
        old.unlink()  # an earlier demo's; the ledger of real records is never deleted
    X, y, _ = SCHEMA.encode(cohort())
    ledgers = [Ledger(folder / "ledgers" / f"site-{i:02}.sqlite") for i in range(1, len(N_RECORDS) + 1)]
    errors: dict[str, list[float]] = {name: [] for name in TITLES}
    better: list[int] = []  # in each repeat, how many sites would do better on their own without privacy
    for repeat in range(repeats):
        cut = _cut(X, y)
        if repeat == 0:
            models = [_charged(cut, ledger, i) for i, ledger in enumerate(ledgers)]
            weights = cut.join(models, "precision").weights
            states = tuple(map(_state, ledgers, N_RECORDS, map(cut.error, models), weights))
        else:
            models = [cut.train(epsilon, part) for epsilon, part in zip(EPSILONS, cut.sites, strict=True)]
        own = [cut.error(cut.train(math.inf, part)) for part in cut.sites]
        for name, error in _compare(cut, models, own).items():
            errors[name].append(error)
        better.append(sum(error < errors[PRECISION][-1] for error in own))
        if progress is not None:
            progress(repeat + 1, repeats)
    methods = tuple(_method(name, np.array(errors[name])) for name in TITLES)
    verdict = _verdict({name: np.array(errors[name]) for name in TITLES}, float(np.mean(better)))
    chart, page = folder / "errors.png", folder / "report.html"
    report = DemoReport(methods, states, repeats, verdict, (str(chart), str(page)), time.perf_counter() - started)
    draw_errors(report, chart)
    text = f"<pre>{html.escape(str(report))}</pre>"
    head = f'<!doctype html><meta charset="utf-8"><title>consilience demo</title><img src="{chart.name}" width="900">'
    page.write_text(f"{head}{text}\n", encoding="utf-8")
    return report


def _cut(X: Array, y: Array) -> _Cut:
    """Cut the patients anew, by slot and never by content; the test records stay the same."""
    rest = N_PUBLIC + sum(N_RECORDS)
    order = Noise().open().permutation(rest)
    public, *sites = np.split(order, np.cumsum((N_PUBLIC, *N_RECORDS))[:-1])
    return _Cut(X, y, public, np.arange(rest, len(y)), tuple(sites))


def _charged(cut: _Cut, ledger: Ledger, site: int) -> PrivateLogisticRegression:
    """Train at one site as it would in earnest: its owner sets a limit, the ledger is charged, then noise is drawn."""
    ledger.allow(DATASET, Budget(epsilon=2 * EPSILONS[site]))
    return cut.train(EPSILONS[site], cut.sites[site], ledger=ledger, dataset=DATASET, key="demo")


def _compare(cut: _Cut, models: Sequence[PrivateLogisticRegression], own: Sequence[float]) -> dict[str, float]:
    """Return the error of every method."""
    alone = [cut.error(model) for model in models]
    pooled = np.concatenate(cut.sites)
    return {
        PUBLIC: cut.error(cut.train(math.inf, cut.public)),
        ALONE: float(np.mean(alone)),
        BEST: min(alone),
        EQUAL: cut.error(cut.join(models, "equal")),
        PRECISION: cut.error(cut.join(models, "precision")),
        OWN: float(np.mean(own)),
        # A record that was promised the strictest site's epsilon keeps it in the pool.
        POOLED: cut.error(cut.train(min(EPSILONS), pooled)),
        EXACT: cut.error(cut.train(math.inf, pooled)),
    }


def _method(name: str, errors: Array) -> Method:
    low, high = np.quantile(errors, (0.1, 0.9))
    private = name not in (PUBLIC, OWN, EXACT)
    return Method(name, TITLES[name], private, float(errors[0]), float(errors.mean()), float(low), float(high))


def _state(ledger: Ledger, n_records: int, error: float, weight: float) -> SiteState:
    balance, head = ledger.balance(DATASET), ledger.verify()
    limit, spent, left = (amounts.epsilon or 0.0 for amounts in (balance.limit, balance.spent, balance.left))
    return SiteState(ledger.path.stem, n_records, limit, spent, left, error, float(weight), head)


def _verdict(errors: dict[str, Array], better: float) -> str:
    """Say from the numbers alone whether joining helped, against each thing a site could do instead."""
    joined = errors[PRECISION]
    rivals = {ALONE: "one site alone with the same privacy", PUBLIC: "the public records alone"}
    parts = []
    for name, title in {**rivals, OWN: "one site alone without any privacy"}.items():
        gap = errors[name] - joined
        clear = abs(gap.mean()) > 2 * gap.std(ddof=1) / math.sqrt(len(gap))
        word = "about as many as" if not clear else "fewer than" if gap.mean() > 0 else "MORE than"
        parts.append(f"{word} {title} ({errors[name].mean():.1%})")
    helps = all(part.startswith("fewer") for part in parts[: len(rivals)])
    return (
        f"Joining {'helps' if helps else 'does not help'}: the private average of ten sites errs on "
        f"{joined.mean():.1%} of patients, {', '.join(parts[:-1])} and {parts[-1]}. Pooling all records without "
        f"privacy gives {errors[EXACT].mean():.1%}. On average {better:.1f} of the ten sites would do better by "
        "keeping an exact model to themselves."
    )


def draw_errors(report: DemoReport, path: Path) -> None:
    """Draw the errors of all methods: mean, and the range of most repeats."""
    from matplotlib.figure import Figure  # loaded here: a second that only the chart needs

    private, none = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion: distinct to every eye
    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for height, method in enumerate(reversed(report.methods)):
        colour, marker = (private, "o") if method.private else (none, "s")
        axes.plot([100 * method.low, 100 * method.high], [height, height], color=colour, linewidth=2.5, alpha=0.55)
        axes.plot(100 * method.mean, height, marker, color=colour, markersize=8)
        axes.annotate(
            f"{method.mean:.1%}",
            (100 * method.mean, height),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(report.methods)), [method.title for method in reversed(report.methods)])
    axes.set_ylim(-0.5, len(report.methods) - 0.3)
    axes.set_xlabel(f"patients misclassified, % (mean and 10–90 % range of {report.repeats} repeats)")
    axes.set_title("Ten made-up hospitals: what joining brings", loc="left")
    axes.plot([], [], "o-", color=private, label="every record has its site's guarantee")
    axes.plot([], [], "s-", color=none, label="no guarantee for the records used")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path)
