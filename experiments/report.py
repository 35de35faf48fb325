"""One HTML page that holds everything: claims, pictures, verdicts, explanations, cost, machine."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import joblib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console

from . import design, run
from .datasets import MADE_UP
from .design import HERE, Figure, Panel, Paper
from .draw import draw
from .kinds import Lines
from .statements import statements
from .verdicts import ORDER, Verdict, judge

PACKAGES = (
    "consilience",
    "numpy",
    "scipy",
    "scikit-learn",
    "numba",
    "opendp",
    "dp-accounting",
    "joblib",
    "matplotlib",
)


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


def write(
    papers: list[Paper],
    settings: run.Settings,
    chosen: Collection[tuple[Paper, Figure, Panel]] = (),
) -> Path:
    """Judge and draw whatever is stored in the output folder, and write report.html over all of it.

    Figures of which nothing is stored are left out; one that is a mere drawing is there if it was
    `chosen`.
    """
    stored = {paper.name: _stored(paper, settings) for paper in papers}
    changed = [
        f"{name}/{id_}"
        for name, found in stored.items()
        for id_, one in found.items()
        if not one.fits
    ]
    if changed:
        Console(stderr=True).print(
            f"Stored tables of {', '.join(changed)} have other lines or x values than figures.py "
            "has now, and count as not run. Nothing was lost. Run these panels again.",
            highlight=False,
        )
    drawn = {(paper.name, figure.id) for paper, figure, panel in chosen if panel.kind == "drawing"}
    figures = {
        paper.name: _figures(
            paper, stored[paper.name], {id_ for name, id_ in drawn if name == paper.name}, settings
        )
        for paper in papers
    }
    shown = {name: found for name, found in figures.items() if found}
    facts = {
        f"{name}/{id_}": one for name, found in shown.items() for f in found for id_, one in f.facts
    }
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(
        papers=[paper for paper in papers if paper.name in shown],
        shown=shown,
        n_left_out=sum(len(paper.figures) - len(figures[paper.name]) for paper in papers),
        counts={
            name: Counter(v.verdict for f in found for v in f.verdicts)
            for name, found in shown.items()
        },
        order=ORDER,
        machine=machine(),
        seeds=sorted({seed for one in facts.values() for seed in one["seeds"]} or settings.seeds),
        seconds=math.fsum(
            {k: v for found in shown.values() for f in found for k, v in f.points.items()}.values()
        ),
        stale=any(one["stale"] for one in facts.values()),
        changed=changed,
        panels={
            kind: [id_ for id_, one in facts.items() if one["full"] is kind]
            for kind in (True, False)
        },
        made_up=[id_ for id_, one in facts.items() if one["data"] == MADE_UP],
    )
    path = settings.out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _stored(paper: Paper, settings: run.Settings) -> dict[str, run.Stored]:
    found = {
        panel.id: run.stored(paper, panel, settings)
        for figure in paper.figures
        for panel in figure.panels
    }
    return {id_: one for id_, one in found.items() if one is not None}


def _figures(
    paper: Paper, stored: Mapping[str, run.Stored], drawn: Collection[str], settings: run.Settings
) -> list[Shown]:
    """Return the figures of which something is stored, or that are chosen drawings (`drawn`)."""
    tables = {id_: one.rows for id_, one in stored.items() if one.fits}
    lines = {id_: Lines.of(rows) for id_, rows in tables.items()}
    pictured = {
        figure.id: {panel.id: lines[panel.id] for panel in figure.panels if panel.id in lines}
        for figure in paper.figures
        if figure.id in drawn or any(panel.id in lines for panel in figure.panels)
    }
    made = joblib.Parallel(settings.n_jobs)(
        joblib.delayed(_pictures)(paper.name, id_, own, settings.out / paper.name)
        for id_, own in pictured.items()
    )
    pictures = dict(zip(pictured, made, strict=True))
    expected, found = statements(paper), []
    for figure in paper.figures:
        asked = [one for one in expected if one.figure == figure.id]
        if figure.id not in pictures and not any(one.panel in tables for one in asked):
            continue
        verdicts = tuple(judge(one, tables) for one in asked)
        facts = tuple(
            (panel.id, stored[panel.id].facts) for panel in figure.panels if panel.id in tables
        )
        command = _command(paper, figure, facts)
        found.append(Shown(figure, verdicts, pictures.get(figure.id, {}), facts, command))
    return found


def _pictures(name: str, id_: str, lines: Mapping[str, Lines], folder: Path) -> dict[str, str]:
    """Draw a figure, wherever this runs, and return its two pictures as data addresses."""
    paper = next(one for one in design.papers() if one.name == name)
    figure = next(one for one in paper.figures if one.id == id_)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as elsewhere:
        # Numbers that cannot be read now (another definition, a table not copied) may be in the
        # picture that lies there: no picture with fewer panels replaces it.
        more = [
            one.id
            for one in figure.panels
            if one.id not in lines and (folder / f"{one.id}.parquet").exists()
        ]
        stem = (Path(elsewhere) if more else folder) / f"figure-{figure.id}"
        draw(figure, lines, stem)
        return {"paper": _address(stem, "-paper"), "all": _address(stem, "")}


def _command(paper: Paper, figure: Figure, facts: Collection[tuple[str, dict[str, Any]]]) -> str:
    """Return the commands that compute these panels again, one for each kind of run."""
    runs: dict[str, list[str]] = {}
    for panel, one in facts:
        given = " ".join(map(str, one["seeds"]))
        usual = one["seeds"] == list(run.SEEDS[: one["repeats"]])
        seed = "" if usual else f" SEED='{given}'" if " " in given else f" SEED={given}"
        runs.setdefault((" FULL=1" if one["full"] else "") + seed, []).append(
            f"{paper.name}/{panel}"
        )
    whole = len(runs) == 1 and len(facts) == sum(panel.kind != "drawing" for panel in figure.panels)
    named = {
        how: f"{paper.name}/{figure.id}" if whole else " ".join(panels)
        for how, panels in runs.items()
    }
    quoted = {how: f"'{name}'" if " " in name else name for how, name in named.items()}
    return "; ".join(f"make reproduce FIGURE={name}{how}" for how, name in quoted.items())


def _address(stem: Path, suffix: str) -> Markup:
    """Return a picture as a data URL for a double-quoted attribute; base64 would be longer."""
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
