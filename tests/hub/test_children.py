"""Combining in processes of their own: no study holds up the others, whatever it needs."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from consilience.hub.api.app import create_app
from consilience.hub.children import LEAST_BYTES, Children, TookTooLong, find_memory
from consilience.hub.combining import MOST_TRIES
from consilience.hub.hub import Settings
from consilience.hub.outages import Ended, Outage
from consilience.privacy.guarantee import Budget
from consilience.protocol import Refusal

SECONDS = 4.0  # the limit of these hubs: many times what an honest study of a few records needs
SLOW = 'name = "SiteBoosting"\nn_rounds = 10000\nshrinkage = 1e-6'


def wait_for(is_done: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (answer := is_done()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return answer


@pytest.fixture
def live(tmp_path: Path, url: str | None, tools: Any) -> Iterator[Any]:
    """A hub that combines by itself, as one that serves."""
    more = {"combine_itself": True, "quiet_seconds": 0.05, "combine_seconds": SECONDS}
    with tools.Client(create_app(tools.quick(tmp_path / "hub", url, **more))) as client:
        yield tools.World(client, tmp_path)


def fill_slow_study(world: Any, tools: Any, n_records: int = 50_000) -> None:
    """Add a study that is legal and takes minutes to combine."""
    sha256 = tools.write_csv(world.folder / "public.csv", tools.table(n_records, 5))
    study = world.add_study(tools.study_text("slow", aggregator=SLOW, public=sha256))
    content = (world.folder / "public.csv").read_bytes()
    place = "/api/studies/slow/files/public.csv"
    assert world.client.put(place, content=content, headers=world.coordinator).status_code == 200
    world.fill(study, 2)


def test_one_study_does_not_stop_the_others(live: Any, tools: Any) -> None:
    fill_slow_study(live, tools)
    wait_for(lambda: live.combiner._children._busy)
    live.fill(live.add_study(), 2)
    assert (
        "as soon as its turn comes"
        in live.client.get("/api/studies/demo/release", headers=live.coordinator).text
    )
    wait_for(lambda: live.hub.store.release("demo"))
    wait_for(lambda: not live.hub.store.due())
    problem = live.hub.store.study("slow")["problem"]
    assert problem == "Combining it was stopped: it took longer than 4 seconds."
    assert live.hub.store.release("slow") is None
    # Whoever asks for it waits as long and is told the same; nothing is added to the log.
    length = len(live.hub.store.audit(limit=1000))
    asked = live.client.post(
        "/api/studies/slow/releases", json={"key": "k"}, headers=live.coordinator
    )
    assert tools.code(asked) == "cannot-combine"
    assert len(live.hub.store.audit(limit=1000)) == length


def test_a_study_that_takes_long_goes_on_beside_the_others(
    tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consilience.hub.combining.STOP_SECONDS", 0.1)
    more = {"combine_itself": True, "quiet_seconds": 0.05, "longest_wait_seconds": 1.0}
    with tools.Client(create_app(tools.quick(tmp_path / "hub", **more))) as client:
        world = tools.World(client, tmp_path)
        fill_slow_study(world, tools)
        wait_for(lambda: world.combiner._children._busy)
        world.fill(world.add_study(), 2)
        wait_for(lambda: world.hub.store.release("demo"))
        # Nothing was ended: its limit is ten minutes.
        assert [row["name"] for row in world.hub.store.due()] == ["slow"]
        assert world.hub.store.study("slow")["problem"] is None
        assert world.combiner._find_beside() == "slow"


def test_a_hub_stops_in_the_middle_of_a_study(tmp_path: Path, tools: Any) -> None:
    settings = tools.quick(tmp_path / "hub", combine_itself=True, quiet_seconds=0.05)
    with tools.Client(create_app(settings)) as client:
        world = tools.World(client, tmp_path)
        fill_slow_study(world, tools)
        (child,) = wait_for(lambda: world.combiner._children._busy)
        wait_for(lambda: child._has_begun)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    again = tools.Client(create_app(tools.quick(tmp_path / "hub")))
    with again:
        store = again.app.state.hub.store
        assert [row["name"] for row in store.due()] == ["slow"]
        assert store.claim("slow", "next", 60) is not None  # nobody has to wait for a claim


def test_memory_that_is_not_there_is_the_studys_problem_in_the_end(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(world.add_study(), 2)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("consilience.hub.combining.collect", fail)
        for _ in range(MOST_TRIES):
            assert [row["name"] for row in world.hub.store.due()] == ["demo"]
            assert world.hub.store.study("demo")["problem"] is None
            world.combiner.run(at_once=True)
    assert world.hub.store.due() == []
    problem = world.hub.store.study("demo")["problem"]
    assert problem.startswith("Combining it takes more memory than the ")
    with monkeypatch.context() as patch:
        patch.setattr("consilience.hub.combining.collect", fail)
        with pytest.raises(Refusal) as refused:  # whoever asks is told what is known already
            world.combiner.combine("demo", request="k")
    assert refused.value.message == problem


def test_a_process_that_was_killed_after_the_charge_is_charged_once(live: Any, tools: Any) -> None:
    """The same key returns what was drawn, or is refused if nobody knows what was drawn."""
    noisy = 'name = "Average"\nepsilon = 1.0\nweights = "equal"'
    live.fill(live.add_study(tools.study_text(hub="trusted", aggregator=noisy)), 2)
    live.hub.allow("demo", Budget(epsilon=3.0), "operator")
    answers: list[Any] = []

    def ask() -> None:
        place = "/api/studies/demo/releases"
        answers.append(live.client.post(place, json={"key": "one"}, headers=live.coordinator))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: live.hub.balance("demo").spent.epsilon > 0)
    for child in list(live.combiner._children._busy):
        os.kill(child._process.pid, signal.SIGKILL)
    thread.join()
    ask()
    assert live.hub.balance("demo").spent.epsilon == pytest.approx(1.0)
    if answers[-1].status_code == 201:
        assert [row["sequence"] for row in live.hub.store.releases("demo")] == [1]
    else:
        assert "its result was never sealed" in answers[-1].text


# ----------------------------------------------------------------------------------- by themselves


def begin(_: Settings) -> Callable[..., dict[str, Any]]:
    def work(what: str) -> dict[str, Any]:
        if what == "wait":
            time.sleep(60)
        if what == "die":
            os._exit(3)
        if what == "refuse":
            raise Refusal("withheld", "No.")
        if what == "fail":
            raise ValueError("why")
        if what == "disk":
            raise OSError("why")
        if what == "hog":
            return {"size": len(bytearray(1 << 30))}
        return {"pid": os.getpid()}

    return work


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    held = Children(begin, Settings(tmp_path, combine_seconds=1.0, combine_bytes=LEAST_BYTES))
    yield held
    held.stop()


def test_a_process_is_started_when_there_is_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that was just started, or whose study took too long, first answers requests."""
    started: list[SpawnProcess] = []
    start = SpawnProcess.start
    monkeypatch.setattr(SpawnProcess, "start", lambda self: started.append(self) or start(self))
    held = Children(begin, Settings(tmp_path, combine_seconds=1.0))
    assert not started
    for n, (work, error) in enumerate((("wait", TookTooLong), ("die", Ended)), start=1):
        with pytest.raises(error):
            held.work(work)
        assert len(started) == n
    held.stop()


def test_a_process_is_used_again_until_it_has_to_be_ended(children: Children) -> None:
    first = children.work("pid")
    assert children.work("pid") == first
    with pytest.raises(Refusal, match=r"No\."):
        children.work("refuse")
    with pytest.raises(RuntimeError, match="ValueError: why"):  # our mistake, and no outage
        children.work("fail")
    with pytest.raises(Outage, match=r"^The hub's disk or its bucket does not answer\.$"):
        children.work("disk")
    assert children.work("pid") == first
    for what, error in (("wait", TookTooLong), ("die", Ended)):
        with pytest.raises(error):
            children.work(what)
        second = children.work("pid")
        assert second != first
        first = second


def test_a_process_that_was_ended_while_it_waited_is_replaced(children: Children) -> None:
    """What ends an idle process, as the system does first where memory is short, costs nothing."""
    first = children.work("pid")["pid"]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not children._ready[0].is_alive)
    assert children.work("pid")["pid"] != first


def fail_to_begin(_: Settings) -> Callable[..., dict[str, Any]]:
    os._exit(3)


def test_a_process_that_does_not_start_is_an_outage_and_not_the_works_doing(
    tmp_path: Path,
) -> None:
    held = Children(fail_to_begin, Settings(tmp_path))
    try:
        with pytest.raises(Outage, match="did not start") as failed:
            held.work("pid")
        assert not isinstance(failed.value, Ended)
    finally:
        held.stop()


def test_a_process_runs_out_of_memory_before_the_hub_does(children: Children) -> None:
    first = children.work("pid")
    with pytest.raises(MemoryError):
        children.work("hog")
    assert children.work("pid") == first


def test_processes_share_the_memory_that_there_is(tmp_path: Path) -> None:
    assert find_memory(Settings(tmp_path, combine_bytes=7)) == 7
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert LEAST_BYTES <= find_memory(Settings(tmp_path)) <= max(LEAST_BYTES, pages // 5)


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Whoever kills a hub leaves nothing behind that goes on combining."""
    pid = os.fork()
    if pid == 0:  # a hub, which is killed before it can stop its processes
        try:
            held = Children(begin, Settings(tmp_path))
            (tmp_path / "pid").write_text(str(held.work("pid")["pid"]))
            held.work("wait")
        finally:
            os._exit(1)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not is_running(child), 20)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
