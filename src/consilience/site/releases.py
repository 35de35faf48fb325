"""What a site checks of a release before it keeps it, and what it says of its own part in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from consilience.errors import ConsilienceError, ContributionRejected
from consilience.files.contribution import take_apart
from consilience.files.durable import move_durably, sync, write_durably
from consilience.files.log import ReleaseLog
from consilience.files.release import Release, Source
from consilience.files.sealed import SealedFile
from consilience.learners.base import PrivateLearner
from consilience.privacy.guarantee import Guarantee, compose, show_bound
from consilience.site.client import FOLDER, to_json
from consilience.site.folder import cost_of
from consilience.site.history import Seen, merge_logs
from consilience.site.keys import SiteKeys
from consilience.study.branches import find_below
from consilience.study.check import check_release, is_at_most

MOST_SECONDS_OF_LOG = 300.0  # for what the hub says of the time between two releases
ASIDE = "before-"  # how the names of folders begin with releases that were put aside


class SiteReleases(SiteKeys):
    """What a site does with the releases of its studies."""

    def fetch(self, name: str, *, new_log: bool = False) -> Release | None:
        """Fetch the current release and check it; None while there is none.

        The hub must have signed it, it must fit the study, and the log that it carries must
        continue the one that this site knows, or the release must be in that one: a hub offers an
        earlier release again when a site withdraws. `new_log` accepts another log, or none, after
        the hub's operator has explained it; earlier releases are moved into a folder beside.
        """
        with self._working():
            self._complete_rotation(name)
            joined, place = self._joined(name), self._place(name)
            content = self._hub(joined).fetch_release(name)
            if content is None:
                return None
            part = place / "release.part"
            write_durably(part, content)
            try:
                release = check_release(self.study(name), Release.load(part, key=joined.hub_key))
                self._check_own_part(name, release)
                self.check_sources(name, release)
                try:
                    known = self._reach(name, self.log(name), release)
                    self._check_log(name, known, release)
                except ConsilienceError:
                    if not new_log:
                        raise
                    known = None
                    self._put_aside_releases(name, release)
                if release.log is not None:
                    known = merge_logs(known, release.log.add(release.digest))
                log = None if known is None else known.as_dict()
                # A shared folder names no key: the first release fixes it.
                hub_key = joined.hub_key or release.sealed.key
                # The log comes first: what is here is then in the log, wherever the machine stops.
                self._write_joined(
                    name, replace(joined, release=release.sequence, hub_key=hub_key, log=log)
                )
                move_durably(part, place / release.filename)
            finally:
                part.unlink(missing_ok=True)
            return release

    def _reach(self, name: str, known: ReleaseLog | None, release: Release) -> ReleaseLog | None:
        """Return the known log, longer by what the hub says of the time before the release's log.

        What the hub says is not signed, but the release's log begins with the head that it leads
        to, so `_check_log` finds any digest that is wrong.
        """
        if known is None or release.log is None:
            return known
        hub, digests, missing = self._hub(self._joined(name)), list(known.digests), True
        began = time.monotonic()
        while missing and known.before + len(digests) < release.log.before:
            page = hub.fetch_log(name, known.before + len(digests))
            digests += page[: release.log.before - known.before - len(digests)]
            # However small the pages are that a hub makes of it.
            missing = bool(page) and time.monotonic() - began < MOST_SECONDS_OF_LOG
        return replace(known, digests=tuple(digests))

    def _check_log(self, name: str, known: ReleaseLog | None, release: Release) -> None:
        """Refuse a release that does not continue what this site has seen: its log and its files.

        The two agree, unless an earlier version was killed between writing them.
        """
        newest, here = self._joined(name).release, self.releases(name)
        log, problem = release.log, None
        # Perhaps an earlier one, which a hub offers again when a site withdraws.
        listed = known is not None and known.lists(release.sequence, release.digest)
        if here.get(release.sequence, release.digest) != release.digest:
            problem = "is here already with other content"
        elif newest is not None and release.sequence < newest and not listed:
            problem = f"is older than release {newest} that is here"
        elif log is None:
            if listed or release.sequence in here:
                return  # accepted before
            problem = "carries no log of the releases before it"
        elif known is not None and not known.overlaps(log.add(release.digest)):
            problem = (
                f"comes too long after release {known.length}, and the hub does not say what was "
                "in between"
            )
        else:
            number = Seen(here, known).find_difference(log.add(release.digest))
            if number is not None:
                problem = f"was made after another release {number} than the one this site saw"
        if problem is not None:
            raise ContributionRejected(
                f"The hub's release {release.sequence} of {name!r} {problem}. It was not kept. Ask "
                "the hub's operator; if a hub that was restored, or is of an earlier version, "
                "explains it, fetch with --new-log."
            )

    def seen(self, name: str) -> Seen:
        """Return the releases of a study that this site saw."""
        aside = []
        for place in sorted(self._place(name).glob(f"{ASIDE}*")):
            facts = self._read(f"{place.relative_to(self.folder)}/log.json") or {"log": None}
            aside.append(replace(Seen.from_dict(facts), kept=self.releases(name, place)))
        return Seen(self.releases(name), self.log(name), tuple(aside))

    def _put_aside_releases(self, name: str, release: Release) -> None:
        """Move the releases of another log, and the log, into a new folder: they are evidence."""
        place, seen = self._place(name), self.seen(name)
        files = sorted(place.glob("release-*.safetensors"))
        if not (files or seen.digests):
            return
        stem, number = f"{ASIDE}{release.digest[:16]}", 1
        while (aside := place / (stem if number == 1 else f"{stem}-{number}")).exists():
            number += 1
        aside.mkdir()
        write_durably(aside / "log.json", to_json(replace(seen, aside=()).as_dict()))
        for file in files:
            file.replace(aside / file.name)
        sync(aside)

    def _check_own_part(self, name: str, release: Release) -> None:
        """Refuse a release that states of this site's contribution what its file does not.

        Of the guarantee the site knows the least: the cost of the contribution and of those before
        it that it handed over. Of the model it knows everything, where the release holds members.
        """
        by_digest = {file.digest: file for file in self._contributions(name).values()}
        members: Sequence[Any] = release.ensemble.members or (None,) * len(release.sources)
        for source, member in zip(release.sources, members, strict=True):
            file = by_digest.get(source.digest)
            if file is None:
                continue
            facts = file.facts
            fits = (
                source.sequence == facts["sequence"]
                and source.size in (None, facts["size"])
                and (
                    _is_lent(facts, release)
                    or is_at_most(self._paid(name, source.digest), source.guarantee)
                )
            )
            if not fits:
                raise ContributionRejected(
                    f"The hub's release {release.sequence} of {name!r} states another number, "
                    f"size or guarantee for this site's contribution {facts['sequence']} than its "
                    "file here does. It was not kept. Ask the hub's operator."
                )
            if member is not None and not _is_same_model(member, file):
                raise ContributionRejected(
                    f"The hub's release {release.sequence} of {name!r} holds another model in the "
                    f"place of this site's contribution {facts['sequence']} than its file here "
                    "does. It was not kept. Ask the hub's operator."
                )

    def _paid(self, name: str, digest: str, *, sent: bool = False) -> Guarantee:
        """Return the cost of a contribution and of those before it that the hub confirmed.

        With `sent`, also of those before it that it may have without having confirmed them.
        """
        joined, proofs = self._joined(name), self._proofs(name)
        there = {*joined.handed_over, *(joined.sent if sent else ())} & proofs.keys()
        last = _order(proofs[digest])
        counted = {digest, *(each for each in there if _order(proofs[each]) < last)}
        costs = [cost for each in counted if (cost := cost_of(proofs[each])) is not None]
        if not costs:  # noise only
            stated = Guarantee.from_dict(proofs[digest]["guarantee"])
            return replace(stated, epsilon=0.0, delta=0.0, assumptions=())
        return compose(*costs)

    def describe_own_part(self, name: str, release: Release) -> str:
        """Say whether a release lists this site's own contribution."""
        files = self._contributions(name).values()
        numbers = {file.digest: file.facts["sequence"] for file in files}
        own = [source for source in release.sources if source.site == self.name]
        own.sort(key=lambda source: -source.guarantee.epsilon)  # noise that it lent comes last
        if any(source.digest in numbers and source.site != self.name for source in release.sources):
            return "Warning: it lists a contribution of this site under another name."
        branch = find_below(release.sources, self.name, self._own_keys())
        if not own and branch is not None:
            return (
                f"It lists this site below its branch {branch!r}, with what it handed over to the "
                "study of that branch."
            )
        if not own:
            submitted = self._joined(name).submitted
            return (
                "It lists nothing of this site."
                if submitted is None
                else f"It does not list this site's contribution {submitted}."
            )
        if own[0].digest not in numbers:
            return (
                "Warning: it lists a contribution in this site's name that is not in this folder."
            )
        return self._describe_listed(name, release, own[0], numbers[own[0].digest])

    def _describe_listed(self, name: str, release: Release, own: Source, number: int) -> str:
        """Say what is known of this site's contribution in a release that lists it."""
        joined, said = self._joined(name), [f"It lists this site's contribution {number}"]
        said[0] += (
            " with the numbers of its file."
            if release.ensemble.members
            else ". Its numbers are combined with those of others, so that nothing here can tell "
            "what was made of them."
        )
        gone = joined.withdrawn
        if gone and number <= gone["sequence"] and release.sequence > gone["releases"]:
            said.append(
                "Warning: it was withdrawn, which was confirmed, and this release was not known "
                "here then. Ask the hub's operator."
            )
        newest = joined.submitted or 0
        if number < newest and not (gone and newest <= gone["sequence"]):
            costs = [cost for cost in self.handed_over(name) if cost is not None]
            counted = (
                f" With all that was handed over, epsilon is {show_bound(compose(*costs).epsilon)}."
                if costs
                else ""
            )
            said.append(
                f"Contribution {newest} was handed over later, and is not in this release."
                f"{counted} A release that was made since then has to count it."
            )
        paid = self._paid(name, own.digest, sent=True)
        if not is_at_most(paid, own.guarantee):
            lacks = (
                "Warning: it states epsilon = {} for this site. Contributions that were "
                "withdrawn before are not in that, although they were handed out; with them, "
                "epsilon is {}. Ask the coordinator."
                if joined.hub.startswith(FOLDER)
                else "It states epsilon = {} for this site. Contributions that were sent before, "
                "and that the hub did not confirm, are not in that; if it has them, epsilon is "
                "{}."
            )
            said.append(lacks.format(show_bound(own.guarantee.epsilon), show_bound(paid.epsilon)))
        return "\n".join(said)


def _order(facts: Mapping[str, Any]) -> tuple[int, str]:
    """Return what contributions are ordered by: two have one number after an old copy was used."""
    return int(facts["sequence"]), str(facts.get("created", ""))


def _is_lent(facts: Mapping[str, Any], release: Release) -> bool:
    """Tell whether a file is of noise only, of a site whose records the release states beside it.

    What the site paid is stated there.
    """
    sources = release.sources
    return bool((facts.get("blind") or {}).get("only_noise")) and any(
        source.site == facts["site"] and source.guarantee.epsilon > 0 for source in sources
    )


def _is_same_model(member: PrivateLearner[Any, Any], file: SealedFile) -> bool:
    """Tell whether a member of a release has the settings and numbers of a file."""
    facts, tensors = take_apart(member)
    settings = (member.read_settings(each["settings"]) for each in (facts, file.facts))
    stated = all(facts[name] == file.facts[name] for name in ("learner", "size", "classes"))
    return (
        stated
        and next(settings) == next(settings)
        and tensors.keys() == file.facts["tensors"].keys()
        and all(np.array_equal(one, file.tensor(name)) for name, one in tensors.items())
    )
