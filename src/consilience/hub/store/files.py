"""Where the hub keeps bytes: files named by their SHA-256, in its folder or in a bucket that several machines share."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consilience.errors import SettingsError

ADDRESS = re.compile(
    r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9._/-]*[A-Za-z0-9._-]))?/?"
)
DIGEST = re.compile("[0-9a-f]{64}")
COPIES_SECONDS = 86_400.0  # how long what was fetched from a bucket stays near


class Files:
    """The folder of bytes, each file named by its SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incoming = folder / "incoming"
        self.incoming.mkdir(parents=True, exist_ok=True)
        for number in range(256):
            (folder / f"{number:02x}").mkdir(exist_ok=True)
        _flush(folder)

    def path(self, sha256: str) -> Path:
        """Return where the file with this digest lies, or would."""
        return self.folder / sha256[:2] / sha256[2:]

    def new(self) -> Path:
        """Return a name for bytes that are still arriving."""
        return self.incoming / secrets.token_hex(16)

    def keep(self, arrived: Path, sha256: str) -> Path:
        """Move a file that arrived to its place, so that it survives whatever happens next."""
        target = Files.path(self, sha256)
        _flush(arrived)
        arrived.replace(target)
        _flush(target.parent)
        return target

    def copy(self, sha256: str, target: Path) -> None:
        """Copy a file that is kept to another place."""
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.path(sha256), target)

    def sweep(self, named: set[str], older_than_seconds: float) -> int:
        """Remove what no row names: left behind by a hub that died between file and row. Return how many."""
        before, gone = time.time() - older_than_seconds, 0
        for path in self.folder.glob("*/*"):
            kept = path.parent != self.incoming and path.parent.name + path.name in named
            try:
                if not kept and path.stat().st_mtime <= before:
                    path.unlink()
                    gone += 1
            except FileNotFoundError:  # another worker swept it
                continue
        return gone


class Bucket(Files):
    """The same in an S3-compatible bucket; the folder holds what arrives, and copies of what was read lately.

    Credentials, region and endpoint are boto3's to find (environment, profile, role); none is ever
    stored here.
    """

    def __init__(self, folder: Path, address: str) -> None:
        found = ADDRESS.fullmatch(address)
        if found is None:
            raise SettingsError(
                f"A bucket is named s3://NAME or s3://NAME/PREFIX. Got {address!r}. Nothing was "
                "changed."
            )
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise SettingsError(
                "The hub keeps its files in a bucket, and boto3 is not installed. Nothing was "
                "opened. Install consilience[bucket]."
            ) from None
        super().__init__(folder)
        self.name, self.prefix = found[1], f"{found[2]}/" if found[2] else ""
        self._client: Any = boto3.client(
            "s3", config=Config(retries={"mode": "standard", "max_attempts": 5})
        )

    def path(self, sha256: str) -> Path:
        """Return a copy of the file, fetched and checked if it is not near; a name without a file if there is none."""
        place = super().path(sha256)
        if place.exists():
            return place
        part = self.new()
        try:
            self._client.download_file(self.name, self.prefix + sha256, str(part))
            with part.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    part.replace(place)
        except self._client.exceptions.ClientError as problem:
            if problem.response["Error"]["Code"] not in ("404", "NoSuchKey"):
                raise
        finally:
            part.unlink(missing_ok=True)
        return place

    def keep(self, arrived: Path, sha256: str) -> Path:
        """Hand a file to the bucket, which answers when it is durable, and keep a copy near."""
        self._client.upload_file(str(arrived), self.name, self.prefix + sha256)
        target = super().path(sha256)
        arrived.replace(target)
        return target

    def sweep(self, named: set[str], older_than_seconds: float) -> int:
        """Remove from the bucket what no row names, and old copies from the folder; return how many of the former."""
        super().sweep(set(), max(older_than_seconds, COPIES_SECONDS))
        before, gone = time.time() - older_than_seconds, 0
        for name, changed in self._listed():
            if name not in named and DIGEST.fullmatch(name) and changed <= before:
                self._client.delete_object(Bucket=self.name, Key=self.prefix + name)
                gone += 1
        return gone

    def check(self, named: set[str]) -> None:
        """Refuse a bucket that cannot be written, read and listed, or has another hub's files, which would be swept."""
        probe = self.new()
        probe.write_bytes(b"consilience")
        name = f"{self.prefix}probe-{secrets.token_hex(8)}"
        try:
            self._client.upload_file(str(probe), self.name, name)
            self._client.head_object(Bucket=self.name, Key=name)
            others = [
                found
                for found, _ in self._listed()
                if DIGEST.fullmatch(found) and found not in named
            ]
            self._client.delete_object(Bucket=self.name, Key=name)
        except (
            Exception
        ) as problem:  # boto3 raises its own kinds for address, credentials and network
            raise SettingsError(
                f"The bucket {self.name!r} cannot be used ({type(problem).__name__}). Nothing was "
                "changed. Check its name, the credentials and AWS_ENDPOINT_URL."
            ) from None
        finally:
            probe.unlink(missing_ok=True)
        if others:
            raise SettingsError(
                f"The bucket {self.name!r} holds {len(others)} files of another hub at "
                f"{self.prefix or '/'!r}. Nothing was changed. Choose another prefix: "
                "s3://NAME/PREFIX."
            )

    def _listed(self) -> Iterator[tuple[str, float]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=self.prefix
        )
        for page in pages:
            for found in page.get("Contents", ()):
                yield found["Key"].removeprefix(self.prefix), found["LastModified"].timestamp()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
