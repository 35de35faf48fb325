"""Every exception and warning that this package raises on purpose.

::

    ConsilienceError
    ├── SettingsError         (also a ValueError) a parameter is wrong: change the call
    ├── SchemaMismatch        (also a ValueError) the table does not fit the schema: fix either
    ├── BudgetExceeded        the data owner's limit is too low: ask for less, or ask the owner
    ├── GuaranteeVoid         what you asked for has no guarantee: use a variant that has one
    ├── LedgerDamaged         the charges cannot be trusted or written: stop, restore a backup
    ├── ContributionRejected  the hub does not accept this file
    └── HubUnavailable        nothing was lost: try again later

    UserWarning
    ├── PrivacyLeakWarning    something beside the learner saw the records: no guarantee covers it
    └── RecordsWarning        the records do not fit what was declared: the model will be poor

A message has four short parts: what was asked, what is wrong, what state things are in, and what to
do. It may show settings. It never shows anything computed from records. Other libraries keep no
such rule, so methods that see records are `shielded`: of an error from outside this package only
sentences that are known to hold no value reach the user.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, TypeVar


class ConsilienceError(Exception):
    """Root of the tree: catches everything raised on purpose, and nothing else.

    Examples
    --------
    >>> import consilience as cs
    >>> try:
    ...     cs.Numeric("age", 120, 0)
    ... except cs.ConsilienceError as error:
    ...     print(type(error).__name__)
    SettingsError
    """


class SettingsError(ConsilienceError, ValueError):
    """A parameter has a value that cannot work.

    Examples
    --------
    >>> import consilience as cs
    >>> try:
    ...     cs.PrivateLogisticRegression(epsilon=-1.0).fit([[0.1]], [0])
    ... except cs.SettingsError as error:
    ...     print(error)
    The 'epsilon' ...
    """


class SchemaMismatch(ConsilienceError, ValueError):
    """A table does not have the shape or kind that its schema declares.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> try:
    ...     schema.encode({"weight": [70], "ill": ["no"]})
    ... except cs.SchemaMismatch as error:
    ...     print(error)
    The table does not fit the schema: ...
    """


class BudgetExceeded(ConsilienceError):
    """A charge exceeds what the data owner allowed.

    Examples
    --------
    >>> import tempfile
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> ledger = cs.Ledger(tempfile.mkdtemp() + "/ward.ledger")
    >>> _ = ledger.allow("ward", cs.Budget(epsilon=1.0))
    >>> learner = cs.PrivateLogisticRegression(epsilon=2.0, schema=schema)
    >>> try:
    ...     learner.fit(table, ledger=ledger, dataset="ward")
    ... except cs.BudgetExceeded as error:
    ...     print(error)
    Data set 'ward' ...
    """


class GuaranteeVoid(ConsilienceError):
    """The requested computation has no privacy guarantee, or one that does not hold.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> settings = {"mechanism": "matrix", "calibration": "thesis"}  # its proof has a gap
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, schema=schema, **settings)
    >>> try:
    ...     learner.fit(table)
    ... except cs.GuaranteeVoid as error:
    ...     print(error)
    The thesis' matrix perturbation ... has no guarantee at any delta < 1: ...
    """


class LedgerDamaged(ConsilienceError):
    """The ledger file was edited, truncated, or cannot be read or written.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import consilience as cs
    >>> file = Path(tempfile.mkdtemp()) / "ward.ledger"
    >>> _ = file.write_text("not a ledger")
    >>> try:
    ...     cs.Ledger(file).balance("ward")
    ... except cs.LedgerDamaged as error:
    ...     print(type(error).__name__)
    LedgerDamaged
    """


class ContributionRejected(ConsilienceError):
    """A file does not satisfy what its study demands.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import consilience as cs
    >>> file = Path(tempfile.mkdtemp()) / "contribution.safetensors"
    >>> _ = file.write_bytes(b"something else")
    >>> try:
    ...     cs.Contribution.load(file)
    ... except cs.ConsilienceError as error:
    ...     print(type(error).__name__)
    ContributionRejected
    """


class HubUnavailable(ConsilienceError):
    """The hub did not answer, or not in time.

    Examples
    --------
    >>> import consilience as cs
    >>> from consilience.files.sealed import SigningKey
    >>> from consilience.site.client import HubClient
    >>> key = SigningKey.generate()
    >>> hub = HubClient("http://127.0.0.1:9", key, key.public)  # where nobody answers
    >>> try:
    ...     hub.fetch_release("beds")
    ... except cs.HubUnavailable as error:
    ...     print(error)
    The hub at http://127.0.0.1:9 did not answer ...
    """


class PrivacyLeakWarning(UserWarning):
    """Something learned from the same records that the guarantee does not cover.

    Examples
    --------
    >>> import warnings
    >>> import numpy as np
    >>> import consilience as cs
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X = np.sin(np.arange(1200.0)).reshape(400, 3) / 2
    >>> y = (X[:, 0] + 0.3 * X[:, 1] > 0).astype(int)
    >>> learner = cs.PrivateLogisticRegression(epsilon=1.0, data_norm=9.0)
    >>> model = make_pipeline(StandardScaler(), learner)
    >>> with warnings.catch_warnings(record=True, action="always") as said:
    ...     _ = model.fit(X, y)
    >>> said[0].category.__name__
    'PrivacyLeakWarning'
    """


class RecordsWarning(UserWarning):
    """The records do not fit what was declared, so that the model will be poor.

    Whether it is shown depends on the records. It is shown where they are, and is in no file.

    Examples
    --------
    >>> import warnings
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> months = {"age": [180, 420, 780, 1020] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> with warnings.catch_warnings(record=True, action="always") as said:
    ...     _ = cs.PrivateLogisticRegression(epsilon=1.0, schema=schema).fit(months)
    >>> said[0].category.__name__
    'RecordsWarning'
    """


def warn(message: str, kind: type[Warning]) -> None:
    """Warn whoever called this package, itself or through scikit-learn, at the line of the call."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame) in (_package(sys._getframe()), "sklearn"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


# What scikit-learn says about shapes, types and names of columns, and what to do about it. The part
# that a pattern does not match is cut off: it may show values, or recommend an imputer.
_NUMBERS = (
    "Declare the columns in a Schema, which turns texts and categories into numbers, and pass "
    "schema=schema to the learner; a date becomes a number first, such as an age."
)
_KNOWN: Mapping[str, str] = {
    r"This \w+ instance is not fitted yet\..*": "",
    r"Found array with (dim )?\d+[^\n]*": "Check that the table has records and columns.",
    r"Found input variables with inconsistent numbers of samples: [\[\]\d, ]+": (
        "Pass one label for each row."
    ),
    r"\w+ has \d+ features, but \w+ is expecting \d+ features[^\n]*": (
        "Pass the columns of the training, in their order; with schema=schema they are found by "
        "name."
    ),
    r"(Input|Data) (\w+ )?contains (NaN|infinity or a value too large for dtype\('\w+'\))": (
        "Declare in a Schema what a missing value becomes, such as Numeric(..., missing='middle') "
        "or unknown_label=..., and pass schema=schema to the learner; infinite values count as the "
        "bound there. No guarantee covers values that are filled in from other records, as an "
        "imputer does."
    ),
    r"[\w.]+\(\) (got an unexpected keyword|missing|takes)[^\n]*": "Correct the call.",
    r"\w+\(\) argument must be a string or a (real )?number, not '\w+'": _NUMBERS,
    r"Expected 2D array, got (1D|scalar) array instead": (
        "Reshape your data: one row for each record, one column for each feature."
    ),
    r"y should be a 1d array, got an array of shape [(\d, )]+ instead": (
        "Pass one column of labels."
    ),
    r"y cannot be None": (
        "Pass the labels, or a table that has them to a learner with schema=schema."
    ),
    r"This \w+ estimator requires y to be passed, but the target y is None": (
        "Pass the labels, or a table that has them to a learner with schema=schema."
    ),
    r"Unknown label type: [\w-]+": (
        "Declare the labels as classes=[...]; to predict a number, use PrivateRidge."
    ),
    r"Complex data not supported": "Pass real numbers.",
    r"Sparse data was passed[^\n]*": "Linear learners take sparse rows.",
    r"Sparse matrices? [^\n]*64-bit[^\n]*": "Pass indices of 32 bits.",
    r"The feature names should match those that were passed during fit\..*": (
        "Pass the columns of the training; with schema=schema their order does not matter."
    ),
    r"could not convert string to float": _NUMBERS,
    r"The DType <class '[\w.]+'> could not be promoted by <class '[\w.]+'>": _NUMBERS,
    r"dtype='numeric' is not compatible with arrays of bytes/strings": _NUMBERS,
}
_SEES_RECORDS = (
    *("fit", "predict", "predict_proba", "decision_function", "score", "transform"),
    *("make_task", "predict_apart"),
)
Kind = TypeVar("Kind", bound=type)


def shield(kind: Kind, names: Iterable[str] = _SEES_RECORDS) -> Kind:
    """Shield the methods of a class that are given records; return the class."""
    for name in names:
        method = inspect.getattr_static(kind, name, None)  # not what a descriptor would return
        if inspect.isfunction(method) and not hasattr(method, "_is_shielded"):
            setattr(kind, name, shielded(method))
    return kind


def _sayable(text: str) -> str | None:
    """Return what may be said of another library's message, and what to do; None if nothing."""
    for pattern, advice in _KNOWN.items():
        if (said := re.match(pattern, text, re.DOTALL)) is not None:
            known = said[0].rstrip(". \n")
            return f"{known}. Nothing was computed. {advice}" if advice else said[0]
    return None


def shielded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with errors that repeat no value of the records it is given.

    Errors of this package pass, and those of the operating system. Of others, only what they say
    about shapes, types and columns is kept; the original error is dropped, for its traceback would
    show it. Values too large for arithmetic give no warning: it would tell that they are there.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        import numpy as np

        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return function(*arguments, **settings)
        except ConsilienceError as problem:
            if problem.__context__ is not None:
                # An error that it was raised for may quote values, even where it is not shown.
                problem.__context__ = problem.__cause__ = None
            raise
        except (ImportError, MemoryError, PrivacyLeakWarning, RecordsWarning):
            raise  # warnings are raised where somebody made errors of them
        except Exception as problem:
            if isinstance(problem, OSError) and problem.errno is not None:
                raise
            kind, said = type(problem), _sayable(str(problem))
            if said == str(problem):
                raise
        if said is not None:
            is_foreign = kind is ValueError or kind.__module__.startswith("numpy")
            raise (SchemaMismatch if is_foreign else kind)(said)
        owner = type(arguments[0]).__name__ if arguments else ""
        name = function.__name__ if function.__qualname__ == function.__name__ else owner
        raise SchemaMismatch(
            f"{name} failed on the records or labels that it was given ({kind.__name__}; its text "
            "is not shown, because it may repeat their values). Nothing was computed. Check that "
            "every column is numeric, every row has the same columns and every label is known. "
            "Schema.encode checks a table and says what is wrong with it."
        )

    call._is_shielded = True  # type: ignore[attr-defined]
    return call
