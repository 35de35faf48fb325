"""The attack on a choice among candidates: on each training, and on the choice by its density.

A unit is in one part, drawn whatever it holds. In a training part it moves that model alone, in the
last one the choice alone; so the composed loss is the largest of these, each attacked as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from consilience.auditing.attacked import (
    Learner,
    Table,
    copy_learner,
    make_labels,
    plan_training,
    records_per_unit,
)
from consilience.auditing.report import AuditReport, Check
from consilience.learners.tuned import Tuned, TunedTask
from consilience.learners.tuning import TuningPlan, TuningTask, mark_errors
from consilience.privacy.accounting import Selection, total
from consilience.privacy.guarantee import Neighbours
from consilience.privacy.mechanisms import Noise, Source

Array = NDArray[Any]

UNITS_PER_PART = 4


def attack_choice(
    learner: Tuned, attack: Callable[[Learner], AuditReport], runs: int, source: Source
) -> AuditReport:
    """Attack every candidate with `attack`, and the choice among them by its density."""
    rest = Noise(seed=0).open(stream=1)
    n_units = UNITS_PER_PART * learner.tuning.n_parts
    twin = copy_learner(learner, n_units)
    assert isinstance(twin, Tuned)
    task, plan = plan_training(twin, _make_table(twin, n_units, rest))
    assert isinstance(plan, TuningPlan)
    assert plan.selection is not None
    claimed = total(plan.events).convert(Neighbours(twin.neighbours))
    loss, worst = _choice_loss(plan.selection, len(plan.trainings), records_per_unit(twin))
    found = [(loss, f"the choice: {worst}")]
    checks = [*_check_choices(task, plan, runs, rest, source)]
    for settings, one in zip(twin.tuning.candidates, twin.candidates(), strict=True):
        report, name = attack(one), ", ".join(f"{k} = {v}" for k, v in settings.items())
        found.append((report.epsilon_lower, f"{name}: {report.worst}"))
        checks += [Check(f"{name}: {each.name}", each.p_value) for each in report.checks]
    epsilon, which = max(found)
    return AuditReport(
        attack="each candidate, and the choice by its density",
        claimed=claimed,
        epsilon_lower=epsilon,
        worst=which,
        checks=tuple(checks),
    )


def _choice_loss(event: Selection, n_candidates: int, moved: int) -> tuple[float, str]:
    """Return the largest privacy loss of drawing a candidate by wrong answers, and where it is.

    It is written from the definition, and not from the event's own cost.
    """
    gaps = np.arange(-60, 61) * event.scale  # of one candidate's wrong answers behind all others'
    replaced = event.neighbours is Neighbours.REPLACE_ONE
    changes = (-moved, 0, moved) if replaced else (0, moved)
    best = (0.0, "no number of wrong answers tells anything")
    for own in changes:
        for others in changes:
            before, after = (
                -np.log1p((n_candidates - 1) * np.exp(each / event.scale))
                for each in (gaps, gaps + own - others)
            )
            losses = np.abs(before - after)
            at = int(losses.argmax())
            where = f"{own:+d} of its wrong answers and {others:+d} of the others'"
            best = max(best, (float(losses[at]), where))
    return best


def _make_table(twin: Tuned, n_units: int, rest: Source) -> Table:
    """Return units without any relation of records to labels, so that candidates differ."""
    cuts = getattr(twin.get_params(deep=False).get("bins"), "cuts", ((), ()))
    X = rest.uniform(n_units * len(cuts)).reshape(n_units, -1) / len(cuts)
    y = make_labels(twin, n_units)[rest.permutation(n_units)]
    return Table(X, y, np.arange(n_units) if twin.unit == "person" else None)


def _check_choices(
    task: TunedTask, plan: TuningPlan, runs: int, rest: Source, source: Source
) -> tuple[Check, ...]:
    """Tune many times, and compare the choices with the law that is charged for them.

    Where a choice falls in the distribution of its own errors is uniform, whatever the errors are.
    """
    tuner, records, event = task.tuner, task.records, plan.selection
    assert event is not None
    drawn: list[Array] = []
    draw_parts = tuner._parts

    def watch(task: TuningTask, n_parts: int, source: Source) -> list[Array]:
        drawn[:] = draw_parts(task, n_parts, source)
        return drawn

    tuner.__dict__["_parts"] = watch
    places, disjoint = [], True
    for _ in range(runs):
        tuner._train(records, plan, source)
        disjoint &= _are_disjoint(drawn, records.persons)
        judged = np.flatnonzero(drawn[-1])
        wrong = np.array(
            [
                mark_errors(one, records.X[judged], records.y[judged]).sum()
                for one in tuner._learners
            ]
        )
        order = np.argsort(wrong, kind="stable")
        chances = special.softmax(-wrong[order] / event.scale)
        place = int(np.flatnonzero(order == tuner.best_index_)[0])
        places.append(chances[:place].sum() + chances[place] * rest.uniform(1)[0])
    name = "candidates are chosen with the noise that is charged"
    return (
        Check(name, float(stats.kstest(places, "uniform").pvalue)),
        Check("each unit is in one part", float(disjoint)),
    )


def _are_disjoint(parts: list[Array], persons: Array | None) -> bool:
    """Tell whether every record, or every person, is in exactly one part."""
    whose = np.arange(len(parts[0])) if persons is None else persons
    units = [unit for part in parts for unit in np.unique(whose[part])]
    return len(units) == len(set(units)) == len(np.unique(whose))
