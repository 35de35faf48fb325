"""The commands `consilience keyholder …`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from consilience.cli.command import Answer, Commands, show

if TYPE_CHECKING:
    from consilience.keyholder.desk import Agreement, Done
    from consilience.keyholder.keyholder import Keyholder

commands = Commands(
    "Hold keys for studies whose hub is blind: nobody sees less than a sum unless all keyholders "
    "and the hub collude."
)


@dataclass(frozen=True)
class Place:
    """Where a keyholder keeps its key and its log."""

    folder: Annotated[
        Path, Option(help="The keyholder's folder.", envvar="CONSILIENCE_KEYHOLDER")
    ] = Path("keyholder")

    def open(self) -> Keyholder:
        """Open the keyholder, whose log is verified."""
        from consilience.keyholder.keyholder import Keyholder

        return Keyholder(self.folder)


@commands.add("init", "keyholder init")
def init(place: Place) -> Answer:
    """Make a keyholder's key and its log in a new folder.

    Tell every site the public key yourself, by phone or on paper: a site that has it from the
    coordinator or the hub alone has no reason to believe in you.
    """
    from consilience.keyholder.keyholder import Keyholder

    made = Keyholder.create(place.folder)
    return Answer(
        {"key": made.key.public},
        f"Made in {place.folder}. Never put this folder back from an old copy: a keyholder that "
        "forgets what it opened could be made to open too much.\n\nPublic key, for the study's "
        f"file and for every site, outside the hub:\n{made.key.public}",
    )


@commands.add("countersign", "keyholder countersign https://hub.example heart-risk")
def countersign(
    *,
    where: Annotated[str, Argument(help="The hub's address, or a shared folder.", metavar="WHERE")],
    study: Annotated[
        str | None, Argument(help="The name of the study; a folder has one.", metavar="STUDY")
    ] = None,
    roster: Annotated[
        str | None,
        Option(help="Do not ask: sign the roster with this digest, which you compared before."),
    ] = None,
    certificate: Annotated[
        Path | None, Option(help="The hub's certificate, if no public authority vouches for it.")
    ] = None,
    place: Place,
) -> Answer:
    """Show the roster of a study, and sign it if you have compared every key on it.

    Ask each site for its key yourself. A hub could make up sites to be left with one real site's
    numbers; what protects the sites from that is that you compared the keys.
    """
    from consilience.errors import SettingsError
    from consilience.keyholder.desk import UNKNOWN_HUB, find_desk

    keyholder = place.open()
    trusted = "" if certificate is None else str(certificate.absolute())
    at = where if "://" in where else str(Path(where).absolute())
    desk = find_desk(at, study, keyholder.key, UNKNOWN_HUB, trusted)
    agreed = desk.agree()
    if roster is None:
        show(_describe(agreed, keyholder.key.public))
        typer.confirm("Did you compare every key with what its site told you?", abort=True)
    elif roster != agreed.roster.digest:
        raise SettingsError(
            f"The roster has another digest: {agreed.roster.digest}. Nothing was signed. Look at "
            "it without --roster, and compare its keys again."
        )
    card = keyholder.countersign(agreed.roster, agreed.rule, agreed.hub)
    keyholder.remember(agreed.study.digest, at, trusted or None)
    desk.post_card(card)
    return Answer(
        {"study": agreed.study.name, "roster": agreed.roster.digest, "seal": card.seal},
        f"Countersigned the roster of {agreed.study.name}. Now let 'consilience keyholder serve' "
        "run, or run 'consilience keyholder open' now and then.",
    )


def _describe(agreed: Agreement, own: str) -> str:
    """Return what a keyholder has to read before it signs."""
    study, rule, roster = agreed.study, agreed.rule, agreed.roster
    lines = [
        f"Study {study.name}, digest {study.digest}",
        f"Purpose: {study.purpose or 'none is stated'}",
        f"Its hub has the key {agreed.hub}",
        f"No sum of fewer than {rule.least} sites is ever opened: {rule.shares} sites' noise "
        f"together is what the guarantee needs, and {rule.spare} may leak theirs.",
        "",
        "Keyholders:",
        *(f"  {key}{'  (you)' if key == own else ''}" for key in rule.keyholders),
        "",
        f"Sites on the roster, {len(roster.names)} in total:",
    ]
    for site in roster.sealed.facts["sites"]:
        lines.append(f"  {site['name']}\n    key {site['key']}")
        lines.append(f"    compared by {site['checked_by']}")
    lines += [
        "",
        f"Digest of the roster: {roster.digest}",
        "",
        "Compare each key with what the site itself told you (consilience site status shows it "
        "there), not with what the hub or the coordinator says. Once signed, no other roster of "
        "this study can be.",
    ]
    return "\n".join(lines)


@commands.add("open", "keyholder open")
def open_waiting(place: Place) -> Answer:
    """Acknowledge the files and open the batches that wait for you, once."""
    from consilience.keyholder.desk import work

    done = work(place.open())
    failed = bool(done.refused or done.unreachable)
    return Answer(done.as_dict(), _tell(done) or "Nothing waits for you.", int(failed))


@commands.add("serve", "keyholder serve")
def serve(
    *,
    every: Annotated[
        float, Option(help="Seconds between two looks; more while a hub does not answer.", min=1.0)
    ] = 30.0,
    place: Place,
) -> None:
    """Do what 'open' does again and again, until you stop it with Ctrl-C.

    It asks the hub; nobody has to reach this machine.
    """
    from consilience.keyholder.desk import serve as repeat

    show("Looking for what waits. Stop with Ctrl-C.", as_error=True)
    before = ""
    for done in repeat(place.open(), every):
        text = _tell(done)
        if text and text != before:
            show(text)
        before = text


def _tell(done: Done) -> str:
    """Say what was done; nothing if there was nothing to do."""
    lines = []
    if done.acknowledged or done.opened:
        lines.append(f"Acknowledged files: {done.acknowledged}. Opened batches: {done.opened}.")
    lines += [f"Refused: {each}" for each in done.refused]
    lines += [f"Not reached: {each}" for each in done.unreachable]
    return "\n".join(lines)


@commands.add("log", "keyholder log")
def log(place: Place) -> Answer:
    """Verify the log and show what was signed and opened.

    Note its head outside this machine: it shows later that the log was not put back.
    """
    keyholder = place.open()
    studies, entries = keyholder.studies(), keyholder.log()
    names = {study.digest: study.name for study in studies}
    lines = [f"Key {keyholder.key.public}"]
    for study in studies:
        state = "closed" if study.is_closed else "open"
        lines.append(f"{study.name} ({state}): roster {study.roster}")
    for entry in entries:
        what = f"{entry.n_files} files of {names[entry.study]}, batch {entry.batch}"
        lines.append(f"{entry.number}. {what}")
    head = entries[-1].head if entries else None
    lines.append(f"The log is whole. Its head is {head or 'none yet'}.")
    facts = {
        "key": keyholder.key.public,
        "studies": [study._asdict() for study in studies],
        "openings": [entry._asdict() for entry in entries],
        "head": head,
    }
    return Answer(facts, "\n".join(lines))


@commands.add("close", "keyholder close heart-risk")
def close(
    *,
    study: Annotated[str, Argument(help="The name of the study, or its digest.", metavar="STUDY")],
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    place: Place,
) -> Answer:
    """Destroy your key for a study that has ended: then nobody can open anything of it any more."""
    from consilience.errors import SettingsError

    keyholder = place.open()
    found = [each for each in keyholder.studies() if study in (each.name, each.digest)]
    if len(found) != 1:
        raise SettingsError(
            f"This keyholder has signed {'several studies' if found else 'no study'} named "
            f"{study!r}. Nothing was destroyed. 'consilience keyholder log --json' lists them; "
            "name one by its digest."
        )
    if not yes:
        typer.confirm(
            f"Destroy the key of {found[0].name} for good? Batches that you have not opened never "
            "will be.",
            abort=True,
        )
    keyholder.close(found[0].digest)
    return Answer(
        {"study": found[0].digest, "closed": True},
        f"The key of {found[0].name} is destroyed. Copies of the folder, such as backups, still "
        "have it: destroy those too.",
    )
