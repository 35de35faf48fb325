"""Charts as inline SVG, drawn on the server: no script, no fixed width, colours from the stylesheet.

Positions across are percentages and text has the page's size, so that a chart fits a phone and a
wide screen alike. Every chart says in words what it shows; the numbers themselves stand in a table
beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from markupsafe import Markup, escape

MOST_BARS = 30
_STEPS = (
    ("hour", 3600),
    ("6 hours", 6 * 3600),
    ("day", 86400),
    ("week", 7 * 86400),
    ("30 days", 30 * 86400),
)
_STATES = {
    "accepted": "in use",
    "superseded": "superseded by a newer one",
    "withdrawn": "withdrawn",
}
_ROW, _TOP, _PLOT = 46, 6, 130  # pixels


class Interval(NamedTuple):
    """One row of a chart of intervals."""

    label: str
    kind: str  # "study", "baseline" or "other"
    value: float
    low: float
    high: float


def ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Return round numbers from `low` or below to `high` or above.

    Examples
    --------
    >>> ticks(0.03, 0.21)
    [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]
    """
    span = max(high - low, 1e-9)
    raw = span / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def intervals(rows: Sequence[Interval], *, title: str, description: str, percent: bool) -> Markup:
    """Return a chart with one line per row: its label, and under it the interval with the value marked."""
    marks = ticks(min(row.low for row in rows), max(row.high for row in rows))
    begin, end = marks[0], marks[-1]
    height = _TOP + _ROW * len(rows) + 26

    def across(value: float) -> float:
        return 2 + 96 * (min(max(value, begin), end) - begin) / (end - begin)

    parts = [
        f'<line class="grid" x1="{across(mark):.2f}%" x2="{across(mark):.2f}%" y1="{_TOP}" y2="{height - 22}"/>'
        for mark in marks
    ]
    for i, mark in enumerate(marks):
        anchor = "start" if i == 0 else "end" if i == len(marks) - 1 else "middle"
        x = "0" if i == 0 else "100%" if i == len(marks) - 1 else f"{across(mark):.2f}%"
        parts.append(
            f'<text class="tick" x="{x}" y="{height - 6}" text-anchor="{anchor}">{shown(mark, percent)}</text>'
        )
    for i, row in enumerate(rows):
        y = _TOP + _ROW * i
        low, high, at = across(row.low), across(row.high), across(row.value)
        parts.append(
            f'<g class="row {escape(row.kind)}"><text class="label" x="2%" y="{y + 15}">{escape(row.label)}</text>'
            f'<line class="range" x1="{low:.2f}%" x2="{high:.2f}%" y1="{y + 30}" y2="{y + 30}"/>'
            f'<line class="end" x1="{low:.2f}%" x2="{low:.2f}%" y1="{y + 25}" y2="{y + 35}"/>'
            f'<line class="end" x1="{high:.2f}%" x2="{high:.2f}%" y1="{y + 25}" y2="{y + 35}"/>'
            f'<circle class="dot" cx="{at:.2f}%" cy="{y + 30}" r="5.5"/></g>'
        )
    return _svg("intervals", "".join(parts), height, title, description)


def shown(value: float, percent: bool) -> str:
    """Return a number as axes and tables show it."""
    return f"{100 * value:.3g} %" if percent else f"{value:.4g}"


def bar(share: float, *, negative: bool = False) -> Markup:
    """Return a bar as long as `share` of its cell; the number stands beside it, so a reader skips it."""
    width = 100 * min(max(share, 0.0), 1.0) if math.isfinite(share) else 100.0
    kind = "bar negative" if negative else "bar"
    return Markup(  # noqa: S704  numbers only
        f'<svg class="{kind}" aria-hidden="true" focusable="false" width="100%" height="12">'
        f'<rect class="track" width="100%" height="12" rx="3"/>'
        f'<rect class="value" width="{width:.2f}%" height="12" rx="3"/></svg>'
    )


def over_time(came: Sequence[tuple[str, str]], *, since: str, until: str, title: str) -> Markup:
    """Return a chart of how many contributions came when, stacked by what became of them."""
    begin, end = (
        datetime.fromisoformat(at).timestamp()
        for at in (min([since, *(at for at, _ in came)]), until)
    )
    name, seconds = _step(end - begin)
    origin = begin // seconds * seconds
    n_bars = max(6, int((end - origin) // seconds) + 1)
    counted = Counter(
        (int((datetime.fromisoformat(at).timestamp() - origin) // seconds), state) for at, state in came
    )  # fmt: skip
    marks = ticks(
        0, max([1, *(sum(counted[i, state] for state in _STATES) for i in range(n_bars))]), about=4
    )
    top, parts, bars = marks[-1], [], []
    for mark in marks:
        if mark == int(mark):
            y = _PLOT * (1 - mark / top) + 10
            parts.append(f'<line class="grid" x1="10%" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="0" y="{y + 4:.1f}">{mark:,.0f}</text>')
    for i in range(n_bars):
        y = _PLOT + 10.0
        for state in _STATES:
            tall = _PLOT * counted[i, state] / top
            y -= tall
            if tall:
                x, wide = 100 * i / n_bars + 0.3, 100 / n_bars - 0.6
                bars.append(
                    f'<rect class="{state}" x="{x:.2f}%" width="{wide:.2f}%" y="{y:.1f}" height="{tall:.1f}"/>'
                )
    parts.append(f'<svg x="10%" width="90%" height="{_PLOT + 11}">{"".join(bars)}</svg>')
    for edge, anchor, at in (("10%", "start", origin), ("100%", "end", origin + seconds * n_bars)):
        moment = datetime.fromtimestamp(at, UTC)
        text = f"{moment:%Y-%m-%d}" if seconds >= 86400 else f"{moment:%Y-%m-%d %H:%M}"
        parts.append(
            f'<text class="tick" x="{edge}" y="{_PLOT + 28}" text-anchor="{anchor}">{text}</text>'
        )
    every = Counter(state for _, state in came)
    words = (
        ", ".join(f"{every[state]:,} {_STATES[state]}" for state in _STATES if every[state])
        or "none yet"
    )
    description = f"{len(came):,} contributions, counted for each {name}: {words}."
    return _svg("over-time", "".join(parts), _PLOT + 34, title, description)


def _step(seconds: float) -> tuple[str, int]:
    """Return how long a bar lasts, in words and seconds, so that there are few enough of them."""
    fitting = (step for step in _STEPS if seconds / step[1] < MOST_BARS - 1)
    days = math.ceil(seconds / 86400 / (MOST_BARS - 1))
    return next(fitting, (f"{days} days", days * 86400))


def _svg(kind: str, inside: str, height: int, title: str, description: str) -> Markup:
    return Markup(  # noqa: S704  texts are escaped where they are put in
        f'<svg class="chart {kind}" role="img" width="100%" height="{height}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{inside}</svg>"
    )
