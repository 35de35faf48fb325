"""The exact attack on a statistic: how far one unit moves the sum, in its noise.

Between two neighbouring tables a noisy sum differs by known whole numbers, so that the best attack
on all of it is the one on a single Gaussian that is moved as far. Both sums are computed by the
statistic's own code, from rows far beyond every declared bound; where it is no sum over records,
also among others. Where a whole site is hidden, all of its table is replaced.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from consilience.auditing.attacked import Array, Table, make_labels, plan_training, records_per_unit
from consilience.auditing.checks import check_gaussian
from consilience.auditing.gradients import Shift
from consilience.auditing.report import Check
from consilience.privacy.accounting import GaussianSum, SharedSum
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.mechanisms import Source
from consilience.statistics.base import Statistic

ANGLES = 41
LENGTHS = (0.3, 1.0, 1e6)  # times the declared norm
# Records of one class whose intercept makes those of another as steep as they can be.
CROWD = 20_000
SITE = 50  # records of each class of a site that is replaced
CHECKED = 8  # numbers of the sum whose noise is looked at


def attack_sum(
    twin: Statistic, runs: int, rest: Source, source: Source
) -> tuple[Shift, tuple[Check, ...], GaussianSum]:
    """Return the farthest shift that was found, checks of the noise as drawn, and the event."""
    n_features = twin.fixed_features or 2
    table = Table(rest.normal(4 * n_features).reshape(4, -1), make_labels(twin, 4))
    if twin.unit == "person":
        table = table._replace(persons=np.arange(4))
    task, plan = plan_training(twin, table)
    exact, event = twin.scale * twin.exact_total(task) * twin.grain, plan.events[0]
    assert isinstance(event, GaussianSum)
    found = find_farthest(twin, event)
    drawn = []
    for _ in range(runs):
        twin._train(task, plan, source)  # type: ignore[arg-type]
        drawn.append(((twin.total_ * twin.step - exact) * twin.weights())[:CHECKED])
    checks = check_gaussian(np.array(drawn), sigma=event.drawn_sigma) if runs else ()
    return found, checks, event


def find_farthest(twin: Statistic, event: GaussianSum) -> Shift:
    """Return how far the unit moves a sum that moves it farthest, in what is unknown of its noise.

    Of shared noise that is what an attacker does not know who knows all but `event.honest` shares.
    """
    unknown = event.drawn_sigma
    if isinstance(event, SharedSum):
        unknown *= math.sqrt(event.honest)
    return max(
        Shift(_distance(twin, one, other) / unknown, what)
        for one, other, what in _pairs(twin, twin.fixed_features or 2)
    )


def _pairs(twin: Statistic, n_features: int) -> Iterator[tuple[Table, Table | None, str]]:
    """Yield two units, the second None where one is only removed, and in words how they differ."""
    norm, count = float(twin.get_params().get("data_norm", 1.0)), records_per_unit(twin)
    labels = sorted(set(make_labels(twin, 64).tolist()))
    if twin.unit == Unit.SITE:
        yield from _site_pairs(labels, norm, n_features)
        return
    replaced = Neighbours(twin.neighbours) is Neighbours.REPLACE_ONE
    for cosine, far in itertools.product(np.linspace(-1, 1, ANGLES), LENGTHS):
        row, other = np.zeros((2, n_features))
        row[0] = 1.0
        other[: min(2, n_features)] = (cosine, math.sqrt(1 - cosine**2))[:n_features]
        for first, second in itertools.product(labels, labels):
            one = _unit(far * norm * row, first, count)
            if not replaced:
                yield one, None, f"{count} records of length {far:g}, removed"
                if not twin.adds_records and far == 1.0 and cosine == -1:
                    for label in labels[1:]:
                        crowd = _unit(0 * row, label, CROWD)
                        what = f"{count} records removed from among {CROWD:,} others"
                        yield _join(one, crowd), crowd, what
                break
            two = _unit(far * norm * other, second, count)
            same = "the same" if first == second else "another"
            what = f"{count} records replaced by others at cosine {cosine:.2g} with {same} label"
            yield one, two, what
            if not twin.adds_records and far == 1.0 and cosine < 0:
                for label in labels[: len(labels) * (first == second)]:
                    crowd = _unit(0 * row, label, CROWD)
                    yield _join(one, crowd), _join(two, crowd), f"{what}, among {CROWD:,} others"


def _site_pairs(
    labels: list[object], norm: float, n_features: int
) -> Iterator[tuple[Table, Table | None, str]]:
    """Yield whole sites: all records of one class, beside all of another, or of all others.

    Rows of zeros leave nothing but an intercept, which says the same of every public record.
    """
    row = np.zeros(n_features)
    row[0] = norm
    for far, one in itertools.product((0.0, *LENGTHS), labels):
        others = [label for label in labels if label != one]
        first = _unit(far * row, one, SITE * len(others))
        for kept in (*([other] for other in others), others):
            parts = [_unit(far * row, other, SITE) for other in kept]
            what = f"a site of {SITE} records of length {far:g} for each class, of one or of others"
            yield first, functools.reduce(_join, parts), what


def _join(one: Table, other: Table) -> Table:
    return Table(np.concatenate([one.X, other.X]), np.concatenate([one.y, other.y]))


def _unit(row: Array, label: object, count: int) -> Table:
    return Table(np.tile(row, (count, 1)), np.array([label] * count))


def _distance(twin: Statistic, one: Table, other: Table | None) -> float:
    """Return how far the weighted sum moves that the site releases."""
    parts = [_total(twin, table) for table in (one, other) if table is not None]
    gap = parts[0] - parts[1] if len(parts) == 2 else parts[0]
    return float(np.linalg.norm(gap * (twin.step * twin.weights())))


def _total(twin: Statistic, table: Table) -> Array:
    """Return the sum that the site's noise is added to, in whole numbers."""
    whose = {"persons": np.zeros(len(table.y))} if twin.unit == "person" else {}
    task, _ = plan_training(twin, table._replace(persons=whose.get("persons")))
    return twin.scaled_total(task)
