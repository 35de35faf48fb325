"""consilience: organisations learn one good classifier together without sharing records.

Every public name is loaded from its module on first use, so importing the package costs next to
nothing: see docs/decisions/0010-lazy-exports.md. To export a name, add it to both lists below.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what type checkers and editors read
    from consilience.aggregators.average import Average as Average
    from consilience.aggregators.blend import PublicBlend as PublicBlend
    from consilience.aggregators.boosting import SiteBoosting as SiteBoosting
    from consilience.aggregators.distillation.distill import (
        SoftLabelDistillation as SoftLabelDistillation,
    )
    from consilience.aggregators.distillation.distill import VoteDistillation as VoteDistillation
    from consilience.aggregators.feature import FeatureMethod as FeatureMethod
    from consilience.aggregators.pooling import PooledCounts as PooledCounts
    from consilience.aggregators.votes import WeightedVote as WeightedVote
    from consilience.auditing.audit import audit as audit
    from consilience.errors import BudgetExceeded as BudgetExceeded
    from consilience.errors import ConsilienceError as ConsilienceError
    from consilience.errors import ContributionRejected as ContributionRejected
    from consilience.errors import GuaranteeVoid as GuaranteeVoid
    from consilience.errors import HubUnavailable as HubUnavailable
    from consilience.errors import LedgerDamaged as LedgerDamaged
    from consilience.errors import PrivacyLeakWarning as PrivacyLeakWarning
    from consilience.errors import RecordsWarning as RecordsWarning
    from consilience.errors import SchemaMismatch as SchemaMismatch
    from consilience.errors import SettingsError as SettingsError
    from consilience.evaluation.adaptation import Adapted as Adapted
    from consilience.evaluation.adaptation import adapt as adapt
    from consilience.evaluation.costs import predict_at_cost as predict_at_cost
    from consilience.evaluation.measures import evaluate as evaluate
    from consilience.evaluation.odds import odds_ratios as odds_ratios
    from consilience.evaluation.table_one import TableOne as TableOne
    from consilience.files.contribution import Contribution as Contribution
    from consilience.files.export import scorecard as scorecard
    from consilience.files.export import to_onnx as to_onnx
    from consilience.files.export import to_scikit_learn as to_scikit_learn
    from consilience.files.release import Release as Release
    from consilience.learners.axes import MomentAxes as MomentAxes
    from consilience.learners.axes import OwnAxes as OwnAxes
    from consilience.learners.axes import PublicAxes as PublicAxes
    from consilience.learners.linear import PrivateLinearSVC as PrivateLinearSVC
    from consilience.learners.linear import PrivateLogisticRegression as PrivateLogisticRegression
    from consilience.learners.linear import PrivateRidge as PrivateRidge
    from consilience.learners.partitions import DaskRows as DaskRows
    from consilience.learners.projection import PrivatePCA as PrivatePCA
    from consilience.learners.projection import PublicPCA as PublicPCA
    from consilience.learners.projection import SecondMoment as SecondMoment
    from consilience.learners.projection import combine_moments as combine_moments
    from consilience.learners.shapes import plot_shapes as plot_shapes
    from consilience.learners.trees.adaboost import (
        PrivateAdaBoostClassifier as PrivateAdaBoostClassifier,
    )
    from consilience.learners.trees.bins import Bins as Bins
    from consilience.learners.trees.forest import PrivateForestClassifier as PrivateForestClassifier
    from consilience.learners.trees.forest import PrivateTreeClassifier as PrivateTreeClassifier
    from consilience.learners.tuning import PrivateTuning as PrivateTuning
    from consilience.learners.tuning import choose_on_public as choose_on_public
    from consilience.planning.plan import plan as plan
    from consilience.privacy.guarantee import Budget as Budget
    from consilience.privacy.guarantee import Guarantee as Guarantee
    from consilience.privacy.guarantee import compose as compose
    from consilience.privacy.guarantee import compose_disjoint as compose_disjoint
    from consilience.privacy.ledger import Ledger as Ledger
    from consilience.privacy.mechanisms import Noise as Noise
    from consilience.simulation.division import Division as Division
    from consilience.simulation.simulate import Runs as Runs
    from consilience.simulation.simulate import simulate as simulate
    from consilience.site.site import Site as Site
    from consilience.statistics.gradient_step import GradientStep as GradientStep
    from consilience.statistics.gradient_step import start_from as start_from
    from consilience.statistics.label_tables import LabelTables as LabelTables
    from consilience.statistics.leaf_counts import LeafCounts as LeafCounts
    from consilience.statistics.leaf_counts import trees_from as trees_from
    from consilience.statistics.model_sum import ModelSum as ModelSum
    from consilience.statistics.moments import Moments as Moments
    from consilience.statistics.moments import MomentsRegressor as MomentsRegressor
    from consilience.statistics.score import Score as Score
    from consilience.statistics.summary import NumberSummary as NumberSummary
    from consilience.statistics.summary import Summary as Summary
    from consilience.statistics.total import Total as Total
    from consilience.study.study import Study as Study
    from consilience.tables.chunks import ParquetRows as ParquetRows
    from consilience.tables.public import Public as Public
    from consilience.tables.reading import read_table as read_table
    from consilience.tables.schema import Categorical as Categorical
    from consilience.tables.schema import Numeric as Numeric
    from consilience.tables.schema import Schema as Schema

_MODULES = {
    "aggregators.average": "Average",
    "aggregators.blend": "PublicBlend",
    "aggregators.boosting": "SiteBoosting",
    "aggregators.distillation.distill": "SoftLabelDistillation VoteDistillation",
    "aggregators.feature": "FeatureMethod",
    "aggregators.pooling": "PooledCounts",
    "aggregators.votes": "WeightedVote",
    "auditing.audit": "audit",
    "errors": "BudgetExceeded ConsilienceError ContributionRejected GuaranteeVoid HubUnavailable "
    "LedgerDamaged PrivacyLeakWarning RecordsWarning SchemaMismatch SettingsError",
    "evaluation.adaptation": "Adapted adapt",
    "evaluation.costs": "predict_at_cost",
    "evaluation.measures": "evaluate",
    "evaluation.odds": "odds_ratios",
    "evaluation.table_one": "TableOne",
    "files.contribution": "Contribution",
    "files.export": "scorecard to_onnx to_scikit_learn",
    "files.release": "Release",
    "learners.axes": "MomentAxes OwnAxes PublicAxes",
    "learners.linear": "PrivateLinearSVC PrivateLogisticRegression PrivateRidge",
    "learners.partitions": "DaskRows",
    "learners.projection": "PrivatePCA PublicPCA SecondMoment combine_moments",
    "learners.shapes": "plot_shapes",
    "learners.trees.adaboost": "PrivateAdaBoostClassifier",
    "learners.trees.bins": "Bins",
    "learners.trees.forest": "PrivateForestClassifier PrivateTreeClassifier",
    "learners.tuning": "PrivateTuning choose_on_public",
    "planning.plan": "plan",
    "privacy.guarantee": "Budget Guarantee compose compose_disjoint",
    "privacy.ledger": "Ledger",
    "privacy.mechanisms": "Noise",
    "simulation.division": "Division",
    "simulation.simulate": "Runs simulate",
    "site.site": "Site",
    "statistics.gradient_step": "GradientStep start_from",
    "statistics.label_tables": "LabelTables",
    "statistics.leaf_counts": "LeafCounts trees_from",
    "statistics.model_sum": "ModelSum",
    "statistics.moments": "Moments MomentsRegressor",
    "statistics.score": "Score",
    "statistics.summary": "NumberSummary Summary",
    "statistics.total": "Total",
    "study.study": "Study",
    "tables.chunks": "ParquetRows",
    "tables.public": "Public",
    "tables.reading": "read_table",
    "tables.schema": "Categorical Numeric Schema",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)

if not TYPE_CHECKING:  # a type checker would take any misspelled name for an export

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # the next access does not come here
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
