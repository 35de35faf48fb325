"""Noise on a vector: how much, how it is drawn, and how the floating-point gap is closed.

A released vector costs two events. The main noise (`calibrate_vector`) hides how far one unit can
move the ideal, real-valued vector. The closing noise (`closing_event`) hides how far the computed
vector is from the ideal one. `CLOSING_SHARE` of epsilon pays for the second, the rest for the
first, so that both together cost at most the epsilon they were given. Proofs:
docs/guarantees/l2-laplace.md, gaussian.md, objective.md and closing.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from consilience.errors import SettingsError
from consilience.privacy.accounting import (
    LEAST_SIGMA,
    Closing,
    Event,
    Gaussian,
    GaussianSum,
    GradientSteps,
    L2Laplace,
    Laplace,
    Objective,
    ObjectiveGaussian,
    ObjectiveL2Laplace,
    SharedSum,
    calibrate_scale,
    gaussian_sigma,
)
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.mechanisms import Source, close, gaussian, l2_laplace

Floats: TypeAlias = NDArray[np.float64]
VectorNoise: TypeAlias = L2Laplace | Gaussian | ObjectiveL2Laplace | ObjectiveGaussian
EventT = TypeVar("EventT", bound=Event)

CLOSING_SHARE = 0.01  # of epsilon; covers a distance of about 1e-8, so its noise is invisible
# The public radius of a draw: exceeded with probability 2^-256, the chance of guessing the key it
# was drawn from.
RADIUS_PROBABILITY = 2.0**-256


def main_share(epsilon: float) -> float:
    """Return what is left of `epsilon` for the main noise once the closing noise is paid for."""
    return (1 - CLOSING_SHARE) * epsilon


def calibrate_vector(
    sensitivity: float,
    *,
    epsilon: float,
    delta: float,
    unit: Unit | str,
    neighbours: Neighbours | str,
    by_cost: bool = False,
) -> L2Laplace | Gaussian:
    """Return the least noise for a vector of that L2 sensitivity at the main share of `epsilon`.

    Gaussian if `delta` is positive, otherwise of density ∝ exp(-‖b‖₂/scale). With `by_cost` the
    Gaussian's sigma is searched until the event itself costs that share, rather than computed from
    its profile with a margin: less noise by a factor of 1 - 1e-10. Private PCA has always been
    calibrated that way, and its releases for a seed must not change.
    """
    main = main_share(epsilon)
    if by_cost and delta > 0:
        return calibrate_event(
            lambda sigma: vector_event(
                sensitivity, sigma, delta=delta, unit=unit, neighbours=neighbours
            ),
            epsilon=main,
        )
    scale = (
        gaussian_sigma(epsilon=main, delta=delta, sensitivity=sensitivity)
        if delta > 0
        else sensitivity / main
    )
    return vector_event(sensitivity, scale, delta=delta, unit=unit, neighbours=neighbours)


def calibrate_shared(
    sensitivities: Sequence[float] | Floats,
    epsilons: Sequence[float] | Floats,
    *,
    delta: float,
    unit: Unit | str,
    neighbours: Neighbours | str,
) -> L2Laplace | Gaussian:
    """Return the least noise that suffices for the epsilon of each of several sites."""
    reaches, budgets = np.asarray(sensitivities, np.float64), np.asarray(epsilons, np.float64)
    if delta > 0:
        scale = max(
            gaussian_sigma(epsilon=main_share(float(e)), delta=delta, sensitivity=float(r))
            for e, r in zip(budgets, reaches, strict=True)
        )
    else:
        most = int(np.argmax(reaches / budgets))
        scale = float(reaches[most]) / main_share(float(budgets[most]))
    largest = float(reaches.max())
    return vector_event(largest, scale, delta=delta, unit=unit, neighbours=neighbours)


def vector_event(
    sensitivity: float,
    scale: float,
    *,
    delta: float,
    unit: Unit | str,
    neighbours: Neighbours | str,
) -> L2Laplace | Gaussian:
    """Return the event of noise with that scale or, if `delta` is positive, standard deviation."""
    unit, neighbours = Unit(unit), Neighbours(neighbours)
    if delta > 0:
        return Gaussian(
            sensitivity=sensitivity, sigma=scale, at_delta=delta, unit=unit, neighbours=neighbours
        )
    return L2Laplace(sensitivity=sensitivity, scale=scale, unit=unit, neighbours=neighbours)


def with_sensitivity(event: L2Laplace | Gaussian, sensitivity: float) -> L2Laplace | Gaussian:
    """Return the same noise seen by a unit that moves the vector by another distance."""
    return replace(event, sensitivity=sensitivity)


def calibrate_event(kind: Callable[[float], EventT], *, epsilon: float) -> EventT:
    """Return ``kind(scale)`` of the least scale at which it costs at most `epsilon`."""
    return kind(calibrate_scale(kind, epsilon=epsilon))


def calibrate_steps(
    reaches: tuple[float, float],
    grains: tuple[float, float],
    *,
    epsilon: float,
    delta: float,
    share: float,
    steps: int,
) -> tuple[float, float]:
    """Return the least noise of a second moment and of `steps` gradients that cost `epsilon`.

    `reaches` and `grains` are those of the moment and of a gradient; `share` of the budget, as
    Gaussians count it, goes to the moment. Variances include what whole numbers cost
    (docs/guarantees/gradient.md).
    """
    sigma = gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=1.0)
    moment, gradient = reaches
    return (
        math.hypot(moment * sigma / math.sqrt(share), math.sqrt(8) * grains[0]),
        math.hypot(gradient * sigma * math.sqrt(steps / (1 - share)), 2 * grains[1]),
    )


def calibrate_sum(
    reach: float,
    widths: Floats,
    *,
    epsilon: float,
    delta: float,
    unit: Unit | str,
    neighbours: Neighbours | str,
) -> GaussianSum:
    """Return the least noise for a weighted sum that a unit moves by at most `reach`.

    `widths` are the grains that a weight of one is worth, for each number. What whole numbers cost
    is included (docs/guarantees/statistics.md).
    """
    narrowest = float(np.min(widths))
    sigma = gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=reach)
    sigma = max(math.hypot(sigma, 2 / narrowest), LEAST_SIGMA / narrowest)
    return GaussianSum(
        sensitivity=reach,
        sigma=sigma,
        narrowest=sigma * narrowest,
        length=len(widths),
        at_delta=delta,
        unit=Unit(unit),
        neighbours=Neighbours(neighbours),
    )


def share_sum(whole: GaussianSum, shares: int) -> SharedSum:
    """Return the share of a sum's noise that each site draws if `shares` of them are enough.

    A share may have to be wider than that for its proof, and the whole is then wider too.
    """
    share = max(whole.narrowest / math.sqrt(shares), LEAST_SIGMA)
    wider = share * math.sqrt(shares) / whole.narrowest
    facts = {**vars(whole), "sigma": whole.sigma * wider, "narrowest": share}
    return SharedSum(**facts, shares=shares, honest=shares)


def scale_records(epsilon: float, most: float, delta: float, steps: int) -> int:
    """Return by how many of `steps` parts a site scales its records that asks for less than `most`.

    The noise of all is wide enough for `most`, and moving the sum by so much less costs at most
    `epsilon`: Gaussian noise hides a distance by its ratio to the noise alone. Rounded down.
    """
    if epsilon >= most:
        return steps
    wide = gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=1.0)
    parts = int(steps * gaussian_sigma(epsilon=most, delta=delta, sensitivity=1.0) / wide)
    if parts < 1:
        raise SettingsError(
            f"Noise that is shared with sites at epsilon={most:g} is too wide beside the records "
            f"of a site at epsilon={epsilon:g}. Nothing was trained or charged. Choose an epsilon "
            "nearer to the largest of the study."
        )
    return parts


def closing_event(
    dimension: int,
    distance: float,
    *,
    epsilon: float,
    unit: Unit | str,
    neighbours: Neighbours | str,
) -> Closing:
    """Return the noise that hides a distance of computation at the closing share of `epsilon`."""
    return Closing(
        dimension=dimension,
        distance=distance,
        scale=2 * math.sqrt(dimension) * distance / (CLOSING_SHARE * epsilon),
        unit=Unit(unit),
        neighbours=Neighbours(neighbours),
    )


def draw_vector(dimension: int, *, event: VectorNoise, source: Source) -> Floats:
    """Draw the noise that `event` states.

    Privacy
    -------
    What `event` states, up to the floating-point gap that `close_vector` covers.
    """
    if isinstance(event, Gaussian | ObjectiveGaussian):
        return gaussian(dimension, event=event, source=source)
    return l2_laplace(dimension, event=event, source=source)


def close_vector(vector: Floats, *, event: Closing | None, source: Source) -> Floats:
    """Return `vector` with closing noise, or as it is where nothing private is released.

    Privacy
    -------
    As `consilience.privacy.mechanisms.close`.
    """
    return vector if event is None else close(vector, event=event, source=source)


def is_vector_noise(event: Event | None) -> TypeGuard[VectorNoise]:
    """Tell whether `event` is the main noise of a vector."""
    return isinstance(event, L2Laplace | Gaussian | ObjectiveL2Laplace | ObjectiveGaussian)


def is_in_objective(event: Event | None) -> TypeGuard[ObjectiveL2Laplace | ObjectiveGaussian]:
    """Tell whether the noise is part of what is minimised, rather than added to the minimum."""
    return isinstance(event, Objective)


def ridge_beside(event: Event) -> float:
    """Return the ridge of what was minimised with the noise of `event`; 0 if there was none."""
    if isinstance(event, GradientSteps):
        return event.ridge
    return event.strong_convexity if isinstance(event, Objective) else 0.0


def noise_variance(event: VectorNoise | Laplace | Closing | None, dimension: int = 1) -> float:
    """Return the variance of each coordinate of a draw of `event`; 0 where nothing is drawn.

    A vector of density ∝ exp(-‖b‖₂/s) has a Gamma(dimension) radius of mean square
    dimension·(dimension + 1)·s², divided evenly among the coordinates.
    """
    if event is None:
        return 0.0
    if isinstance(event, Gaussian | ObjectiveGaussian):
        return float(event.sigma**2)
    if isinstance(event, L2Laplace | ObjectiveL2Laplace):
        return float((dimension + 1) * event.scale**2)
    return float(2 * event.scale**2)


def minimum_variance(
    event: VectorNoise | GradientSteps, dimension: int, *, curvature: float = 0.0
) -> float:
    """Return the variance that a draw of `event` gives each coordinate of the released minimum.

    Noise in the objective moves the minimum by the inverse of its strong convexity; `curvature` is
    what the records add to that. Noise on the minimum itself is not damped.
    """
    if isinstance(event, GradientSteps):
        return (event.sigma / (event.ridge + curvature)) ** 2
    damping = event.strong_convexity + curvature if isinstance(event, Objective) else 1.0
    return noise_variance(event, dimension) / damping**2


def public_sum(
    event: Laplace | Gaussian | Closing | None, n_draws: int, *, probability: float
) -> float:
    """Return what a sum of independent scalar draws exceeds, either way, with that probability.

    A Chernoff bound, so up to three times too large. Discrete and continuous noise have the same:
    both have moments of at most exp(2λ²s²) up to λ² = 1/(2s²), or exp(λ²σ²/2).
    """
    if event is None:
        return 0.0
    unlikely = math.log(2 / probability)
    if isinstance(event, Gaussian):
        return float(event.sigma * math.sqrt(2 * n_draws * unlikely))
    return float(event.scale * (math.sqrt(8 * n_draws * unlikely) + math.sqrt(8) * unlikely))


def public_radius(
    event: VectorNoise | None, dimension: int, *, probability: float = RADIUS_PROBABILITY
) -> float:
    """Return the length that a draw exceeds with that probability: a χ or Gamma quantile."""
    if event is None:
        return 0.0
    if isinstance(event, Gaussian | ObjectiveGaussian):
        return float(event.sigma * math.sqrt(2 * special.gammainccinv(dimension / 2, probability)))
    return float(event.scale * special.gammainccinv(dimension, probability))


# ---------------------------------------------------------------------------- how far a draw goes


def is_added(event: Event) -> bool:
    """Tell whether an event is noise that was added to the released vector itself."""
    return type(event) in (Gaussian, L2Laplace)


def quantile_along(event: Event, dimension: int, level: float) -> float:
    """Return how far such noise goes along any one direction, but for a chance of 1 - level."""
    if isinstance(event, Gaussian):
        return event.sigma * -float(special.ndtri((1 - level) / 2))
    assert isinstance(event, L2Laplace)
    return event.scale * _radial_quantile(dimension, level)


@lru_cache(maxsize=64)
def _radial_quantile(dimension: int, level: float) -> float:
    """Return the quantile of |b·u|, u any unit vector, for b of density ∝ exp(-‖b‖).

    b·u is √(2G) times a standard normal, G of a Gamma law of shape (dimension + 1) / 2: both have
    the characteristic function (1 + t²)^(-(dimension + 1) / 2).
    """
    from scipy import integrate, optimize  # slow to load, and seldom needed

    shape = (dimension + 1) / 2

    def within(far: float) -> float:
        def given(share: float) -> float:
            spread = 2 * math.sqrt(float(special.gammaincinv(shape, share)))
            return float(special.erf(far / spread)) if spread else 1.0

        return float(integrate.quad(given, 0, 1, limit=200)[0])

    most = 10 * math.sqrt(dimension + 1) / (1 - level)
    return float(optimize.brentq(lambda far: within(far) - level, 0.0, most, xtol=1e-6))
