"""Cells that are killed, stored, truncated and run elsewhere; real processes, really killed."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from consilience.errors import SettingsError
from consilience.simulation.sweep import BACKENDS, Store, check_backend, sweep

DRIVER = """
import json, os, signal, sys, time
import numpy as np
from consilience import Average, PrivateLogisticRegression, simulate

settings = json.loads(sys.argv[1]) | {"parent": os.getpid()}


def prepare(seen):
    if os.getpid() != settings["parent"] or settings["backend"] in (None, "threading"):
        with open(settings["log"], "a") as log:
            log.write("x")
    deadly = settings.get("deadly")
    if deadly and os.getpid() != settings["parent"] and not os.path.exists(deadly):
        if not settings.get("always"):
            open(deadly, "w").close()
        if settings.get("forgotten"):
            from distributed.client import FutureCancelledError

            raise FutureCancelledError("a cell", "already forgotten")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(settings.get("seconds", 0.0))
    return np.asarray


class OnArrival:
    # The same, but a worker dies as it receives it, before there is a cell to be lost.
    def __init__(self):
        self.state = "something to be set"

    def __call__(self, seen):
        return np.asarray

    def __setstate__(self, state):
        prepare(None)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.5, 0.5, (300, 3))
    y = (X[:, 0] > 0).astype(int)
    names = ("backend", "checkpoint", "n_jobs")
    how = {name: settings[name] for name in names if settings.get(name)}
    learner = PrivateLogisticRegression(epsilon=1.0)
    how["prepare"] = OnArrival() if settings.get("arriving") else prepare
    report = simulate(learner, Average(), X, y, sites=3, public=30, repeats=5, seed=1, **how)
    print(json.dumps([[row.repeat, row.method, row.metric, row.value] for row in report.rows]))
"""


class Driver:
    def __init__(self, folder):
        self.folder, self.script = folder, folder / "driver.py"
        self.script.write_text(DRIVER)

    def start(self, **settings):
        asked = {"backend": None, "log": str(self.folder / "log")} | settings
        command = [sys.executable, str(self.script), json.dumps(asked)]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=quiet
        )

    def run(self, **settings):
        process = self.start(**settings)
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        return json.loads(out.splitlines()[-1])

    def n_run(self):
        """Return how many divisions were prepared since the last call.

        The first one is prepared before anything runs, and then one for each other cell.
        """
        log = self.folder / "log"
        found = len(log.read_text())
        log.unlink()
        return found


@pytest.fixture
def driver(tmp_path):
    return Driver(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a sweep of five cells finds, run one by one."""
    driver = Driver(tmp_path_factory.mktemp("whole"))
    found = driver.run()
    assert driver.n_run() == 5
    return found


class Squares:
    """Cells are numbers, answers their squares."""

    def __init__(self):
        self.done = []

    def run(self, cell, n_threads):
        assert n_threads >= 1
        self.done.append(cell)
        return {"square": cell**2, "inf": float("inf"), "tenth": cell / 10}

    def key(self, cell):
        return f"square-of-{cell}"


def test_stored_cells_are_read_and_the_others_run(tmp_path):
    task, store, steps = Squares(), Store(tmp_path / "a" / "b"), []
    first = sweep(task, [1, 2, 3], store=store)
    again = sweep(task, [3, 4, 1], store=store, progress=lambda *step: steps.append(step))
    assert task.done == [1, 2, 3, 4]
    assert steps == [(2, 3), (3, 3)]
    assert again == {3: first[3], 4: {"square": 16, "inf": float("inf"), "tenth": 0.4}, 1: first[1]}
    assert sorted(path.name for path in store.folder.iterdir()) == [
        f"square-of-{i}.json" for i in (1, 2, 3, 4)
    ]


def test_a_file_that_is_not_whole_is_as_good_as_none(tmp_path):
    store = Store(tmp_path)
    store.write("a", {"numbers": [0.1, 0.2]})
    path = tmp_path / "a.json"
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        whole[:70],
        whole[:10],
        whole.replace(b"0.2", b"0.3"),
        b"\xff" + whole,
    ):
        path.write_bytes(damaged)
        assert store.read("a") is None
    path.write_bytes(whole)
    assert store.read("a") == {"numbers": [0.1, 0.2]}
    assert store.read("b") is None


def test_an_error_in_a_cell_is_the_callers_and_not_tried_again():
    class Failing(Squares):
        def run(self, cell, n_threads):
            super().run(cell, n_threads)
            raise SettingsError("no such thing")

    for backend in (None, "threading"):
        task = Failing()
        with pytest.raises(SettingsError, match="no such thing"):
            sweep(task, [1], backend=backend)
        assert task.done == [1]


@pytest.mark.parametrize(
    "lost",
    [
        "concurrent.futures.BrokenExecutor",
        "distributed.scheduler.KilledWorker",
        "distributed.comm.core.CommClosedError",  # as it receives the records
        "distributed.client.FutureCancelledError",  # the scheduler forgot the cell
    ],
)
def test_a_cell_whose_worker_is_lost_is_run_again_but_not_for_ever(lost, tmp_path):
    module, _, name = lost.rpartition(".")
    kind = getattr(pytest.importorskip(module), name)

    class Deadly(Squares):
        lives = 1

        def run(self, cell, n_threads):
            answer = super().run(cell, n_threads)
            if cell == 2 and len([one for one in self.done if one == 2]) <= self.lives:
                raise kind.__new__(kind)
            return answer

    task = Deadly()
    assert sweep(task, [1, 2, 3])[2]["square"] == 4
    assert task.done.count(2) == 2
    Deadly.lives = 99
    with pytest.raises(SettingsError, match=r"lost 4 times.* 1 of 3 cells are done and lost, beca"):
        sweep(Deadly(), [1, 2, 3])
    with pytest.raises(SettingsError, match="1 of 3 cells are done and in the checkpoint"):
        sweep(Deadly(), [1, 2, 3], store=Store(tmp_path))


def test_unknown_and_missing_backends_are_refused(monkeypatch):
    with pytest.raises(SettingsError, match="'backend' must be None or one of"):
        check_backend("mpi")
    monkeypatch.setattr("consilience.simulation.sweep.find_spec", lambda name: None)
    for backend in ("ray", "dask"):
        with pytest.raises(SettingsError, match=r"not installed.*consilience\[engines\]"):
            check_backend(backend)
    check_backend(None)
    check_backend("loky")


def test_a_killed_sweep_goes_on_where_it_stopped_and_ends_the_same(driver, whole):
    folder = driver.folder / "kept"
    for backend, n_jobs in ((None, None), ("loky", 2)):
        process = driver.start(checkpoint=str(folder), seconds=0.5, backend=backend, n_jobs=n_jobs)
        deadline = time.monotonic() + 120
        before = len(list(folder.glob("*.json")))
        while len(list(folder.glob("*.json"))) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        driver.n_run()
    kept = len(list(folder.glob("*.json")))
    assert 4 <= kept <= 5
    assert driver.run(checkpoint=str(folder)) == whole
    assert driver.n_run() == 1 + 5 - kept
    assert driver.run(checkpoint=str(folder)) == whole
    assert driver.n_run() == 1


def test_cells_of_a_killed_worker_are_run_again(driver, whole):
    deadly = str(driver.folder / "deadly")
    assert driver.run(backend="loky", n_jobs=2, deadly=deadly) == whole
    assert os.path.exists(deadly)


@pytest.mark.soak  # with real processes; the errors they lead to are raised above
@pytest.mark.parametrize("how", ["arriving", "forgotten"])
def test_a_worker_that_dies_as_it_receives_the_records_or_a_cell_that_dask_forgot_is_replaced(
    driver, whole, how
):
    if find_spec("distributed") is None:
        pytest.skip("dask is not installed: pip install consilience[engines]")
    deadly = driver.folder / "deadly"
    assert driver.run(backend="dask", n_jobs=2, deadly=str(deadly), **{how: True}) == whole
    assert deadly.exists()


@pytest.mark.soak
def test_workers_that_die_every_time_end_in_advice(driver):
    process = driver.start(
        backend="loky", n_jobs=2, deadly=str(driver.folder / "never"), always=True
    )
    _, error = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "Workers were lost 4 times" in error
    advice = "0 of 5 cells are done and lost, because there is no checkpoint. Use a smaller n_jobs"
    assert advice in error


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one != "loky"])  # it is above
def test_no_backend_changes_a_number(driver, whole, backend):
    if (
        backend in ("ray", "dask")
        and find_spec({"dask": "distributed"}.get(backend, backend)) is None
    ):
        pytest.skip(f"{backend} is not installed: pip install consilience[engines]")
    if backend == "threading":
        assert driver.run(backend=backend, n_jobs=2) == whole
    else:  # these also lose a worker on the way
        deadly = driver.folder / "deadly"
        assert (
            driver.run(
                backend=backend,
                n_jobs=2,
                deadly=str(deadly),
                checkpoint=str(driver.folder / "kept"),
            )
            == whole
        )
        assert deadly.exists()
        assert len(list((driver.folder / "kept").glob("*.json"))) == 5
