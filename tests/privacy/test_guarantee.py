"""What may be added to what, and what a guarantee means after it was converted, composed or read
from a file.
"""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.errors import GuaranteeVoid, SettingsError
from consilience.privacy.guarantee import (
    Budget,
    Guarantee,
    Neighbours,
    Unit,
    compose,
    compose_disjoint,
)

EPSILONS = st.floats(0, 1e6) | st.just(math.inf)
DELTAS = st.just(0.0) | st.floats(1e-300, 1)
RELATIONS = st.sampled_from(Neighbours)


def made(epsilon=0.5, delta=0.0, unit="record", neighbours="replace-one", **rest):
    return Guarantee(epsilon=epsilon, delta=delta, unit=unit, neighbours=neighbours, **rest)


def guarantees(relation=RELATIONS):
    return st.builds(
        made,
        epsilon=EPSILONS,
        delta=DELTAS,
        neighbours=relation,
        assumptions=st.lists(st.text(min_size=1), max_size=2).map(tuple),
        void_reason=st.none() | st.text(min_size=1),
    )


ALIKE = st.lists(guarantees(st.just(Neighbours.ADD_REMOVE)), min_size=1, max_size=5)


def test_plain_strings_become_units_and_relations():
    guarantee = made(unit="person", neighbours="add-remove")
    assert guarantee.unit is Unit.PERSON
    assert guarantee.neighbours is Neighbours.ADD_REMOVE


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"epsilon": "0.5"},
        {"epsilon": True},
        {"epsilon": 10**400},
        {"delta": -1e-9},
        {"delta": 1.5},
        {"delta": math.nan},
        {"delta": "0"},
        {"delta": True},
        {"unit": "people"},
        {"unit": None},
        {"neighbours": "close"},
        {"assumptions": "disjoint"},
        {"assumptions": (1,)},
        {"void_reason": ""},
        {"void_reason": False},
    ],
)
def test_a_guarantee_that_means_nothing_is_refused(wrong):
    with pytest.raises(SettingsError):
        made(**wrong)


def test_words_say_what_is_promised_to_whom():
    assert repr(made()) == "Guarantee(epsilon=0.5, delta=0, per record, replace-one)"
    assert repr(Guarantee.void("seeded noise", unit="record", neighbours="add-remove")) == (
        "Guarantee.void('seeded noise')"
    )
    assumed = made(assumptions=("no person is at two sites", "the labels are public"))
    assert repr(assumed) == (
        "Guarantee(epsilon=0.5, delta=0, per record, replace-one, 2 assumptions)"
    )
    assert str(assumed).splitlines() == [
        repr(assumed),
        "- assuming that no person is at two sites",
        "- assuming that the labels are public",
    ]
    assert str(made()) == repr(made())


def test_infinite_epsilon_is_a_true_statement_and_void_is_not():
    assert made(epsilon=math.inf).holds
    assert made(epsilon=math.inf).require().epsilon == math.inf
    void = Guarantee.void("seeded noise", unit="record", neighbours="replace-one")
    assert not void.holds
    with pytest.raises(GuaranteeVoid, match="seeded noise"):
        void.require()


# --------------------------------------------------------------------------------------- converting


@given(
    epsilon=st.floats(0, 29), delta=st.floats(1e-30, 1e-13)
)  # the sum stays below 1, where it is cut
def test_replacing_is_removing_then_adding(epsilon, delta):
    converted = made(epsilon=epsilon, delta=delta, neighbours="add-remove").convert("replace-one")
    # P <= e^ε M + δ and M <= e^ε Q + δ, chained by hand.
    assert converted.epsilon == 2 * epsilon
    assert converted.delta == pytest.approx(delta + math.exp(epsilon) * delta, rel=1e-12)
    assert converted.neighbours is Neighbours.REPLACE_ONE


def test_the_conversion_of_delta_is_attained_by_two_chained_releases():
    # Worst case in three points: with probability δ each step shows something impossible before.
    epsilon, delta = 0.7, 0.01
    converted = made(epsilon=epsilon, delta=delta, neighbours="add-remove").convert("replace-one")
    last = 1e-3
    middle = math.exp(epsilon) * last + delta
    first = math.exp(epsilon) * middle + delta
    assert first == pytest.approx(math.exp(converted.epsilon) * last + converted.delta, rel=1e-12)


def test_a_pure_guarantee_stays_pure_and_delta_never_passes_one():
    assert made(epsilon=3.0, neighbours="add-remove").convert("replace-one").delta == 0.0
    assert (
        made(epsilon=50.0, delta=1e-5, neighbours="add-remove").convert("replace-one").delta == 1.0
    )
    assert (
        made(epsilon=math.inf, delta=1e-5, neighbours="add-remove").convert("replace-one").delta
        == 1.0
    )
    assert (
        made(epsilon=800.0, delta=1e-310, neighbours="add-remove").convert("replace-one").delta
        == 1.0
    )


@pytest.mark.parametrize(("origin", "target"), list(itertools.permutations(Neighbours, 2)))
def test_only_add_remove_converts_and_only_to_replace_one(origin, target):
    if (origin, target) == (Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE):
        assert made(neighbours=origin).convert(target).neighbours is target
    else:
        with pytest.raises(GuaranteeVoid, match="cannot be restated"):
            made(neighbours=origin).convert(target)


@given(guarantee=guarantees())
def test_converting_to_the_same_relation_changes_nothing(guarantee):
    assert guarantee.convert(guarantee.neighbours) == guarantee


@pytest.mark.parametrize("target", Neighbours)
def test_a_void_guarantee_stays_void_under_every_relation(target):
    void = Guarantee.void("seeded noise", unit="record", neighbours="replace-one").convert(target)
    assert void.void_reason == "seeded noise"
    assert void.neighbours is target


# ---------------------------------------------------------------------------------------- composing


@given(parts=ALIKE)
def test_composition_adds_and_no_part_costs_more_than_the_whole(parts):
    whole = compose(*parts)
    for part in parts:
        assert whole.epsilon >= part.epsilon
        assert whole.holds <= part.holds
        assert set(part.assumptions) <= set(whole.assumptions)
    if whole.holds:
        assert whole.epsilon == math.fsum(part.epsilon for part in parts)
        assert whole.delta == min(1.0, math.fsum(part.delta for part in parts))


@given(parts=ALIKE, extra=guarantees(st.just(Neighbours.ADD_REMOVE)))
def test_composition_is_monotone(parts, extra):
    assert compose(*parts, extra).epsilon >= compose(*parts).epsilon
    if extra.holds:
        assert compose(*parts, extra).delta >= compose(*parts).delta


@given(parts=ALIKE, data=st.data())
def test_composition_is_order_free(parts, data):
    shuffled = data.draw(st.permutations(parts))
    one, other = compose(*parts), compose(*shuffled)
    assert (one.epsilon, one.delta, one.holds) == (other.epsilon, other.delta, other.holds)
    assert set(one.assumptions) == set(other.assumptions)


@given(parts=ALIKE)
def test_disjoint_parts_cost_as_much_as_the_dearest(parts):
    whole = compose_disjoint(*parts, assumption="no person is at two sites")
    assert "no person is at two sites" in whole.assumptions
    if whole.holds:
        assert whole.epsilon == max(part.epsilon for part in parts)
        assert whole.delta == max(part.delta for part in parts)
    assert whole.holds == all(part.holds for part in parts)
    assert whole.epsilon <= compose(*parts).epsilon


@pytest.mark.parametrize(
    "together", [compose, lambda *parts: compose_disjoint(*parts, assumption="disjoint")]
)
def test_one_void_part_voids_the_whole_and_every_reason_is_kept(together):
    void = [
        Guarantee.void(reason, unit="record", neighbours="replace-one")
        for reason in ("seeded", "no proof")
    ]
    whole = together(made(), void[0], void[1], void[0])
    assert whole.void_reason == "seeded; no proof"
    assert (whole.epsilon, whole.delta) == (math.inf, 0.0)


@pytest.mark.parametrize(
    "together", [compose, lambda *parts: compose_disjoint(*parts, assumption="disjoint")]
)
def test_units_never_mix(together):
    with pytest.raises(GuaranteeVoid, match="per person and per record"):
        together(made(), made(unit="person"))


def test_relations_are_aligned_before_they_are_added():
    whole = compose(
        made(epsilon=1.0, delta=1e-6), made(epsilon=0.5, delta=1e-6, neighbours="add-remove")
    )
    assert whole.neighbours is Neighbours.REPLACE_ONE
    assert whole.epsilon == 2.0
    assert whole.delta == pytest.approx(1e-6 + (1 + math.exp(0.5)) * 1e-6)


@pytest.mark.parametrize("other", ["replace-one", "add-remove"])
def test_null_one_composes_with_nothing_else(other):
    with pytest.raises(GuaranteeVoid, match="no theorem converts"):
        compose(made(neighbours="null-one"), made(neighbours=other))
    assert compose(made(neighbours="null-one"), made(neighbours="null-one")).epsilon == 1.0


def test_nothing_composes_to_nothing():
    with pytest.raises(SettingsError, match="at least one"):
        compose()


def test_disjointness_is_an_assumption_somebody_states():
    with pytest.raises(SettingsError, match="state it"):
        compose_disjoint(made(), assumption="")


def test_deltas_never_sum_beyond_one_and_epsilons_never_overflow():
    assert compose(made(delta=0.8), made(delta=0.8)).delta == 1.0
    assert compose(made(epsilon=1e308), made(epsilon=1e308)).epsilon == math.inf


# -------------------------------------------------------------------------------------------- files


@given(guarantee=guarantees())
def test_a_guarantee_survives_the_way_through_json(guarantee):
    assert (
        Guarantee.from_dict(json.loads(json.dumps(guarantee.as_dict(), allow_nan=False)))
        == guarantee
    )


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": "nan"},
        {"epsilon": math.nan},
        {"epsilon": "-inf"},
        {"epsilon": "0.5"},
        {"epsilon": True},
        {"epsilon": None},
        {"epsilon": [1]},
        {"epsilon": 10**400},
        {"delta": "0"},
        {"delta": 2},
        {"delta": True},
        {"delta": 10**400},
        {"unit": "people"},
        {"unit": ["record"]},
        {"neighbours": {"replace-one": 1}},
        {"assumptions": None},
        {"assumptions": "a sentence"},
        {"assumptions": [["nested"]]},
        {"assumptions": {"a": 1}},
        {"void_reason": 5},
        {"void_reason": ""},
        {"extra": 1},
    ],
)
def test_hostile_fields_are_refused(change):
    with pytest.raises(SettingsError, match="not a guarantee"):
        Guarantee.from_dict({**made().as_dict(), **change})


@pytest.mark.parametrize("missing", ["epsilon", "delta", "unit", "neighbours", "assumptions"])
def test_missing_fields_are_refused(missing):
    values = made().as_dict()
    del values[missing]
    with pytest.raises(SettingsError, match="not a guarantee"):
        Guarantee.from_dict(values)


@pytest.mark.parametrize("values", [None, [], "guarantee", 3, {}, {1: 2}, [["epsilon", 1]]])
def test_other_shapes_are_refused(values):
    with pytest.raises(SettingsError, match="not a guarantee"):
        Guarantee.from_dict(values)


# ------------------------------------------------------------------------------------------- budget


def test_a_budget_limits_epsilon_or_rho():
    assert Budget(epsilon=1, delta=1e-5).unit is Unit.RECORD
    assert (
        Budget(rho=0.1, unit="person", neighbours="add-remove").neighbours is Neighbours.ADD_REMOVE
    )
    assert replace(Budget(epsilon=1), epsilon=2).epsilon == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"epsilon": 1, "rho": 1},
        {"epsilon": 0},
        {"epsilon": math.inf},
        {"epsilon": math.nan},
        {"epsilon": "1"},
        {"epsilon": True},
        {"rho": -1},
        {"epsilon": 1, "delta": 1},
        {"epsilon": 1, "delta": -1e-9},
        {"epsilon": 1, "delta": "0"},
        {"rho": 1, "delta": 1e-5},
        {"epsilon": 1, "unit": "people"},
        {"epsilon": 1, "neighbours": "close"},
    ],
)
def test_a_budget_that_limits_nothing_is_refused(wrong):
    with pytest.raises(SettingsError):
        Budget(**wrong)
