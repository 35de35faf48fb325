"""A real nginx with the very configuration that docs/deployment.md prints."""

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest

from consilience.protocol import HEADER, digest, sign_request

PAGE = (Path(__file__).parents[1] / "docs" / "deployment.md").read_text()
PASSWORD = "correct horse battery"
CONTRIBUTIONS = "/api/studies/demo/contributions"


def printed(beginning: str) -> str:
    """Return the nginx block of the page that begins with this line."""
    blocks = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    return next(block for block in blocks if block.startswith(beginning))


def server_text() -> str:
    return printed("# /etc/nginx/conf.d/consilience.conf")


def several_workers_text() -> str:
    """Return the configuration for two workers on one machine, as the page says to write it."""
    block = printed("upstream hub {\n  server 127.0.0.1:8440")
    return block + server_text().replace(
        "proxy_pass http://127.0.0.1:8440;", "proxy_pass http://hub;"
    )


def several_machines_text() -> str:
    """Return the configuration for workers on several machines, as the page says to write it."""
    block = printed("upstream hub {\n  server 10.0.0.1")
    upstream, _, inside = block.partition("# and in `location /`:\n")
    lines = "".join(f"  {line.removeprefix('#')}\n" for line in inside.splitlines())
    return upstream + server_text().replace("    proxy_pass http://127.0.0.1:8440;\n", lines)


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
    certificate: Path

    @property
    def address(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def client(self, source: str = "127.0.0.1") -> httpx.Client:
        """Return a client with a network address of its own: all of 127/8 is this machine."""
        transport = httpx.HTTPTransport(verify=self.trust, local_address=source)
        return httpx.Client(transport=transport, base_url=self.address, timeout=30)

    def connect(self, source: str) -> ssl.SSLSocket:
        """Return an open connection on which nothing was sent."""
        address = ("127.0.0.1", self.port)
        plain = socket.create_connection(address, timeout=10, source_address=(source, 0))
        return self.trust.wrap_socket(plain, server_hostname="127.0.0.1")


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
    proxy = Proxy(folder, port, plain, ssl.create_default_context(cafile=str(cert)), cert)
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


def submit(client: httpx.Client, ward: Any, body: bytes) -> httpx.Response:
    header = sign_request(ward.key, ward.hub_key, "POST", CONTRIBUTIONS, digest(body))
    return client.post(CONTRIBUTIONS, content=body, headers={HEADER: header})


def log_in(client: httpx.Client, name: str, password: str, **headers: str) -> httpx.Response:
    """Log in as a browser does, with the token of the page."""
    token = re.search(r'name="token" value="([0-9a-f]+)"', client.get("/login").text)
    assert token is not None
    form = {"name": name, "password": password, "token": token[1]}
    return client.post("/login", data=form, headers=headers)
