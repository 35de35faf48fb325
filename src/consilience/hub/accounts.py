"""What a hub does for accounts: adding them, and giving them passwords."""

from __future__ import annotations

from collections.abc import Collection

from consilience.hub.auth import hash_password
from consilience.hub.roles import Role
from consilience.hub.store import Store
from consilience.protocol import Refusal

_NAME_RULE = "An account's name must have 1 to 100 printable characters, and no slash."


class AccountDesk:
    """Everything that is asked of a hub about its accounts."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def add(
        self,
        name: str,
        password: str | None,
        actor: str,
        *,
        role: Role = Role.COORDINATOR,
        only: Collection[str] | None = None,
    ) -> None:
        """Add an account for every study, or `only` for some; without a password none fits."""
        if not (1 <= len(name) <= 100 and name.isprintable() and "/" not in name):
            raise Refusal("malformed", _NAME_RULE)
        stored = "none" if password is None else hash_password(password)
        self.store.add_account(name, stored, actor, role=role, only=only)

    def set_password(self, name: str, password: str, actor: str) -> None:
        """Give an account another password, which ends its sessions."""
        self.store.set_password(name, hash_password(password), actor)
