"""Adapting a release at the site: the file that it is kept in, which never leaves, and its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from consilience.aggregators.base import Ensemble
from consilience.blind.pads import subtract_words
from consilience.errors import SettingsError
from consilience.evaluation.adaptation import Adapted, Comparison, adapt
from consilience.files.certificate import Page, Section
from consilience.files.contribution import Contribution
from consilience.files.durable import write_durably
from consilience.files.release import Release
from consilience.files.sealed import ADAPTED, Array, Sealed, SignedFile, refused
from consilience.learners.base import plan_fit
from consilience.privacy.guarantee import compose, show_bound
from consilience.site.folder import SiteFolder
from consilience.statistics.base import Statistic, Summed
from consilience.study.branches import find_below
from consilience.tables.schema import Schema

MODE = 0o600  # for the site's own eyes
VISIBLE = (
    "If the site withdraws from the study because of this page, others see that it did: the "
    "decision says something about the records, and no epsilon is charged for it. The same holds "
    "of telling anyone whether joining pays. Decide as if you announced this page's answer."
)

# What a release has seen of the records that it is measured on. What it is made of is the word of
# whoever signed it; {} is what bounds it whatever was done.
SUBTRACTED = (
    "The release states that this site's contribution is in it, and with which weight. That part "
    "was subtracted before the rest was adapted. If the statement is true, the adapted model is "
    "measured on records that the rest had not seen, unless {}; the release's own numbers are "
    "flattered a little where it was made with these records. {}"
)
SEEN = (
    "The release states that this site's contribution is in it, and that part cannot be "
    "subtracted. Where it was made with these records, that flatters the release and, as far as it "
    "follows the release, the adapted model. {}"
)
SUBTRACTED_SUM = (
    "The release carries the total that was opened, and states that this site's sum is in it. That "
    "sum was subtracted in whole numbers, and the rest was finished anew. If that is true, "
    "the adapted model is measured on records that the rest had not seen, unless {}. The site's "
    "own share of the noise is kept nowhere, and stays in the rest. {}"
)
UNSEEN = (
    "The release states that nothing of this site is in it. If that is true, it has not seen these "
    "records, unless {}. {}"
)
SEEN_BELOW = (
    "The release states that a branch of it was made with what this site handed over to the study "
    "of that branch, and that part cannot be subtracted. Where it was made with these records, "
    "that flatters the release and, as far as it follows the release, the adapted model. What was "
    "handed over there is in this site's ledger, with what it cost."
)
EXCEPTION = (
    "they are at another site too, or its study began with a model, or with axes, of an earlier "
    "release that had"
)
BOUND = (
    "Whatever was done with what this site handed over to the study, that cost epsilon = {} "
    "per {} in all, which bounds how far a release can have fitted to any one of these records."
)
NOTHING = "This site handed nothing over to the study that was computed from records."
STATED = (
    "This site handed over an exact model. Only what the release states, epsilon = {} per {}, "
    "bounds how far it can have fitted to any one of these records."
)


@dataclass(frozen=True)
class AdaptedRelease:
    """A release that was adapted at a site: the model, where it is kept, and the page about it."""

    model: Adapted
    file: Path
    page: Page

    @property
    def page_file(self) -> Path:
        """The page as HTML, beside the model."""
        return self.file.with_suffix(".html")


def adapt_release(site: SiteFolder, name: str, table: object, table_digest: str) -> AdaptedRelease:
    """Adapt the release that was fetched last to a table of the site's own records, and keep it.

    Of an opened total the site's own sum is subtracted if the digest of the table is that of the
    one that it was made of.

    Privacy
    -------
    Nothing leaves and nothing is charged. Model and page are exact statements about the records;
    only the owner of the site's folder can read the files.
    """
    study, release = site.study(name), site.release(name)
    others, seen = _leave_own_out(site, name, release)
    if release.total is not None and seen == SEEN:
        others = _subtract_own(site, release, table, table_digest)
        seen = SEEN if others is None else SUBTRACTED_SUM
    model = adapt(release, table, schema=study.schema, others=others)
    said = (EXCEPTION,) if seen in (SUBTRACTED, SUBTRACTED_SUM, UNSEEN) else ()
    seen = seen.format(*said, _bound(site, name, release))
    made = AdaptedRelease(
        model, _file(site, name, release), page_of(site.name, release, model, seen)
    )
    facts, tensors = _take_apart(model)
    facts |= SignedFile.stamp(study.reference, release.sequence) | {"release": release.digest}
    sealed = Sealed.seal(ADAPTED, facts, tensors, site.key)
    with site._working():
        write_durably(made.file, sealed.to_bytes(), mode=MODE)
        write_durably(made.page_file, made.page.as_html().encode(), mode=MODE)
    return made


def load_adapted(site: SiteFolder, name: str) -> Adapted:
    """Return the model that was adapted to the release that was fetched last."""
    release = site.release(name)
    path = _file(site, name, release)
    if not path.exists():
        raise SettingsError(
            f"Release {release.sequence} of {name!r} was not adapted here. Nothing was predicted. "
            f"Adapt it first: consilience site adapt {name} TABLE"
        )
    sealed = Sealed.load(path, ADAPTED)
    if sealed.key not in site._own_keys() or sealed.facts.get("release") != release.digest:
        raise refused("another site made it, or of another release")
    return _rebuild(sealed.facts, sealed.tensors, release, site.study(name).schema)


def _file(site: SiteFolder, name: str, release: Release) -> Path:
    return site._place(name) / f"adapted-{release.sequence:04d}.safetensors"


def _leave_own_out(site: SiteFolder, name: str, release: Release) -> tuple[Ensemble | None, str]:
    """Return what the other sites made of the release, if that is known, and what that means."""
    study = site.study(name)
    own = {file.digest: path for path, file in site._contributions(name).items()}
    for place, source in enumerate(release.sources):
        if source.digest in own:
            member = Contribution.load(own[source.digest], trusted=study.trusted).learner
            rest = study.build_aggregator().leave_out(release.ensemble, place, member)
            return rest, SEEN if rest is None else SUBTRACTED
    if any(source.site == site.name for source in release.sources):
        return None, SEEN
    if find_below(release.sources, site.name, site._own_keys()) is not None:
        return None, SEEN_BELOW
    return None, UNSEEN


def _subtract_own(
    site: SiteFolder, release: Release, table: object, table_digest: str
) -> Ensemble | None:
    """Return what is left of an opened total without this site's own sum; None if unknown.

    Nothing of the sum was kept, so it is added up again, of the same table.
    """
    name, total = str(release.study["name"]), release.total
    assert total is not None
    study, tables = site.study(name), site._joined(name).tables
    own = {file.digest: path for path, file in site._contributions(name).items()}
    made_of = [one.digest for one in release.sources if one.guarantee.epsilon > 0]
    listed = next((digest for digest in made_of if digest in own), None)  # not noise that it lent
    if listed is None or tables.get(listed) != table_digest:
        return None
    made = Contribution.load(own[listed])
    if not made.has_records:
        return None
    fitted: Statistic = made.learner
    learner = study.build(fitted.total_epsilon)
    assert isinstance(learner, Statistic)
    learner.schema = study.schema
    task, _ = plan_fit(learner, table, None)
    words = subtract_words(total.words, learner.scaled_total(task))
    part = fitted.behind(words)
    size, squares = (
        None if whole is None or one is None else max(whole - one, 0.0)
        for whole, one in ((total.size, part.size), (total.squares, part.squares))
    )
    rest = Summed(part.values, total.files * fitted.noise_variance(), size, squares)
    public = site.public(name)
    return fitted.finish(rest, public if public is not None and public.y is not None else None)


def _take_apart(model: Adapted) -> tuple[dict[str, Any], dict[str, Array]]:
    classes = None if model.classes_ is None else model.classes_.tolist()
    facts = {
        "classes": classes,
        "linear": model.is_linear,
        "share": model.share_,
        "unit": model.unit,
    }
    tensors = {
        "coef": model.line.coef,
        "intercept": model.line.intercept,
        "own_coef": model.own.coef,
        "own_intercept": model.own.intercept,
    }
    return facts, {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}


def _rebuild(
    facts: Mapping[str, Any], tensors: Mapping[str, Array], release: Release, schema: Schema
) -> Adapted:
    return Adapted.of_parts(
        classes=None if facts["classes"] is None else np.asarray(facts["classes"]),
        lines=[(tensors[f"{of}coef"], tensors[f"{of}intercept"]) for of in ("", "own_")],
        share=float(facts["share"]),
        schema=schema,
        release=None if facts["linear"] else release,
        unit=float(facts["unit"]),
    )


def page_of(site: str, release: Release, model: Adapted, seen: str) -> Page:
    """Return what the site reads: three models side by side, and whether joining pays for it."""
    pays, stays = model.says
    sections: list[Section] = [("Does joining pay for this site?", [pays], [])]
    if model.comparison_ is not None:
        sections.append(_measured(model.comparison_))
    sections += [
        ("What the release has seen", [seen], []),
        ("This page and the model stay here", [stays, VISIBLE], []),
    ]
    return Page(f"Release {release.sequence} of {release.study['name']} at {site}", sections)


def _bound(site: SiteFolder, name: str, release: Release) -> str:
    """Say what bounds how far a release can have fitted to one of the site's records."""
    handed_over = site.handed_over(name)
    costs = [cost for cost in handed_over if cost is not None]
    if handed_over and site.study(name).trusted:
        return STATED.format(show_bound(release.guarantee.epsilon, 4), release.guarantee.unit)
    if not costs:
        return NOTHING
    cost = compose(*costs)
    assumed = f" This assumes: {'; '.join(cost.assumptions)}." if cost.assumptions else ""
    return BOUND.format(show_bound(cost.epsilon, 4), cost.unit) + assumed


def _measured(comparison: Comparison) -> Section:
    said = (
        "Each record was held out once, with all records of its person where persons are known. "
        "Own and adapted model were fitted, and every choice made, without the records that they "
        "are measured on, but for what the release has seen of them (below). ± is one standard "
        "error."
    )
    follows = f"{comparison.share:.0%} of the way from the own model to the fit around the release"
    return (
        "Three models on this site's own records",
        [said],
        [*comparison.rows(), ("how far it follows", follows)],
    )
