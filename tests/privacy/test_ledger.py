import json
import math
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from consilience.errors import (
    BudgetExceeded,
    ConsilienceError,
    GuaranteeVoid,
    LedgerDamaged,
    SettingsError,
)
from consilience.privacy import ledger as ledgers
from consilience.privacy.accounting import (
    Event,
    Gaussian,
    Laplace,
    ObjectiveGaussian,
    Selection,
    calibrate_scale,
    events_to_json,
)
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import FEMTO, NANO, Charge, Ledger, limit_units, spent_units


def pure(epsilon: float, *, unit: str = "record", neighbours: str = "replace-one") -> Laplace:
    """An event that costs exactly this float: 1/(1/epsilon) is not always epsilon, sensitivity/1
    is.
    """
    return Laplace(unit=unit, neighbours=neighbours, sensitivity=epsilon, scale=1.0)


def gaussian(
    *, sigma: float = 10.0, delta: float = 1e-6, neighbours: str = "replace-one"
) -> Gaussian:
    return Gaussian(
        unit="record", neighbours=neighbours, sensitivity=1.0, sigma=sigma, at_delta=delta
    )


def spend(ledger: Ledger, epsilon: float, key: str, **settings_: str) -> Charge:
    return ledger.charge([pure(epsilon)], dataset="ward", key=key, purpose="test", **settings_)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    opened = Ledger(tmp_path / "ledger.sqlite")
    opened.allow("ward", Budget(epsilon=1.0))
    return opened


def edit(path: Path, statement: str, values: tuple[object, ...] = ()) -> None:
    """Change the file behind the ledger's back, as someone would who owns it."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        for (name,) in db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("PRAGMA synchronous = OFF")
        db.execute(statement, values)
    finally:
        db.close()


def run(script: str, *arguments: object, timeout_seconds: float = 120) -> dict:
    """Run a script in a fresh single-threaded interpreter, which may fork; it prints JSON."""
    command = [sys.executable, "-W", "error", "-c", PRELUDE + script, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children: one of them hangs
            raise
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


PRELUDE = """
import json, os, random, resource, signal, sys, threading, time
from consilience.errors import *
from consilience.privacy.accounting import Laplace
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
path, arguments = sys.argv[1], [float(a) for a in sys.argv[2:]]
def pure(epsilon):
    return Laplace(unit="record", neighbours="replace-one", sensitivity=epsilon, scale=1.0)
def child(work):
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, os.fdopen(read)
    status = 1
    try:
        os.close(read)
        work(lambda *words: os.write(write, (" ".join(words) + "\\n").encode()))
        status = 0
    finally:
        os._exit(status)
"""

# Eight processes race for a budget that holds only some of what they ask for.
RACE = """
n_processes, n_attempts, cost = int(arguments[0]), int(arguments[1]), arguments[2]
def work(name, say):
    ledger = Ledger(path)
    for attempt in range(n_attempts):
        try:
            key = f"{name}-{attempt}"
            charge = ledger.charge([pure(cost)], dataset="ward", key=key, purpose="race")
        except BudgetExceeded:
            say("refused", key)
        else:
            say("charged", charge.key)
started = time.monotonic()
children = [child(lambda say, name=name: work(name, say)) for name in range(n_processes)]
pipes = [[] for _ in children]
readers = [threading.Thread(target=lambda p=p, out=out: out.extend(p))
           for (_, p), out in zip(children, pipes)]
[r.start() for r in readers]; [r.join() for r in readers]
codes = [os.waitpid(pid, 0)[1] for pid, _ in children]
lines = [line.split() for out in pipes for line in out]
print(json.dumps({"codes": codes, "seconds": time.monotonic() - started,
                  "charged": [k for w, k in lines if w == "charged"],
                  "refused": [k for w, k in lines if w == "refused"]}))
"""

# A process that charges and seals without pause is killed at a random moment, again and again.
KILL = """
n_kills = int(arguments[0])
def work(name, say):
    ledger = Ledger(path)
    for attempt in range(10**6):
        key = f"{name}-{attempt}"
        charge = ledger.charge([pure(1e-6)], dataset="ward", key=key, purpose="kill")
        say("charged", key)
        ledger.seal(charge, key.encode() * 999)
        say("sealed", key)
started, lines, left_over = time.monotonic(), [], 0
for name in range(n_kills):
    pid, pipe = child(lambda say: work(name, say))
    time.sleep(random.uniform(0.002, 0.2))
    os.kill(pid, signal.SIGKILL)
    code = os.waitpid(pid, 0)[1]
    assert code == signal.SIGKILL, code
    with pipe:
        lines += [line.split() for line in pipe]
    left_over += os.path.exists(path + "-wal")
    Ledger(path).verify()
print(json.dumps({"charged": [k for w, k in lines if w == "charged"],
                  "sealed": [k for w, k in lines if w == "sealed"],
                  "journals": left_over, "seconds": time.monotonic() - started}))
"""


def check_race(
    path: Path, *, n_processes: int, n_attempts: int, n_fitting: int, cost: float
) -> dict:
    """Race on a budget of ``n_fitting * cost``; check that exactly those that fit were charged."""
    Ledger(path).allow("ward", Budget(epsilon=n_fitting * cost))
    found = run(RACE, path, n_processes, n_attempts, cost, timeout_seconds=900)
    ledger = Ledger(path)
    ledger.verify()
    assert found["codes"] == [0] * n_processes
    assert len(found["charged"]) == n_fitting
    assert len(found["refused"]) == n_processes * n_attempts - n_fitting
    assert sorted(charge.key for charge in ledger.charges()) == sorted(found["charged"])
    assert ledger.balance("ward").left.epsilon == 0
    return found


def check_kills(path: Path, *, n_kills: int) -> dict:
    """Kill a charging process and check that nothing confirmed was lost, doubled or changed."""
    Ledger(path).allow("ward", Budget(epsilon=1000.0))
    found = run(KILL, path, n_kills, timeout_seconds=900)
    ledger = Ledger(path)
    ledger.verify()
    charges = ledger.charges()
    keys = [charge.key for charge in charges]
    assert len(keys) == len(set(keys))
    assert set(found["charged"]) <= set(keys)
    # A kill can fall between a commit and its confirmation, once per kill: charged, never run,
    # never lost.
    assert len(keys) - len(found["charged"]) <= n_kills
    assert set(found["sealed"]) <= {charge.key for charge in charges if charge.state == "sealed"}
    assert all(ledger.sealed(key) == key.encode() * 999 for key in found["sealed"])
    assert ledger.balance("ward").spent.epsilon == len(keys) * 1000 / NANO
    return found


# ------------------------------------------------------------------------------ charge, seal, retry


def test_a_charge_is_in_the_file_before_the_caller_can_draw(ledger):
    charge = spend(ledger, 0.4, "one", study="digest")
    assert (charge.state, charge.epsilon, charge.delta, charge.rho) == ("reserved", 0.4, 0.0, 0.08)
    assert Ledger(ledger.path).charges() == [charge]
    assert charge.events == (pure(0.4),)
    assert ledger.balance("ward").left.epsilon == 0.6


def test_a_sealed_result_comes_back_byte_for_byte_and_is_not_charged_again(ledger):
    sealed = ledger.seal(spend(ledger, 0.4, "one"), b"result")
    again = spend(ledger, 0.4, "one")
    assert again == sealed
    assert again.state == "sealed"
    assert ledger.sealed("one") == b"result"
    assert ledger.balance("ward").spent.epsilon == 0.4


def test_an_unsealed_or_unknown_key_has_no_result(ledger):
    spend(ledger, 0.4, "one")
    assert ledger.sealed("one") is None
    assert ledger.sealed("two") is None


def test_sealing_twice_accepts_the_same_bytes_and_refuses_others(ledger):
    charge = spend(ledger, 0.4, "one")
    head = ledger.seal(charge, b"result") and ledger.verify()
    assert ledger.seal(charge, b"result").state == "sealed"
    with pytest.raises(SettingsError, match="The first result stands"):
        ledger.seal(charge, b"another draw")
    assert ledger.verify() == head
    assert ledger.sealed("one") == b"result"


def test_a_key_cannot_pay_for_another_training(ledger):
    ledger.allow("other", Budget(epsilon=1.0))
    ledger.seal(spend(ledger, 0.4, "one"), b"")
    for events, dataset, study in (
        ([pure(0.3)], "ward", ""),
        ([pure(0.4)], "other", ""),
        ([pure(0.4)], "ward", "s"),
    ):
        with pytest.raises(SettingsError, match="another training"):
            ledger.charge(events, dataset=dataset, key="one", purpose="test", study=study)
    assert len(ledger.charges()) == 1


def test_a_crashed_run_stays_charged_and_its_key_is_refused(ledger):
    spend(ledger, 0.4, "one")
    with pytest.raises(SettingsError, match=r"never sealed.*stays spent.*new key"):
        spend(ledger, 0.4, "one")
    assert ledger.balance("ward").spent.epsilon == 0.4


def test_a_charge_of_another_ledger_cannot_be_sealed_here(ledger, tmp_path):
    other = Ledger(tmp_path / "other.sqlite")
    other.allow("ward", Budget(epsilon=2.0))
    charge = spend(other, 0.4, "one")
    with pytest.raises(SettingsError, match="is not in the ledger"):
        ledger.seal(charge, b"")
    spend(ledger, 0.4, "one")
    with pytest.raises(SettingsError, match="is not in the ledger"):
        ledger.seal(charge, b"")


def test_only_bytes_can_be_sealed(ledger, monkeypatch):
    charge = spend(ledger, 0.4, "one")
    monkeypatch.setattr("consilience.privacy.ledger._LARGEST_PAYLOAD_BYTES", 3)
    for payload in ("text", b"long"):
        with pytest.raises(SettingsError, match="must be bytes"):
            ledger.seal(charge, payload)


def test_a_receipt_is_plain_json_and_names_the_entry_in_the_chain(ledger):
    receipt = spend(ledger, 0.4, "one", study="digest").receipt
    assert json.loads(json.dumps(receipt)) == receipt
    assert receipt["epsilon"] == 0.4
    assert receipt["key"] == "one"
    ledger.verify(head=receipt["hash"])


# ------------------------------------------------------------------------------------------- limits


def test_a_charge_that_does_not_fit_is_refused_with_all_four_parts_and_leaves_no_trace(ledger):
    spend(ledger, 0.8, "one")
    head = ledger.verify()
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, 0.3, "two")
    assert str(caught.value) == (
        "Data set 'ward' cannot be charged epsilon=0.3 for 'test': 0.2 of 1.0 is left. Nothing "
        "was charged or drawn. Use epsilon <= 0.2, or ask the data owner to raise the limit."
    )
    assert ledger.verify() == head
    spend(ledger, 0.2, "two")
    with pytest.raises(BudgetExceeded, match="Ask the data owner"):
        spend(ledger, 1e-9, "three")


def test_a_data_set_without_a_limit_allows_nothing(ledger):
    with pytest.raises(BudgetExceeded, match="has allowed nothing yet"):
        ledger.charge([pure(0.1)], dataset="other", key="one", purpose="test")
    with pytest.raises(SettingsError, match="no limit was ever declared"):
        ledger.balance("other")


def test_a_limit_can_be_raised_and_lowered_to_what_is_spent_but_not_below(ledger):
    spend(ledger, 0.8, "one")
    head = ledger.verify()
    assert ledger.allow("ward", Budget(epsilon=1.0)).left.epsilon == 0.2
    assert ledger.verify() == head, "the same limit again is no entry"
    assert ledger.allow("ward", Budget(epsilon=2.0)).left.epsilon == 1.2
    assert ledger.allow("ward", Budget(epsilon=0.8)).left.epsilon == 0.0
    with pytest.raises(SettingsError, match="below what is spent"):
        ledger.allow("ward", Budget(epsilon=0.7))
    assert ledger.balance("ward").limit.epsilon == 0.8
    ledger.verify(head)


@pytest.mark.parametrize(
    "budget",
    [
        Budget(rho=1.0),
        Budget(epsilon=1.0, unit="person"),
        Budget(epsilon=1.0, neighbours="add-remove"),
    ],
)
def test_the_kind_of_a_limit_never_changes(ledger, budget):
    with pytest.raises(SettingsError, match="change its kind"):
        ledger.allow("ward", budget)


@pytest.mark.parametrize("amount", [1e-10, 10_001.0, 1e300])
def test_a_limit_that_cannot_be_counted_is_refused(ledger, amount):
    for budget in (Budget(epsilon=amount), Budget(rho=amount)):
        with pytest.raises(SettingsError, match="must lie between"):
            ledger.allow("new", budget)


def test_delta_is_limited_as_well(ledger):
    ledger.allow("d", Budget(epsilon=10.0, delta=2e-6))
    for key in "ab":
        ledger.charge([gaussian()], dataset="d", key=key, purpose="test")
    with pytest.raises(BudgetExceeded, match="delta=1e-06"):
        ledger.charge([gaussian()], dataset="d", key="c", purpose="test")
    assert ledger.balance("d").left.delta == 0.0
    with pytest.raises(BudgetExceeded, match="delta"):
        ledger.charge([gaussian()], dataset="ward", key="c", purpose="test")


def test_a_limit_in_rho_adds_rho_and_refuses_events_without_one(ledger):
    ledger.allow("r", Budget(rho=0.01))
    for key in "ab":
        charge = ledger.charge([gaussian()], dataset="r", key=key, purpose="test")
        assert charge.rho == 0.005
    assert ledger.balance("r").left == (None, None, 0.0)
    with pytest.raises(BudgetExceeded, match=r"rho=0\.005"):
        ledger.charge([gaussian()], dataset="r", key="c", purpose="test")
    without = ObjectiveGaussian(
        unit="record",
        neighbours="replace-one",
        loss="logistic",
        n_classes=2,
        curvature=0.25,
        lipschitz=1.0,
        strong_convexity=10.0,
        records_per_unit=1,
        sigma=50.0,
        at_delta=1e-6,
    )
    with pytest.raises(GuaranteeVoid, match="limit in rho"):
        ledger.charge([without], dataset="r", key="c", purpose="test")
    ledger.allow("e", Budget(epsilon=10.0, delta=1e-3))
    assert ledger.charge([without], dataset="e", key="c", purpose="test").rho is None
    assert ledger.balance("e").spent.rho is None
    ledger.verify()


def test_large_deltas_are_counted_exactly_though_a_limit_in_rho_does_not_limit_them(ledger):
    ledger.allow("r", Budget(rho=1000.0))
    for i in range(12):
        ledger.charge([gaussian(delta=0.9)], dataset="r", key=str(i), purpose="test")
    assert ledger.balance("r").spent.delta == 10.8


def test_add_remove_events_cost_double_epsilon_and_fourfold_rho_on_a_replace_one_limit(ledger):
    event = pure(0.25, neighbours="add-remove")
    charge = ledger.charge([event], dataset="ward", key="one", purpose="test")
    assert (charge.epsilon, charge.neighbours) == (0.5, "replace-one")
    assert charge.rho == 4 * 0.25**2 / 2
    ledger.allow("d", Budget(epsilon=10.0, delta=0.1))
    both = [gaussian(neighbours="add-remove"), gaussian()]
    epsilon = both[0].epsilon
    charge = ledger.charge(both, dataset="d", key="two", purpose="test")
    assert charge.epsilon == pytest.approx(3 * epsilon, abs=2e-9)
    assert charge.delta == pytest.approx((2 + math.exp(epsilon)) * 1e-6, rel=1e-12)


def test_replace_one_events_are_refused_on_an_add_remove_limit(ledger):
    ledger.allow("a", Budget(epsilon=1.0, neighbours="add-remove"))
    with pytest.raises(GuaranteeVoid, match="cannot be restated"):
        ledger.charge([pure(0.1)], dataset="a", key="one", purpose="test")


def test_units_are_never_merged(ledger):
    split = pure(0.1, unit="site", neighbours="null-one")
    for events in ([split], [pure(0.1, unit="person"), pure(0.1)]):
        with pytest.raises(GuaranteeVoid, match="no common sum"):
            ledger.charge(events, dataset="ward", key="one", purpose="test")
    assert ledger.charges() == []


# ------------------------------------------------------------------------------------------ numbers


def test_two_calibrated_halves_and_ten_tenths_fill_a_budget_of_one(ledger):
    scale = calibrate_scale(
        lambda s: Laplace(unit="record", neighbours="replace-one", sensitivity=0.7, scale=s),
        epsilon=0.5,
    )
    half = Laplace(unit="record", neighbours="replace-one", sensitivity=0.7, scale=scale)
    for key in "ab":
        ledger.charge([half], dataset="ward", key=key, purpose="test")
    assert ledger.balance("ward").left.epsilon == 0
    ledger.allow("tenths", Budget(epsilon=1.0))
    for i in range(10):
        ledger.charge([pure(0.1)], dataset="tenths", key=str(i), purpose="test")
    assert ledger.balance("tenths").left.epsilon == 0
    ledger.allow("parts", Budget(epsilon=0.9))
    for i in range(3):  # 0.1 + 0.2 is 0.30000000000000004 in floating point
        ledger.charge([pure(0.1), pure(0.2)], dataset="parts", key=f"p{i}", purpose="test")
    assert ledger.balance("parts").left.epsilon == 0


@given(st.floats(min_value=5e-324, max_value=1e4))
def test_a_charge_is_rounded_up_to_within_one_unit_and_four_ulps(value):
    exact = Fraction(value) * NANO
    counted = spent_units(value, NANO)
    assert counted >= 1
    assert exact * (1 - Fraction(1, 2**50)) <= counted < exact + 1


@given(st.integers(min_value=1, max_value=10**13), st.integers(min_value=0, max_value=10**15))
def test_a_whole_number_of_units_survives_the_way_through_a_float(nano, femto):
    assert spent_units(nano / NANO, NANO) == nano == limit_units(nano / NANO, NANO)
    assert spent_units(femto / FEMTO, FEMTO) == femto == limit_units(femto / FEMTO, FEMTO)


@given(st.floats(min_value=1e-9, max_value=1e4))
def test_a_limit_is_never_rounded_up_from_what_was_typed(value):
    assert limit_units(value, NANO) <= Fraction(repr(value)) * NANO < limit_units(value, NANO) + 1


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(min_value=1e-12, max_value=3.0), min_size=1, max_size=4), st.randoms())
def test_sums_only_grow_and_do_not_depend_on_the_order(costs, chance):
    balances = []
    for order in (costs, chance.sample(costs, len(costs))):
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(Path(folder) / "ledger.sqlite")
            before = ledger.allow("ward", Budget(epsilon=100.0))
            for key, cost in enumerate(order):
                spend(ledger, cost, str(key))
                after = ledger.balance("ward")
                assert after.spent.epsilon > before.spent.epsilon
                assert after.left.epsilon < before.left.epsilon
                before = after
            balances.append(before)
            ledger.verify()
    assert balances[0] == balances[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-300])
def test_no_event_with_a_negative_or_undefined_cost_reaches_the_file(ledger, bad):
    class Forged(Laplace):
        epsilon = bad

    with pytest.raises(SettingsError):
        pure(bad)
    with pytest.raises(SettingsError, match="events of this version"):
        ledger.charge(
            [Forged(unit="record", neighbours="replace-one", sensitivity=1.0, scale=1.0)],
            dataset="ward",
            key="one",
            purpose="test",
        )
    with pytest.raises(SettingsError):
        ledger.allow("new", Budget(epsilon=bad))
    assert ledger.charges() == []


def test_the_table_itself_refuses_a_charge_of_nothing_or_less(ledger):
    db = sqlite3.connect(ledger.path)
    try:
        for epsilon, delta in ((0, 0), (-1, 0), (None, 0), (1, -1), (1, None), (0.5, 0)):
            with pytest.raises(sqlite3.IntegrityError):
                db.execute(
                    "INSERT INTO entries (number, kind, time, version, dataset, unit, "
                    "neighbours, key, previous, hash, nano_epsilon, femto_delta) VALUES (9, "
                    "'charge', '', '', '', '', '', 'k', '', '', ?, ?)",
                    (epsilon, delta),
                )
    finally:
        db.close()


def test_exact_training_cannot_be_charged_to_a_finite_budget(ledger):
    event = Laplace(unit="record", neighbours="replace-one", sensitivity=1e308, scale=1e-300)
    assert math.isinf(event.epsilon)
    with pytest.raises(BudgetExceeded, match="infinite epsilon"):
        ledger.charge([event], dataset="ward", key="one", purpose="test")


def test_a_cost_beyond_floating_point_is_a_clear_error(ledger):
    with pytest.raises(SettingsError, match="no floating-point number"):
        spend(ledger, 1e200, "one")


def test_events_that_cost_nothing_are_refused_but_a_pure_delta_costs_the_least_epsilon(ledger):
    with pytest.raises(SettingsError, match="cost nothing"):
        spend(ledger, 0.0, "one")
    with pytest.raises(SettingsError, match="one or more events"):
        ledger.charge([], dataset="ward", key="one", purpose="test")
    ledger.allow("d", Budget(epsilon=1.0, delta=0.5))
    charge = ledger.charge([gaussian(delta=0.1)], dataset="d", key="one", purpose="test")
    assert (charge.epsilon, charge.delta) == (1e-9, 0.1)


def test_texts_are_short_printable_and_never_echoed(ledger):
    secret = "4711\n"
    for bad in ("", "x" * 201, secret, "\x1b[2J", "a\u202eb", "\ud800", 4711, None):
        for name in ("dataset", "key", "purpose"):
            words = {"dataset": "ward", "key": "one", "purpose": "test", name: bad}
            with pytest.raises(SettingsError, match=name) as caught:
                ledger.charge([pure(0.1)], **words)
            assert "4711" not in str(caught.value)
    with pytest.raises(SettingsError, match="study"):
        spend(ledger, 0.1, "one", study=secret)
    with pytest.raises(SettingsError, match="dataset"):
        ledger.allow(secret, Budget(epsilon=1.0))


def test_every_kind_of_event_comes_back_from_the_file(ledger):
    events: list[Event] = [
        pure(0.01),
        Selection(
            unit="record", neighbours="replace-one", sensitivity=1.0, scale=200.0, monotone="no"
        ),
    ]
    ledger.charge(events, dataset="ward", key="one", purpose="test")
    assert events_to_json(ledger.charges("ward")[0].events) == events_to_json(events)
    assert ledger.charges("nothing") == []


# ---------------------------------------------------------------------------------------- tampering


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("written") / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.allow("ward", Budget(epsilon=1.0, delta=1e-5))
    ledger.seal(spend(ledger, 0.25, "one", study="digest"), b"result")
    ledger.allow("ward", Budget(epsilon=2.0, delta=1e-5))
    ledger.charge([gaussian()], dataset="ward", key="two", purpose="test")
    ledger.allow("other", Budget(rho=1.0))
    ledger.seal(ledger.charge([gaussian()], dataset="other", key="three", purpose="test"), b"")
    ledger.verify()
    return path


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_edit_of_any_field_of_any_row_is_found(written, tmp_path, data):
    path = tmp_path / "edited.sqlite"
    shutil.copy(written, path)
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    table = data.draw(st.sampled_from(["entries"] * 8 + ["payloads", "head"]))
    row = data.draw(
        st.sampled_from([dict(r) for r in db.execute(f"SELECT rowid AS place, * FROM {table}")])
    )
    db.close()
    column = data.draw(st.sampled_from([name for name in row if name not in ("place", "one")]))
    old = row[column]
    texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4)
    if old is None:
        new = data.draw(st.none() | texts | st.integers(0, 10))
    elif isinstance(old, int):
        new = data.draw(st.integers(-5, 5).map(lambda by: old + by) | st.none())
    elif isinstance(old, bytes):
        new = data.draw(st.binary(max_size=4))
    else:
        new = data.draw(texts | texts.map(lambda t: old + t) | st.just(old.swapcase()) | st.none())
    assume(new != old)
    try:
        edit(path, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row["place"]))
    except sqlite3.IntegrityError:
        assume(False)
    with pytest.raises(LedgerDamaged):
        Ledger(path).verify()


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("DELETE FROM entries WHERE number = 4", "entry 4 is missing"),
        ("DELETE FROM entries WHERE number = 1", "entry 1 is missing"),
        ("DELETE FROM entries WHERE number >= 7", "after entry 6"),
        ("DELETE FROM entries", "after entry 0"),
        ("DELETE FROM head", "after entry 8"),
        ("DELETE FROM payloads WHERE key = 'one'", "what entry 3 sealed"),
        ("INSERT INTO payloads VALUES ('four', x'00')", "none of its 8 entries sealed"),
        ("UPDATE entries SET nano_epsilon = 1 WHERE number = 2", "entry 2 was changed"),
        ("UPDATE entries SET number = 10 - number WHERE number IN (4)", "entry 4"),
    ],
)
def test_verify_says_where_the_chain_breaks(written, tmp_path, statement, where):
    path = tmp_path / "edited.sqlite"
    shutil.copy(written, path)
    if "10 - number" in statement:  # exchange entries 4 and 6
        edit(path, "UPDATE entries SET number = 99 WHERE number = 6")
        edit(path, "UPDATE entries SET number = 6 WHERE number = 4")
        edit(path, "UPDATE entries SET number = 4 WHERE number = 99")
    else:
        edit(path, statement)
    with pytest.raises(LedgerDamaged, match=where):
        Ledger(path).verify()


def test_a_truncated_ledger_takes_no_further_charge(written, tmp_path):
    path = tmp_path / "edited.sqlite"
    shutil.copy(written, path)
    edit(path, "DELETE FROM entries WHERE number = 8")
    with pytest.raises(LedgerDamaged, match="last entry"):
        spend(Ledger(path), 0.1, "new")
    edit(path, "DELETE FROM head")
    with pytest.raises(LedgerDamaged, match="last entry"):
        spend(Ledger(path), 0.1, "new")


def test_a_changed_result_is_not_handed_out(written, tmp_path):
    path = tmp_path / "edited.sqlite"
    shutil.copy(written, path)
    edit(path, "UPDATE payloads SET payload = x'00' WHERE key = 'one'")
    with pytest.raises(LedgerDamaged, match="the result of entry 2"):
        Ledger(path).sealed("one")


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("UPDATE entries SET nano_epsilon = 3000000000 WHERE number = 2", "entry 2 goes beyond"),
        ("UPDATE entries SET nano_epsilon = 1 WHERE number = 4", "entry 4 goes beyond"),
        ("UPDATE entries SET dataset = 'nobody' WHERE number = 2", "entry 2 goes beyond"),
        ("UPDATE entries SET nano_rho = NULL WHERE number = 7", "entry 7 goes beyond"),
        ("UPDATE entries SET key = 'nobody' WHERE number = 3", "what entry 3 sealed"),
    ],
)
def test_a_rehashed_chain_that_breaks_the_rules_is_found_all_the_same(
    written, tmp_path, statement, where
):
    from consilience.privacy.ledger import _GENESIS, _digest

    path = tmp_path / "edited.sqlite"
    shutil.copy(written, path)
    edit(path, statement)
    db = sqlite3.connect(path, isolation_level=None)
    db.row_factory = sqlite3.Row
    previous = _GENESIS
    for row in db.execute("SELECT * FROM entries ORDER BY number").fetchall():
        entry = {**dict(row), "previous": previous}
        previous = _digest(entry)
        db.execute(
            "UPDATE entries SET previous = ?, hash = ? WHERE number = ?",
            (entry["previous"], previous, row[0]),
        )
    db.execute("UPDATE head SET hash = ?", (previous,))
    db.close()
    with pytest.raises(LedgerDamaged, match=where):
        Ledger(path).verify()


def test_the_triggers_refuse_changes_by_plain_sql(written, tmp_path):
    path = tmp_path / "edited.sqlite"
    shutil.copy(written, path)
    db = sqlite3.connect(path)
    for statement in (
        "DELETE FROM entries",
        "UPDATE entries SET time = ''",
        "DELETE FROM payloads",
        "DELETE FROM head",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="never"):
            db.execute(statement)
    db.close()


def test_a_restored_old_backup_is_noticed_only_by_a_head_written_down_outside(ledger, tmp_path):
    early = ledger.verify()
    ledger.backup(tmp_path / "backup.sqlite")
    receipt = spend(ledger, 0.5, "one").receipt
    late = ledger.verify()
    assert late == receipt["hash"]
    assert ledger.verify(head=early) == late, "a ledger that has grown still holds its old head"
    restored = Ledger(tmp_path / "backup.sqlite")
    assert restored.verify(head=early) == early
    for head in (late, receipt["hash"]):
        with pytest.raises(LedgerDamaged, match="rolled back"):
            restored.verify(head=head)


# ----------------------------------------------------------------------------------------- the file


def test_a_new_ledger_and_its_backup_are_for_the_owner_only_and_leave_nothing_beside_them(
    ledger, tmp_path
):
    ledger.backup(tmp_path / "backup.sqlite")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["backup.sqlite", "ledger.sqlite"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in tmp_path.iterdir())
    with pytest.raises(SettingsError, match="that file exists"):
        ledger.backup(tmp_path / "backup.sqlite")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["backup.sqlite", "ledger.sqlite"]


def test_the_file_is_in_wal_mode_and_opening_it_again_keeps_everything(ledger):
    head = ledger.verify()
    assert Ledger(str(ledger.path)).verify() == head
    db = sqlite3.connect(ledger.path)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()


def four_parts(error: ConsilienceError) -> str:
    text = str(error)
    assert "needs the ledger" in text
    assert "but" in text
    assert "No charge was confirmed" in text
    assert "Fix" in text or "restore" in text
    return text


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100])
def test_a_file_that_is_no_ledger_is_refused_and_not_touched(tmp_path, content):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerDamaged) as caught:
        Ledger(path)
    assert "another program" in four_parts(caught.value) or "not a database" in four_parts(
        caught.value
    )
    assert path.read_bytes() == content


def test_another_programs_database_is_refused(tmp_path):
    db = sqlite3.connect(tmp_path / "other.sqlite")
    db.execute("CREATE TABLE entries (number INTEGER)")
    db.close()
    with pytest.raises(LedgerDamaged, match="another program"):
        Ledger(tmp_path / "other.sqlite")


def test_a_newer_format_is_refused(ledger):
    edit(ledger.path, "PRAGMA user_version = 3")
    with pytest.raises(LedgerDamaged, match="format 3 and this version knows format 2"):
        Ledger(ledger.path)
    with pytest.raises(LedgerDamaged, match="newer version"):
        spend(ledger, 0.1, "one")


def test_damaged_pages_are_found(ledger):
    for i in range(40):
        spend(ledger, 0.01, f"key-{i}")
    content = bytearray(ledger.path.read_bytes())
    for at in range(4096 + 100, len(content), 4096):
        content[at : at + 300] = bytes(300)
    ledger.path.write_bytes(content)
    with pytest.raises(LedgerDamaged):
        ledger.verify()


def test_a_missing_folder_or_vanished_file_is_a_clear_error(ledger, tmp_path):
    with pytest.raises(LedgerDamaged) as caught:
        Ledger(tmp_path / "missing" / "ledger.sqlite")
    assert "No such file" in four_parts(caught.value)
    with pytest.raises(LedgerDamaged, match="No such file"):
        ledger.backup(tmp_path / "missing" / "backup.sqlite")
    ledger.path.unlink()
    with pytest.raises(LedgerDamaged, match="unable to open"):
        spend(ledger, 0.1, "one")
    assert not ledger.path.exists(), "a vanished ledger is never recreated behind the owner's back"


def test_a_journal_without_its_ledger_is_not_overwritten(tmp_path):
    (tmp_path / "ledger.sqlite-wal").write_bytes(b"committed charges")
    with pytest.raises(LedgerDamaged, match="only its journal"):
        Ledger(tmp_path / "ledger.sqlite")
    assert (tmp_path / "ledger.sqlite-wal").read_bytes() == b"committed charges"


def test_losing_the_race_to_create_the_file_is_no_error(tmp_path, monkeypatch):
    path = tmp_path / "ledger.sqlite"
    link = os.link

    def slower(source, target):
        monkeypatch.setattr(os, "link", link)
        Ledger(path).allow("ward", Budget(epsilon=1.0))
        link(source, target)

    monkeypatch.setattr(os, "link", slower)
    assert Ledger(path).balance("ward").limit.epsilon == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_a_held_lock_times_out_with_a_clear_error(ledger):
    hasty = Ledger(ledger.path, timeout_seconds=0.01)
    db = sqlite3.connect(ledger.path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerDamaged, match="locked") as caught:
        spend(hasty, 0.1, "one")
    four_parts(caught.value)
    assert hasty.charges() == [], "reading goes on"
    db.close()
    spend(hasty, 0.1, "one")


def test_a_full_disk_refuses_the_charge_and_loses_none(ledger, monkeypatch):
    connect = sqlite3.connect
    ledger.allow("ward", Budget(epsilon=100.0))
    confirmed = [spend(ledger, 0.1, "first")]

    def full(*arguments, **options):
        db = connect(*arguments, **options)
        db.execute(
            "PRAGMA max_page_count = 1"
        )  # SQLite takes the present size where that is larger
        return db

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(LedgerDamaged, match="full") as caught:
        confirmed.extend(spend(ledger, 0.1, f"key-{i}") for i in range(100))
    four_parts(caught.value)
    with pytest.raises(LedgerDamaged, match="full"):
        ledger.seal(confirmed[0], bytes(100_000))
    with pytest.raises(LedgerDamaged, match="full"):
        Ledger(ledger.path.with_name("new.sqlite"))
    monkeypatch.undo()
    assert ledger.charges() == confirmed
    assert ledger.sealed("first") is None
    assert sorted(p.name for p in ledger.path.parent.iterdir()) == ["ledger.sqlite"]
    ledger.seal(confirmed[0], bytes(100_000))
    ledger.verify()


def test_a_write_that_the_system_refuses_charges_nothing_and_loses_nothing(ledger):
    ledger.allow("ward", Budget(epsilon=100.0))
    found = run(
        """
ledger, keys, message = Ledger(path), [], ""
size = os.path.getsize(path) + 8192
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    for i in range(1000):
        keys.append(ledger.charge([pure(0.01)], dataset="ward", key=str(i), purpose="test").key)
except LedgerDamaged as error:
    message = str(error)
print(json.dumps({"keys": keys, "message": message}))
""",
        ledger.path,
    )
    assert found["keys"]
    assert "No charge was confirmed" in found["message"]
    assert [charge.key for charge in ledger.charges()] == found["keys"]
    ledger.verify()
    spend(ledger, 0.01, "next")


def test_a_read_only_file_is_a_clear_error_and_nothing_is_charged():
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # not tmp_path: a user without rights must be able to reach it
        path = Path(folder) / "ledger.sqlite"
        Ledger(path).allow("ward", Budget(epsilon=1.0))
        path.chmod(0o444)
        os.chmod(folder, 0o555)
        found = run(
            """
if os.getuid() == 0:
    Ledger(path)  # loads what the user without rights could not
    os.setgid(65534); os.setuid(65534)
messages = []
for work in (lambda: Ledger(path).charge([pure(0.1)], dataset="ward", key="one", purpose="test"),
             lambda: Ledger(path + ".new")):
    try:
        work()
    except LedgerDamaged as error:
        messages.append(str(error))
print(json.dumps({"messages": messages}))
""",
            path,
        )
        os.chmod(folder, 0o755)
        path.chmod(0o600)
        assert len(found["messages"]) == 2
        assert all("No charge was confirmed" in message for message in found["messages"])
        assert "Permission denied" in found["messages"][1]
        assert Ledger(path).charges() == []


# ------------------------------------------------------------------------------------- many at once


def test_threads_sharing_one_ledger_spend_exactly_what_fits(ledger):
    outcomes: list[str] = []

    def work(name: int) -> None:
        for attempt in range(15):
            try:
                spend(ledger, 0.05, f"{name}-{attempt}")
                outcomes.append("charged")
            except BudgetExceeded:
                outcomes.append("refused")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count("charged"), outcomes.count("refused")) == (20, 10)
    ledger.verify()


def test_the_same_key_from_many_processes_at_once_is_charged_once(ledger):
    found = run(
        """
def work(say):
    try:
        Ledger(path).charge([pure(0.1)], dataset="ward", key="same", purpose="test")
        say("charged")
    except SettingsError:
        say("refused")
children = [child(work) for _ in range(8)]
said = [pipe.read().strip() for _, pipe in children]
print(json.dumps({"said": sorted(said)}))
""",
        ledger.path,
    )
    assert found["said"] == ["charged"] + ["refused"] * 7
    assert ledger.balance("ward").spent.epsilon == 0.1


def test_a_process_that_forks_while_its_threads_charge_loses_and_doubles_nothing(ledger):
    ledger.allow("ward", Budget(epsilon=100.0))
    found = run(
        """
ledger, stop, mine = Ledger(path), threading.Event(), []
def charge(key):
    ledger.charge([pure(0.01)], dataset="ward", key=key, purpose="test")
    return key
def hammer(name):
    while not stop.is_set():
        mine.append(charge(f"{name}-{len(mine)}"))
threads = [threading.Thread(target=hammer, args=(name,)) for name in "ab"]
[t.start() for t in threads]
said = []
for n in range(6):
    pid, pipe = child(lambda say: [say(charge(f"child-{n}-{i}")) for i in range(3)])
    with pipe:
        said += pipe.read().split()
    os.waitpid(pid, 0)
stop.set()
[t.join() for t in threads]
print(json.dumps({"children": said, "threads": mine}))
""",
        ledger.path,
    )
    assert len(found["children"]) == 18
    assert sorted(charge.key for charge in ledger.charges()) == sorted(
        found["children"] + found["threads"]
    )
    ledger.verify()


def test_eight_processes_spend_exactly_what_fits(tmp_path):
    check_race(tmp_path / "ledger.sqlite", n_processes=8, n_attempts=60, n_fitting=200, cost=0.05)


def test_a_process_killed_at_any_moment_loses_and_doubles_no_charge(tmp_path):
    found = check_kills(tmp_path / "ledger.sqlite", n_kills=15)
    assert found["charged"], "no kill came late enough for a charge: the test proved nothing"


def test_charging_goes_on_while_a_backup_is_taken(ledger, tmp_path):
    ledger.allow("ward", Budget(epsilon=100.0))
    chance, heads = random.Random(1), []
    thread = threading.Thread(target=lambda: [spend(ledger, 0.01, f"key-{i}") for i in range(30)])
    thread.start()
    for i in range(5):
        copy = tmp_path / f"backup-{i}-{chance.random()}.sqlite"
        ledger.backup(copy)
        heads.append(Ledger(copy).verify())
    thread.join()
    for head in heads:
        ledger.verify(head)


def test_all_data_sets_with_a_limit_are_listed_also_before_any_charge(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.datasets() == []
    for name in ("ward", "clinic", "ward"):
        ledger.allow(name, Budget(epsilon=1.0 + len(name)))
    assert ledger.datasets() == ["ward", "clinic"]


# ---------------------------------------------------------------------------------- exact entries


def test_an_exact_contribution_needs_a_permission_and_costs_no_epsilon(ledger):
    with pytest.raises(BudgetExceeded, match="not permitted"):
        ledger.record_exact(dataset="ward", key="one", purpose="exact")
    ledger.permit_exact("ward", reason="the board said so")
    ledger.permit_exact("ward", reason="again: no second entry")
    note = ledger.record_exact(dataset="ward", key="one", purpose="exact", study="abc")
    assert ledger.record_exact(dataset="ward", key="one", purpose="exact", study="abc") == note
    assert [each.kind for each in ledger.notes("ward")] == ["allow", "permit", "exact"]
    assert (note.study, note.dataset) == ("abc", "ward")
    assert ledger.balance("ward").spent.epsilon == 0
    ledger.permit_exact("ward", reason="no longer", permitted=False)
    assert not ledger.permits_exact("ward")
    with pytest.raises(BudgetExceeded, match="not permitted"):
        ledger.record_exact(dataset="ward", key="two", purpose="exact")
    ledger.verify(note.hash)
    with pytest.raises(SettingsError, match="no limit"):
        ledger.permit_exact("unknown", reason="why not")


def test_the_reason_for_a_limit_is_kept(ledger):
    ledger.allow("ward", Budget(epsilon=7.5), reason="the board met on Monday")
    assert ledger.notes("ward")[-1].purpose == "the board met on Monday"
    with pytest.raises(SettingsError, match="printable"):
        ledger.allow("ward", Budget(epsilon=8.0), reason="a\x1b[1A")


def test_an_exact_entry_without_a_permission_is_damage(ledger):
    ledger.permit_exact("ward", reason="yes")
    ledger.record_exact(dataset="ward", key="one", purpose="exact")
    with sqlite3.connect(ledger.path) as db:
        db.row_factory = sqlite3.Row
        for trigger in ("entries_hold", "entries_stay"):
            db.execute(f"DROP TRIGGER {trigger}")
        rows = [dict(row) for row in db.execute("SELECT * FROM entries ORDER BY number")]
        rows[1]["kind"], previous = "forbid", rows[0]["hash"]
        db.execute("DELETE FROM entries WHERE number > 1")
        for row in rows[1:]:
            row["previous"] = previous
            previous = row["hash"] = ledgers._digest(row)
            db.execute(ledgers._INSERT, row)
        db.execute("UPDATE head SET hash = ?", (previous,))
    db.close()
    with pytest.raises(LedgerDamaged, match="beyond the limit"):
        ledger.verify()


def test_a_ledger_of_format_1_takes_exact_entries_and_keeps_its_chain(tmp_path):
    kept = Path(__file__).parents[1] / "fixtures" / "version-0.1" / "site" / "ledger.sqlite"
    ledger = Ledger(shutil.copyfile(kept, tmp_path / "ledger.sqlite"))
    dataset, head, charges = ledger.datasets()[0], ledger.verify(), ledger.charges()
    written = sqlite3.connect(ledger.path)
    assert written.execute("PRAGMA user_version").fetchone()[0] == 1  # reading changes nothing
    written.close()
    ledger.permit_exact(dataset, reason="yes")
    ledger.record_exact(dataset=dataset, key="new", purpose="exact")
    assert ledger.verify(head) != head
    assert ledger.charges() == charges
    db = sqlite3.connect(ledger.path)
    with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        db.execute("DELETE FROM entries")
    db.close()


def test_a_lost_charge_is_entered_again_whatever_is_left(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.allow("ward", Budget(epsilon=1.0))
    event = Laplace(unit="record", neighbours="replace-one", sensitivity=1.0, scale=1.0)
    facts = {"dataset": "ward", "purpose": "recovered"}
    first = ledger.recover([event], key="a", **facts)
    assert ledger.recover([event], key="a", **facts) == first
    with pytest.raises(SettingsError, match="another training"):  # one name, two charges
        ledger.recover([event, event], key="a", **facts)
    assert ledger.balance("ward").limit.epsilon == 1.0
    ledger.recover([event], key="b", **facts)
    balance = ledger.balance("ward")
    assert (balance.limit.epsilon, balance.spent.epsilon, balance.left.epsilon) == (2.0, 2.0, 0.0)
    with pytest.raises(BudgetExceeded):
        ledger.charge([event], key="c", **facts)
    ledger.verify()
