"""Pairs of neighbouring data sets, and the search for the pair that tells most.

Slopes and curvatures of the losses are written out here a second time, independently of
learners/erm.py, so that an error there cannot hide itself. All records are made up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize, special

from consilience.errors import SettingsError
from consilience.learners.erm import Huber, HuberHinge, Logistic, Loss, Problem, Softmax, solve
from consilience.learners.perturbation import LinearPlan, LinearTask
from consilience.privacy.accounting import ObjectiveGaussian, ObjectiveL2Laplace
from consilience.privacy.mechanisms import Source

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

LARGEST_COEFFICIENT = 50.0
STEP = 1e-6  # of finite differences

# ------------------------------------------------------------------ losses, a second time


def _slopes_and_bends(loss: Loss, z: Array, y: Array) -> tuple[Array, Array]:
    """Return the loss' slopes and curvatures at the outputs z.

    Slopes are (batch, record, output), curvatures (batch, record, output, output).
    """
    if isinstance(loss, Softmax):
        p = special.softmax(z, axis=2)
        own = y[:, None] == np.arange(loss.n_classes)
        return p - own, p[..., None] * np.eye(loss.n_classes) - p[..., None] * p[..., None, :]
    y = y[:, None]
    if isinstance(loss, Logistic):
        slope, bend = -y * special.expit(-y * z), special.expit(z) * special.expit(-z)
    elif isinstance(loss, HuberHinge):
        short = 1 + loss.h - y * z
        slope = -y * np.clip(short / (2 * loss.h), 0, 1)
        bend = ((short >= 0) & (short <= 2 * loss.h)) / (2 * loss.h)
    elif isinstance(loss, Huber):
        slope, bend = (
            np.clip(z - y, -loss.threshold, loss.threshold),
            (np.abs(z - y) <= loss.threshold).astype(float),
        )
    else:
        raise SettingsError(
            f"The audit does not know the loss {type(loss).__name__}. Nothing was attacked. Add "
            "its derivatives to auditing/pairs.py, or use kind='sample'."
        )
    return slope, bend[..., None]


def output_basis(loss: Loss) -> Array:
    """Return orthonormal coordinates of the outputs' subspace in which gradients and minima lie."""
    return np.asarray(linalg.helmert(loss.n_outputs)) if loss.n_outputs > 1 else np.ones((1, 1))


def gradient_and_hessian(
    task: LinearTask, plan: LinearPlan, coef: Array, X: Array, y: Array, copies: Array
) -> tuple[Array, Array]:
    """Return gradient and Hessian of the objective for a batch of problems, flattened.

    `coef` is (batch, coordinate of `output_basis`, feature), `X` is (batch, record, feature), and
    `copies` says how often each record occurs.
    """
    (batch, m, d), basis = coef.shape, output_basis(task.loss)
    slope, bend = _slopes_and_bends(task.loss, X @ (coef.swapaxes(1, 2) @ basis), y)
    gradient = (copies[:, None] * (slope @ basis.T)).swapaxes(1, 2) @ X
    bend = copies[:, None] * (basis @ bend @ basis.T).reshape(batch, len(y), m * m)
    square = (X[..., None] * X[..., None, :]).reshape(batch, len(y), d * d)
    hessian = (
        (bend.swapaxes(1, 2) @ square)
        .reshape(batch, m, m, d, d)
        .swapaxes(2, 3)
        .reshape(batch, m * d, m * d)
    )
    fixed = plan.regularization * np.eye(m * d) + (0.0 if plan.matrix is None else plan.matrix)
    return gradient.reshape(batch, m * d) + coef.reshape(batch, m * d) @ fixed, hessian + fixed


# ------------------------------------------------------------------ pairs of data sets


@dataclass(frozen=True)
class Space:
    """All pairs of neighbouring data sets that the attack may try."""

    task: LinearTask
    plan: LinearPlan
    reach: float
    n_records: int
    neighbours: str
    moved: int
    source: Source

    def pairs(self) -> Iterator[Pair]:
        """Yield pairs without end.

        Labels, multiplicities and which side has the extra unit are drawn at random.
        """
        room = max(0, self.n_records - 1)
        for groups in itertools.cycle(range(min(3, room) + 1)):
            # Numbers of equal records are log-uniform. All other records are rows of zeros, which
            # move nothing.
            copies = np.floor(
                np.exp(self.source.uniform(groups) * math.log(room // max(groups, 1) + 1))
            )
            first, second = self.moved, self.moved
            if self.neighbours == "add-remove":
                first, second = (self.moved, 0) if self.source.words(1)[0] % 2 else (0, self.moved)
            labels = self._labels(groups + first + second)
            yield Pair(
                self, np.concatenate([copies, np.ones(first + second)]), labels, groups, first
            )

    def _labels(self, n: int) -> Array:
        words = self.source.words(n)
        if isinstance(self.task.loss, Softmax):
            return np.asarray(words % np.uint64(self.task.loss.n_classes), dtype=np.int64)
        if isinstance(self.task.loss, Huber):
            return (
                np.round(2 * self.source.uniform(n) - 1, 2)
                if words[:1] % 2
                else np.where(words & 2, 1.0, -1.0)
            )
        return np.where(words % 2, 1.0, -1.0)


@dataclass(frozen=True)
class Pair:
    """Two neighbours with fixed labels.

    Records come in this order: `shared` groups that both have, the first's own, the second's own.
    A point of the search holds a row for each record, to be shrunk into the ball, and for some
    attacks coefficients.
    """

    space: Space
    copies: Array
    labels: Array
    shared: int
    first: int

    @property
    def _sides(self) -> tuple[Mask, Mask]:
        index = np.arange(len(self.labels))
        own = (index >= self.shared) & (index < self.shared + self.first)
        return (index < self.shared) | own, ~own

    @property
    def n_row_entries(self) -> int:
        """Numbers in a point that are entries of rows; the others are coefficients."""
        return len(self.labels) * self.space.task.dimension

    def rows(self, points: Array) -> Array:
        """Return the rows of each point, shrunk into the ball that the learner lets through."""
        entries = points[:, : self.n_row_entries].reshape(len(points), len(self.labels), -1)
        lengths = np.sqrt(np.square(entries).sum(axis=2, keepdims=True))
        return np.asarray(entries * (self.space.reach / np.maximum(1.0, lengths)))

    def derivatives(self, coef: Array, X: Array) -> Iterator[tuple[Array, Array]]:
        """Yield gradient and Hessian of the first data set's objective, then of the second's."""
        for side in self._sides:
            space = self.space
            yield gradient_and_hessian(
                space.task, space.plan, coef, X[:, side], self.labels[side], self.copies[side]
            )

    def loss(self, points: Array) -> Array:
        """Return the privacy loss log p(θ|first) - log p(θ|second) at the points' coefficients θ.

        The density is p(θ) ∝ exp(-‖b‖/s)·det J, where b is the noise that leads to the minimum θ.
        """
        event = self.space.plan.noise
        assert isinstance(event, ObjectiveL2Laplace)
        coef = points[:, self.n_row_entries :].reshape(len(points), -1, self.space.task.dimension)
        logs = [
            np.linalg.slogdet(hessian)[1] - np.sqrt(np.square(gradient).sum(axis=1)) / event.scale
            for gradient, hessian in self.derivatives(coef, self.rows(points))
        ]
        return np.asarray(logs[0] - logs[1])

    def log_delta(self, points: Array, epsilon: float) -> Array:
        """Return ln of the hockey-stick divergence at epsilon, for Gaussian noise b.

        With one coefficient b is a monotone function of it, and cells of a grid have exact
        probabilities: a true lower bound. With two (three classes, one feature) the integral is a
        midpoint sum.
        """
        event = self.space.plan.noise
        assert isinstance(event, ObjectiveGaussian)
        n_coef, sigma, X = self.space.task.dimension_of_noise, event.sigma, self.rows(points)
        slopes = float(self.copies.sum()) * self.space.task.loss.lipschitz * self.space.reach
        edge = math.asinh((9 * sigma + slopes) / self.space.plan.regularization)
        steps = np.linspace(-edge, edge, 4001 if n_coef == 1 else 101)
        grid = np.sinh(steps if n_coef == 1 else (steps[1:] + steps[:-1]) / 2)
        nodes = np.stack([axis.ravel() for axis in np.meshgrid(*[grid] * n_coef)], axis=1)
        answers = []
        for rows in X:
            mass = []
            wide = np.broadcast_to(rows, (len(nodes), *rows.shape))
            for gradient, hessian in self.derivatives(nodes[:, :, None], wide):
                if n_coef == 1:
                    t = gradient[:, 0] / sigma
                    below, above = special.ndtr(t), special.ndtr(-t)
                    mass.append(np.where(t[1:] < 0, np.diff(below), -np.diff(above)))
                else:
                    cells = np.prod(
                        np.meshgrid(*[np.diff(np.sinh(steps))] * n_coef), axis=0
                    ).ravel()
                    density = np.exp(-np.square(gradient).sum(axis=1) / (2 * sigma**2)) / (
                        2 * math.pi * sigma**2
                    )
                    mass.append(density * np.linalg.det(hessian) * cells)
            answers.append(np.maximum(mass[0] - math.exp(epsilon) * mass[1], 0).sum())
        return np.asarray(np.log(np.maximum(answers, 1e-300)))

    def shift(self, points: Array) -> Array:
        """Return how far apart the two minima are, as the project's own solver finds them."""
        task, plan = self.space.task, self.space.plan
        problem = Problem(task.loss, plan.regularization, matrix=plan.matrix)
        answers = []
        for rows in self.rows(points):
            minima = []
            for side in self._sides:
                copies = self.copies[side].astype(int)
                X, y = np.repeat(rows[side], copies, axis=0), np.repeat(self.labels[side], copies)
                minima.append(solve(X, y, problem, tolerance=plan.tolerance).coef)
            answers.append(np.linalg.norm(np.asarray(minima[0] - minima[1], dtype=np.float64)))
        return np.asarray(answers)

    def describe(self, point: Array) -> str:
        """Describe the pair in words."""
        rows = self.rows(point[None])[0]
        texts = [
            f"{f'{int(m)} x ' if m > 1 else ''}({', '.join(f'{v:.3g}' for v in row)}; {label:g})"
            for row, label, m in zip(rows, self.labels, self.copies, strict=True)
        ]
        own = self.shared + self.first
        groups = [
            ", ".join(part) or "nothing"
            for part in (texts[: self.shared], texts[self.shared : own], texts[own:])
        ]
        coef = ", ".join(f"{v:.3g}" for v in point[self.n_row_entries :])
        at = f" at coefficients ({coef})" if coef else ""
        return (
            f"(row; label) {groups[1]} against {groups[2]}; both also hold {groups[0]}, all other "
            f"rows are zero{at}"
        )


def search(
    space: Space,
    value: Callable[[Pair, Array], Array],
    restarts: int,
    *,
    n_coef: int = 0,
    starts: int = 48,
    polish: int = 200,
) -> tuple[float, Pair, Array]:
    """Maximise `value` over pairs and points.

    For each pair L-BFGS-B climbs from the best of `starts` random points.
    """
    results: list[tuple[float, Pair, Array]] = []
    for pair in itertools.islice(space.pairs(), max(1, restarts)):
        n_rows = pair.n_row_entries
        points = space.source.normal(starts * (n_rows + n_coef)).reshape(starts, -1)
        points[:, n_rows:] *= 0.1 * np.exp(math.log(100.0) * space.source.uniform(starts))[:, None]
        bounds = [(-3.0, 3.0)] * n_rows + [(-LARGEST_COEFFICIENT, LARGEST_COEFFICIENT)] * n_coef
        steps = np.vstack([np.zeros(n_rows + n_coef), STEP * np.eye(n_rows + n_coef)])

        def climb(x: Array, pair: Pair = pair, steps: Array = steps) -> tuple[float, Array]:
            values = value(pair, x + steps)
            return -float(values[0]), (values[0] - values[1:]) / STEP

        start = points[int(np.argmax(value(pair, points)))]
        end = optimize.minimize(
            climb, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": polish}
        )
        # On a loss with kinks the climb may end lower than it began.
        results += [(float(value(pair, x[None])[0]), pair, x) for x in (start, np.asarray(end.x))]
    return max(results, key=lambda result: result[0])
