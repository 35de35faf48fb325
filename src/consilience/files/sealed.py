"""One signed file: facts as JSON, numbers as tensors, an Ed25519 signature over both.

Everything that crosses a trust boundary is such a file (safetensors, so that reading one never runs
code). All facts are one canonical JSON text, which lists the digest of every tensor; the signature
covers that text. Length, header, facts, signature and tensors of a file are checked in this order,
and each has a limit that is checked before anything of that size is allocated.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from safetensors.numpy import save as save_tensors

from consilience.errors import ContributionRejected, SettingsError
from consilience.files.durable import open_regular, write_durably
from consilience.privacy.guarantee import Guarantee

Array = NDArray[Any]

ADAPTED = "adapted"  # the one kind of file that stays where it was made
MOST_BYTES = 256 << 20
MOST_FACTS = 4 << 20  # bytes of JSON
MOST_DEPTH = 16
MOST_DIGITS = 20  # of a whole number, with its sign
MOST_TENSORS = 1 << 14  # a release of many members holds a few of each
MOST_DIMENSIONS = 4
_DTYPES = {"F64": "float64", "I64": "int64", "U8": "uint8", "BOOL": "bool"}
_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_KEY, _SIGNATURE = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{128}")
_BLOCK = 1 << 17  # numbers checked at a time
# The forms of `software` and `created`: certificates show them, and have no room for prose.
_VERSION = re.compile(
    r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}((a|b|rc)[0-9]{1,6})?(\.post[0-9]{1,6})?(\.dev[0-9]{1,6})?"
    r"(\+[0-9a-g.]{1,40})?"
)
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00")


@cache
def software() -> str:
    """Return this package's version, as files state it."""
    return version("consilience")


def canonical(facts: object) -> str:
    """Return the canonical JSON text of facts: sorted keys, no spaces, exact finite numbers."""
    return _WRITER.encode(facts)


# Made once: `json.dumps` would make one for each text.
_WRITER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


class SigningKey:
    """A site's or hub's private key; others know it by `public`.

    Privacy
    -------
    Anyone who holds the file can sign in its owner's name. Only its owner can read it.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        raw = serialization.Encoding.Raw, serialization.PublicFormat.Raw
        self.public: str = key.public_key().public_bytes(*raw).hex()

    @classmethod
    def generate(cls) -> Self:
        """Make a new key from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a key that `save` wrote."""
        try:
            key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (OSError, ValueError, TypeError):
            raise SettingsError(
                f"The key file {Path(path).name!r} cannot be read as a private key. Nothing was "
                "signed. Restore it from its backup, or make a new key and have the coordinator "
                "enrol it."
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise SettingsError(
                f"The key file {Path(path).name!r} holds a key of another kind. Nothing was signed."
            )
        return cls(key)

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self:
        """Return the key in this file; make one if there is none."""
        if not Path(path).exists():
            with suppress(FileExistsError):  # another process was first
                cls.generate().save(path)
        return cls.load(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key so that only its owner can read it; an existing file is never replaced."""
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        content = self._key.private_bytes(*form, serialization.NoEncryption())
        write_durably(path, content, mode=0o600, replace=False)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of `message`."""
        return self._key.sign(message)

    def make_box(self, purpose: str) -> Fernet:
        """Return what encrypts for a purpose, so that only who has this key can read it."""
        raw = serialization.Encoding.Raw, serialization.PrivateFormat.Raw
        secret = self._key.private_bytes(*raw, serialization.NoEncryption())
        derived = HKDF(hashes.SHA256(), 32, None, f"consilience {purpose}".encode()).derive(secret)
        return Fernet(base64.urlsafe_b64encode(derived))

    def __repr__(self) -> str:
        return f"SigningKey({self.public[:16]}…)"


# The y of the points of order 1, 2, 4 and 8 (RFC 8032, 5.1): keys for which anyone can sign.
_PRIME = 2**255 - 19
_OF_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_WEAK_KEYS = frozenset({0, 1, _PRIME - 1, _PRIME, _PRIME + 1, _OF_ORDER_8, _PRIME - _OF_ORDER_8})


def is_signed(message: bytes, signature: bytes, public: str) -> bool:
    """Tell whether `signature` is that of `message` by the owner of the key `public`."""
    try:
        key = bytes.fromhex(public)
        if int.from_bytes(key, "little") % 2**255 in _WEAK_KEYS:
            return False
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def message_of(kind: str, text: str) -> bytes:
    """Return the bytes that are signed; they differ for different kinds of text."""
    return f"consilience {kind} 1\n".encode() + text.encode()


@dataclass(frozen=True)
class Sealed:
    """Signed facts and the tensors they list. Equal digests mean equal facts and tensors."""

    kind: str
    facts: Mapping[str, Any]
    tensors: Mapping[str, Array]
    signature: bytes

    @classmethod
    def seal(
        cls, kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Array], key: SigningKey
    ) -> Self:
        """Sign `facts`, with the digest of every tensor added to them."""
        stored = {name: _storable(name, tensor) for name, tensor in sorted(tensors.items())}
        listed = {
            name: {"dtype": one.dtype.name, "shape": list(one.shape), "sha256": _digest([one])}
            for name, one in stored.items()
        }
        whole = {**facts, "key": key.public, "tensors": listed}
        text = canonical(whole)
        if len(text) > MOST_FACTS:  # or nobody could read the file
            raise SettingsError(
                f"The facts of this {kind} would be longer than {MOST_FACTS >> 20} MiB, which no "
                "reader accepts. Nothing was written. Use fewer members."
            )
        return cls(kind, whole, stored, key.sign(message_of(kind, text)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what is signed, by which the file is known."""
        return hashlib.sha256(message_of(self.kind, canonical(self.facts))).hexdigest()

    @property
    def key(self) -> str:
        """Public key of the signer."""
        return str(self.facts["key"])

    def verify(self, key: str | None = None) -> None:
        """Check the signature, and with `key` that its owner made it."""
        if not is_signed(message_of(self.kind, canonical(self.facts)), self.signature, self.key):
            raise refused("its signature does not fit its contents")
        if key is not None and key != self.key:
            raise refused("it was signed with another key than expected")

    def to_bytes(self) -> bytes:
        """Return the file."""
        metadata = {"consilience": canonical(self.facts), "kind": self.kind}
        return save_tensors(dict(self.tensors), {**metadata, "signature": self.signature.hex()})

    def save(self, path: str | os.PathLike[str], *, replace: bool = True) -> None:
        """Write the file so that it is whole or absent, even if the machine stops.

        Without `replace`, an existing file stays as it is and FileExistsError is raised.
        """
        write_durably(path, self.to_bytes(), replace=replace)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | bytes, kind: str) -> Self:
        """Read a file of unknown origin, and refuse one that is malformed or wrongly signed."""
        file = SealedFile(source, kind)
        tensors = {name: file.tensor(name) for name in file.facts["tensors"]}
        for name, tensor in tensors.items():
            if _digest([tensor]) != file.facts["tensors"][name]["sha256"]:
                raise refused(f"its tensor {name!r} differs from its digest")
        return cls(kind, file.facts, tensors, file.signature)


@dataclass(frozen=True)
class SignedFile:
    """What contributions and releases share: signed facts, made for a study."""

    sealed: Sealed

    @staticmethod
    def stamp(study: Mapping[str, str], sequence: int) -> dict[str, Any]:
        """Return the facts that every file states about its making."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        made = {"software": software(), "created": created}
        return {"study": dict(study), "sequence": int(sequence), **made}

    @staticmethod
    def is_stamped(facts: Mapping[str, Any]) -> bool:
        """Tell whether the version and the time that facts state have the form of `stamp`."""
        made, created = facts.get("software"), facts.get("created")
        return (
            isinstance(made, str)
            and isinstance(created, str)
            and _VERSION.fullmatch(made) is not None
            and _TIME.fullmatch(created) is not None
        )

    @property
    def study(self) -> Mapping[str, str]:
        """Name and digest of the study."""
        return dict(self.sealed.facts["study"])

    @property
    def sequence(self) -> int:
        """Number of this file among the site's contributions, or the study's releases."""
        return int(self.sealed.facts["sequence"])

    @property
    def digest(self) -> str:
        """SHA-256 of what is signed."""
        return self.sealed.digest

    @cached_property
    def guarantee(self) -> Guarantee:
        """What the file promises, and to whom."""
        return Guarantee.from_dict(dict(self.sealed.facts["guarantee"]))

    def verify(self, *, key: str | None = None) -> Self:
        """Check the signature again; with `key`, also that the owner of that key made it."""
        self.sealed.verify(key)
        return self

    def save(self, path: str | os.PathLike[str], *, replace: bool = True) -> None:
        """Write the file, whole or not at all; an existing one stays without `replace`."""
        self.sealed.save(path, replace=replace)


class SealedFile:
    """A file of unknown origin, by name or as bytes, whose form, facts and signature were checked.

    Opening allocates no tensor. Tensors are read piece by piece with plain reads, because the pages
    of a memory-mapped file would count as memory in use.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes, kind: str, *, most_bytes: int = MOST_BYTES
    ) -> None:
        self._source = source if isinstance(source, bytes) else Path(source)
        self.kind = kind
        with self._open() as file:
            self._forms, self._start = _header(file, most_bytes)
        metadata = self._forms.pop("__metadata__", None)
        if not isinstance(metadata, dict) or set(metadata) != {"consilience", "kind", "signature"}:
            raise refused("it is not a consilience file")
        if metadata["kind"] != kind:
            raise refused(
                "it is a model of one site's exact records, which must not leave that site: "
                "delete every copy elsewhere"
                if metadata["kind"] == ADAPTED
                else f"a {kind} was expected"
            )
        text = metadata["consilience"]
        self.facts = parse_facts(text)
        key, signature = self.facts.get("key"), metadata["signature"]
        if not (
            isinstance(key, str) and _KEY.fullmatch(key) and _SIGNATURE.fullmatch(str(signature))
        ):
            raise refused("it carries no key or no signature")
        self.signature, message = bytes.fromhex(signature), message_of(kind, text)
        if not is_signed(message, self.signature, key):
            raise refused("its signature does not fit its contents")
        self.digest = hashlib.sha256(message).hexdigest()
        listed = self.facts.get("tensors")
        if not isinstance(listed, dict) or set(listed) != set(self._forms):
            raise refused("it lists other tensors than it holds")
        for name, entry in self._forms.items():
            form = listed[name]
            if not isinstance(form, dict) or set(form) != {"dtype", "shape", "sha256"}:
                raise refused("it lists a tensor without its form")
            if (_DTYPES[entry["dtype"]], entry["shape"]) != (form["dtype"], form["shape"]):
                raise refused("a tensor has another form than it lists")

    @property
    def hollow(self) -> Sealed:
        """The file without its tensors."""
        return self.filled({})

    def filled(self, tensors: Mapping[str, Array]) -> Sealed:
        """Return the file with these tensors, which may be a part of its own."""
        return Sealed(self.kind, self.facts, tensors, self.signature)

    def check_tensors(self, watch: Callable[[str, Array], None] | None = None) -> None:
        """Check digest and finiteness of every tensor, holding one block of it at a time.

        `watch` is called with the name of a tensor and each of its blocks.
        """
        for name, form in self.facts["tensors"].items():
            if _digest(self._watched(name, watch)) != form["sha256"]:
                raise refused("a tensor differs from its digest")

    def rows(self, name: str, begin: int, stop: int) -> Array:
        """Return a slice of a tensor along its first axis."""
        shape = self._forms[name]["shape"]
        row = math.prod(shape[1:])
        return self._read(name, begin * row, stop * row).reshape(stop - begin, *shape[1:])

    def tensor(self, name: str) -> Array:
        """Return a whole tensor."""
        shape = self._forms[name]["shape"]
        return self._read(name, 0, math.prod(shape)).reshape(shape)

    def zeros(self, name: str) -> Array:
        """Return zeros of a tensor's shape and type, which take no memory."""
        form = self._forms[name]
        return np.broadcast_to(np.zeros((), _DTYPES[form["dtype"]]), form["shape"])

    def _watched(self, name: str, watch: Callable[[str, Array], None] | None) -> Iterator[Array]:
        for block in self._blocks(name):
            yield block
            if watch is not None:
                watch(name, block)

    def _blocks(self, name: str) -> Iterator[Array]:
        n_numbers = math.prod(self._forms[name]["shape"])
        for begin in range(0, n_numbers, _BLOCK):
            yield self._read(name, begin, min(begin + _BLOCK, n_numbers))

    def _read(self, name: str, begin: int, stop: int) -> Array:
        form = self._forms[name]
        numbers = np.empty(stop - begin, _DTYPES[form["dtype"]])
        with self._open() as file:
            file.seek(self._start + form["data_offsets"][0] + begin * numbers.itemsize)
            if file.readinto(numbers.data) != numbers.nbytes:
                raise refused("it ends too early")
        return numbers

    def _open(self) -> io.BufferedReader | io.BytesIO:
        if isinstance(self._source, bytes):
            return io.BytesIO(self._source)
        try:
            return open_regular(self._source)
        except OSError:
            raise SettingsError(
                f"The file {self._source.name!r} cannot be read. Check that it exists."
            ) from None


def _storable(name: str, tensor: Array) -> Array:
    array = np.asarray(tensor, order="C")
    typed = array.dtype.name in _DTYPES.values() and array.ndim <= MOST_DIMENSIONS
    if not (_NAME.fullmatch(name) and typed):
        raise SettingsError(
            f"A tensor {name!r} of type {array.dtype} and shape {array.shape} cannot be stored."
        )
    return array


def _digest(blocks: Iterable[Array]) -> str:
    """Return the SHA-256 of a tensor's numbers, which must all be finite."""
    digest = hashlib.sha256()
    for block in blocks:
        if block.dtype.kind == "f" and not np.isfinite(block).all():
            raise refused("a tensor holds a number that is not finite")
        digest.update(np.ascontiguousarray(block).data if block.size else b"")
    return digest.hexdigest()


def _header(file: io.BufferedReader | io.BytesIO, most_bytes: int) -> tuple[dict[str, Any], int]:
    """Return the safetensors header and where it ends, checked against the file's length."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(8)
    (length,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
    if size > most_bytes:
        raise refused(f"it is larger than {most_bytes >> 20} MiB")
    if not 2 <= length <= min(2 * MOST_FACTS, size - 8):
        raise refused("it is not a safetensors file")
    header = _parse(file.read(length), 2 * MOST_FACTS)
    if not isinstance(header, dict) or len(header) > MOST_TENSORS + 1:
        raise refused("its header is malformed")
    end = 0
    ordered = sorted(
        (name for name in header if name != "__metadata__"), key=lambda name: _offsets(header[name])
    )
    for name in ordered:
        entry, (begin, stop) = header[name], _offsets(header[name])
        shape, dtype = entry.get("shape"), entry.get("dtype")
        whole = isinstance(shape, list) and all(
            type(n) is int and 0 <= n <= most_bytes for n in shape
        )
        known = isinstance(dtype, str) and dtype in _DTYPES
        if not (_NAME.fullmatch(name) and known and whole and len(shape) <= MOST_DIMENSIONS):
            raise refused("a tensor has a name, type or shape that is not allowed")
        n_bytes = math.prod([np.dtype(_DTYPES[dtype]).itemsize, *shape])
        if begin != end or stop - begin != n_bytes:
            raise refused("its tensors do not fill it exactly")
        end = stop
    if 8 + length + end != size:
        raise refused("its tensors do not fill it exactly")
    return header, 8 + length


def _offsets(entry: object) -> tuple[int, int]:
    ends = entry.get("data_offsets") if isinstance(entry, dict) else None
    if (
        isinstance(ends, list)
        and len(ends) == 2
        and all(type(n) is int and 0 <= n < 1 << 60 for n in ends)
    ):
        return ends[0], ends[1]
    raise refused("its header is malformed")


def parse_facts(text: object) -> dict[str, Any]:
    """Return the facts in a canonical text of unknown origin, or refuse it."""
    facts = _parse(text, MOST_FACTS)
    if not isinstance(facts, dict) or canonical(facts) != text:
        raise refused("its facts are not in canonical form")
    return facts


def _parse(text: object, most: int) -> Any:
    """Parse JSON of limited length, depth and size of numbers, in which no key is repeated."""
    if not isinstance(text, str | bytes) or len(text) > most:
        raise refused("its facts are too long")
    try:
        nesting = text.decode() if isinstance(text, bytes) else text
        nesting.encode()  # fails for half a character
        parsed = _READER.decode(nesting)
        deep = _depth(parsed)
    except (ValueError, RecursionError):
        raise refused("its facts are not valid JSON") from None
    if deep > MOST_DEPTH:
        raise refused("its facts are nested too deeply")
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError
    return entries


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)  # JSON has 1e999, Python also NaN; no signed text can hold them
    if not math.isfinite(number):
        raise ValueError
    return number


_READER = json.JSONDecoder(
    object_pairs_hook=_once, parse_constant=_finite, parse_int=_whole, parse_float=_finite
)


def _depth(value: object) -> int:
    depth = 0
    level: list[Any] = [value] if type(value) in (dict, list) else []
    while level:  # not a call for each part, which would take longer than parsing the text
        depth += 1
        parts = [whole.values() if type(whole) is dict else whole for whole in level]
        level = [part for each in parts for part in each if type(part) in (dict, list)]
    return depth


def refused(problem: str) -> ContributionRejected:
    """Return the error that refuses a file."""
    return ContributionRejected(
        f"The file was refused: {problem}. Nothing of it was used. Ask its sender to send it again."
    )
