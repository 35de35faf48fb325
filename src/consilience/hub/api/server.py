"""The server under the hub: it closes connections that only wait, and its log stays short.

A connection must end its TLS handshake and send a complete header in time, take its answer at a
least rate, and send a body at the same rate (`receive` in `requests.py`). Connections are counted,
in total and for each address, from before the handshake. Where there are too many, the one that has
waited longest for its header is closed, so that idle connections never keep out one that asks for
something.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from consilience.hub.api.log import formatter, requests
from consilience.hub.auth import network_of
from consilience.hub.hub import Settings

BACKLOG = 128  # connections that the event loop accepts at once
MOST_FILES = 1 << 16  # open files and connections that the hub asks the system for
LINES_A_MINUTE = 10  # of one kind
MOST_KINDS = 500
SEND_BUFFER = 1 << 18  # bytes of an answer that the system keeps for a slow reader


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
        network, each = network_of(newcomer.address), self.settings.most_connections_each
        self.n += 1
        self.addresses[network] += 1
        if newcomer.address not in self.proxies and self.addresses[network] > each:
            waiting = (other for other in self.waiting if network_of(other.address) == network)
        elif self.n > self.most:
            waiting = (other for other in self.waiting)
        else:
            return
        next(waiting, newcomer).close()

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self.n -= 1
        network = network_of(connection.address)
        self.addresses[network] -= 1
        if not self.addresses[network]:
            del self.addresses[network]


class Connection(H11Protocol):
    """One connection: uvicorn's protocol with time limits for handshakes, headers and answers."""

    lobby: Lobby
    address = ""  # the network address of the other side, which may be a proxy
    _is_made = False
    _header: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None
    _patience = 0.0  # seconds for which an answer may still wait for its reader
    _paused = (0.0, 0)  # since when it waits, and how many bytes do

    def arrive(self, transport: asyncio.Transport) -> None:
        """Begin to wait: for a TLS handshake, if there is one, and for a header."""
        self.transport = transport
        connection, peer = map(transport.get_extra_info, ("socket", "peername"))
        # The system says that there is room when a third is: of megabytes, that is minutes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.address = str(peer[0]) if peer else ""
        self._patience = self.lobby.settings.write_seconds
        self._await_header()
        self.lobby.enter(self)

    def end_handshake(self, _: asyncio.Future[None]) -> None:
        """Forget the connection if it did not come to TLS."""
        if not self._is_made:
            self._end_waiting()
            self.lobby.leave(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to talk; with TLS, the connection has arrived before."""
        super().connection_made(transport)
        self._is_made = True
        if transport.get_extra_info("sslcontext") is None:
            self.arrive(transport)

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
        self._patience = self.lobby.settings.write_seconds
        is_over = self.transport.is_closing() and not self.transport.get_write_buffer_size()
        if not self._is_busy() and not is_over:
            self._await_header()

    def pause_writing(self) -> None:
        """Begin to wait until the other side takes more of an answer."""
        super().pause_writing()
        self._paused = self.loop.time(), self.transport.get_write_buffer_size()
        self._answer = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: the other side took more of an answer, and earned time by it."""
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
            (since, size), settings = self._paused, self.lobby.settings
            taken = size - self.transport.get_write_buffer_size()
            left = self._patience - (self.loop.time() - since) + taken / settings.least_rate
            self._patience = min(settings.write_seconds, left)
            super().resume_writing()

    def close(self) -> None:
        """Close the connection at once; it no longer waits, so that the next to go is another."""
        self._end_waiting()
        self.transport.abort()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_header(self) -> None:
        """Wait for a header; the rest of the last answer may have to be taken before."""
        self._end_waiting()
        self.lobby.waiting[self] = None
        settings, rest = self.lobby.settings, self.transport.get_write_buffer_size()
        more = (rest + 2 * SEND_BUFFER) / settings.least_rate if rest else 0.0
        self._header = self.loop.call_later(settings.header_seconds + more, self.close)

    def _end_waiting(self) -> None:
        self.lobby.waiting.pop(self, None)
        if self._header is not None:
            self._header.cancel()
            self._header = None


class Loop(asyncio.SelectorEventLoop):
    """An event loop that shows connections to the lobby before their TLS handshake, not after."""

    def _make_ssl_transport(
        self,
        rawsock: socket.socket,
        protocol: asyncio.BaseProtocol,
        sslcontext: ssl.SSLContext,
        waiter: asyncio.Future[None] | None = None,
        **more: object,
    ) -> asyncio.Transport:
        make = super()._make_ssl_transport  # type: ignore[misc]
        transport: asyncio.Transport = make(rawsock, protocol, sslcontext, waiter, **more)
        if isinstance(protocol, Connection) and waiter is not None:
            self.call_soon(protocol.arrive, transport)  # when it has a connection under it
            waiter.add_done_callback(protocol.end_handshake)
        return transport


class LineLimit(logging.Filter):
    """Let through so many lines a minute of each kind; the next says how many were left out."""

    def __init__(self, most: int = LINES_A_MINUTE) -> None:
        super().__init__()
        self.most = most
        self._kinds: dict[tuple[str, str], list[float]] = {}  # since when, lines, and left out
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line may be written."""
        if record.levelno < logging.WARNING:
            return True
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


def limit_log(form: str = "text") -> None:
    """Write warnings and errors to standard error, a few lines a minute of each kind.

    As JSON there is also a line for each request, which the limits of addresses bound.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    handler.addFilter(LineLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    if form == "json":
        requests.setLevel(logging.INFO)


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
    limit_log(settings.log_format)
    lobby = Lobby(settings, proxies)
    # Files and the database need the rest, as do connections that were accepted and not counted.
    lobby.most = max(16, min(lobby.most, raise_file_limit() - 4 * BACKLOG))

    class Guarded(Connection):
        pass

    Guarded.lobby = lobby
    # What is there by now stays: with it, each look for garbage would hold up all requests.
    gc.collect()
    gc.freeze()
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
