"""What an account may do: the one rule that every page and every address for machines asks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from consilience.protocol import Refusal


class Role(StrEnum):
    """What an account is for."""

    OPERATOR = "operator"  # everything, also accounts
    COORDINATOR = "coordinator"  # its studies, or every study
    AUDITOR = "auditor"  # reads everything and changes nothing


class Action(Enum):
    """What an address lets its visitor do."""

    OPEN = "open"  # what anyone may do, or whoever signs the request
    VIEW = "view"  # read a study: sites may too, each its own
    LOOK = "look"  # read what is for accounts
    CHANGE = "change"  # change a study, its sites and its releases
    ADD = "add"  # add a study, or work on a draft of one
    DRAFT = "draft"  # read drafts of studies
    LOG = "log"  # read the audit log, of one study or of the whole hub
    MANAGE = "manage"  # add, change and disable accounts
    OWN = "own"  # an account's own password and second factor
    LEAVE = "leave"  # log out


_FOR_SITES = {Action.OPEN, Action.VIEW, Action.LEAVE}
_CHANGES = {Action.CHANGE, Action.ADD, Action.MANAGE}
_WITHOUT_FACTOR = {Action.OPEN, Action.OWN, Action.LEAVE}
_WHOLE_HUB = {Action.ADD, Action.DRAFT, Action.LOG}  # needs every study, where no study is named


@dataclass(frozen=True)
class Account:
    """Someone who is logged in: a name, a role, and the studies that it is for."""

    name: str
    role: Role
    studies: frozenset[str] | None = None  # None is every study, also those to come
    must_enrol: bool = False  # may do nothing before it has a second factor

    @property
    def actor(self) -> str:
        """The account as the audit log names it."""
        return f"{self.role}:{self.name}"

    def sees(self, study: str) -> bool:
        """Tell whether a study is one of those that this account is for."""
        return self.studies is None or study in self.studies

    def opens(self, owner: str) -> bool:
        """Tell whether a draft of this owner is there for the account: coordinators see theirs."""
        return owner == self.name or self.role is not Role.COORDINATOR

    def may(self, action: Action, study: str | None = None) -> bool:
        """Tell whether an action is allowed, on a study if one is named."""
        return self._refusal(action, study) is None

    def check(self, action: Action, study: str | None = None) -> None:
        """Refuse what is not allowed."""
        if (refusal := self._refusal(action, study)) is not None:
            raise refusal

    def _refusal(self, action: Action, study: str | None) -> Refusal | None:
        if self.must_enrol and action not in _WITHOUT_FACTOR:
            return Refusal(
                "not-allowed",
                "Your account needs a second factor first. Set it up on the page of your account.",
            )
        if study is not None and not self.sees(study):
            return Refusal("not-found", "There is no such study.")
        if action in _CHANGES and self.role is Role.AUDITOR:
            return Refusal("not-allowed", "An auditor reads everything and changes nothing.")
        if action is Action.MANAGE and self.role is not Role.OPERATOR:
            return Refusal("not-allowed", "Accounts are managed by the hub's operators.")
        if action in _WHOLE_HUB and study is None and self.studies is not None:
            return Refusal("not-allowed", "Your account is for some of the hub's studies only.")
        return None


def check_site(action: Action) -> None:
    """Refuse a site that looks at its own study what is for accounts."""
    if action not in _FOR_SITES:
        raise Refusal("not-allowed", "This page is for the study's coordinators.")
