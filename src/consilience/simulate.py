"""Play a whole collaboration through on public records: what joining would bring, at which epsilon, and to whom.

The flow, top to bottom: `simulate` checks its arguments and hands out cells (one repeat of one learner); `_Plan.cut`
divides the records of a repeat into test, public and sites; `run_cell` trains at every site, pools, combines by every
aggregator and measures all of it on the same test records; `Report` gathers the rows.

Within a repeat all methods see the same division, and all aggregators the same local models, so that differences
between them are paired. With a seed every division and every draw of noise follows from the seed and the names of the
cell, whatever the backend and whichever cell is done first; without one, noise is fresh from the operating system.
"""

from __future__ import annotations

import copy
import hashlib
import math
import reprlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy import special, stats
from sklearn.base import clone, is_classifier
from sklearn.utils.validation import check_X_y
from threadpoolctl import threadpool_limits

from consilience.data import Public, split_sites
from consilience.errors import SettingsError
from consilience.evaluate import measures
from consilience.learners.tuning import choose_on_public
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.mechanisms import Noise, Source

Array = NDArray[Any]
Progress = Callable[[int, int], None]

PUBLIC, LOCAL, BEST, OWN = "public-only", "local-mean", "local-best", "local-exact"
POOLED, EXACT = "pooled-private", "pooled-exact"
TITLES = {
    PUBLIC: "public records alone, tuned on them",
    LOCAL: "a site alone, private (mean of sites)",
    BEST: "a site alone, private (best, in hindsight)",
    OWN: "a site alone, exact, kept to itself (mean)",
    POOLED: "all records pooled, private",
    EXACT: "all records pooled, no privacy, same settings",
}
_ORDER = {method: place for place, method in enumerate(TITLES)}
PUBLIC_RIDGES = tuple(10.0**power for power in range(-6, 1))
SITES_LISTED = 100  # with more, a report has no row for each single site
EXACT_MEMBERS = ("Average", "VoteDistillation", "SoftLabelDistillation")  # with an epsilon, these add the noise


def simulate(
    learner: Any,
    aggregator: Any,
    X: Any,
    y: Any,
    sites: Any = 10,
    public: Public | int | None = None,
    test: float | tuple[Any, Any] = 0.3,
    repeats: int = 10,
    seed: int | None = None,
    *,
    epsilon: Any = None,
    sizes: Sequence[int] | None = None,
    label_skew: float | None = None,
    feature_skew: float | None = None,
    n_jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Simulate sites that train privately and join, beside the honest baselines, and report what each way achieves.

    Parameters
    ----------
    learner, aggregator
        One, a list, or a dictionary by name; all are tried with all.
    X, y
        Public records, encoded as a site would encode its own. A data frame if `sites` names one of its columns.
    sites, sizes
        The number of sites of equal size; or the site of each record, as an array or the name of a column of `X`.
        `sizes` lists the sites' numbers of records instead; what is over is left out.
    public
        Public records for the aggregators: `Public`, or how many are cut from `X`. Without, there is no public-only
        baseline either.
    test
        The share of `X` to test on, or separate (X, y).
    seed
        Makes the report repeatable, and voids its guarantees.
    epsilon
        Replaces the learner's own: a number; a list of levels to try, each a number or one number per site; or a
        dictionary of levels by name.
    label_skew
        Above 0: a site's share of a class is a gamma variable with this shape, scaled to the sites' sizes. At 0.1 a
        site has few classes, at 100 about the same as all others.
    feature_skew
        Between 0 (none) and 1 (records are sorted along a random direction and sites are consecutive).
    n_jobs
        As joblib takes it; the backend (Ray, Dask) is chosen around the call with ``joblib.parallel_config``.
    progress
        Called with (cells done, cells). Without, a bar is shown if standard error is a terminal.

    Privacy
    -------
    None: every repeat and level trains again, and errors are shown, so records must be public. Each ensemble alone
    has what `Report.guarantees` states, void with a seed.
    """
    started = time.perf_counter()
    plan = _plan(learner, aggregator, X, y, sites, public, test, seed, epsilon, sizes, label_skew, feature_skew)
    _require("repeats", repeats, _whole(repeats), "a whole number > 0")
    _require("n_jobs", n_jobs, n_jobs is None or n_jobs != 0, "None or a number other than 0, as joblib takes it")
    cells = [(repeat, name) for repeat in range(repeats) for name in plan.learners]
    plan.cut(0)  # so that what cannot be divided fails before anything is trained
    found: dict[tuple[int, str], tuple[list[Row], dict[Any, Guarantee]]] = {}
    with threadpool_limits(1), _bar(progress) as shown:  # cells run side by side; BLAS in each keeps to one core
        for key, rows, guarantees in _parallel(n_jobs)(joblib.delayed(run_cell)(plan, *cell) for cell in cells):
            found[key] = rows, guarantees
            shown(len(found), len(cells))
    rows = [row for cell in cells for row in found[cell][0]]
    guarantees = {k: v for cell in cells for k, v in found[cell][1].items()}
    return Report(
        tuple(rows), guarantees, plan.facts(repeats), plan.guarantee(guarantees), time.perf_counter() - started
    )


# ------------------------------------------------------------------------------------------------- dividing the records


@dataclass(frozen=True)
class Cut:
    """One division of the records: what is tested on, what is public, and the rows of each site."""

    X_test: Any
    y_test: Array
    public: Public | None
    sites: tuple[Array, ...]


@dataclass(frozen=True)
class _Plan:
    """The checked arguments: all that a worker needs to run any cell."""

    learners: Mapping[str, Any]
    aggregators: Mapping[str, Any]
    asked: Mapping[str, Any] | None  # epsilon by level
    X: Any
    y: Array
    ids: Array | None
    n_sites: int
    sizes: tuple[int, ...] | None
    public: Public | int | None
    test: float | tuple[Any, Any]
    label_skew: float | None
    feature_skew: float | None
    seed: int | None
    split_seed: int
    classes: Array | None

    def cut(self, repeat: int) -> Cut:
        """Divide the records by slot, never by content unless skew is asked for: the same for all methods."""
        source = Noise(seed=self.split_seed).open(stream=repeat)
        order = source.permutation(len(self.y))
        n_test = 0 if isinstance(self.test, tuple) else round(self.test * len(order))
        n_public = 0 if self.public is None or isinstance(self.public, Public) else int(self.public)
        tested, shared, rest = np.split(order, [n_test, n_test + n_public])
        X_test, y_test = self.test if isinstance(self.test, tuple) else (self.X[tested], self.y[tested])
        public = Public(self.X[shared], self.y[shared]) if n_public else self.public
        sites = tuple(np.sort(rows) for rows in self._sites(rest, source))
        assert not isinstance(public, int)
        return Cut(X_test, np.asarray(y_test), public, sites)

    def _sites(self, rest: Array, source: Source) -> Sequence[Array]:
        if self.ids is not None:
            return [rest[self.ids[rest] == site] for site in range(self.n_sites)]
        sizes = self.sizes or [len(part) for part in np.array_split(rest, self.n_sites)]
        if sum(sizes) > len(rest) or min(sizes) < 1:
            raise SettingsError(
                f"{len(sizes)} sites of {sum(sizes)} records in all were asked for, but {len(rest)} are left after "
                "cutting test and public records. Nothing was trained. Ask for fewer, at least one record per site."
            )
        if self.label_skew is not None:
            unused = [len(rest) - sum(sizes)] if sum(sizes) < len(rest) else []
            return _skew_labels(rest, self.y[rest], [*sizes, *unused], self.label_skew, source)[: len(sizes)]
        if self.feature_skew is not None:
            along = np.asarray(self.X[rest] @ source.normal(self.X.shape[1]))
            score = self.feature_skew * stats.rankdata(along) / len(rest)
            rest = rest[np.argsort(score + (1 - self.feature_skew) * source.uniform(len(rest)), kind="stable")]
        return np.split(rest, np.cumsum(sizes))[:-1]

    def levels(self, name: str) -> dict[str, tuple[float, ...]]:
        """Return the epsilon of each site at each level of this learner."""
        own = self.learners[name].epsilon
        asked = {f"{own:g}": own} if self.asked is None else self.asked
        return {label: tuple(np.broadcast_to(np.asarray(one, float), self.n_sites)) for label, one in asked.items()}

    def noise(self, *names: Any) -> Noise | None:
        """Return the noise of one draw in one cell: a seed of its own if the report is to repeat."""
        return None if self.seed is None else Noise(seed=_derived(self.seed, *names))

    def fit(self, name: str, epsilon: float, rows: Array, noise: Noise | None, n_sites: int = 1) -> Any:
        """Train one model at an epsilon; a public guess of a site's size grows with the number of sites pooled."""
        return self.make(name, epsilon, noise, n_sites=n_sites).fit(self.X[rows], self.y[rows])

    def make(self, name: str, epsilon: float, noise: Noise | None, n_sites: int = 1, size: int | None = None) -> Any:
        """Return an untrained learner that knows what everybody knows."""
        made = clone(self.learners[name])
        facts: dict[str, Any] = {"epsilon": epsilon, "noise": noise}
        if getattr(made, "classes", ()) is None:
            facts["classes"] = self.classes
        if getattr(made, "public_size", None) is not None:
            facts["public_size"] = size or n_sites * made.public_size
        return made.set_params(**facts)

    def combine(self, name: str, epsilons: Sequence[float], members: Any, exact: Any, cut: Cut, cell: Any) -> Any:
        """Combine the local models, or the exact ones where the aggregator is trusted and adds the noise itself."""
        made = copy.copy(self.aggregators[name])
        kind, budget = type(made).__name__, getattr(made, "epsilon", None)
        adds = kind in EXACT_MEMBERS or (kind == "FeatureMethod" and made.mechanism == "output")
        spends = budget is not None and bool(np.isfinite(budget).all())
        trusted = adds and spends
        # Private aggregation records too are promised what the level promises to records.
        if (trusted or (spends and kind == "FeatureMethod")) and self.asked is not None:
            made.epsilon = list(epsilons) if kind == "Average" else min(epsilons)
        if self.seed is not None and hasattr(made, "noise"):
            made.noise = self.noise(*cell, name)
        if getattr(made, "random_state", 0) is None:  # folds and the like: public, and the same in every run
            made.random_state = _derived(self.split_seed, *cell, name) % 2**32
        return made.combine(exact if trusted else members, public=cut.public)

    def guarantee(self, found: Mapping[Any, Guarantee]) -> Guarantee | None:
        """Return the weakest guarantee of any private result, or that there is none."""
        if self.seed is not None:
            some = next(iter(self.learners.values()))
            relation = getattr(some, "neighbours", "replace-one")
            return Guarantee.void("seeded noise", unit=getattr(some, "unit", "record"), neighbours=relation)
        return max(found.values(), key=lambda one: (not one.holds, one.epsilon), default=None)

    def facts(self, repeats: int) -> dict[str, Any]:
        """Return what a reader of the report must know."""
        cut = self.cut(0)
        return {
            "records": len(self.y),
            "features": int(self.X.shape[1]),
            "sites": self.n_sites,
            "sizes": [len(rows) for rows in cut.sites],
            "public": 0 if cut.public is None else int(cut.public.X.shape[0]),
            "test": len(cut.y_test),
            "resampled": not isinstance(self.test, tuple),
            "repeats": repeats,
            "seed": self.seed,
            "skew": {"label": self.label_skew, "feature": self.feature_skew},
        }


def _skew_labels(rest: Array, labels: Array, sizes: Sequence[int], shape: float, source: Source) -> list[Array]:
    """Give each site its number of records with classes in gamma-distributed proportions, all records used once."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    uniform = source.uniform(len(sizes) * len(counts)).reshape(len(sizes), len(counts))
    shares = special.gammaincinv(shape, uniform)
    for _ in range(300):  # scale rows and columns in turn until the table has the right sums
        shares = np.maximum(shares, 1e-30)
        shares *= counts / shares.sum(axis=0)
        shares *= (np.asarray(sizes) / shares.sum(axis=1))[:, None]
    table = np.floor(shares * np.minimum(1.0, counts / shares.sum(axis=0))).astype(int)
    left = counts - table.sum(axis=0)
    for site, size in enumerate(sizes):  # what rounding left over: any class that has some
        while (missing := size - table[site].sum()) > 0:
            richest = int(left.argmax())
            taken = min(missing, left[richest])
            table[site, richest] += taken
            left[richest] -= taken
    parts = [np.split(rest[codes == k], np.cumsum(table[:-1, k])) for k in range(len(counts))]
    return [np.concatenate([part[site] for part in parts]) for site in range(len(sizes))]


# ------------------------------------------------------------------------------------------------------------ one cell


@dataclass(frozen=True)
class Row:
    """One number of the report. ``epsilon`` names the level; sites' own lie between ``epsilon_low`` and ``_high``."""

    repeat: int
    learner: str
    epsilon: str
    epsilon_low: float
    epsilon_high: float
    kind: str  # "public", "local", "global" (pooled), "distributed" (an ensemble), "site" (a single one)
    method: str
    metric: str
    value: float


def run_cell(plan: _Plan, repeat: int, name: str) -> tuple[tuple[int, str], list[Row], dict[Any, Guarantee]]:
    """Run one repeat of one learner: train each model once, combine in every way, measure all on the same records."""
    with threadpool_limits(1):  # again: this may be another process
        cut = plan.cut(repeat)
        held = [site for site, rows in enumerate(cut.sites) if len(rows)]
        everyone = np.concatenate(cut.sites)

        def measured(model: Any) -> dict[str, float]:
            return measures(model, cut.X_test, cut.y_test)

        exact = [plan.fit(name, math.inf, cut.sites[site], None) for site in held]
        own = [measured(model) for model in exact]
        always = {("local", OWN): _mean(own)}
        always["global", EXACT] = measured(plan.fit(name, math.inf, everyone, None, len(held)))
        if cut.public is not None and cut.public.y is not None:
            always["public", PUBLIC] = measured(_public_only(plan, name, cut.public))
        rows, guarantees = [], {}
        for level, epsilons in plan.levels(name).items():
            cell = (repeat, name, level)
            members = [plan.fit(name, epsilons[s], cut.sites[s], plan.noise(*cell, s)) for s in held]
            strictest = min(epsilons[s] for s in held)  # a record keeps in the pool what its site was promised
            pooled = plan.fit(name, strictest, everyone, plan.noise(*cell, "pool"), len(held))
            alone = [measured(model) for model in members]
            key = "error" if "error" in alone[0] else "rmse"
            best = min(alone, key=lambda found: found[key])
            results = {("local", LOCAL): _mean(alone), ("local", BEST): best, ("global", POOLED): measured(pooled)}
            guarantees[name, level, POOLED] = pooled.guarantee_
            for method in plan.aggregators:
                ensemble = plan.combine(method, [epsilons[s] for s in held], members, exact, cut, cell)
                found = measured(ensemble)
                # The share of sites that joining serves better than what they could do alone.
                found["helped"] = float(np.mean([found[key] < one[key] for one in alone]))
                found["helped_exact"] = float(np.mean([found[key] < one[key] for one in own]))
                results["distributed", method] = found
                if (stated := getattr(ensemble, "guarantee", None)) is not None:
                    guarantees[name, level, method] = stated
            if len(held) <= SITES_LISTED:
                results |= {("site", f"site-{s + 1:03}"): {key: one[key]} for s, one in zip(held, alone, strict=True)}
            # Baselines first, in one order everywhere.
            inorder = sorted({**always, **results}.items(), key=lambda item: _ORDER.get(item[0][1], len(_ORDER)))
            for (kind, method), found in inorder:
                facts = (repeat, name, level, min(epsilons), max(epsilons), kind, method)
                rows += [Row(*facts, metric, value) for metric, value in found.items()]
        return (repeat, name), rows, guarantees


def _public_only(plan: _Plan, name: str, public: Public) -> Any:
    """Train on the public records alone, with the ridge that cross-validation on them prefers."""
    made, y = plan.make(name, math.inf, None, size=len(public.y)), np.asarray(public.y)
    fewest = int(np.unique(y, return_counts=True)[1].min()) if is_classifier(made) else len(y)
    if hasattr(made, "regularization") and (folds := min(5, fewest)) > 1:
        size = len(y) * (folds - 1) // folds
        grid = {"regularization": PUBLIC_RIDGES}
        made.set_params(**choose_on_public(made, grid, public.X, y, n_records=size, cv=folds, repeats=1))
    return made.fit(public.X, y)


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    common = [metric for metric in found[0] if all(metric in one for one in found)]
    return {metric: float(np.mean([one[metric] for one in found])) for metric in common}


def _derived(seed: int, *names: Any) -> int:
    """Return a 256-bit seed that is another one for each cell and draw, and the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest(), "little")


def _parallel(n_jobs: int | None) -> Any:
    try:
        return joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    except ValueError:  # a backend that hands over all results at once
        return joblib.Parallel(n_jobs=n_jobs)


@contextmanager
def _bar(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("Simulating", total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


# ---------------------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Summary:
    """One metric of one method over all repeats: mean, standard deviation, standard error (nan for one repeat)."""

    learner: str
    epsilon: str
    kind: str
    method: str
    metric: str
    mean: float
    sd: float
    se: float
    repeats: int


@dataclass(frozen=True)
class Report:
    """All numbers of a simulation, tidy: one `Row` per repeat, level, learner, method and metric.

    ``guarantees`` holds, by (learner, level, method), what a record of any site has in that one model, each taken
    alone; ``guarantee`` is the weakest of them, or void with the reason.
    """

    rows: tuple[Row, ...] = field(repr=False)
    guarantees: Mapping[tuple[str, str, str], Guarantee] = field(repr=False)
    settings: Mapping[str, Any]
    guarantee: Guarantee | None
    seconds: float = field(compare=False)

    @cached_property
    def main(self) -> str:
        """The metric that methods are compared by: "error", or "rmse" for regressors."""
        return "error" if any(row.metric == "error" for row in self.rows) else "rmse"

    def values(self, learner: str, epsilon: str, method: str, metric: str | None = None) -> Array:
        """Return one metric of one method, by repeat: two such arrays are paired."""
        return np.array(self._grouped.get((learner, epsilon, method, metric or self.main), ()))

    @cached_property
    def _grouped(self) -> dict[tuple[str, str, str, str], list[float]]:
        groups: dict[tuple[str, str, str, str], list[float]] = {}
        for row in self.rows:
            groups.setdefault((row.learner, row.epsilon, row.method, row.metric), []).append(row.value)
        return groups

    def table(self, metric: str | None = None, *, single_sites: bool = False) -> tuple[Summary, ...]:
        """Summarise one metric, by default the main one, of every method over the repeats."""
        kinds = {row.method: row.kind for row in self.rows}
        lines = []
        for (learner, epsilon, method, one), found in self._grouped.items():
            if one != (metric or self.main) or (kinds[method] == "site" and not single_sites):
                continue
            sd = float(np.std(found, ddof=1)) if len(found) > 1 else math.nan
            facts = (learner, epsilon, kinds[method], method, one, float(np.mean(found)))
            lines.append(Summary(*facts, sd, sd / math.sqrt(len(found)), len(found)))
        _require("metric", metric, bool(lines), f"one of {sorted({row.metric for row in self.rows})}")
        return tuple(lines)

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """The (learner, level) pairs, in order."""
        return list(dict.fromkeys((row.learner, row.epsilon) for row in self.rows))

    @property
    def sentence(self) -> str:
        """Whether joining helps, at each level of each learner, and what the rest of the page has to be read with."""
        lines = [self._verdict(*cell) for cell in self.cells]
        if self.guarantee is not None and not self.guarantee.holds:
            lines.append(f"The models of this simulation have no guarantee: {self.guarantee.void_reason}.")
        return "\n".join(lines)

    def _verdict(self, learner: str, epsilon: str) -> str:
        ours = [s for s in self.table() if (s.learner, s.epsilon, s.kind) == (learner, epsilon, "distributed")]
        best = min(ours, key=lambda one: one.mean)
        rivals = {LOCAL: "a site alone with the same privacy", PUBLIC: "the public records alone"}
        words, gaps = [], {}
        for rival, title in {**rivals, OWN: "a site's own exact model, kept to itself"}.items():
            other = self.values(learner, epsilon, rival)
            if other.size:
                low, high = self._interval(other - self.values(learner, epsilon, best.method))
                gaps[rival] = "lower than" if low > 0 else "HIGHER than" if high < 0 else "not clearly different from"
                sure = f"gain {low:+.3f} to {high:+.3f}" if low > -math.inf else "no interval from one repeat"
                words.append(f"{gaps[rival]} {title} ({self._shown(other)}, {sure})")
        helps = "helps" if set(gaps.values()) == {"lower than"} else "does not clearly help"
        helps = "does not help" if "HIGHER than" in gaps.values() else helps
        chosen = f", the best in hindsight of {len(ours)} aggregators," if len(ours) > 1 else ""
        helped = float(self.values(learner, epsilon, best.method, "helped").mean()) * self.settings["sites"]
        public = "" if PUBLIC in gaps else " There were no labelled public records to compare with."
        return (
            f"{learner} at epsilon={epsilon}: joining {self.settings['sites']} sites by {best.method}{chosen} "
            f"{helps}. Its {self.main} is "
            f"{self._shown(self.values(learner, epsilon, best.method))}: {'; '.join(words)}. Pooling all records "
            f"gives {self._shown(self.values(learner, epsilon, EXACT))} without privacy and "
            f"{self._shown(self.values(learner, epsilon, POOLED))} with it. On average {helped:.1f} sites do better "
            f"than alone with the same privacy.{public}"
        )

    def _shown(self, values: Array) -> str:
        return f"{values.mean():.1%}" if self.main == "error" else f"{values.mean():.4g}"

    def _interval(self, gaps: Array, level: float = 0.95) -> tuple[float, float]:
        """Return where the mean of paired gaps lies; divisions overlap, for which Nadeau and Bengio (2003) correct."""
        if len(gaps) < 2:
            return -math.inf, math.inf
        overlap = self.settings["test"] / max(1, sum(self.settings["sizes"])) if self.settings["resampled"] else 0.0
        half = stats.t.isf((1 - level) / 2, len(gaps) - 1) * gaps.std(ddof=1) * math.sqrt(1 / len(gaps) + overlap)
        return float(gaps.mean() - half), float(gaps.mean() + half)

    def __str__(self) -> str:
        lines = []
        for learner, epsilon in self.cells:
            lines += [f"{learner}, epsilon={epsilon}", f"  {self.main:>9}  {'sd':>6}  {'se':>6}"]
            for one in self.table():
                if (one.learner, one.epsilon) == (learner, epsilon):
                    title = TITLES.get(one.method, f"joined: {one.method}")
                    lines.append(f"  {one.mean:>9.4f}  {one.sd:>6.4f}  {one.se:>6.4f}  {title}")
        return "\n".join([*lines, "", self.sentence])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: settings, summaries, guarantee and sentence; single rows go to files."""
        lines = [s for metric in dict.fromkeys(r.metric for r in self.rows) for s in self.table(metric)]
        return {
            "settings": dict(self.settings),
            "table": [{k: None if v != v else v for k, v in asdict(line).items()} for line in lines],
            "guarantee": None if self.guarantee is None else self.guarantee.as_dict(),
            "sentence": self.sentence,
            "seconds": self.seconds,
        }

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        return pa.Table.from_pylist([asdict(row) for row in self.rows])

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as CSV."""
        pcsv.write_csv(self.to_arrow(), path)

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows as Parquet."""
        pq.write_table(self.to_arrow(), path)

    def plot(self, path: str | Path, metric: str | None = None) -> None:
        """Draw one metric of every method: mean and standard deviation over the repeats, a panel per learner."""
        from matplotlib.figure import Figure  # loaded here: a second that only the chart needs

        lines = self.table(metric)
        learners = list(dict.fromkeys(line.learner for line in lines))
        figure = Figure(figsize=(1.5 + 6.5 * len(learners), 5.2), dpi=150, layout="constrained")
        panels = figure.subplots(1, len(learners), sharey=True, squeeze=False)[0]
        methods = list(dict.fromkeys(line.method for line in lines))
        n_baselines = sum(method in TITLES for method in methods)
        connected = all(row.epsilon_low == row.epsilon_high for row in self.rows)  # else levels are no scale
        for axes, learner in zip(panels, learners, strict=True):
            levels = list(dict.fromkeys(line.epsilon for line in lines if line.learner == learner))
            for i, method in enumerate(methods):
                found = [one for one in lines if (one.learner, one.method) == (learner, method)]
                places = np.array([levels.index(one.epsilon) for one in found]) + 0.5 * ((i + 0.5) / len(methods) - 0.5)
                means, spreads = ([getattr(one, what) for one in found] for what in ("mean", "sd"))
                ours = any(one.kind == "distributed" for one in found)
                line = ("-" if ours else ":") if connected else ""
                axes.errorbar(
                    places,
                    means,
                    np.nan_to_num(spreads),
                    color=COLOURS[(i - n_baselines) % len(COLOURS)] if ours else GREYS[i % len(GREYS)],
                    marker=MARKERS[i % len(MARKERS)],
                    linestyle=line,
                    linewidth=2.0 if ours else 1.2,
                    elinewidth=1.2,
                    capsize=3,
                    label=TITLES.get(method, f"joined: {method}"),
                )
            axes.set_xticks(range(len(levels)), levels)
            axes.set_xlim(-0.5, len(levels) - 0.5)
            axes.set_xlabel("epsilon")
            axes.set_title(learner, loc="left")
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel(f"{lines[0].metric}: mean and standard deviation of {lines[0].repeats} repeats")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(path)


# Okabe and Ito's colours for ensembles, distinct to every eye; baselines are grey and told apart by markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREYS = ("#333333", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")


# ---------------------------------------------------------------------------------------------------------- arguments


def _plan(
    learner: Any,
    aggregator: Any,
    X: Any,
    y: Any,
    sites: Any,
    public: Any,
    test: Any,
    seed: int | None,
    epsilon: Any,
    sizes: Sequence[int] | None,
    label_skew: float | None,
    feature_skew: float | None,
) -> _Plan:
    learners, aggregators = _named("learner", learner), _named("aggregator", aggregator)
    kinds = {is_classifier(one) for one in learners.values()}
    for name, one in learners.items():
        facts = one.get_params(deep=False) if hasattr(one, "get_params") else {}
        fits = {"epsilon", "noise"} <= set(facts) and facts["noise"] is None and facts.get("unit") != "person"
        _require("learner", f"{name}={one!r}", fits and len(kinds) == 1, f"{_LEARNER}, classifiers or regressors")
    for name, one in aggregators.items():
        fits = hasattr(one, "combine") and getattr(one, "noise", None) is None and name not in TITLES
        _require("aggregator", f"{name}={one!r}", fits, "an aggregator without noise of its own")
    ids = None
    if isinstance(sites, str):
        _require("sites", sites, sites in getattr(X, "columns", ()), "a number, an id per record, or a column of X")
        ids, X = X[sites], X[[name for name in X.columns if name != sites]]
    elif not isinstance(sites, int | np.integer | float):
        ids = sites
    X, y = check_X_y(X, y, accept_sparse="csr", dtype=np.float64, y_numeric=False in kinds)
    if isinstance(test, tuple) and len(test) == 2:
        X_test, y_test = check_X_y(*test, accept_sparse="csr", dtype=np.float64, y_numeric=False in kinds)
        _require("test", "another table", X_test.shape[1] == X.shape[1], "like X in its features")
        test = (X_test, y_test)
    else:
        _require("test", test, isinstance(test, float) and 0 < test < 1, "a share in (0, 1), or (X, y)")
    fits = public is None or isinstance(public, Public) or _whole(public)
    _require("public", public, fits, "Public records, a number > 0 of them, or None")
    if isinstance(public, Public):
        _require("public", "another table", public.X.shape[1] == X.shape[1], "like X in its features")
    if ids is not None:
        _require("sites", sites, len(ids) == len(y), "a number > 0, an id per record, or a column of X")
        given = (sizes, label_skew, feature_skew)
        _require("sizes, label_skew, feature_skew", given, given == (None,) * 3, "left out if sites are given by id")
        found = split_sites(len(y), ids)
        ids = np.concatenate([np.full(len(rows), site) for site, rows in enumerate(found)])[
            np.argsort(np.concatenate(found))
        ]
    else:
        _require("sites", sites, _whole(sites), "a number > 0, an id per record, or a column of X")
    if sizes is not None:
        _require("sizes", sizes, len(sizes) > 0 and all(map(_whole, sizes)), "a list of whole numbers > 0")
    both = label_skew is not None and feature_skew is not None
    _require("feature_skew", feature_skew, not both, "left out if label_skew is given")
    _require("label_skew", label_skew, label_skew is None or (label_skew > 0 and kinds == {True}), "> 0, for classes")
    _require("feature_skew", feature_skew, feature_skew is None or 0 <= feature_skew <= 1, "in [0, 1]")
    n_sites = int(ids.max() + 1) if ids is not None else len(sizes) if sizes is not None else int(sites)
    drawn = Noise(seed=seed).open(stream=2**32) if seed is None else None
    return _Plan(
        learners=learners,
        aggregators=aggregators,
        asked=_levels(epsilon, n_sites),
        X=X,
        y=y,
        ids=ids,
        n_sites=n_sites,
        sizes=None if sizes is None else tuple(sizes),
        public=public,
        test=test,
        label_skew=label_skew,
        feature_skew=feature_skew,
        seed=Noise(seed=seed).seed,
        split_seed=int(drawn.words(1)[0]) if drawn is not None else _derived(int(seed or 0), "split"),
        classes=np.unique(y) if kinds == {True} else None,
    )


_LEARNER = "this project's learners with unit='record' and no noise of their own (pass seed= to simulate instead)"


def _named(what: str, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        found = {str(name): one for name, one in given.items()}
    else:
        listed = list(given) if isinstance(given, list | tuple) else [given]
        found = {type(one).__name__: one for one in listed}
        _require(what, given, len(found) == len(listed), "a dictionary by name where two are of one kind")
    _require(what, given, len(found) > 0, "at least one")
    return found


def _levels(epsilon: Any, n_sites: int) -> dict[str, Any] | None:
    """Return levels of epsilon by name."""
    if epsilon is None:
        return None
    listed = epsilon if isinstance(epsilon, list | tuple | Mapping | np.ndarray) else [epsilon]
    found: dict[str, Any] = {}
    for one in listed:
        level = np.asarray(listed[one] if isinstance(listed, Mapping) else one, dtype=float)
        name = f"{level:g}" if level.ndim == 0 else f"{level.min():g} to {level.max():g}"
        name = str(one) if isinstance(listed, Mapping) else name
        fits = level.shape in ((), (n_sites,)) and bool((level > 0).all()) and name not in found
        _require("epsilon", epsilon, fits, f"levels > 0 of different names, each one number or {n_sites}, one per site")
        found[name] = level
    _require("epsilon", epsilon, len(found) > 0, "at least one level")
    return found


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) > 0


def _require(name: str, value: object, fits: bool, must: str) -> None:
    if not fits:
        raise SettingsError(f"The {name!r} parameter of simulate must be {must}. Got {reprlib.repr(value)} instead.")
