"""The site's list of charges: append-only, hash-chained, the authority on what was spent.

Order of a private training: `Ledger.charge` reserves and commits, then noise is drawn, then
`Ledger.seal` stores the result, then the result may leave. A crash wastes budget, it never hides a
draw. The argument, the rounding and what the ledger cannot promise are in
``docs/guarantees/ledger.md``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from consilience.display.html import bars, card
from consilience.errors import BudgetExceeded, GuaranteeVoid, LedgerDamaged, SettingsError
from consilience.privacy.accounting import (
    EVENTS,
    Event,
    as_counted,
    events_from_json,
    events_to_json,
    total,
    total_rho,
)
from consilience.privacy.guarantee import Budget, Guarantee, Neighbours, Unit, show_bound, show_left

NANO = 10**9  # epsilon and rho are counted in whole billionths
FEMTO = 10**15  # delta in whole units of 1e-15: near 1 a float is hardly finer

_APPLICATION = 1129206604  # "CNSL", in the file's header
_VERSION = 2
_GENESIS = "0" * 64
_LONGEST_TEXT = 200
_BEYOND = "recovered: charges beyond the limit that was known"  # a limit that no owner set
_LARGEST_PAYLOAD_BYTES = 2**29
_LARGEST_LIMIT = 10_000  # beyond it nothing is hidden, and every amount below fits 64 bits

_ENTRIES = """
CREATE TABLE entries (
  number INTEGER PRIMARY KEY CHECK (number > 0),
  kind TEXT NOT NULL CHECK (kind IN ('allow', 'charge', 'seal', 'permit', 'forbid', 'exact')),
  time TEXT NOT NULL,
  version TEXT NOT NULL,
  dataset TEXT NOT NULL,
  unit TEXT NOT NULL,
  neighbours TEXT NOT NULL,
  key TEXT CHECK (kind IN ('allow', 'permit', 'forbid') OR key IS NOT NULL),
  purpose TEXT,
  study TEXT,
  nano_epsilon INTEGER CHECK (nano_epsilon > 0 AND (kind != 'charge' OR nano_epsilon IS NOT NULL)),
  femto_delta INTEGER CHECK (femto_delta >= 0 AND (kind != 'charge' OR femto_delta IS NOT NULL)),
  nano_rho INTEGER CHECK (nano_rho > 0),
  events TEXT,
  payload_hash TEXT,
  previous TEXT NOT NULL,
  hash TEXT NOT NULL UNIQUE
) STRICT
"""
_AROUND_ENTRIES = (
    "CREATE UNIQUE INDEX one_per_key ON entries (key, kind)",
    "CREATE INDEX by_dataset ON entries (dataset, kind, nano_epsilon, femto_delta, nano_rho)",
    """CREATE VIEW charges AS
  SELECT charge.*, seal.payload_hash AS seal_hash FROM entries AS charge
  LEFT JOIN entries AS seal ON seal.key = charge.key AND seal.kind = 'seal'
  WHERE charge.kind = 'charge'""",
    """CREATE TRIGGER entries_stay BEFORE DELETE ON entries
  BEGIN SELECT RAISE(ABORT, 'entries are never deleted'); END""",
    """CREATE TRIGGER entries_hold BEFORE UPDATE ON entries
  BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END""",
    f"PRAGMA user_version = {_VERSION}",
)
_SCHEMA = ";".join(
    (
        "PRAGMA journal_mode = WAL",
        "BEGIN",
        f"PRAGMA application_id = {_APPLICATION}",
        _ENTRIES,
        *_AROUND_ENTRIES,
        "CREATE TABLE payloads (key TEXT PRIMARY KEY, payload BLOB NOT NULL) STRICT",
        """CREATE TABLE head (
  one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL, hash TEXT NOT NULL
) STRICT""",
        "INSERT INTO head VALUES (1, 0, hex(zeroblob(32)))",
        """CREATE TRIGGER payloads_stay BEFORE DELETE ON payloads
  BEGIN SELECT RAISE(ABORT, 'payloads are never deleted'); END""",
        """CREATE TRIGGER payloads_hold BEFORE UPDATE ON payloads
  BEGIN SELECT RAISE(ABORT, 'payloads are never changed'); END""",
        """CREATE TRIGGER head_stays BEFORE DELETE ON head
  BEGIN SELECT RAISE(ABORT, 'the head is never deleted'); END""",
        "COMMIT;",
    )
)
# Format 1 knows limits, charges and seals only. Its entries move into a table that knows exact
# contributions too; none of them changes, so the chain stays as it is.
_FROM_FORMAT_1 = (
    "DROP VIEW charges",
    "ALTER TABLE entries RENAME TO entries_1",
    _ENTRIES,
    "INSERT INTO entries SELECT * FROM entries_1 ORDER BY number",
    "DROP TABLE entries_1",
    *_AROUND_ENTRIES,
)
_SUMS = """
SELECT coalesce(sum(nano_epsilon), 0), coalesce(sum(femto_delta), 0),
  CASE WHEN count(*) = count(nano_rho) THEN coalesce(sum(nano_rho), 0) END
FROM entries WHERE dataset = ? AND kind = 'charge'
"""
_INSERT = """
INSERT INTO entries VALUES (
  :number, :kind, :time, :version, :dataset, :unit, :neighbours, :key, :purpose, :study,
  :nano_epsilon, :femto_delta, :nano_rho, :events, :payload_hash, :previous, :hash)
"""

_UNCHARGED = "No charge was confirmed, so nothing may be drawn or leave; earlier charges stand."
_UNSEALED = (
    "The charge was made and stands; its result could not be stored and is lost, so nothing may "
    "leave. To train again is charged again."
)

# A process that forks while another of its threads is inside SQLite hands its child SQLite's books
# of the file locks without the locks. So one thread at a time, and a fork waits until none is
# inside.
_inside = threading.RLock()
if sys.platform != "win32":  # pragma: no branch
    os.register_at_fork(
        before=_inside.acquire, after_in_parent=_inside.release, after_in_child=_inside.release
    )


@cache
def _software() -> str:
    return version("consilience")


def spent_units(value: float, units: int) -> int:
    """Return what `value` costs in whole units, rounded up after a discount of 2⁻⁵⁰.

    Without the discount the binary number 0.1 would cost a unit too much, and 0.1 + 0.2 more than
    0.3. With it all charges together exceed the limit by at most 2⁻⁵⁰ of it;
    docs/guarantees/ledger.md says why that is sound.
    """
    return math.ceil(Fraction(value) * units * (1 - Fraction(1, 2**50)))


def limit_units(value: float, units: int) -> int:
    """Return the limit `value` in whole units, rounded down from its decimal number."""
    return math.floor(Fraction(repr(float(value))) * units)


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One reservation of budget, as the ledger holds it; amounts are rounded up.

    ``hash`` is its place in the chain: anyone who keeps a receipt can later demand that the ledger
    still holds it.
    """

    id: int
    key: str
    dataset: str
    purpose: str
    study: str
    epsilon: float
    delta: float
    rho: float | None
    unit: Unit
    neighbours: Neighbours
    events: tuple[Event, ...]
    state: Literal["reserved", "sealed"]
    payload_hash: str | None
    time: str
    version: str
    hash: str

    @property
    def receipt(self) -> dict[str, Any]:
        """The proof of the charge that a contribution carries: settings and hashes only."""
        return {
            "entry": self.id,
            "key": self.key,
            "dataset": self.dataset,
            "study": self.study,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "rho": self.rho,
            "unit": str(self.unit),
            "neighbours": str(self.neighbours),
            "events_hash": hashlib.sha256(events_to_json(self.events).encode()).hexdigest(),
            "hash": self.hash,
        }


class Note(NamedTuple):
    """An entry that costs nothing: a limit, or what the owner says about exact contributions.

    ``kind`` is ``"allow"`` for a limit and the reason given for it, ``"permit"`` or ``"forbid"``
    for exact contributions as such, and ``"exact"`` for one of them, which no epsilon bounds.
    """

    id: int
    kind: str
    dataset: str
    key: str | None
    purpose: str | None
    study: str | None
    time: str
    hash: str


def show_amount(value: float) -> str:
    """Return an epsilon as the ledger counts it, to the last billionth."""
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _show_amounts(amounts: Amounts, show: Callable[[float], str]) -> str:
    named = amounts._asdict().items()
    return ", ".join(f"{name} {show(value)}" for name, value in named if value) or "nothing"


class Amounts(NamedTuple):
    """One number for each additive quantity, or None: no limit, or an event without a rho."""

    epsilon: float | None
    delta: float | None
    rho: float | None


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What the owner of a data set allowed, what was spent of it, and what is left."""

    dataset: str
    unit: Unit
    neighbours: Neighbours
    limit: Amounts
    spent: Amounts
    left: Amounts

    @property
    def share_spent(self) -> float:
        """The share of the limit that was spent: of epsilon, or of rho where that is limited."""
        pairs = ((self.spent.rho, self.limit.rho), (self.spent.epsilon, self.limit.epsilon))
        return next((spent / limit for spent, limit in pairs if spent is not None and limit), 0.0)

    def cost(self, guarantee: Guarantee) -> Amounts:
        """Return the most that is charged here for anything that keeps `guarantee`.

        It is stated under this data set's neighbour relation and in the ledger's units.
        """
        if guarantee.unit not in (self.unit, Unit.SITE):  # a whole site is every unit of it
            raise _other_unit({guarantee.unit}, self.unit, self.dataset)
        return _as_numbers((*_in_units(guarantee.count(self.unit, self.neighbours)), None))

    def charge(self, events: Iterable[Event]) -> Amounts:
        """Return what is charged here for `events`, but for a rho; they hide this unit."""
        counted = as_counted(events, self.unit, self.neighbours)
        return _as_numbers((*_in_units(total(counted, self.neighbours)), None))

    def is_limited_by(self, budget: Budget) -> bool:
        """Tell whether this very budget is what the owner allowed."""
        limit = _as_numbers(_limits(budget))
        here = (self.unit, self.neighbours, self.limit)
        return here == (budget.unit, budget.neighbours, limit)

    def holds(self, cost: Amounts) -> bool:
        """Tell whether so much epsilon and delta is left."""
        pairs = ((cost.epsilon, self.left.epsilon), (cost.delta, self.left.delta))
        return all(left is None or (asked or 0.0) <= left for asked, left in pairs)


def _in_units(stated: Guarantee) -> tuple[int, int]:
    """Return epsilon and delta in whole units, as they are charged."""
    return max(1, spent_units(stated.epsilon, NANO)), spent_units(stated.delta, FEMTO)


def _other_unit(units: set[Unit], limited: Unit, dataset: str) -> GuaranteeVoid:
    return GuaranteeVoid(
        f"Data set {dataset!r} was to be charged for events per {' and per '.join(sorted(units))}, "
        f"but its limit is per {limited}: they have no common sum. Nothing was charged. Train with "
        f"unit='{limited}'."
    )


_Units = tuple[int | None, int | None, int | None]  # the same quantities in whole units


def _limits(budget: Budget) -> _Units:
    """Return a budget in whole units."""
    return (
        None if budget.epsilon is None else limit_units(budget.epsilon, NANO),
        None if budget.epsilon is None else limit_units(budget.delta, FEMTO),
        None if budget.rho is None else limit_units(budget.rho, NANO),
    )


@dataclass
class _Account:
    """The limit of one data set and what was charged to it, in whole units."""

    unit: Unit
    neighbours: Neighbours
    limits: _Units
    sums: _Units = (0, 0, 0)
    may_be_exact: bool = False

    def add(self, cost: _Units) -> None:
        epsilon, delta, rho = (
            None if a is None or b is None else a + b for a, b in zip(self.sums, cost, strict=True)
        )
        self.sums = (epsilon, delta, rho)

    def left(self) -> _Units:
        epsilon, delta, rho = (
            None if a is None else a - (b or 0) for a, b in zip(self.limits, self.sums, strict=True)
        )
        return (epsilon, delta, rho)

    def first_over(self, cost: _Units) -> int | None:
        """Return which limited quantity would not hold `cost`, or None if all do."""
        pairs = enumerate(zip(self.left(), cost, strict=True))
        return next(
            (
                i
                for i, (left, asked) in pairs
                if left is not None and (asked is None or asked > left)
            ),
            None,
        )

    def hold(self, cost: _Units) -> None:
        """Raise the limits as far as they have to be for `cost`."""
        epsilon, delta, rho = (
            None if limit is None else max(limit, (spent or 0) + (asked or 0))
            for limit, spent, asked in zip(self.limits, self.sums, cost, strict=True)
        )
        self.limits = (epsilon, delta, rho)

    def balance(self, dataset: str) -> Balance:
        limit, spent, left = map(_as_numbers, (self.limits, self.sums, self.left()))
        return Balance(
            dataset=dataset,
            unit=self.unit,
            neighbours=self.neighbours,
            limit=limit,
            spent=spent,
            left=left,
        )


def _as_numbers(amounts: _Units) -> Amounts:
    pairs = zip(amounts, (NANO, FEMTO, NANO), strict=True)
    return Amounts(*(None if amount is None else amount / units for amount, units in pairs))


class Ledger:
    """Open the ledger at `path`, or create an empty one that only its owner may read (mode 0600).

    Any number of processes and threads may use one file on a local disk at once; each operation
    opens its own connection, so a ledger may be handed to threads and forked children. Nothing is
    ever changed or deleted.

    Privacy
    -------
    No draw without a committed charge, no charge beyond the owner's limit, no charge lost or
    counted twice after a crash; per data set, in the unit and neighbour relation of its limit. Not
    hidden: the ledger file itself holds settings and sealed results. Proof and limits:
    docs/guarantees/ledger.md.

    Examples
    --------
    >>> from consilience.privacy.accounting import Laplace
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.sqlite")
    >>> _ = ledger.allow("ward", Budget(epsilon=1.0))
    >>> event = Laplace(unit="record", neighbours="replace-one", sensitivity=1.0, scale=2.0)
    >>> charge = ledger.charge([event], dataset="ward", key="first", purpose="count")
    >>> ledger.seal(charge, b"the noisy count").state
    'sealed'
    >>> ledger.balance("ward").left.epsilon
    0.5
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_seconds: float = 60.0) -> None:
        self.path = Path(path).absolute()
        self.timeout_seconds = timeout_seconds
        self._study = ""
        _software()  # looked up once, while the package can be read
        journal_left = os.path.lexists(
            f"{self.path}-wal"
        )  # asked first: a creator makes the file, then its journal
        if not os.path.lexists(self.path):
            if journal_left:
                raise self._damage(
                    "Opening", "the file is gone and only its journal (-wal) is left"
                )
            try:
                self._new_file(self.path, lambda db: db.executescript(_SCHEMA))
            except FileExistsError:  # another process was faster: its file is as good
                pass
        with self._session("Opening"):
            pass

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    def _repr_html_(self) -> str:
        balances = [self.balance(dataset) for dataset in self.datasets()]
        head = ("data set", "limit", "spent", "left", "charges", "hides")
        rows = [
            (
                each.dataset,
                _show_amounts(each.limit, show_bound),
                _show_amounts(each.spent, show_bound),
                _show_amounts(each.left, show_left),
                f"{len(self.charges(each.dataset)):,}",
                f"one {each.unit}, {each.neighbours}",
            )
            for each in balances
        ]
        chart = bars(
            [(each.dataset, 100 * each.share_spent) for each in balances],
            "Spent of what may ever be spent, in percent",
        )
        said = [] if rows else ["No data set has a limit yet. Call allow(dataset, budget)."]
        return card(
            f"Ledger {self.path.name}", ("", said, [head, *rows] if rows else []), chart=chart
        )

    def within(self, study: str) -> Ledger:
        """Return the same ledger, whose charges carry the digest of `study`."""
        view = copy.copy(self)
        view._study = study
        return view

    def allow(self, dataset: str, budget: Budget, *, reason: str = "") -> Balance:
        """Declare the lifetime limit that the data owner sets on `dataset`, or replace it.

        Unit, neighbour relation and kind (epsilon or rho) are fixed by the first call, and no limit
        goes below what is spent. The same limit again adds no entry.
        """
        _check_text("dataset", dataset)
        _check_text("reason", reason, may_be_empty=True)
        limits = _limits(budget)
        if not 0 < (limits[0] or limits[2] or 0) <= _LARGEST_LIMIT * NANO:
            raise SettingsError(
                f"The limit for data set {dataset!r} must lie between 1e-9 and {_LARGEST_LIMIT}. "
                "Nothing was recorded. Choose a limit in that range."
            )
        with self._session("Recording a limit", write=True) as db:
            account = _account(db, dataset)
            if account is None:
                account = _Account(budget.unit, budget.neighbours, limits)
            elif (account.unit, account.neighbours) != (budget.unit, budget.neighbours) or (
                (account.limits[2] is None) != (limits[2] is None)
            ):
                raise SettingsError(
                    f"The limit for data set {dataset!r} was to change its kind, but charges in "
                    f"one unit, neighbour relation and measure (here: per {account.unit}, "
                    f"{account.neighbours}) have no sum in another. Nothing was recorded. Keep "
                    "the kind and change only the amount."
                )
            elif account.limits == limits:
                return account.balance(dataset)
            account.limits = limits
            if account.first_over((0, 0, 0)) is not None:
                raise SettingsError(
                    f"The limit for data set {dataset!r} was to be lowered below what is spent "
                    "already. Nothing was recorded and the old limit stands. Choose at least "
                    "what is spent."
                )
            content = {"purpose": reason} if reason else {}
            self._append(db, "allow", dataset, account, limits, **content)
        return account.balance(dataset)

    def charge(
        self, events: Iterable[Event], *, dataset: str, key: str, purpose: str, study: str = ""
    ) -> Charge:
        """Reserve the cost of `events` durably before their noise is drawn, or refuse.

        `key` names this one training. A second call with the same key and content is never charged:
        if the first was sealed it returns that charge (fetch its bytes with `sealed`, draw
        nothing), otherwise it raises, because a draw of the first may have been seen.
        """
        return self._charge(tuple(events), dataset, key, purpose, study or self._study)

    def recover(
        self, events: Iterable[Event], *, dataset: str, key: str, purpose: str, study: str = ""
    ) -> Charge:
        """Enter a charge that this ledger has lost, whatever is left; a repetition adds nothing.

        A `key` that names another charge is refused.

        What was drawn was drawn: where the limit here is too low for it, the limit was higher when
        it was charged, and is raised to exactly what is spent, so that nothing is left.
        """
        study = study or self._study
        return self._charge(tuple(events), dataset, key, purpose, study, happened=True)

    def _charge(
        self,
        events: tuple[Event, ...],
        dataset: str,
        key: str,
        purpose: str,
        study: str,
        *,
        happened: bool = False,
    ) -> Charge:
        for name, text in (
            ("dataset", dataset),
            ("key", key),
            ("purpose", purpose),
            ("study", study),
        ):
            _check_text(name, text, may_be_empty=name == "study")
        if not events or any(
            EVENTS.get(type(event).__name__) is not type(event) for event in events
        ):
            raise SettingsError(
                f"Data set {dataset!r} was to be charged for something other than one or more "
                "events of this version, whose cost can be recomputed. Nothing was charged. Pass "
                "the events of one training."
            )
        content = events_to_json(events)
        with self._session("Charging", write=True) as db:
            existing = _find(db, key)
            if existing is not None:
                return _repeated(existing, (dataset, study, content), happened=happened)
            account = _account(db, dataset)
            if account is None:
                raise BudgetExceeded(
                    f"Data set {dataset!r} cannot be charged for {purpose!r}: its owner has "
                    "allowed nothing yet. Nothing was charged or drawn. Ask the data owner to "
                    "declare a limit."
                )
            cost = _cost(events, account, dataset)
            over = account.first_over(cost)
            if over is not None and happened:
                account.hold(cost)
                self._append(db, "allow", dataset, account, account.limits, purpose=_BEYOND)
            elif over is not None:
                name, asked, left, limit = (
                    Amounts._fields[over],
                    *(
                        _as_numbers(amounts)[over]
                        for amounts in (cost, account.left(), account.limits)
                    ),
                )
                raise BudgetExceeded(
                    f"Data set {dataset!r} cannot be charged {name}={asked!r} for {purpose!r}: "
                    f"{left!r} of {limit!r} is left. Nothing was charged or drawn. "
                    f"{f'Use {name} <= {left!r}, or ask' if left else 'Ask'} the data owner to "
                    "raise the limit."
                )
            self._append(
                db,
                "charge",
                dataset,
                account,
                cost,
                key,
                purpose=purpose,
                study=study,
                events=content,
            )
            charge = _find(db, key)
        assert charge is not None
        return charge

    def was_exceeded(self, dataset: str) -> bool:
        """Tell whether recovered charges raised the limit, and no owner has decided since."""
        limits = [note for note in self.notes(dataset) if note.kind == "allow"]
        return bool(limits) and limits[-1].purpose == _BEYOND

    def permit_exact(self, dataset: str, *, reason: str, permitted: bool = True) -> None:
        """Record whether the data owner lets exact contributions of `dataset` leave, and why.

        Nothing bounds what an exact contribution discloses, so a limit says nothing about it: it
        needs a permission of its own.
        """
        _check_text("reason", reason)
        with self._session("Recording a permission", write=True) as db:
            account = self._declared(db, dataset)
            if _may_be_exact(db, dataset) != permitted:
                kind = "permit" if permitted else "forbid"
                self._append(db, kind, dataset, account, purpose=reason)

    def permits_exact(self, dataset: str) -> bool:
        """Tell whether the data owner lets exact contributions of `dataset` leave."""
        with self._session("Reading a permission") as db:
            return _may_be_exact(db, dataset)

    def record_exact(self, *, dataset: str, key: str, purpose: str, study: str = "") -> Note:
        """Record an exact contribution before it is made, or refuse; a repetition adds nothing."""
        content = {"key": key, "purpose": purpose, "study": study or self._study}
        for name, text in {"dataset": dataset, **content}.items():
            _check_text(name, text, may_be_empty=name == "study")
        with self._session("Recording an exact contribution", write=True) as db:
            account = self._declared(db, dataset)
            if not _may_be_exact(db, dataset):
                raise BudgetExceeded(
                    f"An exact contribution of data set {dataset!r} was to be recorded for "
                    f"{purpose!r}, and its owner has not permitted any. Nothing was recorded. Ask "
                    "the data owner."
                )
            if not _notes(db, "key = ? AND kind = 'exact'", key):
                self._append(db, "exact", dataset, account, (None, None, None), **content)
            return _notes(db, "key = ? AND kind = 'exact'", key)[0]

    def recover_exact(self, *, dataset: str, key: str, purpose: str, study: str = "") -> Note:
        """Enter an exact contribution that this ledger has lost; a repetition adds nothing.

        It was made, so it was permitted then. Whether others are permitted stays as it was: the
        permission is entered and taken back together with it.
        """
        content = {"key": key, "purpose": purpose, "study": study or self._study}
        for name, text in {"dataset": dataset, **content}.items():
            _check_text(name, text, may_be_empty=name == "study")
        with self._session("Recording an exact contribution", write=True) as db:
            account = self._declared(db, dataset)
            if not _notes(db, "key = ? AND kind = 'exact'", key):
                permitted = _may_be_exact(db, dataset)
                if not permitted:
                    reason = "recovered: exact contributions were made"
                    self._append(db, "permit", dataset, account, purpose=reason)
                self._append(db, "exact", dataset, account, (None, None, None), **content)
                if not permitted:
                    reason = "recovered: what was made then permits no others"
                    self._append(db, "forbid", dataset, account, purpose=reason)
            return _notes(db, "key = ? AND kind = 'exact'", key)[0]

    def _declared(self, db: sqlite3.Connection, dataset: str) -> _Account:
        """Return the account of a data set that has a limit."""
        account = _account(db, dataset)
        if account is None:
            raise SettingsError(
                f"Data set {dataset!r} has no limit, and so no owner who decides about it. "
                "Nothing was recorded. Check the name, or declare a limit with 'allow'."
            )
        return account

    def notes(self, dataset: str | None = None) -> list[Note]:
        """Return all entries that cost nothing in order, or those on one data set."""
        with self._session("Reading the entries") as db:
            return _notes(db, "?1 IS NULL OR dataset = ?1", dataset)

    def seal(self, charge: Charge, payload: bytes) -> Charge:
        """Store the one result of `charge`, after which it may leave; repeating is harmless."""
        if not isinstance(payload, bytes) or len(payload) > _LARGEST_PAYLOAD_BYTES:
            raise SettingsError(
                f"A sealed result must be bytes, at most {_LARGEST_PAYLOAD_BYTES} of them. "
                "Nothing was sealed and the charge stands. Seal the finished file."
            )
        digest = hashlib.sha256(payload).hexdigest()
        with self._session("Sealing", write=True, state=_UNSEALED) as db:
            existing = _find(db, charge.key)
            if existing is None or existing.hash != charge.hash:
                raise SettingsError(
                    f"The charge with key {charge.key!r} is not in the ledger {self.path}. "
                    "Nothing was sealed. Seal in the ledger that made the charge."
                )
            if existing.payload_hash == digest:
                return existing
            if existing.state == "sealed":
                raise SettingsError(
                    f"The charge with key {charge.key!r} was to be sealed with another result, "
                    "but it paid for one only, which is sealed. The first result stands. Use "
                    "that one, or charge again under a new key."
                )
            db.execute("INSERT INTO payloads VALUES (?, ?)", (charge.key, payload))
            self._append(
                db, "seal", existing.dataset, existing, key=charge.key, payload_hash=digest
            )
        return replace(existing, state="sealed", payload_hash=digest)

    def sealed(self, key: str) -> bytes | None:
        """Return the result stored under `key`, or None while there is none."""
        with self._session("Reading a result") as db:
            existing = _find(db, key)
            if existing is None or existing.payload_hash is None:
                return None
            payload = _payload(db, key, existing.payload_hash)
            if payload is None:
                raise self._damage(
                    "Reading a result", f"the result of entry {existing.id} was changed or removed"
                )
            return payload

    def balance(self, dataset: str) -> Balance:
        """Return limit, sums and rest of `dataset`."""
        with self._session("Reading the balance") as db:
            account = _account(db, dataset)
        if account is None:
            raise SettingsError(
                f"The balance of data set {dataset!r} was asked for, but no limit was ever "
                "declared for it. Nothing was changed. Check the name, or declare a limit with "
                "'allow'."
            )
        return account.balance(dataset)

    def head(self) -> str:
        """Return the hash of the last entry, which stands for all of them; `verify` checks it."""
        with self._session("Reading the head") as db:
            return str(db.execute("SELECT hash FROM head").fetchone()["hash"])

    def datasets(self) -> list[str]:
        """Return the names of all data sets for which a limit was ever declared, in that order."""
        with self._session("Reading the data sets") as db:
            rows = db.execute(
                "SELECT dataset FROM entries WHERE kind = 'allow' GROUP BY dataset ORDER BY "
                "min(number)"
            )
            return [row["dataset"] for row in rows]

    def charges(self, dataset: str | None = None) -> list[Charge]:
        """Return all charges in order, or those on one data set."""
        with self._session("Reading the charges") as db:
            rows = db.execute(
                "SELECT * FROM charges WHERE ?1 IS NULL OR dataset = ?1 ORDER BY number", (dataset,)
            )
            return [_as_charge(row) for row in rows]

    def verify(self, head: str | None = None) -> str:
        """Walk the whole chain and return its head hash, or raise `LedgerDamaged`.

        Parameters
        ----------
        head
            A head, or a receipt's hash, that someone outside wrote down earlier. The chain must
            still contain it: the only way to notice that an older copy of the whole file was put in
            place.
        """
        with self._session("Verifying") as db:
            found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if found != "ok":
                raise self._damage("Verifying", f"its pages are damaged ({found})")
            number, previous, hashes = 0, _GENESIS, {_GENESIS}
            accounts: dict[str, _Account] = {}
            n_seals = 0
            for number, entry in enumerate(
                db.execute("SELECT * FROM entries ORDER BY number"), start=1
            ):
                if entry["number"] != number:
                    raise self._damage("Verifying", f"entry {number} is missing")
                if entry["previous"] != previous or entry["hash"] != _digest(dict(entry)):
                    raise self._damage("Verifying", f"entry {number} was changed or moved")
                if not _replay(entry, accounts):
                    raise self._damage(
                        "Verifying", f"entry {number} goes beyond the limit of its data set"
                    )
                if entry["kind"] == "seal":
                    n_seals += 1
                    if (
                        _find(db, entry["key"]) is None
                        or _payload(db, entry["key"], entry["payload_hash"]) is None
                    ):
                        raise self._damage(
                            "Verifying", f"what entry {number} sealed was changed or removed"
                        )
                previous = entry["hash"]
                hashes.add(previous)
            if tuple(db.execute("SELECT number, hash FROM head").fetchone() or ()) != (
                number,
                previous,
            ):
                raise self._damage(
                    "Verifying",
                    f"the entries after entry {number} were removed, or the head changed",
                )
            if db.execute("SELECT count(*) FROM payloads").fetchone()[0] != n_seals:
                raise self._damage(
                    "Verifying", f"it holds results that none of its {number} entries sealed"
                )
            if head is not None and head not in hashes:
                raise self._damage(
                    "Verifying",
                    f"none of its {number} entries has the given head: it was rolled back",
                )
        return previous

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Write a consistent copy to a new file, also while others charge; note its head."""
        target = Path(path).absolute()
        with self._session("Backing up") as db:
            try:
                self._new_file(target, db.backup)
            except FileExistsError:
                raise SettingsError(
                    f"The ledger was to be copied to {target}, but that file exists. Nothing was "
                    "written. Choose a new name."
                ) from None

    def _append(
        self,
        db: sqlite3.Connection,
        kind: str,
        dataset: str,
        terms: _Account | Charge,
        amounts: _Units = (None, None, None),
        key: str | None = None,
        **content: str,
    ) -> None:
        """Add one entry behind the last, which must be the one that the head names."""
        head = db.execute("SELECT number, hash FROM head").fetchone()
        last = db.execute("SELECT * FROM entries ORDER BY number DESC LIMIT 1").fetchone()
        found = (0, _GENESIS) if last is None else (last["number"], _digest(dict(last)))
        if head is None or tuple(head) != found:
            raise self._damage(
                "Adding an entry", f"its last entry ({found[0]}) is not the one that its head names"
            )
        entry: dict[str, Any] = {
            **dict.fromkeys(("purpose", "study", "events", "payload_hash")),
            **content,
            **dict(zip(("nano_epsilon", "femto_delta", "nano_rho"), amounts, strict=True)),
            **{"kind": kind, "dataset": dataset, "key": key},
            **{"unit": str(terms.unit), "neighbours": str(terms.neighbours)},
            **{"number": found[0] + 1, "previous": found[1]},
            **{
                "time": datetime.now(UTC).isoformat(timespec="microseconds"),
                "version": _software(),
            },
        }
        entry["hash"] = _digest(entry)
        if kind in ("permit", "forbid", "exact") and _format(db) == 1:
            for statement in _FROM_FORMAT_1:
                db.execute(statement)
        db.execute(_INSERT, entry)
        db.execute("UPDATE head SET number = :number, hash = :hash", entry)

    @contextmanager
    def _session(
        self, asked: str, *, write: bool = False, state: str = ""
    ) -> Iterator[sqlite3.Connection]:
        """Yield a connection inside one transaction, which any error rolls back."""
        uri = f"{self.path.as_uri()}?mode=rw"  # never creates: a vanished ledger is an error
        try:
            with (
                _inside,
                closing(
                    sqlite3.connect(
                        uri, uri=True, timeout=self.timeout_seconds, isolation_level=None
                    )
                ) as db,
            ):
                db.row_factory = sqlite3.Row
                self._recognise(asked, db)
                db.execute("PRAGMA synchronous = FULL")
                # SQLite before 3.51.3 can lose a commit when checkpoints and writes overlap
                # ("WAL-reset bug"). With this, the only checkpoint is that of the last connection
                # to close, which is alone by then.
                db.execute("PRAGMA wal_autocheckpoint = 0")
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                yield db
                db.execute("COMMIT")
        except sqlite3.Error as error:
            passing = isinstance(error, sqlite3.OperationalError)
            raise self._damage(asked, str(error), passing=passing, state=state) from error

    def _recognise(self, asked: str, db: sqlite3.Connection) -> None:
        if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise self._damage(asked, "the file is empty or belongs to another program")
        written = _format(db)
        if written > _VERSION:
            raise LedgerDamaged(
                f"{asked} needs the ledger {self.path}, but it has format {written} and this "
                f"version knows format {_VERSION}. Nothing was read or changed. Install the newer "
                "version of this software."
            )

    def _new_file(self, path: Path, fill: Callable[[sqlite3.Connection], object]) -> None:
        """Create `path` complete or not at all, readable by its owner only."""
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            os.close(handle)
            try:
                with _inside, closing(sqlite3.connect(name, isolation_level=None)) as db:
                    fill(db)
                os.link(name, path)
            finally:
                os.unlink(name)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except FileExistsError:
            raise
        except (OSError, sqlite3.Error) as error:
            raise self._damage(f"Writing {path}", str(error), passing=True) from error

    def _damage(
        self, asked: str, problem: str, *, passing: bool = False, state: str = ""
    ) -> LedgerDamaged:
        fix = (
            "Fix the disk, its space or its permissions, then try again."
            if passing
            else "Stop training, and restore a backup that holds the head hash you wrote down."
        )
        return LedgerDamaged(
            f"{asked} needs the ledger {self.path}, but: {problem}. {state or _UNCHARGED} {fix}"
        )


def _check_text(name: str, text: str, *, may_be_empty: bool = False) -> None:
    # The text is not shown: a mistaken call may have passed something other than a setting.
    if (
        not isinstance(text, str)
        or not (text or may_be_empty)
        or len(text) > _LONGEST_TEXT
        # also refuses line breaks, escape codes and characters that reverse the text
        or not text.isprintable()
    ):
        raise SettingsError(
            f"The {name!r} of a ledger entry must be printable text of 1 to {_LONGEST_TEXT} "
            "characters, and is not. Nothing was charged or recorded. Pass a short name."
        )


def _cost(
    events: tuple[Event, ...], account: _Account, dataset: str
) -> tuple[int, int, int | None]:
    """Return the cost of `events` in whole units under the account's neighbour relation."""
    events = as_counted(events, account.unit, account.neighbours)
    units = {event.unit for event in events}
    if units != {account.unit}:
        raise _other_unit(units, account.unit, dataset)
    try:
        stated = total(events, account.neighbours)
        if math.isinf(stated.epsilon):
            raise BudgetExceeded(
                f"Data set {dataset!r} was to be charged an infinite epsilon (exact, non-private "
                "training), but its limit is finite. Nothing was charged or drawn. Train with a "
                "finite epsilon."
            )
        rho = total_rho(events, account.neighbours)
        amounts = (
            *_in_units(stated),
            None if rho is None else max(1, spent_units(rho, NANO)),
        )
    except (ArithmeticError, ValueError):
        raise SettingsError(
            f"Data set {dataset!r} was to be charged for events whose cost no floating-point "
            "number can hold. Nothing was charged. Check their sensitivity and scale."
        ) from None
    if stated.epsilon == 0 and stated.delta == 0:
        raise SettingsError(
            f"Data set {dataset!r} was to be charged for events that cost nothing, as if no "
            "record mattered. Nothing was charged. Check their sensitivity."
        )
    if account.limits[2] is not None and rho is None:
        raise GuaranteeVoid(
            f"Data set {dataset!r} has a limit in rho, but an event of this training has no such "
            "cost. Nothing was charged. Use a mechanism that has one (Gaussian, or any with "
            "delta = 0)."
        )
    return amounts


def _format(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _notes(db: sqlite3.Connection, condition: str, value: str | None) -> list[Note]:
    query = (
        f"SELECT number AS id, {', '.join(Note._fields[1:])} FROM entries "  # noqa: S608
        f"WHERE ({condition}) AND kind NOT IN ('charge', 'seal') ORDER BY number"
    )
    return [Note(*row) for row in db.execute(query, (value,))]


def _may_be_exact(db: sqlite3.Connection, dataset: str) -> bool:
    said = [note.kind for note in _notes(db, "dataset = ?", dataset)]
    return [kind for kind in said if kind in ("permit", "forbid")][-1:] == ["permit"]


def _account(db: sqlite3.Connection, dataset: str) -> _Account | None:
    limit = (
        "SELECT * FROM entries WHERE dataset = ? AND kind = 'allow' ORDER BY number DESC LIMIT 1"
    )
    entry = db.execute(limit, (dataset,)).fetchone()
    if entry is None:
        return None
    return _opened(entry, tuple(db.execute(_SUMS, (dataset,)).fetchone()))


def _opened(entry: sqlite3.Row, sums: _Units = (0, 0, 0)) -> _Account:
    return _Account(Unit(entry["unit"]), Neighbours(entry["neighbours"]), _amounts(entry), sums)


def _amounts(entry: sqlite3.Row) -> _Units:
    return (entry["nano_epsilon"], entry["femto_delta"], entry["nano_rho"])


def _replay(entry: sqlite3.Row, accounts: dict[str, _Account]) -> bool:
    """Apply one entry to the accounts; False if the ledger would have refused to write it."""
    if entry["kind"] == "allow":
        accounts.setdefault(entry["dataset"], _opened(entry)).limits = _amounts(entry)
    account = accounts.get(entry["dataset"])
    if account is None:
        return False
    if entry["kind"] in ("permit", "forbid"):
        account.may_be_exact = entry["kind"] == "permit"
    if entry["kind"] == "exact" and not account.may_be_exact:
        return False
    cost = _amounts(entry) if entry["kind"] == "charge" else (0, 0, 0)
    fits = account.first_over(cost) is None
    account.add(cost)
    return fits


def _digest(entry: dict[str, Any]) -> str:
    """Return the hash of an entry's non-empty fields and of its predecessor's hash."""
    content = {name: value for name, value in entry.items() if name != "hash" and value is not None}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), default=str).encode()
    ).hexdigest()


def _payload(db: sqlite3.Connection, key: str, digest: str) -> bytes | None:
    """Return the result stored under `key`, or None unless it has the hash that its entry names."""
    row = db.execute("SELECT payload FROM payloads WHERE key = ?", (key,)).fetchone()
    return row[0] if row is not None and hashlib.sha256(row[0]).hexdigest() == digest else None


def _find(db: sqlite3.Connection, key: str) -> Charge | None:
    row = db.execute("SELECT * FROM charges WHERE key = ?", (key,)).fetchone()
    return None if row is None else _as_charge(row)


def _as_charge(row: sqlite3.Row) -> Charge:
    epsilon, delta, rho = _as_numbers(_amounts(row))
    assert epsilon is not None  # the table checks both
    assert delta is not None
    return Charge(
        id=row["number"],
        epsilon=epsilon,
        delta=delta,
        rho=rho,
        unit=Unit(row["unit"]),
        neighbours=Neighbours(row["neighbours"]),
        events=events_from_json(row["events"]),
        state="reserved" if row["seal_hash"] is None else "sealed",
        payload_hash=row["seal_hash"],
        **{
            name: row[name]
            for name in ("key", "dataset", "purpose", "study", "time", "version", "hash")
        },
    )


def _repeated(existing: Charge, content: tuple[str, str, str], *, happened: bool) -> Charge:
    """Return the charge whose key was used again, or refuse if the calls differ.

    Nothing is drawn after a charge that `happened`, so it need not be sealed.
    """
    if (existing.dataset, existing.study, events_to_json(existing.events)) != content:
        raise SettingsError(
            f"The key {existing.key!r} was to pay for another training, but it names one that was "
            "charged already. Nothing was charged now. Use a new key for another data set, study "
            "or event."
        )
    if existing.state == "reserved" and not happened:
        raise SettingsError(
            f"The key {existing.key!r} was charged before, but its result was never sealed: that "
            "run crashed or is still at work, and its noise may have been seen. That charge "
            "stays spent and nothing was charged now. Wait for that run, or train again under a "
            "new key, which is charged anew."
        )
    return existing
