"""Both ends of a relay: folders between which signed files travel, whoever carries them.

At a site, `Outbox` is the shared folder of ``consilience site join FOLDER``: ``site submit`` puts
contributions there, the relay hands out these and nothing else, and puts releases where ``site
fetch`` finds them. It needs neither the site's key nor its ledger nor its records. At the
coordinator, `Collection` keeps whatever arrived, before anything else is asked for, and makes the
release. What stopped at any moment goes on from the files.
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

from consilience.errors import ConsilienceError, SettingsError
from consilience.files.contribution import KIND, Contribution
from consilience.files.durable import move_durably, write_durably
from consilience.files.release import KIND as RELEASE
from consilience.files.release import Release, Source
from consilience.files.sealed import SealedFile, SigningKey, refused
from consilience.privacy.guarantee import Budget, Guarantee
from consilience.privacy.ledger import Balance, Ledger
from consilience.privacy.spending import Account
from consilience.protocol import DIGEST
from consilience.study.collect import Publication, collect, read_records
from consilience.study.study import Study

MOST_AT_ONCE = 64 << 20  # bytes in one answer, unless a single file has more
_NAME = re.compile("[a-z0-9][a-z0-9-]{0,63}")


# ---------------------------------------------------------------------------------------------------------- at a site


@dataclass(frozen=True)
class Offer:
    """What a site's relay has: every contribution by digest, the files that were missing, the release it holds."""

    present: tuple[str, ...]
    files: Mapping[str, bytes]
    release: str | None


@dataclass(frozen=True)
class Outbox:
    """A folder with one study, the contributions a site submitted to it, and the releases that came back."""

    folder: Path
    study: Study

    @classmethod
    def find(cls, folder: str | os.PathLike[str], study: str) -> Outbox:
        """Return the outbox of the study with this digest: `folder` itself, or a folder in it."""
        parent = Path(folder)
        places = [parent, *sorted(path for path in parent.glob("*") if path.is_dir())]
        for place in places:
            try:
                found = Study.in_folder(place)
            except SettingsError:  # no study, or another one that somebody is still writing
                continue
            if found.digest == study:
                return cls(place, found)
        raise SettingsError(
            f"There is no outbox for the study that was asked for in {parent.name!r}. Nothing was "
            "sent. Put its file into a folder there, and join that: consilience site join FOLDER"
        )

    def offer(self, held: Several[str]) -> Offer:
        """Return what is here, with the files that are not `held`, oldest first."""
        found = sorted(
            (facts["sequence"], digest, path) for digest, (path, facts) in self._files(KIND).items()
        )
        files: dict[str, bytes] = {}
        for _, digest, path in found:
            if digest not in held and (
                not files or _size(files) + path.stat().st_size <= MOST_AT_ONCE
            ):
                files[digest] = path.read_bytes()
        releases = {
            facts["sequence"]: digest for digest, (_, facts) in self._files(RELEASE).items()
        }
        newest = releases[max(releases)] if releases else None
        return Offer(tuple(digest for _, digest, _ in found), files, newest)

    def keep(self, content: bytes, *, key: str) -> Release:
        """Check a release offline, against the coordinator's public `key`, and put it where ``site fetch`` looks."""
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

    def _files(self, kind: str) -> dict[str, tuple[Path, dict[str, Any]]]:
        """Return the files of this study by digest; whatever else lies in the folder is nobody's business."""
        found: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = SealedFile(path, kind)
            except ConsilienceError:
                continue
            if (
                file.facts.get("study") == self.study.reference
                and type(file.facts.get("sequence")) is int
            ):
                found[file.digest] = (path, file.facts)
        return found


def _size(files: Mapping[str, bytes]) -> int:
    return sum(map(len, files.values()))


# ------------------------------------------------------------------------------------------------- at the coordinator


@dataclass(frozen=True)
class _Held:
    """A contribution that was checked and kept: its facts, and where its file lies."""

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
    ``contributions/SENDER/DIGEST.safetensors``, ``withdrawn/`` and ``releases/``; and where the
    aggregator draws noise, ``ledger.sqlite`` and ``draws/``.

    Privacy
    -------
    Combining charges what `Study.combine` says. Where it draws noise it does so once for each
    `request`: who took part is written down before the ledger is charged, so that the same request,
    after whatever stopped it, finds the same members, the same charge and the same release.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.study = Study.in_folder(self.folder)
        for name in ("contributions", "withdrawn", "releases", "draws"):
            (self.folder / name).mkdir(exist_ok=True, mode=0o700)

    @cached_property
    def _held(self) -> dict[str, _Held]:
        """By digest, read once: from then on this process is the one that changes it."""
        files = (
            *self.folder.glob("contributions/*/*.safetensors"),
            *self.folder.glob("withdrawn/*.safetensors"),
        )
        return {path.stem: _Held.read(path) for path in sorted(files)}

    @contextmanager
    def alone(self, *, seconds: float = 60.0) -> Iterator[None]:
        """Keep every other process out, so that two runs cannot combine or draw at once.

        Another one is waited for: the app of a SuperLink that was killed takes some seconds to
        notice it.
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
                            "done. Wait for it, or stop it."
                        ) from None
                    time.sleep(0.5)
            yield

    @property
    def key(self) -> SigningKey:
        """The key that signs releases; made when it is first asked for."""
        path = self.folder / "key.pem"
        if not path.exists():
            SigningKey.generate().save(path)
        return SigningKey.load(path)

    @property
    def sites(self) -> dict[str, str]:
        """Names and public keys of the sites that may contribute."""
        try:
            found = json.loads((self.folder / "sites.json").read_text(encoding="utf-8"))
            if (
                isinstance(found, dict)
                and found
                and all(DIGEST.fullmatch(str(key)) for key in found.values())
            ):
                return {str(name): str(key) for name, key in found.items()}
        except (OSError, ValueError):
            pass
        raise SettingsError(
            "The file sites.json must name every site and its public key (consilience site "
            "status --json prints it). "
            'Nothing was asked of anyone. Write it as {"north": "3f9a...", "south": "..."}.'
        )

    # ------------------------------------------------------------------ collecting

    def held(self, sender: str) -> set[str]:
        """Return the digests that `sender` need not send again."""
        return {
            digest
            for digest, one in self._held.items()
            if one.withdrawn or one.path.parent.name == sender
        }

    @property
    def arrived(self) -> dict[str, str]:
        """Sites whose contribution is in, and who delivered it."""
        members = self._members()
        return {site: self._held[digest].path.parent.name for site, digest in members.items()}

    def keep(self, sender: str, content: bytes) -> Contribution:
        """Check a file of unknown origin and keep it durably; the same file again changes nothing."""
        own = self.folder / "contributions" / _checked_name(sender)
        own.mkdir(exist_ok=True, mode=0o700)
        part = own / ".arriving"
        try:
            write_durably(part, content)
            file = SealedFile(part, KIND)
            known = self.sites.get(str(file.facts.get("site")))
            if known is None or known != file.facts["key"]:
                raise refused("its site, or the key that signed it, is not in sites.json")
            found = self.study.accept(Contribution.inspect(file, trusted=self.study.trusted))
            if found.digest in self._held:
                return found
            number = (found.site, found.sequence)
            if any(
                (one.contribution.site, one.contribution.sequence) == number
                for one in self._held.values()
            ):
                raise refused(
                    f"another contribution {found.sequence} of {found.site!r} is here already"
                )
            self._move(part, own / f"{found.digest}.safetensors")
        finally:
            part.unlink(missing_ok=True)
        return found

    def settle(self, sender: str, present: Several[str]) -> list[str]:
        """Take out what `sender` delivered and no longer has: its site withdrew it. Return those digests."""
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

    # ------------------------------------------------------------------ combining

    def allow(self, budget: Budget) -> Balance:
        """Set what may be spent, in total, on a study whose aggregator draws noise."""
        return self._ledger.allow(self.study.digest, budget)

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.sqlite")

    def releases(self) -> list[Path]:
        """Return the files of all releases, oldest first."""
        return sorted((self.folder / "releases").glob("release-*.safetensors"))

    def combine(self, request: str = "first") -> Path:
        """Return the release of what is here: the one that exists if nothing changed, else a new one.

        Where the aggregator draws noise, the release of this `request` is returned once it exists,
        whoever came since.
        """
        done = self.releases()
        account = Account()
        members, sequence = (
            self._planned(request) if self.study.draws_noise else (self._enough(), len(done) + 1)
        )
        if self.study.draws_noise:
            key = f"{self.study.digest[:16]}:{request}"
            account = Account(self._ledger, self.study.digest, key)
            if self._path(sequence).exists():
                return self._path(sequence)
        earlier: dict[str, list[Guarantee]] = {site: [] for site in members}
        for digest, one in self._held.items():
            if members.get(one.contribution.site, digest) != digest:
                earlier[one.contribution.site].append(one.contribution.guarantee)
        sources = tuple(
            Source.of(self._held[members[site]].contribution, earlier[site])
            for site in sorted(members)
        )
        if done and not self.study.draws_noise and Release.load(done[-1]).sources == sources:
            return done[-1]
        files = [self._held[members[site]].path for site in sorted(members)]
        public, test = read_records(self.study, self.folder)
        release = collect(
            self.study,
            [Contribution.load(path, trusted=self.study.trusted) for path in files],
            public=public,
            test=test,
            publication=Publication(self.key, sequence, earlier, account),
        )
        release.save(self._path(sequence))
        return self._path(sequence)

    def _members(self) -> dict[str, str]:
        """Return the newest contribution's digest of every site that is listed and did not withdraw it."""
        newest: dict[str, _Held] = {}
        for one in sorted(self._held.values(), key=lambda one: one.contribution.sequence):
            newest[one.contribution.site] = one
        sites = self.sites
        return {
            site: one.path.stem
            for site, one in newest.items()
            if not one.withdrawn and site in sites
        }

    def _enough(self) -> dict[str, str]:
        members = self._members()
        if len(members) < self.study.min_sites:
            raise SettingsError(
                f"Study {self.study.name!r} makes no release of fewer than {self.study.min_sites} "
                f"sites, and {len(members)} of {len(self.sites)} are in. Nothing was combined or "
                "charged, and what arrived is kept. Run again when more have submitted."
            )
        return members

    def _planned(self, request: str) -> tuple[dict[str, str], int]:
        """Return who takes part in a draw and the number of its release, as first written down."""
        plans = self.folder / "draws"
        path = plans / f"{_checked_name(request)}.json"
        if not path.exists():
            plan = {"members": self._enough(), "sequence": len(list(plans.glob("*.json"))) + 1}
            write_durably(path, json.dumps(plan, indent=1).encode())
        plan = json.loads(path.read_text(encoding="utf-8"))
        members: dict[str, str] = plan["members"]
        if any(
            self._held[digest].withdrawn or site not in self.sites
            for site, digest in members.items()
        ):
            raise SettingsError(
                f"The draw {request!r} includes a site that has withdrawn since. Nothing was "
                "drawn, charged or sent. Name another request, to draw from what is here now."
            )
        return members, int(plan["sequence"])

    def _path(self, sequence: int) -> Path:
        return self.folder / "releases" / f"release-{sequence:04d}.safetensors"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SettingsError(
            "A request or sender is named by lower-case letters, digits and hyphens. Got "
            f"{name!r} instead. Nothing was done."
        )
    return name
