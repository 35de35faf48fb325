"""Why a hub does not publish a release by itself.

One wrong member can spoil a release and still pass every check of single contributions. Public test
records show what came of it, by the one rule of `evaluation.compare`. Each reason is a sentence for
a coordinator, who can publish the release all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sklearn.dummy import DummyClassifier, DummyRegressor

from consilience.aggregators.base import Ensemble
from consilience.errors import ConsilienceError
from consilience.evaluation.baselines import MEDIAN_ROW, PUBLIC_ROW, compare_rows
from consilience.evaluation.compare import Gap, Joining, paired_gap
from consilience.evaluation.measures import Evaluation, Predictor, evaluate, main_metric
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.study.study import Study

MOST_LEFT_OUT = 16  # members that are left out one by one to see what the others make


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
    last
        The release that sites have at the moment.
    public, test
        The study's public records.
    """

    study: Study
    release: Release
    contributions: Sequence[Contribution]
    far: Mapping[str, str]
    last: Release | None = None
    public: Public | None = None
    test: Public | None = None

    def find_reasons(self) -> list[str]:
        """Return every reason not to publish it unasked; none if it may be published."""
        reasons = []
        if self.study.withhold_far and self.far:
            reasons.append("The study wants a decision where a contribution is unlike the others.")
        if self.test is not None and self.test.y is not None:
            reasons += self._find_losses(_Judge(self.test, self.release.ensemble))
        return reasons + [f"{site!r}: {why}" for site, why in self.far.items() if reasons]

    def _find_losses(self, judge: _Judge) -> Iterator[str]:
        """Say what the test records show the release to be worse than.

        The noise of honest members often makes it worse than the last release or than one of them,
        so this counts only if there is a member whose noise does not explain what it is.
        """
        rows = compare_rows(self.release.sealed.facts["quality"])
        gaps = {} if rows is None else dict(rows.gaps)
        rivals = {"a model of the public records alone": gaps.get(PUBLIC_ROW)}
        rivals["always giving the same answer"] = judge.compare(judge.guess)
        if self.far:
            rivals["the median site's own model"] = gaps.get(MEDIAN_ROW)
            if self.last is not None:
                title = f"release {self.last.sequence}, which sites have"
                rivals[title] = judge.compare(self.last.ensemble)
        for title, gap in rivals.items():
            if gap is not None and gap.verdict == "worse":
                metric, joined, other = judge.show(gap)
                shown = f"{metric} {joined} against {other}"
                yield f"On the study's test records it is worse than {title} ({shown})."
        for sites in self._suspects():
            model = self._without(sites)
            gap = None if model is None else judge.compare(model)
            if gap is not None and gap.verdict == "worse":
                metric, joined, other = judge.show(gap)
                names = " and ".join(map(repr, sites))
                yield f"Without {names} the {metric} is {other} instead of {joined}."

    def _suspects(self) -> list[tuple[str, ...]]:
        """Return whom to leave out: each unusual member alone, and all of them together."""
        together = [tuple(self.far)] if len(self.far) > 1 else []
        return [(site,) for site in list(self.far)[:MOST_LEFT_OUT]] + together

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
        # What is right most often without looking at a record.
        guess = DummyRegressor() if release.classes is None else DummyClassifier()
        self.guess: Predictor = guess.fit(test.X, test.y)

    def _measure(self, model: Predictor) -> Evaluation:
        found: Evaluation = evaluate(model, self.test.X, self.test.y)
        return found

    def compare(self, model: Predictor) -> Gap:
        """Compare the release with another model, record by record."""
        return paired_gap(self._measure(model), self.release)

    def show(self, gap: Gap) -> tuple[str, str, str]:
        """Return the metric, the release's loss and the other's, as a sentence states them."""
        metric = main_metric(self.release.measures)
        show = Joining({}, metric).show
        return metric, show(gap.joined), show(gap.other)
