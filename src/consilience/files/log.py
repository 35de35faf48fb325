"""The log of a study's releases: a hash chain that every release carries.

Each release signs the digests of those before it. A hub that shows different releases to different
sites, or replaces one that it published, thus signs two logs that differ; sites that compare theirs
notice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

MOST_LISTED = 256  # digests that a release lists; all earlier ones are in the head
MOST_RELEASES = 1 << 20  # of a study
_GENESIS = "0" * 64
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class ReleaseLog:
    """The digests of a study's releases from number ``before`` + 1 on, oldest first.

    ``head`` stands for the first ``before`` of them: the hash of each digest and the head before
    it.
    """

    before: int = 0
    head: str = _GENESIS
    digests: Sequence[str] = ()

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `as_dict` wrote; raise ValueError if nothing can have written it."""
        before, head, digests = facts["before"], facts["head"], facts["digests"]
        numbers = type(before) is int and 0 <= before and isinstance(digests, list)
        hashes = [head, *(digests if numbers else [None])]
        if not all(isinstance(each, str) and _HASH.fullmatch(each) for each in hashes):
            raise ValueError("no log of releases")
        if before + len(digests) > MOST_RELEASES or (before == 0 and head != _GENESIS):
            raise ValueError("no log of releases")
        return cls(before, head, tuple(digests))

    def as_dict(self) -> dict[str, Any]:
        """Return the log as files carry it."""
        return {**asdict(self), "digests": list(self.digests)}

    @property
    def length(self) -> int:
        """How many releases there were."""
        return self.before + len(self.digests)

    def head_at(self, number: int) -> str:
        """Return the head of the first `number` releases, which must not be less than `before`."""
        head = self.head
        for digest in self.digests[: number - self.before]:
            head = hashlib.sha256(f"{head}{digest}".encode()).hexdigest()
        return head

    def add(self, digest: str) -> ReleaseLog:
        """Return the log with one more release."""
        return ReleaseLog(self.before, self.head, (*self.digests, digest))

    def shorten(self, listed: int = MOST_LISTED) -> ReleaseLog:
        """Return the same log with at most so many digests."""
        before = max(self.before, self.length - listed)
        return ReleaseLog(before, self.head_at(before), tuple(self.digests[before - self.before :]))

    @property
    def lists_enough(self) -> bool:
        """Whether it lists all that a release lists: what is not listed cannot be compared."""
        return len(self.digests) >= min(self.length, MOST_LISTED)

    def lists(self, number: int, digest: str) -> bool:
        """Tell whether the release with this number is listed, and has this digest."""
        return self.before < number <= self.length and self._digest(number - 1) == digest

    def overlaps(self, other: ReleaseLog) -> bool:
        """Tell whether the two can be compared."""
        return max(self.before, other.before) <= min(self.length, other.length)

    def find_difference(self, other: ReleaseLog) -> int | None:
        """Return the first number at which logs that overlap are seen to differ; None if nowhere.

        If the difference lies before what both list, it is the last number before that.
        """
        low, high = max(self.before, other.before), min(self.length, other.length)
        if self.head_at(low) != other.head_at(low):
            return low
        return next(
            (n + 1 for n in range(low, high) if self._digest(n) != other._digest(n)),
            None,
        )

    def _digest(self, number: int) -> str:
        return self.digests[number - self.before]
