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
from consilience.evaluation.measures import ERROR, METRICS, RMSE, Evaluation, Metric

Array = NDArray[Any]

MAJORITY, MEAN = "always the most frequent class", "always the mean"
ANSWERS = {True: "helps", False: "does not help", None: "does not clearly help"}


@dataclass(frozen=True)
class Gap:
    """What joining gains over one alternative; a gain is positive whichever way is better."""

    other: float
    joined: float
    gain: Measure
    p_value: float | None = None  # McNemar's exact one, of two classifiers on the same records

    @property
    def verdict(self) -> str:
        """Say how joining does, by its interval: ``"better"``, ``"worse"`` or ``"unclear"``."""
        return "better" if self.gain.low > 0 else "worse" if self.gain.high < 0 else "unclear"


def paired_gap(
    other: Evaluation | ArrayLike,
    joined: Evaluation | ArrayLike,
    *,
    metric: Metric | None = None,
    level: float = 0.95,
) -> Gap:
    """Compare two models record by record on the same test records.

    Either argument is an `Evaluation`, or one number per record whose mean is the metric. The
    metric is by default the error, or of regressors the root mean squared error. The interval is
    Bonett and Price's (2012) if the numbers are truth values, else the normal one of the mean
    difference, which for the AUC is that of DeLong and others (1988).
    """
    if metric is None:
        numeric = isinstance(joined, Evaluation) and RMSE.name in joined.measures
        metric = RMSE if numeric else ERROR
    a, b = (
        np.asarray(one.parts(metric) if isinstance(one, Evaluation) else one)
        for one in (other, joined)
    )
    if a.shape != b.shape or a.ndim != 1 or not len(a) or a.dtype != b.dtype:
        raise SchemaMismatch(
            "A paired comparison needs the losses of both models on the same test records. "
            "Nothing was compared. Evaluate both on one table."
        )
    if a.dtype != bool:
        gain = mean(metric.gain(a.astype(np.float64), b), level)
        return Gap(float(a.mean()), float(b.mean()), gain)
    fixed, spoilt = int((a & ~b).sum()), int((b & ~a).sum())
    p_value = float(stats.binomtest(fixed, fixed + spoilt).pvalue) if fixed + spoilt else 1.0
    gain = paired_shares(fixed, spoilt, len(a), level)
    return Gap(float(a.mean()), float(b.mean()), gain, p_value)


def repeated_gap(
    other: Array,
    joined: Array,
    *,
    metric: Metric = ERROR,
    overlap: float = 0.0,
    level: float = 0.95,
) -> Gap:
    """Compare two methods repeat by repeat.

    Parameters
    ----------
    other, joined
        The metric of each method in each repeat. Both saw the same division of the records.
    overlap
        The number of test records over that of training records if repeats divide the same records
        anew, and 0 if their test records are independent.
    """
    gain = mean_of_repeats(metric.gain(other, joined), overlap, level)
    return Gap(float(other.mean()), float(joined.mean()), gain)


@dataclass(frozen=True)
class Joining:
    """Joining beside everything a site could do instead, by title, in words.

    ``metric`` names the measure that is compared.
    """

    gaps: Mapping[str, Gap]
    metric: str = ERROR.name

    @property
    def measure(self) -> Metric:
        """What is compared."""
        return METRICS[self.metric]

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

    def caution(self, *, has_auc: bool) -> str:
        """Say why errors say little here, if the most frequent class explains them; else nothing.

        They say enough about a model that is clearly worse. An AUC needs scores and records of two
        classes; `has_auc` tells whether the same models were compared by it.
        """
        guess = self.gaps.get(MAJORITY)
        if self.measure is not ERROR or guess is None or guess.verdict != "unclear":
            return ""
        rest = "the AUC can" if has_auc else "such test records cannot"
        return (
            f"The error is not clearly different from that of {MAJORITY} "
            f"({self.show(guess.other)}), so errors do not show here whether anything was learned; "
            f"{rest}."
        )

    def show(self, value: float) -> str:
        """Return a value of the metric as it is written in a sentence."""
        return self.measure.show(value)

    @property
    def comparison(self) -> str:
        """Each alternative with its value and the interval of the gain; empty if there is none."""
        return "; ".join(self._compare(title, gap) for title, gap in self.gaps.items())

    def _compare(self, title: str, gap: Gap) -> str:
        low, high = gap.gain.low, gap.gain.high
        sure = "no interval from one repeat"
        if math.isfinite(low):
            sure = f"gain {self.measure.show_gain(low, high)}"
        better, worse = (
            ("higher", "LOWER") if self.measure.higher_is_better else ("lower", "HIGHER")
        )
        words = {"better": f"{better} than", "worse": f"{worse} than"}
        word = words.get(gap.verdict, "not clearly different from")
        return f"{word} {title} ({self.show(gap.other)}, {sure})"
