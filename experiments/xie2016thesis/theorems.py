"""The theorems on the feature method, measured: how its squared error depends on m, m₀, ε and N.

They bound E‖f - f*‖², where f* minimises the expected loss. That takes a distribution with a known
f*, so here the data set is the population: sites and the aggregator draw records from it with
replacement, and f* is the minimum over all of it. A bound with constant terms says nothing on how
fast the whole error falls; what its order terms speak of is measured as parts of their own, each of
which is zero in the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import consilience as cs
from consilience.privacy.mechanisms import Noise, Source
from consilience.privacy.vector_noise import main_share
from experiments.datasets import Dataset, axes
from experiments.design import Method, Panel
from experiments.xie2016thesis.literal import (
    draw_weights_noise,
    perturbed_weights,
    plan_weights,
)

Array = NDArray[Any]
Computed = Callable[[Sequence[Any], Any, int, int], list[dict[str, Any]]]
LEAST = 1e-8  # Λ of f*, whose own is zero: without any the minimum is hard to certify

NONE, LOC, FULL = "F-None", "F-Loc", "F-Full"
BY_SITES = "due to the sites' records"
BY_PUBLIC = "due to the aggregation records"
BY_NOISE = "due to noise at the sites"
BY_AGGREGATOR = "due to noise at the aggregator"
PARTS = (BY_SITES, BY_PUBLIC, BY_NOISE, BY_AGGREGATOR)
USUAL = {"m": 800, "m0": 800, "epsilon": 1.0, "N": 10}
VALUES: dict[str, tuple[Any, ...]] = {
    "m": (100, 200, 400, 800, 1600, 3200, 6400),
    "m0": (100, 200, 400, 800, 1600, 3200, 6400),
    "epsilon": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    "N": (2, 5, 10, 20, 40),
}
SHOWN = {"m": "records per site m", "m0": "aggregation records m₀", "epsilon": "ε", "N": "sites N"}


def local(ridge: float, epsilon: float, **more: Any) -> cs.PrivateLogisticRegression:
    """Return a site's learner: the theorems want one loss everywhere, here the logistic one."""
    return cs.PrivateLogisticRegression(
        epsilon=epsilon / main_share(1.0),
        regularization=ridge,
        mechanism="objective",
        calibration="chaudhuri2011",
        fit_intercept=False,
        classes=(-1, 1),
        **more,
    )


def fit(X: Array, y: Array, ridge: float, epsilon: float = np.inf, seed: int = 0) -> Array:
    """Return the coefficients that a site learns."""
    noise = {} if np.isinf(epsilon) else {"noise": Noise(seed=seed)}
    return np.asarray(local(ridge, epsilon, **noise).fit(X, y).coef_[0])


def combine(M: Array, X: Array, y: Array, ridge: float, noise: Array | None = None) -> Array:
    """Return Σ ω_i f_i of the members in the rows of M, ω learned from X and y."""
    none = np.zeros(len(M)) if noise is None else noise
    return perturbed_weights(X @ M.T, y, ridge * len(y), none) @ M


def squared(a: Array, b: Array) -> float:
    """Return ‖a - b‖²."""
    return float(np.sum((a - b) ** 2))


def measured(vary: str, ridge: float) -> Computed:
    """Return the function that measures error and parts against one of m, m₀, ε and N."""

    def rows(xs: Sequence[Any], data: Dataset, repeats: int, seed: int) -> list[dict[str, Any]]:
        X, y = axes(data.X)(data.X), data.y
        best, limit = fit(X, y, LEAST), fit(X, y, ridge)
        found = []
        for repeat in range(repeats):
            for x in xs:
                here = USUAL | {vary: x}
                source = Noise(seed=seed).open(stream=repeat)
                errors = once(X, y, best, limit, here, ridge, source)
                found += [
                    {"x": x, "label": label, "repeat": repeat, "value": value}
                    for label, value in errors.items()
                ]
        return found

    return rows


def once(
    X: Array,
    y: Array,
    best: Array,
    limit: Array,
    here: dict[str, Any],
    ridge: float,
    source: Source,
) -> dict[str, float]:
    """Return the squared errors of one draw of all records and all noise."""
    m, m0, epsilon, n_sites = (here[name] for name in ("m", "m0", "epsilon", "N"))

    def drawn(size: int) -> Array:
        return (source.uniform(int(size)) * len(y)).astype(int)

    sites, public = [drawn(m) for _ in range(n_sites)], drawn(m0)
    seeds = source.words(n_sites)
    M = np.array([fit(X[one], y[one], ridge) for one in sites])
    noisy = np.array(
        [
            fit(X[one], y[one], ridge, epsilon, int(word))
            for one, word in zip(sites, seeds, strict=True)
        ]
    )
    on_public = {NONE: combine(M, X[public], y[public], ridge)}
    on_public[LOC] = combine(noisy, X[public], y[public], ridge)
    plan = plan_weights(epsilon / main_share(1.0), ridge, (len(public), n_sites))
    noise = draw_weights_noise(plan, source, n_sites)
    raised = plan.regularization / len(public)
    on_public[FULL] = combine(noisy, X[public], y[public], raised, noise)
    # With all of the population at the aggregator nothing is left but what the sites bring.
    exact, private = (combine(one, X, y, ridge) for one in (M, noisy))
    same = combine(np.tile(limit, (n_sites, 1)), X, y, ridge)
    found = {label: squared(f, best) for label, f in on_public.items()}
    return found | {
        BY_SITES: squared(exact, same),
        BY_PUBLIC: squared(on_public[NONE], exact),
        BY_NOISE: squared(private, exact),
        BY_AGGREGATOR: squared(on_public[FULL], on_public[LOC]),
    }


def panel(vary: str, ridge: float) -> Panel:
    """Return the panel of squared errors against one of m, m₀, ε and N."""
    rest = {"m": "m = 800", "m0": "m₀ = 800", "epsilon": "ε = 1", "N": "N = 10"}
    fixed = ", ".join(text for name, text in rest.items() if name != vary)
    return Panel(
        id=f"squared-{vary}",
        title="MNIST as the population, logistic loss",
        data="mnist37",
        x=VALUES[vary],
        quick_x=VALUES[vary][::2],
        xlabel=f"{SHOWN[vary]}  ({fixed})",
        ylabel="squared distance",
        metric="squared distance",
        arguments={},
        methods=(
            *(Method(label, "", "paper") for label in (NONE, LOC, FULL)),
            *(Method(label, "", "baseline") for label in PARTS),
        ),
        xscale="log",
        yscale="log",
        computed=measured(vary, ridge),
        quick=6,
        full=30,
        note="Squared distance to f*. Parts of it, from the top of their names: from the limit of "
        "large sites; from all of the population at the aggregator; from the same without noise.",
    )


DIMENSION, DISTANCE = "dimension of the span", "relative distance of f* from the span"


def spans(ridge: float) -> Computed:
    """Return the function that measures the span of so many exact local models."""

    def rows(xs: Sequence[Any], data: Dataset, repeats: int, seed: int) -> list[dict[str, Any]]:
        X, y = axes(data.X)(data.X), data.y
        best = fit(X, y, LEAST)
        found = []
        for repeat in range(repeats):
            source = Noise(seed=seed).open(stream=repeat)
            for x in xs:
                parts = np.split(source.permutation(len(y))[: 170 * int(x)], int(x))
                M = np.array([fit(X[one], y[one], ridge) for one in parts])
                inside = M.T @ np.linalg.lstsq(M.T, best, rcond=None)[0]
                far = float(np.linalg.norm(best - inside) / np.linalg.norm(best))
                rank = float(np.linalg.matrix_rank(M))
                found += [
                    {"x": x, "label": label, "repeat": repeat, "value": value}
                    for label, value in ((DIMENSION, rank), (DISTANCE, far))
                ]
        return found

    return rows


def span_panel(ridge: float) -> Panel:
    """Return the panel of what N local models of 170 records span."""
    return Panel(
        id="span",
        title="MNIST, d = 50, sites of 170 records",
        data="mnist37",
        x=(10, 25, 40, 50, 60, 70),
        quick_x=(10, 50, 60),
        xlabel="sites N",
        ylabel="distance, or dimension",
        metric="distance",
        arguments={},
        methods=(Method(DISTANCE, "", "paper"), Method(DIMENSION, "", "baseline")),
        computed=spans(ridge),
        yscale="log",
        quick=3,
        full=20,
        note="The dimension is that of the matrix of models as computers see it.",
    )
