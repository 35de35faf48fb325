"""Measure private training from Parquet files that do not fit in memory.

    python benchmarks/large_site.py --records 50000000

Makes the table in a temporary folder and deletes it: 20 columns of float32 and a label, ten files,
pyarrow's default settings. Each learner trains in a process of its own, whose peak resident memory
is the operating system's. Before and after each, the same columns are decoded once in the same
batches by one thread, doing nothing with them: that is the time to read; for Dask, its workers read
all partitions. Processor times are shown too, since other work on the machine stretches elapsed
ones. Writes benchmarks/large_site.md.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from consilience import (
    Bins,
    Numeric,
    ParquetRows,
    PrivateForestClassifier,
    PrivateLogisticRegression,
    Schema,
)
from pages import write_page

N_FEATURES, N_FILES, BATCH = 20, 10, 32768
NAMES = [f"v{i}" for i in range(N_FEATURES)]
SCHEMA = Schema([Numeric(name, -1, 1) for name in NAMES], "y", classes=(0, 1))
SETTINGS = {"epsilon": 1.0, "classes": [0, 1]}
DEPTH = 6


def make(folder, n_records):
    rng = np.random.default_rng(7)
    weights = rng.normal(size=N_FEATURES).astype(np.float32)
    for number in range(N_FILES):
        size = n_records * (number + 1) // N_FILES - n_records * number // N_FILES
        with pq.ParquetWriter(
            folder / f"part-{number}.parquet", table(rng, weights, 1).schema
        ) as writer:
            for start in range(0, size, 1 << 20):
                writer.write_table(table(rng, weights, min(1 << 20, size - start)))


def table(rng, weights, size):
    X = 2 * rng.random((N_FEATURES, size), dtype=np.float32) - 1
    y = rng.random(size, dtype=np.float32) < 1 / (1 + np.exp(-3 * (weights @ X)))
    return pa.table({**dict(zip(NAMES, X, strict=True)), "y": y.astype(np.int8)})


# --------------------------------------------------------------------- each in a process of its own


def read(folder):
    for file in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=65536) as opened:
            for _ in opened.iter_batches(BATCH, columns=[*NAMES, "y"], use_threads=False):
                pass
    return {"passes": 1}


def logistic(folder):
    rows = ParquetRows(folder, SCHEMA)
    fitted = PrivateLogisticRegression(**SETTINGS).fit(rows)
    return {
        "passes": rows.passes,
        "accuracy": accuracy(fitted),
        "guarantee": repr(fitted.guarantee_),
    }


def forest(folder):
    rows = ParquetRows(folder, SCHEMA)
    bins = Bins.of(SCHEMA)
    fitted = PrivateForestClassifier(**SETTINGS, bins=bins, n_trees=20, max_depth=DEPTH).fit(rows)
    facts = {"passes": rows.passes + DEPTH + 1, "of the files": rows.passes}
    return facts | {"accuracy": accuracy(fitted), "guarantee": repr(fitted.guarantee_)}


def on_dask(folder):
    import dask
    import dask.dataframe as dd
    from dask.distributed import Client, LocalCluster

    from consilience import DaskRows

    settings = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "processes": True,
        "dashboard_address": None,
    }
    with LocalCluster(**settings, memory_limit=0) as cluster, Client(cluster) as client:
        frame = dd.read_parquet(folder, columns=[*NAMES, "y"], split_row_groups=True)
        client.run(lambda: __import__("consilience"))

        def timed(work):
            begun, used = (
                time.perf_counter(),
                sum(client.run(time.process_time).values()) + time.process_time(),
            )
            answer, seconds = work(), time.perf_counter() - begun
            used = sum(client.run(time.process_time).values()) + time.process_time() - used
            return answer, {"seconds": seconds, "processor": used}

        def read_all():
            dask.compute(*(dask.delayed(len)(part) for part in frame.to_delayed()))

        read_all()  # once before the clock starts: workers load what they read with
        rows = DaskRows(frame, schema=SCHEMA)
        before = timed(read_all)[1]
        fitted, facts = timed(lambda: PrivateLogisticRegression(**SETTINGS).fit(rows))
        facts |= {"reads": [before, timed(read_all)[1]], "passes": rows.passes}
        facts["workers"] = list(client.run(peak).values())
    return facts | {"accuracy": accuracy(fitted), "guarantee": repr(fitted.guarantee_)}


def accuracy(fitted):
    """Return the share of 100,000 fresh records of the same kind that are classified well."""
    rng = np.random.default_rng(7)
    weights = rng.normal(size=N_FEATURES).astype(np.float32)
    X, y, _ = SCHEMA.encode(table(np.random.default_rng(8), weights, 100_000))
    return float(np.mean(fitted.predict(X) == y))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


STAGES = {"read": read, "logistic": logistic, "dask": on_dask, "forest": forest}


def stage(name, folder):
    """Run one stage in a new process, whose libraries use one thread each."""
    command = [sys.executable, __file__, "--stage", name, "--folder", str(folder)]
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env={**os.environ, **single}, check=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_stage(name, folder):
    begun, used = time.perf_counter(), time.process_time()
    facts = STAGES[name](folder)
    own = {
        "seconds": time.perf_counter() - begun,
        "processor": time.process_time() - used,
        "peak": peak(),
    }
    print(json.dumps({**own, **facts}))


# --------------------------------------------------------------------------------------- the report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument(
        "--only",
        nargs="*",
        choices=("logistic", "forest", "dask"),
        help="which rows; all if left out",
    )
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the table is, or is to be made, and stays; else temporary",
    )
    options = parser.parse_args()
    if options.stage:
        run_stage(options.stage, options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="large-site-") as place:
        folder = options.folder or Path(place)
        begun = time.perf_counter()
        if not any(folder.glob("*.parquet")):
            make(folder, options.records)
        held = sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))
        if held != options.records:
            raise SystemExit(
                f"{folder} holds {held:,} records, not {options.records:,}. Nothing was measured."
            )
        size = sum(file.stat().st_size for file in folder.iterdir()) / 2**30
        print(
            f"made {size:.1f} GiB in {time.perf_counter() - begun:.0f} s, load "
            f"{os.getloadavg()[0]:.1f}",
            flush=True,
        )
        stage(
            "read", folder
        )  # once before the clock starts: files that were just written, or long ago, come from disk
        rows, before = [], stage("read", folder)
        for name, label, limit in (
            ("logistic", "logistic regression", 2),
            ("forest", f"forest, 20 trees of depth {DEPTH}", 4),
            ("dask", "logistic regression on Dask, two workers", 2),
        ):
            if options.only and name not in options.only:
                continue
            load = os.getloadavg()[0]
            facts = stage(name, folder)
            after = stage("read", folder)
            print(
                f"{name}: {facts['seconds']:.1f} s, read in {before['seconds']:.1f} and "
                f"{after['seconds']:.1f} s"
            )
            rows.append(row(label, limit, facts, (before, after), load))
            print(rows[-1], flush=True)
            write_page(options.out, report(options.records, size, rows))
            before = after


def row(label, limit, facts, reads, load):
    seconds, processor = (
        sum(one[what] for one in facts.get("reads", reads)) / 2 for what in ("seconds", "processor")
    )
    ratio = facts["seconds"] / (facts["passes"] * seconds)
    work = facts["processor"] / (facts["passes"] * processor)
    workers = "".join(f" + {one:.2f}" for one in facts.get("workers", ()))
    largest = max([facts["peak"], *facts.get("workers", ())])
    verdict = "met" if ratio <= 2 and largest < limit else "**missed**"
    cells = [
        label,
        facts["passes"],
        f"{seconds:.1f}",
        f"{facts['seconds']:.0f}",
        f"{ratio:.2f}",
        f"{work:.2f}",
    ]
    cells += [
        f"{facts['peak']:.2f}{workers}",
        limit,
        verdict,
        f"{facts['accuracy']:.4f}",
        f"{load:.1f}",
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def report(n_records, size, rows):
    lines = [
        "# A site whose table does not fit in memory",
        "",
        f"Made by `python benchmarks/large_site.py --records {n_records}`; do not edit, run it "
        "again.",
        "",
        f"- {n_records:,} records × {N_FEATURES} columns of float32 and a label, {N_FILES} "
        f"Parquet files, {size:.1f} GiB; ε = 1",
        f"- Python {platform.python_version()}, numpy {np.__version__}, pyarrow {pa.__version__}, "
        f"{os.cpu_count()} cores shared with other work: the load average is that at the start of "
        "each row",
        "- time to read: decoding the columns once in batches, one thread, mean of before and "
        "after; for Dask, its two workers reading all partitions once, likewise",
        "- passes: the one that checks every record before the charge, the solver's own; of the "
        f"forest one over the files, {DEPTH} for levels and 1 for leaves over the file of bins",
        "- ratio: total / (passes × time to read), target at most 2; the same of processor time, "
        "which sees neither other work nor that decoding, encoding and computing run side by side",
        "- peak: resident memory of the process that trains, + of each worker",
        "",
        "| | passes | time to read, s | total, s | ratio | ratio of processor time | peak, GiB | "
        "limit, GiB | | accuracy | load |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
        *rows,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
