"""The trusted core: guarantees, mechanisms, accounting, ledger; it imports only errors."""
