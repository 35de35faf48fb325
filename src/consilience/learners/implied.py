"""What a learner's settings and public facts imply of everything that it releases.

Events, shapes and sizes are the sender's word until they are recomputed: noise is planned from
public facts alone, so whoever has these can plan it again, and numbers that neither records nor
noise can reach were not trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.privacy.accounting import Event, are_alike

# With which an honest number lies outside one of its bounds; a file has fewer than ten of these.
UNLIKELY = 1e-10
# Relative: what machines, and versions that searched noise scales in another way, differ by.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Extent:
    """What is known of an array after one look at each of its numbers, block by block."""

    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, blocks: Iterable[NDArray[Any]]) -> Extent:
        """Return the extent of all numbers in some blocks."""
        extent = cls()
        for block in blocks:
            extent = extent.include(block)
        return extent

    def include(self, block: NDArray[Any]) -> Extent:
        """Return the extent of these numbers too."""
        if not block.size:
            return self
        with np.errstate(over="ignore"):
            numbers = block.astype(np.float64, copy=False)  # sums of hostile whole numbers overflow
            squares = float(np.square(numbers).sum())
            total = float(numbers.sum())
        low, high = float(numbers.min()), float(numbers.max())
        return Extent(
            min(self.low, low), max(self.high, high), self.total + total, self.squares + squares
        )


@dataclass(frozen=True)
class Bound:
    """What an honest array keeps to: its shape, all its numbers, their sum and their norm."""

    shape: tuple[int, ...]
    low: float = -math.inf
    high: float = math.inf
    norm: float = math.inf
    total: tuple[float, float] = (-math.inf, math.inf)

    def holds(self, extent: Extent) -> bool:
        """Tell whether an array of this extent keeps to it; not a number never does."""
        return (
            self.low <= extent.low
            and extent.high <= self.high
            and math.sqrt(extent.squares) <= self.norm
            and self.total[0] <= extent.total <= self.total[1]
        )


@dataclass(frozen=True)
class Implied:
    """The events of a fit, bounds on the arrays that it releases, and how exactly both are known.

    ``slack`` is the relative difference up to which events count as equal. It is more than rounding
    only where public randomness without a declared seed took part.
    """

    events: Sequence[Event]
    bounds: Mapping[str, Bound]
    slack: float = field(default=ROUNDING)
    # Other events that may stand for these, because both cost the same up to rounding.
    others: Sequence[Sequence[Event]] = ()

    def has_shapes(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Tell whether arrays of these shapes are the ones that are released."""
        return {name: tuple(shape) for name, shape in shapes.items()} == {
            name: bound.shape for name, bound in self.bounds.items()
        }

    def has_events(self, events: Sequence[Event]) -> bool:
        """Tell whether these are the events of the fit."""
        stated = tuple(events)
        planned = [tuple(each) for each in (self.events, *self.others)]
        if stated in planned:  # as a rule: number by number takes many times as long
            return True
        return any(are_alike(stated, each, slack=self.slack) for each in planned)

    def has_numbers(self, extents: Mapping[str, Extent]) -> bool:
        """Tell whether all arrays keep to their bounds; an honest fit's do, but for 1e-9."""
        return all(bound.holds(extents[name]) for name, bound in self.bounds.items())
