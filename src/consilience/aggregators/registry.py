"""All aggregators and ensembles by name.

`register` adds an aggregator, and every part of the package then knows it. An ensemble class with a
`kind` is known as soon as it is defined.
"""

from __future__ import annotations

from typing import TypeVar

from consilience.aggregators.average import Average
from consilience.aggregators.base import ENSEMBLES, Aggregator
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.boosting import SiteBoosting
from consilience.aggregators.distillation.distill import SoftLabelDistillation, VoteDistillation
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.pooling import PooledCounts
from consilience.aggregators.votes import WeightedVote
from consilience.errors import SettingsError

__all__ = ["AGGREGATORS", "ENSEMBLES", "from_shorthand", "register", "shorthands"]

AggregatorT = TypeVar("AggregatorT", bound=Aggregator)

AGGREGATORS: dict[str, type[Aggregator]] = {}


def register(cls: type[AggregatorT]) -> type[AggregatorT]:
    """Add an aggregator under its class name; can be used as a class decorator."""
    if AGGREGATORS.setdefault(cls.__name__, cls) is not cls:
        raise SettingsError(
            f"An aggregator of the name {cls.__name__!r} is registered already. Nothing was "
            "changed. Choose another class name."
        )
    return cls


def shorthands() -> dict[str, type[Aggregator]]:
    """Return the names that the command line takes, each with its aggregator."""
    return {name: cls for cls in AGGREGATORS.values() for name in cls.shorthands}


def from_shorthand(name: str) -> Aggregator:
    """Return the aggregator of a command-line name, or of a class name with default settings."""
    cls = shorthands().get(name) or AGGREGATORS.get(name)
    if cls is None:
        raise SettingsError(
            f"There is no aggregator {name!r}. Nothing was done. Use one of "
            f"{', '.join(shorthands())}, or a class name: {', '.join(AGGREGATORS)}."
        )
    return cls(**cls.shorthands.get(name, {}))


for _cls in (
    Average,
    PublicBlend,
    FeatureMethod,
    SiteBoosting,
    WeightedVote,
    PooledCounts,
    SoftLabelDistillation,
    VoteDistillation,
):
    register(_cls)
