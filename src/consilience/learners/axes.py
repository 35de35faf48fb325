"""Axes that rows are projected on before a linear model is trained, and mapped back along after.

A model of k axes needs less noise than one of d columns. Coefficients along the axes are mapped
back into the columns, which is post-processing, so that members of sites with different axes can be
combined like any others. Proof: docs/guarantees/pca.md.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from consilience.errors import SettingsError
from consilience.learners.ball import Ball
from consilience.learners.base import Rows, is_count, is_positive
from consilience.learners.projection import (
    MomentPlan,
    MomentTask,
    PrivatePCA,
    PublicPCA,
    mean_square,
)
from consilience.privacy.mechanisms import Source
from consilience.tables.public import Public

Array = NDArray[Any]

# Coordinates of rows on a grid of 2⁻³⁰ and of axes on one of 2⁻²⁰ have products on one of 2⁻⁵⁰, and
# no sum of them exceeds 1: no order of adding rounds one, so that what becomes of a record does not
# depend on the table that it stands in.
ROW_BITS, AXIS_BITS = 30, 20
SHORTER = 2.0**-30  # by what axes are shorter than 1 beyond their rounding
SPANNED = 1e-9  # relative: coefficients outside the axes, by rounding
EXPLAINED = 1e-4  # by what published axes may explain less than those computed again


class Trained(Protocol):
    """What a projection reads of the linear learner that it belongs to."""

    epsilon: float
    delta: float
    neighbours: str
    unit: str
    records_per_person: int | None
    n_features_in_: int
    data_norm: float
    fit_intercept: bool


@dataclass(frozen=True, eq=False)
class Axes:
    """Orthogonal axes of length 1, up to the grid, one in each row of whole steps."""

    steps: Array

    @classmethod
    def of(cls, directions: Array) -> Self:
        """Return orthonormal directions on the grid: no row gets longer by projecting on them."""
        shorter = 1 - SHORTER - 2.0**-AXIS_BITS * math.sqrt(directions.size)
        return cls(np.trunc(directions * shorter * 2.0**AXIS_BITS).astype(np.int64))

    @property
    def directions(self) -> Array:
        """The axes as numbers."""
        return np.asarray(self.steps * 2.0**-AXIS_BITS)

    def project(self, rows: Rows) -> Array:
        """Return coordinates of rows of the unit ball, exact but for cutting rows to their grid.

        Columns beyond those of the axes, such as a constant, stay as they are.
        """
        width = self.steps.shape[1]
        inside = rows[:, :width] * 2.0**ROW_BITS
        whole = inside.trunc() if sparse.issparse(inside) else np.trunc(inside)
        along = np.asarray(whole @ (self.steps.T * 2.0 ** -(ROW_BITS + AXIS_BITS)))
        if rows.shape[1] == width:
            return along
        beside = rows[:, width:]
        return np.hstack([along, beside.toarray() if sparse.issparse(beside) else beside])

    def lift(self, coef: Array) -> Array:
        """Return coefficients of the columns from coefficients along the axes."""
        return np.asarray(coef @ self.directions)

    def span(self, coef: Array) -> bool:
        """Tell whether coefficients of the columns are combinations of the axes."""
        rows = np.atleast_2d(coef)
        along = np.linalg.lstsq(self.directions.T, rows.T, rcond=None)[0]
        off = float(np.abs(self.lift(along.T) - rows).max(initial=0.0))
        return off <= SPANNED * float(np.abs(rows).max(initial=0.0))


# ------------------------------------------------------------------------------------- projections


@dataclass(frozen=True)
class Projection(ABC):
    """How a linear learner gets the axes that its rows are projected on.

    Parameters
    ----------
    n_components
        How many axes there are.
    """

    kind: ClassVar[str]
    n_components: int

    def __post_init__(self) -> None:
        self._require("n_components", is_count(self.n_components), "a whole number above 0")

    def _require(self, name: str, fits: bool, must: str) -> None:
        if not fits:
            raise SettingsError(
                f"The {name!r} setting of a {self.kind} projection must be {must}. Nothing was "
                "computed."
            )

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the facts, as a study states them."""

    def stated(self) -> dict[str, Any]:
        """Return the facts as every file states them; a study that it names has the rest."""
        return self.as_dict()

    @abstractmethod
    def describe(self) -> str:
        """Say in words where the axes come from."""

    def cost(self, epsilon: float, delta: float) -> tuple[float, float] | None:
        """Return what the axes cost of a site's budget; None if nothing."""
        return None

    def problem_with(self, n_features: int, public: str | None) -> str | None:
        """Return why it cannot belong to a study, or None.

        `public` is the digest of the study's file of public records, if it names one.
        """
        if self.n_components > n_features:
            return f"{self.n_components} axes are more than the {n_features} columns"
        return None

    def problem_among(self, public: Public, data_norm: float) -> str | None:
        """Return why the axes are not those of the study's public records, or None."""
        return None

    def left(self, epsilon: float, delta: float) -> tuple[float, float]:
        """Return what is left of a budget for training behind the axes."""
        return epsilon, delta

    @abstractmethod
    def plan(self, learner: Trained) -> MomentPlan:
        """Decide from public facts what finding the axes draws."""

    @abstractmethod
    def find(self, learner: Trained, records: MomentTask, plan: MomentPlan, source: Source) -> Axes:
        """Return the axes; `records` are in the unit ball, perhaps with a constant at their end."""

    def span(self, coef: Array) -> bool:
        """Tell whether such a learner can have these coefficients, as far as axes are known."""
        return True


@dataclass(frozen=True)
class KnownAxes(Projection):
    """Axes that everybody knows before any record is used: finding them costs nothing.

    Parameters
    ----------
    source
        The SHA-256 of the file that they were computed from.
    axes
        The axes in whole steps of 2⁻²⁰, or the SHA-256 of them where only a name is needed.
    """

    source: str
    axes: Sequence[Sequence[int]] | str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("source", _is_digest(self.source), "the SHA-256 of a file")
        if isinstance(self.axes, str):
            self._require("axes", _is_digest(self.axes), "rows of whole numbers, or their SHA-256")
            return
        try:
            rows = tuple(tuple(row) for row in self.axes)
        except TypeError:
            rows = ()
        object.__setattr__(self, "axes", rows)
        whole = all(type(each) is int and abs(each) <= 2**AXIS_BITS for row in rows for each in row)
        alike = len(rows) == self.n_components and len({len(row) for row in rows}) == 1
        must = f"{self.n_components} rows of as many whole numbers within ±{2**AXIS_BITS}"
        self._require("axes", whole and alike and len(rows[0]) > 0, must)
        products = self.known.directions @ self.known.directions.T
        apart = np.abs(products - np.diag(np.diag(products))).max(initial=0.0)
        short = np.linalg.norm(self.known.directions, 2) <= 1 - SHORTER / 2
        self._require("axes", bool(short and apart <= 1e-2), "orthogonal, and shorter than 1")

    @classmethod
    def of(cls, directions: Array, source: str) -> Self:
        """Return the projection on orthonormal directions that a file with that SHA-256 has."""
        steps = Axes.of(np.asarray(directions)).steps
        return cls(len(steps), source, steps.tolist())

    @cached_property
    def known(self) -> Axes:
        """The axes themselves."""
        if isinstance(self.axes, str):
            raise SettingsError(
                "Only the SHA-256 of these axes is known. Nothing was computed. Take them from "
                "their study."
            )
        return Axes(np.asarray(self.axes, dtype=np.int64))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the axes."""
        if isinstance(self.axes, str):
            return self.axes
        return hashlib.sha256(repr([list(row) for row in self.axes]).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the facts, as a study states them."""
        rows = self.axes if isinstance(self.axes, str) else [list(row) for row in self.axes]
        return {
            "kind": self.kind,
            "n_components": self.n_components,
            "source": self.source,
            "axes": rows,
        }

    def stated(self) -> dict[str, Any]:
        """Return the facts with the digest of the axes."""
        return self.as_dict() | {"axes": self.digest}

    def problem_with(self, n_features: int, public: str | None) -> str | None:
        """Return why it cannot belong to a study, or None."""
        if isinstance(self.axes, str):
            return "a study states the axes themselves"
        if len(self.axes[0]) != n_features:
            return f"its axes have {len(self.axes[0])} columns, and the schema has {n_features}"
        return super().problem_with(n_features, public)

    def plan(self, learner: Trained) -> MomentPlan:
        """Draw nothing."""
        if not isinstance(self.axes, str) and len(self.axes[0]) != learner.n_features_in_:
            raise SettingsError(
                f"The axes of a projection have {len(self.axes[0])} columns, and the table has "
                f"{learner.n_features_in_}. Nothing was trained or charged. Take the axes of the "
                "same columns."
            )
        return MomentPlan()

    def find(self, learner: Trained, records: MomentTask, plan: MomentPlan, source: Source) -> Axes:
        """Return the axes, which do not depend on the records."""
        return self.known

    def span(self, coef: Array) -> bool:
        """Tell whether coefficients are combinations of the axes."""
        return isinstance(self.axes, str) or self.known.span(coef)


class PublicAxes(KnownAxes):
    """Principal axes of the study's public records.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> axes = cs.PublicAxes.of(np.eye(5)[:2], "ab" * 32)
    >>> axes.n_components
    2
    >>> rows = np.sin(np.arange(2000.0)).reshape(400, 5) / 3
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], projection=axes)
    >>> learner.fit(rows, (rows[:, 0] > 0).astype(int)).coef_.shape
    (1, 5)
    """

    kind = "public"

    @classmethod
    def among(cls, public: Public, n_components: int, source: str, data_norm: float = 1.0) -> Self:
        """Return the principal axes of public records, whose file has that SHA-256."""
        pca = PublicPCA(n_components, data_norm=data_norm).fit(public.X)
        return cls.of(pca.components_, source)

    def describe(self) -> str:
        """Say in words where the axes come from."""
        return (
            f"{self.n_components} principal axes of the public records with sha256 {self.source}; "
            "they cost nothing"
        )

    def problem_with(self, n_features: int, public: str | None) -> str | None:
        """Return why it cannot belong to a study, or None."""
        if public != self.source:
            return "its source is not the sha256 of the study's [public] file"
        return super().problem_with(n_features, public)

    def problem_among(self, public: Public, data_norm: float) -> str | None:
        """Return why the axes are not the principal ones of these records, or None.

        Axes of equal eigenvalues are any; so what they explain is compared.
        """
        again = PublicPCA(self.n_components, data_norm=data_norm).fit(public.X)
        best, found = (
            mean_square(public.X, rows, data_norm)
            for rows in (again.components_, self.known.directions)
        )
        if found >= best * (1 - EXPLAINED):
            return None
        return "[projection]: its axes are not the principal axes of the public records"


class MomentAxes(KnownAxes):
    """Principal axes of moments that an earlier study released; `source` is that release.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> axes = cs.MomentAxes.of(np.eye(5)[:2], "ab" * 32)  # the SHA-256 of that release
    >>> axes.kind, axes.n_components
    ('moments', 2)
    """

    kind = "moments"

    def describe(self) -> str:
        """Say in words where the axes come from."""
        return (
            f"{self.n_components} principal axes, by the word of the study's authors those of the "
            f"moments behind the release with sha256 {self.source}, which is not compared here; if "
            "it is so, they were paid for with that release, and they cost nothing more"
        )


@dataclass(frozen=True)
class OwnAxes(Projection):
    """Principal axes that each site finds among its own records, for a share of its budget.

    Parameters
    ----------
    share
        The part of epsilon and of delta that the axes cost.

    Examples
    --------
    >>> import consilience as cs
    >>> axes = cs.OwnAxes(n_components=2, share=0.3)
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, delta=1e-6, projection=axes)
    >>> learner.projection.share
    0.3
    """

    kind = "private"
    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = is_positive(self.share) and self.share < 1
        self._require("share", bool(fits), "a number above 0 and below 1")

    def as_dict(self) -> dict[str, Any]:
        """Return the facts, as a study states them."""
        return {"kind": self.kind, "n_components": self.n_components, "share": self.share}

    def describe(self) -> str:
        """Say in words where the axes come from."""
        return (
            f"{self.n_components} principal axes that each site finds among its own records, for "
            f"{self.share:g} of its epsilon and delta; they stay at the site"
        )

    def cost(self, epsilon: float, delta: float) -> tuple[float, float] | None:
        """Return what the axes cost of a site's budget."""
        return self.share * epsilon, self.share * delta

    def left(self, epsilon: float, delta: float) -> tuple[float, float]:
        """Return what is left of a budget for training behind the axes."""
        if math.isinf(epsilon):
            return epsilon, delta
        return epsilon - self.share * epsilon, delta - self.share * delta

    def _pca(self, learner: Trained) -> PrivatePCA:
        pca = PrivatePCA(
            epsilon=self.share * learner.epsilon,
            delta=self.share * learner.delta,
            n_components=self.n_components,
            data_norm=Ball.of(learner).row_factor,
            neighbours=learner.neighbours,
            unit=learner.unit,
            records_per_person=learner.records_per_person,
        )
        pca.n_features_in_ = learner.n_features_in_
        return pca

    def plan(self, learner: Trained) -> MomentPlan:
        """Decide from public facts what finding the axes draws."""
        return self._pca(learner).planned_noise()

    def find(self, learner: Trained, records: MomentTask, plan: MomentPlan, source: Source) -> Axes:
        """Draw the axes of the records.

        Privacy
        -------
        What `plan` states, for everyone who sees the axes.
        """
        pca = self._pca(learner)
        X, width = records.X, learner.n_features_in_
        rows = _WithoutConstant(X, width) if hasattr(X, "chunks") else X[:, :width]
        return Axes.of(pca.draw_axes(replace(records, X=rows), plan, source))


@dataclass(frozen=True)
class _WithoutConstant:
    """Encoded chunks without the constant at the end of each row."""

    records: Rows
    n_features: int

    def chunks(self) -> Iterator[tuple[Any, Array]]:
        for rows, labels in self.records.chunks():
            yield rows[:, : self.n_features], labels


def _is_digest(value: object) -> bool:
    text = value if isinstance(value, str) else ""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


# ---------------------------------------------------------------------------------------- registry

PROJECTIONS: dict[str, type[Projection]] = {}


def register_projection(projection: type[Projection]) -> type[Projection]:
    """Let studies and files name a projection by its kind; usable as a decorator."""
    if PROJECTIONS.get(projection.kind, projection) is not projection:
        raise SettingsError(
            f"A projection named {projection.kind!r} is already registered. Nothing was changed. "
            "Choose another kind."
        )
    PROJECTIONS[projection.kind] = projection
    return projection


for _projection in (PublicAxes, OwnAxes, MomentAxes):
    register_projection(_projection)


def read_projection(facts: Mapping[str, Any]) -> Projection:
    """Return the projection that facts of a study or a file describe; they may be hostile."""
    settings = dict(facts)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str) or kind not in PROJECTIONS:
        raise SettingsError(
            f"A projection's kind must be one of {', '.join(PROJECTIONS)}. Nothing was computed."
        )
    try:
        return PROJECTIONS[kind](**settings)
    except TypeError:
        raise SettingsError(
            f"A {kind} projection has other settings than these, or lacks some. Nothing was "
            "computed."
        ) from None
