"""The trusted core: guarantees, mechanisms, accounting and the ledger. It imports nothing else of ours but errors."""
