"""The server under the hub: it closes connections that only wait, and its log stays short.

A connection must send a complete header in time, take its answer in time, and send a body at a
least rate (`receive` in `requests.py`). Connections are counted, in total and for each address.
Where there are too many, the one that has waited longest for its header is closed, so that idle
connections never keep out one that asks for something.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from consilience.hub.hub import Settings

BACKLOG = 128  # connections that the event loop accepts at once
MOST_FILES = 1 << 16  # open files and connections that the hub asks the system for
LINES_A_MINUTE = 10  # of one kind
MOST_KINDS = 500
HANDSHAKE_SECONDS = 10.0


class Lobby:
    """The connections of one server, in total and by address, and those without a request."""

    def __init__(self, settings: Settings, proxies: Collection[str] = ()) -> None:
        self.settings, self.proxies = settings, frozenset(proxies)
        self.most, self.n = settings.most_connections, 0
        self.addresses = Counter[str]()
        # In the order in which they began to wait: a dictionary, as sets have no order.
        self.waiting: dict[Connection, None] = {}

    def enter(self, newcomer: Connection) -> None:
        """Count a connection; if there are too many, close one."""
        address, each = newcomer.address, self.settings.most_connections_each
        self.n += 1
        self.addresses[address] += 1
        if address not in self.proxies and self.addresses[address] > each:
            waiting = (other for other in self.waiting if other.address == address)
        elif self.n > self.most:
            waiting = (other for other in self.waiting)
        else:
            return
        next(waiting, newcomer).close()

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self.n -= 1
        self.addresses[connection.address] -= 1
        if not self.addresses[connection.address]:
            del self.addresses[connection.address]


class Connection(H11Protocol):
    """One connection: uvicorn's protocol with a time limit for headers and for answers."""

    lobby: Lobby
    _header: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """The network address of the other side, which may be a proxy."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a header."""
        super().connection_made(transport)
        self._await_header()
        self.lobby.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end_waiting()
        self.resume_writing()
        self.lobby.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Stop waiting when a request has begun."""
        super().handle_events()
        if self._is_busy():
            self._end_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request; the rest of a body that nobody read has as long."""
        super().on_response_complete()
        if not self._is_busy() and not self.transport.is_closing():
            self._await_header()

    def pause_writing(self) -> None:
        """Begin to wait until the other side takes more of an answer."""
        super().pause_writing()
        seconds = self.lobby.settings.write_seconds
        self._answer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: the other side took more of an answer."""
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
            super().resume_writing()

    def close(self) -> None:
        """Close the connection at once; it no longer waits, so that the next to go is another."""
        self._end_waiting()
        self.transport.abort()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_header(self) -> None:
        self._end_waiting()
        self.lobby.waiting[self] = None
        seconds = self.lobby.settings.header_seconds
        self._header = self.loop.call_later(seconds, self.close)

    def _end_waiting(self) -> None:
        self.lobby.waiting.pop(self, None)
        if self._header is not None:
            self._header.cancel()
            self._header = None


class Loop(asyncio.SelectorEventLoop):
    """An event loop that waits for TLS handshakes no longer than for headers."""

    async def create_server(  # type: ignore[override]
        self, *arguments: object, ssl: ssl.SSLContext | None = None, **more: object
    ) -> asyncio.Server:
        """Create a server."""
        if ssl is not None:
            more["ssl_handshake_timeout"] = HANDSHAKE_SECONDS
        return await super().create_server(*arguments, ssl=ssl, **more)  # type: ignore[call-overload, no-any-return]


class LineLimit(logging.Filter):
    """Let through so many lines a minute of each kind; the next says how many were left out."""

    def __init__(self, most: int = LINES_A_MINUTE) -> None:
        super().__init__()
        self.most = most
        self._kinds: dict[tuple[str, str], list[float]] = {}  # since when, lines, and left out
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line may be written."""
        kind, at = (record.name, str(record.msg)[:200]), time.monotonic()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                kind = ("", "")  # texts that differ each time are one kind together
            known = self._kinds.setdefault(kind, [at, 0, 0])
            since, lines, left_out = known
            if at - since >= 60.0:
                if left_out:
                    record.msg = f"{record.msg} ({left_out:.0f} more lines like this before)"
                known[:] = at, 1, 0
                return True
            if lines >= self.most:
                known[2] += 1
                return False
            known[1] += 1
            return True


def limit_log() -> None:
    """Write warnings and errors to standard error, a few lines a minute of each kind."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(LineLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def raise_file_limit() -> int:
    """Ask the system for as many open files as it allows; return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def run(
    app: ASGIApp,
    settings: Settings,
    *,
    address: tuple[str, int],
    tls: tuple[str | None, str | None],
    proxies: Collection[str] = (),
) -> None:
    """Run the hub until it is stopped; `proxies` are believed about whom they speak for."""
    limit_log()
    lobby = Lobby(settings, proxies)
    # Files and the database need the rest, as do connections that were accepted and not counted.
    lobby.most = max(16, min(lobby.most, raise_file_limit() - 4 * BACKLOG))

    class Guarded(Connection):
        pass

    Guarded.lobby = lobby
    uvicorn.run(
        app,
        host=address[0],
        port=address[1],
        ssl_certfile=tls[0],
        ssl_keyfile=tls[1],
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        http=Guarded,
        ws="none",
        loop=f"{__name__}:{Loop.__name__}",
        backlog=BACKLOG,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=30,
    )
