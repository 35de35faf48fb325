"""Where a site hands in its files: a hub, by requests that it signs, or a shared folder."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote as in_path
from urllib.parse import urlsplit

from consilience.blind.papers import Papers
from consilience.blind.roster import CARD, MOST_HOLDERS, ROSTER, Card, Roster
from consilience.errors import (
    BudgetExceeded,
    ConsilienceError,
    ContributionRejected,
    HubUnavailable,
    SchemaMismatch,
    SettingsError,
)
from consilience.files.contribution import KIND, WITHDRAWN, Contribution, Withdrawal
from consilience.files.durable import read_regular, write_durably
from consilience.files.release import KIND as RELEASE
from consilience.files.release import Release, in_order
from consilience.files.sealed import MOST_BYTES as MOST_FILE
from consilience.files.sealed import Sealed, SealedFile, SigningKey, canonical
from consilience.protocol import (
    DIGEST,
    ERRORS,
    HEADER,
    ROTATED,
    STUDY_NAME,
    VERSION,
    VERSION_HEADER,
    Invitation,
    Rotation,
    digest,
    is_digest,
    rotation_message,
    sign_request,
)
from consilience.study.branches import accept_branch
from consilience.study.collect import read_submitted
from consilience.study.records import PublicFile
from consilience.study.study import Study
from consilience.text import collapse, quote

TIMEOUT_SECONDS = 60.0  # without any bytes, and for an answer of none
LEAST_BYTES_PER_SECOND = 32 << 10  # of a request and its answer
MOST_BYTES = 1 << 30  # in one answer
MOST_JSON = 16 << 20  # in one that is no file
_ERRORS: dict[str, type[ConsilienceError]] = {
    "rejected": ContributionRejected,
    "stale": ContributionRejected,
    "wrong-site": ContributionRejected,
    "study-differs": SchemaMismatch,
    "unavailable": HubUnavailable,
    "too-many": HubUnavailable,
    "too-slow": HubUnavailable,
    "failed": HubUnavailable,
    "budget": BudgetExceeded,
}

_VERSION = re.compile(r"[0-9][0-9a-z.+-]{0,30}")
_VISIT = re.compile("/visits/[A-Za-z0-9_.=-]+")

Answer = dict[str, Any]


@dataclass(eq=False)
class HubClient:
    """A hub at an address, as seen by a site with this key.

    Requests are signed for the hub with the public key `hub_key`; no other hub accepts them. What
    the hub refuses is raised as an error of this package, which quotes the hub.
    """

    address: str
    key: SigningKey
    hub_key: str
    certificate: str | None = None
    hub_version: str = field(default="", init=False)  # as its last answer stated it

    # ------------------------------------------------------------------ joining

    def enrol(self, invited: Invitation, site: str, *, fetch_only: bool) -> Study:
        """Use a one-time invitation; return the study, which must be the one that it names."""
        proof = {"invitation": invited.code, "site": site, "fetch_only": fetch_only}
        answer = self.request_json("POST", "/api/enrolments", to_json(proof))
        # The hub is a stranger: nothing more is asked of another one than the invitation names.
        if (answer.get("hub_key"), answer.get("digest")) == (invited.hub_key, invited.study):
            name = str(answer.get("study"))
            facts = self.request_json("GET", _path(name)).get("study")
            # Before anything in it is read, let alone repeated: they are others' words otherwise.
            if _digest_facts(facts) == invited.study:
                study = Study.from_dict(facts)
                if (study.name, study.digest) == (name, invited.study):
                    return study
        raise ContributionRejected(
            "This is another hub, or another study, than the invitation names. Nothing was kept. "
            "Check the address with the coordinator."
        )

    def fetch_file(self, study: str, file: PublicFile) -> bytes:
        """Return the content of a study's public file."""
        content = self.request("GET", f"{_path(study)}/files/{_digest(file.sha256)}")
        if content is None or digest(content) != file.sha256:
            raise ContributionRejected(
                f"The hub sent another file than {file.file!r}. Nothing was joined. Ask its "
                "operator."
            )
        return content

    # ------------------------------------------------------------------ taking part

    def submit(self, study: str, contribution: Contribution, content: bytes) -> Answer:
        """Send a contribution and its file's content; the hub must confirm its digest."""
        answer = self.request_json("POST", f"{_path(study)}/contributions", content)
        if answer.get("digest") != contribution.digest:
            raise ContributionRejected(
                "The hub confirmed another file than was sent. Ask its operator."
            )
        return {"digest": contribution.digest, "state": collapse(str(answer.get("state"))[:100])}

    def fetch_release(self, study: str) -> bytes | None:
        """Return the newest release's file, or None if there is none."""
        return self.request("GET", f"{_path(study)}/release", absent="no-release")

    def fetch_members(self, study: str) -> list[bytes]:
        """Return the files of the members that this site weighs, as the hub has them now."""
        digests = self.request_json("GET", f"{_path(study)}/members").get("members")
        if not (isinstance(digests, list) and all(map(is_digest, digests))):
            raise self._unreadable()
        found = [self.request("GET", f"{_path(study)}/members/{_digest(one)}") for one in digests]
        return [content for content in found if content is not None]

    def fetch_papers(self, study: str) -> tuple[Roster | None, list[Card]]:
        """Return the roster of a blind study, if it is frozen, and the cards of its pad holders.

        The hub is believed in none of it: whoever uses them checks who signed.
        """
        answer = self.request_json("GET", f"{_path(study)}/blind")
        try:
            roster, cards = answer["roster"], answer["cards"][:MOST_HOLDERS]
            found = [Card.read(Sealed.load(_unpack(card), CARD)) for card in cards]
            if roster is None:
                return None, found
            return Roster.read(Sealed.load(_unpack(roster), ROSTER)), found
        except (KeyError, TypeError, ValueError):
            raise self._unreadable() from None

    def fetch_log(self, study: str, after: int) -> list[str]:
        """Return digests of the releases after the first `after`, oldest first.

        The hub sends a page of them; none if there are no more, or if it is an earlier version.
        """
        answer = _parse(
            self.request(
                "GET", f"{_path(study)}/log?after={after}", absent="not-found", most=MOST_JSON
            )
        )
        digests = answer.get("digests") if isinstance(answer, dict) else None
        return digests if isinstance(digests, list) and all(map(is_digest, digests)) else []

    def fetch_contribution(self, study: str, digest: str) -> bytes | None:
        """Return the file of one of the site's own contributions; None if the hub lacks it."""
        path = f"{_path(study)}/contributions/{_digest(digest)}"
        return self.request("GET", path, absent="not-found")

    def contributions(self, study: str) -> list[str]:
        """Return the digests of the site's own contributions."""
        rows = self.request_json("GET", f"{_path(study)}/contributions").get("contributions")
        digests = []
        for row in rows if isinstance(rows, list) else [None]:
            found = row.get("digest") if isinstance(row, dict) else None
            if not is_digest(found):
                raise self._unreadable()
            digests.append(found)
        return digests

    def withdraw(self, study: str) -> Answer:
        """Take the site's contribution out of future releases; the hub must confirm it."""
        answer = self.request_json("POST", f"{_path(study)}/withdrawals", b"{}")
        if answer.get("state") != "withdrawn":
            raise ContributionRejected(
                "The hub did not confirm the withdrawal. Nothing is known about what it will use. "
                "Ask its operator."
            )
        return {"state": "withdrawn"}

    def open_view(self, study: str) -> str:
        """Return a link that shows the site its own page on the dashboard, once."""
        answer = self.request_json("POST", f"{_path(study)}/visits", b"{}")
        path = str(answer.get("path"))
        if not _VISIT.fullmatch(path):
            raise ContributionRejected(
                "The hub's link leads somewhere else than to its dashboard. It is not shown. Ask "
                "its operator."
            )
        return self.address + path

    def rotate_key(self, study: str, new: SigningKey) -> None:
        """Make the hub accept a new key instead of the present one."""
        proof = new.sign(rotation_message(self.key.public, new.public)).hex()
        body = to_json({"study": study, "new_key": new.public, "proof": proof})
        try:
            self.request_json("POST", "/api/keys/rotation", body)
        except SettingsError as refused:
            try:  # this machine may have stopped after the hub had taken the new key
                replace(self, key=new).request_json("GET", _path(study))
            except SettingsError:
                raise refused from None

    # ------------------------------------------------------------------ requests

    def request_json(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send a request and return its answer, which must be a JSON object."""
        answer = _parse(self.request(method, path, body, most=MOST_JSON))
        if not isinstance(answer, dict):
            raise self._unreadable()
        return answer

    def _unreadable(self) -> HubUnavailable:
        return HubUnavailable(
            f"The hub at {self.address} gave no readable answer. Nothing was lost. Try again later."
        )

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        absent: str | None = None,
        most: int = MOST_BYTES,
    ) -> bytes | None:
        """Send a request and return its answer; None if the hub's error is the code `absent`."""
        import httpx

        try:
            status, content = self._send(method, path, body, most)
            if status == 409 and _read_error(content)[0] == "replayed":
                # A proxy sent it twice because the first worker died; signed anew it is another.
                status, content = self._send(method, path, body, most)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as problem:
            raise HubUnavailable(
                f"The hub at {self.address} did not answer ({type(problem).__name__}). Nothing "
                "was lost. Check the address and the network, and try again."
            ) from None
        if status < 300:
            return content
        code, message = _read_error(content)
        if code is not None and code == absent:
            return None
        # What to do is in this package's words: a hub chooses among codes, and no more.
        said = "gave no readable answer" if message is None else f"refused and says {message}"
        fix = ERRORS[code][1] if code in ERRORS else "Try again later, or ask its operator."
        raise _ERRORS.get(code or "unavailable", SettingsError)(
            f"The hub at {self.address} {said}. {fix}{self._compare_versions()}"
        )

    def _compare_versions(self) -> str:
        """Say that hub and site run different versions, if they do: what is refused may be why."""
        if not self.hub_version or self.hub_version == VERSION:
            return ""
        return (
            f" It runs consilience {self.hub_version}, and this site {VERSION}: if nothing "
            "else explains the refusal, install the same version."
        )

    def _send(self, method: str, path: str, body: bytes, most: int) -> tuple[int, bytes]:
        """Return status and content of an answer that comes in time.

        The whole exchange has a limit, in which handshakes and headers count: one between bytes
        would be renewed by every byte. It is waited for from outside, because nothing within it is
        told how long it has taken.
        """
        content, found, began = bytearray(), list[int | Exception](), time.monotonic()

        def seconds_left() -> float:
            n_bytes = len(body) + len(content)
            allowed = TIMEOUT_SECONDS + n_bytes / LEAST_BYTES_PER_SECOND
            return began + allowed - time.monotonic()

        def is_wanted() -> bool:
            return len(content) <= most and seconds_left() > 0

        def exchange() -> None:
            try:
                found.append(self._exchange(method, path, body, content, is_wanted))
            except Exception as problem:
                found.append(problem)

        worker = threading.Thread(target=exchange, daemon=True)
        worker.start()
        while worker.is_alive():
            if seconds_left() <= 0:
                raise HubUnavailable(
                    f"The hub at {self.address} did not answer in time. Nothing was lost. Try "
                    "again later, or ask its operator."
                )
            worker.join(seconds_left())
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0], bytes(content)

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        content: bytearray,
        is_wanted: Callable[[], bool],
    ) -> int:
        """Send a request, gather its answer in `content` while it is wanted; return its status."""
        import httpx

        headers = {
            HEADER: sign_request(self.key, self.hub_key, method, path, digest(body)),
            # Nothing is unpacked: a few packed bytes could fill the memory.
            "accept-encoding": "identity",
        }
        verify = self._authority()
        with (
            httpx.Client(timeout=TIMEOUT_SECONDS, verify=verify, follow_redirects=False) as client,
            client.stream(method, self.address + path, content=body, headers=headers) as answer,
        ):
            stated = answer.headers.get(VERSION_HEADER, "")
            self.hub_version = stated if _VERSION.fullmatch(stated) else ""
            packed = answer.headers.get("content-encoding", "identity") != "identity"
            for chunk in () if packed else answer.iter_raw():
                content += chunk
                if packed := not is_wanted():
                    break
            if packed:
                raise HubUnavailable(
                    f"The hub at {self.address} sent more than it may, or packed it. Nothing was "
                    "kept. Ask its operator."
                )
            return answer.status_code

    def _authority(self) -> ssl.SSLContext | Literal[True]:
        """Return who may vouch for the hub: the certificate that was named, or the public ones."""
        if self.certificate is None:
            return True
        try:
            return ssl.create_default_context(cafile=self.certificate)
        except OSError:
            raise SettingsError(
                f"The certificate file {self.certificate!r} cannot be read. Nothing was sent. Put "
                "the hub's certificate there, or join again with another --certificate."
            ) from None


def hand_over_release(
    release: Release, study: Study, name: str, hub: HubClient, invited: Invitation
) -> Answer:
    """Submit a branch's release to the hub of a parent study, enrolling as that branch if needed.

    `hub` signs with the key of the branch's own hub.
    """
    accept_branch(study, name, release)
    if (invited.study, invited.hub_key) != (study.digest, hub.hub_key):
        raise SettingsError(
            "The invitation is for another study, or to another hub. Nothing was sent. Ask the "
            "parent study's coordinator for one."
        )
    content = release.sealed.to_bytes()
    path = f"{_path(study.name)}/contributions"
    try:
        return hub.request_json("POST", path, content)
    except SettingsError:  # it is not enrolled yet
        hub.enrol(invited, name, fetch_only=False)
        return hub.request_json("POST", path, content)


def check_address(address: str) -> str:
    """Return a hub's address, which must be encrypted unless the hub is on this machine."""
    parts = urlsplit(address)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    encrypted = parts.scheme == "https" or (parts.scheme == "http" and local)
    if not parts.hostname or not encrypted:
        raise SettingsError(
            "The hub's address must begin with https:// (or http:// if the hub is on this "
            f"machine). Got {address!r} instead. Nothing was sent. Ask the coordinator for it."
        )
    return address.rstrip("/")


def to_json(facts: object) -> bytes:
    """Return facts as JSON, the same for the same facts."""
    return json.dumps(facts, indent=1, sort_keys=True).encode()


def _unpack(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _digest_facts(facts: object) -> str | None:
    """Return the digest of a study's facts as they came; None if they cannot be a study's."""
    try:
        return digest(canonical(facts).encode())
    except (ValueError, RecursionError):  # such as half a character
        return None


def _path(study: str) -> str:
    """Return a study's path, if this can be a study's name: a hub's answer may say anything."""
    return f"/api/studies/{_checked(study, STUDY_NAME)}"


def _digest(text: str) -> str:
    return _checked(text, DIGEST)


def _checked(text: str, form: re.Pattern[str]) -> str:
    """Return what becomes part of a path that is signed, and leads nowhere else."""
    if not form.fullmatch(text):
        raise ContributionRejected(
            "The hub named a study or a file by a text that cannot be a name. Nothing was sent. "
            "Ask its operator."
        )
    return in_path(text, safe="")


def _parse(content: bytes | None) -> Any:
    """Return an answer that was sent as JSON; None if it is none, or too deep to be one."""
    try:
        return json.loads(content or b"")
    except (ValueError, RecursionError):
        return None


def _read_error(content: bytes) -> tuple[str | None, str | None]:
    """Return the code of a hub's error, and its message as a quotation: the hub is not trusted."""
    try:
        error = _parse(content)["error"]
        return str(error["code"])[:100], quote(error["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, None


# ---------------------------------------------------------------------------------- a shared folder


FOLDER = "folder:"  # how a site's files tell a folder from a hub's address


@dataclass(frozen=True)
class SharedFolder:
    """A folder with one study, its public files, contributions and releases, in place of a hub.

    Its methods take the study's name as those of `HubClient` do. Others can write to the folder,
    and can put something else in its place: it is used only where it was joined, and never if that
    is inside `own`, the site's own folder. `key` signs for the site, and `keys` are all that ever
    did and are still here, by their public keys. Nothing of the site is replaced by another file,
    because it may be the only proof of a charge. `signer` is the key that signs releases, if that
    is known.
    """

    path: Path
    site: str
    own: Path
    key: SigningKey
    keys: Mapping[str, SigningKey]
    signer: str | None = None

    @property
    def place(self) -> Path:
        """The folder, if it is there and nobody has led its name elsewhere."""
        if not self.path.is_dir():
            raise HubUnavailable(
                f"The shared folder {self.path.name!r} is not there. Nothing was lost. Connect it, "
                "and try again."
            )
        place, own = self.path.resolve(), self.own.resolve()
        if place.is_relative_to(own):
            raise SettingsError(
                f"The shared folder {self.path.name!r} lies inside this site's own folder. Nothing "
                "was done. Ask the coordinator who changed it."
            )
        if own.is_relative_to(place):
            raise SettingsError(
                f"This site's own folder lies inside the shared folder {self.path.name!r}, and its "
                "key, its ledger and its adapted models go wherever that goes. Nothing was done. "
                "Move the site's folder elsewhere; if others could read it there, replace its key: "
                "consilience site rotate-key"
            )
        if place != self.path:
            raise SettingsError(
                f"The shared folder {self.path.name!r}, or one above it, is a link now. Nothing "
                "was done. Ask the coordinator who changed it; if it is meant to be one, join it "
                "again: consilience site join FOLDER"
            )
        return place

    def fetch_file(self, _: str, file: PublicFile) -> bytes:
        """Return the content of one of the study's public files."""
        source = self.place / file.file
        content = read_regular(source, MOST_BYTES) if source.exists() else b""
        if digest(content) != file.sha256:
            raise SettingsError(
                f"The study's file {file.file!r} is missing or altered. Nothing was joined. Ask "
                "the coordinator for the original."
            )
        return content

    def fetch_members(self, _: str) -> list[bytes]:
        """Return the newest files of all other sites."""
        study = Study.in_folder(self.place)
        submitted = read_submitted(study, self.place).values()
        return [one.newest.sealed.to_bytes() for one in submitted if one.newest.site != self.site]

    def submit(self, _: str, contribution: Contribution, content: bytes) -> Answer:
        """Put a contribution into the folder, beside a file of its name that is another one.

        Earlier keys of this site that signed something there state before that the present key took
        their place.
        """
        place, site = self.place, _as_file_name(self.site)
        signers = {file.facts["key"] for file in self._own().values()}
        signers |= {note.sealed.key for note in self._notes().values()}
        for old in sorted(signers & self.keys.keys() - {self.key.public}):
            made = Rotation.seal(self.site, contribution.study, self.keys[old], self.key)
            made.save(place / f"rotation-{site}-{old[:16]}-{self.key.public[:16]}{ROTATED}")
        path = place / f"contribution-{site}-{contribution.sequence:04d}.safetensors"
        if path.exists() and self._by_digest().get(contribution.digest) != path:
            path = path.with_name(f"{path.stem}-{contribution.digest[:16]}.safetensors")
        write_durably(path, content)
        for note, withdrawal in self._notes().items():  # it is here again
            if withdrawal.contribution == contribution.digest and self._is_ours(withdrawal):
                note.unlink()
        return {"digest": contribution.digest, "state": "accepted"}

    def fetch_release(self, _: str) -> bytes | None:
        """Return the newest release's file, or None if there is none.

        Whoever can write to the folder can put a file there that is named like a release: those
        that another key signed count only if there are no others.
        """
        files = in_order(self.place.glob("release-*.safetensors"))
        signed = [file for file in files if self.signer in (None, _signer(file))] or files
        return read_regular(signed[-1], MOST_FILE) if signed else None

    def fetch_papers(self, _: str) -> tuple[Roster | None, list[Card]]:
        """Return the roster of a blind study, if it is frozen, and the cards of its pad holders."""
        papers = Papers(self.place)
        return papers.roster, papers.cards()

    def fetch_log(self, _: str, after: int) -> list[str]:
        """Return digests of the releases after the first `after`, as far as they are here."""
        place, digests = self.place, list[str]()
        while (file := place / f"release-{after + len(digests) + 1:04d}.safetensors").exists():
            digests.append(SealedFile(file, RELEASE).digest)
        return digests

    def fetch_contribution(self, _: str, digest: str) -> bytes | None:
        """Return the file of one of the site's own contributions; None if it is not here.

        In place of one that was withdrawn it is the site's signed note of that.
        """
        notes = {note.contribution: path for path, note in self._notes().items()}
        files = {**notes, **self._by_digest()}
        return read_regular(files[digest], MOST_FILE) if digest in files else None

    def contributions(self, _: str) -> list[str]:
        """Return the digests of the site's own contributions, also of those that it withdrew."""
        withdrawn = (note.contribution for note in self._notes().values())
        return list(dict.fromkeys((*self._by_digest(), *withdrawn)))

    def signed(self) -> set[str]:
        """Return the digests of those among them that a key here signed, or a note of them."""
        files = {file.digest for file in self._own().values() if file.facts["key"] in self.keys}
        return files | {note.contribution for note in self._notes().values() if self._is_ours(note)}

    def withdraw(self, _: str, known: Collection[str]) -> Answer:
        """Remove the site's contributions; a signed note of the charge of each stays.

        Otherwise nothing would tell an older copy of the site's folder that it lacks the charge.
        The key that signed a file signs the note, so that whoever knows the one knows the other. A
        file that no key here signed, and whose digest is not `known`, stays: nothing tells whose it
        is, and if it is the site's, it is the proof of a charge.
        """
        own = self._own()
        ours = {
            path: file
            for path, file in own.items()
            if file.facts["key"] in self.keys or file.digest in known
        }
        if not own:
            raise SettingsError(
                f"There is no contribution of this site in the shared folder {self.path.name!r}. "
                "Nothing was changed. Look into the folder."
            )
        if not ours:
            raise SettingsError(
                f"What the shared folder {self.path.name!r} holds in this site's name was signed "
                "by a key that is not here, and may be the only proof of a charge. Nothing was "
                "changed. If it is this site's, fetch it first: consilience site recover; if not, "
                "ask the coordinator who put it there."
            )
        for path, file in ours.items():
            note = path.with_name(f"{path.stem}-{file.digest[:16]}{WITHDRAWN}")
            Withdrawal.make(file, self.keys.get(file.facts["key"], self.key)).save(note)
            path.unlink()
        return {"state": "withdrawn", "left": sorted(path.name for path in own.keys() - ours)}

    def _is_ours(self, note: Withdrawal) -> bool:
        return note.sealed.key in self.keys

    def _by_digest(self) -> dict[str, Path]:
        return {file.digest: path for path, file in self._own().items()}

    def _own(self) -> dict[Path, SealedFile]:
        own = {}
        for path in sorted(self.place.glob("contribution-*.safetensors")):
            with suppress(ConsilienceError):  # not a contribution
                file = SealedFile(path, KIND)
                if file.facts.get("site") == self.site:
                    own[path] = file
        return own

    def _notes(self) -> dict[Path, Withdrawal]:
        """Return the notes of contributions that the site withdrew."""
        notes = {}
        for path in sorted(self.place.glob(f"contribution-*{WITHDRAWN}")):
            with suppress(ConsilienceError):
                note = Withdrawal.load(path)
                if note.site == self.site:
                    notes[path] = note
        return notes

    def open_view(self, _: str) -> str:
        """Refuse: only a hub has a dashboard."""
        raise SettingsError(
            "A shared folder has no dashboard. Nothing was opened. Look into the folder."
        )


def _signer(file: Path) -> str | None:
    """Return the key that signed a release; None if the file is none."""
    try:
        return str(SealedFile(file, RELEASE).facts["key"])
    except ConsilienceError:
        return None


def _as_file_name(name: str) -> str:
    """Return a site's name as part of a file name; different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
