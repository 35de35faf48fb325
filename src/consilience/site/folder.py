"""A site's folder: its key, its ledger, and what it holds of each study that it has joined."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict

from consilience.errors import (
    ConsilienceError,
    ContributionRejected,
    LedgerDamaged,
    SettingsError,
)
from consilience.files.contribution import KIND, WITHDRAWAL, WITHDRAWN, paid_events
from consilience.files.durable import write_durably
from consilience.files.log import ReleaseLog
from consilience.files.release import KIND as RELEASE
from consilience.files.release import Release, in_order
from consilience.files.sealed import SealedFile, SigningKey
from consilience.privacy.accounting import events_from_json, total
from consilience.privacy.guarantee import Budget, Guarantee, show_bound
from consilience.privacy.ledger import Ledger, Note
from consilience.protocol import is_site_name
from consilience.site.client import FOLDER, HubClient, SharedFolder, to_json
from consilience.study.study import Study
from consilience.tables.public import Public

STUDY = "study.json"  # what is kept about a study, in its folder


class Attempt(TypedDict):
    """A training that was approved: after an interruption it is completed, not charged again.

    ``table`` is the digest of the records, which stays in this folder; ``epsilon`` is None for an
    exact contribution.
    """

    sequence: int
    epsilon: float | None
    key: str
    table: NotRequired[str]
    learner: NotRequired[str]


class Withdrawn(TypedDict):
    """A withdrawal that was confirmed.

    It is of all contributions that had been sent, up to number ``sequence``, when the log listed so
    many ``releases``.
    """

    sequence: int
    releases: int


class Known(TypedDict):
    """What a site knows of its ledger beside it, in the file ``ledger.json``.

    ``ledgers`` are the hashes of the first entries of all that were its own, ``decision`` is the
    hash of the data owner's last decision, and ``exact`` says whether exact models may leave by it.
    """

    ledgers: list[str]
    decision: str
    exact: bool


@dataclass(frozen=True)
class Joined:
    """What a site keeps about a study that it has joined, in the file ``study.json``."""

    study: Mapping[str, Any]
    hub: str
    hub_key: str | None = None
    certificate: str | None = None
    fetch_only: bool = False
    attempt: Attempt | None = None
    submitted: int | None = None
    sent: Sequence[str] = ()  # digests of what was sent to the hub, whatever it answered
    handed_over: Sequence[str] = ()  # digests of what the hub confirmed, since this is recorded
    withdrawn: Withdrawn | None = None
    release: int | None = None
    key: str | None = None  # the one that the hub knows, if it has not taken the present one
    exact: Mapping[str, str] = field(default_factory=dict)  # ledger entries, by key
    log: Mapping[str, Any] | None = None  # of releases, including the newest here
    keyholders: Sequence[str] = ()  # of a blind study, whose keys the data owner confirmed
    tables: Mapping[str, str] = field(default_factory=dict)  # digests of those behind contributions
    counted: Sequence[str] | None = None  # keys of the sites that are counted on; None: the roster

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what was written; what another version added is ignored."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in facts.items() if name in known})


class SiteFolder:
    """The files of a site. Every change is written durably before anything else happens.

    One command works on a folder at a time, and none with a ledger that lacks a charge of which the
    folder holds the receipt.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        facts = self._read("site.json")
        if facts is None:
            raise SettingsError(
                f"There is no site in the folder {self.folder.name!r}. Nothing was done. Make one "
                "with: consilience site init"
            )
        self.name: str = facts["name"]
        self.dataset: str = facts["dataset"]
        self._worker: tuple[int, int] | None = None  # the process and thread that hold the folder

    @classmethod
    def init(
        cls,
        folder: str | os.PathLike[str],
        *,
        name: str,
        dataset: str,
        budget: Budget,
        allow_exact: bool = False,
    ) -> Self:
        """Make a site: a key, a ledger, and the limit that the data owner allows.

        `allow_exact` lets exact models leave, for studies whose hub is trusted; no limit bounds
        what these disclose. A ledger that is in the folder stays in force with what it allows.
        """
        target = Path(folder)
        if (target / "site.json").exists():
            raise SettingsError(
                f"The folder {target.name!r} holds a site already. Nothing was changed. To raise "
                "the limit of its data set: consilience site budget raise"
            )
        if not is_site_name(name):
            raise SettingsError(
                "The name of a site must be letters, digits, single spaces and ._- (at most 100). "
                f"Got {name!r} instead. Nothing was made. Choose another name."
            )
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        ledger = Ledger(target / "ledger.sqlite")
        known = bool(ledger.datasets())
        if known:
            _check_same(ledger, dataset, budget, allow_exact=allow_exact)
        SigningKey.at(target / "key.pem")
        if not known:
            ledger.allow(dataset, budget)
            if allow_exact:
                ledger.permit_exact(dataset, reason="allowed when the site was made")
        write_durably(target / "site.json", to_json({"name": name, "dataset": dataset}))
        site = cls(target)
        site._remember(ledger)
        return site

    @property
    def key(self) -> SigningKey:
        """The key that signs for the site."""
        return SigningKey.load(self.folder / "key.pem")

    @property
    def ledger(self) -> Ledger:
        """The site's ledger, which lacks no charge of which this folder holds the receipt."""
        ledger = self._ledger
        self.check_ledger()
        return ledger

    @property
    def _ledger(self) -> Ledger:
        """The ledger as it is, for those who check or complete it."""
        path = self.folder / "ledger.sqlite"
        if not path.exists():
            raise SettingsError(
                "The site's ledger is gone, and with it the record of what was spent. Nothing "
                "was done. Restore it from its backup with: consilience site recover"
            )
        return Ledger(path)

    @contextmanager
    def _working(self, *, with_ledger: bool = True) -> Iterator[None]:
        """Hold the folder while something in it changes; tidy up what a killed command left.

        Whatever is done begins with a look at the ledger, unless the ledger is to be replaced.
        """
        me = (os.getpid(), threading.get_ident())
        if self._worker == me:
            yield
            return
        descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SettingsError(
                    f"Another command is at work in the folder {self.folder.name!r}. Nothing was "
                    "done. Wait until it has ended, and try again."
                ) from None
            self._worker = me
            try:
                self._tidy()
                if with_ledger:
                    self.check_ledger()
                yield
                self._remember(self._ledger)
            finally:
                self._worker = None
        finally:
            os.close(descriptor)

    def _tidy(self) -> None:
        """Remove drafts of files that were never finished."""
        drafts = (".*.part", ".ledger.sqlite.*", "studies/*/.*.part", "studies/*/release.part")
        for draft in (path for pattern in drafts for path in self.folder.glob(pattern)):
            draft.unlink(missing_ok=True)
        for place in self.folder.glob(".recovering-*"):
            shutil.rmtree(place, ignore_errors=True)

    def check_ledger(self) -> None:
        """Refuse a ledger that lacks what this folder holds a proof of: charges and decisions."""
        known = self._known  # read first: what another process decides now is then in the ledger
        ledger = self._ledger
        self._check_own(known, ledger)
        missing = [*self._missing_receipts(ledger), *self._missing_notes(ledger)]
        if not missing and self._lacks_decision(known, ledger):
            raise LedgerDamaged(
                "The site's ledger lacks the data owner's last decision, which this folder knows "
                "of: an older copy of it was put in place. Nothing was done. Put back the newest "
                "copy; if there is none: consilience site recover"
            )
        if missing:
            raise LedgerDamaged(
                f"The site's ledger lacks {len(missing)} of the charges whose receipts are in this "
                "folder: an older copy of it was put in place. Nothing was done. Enter what is "
                "missing with: consilience site recover"
            )

    @property
    def _known(self) -> Known | None:
        """What is known of the ledger beside it; None in a folder of an earlier version."""
        facts = self._read("ledger.json")
        if facts is None:
            return None
        return Known(ledgers=facts["ledgers"], decision=facts["decision"], exact=facts["exact"])

    def _remember(self, ledger: Ledger) -> None:
        """Note what is decided in a ledger of this site, so that an older copy is noticed."""
        known, notes = self._known, ledger.notes()
        decisions = self._decisions(ledger)
        if not decisions:  # it is of no data set of this site
            return
        ledgers = [] if known is None else known["ledgers"]
        now = Known(
            ledgers=list(dict.fromkeys((*ledgers, notes[0].hash))),
            decision=decisions[-1].hash,
            exact=ledger.permits_exact(self.dataset),
        )
        if now != known:
            write_durably(self.folder / "ledger.json", to_json(now))

    def _decisions(self, ledger: Ledger) -> list[Note]:
        """Return what the data owner decided, oldest first."""
        return [note for note in ledger.notes(self.dataset) if note.kind != "exact"]

    def _lacks_decision(self, known: Known | None, ledger: Ledger) -> bool:
        """Tell whether a ledger lacks the last decision that this folder knows of."""
        made = {note.hash for note in self._decisions(ledger)}
        return known is not None and known["decision"] not in made

    def _check_own(self, known: Known | None, ledger: Ledger) -> None:
        """Refuse a ledger that is none of this site's: its limit is another data set's."""
        first = [note.hash for note in ledger.notes()[:1]]
        if known is not None and not set(first) & set(known["ledgers"]):
            raise LedgerDamaged(
                f"The ledger {ledger.path.name!r} is not one of this site's, or of another data "
                "set. Nothing was done. Use the site's own ledger, or a backup of it; if there is "
                "none, move it away and let the data owner declare the limit again: consilience "
                "site recover --epsilon E"
            )

    def _missing_receipts(self, ledger: Ledger) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield study, digest and facts of each contribution whose charge the ledger lacks.

        A name alone proves no charge, because a sender can write any into a receipt: the charge
        must also be one of the file's own events.
        """
        charges = ledger.charges()
        known = {charge.hash: charge for charge in charges} | {
            charge.key: charge for charge in charges
        }
        for name in self.studies:
            for digest, facts in self._proofs(name).items():
                receipt = facts.get("receipt")
                if not isinstance(receipt, Mapping):
                    continue
                # Earlier versions named a charge that they entered again by its receipt's key.
                by_key = f"recovered-{receipt.get('key')}"
                names = (str(receipt.get("hash")), recovered_key(digest), by_key)
                paid = (receipt.get("dataset"), paid_events(facts))
                found = (known[each] for each in names if each in known)
                if all((charge.dataset, charge.events) != paid for charge in found):
                    yield name, digest, facts

    def _missing_notes(self, ledger: Ledger) -> list[tuple[str, str]]:
        """Return study and key of each exact contribution that the ledger lacks."""
        notes = ledger.notes()
        known = {note.hash for note in notes} | {note.key for note in notes}
        return [
            (name, key)
            for name in self.studies
            if STUDY not in self.unreadable(name)
            for key, entry in self._joined(name).exact.items()
            if known.isdisjoint((entry, f"recovered-{key}"))
        ]

    @property
    def studies(self) -> list[str]:
        """Names of the studies that the site has joined."""
        return sorted(path.parent.name for path in self.folder.glob(f"studies/*/{STUDY}"))

    def study(self, name: str) -> Study:
        """Return a study that the site has joined."""
        return Study.from_dict(self._joined(name).study, stored=True)

    def hub_key(self, name: str) -> str | None:
        """Return the key that signs a study's releases; None before a folder's first one."""
        return self._joined(name).hub_key

    def public(self, name: str) -> Public | None:
        """Return the study's public records, if it has any."""
        study = self.study(name)
        return None if study.public is None else study.public.read(study.schema, self._place(name))

    def status(self, name: str) -> dict[str, Any]:
        """Return how far the site is with a study, as far as its files can be read."""
        unreadable = self.unreadable(name)
        joined = Joined({}, "?") if STUDY in unreadable else self._joined(name)
        return {
            "study": name,
            "unreadable": list(unreadable),
            "hub": joined.hub,
            "fetch_only": joined.fetch_only,
            "contributions": len(self._contributions(name)),
            "submitted": joined.submitted,
            "withdrawn": (joined.withdrawn or {"sequence": 0})["sequence"]
            >= (joined.submitted or math.inf),
            "release": joined.release,
            **self._blind_status(name, joined),
        }

    def _blind_status(self, name: str, joined: Joined) -> dict[str, Any]:
        """Return what the newest masked file promises, with and without others; empty otherwise."""
        study = self.study(name) if joined.study else None
        if study is None or study.blind is None:
            return {}
        confirmed = [key for key in study.blind.keyholders if key in joined.keyholders]
        said = [
            f"blind hub: {len(confirmed)} of {len(study.blind.keyholders)} keyholders confirmed by "
            "the data owner"
        ]
        files = [file.facts for file in self._contributions(name).values()]
        masked = [facts for facts in files if not facts["blind"]["only_noise"]]
        if files and not files[-1]["blind"]["only_noise"]:
            shared = Guarantee.from_dict(files[-1]["guarantee"])
            by_itself = Guarantee.from_dict(files[-1]["share"]["alone"])
            said += [
                f"newest file: epsilon {show_bound(shared.epsilon)} if "
                f"{'; and if '.join(shared.assumptions)}",
                f"if everybody else colludes: epsilon {show_bound(by_itself.epsilon)} instead",
            ]
        elif files:
            said.append("newest file: noise only, no record")
        return {"blind": {"confirmed": confirmed, "trained": len(masked), "said": said}}

    def shares(self, path: Path) -> bool:
        """Tell whether a file would lie in a folder that the site shares with others."""
        hubs = (self._joined(name).hub for name in self.studies if not self.unreadable(name))
        shared = (Path(hub.removeprefix(FOLDER)) for hub in hubs if hub.startswith(FOLDER))
        return any(path.resolve().is_relative_to(each.resolve()) for each in shared)

    def is_in_folder(self, name: str) -> bool:
        """Tell whether a study was joined through a shared folder, and not at a hub."""
        return self._joined(name).hub.startswith(FOLDER)

    def handed_over(self, name: str) -> list[Guarantee | None]:
        """Return the cost of each contribution that was sent, whatever was answered."""
        joined, proofs = self._joined(name), self._proofs(name)
        sent = {*joined.handed_over, *joined.sent} & proofs.keys()
        return [cost_of(proofs[digest]) for digest in sorted(sent)]

    def contribution(self, name: str, sequence: int | None = None) -> Path:
        """Return the file of a contribution, by default the newest."""
        files = [
            path
            for path, file in self._contributions(name).items()
            if sequence is None or file.facts["sequence"] == sequence
        ]
        if not files:
            raise SettingsError(
                f"There is no trained contribution to {name!r}. Train first: consilience site train"
            )
        return files[-1]

    def release(self, name: str) -> Release:
        """Return the release that was fetched last."""
        joined = self._joined(name)
        files = in_order(self._place(name).glob("release-*.safetensors"))
        if not files:
            raise SettingsError(
                f"No release of {name!r} was fetched yet. Fetch it first: consilience site fetch"
            )
        last = [file for file in files if file.stem == f"release-{joined.release or 0:04d}"]
        return Release.load((last or files)[-1], key=joined.hub_key)

    def releases(self, name: str, place: Path | None = None) -> dict[int, str]:
        """Return the digests of the releases that are here, or in another place, by number."""
        digests = {}
        for path in sorted((place or self._place(name)).glob("release-*.safetensors")):
            with suppress(ContributionRejected):  # damaged; the log knows its digest
                file = SealedFile(path, RELEASE)
                digests[int(file.facts["sequence"])] = file.digest
        return digests

    def log(self, name: str) -> ReleaseLog | None:
        """Return the log of the study's releases as this site saw it; None if it saw none."""
        facts = self._joined(name).log
        return None if facts is None else ReleaseLog.from_dict(facts)

    def _hub(self, joined: Joined, key: SigningKey | None = None) -> HubClient | SharedFolder:
        """Return where a study was joined, as seen with a key, by default the present one."""
        if joined.hub.startswith(FOLDER):
            path = Path(joined.hub.removeprefix(FOLDER))
            own = (self.folder, key or self.key, self._own_keys())
            return SharedFolder(path, self.name, *own, joined.hub_key)
        # A site at a hub has had its key since it joined; what is signed for none, none accepts.
        return HubClient(joined.hub, key or self.key, joined.hub_key or "", joined.certificate)

    # ------------------------------------------------------------------ files

    def _place(self, name: str) -> Path:
        """Return the folder of a study."""
        if "/" in name or name.startswith("."):
            raise SettingsError(
                f"There is no study {name!r} here. Join it first: consilience site join"
            )
        return self.folder / "studies" / name

    def _own_keys(self) -> dict[str, SigningKey]:
        """Return all keys in this folder by their public keys."""
        keys = (SigningKey.load(file) for file in sorted(self.folder.glob("key*.pem")))
        return {key.public: key for key in keys}

    def _contributions(self, name: str) -> dict[Path, SealedFile]:
        """Return the contributions here in the order of the numbers that they state.

        There are two of one number if one was made in an older copy of this folder.
        """
        found = self._sealed(name, KIND).items()
        files = {path: file for path, file in found if isinstance(file, SealedFile)}
        return dict(sorted(files.items(), key=lambda each: int(each[1].facts["sequence"])))

    def _sealed(self, name: str, kind: str) -> dict[Path, SealedFile | ConsilienceError]:
        """Return the files here that prove what was spent on a study, or what is wrong with one."""
        ended = {KIND: ".safetensors", WITHDRAWAL: WITHDRAWN}[kind]
        files: dict[Path, SealedFile | ConsilienceError] = {}
        for path in sorted(self._place(name).glob(f"{KIND}-*{ended}")):
            try:
                files[path] = SealedFile(path, kind)
            except ConsilienceError as problem:
                files[path] = problem
        return files

    def unreadable(self, name: str) -> dict[str, str]:
        """Return the names of a study's files here that cannot be read, each with its problem.

        Nothing tells what they cost: they stop what is done for their study, and nothing else.
        """
        damaged = {}
        try:
            self._joined(name)
        except SettingsError as problem:
            damaged[STUDY] = str(problem)
        for path, file in (
            *self._sealed(name, KIND).items(),
            *self._sealed(name, WITHDRAWAL).items(),
        ):
            if isinstance(file, ConsilienceError):
                damaged[path.name] = str(file)
        return damaged

    def _require_readable(self, name: str) -> None:
        if name not in self.studies:
            self._joined(name)  # which says so
        damaged = self.unreadable(name)
        if damaged:
            raise ContributionRejected(
                f"In the folder of study {name!r}, this cannot be read, so that nothing tells what "
                f"it cost: {', '.join(damaged)}. The problem: {next(iter(damaged.values()))} "
                "Nothing was trained or sent. Put back a copy; if there is none, move it away, and "
                "fetch what was submitted of it: consilience site recover"
            )

    def _proofs(self, name: str) -> dict[str, Mapping[str, Any]]:
        """Return the facts of all contributions of which a proof is here, by their digests.

        Of those that were withdrawn from a shared folder it may be a note instead of the file.
        """
        notes = (
            note for note in self._sealed(name, WITHDRAWAL).values() if isinstance(note, SealedFile)
        )
        withdrawn = {str(note.facts["contribution"]): note.facts for note in notes}
        here = {file.digest: file.facts for file in self._contributions(name).values()}
        return {**withdrawn, **here}

    def _next_number(self, name: str) -> int:
        """Return the number of the next contribution: one more than the highest here."""
        numbers = (int(facts["sequence"]) for facts in self._proofs(name).values())
        return max(numbers, default=0) + 1

    def _newest_number(self, name: str, *, key: str | None = None) -> int:
        """Return the highest number of a contribution here, with `key` of those it signed, or 0."""
        files = self._contributions(name).values()
        numbers = (file.facts["sequence"] for file in files if key in (None, file.facts["key"]))
        return max(map(int, numbers), default=0)

    def _joined(self, name: str) -> Joined:
        facts = self._read(f"studies/{self._place(name).name}/{STUDY}")
        if facts is None:
            known = ", ".join(self.studies) or "none yet"
            raise SettingsError(
                f"This site has not joined a study {name!r} (joined: {known}). Join it first."
            )
        try:
            return Joined.from_dict(facts)
        except TypeError:  # something is missing
            raise _damaged(f"studies/{name}/{STUDY}") from None

    def _write_joined(self, name: str, joined: Joined) -> None:
        write_durably(self._place(name) / STUDY, to_json(asdict(joined)))

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return the facts in one of the site's files; None if there is no such file."""
        try:
            return dict(json.loads((self.folder / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            raise _damaged(name) from None


def _damaged(name: str) -> SettingsError:
    return SettingsError(f"The site's file {name!r} cannot be read. Nothing was done. Restore it.")


def _check_same(ledger: Ledger, dataset: str, budget: Budget, *, allow_exact: bool) -> None:
    """Refuse to change, without the owner's reason, what a ledger allows that was there before."""
    if dataset not in ledger.datasets():
        raise SettingsError(
            f"The folder holds a ledger, and it knows no data set {dataset!r}. Nothing was made. "
            f"Use its own name of the data set: {', '.join(map(repr, ledger.datasets()))}."
        )
    if not ledger.balance(dataset).is_limited_by(budget):
        raise SettingsError(
            f"The folder holds a ledger, whose limit for data set {dataset!r} is another one. "
            "Nothing was made. Name the limit that it has (consilience ledger show); the data "
            "owner can raise it afterwards: consilience site budget raise"
        )
    if allow_exact and not ledger.permits_exact(dataset):
        raise SettingsError(
            f"The folder holds a ledger that lets no exact model of data set {dataset!r} leave. "
            "Nothing was made. Leave out --allow-exact; the data owner can decide afterwards: "
            "consilience site budget allow-exact"
        )


def cost_of(facts: Mapping[str, Any]) -> Guarantee | None:
    """Return what a contribution costs, by its facts or those of a note; None if it is exact.

    Nor does noise without records cost anything.
    """
    if (facts.get("blind") or {}).get("only_noise"):
        return None
    if "guarantee" in facts:
        return Guarantee.from_dict(facts["guarantee"])
    events = events_from_json(facts["events"])
    return total(events) if events else None


def recovered_key(digest: str) -> str:
    """Return the name of the charge that is entered again for a file: nobody else's has it."""
    return f"recovered-{digest}"
