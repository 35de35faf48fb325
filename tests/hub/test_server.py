"""Connections that only wait: handshakes that do not end, and readers that hardly read."""

import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from consilience.hub.api.app import create_app
from consilience.protocol import HEADER, digest, sign_request
from forks import HubProcess, Mother
from proxies import certify, nginx, server_text

FILE = "/api/studies/demo/files/public.csv"
SIZE = 4 << 20  # more than the system keeps for a reader
LIMITS = {"header_seconds": 1.5, "write_seconds": 1.0, "most_connections_each": 10_000}

Connect = Callable[[], socket.socket]


@pytest.fixture(scope="module")
def mother(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mother]:
    mother = Mother("hub", tmp_path_factory.mktemp("log") / "log")
    yield mother
    mother.end()


@pytest.fixture
def ward(tmp_path: Path, tools: Any) -> Any:
    """A site in a study that has a large public file."""
    row = "0.25,0.75,yes\n"
    path = tmp_path / "public.csv"
    path.write_text("a,b,y\n" + row * (SIZE // len(row)))
    sha256 = digest(path.read_bytes())
    with tools.Client(create_app(tools.quick(tmp_path / "hub"))) as client:
        world = tools.World(client, tmp_path)
        world.add_study(tools.study_text(public=sha256))
        answer = client.put(FILE, content=path.read_bytes(), headers=world.coordinator)
        assert answer.status_code == 200
        return world.ward("north")


@contextmanager
def served(folder: Path, mother: Mother, **settings: Any) -> Iterator[HubProcess]:
    hub = HubProcess(folder / "hub", mother=mother)
    hub.job |= settings
    hub.start()
    try:
        hub.wait()
        yield hub
    finally:
        hub.kill()


def wait_until(true: Callable[[], bool], seconds: float) -> float:
    """Wait until something is true; return how long that took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)
    return time.monotonic() - began


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def n_open(hub: HubProcess) -> int:
    """Return how many connections and files a hub holds, besides its database's pool."""
    found = 0
    for link in Path(f"/proc/{hub.pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += "hub.sqlite" not in str(link.readlink())
    return found


def ask(connect: Connect, ward: Any, *, closing: bool = False) -> socket.socket:
    """Ask for the large file on a new connection, and read nothing yet."""
    header = sign_request(ward.key, ward.hub_key, "GET", FILE, digest(b""))
    connection = connect()
    more = "Connection: close\r\n" if closing else ""
    connection.sendall(
        f"GET {FILE} HTTP/1.1\r\nHost: hub\r\n{HEADER}: {header}\r\n{more}\r\n".encode()
    )
    return connection


def read(connection: socket.socket, rate: float, seconds: float) -> int:
    """Read so many bytes a second until the other side closes or all is there; return how many."""
    connection.settimeout(10)
    size, began = 0, time.monotonic()
    while size < SIZE and time.monotonic() - began < seconds:
        wanted = int(rate * (time.monotonic() - began)) - size
        if wanted < 1:
            time.sleep(0.05)
            continue
        try:
            part = connection.recv(min(wanted, 1 << 16))
        except OSError:
            break
        if not part:
            break
        size += len(part)
    return size


def small(port: int, trust: ssl.SSLContext | None = None) -> Connect:
    """Return what connects with little room for answers, so that the server must keep the rest."""

    def connect() -> socket.socket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        plain.settimeout(10)
        plain.connect(("127.0.0.1", port))
        return plain if trust is None else trust.wrap_socket(plain, server_hostname="127.0.0.1")

    return connect


def test_handshakes_that_do_not_end_neither_stop_the_hub_nor_stay(
    tmp_path: Path, mother: Mother
) -> None:
    """1,100 connections, half of them in the middle of a handshake, against 1,024 open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    cert, key = certify(tmp_path, "hub")
    tls = {"cert": str(cert), "key": str(key), "files": 1024}
    trust = ssl.create_default_context(cafile=str(cert))
    with ExitStack() as stack:
        hub = stack.enter_context(served(tmp_path, mother, **tls, **LIMITS))
        client = stack.enter_context(httpx.Client(base_url=hub.address, verify=trust, timeout=10))
        before, held, most = n_open(hub), [], 0
        for i in range(1100):
            one = socket.create_connection(("127.0.0.1", hub.port), timeout=20)
            held.append(stack.enter_context(one))
            if i % 2:
                one.sendall(b"\x16\x03\x01\x02\x00\x01")
            most = max(most, n_open(hub) if i % 20 == 0 else 0)
        # Half are counted; on a busy machine a burst or two of 128 is accepted before others are
        # closed. What is left is for files and for the database.
        assert most < 1024 - 128
        assert client.get("/readyz").status_code == 200
        wait_until(lambda: all(map(is_closed, held)), 10.0)
        wait_until(lambda: n_open(hub) <= before + 4, 5.0)
        assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize("over", ["plain", "tls"])
def test_an_answer_waits_for_its_reader_at_a_least_rate(
    over: str, tmp_path: Path, mother: Mother, ward: Any
) -> None:
    """A byte a second holds neither a connection nor a file; a slow reader gets all of it."""
    settings: dict[str, Any] = {**LIMITS, "least_rate": 2 << 20}
    trust = None
    if over == "tls":
        cert, key = certify(tmp_path, "hub")
        settings |= {"cert": str(cert), "key": str(key)}
        trust = ssl.create_default_context(cafile=str(cert))
    with ExitStack() as stack:
        hub = stack.enter_context(served(tmp_path, mother, **settings))
        connect = small(hub.port, trust)
        before = n_open(hub)
        slow = [ask(connect, ward, closing=closing) for closing in (False, True) for _ in range(3)]
        for one in slow:
            stack.enter_context(one)
        # A quarter of the rate for which a connection is kept, in steps that never pause for long.
        steady = stack.enter_context(ask(connect, ward))
        assert read(steady, settings["least_rate"] / 4, 12.0) < SIZE // 2
        for one in slow:
            read(one, 1.0, 1.0)
        wait_until(lambda: n_open(hub) <= before + 2, 10.0)
        honest = stack.enter_context(ask(connect, ward))
        assert read(honest, 2 * settings["least_rate"], 30.0) >= SIZE


def test_nginx_keeps_handshakes_and_slow_readers_from_the_hub(
    tmp_path: Path, mother: Mother, ward: Any
) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(served(tmp_path, mother, proxies=["127.0.0.1"]))
        changes = {
            "http://127.0.0.1:8440": hub.address,
            "client_header_timeout 10s": "client_header_timeout 1s",
            "send_timeout          30s": "send_timeout 1s",
        }
        proxy = stack.enter_context(nginx(tmp_path / "nginx", server_text(), changes))
        before = n_open(hub)
        held = [stack.enter_context(small(proxy.port)()) for _ in range(20)]
        for one in held[::2]:
            one.sendall(b"\x16\x03\x01\x02\x00\x01")
        slow = stack.enter_context(ask(small(proxy.port, proxy.trust), ward))
        assert read(slow, 1.0, 2.0) < 10
        wait_until(lambda: n_open(hub) <= before + 2, 5.0)  # nginx has the whole answer
        wait_until(lambda: all(map(is_closed, held)), 10.0)
        assert read(slow, 1e9, 10.0) < SIZE  # and does not keep it for long
        honest = stack.enter_context(ask(small(proxy.port, proxy.trust), ward))
        assert read(honest, 1e9, 30.0) >= SIZE
