"""What the hub does. The API, the dashboard and the command line all call these methods."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from consilience.errors import ConsilienceError, LedgerDamaged, SettingsError
from consilience.files.contribution import KIND, Contribution
from consilience.files.release import Release
from consilience.files.sealed import MOST_BYTES, SealedFile, SigningKey, is_signed
from consilience.hub.accounts import AccountDesk
from consilience.hub.auth import Rate
from consilience.hub.blind import BlindStudies
from consilience.hub.factors import FactorDesk
from consilience.hub.signon import Provider, SignOn
from consilience.hub.state import why_gone, why_no_release
from consilience.hub.store import Row, Store, hashed, now
from consilience.hub.store.files import is_whole
from consilience.hub.store.sites import MOST_DAILY, RETURN_SECONDS
from consilience.privacy.guarantee import Budget, Guarantee
from consilience.privacy.ledger import Balance, Ledger
from consilience.protocol import (
    DIGEST,
    MOST_SKIPPED,
    SIGNATURE,
    SITE_NAME,
    STUDY_NAME,
    Invitation,
    Refusal,
    rotation_message,
)
from consilience.study.branches import accept_branch
from consilience.study.records import PublicFile
from consilience.study.study import Study
from consilience.study.toml import MOST_TEXT
from consilience.tables.reading import has_more_records

LARGE = 8 << 20  # bytes
READY_SECONDS = 2.0
FORGOTTEN = "The contribution was replaced long ago: the hub keeps its row, not its file."
FORGOTTEN_RELEASE = "The release is old: the hub keeps its number and its digest, not its file."
_OWN_NAME = (
    "The study gives the site with this name a part of its own, so it needs an invitation in its "
    "own name."
)
_SITE_NAME_RULE = "A site's name must have 1 to 100 letters, digits, spaces, dots or hyphens."


@dataclass(frozen=True)
class Settings:
    """Where a hub keeps its data, and its limits; rates hold for each worker process."""

    folder: Path
    url: str | None = None
    most_bytes: int = MOST_BYTES  # of a contribution
    small_bytes: int = 256 << 10  # contributions up to this size are kept in the database
    most_public_bytes: int = 1 << 30  # of a file of public records
    most_public_records: int = 2_000_000  # in it, however few bytes they take
    most_uploads: int = 16  # at the same time; four times as many small ones
    most_uploads_each: int = 2  # of one sender
    upload_seconds: float = 600.0
    patience_seconds: float = 10.0  # for a body, beside a second for each `least_rate` bytes of it
    least_rate: float = 32 << 10  # bytes per second
    session_hours: float = 12.0
    all_need_factors: bool = False  # nobody may log in by password alone
    sign_on: SignOn | None = None  # an identity provider beside passwords
    by_address: Rate = field(default=Rate(100.0, 2000.0))
    by_key: Rate = field(default=Rate(5.0, 100.0))
    by_guess: Rate = field(default=Rate(0.2, 10.0))  # logging in and enrolling, by address
    by_account: Rate = field(default=Rate(1 / 60, 10.0))  # logging in, by name
    by_note: Rate = field(default=Rate(1 / 60, 20.0))  # refusals in the audit log, by sender
    log_format: str = "text"  # or json
    metrics_token: str | None = None  # lets others than this machine read /metrics
    most_connections: int = 1000
    most_connections_each: int = 256  # of one address
    header_seconds: float = 10.0  # until a connection has sent a complete header
    write_seconds: float = 30.0  # until a connection takes more of an answer
    combine_itself: bool = True
    quiet_seconds: float = 1.0  # changes that follow each other this closely are combined together
    longest_wait_seconds: float = 30.0
    lease_seconds: float = 15.0
    combine_seconds: float = 600.0  # for one attempt to combine a study
    combine_bytes: int | None = None  # of memory for it; None is a fifth of what there is
    sweep_after_seconds: float = 3600.0
    most_daily: int = MOST_DAILY  # contributions of a site to a study
    return_seconds: float = RETURN_SECONDS  # before a site that withdrew twice may submit again
    batch_seconds: float = 86400.0  # without a further site, before a batch lacks some


class Hub:
    """A hub's store, key and ledger, and everything it can be asked to do.

    Privacy
    -------
    Holds what sites handed over and nothing else. Where a study trusts the hub, that includes exact
    learners, which anyone who can read the hub's folder can read. No method returns one site's
    files or facts to another site.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store(settings.folder, settings.url, sweep_after=settings.sweep_after_seconds)
        self.store.return_seconds = settings.return_seconds
        self.store.most_daily = settings.most_daily
        self.key = self._agreed_key()
        self.accounts = AccountDesk(self.store)
        self.factors = FactorDesk(self.store, self.key)
        self.store.all_need_factors = settings.all_need_factors
        self.provider = None if settings.sign_on is None else Provider(settings.sign_on)
        self.blind = BlindStudies(self.store, self.key, settings.batch_seconds)
        self._ledger: Ledger | None = None
        self._studies: dict[str, Study] = {}
        self._lock, self._large = threading.Lock(), threading.Lock()
        self._ready_lock, self._ready_until = threading.Lock(), 0.0
        self.changed = threading.Event()  # tells the worker of this process to look

    def close(self) -> None:
        """Close all connections."""
        self.store.close()

    def check_ready(self) -> None:
        """Write to the database and to the folder, or refuse; at most once in `READY_SECONDS`."""
        with self._ready_lock:
            if time.monotonic() < self._ready_until:
                return
            self.store.remember("ready", now())
            probe = self.store.files.new()
            try:
                probe.write_bytes(b"consilience")
            finally:
                probe.unlink(missing_ok=True)
            self._ready_until = time.monotonic() + READY_SECONDS

    def _agreed_key(self) -> SigningKey:
        """Return the key of this folder, if it is the one that sites know.

        The first worker on a database decides which key that is.
        """
        path, known = self.store.folder / "hub.key", self.store.remembered("key")
        if known is None or path.exists():
            key = SigningKey.at(path)
            if self.store.agree("key", key.public) == key.public:
                return key
        self.store.close()
        raise SettingsError(
            f"The database belongs to the hub with the key {known}, and this folder does not have "
            "that key. Nothing was started. Copy hub.key from that hub's folder, or use another "
            "database."
        )

    @property
    def ledger(self) -> Ledger:
        """The hub's own ledger, which is charged when an aggregator draws noise."""
        with self._lock:
            if self._ledger is None:
                self._ledger = Ledger(self.store.folder / "hub.ledger")
            return self._ledger

    @contextmanager
    def charging(self) -> Iterator[Ledger]:
        """Return the ledger to charge, after checking that it has every charge so far.

        The ledger of another worker's folder would not have them.
        """
        known = self.store.remembered("ledger")
        try:
            self.ledger.verify(known)
        except LedgerDamaged as problem:
            raise SettingsError(
                "The hub's ledger in this folder is not the one that was charged so far: "
                f"{problem} Nothing was drawn. Run this on the machine that has that ledger."
            ) from None
        yield self.ledger
        self.store.remember("ledger", self.ledger.verify())

    # ---------------------------------------------------------------------------- for coordinators

    def add_study(self, text: str, actor: str) -> Row:
        """Add a study file."""
        if len(text) > MOST_TEXT:
            raise Refusal("too-large", "The study file is too large.")
        try:
            study = Study.from_text(text)
        except ConsilienceError as problem:
            raise Refusal("study-invalid", str(problem)) from None
        if study.blind is not None and self.key.public in study.blind.keyholders:
            message = "The study names this hub as one of its keyholders, who must be others."
            raise Refusal("study-invalid", message)
        return self.store.add_study(study.name, study.digest, text, actor)

    def study(self, name: str) -> tuple[Row, Study]:
        """Return a study's row and what it says, or refuse."""
        row = self.store.study(name) if STUDY_NAME.fullmatch(name) else None
        if row is None:
            raise Refusal("not-found", "There is no such study.")
        if name not in self._studies:
            self._studies[name] = Study.from_text(row["text"], stored=True)
        return row, self._studies[name]

    def agreed(self, name: str) -> Study:
        """Return an existing study; it never changes, so it is read once."""
        return self._studies.get(name) or self.study(name)[1]

    def public_file(self, study: str, name: str) -> PublicFile:
        """Return the public file that a study names, by name or digest, or refuse."""
        _, agreed = self.study(study)
        for part in agreed.files:
            if name in (part.file, part.sha256):
                return part
        raise Refusal("not-found", "The study names no such file.")

    def keep_public_file(
        self, study: str, name: str, arrived: Path, sha256: str, actor: str
    ) -> PublicFile:
        """Keep a file of public records, if it is the one that the study names."""
        named = self.public_file(study, name)
        if named.sha256 != sha256:
            raise Refusal("file-differs", "The file's digest is not the one that the study names.")
        most, most_bytes = self.settings.most_public_records, self.settings.most_public_bytes
        if has_more_records(arrived, named.file, most, most_bytes):
            raise Refusal(
                "too-large",
                f"The file has more than {most:,} records, or is larger than {most_bytes >> 20} "
                "MiB when it is unpacked.",
            )
        is_kept = self.store.file(sha256) is not None
        is_kept = is_kept and is_whole(self.store.files.path(sha256), sha256)
        size = arrived.stat().st_size
        self.store.files.keep(arrived, sha256)
        if not is_kept:
            self.store.add_file(sha256, size, study, named.file, actor)
            self.changed.set()
        return named

    def invite(
        self,
        study: str,
        actor: str,
        *,
        site: str | None = None,
        fetch_only: bool = False,
        days: float = 7.0,
    ) -> tuple[str, str]:
        """Return a one-time invitation and when it expires."""
        row, _ = self.study(study)
        if site is not None and not SITE_NAME.fullmatch(site):
            raise Refusal("malformed", _SITE_NAME_RULE)
        if not 0 < days <= 366:
            raise Refusal("malformed", "An invitation can be valid for at most 366 days.")
        code = secrets.token_hex(24)  # without hyphens, because it is used on command lines
        expires = now(seconds=days * 86400)
        facts = {"site": site, "fetch_only": fetch_only, "expires": expires}
        self.store.invite(study, hashed(code), actor, **facts)
        return str(Invitation(code, self.key.public, row["digest"])), expires

    def revoke(self, study: str, site: str, actor: str, *, withdraw: bool = False) -> Row:
        """Revoke a site's key, and with `withdraw` also withdraw its contribution."""
        self.study(study)
        if not SITE_NAME.fullmatch(site):
            raise Refusal("not-found", "There is no such site in this study.")
        row = self.store.revoke(study, site, actor, withdraw)
        self.changed.set()
        return row

    def close_study(self, study: str, actor: str) -> Row:
        """Accept no more sites or contributions; what is there can still be combined."""
        self.study(study)
        return self.store.close_study(study, actor)

    def allow(self, study: str, budget: Budget, actor: str) -> Balance:
        """Set what the hub may spend on a study whose aggregator draws noise."""
        row, agreed = self.study(study)
        agreed.check_limit(budget)
        with self.charging() as ledger:
            balance = ledger.allow(row["digest"], budget)
        self.store.let_draw(row["digest"])
        facts = {"epsilon": budget.epsilon, "delta": budget.delta, "unit": str(budget.unit)}
        self.store.log(actor, "budget set", study, **facts)
        return balance

    def balance(self, study: str) -> Balance | None:
        """Return what the hub may still spend on a study; None if no budget was ever set."""
        row, _ = self.study(study)
        try:
            return self.ledger.balance(row["digest"])
        except SettingsError:
            return None

    # ----------------------------------------------------------------------------------- for sites

    def enrol(self, *, code: str, site: str, key: str, nonce: str, fetch_only: bool = False) -> Row:
        """Enrol a site; its request was signed with `key`, so it holds that key."""
        if not SITE_NAME.fullmatch(site):
            raise Refusal("malformed", _SITE_NAME_RULE)
        code = code.strip().partition(".")[0]  # sites send this part, people perhaps all of it
        given = self.store.open_invitation(hashed(code))
        if given is not None and given["site"] is None:
            agreed = self.agreed(given["study"])
            if site == agreed.at or site in agreed.branches:
                raise Refusal("invitation", _OWN_NAME)
        return self.store.enrol(hashed(code), site, key, nonce, fetch_only)

    def rotate(self, study: str, key: str, new: str, proof: str, nonce: str) -> Row:
        """Replace a site's key; `proof` is the new key's signature over old and new."""
        if not (DIGEST.fullmatch(new) and SIGNATURE.fullmatch(proof)):
            raise Refusal("malformed", "The new key or its proof has the wrong format.")
        if not is_signed(rotation_message(key, new), bytes.fromhex(proof), new):
            raise Refusal("not-authenticated", "The new key did not sign the proof.")
        return self.store.rotate(study, key, new, nonce)

    def take(
        self,
        study: str,
        site: Row,
        newest: Row | None,
        arrived: Path | bytes,
        sha256: str,
        nonce: str,
    ) -> tuple[Row, bool]:
        """Check and keep an enrolled site's contribution; return its row and whether it is new."""
        agreed = self.agreed(study)
        if site["name"] in agreed.branches:
            return self._take_branch(agreed, site, newest, arrived, sha256, nonce)
        size = len(arrived) if isinstance(arrived, bytes) else arrived.stat().st_size
        try:
            file = SealedFile(arrived, KIND, most_bytes=self.settings.most_bytes)
            _check_sender(file.facts, agreed, site)
            # Large files are checked one after the other, so that the memory for only one of them
            # is needed.
            with self._large if size > LARGE else nullcontext():
                contribution = agreed.accept(Contribution.inspect(file, trusted=agreed.trusted))
            only_noise = agreed.is_blind and self.blind.check_file(agreed, file)
        except ConsilienceError as problem:
            raise Refusal("rejected", str(problem)) from None
        row: Row = {
            "digest": file.digest,
            "study": study,
            "site": site["name"],
            "sequence": contribution.sequence,
            "sha256": sha256,
            "size": size,
            "guarantee": _cost_of(contribution).as_dict(),
            "only_noise": only_noise,
        }
        last = newest["sequence"] if newest else 0
        if contribution.sequence > last + MOST_SKIPPED:
            raise Refusal(
                "rejected",
                f"The contribution's number is more than {MOST_SKIPPED:,} beyond the last one, "
                "which would leave few numbers for later ones.",
            )
        answer = self._submit(row, site, newest, arrived, nonce)
        self.changed.set()
        if newest is not None and answer[1]:
            for old in self.store.forget_old(row):
                with suppress(OSError):  # the next start removes what is left
                    self.store.files.remove(old)
        return answer

    def _take_branch(
        self,
        study: Study,
        site: Row,
        newest: Row | None,
        arrived: Path | bytes,
        sha256: str,
        nonce: str,
    ) -> tuple[Row, bool]:
        """Check and keep the release of a branch, which its hub signed and sends itself."""
        if site["key"] != study.branches[site["name"]]["key"]:
            raise Refusal("wrong-site", "The study names another key for the hub of this branch.")
        try:
            found = accept_branch(study, site["name"], Release.load(arrived))
        except ConsilienceError as problem:
            raise Refusal("rejected", str(problem)) from None
        row: Row = {
            "digest": found.digest,
            "study": study.name,
            "site": found.site,
            "sequence": found.sequence,
            "sha256": sha256,
            "size": len(arrived) if isinstance(arrived, bytes) else arrived.stat().st_size,
            "guarantee": found.guarantee.as_dict(),
            "only_noise": False,
        }
        answer = self._submit(row, site, newest, arrived, nonce)
        self.changed.set()
        return answer

    def _submit(
        self, row: Row, site: Row, newest: Row | None, arrived: Path | bytes, nonce: str
    ) -> tuple[Row, bool]:
        """Add a contribution; one that is refused, or that is there already, leaves no file."""
        key, sha256 = site["key"], row["sha256"]
        if isinstance(arrived, bytes):
            return self.store.submit(row, key, nonce, arrived)
        if self.store.has(row, site, newest):
            return self.store.submit(row, key, nonce)
        self.store.files.keep(arrived, sha256)
        try:
            is_durable = lambda: self.store.files.holds(sha256)  # noqa: E731
            return self.store.submit(row, key, nonce, is_durable=is_durable)
        except Refusal:
            self.store.remove_unnamed(sha256)
            raise

    def withdraw(self, study: str, key: str, nonce: str) -> Row:
        """Withdraw what a site contributed: no later release contains it."""
        row = self.store.withdraw(study, key, nonce)
        self.changed.set()
        return row

    def own_contribution(self, study: str, site: str, digest: str) -> Path | bytes:
        """Return the file of one of a site's own contributions, whatever became of it."""
        is_digest = DIGEST.fullmatch(digest)
        named = self.store.own_contribution(study, site, digest) if is_digest else None
        if named is None:
            raise Refusal("not-found", "This site has submitted no such contribution.")
        if not named["kept"]:
            raise Refusal("not-found", FORGOTTEN)
        return self.store.content(named["sha256"])

    def members(self, study: str, site: str) -> list[Row]:
        """Return the contributions that a site is to weigh, or refuse."""
        agreed = self.agreed(study)
        if agreed.at is None or site != agreed.at:
            message = "The study does not name this site to weigh the models of others."
            raise Refusal("not-allowed", message)
        rows = self.store.contributions(study, site=None)
        return [row for row in rows if row["state"] == "accepted" and row["site"] != site]

    def member(self, study: str, site: str, digest: str) -> Path | bytes:
        """Return the file of a contribution that a site is to weigh."""
        for row in self.members(study, site):
            if row["digest"] == digest:
                return self.own_contribution(study, row["site"], digest)
        raise Refusal("not-found", "There is no such contribution to weigh.")

    def release_path(self, study: str, sequence: int | None = None) -> tuple[Row, Path]:
        """Return the row and file of the current release, or of one by number.

        A release that was withdrawn is refused.
        """
        row = self.store.release(study, sequence)
        if row is None and sequence is None:
            raise why_no_release(self.store, *self.study(study))
        if row is None:
            raise Refusal("no-release", "There is no release with this number.")
        if row["state"] == "withdrawn":
            why = why_gone(self.agreed(study))
            raise Refusal("no-release", f"This release was withdrawn, because {why}.")
        if not row["kept"]:
            raise Refusal("no-release", FORGOTTEN_RELEASE)
        return row, self.store.file_path(row["sha256"])

    # ------------------------------------------------------------------------------ for keyholders

    def names_keyholder(self, study: str, key: str) -> bool:
        """Tell whether a study names the owner of this key as a keyholder."""
        try:
            rule = self.agreed(study).blind
        except Refusal:  # there is no such study
            return False
        return rule is not None and key in rule.keyholders

    def keyholder(self, study: str, key: str) -> Study:
        """Return a study that names the owner of this key as a keyholder, or refuse."""
        if not self.names_keyholder(study, key):
            raise Refusal("not-authenticated", "The key is not that of a keyholder of this study.")
        return self.agreed(study)

    def take_opening(
        self, study: Study, holder: str, arrived: Path | bytes, sha256: str
    ) -> tuple[Row, bool]:
        """Keep a keyholder's opening of a batch; return its row, and whether it is new."""
        answer = self.blind.take_opening(study, holder, arrived, sha256)
        self.changed.set()
        return answer


def _cost_of(contribution: Contribution) -> Guarantee:
    """Return what a contribution costs its site; noise alone costs nothing, whatever it hides."""
    stated = contribution.guarantee
    if contribution.has_records:
        return stated
    return replace(stated, epsilon=0.0, delta=0.0, assumptions=())


def _check_sender(facts: Mapping[str, object], agreed: Study, site: Row) -> None:
    """Refuse a contribution of another site or for another study, each with its own code."""
    if facts.get("study") != agreed.reference:
        raise Refusal(
            "study-differs",
            "The contribution was made for another study, or another version of this one.",
        )
    if facts.get("site") != site["name"] or facts["key"] != site["key"]:
        raise Refusal(
            "wrong-site", "The contribution is from another site, or was signed with another key."
        )
