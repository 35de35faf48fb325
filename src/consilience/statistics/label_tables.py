"""LabelTables: how often each class goes with each bin of each column, added up over sites.

From these counts follows an additive model with one shape for each column, which people can read.
Proofs: docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from scipy import special
from sklearn.utils.validation import check_array

from consilience.aggregators.base import Ensemble, Facts, Rebuild, Rows, Table, TakeApart, Tensors
from consilience.aggregators.members import dense
from consilience.errors import ContributionRejected, SchemaMismatch, SettingsError
from consilience.learners.erm import Chunks
from consilience.learners.trees.bins import Bins
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.statistics.base import Adder, Array, ClassStatistic, Summed, add_public
from consilience.statistics.spread import (
    UNEVEN,
    likeliest_spread,
    minimize_in_steps,
    shrink_means,
)
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

COUNT_BITS = 20  # a count is so many bits of grains, so that narrow noise is drawn exactly too
BINS = 8  # of a number without cuts of its own
MOST_BINS = 4096
BLOCK = 4096  # records at a time
# Columns repeat each other, so that their evidence adds up to too much: how much of it counts where
# no public records tell.
REPEATED = 0.1
LEAST_RATIO = 0.05  # of a class' share in a bin to its share in all

Marks = Sequence[Sequence[float]]  # features and the numbers that they must reach


def columns_of(schema: Schema, n_bins: int = BINS) -> list[list[list[float]]]:
    """Return the columns of a schema, each as marks of its encoded features.

    A number without cuts of its own is cut evenly.
    """
    cuts, columns, feature = Bins.of(schema, n_bins=n_bins).cuts, [], 0
    for column in schema.columns:
        features = range(feature, feature + len(column.feature_names))
        columns.append([[float(f), float(cut)] for f in features for cut in cuts[f]])
        feature = features.stop
    return columns


def find_bins(columns: Sequence[Marks], X: Array) -> Array:
    """Return each record's bin in each column: the place of the last mark that it reaches."""
    bins = np.zeros((len(columns), len(X)), np.int64)
    for found, marks in zip(bins, columns, strict=True):
        for place, (feature, cut) in enumerate(marks, start=1):
            found[X[:, int(feature)] >= cut] = place
    return bins


@dataclass(frozen=True)
class AddTables:
    """Count records by bin and class, column after column."""

    columns: tuple[tuple[tuple[float, ...], ...], ...]
    n_classes: int

    def __call__(self, chunks: Chunks) -> Array:
        """Return the sum in whole grains."""
        sizes = [len(marks) + 1 for marks in self.columns]
        begins = np.cumsum([0, *sizes[:-1]])
        total = np.zeros(sum(sizes) * self.n_classes, np.int64)
        for X, y in chunks:
            for start in range(0, len(y), BLOCK):
                rows = np.asarray(dense(X[start : start + BLOCK]))
                cells = find_bins(self.columns, rows) + begins[:, None]
                places = cells * self.n_classes + y[start : start + BLOCK]
                total += np.bincount(places.ravel(), minlength=len(total))
        return total << COUNT_BITS


@dataclass(eq=False, repr=False, kw_only=True)
class LabelTables(ClassStatistic):
    """Count classes by bins of columns: an additive model whose shapes people can read.

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    columns
        For each column its marks, in order: pairs of an encoded feature and the number from which
        on it reaches the mark. A record's bin is the last mark that it reaches, so that ascending
        cuts of one feature are bins and indicators are categories. A schema decides them.
    classes, neighbours, unit, schema, noise
        As in `Moments`.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the counts. Proof: docs/guarantees/statistics.md.

    Examples
    --------
    >>> import consilience as cs
    >>> age = cs.Numeric("age", 0, 100, cuts=4)
    >>> schema = cs.Schema([age], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> counted = cs.LabelTables(epsilon=1.0, delta=1e-6, schema=schema).fit(table)
    >>> model = cs.Total().combine([counted])
    >>> model.predict(schema.transformer().transform({"age": [10, 90]})).tolist()
    ['no', 'yes']
    """

    makes = "additive"
    grain: ClassVar[float] = 2.0**-COUNT_BITS
    never_opposite: ClassVar[bool] = True
    makes_linear: ClassVar[bool] = True
    study_decides: ClassVar[frozenset[str]] = frozenset(("columns",))
    shorthand = "label-tables"

    columns: Sequence[Marks] | None = None

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides, the bins among them."""
        return {**super().declared_by(schema), "columns": columns_of(schema)}

    @property
    def holds(self) -> str:
        """What it counts."""
        return "counts of classes by bins of columns"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        if not are_marks(self.columns):
            raise SettingsError(
                "The 'columns' parameter of LabelTables must list for each column its marks, pairs "
                "of a feature's number and a finite cut. Nothing was trained. Pass schema=..., "
                "which decides them."
            )
        known = getattr(self, "n_features_in_", math.inf)
        if self._columns and max(f for marks in self._columns for f, _ in marks) >= known:
            raise SettingsError(
                "The 'columns' of LabelTables name a feature that the table does not have. Nothing "
                "was trained. Use the schema that encoded it."
            )

    @property
    def _columns(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return tuple(tuple(map(tuple, marks)) for marks in self.columns or ())

    @property
    def _sizes(self) -> list[int]:
        return [len(marks) + 1 for marks in self._columns]

    @property
    def fixed_features(self) -> int | None:
        """How many features the columns name."""
        return 1 + int(max(f for marks in self._columns for f, _ in marks))

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return sum(self._sizes) * self.n_classes

    def weights(self) -> Array:
        """Return 1 for each count."""
        return np.ones(self.length)

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes the counts: one in each column."""
        moved = 2 if neighbours is Neighbours.REPLACE_ONE else 1
        return math.sqrt(moved * len(self._columns))

    def adder(self) -> Adder:
        """Return the function that adds up records."""
        self.check_settings()  # now that the number of features is known
        return AddTables(self._columns, self.n_classes)

    def finish(self, total: Summed, public: Public | None = None) -> AdditiveEnsemble:
        """Return the additive model: how much more often a class is in a bin than in all.

        Each ratio is shrunk to 1 as far as noise and chance explain it. Evidence of columns is
        added up, and the sum is scaled down: by the public records if there are any, otherwise by
        the number of columns.
        """
        K, variance = self.n_classes, float(total.variance[0])
        values = total.values if public is None else total.values + add_public(self, public)
        counts = values.reshape(-1, K)
        sizes = self._sizes
        n, chances = self._count_classes(counts, variance, total.size, public)
        expected = np.clip(counts.sum(axis=1), min(math.sqrt(K * variance) + 1.0, n), n)
        expected = expected[:, None] * chances
        ratios = counts / expected - 1
        scatter = variance / np.square(expected) + 1 / expected
        ones = np.ones(ratios.size)
        spread = likeliest_spread(ratios.ravel(), ones, scatter.ravel(), 1.0)
        shrunk = ratios * spread / (spread + scatter)
        evidence = np.log(np.maximum(1 + shrunk, LEAST_RATIO))
        made = AdditiveEnsemble(
            self.classes_, self._columns, np.log(chances), evidence, np.ones(1), None, ()
        )
        scale = 1 / (1 + REPEATED * (len(sizes) - 1))
        if public is not None:
            scale = _best_scale(made, public, self.encode_labels(np.asarray(public.y)))
        return made.scaled(scale)

    def _count_classes(
        self, counts: Array, variance: float, size: float | None, public: Public | None
    ) -> tuple[float, Array]:
        """Return the number of records and each class' share, as far as noise lets it differ."""
        K, c = self.n_classes, len(self._sizes)
        totals = counts.sum(axis=0) / c  # every column counts all records
        n = max(float(totals.sum()), 1.0)
        if size is not None and self.unit == "record":
            n = size + (0 if public is None else len(np.asarray(public.y)))
        noise = variance * len(counts) / (c * n) ** 2
        apart = shrink_means(totals / n - 1 / K, noise, UNEVEN / K)
        chances = np.maximum(1 / K + apart, 0.05 / K)
        return n, chances / chances.sum()


def are_marks(columns: object) -> bool:
    """Tell whether these are the marks of columns."""
    try:
        listed = [np.asarray(marks, dtype=np.float64) for marks in columns]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return 0 < len(listed) and all(
        marks.ndim == 2
        and marks.shape[1] == 2
        and 0 < len(marks) <= MOST_BINS
        and np.isfinite(marks).all()
        and bool((marks[:, 0] >= 0).all() and (marks[:, 0] == np.rint(marks[:, 0])).all())
        for marks in listed
    )


def _best_scale(model: AdditiveEnsemble, public: Public, codes: Array) -> float:
    """Return the scale of the evidence at which public labels are most likely."""
    evidence = model.decision_function(public.X) - model.prior

    def unlikely(log_scale: float) -> float:
        scores = model.prior + math.exp(log_scale) * evidence
        own = scores[np.arange(len(codes)), codes]
        return float((special.logsumexp(scores, axis=1) - own).sum())

    return math.exp(minimize_in_steps(unlikely, -5.0, 0.5))


@dataclass(frozen=True)
class AdditiveEnsemble(Ensemble):
    """A sum of one shape for each column; predicts like a fitted scikit-learn estimator.

    ``values`` has a row for each bin, column after column, and a number for each class: what the
    bin adds to the class' score.
    """

    kind: ClassVar[str] = "additive"

    classes: Array
    columns: tuple[tuple[tuple[float, ...], ...], ...] = field(repr=False)
    prior: Array
    values: Array = field(repr=False)
    weights: Array
    guarantee: Guarantee | None
    guarantees: tuple[Guarantee | None, ...] = field(repr=False)

    def shown_rows(self) -> Rows:
        """Return how many columns and bins there are."""
        return [("sum of shapes", f"{len(self.columns):,} columns, {len(self.values):,} bins")]

    def scaled(self, scale: float) -> AdditiveEnsemble:
        """Return the same with all shapes multiplied."""
        shapes = self.values * scale
        return AdditiveEnsemble(
            self.classes, self.columns, self.prior, shapes, self.weights, None, ()
        )

    def to_parts(self, take_apart: TakeApart) -> tuple[Facts, Tensors]:
        """Return the marks of the columns and what each bin adds."""
        columns = [[list(mark) for mark in marks] for marks in self.columns]
        features = 1 + int(max(f for marks in self.columns for f, _ in marks))
        tensors = {"prior": np.asarray(self.prior), "values": np.asarray(self.values)}
        return {"columns": columns, "n_features": features}, tensors

    @classmethod
    def from_parts(
        cls,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Array],
        guarantee: Guarantee,
        weights: Array,
        rebuild: Rebuild,
    ) -> Self:
        """Return the ensemble, if its bins are those of its columns."""
        columns, classes = facts["columns"], np.asarray(facts["classes"])
        if not are_marks(columns):
            raise ContributionRejected("columns")
        read = tuple(tuple(map(tuple, marks)) for marks in columns)
        prior, values = tensors["prior"], tensors["values"]
        n_bins = sum(len(marks) + 1 for marks in read)
        if (
            tensors.keys() != {"prior", "values"}
            or values.shape != (n_bins, len(classes))
            or prior.shape != (len(classes),)
            or max(f for marks in read for f, _ in marks) >= facts["n_features"]
        ):
            raise ContributionRejected("tensors")
        return cls(classes, read, prior, values, weights, guarantee, ())

    def decision_function(self, X: Table) -> Array:
        """Return one score for each class."""
        rows = np.asarray(dense(check_array(X, accept_sparse="csr", dtype=np.float64)))
        needed = 1 + int(max(f for marks in self.columns for f, _ in marks))
        if rows.shape[1] < needed:
            raise SchemaMismatch(
                f"The ensemble was made for {needed} features and was given {rows.shape[1]}. "
                "Nothing was predicted. Encode the table with the study's schema."
            )
        begins = np.cumsum([0, *(len(marks) + 1 for marks in self.columns[:-1])])
        bins = find_bins(self.columns, rows) + begins[:, None]
        return np.asarray(self.prior + self.values[bins].sum(axis=0))

    def predict_proba(self, X: Table) -> Array:
        """Return class probabilities: the softmax of the scores."""
        return np.asarray(special.softmax(self.decision_function(X), axis=1))

    def predict(self, X: Table) -> Array:
        """Return the most probable class for each row."""
        return np.asarray(self.classes[self.decision_function(X).argmax(axis=1)])
