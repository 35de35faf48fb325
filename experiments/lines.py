"""Lines that figures of several papers share: noise as printed, and sums in place of models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import consilience as cs
from consilience.privacy.vector_noise import main_share
from consilience.simulation.once import TotalOnce

from .design import Method

DELTA_OF_SUMS = 1e-6  # sums have noise for (ε, δ); the papers' models for ε alone
SUMS = "sums"


def as_printed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with so much more ε that the main noise is what a paper's formula says.

    The library takes a hundredth of ε for the rounding of a computer, which no paper pays for.
    """
    return {**given, "epsilon": _raised(given["epsilon"])}


def _raised(epsilon: Any) -> Any:
    if isinstance(epsilon, Mapping):
        return {name: _raised(one) for name, one in epsilon.items()}
    if isinstance(epsilon, list):
        return [_raised(one) for one in epsilon]
    return epsilon / main_share(1.0)


def sums(given: Mapping[str, Any], n_sites: int) -> dict[str, Any]:
    """Return the arguments of a run in which sites hand over sums instead of models.

    Moments need no public records, one step along the gradients starts from them. Noise is drawn at
    every site, or shared by the sites so that any half of them is enough.
    """
    settings: dict[str, Any] = {"epsilon": math.inf, "delta": DELTA_OF_SUMS}
    ways = {"at sites": cs.Total(), "shared": TotalOnce(shares=max(1, n_sites // 2))}
    return {
        **given,
        "learner": {"moments": cs.Moments(**settings), "gradient": cs.GradientStep(**settings)},
        "aggregator": ways,
        "baselines": (),
    }


def methods_of_sums(level: str | None = None) -> tuple[Method, ...]:
    """Return the four lines of that run."""
    kinds = {"moments": "moments", "gradient": "gradient step"}
    places = {"at sites": "noise at sites", "shared": "shared noise"}
    return tuple(
        Method(f"{kind}, {place}", way, "corrected", learner, SUMS, level)
        for learner, kind in kinds.items()
        for way, place in places.items()
    )
