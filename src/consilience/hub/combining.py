"""Combining: by itself after every change where that is post-processing, on the coordinator's command where it draws
noise; outside requests, changes that come together combined together, by one worker at a time.
"""  # noqa: D205

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.boosting import SiteBoosting
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.votes import WeightedVote
from consilience.errors import BudgetExceeded, ConsilienceError, SettingsError
from consilience.evaluation.measures import evaluate, measures
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.hub.hub import Hub
from consilience.hub.store import Row
from consilience.privacy.guarantee import Guarantee
from consilience.protocol import Refusal
from consilience.study.study import LINEAR, PublicFile, Study
from consilience.tables.public import Public

POLL_SECONDS = 1.0  # how soon a change that another process took is noticed
MOST_COMPARED = 200  # members; beyond them only the study's own aggregator is measured
COMPARING_SECONDS = 10.0

logger = logging.getLogger("consilience.hub")


class Combiner:
    """The worker of one process. Any number may share a database: a study is combined under a claim, and a release
    is published only while its claim holds, so every change is combined once.
    """  # noqa: D205

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.worker = secrets.token_hex(8)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiting: dict[str, float] = {}  # since when a study has been due
        self._pause = 0.0  # as long as the last combining took: requests keep half of the machine
        self.seconds: list[float] = []

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
                self._stopped.wait(
                    pause
                )  # nothing is quiet yet: a crowd of changes is looked at once
            self.hub.changed.clear()
            try:
                delay = pause if self.run() else POLL_SECONDS
            except Exception:  # whatever it was, the study stays due
                logger.exception("combining was interrupted")
                delay = POLL_SECONDS
                self._stopped.wait(POLL_SECONDS)

    def run(self, *, at_once: bool = False) -> int:
        """Combine what is due and has been quiet; return how many studies wait for quiet."""
        due = [row for row in self.hub.store.due() if not self.hub.agreed(row["name"]).draws_noise]
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
            except (
                Refusal
            ) as refusal:  # written down in the study's row, or another worker's affair
                logger.info("study %s was not combined: %s", row["name"], refusal.code)
            self._pause = time.monotonic() - began
            self.seconds.append(self._pause)
        return waiting

    def _is_quiet(self, row: Row, waited: float) -> bool:
        settings = self.hub.settings
        quiet = (
            datetime.now().astimezone().timestamp()
            - datetime.fromisoformat(row["changed"]).timestamp()
        )
        long_enough = max(settings.longest_wait_seconds, 2 * self._pause)
        return (
            quiet >= max(settings.quiet_seconds, min(self._pause, long_enough))
            or waited >= long_enough
        )

    def combine(self, name: str, *, request: str | None = None) -> Row:
        """Combine a study now and return its release's row, or refuse.

        `request` is the coordinator's idempotency key: the same key again returns the same release.
        It is required where the aggregator draws noise, which is charged to the hub's ledger first.
        """
        store, settings = self.hub.store, self.hub.settings
        _, study = self.hub.study(name)
        if study.draws_noise and request is None:
            raise Refusal(
                "not-allowed",
                "This study's aggregator draws noise: a coordinator has to ask for it.",
            )
        if study.draws_noise and not store.may_draw(study.digest):
            raise Refusal(
                "budget",
                "The hub was restored from a backup; its operator has to allow a budget again.",
            )
        if request is not None and (known := store.release(name, request=request)) is not None:
            return known
        worker = f"{self.worker}-{secrets.token_hex(4)}"
        claimed = store.claim(name, worker, settings.lease_seconds)
        if claimed is None:
            raise Refusal("unavailable", "This study is being combined at this moment.")
        row, every = claimed
        with self._renewing(name, worker):
            accepted = [one for one in every if one["state"] == "accepted"]
            current = store.release(name)
            if (
                current is not None
                and current["change"] == row["changes"]
                and not study.draws_noise
            ):
                store.unclaim(name, worker)
                return current
            try:
                if len(accepted) < study.min_sites:
                    few = f"{len(accepted)} sites have contributed, and a release needs {study.min_sites}."
                    raise Refusal("too-few-sites", few)
                release = self._release(study, accepted, every, request)
            except (Refusal, ConsilienceError) as problem:
                refusal = _as_refusal(problem)
                expected = refusal.code == "too-few-sites" or study.draws_noise
                store.give_up(name, row["changes"], worker, None if expected else refusal.message)
                raise refusal from None
            except BaseException:
                store.unclaim(name, worker)
                raise
            return self._publish(release, row, accepted, request, worker)

    def command(self, name: str, request: str, actor: str) -> Row:
        """Combine because a coordinator asks, and write down who did."""
        row = self.combine(name, request=request)
        self.hub.store.log(
            actor, "release asked for", name, request=request, sequence=row["sequence"]
        )
        return row

    def _release(
        self, study: Study, accepted: Sequence[Row], every: Sequence[Row], request: str | None
    ) -> Release:
        store = self.hub.store
        public, test = (self._records(study, part) for part in (study.public, study.test))
        contributions = [
            Contribution.load(store.content(row["sha256"]), trusted=study.trusted)
            for row in accepted
        ]
        used = {row["digest"] for row in accepted}
        earlier: dict[str, list[Guarantee]] = {}
        for row in every:
            if row["digest"] not in used:
                earlier.setdefault(row["site"], []).append(Guarantee.from_dict(row["guarantee"]))
        made: dict[str, Any] = {"signing": self.hub.key, "sequence": store.next_release(study.name)}
        made |= {"earlier": earlier, "quality": _measuring(study, contributions, public, test)}
        if not study.draws_noise:
            return study.combine(contributions, public, **made)
        # The same request with other members is another draw, and pays for itself.
        whole = hashlib.sha256("".join(sorted(used)).encode()).hexdigest()
        with self.hub.charging() as ledger:
            key = f"{request}:{whole[:32]}"
            return study.combine(
                contributions, public, ledger=ledger, dataset=study.digest, key=key, **made
            )

    def _records(self, study: Study, part: PublicFile | None) -> Public | None:
        """Read a file of public records from the content-addressed folder, or say that it is not there yet."""
        if part is None:
            return None
        if self.hub.store.file(part.sha256) is None:
            raise SettingsError(f"The study's public file {part.file!r} has not been uploaded yet.")
        place = self.hub.store.files.path(part.sha256)
        folder = self.hub.store.folder / "public" / part.sha256
        folder.mkdir(parents=True, exist_ok=True)
        named = folder / part.file  # its ending says how it is read
        if not named.exists():
            named.unlink(missing_ok=True)  # a link to a copy that is no longer near
            named.symlink_to(place)
        return part.read(study.schema, folder)

    def _publish(
        self, release: Release, row: Row, accepted: Sequence[Row], request: str | None, worker: str
    ) -> Row:
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
        }
        facts |= {
            "change": row["changes"],
            "request": request,
            "size": len(content),
            "n_sites": len(accepted),
        }
        facts["guarantee"] = release.guarantee.as_dict()
        return store.publish(facts, [one["digest"] for one in accepted], worker)

    @contextmanager
    def _renewing(self, name: str, worker: str) -> Iterator[None]:
        """Keep the claim while the block runs; if this process dies, the claim runs out by itself."""
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


def _as_refusal(problem: Refusal | ConsilienceError) -> Refusal:
    if isinstance(problem, Refusal):
        return problem
    return Refusal(
        "budget" if isinstance(problem, BudgetExceeded) else "cannot-combine", str(problem)
    )


# ----------------------------------------------------------------------------------------------- how good a release is


def _measuring(
    study: Study, contributions: Sequence[Contribution], public: Public | None, test: Public | None
) -> Callable[[Any], list[dict[str, Any]]]:
    """Return what measures an ensemble on the study's public test records beside other ways and honest baselines.

    Members are measured only where they are private by themselves: what an exact one does on test
    records is not.
    """

    def measured(ensemble: Any) -> list[dict[str, Any]]:
        if test is None or test.y is None:
            return []
        rows = [_row(_label(study), "study", ensemble, test)]
        if (
            public is not None
            and public.y is not None
            and (alone := _public_only(study, public)) is not None
        ):
            rows.append(_row("public records alone", "baseline", alone, test))
        if study.trusted or study.draws_noise:
            return rows
        members = [contribution.learner for contribution in contributions]
        errors = [next(iter(measures(member, test.X, test.y).values())) for member in members]
        order = np.argsort(errors, kind="stable")
        rows.append(
            _row(
                "one site alone (the median site)",
                "baseline",
                members[order[len(order) // 2]],
                test,
            )
        )
        rows.append(
            _row("one site alone (the best on these records)", "baseline", members[order[0]], test)
        )
        return rows + (
            _others(study, members, public, test) if len(members) <= MOST_COMPARED else []
        )

    return measured


def _others(
    study: Study, members: Sequence[Any], public: Public | None, test: Public
) -> list[dict[str, Any]]:
    """Measure the aggregators that the study could have named instead."""
    classes: Mapping[str, Any] = (
        {} if study.schema.classes is None else {"classes": list(study.schema.classes)}
    )
    ways: dict[str, Callable[[], Any]] = {}
    if study.learner in LINEAR:
        ways |= {
            f"Average ({by})": partial(Average, by, **classes)
            for by in ("equal", "size", "precision")
        }
        if public is not None and public.y is not None:
            ways |= {
                kind.__name__: partial(kind, **classes)
                for kind in (PublicBlend, FeatureMethod, SiteBoosting)
            }
    else:
        ways |= {
            f"WeightedVote ({by})": partial(WeightedVote, by, **classes)
            for by in ("equal", "size-epsilon")
        }
    ways.pop(_label(study), None)
    rows, until = [], time.monotonic() + COMPARING_SECONDS
    for name, make in ways.items():
        try:
            if time.monotonic() < until:
                rows.append(_row(name, "other", make().combine(members, public), test))
        except (ConsilienceError, TypeError):
            continue  # it does not apply to these members
    return rows


def _label(study: Study) -> str:
    settings = study.aggregator_settings
    by = settings.get(
        "weights", {"Average": "precision", "WeightedVote": "size-epsilon"}.get(study.aggregator)
    )
    return f"{study.aggregator} ({by})" if by else study.aggregator


def _public_only(study: Study, public: Public) -> Any:
    """Return the study's learner trained on the public records alone, without noise: nobody has to join for that."""
    try:
        learner = study.build(study.epsilon_range[0]).set_params(epsilon=math.inf, delta=0.0)
        return learner.fit(public.X, public.y)
    except (ConsilienceError, ValueError):
        return None


def _row(method: str, kind: str, model: Any, test: Public) -> dict[str, Any]:
    found = evaluate(model, test.X, test.y if test.y is not None else [])
    row: dict[str, Any] = {
        "method": method,
        "kind": kind,
        "n_records": found.n_records,
        "level": found.level,
    }
    for name in ("error", "auc", "rmse", "r2"):
        if name in found.measures and all(map(math.isfinite, asdict(found[name]).values())):
            row[name] = asdict(found[name])
    return row
