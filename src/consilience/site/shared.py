"""Taking part without a hub: files in a folder that sites and coordinator share."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.errors import ConsilienceError, SettingsError
from consilience.files.contribution import KIND, Contribution
from consilience.files.durable import write_durably
from consilience.files.sealed import SealedFile
from consilience.study.records import PublicFile, file_digest
from consilience.study.study import Study

PREFIX = "folder:"  # how a site's files tell a folder from a hub's address


@dataclass(frozen=True)
class SharedFolder:
    """A folder with one study, its public files, contributions and releases."""

    path: Path

    @property
    def address(self) -> str:
        """How a site's files name the folder."""
        return f"{PREFIX}{self.path.absolute()}"

    @classmethod
    def at(cls, address: str) -> SharedFolder | None:
        """Return the folder that a site's files name, or None if they name a hub."""
        return cls(Path(address.removeprefix(PREFIX))) if address.startswith(PREFIX) else None

    @property
    def study(self) -> Study:
        """The study of the folder."""
        return Study.in_folder(self.path)

    def fetch_file(self, file: PublicFile) -> bytes:
        """Return the content of one of the study's public files."""
        source = self.path / file.file
        if not source.exists() or file_digest(source) != file.sha256:
            raise SettingsError(
                f"The study's file {file.file!r} is missing or altered. Nothing was joined. Ask "
                "the coordinator for the original."
            )
        return source.read_bytes()

    def submit(self, contribution: Contribution, content: bytes) -> dict[str, Any]:
        """Put a contribution into the folder."""
        name = f"contribution-{_as_file_name(contribution.site)}-{contribution.sequence:04d}"
        write_durably(self.path / f"{name}.safetensors", content)
        return {"digest": contribution.digest, "state": "accepted"}

    def fetch_release(self) -> bytes | None:
        """Return the newest release's file, or None if there is none."""
        files = sorted(self.path.glob("release-*.safetensors"))
        return files[-1].read_bytes() if files else None

    def withdraw(self, site: str) -> dict[str, Any]:
        """Remove the site's contributions."""
        for file in self.path.glob("contribution-*.safetensors"):
            if _site_of(file) == site:
                file.unlink()
        return {"state": "withdrawn"}


def _site_of(file: Path) -> object:
    """Return which site a contribution is of; None if the file is not a contribution."""
    try:
        return SealedFile(file, KIND).facts.get("site")
    except ConsilienceError:
        return None


def _as_file_name(name: str) -> str:
    """Return a site's name as part of a file name; different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
