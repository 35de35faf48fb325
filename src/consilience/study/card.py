"""A model card: what a release is for, what it promises, how good it is, and its limits."""

from __future__ import annotations

from consilience.errors import SettingsError
from consilience.evaluation.own_records import Section, describe_scores
from consilience.files.certificate import Page, of_release
from consilience.files.release import Release
from consilience.study.pages import of_study
from consilience.study.study import Study

_FROM_STUDY = ("Purpose", "What is learned", "Columns that are read")
_LIMITS = [
    "The numbers above hold for records like those that they were measured on. Where patients, "
    "measurements or practice differ, measure again before the model is used.",
    "The model says what goes together in the sites' records. It does not say what causes what.",
    "The guarantee limits what the release tells about any one of those whom it protects. It does "
    "not limit what is learned about groups, nor what a prediction about somebody reveals.",
]
_UNMEASURED = (
    "Nothing was released about how good the model is on the sites' own records, at each site or "
    "in subgroups. A study with the statistic Score counts that (docs/guarantees/statistics.md)."
)


def of_model(study: Study, release: Release) -> Page:
    """Return the model card of a release of a study, which was checked to fit it."""
    purpose, *told = [part for part in of_study(study).sections if part[0] in _FROM_STUDY]
    *certified, check = of_release(release).sections
    sites = [source.site for source in release.sources]
    limits = list(_LIMITS)
    scores: list[Section] = []
    try:
        scores = describe_scores(release.ensemble, study.schema, sites)
    except SettingsError:  # it has none
        limits.insert(0, _UNMEASURED)
    if not release.sealed.facts["quality"]:
        limits.insert(0, "The release was not measured on public test records.")
    return Page(
        f"Model card of {release.study['name']}, release {release.sequence}",
        [purpose, *told, *certified, *scores, ("Limits", limits, []), check],
    )
