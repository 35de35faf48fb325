"""What a model achieved on the sites' own records, by a released score: where no public ones exist.

Each number has its 95 % interval, in which are the noise of the counts and that records are a
sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from consilience.errors import SettingsError
from consilience.learners.scored import PrivateAccuracy
from consilience.statistics.label_tables import columns_of
from consilience.statistics.score import Estimate, ScoredModel
from consilience.tables.schema import Categorical, Numeric, Schema
from consilience.text import Quoted

# A heading, paragraphs, and rows of (name, value): a section of a page.
Section = tuple[str, Sequence[str], Sequence[tuple[str, str]]]
# Wider intervals are not shown of single bins: they say nothing.
WIDEST = 0.5


def describe_scores(scored: object, schema: Schema, sites: Sequence[str] = ()) -> list[Section]:
    """Return how well a released model does, or each of its members, on the sites' own records.

    Of a scored model these are its measures, those at each of the `sites` by name and of each
    subgroup, and its calibration by class.
    """
    meaning = (
        "In brackets: 95 % intervals, which include the noise that protects the records and that "
        "these records are a sample."
    )
    own = [getattr(member, "accuracy_", None) for member in getattr(scored, "members", ())]
    if any(one is not None for one in own):
        rows = [
            (Quoted(site), f"accuracy {_show(_estimate(one))}")
            for site, one in zip(sites, own, strict=True)
            if one is not None
        ]
        return [("Each site's own model on its own records", [_TRAINED_ON, meaning], rows)]
    if not isinstance(scored, ScoredModel):
        raise SettingsError(
            f"A {type(scored).__name__} has no scores of sites' own records. Nothing was shown. "
            'Take the release of a study with [statistic] name = "Score", or of WeightedVote with '
            "score_share among the settings of its learner."
        )
    sections: list[Section] = [("On the sites' own records", [meaning], _measures(scored))]
    by_site = [
        (Quoted(site), "; ".join(map(" ".join, _measures(part))))
        for site, part in zip(sites, scored.sites, strict=False)
    ]
    if by_site:
        sections.append(("Site by site", [], by_site))
    for name, group in zip(_name_groups(scored, schema), scored.groups, strict=False):
        sections.append((name, [], _measures(group)))
    labels = scored.classes.tolist()
    said = "The share of records of the class among those to which the model gives the chance"
    if len(labels) > 2:
        said = "The share of records of the class, by its odds against the best of the others"
    for label in labels[1:] if len(labels) == 2 else labels:
        sections.append((f"Calibration of {label}", [f"{said} on the left."], _bins(scored, label)))
    return sections


_TRAINED_ON = (
    "These are the records that the model was trained on: on others it does a little worse, the "
    "more so the fewer records a site has and the larger its epsilon."
)


def _estimate(found: PrivateAccuracy) -> Estimate:
    return Estimate(found.value, math.sqrt(found.variance))


def _measures(scored: ScoredModel) -> list[tuple[str, str]]:
    return [("accuracy", _show(scored.accuracy)), ("AUC", _show(scored.auc))]


def _bins(scored: ScoredModel, label: object) -> list[tuple[str, str]]:
    found = scored.reliability(label)
    half = 0.5 / len(found)
    return [
        (
            f"{100 * (middle - half):.0f} to {100 * (middle + half):.0f} %",
            _show(share, percent=True),
        )
        for middle, share in found
        if share.interval()[1] - share.interval()[0] <= WIDEST
    ]


def _show(found: Estimate, *, percent: bool = False) -> str:
    low, high = found.interval()
    if percent:
        return f"{100 * found.value:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
    return f"{found.value:.3f} ({low:.3f} to {high:.3f})"


def _name_groups(scored: ScoredModel, schema: Schema) -> Iterator[str]:
    """Yield the names of subgroups, in the words of the column that they are of."""
    marks = [list(mark) for mark in scored.subgroups]
    for column, known in zip(schema.columns, columns_of(schema), strict=True):
        if marks and marks == [list(mark) for mark in known]:
            yield from (f"{column.name}: {name}" for name in _bin_names(column, len(marks) + 1))
            return
    yield from (f"subgroup {place}" for place in range(len(marks) + 1))


def _bin_names(column: Numeric | Categorical, n_bins: int) -> list[str]:
    if isinstance(column, Categorical):
        names = ["none of the categories", *map(str, column.categories)]
    elif column.edges:
        names = [f"below {column.edges[0]:g}", *(f"{edge:g} or more" for edge in column.edges)]
    else:
        names = [f"part {place} of {column.low:g} to {column.high:g}" for place in range(1, n_bins)]
    return [*names, "missing"][:n_bins] if len(names) < n_bins else names[:n_bins]
