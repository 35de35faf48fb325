"""Which members of a release are unlike the others, beyond what noise and their spread explain.

An alert for people, never a reason to leave a member out: a site may differ because its records do.
Everything here is computed from what was released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from consilience.aggregators.base import Array, Ensemble
from consilience.aggregators.members import Member, align_members, as_members, dense
from consilience.learners.ball import intercept_to_user, into_ball, label_bound
from consilience.privacy.vector_noise import is_in_objective, is_vector_noise, noise_variance
from consilience.tables.public import Public

FEWEST = 3  # members; of two, nobody can say which one is unlike the other
FAR = 5.0  # standard deviations, or typical distances
FALSE_ALARMS = 1e-3  # chance that a coordinate of any of several honest, equal members is named
TO_DEVIATION = 1.4826  # from the median distance to the standard deviation of a normal law
MOST_RECORDS = 2000  # that members are asked about
FEWEST_LABELLED = 200  # records that say what a model of such records is
LARGEST_SHARE = 0.5


def find_heavy(ensemble: Ensemble) -> dict[int, str]:
    """Return, by its place, which member decides more than all others together."""
    shares = np.asarray(ensemble.weights).tolist()
    return {
        place: f"It has {share:.0%} of the weight, more than all others together."
        for place, share in enumerate(shares)
        if share > LARGEST_SHARE and len(shares) >= FEWEST
    }


def find_far(
    members: Sequence[Any], *records: Public | None, names: Sequence[str] = ()
) -> dict[int, str]:
    """Return, by their place, how members differ from the others beyond their noise.

    Linear members are compared by their coefficients, as a whole and one by one (`names` are those
    of the features), others by what they say about the first public `records` that there are.
    Labelled records also tell which noise a linear model would need to be one of such records.
    """
    found = as_members(members)
    if len(found) < FEWEST:
        return {}
    if all(member.is_linear for member in found):
        labelled = [one for one in records if one is not None and one.y is not None]
        largest = max(labelled, key=lambda one: len(np.asarray(one.y)), default=None)
        return _far_minima(found, largest) | _far_coefficients(found, names)
    table = next((one for one in records if one is not None), None)
    return {} if table is None else _far_answers(found, table)


def _far_coefficients(members: Sequence[Member], names: Sequence[str]) -> dict[int, str]:
    """Compare distances from the median with noise and typical distances.

    A whole model is compared by its root mean square, in which one coefficient among many is
    hardly seen, so the largest one is compared too.
    """
    _, coef, intercept, _ = align_members(members)
    # In a user's coordinates a constant is as many times noisier as rows may be longer than 1.
    norms = np.array([getattr(member.learner, "data_norm", 1.0) for member in members])
    flat = np.concatenate([coef, (intercept / norms[:, None])[:, :, None]], axis=2)
    away = np.abs(flat - np.median(flat, axis=0)).reshape(len(members), -1)
    noise = np.array([member.to_user * math.sqrt(member.noise_variance()) for member in members])
    distances = np.sqrt(np.mean(np.square(away), axis=1))
    typical = float(np.median(distances))
    whole = distances / np.maximum(np.hypot(noise, typical), 1e-300)
    single = away / np.maximum(_largest_expected(away, noise, typical), 1e-300)
    titles = names if len(names) == coef.shape[2] else range(1, coef.shape[2] + 1)
    titles = [*(f"coefficient of {title!r}" for title in titles), "constant"]
    far = {}
    for place in range(len(members)):
        most = int(np.argmax(single[place]))
        if whole[place] > FAR:
            far[place] = (
                f"Its coefficients are {whole[place]:.3g} times as far from the others' median as "
                "its noise and the others' distances explain."
            )
        elif single[place, most] > 1:
            far[place] = (
                f"Its {titles[most % len(titles)]} is {single[place, most]:.3g} times as far from "
                "the others' median as noise and chance explain in any of so many."
            )
    return far


def _largest_expected(away: Array, noise: Array, typical: float) -> Array:
    """Return the distance that each coordinate of honest members may have, if records are alike.

    A coordinate of vector noise has at most the tails of Laplace noise of the same variance, and
    the median has noise too. By how much more than their noise few members differ is hardly known,
    hence Student's tails, and hence the typical distance beside the spread of the one coordinate.
    """
    chance = FALSE_ALARMS / away.size
    usual = float(np.median(noise))
    spread = np.hypot(TO_DEVIATION * np.median(away, axis=0), typical)
    beyond = np.sqrt(np.maximum(np.square(spread) - 2 * usual**2, 0))
    by_noise = math.log(1 / chance) / math.sqrt(2) * np.hypot(noise, usual)
    by_chance = float(stats.t.isf(chance / 2, len(away) - 1)) * beyond
    return np.asarray(np.hypot(by_noise[:, None], by_chance))


def _far_minima(members: Sequence[Member], records: Public | None) -> dict[int, str]:
    """Find models that no likely noise makes of records like the public ones.

    Noise in the objective is what balances its gradient at the minimum, and public records show
    the gradient up to chance. This sees what the distance between coefficients hides, because that
    one allows for noise along directions in which records hardly matter.
    """
    if records is None or len(np.asarray(records.y)) < FEWEST_LABELLED:
        return {}
    needed = [_needed_noise(member, records) for member in members]
    if any(one is None for one in needed):
        return {}
    ratios = np.array(needed, np.float64)
    usual = max(1.0, float(np.median(ratios)))  # sites' records may differ from the public ones
    return {
        place: f"Were its records like the public ones, it would need {ratio / usual:.3g} times "
        "as much noise as it drew."
        for place, ratio in enumerate(ratios.tolist())
        if ratio > FAR * usual
    }


def _needed_noise(member: Member, records: Public) -> float | None:
    """Return the noise that would explain a member, in units of its noise and of chance.

    None unless its noise is in the objective of one problem with a known number of records.
    """
    learner = member.learner
    noises = [one for one in member.model_events if is_vector_noise(one)]
    facts = [getattr(learner, name, None) for name in ("mechanism", "unit", "neighbours")]
    if facts != ["objective", "record", "replace-one"] or learner.projection is not None:
        return None
    if len(noises) != 1 or len(np.asarray(member.coef)) != 1 or not member.size:
        return None
    (noise,) = noises
    assert is_in_objective(noise)
    bound = label_bound(learner)
    labels = np.asarray(records.y)
    if member.classes is not None:
        labels = np.where(labels == np.asarray(member.classes)[-1], 1.0, -1.0)
    else:
        labels = np.clip(labels.astype(np.float64) / bound, -1, 1)
    vector = np.asarray(member.coef).ravel() / member.to_user
    if member.has_constant:
        vector = np.append(vector, np.asarray(member.intercept) / intercept_to_user(learner))
    X = np.asarray(into_ball(dense(records.X), learner))
    n_classes = 0 if member.classes is None else len(member.classes)
    slopes = learner.loss(n_classes).slope(X @ vector, labels)[:, None] * X
    gradient = member.size * slopes.mean(axis=0) + noise.strong_convexity * vector
    chance = member.size**2 * (1 / member.size + 1 / len(X)) * slopes.var(axis=0).sum()
    drawn = len(vector) * noise_variance(noise, len(vector))
    return float(np.linalg.norm(gradient) / math.sqrt(max(chance + drawn, 1e-300)))


def _far_answers(members: Sequence[Member], records: Public) -> dict[int, str]:
    """Find members that disagree with the majority more often than guessing would.

    A noisy tree errs in whole leaves, so the share of records on which pure noise disagrees varies
    far more than by the choice of records. How far is not known; the limit takes how widely the
    shares of all members lie apart, and where members usually disagree often, nobody is named: one
    that says the opposite could not be told from noise. Noise also makes trees that always say the
    same, so every answer of the majority counts alike.
    """
    X: Any = records.X
    X = X[:MOST_RECORDS]
    answers: Array = np.stack([np.asarray(member.learner.predict(X)) for member in members])
    labels = np.unique(answers)
    codes: Array = np.searchsorted(labels, answers)
    votes = np.stack([(codes == code).sum(axis=0) for code in range(len(labels))])
    majority = votes.argmax(axis=0)
    given, numbers = np.unique(majority, return_counts=True)
    if len(given) < 2:
        return {}
    wrong: Array = codes != majority
    disagrees = np.mean([wrong[:, majority == code].mean(axis=1) for code in given], axis=0)
    n_records, guessing = len(given) * int(numbers.min()), 1 - 1 / max(2, len(labels))
    usual = float(np.median(disagrees))
    by_chance = math.sqrt(guessing * (1 - guessing) / max(n_records, 1))
    spread = TO_DEVIATION * float(np.median(np.abs(disagrees - usual)))
    limit = guessing + max(FAR * math.hypot(by_chance, spread), 2 * usual * (1 - guessing))
    return {
        place: f"It contradicts the majority on {share:.0%} of the public records, each of the "
        f"majority's answers counting alike; usual is {usual:.0%}."
        for place, share in enumerate(disagrees.tolist())
        if share > limit and usual < guessing
    }
