"""Sums with noise once: what a trusted hub, or sites that share the noise, release of exact sums.

A simulation holds all exact sums, so that it can draw the noise of the total itself. Sites that
share it each draw a part, and all parts together have the law that is drawn here
(docs/guarantees/shared-noise.md): no pads are needed to see what it costs in accuracy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Unpack, cast

import numpy as np

from consilience.aggregators.average import TRUSTED
from consilience.aggregators.base import Array, Charge, Description, Ensemble
from consilience.aggregators.members import DISJOINT, as_members
from consilience.errors import SettingsError
from consilience.learners.base import is_count
from consilience.privacy.accounting import GaussianSum, SharedSum
from consilience.privacy.mechanisms import Noise, noisy_sum
from consilience.privacy.spending import Account, state_guarantee
from consilience.privacy.vector_noise import share_sum
from consilience.statistics.base import Statistic, Summed
from consilience.statistics.total import Total
from consilience.tables.public import Public

HONEST = "at least {} of the sites and one keyholder follow the protocol"


@dataclass(eq=False)
class TotalOnce(Total):
    """Add up the exact sums of all sites, with noise that is drawn once.

    Parameters
    ----------
    epsilon
        Of each record, or person, with the delta of the members.
    shares
        None: a trusted hub draws the noise of one sum. A number k: each site draws a share, and k
        of them are enough, so that N sites bring N/k times the variance.
    noise
        The source of noise.

    Privacy
    -------
    Without shares, `epsilon` against those who see the ensemble, not against whoever adds up. With
    shares, what `SharedSum` states if k sites follow the protocol. Proofs:
    docs/guarantees/statistics.md and docs/guarantees/shared-noise.md.
    """

    _: KW_ONLY
    epsilon: float = 1.0
    shares: int | None = None
    noise: Noise | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.shares is None or is_count(self.shares)
        self._require("shares", fits, "a whole number > 0, or None for a trusted hub")

    def describe(self) -> Description:
        """Return its title and what the weights mean."""
        where = "noise at a trusted hub" if self.shares is None else "noise shared"
        return Description(f"Total, {where}", super().describe().weighing)

    def assumed(self) -> tuple[str, ...]:
        """Return what the noise rests on."""
        last = TRUSTED if self.shares is None else HONEST.format(self.shares)
        return (DISJOINT, last)

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> Ensemble:
        """Return the model of the sum of all exact `members` with noise."""
        found = as_members(members)
        sums: list[Statistic] = [member.learner for member in found]
        if not all(isinstance(one, Statistic) and not one.events_ for one in sums):
            raise SettingsError(
                "Noise is drawn once on exact sums (statistics with epsilon=math.inf). Nothing was "
                "combined. Use Total for sums with noise of their own."
            )
        first, n_sites = sums[0], len(sums)
        asked = copy.copy(first)
        asked.epsilon = self.epsilon
        event = asked.plan_noise().event
        parts = [one.summed() for one in sums]
        sizes = np.array([1.0 if part.size is None else max(part.size, 1.0) for part in parts])
        known = all(part.size is not None for part in parts)
        total: Array = np.sum([one.total_ for one in sums], axis=0)
        variance, guarantee = parts[0].variance, None
        if event is not None:
            share = None if self.shares is None else share_sum(event, self.shares)
            drawn = event if share is None else _add_shares(share, n_sites)
            total = self._draw(total, first, drawn, Account(**charge))
            variance = np.square(drawn.sigma / first.weights())
            guarantee = state_guarantee(
                [event if share is None else share],
                noise=self.noise,
                unit=event.unit,
                neighbours=event.neighbours,
                assumptions=self.assumed(),
            )
        size = float(sizes.sum()) if known else None
        labelled = public if public is not None and public.y is not None else None
        made = first.finish(Summed(total * first.grain, variance, size, size), labelled)
        finished: Ensemble = replace(
            cast(Any, made),  # a frozen dataclass, as ensembles are
            weights=sizes / sizes.sum(),
            guarantee=guarantee,
            guarantees=(guarantee,) * n_sites,
        )
        return finished

    def _draw(self, total: Array, first: Statistic, event: GaussianSum, account: Account) -> Array:
        """Return the sum with noise, which is charged first."""
        state = self._run(
            lambda source: {"total": noisy_sum(total, first._widths(), event=event, source=source)},
            [event],
            account,
            lambda: [first.fingerprint()],
        )
        return state["total"]


def _add_shares(share: SharedSum, n_sites: int) -> GaussianSum:
    """Return the noise that the shares of so many sites add up to."""
    wider = math.sqrt(n_sites)
    facts = {part.name: getattr(share, part.name) for part in fields(GaussianSum)}
    return GaussianSum(
        **{**facts, "sigma": share.drawn_sigma * wider, "narrowest": share.narrowest * wider}
    )
