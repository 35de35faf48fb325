"""Both ends of a relay: folders between which any transport can carry signed files.

At a site, `Outbox` is the shared folder of ``consilience site join FOLDER``: ``site submit`` puts
contributions there, the relay sends these and nothing else, and it puts releases where ``site
fetch`` finds them. It needs neither the site's key nor its ledger nor its records. At the
coordinator, `Collection` keeps each file that arrives before it asks for the next, and makes the
release. After an interruption, both continue from the files.

Where the hub is blind, the coordinator does what a hub does, and the papers of `blind/papers.py` go
the same ways. A keyholder has an outbox too: it is sent the signed facts of files, never the files.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Collection as Several
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from consilience.blind.masked import ACKNOWLEDGEMENT, BATCH, OPENING, MaskedFile, Opening
from consilience.blind.pads import SealKey
from consilience.blind.papers import FACTS, Carried, Papers
from consilience.blind.roster import CARD, ROSTER, Card, Roster
from consilience.errors import ConsilienceError, SettingsError
from consilience.files.contribution import KIND, Contribution
from consilience.files.durable import move_durably, write_durably
from consilience.files.log import ReleaseLog
from consilience.files.release import KIND as RELEASE
from consilience.files.release import Release, Source, in_order
from consilience.files.sealed import SealedFile, SigningKey, refused
from consilience.privacy.guarantee import Budget, Guarantee
from consilience.privacy.ledger import Balance, Ledger
from consilience.privacy.spending import Account
from consilience.protocol import DIGEST
from consilience.study.batches import Batches, freeze_roster, gather_batches, seal_path
from consilience.study.collect import (
    Publication,
    Submitted,
    collect,
    earlier_costs,
    read_log,
    read_records,
)
from consilience.study.study import Study

MOST_AT_ONCE = 64 << 20  # bytes in one answer, unless a single file has more
_NAME = re.compile("[a-z0-9][a-z0-9-]{0,63}")
BY_KEYHOLDERS = (CARD, ACKNOWLEDGEMENT, OPENING)  # papers that go to the coordinator
TO_ALL, TO_KEYHOLDERS = (ROSTER, CARD), (FACTS, BATCH)  # and that come from there


# ------------------------------------------------------------------ at a site


@dataclass(frozen=True)
class Offer:
    """What a site's relay has to offer.

    ``present`` has the digests of all contributions, ``files`` those that the coordinator lacks,
    and ``release`` the digest of the newest release at the site.
    """

    present: tuple[str, ...]
    files: Mapping[str, bytes]
    release: str | None


@dataclass(frozen=True)
class Outbox:
    """A folder with one study, the contributions that a site submitted, and the releases."""

    folder: Path
    study: Study

    @classmethod
    def find(cls, folder: str | os.PathLike[str], study: str) -> Outbox:
        """Return the outbox of the study with this digest: `folder` itself, or a folder in it."""
        parent = Path(folder)
        places = [parent, *sorted(path for path in parent.glob("*") if path.is_dir())]
        for place in places:
            try:
                there = Study.in_folder(place)
            except SettingsError:  # no study, or one that somebody is still writing
                continue
            if there.digest == study:
                return cls(place, there)
        raise SettingsError(
            f"There is no outbox for the requested study in {parent.name!r}. Nothing was sent. "
            "Put the study file into a folder there, and join it: consilience site join FOLDER"
        )

    def offer(self, held: Several[str]) -> Offer:
        """Return what is here, with the files that are not `held`, oldest first."""
        contributions = sorted(
            (facts["sequence"], digest, path) for digest, (path, facts) in self._files(KIND).items()
        )
        files: dict[str, bytes] = {}
        size = 0
        for _, digest, path in contributions:
            if digest not in held and (not files or size + path.stat().st_size <= MOST_AT_ONCE):
                files[digest] = path.read_bytes()
                size += len(files[digest])
        releases = {
            facts["sequence"]: digest for digest, (_, facts) in self._files(RELEASE).items()
        }
        newest = releases[max(releases)] if releases else None
        return Offer(tuple(digest for _, digest, _ in contributions), files, newest)

    def keep(self, content: bytes, *, key: str) -> Release:
        """Check a release against the coordinator's public `key`; keep it for ``site fetch``."""
        part = self.folder / f".release.{os.getpid()}.part"
        try:
            write_durably(part, content)
            release = Release.load(part, key=key)
            if release.study != self.study.reference:
                raise refused("it was made for another study, or another version of this one")
            path = self.folder / release.filename
            if path.exists() and Release.load(path).digest != release.digest:
                raise refused(f"another release {release.sequence} is here already")
            write_durably(path, content)
        finally:
            part.unlink(missing_ok=True)
        return release

    def papers(self, held: Several[str]) -> dict[str, bytes]:
        """Return what a keyholder left here, by name, as far as it is not `held`."""
        papers = Papers(self.folder)
        return _read_papers(papers, papers.names(BY_KEYHOLDERS), held)

    def paper_names(self) -> list[str]:
        """Return the names of all papers that are here."""
        return Papers(self.folder).names((*TO_ALL, *TO_KEYHOLDERS))

    def keep_paper(self, name: str, content: bytes, *, key: str) -> bool:
        """Keep a paper of a blind study that came from the coordinator, whose public key is `key`.

        Whoever works with it checks everything else: nothing that is carried is believed.
        """
        paper, papers = Carried.read(name, content), Papers(self.folder)
        if self.study.blind is None or paper.study != self.study.reference:
            raise refused("it was made for another study, or another version of this one")
        if paper.kind not in (*TO_ALL, *TO_KEYHOLDERS):
            raise refused("no coordinator has such a paper for anybody")
        if paper.kind == ROSTER and paper.key != key:
            raise refused("the coordinator did not sign it")
        if paper.kind == CARD and paper.key not in (*self.study.blind.keyholders, key):
            raise refused("it was signed by somebody who holds no pads")
        return papers.keep(paper)

    def _files(self, kind: str) -> dict[str, tuple[Path, Mapping[str, Any]]]:
        """Return the files of this study, and their facts, by digest; ignore all other files."""
        files: dict[str, tuple[Path, Mapping[str, Any]]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = SealedFile(path, kind)
            except ConsilienceError:
                continue
            if (
                file.facts.get("study") == self.study.reference
                and type(file.facts.get("sequence")) is int
            ):
                files[file.digest] = (path, file.facts)
        return files


# ------------------------------------------------------------------ at the coordinator


@dataclass(frozen=True)
class _Held:
    """A contribution that was checked and kept: its facts, and the path of its file."""

    contribution: Contribution
    path: Path

    @property
    def withdrawn(self) -> bool:
        return self.path.parent.name == "withdrawn"

    @classmethod
    def read(cls, path: Path) -> _Held:
        return cls(Contribution(SealedFile(path, KIND).hollow), path)


class Collection:
    """The coordinator's folder of one study.

    It holds the study's file and its public files, ``sites.json`` (name and public key of every
    site that may contribute), ``key.pem`` (signs releases),
    ``contributions/SENDER/DIGEST.safetensors``, ``withdrawn/`` and ``releases/``; where the
    aggregator draws noise, ``ledger.sqlite`` and ``draws/``; and where the hub is blind, ``blind/``
    with all papers, ``key-seal.pem`` (opens the coordinator's own seeds) and ``keyholders.json``
    (which sender brought which keyholder's card).

    Privacy
    -------
    Combining charges what `consilience.study.collect` says. Noise is drawn once for each request:
    the members are written down before the ledger is charged, so that the same request, after any
    interruption, finds the same members, the same charge and the same release.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.study = Study.in_folder(self.folder)
        for name in ("contributions", "withdrawn", "releases", "draws"):
            (self.folder / name).mkdir(exist_ok=True, mode=0o700)

    @cached_property
    def _held(self) -> dict[str, _Held]:
        """Contributions by digest, read once: only this process changes them afterwards."""
        files = (
            *self.folder.glob("contributions/*/*.safetensors"),
            *self.folder.glob("withdrawn/*.safetensors"),
        )
        return {path.stem: _Held.read(path) for path in sorted(files)}

    @contextmanager
    def alone(self, *, seconds: float = 60.0) -> Iterator[None]:
        """Keep every other process out, so that two runs cannot combine or draw at the same time.

        Wait for another process up to `seconds`: after a SuperLink was killed, its app takes some
        seconds to notice.
        """
        with (self.folder / ".lock").open("w") as file:
            until = time.monotonic() + seconds
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise SettingsError(
                            f"Another run is collecting for {self.study.name!r}. Nothing was "
                            "done. Wait until it ends, or stop it."
                        ) from None
                    time.sleep(0.5)
            yield

    @property
    def key(self) -> SigningKey:
        """The key that signs releases; made when it is first needed."""
        return SigningKey.at(self._key_path)

    @property
    def sites(self) -> dict[str, str]:
        """Names and public keys of the sites that may contribute."""
        try:
            listed = json.loads((self.folder / "sites.json").read_text(encoding="utf-8"))
            if (
                isinstance(listed, dict)
                and listed
                and all(DIGEST.fullmatch(str(key)) for key in listed.values())
            ):
                return {str(name): str(key) for name, key in listed.items()}
        except (OSError, ValueError):
            pass
        raise SettingsError(
            "The file sites.json must name every site and its public key (consilience site "
            "status --json prints it). "
            'No site was asked. Write it as {"north": "3f9a...", "south": "..."}.'
        )

    # ------------------------------------------------------------------ collecting

    def held(self, sender: str) -> set[str]:
        """Return the digests that `sender` need not send again."""
        return {
            digest
            for digest, held in self._held.items()
            if held.withdrawn or held.path.parent.name == sender
        }

    @property
    def arrived(self) -> dict[str, str]:
        """Sites whose contribution has arrived, and who delivered it."""
        members = self._members()
        return {site: self._held[digest].path.parent.name for site, digest in members.items()}

    def keep(self, sender: str, content: bytes) -> Contribution:
        """Check a file of unknown origin and keep it; the same file again changes nothing."""
        own = self.folder / "contributions" / _check_name(sender)
        own.mkdir(exist_ok=True, mode=0o700)
        part = own / ".arriving"
        try:
            write_durably(part, content)
            file = SealedFile(part, KIND)
            known = self.sites.get(str(file.facts.get("site")))
            if known is None or known != file.facts["key"]:
                raise refused("its site, or the key that signed it, is not in sites.json")
            contribution = self.study.accept(Contribution.inspect(file, trusted=self.study.trusted))
            if self.study.is_blind:
                self._check_masked(MaskedFile.of(file.hollow))
            if contribution.digest in self._held:
                return contribution
            site, sequence = contribution.site, contribution.sequence
            kept = (held.contribution for held in self._held.values())
            if any((other.site, other.sequence) == (site, sequence) for other in kept):
                raise refused(f"another contribution {sequence} of {site!r} is here already")
            self._move(part, own / f"{contribution.digest}.safetensors")
        finally:
            part.unlink(missing_ok=True)
        return contribution

    def settle(self, sender: str, present: Several[str]) -> list[str]:
        """Withdraw what `sender` delivered and no longer has, and return the digests.

        The site has withdrawn these contributions.
        """
        gone = [
            digest
            for digest in self.held(sender) - set(present)
            if not self._held[digest].withdrawn
        ]
        for digest in gone:
            self._move(self._held[digest].path, self.folder / "withdrawn" / f"{digest}.safetensors")
        return gone

    def _move(self, path: Path, target: Path) -> None:
        move_durably(path, target)
        self._held[target.stem] = _Held.read(target)

    # ------------------------------------------------------------------ a blind study

    def freeze(self, checked_by: Mapping[str, str]) -> Roster:
        """Freeze the roster: all listed sites, and who compared each one's key."""
        listed = [(name, key, checked_by.get(name, "")) for name, key in self.sites.items()]
        return freeze_roster(self.study, self.folder, listed, self._key_path)

    def papers(self, sender: str, held: Several[str]) -> dict[str, bytes]:
        """Return the papers for a sender, by name, as far as they are not `held` there.

        Signed facts of files and batches are for keyholders only.
        """
        papers = Papers(self.folder)
        kinds: tuple[str, ...] = TO_ALL
        if self.is_keyholder(sender):
            kinds += TO_KEYHOLDERS
            for kept in self._held.values():
                if not kept.withdrawn:
                    papers.add_facts(MaskedFile.of(kept.contribution.sealed))
        return _read_papers(papers, papers.names(kinds), held)

    def is_keyholder(self, sender: str) -> bool:
        """Tell whether this sender brought a keyholder's card."""
        return sender in self._keyholders().values()

    def paper_names(self) -> list[str]:
        """Return the names of keyholders' papers that need not be sent again."""
        return Papers(self.folder).names(BY_KEYHOLDERS)

    def keep_paper(self, sender: str, name: str, content: bytes) -> bool:
        """Check a keyholder's paper of unknown origin and keep it; return whether it is new.

        Whoever is the first to bring a keyholder's card is its relay: nobody else has that card
        before it was brought here.
        """
        rule, papers, carried = self.study.blind, Papers(self.folder), Carried.read(name, content)
        roster, paper = papers.roster, carried.paper
        if rule is None or roster is None or carried.study != self.study.reference:
            raise refused("it was made for another study, or before the roster was frozen")
        if carried.kind not in BY_KEYHOLDERS or carried.key not in rule.keyholders:
            raise refused("no keyholder of the study signed it")
        if isinstance(paper, Card) and paper.roster != roster.digest:
            raise refused("it countersigns another roster")
        if isinstance(paper, Opening):
            batches = {batch.digest: batch for batch in papers.batches()}
            if paper.batch not in batches:
                raise refused("it opens a batch that is not listed")
            first = self._held[batches[paper.batch].files[0]].contribution.sealed
            if paper.pads.shape != (MaskedFile.of(first).context.length,):
                raise refused("its pads have another length than the files of the batch")
        is_new = papers.keep(carried)
        known = self._keyholders()
        if isinstance(paper, Card) and paper.key not in known:
            known[paper.key] = _check_name(sender)
            write_durably(self.folder / "keyholders.json", json.dumps(known, indent=1).encode())
        return is_new

    def gather(self) -> Batches:
        """Return what is known of batches; list the next one of all files that can be opened."""
        return gather_batches(self.study, self.folder, self._submitted(), self._key_path)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to be expected: all listed sites are in, and opened if masked."""
        if set(self.arrived) != set(self.sites):
            return False
        if self.study.blind is None:
            return True
        acknowledged = Papers(self.folder).acknowledgements()
        waiting = (acknowledged.get(digest, set()) for digest in self._members().values())
        if not all(signers >= set(self.study.blind.keyholders) for signers in waiting):
            return False  # a batch that is listed now would leave out what comes a moment later
        return {one.site for one in self.gather().opened.files} == set(self.sites)

    @property
    def _key_path(self) -> Path:
        return self.folder / "key.pem"

    def _keyholders(self) -> dict[str, str]:
        try:
            found = json.loads((self.folder / "keyholders.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return dict(found)

    def _check_masked(self, file: MaskedFile) -> None:
        """Refuse a file that was made for other terms, or whose seed is not for this one."""
        rule, roster = self.study.blind, Papers(self.folder).roster
        if rule is None or roster is None:
            raise refused("the roster of its study is not frozen yet")
        file.check_agreed(roster, rule, {*rule.keyholders, self.key.public})
        file.open_seed(self.key.public, SealKey.load(seal_path(self._key_path)))

    def _submitted(self) -> dict[str, Submitted]:
        """Return what each listed site submitted, as `read_submitted` does of a shared folder."""
        found = {}
        for site, newest in self._members().items():
            own = {d: held for d, held in self._held.items() if held.contribution.site == site}
            files = {d: Contribution.load(h.path) for d, h in own.items() if not h.withdrawn}
            costs = {
                digest: held.contribution.guarantee
                for digest, held in own.items()
                if held.contribution.has_records
            }
            found[site] = Submitted(files[newest], list(files.values()), costs)
        return found

    def _combine_opened(self) -> Path:
        """Return the release of all batches that every keyholder opened."""
        done, by_site, batches = self.releases(), self._submitted(), self.gather()
        members = batches.opened.files
        if not members:
            raise SettingsError(
                f"No batch of study {self.study.name!r} is open yet. Nothing was combined, and "
                "everything that arrived is kept. Run again when its keyholders have answered. "
                f"{batches.describe()}".rstrip()
            )
        public, test = read_records(self.study, self.folder)
        sequence, earlier = self._next_number(), earlier_costs(members, by_site)
        publication = Publication(
            self.key, sequence, earlier, log=self._log(sequence), opened=batches.opened
        )
        release = collect(self.study, members, public=public, test=test, publication=publication)
        if done and [*Release.load(done[-1]).sources] == [*release.sources]:
            return done[-1]
        path = self.folder / "releases" / release.filename
        release.save(path)
        return path

    # ------------------------------------------------------------------ combining

    def allow(self, budget: Budget) -> Balance:
        """Set the total that may be spent on a study whose aggregator draws noise."""
        self.study.check_limit(budget)
        return self._ledger.allow(self.study.digest, budget)

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.sqlite")

    def releases(self) -> list[Path]:
        """Return the files of all releases, oldest first."""
        return in_order((self.folder / "releases").glob("release-*.safetensors"))

    def combine(self, request: str = "first") -> Path:
        """Return the release of the contributions that are here: the last one if nothing changed.

        If the aggregator draws noise, each `request` has one release, which is returned whenever
        the request is repeated.
        """
        if self.study.is_blind:
            return self._combine_opened()
        done, account = self.releases(), Account()
        if self.study.draws_noise:
            members, drawn = self._plan_draw(request)
            if drawn is not None:
                return drawn
            key = f"{self.study.digest[:16]}:{request}"
            account = Account(self._ledger, self.study.digest, key)
        else:
            members = self._enough_members()
        chosen = {site: self._held[members[site]] for site in sorted(members)}
        earlier = self._earlier(members)
        sources = [Source.of(held.contribution, earlier[site]) for site, held in chosen.items()]
        if done and not self.study.draws_noise and [*Release.load(done[-1]).sources] == sources:
            return done[-1]
        public, test = read_records(self.study, self.folder)
        sequence = self._next_number()
        release = collect(
            self.study,
            [Contribution.load(held.path, trusted=self.study.trusted) for held in chosen.values()],
            public=public,
            test=test,
            publication=Publication(self.key, sequence, earlier, account, self._log(sequence)),
        )
        if self.study.draws_noise:
            # A release that is not written after this line is made again, from the same draw.
            self._write_plan(request, {"members": members, "release": release.digest})
        path = self.folder / "releases" / release.filename
        release.save(path)
        return path

    def _log(self, sequence: int) -> ReleaseLog | None:
        """Return the releases before this one.

        None if one is missing: earlier versions gave numbers to draws that were never finished.
        """
        return read_log(self.folder / "releases") if len(self.releases()) == sequence - 1 else None

    def _earlier(self, members: Mapping[str, str]) -> dict[str, list[Guarantee]]:
        """Return the guarantees of all other contributions of the members, by site."""
        earlier: dict[str, list[Guarantee]] = {site: [] for site in members}
        for digest, held in self._held.items():
            site = held.contribution.site
            if members.get(site, digest) != digest:
                earlier[site].append(held.contribution.guarantee)
        return earlier

    def _members(self) -> dict[str, str]:
        """Return the digest of each listed site's newest contribution, if it is not withdrawn."""
        newest: dict[str, _Held] = {}
        for held in sorted(self._held.values(), key=lambda held: held.contribution.sequence):
            newest[held.contribution.site] = held
        sites = self.sites
        return {
            site: held.path.stem
            for site, held in newest.items()
            if not held.withdrawn and site in sites
        }

    def _enough_members(self) -> dict[str, str]:
        members = self._members()
        if len(members) < self.study.min_sites:
            raise SettingsError(
                f"A release of study {self.study.name!r} needs at least {self.study.min_sites} "
                f"sites, and {len(members)} of {len(self.sites)} have contributed. Nothing was "
                "combined or charged, and all contributions are kept. Run again when more sites "
                "have submitted."
            )
        return members

    def _plan_draw(self, request: str) -> tuple[dict[str, str], Path | None]:
        """Return the members of a draw, as first written down, and its release if there is one.

        The number of a release is given when it is published, so a draw that is never finished
        leaves no gap in the log.
        """
        self._settle_plans()
        path = self._plan(request)
        if not path.exists():
            self._write_plan(request, {"members": self._enough_members(), "release": None})
        plan = json.loads(path.read_text(encoding="utf-8"))
        members: dict[str, str] = plan["members"]
        if any(
            self._held[digest].withdrawn or site not in self.sites
            for site, digest in members.items()
        ):
            raise SettingsError(
                f"The draw {request!r} includes a site that has withdrawn since. Nothing was "
                "drawn, charged or sent. To draw from what is here now, name another request."
            )
        drawn = plan["release"]
        done = (path for path in self.releases() if drawn and _digest(path) == drawn)
        return members, next(done, None)

    def _settle_plans(self) -> None:
        """Name the releases of draws that earlier versions numbered before they were made.

        This happens before any number is given anew, so a file of that number is the draw's own.
        """
        for path in (self.folder / "draws").glob("*.json"):
            plan = json.loads(path.read_text(encoding="utf-8"))
            if "sequence" in plan:
                made = self.folder / "releases" / f"release-{int(plan['sequence']):04d}.safetensors"
                release = _digest(made) if made.exists() else None
                self._write_plan(path.stem, {"members": plan["members"], "release": release})

    def _plan(self, request: str) -> Path:
        return self.folder / "draws" / f"{_check_name(request)}.json"

    def _write_plan(self, request: str, plan: Mapping[str, object]) -> None:
        write_durably(self._plan(request), json.dumps(plan, indent=1).encode())

    def _next_number(self) -> int:
        done = self.releases()
        return int(SealedFile(done[-1], RELEASE).facts["sequence"]) + 1 if done else 1


def _read_papers(papers: Papers, names: Several[str], held: Several[str]) -> dict[str, bytes]:
    """Return the papers of these names that are not `held`, as many as one answer may have."""
    found, size = dict[str, bytes](), 0
    for name in sorted(set(names) - set(held)):
        content = papers.content(name)
        size += len(content)
        if found and size > MOST_AT_ONCE:
            break
        found[name] = content
    return found


def _digest(path: Path) -> str:
    return SealedFile(path, RELEASE).digest


def _check_name(name: str) -> str:
    """Return the name of a request or sender, which becomes part of a path."""
    if not _NAME.fullmatch(name):
        raise SettingsError(
            "The name of a request or sender must be lower-case letters, digits and hyphens. Got "
            f"{name!r} instead. Nothing was done. Choose such a name."
        )
    return name
