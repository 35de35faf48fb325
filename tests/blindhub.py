"""A blind study at a hub: its sites, its keyholders, and how their requests reach the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consilience import Budget, Ledger
from consilience.blind.masked import Masking
from consilience.blind.roster import CARD, Card, Roster, check_cards
from consilience.files.contribution import Contribution
from consilience.files.sealed import Sealed, SigningKey
from consilience.hub.hub import Hub
from consilience.keyholder.desk import HubDesk, work
from consilience.keyholder.keyholder import Keyholder
from consilience.privacy.spending import Account, Spending
from consilience.protocol import HEADER, digest, sign_request
from consilience.site.client import HubClient
from consilience.study.study import Study
from studies import blind_text, table

Send = Callable[[str, str, bytes, dict[str, str]], tuple[int, bytes]]


class Through(HubClient):
    """Requests that reach the hub through a function in place of a network."""

    send: Send

    def _send(self, method: str, path: str, body: bytes, most: int) -> tuple[int, bytes]:
        header = sign_request(self.key, self.hub_key, method, path, digest(body))
        return self.send(method, path, body, {HEADER: header})


@dataclass
class BlindHub:
    """One blind study at a hub, with `n` sites that enrolled and `n_keyholders` keyholders."""

    hub: Hub
    folder: Path
    send: Send
    n: int = 4
    n_keyholders: int = 2
    shares: int = 2
    spare: int = 1
    name: str = "heart-risk"
    address: str = "http://hub"
    statistic: str = "Moments"
    settings: str = ""
    keys: list[SigningKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keyholders = [
            Keyholder.create(self.folder / f"{self.name}-keyholder-{k}")
            for k in range(self.n_keyholders)
        ]
        text = blind_text(
            [each.key.public for each in self.keyholders],
            statistic=self.statistic,
            settings=self.settings,
            shares=self.shares,
            spare=self.spare,
            min_sites=self.shares + self.spare,
        ).replace("heart-risk", self.name)
        self.hub.add_study(text, "operator")
        self.study = Study.from_text(text)
        self.keys = [self.enrol(f"site {i}") for i in range(self.n)]

    def enrol(self, site: str) -> SigningKey:
        """Enrol a site and return its key."""
        key = SigningKey.generate()
        code, _ = self.hub.invite(self.name, "operator")
        self.hub.enrol(code=code, site=site, key=key.public, nonce=key.public[:32])
        return key

    def client(self, key: SigningKey) -> Through:
        """Return how the owner of a key asks the hub."""
        made = Through("http://hub", key, self.hub.key.public)
        object.__setattr__(made, "send", self.send)
        return made

    def desk(self, keyholder: Keyholder) -> HubDesk:
        """Return where a keyholder asks."""
        return HubDesk(self.client(keyholder.key), self.name)

    def freeze(self) -> Roster:
        """Freeze the roster, and have every keyholder countersign it."""
        sites = self.hub.store.enrolled_keys(self.name)
        roster = self.hub.blind.freeze(
            self.study, dict.fromkeys(sites, "the registrar"), "operator"
        )
        for keyholder in self.keyholders:
            desk = self.desk(keyholder)
            agreed = desk.agree()
            card = keyholder.countersign(agreed.roster, agreed.rule, agreed.hub)
            keyholder.remember(self.study.digest, self.address)
            desk.post_card(card)
        return roster

    def masking(self) -> Masking:
        """Return what a site is shown before it masks anything."""
        rule = self.study.blind
        assert rule is not None
        roster = self.hub.blind.roster(self.study)
        rows = self.hub.store.cards(self.name)
        cards = [Card.read(Sealed.load(bytes(row["content"]), CARD)) for row in rows]
        holders = check_cards(roster, rule, self.hub.key.public, cards)
        return Masking(roster, rule, holders, tuple(roster.names))

    def mask(
        self, i: int, *, epsilon: float | None = 1.0, sequence: int = 1, **more: Any
    ) -> Contribution:
        """Return a site's masked file; without an epsilon, one of noise only."""
        ledger = Ledger(self.folder / f"{self.name}-{i}.ledger")
        ledger.allow("ward", Budget(epsilon=500.0, delta=1e-3))
        rows = None if epsilon is None else table(200, seed=i)
        spending = Spending(Account(ledger, "ward"))
        whose: Any = {"site": f"site {i}", "signing": self.keys[i], "sequence": sequence, **more}
        content = self.study.mask_sum(rows, spending, self.masking(), epsilon=epsilon, **whose)
        return Contribution.load(content)

    def submit(self, i: int, contribution: Contribution) -> Any:
        """Hand over a site's file."""
        content = contribution.sealed.to_bytes()
        return self.client(self.keys[i]).submit(self.name, contribution, content)

    def hand_over(self, *sites: int, **more: Any) -> None:
        """Have some sites mask and hand over."""
        for i in sites:
            self.submit(i, self.mask(i, **more))

    def work(self, *which: int) -> list[str]:
        """Let keyholders do what waits for them, and return what they refused."""
        refused: list[str] = []
        for k in which or range(self.n_keyholders):
            refused += work(self.keyholders[k], lambda keyholder, _: self.desk(keyholder)).refused
        return refused
