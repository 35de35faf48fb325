"""How good a release is, beside the honest alternatives to joining, on public test records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import numpy as np

from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.boosting import SiteBoosting
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.votes import WeightedVote
from consilience.errors import ConsilienceError
from consilience.evaluation.measures import evaluate, measures
from consilience.files.contribution import Contribution
from consilience.tables.public import Public
from consilience.tables.schema import Schema

MOST_COMPARED = 200  # members; beyond them only the study's own aggregator is measured
COMPARING_SECONDS = 10.0

QualityRow = dict[str, Any]


class Agreement(Protocol):
    """What assessing a release needs to know of its study."""

    @property
    def schema(self) -> Schema:
        """The public facts of the records."""

    @property
    def aggregator(self) -> str:
        """Name of the aggregator."""

    @property
    def aggregator_settings(self) -> Mapping[str, Any]:
        """Its settings."""

    @property
    def epsilon_range(self) -> tuple[float, float]:
        """What sites may choose."""

    @property
    def trusted(self) -> bool:
        """Whether sites hand the hub exact learners."""

    @property
    def draws_noise(self) -> bool:
        """Whether combining draws noise."""

    def build(self, epsilon: float) -> Any:
        """Return the learner that a site trains."""


def assess(
    ensemble: Any,
    *,
    study: Agreement,
    contributions: Sequence[Contribution],
    public: Public | None,
    test: Public | None,
) -> list[QualityRow]:
    """Measure an ensemble on the study's public test records, beside honest alternatives.

    The first row is the ensemble itself. The others are the public records alone, one site alone
    and the aggregators that the study could have named instead. Members are measured only where
    they are private by themselves: how an exact one does on test records is not.
    """
    if test is None or test.y is None:
        return []
    rows = [_measure(_label(study), "study", ensemble, test)]
    if (
        public is not None
        and public.y is not None
        and (alone := _public_only(study, public)) is not None
    ):
        rows.append(_measure("public records alone", "baseline", alone, test))
    if study.trusted or study.draws_noise:
        return rows
    members = [contribution.learner for contribution in contributions]
    errors = [next(iter(measures(member, test.X, test.y).values())) for member in members]
    order = np.argsort(errors, kind="stable")
    for name, place in (
        ("one site alone (the median site)", order[len(order) // 2]),
        ("one site alone (the best on these records)", order[0]),
    ):
        rows.append(_measure(name, "baseline", members[place], test))
    if len(members) <= MOST_COMPARED:
        rows += _measure_others(study, members, public, test)
    return rows


def _measure_others(
    study: Agreement, members: Sequence[Any], public: Public | None, test: Public
) -> list[QualityRow]:
    """Measure the aggregators that the study could have named instead."""
    classes: Mapping[str, Any] = (
        {} if study.schema.classes is None else {"classes": list(study.schema.classes)}
    )
    ways: dict[str, Callable[[], Any]] = {}
    if hasattr(members[0], "coef_"):
        ways |= {
            f"Average ({by})": partial(Average, by, **classes)
            for by in ("equal", "size", "precision")
        }
        if public is not None and public.y is not None:
            ways |= {
                kind.__name__: partial(kind, **classes)
                for kind in (PublicBlend, FeatureMethod, SiteBoosting)
            }
    else:
        ways |= {
            f"WeightedVote ({by})": partial(WeightedVote, by, **classes)
            for by in ("equal", "size-epsilon")
        }
    ways.pop(_label(study), None)
    rows, until = [], time.monotonic() + COMPARING_SECONDS
    for name, make in ways.items():
        try:
            if time.monotonic() < until:
                rows.append(_measure(name, "other", make().combine(members, public), test))
        except (ConsilienceError, TypeError):
            continue  # it does not apply to these members
    return rows


def _label(study: Agreement) -> str:
    settings = study.aggregator_settings
    by = settings.get(
        "weights", {"Average": "precision", "WeightedVote": "size-epsilon"}.get(study.aggregator)
    )
    return f"{study.aggregator} ({by})" if by else study.aggregator


def _public_only(study: Agreement, public: Public) -> Any:
    """Train the study's learner on the public records alone, without noise: nobody has to join for that."""
    try:
        learner = study.build(study.epsilon_range[0]).set_params(epsilon=math.inf, delta=0.0)
        return learner.fit(public.X, public.y)
    except (ConsilienceError, ValueError):
        return None


def _measure(method: str, kind: str, model: Any, test: Public) -> QualityRow:
    found = evaluate(model, test.X, test.y if test.y is not None else [])
    row: QualityRow = {
        "method": method,
        "kind": kind,
        "n_records": found.n_records,
        "level": found.level,
    }
    for name in ("error", "auc", "rmse", "r2"):
        if name in found.measures and all(map(math.isfinite, asdict(found[name]).values())):
            row[name] = asdict(found[name])
    return row
