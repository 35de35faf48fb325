"""Flower apps that carry contributions and releases over a federation that runs Flower 1.41 already.

``client_app`` is a relay: it hands out what the site submitted to its outbox, and puts a release
there after checking it. ``server_app`` asks every connected SuperNode, keeps each answer durably
before it asks for the next, combines, and sends the release to all. Both only move files between
`Outbox` and `Collection`, so a run that stops, at either end or in between, is repeated and goes on
from the files. Only Flower's public names are imported. Guide: docs/flower.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from consilience.adapters.relay import Collection, Outbox
from consilience.errors import ConsilienceError, ContributionRejected, SettingsError
from consilience.files.release import Release

# How long one question waits for its answer: 100 MB over a slow line, or a SuperNode's restart.
PATIENCE_SECONDS = 180.0
# Before a SuperNode that failed, or had nothing, is asked again: at first, and at most.
AGAIN_SECONDS = (10.0, 120.0)
POLL_SECONDS = 0.5

client_app = ClientApp()
server_app = ServerApp()
logger = logging.getLogger("flwr.consilience")  # Flower shows what this logger says in `flwr log`


def _message(facts: Mapping[str, Any], files: Mapping[str, bytes]) -> RecordDict:
    # Flower sends an array in chunks, whatever its size; bytes in a ConfigRecord travel as one
    # piece.
    arrays = {
        name: Array("uint8", (len(content),), "bytes", content) for name, content in files.items()
    }
    return RecordDict({"facts": ConfigRecord(dict(facts)), "files": ArrayRecord(arrays)})


def _parts(content: RecordDict) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    files = content.array_records["files"]
    return content.config_records["facts"], {name: array.data for name, array in files.items()}


# --------------------------------------------------------------------------------------------------------- at a site


def _answered(
    message: Message, answer: Callable[[Mapping[str, Any], Mapping[str, bytes]], RecordDict]
) -> Message:
    """Answer a question, or send a code and nothing else: what went wrong at a site is for its own log."""
    try:
        content = answer(*_parts(message.content))
    except ConsilienceError as problem:
        logger.warning("%s", problem)
        content = _message(
            {"problem": "rejected" if isinstance(problem, ContributionRejected) else "not-found"},
            {},
        )
    except Exception:
        logger.exception("The relay failed. Nothing was lost.")
        content = _message({"problem": "unavailable"}, {})
    return Message(content, reply_to=message)


def _configured(context: Context, name: str) -> str:
    value = context.node_config.get(name)
    if not isinstance(value, str):
        raise SettingsError(
            f"The SuperNode was started without {name}. Nothing was sent. Start it with "
            "--node-config 'outbox=\"FOLDER\" coordinator=\"KEY\"'."
        )  # fmt: skip
    return value


@client_app.query("collect")
def collect(message: Message, context: Context) -> Message:
    """Hand out the submitted contributions that the coordinator does not hold."""

    def answer(question: Mapping[str, Any], _: Mapping[str, bytes]) -> RecordDict:
        offer = Outbox.find(_configured(context, "outbox"), question["study"]).offer(
            question["held"]
        )
        return _message(
            {"present": list(offer.present), "release": offer.release or ""}, offer.files
        )

    return _answered(message, answer)


@client_app.query("deliver")
def deliver(message: Message, context: Context) -> Message:
    """Check a release and put it into the outbox."""

    def answer(question: Mapping[str, Any], files: Mapping[str, bytes]) -> RecordDict:
        outbox = Outbox.find(_configured(context, "outbox"), question["study"])
        release = outbox.keep(files["release"], key=_configured(context, "coordinator"))
        return _message({"release": release.digest}, {})

    return _answered(message, answer)


# ------------------------------------------------------------------------------------------------- at the coordinator


@dataclass
class Exchange:
    """Questions to SuperNodes and what came of them, within one run."""

    grid: Grid
    collection: Collection
    waiting: dict[int, tuple[str, float]] = field(
        default_factory=dict
    )  # by node: the question, until when
    later: dict[int, float] = field(default_factory=dict)  # by node: not to be asked before
    pauses: dict[int, float] = field(
        default_factory=dict
    )  # by node: how long it is left alone next time
    refused: dict[int, set[str]] = field(
        default_factory=dict
    )  # by node: digests that were not taken in this run
    heard: dict[int, bool] = field(
        default_factory=dict
    )  # by node that has sent all it has: whether it had anything
    holding: dict[int, str] = field(default_factory=dict)  # by node: digest of the release it has
    outside: set[int] = field(default_factory=set)  # have no outbox for this study

    def collect(self, seconds: float) -> None:
        """Ask until every site is in and every SuperNode was heard, or time is up."""
        study = self.collection.study.digest

        def question(node: int) -> RecordDict | None:
            if self.heard.get(node) or (
                node in self.outside.union(self.heard) and self._complete()
            ):
                return None
            held = self.collection.held(str(node)) | self.refused.get(node, set())
            return _message({"study": study, "held": sorted(held)}, {})

        def done(nodes: set[int]) -> bool:
            return self._complete() and nodes | self._senders() <= self.outside.union(self.heard)

        self._run("query.collect", question, self._collected, done, seconds)

    def deliver(self, path: Path, seconds: float) -> None:
        """Send a release until every SuperNode of the study has it, or time is up."""
        content, digest = path.read_bytes(), Release.load(path).digest
        facts = {"study": self.collection.study.digest, "release": digest}
        senders = self._senders()

        def missing(node: int) -> bool:
            return node not in self.outside and self.holding.get(node) != digest

        def question(node: int) -> RecordDict | None:
            return _message(facts, {"release": content}) if missing(node) else None

        def done(nodes: set[int]) -> bool:
            return not any(missing(node) for node in nodes | senders)

        self.later.clear()
        self.pauses.clear()
        self._run("query.deliver", question, self._delivered, done, seconds)
        have = sum(held == digest for held in self.holding.values())
        absent = sum(map(missing, senders))
        logger.info("%s is at %d SuperNodes.", path.name, have)
        if absent:
            logger.warning(
                "%d SuperNodes that contributed do not have it yet: run again to deliver it.",
                absent,
            )

    def _senders(self) -> set[int]:
        """Return the SuperNodes that brought a member; a coordinator may have been given another by hand."""
        return {int(sender) for sender in self.collection.arrived.values() if sender.isdecimal()}

    def _complete(self) -> bool:
        return set(self.collection.arrived) == set(self.collection.sites)

    def _run(
        self,
        kind: str,
        question: Callable[[int], RecordDict | None],
        handle: Callable[[int, Mapping[str, Any], Mapping[str, bytes]], None],
        done: Callable[[set[int]], bool],
        seconds: float,
    ) -> None:
        until = time.monotonic() + seconds
        while not done(nodes := set(self.grid.get_node_ids())) and time.monotonic() < until:
            for node in sorted(nodes - set(self.waiting)):
                if (
                    time.monotonic() >= self.later.get(node, 0.0)
                    and (content := question(node)) is not None
                ):
                    self._ask(node, kind, content)
            for node in list(self.waiting):
                self._hear(node, handle)
            time.sleep(POLL_SECONDS)
        self.waiting.clear()

    def _ask(self, node: int, kind: str, content: RecordDict) -> None:
        message = Message(content, node, kind, ttl=PATIENCE_SECONDS)
        identity = next(iter(self.grid.push_messages([message])), None)
        if identity:
            self.waiting[node] = (identity, time.monotonic() + PATIENCE_SECONDS)
        pause = self.pauses.get(node, AGAIN_SECONDS[0])
        self.later[node] = time.monotonic() + pause
        self.pauses[node] = min(2 * pause, AGAIN_SECONDS[1])

    def _hear(
        self, node: int, handle: Callable[[int, Mapping[str, Any], Mapping[str, bytes]], None]
    ) -> None:
        identity, until = self.waiting[node]
        reply = next(iter(self.grid.pull_messages([identity])), None)
        if reply is None and time.monotonic() < until:
            return
        del self.waiting[node]
        if reply is None or reply.has_error():
            logger.warning("SuperNode %d did not answer; it will be asked again.", node)
            return
        try:
            facts, files = _parts(reply.content)
            problem = facts.get("problem")
            if problem is not None:
                logger.warning("SuperNode %d says: %s.", node, str(problem)[:40])
                self.outside |= {node} if problem == "not-found" else set()
                return
            self.outside.discard(node)
            handle(node, facts, files)
        except (KeyError, TypeError, ValueError, AttributeError) as malformed:
            logger.warning(
                "SuperNode %d sent no answer to what was asked (%s).",
                node,
                type(malformed).__name__,
            )

    def _collected(self, node: int, facts: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        present = {str(digest) for digest in facts["present"]}
        for digest, content in files.items():
            try:
                found = self.collection.keep(str(node), content)
                logger.info("Contribution %d of %s is kept.", found.sequence, found.site)
            except ConsilienceError as problem:
                logger.warning("SuperNode %d: %s", node, problem)
            if digest not in self.collection.held(
                str(node)
            ):  # refused, or another SuperNode brought it
                self.refused.setdefault(node, set()).add(digest)
        for _ in self.collection.settle(str(node), present):
            logger.info("SuperNode %d: a contribution was withdrawn by its site.", node)
        self.holding[node] = str(facts["release"])
        if present <= self.collection.held(str(node)) | self.refused.get(node, set()):
            self.heard[node] = bool(present)
        else:
            self.later.pop(node, None)  # it has more

    def _delivered(self, node: int, facts: Mapping[str, Any], _: Mapping[str, bytes]) -> None:
        self.holding[node] = str(facts["release"])


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Collect, combine, deliver; run again after whatever stopped it."""
    settings = context.run_config
    collection = Collection(str(settings["folder"]))
    with collection.alone():
        exchange = Exchange(grid, collection)
        logger.info(
            "Study %s; releases are signed with key %s.",
            collection.study.name,
            collection.key.public,
        )
        exchange.collect(60.0 * float(settings.get("collect-minutes", 10)))
        logger.info("%d of %d sites are in.", len(collection.arrived), len(collection.sites))
        path = collection.combine(str(settings.get("request", "first")))
        exchange.deliver(path, 60.0 * float(settings.get("deliver-minutes", 10)))
