"""What users pass to learners, checked: tables, labels, persons, and tables in chunks.

Every check runs before anything is charged or trained, and no message repeats a value of a record.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse.linalg import norm as norms
from sklearn.base import BaseEstimator
from sklearn.utils.multiclass import check_classification_targets

from consilience.errors import RecordsWarning, SchemaMismatch, SettingsError, warn
from consilience.learners.base import PrivateLearner, Rows
from consilience.learners.provenance import HOW_ENCODED, MISFIT, rows_of
from consilience.tables.encoding import SEEN, is_mostly_beyond
from consilience.tables.groups import identify
from consilience.tables.problems import quietly
from consilience.tables.values import as_array, as_doubles

if TYPE_CHECKING:
    from consilience.learners.erm import Chunks

Array: TypeAlias = NDArray[Any]
Chunked: TypeAlias = Any  # a table in chunks: chunks(), n_features, n_records, perhaps gather()
Learner: TypeAlias = PrivateLearner[Any, Any]

_FEW = 10  # labels: of so many it warns in no table
_MANY = 20  # labels: of fewer, a column of truth values may be equal by chance
READ_LABELS = "the set of labels is public: it was read from the training labels"
MAY_ASSUME = frozenset({READ_LABELS, HOW_ENCODED})  # of records; learners may assume more


def validate_table(
    learner: BaseEstimator, X: Rows, y: ArrayLike | None = "no_validation", **settings: object
) -> Any:
    """Validate as scikit-learn does; learners are shielded, so no error repeats a value."""
    from sklearn.utils.validation import validate_data

    if settings.get("reset") is False:
        X = rows_of(getattr(learner, "schema", None), X)
    if _are_plain(X, y, cast(int, settings.get("ensure_min_samples", 1))):
        # The rest of its checks takes longer than training on a small table.
        reset = bool(settings.get("reset", True))
        return validate_data(learner, X, y, skip_check_array=True, reset=reset)
    _check_frames(type(learner).__name__, X, y)
    # Before the check: finite parts of one entry may add up to infinity.
    X = as_doubles(X) if sparse.issparse(X) else X
    return validate_data(learner, X, y, **{"accept_sparse": "csr", "dtype": np.float64, **settings})


def _are_plain(X: Rows, y: Any, least: int) -> bool:
    """Tell whether nothing is wrong with arrays of numbers, or scikit-learn has to say what is."""
    if not (type(X) is np.ndarray and X.dtype == np.float64 and X.ndim == 2):
        return False
    if X.size == 0 or len(X) < least:
        return False
    numbers = [X]
    if not (isinstance(y, str) and y == "no_validation"):
        if not (type(y) is np.ndarray and y.shape == X.shape[:1] and y.dtype.kind in "iubf"):
            return False
        numbers.append(y)
    return all(np.isfinite(each.sum()) for each in numbers)  # no sum of others is


def _check_frames(owner: str, X: Rows, y: ArrayLike | None) -> None:
    """Refuse what scikit-learn would take in another way than it was meant, or explain badly."""
    problem = fix = ""
    if isinstance(X, str | os.PathLike):
        raise SettingsError(
            f"{owner} was given a path without a schema that says how to read what is there. "
            "Nothing was computed. Pass schema=schema."
        )
    names = [*X.columns] if hasattr(X, "iloc") else []
    if len(set(names)) < len(names):
        problem, fix = "two columns of one name", "Pass a frame in which each has its own."
    elif len({isinstance(name, str) for name in names}) > 1:
        problem = "a frame with names of columns of which only some are text"
        fix = "Pass frame.rename(columns=str)."
    elif isinstance(X, np.ma.MaskedArray) or isinstance(y, np.ma.MaskedArray):
        problem = "a masked array, whose masked values would count like all others"
        fix = "Pass X.filled(np.nan), and say in a Schema what a missing value becomes."
    elif _lacks_a_label(y):
        problem = "labels of which one is missing"
        fix = "Drop such records, each by itself; a Schema's unknown_label says what they count as."
    elif _is_shuffled(X, y):
        problem = "rows and labels with the same index in another order"
        fix = "Pass y.loc[X.index], or y.to_numpy() if they belong together in their order."
    if problem:
        raise SchemaMismatch(f"{owner} was given {problem}. Nothing was computed. {fix}")


def _lacks_a_label(y: ArrayLike | None) -> bool:
    """Tell whether one of some objects is absent; of numbers, scikit-learn tells."""
    kind = getattr(y, "dtype", None)
    objects = isinstance(y, list | tuple) if kind is None else kind == np.dtype(object)
    return objects and bool(quietly(lambda: as_array(y).null_count))


def _is_shuffled(X: Rows, y: ArrayLike | None) -> bool:
    """Tell whether rows and labels of pandas have the same index in another order."""
    one, other = cast(tuple[Rows, Rows], (getattr(X, "index", None), getattr(y, "index", None)))
    if not (hasattr(one, "equals") and hasattr(other, "equals")) or one.equals(other):
        return False
    return len(one) == len(other) and set(one) == set(other)


def validate_records(
    learner: Learner, X: Rows, y: ArrayLike | None, **settings: object
) -> tuple[Any, Array]:
    """Validate records to train on.

    Under add-remove even the absence of records is private, so an empty table is accepted.
    """
    empty = learner.neighbours == "add-remove" and getattr(learner, "classes", ()) is not None
    X, y = validate_table(learner, X, y, ensure_min_samples=0 if empty else 1, **settings)
    labels = np.asarray(y)
    if settings.get("y_numeric") and labels.dtype.kind not in "iubf":
        raise SchemaMismatch(
            f"{type(learner).__name__} was given labels that are no numbers. Nothing was trained "
            "or charged. Pass numbers; for classes use a classifier."
        )
    if learner.promises and _holds(X, labels):
        warn(
            "A column of X is equal to the labels. Training goes on, but what the model learns is "
            "of no use where they are unknown. Drop that column. This warning depends on the "
            "records: keep it where they are.",
            RecordsWarning,
        )
    return X, labels


def _holds(X: Rows, labels: Array) -> bool:
    """Tell whether a column is equal to labels that are numbers, and not all the same."""
    if sparse.issparse(X) or labels.dtype.kind not in "iubf" or len(labels) < _MANY:
        return False
    if (labels[:1] == labels).all():
        return False
    alike = np.flatnonzero((X[:SEEN] == labels[:SEEN, None]).all(axis=0))
    return any(np.array_equal(X[:, column], labels) for column in alike)


def warn_of_long_rows(learner: Learner, X: Rows, norm: float) -> None:
    """Warn if more than half of some rows are more than twice as long as declared."""
    if not learner.promises:
        return
    some = X[:: max(1, X.shape[0] // SEEN)]
    lengths = norms(some, axis=1) if sparse.issparse(some) else np.linalg.norm(some, axis=1)
    if is_mostly_beyond(lengths, 0.0, 2 * norm):
        _warn_of_misfit(
            f"More than half of the rows are more than twice as long as data_norm={norm:g} and are "
            "scaled down to it, so that only their direction counts"
        )


def warn_of_far_values(
    learner: Learner, values: Array, low: ArrayLike, high: ArrayLike, what: str
) -> None:
    """Warn if more than half of the numbers are beyond their declared bounds."""
    if learner.promises and is_mostly_beyond(values, low, high):
        _warn_of_misfit(f"More than half of the {what} and count as the bound")


def _warn_of_misfit(problem: str) -> None:
    warn(
        f"{problem}. {MISFIT}",
        RecordsWarning,
    )


def check_persons(learner: Learner, persons: ArrayLike | None, n_records: int) -> Array | None:
    """Return the number of each record's person; None where single records are the unit."""
    if learner.unit == "record":
        _refuse_persons(learner, persons)
    if learner.unit != "person":  # whose a record is makes no difference where a site is hidden
        return None
    if persons is None:
        raise SettingsError(
            f"{type(learner).__name__} with unit='person' needs to know whose each record is. "
            "Nothing was trained. Pass persons=..., one id per record."
        )
    if np.shape(persons) != (n_records,):
        raise SchemaMismatch(
            "'persons' must hold one id per record. Nothing was trained. Check its length."
        )
    return identify(persons)


def _refuse_persons(learner: Learner, persons: ArrayLike | None) -> None:
    if persons is not None:
        raise SettingsError(
            f"{type(learner).__name__} was given persons, but hides single records "
            "(unit='record'). Nothing was trained. Set unit='person' and records_per_person, "
            "or drop persons."
        )


def declared_classes(learner: Learner) -> Array | None:
    """Return the declared labels in their order, or None if the training labels decide."""
    declared = getattr(learner, "classes", None)
    if declared is None:
        return None
    classes = np.asarray(declared)
    if classes.ndim != 1 or len(np.unique(classes)) < max(2, len(classes)):
        raise SettingsError(
            f"The 'classes' parameter of {type(learner).__name__} must be a list of at least two "
            f"different labels. Got {declared!r} instead. Nothing was trained."
        )
    if any(isinstance(label, int | float) and abs(label) >= 2**53 for label in classes.tolist()):
        raise SettingsError(
            f"The 'classes' parameter of {type(learner).__name__} has a number beyond 2^53, where "
            "one label that is no whole number would round all others. Nothing was trained. "
            "Declare such labels as text."
        )
    return classes


def read_classes(labels: Array) -> Array:
    """Return the labels that there are, in their order; refuse those that are no classes."""
    classes = _distinct_labels(labels)
    if len(classes) == 1:
        raise SchemaMismatch(
            "All labels are the same, so that there is one class and nothing to learn. Nothing was "
            "trained or charged. Declare the classes that there may be as classes=[...]: a site "
            "that lacks one of them can then take part."
        )
    return classes


def _distinct_labels(labels: Array) -> Array:
    """Return the different labels, unless scikit-learn finds that they are no classes.

    Asking it takes longer than training on a small table, so that few whole numbers or texts are
    not asked about.
    """
    if labels.dtype.kind in "iubUf":
        classes = np.unique(labels)
        if len(classes) <= _FEW and (
            classes.dtype.kind != "f" or np.array_equal(classes, np.rint(classes))
        ):
            return np.asarray(classes)
    if labels.size:
        check_classification_targets(labels)
    return np.unique(labels)


def label_codes(owner: str, classes: Array, labels: Array) -> Array:
    """Return each label's place among the classes, or refuse in the name of `owner`."""
    if labels.ndim != 1:
        raise SchemaMismatch(
            f"{owner} was given labels that are not one for each record. Nothing was trained. Pass "
            "one column of labels, without a second dimension."
        )
    if labels.size and {_kind(labels), _kind(classes)} == {"numbers", "text"}:
        raise SchemaMismatch(
            f"{owner} was given labels that are {_kind(labels)}, but its declared classes are "
            f"{_kind(classes)}. Nothing was trained or charged. Declare classes of the labels' own "
            "type (1 is a number, '1' is text), or convert the labels; a Schema takes both for the "
            "same."
        )
    order = np.argsort(classes, kind="stable")
    codes = order[np.minimum(np.searchsorted(classes, labels, sorter=order), len(classes) - 1)]
    if not np.array_equal(classes[codes], labels):
        raise SchemaMismatch(
            f"{owner} found a label that is not among its declared classes. Nothing was trained or "
            "charged. Add it to 'classes', or remove such records before training."
        )
    return np.asarray(codes)


def _kind(labels: Array) -> str:
    """Say what labels are, by their types alone."""
    for name, kinds, types in (("numbers", "iubf", Number), ("text", "U", str)):
        objects = labels.dtype.kind == "O" and all(isinstance(label, types) for label in labels)
        if labels.dtype.kind in kinds or objects:
            return name
    return "others"


def as_chunks(X: Rows, y: Any) -> Chunked | None:
    """Return the table in chunks that `X` is or, as Dask's, holds; None for a table in memory."""
    if hasattr(X, "__dask_graph__"):
        from consilience.learners.partitions import DaskRows

        return DaskRows(X, y)
    return X if callable(getattr(X, "chunks", None)) else None


def chunk_classes(
    learner: Learner, source: Chunked, persons: ArrayLike | None
) -> tuple[Array, Array]:
    """Return the classes of a table in chunks, and the labels that its chunks hold for them.

    Refuses what such a table cannot tell (its classes) or do (cap the records of a person).
    """
    check_record_unit(learner, source, persons)
    names, classes = getattr(source, "names", None), getattr(learner, "classes", ())
    learner.n_features_in_ = source.n_features
    if (
        names is not None
        and learner.unit != "person"
        and (classes is None or list(classes) == list(names))
    ):
        return np.asarray(names), np.arange(len(names))
    if classes is None or names is not None or learner.unit == "person":
        raise SettingsError(
            f"{type(learner).__name__} was given a table in chunks, which needs declared classes "
            "and unit='record'. Nothing was trained. Pass the classes of the table; persons can "
            "be capped only in one that fits in memory."
        )
    return np.asarray(classes), np.asarray(classes)


def check_record_unit(learner: Learner, source: Chunked, persons: ArrayLike | None) -> None:
    """Refuse persons, and a table capped per person, where single records are hidden.

    Which records such a cap keeps depends on other records: one more record of a person can push
    out another one, so a record moves more than itself.
    """
    if learner.unit != "record":
        return
    _refuse_persons(learner, persons)
    schema = getattr(source, "schema", None)
    if schema is not None and schema.person is not None:
        raise SettingsError(
            f"{type(learner).__name__} hides single records (unit='record'), but its table names "
            "persons and keeps some records of each, so that records depend on one another. "
            "Nothing was trained or charged. Train in memory with unit='person', or drop the "
            "schema's person."
        )


def count_records(learner: Learner, source: Chunked, encode: Callable[[Array], Array]) -> int:
    """Read all chunks once and count their records; bad ones are refused before a charge."""
    count = partial(_count, type(learner).__name__, source.n_features, encode)
    counts = source.gather(count) if hasattr(source, "gather") else [count(source.chunks())]
    check_count(learner, source, sum(counts))
    return sum(counts)


def _count(owner: str, n_features: int, encode: Callable[[Array], Array], chunks: Chunks) -> int:
    n_records = 0
    for X, y in read_chunks(owner, n_features, chunks):
        check_values(owner, X)
        encode(y)
        n_records += len(y)
    return n_records


def check_count(learner: Learner, source: Chunked, n_records: int) -> None:
    """Refuse a table in chunks whose number of records is not the declared one."""
    if source.n_records is not None and source.n_records != n_records:
        raise SchemaMismatch(
            f"{type(learner).__name__} was given chunks that do not hold the declared number of "
            "records. Nothing was trained or charged. Correct the source's n_records."
        )
    if n_records == 0 and learner.neighbours == "replace-one":
        raise SchemaMismatch(
            f"{type(learner).__name__} was given chunks without a record. Nothing was trained or "
            "charged. Check them."
        )


def read_chunks(owner: str, n_features: int, chunks: Chunks) -> Chunks:
    """Yield chunks of any kind as dense doubles or CSR rows, with one label for each.

    Every pass over a table reads it through here: what the first one accepted fails in no later
    one, and labels of another shape, whose comparison with scores would mix records, never pass.
    """
    for X, y in chunks:
        rows, labels = as_doubles(X), np.asarray(y)
        # Of a table with two dimensions, this is false of labels with any other number than one.
        if rows.shape != (*labels.shape, n_features) or rows.dtype.kind not in "fiub":
            raise _bad_chunk(owner, "is not a table of numbers with one label for each record")
        yield rows, labels


def check_values(owner: str, X: Rows, *, finite: bool = True) -> None:
    """Refuse a chunk with values that cannot be trained on.

    Without `finite`, values may be missing but not infinite.
    """
    values = X.data if sparse.issparse(X) else X
    if not (np.isfinite(values) if finite else ~np.isinf(values)).all():
        raise _bad_chunk(owner, "has a value that is missing or infinite")


def _bad_chunk(owner: str, problem: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{owner} was given a chunk that {problem}. Nothing was trained or charged. Correct the "
        "source; a Schema says what missing values become."
    )
