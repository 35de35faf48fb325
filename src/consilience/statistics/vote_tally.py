"""VoteTally: what each site's exact model says of public records, added up over sites.

Distillation at a trusted hub, without the trust: votes enter the loss of the distilled model only
through a small vector, which is a sum over sites. A site trains an exact model that never leaves,
and hands over its part of that vector with noise that hides the whole site. Proofs:
docs/guarantees/statistics.md and docs/guarantees/distillation.md.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from scipy.linalg import helmert

from consilience.aggregators.distillation.noise import (
    Labelled,
    bound_mean,
    learn,
    shares_moved,
    statistic,
    statistic_error,
)
from consilience.aggregators.distillation.noise import Rows as DistilledRows
from consilience.aggregators.distillation.tally import count_votes
from consilience.aggregators.members import LinearEnsemble, dense
from consilience.errors import SettingsError
from consilience.learners.ball import Ball, into_ball, out_of_ball
from consilience.learners.base import is_positive
from consilience.learners.erm import ChunkedRecords, Chunks
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.statistics.base import Array, ClassStatistic, RowStatistic, Summed, SumTask
from consilience.statistics.model_sum import (
    LEAST_RIDGE,
    MOST_RIDGE,
    code_labels,
    read_site,
    train_model,
)
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

ROW_BITS = 15  # of a public record's coordinates, so that they fit 16 bits
GRAIN_BITS = 30
MOST_COLUMNS = 1 << 14
MOST_NUMBERS = 1 << 24  # of all public records
MOST_STEPS = 1 << 31  # of whitening them: some seconds
# Of the largest residual: flatter directions say nothing, and only cost noise.
LEAST_RESIDUAL = 1e-9


@dataclass(frozen=True)
class AddVotes:
    """Train on a site's records, and return what the model says of public records."""

    ball: Ball
    n_classes: int
    ridge: float
    soft: str
    records: str

    def __call__(self, chunks: Chunks) -> Array:
        """Return the part of a site with a few records, in whole grains."""
        parts = [(into_ball(X, self.ball), y) for X, y in chunks]
        rows = np.concatenate([np.asarray(X) for X, _ in parts])
        labels = code_labels(self.n_classes, np.concatenate([y for _, y in parts]))
        return self.train(rows, labels, len(rows))

    def train(self, records: Array | ChunkedRecords, labels: Array | None, n_records: int) -> Array:
        """Return a site's part, each number truncated towards zero."""
        asked = whiten(self.records, self.ball.intercept_scaling)
        if not n_records:  # undecided everywhere
            return np.zeros((self.n_classes - 1) * asked.Y.shape[1], np.int64)
        coef = train_model(records, labels, self.n_classes, self.ridge * n_records)
        return self.count(np.asarray(coef, dtype=np.float64))

    def count(self, coef: Array) -> Array:
        """Return the part of a site with this model, in coordinates of the ball.

        What a model says becomes shares that are whole and add up to one vote, whatever it is.
        """
        asked = whiten(self.records, self.ball.intercept_scaling)
        classes, own = np.arange(self.n_classes), out_of_ball(coef, self.ball)
        model = LinearEnsemble(classes, *own, np.ones(1), None, ())
        X = unpack_rows(self.records) * (self.ball.data_norm * 2.0**-ROW_BITS)
        tally = count_votes([model], Public(X), classes=classes.tolist(), soft=self.soft)
        part = helmert(self.n_classes) @ statistic(tally.counts, tally.unit, asked.Y)
        return np.asarray(np.trunc(part.ravel() * 2.0**GRAIN_BITS).astype(np.int64))


class Asked(NamedTuple):
    """Public records in directions of equal size, and a bound on the mean of signed rows.

    ``reach`` is that of (1/n)·‖Σ tᵢ yᵢᵀ‖ over all tᵢ of length <= 1.
    """

    Y: Array
    reach: float


@dataclass(eq=False, repr=False, kw_only=True)
class VoteTally(ClassStatistic, RowStatistic):
    """Add up what sites' models say of public records: distillation that hides whole sites.

    Parameters
    ----------
    epsilon, delta
        The budget of a whole site; delta must be positive. ``epsilon=math.inf`` is exact and
        promises nothing.
    records
        The public records that are asked about, as `pack_rows` writes them. They need no labels.
        `consilience study new` and simulations write those of their public table.
    regularization
        Λ of ``mean(loss) + Λ/2 ‖w‖²`` of each site's own model, in coordinates where rows have norm
        <= 1.
    soft
        ``"votes"``: a model names one class of each record. ``"probabilities"``: it divides its
        vote.
    strength
        λ of the model that is learned from the votes, or ``"auto"``: chosen by labelled public
        records if the study has some, and otherwise by the noise, which is known.
    data_norm, intercept_scaling, classes, schema, noise
        As in `Moments`.
    unit, neighbours
        ``"site"`` and ``"replace-one"``: sites take part by name.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per site, replace-one, against everyone who sees
    the sum: all that a site has may be replaced by anything else. Not hidden: that the site takes
    part. Proof: docs/guarantees/statistics.md.
    """

    makes = LinearEnsemble.kind
    grain: ClassVar[float] = 2.0**-GRAIN_BITS
    adds_records: ClassVar[bool] = False
    units: ClassVar[tuple[str, ...]] = ("site",)
    from_public = ("records", "the public records to ask about, packed by pack_rows")
    shorthand = "vote-tally"

    unit: str = "site"
    records: str | None = None
    regularization: float = 1e-3
    soft: str = "votes"
    strength: float | str = "auto"

    @classmethod
    def hidden_by(cls, schema: Schema, settings: Mapping[str, Any]) -> Unit:
        """Return the unit, which is a whole site."""
        return Unit.SITE

    @property
    def holds(self) -> str:
        """What it adds up."""
        return "sums of what this site's exact model, which stays here, says of public records"

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        self._require("soft", self.soft in ("votes", "probabilities"), "'votes' or 'probabilities'")
        fits = is_positive(self.regularization) and (
            LEAST_RIDGE <= self.regularization <= MOST_RIDGE
        )
        self._require("regularization", fits, f"a number from {LEAST_RIDGE:g} to {MOST_RIDGE:g}")
        fits = self.strength == "auto" or is_positive(self.strength)
        self._require("strength", fits, "a number > 0, or 'auto'")
        must = "public records, as pack_rows writes them"
        self._require("records", isinstance(self.records, str), must)
        whiten(str(self.records), float(self.intercept_scaling))

    def public_settings(self, public: Public) -> dict[str, Any]:
        """Return the public records to ask about, unless there are some."""
        return {} if self.records is not None else {"records": pack_rows(public, self.data_norm)}

    @property
    def fixed_features(self) -> int:
        """How many columns the public records have."""
        return int(unpack_rows(str(self.records)).shape[1])

    @property
    def _asked(self) -> Asked:
        return whiten(str(self.records), float(self.intercept_scaling))

    @property
    def length(self) -> int:
        """How many numbers there are: one for each contrast of classes and each direction."""
        return (self.n_classes - 1) * int(self._asked.Y.shape[1])

    def weights(self) -> Array:
        """Return 1 for each number."""
        return np.ones(self.length)

    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one site changes the sum, or of its own part.

        Beside what its votes move: both parts are rounded as doubles, and truncated.
        """
        asked, K = self._asked, self.n_classes
        replaced = neighbours is Neighbours.REPLACE_ONE
        moved = shares_moved(K, "replace-one" if replaced else "null-one") * asked.reach
        rounded = (2 if replaced else 1) * statistic_error(asked.Y, K)
        return (moved + rounded) * (1 + 2.0**-40) + math.sqrt(self.length) * self.grain

    def adder(self) -> AddVotes:
        """Return the function that trains on a site's records."""
        if self.fixed_features != int(self.n_features_in_):
            raise SettingsError(
                f"The public records of a VoteTally have {self.fixed_features:,} columns, and the "
                f"table has {int(self.n_features_in_):,} encoded ones. Nothing was trained or "
                "charged. Make 'records' of public records that are encoded as the table is."
            )
        ridge = float(self.regularization)
        return AddVotes(Ball.of(self), self.n_classes, ridge, self.soft, str(self.records))

    def exact_total(self, task: SumTask) -> Array:
        """Return the site's part, in whole grains."""
        add = self.adder()
        records = read_site(task, add.ball, self.n_classes, int(self.n_features_in_) + 1)
        return add.train(records, None, task.n_records)

    def finish(self, total: Summed, public: Public | None = None) -> LinearEnsemble:
        """Return the model that agrees best with the sites' noisy votes on the public records."""
        size = max(total.size or 0.0, 1e-300)
        ball, integers = Ball.of(self), unpack_rows(str(self.records))
        X = _with_constant(integers, ball.intercept_scaling) * (2.0**-ROW_BITS * ball.row_factor)
        rows = DistilledRows(X, self.n_classes, 1)
        # From axes that every machine agrees on to those that are best to learn in: a rotation.
        turned = self._asked.Y.T @ rows.whitened.Y / len(X)
        noisy = (total.values / size).reshape(self.n_classes - 1, -1) @ turned
        variance = float(total.variance[0]) / size**2
        made = learn(rows, noisy, variance, self.strength, self._labelled(public))
        coef, intercept = out_of_ball(made["coef"], self)
        return LinearEnsemble(self.classes_, coef, intercept, np.ones(1), None, ())

    def _labelled(self, public: Public | None) -> Labelled | None:
        if public is None or public.y is None or not len(np.asarray(public.y)):
            return None
        rows = np.asarray(dense(into_ball(public.X, self)), dtype=np.float64)
        return rows, public.y, np.asarray(self.classes_)


# ------------------------------------------------------------------ public records as a setting


def pack_rows(public: Public | tuple[Any, Any], data_norm: float = 1.0) -> str:
    """Return public records as the `records` of a `VoteTally`: a text that every file can state.

    Rows are divided by the declared bound on their norm, cut to length 1 and rounded towards 0 to
    multiples of 2⁻¹⁵. Whoever reads the text has the same numbers, bit for bit.

    Privacy
    -------
    None for the public records.
    """
    bounds = Ball(float(data_norm), fit_intercept=False)
    rows = np.asarray(dense(into_ball(Public.of(public).X, bounds)), dtype=np.float64)
    steps = np.trunc(rows * 2.0**ROW_BITS).clip(1 - 2**ROW_BITS, 2**ROW_BITS - 1)
    head = np.array(steps.shape, "<u4").tobytes()
    packed = zlib.compress(head + steps.astype("<i2").tobytes(), 9)
    return base64.b64encode(packed).decode()


@lru_cache(maxsize=8)
def unpack_rows(records: str) -> Array:
    """Return what `pack_rows` packed, in whole steps: a view that nobody may write to."""
    try:
        packed = base64.b64decode(records, validate=True)
        opened = zlib.decompressobj()
        plain = opened.decompress(packed, 2 * MOST_NUMBERS + 8)
        n, d = (int(number) for number in np.frombuffer(plain[:8], "<u4"))
        fits = opened.eof and len(plain) == 8 + 2 * n * d and n > 0 and 0 < d <= MOST_COLUMNS
        steps = np.frombuffer(plain, "<i2", offset=8).reshape(n, d).astype(np.float64)
    except (ValueError, binascii.Error, zlib.error):
        fits = False
    if not fits or np.square(steps).sum(axis=1).max() > 4.0**ROW_BITS:
        raise SettingsError(
            "The 'records' parameter of VoteTally must be public records, as pack_rows writes "
            f"them, at most {MOST_NUMBERS:,} numbers. The text that was given is something else. "
            "Nothing was computed."
        )
    if n * (d + 1) * min(n, d + 1) > MOST_STEPS:
        raise SettingsError(
            f"The 'records' parameter of VoteTally has {n:,} records of {d:,} columns, too many to "
            "be whitened in reasonable time. Nothing was computed. Ask about fewer records, or "
            "project them to fewer columns."
        )
    steps.setflags(write=False)
    return steps


def _with_constant(steps: Array, intercept_scaling: float) -> Array:
    constant = float(round(intercept_scaling * 2**ROW_BITS))
    return np.hstack([steps, np.full((len(steps), 1), constant)])


@lru_cache(maxsize=8)
def whiten(records: str, intercept_scaling: float) -> Asked:
    """Return packed records in coordinates in which their second moment is the identity.

    Sites add up numbers along these axes, so that all machines must have the same ones, bit for
    bit: eigenvectors differ by sign and rounding from one library to another. Here a Cholesky
    factorisation with pivots begins with a sum that is exact, and each step after it multiplies,
    subtracts, divides or takes a root, which all machines round alike.
    """
    X = _with_constant(unpack_rows(records), intercept_scaling)
    n, d = X.shape
    if float(np.square(X).sum()) >= 2.0**53:
        raise SettingsError(
            "The public records of a VoteTally are too many, or its intercept_scaling is too "
            "large, for an exact sum of their squares. Nothing was computed. Ask about fewer."
        )
    moment = X.T @ X  # exact in any order: whole numbers below 2^53
    least, found = LEAST_RESIDUAL * float(moment.diagonal().max()), list[Array]()
    for _ in range(d):
        left = moment.diagonal()
        pivot = int(left.argmax())
        if left[pivot] <= least:
            break
        root = np.sqrt(left[pivot])
        axis, column = X[:, pivot] / root, moment[:, pivot] / root
        X = X - np.multiply.outer(axis, column)
        moment = moment - np.multiply.outer(column, column)
        moment[pivot] = moment[:, pivot] = 0.0  # but for rounding
        found.append(axis)
    if not found:
        raise SettingsError(
            "The public records of a VoteTally are all zero. Nothing was computed. Check their "
            "encoding."
        )
    Y = np.stack(found, axis=1) * np.sqrt(float(n))
    Y.setflags(write=False)
    return Asked(Y, bound_mean(Y))
