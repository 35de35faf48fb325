"""The one road from contributions to a release.

The hub, the relay, ``consilience release make`` and `Study.combine` all call `collect`, so that
every release is checked, charged, measured and signed in the same way.
"""

from __future__ import annotations

import hashlib
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from consilience.blind.masked import MaskedFile, Opening, unmask
from consilience.blind.pads import SealKey, Words, add_words
from consilience.errors import ConsilienceError, SettingsError
from consilience.evaluation.baselines import assess
from consilience.files.contribution import WITHDRAWN, Contribution, Withdrawal
from consilience.files.log import ReleaseLog
from consilience.files.release import (
    KIND,
    Combination,
    OpenedTotal,
    Release,
    Source,
    check_finite,
    in_order,
)
from consilience.files.sealed import SealedFile, SigningKey
from consilience.learners.base import PrivateLearner
from consilience.privacy.accounting import Event
from consilience.privacy.guarantee import Guarantee, show_bound
from consilience.privacy.spending import Account
from consilience.protocol import ROTATED, Rotation
from consilience.statistics.base import MASKED
from consilience.statistics.total import Total
from consilience.study.branches import PREFIX, BranchFile, Part, accept_branch, find_repeated
from consilience.tables.public import Public
from consilience.text import quote

if TYPE_CHECKING:
    from consilience.study.study import Study

T = TypeVar("T")
MOST_BREAKING = 16  # members that are left out; more of them are no exception any more
N_ORDERS = 8  # in which breaking members are looked for
CANNOT_BE_JOINED = "It cannot be combined with the others, which can be combined without it."


@dataclass(frozen=True)
class Opened:
    """What a blind hub has of the batches that all keyholders opened.

    Parameters
    ----------
    batches
        For each batch its files, those without records included, and the openings of all
        keyholders. No file is in two batches, and no site's records are.
    seal
        The hub's own key for seeds: it holds pads too. Its card was signed with the key that signs
        the release.
    """

    batches: Sequence[tuple[Sequence[Contribution], Sequence[Opening]]]
    seal: SealKey = field(repr=False)

    @property
    def files(self) -> list[Contribution]:
        """The files of all batches, in order."""
        return [file for files, _ in self.batches for file in files]


@dataclass(frozen=True)
class Publication:
    """Who signs a release, its number, what its sites submitted before, and where noise is charged.

    Parameters
    ----------
    signing
        The key that signs the release.
    sequence
        Number of the release among the study's.
    earlier
        By site, the guarantees of everything else it ever submitted to the study: superseded and
        withdrawn contributions count too.
    account
        Ledger and dataset to charge. Required if the study's aggregator draws noise. A retry with
        the same key draws nothing new.
    log
        The study's releases before this one.
    opened
        The batches that are added up. Required of a blind study, whose contributions are exactly
        the files of these batches, in their order.
    """

    signing: SigningKey
    sequence: int = 1
    earlier: Mapping[str, Sequence[Guarantee]] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    log: ReleaseLog | None = None
    opened: Opened | None = None


def collect(
    study: Study,
    contributions: Sequence[Part],
    *,
    public: Public | None = None,
    test: Public | None = None,
    publication: Publication,
) -> Release:
    """Check, combine, charge, measure and sign: the release of these contributions.

    Privacy
    -------
    Combining contributions that are private already costs nothing more. An aggregator that draws
    noise charges the publication's account before it draws. The release is measured on the study's
    public test records only.
    """
    contributions = select_members(study, contributions)
    members = _accept_members(study, contributions)
    _check_records(study, public, test)
    account = _open_account(study, publication.account)
    if study.at is not None:
        made = _weigh(study, members, test)
    elif study.is_blind:
        words = _open_sums(study, cast(Sequence[Contribution], contributions), publication)
        made = _open_total(study, members, words, public, test)
    else:
        made = _combine(study, members, public, test, account)
    held = {one.site for one in contributions if one.has_records}
    sources = [
        contribution.as_source()
        if isinstance(contribution, BranchFile)
        else Source.of(
            contribution,
            # What a site paid is stated where its records are, and not again of noise that it lent.
            publication.earlier.get(contribution.site, ())
            if contribution.has_records or contribution.site not in held
            else (),
            size=_stated_size(study, member),
            reason=_describe_member(study, member) if contribution.has_records else None,
        )
        for contribution, member in zip(contributions, members, strict=True)
    ]
    repeated = find_repeated(sources)
    if study.branches and repeated is not None:
        raise SettingsError(
            f"The site {quote(repeated)} is in two branches of study {study.name!r}, or in one and "
            "beside it, by its name or its key: its records would count twice, and what it is "
            "promised would not hold. Nothing was combined. Let it take part in one of them."
        )
    return Release.make(
        made,
        sources,
        study=study.reference,
        sequence=publication.sequence,
        key=publication.signing,
        log=publication.log,
    )


def select_members(study: Study, contributions: Sequence[Part]) -> Sequence[Part]:
    """Return the contributions that make a release.

    Where a site weighs the members, these are the ones that it weighed, in its order, and its own
    contribution after them. Others came later, and wait until it weighs again.
    """
    if study.at is None:
        return contributions
    by_digest = {one.digest: one for one in contributions}
    weighing = [one for one in contributions if one.weighs]
    if len(weighing) != 1:
        raise SettingsError(
            f"The members of study {study.name!r} are weighed by the site {study.at!r}, which has "
            "not done so. Nothing was combined. Ask it for: consilience site aggregate"
        )
    gone = [digest for digest in weighing[0].weighs if digest not in by_digest]
    if gone:
        raise SettingsError(
            f"Of the members that the site {study.at!r} weighed, {len(gone)} are withdrawn or "
            "replaced. Nothing was combined. Ask it to weigh those that are there now: consilience "
            "site aggregate"
        )
    return [*(by_digest[digest] for digest in weighing[0].weighs), weighing[0]]


def _weigh(study: Study, learners: Sequence[Any], test: Public | None) -> Combination:
    """Combine members by the weights that the aggregation site learned, and measure them."""
    *members, weigher = learners
    ensemble = study.build_aggregator().combine_weighed(members, weigher)
    quality = assess(ensemble, study=study, members=members, public=None, test=test)
    # Each source has a weight: that of who weighed the others is 0.
    shown = replace(cast(Any, ensemble), weights=np.append(ensemble.weights, 0.0))
    return Combination(shown, {"name": study.aggregator, **study.aggregator_settings}, (), quality)


def _combine(
    study: Study,
    members: Sequence[Any],
    public: Public | None,
    test: Public | None,
    account: Account,
) -> Combination:
    """Combine and measure members that were accepted."""
    ensemble = study.build_aggregator().combine(members, public, **_as_keywords(account))
    return Combination(
        ensemble,
        {"name": study.aggregator, **study.aggregator_settings},
        _charged_events(account),
        # Of a branch nobody knows the noise, which other ways to combine members go by.
        assess(
            ensemble,
            study=study,
            members=() if study.branches else members,
            public=public,
            test=test,
        ),
    )


def _open_sums(
    study: Study, contributions: Sequence[Contribution], publication: Publication
) -> Words:
    """Return what all files of the opened batches add up to; nothing smaller is ever computed."""
    opened, rule = publication.opened, study.blind
    assert rule is not None
    if opened is None or [one.digest for one in opened.files] != [
        one.digest for one in contributions
    ]:
        raise SettingsError(
            f"Study {study.name!r} has a blind hub, which combines whole batches that all "
            "keyholders opened. Nothing was combined. Pass exactly the files of these batches."
        )
    if not any(one.has_records for one in contributions):
        raise SettingsError(
            "All files of the batch hold noise only. Nothing was combined. Wait for records."
        )
    hub = (publication.signing.public, opened.seal)
    sums = [
        unmask(
            [(MaskedFile.of(one.sealed), one.sealed.tensors[MASKED]) for one in files],
            openings,
            rule,
            hub,
        )
        for files, openings in opened.batches
    ]
    return add_words(sums, len(sums[0]))


def _open_total(
    study: Study,
    members: Sequence[Any],
    words: Words,
    public: Public | None,
    test: Public | None,
) -> Combination:
    """Finish and measure an opened total. No member is measured: nobody has its numbers."""
    aggregator = study.build_aggregator()
    assert isinstance(aggregator, Total)
    ensemble, total = aggregator.open(members, words, public)
    quality = assess(ensemble, study=study, members=(), public=public, test=test)
    opened = OpenedTotal(words, len(members), total.size, total.squares)
    return Combination(ensemble, {"name": study.aggregator}, (), quality, opened)


def find_breaking(
    study: Study,
    contributions: Sequence[Part],
    *,
    public: Public | None = None,
    test: Public | None = None,
) -> dict[str, str]:
    """Return the sites without which the others can be combined, and what each one caused.

    For contributions that could not be combined although each fits the study. Empty if all can, or
    if the fault is no member's, because no two of them can be combined. Nothing is drawn or
    charged: where combining draws noise, only what comes before is tried, and of masked sums only
    what is stated beside them.

    Members are added one by one, and whoever breaks what the ones before it make is left out. So
    the first one would decide whom the others have to be like: they are added in several orders
    that nobody knows before, and the fewest are left out.
    """
    trial = partial(_try_combining, study, public=public, test=test)
    problem = trial(contributions)
    if problem is None:
        return {}
    best: dict[str, str] = {}
    for _ in range(N_ORDERS):
        salt, most = os.urandom(16), len(best) - 1 if best else MOST_BREAKING
        shuffled = sorted(contributions, key=partial(_place, salt))
        best = _leave_out(shuffled, trial, problem, most) or best
    # What exact members are told about is computed from them.
    return dict.fromkeys(best, CANNOT_BE_JOINED) if study.trusted else best


def _place(salt: bytes, contribution: Contribution) -> bytes:
    return hashlib.sha256(salt + contribution.digest.encode()).digest()


def _leave_out(
    left: list[Part],
    trial: Callable[[Sequence[Part]], str | None],
    problem: str,
    most: int,
) -> dict[str, str]:
    """Return who is left out if members are added in this order, and why; none if over `most`.

    `problem` is what all of them together cause.
    """
    breaking = dict[str, str]()
    while len(left) > 1 and len(breaking) < most:
        works, fails, cause = 0, len(left), problem  # how many of `left`, from the first on
        while fails - works > 1:
            middle = (works + fails) // 2
            found = trial(left[:middle])
            works, fails = (middle, fails) if found is None else (works, middle)
            cause = found or cause
        breaking[left.pop(fails - 1).site] = cause
        left_over = trial(left)
        if left_over is None:
            return breaking
        problem = left_over
    return {}


def _try_combining(
    study: Study,
    contributions: Sequence[Part],
    *,
    public: Public | None,
    test: Public | None,
) -> str | None:
    """Combine without publishing, charging or drawing; return what went wrong, or None."""
    try:
        members: list[Any] = [contribution.learner for contribution in contributions]
        aggregator = study.build_aggregator()
        if isinstance(aggregator, Total) and study.is_blind:
            aggregator.open(members, np.zeros(members[0].length, np.int64), public)
        elif study.draws_noise:
            aggregator.rehearse(members, public)
        else:
            check_finite(_combine(study, members, public, test, Account()).ensemble)
    except Exception as problem:
        return name_problem(problem)
    return None


def name_problem(problem: Exception) -> str:
    """Return an error in words: those of this package, or the kind of any other one."""
    return str(problem) if isinstance(problem, ConsilienceError) else type(problem).__name__


def read_log(folder: Path, key: str | None = None) -> ReleaseLog:
    """Return the log of the releases in a folder, which must hold all of them.

    With `key`, only of one where its owner signed them: others may have put files there.
    """
    files = in_order(folder.glob("release-*.safetensors"))
    found = [_read_named(file, partial(SealedFile, kind=KIND)) for file in files]
    for file, each in zip(files, found, strict=True):
        if key not in (None, each.facts["key"]):
            raise SettingsError(
                f"The file {file.name!r} in the folder {folder.name!r} is a release that another "
                "key signed. Nothing was combined. If it is yours, name the key that signed it "
                "with --key; if not, remove it, and ask who put it there."
            )
    if [file.facts.get("sequence") for file in found] != list(range(1, len(found) + 1)):
        raise SettingsError(
            f"The folder {folder.name!r} does not hold all releases of its study from the first "
            "on. Nothing was combined. Put back the one that is missing."
        )
    return ReleaseLog(digests=[file.digest for file in found])


@dataclass(frozen=True)
class Submitted:
    """What a site submitted through a shared folder.

    ``newest`` is what is combined, and ``earlier`` is the cost of everything else. ``files`` are
    all contributions that are there, and ``costs`` what everything cost, by digest.
    """

    newest: Contribution
    files: Sequence[Contribution]
    costs: Mapping[str, Guarantee]

    @property
    def earlier(self) -> Sequence[Guarantee]:
        """The cost of everything but the newest contribution."""
        return self.costs_beside(self.newest)

    def costs_beside(self, contribution: Contribution) -> Sequence[Guarantee]:
        """Return the cost of everything but one contribution."""
        return [cost for digest, cost in self.costs.items() if digest != contribution.digest]


def earlier_costs(
    members: Sequence[Contribution], by_site: Mapping[str, Submitted]
) -> dict[str, Sequence[Guarantee]]:
    """Return what each member's site submitted beside the file of it that is combined."""
    in_order = sorted(members, key=lambda one: one.has_records)  # of a site with both, its records
    return {one.site: by_site[one.site].costs_beside(one) for one in in_order}


def read_submitted(study: Study, folder: Path) -> dict[str, Submitted]:
    """Return what each site submitted, by name: what was superseded or withdrawn counts too.

    Everything in a site's name is signed by one key, or by keys that each name the next one.
    """
    released = {*folder.glob("release-*.safetensors"), *folder.glob(f"{PREFIX}*.safetensors")}
    files = sorted(set(folder.glob("*.safetensors")) - released)
    load = partial(Contribution.load, trusted=study.trusted)
    found = [study.accept(_read_named(file, load)) for file in files]
    notes = [_read_named(file, Withdrawal.load) for file in sorted(folder.glob(f"*{WITHDRAWN}"))]
    changes = [_read_named(file, Rotation.load) for file in sorted(folder.glob(f"*{ROTATED}"))]
    submitted = {
        site: _gather(
            site,
            [one for one in found if one.site == site],
            [note for note in notes if (note.site, note.study) == (site, study.reference)],
            [each for each in changes if (each.site, each.study) == (site, study.reference)],
        )
        for site in sorted({one.site for one in found})
    }
    return {site: each for site, each in submitted.items() if each is not None}


def _gather(
    site: str,
    found: Sequence[Contribution],
    notes: Sequence[Withdrawal],
    changes: Sequence[Rotation],
) -> Submitted | None:
    """Tell the newest contribution of a site from what it cost the site before.

    None if the site withdrew all that is here: whoever kept a copy can put a file back, and only
    the site removes its note.
    """
    key = _last_key({one.sealed.key for one in (*found, *notes)}, changes)
    if key is None:
        raise SettingsError(
            f"Contributions of {site!r} are signed with different keys. Nothing was combined. Ask "
            "the site which key is its own: if it changed its key, it submits once more, which "
            "leaves a proof of that; if it lost one, it first withdraws what that one signed."
        )
    cost = {note.contribution: note.guarantee for note in notes}
    left = [one for one in found if one.digest not in cost]
    if not left:
        return None
    newest = max(left, key=lambda one: (one.sealed.key == key, one.sequence))
    cost |= {one.digest: one.guarantee for one in found if one.has_records}
    return Submitted(newest, left, cost)


def _last_key(keys: set[str], changes: Sequence[Rotation]) -> str | None:
    """Return the one of a site's keys that all others led to; None if there is no such key."""
    last = set(keys)
    for key in keys:
        reached, size = {key}, 0
        while len(reached) > size:
            size = len(reached)
            reached |= {each.new for each in changes if each.old in reached}
        last &= reached
    return last.pop() if len(last) == 1 else None


def _read_named(file: Path, load: Callable[[Path], T]) -> T:
    """Read a file that anybody may have put there; an error says which one it is."""
    try:
        return load(file)
    except ConsilienceError as problem:
        raise type(problem)(f"In the file {file.name!r}: {problem}") from None


def read_records(
    study: Study, folder: str | os.PathLike[str]
) -> tuple[Public | None, Public | None]:
    """Read the study's public records and its test records from the copies in `folder`."""
    public, test = (
        None if part is None else part.read(study.schema, folder)
        for part in (study.public, study.test)
    )
    return public, test


def _accept_members(study: Study, contributions: Sequence[Part]) -> list[Any]:
    """Return the learners of enough contributions that fit the study, one for each site."""
    if len(contributions) - (study.at is not None) < study.min_sites:
        raise SettingsError(
            f"A release of study {study.name!r} needs at least {study.min_sites} sites; so far "
            f"{len(contributions)} contributed. Nothing was combined. Wait for more."
        )
    # Noise alone may be lent to later batches by a site whose records are in an earlier one.
    sites = [contribution.site for contribution in contributions if contribution.has_records]
    if len(set(sites)) < len(sites):
        raise SettingsError(
            "A site can be in a release only once. Nothing was combined. Keep its newest "
            "contribution."
        )
    return [
        accept_branch(study, one.site, one.release).learner
        if isinstance(one, BranchFile)
        else study.accept(one).learner
        for one in contributions
    ]


def _check_records(study: Study, public: Public | None, test: Public | None) -> None:
    """Refuse to combine or publish without the public files that the study names."""
    for needed, records, part in (
        (study.public is not None, public, "public"),
        (study.test is not None, test, "test"),
    ):
        if needed and records is None:
            raise SettingsError(
                f"Study {study.name!r} names {part} records, and every release of it uses them. "
                f"Nothing was combined. Pass them as {part}=..."
            )


def _open_account(study: Study, account: Account) -> Account:
    """Return where noise is charged: an account with a key, or an empty one if none is drawn."""
    if not study.draws_noise:
        return Account()
    if account.ledger is None or account.dataset is None:
        raise SettingsError(
            f"{study.aggregator} draws noise, which is charged to the hub's ledger. Nothing was "
            "combined. Pass account=Account(ledger, dataset) in the publication."
        )
    own = account.ledger.within(study.digest)  # its charges carry the study's digest
    return replace(account, ledger=own, key=account.key or uuid.uuid4().hex)


def _as_keywords(account: Account) -> dict[str, Any]:
    if account.ledger is None:
        return {}
    return {"ledger": account.ledger, "dataset": account.dataset, "key": account.key}


def _charged_events(account: Account) -> tuple[Event, ...]:
    """Return the events that combining was charged for."""
    if account.ledger is None:
        return ()
    charges = account.ledger.charges(account.dataset)
    return next(charge.events for charge in charges if charge.key == account.key)


def _stated_size(study: Study, member: object) -> int | None:
    """Return the number of records or persons that a release may state of a member."""
    return getattr(member, "public_size_", None) if study.may_state_sizes else None


def _describe_member(study: Study, member: PrivateLearner[Any, Any]) -> str:
    """Say in a few words what a member's weight rests on."""
    size, epsilon = _stated_size(study, member), member.guarantee_.epsilon
    facts = f"n = {size:,}, " if size is not None else ""
    return f"{facts}epsilon = {show_bound(epsilon)}" if math.isfinite(epsilon) else f"{facts}exact"
