"""A study in words: what it asks and promises, and the request that a data officer approves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from consilience.files.certificate import RELATIONS, UNITS, Page, meaning
from consilience.files.contribution import FACTS
from consilience.files.sealed import software
from consilience.learners.registry import LEARNERS
from consilience.privacy.guarantee import Guarantee, Neighbours
from consilience.privacy.ledger import Amounts, Balance, show_amount
from consilience.study.study import Study
from consilience.text import Quoted

Rows = list[tuple[str, str]]


def of_study(study: Study) -> Page:
    """Return a study in words."""
    classes = study.schema.classes
    label = "a number" if classes is None else ", ".join(map(str, classes))
    protection = _release_rows(study) if study.trusted else _contribution_rows(study)
    return Page(
        f"Study {study.name}",
        [
            ("Purpose", _describe_purpose(study), []),
            (
                "Privacy",
                [_describe_trust(study)],
                [*protection, ("sites needed", str(study.min_sites))],
            ),
            (
                "What is learned",
                [study.build_aggregator().describe().weighing],
                [
                    ("label", Quoted(f"{study.schema.label}: {label}")),
                    ("learner", Quoted(_name_with(study.learner, study.learner_settings))),
                    ("aggregator", Quoted(_name_with(study.aggregator, study.aggregator_settings))),
                ],
            ),
            (
                "Columns that are read",
                [_QUOTED],
                _column_rows(study),
            ),
            ("Digest", [], [("sha256", study.digest)]),
        ],
    )


def _column_rows(study: Study) -> Rows:
    """Name every column that a site's table is read for."""
    schema = study.schema
    rows = [(Quoted(column.name), column.expects) for column in schema.columns]
    rows.append((Quoted(schema.label), "the label"))
    if schema.person is not None:
        rows.append((Quoted(schema.person), "which person a record is about; it stays here"))
    return [(name, Quoted(words)) for name, words in rows]


_QUOTED = "Lines that begin with a bar are the words of those who wrote the study."


def _describe_purpose(study: Study) -> list[str]:
    """Return the purpose, set off: nothing in it was checked."""
    if not study.purpose:
        return ["The study states no purpose."]
    return ["In the words of those who wrote the study:", Quoted(study.purpose)]


def _describe_trust(study: Study) -> str:
    """Say against whom the sites' records are protected."""
    if not study.trusted:
        return "The hub is not trusted: what a site hands over is private before it leaves."
    exact = "Sites hand the hub exact learners: nothing is promised against the hub."
    if not study.draws_noise:
        return f"{exact} The aggregator adds no noise, so its releases promise nothing either."
    return f"{exact} The hub adds noise to what it publishes."


def _contribution_rows(study: Study) -> Rows:
    low, high = study.epsilon_range
    return [
        ("epsilon of a site", f"from {low:g} to {high:g}, chosen by the site"),
        ("delta", f"{study.delta:g}"),
        ("protects", UNITS[study.unit]),
        ("neighbours", f"{study.neighbours}: {RELATIONS[Neighbours(study.neighbours)]}"),
    ]


def _release_rows(study: Study) -> Rows:
    """Say what the aggregator's own noise hides."""
    unit, neighbours = study.hidden
    protects = UNITS[unit] if study.draws_noise else "nothing: no noise is drawn"
    return [
        ("protects, by the release", protects),
        ("neighbours, of the release", f"{neighbours}: {RELATIONS[neighbours]}"),
    ]


def _name_with(name: str, settings: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{setting} = {value}" for setting, value in settings.items())
    return f"{name} with {listed}" if listed else name


def promise(study: Study, epsilon: float | None) -> Guarantee:
    """Return what a site is promised that trains at `epsilon`, or exactly for a trusted hub."""
    return Guarantee(
        epsilon=math.inf if epsilon is None else epsilon,
        delta=0.0 if epsilon is None else study.delta,
        unit=study.unit,
        neighbours=Neighbours(study.neighbours),
    )


def of_training(
    study: Study,
    *,
    site: str,
    epsilon: float | None,
    balance: Balance,
    number: int,
    head: str,
    unasked: Sequence[str] = (),
) -> Page:
    """Return the page that a data officer files before a training is approved.

    `balance` is that of the data set that would be charged. There is no `epsilon` if the study's
    hub is trusted. The `number` of the contribution and the `head` of the ledger make the page that
    of one training only. `unasked` are the studies whose hubs will not be asked what they have of
    the site.
    """
    against = "the hub" if study.trusted else "the hub or anyone who sees what it publishes"
    exact = (
        "In plain words: the hub will see this site's exact model, and is trusted not to use it to "
        "learn about anyone's records."
    )
    return Page(
        f"Request to train for study {study.name} at {site}",
        [
            (
                "What is asked",
                _describe_purpose(study),
                [
                    ("study digest", study.digest),
                    ("contribution", f"number {number} of this site to the study"),
                    ("head of the ledger", head),
                ],
            ),
            (
                "What will leave this site",
                [
                    "One signed file, once someone runs 'site submit', with these facts: "
                    f"{'; '.join(FACTS.values())}.",
                    "A hub also sees the site's signed requests: when the site joins, submits, "
                    "fetches, recovers or trains, also for a study of another hub, and from which "
                    "address.",
                ],
                _content(study, site, epsilon),
            ),
            (
                "What will not leave",
                ["Records, error messages, logs, and anything that is not listed above."],
                [],
            ),
            (
                "What is promised",
                [
                    *meaning(promise(study, epsilon), against=against),
                    *([exact] if study.trusted else []),
                ],
                [],
            ),
            (
                "What it costs",
                [_NOT_COMPARED.format(", ".join(unasked))] if unasked else [],
                _cost_rows(study, epsilon, balance),
            ),
            (
                "Approval",
                [],
                [
                    ("approved by", "_" * 30),
                    ("date", "_" * 15),
                    ("software", f"consilience {software()}"),
                ],
            ),
        ],
    )


_NOT_COMPARED = (
    "The ledger will not be compared with what these hubs have of this site: {}. If the site's "
    "folder was put back from an older copy, what was spent there since then is missing here."
)


def _content(study: Study, site: str, epsilon: float | None) -> Rows:
    """Say what is in the file that leaves the site."""
    learner = study.build(study.epsilon_range[0] if epsilon is None else epsilon)
    chosen = learner.describe_choices(study.schema.n_features, None)
    return [
        ("learner", study.learner),
        *([] if chosen is None else [("chosen by rule", chosen)]),
        ("numbers", LEARNERS[study.learner].describe_state(study.schema)),
        ("number", learner.describe_size()),
        ("site", site),
    ]


def _cost_rows(study: Study, epsilon: float | None, balance: Balance) -> Rows:
    dataset = f"data set {balance.dataset!r} of this site's ledger"
    if epsilon is None:
        return [
            ("recorded in", f"{dataset}, before any computation, as an exact contribution"),
            ("bounded by", "nothing: no epsilon is paid, and no limit holds for an exact model"),
        ]
    cost = balance.cost(promise(study, epsilon))
    assert cost.epsilon is not None
    learner = study.build(epsilon)
    learner.n_features_in_ = study.schema.n_features
    # Some noise costs less than was asked for; how much less depends on the number of records.
    bound = "at most " if learner.cost(study.max_size) < epsilon * (1 - 1e-6) else ""
    delta = f", delta = {cost.delta:.6g}" if cost.delta else ""
    restated = (
        ""
        if balance.neighbours == study.neighbours
        else f" (epsilon = {epsilon:g} under {study.neighbours}, stated under "
        f"{balance.neighbours} as this ledger counts)"
    )
    return [
        ("charged to", f"{dataset}, before any computation"),
        ("left before", _describe_left(balance, Amounts(0.0, 0.0, None))),
        ("this training", f"{bound}epsilon = {show_amount(cost.epsilon)}{delta}{restated}"),
        ("left after", f"{bound and 'at least '}{_describe_left(balance, cost)}"),
    ]


def _describe_left(balance: Balance, cost: Amounts) -> str:
    """Say what is left of a data set after a cost."""
    left, limit = balance.left, balance.limit
    if left.epsilon is None or left.delta is None:
        return "not limited in epsilon"
    if not balance.holds(cost):
        return "more than is left: refused"
    deltas = (
        f", delta = {left.delta - (cost.delta or 0.0):.6g} of {limit.delta:.6g}"
        if limit.delta
        else ""
    )
    after = show_amount(left.epsilon - (cost.epsilon or 0.0))
    return f"epsilon = {after} of {show_amount(limit.epsilon or 0.0)}{deltas}"
