"""The records that a study reads: its files of public records, and a site's own table."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from consilience.errors import SchemaMismatch, SettingsError
from consilience.files.durable import open_regular
from consilience.tables.public import Public
from consilience.tables.reading import read_first
from consilience.tables.schema import Schema


@dataclass(frozen=True)
class PublicFile:
    """A file of public records: its name, and the digest that every copy of it must have."""

    file: str
    sha256: str
    labelled: bool = True

    def read(self, schema: Schema, folder: str | os.PathLike[str]) -> Public:
        """Read and encode the copy in `folder`; refuse a file whose digest differs."""
        path = Path(folder) / self.file
        if not path.exists():
            raise SettingsError(
                f"The study's public file {self.file!r} is not there. Nothing was read. Put a "
                "copy next to the study file."
            )
        if file_digest(path) != self.sha256:
            raise SettingsError(
                f"The file {self.file!r} differs from the one the study names. Nothing was read. "
                "Get the original, or ask the coordinator to issue a new study."
            )
        if not self.labelled:
            return Public(schema.encode_features(path))
        rows = schema.encode(path)
        return Public(rows.X, schema.name_labels(rows.y))


def find_misfit(file: PublicFile, schema: Schema, path: Path) -> str | None:
    """Say why the first records of a copy at `path` cannot be used; None if they can."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            first = read_first(path, file.file, Path(folder))
            if first is None:
                return None
            table, n_others = first
            rows = schema.encode(table).X if file.labelled else schema.encode_features(table)
            n_records = rows.shape[0] + n_others
    except (SettingsError, SchemaMismatch) as problem:
        return re.split(r" (?:Nothing|No record) was ", str(problem))[0]
    return None if n_records else "It has no record."


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
