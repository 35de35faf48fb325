"""Which sum will pay, with which noise, among how many sites and for whom: by trial, nothing spent.

Sites, public records and test records are drawn from a population that is known: the rows of the
study's labelled public records with labels by a model that they leave possible, or, without them,
rows that are made up within the schema. Nothing private is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.base import clone

from consilience.aggregators.blend import draw_public
from consilience.aggregators.members import dense
from consilience.errors import SettingsError
from consilience.evaluation.adaptation import ADAPTED, OWN, RELEASE, adapt
from consilience.evaluation.compare import Gap, repeated_gap
from consilience.evaluation.measures import AUC, ERROR, METRICS, RMSE, Metric, Predictor, measures
from consilience.learners.base import PrivateLearner
from consilience.learners.linear import PrivateLogisticRegression, PrivateRidge
from consilience.learners.registry import LEARNERS
from consilience.planning.advice import format_table
from consilience.privacy.mechanisms import Noise, Source
from consilience.progress import Progress, showing
from consilience.simulation.once import TotalOnce
from consilience.statistics.total import Total
from consilience.study.draft import usual_shares
from consilience.tables.public import Public
from consilience.tables.schema import Categorical, Schema

Array = NDArray[Any]
Learner = PrivateLearner[Any, Any]

REPEATS = 5
N_TEST = 4_000
LEAST_PUBLIC = 30  # labelled public records; fewer say nothing about a population
USUAL_DELTA = 1e-6
SPREAD = 1.5  # standard deviation of made-up log-odds
AT_SITES, SHARED = "noise at every site", "noise shared"
SMALLER, LARGER = 4, 4  # times smaller, and larger, are the other sites that are asked about
FROM_PUBLIC = (
    "This is a simulation, not a formula: {repeats} times, sites and {n_test:,} test records were "
    "drawn from the rows of the study's labelled public records, with labels by a model that these "
    "leave possible, another one each time. Your sites' records may differ."
)
MADE_UP = (
    "This is a simulation on made-up records, not a formula: {repeats} times, sites and {n_test:,} "
    "test records were drawn evenly within the bounds of the schema, with labels by a random "
    "linear rule. It shows what sizes and noise allow, and nothing of your data. Name labelled "
    "public records in the study for a trial on them."
)


class Agreement(Protocol):
    """What is asked of a study."""

    @property
    def schema(self) -> Schema:
        """What a record is."""

    @property
    def delta(self) -> float:
        """The common delta."""

    @property
    def neighbours(self) -> str:
        """Under which relation everything is private."""

    @property
    def learner(self) -> str:
        """What sites train, or add up."""

    def build(self, epsilon: float) -> Learner:
        """Return it."""


@dataclass(frozen=True)
class Asked:
    """Who would join.

    ``shares`` is how many shares of noise make a whole among that many sites; None is usual.
    """

    n_records: int
    n_sites: int
    epsilon: float
    epsilons: tuple[float, ...]
    shares: int | None = None

    def shares_of(self, n_sites: int) -> int:
        """Return how many shares make a whole among so many sites."""
        if self.shares is None or n_sites != self.n_sites:
            return usual_shares(n_sites)
        return self.shares

    @property
    def sizes(self) -> list[int]:
        """The sizes of sites for which it is asked whether joining pays."""
        n = self.n_records
        return sorted({max(n // SMALLER, 10), n, n * LARGER})

    @property
    def ladder(self) -> list[int]:
        """The numbers of sites that are tried."""
        return sorted({max(2, round(self.n_sites * by)) for by in (0.25, 0.5, 1, 2)})


@dataclass(frozen=True)
class Cell:
    """One way to join: a statistic, a place of the noise, an epsilon, so many sites."""

    statistic: str
    noise: str
    epsilon: float
    n_sites: int
    n_records: int  # of the site that adapts the release


# What own models, releases and adapted ones reached in each repeat.
Measured = dict[Cell, dict[str, list[dict[str, float]]]]


@dataclass(frozen=True)
class Paying:
    """What joining by sums can be expected to bring. Prints as a sentence and tables."""

    asked: Asked
    metric: Metric
    found: Mapping[Cell, Mapping[str, Array]]  # own, release and adapted, for each repeat
    how: str

    def gap(self, cell: Cell) -> Gap:
        """Compare the adapted model with the site's own exact one, repeat by repeat."""
        of_cell = self.found[cell]
        return repeated_gap(of_cell[OWN], of_cell[ADAPTED], metric=self.metric)

    def at(self, noise: str) -> Cell:
        """Return the statistic that is expected to pay most, the mean over sizes of sites."""
        asked = self.asked
        main = (asked.epsilon, asked.n_sites, asked.n_records)
        cells = [
            cell
            for cell in self.found
            if cell.noise == noise and (cell.epsilon, cell.n_sites, cell.n_records) == main
        ]
        return max(cells, key=self._gained)

    def _gained(self, cell: Cell) -> float:
        gaps = [self.gap(replace(cell, n_records=n)) for n in self.asked.sizes]
        return float(np.mean([gap.gain.value for gap in gaps]))

    @property
    def best(self) -> Cell:
        """Return what is expected to pay most; noise at every site if sharing it gains nothing."""
        alone, shared = self.at(AT_SITES), self.at(SHARED)
        return shared if self._gained(shared) > self._gained(alone) else alone

    def pays(self, cell: Cell) -> bool:
        """Tell whether the interval of the gain lies above zero."""
        return self.gap(cell).verdict == "better"

    def fewest(self, cell: Cell) -> int | None:
        """Return the smallest number of sites that was tried from which on it pays; or None."""
        enough = None
        for n_sites in reversed(self.asked.ladder):
            if not self.pays(replace(cell, n_sites=n_sites)):
                break
            enough = n_sites
        return enough

    # ------------------------------------------------------------------ in words

    @property
    def sentence(self) -> str:
        """Which statistic and which noise pay, for how many sites and for whom."""
        best, asked = self.best, self.asked
        winners = [n for n in asked.sizes if self.pays(replace(best, n_records=n))]
        losers = [n for n in asked.sizes if n not in winners]
        verb = "is expected to pay" if winners else "is not expected to pay"
        who = f"{asked.n_sites} sites of {asked.n_records:,} records at epsilon={asked.epsilon:g}"
        said = f"Joining {verb}: {who}, by {best.statistic} with {best.noise}"
        said += f", for sites of {_listed(winners)} records" if winners else ""
        said += f", not clearly for those of {_listed(losers)}." if winners and losers else "."
        fewest, most = self.fewest(best), asked.ladder[-1]
        if fewest is not None:
            said += f" For sites of {asked.n_records:,} records, {fewest} of them are enough."
        else:
            said += (
                f" For sites of {asked.n_records:,} records the gain is not clear with {most} of "
                "them."
            )
        if best.noise == SHARED:
            too = any(self.pays(replace(self.at(AT_SITES), n_records=n)) for n in asked.sizes)
            said += f" With {AT_SITES} it would {'pay less' if too else 'not clearly pay'}."
        return said

    @property
    def details(self) -> str:
        """The numbers of the sentence."""
        best, parts = self.best, []
        for n_records in self.asked.sizes:
            gap = self.gap(replace(best, n_records=n_records))
            parts.append(f"{n_records:,} records: {self._compare(gap)}")
        other = self.at(AT_SITES if best.noise == SHARED else SHARED)
        parts.append(f"by {other.statistic} with {other.noise}: {self._compare(self.gap(other))}")
        title = self.metric.title
        return (
            f"{title} of a site's own exact model, and adapted to the release. {'; '.join(parts)}."
        )

    def _compare(self, gap: Gap) -> str:
        show = self.metric.show
        gain = self.metric.show_gain(gap.gain.low, gap.gain.high)
        return f"{show(gap.other)} to {show(gap.joined)} (gain {gain})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        rows = []
        for cell, of_cell in self.found.items():
            gain = self.gap(cell).gain
            means = {name: float(values.mean()) for name, values in of_cell.items()}
            rows.append({**vars(cell), **means, "gain": [gain.value, gain.low, gain.high]})
        best = self.best
        return {
            "simulated": True,
            "how": self.how,
            "metric": self.metric.name,
            "statistic": best.statistic,
            "noise": best.noise,
            "pays": self.pays(best),
            "fewest_sites": self.fewest(best),
            "rows": rows,
            "sentence": self.sentence,
        }

    def __str__(self) -> str:
        heads = ["statistic", "noise", "epsilon", "sites", "records", "own", "release", "adapted"]
        cells = []
        for cell, of_cell in self.found.items():
            gain = self.gap(cell).gain
            cells.append(
                [
                    cell.statistic,
                    cell.noise,
                    f"{cell.epsilon:g}",
                    f"{cell.n_sites:,}",
                    f"{cell.n_records:,}",
                    *(f"{of_cell[name].mean():.4f}" for name in (OWN, RELEASE, ADAPTED)),
                    f"{gain.low:+.4f} to {gain.high:+.4f}",
                ]
            )
        table = format_table([*heads, "gain, 95 %"], cells)
        return "\n".join([self.sentence, "", self.details, "", *table, "", self.how])


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(f"{n:,}" for n in numbers)


# ------------------------------------------------------------------------------- the population


@dataclass(frozen=True)
class _Population:
    """Encoded rows and what their labels are drawn with."""

    rows: Array
    law: Array  # chances of classes for each row, or means
    classes: Array | None
    spread: float  # of numbers around their means

    @classmethod
    def of_public(cls, public: Public, schema: Schema, source: Source) -> _Population:
        """Return the rows of public records, with labels by a model that they leave possible.

        By the model that fits them best, what is learned of them would be nearly the truth, and no
        sum of other records would add to it.
        """
        rows = np.asarray(dense(public.X), dtype=np.float64)
        if schema.classes is None:
            bound = float(schema.label_bound or 0.0) or 1.0
            number = PrivateRidge(epsilon=math.inf, label_bound=bound)
            means = np.asarray(draw_public(number, public, source.normal).predict(rows))
            return cls(rows, means, None, float((np.asarray(public.y) - means).std()))
        classes = np.asarray(schema.classes)
        learner = PrivateLogisticRegression(epsilon=math.inf, classes=list(classes.tolist()))
        law = draw_public(learner, public, source.normal).predict_proba(rows)
        return cls(rows, law, classes, 0.0)

    @classmethod
    def made_up(cls, schema: Schema, source: Source) -> _Population:
        """Return rows within the bounds of a schema, with labels by a random linear rule."""
        n = 20_000
        values: dict[str, pa.Array] = {}
        for column in schema.columns:
            drawn = source.uniform(n)
            if isinstance(column, Categorical):
                kinds = pa.array(list(column.categories))
                values[column.name] = kinds.take(pa.array((drawn * len(kinds)).astype(int)))
            else:
                values[column.name] = pa.array(column.low + drawn * (column.high - column.low))
        rows = schema.encode_features(pa.table(values))
        outputs = 1 if schema.classes is None else len(schema.classes) - 1
        scores = rows @ source.normal(rows.shape[1] * outputs).reshape(rows.shape[1], outputs)
        scores = SPREAD * (scores - scores.mean(axis=0)) / np.maximum(scores.std(axis=0), 1e-12)
        if schema.classes is None:
            unit = float(schema.label_bound or 0.0) / (3 * SPREAD)
            return cls(rows, scores[:, 0] * unit, None, unit)
        odds = np.exp(np.column_stack([np.zeros(n), scores]))
        return cls(rows, odds / odds.sum(axis=1, keepdims=True), np.asarray(schema.classes), 0.0)

    def draw(self, n: int, source: Source) -> Public:
        """Return so many records."""
        place = (source.uniform(n) * len(self.rows)).astype(np.intp)
        if self.classes is None:
            return Public(self.rows[place], self.law[place] + self.spread * source.normal(n))
        above = source.uniform(n)[:, None] > np.cumsum(self.law[place], axis=1)[:, :-1]
        return Public(self.rows[place], self.classes[above.sum(axis=1)])


# ------------------------------------------------------------------------------- the trial


def statistics_for(study: Agreement, epsilon: float, public: Public | None) -> dict[str, Learner]:
    """Return every statistic that makes a model for a study, by name, its own as it is set.

    Statistics with a setting that nobody can guess are left out, and those that need public
    records where there are none.
    """
    found, own = {}, study.build(epsilon)
    for name, kind in LEARNERS.items():
        numeric = study.schema.classes is None
        if kind.suits != Total.__name__ or not kind.makes_linear or kind.predicts_number != numeric:
            continue
        delta = study.delta or USUAL_DELTA
        try:
            if name == study.learner:
                made = clone(study.build(epsilon))
            else:
                made = kind.for_schema(
                    study.schema, epsilon=epsilon, delta=delta, neighbours=study.neighbours
                )
            made.set_params(epsilon=epsilon, delta=delta, schema=None)
            if public is not None:
                made.set_params(**made.public_settings(public))
            made.check_settings()
            if made.unit != own.unit:  # what hides more, or less, is no alternative
                continue
        except (TypeError, SettingsError):
            continue
        found[name] = made
    return found


def run_paying(
    study: Agreement,
    public: Public | None,
    asked: Asked,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Paying:
    """Try every statistic that suits a study, with both kinds of noise, on drawn records.

    Privacy
    -------
    Only public records are read, and nothing is charged.
    """
    labelled = public is not None and public.y is not None and len(public.y) >= LEAST_PUBLIC
    hub = public if labelled else None
    how = (FROM_PUBLIC if labelled else MADE_UP).format(repeats=REPEATS, n_test=N_TEST)
    trial = _Trial(study, hub, asked, seed, {})
    found: Measured = {}
    with showing("Trying sums on drawn records", progress) as tell:
        for repeat in range(REPEATS):
            trial.run(repeat, found)
            tell(repeat + 1, REPEATS)
    return _gather(asked, found, how)


def _gather(asked: Asked, found: Measured, how: str = "") -> Paying:
    metric = _judged(found)
    numbers = {
        cell: {
            name: np.array([one[metric.name] for one in values]) for name, values in of_cell.items()
        }
        for cell, of_cell in found.items()
    }
    return Paying(asked, metric, numbers, how)


def _judged(found: Measured) -> Metric:
    every = [one for of_cell in found.values() for values in of_cell.values() for one in values]
    if not every:
        raise SettingsError(
            "No statistic suits this study without settings of its own. Nothing was computed. Name "
            "one in the study as [statistic]."
        )
    usual = (AUC, RMSE, ERROR)
    return METRICS[next(one.name for one in usual if all(one.name in each for each in every))]


@dataclass(frozen=True)
class _Trial:
    study: Agreement
    hub: Public | None  # the study's labelled public records
    asked: Asked
    seed: int
    favoured: dict[str, str]  # the statistic, by the kind of noise

    def run(self, repeat: int, found: Measured) -> None:
        """Draw everything anew, and measure every cell.

        Other epsilons and numbers of sites are tried with the statistics that the first repeat
        favours, one for each kind of noise.
        """
        asked, source, hub = self.asked, Noise(seed=self.seed).open(stream=repeat), self.hub
        if hub is None:
            law = Noise(seed=self.seed).open(stream=2**20)  # the same each time
            draw = _Population.made_up(self.study.schema, law).draw
        else:
            draw = _Population.of_public(hub, self.study.schema, source).draw
        test = draw(N_TEST, source)
        sites = [draw(asked.n_records, source) for _ in range(asked.ladder[-1])]
        # The sites that ask have not joined, so that no release has seen their records.
        asking = {n: draw(n, source) for n in asked.sizes}
        own: dict[int, dict[str, float]] = {}
        members = {
            name: _fit_all(statistic, sites)
            for name, statistic in statistics_for(self.study, asked.epsilon, hub).items()
        }

        def measure(name: str, noise: str, epsilon: float, n_sites: int) -> None:
            shares = 1 if noise == AT_SITES else asked.shares_of(n_sites)
            seeded = Noise(seed=int(source.words(1)[0] >> 33))
            once = TotalOnce(epsilon=epsilon, shares=shares, noise=seeded)
            release = once.combine(members[name][:n_sites], hub)
            main = (epsilon, n_sites) == (asked.epsilon, asked.n_sites)
            for n_records in asked.sizes if main else [asked.n_records]:
                cell = Cell(name, noise, epsilon, n_sites, n_records)
                self._measure(cell, asking[n_records], release, test, own, found)

        for noise in (SHARED, AT_SITES):
            for name in members:
                measure(name, noise, asked.epsilon, asked.n_sites)
            if repeat == 0:
                self.favoured[noise] = _gather(asked, found).at(noise).statistic
            for epsilon, n_sites in self._others():
                measure(self.favoured[noise], noise, epsilon, n_sites)

    def _others(self) -> list[tuple[float, int]]:
        asked = self.asked
        pairs = [(asked.epsilon, n) for n in asked.ladder if n != asked.n_sites]
        return pairs + [(e, asked.n_sites) for e in asked.epsilons if e != asked.epsilon]

    def _measure(
        self,
        cell: Cell,
        site: Public,
        release: Predictor,
        test: Public,
        own: dict[int, dict[str, float]],
        found: Measured,
    ) -> None:
        model = adapt(release, (site.X, np.asarray(site.y)), compare=False, progress=_silent)
        if cell.n_records not in own:
            own[cell.n_records] = measures(model.own_, test.X, test.y)
        measured = {
            OWN: own[cell.n_records],
            RELEASE: measures(release, test.X, test.y),
            ADAPTED: measures(model, test.X, test.y),
        }
        for name, one in measured.items():
            found.setdefault(cell, {}).setdefault(name, []).append(one)


def _fit_all(statistic: Learner, sites: Sequence[Public]) -> list[Learner]:
    """Return the exact sum of each site; where persons are the unit, each record is one."""
    exact, fitted = clone(statistic).set_params(epsilon=math.inf), []
    for site in sites:
        labels = np.asarray(site.y)
        whose = {"persons": np.arange(len(labels))} if exact.unit == "person" else {}
        fitted.append(clone(exact).fit(site.X, labels, **whose))
    return fitted


def _silent(done: int, n_steps: int) -> None:
    """Show no progress: the trial has a bar of its own."""
