"""A blind study in a shared folder, without a hub: its roster, its batches, and what was opened.

Whoever makes the releases does here what a hub does: it signs the roster, holds pads of its own,
lists batches to the keyholders, and adds up what all of them have opened.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from consilience.blind.masked import Batch, MaskedFile, Opening
from consilience.blind.pads import SealKey
from consilience.blind.papers import Papers, choose_batch
from consilience.blind.roster import Card, Roster, Rule
from consilience.errors import ContributionRejected, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.study.collect import Opened, Submitted
from consilience.study.study import Study

COLUMNS = ["name", "key", "checked_by"]


def seal_path(key: Path) -> Path:
    """Return where the key for seeds lies, beside the one that signs."""
    return key.with_name(f"{key.stem}-seal.pem")


def read_sites(path: Path) -> list[tuple[str, str, str]]:
    """Read the sites of a roster from a CSV file: name, public key, and who checked the key."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error):
        rows = []
    if not rows or any(list(row) != COLUMNS or None in row.values() for row in rows):
        raise SettingsError(
            f"The file {path.name!r} cannot be read as a list of sites. Nothing was signed. It is "
            f"a CSV file with the columns {', '.join(COLUMNS)}."
        )
    return [(row["name"].strip(), row["key"].strip(), row["checked_by"].strip()) for row in rows]


def freeze_roster(
    study: Study, folder: Path, sites: Sequence[tuple[str, str, str]], key: Path
) -> Roster:
    """Sign the roster of the study in a shared folder, and the card of its own pad holder.

    The roster can never be changed: sites that it lacks need a new study.
    """
    rule, papers, signing = _rule(study), Papers(folder), SigningKey.at(key)
    if len(sites) < rule.least:
        raise SettingsError(
            f"The roster lists {len(sites)} sites, and no batch of fewer than {rule.least} is ever "
            "opened. Nothing was signed. Wait for more sites."
        )
    roster = Roster.make(study.reference, sites, signing)
    known = papers.roster
    if known is not None and known.sealed.facts == roster.sealed.facts:
        roster = known
    place = seal_path(key)
    if not place.exists():
        SealKey.generate().save(place)
    papers.freeze(roster, rule.keyholders)
    papers.add_card(Card.make(roster, SealKey.load(place).public, signing))
    return roster


@dataclass(frozen=True)
class Batches:
    """What is known of the batches of a study in a shared folder.

    ``opened`` are combined. ``waiting`` is listed, and lacks openings of so many keyholders;
    ``listed`` says whether it was listed just now. ``reasons`` say why other files wait.
    """

    opened: Opened
    waiting: Batch | None
    lacking: int
    listed: bool
    reasons: Sequence[str]

    def describe(self) -> str:
        """Say what is waited for."""
        said = []
        if self.waiting is not None:
            now = "was listed now and" if self.listed else "is listed and"
            said.append(
                f"Batch {self.waiting.digest[:16]}… of {len(self.waiting.files)} files {now} waits "
                f"for {self.lacking} keyholders to open it."
            )
        return "\n".join([*said, *self.reasons])


def gather_batches(
    study: Study, folder: Path, submitted: dict[str, Submitted], key: Path
) -> Batches:
    """Return the batches that all keyholders opened; list the next one if none is waiting."""
    rule, papers, signing = _rule(study), Papers(folder), SigningKey.at(key)
    roster = papers.roster
    if roster is None or roster.sealed.key != signing.public:
        raise SettingsError(
            "The roster of the study is not frozen yet, or was signed with another key. Nothing "
            "was combined. Freeze it first: consilience release freeze"
        )
    holders = {*rule.keyholders, signing.public}
    listed, reasons = False, list[str]()
    files, described = dict[str, Contribution](), dict[str, MaskedFile]()
    for one in (one for each in submitted.values() for one in each.files):
        try:
            file = MaskedFile.of(one.sealed)
            file.check_agreed(roster, rule, holders)
        except ContributionRejected as problem:  # anybody can put a file into a folder
            reasons.append(f"The file of {one.site!r} is left out: {problem}")
        else:
            files[one.digest], described[one.digest] = one, file
    opened: list[tuple[list[Contribution], list[Opening]]] = []
    waiting: Batch | None = None
    lacking, used, taken = 0, set[str](), set[str]()
    for batch in papers.batches():
        if batch.study != study.reference or batch.roster != roster.digest:
            continue
        here = [digest for digest in batch.files if digest in files]
        # A site may lend its noise to further batches, but its records are added up once.
        sites = {described[digest].site_key for digest in here if files[digest].has_records}
        openings = [each for each in papers.openings(batch) if each.key in rule.keyholders]
        if not openings and not batch.is_listed_by(signing.public):
            continue  # somebody else put it there
        used |= set(batch.files)
        if len(here) < len(batch.files) or sites & taken:
            continue  # one was withdrawn, and with it the whole batch, or a site is in it again
        if len(openings) == len(rule.keyholders):
            opened.append(([files[digest] for digest in here], openings))
        else:
            waiting, lacking = batch, len(rule.keyholders) - len(openings)
        taken |= sites
    if waiting is None:
        acknowledged = papers.acknowledgements()
        newest = [
            file
            for file in (described.get(each.newest.digest) for each in submitted.values())
            if file is not None
            and file.digest not in used
            and (file.site_key not in taken or not files[file.digest].has_records)
        ]
        ready = [
            file for file in newest if acknowledged.get(file.digest, set()) >= {*rule.keyholders}
        ]
        unknown = len(newest) - len(ready)
        if unknown:
            reasons.append(f"{unknown} files wait for keyholders to acknowledge them.")
        chosen, why = choose_batch(ready, rule)
        named = {file.digest: str(file.facts["site"]) for file in ready}
        reasons += [f"The file of {named[digest]!r} waits: {text}." for digest, text in why.items()]
        if chosen:
            waiting, lacking, listed = Batch.of(chosen), len(rule.keyholders), True
    if waiting is not None:
        papers.add_batch(waiting.sign(signing))
    return Batches(Opened(opened, SealKey.load(seal_path(key))), waiting, lacking, listed, reasons)


def _rule(study: Study) -> Rule:
    if study.blind is None:
        raise SettingsError(
            f"The hub of study {study.name!r} is not blind: it has no roster and no batches. "
            'Nothing was done. Name a study with hub = "blind".'
        )
    return study.blind
