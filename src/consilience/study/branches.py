"""Several levels: a release of one study as a member of another, which names its hub's key.

The branch's own hub checked, combined and signed. Its release is private already, so that what the
parent study makes of it is post-processing (docs/guarantees/feature.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from consilience.aggregators.feature import Branch
from consilience.aggregators.members import LinearEnsemble
from consilience.errors import ContributionRejected, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release, Source
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.protocol import DIGEST, is_site_name

if TYPE_CHECKING:
    from consilience.study.study import Study

PREFIX = "branch-"  # how the names of branches' releases begin in a shared folder


@dataclass(frozen=True)
class BranchFile:
    """A release of a branch, under the name that the parent study gives it.

    It has what a contribution has, as far as combining asks for it.
    """

    site: str
    release: Release

    weighs = ()
    has_records = True

    @property
    def digest(self) -> str:
        """SHA-256 of what the branch's hub signed."""
        return self.release.digest

    @property
    def sequence(self) -> int:
        """Number of the release among those of its branch."""
        return self.release.sequence

    @property
    def guarantee(self) -> Guarantee:
        """What the release promises to a record at any site below it."""
        return self.release.guarantee

    @property
    def leaves(self) -> tuple[Source, ...]:
        """The sites below, at any depth."""
        return leaves_of(self.release.sources)

    @cached_property
    def learner(self) -> Branch:
        """The member that other aggregators take: sizes add up."""
        ensemble = self.release.ensemble
        assert isinstance(ensemble, LinearEnsemble)
        sizes = [leaf.size for leaf in self.leaves]
        known = all(size is not None for size in sizes)
        return Branch(
            learner=ensemble,
            classes=ensemble.classes,
            guarantee=self.guarantee,
            events=(),
            size=sum(size or 0 for size in sizes) if known else None,
            coef=np.atleast_2d(ensemble.coef),
            intercept=np.atleast_1d(ensemble.intercept),
        )

    def as_source(self) -> Source:
        """Describe it as a source of the parent's release, with the sites below it."""
        found = self.learner
        return Source(
            self.site, self.digest, self.sequence, self.guarantee, found.size, below=self.leaves
        )


Part = Contribution | BranchFile


def leaves_of(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Return the sites that sources are made of: those below a branch in place of the branch."""
    return tuple(leaf for one in sources for leaf in (one.below or (one,)))


def find_repeated(sources: Sequence[Source]) -> str | None:
    """Return the name of a site that is in two branches, by its name or its key; None if none is.

    Its records would be in the release twice, and what it is promised there would not hold.
    """
    leaves, seen = leaves_of(sources), set[str]()
    for leaf in leaves:
        marks = {f"name {leaf.site.casefold()}", f"key {leaf.key}"} - {"key None"}
        if marks & seen:
            return leaf.site
        seen |= marks
    return None


def find_below(sources: Iterable[Source], site: str, keys: Collection[str]) -> str | None:
    """Return the branch that states a site below it, by its name or one of its keys, or None."""
    for source in sources:
        if any(leaf.site == site or leaf.key in keys for leaf in source.below):
            return source.site
    return None


def rule_problems(study: Study) -> Iterable[tuple[bool, str]]:
    """Yield whether the branches that a study names can be members of it."""
    for name, rule in study.branches.items():
        fits = isinstance(rule, Mapping) and set(rule) == {"study", "key"}
        fits = fits and all(DIGEST.fullmatch(str(rule[part])) for part in ("study", "key"))
        yield (
            fits and is_site_name(name),
            "each part of [branches] needs the name of a site, and as 'study' and 'key' the digest "
            "of the branch's study and the public key of its hub",
        )
    if study.branches:
        plain = study.hub == "untrusted" and study.at is None and not study.alternatives
        yield plain, '[branches] needs hub = "untrusted", and neither at nor [alternatives]'


def accept_branch(study: Study, name: str, release: Release) -> BranchFile:
    """Return a branch's release that the parent study names, or say why it does not fit."""
    study.require_valid()
    found = BranchFile(name, release)
    for fulfilled, problem in _branch_checks(study, found):
        if not fulfilled:
            raise ContributionRejected(
                f"The release of the branch {name!r} does not fit study {study.name!r}: {problem}. "
                "It was not accepted. Ask the branch's coordinator."
            )
    return found


def _branch_checks(study: Study, found: BranchFile) -> Iterable[tuple[bool, str]]:
    """Yield the checks one by one: a later one may rely on the ones before it."""
    release, rule = found.release, study.branches.get(found.site)
    yield rule is not None, "the study names no such branch"
    assert rule is not None
    yield release.study["digest"] == rule["study"], "it is a release of another study"
    yield release.sealed.key == rule["key"], "another key signed it than that of the branch's hub"
    yield not release.sealed.facts["events"].strip("[]"), "its hub drew noise of its own"
    ensemble, classes = release.ensemble, study.schema.classes
    linear = isinstance(ensemble, LinearEnsemble)
    yield linear, "it is no linear model"
    yield release.sealed.facts["n_features"] == study.schema.n_features, "it has other columns"
    stated = None if ensemble.classes is None else np.asarray(ensemble.classes).tolist()
    yield stated == (None if classes is None else list(classes)), "it has other classes"
    relation = Neighbours(study.neighbours)
    for leaf in found.leaves:
        one = leaf.guarantee
        yield (
            one.holds and np.isfinite(one.epsilon) and (one.unit, one.neighbours)
            == (study.unit, relation),
            "what it promises to its sites is not of the kind that this study promises",
        )  # fmt: skip
    yield find_repeated(release.sources) is None, "a site is in it twice"


def read_branches(study: Study, folder: Path) -> list[BranchFile]:
    """Return the newest release of each branch that lies in a shared folder."""
    newest: dict[str, BranchFile] = {}
    for path in sorted(folder.glob(f"{PREFIX}*.safetensors")):
        release = Release.load(path)
        known = (release.study["digest"], release.sealed.key)
        names = [name for name, rule in study.branches.items()
                 if (rule["study"], rule["key"]) == known]  # fmt: skip
        if not names:
            raise SettingsError(
                f"The file {path.name!r} is of no branch that study {study.name!r} names: it is of "
                "another study, or another key signed it. Nothing was combined. Take it away, or "
                "ask the branch's coordinator."
            )
        found = accept_branch(study, names[0], release)
        if names[0] not in newest or newest[names[0]].sequence < found.sequence:
            newest[names[0]] = found
    return list(newest.values())


def load_part(study: Study, site: str, content: Path | bytes) -> Part:
    """Read what a site of a study handed in: a contribution, or a branch's release."""
    if site in study.branches:
        return accept_branch(study, site, Release.load(content))
    return study.accept(Contribution.load(content, trusted=study.trusted))


def source_checks(study: Study, sources: Sequence[Source]) -> Iterable[tuple[bool, str]]:
    """Yield whether the branches among a release's sources can be what they say."""
    alone = not study.branches or find_repeated(sources) is None
    yield alone, "a site is in two of its branches"
    for source in sources:
        yield bool(source.below) == (source.site in study.branches), "it has other branches"
        if source.below:
            below, stated = [leaf.guarantee for leaf in source.below], source.guarantee
            largest = max(one.epsilon for one in below), max(one.delta for one in below)
            alike = all(
                one.holds and (one.unit, one.neighbours) == (stated.unit, stated.neighbours)
                for one in (*below, stated)
            )
            same = alike and largest == (stated.epsilon, stated.delta)
            yield same, f"what it promises to the sites below {source.site!r} does not add up"
