"""The one road from contributions to a release.

The hub, the relay, ``consilience release make`` and `Study.combine` all call `collect`, so that
every release is checked, charged, measured and signed in the same way.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilience.errors import ConsilienceError, SettingsError
from consilience.evaluation.baselines import assess
from consilience.files.contribution import Contribution
from consilience.files.log import ReleaseLog
from consilience.files.release import KIND, Combination, Release, Source, check_finite
from consilience.files.sealed import SealedFile, SigningKey
from consilience.privacy.accounting import Event
from consilience.privacy.guarantee import Guarantee
from consilience.privacy.spending import Account
from consilience.tables.public import Public

if TYPE_CHECKING:
    from consilience.study.study import Study

MOST_BREAKING = 16  # members that are left out; more of them are no exception any more


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
    """

    signing: SigningKey
    sequence: int = 1
    earlier: Mapping[str, Sequence[Guarantee]] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    log: ReleaseLog | None = None


def collect(
    study: Study,
    contributions: Sequence[Contribution],
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
    members = _accept_members(study, contributions)
    _check_records(study, public, test)
    account = _open_account(study, publication.account)
    made = _combine(study, members, public, test, account)
    sources = [
        Source.of(
            contribution,
            publication.earlier.get(contribution.site, ()),
            size=_stated_size(study, member),
            reason=_describe_member(study, member),
        )
        for contribution, member in zip(contributions, members, strict=True)
    ]
    return Release.make(
        made,
        sources,
        study=study.reference,
        sequence=publication.sequence,
        key=publication.signing,
        log=publication.log,
    )


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
        assess(ensemble, study=study, members=members, public=public, test=test),
    )


def find_breaking(
    study: Study,
    contributions: Sequence[Contribution],
    *,
    public: Public | None = None,
    test: Public | None = None,
) -> dict[str, str]:
    """Return the sites without which the others can be combined, and what each one caused.

    For contributions that could not be combined although each fits the study. Whoever is the first
    to break what the ones before it make is left out, until the rest can be combined. Empty if the
    fault is no member's, because no two of them can be combined. Nothing is drawn, so this is not
    for aggregators that draw noise.
    """
    left, breaking = list(contributions), dict[str, str]()
    while len(left) > 1 and len(breaking) < MOST_BREAKING:
        works, fails, cause = 0, len(left), ""  # how many of `left`, from the first on
        while fails - works > 1:
            middle = (works + fails) // 2
            problem = _try_combining(study, left[:middle], public, test)
            works, fails = (middle, fails) if problem is None else (works, middle)
            cause = problem or cause
        culprit = left.pop(fails - 1)
        breaking[culprit.site] = cause
        problem = _try_combining(study, left, public, test)
        if problem is None:
            return {site: why or "the others can be combined" for site, why in breaking.items()}
        breaking = {site: why or problem for site, why in breaking.items()}
    return {}


def _try_combining(
    study: Study, contributions: Sequence[Contribution], public: Public | None, test: Public | None
) -> str | None:
    """Combine without publishing; return what went wrong, or None."""
    try:
        members = [contribution.learner for contribution in contributions]
        made = _combine(study, members, public, test, Account())
        check_finite(made.ensemble)
    except Exception as problem:
        return name_problem(problem)
    return None


def name_problem(problem: Exception) -> str:
    """Return an error in words: those of this package, or the kind of any other one."""
    return str(problem) if isinstance(problem, ConsilienceError) else type(problem).__name__


def read_log(folder: Path) -> ReleaseLog:
    """Return the log of the releases in a folder, which must hold all of them."""
    files = sorted(folder.glob("release-*.safetensors"))
    found = [SealedFile(file, KIND) for file in files]
    if [file.facts.get("sequence") for file in found] != list(range(1, len(found) + 1)):
        raise SettingsError(
            f"The folder {folder.name!r} does not hold all releases of its study from the first "
            "on. Nothing was combined. Put back the one that is missing."
        )
    return ReleaseLog(digests=[file.digest for file in found])


def read_records(
    study: Study, folder: str | os.PathLike[str]
) -> tuple[Public | None, Public | None]:
    """Read the study's public records and its test records from the copies in `folder`."""
    public, test = (
        None if part is None else part.read(study.schema, folder)
        for part in (study.public, study.test)
    )
    return public, test


def _accept_members(study: Study, contributions: Sequence[Contribution]) -> list[Any]:
    """Return the learners of enough contributions that fit the study, one for each site."""
    if len(contributions) < study.min_sites:
        raise SettingsError(
            f"A release of study {study.name!r} needs at least {study.min_sites} sites; so far "
            f"{len(contributions)} contributed. Nothing was combined. Wait for more."
        )
    sites = [contribution.site for contribution in contributions]
    if len(set(sites)) < len(sites):
        raise SettingsError(
            "A site can be in a release only once. Nothing was combined. Keep its newest "
            "contribution."
        )
    return [study.accept(contribution).learner for contribution in contributions]


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


def _stated_size(study: Study, member: Any) -> int | None:
    """Return the number of records or persons that a release may state of a member."""
    return getattr(member, "public_size_", None) if study.may_state_sizes else None


def _describe_member(study: Study, member: Any) -> str:
    """Say in a few words what a member's weight rests on."""
    size, epsilon = _stated_size(study, member), member.guarantee_.epsilon
    facts = f"n = {size:,}, " if size is not None else ""
    return f"{facts}epsilon = {epsilon:g}" if math.isfinite(epsilon) else f"{facts}exact"
