"""A study: one TOML file that says what is learned, from what, how, and under which promises; and its two verbs.

`Study.train` makes a site's contribution and `Study.combine` a release; sites, hub and simulation
all call these two. A study is data: nobody can make a site run anything by sending one. Its digest
names it, so that sites and hub cannot mean two different things by one name.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from consilience.aggregators.average import Average
from consilience.aggregators.blend import PublicBlend
from consilience.aggregators.boosting import SiteBoosting
from consilience.aggregators.distillation.distill import SoftLabelDistillation, VoteDistillation
from consilience.aggregators.feature import FeatureMethod
from consilience.aggregators.pooling import PooledCounts
from consilience.aggregators.votes import WeightedVote
from consilience.errors import ConsilienceError, ContributionRejected, SchemaMismatch, SettingsError
from consilience.files.contribution import Contribution, to_plain
from consilience.files.release import Release
from consilience.files.sealed import SigningKey, canonical, software
from consilience.learners.registry import LEARNERS
from consilience.privacy.ledger import Ledger
from consilience.study.collect import Publication, collect
from consilience.tables.chunks import ParquetRows
from consilience.tables.public import Public
from consilience.tables.schema import Schema

AGGREGATORS: dict[str, type[Any]] = {
    "Average": Average,
    "PublicBlend": PublicBlend,
    "FeatureMethod": FeatureMethod,
    "SiteBoosting": SiteBoosting,
    "WeightedVote": WeightedVote,
    "PooledCounts": PooledCounts,
    "SoftLabelDistillation": SoftLabelDistillation,
    "VoteDistillation": VoteDistillation,
}
LINEAR = ("PrivateLogisticRegression", "PrivateLinearSVC", "PrivateRidge")
TREES = ("PrivateTreeClassifier", "PrivateForestClassifier", "PrivateAdaBoostClassifier")
DISTILLATIONS = ("SoftLabelDistillation", "VoteDistillation")
NEED_PUBLIC = ("PublicBlend", "FeatureMethod", "SiteBoosting", *DISTILLATIONS)
NEED_LABELS = ("PublicBlend", "FeatureMethod", "SiteBoosting")
MOST_TEXT = 1 << 20
TO_FILL_IN = "FILL IN"  # what `study new` leaves to people
# What the study, its schema or its privacy part decides; [learner] and [aggregator] may not say it
# a second time.
DECIDED = {
    "epsilon",
    "delta",
    "classes",
    "neighbours",
    "unit",
    "records_per_person",
    "noise",
    "data_norm",
    "label_bound",
}
DECIDED |= {"bins", "bounds"}
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,63}")


@dataclass(frozen=True)
class PublicFile:
    """A file of public records: where it usually lies, and the digest by which every copy is known."""

    file: str
    sha256: str
    labelled: bool = True

    def read(self, schema: Schema, folder: str | os.PathLike[str]) -> Public:
        """Read and encode the copy in `folder`; another file of that name is refused."""
        path = Path(folder) / self.file
        if not path.exists():
            raise SettingsError(
                f"The study's public file {self.file!r} is not there. Nothing was read. Put a "
                "copy beside the study."
            )
        if file_digest(path) != self.sha256:
            raise SettingsError(
                f"The file {self.file!r} differs from the one the study names. Nothing was read. "
                "Fetch the original, or have the coordinator issue a new study."
            )
        if not self.labelled:
            return Public(schema.encode_features(path))
        found = schema.encode(path)
        return Public(found.X, _named(schema, found.y))


IN_MEMORY = (
    1 << 27
)  # encoded values of a site's table, a gibibyte; beyond, Parquet is trained on in chunks


def _named(schema: Schema, y: NDArray[Any]) -> NDArray[Any]:
    """Return labels as the schema declares them; encoding gives their places."""
    return y if schema.classes is None else np.asarray(schema.classes)[y]


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class StudyRefused(SettingsError):
    """A study that cannot work; `problems` has everything that stands against it."""

    def __init__(self, problems: Sequence[str]) -> None:
        listed = "; ".join(problem.rstrip(".") for problem in problems)
        super().__init__(
            f"The study cannot work as it is: {listed}. Nothing was done. Mend it and check it "
            "again."
        )
        self.problems = list(problems)


@dataclass(frozen=True)
class Study:
    """What all sites of one collaboration agreed on.

    Parameters
    ----------
    name, purpose
        Short name (lower case, digits, hyphens) and what it is for, in words an ethics board reads.
    schema
        The public facts of the records.
    learner, learner_settings
        What sites train, and how.
    aggregator, aggregator_settings
        How the hub combines it.
    neighbours
        The relation under which everything is private: ``"replace-one"`` (the number of records is
        public) or ``"add-remove"``.
    epsilon_range, delta
        What a site may choose, and the common delta.
    min_sites
        Fewer make no release.
    hub
        ``"untrusted"``: it sees only what is private already. ``"trusted"``: sites hand it exact
        learners, and the release hides whole sites.
    public, test
        Files of public records, for aggregators that need them and for the honest table.
    """

    name: str
    schema: Schema
    learner: str
    aggregator: str
    epsilon_range: tuple[float, float]
    purpose: str = ""
    learner_settings: Mapping[str, Any] = field(default_factory=dict)
    aggregator_settings: Mapping[str, Any] = field(default_factory=dict)
    neighbours: str = "replace-one"
    delta: float = 0.0
    min_sites: int = 2
    hub: str = "untrusted"
    public: PublicFile | None = None
    test: PublicFile | None = None

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise StudyRefused(problems)

    # ------------------------------------------------------------------ reading and writing

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a study file."""
        return cls.from_text(_text(path))

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Read the study of a shared folder."""
        files = sorted(folder.glob("*.toml"))
        if len(files) != 1:
            raise SettingsError(
                f"The folder {folder.name!r} must hold exactly one study (a .toml file); there "
                f"are {len(files)}. Nothing was done. Put the study's file there."
            )
        return cls.load(files[0])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read a study from TOML; an unknown key is an error, never ignored."""
        facts, problems = _parsed(text)
        if problems:
            raise StudyRefused(problems)
        return cls(**facts)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        found, problems = _read(facts)
        if problems:
            raise SettingsError(
                f"These are not the facts of a study: {'; '.join(problems)}. Nothing was read."
            )
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values, in the layout of the file."""
        low, high = self.epsilon_range
        facts: dict[str, Any] = {
            "study": {"name": self.name, "purpose": self.purpose},
            "privacy": {
                "neighbours": self.neighbours,
                "epsilon_min": low,
                "epsilon_max": high,
                "delta": self.delta,
                "min_sites": self.min_sites,
                "hub": self.hub,
            },
            "schema": self.schema.to_dict(),
            "learner": {
                "name": self.learner,
                **{k: to_plain(v) for k, v in self.learner_settings.items()},
            },
            "aggregator": {
                "name": self.aggregator,
                **{k: to_plain(v) for k, v in self.aggregator_settings.items()},
            },
        }
        for part in ("public", "test"):
            found: PublicFile | None = getattr(self, part)
            if found is not None:
                facts[part] = {
                    "file": found.file,
                    "sha256": found.sha256,
                    "labelled": found.labelled,
                }
        return facts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the facts, whatever the file's comments and layout: the study's identity."""
        return hashlib.sha256(canonical(self.to_dict()).encode()).hexdigest()

    @property
    def reference(self) -> dict[str, str]:
        """Name and digest, as files carry them."""
        return {"name": self.name, "digest": self.digest}

    # ------------------------------------------------------------------ what it demands

    @property
    def trusted(self) -> bool:
        """Whether sites hand the hub exact learners."""
        return self.hub == "trusted"

    @property
    def draws_noise(self) -> bool:
        """Whether combining draws noise, which is charged to the hub's ledger and never done unasked."""
        return (
            self.aggregator in DISTILLATIONS or self.aggregator_settings.get("epsilon") is not None
        )

    def problems(self) -> list[str]:
        """Return everything that stands against the study, in words; empty if it can work."""
        found: list[str] = []

        def need(fits: bool, problem: str) -> None:
            if not fits:
                found.append(problem)

        texts = (self.name, self.purpose, self.learner, self.aggregator, self.neighbours, self.hub)
        if not all(isinstance(text, str) for text in texts):
            return ["name, purpose, learner, aggregator, neighbours and hub must be text"]
        need(
            bool(_NAME.fullmatch(self.name)),
            f"the name {self.name!r} must be lower-case letters, digits and hyphens",
        )
        need(len(self.purpose) <= 10_000, "the purpose is longer than 10,000 characters")
        need(
            TO_FILL_IN not in self.purpose,
            "the purpose is still to be filled in: those who approve will read it",
        )
        low, high = self.epsilon_range
        need(
            all(type(e) in (int, float) and 0 < e < math.inf for e in (low, high)) and low <= high,
            f"epsilon_min={low!r} and epsilon_max={high!r} must be numbers above 0 in that order",
        )
        need(
            type(self.delta) in (int, float) and 0 <= self.delta < 1,
            f"delta={self.delta!r} must lie in [0, 1)",
        )
        need(
            type(self.min_sites) is int and self.min_sites >= 1,
            f"min_sites={self.min_sites!r} must be at least 1",
        )
        need(
            self.hub in ("untrusted", "trusted"),
            f"hub={self.hub!r} must be 'untrusted' or 'trusted'",
        )
        relations = ("replace-one", "add-remove")
        need(
            self.neighbours in relations,
            f"neighbours={self.neighbours!r} must be one of {relations}",
        )
        need(
            self.learner in LEARNERS,
            f"the learner {self.learner!r} is none of {', '.join(LEARNERS)}",
        )
        need(
            self.aggregator in AGGREGATORS,
            f"the aggregator {self.aggregator!r} is none of {', '.join(AGGREGATORS)}",
        )
        for part, settings in (
            ("learner", self.learner_settings),
            ("aggregator", self.aggregator_settings),
        ):
            own = DECIDED if part == "learner" else {"noise", "classes"}
            twice = sorted(own & set(settings))
            need(
                not twice,
                f"[{part}] may not set {', '.join(twice)}: the study's other parts decide that",
            )
        if found or self.schema is None:  # the schema's own problems are told by those who read it
            return found
        classified = self.schema.classes is not None
        need(
            classified != LEARNERS[self.learner].predicts_number,
            f"{self.learner} does not fit the schema's kind of label",
        )
        distilled = self.aggregator in DISTILLATIONS
        need(
            not (distilled and not self.trusted),
            f'{self.aggregator} hides whole sites and needs hub = "trusted"',
        )
        if self.aggregator in NEED_PUBLIC:
            need(
                self.public is not None,
                f"{self.aggregator} needs public records: add a [public] part",
            )
        if self.aggregator in NEED_LABELS and self.public is not None:
            need(self.public.labelled, f"{self.aggregator} needs labelled public records")
        trees = self.learner in TREES
        if self.aggregator in ("Average", "PublicBlend", "FeatureMethod", "SiteBoosting"):
            need(
                not trees,
                f"{self.aggregator} combines linear learners; use WeightedVote or PooledCounts "
                "for trees",
            )
        if self.aggregator == "PooledCounts":
            shared = (
                self.learner == "PrivateForestClassifier"
                and self.learner_settings.get("splitter") == "random"
            )
            fixed = type(self.learner_settings.get("random_state")) is int
            need(
                shared and fixed,
                "PooledCounts needs a PrivateForestClassifier with splitter='random' and a "
                "random_state",
            )
        if found:
            return found
        try:
            self.build(low)
        except (TypeError, ConsilienceError) as problem:
            found.append(f"[learner]: {problem}")
        try:
            self.build_aggregator()
        except (TypeError, ConsilienceError) as problem:
            found.append(f"[aggregator]: {problem}")
        return found

    def build(self, epsilon: float) -> Any:
        """Return the learner that a site trains with `epsilon`; an exact one where the hub is trusted."""
        return LEARNERS[self.learner].for_schema(
            self.schema,
            epsilon=math.inf if self.trusted else float(epsilon),
            delta=0.0 if self.trusted else self.delta,
            neighbours=self.neighbours,
            **self.learner_settings,
        )

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """What the sites' files say of their learners; only epsilon is each site's own."""
        expected = self.build(self.epsilon_range[0])
        return {
            name: to_plain(value)
            for name, value in expected.get_params(deep=False).items()
            if name != "noise"
        }

    def build_aggregator(self) -> Any:
        """Return the aggregator."""
        settings = dict(self.aggregator_settings)
        if self.schema.classes is not None and self.aggregator != "PooledCounts":
            settings["classes"] = list(self.schema.classes)
        return AGGREGATORS[self.aggregator](**settings)

    # ------------------------------------------------------------------ the two verbs

    def train(
        self,
        table: Any,
        ledger: Ledger | None,
        *,
        epsilon: float,
        site: str,
        signing: SigningKey,
        dataset: str,
        sequence: int = 1,
        key: str | None = None,
    ) -> Contribution:
        """Train on a site's table and sign the result; the ledger is charged before any noise is drawn.

        A retry with the same `key` returns the first result and charges nothing.
        """
        low, high = self.epsilon_range
        if not self.trusted and not low <= epsilon <= high:
            raise SettingsError(
                f"Study {self.name!r} lets sites choose an epsilon from {low:g} to {high:g}. Got "
                f"{epsilon!r} instead. Nothing was trained or charged."
            )
        learner = self.build(epsilon)
        charged: dict[str, Any] = {}
        if not self.trusted:
            if ledger is None:
                raise SettingsError(
                    "A contribution needs a ledger to charge. Nothing was trained. Pass ledger=..."
                )
            charged = {"ledger": ledger.within(self.digest), "dataset": dataset, "key": key}
        large = self._too_large(table)
        if large is not None:
            learner.fit(large, **charged)
        else:
            rows = self.schema.encode(table)
            persons = {} if rows.persons is None else {"persons": rows.persons}
            learner.fit(rows.X, _named(self.schema, rows.y), **persons, **charged)
        return Contribution.make(
            learner,
            study=self.reference,
            site=site,
            sequence=sequence,
            key=signing,
            software=software(),
            trusted=self.trusted,
        )

    def _too_large(self, table: Any) -> ParquetRows | None:
        """Return the table in chunks if it is Parquet and better not held in memory, where alone persons are capped."""
        path = Path(table) if isinstance(table, str | os.PathLike) else None
        if (
            path is None
            or self.schema.person is not None
            or not (path.is_dir() or path.suffix in {".parquet", ".pq"})
        ):
            return None
        rows = ParquetRows(path, self.schema, named=True)
        return rows if rows.n_records * rows.n_features > IN_MEMORY else None

    def accept(self, contribution: Contribution) -> Contribution:
        """Return a contribution that fits the study, or say why it does not."""
        learner, facts = contribution.learner, contribution.sealed.facts
        low, high = self.epsilon_range

        def need(fits: bool, problem: str) -> None:
            if not fits:
                raise ContributionRejected(
                    f"The contribution of {contribution.site!r} does not fit study {self.name!r}: "
                    f"{problem}. It was not taken. Train again with the study's own file."
                )

        need(
            contribution.study == self.reference,
            "it was made for another study, or another version of this one",
        )
        settings = (
            self._settings if self.trusted else {**self._settings, "epsilon": learner.epsilon}
        )
        need(
            type(learner).__name__ == self.learner and settings == facts["settings"],
            "its learner has other settings",
        )
        need(learner.n_features_in_ == self.schema.n_features, "it has another number of features")
        if self.schema.classes is not None:
            need(learner.classes_.tolist() == list(self.schema.classes), "it has other classes")
        guarantee = contribution.guarantee
        if self.trusted:
            need(math.isinf(guarantee.epsilon), "the hub is trusted, and it is not exact")
            return contribution
        need(low <= learner.epsilon <= high, f"its epsilon is not within {low:g} and {high:g}")
        need(
            guarantee.epsilon <= high * (1 + 1e-9) and guarantee.delta <= self.delta,
            "it promises less than agreed",
        )
        need(facts.get("receipt") is not None, "no ledger was charged for it")
        if self.neighbours == "add-remove" and self.learner in LINEAR:
            need(
                facts["size"] == settings["public_size"],
                "it carries a number of records, which is not public",
            )
        return contribution

    def combine(
        self,
        contributions: Sequence[Contribution],
        public: Public | None = None,
        test: Public | None = None,
        *,
        publication: Publication,
    ) -> Release:
        """Combine the sites' contributions into a signed release; see `consilience.study.collect`."""
        return collect(self, contributions, public=public, test=test, publication=publication)


def check(path: str | os.PathLike[str]) -> list[str]:
    """Return every problem of a study file, at once and in words; empty if it can work."""
    facts, problems = _parsed(_text(path))
    try:
        if facts:
            Study(**facts)
    except StudyRefused as refused:
        return [*problems, *refused.problems]
    return problems


def _text(path: str | os.PathLike[str]) -> str:
    file = Path(path)
    try:
        if file.stat().st_size > MOST_TEXT:
            raise SettingsError(
                f"The study file {file.name!r} is larger than a study can be. Nothing was read."
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise SettingsError(
            f"The study file {file.name!r} cannot be read. Check that it is there and is text."
        ) from None


def _parsed(text: str) -> tuple[dict[str, Any], list[str]]:
    try:
        return _read(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        return {}, [f"the file is not valid TOML ({problem})"]


def _read(facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of a `Study`, as far as its parts are whole, and what is wrong with them."""
    problems: list[str] = []
    parts: dict[str, dict[str, Any]] = {}
    for name in ("study", "privacy", "schema", "learner", "aggregator", "public", "test"):
        part = facts.get(name, {})
        if not isinstance(part, Mapping):
            problems.append(f"[{name}] must be a table")
            part = {}
        parts[name] = dict(part)
    problems += [f"there is no part [{name}] in a study" for name in facts if name not in parts]
    allowed = {
        "study": {"name", "purpose"},
        "privacy": {"neighbours", "epsilon_min", "epsilon_max", "delta", "min_sites", "hub"},
        "public": {"file", "sha256", "labelled"},
        "test": {"file", "sha256", "labelled"},
    }
    for name, keys in allowed.items():
        problems += [f"[{name}] has no setting {key!r}" for key in parts[name] if key not in keys]
    required = {
        "study": ["name"],
        "privacy": ["epsilon_min", "epsilon_max"],
        "learner": ["name"],
        "aggregator": ["name"],
    }
    for name, keys_ in required.items():
        problems += [f"[{name}] lacks {key!r}" for key in keys_ if key not in parts[name]]
    files: dict[str, PublicFile | None] = {"public": None, "test": None}
    for name in files:
        if not parts[name]:
            continue
        found = parts[name]
        plain = isinstance(found.get("file"), str) and Path(found["file"]).name == found["file"]
        if not (plain and re.fullmatch("[0-9a-f]{64}", str(found.get("sha256")))):
            problems.append(
                f"[{name}] needs a file name without folders and the sha256 of that file"
            )
        elif type(found.get("labelled", True)) is not bool:
            problems.append(f"[{name}] labelled must be true or false")
        else:
            files[name] = PublicFile(**found)
    broken = bool(problems)
    schema: Schema | None = None  # the rest can be checked without one
    try:
        schema = Schema.from_dict(parts["schema"])
    except (SettingsError, SchemaMismatch) as problem:
        problems.append(f"[schema]: {problem}")
    except (TypeError, AttributeError):
        problems.append("[schema] is not laid out as a schema")
    if broken:
        return {}, problems
    privacy = parts["privacy"]
    return {
        "name": parts["study"]["name"],
        "purpose": parts["study"].get("purpose", ""),
        "schema": schema,
        "learner": parts["learner"].pop("name"),
        "learner_settings": parts["learner"],
        "aggregator": parts["aggregator"].pop("name"),
        "aggregator_settings": parts["aggregator"],
        "neighbours": privacy.get("neighbours", "replace-one"),
        "epsilon_range": (privacy["epsilon_min"], privacy["epsilon_max"]),
        "delta": privacy.get("delta", 0.0),
        "min_sites": privacy.get("min_sites", 2),
        "hub": privacy.get("hub", "untrusted"),
        **files,
    }, problems
