"""Fewer columns before learning: principal axes of public, private or several sites' records.

All three take the second moment Σxxᵀ of rows in the unit ball and keep its leading eigenvectors. It
is not centred: an orthonormal projection never lengthens a row, so what a learner assumes of its
rows still holds behind it, whereas subtracting a mean would need a mean, which has to be public or
charged for. `PublicPCA` is free, `PrivatePCA` adds noise to the moment, `combine_moments` adds up
what sites released and never sees a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from consilience.errors import SchemaMismatch, SettingsError, shield
from consilience.learners.base import PrivateLearner, Rows, Settings, is_count
from consilience.learners.inputs import (
    check_persons,
    check_record_unit,
    count_records,
    read_chunks,
    validate_table,
)
from consilience.privacy.accounting import Closing, Event, Gaussian, L2Laplace
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit, compose_disjoint
from consilience.privacy.mechanisms import (
    Noise,
    Source,
    clip_rows,
    draw_error,
)
from consilience.privacy.vector_noise import (
    calibrate_vector,
    close_vector,
    closing_event,
    draw_vector,
    public_radius,
)
from consilience.tables.groups import cap_records
from consilience.tables.values import as_doubles

Array = NDArray[Any]

# Coordinates on a grid of 2⁻²¹ have products on one of 2⁻⁴², and 2¹¹ of those, each at most 1, add
# up to at most 2⁵³ steps: whatever order BLAS adds a block's products in, no sum is ever rounded.
GRID_BITS = 21
BLOCK_RECORDS = 2**11
_AT_ONCE = 1 << 15  # coordinates, so that they stay in the processor's cache
MOST_RECORDS = 2**31  # at one site; the one public bound that the closing distance needs


# ------------------------------------------------------------------------------------------- moment


def _blocks(X: Any) -> Iterator[Array]:
    tables: Iterable[Any] = (as_doubles(X),)
    if hasattr(X, "chunks"):
        tables = (rows for rows, _ in read_chunks("PrivatePCA", X.n_features, X.chunks()))
    for table in tables:
        for start in range(0, table.shape[0], BLOCK_RECORDS):
            block = table[start : start + BLOCK_RECORDS]
            yield block.toarray() if sparse.issparse(block) else block


def _into_ball(rows: Array, data_norm: float) -> Array:
    if data_norm != 1.0:  # clipped before the division too, which then cannot overflow
        rows = clip_rows(rows, data_norm) / data_norm
    return cast(Array, clip_rows(rows, 1.0))


def _second_moment(X: Any, n_features: int, data_norm: float, *, on_grid: bool) -> Array:
    """Return Σxxᵀ of rows in the unit ball; on the grid each entry is rounded once."""
    plain = np.zeros((n_features, n_features))
    high, low = np.zeros((2, n_features, n_features), dtype=np.int64)
    for rows in _blocks(X):
        rows = _into_ball(rows, data_norm)
        if not on_grid:
            plain += rows.T @ rows
            continue
        steps = np.trunc(rows * 2.0**GRID_BITS)  # towards 0: a row never gets longer
        block = (steps.T @ steps).astype(np.int64)
        high += block >> 32
        low += block & 0xFFFFFFFF
    high += low >> 32
    low &= 0xFFFFFFFF
    return np.asarray(plain + (high * 2.0 ** (32 - 2 * GRID_BITS) + low * 2.0 ** (-2 * GRID_BITS)))


def coordinates(X: Rows, axes: Array) -> Array:
    """Return each row's products with the axes, added up in the order of the columns.

    A product of whole dense matrices chooses its order by the number of rows and their layout, and
    so lets a row's last bit depend on other rows.
    """
    if sparse.issparse(X):
        return np.asarray(X @ axes.T)  # SciPy adds up row by row, in the order of what is stored
    found = np.zeros((len(X), len(axes)))
    together = max(1, _AT_ONCE // len(axes))
    for start in range(0, len(X), together):
        part = slice(start, start + together)
        for column, factors in zip(X[part].T, axes.T, strict=True):
            found[part] += np.multiply.outer(column, factors)
    return found


def as_vector(moment: Array) -> Array:
    """Return the upper triangle, off-diagonals times √2: its length is the Frobenius norm."""
    rows, columns = np.triu_indices(len(moment))
    return np.where(rows == columns, 1.0, math.sqrt(2)) * moment[rows, columns]


def as_matrix(vector: Array) -> Array:
    """Return the symmetric matrix that `as_vector` made a vector of."""
    size = (math.isqrt(8 * len(vector) + 1) - 1) // 2
    rows, columns = np.triu_indices(size)
    matrix = np.empty((size, size))
    matrix[rows, columns] = vector / np.where(rows == columns, 1.0, math.sqrt(2))
    matrix[columns, rows] = matrix[rows, columns]
    return matrix


@dataclass(frozen=True, eq=False)
class SecondMoment:
    """What a site releases for a joint projection: its noisy Σxxᵀ and its guarantee.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.linspace(-0.5, 0.5, 4000)[:, None] * np.array([[1.0, 1.0, 0.0]])
    >>> moment = cs.PrivatePCA(epsilon=1.0, delta=1e-6, n_components=2).fit(X).second_moment_
    >>> moment.moment.shape
    (3, 3)
    """

    moment: Array
    guarantee: Guarantee

    def __post_init__(self) -> None:
        moment = np.asarray(self.moment, dtype=np.float64)
        if (
            moment.ndim != 2
            or not moment.size
            or not np.isfinite(moment).all()
            or not np.array_equal(moment, moment.T)
        ):
            raise SchemaMismatch(
                "A second moment must be a square, symmetric matrix of finite numbers, and this "
                "one is not. Nothing was combined. Ask its site for PrivatePCA's second_moment_."
            )
        object.__setattr__(self, "moment", moment)


# -------------------------------------------------------------------------------------- projections


class _Projection(Settings, ClassNamePrefixFeaturesOutMixin, TransformerMixin):  # type: ignore[misc]
    """What the projections share: axes from a moment, and applying them."""

    n_components: int
    data_norm: float
    n_features_in_: int
    components_: Array
    explained_ratio_: Array

    def transform(self, X: Any) -> Array:
        """Return each row's coordinates along the principal axes; no row gets longer.

        They depend on that row alone, bit for bit, whatever table it stands in.
        """
        check_is_fitted(self)
        return coordinates(validate_table(self, X, reset=False), self.components_)

    def _set_axes(self, moment: Array) -> None:
        """Set the leading eigenvectors and their shares; a negative eigenvalue counts as 0."""
        values, vectors = linalg.eigh(moment)
        axes = vectors[:, ::-1][:, : self.n_components].T
        largest = np.abs(axes).argmax(axis=1)
        self.components_ = (
            axes * np.where(axes[np.arange(len(axes)), largest] < 0, -1.0, 1.0)[:, None]
        )
        kept = np.maximum(values[::-1][: self.n_components], 0.0)
        # The trace, because noise does not shift it, as it would shift a sum of the positive
        # eigenvalues.
        self.explained_ratio_ = kept / max(values.sum(), kept.sum(), np.finfo(np.float64).tiny)

    def _check_settings(self) -> None:
        wanted, most = self.n_components, self.n_features_in_
        self._require_moderate("data_norm")
        fits, must = (
            is_count(wanted) and wanted <= most,
            f"an integer from 1 to {most}, the columns",
        )
        self._require("n_components", fits, must)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def mean_square(X: Rows, directions: Array, data_norm: float = 1.0) -> float:
    """Return the mean square of public rows along directions, all of them together."""
    rows = as_doubles(X)
    moment = _second_moment(rows, rows.shape[1], data_norm, on_grid=False)
    whole = float(np.einsum("ij,jk,ik->", directions, moment, directions))
    return whole / max(int(rows.shape[0]), 1)


@shield
class PublicPCA(_Projection, BaseEstimator):  # type: ignore[misc]
    """Project on the principal axes of records that are public.

    Parameters
    ----------
    n_components
        How many axes to keep.
    data_norm
        Declared bound on the norm of a row; longer rows are scaled down to it before they count.

    Notes
    -----
    **Privacy.** None for the records it is fitted on: they must be public. Records that are
    transformed later stay as protected as they were, and no longer than they were, so that a
    learner behind it keeps its `data_norm`. One made by `combine_moments` has a ``guarantee_``.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> public = np.linspace(-0.5, 0.5, 400)[:, None] * np.array([[1.0, 1.0, 0.0]])
    >>> cs.PublicPCA(1).fit(public).transform(public).shape
    (400, 1)
    """

    guarantee_: Guarantee

    def __init__(self, n_components: int, *, data_norm: float = 1.0) -> None:
        self.n_components = n_components
        self.data_norm = data_norm

    @classmethod
    def of_moment(cls, moment: Array, n_components: int) -> Self:
        """Return the projection on the leading axes of a symmetric matrix that was released.

        A moment has no negative eigenvalue; noise may give it some, which count as 0.
        """
        made = cls(n_components)
        made.n_features_in_ = len(moment)
        made._check_settings()
        made._set_axes(moment)
        return made

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the principal axes of public records."""
        X = validate_table(self, X)
        self._check_settings()
        self._set_axes(_second_moment(X, self.n_features_in_, self.data_norm, on_grid=False))
        return self


@dataclass(frozen=True)
class MomentTask:
    """Records as they were given, and whose each is."""

    X: Any
    persons: Array | None


@dataclass(frozen=True)
class MomentPlan:
    """The noise of one second moment, from public facts; none at an infinite epsilon."""

    noise: L2Laplace | Gaussian | None = None
    closing: Closing | None = None

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn."""
        return [event for event in (self.noise, self.closing) if event is not None]


@dataclass(eq=False, repr=False, kw_only=True)
class PrivatePCA(_Projection, PrivateLearner[MomentTask, MomentPlan]):
    """Project on the principal axes of private records, found in a noisy second moment.

    Parameters
    ----------
    epsilon, delta
        The budget. ``delta > 0`` draws symmetric Gaussian noise (Analyze-Gauss, Dwork et al. 2014,
        with less noise off the diagonal), ``delta=0`` noise of density ∝ exp(-‖E‖/s) in the
        Frobenius norm: at delta=1e-5 about d/5 times as much for d columns. ``epsilon=math.inf`` is
        exact and promises nothing.
    n_components
        How many axes to keep; it only cuts what was released, so its choice is free.
    data_norm
        Declared bound on the norm of a row. Longer rows are scaled down to it.
    neighbours, unit, records_per_person, noise
        As in `PrivateLogisticRegression`. No public size is needed: the moment is a plain sum.

    Attributes
    ----------
    moment_
        The released noisy Σxxᵀ of the clipped rows; `second_moment_` is it together with its
        guarantee.
    components_, explained_ratio_
        Its leading eigenvectors, and their eigenvalues' share of its trace; computed from
        ``moment_`` alone.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees any fitted attribute. A learner trained behind it on the same records is charged on
    top. Not hidden: the number of columns. Proof: docs/guarantees/pca.md.

    Examples
    --------
    >>> X = np.linspace(-0.5, 0.5, 4000)[:, None] * np.array([[1.0, 1.0, 0.0]])
    >>> pca = PrivatePCA(epsilon=1.0, delta=1e-6, n_components=2).fit(X)
    >>> pca.transform(X).shape, pca.guarantee_
    ((4000, 2), Guarantee(epsilon=1, delta=1e-06, per record, replace-one, 1 assumption))
    """

    epsilon: float
    n_components: int
    delta: float = 0.0
    data_norm: float = 1.0
    neighbours: str = "replace-one"
    unit: str = "record"
    records_per_person: int | None = None
    noise: Noise | None = None

    moment_: Array = field(init=False)

    def make_task(
        self, X: Rows, y: ArrayLike | None = None, persons: ArrayLike | None = None
    ) -> tuple[MomentTask, list[str]]:
        """Check settings and records; labels are not used."""
        self._check_privacy(("moment",))
        if hasattr(X, "chunks"):
            if self.unit == "person":
                raise SettingsError(
                    "PrivatePCA was given a table in chunks with unit='person', but persons can "
                    "be capped only in a table that fits in memory. Nothing was trained. Load "
                    "the table, or use unit='record'."
                )
            self.n_features_in_ = X.n_features
            check_record_unit(self, X, persons)
            count_records(self, X, np.asarray)  # bad rows are refused before the charge
        else:
            # Under add-remove even "the table is empty" is about the records, so an empty table
            # trains.
            least = 0 if self.neighbours == "add-remove" else 1
            X = validate_table(self, X, ensure_min_samples=least)
        self._check_settings()
        ids = None if hasattr(X, "chunks") else check_persons(self, persons, X.shape[0])
        return MomentTask(X, ids), []

    @property
    def second_moment_(self) -> SecondMoment:
        """The released moment and its guarantee, for `combine_moments`."""
        check_is_fitted(self)
        return SecondMoment(self.moment_, self.guarantee_)

    def _plan(self, task: MomentTask) -> MomentPlan:
        return self.planned_noise()

    def planned(self, size: int) -> Sequence[Event]:
        """Return what a fit draws, which depends on no size."""
        self._check_privacy(("moment",))
        return self.planned_noise().events

    def planned_noise(self) -> MomentPlan:
        """Return the noise of a fit, which no record has a say in."""
        self._check_settings()
        if math.isinf(self.epsilon):
            return MomentPlan()
        replaced = self.neighbours == "replace-one"
        # A unit's records add a positive semi-definite matrix of trace <= cap: of norm <= cap, and
        # two such matrices are at no more than a right angle.
        cap = float(self.records_per_person or 1) if self.unit == "person" else 1.0
        sensitivity = cap * (math.sqrt(2) if replaced else 1.0)
        who: Any = {"unit": Unit(self.unit), "neighbours": Neighbours(self.neighbours)}
        dimension = self.n_features_in_ * (self.n_features_in_ + 1) // 2
        noise = calibrate_vector(
            sensitivity, epsilon=self.epsilon, delta=self.delta, by_cost=True, **who
        )
        # Four roundings of the moment (its last addition, √2, its product, the noise's addition),
        # one of the noise.
        distance = 2.0**-50 * MOST_RECORDS + 2 * draw_error(dimension) * public_radius(
            noise, dimension
        )
        return MomentPlan(noise, closing_event(dimension, distance, epsilon=self.epsilon, **who))

    def _train(self, task: MomentTask, plan: MomentPlan, source: Source) -> None:
        self.draw_axes(task, plan, source)

    def draw_axes(self, task: MomentTask, plan: MomentPlan, source: Source) -> Array:
        """Draw the moment of checked records and return its axes, for a caller that charged.

        Privacy
        -------
        What `plan` states, for everyone who sees the axes.
        """
        X = task.X
        if task.persons is not None:
            cap = int(self.records_per_person or 1)
            X = X[cap_records(task.persons, cap, source.uniform(len(task.persons)))]
        moment = _second_moment(
            X, self.n_features_in_, self.data_norm, on_grid=plan.closing is not None
        )
        if plan.noise is not None and plan.closing is not None:
            vector = as_vector(moment)
            vector = vector + draw_vector(len(vector), event=plan.noise, source=source)
            moment = as_matrix(close_vector(vector, event=plan.closing, source=source))
        self.restore_state({"moment": moment * self.data_norm**2})
        return self.components_

    def released_state(self) -> dict[str, Array]:
        """Return the released arrays."""
        return {"moment": self.moment_}

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the fitted attributes from what `released_state` returned."""
        self.moment_ = state["moment"]
        self._set_axes(self.moment_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = math.isfinite(self.epsilon) and self.noise is None
        return tags


# --------------------------------------------------------------------------------------- many sites


def combine_moments(
    moments: Sequence[SecondMoment],
    *,
    n_components: int,
    assumption: str,
    weights: ArrayLike | None = None,
) -> PublicPCA:
    """Return the projection on several sites' joint principal axes (Imtiaz & Sarwate 2018).

    Parameters
    ----------
    assumption
        Why the sites' records are disjoint, for instance "no person is at two sites"; the guarantee
        names it.
    weights
        One public number >= 0 for each site; 1 for all unless given. A site's noise is multiplied
        with its moment.

    Privacy
    -------
    Post-processing of what each site released: ``guarantee_`` is the sites' largest epsilon and
    delta under `assumption`, against everyone. No record is seen here. Proof:
    docs/guarantees/pca.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.linspace(-0.5, 0.5, 4000)[:, None] * np.array([[1.0, 1.0, 0.0]])
    >>> pca = cs.PrivatePCA(epsilon=1.0, delta=1e-6, n_components=2)
    >>> moments = [pca.fit(part).second_moment_ for part in (X[::2], X[1::2])]
    >>> joint = cs.combine_moments(moments, n_components=1, assumption="nobody is at two sites")
    >>> joint.transform(X).shape
    (4000, 1)
    """
    if not moments:
        raise SettingsError("Combining needs at least one site's second moment. Got none.")
    if len({moment.moment.shape for moment in moments}) > 1:
        raise SchemaMismatch(
            "The sites' second moments have different numbers of columns, so they cannot be "
            "added. Nothing was combined. All sites of a study encode their tables with one "
            "schema."
        )
    factors = np.ones(len(moments)) if weights is None else np.asarray(weights, dtype=np.float64)
    if (
        factors.shape != (len(moments),)
        or not np.isfinite(factors).all()
        or (factors < 0).any()
        or not factors.any()
    ):
        raise SettingsError(
            f"The 'weights' must be {len(moments)} finite numbers >= 0, one for each site and not "
            "all 0. Nothing was combined. Pass one public weight per site, or none."
        )
    moment = np.tensordot(factors, np.stack([moment.moment for moment in moments]), axes=1)
    joint = PublicPCA.of_moment(moment, n_components)
    joint.guarantee_ = compose_disjoint(
        *(moment.guarantee for moment in moments), assumption=assumption
    )
    return joint
