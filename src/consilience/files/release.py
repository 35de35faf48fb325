"""What leaves the hub: an ensemble, its sources, what it promises to each of them, a signature.

A release is all that a site needs to predict offline. The ensemble is rebuilt from the file by the
registries of ensembles and learners; a name that is in neither is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from consilience.aggregators.base import Ensemble
from consilience.aggregators.members import DISJOINT
from consilience.aggregators.registry import AGGREGATORS, ENSEMBLES
from consilience.display.html import bars
from consilience.errors import ContributionRejected, GuaranteeVoid, SettingsError, shield
from consilience.evaluation.baselines import BASELINES, COMPARED, KINDS, name_gain
from consilience.evaluation.measures import AUC, CALIBRATION, ERROR, R2, STATED
from consilience.files.contribution import (
    MALFORMED,
    MOST_CLASSES,
    MOST_FEATURES,
    Contribution,
    accept,
    rebuild,
    take_apart,
    to_plain,
)
from consilience.files.log import MOST_RELEASES, ReleaseLog
from consilience.files.sealed import Sealed, SignedFile, SigningKey, canonical, refused
from consilience.learners.base import LARGEST
from consilience.privacy.accounting import Event, events_from_json, events_to_json
from consilience.privacy.guarantee import Guarantee, compose, compose_disjoint

if TYPE_CHECKING:
    import os

Array = NDArray[Any]

KIND = "release"
MOST_MEMBERS = 1 << 16
# Of a row of quality, each with its interval.
MEASURED = (
    *(metric.name for metric in STATED),
    *dict.fromkeys(name_gain(metric.name) for metric in COMPARED),
)
GAINS = frozenset(name_gain(metric.name) for metric in COMPARED)
SHARES = frozenset((ERROR.name, AUC.name, CALIBRATION.name))  # which lie between 0 and 1
# Nothing else travels in a release but what its ensemble consists of: no text of the signer's own.
_FACTS = frozenset(
    "classes ensemble study sequence software created aggregator guarantee events sources quality "
    "log key tensors total".split()
)
OPENED = "opened"  # the tensor of a total that a blind hub opened, beside those of the ensemble
_TOTAL = frozenset(("files", "size", "squares"))
_SOURCE = frozenset("site digest sequence guarantee size reason weight".split())
_MORE = frozenset(("key", "below"))  # of a source; earlier versions state neither
MOST_BELOW = 1 << 16  # sites below one branch
_QUALITY = frozenset(("method", "kind", "n_records", "level", *MEASURED))
_REASON = re.compile(r"(n = [0-9]{1,3}(,[0-9]{3}){0,6}, )?(epsilon = [0-9.e+-]{1,12}|exact)")
_KEY = re.compile("[0-9a-f]{64}")
_SITE = re.compile(r"[A-Za-z0-9._-]+( [A-Za-z0-9._-]+)*")
_NUMBERED = re.compile("release-([0-9]{1,9})")
_TITLE = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}( \([a-z0-9-]{1,40}\))?")  # of an aggregator


def in_order(files: Iterable[Path]) -> list[Path]:
    """Sort files of releases by the numbers in their names: 10,000 comes after 9,999."""

    def number(file: Path) -> tuple[int, str]:
        found = _NUMBERED.match(file.name)
        return (0 if found is None else int(found[1])), file.name

    return sorted(files, key=number)


@dataclass(frozen=True)
class Source:
    """A member of a release, and the cost of everything that its site ever contributed.

    ``size`` is what may be stated of its number of records or persons, and ``reason`` says in words
    what its weight was computed from; both follow from the contribution that the digest names.
    ``key`` is the site's public key. A branch, whose contribution is a release, has no such key:
    ``below`` are the sites that its release is made of.
    """

    site: str
    digest: str
    sequence: int
    guarantee: Guarantee
    size: int | None = field(default=None, compare=False)
    reason: str | None = field(default=None, compare=False)
    key: str | None = field(default=None, compare=False)
    below: tuple[Source, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls,
        contribution: Contribution,
        earlier: Sequence[Guarantee] = (),
        *,
        size: int | None = None,
        reason: str | None = None,
    ) -> Self:
        """Describe a contribution; `earlier` is what else its site submitted, withdrawn or not.

        `size` is what may be stated of its number of records or persons.
        """
        cost = contribution.guarantee
        if not contribution.has_records:
            cost = replace(cost, epsilon=0.0, delta=0.0, assumptions=())
        return cls(
            contribution.site,
            contribution.digest,
            contribution.sequence,
            compose(cost, *earlier),
            size,
            reason,
            contribution.sealed.key,
        )

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Read a source from a release's facts."""
        return cls(
            str(row["site"]),
            str(row["digest"]),
            int(row["sequence"]),
            Guarantee.from_dict(dict(row["guarantee"])),
            row["size"],
            row["reason"],
            row.get("key"),
            tuple(cls.from_dict(each) for each in row.get("below", ())),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the source as a release's facts state it."""
        row = {**vars(self), "guarantee": self.guarantee.as_dict()}
        key, below = row.pop("key"), row.pop("below")
        row |= {} if key is None else {"key": key}
        return row | ({"below": [each.as_dict() for each in below]} if below else {})


@dataclass(frozen=True)
class OpenedTotal:
    """The total that a blind hub opened, in whole numbers: a site can subtract its own part.

    ``files`` is how many shares of noise are in it. ``size`` and ``squares`` are the weighted
    numbers of records behind it, once and with squared weights; None where they are not public.
    """

    words: Array
    files: int
    size: float | None
    squares: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return what the facts of a release state of it."""
        return {"files": self.files, "size": self.size, "squares": self.squares}


@dataclass(frozen=True)
class Combination:
    """An ensemble and how it was made.

    Parameters
    ----------
    ensemble
        What predicts.
    aggregator
        The aggregator's ``name`` and its settings.
    events
        What the aggregator drew; none if combining was post-processing.
    quality
        What `evaluation.baselines.assess` measured.
    total
        What a blind hub opened; None where members are known one by one.
    """

    ensemble: Ensemble
    aggregator: Mapping[str, Any]
    events: Sequence[Event] = ()
    quality: Sequence[Mapping[str, Any]] = ()
    total: OpenedTotal | None = None


def _take_apart(ensemble: Ensemble) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return an ensemble as plain facts and tensors."""
    kind = getattr(ensemble, "kind", None)
    if kind not in ENSEMBLES:
        raise SettingsError(f"A {type(ensemble).__name__} cannot be released. Nothing was written.")
    facts, tensors = ensemble.to_parts(take_apart)
    labels = None if ensemble.classes is None else np.asarray(ensemble.classes).tolist()
    return {"classes": labels, "ensemble": kind, **facts}, tensors


def check_finite(ensemble: Ensemble) -> None:
    """Refuse an ensemble whose numbers overflowed: it cannot be released."""
    _, tensors = _take_apart(ensemble)
    if not all(map(_is_moderate, (*tensors.values(), np.asarray(ensemble.weights)))):
        raise SettingsError("Numbers of the combined model are too large. Nothing was released.")


def _is_moderate(tensor: Array) -> bool:
    """Tell whether squares and products of these numbers stay finite, whoever computes them."""
    return tensor.dtype.kind != "f" or bool((np.abs(tensor) <= LARGEST).all())


def _rebuild(
    facts: Mapping[str, Any], tensors: Mapping[str, Array], guarantee: Guarantee, weights: Array
) -> Ensemble:
    """Return the ensemble that `_take_apart` took apart, or refuse what nothing could have made."""
    n_features, labels = facts["n_features"], facts["classes"]
    accept("features", type(n_features) is int and 1 <= n_features <= MOST_FEATURES)
    few = isinstance(labels, list) and 1 <= len(labels) <= MOST_CLASSES
    accept("classes", labels is None or few)
    accept("ensemble", facts["ensemble"] in ENSEMBLES)
    own = {name: tensor for name, tensor in tensors.items() if name != OPENED}
    return ENSEMBLES[facts["ensemble"]].from_parts(facts, own, guarantee, weights, rebuild)


def _is_whole(facts: Mapping[str, Any], tensors: Mapping[str, Array], ensemble: Ensemble) -> bool:
    """Tell whether facts and tensors are those of the ensemble that was made of them, and no more.

    Texts and numbers that nothing reads would travel with it unseen.
    """
    parts, arrays = ensemble.to_parts(take_apart)
    stated = {name: value for name, value in facts.items() if name not in _FACTS}
    opened = {OPENED} if "total" in facts else set()
    return _is_within(stated, parts) and tensors.keys() == arrays.keys() | opened


def _is_within(stated: object, made: object) -> bool:
    """Tell whether facts state nothing else; earlier versions did not state every setting."""
    if isinstance(stated, dict) and isinstance(made, dict):
        return all(name in made and _is_within(stated[name], made[name]) for name in stated)
    if isinstance(stated, list) and isinstance(made, list) and len(stated) == len(made):
        return all(map(_is_within, stated, made))
    return canonical(stated) == canonical(made)


def joint_guarantee(sources: Sequence[Source]) -> Guarantee:
    """Return what sites that share no record are promised together."""
    return compose_disjoint(*(source.guarantee for source in sources), assumption=DISJOINT)


def _can_be_shown(facts: Mapping[str, Any]) -> bool:
    """Tell whether facts that are only shown, on certificates and pages, have the right types."""
    sources, quality, aggregator = facts["sources"], facts["quality"], facts["aggregator"]
    return (
        isinstance(aggregator["name"], str)
        and all(_is_source(row, _SOURCE) for row in sources)
        and all(_are_below(row["below"]) for row in sources if "below" in row)
        and all(type(row["weight"]) in (int, float) for row in sources)
        and all(row["reason"] is None or _REASON.fullmatch(row["reason"]) for row in sources)
        and all(row["size"] is None or type(row["size"]) is int for row in sources)
        and all(isinstance(row["site"], str) and isinstance(row["digest"], str) for row in sources)
        and isinstance(quality, list)
        and all(set(row) <= _QUALITY and _is_method(row["method"], aggregator) for row in quality)
        and _are_possible(quality)
    )


def _is_source(row: Mapping[str, Any], needed: frozenset[str]) -> bool:
    """Tell whether a fact states what a source has, and a key in the form of one."""
    return needed <= set(row) <= needed | _MORE and (
        "key" not in row or (isinstance(row["key"], str) and _KEY.fullmatch(row["key"]) is not None)
    )


def _are_below(rows: object) -> bool:
    """Tell whether a fact lists the sites below a branch: names, numbers and digests, no prose."""
    leaf = _SOURCE - {"weight"}
    return (
        isinstance(rows, list)
        and 1 <= len(rows) <= MOST_BELOW
        and all(
            _is_source(row, leaf)
            and "below" not in row
            and isinstance(row["site"], str)
            and len(row["site"]) <= 100
            and _SITE.fullmatch(row["site"]) is not None
            and _KEY.fullmatch(str(row["digest"])) is not None
            and type(row["sequence"]) is int
            and (row["size"] is None or type(row["size"]) is int)
            and (row["reason"] is None or _REASON.fullmatch(row["reason"]) is not None)
            for row in rows
        )
    )


def _are_possible(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether rows of quality can have been measured: the release's first, each method once.

    A verdict is made of the baselines, and they are ours.
    """
    kinds = [row.get("kind") for row in rows]
    sizes, levels = ({row.get(name) for row in rows} for name in ("n_records", "level"))
    return (
        all(kind in KINDS for kind in kinds)
        and kinds[:1] == ["study"] * bool(rows)
        and kinds.count("study") <= 1
        and all(row["method"] in BASELINES for row in rows if row["kind"] == "baseline")
        and len({row["method"] for row in rows}) == len(rows)
        and max(len(sizes), len(levels)) <= 1
        and all(size is None or (type(size) is int and size >= 1) for size in sizes)
        and all(level is None or (type(level) is float and 0 < level < 1) for level in levels)
        and all(_is_measure(name, row[name]) for row in rows for name in MEASURED if name in row)
        and all(abs(row["gain"]["value"]) <= 1 for row in rows if {"gain", ERROR.name} <= set(row))
    )


def _is_method(name: object, aggregator: Mapping[str, Any]) -> bool:
    """Tell whether a fact names an alternative: a baseline, or an aggregator by its title."""
    if not isinstance(name, str):
        return False
    return _TITLE.fullmatch(name) is not None or is_known_method(name, aggregator)


def is_known_method(name: str, aggregator: Mapping[str, Any]) -> bool:
    """Tell whether a method is a baseline, or an aggregator with settings that are known here."""
    if name in BASELINES:
        return True
    kinds = AGGREGATORS.values()
    made = [cls(**settings) for cls in kinds for settings in cls.alternatives()]
    if aggregator["name"] in AGGREGATORS:
        settings = {key: value for key, value in aggregator.items() if key != "name"}
        made.append(AGGREGATORS[aggregator["name"]](**settings))
    return any(name == each.describe().title for each in made)


def _is_measure(name: str, part: object) -> bool:
    """Tell whether a fact is a number with its interval, of a size that this measure can have."""
    if not (
        isinstance(part, Mapping)
        and set(part) == {"value", "low", "high"}
        and all(type(number) in (int, float) for number in part.values())
    ):
        return False
    low, value, high = part["low"], part["value"], part["high"]
    if name in GAINS:
        least, most = (-1.0, 1.0) if name == name_gain(AUC.name) else (-math.inf, math.inf)
    else:
        # What is worse than always the mean explains less than nothing.
        least = -math.inf if name == R2.name else 0.0
        most = 1.0 if name in SHARES else math.inf
    # A bootstrap of a distance from zero may lie beside it.
    inside = low <= value <= high or (name == CALIBRATION.name and low <= high)
    return inside and least <= value <= most


@shield
@dataclass(frozen=True)
class Release(SignedFile):
    """The hub's signed file. `load` refuses a file that fails any check; `ensemble` predicts.

    Privacy
    -------
    ``guarantee`` holds for one unit of any site's records (or for a whole site, where its unit says
    so) against everyone who sees the file. ``sources`` lists what each site's own records are
    promised, counting everything that the site ever submitted to the study. Not hidden: the names
    of sites, their weights, every fact in the file.

    Examples
    --------
    >>> from consilience.files.sealed import SigningKey
    >>> from consilience.study.collect import Publication
    >>> import tempfile
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> study = cs.Study("beds", schema, "PrivateLogisticRegression", "Average", (0.5, 2.0))
    >>> ledger = cs.Ledger(tempfile.mkdtemp() + "/ward.ledger")
    >>> _ = ledger.allow("ward", cs.Budget(epsilon=3.0))
    >>> found = [
    ...     study.train(
    ...         table, ledger, epsilon=1.0, site=name, dataset="ward", signing=SigningKey.generate()
    ...     )
    ...     for name in ("North", "South")
    ... ]
    >>> release = study.combine(found, publication=Publication(SigningKey.generate()))
    >>> [source.site for source in release.sources]
    ['North', 'South']
    >>> release.ensemble.predict([[-1.0], [1.0]]).tolist()
    ['no', 'yes']
    """

    @classmethod
    def make(
        cls,
        made: Combination,
        sources: Sequence[Source],
        *,
        study: Mapping[str, str],
        sequence: int,
        key: SigningKey,
        log: ReleaseLog | None = None,
    ) -> Self:
        """Sign an ensemble of `sources`, in the order of its weights, and the `log` before it.

        If combining was post-processing, the guarantee is what the sites' own guarantees add up to;
        if it drew noise for exact members, the ensemble's own; else the weaker of both.
        """
        own = made.ensemble.guarantee
        if own is None:
            raise GuaranteeVoid(
                "A member promises nothing, so a release could not either. Nothing was written."
            )
        guarantee, joint = own, joint_guarantee(sources)
        if not made.events:
            guarantee = joint
        elif np.isfinite(joint.epsilon):  # noise for other records, on top of the sites' own
            guarantee = compose_disjoint(own, joint, assumption=DISJOINT)
        guarantee.require()
        facts, tensors = _take_apart(made.ensemble)
        weights = np.asarray(made.ensemble.weights, np.float64).tolist()
        if len(weights) != len(sources):
            raise SettingsError("A release needs one source for each member. Nothing was written.")
        facts |= {
            **cls.stamp(study, sequence),
            "aggregator": {name: to_plain(value) for name, value in made.aggregator.items()},
            "guarantee": guarantee.as_dict(),
            "events": events_to_json(made.events),
            "sources": [
                {**source.as_dict(), "weight": float(weight)}
                for source, weight in zip(sources, weights, strict=True)
            ],
            "quality": [dict(row) for row in made.quality],
        }
        if made.total is not None:
            facts["total"] = made.total.as_dict()
            tensors[OPENED] = made.total.words
        if log is not None:
            facts["log"] = log.shorten().as_dict()
        return cls(Sealed.seal(KIND, facts, tensors, key))._check()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | bytes, *, key: str | None = None) -> Self:
        """Read a file of unknown origin; with `key`, only one that the hub of that key signed."""
        release = cls(Sealed.load(path, KIND))._check()
        return release if key is None else release.verify(key=key)

    def _check(self) -> Self:
        """Refuse a release whose facts do not fit together, however well it is signed."""
        try:
            self._check_facts()
            accept("facts", _is_whole(self.sealed.facts, self.sealed.tensors, self.ensemble))
        except GuaranteeVoid:
            raise
        except (*MALFORMED, AssertionError) as problem:
            part = str(problem) if isinstance(problem, ContributionRejected) else "facts"
            raise refused(
                f"its {part.split('.')[0]} are not those of a release this version knows"
            ) from None
        return self

    def _check_facts(self) -> None:
        facts, guarantee = self.sealed.facts, self.guarantee
        if not guarantee.holds:  # its reason is the signer's, and is not repeated
            raise GuaranteeVoid("The release states that it has no guarantee. Nothing was used.")
        if not events_from_json(facts["events"]):
            accept("guarantee", joint_guarantee(self.sources).promises_same(guarantee))
        named = all(isinstance(facts["study"][part], str) for part in ("name", "digest"))
        accept("study", named and type(facts["sequence"]) is int)
        accept("version and time", self.is_stamped(facts))
        accept("number", 1 <= facts["sequence"] <= MOST_RELEASES)
        log = self.log
        complete = log is None or (log.length == facts["sequence"] - 1 and log.lists_enough)
        accept("log's entries", complete)
        accept("facts", _can_be_shown(facts))
        accept("numbers", all(map(_is_moderate, self.sealed.tensors.values())))
        accept("total", "total" not in facts or self._is_total(facts["total"]))

    def _is_total(self, stated: object) -> bool:
        """Tell whether a fact and its tensor have the form of an opened total."""
        words = self.sealed.tensors[OPENED]
        return (
            isinstance(stated, dict)
            and stated.keys() == _TOTAL
            and type(stated["files"]) is int
            and stated["files"] == len(self.sources)
            and (stated["size"] is None) == (stated["squares"] is None)
            and all(
                stated[name] is None or (type(stated[name]) in (int, float) and stated[name] >= 0)
                for name in ("size", "squares")
            )
            and words.dtype == np.int64
            and words.ndim == 1
        )

    @property
    def total(self) -> OpenedTotal | None:
        """The total that a blind hub opened; None in other releases."""
        stated = self.sealed.facts.get("total")
        return None if stated is None else OpenedTotal(self.sealed.tensors[OPENED], **stated)

    @cached_property
    def ensemble(self) -> Ensemble:
        """What predicts, like a fitted scikit-learn estimator."""
        weights = np.array([float(row["weight"]) for row in self.sealed.facts["sources"]])
        accept("weights", bool(np.isfinite(weights).all()))
        return _rebuild(self.sealed.facts, self.sealed.tensors, self.guarantee, weights)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Whose contributions it is made of."""
        rows = self.sealed.facts["sources"]
        accept("sources", isinstance(rows, list) and 1 <= len(rows) <= MOST_MEMBERS)
        return tuple(Source.from_dict(row) for row in rows)

    @property
    def events(self) -> tuple[Event, ...]:
        """What the hub drew; nothing if combining was post-processing."""
        return tuple(events_from_json(self.sealed.facts["events"]))

    @property
    def aggregator(self) -> str:
        """The class name of the aggregator that made it."""
        return str(self.sealed.facts["aggregator"]["name"])

    @property
    def log(self) -> ReleaseLog | None:
        """The releases before it; None in releases of earlier versions."""
        facts = self.sealed.facts.get("log")
        return None if facts is None else ReleaseLog.from_dict(facts)

    def _repr_html_(self) -> str:
        from consilience.files.certificate import of_release  # certificates read releases

        rows = self.sealed.facts["sources"]
        chart = bars([(row["site"], float(row["weight"])) for row in rows], "Weight of each site")
        return of_release(self).as_card(chart)

    def __repr__(self) -> str:
        kind = self.sealed.facts["ensemble"]
        return (
            f"Release({self.study['name']!r}, number {self.sequence}: {kind}, {self.guarantee!r})"
        )

    @property
    def filename(self) -> str:
        """What the file is called wherever it is kept."""
        return f"release-{self.sequence:04d}.safetensors"

    def predict(self, X: ArrayLike) -> Array:
        """Return each row's class, or number."""
        return np.asarray(self.ensemble.predict(X))

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return each class' probability."""
        ensemble: Any = self.ensemble  # regressors have no probabilities, and say so
        return np.asarray(ensemble.predict_proba(X))
