"""The command `consilience simulate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import consilience as cs
from consilience.cli.command import Answer
from consilience.cli.options import (
    LearnerOptions,
    StudyPath,
    build_aggregator,
    list_aggregators,
    refuse_beside_study,
    require,
)
from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.progress import Progress
    from consilience.simulation.division import Division
    from consilience.simulation.report import Report
    from consilience.simulation.simulate import Runs


class Backend(StrEnum):
    """Where parts of a simulation can run in parallel."""

    LOKY = "loky"
    THREADING = "threading"
    RAY = "ray"
    DASK = "dask"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a study file says otherwise."""

    label: Annotated[str | None, Option(help="Name of the label column.")] = None
    aggregator: Annotated[
        list[str] | None,
        Option(
            help="How to combine: a short name such as average (the default), feature or blend, "
            "or a class name. Repeatable.",
            autocompletion=list_aggregators,
        ),
    ] = None


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
    public: Annotated[
        int,
        Option(help="Number of records that the hub may see; 0 for the study's own, or none."),
    ] = 0
    test: Annotated[
        float | None,
        Option(help="Share of the records used for testing; by default the study's own, or 0.3."),
    ] = None

    def build(self) -> Division:
        """Return the division."""
        return cs.Division(
            sites=self.sites,
            sizes=self.size or None,
            site_column=self.site_column,
            public=self.public or None,
            test=self.test,
            label_skew=self.label_skew,
            feature_skew=self.feature_skew,
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How often the simulation runs, and where."""

    epsilon: Annotated[
        list[float] | None,
        Option(help="A budget to try; by default some that the study allows. Repeatable."),
    ] = None
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

    def build(self, progress: Progress) -> Runs:
        """Return the runs."""
        return cs.Runs(
            repeats=self.repeats,
            draws=self.draws,
            seed=self.seed,
            n_jobs=self.jobs,
            backend=None if self.backend is None else self.backend.value,
            checkpoint=self.checkpoint,
            progress=progress,
        )


@dataclass(frozen=True, kw_only=True)
class Files:
    """What is read and written."""

    data: Annotated[Path, Option(help="CSV or Parquet file of public records.")]
    out: Annotated[
        Path | None, Option(help="Folder for all numbers (CSV, Parquet) and a chart.")
    ] = None


def simulate(
    *,
    study: StudyPath = None,
    files: Files,
    division: DivisionOptions,
    runs: RunOptions,
    model: ModelOptions,
    learner: LearnerOptions,
) -> Answer:
    """Simulate a collaboration on public records, to see whether joining helps.

    With a study file, this is what its sites and its hub will do. Use it for public records only:
    it trains many times without a ledger and shows errors; without a study it also reads bounds,
    categories and classes from the file. Every table has the honest baselines: public records
    alone, sites alone, all records pooled.
    """
    from consilience.progress import showing

    with showing("Simulating", None) as progress:
        cut, how = division.build(), runs.build(progress)
        if study is not None:
            refuse_beside_study(model, learner)
            report = cs.simulate(study, files.data, division=cut, runs=how, epsilon=runs.epsilon)
        else:
            report = _simulate_options(files.data, model, learner, runs.epsilon, cut, how)
    written = [] if files.out is None else _write(report, files.out)
    text = str(report)
    if written:
        text += f"\n\nWritten in {report.seconds:.1f} s: {', '.join(written)}"
    return Answer({**report.as_dict(), "files": written}, text)


def _simulate_options(
    data: Path,
    model: ModelOptions,
    learner: LearnerOptions,
    epsilon: list[float] | None,
    division: Division,
    runs: Runs,
) -> Report:
    """Simulate what options describe, on records encoded by their own bounds and categories."""
    from consilience.tables.inference import read_public

    label, epsilons = require(model.label, "--label"), require(epsilon, "--epsilon")
    made = learner.build(epsilon=epsilons[0])
    aggregators = {name: build_aggregator(name) for name in model.aggregator or ["average"]}
    table: Any = cs.read_table(data)
    if division.site_column is not None:
        column = division.site_column
        if column not in table.column_names:
            raise SettingsError(
                f"The file {str(data)!r} has no column {column!r} that could name the sites. "
                f"Nothing was trained. Name one of {table.column_names}."
            )
        division = replace(division, sites=table[column].to_pylist(), site_column=None)
        table = table.drop_columns([column])
    X, y = read_public(table, label)
    settings: Any = {**vars(division), **vars(runs)}
    return cs.simulate(made, aggregators, X, y, epsilon=epsilons, **settings)


def _write(report: Report, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    report.to_csv(folder / "results.csv")
    report.to_parquet(folder / "results.parquet")
    report.plot(folder / "errors.png")
    return [str(folder / name) for name in ("results.csv", "results.parquet", "errors.png")]
