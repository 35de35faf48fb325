"""Records as bins and class numbers, handed to growing trees part by part.

A table larger than memory is read once. Its bins, one byte for each value, go to a temporary file
without a name, which nobody else can open and which is gone when the process ends. All trees
together then read that file once for each level.
"""

from __future__ import annotations

import io
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilience.progress import Progress, showing

Array = NDArray[Any]

BLOCK_RECORDS = 1 << 18  # read from the file at a time
# Nodes remembered between levels, over all trees; with more, records start from the root again.
NODES_KEPT = 1 << 27


@dataclass
class Part:
    """Some records of one tree, and the node at `level` that each of them reached."""

    tree: int
    codes: NDArray[np.uint8]
    y: NDArray[np.int64]
    node: NDArray[np.uint16]
    level: int = 0

    @classmethod
    def at_root(cls, tree: int, codes: Array, y: Array) -> Part:
        """Return records that are all at the root."""
        return cls(tree, codes, y, np.zeros(len(y), np.uint16))


@dataclass(frozen=True)
class TreeTask:
    """Records as bins and class numbers, and whose they are."""

    codes: NDArray[np.uint8]
    y: NDArray[np.int64]
    n_classes: int
    persons: NDArray[np.intp] | None = None

    @property
    def n_records(self) -> int:
        """Number of records."""
        return len(self.y)

    @property
    def n_units(self) -> int:
        """Number of records, or of persons where they are known."""
        return len(self.y) if self.persons is None else int(self.persons.max(initial=-1)) + 1

    def passes(self, owner: Array | None, n_trees: int) -> Callable[[], Iterator[Part]]:
        """Return an iterator over the records of all trees.

        Each record goes to the tree that owns it or, without `owner`, to every tree.
        """
        if self.n_records * (1 if owner is not None else n_trees) > NODES_KEPT:
            return lambda: _deal(self.codes, self.y, owner, n_trees)
        kept = list(_deal(self.codes, self.y, owner, n_trees))
        return lambda: iter(kept)


def _deal(codes: Array, y: Array, owner: Array | None, n_trees: int) -> Iterator[Part]:
    if owner is None:
        yield from (Part.at_root(tree, codes, y) for tree in range(n_trees))
        return
    order = np.argsort(owner, kind="stable")
    codes, y = codes[order], y[order]
    ends = np.cumsum(np.bincount(owner, minlength=n_trees)).tolist()
    for tree, (start, stop) in enumerate(pairwise([0, *ends])):
        yield Part.at_root(tree, codes[start:stop], y[start:stop])


@dataclass
class FiledTask:
    """The same in a temporary file, without persons."""

    n_features: int
    n_classes: int
    progress: Progress | None = None
    n_records: int = 0
    persons: None = None
    _passes: int = 0
    _file: io.FileIO = field(
        default_factory=lambda: tempfile.TemporaryFile(buffering=0), repr=False
    )

    def __post_init__(self) -> None:
        weakref.finalize(self, self._file.close)  # which also removes the file

    @property
    def n_units(self) -> int:
        """Number of records."""
        return self.n_records

    @property
    def _width(self) -> int:
        return self.n_features + (1 if self.n_classes <= 256 else 2)

    def append(self, codes: Array, y: Array) -> None:
        """Write records at the end of the file."""
        rows = np.empty((len(y), self._width), np.uint8)
        rows[:, : self.n_features] = codes
        rows[:, self.n_features :] = y.astype("<u2")[:, None].view(np.uint8)[
            :, : self._width - self.n_features
        ]
        view = memoryview(rows.data).cast("B")
        while view:
            view = view[self._file.write(view) :]
        self.n_records += len(y)

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """Yield the bins and classes of records in their order; class bytes follow the bins."""
        self._file.seek(0)
        rows = np.empty((min(BLOCK_RECORDS, self.n_records), self._width), np.uint8)
        for start in range(0, self.n_records, BLOCK_RECORDS):
            view = memoryview(rows[: self.n_records - start].data).cast("B")
            while view:
                view = view[self._file.readinto(view) :]
            block = rows[: self.n_records - start]
            y = block[:, self.n_features].astype(np.int64)
            yield block, y if self.n_classes <= 256 else y + 256 * block[:, -1].astype(np.int64)

    def passes(self, owner: Array | None, n_trees: int) -> Callable[[], Iterator[Part]]:
        """Return an iterator that reads the file once for all trees; `owner` as in `TreeTask`."""

        def once() -> Iterator[Part]:
            self._passes += 1
            stop = 0
            with showing(f"Growing trees, pass {self._passes}", self.progress) as progress:
                for codes, y in self.blocks():
                    start, stop = stop, stop + len(y)
                    yield from _deal(
                        codes, y, None if owner is None else owner[start:stop], n_trees
                    )
                    progress(stop, self.n_records)

        return once

    def load(self) -> TreeTask:
        """Return the same in memory."""
        codes = np.empty((self.n_records, self.n_features), np.uint8)
        y = np.empty(self.n_records, np.int64)
        stop = 0
        for block, labels in self.blocks():
            start, stop = stop, stop + len(labels)
            codes[start:stop], y[start:stop] = block[:, : self.n_features], labels
        return TreeTask(codes, y, self.n_classes)
