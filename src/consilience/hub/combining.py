"""When a study is combined, and by whom.

Where combining is post-processing, the hub does it by itself after every change; where it draws
noise, a coordinator has to ask. Combining happens outside requests. Changes that arrive together
are combined together, by one worker at a time.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from consilience.aggregators.outliers import find_far, find_heavy
from consilience.errors import BudgetExceeded, ConsilienceError, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.log import ReleaseLog
from consilience.files.release import Release
from consilience.hub.hub import Hub
from consilience.hub.store import Row
from consilience.hub.store.studies import describe_absent
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.spending import Account
from consilience.protocol import Refusal
from consilience.study.collect import (
    Publication,
    collect,
    find_breaking,
    name_problem,
)
from consilience.study.records import PublicFile
from consilience.study.study import Study
from consilience.study.withholding import Candidate
from consilience.tables.public import Public

POLL_SECONDS = 1.0  # how soon a change that another process accepted is noticed

logger = logging.getLogger("consilience.hub")


# Nothing that a member or a study can cause: a later attempt may work.
MACHINE = (OSError, MemoryError, SQLAlchemyError)


class _Made(NamedTuple):
    """A release, the contributions in it, and the sites that were left out or look unusual."""

    release: Release
    digests: list[str]
    absent: dict[str, str]
    alerts: dict[str, str]


class Combiner:
    """The worker of one process that combines studies.

    Any number of workers may share a database. A study is combined under a claim, and a release is
    published only while its claim holds, so every change is combined once.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.worker = secrets.token_hex(8)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiting: dict[str, float] = {}  # since when a study has been due
        # As long as the last combining took: requests keep half of the machine.
        self._pause = 0.0
        self.combined, self.seconds = 0, 0.0  # attempts, and how long they took together

    def start(self) -> None:
        """Begin to look for work."""
        self._thread = threading.Thread(target=self._run, name="combiner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish what is under way and return."""
        self._stopped.set()
        self.hub.changed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        delay, pause = POLL_SECONDS, min(POLL_SECONDS, self.hub.settings.quiet_seconds / 2)
        while not self._stopped.is_set():
            if self.hub.changed.wait(delay):
                self._stopped.wait(pause)  # more changes may follow: look at all of them at once
            self.hub.changed.clear()
            try:
                delay = pause if self.run() else POLL_SECONDS
            except Exception:  # the study stays due, so the next look tries again
                logger.exception("combining was interrupted")
                delay = POLL_SECONDS
                self._stopped.wait(POLL_SECONDS)

    def run(self, *, at_once: bool = False) -> int:
        """Combine the due studies that have had no change for a while.

        Return how many others still wait for that. With `at_once`, none waits.
        """
        due = [row for row in self.hub.store.due() if self._combines_itself(row)]
        names = {row["name"] for row in due}
        self._waiting = {name: since for name, since in self._waiting.items() if name in names}
        waiting = 0
        for row in due:
            since = self._waiting.setdefault(row["name"], time.monotonic())
            if not at_once and not self._is_quiet(row, time.monotonic() - since):
                waiting += 1
                continue
            self._waiting.pop(row["name"])
            began = time.monotonic()
            try:
                self.combine(row["name"])
            except Refusal as refusal:  # the study's row says why, or another worker combines it
                logger.info("study %s was not combined: %s", row["name"], refusal.code)
            except Exception:  # the study stays due, and the others have their turn
                logger.exception("combining study %s was interrupted", row["name"])
            self._pause = time.monotonic() - began
            self.combined, self.seconds = self.combined + 1, self.seconds + self._pause
        return waiting

    def _combines_itself(self, row: Row) -> bool:
        """Tell whether the hub combines a study unasked; one that cannot be read it gives up."""
        try:
            return not self.hub.agreed(row["name"]).draws_noise
        except MACHINE:
            raise
        except Exception as problem:
            logger.exception("study %s cannot be read", row["name"])
            store, worker = self.hub.store, f"{self.worker}-{secrets.token_hex(4)}"
            if store.claim(row["name"], worker, self.hub.settings.lease_seconds) is not None:
                text = f"This version cannot read the study: {name_problem(problem)}"
                store.give_up(row["name"], row["changes"], worker, text)
            return False

    def _is_quiet(self, row: Row, waited: float) -> bool:
        settings = self.hub.settings
        changed = datetime.fromisoformat(row["changed"]).timestamp()
        quiet = datetime.now().astimezone().timestamp() - changed
        long_enough = max(settings.longest_wait_seconds, 2 * self._pause)
        needed = max(settings.quiet_seconds, min(self._pause, long_enough))
        return quiet >= needed or waited >= long_enough

    # ------------------------------------------------------------------------------ one study now

    def combine(self, name: str, *, request: str | None = None, actor: str = "hub") -> Row:
        """Combine a study now and return its release's row, or refuse.

        `request` is the idempotency key of the `actor` who asks: the same key returns the same
        release. It is required where the aggregator draws noise, which is charged to the hub's
        ledger first.
        """
        row = self._combine(name, request)
        if request is not None:
            facts = {"request": request, "sequence": row["sequence"]}
            self.hub.store.log(actor, "release asked for", name, **facts)
        return row

    def _combine(self, name: str, request: str | None) -> Row:
        store, settings = self.hub.store, self.hub.settings
        _, study = self.hub.study(name)
        self._check_noise(study, request)
        if request is not None and (known := store.release(name, request=request)) is not None:
            return known
        worker = f"{self.worker}-{secrets.token_hex(4)}"
        claimed = store.claim(name, worker, settings.lease_seconds)
        if claimed is None:
            raise Refusal("unavailable", "This study is being combined at the moment.")
        row, contributions = claimed
        for old in store.forget_releases(name):
            with suppress(OSError):  # the next start removes what is left
                store.files.remove(old)
        with self._renewing(name, worker):
            current = store.release(name)
            if current and current["change"] == row["changes"] and not study.draws_noise:
                store.unclaim(name, worker)
                return current
            accepted = [one for one in contributions if one["state"] == "accepted"]
            try:
                if (n := len(accepted)) < study.min_sites:
                    message = f"A release needs {study.min_sites} contributions; {n} are in use."
                    raise Refusal("too-few-sites", message)
                made = self._release(study, accepted, contributions, request)
                return self._publish(made, row, request, worker)
            except MACHINE:
                store.unclaim(name, worker)
                raise
            except Exception as problem:
                if not isinstance(problem, Refusal | ConsilienceError):
                    logger.exception("study %s cannot be combined", name)
                refusal = _as_refusal(problem)
                expected = refusal.code == "too-few-sites" or study.draws_noise
                reported = None if expected else refusal.message
                withheld = refusal.code == "withheld"
                store.give_up(name, row["changes"], worker, reported, withheld=withheld)
                raise refusal from None
            except BaseException:
                store.unclaim(name, worker)
                raise

    def _check_noise(self, study: Study, request: str | None) -> None:
        if study.draws_noise and request is None:
            raise Refusal(
                "not-allowed",
                "This study's aggregator draws noise, so a coordinator has to ask for a release.",
            )
        if study.draws_noise and not self.hub.store.may_draw(study.digest):
            raise Refusal(
                "budget",
                "The hub was restored from a backup; its operator has to allow a budget again.",
            )

    def _release(
        self,
        study: Study,
        accepted: Sequence[Row],
        contributions: Sequence[Row],
        request: str | None,
    ) -> _Made:
        study.require_valid()
        public, test = (self._records(study, part) for part in (study.public, study.test))
        members, absent = self._members(study, accepted)
        _require_enough(study, members, absent)
        try:
            release = self._collect(study, members, contributions, request, public, test)
        except (Refusal, BudgetExceeded, *MACHINE):
            raise
        except Exception:
            breaking: dict[str, str] = {}
            if not study.draws_noise:
                breaking = find_breaking(study, members, public=public, test=test)
            if not breaking:
                raise
            logger.warning("study %s: %d members are left out", study.name, len(breaking))
            absent |= breaking
            members = [member for member in members if member.site not in breaking]
            _require_enough(study, members, absent)
            release = self._collect(study, members, contributions, request, public, test)
        # What is unusual about an exact member is not private.
        far = {} if study.trusted else self._find_far(study, members, public, test)
        places = {} if study.trusted else find_heavy(release.ensemble)
        heavy = {members[place].site: text for place, text in places.items()}
        if request is None:
            last, unread = self._last_release(study)
            candidate = Candidate(study, release, members, far, heavy, last, public, test, unread)
            _require_good(candidate)
        return _Made(release, [member.digest for member in members], absent, heavy | far)

    def _last_release(self, study: Study) -> tuple[Release | None, int | None]:
        """Return the release that sites have, or its number if it cannot be read."""
        row = self.hub.store.release(study.name)
        if row is None:
            return None, None
        try:
            return Release.load(self.hub.store.file_path(row["sha256"])), None
        except (ConsilienceError, Refusal):
            logger.exception("the last release of study %s cannot be read", study.name)
            return None, int(row["sequence"])

    def _find_far(
        self,
        study: Study,
        members: Sequence[Contribution],
        *records: Public | None,
    ) -> dict[str, str]:
        try:
            learners = [member.learner for member in members]
            far = find_far(learners, *records, names=study.schema.feature_names)
        except (ArithmeticError, ValueError, ConsilienceError):
            logger.exception("members of study %s cannot be compared", study.name)
            return {}
        return {members[place].site: text for place, text in far.items()}

    def _members(
        self, study: Study, accepted: Sequence[Row]
    ) -> tuple[list[Contribution], dict[str, str]]:
        """Return the contributions that fit the study, and why those of other sites do not.

        Earlier versions checked less when they accepted one.
        """
        members, absent = [], {}
        for row in accepted:
            content = self.hub.store.content(row["sha256"])
            try:
                members.append(study.accept(Contribution.load(content, trusted=study.trusted)))
            except MACHINE:
                raise
            except Exception as problem:
                absent[row["site"]] = name_problem(problem)
        return members, absent

    def _collect(
        self,
        study: Study,
        members: Sequence[Contribution],
        contributions: Sequence[Row],
        request: str | None,
        public: Public | None,
        test: Public | None,
    ) -> Release:
        store, used = self.hub.store, {member.digest for member in members}
        earlier: dict[str, list[Guarantee]] = {}
        for row in contributions:
            if row["digest"] not in used:
                earlier.setdefault(row["site"], []).append(Guarantee.from_dict(row["guarantee"]))
        log = ReleaseLog(digests=store.release_digests(study.name))
        # The same request with other members is another draw, so it is charged separately.
        whole = hashlib.sha256("".join(sorted(used)).encode()).hexdigest()
        with self.hub.charging() if study.draws_noise else nullcontext() as ledger:
            account = Account(ledger, study.digest, f"{request}:{whole[:32]}")
            publication = Publication(self.hub.key, log.length + 1, earlier, account, log)
            return collect(study, members, public=public, test=test, publication=publication)

    def _records(self, study: Study, part: PublicFile | None) -> Public | None:
        """Read a file of public records, or say that it was not uploaded yet."""
        if part is None:
            return None
        if self.hub.store.file(part.sha256) is None:
            raise SettingsError(f"The study's public file {part.file!r} has not been uploaded yet.")
        place = self.hub.store.file_path(part.sha256)
        folder = self.hub.store.folder / "public" / part.sha256
        folder.mkdir(parents=True, exist_ok=True)
        named = folder / part.file  # the ending of its name says how to read it
        if not named.exists():
            named.unlink(missing_ok=True)  # a link to a copy that was removed
            named.symlink_to(place)
        return part.read(study.schema, folder)

    def _publish(self, made: _Made, row: Row, request: str | None, worker: str) -> Row:
        release = made.release
        store, arrived = self.hub.store, self.hub.store.files.new()
        content = release.sealed.to_bytes()
        arrived.write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        store.files.keep(arrived, sha256)
        facts: Row = {
            "digest": release.digest,
            "study": row["name"],
            "sequence": release.sequence,
            "sha256": sha256,
            "change": row["changes"],
            "request": request,
            "size": len(content),
            "n_sites": len(made.digests),
            "guarantee": release.guarantee.as_dict(),
        }
        return store.publish(facts, made.digests, worker, absent=made.absent, alerts=made.alerts)

    @contextmanager
    def _renewing(self, name: str, worker: str) -> Iterator[None]:
        """Renew the claim while the block runs; if this process dies, the claim expires."""
        ended, seconds = threading.Event(), self.hub.settings.lease_seconds

        def renew() -> None:
            while not ended.wait(seconds / 3):
                self.hub.store.renew(name, worker, seconds)

        thread = threading.Thread(target=renew, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _require_enough(
    study: Study, members: Sequence[Contribution], absent: Mapping[str, str]
) -> None:
    """Refuse if too few sites are left once those that cannot be combined are not counted."""
    if len(members) < study.min_sites:
        raise Refusal(
            "cannot-combine",
            f"A release needs {study.min_sites} sites, and {len(members)} can be combined. "
            f"{describe_absent(absent)}",
        )


def _require_good(candidate: Candidate) -> None:
    """Refuse to publish unasked what may be spoilt."""
    if reasons := candidate.find_reasons():
        raise Refusal(
            "withheld",
            f"A release was made and withheld. {' '.join(reasons)} A contribution may be wrong, or "
            "there is more noise than the records outweigh. A coordinator can publish it all the "
            "same.",
        )


def _as_refusal(problem: Exception) -> Refusal:
    if isinstance(problem, Refusal):
        return problem
    code = "budget" if isinstance(problem, BudgetExceeded) else "cannot-combine"
    return Refusal(code, name_problem(problem))
