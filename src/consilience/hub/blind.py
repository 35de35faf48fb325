"""What a hub does for studies in which it sees sums only: its roster, its batches, its own pads.

Whatever arrives is checked by what the study and its frozen roster say, never by who sent it.
Keyholders check the same again, and the hub's word counts for nothing with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from consilience.blind.masked import (
    KIND,
    OPENING,
    Acknowledgement,
    Batch,
    MaskedFile,
    Opening,
)
from consilience.blind.pads import SealKey
from consilience.blind.papers import choose_batch
from consilience.blind.roster import CARD, ROSTER, Card, Roster, Rule
from consilience.errors import ConsilienceError, SettingsError
from consilience.files.sealed import Sealed, SealedFile, SigningKey
from consilience.hub.store import Row, Store, now
from consilience.hub.store.blind import NOT_FROZEN
from consilience.protocol import Refusal
from consilience.study.study import Study

MOST_FILES = 64  # whose facts one answer to a keyholder has
LATEST = "9999"  # after every time in the store
MOST_TEXT = 4 << 20  # characters of them, unless a single file has more


class Waiting(NamedTuple):
    """Files that wait for a batch: those that can make one now, and why the others cannot."""

    chosen: Sequence[MaskedFile]
    reasons: Mapping[str, str]  # by digest
    missing: Sequence[str]  # sites on the roster that have handed over nothing


class _Ready(NamedTuple):
    """Files that all keyholders have acknowledged, and since when there was no further site.

    A site that replaces its file again and again keeps nobody waiting.
    """

    rows: list[Row]
    reasons: dict[str, str]  # why others are not among them, by digest
    missing: list[str]
    since: str | None


class BlindStudies:
    """A hub's part in its blind studies.

    Privacy
    -------
    The hub holds pads too. The key that opens its seeds is in its folder, for each study one; with
    that alone nobody learns anything, but without it nobody else can open single files.
    """

    def __init__(self, store: Store, key: SigningKey, wait_seconds: float) -> None:
        self._store, self._key, self._wait_seconds = store, key, wait_seconds
        self._too_few: dict[str, frozenset[str]] = {}  # files that make no batch, by study

    # --------------------------------------------------------------------------- the roster

    def freeze(self, study: Study, checked: Mapping[str, str], actor: str) -> Roster:
        """Freeze the roster of a study: the sites that are enrolled now, and who `checked` each."""
        rule = require_blind(study)
        if (row := self._store.roster(study.name)) is not None:
            return _read_roster(bytes(row["content"]))
        if self._key.public in rule.keyholders:
            raise Refusal("study-invalid", "The study names this hub as one of its keyholders.")
        keys = self._store.enrolled_keys(study.name)
        if len(keys) < rule.least:
            raise Refusal(
                "too-few-sites",
                f"No batch of fewer than {rule.least} sites is ever opened, and {len(keys)} that "
                "may contribute are enrolled.",
            )
        unchecked = sorted(site for site in keys if not checked.get(site))
        if unchecked:
            raise Refusal(
                "malformed",
                "A roster names who checked each site's key, outside this hub. Nobody is named for "
                f"{', '.join(unchecked[:5])}{' and others' if unchecked[5:] else ''}.",
            )
        path = self._seal_path(study)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        if not path.exists():
            SealKey.generate().save(path)
        try:
            sites = [(site, key, checked[site]) for site, key in keys.items()]
            roster = Roster.make(study.reference, sites, self._key)
        except ConsilienceError as problem:
            raise Refusal("malformed", str(problem)) from None
        card = Card.make(roster, self.seal(study).public, self._key)
        row = self._store.freeze_roster(
            {"study": study.name, "digest": roster.digest, "content": roster.sealed.to_bytes()},
            {"holder": card.key, "content": card.sealed.to_bytes()},
            keys,
            actor,
        )
        return _read_roster(bytes(row["content"]))

    def roster(self, study: Study) -> Roster:
        """Return the frozen roster, or refuse."""
        require_blind(study)
        row = self._store.roster(study.name)
        if row is None:
            raise Refusal("no-roster", NOT_FROZEN)
        return _read_roster(bytes(row["content"]))

    def seal(self, study: Study) -> SealKey:
        """Return the key that opens the hub's own seeds."""
        path = self._seal_path(study)
        if not path.exists():
            raise Refusal(
                "unavailable",
                "The hub's key for the seeds of this study is not in this folder. Its operator has "
                "to copy the folder 'seals' from where the roster was frozen.",
            )
        try:
            return SealKey.load(path)
        except SettingsError as problem:
            raise Refusal("unavailable", str(problem)) from None

    def has_seal(self, study: Study) -> bool:
        """Tell whether this folder has the key that opens the hub's own seeds."""
        return self._seal_path(study).exists()

    def _seal_path(self, study: Study) -> Path:
        return self._store.folder / "seals" / f"{study.digest}.key"

    # ------------------------------------------------------------------------------ from sites

    def check_file(self, study: Study, file: SealedFile) -> bool:
        """Refuse a masked file that was made for other terms; tell whether it holds noise alone."""
        masked = MaskedFile.of(file.hollow)
        rule, roster = require_blind(study), self.roster(study)
        masked.check_agreed(roster, rule, {*rule.keyholders, self._key.public})
        masked.open_seed(self._key.public, self.seal(study))
        return bool(masked.facts["blind"]["only_noise"])

    # ------------------------------------------------------------------------- from keyholders

    def take_card(self, study: Study, holder: str, content: bytes) -> bool:
        """Keep a keyholder's countersignature; return whether it is new."""
        card = _read_card(content)
        roster = self.roster(study)
        _require_own(card.key, holder)
        if card.sealed.facts["study"] != study.reference:
            raise Refusal("study-differs", "The card was made for another study.")
        if card.roster != roster.digest:
            raise Refusal("rejected", "The card countersigns another roster.")
        others = [_read_card(bytes(row["content"])) for row in self._store.cards(study.name)]
        if any(card.seal == other.seal and card.key != other.key for other in others):
            raise Refusal("rejected", "Another pad holder has the same key for seeds.")
        return self._store.add_card(study.name, holder, content)

    def list_files(self, study: Study, holder: str, skip: int = 0) -> list[dict[str, str]]:
        """Return signed facts of files that a keyholder has not acknowledged, a page of them.

        It skips as many as the keyholder has refused.
        """
        listed: list[dict[str, str]] = []
        size = 0
        for row in self._store.unacknowledged(study.name, holder, MOST_FILES, skip):
            file = self._masked(row)
            size += len(file.text)
            if listed and size > MOST_TEXT:
                break
            listed.append({"facts": file.text, "signature": file.signature.hex()})
        return listed

    def take_acknowledgement(self, study: Study, holder: str, content: bytes) -> bool:
        """Keep a keyholder's acknowledgement of a file; return whether it is new."""
        try:
            each = Acknowledgement.read(content)
        except ConsilienceError as problem:
            raise Refusal("rejected", str(problem)) from None
        _require_own(each.key, holder)
        if each.study != study.reference:
            raise Refusal("study-differs", "The acknowledgement was made for another study.")
        return self._store.acknowledge(study.name, each.file, holder, content)

    def list_batches(self, study: Study, holder: str) -> list[Batch]:
        """Return the batches that a keyholder has not opened."""
        return [
            self._batch(study, row)
            for row in self._store.batches(study.name)
            if row["state"] == "listed"
            and holder not in {opening["holder"] for opening in row["openings"]}
        ]

    def take_opening(
        self, study: Study, holder: str, arrived: Path | bytes, sha256: str
    ) -> tuple[Row, bool]:
        """Keep a keyholder's opening of a batch; return its row, and whether it is new.

        Whether the sum of pads in it is right nobody can tell before all keyholders have opened.
        """
        rule = require_blind(study)
        size = len(arrived) if isinstance(arrived, bytes) else arrived.stat().st_size
        try:
            file = SealedFile(arrived, OPENING)
        except ConsilienceError as problem:
            raise Refusal("rejected", str(problem)) from None
        facts = file.facts
        _require_own(facts["key"], holder)
        if facts.get("study") != study.reference:
            raise Refusal("study-differs", "The opening was made for another study.")
        known = {row["digest"]: row for row in self._store.batches(study.name)}
        row = known.get(str(facts.get("batch")))
        if row is None or row["state"] == "withdrawn":
            raise Refusal("rejected", "It opens a batch that the hub does not list.")
        length = self._masked(row["files"][0]).context.length
        if {name: form["shape"] for name, form in facts["tensors"].items()} != {"pads": [length]}:
            raise Refusal("rejected", "Its pads have another length than the files of the batch.")
        opening = self._read_opening(arrived)
        entry = {
            "batch": opening.batch,
            "holder": holder,
            "number": opening.sealed.facts["number"],
            "digest": file.digest,
            "sha256": sha256,
            "size": size,
        }
        return entry, self._add_opening(entry, rule, arrived)

    def _add_opening(self, entry: Row, rule: Rule, arrived: Path | bytes) -> bool:
        store, sha256 = self._store, entry["sha256"]
        if isinstance(arrived, bytes):
            return store.add_opening(entry, rule.keyholders, arrived)
        store.files.keep(arrived, sha256)
        try:
            is_durable = lambda: store.files.holds(sha256)  # noqa: E731
            return store.add_opening(entry, rule.keyholders, is_durable=is_durable)
        except Refusal:
            store.remove_unnamed(sha256)
            raise

    def _read_opening(self, source: Path | bytes) -> Opening:
        try:
            content = source if isinstance(source, bytes) else source.read_bytes()
            return Opening.read(content)
        except ConsilienceError as problem:
            raise Refusal("rejected", str(problem)) from None

    # ---------------------------------------------------------------------------------- batches

    def find_waiting(self, study: Study) -> Waiting:
        """Return which files can make a batch now, and what the others wait for."""
        ready = self._find_ready(study)
        chosen, why = choose_batch([self._masked(row) for row in ready.rows], require_blind(study))
        return Waiting(chosen, ready.reasons | why, ready.missing)

    def _find_ready(self, study: Study) -> _Ready:
        """Return the rows of the files that all keyholders have acknowledged."""
        rule, row = require_blind(study), self._store.roster(study.name)
        if row is None:
            return _Ready([], {}, [], None)
        roster = _read_roster(bytes(row["content"]))
        holders = set(rule.keyholders)
        ready, reasons = list[Row](), dict[str, str]()
        rows = self._store.acknowledged(study.name)
        for file, times in rows:
            if holders <= set(times):
                ready.append(file)
            else:
                reasons[file["digest"]] = (
                    f"{len(holders & set(times))} of {len(holders)} keyholders have acknowledged it"
                )
        first = dict[str, str]()
        for file, times in (*rows, *self._store.acknowledged(study.name, "superseded")):
            if holders <= set(times):
                first[file["site"]] = min(max(times.values()), first.get(file["site"], LATEST))
        since = max((first[file["site"]] for file in ready), default=None)
        batches = [one for one in self._store.batches(study.name) if one["state"] != "withdrawn"]
        listed = [file for batch in batches for file in batch["files"]]
        present = {file["site"] for file in (*listed, *(file for file, _ in rows))}
        missing = sorted(set(roster.names.values()) - present)
        return _Ready(ready, reasons, missing, since)

    def list_batch(self, study: Study, actor: str) -> Row:
        """List a batch of all files that can be opened together now, or refuse."""
        waiting = self.find_waiting(study)
        if not waiting.chosen:
            least = require_blind(study).least
            raise Refusal(
                "too-few-sites",
                f"No batch can be opened now. Each file needs {least} sites that its own site "
                "counts on, itself included, whose files all keyholders have acknowledged.",
            )
        batch = Batch.of(waiting.chosen)
        return self._store.list_batch(study.name, batch.digest, batch.files, actor)

    def list_if_due(self, study: Study) -> Row | None:
        """List a batch if there can be one and nothing more is to be expected soon.

        Either every site on the roster has handed over, or no other one has for a while: each site
        that comes later needs as many others again.
        """
        ready = self._find_ready(study)
        digests = frozenset(row["digest"] for row in ready.rows)
        if len(digests) < require_blind(study).least or ready.since is None:
            return None
        is_whole = not ready.missing and not ready.reasons
        if not is_whole and 0 <= _seconds_since(ready.since) < self._wait_seconds:
            return None
        if self._too_few.get(study.name) == digests:  # looked at before
            return None
        try:
            return self.list_batch(study, "hub")
        except Refusal as refusal:
            if refusal.code != "too-few-sites":
                raise
            self._too_few[study.name] = digests
            return None

    def _batch(self, study: Study, row: Row) -> Batch:
        files = tuple(sorted(file["digest"] for file in row["files"]))
        return Batch(study.reference, self.roster(study).digest, files)

    def read_openings(self, row: Row) -> list[Opening]:
        """Return the openings of a batch."""
        return [
            self._read_opening(self._store.content(opening["sha256"]))
            for opening in row["openings"]
        ]

    def _masked(self, row: Row) -> MaskedFile:
        return _read_masked(self._store, row["sha256"])


def require_blind(study: Study) -> Rule:
    """Return the rule of a blind study, or refuse."""
    if study.blind is None:
        raise Refusal("not-found", "In this study the hub is not blind: there is no roster.")
    return study.blind


@lru_cache(maxsize=256)
def _read_masked(store: Store, sha256: str) -> MaskedFile:
    """Return the signed facts of a file that was checked when it arrived."""
    return MaskedFile.of(SealedFile(store.content(sha256), KIND).hollow)


def _read_roster(content: bytes) -> Roster:
    return Roster.read(Sealed.load(content, ROSTER))


def _seconds_since(at: str) -> float:
    return (datetime.fromisoformat(now()) - datetime.fromisoformat(at)).total_seconds()


def _read_card(content: bytes) -> Card:
    try:
        return Card.read(Sealed.load(content, CARD))
    except ConsilienceError as problem:
        raise Refusal("rejected", str(problem)) from None


def _require_own(signer: object, holder: str) -> None:
    if signer != holder:
        raise Refusal("rejected", "It was signed with another key than the request.")
