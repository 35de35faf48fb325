"""Charging what is drawn, and stating what it guarantees.

Everything in this project that draws noise on behalf of a user does so through `run_charged`: the
ledger is charged first, then the noise is drawn. `state_guarantee` turns the same events into the
guarantee that the result carries.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from consilience.errors import SettingsError
from consilience.privacy.accounting import Event, total
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source

State: TypeAlias = dict[str, NDArray[Any]]
Receipt: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Account:
    """Where a cost is charged: the ledger, the data set's name in it, and the charge's key.

    Without a ledger nothing is charged. The key identifies one charge: running again under the same
    key returns the stored result. Without a key every run is a charge of its own.
    """

    ledger: Ledger | None = None
    dataset: str | None = None
    key: str | None = None


def run_charged(
    draw: Callable[[Source], State],
    events: Sequence[Event],
    *,
    noise: Noise | None,
    account: Account,
    purpose: str,
) -> tuple[State, Receipt | None]:
    """Charge `events` if there is a ledger, then `draw`; return the result and the receipt.

    A retry under the same key gets the first result back, never a second draw.
    """
    noise = Noise() if noise is None else noise
    ledger = account.ledger
    if ledger is None:
        return draw(noise.open()), None
    if account.dataset is None:
        raise _uncharged(
            purpose,
            "no data set was named",
            "Pass dataset=..., the name its owner declared a budget for.",
        )
    if noise.seed is not None:
        raise _uncharged(
            purpose, "a seed voids the guarantee", "Drop noise=Noise(seed=...), or drop the ledger."
        )
    if not events:
        raise _uncharged(
            purpose, "without privacy (epsilon=inf) it has no cost", "Choose a finite epsilon."
        )
    # Charge first: if training dies below this line the site loses budget it did not use, which is
    # annoying; charging afterwards would lose track of noise already seen, which is a leak.
    key = account.key or uuid.uuid4().hex
    charge = ledger.charge(events, dataset=account.dataset, key=key, purpose=purpose)
    stored = ledger.sealed(charge.key)
    if stored is not None:
        return load_tensors(stored), charge.receipt
    result = draw(noise.open())
    ledger.seal(charge, save_tensors(result))
    return result, charge.receipt


def _uncharged(purpose: str, problem: str, fix: str) -> SettingsError:
    return SettingsError(
        f"{purpose} was to be charged to a ledger, but {problem}. Nothing was trained or charged. "
        f"{fix}"
    )


def state_guarantee(
    events: Sequence[Event],
    *,
    noise: Noise | None,
    unit: Unit | str,
    neighbours: Neighbours | str,
    assumptions: Sequence[str] = (),
) -> Guarantee:
    """Return what `events` guarantee together: infinite without noise, void if seeded."""
    if not events:
        return Guarantee(
            epsilon=math.inf, delta=0.0, unit=Unit(unit), neighbours=Neighbours(neighbours)
        )
    if noise is not None and noise.seed is not None:
        return void_by_seed(unit=unit, neighbours=neighbours)
    whole = total(events)
    return Guarantee(
        epsilon=whole.epsilon,
        delta=whole.delta,
        unit=whole.unit,
        neighbours=whole.neighbours,
        assumptions=tuple(assumptions),
    )


def void_by_seed(*, unit: Unit | str, neighbours: Neighbours | str) -> Guarantee:
    """Return the guarantee of anything drawn from seeded noise: none."""
    return Guarantee.void("seeded noise", unit=unit, neighbours=neighbours)
