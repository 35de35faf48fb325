"""What sites and hubs agree on: the form of names, signed requests, and errors as codes.

A site proves its identity by signing each request with its Ed25519 key: there is no password to
steal and no session to hijack. Any transport will do; HTTPS also hides the content.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import NamedTuple, Self, TypeGuard

from consilience.files.sealed import (
    Sealed,
    SigningKey,
    canonical,
    is_signed,
    message_of,
    refused,
)

STUDY_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,63}")
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")
DIGEST = re.compile("[0-9a-f]{64}")  # a SHA-256, or a public key
SIGNATURE = re.compile("[0-9a-f]{128}")


def is_digest(value: object) -> TypeGuard[str]:
    """Tell whether something that others wrote has the form of a digest."""
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


# Numbers between a site's contributions; a thief of its key could use up all of them.
MOST_SKIPPED = 1000
CLOCK_SECONDS = 300  # how far a request's time may be from the hub's
HEADER = "x-consilience"
VERSION_HEADER = "x-consilience-version"  # of an answer: the hub's software
VERSION = metadata.version("consilience")
_FORM = re.compile(
    r"key=([0-9a-f]{64});time=([0-9]{1,12});nonce=([0-9a-f]{32});"
    r"body=([0-9a-f]{64});signature=([0-9a-f]{128})"
)


# Letters of other scripts that look like Latin ones, after case is folded, and letters without ink.
_LOOK_ALIKES = str.maketrans(
    "аеорсухіјѕһԁкмтвнαορινтτυχκεημβζ",
    "aeopcyxijshdkmtbhaopivttuxkehmbz",
    "\u115f\u1160\u3164\uffa0",
)
_STROKES = str.maketrans("i1|ı0", "llllo")  # in most typefaces


@lru_cache(maxsize=1 << 12)
def fold_name(name: str) -> str:
    """Return what people read in a name, whatever its case, spaces, punctuation and script."""
    plain = unicodedata.normalize("NFKC", name).casefold().translate(_LOOK_ALIKES)
    seen = (each for each in plain if unicodedata.category(each) not in ("Mn", "Cf"))
    drawn = "".join(seen).replace("rn", "m").replace("vv", "w").translate(_STROKES)
    return " ".join("".join(each if each.isalnum() else " " for each in drawn).split())


def check_new_name(name: str, others: Iterable[str]) -> None:
    """Refuse a new name that people would take for one of the `others`, or cannot read exactly."""
    if not name.isprintable() or name != " ".join(name.split()):
        raise Refusal(
            "malformed",
            "A name cannot begin or end with a space, and cannot have two spaces in a row or a "
            "character that cannot be seen.",
        )
    alike = next((other for other in others if fold_name(other) == fold_name(name)), None)
    if alike is not None:
        raise Refusal("name-taken", f"People would take the name for {alike!r}, which is taken.")


def is_site_name(name: str) -> bool:
    """Tell whether a name has the form of a site's: Latin letters, digits, few others."""
    return bool(SITE_NAME.fullmatch(name)) and name == " ".join(name.split())


class Invitation(NamedTuple):
    """A one-time code, and by whom and to what: the hub's public key and the study's digest.

    The last two let a site sign its first request for this hub only and check the first answer of a
    hub that it does not know yet.
    """

    code: str
    hub_key: str
    study: str

    def __str__(self) -> str:
        return ".".join(self)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read an invitation; None if it is not a whole one."""
        code, *facts = text.strip().split(".")
        if len(facts) == 2 and all(DIGEST.fullmatch(fact) for fact in facts):
            return cls(code, *facts)
        return None


# code -> (HTTP status, what to do)
ERRORS: dict[str, tuple[int, str]] = {
    "not-found": (404, "Check the address, the study's name and that you are enrolled in it."),
    "not-allowed": (403, "Ask the coordinator of the study."),
    "not-authenticated": (401, "Sign the request with the enrolled key, or log in."),
    "clock": (401, "Set this machine's clock; requests are valid for five minutes."),
    "replayed": (409, "Send the request again with a fresh signature."),
    "malformed": (400, "Use this version's client, or read the protocol page."),
    "too-large": (413, "Stay within the hub's size limit, or ask its operator to raise it."),
    "too-slow": (408, "Try again on a faster connection, or ask the hub's operator."),
    "too-many": (429, "Wait a minute and try again."),
    "too-often": (429, "Try again tomorrow; what was accepted until now stays."),
    "invitation": (
        403,
        "Ask the coordinator for a new invitation; each works once, for one site, until it "
        "expires.",
    ),
    "name-taken": (409, "Choose another name, or ask the coordinator to revoke the old key."),
    "key-revoked": (403, "Make a new key and ask the coordinator for an invitation to enrol it."),
    "rejected": (422, "Train again with the study's own file; the message says what does not fit."),
    "wrong-site": (403, "Submit your own site's contribution, signed with its enrolled key."),
    "stale": (409, "The hub already has a newer contribution; train again to replace it."),
    "too-soon": (429, "Submit the same file again after that time; nothing else is needed."),
    "roster-frozen": (409, "Sites that are missing on the roster need a new study."),
    "no-roster": (409, "Wait until the coordinator has frozen the roster of this study."),
    "listed": (409, "Send noise alone, or withdraw, which takes the whole batch out."),
    "study-differs": (409, "Fetch the study again; its digest has changed."),
    "study-closed": (409, "A closed study takes no more sites or contributions, only withdrawals."),
    "too-few-sites": (
        409,
        "Ask again when enough contributions are in use; a closed study takes no more.",
    ),
    "no-release": (404, "The message says why; ask the study's coordinator if you expected one."),
    "budget": (409, "The hub's budget for this study is spent; its operator can raise it."),
    "draft-changed": (409, "Load the draft again and make the change there."),
    "too-many-drafts": (409, "Delete drafts that nobody needs, or freeze them."),
    "trial-waits": (409, "Try this draft again in a minute or two; nothing of it has changed."),
    "study-invalid": (422, "Correct the study file; `consilience study check` lists all problems."),
    "file-differs": (409, "Send the file whose SHA-256 the study names."),
    "cannot-combine": (409, "Change what the message names, then ask again."),
    "withheld": (409, "The study's page says why; a coordinator can publish it all the same."),
    "wrong-method": (405, "Look up the address on the protocol page or at /docs."),
    "unavailable": (503, "Try again later; what the hub has confirmed is kept."),
    "failed": (500, "Tell the hub's operator; trying again will not help."),
}


@dataclass(eq=False)  # not frozen: an exception is given its traceback while it travels
class Refusal(Exception):
    """A refused request: a code, and a sentence that contains no value of a record."""

    code: str
    message: str

    @property
    def status(self) -> int:
        """HTTP status."""
        return ERRORS[self.code][0]

    @property
    def body(self) -> dict[str, dict[str, str]]:
        """The JSON that is sent."""
        return {"error": {"code": self.code, "message": self.message, "fix": ERRORS[self.code][1]}}


def sign_request(
    key: SigningKey,
    hub_key: str,
    method: str,
    path: str,
    body_sha256: str,
    *,
    now: float | None = None,
) -> str:
    """Return the header that proves who sends a request, valid once and for five minutes.

    It is valid at the hub with this public key only, so that a hub cannot pass it on to another.
    """
    at, nonce = str(int(time.time() if now is None else now)), secrets.token_hex(16)
    signature = key.sign(_message(hub_key, method, path, body_sha256, at, nonce)).hex()
    return f"key={key.public};time={at};nonce={nonce};body={body_sha256};signature={signature}"


@dataclass(frozen=True)
class Signed:
    """Who sent a request, the nonce that may be used once, and the SHA-256 of the body."""

    key: str
    nonce: str
    body: str

    def check_body(self, sha256: str) -> None:
        """Refuse a body that differs from the one that was signed."""
        if sha256 != self.body:
            raise Refusal("not-authenticated", "The request's signature does not match its body.")


def read_request(
    header: str | None, hub_key: str, method: str, path: str, *, now: float | None = None
) -> Signed:
    """Return who signed a request to the hub with this key, or refuse, before its body is read.

    The caller checks that the key is enrolled, the nonce is new and the body was signed.
    """
    found = _FORM.fullmatch(header or "")
    if found is None:
        raise Refusal("not-authenticated", "The request is not signed.")
    key, at, nonce, body, signature = found.groups()
    if abs((time.time() if now is None else now) - int(at)) > CLOCK_SECONDS:
        raise Refusal("clock", "The request was signed too long ago, or in the future.")
    message = _message(hub_key, method, path, body, at, nonce)
    if not is_signed(message, bytes.fromhex(signature), key):
        raise Refusal(
            "not-authenticated",
            "The request's signature does not match it, or was made for a hub with another key.",
        )
    return Signed(key, nonce, body)


def rotation_message(old: str, new: str) -> bytes:
    """Return what a new key signs to replace an old one."""
    return f"consilience rotation {old} {new}".encode()


ROTATED = ".rotated"  # how the name of a `Rotation` in a shared folder ends
_ROTATION = "rotation"


@dataclass(frozen=True)
class Rotation:
    """A site's change of key, as it lies in a shared folder: there is no hub to be told of it.

    The old key signs it, and the new one proves that its owner agrees.
    """

    site: str
    study: object
    old: str
    new: str

    @staticmethod
    def seal(site: str, study: Mapping[str, str], old: SigningKey, new: SigningKey) -> Sealed:
        """Let two keys of a site state that the second took the place of the first."""
        proof = new.sign(rotation_message(old.public, new.public)).hex()
        facts = {"site": site, "study": dict(study), "new_key": new.public, "proof": proof}
        return Sealed.seal(_ROTATION, facts, {}, old)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of unknown origin, and refuse it unless both keys signed."""
        sealed = Sealed.load(path, _ROTATION)
        facts = sealed.facts
        new, proof = facts.get("new_key"), str(facts.get("proof"))
        agreed = is_digest(new) and SIGNATURE.fullmatch(proof) is not None
        if not (
            agreed
            and is_signed(rotation_message(sealed.key, str(new)), bytes.fromhex(proof), str(new))
        ):
            raise refused("no other key agreed to take the place of the one that signed it")
        return cls(str(facts.get("site")), facts.get("study"), sealed.key, str(new))


def digest(body: bytes) -> str:
    """Return the SHA-256 of a request's body."""
    return hashlib.sha256(body).hexdigest()


def _message(hub_key: str, method: str, path: str, body_sha256: str, at: str, nonce: str) -> bytes:
    facts = {
        "hub": hub_key,
        "method": method.upper(),
        "path": path,
        "body": body_sha256,
        "time": at,
        "nonce": nonce,
    }
    return message_of("request", canonical(facts))
