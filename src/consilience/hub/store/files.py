"""Files named by their SHA-256, in the hub's folder or in a bucket that several machines share."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from consilience.errors import SettingsError
from consilience.files.durable import move_durably, sync
from consilience.protocol import DIGEST
from consilience.study.records import file_digest

ADDRESS = re.compile(
    r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9._/-]*[A-Za-z0-9._-]))?/?"
)
COPIES_SECONDS = 86_400.0  # how long a copy of a bucket's file is kept in the folder


def is_whole(path: Path, sha256: str) -> bool:
    """Tell whether there is a file with this digest; one that has not changed is read once."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return _digest_at(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) == sha256


@lru_cache(maxsize=1 << 14)
def _digest_at(path: Path, *_: int) -> str | None:
    try:
        return file_digest(path)
    except FileNotFoundError:  # removed since it was found
        return None


class Files:
    """A folder of files, each named by its SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incoming = folder / "incoming"
        self.incoming.mkdir(parents=True, exist_ok=True)
        for number in range(256):
            (folder / f"{number:02x}").mkdir(exist_ok=True)
        sync(folder)

    def path(self, sha256: str) -> Path:
        """Return the path that the file with this digest has, or would have."""
        return self.folder / sha256[:2] / sha256[2:]

    def new(self) -> Path:
        """Return a new path for a file that is still arriving."""
        return self.incoming / secrets.token_hex(16)

    def keep(self, arrived: Path, sha256: str) -> Path:
        """Move a file that arrived to its place, and make it durable."""
        target = Files.path(self, sha256)
        move_durably(arrived, target)
        return target

    def copy(self, sha256: str, target: Path) -> None:
        """Copy a stored file to another path."""
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.path(sha256), target)

    def holds(self, sha256: str) -> bool:
        """Tell whether the file with this digest was kept."""
        return Files.path(self, sha256).exists()

    def remove(self, sha256: str) -> None:
        """Remove a file that no row needs any more."""
        Files.path(self, sha256).unlink(missing_ok=True)

    def sweep(self, named: set[str], older_than_seconds: float) -> int:
        """Remove files that no row names, and return how many.

        They were left behind by a hub that died after storing the file and before adding the row.
        """
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
    """Files in an S3-compatible bucket.

    The folder holds what is still arriving, and copies of what was read recently.

    boto3 finds credentials, region and endpoint (environment, profile, role); none is stored here.
    """

    def __init__(self, folder: Path, address: str) -> None:
        match = ADDRESS.fullmatch(address)
        if match is None:
            raise SettingsError(
                f"A bucket's address must be s3://NAME or s3://NAME/PREFIX. Got {address!r}. "
                "Nothing was changed."
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
        self.name, self.prefix = match[1], f"{match[2]}/" if match[2] else ""
        self._client: Any = boto3.client(
            "s3", config=Config(retries={"mode": "standard", "max_attempts": 5})
        )

    def path(self, sha256: str) -> Path:
        """Return the path of a copy, which is fetched and checked if it is not in the folder.

        If the bucket does not have the file, nothing is at the path.
        """
        place = super().path(sha256)
        if is_whole(place, sha256):
            return place
        part = self.new()
        try:
            with self._answering():
                self._client.download_file(self.name, self.prefix + sha256, str(part))
            if file_digest(part) == sha256:
                part.replace(place)
        except FileNotFoundError:
            pass
        finally:
            part.unlink(missing_ok=True)
        return place

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise boto3's own errors as those of a disk, which callers know."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (Boto3Error, BotoCoreError, ClientError) as problem:
            stated = getattr(problem, "response", {}).get("Error", {}).get("Code")
            kind = FileNotFoundError if stated in ("404", "NoSuchKey") else OSError
            raise kind(f"The bucket did not answer: {type(problem).__name__}") from problem

    def keep(self, arrived: Path, sha256: str) -> Path:
        """Store a file in the bucket, which answers when it is durable, and keep a copy."""
        with self._answering():
            self._client.upload_file(str(arrived), self.name, self.prefix + sha256)
        target = super().path(sha256)
        arrived.replace(target)
        return target

    def holds(self, sha256: str) -> bool:
        """Tell whether the bucket has the file with this digest."""
        try:
            with self._answering():
                self._client.head_object(Bucket=self.name, Key=self.prefix + sha256)
        except FileNotFoundError:
            return False
        return True

    def remove(self, sha256: str) -> None:
        """Remove a file from the bucket, and its copy."""
        super().remove(sha256)
        with self._answering():
            self._client.delete_object(Bucket=self.name, Key=self.prefix + sha256)

    def sweep(self, named: set[str], older_than_seconds: float) -> int:
        """Remove files that no row names from the bucket, and old copies from the folder.

        Return how many were removed from the bucket.
        """
        super().sweep(set(), max(older_than_seconds, COPIES_SECONDS))
        before, gone = time.time() - older_than_seconds, 0
        for name, changed in self._list_files():
            if name not in named and DIGEST.fullmatch(name) and changed <= before:
                self._client.delete_object(Bucket=self.name, Key=self.prefix + name)
                gone += 1
        return gone

    def check(self, named: set[str]) -> None:
        """Refuse a bucket that cannot be written, read and listed, or that another hub uses.

        The other hub's files would be removed, because no row of this hub names them.
        """
        probe = self.new()
        probe.write_bytes(b"consilience")
        name = f"{self.prefix}probe-{secrets.token_hex(8)}"
        try:
            self._client.upload_file(str(probe), self.name, name)
            self._client.head_object(Bucket=self.name, Key=name)
            others = [
                listed
                for listed, _ in self._list_files()
                if DIGEST.fullmatch(listed) and listed not in named
            ]
            self._client.delete_object(Bucket=self.name, Key=name)
        except Exception as problem:  # boto3's own, for address, credentials and network
            raise SettingsError(
                f"The bucket {self.name!r} cannot be used ({type(problem).__name__}). Nothing was "
                "changed. Check its name, the credentials and AWS_ENDPOINT_URL."
            ) from None
        finally:
            probe.unlink(missing_ok=True)
        if others:
            raise SettingsError(
                f"The bucket {self.name!r} has {len(others)} files of another hub at "
                f"{self.prefix or '/'!r}. Nothing was changed. Choose another prefix: "
                "s3://NAME/PREFIX."
            )

    def _list_files(self) -> Iterator[tuple[str, float]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=self.prefix
        )
        for page in pages:
            for item in page.get("Contents", ()):
                yield item["Key"].removeprefix(self.prefix), item["LastModified"].timestamp()
