"""What every statistic says about itself, and how a site adds one up and hides it.

A statistic is a vector that is a sum over records, so that the sum over all sites is the statistic
of all records. It is a learner whose released state is that sum with noise; the hub adds up what
sites released and lets the statistic finish the total
(docs/decisions/0014-statistics-are-sums.md). Proofs: docs/guarantees/statistics.md.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from sklearn.base import ClassifierMixin, RegressorMixin, clone
from sklearn.utils.validation import check_is_fitted

from consilience.aggregators.base import Ensemble
from consilience.errors import ContributionRejected, SettingsError
from consilience.learners.base import PrivateLearner, Rows, State, is_count
from consilience.learners.encoded import Encoding, LabelCodes, LabelScale
from consilience.learners.erm import Chunks, one_blas_thread
from consilience.learners.implied import UNLIKELY, Bound, Implied
from consilience.learners.inputs import (
    READ_LABELS,
    as_chunks,
    check_persons,
    chunk_classes,
    count_records,
    declared_classes,
    read_chunks,
    read_classes,
    validate_records,
    validate_table,
)
from consilience.learners.provenance import take_in
from consilience.privacy.accounting import Event, GaussianSum, SharedSum, total
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.mechanisms import Noise, Source, noisy_sum
from consilience.privacy.spending import Receipt, Spending
from consilience.privacy.vector_noise import calibrate_sum, scale_records, share_sum
from consilience.tables.public import Public
from consilience.tables.values import as_doubles

if TYPE_CHECKING:
    from consilience.tables.schema import Schema

Array: TypeAlias = NDArray[Any]
# Maps chunks of rows and encoded labels to their exact sum in whole grains.
Adder: TypeAlias = Callable[[Chunks], Array]

MOST_RECORDS = 1 << 31  # of one site, or of all sites together
# Of a person's sum that was scaled down: covers the rounding of its length and of the product.
ROUNDING = 1 - 2.0**-40
ROOM = 2.0**62  # of a sum of all sites, modulo 2^64 and with its sign
MASKED = "sum"  # the name of the array of a masked file
ROUNDED = 1e-6  # relative, of what was computed elsewhere
WIDEST_NOISE = 2.0**56  # grains; sums of noise this wide over a hundred sites do not wrap


@dataclass(frozen=True)
class Summed:
    """A sum over the records of one or several sites, and all that is known of it.

    ``values`` are numbers and not grains. ``variance`` is that of the noise in each of them.
    ``size`` is the weighted public number of units, Σa·n, and ``squares`` is Σa²·n, which is what
    the sampling variance grows with; both are None if the numbers of units are not public. Where
    `Statistic.counts_sites`, n is 1 for each site.
    """

    values: Array
    variance: Array
    size: float | None
    squares: float | None


@dataclass(frozen=True)
class Sharing:
    """What a blind study fixes of every site's sum (docs/guarantees/shared-noise.md).

    Parameters
    ----------
    shares
        How many sites' noise makes a whole.
    epsilon
        What the whole noise is wide enough for; sites that ask for less scale their records.
    steps
        Records are scaled by whole parts of this many, so that scaling rounds nothing. All sums
        are in grains that are finer by as much.
    only_noise
        Whether the site hands over its share of the noise and no record.
    """

    shares: int
    epsilon: float
    steps: int
    only_noise: bool = False


@dataclass(frozen=True)
class SumPlan:
    """The noise of one sum, decided from public facts; none for exact training."""

    event: GaussianSum | None

    @property
    def events(self) -> Sequence[Event]:
        """Everything that will be drawn."""
        return [] if self.event is None else [self.event]


@dataclass(frozen=True)
class SumTask:
    """Records that can be added up, and the sizes that are public."""

    n_records: int
    n_units: int
    records: Rows = None  # a table in chunks, or one chunk; a plan needs no records
    read: Callable[[Chunks], Chunks] | None = None  # rows and encoded labels from chunks
    persons: Array | None = None

    def gather(self, add: Adder) -> Array:
        """Return the exact sum of all records."""
        assert self.read is not None
        whole = functools.partial(_add_chunks, add, self.read)
        if hasattr(self.records, "gather"):
            return functools.reduce(np.add, self.records.gather(whole))
        return whole(self.records.chunks())


def _add_chunks(add: Adder, read: Callable[[Chunks], Chunks], chunks: Chunks) -> Array:
    with one_blas_thread():
        return add(read(chunks))


def _read(encode: Encoding, n_features: int, chunks: Chunks) -> Chunks:
    for X, y in read_chunks(encode.owner, n_features, chunks):
        yield X, encode(y)


@dataclass(frozen=True)
class InMemory:
    """A table in memory as one chunk, so that it is read as tables in chunks are."""

    X: Rows
    y: Array

    def chunks(self) -> Chunks:
        """Yield the table."""
        yield self.X, self.y


@dataclass(eq=False, repr=False, kw_only=True)
class Statistic(PrivateLearner[SumTask, SumPlan]):
    """A sum over records, as a learner: it releases the noisy sum and predicts by finishing it.

    A subclass has the settings of its own and defines `length`, `weights`, `reach`, `adder` and
    `finish`. None of them may look at a record, but the function that `adder` returns: that one
    must return the same for a record, bit for bit, whatever table it stands in.

    Notes
    -----
    **Privacy.** ``guarantee_``: (epsilon, delta) per unit and neighbours as set, against everyone
    who sees the fitted attributes. Not hidden: the number of columns, the classes and, under
    replace-one, the number of units.

    With ``sharing``, which blind studies set, the noise is a share and the released sum is masked:
    what a file then promises rests on others. A fit in the clear promises what its own share hides.
    """

    suits: ClassVar[str | None] = "Total"
    needs_delta: ClassVar[bool] = True
    makes: ClassVar[str | None] = None  # the kind of ensemble that `finish` returns; None: any
    grain: ClassVar[float]  # the step of the grid on which each record's part lies
    # Whether parts of two records never point in opposite directions, as counts do not.
    never_opposite: ClassVar[bool] = False
    # Whether the sum is one over records. If not, what a record adds depends on the others.
    adds_records: ClassVar[bool] = True
    # Whether every record must count alike, so that no site's sum may be multiplied.
    counts_alike: ClassVar[bool] = False

    epsilon: float
    delta: float = 0.0
    neighbours: str = "replace-one"
    unit: str = "record"
    records_per_person: int | None = None
    schema: Schema | None = None
    noise: Noise | None = None

    sharing: Sharing | None = field(init=False, default=None)
    total_: Array = field(init=False)  # in whole grains
    masked_: Array = field(init=False)  # instead of it, in a file for a blind hub
    n_features_in_: int = field(init=False)
    public_size_: int = field(init=False)

    # ------------------------------------------------------------------ the contract

    @property
    def holds(self) -> str:
        """What these numbers are, for the people who approve a training."""
        return "sums over records"

    @property
    @abstractmethod
    def length(self) -> int:
        """How many numbers there are, by settings, columns and classes."""

    @abstractmethod
    def weights(self) -> Array:
        """Return the weight of each number: its noise is divided by it."""

    @abstractmethod
    def reach(self, neighbours: Neighbours) -> float:
        """Return the L2 norm by which one record changes the weighted sum."""

    @abstractmethod
    def adder(self) -> Adder:
        """Return the function that adds up records; it holds declared settings only."""

    @abstractmethod
    def finish(self, total: Summed, public: Public | None = None) -> Ensemble:
        """Return the model of a noisy total; labelled public records may join it."""

    def keep_parts(self, finished: Ensemble, parts: Sequence[Summed]) -> Ensemble:
        """Return a finished total with what is to be kept of each member's own noisy sum."""
        return finished

    @property
    def counts_sites(self) -> bool:
        """Whether the sum is one over sites, so that each of them counts once."""
        return self.unit == Unit.SITE

    @property
    def longest_part(self) -> float:
        """The weighted L2 norm of what one unit, or one site if sites count, adds at most."""
        return self.reach(Neighbours.ADD_REMOVE)

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        self._check_privacy(("sum",))
        if self.unit == Unit.SITE:
            self._require(
                "neighbours",
                self.neighbours == Neighbours.REPLACE_ONE,
                "'replace-one' where whole sites are hidden, because sites take part by name",
            )
        if not self.delta and math.isfinite(self.epsilon):
            raise SettingsError(
                f"{type(self).__name__} adds Gaussian noise, which needs delta > 0. Nothing was "
                "trained. Set delta (say 1e-6)."
            )

    def may_finish(
        self, ensemble: Ensemble, other: PrivateLearner[Any, Any], sizes: Sequence[int | None]
    ) -> bool:
        """Tell whether sites of these sizes can have a total of which `finish` makes this.

        This one has the least epsilon that a site may choose, and `other` the largest.
        """
        return self.makes in (None, ensemble.kind)

    def may_total(
        self,
        values: Array,
        variance: Array | float,
        other: PrivateLearner[Any, Any],
        sizes: Sequence[int | None],
    ) -> bool:
        """Tell whether `values` can be the total of sites of these sizes, with noise of `variance`.

        Of all that sums are multiplied by, the largest is 1.
        """
        assert isinstance(other, Statistic)
        least, most = (one.plan_noise().event for one in (other, self))
        low = 0.0 if least is None else least.drawn_sigma**2
        high = 0.0 if most is None else len(sizes) * most.sigma**2
        spread = np.square(self.weights()) * np.asarray(variance)
        unknown = 1 if self.counts_sites else MOST_RECORDS
        units = sum(unknown if size is None else size for size in sizes)
        far = math.sqrt(2 * special.gammainccinv(self.length / 2, UNLIKELY) * high)
        longest = self.longest_part * units + far
        return (
            values.size == self.length
            and low * (1 - ROUNDED) <= spread.min()
            and spread.max() <= high * (1 + ROUNDED)
            and float(np.abs(self.weights() * values.ravel()).max()) <= longest * (1 + ROUNDED)
        )

    # ------------------------------------------------------------------ what follows from it

    def unit_reach(self) -> float:
        """Return the L2 norm by which one unit changes the weighted sum.

        A person's records are scaled down together to the length of a single record.
        """
        neighbours = Neighbours(self.neighbours)
        if self.unit != Unit.PERSON or neighbours is Neighbours.ADD_REMOVE:
            return self.reach(neighbours)
        return self.reach(Neighbours.ADD_REMOVE) * (math.sqrt(2) if self.never_opposite else 2.0)

    def noise_variance(self) -> Array:
        """Return the variance of the noise in each number, by the events of this fit."""
        sigma = self.events_[0].drawn_sigma if self.events_ else 0.0  # type: ignore[attr-defined]
        return np.square(sigma / self.weights())

    @property
    def step(self) -> float:
        """What one whole number of a released sum is worth: a grain, or a part of one."""
        return self.grain / (1 if self.sharing is None else self.sharing.steps)

    @property
    def _states_size(self) -> bool:
        """Whether a file states how many units there are: that of sites is always one."""
        return self.unit != Unit.SITE and self.may_state(Unit(self.unit))

    def describe_size(self) -> str:
        """Say which number of records or persons a file of this statistic states."""
        return super().describe_size() if self._states_size else "none"

    @property
    def scale(self) -> float:
        """By how much records were scaled, as settings and the study decide it."""
        return 1.0 if self.sharing is None else self._parts / self.sharing.steps

    @property
    def _parts(self) -> int:
        sharing = self.sharing
        if sharing is None or sharing.only_noise:
            return 1 if sharing is None else 0
        return scale_records(self.epsilon, sharing.epsilon, self.delta, sharing.steps)

    def summed(self) -> Summed:
        """Return this fit's own sum."""
        return self.behind(self.total_)

    def behind(self, total: Array) -> Summed:
        """Return whole numbers as a sum, with all that this fit's public facts say of its own."""
        scale, size = self.scale, None
        if scale == 0:
            size = 0.0
        elif self.counts_sites:
            size = 1.0
        elif hasattr(self, "public_size_"):
            size = float(self.public_size_)
        return Summed(
            total * self.step,
            self.noise_variance(),
            None if size is None else scale * size,
            None if size is None else scale * scale * size,
        )

    @property
    def fixed_features(self) -> int | None:
        """How many columns there are, if the settings say so."""
        return None

    @functools.cached_property
    def _alone(self) -> Any:
        return self.finish(self.summed())

    @property
    def _finished(self) -> Any:
        if hasattr(self, "masked_"):
            raise SettingsError(
                f"The sum of this {type(self).__name__} is masked, and only the total of a batch "
                "can be opened. Nothing was predicted. Use a release of its study."
            )
        check_is_fitted(self, "total_")
        return self._alone

    def predict(self, X: Rows) -> Array:
        """Return each row's class, or number, by the model of this sum alone."""
        return np.asarray(self._finished.predict(validate_table(self, X, reset=False)))

    # ------------------------------------------------------------------ the template of learners

    def make_task(
        self, X: Rows, y: ArrayLike | None, persons: ArrayLike | None = None
    ) -> tuple[SumTask, list[str]]:
        """Check settings and records; return the task and what the guarantee assumes of it."""
        self.check_settings()
        source, assumptions, ids = as_chunks(X, y), list[str](), None
        if source is None:
            X, labels = validate_records(self, X, y, y_numeric=self.predicts_number)
            ids = check_persons(self, persons, X.shape[0])
            encode = self._take_labels(None, labels, assumptions)
            encode(labels)
            n_records, source = X.shape[0], InMemory(X, labels)
        else:
            encode = self._take_labels(chunk_classes(self, source, persons), None, assumptions)
            n_records = count_records(self, source, encode)
        n_units = n_records if ids is None else len(np.unique(ids))
        if self._states_size:
            self.public_size_ = max(n_units, 1)
        read = functools.partial(_read, encode, int(self.n_features_in_))
        self.adder()  # settings that do not fit the table are refused before the charge
        return SumTask(n_records, n_units, source, read, ids), assumptions

    @abstractmethod
    def _take_labels(
        self, chunked: tuple[Array, Array] | None, labels: Array | None, assumptions: list[str]
    ) -> Encoding:
        """Return how labels of a table to train on become numbers; note what that assumes."""

    @abstractmethod
    def encode_labels(self, labels: Array) -> Array:
        """Return labels as numbers, once the classes are known."""

    def planned(self, size: int) -> Sequence[Event]:
        """Return what a fit draws, which depends on no size."""
        self.check_settings()
        return self.plan_noise().events

    def _plan(self, task: SumTask) -> SumPlan:
        """Return what a fit in the clear draws: whoever sees a share sees what it alone hides."""
        plan = self.plan_noise()
        if isinstance(plan.event, SharedSum):
            return SumPlan(plan.event.alone)
        return plan

    def assumed(self) -> tuple[str, ...]:
        """Return what a masked sum rests on beside its own noise."""
        event = None if self.sharing is None else self.plan_noise().event
        if not isinstance(event, SharedSum):
            return ()
        # More of them are refused, which tells of their number where that is hidden.
        few = f"it is public that there are at most {self._most_records:,} records"
        told = self.may_state(Unit.RECORD) or self.counts_sites
        hidden = not (told or (self.sharing and self.sharing.only_noise))
        return (event.assumption, few) if hidden else (event.assumption,)

    def cost(self, size: int | None) -> float:
        """Return the epsilon that is asked for; less where records are scaled by whole parts."""
        if self.scale == 1.0:
            return super().cost(size)
        return total(self.planned(1)).epsilon

    def plan_noise(self) -> SumPlan:
        """Return the noise that a fit draws, which no record has a say in."""
        if math.isinf(self.epsilon):
            return SumPlan(None)
        widths, sharing = self._widths(), self.sharing
        event = calibrate_sum(
            self.unit_reach(),
            widths,
            epsilon=self.epsilon if sharing is None else sharing.epsilon,
            delta=self.delta,
            unit=self.unit,
            neighbours=self.neighbours,
        )
        if sharing is not None:
            event = share_sum(event, sharing.shares)
            moved = self.scale or 1.0  # without records, what a site with all of its own has
            event = replace(event, sensitivity=moved * event.sensitivity)
        if event.sigma * float(widths.max()) > WIDEST_NOISE:
            raise SettingsError(
                f"The noise of {type(self).__name__} at epsilon={self.epsilon:g} is too wide for "
                "64-bit sums. Nothing was trained or charged. Choose a larger epsilon."
            )
        return SumPlan(event)

    def _train(self, task: SumTask, plan: SumPlan, source: Source) -> None:
        self.total_ = self.scaled_total(task)
        if plan.event is not None:
            self.total_ = noisy_sum(self.total_, self._widths(), event=plan.event, source=source)

    def scaled_total(self, task: SumTask) -> Array:
        """Return the sum without noise as it is released: of records scaled by whole parts."""
        return self._parts * self.exact_total(task)

    def exact_total(self, task: SumTask) -> Array:
        """Return the sum without noise, in whole grains."""
        total = np.zeros(self.length, np.int64)  # also of a table without any chunk
        total += task.gather(self.adder()) if task.persons is None else self._add_persons(task)
        return total

    def _widths(self) -> Array:
        """Return how many grains wide noise of standard deviation 1 is, for each number."""
        return 1 / (self.weights() * self.step)

    def mask(self, table: Rows, write: Callable[[Self, Array], bytes], spending: Spending) -> bytes:
        """Charge, add up `table` and a share of the noise, and return what `write` makes of that.

        `write` masks and signs, and its answer is sealed in the ledger before it is returned, so
        that a retry returns the same bytes. The sum is kept nowhere. `table` is None, and nothing
        is charged, where `sharing` says that there is only noise.

        Privacy
        -------
        ``guarantee_``, under the assumption that it states, for whoever sees the file; and that of
        its own share for whoever can take away everything else.
        """
        self.check_settings()
        task = None
        if table is not None:
            self.adopt_schema()
            self.check_schema()
            given = take_in(self.schema, table, None, None)
            task, assumptions = self.make_task(*given.records)
            self._require_room(task)
        event = self.plan_noise().event
        assert isinstance(event, SharedSum)
        self.events_, self.receipt_ = (event,), None
        notes = [*(assumptions if task else ()), *self.assumed()]
        self.guarantee_ = self._guarantee(self.events_, notes)

        def draw(source: Source, receipt: Receipt | None) -> bytes:
            self.receipt_ = receipt
            exact = np.zeros(self.length, np.int64) if task is None else self.scaled_total(task)
            return write(self, noisy_sum(exact, self._widths(), event=event, source=source))

        if task is None:
            return draw(Noise().open(), None)
        return spending.run(draw, event, type(self).__name__)

    def _require_room(self, task: SumTask) -> None:
        """Refuse so many records that the sum of all sites might not fit 64 bits."""
        if not self.counts_sites and task.n_records > self._most_records:
            raise SettingsError(
                f"A masked sum of {type(self).__name__} takes at most {self._most_records:,} "
                "records in this study, and the table has more. Nothing was trained or charged. "
                "Ask who wrote the study for one with a single epsilon, or train on fewer records."
            )

    @property
    def _most_records(self) -> int:
        """How many records of one site always fit."""
        return int(ROOM / 4 / self.most_moved)

    @property
    def most_moved(self) -> float:
        """How far what counts, a record or a site, moves a released whole number at most."""
        return self.longest_part / (float(self.weights().min()) * self.step)

    def _add_persons(self, task: SumTask) -> Array:
        """Return the sum of persons' parts, each no longer than that of a single record."""
        add, longest = self.adder(), self.reach(Neighbours.ADD_REMOVE)
        weights = self.weights() * self.grain
        X, y = task.records.X, task.records.y
        whose = np.asarray(task.persons)
        order, held = np.argsort(whose, kind="stable"), np.bincount(whose)
        single = held[whose] == 1  # short enough by itself
        total = self._part(add, task, X[single], y[single])
        for rows in np.split(order, np.cumsum(held)[:-1]):
            if len(rows) > 1:
                part = self._part(add, task, X[rows], y[rows])
                length = float(np.linalg.norm(weights * part))
                if length > longest * ROUNDING:
                    part = np.trunc(part * (longest / length * ROUNDING)).astype(np.int64)
                total += part
        return total

    def _part(self, add: Adder, task: SumTask, X: Rows, y: Array) -> Array:
        assert task.read is not None
        return _add_chunks(add, task.read, InMemory(X, y).chunks())

    def released_state(self) -> dict[str, Array]:
        """Return the noisy sum, in whole grains; masked, where only that may leave."""
        return {MASKED: self.masked_} if hasattr(self, "masked_") else {"total": self.total_}

    def restore_state(self, state: dict[str, Array]) -> None:
        """Set the sum from what `released_state` returned."""
        self.__dict__.pop("_alone", None)
        if MASKED in state:
            self.masked_ = state[MASKED]
        else:
            self.total_ = state["total"]

    def check_state(self, state: State) -> bool:
        """Tell whether this is a sum of that many whole numbers."""
        name = "total" if self.sharing is None else MASKED
        return (
            set(state) == {name}
            and state[name].dtype == np.int64
            and state[name].shape == (self.length,)
        )

    def n_released(self, n_classes: int) -> int:
        """Return how many numbers a fit releases."""
        self.check_settings()
        self._declare_classes(n_classes)
        self.adder()  # refuses settings that do not fit columns and classes
        return self.length

    def describe_state(self, schema: Schema) -> str:
        """Say what leaves a site, and how many numbers that are."""
        made = clone(self)
        made.n_features_in_ = schema.n_features
        return f"{made.n_released(len(schema.classes or ())):,} {self.holds}"

    def _declare_classes(self, n_classes: int) -> None:
        if n_classes and not hasattr(self, "classes_"):
            self.classes_ = np.arange(n_classes)

    def implied(self, shapes: Mapping[str, Sequence[int]]) -> Implied:
        """Return the noise that was planned, and bounds on the sum that hold with it."""
        self.check_settings()
        size = getattr(self, "public_size_", None)
        plan = self.plan_noise()
        if self.sharing is not None:  # masked numbers are uniform
            states_none = self.sharing.only_noise or not self._states_size
            fits = states_none or (size is not None and size <= self._most_records)
            if (size is None) != states_none or not fits:  # or the total of its batch might not fit
                raise ContributionRejected("size")
            return Implied(plan.events, {MASKED: Bound((self.length,))})
        if (size is None) == self._states_size or not (
            size is None or is_count(size, MOST_RECORDS)
        ):
            raise ContributionRejected("size")
        scale = float(self.weights().min()) * self.grain
        most = self._most_length(MOST_RECORDS) / scale * (1 + 1e-9)
        bound = Bound((self.length,), -most, most, most)
        return Implied(plan.events, {"total": bound})

    def __sklearn_clone__(self) -> Self:
        made = super().__sklearn_clone__()
        made.sharing = self.sharing
        return made  # type: ignore[no-any-return]

    def _most_length(self, most_units: int) -> float:
        """Return the largest L2 norm of a weighted sum with noise, but for `UNLIKELY` ones.

        It is that of the units that there are, or of `most_units` if their number is hidden.
        """
        event = self.plan_noise().event
        n_units = 1 if self.counts_sites else getattr(self, "public_size_", most_units)
        longest = self.longest_part * n_units
        far = math.sqrt(2 * special.gammainccinv(self.length / 2, UNLIKELY))
        return longest + far * (0.0 if event is None else event.sigma)

    def fits_size(self, most: int) -> bool:
        """Tell whether so many units, and noise, can have this sum; a masked one says nothing."""
        if not hasattr(self, "total_") or self.sharing is not None:
            return True
        weights = self.weights() * self.grain
        length = float(np.linalg.norm(weights * self.total_))
        rounding = float(np.linalg.norm(weights))
        return length <= self._most_length(most) * (1 + 1e-9) + rounding

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = math.isfinite(self.epsilon) and self.noise is None
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class RowStatistic(Statistic):
    """A statistic of whole rows, which are scaled into the unit ball beside a constant."""

    makes_linear: ClassVar[bool] = True
    fit_intercept: ClassVar[bool] = True

    data_norm: float = 1.0
    intercept_scaling: float = 0.3

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides, the bound on the norm of a row among them."""
        return {**super().declared_by(schema), "data_norm": schema.norm}

    def check_settings(self) -> None:
        """Refuse settings that cannot work, before any record is looked at."""
        super().check_settings()
        self._require_moderate("data_norm", "intercept_scaling")


@dataclass(eq=False, repr=False, kw_only=True)
class ClassStatistic(ClassifierMixin, Statistic):  # type: ignore[misc]
    """A statistic that learns classes."""

    classes: ArrayLike | None = None
    classes_: Array = field(init=False)

    def _take_labels(
        self, chunked: tuple[Array, Array] | None, labels: Array | None, assumptions: list[str]
    ) -> Encoding:
        if chunked is not None:
            self.classes_, held = chunked
            return LabelCodes(type(self).__name__, held, None)
        classes = declared_classes(self)
        if classes is None:
            classes = read_classes(np.asarray(labels))
            assumptions.append(READ_LABELS)
        self.classes_ = classes
        return LabelCodes(type(self).__name__, classes, None)

    def encode_labels(self, labels: Array) -> Array:
        """Return each label's place among the classes."""
        return LabelCodes(type(self).__name__, self.classes_, None)(labels)

    @property
    def n_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes_)

    def predict_proba(self, X: Rows) -> Array:
        """Return each class' probability by the model of this sum alone."""
        return np.asarray(self._finished.predict_proba(validate_table(self, X, reset=False)))


@dataclass(eq=False, repr=False, kw_only=True)
class NumberStatistic(RegressorMixin, Statistic):  # type: ignore[misc]
    """A statistic that learns a number, whose bound is declared."""

    predicts_number: ClassVar[bool] = True
    label_bound: float | None = None

    def check_settings(self) -> None:
        """Refuse settings that cannot work, the lack of a bound among them."""
        super().check_settings()
        self._require_moderate("label_bound")

    @classmethod
    def declared_by(cls, schema: Schema) -> dict[str, Any]:
        """Return the settings that `schema` decides, the bound on labels among them."""
        return {**super().declared_by(schema), "label_bound": schema.label_bound}

    def _take_labels(
        self, chunked: tuple[Array, Array] | None, labels: Array | None, assumptions: list[str]
    ) -> Encoding:
        return LabelScale(type(self).__name__, float(self.label_bound or 0.0))

    def encode_labels(self, labels: Array) -> Array:
        """Return labels within ±1."""
        return LabelScale(type(self).__name__, float(self.label_bound or 0.0))(labels)


def add_public(statistic: Statistic, public: Public) -> Array:
    """Return the exact sum of labelled public records, as numbers.

    Privacy
    -------
    None for the public records.
    """
    chunk = iter([(as_doubles(public.X), statistic.encode_labels(np.asarray(public.y)))])
    with one_blas_thread():
        return statistic.adder()(chunk) * statistic.grain
