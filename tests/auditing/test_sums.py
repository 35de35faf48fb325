"""The exact attack on statistics comes close to what is claimed, and catches broken twins."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from consilience.auditing.audit import audit
from consilience.auditing.sums import find_farthest
from consilience.learners import gradient
from consilience.learners.ball import out_of_ball
from consilience.learners.trees.bins import Bins
from consilience.privacy.accounting import gaussian_log_delta
from consilience.privacy.guarantee import Neighbours
from consilience.statistics import moments
from consilience.statistics import summary as summaries
from consilience.statistics.base import Sharing, SumPlan
from consilience.statistics.leaf_counts import LeafCounts
from consilience.statistics.model_sum import AddModel, ModelSum
from consilience.statistics.moments import Moments
from consilience.statistics.score import Score
from consilience.statistics.summary import NumberSummary, Summary
from consilience.statistics.vote_tally import AddVotes, VoteTally, unpack_rows, whiten
from sums import ASKED, HIDING_RECORDS, STATISTICS, WHOLE, make

PERSONS = {"unit": "person", "records_per_person": 3}
BOTH = ["replace-one", "add-remove"]


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("neighbours", BOTH)
def test_the_farthest_records_show_nearly_all_that_is_claimed(statistic, neighbours):
    report = audit(make(statistic, neighbours=neighbours), runs=200)
    assert report.passed, report
    assert report.attack == "the noisy sum"
    assert report.epsilon_lower >= 0.95 * report.claimed.epsilon


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("neighbours", BOTH)
def test_a_person_shows_no_more_than_is_claimed(statistic, neighbours):
    report = audit(make(statistic, neighbours=neighbours, **PERSONS), runs=0)
    assert report.passed, report
    assert report.epsilon_lower >= 0.65 * report.claimed.epsilon


@dataclass(eq=False, repr=False, kw_only=True)
class OneRecordForTwo(Moments):
    """The distance of two records is taken for the length of one."""

    def reach(self, neighbours):
        return super().reach(Neighbours.ADD_REMOVE)


@dataclass(eq=False, repr=False, kw_only=True)
class Scaled(Moments):
    """Records are scaled up, as a site with a larger budget might, and their clip is not."""

    def adder(self):
        add = super().adder()
        return lambda chunks: 2 * add(chunks)


@dataclass(eq=False, repr=False, kw_only=True)
class UnclippedPersons(Moments):
    """A person's records are added up as if they were of different persons."""

    def _add_persons(self, task):
        return task.gather(self.adder())


@dataclass(eq=False, repr=False, kw_only=True)
class TooLittleNoise(Moments):
    """Less noise is drawn than the event states."""

    def _train(self, task, plan, source):
        less = replace(plan.event, sigma=plan.event.sigma / 2, narrowest=plan.event.narrowest / 2)
        super()._train(task, SumPlan(less), source)


@pytest.mark.parametrize("twin", [OneRecordForTwo, Scaled, TooLittleNoise])
def test_a_broken_twin_is_caught(twin):
    assert not audit(twin(epsilon=1.0, delta=1e-6, classes=[0, 1]), runs=200).passed


def test_a_twin_that_does_not_clip_persons_is_caught():
    twin = UnclippedPersons(epsilon=1.0, delta=1e-6, classes=[0, 1], **PERSONS)
    assert not audit(twin, runs=0).passed


# ------------------------------------------------------------------------------- shares of noise


def shared(kind, *, epsilon=1.0, shares=4, most=3.0, **settings):
    """Return a statistic whose noise is one of so many shares, at a site that may ask for less."""
    made = kind(epsilon=epsilon, delta=1e-6, classes=[0, 1], **settings)
    made.sharing = Sharing(shares, most, 256)
    made.n_features_in_, made.classes_ = 2, np.array([0, 1])
    return made


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("neighbours", BOTH)
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_a_share_alone_shows_nearly_all_that_is_claimed(statistic, neighbours, epsilon):
    """The sum with the noise of all others known, k - 1 honest ones among them: (b)."""
    twin = make(statistic, neighbours=neighbours, epsilon=epsilon)
    one_epsilon = statistic.kind in (Summary, NumberSummary)  # whose records all count alike
    twin.sharing = Sharing(4, epsilon, 1) if one_epsilon else Sharing(4, 3.0, 256)
    report = audit(twin, runs=200)
    assert report.passed, report
    assert report.claimed.epsilon > 1.5 * epsilon
    assert report.epsilon_lower >= 0.94 * report.claimed.epsilon


@pytest.mark.parametrize("honest", [1, 2, 3, 4])
def test_what_is_claimed_for_so_many_honest_sites_is_what_an_attack_finds(honest):
    twin = shared(Moments)
    event = replace(twin.plan_noise().event, honest=honest)
    found = find_farthest(twin, event).mu
    claimed = event.epsilon
    assert gaussian_log_delta(claimed, found) <= math.log(1e-6)
    assert gaussian_log_delta(0.95 * claimed, found) > math.log(1e-6)


def test_counting_on_more_sites_than_are_honest_is_caught():
    """k = N: one curious site among them knows its own share, and (a) does not hold any more."""
    twin = shared(Moments, epsilon=3.0)
    event = twin.plan_noise().event
    found = find_farthest(twin, replace(event, honest=event.shares - 1)).mu
    assert gaussian_log_delta(event.epsilon, found) > math.log(1e-6)


@dataclass(eq=False, repr=False, kw_only=True)
class UnscaledClip(Moments):
    """A site that asks for less than others forgets to scale its records."""

    def scaled_total(self, task):
        return self.sharing.steps * self.exact_total(task)


@dataclass(eq=False, repr=False, kw_only=True)
class RoundedUp(Moments):
    """Records are scaled by the next part above, and not below."""

    @property
    def _parts(self):
        return super()._parts + 1

    @property
    def scale(self):
        return (self._parts - 1) / self.sharing.steps


@dataclass(eq=False, repr=False, kw_only=True)
class NoShare(Moments):
    """A site relies on the noise of the others and adds none."""

    def _train(self, task, plan, source):
        self.total_ = self.scaled_total(task)


@pytest.mark.parametrize("twin", [UnscaledClip, NoShare, RoundedUp])
def test_a_broken_share_is_caught(twin):
    assert audit(shared(Moments, epsilon=0.5), runs=200).passed
    assert not audit(shared(twin, epsilon=0.5), runs=200).passed


def test_rounding_away_from_zero_is_caught(monkeypatch):
    """On a coarse grid, where one step is much: the honest rounding passes there as well."""
    monkeypatch.setattr(gradient, "ROW_BITS", 2)
    monkeypatch.setattr(moments, "ROW_BITS", 2)
    monkeypatch.setattr(Moments, "grain", 4.0**-2)
    settings = {"epsilon": 0.05, "delta": 1e-6, "classes": [0, 1], "neighbours": "add-remove"}
    assert audit(Moments(**settings), runs=0).passed

    def away(X):
        return np.sign(X) * np.ceil(np.abs(X) * 4.0)

    monkeypatch.setattr(moments, "whole_rows", away)
    assert not audit(Moments(**settings), runs=0).passed


TWO_COLUMNS = [[[[0, 0.0]], [0, 1.0], []], [[[0, 0.5]], [], []]]
LABEL = [[[[0, 0.0]], [0, 1.0], []], [[[2, 0.0]], [2, 1.0], []]]  # of tables of two features
HIGH = {"epsilon": 1.0, "delta": 1e-6}


@dataclass(eq=False, repr=False, kw_only=True)
class ColumnsForOne(Summary):
    """What all columns cost together is taken for what one of them costs."""

    def reach(self, neighbours):
        return super().reach(neighbours) / len(self.columns) ** 0.5


@dataclass(eq=False, repr=False, kw_only=True)
class LightSquares(NumberSummary):
    """Squares weigh less than values, and the formula is that for squares that weigh as much.

    Both ends of a column are then farther apart than it says.
    """

    def weights(self):
        weights = super().weights()
        for place in (2, 6):
            weights[place : place + 2] = (1.0, 0.0001)
        return weights


def test_twins_of_a_summary_are_caught():
    assert audit(Summary(classes=[0, 1], columns=TWO_COLUMNS, **HIGH), runs=50).passed
    assert audit(NumberSummary(label_bound=1.0, columns=LABEL, **HIGH), runs=50).passed
    twins = [
        ColumnsForOne(classes=[0, 1], columns=TWO_COLUMNS, **HIGH),
        LightSquares(label_bound=1.0, columns=LABEL, **HIGH),
    ]
    for twin in twins:
        assert not audit(twin, runs=0).passed, twin


def test_a_summary_that_does_not_clip_values_is_caught(monkeypatch):
    monkeypatch.setattr(summaries, "clip_values", lambda values: np.clip(values, -50.0, 50.0))
    assert not audit(Summary(classes=[0, 1], columns=TWO_COLUMNS, **HIGH), runs=0).passed


@dataclass(eq=False, repr=False, kw_only=True)
class OneTreeForAll(LeafCounts):
    """A record is taken to be in one tree, and is counted in all of them."""

    def reach(self, neighbours):
        return super().reach(neighbours) / self.n_trees**0.5


def test_a_twin_that_pays_for_one_tree_of_many_is_caught():
    bins = Bins.even(-1, 1, n_features=2, n_bins=4)
    settings = {"classes": [0, 1], "bins": bins, "n_trees": 5, "max_depth": 2, **HIGH}
    assert audit(LeafCounts(**settings), runs=50).passed
    assert not audit(OneTreeForAll(**settings), runs=0).passed


@pytest.mark.parametrize("statistic", HIDING_RECORDS)
def test_a_model_among_many_records_shows_nearly_all_that_is_claimed(statistic):
    report = audit(make(statistic), runs=50)
    assert report.passed, report
    assert report.epsilon_lower >= 0.88 * report.claimed.epsilon


class FixedRidge(AddModel):
    """The ridge does not grow with the records, as the factor before the model does."""

    def train(self, records, y, n_records):
        fixed = AddModel(self.ball, self.n_classes, self.ridge / n_records)
        return fixed.train(records, y, n_records)


@dataclass(eq=False, repr=False, kw_only=True)
class StableAsOneRecord(ModelSum):
    """n·w is claimed to move as w does with a ridge that does not grow."""

    def adder(self):
        return FixedRidge(**vars(super().adder()))


@dataclass(eq=False, repr=False, kw_only=True)
class AddedForReplaced(ModelSum):
    """What a record adds is taken for the distance of two."""

    def reach(self, neighbours):
        return super().reach(Neighbours.ADD_REMOVE)


@pytest.mark.parametrize("twin", [StableAsOneRecord, AddedForReplaced])
def test_twins_of_a_model_are_caught(twin):
    assert not audit(twin(classes=[0, 1], regularization=1e-3, **HIGH), runs=0).passed


@dataclass(eq=False, repr=False, kw_only=True)
class OneClassForAll(Score):
    """A record is counted in a table for each class, and one of them is paid for."""

    def reach(self, neighbours):
        return super().reach(neighbours) / len(self.model) ** 0.5


def test_a_score_that_pays_for_one_class_of_three_is_caught():
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]
    settings = {"classes": [0, 1, 2], "model": rows, "subgroups": [[0, 0.0]], **HIGH}
    assert audit(Score(**settings), runs=50).passed
    assert not audit(OneClassForAll(**settings), runs=0).passed


@dataclass(eq=False, repr=False, kw_only=True)
class Multiplied(ModelSum):
    """n·w is handed over where n is hidden, and what w moves is paid for."""

    def adder(self):
        return replace(super().adder(), counts_records=True)


@dataclass(eq=False, repr=False, kw_only=True)
class HeavierRidge(ModelSum):
    """What is paid for is a ridge ten times as heavy as the one that is trained with."""

    def reach(self, neighbours):
        return super().reach(neighbours) / 10


@pytest.mark.parametrize("twin", [Multiplied, HeavierRidge])
def test_twins_of_a_model_whose_number_of_records_is_hidden_are_caught(twin):
    settings = {"classes": [0, 1], "neighbours": "add-remove", "regularization": 1.0, **HIGH}
    assert audit(ModelSum(**settings), runs=0).passed
    assert not audit(twin(**settings), runs=0).passed


# ------------------------------------------------------------------------------- whole sites


@pytest.mark.parametrize("statistic", WHOLE)
def test_whole_sites_show_nearly_all_that_is_claimed(statistic):
    report = audit(make(statistic), runs=100)
    assert report.passed, report
    assert report.epsilon_lower >= 0.98 * report.claimed.epsilon


@pytest.mark.parametrize("statistic", WHOLE)
def test_a_share_alone_of_a_whole_site_shows_nearly_all_that_is_claimed(statistic):
    twin = make(statistic)
    twin.sharing = Sharing(4, 3.0, 256)
    report = audit(twin, runs=100)
    assert report.passed, report
    assert report.claimed.epsilon > 1.5
    assert report.epsilon_lower >= 0.94 * report.claimed.epsilon


@dataclass(eq=False, repr=False, kw_only=True)
class SplitForReplaced(VoteTally):
    """What a site's votes differ from an even split is taken for what two sites' votes differ."""

    def reach(self, neighbours):
        return super().reach(Neighbours.ADD_REMOVE)


@dataclass(eq=False, repr=False, kw_only=True)
class OneRecordOfMany(VoteTally):
    """A site is taken to move its vote on a single public record."""

    def reach(self, neighbours):
        return super().reach(neighbours) / len(self._asked.Y)


class Louder(AddVotes):
    """A site says the same twice as loud: more than one vote."""

    def count(self, coef):
        return 2 * super().count(coef)


@dataclass(eq=False, repr=False, kw_only=True)
class TwoVotes(VoteTally):
    """A site has two votes and pays for one."""

    def adder(self):
        return Louder(**vars(super().adder()))


class Scores(AddVotes):
    """What a model says is its score, however large, and not a share of one vote."""

    def count(self, coef):
        X = unpack_rows(self.records) * 2.0**-15
        weights, offset = out_of_ball(coef, self.ball)
        Y = whiten(self.records, self.ball.intercept_scaling).Y
        part = (X @ weights.T + offset).T @ Y / len(Y) / math.sqrt(2)
        return np.trunc(part.ravel() * 2.0**30).astype(np.int64)


@dataclass(eq=False, repr=False, kw_only=True)
class SureSites(VoteTally):
    """A site counts for more the surer it is."""

    def adder(self):
        return Scores(**vars(super().adder()))


@pytest.mark.parametrize("twin", [SplitForReplaced, OneRecordOfMany, TwoVotes, SureSites])
def test_twins_of_votes_are_caught(twin):
    settings = {"classes": [0, 1], "records": ASKED, "regularization": 1e-4, **HIGH}
    assert audit(VoteTally(**settings), runs=0).passed
    assert not audit(twin(**settings), runs=0).passed


@dataclass(eq=False, repr=False, kw_only=True)
class OneLengthForTwo(ModelSum):
    """The length of one model is taken for the distance of two."""

    def reach(self, neighbours):
        return super().reach(Neighbours.ADD_REMOVE)


@dataclass(eq=False, repr=False, kw_only=True)
class NotCut(ModelSum):
    """A model is longer than what is paid for."""

    def adder(self):
        return replace(super().adder(), longest=None)


@pytest.mark.parametrize("twin", [OneLengthForTwo, NotCut])
def test_twins_of_a_cut_model_are_caught(twin):
    settings = {"classes": [0, 1], "unit": "site", "max_norm": 2.0, "regularization": 1e-3, **HIGH}
    assert audit(ModelSum(**settings), runs=0).passed
    assert not audit(twin(**settings), runs=0).passed
