"""Where a learner's records come from: encoded by a schema, or in a way that nobody knows.

A guarantee covers what the learner makes of its rows. How these were made it covers only where a
schema made them, because a schema encodes each record by itself. Elsewhere the guarantee names an
assumption, and `warn_of_leaks` warns where there is evidence against it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from consilience.errors import PrivacyLeakWarning, RecordsWarning, SettingsError, warn

if TYPE_CHECKING:
    from consilience.tables.schema import Schema
    from consilience.tables.values import Value

Rows: TypeAlias = Any  # a table as users pass it

HOW_ENCODED = "how the columns were scaled or encoded did not depend on the records"
MISFIT = (
    "Training goes on, but the model will be poor. Declare bounds from domain knowledge, in the "
    "unit of the column; never take them from the records. This warning depends on the records: "
    "keep it where they are."
)
_INSTEAD = (
    "Training goes on, but what guarantee_ assumes is false. Declare bounds in a Schema, which "
    "encodes each record by itself: {owner}(..., schema=schema), or schema.transformer() as the "
    "only step before it."
)
_BEHIND = (
    "{owner} is fitted behind {step} in a pipeline. {step} learns from the same records, which no "
    f"guarantee covers. {_INSTEAD}"
)
_SCALED = (
    "{owner} was given columns {how}: they were scaled by statistics of the same records, which no "
    f"guarantee covers. {_INSTEAD} This warning depends on the records: keep it where they are."
)
_SEARCHED = (
    "{owner} is fitted by a search or a cross-validation of scikit-learn, whose scores of private "
    "records, and the choice that they lead to, no guarantee covers. Training goes on. On private "
    "records use PrivateTuning, with public ones choose_on_public."
)
_REPEATED = (
    "{owner} is fitted by {tool}, which may fit it several times, or learn from the same "
    "records beside it. Each fit costs epsilon anew, and no guarantee covers the rest. "
    "Training goes on. Fit the learner itself: it takes several classes under one budget."
)
# Of scikit-learn; a search is told apart by its scores.
_REPEATING = ("calibration", "ensemble", "feature_selection", "multiclass", "multioutput")
_EXACTLY = 1e-12  # as scaling by the ends leaves them
_ROUNDED = 1e-6  # what single precision and long sums may leave of a mean of 0


class Given(NamedTuple):
    """What `fit` was given, as a learner takes it: rows, labels and persons."""

    records: tuple[Rows, ArrayLike | None, ArrayLike | None]
    is_encoded: bool  # by a schema


def take_in(
    schema: Schema | None,
    X: Rows,
    y: ArrayLike | None = None,
    persons: ArrayLike | None = None,
    *,
    in_parts: bool = True,
) -> Given:
    """Encode a table by the schema, if there is one; take apart what a schema encoded.

    A large Parquet table is read in chunks where the learner takes it `in_parts`.
    """
    from consilience.tables.encoding import ENCODED
    from consilience.tables.schema import Encoded

    if isinstance(X, Encoded):
        _refuse_twice(y is None and persons is None, "Encoded records bring labels and persons")
        labels = X.y if schema is None else schema.name_labels(X.y)
        return Given((X.X, labels, X.persons), X.X in ENCODED)
    if callable(getattr(X, "chunks", None)):
        encoded_by = getattr(X, "schema", None)
        if schema is not None and encoded_by != schema:
            raise SettingsError(
                "A learner with a schema was given a table in chunks that another schema encodes, "
                "or none. Nothing was trained or charged. Pass the same schema to both, such as "
                "ParquetRows(path, learner.schema, named=True)."
            )
        if schema is not None and not _names_labels(X, schema.classes):
            raise SettingsError(
                f"A learner with a schema was given {type(X).__name__} whose labels are places "
                "among the schema's classes (0, 1, …), and not the classes themselves. Nothing was "
                f"trained or charged. Pass named=True to {type(X).__name__}."
            )
        return Given((X, y, persons), encoded_by is not None and _reads_by_schema(X))
    if schema is None:
        from consilience.tables.transformer import is_untouched

        return Given((X, y, persons), is_untouched(X))
    from consilience.tables.chunks import in_chunks

    if hasattr(X, "__dask_graph__"):
        from consilience.learners.partitions import DaskRows

        _refuse_twice(y is None, "The schema names the column of the labels in a Dask table")
        return Given((DaskRows(X, schema=schema, named=True), None, persons), True)
    _refuse_twice(persons is None or schema.person is None, "The schema names a column of persons")
    chunks = in_chunks(schema, X) if y is None and in_parts else None
    if chunks is not None:
        return Given((chunks, None, persons), True)
    table = schema.read(X, y)
    encoded = schema.encode(table)
    for name in schema.find_misfits(table):
        warn(
            f"More than half of the values in column {name!r} are beyond their declared bounds and "
            f"count as the bound. {MISFIT}",
            RecordsWarning,
        )
    whose = persons if schema.person is None else encoded.persons
    return Given((encoded.X, schema.name_labels(encoded.y), whose), True)


def _names_labels(source: object, classes: Sequence[Value] | None) -> bool:
    """Tell whether labels in chunks are the classes themselves, which may be places as well."""
    places = list(range(len(classes or ())))
    return getattr(source, "names", classes) is not None or list(classes or ()) == places


def _reads_by_schema(source: object) -> bool:
    """Tell whether these are chunks of our own, which nothing but their schema encodes."""
    from consilience.learners.partitions import DaskRows
    from consilience.tables.chunks import ParquetRows

    return type(source) in (ParquetRows, DaskRows)


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


def warn_of_leaks(owner: object, given: Given) -> None:
    """Warn where something beside the learner learned from its records, if that can be seen."""
    name = type(owner).__name__
    callers = list(_callers())
    if None in callers:
        warn(_SEARCHED.format(owner=name), PrivacyLeakWarning)
    elif tool := next((caller for caller in callers if isinstance(caller, str)), None):
        warn(_REPEATED.format(owner=name, tool=tool), PrivacyLeakWarning)
    if given.is_encoded:
        return
    steps = (_learning_step(pipeline, owner) for pipeline in callers)
    if step := next(filter(None, steps), None):
        warn(_BEHIND.format(owner=name, step=step), PrivacyLeakWarning)
    elif how := _scaled_by_records(given.records[0]):
        warn(_SCALED.format(owner=name, how=how), PrivacyLeakWarning)


def _callers() -> Iterator[object]:
    """Yield the pipelines of scikit-learn that this fit is a step of, and None for a search.

    Of other tools that fit it, their module. A step is told nothing of the others, so the only
    place to find them is the stack.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module == "sklearn.pipeline":
            yield frame.f_locals.get("self", frame)
        elif module.startswith("sklearn.model_selection."):
            yield None
        elif module.startswith("sklearn.") and module.split(".")[1] in _REPEATING:
            yield module.rpartition("._")[0] or module
        frame = frame.f_back


def _learning_step(pipeline: object, owner: object) -> str | None:
    """Return the first step before the learner that learns from the records it is fitted on."""
    steps = [step for _, step in getattr(pipeline, "steps", ())]
    place = next((i for i, step in enumerate(steps) if type(step) is type(owner)), len(steps) - 1)
    return next((type(step).__name__ for step in steps[:place] if _learns(step)), None)


def _learns(step: object) -> bool:
    """Tell whether a step of a pipeline learns from private records what no guarantee covers."""
    from sklearn.compose import ColumnTransformer
    from sklearn.frozen import FrozenEstimator
    from sklearn.pipeline import FeatureUnion, Pipeline
    from sklearn.utils import get_tags

    from consilience.learners.base import PrivateLearner

    if isinstance(step, ColumnTransformer | FeatureUnion | Pipeline):
        return any(map(_learns, step.get_params().values()))
    # One that was fitted before does not learn here, and a private one has its own guarantee.
    if not hasattr(step, "fit") or isinstance(step, FrozenEstimator | PrivateLearner):
        return False
    return bool(get_tags(step).requires_fit)


def _scaled_by_records(X: Rows) -> str | None:
    """Say how the columns are scaled, if only their own statistics can have scaled them so."""
    if sparse.issparse(X) or hasattr(X, "__dask_graph__") or hasattr(X, "chunks"):
        return None
    try:
        rows = np.asarray(X, dtype=np.float64)
    except (TypeError, ValueError):
        return None  # whether they can be trained on is checked elsewhere
    if rows.ndim != 2 or len(rows) < 3:
        return None
    n = len(rows)
    sums = np.ones(n) @ rows
    for column in rows.T[np.abs(sums) <= _ROUNDED * n]:
        variance = column.var()
        # A column of as many -1 as +1 has this mean and deviation too, whoever coded it.
        if (
            not (np.abs(column) == 1.0).all()
            and min(abs(variance - 1), abs(variance * n / (n - 1) - 1)) <= _ROUNDED
        ):
            return "with mean 0 and standard deviation 1"
    return "that all reach exactly 0 and 1" if _is_stretched(rows) else None


def _is_stretched(rows: NDArray[np.float64]) -> bool:
    """Tell whether all columns end at 0 and 1, and two or more are not truth values."""
    n_numbers = 0
    for column in rows.T:
        low, high = column.min(), column.max()
        if low != high:
            if max(abs(low), abs(high - 1)) > _EXACTLY:
                return False
            n_numbers += bool(((column > 0.0) & (column < 1.0)).any())
    return n_numbers >= 2
