"""Score: how well a released model does on the sites' own records, which nobody else may see.

A record adds one count: the bin of its score, and its class. Accuracy, AUC and calibration follow
from the total, with intervals that include the noise. Proofs: docs/guarantees/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from scipy import special, stats
from sklearn.isotonic import isotonic_regression
from sklearn.utils.validation import check_array

from consilience.aggregators.base import Ensemble, Facts, Rebuild, Rows, Table, TakeApart, Tensors
from consilience.aggregators.members import dense
from consilience.errors import ContributionRejected, SchemaMismatch, SettingsError
from consilience.learners.ball import Ball, into_ball
from consilience.learners.base import PrivateLearner
from consilience.learners.erm import Chunks, block_records
from consilience.learners.gradient import COEF_BITS, ROW_BITS, check_steps, whole_rows
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.statistics.base import Adder, Array, ClassStatistic, RowStatistic, Summed
from consilience.statistics.label_tables import COUNT_BITS, Marks, are_marks, columns_of
from consilience.statistics.label_tables import find_bins as find_marks
from consilience.statistics.public_model import check_rows, into_steps, read_rows
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

MODEL = "'model' parameter of Score"
MOST_BINS = 1000


@dataclass(frozen=True)
class Estimate:
    """A number that was estimated from a noisy total, and its standard error, noise included."""

    value: float
    error: float

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the ends of a confidence interval within [0, 1]."""
        reach = float(stats.norm.ppf((1 + level) / 2)) * self.error
        return max(0.0, self.value - reach), min(1.0, self.value + reach)


@dataclass(frozen=True)
class AddScores:
    """Count records by subgroup, by the bins of their scores and by whether the class is theirs."""

    ball: Ball
    model: Array  # in whole steps
    bins: int
    subgroups: tuple[tuple[float, ...], ...] = ()

    def __call__(self, chunks: Chunks) -> Array:
        """Return the sum in whole grains."""
        check_steps(self.model)
        tables, n_groups = len(self.model), len(self.subgroups) + 1
        total = np.zeros(2 * self.bins * tables * n_groups, np.int64)
        scaled = self.model.T * 2.0 ** -(ROW_BITS + COEF_BITS)
        for X, y in chunks:
            length = block_records(X.shape[1])
            for start in range(0, len(y), length):
                part = slice(start, start + length)
                # Exact, so that a record's bin does not depend on the records beside it.
                scores = np.asarray(whole_rows(into_ball(X[part], self.ball)) @ scaled)
                groups = self._find_groups(X[part])
                for k, margin in enumerate(margins(scores).T):
                    own = y[part] if tables == 1 else (y[part] == k).astype(np.int64)
                    cell = (groups * tables + k) * self.bins + find_bins(margin, self.bins)
                    total += np.bincount(2 * cell + own, minlength=len(total))
        return total << COUNT_BITS

    def _find_groups(self, X: Table) -> Array:
        """Return each record's subgroup, the place of the last mark that it reaches."""
        if not self.subgroups:
            return np.zeros(np.shape(X)[0], np.int64)
        return np.asarray(find_marks([self.subgroups], np.asarray(dense(X)))[0])


def margins(scores: Array) -> Array:
    """Return scores as log-odds: of the second class, or of each class against the best other."""
    if scores.shape[1] == 1:
        return scores
    ordered = np.sort(scores, axis=1)
    best, second = ordered[:, -1:], ordered[:, -2:-1]
    return np.asarray(scores - np.where(scores == best, second, best))


def find_bins(scores: Array, bins: int) -> Array:
    """Return the bins of log-odds, which are equally wide on the scale of probabilities."""
    chances = special.expit(scores)
    return np.asarray(np.minimum((chances * bins).astype(np.int64), bins - 1))


def subgroups_of(schema: Schema, column: str) -> list[list[float]]:
    """Return the bins of a schema's column as `Score` takes them in `subgroups`.

    A number without cuts of its own is cut evenly; give it few cuts, for each subgroup has its own
    noise.
    """
    names = [one.name for one in schema.columns]
    if column not in names:
        raise SettingsError(
            f"The schema has no column {column!r}. Nothing was done. Name one of {names}."
        )
    return columns_of(schema)[names.index(column)]


def model_of(ensemble: object) -> list[list[float]]:
    """Return a released linear model as `Score` takes it in `model`."""
    coef = getattr(ensemble, "coef", None)
    if coef is None or getattr(ensemble, "classes", None) is None:
        raise SettingsError(
            f"A {type(ensemble).__name__} is no linear classifier. Nothing was done. Take the "
            "ensemble of a release of Average, PublicBlend or Total."
        )
    rows = np.column_stack([np.atleast_2d(coef), np.atleast_1d(ensemble.intercept)])  # type: ignore[attr-defined]
    return [[float(number) for number in row] for row in rows]


@dataclass(eq=False, repr=False, kw_only=True)
class Score(ClassStatistic, RowStatistic):
    """Count records by a public model's score and by class: how good it is on the sites' own.

    The finished total is the model with its measures (`ScoredModel`).

    Parameters
    ----------
    epsilon, delta
        The budget; delta must be positive. ``epsilon=math.inf`` is exact and promises nothing.
    model
        The model: rows of coefficients and, last, the intercept; one row for two classes, otherwise
        one for each. It must be public, or released before.
    bins
        How many bins of equal width there are on the scale of probabilities; an even number. With
        more than two classes, each class' score is its margin over the best of the others.
    subgroups
        Marks of subgroups that are measured apart, from `subgroups_of`; None for all records
        together.
    data_norm, intercept_scaling, classes, neighbours, unit, schema, noise
        As in `GradientStep`.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the counts. Proof: docs/guarantees/statistics.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> model = [[4.0, 1.0, 0.0, 0.0]]  # coefficients and intercept of a released model
    >>> counted = cs.Score(epsilon=1.0, delta=1e-6, classes=[0, 1], model=model).fit(X, y)
    >>> scored = cs.Total().combine([counted])
    >>> low, high = scored.accuracy.interval()
    >>> 0 <= low <= high <= 1
    True
    """

    makes = "scored"
    grain: ClassVar[float] = 2.0**-COUNT_BITS
    never_opposite: ClassVar[bool] = True
    shorthand = "score"
    first_settings: ClassVar[Mapping[str, Any]] = {"subgroups": None}

    model: Sequence[Sequence[float]]
    bins: int = 20
    subgroups: Marks | None = None

    @property
    def holds(self) -> str:
        """What it counts."""
        return "counts of records by the score that a public model gives them, and by class"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        even = type(self.bins) is int and 2 <= self.bins <= MOST_BINS and self.bins % 2 == 0
        self._require("bins", even, f"an even number from 2 to {MOST_BINS:,}")
        rows = read_rows(self.model, MODEL)
        self._require("model", len(rows) != 2, "one row for two classes, otherwise one for each")
        known = self.subgroups is None or are_marks([self.subgroups])
        known = known and all(feature < rows.shape[1] - 1 for feature, _ in self.subgroups or ())
        self._require("subgroups", known, "None, or what subgroups_of returned for this schema")

    @property
    def _marks(self) -> tuple[tuple[float, ...], ...]:
        return tuple(map(tuple, self.subgroups or ()))

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """How many subgroups, tables, bins and answers there are."""
        return len(self._marks) + 1, len(read_rows(self.model, MODEL)), self.bins, 2

    @property
    def fixed_features(self) -> int:
        """How many columns the model is for."""
        return int(read_rows(self.model, MODEL).shape[1]) - 1

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return math.prod(self._shape)

    def may_finish(
        self, ensemble: Ensemble, other: PrivateLearner[Any, Any], sizes: Sequence[int | None]
    ) -> bool:
        """Tell whether this is the study's own model, with as many counts and as much noise."""
        return (
            isinstance(ensemble, ScoredModel)
            and np.array_equal(ensemble.model, read_rows(self.model, MODEL))
            and self.may_total(ensemble.counts, ensemble.variance, other, sizes)
            and len(ensemble.parts) in (0, len(sizes))
            and all(
                self.may_total(counts, variance, other, [size])
                for (counts, variance), size in zip(ensemble.parts, sizes, strict=False)
            )
        )

    def keep_parts(self, finished: Ensemble, parts: Sequence[Summed]) -> ScoredModel:
        """Return the scored model with each site's own counts, for its score on each site's."""
        assert isinstance(finished, ScoredModel)
        kept = ((part.values.reshape(self._shape), float(part.variance[0])) for part in parts)
        return replace(finished, parts=tuple(kept))

    def weights(self) -> Array:
        """Return 1 for each count."""
        return np.ones(self.length)

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes the counts: one in each table."""
        moved = 2 if neighbours is Neighbours.REPLACE_ONE else 1
        return math.sqrt(moved * self._shape[1])

    def adder(self) -> Adder:
        """Return the function that adds up records."""
        check_rows(self.model, MODEL, self.n_classes, int(self.n_features_in_))
        rows, ball = read_rows(self.model, MODEL), Ball.of(self)
        return AddScores(ball, into_steps(rows, ball), self.bins, self._marks)

    def finish(self, total: Summed, public: Public | None = None) -> ScoredModel:
        """Return the model and its measures; public records are not counted in."""
        return ScoredModel(
            self.classes_,
            read_rows(self.model, MODEL),
            self._marks,
            total.values.reshape(self._shape),
            float(total.variance[0]),
            np.ones(1),
            None,
            (),
        )


@dataclass(frozen=True)
class ScoredModel(Ensemble):
    """A model with what it achieved on the sites' own records.

    ``counts`` are by subgroup, table, bin of the score and whether the class is the record's own;
    ``variance`` is that of the noise in each. There is one table for two classes (the second is
    the record's own or not), otherwise one for each class. Probabilities are recalibrated by the
    counts of all subgroups together. ``parts`` are counts and noise variance of each site by
    itself, where sites add all of the noise; of an opened total nobody knows them.
    """

    kind: ClassVar[str] = "scored"

    classes: Array
    model: Array = field(repr=False)
    subgroups: tuple[tuple[float, ...], ...] = field(repr=False)
    counts: Array = field(repr=False)
    variance: float
    weights: Array
    guarantee: Guarantee | None
    guarantees: tuple[Guarantee | None, ...] = field(repr=False)
    parts: tuple[tuple[Array, float], ...] = field(default=(), repr=False)

    def shown_rows(self) -> Rows:
        """Return how good the model is on the sites' records, with intervals of 95 %."""
        rows = [("accuracy", self.accuracy), ("AUC", self.auc)]
        return [
            (name, "{:.3f} ({:.3f} to {:.3f})".format(found.value, *found.interval()))
            for name, found in rows
        ]

    @property
    def sites(self) -> tuple[ScoredModel, ...]:
        """The same of each site's records alone, where each site's counts are known."""
        return tuple(
            replace(self, counts=counts, variance=variance, parts=())
            for counts, variance in self.parts
        )

    @property
    def groups(self) -> tuple[ScoredModel, ...]:
        """The same of each subgroup's records alone; of none if there are no subgroups."""
        if len(self.counts) == 1:
            return ()
        return tuple(
            replace(self, counts=part[None], subgroups=(), parts=()) for part in self.counts
        )

    @property
    def _tables(self) -> Array:
        """Counts of all subgroups, by table, bin and answer."""
        return np.asarray(self.counts.sum(axis=0))

    @property
    def _noise(self) -> float:
        return self.variance * len(self.counts)

    @property
    def accuracy(self) -> Estimate:
        """The share of records on whose class the model is right."""
        cells = self._tables
        half, right = cells.shape[1] // 2, np.zeros(cells.shape)
        right[:, half:, 1] = 1.0
        counted = np.ones(cells.shape)
        if len(cells) == 1:
            right[:, :half, 0] = 1.0
        else:
            counted[..., 0] = 0.0  # every record is its own class' in one table
        n = max(float((counted * cells).sum()), 1.0)
        value = float((right * cells).sum()) / n
        return self._estimate(cells, value, counted * (right - value) / n)

    @property
    def auc(self) -> Estimate:
        """The share of pairs of both classes that the model puts in order; ties count half.

        Of more than two classes it is the mean of each against the rest.
        """
        found = [self._auc_of(table) for table in self._tables]
        # Those of one model err together: the mean of the errors is the most that it can be.
        value, error = np.mean([[one.value, one.error] for one in found], axis=0)
        return Estimate(float(value), float(error))

    def _auc_of(self, table: Array) -> Estimate:
        negative, positive = table.T
        n, m = max(float(negative.sum()), 1.0), max(float(positive.sum()), 1.0)
        below = np.cumsum(negative) - negative / 2
        above = positive.sum() - np.cumsum(positive) + positive / 2
        value = float(positive @ below) / (n * m)
        # How much one more record of each kind changes it, for the standard error.
        gradient = np.column_stack([(above / m - value) / n, (below / n - value) / m])
        return self._estimate(table, value, gradient)

    def reliability(self, label: object) -> list[tuple[float, Estimate]]:
        """Return for each bin its probability of a class, and the share that had this class."""
        place = self.classes.tolist().index(label)
        table = self._tables[0 if len(self._tables) == 1 else place]
        if len(self._tables) == 1 and place == 0:
            table = table[::-1, ::-1]
        rows = []
        for k, (others, own) in enumerate(table.tolist()):
            n = max(others + own, 1.0)
            gradient = np.array([-own / n, others / n]) / n
            share = self._estimate(table[k], own / n, gradient)
            rows.append(((k + 0.5) / len(table), share))
        return rows

    def _estimate(self, counts: Array, value: float, gradient: Array) -> Estimate:
        spread = np.square(gradient) * (self._noise + np.maximum(counts, 0.0))
        return Estimate(min(max(value, 0.0), 1.0), math.sqrt(float(spread.sum())))

    @property
    def calibrated(self) -> Array:
        """The probability in each bin, which rises from bin to bin; a row for each table.

        For two classes it is that of the second.
        """
        found = []
        for table in self._tables:
            bins = len(table)
            middle = (np.arange(bins) + 0.5) / bins
            # A bin's own share counts as far as its records outweigh the noise in their number.
            n = np.maximum(table.sum(axis=1), 0.0)
            share = np.clip(table[:, 1] / np.maximum(n, 1.0), 0.0, 1.0)
            precision = np.square(n) / (n + 2 * self._noise + 1.0)
            trust = precision / (precision + 1)
            mixed = trust * share + (1 - trust) * middle
            found.append(isotonic_regression(mixed, sample_weight=precision + 1e-3))
        return np.asarray(found)

    def to_parts(self, take_apart: TakeApart) -> tuple[Facts, Tensors]:
        """Return the model and the counts."""
        tensors = {
            "model": np.asarray(self.model, np.float64),
            "counts": np.asarray(self.counts, np.float64),
            "variance": np.array([self.variance]),
        }
        if self.parts:
            tensors["parts"] = np.stack([counts.ravel() for counts, _ in self.parts])
            tensors["part_variances"] = np.array([variance for _, variance in self.parts])
        facts: Facts = {"n_features": self.model.shape[1] - 1}
        if self.subgroups:
            facts["subgroups"] = [list(mark) for mark in self.subgroups]
        return facts, tensors

    @classmethod
    def from_parts(
        cls,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Array],
        guarantee: Guarantee,
        weights: Array,
        rebuild: Rebuild,
    ) -> Self:
        """Return the scored model, if its parts have the shapes of one."""
        model, counts, variance = (tensors[name] for name in ("model", "counts", "variance"))
        labels, marks = np.asarray(facts["classes"]), facts.get("subgroups", [])
        if marks and not are_marks([marks]):
            raise ContributionRejected("subgroups")
        tables = 1 if len(labels) == 2 else len(labels)
        if counts.ndim == 2:  # as of the first releases, which had one table
            counts = counts[None, None]
        parts = tensors.get("parts", np.zeros((0, counts.size)))
        variances = tensors.get("part_variances", np.zeros(0))
        if not (
            len(tensors) == 3 + 2 * ("parts" in tensors)
            and parts.shape == (len(variances), counts.size)
            and len(variances) in (0, len(weights))
            and variances.ndim == 1
            and (variances >= 0).all()
            and len(labels) >= 2
            and model.shape == (tables, facts["n_features"] + 1)
            and counts.ndim == 4
            and counts.shape[:2] == (len(marks) + 1, tables)
            and counts.shape[3] == 2
            and 2 <= counts.shape[2] <= MOST_BINS
            and counts.shape[2] % 2 == 0
            and variance.shape == (1,)
            and float(variance[0]) >= 0
        ):
            raise ContributionRejected("tensors")
        return cls(
            labels,
            model,
            tuple(map(tuple, marks)),
            counts,
            float(variance[0]),
            weights,
            guarantee,
            (),
            tuple(zip(parts.reshape(-1, *counts.shape), variances.tolist(), strict=True)),
        )

    def _scores(self, X: Table) -> Array:
        rows = check_array(X, accept_sparse="csr", dtype=np.float64)
        if rows.shape[1] != self.model.shape[1] - 1:
            raise SchemaMismatch(
                f"The model was made for {self.model.shape[1] - 1} features and was given "
                f"{rows.shape[1]}. Nothing was predicted. Encode the table with the study's schema."
            )
        return np.asarray(rows @ self.model[:, :-1].T + self.model[:, -1])

    def decision_function(self, X: Table) -> Array:
        """Return the model's log-odds of the second class, or a score for each class."""
        scores = self._scores(X)
        return scores.ravel() if len(self.model) == 1 else scores

    def predict_proba(self, X: Table) -> Array:
        """Return recalibrated probabilities."""
        found = margins(self._scores(X)).T
        bins = self.counts.shape[2]
        rows = zip(self.calibrated, found, strict=True)
        chances = np.column_stack([known[find_bins(margin, bins)] for known, margin in rows])
        if len(self.model) == 1:
            return np.column_stack([1 - chances, chances])
        chances = np.maximum(chances, 1e-6)
        return np.asarray(chances / chances.sum(axis=1, keepdims=True))

    def predict(self, X: Table) -> Array:
        """Return the class that the model itself names for each row."""
        scores = self._scores(X)
        if len(self.model) == 1:
            return np.asarray(self.classes[(scores[:, 0] >= 0).astype(int)])
        return np.asarray(self.classes[scores.argmax(axis=1)])
