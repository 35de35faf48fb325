"""The hub behind a real nginx, with the very configuration that docs/deployment.md prints."""

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest

from consilience.files.sealed import SigningKey
from consilience.hub.api.app import create_app
from consilience.hub.auth import hash_password
from consilience.protocol import HEADER, digest, sign_request
from forks import HubProcess

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
PASSWORD = "correct horse battery"
CONTRIBUTIONS = "/api/studies/demo/contributions"
SOAK_SECONDS = 40


# ------------------------------------------------------------------------------- what the page says


def printed(beginning: str) -> str:
    """Return the nginx block of the page that begins with this line."""
    blocks = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    return next(block for block in blocks if block.startswith(beginning))


def server_text() -> str:
    return printed("# /etc/nginx/conf.d/consilience.conf")


def several_machines_text() -> str:
    """Return the configuration for workers on several machines, as the page says to write it."""
    block = printed("upstream hub {\n  server 10.0.0.1")
    upstream, _, inside = block.partition("# and in `location /`:\n")
    lines = "".join(f"  {line.removeprefix('#')}\n" for line in inside.splitlines())
    return upstream + server_text().replace("    proxy_pass http://127.0.0.1:8440;\n", lines)


def test_the_service_of_the_page_is_behind_its_proxy() -> None:
    service = re.search(r"ExecStart=.*?\n.*?\n", PAGE)
    assert service is not None
    assert "--behind-proxy" in service[0]
    assert "--host 127.0.0.1 --port 8440" in service[0]
    assert "--proxy 10.0.0.9" in PAGE


# ------------------------------------------------------------------------------------- a real nginx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certify(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a certificate for this machine and for a name, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName(name)]
    begin = datetime.now(UTC) - timedelta(hours=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(form))
    paths[1].write_bytes(key.private_bytes(form, private, serialization.NoEncryption()))
    return paths


@dataclass
class Proxy:
    """A running nginx."""

    folder: Path
    port: int
    plain_port: int
    trust: ssl.SSLContext

    def client(self, source: str = "127.0.0.1") -> httpx.Client:
        """Return a client with a network address of its own: all of 127/8 is this machine."""
        transport = httpx.HTTPTransport(verify=self.trust, local_address=source)
        address = f"https://127.0.0.1:{self.port}"
        return httpx.Client(transport=transport, base_url=address, timeout=30)


@contextmanager
def nginx(folder: Path, text: str, changes: dict[str, str]) -> Iterator[Proxy]:
    """Run nginx with the page's text, on free ports and with a certificate of its own."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        notice = "nginx is not on this machine"
        if os.environ.get("CONSILIENCE_NEEDS_NGINX") == "1":
            pytest.fail(notice)
        pytest.skip(notice)
    folder.mkdir(parents=True)
    cert, key = certify(folder, "hub.example.org")
    port, plain = free_port(), free_port()
    changes = {
        **changes,
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "listen 80;": f"listen 127.0.0.1:{plain};",
        "/etc/ssl/hub.pem": str(cert),
        "/etc/ssl/hub.key": str(key),
    }
    for old, new in changes.items():
        assert old in text, old  # the page still says what is replaced here
        text = text.replace(old, new)
    (folder / "consilience.conf").write_text(text)
    places = "".join(
        f"  {kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\nworker_processes 1;\nworker_rlimit_nofile 8192;\npid {folder}/pid;\n"
        f"events {{ worker_connections 4096; }}\nhttp {{\n  access_log off;\n{places}"
        f"  include {folder}/consilience.conf;\n}}\n"
    )
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    command += ["-e", str(folder / "error.log")]
    process = subprocess.Popen(command)
    proxy = Proxy(folder, port, plain, ssl.create_default_context(cafile=str(cert)))
    try:
        until = time.monotonic() + 30
        with proxy.client() as client:
            while True:
                assert process.poll() is None, (folder / "error.log").read_text()
                try:
                    assert client.get("/healthz").status_code == 200
                    break
                except httpx.TransportError:
                    assert time.monotonic() < until
                    time.sleep(0.05)
        yield proxy
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def prepared(folder: Path, url: str | None, tools: Any, n_wards: int) -> Iterator[Any]:
    """Yield a world that knows sites and a coordinator; its own hub serves nobody else."""
    with tools.Client(create_app(tools.quick(folder / "hub", url))) as client:
        world = tools.World(client, folder)
        world.study = world.add_study()
        for i in range(n_wards):
            world.ward(f"ward {i}")
        world.hub.store.add_coordinator("bea", hash_password(PASSWORD), "operator")
        yield world


def submit(client: httpx.Client, ward: Any, body: bytes) -> httpx.Response:
    header = sign_request(ward.key, "POST", CONTRIBUTIONS, digest(body))
    return client.post(CONTRIBUTIONS, content=body, headers={HEADER: header})


def log_in(client: httpx.Client, name: str, password: str, **headers: str) -> httpx.Response:
    """Log in as a browser does, with the token of the page."""
    token = re.search(r'name="token" value="([0-9a-f]+)"', client.get("/login").text)
    assert token is not None
    form = {"name": name, "password": password, "token": token[1]}
    return client.post("/login", data=form, headers=headers)


def test_a_hub_behind_the_nginx_of_the_page(tmp_path: Path, tools: Any) -> None:
    with prepared(tmp_path, None, tools, 2) as world, ExitStack() as stack:
        hub = HubProcess(tmp_path / "hub", log=tmp_path / "log")
        hub.job |= {"proxies": ["127.0.0.1", "::1"], "by_guess": (1e-6, 2), "small_bytes": 4096}
        stack.callback(hub.end)
        hub.start()
        stack.callback(hub.kill)
        hub.wait()
        changes = {"http://127.0.0.1:8440": hub.address}
        proxy = stack.enter_context(nginx(tmp_path / "nginx", server_text(), changes))
        client, other, guesser, stranger = (
            stack.enter_context(proxy.client(f"127.0.0.{i}")) for i in range(2, 6)
        )
        plain = httpx.get(f"http://127.0.0.1:{proxy.plain_port}/login")
        assert (plain.status_code, plain.headers["location"]) == (301, "https://127.0.0.1/login")
        # The browser's cookies are for HTTPS only, and it is told to stay there.
        page = client.get("/login")
        assert "max-age" in page.headers["strict-transport-security"]
        assert "Secure" in page.headers["set-cookie"]
        session = log_in(client, "bea", PASSWORD)
        assert session.status_code == 303
        assert all("Secure" in one for one in session.headers.get_list("set-cookie")[:1])
        assert client.get("/studies").status_code == 200
        # Guesses are counted by the sender's own address, which nobody can make up.
        answers = [log_in(guesser, "bea", "x" * 10).status_code for _ in range(3)]
        assert answers == [401, 401, 429]
        spoofed = log_in(guesser, "bea", "x" * 10, **{"x-forwarded-for": "9.9.9.9"})
        assert spoofed.status_code == 429
        assert log_in(other, "bea", PASSWORD).status_code == 303
        entries = world.hub.store.audit(limit=1000)
        failed = [one["facts"]["address"] for one in entries if one["action"] == "login failed"]
        assert failed == ["127.0.0.4"] * 2
        # Sites submit small and large files; strangers send nothing that reaches the disk.
        for ward in world.wards.values():
            assert submit(other, ward, ward.train(world.study).sealed.to_bytes()).is_success
        header = sign_request(SigningKey.generate(), "POST", CONTRIBUTIONS, "0" * 64)
        for path in (CONTRIBUTIONS, "/studies/demo/files/x.csv", "/new-study"):
            answer = stranger.post(path, content=b"x" * (8 << 20), headers={HEADER: header})
            assert answer.status_code == 401, path
        assert list((tmp_path / "hub" / "files" / "incoming").iterdir()) == []
        # Counters are for this machine, which does not go through the proxy.
        assert stranger.get("/metrics").status_code == 401
        assert httpx.get(f"{hub.address}/metrics").status_code == 200
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_workers_on_several_machines_behind_the_nginx_of_the_page(
    tmp_path: Path, tools: Any
) -> None:
    """Workers speak HTTPS to the proxy, and believe it alone about the sender's address."""
    cert, key = certify(tmp_path, "hub-worker")
    with prepared(tmp_path, None, tools, 2) as world, ExitStack() as stack:
        workers = []
        for _ in range(2):
            worker = HubProcess(tmp_path / "hub", log=tmp_path / "log")
            tls = {"cert": str(cert), "key": str(key), "proxies": ["127.0.0.1"]}
            worker.job |= {**tls, "by_guess": (1e-6, 1)}
            stack.callback(worker.end)
            worker.start()
            stack.callback(worker.kill)
            workers.append(worker)
        for worker in workers:
            worker.wait()
        changes = {
            "10.0.0.1:8440": f"127.0.0.1:{workers[0].port}",
            "10.0.0.2:8440": f"127.0.0.1:{workers[1].port}",
            "/etc/ssl/workers.pem": str(cert),
        }
        proxy = stack.enter_context(nginx(tmp_path / "nginx", several_machines_text(), changes))
        client = stack.enter_context(proxy.client("127.0.0.2"))
        session = log_in(client, "bea", PASSWORD)
        assert session.status_code == 303
        assert "Secure" in session.headers["set-cookie"]
        for ward in world.wards.values():
            assert submit(client, ward, ward.train(world.study).sealed.to_bytes()).is_success
        workers[0].kill()  # nginx asks the other one
        assert client.get("/studies").status_code == 200
        entries = world.hub.store.audit(limit=1000)
        assert [one["action"] for one in entries].count("contribution accepted") == 2


# --------------------------------------------------------------------------------------- the attack


class Attack:
    """Strangers and one member who do all at once what once stopped a hub, until told to stop."""

    def __init__(self, proxy: Proxy, member: Any) -> None:
        self.proxy, self.member = proxy, member
        self.stopped, self.answers = threading.Event(), dict[str, int]()
        self.threads = [
            threading.Thread(target=self._repeat, args=(work, number), daemon=True)
            for work, n in (
                (self.sit_idle, 2),
                (self.trickle, 4),
                (self.send_much, 2),
                (self.send_form, 2),
                (self.guess, 2),
                (self.hog, 2),
                (self.send_junk, 2),
            )
            for number in range(n)
        ]

    def _repeat(self, work: Callable[[str], None], number: int) -> None:
        turn = 0
        while not self.stopped.is_set():
            turn += 1
            try:
                work(f"127.{number + 1}.{turn // 200 % 200}.{turn % 200 + 1}")
            except (httpx.HTTPError, OSError):
                pass
            self.answers[work.__name__] = self.answers.get(work.__name__, 0) + 1

    def _connect(self, source: str) -> ssl.SSLSocket:
        address = ("127.0.0.1", self.proxy.port)
        plain = socket.create_connection(address, timeout=10, source_address=(source, 0))
        return self.proxy.trust.wrap_socket(plain, server_hostname="127.0.0.1")

    def sit_idle(self, source: str) -> None:
        """Hold connections, half of them within a header."""
        held = []
        for i in range(60):
            held.append(self._connect(source))
            held[-1].sendall(b"GET / HTTP/1.1\r\n" if i % 2 else b"G")
        self.stopped.wait(1.0)
        for one in held:
            one.close()

    def trickle(self, source: str) -> None:
        """Send one byte of a small file, as somebody who is not enrolled."""
        header = sign_request(SigningKey.generate(), "POST", CONTRIBUTIONS, "0" * 64)
        self._send_slowly(source, header)

    def hog(self, source: str) -> None:
        """Do the same as an enrolled site."""
        self._send_slowly(source, sign_request(self.member.key, "POST", CONTRIBUTIONS, "0" * 64))

    def _send_slowly(self, source: str, header: str) -> None:
        connection = self._connect(source)
        head = f"POST {CONTRIBUTIONS} HTTP/1.1\r\nHost: hub\r\n{HEADER}: {header}\r\n"
        connection.sendall(f"{head}Content-Length: 60000\r\n\r\n".encode())
        for _ in range(20):
            connection.sendall(b"x")
            if self.stopped.wait(0.5):
                break
        connection.close()

    def send_much(self, source: str) -> None:
        """Upload a file of public records without a cookie."""

        def parts() -> Iterator[bytes]:
            for _ in range(1024):
                yield b"x" * (1 << 20)

        with self.proxy.client(source) as client:
            client.post("/studies/demo/files/x.csv", content=parts())

    def send_form(self, source: str) -> None:
        """Send a login form of many parts."""
        kind = {"content-type": "multipart/form-data; boundary=b"}
        with self.proxy.client(source) as client:
            client.post("/login", content=b"--b\r\na: b\r\n" * 30_000, headers=kind)

    def guess(self, source: str) -> None:
        with self.proxy.client(source) as client:
            client.post("/api/sessions", json={"name": "bea", "password": "a wrong one"})

    def send_junk(self, source: str) -> None:
        """Submit, as an enrolled site, what is no contribution."""
        with self.proxy.client(source) as client:
            submit(client, self.member, os.urandom(2000))


@pytest.mark.soak
def test_an_attack_on_a_live_hub_behind_nginx(
    tmp_path: Path, url: str | None, tools: Any, record_property: Any
) -> None:
    """Meanwhile honest sites submit and coordinators look, each within seconds; nothing is lost."""
    with prepared(tmp_path, url, tools, 5) as world, ExitStack() as stack:
        *honest, member = world.wards.values()
        hub = HubProcess(tmp_path / "hub", url, log=tmp_path / "log")
        hub.job |= {
            "proxies": ["127.0.0.1"],
            "by_key": (5.0, 100.0),
            "by_guess": (0.2, 10.0),
            "by_account": (1 / 60, 10.0),
        }
        stack.callback(hub.end)
        hub.start()
        stack.callback(hub.kill)
        hub.wait()
        changes = {"http://127.0.0.1:8440": hub.address}
        proxy = stack.enter_context(nginx(tmp_path / "nginx", server_text(), changes))
        client = stack.enter_context(proxy.client("127.0.0.99"))
        assert log_in(client, "bea", PASSWORD).status_code == 303
        before = _resident(hub.pid)
        attack = Attack(proxy, member)
        for thread in attack.threads:
            thread.start()
        slowest, sequence, until = 0.0, 0, time.monotonic() + SOAK_SECONDS
        while time.monotonic() < until:
            sequence += 1
            for ward in honest:
                body = ward.train(world.study, sequence=sequence).sealed.to_bytes()
                began = time.monotonic()
                assert submit(client, ward, body).status_code == 201
                assert client.get("/studies").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
        attack.stopped.set()
        for thread in attack.threads:
            thread.join(60)
        assert httpx.get(f"{hub.address}/readyz").status_code == 200
        grown = _resident(hub.pid) - before
        assert slowest < 20.0
        assert grown < 256 << 20
        deadline = time.monotonic() + 60
        while world.hub.store.due() and time.monotonic() < deadline:
            time.sleep(0.1)
        rows = world.hub.store.contributions("demo")
        assert len(rows) == sequence * len(honest)
        assert {row["site"] for row in rows} == {ward.name for ward in honest}
        assert world.hub.store.release("demo")["n_sites"] == len(honest)
        world.hub.store.verify()
        assert list((tmp_path / "hub" / "files" / "incoming").iterdir()) == []
        actions = [one["action"] for one in world.hub.store.audit(limit=100_000)]
        assert 0 < actions.count("contribution refused") <= 22
        assert 0 < actions.count("login failed") <= 22
        lines = len((tmp_path / "log").read_text().splitlines())
        assert lines < 2000
        assert "Traceback" not in (tmp_path / "log").read_text()
        facts = {"rounds": sequence, "slowest": slowest, "grown": grown, "log lines": lines}
        record_property("numbers", {**facts, "attacks": attack.answers})


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
