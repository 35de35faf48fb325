"""The hub behind a real nginx, with the very configuration that docs/deployment.md prints."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.hub import operating
from consilience.hub.api.app import create_app
from consilience.hub.auth import hash_password
from consilience.protocol import HEADER, digest, sign_request
from forks import HubProcess, Mother, settle
from proxies import (
    CONTRIBUTIONS,
    PAGE,
    PASSWORD,
    certify,
    log_in,
    nginx,
    server_text,
    several_machines_text,
    submit,
)

# ------------------------------------------------------------------------------- what the page says


def test_the_service_of_the_page_is_behind_its_proxy() -> None:
    service = re.search(r"ExecStart=.*?\n.*?\n", PAGE)
    assert service is not None
    assert "--behind-proxy" in service[0]
    assert "--host 127.0.0.1 --port 8440" in service[0]
    assert "--proxy 10.0.0.9" in PAGE


# ------------------------------------------------------------------------------------- a real nginx


@contextmanager
def prepared(folder: Path, url: str | None, tools: Any, n_wards: int) -> Iterator[Any]:
    """Yield a world that knows sites and a coordinator; its own hub serves nobody else."""
    with tools.Client(create_app(tools.quick(folder / "hub", url))) as client:
        world = tools.World(client, folder)
        world.study = world.add_study()
        for i in range(n_wards):
            world.ward(f"ward {i}")
        world.hub.store.add_account("bea", hash_password(PASSWORD), "operator")
        yield world


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
        header = sign_request(
            SigningKey.generate(), world.hub.key.public, "POST", CONTRIBUTIONS, "0" * 64
        )
        for path in (CONTRIBUTIONS, "/studies/demo/files/x.csv", "/new-study"):
            answer = stranger.post(path, content=b"x" * (8 << 20), headers={HEADER: header})
            assert answer.status_code == 401, path
        assert list((tmp_path / "hub" / "files" / "incoming").iterdir()) == []
        # Counters are for this machine, which does not go through the proxy. The connection of a
        # refused upload may be closed at any moment, so this takes a new one.
        with proxy.client("127.0.0.5") as again:
            assert again.get("/metrics").status_code == 401
        assert httpx.get(f"{hub.address}/metrics").status_code == 200
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_workers_on_several_machines_behind_the_nginx_of_the_page(
    tmp_path: Path, postgres: Any, bucket: Any, tools: Any
) -> None:
    """Each has a folder of its own; they share a database, a bucket and the hub's key.

    They speak HTTPS to the proxy, and believe it alone about the sender's address.
    """
    url = postgres.database()
    cert, key = certify(tmp_path, "hub-worker")
    with prepared(tmp_path, url, tools, 2) as world, ExitStack() as stack:
        with operating.opened(tmp_path / "hub", url) as hub:
            hub.store.use_bucket("s3://shared/hub", "operator")
        mother = Mother("hub", tmp_path / "log")
        stack.callback(mother.end)
        workers = []
        for folder in (tmp_path / "hub", world.second_folder()):
            worker = HubProcess(folder, url, mother=mother)
            tls = {"cert": str(cert), "key": str(key), "proxies": ["127.0.0.1"]}
            worker.job |= {**tls, "by_guess": (1e-6, 1), "small_bytes": -1}
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
        # Each file goes to the bucket through one of the workers, and any of them serves it.
        north, south = world.wards.values()
        for ward in (north, south):
            assert submit(client, ward, ward.train(world.study).sealed.to_bytes()).is_success
        settle(tmp_path / "hub", url)
        workers[0].kill()  # nginx asks the other one, which has no file of its own but the key
        assert client.get("/studies").status_code == 200
        body = north.train(world.study, sequence=2).sealed.to_bytes()
        assert submit(client, north, body).is_success
        settle(tmp_path / "elsewhere", url)
        path = "/api/studies/demo/release"
        header = sign_request(south.key, world.hub.key.public, "GET", path, digest(b""))
        answer = client.get(path, headers={HEADER: header})
        release = Release.load(answer.content, key=world.hub.key.public)
        assert len(release.sources) == 2
        entries = world.hub.store.audit(limit=1000)
        assert [one["action"] for one in entries].count("contribution accepted") == 3
        kept = {one.key for one in bucket.objects.all()}
        named = {row["sha256"] for row in world.hub.store.contributions("demo")}
        assert {f"hub/{name}" for name in named} <= kept
        assert not (tmp_path / "elsewhere" / "hub.sqlite").exists()
    assert "Traceback" not in (tmp_path / "log").read_text()
