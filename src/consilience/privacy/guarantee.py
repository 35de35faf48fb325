"""What is promised, to whom: the values that every file and every report carries.

A `Guarantee` is a proven fact. It names its privacy unit and neighbour relation, so that two of
them are added only where the sum means something: composition converts where a theorem allows it
and refuses elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from enum import StrEnum
from typing import Any, Self

from consilience.display.html import bars, card
from consilience.errors import GuaranteeVoid, SettingsError


class Unit(StrEnum):
    """Whose data the guarantee hides: everything one of these contributed."""

    RECORD = "record"
    PERSON = "person"
    SITE = "site"


class Neighbours(StrEnum):
    """Which pairs of data sets must look alike.

    ``replace-one``: one unit exchanged for another, their number is public. ``add-remove``: one
    unit more or less, their number stays private. ``null-one``: one unit exchanged for a public
    default.
    """

    REPLACE_ONE = "replace-one"
    ADD_REMOVE = "add-remove"
    NULL_ONE = "null-one"


def count_is_public(of: Unit | str, *, unit: Unit | str, neighbours: Neighbours | str) -> bool:
    """Tell whether the exact number of records, persons or sites may be stated.

    Only the number of the hidden units themselves, and only where one is exchanged for another: a
    person who is exchanged may bring more records, and a site more of both.
    """
    return of == unit and neighbours != Neighbours.ADD_REMOVE


def name_the_unit(value: Any) -> None:
    """Turn the strings ``unit`` and ``neighbours`` of a frozen value into enum members."""
    for name, kind in (("unit", Unit), ("neighbours", Neighbours)):
        given = getattr(value, name)
        if type(given) is kind:
            continue
        try:
            object.__setattr__(value, name, kind(given))
        except ValueError:
            raise SettingsError(
                f"The {name!r} of a {type(value).__name__} must be one of {', '.join(kind)}. Got "
                f"{given!r} instead."
            ) from None


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """State that an output is (epsilon, delta)-differentially private, and for whom.

    ``epsilon=math.inf`` is the honest statement that nothing is promised (exact training). A
    guarantee that *was* claimed and does not hold (seeded noise, say) is void instead, carries its
    reason, and nothing that leaves a site or hub may carry it.

    Privacy
    -------
    Only code that has a proof page in ``docs/guarantees/`` makes one. ``assumptions`` lists every
    fact outside the program's control on which it rests.

    Examples
    --------
    >>> Guarantee(epsilon=0.5, delta=0.0, unit="record", neighbours="replace-one")
    Guarantee(epsilon=0.5, delta=0, per record, replace-one)
    """

    epsilon: float
    delta: float
    unit: Unit
    neighbours: Neighbours
    assumptions: tuple[str, ...] = ()
    void_reason: str | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.epsilon) and self.epsilon >= 0):
            raise SettingsError(
                f"A guarantee's 'epsilon' must be a number >= 0. Got {self.epsilon!r} instead."
            )
        if not (_is_number(self.delta) and 0 <= self.delta <= 1):
            raise SettingsError(
                f"A guarantee's 'delta' must lie in [0, 1]. Got {self.delta!r} instead."
            )
        reason, assumptions = self.void_reason, self.assumptions
        if not (reason is None or (isinstance(reason, str) and reason)):
            raise SettingsError(
                f"A guarantee's 'void_reason' must be None or say why. Got {reason!r} instead."
            )
        if not (
            isinstance(assumptions, tuple) and all(isinstance(each, str) for each in assumptions)
        ):
            raise SettingsError(
                f"A guarantee's 'assumptions' must be a tuple of sentences. Got {assumptions!r} "
                "instead."
            )
        name_the_unit(self)

    @classmethod
    def void(cls, reason: str, *, unit: Unit | str, neighbours: Neighbours | str) -> Self:
        """Return the guarantee of something that has none, with the reason."""
        return cls(
            epsilon=math.inf,
            delta=0.0,
            unit=Unit(unit),
            neighbours=Neighbours(neighbours),
            void_reason=reason,
        )

    @property
    def holds(self) -> bool:
        """Whether this is a true statement that may leave the site (an infinite epsilon is one)."""
        return self.void_reason is None

    @property
    def best_guess(self) -> float:
        """The most likely that anybody can guess right which of two neighbours was used.

        They start with an even chance. The best test is right with (e^ε + δ) / (1 + e^ε).
        """
        less = math.exp(-self.epsilon)
        return min(1.0, (1 + self.delta * less) / (1 + less))

    def promises_same(self, other: Guarantee) -> bool:
        """Tell whether both state the same numbers, unit and relation, whatever they assume."""
        names = ("epsilon", "delta", "unit", "neighbours")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def require(self) -> Self:
        """Return the guarantee itself, or raise `GuaranteeVoid` with the reason."""
        if self.void_reason is not None:
            raise GuaranteeVoid(
                f"This result has no guarantee: {self.void_reason}. Nothing was published. "
                "Train again without the setting named here to obtain one that may leave the site."
            )
        return self

    def convert(self, neighbours: Neighbours | str) -> Guarantee:
        """Return what this guarantee implies for another neighbour relation, or refuse.

        Replacing is removing then adding, so an add-remove guarantee implies (2ε, (1+e^ε)δ) under
        replace-one. Nothing follows in the other direction: replace-one lets the number of units be
        public.
        """
        target = Neighbours(neighbours)
        if target is self.neighbours or self.void_reason is not None:
            return replace(self, neighbours=target)
        if (self.neighbours, target) != (Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE):
            raise GuaranteeVoid(
                f"A {self.neighbours} guarantee cannot be restated as {target}: no theorem gives "
                f"that. Nothing was composed. Train with neighbours='{target}', or keep the two "
                "apart."
            )
        # Beyond ε = 36 the factor 1 + e^ε exceeds 2^52: no delta that matters survives it, and none
        # overflows.
        factor = 1 + math.exp(self.epsilon) if self.epsilon < 700 else math.inf
        delta = 0.0 if self.delta == 0 else min(1.0, factor * self.delta)
        return replace(self, epsilon=2 * self.epsilon, delta=delta, neighbours=target)

    def count(self, unit: Unit | str, neighbours: Neighbours | str) -> Guarantee:
        """Return what this guarantee implies for a limit per `unit` under `neighbours`, or refuse.

        What hides a whole site, replaced by any other, hides every part of it at the same cost.
        """
        unit, neighbours = Unit(unit), Neighbours(neighbours)
        whole = (self.unit, self.neighbours) == (Unit.SITE, Neighbours.REPLACE_ONE)
        if whole and unit is not Unit.SITE and neighbours is not Neighbours.NULL_ONE:
            return replace(self, unit=unit, neighbours=neighbours)
        if self.unit is not unit:
            raise GuaranteeVoid(
                f"A guarantee per {self.unit} says nothing per {unit}. Nothing was composed. Train "
                f"with unit='{unit}'."
            )
        return self.convert(neighbours)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinity travels as the string ``"inf"``."""
        return {
            "epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon,
            "delta": self.delta,
            "unit": str(self.unit),
            "neighbours": str(self.neighbours),
            "assumptions": list(self.assumptions),
            "void_reason": self.void_reason,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild a guarantee from `as_dict`; unknown or missing keys are an error."""
        try:
            epsilon, assumptions = values["epsilon"], values["assumptions"]
            if not isinstance(assumptions, list):
                raise TypeError
            epsilon = math.inf if epsilon == "inf" else epsilon
            return cls(**{**values, "epsilon": epsilon, "assumptions": tuple(assumptions)})
        except (TypeError, KeyError, ValueError):
            raise SettingsError(
                "This is not a guarantee: its fields must be epsilon, delta, unit, neighbours, "
                "assumptions and void_reason. Nothing was read. Ask for the file again, written "
                "by this software."
            ) from None

    def __repr__(self) -> str:
        if self.void_reason is not None:
            return f"Guarantee.void({self.void_reason!r})"
        cost, number = (
            f"epsilon={show_bound(self.epsilon)}, delta={show_bound(self.delta)}",
            len(self.assumptions),
        )
        assuming = f", {number} assumption{'s' * (number > 1)}" if number else ""
        return f"Guarantee({cost}, per {self.unit}, {self.neighbours}{assuming})"

    def _repr_html_(self) -> str:
        if self.void_reason is not None:
            return card("No guarantee", ("", [f"There is none: {self.void_reason}."], []))
        rows = [
            (
                "epsilon",
                "infinite: no noise" if math.isinf(self.epsilon) else show_bound(self.epsilon),
            ),
            ("delta", show_bound(self.delta)),
            ("protects", f"one {self.unit}"),
            ("neighbours", str(self.neighbours)),
            *(("assumes", each) for each in self.assumptions),
        ]
        chart = bars(
            [("by chance", 50.0), ("with the result", 100 * self.best_guess)],
            f"How often one can guess right, at most, which of two versions of a {self.unit} was "
            "used: in percent",
        )
        return card("Guarantee", ("", [], rows), chart=chart)

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"- assuming that {each}" for each in self.assumptions)])


def show_bound(value: float, digits: int = 6) -> str:
    """Return an epsilon or a delta with so many digits, never below it but for rounding errors.

    One that was rounded to the nearest would promise more than holds.
    """
    return _rounded(value * (1 - 1e-12), digits, ROUND_CEILING)


def show_left(value: float, digits: int = 6) -> str:
    """Return what is left of a budget with so many digits, never above it but for rounding errors.

    One that was rounded to the nearest would offer more than can be spent.
    """
    return _rounded(value * (1 + 1e-12), digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    there = Context(prec=digits, rounding=rounding)
    return f"{float(there.create_decimal_from_float(value)):.{digits}g}"


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000
    )


def _total(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _joint(
    guarantees: tuple[Guarantee, ...], epsilon: float, delta: float, *extra: str
) -> Guarantee:
    first = guarantees[0]
    reasons = list(dict.fromkeys(g.void_reason for g in guarantees if g.void_reason is not None))
    return Guarantee(
        epsilon=math.inf if reasons else epsilon,
        delta=0.0 if reasons else min(1.0, delta),
        unit=first.unit,
        neighbours=first.neighbours,
        assumptions=tuple(
            dict.fromkeys([a for g in guarantees for a in g.assumptions] + list(extra))
        ),
        void_reason="; ".join(reasons) or None,
    )


def _aligned(guarantees: tuple[Guarantee, ...]) -> tuple[Guarantee, ...]:
    if not guarantees:
        raise SettingsError("Composition needs at least one guarantee. Got none.")
    units = {g.unit for g in guarantees}
    if len(units) > 1:
        raise GuaranteeVoid(
            f"Guarantees per {' and per '.join(sorted(units))} were to be composed, but they hide "
            "different things and have no common sum. Nothing was composed. Report them side by "
            "side."
        )
    relations = {g.neighbours for g in guarantees}
    if relations == {Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE}:
        return tuple(g.convert(Neighbours.REPLACE_ONE) for g in guarantees)
    if len(relations) > 1:
        raise GuaranteeVoid(
            f"Guarantees under {' and '.join(sorted(relations))} were to be composed, but no "
            "theorem converts one into the other. Nothing was composed. Use one neighbour "
            "relation throughout."
        )
    return guarantees


def compose(*guarantees: Guarantee) -> Guarantee:
    """Return what holds after all of these touched the same records: epsilons and deltas add.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> first, second = (
    ...     cs.PrivateLogisticRegression(epsilon=epsilon, schema=schema).fit(table).guarantee_
    ...     for epsilon in (0.5, 1.0)
    ... )
    >>> cs.compose(first, second)
    Guarantee(epsilon=1.5, delta=0, per record, replace-one)
    """
    aligned = _aligned(guarantees)
    return _joint(aligned, _total(g.epsilon for g in aligned), _total(g.delta for g in aligned))


def compose_disjoint(*guarantees: Guarantee, assumption: str) -> Guarantee:
    """Return what holds when each unit's data reached only one of these: the largest of each.

    ``assumption`` says why the parts are disjoint (for instance "no person is at two sites"); it is
    written into the result, because the program cannot check it. Void parts void the whole.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> first, second = (
    ...     cs.PrivateLogisticRegression(epsilon=epsilon, schema=schema).fit(table).guarantee_
    ...     for epsilon in (0.5, 1.0)
    ... )
    >>> cs.compose_disjoint(first, second, assumption="nobody is at two sites")
    Guarantee(epsilon=1, delta=0, per record, replace-one, 1 assumption)
    """
    if not assumption:
        raise SettingsError(
            "Disjoint composition rests on an assumption about the data: state it in 'assumption'."
        )
    aligned = _aligned(guarantees)
    return _joint(
        aligned, max(g.epsilon for g in aligned), max(g.delta for g in aligned), assumption
    )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most a data owner allows to be spent on one data set, over its lifetime.

    Enforced on additive quantities: Σε and Σδ, or Σρ (zero-concentrated) when ``rho`` is given
    instead of ``epsilon``.

    Examples
    --------
    >>> import consilience as cs
    >>> cs.Budget(epsilon=3.0, delta=1e-5, unit="person").epsilon
    3.0
    """

    epsilon: float | None = None
    delta: float = 0.0
    rho: float | None = None
    unit: Unit = Unit.RECORD
    neighbours: Neighbours = Neighbours.REPLACE_ONE

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.rho is None):
            raise SettingsError(
                "A budget limits either 'epsilon' (with 'delta') or 'rho': give exactly one of "
                "the two."
            )
        for name in ("epsilon", "rho"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise SettingsError(
                    f"A budget's {name!r} must be a finite number > 0. Got {value!r} instead."
                )
        if not (_is_number(self.delta) and 0 <= self.delta < 1):
            raise SettingsError(
                f"A budget's 'delta' must lie in [0, 1). Got {self.delta!r} instead."
            )
        if self.rho is not None and self.delta:
            raise SettingsError(
                "A budget in 'rho' has no 'delta': a report converts rho at any delta. Leave "
                "delta at 0."
            )
        name_the_unit(self)
