"""A site: what it does with its studies, its ledger and a hub.

Nothing happens that the site did not ask for: a study is fetched and read before anything is
trained; a training is shown, approved and charged before anything is computed; and a file is
submitted by a separate command. Each step writes durably what it did before it reports it, so that
a machine that stops at any moment resumes where it was.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from consilience.errors import (
    BudgetExceeded,
    ConsilienceError,
    ContributionRejected,
    HubUnavailable,
    LedgerDamaged,
    SettingsError,
)
from consilience.evaluation.adaptation import Adapted
from consilience.files.certificate import Page
from consilience.files.contribution import (
    WITHDRAWN,
    Contribution,
    Withdrawal,
    paid_events,
    take_apart,
)
from consilience.files.durable import move_durably, sync, write_durably
from consilience.files.log import MOST_RELEASES, ReleaseLog
from consilience.files.release import Release, Source
from consilience.files.sealed import SealedFile, SigningKey
from consilience.learners.base import PrivateLearner
from consilience.privacy.accounting import alone
from consilience.privacy.guarantee import Budget, Guarantee, compose
from consilience.privacy.ledger import Amounts, Balance, Ledger, Note, show_amount
from consilience.privacy.spending import Account, Spending, is_sealed
from consilience.protocol import MOST_SKIPPED, Invitation, is_digest
from consilience.site.adapt import AdaptedRelease, adapt_release, load_adapted
from consilience.site.blind import BlindSite, Terms, alone_account
from consilience.site.client import (
    FOLDER,
    HubClient,
    SharedFolder,
    check_address,
    to_json,
)
from consilience.site.folder import Attempt, Joined, Withdrawn, cost_of, recovered_key
from consilience.site.summary import ComparedSummary, compare_summary
from consilience.study.axes import find_axes_problem
from consilience.study.branches import find_below
from consilience.study.check import check_contribution, check_release, is_at_most
from consilience.study.pages import charged_events, of_training, promise
from consilience.study.records import file_digest
from consilience.study.study import Sender, Study
from consilience.tables.mapping import Mapped, TableMapping
from consilience.tables.reading import read_table
from consilience.tables.sources import open_table

MOST_KEPT = 1 << 12  # digests of releases that a site keeps for comparing
MOST_SECONDS_OF_LOG = 300.0  # for what the hub says of the time between two releases
SPARE_BYTES = 1 << 20  # beside the numbers of a training
MAPPING = "mapping.toml"  # in a study's folder: the mapping that was approved last
ASIDE = "before-"  # how the names of folders begin with releases that were put aside


@dataclass(frozen=True)
class Preview:
    """What a training would do: the page to approve, its cost, and whether the ledger allows it."""

    page: Page
    epsilon: float
    delta: float
    left: float | None
    fits: bool
    cost: Amounts | None = None  # as the ledger counts; None of an exact model

    @property
    def digest(self) -> str:
        """SHA-256 of the page as text: what an approval refers to."""
        return hashlib.sha256(self.page.as_text().encode()).hexdigest()

    @property
    def page_to_file(self) -> Page:
        """The page together with its digest."""
        digest = [("sha256", self.digest)]
        return Page(self.page.title, [*self.page.sections, ("Digest of this page", [], digest)])


@dataclass(frozen=True)
class Recovery:
    """How many charges were entered again, and the studies of which some may still be missing.

    ``unreached`` are studies whose hub could not be asked, ``unproved`` those whose hub has
    something in the site's name that no key in the folder signed, and ``gone`` those whose hub no
    longer has the files of old contributions. ``unreadable`` are files in this folder that are
    damaged. ``decisions`` are the entries about limits and exact
    models that had to be made, and ``forgot`` says that the ledger lacked the data owner's last
    decision.
    """

    entered: int
    unreached: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    decisions: tuple[Note, ...] = ()
    forgot: bool = False
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """The releases of a study that a site saw.

    ``kept`` has the digests of those that are in its folder, by number, and ``log`` is the log that
    they carried; None if they carried none. ``aside`` are earlier histories, which the site put
    aside when it accepted another one.
    """

    kept: Mapping[int, str]
    log: ReleaseLog | None
    aside: Sequence[Seen] = ()

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `as_dict` wrote; raise an error if nothing can have written it."""
        kept = {int(number): digest for number, digest in facts.get("kept", {}).items()}
        aside = tuple(cls.from_dict({**one, "aside": ()}) for one in facts.get("aside", ()))
        if not all(1 <= number <= MOST_RELEASES and is_digest(kept[number]) for number in kept):
            raise ValueError("no log of releases")
        log = None if facts["log"] is None else ReleaseLog.from_dict(facts["log"])
        return cls(kept, log, aside)

    def as_dict(self) -> dict[str, Any]:
        """Return the facts that another site compares with its own."""
        kept = {str(number): digest for number, digest in self.kept.items()}
        facts = {"log": None if self.log is None else self.log.as_dict(), "kept": kept}
        return {**facts, "aside": [one.as_dict() for one in self.aside]} if self.aside else facts

    @property
    def digests(self) -> dict[int, str]:
        """The digests of all releases that are known one by one."""
        listed = {} if self.log is None else dict(enumerate(self.log.digests, self.log.before + 1))
        return {**self.kept, **listed}

    @property
    def histories(self) -> tuple[Seen, ...]:
        """All that this site was shown: the present history, and those that were put aside."""
        return (self, *self.aside)

    @property
    def contradiction(self) -> int | None:
        """The first number of which this site has seen two different releases; None if of none."""
        return _find_fork(self.histories)

    def compare(self, other: Seen) -> tuple[bool, str]:
        """Tell whether two sites saw the same releases, and say it in sentences."""
        same, text = self._compare_now(other)
        number = _find_fork((*self.histories, *other.histories))
        if number is not None:
            same, text = False, _two_histories(number)
        unknown = _put_aside_by_one(self, other)
        if same and unknown:
            same = False
            text += (
                " One of them was also shown another history, and accepted the present one with "
                f"--new-log. Of its releases {', '.join(map(str, unknown))} nothing tells whether "
                "the other site saw them. Ask the hub's operator."
            )
        for whose, seen in (("This site", self), ("The other site, by what it says,", other)):
            number = seen.contradiction
            if number is not None:
                text = (
                    f"{whose} was shown two different releases of number {number}, and accepted "
                    "the second with --new-log. Unless a hub that was restored explains it, the "
                    f"hub signed two histories. Keep all files, and tell the other sites. {text}"
                )
                same = False
        return same, text

    def _compare_now(self, other: Seen) -> tuple[bool, str]:
        """Compare the histories that both take for the present one."""
        if self.log is not None and other.log is not None:
            return compare_logs(self.log, other.log)
        common = sorted(self.digests.keys() & other.digests.keys())
        if not common:
            return False, "The two sites have no release in common, and one of them has no log."
        listed = ", ".join(map(str, common))
        return True, (
            f"Both sites have the same releases {listed}. Nothing tells about others: one of the "
            "two sites has no log, because its releases carried none. Ask the hub's operator why."
        )


@dataclass(frozen=True)
class Weighing:
    """A table, and the contributions of other sites that are weighed on it."""

    table: object
    members: Sequence[Contribution]


class Site(BlindSite):
    """A site's folder, and what the site does.

    Examples
    --------
    >>> import tempfile
    >>> from consilience import Budget
    >>> place = tempfile.mkdtemp() + "/ward"
    >>> site = Site.init(place, name="north", dataset="patients", budget=Budget(epsilon=3.0))
    >>> site.ledger.balance("patients").left.epsilon
    3.0
    """

    # ------------------------------------------------------------------ joining

    def join(
        self,
        address: str,
        invitation: str,
        *,
        fetch_only: bool = False,
        certificate: str | None = None,
    ) -> Study:
        """Enrol at a hub with a one-time invitation, and fetch the study and its public files.

        The invitation says which key the hub has and which study it is about, so that the first
        request is good for that hub only, and the first answer is checked as strictly as all later
        ones.
        """
        with self._working():
            address, invited = check_address(address), Invitation.parse(invitation)
            if invited is None:
                raise SettingsError(
                    "The invitation does not name the hub's key and the study, so nothing could be "
                    "signed for that hub alone. Nothing was sent. Ask the coordinator for the "
                    "whole invitation."
                )
            if certificate is not None:
                certificate = str(Path(certificate).absolute())
            hub = HubClient(address, self.key, invited.hub_key, certificate)
            study = hub.enrol(invited, self.name, fetch_only=fetch_only)
            joined = Joined(study.to_dict(), address, invited.hub_key, certificate, fetch_only)
            return self._keep_study(study, joined)

    def join_folder(self, folder: str | os.PathLike[str], *, fetch_only: bool = False) -> Study:
        """Take part through a shared folder with a study file and its public files."""
        with self._working():
            joined = Joined({}, f"{FOLDER}{Path(folder).resolve()}", fetch_only=fetch_only)
            shared = self._hub(joined)
            assert isinstance(shared, SharedFolder)
            study = Study.in_folder(shared.place)
            joined = replace(joined, study=study.to_dict())
            return self._keep_study(study, joined)

    def _keep_study(self, study: Study, joined: Joined) -> Study:
        """Keep a study and copies of its public files here; what was done in it before stays."""
        hub, place = self._hub(joined), self._place(study.name)
        if study.name in self.studies:
            kept = self._joined(study.name)
            known = (joined.hub_key and kept.hub_key, self.study(study.name).digest)
            same_hub = _place_of(kept.hub) == _place_of(joined.hub)
            if known != (joined.hub_key, study.digest) or not same_hub:
                raise SettingsError(
                    f"This site has joined a study {study.name!r} already, at another hub or in "
                    "another version. Nothing was replaced. Ask the coordinator to give the new "
                    "study another name."
                )
            chosen = ("hub", "certificate", "fetch_only", "key")
            joined = replace(kept, **{name: getattr(joined, name) for name in chosen})
        place.mkdir(parents=True, exist_ok=True)
        for file in study.files:
            write_durably(place / file.file, hub.fetch_file(study.name, file))
        problem = find_axes_problem(study, place)
        if problem is not None:
            raise SettingsError(
                f"Study {study.name!r} was not joined. {problem}. Nothing was trained or charged. "
                "Ask who wrote the study where its axes come from."
            )
        self._write_joined(study.name, joined)
        return study

    # ------------------------------------------------------------------ training

    def preview(
        self,
        name: str,
        *,
        epsilon: float | None = None,
        learner: str | None = None,
        offline: bool = False,
        skip: Sequence[str] = (),
        table: object = None,
    ) -> Preview:
        """Say what a training would disclose and cost. Nothing is trained or charged.

        No record of the `table` is read. The page says how a `Mapped` one is mapped, and which
        models a `Weighing` weighs, where the study names this site for that.
        """
        self.check_ledger()
        members = table.members if isinstance(table, Weighing) else ()
        mapping = _mapping_of(table)
        self._require_readable(name)
        study = self.study(name).choose(learner)
        if (study.at == self.name) != bool(members):
            how = "weighs the models of others (site aggregate)" if study.at == self.name else ""
            raise SettingsError(
                f"In study {name!r} this site {how or 'trains a model of its own (site train)'}. "
                "Nothing was trained or charged. Use the other command."
            )
        balance = self._ledger.balance(self.dataset)
        study.require_valid()
        if (epsilon is None) != study.trusted:
            raise SettingsError(
                f"Study {name!r} has a trusted hub, which gets an exact model: an epsilon would "
                "mean nothing. Nothing was trained or recorded. Leave the epsilon out."
                if study.trusted
                else f"A training for study {name!r} needs an epsilon. Nothing was trained. Name "
                "one in the study's range with --epsilon."
            )
        study.check_epsilon(math.inf if epsilon is None else epsilon)
        terms = self.terms(name, offline=offline or name in skip) if study.is_blind else None
        page = of_training(
            study,
            site=self.name,
            epsilon=epsilon,
            balance=balance,
            number=self._next_number(name),
            head=self._ledger.head(),
            unasked=self._unasked(offline, skip),
            blind=None if terms is None else terms.page,
            members=[(member.site, member.digest) for member in members],
            mapping=[] if mapping is None else mapping.describe(),
        )
        if terms is not None and epsilon is not None:
            return self._preview_blind(study, epsilon, page, terms)
        if epsilon is None:
            may_leave = self._ledger.permits_exact(self.dataset)
            return Preview(page, math.inf, 0.0, balance.left.epsilon, may_leave)
        cost = balance.cost(promise(study, epsilon))
        return Preview(page, epsilon, study.delta, balance.left.epsilon, balance.holds(cost), cost)

    def _preview_blind(self, study: Study, epsilon: float, page: Page, terms: Terms) -> Preview:
        """Return the preview of a training whose noise is a share."""
        ledger = self._ledger
        balance = ledger.balance(self.dataset)
        cost = balance.charge(charged_events(study, epsilon, terms.page))
        fits = balance.holds(cost)
        kept = self.alone_balance(ledger) if terms.is_accepted else None
        if kept is not None:
            fits = fits and kept.holds(kept.charge(charged_events(study, epsilon)))
        return Preview(page, epsilon, study.delta, balance.left.epsilon, fits, cost)

    def mask_noise(self, name: str, *, offline: bool = False, skip: Sequence[str] = ()) -> Path:
        """Make a file of noise only for a blind study; return it.

        It holds a share of the noise and no record, so that a batch of others can be opened. It
        costs nothing. It takes the place of an earlier file of this site that is in no batch yet.
        """
        with self._working():
            self._complete_rotation(name)
            study, joined = self.study(name), self._joined(name)
            _require_contributing(name, joined, "made")
            self._require_readable(name)
            terms = self.terms(name, offline=offline or name in skip)
            self._check_handed_out(name, self._unasked(offline, skip))
            self._pin_hub(name, terms)
            sequence = self._next_number(name)
            content = study.mask_sum(
                None,
                Spending(Account()),
                terms.masking,
                site=self.name,
                signing=self.key,
                sequence=sequence,
            )
            path = self._place(name) / f"contribution-{sequence:04d}.safetensors"
            write_durably(path, content, replace=False)
            return path

    def _pin_hub(self, name: str, terms: Terms) -> None:
        """Keep the key of the hub that pads are sealed to: releases must be signed with it."""
        self._write_joined(name, replace(self._joined(name), hub_key=terms.hub))

    def train(
        self,
        name: str,
        table: object,
        *,
        epsilon: float | None = None,
        learner: str | None = None,
        approve: Callable[[Preview], bool] | None = None,
        anew: bool = False,
        offline: bool = False,
        skip: Sequence[str] = (),
    ) -> Path | None:
        """Train on a table after approval; return the file that may be submitted.

        Returns None if approval was refused. The same training again, on the same table at the
        same epsilon, is not charged again until its file is submitted: nobody can tell whether its
        report was read, so that it is completed or reported without asking; `anew` gives it up.
        There is no `epsilon` if the study's hub is trusted. `learner` is one of those that the
        study names, unless its default. The hubs of all studies that the site
        has joined are asked what they have of it, and must answer, because that is how an old copy
        of the folder is noticed. Those of the studies in `skip` are not asked, with `offline` none
        is; the page to approve says so.

        Privacy
        -------
        The ledger is charged before any noise is drawn; see `Study.train`. An exact contribution is
        recorded in the ledger instead, and only if the data owner has allowed such.
        """
        with self._working():
            self._complete_rotation(name)
            study, joined = self.study(name).choose(learner), self._joined(name)
            _require_contributing(name, joined, "trained")
            weighed = table.members if isinstance(table, Weighing) else ()
            preview = self.preview(
                name,
                epsilon=epsilon,
                learner=learner,
                offline=offline,
                skip=skip,
                table=table,
            )
            made = None if anew else self._made(study, joined, table, epsilon)
            if made is not None:
                return made
            sequence = self._next_number(name)
            key = None if anew else self._charged_key(study, joined.attempt, table, epsilon)
            if key is None:
                self._require_fit(name, preview)
                if approve is not None and not approve(preview):
                    return None
            self._check_handed_out(name, self._unasked(offline, skip))
            if key is None:
                self._require_space(study, preview.epsilon)
                self._keep_mapping(name, _mapping_of(table))
                key = f"{study.digest[:16]}-{sequence}-{os.urandom(8).hex()}"
                attempt = Attempt(
                    sequence=sequence,
                    epsilon=epsilon,
                    key=key,
                    table=_digest_table(study, table),
                    learner=study.learner,
                )
                self._write_joined(name, replace(joined, attempt=attempt))
            if study.trusted:
                self._record_exact(name, study, sequence, key)
            path = self._place(name) / f"contribution-{sequence:04d}.safetensors"
            if study.is_blind:
                terms = self.terms(name, offline=True)  # those of the page
                self._pin_hub(name, terms)
                content = study.mask_sum(
                    table,
                    self.spending(terms, key),
                    terms.masking,
                    epsilon=preview.epsilon,
                    site=self.name,
                    signing=self.key,
                    sequence=sequence,
                )
                write_durably(path, content, replace=False)
                return path
            sender = Sender(
                site=self.name,
                signing=self.key,
                dataset=self.dataset,
                sequence=sequence,
                key=key,
            )
            asked, ledger = preview.epsilon, self._ledger
            if isinstance(table, Weighing):
                contribution = study.aggregate(
                    table.table, weighed, ledger, epsilon=asked, **sender
                )
            else:
                kept = None if study.trusted else ledger
                contribution = study.train(table, kept, epsilon=asked, **sender)
            contribution.save(path, replace=False)
            return path

    def gather_members(self, name: str) -> Sequence[Contribution]:
        """Fetch and check the contributions of the other sites, which this site is to weigh."""
        with self._working():
            self._complete_rotation(name)
            study = self.study(name)
            if study.at != self.name:
                raise SettingsError(
                    f"Study {name!r} does not name this site to weigh the models of others. "
                    "Nothing was fetched. Ask who wrote it for `at` in [aggregator]."
                )
            contents = self._hub(self._joined(name)).fetch_members(name)
            found = [study.accept(Contribution.load(content)) for content in contents]
            found = [one for one in found if not one.weighs]
            if len({one.site for one in found}) < max(len(found), study.min_sites):
                raise SettingsError(
                    f"Study {name!r} needs contributions of at least {study.min_sites} different "
                    f"sites, one of each, before they are weighed; there are {len(found)}. Nothing "
                    "was trained or charged. Wait for more."
                )
            return sorted(found, key=lambda one: one.site)

    def aggregate(
        self,
        name: str,
        table: object,
        *,
        epsilon: float,
        approve: Callable[[Preview], bool] | None = None,
    ) -> Path | None:
        """Weigh the models of the other sites on a table of this site's own, after approval.

        Everything else is as in `train`.

        Privacy
        -------
        See `Study.aggregate`.
        """
        weighing = Weighing(table, self.gather_members(name))
        return self.train(name, weighing, epsilon=epsilon, approve=approve)

    def status(self, name: str) -> dict[str, Any]:
        """Return how far the site is with a study, what is next, and what the budget is enough for.

        ``trainings_left`` is the number of trainings at the smallest and at the largest epsilon
        that the study allows; None if no limit counts them.
        """
        facts = super().status(name)
        counts, step = {}, None
        if not facts["unreadable"]:
            step = self._next_step(name, facts)
            with suppress(ConsilienceError):  # of a study or a limit that allow no training
                counts = self._count_trainings(self.study(name))
        return {
            **facts,
            "in_folder": facts["hub"].startswith(FOLDER),
            "next": step,
            "trainings_left": None if facts["fetch_only"] else counts or None,
        }

    def _next_step(self, name: str, facts: Mapping[str, Any]) -> str:
        """Return the command that usually comes next."""
        study, newest = self.study(name), self._newest_number(name)
        if not facts["fetch_only"] and newest > (facts["submitted"] or 0):
            return f"consilience site submit {name}"
        if not facts["fetch_only"] and not newest:
            if study.at == self.name:
                return f"consilience site aggregate {name} TABLE --epsilon E --dry-run"
            return f"consilience site check {name} TABLE"
        if facts["release"] is None:
            return f"consilience site fetch {name}, once there is a release"
        return f"consilience site adapt {name} TABLE"

    def _count_trainings(self, study: Study) -> dict[float, int]:
        """Return for how many trainings the budget is enough, by their epsilon."""
        balance, counts = self._ledger.balance(self.dataset), {}
        if study.trusted or balance.left.epsilon is None:
            return {}
        for epsilon in study.epsilon_range:
            cost = balance.cost(promise(study, epsilon))
            pairs = ((cost.epsilon, balance.left.epsilon), (cost.delta, balance.left.delta))
            # Ledgers count in billionths; a share of one more is rounding.
            enough = [math.floor((left or 0) / paid + 1e-9) for paid, left in pairs if paid]
            counts[epsilon] = min(enough, default=0)
        return counts

    def open_table(
        self, name: str, table: object, mapping: str | os.PathLike[str] | None = None
    ) -> object:
        """Return a table as the study sees it: by a mapping file, or by the one approved last.

        A `table` may also be a path of an Excel file, or of a TOML file that describes a sheet or
        a database query. No record is read. A `mapping` file without columns means no mapping.
        """
        source, kept = open_table(table), self._place(name) / MAPPING
        schema = self.study(name).schema
        if mapping is None and not kept.exists():
            return source
        rules = TableMapping.load(kept if mapping is None else mapping, schema)
        return Mapped(source, rules) if rules.columns else source

    def _keep_mapping(self, name: str, mapping: TableMapping | None) -> None:
        """Keep the mapping that was approved, for later commands; or none."""
        kept = self._place(name) / MAPPING
        if mapping is None:
            kept.unlink(missing_ok=True)
        else:
            write_durably(kept, mapping.to_toml().encode())

    def _require_fit(self, name: str, preview: Preview) -> None:
        if preview.fits:
            return
        if preview.cost is None:
            raise BudgetExceeded(
                f"Study {name!r} has a trusted hub, which gets an exact model of data set "
                f"{self.dataset!r}, and its owner has not allowed that. Nothing was trained or "
                "recorded. If the owner agrees: consilience site budget allow-exact"
            )
        left, delta, delta_left = self._ledger.balance(self.dataset).left, "", ""
        if self._ledger.balance(self.dataset).holds(preview.cost):
            raise BudgetExceeded(
                f"Study {name!r} would cost more than the data owner allows if everybody else "
                "colludes, which has a limit of its own. Nothing was trained or charged. Choose "
                "less, or ask the data owner, who can raise that limit: consilience site "
                f"trust-keyholder {name} --limit"
            )
        if preview.cost.delta:
            delta, delta_left = f", delta={preview.cost.delta:g}", f", delta={left.delta:g}"
        raise BudgetExceeded(
            f"Study {name!r} was to be charged epsilon={show_amount(preview.cost.epsilon or 0.0)}"
            f"{delta}, but epsilon={show_amount(left.epsilon or 0.0)}{delta_left} is left of data "
            f"set {self.dataset!r}. "
            "Nothing was trained or charged. Choose less, or ask the data owner, who can raise the "
            "limit: consilience site budget raise"
        )

    def _charged_key(
        self, study: Study, attempt: Attempt | None, table: object, epsilon: float | None
    ) -> str | None:
        """Return the key of an attempt at this very training, if the ledger holds its result.

        An exact training has none, and can be done again once the ledger has recorded it.
        """
        if attempt is None or attempt["sequence"] != self._next_number(study.name):
            return None
        recorded = {note.key for note in self._ledger.notes()} if study.trusted else ()
        charges = {charge.key: charge for charge in self._ledger.charges(self.dataset)}
        charge = charges.get(attempt["key"])
        if attempt["key"] not in recorded and charge is None:
            return None
        if charge is not None and charge.state == "reserved":
            if not _is_same(attempt, study, table, epsilon):
                return None
            raise SettingsError(
                f"This training for {study.name!r} was charged epsilon={charge.epsilon:g} on "
                f"{charge.time[:10]}, and stopped before its result was stored. That charge "
                "stands, the result is lost, and nothing was charged now. To train again, which "
                "is charged again, use --anew."
            )
        if _is_same(attempt, study, table, epsilon):
            return attempt["key"]
        raise SettingsError(
            f"A training for {study.name!r} on another table, at another epsilon or of another "
            "learner is in the ledger, and stopped before its file was written. Nothing was "
            "trained now. Run it again as it was, which costs nothing more, or give it up with "
            "--anew: its entry stays."
        )

    def _require_space(self, study: Study, epsilon: float) -> None:
        """Refuse a training whose result could not be stored, while nothing is charged."""
        learner = study.build(epsilon)
        learner.n_features_in_ = study.schema.n_features
        n_bytes = 8 * learner.n_released(len(study.schema.classes or ()))
        # The ledger holds it twice while it is sealed, and the file once.
        if shutil.disk_usage(self.folder).free < 4 * n_bytes + SPARE_BYTES:
            raise SettingsError(
                "The disk of the site's folder has no room for the result of this training. "
                "Nothing was trained or charged. Make room, and try again."
            )

    def _made(
        self, study: Study, joined: Joined, table: object, epsilon: float | None
    ) -> Path | None:
        """Return the file of an attempt at this very training that was written, and not sent."""
        attempt = joined.attempt
        if attempt is None or attempt["sequence"] != self._newest_number(study.name):
            return None
        for path, file in self._contributions(study.name).items():
            paid = (file.facts.get("receipt") or {}).get("key")
            if study.trusted and file.digest not in joined.exact:
                paid = attempt["key"]  # it has no receipt, and is none that a hub sent back
            if (file.facts["sequence"], paid) == (attempt["sequence"], attempt["key"]):
                ours = file.facts["key"] == self.key.public  # no hub takes what an old one signed
                return path if ours and _is_same(attempt, study, table, epsilon) else None
        return None

    def _record_exact(self, name: str, study: Study, sequence: int, key: str) -> None:
        """Enter an exact contribution into the ledger, and its receipt into the folder."""
        note = self._ledger.record_exact(
            dataset=self.dataset,
            key=key,
            purpose=f"exact contribution {sequence} to {name}",
            study=study.digest,
        )
        joined = self._joined(name)
        self._write_joined(name, replace(joined, exact={**joined.exact, key: note.hash}))

    def _unasked(self, offline: bool, skip: Sequence[str]) -> list[str]:
        """Return the studies whose hubs are not asked what they have of this site."""
        for name in skip:
            if name not in self.studies:
                self._joined(name)  # which says so
        return self.studies if offline else sorted(set(skip))

    def _check_handed_out(self, name: str, unasked: Sequence[str]) -> None:
        """Refuse to train unless all hubs say that everything they have of this site is here.

        One ledger counts what goes to all of them. A hub, or whoever stands before it, could
        otherwise undo the limit by not answering.
        """
        for each, problem in self._compare_with_hubs(name, unasked, "trained").items():
            silent = isinstance(problem, HubUnavailable)
            raise (HubUnavailable if silent else SettingsError)(
                f"The hub of {each!r} has to say what it has of this site, because nothing else "
                "tells whether an older copy of this folder was put in place. Nothing was trained. "
                f"The problem: {problem} If it cannot be asked, the data owner can approve a "
                f"training with --skip {each}, or with --offline, which asks no hub at all."
            )

    def _compare_with_hubs(
        self, name: str, unasked: Sequence[str], done: str
    ) -> dict[str, ConsilienceError]:
        """Refuse to go on if a hub has something of this site that is not in this folder.

        Return the studies whose hub did not say what it has, and why.
        """
        silent: dict[str, ConsilienceError] = {}
        for each in (name, *(other for other in self.studies if other != name)):
            if each in unasked:
                continue
            try:
                self._hand_over_key(each)
                unknown = self._not_here(each, self._hub(self._joined(each)))
            except ConsilienceError as problem:
                silent[each] = problem
                continue
            if unknown:
                raise LedgerDamaged(
                    f"The hub of {each!r} lists {len(unknown)} contributions in this site's name "
                    "that are not in this folder. Either an older copy of the whole folder was put "
                    "in place, and its ledger may lack their charges, or they are not this site's. "
                    f"Nothing was {done}. Put back the newest copy of the folder; if there is "
                    "none, fetch and charge those that are this site's: consilience site recover. "
                    "If they are not this site's, the data owner can decide to go on with --skip "
                    f"{each}."
                )
        return silent

    # ------------------------------------------------------------------ the data owner's limit

    def raise_budget(
        self, *, epsilon: float | None = None, delta: float | None = None, reason: str
    ) -> Balance:
        """Raise the lifetime limit of the data set; the ledger keeps the owner's reason."""
        _require_reason(reason)
        with self._working():
            balance = self._ledger.balance(self.dataset)
            limit = balance.limit
            if limit.epsilon is None or limit.delta is None:
                raise SettingsError("The limit is one of rho. Nothing was changed. Use the ledger.")
            asked = (
                limit.epsilon if epsilon is None else epsilon,
                limit.delta if delta is None else delta,
            )
            if asked[0] < limit.epsilon or asked[1] < limit.delta:
                raise SettingsError(
                    f"The limit of data set {self.dataset!r} is epsilon={limit.epsilon:g}, "
                    f"delta={limit.delta:g}, and was to be lowered. Nothing was changed. Name a "
                    "higher limit: the new total, not what is added."
                )
            budget = Budget(
                epsilon=asked[0], delta=asked[1], unit=balance.unit, neighbours=balance.neighbours
            )
            if balance.is_limited_by(budget):
                raise SettingsError(
                    f"The limit of data set {self.dataset!r} is that already, in the billionths "
                    "that the ledger counts in. Nothing was recorded. Name a higher limit."
                )
            return self._ledger.allow(self.dataset, budget, reason=reason)

    def allow_exact(self, *, reason: str, allowed: bool = True) -> None:
        """Record whether the data owner lets exact models leave, for studies with a trusted hub."""
        _require_reason(reason)
        with self._working():
            self._ledger.permit_exact(self.dataset, reason=reason, permitted=allowed)

    # ------------------------------------------------------------------ taking part

    def submit(
        self,
        name: str,
        *,
        offline: bool = False,
        skip: Sequence[str] = (),
        approve: Callable[[Contribution], bool] | None = None,
    ) -> dict[str, Any]:
        """Send the newest contribution; sending it again changes nothing.

        `approve` is asked about the very file that would be sent; if it refuses, nothing is.
        The hubs of all studies are asked before what they have of this site. One that does not
        answer stops nothing here, and is in the answer's ``not_compared``.
        """
        with self._working():
            self._complete_rotation(name)
            self._require_readable(name)  # or an older one would be sent
            joined, path = self._joined(name), self.contribution(name)
            contribution = Contribution.load(path, trusted=self.study(name).trusted)
            self._require_leave(name, joined, contribution)
            if approve is not None and not approve(contribution):
                raise SettingsError(
                    f"Contribution {contribution.sequence} to {name!r}, with the digest "
                    f"{contribution.digest}, was not approved. Nothing was sent. Answer yes, or "
                    "name that digest with --approved."
                )
            # What was trained in two copies of this folder is charged in two ledgers.
            silent = self._compare_with_hubs(name, self._unasked(offline, skip), "sent")
            digest, sequence = contribution.digest, contribution.sequence
            hub = self._hub(joined)
            if isinstance(hub, SharedFolder):
                self._check_shared(name, hub, contribution)
            # Written first: from now on the hub may have it, whatever it answers.
            joined = replace(joined, sent=sorted({*joined.sent, digest}))
            self._write_joined(name, joined)
            answer = hub.submit(name, contribution, path.read_bytes())
            joined = replace(joined, handed_over=sorted({*joined.handed_over, digest}))
            gone = joined.withdrawn
            if gone is not None:  # in a folder, a file that was withdrawn may return
                gone = Withdrawn(
                    sequence=min(gone["sequence"], sequence - 1), releases=gone["releases"]
                )
            made, tables = joined.attempt, dict(joined.tables)
            if made is not None and made["sequence"] == sequence and "table" in made:
                tables[digest] = made["table"]
            done = replace(joined, submitted=sequence, attempt=None, withdrawn=gone, tables=tables)
            self._write_joined(name, done)
            return {**answer, "not_compared": sorted(silent)}

    def _require_leave(self, name: str, joined: Joined, contribution: Contribution) -> None:
        """Refuse to let a contribution out that the data owner does not let out now."""
        _require_contributing(name, joined, "sent")
        exact = math.isinf(contribution.guarantee.epsilon)
        if exact and not self._ledger.permits_exact(self.dataset):
            raise BudgetExceeded(
                f"Contribution {contribution.sequence} to {name!r} is an exact model of data set "
                f"{self.dataset!r}, and its owner lets none leave. Nothing was sent. If the owner "
                "agrees: consilience site budget allow-exact"
            )
        if self._ledger.was_exceeded(self.dataset) and contribution.digest not in joined.sent:
            raise BudgetExceeded(
                f"More was charged to data set {self.dataset!r} than its owner allowed, as became "
                "known when charges were recovered, and contribution "
                f"{contribution.sequence} to {name!r} was not handed out so far. Nothing was sent. "
                "If the owner agrees to all that was charged, let the owner set a limit above it: "
                "consilience site budget raise"
            )

    def _check_shared(self, name: str, hub: SharedFolder, contribution: Contribution) -> None:
        """Refuse what no hub would take: a file that is older than what this site handed in."""
        here = self._proofs(name)
        unknown = hub.signed() - here.keys()
        if unknown:
            raise LedgerDamaged(
                f"The shared folder of {name!r} holds {len(unknown)} contributions that a key of "
                "this site signed and that are not in this folder: an older copy of it was put in "
                "place, and its ledger may lack their charges. Nothing was sent. Fetch and charge "
                "them: consilience site recover"
            )
        there = (here[each] for each in hub.contributions(name) if each in here)
        numbers = [
            int(facts["sequence"]) for facts in there if facts is not here[contribution.digest]
        ]
        if max(numbers, default=0) >= contribution.sequence:
            raise ContributionRejected(
                f"The shared folder of {name!r} has contribution {max(numbers)} of this site "
                f"already, and contribution {contribution.sequence} is another one. Nothing was "
                "sent, and its charge stays. Train again: consilience site train"
            )

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
                    known = _merge(known, release.log.add(release.digest))
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
            number = _find_difference(Seen(here, known), log.add(release.digest))
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
                f" With all that was handed over, epsilon is {compose(*costs).epsilon:g}."
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
                "Warning: it states epsilon = {:g} for this site. Contributions that were "
                "withdrawn before are not in that, although they were handed out; with them, "
                "epsilon is {:g}. Ask the coordinator."
                if joined.hub.startswith(FOLDER)
                else "It states epsilon = {:g} for this site. Contributions that were sent before, "
                "and that the hub did not confirm, are not in that; if it has them, epsilon is "
                "{:g}."
            )
            said.append(lacks.format(own.guarantee.epsilon, paid.epsilon))
        return "\n".join(said)

    def adapt(self, name: str, table: object) -> AdaptedRelease:
        """Adapt the release that was fetched last to the site's own records; the result stays here.

        Privacy
        -------
        Nothing leaves and nothing is charged: see `consilience.adapt`.
        """
        table_digest = _digest_table(self.study(name), table)
        return adapt_release(self, name, table, table_digest)

    def compare_summary(self, name: str, table: object) -> ComparedSummary:
        """Compare a table with the summary of all sites' records that was fetched last.

        Privacy
        -------
        Nothing leaves and nothing is charged; the page is an exact statement about the records.
        """
        return compare_summary(self, name, table)

    def adapted(self, name: str) -> Adapted:
        """Return the model that `adapt` made of the release that was fetched last."""
        return load_adapted(self, name)

    def withdraw(self, name: str) -> dict[str, Any]:
        """Take the contribution out of future releases.

        What was published stays published, and what was spent stays spent.
        """
        with self._working():
            self._complete_rotation(name)
            joined, log = self._joined(name), self.log(name)
            hub = self._hub(joined)
            if isinstance(hub, SharedFolder):
                answer = hub.withdraw(name, self._proofs(name))
                joined = replace(joined, handed_over=())  # a relay may not have seen them
            else:
                answer = hub.withdraw(name)
            releases = max(joined.release or 0, 0 if log is None else log.length)
            sent = [
                int(facts["sequence"])
                for digest, facts in self._proofs(name).items()
                if digest in joined.sent  # also what was never confirmed: it may be there
            ]
            gone = Withdrawn(sequence=max((joined.submitted or 0, *sent)), releases=releases)
            self._write_joined(name, replace(joined, withdrawn=gone))
            return answer

    def open_view(self, name: str) -> str:
        """Return a link that shows the site its own page on the hub's dashboard.

        It works once, for a few minutes.
        """
        with self._working():
            self._complete_rotation(name)
            return self._hub(self._joined(name)).open_view(name)

    # ------------------------------------------------------------------ changing the key

    def rotate_key(self, *, anyway: bool = False) -> str:
        """Replace the site's key here, and at every hub that knows it; return the new one.

        No hub can stop that for the others: one that does not take the new key is asked again
        whenever the site works with it, and until then `outdated` names its studies. A contribution
        that was not submitted would be lost, and is a reason to refuse, unless `anyway`.
        """
        with self._working():
            self._change_key(anyway=anyway)
            for name in self.outdated:
                with suppress(ConsilienceError):
                    self._hand_over_key(name)
            return self.key.public

    @property
    def outdated(self) -> list[str]:
        """Names of the studies whose hub has not taken the site's present key yet."""
        return [name for name in self.studies if self._joined(name).key is not None]

    def _change_key(self, *, anyway: bool = True) -> None:
        """Replace the key here, after noting which one each hub knows."""
        old, new_path = self.key, self.folder / "key.new.pem"
        if not (new_path.exists() or anyway):
            self._check_submitted()
        SigningKey.at(new_path)
        kept = self._key_file(old.public)
        if not kept.exists():
            os.link(self.folder / "key.pem", kept)
        for name in self.studies:
            joined = self._joined(name)
            if joined.key is None and not joined.hub.startswith(FOLDER):
                self._write_joined(name, replace(joined, key=old.public))
        new_path.replace(self.folder / "key.pem")  # at every moment there is a key

    def _key_file(self, public: str) -> Path:
        return self.folder / f"key.{public[:16]}.pem"

    def _check_submitted(self) -> None:
        """Refuse to lose contributions that were paid for: the old key signed them."""
        for name in self.studies:
            submitted = self._joined(name).submitted or 0
            if self._newest_number(name, key=self.key.public) > submitted:
                raise SettingsError(
                    f"A contribution to {name!r} is signed with the present key and was not "
                    "submitted. Nothing was changed. Submit it first (consilience site submit "
                    f"{name}); if its hub does not take it, give it up with --anyway."
                )

    def _complete_rotation(self, name: str) -> None:
        """Finish a rotation that was interrupted, as far as it concerns one study."""
        if (self.folder / "key.new.pem").exists():
            self._change_key()
        self._hand_over_key(name)

    def _hand_over_key(self, name: str) -> None:
        """Make a study's hub accept the present key, if it knows an earlier one.

        Whether it took one that was handed over before is not known if its answer was lost.
        """
        joined = self._joined(name)
        if joined.key is None:
            return
        first = self._key_file(joined.key)
        others = sorted(path for path in self.folder.glob("key.*.pem") if path != first)
        refusal = None
        for path in (first, *others):
            hub = self._hub(joined, SigningKey.load(path))
            assert isinstance(hub, HubClient)
            try:
                hub.rotate_key(name, self.key)
            except SettingsError as refused:
                refusal = refusal or refused
            else:
                self._write_joined(name, replace(joined, key=None))
                return
        assert refusal is not None
        raise refusal

    # ------------------------------------------------------------------ keeping the ledger

    def backup(self, path: str | os.PathLike[str]) -> str:
        """Copy the ledger; return the head of its chain, to be written down elsewhere."""
        ledger = self.ledger
        head = ledger.verify()
        ledger.backup(path)
        return head

    def recover(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        limit: Budget | None = None,
        lost_key: bool = False,
    ) -> Recovery:
        """Bring the ledger up to everything that is known to have been handed out.

        The ledger is the one that is here; or a backup at `path` in its place if it is lost; or,
        if there is no backup either, a new one with the `limit` that the data owner declares again.
        Every contribution carries the receipt of its charge, and what is missing here is asked of
        the hubs. Each charge that the ledger lacks is entered again, and none is ever removed.
        What a hub sends is kept only if a key in this folder signed it, or if the ledger sealed its
        very numbers, so that no hub can use up the budget or plant a file; `lost_key` also keeps,
        and charges, files that a key signed which was lost.
        """
        with self._working(with_ledger=False):
            target = self.folder / "ledger.sqlite"
            self._check_recovery(path, limit)
            if path is None and limit is None:
                self._ledger.verify()
                self._check_own(self._known, self._ledger)
                forgot = self._lacks_decision(self._known, self._ledger)
                return self._complete(self._ledger, lost_key=lost_key, forgot=forgot)
            # A copy becomes the site's ledger only once every charge is back in it: a machine that
            # stops before that has restored nothing.
            with tempfile.TemporaryDirectory(prefix=".recovering-", dir=self.folder) as place:
                draft = Path(place) / "ledger.sqlite"
                if path is not None:
                    shutil.copyfile(path, draft)
                ledger = Ledger(draft)
                if limit is not None:
                    reason = "declared again: the ledger was lost"
                    ledger.allow(self.dataset, limit, reason=reason)
                # What is declared again is the last decision.
                forgot = limit is None and self._lacks_decision(self._known, ledger)
                made = self._complete(ledger, lost_key=lost_key, forgot=forgot)
                self._remember(ledger)
                ledger.backup(target)
            return made

    def _complete(self, ledger: Ledger, *, lost_key: bool, forgot: bool) -> Recovery:
        """Enter what is here, so that nothing from a hub comes before it, then what hubs have.

        What the data owner decided last stays decided, as far as it is known: nothing that is
        entered lets more leave.
        """
        known, before = self._known, {note.hash for note in self._decisions(ledger)}
        if known is not None and forgot and not known["exact"]:
            reason = "recovered: the last decision that is known forbids them"
            ledger.permit_exact(self.dataset, reason=reason, permitted=False)
        entered = self._charge_again(ledger)
        missed = self._fetch_handed_out(ledger, lost_key=lost_key)
        entered += self._charge_again(ledger)
        new = [note for note in self._decisions(ledger) if note.hash not in before]
        damaged = [f"{name}/{file}" for name in self.studies for file in self.unreadable(name)]
        return Recovery(
            entered, **missed, decisions=tuple(new), forgot=forgot, unreadable=tuple(damaged)
        )

    def _check_recovery(self, path: str | os.PathLike[str] | None, limit: Budget | None) -> None:
        there = any(self.folder.glob("ledger.sqlite*"))
        if path is not None and limit is not None:
            raise SettingsError(
                "A backup holds the data owner's limit, and another one was given. Nothing was "
                "restored. Leave out the limit; it can be raised afterwards: consilience site "
                "budget raise"
            )
        if path is None and limit is None and not there:
            raise SettingsError(
                "The site's ledger is gone. Nothing was restored. Name its backup; if there is "
                "none, let the data owner declare the limit again with --epsilon: what the hubs "
                "and this folder can prove is charged to it."
            )
        if there and (path is not None or limit is not None):
            raise SettingsError(
                "The site still has a ledger. Nothing was restored. To enter what it lacks, run "
                "this command without a backup or limit. If it is damaged, first move it away "
                "together with its -wal and -shm files."
            )
        if path is not None:
            Ledger(path).verify()
            self._check_own(self._known, Ledger(path))

    def _fetch_handed_out(self, ledger: Ledger, *, lost_key: bool) -> dict[str, tuple[str, ...]]:
        """Fetch this site's contributions that hubs have and this folder lacks.

        Return the studies whose hub did not answer, and those of which something could not be
        entered: files that are not this site's, or that a key signed which is not here.
        """
        unreached, unproved, gone = [], [], []
        for name in self.studies:
            try:
                hub = self._hub(self._joined(name))
                self._hand_over_key(name)
                digests = self._not_here(name, hub)
                known = max(self._newest_number(name), self._joined(name).submitted or 0)
                farthest = known + MOST_SKIPPED * len(digests)  # of what a hub accepts
                for digest in digests:
                    content = hub.fetch_contribution(name, digest)
                    if content is None:
                        gone.append(name)
                        continue
                    if not self._keep_if_ours(
                        name, digest, content, ledger, farthest=farthest, lost_key=lost_key
                    ):
                        unproved.append(name)
            except ConsilienceError:  # what is known here is entered all the same
                unreached.append(name)
        missed = {"unreached": unreached, "unproved": unproved, "gone": gone}
        return {kind: tuple(dict.fromkeys(names)) for kind, names in missed.items()}

    def _not_here(self, name: str, hub: HubClient | SharedFolder) -> list[str]:
        """Return the digests of contributions that the hub has and this folder lacks."""
        here = self._proofs(name)
        return [digest for digest in hub.contributions(name) if digest not in here]

    def _keep_if_ours(
        self,
        name: str,
        digest: str,
        content: bytes,
        ledger: Ledger,
        *,
        farthest: int,
        lost_key: bool,
    ) -> bool:
        """Keep what a hub sent if it proves a charge of this site; tell whether it does."""
        with suppress(ConsilienceError):
            note = Withdrawal.load(content)
            facts = note.sealed.facts
            named = (facts["site"], note.study, note.contribution)
            fits = named == (self.name, self.study(name).reference, digest)
            ours = note.sealed.key in self._own_keys() or (
                lost_key and self._can_be_ours(name, note)
            )
            if not (fits and ours and note.sequence <= farthest):
                return False
            self._keep_proof(name, digest, note.sequence, content, ended=WITHDRAWN)
            return True
        with suppress(ConsilienceError):
            found = Contribution.load(content, trusted=self.study(name).trusted)
            fits = found.digest == digest and found.sequence <= farthest
            if fits and self._is_ours(name, found, ledger, lost_key=lost_key):
                self._keep_proof(name, digest, found.sequence, content, ended=".safetensors")
                return True
        return False

    def _can_be_ours(self, name: str, note: Withdrawal) -> bool:
        """Tell whether a note of another key states what a contribution of this site can cost."""
        study, receipt = self.study(name), note.sealed.facts["receipt"]
        if study.trusted or receipt is None:
            return study.trusted and receipt is None
        same = (note.guarantee.unit, note.guarantee.neighbours) == (study.unit, study.neighbours)
        most = promise(study, study.epsilon_range[1])
        return same and receipt["dataset"] == self.dataset and is_at_most(note.guarantee, most)

    def _is_ours(self, name: str, found: Contribution, ledger: Ledger, *, lost_key: bool) -> bool:
        """Tell whether a file that a hub sent is this site's own, by a proof that no hub can make.

        A key in this folder signed it; or it is the one result that the ledger sealed for a charge
        of which no file is here.
        """
        study = self.study(name)
        if (found.site, found.study) != (self.name, study.reference):
            return False
        if found.sealed.key in self._own_keys():
            return True
        check_contribution(study, found)
        receipt = found.sealed.facts.get("receipt")
        if receipt is not None and receipt["dataset"] != self.dataset:
            return False
        if lost_key or receipt is None:
            return lost_key
        here = [file.facts.get("receipt") or {} for file in self._contributions(name).values()]
        if receipt["hash"] in {each.get("hash") for each in here}:
            return False
        return is_sealed(found.sealed.tensors, found.paid_events, receipt["hash"], ledger)

    def _keep_proof(
        self, name: str, digest: str, sequence: int, content: bytes, *, ended: str
    ) -> None:
        """Keep a contribution of this site that a hub sent, or a note in place of one."""
        target = self._place(name) / f"contribution-{sequence:04d}{ended}"
        if target.exists():  # another one was trained under its number, in this older folder
            target = target.with_name(f"{target.stem}-{digest[:16]}{ended}")
        joined = self._joined(name)
        if self.study(name).trusted:
            # Written first: whatever happens next, the ledger will be found to lack it.
            exact = {**joined.exact, digest: digest}
            self._write_joined(name, replace(joined, exact=exact))
        write_durably(target, content)
        joined = self._joined(name)
        there = set() if ended == WITHDRAWN else {digest}
        self._write_joined(
            name,
            replace(
                joined,
                submitted=max(sequence, joined.submitted or 0),
                sent=sorted({digest, *joined.sent}),
                handed_over=sorted({*there, *joined.handed_over}),
            ),
        )

    def _charge_again(self, ledger: Ledger) -> int:
        """Enter everything here whose receipt the ledger lacks; return how much that was."""
        files, notes = list(self._missing_receipts(ledger)), self._missing_notes(ledger)
        for _, digest, facts in files:
            paid = paid_events(facts)
            if alone(paid) != paid:  # charged by what the data owner accepted
                self._open_alone(ledger, None, reason="recovered from a contribution")
                ledger.recover(
                    alone(paid),
                    dataset=alone_account(self.dataset),
                    key=f"{recovered_key(digest)}-alone",
                    purpose="recovered from a contribution",
                    study=str(facts["study"]["digest"]),
                )
            ledger.recover(
                paid,
                dataset=str(facts["receipt"]["dataset"]),
                key=recovered_key(digest),
                purpose="recovered from a contribution",
                study=str(facts["study"]["digest"]),
            )
        for name, key in notes:
            ledger.recover_exact(
                dataset=self.dataset,
                key=f"recovered-{key}",
                purpose=f"recovered: exact contribution to {name}",
                study=self.study(name).digest,
            )
        return len(files) + len(notes)


def _require_contributing(name: str, joined: Joined, done: str) -> None:
    """Refuse whatever a site that only fetches does not do."""
    if joined.fetch_only:
        raise SettingsError(
            f"The site joined {name!r} to fetch only. Nothing was {done}. Join again to contribute."
        )


def _require_reason(reason: str) -> None:
    """Refuse a decision of the data owner that nobody can trace to anyone."""
    if not reason.strip():
        raise SettingsError(
            "The reason of a decision about the budget is empty. Nothing was recorded. Say who "
            "decided it and why: the ledger keeps that sentence."
        )


def _merge(known: ReleaseLog | None, newer: ReleaseLog) -> ReleaseLog:
    """Return the longer of two logs that agree, from the first release that either lists on."""
    if known is not None and known.length >= newer.length:
        return known
    if known is None or known.before >= newer.before:
        return newer
    digests = (*known.digests, *newer.digests[known.length - newer.before :])
    return ReleaseLog(known.before, known.head, digests).shorten(MOST_KEPT)


def _find_fork(histories: Sequence[Seen]) -> int | None:
    """Return the first number at which any of these differ, by files or logs; None if nowhere."""
    pairs = {pair for each in histories for pair in (*each.kept.items(), *each.digests.items())}
    first: dict[int, str] = {}
    forks = [n for n, digest in sorted(pairs) if first.setdefault(n, digest) != digest]
    logs = [each.log for each in histories if each.log is not None]
    for one, other in itertools.combinations(logs, 2):
        number = one.find_difference(other) if one.overlaps(other) else None
        forks += [] if number is None else [number]
    return min(forks, default=None)


def _put_aside_by_one(ours: Seen, theirs: Seen) -> list[int]:
    """Return the numbers of releases that were put aside at one site, and are unknown elsewhere.

    Only logs of both sites are taken to tell of all releases.
    """
    if ours.log is None or theirs.log is None:
        return []
    return sorted(
        {
            number
            for one, other in ((ours, theirs), (theirs, ours))
            for aside in one.aside
            for number in aside.digests
            if not any(number in each.digests for each in other.histories)
        }
    )


def compare_logs(ours: ReleaseLog, theirs: ReleaseLog) -> tuple[bool, str]:
    """Tell whether two sites saw the same releases, and say it in a sentence."""
    common = min(ours.length, theirs.length)
    if not ours.overlaps(theirs):
        return False, "The two logs list different times and cannot be compared."
    number = ours.find_difference(theirs)
    if number is None:
        return True, f"Both sites saw the same {common} releases."
    return False, _two_histories(number)


def _two_histories(number: int) -> str:
    return (
        f"By these logs the sites saw different releases, at the latest from number {number} on. "
        "Logs carry no signature, and release files do: if both sites have a file that the hub's "
        "key signed (consilience release verify FILE), the hub signed two histories. Keep both, "
        "and ask the hub's operator."
    )


def _order(facts: Mapping[str, Any]) -> tuple[int, str]:
    """Return what contributions are ordered by: two have one number after an old copy was used."""
    return int(facts["sequence"]), str(facts.get("created", ""))


def _find_difference(seen: Seen, log: ReleaseLog) -> int | None:
    """Return the first number at which a log is seen to differ; None if nowhere."""
    number = None if seen.log is None else seen.log.find_difference(log)
    listed = range(log.before + 1, log.length + 1)
    others = (n for n, digest in sorted(seen.kept.items()) if n in listed)
    return next((n for n in others if not log.lists(n, seen.kept[n])), number)


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


def _place_of(hub: str) -> str | Path:
    """Return a hub's address, or where a folder is: earlier versions kept links in its path."""
    return Path(hub.removeprefix(FOLDER)).resolve() if hub.startswith(FOLDER) else hub


def _is_same(attempt: Attempt, study: Study, table: object, epsilon: float | None) -> bool:
    """Tell whether an attempt was at this training: the same learner, table and epsilon."""
    # Attempts of earlier versions do not say which table or learner they were for.
    digests = (None, _digest_table(study, table))
    same = attempt.get("learner", study.learner) == study.learner
    return same and attempt["epsilon"] == epsilon and attempt.get("table") in digests


def _mapping_of(table: object) -> TableMapping | None:
    """Return how a table is mapped."""
    records = table.table if isinstance(table, Weighing) else table
    return records.mapping if isinstance(records, Mapped) else None


def _digest_table(study: Study, table: object) -> str:
    """Return the SHA-256 of a table: of its files, or of its columns that the study reads."""
    if isinstance(table, Weighing):  # the weights of others would be another result
        parts = [_digest_table(study, table.table), *(one.digest for one in table.members)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()
    if isinstance(table, Mapped) and isinstance(table.table, str | os.PathLike):
        parts = [_digest_table(study, table.table), table.mapping.digest]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()
    if isinstance(table, str | os.PathLike):
        path = Path(table)
        if path.is_file():
            return file_digest(path)
        files = sorted(each for each in path.rglob("*") if each.is_file())
        listed = "\n".join(f"{each.relative_to(path)} {file_digest(each)}" for each in files)
        return hashlib.sha256(listed.encode()).hexdigest()
    rows, written = read_table(table, study.schema), pa.BufferOutputStream()
    with pa.ipc.new_stream(written, rows.schema) as stream:
        stream.write_table(rows.combine_chunks())
    return hashlib.sha256(written.getvalue()).hexdigest()
