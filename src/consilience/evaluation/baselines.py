"""What joining is compared with: the names of the baselines, and how each is made.

`public_only` trains on the public records alone. `assess` measures a release beside everything its
users could have had instead: these are the quality rows that a release carries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from sklearn.dummy import DummyClassifier, DummyRegressor

import consilience.statistics.registry  # noqa: F401  `Total` is among the aggregators
from consilience.aggregators.base import Aggregator
from consilience.aggregators.blend import fit_public
from consilience.aggregators.registry import AGGREGATORS
from consilience.errors import ConsilienceError
from consilience.evaluation.compare import MAJORITY, MEAN, Gap, Joining, paired_gap
from consilience.evaluation.intervals import Measure
from consilience.evaluation.measures import (
    AUC,
    ERROR,
    LOG_LOSS,
    RMSE,
    STATED,
    Evaluation,
    Predictor,
    evaluate,
    main_metric,
    measures,
)
from consilience.learners.base import PrivateLearner
from consilience.tables.public import Public
from consilience.tables.schema import Schema

GUESS = "same-answer"
PUBLIC, LOCAL, BEST, OWN = "public-only", "local-mean", "local-best", "local-exact"
POOLED, EXACT = "pooled-private", "pooled-exact"
TITLES = {
    GUESS: MAJORITY,
    PUBLIC: "public records alone, tuned on them",
    LOCAL: "a site alone, private (mean of sites)",
    BEST: "a site alone, private (best, in hindsight)",
    OWN: "a site alone, exact, kept to itself (mean)",
    POOLED: "all records pooled, private",
    EXACT: "all records pooled, no privacy, same settings",
}
# What a site could do instead of joining. The best site is only known in hindsight, and pooling is
# what sites cannot do, so neither is an alternative.
ALTERNATIVES = {
    LOCAL: "a site alone with the same privacy",
    PUBLIC: "the public records alone",
    OWN: "a site's own exact model, kept to itself",
    GUESS: MAJORITY,
}

# The same in a release, whose rows are public: sites' exact models are unknown there.
PUBLIC_ROW = "public records alone"
MEDIAN_ROW = "one site alone (the median site)"
BEST_ROW = "one site alone (the best on these records)"
BASELINES = (PUBLIC_ROW, MEDIAN_ROW, BEST_ROW, MAJORITY, MEAN)
KINDS = ("study", "baseline", "other")
COMPARED = (ERROR, AUC, LOG_LOSS, RMSE)  # record by record, with the release

MOST_COMPARED = 200  # members; with more, other aggregators are not tried
COMPARING_SECONDS = 10.0

Learner = PrivateLearner[Any, Any]
QualityRow = dict[str, Any]  # method, kind, n_records, level, and measures by name


class Agreement(Protocol):
    """What `assess` asks of a study."""

    @property
    def schema(self) -> Schema:
        """What a record is."""

    @property
    def epsilon_range(self) -> tuple[float, float]:
        """What a site may spend."""

    @property
    def trusted(self) -> bool:
        """Whether sites hand the hub exact learners."""

    @property
    def draws_noise(self) -> bool:
        """Whether combining draws noise."""

    def build(self, epsilon: float) -> Learner:
        """Return the learner of a site."""

    def build_aggregator(self) -> Aggregator:
        """Return the aggregator."""


def guess(y: ArrayLike, *, numeric: bool) -> Predictor:
    """Return what does best on these test labels without looking at a record.

    That is always the most frequent class, with the classes' shares as probabilities, or always the
    mean. A model that is no better has learned nothing.
    """
    made = DummyRegressor() if numeric else DummyClassifier(strategy="prior")
    labels = np.asarray(y)
    model: Predictor = made.fit(np.zeros((len(labels), 1)), labels)
    return model


def public_only(learner: Learner, public: Public) -> Predictor:
    """Train on the public records alone: what anybody can do without joining.

    Linear models take the ridge that cross-validation on the public records favours, exactly as
    `PublicBlend` does, so that joining is not compared with an alternative worse than it need be.
    Other learners are trained as they are; such a one must be exact (``epsilon=math.inf``), and is
    changed and returned fitted.
    """
    assert math.isinf(learner.epsilon)
    learner = learner.without_tuning()
    if learner.is_linear or learner.makes_linear:
        return fit_public(learner, public)
    if getattr(learner, "unit", "record") == "person":  # public records need no cap per person
        learner.set_params(unit="record", records_per_person=None)
    fitted: Predictor = learner.fit(public.X, np.asarray(public.y))
    return fitted


def assess(
    ensemble: Predictor,
    *,
    study: Agreement,
    members: Sequence[Learner],
    public: Public | None,
    test: Public | None,
) -> list[QualityRow]:
    """Measure a release beside the alternatives, all on the study's public test records.

    The first row is the release; the others have a "gain": what the release gains over them,
    compared record by record. Without labelled test records there are no rows.

    Privacy
    -------
    Members are measured only if they are private by themselves: what an exact member does on test
    records is not private. Of sums that a blind hub opened together there are no members.
    """
    if test is None or test.y is None:
        return []
    table = _Table(test, evaluate(ensemble, test.X, test.y))
    title = study.build_aggregator().describe().title
    rows = [table.row(title, "study", table.joined)]
    constant = MEAN if RMSE.name in table.joined.measures else MAJORITY
    rows.append(table.measure(constant, "baseline", guess(test.y, numeric=constant == MEAN)))
    alone = _public_model(study, public)
    if alone is not None:
        rows.append(table.measure(PUBLIC_ROW, "baseline", alone))
    if study.trusted or study.draws_noise or not members:
        return rows
    errors = [next(iter(measures(member, test.X, test.y).values())) for member in members]
    order = np.argsort(errors, kind="stable")
    rows.append(table.measure(MEDIAN_ROW, "baseline", members[order[len(order) // 2]]))
    rows.append(table.measure(BEST_ROW, "baseline", members[order[0]]))
    if len(members) <= MOST_COMPARED:
        others = _build_others(study.schema, members[0], public)
        others.pop(title, None)
        rows += _measure_others(others, members, public, table)
    return rows


def compare_rows(rows: Sequence[Mapping[str, Any]], metric: str | None = None) -> Joining | None:
    """Return the verdict of a release's quality rows, or None if there is none to be had.

    The metric is by default the main one. Releases made before rows had its gain were not compared
    record by record, and no other rule takes its place.
    """
    release = next((row for row in rows if row.get("kind") == "study"), None)
    others = [row for row in rows if row.get("kind") == "baseline" and row["method"] != BEST_ROW]
    if release is None or not others:
        return None
    metric = metric or main_metric(release)
    gain = name_gain(metric)
    if metric not in release or not all({metric, gain} <= row.keys() for row in others):
        return None
    joined = float(release[metric]["value"])
    gaps = {
        str(row["method"]): Gap(float(row[metric]["value"]), joined, Measure(**row[gain]))
        for row in others
    }
    return Joining(gaps, metric)


def name_gain(metric: str) -> str:
    """Return the field of a row that holds what the release gains over it by this metric."""
    return "gain" if metric in (ERROR.name, RMSE.name) else f"{metric}_gain"


class _Table:
    """The test records, and the release's evaluation that all others are compared with."""

    def __init__(self, test: Public, joined: Evaluation) -> None:
        self.test, self.joined = test, joined

    def measure(self, method: str, kind: str, model: Predictor) -> QualityRow:
        found = evaluate(model, self.test.X, self.test.y)
        row = self.row(method, kind, found)
        for metric in COMPARED:
            if metric.name in row and metric.name in self.joined.measures:
                gain = paired_gap(found, self.joined, metric=metric).gain
                if _finite(gain):
                    row[name_gain(metric.name)] = asdict(gain)
        return row

    def row(self, method: str, kind: str, found: Evaluation) -> QualityRow:
        row: QualityRow = {
            "method": method,
            "kind": kind,
            "n_records": found.n_records,
            "level": found.level,
        }
        for metric in STATED:
            if metric.name in found.measures and _finite(found[metric.name]):
                row[metric.name] = asdict(found[metric.name])
        return row


def _finite(measure: Measure) -> bool:
    return all(map(math.isfinite, (measure.value, measure.low, measure.high)))


def _public_model(study: Agreement, public: Public | None) -> Predictor | None:
    """Return the study's learner, exact and tuned, of the public records alone if it can be had."""
    if public is None or public.y is None:
        return None
    try:
        learner = study.build(study.epsilon_range[0]).set_params(epsilon=math.inf, delta=0.0)
        if getattr(learner, "public_size", None) is not None:
            learner.set_params(public_size=len(public.y))
        model: Predictor = public_only(learner, public)
    except (ConsilienceError, ValueError):
        return None
    return model


def _build_others(schema: Schema, member: Learner, public: Public | None) -> dict[str, Aggregator]:
    """Return the aggregators that the study could have named instead, by title."""
    learner, labelled = type(member), public is not None and public.y is not None
    made = [
        cls.for_schema(schema, **settings)
        for cls in AGGREGATORS.values()
        if labelled or not (cls.needs_public or cls.needs_labels)
        for settings in cls.alternatives(learner)
    ]
    settings = member.get_params(deep=False)
    return {
        aggregator.describe().title: aggregator
        for aggregator in made
        if aggregator.problem_with(learner, settings) is None
    }


def _measure_others(
    others: Mapping[str, Aggregator],
    members: Sequence[Learner],
    public: Public | None,
    table: _Table,
) -> list[QualityRow]:
    rows, until = [], time.monotonic() + COMPARING_SECONDS
    for title, aggregator in others.items():
        try:
            if time.monotonic() < until:
                ensemble = aggregator.combine(members, public)
                rows.append(table.measure(title, "other", ensemble))
        except (ConsilienceError, TypeError):
            continue  # it does not apply to these members
    return rows
