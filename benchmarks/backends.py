"""Check that a sweep gives the same tables on loky, Ray and Dask, also when a worker is killed.

    CONSILIENCE_DATA=FOLDER python benchmarks/backends.py

Runs figure 3 of Hamm et al. 2016 (KDD Cup 1999, 5,000, 10,000 and 20,000 parties, five levels of
epsilon) as `experiments` does, with one seed and two workers, each backend in a process of its own
that starts from nothing. Twice more a worker is ended by SIGKILL when half of a point's cells are
stored and it is at work on another. Every row of every run is compared with loky's; the script
fails if one differs by more than 1e-9. Writes benchmarks/backends.md.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from experiments.hamm2016.figures import FIGURE_3  # noqa: E402
from experiments.run import SEEDS, Settings, plan, watched  # noqa: E402

import consilience as cs  # noqa: E402
from federation import descendants  # noqa: E402
from pages import write_page  # noqa: E402

CLOSE = 1e-9
RUNS = (("loky", False), ("ray", False), ("dask", False), ("ray", True), ("dask", True))
# of processor time since the others' cells were stored: then a worker is in the middle of one
AT_WORK_SECONDS = 3.0


# -------------------------------------------------------------------------- in a process of its own


def sweep(backend, folder, repeats, miniature):
    """Run all points of all panels; write their rows and what they took."""
    settings = Settings(folder, seeds=SEEDS[:1], miniature=miniature)
    points = [point for panel in FIGURE_3 for point in plan(panel, settings)]
    rows, begun = {}, time.perf_counter()
    with watched() as used:
        for point in points:
            given = {**point.arguments, "repeats": repeats}
            report = cs.simulate(**given, n_jobs=2, backend=backend, checkpoint=folder / "cells")
            for row in report.rows:
                rows[
                    json.dumps(
                        [
                            point.panel.id,
                            point.run,
                            row.repeat,
                            row.draw,
                            row.epsilon,
                            row.method,
                            row.metric,
                        ]
                    )
                ] = row.value
        facts = {
            "seconds": time.perf_counter() - begun,
            "peak": used()["peak_bytes"] / 2**30,
            "cells": repeats * len(points),
        }
    (folder / "found.json").write_text(json.dumps({**facts, "rows": rows}), encoding="utf-8")


# ------------------------------------------------------------------------------------- from outside


def run(backend, killed, options):
    """Run one sweep, end a worker in its middle if asked, and return what was found."""
    with tempfile.TemporaryDirectory(prefix="backends-") as place:
        command = [
            sys.executable,
            __file__,
            "--stage",
            backend,
            "--folder",
            place,
            "--repeats",
            str(options.repeats),
        ]
        single = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        command += ["--miniature"] * options.miniature
        process = subprocess.Popen(command, env={**os.environ, **single})
        stored = kill_a_worker(process, Path(place) / "cells", options) if killed else None
        if process.wait() != 0:
            raise SystemExit(
                f"The sweep on {backend} failed; what it said is above. Nothing was written."
            )
        return {
            **json.loads((Path(place) / "found.json").read_text(encoding="utf-8")),
            "stored": stored,
        }


def kill_a_worker(process, cells, options):
    """Kill a worker in the middle of a cell, once half of the first point's cells are stored."""
    while len(list(cells.glob("*.json"))) < options.repeats // 2:
        time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit(
                "The sweep ended before a worker could be killed. Nothing was written."
            )
    before = {pid: processor(pid) for pid in descendants(process.pid)}
    needed = 0.2 if options.miniature else AT_WORK_SECONDS
    while process.poll() is None:
        for pid in descendants(process.pid):
            if processor(pid) - before.setdefault(pid, processor(pid)) > needed:
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                os.kill(pid, signal.SIGKILL)
                stored = len(list(cells.glob("*.json")))
                print(
                    f"killed process {pid} ({command:.60}) with {stored} cells stored", flush=True
                )
                return stored
        time.sleep(0.05)
    raise SystemExit("No worker was at work for long enough to be killed. Nothing was written.")


def processor(pid):
    """Return the processor time of a process, in seconds; 0 once it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def difference(found, reference):
    """Return the largest difference of any number; infinite if a row has no partner."""
    if found.keys() != reference.keys():
        return float("inf")
    return max(abs(found[key] - reference[key]) for key in reference)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4, help="cells of each point")
    parser.add_argument(
        "--miniature", action="store_true", help="made-up records: a trial of the script itself"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--stage")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.stage:
        sweep(options.stage, options.folder, options.repeats, options.miniature)
        return
    lines, reference, worst = [], {}, 0.0
    for backend, killed in RUNS:
        load = os.getloadavg()[0]
        found = run(backend, killed, options)
        reference = reference or found["rows"]
        off = difference(found["rows"], reference)
        worst = max(worst, off)
        how = f"yes, when {found['stored']} cells were stored" if killed else "no"
        cells = [
            backend,
            how,
            found["cells"],
            f"{found['seconds']:.0f}",
            f"{found['peak']:.1f}",
            len(found["rows"]),
        ]
        cells += ["" if not lines else f"{off:.1g}", f"{load:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        print(lines[-1], flush=True)
    text = report(options, lines, worst)
    if worst > CLOSE:
        raise SystemExit(f"{text}\nTables differ by {worst:g}: nothing was written.")
    write_page(options.out, text)


def report(options, lines, worst):
    command = f"python benchmarks/backends.py --repeats {options.repeats}"
    command += " --miniature" * options.miniature
    what = "MADE-UP records" if options.miniature else "KDD Cup 1999"
    engines = ", ".join(
        f"{name} {version(name)}"
        for name in ("joblib", "ray", "dask", "distributed")
        if find_spec(name) is not None
    )
    return f"""# A sweep on three backends

Made by `CONSILIENCE_DATA=… {command}`; do not edit, run it again.

- Figure 3 of Hamm et al. 2016 as `experiments` runs it: {what}, 5,000, 10,000 and 20,000 parties \
of 22 records, five levels of ε, and reference runs; seed {SEEDS[0]}, {options.repeats} repeats. A \
cell is one repeat of one run.
- Two workers on this machine ({os.cpu_count()} cores, shared with other work: the load average is \
that at the start of each row), each backend in a process of its own; seconds include starting \
and stopping the backend.
- Killed: SIGKILL to a worker in the middle of a cell. What is stored stays; the rest is run again
  or elsewhere.
- Peak: resident memory of all processes together, each shared page counted once.
- Python {platform.python_version()}, {engines}.

| backend | worker killed | cells | seconds | peak, GiB | rows | largest difference from loky \
| load |
|---|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(lines)}

Largest difference of any number in any row: {worst:.1g}; at most {CLOSE:g} was asked for.
"""


if __name__ == "__main__":
    main()
