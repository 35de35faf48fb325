"""One HTML page that holds everything: claims, pictures, verdicts, explanations, cost, machine."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from . import run
from .design import HERE, Figure, Paper
from .draw import draw
from .verdicts import FAILS, HOLDS, OPEN, PARTLY, UNDECIDED, Lines, Verdict, judge, statements

PACKAGES = ("consilience", "numpy", "scipy", "scikit-learn", "numba", "opendp", "dp-accounting", "joblib", "matplotlib")
ORDER = (HOLDS, PARTLY, FAILS, UNDECIDED, OPEN)


@dataclass(frozen=True)
class Shown:
    """One figure as the page shows it."""

    figure: Figure
    verdicts: tuple[Verdict, ...]
    pictures: Mapping[str, str]  # "paper" and "all", as data addresses
    facts: tuple[tuple[str, dict[str, Any]], ...]  # by panel
    command: str

    @property
    def points(self) -> dict[str, float]:
        """The processor seconds of each of its points, some of which other figures may share."""
        return {key: seconds for _, facts in self.facts for key, seconds in facts["points"].items()}

    @property
    def peak_gib(self) -> float:
        """The largest memory of any of its panels, workers included."""
        return max((facts["peak_bytes"] for _, facts in self.facts), default=0) / 2**30


def write(papers: list[Paper], settings: run.Settings) -> Path:
    """Judge and draw whatever is stored in the output folder, and write report.html over all of it."""
    shown = {paper.name: [one for one in _figures(paper, settings)] for paper in papers}
    shown = {name: figures for name, figures in shown.items() if any(f.facts or f.pictures for f in figures)}
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.jinja").render(
        papers=[paper for paper in papers if paper.name in shown],
        shown=shown,
        counts={name: Counter(v.verdict for f in figures for v in f.verdicts) for name, figures in shown.items()},
        order=ORDER,
        machine=machine(),
        settings=settings,
        seconds=math.fsum({k: v for figures in shown.values() for f in figures for k, v in f.points.items()}.values()),
        stale=any(facts["stale"] for figures in shown.values() for f in figures for _, facts in f.facts),
        panels=_panels(shown),
        made_up=settings.miniature,
    )
    path = settings.out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _panels(shown: Mapping[str, list[Shown]]) -> dict[bool, list[str]]:
    """Return the panels of the full run (True) and of the quick one."""
    every = {f"{name}/{panel}": facts for name, figures in shown.items() for f in figures for panel, facts in f.facts}
    return {kind: [panel for panel, facts in every.items() if facts["full"] is kind] for kind in (True, False)}


def _figures(paper: Paper, settings: run.Settings) -> list[Shown]:
    tables = {
        panel.id: run.stored(paper, panel, settings)
        for figure in paper.figures
        for panel in figure.panels
        if panel.kind != "drawing"
    }
    expected, found = statements(paper), []
    for figure in paper.figures:
        finished = [panel for panel in figure.panels if tables.get(panel.id) is not None]
        verdicts = tuple(judge(s, tables.get(s.panel)) for s in expected if s.figure == figure.id)
        pictures = {}
        if finished or any(panel.kind == "drawing" for panel in figure.panels):
            stem = settings.out / paper.name / f"figure-{figure.id}"
            stem.parent.mkdir(parents=True, exist_ok=True)
            lines = {id_: None if rows is None else Lines.of(rows) for id_, rows in tables.items()}
            draw(figure, lines, stem)
            pictures = {"paper": _address(stem, "-paper"), "all": _address(stem, "")}
        facts = tuple((panel.id, run.facts_of(paper, panel, settings)) for panel in finished)
        full = all(one["full"] for _, one in facts) if facts else settings.full
        command = f"make reproduce FIGURE={paper.name}/{figure.id}" + (" FULL=1" if full else "")
        found.append(Shown(figure, verdicts, pictures, facts, command))
    return found


def _address(stem: Path, suffix: str) -> Markup:
    """Return a picture as an address that holds it, for an attribute between double quotes; base64 would be longer."""
    picture = stem.with_name(f"{stem.name}{suffix}.svg").read_text(encoding="utf-8")
    for letter, instead in (("%", "%25"), ("#", "%23"), ('"', "'"), ("\n", " "), ("&", "&amp;")):
        picture = picture.replace(letter, instead)
    return Markup("data:image/svg+xml;charset=utf-8," + picture)  # noqa: S704 - our own pictures


def machine() -> dict[str, str]:
    """Return what a reader needs to judge the times; neither names nor paths."""
    facts = {
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": platform.system(),
        "Python": platform.python_version(),
    }
    return facts | {name: version(name) for name in PACKAGES}
