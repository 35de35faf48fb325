"""Files that are whole or absent, whenever a machine stops; and reading those that others wrote.

Bytes go to a draft beside the target and onto the disk first; only then does the target's name
point to them, and the folder that holds the name goes onto the disk as well.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
from pathlib import Path

from consilience.errors import SettingsError


def write_durably(
    path: str | os.PathLike[str], content: bytes, *, mode: int = 0o666, replace: bool = True
) -> None:
    """Write a file so that it is whole or absent.

    Without `replace`, an existing file stays as it is and FileExistsError is raised. As for
    `os.open`, the process' umask narrows `mode`.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(target)
        else:
            os.link(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    sync(target.parent)


def move_durably(path: Path, target: Path) -> None:
    """Give a file that was written by other means its final name."""
    sync(path)
    path.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str | os.PathLike[str], most: int | None = None) -> io.BufferedReader:
    """Open a file whose name others may have given to anything, of at most so many bytes.

    A pipe would keep its reader waiting, and a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or (most is not None and state.st_size > most):
        os.close(descriptor)
        raise SettingsError(
            f"The file {Path(path).name!r} is no ordinary file, or larger than it may be. Nothing "
            "of it was used. Ask who put it there."
        )
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of such a file, and no more of it than `most` bytes if it grows."""
    with open_regular(path, most) as file:
        return file.read(most)
