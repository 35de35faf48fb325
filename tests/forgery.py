"""Files made by hand: every part of them can be wrong while their signature is right."""

import copy
import hashlib
import json
import math
import random
import secrets
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from consilience.files.sealed import Sealed, SigningKey, message_of


class Forge:
    """A file made by hand, so that every part of it can be wrong while its signature is right."""

    def __init__(self, sealed: Sealed, key: SigningKey) -> None:
        self.kind, self.key = sealed.kind, key
        self.facts = {
            name: copy.deepcopy(value) for name, value in sealed.facts.items() if name != "tensors"
        }
        self.facts["key"] = key.public
        self.tensors = {name: np.array(tensor) for name, tensor in sealed.tensors.items()}
        self.text: Callable[[dict[str, Any]], str] = dumped
        self.header: Callable[[dict[str, Any]], str] = dumped
        self.length: int | None = None
        self.tail = b""

    def to_bytes(self) -> bytes:
        names = {
            "float64": "F64",
            "int64": "I64",
            "uint8": "U8",
            "bool": "BOOL",
            "float32": "F32",
            "float16": "F16",
        }
        listed, header, body, at = {}, {}, b"", 0
        for name, tensor in self.tensors.items():
            content = np.ascontiguousarray(tensor).tobytes()
            form = {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
            listed[name] = {**form, "sha256": hashlib.sha256(content).hexdigest()}
            offsets = [at, at + len(content)]
            header[name] = {
                "dtype": names[form["dtype"]],
                "shape": form["shape"],
                "data_offsets": offsets,
            }
            body, at = body + content, at + len(content)
        text = self.text({**self.facts, "tensors": listed})
        signed = self.key.sign(
            message_of(self.kind, "") + text.encode(errors="surrogatepass")
        ).hex()
        header["__metadata__"] = {"consilience": text, "kind": self.kind, "signature": signed}
        top = self.header(header).encode(errors="surrogatepass")
        return (
            struct.pack("<Q", len(top) if self.length is None else self.length)
            + top
            + body
            + self.tail
        )


def dumped(facts: Any) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


# -------------------------------------------------------------- contributions that must be refused

Lie = Callable[[random.Random, Forge], object]


def _state(name: str, *values: Any) -> Lie:
    """Return a lie that states one of these values, or what one of these functions makes."""

    def lie(rng: random.Random, forge: Forge) -> None:
        value = rng.choice(values)
        forge.facts[name] = value(rng, forge.facts[name]) if callable(value) else value

    return lie


def _scale(rng: random.Random, number: float) -> float:
    return number * rng.choice((1e-6, 0.5, 0.999, 1.001, 2.0, 1e3, 1e300, -1.0)) or 1.0


def _lie_about_events(rng: random.Random, forge: Forge) -> None:
    events = json.loads(forge.facts["events"])
    event, how = rng.choice(events), rng.randrange(5)
    numbers = sorted(name for name, value in event.items() if type(value) in (int, float))
    if how == 0:
        events.remove(event)
    elif how == 1:
        events.append(event)
    elif how == 2:
        event["unit"] = "person"
    else:
        name = rng.choice(numbers)
        event[name] = _scale(rng, event[name])
    forge.facts["events"] = json.dumps(events, sort_keys=True, separators=(",", ":"))


def _lie_within(group: str, **changes: tuple[Any, ...]) -> Lie:
    """Return a lie about one of the facts in a group of facts."""

    def lie(rng: random.Random, forge: Forge) -> None:
        inner = rng.choice(sorted(changes))
        value = rng.choice(changes[inner])
        forge.facts[group][inner] = (
            value(rng, forge.facts[group][inner]) if callable(value) else value
        )

    return lie


def _lie_in_coefficients(rng: random.Random, forge: Forge) -> None:
    name = rng.choice(sorted(forge.tensors))
    tensor = forge.tensors[name].astype(float)
    tensor[...] = rng.choice((1e6, 1e15, 1e100, 1e308, -1e308, math.nan, math.inf))
    forge.tensors[name] = tensor


def _lie_in_form(rng: random.Random, forge: Forge) -> None:
    name = rng.choice(sorted(forge.tensors))
    tensor, how = forge.tensors[name], rng.randrange(5)
    if how == 0:
        del forge.tensors[name]
    elif how == 1:
        forge.tensors[rng.choice(("more", "COEF", "a/b", "", "x" * 300))] = tensor
    elif how == 2:
        forge.tensors[name] = tensor.astype(rng.choice((np.float32, np.uint8, np.float16)))
    elif how == 3:
        forge.tensors[name] = np.concatenate([tensor.reshape(-1)] * rng.choice((2, 3, 50)))
    else:
        forge.tensors[name] = np.zeros(rng.choice(((0,), (2, 0), (1, 1, 1, 7))), tensor.dtype)


def _swap_tensors(rng: random.Random, forge: Forge) -> None:
    """Give tensors each other's names, or say that one lies where another does."""
    one, *_, other = sorted(forge.tensors)
    if rng.random() < 0.5:
        tensors = forge.tensors
        tensors[one], tensors[other] = tensors[other], tensors[one]
        return

    def edit(header: dict[str, Any]) -> str:
        header[one], header[other] = header[other], header[one]
        return dumped(header)

    forge.header = edit


def _lie_in_header(rng: random.Random, forge: Forge) -> None:
    how = rng.randrange(4)
    if how == 0:
        forge.length = rng.choice((0, 1, 100, 2**32, 2**63, 2**64 - 1, 8 << 20, 9 << 20))
    elif how == 1:
        forge.tail = rng.choice((b"\0", b"\0" * 8, b"\xff" * 4096))
    elif how == 2:
        forge.header = lambda header: dumped(header) + " " * 100 + "}"
    else:
        padding = "a" * (1 << 16) if rng.random() < 0.9 else "a" * (5 << 20)
        forge.header = lambda header: dumped({**header, "more": padding})


def _lie_in_text(rng: random.Random, forge: Forge) -> None:
    ways: tuple[Callable[[dict[str, Any]], str], ...] = (
        lambda facts: json.dumps(facts, sort_keys=True),
        lambda facts: dumped(facts) + " ",
        lambda facts: dumped(facts)[:-1] + ',"site":"south"}',
        lambda facts: '{"aa":NaN,' + dumped(facts)[1:],
        lambda facts: '{"aa":' + "[" * 1000 + "]" * 1000 + "," + dumped(facts)[1:],
        lambda facts: '{"aa":"' + "a" * (1 << 16) + '",' + dumped(facts)[1:],
    )
    forge.text = rng.choice(ways)


LIES: dict[str, Lie] = {
    "events": _lie_about_events,
    "size": _state("size", 0, -1, 1, 2**31, 2**59, 1.5, True, "200", [200]),
    "classes": _state("classes", ["yes", "no"], ["no"], ["no", "yes", "maybe"], ["a", "b"], None),
    "features": _state("n_features", 0, 1, 3, 10**6, -2, 2.0),
    "guarantee": _lie_within(
        "guarantee",
        epsilon=(_scale, 0.0, None),
        delta=(0.5, -1.0),
        unit=("person", "site"),
        assumptions=(["The hub is honest."], "x" * 5000),
    ),
    "settings": _lie_within(
        "settings", epsilon=(_scale, 0.01, 50.0), unit=("person",), delta=(1.0,), more=(1,)
    ),
    "receipt": _lie_within(
        "receipt", entry=(None, "2", 1.5, 0, -(2**52)), hash=("x", 7), more=([], "x", "x" * 10**4)
    ),
    "software": _state("software", "", "0.1 approved by the hub", "0.1\n", "0.1+approved", 1),
    "created": _state("created", "", "now", "2026-11-18 approved by the hub", 1),
    "study": _lie_within("study", name=("other", "trees "), digest=("0" * 64,), more=(1,)),
    "site": _state("site", "north", "South", "ward 1", "", "\u202ehtron", "x" * 5000),
    "learner": _state("learner", "PrivateRidge", "Average", "", "__class__", 7),
    "nonce": _state("nonce", "x", 7, "0" * 63, "A" * 64),
    "sequence": _state("sequence", 0, -1, 1, 2**53, 2**63, 10**30, 1.0, True, "2", None),
    "coefficients": _lie_in_coefficients,
    "form": _lie_in_form,
    "swapped": _swap_tensors,
    "header": _lie_in_header,
    "text": _lie_in_text,
}


class Liar:
    """A member with a valid key who sends files that a hub must refuse, each known by its number.

    Its honest contribution is at the hub already, so that number 1 and those before are old.
    """

    def __init__(self, honest: Sealed, key: SigningKey, others: bytes, elsewhere: bytes) -> None:
        self.honest, self.key, self.others = honest, key, others
        self.content, self.elsewhere = honest.to_bytes(), elsewhere
        self.ways: dict[str, Callable[[random.Random], bytes]] = {
            "truncated": lambda rng: self.content[: rng.randrange(len(self.content))],
            "damaged": self._damage,
            "spliced": lambda rng: self.content[: -rng.randrange(9, 40)] + self.others[-8:],
            "others": lambda _: self.others,
            "elsewhere": lambda _: self.elsewhere,
            "stranger": lambda rng: self._forge(rng, SigningKey.generate()).to_bytes(),
        }
        self.kinds = sorted({*self.ways, *LIES})

    def file(self, number: int) -> tuple[str, bytes]:
        """Return the kind of a lie, and the file."""
        rng = random.Random(number)
        kind = self.kinds[number % len(self.kinds)]
        if kind in self.ways:
            return kind, self.ways[kind](rng)
        forge = self._forge(rng, self.key)
        LIES[kind](rng, forge)
        return kind, forge.to_bytes()

    def _forge(self, rng: random.Random, key: SigningKey) -> Forge:
        """Return a file in which nothing is wrong yet, with a number and a nonce of its own."""
        forge = Forge(self.honest, key)
        forge.facts |= {"sequence": rng.randrange(2, 900), "nonce": secrets.token_hex(32)}
        return forge

    def _damage(self, rng: random.Random) -> bytes:
        """Turn one bit of the numbers."""
        n_numbers = sum(tensor.nbytes for tensor in self.honest.tensors.values())
        at = len(self.content) - rng.randrange(1, n_numbers + 1)
        turned = self.content[at] ^ (1 << rng.randrange(8))
        return self.content[:at] + bytes([turned]) + self.content[at + 1 :]
