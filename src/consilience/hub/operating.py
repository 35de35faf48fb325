"""What the hub's operator does from the command line.

Every command works beside a running hub, on the same folder and database.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from consilience.errors import SettingsError
from consilience.hub.hub import Hub, Settings
from consilience.hub.store import Row, Store
from consilience.privacy.ledger import Ledger
from consilience.protocol import Refusal
from consilience.study.axes import find_axes_problem
from consilience.study.check import StudyRefused
from consilience.study.records import file_digest
from consilience.study.study import Study

OPERATOR = "operator"
PORT = 8440

PathLike = str | os.PathLike[str]

logger = logging.getLogger("consilience.hub")


@contextmanager
def opened(folder: PathLike, url: str | None = None) -> Iterator[Hub]:
    """Open a hub for one command; a refusal becomes a `SettingsError`."""
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
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    cert: PathLike | None = None,
    key: PathLike | None = None,
    proxies: Sequence[str] = (),
) -> None:
    """Run the hub until it is stopped.

    Parameters
    ----------
    host, port
        The network address.
    cert, key
        Certificate and private key files for HTTPS. Without them, only this machine itself may
        connect.
    proxies
        Network addresses of reverse proxies that speak HTTPS to the sites. The hub believes them,
        and nobody else, about whom they speak for.
    """
    from consilience.hub.api.app import create_app
    from consilience.hub.api.server import run

    if cert is None and not _is_local(host):
        raise SettingsError(
            f"The hub cannot listen on {host!r} without a certificate, because passwords would be "
            "readable on the network. Nothing was started. Pass a certificate and its key, or "
            "listen on 127.0.0.1 behind a reverse proxy."
        )
    for proxy in proxies:
        _check_proxy(proxy)
    files = [None if path is None else os.fspath(path) for path in (cert, key)]
    tls = (files[0], files[1])
    app = create_app(settings)
    if shortage := app.state.hub.store.find_shortage():
        logger.warning(shortage)
    run(app, settings, address=(host, port), tls=tls, proxies=proxies)


def read_secret(name: str, path: PathLike | None) -> str | None:
    """Return a secret from the environment, or from a file that nobody else can read."""
    if path is None:
        return os.environ.get(name)
    file = Path(path)
    try:
        mode, content = file.stat().st_mode, file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise SettingsError(
            f"The file of a secret, {file.name!r}, cannot be read. Nothing was started. Give the "
            "path of a text file that the hub's user can read."
        ) from None
    if mode & 0o077 or not content:
        raise SettingsError(
            f"The file of a secret, {file.name!r}, is empty, or others can read it. Nothing was "
            f"started. Run `chmod 600 {file.name}`, and replace a secret that others have read."
        )
    return content


def _check_proxy(address: str) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise SettingsError(
            f"A proxy is named by its network address, as in 10.0.0.9. Got {address!r}. Nothing "
            "was started."
        ) from None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def add_coordinator(folder: PathLike, name: str, password: str, *, url: str | None = None) -> None:
    """Add a coordinator of every study, or change a known account's password."""
    with opened(folder, url) as hub:
        if hub.store.account(name) is None:
            hub.accounts.add(name, password, OPERATOR)
        else:
            hub.accounts.set_password(name, password, OPERATOR)


def add_study(folder: PathLike, path: PathLike, *, url: str | None = None) -> Row:
    """Add a study file, and the public files that lie beside it."""
    file = Path(path)
    study = Study.load(file)
    for part in study.files:
        beside = file.with_name(part.file)
        if not beside.exists() or file_digest(beside) != part.sha256:
            raise SettingsError(
                f"The study names the public file {part.file!r}, but the file beside it is missing "
                "or has another digest. Nothing was stored. Put the right file there, or write "
                "its digest into the study."
            )
    problem = find_axes_problem(study, file.parent)
    if problem is not None:
        raise StudyRefused([problem])
    with opened(folder, url) as hub:
        row = hub.add_study(file.read_text(encoding="utf-8"), OPERATOR)
        for part in study.files:
            arrived = hub.store.files.new()
            shutil.copyfile(file.with_name(part.file), arrived)
            hub.keep_public_file(study.name, part.file, arrived, part.sha256, OPERATOR)
    return row


def backup(folder: PathLike, path: PathLike, *, url: str | None = None) -> tuple[int, str]:
    """Write a consistent copy of everything into a new folder while the hub runs.

    Return the audit log's length and head.

    Privacy
    -------
    The copy holds the hub's key and, where a study trusts the hub, exact learners: keep it as safe
    as the hub.
    """
    target = Path(path)
    if target.exists():
        raise SettingsError(
            f"The backup cannot be written to {target.name!r}, which exists. Nothing was written. "
            "Choose a new folder."
        )
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    with opened(folder, url) as hub:
        draft.mkdir(parents=True, mode=0o700)
        try:
            hub.store.copy_to(draft)
            shutil.copy2(hub.store.folder / "hub.key", draft / "hub.key")
            if (seals := hub.store.folder / "seals").exists():
                shutil.copytree(seals, draft / "seals")
            hub.ledger.backup(draft / "hub.ledger")
            with closing(Store(draft)) as copy:
                head = copy.verify()
            draft.replace(target)
            return head
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def restore(path: PathLike, folder: PathLike, *, url: str | None = None) -> tuple[int, str]:
    """Make a hub from a backup, in a new folder and on any empty database.

    Return the audit log's length and head. The backup does not know what happened after it was
    made, so what could be misused is voided: open invitations, sessions, links of drafts, and the
    right to draw noise, which `allow` gives back. Keys that were revoked since must be revoked
    again, and accounts are as they were: their passwords, roles, identities and second factors.
    """
    source, target = Path(path), Path(folder)
    if not (source / "hub.key").exists() or not (source / "hub.sqlite").exists():
        raise SettingsError(
            f"There is no backup of a hub in {source.name!r}. Nothing was restored. Give the "
            "folder that `hub backup` wrote."
        )
    if target.exists() and any(target.iterdir()):
        raise SettingsError(
            f"The folder {target.name!r} is not empty. Nothing was restored. Choose a new one."
        )
    if url is not None:
        with tempfile.TemporaryDirectory() as aside, closing(Store(aside, url)) as rows:
            if rows.audit(limit=1):
                raise SettingsError(
                    "The database already has rows of a hub. Nothing was restored. Give an empty "
                    "database."
                )
            shutil.copyfile(source / "hub.sqlite", Path(aside) / "hub.sqlite")
            with closing(Store(aside)) as copy:
                rows.take_rows(copy)
    shutil.copytree(source, target, dirs_exist_ok=True)
    if url is not None:
        (target / "hub.sqlite").unlink()
    target.chmod(0o700)
    datasets = Ledger(target / "hub.ledger").datasets()
    with opened(target, url) as hub:
        hub.store.void_old_rights(datasets, OPERATOR)
        return hub.store.verify()
