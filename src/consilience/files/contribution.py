"""What leaves a site: a fitted learner, its guarantee, its events, a ledger's receipt, a signature.

A contribution is rebuilt from its file by the registry of learners. A name that is not in it is
refused, and so is every tensor that the learner could not have produced.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

import consilience.statistics.registry  # noqa: F401  statistics are learners that files can name
from consilience.errors import ConsilienceError, ContributionRejected, GuaranteeVoid, SettingsError
from consilience.files.sealed import (
    Sealed,
    SealedFile,
    SignedFile,
    SigningKey,
    canonical,
    refused,
)
from consilience.learners.axes import read_projection
from consilience.learners.base import UNSTATED, Choices, PrivateLearner, State
from consilience.learners.implied import ROUNDING, Extent, Implied
from consilience.learners.inputs import MAY_ASSUME
from consilience.learners.registry import LEARNERS, find_kind
from consilience.learners.trees.bins import Bins
from consilience.learners.tuned import Tuning, tuned
from consilience.privacy.accounting import (
    Event,
    SharedSum,
    alone,
    are_alike,
    as_counted,
    events_from_json,
    events_to_json,
    total,
)
from consilience.privacy.guarantee import Guarantee, Neighbours, Unit
from consilience.statistics.base import MASKED, Sharing, Statistic
from consilience.text import quote

if TYPE_CHECKING:
    import os

Array = NDArray[Any]

MOST_FEATURES = 1 << 20
MOST_CLASSES = 1 << 12
MOST_ROWS = 1 << 14  # of tensors that are checked some rows at a time
UNKNOWN = "its {} are not those of a learner this version knows"
_BLOCK_NUMBERS = 1 << 17  # checked at a time
# What reading facts of any form and content can raise.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ConsilienceError)
KIND, WITHDRAWAL = "contribution", "withdrawal"
WITHDRAWN = ".withdrawn"  # how the name of a note ends that stands for a contribution
_COST = ("events", "receipt")  # the facts that prove a charge
_NONCE = re.compile("[0-9a-f]{64}")
MOST_RECEIPT = 4096  # characters
MOST_WEIGHED = 1 << 12  # members that one site weighs
MOST_STEPS = 1 << 16  # that records of a shared sum are scaled by
_RECEIPT = frozenset(
    "entry key dataset study epsilon delta rho unit neighbours events_hash hash".split()
)
# Earlier versions did not round an epsilon up that they read off a profile: theirs may be lower.
_ROUNDED = 1e-6
_SPLIT = 1e-12
# All facts of a file, in the words of the page that a data officer approves. Whatever else a sender
# could write into a file would be kept for as long as the study is.
FACTS = {
    "learner": "the learner's name",
    "settings": "the learner's settings, with the epsilon of this training",
    "chosen": "what settings that are 'auto' became, by public facts alone",
    "classes": "the classes that the study declares",
    "n_features": "the number of encoded columns",
    "size": "a number of records or persons: see 'number' below",
    "events": "the scales of the noise",
    "guarantee": "what the file promises, computed from them",
    "site": "the site's name",
    "receipt": "the ledger's entry for this training: its number, name, hashes and cost, and the "
    "name of the data set",
    "study": "the study's name and digest",
    "sequence": "how many contributions to the study the site has made",
    "software": "the version of this software",
    "created": "the time of the training, in seconds",
    "nonce": "32 random bytes",
    "key": "the site's public key, and its signature",
    "tensors": "the model: see 'numbers' below",
}
# The same of a file for a blind hub, which has these beside the others.
MASKED_FACTS = {
    "blind": "the roster's digest, sealed seeds and a nonce of the masks, whom the site counts on, "
    "and whether there is only noise",
    "share": "how wide the shared noise is, and what the site's own share promises alone",
}
# And of the file of a site that weighs the members of others.
WEIGHED_FACTS = {"members": "the digests of the contributions that are weighed"}
# And of a model that was trained along axes.
PROJECTED_FACTS = {
    "projection": "how many axes the model was trained along, and where they come from",
}
# And of a model whose settings its site chose among candidates.
TUNED_FACTS = {
    "tuning": "the candidates that the study names for its settings, and the scale of the noise by "
    "which one was chosen",
}
_KNOWN = frozenset().union(FACTS, MASKED_FACTS, WEIGHED_FACTS, PROJECTED_FACTS, TUNED_FACTS)


def take_apart(learner: PrivateLearner[Any, Any]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return everything that a fitted learner releases, as plain facts and tensors."""
    settings = {name: to_plain(value) for name, value in learner.stated_settings().items()}
    classes = getattr(learner, "classes_", None)
    facts = {
        "learner": type(learner).__name__,
        "settings": settings,
        "classes": None if classes is None else classes.tolist(),
        "n_features": int(learner.n_features_in_),
        "size": getattr(learner, "public_size_", None),
        "events": events_to_json(learner.events_),
        "guarantee": learner.guarantee_.as_dict(),
    }
    return facts | _facts_beside(learner), {
        name: np.asarray(tensor) for name, tensor in learner.released_state().items()
    }


def _facts_beside(learner: PrivateLearner[Any, Any]) -> dict[str, Any]:
    """Return what a file states of axes and of a choice, where there are any."""
    facts: dict[str, Any] = {}
    if learner.projection is not None:
        facts["projection"] = learner.projection.stated()
    if learner.tuning is not None:
        facts["tuning"] = learner.stated_tuning()
    return facts


def _unfitted(facts: Mapping[str, Any]) -> Any:
    """Return the learner that facts describe, with what is public of its fit but its tensors."""
    kind: Any = find_kind(facts["learner"], facts["settings"])
    if "tuning" in facts:
        accept("candidates", facts["tuning"].keys() == {"candidates", "selection"})
        tuning = Tuning.read(facts["tuning"]["candidates"])
        accept("candidates", tuning.problem_with(kind) is None)
        kind = tuned(kind)
    named = kind.read_settings(facts["settings"])
    settings = {name: from_plain(value) for name, value in named.items()}
    numbers = all(type(settings.get(name)) in (int, float) for name in ("epsilon", "delta"))
    accept("settings", settings.keys() == _setting_names(kind) and numbers)
    if "projection" in facts:
        accept("projection", kind.is_linear)
        settings["projection"] = read_projection(facts["projection"])
    if "tuning" in facts:
        settings["tuning"] = replace(tuning, of_part=True)
    learner: Any = kind(**settings)
    n_features, classes, size = facts["n_features"], facts["classes"], facts["size"]
    accept("features", type(n_features) is int and 1 <= n_features <= MOST_FEATURES)
    accept("classes", (classes is None) == kind.predicts_number)
    accept("classes", classes is None or _are_classes(classes))
    accept("size", size is None or (type(size) is int and 1 <= size < 2**60))
    learner.n_features_in_ = n_features
    if classes is not None:
        learner.classes_ = np.asarray(classes)
    if size is not None:
        learner.public_size_ = size
    if "share" in facts:
        accept("share", isinstance(learner, Statistic))
        learner.sharing = _read_share(facts)
    return learner


def _read_share(facts: Mapping[str, Any]) -> Sharing:
    """Return how the noise of a masked file is shared."""
    share, blind = facts["share"], facts["blind"]
    epsilon, steps, shares = share["epsilon"], share["steps"], blind["shares"]
    plain = type(epsilon) in (int, float) and 0 < epsilon < math.inf
    accept("share", plain and type(steps) is int and 1 <= steps <= MOST_STEPS)
    accept("share", type(shares) is int and 1 <= shares < 2**31)
    accept("share", type(blind["only_noise"]) is bool)
    return Sharing(shares, epsilon, steps, blind["only_noise"])


@cache  # it reads the signature of the class
def _setting_names(kind: Any) -> frozenset[str]:
    return frozenset(kind._get_param_names()) - UNSTATED


def rebuild(facts: Mapping[str, Any], tensors: State) -> Any:
    """Return the fitted learner that `take_apart` took apart, or refuse facts of no learner."""
    try:
        learner = _unfitted(facts)
        accept("tensors", learner.check_state(tensors))
        learner.restore_state(dict(tensors))
        accept("size", getattr(learner, "public_size_", None) == facts["size"])
        learner.events_ = events_from_json(facts["events"])
        learner.guarantee_ = Guarantee.from_dict(facts["guarantee"])
        learner.receipt_ = facts.get("receipt")
        learner.remember_settings()
    except MALFORMED as problem:
        part = str(problem) if isinstance(problem, ContributionRejected) else "facts"
        raise refused(UNKNOWN.format(part)) from None
    return learner


class _Recomputed(NamedTuple):
    """What the public facts of a file imply, whoever sent it."""

    implied: Implied | None  # of events and tensors; None if the learner cannot say
    chosen: Choices | None  # what settings that are "auto" became; None if nobody can say


def _recompute(facts: Mapping[str, Any]) -> _Recomputed:
    """Return what the facts imply of events, tensors and choices."""
    known = ("learner", "settings", "n_features", "classes", "size", "tensors")
    try:
        public = {name: facts[name] for name in known}
        public["tensors"] = {name: form["shape"] for name, form in facts["tensors"].items()}
        public |= {name: facts[name] for name in ("projection", "tuning") if name in facts}
        if "share" in facts:
            public["share"] = {name: facts["share"][name] for name in ("epsilon", "steps")}
            public["blind"] = {name: facts["blind"][name] for name in ("shares", "only_noise")}
        text = canonical(public)
        return (_recompute_short if len(text) <= _MOST_KEPT else _recompute_from)(text)
    except (*MALFORMED, ArithmeticError) as problem:
        part = str(problem) if isinstance(problem, ContributionRejected) else "facts"
        raise refused(UNKNOWN.format(part)) from None


def _recompute_from(text: str) -> _Recomputed:
    facts = json.loads(text)
    learner = _unfitted(facts)
    implied = learner.implied(facts["tensors"])
    try:
        return _Recomputed(implied, learner.chosen())
    except (*MALFORMED, ArithmeticError):
        return _Recomputed(implied, None)


# A hub looks at every contribution again for every release. The text is all that the answer is
# made of, so that no other file's answer can be returned. Facts may be megabytes long, also those
# of files that are refused later, and such texts are not kept.
_MOST_KEPT = 1 << 13  # characters
_recompute_short = lru_cache(maxsize=1 << 12)(_recompute_from)


def _check_shapes(facts: Mapping[str, Any]) -> _Recomputed:
    """Refuse tensors of other shapes than the facts imply, before any of them is read."""
    found = _recompute(facts)
    shapes = {name: form["shape"] for name, form in facts["tensors"].items()}
    if found.implied is not None and not found.implied.has_shapes(shapes):
        raise refused("its tensors do not have the shapes that its settings imply")
    return found


def _check_implied(
    implied: Implied | None, facts: Mapping[str, Any], extents: Mapping[str, Extent]
) -> None:
    """Refuse events and numbers that no fit with such facts has.

    This comes before anything is computed from events that the sender stated.
    """
    if implied is None:
        return
    if not implied.has_events(_read_events(facts)):
        raise refused("its events are not the ones that its settings and its size imply")
    if not implied.has_numbers(extents):
        raise refused("its numbers are larger than its settings, its size and its noise allow")


def keeps_to_bounds(facts: Mapping[str, Any], tensors: Mapping[str, Array]) -> bool:
    """Tell whether the numbers of a learner are ones that a fit with such facts can have."""
    forms = {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()}
    implied = _recompute({**facts, "tensors": forms}).implied
    extents = {name: Extent.of([tensor]) for name, tensor in tensors.items()}
    return implied is None or implied.has_numbers(extents)


def _read_events(facts: Mapping[str, Any]) -> tuple[Event, ...]:
    try:
        return events_from_json(facts["events"])
    except MALFORMED:
        raise refused(UNKNOWN.format("events")) from None


def accept(part: str, fits: bool) -> None:
    """Refuse a part of a file that nothing in this version could have made."""
    if not fits:
        raise ContributionRejected(part)


def _is_receipt(value: object) -> bool:
    """Tell whether a fact has the form of a ledger's receipt."""
    return (
        isinstance(value, dict)
        and value.keys() == _RECEIPT
        and type(value["entry"]) is int
        and 1 <= value["entry"] < 2**53
        and _NONCE.fullmatch(str(value["hash"])) is not None
        and all(isinstance(each, str | int | float | None) for each in value.values())
        and len(str(value)) <= MOST_RECEIPT
    )


# A file's events are added up for its guarantee, for its receipt and for the row that a hub keeps,
# and the cost of Gaussian noise is a search each time. Equal events cost the same, whoever drew
# them; long lists, of which there are few, are not kept.
_SHORT = 16
_add_short = lru_cache(maxsize=1 << 10)(total)


def _add_up(events: tuple[Event, ...], neighbours: str | None = None) -> Guarantee:
    """Return what events cost together, each converted to a relation if one is given."""
    return (_add_short if len(events) <= _SHORT else total)(events, neighbours)


def paid_events(facts: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return the events that a file's receipt is for, as the ledger holds them.

    Of a share of noise, that may be what it costs if everybody else colludes.
    """
    events, receipt = events_from_json(facts["events"]), facts.get("receipt")
    by_itself = alone(events)
    if by_itself != events and receipt is not None:
        text = events_to_json(by_itself)
        if receipt.get("events_hash") == hashlib.sha256(text.encode()).hexdigest():
            return by_itself
    return events


def _check_receipt(facts: Mapping[str, Any]) -> None:
    """Refuse a receipt of another charge than the one for a file's events, as they are stated.

    A ledger counts in its own relation, so that what it charged may be more than what is promised.
    """
    receipt, stated, events = facts["receipt"], facts["events"], paid_events(facts)
    if events != events_from_json(stated):
        stated = events_to_json(events)
    try:
        counted = as_counted(events, receipt["unit"], receipt["neighbours"])
        charged = _add_up(counted, receipt["neighbours"])
        same = (
            receipt["events_hash"] == hashlib.sha256(stated.encode()).hexdigest()
            and receipt["unit"] == str(charged.unit)
            and receipt["epsilon"] >= charged.epsilon * (1 - _ROUNDED)
            and receipt["delta"] >= charged.delta * (1 - _ROUNDED)
        )
    except MALFORMED:
        same = False
    if not same:
        raise refused("its receipt is not one for its events")


def _states_selection(learner: PrivateLearner[Any, Any], facts: Mapping[str, Any]) -> bool:
    """Tell whether a file states the noise by which its settings were chosen, if they were."""
    if "tuning" not in facts:
        return True
    try:
        stated, found = (
            events_from_json(one["selection"]) for one in (facts["tuning"], learner.stated_tuning())
        )
    except (*MALFORMED, ArithmeticError):
        return False
    return are_alike(stated, found, slack=ROUNDING)


def _states_choices(chosen: Choices | None, facts: Mapping[str, Any]) -> bool:
    """Tell whether a file states what its settings chose; files of earlier versions state none."""
    if "chosen" not in facts:
        return True
    stated = facts["chosen"]
    return (
        chosen is not None
        and isinstance(stated, dict)
        and stated.keys() == chosen.keys()
        and all(_is_choice(stated[name], mine) for name, mine in chosen.items())
    )


def _is_choice(stated: object, mine: float | str) -> bool:
    if isinstance(mine, float):  # rounded elsewhere
        return type(stated) in (int, float) and math.isclose(stated, mine, rel_tol=_ROUNDED)  # type: ignore[arg-type]
    return type(stated) is type(mine) and stated == mine


def _are_digests(value: object) -> bool:
    """Tell whether a fact is a list of different digests."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MOST_WEIGHED
        and all(map(is_nonce, value))
        and len(set(value)) == len(value)
    )


def is_nonce(value: object) -> bool:
    """Tell whether a fact is a nonce: 32 random bytes."""
    return isinstance(value, str) and _NONCE.fullmatch(value) is not None


def _are_classes(labels: object) -> bool:
    """Tell whether labels from a file are different plain values."""
    return (
        isinstance(labels, list)
        and all(type(label) in (str, int, float, bool) for label in labels)
        and 1 <= len(set(map(repr, labels))) == len(labels) <= MOST_CLASSES
    )


def check_guarantee(learner: PrivateLearner[Any, Any], *, trusted: bool = False) -> Guarantee:
    """Recompute the guarantee from the events and refuse a statement that differs from it.

    An epsilon that an earlier version rounded down becomes the recomputed one.
    """
    stated: Guarantee = learner.guarantee_
    if not stated.holds:
        raise GuaranteeVoid(
            f"The file has no guarantee and says why: {quote(stated.void_reason)}. Nothing of it "
            "was used."
        )
    try:
        declared = (Unit(learner.unit), Neighbours(learner.neighbours))
    except ValueError:
        raise refused("its settings name no unit or relation of neighbours") from None
    if not set(stated.assumptions) <= {*MAY_ASSUME, *learner.assumed()}:
        raise refused("its guarantee makes an assumption that no learner of its kind makes")
    if not learner.events_:
        # An exact learner, for a trusted hub: no event, no promise.
        nothing = math.isinf(stated.epsilon) and stated.delta == 0 and math.isinf(learner.epsilon)
        if not (trusted and nothing):
            raise refused(
                "it states no event, and only a trusted hub may be given an exact learner"
            )
        return stated
    whole = _add_up(tuple(learner.events_))
    stated = learner.guarantee_ = _rounded_up(stated, whole)
    if not (
        whole.promises_same(stated)
        and declared == (stated.unit, stated.neighbours)
        # Two events may cost an ulp more together than the epsilon that was split among them.
        and whole.epsilon <= learner.total_epsilon * (1 + _SPLIT)
        and whole.delta <= learner.delta * (1 + _SPLIT)
    ):
        raise refused("its guarantee is not the one that its events have")
    return stated


def _rounded_up(stated: Guarantee, whole: Guarantee) -> Guarantee:
    """Return the stated guarantee, with the true epsilon where it was rounded down."""
    is_rounded = whole.epsilon * (1 - _ROUNDED) <= stated.epsilon < whole.epsilon
    return replace(stated, epsilon=whole.epsilon) if is_rounded else stated


def to_plain(value: object) -> Any:
    """Return a setting as JSON can hold it."""
    if isinstance(value, Bins):
        return value.as_dict()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, tuple | list | range):
        return [to_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise SettingsError(
        f"A setting of type {type(value).__name__} cannot be written into a file. Nothing was "
        "written."
    )


def from_plain(value: object) -> Any:
    """Undo `to_plain`."""
    if isinstance(value, dict):
        return Bins(**value)
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    infinities: dict[object, float] = {"inf": math.inf, "-inf": -math.inf}
    return infinities.get(value, value)


class _Looked(NamedTuple):
    """What a file's facts imply, and the extents of its whole tensors."""

    recomputed: _Recomputed
    extents: Mapping[str, Extent]


@dataclass(frozen=True)
class Contribution(SignedFile):
    """A site's signed file. `load` refuses a file that fails any check; `learner` predicts.

    Privacy
    -------
    ``guarantee``, recomputed from the file's own events, for one unit of the site's records against
    everyone who sees the file. Not hidden: every fact in it, the name of the site among them.

    Examples
    --------
    >>> from consilience.files.sealed import SigningKey
    >>> import tempfile
    >>> import consilience as cs
    >>> schema = cs.Schema([cs.Numeric("age", 0, 100)], "ill", classes=("no", "yes"))
    >>> table = {"age": [15, 35, 65, 85] * 500, "ill": ["no", "no", "yes", "yes"] * 500}
    >>> study = cs.Study("beds", schema, "PrivateLogisticRegression", "Average", (0.5, 2.0))
    >>> ledger = cs.Ledger(tempfile.mkdtemp() + "/ward.ledger")
    >>> _ = ledger.allow("ward", cs.Budget(epsilon=3.0))
    >>> north = {"site": "North", "dataset": "ward", "signing": SigningKey.generate()}
    >>> contribution = study.train(table, ledger, epsilon=1.0, **north)
    >>> contribution.guarantee, contribution.learner.predict([[-1.0], [1.0]]).tolist()
    (Guarantee(epsilon=1, delta=0, per record, replace-one), ['no', 'yes'])
    """

    @classmethod
    def make(
        cls,
        learner: PrivateLearner[Any, Any],
        *,
        study: Mapping[str, str],
        site: str,
        sequence: int,
        key: SigningKey,
        trusted: bool = False,
        members: Sequence[str] = (),
    ) -> Self:
        """Sign a learner that a ledger was charged for, or an exact one for a trusted hub.

        `members` are the digests of the contributions whose weights it is.
        """
        learner.check_unchanged()
        if learner.chosen_beside_ is not None:
            raise SettingsError(
                "A contribution cannot be made of a learner that PrivateTuning chose outside a "
                "study: no hub could check the choice. Nothing was written, and what was charged "
                "stays spent. Let the study name the candidates ([tuning]), or choose settings on "
                "public records (choose_on_public) before it is agreed, and train with them."
            )
        check_guarantee(learner, trusted=trusted)
        if learner.receipt_ is None and not trusted:
            raise GuaranteeVoid(
                "A contribution cannot be made of a learner that no ledger was charged for. "
                "Nothing was written. Train it with ledger=... and dataset=..., so that the "
                "charge is recorded first."
            )
        facts, tensors = take_apart(learner)
        facts |= {"site": site, "receipt": learner.receipt_, **cls.stamp(study, sequence)}
        facts["chosen"] = dict(learner.chosen())
        facts["nonce"] = secrets.token_hex(32)
        if members:
            facts["members"] = list(members)
        return cls(Sealed.seal(KIND, facts, tensors, key))._check(trusted)

    def _repr_html_(self) -> str:
        from consilience.files.certificate import of_contribution  # it reads contributions

        return of_contribution(self).as_card()

    def __repr__(self) -> str:
        name, learner = self.study["name"], self.sealed.facts["learner"]
        return f"Contribution({self.site!r} to {name!r}: {learner}, {self.guarantee!r})"

    @classmethod
    def make_masked(
        cls,
        statistic: Statistic,
        words: Array,
        mask: Callable[[dict[str, Any], Array, SigningKey], Sealed],
        *,
        study: Mapping[str, str],
        site: str,
        sequence: int,
        key: SigningKey,
    ) -> Self:
        """Sign the masked numbers of a statistic whose noise is a share.

        `mask` adds the pads and the fact "blind", and signs; `words` exist nowhere else.
        """
        sharing = statistic.sharing
        assert sharing is not None
        statistic.restore_state({MASKED: np.zeros_like(words)})  # facts only are taken of it
        facts, _ = take_apart(statistic)
        by_itself = total(alone(statistic.events_))
        facts |= {
            "share": {
                "epsilon": sharing.epsilon,
                "steps": sharing.steps,
                "alone": by_itself.as_dict(),
            },
            "site": site,
            "receipt": statistic.receipt_,
            "chosen": dict(statistic.chosen()),
            **cls.stamp(study, sequence),
            "nonce": secrets.token_hex(32),
        }
        return cls(mask(facts, words, key))._check(trusted=False)

    @classmethod
    def rehearse(
        cls,
        learner: PrivateLearner[Any, Any],
        events: Sequence[Event],
        *,
        study: Mapping[str, str],
        site: str,
        sequence: int,
        key: SigningKey,
    ) -> None:
        """Refuse a training whose file nobody could read, before anything is charged for it.

        A draft with all that is known before the training is written and read as the file will be.
        """
        learner = learner.possible()[0]
        classes = getattr(learner, "classes_", None)
        facts = {
            "learner": type(learner).__name__,
            "settings": {name: to_plain(one) for name, one in learner.stated_settings().items()},
            "classes": None if classes is None else classes.tolist(),
            "n_features": int(learner.n_features_in_),
            "size": None,
            "events": events_to_json(events),
            "site": site,
            **cls.stamp(study, sequence),
            **_facts_beside(learner),
        }
        try:
            read = Sealed.load(Sealed.seal(KIND, facts, {}, key).to_bytes(), KIND)
            _unfitted(read.facts)
            _read_events(read.facts)
            same = {name: read.facts[name] for name in facts} == facts
        except (*MALFORMED, ArithmeticError):
            same = False
        if not (same and 1 <= len(site) <= 200 and 1 <= sequence < 2**53):
            raise SettingsError(
                f"A file of this training of {type(learner).__name__} could not be read again, by "
                "its settings, its classes or the names in it. Nothing was trained or charged. Ask "
                "who wrote the study."
            )

    @classmethod
    def load(cls, source: str | os.PathLike[str] | bytes, *, trusted: bool = False) -> Self:
        """Read a file of unknown origin: form, signature, tensors, and guarantee against events."""
        return cls(Sealed.load(source, KIND))._check(trusted)

    @classmethod
    def inspect(cls, file: SealedFile, *, trusted: bool = False) -> Self:
        """Check a file of unknown origin as `load` does, holding a block of it at a time.

        The result has every fact, but not all numbers of the learner: do not predict with it.
        """
        recomputed = _check_shapes(file.facts)
        extents = dict.fromkeys(file.facts["tensors"], Extent())

        def watch(name: str, block: Array) -> None:
            extents[name] = extents[name].include(block)

        file.check_tensors(watch)
        kind = LEARNERS.get(str(file.facts.get("learner")))
        # Whether coefficients lie along a study's axes is seen by all of them.
        check = "whole" if kind is None or "projection" in file.facts else kind.state_check
        if check == "rows":
            return cls._inspect_rows(file, _Looked(recomputed, extents), trusted=trusted)
        names = file.facts["tensors"]
        state = {
            name: file.tensor(name) if check == "whole" else file.zeros(name) for name in names
        }
        return cls(file.filled(state))._check(trusted, _Looked(recomputed, extents))

    @classmethod
    def _inspect_rows(cls, file: SealedFile, looked: _Looked, *, trusted: bool) -> Self:
        """Check a file some rows of its tensors at a time."""
        forms = {name: tuple(form["shape"]) for name, form in file.facts["tensors"].items()}
        lengths = {form[0] for form in forms.values() if form}
        n_rows = max(lengths, default=0)
        if len(lengths) != 1 or not 1 <= n_rows <= MOST_ROWS:
            raise refused(UNKNOWN.format("tensors"))
        largest = max(1, *map(math.prod, forms.values()))  # a forged form may have no numbers
        step = max(1, _BLOCK_NUMBERS * n_rows // largest)
        first: Self | None = None
        for begin in range(0, n_rows, step):
            rows = (begin, min(begin + step, n_rows))
            state = {
                name: file.rows(name, *rows) if form else file.tensor(name)
                for name, form in forms.items()
            }
            if first is None:
                first = cls(file.filled(state))._check(trusted, looked)
            elif not first.learner.check_state(state):
                raise refused(UNKNOWN.format("tensors"))
        assert first is not None
        return first

    def _check(self, trusted: bool, looked: _Looked | None = None) -> Self:
        """Check everything; `looked` is for files of which `sealed` has only a part."""
        facts = self.sealed.facts
        if looked is None:
            extents = {name: Extent.of([one]) for name, one in self.sealed.tensors.items()}
            looked = _Looked(_check_shapes(facts), extents)
        expected: dict[type, tuple[str, ...]] = {
            str: ("learner", "events", "site"),
            int: ("n_features", "sequence"),
            dict: ("settings", "guarantee", "study"),
        }
        typed = all(type(facts.get(n)) is kind for kind, names in expected.items() for n in names)
        if not (
            typed
            and facts.keys() <= _KNOWN
            and ("members" not in facts or _are_digests(facts["members"]))
            and set(facts["study"]) == {"name", "digest"}
            and all(isinstance(text, str) for text in facts["study"].values())
            and 1 <= len(facts["site"]) <= 200
            and self.is_stamped(facts)
            and (facts.get("receipt") is None or _is_receipt(facts["receipt"]))
            and 1 <= facts["sequence"] < 2**53
            and ("nonce" not in facts or is_nonce(facts["nonce"]))
        ):
            raise refused("a fact is missing or of the wrong kind")
        _check_implied(looked.recomputed.implied, facts, looked.extents)
        check_guarantee(self.learner, trusted=trusted)
        if not _states_selection(self.learner, facts):
            raise refused("the noise of its choice is not what its candidates and its size imply")
        if not _states_choices(looked.recomputed.chosen, facts):
            raise refused("what its settings chose is not what they imply")
        if facts.get("receipt") is not None and self.events:
            _check_receipt(facts)
        if ("blind" in facts) != ("share" in facts) or not self._states_alone():
            raise refused("what its own share promises alone is not what its noise has")
        return self

    def _states_alone(self) -> bool:
        """Tell whether a masked file states what holds if everybody else colludes."""
        if "share" not in self.sealed.facts:
            return True
        try:
            stated, found = self.alone, total(alone(self.events))
        except MALFORMED:
            return False
        return (
            self.sealed.facts["share"].keys() == {"epsilon", "steps", "alone"}
            and stated is not None
            and not stated.assumptions
            and _rounded_up(stated, found).promises_same(found)
        )

    @property
    def weighs(self) -> tuple[str, ...]:
        """The digests of the contributions whose weights it is; none of an ordinary one."""
        return tuple(self.sealed.facts.get("members", ()))

    @property
    def is_masked(self) -> bool:
        """Whether its numbers are masked: only the total of a batch can be opened."""
        return "blind" in self.sealed.facts

    @property
    def has_records(self) -> bool:
        """Whether it is made of records, and not of a share of noise alone."""
        return not (self.is_masked and self.sealed.facts["blind"]["only_noise"])

    @property
    def alone(self) -> Guarantee | None:
        """What the site's own share promises if everybody else colludes; None if nothing is shared.

        `guarantee` is then what holds under the assumption that it states.
        """
        if not self.is_masked:
            return None
        return Guarantee.from_dict(dict(self.sealed.facts["share"]["alone"]))

    @property
    def paid_events(self) -> tuple[Event, ...]:
        """What its ledger charged."""
        return paid_events(self.sealed.facts)

    @cached_property
    def learner(self) -> Any:
        """The fitted learner."""
        return rebuild(self.sealed.facts, self.sealed.tensors)

    @cached_property
    def guarantee(self) -> Guarantee:
        """What the file promises, recomputed from its events."""
        stated = super().guarantee
        return _rounded_up(stated, _add_up(self.events)) if self.events else stated

    @property
    def is_hidden_by_digest(self) -> bool:
        """Whether the digest tells nothing of the content: a secret nonce is in the signed facts.

        Without one, whoever can guess the content can check the guess against a published digest.
        Files of earlier versions have none.
        """
        return "nonce" in self.sealed.facts

    @property
    def events(self) -> tuple[Event, ...]:
        """What was drawn."""
        return events_from_json(self.sealed.facts["events"])

    @property
    def site(self) -> str:
        """Name under which the site is enrolled."""
        return str(self.sealed.facts["site"])


@dataclass(frozen=True)
class Withdrawal(SignedFile):
    """What a site leaves in a shared folder in place of a contribution: its charge, no numbers.

    A folder that was put back from an older copy is noticed by it, and can enter the charge again.
    """

    @classmethod
    def make(cls, file: SealedFile, key: SigningKey) -> Self:
        """Sign what a site's own contribution cost; the file itself may then go."""
        kept = {name: file.facts[name] for name in ("site", "study", "sequence", *_COST)}
        return cls(Sealed.seal(WITHDRAWAL, {**kept, "contribution": file.digest}, {}, key))

    @classmethod
    def load(cls, source: str | os.PathLike[str] | bytes) -> Self:
        """Read a file of unknown origin; what it states counts only if the site's own key signed.

        The names of site and study are compared by whoever reads it.
        """
        sealed = Sealed.load(source, WITHDRAWAL)
        facts = sealed.facts
        names = {"site", "study", "sequence", *_COST, "contribution", "key", "tensors"}
        receipt = facts.get("receipt")
        if not (
            facts.keys() == names
            and isinstance(facts["study"], dict)
            and type(facts["sequence"]) is int
            and is_nonce(facts["contribution"])
            and isinstance(facts["events"], str)
            and (receipt is None or _is_receipt(receipt))
        ):
            raise refused("it is no withdrawal of a contribution")
        events = _read_events(facts)
        if receipt is not None and events:
            _check_receipt(facts)
        return cls(sealed)

    @cached_property
    def guarantee(self) -> Guarantee:
        """What the contribution promised, computed from its events: an exact one has none."""
        events = events_from_json(self.sealed.facts["events"])
        shared = [event.assumption for event in events if isinstance(event, SharedSum)]
        return replace(total(events), assumptions=tuple(shared))

    @property
    def site(self) -> str:
        """Name of the site that withdrew."""
        return str(self.sealed.facts["site"])

    @property
    def contribution(self) -> str:
        """Digest of the contribution that was withdrawn."""
        return str(self.sealed.facts["contribution"])
