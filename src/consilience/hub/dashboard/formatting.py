"""How templates write values: times, guarantees, sizes, numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from consilience.hub.dashboard import charts
from consilience.privacy.guarantee import Guarantee

KINDS = {"study": "this release", "baseline": "baseline", "other": "another way to combine"}


def _when(text: str | None) -> Markup:
    """Return a time to the minute, in UTC."""
    if not text:
        return Markup("—")
    at = datetime.fromisoformat(text)
    shown = f"{at:%Y-%m-%d}<span class=hour> {at:%H:%M} UTC</span>"
    return Markup(f'<time datetime="{escape(text)}">{shown}</time>')  # noqa: S704  built from a parsed time


def _day(text: str) -> Markup:
    return Markup(f'<time datetime="{escape(text)}">{datetime.fromisoformat(text):%Y-%m-%d}</time>')  # noqa: S704


def _promise(value: Guarantee | Mapping[str, Any] | None) -> str:
    """Return a guarantee in one short line."""
    if value is None:
        return "—"
    stated = value if isinstance(value, Guarantee) else Guarantee.from_dict(dict(value))
    if math.isinf(stated.epsilon):
        return "none against the hub"
    return f"ε = {stated.epsilon:.4g}" + (f", δ = {stated.delta:.3g}" if stated.delta else "")


def _weight(value: float) -> str:
    if value and abs(value) < 0.0001:
        return "< 0.0001" if value > 0 else "> −0.0001"
    return f"{value:.3f}" if not value or abs(value) >= 0.01 else f"{value:.2g}"


def _bytes(size: int) -> str:
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} bytes"


def _measured(value: Mapping[str, float] | None, percent: bool) -> str:
    return "—" if value is None else charts.show_number(value["value"], percent)


def _between(value: Mapping[str, float] | None, percent: bool) -> str:
    ends = () if value is None else (value["low"], value["high"])
    return " to ".join(charts.show_number(end, percent) for end in ends) or "—"


def _fact(value: object) -> str:
    """Shorten a fact of the audit log; the log itself has all of it."""
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:.*", text):
        return f"{text[:10]} {text[11:16]} UTC"
    return f"{text[:16]}…" if len(text) > 40 and " " not in text else text


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "when": _when,
    "day": _day,
    "promise": _promise,
    "bytes": _bytes,
    "weight": _weight,
    "measured": _measured,
    "between": _between,
    "segment": partial(quote, safe=""),
    "fact": _fact,
}
TEMPLATES.globals |= {"bar": charts.draw_bar, "KINDS": KINDS, "isinf": math.isinf}
