"""The command `consilience audit`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from typer import Option

from consilience.cli.command import Answer
from consilience.cli.options import LearnerOptions, Neighbours, Relation


class Attack(StrEnum):
    """How an audit attacks."""

    EXACT = "exact"
    SAMPLE = "sample"


def audit(
    options: LearnerOptions,
    epsilon: Annotated[float, Option(help="The privacy budget of one training.")],
    neighbours: Relation = None,
    attack: Annotated[
        Attack, Option(help="Search the exact density, or train many times.")
    ] = Attack.EXACT,
    records: Annotated[int, Option(help="Number of records in the made-up data sets.")] = 100,
) -> Answer:
    """Attack a learner's privacy on made-up records and report the largest epsilon that is proven.

    The exit code is 1 if the claimed epsilon is false. An attack that finds nothing proves nothing:
    the proofs are in docs/guarantees/.
    """
    from consilience.auditing.audit import audit as attack_learner
    from consilience.progress import showing

    size = records if neighbours is Neighbours.ADD_REMOVE else None
    learner = options.build(epsilon=epsilon, neighbours=neighbours, public_size=size)
    with showing("Attacking", None):
        report = attack_learner(learner, kind=attack.value, n_records=records)
    return Answer(report.as_dict(), str(report), code=0 if report.passed else 1)
