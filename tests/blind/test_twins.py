"""The protocol with one check removed: an attack then decodes the victim; the real code stops it.

What decodes a file here is all that is left of it when every pad is gone: the victim's sum and its
own share of the noise, which hides it √k times less than its guarantee says. Whoever attacks is the
hub, with its own pads, its own sites and whatever keyholders answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from consilience.blind.masked import Batch, MaskedFile, Opening, find_obstacles
from consilience.blind.pads import SealKey, Words, add_words, subtract_words
from consilience.errors import ContributionRejected
from consilience.files.contribution import Contribution
from consilience.keyholder.keyholder import Keyholder
from consilience.learners.base import plan_fit
from studies import table
from wards import ROWS, Wards

VICTIM, OWN = 0, 1  # the site that is attacked, and one that colludes with the hub


@pytest.fixture
def wards(tmp_path: Path) -> Wards:
    return Wards(tmp_path, n=6)


def numbers(wards: Wards, file: Contribution) -> Words:
    """Return what a file holds without its pads, as its own site knows it."""
    described = MaskedFile.of(file.sealed)
    seals = {each.key.public: next((each.folder / "seals").iterdir()) for each in wards.keyholders}
    pads = [described.pad(holder, SealKey.load(path)) for holder, path in seals.items()]
    pads.append(described.pad(wards.hub.public, wards.seal))
    return subtract_words(file.sealed.tensors["sum"], add_words(pads, len(pads[0])))


def open_sum(wards: Wards, files: Sequence[Contribution], openings: Sequence[Opening]) -> Words:
    """Do what a hub can that checks nothing: add up, and take off every pad that it has."""
    described = [MaskedFile.of(file.sealed) for file in files]
    masked = [file.sealed.tensors["sum"] for file in files]
    pads = [opening.pads for opening in openings]
    pads += [file.pad(wards.hub.public, wards.seal) for file in described]
    return subtract_words(add_words(masked, len(masked[0])), add_words(pads, len(masked[0])))


def ask(wards: Wards, files: Sequence[Contribution]) -> list[Opening]:
    """Have every keyholder acknowledge and open these files."""
    return list(wards.open(list(files)).batches[0][1])


def decodes(wards: Wards, file: Contribution, found: Words) -> bool:
    """Tell whether an attack found the victim's sum, under nothing but the victim's own share.

    A chi-square test: it is wrong with less than 1e-6, either way.
    """
    if not np.array_equal(found, numbers(wards, file)):
        return False
    learner: Any = wards.study.build(1.0)
    learner.schema = wards.study.schema
    task, _ = plan_fit(learner, table(ROWS, seed=VICTIM), None)
    exact = learner.scale * learner.exact_total(task) * learner.grain
    left = (found * learner.step - exact) / np.sqrt(file.learner.noise_variance())
    low, high = stats.chi2.ppf(3e-7, len(left)), stats.chi2.isf(3e-7, len(left))
    return bool(low < (left**2).sum() < high)


def patch_rule(monkeypatch: pytest.MonkeyPatch, twin: Any) -> None:
    """Let keyholders follow another rule for what may be opened."""
    monkeypatch.setattr("consilience.keyholder.keyholder.find_obstacles", twin)


# ------------------------------------------------------------------------------ k counted by files


def count_files(files: Sequence[MaskedFile], rule: Any) -> list[str]:
    """The twin: enough files, whoever they are of."""
    return [] if len(files) >= rule.least else ["too few files"]


def test_files_counted_as_sites_leave_the_victim_alone_with_one_curious_site(
    wards: Wards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site hands over as many files as a batch needs, and knows what is in them."""
    victim = wards.mask(VICTIM)
    own = [wards.mask(OWN, sequence=n) for n in (1, 2)]
    with pytest.raises(ContributionRejected, match="two files in the batch"):
        ask(wards, [victim, *own])
    patch_rule(monkeypatch, count_files)
    total = open_sum(wards, [victim, *own], ask(wards, [victim, *own]))
    known = add_words((numbers(wards, file) for file in own), len(total))
    assert decodes(wards, victim, subtract_words(total, known))


# --------------------------------------------------------------------------------------- Sybils


def count_listed(files: Sequence[MaskedFile], rule: Any) -> list[str]:
    """The twin: enough sites that are on the roster, whomever the others count on."""
    return [] if len({file.site_key for file in files}) >= rule.least else ["too few sites"]


def test_made_up_sites_that_the_victim_does_not_count_on_give_it_away(
    wards: Wards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub got two sites of its own onto the roster; the victim knows three others."""
    sybils = [wards.mask(i) for i in (4, 5)]
    trusted = wards.masking
    known = tuple(key.public for key in wards.keys[:4])
    wards.masking = type(trusted)(trusted.roster, trusted.rule, trusted.holders, known)
    victim = wards.mask(VICTIM)
    with pytest.raises(ContributionRejected, match="'site 0' counts on, itself included, 1 are"):
        ask(wards, [victim, *sybils])
    patch_rule(monkeypatch, count_listed)
    total = open_sum(wards, [victim, *sybils], ask(wards, [victim, *sybils]))
    made_up = add_words((numbers(wards, file) for file in sybils), len(total))
    assert decodes(wards, victim, subtract_words(total, made_up))


# ---------------------------------------------------------------------------------- pads reused


def test_a_pad_that_is_used_again_takes_itself_off(
    wards: Wards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin derives seeds and nonces from its key: its second file has the pads of the first.

    The hub asks for noise in place of the records, and subtracts: no keyholder is needed, and what
    is left has two shares of noise in place of k honest ones.
    """

    def attack(first: Contribution, second: Contribution) -> Words:
        return subtract_words(first.sealed.tensors["sum"], second.sealed.tensors["sum"])

    first, second = wards.mask(VICTIM), wards.mask(VICTIM, epsilon=None)
    honest = attack(first, second)
    apart = subtract_words(numbers(wards, first), numbers(wards, second))
    assert not np.array_equal(honest, apart)
    assert np.median(np.abs(honest.astype(float))) > 2**55  # far beyond any sum: uniform
    with monkeypatch.context() as twin:
        twin.setattr("consilience.blind.masked.os.urandom", lambda n: b"\1" * n)
        first, second = wards.mask(VICTIM), wards.mask(VICTIM, epsilon=None)
    lent = numbers(wards, second)
    assert decodes(wards, first, add_words((attack(first, second), lent), len(lent)))
    spread = np.sqrt(second.learner.noise_variance()) / second.learner.step
    assert np.abs(lent / spread).max() < 8  # what the hub does not know is one share of noise
    keyholder = wards.keyholders[0]
    keyholder.acknowledge(MaskedFile.of(first.sealed))
    with pytest.raises(ContributionRejected, match="a pad would be used twice"):
        keyholder.acknowledge(MaskedFile.of(second.sealed))


# ------------------------------------------------------------------------ overlapping batches


class Forgetful(Keyholder):
    """The twin: it opens whatever the rule allows, and does not look at what it opened before."""

    def open(self, batch: Batch) -> Opening:
        """Open a batch without looking into the log, or writing it."""
        study, rule, _, key = self._agreed(batch.study["digest"])
        with self._reading() as db:
            files = self._acknowledged(db, study, batch)
        assert not find_obstacles(files, rule)
        length = files[0].context.length
        pads = add_words((file.pad(self.key.public, key) for file in files), length)
        return Opening.make(batch, pads, 1, "0" * 64, self.key)


def test_the_difference_of_two_batches_is_the_file_that_one_of_them_lacks(wards: Wards) -> None:
    """Every other site is honest, and every batch large enough."""
    files = [wards.mask(i) for i in range(4)]
    rest = files[1:]

    def attack() -> Words:
        both = [open_sum(wards, batch, ask(wards, batch)) for batch in (files, rest)]
        return subtract_words(*both)

    honest = wards.keyholders
    with pytest.raises(ContributionRejected, match="opened before"):
        attack()
    wards.keyholders = [Forgetful(each.folder) for each in honest]
    assert decodes(wards, files[VICTIM], attack())
    wards.keyholders = [Forgetful(honest[0].folder), honest[1]]  # one intact log is enough
    with pytest.raises(ContributionRejected, match="opened before"):
        attack()
