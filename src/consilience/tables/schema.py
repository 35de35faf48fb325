"""What is publicly agreed about a table: its columns, their bounds and categories, its label.

A `Schema` is agreed before anyone looks at records, and says alone how tables become arrays
(`encoding.py`).
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from consilience.errors import SettingsError
from consilience.tables.groups import CAP, is_cap
from consilience.tables.problems import require
from consilience.tables.steps import MOST_BINS, bin_features
from consilience.tables.values import (
    Value,
    as_number,
    as_texts,
    find_places,
    read_numbers,
    spell,
    spell_all,
    to_python,
)

if TYPE_CHECKING:
    from consilience.tables.encoding import Encoder
    from consilience.tables.transformer import SchemaTransformer

T = TypeVar("T")


@dataclass(frozen=True)
class Numeric:
    """Declare a column of numbers, which is scaled from its public bounds to [-1, 1].

    Values beyond a bound count as the bound. With `cuts` the column becomes one feature for each
    cut instead, so that linear learners fit a shape with steps rather than a straight line.

    Parameters
    ----------
    name
        Name of the column in the table.
    low, high
        Public bounds in the column's own unit, from domain knowledge.
    missing
        What an absent or unreadable number becomes: an error, the ``"middle"`` of the scale, the
        middle with a second feature that marks it (``"indicator"``), or a number between the
        bounds.
    transform
        For heavy tails. ``"log"`` takes logarithms of values and bounds, which must be positive;
        ``"log1p"`` is sign(v)·log(1+|v|).
    missing_values
        Further spellings of "absent", such as ``(-1, "?")``.
    cuts
        A number of bins, equally wide on the scale of `transform`, or public places between the
        bounds at which a new bin begins, such as ``(18, 40, 65)``. Take them from domain knowledge:
        quantiles of the records would reveal some of them.

    Examples
    --------
    >>> Numeric("age", 0, 100, cuts=4).edges
    (25.0, 50.0, 75.0)
    """

    name: str
    low: float = math.nan
    high: float = math.nan
    missing: Literal["error", "middle", "indicator"] | float = "error"
    transform: Literal["log", "log1p"] | None = None
    missing_values: tuple[Value, ...] = ()
    cuts: int | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        low, high = as_number(self.low), as_number(self.high)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise SettingsError(
                f"Column {self.name!r} is numeric with low={self.low!r}, high={self.high!r}; both "
                f"must be finite numbers. No record was read. Write Numeric({self.name!r}, "
                "low=..., high=...) from domain knowledge. Bounds read from the data would leak "
                "its extreme records."
            )
        of = f"of {self.name!r}"
        require(
            self.transform in {None, "log", "log1p"},
            f"transform {of}",
            self.transform,
            "None, 'log' or 'log1p'",
        )
        positive = self.transform != "log" or low > 0
        require(positive, f"low {of}", low, "positive, because transform='log'")
        apart = low < high and self.scale(low, high)[1] > 0
        require(apart, f"high {of}", high, f"above low={low:g} by more than rounding")
        if self.missing not in {"error", "middle", "indicator"}:
            number, wish = (
                as_number(self.missing),
                f"'error', 'middle', 'indicator' or a number in [{low:g}, {high:g}]",
            )
            require(low <= number <= high, f"missing {of}", self.missing, wish)
            object.__setattr__(self, "missing", number)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        object.__setattr__(
            self, "missing_values", spell_all(self.missing_values, f"missing_values {of}")
        )
        if self.cuts is not None:
            self._check_cuts(f"cuts {of}")

    def _check_cuts(self, what: str) -> None:
        whole = isinstance(self.cuts, int) and not isinstance(self.cuts, bool)
        listed = isinstance(self.cuts, tuple | list)
        n_bins = self.cuts if whole else len(self.cuts) + 1 if listed else 0  # type: ignore[arg-type]
        wish = f"a number of bins from 2 to {MOST_BINS}, or as many cuts less one"
        require(2 <= n_bins <= MOST_BINS, what, self.cuts, wish)  # type: ignore[operator]
        if listed:
            cuts = tuple(map(as_number, self.cuts))  # type: ignore[arg-type]
            ends = (self.low, *cuts, self.high)
            ascend = all(one < other for one, other in pairwise(ends))
            wish = f"ascending numbers between low={self.low:g} and high={self.high:g}"
            require(ascend, what, self.cuts, wish)
            object.__setattr__(self, "cuts", cuts)
        ascend = all(one < other for one, other in pairwise((self.low, *self.edges, self.high)))
        require(ascend, what, self.cuts, "fewer: the bounds are too close for so many bins")

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Where bins begin, from the second on; empty without `cuts`."""
        if not isinstance(self.cuts, int):
            return self.cuts or ()
        middle, half = self.scale(self.low, self.high)
        places = middle + half * np.linspace(-1, 1, self.cuts + 1)[1:-1]
        places = self.undo_transform(places)
        # Twelve digits: 1000 rather than 999.9999999999998, and the same on every machine.
        return tuple(float(f"{place:.12g}") for place in places.tolist())

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features."""
        names = [f"{self.name}>={edge:.12g}" for edge in self.edges] or [self.name]
        return (*names, f"{self.name} is missing") if self.missing == "indicator" else tuple(names)

    @cached_property
    def bin_features(self) -> NDArray[np.float64]:
        """The features of each bin and, last, of a missing value, (bin, feature)."""
        features = np.zeros((len(self.edges) + 2, len(self.feature_names)))
        features[:-1, : len(self.edges)] = bin_features(len(self.edges) + 1)
        if self.missing == "indicator":
            features[-1, -1] = 1.0
        return features

    def find_bins(self, numbers: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
        """Return each number's bin, one more for missing ones, and problems with the column."""
        missing = np.isnan(numbers)
        bins = np.searchsorted(self.edges, numbers, side="right")
        if isinstance(self.missing, float):
            bins[missing] = np.searchsorted(self.edges, self.missing, side="right")
        elif missing.any():
            bins[missing] = len(self.edges) + 1
            if self.missing == "error":
                return bins, [self.describe_missing()]
        return bins, []

    replaced = "are no numbers and count as missing"

    def find_refused(self, values: pa.Array) -> NDArray[np.bool_]:
        """Tell of each value whether encoding refuses it."""
        refused = np.isnan(read_numbers(values, self.missing_values))
        return np.asarray(refused & (self.missing == "error"))

    def find_beyond(self, values: pa.Array) -> NDArray[np.bool_]:
        """Tell of each value whether it is beyond a bound, and counts as the bound."""
        numbers = read_numbers(values, self.missing_values)
        return np.asarray((numbers < self.low) | (numbers > self.high))

    def find_replaced(self, values: pa.Array) -> NDArray[np.bool_]:
        """Tell of each value whether it is there, is no number, and counts as missing."""
        unread = np.isnan(read_numbers(values, self.missing_values)) & (self.missing != "error")
        if unread.any():
            unread &= np.asarray(as_texts(values, self.missing_values).is_valid())
        return np.asarray(unread)

    def describe_missing(self) -> str:
        """Say that a value is missing which may not be."""
        return (
            f"column {self.name!r} ({self.expects}) has a missing or unreadable value and "
            "missing='error'"
        )

    def apply_transform(self, values: Any) -> Any:
        """Return values on the scale on which bounds are linear."""
        if self.transform == "log":
            return np.log(values)
        return np.sign(values) * np.log1p(np.abs(values)) if self.transform else values

    def undo_transform(self, values: ArrayLike) -> NDArray[Any]:
        """Return values of that scale in the column's own unit."""
        if self.transform == "log":
            return np.asarray(np.exp(values))
        plain = np.asarray(values)
        return np.sign(plain) * np.expm1(np.abs(plain)) if self.transform else plain

    def scale(self, low: float, high: float) -> tuple[float, float]:
        """Return the middle of the bounds and half their distance."""
        # Halved first, because high - low may overflow.
        low, high = self.apply_transform(low) / 2, self.apply_transform(high) / 2
        return low + high, high - low

    @property
    def expects(self) -> str:
        """What the column holds, in words."""
        return f"a number in [{self.low:g}, {self.high:g}]"

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words."""
        return f"a number from {self.low:.12g} to {self.high:.12g}"


@dataclass(frozen=True)
class Categorical:
    """Declare a column of categories, which is one-hot encoded in the declared order.

    Values are compared as text, so 1, 1.0 and "1" are the same category.

    Parameters
    ----------
    name
        Name of the column in the table.
    categories
        The public list of categories.
    missing
        What an absent value becomes: an error, all zeros (``"ignore"``), or a feature of its own
        (``"indicator"``).
    unseen
        What a value that is not declared becomes: an error or all zeros (``"ignore"``).
    missing_values
        Further spellings of "absent", such as ``("?",)``.

    Examples
    --------
    >>> import consilience as cs
    >>> cs.Categorical("sex", ("f", "m"), missing="indicator").feature_names
    ('sex=f', 'sex=m', 'sex is missing')
    """

    name: str
    categories: tuple[Value, ...] = ()
    missing: Literal["error", "ignore", "indicator"] = "error"
    unseen: Literal["error", "ignore"] = "error"
    missing_values: tuple[Value, ...] = ()
    expects: ClassVar[str] = "a declared category"

    def __post_init__(self) -> None:
        of = f"of {self.name!r}"
        categories = spell_all(self.categories, f"categories {of}")
        if not categories:
            raise SettingsError(
                f"Column {self.name!r} is categorical but has no categories. No "
                f"record was read. Write Categorical({self.name!r}, categories=(...)) from the "
                "code book. Categories read from the data would reveal who is in it."
            )
        rules = {"error", "ignore", "indicator"}
        require(
            self.missing in rules, f"missing {of}", self.missing, "'error', 'ignore' or 'indicator'"
        )
        require(
            self.unseen in {"error", "ignore"}, f"unseen {of}", self.unseen, "'error' or 'ignore'"
        )
        object.__setattr__(self, "categories", categories)
        object.__setattr__(
            self, "missing_values", spell_all(self.missing_values, f"missing_values {of}")
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features."""
        names = tuple(f"{self.name}={category}" for category in self.categories)
        return (*names, f"{self.name} is missing") if self.missing == "indicator" else names

    def find_features(self, column: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
        """Return which feature is one for each record, or -1, and problems with the column."""
        codes, missing = find_places(column, self.categories, self.missing_values)
        if self.missing == "error" and missing.any():
            return codes, [
                f"column {self.name!r} ({self.expects}) has a missing value and missing='error'"
            ]
        if self.unseen == "error" and (codes[~missing] < 0).any():
            undeclared = "has a value that is not declared and unseen='error'"
            return codes, [f"column {self.name!r} ({self.expects}) {undeclared}"]
        if self.missing == "indicator":
            codes[missing] = len(self.categories)
        return codes, []

    replaced = "are not declared and count as no category"

    def find_refused(self, values: pa.Array) -> NDArray[np.bool_]:
        """Tell of each value whether encoding refuses it."""
        codes, missing = find_places(values, self.categories, self.missing_values)
        undeclared = (codes < 0) & ~missing & (self.unseen == "error")
        return np.asarray(undeclared | (missing & (self.missing == "error")))

    def find_replaced(self, values: pa.Array) -> NDArray[np.bool_]:
        """Tell of each value whether it is there, is not declared, and counts as no category."""
        codes, missing = find_places(values, self.categories, self.missing_values)
        return np.asarray((codes < 0) & ~missing & (self.unseen == "ignore"))

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words."""
        return ", ".join(map(repr, self.categories))


class Encoded(NamedTuple):
    """Hold encoded records: features, labels, and person ids if the schema has a person column.

    Learners take it as it is: ``learner.fit(schema.encode(table))``.
    """

    X: NDArray[np.float64]
    y: NDArray[Any]
    persons: NDArray[np.object_] | None

    def __repr__(self) -> str:
        return "Encoded(X, y, persons)"  # a printed record is a leak


@dataclass(frozen=True)
class Schema:
    """Declare the public facts of a study's records, fixed before anyone looks at them.

    Parameters
    ----------
    columns
        The `Numeric` and `Categorical` columns to learn from.
    label
        Name of the label column.
    classes, label_bound
        What the label is: one of these classes, in declared order, or a number that is clipped to
        ±`label_bound`. One of the two is needed.
    unknown_label
        The class (or number) that a missing or undeclared label counts as. None: an error.
    person, max_records_per_person
        Name of the id column and the number of records kept of each person; both, or neither.
    norm
        Radius of the ball that every encoded record is clipped into.
    scale
        ``"columns"`` divides by the square root of the number of columns, so that every record has
        norm at most 1; ``"clip"`` leaves all to clipping.

    Examples
    --------
    >>> columns = [Numeric("age", 0, 120), Categorical("sex", ("f", "m"))]
    >>> schema = Schema(columns, "ill", classes=(0, 1))
    >>> schema.feature_names
    ('age', 'sex=f', 'sex=m')
    >>> schema.encode({"age": [60, 150], "sex": ["f", "m"], "ill": [0, 1]}).y.tolist()
    [0, 1]
    """

    columns: Sequence[Numeric | Categorical]
    label: str
    _: KW_ONLY
    classes: Sequence[Value] | None = None
    label_bound: float | None = None
    unknown_label: Value | None = None
    person: str | None = None
    max_records_per_person: int | None = None
    norm: float = 1.0
    scale: Literal["columns", "clip"] = "columns"

    def __post_init__(self) -> None:
        given: object = self.columns
        listed = tuple(given) if isinstance(given, Iterable) else (given,)
        kinds = sorted({type(column).__name__ for column in listed} | {type(given).__name__})
        fits = all(isinstance(column, Numeric | Categorical) for column in listed)
        fits = fits and isinstance(given, Iterable)
        require(fits, "columns", kinds, "a list of Numeric and Categorical columns")
        object.__setattr__(self, "columns", listed)
        names = self.table_columns
        require(len(self.columns) > 0, "columns", [], "at least one Numeric or Categorical")
        for name in names:
            require(isinstance(name, str) and name != "", "a column name", name, "a non-empty text")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        require(
            not twice, "columns, label and person", twice, "different columns, each declared once"
        )
        self._check_label()
        self._check_person()
        norm = as_number(self.norm)
        require(0 < norm < math.inf, "norm", self.norm, "positive and finite")
        object.__setattr__(self, "norm", norm)
        require(self.scale in {"columns", "clip"}, "scale", self.scale, "'columns' or 'clip'")

    def _check_label(self) -> None:
        if self.classes is not None:
            require(
                self.label_bound is None,
                "label_bound",
                self.label_bound,
                "left out when classes are declared",
            )
            known = spell_all(self.classes, "classes")
            require(
                len(known) > 1,
                "classes",
                list(known),
                "at least two; a single site may lack one of them",
            )
            object.__setattr__(self, "classes", tuple(to_python(value) for value in self.classes))
            allowed = self.unknown_label is None or spell(self.unknown_label) in known
            require(
                allowed, "unknown_label", self.unknown_label, "None or one of the declared classes"
            )
        else:
            bound = as_number(self.label_bound)
            wish = "positive, or declare classes=(...), neither of them read from the data"
            require(0 < bound < math.inf, "label_bound", self.label_bound, wish)
            object.__setattr__(self, "label_bound", bound)
            if self.unknown_label is not None:
                number = as_number(self.unknown_label)
                require(
                    abs(number) <= bound,
                    "unknown_label",
                    self.unknown_label,
                    f"a number within ±{bound:g}",
                )
                object.__setattr__(self, "unknown_label", number)

    def _check_person(self) -> None:
        limit = self.max_records_per_person
        if self.person is None:
            require(
                limit is None,
                "max_records_per_person",
                limit,
                "left out, or declared with person='<id column>'",
            )
        else:
            must = f"{CAP} when a person column is declared"
            require(is_cap(limit), "max_records_per_person", limit, must)

    @cached_property
    def table_columns(self) -> tuple[str, ...]:
        """Names of the table's columns that encoding reads."""
        person = () if self.person is None else (self.person,)
        return (*(column.name for column in self.columns), self.label, *person)

    def find_refused(self, labels: pa.Array) -> NDArray[np.bool_]:
        """Tell of each label whether encoding refuses it."""
        if self.unknown_label is not None:
            return np.zeros(len(labels), np.bool_)
        if self.classes is None:
            return np.asarray(np.isnan(read_numbers(labels)))
        return np.asarray(find_places(labels, spell_all(self.classes, "classes"))[0] < 0)

    @property
    def allowed(self) -> str:
        """The labels that are allowed, in words."""
        if self.classes is None:
            return f"a number from {-as_number(self.label_bound):g} to {self.label_bound:g}"
        return ", ".join(map(repr, spell_all(self.classes, "classes")))

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded features, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def n_features(self) -> int:
        """Number of encoded features, without the intercept, which learners add."""
        return len(self.feature_names)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values for TOML or JSON, without those that are None."""
        kinds = {kind: name for name, kind in _KINDS.items()}
        columns = [{"kind": kinds[type(column)], **_facts(column)} for column in self.columns]
        return {**_facts(self), "columns": columns}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; an unknown key is an error."""
        columns, listed = [], facts.get("columns", ())
        if isinstance(listed, Mapping | str) or not all(isinstance(one, Mapping) for one in listed):
            raise SettingsError(
                "The columns of a schema must be a list of tables. In TOML, begin each column with "
                '[[schema.columns]], in double brackets, and give it a name = "...".'
            )
        for entry in listed:
            settings = dict(entry)
            kind = settings.pop("kind", None)
            require(
                kind in _KINDS,
                f"kind of column {settings.get('name')!r}",
                kind,
                f"one of {list(_KINDS)}",
            )
            columns.append(_declare(_KINDS[kind], settings, f"column {settings.get('name')!r}"))
        return _declare(cls, {**facts, "columns": columns}, "the schema")

    @classmethod
    def from_codebook(cls, path: str | os.PathLike[str], **settings: Any) -> "Schema":
        """Read a CSV or YAML file with the name, kind, bounds or categories of each variable.

        `settings` are further ones of a schema, such as ``norm``. The module `codebook` describes
        the file.
        """
        from consilience.tables.codebook import read_codebook

        return read_codebook(path, **settings)

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of the facts: equal digests mean equal encodings."""
        canonical = json.dumps(
            self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def _encoder(self) -> "Encoder":
        from consilience.tables.encoding import Encoder

        return Encoder(self)

    def read(self, source: object, labels: object = None) -> pa.Table:
        """Read this schema's columns; `labels` take the place of the label column."""
        return self._encoder.read(source, labels)

    def encode(self, source: object) -> Encoded:
        """Encode labelled records from anything `read_table` takes.

        Privacy
        -------
        1-stable: one changed record changes one row of the result, bit for bit. Values beyond a
        bound count as the bound. Not hidden: the number of records; and that a record exists which
        an ``"error"`` policy, or an undeclared label without `unknown_label`, refuses
        (docs/guarantees/preprocessing.md).
        """
        return self._encoder.encode(source, self.table_columns)

    def find_misfits(self, table: pa.Table) -> list[str]:
        """Return the columns of which more than half of some values are beyond their bounds.

        Of a table that could be encoded; it depends on the records, and stays where they are.
        """
        return self._encoder.find_misfits(table)

    def name_labels(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return encoded labels as they were declared; encoding gives each class's position."""
        return y if self.classes is None else np.asarray(self.classes)[y]

    def encode_blocks(self, source: object) -> Iterator[Encoded]:
        """Encode the same a few thousand records at a time; each block is overwritten by the next.

        For callers that sum over blocks: a block stays in the processor's cache, and no memory is
        allocated for each one, which in Dask's workers costs as much as encoding.
        """
        yield from self._encoder.encode_all(source)

    def encode_features(self, source: object) -> NDArray[np.float64]:
        """Encode records without labels and persons, to predict or as unlabelled public records."""
        return self._encoder.encode(source, tuple(column.name for column in self.columns)).X

    def transformer(self) -> "SchemaTransformer":
        """Return a step for scikit-learn pipelines that encodes tables by this schema.

        Examples
        --------
        >>> schema = Schema([Numeric("age", 0, 120)], "ill", classes=(0, 1))
        >>> schema.transformer().transform({"age": [0, 120]}).ravel().round(6).tolist()
        [-1.0, 1.0]
        """
        from consilience.tables.transformer import SchemaTransformer

        return SchemaTransformer(self)


_KINDS: dict[str, type[Numeric] | type[Categorical]] = {
    "numeric": Numeric,
    "categorical": Categorical,
}


def _facts(declared: "Schema | Numeric | Categorical") -> dict[str, Any]:
    facts = {field.name: getattr(declared, field.name) for field in fields(declared)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in facts.items()
        if value is not None
    }


def _declare(kind: type[T], settings: Mapping[str, Any], where: str) -> T:
    declared = fields(kind)  # type: ignore[arg-type]
    known = {field.name: field.default is MISSING for field in declared}
    unknown = sorted(set(settings) - set(known))
    require(not unknown, f"settings of {where}", unknown, f"among {list(known)}")
    absent = sorted(name for name, required in known.items() if required and name not in settings)
    require(not absent, f"settings of {where}", sorted(settings), f"complete; add {absent}")
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
    )
