"""Dividing the records of a table into sites, public records and records to test on.

Records are divided by their slot in the table, never by content unless skew is asked for. All of a
person's records go to the same part and the same site.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats
from sklearn.base import clone
from sklearn.utils.validation import check_X_y

from consilience.errors import SettingsError, shielded
from consilience.learners.base import is_count
from consilience.privacy.mechanisms import Noise, Source
from consilience.tables.groups import split_sites
from consilience.tables.public import Features, Public

Array = NDArray[Any]
Test = float | tuple[Any, Any]
Transform = Callable[[Features], Features]

TEST_SHARE = 0.3


@dataclass(frozen=True)
class Division:
    """How a table is divided.

    Parameters
    ----------
    sites
        The number of sites of equal size, or the site of each record as an array.
    sizes
        The sites' numbers of records (of persons, where these are the unit) instead. What is left
        over is not used.
    site_column
        The column of the table that names the site of each record, instead.
    public
        Public records, or how many are cut from the table. With persons as the unit, persons are
        added until there are at least that many records.
    test
        The share to test on, or separate (X, y). None: the study's own test records, or 0.3.
    label_skew
        Above 0: a site's share of a class is a gamma variable with this shape, scaled to the sites'
        sizes. At 0.1 a site has few classes, at 100 about the same as all others.
    feature_skew
        Between 0 (none) and 1 (records are sorted along a random direction, and each site gets
        consecutive ones).

    Examples
    --------
    >>> import consilience as cs
    >>> division = cs.Division(sites=5, public=200, test=0.3)
    >>> division.sites
    5
    """

    sites: int | Collection[Any] = 10
    sizes: Sequence[int] | None = None
    site_column: str | None = None
    public: Public | int | None = None
    test: Test | None = None
    label_skew: float | None = None
    feature_skew: float | None = None


@dataclass(frozen=True)
class Records:
    """The encoded table: features, labels, and whose each record is, as a number from 0."""

    X: Features
    y: Array
    persons: Array | None
    numeric: bool  # whether labels are those of regressors

    @classmethod
    def check(
        cls, X: object, y: object, *, numeric: bool, persons: ArrayLike | None = None
    ) -> Records:
        """Check features and labels."""
        codes = None if persons is None else np.unique(persons, return_inverse=True)[1]
        rows, labels = _check_table(X, y, numeric=numeric)
        return cls(rows, labels, codes, numeric)

    @cached_property
    def records_of(self) -> Array:
        """How many records each person has."""
        return np.bincount(np.zeros(0, np.intp) if self.persons is None else self.persons)


@dataclass(frozen=True)
class Preparation:
    """What is done to all features, and the records it is learned from."""

    how: Any  # a transformer, or a function of records that returns a function of features
    learned_on: str = "public"

    def learn(self, seen: Features, seed: int) -> Transform:
        """Return what `how` makes of the records it may see: a function of features."""
        if not hasattr(self.how, "transform"):
            return cast(Transform, self.how(seen))
        made = clone(self.how)
        loose = [
            name
            for name, value in made.get_params().items()
            if name.endswith("random_state") and value is None
        ]
        return cast(Transform, made.set_params(**dict.fromkeys(loose, seed)).fit(seen).transform)


@dataclass(frozen=True)
class Cut:
    """One division, prepared: what is tested on, what is public, the rows of `X` at each site."""

    X_test: Features
    y_test: Array
    public: Public | None
    sites: tuple[Array, ...]
    X: Features = field(repr=False)
    at: Array | None = None  # the site of each test record, where sites are given

    def tested_at(self, site: int) -> Array:
        """Return which test records tell how well a site does: its own, where sites are given."""
        every = np.ones(len(self.y_test), dtype=bool)
        return every if self.at is None else self.at == site


@dataclass(frozen=True)
class Divider:
    """A checked division of checked records: cuts them anew in every repeat."""

    records: Records
    division: Division
    ids: Array | None  # the site of each unit, where sites are given
    preparation: Preparation | None
    split_seed: int

    @classmethod
    def check(
        cls,
        records: Records,
        division: Division,
        preparation: Preparation | None,
        seed: int | None,
    ) -> Divider:
        """Check a division of these records, before anything is trained."""
        d = division
        test = TEST_SHARE if d.test is None else d.test
        if isinstance(test, tuple) and len(test) == 2:
            test = _check_table(*test, numeric=records.numeric)
            same = test[0].shape[1] == records.X.shape[1]
            require("test", "another table", same, "like X in its features")
        else:
            fits = isinstance(test, float) and 0 < test < 1
            require("test", test, fits, "a share in (0, 1), or (X, y)")
        fits = d.public is None or isinstance(d.public, Public) or is_count(d.public)
        require("public", d.public, fits, "Public records, a number > 0 of them, or None")
        same = not isinstance(d.public, Public) or d.public.X.shape[1] == records.X.shape[1]
        require("public", "another table", same, "like X in its features")
        ids = _check_sites(records, d)
        _check_skew(d, records)
        if preparation is not None:
            fits = preparation.learned_on == "train" or d.public is not None
            require(
                "public", d.public, fits, "given for prepare to learn from, or prepare_on='train'"
            )
        sites, sizes = d.sites if ids is None else 0, None if d.sizes is None else tuple(d.sizes)
        checked = replace(d, sites=sites, sizes=sizes, site_column=None, test=test)
        fresh = Noise(seed=None).open(stream=2**32) if seed is None else None
        split = derive_seed(int(seed or 0), "split") if fresh is None else int(fresh.words(1)[0])
        return cls(records, checked, ids, preparation, split)

    @property
    def n_sites(self) -> int:
        """How many sites there are."""
        if self.ids is not None:
            return int(self.ids.max() + 1)
        sites, sizes = self.division.sites, self.division.sizes
        return len(sizes) if sizes is not None else int(cast(int, sites))

    def cut(self, repeat: int) -> Cut:
        """Return the division of one repeat: the same for all methods."""
        source = Noise(seed=self.split_seed).open(stream=repeat)
        order = source.permutation(
            len(self.records.y) if self.records.persons is None else len(self.records.records_of)
        )
        test, given = self.division.test, self.division.public
        n_test = 0 if not isinstance(test, float) else round(test * len(order))
        n_public = self._n_public(order[n_test:])
        tested, shared, rest = np.split(order, [n_test, n_test + n_public])
        sites = tuple(np.sort(self._rows(units)) for units in self._divide_sites(rest, source))
        at = None if self.ids is None else self._sites_of(tested)
        tested, shared = self._rows(tested), self._rows(shared)
        X, change = self.records.X, None
        if self.preparation is not None:
            seen = given.X if isinstance(given, Public) else X[shared]
            if self.preparation.learned_on == "train":
                seen = X[np.sort(self._rows(order[n_test:]))]
            change = self.preparation.learn(
                seen, derive_seed(self.split_seed, repeat, "prepare") % 2**32
            )
            X = change(X)
        public = Public(X[shared], self.records.y[shared]) if n_public else None
        if isinstance(given, Public):
            public = given if change is None else Public(change(given.X), given.y)
        if not isinstance(test, tuple):
            return Cut(X[tested], self.records.y[tested], public, sites, X, at)
        X_test = test[0] if change is None else change(test[0])
        return Cut(X_test, np.asarray(test[1]), public, sites, X)

    def _n_public(self, order: Array) -> int:
        """Return how many units are public: records, or enough persons to have so many."""
        public = self.division.public
        if public is None or isinstance(public, Public):
            return 0
        if self.records.persons is None:
            return int(public)
        reached = np.cumsum(self.records.records_of[order])
        return min(int(np.searchsorted(reached, public)) + 1, len(order))

    def _rows(self, units: Array) -> Array:
        """Return the records of these persons; where records are the unit, they are the units."""
        persons = self.records.persons
        return units if persons is None else np.flatnonzero(np.isin(persons, units))

    def _sites_of(self, units: Array) -> Array:
        """Return the site of each record of these units, in the order of `_rows`."""
        assert self.ids is not None
        persons = self.records.persons
        return np.asarray(self.ids[units if persons is None else persons[self._rows(units)]])

    def _divide_sites(self, rest: Array, source: Source) -> Sequence[Array]:
        d = self.division
        if self.ids is not None:
            return [rest[self.ids[rest] == site] for site in range(self.n_sites)]
        sizes = d.sizes or [len(part) for part in np.array_split(rest, self.n_sites)]
        if sum(sizes) > len(rest) or min(sizes) < 1:
            unit = "records" if self.records.persons is None else "persons"
            raise SettingsError(
                f"{len(sizes)} sites of {sum(sizes)} {unit} in all were asked for, but "
                f"{len(rest)} are left after cutting test and public records. Nothing was "
                f"trained. Ask for fewer, at least one {unit[:-1]} per site."
            )
        if d.label_skew is not None:
            unused = [len(rest) - sum(sizes)] if sum(sizes) < len(rest) else []
            labels, every = self.records.y[rest], [*sizes, *unused]
            return _skew_labels(rest, labels, every, d.label_skew, source)[: len(sizes)]
        if d.feature_skew is not None:
            direction = source.normal(self.records.X.shape[1])
            along = np.asarray(self.records.X[rest] @ direction)
            score = d.feature_skew * stats.rankdata(along) / len(rest)
            mixed = score + (1 - d.feature_skew) * source.uniform(len(rest))
            rest = rest[np.argsort(mixed, kind="stable")]
        return np.split(rest, np.cumsum(sizes))[:-1]


def require(name: str, value: object, fits: bool, must: str) -> None:
    """Refuse an argument of `simulate` that does not fit."""
    if not fits:
        raise SettingsError(
            f"The {name!r} parameter of simulate must be {must}. Got {reprlib.repr(value)} instead."
        )


def derive_seed(seed: int, *names: object) -> int:
    """Return a 256-bit seed of its own for each tuple of names, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest(), "little")


@shielded
def _check_table(X: object, y: object, *, numeric: bool) -> tuple[Features, Array]:
    checked = check_X_y(X, y, accept_sparse="csr", dtype=np.float64, y_numeric=numeric)
    return cast(tuple[Features, Array], checked)


def _check_sites(records: Records, division: Division) -> Array | None:
    """Return the site of each unit where sites are given by id, else check their number."""
    sites, sizes, persons = division.sites, division.sizes, records.persons
    must = "a number > 0, an id per record, or a column of X"
    if sizes is not None:
        fits = len(sizes) > 0 and all(map(is_count, sizes))
        require("sizes", sizes, fits, "a list of whole numbers > 0")
    if isinstance(sites, int | np.integer | float):
        require("sites", sites, is_count(sites), must)
        return None
    require("sites", sites, len(sites) == len(records.y), must)
    given = (sizes, division.label_skew, division.feature_skew)
    require(
        "sizes, label_skew, feature_skew",
        given,
        given == (None,) * 3,
        "left out if sites are given by id",
    )
    ids = np.empty(len(records.y), np.intp)
    for site, rows in enumerate(split_sites(len(ids), cast(ArrayLike, sites), persons=persons)):
        ids[rows] = site
    return ids if persons is None else ids[np.unique(persons, return_index=True)[1]]


def _check_skew(division: Division, records: Records) -> None:
    label, feature = division.label_skew, division.feature_skew
    both = label is not None and feature is not None
    require("feature_skew", feature, not both, "left out if label_skew is given")
    fits = label is None or (label > 0 and not records.numeric)
    require("label_skew", label, fits, "> 0, for classes")
    fits = feature is None or 0 <= feature <= 1
    require("feature_skew", feature, fits, "in [0, 1]")
    fits = records.persons is None or (label is None and feature is None)
    require("label_skew, feature_skew", (label, feature), fits, "left out where persons are hidden")


def _skew_labels(
    rest: Array, labels: Array, sizes: Sequence[int], shape: float, source: Source
) -> list[Array]:
    """Give each site its number of records, with classes in gamma-distributed proportions.

    Every record is used once.
    """
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    uniform = source.uniform(len(sizes) * len(counts)).reshape(len(sizes), len(counts))
    shares = special.gammaincinv(shape, uniform)
    for _ in range(300):  # scale rows and columns in turn until the table has the right sums
        shares = np.maximum(shares, 1e-30)
        shares *= counts / shares.sum(axis=0)
        shares *= (np.asarray(sizes) / shares.sum(axis=1))[:, None]
    table = np.floor(shares * np.minimum(1.0, counts / shares.sum(axis=0))).astype(int)
    left = counts - table.sum(axis=0)
    for site, size in enumerate(sizes):  # what rounding left over: any class that has some
        while (missing := size - table[site].sum()) > 0:
            richest = int(left.argmax())
            taken = min(missing, left[richest])
            table[site, richest] += taken
            left[richest] -= taken
    parts = [np.split(rest[codes == k], np.cumsum(table[:-1, k])) for k in range(len(counts))]
    return [np.concatenate([part[site] for part in parts]) for site in range(len(sizes))]
