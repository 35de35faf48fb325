"""Records that stay in the partitions of a Dask dataframe or array, while sums over them travel.

Only functions of published code and plain numbers are sent to workers: never a learner, a generator
or noise. Noise, charge and guarantee stay in the process that called `fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from consilience.errors import ConsilienceError, SchemaMismatch, SettingsError
from consilience.learners.erm import Chunks, one_blas_thread
from consilience.progress import Progress, showing
from consilience.tables.schema import Schema

T = TypeVar("T")
SLICE_RECORDS = 16384  # handed on at a time, whatever the size of a partition


def is_dask(X: Any) -> bool:
    """Tell whether `X` is a Dask collection, without importing Dask."""
    return hasattr(X, "__dask_graph__")


class DaskRows:
    """Hold a Dask dataframe or array for `fit`; losses and gradients are summed on its workers.

    Parameters
    ----------
    X
        A Dask dataframe or array of numbers; with a `schema` a dataframe that holds the schema's
        columns.
    y
        Labels in the same partitions as `X`; left out with a `schema`, which names their column.
    schema
        Encodes each partition where it lies.
    named
        As in `ParquetRows`.
    progress
        Called with the partitions done in this pass and the number of all: none as it begins, all
        as it ends. Without it a bar is shown where standard error is a terminal.

    Privacy
    -------
    Workers see records, and intermediate results that are not private: they belong to the site.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> import consilience as cs
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> rows = cs.DaskRows(da.from_array(X, chunks=(100, 3)), da.from_array(y, chunks=100))
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
    >>> learner.fit(rows).guarantee_
    Guarantee(epsilon=1, delta=0, per record, replace-one, 1 assumption)
    """

    def __init__(
        self,
        X: Any,
        y: Any = None,
        *,
        schema: Schema | None = None,
        named: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if not is_dask(X) or (schema is None) == (y is None) or (y is not None and not is_dask(y)):
            raise SettingsError(
                "DaskRows takes a Dask dataframe or array with labels y that are Dask's too, or "
                "a Dask dataframe with a schema. No record was read. Pass one of these."
            )
        self.schema, self.progress, self.passes = schema, progress, 0
        self.names = schema.classes if named and schema is not None else None
        if schema is not None:
            absent = [
                name for name in schema.table_columns if name not in getattr(X, "columns", ())
            ]
            if absent:
                raise SchemaMismatch(
                    f"The Dask table lacks the columns {absent}. No record was read. Add them, or "
                    "correct the schema."
                )
            if schema.person is not None:
                raise SettingsError(
                    "The schema limits the records of a person, which needs all of a person's "
                    "records in one place. No record was read. Train on a table that fits in "
                    "memory, or on Parquet files."
                )
            X = X[list(schema.table_columns)]
        self.n_features = int(X.shape[1]) if schema is None else schema.n_features
        self.n_records: int | None = None  # counted by the learner, before it charges
        features, labels = _delayed(X), [] if y is None else _delayed(y)
        if y is not None and len(features) != len(labels):
            raise SchemaMismatch(
                "X and y have different partitions. No record was read. Repartition one like the "
                "other."
            )
        self._parts = list(zip(features, labels or [None] * len(features), strict=True))

    def gather(self, function: Callable[[Chunks], T], every: int = 1) -> list[T]:
        """Return `function` of each partition, or of every `every`-th record, computed in place."""
        import dask

        self.passes += 1
        task = dask.delayed(
            partial(_apply, function, self.n_features, self.schema, every), pure=False
        )
        failure, total = "", len(self._parts)
        with showing(f"Adding up partitions, pass {self.passes}", self.progress) as progress:
            progress(0, total)
            try:
                answers = dask.compute(*(task(*part) for part in self._parts))
            except Exception as error:
                failure = type(error).__name__
            progress(total, total)
        if failure:  # its message may quote a record, so it ends here
            raise SchemaMismatch(
                f"Dask could not compute a partition ({failure}). Nothing was learned; a charge "
                "already made stands. See the scheduler's own log, repair the cluster or the "
                "table, and begin again."
            )
        for answer in answers:
            if isinstance(answer, ConsilienceError):
                raise answer
        return list(answers)

    def chunks(self) -> Chunks:
        """Yield (X, y) partition by partition, brought here one at a time."""
        import dask

        self.passes += 1
        with showing(f"Reading partitions, pass {self.passes}", self.progress) as progress:
            for done, part in enumerate(self._parts, start=1):
                X, y = dask.compute(*part)
                for some, labels in _slices(X, y, self.n_features, self.schema):
                    yield some if self.schema is None else some.copy(), labels
                progress(done, len(self._parts))


def _delayed(collection: Any) -> list[Any]:
    if (
        hasattr(collection, "npartitions")
        and hasattr(collection, "chunks")
        and collection.ndim == 2
    ):
        collection = collection.rechunk({1: -1})
    return list(np.ravel(collection.to_delayed()))


def _apply(
    function: Callable[[Chunks], T],
    n_features: int,
    schema: Schema | None,
    every: int,
    X: Any,
    y: Any,
) -> Any:
    """Return `function` of a partition, or the error: raised, it would log records."""
    try:
        with one_blas_thread():
            return function(_slices(X, y, n_features, schema, every))
    except ConsilienceError as error:
        return type(error)(str(error))
    except Exception as error:
        return SchemaMismatch(
            f"A partition cannot be read as a table of numbers ({type(error).__name__}). Nothing "
            "was learned. Give every partition the same columns and kinds, or pass "
            "DaskRows(frame, schema=...)."
        )


def _slices(
    X: Any, y: Any, n_features: int, schema: Schema | None, every: int = 1
) -> Iterator[tuple[Any, NDArray[Any]]]:
    if schema is not None:
        yield from (encoded[:2] for encoded in schema.encode_blocks(X.iloc[::every]))
        return
    table, labels = X.tocsr() if sparse.issparse(X) else np.asarray(X), np.asarray(y)
    if table.shape != (*labels.shape, n_features):
        raise SchemaMismatch(
            "A partition does not have one label for each record. Nothing was learned. Give X and "
            "y the same partitions, and y one dimension: frame['y'] instead of frame[['y']]."
        )
    table, labels = table[::every], labels[::every]
    for start in range(0, len(labels), SLICE_RECORDS):
        yield table[start : start + SLICE_RECORDS], labels[start : start + SLICE_RECORDS]
