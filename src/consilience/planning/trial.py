"""Advice by trial: train the study's learner on sites drawn from public records.

For learners and aggregators whose result no formula predicts. Each repeat divides the public
records at random into three parts: one to draw sites from, one for the hub, one to test on. A
site's records are drawn with replacement, so that sites can be larger than the public table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from consilience.aggregators.average import Average
from consilience.aggregators.base import Aggregator
from consilience.aggregators.votes import WeightedVote
from consilience.errors import ConsilienceError, SettingsError
from consilience.evaluation.baselines import public_only
from consilience.evaluation.compare import Joining, repeated_gap
from consilience.evaluation.measures import Predictor, measures
from consilience.learners.base import PrivateLearner
from consilience.planning.advice import format_table
from consilience.planning.joining import ALONE, PUBLIC
from consilience.planning.sites import Site, Sites
from consilience.privacy.mechanisms import Noise, Source
from consilience.tables.public import Public

Learner = PrivateLearner[Any, Any]

REPEATS = 5
LEAST_PUBLIC = 30  # public records; with fewer, thirds of them show nothing
MOST_TESTED = 3  # epsilons: the smallest, the largest and the asked one
HOW = (
    "This is a simulation, not a formula: the public records were divided at random into three "
    "parts, for the sites, the hub and the test, {repeats} times. Sites of the planned size were "
    "drawn from their part with replacement and trained as the study says. Your sites' records may "
    "differ from the public ones."
)


@dataclass(frozen=True)
class TrialRow:
    """What one way reached at one epsilon: the mean over repeats, and its standard deviation."""

    epsilon: float
    way: str
    metric: str
    value: float
    spread: float


@dataclass(frozen=True)
class Trial:
    """What sites drawn from public records reached, alone and joined. Prints as a table."""

    learner: str
    aggregator: str
    n_sites: int
    n_records: int
    n_public: int
    rows: tuple[TrialRow, ...]
    verdicts: Mapping[float, Joining]  # by epsilon
    asked: float

    @property
    def sentence(self) -> str:
        """Whether joining helped at the asked epsilon."""
        joining = self.verdicts[self.asked]
        joined = next(
            row for row in self.rows if row.way == self.aggregator and row.epsilon == self.asked
        )
        return (
            f"Simulated at epsilon={self.asked:g} with {self.n_sites} sites of "
            f"n={self.n_records:,}: joining {joining.answer}. {joined.metric.capitalize()} of "
            f"{self.aggregator}: {joining.show(joined.value)}, {joining.comparison}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "simulated": True,
            "how": HOW.format(repeats=REPEATS),
            "learner": self.learner,
            "aggregator": self.aggregator,
            "n_sites": self.n_sites,
            "n_records": self.n_records,
            "n_public": self.n_public,
            "rows": [vars(row) for row in self.rows],
            "helps": {f"{epsilon:g}": joining.helps for epsilon, joining in self.verdicts.items()},
            "sentence": self.sentence,
        }

    def __str__(self) -> str:
        titles = ["epsilon", "way", self.rows[0].metric, "±"]
        cells = [
            [f"{row.epsilon:g}", row.way, f"{row.value:.4f}", f"{row.spread:.4f}"]
            for row in self.rows
        ]
        table = format_table(titles, cells)
        return "\n".join([*table, "", self.sentence, HOW.format(repeats=REPEATS)])


def run_trial(
    learner: Learner,
    aggregator: tuple[str, Aggregator] | None,
    public: Public,
    *,
    sites: Sites,
    epsilons: Sequence[float],
    seed: int,
) -> Trial:
    """Train on sites drawn from labelled public records, and compare joined with alone.

    Parameters
    ----------
    learner
        What sites train, with all its settings.
    aggregator
        Name and aggregator; by default `Average` for linear learners and `WeightedVote` for others.
    sites
        Sizes and epsilons of the sites.
    epsilons
        What a site may choose; the smallest, the largest and the asked one are tried.
    """
    n_public = int(np.shape(public.X)[0])
    if n_public < LEAST_PUBLIC:
        raise SettingsError(
            f"A trial on public records needs at least {LEAST_PUBLIC} of them, and there are "
            f"{n_public}. Nothing was trained. Give more, or simulate on a larger public table: "
            "consilience simulate study.toml --data TABLE."
        )
    name, combiner = aggregator or _usual_aggregator(learner)
    trial = _Trial(_with_classes(learner, public), combiner, public, seed)
    asked = sites.epsilon
    tried = sorted({min(epsilons), asked, max(epsilons)})
    rows, verdicts = [], {}
    for epsilon in tried:
        kinds = [Site(s.count, s.n_records, s.epsilon * epsilon / asked) for s in sites.kinds()]
        losses, metric = trial.run(kinds)
        losses = {name if way == JOINED else way: values for way, values in losses.items()}
        rows += [
            TrialRow(epsilon, way, metric, float(values.mean()), float(values.std(ddof=1)))
            for way, values in losses.items()
        ]
        gaps = {
            way: repeated_gap(values, losses[name], overlap=OVERLAP)
            for way, values in losses.items()
            if way != name
        }
        verdicts[epsilon] = Joining(gaps, metric)
    n_sites = sum(site.count for site in sites.kinds())
    return Trial(
        type(learner).__name__,
        name,
        n_sites,
        sites.n_records,
        n_public,
        tuple(rows),
        verdicts,
        asked,
    )


JOINED = "joined"
# Repeats divide the same records anew: a third is tested on, two thirds are trained on.
OVERLAP = 0.5


@dataclass(frozen=True)
class _Trial:
    """One learner and aggregator on repeated divisions of the public records."""

    learner: Learner
    aggregator: Aggregator
    public: Public
    seed: int

    def run(self, kinds: Sequence[Site]) -> tuple[dict[str, NDArray[np.float64]], str]:
        """Return the losses of every repeat by way, and what they are."""
        losses: dict[str, list[float]] = {}
        metric = ""
        for repeat in range(REPEATS):
            draw = Noise(seed=self.seed).open(stream=repeat)
            order = np.array_split(draw.permutation(np.shape(self.public.X)[0]), 3)
            pool, hub, test = (Public(self.public.X[part], self.public.y[part]) for part in order)
            for way, model in self._models(kinds, pool, hub, draw).items():
                measured = [measures(one, test.X, test.y) for one in model]
                metric = next(iter(measured[0]))
                losses.setdefault(way, []).append(float(np.mean([one[metric] for one in measured])))
        return {way: np.array(values) for way, values in losses.items()}, metric

    def _models(
        self, kinds: Sequence[Site], pool: Public, hub: Public, draw: Source
    ) -> dict[str, list[Predictor]]:
        """Return the models of every way: sites alone, the public records alone, and joined."""
        alone, members = [], []
        for site in kinds:
            for _ in range(site.count):
                rows = (draw.uniform(site.n_records) * np.shape(pool.X)[0]).astype(np.int64)
                records = Public(pool.X[rows], pool.y[rows])
                alone.append(self._train(records, site.epsilon, draw))
                if self.aggregator.needs_exact_members:
                    members.append(self._train(records, math.inf, draw))
        combiner = self.aggregator.with_noise(_seeded(draw), _draw_seed(draw))
        joined = combiner.combine(members or alone, hub if combiner.needs_public else None)
        models: dict[str, list[Predictor]] = {ALONE: alone, JOINED: [joined]}
        baseline = self._public_alone(hub, draw)
        return models if baseline is None else {PUBLIC: [baseline], **models}

    def _train(self, records: Public, epsilon: float, draw: Source) -> Predictor:
        n = len(records.y)
        model = clone(self.learner).set_params(epsilon=epsilon, noise=_seeded(draw))
        if math.isinf(epsilon):
            model.set_params(delta=0.0)
        if "public_size" in model.get_params() and model.neighbours == "add-remove":
            model.set_params(public_size=n)
        persons = {}
        if model.unit == "person":  # public records name no persons: each gets its full number
            persons = {"persons": np.arange(n) // int(model.records_per_person)}
        fitted: Predictor = model.fit(records.X, records.y, **persons)
        return fitted

    def _public_alone(self, hub: Public, draw: Source) -> Predictor | None:
        learner = clone(self.learner).set_params(epsilon=math.inf, delta=0.0, noise=_seeded(draw))
        try:
            model: Predictor | None = public_only(learner, hub)
        except (ConsilienceError, ValueError):
            return None
        return model


def _seeded(draw: Source) -> Noise:
    """Return noise that repeats: public records need no protection."""
    return Noise(seed=_draw_seed(draw))


def _draw_seed(draw: Source) -> int:
    return int(draw.words(1)[0] >> 33)


def _usual_aggregator(learner: Learner) -> tuple[str, Aggregator]:
    aggregator = Average() if learner.is_linear else WeightedVote()
    return aggregator.describe().title, aggregator


def _with_classes(learner: Learner, public: Public) -> Learner:
    """Return the learner with the public records' classes declared, if it takes and lacks them."""
    if "classes" in learner.get_params() and learner.get_params()["classes"] is None:
        return clone(learner).set_params(classes=np.unique(public.y).tolist())  # type: ignore[no-any-return]
    return learner
