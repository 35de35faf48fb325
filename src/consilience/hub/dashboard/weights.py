"""What each site counts for in a release."""

from __future__ import annotations

import math
from dataclasses import dataclass

from consilience.files.release import Release
from consilience.hub.dashboard import charts
from consilience.hub.dashboard.queries import Paged
from consilience.privacy.guarantee import Guarantee
from consilience.study.study import Study

WEIGHING = {
    "equal": "Every member counts the same.",
    "size": "A member counts in proportion to the number of records it was trained on.",
    "precision": "A member counts for more the less noise it carries: more records or a larger epsilon mean less.",
    "size-epsilon": "A member counts for more the more records it was trained on and the larger its epsilon.",
    "accuracy-size": "A member counts for more the better it does on the public records and the more records it has.",
}
BY_METHOD = {
    "PublicBlend": "Members are averaged by their precision; the public records then decide how far the average is "
    "followed.",
    "FeatureMethod": "Weights are learned on the public records: a member gets what its predictions add to the "
    "others', which can be nothing, or less than nothing.",
    "SiteBoosting": "Members are added one by one, each for what it corrects on the public records.",
    "PooledCounts": "The counts of all members are added up; a member's share is that of its counts.",
    "SoftLabelDistillation": "Every member votes once on each public record; the release learns the noisy mean vote.",
    "VoteDistillation": "Every member votes once on each public record; the release learns the noisy majority.",
}


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
            "bar": charts.bar(abs(row["weight"]) / largest, negative=row["weight"] < 0),
            "promised": Guarantee.from_dict(dict(row["guarantee"])),
        }
        for row in rows[(page - 1) * size : page * size]
    ]
    return Weights(shown, page, size, len(rows), math.fsum(row["weight"] for row in rows))


def describe_weighing(study: Study) -> str:
    """Say by what rule a study's aggregator weighs its members."""
    usual = {"Average": "precision", "WeightedVote": "size-epsilon"}.get(study.aggregator)
    by = study.aggregator_settings.get("weights", usual)
    return WEIGHING.get(str(by)) or BY_METHOD.get(study.aggregator, "")
