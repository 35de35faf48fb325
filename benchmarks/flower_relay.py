"""Run a study over a real Flower deployment: times and memory, with kills and large files.

    make flower
    python benchmarks/flower_relay.py

One SuperLink and three SuperNodes on loopback, with TLS and node authentication; the scenarios are
those of docs/flower.md. Every scenario checks that all sites hold the same verified release and
that no ledger was charged twice, and stops if not. Prints a table and writes it to
benchmarks/flower_relay.md.
"""

import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from consilience import Budget, Ledger  # noqa: E402
from consilience.files.release import Release  # noqa: E402
from federation import BIN, Consortium, Federation, descendants, drawing_study, memory, wait_for  # noqa: E402
from pages import write_page  # noqa: E402
from studies import study_text, table  # noqa: E402

NAMES = ("north", "south", "west")
SETTINGS = {"collect_minutes": 15, "deliver_minutes": 15}
LARGE_MB = 100


class Watch:
    """The most memory each process ever had, by what it is, sampled while a scenario runs."""

    def __init__(self, federation):
        self.federation, self.peaks, self.ended = federation, {}, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def _look(self):
        while not self.ended.wait(0.2):
            for process in list(self.federation.processes.values()):
                for pid in (process.pid, *descendants(process.pid)):
                    try:
                        command = (
                            Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
                        )
                    except OSError:
                        continue
                    kinds = (
                        "flwr-serverapp",
                        "flwr-clientapp",
                        "superexec",
                        "flower-superlink",
                        "flower-supernode",
                    )
                    kind = next(
                        (
                            kind
                            for kind in kinds
                            if kind in command and not command.startswith("sh ")
                        ),
                        None,
                    )
                    if kind is not None:
                        self.peaks[kind] = max(self.peaks.get(kind, 0.0), memory(pid)[1])


def consortium_in(folder, text=None, public=None):
    found = Consortium(folder, NAMES, text or study_text(), public)
    for seed, name in enumerate(NAMES):
        found.submit(name, table(500, seed=seed))
    return found


def holds(consortium):
    """Tell whether every outbox has a release."""
    places = [Path(config["outbox"]) / "heart" for config in consortium.nodes.values()]
    return all(list(place.glob("release-*")) for place in places)


def n_kept(consortium):
    return len(list(consortium.heart.glob("contributions/*/*.safetensors")))


def check(consortium, *, draws=False):
    """Every site has the one release, verified; every ledger has one charge."""
    (path,) = consortium.collection.releases()
    assert consortium.fetched() == dict.fromkeys(NAMES, Release.load(path).digest)
    assert n_kept(consortium) == len(NAMES)
    if draws:
        assert len(Ledger(consortium.heart / "ledger.sqlite").charges()) == 1
    else:
        assert [len(site.ledger.charges()) for site in consortium.sites.values()] == [1, 1, 1]
    return path


def start(federation, consortium):
    federation.run(consortium.app, folder=str(consortium.heart), **SETTINGS)


def nothing_happens(federation, consortium):
    start(federation, consortium)
    wait_for(lambda: holds(consortium), 900, "the release")


def a_supernode_is_killed(federation, consortium):
    """It is killed before it could answer, and its supervisor starts it again."""
    federation.kill("west")
    start(federation, consortium)
    wait_for(lambda: n_kept(consortium) == 2, 600, "the others")
    federation.start("west")
    wait_for(lambda: holds(consortium), 900, "the release")


def the_superlink_is_killed_collecting(federation, consortium):
    start(federation, consortium)
    wait_for(lambda: n_kept(consortium) >= 1, 600, "a contribution", every=0.02)
    federation.kill("superlink")
    federation.start("superlink")
    start(federation, consortium)
    wait_for(lambda: holds(consortium), 900, "the release")


def the_superlink_is_killed_delivering(federation, consortium):
    start(federation, consortium)
    wait_for(consortium.collection.releases, 600, "the draw", every=0.02)
    federation.kill("superlink")
    federation.start("superlink")
    start(federation, consortium)
    wait_for(lambda: holds(consortium), 900, "the release")


def forest_study(megabytes=LARGE_MB):
    """Return a study of exact forests of so many MB for a trusted hub, and public records."""
    # A tree of depth 12 is 4,095 splits of two numbers and 4,096 leaves of two: about 131 kB.
    n_trees = megabytes * 1_000_000 // (8 * (2 * 4095 + 2 * 4096))
    settings = f'n_trees = {n_trees}\nmax_depth = 12\nsplitter = "random"\nrandom_state = 1'
    text, public = drawing_study("PrivateForestClassifier", settings)
    return text, public


def measured(title, scenario, **options):
    draws = options.pop("draws", False)
    with tempfile.TemporaryDirectory(prefix="flower-") as place:
        consortium = consortium_in(Path(place), **options)
        if draws:
            consortium.collection.allow(Budget(epsilon=1.0, unit="site", neighbours="replace-one"))
        (size,) = {
            path.stat().st_size
            for path in Path(consortium.nodes["north"]["outbox"]).glob("heart/contribution-north-*")
        }
        began = time.monotonic()
        with (
            Federation(Path(place) / "flower", consortium.nodes) as federation,
            Watch(federation) as watch,
        ):
            up = time.monotonic() - began
            began = time.monotonic()
            scenario(federation, consortium)
            seconds = time.monotonic() - began
        path = check(consortium, draws=draws)
        peaks = watch.peaks
        print(
            f"{title}: {seconds:.0f} s (start {up:.0f} s), {size / 1e6:.3g} MB, {peaks}", flush=True
        )
        return title, size, path.stat().st_size, up, seconds, peaks


def main():
    assert (BIN / "flower-superlink").exists(), "make flower"
    text, public = drawing_study()
    large, more = forest_study()
    rows = [
        measured("nothing happens", nothing_happens),
        measured("a SuperNode is killed and comes back", a_supernode_is_killed),
        measured("the SuperLink is killed while collecting", the_superlink_is_killed_collecting),
        measured(
            "the SuperLink is killed while delivering; the aggregator draws noise",
            the_superlink_is_killed_delivering, text=text, public=public, draws=True,
        ),
        measured(
            f"nothing happens; contributions of {LARGE_MB} MB",
            nothing_happens, text=large, public=more, draws=True,
        ),
    ]  # fmt: skip
    kinds = (
        "flower-superlink",
        "superexec",
        "flwr-serverapp",
        "flower-supernode",
        "flwr-clientapp",
    )
    load = np.round(os.getloadavg(), 1).tolist()
    lines = [
        "# A study over a real Flower deployment",
        "",
        "Made by `benchmarks/flower_relay.py`. One SuperLink (with a database) and three "
        "SuperNodes on loopback, TLS, node authentication, `flwr run`.",
        "After every scenario all three sites hold the same verified release, and each ledger "
        "has one charge: the script stops if not.",
        "A SuperNode that is killed has not answered yet, and is let in again after up to a "
        "minute; a SuperLink that is killed takes the run with it, and the time includes its "
        "start and the second `flwr run`. Every question starts a Python process at the site, so "
        "that processor time, not the network, decides.",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, Flower 1.41.0; load averages at the end {load} (the "
        "machine was shared).",
        "",
        "| what happens | contribution, MB | release, MB | start, s | from `flwr run` to the "
        "release at all sites, s |",
        "|---|---|---|---|---|",
        *(f"| {title} | {size / 1e6:.3g} | {out / 1e6:.3g} | {up:.0f} | {seconds:.0f} |"
          for title, size, out, up, seconds, _ in rows),
        "",
        "Peak resident memory of one process, MiB:",
        "",
        f"| what happens | {' | '.join(kinds)} |",
        "|---|" + "---|" * len(kinds),
        *(
            f"| {title} | {' | '.join(f'{peaks.get(kind, 0):.0f}' for kind in kinds)} |"
            for title, *_, peaks in rows
        ),
        "",
    ]  # fmt: skip
    text = "\n".join(lines)
    write_page(ROOT / "benchmarks" / "flower_relay.md", text)
    print(text)


if __name__ == "__main__":
    main()
