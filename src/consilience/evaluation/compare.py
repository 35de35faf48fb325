"""Does joining help? The one rule, used by simulations, the demo, releases and the dashboard.

Joining is compared with everything a site could do instead, always in pairs: record by record on
one test table (`paired_gap`), or repeat by repeat of a simulation (`repeated_gap`). Joining helps
only if the interval of its gain lies above zero against every alternative; it does not help if some
alternative is clearly better; otherwise it does not clearly help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from consilience.errors import SchemaMismatch
from consilience.evaluation.intervals import Measure, mean, mean_of_repeats, paired_shares
from consilience.evaluation.measures import Evaluation

Array = NDArray[Any]

ANSWERS = {True: "helps", False: "does not help", None: "does not clearly help"}
_WORDS = {
    "better": "lower than",
    "worse": "HIGHER than",
    "unclear": "not clearly different from",
}


@dataclass(frozen=True)
class Gap:
    """What joining gains over one alternative: the loss of `other` less that of `joined`."""

    other: float
    joined: float
    gain: Measure
    p_value: float | None = None  # McNemar's exact one, of two classifiers on the same records

    @property
    def verdict(self) -> str:
        """Say how joining does, by its interval: ``"better"``, ``"worse"`` or ``"unclear"``."""
        return "better" if self.gain.low > 0 else "worse" if self.gain.high < 0 else "unclear"


def paired_gap(
    other: Evaluation | ArrayLike, joined: Evaluation | ArrayLike, *, level: float = 0.95
) -> Gap:
    """Compare two models record by record on the same test records.

    Either argument is an `Evaluation`, whose main measure is compared (the error, or the root mean
    squared error), or one loss per record. The interval is Bonett and Price's (2012) if losses are
    truth values, else the normal one of the mean difference.
    """
    a, b = (
        np.asarray(one.parts if isinstance(one, Evaluation) else one) for one in (other, joined)
    )
    if a.shape != b.shape or a.ndim != 1 or not len(a) or a.dtype != b.dtype:
        raise SchemaMismatch(
            "A paired comparison needs the losses of both models on the same test records. "
            "Nothing was compared. Evaluate both on one table."
        )
    if a.dtype != bool:
        gain = mean(a.astype(np.float64) - b, level)
        return Gap(float(a.mean()), float(b.mean()), gain)
    fixed, spoilt = int((a & ~b).sum()), int((b & ~a).sum())
    p_value = float(stats.binomtest(fixed, fixed + spoilt).pvalue) if fixed + spoilt else 1.0
    gain = paired_shares(fixed, spoilt, len(a), level)
    return Gap(float(a.mean()), float(b.mean()), gain, p_value)


def repeated_gap(other: Array, joined: Array, *, overlap: float = 0.0, level: float = 0.95) -> Gap:
    """Compare two methods repeat by repeat.

    Parameters
    ----------
    other, joined
        The loss of each method in each repeat. Both saw the same division of the records.
    overlap
        The number of test records over that of training records if repeats divide the same records
        anew, and 0 if their test records are independent.
    """
    return Gap(
        float(other.mean()), float(joined.mean()), mean_of_repeats(other - joined, overlap, level)
    )


@dataclass(frozen=True)
class Joining:
    """Joining beside everything a site could do instead, by title, in words.

    ``metric`` is what the losses are: "error" is shown in percent, anything else as a number.
    """

    gaps: Mapping[str, Gap]
    metric: str = "error"

    @property
    def helps(self) -> bool | None:
        """Whether joining helps.

        True if joining is clearly better than every alternative, False if one is clearly better
        than joining, None if it is unclear, or if there is nothing to compare with.
        """
        verdicts = {gap.verdict for gap in self.gaps.values()}
        return True if verdicts == {"better"} else False if "worse" in verdicts else None

    @property
    def answer(self) -> str:
        """The answer as a verb: "helps", "does not help" or "does not clearly help"."""
        return ANSWERS[self.helps]

    def show(self, value: float) -> str:
        """Return a loss as it is written in a sentence."""
        return f"{value:.1%}" if self.metric == "error" else f"{value:.4g}"

    @property
    def comparison(self) -> str:
        """Each alternative with its loss and the interval of the gain; empty if there is none."""
        return "; ".join(self._compare(title, gap) for title, gap in self.gaps.items())

    def _compare(self, title: str, gap: Gap) -> str:
        low, high = gap.gain.low, gap.gain.high
        if not math.isfinite(low):
            sure = "no interval from one repeat"
        elif self.metric == "error":
            sure = f"gain {100 * low:+.1f} to {100 * high:+.1f} percentage points"
        else:
            sure = f"gain {low:+.3f} to {high:+.3f}"
        return f"{_WORDS[gap.verdict]} {title} ({self.show(gap.other)}, {sure})"
