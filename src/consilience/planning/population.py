"""What is publicly known about the records of all sites, and the law of a model of them.

Planning reads no private record. A population is either a public table that stands in for the
sites' records (`PublicRecords`), or an assumed loss with the same curvature in every direction
(`Isotropic`). Noise is drawn in the unit ball, so everything here is expressed in its coordinates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, special
from sklearn.base import clone

from consilience.errors import SettingsError
from consilience.learners.erm import Logistic, Loss, Problem, solve
from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression
from consilience.privacy.mechanisms import Source

Array = NDArray[np.float64]
Linear = PrivateLogisticRegression | PrivateLinearSVC

MOST_PUBLIC = 4000  # public records used: more would take longer and change little
UNLIMITED = 1 << 60  # records, of which losses are said to be the excess
MOST_RANKED = 500  # records of a class whose pairs are counted for an AUC
FOLDS = 5
# Gauss-Hermite quadrature for means over a standard normal variable.
NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Law(NamedTuple):
    """Mean and covariance of a model over draws of records and of noise.

    ``flattered``, ``flattered_error`` and ``flattered_auc`` are loss, error and AUC that the public
    table does not show because the model was fitted to it.
    """

    mean: Array
    sampling: Array
    noise: Array
    flattered: float = 0.0
    flattered_error: float = 0.0
    flattered_auc: float = 0.0

    @property
    def covariance(self) -> Array:
        """Covariance due to records and noise together."""
        return np.asarray(self.sampling + self.noise)

    def times(self, k: float) -> Law:
        """Return the law of k times the model."""
        return Law(k * self.mean, k * k * self.sampling, k * k * self.noise)


Outlook = tuple[Law, float]  # the law of a model, and a bound on its expected excess loss


class Smoothed(NamedTuple):
    """Means over a normally distributed model: loss, error, gradient and Hessian."""

    loss: float
    error: float | None
    gradient: Array
    hessian: Array


class HeldOut(NamedTuple):
    """How much worse a model does on held-out records, and the gradients measured there.

    A model looks better on the records it was fitted to; ``loss``, ``error`` and ``auc``, which is
    negative, are that gap.
    """

    loss: float
    error: float
    auc: float
    gradients: Array


class Population(ABC):
    """The public facts about the records that every prediction rests on.

    Attributes
    ----------
    rows
        Public records, or directions with the same second moment.
    second_moment
        Mean of x xᵀ.
    shows_errors
        Whether there are labelled records on which errors can be counted.
    ridge
        Λ of the learner where it trains without noise.
    exact_error, exact_auc
        Cross-validated error and AUC of the learner without noise, where there are labelled
        records.
    guess_error
        Error of always the most frequent class, where there are labelled records.
    """

    rows: Array
    second_moment: Array
    shows_errors: ClassVar[bool]
    ridge: float
    exact_error: float | None = None
    exact_auc: float | None = None
    guess_error: float | None = None

    def ranked(self, mean: Array, covariance: Array | None) -> float | None:
        """Return the expected AUC of a normal model, or of one; None without labelled records."""
        return None

    @abstractmethod
    def hessian(self, model: Array) -> Array:
        """Return the Hessian of the mean loss at a model."""

    @abstractmethod
    def gradients(self, model: Array) -> Array:
        """Return the covariance of one record's gradient at a model."""

    @abstractmethod
    def smooth(self, mean: Array, covariance: Array, soft: Array | None) -> Smoothed:
        """Return means over a normal model; `soft` are shares of votes used as labels."""

    @abstractmethod
    def model(self, ridge: float, linear: Array | None) -> Array:
        """Return the exact minimum at a ridge Λ with a linear term added to the mean loss."""

    @abstractmethod
    def loss(self, model: Array) -> float:
        """Return the mean loss of a model."""

    @abstractmethod
    def held_out(self, ridge: float) -> HeldOut:
        """Return what cross-validation shows at a ridge Λ."""

    @abstractmethod
    def error(self, model: Array) -> float:
        """Return the error rate of a model; only where `shows_errors`."""


class Isotropic(Population):
    """A quadratic loss with the same curvature in all directions."""

    shows_errors = False

    def __init__(
        self, learner: Linear, dimension: int, curvature: float | None, signal: float
    ) -> None:
        self.ridge = learner.strength(UNLIMITED, dimension)
        largest = learner.loss(2).curvature
        self.bend = largest / dimension if curvature is None else curvature
        self.best = np.full(dimension, signal)
        self.one = np.eye(dimension)
        self.rows = math.sqrt(min(1.0, dimension * self.bend / largest)) * self.one
        self.second_moment = self.bend / largest * self.one

    def hessian(self, model: Array) -> Array:
        """Return the same Hessian everywhere."""
        return np.asarray(self.bend * self.one)

    def gradients(self, model: Array) -> Array:
        """Return the Hessian: in a well-specified model the two are equal."""
        return np.asarray(self.bend * self.one)

    def smooth(self, mean: Array, covariance: Array, soft: Array | None) -> Smoothed:
        """Return the means in closed form."""
        gap = mean - self.best
        return Smoothed(
            self.bend / 2 * float(gap @ gap + np.trace(covariance)),
            None,
            self.bend * gap,
            self.bend * self.one,
        )

    def model(self, ridge: float, linear: Array | None) -> Array:
        """Return the minimum in closed form."""
        pull = self.bend * self.best - (0.0 if linear is None else linear)
        return np.asarray(pull / (self.bend + ridge))

    def loss(self, model: Array) -> float:
        """Return the loss above the best model's."""
        return self.bend / 2 * float(np.sum(np.square(model - self.best)))

    def held_out(self, ridge: float) -> HeldOut:
        """Return no gap: nothing was fitted to records."""
        return HeldOut(0.0, 0.0, 0.0, self.bend * self.one)

    def error(self, model: Array) -> float:
        """Return that there are no labels to count errors on."""
        return math.nan


class PublicRecords(Population):
    """What labelled public records show, encoded in the learner's own scale."""

    shows_errors = True

    def __init__(self, learner: Linear, X: ArrayLike, y: ArrayLike, source: Source) -> None:
        learner = clone(learner).set_params(unit="record")
        task, _ = learner.make_task(X, y)
        if len(learner.classes_) != 2:
            raise SettingsError(
                f"Advice was asked for with public data of {len(learner.classes_)} classes, but "
                "formulas are known for two. Nothing was computed. Plan for one class against the "
                "others, or simulate: consilience simulate study.toml --data TABLE."
            )
        some = np.sort(source.permutation(task.n_records)[:MOST_PUBLIC])
        self.rows = task.X[some].toarray() if hasattr(task.X, "toarray") else task.X[some]
        self.labels = np.asarray(task.y)[some]
        self.kind: Loss = task.loss
        self.second_moment = self.rows.T @ self.rows / len(self.rows)
        self._known: dict[float, HeldOut] = {}
        self.ridge = learner.strength(*self.rows.shape)
        exact = self.model(self.ridge, None)
        share = float(np.mean(self.labels > 0))
        self.guess_error = min(share, 1 - share)
        self.exact_error = self.held_out(self.ridge).error + self.error(exact)
        if (shown := self.ranked(exact, None)) is not None:
            self.exact_auc = self.held_out(self.ridge).auc + shown

    def model(self, ridge: float, linear: Array | None) -> Array:
        """Return the exact minimum on all public records."""
        return self._fit(ridge, linear, slice(None))

    def _fit(self, ridge: float, linear: Array | None, keep: slice | NDArray[np.bool_]) -> Array:
        labels = self.labels[keep]
        # The solver minimises a sum of losses, so ridge and linear term are multiplied by n.
        fitted = solve(
            self.rows[keep],
            labels,
            Problem(
                self.kind,
                regularization=len(labels) * ridge,
                linear=None if linear is None else len(labels) * linear,
            ),
            tolerance=1e-7 * len(labels),
        )
        return np.asarray(fitted.coef, np.float64)

    def error(self, model: Array) -> float:
        """Return the share of public records that a model gets wrong."""
        return float(np.mean((self.rows @ model > 0) != (self.labels > 0)))

    def loss(self, model: Array) -> float:
        """Return the mean loss on the public records."""
        return float(np.mean(self.kind.value(self.rows @ model, self.labels)))

    def hessian(self, model: Array) -> Array:
        """Return the Hessian of the mean loss on the public records."""
        bend = self.kind.bend(self.rows @ model, self.labels)
        return np.asarray((self.rows.T * bend) @ self.rows / len(self.rows))

    def gradients(self, model: Array) -> Array:
        """Return the covariance of the public records' gradients."""
        return self._scatter(self.rows @ model)

    def _scatter(self, margins: Array) -> Array:
        slope = self.kind.slope(margins, self.labels)[:, None]
        return np.atleast_2d(np.cov(slope * self.rows, rowvar=False, bias=True))

    def smooth(self, mean: Array, covariance: Array, soft: Array | None) -> Smoothed:
        """Return the means: margins are normal, so these are integrals in one dimension."""
        rows, labels = self.rows, self.labels
        z, spread = rows @ mean, margin_spread(rows, covariance)
        at, y = z[:, None] + spread[:, None] * NODES, labels[:, None]
        # With soft labels the loss is logistic, and the label enters its gradient linearly.
        kind, sign = (self.kind, y) if soft is None else (Logistic(), np.full_like(y, -1.0))
        slope, bend = kind.slope(at, sign) @ WEIGHTS, kind.bend(at, sign) @ WEIGHTS
        wrong = np.where(
            spread > 0, special.ndtr(-labels * z / np.maximum(spread, 1e-300)), labels * z < 0
        )
        return Smoothed(
            loss=float(np.mean(self.kind.value(at, y) @ WEIGHTS)),
            error=float(np.mean(wrong)),
            gradient=rows.T @ (slope if soft is None else slope - soft) / len(rows),
            hessian=(rows.T * bend) @ rows / len(rows),
        )

    def ranked(self, mean: Array, covariance: Array | None) -> float | None:
        """Return how often a pair of records of both classes is in order, over draws of the model.

        The difference of two margins is normal, so this is a mean of one integral for each pair.
        """
        return self._order(self.rows @ mean, covariance)

    def _order(self, margins: Array, covariance: Array | None) -> float | None:
        both = [np.flatnonzero(self.labels > 0), np.flatnonzero(self.labels <= 0)]
        if not all(map(len, both)):
            return None
        above, below = (one[:: -(-len(one) // MOST_RANKED)] for one in both)
        ahead = margins[above][:, None] - margins[below]
        if covariance is None:
            return float(np.mean(ahead > 0) + np.mean(ahead == 0) / 2)
        first, second = self.rows[above], self.rows[below]
        own = [np.square(margin_spread(rows, covariance)) for rows in (first, second)]
        variance = own[0][:, None] + own[1] - 2 * first @ covariance @ second.T
        return float(np.mean(special.ndtr(ahead / np.sqrt(np.maximum(variance, 1e-300)))))

    def held_out(self, ridge: float) -> HeldOut:
        """Return what cross-validation over five folds shows; computed once for each ridge."""
        if ridge not in self._known:
            self._known[ridge] = self._cross_validate(ridge)
        return self._known[ridge]

    def _cross_validate(self, ridge: float) -> HeldOut:
        rows, labels = self.rows, self.labels
        z, fitted = self._held_out_margins(ridge), self.model(ridge, None)
        scatter = self._scatter(z)
        bend = (rows.T * self.kind.bend(z, labels)) @ rows / len(rows)
        inverse = linalg.inv(bend + ridge * np.eye(rows.shape[1]))
        # A model of four fifths of the records has a sampling error of its own, which must not
        # be counted here.
        own = (
            float(np.sum(bend * (inverse @ scatter @ inverse))) / 2 / (len(rows) * (1 - 1 / FOLDS))
        )
        gap = float(np.mean(self.kind.value(z, labels)) - self.loss(fitted))
        return HeldOut(
            max(0.0, gap - own),
            float(np.mean((z > 0) != (labels > 0))) - self.error(fitted),
            min(0.0, (self._order(z, None) or 0.0) - (self.ranked(fitted, None) or 0.0)),
            scatter,
        )

    def _held_out_margins(self, ridge: float) -> Array:
        """Return each record's margin by a model of the other folds."""
        folds = np.arange(len(self.rows)) % FOLDS
        z = np.zeros(len(self.rows))
        for k in range(min(FOLDS, len(self.rows))):
            z[folds == k] = self.rows[folds == k] @ self._fit(ridge, None, folds != k)
        return z


def margin_spread(rows: Array, covariance: Array) -> Array:
    """Return the standard deviation of each row's margin under a model of this covariance."""
    return np.asarray(np.sqrt(np.maximum(np.einsum("ij,ij->i", rows @ covariance, rows), 0.0)))
