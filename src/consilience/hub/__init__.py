"""The hub: collects contributions, combines them, publishes releases, and never sees a record."""
