"""Axes for a study's projection: of its public records, or of moments that were released before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from consilience.errors import SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.learners.axes import MomentAxes, PublicAxes
from consilience.statistics.moments import Moments, MomentsRegressor
from consilience.statistics.total import Total
from consilience.study.check import build_for

if TYPE_CHECKING:
    from consilience.study.study import Study


def axes_of_public(study: Study, folder: str | os.PathLike[str], n_components: int) -> PublicAxes:
    """Return the principal axes of the study's public records, whose file is in `folder`."""
    public = study.public
    if public is None:
        raise SettingsError(
            f"Study {study.name!r} names no public records, whose axes could be found. Nothing was "
            "written. Add a [public] part, take the axes of moments that were released before, or "
            'let each site find axes of its own: kind = "private".'
        )
    records = public.read(study.schema, folder)
    return PublicAxes.among(records, n_components, public.sha256, study.schema.norm)


def axes_of_release(
    study: Study, release: Release, files: Sequence[Contribution], n_components: int
) -> MomentAxes:
    """Return the principal axes of the moments behind a release of an earlier `study`.

    Of a study with a blind hub the release carries their total. Otherwise `files` are the
    contributions that it was made of.

    Privacy
    -------
    Post-processing of what was released, and so of the same guarantee. No record is seen.
    """
    statistic = build_for(study, study.epsilon_range[1])
    if not isinstance(statistic, Moments | MomentsRegressor) or release.study != study.reference:
        raise SettingsError(
            f"The release is none of study {study.name!r}, or the study adds up no Moments. "
            "Nothing was computed. Name a release of a study of Moments, and that study."
        )
    if release.total is not None:
        statistic.events_ = tuple(statistic.planned(1))
        total = statistic.behind(release.total.words)
    else:
        made = {source.digest for source in release.sources}
        if {file.digest for file in files} != made or len(files) != len(made):
            raise SettingsError(
                f"The release is made of {len(made)} contributions, and these files are not "
                "exactly those. Nothing was computed. Name all of them."
            )
        total = Total.for_schema(study.schema).add([study.accept(one) for one in files])
    pca = statistic.principal_axes(total, n_components)
    return MomentAxes.of(pca.components_, release.digest)


def find_axes_problem(study: Study, folder: str | os.PathLike[str]) -> str | None:
    """Return why the study's axes are not those of the public file in `folder`, or None.

    There is nothing to compare if the file is not there, or the axes are not of public records.
    """
    public = study.public
    if study.projection is None or public is None or not (Path(folder) / public.file).exists():
        return None
    records = public.read(study.schema, folder)
    return study.projection.problem_among(records, study.schema.norm)
