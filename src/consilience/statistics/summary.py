"""Summary: what a table of patients says of each column and class, added up over sites.

From the counts and sums follow numbers of records, means, standard deviations, quantiles and
shares, each with an interval that includes the noise (`evaluation/table_one.py`). Proofs:
docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from sklearn.utils.validation import check_array

from consilience.aggregators.base import Ensemble, Facts, Rebuild, Rows, Table, TakeApart, Tensors
from consilience.aggregators.members import dense
from consilience.errors import ContributionRejected, SettingsError
from consilience.learners.base import PrivateLearner, is_count
from consilience.learners.erm import Chunks
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.statistics.base import (
    ROUNDED,
    Adder,
    Array,
    ClassStatistic,
    NumberStatistic,
    Statistic,
    Summed,
)
from consilience.statistics.label_tables import (
    BLOCK,
    COUNT_BITS,
    are_marks,
    columns_of,
    find_bins,
)
from consilience.tables.public import Public
from consilience.tables.schema import Categorical

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

BINS = 16  # of a number without cuts of its own
# Of Σv and of Σv², beside a count's 1: half of what a number costs is for its mean and its spread.
# Squares must not weigh less than values (docs/guarantees/statistics.md).
VALUE_WEIGHT = math.sqrt(0.5)


class Block(NamedTuple):
    """One column: the marks of its bins, its value, and the bins of records without a value.

    ``value`` is the feature that holds the number and the factor that brings it into [-1, 1]; it is
    empty where only bins are counted.
    """

    marks: tuple[tuple[float, ...], ...]
    value: tuple[float, ...]
    absent: tuple[int, ...]

    @property
    def n_bins(self) -> int:
        """How many bins there are."""
        return len(self.marks) + 1

    @property
    def length(self) -> int:
        """How many numbers there are for each class."""
        return self.n_bins + 2 * bool(self.value)

    @property
    def present(self) -> Array:
        """For each bin, whether its records have a value."""
        return ~np.isin(np.arange(self.n_bins), self.absent)


def read_blocks(columns: object) -> tuple[Block, ...] | None:
    """Return the columns of a setting or a file; None if they are none."""
    try:
        blocks = tuple(
            Block(
                tuple(tuple(map(float, mark)) for mark in marks),
                tuple(map(float, value)),
                tuple(absent),
            )
            for marks, value, absent in columns  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):
        return None
    return blocks if _fit_together(blocks) else None


def _fit_together(blocks: Sequence[Block]) -> bool:
    return are_marks([block.marks for block in blocks]) and all(
        len(block.value) in (0, 2)
        and all(math.isfinite(number) for number in block.value)
        and all(feature >= 0 and feature.is_integer() for feature in block.value[:1])
        and all(is_count(place + 1, block.n_bins) for place in block.absent)
        and len(set(block.absent)) == len(block.absent)
        for block in blocks
    )


def blocks_of(schema: Schema) -> list[list[Any]]:
    """Return the columns of a schema as settings hold them; its missing-value rules decide."""
    longest = 1.0 if schema.scale == "columns" else math.sqrt(len(schema.columns))
    if longest > schema.norm * (1 + 1e-9):
        raise SettingsError(
            "A summary reads values back from encoded records, and this schema shortens records to "
            f"norm={schema.norm:g}, which changes them. Nothing was computed. Set scale='columns' "
            f"and norm=1, or norm={math.ceil(longest)}."
        )
    factor = math.sqrt(len(schema.columns)) if schema.scale == "columns" else 1.0
    blocks: list[list[Any]] = []
    for column, marks in zip(schema.columns, columns_of(schema, BINS), strict=True):
        absent = [len(marks)] if column.missing == "indicator" else []
        value: list[float] = []
        if isinstance(column, Categorical):
            absent.insert(0, 0)  # no category: a missing value or an undeclared one
        elif not column.edges:
            value = [marks[0][0], factor]
        blocks.append([marks, value, absent])
    return blocks


def clip_values(values: Array) -> Array:
    """Return values within ±1."""
    return np.asarray(np.clip(values, -1.0, 1.0))


@dataclass(frozen=True)
class AddSummary:
    """Count records by class and bin and add up values and their squares, column by column."""

    blocks: tuple[Block, ...]
    n_groups: int
    has_classes: bool  # otherwise the label is a number, and one more column

    def __call__(self, chunks: Chunks) -> Array:
        """Return the sum in whole grains."""
        totals = [np.zeros((self.n_groups, block.length), np.int64) for block in self.blocks]
        for X, y in chunks:
            for start in range(0, len(y), BLOCK):
                rows = np.asarray(dense(X[start : start + BLOCK]))
                labels = np.asarray(y[start : start + BLOCK])
                if not self.has_classes:
                    rows = np.column_stack([rows, labels])
                    labels = np.zeros(len(rows), np.int64)
                for total, block in zip(totals, self.blocks, strict=True):
                    self._add(total, block, rows, labels)
        return np.concatenate([total.ravel() for total in totals])

    def _add(self, total: Array, block: Block, rows: Array, groups: Array) -> None:
        (bins,) = find_bins([block.marks], rows)
        cells = np.bincount(groups * block.n_bins + bins, minlength=self.n_groups * block.n_bins)
        total[:, : block.n_bins] += cells.reshape(self.n_groups, -1) << COUNT_BITS
        if block.value:
            feature, factor = block.value
            values = clip_values(rows[:, int(feature)] * factor) * block.present[bins]
            steps = np.trunc(values * 2.0**COUNT_BITS)
            squares = np.trunc(steps * steps * 2.0**-COUNT_BITS)
            for place, parts in ((-2, steps), (-1, squares)):
                # Sums of so few whole numbers are exact in doubles.
                added = np.bincount(groups, weights=parts, minlength=self.n_groups)
                total[:, place] += added.astype(np.int64)


@dataclass(eq=False, repr=False, kw_only=True)
class _Summary(Statistic):
    """What summaries of classes and of numbers share."""

    makes = "summary"
    grain: ClassVar[float] = 2.0**-COUNT_BITS
    counts_alike: ClassVar[bool] = True
    study_decides: ClassVar[frozenset[str]] = frozenset(("columns",))

    columns: Sequence[Sequence[Any]] | None = None

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides, the columns and their bins among them."""
        return {**super().declared_by(schema), "columns": cls.columns_by(schema)}

    @classmethod
    def columns_by(cls, schema: Schema) -> list[list[Any]]:
        """Return the columns of a schema as settings hold them."""
        return blocks_of(schema)

    @property
    def holds(self) -> str:
        """What it counts and adds up."""
        per_class = "" if self.predicts_number else " and class"
        return f"counts and sums of values, by bins of each column{per_class}"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        if read_blocks(self.columns) is None:
            raise SettingsError(
                f"The 'columns' parameter of {type(self).__name__} must list for each column its "
                "marks, the feature and the factor of its value, and its bins for missing values. "
                "Nothing was computed. Pass schema=..., which decides them."
            )
        if self.sharing is not None and self.sharing.steps > 1:
            raise SettingsError(
                "Every record of a summary counts alike, and sites of this study with a smaller "
                "epsilon would scale theirs down. Nothing was computed. Give the study one "
                "epsilon: epsilon_min and epsilon_max are then the same."
            )
        known = getattr(self, "n_features_in_", math.inf) + (self.predicts_number or 0)
        if any(feature >= known for block in self._blocks for feature in _features(block)):
            raise SettingsError(
                f"The 'columns' of {type(self).__name__} name a feature that the table does not "
                "have. Nothing was computed. Use the schema that encoded it."
            )

    @property
    def _blocks(self) -> tuple[Block, ...]:
        return read_blocks(self.columns) or ()

    @property
    def _n_groups(self) -> int:
        return 1

    @property
    def fixed_features(self) -> int | None:
        """How many features the columns name, without a label that is a number."""
        return 1 + int(max(max(_features(block)) for block in self._blocks)) - self.predicts_number

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return self._n_groups * sum(block.length for block in self._blocks)

    def may_finish(
        self, ensemble: Ensemble, other: PrivateLearner[Any, Any], sizes: Sequence[int | None]
    ) -> bool:
        """Tell whether this is a summary of so many records, with as much noise."""
        known = [size for size in sizes if size is not None]
        return (
            isinstance(ensemble, SummaryTable)
            and (ensemble.size is None or ensemble.size <= sum(known) * (1 + ROUNDED))
            and self.may_total(ensemble.values, ensemble.variance, other, sizes)
        )

    def weights(self) -> Array:
        """Return 1 for counts and less for sums of values and of squares."""
        weights = []
        for block in self._blocks:
            one = np.ones(block.length)
            one[block.n_bins :] = VALUE_WEIGHT
            weights.append(np.tile(one, self._n_groups))
        return np.concatenate(weights)

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes the weighted sum."""
        moved = 2 if neighbours is Neighbours.REPLACE_ONE else 1
        numbers = sum(bool(block.value) for block in self._blocks)
        return math.sqrt(moved * (len(self._blocks) + numbers * 2 * VALUE_WEIGHT**2))

    def adder(self) -> Adder:
        """Return the function that adds up records."""
        self.check_settings()  # now that the number of features is known
        return AddSummary(self._blocks, self._n_groups, not self.predicts_number)

    def finish(self, total: Summed, public: Public | None = None) -> SummaryTable:
        """Return the summary of the sites' records; public records are not counted in."""
        return SummaryTable(
            getattr(self, "classes_", None),
            self._blocks,
            int(self.n_features_in_),
            np.asarray(total.values),
            np.asarray(total.variance),
            total.size if self.unit == "record" else None,
            float(getattr(self, "label_bound", None) or 1.0),
            np.ones(1),
            None,
            (),
        )


def _features(block: Block) -> list[float]:
    return [feature for feature, _ in block.marks] + list(block.value[:1])


@dataclass(eq=False, repr=False, kw_only=True)
class Summary(ClassStatistic, _Summary):
    """Count each class by bins of each column, and add up values: the first table of a paper.

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    columns
        For each column a list of three: its marks (as in `LabelTables`), the feature and the factor
        of its value, and the bins of records that have none. A schema decides them.
    classes, neighbours, unit, schema, noise
        As in `Moments`.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the sums. No number of a class, of a category or of missing values is stated without
    noise. Proof: docs/guarantees/statistics.md.

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

    shorthand = "summary"

    @property
    def _n_groups(self) -> int:
        return self.n_classes


@dataclass(eq=False, repr=False, kw_only=True)
class NumberSummary(NumberStatistic, _Summary):
    """The same for tables whose label is a number: it is summarised as one more column.

    Parameters are those of `Summary` without ``classes``, and:

    label_bound
        Declared bound on the absolute label; labels beyond are clipped to it.

    Notes
    -----
    **Privacy.** As `Summary`.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100, cuts=4)], "days", label_bound=60)
    >>> table = {"age": [15, 35, 65, 85] * 500, "days": [1, 3, 9, 20] * 500}
    >>> cs.NumberSummary(epsilon=1.0, delta=1e-6, schema=schema).fit(table).guarantee_
    Guarantee(epsilon=1, delta=1e-06, per record, replace-one)
    """

    shorthand = "number-summary"

    @classmethod
    def columns_by(cls, schema: Schema) -> list[list[Any]]:
        """Return the columns of a schema, its label the last one."""
        label = float(schema.n_features)
        cuts = np.linspace(-1, 1, BINS + 1)[1:-1].tolist()
        return [*blocks_of(schema), [[[label, cut] for cut in cuts], [label, 1.0], []]]


@dataclass(frozen=True)
class SummaryTable(Ensemble):
    """What all sites' records are like, column by column and class by class.

    ``values`` are the noisy counts and sums and ``variance`` that of the noise in each of them;
    ``size`` is how many records there are, where that is public. As a model it says of every record
    what is most frequent (of numbers, the mean), and looks at none of its columns.
    """

    kind: ClassVar[str] = "summary"

    classes: Array | None
    columns: tuple[Block, ...] = field(repr=False)
    n_features: int
    values: Array = field(repr=False)
    variance: Array = field(repr=False)
    size: float | None
    label_bound: float
    weights: Array
    guarantee: Guarantee | None
    guarantees: tuple[Guarantee | None, ...] = field(repr=False)

    def shown_rows(self) -> Rows:
        """Return how many records there are, up to noise."""
        counts, variance = self.count_records()
        labels = ["all"] if self.classes is None else map(str, self.classes.tolist())
        error = 1.96 * math.sqrt(variance)
        return [
            (f"records: {label}", f"{n:,.0f} ± {error:,.0f}")
            for label, n in zip(labels, counts.tolist(), strict=True)
        ]

    @property
    def n_groups(self) -> int:
        """How many classes there are; one group of all records where the label is a number."""
        return 1 if self.classes is None else len(self.classes)

    def block(self, place: int) -> tuple[Array, Array]:
        """Return the numbers of a column, a row for each class, and the variance of their noise."""
        start = self.n_groups * sum(block.length for block in self.columns[:place])
        part = slice(start, start + self.n_groups * self.columns[place].length)
        shape = (self.n_groups, -1)
        return self.values[part].reshape(shape), self.variance[part].reshape(shape)

    def count_records(self) -> tuple[Array, float]:
        """Return how many records each class has, by all columns, and the noise's variance."""
        counts, precisions = [], []
        for place, block in enumerate(self.columns):
            counts.append(self.block(place)[0][:, : block.n_bins].sum(axis=1))
            precisions.append(1 / block.n_bins)
        found = np.average(counts, axis=0, weights=precisions)
        variance = float(self.variance[0]) / sum(precisions)
        if self.size is not None:
            found = found + (self.size - found.sum()) / self.n_groups
            variance *= 1 - 1 / self.n_groups
        return np.asarray(found), variance

    def to_parts(self, take_apart: TakeApart) -> tuple[Facts, Tensors]:
        """Return the columns, and the counts and sums."""
        facts = {
            "columns": [
                [[list(mark) for mark in block.marks], list(block.value), list(block.absent)]
                for block in self.columns
            ],
            "n_features": self.n_features,
        }
        if self.classes is None:
            facts["label_bound"] = self.label_bound
        size = [] if self.size is None else [self.size]
        tensors = {"values": self.values, "variance": self.variance, "size": np.array(size)}
        return facts, {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}

    @classmethod
    def from_parts(
        cls,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Array],
        guarantee: Guarantee,
        weights: Array,
        rebuild: Rebuild,
    ) -> Self:
        """Return the summary, if its numbers are those of its columns."""
        blocks, classes = read_blocks(facts["columns"]), facts["classes"]
        if blocks is None:
            raise ContributionRejected("columns")
        known = facts["n_features"] + (classes is None)
        groups = 1 if classes is None else len(classes)
        values, variance, size = (tensors[name] for name in ("values", "variance", "size"))
        bound = facts["label_bound"] if classes is None else 1.0
        length = groups * sum(block.length for block in blocks)
        if not (
            len(tensors) == 3
            and values.shape == variance.shape == (length,)
            and bool((variance >= 0).all())
            and size.shape in ((0,), (1,))
            and bool((size >= 1).all())
            and all(feature < known for block in blocks for feature in _features(block))
            and type(bound) is float
            and 0 < bound < math.inf
        ):
            raise ContributionRejected("tensors")
        return cls(
            None if classes is None else np.asarray(classes),
            blocks,
            int(facts["n_features"]),
            values,
            variance,
            float(size[0]) if len(size) else None,
            bound,
            weights,
            guarantee,
            (),
        )

    def predict_proba(self, X: Table) -> Array:
        """Return the classes' shares, for every row the same."""
        counts = np.maximum(self.count_records()[0], 1.0)
        n_rows = check_array(X, accept_sparse="csr", dtype=np.float64).shape[0]
        return np.asarray(np.tile(counts / counts.sum(), (n_rows, 1)))

    def predict(self, X: Table) -> Array:
        """Return the most frequent class, or the mean of the label, for every row the same."""
        if self.classes is not None:
            return np.asarray(self.classes[self.predict_proba(X).argmax(axis=1)])
        n_rows = check_array(X, accept_sparse="csr", dtype=np.float64).shape[0]
        n = max(float(self.count_records()[0][0]), 1.0)
        mean = self.block(len(self.columns) - 1)[0][0, -2] / n
        return np.full(n_rows, float(np.clip(mean, -1, 1)) * self.label_bound)
