"""Flower apps that carry contributions and releases over an existing Flower 1.41 federation.

``client_app`` is a relay: it sends what the site submitted to its outbox, and puts a release there
after checking it. ``server_app`` asks every connected SuperNode, keeps each answer durably before
it asks for the next, combines, and sends the release to all. Both only move files between `Outbox`
and `Collection`: a run that stops, at either end or in between, can be repeated and continues from
the files. Only Flower's public names are imported. The guide is docs/flower.md.
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
from consilience.protocol import DIGEST

# How long a question waits for its answer: 100 MB over a slow line, or a SuperNode's restart.
PATIENCE_SECONDS = 180.0
# How long before a SuperNode that failed, or had nothing, is asked again: at first, and at most.
AGAIN_SECONDS = (10.0, 120.0)
POLL_SECONDS = 0.5

client_app = ClientApp()
server_app = ServerApp()
logger = logging.getLogger("flwr.consilience")  # Flower shows what this logger says in `flwr log`


Facts = Mapping[str, Any]
Files = Mapping[str, bytes]


def _message(facts: Facts, files: Files) -> RecordDict:
    # Flower sends arrays of any size in chunks, but the bytes in a ConfigRecord in one piece.
    arrays = {
        name: Array("uint8", (len(content),), "bytes", content) for name, content in files.items()
    }
    return RecordDict({"facts": ConfigRecord(dict(facts)), "files": ArrayRecord(arrays)})


def _parts(content: RecordDict) -> tuple[Facts, Files]:
    files = content.array_records["files"]
    return content.config_records["facts"], {name: array.data for name, array in files.items()}


# ------------------------------------------------------------------ at a site


def _reply(message: Message, answer: Callable[[Facts, Files], RecordDict]) -> Message:
    """Answer a question, or send an error code: the reason goes to the site's own log only."""
    try:
        content = answer(*_parts(message.content))
    except ConsilienceError as problem:
        logger.warning("%s", problem)
        code = "rejected" if isinstance(problem, ContributionRejected) else "not-found"
        content = _message({"problem": code}, {})
    except Exception:
        logger.exception("The relay failed. Nothing was lost.")
        content = _message({"problem": "unavailable"}, {})
    return Message(content, reply_to=message)


def _node_setting(context: Context, name: str) -> str:
    value = context.node_config.get(name)
    if not isinstance(value, str):
        raise SettingsError(
            f"The SuperNode was started without {name}. Nothing was sent. Start it with "
            "--node-config 'outbox=\"FOLDER\" coordinator=\"KEY\"'."
        )  # fmt: skip
    return value


@client_app.query("collect")
def collect(message: Message, context: Context) -> Message:
    """Send what the coordinator does not hold: contributions, and papers of a keyholder.

    What came with the question are papers of a blind study.
    """

    def answer(question: Facts, papers: Files) -> RecordDict:
        outbox = Outbox.find(_node_setting(context, "outbox"), question["study"])
        for name, content in papers.items():
            try:
                outbox.keep_paper(name, content, key=_node_setting(context, "coordinator"))
            except ConsilienceError as problem:
                logger.warning("%s", problem)
        offer = outbox.offer(question["held"])
        facts = {
            "present": list(offer.present),
            "release": offer.release or "",
            "papers": outbox.paper_names(),
        }
        return _message(facts, {**offer.files, **outbox.papers(question.get("papers", ()))})

    return _reply(message, answer)


@client_app.query("deliver")
def deliver(message: Message, context: Context) -> Message:
    """Check a release and put it into the outbox."""

    def answer(question: Facts, files: Files) -> RecordDict:
        outbox = Outbox.find(_node_setting(context, "outbox"), question["study"])
        release = outbox.keep(files["release"], key=_node_setting(context, "coordinator"))
        return _message({"release": release.digest}, {})

    return _reply(message, answer)


# ------------------------------------------------------------------ at the coordinator


@dataclass
class Exchange:
    """Questions to SuperNodes and their answers, within one run; everything is kept by node.

    ``waiting`` has the open question and when to give up, ``later`` the time before which a node is
    not asked again, and ``pauses`` how long to leave it alone next time. ``refused`` has the
    digests that were not accepted in this run. ``heard`` has the nodes that have sent everything,
    and whether they had anything. ``holding`` has the digest of the release at a node, and
    ``carried`` the names of the papers of a blind study there. Nodes in ``outside`` have no outbox
    for this study.
    """

    grid: Grid
    collection: Collection
    waiting: dict[int, tuple[str, float]] = field(default_factory=dict)
    later: dict[int, float] = field(default_factory=dict)
    pauses: dict[int, float] = field(default_factory=dict)
    refused: dict[int, set[str]] = field(default_factory=dict)
    heard: dict[int, bool] = field(default_factory=dict)
    holding: dict[int, str] = field(default_factory=dict)
    carried: dict[int, list[str]] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)
    is_settled: bool = False

    def collect(self, seconds: float) -> None:
        """Ask until all sites have contributed and all SuperNodes have answered, or time is up."""
        study = self.collection.study.digest
        self.is_settled = self.collection.is_settled

        def question(node: int) -> RecordDict | None:
            if self.heard.get(node) or (node in self.outside.union(self.heard) and self.is_settled):
                return None
            held = self.collection.held(str(node)) | self.refused.get(node, set())
            facts = {"study": study, "held": sorted(held), "papers": self.collection.paper_names()}
            return _message(facts, self.collection.papers(str(node), self.carried.get(node, ())))

        def done(nodes: set[int]) -> bool:
            return self.is_settled and nodes | self._senders() <= self.outside.union(self.heard)

        self._run("query.collect", question, self._keep_files, done, seconds)

    def deliver(self, path: Path, seconds: float) -> None:
        """Send a release until all SuperNodes of the study have it, or time is up."""
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
        self._run("query.deliver", question, self._note_release, done, seconds)
        have = sum(held == digest for held in self.holding.values())
        absent = sum(map(missing, senders))
        logger.info("%s is at %d SuperNodes.", path.name, have)
        if absent:
            logger.warning(
                "%d SuperNodes that contributed do not have it yet. Run again to deliver it.",
                absent,
            )

    def _senders(self) -> set[int]:
        """Return the SuperNodes that delivered a member; others may have been added by hand."""
        return {int(sender) for sender in self.collection.arrived.values() if sender.isdecimal()}

    def _run(
        self,
        kind: str,
        question: Callable[[int], RecordDict | None],
        handle: Callable[[int, Facts, Files], None],
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

    def _hear(self, node: int, handle: Callable[[int, Facts, Files], None]) -> None:
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
                "SuperNode %d sent an answer that cannot be read (%s).",
                node,
                type(malformed).__name__,
            )

    def _keep_files(self, node: int, facts: Facts, files: Files) -> None:
        present = {str(digest) for digest in facts["present"]}
        self.carried[node] = [str(name) for name in facts.get("papers", ())]
        self._keep_papers(node, files)
        for digest, content in files.items():
            if not DIGEST.fullmatch(digest):
                continue
            try:
                kept = self.collection.keep(str(node), content)
                logger.info("Contribution %d of %s is kept.", kept.sequence, kept.site)
            except ConsilienceError as problem:
                logger.warning("SuperNode %d: %s", node, problem)
            if digest not in self.collection.held(str(node)):
                # It was refused, or another SuperNode delivered it.
                self.refused.setdefault(node, set()).add(digest)
        for _ in self.collection.settle(str(node), present):
            logger.info("SuperNode %d: the site has withdrawn a contribution.", node)
        self.holding[node] = str(facts["release"])
        self.is_settled = self.collection.is_settled
        if present <= self.collection.held(str(node)) | self.refused.get(node, set()):
            # A keyholder has more to say as long as files arrive.
            self.heard[node] = bool(present) and not self.collection.is_keyholder(str(node))
        else:
            self.later.pop(node, None)  # it has more

    def _keep_papers(self, node: int, files: Files) -> None:
        """Keep papers of a blind study; what is new is sent on without waiting."""
        for name, content in files.items():
            if DIGEST.fullmatch(name):
                continue
            try:
                if self.collection.keep_paper(str(node), name, content):
                    logger.info("SuperNode %d sent %s.", node, name[:40])
                    self.later.clear()
                    self.pauses.clear()
            except ConsilienceError as problem:
                logger.warning("SuperNode %d: %s", node, problem)

    def _note_release(self, node: int, facts: Facts, _: Files) -> None:
        self.holding[node] = str(facts["release"])


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Collect, combine and deliver; after an interruption, run it again."""
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
        logger.info(
            "%d of %d sites have contributed.", len(collection.arrived), len(collection.sites)
        )
        path = collection.combine(str(settings.get("request", "first")))
        exchange.deliver(path, 60.0 * float(settings.get("deliver-minutes", 10)))
