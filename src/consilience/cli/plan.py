"""The command `consilience plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from consilience.cli.command import Answer
from consilience.cli.options import LearnerOptions, Relation, find_learner
from consilience.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class PublicOptions:
    """Public records that resemble those of the sites."""

    public: Annotated[
        Path | None, Option(help="CSV or Parquet file of labelled public records.")
    ] = None
    label: Annotated[str | None, Option(help="Name of the label column in that file.")] = None
    drop: Annotated[
        list[str] | None, Option(help="A column of it that is not a feature. Repeatable.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much there is of everything."""

    records: Annotated[int, Option(help="Number of records at one site.")]
    features: Annotated[
        int | None, Option(help="Number of encoded features; not needed with --public.")
    ] = None
    sites: Annotated[int, Option(help="How many such sites would join.")] = 1
    hub_records: Annotated[
        int | None,
        Option(help="Number of public records at the hub; by default those of --public."),
    ] = None


def plan(
    sizes: Sizes,
    epsilon: Annotated[float, Option(help="The privacy budget of one training.")],
    options: LearnerOptions,
    records: PublicOptions,
    neighbours: Relation = None,
    target: Annotated[
        float, Option(help="Report what an excess loss of this size would need.")
    ] = 0.01,
) -> Answer:
    """Predict the accuracy to expect from a number of records, features and an epsilon.

    Spends no budget and reads no private record. For several sites, every aggregator is predicted,
    one is recommended, and you learn how many sites, public records or how much epsilon a target
    needs. With public records that resemble the sites' own, the advice rests on them; without, it
    assumes a loss with the same curvature in all directions.
    """
    from consilience.planning.plan import plan as advise
    from consilience.tables.inference import read_public

    if (records.public is None) != (records.label is None):
        raise SettingsError(
            "Advice from public records needs both --public and --label, but only one was given. "
            "Nothing was computed. Give both, or --features alone."
        )
    public = None
    if records.public is not None and records.label is not None:
        public = read_public(records.public, records.label, drop=records.drop or ())
    learner = find_learner(options.learner)
    advice = advise(
        n_records=sizes.records,
        n_features=sizes.features,
        epsilon=epsilon,
        delta=options.delta,
        n_sites=sizes.sites,
        n_public=sizes.hub_records,
        public=public,
        target=target,
        learner=learner,
        mechanism=options.mechanism.value,
        regularization=options.regularization,
        neighbours=learner.default_neighbours if neighbours is None else neighbours.value,
    )
    return Answer(advice.as_dict(), str(advice))
