"""The papers of a blind study in a shared folder, from its roster to openings; and what is a batch.

A shared folder of a study holds the masked files themselves, as it holds any contribution. Whatever
else its parties show each other lies in its folder ``blind``, one file for each paper, under a name
that says what it is and whose. Anybody can write there: a paper that is malformed, wrongly signed,
or under another's name counts as absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from consilience.blind.masked import (
    ACKNOWLEDGEMENT,
    BATCH,
    KIND,
    OPENING,
    Acknowledgement,
    Batch,
    MaskedFile,
    Opening,
    find_obstacles,
)
from consilience.blind.roster import CARD, ROSTER, Card, Roster, Rule
from consilience.errors import ConsilienceError, SettingsError
from consilience.files.durable import read_regular, write_durably
from consilience.files.sealed import Sealed, SealedFile, canonical, parse_facts

FOLDER = "blind"  # in the shared folder of a study
MOST_BYTES = 1 << 28  # of one paper
Paper = TypeVar("Paper")


class Papers:
    """The papers of the blind study in a shared folder.

    ``roster.safetensors``, ``pad-holder-HOLDER.safetensors``,
    ``acknowledgement-FILE-HOLDER.safetensors``, ``batch-BATCH.json`` and
    ``opening-BATCH-HOLDER.safetensors``, where HOLDER is a public key, and FILE and BATCH are
    digests.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.shared = Path(folder)
        self.place = self.shared / FOLDER

    @property
    def roster(self) -> Roster | None:
        """The frozen roster."""
        return self._read(f"{ROSTER}.safetensors", _read_roster)

    def freeze(self, roster: Roster) -> None:
        """Put the roster there; it can never be replaced."""
        known = self.roster
        if known is not None and known.digest != roster.digest:
            raise SettingsError(
                "The study's roster is frozen, and this is another one. Nothing was written. Sites "
                "that are missing on it need a new study."
            )
        self._write(f"{ROSTER}.safetensors", roster.sealed.to_bytes())

    def cards(self) -> list[Card]:
        """Return the cards of all pad holders that have signed."""
        found = self._read_all(f"{CARD}-*.safetensors", _read_card)
        return [card for name, card in found if name == f"{CARD}-{card.key}.safetensors"]

    def add_card(self, card: Card) -> None:
        """Put a pad holder's card there."""
        self._write(f"{CARD}-{card.key}.safetensors", card.sealed.to_bytes())

    def files(self) -> list[MaskedFile]:
        """Return the signed facts of all masked files, which lie beside the study."""
        found = []
        for path in sorted(self.shared.glob("*.safetensors")):
            with suppress(ConsilienceError, OSError):  # something else
                found.append(MaskedFile.of(SealedFile(path, KIND).hollow))
        return found

    def acknowledgements(self) -> dict[str, set[str]]:
        """Return by digest of a file the keys of the holders that have acknowledged it."""
        found: dict[str, set[str]] = {}
        for name, each in self._read_all(f"{ACKNOWLEDGEMENT}-*.safetensors", Acknowledgement.read):
            if name == _name_acknowledgement(each):
                found.setdefault(each.file, set()).add(each.key)
        return found

    def add_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Put a keyholder's acknowledgement there."""
        content = acknowledgement.sealed.to_bytes()
        self._write(_name_acknowledgement(acknowledgement), content)

    def batches(self) -> list[Batch]:
        """Return the batches that are to be opened."""
        found = self._read_all(f"{BATCH}-*.json", _read_batch)
        return [batch for name, batch in found if name == f"{BATCH}-{batch.digest}.json"]

    def add_batch(self, batch: Batch) -> None:
        """List a batch to the keyholders."""
        self._write(f"{BATCH}-{batch.digest}.json", canonical(batch.as_dict()).encode())

    def openings(self, batch: Batch) -> list[Opening]:
        """Return the openings of a batch that are there."""
        found = self._read_all(f"{OPENING}-{batch.digest}-*.safetensors", Opening.read)
        return [opening for name, opening in found if name == _name_opening(opening)]

    def add_opening(self, opening: Opening) -> None:
        """Put a keyholder's opening there."""
        self._write(_name_opening(opening), opening.sealed.to_bytes())

    def _write(self, name: str, content: bytes) -> None:
        self.place.mkdir(exist_ok=True)
        write_durably(self.place / name, content)

    def _read(self, name: str, read: Callable[[bytes], Paper]) -> Paper | None:
        return next((paper for _, paper in self._read_all(name, read)), None)

    def _read_all(
        self, pattern: str, read: Callable[[bytes], Paper]
    ) -> Iterator[tuple[str, Paper]]:
        for path in sorted(self.place.glob(pattern)):
            with suppress(ConsilienceError, OSError, ValueError):
                yield path.name, read(read_regular(path, MOST_BYTES))


def choose_batch(
    waiting: Sequence[MaskedFile], rule: Rule
) -> tuple[list[MaskedFile], dict[str, str]]:
    """Return the largest batch that keyholders may open, and why the other files wait, by digest.

    A file whose site counts on too few of the others is left out, which may leave too few for the
    next one: what remains at the end does not depend on the order. No site may have two files.
    """
    left, reasons = list(waiting), dict[str, str]()
    while left:
        present = {file.site_key for file in left}
        lacking = [file for file in left if len(file.counts() & present) < rule.least]
        if not lacking:
            break
        for file in lacking:
            reasons[file.digest] = (
                f"{len(file.counts() & present)} of the {rule.least} sites that it needs are there"
            )
        left = [file for file in left if file.digest not in reasons]
    if left and (obstacles := find_obstacles(left, rule)):
        return [], reasons | {file.digest: obstacles[0] for file in left}
    return left, reasons


def _name_acknowledgement(each: Acknowledgement) -> str:
    return f"{ACKNOWLEDGEMENT}-{each.file}-{each.key}.safetensors"


def _name_opening(opening: Opening) -> str:
    return f"{OPENING}-{opening.batch}-{opening.key}.safetensors"


def _read_roster(content: bytes) -> Roster:
    return Roster.read(Sealed.load(content, ROSTER))


def _read_card(content: bytes) -> Card:
    return Card.read(Sealed.load(content, CARD))


def _read_batch(content: bytes) -> Batch:
    return Batch.from_dict(parse_facts(content.decode()))
