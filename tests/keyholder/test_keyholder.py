"""What a keyholder signs, and what it never does: open a batch twice, or one that overlaps."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from consilience.blind.masked import Batch, MaskedFile
from consilience.blind.roster import Roster
from consilience.errors import ContributionRejected, LedgerDamaged, SettingsError
from consilience.keyholder.keyholder import Keyholder
from parties import Parties, try_to_open


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path)


def batch_of(*files: object) -> Batch:
    return Batch.of(MaskedFile.of(file) for file in files)  # type: ignore[arg-type]


def test_the_same_question_has_the_same_answer(parties: Parties) -> None:
    files = [parties.file(i) for i in range(4)]
    keyholder = parties.keyholders[0]
    answers = [keyholder.acknowledge(MaskedFile.of(file)).sealed.signature for file in files]
    assert answers == [
        keyholder.acknowledge(MaskedFile.of(file)).sealed.signature for file in files
    ]
    first = keyholder.open(batch_of(*files)).sealed.signature
    assert Keyholder(keyholder.folder).open(batch_of(*files)).sealed.signature == first
    assert len(keyholder.log()) == 1


def test_overlapping_batches_are_never_opened(parties: Parties) -> None:
    """The difference of two sums that share all files but one would be that file's numbers."""
    files = [parties.file(i) for i in range(6)]
    for file in files:
        parties.acknowledge(file)
    keyholder = parties.keyholders[0]
    keyholder.open(batch_of(*files[:4]))
    with pytest.raises(ContributionRejected, match="opened before"):
        keyholder.open(batch_of(*files[:5]))
    assert [entry.n_files for entry in keyholder.log()] == [4]


def test_no_pad_is_used_twice(parties: Parties) -> None:
    """A second file under the same number or nonce would be the first one's pad again."""
    first = parties.file(0)
    parties.acknowledge(first)
    again = parties.file(0, [9, 9, 9, 9, 9])
    same_nonce = parties.file(0, sequence=2, nonce=first.facts["blind"]["nonce"])
    for file in (again, same_nonce):
        with pytest.raises(ContributionRejected, match="used twice"):
            parties.keyholders[0].acknowledge(MaskedFile.of(file))


def test_no_site_blocks_another_one_with_a_copy_of_its_nonce(parties: Parties) -> None:
    victim = parties.file(0)
    parties.acknowledge(parties.file(1, nonce=victim.facts["blind"]["nonce"]))
    parties.acknowledge(victim)


def test_too_few_sites_are_not_opened(parties: Parties) -> None:
    files = [parties.file(i) for i in range(3)]
    for file in files:
        parties.acknowledge(file)
    with pytest.raises(ContributionRejected, match="4 are needed"):
        parties.open(files)
    assert parties.keyholders[0].log() == []


def test_only_acknowledged_files_are_opened(parties: Parties) -> None:
    files = [parties.file(i) for i in range(4)]
    for file in files[:3]:
        parties.acknowledge(file)
    with pytest.raises(ContributionRejected, match="not acknowledged all"):
        parties.open(files)


def test_a_study_has_one_roster(parties: Parties) -> None:
    other = Roster.make(parties.study, [("site 0", parties.sites[0].public, "nobody")], parties.hub)
    with pytest.raises(SettingsError, match="only one"):
        parties.keyholders[0].countersign(other, parties.rule, parties.hub.public)
    card = parties.keyholders[0].countersign(parties.roster, parties.rule, parties.hub.public)
    assert card.sealed.digest == parties.cards[0].sealed.digest


def test_another_studys_files_are_refused(parties: Parties, tmp_path: Path) -> None:
    elsewhere = Parties(tmp_path / "other", study={"name": "wards", "digest": "a" * 64})
    with pytest.raises(ContributionRejected, match="signed no roster"):
        parties.acknowledge(elsewhere.file(0))


def test_after_closing_nothing_can_be_opened(parties: Parties) -> None:
    files = [parties.file(i) for i in range(4)]
    for file in files:
        parties.acknowledge(file)
    keyholder = parties.keyholders[0]
    keyholder.close(parties.study["digest"])
    assert list((keyholder.folder / "seals").iterdir()) == []
    with pytest.raises(ContributionRejected, match="closed"):
        keyholder.open(batch_of(*files))


def test_a_changed_log_is_noticed(parties: Parties) -> None:
    files = [parties.file(i) for i in range(4)]
    for file in files:
        parties.acknowledge(file)
    keyholder = parties.keyholders[0]
    keyholder.open(batch_of(*files))
    with sqlite3.connect(keyholder.folder / "keyholder.sqlite") as db:
        db.execute("DROP TRIGGER openings_hold")
        db.execute("UPDATE openings SET head = ?", ("0" * 64,))
    db.close()
    with pytest.raises(LedgerDamaged, match="changed or lacks"):
        Keyholder(keyholder.folder)


def test_processes_that_ask_at_once_open_one_of_two_overlapping_batches(parties: Parties) -> None:
    files = [parties.file(i) for i in range(6)]
    for file in files:
        parties.acknowledge(file)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    batches = [batch_of(*files[:5]), batch_of(*files[1:])]
    folder = parties.keyholders[0].folder
    workers = [
        context.Process(target=try_to_open, args=(folder, each, answers)) for each in batches
    ]
    for worker in workers:
        worker.start()
    assert sorted(answers.get(timeout=60) for _ in workers) == ["opened", "refused"]
    for worker in workers:
        worker.join()
