"""Advice before training or joining: what accuracy to expect of records, sites and an epsilon.

Nothing here touches a private record, and nothing is charged. `plan` answers in one of two ways:

- For learners whose noise is known in advance (`Advice`): expectations by formula
  (expectation.py), and for every aggregator a *prediction* from the mean and covariance of its
  result and a *bound* on its expected loss that holds for all data (joining.py).
  docs/planning-proofs.md derives both, and benchmarks/planning.md compares them with `simulate`.
- For statistics (`Paying`): which of them will pay, with which noise, among how many sites and for
  whom, by a trial on records drawn from public ones or made up within the schema (paying.py).
- For all others (`Trial`): by training the study's learner on sites drawn from public records
  (trial.py). This needs labelled public records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from consilience.aggregators.base import Aggregator
from consilience.aggregators.registry import AGGREGATORS
from consilience.errors import SettingsError
from consilience.evaluation.measures import LOG_LOSS, find_metric
from consilience.learners.base import PrivateLearner, is_count
from consilience.learners.linear import PrivateLogisticRegression
from consilience.planning.advice import Advice
from consilience.planning.expectation import Planner
from consilience.planning.joining import BASELINES, PREDICTABLE, Way
from consilience.planning.paying import Asked, Paying, run_paying
from consilience.planning.population import Isotropic, Linear, PublicRecords
from consilience.planning.sites import Case, Sites, require
from consilience.planning.trial import Trial, run_trial
from consilience.privacy.mechanisms import Noise
from consilience.progress import Progress
from consilience.statistics.total import Total
from consilience.study.study import Study
from consilience.tables.public import Public

GRID = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # of the asked epsilon: the rows of the table
MOST_ROWS = 7  # of the table over the epsilons that a study allows
Records = Public | tuple[Any, ArrayLike]


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a plan assumes beyond sites and learner; every field is also a keyword of `plan`.

    Parameters
    ----------
    n_features
        Number of encoded features; the study or the public records know it otherwise.
    n_public
        How many public records the hub will have, labelled for the aggregators that need labels;
        by default as many as `public` has.
    curvature, signal
        Without public records: the second derivative of the mean loss, the same in all directions
        (default: that of rows of full length spread evenly over all coordinates), and the root
        mean square of the best model's coordinates.
    target
        The excess loss whose requirements are reported.
    metric
        What ways of joining are sorted and judged by: "log-loss" (the default), or with labelled
        public records "error" or "auc".
    failure
        Probability with which the worst-case bound may fail.
    seed
        Of simulations, which draw around public records only.
    """

    n_features: int | None = None
    n_public: int | None = None
    curvature: float | None = None
    signal: float = 2.0
    target: float = 0.01
    failure: float = 0.05
    seed: int = 0
    metric: str | None = None

    def __post_init__(self) -> None:
        require("target", self.target, self.target > 0, "a number > 0")
        require("failure", self.failure, 0 < self.failure < 1, "a number in (0, 1)")
        require("signal", self.signal, self.signal > 0, "a number > 0")
        fits = self.curvature is None or self.curvature > 0
        require("curvature", self.curvature, fits, "a number > 0, or left out")
        fits = self.n_public is None or is_count(self.n_public)
        require("n_public", self.n_public, fits, "a whole number > 0, or left out")


@dataclass(frozen=True)
class Question:
    """What `plan` was asked, by a study or by keywords."""

    learner: PrivateLearner[Any, Any]
    sites: Sites
    epsilons: tuple[float, ...]  # the rows of the table
    assume: Assumptions
    public: Public | None = None
    aggregators: Mapping[str, Aggregator] | None = None  # None: all that can be predicted
    progress: Progress | None = None
    sums: Study | None = None  # whose statistics are to be tried

    @property
    def n_public(self) -> int | None:
        """Number of public records at the hub."""
        if self.assume.n_public is not None or self.public is None:
            return self.assume.n_public
        return int(np.shape(self.public.X)[0])

    @property
    def labelled(self) -> Public | None:
        """The public records, if they have labels."""
        return None if self.public is None or self.public.y is None else self.public

    def problem(self) -> str | None:
        """Return why no formula applies, or None."""
        learner, name = self.learner, type(self.learner).__name__
        if not learner.has_known_noise:
            return f"the effect of {name}'s noise is not known in advance"
        if learner.projection is not None:
            return f"no formula knows what {name} loses along axes"
        if learner.tuning is not None:
            return f"no formula knows which candidate of {name} a site will choose"
        if len(getattr(learner, "classes", None) or ()) > 2:
            return "formulas are known for two classes"
        if getattr(learner, "mechanism", None) == "matrix":
            return "the 'mechanism' of formulas is 'objective', 'output' or 'generalized'"
        has_public = self.n_public is not None
        for way, aggregator in (self.aggregators or {}).items():
            if not aggregator.is_predictable(learner, public=has_public):
                return f"the aggregator {way!r} must be {PREDICTABLE}"
        return None

    def answer(self) -> Advice | Trial | Paying:
        """Return the advice: by formula if there is one, else by trial."""
        if self.sums is not None:
            return run_paying(
                self.sums, self.public, self._asked(), seed=self.assume.seed, progress=self.progress
            )
        problem = self.problem()
        if problem is None:
            return self._by_formula()
        if self.labelled is None:
            raise SettingsError(
                f"Advice was asked for {self.learner!r}, but {problem}. Nothing was computed. "
                "Give labelled public records to estimate it by training on them, or simulate on "
                "a public table: consilience simulate study.toml --data TABLE."
            )
        return run_trial(
            self.learner,
            next(iter((self.aggregators or {}).items()), None),
            self.labelled,
            sites=self.sites,
            epsilons=self.epsilons,
            seed=self.assume.seed,
            metric=self.assume.metric,
            progress=self.progress,
        )

    def _asked(self) -> Asked:
        assert self.sums is not None
        n_sites = sum(kind.count for kind in self.sites.kinds())
        shares = None if self.sums.blind is None else self.sums.blind.shares
        ends = self.epsilons[0], self.sites.epsilon, self.epsilons[-1]
        if shares is not None and shares > n_sites:
            raise SettingsError(
                f"Study {self.sums.name!r} needs {shares} shares of noise for a whole, and "
                f"{n_sites} sites were planned. Nothing was computed. Plan for more sites."
            )
        return Asked(
            self.sites.n_records, n_sites, self.sites.epsilon, tuple(sorted(set(ends))), shares
        )

    def _by_formula(self) -> Advice:
        learner: Linear = self.learner
        sites, assume = self.sites, self.assume
        source = Noise(seed=assume.seed).open()
        if self.labelled is None:
            fits = is_count(assume.n_features)
            must = "a whole number > 0, or public data must be given"
            require("n_features", assume.n_features, fits, must)
            dimension = int(assume.n_features or 0) + bool(learner.fit_intercept)
            facts: Isotropic | PublicRecords = Isotropic(
                learner, dimension, assume.curvature, assume.signal
            )
        else:
            facts = PublicRecords(learner, self.labelled.X, self.labelled.y, source)
            n_features = len(facts.second_moment) - bool(learner.fit_intercept)
            must = f"{n_features}, as many as the public data has"
            fits = assume.n_features in (None, n_features)
            require("n_features", assume.n_features, fits, must)
        planner = Planner(facts, learner, assume.failure)
        n_records, n_sites = sites.n_records, sites.n_sites
        rows = {
            one: planner.expect(n_records, n_sites, source, epsilon=one) for one in self.epsilons
        }
        alone = (
            planner.expect(n_records, 1, source) if n_sites > 1 else rows[_rounded(sites.epsilon)]
        )
        case = Case(sites.kinds(), self.n_public, sites.asking)
        metric = find_metric(assume.metric or LOG_LOSS.name, numeric=False)
        fits = metric is LOG_LOSS or facts.shows_errors
        require(
            "metric", assume.metric, fits, "log-loss where there are no labelled public records"
        )
        target, ways = float(assume.target), self._ways(case)
        return Advice(tuple(rows.values()), alone, target, planner, case, ways, metric)

    def _ways(self, case: Case) -> dict[str, Way]:
        """Return the baselines and the aggregators to predict, by name; none for a single site."""
        asked = self.aggregators is not None or self.assume.n_public is not None
        if case.n_sites == 1 and not asked:
            return {}
        public = case.n_public is not None
        ways: dict[str, Way] = {
            name: baseline
            for name, baseline in BASELINES.items()
            if baseline.is_predictable(self.learner, public=public)
        }
        if self.aggregators is not None:
            return {**ways, **self.aggregators}
        epsilons = [site.epsilon for site in case.sites]
        for kind in AGGREGATORS.values():
            ways |= kind.planned(self.learner, epsilons, public=public)
        return ways


def plan(
    study: Study | str | PathLike[str] | None = None,
    *,
    n_records: int,
    epsilon: float | None = None,
    n_sites: int | None = None,
    public: Records | None = None,
    progress: Progress | None = None,
    sums: bool = False,
    **more: Any,
) -> Advice | Trial | Paying:
    """Return what to expect, alone and joined, before anyone spends any budget.

    With a study (or the path of its file) the learner, its settings, the aggregator, the number of
    features, delta, neighbours and unit are the study's. Without, keywords say them.

    Parameters
    ----------
    study
        A `Study`, or the path of a study file. The study's public records are used if their file
        is in the same folder as the study file.
    n_records
        Number of records of one site.
    epsilon
        Of one site. By default the largest that the study allows.
    sums
        Try what handing over sums would bring to a study whose sites train models. A study that
        names a statistic is always answered so.
    n_sites
        How many such sites join. By default as many as a release of the study needs, or one.
    public
        Public records, encoded as the sites will encode theirs: (X, y) or a `Public`.
    sizes, epsilons
        Records and epsilon of each site, if they differ: then `n_records` and `epsilon` are those
        of the site that asks, and the sites are counted.
    n_features, n_public, curvature, signal, target, metric, failure, seed
        As in `Assumptions`.
    progress
        Called with (steps done, steps) while models are trained. Without it, a bar is shown if
        standard error is a terminal.
    learner, delta
        Without a study: the class of the learner (default: `PrivateLogisticRegression`), and
        delta. All other keywords are settings of that learner (regularization, mechanism, ...).
    aggregator
        Without a study: one, a list, or a dictionary by name; by default all that can be
        predicted. `Advice.joined` has a prediction and a bound for each.

    Returns
    -------
    Advice, Trial or Paying
        `Advice` is computed by formula. Learners for which there is no formula (trees, regression,
        more than two classes) get a `Trial`: a simulation on sites drawn from the labelled public
        records.

        Statistics get a `Paying`: every statistic that suits the study, with noise at every site
        and shared, for several sizes and numbers of sites, on drawn records.

    Privacy
    -------
    No private record is read and nothing is charged. `public` has no protection at all.

    Examples
    --------
    >>> advice = plan(n_records=20_000, n_features=10, epsilon=1.0)
    >>> advice.at(1.0).excess_loss < advice.at(0.1).excess_loss
    True
    >>> plan(n_records=789, n_features=50, epsilon=1.0, n_sites=10, n_public=200).recommended.name
    'public blend'
    """
    assumed = {f.name: more.pop(f.name) for f in fields(Assumptions) if f.name in more}
    who: dict[str, Any] = {"n_records": n_records, "epsilon": epsilon, "n_sites": n_sites}
    who = {name: value for name, value in who.items() if name == "n_records" or value is not None}
    who |= {name: more.pop(name) for name in ("sizes", "epsilons") if name in more}
    records = public if public is None or isinstance(public, Public) else Public(*public)
    if study is not None:
        if more:
            raise SettingsError(
                f"A plan for a study was asked for with {', '.join(sorted(more))}, which the study "
                "itself decides. Nothing was computed. Leave it out, or change the study."
            )
        question = _ask_study(study, who, assumed, records, sums=sums)
    else:
        fits = not sums
        require("sums", sums, fits, "left out where there is no study")
        require("epsilon", epsilon, epsilon is not None, "given where there is no study")
        question = _ask(Sites(**who), Assumptions(**assumed), records, more)
    return replace(question, progress=progress).answer()


def _ask(
    sites: Sites, assume: Assumptions, public: Public | None, settings: dict[str, Any]
) -> Question:
    """Return the question that keywords ask."""
    aggregators = _name_aggregators(settings.pop("aggregator", None))
    kind = settings.pop("learner", PrivateLogisticRegression)
    learner = kind(epsilon=sites.epsilon, **settings)
    if learner.has_known_noise:
        if learner.neighbours == "add-remove":
            learner.set_params(public_size=sites.n_records)
        learner.check_settings()
    grid = tuple(_rounded(sites.epsilon * factor) for factor in GRID)
    return Question(learner, sites, grid, assume, public, aggregators)


def _ask_study(
    study: Study | str | PathLike[str],
    who: dict[str, Any],
    assumed: dict[str, Any],
    public: Public | None,
    *,
    sums: bool,
) -> Question:
    """Return the question of what a study would bring to those who would join."""
    folder = None
    if not isinstance(study, Study):
        folder, study = Path(study).parent, Study.load(study)
    listed = who.keys() & {"sizes", "epsilons"}
    rule = study.blind
    fewest = study.min_sites if rule is None else rule.shares + rule.spare
    usual = {"n_sites": 1 if listed else fewest, "epsilon": study.epsilon_range[1]}
    sites = Sites(**(usual | who))
    public = _read_public(study, folder) if public is None else public
    assume = Assumptions(**assumed)
    low, high = study.epsilon_range
    if not low <= sites.epsilon <= high:
        raise SettingsError(
            f"Study {study.name!r} lets sites choose an epsilon from {low:.15g} to {high:.15g}. "
            f"Got {sites.epsilon!r} instead. Nothing was computed."
        )
    learner = study.build(sites.epsilon)
    # Where the hub is trusted the sites' models are exact; a site alone would add noise itself.
    learner.set_budget(sites.epsilon, study.delta)
    if learner.has_known_noise and learner.neighbours == "add-remove":
        learner.set_params(public_size=sites.n_records)
    n_rows = MOST_ROWS if high > low else 1
    grid = {_rounded(float(e)) for e in np.geomspace(low, high, n_rows)} | {_rounded(sites.epsilon)}
    if assume.n_features is None:
        assume = replace(assume, n_features=study.schema.n_features)
    return Question(
        learner,
        sites,
        tuple(sorted(grid)),
        assume,
        public,
        {study.aggregator: study.build_aggregator()},
        sums=study if sums or study.aggregator == Total.__name__ else None,
    )


def _read_public(study: Study, folder: Path | None) -> Public | None:
    """Return the study's public records if their file lies in the folder of the study file."""
    if study.public is None or folder is None or not (folder / study.public.file).exists():
        return None
    return study.public.read(study.schema, folder)


def _name_aggregators(
    given: Aggregator | Sequence[Aggregator] | Mapping[str, Aggregator] | None,
) -> Mapping[str, Aggregator] | None:
    """Return the aggregators that were asked for by name; None if none was."""
    if given is None or isinstance(given, Mapping):
        return given
    listed = [given] if isinstance(given, Aggregator) else list(given)
    named = {type(aggregator).__name__: aggregator for aggregator in listed}
    distinct = len(named) == len(listed)
    require("aggregator", given, distinct, "a dictionary by name where two are of one kind")
    return named


def _rounded(epsilon: float) -> float:
    """Return an epsilon without the last bits of rounding, as it is shown and looked up."""
    return float(f"{epsilon:.12g}")
