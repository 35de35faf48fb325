"""What a blind hub can and cannot compute, and what every party refuses."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from consilience.blind.masked import KIND, Batch, MaskedFile, Opening, find_obstacles
from consilience.blind.pads import Context, SealKey, add_words, expand, seal
from consilience.blind.roster import Card, Roster, Rule, check_cards
from consilience.errors import ContributionRejected, SettingsError
from consilience.files.sealed import Sealed, SigningKey
from parties import LENGTH, Parties


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path)


def test_all_pads_together_leave_the_sum(parties: Parties) -> None:
    numbers = [[2**62, -(2**62), 7 * i, -i, 0] for i in range(5)]
    files = [parties.file(i, numbers[i]) for i in range(5)]
    for file in files:
        parties.acknowledge(file)
    total = parties.unmask(files, parties.open(files))
    expected = [sum(each) for each in zip(*numbers, strict=True)]
    assert [int(word) % 2**64 for word in total] == [number % 2**64 for number in expected]


def test_a_sum_lacks_its_pads_without_any_one_holder(parties: Parties) -> None:
    """Each of the masked files, less all pads but one holder's, is still under that holder's."""
    file = parties.file(0)
    described = MaskedFile.of(file)
    for each in parties.keyholders:
        key = SealKey.load(next((each.folder / "seals").iterdir()))
        others = add_words([file.tensors["sum"], -described.pad(each.key.public, key)], LENGTH)
        assert np.abs(others.astype(float)).min() > 2**20  # far from the number 1 that is in it
    hub = add_words(
        [file.tensors["sum"], -described.pad(parties.hub.public, parties.hub_seal)], LENGTH
    )
    assert np.abs(hub.astype(float)).min() > 2**20


def test_a_pad_is_for_one_holder_and_one_file() -> None:
    context = Context("0" * 64, "1" * 64, "ward", "2" * 64, 1, "3" * 64, "Moments", 8)
    seed = bytes(32)
    first = expand(seed, context.text("4" * 64), 8)
    assert (expand(seed, context.text("4" * 64), 8) == first).all()
    assert (expand(seed, context.text("5" * 64), 8) != first).all()
    for change in ({"sequence": 2}, {"nonce": "6" * 64}, {"site": "other"}, {"study": "7" * 64}):
        other = Context(**{**vars(context), **change})
        assert (expand(seed, other.text("4" * 64), 8) != first).all()


def test_a_sealed_seed_opens_only_where_it_was_sealed_for() -> None:
    key, seed = SealKey.generate(), bytes(range(32))
    sealed = seal(seed, key.public, b"this file")
    assert key.open(sealed, b"this file") == seed
    for other, info in ((key, b"another file"), (SealKey.generate(), b"this file")):
        with pytest.raises(ContributionRejected, match="not sealed for it"):
            other.open(sealed, info)


def test_a_transplanted_seed_is_refused(parties: Parties) -> None:
    """A seed that was copied into another file would give its pad away when that one is opened."""
    victim, attacker = parties.file(0), parties.file(1)
    blind = {**attacker.facts["blind"], "seeds": victim.facts["blind"]["seeds"]}
    facts = {k: v for k, v in attacker.facts.items() if k not in ("key", "tensors")}
    forged = Sealed.seal(KIND, {**facts, "blind": blind}, attacker.tensors, parties.sites[1])
    with pytest.raises(ContributionRejected, match="not sealed for it"):
        parties.acknowledge(forged)


def test_sites_are_counted_and_not_files(parties: Parties) -> None:
    """Two files of one site do not make two sites."""
    files = [MaskedFile.of(parties.file(i)) for i in range(3)]
    twice = [*files, MaskedFile.of(parties.file(2, sequence=2))]
    assert any("two files" in each for each in find_obstacles(twice, parties.rule))
    assert any(
        "3 are in the batch, and 4 are needed" in each
        for each in find_obstacles(files, parties.rule)
    )


def test_no_more_than_the_spare_sites_may_collude_of_all_that_are_counted_on(
    parties: Parties,
) -> None:
    """The hub chooses the batch: what holds of the sites counted on must hold of any part of them.

    docs/guarantees/shared-noise.md, (a).
    """
    rule, every = parties.rule, range(6)
    files = [MaskedFile.of(parties.file(i, counted=list(every))) for i in every]
    for n_colluding in range(1, 6):
        colluding = set(range(6 - n_colluding, 6))
        fewest = min(
            len(set(batch) - colluding)
            for size in range(1, 7)
            for batch in itertools.combinations(every, size)
            if 0 in batch and not find_obstacles([files[i] for i in batch], rule)
        )
        assert (fewest >= rule.shares) == (n_colluding <= rule.spare)


def test_sites_that_nobody_counts_on_add_nothing(parties: Parties) -> None:
    """A hub that gets its own sites onto the roster gains nothing from a site that knows better."""
    victim = MaskedFile.of(parties.file(0, counted=[0, 1, 2]))
    others = [MaskedFile.of(parties.file(i)) for i in range(1, 6)]
    (obstacle,) = find_obstacles([victim, *others], parties.rule)
    assert "'site 0' counts on" in obstacle


def test_only_sites_on_the_roster_are_taken(parties: Parties) -> None:
    stranger = parties.file(0, key=SigningKey.generate())
    renamed = parties.file(0, name="site 1")
    for file in (stranger, renamed):
        with pytest.raises(ContributionRejected, match="not on the roster"):
            parties.acknowledge(file)


def test_the_hub_needs_the_same_batch_from_every_keyholder(parties: Parties) -> None:
    files = [parties.file(i) for i in range(6)]
    for file in files:
        parties.acknowledge(file)
    first = parties.keyholders[0].open(Batch.of(map(MaskedFile.of, files[:5])))
    second = parties.keyholders[1].open(Batch.of(map(MaskedFile.of, files)))
    with pytest.raises(ContributionRejected, match="another batch"):
        parties.unmask(files, [first, second])
    with pytest.raises(ContributionRejected, match="not every keyholder"):
        parties.unmask(files, [second])


def test_an_opening_of_somebody_else_is_refused(parties: Parties) -> None:
    files = [parties.file(i) for i in range(4)]
    for file in files:
        parties.acknowledge(file)
    first, second = parties.open(files)
    forged = Opening.make(
        Batch.of(map(MaskedFile.of, files)), second.pads, 1, "0" * 64, SigningKey.generate()
    )
    with pytest.raises(ContributionRejected, match="not every keyholder"):
        parties.unmask(files, [first, forged])


def test_changed_numbers_are_noticed(parties: Parties) -> None:
    files = [parties.file(i) for i in range(4)]
    for file in files:
        parties.acknowledge(file)
    openings = parties.open(files)
    changed = Sealed(KIND, files[0].facts, {"sum": files[0].tensors["sum"] + 1}, files[0].signature)
    with pytest.raises(ContributionRejected, match="differ from the digest"):
        parties.unmask([changed, *files[1:]], openings)


def test_all_pad_holders_sign_one_roster(parties: Parties) -> None:
    other = Roster.make(
        parties.study,
        [("site 0", parties.sites[0].public, "nobody")],
        parties.hub,
    )
    stray = Card.make(other, parties.hub_seal.public, parties.hub)
    for cards in (parties.cards[:-1], [*parties.cards[:-1], stray]):
        with pytest.raises(SettingsError, match="2 have signed"):
            check_cards(parties.roster, parties.rule, parties.hub.public, cards)


def test_a_hub_is_no_keyholder_of_its_own_study(parties: Parties) -> None:
    rule = Rule(3, 1, (*parties.rule.keyholders, parties.hub.public))
    with pytest.raises(SettingsError, match="somebody else"):
        check_cards(parties.roster, rule, parties.hub.public, parties.cards)


@pytest.mark.parametrize("rule", [(1, 1), (3, 0), (True, 1), (2.0, 1)])
def test_a_rule_shares_noise_among_several(rule: tuple[int, int]) -> None:
    with pytest.raises(SettingsError, match="at least two sites"):
        Rule(*rule, ("0" * 64,))


def test_facts_that_are_not_those_of_a_masked_file_are_refused(parties: Parties) -> None:
    file = parties.file(0)
    plain = {k: v for k, v in file.facts.items() if k not in ("key", "tensors")}
    blind = plain["blind"]
    lies = [
        {**plain, "blind": {**blind, "counted": blind["counted"][::-1]}},
        {**plain, "blind": {**blind, "nonce": "x"}},
        {**plain, "blind": {**blind, "seeds": {"x": "y"}}},
        {**plain, "blind": {k: v for k, v in blind.items() if k != "spare"}},
        {**plain, "sequence": 0},
        {**plain, "site": None},
    ]
    for facts in lies:
        with pytest.raises(ContributionRejected):
            MaskedFile.of(Sealed.seal(KIND, facts, file.tensors, parties.sites[0]))
    with pytest.raises(ContributionRejected, match="something else than one masked sum"):
        MaskedFile.of(Sealed.seal(KIND, plain, {"sum": np.zeros(3)}, parties.sites[0]))
    with pytest.raises(ContributionRejected, match="signature"):
        MaskedFile.read(MaskedFile.of(file).text, "00" * 64)
