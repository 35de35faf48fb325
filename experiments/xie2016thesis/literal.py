"""What the thesis runs and the library refuses: private weights learned from unscaled scores.

Objective perturbation needs records of length one at most. The thesis gives it the members' scores
M x as they are, and noise makes members long. So nothing here is private, whatever ε says; figure
"fully-private" measures what is lost. `FeatureMethod(epsilon=...)` is the method made private.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.aggregators.feature import FeatureEnsemble, FeatureMethod
from consilience.aggregators.labelled import Labelled
from consilience.errors import GuaranteeVoid
from consilience.learners.erm import Logistic, Problem, solve
from consilience.learners.linear import PrivateLogisticRegression
from consilience.learners.perturbation import LinearPlan, LinearTask, plan_linear
from consilience.privacy.mechanisms import Source
from consilience.privacy.spending import Account
from consilience.privacy.vector_noise import draw_vector

Array = NDArray[Any]
# Of the gradient, relative to the ridge and absolute: no proof rests on it, and scores of length
# 1,000 leave a ridge that doubles could not resolve much further.
TOLERANCE, LEAST_TOLERANCE = 1e-6, 1e-10


class UnscaledFeature(FeatureMethod):
    """The thesis' fully private feature method: algorithm 2 on the members' scores as they are.

    Privacy
    -------
    None. It runs with seeded noise only, which voids every guarantee anyway.
    """

    def _on_private(self, task: Labelled, account: Account) -> FeatureEnsemble:
        if self.noise is None or self.noise.seed is None:
            raise GuaranteeVoid(
                "Private weights were asked for from scores that nothing bounds, which hides no "
                "record. Nothing was combined. It is for experiments with a seed; use "
                "FeatureMethod(epsilon=...) for anything else."
            )
        scores = task.margins()[:, 0].T
        plan = plan_weights(float(self.epsilon or 0.0), float(self.regularization), scores.shape)

        def draw(source: Source) -> dict[str, Array]:
            noise = draw_weights_noise(plan, source, scores.shape[1])
            return {"weights": perturbed_weights(scores, task.y, plan.regularization, noise)}

        state = self._run(
            draw, plan.events, account, lambda: [one.fingerprint() for one in task.members]
        )
        weights = state["weights"]
        coef = np.einsum("n,nkd->kd", weights, task.coef)
        plain = task.ensemble(coef, np.einsum("n,nk->k", weights, task.intercept), weights)
        return FeatureEnsemble(
            plain.classes, plain.coef, plain.intercept, weights, None, plain.guarantees
        )


def plan_weights(epsilon: float, regularization: float, shape: tuple[int, ...]) -> LinearPlan:
    """Return ridge and noise of algorithm 2 (2011) for that many scores of so many members."""
    learner = PrivateLogisticRegression(
        epsilon=epsilon,
        regularization=regularization,
        mechanism="objective",
        calibration="chaudhuri2011",
        fit_intercept=False,
    )
    n, n_members = shape
    plan = plan_linear(learner, LinearTask(Logistic(), n_members, n, n))
    assert isinstance(plan, LinearPlan)
    return plan


def draw_weights_noise(plan: LinearPlan, source: Source, n_members: int) -> Array:
    """Return the noise vector of algorithm 2."""
    assert plan.noise is not None
    return draw_vector(n_members, event=plan.noise, source=source)


def perturbed_weights(scores: Array, y: Array, ridge: float, noise: Array) -> Array:
    """Return the w that minimises Σ log(1 + exp(-yᵢ w·sᵢ)) + ridge/2 ‖w‖² + noise·w.

    The solver takes records of length one at most: with s divided by the longest, v = w·longest
    minimises the same with ridge/longest² and noise/longest.
    """
    longest = float(np.linalg.norm(scores, axis=1).max()) * (1 + 1e-12)
    small = ridge / longest**2
    problem = Problem(Logistic(), regularization=small, linear=noise / longest)
    tolerance = max(TOLERANCE * small, LEAST_TOLERANCE)
    found = solve(scores / longest, y, problem, tolerance=tolerance)
    return np.asarray(found.coef, dtype=np.float64) / longest
