"""PublicBlend: labelled public records and the sites' average, mixed by cross-validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, Unpack

import numpy as np

from consilience.aggregators.base import Array, Charge, Joining, Outlook
from consilience.aggregators.labelled import (
    UsesLabels,
    encode_labels,
    is_logistic,
    read_features,
    read_labelled,
)
from consilience.aggregators.members import LinearEnsemble, dense
from consilience.aggregators.mixture import (
    Ball,
    Known,
    Mixture,
    Ridge,
    step_between,
    strengths_alone,
)
from consilience.learners.base import PrivateLearner
from consilience.tables.public import Public

# On the average before any label is looked at, even if it is all noise: records can overrule it.
LEAST_ODDS = 0.01
EXPECTED_WITHIN = 0.5  # powers of ten: a Cauchy density, so that records can always overrule it


@dataclass(eq=False)
class PublicBlend(UsesLabels):
    """Blend labelled public records with the members' average: the default if there are any.

    The logistic (softmax, squared) loss of the public records plus a ridge around a centre: the
    members' precision-weighted average, scaled to fit, or zero. Around the average the ridge is
    measured in the errors that the members' known noise and sizes imply, so that each direction
    moves as far as it is uncertain. Over both centres and all strengths of the ridge the results
    are mixed in proportion to their cross-validated likelihood, with odds on
    the average that fall from even to small where its known errors explain what it says, and,
    around the average, most on the strength that the known errors imply. Public records alone
    and the average alone are both among them.

    Parameters
    ----------
    classes
        The declared classes; otherwise the union of the members'.
    huber
        Regressors only: residuals beyond this size count linearly. None: squared loss.
    random_state
        Public randomness: which public records are held out together.

    The ensemble's ``weights`` add up to the share of the mixture that rests on the members'
    average; the rest is public records alone. A half or less says that joining did not help.

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
    >>> ensemble = cs.PublicBlend().combine(members, public=cs.Public(X[3::4], y[3::4]))
    >>> ensemble.predict(X[:5]).shape
    (5,)
    """

    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"blend": {}}

    weighing = (
        "Members are averaged by their precision; the public records then decide how far the "
        "average is followed."
    )

    def may_weigh(self, weights: Array) -> bool:
        """Tell whether these are shares of the part that rests on the members, at most all."""
        whole = float(weights.sum())
        few = 1 / len(weights)
        most = max(self.max_weight, few) * (1 + 1e-9)
        return bool((weights >= 0).all() and (weights <= most).all()) and whole <= 1 + 1e-9

    @classmethod
    def planned(
        cls, learner: PrivateLearner[Any, Any], epsilons: Sequence[float], *, public: bool
    ) -> dict[str, Self]:
        """Return the default settings, where their result can be predicted."""
        return {"public blend": cls()} if public and is_logistic(learner) else {}

    def is_predictable(self, learner: PrivateLearner[Any, Any], *, public: bool) -> bool:
        """Tell whether there are public records and the loss is logistic."""
        return public and is_logistic(learner)

    def expected(self, joining: Joining) -> Outlook:
        """Return the law of the best ridge around the scaled average."""
        return joining.blend(joining.shares(self))

    def combine(
        self, members: Sequence[Any], public: Public | None = None, **charge: Unpack[Charge]
    ) -> LinearEnsemble:
        """Return the blend of linear `members` and labelled `public` records."""
        task = read_labelled(self, members, public)
        ball = Ball.of(task)
        ridge = Ridge(ball.records(task.X), task.y, task.loss)
        known = Known.of(task, ball, ridge)
        step, alone = step_between(len(task.y)), strengths_alone(len(task.y))
        around = alone if known is None else np.arange(2.0, -4.1, -step)
        # How much is expected of a strength before any label is looked at; the average alone is one
        # step beyond.
        expected = np.ones(len(around) + 1)
        if known is not None:
            expected /= 1 + (np.array([around[0] + step, *around]) / EXPECTED_WITHIN) ** 2
        centre = ball.enter(*task.average)
        odds = 1.0 if known is None else max(LEAST_ODDS, known.signal(centre, ridge) ** 2)
        prior = np.concatenate(
            [odds * expected / expected.sum(), np.full(len(alone), 1 / len(alone))]
        )
        candidates = [
            (True, math.inf),
            *((True, t) for t in 10.0**around),
            *((False, t) for t in 10.0**alone),
        ]
        mixture = Mixture.by_cross_validation(
            ridge, centre, candidates, self.random_state, prior=prior, known=known
        )
        return task.ensemble(*ball.leave(mixture.fit()), task.shares * mixture.trust)


def fit_public(learner: PrivateLearner[Any, Any], public: Public) -> LinearEnsemble:
    """Return the blend without members: what labelled public records give by themselves.

    The ridges around zero that `PublicBlend` tries, mixed by their cross-validated likelihood. A
    choice by the number of mistakes, which few records hardly tell apart, does worse
    (benchmarks/public_alone.md).

    Privacy
    -------
    None for the public records, and no other is read.
    """
    classes, ball, mixture = _mix_public(learner, public)
    return LinearEnsemble(classes, *ball.leave(mixture.fit()), np.zeros(0), None, ())


def draw_public(
    learner: PrivateLearner[Any, Any], public: Public, normal: Callable[[int], Array]
) -> LinearEnsemble:
    """Return one of the models that labelled public records leave possible, at random.

    What fits the records best is smoother than what they come from. This is a draw from the normal
    law around the likeliest ridge with the likelihood's own curvature, and with the ridge's width
    in directions of which the records say nothing.

    Privacy
    -------
    None for the public records, and no other is read.
    """
    classes, ball, mixture = _mix_public(learner, public)
    ridge, (_, strength) = mixture.ridge, mixture.candidates[int(np.argmax(mixture.weights))]
    Z = np.asarray(dense(ridge.Z))
    theta = ridge.fit(mixture.centre, strength)
    scores = np.asarray(theta @ Z.T)
    bends, width = np.asarray(ridge.loss.bend(scores, ridge.y)), 1.0
    # Of classes, each one's scores are drawn by themselves.
    bends = bends[None] if bends.ndim == 1 else np.einsum("kkn->kn", bends)
    if ridge.loss.n_outputs == 1 and not ridge.loss.monotone:  # numbers, with a spread of their own
        width = float(np.sqrt(np.mean(np.square(scores - ridge.y))))
    moved = []
    for bend in bends:
        curvature = (Z.T * bend) @ Z + strength * len(Z) * np.eye(Z.shape[1])
        moved.append(np.linalg.solve(np.linalg.cholesky(curvature).T, normal(Z.shape[1])) * width)
    theta = theta + np.asarray(moved).reshape(np.shape(theta))
    return LinearEnsemble(classes, *ball.leave(theta), np.zeros(0), None, ())


def _mix_public(
    learner: PrivateLearner[Any, Any], public: Public
) -> tuple[Array | None, Ball, Mixture]:
    """Return the classes, the ball that records are in, and the ridges around zero, weighed."""
    name, classes = "A model of public records", getattr(learner, "classes", None)
    X, labels = read_features(public, name, None)
    if not learner.predicts_number:
        classes = np.unique(labels) if classes is None else np.asarray(classes)
    y, loss, scale = encode_labels(labels, classes, getattr(learner, "huber", None), name)
    outputs = loss.n_outputs
    intercept = bool(getattr(learner, "fit_intercept", True))
    ball = Ball.around(X, with_intercept=intercept, outputs=outputs, label_scale=scale)
    ridge = Ridge(ball.records(X), y, loss)
    zero = np.zeros(ridge.Z.shape[1] if outputs == 1 else (outputs, ridge.Z.shape[1]))
    candidates = [(False, t) for t in 10.0 ** strengths_alone(len(y))]
    return classes, ball, Mixture.by_cross_validation(ridge, zero, candidates, 0)
