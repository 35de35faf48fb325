"""Keeping what a worker has for a while only: a claim on a study, or on the trial of a draft."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("consilience.hub")


@contextmanager
def renewing(renew: Callable[[], object], seconds: float, what: str) -> Iterator[None]:
    """Renew what lasts so many `seconds` while the block runs; if the process dies, it expires."""
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(seconds / 3):
            try:
                renew()
            except Exception:  # the database may be back before it expires
                logger.exception("the claim of %s was not renewed", what)

    thread = threading.Thread(target=keep, name="claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
