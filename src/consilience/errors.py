"""Every exception this project raises on purpose.

::

    ConsilienceError ├── SettingsError        (also ValueError)  a parameter is wrong: change the
    call ├── SchemaMismatch       (also ValueError)  the table is not what the schema declares: mend
    either ├── BudgetExceeded                          the data owner's limit stands against it: ask
    for less, or ask them ├── GuaranteeVoid                           what was asked for has no
    guarantee: use the variant that has one ├── LedgerDamaged                           the charge
    history cannot be trusted or written: stop, restore ├── ContributionRejected
    the hub will not take this file └── HubUnavailable                          try again later,
    nothing was lost

A message has four short parts: what was asked, what stands against it, what state things are in,
what to do. Settings may be shown in it; nothing computed from records ever is.
"""


class ConsilienceError(Exception):
    """Root of the tree: catching it catches everything raised on purpose, and nothing else."""


class SettingsError(ConsilienceError, ValueError):
    """A parameter has a value that cannot work."""


class SchemaMismatch(ConsilienceError, ValueError):
    """A table does not have the shape or kind that its schema declares."""


class BudgetExceeded(ConsilienceError):
    """A charge does not fit into what the data owner allowed."""


class GuaranteeVoid(ConsilienceError):
    """The requested computation has no privacy guarantee, or one that does not hold."""


class LedgerDamaged(ConsilienceError):
    """The ledger file was edited, truncated, or cannot be read or written."""


class ContributionRejected(ConsilienceError):
    """A file does not satisfy what its study demands."""


class HubUnavailable(ConsilienceError):
    """The hub did not answer, or not in time."""
