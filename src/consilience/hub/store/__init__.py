"""What the hub remembers: every SQL statement, and the files."""

from consilience.hub.store.database import Row, hashed, now
from consilience.hub.store.store import Store

__all__ = ["Row", "Store", "hashed", "now"]
