"""Where a privacy cost is charged."""

from __future__ import annotations

from dataclasses import dataclass

from consilience.privacy.ledger import Ledger


@dataclass(frozen=True)
class Account:
    """A dataset of a ledger, and the key under which a retry finds the first charge again."""

    ledger: Ledger | None = None
    dataset: str | None = None
    key: str | None = None
