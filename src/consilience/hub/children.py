"""Work in other processes within a time limit: what takes too long is ended, and nothing else is.

Whatever such a process does can be cut off at any moment, as if the machine had stopped. The hub's
database and its ledger are made for that: what was charged stays charged, and what was drawn is
kept under its key.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from consilience.hub.hub import Settings
from consilience.hub.outages import OUTAGES, Ended, Outage, describe_outage
from consilience.hub.store import Row
from consilience.protocol import Refusal

Work = Callable[..., Row]
START_SECONDS = 120.0  # to load the program and open the database, on a busy machine
MOST_ASKED = 2  # processes that work for people at the same time, beside two for the hub itself
LEAST_BYTES = 512 << 20  # of memory for a process that combines
_STOPPING = "The hub is being stopped."

logger = logging.getLogger("consilience.hub")


class TookTooLong(Exception):
    """A process was ended because it reached the time limit."""


class Children:
    """Processes that do the work that `begin` returns; one that is done is kept for the next.

    Each opens the hub for itself, and takes a few hundred megabytes and a second of a processor. So
    none is started before there is work: a hub that was just started has requests to answer.
    """

    def __init__(self, begin: Callable[[Settings], Work], settings: Settings) -> None:
        self._begin, self._settings = begin, settings
        self._lock, self._is_stopped = threading.Lock(), False
        self._busy = dict[_Child, bool]()  # and whether someone waits for it
        self._ready = list[_Child]()

    def work(self, *arguments: object, is_asked: bool = False) -> Row:
        """Return what the work returns, or raise its refusal, `MemoryError` or an `Outage`.

        Raise `TookTooLong` if it was ended, and `Ended` if something else ended it. `is_asked` says
        that someone waits for it; only a few can at the same time.
        """
        with self._borrowed(is_asked) as child:
            try:
                return child.work(arguments, self._settings.combine_seconds)
            except Outage:
                if self._is_stopped:
                    raise Refusal("unavailable", _STOPPING) from None
                raise

    @contextmanager
    def _borrowed(self, is_asked: bool) -> Iterator[_Child]:
        with self._lock:
            if self._is_stopped:
                raise Refusal("unavailable", _STOPPING)
            if is_asked and sum(self._busy.values()) >= MOST_ASKED:
                raise Refusal("unavailable", "The hub is combining as much as it can at once.")
            if self._ready and not self._ready[-1].is_alive:  # something ended it while it waited
                self._ready.pop().end()
            child = self._ready.pop() if self._ready else _Child(self._begin, self._settings)
            self._busy[child] = is_asked
        try:
            yield child
        finally:
            with self._lock:
                del self._busy[child]
                if child.is_idle and not self._ready:
                    self._ready.append(child)
                else:
                    child.end()

    def stop(self) -> None:
        """End all processes, whatever they do."""
        with self._lock:
            self._is_stopped = True
            for child in self._busy:
                child.kill()  # whoever waits for it notices, and ends it
            for child in self._ready:
                child.end()
            self._ready = []


class _Child:
    """One process, from its start to its end."""

    def __init__(self, begin: Callable[[Settings], Work], settings: Settings) -> None:
        # Not forked: a copy of this process would wait for locks that its other threads hold.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(begin, settings, theirs), name="combining", daemon=True
        )
        self._process.start()
        theirs.close()
        self._has_begun, self.is_idle = False, True

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.is_alive()

    def work(self, arguments: tuple[object, ...], seconds: float) -> Row:
        """Return what the process returns, or raise what it raises."""
        self.is_idle = False
        try:  # until it has the work, nothing that happens is the work's doing
            if not self._has_begun:
                self._receive(START_SECONDS)
                self._has_begun = True
            with _noticing_the_end():
                self._pipe.send_bytes(json.dumps(arguments).encode())
            self._receive(START_SECONDS)  # that it has the work
        except (Ended, TookTooLong):
            raise Outage("The process that combines studies did not start.") from None
        kind, *facts = self._receive(seconds)
        self.is_idle = True
        if kind == "done":
            row: Row = facts[0]
            return row
        if kind == "refused":
            raise Refusal(*facts)
        if kind == "outage":
            logger.error("combining was interrupted: %s", facts[1])
            raise Outage(facts[0])
        raise (MemoryError if kind == "memory" else RuntimeError)(*facts)

    def _receive(self, seconds: float) -> list[Any]:
        with _noticing_the_end():
            if not self._pipe.poll(seconds):
                raise TookTooLong
            answer: list[Any] = json.loads(self._pipe.recv_bytes())  # not a pickle, which is code
        return answer

    def kill(self) -> None:
        """Make the process end at once."""
        self._process.kill()

    def end(self) -> None:
        """End the process and forget it."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


@contextmanager
def _noticing_the_end() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise Ended("The process that combined this study ended before it was done.") from None


def find_memory(settings: Settings) -> int:
    """Return how many bytes a process may have: those of the settings, or a fifth of what there is.

    There are up to five, the hub and four that combine. One that does nothing takes half of the
    least.
    """
    if settings.combine_bytes is not None:
        return settings.combine_bytes
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
        for place in (Path(group), *Path(group).parents):
            with suppress(OSError, ValueError):  # no such file, or "max"
                whole = min(whole, int(Path("/sys/fs/cgroup", place, "memory.max").read_text()))
    return max(LEAST_BYTES, whole // 5)


# ----------------------------------------------------------------------------- in the other process


def _serve(begin: Callable[[Settings], Work], settings: Settings, pipe: Connection) -> None:
    """Work for the process that started this one, as long as it lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the hub, which then ends this
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):  # where memory runs out, the system ends this process, not the hub
        Path("/proc/self/oom_score_adj").write_text("1000")
    _limit_memory(find_memory(settings))
    work = begin(settings)
    answer: tuple[object, ...] = ()
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(json.dumps(answer).encode())
            arguments = json.loads(pipe.recv_bytes())
            pipe.send_bytes(b"[]")
            answer = _answer(work, arguments)


def _answer(work: Work, arguments: list[Any]) -> tuple[object, ...]:
    """Return a word for what came of the work, and what belongs to it."""
    try:
        return "done", work(*arguments)
    except Refusal as refusal:
        return "refused", refusal.code, refusal.message
    except MemoryError:
        return "memory", traceback.format_exc()  # for the log of the hub
    except OUTAGES as problem:
        return "outage", describe_outage(problem), traceback.format_exc()
    except Exception:
        return "failed", traceback.format_exc()


def _limit_memory(most: int) -> None:
    """Let this process have only so many bytes, so that it runs out of memory before the hub."""
    import resource  # not on every system

    with suppress(OSError, ValueError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)
