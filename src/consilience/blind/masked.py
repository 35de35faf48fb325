"""Files whose numbers are masked: making them at a site, checking what they say, and opening sums.

What a site sends is its sum, its share of the noise and one pad for each pad holder, added modulo
2^64. All that anyone needs to know about such a file is in its signed facts, so that keyholders see
those and never the masked numbers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

from consilience.blind.pads import (
    SEED_BYTES,
    Context,
    SealKey,
    Words,
    add_words,
    expand,
    is_sealed_seed,
    seal,
    subtract_words,
)
from consilience.blind.roster import Roster, Rule, is_key, is_study
from consilience.files.sealed import (
    Sealed,
    SigningKey,
    canonical,
    is_signed,
    message_of,
    parse_facts,
    refused,
)

KIND = "contribution"
ACKNOWLEDGEMENT, BATCH, OPENING = "acknowledgement", "batch", "opening"
_FACTS = {"roster", "nonce", "seeds", "counted", "shares", "spare", "only_noise"}
MOST_NUMBERS = 1 << 24
_SIGNATURE = re.compile("([0-9a-f]{128})?")


def mask(
    words: Words, context: Context, holders: Mapping[str, str]
) -> tuple[Words, dict[str, str]]:
    """Return a site's numbers under one pad for each holder, and the seeds sealed to them.

    Seeds are fresh from the operating system and forgotten with this call. `holders` maps the key
    of each pad holder to the key that seeds are sealed to. `context` must never be used for other
    numbers: its nonce is drawn for one file.
    """
    seeds = {holder: os.urandom(SEED_BYTES) for holder in holders}
    pads = (expand(seed, context.text(holder), len(words)) for holder, seed in seeds.items())
    masked = add_words((words, *pads), len(words))
    digest = hashlib.sha256(masked.tobytes()).hexdigest()
    return masked, {
        holder: seal(seed, holders[holder], context.seal_text(holder, digest))
        for holder, seed in seeds.items()
    }


@dataclass(frozen=True)
class Masking:
    """What a site was shown, and accepted, before it masks anything for a study.

    Parameters
    ----------
    roster, rule
        The roster that all pad holders signed, and the study's rule.
    holders
        By the key of each pad holder the key that seeds are sealed to, as `check_cards` returns.
    counted
        The keys of the sites that this one counts on, itself apart.
    """

    roster: Roster
    rule: Rule
    holders: Mapping[str, str]
    counted: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "counted", tuple(sorted(set(self.counted))))

    def count(self, site: str) -> int:
        """Return on how many sites the one with this key counts, itself included."""
        return len({*self.counted, site})

    def seal(
        self, facts: Mapping[str, Any], words: Words, key: SigningKey, *, only_noise: bool
    ) -> Sealed:
        """Mask a site's numbers under fresh pads, and sign the facts together with how."""
        context = Context(
            study=self.roster.study["digest"],
            roster=self.roster.digest,
            site=facts["site"],
            key=key.public,
            sequence=facts["sequence"],
            nonce=os.urandom(32).hex(),
            statistic=facts["learner"],
            length=len(words),
        )
        masked, seeds = mask(words, context, self.holders)
        blind = {
            "roster": self.roster.digest,
            "nonce": context.nonce,
            "seeds": seeds,
            "counted": list(self.counted),
            "shares": self.rule.shares,
            "spare": self.rule.spare,
            "only_noise": only_noise,
        }
        return Sealed.seal(KIND, {**facts, "blind": blind}, {"sum": masked}, key)


@dataclass(frozen=True)
class MaskedFile:
    """The signed facts of a masked file, whose form and signature were checked."""

    facts: Mapping[str, Any]
    signature: bytes

    @classmethod
    def of(cls, sealed: Sealed) -> Self:
        """Return what keyholders may see of a file."""
        return cls(sealed.facts, sealed.signature).check()

    @classmethod
    def read(cls, text: object, signature: object) -> Self:
        """Check facts of unknown origin, as canonical text, with their signature in hexadecimal."""
        facts = parse_facts(text)
        try:
            return cls(facts, bytes.fromhex(str(signature))).check()
        except ValueError:
            raise refused("it carries no signature") from None

    def check(self) -> Self:
        """Refuse facts that are not those of a masked file, or that their site did not sign."""
        facts = self.facts
        blind, sums = facts.get("blind"), facts.get("tensors")
        if not (
            isinstance(blind, dict)
            and set(blind) == _FACTS
            and is_study(facts.get("study"))
            and all(isinstance(facts.get(name), str) for name in ("site", "learner"))
            and is_key(facts.get("key"))
            and type(facts.get("sequence")) is int
            and 1 <= facts["sequence"] < 2**53
        ):
            raise refused("it does not say whose it is, or how it is masked")
        if not (
            is_key(blind["roster"])
            and is_key(blind["nonce"])
            and all(type(blind[name]) is int for name in ("shares", "spare"))
            and type(blind["only_noise"]) is bool
            and isinstance(blind["seeds"], dict)
            and all(is_key(k) and is_sealed_seed(v) for k, v in blind["seeds"].items())
            and isinstance(blind["counted"], list)
            and all(map(is_key, blind["counted"]))
            and blind["counted"] == sorted(set(blind["counted"]))
        ):
            raise refused("it does not say how it is masked")
        if not isinstance(sums, dict) or set(sums) != {"sum"} or not _is_vector(sums["sum"]):
            raise refused("it holds something else than one masked sum")
        if not is_signed(message_of(KIND, canonical(facts)), self.signature, facts["key"]):
            raise refused("its signature does not fit its contents")
        return self

    def check_agreed(self, roster: Roster, rule: Rule, holders: Collection[str]) -> None:
        """Refuse a file that was made for something else than what its study agreed on."""
        blind = self.facts["blind"]
        if self.facts["study"] != dict(roster.study) or blind["roster"] != roster.digest:
            raise refused("it was made for another study or another roster")
        if roster.names.get(self.site_key) != self.facts["site"]:
            raise refused("its site is not on the roster with this name and key")
        if (blind["shares"], blind["spare"]) != (rule.shares, rule.spare):
            raise refused("its share of the noise is not what the study says")
        if set(blind["seeds"]) != set(holders):
            raise refused("its seeds are not for the pad holders of the study")
        if not set(blind["counted"]) <= set(roster.names):
            raise refused("it counts on a site that is not on the roster")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what is signed, by which the file is known."""
        return hashlib.sha256(message_of(KIND, self.text)).hexdigest()

    @property
    def text(self) -> str:
        """The signed facts, as keyholders are sent them."""
        return canonical(self.facts)

    @property
    def site_key(self) -> str:
        """The public key of the site."""
        return str(self.facts["key"])

    @property
    def context(self) -> Context:
        """What its pads are for."""
        return Context.of(self.facts)

    @property
    def masked_digest(self) -> str:
        """The digest of the masked numbers."""
        return str(self.facts["tensors"]["sum"]["sha256"])

    def counts(self) -> set[str]:
        """Return the keys of the sites whose noise this site counts on, its own included."""
        return {*self.facts["blind"]["counted"], self.site_key}

    def open_seed(self, holder: str, key: SealKey) -> bytes:
        """Return the seed that was sealed to a pad holder."""
        info = self.context.seal_text(holder, self.masked_digest)
        return key.open(self.facts["blind"]["seeds"][holder], info)

    def pad(self, holder: str, key: SealKey) -> Words:
        """Return the pad of a holder, who alone has the key that opens its seed."""
        context = self.context
        return expand(self.open_seed(holder, key), context.text(holder), context.length)


@dataclass(frozen=True)
class Batch:
    """Files whose sum is to be opened: the digests of their signed facts, and what they share.

    ``signature`` is that of the hub that lists it, where others could list one too.
    """

    study: Mapping[str, str]
    roster: str
    files: tuple[str, ...]
    signature: str = field(default="", compare=False)

    @classmethod
    def of(cls, files: Iterable[MaskedFile]) -> Self:
        """Return the batch of these files."""
        listed = sorted(files, key=lambda file: file.digest)
        first = listed[0].facts
        return cls(
            dict(first["study"]), first["blind"]["roster"], tuple(file.digest for file in listed)
        )

    @property
    def digest(self) -> str:
        """SHA-256 by which openings name the batch."""
        return hashlib.sha256(self._message).hexdigest()

    @property
    def _message(self) -> bytes:
        return message_of(BATCH, canonical(replace(self, signature="").as_dict()))

    def sign(self, key: SigningKey) -> Self:
        """Return the batch as the owner of a key lists it."""
        return replace(self, signature=key.sign(self._message).hex())

    def is_listed_by(self, key: str) -> bool:
        """Tell whether the owner of this public key lists the batch."""
        signature = bytes.fromhex(self.signature)
        return bool(signature) and is_signed(self._message, signature, key)

    def as_dict(self) -> dict[str, Any]:
        """Return the batch as it is sent."""
        facts = {"study": dict(self.study), "roster": self.roster, "files": list(self.files)}
        return facts | ({"signature": self.signature} if self.signature else {})

    @classmethod
    def from_dict(cls, facts: object) -> Self:
        """Read what `as_dict` wrote."""
        if not (
            isinstance(facts, dict)
            and set(facts) - {"signature"} == {"study", "roster", "files"}
            and _SIGNATURE.fullmatch(str(facts.get("signature", "")))
            and is_study(facts["study"])
            and is_key(facts["roster"])
            and isinstance(facts["files"], list)
            and all(map(is_key, facts["files"]))
            and facts["files"] == sorted(set(facts["files"]))
            and facts["files"]
        ):
            raise refused("it is not a batch")
        signature = str(facts.get("signature", ""))
        return cls(facts["study"], facts["roster"], tuple(facts["files"]), signature)


@dataclass(frozen=True)
class Acknowledgement:
    """A keyholder's signed word that it can open its seed in a file, which is not used twice."""

    sealed: Sealed

    @classmethod
    def make(cls, file: MaskedFile, key: SigningKey) -> Self:
        """Acknowledge a file."""
        facts = {"study": dict(file.facts["study"]), "file": file.digest}
        return cls(Sealed.seal(ACKNOWLEDGEMENT, facts, {}, key))

    @classmethod
    def read(cls, source: bytes) -> Self:
        """Check an acknowledgement of unknown origin."""
        sealed = Sealed.load(source, ACKNOWLEDGEMENT)
        facts = sealed.facts
        fits = set(facts) == {"study", "file", "key", "tensors"} and not facts["tensors"]
        if not fits or not (is_study(facts["study"]) and is_key(facts["file"])):
            raise refused("it is not an acknowledgement")
        return cls(sealed)

    @property
    def key(self) -> str:
        """The keyholder's public key."""
        return self.sealed.key

    @property
    def study(self) -> Mapping[str, str]:
        """Name and digest of the study."""
        return dict(self.sealed.facts["study"])

    @property
    def file(self) -> str:
        """The digest of the file."""
        return str(self.sealed.facts["file"])


def find_obstacles(files: Sequence[MaskedFile], rule: Rule) -> list[str]:
    """Return why the sum of these files may not be opened; nothing if it may.

    Sites are counted, not files, and for every file only the sites that it counts on itself: the
    hub's word for who is a site is no evidence.
    """
    obstacles = []
    present = [file.site_key for file in files]
    if len(set(present)) < len(present):
        obstacles.append("a site has two files in the batch")
    if len({file.context.length for file in files}) > 1:
        obstacles.append("its files have different lengths")
    if len({file.facts["learner"] for file in files}) > 1:
        obstacles.append("its files hold different statistics")
    for file in files:
        n_counted = len(file.counts() & set(present))
        if n_counted < rule.least:
            obstacles.append(
                f"of the sites that {file.facts['site']!r} counts on, itself included, "
                f"{n_counted} are in the batch, and {rule.least} are needed"
            )
    return obstacles


@dataclass(frozen=True)
class Opening:
    """A keyholder's signed sum of its pads for one batch."""

    sealed: Sealed

    @classmethod
    def make(cls, batch: Batch, pads: Words, number: int, head: str, key: SigningKey) -> Self:
        """Sign the sum of pads, with the number of the opening and the head of the log before."""
        facts = {
            "study": dict(batch.study),
            "batch": batch.digest,
            "number": number,
            "head": head,
        }
        return cls(Sealed.seal(OPENING, facts, {"pads": pads}, key))

    @classmethod
    def read(cls, source: bytes) -> Self:
        """Check an opening of unknown origin."""
        sealed = Sealed.load(source, OPENING)
        facts = sealed.facts
        fits = set(facts) == {"study", "batch", "number", "head", "key", "tensors"}
        if not fits or not (is_study(facts["study"]) and is_key(facts["batch"])):
            raise refused("it is not an opening")
        if not (type(facts["number"]) is int and facts["number"] >= 1 and is_key(facts["head"])):
            raise refused("it is not an opening")
        if set(facts["tensors"]) != {"pads"} or not _is_vector(facts["tensors"]["pads"]):
            raise refused("it is not an opening")
        return cls(sealed)

    @property
    def key(self) -> str:
        """The keyholder's public key."""
        return self.sealed.key

    @property
    def batch(self) -> str:
        """The digest of the batch."""
        return str(self.sealed.facts["batch"])

    @property
    def study(self) -> Mapping[str, str]:
        """Name and digest of the study."""
        return dict(self.sealed.facts["study"])

    @property
    def pads(self) -> Words:
        """The sum of the keyholder's pads."""
        return self.sealed.tensors["pads"]


def unmask(
    files: Sequence[tuple[MaskedFile, Words]],
    openings: Collection[Opening],
    rule: Rule,
    hub: tuple[str, SealKey],
) -> Words:
    """Return the sum of all files of a batch, at the hub: what they hold, and their noise.

    Every keyholder must have opened this very batch.
    """
    described = [file for file, _ in files]
    if obstacles := find_obstacles(described, rule):
        raise refused("; ".join(obstacles))
    batch = Batch.of(described)
    signers = {opening.sealed.key: opening for opening in openings}
    if set(signers) != set(rule.keyholders) or len(openings) != len(signers):
        raise refused("not every keyholder of the study has opened the batch, once")
    for opening in openings:
        facts = opening.sealed.facts
        if facts["batch"] != batch.digest or facts["study"] != dict(batch.study):
            raise refused("a keyholder has opened another batch")
        if opening.pads.shape != (described[0].context.length,):
            raise refused("a keyholder's pads have another length")
    for file, words in files:
        if hashlib.sha256(words.tobytes()).hexdigest() != file.masked_digest:
            raise refused("its numbers differ from the digest that its site signed")
    length = described[0].context.length
    masked = add_words((words for _, words in files), length)
    theirs, own = (each.pads for each in openings), (file.pad(*hub) for file in described)
    return subtract_words(masked, add_words(chain(theirs, own), length))


def _is_vector(form: object) -> bool:
    return (
        isinstance(form, dict)
        and form.get("dtype") == "int64"
        and isinstance(form.get("shape"), list)
        and len(form["shape"]) == 1
        and type(form["shape"][0]) is int
        and 1 <= form["shape"][0] <= MOST_NUMBERS
        and is_key(form.get("sha256"))
    )
