"""What a site knows of a blind study before it masks anything: roster, cards, and whom it trusts.

The hub supplies the roster and the pad holders' cards, and is believed in nothing of it: the study
names the keyholders, the data owner confirms their keys by another way than the hub, and the cards
are signed with these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from consilience.blind.masked import Masking
from consilience.blind.papers import Papers
from consilience.blind.roster import Roster, Rule, check_cards
from consilience.errors import ContributionRejected, HubUnavailable, SettingsError
from consilience.files.release import Release
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Balance, Ledger
from consilience.privacy.spending import Account, Spending
from consilience.site.folder import SiteFolder
from consilience.study.pages import BlindPage
from consilience.study.study import Study

UNLIMITED = 10_000.0  # the largest limit on epsilon that a ledger takes
MOST_DELTA = 0.5


def alone_account(dataset: str) -> str:
    """Return the name of the account of what holds if everybody else colludes."""
    return f"{dataset} (if everybody else colludes)"


@dataclass(frozen=True)
class Terms:
    """What a site and its data owner know and decided of one blind study.

    Parameters
    ----------
    masking
        Roster, rule, pad holders and whom the site counts on.
    hub
        The key that signed for the hub as a pad holder.
    confirmed
        The keyholders whose keys the data owner confirmed.
    """

    masking: Masking
    hub: str
    confirmed: frozenset[str]

    @property
    def is_accepted(self) -> bool:
        """Whether the data owner confirmed every keyholder, and with that the roster's rule."""
        return self.page.is_accepted

    @property
    def page(self) -> BlindPage:
        """What a page to approve says about it."""
        return BlindPage(self.masking, self.confirmed)


class BlindSite(SiteFolder):
    """What a site does in blind studies beside training: whom it trusts, and what it was shown."""

    def trust_keyholders(
        self, name: str, keys: Sequence[str], *, limit: float | None = None
    ) -> tuple[str, ...]:
        """Record that the data owner confirmed these keyholders by another way than the hub.

        Once all of a study's keyholders are confirmed, its trainings are charged what they cost if
        enough others follow the protocol. What they cost otherwise is kept in an account of its
        own, with `limit` as its lifetime limit on epsilon. Return the keyholders that remain.
        """
        with self._working():
            study, joined = self.study(name), self._joined(name)
            rule = _rule(study)
            unknown = sorted(set(keys) - set(rule.keyholders))
            if unknown:
                raise SettingsError(
                    f"The study {name!r} names no keyholder with the key {unknown[0][:80]!r}. "
                    "Nothing was recorded. Compare the key with what the keyholder told you; the "
                    "study's keys are on its page: consilience study show"
                )
            self._open_alone(self._ledger, limit, reason=f"keyholders of {name} confirmed")
            confirmed = sorted({*joined.keyholders, *keys})
            self._write_joined(name, replace(joined, keyholders=confirmed))
            return tuple(key for key in rule.keyholders if key not in confirmed)

    def _open_alone(self, ledger: Ledger, limit: float | None, *, reason: str) -> Balance:
        """Declare the account of what holds if everybody else colludes, or change its limit."""
        name = alone_account(self.dataset)
        if name in ledger.datasets() and limit is None:
            return ledger.balance(name)
        balance = ledger.balance(self.dataset)
        budget = Budget(
            epsilon=UNLIMITED if limit is None else limit,
            delta=MOST_DELTA,
            unit=balance.unit,
            neighbours=balance.neighbours,
        )
        return ledger.allow(name, budget, reason=reason)

    def count_on(self, name: str, sites: Sequence[str]) -> int:
        """Count on these sites of the roster only, by name; return how many that are with itself.

        A batch is opened only if enough of them are in it, whatever other sites the roster lists.
        """
        with self._working():
            terms = self.terms(name)
            names = terms.masking.roster.names
            unknown = sorted(set(sites) - set(names.values()))
            if unknown:
                raise SettingsError(
                    f"The roster of {name!r} lists no site {unknown[0]!r}. Nothing was recorded. "
                    "The page of a training lists them: consilience site train --dry-run"
                )
            counted = [key for key, site in names.items() if site in sites]
            least = terms.masking.rule.least
            if len({*counted, self.key.public}) < least:
                raise SettingsError(
                    f"A batch of {name!r} needs {least} sites that this site counts on, itself "
                    f"included, and {len({*counted, self.key.public})} were named. Nothing was "
                    "recorded. Name more, or do not take part."
                )
            self._write_joined(name, replace(self._joined(name), counted=counted))
            return len({*counted, self.key.public})

    def terms(self, name: str, *, offline: bool = False) -> Terms:
        """Return what is known of a blind study, once its roster is frozen and all have signed.

        What all have signed is kept here, and nothing else takes its place. Nothing is kept before:
        anybody can put a roster and cards into a shared folder.
        """
        study, joined = self.study(name), self._joined(name)
        rule, papers = _rule(study), Papers(self._place(name))
        roster, cards = papers.roster, papers.cards()
        is_kept = roster is not None and {card.key for card in cards} >= {
            *rule.keyholders,
            joined.hub_key or roster.sealed.key,
        }
        if not is_kept:
            if offline:
                raise HubUnavailable(
                    f"The roster of {name!r} and the cards of its pad holders are not here yet. "
                    "Nothing was masked. Ask for them once without --offline."
                )
            roster, cards = self._hub(joined).fetch_papers(study.name)
        if roster is None:
            raise HubUnavailable(
                f"The roster of {name!r} is not frozen yet. Nothing was masked. Wait until the "
                "coordinator has frozen it."
            )
        if roster.study != study.reference:
            raise SettingsError(
                f"The roster of {name!r} is one of another study. Nothing was masked. Ask the "
                "coordinator."
            )
        hub = joined.hub_key or roster.sealed.key
        cards = [card for card in cards if card.key in {*rule.keyholders, hub}]
        holders = check_cards(roster, rule, hub, cards)
        self._check_listed(name, roster)
        if not is_kept:
            papers.freeze(roster, rule.keyholders)
            for card in cards:
                papers.add_card(card)
        counted = roster.names if joined.counted is None else joined.counted
        masking = Masking(roster, rule, holders, tuple(counted))
        return Terms(masking, hub, frozenset(joined.keyholders) & set(rule.keyholders))

    def check_sources(self, name: str, release: Release) -> None:
        """Refuse a release of a blind study that lists a site which is not on its roster.

        A site that only fetches has seen no roster, and takes the hub's word.
        """
        roster = Papers(self._place(name)).roster if self.study(name).is_blind else None
        strange = {one.site for one in release.sources} - set(
            () if roster is None else roster.names.values()
        )
        if roster is not None and strange:
            raise ContributionRejected(
                f"The hub's release {release.sequence} of {name!r} lists {len(strange)} sites that "
                "are not on the roster which all pad holders signed. It was not kept. Ask the "
                "hub's operator, and tell the keyholders."
            )

    def _check_listed(self, name: str, roster: Roster) -> None:
        """Refuse a roster that lists this site in another way than it is."""
        listed = roster.names.get(self.key.public)
        if listed != self.name:
            raise SettingsError(
                f"The roster of {name!r} does not list this site with its name {self.name!r} and "
                f"its key {self.key.public[:16]}…. Nothing was masked. Tell the coordinator and "
                "the keyholders; a frozen roster cannot be changed, and sites that it lacks need "
                "a new study."
            )

    def spending(self, terms: Terms, key: str) -> Spending:
        """Return which accounts pay for a masked sum."""
        account = Account(self._ledger, self.dataset, key)
        return Spending(account, alone_account(self.dataset) if terms.is_accepted else None)

    def describe_blind(self, name: str) -> dict[str, object]:
        """Say whom the data owner trusts in a blind study, and what the newest file promises."""
        joined, rule = self._joined(name), _rule(self.study(name))
        confirmed = [key for key in rule.keyholders if key in joined.keyholders]
        return {
            "keyholders": list(rule.keyholders),
            "confirmed": confirmed,
            "accepted": len(confirmed) == len(rule.keyholders),
            "needed": rule.least,
        }

    def alone_balance(self, ledger: Ledger) -> Balance | None:
        """Return what is left if everybody else colludes; None if no such account was opened."""
        name = alone_account(self.dataset)
        return ledger.balance(name) if name in ledger.datasets() else None


def _rule(study: Study) -> Rule:
    if study.blind is None:
        raise SettingsError(
            f"The hub of study {study.name!r} is not blind: it has no roster and no keyholders. "
            'Nothing was done. Name a study with hub = "blind".'
        )
    return study.blind
