"""Run panels through `consilience.simulate`, keep every finished point, and return tidy tables.

A point is one simulate() call: one run of one panel at one x, or at all x that differ in epsilon
only. It is stored under a name made of everything that went into it, so that a second run takes
what it finds and a change of any argument is a new point. A change of the code is not: points and
tables remember the code they came from, and the report says which panels are older than the code;
`--fresh` computes all of their points again.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import json
import math
import os
import shutil
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import consilience as cs
from consilience.files.durable import write_durably
from consilience.simulation.digest import code_digest, statements_of
from consilience.tables.public import Public

from . import datasets
from .design import Figure, Method, Panel, Paper, papers
from .equal import carried
from .statements import statements

# Master seeds, over which the repeats of each panel are divided. Far apart, because panels that
# compute their own numbers count up from them.
SEEDS = (2016, 271828, 314159)
MINIATURE = 400  # records of a miniature at most
Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What a whole run shares."""

    out: Path
    full: bool = False
    seeds: tuple[int, ...] = SEEDS
    n_jobs: int = 2
    fresh: bool = False  # computes again what earlier code computed
    miniature: bool = False  # made-up data, the last x, two repeats: for tests
    backend: str | None = None  # as simulate takes it; no number depends on it
    until: float = math.inf  # of time.monotonic(): no point is begun later

    def repeats(self, panel: Panel) -> int:
        """Return how often each point of this panel is repeated, over all seeds."""
        return 2 if self.miniature else panel.repeats(self.full)

    def shares(self, panel: Panel) -> dict[int, dict[str, int]]:
        """Return what simulate() gets for each seed: divisions, and draws where they are fixed."""
        n, repeats = len(self.seeds), self.repeats(panel)
        if panel.division == "fixed":
            return {seed: {"seed": seed, "repeats": 1, "draws": repeats} for seed in self.seeds}
        shares = {seed: repeats // n + (i < repeats % n) for i, seed in enumerate(self.seeds)}
        return {seed: {"seed": seed, "repeats": own} for seed, own in shares.items() if own}

    def values(self, panel: Panel) -> list[Any]:
        """Return this panel's x values."""
        found = panel.values(self.full)
        return found[-1:] if self.miniature else found

    def path(self, paper: Paper, point: Point) -> Path:
        """Return the file of a point, which panels that ask for the same share."""
        return self.out / paper.name / "points" / f"{point.key}.parquet"

    def data(self, name: str) -> datasets.Dataset:
        """Return a data set, or made-up records of its kind."""
        return datasets.made_up(name) if self.miniature else datasets.load(name)


@dataclass(frozen=True)
class Point:
    """One simulate() call: its seed and arguments, and the level at which each x is found."""

    panel: Panel
    run: str
    seed: int
    levels: Mapping[Any, str]  # x -> level, "" where the call has levels of its own
    arguments: Mapping[str, Any]
    key: str

    @property
    def work(self) -> float:
        """A rough size, for the time left: records trained on, times levels and learners."""
        given = self.arguments
        records = sum(given["sizes"]) if given.get("sizes") is not None else given["X"].shape[0]
        learners = given["learner"]
        per_learner = records * (2.0 + max(len(self.levels), 1)) + 5e3
        return (
            given["repeats"]
            * per_learner
            * (len(learners) if isinstance(learners, Mapping | list) else 1)
        )


def select(chosen: Iterable[str]) -> list[tuple[Paper, Figure, Panel]]:
    """Return the panels chosen by names such as "xie2016", "xie2016/3", "xie2016/3a"; default all.

    A table without panels of its own stands for those that its statements read.
    """
    known = [
        (paper, figure, panel)
        for paper in papers()
        for figure in paper.figures
        for panel in figure.panels
    ]
    meant: dict[str, set[str]] = {}  # the panels of each name
    for paper, figure, panel in known:
        own = f"{paper.name}/{panel.id}"
        for name in (paper.name, f"{paper.name}/{figure.id}", own):
            meant.setdefault(name, set()).add(own)
    for paper in papers():
        for table in (figure.id for figure in paper.figures if not figure.panels):
            read = {f"{paper.name}/{one.panel}" for one in statements(paper) if one.figure == table}
            meant[f"{paper.name}/{table}"] = read
    wanted = list(chosen) or [paper.name for paper in papers()]
    for name in wanted:
        if name not in meant:
            figures = sorted(
                f"{paper.name}/{figure.id}" for paper in papers() for figure in paper.figures
            )
            raise SystemExit(f"There is no {name!r}. Nothing was run. Known: {', '.join(figures)}")
    asked = set().union(*(meant[name] for name in wanted))
    by_name = {
        f"{one[0].name}/{one[2].id}": one for one in reversed(known)
    }  # once, in however many figures it is
    return [one for name, one in reversed(by_name.items()) if name in asked]


def run(
    chosen: Sequence[tuple[Paper, Figure, Panel]], settings: Settings
) -> dict[tuple[str, str], Table]:
    """Compute what is missing of the chosen panels; return tidy tables by (paper, panel).

    Panels whose data set is not available are left out, with a message.
    """
    tables: dict[tuple[str, str], Table] = {}
    left: list[str] = []
    jobs = [
        (paper, panel, _guess(panel, settings))
        for paper, _, panel in chosen
        if panel.kind != "drawing"
    ]
    whole: dict[str, float] = {}
    for _, panel, cost in jobs:
        whole[panel.data] = whole.get(panel.data, 0.0) + cost
    jobs.sort(key=lambda one: one[2])  # cheap ones first, for early results
    with _bar(math.fsum(whole.values())) as (console, advance):
        for name in sorted(whole, key=whole.__getitem__):  # one data set at a time is in memory
            try:
                settings.data(name)
            except datasets.Unavailable as reason:
                left_out = ", ".join(
                    f"{paper.name}/{panel.id}" for paper, panel, _ in jobs if panel.data == name
                )
                said = (
                    f"[bold]{name} is not available.[/] {escape(str(reason))} Left out: {left_out}."
                )
                console.log(said, highlight=False)
                advance(whole[name], None)
                continue
            waiting: list[_Waiting] = []
            for paper, panel, cost in (one for one in jobs if one[1].data == name):
                own = f"{paper.name}/{panel.id}"
                points = [] if panel.computed else plan(panel, settings)
                keys = (
                    [_computed_key(panel, settings)]
                    if panel.computed
                    else {point.key for point in points}
                )
                done = _finished_table(paper, panel, keys, settings)
                if done is None and panel.computed and time.monotonic() < settings.until:
                    done = compute(paper, panel, settings)
                if done is not None:
                    tables[paper.name, panel.id] = done
                    advance(cost, own)
                elif panel.computed:
                    left.append(own)
                else:
                    waiting.append(_Waiting.of(paper, panel, cost, points, settings))
            for paths in _finished(waiting, settings):
                for one in waiting:
                    if done := math.fsum(one.missing.pop(path, 0.0) for path in paths):
                        advance(done, one.name)
                for one in [one for one in waiting if not one.missing]:
                    tables[one.paper.name, one.panel.id] = collect(
                        one.paper, one.panel, one.points, settings
                    )
                    console.log(f"{one.name} done")
                    waiting.remove(one)
            left += [one.name for one in waiting]
        if left:
            console.log(f"Time is up. Left for the same command: {', '.join(left)}.")
    if jobs and not tables and not left:
        raise SystemExit("No data set of the chosen figures is available. Nothing was run.")
    return tables


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A panel, and the share of the work of each file that it still waits for."""

    paper: Paper
    panel: Panel
    points: Sequence[Point]
    missing: dict[Path, float]

    @classmethod
    def of(
        cls, paper: Paper, panel: Panel, cost: float, points: list[Point], settings: Settings
    ) -> _Waiting:
        work = math.fsum(point.work for point in points)
        shares = {settings.path(paper, point): cost * point.work / work for point in points}
        return cls(paper, panel, [replace(point, arguments={}) for point in points], shares)

    @property
    def name(self) -> str:
        return f"{self.paper.name}/{self.panel.id}"


def _finished(waiting: Sequence[_Waiting], settings: Settings) -> Iterator[set[Path]]:
    """Yield the files of points: first those already stored, then each as it is computed."""
    asked = {
        settings.path(one.paper, point): (one.paper.name, one.panel.id, point.key)
        for one in waiting
        for point in one.points
    }
    found = {path for path in asked if path.exists() and not (settings.fresh and _old(path))}
    yield found
    # A worker has the data set in its memory and runs one point after the other; with a backend it
    # is the cells of a point that run side by side.
    parallel = joblib.Parallel(
        n_jobs=1 if settings.backend else settings.n_jobs,
        return_as="generator_unordered",
        batch_size=1,
        pre_dispatch="n_jobs",  # so that little is still to be done when the time is up
    )
    missing = [path for path in asked if path not in found]
    if not settings.full:  # large ones first, so that no worker is left with one at the end
        work = {path: share for one in waiting for path, share in one.missing.items()}
        missing.sort(key=work.__getitem__, reverse=True)
    for path in parallel(
        joblib.delayed(_finish)(*asked[path], settings, os.getpid())
        for path in missing
        if time.monotonic() < settings.until
    ):
        yield {path}


def _old(path: Path) -> bool:
    """Return whether earlier code computed a point."""
    facts = json.loads(pq.read_schema(path).metadata[b"facts"])
    return _stale({"functions": (), **facts, "code": [facts["code"]]})


@dataclass(frozen=True)
class Stored:
    """A panel's tidy table as an earlier run wrote it, with its cost and origin.

    A table that has other lines, metrics or x values than the panel has now no longer fits: it
    answers another question.
    """

    rows: Table
    facts: dict[str, Any]
    fits: bool


def stored(paper: Paper, panel: Panel, settings: Settings) -> Stored | None:
    """Return what an earlier run wrote of a panel, if anything; "stale" is judged now."""
    path = settings.out / paper.name / f"{panel.id}.parquet"
    if not path.exists():
        return None
    table = pq.read_table(path)
    rows, facts = table.to_pylist(), json.loads(table.schema.metadata[b"facts"])
    facts |= {"stale": _stale(facts), "draws": len({row["draw"] for row in rows})}
    facts.setdefault("seeds", [facts.get("seed")])  # tables of before there were several
    # One folder may hold panels of the quick run beside those of the full one, so not `settings`
    # but the facts say which x values are to be there.
    then = replace(settings, full=facts["full"], miniature=facts["data"] == datasets.MADE_UP)
    drawn = {
        (one.label, one.metric or panel.metric, _x(x))
        for one in panel.methods
        for x in then.values(panel)
    }
    fits = facts.get("methods", _methods(panel)) == _methods(panel)
    fits = fits and {(row["label"], row["metric"], row["x"]) for row in rows} == drawn
    return Stored(rows, facts, fits)


def _finished_table(
    paper: Paper, panel: Panel, points: Collection[str], settings: Settings
) -> Table | None:
    """Return the stored table of a panel if it is made of these points and need not be renewed."""
    found = stored(paper, panel, settings)
    if found is None or not found.fits or "methods" not in found.facts:
        return None
    renewed = found.facts["stale"] and (settings.fresh or panel.computed is not None)
    same = found.facts["points"].keys() == set(points)
    return found.rows if same and not renewed else None


def _stale(facts: Mapping[str, Any]) -> bool:
    """Return whether code that a panel came from has changed since."""
    if "code" not in facts:  # an older table: it knows only whether that was so when it was written
        return bool(facts["stale"])
    return any(carried(digest) != code_digest() for digest in facts["code"]) or any(
        carried(digest) != _now(name) for name, digest in facts["functions"]
    )


# ------------------------------------------------------------------------------------------- points


def plan(panel: Panel, settings: Settings) -> list[Point]:
    """Return the simulate() calls of a panel; x values that differ in epsilon only share one."""
    data = settings.data(panel.data)
    points = []
    for (name, arguments), (seed, share) in product(
        panel.runs().items(), settings.shares(panel).items()
    ):
        grouped: dict[str, tuple[dict[str, Any], dict[Any, Any]]] = {}
        for x in settings.values(panel):
            given = {"X": data.X, "y": data.y, **({} if data.test is None else {"test": data.test})}
            given |= arguments(x, data) | share
            if settings.miniature:
                given = _shrunk(given)
            epsilon = given.pop("epsilon", None)
            several = isinstance(epsilon, Mapping | list | tuple | np.ndarray)
            alone = f"{epsilon!r}" if several or epsilon is None else ""
            place = grouped.setdefault(_digest(given) + alone, (given, {}))
            place[1][x] = epsilon
        for given, epsilons in grouped.values():
            first = next(iter(epsilons.values()))
            if isinstance(first, Mapping | list | tuple | np.ndarray) or first is None:
                levels: Any = (
                    first if isinstance(first, Mapping) or first is None else {"per site": first}
                )
                found = dict.fromkeys(epsilons, "")
            else:
                levels = {f"{one:g}": one for one in epsilons.values()}
                found = {x: f"{one:g}" for x, one in epsilons.items()}
            whole = given | ({} if levels is None else {"epsilon": levels})
            points.append(Point(panel, name, seed, found, whole, _digest(whole)))
    return points


def _finish(name: str, panel: str, key: str, settings: Settings, whole: int) -> Path:
    """Compute one point in any process and return its file; `whole` started all processes."""
    paper, points = _planned(name, panel, settings)
    point = {one.key: one for one in points}[key]
    path = settings.path(paper, point)
    path.parent.mkdir(parents=True, exist_ok=True)
    functions = _written(point.arguments.get("prepare"), *_comparators(point.arguments))
    # simulate() knows its own code, and not what functions of experiments/ call.
    cells = path.with_suffix(f".{_digest(functions)[:8]}.cells")
    parallel = {"n_jobs": settings.n_jobs if settings.backend else 1, "backend": settings.backend}
    with watched(whole) as used:
        report = cs.simulate(
            **point.arguments, **parallel, checkpoint=cells, progress=lambda done, of: None
        )
    facts = {
        **used(),
        "code": code_digest(),
        "functions": functions,
        "sizes": sorted(set(report.settings["sizes"])),
        "sites": report.settings["sites"],
        "public": report.settings["public"],
        "test": report.settings["test"],
    }
    rows = (*report.rows, *report.timings)
    columns = ("repeat", "draw", "learner", "epsilon", "kind", "method", "metric", "value")
    table = pa.Table.from_pylist([{name: getattr(row, name) for name in columns} for row in rows])
    _write(table.replace_schema_metadata({"facts": json.dumps(facts)}), path)
    for left in path.parent.glob(f"{key}.*.cells"):
        shutil.rmtree(left, ignore_errors=True)
    return path


@lru_cache(maxsize=1)  # the next point is mostly of the same panel
def _planned(name: str, panel: str, settings: Settings) -> tuple[Paper, list[Point]]:
    paper = next(one for one in papers() if one.name == name)
    return paper, plan(paper.panel(panel), settings)


def _write(table: pa.Table, path: Path) -> None:
    """Write so that a killed run leaves either the whole file or none."""
    content = io.BytesIO()
    pq.write_table(table, content)
    write_durably(path, content.getvalue())


def _shrunk(given: dict[str, Any]) -> dict[str, Any]:
    """Cut a call down to few sites and records, whatever the paper's numbers are."""
    n_sites = 10
    if isinstance(given.get("sites"), int | np.integer):
        given["sites"] = min(int(given["sites"]), n_sites)
    sizes = given.get("sizes")
    if sizes is not None:
        kept = list(sizes)[:n_sites]
        given["sizes"] = [max(10, min(size, MINIATURE // (2 * len(kept)))) for size in kept]
    if isinstance(given.get("public"), int | np.integer):
        given["public"] = max(20, min(int(given["public"]), MINIATURE // 8))
    epsilon = given.get("epsilon")
    if isinstance(epsilon, list | tuple | np.ndarray):
        given["epsilon"] = list(epsilon)[:n_sites]
    if isinstance(epsilon, Mapping):
        given["epsilon"] = {k: list(v)[:n_sites] if np.ndim(v) else v for k, v in epsilon.items()}
    return given


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:20]


def _plain(value: Any) -> Any:
    """Return plain values that identify an argument."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | bool | int | float) or value is None:
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray) or hasattr(value, "tocsr"):
        return _fingerprint(value)
    if hasattr(value, "get_params"):
        return [type(value).__name__, _plain(value.get_params(deep=False))]
    if isinstance(value, Public):
        return ["Public", _plain(value.X), _plain(value.y)]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    # Not all attributes of a dataclass: what it computed when it was first used is no part of what
    # was asked for.
    given = (
        {one.name: getattr(value, one.name) for one in fields(value)}
        if is_dataclass(value)
        else vars(value)
    )
    return [type(value).__name__, _plain(given)]


def _written(*functions: Any) -> list[tuple[str, str]]:
    """Return name and digest of functions of experiments/: a point's name lacks their text."""
    return [
        (f"{one.__module__}:{one.__qualname__}", _text(one))
        for one in functions
        if inspect.isfunction(one) or inspect.isclass(one)
    ]


def _comparators(arguments: Mapping[str, Any]) -> list[type]:
    """Return the kinds of aggregators that are defined in experiments/ and not in the library."""
    given = arguments["aggregator"]
    listed = given.values() if isinstance(given, Mapping) else np.atleast_1d(given).tolist()
    kinds = {type(one) for one in listed if type(one).__module__.startswith(f"{__package__}.")}
    return sorted(kinds, key=lambda kind: kind.__qualname__)


def _now(name: str) -> str | None:
    """Return the digest of the function of that name as it is today, None if it is gone."""
    module, _, function = name.partition(":")
    with suppress(ImportError, AttributeError):
        return _text(getattr(importlib.import_module(module), function))
    return None


def _text(function: Any) -> str:
    """Return a digest of a function and of what it uses from experiments/."""
    if inspect.isclass(function):  # a comparator: the whole module that defines it
        return _digest(
            statements_of(inspect.getsource(importlib.import_module(function.__module__)))
        )
    found: dict[str, Any] = {}
    functions = [function]
    for one in functions:  # which grows by those that are called
        found[one.__qualname__] = statements_of(textwrap.dedent(inspect.getsource(one)))
        codes = [one.__code__]
        for code in codes:  # which grows by those within
            codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
            for name, used in ((name, one.__globals__.get(name)) for name in code.co_names):
                if isinstance(used, str | int | float | tuple):
                    found[name] = used
                elif (
                    inspect.isfunction(used)
                    and used.__module__.startswith(__package__)
                    and used not in functions
                ):
                    functions.append(used)
    return _digest(found)


_FINGERPRINTS: dict[int, tuple[Any, str]] = {}  # each array is read once and not kept alive here


def _fingerprint(array: Any) -> str:
    known = _FINGERPRINTS.get(id(array))
    if known is None or known[0]() is not array:
        known = _FINGERPRINTS[id(array)] = (weakref.ref(array), str(joblib.hash(array)))
    return known[1]


# -------------------------------------------------------------------------------------- tidy tables


def collect(paper: Paper, panel: Panel, points: Sequence[Point], settings: Settings) -> Table:
    """Gather the stored points of a panel as one tidy table, and write it."""
    read = {point.key: pq.read_table(settings.path(paper, point)) for point in points}
    facts = [json.loads(table.schema.metadata[b"facts"]) for table in read.values()]
    rows: Table = []
    for method in panel.methods:
        same = {"paper": paper.name, "panel": panel.id, "label": method.label, "role": method.role}
        for x in settings.values(panel):
            calls = [one for one in points if one.run == method.run and x in one.levels]
            found = _of(panel, method, [(read[one.key], one.seed, one.levels[x]) for one in calls])
            if not found:
                wanted = f"{method.metric or panel.metric!r} of {method.name!r}"
                raise LookupError(
                    f"{paper.name}/{panel.id}: simulate() has no {wanted} by {method.learner!r} at "
                    f"{x!r}. Points are kept. Fix figures.py."
                )
            rows += [same | {"x": _x(x), **one} for one in found]
    used = {
        "points": {key: one["seconds"] for key, one in zip(read, facts, strict=True)},
        "peak_bytes": max(one["peak_bytes"] for one in facts),
        "code": sorted({one["code"] for one in facts}),
        "functions": sorted(
            {(name, digest) for one in facts for name, digest in one.get("functions", ())}
            # Records are part of a point's name, so that here they are what this loader gives.
            | set(_written(datasets.LOADERS[panel.data]))
        ),
        **_promised(panel, settings),
        "sites": sorted({one["sites"] for one in facts}),
        "sizes": sorted({size for one in facts for size in one["sizes"]}),
        "public": sorted({one["public"] for one in facts}),
        "test": sorted({one["test"] for one in facts}),
        "data": settings.data(panel.data).notes,
    }
    return _kept(paper, panel, rows, used, settings)


def compute(paper: Paper, panel: Panel, settings: Settings) -> Table:
    """Return and write the tidy table of a panel that computes its own numbers."""
    assert panel.computed is not None
    data, rows = settings.data(panel.data), []
    roles = {method.label: method.role for method in panel.methods}
    same = {
        "paper": paper.name,
        "panel": panel.id,
        "metric": panel.metric,
        "learner": "",
        "draw": 0,
    }
    with watched() as spent:
        for seed, share in settings.shares(panel).items():
            found = panel.computed(settings.values(panel), data, share["repeats"], seed)
            own = same | {"seed": seed}
            rows += [
                own | {"division": one["repeat"], "role": roles[one["label"]], **one}
                for one in found
            ]
    rows = [row | {"x": _x(row["x"])} for row in rows]
    used = {
        "points": {_computed_key(panel, settings): spent()["seconds"]},
        "peak_bytes": spent()["peak_bytes"],
    }
    used |= {
        "code": [code_digest()],
        "functions": _written(panel.computed, datasets.LOADERS[panel.data]),
    }
    used |= _promised(panel, settings) | {"data": data.notes}
    used |= {name: [] for name in ("sites", "sizes", "public", "test")}
    return _kept(paper, panel, rows, used, settings)


def _computed_key(panel: Panel, settings: Settings) -> str:
    """Return a name of everything that goes into a panel that computes its own numbers."""
    data = settings.data(panel.data)
    return _digest([panel.id, settings.values(panel), settings.shares(panel), data.X, data.y])


def _promised(panel: Panel, settings: Settings) -> dict[str, Any]:
    """Return what a table says of the run that made it."""
    return {
        "seeds": list(settings.shares(panel)),
        "repeats": settings.repeats(panel),
        "full": settings.full,
        "division": panel.division,
        "methods": _methods(panel),
    }


def _methods(panel: Panel) -> str:
    """Return a digest of which numbers are which lines."""
    lines = [{**vars(method), "role": ""} for method in panel.methods]
    return _digest([lines, panel.metric, panel.better])


def _kept(
    paper: Paper, panel: Panel, rows: Table, used: dict[str, Any], settings: Settings
) -> Table:
    tidy = pa.Table.from_pylist(rows).replace_schema_metadata({"facts": json.dumps(used)})
    folder = settings.out / paper.name
    folder.mkdir(parents=True, exist_ok=True)
    _write(tidy, folder / f"{panel.id}.parquet")
    return rows


def _x(x: Any) -> Any:
    """Return an x value as tables have it."""
    return float(x) if isinstance(x, int | float | np.number) else x


def _of(panel: Panel, method: Method, calls: Sequence[tuple[pa.Table, int, str]]) -> Table:
    """Return one method's numbers at one x; of several learners, the one with the best mean."""
    learners = [method.learner] if isinstance(method.learner, str) else list(method.learner)
    wanted = {"method": method.name, "metric": method.metric or panel.metric}
    columns = ["metric", "learner", "repeat", "draw", "value"]
    candidates = []
    for learner in learners:
        found: Table = []
        for table, seed, level in calls:
            level = method.level or level
            sought = wanted | {"learner": learner} | ({"epsilon": level} if level else {})
            for column, value in sought.items():
                table = table.filter(pc.equal(table[column], value))
            found += [
                row | _trial(panel, row) | {"seed": seed}
                for row in table.select(columns).to_pylist()
            ]
        if found:
            candidates.append(found)
    sign = 1 if panel.better == "low" else -1
    return min(
        candidates, key=lambda rows: sign * np.mean([row["value"] for row in rows]), default=[]
    )


def _trial(panel: Panel, row: Mapping[str, Any]) -> dict[str, int]:
    """Return which division a number is from, and what counts as a repeat."""
    if panel.division == "redrawn":
        return {"division": row["repeat"]}
    return {"division": row["repeat"], "repeat": row["draw"], "draw": 0}


# ------------------------------------------------------------------------------ progress and memory


def _guess(panel: Panel, settings: Settings) -> float:
    """Return a panel's rough share of the work before its data are loaded."""
    size = datasets.SIZES.get(panel.data, 10_000)
    return settings.repeats(panel) * (size + 3e3) * len(settings.values(panel)) * len(panel.runs())


@contextmanager
def _bar(total: float) -> Iterator[tuple[Console, Callable[[float, str | None], None]]]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
    )
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, speed_estimate_period=300) as bars:
        task = bars.add_task("reading data", total=total)

        def advance(part: float, what: str | None) -> None:
            bars.update(task, advance=part, **({} if what is None else {"description": what}))

        yield bars.console, advance


@contextmanager
def watched(whole: int | None = None) -> Iterator[Callable[[], dict[str, float]]]:
    """Watch processor seconds of this process and its workers, and their peak memory.

    Shared pages are counted once. Memory is that of process `whole` and all that it
    started. Without /proc the seconds are those of this process alone, and memory is 0.
    """
    mine = os.getpid()
    peak, stop, begun = 0, threading.Event(), _seconds(mine)

    def look() -> None:
        nonlocal peak
        while True:
            peak = max(peak, _memory(whole or mine))
            if stop.wait(0.5):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: {"seconds": _seconds(mine) - begun, "peak_bytes": peak}
    finally:
        stop.set()
        thread.join()


def _family(first: int) -> dict[str, list[str]]:
    """Return the fields of /proc/…/stat, from the state on, of a process and its children."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has just ended
            found[path.parent.name] = path.read_text().rpartition(")")[2].split()
    family = {str(first)} & set(found)
    while more := {pid for pid, fields in found.items() if fields[1] in family} - family:
        family |= more
    return {pid: found[pid] for pid in family}


def _seconds(first: int) -> float:
    """Return processor seconds so far, those of ended children included."""
    ticks = sum(int(tick) for fields in _family(first).values() for tick in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else time.process_time()


def _memory(first: int) -> int:
    total = 0
    for pid in _family(first):
        with suppress(OSError):
            lines = (Path("/proc") / pid / "smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def miniature(out: Path) -> Settings:
    """Return the settings of a run in seconds on made-up data."""
    return replace(Settings(out), seeds=SEEDS[:1], miniature=True, n_jobs=1)
