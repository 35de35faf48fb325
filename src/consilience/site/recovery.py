"""How a site brings its ledger up to everything that is known to have been handed out."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from consilience.errors import ConsilienceError, SettingsError
from consilience.files.contribution import WITHDRAWN, Contribution, Withdrawal, paid_events
from consilience.files.durable import write_durably
from consilience.privacy.accounting import alone
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger, Note
from consilience.privacy.spending import is_sealed
from consilience.protocol import MOST_SKIPPED
from consilience.site.blind import alone_account
from consilience.site.client import HubClient, SharedFolder
from consilience.site.folder import recovered_key
from consilience.site.releases import SiteReleases
from consilience.study.check import check_contribution, is_at_most
from consilience.study.pages import promise


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


class SiteRecovery(SiteReleases):
    """What a site does to keep its ledger, and to get it back."""

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
