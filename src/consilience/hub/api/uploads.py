"""Reading bodies: small ones into memory, files to disk, within limits of size and time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from fastapi import Request

from consilience.hub.hub import Hub
from consilience.protocol import Refusal

MOST_JSON = 1 << 20


async def read_body(request: Request) -> bytes:
    """Read a body that must fit into memory."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_JSON:
            raise Refusal("too-large", f"The body is larger than {MOST_JSON >> 10} KiB.")
        parts.append(part)
    return b"".join(parts)


@asynccontextmanager
async def upload_slot(request: Request) -> AsyncIterator[Path]:
    """Wait until an upload may begin; return where its file goes, and remove what is left there."""
    hub: Hub = request.app.state.hub
    arrived = hub.store.files.new()
    try:
        async with request.app.state.uploads:
            yield arrived
    finally:
        arrived.unlink(missing_ok=True)


async def receive_file(
    request: Request, arrived: Path, most: int, *, small: int = -1
) -> tuple[str, Path | bytes]:
    """Stream a body to disk, or to memory if it has at most `small` bytes.

    Return its SHA-256, and the path or the bytes.
    """
    hub: Hub = request.app.state.hub
    digest, size, parts, file = hashlib.sha256(), 0, [], None
    with ExitStack() as opened:
        try:
            async with asyncio.timeout(hub.settings.upload_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refusal("too-large", f"The file is larger than {most >> 20} MiB.")
                    digest.update(part)
                    parts.append(part)
                    if size > small:
                        file = file or opened.enter_context(arrived.open("wb"))
                        file.writelines(parts)
                        parts.clear()
        except TimeoutError:
            raise Refusal("malformed", "The upload took too long.") from None
    request.app.state.metrics.received += size
    return digest.hexdigest(), arrived if file else b"".join(parts)
