"""Play a whole collaboration through on public records: what joining would bring, and to whom.

`simulate` checks its arguments and hands out cells (one repeat of one learner); `division.py`
divides the records of a repeat into test, public and sites; `cell.py` trains at every site, pools,
combines by every aggregator and measures all of it on the same test records; `sweep.py` runs cells,
wherever that is, and keeps what is done; `report.py` gathers the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from consilience.aggregators.base import Aggregator
from consilience.errors import SettingsError
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.mechanisms import Noise
from consilience.progress import Progress
from consilience.simulation.checks import is_whole, require
from consilience.simulation.division import (
    Divider,
    Division,
    Preparation,
    Records,
    Test,
    derive_seed,
)
from consilience.simulation.report import Report, Row
from consilience.simulation.setup import (
    Levels,
    Setup,
    Ways,
    check_aggregators,
    check_baselines,
    check_draws,
    check_learners,
    check_levels,
)
from consilience.simulation.sweep import Store, check_backend, sweep
from consilience.study.records import PublicFile
from consilience.study.study import Study
from consilience.tables.public import Public
from consilience.tables.reading import read_table

Cell = tuple[int, str]  # a repeat, and the name of a learner


@dataclass(frozen=True)
class Runs:
    """How often and where a simulation runs.

    Parameters
    ----------
    repeats, draws
        How often records are divided anew, and how often noise is drawn on each division, for which
        exact models are trained once. Summaries average the draws of a repeat and spread over
        repeats.
    seed
        Makes the report repeatable, and voids its guarantees.
    n_jobs
        As joblib takes it; with a `backend` and none given, one for each core.
    backend
        ``"loky"``, ``"threading"``, ``"ray"`` or ``"dask"``, a local one started if none is
        running; None leaves the choice to ``joblib.parallel_config`` around the call. The report
        does not depend on it.
    checkpoint
        A folder in which each cell, one repeat of one learner, is stored when it is done; the same
        call then continues where the last one stopped. A cell is used again only if everything that
        determines it is the same, records, settings and this package's own code included; functions
        that `prepare` calls are not looked into. Needs a `seed`: fresh noise is not kept.
    progress
        Called with (cells done, cells). Without it, a bar is shown if standard error is a terminal.
    """

    repeats: int = 10
    draws: int = 1
    seed: int | None = None
    n_jobs: int | None = None
    backend: str | None = None
    checkpoint: str | Path | None = None
    progress: Progress | None = None

    def check(self) -> None:
        """Refuse what cannot work, before anything is trained."""
        require("repeats", self.repeats, is_whole(self.repeats), "a whole number > 0")
        fits = self.n_jobs is None or self.n_jobs != 0
        require("n_jobs", self.n_jobs, fits, "None or a number other than 0, as joblib takes it")
        check_backend(self.backend)
        fits = self.checkpoint is None or self.seed is not None
        must = "given with a checkpoint: without one, noise is fresh and not kept"
        require("seed", self.seed, fits, must)


class Settings(TypedDict, total=False):
    """The keywords of the short form: those of `Division`, `Runs` and a few more."""

    sites: int | str | ArrayLike
    public: Public | int | None
    test: Test
    repeats: int
    seed: int | None
    epsilon: Levels | None
    sizes: Sequence[int] | None
    label_skew: float | None
    feature_skew: float | None
    prepare: object
    prepare_on: str
    draws: int
    baselines: Collection[str] | None
    n_jobs: int | None
    backend: str | None
    checkpoint: str | Path | None
    progress: Progress | None


class StudySettings(TypedDict, total=False):
    """The keywords of a study's simulation."""

    division: Division
    runs: Runs
    epsilon: Levels | None


@overload
def simulate(
    study: Study | str | Path, table: object, /, **settings: Unpack[StudySettings]
) -> Report: ...


@overload
def simulate(
    learner: object, aggregator: object, X: object, y: object, **settings: Unpack[Settings]
) -> Report: ...


def simulate(
    learner: object, aggregator: object, X: object = None, y: object = None, **settings: Any
) -> Report:
    """Simulate sites that train privately and join, beside what they could do instead.

    ``simulate(study, table, division=Division(...), runs=Runs(...), epsilon=...)`` plays a study
    through: its learner, aggregator, schema, persons and hub. The study is a `Study` or the path of
    its file; public and test records that lie beside the file are used unless the division says
    otherwise. The table is anything that `read_table` takes. Levels are by default the study's
    smallest and largest epsilon and their geometric mean, or what its hub's own noise has.

    ``simulate(learner, aggregator, X, y, ...)`` is the short form, with the settings of `Division`
    and `Runs` as keywords.

    Parameters
    ----------
    learner, aggregator
        One, a list, or a dictionary by name; all are tried with all. No aggregator at all: only the
        `baselines` asked for are computed.
    X, y
        Public records, encoded as a site would encode its own. A data frame if `sites` names one of
        its columns.
    sites
        As in `Division`, or the name of a column of `X`.
    sizes, public, test, label_skew, feature_skew
        As in `Division`. Without public records there is no public-only baseline.
    repeats, draws, seed, n_jobs, backend, checkpoint, progress
        As in `Runs`.
    epsilon
        Replaces the learner's own: a number; a list of levels to try, each a number or one number
        per site; or a dictionary of levels by name. An aggregator that has an epsilon gets the
        level's instead, in its own unit.
    prepare, prepare_on
        What is done to all features, learned anew in each repeat: a scikit-learn transformer, or a
        function that takes the records to learn from and returns a function of features. It learns
        from the ``"public"`` records, or, as papers did, from ``"train"``, all records of `X` that
        are not tested on, which no guarantee covers.
    baselines
        Which to compute, of those in `evaluation.baselines.TITLES`. By default all that answer the
        same question: a site alone and private only if some aggregator takes private members, the
        private pool only if some aggregator hides records and not whole sites.

    Exact linear models of many sites are trained together, as exactly as one by one. Of more than
    100 sites, single ones are measured by what can be counted (error, F1). Methods also have
    "bytes", the arrays that a site hands over, and in `Report.timings` "seconds".

    Privacy
    -------
    None: every repeat and level trains again, and errors are shown, so records must be public. Each
    ensemble alone has what `Report.guarantees` states, void with a seed.
    """
    if isinstance(learner, Study | str | Path):
        return _run(*_set_up_study(learner, aggregator, **settings))
    return _run(*_set_up(learner, aggregator, X, y, **settings))


def _run(setup: Setup, runs: Runs) -> Report:
    """Run every cell and gather the report."""
    started = time.perf_counter()
    runs.check()
    store = None
    if runs.checkpoint is not None:
        store, setup = Store(Path(runs.checkpoint)), setup.with_digests()
    cells: list[Cell] = [
        (repeat, name) for repeat in range(runs.repeats) for name in setup.ways.learners
    ]
    facts = setup.facts(runs.repeats)  # so that what cannot be divided fails before any training
    answers = sweep(
        setup,
        cells,
        n_jobs=runs.n_jobs,
        backend=runs.backend,
        store=store,
        progress=runs.progress,
    )
    rows, timings = (
        tuple(Row(*row) for cell in cells for row in answers[cell][kind])
        for kind in ("rows", "timings")
    )
    guarantees = {
        (cell[1], level, method): Guarantee.from_dict(guarantee)
        for cell in cells
        for level, method, guarantee in answers[cell]["guarantees"]
    }
    seconds = time.perf_counter() - started
    return Report(rows, guarantees, facts, setup.guarantee(guarantees), seconds, timings)


# ------------------------------------------------------------------------------- the short form

DataclassT = TypeVar("DataclassT", Division, Runs)


def _set_up(
    learner: object, aggregator: object, X: Any, y: object, **settings: Any
) -> tuple[Setup, Runs]:
    """Check the arguments of the short form."""
    if isinstance(name := settings.get("sites"), str):
        fits = name in getattr(X, "columns", ())
        require("sites", name, fits, "a number, an id per record, or a column of X")
        settings["sites"], X = X[name], X[[column for column in X.columns if column != name]]
    division, runs = _take(Division, settings), _take(Runs, settings)
    epsilon, baselines = settings.pop("epsilon", None), settings.pop("baselines", None)
    preparation = _check_preparation(
        settings.pop("prepare", None), settings.pop("prepare_on", "public")
    )
    if settings:
        raise TypeError(f"simulate() got unexpected keyword arguments {sorted(settings)}")
    learners = check_learners(learner)
    aggregators = check_aggregators(aggregator, baselines)
    ways = Ways(
        learners,
        aggregators,
        None,
        check_baselines(baselines, aggregators),
        check_draws(runs.draws),
    )
    records = Records.check(X, y, numeric=not ways.classify)
    return _finish(ways, records, division, preparation, epsilon, runs)


def _finish(
    ways: Ways,
    records: Records,
    division: Division,
    preparation: Preparation | None,
    epsilon: Levels | None,
    runs: Runs,
) -> tuple[Setup, Runs]:
    """Divide the records, and name the levels, which may have one epsilon for each site."""
    fresh = Noise(seed=runs.seed).open(stream=2**32) if runs.seed is None else None
    split_seed = (
        derive_seed(int(runs.seed or 0), "split") if fresh is None else int(fresh.words(1)[0])
    )
    divider = Divider.check(
        records, division, preparation, numeric=not ways.classify, split_seed=split_seed
    )
    ways = replace(ways, levels=check_levels(epsilon, divider.n_sites))
    return Setup(divider, ways, Noise(seed=runs.seed).seed), runs


def _take(cls: type[DataclassT], settings: dict[str, Any]) -> DataclassT:
    """Build a settings object of those keywords that it knows, and remove them."""
    names = {part.name for part in fields(cls)} & set(settings)
    return cls(**{name: settings.pop(name) for name in names})


def _check_preparation(how: object, learned_on: str) -> Preparation | None:
    fits = how is None or callable(how) or (hasattr(how, "fit") and hasattr(how, "transform"))
    require("prepare", how, fits, "a transformer, or a function that returns a function")
    fits = learned_on in ("public", "train")
    require("prepare_on", learned_on, fits, "'public' or 'train'")
    return None if how is None else Preparation(how, learned_on)


# ----------------------------------------------------------------------------- the study's form


def _set_up_study(
    study: Study | str | Path,
    table: object,
    *,
    division: Division | None = None,
    runs: Runs | None = None,
    epsilon: Levels | None = None,
) -> tuple[Setup, Runs]:
    """Check a study, a table of its schema, and how it is divided."""
    division, runs = division or Division(), runs or Runs()
    folder = None if isinstance(study, Study) else Path(study).parent
    study = study if isinstance(study, Study) else Study.load(study)
    schema = study.schema
    if division.site_column is not None:
        whole = read_table(table)
        fits = division.site_column in whole.column_names
        require("site_column", division.site_column, fits, "a column of the table")
        division = replace(division, sites=whole[division.site_column].to_pylist())
        table = whole
    encoded = schema.encode(table)
    public, test = (
        None if folder is None else _read_beside(study, part, folder)
        for part in (study.public, study.test)
    )
    if division.public is None and public is not None:
        division = replace(division, public=public)
    if division.test is None and test is not None and test.y is not None:
        division = replace(division, test=(test.X, test.y))
    aggregator = study.build_aggregator()
    if aggregator.needs_public and division.public is None:
        raise SettingsError(
            f"{study.aggregator} needs public records, and the division has none. Nothing was "
            "trained. Give the path of the study with its public file beside it, or "
            "Division(public=...): a number of records that are cut from the table."
        )
    low = float(study.epsilon_range[0])
    learner = study.build(low).set_params(epsilon=low, delta=study.delta)
    learners = check_learners({study.learner: learner}, persons=encoded.persons is not None)
    aggregators = {study.aggregator: aggregator}
    baselines = check_baselines(None, aggregators)
    given = epsilon is not None
    levels = epsilon if epsilon is not None else _default_levels(study, aggregator)
    ways = Ways(learners, aggregators, None, baselines, check_draws(runs.draws), gives_budget=given)
    labels = encoded.y if schema.classes is None else np.asarray(schema.classes)[encoded.y]
    records = Records.check(encoded.X, labels, numeric=not ways.classify, persons=encoded.persons)
    return _finish(ways, records, division, None, levels, runs)


def _default_levels(study: Study, aggregator: Aggregator) -> Levels:
    """Return what sites may spend: the ends of the range and their geometric mean.

    Where sites hand over exact models, the epsilon is that of the hub's own noise, or there is
    none.
    """
    if study.trusted:
        own = getattr(aggregator, "epsilon", None) if aggregator.needs_exact_members else math.inf
        return math.inf if own is None else float(own)
    low, high = map(float, study.epsilon_range)
    middle = float(f"{math.sqrt(low * high):.3g}")  # it names a level in tables
    return sorted({low, middle, high} if low < middle < high else {low, high})


def _read_beside(study: Study, part: PublicFile | None, folder: Path) -> Public | None:
    """Read a file of public records if it lies beside the study."""
    if part is None or not (folder / part.file).exists():
        return None
    return part.read(study.schema, folder)
