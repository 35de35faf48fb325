"""Play a whole collaboration through on public records: what joining would bring, at which epsilon, and to whom.

The flow, top to bottom: `simulate` checks its arguments and hands out cells (one repeat of one
learner); `_Plan.cut` divides the records of a repeat into test, public and sites; `_Cell` trains at
every site, pools, combines by every aggregator and measures all of it on the same test records;
`report.Report` gathers the rows. `sweep.py` runs cells, wherever that is, and keeps what is done.

Within a repeat all methods see the same division, and all aggregators the same local models, so
that differences between them are paired. With a seed every division and every draw of noise follows
from the seed and the names of the cell, whatever the backend and whichever cell is done first;
without one, noise is fresh from the operating system.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import reprlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import scipy
import sklearn
from numpy.typing import NDArray
from scipy import special, stats
from sklearn.base import clone, is_classifier
from sklearn.utils.validation import check_X_y

from consilience.aggregators.base import Aggregator
from consilience.aggregators.distillation.tally import Question, Tally
from consilience.aggregators.members import as_members
from consilience.errors import SettingsError
from consilience.evaluation.baselines import (
    BEST,
    EXACT,
    LOCAL,
    OWN,
    POOLED,
    PUBLIC,
    TITLES,
    public_only,
)
from consilience.evaluation.measures import main_metric, measures
from consilience.privacy.guarantee import Guarantee, Unit
from consilience.privacy.mechanisms import Noise, Source
from consilience.privacy.spending import void_by_seed
from consilience.progress import Progress
from consilience.simulation.many import can_fit_many, fit_many, measure_many
from consilience.simulation.report import Report, Row, Summary
from consilience.simulation.sweep import Store, check_backend, sweep
from consilience.tables.groups import split_sites
from consilience.tables.public import Public

__all__ = [
    "BEST",
    "EXACT",
    "LOCAL",
    "OWN",
    "POOLED",
    "PUBLIC",
    "TITLES",
    "Report",
    "Row",
    "Summary",
    "simulate",
]

Array = NDArray[Any]

_ORDER = {method: place for place, method in enumerate(TITLES)}
# with more, a report has no row for each single site, and of single sites what can be counted
SITES_LISTED = 100
SITES_TOGETHER, RECORDS_TOGETHER = (
    8,
    4096,
)  # from which on, and up to which, exact linear models are trained together


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
    prepare: Any = None,
    prepare_on: str = "public",
    draws: int = 1,
    baselines: Collection[str] | None = None,
    n_jobs: int | None = None,
    backend: str | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Simulate sites that train privately and join, beside the honest baselines, and report what each way achieves.

    Parameters
    ----------
    learner, aggregator
        One, a list, or a dictionary by name; all are tried with all. No aggregator at all: only the
        `baselines` asked for are computed.
    X, y
        Public records, encoded as a site would encode its own. A data frame if `sites` names one of
        its columns.
    sites, sizes
        The number of sites of equal size; or the site of each record, as an array or the name of a
        column of `X`. `sizes` lists the sites' numbers of records instead; what is over is left
        out.
    public
        Public records for the aggregators: `Public`, or how many are cut from `X`. Without, there
        is no public-only baseline either.
    test
        The share of `X` to test on, or separate (X, y).
    repeats, draws
        How often records are divided anew, and how often noise is drawn on each division, for which
        exact models are trained once; what draws no noise is there once. Summaries average the
        draws of a repeat and spread over repeats.
    seed
        Makes the report repeatable, and voids its guarantees.
    epsilon
        Replaces the learner's own: a number; a list of levels to try, each a number or one number
        per site; or a dictionary of levels by name. An aggregator that has an epsilon gets the
        level's instead, in its own unit.
    label_skew
        Above 0: a site's share of a class is a gamma variable with this shape, scaled to the sites'
        sizes. At 0.1 a site has few classes, at 100 about the same as all others.
    feature_skew
        Between 0 (none) and 1 (records are sorted along a random direction and sites are
        consecutive).
    prepare, prepare_on
        What is done to all features, learned anew in each repeat: a scikit-learn transformer, or a
        function that takes the records to learn from and returns a function of features. It learns
        from the ``"public"`` records, or, as papers did, from ``"train"``, all records of `X` that
        are not tested on, which no guarantee covers.
    baselines
        Which to compute, of those in `TITLES`. By default all that answer the same question: a site
        alone and private only if some aggregator takes private members, the private pool only if
        some aggregator hides records and not whole sites. What nobody needs is not trained.
    n_jobs
        As joblib takes it; with a `backend` and none given, one for each core.
    backend
        ``"loky"``, ``"threading"``, ``"ray"`` or ``"dask"``, a local one started if none is
        running; None leaves the choice to ``joblib.parallel_config`` around the call. The report
        does not depend on it.
    checkpoint
        A folder in which each cell, one repeat of one learner, is stored when it is done; the same
        call then goes on where the last one was stopped. A cell is used again only if everything
        that determines it is the same, records, settings and this package's own code included;
        functions that `prepare` calls are not looked into. Needs a `seed`: fresh noise is not to be
        kept.
    progress
        Called with (cells done, cells). Without, a bar is shown if standard error is a terminal.

    Exact linear models of many sites are trained together, as exactly as one by one. Of more than
    100 sites, single ones are measured by what can be counted (error, F1). Methods also have
    "bytes", the arrays that a site hands over, and in `Report.timings` "seconds".

    Privacy
    -------
    None: every repeat and level trains again, and errors are shown, so records must be public. Each
    ensemble alone has what `Report.guarantees` states, void with a seed.
    """
    started = time.perf_counter()
    plan = _plan(
        learner,
        aggregator,
        X,
        y,
        sites,
        public,
        test,
        seed,
        epsilon,
        sizes,
        label_skew,
        feature_skew,
        prepare=prepare,
        prepare_on=prepare_on,
        draws=draws,
        baselines=baselines,
    )
    _require("repeats", repeats, _whole(repeats), "a whole number > 0")
    _require(
        "n_jobs",
        n_jobs,
        n_jobs is None or n_jobs != 0,
        "None or a number other than 0, as joblib takes it",
    )
    check_backend(backend)
    store = None
    if checkpoint is not None:
        _require(
            "seed",
            seed,
            seed is not None,
            "given with a checkpoint: without one, noise is fresh and not kept",
        )
        store, plan = Store(Path(checkpoint)), replace(plan, digests=plan.described())
    cells = [(repeat, name) for repeat in range(repeats) for name in plan.learners]
    first = plan.cut(0)  # so that what cannot be divided fails before anything is trained
    found = sweep(plan, cells, n_jobs=n_jobs, backend=backend, store=store, progress=progress)
    rows: dict[str, list[Row]] = {
        kind: [Row(*row) for cell in cells for row in found[cell][kind]]
        for kind in ("rows", "timings")
    }
    stated = [(cell, one) for cell in cells for one in found[cell]["guarantees"]]
    guarantees = {
        (name, level, method): Guarantee.from_dict(one)
        for (_, name), (level, method, one) in stated
    }
    return Report(
        tuple(rows["rows"]),
        guarantees,
        plan.facts(first, repeats),
        plan.guarantee(guarantees),
        time.perf_counter() - started,
        tuple(rows["timings"]),
    )


# ------------------------------------------------------------------------------------------------- dividing the records


@dataclass(frozen=True)
class Cut:
    """One division of the records, prepared: what is tested on, what is public, and the rows of `X` at each site."""

    X_test: Any
    y_test: Array
    public: Public | None
    sites: tuple[Array, ...]
    X: Any = field(repr=False)


@dataclass(frozen=True)
class _Plan:
    """The checked arguments: all that a worker needs to run any cell."""

    learners: Mapping[str, Any]
    aggregators: Mapping[str, Aggregator]
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
    prepare: Any
    prepare_on: str
    draws: int
    baselines: frozenset[str]
    digests: Mapping[str, str] = field(default_factory=dict)  # by learner, for a checkpoint
    held: dict[int, Cut] = field(
        default_factory=dict
    )  # the last division, which the next learner needs again

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"held": {}}  # a worker divides for itself

    def run(self, cell: tuple[int, str], n_threads: int) -> dict[str, list[Any]]:
        """Run one cell; the answer is plain values, the same whether it comes from a worker or from a file."""
        return _Cell(self, *cell, n_threads).run()

    def key(self, cell: tuple[int, str]) -> str:
        """Return a digest of everything that determines one cell, and of nothing that does not."""
        repeat, name = cell
        return hashlib.sha256(f"{self.digests[name]} {repeat}".encode()).hexdigest()

    def described(self) -> dict[str, str]:
        """Return a digest of all arguments for each learner, and of the code that will work on them."""
        shared = [
            (one.name, getattr(self, one.name)) for one in fields(self) if one.name not in _APART
        ]
        ordered = [
            list(self.aggregators),
            sorted(self.baselines),
        ]  # the order of a set is another in every process
        prepare = self.prepare
        if inspect.isfunction(prepare):
            known = inspect.getclosurevars(prepare).nonlocals
            prepare = (
                prepare.__module__,
                prepare.__qualname__,
                prepare.__defaults__,
                known,
                _code(prepare.__code__),
            )
        versions = (np.__version__, scipy.__version__, sklearn.__version__, code_digest())
        try:
            common = joblib.hash([shared, ordered, prepare, versions], hash_name="sha1")
            return {
                name: joblib.hash([common, name, one], hash_name="sha1")
                for name, one in self.learners.items()
            }
        except (
            Exception
        ):  # of any kind: whatever cannot be pickled says so in its own way, and shows all it holds
            raise SettingsError(
                "A checkpoint was asked for, but a learner, an aggregator or 'prepare' cannot be "
                "told from others: it holds what cannot be pickled. Nothing was trained. Use a "
                "function of a module, or no checkpoint."
            ) from None

    def cut(self, repeat: int) -> Cut:
        """Return the division of one repeat: the same for all methods."""
        found = self.held.get(repeat)
        if found is None:
            found = self._cut(repeat)
            self.held.clear()
            self.held[repeat] = found
        return found

    def _cut(self, repeat: int) -> Cut:
        """Divide the records by slot, never by content unless skew is asked for."""
        source = Noise(seed=self.split_seed).open(stream=repeat)
        order = source.permutation(len(self.y))
        n_test = 0 if isinstance(self.test, tuple) else round(self.test * len(order))
        n_public = 0 if self.public is None or isinstance(self.public, Public) else int(self.public)
        tested, shared, rest = np.split(order, [n_test, n_test + n_public])
        sites = tuple(np.sort(rows) for rows in self._sites(rest, source))
        X, public, change = self.X, self.public, None
        if self.prepare is not None:
            seen = public.X if isinstance(public, Public) else X[shared]
            change = self._learned(
                seen if self.prepare_on == "public" else X[np.sort(order[n_test:])], repeat
            )
            X = change(X)
        if isinstance(public, Public):
            public = public if change is None else Public(change(public.X), public.y)
        else:
            public = Public(X[shared], self.y[shared]) if n_public else None
        if not isinstance(self.test, tuple):
            return Cut(X[tested], self.y[tested], public, sites, X)
        X_test, y_test = self.test
        return Cut(
            X_test if change is None else change(X_test), np.asarray(y_test), public, sites, X
        )

    def _learned(self, seen: Any, repeat: int) -> Any:
        """Return what `prepare` makes of the records it may learn from: a function of features."""
        if not hasattr(self.prepare, "transform"):
            return self.prepare(seen)
        made = clone(self.prepare)
        loose = [
            name
            for name, value in made.get_params().items()
            if name.endswith("random_state") and value is None
        ]
        drawn = (
            _derived(self.split_seed, repeat, "prepare") % 2**32
        )  # public, and the same in every run
        return made.set_params(**dict.fromkeys(loose, drawn)).fit(seen).transform

    def _sites(self, rest: Array, source: Source) -> Sequence[Array]:
        if self.ids is not None:
            return [rest[self.ids[rest] == site] for site in range(self.n_sites)]
        sizes = self.sizes or [len(part) for part in np.array_split(rest, self.n_sites)]
        if sum(sizes) > len(rest) or min(sizes) < 1:
            raise SettingsError(
                f"{len(sizes)} sites of {sum(sizes)} records in all were asked for, but "
                f"{len(rest)} are left after cutting test and public records. Nothing was "
                "trained. Ask for fewer, at least one record per site."
            )
        if self.label_skew is not None:
            unused = [len(rest) - sum(sizes)] if sum(sizes) < len(rest) else []
            return _skew_labels(rest, self.y[rest], [*sizes, *unused], self.label_skew, source)[
                : len(sizes)
            ]
        if self.feature_skew is not None:
            along = np.asarray(self.X[rest] @ source.normal(self.X.shape[1]))
            score = self.feature_skew * stats.rankdata(along) / len(rest)
            rest = rest[
                np.argsort(
                    score + (1 - self.feature_skew) * source.uniform(len(rest)), kind="stable"
                )
            ]
        return np.split(rest, np.cumsum(sizes))[:-1]

    def levels(self, name: str) -> dict[str, tuple[float, ...]]:
        """Return the epsilon of each site at each level of this learner."""
        own = self.learners[name].epsilon
        asked = {f"{own:g}": own} if self.asked is None else self.asked
        return {
            label: tuple(np.broadcast_to(one, self.n_sites).tolist())
            for label, one in asked.items()
        }

    def noise(self, *names: Any) -> Noise | None:
        """Return the noise of one draw in one cell: a seed of its own if the report is to repeat."""
        return None if self.seed is None else Noise(seed=_derived(self.seed, *names))

    def make(
        self,
        name: str,
        epsilon: float,
        noise: Noise | None = None,
        *,
        size: int | None = None,
        who: Any,
    ) -> Any:
        """Return an untrained learner that knows what everybody knows: `size` is the public guess of its records.

        Public randomness, such as which features a tree may split, is another one for each model of
        a repeat; an exact forest draws too, which tree a record is for.
        """
        made = clone(self.learners[name])
        known = made.get_params(deep=False)
        noise = noise if math.isfinite(epsilon) else self.noise(name, *who, "exact")
        facts: dict[str, Any] = {"epsilon": epsilon, "noise": noise}
        if known.get("classes", ()) is None:
            facts["classes"] = self.classes
        if known.get("public_size") is not None and size is not None:
            facts["public_size"] = size
        if known.get("random_state", 0) is None:
            facts["random_state"] = _derived(self.split_seed, name, *who) % 2**32
        return made.set_params(**facts)

    def aggregator(
        self, name: str, epsilons: Sequence[float], cell: Any, draw: Sequence[str]
    ) -> Aggregator:
        """Return an aggregator with what the level promises, and noise and public randomness of its own."""
        made = self.aggregators[name]
        if self.asked is not None:
            made = made.with_budget(epsilons)
        # Folds and the like are public, and the same in every run.
        public = _derived(self.split_seed, *cell, name) % 2**32
        return made.with_noise(self.noise(*cell, *draw, name), public)

    def guarantee(self, found: Mapping[Any, Guarantee]) -> Guarantee | None:
        """Return the weakest guarantee of any private result, or that there is none."""
        if self.seed is not None:
            some = next(iter(self.learners.values()))
            relation = getattr(some, "neighbours", "replace-one")
            return void_by_seed(unit=getattr(some, "unit", "record"), neighbours=relation)
        return max(found.values(), key=lambda one: (not one.holds, one.epsilon), default=None)

    def facts(self, cut: Cut, repeats: int) -> dict[str, Any]:
        """Return what a reader of the report must know."""
        return {
            "records": len(self.y),
            "features": int(cut.X.shape[1]),
            "sites": self.n_sites,
            "sizes": [len(rows) for rows in cut.sites],
            "public": 0 if cut.public is None else int(cut.public.X.shape[0]),
            "labelled": cut.public is not None and cut.public.y is not None,
            "test": len(cut.y_test),
            "resampled": not isinstance(self.test, tuple),
            "repeats": repeats,
            "draws": self.draws,
            "seed": self.seed,
            "skew": {"label": self.label_skew, "feature": self.feature_skew},
            "prepared": None if self.prepare is None else self.prepare_on,
        }


_APART = (
    "learners",
    "baselines",
    "prepare",
    "digests",
    "held",
)  # of a plan: what is no part of its digest as it is


def _skew_labels(
    rest: Array, labels: Array, sizes: Sequence[int], shape: float, source: Source
) -> list[Array]:
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

Found = dict[tuple[str, str], dict[str, float]]  # by (kind, method): metrics


class _Cell:
    """One repeat of one learner: train each model once, combine in every way, measure all on the same records."""

    def __init__(self, plan: _Plan, repeat: int, name: str, n_threads: int) -> None:
        self.plan, self.repeat, self.name, self.n_threads = plan, repeat, name, n_threads
        self.cut = plan.cut(repeat)
        self.held = [site for site, rows in enumerate(self.cut.sites) if len(rows)]
        self.sites = [self.cut.sites[site] for site in self.held]
        self.everyone = np.concatenate(self.sites)
        self.seconds: dict[str, float] = {}  # of the last model of each method
        self.votes: dict[Question, Tally] = {}

    def run(self) -> dict[str, list[Any]]:
        """Return rows, timings and guarantees, as plain values."""
        answer: dict[str, list[Any]] = {"rows": [], "timings": [], "guarantees": []}
        exact = self._without_noise()
        for level, epsilons in self.plan.levels(self.name).items():
            for draw in range(self.plan.draws if self._draws_noise(epsilons) else 1):
                found, stated = self._with_noise(
                    level, [epsilons[site] for site in self.held], draw
                )
                # Baselines first, in one order everywhere; what draws no noise is there once.
                every = found if draw else {**exact, **found}
                for kind, method in sorted(every, key=lambda key: _ORDER.get(key[1], len(_ORDER))):
                    facts = (
                        self.repeat,
                        self.name,
                        level,
                        min(epsilons),
                        max(epsilons),
                        kind,
                        method,
                    )
                    answer["rows"] += [[*facts, *one, draw] for one in every[kind, method].items()]
                    if method in self.seconds:
                        answer["timings"].append([*facts, "seconds", self.seconds[method], draw])
            answer["guarantees"] += [
                [level, method, one.as_dict()] for method, one in stated.items()
            ]
        return answer

    def _draws_noise(self, epsilons: Sequence[float]) -> bool:
        """Tell whether anything at this level comes out differently when it is drawn again."""
        made = [self.plan.aggregator(method, epsilons, (), ()) for method in self.plan.aggregators]
        return bool(np.isfinite(epsilons).any()) or any(each.draws_noise for each in made)

    def _without_noise(self) -> Found:
        """Return the baselines that are the same at every level."""
        found: Found = {}
        wanted, public = self.plan.baselines, self.cut.public
        if OWN in wanted:
            found["local", OWN] = _mean(self.own)
        if EXACT in wanted:
            with self._timed(EXACT):
                pooled = self._pooled(math.inf, None)
            found["global", EXACT] = self._measured(pooled)
        if PUBLIC in wanted and public is not None and public.y is not None:
            with self._timed(PUBLIC):
                size, who = len(public.y), (self.repeat, "public")
                made = self.plan.make(self.name, math.inf, size=size, who=who)
                alone = public_only(made, public)
            found["public", PUBLIC] = self._measured(alone)
        return found

    def _with_noise(
        self, level: str, epsilons: list[float], draw: int
    ) -> tuple[Found, dict[str, Guarantee]]:
        """Return what depends on the level, and what each of it guarantees."""
        plan, cell, drawn = (
            self.plan,
            (self.repeat, self.name, level),
            [f"draw-{draw}"] if draw else [],
        )
        found: Found = {}
        stated: dict[str, Guarantee] = {}
        alone: list[dict[str, float]] = []
        members: list[Any] = []
        exact = [each.needs_exact_members for each in plan.aggregators.values()]
        if plan.baselines & {LOCAL, BEST} or not all(exact):
            members = self._members(epsilons, [(*cell, *drawn, site) for site in self.held])
        if plan.baselines & {LOCAL, BEST}:
            alone = self._each(members)
            best = min(alone, key=lambda one: one[main_metric(one)])
            both = {LOCAL: _mean(alone), BEST: best}
            found |= {
                ("local", method): both[method]
                for method in (LOCAL, BEST)
                if method in plan.baselines
            }
        if POOLED in plan.baselines:
            with self._timed(POOLED):  # a record keeps in the pool what its site was promised
                pooled = self._pooled(min(epsilons), plan.noise(*cell, *drawn, "pool"))
            found["global", POOLED], stated[POOLED] = self._measured(pooled), pooled.guarantee_
        sent = _bytes(members)
        for method in plan.aggregators:
            made = plan.aggregator(method, epsilons, cell, drawn)
            trusted = plan.aggregators[method].needs_exact_members
            handed_over = self.read if trusted else members
            with self._timed(method):
                asked = self._votes(made) if trusted and made.asks_votes else handed_over
                ensemble = made.combine(asked, public=self.cut.public)
            found["distributed", method] = self._joined(ensemble, alone)
            found["distributed", method]["bytes"] = self.exact_bytes if trusted else sent
            if (one := getattr(ensemble, "guarantee", None)) is not None:
                stated[method] = one
        if len(self.held) <= SITES_LISTED:
            for site, one in zip(self.held, alone, strict=False):
                found["site", f"site-{site + 1:03}"] = {main_metric(one): one[main_metric(one)]}
        return found, stated

    def _members(self, epsilons: list[float], names: list[Any]) -> list[Any]:
        """Return the sites' models at one level, the noise of each by its name."""
        if np.isinf(epsilons).all():
            exact, self.seconds[LOCAL] = self.exact, self.seconds[OWN]
            return exact
        with self._timed(LOCAL, len(self.held)):
            return [
                self._fit(epsilon, rows, self.plan.noise(*name), name[-1])
                for epsilon, rows, name in zip(epsilons, self.sites, names, strict=True)
            ]

    def _joined(self, ensemble: Any, alone: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Measure an ensemble: also the share of sites that it serves better than what they could do alone."""
        found = self._measured(ensemble)
        own = self.own if OWN in self.plan.baselines else ()
        for metric, others in (("helped", alone), ("helped_exact", own)):
            if others:
                found[metric] = float(
                    np.mean([found[main_metric(one)] < one[main_metric(one)] for one in others])
                )
        return found

    @cached_property
    def exact(self) -> list[Any]:
        """The sites' exact models, trained once for all levels and draws."""
        made = self.plan.make(self.name, math.inf, who=())
        with self._timed(OWN, len(self.held)):
            small = max(map(len, self.sites)) <= RECORDS_TOGETHER
            if len(self.held) >= SITES_TOGETHER and small and can_fit_many(made):
                return fit_many(made, self.cut.X, self.plan.y, self.sites, self.n_threads)
            return [
                self._fit(math.inf, rows, None, site)
                for site, rows in zip(self.held, self.sites, strict=True)
            ]

    @cached_property
    def read(self) -> list[Any]:
        """The exact models as aggregators read them: of thousands, reading takes longer than combining."""
        return list(as_members(self.exact))

    @cached_property
    def exact_bytes(self) -> float:
        """How much a site with an exact model hands over."""
        return _bytes(self.exact)

    @cached_property
    def own(self) -> list[dict[str, float]]:
        """What each site's exact model is worth."""
        return self._each(self.exact)

    def _each(self, models: Sequence[Any]) -> list[dict[str, float]]:
        if len(models) > SITES_LISTED and can_fit_many(models[0]):
            return measure_many(models, self.cut.X_test, self.cut.y_test, self.n_threads)
        return [self._measured(model) for model in models]

    def _measured(self, model: Any) -> dict[str, float]:
        return measures(model, self.cut.X_test, self.cut.y_test)

    def _fit(
        self, epsilon: float, rows: Array, noise: Noise | None, who: Any, size: int | None = None
    ) -> Any:
        made = self.plan.make(self.name, epsilon, noise, size=size, who=(self.repeat, who))
        return made.fit(self.cut.X[rows], self.plan.y[rows])

    def _pooled(self, epsilon: float, noise: Noise | None) -> Any:
        guess = getattr(
            self.plan.learners[self.name], "public_size", None
        )  # of one site: it grows with their number
        return self._fit(epsilon, self.everyone, noise, "pool", guess and guess * len(self.held))

    def _votes(self, made: Aggregator) -> Any:
        """Count what exact members say about public records, once for all levels, draws and aggregators that ask."""
        public = self.cut.public
        question = None if public is None else made.question(public)
        if public is None or question is None:
            return self.exact  # the aggregator says what is missing
        if question not in self.votes:
            self.votes[question] = question.ask(self.read, public)
        return self.votes[question]

    @contextmanager
    def _timed(self, method: str, n_models: int = 1) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[method] = (time.perf_counter() - begun) / n_models


def _bytes(members: Sequence[Any]) -> float:
    """Return the size of the arrays that a site hands over, on average."""
    sizes = [sum(part.nbytes for part in one.released_state().values()) for one in members]
    return float(np.mean(sizes)) if sizes else 0.0


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    common = [metric for metric in found[0] if all(metric in one for one in found)]
    return {metric: float(np.mean([one[metric] for one in found])) for metric in common}


def _derived(seed: int, *names: Any) -> int:
    """Return a 256-bit seed that is another one for each cell and draw, and the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest(), "little")


def _code(code: Any) -> tuple[Any, ...]:
    """Return what a function does, in terms that are the same in every process."""
    return (
        code.co_code,
        code.co_names,
        [_code(one) if inspect.iscode(one) else repr(one) for one in code.co_consts],
    )


# Whatever can change a number; sweep.py and report.py only carry it.
CODE = (
    "aggregators",
    "evaluation",
    "learners",
    "privacy",
    "simulation/many.py",
    "simulation/simulate.py",
    "tables",
)


@cache  # the code that runs is the one that was loaded, whatever became of its files since
def code_digest() -> str:
    """Return a digest of the code that a cell runs through: other code, other cell.

    Comments, docstrings and layout change no number, so they are not part of it.
    """
    here = Path(__file__).parents[1]
    files = sorted(
        {
            file
            for name in CODE
            for file in (*here.glob(name), *here.glob(f"{name}/**/*.py"))
            if file.is_file()
        }
    )
    return hashlib.sha256(
        "\0".join(statements_of(file.read_text(encoding="utf-8")) for file in files).encode()
    ).hexdigest()


def statements_of(source: str) -> str:
    """Return what Python source does, without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body[: ast.get_docstring(node, clean=False) is not None] = []
    return ast.dump(tree)


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
    *,
    prepare: Any = None,
    prepare_on: str = "public",
    draws: int = 1,
    baselines: Collection[str] | None = None,
) -> _Plan:
    learners, aggregators = _named("learner", learner), _named("aggregator", aggregator)
    _require("learner", learner, len(learners) > 0, "at least one")
    _require(
        "aggregator",
        aggregator,
        bool(aggregators or baselines),
        "at least one, unless baselines are asked for",
    )
    kinds = {is_classifier(one) for one in learners.values()}
    for name, one in learners.items():
        facts = one.get_params(deep=False) if hasattr(one, "get_params") else {}
        fits = (
            {"epsilon", "noise"} <= set(facts)
            and facts["noise"] is None
            and facts.get("unit") != "person"
        )
        _require(
            "learner",
            f"{name}={one!r}",
            fits and len(kinds) == 1,
            f"{_LEARNER}, classifiers or regressors",
        )
    for name, one in aggregators.items():
        fits = isinstance(one, Aggregator) and name not in TITLES
        fits = fits and getattr(one, "noise", None) is None
        _require("aggregator", f"{name}={one!r}", fits, "an aggregator without noise of its own")
    ids = None
    if isinstance(sites, str):
        _require(
            "sites",
            sites,
            sites in getattr(X, "columns", ()),
            "a number, an id per record, or a column of X",
        )
        ids, X = X[sites], X[[name for name in X.columns if name != sites]]
    elif not isinstance(sites, int | np.integer | float):
        ids = sites
    X, y = check_X_y(X, y, accept_sparse="csr", dtype=np.float64, y_numeric=False in kinds)
    if isinstance(test, tuple) and len(test) == 2:
        X_test, y_test = check_X_y(
            *test, accept_sparse="csr", dtype=np.float64, y_numeric=False in kinds
        )
        _require("test", "another table", X_test.shape[1] == X.shape[1], "like X in its features")
        test = (X_test, y_test)
    else:
        _require(
            "test", test, isinstance(test, float) and 0 < test < 1, "a share in (0, 1), or (X, y)"
        )
    fits = public is None or isinstance(public, Public) or _whole(public)
    _require("public", public, fits, "Public records, a number > 0 of them, or None")
    if isinstance(public, Public):
        _require(
            "public", "another table", public.X.shape[1] == X.shape[1], "like X in its features"
        )
    if ids is not None:
        _require(
            "sites", sites, len(ids) == len(y), "a number > 0, an id per record, or a column of X"
        )
        given = (sizes, label_skew, feature_skew)
        _require(
            "sizes, label_skew, feature_skew",
            given,
            given == (None,) * 3,
            "left out if sites are given by id",
        )
        found = split_sites(len(y), ids)
        ids = np.concatenate([np.full(len(rows), site) for site, rows in enumerate(found)])[
            np.argsort(np.concatenate(found))
        ]
    else:
        _require("sites", sites, _whole(sites), "a number > 0, an id per record, or a column of X")
    if sizes is not None:
        _require(
            "sizes",
            sizes,
            len(sizes) > 0 and all(map(_whole, sizes)),
            "a list of whole numbers > 0",
        )
    both = label_skew is not None and feature_skew is not None
    _require("feature_skew", feature_skew, not both, "left out if label_skew is given")
    _require(
        "label_skew",
        label_skew,
        label_skew is None or (label_skew > 0 and kinds == {True}),
        "> 0, for classes",
    )
    _require(
        "feature_skew", feature_skew, feature_skew is None or 0 <= feature_skew <= 1, "in [0, 1]"
    )
    _require("draws", draws, _whole(draws), "a whole number > 0")
    fits = (
        prepare is None
        or callable(prepare)
        or (hasattr(prepare, "fit") and hasattr(prepare, "transform"))
    )
    _require("prepare", prepare, fits, "a transformer, or a function that returns a function")
    _require("prepare_on", prepare_on, prepare_on in ("public", "train"), "'public' or 'train'")
    fits = prepare is None or prepare_on == "train" or public is not None
    _require("public", public, fits, "given for prepare to learn from, or prepare_on='train'")
    if baselines is None:
        baselines = set(TITLES)
        every = aggregators.values()
        baselines -= {LOCAL, BEST} if all(one.needs_exact_members for one in every) else set()
        hide_sites = [one.draws_noise and one.hidden_unit is Unit.SITE for one in every]
        baselines -= {POOLED} if all(hide_sites) else set()
    _require("baselines", baselines, set(baselines) <= set(TITLES), f"of {list(TITLES)}")
    n_sites = (
        int(ids.max() + 1) if ids is not None else len(sizes) if sizes is not None else int(sites)
    )
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
        split_seed=int(drawn.words(1)[0])
        if drawn is not None
        else _derived(int(seed or 0), "split"),
        classes=np.unique(y) if kinds == {True} else None,
        prepare=prepare,
        prepare_on=prepare_on,
        draws=draws,
        baselines=frozenset(baselines),
    )


_LEARNER = "this project's learners with unit='record' and no noise of their own (pass seed= to simulate instead)"


def _named(what: str, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        found = {str(name): one for name, one in given.items()}
    else:
        listed = list(given) if isinstance(given, list | tuple) else [given]
        found = {type(one).__name__: one for one in listed}
        _require(
            what, given, len(found) == len(listed), "a dictionary by name where two are of one kind"
        )
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
        _require(
            "epsilon",
            epsilon,
            fits,
            f"levels > 0 of different names, each one number or {n_sites}, one per site",
        )
        found[name] = level
    _require("epsilon", epsilon, len(found) > 0, "at least one level")
    return found


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) > 0


def _require(name: str, value: object, fits: bool, must: str) -> None:
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of simulate must be {must}. Got {reprlib.repr(value)} instead."
        )
