"""What leaves the hub: an ensemble, its sources, what it promises to each of them, a signature.

A release is all that a site needs to predict offline. The ensemble is rebuilt from the file by the
registries of ensembles and learners; a name that is in neither is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from consilience.aggregators.base import Ensemble
from consilience.aggregators.members import DISJOINT
from consilience.aggregators.registry import AGGREGATORS, ENSEMBLES
from consilience.errors import ContributionRejected, GuaranteeVoid, SettingsError
from consilience.evaluation.baselines import BASELINES, COMPARED, KINDS, name_gain
from consilience.evaluation.measures import STATED
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
# Nothing else travels in a release but what its ensemble consists of: no text of the signer's own.
_FACTS = frozenset(
    "classes ensemble study sequence software created aggregator guarantee events sources quality "
    "log key tensors".split()
)
_SOURCE = frozenset("site digest sequence guarantee size reason weight".split())
_QUALITY = frozenset(("method", "kind", "n_records", "level", *MEASURED))
_REASON = re.compile(r"(n = [0-9]{1,3}(,[0-9]{3}){0,6}, )?(epsilon = [0-9.e+-]{1,12}|exact)")
_TITLE = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}( \([a-z0-9-]{1,40}\))?")  # of an aggregator


@dataclass(frozen=True)
class Source:
    """A member of a release, and the cost of everything that its site ever contributed.

    ``size`` is what may be stated of its number of records or persons, and ``reason`` says in words
    what its weight was computed from; both follow from the contribution that the digest names.
    """

    site: str
    digest: str
    sequence: int
    guarantee: Guarantee
    size: int | None = field(default=None, compare=False)
    reason: str | None = field(default=None, compare=False)

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
        return cls(
            contribution.site,
            contribution.digest,
            contribution.sequence,
            compose(contribution.guarantee, *earlier),
            size,
            reason,
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
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the source as a release's facts state it."""
        return {**vars(self), "guarantee": self.guarantee.as_dict()}


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
    """

    ensemble: Ensemble
    aggregator: Mapping[str, Any]
    events: Sequence[Event] = ()
    quality: Sequence[Mapping[str, Any]] = ()


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
    if not all(np.isfinite(tensor).all() for tensor in (*tensors.values(), ensemble.weights)):
        raise SettingsError("Numbers of the combined model are too large. Nothing was released.")


def _rebuild(
    facts: Mapping[str, Any], tensors: Mapping[str, Array], guarantee: Guarantee, weights: Array
) -> Ensemble:
    """Return the ensemble that `_take_apart` took apart, or refuse what nothing could have made."""
    n_features, labels = facts["n_features"], facts["classes"]
    accept("features", type(n_features) is int and 1 <= n_features <= MOST_FEATURES)
    few = isinstance(labels, list) and 1 <= len(labels) <= MOST_CLASSES
    accept("classes", labels is None or few)
    accept("ensemble", facts["ensemble"] in ENSEMBLES)
    return ENSEMBLES[facts["ensemble"]].from_parts(facts, tensors, guarantee, weights, rebuild)


def _is_whole(facts: Mapping[str, Any], tensors: Mapping[str, Array], ensemble: Ensemble) -> bool:
    """Tell whether facts and tensors are those of the ensemble that was made of them, and no more.

    Texts and numbers that nothing reads would travel with it unseen.
    """
    parts, arrays = ensemble.to_parts(take_apart)
    stated = {name: value for name, value in facts.items() if name not in _FACTS}
    return _is_within(stated, parts) and tensors.keys() == arrays.keys()


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
        and all(set(row) == _SOURCE for row in sources)
        and all(type(row["weight"]) in (int, float) for row in sources)
        and all(row["reason"] is None or _REASON.fullmatch(row["reason"]) for row in sources)
        and all(row["size"] is None or type(row["size"]) is int for row in sources)
        and all(isinstance(row["site"], str) and isinstance(row["digest"], str) for row in sources)
        and isinstance(quality, list)
        and all(set(row) <= _QUALITY and _is_method(row["method"], aggregator) for row in quality)
        and all(row.get("kind") in KINDS for row in quality)
        and all(type(row.get("n_records", 1)) is int for row in quality)
        and all(type(row.get("level", 0.5)) is float for row in quality)
        and all(_is_measure(row[name]) for row in quality for name in MEASURED if name in row)
    )


def _is_method(name: object, aggregator: Mapping[str, Any]) -> bool:
    """Tell whether a fact names an alternative: a baseline, or an aggregator by its title."""
    if not isinstance(name, str):
        return False
    if name in BASELINES or _TITLE.fullmatch(name):
        return True
    kinds = AGGREGATORS.values()
    made = [cls(**settings) for cls in kinds for settings in cls.alternatives()]
    if aggregator["name"] in AGGREGATORS:
        settings = {key: value for key, value in aggregator.items() if key != "name"}
        made.append(AGGREGATORS[aggregator["name"]](**settings))
    return any(name == each.describe().title for each in made)


def _is_measure(part: object) -> bool:
    """Tell whether a fact is a number with its interval."""
    return (
        isinstance(part, Mapping)
        and set(part) == {"value", "low", "high"}
        and all(type(number) in (int, float) for number in part.values())
    )


@dataclass(frozen=True)
class Release(SignedFile):
    """The hub's signed file. `load` refuses a file that fails any check; `ensemble` predicts.

    Privacy
    -------
    ``guarantee`` holds for one unit of any site's records (or for a whole site, where its unit says
    so) against everyone who sees the file. ``sources`` lists what each site's own records are
    promised, counting everything that the site ever submitted to the study. Not hidden: the names
    of sites, their weights, every fact in the file.
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
        if log is not None:
            facts["log"] = log.shorten().as_dict()
        return cls(Sealed.seal(KIND, facts, tensors, key))._check()

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, key: str | None = None) -> Self:
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
        accept("log", self.log is None or self.log.length == facts["sequence"] - 1)
        accept("facts", _can_be_shown(facts))

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
    def log(self) -> ReleaseLog | None:
        """The releases before it; None in releases of earlier versions."""
        facts = self.sealed.facts.get("log")
        return None if facts is None else ReleaseLog.from_dict(facts)

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
