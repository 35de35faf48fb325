"""How often an address, a key or a guesser may ask.

Rates are counted in each worker process: N workers together let through N times the rate. They
protect the machine, not a secret. What must be exact across workers (nonces, invitations, claims)
is in the database.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from consilience.protocol import Refusal


@dataclass(frozen=True)
class Rate:
    """How many requests per second in the long run, and how many at once."""

    per_second: float
    burst: float


class Buckets:
    """Token buckets, one for each name; those unused for the longest time are forgotten first."""

    def __init__(self, rate: Rate, *, most: int = 10_000) -> None:
        self.rate, self.most = rate, most
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """Take one token, or refuse."""
        at = time.monotonic()
        with self._lock:
            level, since = self._levels.pop(name, (self.rate.burst, at))
            level = min(self.rate.burst, level + (at - since) * self.rate.per_second)
            self._levels[name] = (level - 1 if level >= 1 else level, at)
            if len(self._levels) > self.most:
                self._levels.popitem(last=False)
        if level < 1:
            raise Refusal("too-many", "Too many requests came from here in a short time.")
