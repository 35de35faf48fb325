"""Sites, keyholders and a hub of a made-up blind study, for tests."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from consilience.blind.masked import KIND, Batch, MaskedFile, Opening, mask, unmask
from consilience.blind.pads import Context, SealKey, Words
from consilience.blind.roster import Card, Roster, Rule, check_cards
from consilience.errors import ContributionRejected
from consilience.files.sealed import Sealed, SigningKey
from consilience.keyholder.keyholder import Keyholder

STUDY = {"name": "wards", "digest": hashlib.sha256(b"wards").hexdigest()}
LENGTH = 5


@dataclass
class Parties:
    """Everybody in one study, with `n` sites and `n_keyholders` keyholders in `folder`."""

    folder: Path
    n: int = 6
    n_keyholders: int = 2
    shares: int = 3
    spare: int = 1
    study: dict[str, str] = field(default_factory=lambda: dict(STUDY))

    def __post_init__(self) -> None:
        self.sites = [SigningKey.generate() for _ in range(self.n)]
        self.keyholders = [
            Keyholder.create(self.folder / f"keyholder-{k}") for k in range(self.n_keyholders)
        ]
        self.hub, self.hub_seal = SigningKey.generate(), SealKey.generate()
        public = tuple(each.key.public for each in self.keyholders)
        self.rule = Rule(self.shares, self.spare, public)
        self.roster = Roster.make(
            self.study,
            [(f"site {i}", key.public, "the registrar") for i, key in enumerate(self.sites)],
            self.hub,
        )
        self.cards = [
            each.countersign(self.roster, self.rule, self.hub.public) for each in self.keyholders
        ]
        self.cards.append(Card.make(self.roster, self.hub_seal.public, self.hub))
        self.holders = check_cards(self.roster, self.rule, self.hub.public, self.cards)

    def file(
        self,
        site: int,
        numbers: list[int] | None = None,
        *,
        sequence: int = 1,
        counted: list[int] | None = None,
        nonce: str | None = None,
        key: SigningKey | None = None,
        name: str | None = None,
    ) -> Sealed:
        """Return a site's masked file."""
        signing = key or self.sites[site]
        words: Words = np.array(numbers or [site + 1] * LENGTH, np.int64)
        nonce = nonce or os.urandom(32).hex()
        name = name or f"site {site}"
        context = Context(
            self.study["digest"],
            self.roster.digest,
            name,
            signing.public,
            sequence,
            nonce,
            "Moments",
            len(words),
        )
        masked, seeds = mask(words, context, self.holders)
        trusted = range(self.n) if counted is None else counted
        blind = {
            "roster": self.roster.digest,
            "nonce": nonce,
            "seeds": seeds,
            "counted": sorted(self.sites[i].public for i in trusted),
            "shares": self.shares,
            "spare": self.spare,
            "only_noise": False,
        }
        facts = {
            "study": self.study,
            "site": name,
            "sequence": sequence,
            "learner": "Moments",
            "blind": blind,
        }
        return Sealed.seal(KIND, facts, {"sum": masked}, signing)

    def acknowledge(self, sealed: Sealed) -> None:
        """Have all keyholders acknowledge a file."""
        for each in self.keyholders:
            each.acknowledge(MaskedFile.of(sealed))

    def open(self, files: list[Sealed]) -> list[Opening]:
        """Have all keyholders open a batch."""
        batch = Batch.of(map(MaskedFile.of, files))
        return [each.open(batch) for each in self.keyholders]

    def unmask(self, files: list[Sealed], openings: list[Opening]) -> Words:
        """Return the sum of a batch, as the hub computes it."""
        pairs = [(MaskedFile.of(sealed), sealed.tensors["sum"]) for sealed in files]
        return unmask(pairs, openings, self.rule, (self.hub.public, self.hub_seal))


def try_to_open(folder: Path, batch: Batch, answers: multiprocessing.Queue[str]) -> None:
    """Open a batch, in a process of its own, and say what came of it."""
    try:
        Keyholder(folder).open(batch)
        answers.put("opened")
    except ContributionRejected:
        answers.put("refused")
