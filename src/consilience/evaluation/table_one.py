"""The first table of a paper, of a summary's noisy sums: every number with its interval.

An interval is for what the exact number of all sites' records is: it includes the noise, and for
quantiles the width of the bins. It does not include that records are a sample.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from consilience.display.panels import panels
from consilience.errors import SettingsError
from consilience.evaluation.intervals import Measure
from consilience.statistics.summary import Block, SummaryTable
from consilience.tables.schema import Categorical, Numeric, Schema

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]

ALL = "all records"
LEVEL = 0.95
QUARTILES = {"1st quartile": 0.25, "median": 0.5, "3rd quartile": 0.75}
FALSE_ALARM = 0.01  # of all comparisons of a site's own records with the total, together
LEAST_RECORDS = 20  # of a site's own in a class, below which nothing is compared
ABSENT = "missing"
# Ends of what is compared and not shown: cut off at what is possible, noise would look narrower.
ANY = (-3.0, 3.0)


def ratio(
    numbers: tuple[float, float], covariance: Array, level: float, ends: tuple[float, float]
) -> Measure:
    """Return the first number over the second, with Fieller's interval within its possible `ends`.

    The interval has its level exactly where the noise of both is normal. Where noise alone could
    make the whole zero, it is everything.
    """
    (part, whole), (low, high) = numbers, ends
    z = float(stats.norm.isf((1 - level) / 2))
    (var_part, both), (_, var_whole) = np.asarray(covariance).tolist()
    a, b, c = whole**2 - z**2 * var_whole, part * whole - z**2 * both, part**2 - z**2 * var_part
    if whole <= 0 or a <= 0:
        guess = part / whole if whole > 0 else (low + high) / 2
        return Measure(min(max(guess, low), high), low, high)
    half = math.sqrt(max(b * b - a * c, 0.0))
    found = (part / whole, (b - half) / a, (b + half) / a)
    return Measure(*(min(max(end, low), high) for end in found))


@dataclass(frozen=True)
class Cell:
    """One column among the records of one class: noisy numbers, and what is known of their noise.

    Counts are adjusted so that their sum is `n`, which all columns tell together.
    """

    block: Block
    raw: Array
    sums: Array  # Σv and Σv²; none of a column without values
    noise: Array  # variances: of a count and, where there are sums, of both
    n: float
    n_variance: float
    level: float

    @cached_property
    def counts(self) -> Array:
        """Numbers of records by bin."""
        return np.asarray(self.raw + (self.n - self.raw.sum()) / len(self.raw))

    def _covariance(self, *kept: Array) -> Array:
        """Return the covariance of sums of counts, each of the bins that it keeps."""
        rows = np.array(kept, dtype=np.float64)
        size, outer = len(self.raw), np.outer(rows.sum(axis=1), rows.sum(axis=1))
        own = self.noise[0] * (rows @ rows.T - outer / size)
        return np.asarray(own + self.n_variance * outer / size**2)

    def share(
        self, kept: Array, of: Array | None = None, ends: tuple[float, float] = (0.0, 1.0)
    ) -> Measure:
        """Return the share of some bins in the bins `of`, by default those with a value."""
        whole = self.block.present if of is None else of
        numbers = float(self.counts[kept].sum()), float(self.counts[whole].sum())
        return ratio(numbers, self._covariance(kept, whole), self.level, ends)

    @property
    def missing(self) -> Measure:
        """The share of records without a value."""
        return self.share(~self.block.present, np.ones(len(self.raw), bool))

    def _with_value(self) -> tuple[float, float]:
        """Return how many records have a value, and the variance of the noise in that."""
        present = self.block.present
        return float(self.counts[present].sum()), float(self._covariance(present)[0, 0])

    def mean(self, ends: tuple[float, float] = (-1.0, 1.0)) -> Measure:
        """Return the mean of the values, on their scale from -1 to 1."""
        whole, variance = self._with_value()
        covariance = np.diag([self.noise[1], variance])
        return ratio((float(self.sums[0]), whole), covariance, self.level, ends)

    @property
    def deviation(self) -> Measure:
        """The standard deviation of the values, on the same scale."""
        whole, variance = self._with_value()
        z = float(stats.norm.isf((1 - self.level) / 2))
        if whole <= z * math.sqrt(variance):
            return Measure(0.5, 0.0, 1.0)
        mean, square = self.sums / whole
        spread = np.square([1, 2 * mean]) @ self.noise[[2, 1]] + variance * (
            (2 * mean**2 - square) ** 2
        )
        half = z * math.sqrt(float(spread)) / whole
        found = np.clip(np.array([0, -half, half]) + square - mean**2, 0.0, 1.0)
        return Measure(*map(float, np.sqrt(found)))

    def quantile(self, share: float, edges: Array) -> Measure:
        """Return a quantile; `edges` are those of the bins with a value, in the column's unit.

        Each end of the interval fails only if the count below the quantile's own bin is farther off
        than its noise explains, so that looking at all bins costs nothing.
        """
        places = np.flatnonzero(self.block.present)
        kept = np.cumsum(np.eye(len(self.raw))[places], axis=0)  # up to each bin
        rows = np.vstack([np.zeros(len(self.raw)), kept]) - share * self.block.present
        z = float(stats.norm.isf((1 - self.level) / 2))
        reach = z * np.sqrt(np.maximum(np.diag(self._covariance(*rows)), 0.0))
        below = rows @ self.counts
        slack = 1e-9 * max(self.n, 1.0)
        first = np.flatnonzero(below[1:] + reach[1:] >= -slack)
        last = np.flatnonzero(below[:-1] - reach[:-1] <= slack)
        low = edges[first[0]] if len(first) else edges[-2]
        high = edges[last[-1] + 1] if len(last) else edges[1]
        rising = np.maximum.accumulate(below)
        value = float(np.interp(0.0, rising + np.arange(len(rising)) * 1e-12, edges))
        return Measure(min(max(value, low), high), float(low), float(high))


@dataclass(frozen=True)
class Row:
    """One line of the table: what it says, for each group a number with its interval."""

    column: str
    what: str
    measures: tuple[Measure, ...]
    share: bool = False


@dataclass(frozen=True)
class TableOne:
    """A summary in the units and words of a study's schema.

    Examples
    --------
    >>> import consilience as cs
    >>> age = cs.Numeric("age", 0, 100, cuts=4)
    >>> schema = cs.Schema([age], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> summed = cs.Summary(epsilon=1.0, delta=1e-6, schema=schema).fit(table)
    >>> cs.TableOne.of(cs.Total().combine([summed]), schema).groups
    ('no', 'yes', 'all records')
    """

    title: str
    groups: tuple[str, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    level: float

    @classmethod
    def of(cls, summary: object, schema: Schema, *, title: str = "", level: float = LEVEL) -> Self:
        """Return the table of a summary that was made by this schema."""
        if not isinstance(summary, SummaryTable):
            raise SettingsError(
                f"A {type(summary).__name__} is no summary. Nothing was shown. Take the release of "
                'a study with [statistic] name = "Summary".'
            )
        columns = tuple(_columns(summary, schema, level))
        groups = _groups(summary)
        rows = [Row("", "records", tuple(_records(cell) for cell in columns[0].cells))]
        for column in columns:
            rows += column.rows()
        return cls(title, groups, tuple(rows), columns, level)

    def as_text(self) -> str:
        """Return the table as text."""
        lines = [
            [row.what if row.column == "" else f"  {row.what}", *_shown(row)] for row in self.rows
        ]
        names = iter(lines)
        table = [["", *self.groups]]
        for column, rows in itertools.groupby(self.rows, key=lambda row: row.column):
            table += [[column]] if column else []
            table += [next(names) for _ in rows]
        widths = [
            max(len(line[place]) for line in table if place < len(line))
            for place in range(len(self.groups) + 1)
        ]
        body = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
            for line in table
        )
        head = f"{self.title}\n{'=' * len(self.title)}\n\n" if self.title else ""
        return f"{head}{body}\n\n{self.note}\n"

    @property
    def note(self) -> str:
        """What the intervals mean."""
        return (
            f"In brackets: the range in which the exact number of all sites' records lies with "
            f"{self.level:.0%} confidence; for quartiles it includes the width of the bins."
        )

    def as_html(self) -> str:
        """Return the table as one self-contained HTML file."""
        body = []
        for column, rows in itertools.groupby(self.rows, key=lambda row: row.column):
            if column:
                span = len(self.groups) + 1
                body.append(
                    f"<tr><th colspan={span} scope=rowgroup>{html.escape(column)}</th></tr>"
                )
            for row in rows:
                cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _shown(row))
                body.append(f"<tr><th scope=row>{html.escape(row.what)}</th>{cells}</tr>")
        heads = "".join(f"<th scope=col>{html.escape(group)}</th>" for group in self.groups)
        return (
            "<!doctype html><html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head><body>"
            f"<h1>{html.escape(self.title)}</h1><table><thead><tr><td></td>{heads}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table><p>{html.escape(self.note)}</p></body></html>"
        )

    def as_csv(self) -> str:
        """Return one line for each number: column, what, group, value and the interval's ends."""
        out = io.StringIO()
        write = csv.writer(out, lineterminator="\n")
        write.writerow(["column", "what", "group", "value", "low", "high"])
        for row in self.rows:
            for group, found in zip(self.groups, row.measures, strict=True):
                numbers = [f"{number:.10g}" for number in (found.value, found.low, found.high)]
                write.writerow([row.column, row.what, group, *numbers])
        return out.getvalue()

    def plot(self, *, ax: object = None) -> Array:
        """Draw a panel for each column, with a line for each class; return the array of Axes.

        `ax` is where to draw: an Axes or several, of which each gets one column; a Figure; or None,
        for a new figure of pyplot's.
        """
        found = panels(len(self.columns), ax)
        groups = self.groups[:-1] or self.groups
        for axes, column in zip(found, self.columns, strict=False):
            column.draw(axes, groups)
        return found


@dataclass(frozen=True)
class Column:
    """One column of a summary, its units and words, and a cell for each group."""

    name: str
    cells: tuple[Cell, ...]
    names: tuple[str, ...]  # of its bins with a value
    edges: Array | None  # of these bins in the column's unit; None: categories
    unit: Numeric | float | None  # what turns a value into the column's unit

    def rows(self) -> Iterator[Row]:
        """Yield the lines of the table."""
        block = self.cells[0].block
        if block.value:
            mean, deviation = self._titles
            yield self._row(mean, lambda cell: _map(self._at, cell.mean()))
            yield self._row(deviation, lambda cell: _map(self._length, cell.deviation))
        if self.edges is not None:
            for title, share in QUARTILES.items():
                find = partial(Cell.quantile, share=share, edges=self.edges)
                yield self._row(title, find)
        if not block.value:
            for name, kept in self.bins:
                yield self._row(name, partial(Cell.share, kept=kept), share=True)
        if block.absent:
            yield self._row(ABSENT, lambda cell: cell.missing, share=True)

    @property
    def bins(self) -> list[tuple[str, Array]]:
        """The names of bins with a value, each with the mark that keeps it."""
        places = np.flatnonzero(self.cells[0].block.present)
        return list(
            zip(self.names, np.eye(self.cells[0].block.n_bins, dtype=bool)[places], strict=True)
        )

    def _row(self, what: str, find: Callable[[Cell], Measure], *, share: bool = False) -> Row:
        return Row(self.name, what, tuple(map(find, self.cells)), share)

    @property
    def _titles(self) -> tuple[str, str]:
        transform = getattr(self.unit, "transform", None)
        if transform == "log":
            return "geometric mean", "geometric standard deviation"
        scale = f" on the scale of {transform}" if transform else ""
        return f"mean{scale}", f"standard deviation{scale}"

    def _at(self, value: float) -> float:
        if not isinstance(self.unit, Numeric):
            return value * float(self.unit or 1.0)
        middle, half = self.unit.scale(self.unit.low, self.unit.high)
        return float(self.unit.undo_transform(middle + half * value))

    def _length(self, value: float) -> float:
        if not isinstance(self.unit, Numeric):
            return value * float(self.unit or 1.0)
        length = value * self.unit.scale(self.unit.low, self.unit.high)[1]
        return math.exp(length) if self.unit.transform == "log" else length

    def draw(self, axes: Axes, groups: Sequence[str]) -> None:
        """Draw the shares of the bins with their intervals, for each class."""
        axes.set_title(self.name, fontsize="medium")
        for place, (group, cell) in enumerate(zip(groups, self.cells, strict=False)):
            found = [cell.share(kept) for _, kept in self.bins]
            value, low, high = np.array([[one.value, one.low, one.high] for one in found]).T
            if self.edges is not None:
                axes.stairs(value, self.edges, baseline=None, linewidth=1.8, label=group)
                axes.stairs(high, self.edges, baseline=low, fill=True, alpha=0.2, color=f"C{place}")
            else:
                at = np.arange(len(value)) + 0.8 * ((place + 0.5) / len(groups) - 0.5)
                reach = np.vstack([value - low, high - value])
                axes.bar(at, value, 0.8 / len(groups), yerr=np.maximum(reach, 0), label=group)
        if self.edges is None:
            axes.set_xticks(range(len(self.names)), self.names, fontsize="small", rotation=30)
        if getattr(self.unit, "transform", None) == "log":
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("share")
        axes.legend(fontsize="small")


def _groups(summary: SummaryTable) -> tuple[str, ...]:
    if summary.classes is None:
        return (ALL,)
    return (*(str(label) for label in summary.classes.tolist()), ALL)


def _columns(summary: SummaryTable, schema: Schema, level: float) -> Iterator[Column]:
    """Yield the columns of a summary, named and scaled by the schema."""
    numeric = summary.classes is None
    if len(summary.columns) != len(schema.columns) + numeric:
        raise SettingsError(
            "The summary has other columns than the schema. Nothing was shown. Use the schema of "
            "its study."
        )
    n, variance = summary.count_records()
    groups = summary.n_groups
    all_variance = 0.0 if summary.size is not None else groups * variance
    for place, block in enumerate(summary.columns):
        values, noise = summary.block(place)
        known = [(values[k], noise[k], float(n[k]), variance) for k in range(groups)]
        if not numeric:
            known.append((values.sum(axis=0), noise.sum(axis=0), float(n.sum()), all_variance))
        cells = tuple(
            Cell(
                block,
                row[: block.n_bins],
                row[block.n_bins :],
                np.concatenate([spread[:1], spread[block.n_bins :]]),
                count,
                count_variance,
                level,
            )
            for row, spread, count, count_variance in known
        )
        if place < len(schema.columns):
            yield _named(schema.columns[place], cells, block)
        else:
            edges = np.linspace(-1, 1, block.n_bins + 1) * summary.label_bound
            yield Column(schema.label, cells, _spans(edges), edges, summary.label_bound)


def _named(column: Numeric | Categorical, cells: tuple[Cell, ...], block: Block) -> Column:
    if isinstance(column, Categorical):
        return Column(column.name, cells, tuple(map(str, column.categories)), None, None)
    if column.edges:
        edges = np.array([column.low, *column.edges, column.high])
    else:
        middle, half = column.scale(column.low, column.high)
        places = middle + half * np.linspace(-1, 1, int(block.present.sum()) + 1)
        edges = np.asarray(column.undo_transform(places))
    return Column(column.name, cells, _spans(edges), edges, column)


def _spans(edges: Array) -> tuple[str, ...]:
    last = len(edges) - 2
    return tuple(
        f"{low:.4g} to {high:.4g}" if place == last else f"{low:.4g} to below {high:.4g}"
        for place, (low, high) in enumerate(itertools.pairwise(edges.tolist()))
    )


def _records(cell: Cell) -> Measure:
    reach = float(stats.norm.isf((1 - cell.level) / 2)) * math.sqrt(cell.n_variance)
    return Measure(max(cell.n, 0.0), max(cell.n - reach, 0.0), max(cell.n + reach, 0.0))


def _map(function: Callable[[float], float], found: Measure) -> Measure:
    return Measure(function(found.value), function(found.low), function(found.high))


def _shown(row: Row) -> list[str]:
    return [_show(found, row.share, whole=row.column == "") for found in row.measures]


def _show(found: Measure, share: bool, *, whole: bool = False) -> str:
    numbers = np.array([found.value, found.low, found.high]) * (100 if share else 1)
    width = float(numbers[2] - numbers[1])
    # Two digits of the interval's width; four of the value where it is exact.
    size = width if width > 0 else abs(float(numbers[0])) / 100
    digits = 0 if size <= 0 or whole else 1 - math.floor(math.log10(size))
    digits = min(max(digits, 0), 6)
    value, low, high = (f"{number:,.{digits}f}" for number in numbers.tolist())
    sign = " %" if share else ""
    return f"{value}{sign}" if low == high else f"{value}{sign} ({low} to {high})"


_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;"
    "max-width:70rem;padding:0 1rem}table{border-collapse:collapse}td,th{padding:.2rem .8rem "
    ".2rem 0;text-align:left;border-bottom:1px solid #8884}th[scope=row]{font-weight:400;"
    "padding-left:1.2rem}"
)


# ------------------------------------------------------------------ a site beside the total


@dataclass(frozen=True)
class Difference:
    """Where a site's own exact number differs from the total by more than noise and chance."""

    column: str
    what: str
    group: str
    own: float
    total: Measure
    share: bool

    @property
    def row(self) -> tuple[str, str]:
        """What differs, and both numbers in words."""
        of = f"{self.column}: {self.what}, {self.group}"
        own = _show(Measure(self.own, self.own, self.own), self.share)
        return of, f"{own} here; {_show(self.total, self.share)} in the total"


@dataclass(frozen=True)
class Comparison:
    """What a site learns of its own records beside all sites'; it is exact, and stays there."""

    differences: tuple[Difference, ...]
    n_compared: int


def compare(own: SummaryTable, total: SummaryTable, schema: Schema) -> Comparison:
    """Compare a site's own exact summary with the total.

    Where both come from one law, anything at all is reported with a probability of about 1 % only:
    the total's noise, and that the site's records are a sample, are accounted for.
    """
    ours, theirs = (tuple(_columns(each, schema, LEVEL)) for each in (own, total))
    groups = _groups(total)
    tried = [
        each
        for mine, column in zip(ours, theirs, strict=True)
        for group, cell, their in zip(groups, mine.cells, column.cells, strict=True)
        if cell.n >= LEAST_RECORDS
        for each in _compared(mine, cell, their, group)
    ]
    tried += _compare_classes(own, total, groups)
    z = float(stats.norm.isf(FALSE_ALARM / 2 / max(len(tried), 1)))
    units = {column.name: column for column in theirs}
    far = [each for each in tried if each.distance > z]
    return Comparison(tuple(each.in_units(units) for each in far), len(tried))


@dataclass(frozen=True)
class _Tried:
    column: str
    what: str | None  # which share; None: the mean
    group: str
    own: float
    total: Measure
    chance: float  # standard deviation of the site's own number by chance
    step: float  # by how much one record changes it, at most

    @property
    def distance(self) -> float:
        """Return how many standard deviations the site is away from the total."""
        side = self.total.high if self.own > self.total.value else self.total.low
        noise = abs(side - self.total.value) / float(stats.norm.isf((1 - LEVEL) / 2))
        gap = max(abs(self.own - self.total.value) - self.step, 0.0)
        return gap / max(math.hypot(noise, self.chance), 1e-12)

    def in_units(self, columns: dict[str, Column]) -> Difference:
        """Return the difference in the units of its column, within what is possible."""
        if self.what is not None:
            total = _map(lambda end: min(max(end, 0.0), 1.0), self.total)
            return Difference(self.column, self.what, self.group, self.own, total, True)
        column = columns[self.column]
        total = _map(lambda end: column._at(min(max(end, -1.0), 1.0)), self.total)
        title = column._titles[0]
        return Difference(self.column, title, self.group, column._at(self.own), total, False)


def _compared(mine: Column, cell: Cell, their: Cell, group: str) -> Iterator[_Tried]:
    """Yield what is compared of one column and class."""
    whole = np.ones(cell.block.n_bins, bool)
    kept = list(mine.bins)
    if cell.block.absent:
        kept.append((ABSENT, ~cell.block.present))
    for what, place in kept:
        total, own = their.share(place, whole, ANY), cell.share(place, whole).value
        chance = _share_chance(total.value, cell.n)
        yield _Tried(mine.name, what, group, own, total, chance, 1 / cell.n)
    n = float(cell.counts[cell.block.present].sum())
    if cell.block.value and n >= LEAST_RECORDS:
        # The wider of both spreads: the site's own may be narrow by chance.
        chance = max(cell.deviation.value, their.deviation.value) / math.sqrt(n)
        yield _Tried(mine.name, None, group, cell.mean().value, their.mean(ANY), chance, 0.0)


def _share_chance(share: float, n: float) -> float:
    least = min(1 / n, 0.5)
    share = min(max(share, least), 1 - least)
    return math.sqrt(share * (1 - share) / n)


def _compare_classes(own: SummaryTable, total: SummaryTable, groups: Sequence[str]) -> list[_Tried]:
    counts, found = own.count_records()[0], total.count_records()
    n, whole = float(counts.sum()), float(found[0].sum())
    if own.classes is None or n < LEAST_RECORDS:
        return []
    all_variance = 0.0 if total.size is not None else total.n_groups * found[1]
    both = 0.0 if total.size is not None else found[1]
    tried = []
    for group, count, theirs in zip(groups, counts.tolist(), found[0].tolist(), strict=False):
        covariance = np.array([[found[1], both], [both, all_variance]])
        share = ratio((theirs, whole), covariance, LEVEL, ANY)
        chance = _share_chance(share.value, n)
        tried.append(_Tried("records", "share", group, count / n, share, chance, 1 / n))
    return tried
