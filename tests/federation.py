"""A real Flower deployment on this machine, with TLS and node authentication.

SuperLink and SuperNodes are processes. Flower pins other versions of some packages than this
project does, so they run from an environment of their own: `.venv-flower`, made by `make flower`,
or the one that CONSILIENCE_FLOWER names.
"""

import datetime
import hashlib
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from consilience import Budget
from consilience.adapters.relay import Collection
from consilience.site.site import Site
from studies import study_text

ROOT = Path(__file__).parents[1]
BIN = Path(os.environ.get("CONSILIENCE_FLOWER", ROOT / ".venv-flower")) / "bin"
CONNECTION = "here"


def guide_block(name):
    """Return the code block of docs/flower.md that begins with a comment naming a file."""
    text = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
    return re.search(rf"```\w+\n(# {re.escape(name)}.*?)```", text, re.DOTALL).group(1)


def drawing_study(learner="PrivateLogisticRegression", settings=""):
    """Return a study whose aggregator draws noise, at epsilon 0.5, and its public records."""
    rows = "".join(f"{20 + i % 70},{'fm'[i % 2]},{90 + i % 100}\n" for i in range(400))
    public = f"age,sex,pressure\n{rows}".encode()
    sha256 = hashlib.sha256(public).hexdigest()
    part = f'[public]\nfile = "public.csv"\nsha256 = "{sha256}"\nlabelled = false\n'
    more = {"privacy": 'hub = "trusted"', "more": f"epsilon = 0.5\n{part}", "settings": settings}
    return study_text(learner, "SoftLabelDistillation", **more), public


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def write_certificates(folder):
    """Write a certificate authority and a certificate for this machine."""
    now = datetime.datetime.now(datetime.UTC)

    def made(name, public, issuer, signer, extensions):
        builder = (
            x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(public)
        )
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(
            now - datetime.timedelta(days=1)
        )
        builder = builder.not_valid_after(now + datetime.timedelta(days=2))
        for extension in extensions:
            builder = builder.add_extension(
                extension, critical=isinstance(extension, x509.BasicConstraints)
            )
        return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)

    authority, server = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    ca = made(
        root, authority.public_key(), root, authority, [x509.BasicConstraints(True, None), own]
    )
    (folder / "ca.crt").write_bytes(ca)
    leaf = [x509.BasicConstraints(False, None), names, above]
    (folder / "server.pem").write_bytes(made(name, server.public_key(), root, authority, leaf))
    pem = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.key").write_bytes(pem)


class Consortium:
    """Sites with outboxes, a coordinator's folder, and the app folder of the guide."""

    def __init__(self, folder, names, text, public=None, *, epsilon=3.0, delta=0.0):
        self.app, self.heart = folder / "app", folder / "heart"
        self.app.mkdir(parents=True)
        (self.app / "pyproject.toml").write_text(guide_block("app/pyproject.toml"))
        outboxes = {name: folder / name / "outbox" / "heart" for name in names}
        for place in (self.heart, *outboxes.values()):
            place.mkdir(parents=True, exist_ok=True)
            (place / "study.toml").write_text(text)
            if public is not None:
                (place / "public.csv").write_bytes(public)
        self.collection = Collection(self.heart)
        self.sites, self.nodes = {}, {}
        for name, outbox in outboxes.items():
            budget = Budget(epsilon=epsilon, delta=delta)
            self.sites[name] = Site.init(
                folder / name / "site", name=name, dataset="ward", budget=budget, allow_exact=True
            )
            self.sites[name].join_folder(outbox)
            self.nodes[name] = {
                "outbox": str(outbox.parent),
                "coordinator": self.collection.key.public,
            }
        listed = {name: site.key.public for name, site in self.sites.items()}
        (self.heart / "sites.json").write_text(json.dumps(listed))

    @property
    def study(self):
        return self.collection.study

    def submit(self, name, table, epsilon=1.0):
        """Train, and put the contribution into the outbox."""
        epsilon = None if self.study.trusted else epsilon
        path = self.sites[name].train(self.study.name, table, epsilon=epsilon)
        self.sites[name].submit(self.study.name)
        return path

    def fetched(self):
        """Return the digest of the release that each site finds in its outbox and verifies."""
        found = {name: site.fetch(self.study.name) for name, site in self.sites.items()}
        return {name: release.digest for name, release in found.items() if release is not None}


class Federation:
    """One SuperLink and its SuperNodes; `start` what `kill` ended as often as you like."""

    def __init__(self, folder, nodes):
        self.folder, self.port = folder, free_port()
        self.nodes = dict(nodes)  # name -> node config
        self.ports = {name: free_port() for name in self.nodes}
        self.processes = {}
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        for place in ("flwr", "certificates", "keys", "logs"):
            (folder / place).mkdir(parents=True)
        write_certificates(folder / "certificates")
        for name in self.nodes:
            key = ec.generate_private_key(ec.SECP384R1())
            private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
            (folder / "keys" / name).write_bytes(private)
            public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            (folder / "keys" / f"{name}.pub").write_bytes(public)
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder}/certificates/ca.crt"\n'
        )

    def __enter__(self):
        self.start("superlink")
        for name in self.nodes:
            self.flwr("supernode", "register", self.folder / "keys" / f"{name}.pub", CONNECTION)
            self.start(name)
        return self

    def __exit__(self, *_):
        for name in reversed(list(self.processes)):
            self.kill(name)

    def start(self, name):
        """Start the SuperLink or a SuperNode; return when the SuperLink answers."""
        certificates = self.folder / "certificates"
        if name == "superlink":
            command = [
                "flower-superlink",
                "--port",
                self.port,
                "--ssl-ca-certfile",
                certificates / "ca.crt",
            ]
            command += [
                "--ssl-certfile",
                certificates / "server.pem",
                "--ssl-keyfile",
                certificates / "server.key",
            ]
            command += ["--enable-supernode-auth", "--database", self.folder / "state.db"]
            command += ["--disable-runtime-dependency-installation"]
        else:
            command = [
                "flower-supernode",
                "--superlink",
                f"127.0.0.1:{self.port}",
                "--port",
                self.ports[name],
            ]
            command += ["--root-certificates", certificates / "ca.crt"]
            command += ["--auth-supernode-private-key", self.folder / "keys" / name]
            command += [
                "--node-config",
                " ".join(f'{key}="{value}"' for key, value in self.nodes[name].items()),
            ]
        whole = [str(BIN / command[0]), *map(str, command[1:])]
        if name != "superlink":
            # A SuperNode that was killed is let in again when its heartbeats are missed, after up
            # to a minute; until then it exits, and whatever supervises it has to start it again, as
            # systemd does.
            whole = ["sh", "-c", 'while :; do "$@"; sleep 5; done', "supervisor", *whole]
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                whole,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if name == "superlink":
            wait_for(self._answers, 60, "the SuperLink to answer")

    def _answers(self):
        with socket.socket() as found:
            return found.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self, name):
        """End a process as a power cut would, with the processes it started."""
        process = self.processes.pop(name)
        below = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def flwr(self, *arguments):
        """Run a command of Flower's command line and return what it says, as JSON."""
        command = [str(BIN / "flwr"), *map(str, arguments), "--format", "json"]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
        return json.loads(done.stdout)

    def run(self, app, **settings):
        """Submit the app and return its run's number."""
        config = " ".join(
            f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in settings.items()
        )
        return str(self.flwr("run", app, CONNECTION, "--run-config", config)["run-id"])

    def status(self, run):
        """Return a run's status, such as running or finished:completed."""
        found = self.flwr("ls", CONNECTION, "--run-id", run)["runs"][0]
        return found["status"]

    def log(self, run):
        """Return what a run logged."""
        command = [str(BIN / "flwr"), "log", run, CONNECTION, "--show"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True).stdout

    def finish(self, run, seconds):
        """Wait for a run to finish successfully."""
        wait_for(
            lambda: self.status(run).startswith("finished"), seconds, "the run to finish", every=1.0
        )
        assert self.status(run) == "finished:completed", self.log(run)


def wait_for(done, seconds, what, every=0.2):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(every)


def descendants(pid):
    """Return the processes below one, by Linux's own account."""
    found = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [
            int(child) for task in tasks for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has just ended
        return []
    for child in children:
        found += [child, *descendants(child)]
    return found


def memory(pid):
    """Return the resident and the peak memory of a process, in MiB."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0, 0.0
    found = [re.search(rf"{name}:\s+(\d+)", status) for name in ("VmRSS", "VmHWM")]
    return tuple(
        0.0 if one is None else int(one.group(1)) / 1024 for one in found
    )  # a process that has ended has none
