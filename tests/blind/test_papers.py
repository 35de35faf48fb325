"""A folder between sites, keyholders and a hub, and which files make a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilience.blind.masked import Batch, MaskedFile
from consilience.blind.papers import Papers, choose_batch
from consilience.blind.roster import Roster
from consilience.errors import SettingsError
from consilience.files.sealed import SigningKey
from parties import Parties


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path / "parties")


def test_a_folder_carries_every_paper(parties: Parties, tmp_path: Path) -> None:
    papers = Papers(tmp_path)
    assert papers.roster is None
    assert papers.cards() == []
    papers.freeze(parties.roster, parties.rule.keyholders)
    for card in parties.cards:
        papers.add_card(card)
    assert papers.roster is not None
    assert papers.roster.digest == parties.roster.digest
    assert {card.key for card in papers.cards()} == set(parties.holders)
    files = [parties.file(i) for i in range(4)]
    for i, file in enumerate(files):
        file.save(tmp_path / f"contribution-{i}.safetensors")
    assert {file.digest for file in papers.files()} == {file.digest for file in files}
    for file in papers.files():
        for keyholder in parties.keyholders:
            papers.add_acknowledgement(keyholder.acknowledge(file))
    expected = {file.digest: set(parties.rule.keyholders) for file in files}
    assert papers.acknowledgements() == expected
    batch = Batch.of(papers.files())
    papers.add_batch(batch)
    assert papers.batches() == [batch]
    for keyholder in parties.keyholders:
        papers.add_opening(keyholder.open(batch))
    total = parties.unmask(files, papers.openings(batch))
    assert total.tolist() == [1 + 2 + 3 + 4] * 5


def test_what_others_put_into_the_folder_counts_as_absent(parties: Parties, tmp_path: Path) -> None:
    papers = Papers(tmp_path)
    papers.freeze(parties.roster, parties.rule.keyholders)
    first, second = parties.cards[:2]
    papers.add_card(first)
    place = tmp_path / "blind"
    (place / f"roster-{second.key}.safetensors").write_bytes(first.sealed.to_bytes())
    (place / f"pad-holder-{second.key}.safetensors").write_bytes(first.sealed.to_bytes())
    (place / "batch-0.json").write_text("[")
    (place / f"batch-{'0' * 64}.json").write_text("[" * 100_000)
    (tmp_path / "contribution-x.safetensors").write_bytes(b"no file")
    assert [card.key for card in papers.cards()] == [first.key]
    assert papers.batches() == []
    assert papers.files() == []


def test_a_frozen_roster_is_never_replaced(parties: Parties, tmp_path: Path) -> None:
    papers = Papers(tmp_path)
    papers.freeze(parties.roster, parties.rule.keyholders)
    papers.freeze(parties.roster, parties.rule.keyholders)
    others = [("another site", parties.sites[0].public, "nobody")]
    with pytest.raises(SettingsError, match="frozen"):
        papers.freeze(Roster.make(parties.study, others, parties.hub), parties.rule.keyholders)


def test_a_roster_of_somebody_else_counts_once_a_keyholder_has_signed_it(
    parties: Parties, tmp_path: Path
) -> None:
    papers, stranger = Papers(tmp_path), SigningKey.generate()
    listed = [("site 0", parties.sites[0].public, "nobody")]
    papers.freeze(Roster.make(parties.study, listed, stranger), parties.rule.keyholders)
    papers.freeze(parties.roster, parties.rule.keyholders)
    papers.add_card(parties.cards[0])
    with pytest.raises(SettingsError, match="frozen"):
        papers.freeze(Roster.make(parties.study, listed, stranger), parties.rule.keyholders)


def test_whoever_lists_a_batch_signs_it(parties: Parties, tmp_path: Path) -> None:
    papers, stranger = Papers(tmp_path), SigningKey.generate()
    plain = Batch.of([MaskedFile.of(parties.file(i)) for i in range(4)])
    papers.add_batch(plain)
    assert not papers.batches()[0].is_listed_by(parties.hub.public)
    for signer in (stranger, parties.hub):
        papers.add_batch(plain.sign(signer))
        (found,) = papers.batches()
        assert found == plain
        assert found.digest == plain.digest
        assert found.is_listed_by(signer.public)
        assert found.is_listed_by(parties.hub.public) is (signer is parties.hub)


def test_a_batch_is_the_largest_that_keyholders_may_open(parties: Parties) -> None:
    files = [MaskedFile.of(parties.file(i)) for i in range(5)]
    chosen, reasons = choose_batch(files, parties.rule)
    assert (chosen, reasons) == (files, {})
    chosen, reasons = choose_batch(files[:3], parties.rule)
    assert chosen == []
    assert set(reasons.values()) == {"3 of the 4 sites that it needs are there"}


def test_whoever_counts_on_too_few_waits_and_takes_along_who_counts_on_it(
    parties: Parties,
) -> None:
    """Site 5 counts on nobody here; without it site 4 has too few; the others have enough."""
    files = [MaskedFile.of(parties.file(i, counted=[0, 1, 2, 3])) for i in range(4)]
    fourth = MaskedFile.of(parties.file(4, counted=[0, 1, 5]))
    fifth = MaskedFile.of(parties.file(5, counted=[4]))
    chosen, reasons = choose_batch([*files, fourth, fifth], parties.rule)
    assert chosen == files
    assert set(reasons) == {fourth.digest, fifth.digest}


def test_two_files_of_one_site_make_no_batch(parties: Parties) -> None:
    files = [MaskedFile.of(parties.file(i)) for i in range(4)]
    again = MaskedFile.of(parties.file(0, sequence=2))
    chosen, reasons = choose_batch([*files, again], parties.rule)
    assert chosen == []
    assert "two files" in reasons[again.digest]
