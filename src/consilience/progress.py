"""Progress of long work: the caller's function, or a bar where a person is watching."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]


@contextmanager
def showing(what: str, progress: Progress | None) -> Iterator[Progress]:
    """Yield `progress`, or without one a bar where standard error is a terminal and nothing elsewhere."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
