"""The records that a study reads: its files of public records, and a site's own table."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.errors import SettingsError
from consilience.tables.chunks import ParquetRows
from consilience.tables.public import Public
from consilience.tables.schema import Schema

# Encoded values of a site's table that are held in memory: one gibibyte. A larger Parquet table is
# read in chunks.
IN_MEMORY = 1 << 27


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
        return Public(rows.X, declared_labels(schema, rows.y))


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def declared_labels(schema: Schema, y: NDArray[Any]) -> NDArray[Any]:
    """Return labels as the schema declares them; encoding gives each class's position."""
    return y if schema.classes is None else np.asarray(schema.classes)[y]


def in_chunks(schema: Schema, table: object) -> ParquetRows | None:
    """Return a table in chunks if it is Parquet and too large for memory; otherwise None.

    A table whose schema names persons is always held in memory: the number of records of each
    person is limited there.
    """
    if schema.person is not None or not isinstance(table, str | os.PathLike):
        return None
    path = Path(table)
    if not (path.is_dir() or path.suffix in {".parquet", ".pq"}):
        return None
    rows = ParquetRows(path, schema, named=True)
    return rows if rows.n_records * rows.n_features > IN_MEMORY else None
