"""Where a keyholder asks what waits for it and leaves its answers: a hub, or a shared folder.

Nobody asks a keyholder anything: it asks, by requests that it signs, so it needs no open port. It
is shown signed facts and never a masked number. Nothing that it is shown is believed: roster, files
and batches are checked by `Keyholder`.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from consilience.blind.masked import Acknowledgement, Batch, MaskedFile, Opening
from consilience.blind.papers import Papers
from consilience.blind.roster import ROSTER, Card, Roster, Rule
from consilience.errors import (
    ConsilienceError,
    ContributionRejected,
    HubUnavailable,
    SettingsError,
)
from consilience.files.sealed import Sealed, SigningKey
from consilience.keyholder.keyholder import Keyholder, Signed
from consilience.site.client import HubClient, check_address
from consilience.study.study import Study

UNKNOWN_HUB = "0" * 64
WAIT_SECONDS = 30.0  # between two looks of a keyholder that serves
LONGEST_SECONDS = 900.0  # after a hub has not answered several times


class Agreement(NamedTuple):
    """What a study agreed on, as a keyholder is shown it before it signs."""

    study: Study
    rule: Rule
    roster: Roster

    @property
    def hub(self) -> str:
        """The public key of the hub, which signed the roster."""
        return self.roster.sealed.key


class Desk(Protocol):
    """What a keyholder asks, and where it leaves what it answers."""

    def agree(self) -> Agreement:
        """Return what is to be countersigned, or say that the roster is not frozen yet."""

    def post_card(self, card: Card) -> None:
        """Leave a countersignature."""

    def files(self, holder: str, refused: int = 0) -> list[MaskedFile]:
        """Return files that wait for this holder's acknowledgement, without those it `refused`."""

    def post_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Leave an acknowledgement."""

    def batches(self, holder: str) -> list[Batch]:
        """Return batches that wait for this holder's opening."""

    def post_opening(self, opening: Opening) -> None:
        """Leave an opening."""


@dataclass(frozen=True)
class FolderDesk:
    """A shared folder with one study; other keyholders, sites and the coordinator use it too.

    Anybody can write there, so that only batches that the owner of the key `hub` signed are
    answered: whoever lists others, one to each keyholder, would leave all of their files unopened.
    """

    folder: Path
    hub: str

    @property
    def papers(self) -> Papers:
        """The papers in the folder, if it is there."""
        if not self.folder.is_dir():
            raise HubUnavailable(
                f"The shared folder {self.folder.name!r} is not there. Nothing was lost. Connect "
                "it, and try again."
            )
        return Papers(self.folder)

    def agree(self) -> Agreement:
        """Return what is to be countersigned, or say that the roster is not frozen yet."""
        study, roster = Study.in_folder(self.folder), self.papers.roster
        return _check_agreement(study, roster)

    def post_card(self, card: Card) -> None:
        """Leave a countersignature."""
        self.papers.add_card(card)

    def files(self, holder: str, refused: int = 0) -> list[MaskedFile]:
        """Return files that wait for this holder's acknowledgement, without those it `refused`."""
        done = self.papers.acknowledgements()
        return [file for file in self.papers.files() if holder not in done.get(file.digest, ())][
            refused:
        ]

    def post_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Leave an acknowledgement."""
        self.papers.add_acknowledgement(acknowledgement)

    def batches(self, holder: str) -> list[Batch]:
        """Return batches that wait for this holder's opening."""
        return [
            batch
            for batch in self.papers.batches()
            if batch.is_listed_by(self.hub)
            and holder not in {opening.key for opening in self.papers.openings(batch)}
        ]

    def post_opening(self, opening: Opening) -> None:
        """Leave an opening."""
        self.papers.add_opening(opening)


@dataclass(frozen=True)
class HubDesk:
    """A study of a hub."""

    client: HubClient
    study: str

    def agree(self) -> Agreement:
        """Return what is to be countersigned, or say that the roster is not frozen yet."""
        answer = self._read("blind")
        study = Study.from_dict(answer.get("study"))
        text = answer.get("roster")
        roster = None
        if text is not None:
            roster = Roster.read(Sealed.load(_from_text(text), ROSTER))
            if roster.sealed.key != self.client.hub_key:
                raise ContributionRejected(
                    "The roster was signed by another hub than the one that sent it. Nothing was "
                    "signed. Ask the coordinator which key the hub has."
                )
        return _check_agreement(study, roster)

    def post_card(self, card: Card) -> None:
        """Leave a countersignature."""
        self._post("cards", card.sealed)

    def files(self, holder: str, refused: int = 0) -> list[MaskedFile]:
        """Return files that wait for this holder's acknowledgement, without those it `refused`."""
        answer = self._read(f"blind/files?skip={refused}").get("files")
        return [
            MaskedFile.read(each.get("facts"), each.get("signature"))
            for each in _as_list(answer)
            if isinstance(each, dict)
        ]

    def post_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Leave an acknowledgement."""
        self._post("acknowledgements", acknowledgement.sealed)

    def batches(self, holder: str) -> list[Batch]:
        """Return batches that wait for this holder's opening."""
        answer = self._read("blind/batches").get("batches")
        return [Batch.from_dict(each) for each in _as_list(answer)]

    def post_opening(self, opening: Opening) -> None:
        """Leave an opening."""
        self._post("openings", opening.sealed)

    def _read(self, what: str) -> dict[str, object]:
        return self.client.request_json("GET", f"/api/studies/{self.study}/{what}")

    def _post(self, what: str, sealed: Sealed) -> None:
        path = f"/api/studies/{self.study}/blind/{what}"
        self.client.request_json("POST", path, sealed.to_bytes())


def _check_agreement(study: Study, roster: Roster | None) -> Agreement:
    if study.blind is None:
        raise SettingsError(
            f"The hub of study {study.name!r} is not blind, so it has no keyholders. Nothing was "
            "signed."
        )
    if roster is None:
        raise SettingsError(
            f"The roster of study {study.name!r} is not frozen yet. Nothing was signed. Come back "
            "when the coordinator has frozen it."
        )
    if dict(roster.study) != study.reference:
        raise ContributionRejected(
            "The roster was made for another study, or another version of this one. Nothing was "
            "signed. Ask the coordinator."
        )
    return Agreement(study, study.blind, roster)


def _as_list(answer: object) -> list[object]:
    return answer if isinstance(answer, list) else []


def _from_text(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except ValueError:
        raise ContributionRejected(
            "The hub sent something else than a roster. Nothing was signed. Ask its operator."
        ) from None


# ------------------------------------------------------------------------------- what is done there


def find_desk(
    place: str, study: str | None, key: SigningKey, hub: str = UNKNOWN_HUB, certificate: str = ""
) -> Desk:
    """Return the desk at a hub's address or in a shared folder.

    If the hub's key is not known yet, the hub is asked for it, and whoever signs its roster has to
    compare it.
    """
    if "://" not in place:
        return FolderDesk(Path(place).absolute(), hub)
    if study is None:
        raise SettingsError(
            "A hub may have many studies. Nothing was asked. Name the study after the hub's "
            "address."
        )
    client = HubClient(check_address(place), key, hub, certificate or None)
    if hub == UNKNOWN_HUB:
        known = str(client.request_json("GET", "/api/hub").get("key"))
        client = HubClient(client.address, key, known, certificate or None)
    return HubDesk(client, study)


def desk_of(keyholder: Keyholder, study: Signed) -> Desk:
    """Return the desk of a study that a keyholder has signed."""
    place, certificate = study.place or "", study.certificate or ""
    return find_desk(place, study.name, keyholder.key, study.hub, certificate)


@dataclass
class Done:
    """What a keyholder did for its studies in one go, and what it refused, in words."""

    acknowledged: int = 0
    opened: int = 0
    refused: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Return the facts."""
        return dict(vars(self))


def work(keyholder: Keyholder, find: Callable[[Keyholder, Signed], Desk] = desk_of) -> Done:
    """Acknowledge and open what waits in all studies, once.

    A study that fails holds up no other one.
    """
    done = Done()
    for study in keyholder.studies():
        if study.is_closed or study.place is None:
            continue
        try:
            _work_on(keyholder, study, find(keyholder, study), done)
        except HubUnavailable as problem:
            done.unreachable.append(f"{study.name}: {problem}")
        except ConsilienceError as problem:
            done.refused.append(f"{study.name}: {problem}")
    return done


def _work_on(keyholder: Keyholder, study: Signed, desk: Desk, done: Done) -> None:
    holder = keyholder.key.public
    n_refused, seen = 0, set[str]()
    while page := [each for each in desk.files(holder, n_refused) if each.digest not in seen]:
        for file in page:
            seen.add(file.digest)
            try:
                _require_study(file.facts["study"], study)
                desk.post_acknowledgement(keyholder.acknowledge(file))
                done.acknowledged += 1
            except HubUnavailable:
                raise
            except ConsilienceError as problem:
                n_refused += 1
                site = str(file.facts["site"])
                done.refused.append(f"{study.name}, a file of {site!r}: {problem}")
    for batch in desk.batches(holder):
        try:
            _require_study(batch.study, study)
            desk.post_opening(keyholder.open(batch))
            done.opened += 1
        except HubUnavailable:
            raise
        except ConsilienceError as problem:
            done.refused.append(f"{study.name}, batch {batch.digest[:16]}: {problem}")


def _require_study(stated: Collection[str] | object, study: Signed) -> None:
    if stated != {"name": study.name, "digest": study.digest}:
        raise ContributionRejected(
            "It is of another study than was asked for. It was not answered. Ask the hub's "
            "operator."
        )


def serve(
    keyholder: Keyholder,
    wait_seconds: float = WAIT_SECONDS,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[Done]:
    """Repeat `work` until it is stopped, less often while a hub does not answer."""
    waited = wait_seconds
    while True:
        done = work(keyholder)
        yield done
        waited = min(2 * waited, LONGEST_SECONDS) if done.unreachable else wait_seconds
        pause(waited * random.uniform(0.8, 1.2))  # noqa: S311  not all keyholders at once
