"""A study in words: what it asks and promises, and the request that a data officer approves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from consilience.blind.masked import Masking
from consilience.files.certificate import RELATIONS, UNITS, Page, Section, meaning
from consilience.files.contribution import (
    FACTS,
    MASKED_FACTS,
    PROJECTED_FACTS,
    TUNED_FACTS,
    WEIGHED_FACTS,
)
from consilience.files.sealed import software
from consilience.privacy.accounting import Event, alone, total
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit, show_bound, show_left
from consilience.privacy.ledger import Amounts, Balance, show_amount
from consilience.study.check import MOST_PLANNED, build_for
from consilience.study.study import Study
from consilience.study.withholding import describe_waiting
from consilience.text import Quoted

Rows = list[tuple[str, str]]
MOST_SHOWN = 60  # characters of a text that is a setting


@dataclass(frozen=True)
class BlindPage:
    """What a page to approve says of a blind study: roster, keyholders, and whom the owner trusts.

    ``confirmed`` are the keyholders whose keys the data owner confirmed.
    """

    masking: Masking
    confirmed: frozenset[str]

    @property
    def is_accepted(self) -> bool:
        """Whether what is charged rests on the keyholders and the roster."""
        return self.confirmed >= set(self.masking.rule.keyholders)

    def sections(self) -> list[Section]:
        """Return whom the guarantee rests on."""
        rule, roster = self.masking.rule, self.masking.roster
        holders: Rows = [
            (key, "confirmed by the data owner" if key in self.confirmed else "NOT confirmed")
            for key in rule.keyholders
        ]
        sites: Rows = []
        for site in roster.sealed.facts["sites"]:
            counted = "" if site["key"] in self.masking.counted else "; not counted on"
            said = f"key {site['key'][:16]}…, checked by {site['checked_by']}{counted}"
            sites.append((Quoted(site["name"]), Quoted(said)))
        return [
            ("Keyholders", [_KEYHOLDERS.format(rule.least)], holders),
            (
                "Sites on the roster, as all pad holders signed it",
                [_ROSTER.format(rule.spare, rule.shares)],
                [*sites, ("digest of the roster", roster.digest)],
            ),
        ]


_KEYHOLDERS = (
    "Each of them opens the sum of a batch only if at least {} sites that this site counts on, "
    "itself included, are in it. One of them has to be honest. Compare their keys with what they "
    "told you themselves: a key that only the hub supplied may be the hub's own."
)
_ROSTER = (
    "The promise holds if at most {} of all sites that this site counts on work together with the "
    "hub, so that {} others of each batch do not. A site can count on fewer: consilience site "
    "count-on."
)


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
                    *(
                        ("learner" if name == study.learner else "or", _with(name, settings))
                        for name, settings in study.learners.items()
                    ),
                    *_axes_rows(study),
                    *_tuning_rows(study),
                    ("aggregator", _with(study.aggregator, study.aggregator_settings)),
                    *([] if study.at is None else [("weighed at", Quoted(study.at))]),
                ],
            ),
            (
                "Columns that are read",
                [_QUOTED],
                _column_rows(study),
            ),
            ("When a release waits", describe_waiting(study), []),
            ("Digest", [], [("sha256", study.digest)]),
        ],
    )


def _axes_rows(study: Study) -> Rows:
    """Say where the axes come from along which models are trained."""
    return [] if study.projection is None else [("trained along", study.projection.describe())]


def _tuning_rows(study: Study) -> Rows:
    """Say which settings each site chooses, and how."""
    if study.tuning is None:
        return []
    return [
        ("chosen at the site", Quoted(study.tuning.describe_candidates())),
        ("how it is chosen", study.tuning.describe()),
    ]


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
    if study.blind is not None:
        rule = study.blind
        return (
            "The hub is blind: sites hand over sums that are masked, each with a share of the "
            f"noise, and the hub and {len(rule.keyholders)} keyholders together can open the sum "
            f"of a batch of at least {rule.least} sites, and nothing smaller. The noise of any "
            f"{rule.shares} sites is enough for the epsilon that a site chooses, if these and one "
            "keyholder follow the protocol. If everybody else colludes, less is left: see below. "
            "Nobody can check numbers that nobody sees: a site that sends wrong ones spoils the "
            "sum, and no single site can be left out of a release afterwards. Releases are "
            "compared with the public records alone, or with guessing."
        )
    if not study.trusted:
        return "The hub is not trusted: what a site hands over is private before it leaves."
    exact = "Sites hand the hub exact learners: nothing is promised against the hub."
    if not study.draws_noise:
        return f"{exact} The aggregator adds no noise, so its releases promise nothing either."
    return f"{exact} The hub adds noise to what it publishes."


def _contribution_rows(study: Study) -> Rows:
    low, high = study.epsilon_range
    return [
        ("epsilon of a site", f"from {low:.15g} to {high:.15g}, chosen by the site"),
        ("delta", show_bound(study.delta)),
        ("protects", UNITS[study.unit]),
        ("neighbours", f"{study.neighbours}: {RELATIONS[Neighbours(study.neighbours)]}"),
        *_blind_rows(study),
    ]


def _blind_rows(study: Study) -> Rows:
    """Say what is left of a site's protection if everybody else colludes."""
    if study.blind is None:
        return []
    low, high = (
        show_bound(total(charged_events(study, each)).epsilon, 3) for each in study.epsilon_range
    )
    return [
        ("if everybody else colludes", f"epsilon from {low} to {high} instead"),
        *(("keyholder", key) for key in study.blind.keyholders),
    ]


def charged_events(study: Study, epsilon: float, page: BlindPage | None = None) -> Sequence[Event]:
    """Return what a training of a blind study costs, by what the data owner accepted.

    Without a page, or with keyholders that are not confirmed, it is what holds if everybody else
    colludes.
    """
    shared = build_for(study, epsilon).planned(1)
    return shared if page is not None and page.is_accepted else alone(shared)


def _release_rows(study: Study) -> Rows:
    """Say what the aggregator's own noise hides."""
    unit, neighbours = study.hidden
    protects = UNITS[unit] if study.draws_noise else "nothing: no noise is drawn"
    return [
        ("protects, by the release", protects),
        ("neighbours, of the release", f"{neighbours}: {RELATIONS[neighbours]}"),
    ]


def _with(name: str, settings: Mapping[str, Any]) -> Quoted:
    listed = ", ".join(f"{setting} = {_show(value)}" for setting, value in settings.items())
    return Quoted(f"{name} with {listed}" if listed else name)


def _show(value: object) -> str:
    """Show a setting; of packed records, how long they are. The study's file has all of it."""
    text = str(value)
    long = isinstance(value, str) and len(text) > MOST_SHOWN
    return f"{text[:MOST_SHOWN]}… ({len(text):,} characters)" if long else text


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
    blind: BlindPage | None = None,
    members: Sequence[tuple[str, str]] = (),
    mapping: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return the page that a data officer files before a training is approved.

    `balance` is that of the data set that would be charged. There is no `epsilon` if the study's
    hub is trusted. The `number` of the contribution and the `head` of the ledger make the page that
    of one training only. `unasked` are the studies whose hubs will not be asked what they have of
    the site. `blind` is what the site was shown of a study with a blind hub. `members` are sites
    and digests of the contributions that this site weighs. `mapping` says of the study's columns
    what the site makes them of.
    """
    facts = FACTS | (MASKED_FACTS if study.is_blind else {}) | (WEIGHED_FACTS if members else {})
    facts |= {} if study.projection is None else PROJECTED_FACTS
    facts |= {} if study.tuning is None else TUNED_FACTS
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
                    f"{'; '.join(facts.values())}.",
                    "A hub also sees the site's signed requests: when the site joins, submits, "
                    "fetches, recovers or trains, also for a study of another hub, and from which "
                    "address.",
                    *_also_read_by(study, site),
                ],
                _weights(study, site, epsilon, len(members))
                if members
                else _content(study, site, epsilon),
            ),
            *([("Models that are weighed", [_WEIGHED], _listed(members))] if members else []),
            *(
                [("How the site's table is translated", [_MAPPED], _mapped(mapping))]
                * bool(mapping)
            ),
            (
                "What will not leave",
                ["Records, error messages, logs, and anything that is not listed above."],
                [],
            ),
            (
                "What is promised",
                [
                    *meaning(_promised(study, epsilon), against=against),
                    *([exact] if study.trusted else [_not_by_records(study)]),
                    *_without_others(study, epsilon),
                ],
                [],
            ),
            *([] if blind is None else blind.sections()),
            (
                "What it costs",
                [_NOT_COMPARED.format(", ".join(unasked))] if unasked else [],
                _cost_rows(study, epsilon, balance, blind),
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


_WEIGHED = (
    "Each of them is private for the site that sent it. What is learned here is how much each "
    "counts; whoever sent a wrong one can make the result worse, and cannot make it less private."
)


_MAPPED = (
    "Each value is translated by itself before anything is computed, by rules that were written "
    "without looking at records. The rules stay at this site."
)


def _mapped(mapping: Sequence[tuple[str, str]]) -> Rows:
    return [(Quoted(name), Quoted(rule)) for name, rule in mapping]


def _listed(members: Sequence[tuple[str, str]]) -> Rows:
    return [(Quoted(site), digest) for site, digest in members]


def _also_read_by(study: Study, site: str) -> list[str]:
    """Say which other site gets the file."""
    if study.at in (None, site):
        return []
    return [f"The hub hands the file to one other site, which weighs the models: {study.at}."]


def _weights(study: Study, site: str, epsilon: float | None, n_members: int) -> Rows:
    """Say what is in the file of a site that weighs members."""
    weigher = study.build_weigher(study.epsilon_range[0] if epsilon is None else epsilon)
    classes = study.schema.classes
    outputs = 1 if classes is None or len(classes) == 2 else len(classes)
    return [
        ("aggregator", study.aggregator),
        ("numbers", f"{n_members * outputs**2:,} weights of the models of the sites below"),
        ("number", weigher.describe_size()),
        ("site", site),
    ]


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
        *([("chosen here among", ", ".join(study.chosen_among))] * bool(study.chosen_among)),
        *([] if chosen is None else [("chosen by rule", chosen)]),
        *_axes_rows(study),
        *_tuning_rows(study),
        ("numbers", learner.describe_state(study.schema)),
        ("number", learner.describe_size()),
        ("site", site),
    ]


def _promised(study: Study, epsilon: float | None) -> Guarantee:
    """Return what a file of this training promises, under what it assumes of others."""
    if study.blind is None or epsilon is None:
        return promise(study, epsilon)
    return total(build_for(study, epsilon).planned(1))


def _not_by_records(study: Study) -> str:
    """Say which choices of people the promise does not cover."""
    chosen = "epsilon and learner were" if study.chosen_among else "epsilon was"
    return (
        f"It holds if the {chosen} not chosen by trying out on these records what comes of it: "
        "such a choice tells of them, and nothing pays for that."
    )


def _without_others(study: Study, epsilon: float | None) -> list[str]:
    """Say what a masked sum's promise rests on, and what is left without it."""
    if study.blind is None or epsilon is None:
        return []
    assumed = build_for(study, epsilon).assumed()
    by_itself = total(charged_events(study, epsilon))
    return [
        f"This holds if {'; and if '.join(assumed)}.",
        "If everybody else colludes, the same holds with epsilon = "
        f"{show_bound(by_itself.epsilon)} instead, because this site's own share of the noise is "
        "then all that hides its records.",
    ]


def _cost_rows(
    study: Study, epsilon: float | None, balance: Balance, blind: BlindPage | None = None
) -> Rows:
    dataset = f"data set {balance.dataset!r} of this site's ledger"
    if epsilon is None:
        return [
            ("recorded in", f"{dataset}, before any computation, as an exact contribution"),
            ("bounded by", "nothing: no epsilon is paid, and no limit holds for an exact model"),
        ]
    if study.is_blind:
        cost, bound = balance.charge(charged_events(study, epsilon, blind)), ""
    else:
        cost, bound = _most_charged(study, epsilon, balance)
    assert cost.epsilon is not None
    delta = f", delta = {show_bound(cost.delta)}" if cost.delta else ""
    restated = ""
    if study.unit is Unit.SITE and balance.unit is not Unit.SITE:
        restated = f": what hides this whole site hides every {balance.unit} of it as well"
    elif balance.neighbours != study.neighbours:
        restated = (
            f" (epsilon = {show_bound(epsilon)} under {study.neighbours}, stated under "
            f"{balance.neighbours} as this ledger counts)"
        )
    return [
        ("charged to", f"{dataset}, before any computation"),
        ("left before", _describe_left(balance, Amounts(0.0, 0.0, None))),
        ("this training", f"{bound}epsilon = {show_amount(cost.epsilon)}{delta}{restated}"),
        *_axes_cost(study, epsilon, balance),
        *([] if study.tuning is None else [("the choice costs", study.tuning.describe_cost())]),
        ("left after", f"{bound and 'at least '}{_describe_left(balance, cost)}"),
        *_kept_rows(study, epsilon, blind),
    ]


def _axes_cost(study: Study, epsilon: float, balance: Balance) -> Rows:
    """Say which part of a cost is for axes of the site's own records, as the ledger counts."""
    part = None if study.projection is None else study.projection.cost(epsilon, study.delta)
    if part is None:
        return []
    cost = balance.cost(replace(promise(study, epsilon), epsilon=part[0], delta=part[1]))
    delta = f", delta = {show_bound(cost.delta)}" if cost.delta else ""
    said = f"epsilon = {show_amount(cost.epsilon or 0.0)}{delta} of what is charged"
    return [("of this, for the axes", said)]


def _kept_rows(study: Study, epsilon: float, blind: BlindPage | None) -> Rows:
    """Say which of the two costs of a masked sum is charged."""
    if blind is None:
        return []
    if not blind.is_accepted:
        return [
            (
                "why so much",
                "The data owner has not confirmed all keyholders of the study, so that nothing "
                "but this site's own share of the noise counts: consilience site trust-keyholder",
            )
        ]
    cost = total(charged_events(study, epsilon)).epsilon
    kept = f"epsilon = {show_bound(cost)}, in an account of its own"
    return [("kept, if everybody else colludes", kept)]


def _most_charged(study: Study, epsilon: float, balance: Balance) -> tuple[Amounts, str]:
    """Return what is charged, and "at most " where that depends on the number of records.

    Some noise costs less than was asked for. How much less, the page cannot say: it is written
    before anybody looks at the table.
    """
    most = balance.cost(promise(study, epsilon))
    if (study.schema.max_records_per_person or 1) > MOST_PLANNED:
        return most, "at most "  # so many plans of this kind would take minutes
    learner = build_for(study, epsilon)
    sizes = {min(10**power, study.max_size) for power in range(10)}
    charged = [balance.charge(learner.planned(size)) for size in sizes]
    largest = max(charged, key=lambda one: one[:2])
    if all(_are_close(one, largest) for one in charged):
        return (most if _are_close(most, largest) else largest), ""
    return most, "at most "


def _are_close(one: Amounts, other: Amounts) -> bool:
    return all(
        math.isclose(a or 0.0, b or 0.0, rel_tol=1e-6)
        for a, b in zip(one[:2], other[:2], strict=True)
    )


def _describe_left(balance: Balance, cost: Amounts) -> str:
    """Say what is left of a data set after a cost."""
    left, limit = balance.left, balance.limit
    if left.epsilon is None or left.delta is None:
        return "not limited in epsilon"
    if not balance.holds(cost):
        return "more than is left: refused"
    deltas = (
        f", delta = {show_left(left.delta - (cost.delta or 0.0))} of {show_bound(limit.delta)}"
        if limit.delta
        else ""
    )
    after = show_amount(left.epsilon - (cost.epsilon or 0.0))
    return f"epsilon = {after} of {show_amount(limit.epsilon or 0.0)}{deltas}"
