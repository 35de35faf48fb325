"""Who may ask, and how often: passwords, logging in, the tokens of sessions, rates and uploads.

Passwords are kept as scrypt hashes and tokens as SHA-256, so a copy of the database lets nobody in.

Rates are counted in each worker process: N workers together let through N times the rate. They
protect the machine, not a secret. What must be exact across workers (nonces, invitations, claims)
is in the database.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache

from consilience.errors import SettingsError
from consilience.hub.roles import Account
from consilience.hub.signon import Identity
from consilience.hub.store import Row, Store, hashed, now
from consilience.hub.store.accounts import actor_of
from consilience.protocol import Refusal

COOKIE = "consilience"
LEAST_PASSWORD = 10
MOST_NAMES = 10_000  # whose rate is remembered
MOST_GUESSES = 8  # passwords that are checked, or wait for it, at the same time
MOST_KNOWN_GUESSES = 4  # more, for accounts and addresses where they have logged in before
MOST_MEMORY = 64 << 20  # bytes for one scrypt: a stored cost beyond it is not a hash of ours
_COST = (2**15, 8, 3)  # n, r, p: 32 MiB and about 0.2 s for each guess
_NOBODY = "scrypt:32768:8:3:" + "A" * 24 + ":" + "A" * 43 + "="
_one_at_a_time = threading.Lock()  # many guesses at once take more time, not more memory


def hash_password(password: str) -> str:
    """Return what is stored of a password: the cost of guessing it, a salt, and its hash."""
    if len(password) < LEAST_PASSWORD or len(password) > 1000:
        raise SettingsError(
            f"A password must have {LEAST_PASSWORD} to 1000 characters. Nothing was "
            "stored. Choose another password."
        )
    salt = secrets.token_bytes(18)
    cost = ":".join(map(str, _COST))
    return f"scrypt:{cost}:{base64.b64encode(salt).decode()}:{_scrypt(password, salt, _COST)}"


def fits_password(password: str, stored: str) -> bool:
    """Tell whether this is the password, in a time that does not depend on it.

    Hashes without a cost are from a version that knew only one.
    """
    try:
        _, *stated, salt, expected = stored.split(":")
        n, r, p = map(int, stated) if stated else _COST
        found = _scrypt(password, base64.b64decode(salt), (n, r, p))
    except ValueError:  # what is stored is no hash; it takes as long, or that could be told
        _scrypt(password, b"", _COST)
        return False
    return hmac.compare_digest(found, expected)


def _scrypt(password: str, salt: bytes, cost: tuple[int, int, int]) -> str:
    n, r, p = cost
    with _one_at_a_time:
        key = hashlib.scrypt(
            password.encode(errors="replace"),
            salt=salt,
            dklen=32,
            n=n,
            r=r,
            p=p,
            maxmem=MOST_MEMORY,
        )
    return base64.b64encode(key).decode()


def new_token(store: Store, name: str, *, hours: float, kind: str, **login: str) -> tuple[str, str]:
    """Return a token for a new session of an account, and when it expires.

    `login` holds the `address` and the stored `password` that was compared, as in `add_session`.
    """
    token, expires = secrets.token_urlsafe(32), now(seconds=hours * 3600)
    store.add_session(hashed(token), name, kind, expires, **login)
    return token, expires


def account_of(store: Store, token: str | None) -> Account:
    """Return the account whose session has this token, or refuse."""
    account = store.session(hashed(token)) if token else None
    if account is None:
        raise Refusal("not-authenticated", "Nobody is logged in with this token.")
    return account


# -------------------------------------------------------------------------------------------- rates


@lru_cache(maxsize=1 << 12)
def network_of(address: str) -> str:
    """Return what limits count an address as: in IPv6 the /64, of which one customer has all."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


@dataclass(frozen=True)
class Rate:
    """How many requests per second in the long run, and how many at once."""

    per_second: float
    burst: float


class Buckets:
    """Token buckets, one for each name; the fullest are forgotten first.

    Whoever used up a limit cannot be forgotten by sending many other names once each.
    """

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._levels: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """Take one token, or refuse."""
        if not self.has(name):
            raise Refusal("too-many", "Too many requests came from here in a short time.")

    def has(self, name: str) -> bool:
        """Take one token if there is one, and tell whether there was."""
        at = time.monotonic()
        with self._lock:
            level = self._level(name, at)
            self._levels[name] = (level - 1 if level >= 1 else level, at)
            if len(self._levels) > MOST_NAMES:  # a tenth at once, so that sorting is rare
                by_level = sorted(self._levels, key=lambda name: self._level(name, at))
                for forgotten in by_level[-(MOST_NAMES // 10) :]:
                    del self._levels[forgotten]
        return level >= 1

    def _level(self, name: str, at: float) -> float:
        level, since = self._levels.get(name, (self.rate.burst, at))
        return min(self.rate.burst, level + (at - since) * self.rate.per_second)


class Uploads:
    """Places for uploads: so many at the same time, and so many of them for one sender."""

    def __init__(self, most: int, each: int, wait_seconds: float) -> None:
        self.each, self.wait_seconds = each, wait_seconds
        self._free, self._senders = asyncio.Semaphore(most), Counter[str]()

    @asynccontextmanager
    async def place(self, sender: str) -> AsyncIterator[None]:
        """Wait for a place and hold it while the block runs, or refuse."""
        if self._senders[sender] >= self.each:
            raise Refusal("too-many", f"A sender can upload {self.each} files at the same time.")
        self._senders[sender] += 1
        try:
            await self._take_place()
            try:
                yield
            finally:
                self._free.release()
        finally:
            self._senders[sender] -= 1
            if not self._senders[sender]:
                del self._senders[sender]

    async def _take_place(self) -> None:
        if not self._free.locked():  # it does not wait, and so needs no timer
            await self._free.acquire()
            return
        try:
            async with asyncio.timeout(self.wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            raise Refusal("unavailable", "Too many files are being uploaded.") from None


# ------------------------------------------------------------------------------------ logging in


class Notes:
    """Entries of the audit log that senders can cause as often as they like, without filling it.

    What the rate leaves out is counted, and the next entry of its kind says how many there were.
    """

    def __init__(self, store: Store, rate: Rate) -> None:
        self._store, self._buckets, self._left_out = store, Buckets(rate), Counter[str]()
        self._lock = threading.Lock()

    def add(self, actor: str, action: str, study: str | None = None, **facts: object) -> None:
        """Add an entry, or count it."""
        kind = f"{action} {actor} {study}"
        with self._lock:  # threads that count at the same time would lose one of the two
            if not self._buckets.has(kind):
                if kind in self._left_out or len(self._left_out) < MOST_NAMES:
                    self._left_out[kind] += 1
                return
            left_out = self._left_out.pop(kind, 0)
        more = {"left out before": left_out} if left_out else {}
        self._store.log(actor, action, study, **facts, **more)


class CodeNeeded(Refusal):
    """The password fits, and the account has a second factor."""

    def __init__(self, stored: str) -> None:
        super().__init__(
            "not-authenticated", "This account has a second factor: its code is needed as well."
        )
        self.stored = hashed(stored)  # says which password fitted, for the second step


class Logins:
    """Logging in: limited for each address and for each account; failures are in the audit log.

    An address from which an account has logged in is not subject to that account's limit, so that
    strangers who guess cannot keep its owner out.
    """

    def __init__(
        self,
        store: Store,
        by_guess: Buckets,
        by_account: Buckets,
        notes: Notes,
        use_code: Callable[[str, str], bool] = lambda name, code: False,
    ) -> None:
        self._store, self._notes, self._use_code = store, notes, use_code
        self._by_code, self._by_own = Buckets(by_account.rate), Buckets(by_account.rate)
        self._by_guess, self._by_account = by_guess, by_account
        # Names without an account have limits like accounts, or the limits would tell which names
        # exist, and in a table of their own, or many of them would push out those of accounts.
        self._by_other_name = Buckets(by_account.rate)
        # Guesses wait for each other in threads, of which other requests need the rest.
        self._threads = threading.BoundedSemaphore(MOST_GUESSES)
        self._kept_free = threading.BoundedSemaphore(MOST_KNOWN_GUESSES)

    def log_in(
        self, name: str, password: str, address: str, *, hours: float, code: str | None = None
    ) -> tuple[str, str]:
        """Return a new token and when it expires, or refuse.

        An unknown name takes as long as a wrong password. An account with a second factor needs its
        `code` as well; without one, the refusal is `CodeNeeded`.
        """
        network = network_of(address)
        self._by_guess.take(network)
        row = self._store.account(name) if name.isprintable() else None
        is_known = row is not None and self._store.knows(name, network)
        if not is_known:
            (self._by_other_name if row is None else self._by_account).take(name)
        fits = self._fits(password, row, self._kept_free if is_known else self._threads)
        if row is None or not fits or row["status"] != "active":
            # Somebody may have typed a password for a name: only known names are written down.
            actor = "stranger" if row is None else actor_of(row)
            self._notes.add(actor, "login failed", address=address)
            raise Refusal("not-authenticated", "There is no account with this name and password.")
        if self._store.has_factor(name):
            if not code:
                raise CodeNeeded(row["password"])
            self._check_code(row, code, address)
        login = {"address": network, "password": row["password"]}
        return new_token(self._store, name, hours=hours, kind="session", **login)

    def log_in_second(
        self, name: str, stored: str, code: str, address: str, *, hours: float
    ) -> tuple[str, str]:
        """Return a new token for whom `log_in` asked for a code: `stored` is of its refusal."""
        self._by_guess.take(network_of(address))
        row = self._store.account(name)
        if row is None or row["status"] != "active" or hashed(row["password"]) != stored:
            raise Refusal("not-authenticated", "The account has changed since; begin again.")
        self._check_code(row, code, address)
        login = {"address": network_of(address), "password": row["password"]}
        return new_token(self._store, name, hours=hours, kind="session", **login)

    def _check_code(self, row: Row, code: str, address: str) -> None:
        # Whoever knows the password alone can use this limit up, but not that of an address where
        # somebody has logged in with a code.
        name, network = row["name"], network_of(address)
        self._by_code.take(f"{name} {network}" if self._store.knows(name, network) else name)
        if not self._use_code(row["name"], code):
            self._notes.add(actor_of(row), "login failed", address=address, by="second factor")
            raise Refusal("not-authenticated", "The code does not fit, or it was used before.")

    def limit(self, address: str) -> None:
        """Refuse an address that tries too often."""
        self._by_guess.take(network_of(address))

    def log_in_as(self, identity: Identity, address: str, *, hours: float) -> tuple[str, str]:
        """Return a new token for whom an identity provider named, and when it expires, or refuse.

        The refusal names the identity, for an operator to bind; so does the audit log.
        """
        row = self._store.identified(*identity)
        if row is None or row["status"] != "active":
            issuer, subject, _ = identity
            actor = "stranger" if row is None else actor_of(row)
            facts = {"address": address, "issuer": issuer, "subject": subject}
            self._notes.add(actor, "login failed", **facts)
            raise Refusal(
                "not-authenticated",
                f"No account of this hub that is active belongs to the identity {subject!r} of "
                f"{issuer}.",
            )
        return new_token(
            self._store, row["name"], hours=hours, kind="sso", address=network_of(address)
        )

    def note_failure(self, address: str, refusal: Refusal) -> None:
        """Write into the audit log that what an identity provider sent was refused."""
        facts = {"address": address, "by": "identity provider", "code": refusal.code}
        self._notes.add("stranger", "login failed", **facts)

    def check_own(self, name: str, password: str) -> None:
        """Refuse whoever is logged in and does not know the account's password."""
        self._by_own.take(name)  # no stranger who guesses uses up what a session may do
        row = self._store.account(name)
        if row is None or not self._fits(password, row, self._kept_free):
            self._notes.add("stranger" if row is None else actor_of(row), "wrong password")
            raise Refusal("not-allowed", "The password until now is another one.")

    def _fits(self, password: str, row: Row | None, place: threading.BoundedSemaphore) -> bool:
        if not place.acquire(blocking=False):
            raise Refusal("too-many", "Too many people are logging in at this moment.")
        try:
            return fits_password(password[:1001], row["password"] if row else _NOBODY)
        finally:
            place.release()
