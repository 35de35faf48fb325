"""The command `consilience simulate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import consilience as cs
from consilience.cli.command import Answer
from consilience.cli.options import LearnerOptions, build_aggregator, list_aggregators
from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.simulation.report import Report


class Backend(StrEnum):
    """Where parts of a simulation can run in parallel."""

    LOKY = "loky"
    THREADING = "threading"
    RAY = "ray"
    DASK = "dask"


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What is simulated."""

    data: Annotated[Path, Option(help="CSV or Parquet file of public records.")]
    label: Annotated[str, Option(help="Name of the label column.")]
    epsilon: Annotated[list[float], Option(help="A budget to try. Repeatable.")]
    aggregator: Annotated[
        list[str],
        Option(
            help="How to combine: a short name such as average, feature or blend, or a class "
            "name. Repeatable.",
            autocompletion=list_aggregators,
        ),
    ] = field(default_factory=lambda: ["average"])


@dataclass(frozen=True, kw_only=True)
class DivisionOptions:
    """How the records are divided."""

    sites: Annotated[int, Option(help="Number of sites of equal size.")] = 10
    site_column: Annotated[
        str | None, Option(help="Instead: the column that names each record's site.")
    ] = None
    size: Annotated[
        list[int] | None, Option(help="Instead: records of one site. Once for each site.")
    ] = None
    label_skew: Annotated[
        float | None, Option(help="Uneven classes: 0.1 is strong, 100 is weak.")
    ] = None
    feature_skew: Annotated[float | None, Option(help="Uneven features: from 0 (none) to 1.")] = (
        None
    )
    public: Annotated[int, Option(help="Number of records that the hub may see; 0 for none.")] = 0
    test: Annotated[float, Option(help="Share of the records used for testing.")] = 0.3


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How often the simulation runs, and where."""

    repeats: Annotated[int, Option(help="Number of repeats, each with a new division.")] = 10
    draws: Annotated[int, Option(help="Number of draws of noise per division.")] = 1
    seed: Annotated[
        int | None, Option(help="Makes the numbers repeatable and voids all guarantees.")
    ] = None
    jobs: Annotated[int, Option(help="Parallel processes; -1 for one per core.")] = 1
    backend: Annotated[
        Backend | None, Option(help="Where they run; it does not change the results.")
    ] = None
    checkpoint: Annotated[
        Path | None, Option(help="Folder that keeps finished work, to resume from; needs --seed.")
    ] = None


def simulate(
    asked: StudyOptions,
    learner: LearnerOptions,
    division: DivisionOptions,
    runs: RunOptions,
    out: Annotated[
        Path | None, Option(help="Folder for all numbers (CSV, Parquet) and a chart.")
    ] = None,
) -> Answer:
    """Simulate a collaboration on public records, to see whether joining helps.

    Use it for public records only: it trains many times without a ledger, shows errors, and reads
    bounds, categories and classes from the file. Every table has the honest baselines: public
    records alone, sites alone, all records pooled.
    """
    from consilience.progress import showing
    from consilience.simulation.simulate import simulate as run
    from consilience.tables.inference import read_public

    made = learner.build(epsilon=asked.epsilon[0])
    aggregators = {name: build_aggregator(name) for name in asked.aggregator}
    table: Any = cs.read_table(asked.data)
    where: Any = division.sites
    if division.site_column is not None:
        where, table = _take_sites(table, division.site_column, asked.data)
    X, y = read_public(table, asked.label)
    with showing("Simulating", None) as progress:
        report = run(
            made,
            aggregators,
            X,
            y,
            sites=where,
            public=division.public or None,
            test=division.test,
            repeats=runs.repeats,
            seed=runs.seed,
            epsilon=asked.epsilon,
            sizes=division.size or None,
            label_skew=division.label_skew,
            feature_skew=division.feature_skew,
            draws=runs.draws,
            n_jobs=runs.jobs,
            backend=None if runs.backend is None else runs.backend.value,
            checkpoint=runs.checkpoint,
            progress=progress,
        )
    files = [] if out is None else _write(report, out)
    text = str(report)
    if files:
        text += f"\n\nWritten in {report.seconds:.1f} s: {', '.join(files)}"
    return Answer({**report.as_dict(), "files": files}, text)


def _take_sites(table: Any, column: str, file: Path) -> tuple[list[object], Any]:
    """Return the site of each record, and the table without that column."""
    if column not in table.column_names:
        raise SettingsError(
            f"The file {str(file)!r} has no column {column!r} that could name the sites. Nothing "
            f"was trained. Name one of {table.column_names}."
        )
    return table[column].to_pylist(), table.drop_columns([column])


def _write(report: Report, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    report.to_csv(folder / "results.csv")
    report.to_parquet(folder / "results.parquet")
    report.plot(folder / "errors.png")
    return [str(folder / name) for name in ("results.csv", "results.parquet", "errors.png")]
