"""PublicBlend: labelled public records and the sites' average, mixed by cross-validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, Unpack

import numpy as np

from consilience.aggregators.base import Array, Charge, Joining, Outlook
from consilience.aggregators.labelled import UsesLabels, is_logistic, read_labelled
from consilience.aggregators.members import LinearEnsemble
from consilience.aggregators.mixture import Ball, Known, Mixture, Ridge
from consilience.learners.base import PrivateLearner
from consilience.tables.public import Public

EXPECTED_WITHIN = 0.5  # powers of ten: a Cauchy density, so that records can always overrule it
FEW_RECORDS = 5000  # beyond, a coarser grid: the likelihood is sharp and the solver's time counts


@dataclass(eq=False)
class PublicBlend(UsesLabels):
    """Blend labelled public records with the members' average: the default if there are any.

    The logistic (softmax, squared) loss of the public records plus a ridge around a centre: the
    members' precision-weighted average, scaled to fit, or zero. Around the average the ridge is
    measured in the errors that the members' known noise and sizes imply, so that each direction
    moves as far as it is uncertain. Over both centres and all strengths of the ridge the results
    are mixed in proportion to their cross-validated likelihood, with even odds on the two centres
    and, around the average, most on the strength that the known errors imply. Public records alone
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
        ball = Ball.around(task)
        ridge = Ridge(ball.records(task.X), task.y, task.loss)
        known = Known.of(task, ball, ridge)
        step = 0.5 if len(task.y) <= FEW_RECORDS else 1.0
        alone = np.arange(0.5, -5.1, -step)
        around = alone if known is None else np.arange(2.0, -4.1, -step)
        # How much is expected of a strength before any label is looked at; the average alone is one
        # step beyond.
        expected = np.ones(len(around) + 1)
        if known is not None:
            expected /= 1 + (np.array([around[0] + step, *around]) / EXPECTED_WITHIN) ** 2
        prior = np.concatenate([expected / expected.sum(), np.full(len(alone), 1 / len(alone))])
        candidates = [
            (True, math.inf),
            *((True, t) for t in 10.0**around),
            *((False, t) for t in 10.0**alone),
        ]
        centre = ball.enter(*task.average)
        mixture = Mixture.by_cross_validation(
            ridge, centre, candidates, self.random_state, prior=prior, known=known
        )
        return task.ensemble(*ball.leave(mixture.fit()), task.shares * mixture.trust)
