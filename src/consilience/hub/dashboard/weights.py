"""What each site counts for in a release."""

from __future__ import annotations

import math
from dataclasses import dataclass

from consilience.files.release import Release
from consilience.hub.dashboard import charts
from consilience.hub.dashboard.queries import Paged
from consilience.privacy.guarantee import Guarantee


@dataclass(frozen=True)
class Weights(Paged):
    """A page of a release's sources, and what all weights add up to."""

    whole: float = 1.0


def list_weights(release: Release, page: int, size: int) -> Weights:
    """Return a page of a release's sources, largest weight first."""
    rows = sorted(release.sealed.facts["sources"], key=lambda row: -abs(row["weight"]))
    largest = max((abs(row["weight"]) for row in rows), default=1.0) or 1.0
    page = min(max(1, page), max(1, -(-len(rows) // size)))
    shown = [
        {
            **row,
            "bar": charts.draw_bar(abs(row["weight"]) / largest, negative=row["weight"] < 0),
            "promised": Guarantee.from_dict(dict(row["guarantee"])),
        }
        for row in rows[(page - 1) * size : page * size]
    ]
    return Weights(shown, page, size, len(rows), math.fsum(row["weight"] for row in rows))
