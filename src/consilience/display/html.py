"""Parts of web pages: sections of certificates, and what notebooks show of an object.

Everything is escaped, nothing is a script, and colours are those of the page around it, so that a
part reads as well on a dark page as on a light one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from consilience.text import Quoted, collapse

MOST_BARS = 12
_ROW = 22  # pixels
_STYLE = (
    ".consilience{max-width:46rem;overflow-wrap:anywhere}.consilience table{border-collapse:"
    "collapse}.consilience th,.consilience td{text-align:left;vertical-align:top;background:none;"
    "padding:.2rem .75rem .2rem 0;border-bottom:1px solid #8884}.consilience blockquote,"
    ".consilience tr.quoted th{border-left:3px solid #888;padding-left:.75rem}"
)
# A heading, paragraphs, and rows of which the first cell names the others.
Part = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def section(part: Part, tag: str = "h2") -> str:
    """Return a section of a page; text that is `Quoted` is set off from ours."""
    heading, paragraphs, rows = part
    body = [f"<{tag}>{escape(heading)}</{tag}>" if heading else ""]
    for paragraph in paragraphs:
        kind = "blockquote" if isinstance(paragraph, Quoted) else "p"
        body.append(f"<{kind}>{escape(paragraph)}</{kind}>")
    if rows:
        body.append(f"<table>{''.join(map(_row, rows))}</table>")
    return f"<section>{''.join(body)}</section>"


def _row(cells: Sequence[str]) -> str:
    quoted = " class=quoted" if any(isinstance(cell, Quoted) for cell in cells) else ""
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    return f"<tr{quoted}><th scope=row>{escape(cells[0])}</th>{rest}</tr>"


def card(title: str, *parts: Part, chart: str = "") -> str:
    """Return what a notebook shows of an object: a title, a chart, and sections."""
    body = "".join(section(part, "h4") for part in parts)
    heading = f"<h3>{escape(collapse(title))}</h3>"
    return f'<div class="consilience"><style>{_STYLE}</style>{heading}{chart}{body}</div>'


def bars(values: Iterable[tuple[str, float]], title: str, *, form: str = ".3g") -> str:
    """Return a chart with a horizontal bar for each number, as inline SVG.

    Of more than `MOST_BARS` the largest are drawn, and the title says so. Numbers stand beside
    their bars, for readers who cannot see them.
    """
    listed = [(collapse(name), value) for name, value in values if math.isfinite(value)]
    if not listed:
        return ""
    kept = listed
    if len(listed) > MOST_BARS:
        kept = sorted(listed, key=lambda one: -abs(one[1]))[:MOST_BARS]
        title = f"{title}: the {MOST_BARS} largest of {len(listed):,}"
    low = min(0.0, *(value for _, value in kept))
    span = max(0.0, *(value for _, value in kept)) - low or 1.0
    rows = []
    for place, (name, value) in enumerate(kept):
        y = place * _ROW
        start, width = 32 + 54 * (min(value, 0.0) - low) / span, 54 * abs(value) / span
        shown = name if len(name) <= 24 else f"{name[:23]}…"
        rows.append(
            f'<text x="0" y="{y + 15}">{escape(shown)}<title>{escape(name)}</title></text>'
            f'<rect x="{start:.2f}%" y="{y + 4}" width="{width:.2f}%" height="{_ROW - 8}" '
            f'fill-opacity="0.55"/><text x="88%" y="{y + 15}">{value:{form}}</text>'
        )
    return (
        f"<p>{escape(title)}</p>"
        f'<svg role="img" width="100%" height="{_ROW * len(kept)}" fill="currentColor" '
        f'font-size="13" style="max-width:38rem"><title>{escape(title)}</title>'
        f"{''.join(rows)}</svg>"
    )
