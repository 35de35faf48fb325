"""What is wrong with a study, in words; and whether a contribution or a release fits it."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from consilience.aggregators.members import DISJOINT, DISJOINT_BEFORE
from consilience.aggregators.registry import AGGREGATORS
from consilience.blind.masked import MaskedFile
from consilience.errors import ConsilienceError, ContributionRejected, SettingsError
from consilience.files.contribution import Contribution, keeps_to_bounds, take_apart, to_plain
from consilience.files.release import Release, Source, joint_guarantee
from consilience.files.sealed import canonical, parse_facts
from consilience.learners.base import spell_out
from consilience.learners.inputs import MAY_ASSUME
from consilience.learners.registry import LEARNERS, find_kind
from consilience.learners.scored import SHARE, can_be_scored
from consilience.privacy.accounting import Event, SharedSum, events_from_json, total
from consilience.privacy.guarantee import Guarantee, Neighbours, compose_disjoint
from consilience.protocol import DIGEST, STUDY_NAME, is_site_name
from consilience.study.branches import rule_problems, source_checks
from consilience.study.toml import HUBS, RELATIONS, TOTAL, VERSION
from consilience.text import collapse, printable, quote

if TYPE_CHECKING:
    from consilience.blind.roster import Rule
    from consilience.learners.base import PrivateLearner
    from consilience.study.study import Study

TO_FILL_IN = "FILL IN"  # what `study new` leaves to people
MOST_PURPOSE = 10_000  # characters
MOST_PROBLEM, MOST_LISTED = 1000, 20  # characters of a problem, and problems in an error
# What is within these can be trained with a few gigabytes of memory, and its files be written.
MOST_NAME = 100  # characters of a column or class
MOST_CLASSES = 500  # a softmax of so many takes 1.5 GB
MOST_NUMBERS = 1 << 24  # of one model, half of what a file may hold
MOST_STUDY = 1 << 20  # a quarter of the facts of a file, which repeat parts of it
# No file of a site or hub has such a name, so a public file beside them replaces none.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}\.(csv|csv\.gz|parquet|pq)")
MOST_PLANNED = 100  # records of a person that are planned for quickly
PLANNED_SIZES = (100, 10_000)  # of sites for which a study must be trainable
# The study, its schema or its privacy part decide these; [learner] and [aggregator] may not.
DECIDED_FOR_LEARNERS = frozenset(
    "epsilon delta neighbours unit records_per_person noise "
    "classes data_norm label_bound schema projection".split()
)
DECIDED_FOR_AGGREGATORS = frozenset(("noise", "classes"))

Check = tuple[bool, str]  # whether it is fulfilled, and the problem if it is not


class StudyRefused(SettingsError):
    """A study that is not valid; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(
            f"The study is not valid: {list_problems(problems)}. Nothing was done. Correct it and "
            "check it again."
        )
        self.problems = list(problems)


def list_problems(problems: Sequence[str]) -> str:
    """Return problems in one line: they repeat what the study's authors wrote, however long."""
    listed = [_shorten(collapse(problem[: 2 * MOST_PROBLEM])) for problem in problems[:MOST_LISTED]]
    more = len(problems) - len(listed)
    return "; ".join([*listed, f"and {more:,} more"] if more else listed)


def _shorten(problem: str) -> str:
    return problem.rstrip(".") if len(problem) <= MOST_PROBLEM else f"{problem[:MOST_PROBLEM]} […]"


# ------------------------------------------------------------------ a study


def find_problems(study: Study) -> list[str]:
    """Return every problem of a study in words; an empty list if it is valid.

    Later questions assume that earlier ones have good answers: whether an aggregator can combine
    the learner is asked only once both are known.
    """
    texts = (study.name, study.purpose, study.learner, study.aggregator)
    if not all(isinstance(text, str) for text in (*texts, study.neighbours, study.hub)):
        return ["name, purpose, learner, aggregator, neighbours and hub must be text"]
    problems = _failed(
        (
            *_name_checks(study),
            *_version_checks(study),
            *_file_checks(study),
            *_privacy_checks(study),
            *_blind_checks(study),
            *_method_checks(study),
            *_site_checks(study),
            *rule_problems(study),
        )
    )
    # A schema that could not be read is None; its problems were reported on reading.
    if problems or study.schema is None:
        return problems
    problems = _failed((*_limit_checks(study), *_projection_checks(study), *_tuning_checks(study)))
    if problems:
        return problems
    problems = [problem for choice in study.choices for problem in _learner_problems(choice)]
    return problems + _text_problems(study) + _aggregator_problems(study)


def _failed(checks: Iterable[Check]) -> list[str]:
    return [problem for fulfilled, problem in checks if not fulfilled]


def _name_checks(study: Study) -> Iterable[Check]:
    yield (
        bool(STUDY_NAME.fullmatch(study.name)),
        f"the name {study.name!r} must be 2 to 64 lower-case letters, digits and hyphens",
    )
    yield (
        len(study.purpose) <= MOST_PURPOSE,
        f"the purpose is longer than {MOST_PURPOSE:,} characters",
    )
    yield (
        TO_FILL_IN not in study.purpose,
        "the purpose is still to be filled in: the people who approve the study will read it",
    )


def _version_checks(study: Study) -> Iterable[Check]:
    known = type(study.version) is int and 1 <= study.version <= VERSION
    yield known, f"version={study.version!r} must be a whole number from 1 to {VERSION}"


def _file_checks(study: Study) -> Iterable[Check]:
    for part in study.files:
        yield (
            bool(FILE_NAME.fullmatch(part.file)),
            f"the file {part.file[:100]!r} must be named by letters, digits, spaces and ._-, and "
            "end with .csv, .csv.gz, .parquet or .pq",
        )
    digests = {part.file.casefold(): part.sha256 for part in study.files}
    yield (
        all(digests[part.file.casefold()] == part.sha256 for part in study.files),
        "[public] and [test] name one file with two digests",
    )


def _privacy_checks(study: Study) -> Iterable[Check]:
    low, high = study.epsilon_range
    yield (
        all(type(e) in (int, float) and 0 < e < math.inf for e in (low, high)) and low <= high,
        f"epsilon_min={low!r} and epsilon_max={high!r} must be numbers above 0 in that order",
    )
    yield (
        type(study.delta) in (int, float) and 0 <= study.delta < 1,
        f"delta={study.delta!r} must lie in [0, 1)",
    )
    yield (
        type(study.min_sites) is int and study.min_sites >= 1,
        f"min_sites={study.min_sites!r} must be a whole number of at least 1",
    )
    yield (
        type(study.max_size) is int and study.max_size >= 1,
        f"max_size={study.max_size!r} must be a whole number of at least 1",
    )
    yield (
        type(study.max_weight) in (int, float) and 0 < study.max_weight <= 1,
        f"max_weight={study.max_weight!r} must be a number in (0, 1]",
    )
    yield (
        type(study.withhold_far) is bool,
        f"withhold_far={study.withhold_far!r} must be true or false",
    )
    yield study.hub in HUBS, f"hub={study.hub!r} must be one of {HUBS}"
    yield (
        study.neighbours in RELATIONS,
        f"neighbours={study.neighbours!r} must be one of {RELATIONS}",
    )


def _blind_checks(study: Study) -> Iterable[Check]:
    """Yield whether noise can be shared, and sums be hidden, as a blind hub needs it."""
    rule = study.blind
    yield (
        rule is not None or not study.is_blind,
        'hub = "blind" needs a part [blind] with shares, spare and keyholders',
    )
    yield (
        rule is None or study.is_blind,
        'a part [blind] is for studies with hub = "blind" in [privacy]',
    )
    if rule is None or not study.is_blind:
        return
    yield (
        study.aggregator == TOTAL and not (study.aggregator_settings or study.alternatives),
        'hub = "blind" adds up sums that nobody sees one by one: name a [statistic] in place of '
        "[learner] and [aggregator]",
    )
    yield (
        type(study.delta) in (int, float) and study.delta > 0,
        'hub = "blind" needs delta > 0: the noise that sites share is Gaussian',
    )
    yield (
        type(study.min_sites) is int and study.min_sites >= rule.least,
        f"min_sites={study.min_sites!r} is below shares + spare = {rule.least}, and no smaller "
        "batch is ever opened",
    )
    yield (
        study.max_weight == 1.0 and study.withhold_far is False,
        'max_weight and withhold_far need the sums of single sites, which hub = "blind" never '
        "sees: leave them out",
    )


def _method_checks(study: Study) -> Iterable[Check]:
    yield (
        study.learner not in study.alternatives,
        f"[alternatives] names {quote(study.learner, 100)}, which is the [learner] itself",
    )
    kinds: tuple[tuple[str, str, Mapping[str, type], Mapping[str, Any], frozenset[str]], ...] = (
        *(
            ("learner", name, LEARNERS, settings, DECIDED_FOR_LEARNERS)
            for name, settings in study.learners.items()
        ),
        (
            "aggregator",
            study.aggregator,
            AGGREGATORS,
            study.aggregator_settings,
            DECIDED_FOR_AGGREGATORS,
        ),
    )
    for part, name, registered, settings, decided in kinds:
        known = tuple(registered)
        yield name in known, f"the {part} {quote(name, 100)} is none of {', '.join(known)}"
        decided = decided | getattr(registered.get(name), "study_decides", frozenset())
        twice = ", ".join(sorted(decided & set(settings)))
        yield not twice, f"[{part}] may not set {twice}: other parts of the study decide that"
        # Asked here, and not of Python, whose own errors repeat a name as if it were our word.
        has = set(inspect.signature(registered[name]).parameters) if name in known else settings
        if part == "learner" and name in known and can_be_scored(LEARNERS[name]):
            has = {*has, SHARE}
        for setting in settings:
            yield setting in has, f"[{part}] {name} has no setting {quote(setting, 100)}"


def _site_checks(study: Study) -> Iterable[Check]:
    """Yield whether a site can weigh the members, if the study names one."""
    if study.at is None:
        return
    yield (
        isinstance(study.at, str) and is_site_name(study.at),
        "[aggregator] at must be the name of a site",
    )
    yield (
        study.hub == "untrusted" and study.neighbours == "replace-one" and study.public is None,
        '[aggregator] at needs hub = "untrusted", neighbours = "replace-one" and no [public] part',
    )
    one = study.max_weight == 1.0 and not study.alternatives
    yield one, "[aggregator] at goes with neither max_weight nor [alternatives]"


def _limit_checks(study: Study) -> Iterable[Check]:
    """Yield whether files of the study can be written and read, and its pages shown.

    What is too large for a file must be refused before anybody is charged for it.
    """
    schema, classes = study.schema, study.schema.classes or ()
    for name in schema.table_columns:
        shown = len(name) <= MOST_NAME and name == printable(name)
        yield (
            shown,
            f"the column {quote(name, 50)} must have at most {MOST_NAME} visible characters",
        )
    yield (
        all(len(str(label)) <= MOST_NAME for label in classes),
        f"a class has a name of more than {MOST_NAME} characters",
    )
    yield len(classes) <= MOST_CLASSES, f"there are more than {MOST_CLASSES:,} classes"


def _projection_checks(study: Study) -> Iterable[Check]:
    """Yield whether sites can train along axes, and others check that they did."""
    projection = study.projection
    if projection is None:
        return
    unfit = [name for name in study.learners if not LEARNERS[name].is_linear]
    yield (
        not unfit,
        "[projection] is for linear learners, whose coefficients can be mapped back into the "
        f"schema's columns, and {', '.join(unfit)} has none: leave it out",
    )
    yield (
        not study.trusted,
        '[projection] is not for hub = "trusted", whose noise hides exact models of all columns: '
        "leave it out",
    )
    yield (
        study.at is None,
        "[projection] is not for studies whose members a site weighs, which hands over no model: "
        "leave it out",
    )
    yield (
        not study.branches,
        "[projection] is not for studies whose members are releases, which are trained already: "
        "leave it out",
    )
    public = None if study.public is None else study.public.sha256
    reason = projection.problem_with(study.schema.n_features, public)
    yield reason is None, f"[projection]: {reason}"


def _tuning_checks(study: Study) -> Iterable[Check]:
    """Yield whether sites can choose settings on their own records, and others check it."""
    tuning = study.tuning
    if tuning is None:
        return
    yield (
        study.hub == "untrusted",
        f'[tuning] is not for hub = "{study.hub}", which is handed exact models or masked sums: a '
        "choice would be exact, or nobody could check it. Leave it out",
    )
    yield (
        study.at is None and not study.branches and not study.alternatives,
        "[tuning] is for studies in which every site trains the one [learner]: drop "
        "[alternatives], [branches] and [aggregator] at, or leave it out",
    )
    yield (
        SHARE not in study.learner_settings,
        f"[tuning] goes with no {SHARE}: a score of all records would be beside a model of a part. "
        "Leave one of them out",
    )
    yield (
        study.projection is None or study.projection.cost(1.0, 0.0) is None,
        "[tuning] goes with axes that all know, and these are each site's own: leave one of them "
        "out",
    )
    twice = ", ".join(sorted(set(tuning.values) & set(study.learner_settings)))
    yield not twice, f"[learner] and [tuning] both set {quote(twice, 100)}: leave it to one of them"
    reason = tuning.problem_with(LEARNERS[study.learner])
    yield reason is None, f"[tuning]: {reason}"


def _learner_problems(study: Study) -> list[str]:
    """Ask the learner whether it can be trained with the study's schema and settings."""
    if LEARNERS[study.learner].predicts_number == (study.schema.classes is not None):
        label = "a number" if study.schema.classes is None else "a class"
        return [f"{study.learner} cannot predict the schema's label, which is {label}"]
    try:
        learner = _build_least(study)
        learner.check_settings()
        reason = learner.unchecked()
        n_numbers = learner.n_released(len(study.schema.classes or ()))
    except Exception as problem:  # whatever settings of others raise is their study's problem
        return [f"[learner]: {_describe(problem)}"]
    if n_numbers > MOST_NUMBERS:
        return [f"[learner]: a model of {n_numbers:,} numbers is too large for a file"]
    labelled = study.public is not None and study.public.labelled
    if learner.needs_labels and not labelled:
        return [f"{study.learner} needs labelled public records: add a [public] part"]
    if reason is not None:
        return [f"[learner]: {reason}"]
    try:
        for epsilon, size in itertools.product(study.epsilon_range, PLANNED_SIZES):
            plan_quickly(study, epsilon, size)
    except Exception as problem:
        return [f"[learner]: no training can be planned with these settings. {_describe(problem)}"]
    return []


def _text_problems(study: Study) -> list[str]:
    """Ask whether everyone who is sent the study can read it."""
    try:
        text = canonical(study.to_dict())
        parse_facts(text)
    except (ValueError, ContributionRejected):
        return ["a setting is a number that is not finite or too large, or has too many parts"]
    if len(text) > MOST_STUDY:
        return [f"it has more than {MOST_STUDY:,} characters, too many for a file"]
    return []


def _describe(problem: Exception) -> str:
    """Say what is wrong with settings, in words of this package only."""
    ours = isinstance(problem, ConsilienceError)
    return str(problem) if ours else "a setting has a value of a kind that it cannot have"


def _build_least(study: Study) -> PrivateLearner[Any, Any]:
    """Return the learner of a site that chooses the least epsilon, as far as that is public."""
    return build_for(study, study.epsilon_range[0])


def build_for(study: Study, epsilon: float) -> PrivateLearner[Any, Any]:
    """Return the learner of a site that chooses this epsilon, as far as that is public."""
    learner: Any = study.build(epsilon)
    learner.n_features_in_ = study.schema.n_features
    if study.schema.classes is not None:
        learner.classes_ = np.asarray(study.schema.classes)
    return cast("PrivateLearner[Any, Any]", learner)


def _possible(study: Study, epsilon: float) -> Sequence[PrivateLearner[Any, Any]]:
    """Return the learners that files of sites may state that choose this epsilon."""
    return build_for(study, epsilon).possible()


def plan_quickly(study: Study, epsilon: float, size: int) -> Sequence[Event]:
    """Return what a training would draw if no person had more than a few records.

    Settings that cannot work do not work with few records either, and a plan for thousands of them
    can take a quarter of a minute, whenever somebody reads the study.
    """
    learner: Any = build_for(study, epsilon)
    if study.schema.max_records_per_person is not None:
        few = min(study.schema.max_records_per_person, MOST_PLANNED)
        learner.records_per_person = few
    planned: Sequence[Event] = learner.planned(min(size, study.max_size))
    return planned


def _aggregator_problems(study: Study) -> list[str]:
    """Ask the aggregator whether it can combine what the sites of this study hand over."""
    try:
        aggregator = study.build_aggregator()
        aggregator.check_settings()
        reasons = [
            aggregator.problem_with(find_kind(name, settings), settings)
            for name, settings in study.learners.items()
        ]
    except Exception as problem:
        return [f"[aggregator]: {_describe(problem)}"]
    name, public = study.aggregator, study.public
    epsilon = study.aggregator_settings.get("epsilon")
    return _failed(
        (
            (
                study.trusted or not aggregator.needs_exact_members,
                f'{name} adds the noise itself and needs hub = "trusted"',
            ),
            (
                not study.trusted or aggregator.draws_noise,
                f'hub = "trusted" hands exact models to the hub, and {name} with these settings '
                "draws no noise: its releases would protect nothing. Set its epsilon, choose an "
                'aggregator that draws noise, or leave out hub = "trusted"',
            ),
            (
                public is not None or study.at is not None or not aggregator.needs_public,
                f"{name} needs public records: add a [public] part",
            ),
            (
                public is None or public.labelled or not aggregator.needs_labels,
                f"{name} needs labelled public records",
            ),
            (
                not aggregator.weighs_accuracy
                or (public is not None and public.labelled)
                or all(SHARE in settings for settings in study.learners.values()),
                f"{name} with these weights needs accuracies: add labelled public records as "
                f"[public], or {SHARE} = 0.1 to each learner, which lets sites pay for a score of "
                "their own models",
            ),
            (
                not study.branches or aggregator.takes_branches,
                f"{name} with these settings cannot weigh a branch, whose noise is not known: use "
                'Average with weights = "size" or "equal" for [branches]',
            ),
            (
                epsilon is None or aggregator.draws_noise,
                f"[aggregator] epsilon={epsilon!r} draws no noise: choose a finite one, or none",
            ),
            *((reason is None, str(reason)) for reason in reasons),
            (
                aggregator.combines_kinds or not study.alternatives,
                f"{name} combines models of one kind: leave out [alternatives], or choose "
                "WeightedVote or a distillation",
            ),
        )
    )


# ------------------------------------------------------------------ a contribution


def check_contribution(study: Study, contribution: Contribution) -> Contribution:
    """Return a contribution that fits the study, or say why it does not fit."""
    for fulfilled, problem in _contribution_checks(study, contribution):
        if not fulfilled:
            raise ContributionRejected(
                f"The contribution of {contribution.site!r} does not fit study {study.name!r}: "
                f"{problem}. It was not accepted. Train again with the study's own file."
            )
    return contribution


def _contribution_checks(study: Study, contribution: Contribution) -> Iterable[Check]:
    """Yield the checks one by one: a later one may rely on the ones before it."""
    yield (
        contribution.study == study.reference,
        "it was made for another study, or another version of this one",
    )
    yield (
        contribution.is_masked == study.is_blind,
        "the hub is blind, and its numbers are not masked"
        if study.is_blind
        else "its numbers are masked, and the study's hub is not blind",
    )
    if study.blind is not None:
        yield from _masked_checks(study, study.blind, contribution)
    yield (
        bool(contribution.weighs) == (contribution.site == study.at),
        "it weighs the members of others, and the study names another site for that"
        if contribution.weighs
        else "the study names its site to weigh the members of others, and it is a model",
    )
    if contribution.weighs:
        yield from _weigher_checks(study, contribution)
    else:
        yield from _learner_checks(study, contribution.learner, contribution.sealed.facts)
    if study.trusted:
        yield (
            contribution.is_hidden_by_digest,
            "its digest, which a release states, would confirm a guess of the exact model: it "
            "was made by an earlier version, without a nonce",
        )
    else:
        charged = contribution.sealed.facts.get("receipt") is not None
        if contribution.has_records:
            yield charged, "no ledger was charged for it"
        else:
            yield not charged, "it holds noise only, and states a charge"


def _weigher_checks(study: Study, contribution: Contribution) -> Iterable[Check]:
    """Yield whether the aggregation site learned these weights as the study says."""
    learner, facts = contribution.learner, contribution.sealed.facts
    low, high = study.epsilon_range
    yield low <= learner.epsilon <= high, f"its epsilon is not between {low:.15g} and {high:.15g}"
    agreed = study.build_weigher(learner.epsilon)
    stated = {name: to_plain(value) for name, value in agreed.stated_settings().items()}
    yield (
        type(learner).__name__ == type(agreed).__name__
        and spell_out(stated) == spell_out(learner.read_settings(facts["settings"])),
        "its weights were learned with other settings",
    )
    classes = study.schema.classes
    outputs = 1 if classes is None or len(classes) == 2 else len(classes)
    yield (
        facts["n_features"] == len(contribution.weighs) * outputs,
        "it has another number of weights than of members",
    )
    if classes is not None:
        yield _same(learner.classes_.tolist(), list(classes)), "it has other classes"
    yield (
        facts["size"] is not None and facts["size"] <= study.max_size,
        f"it states more records than the {study.max_size:,} that the study allows",
    )
    guarantee = learner.guarantee_
    yield (
        guarantee.epsilon <= high * (1 + 1e-9) and guarantee.delta <= study.delta,
        "it promises less than agreed",
    )


def _masked_checks(study: Study, rule: Rule, contribution: Contribution) -> Iterable[Check]:
    """Yield whether a masked file shares the noise that the study agreed on.

    Its roster and its site's place on it are checked against the roster itself, by whoever has it.
    """
    file = MaskedFile.of(contribution.sealed)
    blind, sharing = file.facts["blind"], _build_least(study).sharing
    yield (
        (blind["shares"], blind["spare"]) == (rule.shares, rule.spare),
        "its share of the noise is not what the study says",
    )
    yield (
        set(rule.keyholders) < set(blind["seeds"])
        and len(blind["seeds"]) == len(rule.keyholders) + 1,
        "its seeds are not for the keyholders of the study and one hub",
    )
    yield (
        len(file.counts()) >= rule.least,
        f"its site counts on fewer sites than the {rule.least} that a batch needs",
    )
    own = contribution.learner.sharing
    yield (
        spell_out(replace(own, only_noise=False)) == spell_out(sharing),  # as totals compare it
        "its noise is shared in another way than the study says",
    )
    (event,) = contribution.events
    assert isinstance(event, SharedSum)
    yield (
        event.honest == event.shares == rule.shares,
        "its guarantee counts on another number of sites than the study says",
    )


def _learner_checks(study: Study, learner: Any, facts: Mapping[str, Any]) -> Iterable[Check]:
    """Yield whether a site that follows the study trained this, in a contribution or a release."""
    kind = type(learner).__name__
    yield kind in study.learners, "its learner is not one that the study names"
    agreed, stated = study.choose(kind), dict(learner.read_settings(facts["settings"]))
    if not study.trusted:  # each site chooses its own
        own = stated.pop("epsilon", None)
        yield spell_out(own) == spell_out(learner.epsilon), "its learner has other settings"
    yield spell_out(stated) in agreed.spelled_settings, "its learner has other settings"
    yield (
        _same(*(None if one is None else one.as_dict() for one in (study.tuning, learner.tuning))),
        "its settings were chosen among other candidates than the study's, or among none",
    )
    yield (
        learner.n_features_in_ == study.schema.n_features,
        "it has another number of features",
    )
    yield from _axes_checks(study, learner)
    if study.schema.classes is not None:
        classes = learner.classes_.tolist()
        yield _same(classes, list(study.schema.classes)), "it has other classes"
    most = study.max_size if study.tuning is None else study.tuning.part_of(study.max_size)
    yield (
        (facts["size"] or 0) <= most,
        f"it states more records than the {most:,} that the study allows",
    )
    yield (
        learner.fits_size(most),
        "its numbers are larger than its records, or as many as the study allows, and noise make",
    )
    guarantee = learner.guarantee_
    if study.trusted:
        yield math.isinf(guarantee.epsilon), "the hub is trusted, and it is not exact"
        return
    low, high = study.epsilon_range
    within = low * (1 - 1e-9) <= learner.total_epsilon <= high * (1 + 1e-9)
    yield within, f"its epsilon is not between {low:.15g} and {high:.15g}"
    yield (
        guarantee.epsilon <= high * (1 + 1e-9) and guarantee.delta <= study.delta,
        "it promises less than agreed",
    )
    if study.neighbours == "add-remove" and learner.is_linear:
        yield (
            facts["size"] == agreed.possible_settings[0]["public_size"],
            "it carries a number of records, which is not public",
        )


def _axes_checks(study: Study, learner: PrivateLearner[Any, Any]) -> Iterable[Check]:
    """Yield whether a model was trained along the study's axes, as far as it shows."""
    agreed, own = study.projection, learner.projection
    yield (
        _same(*(None if one is None else one.stated() for one in (agreed, own))),
        "it was trained along other axes than the study's, or along none",
    )
    if agreed is not None:
        yield (
            agreed.span(np.asarray(getattr(learner, "coef_", ()))),
            "its coefficients do not lie along the study's axes",
        )


# ------------------------------------------------------------------ a release


# Relative. Earlier versions read an epsilon off a profile without rounding it up: theirs are lower
# by up to 6.6e-7. Those of this version are within 1.1e-10 of the epsilon that was asked for.
ROUNDED = 1e-6
SHOWN = 1e-5  # relative: what is left of a number that is shown with six digits


def check_release(study: Study, release: Release) -> Release:
    """Return a release that the study's hub can have made of what it agreed to, or say why not."""
    for fulfilled, problem in _release_checks(study, release):
        if not fulfilled:
            raise ContributionRejected(
                f"Release {release.sequence} does not fit study {study.name!r}: {problem}. It was "
                "not kept. Ask the hub's operator."
            )
    return release


def _release_checks(study: Study, release: Release) -> Iterable[Check]:
    """Yield the checks one by one: a later one may rely on the ones before it."""
    facts, sources, classes = release.sealed.facts, release.sources, study.schema.classes
    yield (
        release.study == study.reference,
        "it belongs to another study, or to another version of this one",
    )
    aggregator = {"name": study.aggregator, **study.aggregator_settings}
    agreed = {name: to_plain(value) for name, value in aggregator.items()}
    yield (
        _same(facts["aggregator"], agreed),
        "another aggregator made it, or one with other settings",
    )
    yield facts["n_features"] == study.schema.n_features, "it has another number of features"
    yield (
        _same(facts["classes"], None if classes is None else list(classes)),
        "it has other classes",
    )
    yield not facts["quality"] or study.test is not None, "it states errors on no test records"
    yield (
        len(sources) >= study.min_sites,
        f"it is made of {len(sources)} contributions, and at least {study.min_sites} are needed",
    )
    yield (
        study.at is None or sources[-1].site == study.at,
        "the site that the study names to weigh the members is not the last of its sources",
    )
    # A site may have lent its noise to batches without its records, of which nothing is released.
    held = [one for one in sources if not (study.is_blind and one.guarantee.epsilon == 0)]
    yield (
        len({source.site for source in held}) == len(held)
        and len({source.digest for source in sources}) == len(sources),
        "a site or contribution is in it twice",
    )
    yield from source_checks(study, sources)
    for source in sources:
        # A name that has not the form of one is not repeated.
        yield (
            is_site_name(source.site) and bool(DIGEST.fullmatch(source.digest)),
            "a site or contribution in it has a name that cannot be one",
        )
        yield (
            bool(source.below) or _is_possible(study, source),
            f"the guarantee that it states for {source.site!r} is none of this study",
        )
        yield (
            _is_reason(study, source),
            f"what it states of the weight of {source.site!r} does not fit",
        )
    if release.total is not None:
        yield study.is_blind, "it carries an opened total, and the study's hub is not blind"
        n_numbers = _build_least(study).n_released(len(classes or ()))
        yield release.total.words.shape == (n_numbers,), "its total has another length"
    yield from _release_guarantee_checks(study, release)
    yield from _ensemble_checks(study, release)


def _same(one: object, other: object) -> bool:
    """Tell whether plain values are the same, and of the same types: true is not 1."""
    return canonical(one) == canonical(other)


def _is_reason(study: Study, source: Source) -> bool:
    """Tell whether what is said about a weight can be said of this source."""
    if source.reason is None:
        return True
    if source.below:
        return False
    *size, privacy = source.reason.split(", ")
    if size != ([] if source.size is None else f"n = {source.size:,}".split(", ")):
        return False
    if study.trusted or privacy == "exact":
        return study.trusted and privacy == "exact"
    stated = float(privacy.removeprefix("epsilon = "))
    low, high = _least_epsilon(study, source), min(study.epsilon_range[1], source.guarantee.epsilon)
    return low * (1 - SHOWN) <= stated <= high * (1 + SHOWN)


def _ensemble_checks(study: Study, release: Release) -> Iterable[Check]:
    """Yield whether the study's aggregator can have made this ensemble of learners of the study."""
    ensemble, aggregator = release.ensemble, study.build_aggregator()
    yield (
        aggregator.may_make(
            ensemble,
            [build_for(study, epsilon) for epsilon in study.epsilon_range],
            [source.size for source in release.sources],
        ),
        f"{study.aggregator} does not make such a model in this study",
    )
    yield (
        aggregator.may_weigh(ensemble.weights),
        f"{study.aggregator} does not give its members such weights in this study",
    )
    # With several kinds of learner an ensemble states no settings of one.
    expected = {} if study.alternatives else study.expected_settings
    parts, _ = ensemble.to_parts(take_apart)
    for name, value in parts.items():
        if name in expected or hasattr(aggregator, name):
            agreed = expected[name] if name in expected else to_plain(getattr(aggregator, name))
            yield _same(value, agreed), f"it has other {name} than the study"
    for source, learner in zip(release.sources, ensemble.members, strict=False):
        facts, tensors = take_apart(learner)
        for fulfilled, problem in _learner_checks(study, learner, facts):
            yield fulfilled, f"in the model of {source.site!r}: {problem}"
        yield (
            facts["size"] == source.size and learner.guarantee_.epsilon <= source.guarantee.epsilon,
            f"it states another size or guarantee for {source.site!r} than that site's model does",
        )
        yield (
            keeps_to_bounds(facts, tensors),
            f"numbers of the model of {source.site!r} are larger than its noise allows",
        )
    if aggregator.stays_within_members:
        sizes = [None if source.below else source.size for source in release.sources]
        longest = _longest_release(study, sizes)
        yield (
            all(
                np.abs(tensor).max() <= longest[name]
                for name, tensor in release.sealed.tensors.items()
            ),
            "its numbers are larger than the settings, the sizes and the noise allow",
        )


def _longest_release(study: Study, sizes: Sequence[int | None]) -> Mapping[str, float]:
    """Return bounds on the numbers of all contributions of such sizes, by the name of the array."""
    longest: dict[str, float] = defaultdict(lambda: math.inf)
    found = sorted(size for size in sizes if size is not None)
    if not found or len(found) < len(sizes):
        return longest
    ends = itertools.product(study.choices, (found[0], found[-1]), study.epsilon_range)
    every = ((one, size) for choice, size, epsilon in ends for one in _possible(choice, epsilon))
    for learner, size in every:
        vars(learner)["public_size_"] = size
        implied = learner.implied({})
        for name, bound in ({} if implied is None else implied.bounds).items():
            # Twice, for the sizes and epsilons in between.
            longest[name] = max(longest.get(name, 0.0), 2 * bound.norm)
    return longest


def _release_guarantee_checks(study: Study, release: Release) -> Iterable[Check]:
    """Yield what the release itself may promise; without noise of its own, reading checks that."""
    events, joint = (
        events_from_json(release.sealed.facts["events"]),
        joint_guarantee(release.sources),
    )
    may_assume = {DISJOINT, DISJOINT_BEFORE, *joint.assumptions}
    if events:
        may_assume |= set(study.build_aggregator().assumed())
    yield (
        set(release.guarantee.assumptions) <= may_assume,
        "its guarantee makes an assumption that no release of this study makes",
    )
    yield (
        bool(events) == study.draws_noise,
        "it draws noise where the study draws none, or none where the study draws some",
    )
    guarantee = release.guarantee
    hides = (guarantee.unit, guarantee.neighbours)
    yield hides == study.hidden, "it hides something else than agreed"
    if not events:
        return
    noise, aggregator = total(events), study.build_aggregator()
    too_much, too_little = (
        "it promises more than its noise can keep",
        "it promises less than agreed",
    )
    yield (noise.unit, noise.neighbours) == hides, too_much
    # The aggregator takes one epsilon or, of some kinds, one for each member.
    agreed = replace(
        noise,
        epsilon=float(np.max(getattr(aggregator, "epsilon", math.inf))),
        delta=float(getattr(aggregator, "delta", 0.0)),
    )
    yield is_at_most(noise, agreed), too_little
    if not study.trusted:  # the noise is for other records: the sites' keep what they paid for
        noise, agreed = (
            compose_disjoint(joint, each, assumption=DISJOINT) for each in (noise, agreed)
        )
    yield is_at_most(noise, guarantee), too_much
    yield is_at_most(guarantee, agreed), too_little


def is_at_most(one: Guarantee, other: Guarantee) -> bool:
    """Tell whether a guarantee promises no less than another, up to rounding."""
    within = 1 + ROUNDED
    return one.epsilon <= other.epsilon * within and one.delta <= other.delta * within


def _is_possible(study: Study, source: Source) -> bool:
    """Tell whether a site that took part in the study can have got this guarantee.

    Its number counts the contributions that the site made, and each has an epsilon in the range.
    """
    guarantee, n_most, high = source.guarantee, source.sequence, study.epsilon_range[1]
    possible = (
        guarantee.unit == study.unit
        and guarantee.neighbours == Neighbours(study.neighbours)
        and guarantee.holds
        and set(guarantee.assumptions) <= _may_assume(study)
        and 1 <= n_most < 2**53
        and (source.size is None or 1 <= source.size <= study.max_size)
    )
    if study.is_blind and guarantee.epsilon == 0:  # a share of noise, and no record
        return possible and guarantee.delta == 0 and source.size is None
    if study.trusted:
        return possible and math.isinf(guarantee.epsilon) and guarantee.delta == 0
    return (
        possible
        and _least_epsilon(study, source) * (1 - ROUNDED) <= guarantee.epsilon
        and guarantee.epsilon <= n_most * high * (1 + ROUNDED)
        and guarantee.delta <= n_most * study.delta * (1 + ROUNDED)
    )


def _least_epsilon(study: Study, source: Source) -> float:
    """Return what a contribution of the source's size costs at the study's lowest epsilon.

    A fit costs more the more epsilon it is asked for, and further contributions add to it.
    """
    return min(_build_least(choice).cost(source.size) for choice in study.choices)


def _may_assume(study: Study) -> set[str]:
    """Return what the guarantee of a site can assume, whichever learner it trained."""
    own = (_build_least(choice).assumed() for choice in study.choices)
    return {*MAY_ASSUME, *itertools.chain.from_iterable(own)}
