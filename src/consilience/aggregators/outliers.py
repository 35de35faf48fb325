"""Which members of a release are unlike the others, beyond what their noise explains.

An alert for people, never a reason to leave a member out: a site may differ because its records do.
Everything here is computed from what was released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from consilience.aggregators.base import Array, Ensemble
from consilience.aggregators.members import Member, align_members, as_members
from consilience.tables.public import Public

FEWEST = 3  # members; of two, nobody can say which one is unlike the other
FAR = 5.0  # standard deviations, or typical distances
MOST_RECORDS = 2000  # that members are asked about
LARGEST_SHARE = 0.5


def find_far(members: Sequence[Any], ensemble: Ensemble, *records: Public | None) -> dict[int, str]:
    """Return, by their place, what is unusual about members.

    Linear members are compared by their coefficients, others by what they say about the first
    public `records` that there are. A member that decides more than all others together is also
    unusual.
    """
    found = as_members(members)
    if len(found) < FEWEST:
        return {}
    far: dict[int, str] = {}
    for place, share in enumerate(np.asarray(ensemble.weights).tolist()):
        if share > LARGEST_SHARE:
            far[place] = f"It has {share:.0%} of the weight, more than all others together."
    table = next((one for one in records if one is not None), None)
    if all(member.is_linear for member in found):
        return far | _far_coefficients(found)
    return far if table is None else far | _far_answers(found, table)


def _far_coefficients(members: Sequence[Member]) -> dict[int, str]:
    """Compare each member's distance from the median with its noise and the typical distance."""
    _, coef, intercept, _ = align_members(members)
    flat = np.concatenate([coef.reshape(len(members), -1), intercept], axis=1)
    distances = np.sqrt(np.mean(np.square(flat - np.median(flat, axis=0)), axis=1))
    typical = float(np.median(distances))
    far = {}
    for place, (member, distance) in enumerate(zip(members, distances.tolist(), strict=True)):
        expected = math.hypot(typical, member.to_user * math.sqrt(member.noise_variance()))
        if distance > FAR * expected:
            far[place] = (
                f"Its coefficients are {distance / max(expected, 1e-300):.3g} times as far from "
                "the others' median as its noise and the others' distances explain."
            )
    return far


def _far_answers(members: Sequence[Member], records: Public) -> dict[int, str]:
    """Find members that disagree with the majority more often than guessing would."""
    X: Any = records.X
    X = X[:MOST_RECORDS]
    answers: Array = np.stack([np.asarray(member.learner.predict(X)) for member in members])
    labels = np.unique(answers)
    codes: Array = np.searchsorted(labels, answers)
    votes = np.stack([(codes == code).sum(axis=0) for code in range(len(labels))])
    disagrees: Array = (codes != votes.argmax(axis=0)).mean(axis=1)
    n_records, guessing = codes.shape[1], 1 - 1 / max(2, len(labels))
    limit = guessing + FAR * math.sqrt(guessing * (1 - guessing) / max(n_records, 1))
    usual = float(np.median(disagrees))
    return {
        place: f"It contradicts the majority on {share:.0%} of the public records; usual is "
        f"{usual:.0%}."
        for place, share in enumerate(disagrees.tolist())
        if share > limit and usual < guessing
    }
