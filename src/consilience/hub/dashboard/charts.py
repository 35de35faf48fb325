"""Charts as inline SVG, drawn on the server: no script, no fixed width.

Horizontal positions are percentages and text has the page's size, so that a chart fits a phone as
well as a wide screen. Colours come from the stylesheet. Every chart says in words what it shows,
and a table beside it has the numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    "listed": "in a batch",
    "superseded": "no longer in use",
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


def draw_intervals(
    rows: Sequence[Interval], *, title: str, description: str, percent: bool
) -> Markup:
    """Return a chart with one line per row: a label, and below it the interval with its value."""
    marks = ticks(min(row.low for row in rows), max(row.high for row in rows))
    begin, end = marks[0], marks[-1]
    height = _TOP + _ROW * len(rows) + 26

    def across(value: float) -> float:
        return 2 + 96 * (min(max(value, begin), end) - begin) / (end - begin)

    parts = [_vertical("grid", across(mark), _TOP, height - 22) for mark in marks]
    for i, mark in enumerate(marks):
        # The first and last numbers stay within the chart.
        anchor, x = "middle", f"{across(mark):.2f}%"
        if i in (0, len(marks) - 1):
            anchor, x = ("start", "0") if i == 0 else ("end", "100%")
        parts.append(_tick(x, height - 6, anchor, show_number(mark, percent)))
    for i, row in enumerate(rows):
        y = _TOP + _ROW * i
        low, high, at = across(row.low), across(row.high), across(row.value)
        label = f'<text class="label" x="2%" y="{y + 15}">{escape(row.label)}</text>'
        parts.append(
            f'<g class="row {escape(row.kind)}">{label}'
            f'<line class="range" x1="{low:.2f}%" x2="{high:.2f}%" y1="{y + 30}" y2="{y + 30}"/>'
            f"{_vertical('end', low, y + 25, y + 35)}{_vertical('end', high, y + 25, y + 35)}"
            f'<circle class="dot" cx="{at:.2f}%" cy="{y + 30}" r="5.5"/></g>'
        )
    return _svg("intervals", "".join(parts), height, title, description)


def show_number(value: float, percent: bool) -> str:
    """Write a number as axes and tables show it."""
    return f"{100 * value:.3g} %" if percent else f"{round(value, 10):.4g}"


def draw_bar(share: float, *, negative: bool = False) -> Markup:
    """Return a bar as long as `share` of its cell.

    Screen readers skip it, because the number is beside it.
    """
    width = 100 * min(max(share, 0.0), 1.0) if math.isfinite(share) else 100.0
    kind = "bar negative" if negative else "bar"
    return Markup(  # noqa: S704  numbers only
        f'<svg class="{kind}" aria-hidden="true" focusable="false" width="100%" height="12">'
        f'<rect class="track" width="100%" height="12" rx="3"/>'
        f'<rect class="value" width="{width:.2f}%" height="12" rx="3"/></svg>'
    )


def draw_timeline(
    received: Mapping[tuple[str, str], int], *, since: str, until: str, title: str
) -> Markup:
    """Return a chart of how many contributions were received when, stacked by their state."""
    earliest = min([since, *(at for at, _ in received)])
    begin, end = (datetime.fromisoformat(at).timestamp() for at in (earliest, until))
    name, seconds = _bar_length(end - begin)
    origin = begin // seconds * seconds
    n_bars = max(6, int((end - origin) // seconds) + 1)
    counts, states = Counter[tuple[int, str]](), Counter[str]()
    for (moment, state), n in received.items():
        counts[int((datetime.fromisoformat(moment).timestamp() - origin) // seconds), state] += n
        states[state] += n
    highest = max(sum(counts[i, state] for state in _STATES) for i in range(n_bars))
    marks = ticks(0, max(1, highest), about=4)
    top, parts = marks[-1], []
    for mark in marks:
        if mark == int(mark):
            y = _PLOT * (1 - mark / top) + 10
            parts.append(f'<line class="grid" x1="10%" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="0" y="{y + 4:.1f}">{mark:,.0f}</text>')
    bars = "".join(_stack_bars(counts, n_bars, top))
    parts.append(f'<svg x="10%" width="90%" height="{_PLOT + 11}">{bars}</svg>')
    for x, anchor, at in (("10%", "start", origin), ("100%", "end", origin + seconds * n_bars)):
        form = "%Y-%m-%d" if seconds >= 86400 else "%Y-%m-%d %H:%M"
        text = datetime.fromtimestamp(at, UTC).strftime(form)
        parts.append(_tick(x, _PLOT + 28, anchor, text))
    words = ", ".join(f"{states[state]:,} {_STATES[state]}" for state in _STATES if states[state])
    description = f"{states.total():,} contributions, counted for each {name}: {words or 'none'}."
    return _svg("over-time", "".join(parts), _PLOT + 34, title, description)


def _stack_bars(counts: Counter[tuple[int, str]], n_bars: int, top: float) -> Iterator[str]:
    for i in range(n_bars):
        x, width, y = 100 * i / n_bars + 0.3, 100 / n_bars - 0.6, _PLOT + 10.0
        for state in _STATES:
            tall = _PLOT * counts[i, state] / top
            y -= tall
            if tall:
                size = f'width="{width:.2f}%" y="{y:.1f}" height="{tall:.1f}"'
                yield f'<rect class="{state}" x="{x:.2f}%" {size}/>'


def _bar_length(seconds: float) -> tuple[str, int]:
    """Return how long a bar lasts, in words and in seconds, so that there are not too many."""
    fitting = (step for step in _STEPS if seconds / step[1] < MOST_BARS - 1)
    days = math.ceil(seconds / 86400 / (MOST_BARS - 1))
    return next(fitting, (f"{days} days", days * 86400))


def _vertical(kind: str, x: float, top: int, bottom: int) -> str:
    return f'<line class="{kind}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top}" y2="{bottom}"/>'


def _tick(x: str, y: int, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _svg(kind: str, inside: str, height: int, title: str, description: str) -> Markup:
    return Markup(  # noqa: S704  texts are escaped where they are inserted
        f'<svg class="chart {kind}" role="img" width="100%" height="{height}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{inside}</svg>"
    )
