"""A study: what all sites of a collaboration agree on, and what they do with it.

One TOML file says what is learned, from which columns, how, and what is promised. `Study.train`
makes a site's contribution and `Study.combine` a release; sites and hub both use them. A study is
data: sending one cannot make a site run anything. Its digest identifies it, so that sites and hub
cannot mean different things by one name.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict, Unpack

import numpy as np

from consilience.aggregators.base import Aggregator
from consilience.aggregators.registry import AGGREGATORS
from consilience.blind.masked import Masking
from consilience.blind.pads import Words
from consilience.blind.roster import Rule
from consilience.errors import (
    ConsilienceError,
    PrivacyLeakWarning,
    SchemaMismatch,
    SettingsError,
)
from consilience.files.contribution import Contribution, to_plain
from consilience.files.release import Release
from consilience.files.sealed import SigningKey, canonical
from consilience.learners.axes import Projection
from consilience.learners.base import PrivateLearner, spell_out
from consilience.learners.registry import LEARNERS, find_kind
from consilience.learners.tuned import Tuning, tuned
from consilience.privacy.guarantee import Budget, Neighbours, Unit, count_is_public
from consilience.privacy.ledger import Ledger
from consilience.privacy.spending import Spending
from consilience.statistics.base import Sharing, Statistic
from consilience.study import toml
from consilience.study.axes import find_axes_problem
from consilience.study.branches import Part
from consilience.study.check import (
    PLANNED_SIZES,
    StudyRefused,
    build_for,
    check_contribution,
    find_problems,
    list_problems,
    plan_quickly,
)
from consilience.study.collect import Publication, collect
from consilience.study.records import PublicFile
from consilience.tables.public import Public
from consilience.tables.schema import Schema
from consilience.text import quote

Settings = Mapping[str, Any]
STEPS = 256  # that sites scale their records by if a blind study lets them choose an epsilon


class Sender(TypedDict):
    """Who trains a contribution.

    ``site`` is the site's name and ``signing`` its key. ``dataset`` is charged in the ledger.
    ``sequence`` numbers the site's contributions to the study. A retry with the same ``key``
    returns the first result and charges nothing.
    """

    site: str
    signing: SigningKey
    dataset: str
    sequence: NotRequired[int]
    key: NotRequired[str | None]


class Masker(TypedDict):
    """Who masks a sum: the site's name and its key, and the number of its contribution."""

    site: str
    signing: SigningKey
    sequence: NotRequired[int]


@dataclass(frozen=True)
class Study:
    """What all sites of one collaboration agreed on.

    Parameters
    ----------
    name, purpose
        A short name (lower case, digits, hyphens), and what the study is for, in words for an
        ethics board.
    schema
        The public facts of the records.
    learner, learner_settings
        What sites train, and how.
    alternatives
        Learners that a site may train instead, by name, and their settings. The aggregator must be
        one that combines models of different kinds.
    aggregator, aggregator_settings
        How the hub combines it.
    neighbours
        The relation under which everything is private: ``"replace-one"`` (the number of records is
        public) or ``"add-remove"``.
    epsilon_range, delta
        The epsilons that a site may choose from, and the common delta.
    min_sites
        The smallest number of sites in a release.
    max_size, max_weight
        The largest number of records that a site may state, and the largest weight that a member
        may have before labelled public records are used: what one wrong member can do. With fewer
        members than 1 / max_weight all weigh the same.
    hub
        ``"untrusted"``: it sees only what is private already. ``"trusted"``: sites hand it exact
        learners, and the aggregator adds the noise. ``"blind"``: sites hand it masked sums with a
        share of the noise, of which it can open totals only; `blind` says by which rule.
    public, test
        Files of public records, for aggregators that need them and for measuring releases.
    withhold_far
        Whether a release with a member that is unlike the others waits for a coordinator.
    at
        The site that learns the members' weights on private records of its own; None: the hub
        combines them. That site hands over no model.
    branches
        Studies whose releases are members of this one, by the name that each has among its sites:
        the digest of the ``study`` and the public ``key`` of its hub.
    projection
        The axes along which linear models are trained, if they are not trained on all columns.
    tuning
        Settings of the learner that each site chooses among candidates, on its own records.
    version
        Whose defaults are meant by settings of the learner that are not named: 2 are today's. A
        study file without a version means 1, the first.
    stored
        A hub or site has kept this study since some version accepted it. It can be read and shown
        even if this version would refuse it; problems are reported on training and combining.

    Examples
    --------
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> study = cs.Study("beds", schema, "PrivateLogisticRegression", "Average", (0.5, 2.0))
    >>> study.min_sites, len(study.digest)
    (2, 64)
    """

    name: str
    schema: Schema
    learner: str
    aggregator: str
    epsilon_range: tuple[float, float]
    purpose: str = ""
    learner_settings: Settings = field(default_factory=dict)
    alternatives: Mapping[str, Settings] = field(default_factory=dict)
    aggregator_settings: Settings = field(default_factory=dict)
    neighbours: str = "replace-one"
    delta: float = 0.0
    min_sites: int = 2
    max_size: int = toml.DEFAULTS["max_size"]
    max_weight: float = toml.DEFAULTS["max_weight"]
    hub: str = "untrusted"
    public: PublicFile | None = None
    test: PublicFile | None = None
    withhold_far: bool = toml.DEFAULTS["withhold_far"]
    blind: Rule | None = None
    projection: Projection | None = None
    tuning: Tuning | None = None
    version: int = toml.VERSION
    at: str | None = None
    branches: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stored: bool = field(default=False, repr=False, compare=False)
    # The study that this is one site's choice of, with one learner of several.
    _whole: Study | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stored:
            self.require_valid()

    def require_valid(self) -> None:
        """Refuse a study that has problems, with all of them."""
        if self._whole is not None:
            self._whole.require_valid()
        elif self._problems:
            raise StudyRefused(self._problems)

    @cached_property
    def _problems(self) -> list[str]:
        return find_problems(self)

    # ------------------------------------------------------------------ reading and writing

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a study file."""
        return cls.from_text(toml.read_text(path))

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Read the study of a shared folder."""
        files = sorted(folder.glob("*.toml"))
        if len(files) != 1:
            raise SettingsError(
                f"The folder {folder.name!r} must hold exactly one study (a .toml file); there "
                f"are {len(files)}. Nothing was done. Put the study file there."
            )
        return cls.load(files[0])

    @classmethod
    def from_text(cls, text: str, *, stored: bool = False) -> Self:
        """Read a study from TOML; an unknown setting is an error, never ignored."""
        arguments, problems = toml.parse(text)
        if problems:
            raise StudyRefused(problems)
        return cls(**arguments, stored=stored)

    @classmethod
    def from_dict(cls, facts: object, *, stored: bool = False) -> Self:
        """Read what `to_dict` wrote."""
        arguments, problems = toml.to_arguments(facts)
        if problems:
            raise SettingsError(
                f"These are not the facts of a study: {list_problems(problems)}. Nothing was read. "
                "Ask who sent them."
            )
        return cls(**arguments, stored=stored)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values, in the layout of the file."""
        return toml.to_facts(self)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the facts, which identifies the study; comments and layout do not matter."""
        if self._whole is not None:
            return self._whole.digest
        return hashlib.sha256(canonical(self.to_dict()).encode()).hexdigest()

    @property
    def reference(self) -> dict[str, str]:
        """Name and digest, as files carry them."""
        return {"name": self.name, "digest": self.digest}

    # ------------------------------------------------------------------ what it says

    @property
    def trusted(self) -> bool:
        """Whether sites hand the hub exact learners."""
        return self.hub == "trusted"

    @property
    def is_blind(self) -> bool:
        """Whether sites hand the hub masked sums, of which it can open totals only."""
        return self.hub == "blind"

    @property
    def files(self) -> list[PublicFile]:
        """The files of public records that it names."""
        return [part for part in (self.public, self.test) if part is not None]

    @property
    def unit(self) -> Unit:
        """What a contribution hides: a record, all records of a person, or a whole site."""
        kind = LEARNERS.get(self.learner, PrivateLearner)  # a stored study may name an unknown one
        return kind.hidden_by(self.schema, self.learner_settings)

    @cached_property
    def draws_noise(self) -> bool:
        """Whether combining draws noise: it is then charged, and done only on request."""
        return self.build_aggregator().draws_noise

    @cached_property
    def hidden(self) -> tuple[Unit, Neighbours]:
        """Whom a release hides, and under which relation: the aggregator's noise, or the sites'."""
        aggregator = self.build_aggregator()
        if not aggregator.draws_noise:
            return self.unit, Neighbours(self.neighbours)
        relation = aggregator.hidden_neighbours or Neighbours(self.neighbours)
        return aggregator.hidden_unit or self.unit, relation

    def check_limit(self, budget: Budget) -> None:
        """Refuse a limit on what releases cost that can never be charged for the study's noise."""
        unit, neighbours = self.hidden
        if not self.draws_noise:
            raise SettingsError(
                f"The aggregator of study {self.name!r} draws no noise, so its releases cost "
                "nothing more. Nothing was recorded. No limit is needed."
            )
        if (budget.unit, budget.neighbours) != (unit, neighbours):
            raise SettingsError(
                f"The noise of study {self.name!r} hides each {unit} ({neighbours}), and it was to "
                f"be limited for each {budget.unit} ({budget.neighbours}). Nothing was recorded. "
                f"Set a limit for each {unit}, as `consilience hub allow {self.name} --unit {unit}`"
                " does."
            )

    @property
    def may_state_sizes(self) -> bool:
        """Whether a release may state what sites say about their number of records or persons.

        What a private contribution says is private already. An exact one says the exact number.
        """
        unit, neighbours = self.hidden
        return not self.trusted or count_is_public(self.unit, unit=unit, neighbours=neighbours)

    @property
    def learners(self) -> Mapping[str, Settings]:
        """The learners that a site may train, by name, the default first, and their settings."""
        return {self.learner: self.learner_settings, **self.alternatives}

    def choose(self, learner: str | None = None) -> Study:
        """Return this study as a site sees it that trains this one of its learners.

        It has the digest of the whole study. None is the default.
        """
        name = self.learner if learner is None else learner
        if name not in self.learners:
            raise SettingsError(
                f"Study {self.name!r} does not let sites train {quote(name, 100)}, but "
                f"{' or '.join(self.learners)}. Nothing was trained or charged."
            )
        return self._choices[name] if self.alternatives else self

    @property
    def chosen_among(self) -> Sequence[str]:
        """The learners among which a site chose this one; none where there is no choice."""
        return [] if self._whole is None else list(self._whole.learners)

    @property
    def choices(self) -> Sequence[Study]:
        """The study as each of its learners makes it."""
        return [self.choose(name) for name in self.learners]

    @cached_property
    def _choices(self) -> Mapping[str, Study]:
        made = {
            name: replace(
                self, learner=name, learner_settings=settings, alternatives={}, stored=True
            )
            for name, settings in self.learners.items()
        }
        for choice in made.values():
            object.__setattr__(choice, "_whole", self)
        return made

    def build(self, epsilon: float) -> PrivateLearner[Any, Any]:
        """Return the learner that a site trains: an exact one if the hub is trusted."""
        kind = find_kind(self.learner, self.learner_settings)
        settings = {**(kind.trusted_settings if self.trusted else {}), **self.learner_settings}
        if self.version == 1:
            settings = kind.read_settings(self.learner_settings)
        if self.tuning is not None:
            kind, settings = tuned(kind), {**settings, "tuning": self.tuning}
        made = kind.for_schema(
            self.schema,
            epsilon=math.inf if self.trusted else float(epsilon),
            delta=0.0 if self.trusted else self.delta,
            neighbours=self.neighbours,
            **settings,
        )
        if self.projection is not None and made.is_linear:
            made.set_params(projection=self.projection)
        made.set_budget(math.inf if self.trusted else float(epsilon))
        if self.blind is not None and isinstance(made, Statistic):
            low, high = self.epsilon_range
            made.sharing = Sharing(self.blind.shares, high, 1 if low == high else STEPS)
        return made

    def build_aggregator(self) -> Aggregator:
        """Return the aggregator."""
        made = AGGREGATORS[self.aggregator].for_schema(self.schema, **self.aggregator_settings)
        made.max_weight = self.max_weight
        return made if self.at is None else made.at_site(self.schema)

    @cached_property
    def possible_settings(self) -> Sequence[Settings]:
        """What files say about the learners' settings, of each candidate where there are several.

        Only epsilon differs from site to site.
        """
        every = self.build(self.epsilon_range[0]).possible()
        return [
            {name: to_plain(value) for name, value in one.stated_settings().items()}
            for one in every
        ]

    @cached_property
    def spelled_settings(self) -> Sequence[str]:
        """The same as text, without the epsilon that each site chooses: every file is held to it.

        Where the hub is trusted no site chooses one, and it is there.
        """
        left_out = () if self.trusted else ("epsilon",)
        return [
            spell_out({name: value for name, value in each.items() if name not in left_out})
            for each in self.possible_settings
        ]

    @property
    def expected_settings(self) -> Settings:
        """What all files say about the learners' settings, whichever candidate a site chose."""
        first, chosen = self.possible_settings[0], () if self.tuning is None else self.tuning.values
        return {name: value for name, value in first.items() if name not in chosen}

    # ------------------------------------------------------------------ what is done with it

    def train(
        self,
        table: object,
        ledger: Ledger | None,
        *,
        epsilon: float,
        **sender: Unpack[Sender],
    ) -> Contribution:
        """Train on a site's table and sign the result.

        Where the study lets sites choose between learners, `choose` one first.

        Privacy
        -------
        `epsilon` per `unit`, against everyone who sees the contribution; the ledger is charged
        before any noise is drawn. Nothing is promised if the study's hub is trusted.
        """
        self.check_epsilon(epsilon)
        if self.is_blind:
            raise SettingsError(
                f"Study {self.name!r} has a blind hub, to which sites send masked sums. Nothing "
                "was trained or charged. Use mask_sum, with the roster that all have signed."
            )
        if sender["site"] == self.at:
            raise SettingsError(
                f"In study {self.name!r} this site weighs the models of the others, and hands over "
                "none of its own. Nothing was trained or charged. Use: consilience site aggregate"
            )
        learner = self.build(epsilon)
        charge: dict[str, Any] = {}
        if not self.trusted:
            if ledger is None:
                raise SettingsError(
                    "A contribution needs a ledger to charge. Nothing was trained. Pass ledger=..."
                )
            charge = {
                "ledger": ledger.within(self.digest),
                "dataset": sender["dataset"],
                "key": sender.get("key"),
            }
        whose: dict[str, Any] = {
            "study": self.reference,
            "site": sender["site"],
            "sequence": sender.get("sequence", 1),
            "key": sender["signing"],
        }
        drawn = plan_quickly(self, epsilon, PLANNED_SIZES[0])
        Contribution.rehearse(build_for(self, epsilon), drawn, **whose)
        try:
            learner.schema = self.schema
            learner.fit(table, **charge)
        except ConsilienceError:
            raise
        except ValueError as problem:  # of scikit-learn, such as a table without records
            raise _untrainable(problem) from None
        return Contribution.make(learner, trusted=self.trusted, **whose)

    def aggregate(
        self,
        table: object,
        members: Sequence[Contribution],
        ledger: Ledger,
        *,
        epsilon: float,
        **sender: Unpack[Sender],
    ) -> Contribution:
        """Learn the weights of `members` on a site's own table, and sign them.

        Privacy
        -------
        `epsilon` per record of the table, against everyone who sees the contribution; the ledger is
        charged before any noise is drawn. The members' own guarantees stay what they are.
        """
        self.check_epsilon(epsilon)
        if self.at is None or sender["site"] != self.at:
            raise SettingsError(
                f"Study {self.name!r} does not let {sender['site']!r} weigh members. Nothing was "
                "trained or charged. Ask who wrote the study for `at` in [aggregator]."
            )
        if len(members) < self.min_sites:
            raise SettingsError(
                f"Study {self.name!r} needs the models of at least {self.min_sites} sites before "
                f"they are weighed; there are {len(members)}. Nothing was trained or charged. Wait "
                "for more."
            )
        models = [self.accept(member).learner for member in members]
        aggregator, weigher = self.build_aggregator(), self.build_weigher(epsilon)
        encoded = self.schema.encode(table)
        labels = encoded.y
        if self.schema.classes is not None:
            labels = np.asarray(self.schema.classes)[encoded.y]
        rows = aggregator.weighed_rows(models, encoded.X)
        charge: dict[str, Any] = {
            "ledger": ledger.within(self.digest),
            "dataset": sender["dataset"],
            "key": sender.get("key"),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyLeakWarning)  # rows are scaled by public facts
            weigher.fit(rows, labels, **charge)
        made = Contribution.make(
            weigher,
            study=self.reference,
            site=sender["site"],
            sequence=sender.get("sequence", 1),
            key=sender["signing"],
            members=[member.digest for member in members],
        )
        return self.accept(made)

    def build_weigher(self, epsilon: float) -> PrivateLearner[Any, Any]:
        """Return what the aggregation site trains at this epsilon."""
        return self.build_aggregator().weigher(float(epsilon), self.delta)

    def mask_sum(
        self,
        table: object,
        spending: Spending,
        masking: Masking,
        *,
        epsilon: float | None = None,
        **sender: Unpack[Masker],
    ) -> bytes:
        """Add up a site's table and a share of the noise, mask it, and return the signed file.

        Without a `table` the file holds a share of the noise only, no record, and costs nothing. A
        retry under the account's key returns the same bytes.

        Privacy
        -------
        `epsilon` per `unit`, against everyone, if enough others and a keyholder follow
        the protocol: the file states that assumption, and what holds without it. The ledger is
        charged before any noise is drawn.
        """
        high = self.epsilon_range[1]
        self.check_epsilon(high if epsilon is None else epsilon)
        if self.blind is None or masking.rule != self.blind or (table is None) != (epsilon is None):
            raise SettingsError(
                f"Nothing can be masked for study {self.name!r}: it has no blind hub or another "
                "rule, or an epsilon was given without a table. Nothing was trained or charged."
            )
        learner = build_for(self, high if epsilon is None else epsilon)
        assert isinstance(learner, Statistic)
        assert learner.sharing is not None
        if table is None:
            learner.sharing = replace(learner.sharing, only_noise=True)
        learner.schema = self.schema
        whose: dict[str, Any] = {
            "study": self.reference,
            "site": sender["site"],
            "sequence": sender.get("sequence", 1),
            "key": sender["signing"],
        }
        Contribution.rehearse(learner, learner.planned(1), **whose)

        def write(fitted: Statistic, words: Words) -> bytes:
            seal = partial(masking.seal, only_noise=table is None)
            made = Contribution.make_masked(fitted, words, seal, **whose)
            return self.accept(made).sealed.to_bytes()

        ledger = spending.account.ledger
        if ledger is not None:
            own = replace(spending.account, ledger=ledger.within(self.digest))
            spending = replace(spending, account=own)
        try:
            return learner.mask(table, write, spending)
        except ConsilienceError:
            raise
        except ValueError as problem:  # of scikit-learn, such as a table without records
            raise _untrainable(problem) from None

    def check_epsilon(self, epsilon: float) -> None:
        """Refuse to train a study with problems, or with an epsilon that it does not allow."""
        self.require_valid()
        low, high = self.epsilon_range
        if not self.trusted and not low <= epsilon <= high:
            raise SettingsError(
                f"Study {self.name!r} lets sites choose an epsilon from {low:.15g} to {high:.15g}. "
                f"Got {epsilon!r} instead. Nothing was trained or charged."
            )

    def accept(self, contribution: Contribution) -> Contribution:
        """Return a contribution that fits the study, or say why it does not fit."""
        self.require_valid()
        return check_contribution(self, contribution)

    def combine(
        self,
        contributions: Sequence[Part],
        public: Public | None = None,
        test: Public | None = None,
        *,
        publication: Publication,
    ) -> Release:
        """Combine the sites' contributions into a signed release, as `collect` describes."""
        return collect(self, contributions, public=public, test=test, publication=publication)


def _untrainable(problem: ValueError) -> SchemaMismatch:
    return SchemaMismatch(
        f"The table cannot be trained on: {problem} Charges made so far remain. Check that the "
        "table has records."
    )


def check(path: str | os.PathLike[str]) -> list[str]:
    """Return every problem of a study file in words; an empty list if it is valid."""
    arguments, problems = toml.parse(toml.read_text(path))
    try:
        if arguments:
            problem = find_axes_problem(Study(**arguments), Path(path).parent)
            problems += [] if problem is None else [problem]
    except StudyRefused as refused:
        return [*problems, *refused.problems]
    return problems
