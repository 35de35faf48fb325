"""One-time pads: what makes a site's numbers uniform to all but the holders of every pad together.

A site draws one fresh seed for each pad holder, which are the keyholders and the hub. A seed is
expanded to a pad by ChaCha20 under a key that HKDF derives from the seed and the context of the
file, and is sealed to its holder by HPKE (RFC 9180) for that very file: a seed that is copied into
another file opens nothing. The proof is in docs/guarantees/shared-noise.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from consilience.errors import SettingsError
from consilience.files.durable import write_durably
from consilience.files.sealed import canonical, refused

Words = NDArray[np.int64]  # whole numbers modulo 2^64, in the type that files hold

SEED_BYTES = 32
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_SEALED = re.compile("[0-9a-f]{160}")  # 32 bytes of key, 32 of seed, 16 of tag
_RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw


class SealKey:
    """A pad holder's private key for one study; seeds are sealed to its `public` half.

    Privacy
    -------
    Whoever has it, with the signed facts of a study's files, can compute this holder's pads. All
    holders' pads together unmask single files, so a keyholder destroys it when a study ends.
    """

    def __init__(self, key: X25519PrivateKey) -> None:
        self._key = key
        self.public: str = key.public_key().public_bytes(*_RAW).hex()

    @classmethod
    def generate(cls) -> Self:
        """Make a new key from the operating system's randomness."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a key that `save` wrote."""
        try:
            key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (OSError, ValueError, TypeError):
            key = None
        if not isinstance(key, X25519PrivateKey):
            raise SettingsError(
                f"The key file {Path(path).name!r} cannot be read as a key that opens seeds. "
                "Nothing was opened. Restore it from its backup."
            )
        return cls(key)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key so that only its owner can read it; an existing file is never replaced."""
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        content = self._key.private_bytes(*form, serialization.NoEncryption())
        write_durably(path, content, mode=0o600, replace=False)

    def open(self, sealed: str, info: bytes) -> bytes:
        """Return the seed that was sealed to this key for `info`, or refuse."""
        try:
            seed = _SUITE.decrypt(bytes.fromhex(sealed), self._key, info)
        except (InvalidTag, ValueError, TypeError):
            seed = b""
        if len(seed) != SEED_BYTES:
            raise refused("a seed in it was not sealed for it")
        return seed

    def __repr__(self) -> str:
        return f"SealKey({self.public[:16]}…)"


@dataclass(frozen=True)
class Context:
    """What a pad is for: one holder, and one file of one site in one study."""

    study: str  # digest
    roster: str  # digest
    site: str
    key: str
    sequence: int
    nonce: str
    statistic: str
    length: int

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Return the context of a file from its signed facts, whose form was checked."""
        blind = facts["blind"]
        return cls(
            study=facts["study"]["digest"],
            roster=blind["roster"],
            site=facts["site"],
            key=facts["key"],
            sequence=facts["sequence"],
            nonce=blind["nonce"],
            statistic=facts["learner"],
            length=facts["tensors"]["sum"]["shape"][0],
        )

    def text(self, holder: str) -> bytes:
        """Return the context as bytes, for the pad holder with this key."""
        return canonical({"format": "consilience pad 1", "holder": holder, **vars(self)}).encode()

    def seal_text(self, holder: str, masked: str) -> bytes:
        """Return what a seed is sealed for: the context and the digest of the masked numbers."""
        return self.text(holder) + b"\n" + masked.encode()


def expand(seed: bytes, context: bytes, length: int) -> Words:
    """Return the pad of a seed: `length` words that nobody without the seed can tell from random.

    A pad is for one file only, which its context names.
    """
    key = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=context).derive(seed)
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), "<i8").astype(np.int64, copy=False)


def seal(seed: bytes, public: str, info: bytes) -> str:
    """Seal a seed to the holder of the key `public`, for `info` and nothing else."""
    key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    return _SUITE.encrypt(seed, key, info).hex()


def is_sealed_seed(value: object) -> bool:
    """Tell whether a value has the form of a sealed seed."""
    return isinstance(value, str) and _SEALED.fullmatch(value) is not None


def add_words(parts: Iterable[Words], length: int) -> Words:
    """Return the sum of words modulo 2^64."""
    total = np.zeros(length, np.uint64)
    for part in parts:
        total += part.view(np.uint64)
    return total.view(np.int64)


def subtract_words(minuend: Words, subtrahend: Words) -> Words:
    """Return the difference of words modulo 2^64."""
    return (minuend.view(np.uint64) - subtrahend.view(np.uint64)).view(np.int64)
