"""The statistics that studies, files and commands can name, and the aggregator that adds them up.

A statistic is a learner, and `Total` is an aggregator: both are known wherever these are.
"""

from __future__ import annotations

from consilience.aggregators.registry import register as register_aggregator
from consilience.learners.registry import register
from consilience.statistics.gradient_step import GradientStep
from consilience.statistics.label_tables import LabelTables
from consilience.statistics.leaf_counts import LeafCounts
from consilience.statistics.model_sum import ModelSum
from consilience.statistics.moments import Moments, MomentsRegressor
from consilience.statistics.score import Score
from consilience.statistics.summary import NumberSummary, Summary
from consilience.statistics.total import Total
from consilience.statistics.vote_tally import VoteTally

register_aggregator(Total)
for _statistic in (
    Moments,
    MomentsRegressor,
    GradientStep,
    ModelSum,
    LabelTables,
    LeafCounts,
    Score,
    Summary,
    NumberSummary,
    VoteTally,
):
    register(_statistic)
