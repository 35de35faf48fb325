"""A blind study with sites, keyholders and a hub, for tests of the road to a release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience import Budget, Ledger
from consilience.blind.masked import Batch, MaskedFile, Masking
from consilience.blind.pads import SealKey
from consilience.blind.roster import Card, Roster, check_cards
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.keyholder.keyholder import Keyholder
from consilience.privacy.spending import Account, Spending
from consilience.study.collect import Opened, Publication
from consilience.study.study import Study
from studies import as_number, blind_text, table

ROWS = 400


@dataclass
class Wards:
    """Sites, keyholders and the hub of one blind study, without folders or a network."""

    folder: Path
    n: int = 4
    n_keyholders: int = 2
    shares: int = 2
    spare: int = 1
    statistic: str = "Moments"
    settings: str = ""
    least: float = 0.1  # of what a site may choose for epsilon
    most: float = 3.0
    takes_number: bool = False

    def __post_init__(self) -> None:
        self.keyholders = [
            Keyholder.create(self.folder / f"keyholder-{k}") for k in range(self.n_keyholders)
        ]
        keys = [each.key.public for each in self.keyholders]
        text = blind_text(
            keys,
            statistic=self.statistic,
            shares=self.shares,
            spare=self.spare,
            min_sites=self.shares + self.spare,
            settings=self.settings,
        ).replace("epsilon_min = 0.1", f"epsilon_min = {self.least}")
        text = text.replace("epsilon_max = 3.0", f"epsilon_max = {self.most}")
        self.study = Study.from_text(as_number(text) if self.takes_number else text)
        assert self.study.blind is not None
        self.rule = self.study.blind
        self.keys = [SigningKey.generate() for _ in range(self.n)]
        self.hub, self.seal = SigningKey.generate(), SealKey.generate()
        listed = [(f"site {i}", key.public, "the registrar") for i, key in enumerate(self.keys)]
        self.roster = Roster.make(self.study.reference, listed, self.hub)
        self.cards = [
            each.countersign(self.roster, self.rule, self.hub.public) for each in self.keyholders
        ]
        self.cards.append(Card.make(self.roster, self.seal.public, self.hub))
        holders = check_cards(self.roster, self.rule, self.hub.public, self.cards)
        counted = tuple(self.roster.names)
        self.masking = Masking(self.roster, self.rule, holders, counted)

    def ledger(self, i: int) -> Ledger:
        """Return the ledger of a site."""
        ledger = Ledger(self.folder / f"{i}.sqlite")
        ledger.allow("ward", Budget(epsilon=500.0, delta=1e-4))
        return ledger

    def mask(self, i: int, **more: Any) -> Contribution:
        """Return a site's masked file; without an epsilon, one of noise only."""
        return self.study.accept(Contribution.load(self.mask_bytes(i, **more)))

    def mask_bytes(self, i: int, *, epsilon: float | None = 1.0, **more: Any) -> bytes:
        """Return the same as it is written."""
        rows = more.pop("rows", None)
        if rows is None and epsilon is not None:
            rows = table(ROWS, seed=i)
        account = Account(self.ledger(i), "ward", more.pop("key", None))
        spending = Spending(account, more.pop("alone", None))
        more = {"site": f"site {i}", "signing": self.keys[i], **more}
        return self.study.mask_sum(rows, spending, self.masking, epsilon=epsilon, **more)

    def open(self, files: list[Contribution]) -> Opened:
        """Have all keyholders acknowledge and open a batch."""
        described = [MaskedFile.of(file.sealed) for file in files]
        for keyholder in self.keyholders:
            for file in described:
                keyholder.acknowledge(file)
        batch = Batch.of(described)
        return Opened([(files, [each.open(batch) for each in self.keyholders])], self.seal)

    def release(self, files: list[Contribution], **more: Any) -> Release:
        """Return what the hub makes of one batch."""
        publication = Publication(self.hub, opened=self.open(files))
        return self.study.combine(files, publication=publication, **more)
