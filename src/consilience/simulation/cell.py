"""The cells of a simulation: one cell is one repeat of one learner.

A `Setup` holds the checked arguments, and makes learners and aggregators for its cells. Within a
`Cell` each model is trained once, combined in every way, and measured on the same test records, so
that all differences between methods are paired.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import joblib
import numpy as np
import scipy
import sklearn
from numpy.typing import NDArray
from sklearn.base import clone, is_classifier

from consilience.aggregators.base import Aggregator, Ensemble
from consilience.aggregators.distillation.tally import Question, Tally
from consilience.aggregators.members import Member, as_members
from consilience.errors import SettingsError
from consilience.evaluation.adaptation import ADAPTED, RELEASE, adapt
from consilience.evaluation.adaptation import OWN as OWN_HERE
from consilience.evaluation.baselines import (
    BEST,
    EXACT,
    GUESS,
    LOCAL,
    OWN,
    POOLED,
    PUBLIC,
    TITLES,
    guess,
    public_only,
)
from consilience.evaluation.measures import ERROR, Metric, Predictor, measures
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.mechanisms import Noise
from consilience.simulation.digest import code_digest, describe_function
from consilience.simulation.division import Cut, Divider, derive_seed
from consilience.simulation.report import name_at_sites
from consilience.simulation.together import Learner, fit_together, measure_together
from consilience.statistics.base import Statistic
from consilience.tables.public import Public

Array = NDArray[Any]
Metrics = dict[str, float]
Given = Sequence[Learner] | Sequence[Member] | Tally  # what an aggregator combines
Found = dict[tuple[str, str], Metrics]  # by (kind, method)

_ORDER = {method: place for place, method in enumerate(TITLES)}
SITES_LISTED = 100  # with more, single sites have no rows and are measured by what can be counted
# Exact linear models are trained together from so many sites on, each of at most so many records.
SITES_TOGETHER, RECORDS_TOGETHER = 8, 4096


@dataclass(frozen=True)
class Setup:
    """Divided records, and what is tried on them: all learners with all aggregators, at all levels.

    It is all that a worker needs to run any cell. With a seed, every draw of noise follows from the
    seed and the names of the cell, so results do not depend on the backend or on which cell is done
    first.
    """

    divider: Divider
    seed: int | None
    learners: Mapping[str, Learner]
    aggregators: Mapping[str, Aggregator]
    levels: Mapping[str, Array] | None  # epsilon by name; None: each learner's own
    baselines: frozenset[str]
    draws: int = 1
    adapting: int = 0  # sites of a repeat that adapt each release: the smallest and the largest
    gives_budget: bool = True  # whether aggregators with an epsilon get the level's
    metric: Metric = ERROR  # that methods are judged by
    digests: Mapping[str, str] = field(default_factory=dict)  # by learner, for a checkpoint
    held: dict[int, Cut] = field(default_factory=dict)  # the last cut, for the next learner

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"held": {}}  # a worker divides for itself

    def run(self, cell: tuple[int, str], n_threads: int) -> dict[str, list[Any]]:
        """Run one cell. The answer is plain values, as they are stored in a checkpoint."""
        return Cell(self, *cell, n_threads).run()

    def key(self, cell: tuple[int, str]) -> str:
        """Return a digest of everything that determines one cell, and of nothing that does not."""
        repeat, name = cell
        return hashlib.sha256(f"{self.digests[name]} {repeat}".encode()).hexdigest()

    def with_digests(self) -> Setup:
        """Return the setup with a digest of arguments and code for each learner."""
        divider = self.divider
        prepare: Any = divider.preparation
        if prepare is not None and inspect.isfunction(prepare.how):
            prepare = (prepare.learned_on, describe_function(prepare.how))
        shared = [
            [getattr(divider.records, part.name) for part in fields(divider.records)],
            [getattr(divider.division, part.name) for part in fields(divider.division)],
            [divider.ids, divider.split_seed, self.seed, prepare],
            [self.levels, self.draws, self.adapting, self.gives_budget, self.metric.name],
            # The order of aggregators is that of rows; the order of a set is no order.
            [dict(self.aggregators), list(self.aggregators), sorted(self.baselines)],
            [np.__version__, scipy.__version__, sklearn.__version__, code_digest()],
        ]
        try:
            common = joblib.hash(shared, hash_name="sha1")
            digests = {
                name: joblib.hash([common, name, learner], hash_name="sha1")
                for name, learner in self.learners.items()
            }
        except Exception:  # of any kind: what cannot be pickled says so in its own way
            raise SettingsError(
                "A checkpoint was asked for, but a learner, an aggregator or 'prepare' cannot be "
                "told from others: it holds what cannot be pickled. Nothing was trained. Use a "
                "function of a module, or no checkpoint."
            ) from None
        return replace(self, digests=digests)

    def cut(self, repeat: int) -> Cut:
        """Return the division of one repeat: the same for all methods."""
        cut = self.held.get(repeat)
        if cut is None:
            cut = self.divider.cut(repeat)
            self.held.clear()
            self.held[repeat] = cut
        return cut

    def epsilons(self, name: str) -> dict[str, tuple[float, ...]]:
        """Return the epsilon of each site at each level of this learner."""
        own = self.learners[name].total_epsilon
        levels = {f"{own:g}": np.asarray(own)} if self.levels is None else self.levels
        return {
            level: tuple(np.broadcast_to(epsilon, self.divider.n_sites).tolist())
            for level, epsilon in levels.items()
        }

    def ways(self, name: str) -> list[str]:
        """Return the aggregators that suit this learner; all if none does, so that one says why."""
        kind, settings = type(self.learners[name]), self.learners[name].get_params(deep=False)
        every = self.aggregators.items()
        return [way for way, made in every if made.problem_with(kind, settings) is None] or [
            *self.aggregators
        ]

    def noise(self, *names: object) -> Noise | None:
        """Return the noise of one draw: seeded by its names if the report is to repeat."""
        return None if self.seed is None else Noise(seed=derive_seed(self.seed, *names))

    def make(
        self,
        name: str,
        epsilon: float,
        noise: Noise | None = None,
        *,
        size: int | None = None,
        who: tuple[object, ...],
    ) -> Learner:
        """Return an untrained learner that knows the public facts.

        `size` is the public guess of its number of records. Public randomness, such as which
        features a tree may split, is another for each model of a repeat (`who`); an exact forest
        draws too, which tree a record is for.
        """
        made: Learner = clone(self.learners[name])
        if math.isinf(epsilon):
            made = made.without_tuning()  # an exact model needs no noisy choice, and all records
        known = made.get_params(deep=False)
        noise = noise if math.isfinite(epsilon) else self.noise(name, *who, "exact")
        facts: dict[str, Any] = {"noise": noise}
        if known.get("classes", ()) is None:
            facts["classes"] = np.unique(self.divider.records.y) if is_classifier(made) else None
        if known.get("public_size") is not None and size is not None:
            facts["public_size"] = size
        if known.get("random_state", 0) is None:
            facts["random_state"] = derive_seed(self.divider.split_seed, name, *who) % 2**32
        made.set_params(**facts)
        return made.set_budget(epsilon)

    def aggregator(
        self, name: str, epsilons: Sequence[float], cell: tuple[object, ...], draw: Sequence[str]
    ) -> Aggregator:
        """Return an aggregator with what the level promises and randomness of its own.

        Private aggregation records too are promised what the level promises to records.
        """
        made = self.aggregators[name]
        if self.levels is not None and self.gives_budget:
            made = made.with_budget(epsilons)
        # Folds and the like are public, and the same in every run.
        state = derive_seed(self.divider.split_seed, *cell, name) % 2**32
        return made.with_noise(self.noise(*cell, *draw, name), state)

    def facts(self, repeats: int) -> dict[str, Any]:
        """Return what a reader of the report must know."""
        cut, divider = self.cut(0), self.divider
        division, preparation = divider.division, divider.preparation
        return {
            "records": len(divider.records.y),
            "features": int(cut.X.shape[1]),
            "sites": divider.n_sites,
            "sizes": [len(rows) for rows in cut.sites],
            "public": 0 if cut.public is None else int(cut.public.X.shape[0]),
            "labelled": cut.public is not None and cut.public.y is not None,
            "test": len(cut.y_test),
            "resampled": not isinstance(division.test, tuple),
            "metric": self.metric.name,
            "adapting": self.adapting,
            "along": {
                name: learner.projection.describe()
                for name, learner in self.learners.items()
                if learner.projection is not None
            },
            "tuned": [
                learner.tuning.explain(name)
                for name, learner in self.learners.items()
                if learner.tuning is not None
            ],
            "repeats": repeats,
            "draws": self.draws,
            "seed": self.seed,
            "skew": {"label": division.label_skew, "feature": division.feature_skew},
            "prepared": None if preparation is None else preparation.learned_on,
        }


class Cell:
    """One repeat of one learner."""

    def __init__(self, setup: Setup, repeat: int, name: str, n_threads: int) -> None:
        self.setup, self.repeat, self.name, self.n_threads = setup, repeat, name, n_threads
        self.records = setup.divider.records
        self.cut = setup.cut(repeat)
        self.held = [site for site, rows in enumerate(self.cut.sites) if len(rows)]
        self.sites = [self.cut.sites[site] for site in self.held]
        self.everyone = np.concatenate(self.sites)
        self.seconds: dict[str, float] = {}  # of the last model of each method
        self.tallies: dict[Question, Tally] = {}
        self.ways = setup.ways(name)
        self.informed: dict[str, Any] | None = None  # settings that public records decide

    def run(self) -> dict[str, list[Any]]:
        """Return rows, timings and guarantees, as plain values."""
        answer: dict[str, list[Any]] = {"rows": [], "timings": [], "guarantees": []}
        exact = self._without_noise()
        for level, epsilons in self.setup.epsilons(self.name).items():
            first = (self.repeat, self.name, level, min(epsilons), max(epsilons))
            for draw in range(self.setup.draws if self._draws_noise(epsilons) else 1):
                found, stated = self._with_noise(
                    level, [epsilons[site] for site in self.held], draw
                )
                # Baselines first, in one order everywhere; what draws no noise is there once.
                every = found if draw else {**exact, **found}
                for kind, method in sorted(every, key=lambda key: _ORDER.get(key[1], len(_ORDER))):
                    facts = (*first, kind, method)
                    metrics = every[kind, method].items()
                    answer["rows"] += [[*facts, *metric, draw] for metric in metrics]
                    if method in self.seconds:
                        answer["timings"].append([*facts, "seconds", self.seconds[method], draw])
            answer["guarantees"] += [
                [level, method, guarantee.as_dict()] for method, guarantee in stated.items()
            ]
        return answer

    def _draws_noise(self, epsilons: Sequence[float]) -> bool:
        """Tell whether anything at this level comes out differently when it is drawn again."""
        made = [self.setup.aggregator(name, epsilons, (), ()) for name in self.ways]
        return bool(np.isfinite(epsilons).any()) or any(one.draws_noise for one in made)

    def _without_noise(self) -> Found:
        """Return the baselines that are the same at every level."""
        found: Found = {}
        wanted, public = self.setup.baselines, self.cut.public
        if GUESS in wanted:
            constant = guess(self.cut.y_test, numeric=self.records.numeric)
            found["constant", GUESS] = self._measure(constant)
        if OWN in wanted:
            found["local", OWN] = _mean(self.own)
        if EXACT in wanted:
            with self._timed(EXACT):
                pooled = self._fit_pool(math.inf, None)
            found["global", EXACT] = self._measure(pooled)
        if PUBLIC in wanted and public is not None and public.y is not None:
            with self._timed(PUBLIC):
                size, who = len(public.y), (self.repeat, "public")
                made = self._make(math.inf, size=size, who=who)
                alone = public_only(made, public)
            found["public", PUBLIC] = self._measure(alone)
        return found

    def _with_noise(
        self, level: str, epsilons: list[float], draw: int
    ) -> tuple[Found, dict[str, Guarantee]]:
        """Return what depends on the level, and what each method guarantees."""
        wanted = self.setup.baselines
        cell, drawn = (self.repeat, self.name, level), [f"draw-{draw}"] if draw else []
        found: Found = {}
        stated: dict[str, Guarantee] = {}
        alone: list[Metrics] = []
        members: Sequence[Learner] = ()
        ways = [self.setup.aggregators[way] for way in self.ways]
        if wanted & {LOCAL, BEST} or not all(way.needs_exact_members for way in ways):
            members = self._fit_members(epsilons, [(*cell, *drawn, site) for site in self.held])
        if wanted & {LOCAL, BEST}:
            alone = self._measure_each(members)
            by = self.setup.metric
            best = max(alone, key=lambda metrics: by.gain(0.0, metrics[by.name]))
            both = {LOCAL: _mean(alone), BEST: best}
            found |= {("local", name): both[name] for name in (LOCAL, BEST) if name in wanted}
        if POOLED in wanted:
            with self._timed(POOLED):  # a record keeps in the pool what its site was promised
                pooled = self._fit_pool(min(epsilons), self.setup.noise(*cell, *drawn, "pool"))
            found["global", POOLED], stated[POOLED] = self._measure(pooled), pooled.guarantee_
        sent = _mean_bytes(members)
        for method in self.ways:
            exact = self.setup.aggregators[method].needs_exact_members
            made = self.setup.aggregator(method, epsilons, cell, drawn)
            with self._timed(method):
                given = self._ask(made) if exact else members
                ensemble = made.combine(given, public=self.cut.public)
            metrics = self._measure_joined(ensemble, alone)
            found["distributed", method] = metrics | {"bytes": self.exact_bytes if exact else sent}
            if ensemble.guarantee is not None:
                stated[method] = ensemble.guarantee
            if self.adapting:
                found |= self._adapt(method, made, ensemble, given)
        if len(self.held) <= SITES_LISTED:
            for site, metrics in zip(self.held, alone, strict=False):
                main = self.setup.metric.name
                found["site", f"site-{site + 1:03}"] = {main: metrics[main]}
        return found, stated

    # ---------------------------------------------------------------------------- training

    def _make(
        self,
        epsilon: float,
        noise: Noise | None = None,
        *,
        size: int | None = None,
        who: tuple[object, ...],
    ) -> Learner:
        """Return an untrained learner that knows the public facts, and the public records."""
        made = self.setup.make(self.name, epsilon, noise, size=size, who=who)
        if self.informed is None:
            public = self.cut.public
            self.informed = {} if public is None else made.public_settings(public)
        return made.set_params(**self.informed)

    def _fit_members(
        self, epsilons: list[float], names: list[tuple[Any, ...]]
    ) -> Sequence[Learner]:
        """Return the sites' models at one level, the noise of each by its name."""
        if np.isinf(epsilons).all():
            exact, self.seconds[LOCAL] = self.exact, self.seconds[OWN]
            return exact
        with self._timed(LOCAL, len(self.held)):
            return [
                self._fit(epsilon, rows, self.setup.noise(*name), name[-1])
                for epsilon, rows, name in zip(epsilons, self.sites, names, strict=True)
            ]

    @cached_property
    def exact(self) -> Sequence[Learner]:
        """The sites' exact models, trained once for all levels and draws."""
        made = self._make(math.inf, who=())
        with self._timed(OWN, len(self.held)):
            small = max(map(len, self.sites)) <= RECORDS_TOGETHER
            if len(self.held) >= SITES_TOGETHER and small and made.can_train_together():
                return fit_together(made, self.cut.X, self.records.y, self.sites, self.n_threads)
            return [
                self._fit(math.inf, rows, None, site)
                for site, rows in zip(self.held, self.sites, strict=True)
            ]

    def _fit(
        self, epsilon: float, rows: Array, noise: Noise | None, who: object, size: int | None = None
    ) -> Learner:
        made = self._make(epsilon, noise, size=size, who=(self.repeat, who))
        persons = self.records.persons
        whose: dict[str, Any] = {} if persons is None else {"persons": persons[rows]}
        made.fit(self.cut.X[rows], self.records.y[rows], **whose)
        return made

    def _fit_pool(self, epsilon: float, noise: Noise | None) -> Learner:
        # The public guess is of one site's size, and grows with the number of sites.
        guess = getattr(self.setup.learners[self.name], "public_size", None)
        return self._fit(epsilon, self.everyone, noise, "pool", guess and guess * len(self.held))

    # ---------------------------------------------------------------------------- combining

    @cached_property
    def read(self) -> Sequence[Member]:
        """The exact models as aggregators read them; reading thousands takes long."""
        return list(as_members(self.exact))

    def _ask(self, aggregator: Aggregator) -> Any:
        """Return what an aggregator of exact members is given: members, or their votes.

        Votes are counted once for all levels, draws and aggregators that ask the same.
        """
        public = self.cut.public
        question = None if public is None else aggregator.question(public)
        if public is None or question is None:
            return self.read
        if question not in self.tallies:
            self.tallies[question] = question.ask(self.read, public)
        return self.tallies[question]

    @cached_property
    def exact_bytes(self) -> float:
        """How much a site with an exact model hands over."""
        return _mean_bytes(self.exact)

    # ---------------------------------------------------------------------------- measuring

    @cached_property
    def own(self) -> list[Metrics]:
        """How good each site's exact model is; of a statistic, the best linear one's."""
        if not self.setup.learners[self.name].makes_linear:
            return self._measure_each(self.exact)
        sites = [Public(self.cut.X[rows], self.records.y[rows]) for rows in self.sites]
        with self._timed(OWN, len(sites)):
            return [self._measure(public_only(self._make(math.inf, who=()), own)) for own in sites]

    def _measure_joined(self, ensemble: Predictor, alone: Sequence[Metrics]) -> Metrics:
        """Measure an ensemble, and the share of sites that do better with it than alone."""
        found, by = self._measure(ensemble), self.setup.metric
        own = self.own if OWN in self.setup.baselines else ()
        for name, others in (("helped", alone), ("helped_exact", own)):
            if others:
                gains = [by.gain(other[by.name], found[by.name]) for other in others]
                found[name] = float(np.mean(np.array(gains) > 0))
        return found

    @cached_property
    def adapting(self) -> dict[int, str]:
        """Which sites adapt releases, by their place: the smallest ones and the largest ones."""
        half = min(self.setup.adapting, len(self.held)) / 2
        order = np.argsort([len(rows) for rows in self.sites], kind="stable").tolist()
        small, large = order[: math.ceil(half)], order[len(order) - math.floor(half) :]
        return dict.fromkeys(small, "small") | dict.fromkeys(large, "large")

    def _adapt(self, method: str, made: Aggregator, ensemble: Ensemble, given: Given) -> Found:
        """Measure own exact models, the release and adapted ones where they are used.

        Sites that are known by name have test records of their own.
        """
        found: dict[str, dict[str, list[Metrics]]] = {}
        for place, size in self.adapting.items():
            rows, tested = self.sites[place], self.cut.tested_at(self.held[place])
            X, y = self.cut.X_test[tested], self.cut.y_test[tested]
            if not len(y):
                continue
            others = None
            if not isinstance(given, Tally):
                learner = given[place]
                learner = learner.learner if isinstance(learner, Member) else learner
                others = made.leave_out(ensemble, place, learner)
            persons = None if self.records.persons is None else self.records.persons[rows]
            model = adapt(
                ensemble,
                (self.cut.X[rows], self.records.y[rows]),
                persons=persons,
                others=others,
                compare=False,
                progress=_silent,
            )
            for what, one in ((OWN_HERE, model.own_), (RELEASE, ensemble), (ADAPTED, model)):
                metrics = measures(one, X, y)
                for group in ("", f"@{size}"):
                    found.setdefault(what, {}).setdefault(group, []).append(metrics)
        return {
            ("site", name_at_sites(method, what)): {
                f"{metric}{group}": value
                for group, measured in groups.items()
                for metric, value in _mean(measured).items()
            }
            for what, groups in found.items()
        }

    def _measure_each(self, models: Sequence[Learner]) -> list[Metrics]:
        if len(models) > SITES_LISTED and models[0].can_train_together():
            counted = measure_together(models, self.cut.X_test, self.cut.y_test, self.n_threads)
            if self.setup.metric.name in counted[0]:
                return counted
        return [self._measure(model) for model in models]

    def _measure(self, model: Predictor) -> Metrics:
        if isinstance(model, Statistic):  # whoever has a sum has the public records too
            public = self.cut.public
            known = public is not None and public.y is not None
            model = model.finish(model.summed(), public if known else None)
        found = measures(model, self.cut.X_test, self.cut.y_test)
        if self.setup.metric.name not in found:
            raise SettingsError(
                f"Methods were to be judged by {self.setup.metric.option}, which cannot be "
                f"measured of {type(model).__name__} on these test records. Nothing was kept. "
                f"Judge by {ERROR.option}."
            )
        return found

    @contextmanager
    def _timed(self, method: str, n_models: int = 1) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[method] = (time.perf_counter() - begun) / n_models


def _silent(done: int, n_steps: int) -> None:
    """Show no progress: a simulation has a bar of its own."""


def _mean_bytes(members: Sequence[Learner]) -> float:
    """Return the size of the arrays that a site hands over, on average."""
    sizes = [sum(part.nbytes for part in member.released_state().values()) for member in members]
    return float(np.mean(sizes)) if sizes else 0.0


def _mean(found: Sequence[Mapping[str, float]]) -> Metrics:
    common = [metric for metric in found[0] if all(metric in other for other in found)]
    return {metric: float(np.mean([other[metric] for other in found])) for metric in common}
