"""Run independent cells side by side on any backend, and keep what is done on disk.

A cell is work that depends on nothing but its description, so it does not matter where, when or how
often it runs. This file knows nothing else about it: `sweep` asks the `Task` for each cell, stores
answers the moment they are there if there is a `Store`, and runs cells again whose worker was lost,
up to a limit.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

import joblib
from threadpoolctl import threadpool_limits

from consilience.errors import SettingsError
from consilience.files.durable import write_durably
from consilience.progress import Progress, showing

CellT = TypeVar("CellT", bound=Hashable)
CellT_contra = TypeVar("CellT_contra", bound=Hashable, contravariant=True)

BACKENDS = ("loky", "threading", "ray", "dask")
RETRIES = 3  # of cells whose worker was lost; more would only fill the memory again
_INSTALL = {"ray": ("ray",), "dask": ("dask", "distributed")}


class Task(Protocol[CellT_contra]):
    """What is run: one plain, JSON-like answer for each cell."""

    def run(self, cell: CellT_contra, n_threads: int) -> Any:
        """Return the answer of one cell, using no more than `n_threads` threads."""

    def key(self, cell: CellT_contra) -> str:
        """Return a digest of everything that determines the answer of one cell."""


@dataclass(frozen=True)
class Store:
    """A folder of answers, one file for each finished cell, named by its key.

    A file appears whole or not at all, even if the machine fails. A damaged file counts as missing.
    """

    folder: Path

    def read(self, key: str) -> Any | None:
        """Return a stored answer, or None if it is missing or damaged."""
        try:
            head, body = self._path(key).read_text(encoding="utf-8").split("\n", 1)
        except (OSError, ValueError):
            return None
        return json.loads(body) if head == _digest(body) else None

    def write(self, key: str, answer: object) -> None:
        """Store an answer: its content is on the disk before its name exists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        body = json.dumps(answer)
        write_durably(self._path(key), f"{_digest(body)}\n{body}".encode())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sweep(
    task: Task[CellT],
    cells: Sequence[CellT],
    *,
    n_jobs: int | None = None,
    backend: str | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> dict[CellT, Any]:
    """Return the answer of every cell; it does not depend on the backend or on the order.

    `backend` None leaves the choice to ``joblib.parallel_config``; one by name uses all cores
    unless `n_jobs` is given. Ray and Dask are used if they are running, and otherwise started on
    this machine for the call. With a `store`, finished cells are read from it; all workers must see
    the same folder.
    """
    n_jobs = -1 if n_jobs is None and backend is not None else n_jobs
    answers: dict[CellT, Any] = {}
    if store is not None:
        stored = ((cell, store.read(task.key(cell))) for cell in cells)
        answers = {cell: answer for cell, answer in stored if answer is not None}
    # Cells run side by side, so BLAS keeps to one core in each.
    with threadpool_limits(1), showing("Simulating", progress) as show:
        if answers:
            show(len(answers), len(cells))
        losses = 0
        while left := [cell for cell in cells if cell not in answers]:
            try:
                for cell, answer in _run_all(task, left, n_jobs, backend, store):
                    answers[cell] = answer
                    show(len(answers), len(cells))
            except _lost_worker() as lost:
                losses += 1
                if losses > RETRIES:
                    raise _too_many_losses(len(answers), len(cells), losses, store) from lost
    return answers


def _run(task: Task[CellT], cell: CellT, n_threads: int, store: Store | None) -> tuple[CellT, Any]:
    """Run one cell and store its answer in the worker, even if nobody waits for it any more."""
    if not hasattr(task, "run"):  # Ray's reference to it
        task = import_module("ray").get(task)
    with threadpool_limits(1):  # again: this may be another process
        answer = task.run(cell, n_threads)
    if store is not None:
        store.write(task.key(cell), answer)
    return cell, answer


def _run_all(
    task: Task[CellT],
    cells: Sequence[CellT],
    n_jobs: int | None,
    backend: str | None,
    store: Store | None,
) -> Iterator[tuple[CellT, Any]]:
    with _engine(backend, n_jobs, task) as shared:
        n_side_by_side = min(joblib.effective_n_jobs(n_jobs), len(cells))
        n_threads = max(1, joblib.cpu_count() // n_side_by_side)
        jobs = (joblib.delayed(_run)(shared, cell, n_threads, store) for cell in cells)
        try:
            parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
        except ValueError:  # a backend that hands over all results at once
            parallel = joblib.Parallel(n_jobs=n_jobs)
        yield from parallel(jobs)


@contextmanager
def _engine(backend: str | None, n_jobs: int | None, task: Task[CellT]) -> Iterator[Any]:
    """Set joblib's backend, starting it if need be; yield the task as its workers take it."""
    if backend is None:
        yield task
    elif backend == "ray":
        with _ray(n_jobs) as ray, joblib.parallel_config("ray"):
            yield ray.put(task)  # one copy of the records for all cells
    elif backend == "dask":
        with _dask(n_jobs), joblib.parallel_config("dask", scatter=[task]):
            yield task
    else:
        with joblib.parallel_config(backend):
            yield task


@contextmanager
def _ray(n_jobs: int | None) -> Iterator[Any]:
    ray = import_module("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=_workers(n_jobs),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    import_module("ray.util.joblib").register_ray()
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


@contextmanager
def _dask(n_jobs: int | None) -> Iterator[None]:
    distributed = import_module("distributed")
    with ExitStack() as stack:
        try:
            distributed.get_client()
        except ValueError:  # none is running
            cluster = distributed.LocalCluster(
                n_workers=_workers(n_jobs), threads_per_worker=1, dashboard_address=None
            )
            stack.enter_context(distributed.Client(stack.enter_context(cluster)))
        yield


def _workers(n_jobs: int | None) -> int:
    cores = int(joblib.cpu_count())
    return cores if n_jobs is None else n_jobs if n_jobs > 0 else max(1, cores + 1 + n_jobs)


def check_backend(backend: str | None) -> None:
    """Refuse a backend that is unknown or not installed."""
    if backend is not None and backend not in BACKENDS:
        raise SettingsError(
            f"The 'backend' must be None or one of {BACKENDS}. Got {backend!r} instead."
        )
    if missing := [name for name in _INSTALL.get(backend or "", ()) if find_spec(name) is None]:
        raise SettingsError(
            f"The backend {backend!r} needs {' and '.join(missing)}, which is not installed. "
            "Nothing was run. Install consilience[engines], or use backend='loky'."
        )


def _lost_worker() -> tuple[type[BaseException], ...]:
    """Return the errors by which the loaded backends say that a worker is gone."""
    names = {
        "ray.exceptions": ("RayActorError", "WorkerCrashedError", "OutOfMemoryError"),
        "distributed.scheduler": ("KilledWorker",),
        "distributed.comm.core": ("CommClosedError",),  # while records were on their way to it
        # The scheduler forgot a cell, as it may on a busy machine.
        "distributed.client": ("FutureCancelledError",),
    }
    loaded = [
        (sys.modules[module], kinds) for module, kinds in names.items() if module in sys.modules
    ]
    return (BrokenExecutor, *(getattr(module, kind) for module, kinds in loaded for kind in kinds))


def _too_many_losses(n_done: int, n_cells: int, losses: int, store: Store | None) -> SettingsError:
    kept = (
        "in the checkpoint, and the same call continues from there"
        if store
        else "lost, because there is no checkpoint"
    )
    return SettingsError(
        f"Workers were lost {losses} times, most likely for lack of memory. {n_done} of {n_cells} "
        f"cells are done and {kept}. Use a smaller n_jobs or fewer sites, records or levels at a "
        "time."
    )
