"""The command `consilience demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from consilience.cli.command import Answer


def demo(
    folder: Annotated[
        Path, Option(help="Where to put the study, the hub, the sites and the report.")
    ] = Path("demo-report"),
) -> Answer:
    """Let six made-up hospitals learn together through a hub on this machine.

    Compares the result with what each hospital reaches alone. The patients are computed from a
    formula and do not exist. Takes about a minute.
    """
    from consilience.demo import demo as run
    from consilience.progress import showing

    with showing("Six sites and a hub", None) as progress:
        report = run(folder, progress=progress)
    text = (
        f"{report}\n\nWritten in {report.seconds:.0f} s: {', '.join(report.files)}\n"
        f"The release: {report.release}\nThe dashboard: {report.dashboard}"
    )
    return Answer(report.as_dict(), text)
