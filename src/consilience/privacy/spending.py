"""Charging what is drawn, and stating what it guarantees.

Everything in this project that draws noise on behalf of a user does so through `run_charged`: the
ledger is charged first, then the noise is drawn. `state_guarantee` turns the same events into the
guarantee that the result carries.
"""

from __future__ import annotations

import hashlib
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from consilience.errors import SettingsError
from consilience.privacy.accounting import Event, SharedSum, as_counted, total
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.privacy.ledger import Charge, Ledger
from consilience.privacy.mechanisms import Noise, Source

State: TypeAlias = dict[str, NDArray[Any]]
Receipt: TypeAlias = dict[str, Any]
_SALT = 32  # bytes
_MEANS = "means"  # beside the numbers of a sealed result, and never released


@dataclass(frozen=True)
class Account:
    """Where a cost is charged: the ledger, the data set's name in it, and the charge's key.

    Without a ledger nothing is charged. The key identifies one charge: running again under the same
    key returns the stored result. Without a key every run is a charge of its own.
    """

    ledger: Ledger | None = None
    dataset: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        """Refuse a ledger that is none, such as its path."""
        if self.ledger is not None and not isinstance(self.ledger, Ledger):
            raise SettingsError(
                f"A {type(self.ledger).__name__} was given as the ledger. Nothing was charged or "
                "drawn. Pass ledger=Ledger(path)."
            )


def run_charged(
    draw: Callable[[Source], State],
    events: Sequence[Event],
    *,
    noise: Noise | None,
    account: Account,
    purpose: str,
    means: Callable[[], str],
) -> tuple[State, Receipt | None]:
    """Charge `events` if there is a ledger, then `draw`; return the result and the receipt.

    A retry under the same key gets the first result back, never a second draw. `means` returns all
    that says how to read the result: a digest of it is sealed, and a retry that means something
    else is refused.
    """
    noise = Noise() if noise is None else noise
    if account.ledger is None:
        return draw(noise.open()), None
    ledger, charge = _charge(events, noise, account, purpose)
    stored = ledger.sealed(charge.key)
    if stored is not None:
        first = load_tensors(stored)
        sealed = first.pop(_MEANS, None)  # earlier versions sealed none, or one of less
        if sealed is not None and not np.array_equal(sealed, _salted(means(), sealed[:_SALT])):
            raise SettingsError(
                f"{purpose} was given the key of another result, with other settings, members, "
                "classes, columns or numbers of records: its numbers would mean something else "
                "here. Nothing was drawn or changed. Use the settings and the table of that "
                "result, or another key."
            )
        return first, charge.receipt
    result = draw(noise.open())
    # A salt, because the meaning may be of exact members, and the seal's own digest is public.
    salt = np.frombuffer(os.urandom(_SALT), np.uint8)
    ledger.seal(charge, save_tensors({**result, _MEANS: _salted(means(), salt)}))
    return result, charge.receipt


def run_sealed(
    write: Callable[[Source, Receipt], bytes],
    events: Sequence[Event],
    *,
    account: Account,
    purpose: str,
) -> bytes:
    """Charge `events`, then `write` one file, which is sealed whole before it is returned.

    For numbers that may be written down only once: a retry under the same key gets the first file
    back, byte for byte. Nothing else of the draw is kept anywhere.
    """
    noise = Noise()
    ledger, charge = _charge(events, noise, account, purpose)
    stored = ledger.sealed(charge.key)
    if stored is None:
        stored = write(noise.open(), charge.receipt)
        ledger.seal(charge, stored)
    return stored


@dataclass(frozen=True)
class Spending:
    """Who pays for a share of noise.

    Parameters
    ----------
    account
        What it costs is charged here: what it costs if everybody else colludes, unless `alone`
        is named.
    alone
        The name of a further data set in the same ledger. It is charged what the share costs if
        everybody else colludes, and `account` what it costs if they do not, because the data owner
        accepted the study's keyholders.
    """

    account: Account
    alone: str | None = None

    def run(
        self, write: Callable[[Source, Receipt], bytes], event: SharedSum, purpose: str
    ) -> bytes:
        """Charge, then `write` one file, as `run_sealed` does."""
        ledger = self.account.ledger
        if self.alone is None or ledger is None:
            return run_sealed(write, [event.alone], account=self.account, purpose=purpose)
        account = replace(self.account, key=self.account.key or uuid.uuid4().hex)
        if _may_be_charged(account, event):  # otherwise the other one is refused, and this one lost
            charge = ledger.charge(
                [event.alone], dataset=self.alone, key=f"{account.key}-alone", purpose=purpose
            )
            ledger.seal(charge, b"")  # the file is sealed for the other charge
        return run_sealed(write, [event], account=account, purpose=purpose)


def _may_be_charged(account: Account, event: Event) -> bool:
    """Tell whether a charge is there already, or would be held if it were made now."""
    assert account.ledger is not None
    ledger, dataset = account.ledger, str(account.dataset)
    if any(charge.key == account.key for charge in ledger.charges(dataset)):
        return True
    if dataset not in ledger.datasets():
        return False
    left = ledger.balance(dataset)
    (counted,) = as_counted([event], left.unit, left.neighbours)
    fits = left.unit is counted.unit and (left.limit.rho is None or event.rho is not None)
    return fits and left.holds(left.charge([event]))


def _charge(
    events: Sequence[Event], noise: Noise, account: Account, purpose: str
) -> tuple[Ledger, Charge]:
    """Charge an account before anything is drawn, or refuse what cannot be charged."""
    ledger = account.ledger
    if ledger is None:
        raise _uncharged(purpose, "there is none", "Pass a ledger.")
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
    return ledger, ledger.charge(events, dataset=account.dataset, key=key, purpose=purpose)


def _salted(meaning: str, salt: NDArray[np.uint8]) -> NDArray[np.uint8]:
    digest = hashlib.sha256(salt.tobytes() + meaning.encode()).digest()
    return np.concatenate([salt, np.frombuffer(digest, np.uint8)])


def is_sealed(
    state: Mapping[str, NDArray[Any]], events: Sequence[Event], hash: str, ledger: Ledger
) -> bool:
    """Tell whether these are the numbers that `ledger` sealed for the charge of `events`.

    `hash` is that of the charge's receipt.
    """
    paid = {(charge.hash, charge.events): charge.key for charge in ledger.charges()}
    key = paid.get((hash, tuple(events)))
    stored = None if key is None else ledger.sealed(key)
    if stored is None:
        return False
    sealed = {name: one for name, one in load_tensors(stored).items() if name in state}
    return save_tensors(sealed) == save_tensors(dict(state))


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
    seeded = noise is not None and noise.seed is not None
    # Which of a person's records are kept is drawn even where nothing else is.
    if seeded and (events or Unit(unit) is Unit.PERSON):
        return void_by_seed(unit=unit, neighbours=neighbours)
    if not events:
        return Guarantee(
            epsilon=math.inf, delta=0.0, unit=Unit(unit), neighbours=Neighbours(neighbours)
        )
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
