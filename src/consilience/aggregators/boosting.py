"""SiteBoosting: add up the members' scores in small steps, as many as held-out records favour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Unpack

import numpy as np

from consilience.aggregators.base import Array, Charge
from consilience.aggregators.labelled import Labelled, UsesLabels, read_labelled
from consilience.aggregators.members import LinearEnsemble, dense
from consilience.aggregators.mixture import folds
from consilience.learners.base import is_count, is_positive
from consilience.learners.erm import Loss
from consilience.tables.public import Public

MOST_ROUNDS = 10_000  # a study decides how long the hub of others works for it


@dataclass(eq=False)
class SiteBoosting(UsesLabels):
    """Boost over the members: each round adds a little of the score that best fits the residuals.

    LogitBoost with componentwise linear base learners (Friedman, Hastie & Tibshirani 2000); for
    regressors L2Boost (Bühlmann & Yu 2003), with `huber` its robust form. Few rounds use few
    members, so this also selects.

    Parameters
    ----------
    n_rounds
        The most rounds, up to 10,000; cross-validation on the public records stops earlier.
    shrinkage
        How much of each best fit is added.
    coordinates
        Whether the records' own features are base learners too, beside the members' scores.
    classes, huber, random_state
        As `PublicBlend`.

    Privacy
    -------
    Each site's own guarantee, against everyone: post-processing. None for the public records.
    Proof: docs/guarantees/feature.md.

    Examples
    --------
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> members = [
    ...     cs.PrivateLogisticRegression(epsilon=5.0, classes=[0, 1]).fit(X[part::4], y[part::4])
    ...     for part in (0, 1, 2)
    ... ]
    >>> ensemble = cs.SiteBoosting().combine(members, public=cs.Public(X[3::4], y[3::4]))
    >>> ensemble.predict(X[:5]).shape
    (5,)
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"boosting": {}}

    weighing = "Members are added one by one, each for what it corrects on the public records."

    n_rounds: int = 200
    _: KW_ONLY
    shrinkage: float = 0.1
    coordinates: bool = False

    def check_settings(self) -> None:
        """Refuse settings that cannot work."""
        super().check_settings()
        fits = is_count(self.n_rounds, MOST_ROUNDS)
        self._require("n_rounds", fits, f"an integer from 1 to {MOST_ROUNDS:,}")
        fits = is_positive(self.shrinkage) and self.shrinkage <= 1
        self._require("shrinkage", fits, "a number in (0, 1]")

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> LinearEnsemble:
        """Return the boosted combination of linear `members` on labelled `public` records."""
        self.check_settings()
        task = read_labelled(self, members, public)
        columns = self._columns(task)
        boost = _Boost(columns, task.y, task.loss, self.shrinkage)
        tests = folds(task.y, self.random_state)
        held_out = sum(
            boost.path(np.flatnonzero(~test), np.flatnonzero(test), self.n_rounds)[1]
            for test in tests
        )
        stop = 1 + int(np.argmin(held_out))
        steps, _ = boost.path(np.arange(len(task.y)), np.zeros(0, dtype=np.intp), stop)
        return self._ensemble(task, steps)

    def _columns(self, task: Labelled) -> Array:
        """Return the base learners' values (m, J): scores, a constant, the records' features."""
        n_scores = len(task.members) * task.n_outputs
        columns = [task.margins().reshape(n_scores, -1).T]
        if task.with_intercept:
            columns.append(np.ones((len(task.y), 1)))
        if self.coordinates:
            columns.append(dense(task.X))
        return np.hstack(columns)

    def _ensemble(self, task: Labelled, steps: Array) -> LinearEnsemble:
        """Turn coefficients of base learners (1 or K, J) into coefficients of features."""
        n, k = len(task.members), task.n_outputs
        omega = steps[:, : n * k].reshape(k, n, k)
        coef = np.einsum("anb,nbd->ad", omega, task.coef)
        intercept = np.einsum("anb,nb->a", omega, task.intercept)
        rest = steps[:, n * k :] * task.label_scale
        if task.with_intercept:
            intercept, rest = intercept + rest[:, 0], rest[:, 1:]
        if self.coordinates:
            coef = coef + rest
        return task.ensemble(coef, intercept, np.einsum("ana->n", omega) / k)


@dataclass(frozen=True)
class _Boost:
    """Componentwise Newton boosting of one loss over given columns."""

    columns: Array
    y: Array
    loss: Loss
    shrinkage: float

    def path(self, train: Array, test: Array, n_rounds: int) -> tuple[Array, Array]:
        """Return coefficients (1 or K, J) after `n_rounds`, and the loss on `test` after each."""
        H, y, k = self.columns[train], self.y[train], self.loss.n_outputs
        T, y_test = self.columns[test], self.y[test]
        squares = np.square(H)
        steps = np.zeros((k, H.shape[1]))
        scores, test_scores = np.zeros((k, len(train))), np.zeros((k, len(test)))
        losses = np.zeros(n_rounds)
        for r in range(n_rounds):
            z = scores[0] if k == 1 else scores
            slope = np.atleast_2d(self.loss.slope(z, y))
            g, h = -(slope @ H), self._bend(z, y) @ squares
            # A weighted least-squares fit of the working response by column j alone lowers the loss
            # by g²/2h.
            gain = np.divide(g * g, h, out=np.zeros_like(g), where=h > 1e-12 * h.max())
            best = np.unravel_index(int(np.argmax(gain)), g.shape)
            step = self.shrinkage * float(g[best] / h[best]) if gain[best] > 0 else 0.0
            steps[best] += step
            scores[best[0]] += step * H[:, best[1]]
            test_scores[best[0]] += step * T[:, best[1]]
            losses[r] = float(
                np.sum(self.loss.value(test_scores[0] if k == 1 else test_scores, y_test))
            )
        return steps, losses

    def _bend(self, z: Array, y: Array) -> Array:
        """Return each record's curvature per output.

        A Huber loss has none where it is linear; its largest is used everywhere.
        """
        if self.loss.n_outputs > 1:
            return np.asarray(np.einsum("kkj->kj", self.loss.bend(z, y)))
        return np.atleast_2d(
            self.loss.bend(z, y) if self.loss.monotone else np.full(len(y), self.loss.curvature)
        )
