"""A site: what it does with its studies, its ledger and a hub.

Nothing happens that the site did not ask for: a study is fetched and read before anything is
trained; a training is shown, approved and charged before anything is computed; and a file is
submitted by a separate command. Each step writes durably what it did before it reports it, so that
a machine that stops at any moment resumes where it was.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilience.errors import BudgetExceeded, ContributionRejected, SettingsError
from consilience.files.certificate import Page
from consilience.files.contribution import Contribution
from consilience.files.durable import write_durably
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.privacy.ledger import Ledger
from consilience.site.client import FOLDER, HubClient, SharedFolder, check_address
from consilience.site.folder import Attempt, Joined, SiteFolder
from consilience.study.pages import of_training
from consilience.study.study import Study


@dataclass(frozen=True)
class Preview:
    """What a training would do: the page to approve, its cost, and whether the ledger allows it."""

    page: Page
    epsilon: float
    delta: float
    left: float | None
    fits: bool


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
    ) -> Study:
        """Enrol at a hub with a one-time invitation, and fetch the study and its public files."""
        hub = HubClient(check_address(address), self.key, certificate)
        name, hub_key = hub.enrol(invitation, self.name, fetch_only=fetch_only)
        study = hub.fetch_study(name)
        joined = Joined(study.to_dict(), hub.address, hub_key, certificate, fetch_only)
        return self._keep_study(study, joined)

    def join_folder(self, folder: str | os.PathLike[str]) -> Study:
        """Take part through a shared folder with a study file and its public files."""
        study = Study.in_folder(Path(folder))
        joined = Joined(study.to_dict(), f"{FOLDER}{Path(folder).absolute()}")
        return self._keep_study(study, joined)

    def _keep_study(self, study: Study, joined: Joined) -> Study:
        """Keep a study and copies of its public files here."""
        hub, place = self._hub(joined), self._place(study.name)
        place.mkdir(parents=True, exist_ok=True)
        for file in study.files:
            write_durably(place / file.file, hub.fetch_file(study.name, file))
        self._write_joined(study.name, joined)
        return study

    # ------------------------------------------------------------------ training

    def preview(self, name: str, *, epsilon: float) -> Preview:
        """Say what a training would disclose and cost. Nothing is trained or charged."""
        study = self.study(name)
        study.check_epsilon(epsilon)
        balance = self.ledger.balance(self.dataset)
        left, limit = balance.left.epsilon, balance.limit.epsilon
        fits = study.trusted or left is None or epsilon <= left
        page = of_training(
            study, site=self.name, dataset=self.dataset, epsilon=epsilon, left=left, limit=limit
        )
        return Preview(page, math.inf if study.trusted else epsilon, study.delta, left, fits)

    def train(
        self,
        name: str,
        table: object,
        *,
        epsilon: float,
        approve: Callable[[Preview], bool] | None = None,
    ) -> Path | None:
        """Train on a table after approval; return the file that may be submitted.

        Returns None if approval was refused. A training that was charged but not written, because
        the machine stopped, is completed without asking or charging again.

        Privacy
        -------
        The ledger is charged before any noise is drawn; see `Study.train`.
        """
        self._complete_rotation()
        study, joined = self.study(name), self._joined(name)
        if joined.fetch_only:
            raise SettingsError(
                f"The site joined {name!r} to fetch only. Nothing was trained. Join again to "
                "contribute."
            )
        preview = self.preview(name, epsilon=epsilon)
        sequence = len(self._contributions(name)) + 1
        key = self._charged_key(joined.attempt, sequence, epsilon)
        if key is None:
            if not preview.fits:
                raise BudgetExceeded(
                    f"Study {name!r} was to be trained at epsilon={epsilon:g}, but "
                    f"{preview.left:g} is left of data set {self.dataset!r}. Nothing was trained "
                    "or charged. Choose less, or ask the data owner."
                )
            if approve is not None and not approve(preview):
                return None
            key = f"{study.digest[:16]}-{sequence}-{os.urandom(8).hex()}"
            attempt = Attempt(sequence=sequence, epsilon=epsilon, key=key)
            self._write_joined(name, replace(joined, attempt=attempt))
        contribution = study.train(
            table,
            None if study.trusted else self.ledger,
            epsilon=epsilon,
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

    def _charged_key(self, attempt: Attempt | None, sequence: int, epsilon: float) -> str | None:
        """Return the key of an attempt at this very training, if the ledger holds its result."""
        if attempt is None or (attempt["sequence"], attempt["epsilon"]) != (sequence, epsilon):
            return None
        return attempt["key"] if self.ledger.sealed(attempt["key"]) is not None else None

    # ------------------------------------------------------------------ taking part

    def submit(self, name: str) -> dict[str, Any]:
        """Send the newest contribution; sending it again changes nothing."""
        self._complete_rotation()
        joined, path = self._joined(name), self.contribution(name)
        contribution = Contribution.load(path, trusted=self.study(name).trusted)
        answer = self._hub(joined).submit(name, contribution, path.read_bytes())
        self._write_joined(name, replace(self._joined(name), submitted=contribution.sequence))
        return answer

    def fetch(self, name: str) -> Release | None:
        """Fetch the newest release and check the hub's signature; None while there is none."""
        self._complete_rotation()
        joined = self._joined(name)
        content = self._hub(joined).fetch_release(name)
        if content is None:
            return None
        part = self._place(name) / "release.part"
        write_durably(part, content)
        try:
            release = Release.load(part, key=joined.hub_key)
            self._check_release(release, self.study(name), joined.release)
            part.replace(self._place(name) / release.filename)
        finally:
            part.unlink(missing_ok=True)
        # A shared folder names no key: the first release fixes it.
        hub_key = joined.hub_key or release.sealed.key
        changed = replace(self._joined(name), release=release.sequence, hub_key=hub_key)
        self._write_joined(name, changed)
        return release

    def _check_release(self, release: Release, study: Study, kept: int | None) -> None:
        if release.study != study.reference:
            raise ContributionRejected(
                "The release belongs to another study. It was not kept. Ask the hub's operator."
            )
        if kept is not None and release.sequence < kept:
            raise ContributionRejected(
                f"The hub sent release {release.sequence}, older than release {kept} that is "
                "here. It was not kept. Ask the hub's operator."
            )

    def withdraw(self, name: str) -> dict[str, Any]:
        """Take the contribution out of future releases.

        What was published stays published, and what was spent stays spent.
        """
        self._complete_rotation()
        return self._hub(self._joined(name)).withdraw(name)

    def open_view(self, name: str) -> str:
        """Return a link that shows the site its own page on the hub's dashboard.

        It works once, for a few minutes.
        """
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
        """Charge every contribution here whose receipt the ledger lacks; return their number."""
        missing, known = 0, {charge.hash for charge in ledger.charges()}
        for name in self.studies:
            study = self.study(name)
            for file in self._contributions(name):
                contribution = Contribution.load(file, trusted=study.trusted)
                receipt = contribution.sealed.facts.get("receipt")
                if isinstance(receipt, Mapping) and receipt.get("hash") not in known:
                    ledger.within(study.digest).charge(
                        contribution.events,
                        dataset=str(receipt["dataset"]),
                        key=f"recovered-{receipt['key']}",
                        purpose="recovered from a contribution",
                    )
                    missing += 1
        return missing
