"""Why a hub does not publish a release by itself.

One wrong member can spoil a release and still pass every check of single contributions. Public test
records show what came of it, by the one rule of `evaluation.compare`. Each reason is a sentence for
a coordinator, who can publish the release all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from consilience.aggregators.base import Ensemble
from consilience.errors import ConsilienceError
from consilience.evaluation.baselines import MEDIAN_ROW, PUBLIC_ROW, compare_rows, guess
from consilience.evaluation.compare import Gap, Joining, paired_gap
from consilience.evaluation.measures import Evaluation, Predictor, evaluate, main_metric
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.study.study import Study

# Of the error, or of what guessing costs in other units, by any one member: no more than .03 with
# what an honest one in its place would have gained.
MOST_RISE = 0.025
MOST_LEFT_OUT = 16  # members that are left out one by one to see what the others make
FEWEST = 4  # members of which each is left out; of fewer, honest noise decides too much
FEWEST_RECORDS = 500  # that are tested; fewer cannot show so small a rise


@dataclass(frozen=True)
class Candidate:
    """A release that nobody asked for, and what is known when it could be published.

    Parameters
    ----------
    study, release, contributions
        What was combined, into what. Nothing is drawn to judge it, so the study must not draw
        noise.
    far
        What `find_far` says about some members, by site.
    heavy
        What `find_heavy` says about a member, by site. An honest large site is heavy too, so this
        alone is no reason.
    last
        The release that sites have at the moment.
    public, test
        The study's public records.
    unread
        The number of the release that sites have, if it cannot be read.
    """

    study: Study
    release: Release
    contributions: Sequence[Contribution]
    far: Mapping[str, str]
    heavy: Mapping[str, str]
    last: Release | None = None
    public: Public | None = None
    test: Public | None = None
    unread: int | None = None

    def find_reasons(self) -> list[str]:
        """Return every reason not to publish it unasked; none if it may be published."""
        reasons = []
        if self.study.withhold_far and self.far:
            reasons.append("The study wants a decision where a contribution is unlike the others.")
        if self.test is not None and self.test.y is not None:
            reasons += self._find_losses(_Judge(self.test, self.release.ensemble))
        return reasons + [f"{site!r}: {why}" for site, why in self._suspects.items() if reasons]

    @property
    def _suspects(self) -> dict[str, str]:
        """Members of which one is enough to spoil a release."""
        return {**self.heavy, **self.far}

    def _find_losses(self, judge: _Judge) -> Iterator[str]:
        """Say what the test records show the release to be worse than.

        The noise of honest members often makes it a little worse than the last release or than
        without one of them, so this counts only if there is a member whose noise does not explain
        what it is, or if it costs more than `MOST_RISE`: whoever knows what raises an alert can
        stay below it, but cannot hide what comes of it.
        """
        rows = compare_rows(self.release.sealed.facts["quality"])
        gaps = {} if rows is None else dict(rows.gaps)
        rivals = {"a model of the public records alone": gaps.get(PUBLIC_ROW)}
        rivals["always giving the same answer"] = judge.compare(judge.guess)
        if self.far:
            rivals["the median site's own model"] = gaps.get(MEDIAN_ROW)
        if self._suspects and self.last is not None:
            since = judge.compare(self.last.ensemble)
            title = f"release {self.last.sequence}, which sites have"
            rivals[title] = since if self.far or judge.is_costly(since) else None
        if self._suspects and self.unread is not None:
            yield f"Release {self.unread}, which sites have, cannot be read to compare it."
        for title, gap in rivals.items():
            if gap is not None and judge.is_worse(gap):
                metric, joined, other = judge.show(gap)
                shown = f"{metric} {joined} against {other}"
                yield f"On the study's test records it is worse than {title} ({shown})."
        for sites in self._groups(judge):
            model = self._without(sites)
            if model is None:
                continue
            gap = judge.compare(model)
            if judge.is_worse(gap) if set(sites) & set(self.far) else judge.is_costly(gap):
                metric, joined, other = judge.show(gap)
                names = " and ".join(map(repr, sites))
                yield f"Without {names} the {metric} is {other} instead of {joined}."

    def _groups(self, judge: _Judge) -> list[tuple[str, ...]]:
        """Return whom to leave out: each member alone, and all suspects together.

        Of few members, or with few test records, suspects only; of very many, suspects and those
        that the release contradicts most.
        """
        suspects = tuple(self._suspects)
        enough = len(self.contributions) >= FEWEST and judge.n_records >= FEWEST_RECORDS
        others = [one for one in self.contributions if enough and one.site not in suspects]
        if len(suspects) + len(others) > MOST_LEFT_OUT:
            others.sort(key=lambda one: judge.compare(one.learner).other, reverse=True)
        alone = [*suspects, *(one.site for one in others)][:MOST_LEFT_OUT]
        return [(site,) for site in alone] + ([suspects] if len(suspects) > 1 else [])

    def _without(self, sites: Sequence[str]) -> Predictor | None:
        """Return what the others make, or None if they make nothing."""
        kept = [one.learner for one in self.contributions if one.site not in sites]
        try:
            return self.study.build_aggregator().combine(kept, self.public)
        except (ConsilienceError, ArithmeticError, ValueError):
            return None


class _Judge:
    """The test records, and how the release does on them."""

    def __init__(self, test: Public, release: Ensemble) -> None:
        self.test = test
        self.release = self._measure(release)
        self.guess = guess(test.y, numeric=release.classes is None)

    @property
    def n_records(self) -> int:
        """How many test records there are."""
        return int(self.test.X.shape[0])

    def _measure(self, model: Predictor) -> Evaluation:
        found: Evaluation = evaluate(model, self.test.X, self.test.y)
        return found

    def compare(self, model: Predictor) -> Gap:
        """Compare the release with another model, record by record."""
        return paired_gap(self._measure(model), self.release)

    def is_worse(self, gap: Gap) -> bool:
        """Tell whether the release is clearly worse than the other model."""
        return gap.verdict == "worse"

    def is_costly(self, gap: Gap) -> bool:
        """Tell whether the release is clearly worse than the other model, by more than a little."""
        is_share = main_metric(self.release.measures) == "error"
        unit = 1.0 if is_share else self.compare(self.guess).other
        return self.is_worse(gap) and gap.joined - gap.other > MOST_RISE * unit

    def show(self, gap: Gap) -> tuple[str, str, str]:
        """Return the metric, the release's loss and the other's, as a sentence states them."""
        metric = main_metric(self.release.measures)
        show = Joining({}, metric).show
        return metric, show(gap.joined), show(gap.other)
