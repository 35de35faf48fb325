"""consilience: organisations learn one good classifier together without sharing records."""

from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.boosting import SiteBoosting
from consilience.aggregators.distillation.distill import SoftLabelDistillation, VoteDistillation
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.pooling import PooledCounts
from consilience.aggregators.votes import WeightedVote
from consilience.auditing.audit import audit
from consilience.evaluation.measures import evaluate
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.learners.partitions import DaskRows
from consilience.learners.projection import PrivatePCA, PublicPCA, SecondMoment, combine_moments
from consilience.learners.trees.adaboost import PrivateAdaBoostClassifier
from consilience.learners.trees.bins import Bins
from consilience.learners.trees.forest import PrivateForestClassifier, PrivateTreeClassifier
from consilience.learners.tuning import PrivateTuning, choose_on_public
from consilience.planning.plan import plan
from consilience.privacy.guarantee import Budget, Guarantee, compose, compose_disjoint
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise
from consilience.simulation.simulate import simulate
from consilience.tables.chunks import ParquetRows
from consilience.tables.public import Public
from consilience.tables.schema import Categorical, Numeric, Schema

__version__ = "0.1.0"
__all__ = [
    "Average",
    "Bins",
    "Budget",
    "Categorical",
    "DaskRows",
    "FeatureMethod",
    "Guarantee",
    "Ledger",
    "Noise",
    "Numeric",
    "ParquetRows",
    "PooledCounts",
    "PrivateAdaBoostClassifier",
    "PrivateForestClassifier",
    "PrivateLinearSVC",
    "PrivateLogisticRegression",
    "PrivatePCA",
    "PrivateRidge",
    "PrivateTreeClassifier",
    "PrivateTuning",
    "Public",
    "PublicBlend",
    "PublicPCA",
    "Schema",
    "SecondMoment",
    "SiteBoosting",
    "SoftLabelDistillation",
    "VoteDistillation",
    "WeightedVote",
    "audit",
    "choose_on_public",
    "combine_moments",
    "compose",
    "compose_disjoint",
    "evaluate",
    "plan",
    "simulate",
]
