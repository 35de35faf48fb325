"""Who may ask, and how often: passwords, the tokens of sessions, and rates.

Passwords are kept as scrypt hashes and tokens as SHA-256, so a copy of the database lets nobody in.

Rates are counted in each worker process: N workers together let through N times the rate. They
protect the machine, not a secret. What must be exact across workers (nonces, invitations, claims)
is in the database.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from consilience.errors import SettingsError
from consilience.hub.store import Store, hashed, now
from consilience.protocol import Refusal

COOKIE = "consilience"
LEAST_PASSWORD = 10
MOST_NAMES = 10_000  # whose rate is remembered
_COST = {"n": 2**15, "r": 8, "p": 3, "maxmem": 64 << 20}  # 32 MiB and about 0.2 s for each guess
_NOBODY = "scrypt:" + "A" * 24 + ":" + "A" * 43 + "="
_one_at_a_time = threading.Lock()  # many guesses at once take more time, not more memory


def hash_password(password: str) -> str:
    """Return what is stored of a password."""
    if len(password) < LEAST_PASSWORD or len(password) > 1000:
        raise SettingsError(
            f"A coordinator's password must have {LEAST_PASSWORD} to 1000 characters. Nothing was "
            "stored. Choose another password."
        )
    salt = secrets.token_bytes(18)
    return f"scrypt:{base64.b64encode(salt).decode()}:{_scrypt(password, salt)}"


def fits_password(password: str, stored: str) -> bool:
    """Tell whether this is the password, in a time that does not depend on it."""
    _, salt, expected = stored.split(":")
    return hmac.compare_digest(_scrypt(password, base64.b64decode(salt)), expected)


def _scrypt(password: str, salt: bytes) -> str:
    with _one_at_a_time:
        key = hashlib.scrypt(password.encode(errors="replace"), salt=salt, dklen=32, **_COST)
    return base64.b64encode(key).decode()


def log_in(store: Store, name: str, password: str, *, hours: float) -> tuple[str, str]:
    """Return a new token and when it expires, or refuse.

    An unknown name takes as long as a wrong password.
    """
    known = store.coordinator(name) if name.isprintable() else None
    fits = fits_password(password[:1001], known["password"] if known else _NOBODY)
    if known is None or not fits or known["status"] != "active":
        raise Refusal("not-authenticated", "There is no coordinator with this name and password.")
    return new_token(store, name, hours=hours, kind="session")


def new_token(store: Store, coordinator: str, *, hours: float, kind: str) -> tuple[str, str]:
    """Return a token for a new session of a coordinator, and when it expires."""
    token, expires = secrets.token_urlsafe(32), now(seconds=hours * 3600)
    store.add_session(hashed(token), coordinator, kind, expires)
    return token, expires


def coordinator_of(store: Store, token: str | None) -> str:
    """Return the coordinator whose session has this token, or refuse."""
    session = store.session(hashed(token)) if token else None
    if session is None:
        raise Refusal("not-authenticated", "Nobody is logged in with this token.")
    return str(session["coordinator"])


# -------------------------------------------------------------------------------------------- rates


@dataclass(frozen=True)
class Rate:
    """How many requests per second in the long run, and how many at once."""

    per_second: float
    burst: float


class Buckets:
    """Token buckets, one for each name; those unused for the longest time are forgotten first."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """Take one token, or refuse."""
        at = time.monotonic()
        with self._lock:
            level, since = self._levels.pop(name, (self.rate.burst, at))
            level = min(self.rate.burst, level + (at - since) * self.rate.per_second)
            self._levels[name] = (level - 1 if level >= 1 else level, at)
            if len(self._levels) > MOST_NAMES:
                self._levels.popitem(last=False)
        if level < 1:
            raise Refusal("too-many", "Too many requests came from here in a short time.")
