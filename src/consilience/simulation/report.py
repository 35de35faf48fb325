"""What a simulation found: one row per number, summaries, the sentence that says whether joining helps, a chart.

Repeats are the unit of every summary: draws of noise on one division share its records, so they are
first averaged within the repeat, and spreads and intervals are those of the repeats' means.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from consilience.errors import SettingsError
from consilience.evaluation.baselines import ALTERNATIVES, EXACT, POOLED, PUBLIC, TITLES
from consilience.evaluation.compare import Joining, repeated_gap
from consilience.privacy.guarantee import Guarantee

Array = NDArray[Any]


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
    draw: int = 0  # of the noise, on this repeat's division; what draws none has draw 0 only


@dataclass(frozen=True)
class Summary:
    """One metric of one method over all repeats, each the mean of its draws: mean, standard deviation, standard error.

    Both spreads are nan for one repeat.
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
    """All numbers of a simulation, tidy: one `Row` per repeat, draw, level, learner, method and metric.

    ``timings`` are rows too, of the metric "seconds": of training one model (of a site: the mean),
    or of combining. No two runs agree on them, so reports are compared, and files written, without.

    ``guarantees`` holds, by (learner, level, method), what a record of any site has in that one
    model, each taken alone; ``guarantee`` is the weakest of them, or void with the reason.
    """

    rows: tuple[Row, ...] = field(repr=False)
    guarantees: Mapping[tuple[str, str, str], Guarantee] = field(repr=False)
    settings: Mapping[str, Any]
    guarantee: Guarantee | None
    seconds: float = field(compare=False)
    timings: tuple[Row, ...] = field(default=(), repr=False, compare=False)

    @cached_property
    def main(self) -> str:
        """The metric that methods are compared by: "error", or "rmse" for regressors."""
        return "error" if any(row.metric == "error" for row in self.rows) else "rmse"

    def values(self, learner: str, epsilon: str, method: str, metric: str | None = None) -> Array:
        """Return one metric of one method, by repeat, the mean of its draws: two such arrays are paired."""
        return self._grouped.get((learner, epsilon, method, metric or self.main), np.zeros(0))

    @cached_property
    def _grouped(self) -> dict[tuple[str, str, str, str], Array]:
        groups: dict[tuple[str, str, str, str], dict[int, list[float]]] = {}
        for row in (*self.rows, *self.timings):
            by_repeat = groups.setdefault((row.learner, row.epsilon, row.method, row.metric), {})
            by_repeat.setdefault(row.repeat, []).append(row.value)
        return {
            key: np.array([np.mean(draws) for draws in found.values()])
            for key, found in groups.items()
        }

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return {row.method: row.kind for row in self.rows}

    def table(
        self, metric: str | None = None, *, single_sites: bool = False
    ) -> tuple[Summary, ...]:
        """Summarise one metric, by default the main one, of every method over the repeats."""
        lines = []
        for (learner, epsilon, method, one), found in self._grouped.items():
            kind = self._kinds[method]
            if one != (metric or self.main) or (kind == "site" and not single_sites):
                continue
            sd = float(np.std(found, ddof=1)) if len(found) > 1 else math.nan
            facts = (learner, epsilon, kind, method, one, float(np.mean(found)))
            lines.append(Summary(*facts, sd, sd / math.sqrt(len(found)), len(found)))
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

    @property
    def sentence(self) -> str:
        """Whether joining helps, at each level of each learner, and what the rest of the page has to be read with."""
        lines = [self._verdict(*cell) for cell in self.cells]
        if self.guarantee is not None and not self.guarantee.holds:
            lines.append(
                f"The models of this simulation have no guarantee: {self.guarantee.void_reason}."
            )
        return "\n".join(lines)

    def _verdict(self, learner: str, epsilon: str) -> str:
        ours = [method for method, kind in self._kinds.items() if kind == "distributed"]
        ours = [method for method in ours if self.values(learner, epsilon, method).size]
        best = min(ours, key=lambda method: self.values(learner, epsilon, method).mean())
        joining = self.joining(learner, epsilon, best)
        chosen = f", the best in hindsight of {len(ours)} aggregators," if len(ours) > 1 else ""
        text = (
            f"{learner} at epsilon={epsilon}: joining {self.settings['sites']} sites by "
            f"{best}{chosen} {joining.answer}. Its {self.main} is "
            f"{self._shown(self.values(learner, epsilon, best))}"
        )
        text += f": {joining.comparison}." if joining.gaps else ", with nothing to compare it with."
        with_and_without = {EXACT: "without privacy", POOLED: "with it"}
        pooled = {
            how: self.values(learner, epsilon, method) for method, how in with_and_without.items()
        }
        shown = " and ".join(
            f"{self._shown(found)} {how}" for how, found in pooled.items() if found.size
        )
        text += f" Pooling all records gives {shown}." if shown else ""
        helped = self.values(learner, epsilon, best, "helped")
        if helped.size:
            n_helped = float(helped.mean()) * self.settings["sites"]
            text += f" On average {n_helped:.1f} sites do better than alone with the same privacy."
        if ALTERNATIVES[PUBLIC] not in joining.gaps:
            labelled = self.settings.get("labelled", False)
            text += f" There {'is no model of the public records' if labelled else 'were no labelled public records'}"
            text += " to compare with."
        return text

    def _shown(self, values: Array) -> str:
        return f"{values.mean():.1%}" if self.main == "error" else f"{values.mean():.4g}"

    def joining(self, learner: str, epsilon: str, method: str) -> Joining:
        """Compare one ensemble, repeat by repeat, with what a site could do instead."""
        overlap = (
            self.settings["test"] / max(1, sum(self.settings["sizes"]))
            if self.settings["resampled"]
            else 0.0
        )
        joined = self.values(learner, epsilon, method)
        others = {
            title: self.values(learner, epsilon, name) for name, title in ALTERNATIVES.items()
        }
        gaps = {
            title: repeated_gap(other, joined, overlap=overlap)
            for title, other in others.items()
            if other.size
        }
        return Joining(gaps, self.main)

    def __str__(self) -> str:
        lines, found = [], self.table()
        for learner, epsilon in self.cells:
            lines += [f"{learner}, epsilon={epsilon}", f"  {self.main:>9}  {'sd':>6}  {'se':>6}"]
            for one in found:
                if (one.learner, one.epsilon) == (learner, epsilon):
                    title = TITLES.get(one.method, f"joined: {one.method}")
                    lines.append(f"  {one.mean:>9.4f}  {one.sd:>6.4f}  {one.se:>6.4f}  {title}")
        return "\n".join([*lines, "", self.sentence])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: settings, summaries, guarantee and sentence; single rows go to files."""
        lines = [
            s for metric in dict.fromkeys(r.metric for r in self.rows) for s in self.table(metric)
        ]
        return {
            "settings": dict(self.settings),
            "table": [
                {k: None if v != v else v for k, v in asdict(line).items()} for line in lines
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

    def plot(self, path: str | Path, metric: str | None = None) -> None:
        """Draw one metric of every method: mean and standard deviation over the repeats, a panel per learner."""
        from matplotlib.figure import Figure  # loaded here: a second that only the chart needs

        lines = self.table(metric)
        learners = list(dict.fromkeys(line.learner for line in lines))
        figure = Figure(figsize=(1.5 + 6.5 * len(learners), 5.2), dpi=150, layout="constrained")
        panels = figure.subplots(1, len(learners), sharey=True, squeeze=False)[0]
        methods = list(dict.fromkeys(line.method for line in lines))
        n_baselines = sum(method in TITLES for method in methods)
        connected = all(
            row.epsilon_low == row.epsilon_high for row in self.rows
        )  # else levels are no scale
        for axes, learner in zip(panels, learners, strict=True):
            levels = list(dict.fromkeys(line.epsilon for line in lines if line.learner == learner))
            for i, method in enumerate(methods):
                found = [one for one in lines if (one.learner, one.method) == (learner, method)]
                places = np.array([levels.index(one.epsilon) for one in found]) + 0.5 * (
                    (i + 0.5) / len(methods) - 0.5
                )
                means, spreads = ([getattr(one, what) for one in found] for what in ("mean", "sd"))
                ours = any(one.kind == "distributed" for one in found)
                line = ("-" if ours else ":") if connected else ""
                axes.errorbar(
                    places,
                    means,
                    np.nan_to_num(spreads),
                    color=COLOURS[(i - n_baselines) % len(COLOURS)]
                    if ours
                    else GREYS[i % len(GREYS)],
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
        panels[0].set_ylabel(
            f"{lines[0].metric}: mean and standard deviation of {lines[0].repeats} repeats"
        )
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )
        figure.savefig(path)


# Okabe and Ito's colours for ensembles, distinct to every eye; baselines are grey and told apart by
# markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREYS = ("#333333", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")
