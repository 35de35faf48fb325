"""What the hub's operator does from the command line; works beside a running hub, on the same folder and database."""

from __future__ import annotations

import ipaddress
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from consilience.errors import SettingsError
from consilience.hub.auth import hash_password
from consilience.hub.combining import Combiner
from consilience.hub.hub import Hub, Settings
from consilience.hub.store import Row, Store
from consilience.hub.store.backup import backup_rows, copy_files, copy_rows, void_old_rights
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Balance, Ledger
from consilience.protocol import Refusal
from consilience.study.records import file_digest
from consilience.study.study import Study

OPERATOR = "operator"


@contextmanager
def opened(folder: str | os.PathLike[str], url: str | None = None) -> Iterator[Hub]:
    """Open a hub for one command; a refusal becomes the error of a wrong setting."""
    hub = Hub(Settings(Path(folder), url))
    try:
        yield hub
    except Refusal as refusal:
        raise SettingsError(
            f"{refusal.message} Nothing was changed. {refusal.body['error']['fix']}"
        ) from None
    finally:
        hub.close()


def serve(
    folder: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    url: str | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    behind_proxy: bool = False,
    **settings: Any,
) -> None:
    """Run the hub until it is stopped.

    Parameters
    ----------
    cert, key
        Certificate and private key files for HTTPS. Without them only this machine itself may
        connect.
    behind_proxy
        A reverse proxy on this machine speaks HTTPS and tells the sender's address; plain HTTP is
        then right.
    settings
        Further fields of `Settings`.
    """
    import uvicorn

    from consilience.hub.api.app import create_app

    if cert is None and not behind_proxy and not _is_local(host):
        raise SettingsError(
            f"The hub was to listen on {host!r} without a certificate: passwords would travel "
            "readable. Nothing was started. Pass cert and key, or listen on 127.0.0.1 behind a "
            "reverse proxy."
        )
    app = create_app(Settings(Path(folder), url, **settings))
    uvicorn.run(
        app,
        host=host,
        port=port,
        ssl_certfile=None if cert is None else os.fspath(cert),
        ssl_keyfile=None if key is None else os.fspath(key),
        proxy_headers=behind_proxy,
        forwarded_allow_ips="127.0.0.1" if behind_proxy else "",
        server_header=False,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=30,
    )


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def add_coordinator(
    folder: str | os.PathLike[str], name: str, password: str, *, url: str | None = None
) -> None:
    """Add a coordinator, or give one a new password."""
    if not (1 <= len(name) <= 100 and name.isprintable()):
        raise SettingsError(
            "A coordinator's name has 1 to 100 printable characters. Nothing was stored."
        )
    stored = hash_password(password)
    with opened(folder, url) as hub:
        hub.store.add_coordinator(name, stored, OPERATOR)


def add_study(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], *, url: str | None = None
) -> Row:
    """Take a study file, and the public files that lie beside it."""
    file = Path(path)
    study = Study.load(file)
    parts = [part for part in (study.public, study.test) if part is not None]
    for part in parts:
        beside = file.with_name(part.file)
        if not beside.exists() or file_digest(beside) != part.sha256:
            raise SettingsError(
                f"The study names the public file {part.file!r}, and the one beside it is missing "
                "or another. Nothing was stored. Put the file there, or write its own digest "
                "into the study."
            )
    with opened(folder, url) as hub:
        row = hub.add_study(file.read_text(encoding="utf-8"), OPERATOR)
        for part in parts:
            arrived = hub.store.files.new()
            shutil.copyfile(file.with_name(part.file), arrived)
            hub.keep_public_file(study.name, part.file, arrived, part.sha256, OPERATOR)
    return row


def invite(
    folder: str | os.PathLike[str],
    study: str,
    *,
    site: str | None = None,
    fetch_only: bool = False,
    days: float = 7.0,
    url: str | None = None,
) -> tuple[str, str]:
    """Return a one-time code for one site, and when it expires."""
    with opened(folder, url) as hub:
        return hub.invite(study, OPERATOR, site=site, fetch_only=fetch_only, days=days)


def allow(
    folder: str | os.PathLike[str], study: str, budget: Budget, *, url: str | None = None
) -> Balance:
    """Set what the hub may spend, in total, on a study whose aggregator draws noise."""
    with opened(folder, url) as hub:
        return hub.allow(study, budget, OPERATOR)


def aggregate(
    folder: str | os.PathLike[str],
    study: str,
    *,
    request: str | None = None,
    url: str | None = None,
) -> Row:
    """Combine a study now and return its release; where that draws noise, the same `request` never pays twice."""
    with opened(folder, url) as hub:
        combiner = Combiner(hub)
        return (
            combiner.combine(study)
            if request is None
            else combiner.command(study, request, OPERATOR)
        )


def verify(folder: str | os.PathLike[str], *, url: str | None = None) -> tuple[int, str]:
    """Check the audit chain and every file; return the log's length and its head, to be written down elsewhere."""
    with opened(folder, url) as hub:
        return hub.verify()


def backup(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], *, url: str | None = None
) -> tuple[int, str]:
    """Write a consistent copy of everything into a new folder while the hub runs; return the audit log's head.

    Privacy
    -------
    The copy holds the hub's key and, where a study trusts the hub, exact learners: keep it as safe
    as the hub.
    """
    target = Path(path)
    if target.exists():
        raise SettingsError(
            f"The hub was to be copied to {target.name!r}, which exists. Nothing was written."
        )
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    with opened(folder, url) as hub:
        draft.mkdir(parents=True, mode=0o700)
        try:
            backup_rows(hub.store, draft)
            copy_files(hub.store, draft)
            shutil.copy2(hub.store.folder / "hub.key", draft / "hub.key")
            hub.ledger.backup(draft / "hub.ledger")
            with closing(Store(draft)) as copy:
                head = copy.verify()
            draft.replace(target)
            return head
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def restore(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], *, url: str | None = None
) -> tuple[int, str]:
    """Make a hub from a backup in a new folder, on any database that is empty; return the audit log's head.

    What happened after the backup is unknown to it, so what could be misused is voided: open
    invitations, sessions, and the right to draw noise, which `allow` gives back. Keys that were
    revoked since must be revoked again.
    """
    source, target = Path(path), Path(folder)
    if not (source / "hub.key").exists() or not (source / "hub.sqlite").exists():
        raise SettingsError(
            f"There is no backup of a hub in {source.name!r}. Nothing was restored."
        )
    if target.exists() and any(target.iterdir()):
        raise SettingsError(
            f"The folder {target.name!r} is not empty. Nothing was restored. Choose a new one."
        )
    if url is not None:
        with tempfile.TemporaryDirectory() as aside, closing(Store(aside, url)) as rows:
            if rows.audit(limit=1):
                raise SettingsError(
                    "The database has rows of a hub. Nothing was restored. Give an empty one."
                )
            shutil.copyfile(source / "hub.sqlite", Path(aside) / "hub.sqlite")
            with closing(Store(aside)) as copy:
                copy_rows(copy, rows)
    shutil.copytree(source, target, dirs_exist_ok=True)
    if url is not None:
        (target / "hub.sqlite").unlink()
    target.chmod(0o700)
    datasets = Ledger(target / "hub.ledger").datasets()
    with opened(target, url) as hub:
        void_old_rights(hub.store, datasets, OPERATOR)
        return hub.verify()


def use_bucket(folder: str | os.PathLike[str], address: str, *, url: str | None = None) -> int:
    """Move the hub's files to an S3-compatible bucket; return how many. Workers that run must be started again."""
    with opened(folder, url) as hub:
        return hub.store.use_bucket(address, OPERATOR)
