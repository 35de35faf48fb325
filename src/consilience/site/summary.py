"""A site's own exact records beside a released summary of all sites': a page that never leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from consilience.errors import SettingsError
from consilience.evaluation.table_one import FALSE_ALARM, Comparison, compare
from consilience.files.certificate import Page
from consilience.files.durable import write_durably
from consilience.site.adapt import MODE
from consilience.site.folder import SiteFolder
from consilience.statistics.base import Statistic
from consilience.statistics.summary import SummaryTable

STAYS = (
    "This page is computed from this site's exact records. No noise protects it: do not pass it "
    "on. If the site withdraws from the study because of it, others see that it did, and no "
    "epsilon is charged for what that says about the records."
)
REASONS = (
    "A difference may be one of patients, of how values were measured or coded, or of the study's "
    "file being read differently here. Look for the reason before you train together."
)


@dataclass(frozen=True)
class ComparedSummary:
    """What was compared, and the page about it in the site's folder."""

    comparison: Comparison
    file: Path
    page: Page


def compare_summary(site: SiteFolder, name: str, table: object) -> ComparedSummary:
    """Compare a table of the site's own records with the summary that was fetched last.

    Privacy
    -------
    Nothing leaves and nothing is charged. The page is an exact statement about the records; only
    the owner of the site's folder can read its file.
    """
    study, release = site.study(name), site.release(name)
    total = release.ensemble
    if not isinstance(total, SummaryTable):
        raise SettingsError(
            f"Release {release.sequence} of {name!r} is no summary. Nothing was compared. This is "
            'for studies with [statistic] name = "Summary".'
        )
    learner = cast(Statistic, study.build(study.epsilon_range[0]))
    learner.set_params(epsilon=math.inf, delta=0.0)
    learner.schema, learner.sharing = study.schema, None
    own = cast(SummaryTable, learner.fit(table).finish(learner.summed()))
    found = compare(own, total, study.schema)
    file = site._place(name) / f"summary-{release.sequence:04d}.html"
    page = page_of(site.name, f"release {release.sequence} of {name}", found)
    with site._working():
        write_durably(file, page.as_html().encode(), mode=MODE)
    return ComparedSummary(found, file, page)


def page_of(site: str, release: str, found: Comparison) -> Page:
    """Return what the site reads."""
    n = len(found.differences)
    said = (
        f"{found.n_compared:,} numbers of this site were compared with those of all sites. "
        + (
            "None differs by more than noise and chance explain."
            if not n
            else f"{n:,} {'differs' if n == 1 else 'differ'} by more than noise and chance explain."
        )
        + f" Of sites that are alike, at most about {FALSE_ALARM:.0%} are told of any difference."
    )
    rows = [each.row for each in found.differences]
    return Page(
        f"{site} beside {release}",
        [
            ("Is this site like the others?", [said, *([REASONS] if n else [])], rows),
            ("This page stays here", [STAYS], []),
        ],
    )
