"""Progress of long work: the caller's function, or a bar on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]


@contextmanager
def showing(what: str, progress: Progress | None) -> Iterator[Progress]:
    """Yield `progress`; without one, show a bar if standard error is a terminal."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
