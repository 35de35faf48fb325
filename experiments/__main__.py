"""Reproduce figures of the papers.

python -m experiments [xie2016 | xie2016/3 | xie2016/3a ...] [--full] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from consilience.errors import ConsilienceError

from . import report
from .design import HERE, papers
from .run import SEEDS, Settings, run, select


def main() -> None:
    """Run what is missing of the chosen figures, then draw and judge everything that is stored."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument(
        "figures", nargs="*", help="a paper, a figure or a panel; all if none is named"
    )
    parser.add_argument("--full", action="store_true", help="the papers' repeats and points")
    parser.add_argument(
        "--out", type=Path, help="folder of results; finished points in it are not computed again"
    )
    parser.add_argument(
        "--seed", type=int, nargs="+", default=SEEDS, help="repeats are divided over all of them"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no point later; the same goes on"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--backend", choices=("loky", "threading", "ray", "dask"), help="where cells run"
    )
    parser.add_argument("--fresh", action="store_true", help="compute again what earlier code did")
    parser.add_argument(
        "--miniature", action="store_true", help="made-up data, in seconds: for tests"
    )
    given = parser.parse_args()
    if given.full and given.miniature:
        parser.error(
            "--full and --miniature exclude each other: made-up numbers are no results. Leave "
            "one out."
        )
    chosen = select(given.figures)
    built = HERE.parent / "build" / ("miniature" if given.miniature else "reproduction")
    out = (given.out or (HERE / "results" if given.full else built)).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        sys.exit(
            f"Results cannot be written into {out}: {error.strerror}. Nothing was run. Name "
            "another folder: OUT=folder with make, --out folder without."
        )
    settings = Settings(
        out,
        given.full,
        tuple(given.seed),
        given.jobs,
        given.fresh,
        given.miniature,
        given.backend,
        time.monotonic() + 60 * given.minutes,
    )
    try:
        run(chosen, settings)
        path = report.write(papers(), settings, chosen)
    except ConsilienceError as error:
        sys.exit(f"{error} Finished points are kept.")
    except KeyboardInterrupt:
        print("Stopped. Finished points are kept; the same command goes on.", file=sys.stderr)  # noqa: T201
        sys.exit(130)  # what shells expect of an interrupted command
    Console().print(f"Report: {os.path.relpath(path)}", highlight=False)


if __name__ == "__main__":
    main()
