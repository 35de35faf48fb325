"""Why a hub does not publish a release by itself.

One wrong member can spoil a release and still pass every check of single contributions. Public test
records show what came of it, by the one rule of `evaluation.compare`. Each reason is a sentence for
a coordinator, who can publish the release all the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from consilience.aggregators.base import Ensemble
from consilience.errors import ConsilienceError
from consilience.evaluation.baselines import MEDIAN_ROW, PUBLIC_ROW, compare_rows, guess
from consilience.evaluation.compare import Gap, paired_gap
from consilience.evaluation.measures import (
    AUC,
    ERROR,
    METRICS,
    Evaluation,
    Metric,
    Predictor,
    evaluate,
    main_metric,
    measures,
)
from consilience.files.release import Release
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.study.branches import Part
    from consilience.study.study import Study

# Of the error or of what the AUC falls short of 1, which are shares of records and of pairs of
# them, or of what guessing costs in other units, by any one member: no more than .03 with what an
# honest one in its place would have gained.
MOST_RISE = 0.025
# Test records that this takes. Chance among fewer makes honest members look as if they cost more,
# in inverse proportion to the square root of their number.
ENOUGH_RECORDS = 500
Gaps = Mapping[Metric, Gap]
MOST_LEFT_OUT = 16  # members without which the others are combined, those that cost most
KEPT_GROUPS = 4  # of as many groups of more members, at least; those that cost most
FEWEST = 4  # members of which each is left out; of fewer, honest noise decides too much


def allowed_rise(n_records: int) -> float:
    """Return by how much one member may raise the error of so many test records unasked."""
    return MOST_RISE * math.sqrt(max(1.0, ENOUGH_RECORDS / max(n_records, 1)))


def describe_waiting(study: Study, n_records: int | None = None) -> list[str]:
    """Say when a release of a study waits for a coordinator; `n_records` is that of its tests."""
    waits = ["A release that waits is published only when a coordinator has seen why."]
    if study.withhold_far:
        waits.insert(0, "Every release with a member that is unlike the others waits.")
    if study.test is None or not study.test.labelled:
        none = "The study names no labelled test records, so nobody sees what a wrong site does"
        return [*waits, f"{none} to a release."]
    said = "A release waits if the test records show it to be worse than public records alone"
    said += " or than guessing."
    if study.draws_noise:
        said += " So does one that is clearly worse than the release before it."
    waits.insert(0, said)
    if study.draws_noise or study.is_blind or study.at is not None or study.branches:
        return [*waits, "No single site can be left out to see what it costs."]
    few = math.sqrt(ENOUGH_RECORDS) * MOST_RISE
    costs = f"more than {MOST_RISE:.1%} of the test records"
    if n_records is None:
        costs += f", or {few:.2f} / √n of them if n is below {ENOUGH_RECORDS}"
    elif n_records < ENOUGH_RECORDS:
        costs = f"more than {allowed_rise(n_records):.1%} of the {n_records:,} test records"
        costs += f"; with {ENOUGH_RECORDS} it would be {MOST_RISE:.1%}"
    return [
        *waits,
        f"Of {FEWEST} sites or more it also waits if any one of them costs it {costs}. On other "
        "records a site may cost more, the fewer test records there are.",
    ]


@dataclass(frozen=True)
class Candidate:
    """A release, and what is known when it could be published.

    Parameters
    ----------
    study, release, contributions
        What was combined, into what. Nothing is drawn to judge it: where the study draws noise,
        only the release itself is judged, as anybody who has it could.
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
    contributions: Sequence[Part]
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
        what it is, or if it costs more than `allowed_rise`: whoever knows what raises an alert can
        stay below it, but cannot hide what comes of it. What a member costs needs no interval: it
        can make answers differ on so many records that no interval shows anything.
        """
        rivals = {
            "a model of the public records alone": judge.find_loss(self._gaps(judge, PUBLIC_ROW)),
            "always giving the same answer": judge.find_loss(judge.guessed),
        }
        if self.far:
            gaps = self._gaps(judge, MEDIAN_ROW)
            rivals["the median site's own model"] = judge.find_loss(gaps)
        if (self._suspects or self.study.draws_noise) and self.last is not None:
            gaps = judge.compare(self.last.ensemble)
            title = f"release {self.last.sequence}, which sites have"
            rivals[title] = judge.find_loss(gaps, costly=not self.far)
        if self._suspects and self.unread is not None:
            yield f"Release {self.unread}, which sites have, cannot be read to compare it."
        for title, loss in rivals.items():
            if loss is not None:
                metric, joined, other = loss
                shown = f"{metric} {joined} against {other}"
                yield f"On the study's test records it is worse than {title} ({shown})."
        for sites in self._groups(judge):
            model = self._without(sites)
            if model is None:
                continue
            gaps, is_far = judge.compare(model), bool(set(sites) & set(self.far))
            loss = judge.find_cost(gaps) or (judge.find_loss(gaps) if is_far else None)
            if loss is not None:
                metric, joined, other = loss
                names = " and ".join(map(repr, sites))
                yield f"Without {names} the {metric} is {other} instead of {joined}."

    def _gaps(self, judge: _Judge, method: str) -> Gaps:
        """Return how the release compares with a row of its own table."""
        rows = self.release.sealed.facts["quality"]
        found = {metric: compare_rows(rows, metric.name) for metric in judge.metrics}
        return {
            metric: joining.gaps[method]
            for metric, joining in found.items()
            if joining is not None and method in joining.gaps
        }

    def _groups(self, judge: _Judge) -> list[tuple[str, ...]]:
        """Return whom to leave out: each member alone, and all suspects together.

        Of few members suspects only; of very many, those that cost most.
        """
        # Nobody can leave one out of a total, and what exact members make is no private release.
        one_by_one = self.study.at is None and not self.study.branches
        if self.study.is_blind or self.study.draws_noise or not one_by_one:
            return []
        suspects = list(self._suspects)
        enough = len(self.contributions) >= FEWEST
        others = [one.site for one in self.contributions if enough and one.site not in suspects]
        together = [tuple(suspects)] if len(suspects) > 1 else []
        alone = self._find_costly(judge, suspects) + self._find_costly(judge, others)
        return [(site,) for site in alone] + together

    def _find_costly(self, judge: _Judge, sites: Sequence[str]) -> list[str]:
        """Return the few of some members without which the others do best.

        They are left out in groups, and then those of the worst groups in smaller ones. Whatever
        is estimated from what a member says by itself can be hidden behind others, or by a member
        whose part of a sum says nothing alone. No member knows its group: the release's digest
        decides.
        """

        def shuffled(site: str) -> bytes:
            return hashlib.sha256(f"{self.release.digest} {site}".encode()).digest()

        left = list(sites)
        while len(left) > MOST_LEFT_OUT:
            left.sort(key=shuffled)
            groups = [left[place::MOST_LEFT_OUT] for place in range(MOST_LEFT_OUT)]
            groups.sort(key=lambda group: self._estimate_cost(judge, group), reverse=True)
            kept = max(KEPT_GROUPS, MOST_LEFT_OUT // -(-len(left) // MOST_LEFT_OUT))
            left = [site for group in groups[:kept] for site in group]
        return left

    def _estimate_cost(self, judge: _Judge, sites: Sequence[str]) -> float:
        """Return by how much members make the release worse, in units of what is allowed."""
        model = self._without(sites)
        return np.inf if model is None else judge.estimate_cost(model)

    def _without(self, sites: Sequence[str]) -> Predictor | None:
        """Return what the others make, or None if they make nothing."""
        kept = [one.learner for one in self.contributions if one.site not in sites]
        try:
            return self.study.build_aggregator().combine(kept, self.public)
        except (ConsilienceError, ArithmeticError, ValueError):
            return None


class _Judge:
    """The test records, and how the release does on them by every measure that decides.

    Where few records have the outcome, all errors are near the share of those that have it,
    whatever a model learned, so classifiers are compared by their AUC too.
    """

    def __init__(self, test: Public, release: Ensemble) -> None:
        self.test = test
        self.release = self._measure(release)
        main = METRICS[main_metric(self.release.measures)]
        self.metrics = [main] + [AUC] * (AUC.name in self.release.measures)
        self.guessed = self.compare(guess(test.y, numeric=release.classes is None))
        self._errors_tell = self.guessed[main].verdict == "better"

    def _measure(self, model: Predictor) -> Evaluation:
        # Nothing that is compared here needs a bootstrap.
        found: Evaluation = evaluate(model, self.test.X, self.test.y, resamples=1)
        return found

    def compare(self, model: Predictor) -> Gaps:
        """Compare the release with another model, record by record."""
        found = self._measure(model)
        return {
            metric: paired_gap(found, self.release, metric=metric)
            for metric in self.metrics
            if metric.name in found.measures
        }

    def find_loss(self, gaps: Gaps, *, costly: bool = False) -> tuple[str, str, str] | None:
        """Return a measure by which the release is clearly worse, its own value and the other.

        If it has to be `costly`, it counts only if it is worse by more than a little. So does an
        AUC wherever errors tell that something was learned.
        """
        for metric, gap in gaps.items():
            allowed = costly or (metric is AUC and self._errors_tell)
            least = self._allowed(metric) if allowed else 0.0
            if gap.verdict == "worse" and metric.gain(gap.other, gap.joined) < -least:
                return metric.title, metric.show(gap.joined), metric.show(gap.other)
        return None

    def find_cost(self, gaps: Gaps) -> tuple[str, str, str] | None:
        """Return the same for a measure that the other model betters by more than is allowed."""
        for metric, gap in gaps.items():
            if metric.gain(gap.other, gap.joined) < -self._allowed(metric):
                return metric.title, metric.show(gap.joined), metric.show(gap.other)
        return None

    def estimate_cost(self, model: Predictor) -> float:
        """Return by how much the other model is better, in units of what is allowed."""
        found = measures(model, self.test.X, self.test.y)
        return max(
            metric.gain(self.release[metric.name].value, found[metric.name]) / self._allowed(metric)
            for metric in self.metrics
        )

    def _allowed(self, metric: Metric) -> float:
        n_records = len(np.asarray(self.test.y))
        if metric is AUC:  # hangs on the class that has the fewest
            n_records = 2 * int(np.unique(np.asarray(self.test.y), return_counts=True)[1].min())
        unit = 1.0 if metric in (ERROR, AUC) else max(self.guessed[metric].other, 1e-300)
        return allowed_rise(n_records) * unit
