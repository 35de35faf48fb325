"""A site: what it does with its studies, its ledger and a hub.

Nothing happens that the site did not ask for: a study is fetched and read before anything is
trained; a training is shown, approved and charged before anything is computed; and a file is
submitted by a separate command. Each step writes durably what it did before it reports it, so that
a machine that stops at any moment resumes where it was.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from consilience.files.contribution import Contribution
from consilience.files.durable import write_durably
from consilience.privacy.guarantee import Budget, show_bound, show_left
from consilience.privacy.ledger import Amounts, Balance, show_amount
from consilience.privacy.spending import Account, Spending
from consilience.protocol import Invitation
from consilience.site.adapt import AdaptedRelease, adapt_release, load_adapted
from consilience.site.blind import Terms
from consilience.site.client import FOLDER, HubClient, SharedFolder, check_address
from consilience.site.folder import Attempt, Joined, Withdrawn
from consilience.site.recovery import SiteRecovery
from consilience.site.summary import ComparedSummary, compare_summary
from consilience.study.axes import find_axes_problem
from consilience.study.pages import charged_events, of_training, promise
from consilience.study.records import file_digest
from consilience.study.study import Sender, Study
from consilience.tables.mapping import Mapped, TableMapping
from consilience.tables.reading import read_table
from consilience.tables.sources import open_table

SPARE_BYTES = 1 << 20  # beside the numbers of a training
MAPPING = "mapping.toml"  # in a study's folder: the mapping that was approved last


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
class Weighing:
    """A table, and the contributions of other sites that are weighed on it."""

    table: object
    members: Sequence[Contribution]


class Site(SiteRecovery):
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
            delta = f", delta={show_bound(preview.cost.delta)}"
            delta_left = f", delta={show_left(left.delta or 0.0)}"
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
                f"This training for {study.name!r} was charged "
                f"epsilon={show_bound(charge.epsilon)} on {charge.time[:10]}, and stopped "
                "before its result was stored. That charge stands, the result is lost, and "
                "nothing was charged now. To train again, which is charged again, use --anew."
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
                    f"The limit of data set {self.dataset!r} is "
                    f"epsilon={show_bound(limit.epsilon)}, delta={show_bound(limit.delta)}, and "
                    "was to be lowered. Nothing was changed. Name a higher limit: the new total, "
                    "not what is added."
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
