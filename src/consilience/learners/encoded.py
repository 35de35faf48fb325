"""Chunked records as the solver takes them: rows in the unit ball, labels as numbers.

What is sent to worker processes holds declared settings only: no learner, no noise and no record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from consilience.errors import SchemaMismatch
from consilience.learners.axes import Axes
from consilience.learners.ball import Ball, into_ball
from consilience.learners.erm import Chunks, block_records
from consilience.learners.inputs import Chunked, label_codes, read_chunks

Array: TypeAlias = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LabelCodes:
    """Turn labels into places among the classes, or into signs: +1 for the place `positive`."""

    owner: str
    classes: Array
    positive: int | None

    def __call__(self, labels: Array) -> Array:
        """Return the codes of `labels`, or refuse one that is not among the classes."""
        codes = np.asarray(labels)
        if not (
            self._are_places
            and codes.dtype == np.int64
            and codes.view(np.uint64).max(initial=0) < len(self.classes)
        ):
            codes = label_codes(self.owner, self.classes, codes)
        return codes if self.positive is None else 2.0 * (codes == self.positive) - 1.0

    @cached_property
    def _are_places(self) -> bool:
        """Whether labels are places already, as those of chunks are."""
        return bool(np.array_equal(self.classes, np.arange(len(self.classes))))


@dataclass(frozen=True)
class LabelScale:
    """Turn a regressor's labels into numbers within ±1."""

    owner: str
    label_bound: float

    def __call__(self, labels: Array) -> Array:
        """Return `labels` clipped to the bound and divided by it."""
        values = np.asarray(labels, dtype=np.float64)
        if not np.isfinite(values).all():
            raise SchemaMismatch(
                f"{self.owner} found a label that is not a finite number. Nothing was trained. "
                "Remove such records first."
            )
        return np.clip(values, -self.label_bound, self.label_bound) / self.label_bound


Encoding: TypeAlias = LabelCodes | LabelScale


@dataclass(frozen=True)
class EncodedChunks:
    """A table in chunks, seen through a learner's scaling and coding of labels."""

    source: Chunked
    ball: Ball
    encode: Encoding
    n_features: int
    n_records: int
    axes: Axes | None = None  # that rows are projected on once they are in the ball

    def chunks(self) -> Chunks:
        """Yield encoded blocks of records; a block may be overwritten by the next one."""
        return self._read(self.source.chunks())

    @property
    def _read(self) -> Callable[[Chunks], Chunks]:
        encode = partial(_encode, self.ball, self.encode, self.source.n_features)
        return encode if self.axes is None else partial(_encode_along, self.axes, encode)


class EncodedPartitions(EncodedChunks):
    """The same for records that stay with Dask's workers: only scaling and function travel."""

    def gather(self, function: Callable[[Chunks], T], every: int = 1) -> list[T]:
        """Return what `function` makes of the encoded blocks of each partition."""
        apply = partial(_apply_encoded, self._read, function)
        answers: list[T] = self.source.gather(apply, every)
        return answers


def _encode(ball: Ball, encode: Encoding, n_features: int, chunks: Chunks) -> Chunks:
    room = np.empty((0, 0))
    for X, y in read_chunks(encode.owner, n_features, chunks):
        width = n_features + ball.fit_intercept
        length = max(len(y), 1) if sparse.issparse(X) else block_records(width)
        if room.shape[1] != width and not sparse.issparse(X):
            # Blocks keep the source's memory layout, so that copying runs along memory.
            by_feature = X.strides[0] < X.strides[1]
            room = np.empty((width, length)).T if by_feature else np.empty((length, width))
        for start in range(0, len(y), length):
            part = slice(start, start + length)
            yield into_ball(X[part], ball, room), encode(y[part])


def _encode_along(axes: Axes, encode: Callable[[Chunks], Chunks], chunks: Chunks) -> Chunks:
    for X, y in encode(chunks):
        yield axes.project(X), y


def _apply_encoded(
    read: Callable[[Chunks], Chunks], function: Callable[[Chunks], T], chunks: Chunks
) -> T:
    return function(read(chunks))
