"""The commands `consilience ledger …`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import consilience as cs
from consilience.cli.command import Answer, Commands
from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.privacy.ledger import Balance, Ledger, Note

commands = Commands("Read a site's ledger: what its owner allowed and what was charged.")

LedgerPath = Annotated[Path, Argument(help="The ledger file.", metavar="LEDGER")]


@commands.add("show", "ledger show demo-report/sites/northgate/ledger.sqlite")
def show(
    path: LedgerPath,
    dataset: Annotated[
        str | None, Option(help="Show only this data set; needed if it was never charged.")
    ] = None,
) -> Answer:
    """Show what the owner of each data set allowed, what was spent, and every charge."""
    from consilience.privacy.guarantee import show_bound

    ledger = _open(path)
    charges = ledger.charges(dataset)
    names = [dataset] if dataset is not None else ledger.datasets()
    balances = [ledger.balance(name) for name in names]
    amounts = ("limit", "spent", "left")
    facts = {
        "balances": [
            {**asdict(balance), **{name: getattr(balance, name)._asdict() for name in amounts}}
            for balance in balances
        ],
        "charges": [
            {**one.receipt, "purpose": one.purpose, "state": one.state, "time": one.time}
            for one in charges
        ],
        "notes": [note._asdict() for note in ledger.notes(dataset)],
    }
    lines = [line for balance in balances for line in describe_balance(balance)]
    lines += [describe_note(note) for note in ledger.notes(dataset)]
    lines += [
        f"{charge.time}  {charge.dataset}  {charge.purpose}  "
        f"epsilon={show_bound(charge.epsilon)} delta={show_bound(charge.delta)}  {charge.state}"
        for charge in charges
    ]
    return Answer(facts, "\n".join(lines) or "No data owner has set a limit yet.")


@commands.add("verify", "ledger verify site/ledger.sqlite --head 4f0c...")
def verify(
    path: LedgerPath,
    head: Annotated[
        str | None, Option(help="A head or receipt hash that you noted earlier.")
    ] = None,
) -> Answer:
    """Check the whole chain of charges and print its head; note it outside this machine."""
    newest = _open(path).verify(head)
    return Answer({"valid": True, "head": newest}, f"The chain is whole. Its head is {newest}")


def describe_note(note: Note) -> str:
    """Say what an entry that costs nothing records."""
    kinds = {
        "allow": "limit set",
        "permit": "exact contributions allowed",
        "forbid": "exact contributions forbidden",
        "exact": "exact: no epsilon bounds it",
    }
    study = f"  study {note.study[:16]}" if note.study else ""
    return f"{note.time}  {note.dataset}  {kinds[note.kind]}  {note.purpose or ''}{study}".rstrip()


def describe_balance(balance: Balance) -> Iterator[str]:
    """Say what the data owner allowed, and what was spent of it."""
    from consilience.privacy.guarantee import show_bound, show_left

    yield f"{balance.dataset} (per {balance.unit}, {balance.neighbours})"
    for name in ("epsilon", "delta", "rho"):
        limit, spent, left = (
            getattr(amounts, name) for amounts in (balance.limit, balance.spent, balance.left)
        )
        if limit is not None:
            allowed = f"limit {show_bound(limit)}, spent {show_bound(spent)}"
            yield f"  {name:<8} {allowed}, left {show_left(left)}"


def _open(path: Path) -> Ledger:
    if not path.exists():  # opening would create an empty one
        raise SettingsError(
            f"There is no ledger at {str(path)!r}. Nothing was read or created. Check the path."
        )
    return cs.Ledger(path)
