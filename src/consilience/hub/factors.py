"""Second factors: codes of an authenticator app, and recovery codes for those who lost it."""

from __future__ import annotations

import hmac
import secrets
import time
from typing import NamedTuple

import segno
from cryptography.fernet import InvalidToken
from pyotp import random_base32
from pyotp.totp import TOTP

from consilience.files.sealed import SigningKey
from consilience.hub.auth import fits_password, hash_password
from consilience.hub.store import Store, hashed
from consilience.protocol import Refusal

SECONDS = 30  # how long an app shows a code
MOST_OFF = 1  # codes before and after, for clocks that differ
RECOVERY_CODES = 8
ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # what people do not confuse


class Enrolment(NamedTuple):
    """What somebody types or scans into their app."""

    secret: str
    picture: str  # an SVG element


class FactorDesk:
    """Second factors of a hub's accounts.

    The database has their secrets encrypted under the hub's key, so a copy of it is of no use.
    """

    def __init__(self, store: Store, key: SigningKey) -> None:
        self.store, self._box = store, key.make_box("second factors")

    def begin(self, name: str) -> Enrolment:
        """Make a new secret for an account; it counts after a code of it was confirmed."""
        secret = random_base32()
        self.store.begin_factor(name, self._box.encrypt(secret.encode()).decode())
        return _show(name, secret)

    def pending(self, name: str) -> Enrolment | None:
        """Return what was begun and not confirmed."""
        row = self.store.factor(name)
        return None if row is None or row["confirmed"] else _show(name, self._open(row["secret"]))

    def _open(self, secret: str) -> str:
        try:
            return self._box.decrypt(secret.encode()).decode()
        except InvalidToken:
            raise Refusal(
                "failed", "The second factor cannot be read: an operator has to reset it."
            ) from None

    def confirm(
        self, name: str, code: str, token: str = "", network: str | None = None
    ) -> list[str]:
        """Turn a second factor on; return the recovery codes, which are shown once.

        It ends the account's sessions, but not the one with this `token`, which is at `network`.
        """
        step = self._step_of(name, code, confirmed=False)
        if step is None:
            raise Refusal("malformed", "The code does not fit. Wait for the next one and type it.")
        codes = [_new_code(number) for number in range(1, RECOVERY_CODES + 1)]
        stored = [hash_password(each) for each in codes]
        self.store.confirm_factor(name, step, stored, hashed(token), network)
        return codes

    def use(self, name: str, code: str) -> bool:
        """Tell whether a code fits, which uses it up: none works twice."""
        code = "".join(code.lower().split())
        if code.isascii() and code.isdigit():
            step = self._step_of(name, code, confirmed=True)
            return step is not None and self.store.use_step(name, step)
        number = code.partition("-")[0]
        if not (number.isascii() and number.isdigit() and len(number) < 3):
            return False
        stored = self.store.recovery_code(name, int(number))
        if stored is None or not fits_password(code[:100], stored):
            return False
        return self.store.use_recovery_code(name, int(number))

    def _step_of(self, name: str, code: str, *, confirmed: bool) -> int | None:
        """Return the interval whose code this is, if it is near."""
        row, code = self.store.factor(name), "".join(code.split())
        if row is None or (row["confirmed"] is not None) != confirmed:
            return None
        now, totp = int(time.time()) // SECONDS, TOTP(self._open(row["secret"]))
        found = None
        for step in range(now - MOST_OFF, now + MOST_OFF + 1):
            if hmac.compare_digest(totp.generate_otp(step).encode(), code.encode()):
                found = step
        return found


def _show(name: str, secret: str) -> Enrolment:
    uri = TOTP(secret).provisioning_uri(name=name, issuer_name="consilience hub")
    return Enrolment(secret, segno.make(uri, micro=False).svg_inline(scale=4, light="#fff"))


def _new_code(number: int) -> str:
    """Return a recovery code of 59 bits; its number says which hash it is compared with."""
    text = "".join(secrets.choice(ALPHABET) for _ in range(12))
    return f"{number}-{text[:4]}-{text[4:8]}-{text[8:]}"
