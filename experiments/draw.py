"""Pictures: each figure as the paper drew it, and once more with corrected methods and baselines.

The paper's methods are solid and black or blue-ish, ours dashed in warm colours, baselines grey;
error bars are standard deviations over all trials (repeats × draws of noise), as in the papers.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from .design import Figure, Method, Panel
from .kinds import Lines

STYLES = {
    "paper": {
        "colours": ("#0072B2", "#111111", "#7B3FA0", "#56B4E9", "#5B6B00"),
        "line": "-",
        "width": 1.9,
    },
    "corrected": {
        "line": (0, (4, 2)),
        "width": 1.6,
        "colours": ("#D55E00", "#CC79A7", "#E69F00", "#009E73", "#B22222"),
    },
    "baseline": {
        "colours": ("#5A5A5A", "#A0A0A0", "#7D7D7D", "#B8B8B8", "#3A3A3A", "#909090"),
        "line": ":",
        "width": 1.6,
    },
}
MARKERS = {"paper": "os^Dv", "corrected": "PX*hd", "baseline": ".+x1|_"}
SHAPES = {  # of markers, on a line of 34 × 12
    "o": "M13.5 6a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    ".": "M15 6a2 2 0 1 0 4 0a2 2 0 1 0-4 0z",
    "s": "M14 3h6v6h-6z",
    "^": "M17 2l4 7h-8z",
    "v": "M17 10l4-7h-8z",
    "D": "M17 1.5l4.5 4.5-4.5 4.5-4.5-4.5z",
    "d": "M17 1.5l3 4.5-3 4.5-3-4.5z",
    "+": "M17 2v8M13 6h8",
    "P": "M16 2h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
    "x": "M14 3l6 6M20 3l-6 6",
    "X": "M14 3l6 6M20 3l-6 6M15 3l5 5",
    "*": "M17 1l1.4 3.4 3.6.3-2.8 2.3.9 3.6-3.1-2-3.1 2 .9-3.6-2.8-2.3 3.6-.3z",
    "h": "M17 2l3.5 2v4l-3.5 2-3.5-2v-4z",
    "1": "M17 6v4M17 6l-3.5-3M17 6l3.5-3",
    "|": "M17 2v8",
    "_": "M13 6h8",
}
SHADES = (
    "#B9D4EA",
    "#5B9BC8",
    "#0B3C6F",
)  # of bars that stand for the x values of one method, first to last
WORDS = {"paper": "paper: ", "corrected": "ours: ", "baseline": "baseline: "}


def draw(figure: Figure, lines: Mapping[str, Lines], stem: Path) -> None:
    """Write a figure as SVG and PNG, in the paper's form (`stem`-paper) and in full (`stem`)."""
    for suffix, everything in (("-paper", False), ("", True)):
        canvas = _canvas(figure, lines, everything)
        for ending in ("svg", "png"):
            path = stem.with_name(f"{stem.name}{suffix}.{ending}")
            # No date and a fixed salt: the same numbers give the same file.
            with mpl.rc_context({"svg.hashsalt": "consilience", "svg.fonttype": "none"}):
                canvas.savefig(
                    path, dpi=130, **({"metadata": {"Date": None}} if ending == "svg" else {})
                )
            if ending == "svg":
                path.write_text(_slim(path.read_text(encoding="utf-8")), encoding="utf-8")


def draw_panel(panel: Panel, lines: Lines | None, everything: bool) -> str:
    """Return one panel as SVG, without a legend."""
    wide = panel.kind == "bars" and len(panel.methods) > 6
    canvas = Canvas(figsize=(6.4 if wide else 4.4, 3.1), layout="constrained", facecolor="white")
    _panel(canvas.subplots(), panel, lines, everything)
    made = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "consilience", "svg.fonttype": "none"}):
        canvas.savefig(made, format="svg", metadata={"Date": None})
    return _slim(made.getvalue())


def legend(panel: Panel) -> list[tuple[str, str]]:
    """Return each line's name and a small picture of it, for a page to show in its own type."""
    if panel.kind not in ("lines", "histogram"):
        return []
    return [(WORDS[one.role] + one.label, _key(style(panel, one))) for one in panel.methods]


def _key(look: Mapping[str, Any]) -> str:
    dashes = {"-": "", ":": "1.5 3"}.get(look["linestyle"], "6 3")
    colour, marker = look["color"], SHAPES.get(look["marker"], SHAPES["o"])
    return (
        '<svg class="key-line" width="34" height="12" viewBox="0 0 34 12" aria-hidden="true">'
        f'<path d="M1 6H33" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        f'<path d="{marker}" fill="{colour}" stroke="{colour}" stroke-width="1.4"/></svg>'
    )


def _slim(svg: str) -> str:
    """Return the same picture in a third of the bytes: the report holds over a hundred."""
    svg = re.sub(r"<!(--.*?--|DOCTYPE.*?)>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = svg.replace("<svg ", '<svg font-family="DejaVu Sans, Verdana, sans-serif" ', 1)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    # Hundredths of a point, in tags only: what stands between them are labels.
    svg = re.sub(
        r"<[^>]*>",
        lambda tag: re.sub(r"\d+\.\d{3,}", lambda one: f"{float(one[0]):.2f}", tag[0]),
        svg,
    )
    svg = re.sub(r' (?:id="(?!m[0-9a-f]{10}|p[0-9a-f]{10}|h[0-9a-f]{10})[^"]*")', "", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _canvas(figure: Figure, lines: Mapping[str, Lines], everything: bool) -> Canvas:
    shown = [panel for panel in figure.panels if panel.kind == "drawing" or panel.id in lines]
    columns = min(figure.columns, len(shown))
    rows = math.ceil(len(shown) / columns)
    legend = [
        method
        for panel in shown
        if panel.kind in ("lines", "histogram")
        for method in _drawn(panel, everything)
    ]
    labels = {WORDS[method.role] + method.label for method in legend}
    width = max(4.6, 3.9 * columns)
    inches = 0.085 * max(map(len, labels), default=1) + 0.55  # of one entry of the legend
    per_row = max(1, min(len(labels), int(width / inches)))
    size = (width, 3.2 * rows + 0.19 * math.ceil(len(labels) / per_row) + 0.2)
    canvas = Canvas(figsize=size, layout="constrained", facecolor="white")
    axes = canvas.subplots(rows, columns, squeeze=False)
    for place in axes.flat[len(shown) :]:
        place.set_axis_off()
    for place, panel in zip(axes.flat, shown, strict=False):
        _panel(place, panel, lines.get(panel.id), everything)
    handles = {
        label: h
        for place in axes.flat
        for h, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    if handles:
        style = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
        canvas.legend(list(handles.values()), list(handles), ncols=per_row, **style)
    return canvas


def _drawn(panel: Panel, everything: bool) -> list[Method]:
    return [method for method in panel.methods if everything or method.role == "paper"]


def _panel(axes: Axes, panel: Panel, lines: Lines | None, everything: bool) -> None:
    axes.set_title(f"{panel.id}  {panel.title}", loc="left", fontsize=9)
    axes.tick_params(labelsize=8)
    if panel.kind == "drawing":
        assert panel.drawing is not None
        panel.drawing(axes)
        return
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(panel.xlabel, fontsize=8.5)
    axes.set_ylabel(panel.ylabel, fontsize=8.5)
    assert lines is not None
    kinds = {"lines": _lines, "bars": _bars, "histogram": _histogram}
    kinds[panel.kind](axes, panel, lines, _drawn(panel, everything))
    if panel.metric == "error" and panel.kind != "histogram" and panel.yscale == "linear":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def style(panel: Panel, method: Method) -> dict[str, Any]:
    """Return colour, line and marker of a method: by its role and its place in that role."""
    place = [one.label for one in panel.methods if one.role == method.role].index(method.label)
    look = STYLES[method.role]
    markers = MARKERS[method.role]
    return {
        "color": look["colours"][place % len(look["colours"])],
        "linestyle": look["line"],
        "linewidth": look["width"],
        "marker": markers[place % len(markers)],
    }


def _lines(axes: Axes, panel: Panel, lines: Lines, methods: list[Method]) -> None:
    axes.set_xscale(panel.xscale, **_symlog(panel))
    axes.set_yscale(panel.yscale)
    places = {x for xs, _ in lines.values.values() for x in xs}
    if len(places) == 1 and panel.xscale == "log":
        # matplotlib finds no limits around a single point, and says so when it is drawn.
        axes.set_xlim(min(places) / 2, min(places) * 2)
    for method in methods:
        xs, values = lines.values[method.label]
        spread = lines.spreads[method.label]
        label, look = WORDS[method.role] + method.label, style(panel, method)
        bars = {"elinewidth": 0.9, "markersize": 4.2, "ecolor": (look["color"], 0.45)}
        axes.errorbar(xs, values.mean(axis=1), spread, label=label, **look, **bars)


def _symlog(panel: Panel) -> dict[str, Any]:
    """Return settings of an axis that is logarithmic and also has a zero."""
    return {"linthresh": min(x for x in panel.x if x > 0)} if panel.xscale == "symlog" else {}


def _bars(axes: Axes, panel: Panel, lines: Lines, methods: list[Method]) -> None:
    """One bar per method, side by side for each x."""
    common = next(iter(lines.values.values()))[0]
    width = 0.8 / max(1, len(common))
    for i, method in enumerate(methods):
        xs, values = lines.values[method.label]
        spread = lines.spreads[method.label]
        places = i + width * (np.arange(len(xs)) - (len(xs) - 1) / 2)
        colours = SHADES[-len(xs) :] if len(xs) > 1 else [STYLES[method.role]["colours"][0]]
        error: dict[str, Any] = {"elinewidth": 0.8, "ecolor": "#444444"}
        axes.bar(
            places, values.mean(axis=1), width * 0.95, yerr=spread, color=colours, error_kw=error
        )
    if len(common) > 1:
        keys = [Patch(color=colour) for colour in SHADES[-len(common) :]]
        name = panel.xlabel or "ε"
        axes.legend(keys, [f"{name} = {x:g}" for x in common], fontsize=7.5, frameon=False)
        axes.set_xlabel("")
    turn = 60 if len(methods) > 5 else 0
    axes.set_xticks(
        range(len(methods)),
        [m.label for m in methods],
        rotation=turn,
        ha="right" if turn else "center",
    )


def _histogram(axes: Axes, panel: Panel, lines: Lines, methods: list[Method]) -> None:
    found = {method.label: lines.values[method.label][1].ravel() for method in methods}
    everything = np.concatenate(list(found.values()))
    edges = np.linspace(everything.min(), everything.max() + 1e-9, 25)
    for method in methods:
        look = style(panel, method)
        axes.hist(
            found[method.label], edges, histtype="stepfilled", alpha=0.25, color=look["color"]
        )
        axes.hist(
            found[method.label],
            edges,
            histtype="step",
            color=look["color"],
            linestyle=look["linestyle"],
            linewidth=1.6,
            label=WORDS[method.role] + method.label,
        )
