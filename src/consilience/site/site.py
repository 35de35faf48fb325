"""A site: the folder that holds its key, its ledger and its studies, and all that it does with a hub.

Nothing happens here that the site did not ask for: a study is fetched and read before anything is
trained, a training is shown, approved and charged before anything is computed, and a file is
submitted by a separate command. Each step writes what it did durably before it says so, so that a
machine that stops at any moment resumes where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from consilience.errors import (
    BudgetExceeded,
    ConsilienceError,
    ContributionRejected,
    HubUnavailable,
    SchemaMismatch,
    SettingsError,
)
from consilience.files.certificate import Page
from consilience.files.contribution import KIND as CONTRIBUTION
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SealedFile, SigningKey, write_durably
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from consilience.protocol import HEADER, digest, sign_request
from consilience.study.pages import of_training
from consilience.study.records import file_digest
from consilience.study.study import Study
from consilience.tables.public import Public

TIMEOUT_SECONDS = 60.0
MOST_FILE = 1 << 30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")


@dataclass(frozen=True)
class Preview:
    """What a training would do: the page to approve, its cost, and whether the ledger allows it."""

    page: Page
    epsilon: float
    delta: float
    left: float | None
    fits: bool


class Site:
    """A site's folder.

    Examples
    --------
    >>> import tempfile
    >>> site = Site.init(tempfile.mkdtemp() + "/ward", name="north", dataset="patients", budget=Budget(epsilon=3.0))
    >>> site.ledger.balance("patients").left.epsilon
    3.0
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

    @classmethod
    def init(
        cls, folder: str | os.PathLike[str], *, name: str, dataset: str, budget: Budget
    ) -> Self:
        """Make a site: a key, a ledger, and what the data owner allows."""
        target = Path(folder)
        if (target / "site.json").exists():
            raise SettingsError(
                f"The folder {target.name!r} holds a site already. Nothing was changed. Use "
                "another."
            )
        if not _NAME.fullmatch(name):
            raise SettingsError(
                "The name of a site must be letters, digits, spaces and ._- (at most 100). Got "
                f"{name!r} instead."
            )
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = target / "key.pem"
        if not key.exists():
            SigningKey.generate().save(key)
        Ledger(target / "ledger.sqlite").allow(dataset, budget)
        write_durably(target / "site.json", _json({"name": name, "dataset": dataset}))
        return cls(target)

    # ------------------------------------------------------------------ what it holds

    @property
    def key(self) -> SigningKey:
        """The key that signs for the site."""
        return SigningKey.load(self.folder / "key.pem")

    @property
    def ledger(self) -> Ledger:
        """The site's ledger."""
        path = self.folder / "ledger.sqlite"
        if not path.exists():
            raise SettingsError(
                "The site's ledger is gone, and with it the record of what was spent. Nothing "
                "was done. Restore it from its backup with: consilience site recover"
            )
        return Ledger(path)

    @property
    def studies(self) -> list[str]:
        """Names of the studies it has joined."""
        return sorted(path.parent.name for path in self.folder.glob("studies/*/study.json"))

    def study(self, name: str) -> Study:
        """Return a study it has joined."""
        return Study.from_dict(self._facts(name)["study"])

    def public(self, name: str) -> Public | None:
        """Return the study's public records, if it has some."""
        study = self.study(name)
        return None if study.public is None else study.public.read(study.schema, self._place(name))

    def status(self, name: str) -> dict[str, Any]:
        """Return how far the site is with a study."""
        facts = self._facts(name)
        outbox = sorted(self._place(name).glob("contribution-*.safetensors"))
        return {
            "study": name,
            "hub": facts["hub"],
            "fetch_only": facts["fetch_only"],
            "contributions": len(outbox),
            "submitted": facts["submitted"],
            "release": facts["release"],
        }

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
        hub = _Hub(_checked_address(address), self.key, certificate)
        proof = {"invitation": invitation, "site": self.name, "fetch_only": fetch_only}
        answer = hub.json("POST", "/api/enrolments", _json(proof))
        name, hub_key = str(answer["study"]), str(answer["hub_key"])
        facts = self._fetched(hub, name)
        facts |= {
            "hub": hub.address,
            "hub_key": hub_key,
            "fetch_only": fetch_only,
            "certificate": certificate,
        }
        self._write_facts(name, {**_EMPTY, **facts})
        return self.study(name)

    def join_folder(self, folder: str | os.PathLike[str]) -> Study:
        """Take part through files in a shared folder: a study file, its public files, and a place for contributions."""
        shared = Path(folder)
        study = Study.in_folder(shared)
        place = self.folder / "studies" / study.name
        place.mkdir(parents=True, exist_ok=True)
        for named in (study.public, study.test):
            if named is not None:
                source = shared / named.file
                if not source.exists() or file_digest(source) != named.sha256:
                    raise SettingsError(
                        f"The study's file {named.file!r} is missing or altered. Nothing was "
                        "joined."
                    )
                write_durably(place / named.file, source.read_bytes())
        self._write_facts(
            study.name, {**_EMPTY, "study": study.to_dict(), "hub": f"folder:{shared.absolute()}"}
        )
        return study

    def _fetched(self, hub: _Hub, name: str) -> dict[str, Any]:
        answer = hub.json("GET", f"/api/studies/{quote(name)}")
        study = Study.from_dict(answer["study"])
        if study.name != name or study.digest != answer["digest"]:
            raise ContributionRejected(
                "The hub sent another study than it named. Nothing was joined. Ask its operator."
            )
        place = self.folder / "studies" / name
        place.mkdir(parents=True, exist_ok=True)
        for named in (study.public, study.test):
            if named is not None:
                content = hub.bytes("GET", f"/api/studies/{quote(name)}/files/{named.sha256}")
                if digest(content) != named.sha256:
                    raise ContributionRejected(
                        f"The hub sent another file than {named.file!r}. Nothing was joined."
                    )
                write_durably(place / named.file, content)
        return {"study": study.to_dict()}

    # ------------------------------------------------------------------ training

    def preview(self, name: str, *, epsilon: float) -> Preview:
        """Say what a training would let out and what it would cost; nothing is trained or charged."""
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
        table: Any,
        *,
        epsilon: float,
        approve: Callable[[Preview], bool] | None = None,
    ) -> Path | None:
        """Train on a table after approval, charging the ledger first; return the file that may be submitted.

        A training whose result is sealed but not yet written, because the machine stopped, is
        completed without a second charge. Returns None if approval was refused.
        """
        self._complete_rotation()
        study, facts = self.study(name), self._facts(name)
        if facts["fetch_only"]:
            raise SettingsError(
                f"The site joined {name!r} to fetch only. Nothing was trained. Join again to "
                "contribute."
            )
        preview = self.preview(name, epsilon=epsilon)
        sequence = len(sorted(self._place(name).glob("contribution-*.safetensors"))) + 1
        attempt = facts["attempt"]
        pending = (
            isinstance(attempt, dict)
            and attempt["sequence"] == sequence
            and attempt["epsilon"] == epsilon
        )
        key = (
            str(attempt["key"])
            if pending and self.ledger.sealed(str(attempt["key"])) is not None
            else None
        )
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
            attempt = {"sequence": sequence, "epsilon": epsilon, "key": key}
            self._write_facts(name, {**facts, "attempt": attempt})
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
        self._write_facts(name, {**self._facts(name), "attempt": None})
        return path

    def contribution(self, name: str, sequence: int | None = None) -> Path:
        """Return a contribution's file, the newest unless told."""
        files = sorted(self._place(name).glob("contribution-*.safetensors"))
        chosen = [
            file for file in files if sequence is None or file.stem.endswith(f"{sequence:04d}")
        ]
        if not chosen:
            raise SettingsError(
                f"There is no trained contribution to {name!r}. Train first: consilience site train"
            )
        return chosen[-1]

    # ------------------------------------------------------------------ talking to the hub

    def submit(self, name: str) -> dict[str, Any]:
        """Send the newest contribution; sending it again changes nothing."""
        self._complete_rotation()
        facts, path = self._facts(name), self.contribution(name)
        found = Contribution.load(path, trusted=self.study(name).trusted)
        shared = _shared(facts)
        if shared is not None:
            place = (
                shared / f"contribution-{_file_name(self.name)}-{found.sequence:04d}.safetensors"
            )
            write_durably(place, path.read_bytes())
            answer: dict[str, Any] = {"digest": found.digest, "state": "accepted"}
        else:
            hub = self._hub(facts)
            answer = hub.json(
                "POST", f"/api/studies/{quote(name)}/contributions", path.read_bytes()
            )
            if answer.get("digest") != found.digest:
                raise ContributionRejected(
                    "The hub confirmed another file than was sent. Ask its operator."
                )
        self._write_facts(name, {**self._facts(name), "submitted": found.sequence})
        return answer

    def fetch(self, name: str) -> Release | None:
        """Fetch the newest release and check that the hub signed it; None while there is none."""
        self._complete_rotation()
        facts, study = self._facts(name), self.study(name)
        shared = _shared(facts)
        if shared is not None:
            files = sorted(shared.glob("release-*.safetensors"))
            content = files[-1].read_bytes() if files else None
        else:
            content = self._hub(facts).bytes(
                "GET", f"/api/studies/{quote(name)}/release", absent="no-release"
            )
        if content is None:
            return None
        part = self._place(name) / "release.part"
        write_durably(part, content)
        try:
            release = Release.load(part, key=facts["hub_key"])
            if release.study != study.reference:
                raise ContributionRejected(
                    "The release belongs to another study. It was not kept. Ask the hub's operator."
                )
            kept = facts["release"]
            if kept is not None and release.sequence < kept:
                raise ContributionRejected(
                    f"The hub sent release {release.sequence}, older than release {kept} that is "
                    "here. It was not kept."
                )
            path = self._place(name) / release.filename
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        changes: dict[str, Any] = {
            "release": release.sequence,
            "hub_key": facts["hub_key"] or release.sealed.key,
        }
        self._write_facts(name, {**self._facts(name), **changes})
        return release

    def release(self, name: str) -> Release:
        """Return the newest release that was fetched."""
        files = sorted(self._place(name).glob("release-*.safetensors"))
        if not files:
            raise SettingsError(
                f"No release of {name!r} was fetched yet. Fetch it first: consilience site fetch"
            )
        return Release.load(files[-1], key=self._facts(name)["hub_key"])

    def withdraw(self, name: str) -> dict[str, Any]:
        """Take the contribution out of future releases; what was published, and what was spent, stays so."""
        self._complete_rotation()
        facts = self._facts(name)
        shared = _shared(facts)
        if shared is not None:
            for file in shared.glob("contribution-*.safetensors"):
                if self._is_own(file):
                    file.unlink()
            return {"state": "withdrawn"}
        return self._hub(facts).json("POST", f"/api/studies/{quote(name)}/withdrawals", b"{}")

    def _is_own(self, file: Path) -> bool:
        try:
            return SealedFile(file, CONTRIBUTION).facts.get("site") == self.name
        except ConsilienceError:
            return False

    def open_view(self, name: str) -> str:
        """Return a link, good once and for minutes, that shows the site its own page on the hub's dashboard."""
        self._complete_rotation()
        facts = self._facts(name)
        if _shared(facts) is not None:
            raise SettingsError(
                "A shared folder has no dashboard. Nothing was opened. Look into the folder."
            )
        answer = self._hub(facts).json("POST", f"/api/studies/{quote(name)}/visits", b"{}")
        return f"{facts['hub']}{answer['path']}"

    def rotate_key(self) -> str:
        """Replace the site's key at every hub it is enrolled at, then here; return the new public key."""
        old, new_path = self.key, self.folder / "key.new.pem"
        if not new_path.exists():
            for (
                name
            ) in self.studies:  # what the old key signed could no longer be sent, and was paid for
                status = self.status(name)
                if status["contributions"] > (status["submitted"] or 0):
                    raise SettingsError(
                        f"A contribution to {name!r} is signed with the present key and was not "
                        f"submitted. Nothing was changed. First: consilience site submit {name}"
                    )
            SigningKey.generate().save(new_path)
        new = SigningKey.load(new_path)
        for name in self.studies:
            if _shared(self._facts(name)) is None:
                self._rotate_at(name, old, new)
        kept = self.folder / f"key.{old.public[:16]}.pem"
        if not kept.exists():
            os.link(self.folder / "key.pem", kept)
        new_path.replace(self.folder / "key.pem")  # at every moment there is a key
        return new.public

    def _complete_rotation(self) -> None:
        """Finish a rotation that was stopped: a hub may know the new key only, and refuse what the old one signs."""
        if (self.folder / "key.new.pem").exists():
            self.rotate_key()

    def _rotate_at(self, name: str, old: SigningKey, new: SigningKey) -> None:
        facts = self._facts(name)
        proof = new.sign(f"consilience rotation {old.public} {new.public}".encode()).hex()
        body = _json({"study": name, "new_key": new.public, "proof": proof})
        try:
            self._hub(facts).json("POST", "/api/keys/rotation", body)
        except SettingsError as refused:
            try:  # this machine may have stopped after the hub had taken the new key
                _Hub(str(facts["hub"]), new, facts["certificate"]).json(
                    "GET", f"/api/studies/{quote(name)}"
                )
            except SettingsError:
                raise refused from None

    # ------------------------------------------------------------------ keeping the ledger

    def backup(self, path: str | os.PathLike[str]) -> str:
        """Copy the ledger; return the head of its chain, to be written down elsewhere."""
        head = self.ledger.verify()
        self.ledger.backup(path)
        return head

    def recover(self, path: str | os.PathLike[str]) -> int:
        """Put a ledger's backup in place of one that was lost; charges made since are made again.

        Every contribution carries the receipt of its charge, so that what this site handed out
        since the backup is known and cannot be rolled back. Returns how many charges were missing.
        """
        target = self.folder / "ledger.sqlite"
        if any(self.folder.glob("ledger.sqlite*")):
            raise SettingsError(
                "The site still has a ledger. Nothing was restored. Move it away first if it is "
                "damaged, with its -wal and -shm files: the newer one counts."
            )
        Ledger(path).verify()
        # Until every charge is back, the copy is not the site's ledger: a machine that stops here
        # restores nothing.
        with tempfile.TemporaryDirectory(prefix=".recovering-", dir=self.folder) as place:
            ledger = Ledger(shutil.copyfile(path, Path(place) / "ledger.sqlite"))
            missing = self._charge_again(ledger)
            ledger.backup(target)
        return missing

    def _charge_again(self, ledger: Ledger) -> int:
        """Charge for every contribution here whose receipt the ledger does not hold; return how many there were."""
        missing, known = 0, {charge.hash for charge in ledger.charges()}
        for name in self.studies:
            study = self.study(name)
            for file in sorted(self._place(name).glob("contribution-*.safetensors")):
                found = Contribution.load(file, trusted=study.trusted)
                receipt = found.sealed.facts.get("receipt")
                if isinstance(receipt, Mapping) and receipt.get("hash") not in known:
                    ledger.within(study.digest).charge(
                        found.events,
                        dataset=str(receipt["dataset"]),
                        key=f"recovered-{receipt['key']}",
                        purpose="recovered from a contribution",
                    )
                    missing += 1
        return missing

    # ------------------------------------------------------------------ files

    def _place(self, name: str) -> Path:
        if "/" in name or name.startswith("."):
            raise SettingsError(
                f"There is no study {name!r} here. Join it first: consilience site join"
            )
        return self.folder / "studies" / name

    def _facts(self, name: str) -> dict[str, Any]:
        facts = self._read(f"studies/{self._place(name).name}/study.json")
        if facts is None:
            known = ", ".join(self.studies) or "none yet"
            raise SettingsError(
                f"This site has not joined a study {name!r} (joined: {known}). Join it first."
            )
        return facts

    def _write_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        write_durably(self._place(name) / "study.json", _json(facts))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise SettingsError(
                f"The site's file {name!r} cannot be read. Nothing was done. Restore it."
            ) from None
        return dict(found)

    def _hub(self, facts: Mapping[str, Any]) -> _Hub:
        return _Hub(str(facts["hub"]), self.key, facts["certificate"])


_EMPTY: dict[str, Any] = {
    "hub": None,
    "hub_key": None,
    "certificate": None,
    "fetch_only": False,
    "attempt": None,
    "submitted": None,
    "release": None,
}
_ERRORS: dict[str, type[ConsilienceError]] = {
    "rejected": ContributionRejected,
    "stale": ContributionRejected,
    "wrong-site": ContributionRejected,
    "study-differs": SchemaMismatch,
    "unavailable": HubUnavailable,
    "too-many": HubUnavailable,
    "budget": BudgetExceeded,
}


@dataclass(frozen=True)
class _Hub:
    """Requests to a hub, each signed; errors come back as ours, with the hub's own words."""

    address: str
    key: SigningKey
    certificate: str | None = None

    def json(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        content = self.bytes(method, path, body)
        try:
            answer = json.loads(content or b"")
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise HubUnavailable(
                f"The hub at {self.address} gave no readable answer. Nothing was lost. Try again "
                "later."
            )
        return answer

    def bytes(self, method: str, path: str, body: bytes = b"", *, absent: str | None = None) -> Any:
        import httpx

        headers = {HEADER: sign_request(self.key, method, path, digest(body))}
        try:
            verify: Any = self.certificate if self.certificate is not None else True
            with httpx.Client(
                timeout=TIMEOUT_SECONDS, verify=verify, follow_redirects=False
            ) as client:
                with client.stream(
                    method, self.address + path, content=body, headers=headers
                ) as answer:
                    content = bytearray()
                    for chunk in answer.iter_bytes():
                        content += chunk
                        if len(content) > MOST_FILE:
                            raise HubUnavailable(
                                f"The hub at {self.address} sent more than it may. Nothing was "
                                "kept."
                            )
                    status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as problem:
            raise HubUnavailable(
                f"The hub at {self.address} did not answer ({type(problem).__name__}). Nothing "
                "was lost. Check the address and the network, and try again."
            ) from None
        if status < 300:
            return bytes(content)
        code, message, fix = _error(content)
        if code is not None and code == absent:
            return None
        raise _ERRORS.get(code or "unavailable", SettingsError)(
            f"The hub at {self.address} refused: {message} Nothing was changed. {fix}"
        )


def _error(content: bytearray) -> tuple[str | None, str, str]:
    try:
        error = json.loads(content)["error"]
        return str(error["code"])[:40], str(error["message"])[:500], str(error["fix"])[:500]
    except (ValueError, KeyError, TypeError):
        return None, "its answer could not be read.", "Try again later."


def _checked_address(address: str) -> str:
    parts = urlsplit(address)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if (
        parts.scheme not in ("https", "http")
        or not parts.hostname
        or (parts.scheme == "http" and not local)
    ):
        raise SettingsError(
            "The hub's address must begin with https:// (http:// only for this machine itself). "
            f"Got {address!r} instead."
        )
    return address.rstrip("/")


def _shared(facts: Mapping[str, Any]) -> Path | None:
    hub = str(facts["hub"])
    return Path(hub.removeprefix("folder:")) if hub.startswith("folder:") else None


def _file_name(name: str) -> str:
    """Return a site's name as part of a file's; two names never become one."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _json(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, indent=1, sort_keys=True).encode()
