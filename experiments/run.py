"""Run panels through `consilience.simulate`, keep every finished point, and return tidy tables.

A point is one simulate() call: one run of one panel at one x, or at all x that differ in epsilon only. It is stored
under a name made of everything that went into it, so that a second run takes what it finds and a change of any
argument is a new point. A change of the code is not: each point remembers the code it came from, and the report
says when a point is older than the code; `--fresh` computes all of them again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import consilience as cs
from consilience.data import Public

from . import datasets
from .design import Figure, Method, Panel, Paper

SEED = 2016
MINIATURE = 400  # records of a miniature at most
Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What a whole run shares."""

    out: Path
    full: bool = False
    seed: int = SEED
    n_jobs: int = 2
    fresh: bool = False
    miniature: bool = False  # made-up data, the last x, two repeats: for tests
    backend: str | None = None  # as simulate takes it; no number depends on it

    def repeats(self, panel: Panel) -> int:
        """Return how often each point of this panel is repeated."""
        return 2 if self.miniature else panel.repeats(self.full)

    def values(self, panel: Panel) -> list[Any]:
        """Return this panel's x values."""
        found = panel.values(self.full)
        return found[-1:] if self.miniature else found

    def data(self, name: str) -> datasets.Dataset:
        """Return a data set, or made-up records of its kind."""
        return datasets.made_up(name) if self.miniature else datasets.load(name)


@dataclass(frozen=True)
class Point:
    """One simulate() call: its arguments, and the epsilon level at which each x is found."""

    panel: Panel
    run: str
    levels: Mapping[Any, str]  # x -> level, "" where the call has levels of its own
    arguments: Mapping[str, Any]
    key: str

    @property
    def work(self) -> float:
        """A rough size, for the time left: records that are trained on, times levels and learners."""
        given = self.arguments
        records = sum(given["sizes"]) if given.get("sizes") is not None else given["X"].shape[0]
        learners = given["learner"]
        per_learner = records * (2.0 + max(len(self.levels), 1)) + 5e3
        return given["repeats"] * per_learner * (len(learners) if isinstance(learners, Mapping | list) else 1)


def run(chosen: Sequence[tuple[Paper, Figure, Panel]], settings: Settings) -> dict[tuple[str, str], Table]:
    """Compute what is missing of the chosen panels; return each panel's tidy table by (paper, panel)."""
    tables: dict[tuple[str, str], Table] = {}
    jobs = [one for one in chosen if one[2].kind != "drawing"]
    # Data set by data set, so that one at a time is in memory.
    jobs.sort(key=lambda one: one[2].data)
    with _bar(sum(_guess(panel, settings) for _, _, panel in jobs)) as (console, advance):
        for paper, _, panel in jobs:
            if panel.computed is not None:
                tables[paper.name, panel.id] = compute(paper, panel, settings)
                advance(_guess(panel, settings), None)
                continue
            points = plan(panel, settings)
            shares = np.array([point.work for point in points])
            shares *= _guess(panel, settings) / shares.sum()
            for point, share in zip(points, shares, strict=True):
                folder = settings.out / paper.name / "points" / panel.id
                advance(0.0, f"{paper.name}/{panel.id} {point.run}")
                _finish(point, folder, settings, lambda part, share=share: advance(part * share, None))
            tables[paper.name, panel.id] = collect(paper, panel, points, settings)
            console.log(f"{paper.name}/{panel.id} done")
    return tables


def stored(paper: Paper, panel: Panel, settings: Settings) -> Table | None:
    """Return a panel's tidy table as an earlier run wrote it, if there is one."""
    path = settings.out / paper.name / f"{panel.id}.parquet"
    return pq.read_table(path).to_pylist() if path.exists() else None


# ------------------------------------------------------------------------------------------------------------- points


def plan(panel: Panel, settings: Settings) -> list[Point]:
    """Return the simulate() calls of a panel; x values that differ in epsilon only share one."""
    data = settings.data(panel.data)
    points = []
    for name, arguments in panel.runs().items():
        grouped: dict[str, tuple[dict[str, Any], dict[Any, Any]]] = {}
        for x in settings.values(panel):
            given = {"X": data.X, "y": data.y, **({} if data.test is None else {"test": data.test})}
            given |= {"repeats": settings.repeats(panel), "seed": settings.seed, **arguments(x, data)}
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
                levels: Any = first if isinstance(first, Mapping) or first is None else {"per site": first}
                found = dict.fromkeys(epsilons, "")
            else:
                levels = {f"{one:g}": one for one in epsilons.values()}
                found = {x: f"{one:g}" for x, one in epsilons.items()}
            whole = given | ({} if levels is None else {"epsilon": levels})
            points.append(Point(panel, name, found, whole, _digest(whole)))
    return points


def _finish(point: Point, folder: Path, settings: Settings, advance: Callable[[float], None]) -> None:
    path = folder / f"{point.key}.parquet"
    if path.exists() and not settings.fresh:
        advance(1.0)
        return
    folder.mkdir(parents=True, exist_ok=True)
    done = 0.0

    def progress(cells: int, of: int) -> None:
        nonlocal done
        advance(cells / of - done)
        done = cells / of

    cells = folder / f"{point.key}.cells"
    if settings.fresh:
        shutil.rmtree(cells, ignore_errors=True)
    started = time.perf_counter()
    with watched() as memory:
        parallel = {"n_jobs": settings.n_jobs, "backend": settings.backend}
        report = cs.simulate(**point.arguments, **parallel, checkpoint=cells, progress=progress)
    facts = {
        "seconds": time.perf_counter() - started,
        "peak_bytes": memory(),
        "code": code(),
        "sizes": sorted(set(report.settings["sizes"])),
        "sites": report.settings["sites"],
        "public": report.settings["public"],
        "test": report.settings["test"],
    }
    drawn = {(m.name, m.metric or point.panel.metric) for m in point.panel.methods if m.run == point.run}
    rows = [row for row in (*report.rows, *report.timings) if (row.method, row.metric) in drawn]
    fields = ("repeat", "draw", "learner", "epsilon", "kind", "method", "metric", "value")
    table = pa.Table.from_pylist([{name: getattr(row, name) for name in fields} for row in rows])
    _write(table.replace_schema_metadata({"facts": json.dumps(facts)}), path)
    shutil.rmtree(cells, ignore_errors=True)


def _write(table: pa.Table, path: Path) -> None:
    """Write so that a killed run leaves either the whole file or none."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        pq.write_table(table, part)
    Path(part.name).chmod(0o644)  # temporary files are made for one's own eyes
    Path(part.name).replace(path)


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
    """Return what tells two arguments apart, as plain values."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | bool | int | float) or value is None:
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray) or hasattr(value, "tocsr"):
        return _fingerprint(_Whole(value))
    if hasattr(value, "get_params"):
        return [type(value).__name__, _plain(value.get_params(deep=False))]
    if isinstance(value, Public):
        return ["Public", _plain(value.X), _plain(value.y)]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return [type(value).__name__, _plain(vars(value))]


class _Whole:
    """An array by identity, so that it is read once only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Whole) and self.array is other.array


@cache
def _fingerprint(whole: _Whole) -> str:
    return str(joblib.hash(whole.array))


@cache
def code() -> str:
    """Return a name for the library's present source text."""
    files = sorted(Path(cs.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------- tidy tables


def collect(paper: Paper, panel: Panel, points: Sequence[Point], settings: Settings) -> Table:
    """Gather the stored points of a panel as one tidy table, and write it as Parquet and CSV."""
    rows: Table = []
    facts = []
    read = {}
    for point in points:
        table = pq.read_table(settings.out / paper.name / "points" / panel.id / f"{point.key}.parquet")
        facts.append(json.loads(table.schema.metadata[b"facts"]))
        read[point.key] = table
    for method in panel.methods:
        metric = method.metric or panel.metric
        for point in points:
            if point.run == method.run:
                for x, level in point.levels.items():
                    found = _of(read[point.key], method, metric, method.level or level, panel.better)
                    if not found:
                        wanted = f"{metric!r} of {method.name!r} by {method.learner!r} at {method.level or level!r}"
                        raise LookupError(
                            f"{paper.name}/{panel.id}: simulate() has no {wanted}. Points are kept. Mend figures.py."
                        )
                    shown = {"x": float(x) if isinstance(x, int | float) else x}
                    same = {"paper": paper.name, "panel": panel.id, **shown, "label": method.label}
                    rows += [same | {"role": method.role, "metric": metric, **one} for one in found]
    used = {
        "seconds": math.fsum(one["seconds"] for one in facts),
        "peak_bytes": max(one["peak_bytes"] for one in facts),
        "stale": any(one["code"] != code() for one in facts),
        "seed": settings.seed,
        "repeats": settings.repeats(panel),
        "full": settings.full,
        "sites": sorted({one["sites"] for one in facts}),
        "sizes": sorted({size for one in facts for size in one["sizes"]}),
        "public": sorted({one["public"] for one in facts}),
        "test": sorted({one["test"] for one in facts}),
        "data": settings.data(panel.data).notes,
    }
    return _kept(paper, panel, rows, used, settings)


def compute(paper: Paper, panel: Panel, settings: Settings) -> Table:
    """Return and write the tidy table of a panel that computes its own numbers; always anew."""
    assert panel.computed is not None
    data, started, repeats = settings.data(panel.data), time.perf_counter(), settings.repeats(panel)
    with watched() as memory:
        found = panel.computed(settings.values(panel), data, repeats, settings.seed)
    roles = {method.label: method.role for method in panel.methods}
    same = {"paper": paper.name, "panel": panel.id, "metric": panel.metric, "learner": "", "draw": 0}
    rows = [same | {"role": roles[one["label"]], **one, "x": float(one["x"])} for one in found]
    used = {"seconds": time.perf_counter() - started, "peak_bytes": memory(), "stale": False, "seed": settings.seed}
    used |= {"repeats": repeats, "full": settings.full, "data": data.notes}
    used |= {name: [] for name in ("sites", "sizes", "public", "test")}
    return _kept(paper, panel, rows, used, settings)


def _kept(paper: Paper, panel: Panel, rows: Table, used: dict[str, Any], settings: Settings) -> Table:
    tidy = pa.Table.from_pylist(rows).replace_schema_metadata({"facts": json.dumps(used)})
    folder = settings.out / paper.name
    folder.mkdir(parents=True, exist_ok=True)
    _write(tidy, folder / f"{panel.id}.parquet")
    pcsv.write_csv(tidy, folder / f"{panel.id}.csv")
    return rows


def facts_of(paper: Paper, panel: Panel, settings: Settings) -> dict[str, Any]:
    """Return what a finished panel cost and was computed from."""
    schema = pq.read_schema(settings.out / paper.name / f"{panel.id}.parquet")
    return dict(json.loads(schema.metadata[b"facts"]))


def _of(table: pa.Table, method: Method, metric: str, level: str, better: str) -> Table:
    """Return one method's numbers at one x; of several learners, the one with the best mean."""
    learners = [method.learner] if isinstance(method.learner, str) else list(method.learner)
    candidates = []
    for learner in learners:
        wanted = {"method": method.name, "metric": metric, "learner": learner} | ({"epsilon": level} if level else {})
        chosen = table
        for column, value in wanted.items():
            chosen = chosen.filter(pc.equal(chosen[column], value))
        if chosen.num_rows:
            candidates.append(chosen.select(["learner", "repeat", "draw", "value"]).to_pylist())
    sign = 1 if better == "low" else -1
    return min(candidates, key=lambda rows: sign * np.mean([row["value"] for row in rows]), default=[])


# ------------------------------------------------------------------------------------------- progress and memory


def _guess(panel: Panel, settings: Settings) -> float:
    """Return a panel's rough share of the work before its data are loaded."""
    size = datasets.SIZES.get(panel.data, 10_000)
    return settings.repeats(panel) * (size + 3e3) * len(settings.values(panel)) * len(panel.runs())


@contextmanager
def _bar(total: float) -> Iterator[tuple[Console, Callable[[float, str | None], None]]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, speed_estimate_period=300) as bars:
        task = bars.add_task("reading data", total=total)

        def advance(part: float, what: str | None) -> None:
            bars.update(task, advance=part, **({} if what is None else {"description": what}))

        yield bars.console, advance


@contextmanager
def watched() -> Iterator[Callable[[], int]]:
    """Watch the memory of this process and its workers, each shared page counted once; 0 where /proc is missing."""
    peak, stop = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while True:
            peak = max(peak, _memory())
            if stop.wait(0.5):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: peak
    finally:
        stop.set()
        thread.join()


def _memory() -> int:
    total, family, parents = 0, {str(os.getpid())}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has just ended
            parents[path.parent.name] = path.read_text().rpartition(")")[2].split()[1]
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    for pid in family:
        with suppress(OSError):
            lines = (Path("/proc") / pid / "smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def miniature(out: Path) -> Settings:
    """Return the settings of a run in seconds on made-up data."""
    return replace(Settings(out), miniature=True, n_jobs=1)
