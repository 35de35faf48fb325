"""What a simulation found: one row per number, summaries, a chart, and whether joining helps.

Repeats are the unit of every summary: draws of noise on one division share its records, so they are
first averaged within the repeat, and spreads and intervals are those of the repeats' means.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from consilience.display.html import Part, bars, card
from consilience.display.panels import panels
from consilience.errors import SettingsError
from consilience.evaluation.adaptation import ADAPTED, OWN, RELEASE
from consilience.evaluation.baselines import ALTERNATIVES, EXACT, GUESS, POOLED, PUBLIC, TITLES
from consilience.evaluation.compare import MEAN, Gap, Joining, repeated_gap
from consilience.evaluation.measures import AUC, ERROR, METRICS, RMSE, STATED, Metric
from consilience.privacy.guarantee import Guarantee

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]

# Okabe and Ito's colours for ensembles, distinct to every eye. Baselines are grey and have
# different markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREYS = ("#333333", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")
# The sites that adapted releases: all of them, and the smaller and the larger half apart.
GROUPS = {"": "sites", "@small": "small sites", "@large": "large sites"}
UNLIKE = 1.5  # times as large: sites of different sizes are shown apart


def name_at_sites(method: str, what: str) -> str:
    """Return the name of what sites get of a method: own model, release or adapted model."""
    return f"{method}: {what}"


@dataclass(frozen=True)
class Row:
    """One number of the report.

    ``epsilon`` names the level; the sites' own lie between ``epsilon_low`` and ``epsilon_high``.
    """

    repeat: int
    learner: str
    epsilon: str
    epsilon_low: float
    epsilon_high: float
    # "constant", "public", "local", "global" (pooled), "distributed" (an ensemble), "site" (one
    # site, or what sites get that adapt a release)
    kind: str
    method: str
    metric: str
    value: float
    draw: int = 0  # of the noise, on this repeat's division; without noise there is draw 0 only


@dataclass(frozen=True)
class Summary:
    """One metric of one method over all repeats, each the mean of its draws.

    The standard deviation and the standard error are nan for one repeat.
    """

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
    """All numbers of a simulation, one `Row` per repeat, draw, level, learner, method and metric.

    ``timings`` are rows too, of the metric "seconds": of training one model (of a site: the mean),
    or of combining. They differ from run to run, so reports are compared and written without them.

    ``guarantees`` holds, by (learner, level, method), what a record of any site has in that one
    model, each taken alone; ``guarantee`` is the weakest of them, or void with the reason.
    """

    rows: tuple[Row, ...] = field(repr=False)
    guarantees: Mapping[tuple[str, str, str], Guarantee] = field(repr=False)
    settings: Mapping[str, Any]
    guarantee: Guarantee | None
    seconds: float = field(compare=False)
    timings: tuple[Row, ...] = field(default=(), repr=False, compare=False)

    @property
    def main(self) -> str:
        """The metric that methods are compared by: what was asked for, else "error" or "rmse"."""
        return str(self.settings["metric"])

    @property
    def measure(self) -> Metric:
        """The metric that methods are compared by, with its direction."""
        return METRICS[self.main]

    @cached_property
    def numeric(self) -> bool:
        """Whether numbers were predicted, and not classes."""
        return any(row.metric == RMSE.name for row in self.rows)

    def values(self, learner: str, epsilon: str, method: str, metric: str | None = None) -> Array:
        """Return one metric of one method for each repeat, the mean of its draws.

        The arrays of two methods are paired: a repeat divides the records the same for all.
        """
        return self._grouped.get((learner, epsilon, method, metric or self.main), np.zeros(0))

    @cached_property
    def _grouped(self) -> dict[tuple[str, str, str, str], Array]:
        groups: dict[tuple[str, str, str, str], dict[int, list[float]]] = {}
        for row in (*self.rows, *self.timings):
            by_repeat = groups.setdefault((row.learner, row.epsilon, row.method, row.metric), {})
            by_repeat.setdefault(row.repeat, []).append(row.value)
        return {
            key: np.array([np.mean(draws) for draws in by_repeat.values()])
            for key, by_repeat in groups.items()
        }

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return {row.method: row.kind for row in self.rows}

    def table(
        self, metric: str | None = None, *, single_sites: bool = False
    ) -> tuple[Summary, ...]:
        """Summarise one metric, by default the main one, of every method over the repeats."""
        lines = []
        for (learner, epsilon, method, name), values in self._grouped.items():
            kind = self._kinds[method]
            if name != (metric or self.main) or (kind == "site" and not single_sites):
                continue
            sd = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            facts = (learner, epsilon, kind, method, name, float(np.mean(values)))
            lines.append(Summary(*facts, sd, sd / math.sqrt(len(values)), len(values)))
        known = sorted({metric for *_, metric in self._grouped})
        if not lines:
            raise SettingsError(
                f"The 'metric' of a table must be one of {known}. Got {reprlib.repr(metric)} "
                "instead."
            )
        return tuple(lines)

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """The (learner, level) pairs, in order."""
        return list(dict.fromkeys((row.learner, row.epsilon) for row in self.rows))

    # ------------------------------------------------------------------ at the sites

    @property
    def groups(self) -> dict[str, str]:
        """The groups of sites that adapted releases: apart by size where sizes differ."""
        sizes = self.settings["sizes"]
        apart = max(sizes) > UNLIKE * min(sizes) and self.settings.get("adapting", 0) > 1
        return GROUPS if apart else {"": GROUPS[""]}

    def at_sites(
        self, cell: tuple[str, str], method: str, what: str, metric: Metric, group: str = ""
    ) -> Array:
        """Return own exact model, release or adapted model of sites, for each repeat.

        `what` is one of the names of `evaluation.adaptation`, `group` one of `groups`.
        """
        return self.values(*cell, name_at_sites(method, what), f"{metric.name}{group}")

    def paying(
        self, cell: tuple[str, str], method: str, metric: Metric | None = None, group: str = ""
    ) -> Gap | None:
        """Compare adapted models with own exact ones, repeat by repeat; None if there are none."""
        metric = metric or self.judged_at_sites
        own, adapted = (self.at_sites(cell, method, what, metric, group) for what in (OWN, ADAPTED))
        if not adapted.size or own.size != adapted.size:
            return None
        return repeated_gap(own, adapted, metric=metric, overlap=self._overlap)

    @cached_property
    def judged_at_sites(self) -> Metric:
        """What decides at sites: AUC where the main metric is the error and there is one."""
        measured = {row.metric for row in self.rows if row.method.endswith(f": {ADAPTED}")}
        return AUC if self.measure is ERROR and AUC.name in measured else self.measure

    def adapted_methods(self, cell: tuple[str, str]) -> list[str]:
        """Return the methods whose releases were adapted, the one that pays most first."""
        gaps = {
            method: gap
            for method, kind in self._kinds.items()
            if kind == "distributed" and (gap := self.paying(cell, method)) is not None
        }
        return sorted(gaps, key=lambda method: -gaps[method].gain.value)

    @property
    def best_at_sites(self) -> dict[str, tuple[str, str]]:
        """The learner and the method that pay most for sites, in hindsight, by level."""
        found: dict[str, tuple[float, tuple[str, str]]] = {}
        for cell in self.cells:
            for method in self.adapted_methods(cell)[:1]:
                gap = self.paying(cell, method)
                assert gap is not None
                learner, level = cell
                best = found.get(level)
                if best is None or gap.gain.value > best[0]:
                    found[level] = gap.gain.value, (learner, method)
        return {level: choice for level, (_, choice) in found.items()}

    def pays(self, level: str) -> str:
        """Say for whom joining pays at a level, by the method that pays most."""
        if level not in self.best_at_sites:
            return ""
        learner, method = self.best_at_sites[level]
        metric, parts = self.judged_at_sites, []
        for group, who in self.groups.items():
            gap = self.paying((learner, level), method, group=group)
            if gap is None or (group == "" and len(self.groups) > 1):
                continue
            words = {"better": "pays", "worse": "does not pay", "unclear": "does not clearly pay"}
            joining = Joining({"own exact models": gap}, metric.name)
            parts.append(
                f"{words[gap.verdict]} for {who}: adapted to the release, their {metric.title} is "
                f"{joining.show(gap.joined)}, {joining.comparison}"
            )
        said = f"At epsilon={level}, joining by {learner} with {method} {'; it '.join(parts)}."
        several = len({learner for learner, _ in self.cells}) > 1
        return f"{said} No other method tried here pays more." if several else said

    def _sites_table(self, cell: tuple[str, str]) -> list[str]:
        """Return what sites get: own exact models, releases and adapted models."""
        methods, lines = self.adapted_methods(cell), []
        shown = dict.fromkeys((self.judged_at_sites, self.measure, AUC, ERROR))
        for metric in shown:
            rows = [(f"{OWN}, of sites", methods[0], OWN)] if methods else []
            for method in methods:
                rows += [(f"{method}: {what}", method, what) for what in (RELEASE, ADAPTED)]
            cells = []
            for title, method, what in rows:
                values = [self.at_sites(cell, method, what, metric, group) for group in self.groups]
                if all(part.size for part in values):
                    cells.append("".join(map(_spread, values)) + f"  {title}")
            if cells:
                heads = "".join(f"  {who:>17}" for who in self.groups.values())
                lines += ["", f"{metric.title} at sites that adapt the release", heads, *cells]
        for method in methods:
            gaps = [self.paying(cell, method, group=group) for group in self.groups]
            gains = "; ".join(
                f"{who} {self.judged_at_sites.show_gain(gap.gain.low, gap.gain.high)}"
                for who, gap in zip(self.groups.values(), gaps, strict=True)
                if gap is not None and math.isfinite(gap.gain.low)
            )
            if gains:
                lines.append(f"  {method}: adapted beside own, paired, 95 %: {gains}")
        return lines

    # ------------------------------------------------------------------ in words

    @property
    def sentence(self) -> str:
        """Whether joining helps, at each level of each learner, and what to keep in mind."""
        lines = [self._verdict(*cell) for cell in self.cells]
        lines += [self.pays(level) for level in self.best_at_sites]
        if self.guarantee is not None and not self.guarantee.holds:
            lines.append(
                f"The models of this simulation have no guarantee: {self.guarantee.void_reason}."
            )
        return "\n".join(filter(None, lines))

    def _verdict(self, learner: str, epsilon: str) -> str:
        """Return the verdict on one level of one learner; empty if no aggregator was tried."""
        kinds = self._kinds.items()
        means = {
            method: values.mean()
            for method, kind in kinds
            if kind == "distributed" and (values := self.values(learner, epsilon, method)).size
        }
        if not means:
            return ""
        best = max(means, key=lambda method: self.measure.gain(0.0, float(means[method])))
        joining = self.joining(learner, epsilon, best)
        chosen = f", the best in hindsight of {len(means)} aggregators," if len(means) > 1 else ""
        against = f": {joining.comparison}" if joining.gaps else ", with nothing to compare it with"
        text = (
            f"{learner} at epsilon={epsilon}: joining {self.settings['sites']} sites by "
            f"{best}{chosen} {joining.answer}. Its {self.measure.title} is "
            f"{joining.show(means[best])}{against}."
        )
        pooled = [
            f"{joining.show(values.mean())} {how}"
            for method, how in ((EXACT, "without privacy"), (POOLED, "with it"))
            if (values := self.values(learner, epsilon, method)).size
        ]
        text += f" Pooling all records gives {' and '.join(pooled)}." if pooled else ""
        helped = self.values(learner, epsilon, best, "helped")
        if helped.size:
            n_helped = float(helped.mean()) * self.settings["sites"]
            text += f" On average {n_helped:.1f} sites do better than alone with the same privacy."
        if ALTERNATIVES[PUBLIC] not in joining.gaps:
            labelled = self.settings.get("labelled", False)
            missing = "is no model of the" if labelled else "were no labelled"
            text += f" There {missing} public records to compare with."
        ranked = self.joining(learner, epsilon, best, AUC)
        caution = joining.caution(has_auc=True)
        if caution and ranked.gaps:
            value = self.values(learner, epsilon, best, AUC.name).mean()
            text += (
                f" {caution} By AUC, joining {ranked.answer}: it is {ranked.show(value)}, "
                f"{ranked.comparison}. Judge by it with --metric auc."
            )
        return text

    def joining(
        self, learner: str, epsilon: str, method: str, metric: Metric | None = None
    ) -> Joining:
        """Compare one ensemble, repeat by repeat, with what a site could do instead.

        By the main metric unless another one is given, which not every method may have.
        """
        metric, overlap = metric or self.measure, self._overlap
        joined = self.values(learner, epsilon, method, metric.name)
        others = {
            self.title_of(name) if name == GUESS else title: self.values(
                learner, epsilon, name, metric.name
            )
            for name, title in ALTERNATIVES.items()
        }
        gaps = {
            title: repeated_gap(other, joined, metric=metric, overlap=overlap)
            for title, other in others.items()
            if other.size and joined.size
        }
        return Joining(gaps, metric.name)

    @property
    def _overlap(self) -> float:
        """The number of test records over that of training records, if both are drawn anew."""
        facts = self.settings
        return facts["test"] / max(1, sum(facts["sizes"])) if facts["resampled"] else 0.0

    def _repr_html_(self) -> str:
        parts: list[Part] = [("", [self.sentence], [])]
        chart, n = "", self.settings["repeats"]
        for cell in self.cells:
            lines = [line for line in self.table() if (line.learner, line.epsilon) == cell]
            lines.sort(key=lambda line: self._place(*cell, line.method))
            heading = "{}, epsilon={}".format(*cell)
            chart += bars(
                [(self.title_of(line.method), line.mean) for line in lines],
                f"{heading}: {self.measure.title}, mean of {n} repeats",
            )
            rows = [
                (self.title_of(line.method), f"{line.mean:.4f}", f"± {line.se:.4f}")
                for line in lines
            ]
            parts.append((f"{heading}: {self.measure.title} and its standard error", [], rows))
        return card("Simulation", *parts, chart=chart)

    def __str__(self) -> str:
        measured = {row.metric for row in self.rows}
        shown = [self.measure]
        shown += [one for one in STATED if one.name in measured and one is not self.measure]
        summaries = {
            (line.learner, line.epsilon, line.method, line.metric): line
            for metric in shown
            for line in self.table(metric.name)
        }
        which = "highest" if self.measure.higher_is_better else "lowest"
        lines = [
            f"Mean ± standard error of {self.settings['repeats']} repeats; {which} "
            f"{self.measure.title} first.",
            *(
                f"{name} is trained along {words}."
                for name, words in self.settings.get("along", {}).items()
            ),
            *self.settings.get("tuned", ()),
        ]
        for cell in self.cells:
            lines += ["", "{}, epsilon={}".format(*cell)]
            lines.append("".join(f"  {metric.title:>17}" for metric in shown))
            methods = [key[2] for key in summaries if key[:2] == cell and key[3] == self.main]
            for method in sorted(methods, key=lambda one: self._place(*cell, one)):
                cells = [summaries.get((*cell, method, metric.name)) for metric in shown]
                lines.append("".join(map(_cell, cells)) + f"  {self.title_of(method)}")
            lines += self._sites_table(cell)
        return "\n".join([*lines, "", self.sentence])

    def _place(self, learner: str, epsilon: str, method: str) -> float:
        """Return a number that is less for a better method."""
        return float(self.measure.gain(self.values(learner, epsilon, method).mean(), 0.0))

    def title_of(self, method: str) -> str:
        """Return a method's name for readers."""
        return MEAN if self.numeric and method == GUESS else title_of(method)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: settings, summaries, guarantee and sentence.

        Single rows are not part of it: write them with `to_csv` or `to_parquet`.
        """
        stated = dict.fromkeys(row.metric for row in self.rows if row.kind != "site")
        lines = [line for metric in stated for line in self.table(metric)]
        return {
            "settings": dict(self.settings),
            "table": [
                {k: None if v != v else v for k, v in asdict(line).items()} for line in lines
            ],
            "at_sites": [
                {
                    "learner": cell[0],
                    "epsilon": cell[1],
                    "method": method,
                    "sites": group.removeprefix("@") or "all",
                    "metric": self.judged_at_sites.name,
                    "own": gap.other,
                    "adapted": gap.joined,
                    "gain": [
                        value if math.isfinite(value) else None
                        for value in (gap.gain.value, gap.gain.low, gap.gain.high)
                    ],
                }
                for cell in self.cells
                for method in self.adapted_methods(cell)
                for group in self.groups
                if (gap := self.paying(cell, method, group=group)) is not None
            ],
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

    def plot(self, metric: str | None = None, *, ax: object = None) -> Array:
        """Draw one metric of every method: mean and standard deviation, a panel per learner.

        `ax` is where to draw: an Axes or several, of which each gets one learner; a Figure; or
        None, for a new figure of pyplot's. Returns the array of Axes.
        """
        # Levels with an epsilon for each site are no scale.
        connected = all(row.epsilon_low == row.epsilon_high for row in self.rows)
        return _draw_summaries(self.table(metric), ax, connected=connected)


def _spread(values: Array) -> str:
    """Return the mean of repeats and its standard error as they stand in a table."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return f"  {values.mean():>8.4f} ±{sd / math.sqrt(len(values)):>7.4f}"


def _cell(line: Summary | None) -> str:
    """Return a mean and its standard error as they stand in a table."""
    if line is None:
        return f"  {'—':>8}         "
    return f"  {line.mean:>8.4f} ±{line.se:>7.4f}"


def title_of(method: str) -> str:
    """Return a method's name for readers."""
    return TITLES.get(method, f"joined: {method}")


def _draw_summaries(lines: Sequence[Summary], ax: object, *, connected: bool) -> Array:
    """Draw means and standard deviations over the repeats, with one panel per learner.

    `connected` says whether the levels are a scale, so that lines between them make sense.
    """
    learners = list(dict.fromkeys(line.learner for line in lines))
    found = panels(len(learners), ax, size=(8.0, 5.2), across=len(learners), sharey=True)
    methods = list(dict.fromkeys(line.method for line in lines))
    for axes, learner in zip(found, learners, strict=False):
        own = [line for line in lines if line.learner == learner]
        levels = list(dict.fromkeys(line.epsilon for line in own))
        for method in methods:
            _draw_method(axes, method, methods, own, levels, "-" if connected else "")
        axes.set_xticks(range(len(levels)), levels)
        axes.set_xlim(-0.5, len(levels) - 0.5)
        axes.set_xlabel("epsilon")
        axes.set_title(learner, loc="left")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    metric = METRICS[lines[0].metric].title if lines[0].metric in METRICS else lines[0].metric
    found[0].set_ylabel(f"{metric}: mean and standard deviation of {lines[0].repeats} repeats")
    handles, names = found[0].get_legend_handles_labels()
    look: dict[str, Any] = {"ncols": 2, "frameon": False, "fontsize": 9}
    if isinstance(ax, Sequence | np.ndarray) or hasattr(ax, "plot"):  # a figure of the caller's
        found[0].legend(handles, names, **look)
    else:
        found[0].figure.legend(handles, names, loc="outside lower center", **look)
    return found


def _draw_method(
    axes: Axes,
    method: str,
    methods: Sequence[str],
    lines: Sequence[Summary],
    levels: Sequence[str],
    style: str,
) -> None:
    i, n_baselines = methods.index(method), sum(name in TITLES for name in methods)
    found = [line for line in lines if line.method == method]
    # Methods stand side by side within a level.
    shift = 0.5 * ((i + 0.5) / len(methods) - 0.5)
    ours = any(line.kind == "distributed" for line in found)
    axes.errorbar(
        np.array([levels.index(line.epsilon) for line in found]) + shift,
        [line.mean for line in found],
        np.nan_to_num([line.sd for line in found]),
        color=COLOURS[(i - n_baselines) % len(COLOURS)] if ours else GREYS[i % len(GREYS)],
        marker=MARKERS[i % len(MARKERS)],
        linestyle=style if ours or not style else ":",
        linewidth=2.0 if ours else 1.2,
        elinewidth=1.2,
        capsize=3,
        label=title_of(method),
    )
