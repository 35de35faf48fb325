"""The commands for before any record is used: `demo`, `plan`, `simulate` and `audit`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

import consilience as cs
from consilience.cli.command import Answer
from consilience.cli.options import (
    LearnerOptions,
    RelatedLearnerOptions,
    StudyPath,
    TrainingEpsilon,
    as_typed,
    build_aggregator,
    list_aggregators,
    refuse_beside_study,
    require,
)
from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.simulation.division import Division
    from consilience.simulation.report import Report
    from consilience.simulation.simulate import Runs


def demo(
    folder: Annotated[
        Path, Option(help="Where to put the study, the hub, the sites and the report.")
    ] = Path("demo-report"),
) -> Answer:
    """Let six made-up hospitals learn together through a hub on this machine.

    Two keyholders see to it that the hub sees the sum of all hospitals and nothing else. The result
    is compared with what each hospital reaches alone. The patients are computed from a formula and
    do not exist. Takes about a minute.
    """
    from consilience.demo import demo as run
    from consilience.progress import showing

    with showing("Six sites and a hub", None) as progress:
        report = run(folder, progress=progress)
    text = (
        f"{report}\n\nWritten in {report.seconds:.0f} s: {', '.join(report.files)}\n"
        f"The release: {report.release}\nThe dashboard: {report.dashboard}"
    )
    return Answer(report.as_dict(), text)


JudgedBy = Annotated[
    Literal["error", "auc", "log-loss", "rmse", "mae", "r2"] | None,
    Option(
        "--metric",
        help="What is sorted and judged by: error (the default), auc or log-loss; of numbers rmse "
        "(the default), mae or r2.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much there is of everything."""

    n_records: Annotated[int, Option("--records", help="Number of records at one site.")]
    n_sites: Annotated[
        int | None,
        Option(
            "--sites",
            help="How many such sites join; by default 1, or what the study needs at least.",
        ),
    ] = None
    n_features: Annotated[
        int | None,
        Option("--features", help="Number of encoded features; not needed with --public."),
    ] = None
    n_public: Annotated[
        int | None,
        Option(
            "--hub-records",
            help="Number of public records at the hub; by default those of --public.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PublicOptions:
    """Public records that resemble those of the sites."""

    public: Annotated[
        Path | None, Option(help="CSV or Parquet file of labelled public records.")
    ] = None
    label: Annotated[str | None, Option(help="Name of the label column in that file.")] = None
    drop: Annotated[
        list[str] | None, Option(help="A column of it that is not a feature. Repeatable.")
    ] = None

    def read(self) -> Any:
        """Return the encoded records, or None."""
        from consilience.tables.inference import read_public

        if (self.public is None) != (self.label is None):
            raise SettingsError(
                "Advice from public records needs both --public and --label, but only one was "
                "given. Nothing was computed. Give both, or --features alone."
            )
        if self.public is None or self.label is None:
            return None
        return read_public(self.public, self.label, drop=self.drop or ())


def plan(
    *,
    study: StudyPath = None,
    sizes: Sizes,
    epsilon: TrainingEpsilon = None,
    options: RelatedLearnerOptions,
    public: PublicOptions,
    target: Annotated[
        float, Option(help="Report what an excess loss of this size would need.")
    ] = 0.01,
    metric: JudgedBy = None,
    sums: Annotated[
        bool,
        Option(
            "--sums",
            help="With a study: try what handing over sums would bring instead of models. A study "
            "with a statistic is always answered so.",
        ),
    ] = False,
) -> Answer:
    """Predict the accuracy to expect from a number of records, sites and an epsilon.

    The first lines say in words what to expect, against what, and what to change. Spends no budget
    and reads no private record. A study file says what would be trained and how
    it is combined. For several sites, every aggregator is predicted, one is recommended, and you
    learn how many sites, public records or how much epsilon a target needs. With public records
    that resemble the sites' own, the advice rests on them; without, it assumes a loss with the
    same curvature in all directions.
    """
    from consilience.progress import showing

    asked: dict[str, Any] = {**vars(sizes), "epsilon": epsilon, "target": target, "metric": metric}
    with as_typed(Sizes), showing("Planning", None) as progress:
        if study is not None:
            refuse_beside_study(options, public)
            advice = cs.plan(study, **asked, progress=progress, sums=sums)
        else:
            require(epsilon, "--epsilon")
            settings = options.settings()
            settings["sums"] = sums
            advice = cs.plan(**asked, public=public.read(), progress=progress, **settings)
        return Answer(advice.as_dict(), str(advice))


def audit(
    *,
    study: StudyPath = None,
    epsilon: TrainingEpsilon = None,
    options: RelatedLearnerOptions,
    attack: Annotated[
        Literal["exact", "sample"] | None,
        Option(help="Search the exact density (by default, where it applies), or train often."),
    ] = None,
    records: Annotated[int, Option(help="Number of records in the made-up data sets.")] = 100,
) -> Answer:
    """Attack the privacy of a study's learner and report the largest epsilon that is proven.

    The attack uses made-up records. The exit code is 1 if the claimed epsilon is false. An attack
    that finds nothing proves nothing: the proofs are in docs/guarantees/.
    """
    from consilience.progress import showing

    with showing("Attacking", None):
        if study is not None:
            refuse_beside_study(options)
            report = cs.audit(study, kind=attack, epsilon=epsilon, n_records=records)
        else:
            size = {"public_size": records} if options.neighbours == "add-remove" else {}
            learner = options.build(epsilon=require(epsilon, "--epsilon"), **size)
            report = cs.audit(learner, kind=attack, n_records=records)
    return Answer(report.as_dict(), str(report), code=0 if report.passed else 1)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a study file says otherwise."""

    label: Annotated[str | None, Option(help="Name of the label column.")] = None
    drop: Annotated[
        list[str] | None, Option(help="A column that is not a feature. Repeatable.")
    ] = None
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
    """How the records are divided: the settings of a `Division`."""

    sites: Annotated[int, Option(help="Number of sites of equal size.")] = 10
    site_column: Annotated[
        str | None, Option(help="Instead: the column that names each record's site.")
    ] = None
    sizes: Annotated[
        list[int] | None,
        Option("--size", help="Instead: records of one site. Once for each site."),
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


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How often the simulation runs, and where: the settings of `Runs`."""

    repeats: Annotated[int, Option(help="Number of repeats, each with a new division.")] = 10
    draws: Annotated[int, Option(help="Number of draws of noise per division.")] = 1
    seed: Annotated[
        int | None, Option(help="Makes the numbers repeatable and voids all guarantees.")
    ] = None
    n_jobs: Annotated[int, Option("--jobs", help="Parallel processes; -1 for one per core.")] = 1
    backend: Annotated[
        Literal["loky", "threading", "ray", "dask"] | None,
        Option(help="Where they run; it does not change the results."),
    ] = None
    checkpoint: Annotated[
        Path | None, Option(help="Folder that keeps finished work, to resume from; needs --seed.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What is tried beside the method that was asked for, and for whom joining pays."""

    beside: Annotated[
        list[str] | None,
        Option(
            help="With a study: another learner or statistic to try on the same divisions, such as "
            "Moments, GradientStep or LabelTables. Repeatable."
        ),
    ] = None
    adapt: Annotated[
        int,
        Option(
            help="How many sites, the smallest and the largest, adapt each release to their own "
            "records, which shows whether joining pays for them."
        ),
    ] = 4


@dataclass(frozen=True, kw_only=True)
class Files:
    """What is read and written."""

    data: Annotated[Path, Option(help="CSV or Parquet file of public records.")]
    out: Annotated[
        Path | None,
        Option(help="Folder for all numbers (CSV, Parquet), and a chart if matplotlib is there."),
    ] = None


def simulate(
    *,
    study: StudyPath = None,
    files: Files,
    division: DivisionOptions,
    epsilon: Annotated[
        list[float] | None,
        Option(help="A budget to try; by default some that the study allows. Repeatable."),
    ] = None,
    metric: JudgedBy = None,
    runs: RunOptions,
    tried: Tried,
    model: ModelOptions,
    learner: LearnerOptions,
) -> Answer:
    """Simulate a collaboration on public records, to see whether joining helps.

    With a study file, this is what its sites and its hub will do. Use it for public records only:
    it trains many times without a ledger and shows errors; without a study it also reads bounds,
    categories and classes from the file. Every table has the honest baselines: always the most
    frequent class, public records alone, sites alone, all records pooled; and for some sites their
    own exact model, the release, and the release adapted to their own records.
    """
    from consilience.progress import showing

    cut = cs.Division(
        **{**vars(division), "sizes": division.sizes or None, "public": division.public or None}
    )
    with (
        as_typed(DivisionOptions, RunOptions, ModelOptions),
        showing("Simulating", None) as progress,
    ):
        how = cs.Runs(**vars(runs), progress=progress)
        if study is not None:
            refuse_beside_study(model, learner)
            report = cs.simulate(
                study,
                files.data,
                division=cut,
                runs=how,
                epsilon=epsilon,
                metric=metric,
                beside=tried.beside or (),
                adapt=tried.adapt,
            )
        else:
            if tried.beside:
                raise SettingsError(
                    "Methods are tried beside that of a study, and no study was named. Nothing was "
                    "trained. Name one with --study, or run the command once for each learner."
                )
            asked = {
                "epsilon": require(epsilon, "--epsilon"),
                "metric": metric,
                "adapt": tried.adapt,
            }
            report = _simulate_options(files.data, model, learner, cut, how, asked)
    if files.out is None:
        return Answer({**report.as_dict(), "files": []}, str(report))
    written = _write(report, files.out)
    text = f"{report}\n\nWritten in {report.seconds:.1f} s: {', '.join(written)}"
    return Answer({**report.as_dict(), "files": written}, text)


def _simulate_options(
    data: Path,
    model: ModelOptions,
    learner: LearnerOptions,
    division: Division,
    runs: Runs,
    asked: dict[str, Any],
) -> Report:
    """Simulate what options describe, on records encoded by their own bounds and categories."""
    from consilience.tables.inference import read_public

    label = require(model.label, "--label")
    made = learner.build(epsilon=asked["epsilon"][0])
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
    X, y = read_public(table, label, drop=model.drop or ())
    settings: Any = {**vars(division), **vars(runs), **asked}
    return cs.simulate(made, aggregators, X, y, **settings)


def _write(report: Report, folder: Path) -> list[str]:
    """Write what was found; the chart only where something can draw it."""
    from consilience.display.panels import can_draw

    folder.mkdir(parents=True, exist_ok=True)
    names = ["results.csv", "results.parquet"]
    report.to_csv(folder / names[0])
    report.to_parquet(folder / names[1])
    if can_draw():
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained", dpi=150)
        report.plot(ax=figure)
        names.append("errors.png")
        figure.savefig(folder / names[-1])
    return [str(folder / name) for name in names]
