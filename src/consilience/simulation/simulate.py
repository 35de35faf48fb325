"""Play a whole collaboration through on public records: what joining would bring, and to whom.

`simulate` checks its arguments and hands out cells (one repeat of one learner); `division.py`
divides the records of a repeat into test, public and sites; `cell.py` trains at every site, pools,
combines by every aggregator and measures all of it on the same test records; `sweep.py` runs cells,
wherever that is, and keeps what is done; `report.py` gathers the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from sklearn.base import is_classifier

from consilience.aggregators.base import Aggregator
from consilience.errors import SettingsError
from consilience.evaluation.baselines import BEST, LOCAL, POOLED, TITLES
from consilience.evaluation.measures import ERROR, RMSE, Metric, find_metric
from consilience.learners.base import is_count
from consilience.learners.registry import LEARNERS
from consilience.privacy.guarantee import Guarantee, Unit
from consilience.privacy.mechanisms import Noise
from consilience.privacy.spending import void_by_seed
from consilience.progress import Progress
from consilience.simulation.cell import Array, Setup
from consilience.simulation.division import (
    Divider,
    Division,
    Preparation,
    Records,
    require,
)
from consilience.simulation.once import TotalOnce
from consilience.simulation.report import Report, Row
from consilience.simulation.sweep import Store, check_backend, sweep
from consilience.simulation.together import Learner
from consilience.statistics.total import Total
from consilience.study.draft import suggest_aggregator, usual_shares
from consilience.study.study import Study
from consilience.tables.reading import read_table

Level = float | Sequence[float]
Levels = Level | Sequence[Level] | Mapping[str, Level]
USUAL_DELTA = 1e-6  # of learners that need one, beside those of a study that has none
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

    Examples
    --------
    >>> import consilience as cs
    >>> cs.Runs(repeats=20, seed=1, n_jobs=2).repeats
    20
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
        require("repeats", self.repeats, is_count(self.repeats), "a whole number > 0")
        require("draws", self.draws, is_count(self.draws), "a whole number > 0")
        fits = self.n_jobs is None or self.n_jobs != 0
        require("n_jobs", self.n_jobs, fits, "None or a number other than 0, as joblib takes it")
        check_backend(self.backend)
        fits = self.checkpoint is None or self.seed is not None
        must = "given with a checkpoint: without one, noise is fresh and not kept"
        require("seed", self.seed, fits, must)


@overload
def simulate(
    study: Study | str | Path,
    table: object,
    /,
    *,
    division: Division | None = None,
    runs: Runs | None = None,
    epsilon: Levels | None = None,
    metric: str | None = None,
    beside: Sequence[str] = (),
    adapt: int = 0,
) -> Report: ...


@overload
def simulate(
    learner: object, aggregator: object, X: object, y: object, *places: Any, **settings: Any
) -> Report: ...


def simulate(
    learner: object,
    aggregator: object,
    X: object = None,
    y: object = None,
    *places: object,
    **settings: Any,
) -> Report:
    """Simulate sites that train privately and join, beside what they could do instead.

    ``simulate(study, table, division=Division(...), runs=Runs(...), epsilon=...)`` plays a study
    through: its learner, aggregator, schema, persons and hub. The study is a `Study` or the path of
    its file; public and test records that lie beside the file are used unless the division says
    otherwise. The table is anything that `read_table` takes. Levels are by default the study's
    smallest and largest epsilon and their geometric mean, or what its hub's own noise has.

    A statistic is tried with noise at every site, shared by the sites, and drawn once by a trusted
    hub, whatever the study says. `beside` names learners and statistics, such as ``"Moments"``,
    that are tried on the same divisions.

    ``simulate(learner, aggregator, X, y, ...)`` is the short form, with the settings of `Division`
    and `Runs` as keywords; `sites`, `public`, `test`, `repeats` and `seed` may follow `y` by place.

    Parameters
    ----------
    learner, aggregator
        One, a list, or a dictionary by name; all are tried with all that suit them. No aggregator
        at all: only the `baselines` asked for are computed. A `GradientStep` without a start takes
        that of each repeat's public records.
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
    metric
        What methods are sorted and judged by: "error" (the default), "auc" or "log-loss" of
        classifiers, "rmse" (the default), "mae" or "r2" of regressors. All are measured anyway.
    adapt
        How many sites of each repeat, the smallest and the largest, adapt each release to their own
        exact records (`consilience.adapt`). The report then has their own exact models, the release
        and the adapted models, small and large sites apart: whether joining pays, and for whom.
        Sites that are known by name are measured on test records of their own.
    baselines
        Which to compute, of those in `evaluation.baselines.TITLES`. By default all that answer the
        same question: a site alone and private only if some aggregator takes private members, the
        private pool only if some aggregator hides records and not whole sites.

    Notes
    -----
    Exact linear models of many sites are trained together, as exactly as one by one. Of more than
    100 sites, single ones are measured by what can be counted (error, F1), unless another metric
    is asked for. Methods also have "bytes", the arrays that a site hands over, and in
    `Report.timings` "seconds".

    Privacy
    -------
    None: every repeat and level trains again, and errors are shown, so records must be public. Each
    ensemble alone has what `Report.guarantees` states, void with a seed.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(9000.0)).reshape(3000, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    >>> report = cs.simulate(learner, cs.Average(), X, y, sites=3, repeats=2, seed=1)
    >>> print(report.sentence)
    PrivateLogisticRegression at epsilon=1: joining 3 sites by Average ...
    """
    if isinstance(learner, Study | str | Path):
        return _run(*_set_up_study(learner, aggregator, **settings))
    named = dict(zip(("sites", "public", "test", "repeats", "seed"), places, strict=False))
    return _run(*_set_up(learner, aggregator, X, y, **named, **settings))


def _run(setup: Setup, runs: Runs) -> Report:
    """Run every cell and gather the report."""
    started = time.perf_counter()
    runs.check()
    store = None
    if runs.checkpoint is not None:
        store, setup = Store(Path(runs.checkpoint)), setup.with_digests()
    cells: list[Cell] = [
        (repeat, name) for repeat in range(runs.repeats) for name in setup.learners
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
    weakest = max(guarantees.values(), key=lambda one: (not one.holds, one.epsilon), default=None)
    if setup.seed is not None:
        some = next(iter(setup.learners.values()))
        weakest = void_by_seed(unit=some.unit, neighbours=some.neighbours)
    return Report(rows, guarantees, facts, weakest, time.perf_counter() - started, timings)


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
    metric, adapting = settings.pop("metric", None), _check_adapting(settings.pop("adapt", 0))
    preparation = _check_preparation(
        settings.pop("prepare", None), settings.pop("prepare_on", "public")
    )
    if settings:
        raise TypeError(f"simulate() got unexpected keyword arguments {sorted(settings)}")
    learners, aggregators = _check_learners(learner), _check_aggregators(aggregator, baselines)
    wanted = _check_baselines(baselines, aggregators)
    records = Records.check(X, y, numeric=_predict_numbers(learners))
    divider = Divider.check(records, division, preparation, runs.seed)
    levels = _check_levels(epsilon, divider.n_sites)
    seed = Noise(seed=runs.seed).seed
    setup = Setup(divider, seed, learners, aggregators, levels, wanted, runs.draws, adapting)
    return replace(setup, metric=_check_metric(metric, learners)), runs


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
    metric: str | None = None,
    beside: Sequence[str] = (),
    adapt: int = 0,
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
    # Files of public records are used if they lie beside the study.
    public, test = (
        None
        if folder is None or part is None or not (folder / part.file).exists()
        else part.read(schema, folder)
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
    kinds = {
        choice.learner: choice.build(low).set_budget(low, study.delta) for choice in study.choices
    }
    for name in beside:
        require("beside", name, name in LEARNERS, f"of {list(LEARNERS)}")
        kinds.setdefault(name, _build_beside(study, LEARNERS[name], low))
    persons = encoded.persons
    learners = _check_learners(kinds, persons=persons is not None)
    labels = encoded.y if schema.classes is None else np.asarray(schema.classes)[encoded.y]
    numeric = _predict_numbers(learners)
    records = Records.check(encoded.X, labels, numeric=numeric, persons=persons)
    divider = Divider.check(records, division, None, runs.seed)
    labelled = division.public is not None
    aggregators = _ways_of(study, aggregator, learners, divider.n_sites, labelled=labelled)
    # Where noise is drawn once, it is that of the level.
    given = epsilon is not None or len(aggregators) > 1
    epsilon = _default_levels(study, aggregator) if epsilon is None else epsilon
    setup = Setup(
        divider,
        Noise(seed=runs.seed).seed,
        learners,
        aggregators,
        _check_levels(epsilon, divider.n_sites),
        _check_baselines(None, aggregators),
        runs.draws,
        _check_adapting(adapt),
        gives_budget=given,
        metric=_check_metric(metric, learners),
    )
    return setup, runs


def _build_beside(study: Study, kind: type[Learner], epsilon: float) -> Learner:
    """Return another learner as the study would have it."""
    needed = USUAL_DELTA if kind.needs_delta else 0.0
    return kind.for_schema(
        study.schema,
        epsilon=epsilon,
        delta=study.delta or needed,
        neighbours=study.neighbours,
    )


def _ways_of(
    study: Study,
    aggregator: Aggregator,
    learners: Mapping[str, Learner],
    n_sites: int,
    *,
    labelled: bool,
) -> dict[str, Aggregator]:
    """Return the study's aggregator, and what else suits one of the learners.

    Sums are added up with noise from all three places.
    """
    found, schema = {study.aggregator: aggregator}, study.schema
    if any(learner.suits == Total.__name__ for learner in learners.values()):
        found.setdefault(Total.__name__, Total.for_schema(schema))
        shares = usual_shares(n_sites) if study.blind is None else study.blind.shares
        found[f"Total, noise shared ({shares} of {n_sites})"] = TotalOnce(shares=shares)
        found["Total, noise at a trusted hub"] = TotalOnce()
    for learner in learners.values():
        settings = learner.get_params(deep=False)
        if all(one.problem_with(type(learner), settings) for one in found.values()):
            usual = suggest_aggregator(type(learner), is_public=labelled)
            found[usual.__name__] = usual.for_schema(schema)
    return found


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


# --------------------------------------------------------------------------- checking arguments

_LEARNER = (
    "this project's learners with unit='record' or 'site' and no noise of their own (pass seed= to "
    "simulate instead), classifiers or regressors"
)


def _check_learners(given: object, *, persons: bool = False) -> dict[str, Learner]:
    """Return the learners by name, all classifiers or all regressors."""
    learners = _name_all("learner", given)
    require("learner", given, len(learners) > 0, "at least one")
    kinds, unit = (
        {is_classifier(one) for one in learners.values()},
        "person" if persons else "record",
    )
    for name, learner in learners.items():
        facts = learner.get_params(deep=False) if hasattr(learner, "get_params") else {}
        known = {"epsilon", "noise"} <= set(facts) and facts["noise"] is None
        fits = known and facts.get("unit", "record") in (unit, Unit.SITE) and len(kinds) == 1
        require("learner", f"{name}={learner!r}", fits, _LEARNER)
    return learners


def _check_aggregators(given: object, baselines: Collection[str] | None) -> dict[str, Aggregator]:
    """Return the aggregators by name; none at all only if baselines are asked for."""
    aggregators = _name_all("aggregator", given)
    must = "at least one, unless baselines are asked for"
    require("aggregator", given, bool(aggregators or baselines), must)
    for name, made in aggregators.items():
        own = isinstance(made, Aggregator) and getattr(made, "noise", None) is None
        fits = own and name not in TITLES
        require("aggregator", f"{name}={made!r}", fits, "an aggregator without noise of its own")
    return aggregators


def _check_baselines(
    given: Collection[str] | None, aggregators: Mapping[str, Aggregator]
) -> frozenset[str]:
    """Return the baselines to compute: by default all that answer the same question.

    A site alone and private is there if some aggregator takes private members, and the private pool
    if some aggregator hides records rather than whole sites.
    """
    if given is None:
        given, made = set(TITLES), aggregators.values()
        given -= {LOCAL, BEST} if all(one.needs_exact_members for one in made) else set()
        given -= (
            {POOLED}
            if all(one.draws_noise and one.hidden_unit is Unit.SITE for one in made)
            else set()
        )
    require("baselines", given, set(given) <= set(TITLES), f"of {list(TITLES)}")
    return frozenset(given)


def _check_levels(epsilon: Levels | None, n_sites: int) -> dict[str, Array] | None:
    """Return levels of epsilon by name; None leaves each learner its own."""
    if epsilon is None:
        return None
    named = isinstance(epsilon, Mapping)
    listed: Any = epsilon if isinstance(epsilon, list | tuple | Mapping | np.ndarray) else [epsilon]
    levels: dict[str, Array] = {}
    for key in listed:
        level = np.asarray(listed[key] if named else key, dtype=float)
        name = f"{level:g}" if level.ndim == 0 else f"{level.min():g} to {level.max():g}"
        name = str(key) if named else name
        fits = level.shape in ((), (n_sites,)) and bool((level > 0).all()) and name not in levels
        must = f"levels > 0 of different names, each one number or {n_sites}, one per site"
        require("epsilon", epsilon, fits, must)
        levels[name] = level
    require("epsilon", epsilon, len(levels) > 0, "at least one level")
    return levels


def _check_adapting(given: int) -> int:
    fits = given == 0 or is_count(given)
    require("adapt", given, fits, "how many sites adapt the release, 0 or more")
    return given


def _check_metric(given: str | None, learners: Mapping[str, Learner]) -> Metric:
    numeric = _predict_numbers(learners)
    usual = RMSE.name if numeric else ERROR.name
    return find_metric(usual if given is None else given, numeric=numeric)


def _predict_numbers(learners: Mapping[str, Learner]) -> bool:
    """Tell whether the learners are regressors, which all are or none is."""
    return not is_classifier(next(iter(learners.values())))


def _name_all(what: str, given: object) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(name): one for name, one in given.items()}
    listed = list(given) if isinstance(given, list | tuple) else [given]
    named = {type(one).__name__: one for one in listed}
    unique = len(named) == len(listed)
    require(what, given, unique, "a dictionary by name where two are of one kind")
    return named
