"""The one fit template: check, plan, charge, draw and train, state the guarantee.

A subclass says what it would do (`_plan`, from public facts alone) and how to do it (`_train`).
Between the two the ledger is charged, so no noise is drawn, and nothing that depends on records is
kept, without a charge.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from functools import cache
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state

from consilience.errors import SettingsError, shield
from consilience.learners.implied import Implied
from consilience.learners.provenance import HOW_ENCODED, take_in, warn_of_leaks
from consilience.privacy.accounting import Event
from consilience.privacy.guarantee import Guarantee, Unit, count_is_public
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, Source
from consilience.privacy.spending import Account, Receipt, run_charged, state_guarantee
from consilience.tables.groups import CAP, is_cap
from consilience.text import shorten

if TYPE_CHECKING:
    from consilience.learners.axes import Projection
    from consilience.learners.tuned import Tuning
    from consilience.tables.public import Public
    from consilience.tables.schema import Schema

Rows = Any  # a table as users pass it: an array, a data frame, sparse rows, Dask's
# Settings that are not among those that a file states; projection and tuning are facts of it.
UNSTATED = frozenset({"noise", "schema", "projection", "tuning"})
# A ledger counts in units of the least epsilon. Below these, sums and scales behind the charge
# would overflow, or state more than was asked for.
LEAST_EPSILON, LEAST_DELTA = 1e-9, 1e-300
# Of norms, bounds, ridges and coefficients that meet records: no product of two overflows, and what
# overflows becomes no number, which as a whole number is the most negative one.
LARGEST = 1e100
_MEANING = "meaning"  # sealed beside the released arrays, and never released
State = Mapping[str, NDArray[Any]]
Choices = Mapping[str, int | float | str]
SHOWN_SIZES = (100, 1_000, 10_000)  # at which a page shows what will be chosen
StateCheck = Literal["whole", "shapes", "rows"]


def _shown(choice: float | str) -> str:
    return f"{choice:.3g}" if isinstance(choice, float) else str(choice)


class Plan(Protocol):
    """What a learner will do, decided before it looks at any record's values."""

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn."""


PlanT = TypeVar("PlanT", bound=Plan)
TaskT = TypeVar("TaskT")


class Settings:
    """Anything with parameters that users set, refused in one form of words."""

    epsilon: Any
    delta: float
    noise: Noise | None

    @classmethod
    def summary(cls) -> str:
        """Return what the class is, in the sentence that its documentation begins with."""
        return (inspect.getdoc(cls) or cls.__name__).partition("\n")[0]

    def _require(self, name: str, fits: bool, must: str) -> None:
        """Refuse a parameter that does not fit."""
        if not fits:
            raise SettingsError(
                f"The {name!r} parameter of {type(self).__name__} must be {must}. Got "
                f"{shorten(repr(getattr(self, name)))} instead. Nothing was computed."
            )

    def _require_moderate(self, *names: str) -> None:
        """Refuse a norm, a bound or a ridge whose square or product could overflow or vanish."""
        for name in names:
            fits = is_positive(getattr(self, name)) and 1e-100 <= getattr(self, name) <= LARGEST
            self._require(name, fits, "a number > 0, from 1e-100 to 1e100")

    def _take_plain_numbers(self) -> None:
        """Turn NumPy's numbers into Python's: with few bits, products of them overflow or round."""
        for name, value in list(vars(self).items()):
            if isinstance(value, np.generic) and not name.endswith("_"):
                plain = value.item()
                # Extended precision stays as it is unless it is rounded.
                setattr(self, name, float(value) if isinstance(plain, np.floating) else plain)

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record or member is looked at."""
        self._take_plain_numbers()
        for name, value in vars(self).items():
            if type(getattr(type(self), name, None)) is bool:  # by its default
                self._require(name, type(value) is bool, "true or false")

    def _check_random_state(self) -> None:
        try:
            check_random_state(getattr(self, "random_state", None))
        except ValueError:
            must = "None, a whole number from 0 to 4294967295, or a numpy RandomState"
            self._require("random_state", False, must)

    def _check_budget(self) -> None:
        """Refuse an epsilon, a delta or noise that cannot be one."""
        self._take_plain_numbers()
        infinite = isinstance(self.epsilon, float) and self.epsilon == math.inf
        must = f"a number >= {LEAST_EPSILON:g}, or math.inf"
        self._require("epsilon", infinite or is_epsilon(self.epsilon), must)
        self._require("delta", is_delta(self.delta), f"0, or from {LEAST_DELTA:g} and below 1")
        fits = self.noise is None or isinstance(self.noise, Noise)
        self._require("noise", fits, "None or a Noise value")


class PrivateLearner(Settings, BaseEstimator, ABC, Generic[TaskT, PlanT]):  # type: ignore[misc]
    """A scikit-learn estimator that trains privately and states its ``guarantee_``.

    Notes
    -----
    **Privacy.** ``guarantee_`` holds for one record, or for one person when ``unit="person"``,
    against everyone who sees the fitted attributes. Seeded noise voids it; ``epsilon=math.inf``
    promises nothing.
    """

    # What a learner can do. Everything else of the package asks these, and no list of names.
    is_linear: ClassVar[bool] = False  # it has coef_ and intercept_, which can be averaged
    shorthand: ClassVar[str | None] = None  # its name on the command line
    default_neighbours: ClassVar[str] = "replace-one"
    predicts_number: ClassVar[bool] = False  # regression: it has no classes
    has_known_noise: ClassVar[bool] = False  # its noise is known before training, for planning
    suits: ClassVar[str | None] = None  # the aggregator that it is made for, if there is one
    needs_delta: ClassVar[bool] = False  # its noise is Gaussian
    makes_linear: ClassVar[bool] = False  # what is made of it is linear, even if it has no coef_
    needs_labels: ClassVar[bool] = False  # what is made of it needs labelled public records
    # What `check_state` must see at once: all numbers, only the shapes of the arrays, or any rows
    # of all arrays (those without rows in full), so that large files are checked block by block.
    state_check: ClassVar[StateCheck] = "whole"
    # The setting that `public_settings` makes of public records, and what that is in words.
    from_public: ClassVar[tuple[str, str] | None] = None
    # Why sites cannot choose among candidates of this kind, with its name; None if they can.
    untunable: ClassVar[str | None] = "sites choose among classifiers, and {} is none"
    # What it can hide. A learner that can hide a whole site says in `hidden_by` when it does.
    units: ClassVar[tuple[str, ...]] = ("record", "person")
    # Whether a table that is too large for memory is read in chunks, where nobody chose. If not, it
    # is read into memory all the same: a refusal would tell that there are so many records.
    reads_chunks: ClassVar[bool] = True
    # Settings that other parts of a study decide, beside those that they decide for all learners.
    study_decides: ClassVar[frozenset[str]] = frozenset()
    # What settings meant that files and studies of the first version do not name.
    first_settings: ClassVar[Mapping[str, Any]] = {}
    # Of exact members of a trusted hub, unless a study names others.
    trusted_settings: ClassVar[Mapping[str, Any]] = {}

    epsilon: float
    neighbours: str
    guarantee_: Guarantee
    events_: tuple[Event, ...]
    receipt_: Receipt | None
    unit: str = "record"
    schema: Schema | None = None
    projection: Projection | None = None  # of linear learners, on fewer columns
    tuning: Tuning | None = None  # of a study's learner, whose settings each site chooses
    # What the candidates had borrowed that this learner was chosen among; None if it was not chosen
    # by looking at records.
    chosen_beside_: dict[object, Guarantee] | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        shield(cls)

    def __post_init__(self) -> None:
        self.adopt_schema()

    def set_params(self, **params: Any) -> Self:
        """Set parameters; what a schema decides, it decides of the new ones too."""
        super().set_params(**params)
        self.adopt_schema()
        return self

    def adopt_schema(self) -> None:
        """Take what the schema decides where nothing else was given."""
        for name, value in self._decided():
            if _are_same(getattr(self, name), getattr(type(self), name, None)):
                setattr(self, name, value)

    def check_schema(self) -> None:
        """Refuse what is no schema, and a setting that contradicts it."""
        fits = self.schema is None or hasattr(self.schema, "encode_features")
        self._require("schema", fits, "None or a Schema")
        self._check_label()
        for name, value in self._decided():
            raise SettingsError(
                f"{type(self).__name__} was given {name}={getattr(self, name)!r} and a schema by "
                f"which it is {value!r}. Nothing was trained or charged. Leave {name!r} out, or "
                "change the schema."
            )

    def _check_label(self) -> None:
        """Refuse a schema whose label is of another kind than the learner predicts."""
        if self.schema is None:
            return
        numeric, classifies = self.schema.classes is None, "classes" in self.get_params(deep=False)
        if self.predicts_number if not numeric else classifies:
            raise SettingsError(
                f"{type(self).__name__} predicts {'classes' if numeric else 'a number'}, and the "
                f"label of its schema is {'a number' if numeric else 'one of declared classes'}. "
                "Nothing was trained or charged. Use PrivateRidge for numbers and a classifier for "
                "classes, or change the schema."
            )

    def _decided(self) -> Iterator[tuple[str, Any]]:
        """Yield the settings that the schema decides otherwise than they stand here."""
        if self.schema is not None and hasattr(self.schema, "encode_features"):
            for name, value in self.decided_by(self.schema, self.get_params(deep=False)).items():
                if hasattr(self, name) and not _are_same(getattr(self, name), value):
                    yield name, value

    @classmethod
    def read_settings(cls, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return what settings mean that a file, or a study of the first version, names."""
        return {**cls.first_settings, **named}

    def stated_settings(self) -> dict[str, Any]:
        """Return the settings that a file of this learner states."""
        given = self.get_params(deep=False).items()
        return {name: value for name, value in given if name not in UNSTATED}

    def fit(
        self,
        X: Rows,
        y: ArrayLike | None = None,
        *,
        persons: ArrayLike | None = None,
        ledger: Ledger | None = None,
        dataset: str | None = None,
        key: str | None = None,
    ) -> Self:
        """Train; with a ledger, charge `dataset` first.

        With a ``schema``, `X` is anything that `Schema.encode` takes; without `y`, the labels are
        its label column. Without one, it is an array or what `Schema.encode` returned. A retry with
        the same `key` draws nothing and returns the first result. Where the learner takes them, `X`
        may also be sparse, a Dask collection (then `y` is one too), or a table in chunks that
        brings its own labels (`ParquetRows`, `DaskRows`). Such a table is read once, and refused if
        necessary, before the charge.
        """
        if ledger is None and not (dataset is None and key is None):
            raise SettingsError(
                "A data set or a key was named, but no ledger, so that no charge would be written "
                "down. Nothing was drawn. Pass ledger=Ledger(path) too, or leave both out."
            )
        before = dict(vars(self))
        try:
            for name in _fitted(self):  # what is left of an earlier fit says nothing of this one
                delattr(self, name)
            self.adopt_schema()
            self.check_schema()
            given = take_in(self.schema, X, y, persons, in_parts=self.reads_chunks)
            task, assumptions = self.make_task(*given.records)
            if not given.is_encoded:
                assumptions = [*assumptions, HOW_ENCODED]
            if self.promises:
                warn_of_leaks(self, given)
            return self._fit(task, assumptions, ledger, dataset, key)
        except BaseException:
            # All of the fitted state, or none: a failure between training and the receipt would
            # leave new coefficients beside the guarantee of an earlier fit.
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    @property
    def promises(self) -> bool:
        """Whether a fit promises anything: with noise, and without a seed."""
        seeded = self.noise is not None and self.noise.seed is not None
        return math.isfinite(self.epsilon) and not seeded

    @property
    def total_epsilon(self) -> float:
        """What a fit may cost, with everything that it releases beside the model."""
        return float(self.epsilon)

    def without_score(self) -> PrivateLearner[Any, Any]:
        """Return an unfitted learner that only trains, as this one does before it is scored."""
        return self

    def without_tuning(self) -> PrivateLearner[Any, Any]:
        """Return the learner without candidates to choose from."""
        return self

    def possible(self) -> Sequence[PrivateLearner[Any, Any]]:
        """Return the learners that a file of a fit may state: this one, or each candidate."""
        return [self]

    def stated_tuning(self) -> dict[str, Any]:
        """Return what a file states of a choice among candidates."""
        return {}

    def set_budget(self, epsilon: float, delta: float | None = None) -> Self:
        """Set what a fit may cost, with everything that it releases; None leaves delta."""
        more = {} if delta is None else {"delta": delta}
        return self.set_params(epsilon=epsilon, **more)

    @abstractmethod
    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[TaskT, list[str]]:
        """Check settings and records; return the task and what the guarantee assumes of it."""

    def _fit(
        self,
        task: TaskT,
        assumptions: Sequence[str],
        ledger: Ledger | None,
        dataset: str | None,
        key: str | None,
    ) -> Self:
        plan = self._plan(task)
        # Spelled here, so that what cannot be is refused before the charge, and so that it tells
        # what the table and the settings decided, but nothing that is drawn.
        settings, meaning = self._settings(), self._meaning()

        def draw(source: Source) -> dict[str, NDArray[Any]]:
            self._train(task, plan, source)
            return self.released_state()

        state, self.receipt_ = run_charged(
            draw,
            plan.events,
            noise=self.noise,
            account=Account(ledger, dataset, key),
            purpose=type(self).__name__,
            means=lambda: meaning,
        )
        state.pop(_MEANING, None)  # sealed for a while by earlier versions
        self.restore_state(state)
        # Public: what was drawn, so that others can recompute and weigh it.
        self.events_ = tuple(plan.events)
        self.guarantee_ = self._guarantee(plan.events, assumptions)
        self._fitted_with = settings
        return self

    def _meaning(self) -> str:
        """Return all that says how to read released numbers, as settings and table decide it.

        This is every attribute that was set before anything is drawn: classes, columns, sizes. A
        retry that returns the first numbers would otherwise set them anew, by another table.
        """
        facts = {name: getattr(self, name) for name in _fitted(self)}
        return f"{self._settings()} {spell_out(facts)}"

    def _settings(self) -> str:
        """Return all parameters but the noise, in one form whatever objects hold them."""
        facts = {name: getattr(self, name) for name in _parameters(type(self)) if name != "noise"}
        return f"{type(self).__name__} {spell_out(facts)}"

    def remember_settings(self) -> None:
        """Note the settings of this fit, so that `check_unchanged` knows them."""
        self._fitted_with = self._settings()

    def public_settings(self, public: Public) -> dict[str, Any]:
        """Return the settings that were left out and that labelled public records decide."""
        return {}

    def check_unchanged(self) -> None:
        """Refuse if parameters were changed since `fit`: what was promised rests on them."""
        if getattr(self, "_fitted_with", None) not in (None, self._settings()):
            raise SettingsError(
                f"Parameters of a {type(self).__name__} were changed after it was fitted, so that "
                "they no longer say how. Nothing was done with it. Fit it again, or set them back."
            )

    def _guarantee(self, events: Sequence[Event], assumptions: Sequence[str]) -> Guarantee:
        return state_guarantee(
            events,
            noise=self.noise,
            unit=self.unit,
            neighbours=self.neighbours,
            assumptions=assumptions,
        )

    @classmethod
    def for_schema(
        cls, schema: Schema, *, epsilon: float, delta: float, neighbours: str, **settings: Any
    ) -> Self:
        """Return an unfitted learner for encoded tables of `schema`."""
        return cls(
            epsilon=epsilon,
            delta=delta,
            neighbours=neighbours,
            **cls.decided_by(schema, settings),
            **settings,
        )

    @classmethod
    def hidden_by(cls, schema: Schema, settings: Mapping[str, Any]) -> Unit:
        """Return what such a learner hides: a record, all records of a person, or a whole site."""
        return Unit.RECORD if schema.person is None else Unit.PERSON

    @classmethod
    def decided_by(cls, schema: Schema, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that `schema` decides beside `settings`."""
        decided = cls.declared_by(schema)
        if cls.hidden_by(schema, settings) is Unit.SITE:
            decided |= {"unit": str(Unit.SITE), "records_per_person": None}
        return decided

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides: classes and unit."""
        decided: dict[str, Any] = {
            "unit": "record" if schema.person is None else "person",
            "records_per_person": schema.max_records_per_person,
        }
        if schema.classes is not None:
            decided["classes"] = list(schema.classes)
        return decided

    def describe_state(self, schema: Schema) -> str:
        """Say what leaves a site that trains this learner on tables of `schema`."""
        return "the numbers of a fitted model"

    def may_state(self, count: Unit) -> bool:
        """Tell whether the exact number of `count` may be stated beside what is released."""
        exact = math.isinf(self.epsilon)  # promises nothing
        return exact or count_is_public(count, unit=self.unit, neighbours=self.neighbours)

    def choices(self, n_features: int, size: int | None) -> Choices:
        """Return what follows from settings that are "auto" and from public facts, by name.

        `size` is a number that `sizes_of_choices` returned. Nothing that somebody else set is
        repeated: the pages that show this speak in our words.
        """
        return {}

    def sizes_of_choices(self, size: int | None) -> Sequence[int | None]:
        """Return the number of records or persons by which is chosen; None if by none.

        `size` is what a file states or, before the training, None: then there may be several, to
        show what would be chosen.
        """
        return SHOWN_SIZES if size is None else (size,)

    def describe_choices(self, n_features: int, size: int | None) -> str | None:
        """Say what follows from settings that are "auto", where there are any.

        `size` is the number of records or persons, if it is known or declared.
        """
        self.check_settings()
        sizes = self.sizes_of_choices(size)
        each = [self.choices(n_features, n) for n in sizes]
        if not each[0]:
            return None
        at = ["" if n is None else f" at {n:,} {self.unit}s" for n in sizes]
        if len(sizes) == 1:
            return f"{', '.join(f'{name} = {_shown(x)}' for name, x in each[0].items())}{at[0]}"
        said = []
        for name in each[0]:
            values = [_shown(chosen[name]) for chosen in each]
            alike = len(set(values)) == 1
            where = values[:1] if alike else [v + w for v, w in zip(values, at, strict=True)]
            said.append(f"{name} = {', '.join(where)}")
        return ", ".join(said)

    def chosen(self) -> Choices:
        """Return what a file of this fit states that its settings chose."""
        size = self.sizes_of_choices(getattr(self, "public_size_", None))[0]
        return self.choices(int(self.n_features_in_), size)

    def describe_size(self) -> str:
        """Say which number of records or persons a file of this learner states."""
        unit = Unit(self.unit)
        return f"the exact number of {unit}s" if self.may_state(unit) else "none"

    def can_train_together(self) -> bool:
        """Tell whether exact models of many sites can be trained in one batch."""
        return False

    @abstractmethod
    def _plan(self, task: TaskT) -> PlanT:
        """Decide what will be drawn, from public facts alone."""

    @abstractmethod
    def _train(self, task: TaskT, plan: PlanT, source: Source) -> None:
        """Draw what was planned, train, and set what is released."""

    @abstractmethod
    def released_state(self) -> dict[str, NDArray[Any]]:
        """Return the released arrays: all that leaves, and no random state of any kind."""

    @abstractmethod
    def restore_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Set the fitted attributes from what `released_state` returned."""

    def check_state(self, state: State) -> bool:
        """Tell whether this learner could have released these arrays; they may be hostile."""
        return False  # a learner that never leaves a site released none

    def fits_size(self, most: int) -> bool:
        """Tell whether so many records or persons can have what was released.

        Where a file states a number, that one is compared with the most beside this.
        """
        return True

    def n_released(self, n_classes: int) -> int:
        """Return how many numbers a fit releases, by settings and public facts alone."""
        return int(self.n_features_in_) * max(1, n_classes)

    def assumed(self) -> tuple[str, ...]:
        """Return what the guarantee assumes of any table, by these settings alone."""
        return ()

    def fingerprint(self) -> str:
        """Return what tells this fit from every other: a digest of all that it released."""
        digest = hashlib.sha256(repr(self.receipt_).encode())  # equal numbers may be drawn twice
        for name, tensor in sorted(self.released_state().items()):
            array = np.ascontiguousarray(tensor)
            digest.update(f"{name} {array.shape} {array.dtype}".encode() + array.tobytes())
        return digest.hexdigest()

    def model_events(self) -> tuple[Event, ...]:
        """Return what was drawn for the released model itself, of everything that was charged."""
        return tuple(getattr(self, "events_", ()))

    def borrowed(self) -> dict[object, Guarantee]:
        """Return what the released state shows of other private records, by its origin."""
        return dict(self.chosen_beside_ or {})

    def implied(self, shapes: Mapping[str, Sequence[int]]) -> Implied | None:
        """Return what these settings and public facts imply of a fit that released such arrays.

        The learner need not be fitted: it has ``n_features_in_``, its classes, and its public size
        if the file states one. None if they imply nothing, and the sender's word has to be taken.
        """
        return None

    def unchecked(self) -> str | None:
        """Return why nobody could plan such a fit again from its settings; None if one could.

        A study refuses such settings: its hub would have to take each site's word for its noise.
        """
        return None

    def planned(self, size: int) -> Sequence[Event]:
        """Return what a fit on so many records or persons draws, by public facts alone.

        The learner need not be fitted: it has ``n_features_in_`` and its classes. A study plans one
        before anybody is charged, so that what cannot be planned is refused with the study.
        """
        return ()

    def cost(self, size: int | None) -> float:
        """Return the epsilon that a fit with these settings costs, given its public size.

        Noise is calibrated to the epsilon that was asked for, unless a learner says otherwise.
        """
        return float(self.epsilon)

    def _check_privacy(self, mechanisms: Sequence[str]) -> None:
        """Refuse what no guarantee could be about; `mechanisms` are those that there are."""
        self._check_budget()
        self._require(
            "neighbours",
            self.neighbours in ("replace-one", "add-remove"),
            "'replace-one' or 'add-remove'",
        )
        self._require(
            "mechanism",
            getattr(self, "mechanism", mechanisms[0]) in mechanisms,
            f"one of {mechanisms}",
        )
        must = " or ".join(map(repr, self.units))
        self._require("unit", self.unit in self.units, must)
        if self.unit == "person" and hasattr(self, "records_per_person"):
            fits = is_cap(self.records_per_person)
            self._require("records_per_person", fits, f"{CAP} with unit='person'")


@cache  # scikit-learn reads the signature each time
def _parameters(learner: type[BaseEstimator]) -> list[str]:
    return list(learner._get_param_names())


def _fitted(learner: PrivateLearner[Any, Any]) -> list[str]:
    """Return the names of what was fitted, which end with an underscore as scikit-learn's do."""
    return [name for name in vars(learner) if name.endswith("_") and not name.startswith("_")]


def spell_out(value: object) -> str:
    """Return settings as text that is equal for equal settings, in every process.

    What cannot be spelled is refused: two of its kind would pass for one another.
    """
    if value is None or type(value) in (str, float, int, bool):  # nearly all of them
        return repr(value)
    if type(value) in (list, tuple):
        return f"[{', '.join(map(spell_out, cast(Sequence[object], value)))}]"
    if isinstance(value, PrivateLearner):
        return value._settings()
    if isinstance(value, np.ndarray | np.generic):
        plain = value.tolist()
        # Extended precision has no number of Python's.
        text = repr(value) if type(plain) is type(value) else spell_out(plain)
        return f"{value.dtype} {text}"
    if isinstance(value, str | bytes | Number | date | time | timedelta):
        return repr(value)
    kind = type(value).__name__
    if isinstance(value, Mapping):
        # A number as a key is another one than its text.
        named = (f"{type(k).__name__} {spell_out(k)}: {spell_out(v)}" for k, v in value.items())
        return f"{{{', '.join(sorted(named))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{kind} {spell_out({f.name: getattr(value, f.name) for f in fields(value)})}"
    if hasattr(value, "as_dict"):
        return f"{kind} {spell_out(value.as_dict())}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "standard_normal"):  # public randomness: what it drew is in what is released
        return kind
    if sparse.issparse(value):
        return spell_out(cast(Any, value).toarray())
    if hasattr(value, "__array__"):
        # What a frame or a series is labelled with says what its values are.
        labels = {part: getattr(value, part, None) for part in ("index", "columns", "name", "dims")}
        known = {part: label for part, label in labels.items() if not callable(label)}
        return f"{kind} {spell_out(known)} {spell_out(np.asarray(value))}"
    if hasattr(value, "keys") and hasattr(value, "__getitem__"):  # as `dict` sees it
        return spell_out(dict(cast(Any, value)))
    if isinstance(value, Set):
        return f"{kind} {{{', '.join(sorted(map(spell_out, value)))}}}"
    if isinstance(value, Iterable) and isinstance(value, Sized):  # not what can be read only once
        return f"[{', '.join(map(spell_out, value))}]"
    raise SettingsError(
        f"A setting is a {kind}, which cannot be written down, so that nobody "
        "could tell later which one it was. Nothing was trained or charged. Pass numbers, text, "
        "lists, arrays or tables."
    )


def plan_fit(
    learner: PrivateLearner[TaskT, PlanT], X: Rows, y: ArrayLike | None, **whose: Any
) -> tuple[TaskT, PlanT]:
    """Return what `fit` would train on and draw; nothing is charged or drawn."""
    persons, in_parts = whose.get("persons"), learner.reads_chunks
    given = take_in(learner.schema, X, y, persons, in_parts=in_parts)
    task, _ = learner.make_task(*given.records)
    return task, learner._plan(task)


def _are_same(one: object, other: object) -> bool:
    """Tell whether two settings are the same, whatever kind of list holds them."""
    return bool(np.array_equal(np.asarray(one, dtype=object), np.asarray(other, dtype=object)))


def is_count(value: object, most: float = math.inf) -> bool:
    """Tell whether `value` is a whole number above zero, and not a truth value."""
    is_whole = isinstance(value, int | np.integer) and type(value) is not bool
    return is_whole and bool(0 < value <= most)  # type: ignore[operator]


def is_epsilon(value: object) -> bool:
    """Tell whether `value` is an epsilon that noise can be calibrated to."""
    return is_positive(value) and bool(value >= LEAST_EPSILON)  # type: ignore[operator]


def is_delta(value: object) -> bool:
    """Tell whether `value` is a delta that noise can be calibrated to."""
    if not is_positive(value):
        return isinstance(value, int | float) and type(value) is not bool and value == 0
    return bool(LEAST_DELTA <= value < 1)  # type: ignore[operator]


def is_positive(value: object) -> bool:
    """Tell whether `value` is a finite number above zero, and not a truth value."""
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and type(value) is not bool
        and bool(0 < value < math.inf)
    )
