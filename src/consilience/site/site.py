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
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from consilience.errors import (
    BudgetExceeded,
    ContributionRejected,
    HubUnavailable,
    LedgerDamaged,
    SettingsError,
)
from consilience.files.certificate import Page
from consilience.files.contribution import KIND, Contribution
from consilience.files.durable import write_durably
from consilience.files.log import MOST_LISTED, ReleaseLog
from consilience.files.release import KIND as RELEASE
from consilience.files.release import Release
from consilience.files.sealed import SealedFile, SigningKey
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Balance, Ledger
from consilience.protocol import Invitation
from consilience.site.client import FOLDER, HubClient, SharedFolder, check_address
from consilience.site.folder import Attempt, Joined, SiteFolder
from consilience.study.check import check_release
from consilience.study.pages import is_left, of_training
from consilience.study.records import file_digest
from consilience.study.study import Study
from consilience.tables.reading import read_table

MOST_KEPT = 1 << 12  # digests of releases that a site keeps for comparing


@dataclass(frozen=True)
class Preview:
    """What a training would do: the page to approve, its cost, and whether the ledger allows it."""

    page: Page
    epsilon: float
    delta: float
    left: float | None
    fits: bool

    @property
    def digest(self) -> str:
        """SHA-256 of the page as text: what an approval refers to."""
        return hashlib.sha256(self.page.as_text().encode()).hexdigest()

    @property
    def page_to_file(self) -> Page:
        """The page together with its digest."""
        digest = [("sha256", self.digest)]
        return Page(self.page.title, [*self.page.sections, ("Digest of this page", [], digest)])


class Site(SiteFolder):
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
        unchecked: bool = False,
    ) -> Study:
        """Enrol at a hub with a one-time invitation, and fetch the study and its public files.

        The invitation says which key the hub has and which study it is about, so that the first
        answer is checked as strictly as all later ones. `unchecked` accepts codes of earlier
        versions, which say neither.
        """
        with self._working():
            hub = HubClient(check_address(address), self.key, certificate)
            invited = Invitation.parse(invitation)
            if invited.hub_key is None and not unchecked:
                raise SettingsError(
                    "The invitation names neither the hub's key nor the study, so the hub's first "
                    "answer could not be checked. Nothing was sent. Ask the coordinator for the "
                    "whole invitation, or join with --unchecked if you trust the connection."
                )
            name, hub_key = hub.enrol(invited.code, self.name, fetch_only=fetch_only)
            study = hub.fetch_study(name)
            if invited.hub_key is not None and invited[1:] != (hub_key, study.digest):
                raise ContributionRejected(
                    "This is another hub, or another study, than the invitation names. Nothing was "
                    "kept. Check the address with the coordinator."
                )
            joined = Joined(study.to_dict(), hub.address, hub_key, certificate, fetch_only)
            return self._keep_study(study, joined)

    def join_folder(self, folder: str | os.PathLike[str]) -> Study:
        """Take part through a shared folder with a study file and its public files."""
        with self._working():
            study = Study.in_folder(Path(folder))
            joined = Joined(study.to_dict(), f"{FOLDER}{Path(folder).absolute()}")
            return self._keep_study(study, joined)

    def _keep_study(self, study: Study, joined: Joined) -> Study:
        """Keep a study and copies of its public files here; what was done in it before stays."""
        hub, place = self._hub(joined), self._place(study.name)
        if study.name in self.studies:
            kept = self._joined(study.name)
            known = (kept.hub, joined.hub_key and kept.hub_key, self.study(study.name).digest)
            if known != (joined.hub, joined.hub_key, study.digest):
                raise SettingsError(
                    f"This site has joined a study {study.name!r} already, at another hub or in "
                    "another version. Nothing was replaced. Ask the coordinator to give the new "
                    "study another name."
                )
            joined = replace(kept, certificate=joined.certificate, fetch_only=joined.fetch_only)
        place.mkdir(parents=True, exist_ok=True)
        for file in study.files:
            write_durably(place / file.file, hub.fetch_file(study.name, file))
        self._write_joined(study.name, joined)
        return study

    # ------------------------------------------------------------------ training

    def preview(self, name: str, *, epsilon: float | None = None) -> Preview:
        """Say what a training would disclose and cost. Nothing is trained or charged."""
        self.check_ledger()
        study, balance = self.study(name), self.ledger.balance(self.dataset)
        study.require_valid()
        if (epsilon is None) != study.trusted:
            raise SettingsError(
                f"Study {name!r} has a trusted hub, which gets an exact model: an epsilon would "
                "mean nothing. Nothing was trained or recorded. Leave the epsilon out."
                if study.trusted
                else f"A training for study {name!r} needs an epsilon. Nothing was trained."
            )
        study.check_epsilon(math.inf if epsilon is None else epsilon)
        page = of_training(study, site=self.name, epsilon=epsilon, balance=balance)
        if epsilon is None:
            may_leave = self.ledger.permits_exact(self.dataset)
            return Preview(page, math.inf, 0.0, balance.left.epsilon, may_leave)
        fits = is_left(balance, epsilon, study.delta)
        return Preview(page, epsilon, study.delta, balance.left.epsilon, fits)

    def train(
        self,
        name: str,
        table: object,
        *,
        epsilon: float | None = None,
        approve: Callable[[Preview], bool] | None = None,
        anew: bool = False,
    ) -> Path | None:
        """Train on a table after approval; return the file that may be submitted.

        Returns None if approval was refused. A training that was charged but not written, because
        the machine stopped, is completed without asking or charging again; `anew` gives it up.
        There is no `epsilon` if the study's hub is trusted.

        Privacy
        -------
        The ledger is charged before any noise is drawn; see `Study.train`. An exact contribution is
        recorded in the ledger instead, and only if the data owner has allowed such.
        """
        with self._working():
            self._complete_rotation()
            study, joined = self.study(name), self._joined(name)
            if joined.fetch_only:
                raise SettingsError(
                    f"The site joined {name!r} to fetch only. Nothing was trained. Join again to "
                    "contribute."
                )
            preview = self.preview(name, epsilon=epsilon)
            self._check_handed_out(name, joined)
            sequence = len(self._contributions(name)) + 1
            key = None if anew else self._charged_key(study, joined.attempt, table, epsilon)
            if key is None:
                self._require_fit(name, preview)
                if approve is not None and not approve(preview):
                    return None
                key = f"{study.digest[:16]}-{sequence}-{os.urandom(8).hex()}"
                attempt = Attempt(
                    sequence=sequence, epsilon=epsilon, key=key, table=_digest_table(study, table)
                )
                self._write_joined(name, replace(joined, attempt=attempt))
            if study.trusted:
                self._record_exact(name, study, sequence, key)
            contribution = study.train(
                table,
                None if study.trusted else self.ledger,
                epsilon=preview.epsilon,
                site=self.name,
                signing=self.key,
                dataset=self.dataset,
                sequence=sequence,
                key=key,
            )
            path = self._place(name) / f"contribution-{sequence:04d}.safetensors"
            contribution.save(path)
            self._write_joined(name, replace(self._joined(name), attempt=None))
            return path

    def _require_fit(self, name: str, preview: Preview) -> None:
        if preview.fits:
            return
        if math.isinf(preview.epsilon):
            raise BudgetExceeded(
                f"Study {name!r} has a trusted hub, which gets an exact model of data set "
                f"{self.dataset!r}, and its owner has not allowed that. Nothing was trained or "
                "recorded. If the owner agrees: consilience site budget allow-exact"
            )
        left, delta, delta_left = self.ledger.balance(self.dataset).left, "", ""
        if preview.delta:
            delta, delta_left = f", delta={preview.delta:g}", f", delta={left.delta:g}"
        raise BudgetExceeded(
            f"Study {name!r} was to be trained at epsilon={preview.epsilon:g}{delta}, but "
            f"epsilon={left.epsilon:g}{delta_left} is left of data set {self.dataset!r}. "
            "Nothing was trained or charged. Choose less, or ask the data owner, who can raise the "
            "limit: consilience site budget raise"
        )

    def _charged_key(
        self, study: Study, attempt: Attempt | None, table: object, epsilon: float | None
    ) -> str | None:
        """Return the key of an attempt at this very training, if the ledger holds its result."""
        if attempt is None or attempt["sequence"] != len(self._contributions(study.name)) + 1:
            return None
        if self.ledger.sealed(attempt["key"]) is None:
            return None
        # Attempts of earlier versions do not say what table they were for.
        same_table = attempt.get("table") in (None, _digest_table(study, table))
        if attempt["epsilon"] == epsilon and same_table:
            return attempt["key"]
        raise SettingsError(
            f"A training for {study.name!r} on another table or at another epsilon was charged, "
            "and stopped before its file was written. Nothing was trained now. Run it again as it "
            "was, which costs nothing more, or give it up with --anew: its charge stays."
        )

    def _record_exact(self, name: str, study: Study, sequence: int, key: str) -> None:
        """Enter an exact contribution into the ledger, and its receipt into the folder."""
        note = self.ledger.record_exact(
            dataset=self.dataset,
            key=key,
            purpose=f"exact contribution {sequence} to {name}",
            study=study.digest,
        )
        joined = self._joined(name)
        self._write_joined(name, replace(joined, exact={**joined.exact, key: note.hash}))

    def _check_handed_out(self, name: str, joined: Joined) -> None:
        """Refuse to train while the hub, if it answers, has a contribution that is not here."""
        handed: list[str] = []
        with suppress(HubUnavailable):
            handed = self._hub(joined).contributions(name)
        here = {SealedFile(file, KIND).digest for file in self._contributions(name)}
        if unknown := [digest for digest in handed if digest not in here]:
            raise LedgerDamaged(
                f"The hub has {len(unknown)} contributions of this site to {name!r} that are not "
                "in this folder: an older copy of the whole folder was put in place, and its "
                "ledger may lack their charges. Nothing was trained. Put back the newest copy of "
                "the folder; if there is none, ask the coordinator."
            )

    # ------------------------------------------------------------------ the data owner's limit

    def raise_budget(
        self, *, epsilon: float | None = None, delta: float | None = None, reason: str
    ) -> Balance:
        """Raise the lifetime limit of the data set; the ledger keeps the owner's reason."""
        with self._working():
            balance = self.ledger.balance(self.dataset)
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
            return self.ledger.allow(self.dataset, budget, reason=reason)

    def allow_exact(self, *, reason: str, allowed: bool = True) -> None:
        """Record whether the data owner lets exact models leave, for studies with a trusted hub."""
        with self._working():
            self.ledger.permit_exact(self.dataset, reason=reason, permitted=allowed)

    # ------------------------------------------------------------------ taking part

    def submit(self, name: str) -> dict[str, Any]:
        """Send the newest contribution; sending it again changes nothing."""
        with self._working():
            self._complete_rotation()
            joined, path = self._joined(name), self.contribution(name)
            contribution = Contribution.load(path, trusted=self.study(name).trusted)
            answer = self._hub(joined).submit(name, contribution, path.read_bytes())
            self._write_joined(name, replace(self._joined(name), submitted=contribution.sequence))
            return answer

    def fetch(self, name: str, *, new_log: bool = False) -> Release | None:
        """Fetch the current release and check it; None while there is none.

        The hub must have signed it, it must fit the study, and the log that it carries must
        continue the one that this site knows, or the release must be in that one: a hub offers an
        earlier release again when a site withdraws. `new_log` accepts another log, after the hub's
        operator has explained it; the releases of the old one are moved into a folder beside.
        """
        with self._working():
            self._complete_rotation()
            joined, place = self._joined(name), self._place(name)
            content = self._hub(joined).fetch_release(name)
            if content is None:
                return None
            part = place / "release.part"
            write_durably(part, content)
            try:
                release = check_release(self.study(name), Release.load(part, key=joined.hub_key))
                if new_log:
                    self._put_aside_releases(place, release)
                else:
                    self._check_log(name, release)
                part.replace(place / release.filename)
            finally:
                part.unlink(missing_ok=True)
            log = None
            if release.log is not None:
                known = None if new_log else self.log(name)
                log = _merge(known, release.log.add(release.digest)).as_dict()
            # A shared folder names no key: the first release fixes it.
            hub_key = joined.hub_key or release.sealed.key
            kept = replace(self._joined(name), release=release.sequence, hub_key=hub_key, log=log)
            self._write_joined(name, kept)
            return release

    def _check_log(self, name: str, release: Release) -> None:
        """Refuse a release that does not continue what this site has seen."""
        kept, known, log = self._joined(name).release, self.log(name), release.log
        here = self._place(name) / release.filename
        problem = None
        if known is not None and known.lists(release.sequence, release.digest):
            return  # perhaps an earlier one, which a hub offers again when a site withdraws
        if kept is not None and release.sequence < kept:
            problem = f"is older than release {kept} that is here"
        elif here.exists() and SealedFile(here, RELEASE).digest != release.digest:
            problem = "is here already with other content"
        elif log is None and known is not None:
            problem = "carries no log, and earlier ones did"
        elif log is None and release.sequence - (kept or 0) > MOST_LISTED:
            problem = f"has a number far beyond release {kept or 0}, the newest here"
        elif log is not None and known is not None:
            whole = log.add(release.digest)
            if not known.overlaps(whole):
                problem = f"comes too long after release {known.length}, the newest here"
            elif (number := known.find_difference(whole)) is not None:
                problem = f"was made after another release {number} than the one this site saw"
        if problem is not None:
            raise ContributionRejected(
                f"The hub's release {release.sequence} of {name!r} {problem}. It was not kept. Ask "
                "the hub's operator; if a restored hub explains it, fetch with --new-log."
            )

    def _put_aside_releases(self, place: Path, release: Release) -> None:
        """Move the releases of another log into a folder of their own."""
        aside = place / f"before-{release.digest[:16]}"
        for file in place.glob("release-*.safetensors"):
            aside.mkdir(exist_ok=True)
            file.replace(aside / file.name)

    def describe_own_part(self, name: str, release: Release) -> str:
        """Say whether this site's own contribution is in a release."""
        numbers = {
            SealedFile(file, KIND).digest: number
            for number, file in enumerate(self._contributions(name), start=1)
        }
        own = [source for source in release.sources if source.site == self.name]
        if any(source.digest in numbers and source.site != self.name for source in release.sources):
            return "Warning: it lists a contribution of this site under another name."
        if not own:
            submitted = self._joined(name).submitted
            return (
                "Nothing of this site is in it."
                if submitted is None
                else f"This site's contribution {submitted} is not in it."
            )
        if own[0].digest not in numbers:
            return (
                "Warning: it lists a contribution in this site's name that is not in this folder."
            )
        return f"This site's contribution {numbers[own[0].digest]} is in it."

    def withdraw(self, name: str) -> dict[str, Any]:
        """Take the contribution out of future releases.

        What was published stays published, and what was spent stays spent.
        """
        with self._working():
            self._complete_rotation()
            return self._hub(self._joined(name)).withdraw(name)

    def open_view(self, name: str) -> str:
        """Return a link that shows the site its own page on the hub's dashboard.

        It works once, for a few minutes.
        """
        with self._working():
            self._complete_rotation()
            return self._hub(self._joined(name)).open_view(name)

    def _hub(self, joined: Joined) -> HubClient | SharedFolder:
        """Return where a study was joined."""
        if joined.hub.startswith(FOLDER):
            return SharedFolder(Path(joined.hub.removeprefix(FOLDER)), self.name)
        return HubClient(joined.hub, self.key, joined.certificate)

    # ------------------------------------------------------------------ changing the key

    def rotate_key(self) -> str:
        """Replace the site's key at every hub that knows it, then here; return the new one."""
        with self._working():
            old, new_path = self.key, self.folder / "key.new.pem"
            if not new_path.exists():
                self._check_submitted()
            new = SigningKey.at(new_path)
            for name in self.studies:
                hub = self._hub(self._joined(name))
                if isinstance(hub, HubClient):
                    hub.rotate_key(name, new)
            kept = self.folder / f"key.{old.public[:16]}.pem"
            if not kept.exists():
                os.link(self.folder / "key.pem", kept)
            new_path.replace(self.folder / "key.pem")  # at every moment there is a key
            return new.public

    def _check_submitted(self) -> None:
        """Refuse to lose contributions that were paid for: the old key signed them."""
        for name in self.studies:
            status = self.status(name)
            if status["contributions"] > (status["submitted"] or 0):
                raise SettingsError(
                    f"A contribution to {name!r} is signed with the present key and was not "
                    f"submitted. Nothing was changed. First run: consilience site submit {name}"
                )

    def _complete_rotation(self) -> None:
        """Finish a rotation that was interrupted: a hub may accept only the new key already."""
        if (self.folder / "key.new.pem").exists():
            self.rotate_key()

    # ------------------------------------------------------------------ keeping the ledger

    def backup(self, path: str | os.PathLike[str]) -> str:
        """Copy the ledger; return the head of its chain, to be written down elsewhere."""
        head = self.ledger.verify()
        self.ledger.backup(path)
        return head

    def recover(self, path: str | os.PathLike[str]) -> int:
        """Replace a lost ledger by its backup; return how many charges were missing from it.

        Every contribution carries the receipt of its charge. So what this site handed out since
        the backup is known, and is charged again.
        """
        with self._working(with_ledger=False):
            return self._recover(path)

    def _recover(self, path: str | os.PathLike[str]) -> int:
        target = self.folder / "ledger.sqlite"
        if any(self.folder.glob("ledger.sqlite*")):
            raise SettingsError(
                "The site still has a ledger. Nothing was restored. If it is damaged, first move "
                "it away together with its -wal and -shm files. Otherwise keep it: it is newer."
            )
        Ledger(path).verify()
        # The copy becomes the site's ledger only once every charge is back in it: a machine that
        # stops before that has restored nothing.
        with tempfile.TemporaryDirectory(prefix=".recovering-", dir=self.folder) as place:
            ledger = Ledger(shutil.copyfile(path, Path(place) / "ledger.sqlite"))
            missing = self._charge_again(ledger)
            ledger.backup(target)
        return missing

    def _charge_again(self, ledger: Ledger) -> int:
        """Enter everything here whose receipt the ledger lacks; return how much that was."""
        files, notes = list(self._missing_receipts(ledger)), self._missing_notes(ledger)
        for name, file in files:
            study = self.study(name)
            contribution = Contribution.load(file, trusted=study.trusted)
            receipt = contribution.sealed.facts["receipt"]
            ledger.within(study.digest).charge(
                contribution.events,
                dataset=str(receipt["dataset"]),
                key=f"recovered-{receipt['key']}",
                purpose="recovered from a contribution",
            )
        for name, key in notes:
            ledger.permit_exact(self.dataset, reason="recovered: exact contributions were made")
            ledger.record_exact(
                dataset=self.dataset,
                key=f"recovered-{key}",
                purpose=f"recovered: exact contribution to {name}",
                study=self.study(name).digest,
            )
        return len(files) + len(notes)


def _merge(known: ReleaseLog | None, newer: ReleaseLog) -> ReleaseLog:
    """Return the longer of two logs that agree, from the first release that either lists on."""
    if known is not None and known.length >= newer.length:
        return known
    if known is None or known.before >= newer.before:
        return newer
    digests = (*known.digests, *newer.digests[known.length - newer.before :])
    return ReleaseLog(known.before, known.head, digests).shorten(MOST_KEPT)


def compare_logs(ours: ReleaseLog, theirs: ReleaseLog) -> tuple[bool, str]:
    """Tell whether two sites saw the same releases, and say it in a sentence."""
    common = min(ours.length, theirs.length)
    if not ours.overlaps(theirs):
        return False, "The two logs list different times and cannot be compared."
    number = ours.find_difference(theirs)
    if number is None:
        return True, f"Both sites saw the same {common} releases."
    return False, (
        f"The sites saw different releases, at the latest from number {number} on: the hub signed "
        "two histories. Keep both logs, and ask the hub's operator."
    )


def _digest_table(study: Study, table: object) -> str:
    """Return the SHA-256 of a table: of its files, or of its columns that the study reads."""
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
