"""What is true of a study, a site, a release or an invitation now, and the sentences about it.

Pages, the API and refusals take every sentence about something that can change from here, where it
follows from what the database says. A template holds only sentences that are true in every state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from consilience.blind.roster import Rule
from consilience.hub.blind import BlindStudies, Waiting
from consilience.hub.store import Row, Store, now
from consilience.hub.store.database import fetch_rows
from consilience.hub.store.sites import COUNTED_SECONDS, find_end, find_return
from consilience.hub.store.studies import absent_of, alerts_of
from consilience.hub.store.tables import (
    IN_USE,
    contributions,
    files,
    invitations,
    releases,
    rosters,
    sites,
    studies,
)
from consilience.protocol import Refusal
from consilience.study.records import PublicFile
from consilience.study.study import Study


class Words(NamedTuple):
    """What stands in place of something that is not there: a heading, and what to expect."""

    heading: str
    text: str


@dataclass(frozen=True)
class Returning:
    """A site that withdrew more than once of late, and until when it may not submit again."""

    site: str
    count: int
    until: str | None

    @property
    def text(self) -> str:
        """Say it in a sentence."""
        said = f"The site {self.site!r} withdrew {self.count} times within 30 days."
        if self.until is not None:
            said += f" The hub accepts its next contribution from {show_time(self.until)} on."
        return said


def why_gone(study: Study) -> str:
    """Say why a release was withdrawn."""
    left_out = ", or the batch of one was left out" if study.is_blind else ""
    return f"a contribution in it was withdrawn{left_out}"


def show_time(text: str) -> str:
    """Return a time of a row as sentences show it."""
    return f"{text[:16].replace('T', ' ')} UTC"


_WHOLE_BATCH = (
    "Once a batch is listed to the keyholders, nobody can take one file out of its sum: if a site "
    "in it withdraws, the whole batch leaves"
)
_AGAIN = ", and the others can hand over again, which costs them as much again."
_NEVER_AGAIN = ", and nobody can hand over again after the study was closed."


@dataclass(frozen=True)
class StudyState:
    """Everything about a study that can change."""

    row: Row
    study: Study
    sites: Counter[str]  # by status
    contributions: Counter[str]  # by state
    contributing: int  # enrolled sites that did not join only to fetch
    contributed: int  # those of them whose contribution is in use
    invitations: int  # that can still be used
    releases: Counter[str]  # by state
    current: Row | None
    absent: str  # whose contributions are left out of the current release, and why
    alerts: Mapping[str, str]  # what is unusual about members of the current release
    files: Sequence[Row]
    returning: Sequence[Returning]
    return_seconds: float
    has_roster: bool = False  # frozen, of a blind study
    has_weights: bool = False  # of the site that weighs the others

    @property
    def is_open(self) -> bool:
        """Whether the study takes sites and contributions."""
        return bool(self.row["status"] == "open")

    @property
    def in_use(self) -> int:
        """How many contributions are in use."""
        return sum(self.contributions[state] for state in IN_USE)

    @property
    def members(self) -> int:
        """How many contributions in use are combined, without one that only weighs the others."""
        return self.in_use - self.has_weights

    @property
    def is_enough(self) -> bool:
        """Whether there are as many contributions as a release needs."""
        return self.members >= self.study.min_sites

    @property
    def lacks_weights(self) -> bool:
        """Whether a site has to weigh the contributions first."""
        return self.study.at is not None and not self.has_weights

    @property
    def can_come(self) -> bool:
        """Whether there can still be a release."""
        return self.is_open or (self.is_enough and not self.lacks_weights)

    @property
    def missing(self) -> Sequence[Row]:
        """The public files that were not uploaded."""
        return [file for file in self.files if not file["there"]]

    @property
    def is_due(self) -> bool:
        """Whether the hub is about to combine the study by itself."""
        return not self.study.draws_noise and self.row["changes"] > self.row["combined"]

    @property
    def withheld(self) -> str | None:
        """Why a release of what is in use was made and not published."""
        return self.row["problem"] if self.row["withheld"] else None

    @property
    def failed(self) -> str | None:
        """Why no release could be made of what is in use, and whether it is tried again."""
        problem = self.row["problem"]
        if problem is None or self.row["withheld"]:
            return None
        if self.study.draws_noise:
            return f"{problem} Nobody tries again unasked; a coordinator can ask for a release."
        said = f"{problem.removesuffix('.')}. The hub tries again after the next change."
        return f"{said} {self._never_weighed_again}".strip()

    @property
    def _never_weighed_again(self) -> str:
        """Say that nobody can weigh the contributions any more, if a site has to and cannot."""
        at = self.study.at
        if at is None or self.is_open:
            return ""
        return f"The study is closed, so {at!r} cannot weigh the others again."

    @property
    def can_ask(self) -> bool:
        """Whether a coordinator can ask for a release."""
        return self.row["withheld"] or (self.study.draws_noise and self.is_enough)

    @property
    def can_draw(self) -> bool:
        """Whether a release that draws noise would be made of other contributions than the last."""
        is_new = self.current is None or self.current["change"] < self.row["changes"]
        return is_new and self.is_enough and not self.withheld

    # -------------------------------------------------------------------------------- in words

    @property
    def next_release(self) -> str:
        """Say what has to happen until there is a release, or that there will be none."""
        least, noisy = self.study.min_sites, self.study.draws_noise
        if self.withheld:
            return "The hub made one and keeps it back until a coordinator decides about it."
        if not self.is_enough and not self.is_open:
            return (
                f"A release needs {least} contributions, fewer are in use, and the study is "
                "closed, so none will be made."
            )
        if not self.is_enough and noisy:
            return f"A coordinator can ask for one when {least} contributions are in use."
        if not self.is_enough:
            return f"The hub makes one when {least} contributions are in use."
        if self.missing:
            return f"It needs the public file {self.missing[0]['file']}, which is missing."
        if self.lacks_weights and self.is_open:
            return (
                f"The site {self.study.at!r} has to weigh the models of the others first: "
                "consilience site aggregate."
            )
        if self.lacks_weights:
            return (
                f"The site {self.study.at!r} has not weighed the models of the others, and the "
                "study is closed, so none will be made."
            )
        if self.study.is_blind and not self.is_due and self.failed is None:
            return "The hub makes one when all keyholders have opened a batch."
        if noisy:
            return "A coordinator can ask for one."
        if self.is_due:
            return "The hub makes one as soon as its turn comes."
        said = "The hub could not make one. The study's coordinators see why."
        if self.study.at is None:
            return said
        again = (
            f"If a contribution was withdrawn or replaced since {self.study.at!r} weighed them, "
            "that site has to weigh them again: consilience site aggregate."
        )
        return f"{said} {self._never_weighed_again or again}"

    @property
    def no_release(self) -> Words:
        """Say why no release is current."""
        if self.withheld:
            heading = "No release is published."
        elif self.releases["withdrawn"]:
            heading = f"Every release was withdrawn, because {why_gone(self.study)}."
        elif self.can_come:
            heading = "There is no release yet."
        else:
            heading = "There is no release."
        return Words(heading, self.next_release)

    @property
    def no_release_briefly(self) -> str:
        """Say the same in two or three words."""
        if self.withheld:
            return "one is withheld"
        if self.releases["withdrawn"]:
            return "all were withdrawn"
        return "none yet" if self.can_come else "none"

    @property
    def no_sites(self) -> Words:
        """Say why there are no sites."""
        if not self.is_open:
            return Words("No site joined.", "The study is closed, so none can join.")
        return Words(
            "No site has joined yet.",
            "Make an invitation and send its code to the site through a channel you trust.",
        )

    @property
    def no_contributions(self) -> Words:
        """Say why there are no contributions."""
        if not self.is_open:
            return Words("Nothing was submitted.", "The study is closed, so nothing can be.")
        handed_in = " The releases of branches are handed in by their coordinators."
        return Words(
            "Nothing has been submitted yet.",
            "Sites train on their own records and submit the result; it appears here at once."
            + handed_in * bool(self.study.branches),
        )

    @property
    def no_quality(self) -> Words:
        """Say what is measured, where there is no release."""
        if self.study.test is None:
            text = "Releases are measured on public test records, and this study names none."
        else:
            text = "Releases are measured on the study's public test records as they are made."
        return Words("There is no release to measure.", text)

    @property
    def sites_briefly(self) -> str:
        """Say how many of the sites' contributions are in use."""
        if not self.sites:
            return "none yet" if self.is_open else "none"
        if not self.contributing and not self.in_use:
            return "none that contributes"
        others = self.in_use - self.contributed
        said = f"{self.contributed:,} of {self.contributing:,} in use"
        return said + (f", and {others:,} of sites that can submit no more" if others else "")

    @property
    def needed_briefly(self) -> str:
        """Say how many contributions a release needs, if there are fewer."""
        return "" if self.is_enough else f"{self.study.min_sites} needed"

    @property
    def invitations_briefly(self) -> str:
        """Say how many invitations can be used."""
        if not self.is_open:
            return "closed to new sites"
        count = self.invitations or "no"
        return f"{count} open {'invitations' if self.invitations > 1 else 'invitation'}"

    @property
    def waiting(self) -> str:
        """Say how many contributions are missing, and whose."""
        at = self.study.at
        beside = "" if at is None else f" beside that of {at!r}, which weighs them"
        said = (
            f"A release needs {self.study.min_sites} contributions{beside}, and {self.members} are "
            f"in use. Enrolled sites that may contribute: {self.contributing}, with a contribution "
            f"in use: {self.contributed}."
        )
        if self.study.is_blind and not self.has_roster:
            return f"{said} No site can train before the roster is frozen."
        said += " Sites train and submit on their own; you do not have to start anything."
        if self.study.branches:
            said += (
                " The coordinator of each branch hands its release in: consilience release "
                "hand-over."
            )
        return said

    @property
    def needed(self) -> str:
        """Say how many contributions a release needs."""
        at = self.study.at
        weights = "" if at is None else f" and the weights of {at}"
        return f"contributions; a release needs {self.study.min_sites}{weights}"

    @property
    def closing(self) -> list[str]:
        """Say what closing the study leaves and what it ends."""
        said = ["Sites can still withdraw what they contributed."]
        if self.current is not None:
            said.insert(0, "Sites can still fetch its releases.")
        if self.study.draws_noise:
            said.append("You can still ask for releases of what was contributed.")
        elif self.study.is_blind and not self.has_roster:
            said.append("The roster is not frozen and cannot be any more, so no site can train.")
        elif self.study.is_blind:
            said.append(_WHOLE_BATCH + _NEVER_AGAIN)
        elif self.lacks_weights:
            said.append(
                f"The site {self.study.at!r} has not weighed the models of the others and cannot "
                "any more: no further release will be made."
            )
        elif self.study.at is not None:
            said.append(
                f"If a site withdraws, there is no further release: {self.study.at!r} cannot weigh "
                "the others again."
            )
        else:
            said.append(
                "If a site withdraws, the hub combines the remaining contributions again, as long "
                f"as there are {self.study.min_sites}."
            )
        if not self.is_enough:
            said.append(
                f"A release needs {self.study.min_sites} contributions, and {self.members} are in "
                "use: no further release will be made."
            )
        if self.invitations:
            ends = "invitation stops" if self.invitations == 1 else "invitations stop"
            said.append(f"{self.invitations} open {ends} working.")
        return said

    @property
    def before_publishing(self) -> list[str]:
        """Say what to consider before a withheld release is published."""
        said = ["Ask the sites that changed last whether their contributions are right."]
        if self.study.draws_noise:
            said.append(
                "Its noise is charged already. A release of other contributions, or another one of "
                "these after you published it, costs as much again."
            )
        elif self.study.is_blind:
            said.append(
                "No single contribution can be taken out of its sum. A batch can be left out as a "
                "whole, on the study's page."
            )
        elif self.study.at is not None:
            said.append(
                "If you revoke a site's key and withdraw its contribution, "
                f"{self.study.at!r} has to weigh the others again."
                if self.is_open
                else "If you revoke a site's key and withdraw its contribution, no release can be "
                f"made any more: {self.study.at!r} cannot weigh the others again."
            )
        elif self.in_use > self.study.min_sites:
            said.append(
                "Revoking a site's key and withdrawing its contribution makes the hub combine the "
                "others."
            )
        else:
            said.append(
                "If you revoke a site's key and withdraw its contribution, fewer are left than a "
                "release needs."
            )
        if self.current is None:
            said.append("Until you publish it, sites have no release.")
        else:
            said.append(f"Until you publish it, sites have release {self.current['sequence']}.")
        said.append("The audit log records that you published it.")
        return said

    @property
    def effects(self) -> list[str]:
        """Say what a withdrawal does in this study."""
        said = [
            "It keeps the contribution out of every later release.",
            "It stops the hub from offering releases that rest on the site. The newest release "
            "that does not, if there is one, is current again.",
        ]
        if self.study.draws_noise:
            said.append("A coordinator can then ask for a release of the remaining contributions.")
        elif self.study.is_blind:
            said.append(_WHOLE_BATCH + (_AGAIN if self.is_open else _NEVER_AGAIN))
        elif self.study.at is not None:
            said.append(
                f"The site {self.study.at!r} then has to weigh the others again."
                if self.is_open
                else f"No further release is made: {self.study.at!r} cannot weigh the others again."
            )
        else:
            said.append(
                "The hub combines the remaining contributions again, if there are "
                f"{self.study.min_sites} or more."
            )
        if self.is_open and self.return_seconds:
            said.append(
                "A site that withdraws more than once within 30 days has to wait before its next "
                "contribution is accepted."
            )
        return said

    @property
    def confirmed(self) -> set[str]:
        """What may be said to have been done to the study."""
        uploaded = {"uploaded"} if any(file["there"] for file in self.files) else set()
        return uploaded | {"created" if self.is_open else "closed"}


@dataclass(frozen=True)
class SiteState:
    """Everything about a site of a study that can change."""

    row: Row
    of: StudyState
    contributions: Sequence[Row]  # newest first

    @property
    def is_enrolled(self) -> bool:
        """Whether the site's key is valid."""
        return bool(self.row["status"] == "enrolled")

    @property
    def in_use(self) -> Row | None:
        """The site's contribution that is in use."""
        return next((row for row in self.contributions if row["state"] in IN_USE), None)

    @property
    def may_submit(self) -> bool:
        """Whether the site may contribute, now or after a while."""
        return self.of.is_open and self.is_enrolled and not self.row["fetch_only"]

    @property
    def is_bound(self) -> bool:
        """Whether the site is on a frozen roster, so that it can have no other key."""
        return self.of.has_roster and not self.row["fetch_only"]

    @property
    def may_return(self) -> bool:
        """Whether a coordinator can invite the site again."""
        return self.of.is_open and not self.is_enrolled and not self.is_bound

    @property
    def returning(self) -> Returning | None:
        """How often the site withdrew, if it has to wait."""
        if not self.may_submit:
            return None
        count, until = find_return(self.row, self.contributions, self.of.return_seconds)
        return None if until is None else Returning(self.row["name"], count, until)

    @property
    def key(self) -> str:
        """Say which key the site has."""
        enrolled = f"Enrolled {show_time(self.row['enrolled'])}."
        start = self.row["key"][:16]
        return f"{enrolled} {'Its key is' if self.is_enrolled else 'Its last key was'} {start}…"

    @property
    def nothing(self) -> str:
        """Say what to expect of a site that submitted nothing."""
        if self.row["fetch_only"]:
            return "This site joined only to fetch releases."
        if not self.of.is_open:
            return "The study is closed, so nothing can be submitted."
        if not self.is_enrolled:
            return "The site's key is revoked, so it can submit nothing."
        if self.of.study.is_blind and not self.of.has_roster:
            return "No site can train before the roster is frozen."
        if self.row["name"] in self.of.study.branches:
            return "Its coordinator hands it in with “consilience release hand-over”."
        how = "weighs the others with “consilience site aggregate”"
        if self.row["name"] != self.of.study.at:
            how = "trains with “consilience site train”"
        return f"The site {how} and submits with “site submit”."

    @property
    def revoking(self) -> list[str]:
        """Say what revoking the site's key means."""
        said = [f"The key {self.row['key'][:16]}… will never work again in this study."]
        if not self.of.is_open:
            said.append("The study is closed, so the site cannot return.")
        elif self.is_bound:
            said.append("The roster is frozen with this key: the site can return only to fetch.")
        else:
            said.append("The site can return with a new key and an invitation in its name.")
        if self.contributions:
            said.append("What it has spent still counts.")
        if self.in_use is not None:
            said.append("Its contribution stays in use unless you also withdraw it.")
        return [*said, *self.withdrawing]

    @property
    def withdrawing(self) -> list[str]:
        """Say what withdrawing the site's contribution does to others."""
        if self.in_use is None or not self.of.study.is_blind:
            return []
        return [_WHOLE_BATCH + (_AGAIN if self.of.is_open else _NEVER_AGAIN)]

    @property
    def confirmed(self) -> set[str]:
        """What may be said to have been done to the site."""
        return set() if self.is_enrolled else {"revoked"}


@dataclass(frozen=True)
class BlindState:
    """Everything about a blind study that can change beside what every study has."""

    rule: Rule
    is_open: bool  # the study
    roster: Row | None
    sites: Sequence[Mapping[str, str]]  # on the roster: name, key, checked_by
    signed: Collection[str]  # the keys of the pad holders that signed it
    files: Sequence[tuple[Row, Collection[str]]]  # that wait, and who acknowledged each
    waiting: Waiting
    batches: Sequence[Row]
    refusals: Sequence[Row]  # what keyholders sent and were refused, newest first

    @property
    def guarantees(self) -> list[str]:
        """Say what protects a site, and from whom."""
        n, spare, least = len(self.rule.keyholders), self.rule.spare, self.rule.least
        who = "the keyholder follows" if n == 1 else f"at least one of the {n} keyholders follows"
        most = "one" if spare == 1 else f"{spare}"
        return [
            f"If {who} the protocol, and all but {most} of the sites that a site counts on do, "
            "nobody, the hub included, learns more of that site than the noisy sum of a whole "
            f"batch tells: its file's guarantee holds. A batch has at least {least} of these "
            "sites, itself included.",
            "If the hub and all keyholders collude, or the hub and all other sites do, only a "
            "site's own share of the noise is left. Each file states what that guarantees, which "
            "is less.",
            "Nobody can check numbers that nobody sees: a site that sends wrong numbers, or a "
            "keyholder that answers with a wrong sum, spoils a batch, and learns nothing by it.",
        ]

    @property
    def roster_text(self) -> str:
        """Say whether the roster is frozen."""
        if self.roster is None and not self.is_open:
            return "The roster was not frozen before the study was closed, so no site can train."
        if self.roster is None:
            return (
                "The roster is not frozen. Until it is, sites can enrol and none can train. "
                "Afterwards nobody can be added."
            )
        return (
            f"The roster was frozen at {show_time(self.roster['frozen'])} with {len(self.sites)} "
            "sites. Nobody can be added, and no key can change."
        )

    @property
    def keyholders(self) -> list[tuple[str, str]]:
        """Say of each keyholder, by its key, what it has done and what it is waited for."""
        return [(key, self._describe(key)) for key in self.rule.keyholders]

    def _describe(self, key: str) -> str:
        if self.roster is None:
            return (
                "It can sign the roster when that is frozen."
                if self.is_open
                else "It has nothing to sign."
            )
        if key not in self.signed:
            return "It has not signed the roster."
        waits = sum(key not in done for _, done in self.files)
        unopened = [
            str(batch["number"])
            for batch in self.batches
            if batch["state"] == "listed" and key not in _openers(batch)
        ]
        said = "It has signed the roster."
        if waits:
            said += f" Files that it has not acknowledged: {waits}."
        if unopened:
            said += f" Batches that it has not opened: {', '.join(unopened)}."
        return said if waits or unopened else f"{said} Nothing waits for it."

    @property
    def awaited(self) -> str:
        """Say what has to happen next, and who has to do it."""
        if self.roster is None:
            if not self.is_open:
                return "Nothing is waited for."
            return "The coordinator freezes the roster when all sites have enrolled."
        unsigned = [key for key in self.rule.keyholders if key not in self.signed]
        if unsigned and self.is_open:
            return (
                f"{len(unsigned)} of {len(self.rule.keyholders)} keyholders have to sign the "
                "roster: consilience keyholder countersign. Until then no site can train."
            )
        listed = [batch for batch in self.batches if batch["state"] == "listed"]
        if listed:
            lacking = {
                key for key in self.rule.keyholders for one in listed if key not in _openers(one)
            }
            return (
                f"{len(lacking)} of {len(self.rule.keyholders)} keyholders have to open what is "
                "listed: consilience keyholder open."
            )
        if self.waiting.chosen:
            return (
                f"A batch of {len(self.waiting.chosen)} files can be listed. The hub does so by "
                "itself when all sites on the roster have handed over, or when no further site "
                "has for a while; a coordinator can do so now."
            )
        if self.files and not self.is_open:
            return (
                f"A batch needs {self.rule.least} sites whose files all keyholders have "
                "acknowledged, and the study is closed, so no further file comes."
            )
        if self.files:
            return (
                f"A batch needs {self.rule.least} sites whose files all keyholders have "
                "acknowledged. Sites whose records are in a batch already can lend their noise: "
                "consilience site noise."
            )
        if not self.is_open or (self.batches and not self.waiting.missing):
            return "Nothing is waited for."
        return "Sites on the roster train and submit: consilience site train."

    @property
    def waits(self) -> list[tuple[str, str]]:
        """Say of each file that waits whose it is, and why it waits."""
        ready = {file.digest for file in self.waiting.chosen}
        return [
            (
                row["site"],
                "It is ready for the next batch."
                if row["digest"] in ready
                else f"{self.waiting.reasons.get(row['digest'], 'It has just arrived')}.",
            )
            for row, _ in self.files
        ]

    @property
    def confirmed(self) -> set[str]:
        """What may be said to have been done to the study beside what every study has."""
        return set() if self.roster is None else {"frozen"}

    @property
    def can_train(self) -> bool:
        """Whether sites can mask their sums."""
        return self.roster is not None and set(self.rule.keyholders) <= set(self.signed)

    @property
    def leaving_out(self) -> list[str]:
        """Say what it means to leave a batch out."""
        again = "Its sites can hand over again, which costs each of them as much again."
        return [
            "It cannot be undone. No later release contains the batch, and the hub stops offering "
            "releases that rest on it. Copies that were fetched before still exist.",
            again if self.is_open else "Its sites cannot hand over again: the study is closed.",
            "What they have spent still counts.",
        ]

    @property
    def can_list(self) -> bool:
        """Whether a coordinator can list a batch now."""
        return bool(self.waiting.chosen)

    def describe_batch(self, batch: Row) -> str:
        """Say what became of a batch."""
        opened = len(_openers(batch) & set(self.rule.keyholders))
        if batch["state"] == "withdrawn":
            said = "It was left out as a whole."
            return f"{said} Its sites can hand over again." if self.is_open else said
        if batch["state"] == "opened":
            return "All keyholders have opened it."
        return f"{opened} of {len(self.rule.keyholders)} keyholders have opened it."


def _openers(batch: Row) -> set[str]:
    return {opening["holder"] for opening in batch["openings"]}


def read_blind(
    blind: BlindStudies, store: Store, study: Study, *, is_open: bool
) -> BlindState | None:
    """Return the state of a blind study; None if its hub is not blind."""
    if study.blind is None:
        return None
    name, row = study.name, store.roster(study.name)
    sites = blind.roster(study).sealed.facts["sites"] if row is not None else ()
    return BlindState(
        rule=study.blind,
        is_open=is_open,
        roster=row,
        sites=sorted(sites, key=lambda site: str(site["name"])),
        signed={card["holder"] for card in store.cards(name)},
        files=store.acknowledged(name),
        waiting=blind.find_waiting(study),
        batches=store.batches(name),
        refusals=store.refusals(name),
    )


def invitation_state(row: Row, study: Row) -> str:
    """Return whether an invitation is open, used, void or expired."""
    if row["used"] is not None:
        return "used" if row["used_by"] else "void"  # restoring a backup voids what was open
    if row["expires"] <= now():
        return "expired"
    return "open" if study["status"] == "open" else "void"


# ------------------------------------------------------------------------- read from the database


def read_study(store: Store, row: Row, study: Study) -> StudyState:
    """Return the state of one study."""
    return read_studies(store, [(row, study)])[0]


def read_studies(store: Store, asked: Sequence[tuple[Row, Study]]) -> list[StudyState]:
    """Return the states of some studies; how many statements that takes does not depend on it."""
    names = [row["name"] for row, _ in asked]
    shas = {part.sha256 for _, study in asked for part in study.files}
    with store.reading() as db:
        by_site = _group(db, (sites.c.status, sites.c.fetch_only), sites.c.study.in_(names))
        by_state = _group(db, (contributions.c.state,), contributions.c.study.in_(names))
        by_release = _group(db, (releases.c.state,), releases.c.study.in_(names))
        in_use = contributions.join(
            sites,
            (sites.c.study == contributions.c.study) & (sites.c.name == contributions.c.site),
        )
        n_sites = sa.func.count(contributions.c.site.distinct())
        of_sites = sa.select(contributions.c.study, n_sites).select_from(in_use)
        of_sites = of_sites.where(
            contributions.c.study.in_(names),
            contributions.c.state.in_(IN_USE),
            sites.c.status == "enrolled",
            sites.c.fetch_only.is_(False),
        )
        contributed = {
            name: int(n) for name, n in db.execute(of_sites.group_by(contributions.c.study))
        }
        unused = sa.select(invitations.c.study, sa.func.count()).join(studies)
        unused = unused.where(
            invitations.c.study.in_(names),
            invitations.c.used.is_(None),
            invitations.c.expires > now(),
            studies.c.status == "open",
        )
        usable = {name: int(n) for name, n in db.execute(unused.group_by(invitations.c.study))}
        is_current = releases.c.study.in_(names), releases.c.state == "current"
        rows = fetch_rows(db, sa.select(releases).where(*is_current))
        current = {row["study"]: row for row in rows}
        digests = [row["digest"] for row in rows]
        alerts, absent = alerts_of(db, digests), absent_of(db, digests)
        there = {
            row["sha256"]: row
            for row in fetch_rows(db, sa.select(files).where(files.c.sha256.in_(shas)))
        }
        returning = _read_returning(db, names, store.return_seconds)
        frozen = set(
            db.execute(sa.select(rosters.c.study).where(rosters.c.study.in_(names))).scalars()
        )
        weighers = [(row["name"], study.at) for row, study in asked if study.at is not None]
        is_weigher = sa.tuple_(contributions.c.study, contributions.c.site).in_(weighers)
        of_weighers = sa.select(contributions.c.study).where(
            is_weigher, contributions.c.state.in_(IN_USE)
        )
        weighed = set(db.execute(of_weighers).scalars()) if weighers else set()
    states = []
    for row, study in asked:
        name, release = row["name"], current.get(row["name"])
        of_status: Counter[str] = Counter()
        for (status, _), n in by_site.get(name, {}).items():
            of_status[str(status)] += n
        states.append(
            StudyState(
                row=row,
                study=study,
                sites=of_status,
                contributions=_by_first(by_state.get(name, {})),
                contributing=by_site.get(name, {}).get(("enrolled", False), 0),
                contributed=contributed.get(name, 0),
                invitations=usable.get(name, 0),
                releases=_by_first(by_release.get(name, {})),
                current=release,
                absent=absent.get(release["digest"], "") if release else "",
                alerts=alerts.get(release["digest"], {}) if release else {},
                files=_list_files(study, there),
                returning=returning.get(name, []) if row["status"] == "open" else [],
                return_seconds=store.return_seconds,
                has_roster=name in frozen,
                has_weights=name in weighed,
            )
        )
    return states


def why_no_release(store: Store, row: Row, study: Study) -> Refusal:
    """Return what a site that asks for the current release is told if there is none."""
    return Refusal("no-release", " ".join(read_study(store, row, study).no_release))


def _group(
    db: sa.Connection,
    columns: Sequence[sa.Column[str] | sa.Column[bool]],
    which: sa.ColumnElement[bool],
) -> dict[str, dict[tuple[object, ...], int]]:
    """Count rows by study and by the values of some columns."""
    study = columns[0].table.c.study
    query = sa.select(study, *columns, sa.func.count()).where(which).group_by(study, *columns)
    counts: dict[str, dict[tuple[object, ...], int]] = {}
    for name, *values, n in db.execute(query):
        counts.setdefault(name, {})[tuple(values)] = int(n)
    return counts


def _by_first(counts: Mapping[tuple[object, ...], int]) -> Counter[str]:
    return Counter({str(value): n for (value,), n in counts.items()})


def _list_files(study: Study, there: Mapping[str, Row]) -> list[Row]:
    """List a study's public files, what they are used for, and whether the hub has them."""
    parts: dict[str, tuple[PublicFile, list[str]]] = {}
    for part, use in ((study.public, "combining"), (study.test, "measuring releases")):
        if part is not None:
            parts.setdefault(part.sha256, (part, []))[1].append(use)
    return [
        {
            "file": part.file,
            "sha256": part.sha256,
            "uses": " and ".join(uses),
            "there": there.get(part.sha256),
        }
        for part, uses in parts.values()
    ]


def _read_returning(
    db: sa.Connection, names: Iterable[str], first: float
) -> dict[str, list[Returning]]:
    """Return by study the sites that withdrew more than once of late."""
    own = (sites.c.study == contributions.c.study) & (sites.c.name == contributions.c.site)
    count, newest = sa.func.count(), sa.func.max(contributions.c.changed)
    query = sa.select(contributions.c.study, contributions.c.site, count, newest)
    query = query.select_from(contributions.join(sites, own)).where(
        contributions.c.study.in_(names),
        contributions.c.state == "withdrawn",
        contributions.c.changed > now(seconds=-COUNTED_SECONDS),
        contributions.c.changed > sites.c.enrolled,
        sites.c.status == "enrolled",
    )
    group = contributions.c.study, contributions.c.site
    found: dict[str, list[Returning]] = {}
    for study, site, n, at in db.execute(query.group_by(*group).having(count > 1).order_by(*group)):
        found.setdefault(study, []).append(Returning(site, int(n), find_end(int(n), at, first)))
    return found
