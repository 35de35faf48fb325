"""The answer of `plan`: tables, sentences, and what a target would need."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from consilience.errors import SettingsError
from consilience.evaluation.compare import ANSWERS, MAJORITY
from consilience.evaluation.measures import AUC, ERROR, LOG_LOSS, Metric
from consilience.planning.expectation import LARGEST_N, Expectation, Planner
from consilience.planning.joining import ALONE, BASELINES, Joined, OwnModel, Way
from consilience.planning.sites import Case, require

NOTICEABLE = 1e-3  # nats: joining for less is not worth anyone's budget
# Where a search for what is required ends.
LARGEST = {"n_records": LARGEST_N, "n_sites": 4**12, "n_public": 4**12, "epsilon": 4**6}
QUANTITIES = {"n_sites": "sites", "epsilon": "epsilon", "n_public": "public records"}
OWN = "a site's own exact model, kept to itself"
TWICE = {
    "epsilon": "twice the epsilon",
    "n_records": "twice the records at each site",
    "n_sites": "twice the sites",
    "n_public": "twice the public records",
}
# What can be expected where the noise is so many times the signal, at most.
NOISY = (
    (0.1, "almost as good as without privacy"),
    (0.5, "somewhat worse than without privacy"),
    (1.0, "much worse than without privacy"),
    (math.inf, "mostly noise"),
)
ROUGH = "* the noise moves margins by more than 1: only the order of magnitude is meant"
BELOW_ZERO = "below 0: better than the sites' regularisation could reach with any number of records"


@dataclass(frozen=True)
class Advice:
    """Expectations over a grid of epsilons, and for every way of joining.

    Prints as tables and sentences.
    """

    rows: tuple[Expectation, ...]
    alone: Expectation  # one site at the asked epsilon
    target: float
    _planner: Planner
    _case: Case
    _ways: Mapping[str, Way]
    metric: Metric = LOG_LOSS

    @cached_property
    def joined(self) -> tuple[Joined, ...]:
        """What each way of joining is expected to reach; empty for one site on its own."""
        joining = self._planner.joining(self._case)
        found = (joining.expect(name, way) for name, way in self._ways.items())
        return tuple(found if self.metric is LOG_LOSS else sorted(found, key=self._judged))

    def _judged(self, way: Joined) -> float:
        """Return what a way is judged by, less for a better one."""
        if self.metric is LOG_LOSS:
            return way.excess_loss
        value = way.error if self.metric is ERROR else way.auc
        return float(self.metric.gain(math.nan if value is None else value, 0.0))

    @property
    def recommended(self) -> Joined | None:
        """The least predicted loss among ways that keep a record's epsilon without a trusted hub.

        Baselines are included: where joining does not beat them by `NOTICEABLE`, the
        recommendation is to stay alone, or with the public records.
        """
        ours = [way for way in self.joined if way.keeps_record_privacy]
        return min(
            ours,
            key=lambda way: self._judged(way) - (NOTICEABLE if way.is_baseline else 0.0),
            default=None,
        )

    @property
    def helps(self) -> bool | None:
        """Whether joining is predicted to help; None where the gain is too small to matter."""
        ours = [way for way in self.joined if way.keeps_record_privacy]
        joined = [self._judged(way) for way in ours if not way.is_baseline]
        if not joined:
            return None
        gain = min(self._judged(way) for way in ours if way.is_baseline) - min(joined)
        return True if gain > NOTICEABLE else False if gain <= 0 else None

    def required(self, what: str, target: float | None = None, *, name: str | None = None) -> float:
        """Return the least value of one quantity for which a way is predicted to suffice.

        Parameters
        ----------
        what
            "n_sites", "n_public", "n_records" or "epsilon". All else stays as asked; epsilons of
            unequal sites, and the hub's, change in proportion.
        target
            The excess loss to reach; by default the target of the plan.
        name
            The way of joining; by default the recommended one.

        Returns
        -------
        float
            Infinity if not even very many suffice.
        """
        name = self.recommended.name if name is None and self.recommended is not None else str(name)
        known = f"one of {list(self._ways)}; only plans for several sites have them"
        require("name", name, name in self._ways, known)
        way = self._ways[name]
        alike = len(self._case.sites) == 1 or what in ("n_public", "epsilon")
        known = f"one of {list(LARGEST)}, the first two if sites are alike"
        require("what", what, what in LARGEST and alike, known)
        target = self.target if target is None else target
        require("target", target, target > 0, "a number > 0")
        base, site = self.alone.epsilon, self._case.sites[0]
        now = {
            "n_sites": self._case.n_sites,
            "n_records": site.n_records,
            "epsilon": base,
            "n_public": self._case.n_public or 1,
        }

        def reached(value: float) -> bool:
            case = self._case.change(what, value, base)
            changed = _scale_epsilon(way, value / base) if what == "epsilon" else way
            return self._planner.joining(case).expect("", changed).excess_loss <= target

        return _least(reached, float(now[what]), LARGEST[what], what != "epsilon")

    @cached_property
    def needed(self) -> float:
        """Records that each site needs for the target, by the asymptotic estimate."""
        return self.required_n(self.target)

    @cached_property
    def needed_worst_case(self) -> float:
        """Records that each site needs for the target, by the worst-case bound."""
        return self.required_n(self.target, worst_case=True)

    def at(self, epsilon: float) -> Expectation:
        """Return the row of one epsilon of the grid."""
        for row in self.rows:
            if math.isclose(row.epsilon, epsilon):
                return row
        known = ", ".join(f"{row.epsilon:g}" for row in self.rows)
        raise SettingsError(
            f"The 'epsilon' of a row must be one of {known}. Got {epsilon!r} instead."
        )

    def required_n(self, target: float, *, worst_case: bool = False) -> float:
        """Return how many records each site needs for an excess loss of `target`.

        By the asymptotic estimate, or by the worst-case bound at its best regularisation; infinity
        if more than 1e13.
        """
        require("target", target, target > 0, "a number > 0")
        return self._planner.required_n(target, self.rows[0].n_sites, worst_case=worst_case)

    @cached_property
    def enough(self) -> dict[str, float]:
        """What the recommended way needs for the target, each with all else as asked."""
        best = self.recommended
        if best is None:
            return {}
        whats = ["n_sites"] if len(self._case.sites) == 1 and best.n_sites > 1 else []
        whats += ["epsilon"] if best.n_sites > 0 else []
        whats += ["n_public"] if best.n_public is not None else []
        return {what: self.required(what) for what in whats}

    # ------------------------------------------------------------------ in words

    @cached_property
    def headline(self) -> str:
        """What to expect, against what, and what to change, in plain words."""
        best, row = self.recommended, self.at(self.alone.epsilon)
        way = BASELINES[ALONE] if best is None else self._ways[best.name]
        joining = self._planner.joining(self._case)
        now = joining.expect(ALONE, way) if best is None else best
        site, epsilon = f"{row.n_records:,} records", f"epsilon {row.epsilon:g}"
        if row.n_sites == 1 and self._case.n_sites == 1:
            who = f"One site of {site} at {epsilon}"
        else:
            who = f"{self._case.n_sites} sites of {site} each at {epsilon}"
        if now.error is None:
            share = row.noise_per_coordinate / row.signal_per_coordinate
            words = next(text for most, text in NOISY if share <= most)
            said = [
                f"{who}: the noise is about {share:.2g} times what can be learned, so the model "
                f"will be {words}. Labelled public records are needed to predict an error or an "
                "AUC."
            ]
        else:
            how = ""
            if best is not None:
                how = f", {'staying with' if best.is_baseline else 'joined by'} {best.name}"
            own = joining.expect(OWN, OwnModel())
            beside = [way for way in self.joined if way.is_baseline and way is not best]
            against = [f"{way.name} {_percent(way)}" for way in beside]
            against.append(f"{OWN} {_percent(own)}")
            guess = self._planner.facts.guess_error or 0.0
            said = [
                f"{who}{how}: expect about {_percent(now)}. Beside it: {', '.join(against)}, "
                f"{MAJORITY} {guess:.1%}."
            ]
            if now.error > guess - NOTICEABLE:
                said.append(
                    "That is no better than always the most frequent class: judge by the AUC, or "
                    "change something."
                )
            if best is not None:
                said.append(f"Joining {ANSWERS[self.helps]}.")
        return " ".join([*said, self._what_to_change(now, way)])

    def _what_to_change(self, now: Joined, way: Way) -> str:
        """Say what twice as much of one thing would bring."""
        base, case = self.alone.epsilon, self._case
        twice = {"epsilon": 2 * base}
        if len(case.sites) == 1:
            twice["n_records"] = 2 * case.sites[0].n_records
            if case.n_sites > 1:
                twice["n_sites"] = 2 * case.n_sites
        if way.needs_public and case.n_public:
            twice["n_public"] = 2 * case.n_public
        found = {}
        for what, value in twice.items():
            changed = _scale_epsilon(way, 2.0) if what == "epsilon" else way
            then = self._planner.joining(case.change(what, value, base)).expect("", changed)
            if self._judged(now) - self._judged(then) > NOTICEABLE:
                found[TWICE[what]] = then
        if not found:
            return "Twice as much of any one thing would hardly change that."
        best_first = sorted(found, key=lambda what: self._judged(found[what]))
        words = [
            f"{what}: {_percent(found[what]) or f'excess loss {found[what].excess_loss:.2g}'}"
            for what in best_first
        ]
        noisy = 2 * now.noise_loss > now.noise_loss + now.sampling_loss
        fewer = " Fewer columns lower the noise, too." if noisy else ""
        return f"To do better: {'; '.join(words)}.{fewer}"

    @property
    def sentence(self) -> str:
        """What to expect at the asked epsilon, and how many records a better result needs."""
        row = self.at(self.alone.epsilon)
        if row.n_sites == 1:
            who = f"with n={row.n_records:,}"
        else:
            who = f"averaging {row.n_sites} sites of n={row.n_records:,} each"
        parts = [f"At epsilon={row.epsilon:g} {who} expect {_word_expectation(row)}"]
        if row.n_sites > 1:
            parts.append(f"one such site alone: {_word_expectation(self.alone)}")
        if row.exact_error is not None:
            parts.append(f"the same learner without noise: {row.exact_error:.3f}")
        each = "n" if row.n_sites == 1 else "n at each site"
        parts.append(
            f"to reach an excess loss of {self.target:g} you need {each}{_at_least(self.needed)} "
            f"(by the worst-case bound{_at_least(self.needed_worst_case)})"
        )
        return "; ".join(parts) + "."

    @property
    def joining_sentence(self) -> str:
        """Whether joining is predicted to help, in which way, and what the target would need."""
        best = self.recommended
        if best is None:
            return ""
        choice = "stay with" if best.is_baseline else "join by"
        parts = [
            f"Predicted: joining {ANSWERS[self.helps]}, {choice} {best.name}: {_word_way(best)}"
        ]
        beside = [way for way in self.joined if way.is_baseline and way.name != best.name]
        parts += [f"{way.name}: {_word_way(way)}" for way in beside]
        hidden = [way for way in self.joined if way.unit == "site"]
        if hidden:
            site = min(hidden, key=lambda way: way.excess_loss if way.error is None else way.error)
            parts.append(f"to hide whole sites at that epsilon: {site.name}, {_word_way(site)}")
        parts.append(self._target_sentence(best))
        return "; ".join(parts) + "."

    def _target_sentence(self, best: Joined) -> str:
        if best.excess_loss <= self.target:
            return f"the target, an excess loss of {self.target:g}, is reached"
        enough = {QUANTITIES[what]: n for what, n in self.enough.items() if math.isfinite(n)}
        words = [
            f"{name} >= {f'{n:.2g}' if name == 'epsilon' else _count(n)}"
            for name, n in enough.items()
        ]
        needs = (
            f"{' or '.join(words)}, all else equal"
            if words
            else "more than any one of sites, epsilon and records"
        )
        return f"for an excess loss of {self.target:g} it needs {needs}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a required number beyond 1e13 is None."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "alone": self.alone.as_dict(),
            "target": self.target,
            "headline": self.headline,
            "metric": self.metric.name,
            "required_n": _finite(self.needed),
            "required_n_worst_case": _finite(self.needed_worst_case),
            "sentence": self.sentence,
            "joined": [way.as_dict() for way in self.joined],
            "recommended": None if self.recommended is None else self.recommended.name,
            "required": {what: _finite(value) for what, value in self.enough.items()},
            "advice": self.joining_sentence,
        }

    def __str__(self) -> str:
        lines = [self.headline, "", *self._rows_table(), "", self.sentence]
        if self.joined:
            lines += ["", *self._ways_table(), "", self.joining_sentence]
        return "\n".join(lines)

    def _rows_table(self) -> list[str]:
        public = self.alone.error is not None
        errors = ["error", "±"] if public else []
        titles = ["epsilon", *errors, "excess loss", "noise/signal", "worst case"]
        cells = [
            [
                f"{row.epsilon:g}",
                *([f"{row.error:.3f}", f"{row.error_spread:.3f}"] if public else []),
                f"{row.expected_loss:.4f}{' ' if public or row.asymptotic else '*'}",
                f"{row.noise_per_coordinate / row.signal_per_coordinate:.2f}",
                f"{row.bound:.3g}",
            ]
            for row in self.rows
        ]
        rough = not public and not all(row.asymptotic for row in self.rows)
        return [*format_table(titles, cells), *([ROUGH] if rough else [])]

    def _ways_table(self) -> list[str]:
        public = self.alone.error is not None
        errors = [ERROR.title, AUC.title] if public else []
        titles = ["way", "hides", "hub sees", *errors, "excess loss", "noise part", "bound"]
        cells = [
            [
                way.name,
                way.unit,
                "models" if way.trusted else "releases" if way.unit != "none" else "nothing",
                *([f"{way.error:.3f}", f"{way.auc:.3f}"] if public else []),
                f"{_short(way.excess_loss)}{'*' if way.rough else ' '}",
                _short(way.noise_loss),
                f"{way.bound:.3g}",
            ]
            for way in self.joined
        ]
        lines = format_table(titles, cells)
        lines += [ROUGH] if any(way.rough for way in self.joined) else []
        return lines + ([BELOW_ZERO] if any(way.excess_loss < 0 for way in self.joined) else [])


def format_table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in [titles, *cells]]


def _scale_epsilon(way: Way, factor: float) -> Way:
    """Return the way with the epsilon of its own noise multiplied, if it draws any."""
    epsilon = getattr(way, "epsilon", None)
    if epsilon is None:
        return way
    changed: Any = copy.copy(way)
    changed.epsilon = np.multiply(epsilon, factor).tolist()
    return changed  # type: ignore[no-any-return]


def _least(reached: Callable[[float], bool], now: float, largest: float, whole: bool) -> float:
    """Return the least value that suffices, to 2 percent; infinity if it is beyond `largest`.

    The search starts at `now` and moves in factors of 4 until the answer is bracketed.
    """
    high = now
    if reached(high):
        while high > (1 if whole else 1e-6) and reached(
            max(high // 4 if whole else high / 4, 1 if whole else 0)
        ):
            high = max(high // 4, 1) if whole else high / 4
        low = high // 4 if whole else high / 4
    else:
        while not reached(high):
            low, high = high, high * 4
            if high > largest:
                return math.inf
    while high - low > (max(1, 0.02 * high) if whole else 0.02 * high):
        middle = (low + high) // 2 if whole else (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _word_expectation(row: Expectation) -> str:
    """Word an expectation, and say where it is rough."""
    if row.error is not None:
        return (
            f"an error of about {row.error:.3f} ± {row.error_spread:.3f} "
            f"(excess loss {row.expected_loss:.2g})"
        )
    rough = (
        "" if row.asymptotic else ", a rough figure because the noise moves margins by more than 1"
    )
    return f"an excess loss of about {row.expected_loss:.2g}{rough}"


def _word_way(way: Joined) -> str:
    error = "" if way.error is None else f"error {way.error:.3f}, "
    return f"{error}excess loss {way.excess_loss:.2g}{', roughly' if way.rough else ''}"


def _percent(way: Joined) -> str:
    """Return the predicted error and AUC of a way; nothing if there are none."""
    if way.error is None:
        return ""
    return f"{way.error:.1%} errors" + ("" if way.auc is None else f" (AUC {way.auc:.3f})")


def _short(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.1e}"


def _count(n: float) -> str:
    """Write a number of records with two digits."""
    return f"{float(f'{n:.2g}'):,.0f}"


def _at_least(n: float) -> str:
    """Write that a number of records is needed, or that it is too large to be had."""
    return f" >= {_count(n)}" if math.isfinite(n) else " beyond 10^13"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
