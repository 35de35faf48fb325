"""Who sends a request, and its body: small ones in memory, files on disk, within limits."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from consilience.blind.roster import MOST_SITES
from consilience.hub import auth
from consilience.hub.hub import Hub
from consilience.hub.roles import Account, Action
from consilience.hub.store import Row
from consilience.protocol import HEADER, Refusal, Signed, digest, read_request
from consilience.study.study import Study

MOST_STRANGE = 16 << 10  # bytes of a body from someone whom the hub does not know yet
MOST_KNOWN = 1 << 20  # bytes in memory from a coordinator


def hub_of(request: Request) -> Hub:
    """Return the hub that a request was sent to."""
    hub: Hub = request.app.state.hub
    return hub


async def receive(request: Request, most: int, keep: Callable[[bytes], object]) -> None:
    """Receive a body part by part; refuse one that is too large, or that arrives too slowly."""
    settings, clock = hub_of(request).settings, asyncio.get_running_loop().time
    began, size = clock(), 0
    try:
        async with asyncio.timeout_at(began + settings.patience_seconds) as limit:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    unit = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
                    raise Refusal("too-large", f"The body is larger than {unit}.")
                keep(part)
                earned = settings.patience_seconds + size / settings.least_rate
                limit.reschedule(began + min(settings.upload_seconds, earned))
    except TimeoutError:
        raise Refusal("too-slow", "The body arrived too slowly.") from None
    finally:
        request.app.state.metrics.received += size


async def receive_body(request: Request, most: int) -> bytes:
    """Receive a body that must fit into memory."""
    parts: list[bytes] = []
    await receive(request, most, parts.append)
    return b"".join(parts)


async def read_body(request: Request) -> bytes:
    """Read a body that anyone may send."""
    return await receive_body(request, MOST_STRANGE)


@asynccontextmanager
async def upload_place(request: Request, sender: str) -> AsyncIterator[Path]:
    """Wait until a known sender's upload may begin, and remove what is left of it afterwards.

    Return where its file goes.
    """
    uploads: auth.Uploads = request.app.state.uploads
    async with uploads.place(sender):
        arrived = hub_of(request).store.files.new()
        try:
            yield arrived
        finally:
            arrived.unlink(missing_ok=True)


async def receive_file(request: Request, arrived: Path, most: int) -> str:
    """Stream a body to disk; return its SHA-256."""
    sha256 = hashlib.sha256()
    with arrived.open("wb") as file:

        def keep(part: bytes) -> None:
            sha256.update(part)
            file.write(part)

        await receive(request, most, keep)
    return sha256.hexdigest()


# ---------------------------------------------------------------- what they say, and who sends them


Sender = tuple[Signed, Row, Row | None]
ModelT = TypeVar("ModelT", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Login(_Body):
    """An account's name and password, and the code of its second factor if it has one."""

    name: str = Field(max_length=200)
    password: str = Field(max_length=1000)
    code: str | None = Field(None, max_length=100)


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


class Freezing(_Body):
    """Who checked that each enrolled key is the site's own, by the site's name."""

    checked_by: dict[str, str] = Field(max_length=MOST_SITES)


class Command(_Body):
    """A coordinator's request for a release; one made under the same key is returned again.

    `change` is the number of a withheld release that is to be published all the same.
    """

    key: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")
    change: int | None = Field(default=None, ge=0, lt=2**53)


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


def is_local(request: Request) -> bool:
    """Tell whether a request was sent on this machine, and not passed on by a proxy."""
    try:
        is_loopback = ipaddress.ip_address(address_of(request)).is_loopback
    except ValueError:
        return False
    return is_loopback and not {"x-forwarded-for", "forwarded"} & set(request.headers)


def signature_of(request: Request) -> Signed:
    """Return who signed a request, or refuse; the nonce is not spent yet."""
    query = request.scope["query_string"]
    path = request.scope.get("raw_path") or request.scope["path"].encode()
    # A site signs the path exactly as it is in the first line of the request.
    target = (path + (b"?" + query if query else b"")).decode("latin-1")
    hub_key = hub_of(request).key.public
    return read_request(request.headers.get(HEADER), hub_key, request.method, target)


def sender_of(request: Request, study: str) -> Sender:
    """Return who signed a contribution, the site, and its newest contribution so far."""
    signed = signature_of(request)
    request.app.state.by_key.take(signed.key)
    site, newest = hub_of(request).store.sender(_safe_name(study), signed.key)
    _count_site(request, study, site)
    return signed, site, newest


def _count_site(request: Request, study: str, site: Row) -> None:
    """Count a request for the site too: it can have a new key whenever it likes."""
    request.app.state.by_key.take(site_in(study, site))


def site_in(study: str, site: Row) -> str:
    """Return what limits know a site by."""
    return f"{study}/{site['name']}"


def _safe_name(study: str) -> str:
    """Return a study's name if one can have it, else a name that no study has."""
    return study if study.isascii() and study.isprintable() and len(study) <= 64 else "-"


def bearer_token(request: Request) -> str:
    """Return the token that a coordinator sends, or refuse."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise Refusal("not-authenticated", "This needs the token of an account.")
    return token.strip()


def check_account(request: Request, action: Action) -> None:
    """Find whose token a request carries, and refuse what this account may not do.

    A request that has to carry none is refused where somebody asks for the `coordinator`.
    """
    if action is not Action.OPEN and "authorization" in request.headers:
        account = auth.account_of(hub_of(request).store, bearer_token(request))
        account.check(action, request.path_params.get("study"))
        request.state.account = account


def coordinator(request: Request) -> str:
    """Return who is logged in and may do this, as the audit log names them, or refuse."""
    account: Account | None = getattr(request.state, "account", None)
    if account is None:
        raise Refusal("not-authenticated", "This needs the token of an account.")
    return account.actor


Body = Annotated[bytes, Depends(read_body)]
Coordinator = Annotated[str, Depends(coordinator)]


async def read_large_body(request: Request, _: Coordinator) -> bytes:
    """Read a body that only accounts may send; the hub knows them before it reads."""
    return await receive_body(request, MOST_KNOWN)


LargeBody = Annotated[bytes, Depends(read_large_body)]


def site_changing(request: Request, study: str, body: Body) -> tuple[Signed, Row]:
    """Return the signature and the site of a request whose own transaction spends the nonce."""
    signed = signature_of(request)
    request.app.state.by_key.take(signed.key)
    signed.check_body(digest(body))
    site = hub_of(request).store.signer(_safe_name(study), signed.key)
    _count_site(request, study, site)
    return signed, site


def keyholder_of(request: Request, study: str) -> tuple[Signed, Study]:
    """Return who signed a request as a keyholder, and the study that names this key."""
    signed = signature_of(request)
    request.app.state.by_key.take(signed.key)
    return signed, hub_of(request).keyholder(_safe_name(study), signed.key)


def keyholder(request: Request, study: str, body: Body) -> tuple[str, Study]:
    """Return the key of a keyholder whose small request is signed and new, and its study."""
    signed, agreed = keyholder_of(request, study)
    signed.check_body(digest(body))
    hub_of(request).store.spend_nonce(signed.key, signed.nonce)
    return signed.key, agreed


def party(request: Request, study: str, body: Body) -> Study:
    """Return the study of a keyholder, a site or a coordinator who asks for what all may see."""
    if "authorization" not in request.headers:
        named = hub_of(request).names_keyholder(_safe_name(study), signature_of(request).key)
        if named:
            return keyholder(request, study, body)[1]
    anyone(request, study, body)
    return hub_of(request).study(study)[1]


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
Keyholder = Annotated[tuple[str, Study], Depends(keyholder)]
Party = Annotated[Study, Depends(party)]
