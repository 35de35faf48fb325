"""The releases of a study that a site saw, and how two sites compare what they saw."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from consilience.files.log import MOST_RELEASES, ReleaseLog
from consilience.protocol import is_digest

MOST_KEPT = 1 << 12  # digests of releases that a site keeps for comparing


@dataclass(frozen=True)
class Seen:
    """The releases of a study that a site saw.

    ``kept`` has the digests of those that are in its folder, by number, and ``log`` is the log that
    they carried; None if they carried none. ``aside`` are earlier histories, which the site put
    aside when it accepted another one.
    """

    kept: Mapping[int, str]
    log: ReleaseLog | None
    aside: Sequence[Seen] = ()

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `as_dict` wrote; raise an error if nothing can have written it."""
        kept = {int(number): digest for number, digest in facts.get("kept", {}).items()}
        aside = tuple(cls.from_dict({**one, "aside": ()}) for one in facts.get("aside", ()))
        if not all(1 <= number <= MOST_RELEASES and is_digest(kept[number]) for number in kept):
            raise ValueError("no log of releases")
        log = None if facts["log"] is None else ReleaseLog.from_dict(facts["log"])
        return cls(kept, log, aside)

    def as_dict(self) -> dict[str, Any]:
        """Return the facts that another site compares with its own."""
        kept = {str(number): digest for number, digest in self.kept.items()}
        facts = {"log": None if self.log is None else self.log.as_dict(), "kept": kept}
        return {**facts, "aside": [one.as_dict() for one in self.aside]} if self.aside else facts

    @property
    def digests(self) -> dict[int, str]:
        """The digests of all releases that are known one by one."""
        listed = {} if self.log is None else dict(enumerate(self.log.digests, self.log.before + 1))
        return {**self.kept, **listed}

    @property
    def histories(self) -> tuple[Seen, ...]:
        """All that this site was shown: the present history, and those that were put aside."""
        return (self, *self.aside)

    @property
    def contradiction(self) -> int | None:
        """The first number of which this site has seen two different releases; None if of none."""
        return _find_fork(self.histories)

    def find_difference(self, log: ReleaseLog) -> int | None:
        """Return the first number at which a log is seen to differ; None if nowhere."""
        number = None if self.log is None else self.log.find_difference(log)
        listed = range(log.before + 1, log.length + 1)
        others = (n for n, digest in sorted(self.kept.items()) if n in listed)
        return next((n for n in others if not log.lists(n, self.kept[n])), number)

    def compare(self, other: Seen) -> tuple[bool, str]:
        """Tell whether two sites saw the same releases, and say it in sentences."""
        same, text = self._compare_now(other)
        number = _find_fork((*self.histories, *other.histories))
        if number is not None:
            same, text = False, _two_histories(number)
        unknown = _put_aside_by_one(self, other)
        if same and unknown:
            same = False
            text += (
                " One of them was also shown another history, and accepted the present one with "
                f"--new-log. Of its releases {', '.join(map(str, unknown))} nothing tells whether "
                "the other site saw them. Ask the hub's operator."
            )
        for whose, seen in (("This site", self), ("The other site, by what it says,", other)):
            number = seen.contradiction
            if number is not None:
                text = (
                    f"{whose} was shown two different releases of number {number}, and accepted "
                    "the second with --new-log. Unless a hub that was restored explains it, the "
                    f"hub signed two histories. Keep all files, and tell the other sites. {text}"
                )
                same = False
        return same, text

    def _compare_now(self, other: Seen) -> tuple[bool, str]:
        """Compare the histories that both take for the present one."""
        if self.log is not None and other.log is not None:
            return compare_logs(self.log, other.log)
        common = sorted(self.digests.keys() & other.digests.keys())
        if not common:
            return False, "The two sites have no release in common, and one of them has no log."
        listed = ", ".join(map(str, common))
        return True, (
            f"Both sites have the same releases {listed}. Nothing tells about others: one of the "
            "two sites has no log, because its releases carried none. Ask the hub's operator why."
        )


def compare_logs(ours: ReleaseLog, theirs: ReleaseLog) -> tuple[bool, str]:
    """Tell whether two sites saw the same releases, and say it in a sentence."""
    common = min(ours.length, theirs.length)
    if not ours.overlaps(theirs):
        return False, "The two logs list different times and cannot be compared."
    number = ours.find_difference(theirs)
    if number is None:
        return True, f"Both sites saw the same {common} releases."
    return False, _two_histories(number)


def merge_logs(known: ReleaseLog | None, newer: ReleaseLog) -> ReleaseLog:
    """Return the longer of two logs that agree, from the first release that either lists on."""
    if known is not None and known.length >= newer.length:
        return known
    if known is None or known.before >= newer.before:
        return newer
    digests = (*known.digests, *newer.digests[known.length - newer.before :])
    return ReleaseLog(known.before, known.head, digests).shorten(MOST_KEPT)


def _find_fork(histories: Sequence[Seen]) -> int | None:
    """Return the first number at which any of these differ, by files or logs; None if nowhere."""
    pairs = {pair for each in histories for pair in (*each.kept.items(), *each.digests.items())}
    first: dict[int, str] = {}
    forks = [n for n, digest in sorted(pairs) if first.setdefault(n, digest) != digest]
    logs = [each.log for each in histories if each.log is not None]
    for one, other in itertools.combinations(logs, 2):
        number = one.find_difference(other) if one.overlaps(other) else None
        forks += [] if number is None else [number]
    return min(forks, default=None)


def _put_aside_by_one(ours: Seen, theirs: Seen) -> list[int]:
    """Return the numbers of releases that were put aside at one site, and are unknown elsewhere.

    Only logs of both sites are taken to tell of all releases.
    """
    if ours.log is None or theirs.log is None:
        return []
    return sorted(
        {
            number
            for one, other in ((ours, theirs), (theirs, ours))
            for aside in one.aside
            for number in aside.digests
            if not any(number in each.digests for each in other.histories)
        }
    )


def _two_histories(number: int) -> str:
    return (
        f"By these logs the sites saw different releases, at the latest from number {number} on. "
        "Logs carry no signature, and release files do: if both sites have a file that the hub's "
        "key signed (consilience release verify FILE), the hub signed two histories. Keep both, "
        "and ask the hub's operator."
    )
