"""Every exception that this package raises on purpose.

::

    ConsilienceError
    ├── SettingsError         (also a ValueError) a parameter is wrong: change the call
    ├── SchemaMismatch        (also a ValueError) the table does not fit the schema: fix either
    ├── BudgetExceeded        the data owner's limit is too low: ask for less, or ask the owner
    ├── GuaranteeVoid         what you asked for has no guarantee: use a variant that has one
    ├── LedgerDamaged         the charges cannot be trusted or written: stop, restore a backup
    ├── ContributionRejected  the hub does not accept this file
    └── HubUnavailable        nothing was lost: try again later

A message has four short parts: what was asked, what is wrong, what state things are in, and what to
do. It may show settings. It never shows anything computed from records.
"""


class ConsilienceError(Exception):
    """Root of the tree: catches everything raised on purpose, and nothing else."""


class SettingsError(ConsilienceError, ValueError):
    """A parameter has a value that cannot work."""


class SchemaMismatch(ConsilienceError, ValueError):
    """A table does not have the shape or kind that its schema declares."""


class BudgetExceeded(ConsilienceError):
    """A charge exceeds what the data owner allowed."""


class GuaranteeVoid(ConsilienceError):
    """The requested computation has no privacy guarantee, or one that does not hold."""


class LedgerDamaged(ConsilienceError):
    """The ledger file was edited, truncated, or cannot be read or written."""


class ContributionRejected(ConsilienceError):
    """A file does not satisfy what its study demands."""


class HubUnavailable(ConsilienceError):
    """The hub did not answer, or not in time."""
