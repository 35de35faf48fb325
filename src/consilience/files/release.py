"""What leaves the hub: an ensemble, whom it is made of, what it promises to each of them, and a signature.

A release is all a site needs to predict, offline: the ensemble is rebuilt from the file by the same
fixed tables that rebuild contributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from consilience.aggregators.base import Ensemble
from consilience.aggregators.members import DISJOINT
from consilience.aggregators.registry import ENSEMBLES
from consilience.errors import ConsilienceError, ContributionRejected, GuaranteeVoid, SettingsError
from consilience.files.contribution import (
    MOST_CLASSES,
    MOST_FEATURES,
    Contribution,
    rebuilt,
    released,
    to_plain,
)
from consilience.files.sealed import MOST_BYTES, Sealed, SigningKey, refused
from consilience.privacy.accounting import Event, events_from_json, events_to_json
from consilience.privacy.guarantee import Guarantee, compose, compose_disjoint

if TYPE_CHECKING:
    import os

Array = NDArray[Any]

KIND = "release"
MOST_MEMBERS = 1 << 16


@dataclass(frozen=True)
class Source:
    """A member of a release: whose contribution it is, and what all of the site's contributions together cost it."""

    site: str
    digest: str
    sequence: int
    guarantee: Guarantee
    size: int | None = None

    @classmethod
    def of(cls, contribution: Contribution, earlier: Sequence[Guarantee] = ()) -> Self:
        """Read a source off a contribution; `earlier` are the site's other ones, superseded and withdrawn included."""
        size = contribution.sealed.facts.get("size")
        whole = compose(contribution.guarantee, *earlier)
        return cls(contribution.site, contribution.digest, contribution.sequence, whole, size)


def _take_apart(ensemble: Ensemble) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return an ensemble as plain facts and tensors."""
    kind = getattr(ensemble, "kind", None)
    if kind not in ENSEMBLES:
        raise SettingsError(f"A {type(ensemble).__name__} cannot be released. Nothing was written.")
    facts, tensors = ensemble.to_parts(released)
    labels = None if ensemble.classes is None else np.asarray(ensemble.classes).tolist()
    return {"classes": labels, "ensemble": kind, **facts}, tensors


def _rebuild(
    facts: Mapping[str, Any], tensors: Mapping[str, Array], guarantee: Guarantee, weights: Array
) -> Ensemble:
    """Return the ensemble that `_take_apart` took apart, or refuse what nothing could have made."""
    n_features, labels = facts["n_features"], facts["classes"]
    if not (type(n_features) is int and 1 <= n_features <= MOST_FEATURES):
        raise ContributionRejected("features")
    if labels is not None and not (isinstance(labels, list) and 1 <= len(labels) <= MOST_CLASSES):
        raise ContributionRejected("classes")
    if facts["ensemble"] not in ENSEMBLES:
        raise ContributionRejected("ensemble")
    return ENSEMBLES[facts["ensemble"]].from_parts(facts, tensors, guarantee, weights, rebuilt)


def _can_be_shown(facts: Mapping[str, Any]) -> bool:
    """Tell whether the facts that nothing is computed from are what a certificate says they are."""
    sources, quality, aggregator = facts["sources"], facts["quality"], facts["aggregator"]
    measured = [part for row in quality for part in row.values() if isinstance(part, Mapping)]
    return (
        isinstance(facts["software"], str)
        and isinstance(aggregator["name"], str)
        and all(type(row["weight"]) in (int, float) for row in sources)
        and all(row["reason"] is None or isinstance(row["reason"], str) for row in sources)
        and all(row["size"] is None or type(row["size"]) is int for row in sources)
        and all(isinstance(row["site"], str) and isinstance(row["digest"], str) for row in sources)
        and isinstance(quality, list)
        and all(type(number) in (int, float) for part in measured for number in part.values())
    )


@dataclass(frozen=True)
class Release:
    """The hub's signed file. `load` refuses whatever does not hold; `ensemble` predicts.

    Privacy
    -------
    ``guarantee`` holds for one unit of any site's records (or for a whole site, where its unit says
    so) against everyone who sees the file. ``sources`` list what every site's own records are
    promised: the sum of all that the site ever submitted to the study. Not hidden: the names of
    sites, their weights, every fact in the file.
    """

    sealed: Sealed

    @classmethod
    def make(
        cls,
        ensemble: Any,
        sources: Sequence[Source],
        *,
        study: Mapping[str, str],
        aggregator: Mapping[str, Any],
        sequence: int,
        key: SigningKey,
        software: str,
        events: Sequence[Event] = (),
        reasons: Sequence[str] | None = None,
        quality: Sequence[Mapping[str, Any]] = (),
    ) -> Self:
        """Sign an ensemble of `sources`, in the order of its weights.

        The guarantee is what the sites' own add up to if combining was post-processing; with
        `events`, those of the ensemble itself.
        """
        own = ensemble.guarantee
        whole = (
            own
            if events
            else compose_disjoint(*(source.guarantee for source in sources), assumption=DISJOINT)
        )
        if whole is None or own is None:
            raise GuaranteeVoid(
                "A member promises nothing, so a release could not either. Nothing was written."
            )
        whole.require()
        facts, tensors = _take_apart(ensemble)
        weights = np.asarray(ensemble.weights, np.float64)
        if len(weights) != len(sources):
            raise SettingsError("A release needs one source for each member. Nothing was written.")
        facts |= {
            "study": dict(study),
            "aggregator": {name: to_plain(value) for name, value in aggregator.items()},
            "sequence": int(sequence),
            "guarantee": whole.as_dict(),
            "events": events_to_json(events),
            "sources": [
                {
                    "site": source.site,
                    "digest": source.digest,
                    "sequence": source.sequence,
                    "guarantee": source.guarantee.as_dict(),
                    "size": source.size,
                    "weight": float(weight),
                    "reason": None if reasons is None else reasons[i],
                }
                for i, (source, weight) in enumerate(zip(sources, weights.tolist(), strict=True))
            ],
            "quality": [dict(row) for row in quality],
            "software": software,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return cls(Sealed.seal(KIND, facts, tensors, key))._checked()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, key: str | None = None, most_bytes: int = MOST_BYTES
    ) -> Self:
        """Read a file of unknown origin; with `key`, only one that the hub of that key signed."""
        found = cls(Sealed.load(path, KIND, most_bytes=most_bytes))._checked()
        return found if key is None else found.verify(key=key)

    def _checked(self) -> Self:
        facts = self.sealed.facts
        try:
            events = events_from_json(facts["events"])
            whole = self.guarantee.require()
            if not events:
                joint = compose_disjoint(
                    *(source.guarantee for source in self.sources), assumption=DISJOINT
                )
                if (joint.epsilon, joint.delta, joint.unit, joint.neighbours) != (
                    whole.epsilon,
                    whole.delta,
                    whole.unit,
                    whole.neighbours,
                ):
                    raise ContributionRejected("guarantee")
            named = all(isinstance(facts["study"][part], str) for part in ("name", "digest"))
            if not (named and type(facts["sequence"]) is int and isinstance(facts["created"], str)):
                raise ContributionRejected("study")
            if not _can_be_shown(facts):
                raise ContributionRejected("facts")
            _ = self.ensemble
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            AssertionError,
            ConsilienceError,
        ) as problem:
            named_part = str(problem) if isinstance(problem, ContributionRejected) else "facts"
            if isinstance(problem, GuaranteeVoid):
                raise
            raise refused(
                f"its {named_part.split('.')[0]} are not those of a release this version knows"
            ) from None
        return self

    def verify(self, *, key: str | None = None) -> Self:
        """Check the signature again, and with `key` that the hub of that key made it; return the release."""
        self.sealed.verify(key)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        self.sealed.save(path)

    @cached_property
    def ensemble(self) -> Any:
        """What predicts, like a fitted scikit-learn estimator."""
        weights = np.array([float(row["weight"]) for row in self.sealed.facts["sources"]])
        if not np.isfinite(weights).all():
            raise ContributionRejected("weights")
        return _rebuild(self.sealed.facts, self.sealed.tensors, self.guarantee, weights)

    @property
    def guarantee(self) -> Guarantee:
        """What the release promises to any site's records."""
        return Guarantee.from_dict(dict(self.sealed.facts["guarantee"]))

    @property
    def sources(self) -> tuple[Source, ...]:
        """Whose contributions it is made of."""
        rows = self.sealed.facts["sources"]
        if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_MEMBERS:
            raise ContributionRejected("sources")
        return tuple(
            Source(
                str(row["site"]),
                str(row["digest"]),
                int(row["sequence"]),
                Guarantee.from_dict(dict(row["guarantee"])),
                row["size"],
            )
            for row in rows
        )

    @property
    def study(self) -> Mapping[str, str]:
        """Name and digest of the study."""
        return dict(self.sealed.facts["study"])

    @property
    def sequence(self) -> int:
        """Number of this release among the study's."""
        return int(self.sealed.facts["sequence"])

    @property
    def filename(self) -> str:
        """What the file is called wherever it is kept."""
        return f"release-{self.sequence:04d}.safetensors"

    @property
    def digest(self) -> str:
        """SHA-256 of what is signed."""
        return self.sealed.digest

    def predict(self, X: Any) -> Array:
        """Return each row's class, or number."""
        return np.asarray(self.ensemble.predict(X))

    def predict_proba(self, X: Any) -> Array:
        """Return each class' probability."""
        return np.asarray(self.ensemble.predict_proba(X))
