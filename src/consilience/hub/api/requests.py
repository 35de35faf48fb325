"""Who sends a request, and its body: small ones in memory, files on disk, within limits."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from consilience.hub import auth
from consilience.hub.hub import Hub
from consilience.hub.store import Row
from consilience.protocol import HEADER, Refusal, Signed, digest, read_request

MOST_JSON = 1 << 20


def hub_of(request: Request) -> Hub:
    """Return the hub that a request was sent to."""
    hub: Hub = request.app.state.hub
    return hub


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
    arrived = hub_of(request).store.files.new()
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
    settings = hub_of(request).settings
    digest, size, parts, file = hashlib.sha256(), 0, [], None
    with ExitStack() as opened:
        try:
            async with asyncio.timeout(settings.upload_seconds):
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


# ---------------------------------------------------------------- what they say, and who sends them


Sender = tuple[Signed, Row, list[Row]]
ModelT = TypeVar("ModelT", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Login(_Body):
    """A coordinator's name and password."""

    name: str = Field(max_length=200)
    password: str = Field(max_length=1000)


class Invitation(_Body):
    """Whom an invitation is for, and how long it is valid."""

    site: str | None = None
    fetch_only: bool = False
    days: float = 7.0


class Enrolment(_Body):
    """A site's one-time code and name; the key that signs the request is enrolled."""

    invitation: str = Field(max_length=200)
    site: str = Field(max_length=100)
    fetch_only: bool = False


class Rotation(_Body):
    """A site's new key, and its signature over old and new key."""

    study: str = Field(max_length=64)
    new_key: str = Field(max_length=64)
    proof: str = Field(max_length=128)


class Command(_Body):
    """A coordinator's request for a release; the same key again returns the same release."""

    key: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")


def parse_body(model: type[ModelT], body: bytes) -> ModelT:
    """Return a JSON body as a model, or refuse."""
    try:
        return model.model_validate_json(body)
    except (ValidationError, ValueError):
        names = ", ".join(model.model_fields)
        raise Refusal("malformed", f"The body must be a JSON object with: {names}.") from None


def address_of(request: Request) -> str:
    """Return the network address that a request came from."""
    return request.client.host if request.client else "nowhere"


def signature_of(request: Request) -> Signed:
    """Return who signed a request, or refuse; the nonce is not spent yet."""
    query = request.scope["query_string"]
    path = request.scope.get("raw_path") or request.scope["path"].encode()
    # A site signs the path exactly as it is in the first line of the request.
    target = (path + (b"?" + query if query else b"")).decode("latin-1")
    return read_request(request.headers.get(HEADER), request.method, target)


def sender_of(request: Request, study: str) -> Sender:
    """Return who signed a contribution, the site, and what the site submitted before."""
    signed = signature_of(request)
    request.app.state.by_key.take(signed.key)
    return signed, *hub_of(request).store.sender(_safe_name(study), signed.key)


def _safe_name(study: str) -> str:
    """Return a study's name if one can have it, else a name that no study has."""
    return study if study.isascii() and study.isprintable() and len(study) <= 64 else "-"


def bearer_token(request: Request) -> str:
    """Return the token that a coordinator sends, or refuse."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise Refusal("not-authenticated", "This needs a coordinator's token.")
    return token.strip()


def coordinator(request: Request) -> str:
    """Return who is logged in, as the audit log names them, or refuse."""
    return f"coordinator:{auth.coordinator_of(hub_of(request).store, bearer_token(request))}"


Body = Annotated[bytes, Depends(read_body)]
Coordinator = Annotated[str, Depends(coordinator)]


def site_changing(request: Request, study: str, body: Body) -> tuple[Signed, Row]:
    """Return the signature and the site of a request whose own transaction spends the nonce."""
    signed = signature_of(request)
    request.app.state.by_key.take(signed.key)
    signed.check_body(digest(body))
    return signed, hub_of(request).store.signer(_safe_name(study), signed.key)


def anyone(request: Request, study: str, body: Body) -> Row | None:
    """Return the site that signed a request to read; None if a coordinator sent it."""
    if "authorization" in request.headers:
        coordinator(request)
        hub_of(request).study(study)
        return None
    signed, site = site_changing(request, study, body)
    hub_of(request).store.spend_nonce(signed.key, signed.nonce)
    return site


SiteChanging = Annotated[tuple[Signed, Row], Depends(site_changing)]
Anyone = Annotated[Row | None, Depends(anyone)]
