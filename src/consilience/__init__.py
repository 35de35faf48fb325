"""consilience: organisations learn one good classifier together without sharing records.

Everything public is ``consilience.Name``; names load on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Budget": "privacy.guarantee",
    "Categorical": "data",
    "Guarantee": "privacy.guarantee",
    "Ledger": "privacy.ledger",
    "Noise": "privacy.mechanisms",
    "Numeric": "data",
    "PrivateLinearSVC": "learners.linear",
    "PrivateLogisticRegression": "learners.linear",
    "PrivatePCA": "learners.projection",
    "PrivateRidge": "learners.linear",
    "PrivateTuning": "learners.tuning",
    "PublicPCA": "learners.projection",
    "Schema": "data",
    "audit": "audit",
    "compose": "privacy.guarantee",
    "compose_disjoint": "privacy.guarantee",
    "plan": "plan",
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
