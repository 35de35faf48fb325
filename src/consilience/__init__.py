"""consilience: organisations learn one good classifier together without sharing records."""

from consilience.audit import audit
from consilience.data import Categorical, Numeric, ParquetRows, Schema
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression, PrivateRidge
from consilience.learners.projection import PrivatePCA, PublicPCA, SecondMoment, combine_moments
from consilience.learners.tuning import PrivateTuning, choose_on_public
from consilience.plan import plan
from consilience.privacy.guarantee import Budget, Guarantee, compose, compose_disjoint
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "Categorical",
    "Guarantee",
    "Ledger",
    "Noise",
    "Numeric",
    "ParquetRows",
    "PrivateLinearSVC",
    "PrivateLogisticRegression",
    "PrivatePCA",
    "PrivateRidge",
    "PrivateTuning",
    "PublicPCA",
    "Schema",
    "SecondMoment",
    "audit",
    "choose_on_public",
    "combine_moments",
    "compose",
    "compose_disjoint",
    "plan",
]
