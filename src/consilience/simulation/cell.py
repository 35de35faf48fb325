"""One cell of a simulation: one repeat of one learner.

Within a cell each model is trained once, combined in every way, and measured on the same test
records, so that all differences between methods are paired.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.aggregators.base import Aggregator
from consilience.aggregators.distillation.tally import Question, Tally
from consilience.aggregators.members import Member, as_members
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
from consilience.evaluation.measures import Predictor, main_metric, measures
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.mechanisms import Noise
from consilience.simulation.setup import Learner, Setup
from consilience.simulation.together import fit_together, measure_together

Array = NDArray[Any]
Metrics = dict[str, float]
Found = dict[tuple[str, str], Metrics]  # by (kind, method)

_ORDER = {method: place for place, method in enumerate(TITLES)}
SITES_LISTED = 100  # with more, single sites have no rows and are measured by what can be counted
# Exact linear models are trained together from so many sites on, each of at most so many records.
SITES_TOGETHER, RECORDS_TOGETHER = 8, 4096


class Cell:
    """One repeat of one learner."""

    def __init__(self, setup: Setup, repeat: int, name: str, n_threads: int) -> None:
        self.setup, self.repeat, self.name, self.n_threads = setup, repeat, name, n_threads
        self.ways, self.records = setup.ways, setup.divider.records
        self.cut = setup.cut(repeat)
        self.held = [site for site, rows in enumerate(self.cut.sites) if len(rows)]
        self.sites = [self.cut.sites[site] for site in self.held]
        self.everyone = np.concatenate(self.sites)
        self.seconds: dict[str, float] = {}  # of the last model of each method
        self.tallies: dict[Question, Tally] = {}

    def run(self) -> dict[str, list[Any]]:
        """Return rows, timings and guarantees, as plain values."""
        answer: dict[str, list[Any]] = {"rows": [], "timings": [], "guarantees": []}
        exact = self._without_noise()
        for level, epsilons in self.setup.epsilons(self.name).items():
            first = (self.repeat, self.name, level, min(epsilons), max(epsilons))
            for draw in range(self.ways.draws if self._draws_noise(epsilons) else 1):
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
        made = [self.setup.aggregator(name, epsilons, (), ()) for name in self.ways.aggregators]
        return bool(np.isfinite(epsilons).any()) or any(one.draws_noise for one in made)

    def _without_noise(self) -> Found:
        """Return the baselines that are the same at every level."""
        found: Found = {}
        wanted, public = self.ways.baselines, self.cut.public
        if OWN in wanted:
            found["local", OWN] = _mean(self.own)
        if EXACT in wanted:
            with self._timed(EXACT):
                pooled = self._fit_pool(math.inf, None)
            found["global", EXACT] = self._measure(pooled)
        if PUBLIC in wanted and public is not None and public.y is not None:
            with self._timed(PUBLIC):
                size, who = len(public.y), (self.repeat, "public")
                made = self.setup.make(self.name, math.inf, size=size, who=who)
                alone = public_only(made, public)
            found["public", PUBLIC] = self._measure(alone)
        return found

    def _with_noise(
        self, level: str, epsilons: list[float], draw: int
    ) -> tuple[Found, dict[str, Guarantee]]:
        """Return what depends on the level, and what each method guarantees."""
        wanted = self.ways.baselines
        cell, drawn = (self.repeat, self.name, level), [f"draw-{draw}"] if draw else []
        found: Found = {}
        stated: dict[str, Guarantee] = {}
        alone: list[Metrics] = []
        members: Sequence[Learner] = ()
        if wanted & {LOCAL, BEST} or not self.ways.all_need_exact_members:
            members = self._fit_members(epsilons, [(*cell, *drawn, site) for site in self.held])
        if wanted & {LOCAL, BEST}:
            alone = self._measure_each(members)
            best = min(alone, key=lambda metrics: metrics[main_metric(metrics)])
            both = {LOCAL: _mean(alone), BEST: best}
            found |= {("local", name): both[name] for name in (LOCAL, BEST) if name in wanted}
        if POOLED in wanted:
            with self._timed(POOLED):  # a record keeps in the pool what its site was promised
                pooled = self._fit_pool(min(epsilons), self.setup.noise(*cell, *drawn, "pool"))
            found["global", POOLED], stated[POOLED] = self._measure(pooled), pooled.guarantee_
        sent = _mean_bytes(members)
        for method in self.ways.aggregators:
            exact = self.ways.aggregators[method].needs_exact_members
            made = self.setup.aggregator(method, epsilons, cell, drawn)
            with self._timed(method):
                given = self._ask(made) if exact else members
                ensemble = made.combine(given, public=self.cut.public)
            metrics = self._measure_joined(ensemble, alone)
            found["distributed", method] = metrics | {"bytes": self.exact_bytes if exact else sent}
            if ensemble.guarantee is not None:
                stated[method] = ensemble.guarantee
        if len(self.held) <= SITES_LISTED:
            for site, metrics in zip(self.held, alone, strict=False):
                main = main_metric(metrics)
                found["site", f"site-{site + 1:03}"] = {main: metrics[main]}
        return found, stated

    # ---------------------------------------------------------------------------- training

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
        made = self.setup.make(self.name, math.inf, who=())
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
        made = self.setup.make(self.name, epsilon, noise, size=size, who=(self.repeat, who))
        persons = self.records.persons
        whose = {} if persons is None else {"persons": persons[rows]}
        made.fit(self.cut.X[rows], self.records.y[rows], **whose)
        return made

    def _fit_pool(self, epsilon: float, noise: Noise | None) -> Learner:
        # The public guess is of one site's size, and grows with the number of sites.
        guess = getattr(self.ways.learners[self.name], "public_size", None)
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
        """How good each site's exact model is."""
        return self._measure_each(self.exact)

    def _measure_joined(self, ensemble: Predictor, alone: Sequence[Metrics]) -> Metrics:
        """Measure an ensemble, and the share of sites that do better with it than alone."""
        found = self._measure(ensemble)
        own = self.own if OWN in self.ways.baselines else ()
        for metric, others in (("helped", alone), ("helped_exact", own)):
            if others:
                main = main_metric(found)
                found[metric] = float(np.mean([found[main] < other[main] for other in others]))
        return found

    def _measure_each(self, models: Sequence[Learner]) -> list[Metrics]:
        if len(models) > SITES_LISTED and models[0].can_train_together():
            return measure_together(models, self.cut.X_test, self.cut.y_test, self.n_threads)
        return [self._measure(model) for model in models]

    def _measure(self, model: Predictor) -> Metrics:
        return measures(model, self.cut.X_test, self.cut.y_test)

    @contextmanager
    def _timed(self, method: str, n_models: int = 1) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[method] = (time.perf_counter() - begun) / n_models


def _mean_bytes(members: Sequence[Learner]) -> float:
    """Return the size of the arrays that a site hands over, on average."""
    sizes = [sum(part.nbytes for part in member.released_state().values()) for member in members]
    return float(np.mean(sizes)) if sizes else 0.0


def _mean(found: Sequence[Mapping[str, float]]) -> Metrics:
    common = [metric for metric in found[0] if all(metric in other for other in found)]
    return {metric: float(np.mean([other[metric] for other in found])) for metric in common}
