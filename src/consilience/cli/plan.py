"""The command `consilience plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

import consilience as cs
from consilience.cli.command import Answer
from consilience.cli.options import (
    RelatedLearnerOptions,
    StudyPath,
    refuse_beside_study,
    require,
)
from consilience.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much there is of everything."""

    records: Annotated[int, Option(help="Number of records at one site.")]
    sites: Annotated[
        int | None,
        Option(help="How many such sites join; by default 1, or what the study needs at least."),
    ] = None
    features: Annotated[
        int | None, Option(help="Number of encoded features; not needed with --public.")
    ] = None
    hub_records: Annotated[
        int | None,
        Option(help="Number of public records at the hub; by default those of --public."),
    ] = None


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

    def read(self) -> Any:
        """Return the encoded records, or None."""
        from consilience.tables.inference import read_public

        if (self.public is None) != (self.label is None):
            raise SettingsError(
                "Advice from public records needs both --public and --label, but only one was "
                "given. Nothing was computed. Give both, or --features alone."
            )
        if self.public is None or self.label is None:
            return None
        return read_public(self.public, self.label, drop=self.drop or ())


def plan(
    *,
    study: StudyPath = None,
    sizes: Sizes,
    epsilon: Annotated[
        float | None,
        Option(help="The budget of one training; by default the largest that the study allows."),
    ] = None,
    options: RelatedLearnerOptions,
    public: PublicOptions,
    target: Annotated[
        float, Option(help="Report what an excess loss of this size would need.")
    ] = 0.01,
) -> Answer:
    """Predict the accuracy to expect from a number of records, sites and an epsilon.

    Spends no budget and reads no private record. A study file says what would be trained and how
    it is combined. For several sites, every aggregator is predicted, one is recommended, and you
    learn how many sites, public records or how much epsilon a target needs. With public records
    that resemble the sites' own, the advice rests on them; without, it assumes a loss with the
    same curvature in all directions.
    """
    asked: dict[str, Any] = {
        "n_records": sizes.records,
        "n_sites": sizes.sites,
        "n_features": sizes.features,
        "n_public": sizes.hub_records,
        "epsilon": epsilon,
        "target": target,
    }
    if study is not None:
        refuse_beside_study(options, public)
        advice = cs.plan(study, **asked)
    else:
        require(epsilon, "--epsilon")
        advice = cs.plan(**asked, public=public.read(), **options.settings())
    return Answer(advice.as_dict(), str(advice))
