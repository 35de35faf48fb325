"""Where a learner's records come from: encoded by a schema, or in a way that nobody knows.

A guarantee covers what the learner makes of its rows. How these were made it covers only where a
schema made them, because a schema encodes each record by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from numpy.typing import ArrayLike

from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

Rows: TypeAlias = Any  # a table as users pass it


class Given(NamedTuple):
    """What `fit` was given, as a learner takes it: rows, labels and persons."""

    records: tuple[Rows, ArrayLike | None, ArrayLike | None]
    is_encoded: bool  # by a schema


def take_in(
    schema: Schema | None,
    X: Rows,
    y: ArrayLike | None = None,
    persons: ArrayLike | None = None,
) -> Given:
    """Encode a table by the schema, if there is one; take apart what a schema encoded."""
    from consilience.tables.schema import Encoded

    if isinstance(X, Encoded):
        _refuse_twice(y is None and persons is None, "Encoded records bring labels and persons")
        labels = X.y if schema is None else schema.name_labels(X.y)
        return Given((X.X, labels, X.persons), True)
    if callable(getattr(X, "chunks", None)):
        encoded_by = getattr(X, "schema", None)
        if schema is not None and encoded_by != schema:
            raise SettingsError(
                "A learner with a schema was given a table in chunks that another schema encodes, "
                "or none. Nothing was trained or charged. Pass the same schema to both, such as "
                "ParquetRows(path, learner.schema, named=True)."
            )
        return Given((X, y, persons), encoded_by is not None)
    if schema is None:
        return Given((X, y, persons), False)
    from consilience.tables.chunks import in_chunks

    if hasattr(X, "__dask_graph__"):
        from consilience.learners.partitions import DaskRows

        _refuse_twice(y is None, "The schema names the column of the labels in a Dask table")
        return Given((DaskRows(X, schema=schema, named=True), None, persons), True)
    _refuse_twice(persons is None or schema.person is None, "The schema names a column of persons")
    chunks = in_chunks(schema, X) if y is None else None
    if chunks is not None:
        return Given((chunks, None, persons), True)
    encoded = schema.encode(X, y)
    whose = persons if schema.person is None else encoded.persons
    return Given((encoded.X, schema.name_labels(encoded.y), whose), True)


def rows_of(schema: Schema | None, X: Rows) -> Rows:
    """Return the rows to predict for: a table is encoded by the schema, if there is one."""
    from consilience.tables.schema import Encoded

    if isinstance(X, Encoded):
        return X.X
    return X if schema is None else schema.encode_features(X)


def _refuse_twice(fits: bool, reason: str) -> None:
    if not fits:
        raise SettingsError(
            f"{reason}, and they were given a second time. Nothing was trained or charged. Pass "
            "them once."
        )
