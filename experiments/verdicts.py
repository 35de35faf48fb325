"""Judge whether the statements in `expected.toml` hold in our numbers, and count the verdicts.

`kinds.py` says what a statement measures. A t interval over the trials says whether a quantity
speaks for the claim, against it, or neither; a size that matters, and the number of statements that
were judged, are told beside it. README.md states the rule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from .kinds import KINDS, LEVEL, Array, Evidence, Lines, NotRun, Tested, Unclear, Where
from .statements import Statement

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
EQUAL, FEW, OPEN = "equal within x", "too few repeats", "not run"
ORDER = (HOLDS, PARTLY, FAILS, EQUAL, FEW, OPEN)
FALSE = 0.05  # the share of wrong ones among the verdicts that are called clear
# A difference that matters, where a statement does not say: half a percentage point.
PRACTICAL = dict.fromkeys(("error", "auc", "f1", "f1_micro", "f1_macro"), 0.005)

Table = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """A judged statement: one word, the measured number in words, and how single points spoke.

    ``p`` is how probable evidence as strong as this would be if nothing were there: the smaller,
    the clearer; of a statement with several looks, already corrected for them. ``size`` compares
    the difference with what matters. ``seeds`` has the verdict of each master seed by itself where
    these disagree, ``answers`` that of each answer to a question on which the paper is silent.
    """

    statement: Statement
    verdict: str
    measured: str
    points: str = ""
    p: float = 1.0
    size: str = ""
    seeds: tuple[tuple[int, Verdict], ...] = ()
    answers: tuple[tuple[str, Verdict], ...] = ()

    @property
    def depends(self) -> bool:
        """Whether the answers to what the paper leaves open lead to different verdicts."""
        return len({one.verdict for _, one in self.answers if one.verdict != OPEN}) > 1


def judge(statement: Statement, tables: Mapping[str, Table]) -> Verdict:
    """Return the verdict on one statement from the tidy tables of its paper, by panel.

    Where the paper leaves a choice open, each answer is judged. A claim that holds under one
    plausible answer and not under another holds in part.
    """
    if not statement.variants:
        return _judge_panel(statement, tables.get(statement.panel))
    answers = tuple(
        (answer, _judge_panel(statement, tables.get(panel)))
        for answer, panel in statement.variants.items()
    )
    main = dict(answers)[
        next(answer for answer, panel in statement.variants.items() if panel == statement.panel)
    ]
    judged = [one for _, one in answers if one.verdict != OPEN]
    if not judged:
        return replace(main, answers=answers)
    p = max(one.p for one in judged)
    return replace(main, verdict=_joint({one.verdict for one in judged}), p=p, answers=answers)


def _joint(words: Collection[str]) -> str:
    """Return the verdict on a claim from those under each plausible reading of the paper."""
    if len(words) == 1:
        return next(iter(words))
    if {HOLDS, PARTLY} & set(words):
        return PARTLY
    return FEW if FEW in words else FAILS


def _judge_panel(statement: Statement, table: Table | None) -> Verdict:
    rows = None if table is None else list(table)
    if not rows:
        return Verdict(statement, OPEN, "its panel was not run")
    whole = _judge_lines(statement, Lines.of(rows))
    seeds = sorted({row.get("seed", 0) for row in rows})
    if len(seeds) < 2 or whole.verdict == OPEN:
        return whole
    by_seed = tuple(
        (seed, _judge_lines(statement, Lines.of(row for row in rows if row.get("seed") == seed)))
        for seed in seeds
    )
    # With a third of the repeats each, most of them see less. They disagree where one of them is
    # clear and is not what all of them together say.
    clear = {HOLDS: HOLDS, PARTLY: HOLDS, FAILS: FAILS}
    sides = {clear[one.verdict] for _, one in by_seed if one.verdict in clear}
    return whole if sides <= {clear.get(whole.verdict)} else replace(whole, seeds=by_seed)


def _judge_lines(statement: Statement, lines: Lines) -> Verdict:
    try:
        evidence = KINDS[statement.kind](statement, lines)
    except NotRun as missing:
        return Verdict(statement, OPEN, str(missing))
    except Unclear as reason:
        return Verdict(statement, FEW, str(reason))
    if isinstance(evidence, Tested):
        word = {"for": HOLDS, "against": FAILS, "open": FEW}[evidence.where]
        return Verdict(statement, word, evidence.measured, p=min(1.0, evidence.p))
    if len(evidence.whole) < 2:
        return Verdict(statement, OPEN, f"{evidence.measured}; one repeat has no interval")
    matters = statement.practical
    if matters is None and evidence.in_metric and lines.metrics:
        matters = PRACTICAL.get(next(iter(lines.metrics.values())))
    return _weigh(statement, evidence, None if evidence.equivalence else matters)


def _weigh(statement: Statement, evidence: Evidence, matters: float | None) -> Verdict:
    """Return the verdict that the rule gives on quantities per trial."""
    n = max(len(evidence.points), 1)
    within = evidence.limit if evidence.equivalence else None
    whole = _Odds.of(evidence.whole, within)
    # Many points get many chances to err: each is held to its share of the error (Bonferroni).
    points = [(x, _Odds.of(gaps, within)) for x, gaps in evidence.points]
    spoken = [(x, odds.speaks(1 - (1 - LEVEL) / n)) for x, odds in points]
    said, where = [one for _, one in spoken], whole.speaks(evidence.level)
    if evidence.equivalence and set(said) == {"against"}:
        where = "against"  # gaps that cancel in the mean are no equality
    enough = whole if evidence.equivalence else _Odds.of(evidence.whole - evidence.limit, None)
    if where == "for" and enough.speaks(evidence.level) == "for" and "against" not in said:
        word, p = HOLDS, evidence.looks * enough.p_for
    elif where == "for":
        word, p = PARTLY, evidence.looks * whole.p_for
    elif where == "open" and "for" in said:
        word, p = PARTLY, n * min(odds.p_for for _, odds in points)
    elif where == "against" or "against" in said:
        all_points = n * min((odds.p_against for _, odds in points), default=1.0)
        word, p = FAILS, min(evidence.looks * whole.p_against, all_points)
    else:
        word, p = FEW, evidence.looks * min(whole.p_for, whole.p_against)
    size = ""
    if matters is not None:
        word, p, size = _sized(evidence, matters, word, p)
    measured = _in_words(evidence, where)
    return Verdict(statement, word, measured, _counted(spoken), min(1.0, 2 * p), size)


@dataclass(frozen=True)
class _Odds:
    """How probable a mean like this, or one farther out, is on the border of the claim."""

    p_for: float
    p_against: float

    @classmethod
    def of(cls, gaps: Array, within: float | None) -> _Odds:
        if within is None:
            return cls(_beyond(gaps), _beyond(-gaps))
        above, below = gaps + within, within - gaps
        return cls(
            max(_beyond(above, True), _beyond(below, True)), min(_beyond(-above), _beyond(-below))
        )

    def speaks(self, level: float) -> Where:
        """Return whether a two-sided interval of this level lies on one side of the border."""
        limit = (1 - level) / 2
        return "for" if self.p_for < limit else "against" if self.p_against < limit else "open"


def _beyond(gaps: Array, or_at: bool = False) -> float:
    """Return the one-sided p value of a t test that a mean over trials exceeds 0 (`or_at` 0)."""
    mean, error = float(np.mean(gaps)), float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    if error == 0:
        return 0.0 if mean > 0 or (or_at and mean == 0) else 1.0
    return float(stats.t.sf(mean / error, len(gaps) - 1))


def interval(gaps: Array, level: float = LEVEL) -> tuple[float, float]:
    """Return the t interval of a mean over trials; without spread it is a point."""
    mean, n = float(np.mean(gaps)), len(gaps)
    half = float(stats.t.isf((1 - level) / 2, n - 1)) * float(np.std(gaps, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def _sized(evidence: Evidence, matters: float, word: str, p: float) -> tuple[str, float, str]:
    """Return the verdict again, now that differences below `matters` do not matter."""
    low, high = interval(evidence.whole, evidence.level)
    if -matters < low and high < matters:
        said = f"too small to matter (less than {matters:g})"
        if word == FEW:
            return EQUAL, evidence.looks * _Odds.of(evidence.whole, matters).p_for, said
        return word, p, said
    if word == FEW:
        return word, p, f"may or may not be {matters:g} or more, which would matter"
    if low >= matters or high <= -matters:
        return word, p, f"large enough to matter ({matters:g} or more)"
    return word, p, f"may or may not be large enough to matter ({matters:g})"


def _in_words(evidence: Evidence, whole: Where) -> str:
    low, high = interval(evidence.whole, evidence.level)
    sure = {
        "for": "clear",
        "against": "the opposite is clear",
        "open": f"not clear from {len(evidence.whole)} repeats",
    }
    said = sure[whole]
    if whole == "for" and not evidence.equivalence and low <= evidence.limit:
        said = f"clear, but not that it is {evidence.limit:g} or more"
    what = f"{100 * evidence.level:g} % interval" + (
        "" if evidence.equivalence else " in the claimed direction"
    )
    return f"{evidence.measured}; {what} {low:+.3g} to {high:+.3g}: {said}"


def _counted(spoken: Sequence[tuple[Any, Where]]) -> str:
    if not spoken:
        return ""
    words = []
    for where, what in (("for", "as claimed"), ("open", "undecided"), ("against", "opposite")):
        at = [x for x, said in spoken if said == where]
        if at:
            shown = f" ({', '.join(f'{x:g}' if isinstance(x, float) else str(x) for x in at)})"
            words.append(f"{len(at)} {what}" + (shown if where != "for" else ""))
    return f"of {len(spoken)} points: " + ", ".join(words)


# ------------------------------------------------------------------------------------ all verdicts


def clear(verdicts: Sequence[Verdict]) -> set[str]:
    """Return the names of statements whose verdict stands when all statements are counted.

    Among many statements some look clear by chance. Benjamini and Hochberg's rule lets only so many
    pass that at most `FALSE` of them can be expected to be wrong. Duplicates are judged once.
    """
    judged = sorted(
        (one for one in verdicts if one.verdict != OPEN and not one.statement.duplicate_of),
        key=lambda one: one.p,
    )
    passing = [place for place, one in enumerate(judged, 1) if one.p <= FALSE * place / len(judged)]
    passed = {one.statement.name for one in judged[: max(passing, default=0)] if one.verdict != FEW}
    return passed | {one.statement.name for one in verdicts if one.statement.duplicate_of in passed}
