"""The command `consilience audit`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

from typer import Option

import consilience as cs
from consilience.cli.command import Answer
from consilience.cli.options import (
    Neighbours,
    RelatedLearnerOptions,
    StudyPath,
    refuse_beside_study,
    require,
)

if TYPE_CHECKING:
    from consilience.auditing.audit import Kind


class Attack(StrEnum):
    """How an audit attacks."""

    EXACT = "exact"
    SAMPLE = "sample"


def audit(
    *,
    study: StudyPath = None,
    epsilon: Annotated[
        float | None,
        Option(help="The budget of one training; by default the largest that the study allows."),
    ] = None,
    options: RelatedLearnerOptions,
    attack: Annotated[
        Attack | None,
        Option(help="Search the exact density (by default, where it applies), or train often."),
    ] = None,
    records: Annotated[int, Option(help="Number of records in the made-up data sets.")] = 100,
) -> Answer:
    """Attack the privacy of a study's learner and report the largest epsilon that is proven.

    The attack uses made-up records. The exit code is 1 if the claimed epsilon is false. An attack
    that finds nothing proves nothing: the proofs are in docs/guarantees/.
    """
    from consilience.progress import showing

    kind = cast("Kind | None", attack and attack.value)
    with showing("Attacking", None):
        if study is not None:
            refuse_beside_study(options)
            report = cs.audit(study, kind=kind, epsilon=epsilon, n_records=records)
        else:
            hides_size = options.neighbours is Neighbours.ADD_REMOVE
            size = {"public_size": records} if hides_size else {}
            learner = options.build(epsilon=require(epsilon, "--epsilon"), **size)
            report = cs.audit(learner, kind=kind, n_records=records)
    return Answer(report.as_dict(), str(report), code=0 if report.passed else 1)
