"""Attack a learner's privacy and report the largest epsilon that an attack could prove.

An audit shows that a guarantee is false, or that a search for its failure found nothing; it never
shows that a guarantee is true (the proofs are in docs/guarantees/). There are three attacks, each
of which finds real failures in tests/test_mutations.py:

* ``"exact"`` (exact.py) maximises the privacy loss of linear learners and of statistics over pairs
  of neighbouring data sets, from the density of what is released;
* ``"sample"`` (sampled.py, trees.py) trains many times on two neighbours and bounds epsilon by
  Clopper-Pearson;
* of a choice among candidates (choice.py) each training is attacked as such, and the choice by its
  density;
* `audit_samples` and the ``check_`` functions (checks.py) do the same for draws of a single
  mechanism.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Literal

from threadpoolctl import threadpool_limits

import consilience.auditing.trees  # noqa: F401  registers the attack on trees
from consilience.auditing.attacked import Learner
from consilience.auditing.choice import attack_choice
from consilience.auditing.exact import Search, attack_exactly
from consilience.auditing.report import AuditReport
from consilience.auditing.sampled import attack_by_sampling
from consilience.errors import RecordsWarning, SettingsError
from consilience.learners.base import PrivateLearner
from consilience.learners.tuned import Tuned
from consilience.privacy.mechanisms import Noise, Source
from consilience.statistics.base import Statistic
from consilience.study.study import Study

Kind = Literal["exact", "sample"]


def audit(
    learner: Study | str | PathLike[str] | Learner,
    *,
    kind: Kind | None = None,
    epsilon: float | None = None,
    n_records: int = 100,
    noise: Noise | None = None,
    **effort: int,
) -> AuditReport:
    """Attack a study's learner, or any learner, and report the largest epsilon found.

    The attack runs on small made-up data sets; nobody's records are needed.

    Parameters
    ----------
    learner
        A `Study`, the path of a study file, or a private learner. A copy is attacked, with its own
        settings.
    kind
        ``"exact"`` for linear learners and statistics, ``"sample"`` for any; by default the exact
        attack where it applies.
    epsilon
        Of a study: the epsilon that is attacked, by default the largest that it allows, which is
        its weakest promise. A learner has its own.
    n_records
        Public number of records (of persons, for ``unit="person"``) of the attacked data sets.
    noise
        ``Noise(seed=...)`` makes a run repeatable; the default is real noise.
    n_features, restarts, runs, random_state
        How hard the attack tries: see `consilience.auditing.exact.Search`.

    Examples
    --------
    >>> from consilience.learners.linear import PrivateLogisticRegression
    >>> audit(PrivateLogisticRegression(epsilon=1.0), restarts=2, runs=50).passed
    True
    """
    begun = time.perf_counter()
    if kind not in (None, "exact", "sample"):
        raise SettingsError(
            f"The 'kind' parameter of audit must be 'exact' or 'sample'. Got {kind!r} instead."
        )
    # The count of a score is private given the model: docs/guarantees/integration.md.
    attacked = _find_learner(learner, epsilon).without_score()
    if kind == "exact" and not _has_density(attacked):
        raise SettingsError(
            "kind='exact' attacks linear learners and statistics. Nothing was trained. Use "
            "kind='sample'."
        )
    search = Search(**effort)
    source = (Noise() if noise is None else noise).open()
    # The problems are many and tiny: threads would only wait for each other.
    with threadpool_limits(limits=1, user_api="blas"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordsWarning)  # worst cases lie beyond every bound
        attack = partial(_attack, kind=kind, n_records=n_records, search=search, source=source)
        if isinstance(attacked, Tuned):
            size = max(2, attacked.tuning.part_of(n_records))
            attack = partial(attack, n_records=size)
            runs = 400 if search.runs is None else search.runs
            report = attack_choice(attacked, attack, runs, source)
        else:
            report = attack(attacked)
    return replace(report, seconds=time.perf_counter() - begun)


def _has_density(learner: Learner) -> bool:
    return learner.is_linear or isinstance(learner, Statistic)


def _attack(
    learner: Learner, *, kind: Kind | None, n_records: int, search: Search, source: Source
) -> AuditReport:
    if kind == "sample" or not _has_density(learner):
        return attack_by_sampling(learner, n_records, search.runs, source)
    return attack_exactly(learner, n_records, search, source)


def _find_learner(subject: Study | str | PathLike[str] | Learner, epsilon: float | None) -> Learner:
    """Return the learner to attack."""
    if isinstance(subject, PrivateLearner):
        if epsilon is not None:
            raise SettingsError(
                "The 'epsilon' parameter of audit is for studies; a learner has its own. Nothing "
                "was attacked. Leave it out, or set the learner's epsilon."
            )
        return subject
    if not isinstance(subject, Study | str | PathLike):
        raise SettingsError(
            "An audit attacks a study or a private learner. Got a "
            f"{type(subject).__name__} instead. Nothing was attacked."
        )
    study = subject if isinstance(subject, Study) else Study.load(subject)
    if study.trusted:
        raise SettingsError(
            f"Study {study.name!r} has a trusted hub: its sites hand over exact models, which "
            "promise nothing by themselves, and the aggregator adds the noise. Nothing was "
            "attacked. The audits of aggregators are listed in docs/guarantees/audit.md."
        )
    low, high = study.epsilon_range
    chosen = high if epsilon is None else epsilon
    if not low <= chosen <= high:
        raise SettingsError(
            f"Study {study.name!r} lets sites choose an epsilon from {low:.15g} to {high:.15g}. "
            f"Got {epsilon!r} instead. Nothing was attacked."
        )
    learner: Learner = study.build(chosen)
    return learner
