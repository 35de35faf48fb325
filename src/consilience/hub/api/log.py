"""The hub's own log: lines for people, or one JSON object for each event."""

from __future__ import annotations

import json
import logging
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path

MOST_TEXT = 1000  # characters of a message
MOST_FRAMES = 5  # where something was raised, innermost last
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# What the log calls the request that is being answered; every answer says it as x-request-id.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
requests = logging.getLogger("consilience.hub.requests")


class JsonLines(logging.Formatter):
    """One JSON object a line: when, how grave, who says it, what, and during which request.

    Of an exception it has the type and the places, not the message, which may quote what was sent.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage()[:MOST_TEXT],
        }
        if (known := request_id.get()) is not None:
            line["request"] = known
        line |= getattr(record, "facts", {})
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])[-MOST_FRAMES:]
            line["exception"] = record.exc_info[0].__name__
            line["at"] = [f"{Path(each.filename).name}:{each.lineno}" for each in frames]
        return json.dumps(line)


def formatter(form: str) -> logging.Formatter:
    """Return what makes lines: `text` or `json`."""
    return JsonLines() if form == "json" else logging.Formatter(TEXT)
