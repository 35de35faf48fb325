"""One HTML page that holds everything: findings, claims, pictures, verdicts, changes, cost."""

from __future__ import annotations

import math
import os
import platform
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import joblib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console

from . import design, frozen, run
from .datasets import MADE_UP
from .design import HERE, Figure, Panel, Paper
from .draw import draw, draw_panel, legend
from .kinds import Lines
from .statements import Statement, duplicates, statements
from .verdicts import FALSE, OPEN, ORDER, Verdict, clear, judge

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
FINDINGS = HERE / "findings.toml"


@dataclass(frozen=True)
class Shown:
    """One figure as the page shows it."""

    figure: Figure
    verdicts: tuple[Verdict, ...]
    pictures: tuple[Picture, ...]
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

    @property
    def differs(self) -> dict[str, list[str]]:
        """In what its panels depart from the paper's, and which do so."""
        ran = {panel for panel, _ in self.facts}
        return _where((one.note, one.id) for one in self.figure.panels if one.id in ran)

    @property
    def data(self) -> dict[str, list[str]]:
        """What the records of its panels are."""
        return _where((facts["data"], panel) for panel, facts in self.facts)

    @property
    def rows(self) -> list[tuple[tuple[tuple[str, Markup], ...], list[Picture]]]:
        """Panels side by side that have the same legend, which then stands once above them."""
        alike = groupby(self.pictures, key=lambda one: one.legend)
        return [(keys, list(several)) for keys, several in alike]


def _where(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text, panel in said:
        if text:
            found.setdefault(text, []).append(panel)
    return found


@dataclass(frozen=True)
class Picture:
    """A panel with all lines and with the paper's alone, as data addresses, and its legend."""

    panel: str
    everything: Markup
    paper: Markup
    legend: tuple[tuple[str, Markup], ...]


@dataclass(frozen=True)
class Finding:
    """A finding of the first page, with the statements that it rests on."""

    title: str
    text: str
    verdicts: tuple[Verdict, ...]
    is_whole: bool  # whether all of them have numbers


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
    every = [verdict for found in shown.values() for one in found for verdict in one.verdicts]
    repeated = duplicates([one for paper in design.papers() for one in statements(paper)])
    told = tomllib.loads(FINDINGS.read_text(encoding="utf-8"))
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
        counts=_counts(every),
        n_repeated=sum(one.statement.name in repeated for one in every),
        repeated=repeated,
        clear=clear(every),
        false=FALSE,
        every=every,
        findings=_findings(told["finding"], every, stored),
        limitations=[one["text"] for one in told["limitation"]],
        changes=frozen.changes()[::-1],
        digest=frozen.present().digest(),
        is_frozen=not frozen.unlogged(),
        order=ORDER,
        style=_style(),
        script=Markup((HERE / "report.js").read_text(encoding="utf-8")),  # noqa: S704 - our own
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


def _counts(every: Sequence[Verdict]) -> dict[str, dict[str, Counter[str]]]:
    """Return how often each verdict was given, by whose claim it is and by paper, each claim once.

    The total of each side stands under the empty name.
    """
    counts: dict[str, dict[str, Counter[str]]] = {"paper": {"": Counter()}, "us": {"": Counter()}}
    for one in every:
        if not one.statement.duplicate_of:
            side = counts[one.statement.by]
            for place in ("", one.statement.paper):
                side.setdefault(place, Counter())[one.verdict] += 1
    return counts


def _findings(
    told: Sequence[Mapping[str, Any]],
    every: Sequence[Verdict],
    stored: Mapping[str, Mapping[str, run.Stored]],
) -> list[Finding]:
    """Return the findings, without the sentences whose numbers are not there."""
    by_name = {one.statement.name: one for one in every if one.verdict != OPEN}
    total = _counts(every)["paper"][""]
    words = ("holds", "part", "fails", "equal", "few")
    numbers = dict(zip(words, (total[word] for word in ORDER), strict=False))
    numbers["papers"] = sum(total.values()) - total[OPEN]
    found = []
    for one in told:
        known: dict[str, object] = {**numbers}
        for place, name in enumerate(one["statements"], 1):
            if name in by_name:
                statement = by_name[name].statement
                table = stored[statement.paper][statement.panel]
                known |= _means(statement, Lines.of(table.rows), place)
        sentences = re.split(r"(?<=\.) (?=[A-Z“])", one["text"].replace("%}", "_percent}"))
        told_now = [
            sentence.format_map(known)
            for sentence in sentences
            if set(re.findall(r"{(\w+)}", sentence)) <= known.keys()
        ]
        verdicts = tuple(by_name[name] for name in one["statements"] if name in by_name)
        whole = len(verdicts) == len(one["statements"])
        found.append(Finding(one["title"], " ".join(told_now), verdicts, whole))
    return found


def _means(statement: Statement, lines: Lines, place: int) -> dict[str, str]:
    """Return the means of a statement's lines, as the texts of findings name them."""
    within = statement.x if statement.at is None else (statement.at, statement.at)
    means = {}
    for letter, label in (("a", statement.a), ("b", statement.b)):
        if label:
            means[letter] = float(lines.get(label, within)[1].mean())
    if len(means) == 2:
        means["d"] = means["b"] - means["a"]
    return {f"{letter}{place}": _number(mean) for letter, mean in means.items()} | {
        f"{letter}{place}_percent": f"{100 * mean:.1f} %" for letter, mean in means.items()
    }


def _number(mean: float) -> str:
    return f"{mean:,.0f}" if abs(mean) >= 10 else f"{mean:.2g}"


def _style() -> Markup:
    """Return the dashboard's stylesheet: the page looks like the rest of the project."""
    style = files("consilience") / "hub" / "dashboard" / "static" / "style.css"
    return Markup(style.read_text(encoding="utf-8"))  # noqa: S704 - our own


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
        found.append(Shown(figure, verdicts, pictures.get(figure.id, ()), facts, command))
    return found


def _pictures(name: str, id_: str, lines: Mapping[str, Lines], folder: Path) -> tuple[Picture, ...]:
    """Draw a figure into its folder, wherever this runs, and return its panels for the page."""
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
        draw(figure, lines, (Path(elsewhere) if more else folder) / f"figure-{figure.id}")
    found = []
    for panel in figure.panels:
        if panel.kind == "drawing" or panel.id in lines:
            own = lines.get(panel.id)
            several = [_address(draw_panel(panel, own, whole)) for whole in (True, False)]
            keys = tuple((label, Markup(key)) for label, key in legend(panel))  # noqa: S704 - ours
            found.append(Picture(panel.id, *several, keys))
    return tuple(found)


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


def _address(picture: str) -> Markup:
    """Return a picture as a data URL for a double-quoted attribute; base64 would be longer."""
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
