"""A hub on SQLite and on PostgreSQL, sites that train for it, and their signed requests."""

import hashlib
import json
import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.hub.api.app import create_app
from consilience.hub.auth import Rate, new_token
from consilience.hub.hub import Hub, Settings
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from consilience.protocol import HEADER, digest, sign_request
from consilience.study.study import Study

BIN = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/lib/postgresql/bin"))
BACKENDS = ("sqlite", "postgresql")


# --------------------------------------------------------------------------------------- PostgreSQL


def _programs() -> Path | None:
    found = [
        Path(p)
        for p in (BIN, *map(Path, os.environ.get("PATH", "").split(os.pathsep)))
        if (Path(p) / "initdb").exists()
    ]
    return found[0] if found else None


class Postgres:
    """A server in a temporary folder, run by a user that is not root."""

    def __init__(self, programs: Path, *, durable: bool) -> None:
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="consilience-pg-"))
        self.durable = durable
        self.user: list[str] = []
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres" if _exists("postgres") else "nobody")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self.user = [
                "setpriv",
                f"--reuid={owner.pw_uid}",
                f"--regid={owner.pw_gid}",
                "--clear-groups",
            ]
        self._run(
            "initdb", "-D", str(self.folder / "data"), "-U", "hub", "-A", "trust", "--no-sync"
        )

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self.user, str(self.programs / program), *arguments]
        # No pipes: the server would inherit them, and waiting for their end would wait for its end.
        with (self.folder.parent / f"{self.folder.name}.out").open("ab") as out:
            subprocess.run(command, check=True, cwd="/", stdout=out, stderr=out, timeout=60)

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c max_connections=200"
        options += "" if self.durable else " -c fsync=off -c synchronous_commit=off"
        log = str(self.folder / "log")
        self._run(
            "pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", log, "-o", options, "start"
        )

    def pid(self) -> int:
        return int((self.folder / "data" / "postmaster.pid").read_text().split()[0])

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder.parent / f"{self.folder.name}.out").unlink(missing_ok=True)

    def database(self) -> str:
        import psycopg

        name = "hub_" + uuid.uuid4().hex[:12]  # a schema is as good as a database and quick to make
        with psycopg.connect(
            host=str(self.folder), user="hub", dbname="postgres", autocommit=True
        ) as db:
            db.execute(f"CREATE SCHEMA {name}")
        return (
            f"postgresql+psycopg://hub@/postgres?host={self.folder}&options=-csearch_path%3D{name}"
        )


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _postgres(*, durable: bool) -> Iterator[Postgres]:
    programs = _programs()
    if programs is None:
        notice = "PostgreSQL's programs are not on this machine"
        if os.environ.get("CONSILIENCE_NEEDS_POSTGRES") == "1":
            pytest.fail(notice)
        pytest.skip(notice)
    server = Postgres(programs, durable=durable)
    try:
        server.start()
        yield server
    finally:
        if (server.folder / "data" / "postmaster.pid").exists():
            server.stop()
        server.remove()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    yield from _postgres(durable=False)


@pytest.fixture
def durable_postgres() -> Iterator[Postgres]:
    yield from _postgres(durable=True)


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest) -> str | None:
    """The database's address: None is SQLite in the hub's own folder."""
    return None if request.param == "sqlite" else request.getfixturevalue("postgres").database()


# -------------------------------------------------------------------------------- studies and sites


def table(n: int, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    a, b = generator.random(n), generator.random(n)
    return {"a": a, "b": b, "y": np.where(a + b + generator.normal(0, 0.2, n) > 1, "yes", "no")}


def write_csv(path: Path, columns: dict[str, Any]) -> str:
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def study_text(
    name: str = "demo", *, min_sites: int = 2, aggregator: str = 'name = "Average"', **parts: str
) -> str:
    more = "\n".join(
        f'[{part}]\nfile = "{part}.csv"\nsha256 = "{sha}"'
        for part, sha in parts.items()
        if part != "hub"
    )
    return f"""
[study]
name = "{name}"
purpose = "A test."
[privacy]
epsilon_min = 0.1
epsilon_max = 5.0
min_sites = {min_sites}
hub = "{parts.get("hub", "untrusted")}"
[schema]
label = "y"
classes = ["no", "yes"]
columns = [
  {{kind = "numeric", name = "a", low = 0.0, high = 1.0}},
  {{kind = "numeric", name = "b", low = 0.0, high = 1.0}},
]
[learner]
name = "PrivateLogisticRegression"
[aggregator]
{aggregator}
{more}
"""


@dataclass
class Ward:
    """A site: its key, its ledger, and its records."""

    name: str
    folder: Path
    seed: int = 0
    key: SigningKey = field(default_factory=SigningKey.generate)
    hub_key: str = ""

    @property
    def ledger(self) -> Ledger:
        ledger = Ledger(self.folder / f"{self.name}.ledger")
        ledger.allow("ward", Budget(epsilon=1000.0))
        return ledger

    def train(
        self,
        study: Study,
        *,
        sequence: int = 1,
        epsilon: float = 1.0,
        key: SigningKey | None = None,
    ) -> Contribution:
        ledger = None if study.trusted else self.ledger
        facts = {
            "site": self.name,
            "signing": key or self.key,
            "dataset": "ward",
            "sequence": sequence,
        }
        return study.train(table(200, self.seed), ledger, epsilon=epsilon, **facts)


class Client:
    """Send requests straight into the app, in a thread with a loop, from start-up to shut-down."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __enter__(self) -> "Client":
        self._thread = start_blocking_portal()
        self._portal = self._thread.__enter__()
        self._life = self._portal.wrap_async_context_manager(
            self.app.router.lifespan_context(self.app)
        )
        self._life.__enter__()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://hub")
        return self

    def __exit__(self, *error: Any) -> None:
        self._portal.call(self._client.aclose)
        self._life.__exit__(None, None, None)
        self._thread.__exit__(None, None, None)

    def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        return self._portal.call(lambda: self._client.request(method, path, **content))

    def get(self, path: str, **content: Any) -> httpx.Response:
        return self.request("GET", path, **content)

    def post(self, path: str, **content: Any) -> httpx.Response:
        return self.request("POST", path, **content)

    def put(self, path: str, **content: Any) -> httpx.Response:
        return self.request("PUT", path, **content)

    def delete(self, path: str, **content: Any) -> httpx.Response:
        return self.request("DELETE", path, **content)


class World:
    """A hub behind a client, a coordinator who is logged in, and as many sites as a test wants."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.app: Any = client.app
        self.hub: Hub = self.app.state.hub
        self.combiner = self.app.state.combiner
        if self.hub.store.account("ann") is None:  # several worlds may share one database
            self.hub.store.add_account("ann", "scrypt:none", "operator")
        token, _ = new_token(self.hub.store, "ann", hours=1, kind="test")
        self.coordinator = {"authorization": f"Bearer {token}"}
        self.wards: dict[str, Ward] = {}

    def add_study(self, text: str | None = None) -> Study:
        text = text or study_text()
        assert (
            self.client.post("/api/studies", content=text, headers=self.coordinator).status_code
            == 201
        )
        return Study.from_text(text)

    def invitation(self, study: str = "demo", **options: Any) -> str:
        answer = self.client.post(
            f"/api/studies/{study}/invitations", json=options, headers=self.coordinator
        )
        return str(answer.json()["code"])

    def ward(self, name: str, study: str = "demo", **options: Any) -> Ward:
        """Return a site that has just enrolled."""
        ward = self.wards.setdefault(name, Ward(name, self.folder, seed=len(self.wards)))
        ward.hub_key = self.hub.key.public
        facts = {"invitation": self.invitation(study, **options), "site": name}
        answer = self.call(ward, "POST", "/api/enrolments", json.dumps(facts).encode())
        assert answer.status_code == 201, answer.text
        return ward

    def call(self, ward: Ward, method: str, path: str, body: bytes = b"", **signing: Any) -> Any:
        key, hub_key = signing.pop("key", ward.key), self.hub.key.public
        header = sign_request(key, hub_key, method, path, digest(body), **signing)
        return self.client.request(method, path, content=body, headers={HEADER: header})

    def submit(
        self, ward: Ward, contribution: Contribution | bytes, study: str = "demo", **signing: Any
    ) -> Any:
        body = contribution if isinstance(contribution, bytes) else contribution.sealed.to_bytes()
        return self.call(ward, "POST", f"/api/studies/{study}/contributions", body, **signing)

    def second_folder(self) -> Path:
        """Return the folder of a worker on another machine, which was given only the hub's key."""
        folder = self.folder / "elsewhere"
        folder.mkdir()
        shutil.copy(self.folder / "hub" / "hub.key", folder)
        return folder

    def fill(self, study: Study, n_sites: int, *, epsilon: float = 1.0) -> list[Ward]:
        """Let sites enrol and contribute."""
        wards = [self.ward(f"ward {i}", study.name) for i in range(n_sites)]
        for ward in wards:
            answer = self.submit(ward, ward.train(study, epsilon=epsilon), study.name)
            assert answer.status_code == 201, answer.text
        return wards


def code(answer: Any) -> str:
    """Return the code of a refusal, after checking its shape and status."""
    from consilience.protocol import ERRORS

    error = answer.json()["error"]
    assert set(error) == {"code", "message", "fix"}
    assert answer.status_code == ERRORS[error["code"]][0]
    assert error["fix"] == ERRORS[error["code"]][1]
    return str(error["code"])


def quick(folder: Path, url: str | None = None, **more: Any) -> Settings:
    """Return settings under which tests need not wait."""
    free = Rate(1e6, 1e6)
    names = ("by_address", "by_key", "by_guess", "by_account")
    rates = dict.fromkeys(names, free)
    return Settings(folder, url, **{"combine_itself": False, **rates, **more})


@pytest.fixture
def world(tmp_path: Path, url: str | None, request: Any) -> Iterator[World]:
    """A hub on each database; a parameter holds further settings."""
    with Client(
        create_app(quick(tmp_path / "hub", url, **getattr(request, "param", {})))
    ) as client:
        yield World(client, tmp_path)


@pytest.fixture
def sqlite_world(tmp_path: Path, request: Any) -> Iterator[World]:
    with Client(create_app(quick(tmp_path / "hub", **getattr(request, "param", {})))) as client:
        yield World(client, tmp_path)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return an empty bucket on a server that speaks S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    facts = {
        "ENDPOINT_URL": f"http://{host}:{port}",
        "ACCESS_KEY_ID": "k",
        "SECRET_ACCESS_KEY": "s",
    }
    for name, value in {**facts, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    httpx.post(
        f"{facts['ENDPOINT_URL']}/moto-api/reset"
    )  # buckets outlive the server within a process
    boto3.client("s3").create_bucket(Bucket="shared")
    try:
        yield boto3.resource("s3").Bucket("shared")
    finally:
        server.stop()


@pytest.fixture
def tools() -> Any:
    """What tests need beside the fixtures: conftest cannot be imported under importlib mode."""

    class Tools:
        pass

    for name in ("code", "quick", "study_text", "table", "write_csv"):
        setattr(Tools, name, staticmethod(globals()[name]))
    Tools.Ward, Tools.World, Tools.Client = Ward, World, Client  # type: ignore[attr-defined]
    return Tools
