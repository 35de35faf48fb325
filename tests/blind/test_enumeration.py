"""The whole protocol at a small modulus: every pad and every number, and what each coalition sees.

Words that are multiples of 2^63 are closed under addition modulo 2^64, which is then addition
modulo 2. So the real code runs unchanged on a small group: sites mask, keyholders acknowledge and
open, the hub unmasks. Each place of a vector is one case of the enumeration; only the pads are
injected. There are three sites, two batches of three files each, and a file that nobody opens.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilience.blind.masked import MaskedFile, find_obstacles
from parties import Parties

A, B, C = range(3)
FILES = [(A, 1), (B, 1), (C, 1), (A, 2), (B, 2), (C, 2), (A, 3)]  # site and number
BATCHES = [FILES[:3], FILES[3:6]]
HUB, FIRST, SECOND = range(3)  # the pad holders
SHARE = {0: Fraction(3, 4), 1: Fraction(1, 4)}  # the law of one site's noise, modulo 2


@dataclass(frozen=True)
class Coalition:
    """Who puts together what it knows: some pad holders, and some sites."""

    holders: frozenset[int]
    sites: frozenset[int] = frozenset()

    @property
    def honest(self) -> list[tuple[int, int]]:
        """The files of the other sites, whose numbers it does not know."""
        return [file for file in FILES if file[0] not in self.sites]

    @property
    def unknown(self) -> list[tuple[int, tuple[int, int]]]:
        """The pads that it does not know: a site knows its own."""
        missing = [holder for holder in range(3) if holder not in self.holders]
        return list(itertools.product(missing, self.honest))


COALITIONS = {
    "the hub and all keyholders but one": Coalition(frozenset((HUB, FIRST))),
    "all keyholders without the hub": Coalition(frozenset((FIRST, SECOND))),
    "the hub": Coalition(frozenset((HUB,)), frozenset((C,))),
    "the hub and two sites": Coalition(frozenset((HUB,)), frozenset((B, C))),
    "the hub, a keyholder and a site": Coalition(frozenset((HUB, SECOND)), frozenset((C,))),
}


class Enumeration:
    """One run of the protocol over all numbers and all pads that a coalition does not know."""

    def __init__(self, folder: Path, who: Coalition, patch: pytest.MonkeyPatch) -> None:
        self.who = who
        self.parties = Parties(folder, n=3, shares=2, spare=1)
        names = [*who.honest, *who.unknown]
        cases = np.array(list(itertools.product((0, 1), repeat=len(names))))
        self.numbers, pads = cases[:, : len(who.honest)], cases[:, len(who.honest) :]
        fixed = itertools.cycle((1, 0, 0, 1, 1))  # what the coalition knows anyway
        every = itertools.product(range(3), FILES)
        self.pads = {each: np.full(len(cases), next(fixed)) for each in every}
        self.pads |= {name: pads[:, i] for i, name in enumerate(who.unknown)}
        self.words = {file: np.full(len(cases), next(fixed)) for file in FILES}
        self.words |= {file: self.numbers[:, i] for i, file in enumerate(who.honest)}
        patch.setattr("consilience.blind.masked.expand", self.expand)
        self.files = {
            file: self.parties.file(file[0], as_words(self.words[file]).tolist(), sequence=file[1])
            for file in FILES
        }
        for sealed in self.files.values():
            self.parties.acknowledge(sealed)

    def expand(self, _: bytes, context: bytes, length: int) -> Any:
        """Return the pad that this case has for a file and a holder."""
        said = json.loads(context)
        keys = [self.parties.hub.public, *(one.key.public for one in self.parties.keyholders)]
        file = (int(said["site"].removeprefix("site ")), said["sequence"])
        pad = self.pads[keys.index(said["holder"]), file]
        assert len(pad) == length
        return as_words(pad)

    def view(self) -> Any:
        """Return all that the coalition sees, one row for each case.

        Files and totals are public. A keyholder's opening is sent to the hub; it is counted as seen
        by everybody.
        """
        seen = [as_bits(sealed.tensors["sum"]) for sealed in self.files.values()]
        for batch in BATCHES:
            files = [self.files[file] for file in batch]
            openings = self.parties.open(files)
            seen += [as_bits(opening.pads) for opening in openings]
            seen.append(as_bits(self.parties.unmask(files, openings)))
        return np.stack(seen, axis=1)


def as_words(bits: Any) -> Any:
    return (bits.astype(np.uint64) << np.uint64(63)).view(np.int64)


def as_bits(words: Any) -> Any:
    assert not (words.view(np.uint64) & np.uint64(2**63 - 1)).any()
    return (words.view(np.uint64) >> np.uint64(63)).astype(int)


@pytest.fixture(params=list(COALITIONS), ids=str)
def run(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Enumeration:
    return Enumeration(tmp_path, COALITIONS[request.param], monkeypatch)


def views(run: Enumeration) -> dict[tuple[int, ...], Counter[bytes]]:
    """Return by the honest sites' words how often the coalition sees what, over all pads."""
    found: dict[tuple[int, ...], Counter[bytes]] = {}
    for words, seen in zip(run.numbers.tolist(), run.view(), strict=True):
        found.setdefault(tuple(words), Counter())[seen.tobytes()] += 1
    return found


def honest_sums(who: Coalition, words: Sequence[int]) -> tuple[int, ...]:
    """Return what the honest sites' words add up to in each batch."""
    named = dict(zip(who.honest, words, strict=True))
    return tuple(sum(named.get(file, 0) for file in batch) % 2 for batch in BATCHES)


def test_a_coalition_sees_the_sums_of_the_honest_sites_and_nothing_else(run: Enumeration) -> None:
    """Without any noise: what is seen has the same law for all words with the same two sums.

    The file that nobody opened is in no sum, so it may hold anything.
    """
    found = views(run)
    by_sums: dict[tuple[int, ...], Counter[bytes]] = {}
    for words, seen in found.items():
        assert by_sums.setdefault(honest_sums(run.who, words), seen) == seen
    assert len(by_sums) == 4
    for one, other in itertools.combinations(by_sums.values(), 2):
        assert not one.keys() & other.keys()  # the sums themselves are told apart


def test_with_noise_it_learns_what_so_many_shares_let_through(run: Enumeration) -> None:
    """The law of the view under each number of the victim, exactly, in fractions.

    Two numbers are as far apart as with the shares of all honest sites, as the table of coalitions
    in docs/guarantees/shared-noise.md has it.
    """
    n_honest = 3 - len(run.who.sites)
    changed, unopened = distances(run)
    assert changed == Fraction(1, 2) ** n_honest
    assert unopened == 0


def test_everything_together_leaves_a_site_its_own_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The enumeration would notice: all pad holders see each file, opened or not."""
    run = Enumeration(tmp_path, Coalition(frozenset((HUB, FIRST, SECOND))), monkeypatch)
    assert distances(run) == (Fraction(1, 2), Fraction(1, 2))


def distances(run: Enumeration) -> tuple[Fraction, Fraction]:
    """Return how far another number in the first batch, and in no batch, moves what is seen."""
    found, who = views(run), run.who

    def law(numbers: Sequence[int]) -> Counter[bytes]:
        mixed: Counter[bytes] = Counter()
        for shares in itertools.product(SHARE, repeat=len(numbers)):
            words = tuple((q + e) % 2 for q, e in zip(numbers, shares, strict=True))
            chance = np.prod([SHARE[share] for share in shares])
            total = sum(found[words].values())
            for seen, n in found[words].items():
                mixed[seen] += chance * Fraction(n, total)
        return mixed

    def distance(one: Counter[bytes], other: Counter[bytes]) -> Fraction:
        return sum(abs(one[seen] - other[seen]) for seen in one.keys() | other.keys()) / 2

    zero = [0] * len(who.honest)
    none = law(zero)
    return distance(none, law([1, *zero[1:]])), distance(none, law([*zero[:-1], 1]))


def test_whatever_may_be_opened_has_one_file_of_each_site(tmp_path: Path) -> None:
    """All sets of the seven files: too few sites, or two files of one, are never opened."""
    parties = Parties(tmp_path, n=3, shares=2, spare=1)
    files = {file: MaskedFile.of(parties.file(file[0], sequence=file[1])) for file in FILES}
    for size in range(1, 8):
        for chosen in itertools.combinations(FILES, size):
            may = not find_obstacles([files[file] for file in chosen], parties.rule)
            assert may == (sorted(site for site, _ in chosen) == [A, B, C])
