"""The commands `consilience hub …` for accounts."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer import Argument, Option

from consilience.cli.command import Answer
from consilience.cli.hub import OPERATOR, Place, commands
from consilience.cli.options import Yes, confirm

__all__ = ["commands"]

Name = Annotated[str, Argument(help="The account's name.")]
RoleName = Annotated[
    Literal["operator", "coordinator", "auditor"],
    Option(
        help="Operators may do everything, auditors may only read, and coordinators may do "
        "everything with their studies but manage accounts."
    ),
]
Only = Annotated[
    list[str] | None,
    Option("--study", help="A study of this coordinator; can be repeated. Without it, all."),
]
Password = Annotated[
    str | None,
    Option(
        help="You are asked for it if you do not give it.",
        envvar="CONSILIENCE_PASSWORD",
        show_envvar=True,
    ),
]


def _ask(password: str | None) -> str:
    if password is None:
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    return str(password)


@commands.add("accounts", "hub accounts")
def list_accounts(place: Place) -> Answer:
    """List the accounts, their roles and studies."""
    with place.open() as hub:
        rows = hub.store.accounts()
    listed = [
        {name: row[name] for name in ("name", "role", "studies", "status", "created")}
        for row in rows
    ]
    lines = [
        f"{row['name']}: {row['role']}"
        + ("" if row["studies"] is None else f" of {', '.join(row['studies']) or 'no study'}")
        + ("" if row["status"] == "active" else f", {row['status']}")
        for row in rows
    ]
    return Answer({"accounts": listed}, "\n".join(lines) or "There are no accounts.")


@commands.add("add-account", "hub add-account lee --role auditor")
def add_account(
    *,
    name: Name,
    role: RoleName = "coordinator",
    study: Only = None,
    password: Password = None,
    no_password: Annotated[
        bool,
        Option("--no-password", help="The account is for people of an identity provider only."),
    ] = False,
    place: Place,
) -> Answer:
    """Add an account for the dashboard and the API."""
    from consilience.hub.roles import Role

    with place.open() as hub:
        given = None if no_password else _ask(password)
        hub.accounts.add(name, given, OPERATOR, role=Role(role), only=study)
    said = "can log in once it is bound" if no_password else "can log in"
    return Answer({"account": name, "role": role}, f"{name} {said}.")


@commands.add("set-role", "hub set-role anna --role coordinator --study heart-risk")
def set_role(*, name: Name, role: RoleName, study: Only = None, place: Place) -> Answer:
    """Change what an account may do, from its next request on.

    Its unused invitations to studies that it is not for any more are void.
    """
    from consilience.hub.roles import Role

    with place.open() as hub:
        hub.store.set_role(name, OPERATOR, role=Role(role), only=study)
    return Answer({"account": name, "role": role}, f"{name} is now {role}.")


@commands.add("set-password", "hub set-password anna")
def set_password(*, name: Name, password: Password = None, place: Place) -> Answer:
    """Give an account another password, which ends its sessions."""
    with place.open() as hub:
        hub.accounts.set_password(name, _ask(password), OPERATOR)
    return Answer({"account": name}, f"{name} can log in with the new password.")


Issuer = Annotated[
    str,
    Option(
        "--oidc-issuer", help="The identity provider's issuer.", envvar="CONSILIENCE_OIDC_ISSUER"
    ),
]


@commands.add("bind", "hub bind anna --subject 8f3a --oidc-issuer https://login.example.org")
def bind(
    *,
    name: Name,
    subject: Annotated[str, Option(help="The claim sub of this person at the provider.")],
    issuer: Issuer,
    place: Place,
) -> Answer:
    """Let somebody log in to an account through the identity provider."""
    with place.open() as hub:
        hub.store.bind(name, issuer, subject, OPERATOR)
    return Answer({"account": name, "subject": subject}, f"{name} can log in at {issuer}.")


@commands.add("unbind", "hub unbind anna")
def unbind(name: Name, place: Place) -> Answer:
    """Remove an account's identity at the provider, which ends its sessions."""
    with place.open() as hub:
        hub.store.unbind(name, OPERATOR)
    return Answer({"account": name}, f"Only a password lets {name} log in now.")


@commands.add("require-factor", "hub require-factor anna")
def require_factor(
    *,
    name: Name,
    no: Annotated[bool, Option("--no", help="Instead, let it log in without one again.")] = False,
    place: Place,
) -> Answer:
    """Require a second factor of an account before it can do anything."""
    with place.open() as hub:
        hub.store.require_factor(name, OPERATOR, needed=not no)
    said = "needs no second factor" if no else "needs a second factor"
    return Answer({"account": name, "needed": not no}, f"{name} {said}.")


@commands.add("reset-factor", "hub reset-factor anna")
def reset_factor(name: Name, place: Place) -> Answer:
    """Remove the second factor of somebody who has lost it, which ends the account's sessions."""
    with place.open() as hub:
        hub.store.drop_factor(name, OPERATOR)
    return Answer({"account": name}, f"{name} has no second factor now.")


@commands.add("disable", "hub disable anna")
def disable(name: Name, place: Place, *, yes: Yes = False) -> Answer:
    """Disable an account: its sessions and unused invitations end, and nobody can log in."""
    confirm(f"Disable {name!r}, which ends its sessions and unused invitations?", yes=yes)
    with place.open() as hub:
        hub.store.set_status(name, OPERATOR, active=False)
    return Answer({"account": name, "status": "disabled"}, f"{name} can no longer log in.")


@commands.add("enable", "hub enable anna")
def enable(name: Name, place: Place) -> Answer:
    """Enable an account that was disabled."""
    with place.open() as hub:
        hub.store.set_status(name, OPERATOR, active=True)
    return Answer({"account": name, "status": "active"}, f"{name} can log in again.")
