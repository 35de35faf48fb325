"""What an audit found, beside what was claimed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from consilience.privacy.guarantee import Guarantee

FALSE_ALARM = 1e-6  # probability that one check rejects a correct sampler
SLACK = 1e-6  # relative; covers the rounding of the attack itself, far below any real failure


@dataclass(frozen=True)
class Check:
    """One comparison of draws with the law they should follow."""

    name: str
    p_value: float

    @property
    def passed(self) -> bool:
        """Whether the draws are compatible with that law.

        A correct sampler fails once in a million.
        """
        return self.p_value >= FALSE_ALARM


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an attack found, beside what was claimed.

    Attributes
    ----------
    epsilon_lower
        The epsilon found: proven by an exact attack, with confidence 99.9 % by a sampled one.
    delta_lower
        The delta found at the claimed epsilon, where the claim has a delta.
    worst
        The pair of made-up data sets for which it was found, in words.
    """

    attack: str
    claimed: Guarantee
    epsilon_lower: float
    delta_lower: float | None = None
    worst: str = ""
    checks: tuple[Check, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether neither the attack nor a check contradicts the claim."""
        return self.epsilon_lower <= self.claimed.epsilon * (1 + SLACK) and all(
            c.passed for c in self.checks
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "attack": self.attack,
            "passed": self.passed,
            "epsilon_lower": "inf" if math.isinf(self.epsilon_lower) else self.epsilon_lower,
            "delta_lower": self.delta_lower,
            "claimed": self.claimed.as_dict(),
            "worst": self.worst,
            "checks": [
                {"name": c.name, "p_value": c.p_value, "passed": c.passed} for c in self.checks
            ],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        verdict = (
            "PASSED: no attack reached the claim" if self.passed else "FAILED: the claim is false"
        )
        share = self.epsilon_lower / self.claimed.epsilon if self.claimed.epsilon else math.inf
        lines = [
            f"Audit ({self.attack}) {verdict}",
            f"  claimed   {self.claimed!r}",
            f"  found     epsilon >= {self.epsilon_lower:.6g} ({share:.1%} of the claim)",
        ]
        if self.delta_lower is not None:
            lines.append(f"            delta >= {self.delta_lower:.3g} at the claimed epsilon")
        lines += [f"  worst     {self.worst}"] if self.worst else []
        lines += [
            f"  {'ok' if c.passed else 'FAILED':<9} {c.name} (p = {c.p_value:.2g})"
            for c in self.checks
        ]
        return "\n".join(lines)
