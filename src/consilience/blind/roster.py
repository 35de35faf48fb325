"""Who takes part in a blind study: the roster of its sites, and the holders of its pads.

The hub issues invitations, so it could fill a batch with sites that it made up, and be left with
one real site's numbers under a small part of the noise. Therefore sites are counted from a list
that is frozen before training: each entry names a site, its key, and who checked that the key is
the site's own. Every pad holder signs it, and each site decides itself whom of it to count on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from consilience.errors import SettingsError
from consilience.files.sealed import Sealed, SigningKey, refused
from consilience.text import printable

ROSTER, CARD = "roster", "pad-holder"
MOST_SITES = 10_000
MOST_HOLDERS = 16
_HEX = re.compile("[0-9a-f]{64}")


def is_key(value: object) -> bool:
    """Tell whether a value has the form of a public key or a digest."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


@dataclass(frozen=True)
class Rule:
    """What a study fixes about sharing noise.

    Parameters
    ----------
    shares
        The noise of this many sites together is what a guarantee needs.
    spare
        How many more sites than that must be in a batch: so many may leak their own noise to the
        hub and the guarantee still holds.
    keyholders
        The public keys of the keyholders, by which sites know them.
    """

    shares: int
    spare: int
    keyholders: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keyholders", tuple(self.keyholders))
        whole = all(type(n) is int and 1 <= n <= MOST_SITES for n in (self.shares, self.spare))
        if not whole or self.shares < 2:
            raise SettingsError(
                "Noise is shared by at least two sites, with at least one to spare. Nothing was "
                f"agreed. Got shares={self.shares!r}, spare={self.spare!r}."
            )
        keys = all(map(is_key, self.keyholders))
        distinct = keys and len(set(self.keyholders)) == len(self.keyholders)
        if not (1 <= len(self.keyholders) < MOST_HOLDERS and distinct):
            raise SettingsError(
                f"A blind study names 1 to {MOST_HOLDERS - 1} different keyholders by their public "
                "keys. Nothing was agreed."
            )

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `as_dict` wrote, or the part of a study file that says the same."""
        missing = [name for name in ("shares", "spare", "keyholders") if name not in facts]
        if missing or not isinstance(facts["keyholders"], list | tuple):
            raise SettingsError(
                "A blind study names shares, spare and a list of keyholders. Nothing was agreed. "
                f"{'Add ' + ', '.join(missing) if missing else 'Write keyholders as a list'}."
            )
        return cls(facts["shares"], facts["spare"], tuple(facts["keyholders"]))

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as plain values."""
        return {**vars(self), "keyholders": list(self.keyholders)}

    @property
    def least(self) -> int:
        """How many sites that a site counts on must be in a batch with it, itself included."""
        return self.shares + self.spare


@dataclass(frozen=True)
class Roster:
    """The sites of a study, by key: their names, and who checked each key."""

    sealed: Sealed
    names: Mapping[str, str]

    @classmethod
    def make(
        cls, study: Mapping[str, str], sites: Iterable[tuple[str, str, str]], key: SigningKey
    ) -> Self:
        """Sign a list of sites: name, public key, and who checked that the key is the site's."""
        listed = [
            {"name": name, "key": public, "checked_by": checked}
            for name, public, checked in sorted(sites, key=lambda site: site[1])
        ]
        return cls.read(Sealed.seal(ROSTER, {"study": dict(study), "sites": listed}, {}, key))

    @classmethod
    def read(cls, sealed: Sealed) -> Self:
        """Check a roster of unknown origin."""
        sealed.verify()
        facts, sites = sealed.facts, sealed.facts.get("sites")
        if set(facts) != {"study", "sites", "key", "tensors"} or not is_study(facts["study"]):
            raise refused("it is not a roster")
        if not isinstance(sites, list) or not 1 <= len(sites) <= MOST_SITES:
            raise refused(f"a roster lists 1 to {MOST_SITES:,} sites")
        for site in sites:
            if not isinstance(site, dict) or set(site) != {"name", "key", "checked_by"}:
                raise refused("a site of a roster has a name, a key and who checked it")
            texts = site["name"], site["checked_by"]
            if not is_key(site["key"]) or not all(
                isinstance(text, str) and 1 <= len(text) <= 200 and printable(text) == text
                for text in texts
            ):
                raise refused("a site of a roster has a name, a key and who checked it")
        keys, names = [site["key"] for site in sites], {site["name"] for site in sites}
        if keys != sorted(set(keys)) or len(names) < len(sites):
            raise refused("a roster lists each site, and each key, once, in the order of keys")
        return cls(sealed, {site["key"]: site["name"] for site in sites})

    @property
    def digest(self) -> str:
        """SHA-256 of what is signed, by which files name the roster."""
        return self.sealed.digest

    @property
    def study(self) -> Mapping[str, str]:
        """Name and digest of the study."""
        return dict(self.sealed.facts["study"])


@dataclass(frozen=True)
class Card:
    """A pad holder's signed word for one study: the roster it saw, and the key to seal seeds to."""

    sealed: Sealed

    @classmethod
    def make(cls, roster: Roster, seal: str, key: SigningKey) -> Self:
        """Countersign a roster."""
        facts = {"study": dict(roster.study), "roster": roster.digest, "seal": seal}
        return cls.read(Sealed.seal(CARD, facts, {}, key))

    @classmethod
    def read(cls, sealed: Sealed) -> Self:
        """Check a card of unknown origin."""
        sealed.verify()
        facts = sealed.facts
        fits = set(facts) == {"study", "roster", "seal", "key", "tensors"}
        if not fits or not (is_study(facts["study"]) and is_key(facts["roster"])):
            raise refused("it is not a pad holder's card")
        if not is_key(facts["seal"]) or facts["tensors"]:
            raise refused("it is not a pad holder's card")
        return cls(sealed)

    @property
    def key(self) -> str:
        """The holder's public key."""
        return self.sealed.key

    @property
    def study(self) -> Mapping[str, str]:
        """Name and digest of the study."""
        return dict(self.sealed.facts["study"])

    @property
    def roster(self) -> str:
        """The digest of the roster that is countersigned."""
        return str(self.sealed.facts["roster"])

    @property
    def seal(self) -> str:
        """The public key that seeds are sealed to."""
        return str(self.sealed.facts["seal"])


def check_cards(roster: Roster, rule: Rule, hub: str, cards: Collection[Card]) -> dict[str, str]:
    """Return each pad holder's key for seeds; all keyholders and the hub must have signed.

    `rule` names the keyholders whom the site knows from elsewhere, never from the hub.
    """
    facts = {"study": dict(roster.study), "roster": roster.digest}
    holders = {
        card.key: card.seal
        for card in cards
        if {name: card.sealed.facts[name] for name in facts} == facts
    }
    expected = {*rule.keyholders, hub}
    if len(expected) != len(rule.keyholders) + 1:
        raise SettingsError(
            "The hub is one of the study's own keyholders, who must be somebody else. Nothing was "
            "masked. Ask the coordinator for keyholders that do not run the hub."
        )
    if set(holders) != expected or len(cards) != len(expected):
        raise SettingsError(
            f"Of the {len(expected)} that hold pads in this study (its keyholders and the hub), "
            f"{len(expected & set(holders))} have signed its roster. Nothing was masked. Wait "
            "until all have."
        )
    if len(set(holders.values())) < len(holders):
        raise SettingsError(
            "Two pad holders have the same key for seeds, so that one of them could open what is "
            "for the other. Nothing was masked. Ask the coordinator who they are."
        )
    return holders


def is_study(value: object) -> bool:
    """Tell whether a value names a study by name and digest."""
    return (
        isinstance(value, dict)
        and set(value) == {"name", "digest"}
        and isinstance(value["name"], str)
        and is_key(value["digest"])
    )
