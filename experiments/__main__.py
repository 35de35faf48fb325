"""Reproduce figures: ``python -m experiments [xie2016 | xie2016/3 | xie2016/3a ...] [--full] [--out FOLDER]``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from . import report
from .design import HERE, papers, select
from .run import SEED, Settings, run


def main() -> None:
    """Run what is missing of the chosen figures, then draw and judge everything that is stored."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("figures", nargs="*", help="a paper, a figure or a panel; all if none is named")
    parser.add_argument("--full", action="store_true", help="the papers' repeats and points")
    parser.add_argument("--out", type=Path, help="folder of results; finished points in it are not computed again")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--backend", choices=("loky", "threading", "ray", "dask"), help="where cells run")
    parser.add_argument("--fresh", action="store_true", help="compute finished points again")
    parser.add_argument("--miniature", action="store_true", help="made-up data, in seconds: for tests")
    given = parser.parse_args()
    out = given.out or (HERE / "results" if given.full else HERE.parent / "build" / "reproduction")
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(out, given.full, given.seed, given.jobs, given.fresh, given.miniature, given.backend)
    run(select(given.figures), settings)
    Console().print(f"Report: {os.path.relpath(report.write(papers(), settings))}", highlight=False)


if __name__ == "__main__":
    main()
