"""The papers of a blind study in a shared folder, from its roster to openings; and what is a batch.

A shared folder of a study holds the masked files themselves, as it holds any contribution. Whatever
else its parties show each other lies in its folder ``blind``, one file for each paper, under a name
that says what it is and whose. Anybody can write there: a paper that is malformed, wrongly signed,
or under another's name counts as absent. A relay carries the same papers under the same names, and
to keyholders the signed facts of files in place of the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

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
from consilience.files.sealed import Sealed, SealedFile, canonical, parse_facts, refused

FOLDER = "blind"  # in the shared folder of a study
FACTS = "facts"
MOST_BYTES = 1 << 28  # of one paper
Paper: TypeAlias = Roster | Card | MaskedFile | Acknowledgement | Batch | Opening


class Papers:
    """The papers of the blind study in a shared folder.

    ``roster.safetensors``, ``pad-holder-HOLDER.safetensors``, ``facts-FILE.json``,
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
        return next(self._read_all(ROSTER), None)

    def freeze(self, roster: Roster, keyholders: Collection[str]) -> None:
        """Put the roster there; it can never be replaced.

        One that somebody else put there does not count before one of the `keyholders` has signed
        it.
        """
        known = self.roster
        if known is not None and known.digest != roster.digest:
            signed = {card.key for card in self.cards() if card.roster == known.digest}
            if known.sealed.key != roster.sealed.key and not signed & set(keyholders):
                known = None
        if known is not None and known.digest != roster.digest:
            raise SettingsError(
                "The study's roster is frozen, and this is another one. Nothing was written. Sites "
                "that are missing on it need a new study."
            )
        self._write(ROSTER, roster)

    def cards(self) -> list[Card]:
        """Return the cards of all pad holders that have signed."""
        return list(self._read_all(CARD))

    def add_card(self, card: Card) -> None:
        """Put a pad holder's card there."""
        self._write(CARD, card)

    def files(self) -> list[MaskedFile]:
        """Return the signed facts of all masked files, which lie beside the study.

        Where a relay put facts in place of files, they lie with the papers.
        """
        found = {file.digest: file for file in self._read_all(FACTS)}
        for path in sorted(self.shared.glob("*.safetensors")):
            with suppress(ConsilienceError, OSError):  # something else
                file = MaskedFile.of(SealedFile(path, KIND).hollow)
                found[file.digest] = file
        return list(found.values())

    def add_facts(self, file: MaskedFile) -> None:
        """Put the signed facts of a file there."""
        self._write(FACTS, file)

    def acknowledgements(self) -> dict[str, set[str]]:
        """Return by digest of a file the keys of the holders that have acknowledged it."""
        found: dict[str, set[str]] = {}
        for each in self._read_all(ACKNOWLEDGEMENT):
            found.setdefault(each.file, set()).add(each.key)
        return found

    def add_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Put a keyholder's acknowledgement there."""
        self._write(ACKNOWLEDGEMENT, acknowledgement)

    def batches(self) -> list[Batch]:
        """Return the batches that are to be opened."""
        return list(self._read_all(BATCH))

    def add_batch(self, batch: Batch) -> None:
        """List a batch to the keyholders."""
        self._write(BATCH, batch)

    def openings(self, batch: Batch) -> list[Opening]:
        """Return the openings of a batch that are there."""
        return list(self._read_all(OPENING, f"{batch.digest}-*"))

    def add_opening(self, opening: Opening) -> None:
        """Put a keyholder's opening there."""
        self._write(OPENING, opening)

    def names(self, kinds: Collection[str]) -> list[str]:
        """Return the names of all papers of these kinds that are there."""
        return [_KINDS[kind].name(each) for kind in kinds for each in self._read_all(kind)]

    def content(self, name: str) -> bytes:
        """Return a paper as it is carried."""
        return read_regular(self.place / name, MOST_BYTES)

    def keep(self, paper: Carried) -> bool:
        """Keep a paper that was carried here; return whether it is new. None is ever replaced."""
        known = b""
        with suppress(ConsilienceError, OSError):  # whatever is no paper counts as absent
            known = Carried.read(paper.name, self.content(paper.name)).content
        if known and known != paper.content:
            raise SettingsError(
                f"Another paper {paper.name!r} is here already. Nothing was replaced. Ask whoever "
                "signed it, and tell the sites."
            )
        self.place.mkdir(exist_ok=True)
        write_durably(self.place / paper.name, paper.content)
        return not known

    def _write(self, kind: str, paper: Paper) -> None:
        self.place.mkdir(exist_ok=True)
        form = _KINDS[kind]
        write_durably(self.place / form.name(paper), form.write(paper))

    def _read_all(self, kind: str, which: str = "*") -> Iterator[Any]:
        """Yield what there is of a kind; what lies under another's name counts as absent."""
        form = _KINDS[kind]
        for path in sorted(self.place.glob(f"{kind}-{which}" if kind != ROSTER else f"{kind}.*")):
            with suppress(ConsilienceError, OSError, ValueError):
                paper = form.read(read_regular(path, MOST_BYTES))
                if path.name == form.name(paper):
                    yield paper


@dataclass(frozen=True)
class Carried:
    """A paper that a relay carries: what it is, of which study, who signed it, and its bytes.

    Nobody signs a batch, which keyholders check by themselves; and facts are signed by their site.
    """

    name: str
    kind: str
    study: Mapping[str, str]
    key: str | None
    content: bytes
    paper: Paper

    @classmethod
    def read(cls, name: str, content: bytes) -> Self:
        """Check a paper of unknown origin, and that its name is its own."""
        kind = name.removesuffix(".safetensors") if name == f"{ROSTER}.safetensors" else ""
        kind = kind or next((each for each in _KINDS if name.startswith(f"{each}-")), "")
        try:
            if not kind:
                raise ValueError
            paper = _KINDS[kind].read(content)
        except (ConsilienceError, ValueError):
            raise refused("it is no paper of a blind study") from None
        if _KINDS[kind].name(paper) != name:
            raise refused("it is not the paper that its name says")
        if kind == FACTS:
            study, signer = paper.facts["study"], paper.site_key
        else:
            study, signer = paper.study, None if kind == BATCH else paper.sealed.key
        return cls(name, kind, dict(study), signer, content, paper)


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


@dataclass(frozen=True)
class _Form:
    """How papers of one kind are named, read and written."""

    name: Callable[[Any], str]
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes] = lambda paper: paper.sealed.to_bytes()


def _read_facts(content: bytes) -> MaskedFile:
    facts = parse_facts(content.decode())
    return MaskedFile.read(facts.get("facts"), facts.get("signature"))


def _write_facts(file: MaskedFile) -> bytes:
    return canonical({"facts": file.text, "signature": file.signature.hex()}).encode()


_KINDS = {
    ROSTER: _Form(
        lambda _: f"{ROSTER}.safetensors", lambda content: Roster.read(Sealed.load(content, ROSTER))
    ),
    CARD: _Form(
        lambda card: f"{CARD}-{card.key}.safetensors",
        lambda content: Card.read(Sealed.load(content, CARD)),
    ),
    FACTS: _Form(lambda file: f"{FACTS}-{file.digest}.json", _read_facts, _write_facts),
    ACKNOWLEDGEMENT: _Form(
        lambda each: f"{ACKNOWLEDGEMENT}-{each.file}-{each.key}.safetensors", Acknowledgement.read
    ),
    BATCH: _Form(
        lambda batch: f"{BATCH}-{batch.digest}.json",
        lambda content: Batch.from_dict(parse_facts(content.decode())),
        lambda batch: canonical(batch.as_dict()).encode(),
    ),
    OPENING: _Form(
        lambda opening: f"{OPENING}-{opening.batch}-{opening.key}.safetensors", Opening.read
    ),
}
