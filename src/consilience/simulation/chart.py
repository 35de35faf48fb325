"""The chart of a simulation: one metric of every method over the levels of epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from consilience.evaluation.baselines import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from consilience.simulation.report import Summary

# Okabe and Ito's colours for ensembles, distinct to every eye. Baselines are grey and have
# different markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREYS = ("#333333", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")


def title_of(method: str) -> str:
    """Return a method's name for readers."""
    return TITLES.get(method, f"joined: {method}")


def draw_summaries(lines: Sequence[Summary], path: str | Path, *, connected: bool) -> None:
    """Draw means and standard deviations over the repeats, with one panel per learner.

    `connected` says whether the levels are a scale, so that lines between them make sense.
    """
    from matplotlib.figure import Figure  # loaded here: it takes a second, and only charts need it

    learners = list(dict.fromkeys(line.learner for line in lines))
    figure = Figure(figsize=(1.5 + 6.5 * len(learners), 5.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(learners), sharey=True, squeeze=False)[0]
    methods = list(dict.fromkeys(line.method for line in lines))
    for axes, learner in zip(panels, learners, strict=True):
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
    panels[0].set_ylabel(
        f"{lines[0].metric}: mean and standard deviation of {lines[0].repeats} repeats"
    )
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


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
