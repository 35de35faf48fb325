"""The classes that describe an experiment: Paper, Figure, Panel, Method.

Every `experiments/<paper>/figures.py` defines one `PAPER`. A panel says which data it
uses, what is on the x axis, and how the arguments of `consilience.simulate` follow from x; nothing
here trains anything. `run.py` runs panels, `verdicts.py` judges them,
`draw.py` and `report.py` show them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
Arguments = Callable[
    [Any, Any], dict[str, Any]
]  # (x, data) -> what simulate() gets beside X, y, test, repeats, seed
MAIN = "main"


@dataclass(frozen=True)
class Method:
    """One line (or bar, or histogram) of a panel.

    ``name`` is the aggregator's name in the simulate call, one of simulate's baselines
    ("public-only", "pooled-exact", …), or a single site ("site-001"). ``learner`` is the learner's
    name there; of several, each x shows the one with the best mean, which is tuning in hindsight
    and must be labelled so. ``level`` picks one of several epsilon levels where epsilon is not on
    the x axis.
    """

    label: str
    name: str
    role: Literal["paper", "corrected", "baseline"]
    learner: str | tuple[str, ...] = "paper"
    run: str = MAIN
    level: str | None = None
    metric: str | None = None  # unless the panel's


@dataclass(frozen=True)
class Panel:
    """One coordinate system: data, x values, the simulate() calls, what is drawn.

    ``arguments`` is one function of (x, data), or several by the name of a run; a method says which
    run it is from. Points that differ in `epsilon` only are computed in one simulate() call, so put
    epsilon there as a number. ``quick_x`` are the x values of the quick run where all would take
    too long.
    """

    id: str
    title: str
    data: str  # a name in datasets.LOADERS
    x: Sequence[Any]
    xlabel: str
    arguments: Arguments | Mapping[str, Arguments]
    methods: Sequence[Method]
    quick: int = 3  # repeats
    full: int = 10
    quick_x: Sequence[Any] | None = None
    metric: str = "error"
    better: Literal["low", "high"] = (
        "low"  # which way the metric is good, for methods tuned in hindsight
    )
    ylabel: str = "error rate"
    xscale: str = "linear"
    yscale: str = "linear"
    kind: Literal["lines", "bars", "histogram", "drawing"] = "lines"
    drawing: Callable[[Any], None] | None = (
        None  # kind="drawing": draws on Matplotlib axes, without any run
    )
    # (x values, data, repeats, seed) -> rows of x, label, repeat, value: what simulate() does not
    # measure
    computed: Callable[[Sequence[Any], Any, int, int], list[dict[str, Any]]] | None = None
    # "fixed": each master seed divides the records once, and repeats are draws of noise
    division: Literal["redrawn", "fixed"] = "redrawn"
    note: str = ""  # where this panel departs from the paper's

    def runs(self) -> Mapping[str, Arguments]:
        """Return the functions that give the simulate() arguments, by run."""
        return self.arguments if isinstance(self.arguments, Mapping) else {MAIN: self.arguments}

    def values(self, full: bool) -> list[Any]:
        """Return the x values of a quick or full run."""
        return list(self.x if full or self.quick_x is None else self.quick_x)

    def repeats(self, full: bool) -> int:
        """Return how often a quick or full run repeats each point."""
        return self.full if full else self.quick


@dataclass(frozen=True)
class Figure:
    """One figure of a paper, `columns` panels in a row; or a table, which has no panels."""

    id: str
    caption: str
    panels: Sequence[Panel] = ()
    columns: int = 1


@dataclass(frozen=True)
class Paper:
    """One folder under experiments/."""

    name: str
    title: str
    citation: str
    figures: Sequence[Figure]

    def panel(self, panel: str) -> Panel:
        """Return the panel of that id."""
        return next(one for figure in self.figures for one in figure.panels if one.id == panel)

    @property
    def folder(self) -> Path:
        """Where README.md, figures.py and expected.toml lie."""
        return HERE / self.name


def papers() -> list[Paper]:
    """Return every paper under experiments/, in the order of their names."""
    names = sorted(path.parent.name for path in HERE.glob("*/figures.py"))
    return [importlib.import_module(f"experiments.{name}.figures").PAPER for name in names]
