"""When a study is combined, and by whom.

Where combining is post-processing, the hub does it by itself after every change; where it draws
noise, a coordinator has to ask. Changes that arrive together are combined together, by one worker
at a time. A running hub combines in processes of their own (`children.py`): one study that takes
long goes on beside the others, and two of them hold these up until one is done or is ended.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, cast

from consilience.aggregators.outliers import find_far, find_heavy
from consilience.errors import BudgetExceeded, ConsilienceError, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.log import ReleaseLog
from consilience.files.release import Release
from consilience.hub.blind import require_blind
from consilience.hub.children import Children, TookTooLong, find_memory
from consilience.hub.hub import Hub, Settings
from consilience.hub.leases import renewing
from consilience.hub.outages import OUTAGES, Ended
from consilience.hub.store import Row
from consilience.hub.store.studies import describe_absent
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.ledger import Ledger
from consilience.privacy.spending import Account
from consilience.protocol import Refusal
from consilience.study.branches import Part, load_part
from consilience.study.collect import (
    Opened,
    Publication,
    collect,
    find_breaking,
    name_problem,
    select_members,
)
from consilience.study.records import PublicFile
from consilience.study.study import Study
from consilience.study.withholding import Candidate
from consilience.tables.public import Public

POLL_SECONDS = 1.0  # how soon a change that another process accepted is noticed
STOP_SECONDS = 10.0  # for what is under way when the hub is stopped
MOST_TRIES = 3  # that end without a result; after that, the hub tries no more by itself

logger = logging.getLogger("consilience.hub")


_INTERRUPTED = (
    f"Combining it was begun {MOST_TRIES} times, and each time something ended the process that "
    "did it, perhaps for want of memory."
)


class Asked(NamedTuple):
    """What is to be combined.

    `request` is the idempotency key of whoever asks. `change` is the number of a release that was
    withheld, which they want to publish all the same.
    """

    study: str
    request: str | None = None
    change: int | None = None


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
        self._children: Children | None = None  # until `start`, combining happens in this process
        self._waiting: dict[str, float] = {}  # since when a study has been due
        # Seconds that each study took last time. It waits as long before the next: requests and
        # other studies keep half of the machine.
        self._took: dict[str, float] = {}
        self._beside: tuple[str, threading.Thread] | None = None  # a study that takes long
        self._counting = threading.Lock()
        self.combined, self.seconds = 0, 0.0  # attempts, and how long they took together

    def start(self) -> None:
        """Begin to look for work, and to do it in other processes."""
        self._children = Children(_begin, self.hub.settings)
        self._thread = threading.Thread(target=self._run, name="combiner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish what is under way, or leave it to the next start if that takes long."""
        self._stopped.set()
        self.hub.changed.set()
        if self._thread is not None and self._children is not None:
            until = time.monotonic() + STOP_SECONDS
            self._thread.join(STOP_SECONDS)
            if (beside := self._beside) is not None:
                beside[1].join(max(0.0, until - time.monotonic()))
            self._children.stop()
            self._thread.join()
            if (beside := self._beside) is not None:
                beside[1].join()

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
        """Combine the due studies that have had no change for a while, the quickest first.

        Return how many others still wait for that. With `at_once`, none waits. After a study that
        took long, the others wait for the next look, which may find quicker ones. While one goes on
        beside the others, no other that is known to take long is begun.
        """
        beside = self._find_beside()
        self._list_batches()
        due = [row for row in self.hub.store.due() if self._combines_itself(row)]
        names = {row["name"] for row in due}
        self._waiting = {name: since for name, since in self._waiting.items() if name in names}
        waiting, is_late = 0, False
        for row in sorted(due, key=lambda row: self._took.get(row["name"], math.inf)):
            name = row["name"]
            since = self._waiting.setdefault(name, time.monotonic())
            is_ready = at_once or self._is_quiet(row, time.monotonic() - since)
            if beside is not None:
                is_ready = is_ready and name != beside and not self._takes_long(name)
            if is_late or not is_ready or self._stopped.is_set():
                waiting += 1
                continue
            self._waiting.pop(name)
            is_late = self._give_turn(name)
        return waiting

    def _give_turn(self, name: str) -> bool:
        """Combine a study, and tell whether it takes long: such a one goes on beside the others."""
        if self._children is None:
            self._combine_due(name)
            return self._takes_long(name)
        turn = threading.Thread(target=self._combine_due, args=(name,), daemon=True)
        turn.start()
        turn.join(self.hub.settings.longest_wait_seconds)
        while turn.is_alive() and self._find_beside() is not None:
            turn.join(POLL_SECONDS)  # two are as many as there may be
        if turn.is_alive():
            self._beside = name, turn
            return True
        return self._takes_long(name)

    def _combine_due(self, name: str) -> None:
        began = time.monotonic()
        try:
            self.combine(name)
        except Refusal as refusal:  # the study's row says why, or another worker combines it
            logger.info("study %s was not combined: %s", name, refusal.code)
        except Exception:  # the study stays due, and the others have their turn
            logger.exception("combining study %s was interrupted", name)
        took = self._took[name] = time.monotonic() - began
        with self._counting:
            self.combined, self.seconds = self.combined + 1, self.seconds + took

    def _takes_long(self, name: str) -> bool:
        """Tell whether a study took long the last time."""
        return self._took.get(name, 0.0) > self.hub.settings.longest_wait_seconds

    def _find_beside(self) -> str | None:
        """Return the study that is being combined beside the others, if there is one."""
        if self._beside is not None and not self._beside[1].is_alive():
            self._beside = None
        return None if self._beside is None else self._beside[0]

    def _list_batches(self) -> None:
        """List the batches of blind studies that keyholders can open now."""
        for name, n_files in self.hub.store.count_waiting().items():
            try:
                study = self.hub.agreed(name)
                if n_files >= require_blind(study).least:
                    self.hub.blind.list_if_due(study)
            except OUTAGES:
                raise
            except Refusal as refusal:  # such as a file that was replaced just now
                logger.info("no batch of study %s was listed: %s", name, refusal.message)
            except Exception:  # the other studies have their turn
                logger.exception("no batch of study %s was listed", name)

    def _combines_itself(self, row: Row) -> bool:
        """Tell whether the hub combines a study unasked; one that cannot be read it gives up."""
        try:
            study = self.hub.agreed(row["name"])
            if study.is_blind and not self.hub.blind.has_seal(study):
                return False  # a worker on the machine that has it does
            return not study.draws_noise
        except OUTAGES:
            raise
        except Exception as problem:
            logger.exception("study %s cannot be read", row["name"])
            self._give_up(row, f"This version cannot read the study: {name_problem(problem)}")
            return False

    def _give_up(self, row: Row, problem: str) -> None:
        """State the problem of a study, unless another worker combines it."""
        store, worker = self.hub.store, self._new_worker()
        if store.claim(row["name"], worker, self.hub.settings.lease_seconds) is not None:
            store.give_up(row["name"], row["changes"], worker, problem)

    def _new_worker(self) -> str:
        """Return a name for one claim."""
        return f"{self.worker}-{secrets.token_hex(4)}"

    def _is_quiet(self, row: Row, waited: float) -> bool:
        settings, took = self.hub.settings, self._took.get(row["name"], 0.0)
        changed = datetime.fromisoformat(row["changed"]).timestamp()
        quiet = datetime.now().astimezone().timestamp() - changed
        long_enough = max(settings.longest_wait_seconds, 2 * took)
        needed = max(settings.quiet_seconds, took)
        return quiet >= needed or waited >= long_enough

    # ------------------------------------------------------------------------------ one study now

    def combine(
        self,
        name: str,
        *,
        request: str | None = None,
        change: int | None = None,
        actor: str = "hub",
    ) -> Row:
        """Combine a study now and return its release's row, or refuse.

        `request` is the idempotency key of the `actor` who asks: a release that was made under it
        is returned again. It is required where the aggregator draws noise, which is charged to the
        hub's ledger first. `change` is the number of a release that was withheld, if the `actor`
        has seen why and wants to publish it all the same; any other release is withheld if it may
        be spoilt.
        """
        row, study = self.hub.study(name)
        self._check_noise(study, request)
        if request is not None and (known := self.hub.store.release(name, request=request)):
            return known
        if row["withheld"] and change != row["changes"]:
            raise Refusal("withheld", row["problem"])
        made = self._attempt(Asked(name, request, change), row)
        if request is not None and made["request"] == request:
            facts = {"request": request, "sequence": made["sequence"]}
            self.hub.store.log(actor, "release asked for", name, **facts)
        return made

    def _attempt(self, asked: Asked, row: Row) -> Row:
        """Combine a study in another process, if there is one, within the hub's time limit."""
        store, worker = self.hub.store, self._new_worker()
        seconds = self.hub.settings.lease_seconds
        renew = partial(store.renew, asked.study, worker, seconds)
        try:
            with renewing(renew, seconds, f"the study {asked.study}"):
                if self._children is None:
                    return self.make(asked, worker)
                is_asked = asked.request is not None
                return self._children.work(asked, worker, is_asked=is_asked)
        except TookTooLong:
            seconds = self.hub.settings.combine_seconds
            problem = f"Combining it was stopped: it took longer than {seconds:g} seconds."
            with suppress(Refusal):  # another worker has taken over
                store.give_up(asked.study, row["changes"], worker, problem)
            raise Refusal("cannot-combine", problem) from None
        except (Ended, MemoryError) as ended:
            problem = _INTERRUPTED
            if isinstance(ended, MemoryError):
                most = find_memory(self.hub.settings) >> 20
                problem = f"Combining it takes more memory than the {most:,} MiB that it may have."
            tries = store.unclaim(asked.study, worker, is_counted=True)
            if tries < MOST_TRIES and problem != row["problem"]:
                raise
            self._give_up(row, problem)
            raise Refusal("cannot-combine", problem) from None
        except BaseException:
            store.unclaim(asked.study, worker)
            raise

    def make(self, asked: Asked, worker: str) -> Row:
        """Claim a study for `worker`, make its release and publish it, or refuse."""
        store, settings, name, request = self.hub.store, self.hub.settings, *asked[:2]
        _, study = self.hub.study(name)
        claimed = store.claim(name, worker, settings.lease_seconds)
        if claimed is None:
            raise Refusal("unavailable", "This study is being combined at the moment.")
        row, contributions = claimed
        for old in store.forget_releases(name):
            with suppress(OSError):  # the next start removes what is left
                store.files.remove(old)
        # Whoever had the claim before may have answered the same key.
        known = store.release(name, request=request) if request is not None else None
        current = store.release(name)
        if current and current["change"] == row["changes"] and not study.draws_noise:
            known = known or current
        if known is not None:
            store.unclaim(name, worker)
            return known
        try:
            accepted = self._accepted(study, contributions)
            if request is None and row["tries"] >= MOST_TRIES:
                raise Refusal("cannot-combine", _INTERRUPTED)
            if study.at is not None and study.at not in {one["site"] for one in accepted}:
                message = f"The site {study.at} has not weighed the models of the others yet."
                raise Refusal("too-few-sites", message)
            if (n := len({one["site"] for one in accepted} - {study.at})) < study.min_sites:
                message = f"A release needs {study.min_sites} contributions; {n} are in use."
                raise Refusal("too-few-sites", message)
            is_agreed = bool(asked.change == row["changes"] and row["withheld"])
            made, candidate = self._release(
                study, accepted, contributions, request, is_agreed=is_agreed
            )
            if not is_agreed:
                _require_good(candidate, row["changes"])
            return self._publish(made, row, request, worker)
        except OUTAGES:
            raise
        except Exception as problem:
            if not isinstance(problem, Refusal | ConsilienceError):
                logger.exception("study %s cannot be combined", name)
            refusal = _as_refusal(problem)
            withheld = refusal.code == "withheld"
            expected = refusal.code == "too-few-sites" or (study.draws_noise and not withheld)
            reported = None if expected else refusal.message
            store.give_up(name, row["changes"], worker, reported, withheld=withheld)
            raise refusal from None

    def _accepted(self, study: Study, contributions: Sequence[Row]) -> list[Row]:
        """Return the rows that a release is made of: of a blind study those in opened batches."""
        if not study.is_blind:
            return [one for one in contributions if one["state"] == "accepted"]
        return [file for batch in self._opened_batches(study) for file in batch["files"]]

    def _opened_batches(self, study: Study) -> list[Row]:
        return [row for row in self.hub.store.batches(study.name) if row["state"] == "opened"]

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
        *,
        is_agreed: bool = False,
    ) -> tuple[_Made, Candidate]:
        """Make a release, and say how to judge it; one that is agreed was made and shown before."""
        study.require_valid()
        public, test = (self._records(study, part) for part in (study.public, study.test))
        members, absent = self._members(study, accepted)
        if study.draws_noise:  # before anything is charged, and alike whenever it is tried again
            members = _leave_out_breaking(study, members, absent, public, test)
        _require_whole(study, absent)
        _require_enough(study, members, absent)
        if study.draws_noise and is_agreed:
            request = self._paid_request(study, members)
        members = list(select_members(study, members))
        try:
            release = self._collect(study, members, contributions, request, public, test)
        except OUTAGES:
            raise
        except (Refusal, BudgetExceeded):
            raise
        except Exception:
            if study.draws_noise or study.at is not None:
                raise
            kept = _leave_out_breaking(study, members, absent, public, test)
            if len(kept) == len(members):
                raise
            members = kept
            _require_whole(study, absent)
            _require_enough(study, members, absent)
            release = self._collect(study, members, contributions, request, public, test)
        # What is unusual about an exact member is not private, and nobody sees a masked one.
        is_hidden = study.trusted or study.is_blind
        models = [member for member in members if not member.weighs]
        is_hidden = is_hidden or bool(study.branches)  # the noise of a branch is not known
        far = {} if is_hidden else self._find_far(study, models, public, test)
        places = {} if is_hidden else find_heavy(release.ensemble)
        heavy = {members[place].site: text for place, text in places.items()}
        made = _Made(release, [member.digest for member in members], absent, heavy | far)
        last, unread = self._last_release(study)
        return made, Candidate(study, release, members, far, heavy, last, public, test, unread)

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
        members: Sequence[Part],
        *records: Public | None,
    ) -> dict[str, str]:
        try:
            learners = [member.learner for member in members]
            far = find_far(learners, *records, names=study.schema.feature_names)
        except (ArithmeticError, ValueError, ConsilienceError):
            logger.exception("members of study %s cannot be compared", study.name)
            return {}
        return {members[place].site: text for place, text in far.items()}

    def _members(self, study: Study, accepted: Sequence[Row]) -> tuple[list[Part], dict[str, str]]:
        """Return the contributions that fit the study, and why those of other sites do not.

        Earlier versions checked less when they accepted one.
        """
        members, absent = [], {}
        for row in accepted:
            content = self.hub.store.content(row["sha256"])
            try:
                members.append(load_part(study, row["site"], content))
            except OUTAGES:
                raise
            except Exception as problem:
                absent[row["site"]] = name_problem(problem)
        return members, absent

    def _collect(
        self,
        study: Study,
        members: Sequence[Part],
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
        with self.hub.charging() if study.draws_noise else nullcontext() as ledger:
            # The same request with other members would be another draw.
            key = f"{request}:{_fingerprint(members)}"
            if ledger is not None:
                _require_new(ledger, study, key)
            account = Account(ledger, study.digest, key)
            publication = Publication(self.hub.key, log.length + 1, earlier, account, log)
            if study.is_blind:
                publication = replace(
                    publication, opened=self._open(study, cast(Sequence[Contribution], members))
                )
            return collect(study, members, public=public, test=test, publication=publication)

    def _paid_request(self, study: Study, members: Sequence[Part]) -> str:
        """Return the key under which the release of these members that was withheld was paid."""
        with self.hub.charging() as ledger:
            keys = [charge.key.rpartition(":") for charge in ledger.charges(study.digest)]
        paid = [request for request, _, whole in keys if whole == _fingerprint(members)]
        if not paid:
            raise Refusal(
                "cannot-combine",
                "The release that was withheld is not in the hub's ledger. Nothing was charged. "
                "Ask for another one after the next contribution.",
            )
        return paid[-1]

    def _open(self, study: Study, members: Sequence[Contribution]) -> Opened:
        """Return the batches that all keyholders opened, with what they answered."""
        by_digest = {member.digest: member for member in members}
        batches = [
            (
                [by_digest[file["digest"]] for file in batch["files"]],
                self.hub.blind.read_openings(batch),
            )
            for batch in self._opened_batches(study)
            if all(file["digest"] in by_digest for file in batch["files"])
        ]
        return Opened(batches, self.hub.blind.seal(study))

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
        told = {"absent": made.absent, "alerts": made.alerts}
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
        try:
            is_durable = lambda: store.files.holds(sha256)  # noqa: E731
            return store.publish(facts, made.digests, worker, **told, is_durable=is_durable)
        except Refusal:
            store.remove_unnamed(sha256)
            raise


def _fingerprint(members: Sequence[Part]) -> str:
    digests = sorted({member.digest for member in members})
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _begin(settings: Settings) -> Callable[[Sequence[Any], str], Row]:
    """Open the hub in a process of its own, and return what combines a study there."""
    # What a crash left behind is swept by hubs that start, not at any moment: a file that another
    # process stores just now has no row yet.
    combiner = Combiner(Hub(replace(settings, sweep_after_seconds=math.inf)))
    return lambda asked, worker: combiner.make(Asked(*asked), worker)


def _require_enough(study: Study, members: Sequence[Part], absent: Mapping[str, str]) -> None:
    """Refuse if too few sites are left once those that cannot be combined are not counted."""
    if len(members) < study.min_sites:
        raise Refusal(
            "cannot-combine",
            f"A release needs {study.min_sites} sites, and {len(members)} can be combined. "
            f"{describe_absent(absent)}",
        )


def _leave_out_breaking(
    study: Study,
    members: list[Part],
    absent: dict[str, str],
    *records: Public | None,
) -> list[Part]:
    """Return the members that can be combined; say in `absent` why the others cannot."""
    public, test = records
    breaking = find_breaking(study, members, public=public, test=test)
    if breaking:
        logger.warning("study %s: %d members are left out", study.name, len(breaking))
    absent.update(breaking)
    return [member for member in members if member.site not in breaking]


def _require_whole(study: Study, absent: Mapping[str, str]) -> None:
    """Refuse to leave a member out of sums that are masked."""
    if absent and study.is_blind:
        raise Refusal(
            "cannot-combine",
            f"{describe_absent(absent)} Nobody can take one file out of the sum of a batch. "
            "Withdraw that contribution: the whole batch leaves, and the others can hand over "
            "again.",
        )


def _require_good(candidate: Candidate, change: int) -> None:
    """Refuse to publish what may be spoilt, unless a coordinator was told so."""
    if reasons := candidate.find_reasons():
        paid = " Its noise is charged, and publishing it costs nothing more."
        paid = paid if candidate.study.draws_noise else ""
        raise Refusal(
            "withheld",
            f"A release was made and withheld. {' '.join(reasons)} A contribution may be wrong, or "
            f"there is more noise than the records outweigh.{paid} A coordinator can publish it "
            f"all the same, as change {change}.",
        )


def _require_new(ledger: Ledger, study: Study, key: str) -> None:
    """Refuse a key that was charged for other members: it would be charged again."""
    request = key.rpartition(":")[0]
    charged = {charge.key for charge in ledger.charges(study.digest)}
    others = {one for one in charged if one.rpartition(":")[0] == request} - {key}
    if others:
        raise Refusal(
            "cannot-combine",
            "A release was charged under this key, was not finished, and the contributions in use "
            "have changed since. A release of these costs as much again. Ask for it under a new "
            "key.",
        )


def _as_refusal(problem: Exception) -> Refusal:
    if isinstance(problem, Refusal):
        return problem
    code = "budget" if isinstance(problem, BudgetExceeded) else "cannot-combine"
    return Refusal(code, name_problem(problem))
