"""Advice by trial: train the study's learner on sites drawn from public records.

For learners and aggregators whose result no formula predicts. Each repeat divides the public
records at random into three parts: one to draw sites from, one for the hub, one to test on. A
site's records are drawn with replacement, so that sites can be larger than the public table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from consilience.aggregators.average import Average
from consilience.aggregators.base import Aggregator
from consilience.aggregators.votes import WeightedVote
from consilience.errors import ConsilienceError, SettingsError
from consilience.evaluation.baselines import guess, public_only
from consilience.evaluation.compare import MAJORITY, MEAN, Joining, repeated_gap
from consilience.evaluation.measures import (
    AUC,
    ERROR,
    RMSE,
    STATED,
    Predictor,
    find_metric,
    measures,
)
from consilience.learners.base import PrivateLearner
from consilience.learners.tuned import Tuning
from consilience.planning.advice import format_table
from consilience.planning.joining import ALONE, PUBLIC
from consilience.planning.sites import Site, Sites
from consilience.privacy.mechanisms import Noise, Source
from consilience.progress import Progress, showing
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
    along: str | None = None  # which axes models are trained along, and what these cost
    tuning: Tuning | None = None  # the candidates that sites choose among

    @property
    def how(self) -> str:
        """How this was found out, and along which axes models are trained, if there are any."""
        said = HOW.format(repeats=REPEATS)
        said += "" if self.along is None else f" Models are trained along {self.along}."
        return said if self.tuning is None else f"{said} {self.tuning.explain(self.learner)}"

    @property
    def sentence(self) -> str:
        """Whether joining helped at the asked epsilon."""
        joining = self.verdicts[self.asked]
        joined = next(
            row
            for row in self.rows
            if (row.way, row.epsilon) == (self.aggregator, self.asked)
            and row.metric == joining.metric
        )
        return (
            f"Simulated at epsilon={self.asked:g} with {self.n_sites} sites of "
            f"n={self.n_records:,}: joining {joining.answer}. The {joining.measure.title} of "
            f"{self.aggregator} is {joining.show(joined.value)}: {joining.comparison}."
            f"{self._caution()}{self._what_to_change()}"
        )

    def _value(self, epsilon: float, way: str, metric: str) -> float:
        return next(
            (
                row.value
                for row in self.rows
                if (row.epsilon, row.way, row.metric) == (epsilon, way, metric)
            ),
            math.nan,
        )

    def _caution(self) -> str:
        caution = self.verdicts[self.asked].caution(has_auc=True)
        auc = self._value(self.asked, self.aggregator, AUC.name)
        return f" {caution} It is {auc:.3f}." if caution and math.isfinite(auc) else ""

    def _what_to_change(self) -> str:
        """Say what the largest epsilon that was tried brings, if it is another one."""
        most, metric = max(self.verdicts), self.verdicts[self.asked].measure
        now, then = (self._value(at, self.aggregator, metric.name) for at in (self.asked, most))
        if most == self.asked or not metric.gain(now, then) > 0:
            return ""
        return f" At epsilon={most:g} it is {metric.show(then)}."

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "simulated": True,
            "how": self.how,
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
        metrics = [one for one in STATED if any(row.metric == one.name for row in self.rows)]
        lines: dict[tuple[float, str], dict[str, str]] = {}
        for row in self.rows:
            cell = f"{row.value:.4f} ± {row.spread:.4f}"
            lines.setdefault((row.epsilon, row.way), {})[row.metric] = cell
        cells = [
            [f"{epsilon:g}", way, *(of_way.get(metric.name, "—") for metric in metrics)]
            for (epsilon, way), of_way in lines.items()
        ]
        table = format_table(["epsilon", "way", *(one.title for one in metrics)], cells)
        return "\n".join([self.sentence, "", *table, "", self.how])


def run_trial(
    learner: Learner,
    aggregator: tuple[str, Aggregator] | None,
    public: Public,
    *,
    sites: Sites,
    epsilons: Sequence[float],
    seed: int,
    metric: str | None = None,
    progress: Progress | None = None,
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
    metric
        What ways are judged by; by default "error", or "rmse".
    progress
        Called with (repeats done, repeats).
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
    trial = _Trial(_with_labels(learner, public), combiner, public, seed)
    asked = sites.epsilon
    tried = sorted({min(epsilons), asked, max(epsilons)})
    usual = RMSE.name if learner.predicts_number else ERROR.name
    judged = find_metric(metric or usual, numeric=learner.predicts_number)
    rows, verdicts = [], {}
    with showing("Training on public records", progress) as tell:
        for i, epsilon in enumerate(tried):
            kinds = [Site(s.count, s.n_records, s.epsilon * epsilon / asked) for s in sites.kinds()]
            found = {
                name if way == JOINED else way: values
                for way, values in trial.run(
                    kinds, partial(_tell, tell, i * REPEATS, len(tried) * REPEATS)
                ).items()
            }
            rows += [
                TrialRow(epsilon, way, by, float(values.mean()), float(values.std(ddof=1)))
                for way, of_way in found.items()
                for by, values in of_way.items()
            ]
            gaps = {
                way: repeated_gap(
                    of_way[judged.name], found[name][judged.name], metric=judged, overlap=OVERLAP
                )
                for way, of_way in found.items()
                if way != name and judged.name in of_way and judged.name in found[name]
            }
            verdicts[epsilon] = Joining(gaps, judged.name)
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
        None if learner.projection is None else learner.projection.describe(),
        learner.tuning,
    )


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


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

    def run(
        self, kinds: Sequence[Site], done: Callable[[int], None]
    ) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Return the measures of every repeat, by way and name."""
        found: dict[str, dict[str, list[float]]] = {}
        for repeat in range(REPEATS):
            draw = Noise(seed=self.seed).open(stream=repeat)
            order = np.array_split(draw.permutation(np.shape(self.public.X)[0]), 3)
            pool, hub, test = (Public(self.public.X[part], self.public.y[part]) for part in order)
            constant = guess(test.y, numeric=self.learner.predicts_number)
            models = {
                MEAN if self.learner.predicts_number else MAJORITY: [constant],
                **self._models(kinds, pool, hub, draw),
            }
            for way, of_way in models.items():
                measured = [measures(one, test.X, test.y) for one in of_way]
                for metric in STATED:
                    if all(metric.name in one for one in measured):
                        mean = float(np.mean([one[metric.name] for one in measured]))
                        found.setdefault(way, {}).setdefault(metric.name, []).append(mean)
            done(repeat + 1)
        return {
            way: {name: np.array(values) for name, values in of_way.items()}
            for way, of_way in found.items()
        }

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
        model = clone(self.learner).set_params(noise=_seeded(draw)).set_budget(epsilon)
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


def _with_labels(learner: Learner, public: Public) -> Learner:
    """Return the learner with the public records' labels declared, if it lacks them."""
    made: Learner = clone(learner)
    if made.get_params().get("classes", ()) is None:
        made.set_params(classes=np.unique(public.y).tolist())
    if made.get_params().get("label_bound", 1.0) is None:
        made.set_params(label_bound=float(np.abs(public.y).max()) or 1.0)
    return made
