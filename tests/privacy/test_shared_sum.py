"""The noise of shares, compared with the exact law of their sum."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from consilience.errors import BudgetExceeded, GuaranteeVoid, SettingsError
from consilience.privacy.accounting import (
    SharedSum,
    events_from_json,
    events_to_json,
    gaussian_log_delta,
)
from consilience.privacy.guarantee import Budget, Neighbours, Unit
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import Noise, noisy_sum
from consilience.privacy.spending import Account, Spending
from consilience.privacy.vector_noise import calibrate_sum, share_sum

WHO = {"unit": Unit.RECORD, "neighbours": Neighbours.REPLACE_ONE}


def law(sigma: float, shares: int) -> NDArray[np.float64]:
    """Return the mass of a sum of discrete Gaussians, symmetric around its middle entry."""
    reach = math.ceil(13 * sigma)
    numbers = np.arange(-reach, reach + 1)
    one = np.exp(-((numbers / sigma) ** 2) / 2)
    one /= one.sum()
    whole = one
    for _ in range(shares - 1):
        whole = np.convolve(whole, one)
    return whole


def exact_delta(mass: NDArray[np.float64], moved: int, epsilon: float) -> float:
    """Return the least delta at `epsilon` for a sum that a unit moves by so many grains."""
    padded = np.pad(mass, moved)
    return float(np.maximum(0.0, padded - math.exp(epsilon) * np.roll(padded, moved)).sum())


def event(sigma: float, shares: int, honest: int, moved: int) -> SharedSum:
    """Return the event of shares that are `sigma` grains wide."""
    return SharedSum(
        sensitivity=float(moved),
        sigma=sigma * math.sqrt(shares),
        narrowest=sigma,
        length=1,
        at_delta=1e-6,
        shares=shares,
        honest=honest,
        **WHO,
    )


@pytest.mark.parametrize("honest", [1, 2, 3, 8])
@pytest.mark.parametrize("moved", [7, 40, 150])
def test_what_is_stated_bounds_the_exact_law_closely(honest: int, moved: int) -> None:
    mass = law(16.0, honest)
    stated = event(16.0, 8, honest, moved)
    for epsilon in (0.05, 0.3, 1.0, 3.0):
        delta, bound = exact_delta(mass, moved, epsilon), math.exp(stated.log_delta(epsilon))
        if delta > 1e-12:  # below, the masses at hand are not exact enough
            assert delta <= bound * (1 + 1e-9) <= 1.2 * delta


@pytest.mark.parametrize("shares", [2, 3, 5])
@pytest.mark.parametrize("sigma", [0.6, 0.8, 1.0])
def test_a_sum_of_shares_is_one_wider_discrete_gaussian_up_to_the_lemmas_factor(
    sigma: float, shares: int
) -> None:
    """At such small noise the factor can be seen; at the noise that is drawn it is 1."""
    mass = law(sigma, shares)
    numbers = np.arange(len(mass)) - len(mass) // 2
    near = np.abs(numbers) <= 6 * sigma * math.sqrt(shares)
    one = np.exp(-(numbers**2) / (2 * shares * sigma**2))
    ratio = np.log(mass[near] / (one / one.sum())[near])
    slack = 5 * sum(math.exp(-2 * math.pi**2 * sigma**2 * i / (i + 1)) for i in range(1, shares))
    assert 1e-3 * slack < np.abs(ratio).max() <= slack


def test_the_profile_of_real_numbers_is_exceeded_by_narrow_noise() -> None:
    """Why noise must be wide, and its variance counts as less by 4."""
    delta = exact_delta(law(1.0, 1), 1, 1.0)
    assert delta > 1.05 * math.exp(gaussian_log_delta(1.0, 1.0))


def test_a_share_costs_what_was_asked_with_enough_others_and_more_without() -> None:
    whole = calibrate_sum(1.0, np.full(20, 2.0**20), epsilon=1.0, delta=1e-6, **WHO)
    share = share_sum(whole, 8)
    assert 0.999999 < share.epsilon <= 1.0
    alone = [SharedSum(**{**vars(share), "honest": h}).epsilon for h in range(8, 0, -1)]
    # The figures that follow from the Gaussian profile, for eight to one honest sites.
    assert alone == pytest.approx([1, 1.08, 1.17, 1.29, 1.46, 1.70, 2.12, 3.11], abs=0.006)
    assert events_from_json(events_to_json([share])) == (share,)
    assert share.rho is None
    assert SharedSum(**{**vars(share), "honest": 1}).rho is not None
    # Of all that a site counts on the hub could choose the others for its batch.
    assert "at least 8 of the sites that are added up with this one" in share.assumption


def test_shares_are_wide_enough_for_their_proof() -> None:
    whole = calibrate_sum(1e-3, np.full(3, 4.0), epsilon=2.0, delta=1e-6, **WHO)
    share = share_sum(whole, 100)
    assert share.narrowest == 16.0
    assert share.epsilon <= 2.0
    with pytest.raises(SettingsError, match="grains wide"):
        SharedSum(**{**vars(share), "narrowest": 15.9})


def test_shares_have_a_part_of_the_variance() -> None:
    widths = np.repeat([2.0**16, 2.0**15], 20_000)
    whole = calibrate_sum(1.0, widths, epsilon=1.0, delta=1e-6, **WHO)
    share = share_sum(whole, 8)
    zeros = np.zeros(len(widths), np.int64)
    drawn = [
        noisy_sum(zeros, widths, event=one, source=Noise(seed=3).open()) / (one.sigma * widths)
        for one in (whole, share)
    ]
    assert np.var(drawn[0]) == pytest.approx(1.0, rel=0.05)
    assert np.var(drawn[1]) == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("field", ["shares", "honest"])
def test_a_share_is_one_of_some(field: str) -> None:
    good = event(16.0, 8, 8, 1)
    with pytest.raises(SettingsError, match="whole number"):
        SharedSum(**{**vars(good), field: 0})


@pytest.mark.parametrize(
    "budget",
    [
        Budget(epsilon=0.5, delta=1e-3),
        Budget(epsilon=9.0, delta=1e-9),
        Budget(rho=9.0),
        Budget(epsilon=9.0, delta=1e-3, unit=Unit.PERSON),
        None,
    ],
)
def test_a_charge_that_is_refused_takes_nothing_of_the_other_account(
    budget: Budget | None, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "books.sqlite")
    ledger.allow("ward alone", Budget(epsilon=9.0, delta=1e-3))
    if budget is not None:
        ledger.allow("ward", budget)
    share = share_sum(calibrate_sum(1.0, np.full(2, 2.0**20), epsilon=1.0, delta=1e-6, **WHO), 8)
    spending = Spending(Account(ledger, "ward", "k"), "ward alone")
    with pytest.raises((BudgetExceeded, GuaranteeVoid)):
        spending.run(lambda source, receipt: b"drawn", share, "a test")
    assert ledger.charges() == []
    if budget is None:
        ledger.allow("ward", Budget(epsilon=1.0, delta=1e-3))
        for _ in range(2):  # and the second time it is given back
            assert spending.run(lambda source, receipt: b"drawn", share, "a test") == b"drawn"
        assert [charge.dataset for charge in ledger.charges()] == ["ward alone", "ward"]
