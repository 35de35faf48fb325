"""A study's public files: which ones the hub has, downloading and uploading them."""

from __future__ import annotations

import hashlib
import mimetypes
import re
from pathlib import Path

from fastapi import Response
from fastapi.responses import FileResponse

from consilience.hub.dashboard.visits import HEADERS, Visit
from consilience.hub.hub import Hub
from consilience.hub.store import Row
from consilience.protocol import Refusal
from consilience.study.records import PublicFile
from consilience.study.study import Study

_START = 2048  # bytes; they contain a form's token and the name of its file


def list_files(hub: Hub, study: Study) -> list[Row]:
    """List a study's public files, what they are used for, and whether the hub has them."""
    parts: dict[str, tuple[PublicFile, list[str]]] = {}
    for part, use in ((study.public, "combining"), (study.test, "measuring releases")):
        if part is not None:
            parts.setdefault(part.sha256, (part, []))[1].append(use)
    return [
        {
            "file": part.file,
            "sha256": part.sha256,
            "uses": " and ".join(uses),
            "there": hub.store.file(part.sha256),
        }
        for part, uses in parts.values()
    ]


def show_public_file(visit: Visit) -> Response:
    """Return a file of public records."""
    row, _ = visit.study()
    named = visit.hub.public_file(row["name"], visit["file"])
    if visit.hub.store.file(named.sha256) is None:
        raise Refusal("not-found", "The coordinator has not uploaded this file yet.")
    kind = mimetypes.guess_type(named.file)[0] if named.file.endswith((".csv", ".txt")) else None
    path = visit.hub.store.files.path(named.sha256)
    return FileResponse(
        path, media_type=kind or "application/octet-stream", headers=HEADERS, filename=named.file
    )


def take_file(visit: Visit, arrived: Path) -> Response:
    """Take a public file from the form that `arrived` on disk, if it is the one the study names."""
    row, _ = visit.study()
    named = visit.hub.public_file(row["name"], visit["file"])
    begin, end = _file_within(arrived, visit.request.headers.get("content-type", ""))
    inside, digest = visit.hub.store.files.new(), hashlib.sha256()
    try:
        with arrived.open("rb") as source, inside.open("wb") as target:
            source.seek(begin)
            while begin < end and (part := source.read(min(1 << 20, end - begin))):
                begin += len(part)
                digest.update(part)
                target.write(part)
        visit.hub.keep_public_file(
            row["name"], named.file, inside, digest.hexdigest(), visit.someone.actor
        )
    finally:
        inside.unlink(missing_ok=True)
    return visit.redirect(f"/studies/{row['name']}?done=uploaded#files")


def read_beginning(arrived: Path) -> bytes:
    """Return the beginning of a form: its token comes before its file."""
    with arrived.open("rb") as file:
        return file.read(_START)


def _file_within(arrived: Path, kind: str) -> tuple[int, int]:
    """Return where the last part of a form begins and ends."""
    boundary = re.search(r'boundary="?([A-Za-z0-9\'()+_,./:=?-]{1,70})"?', kind)
    mark = b"--" + boundary.group(1).encode() if boundary else b""
    with arrived.open("rb") as file:
        start, size = file.read(_START), arrived.stat().st_size
        file.seek(max(0, size - 100))
        rest = file.read()
    head = start.find(b'name="file"')
    begin, end = start.find(b"\r\n\r\n", head) + 4, rest.rfind(b"\r\n" + mark + b"--")
    if not mark or head < 0 or begin < 4 or end < 0:
        raise Refusal("malformed", "The form contains no file.")
    return begin, size - len(rest) + end
