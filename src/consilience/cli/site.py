"""The commands `consilience site …`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

import consilience as cs
from consilience.cli.command import Answer, Commands, Json, show
from consilience.cli.options import FilePath, Neighbours, StudyName, TablePath
from consilience.errors import SettingsError
from consilience.text import printable

if TYPE_CHECKING:
    from consilience.site.site import Preview

commands = Commands("Take part: join a study, train within a budget, submit, fetch.")

Folder = Annotated[Path, Option("--folder", help="The site's folder.", envvar="CONSILIENCE_SITE")]
SITE = Path("site")


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """What a data owner allows."""

    epsilon: Annotated[
        float, Option(help="What all trainings together may cost; the lifetime limit.")
    ]
    delta: Annotated[
        float, Option(help="The same for delta; 0 allows only trainings with pure epsilon.")
    ] = 0.0
    neighbours: Annotated[Neighbours, Option(help="replace-one, or add-remove for trees.")] = (
        "replace-one"
    )
    unit: Annotated[Literal["record", "person"], Option(help="What is protected.")] = "record"


@dataclass(frozen=True, kw_only=True)
class ApprovalOptions:
    """How a training is approved."""

    dry_run: Annotated[
        bool, Option("--dry-run", help="Write the page for approval; train nothing.")
    ] = False
    yes: Annotated[bool, Option("--yes", help="Do not ask; the approval is on file.")] = False
    out: Annotated[Path, Option(help="Where --dry-run writes the page.")] = Path("approval.html")


@commands.add("init", "site init --name north --dataset patients --epsilon 3")
def init(
    name: Annotated[str, Option(help="The site's name, as others will see it.")],
    dataset: Annotated[
        str, Option(help="The site's own name for its table; the budget is tied to it.")
    ],
    budget: BudgetOptions,
    folder: Folder = SITE,
) -> Answer:
    """Create a site: its key, its ledger, and the budget that its data owner allows."""
    from consilience.privacy.guarantee import Budget

    site = cs.Site.init(folder, name=name, dataset=dataset, budget=Budget(**vars(budget)))
    return Answer(
        {"site": site.name, "folder": str(folder), "key": site.key.public},
        f"Site {site.name!r} is ready in {folder}.\nIts public key is {site.key.public}\n"
        f"Back up {folder / 'key.pem'}, which signs for the site, and "
        f"{folder / 'ledger.sqlite'}, which keeps it within its budget.",
    )


@commands.add("join", "site join https://hub.example 7Q2K-...")
def join(
    where: Annotated[str, Argument(help="The hub's address, or a shared folder.", metavar="HUB")],
    invitation: Annotated[
        str, Argument(help="The one-time invitation, if you join at a hub.")
    ] = "",
    fetch_only: Annotated[
        bool, Option("--fetch-only", help="Only fetch releases; do not contribute.")
    ] = False,
    certificate: Annotated[
        str | None, Option(help="The hub's certificate file, if no public authority signed it.")
    ] = None,
    folder: Folder = SITE,
) -> Answer:
    """Join a study at a hub or through a shared folder, and describe it."""
    from consilience.study.pages import of_study

    site = cs.Site(folder)
    if where.startswith(("http://", "https://")):
        study = site.join(where, invitation, fetch_only=fetch_only, certificate=certificate)
    else:
        study = site.join_folder(where)
    hint = f"consilience site train {study.name} TABLE --epsilon E --dry-run"
    text = f"{of_study(study).as_text()}\nJoined. Nothing was trained or sent. Next: {hint}"
    return Answer({**study.reference, "hub": where}, text)


@commands.add("train", "site train heart patients.csv --epsilon 1")
def train(
    study: StudyName,
    table: TablePath,
    epsilon: Annotated[float, Option(help="What this training may cost.")],
    approval: ApprovalOptions,
    folder: Folder = SITE,
    as_json: Json = False,
) -> Answer:
    """Show what will leave the site and what it costs, ask, charge the ledger, train and sign."""
    from consilience.files.certificate import of_contribution

    site = cs.Site(folder)
    if approval.dry_run:
        shown, file = site.preview(study, epsilon=epsilon), approval.out
        file.write_text(shown.page.as_html(), encoding="utf-8")
        facts = {"page": str(file), "epsilon": epsilon, "left": shown.left, "fits": shown.fits}
        filed = f"Written for filing: {file}. Nothing was trained or charged."
        return Answer(facts, f"{shown.page.as_text()}\n{filed}")

    def approve(preview: Preview) -> bool:
        show(preview.page.as_text(), as_error=as_json)
        return approval.yes or (
            sys.stdin.isatty() and typer.confirm("Train, and charge this to the ledger?")
        )

    path = site.train(study, table, epsilon=epsilon, approve=approve)
    if path is None:
        raise SettingsError(
            "The training was not approved. Nothing was trained or charged. Answer yes, or use "
            "--yes where nobody can be asked and the approval is on file."
        )
    made = cs.Contribution.load(path, trusted=site.study(study).trusted)
    return Answer(
        {"file": str(path), "digest": made.digest, "guarantee": made.guarantee.as_dict()},
        f"{of_contribution(made).as_text()}\nSigned and kept: {path}\n"
        f"Nothing was sent. Next: consilience site submit {study}",
    )


@commands.add("submit", "site submit heart")
def submit(study: StudyName, folder: Folder = SITE) -> Answer:
    """Send the newest contribution; sending it twice changes nothing."""
    answer = cs.Site(folder).submit(study)
    return Answer(
        answer,
        f"Handed over: {printable(str(answer.get('state')))}, digest {answer.get('digest')}\n"
        f"Next, once enough sites have submitted: consilience site fetch {study}",
    )


@commands.add("fetch", "site fetch heart")
def fetch(study: StudyName, folder: Folder = SITE) -> Answer:
    """Fetch the newest release, check the hub's signature, and describe the release."""
    from consilience.files.certificate import of_release

    release = cs.Site(folder).fetch(study)
    if release is None:
        raise SettingsError(
            "There is no release to fetch: too few sites contribute at present. Nothing was "
            "changed. Try again when enough sites have contributed."
        )
    file = folder / "studies" / study / release.filename
    facts = {"file": str(file), "sequence": release.sequence, "digest": release.digest}
    return Answer(
        {**facts, "guarantee": release.guarantee.as_dict()},
        f"{of_release(release).as_text()}\nChecked and kept: {file}\n"
        f"Next: consilience release predict {file} {folder} TABLE",
    )


@commands.add("withdraw", "site withdraw heart")
def withdraw(study: StudyName, folder: Folder = SITE) -> Answer:
    """Take the site's contribution out of future releases."""
    return Answer(
        cs.Site(folder).withdraw(study),
        "Withdrawn: future releases are made without it. Published releases stay with those who "
        "have them, and the ledger's charge stays, because the contribution was handed out.",
    )


@commands.add("open", "site open heart")
def open_page(study: StudyName, folder: Folder = SITE) -> Answer:
    """Print a link to the site's own page on the dashboard; it works once, for a few minutes."""
    link = cs.Site(folder).open_view(study)
    return Answer({"link": link}, link)


@commands.add("status", "site status")
def status(folder: Folder = SITE) -> Answer:
    """Show what the site has joined, trained, submitted and fetched, and the budget left."""
    site = cs.Site(folder)
    balance = site.ledger.balance(site.dataset)
    left = None if balance.left.epsilon is None else float(balance.left.epsilon)
    rows = [site.status(name) for name in site.studies]
    facts = {"site": site.name, "dataset": site.dataset, "epsilon_left": left}
    lines = [
        f"{site.name}: {'no limit on epsilon' if left is None else f'epsilon {left:g} left'} for "
        f"data set {site.dataset!r}"
    ]
    for row in rows:
        sent, release = row["submitted"] or "none", row["release"] or "none"
        done = f"{row['contributions']} trained, newest submitted: {sent}, release: {release}"
        lines.append(
            f"  {row['study']} at {row['hub']}: {'fetches only' if row['fetch_only'] else done}"
        )
    if not rows:
        lines.append("  no study yet: consilience site join HUB INVITATION")
    return Answer({**facts, "key": site.key.public, "studies": rows}, "\n".join(lines))


@commands.add("rotate-key", "site rotate-key")
def rotate_key(folder: Folder = SITE) -> Answer:
    """Replace the site's key, here and at every hub where it is enrolled."""
    key = cs.Site(folder).rotate_key()
    return Answer({"key": key}, f"The new public key is {key}")


@commands.add("backup", "site backup ledger-2026-11.sqlite")
def backup(path: FilePath, folder: Folder = SITE) -> Answer:
    """Copy the ledger and print the head of its chain; note it outside this machine."""
    head = cs.Site(folder).backup(path)
    facts = {"file": str(path), "head": head}
    return Answer(facts, f"Copied to {path}. Head of the chain: {head}")


@commands.add("recover", "site recover ledger-2026-11.sqlite")
def recover(path: FilePath, folder: Folder = SITE) -> Answer:
    """Replace a lost ledger by a backup; charges known from contributions are repeated."""
    missing = cs.Site(folder).recover(path)
    charges = "1 charge" if missing == 1 else f"{missing} charges"
    text = f"Restored. {charges} made after the backup had to be repeated."
    return Answer({"charges_made_again": missing}, text)
