"""The commands `consilience site …`."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer
from typer import Argument, Option

import consilience as cs
from consilience.cli.command import Answer, Commands, Json, show
from consilience.cli.ledger import describe_balance, describe_note
from consilience.cli.options import (
    PREDICTIONS,
    FilePath,
    IdColumn,
    MappingPath,
    Neighbours,
    OwnTable,
    PredictionsPath,
    StudyName,
    check_out,
    open_mapped,
)
from consilience.errors import ConsilienceError, HubUnavailable, SettingsError
from consilience.text import quote

if TYPE_CHECKING:
    from consilience.site.site import Preview

commands = Commands("Take part: join a study, train within a budget, submit, fetch.")

Folder = Annotated[Path, Option("--folder", help="The site's folder.", envvar="CONSILIENCE_SITE")]
SITE = Path("site")
HERE_ALONE = "What is said about the table is shown here alone: it is in no file, and is not sent."
MOST_LOG = 64 << 20  # bytes of a log that another site wrote


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
    approved: Annotated[
        str | None,
        Option(
            help="Do not ask: the page with this digest was approved. --dry-run prints the digest.",
            metavar="DIGEST",
        ),
    ] = None
    anew: Annotated[
        bool, Option("--anew", help="Give up a training that was interrupted; its charge stays.")
    ] = False
    offline: Annotated[
        bool,
        Option(
            "--offline",
            help="Ask no hub what it has of this site; the page to approve says so.",
        ),
    ] = False
    skip: Annotated[
        list[str] | None,
        Option(help="A study whose hub is not asked that; repeatable.", metavar="STUDY"),
    ] = None
    out: Annotated[Path, Option(help="Where --dry-run writes the page.")] = Path("approval.html")
    mapping: MappingPath = None


class Asking(TypedDict):
    """Which hubs are not asked what they have of the site."""

    offline: bool
    skip: Sequence[str]


class Chosen(TypedDict, total=False):
    """What is chosen for one training."""

    epsilon: float | None
    learner: str | None


@commands.add("init", "site init --name north --dataset patients --epsilon 3")
def init(
    name: Annotated[str, Option(help="The site's name, as others will see it.")],
    dataset: Annotated[
        str, Option(help="The site's own name for its table; the budget is tied to it.")
    ],
    budget: BudgetOptions,
    allow_exact: Annotated[
        bool,
        Option(
            "--allow-exact",
            help="Let exact models leave, for studies with a trusted hub. No limit bounds them.",
        ),
    ] = False,
    folder: Folder = SITE,
) -> Answer:
    """Create a site: its key, its ledger, and the budget that its data owner allows."""
    from consilience.privacy.guarantee import Budget

    site = cs.Site.init(
        folder,
        name=name,
        dataset=dataset,
        budget=Budget(**vars(budget)),
        allow_exact=allow_exact,
    )
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
    at_hub = where.startswith(("http://", "https://"))
    if at_hub:
        study = site.join(where, invitation, fetch_only=fetch_only, certificate=certificate)
    elif invitation or certificate:
        raise SettingsError(
            f"{where!r} is a folder, and an invitation or a certificate is for a hub. Nothing was "
            "joined. Leave it out, or give the hub's address, which begins with https://"
        )
    else:
        study = site.join_folder(where, fetch_only=fetch_only)
    epsilon = "" if study.trusted else " --epsilon E"
    hint = f"consilience site train {study.name} TABLE{epsilon} --dry-run"
    if fetch_only:
        hint = f"consilience site fetch {study.name}"
    sent = (
        "The hub was sent the invitation, this site's name and its public key"
        if at_hub
        else "Nothing was sent"
    )
    text = f"{of_study(study).on_screen()}\nJoined. {sent}. Nothing was trained. Next: {hint}"
    return Answer({**study.reference, "hub": where}, text)


@commands.add("check", "site check heart patients.csv")
def check(
    study: Annotated[
        str, Argument(help="A joined study's name, or a study file, also a draft.", metavar="STUDY")
    ],
    table: OwnTable,
    mapping: MappingPath = None,
    most: Annotated[int, Option(help="How many values to list; all are counted.", min=0)] = 20,
    folder: Folder = SITE,
) -> Answer:
    """List the values of a table that do not fit; nothing is charged, written or sent.

    The list quotes records, and is printed on this terminal alone. The exit code is 0 only if the
    table fits.
    """
    from consilience.study.toml import read_schema
    from consilience.tables.check import check_table

    if study.endswith(".toml"):
        schema = read_schema(study)
        records = open_mapped(table, schema, mapping)
    else:
        site = cs.Site(folder)
        schema, records = site.study(study).schema, site.open_table(study, table, mapping)
    found = check_table(schema, records, most=most)
    return Answer(
        found.as_dict(with_values=True),
        f"{found.describe()}\n{HERE_ALONE} Nothing was charged.",
        int(not found.fits),
    )


@commands.add("train", "site train heart patients.csv --epsilon 1")
def train(
    study: StudyName,
    table: OwnTable,
    epsilon: Annotated[
        float | None, Option(help="What this training may cost; none if the hub is trusted.")
    ] = None,
    learner: Annotated[
        str | None, Option(help="One of the study's learners, where sites may choose.")
    ] = None,
    *,
    approval: ApprovalOptions,
    folder: Folder = SITE,
    as_json: Json = False,
) -> Answer:
    """Show what will leave the site and what it costs, ask, charge the ledger, train and sign."""
    site, chosen = cs.Site(folder), Chosen(epsilon=epsilon, learner=learner)
    records = site.open_table(study, table, approval.mapping)
    return _train_approved(site, study, records, approval, chosen, as_json=as_json)


@commands.add("aggregate", "site aggregate heart patients.csv --epsilon 1")
def aggregate(
    study: StudyName,
    table: OwnTable,
    epsilon: Annotated[float, Option(help="What weighing may cost.")],
    *,
    approval: ApprovalOptions,
    folder: Folder = SITE,
    as_json: Json = False,
) -> Answer:
    """Weigh the models of the other sites on this site's own records, shown and approved first."""
    from consilience.site.site import Weighing

    site = cs.Site(folder)
    records = site.open_table(study, table, approval.mapping)
    weighing = Weighing(records, site.gather_members(study))
    return _train_approved(
        site, study, weighing, approval, Chosen(epsilon=epsilon), as_json=as_json
    )


def _train_approved(
    site: cs.Site,
    study: str,
    table: object,
    approval: ApprovalOptions,
    chosen: Chosen,
    *,
    as_json: bool,
) -> Answer:
    """Show what a training discloses and costs, and train once that is approved."""
    from consilience.files.certificate import of_contribution
    from consilience.site.site import Weighing
    from consilience.tables.check import check_table

    asking = Asking(offline=approval.offline, skip=approval.skip or ())
    if approval.dry_run:
        shown = site.preview(study, table=table, **chosen, **asking)
        records = table.table if isinstance(table, Weighing) else table
        checked = check_table(site.study(study).schema, records)
        file = check_out(approval.out, ".html")
        file.write_text(shown.page_to_file.as_html(), encoding="utf-8")
        facts: dict[str, object] = {
            "page": str(file),
            "epsilon": chosen["epsilon"],
            "left": shown.left,
        }
        facts |= {"fits": shown.fits, "table": checked.as_dict(with_values=False)}
        fits = "" if shown.fits else "This training does not fit what the data owner allows.\n"
        filed = f"{fits}Written for filing: {file}. Nothing was trained or recorded."
        said = f"{checked.describe()}\n{HERE_ALONE}"
        text = f"{shown.page.on_screen()}\n{said}\n{filed}"
        if checked.fits:
            text += f"\nOnce approved: --approved {shown.digest}"
        return Answer({**facts, "digest": shown.digest}, text, int(not checked.fits))

    def approve(preview: Preview) -> bool:
        show(preview.page.on_screen(), as_error=as_json)
        if approval.approved is not None:
            return approval.approved == preview.digest
        question = "Train, and enter this in the ledger?"
        return sys.stdin.isatty() and typer.confirm(question, err=as_json)

    head = site.ledger.head()
    path = site.train(study, table, approve=approve, anew=approval.anew, **chosen, **asking)
    if path is None:
        raise SettingsError(
            "The training was not approved. Nothing was trained or recorded. Answer yes; where "
            "nobody can be asked, name the digest of the page that was approved with --approved. A "
            "page differs from an earlier one if anything on it does, such as what is left."
        )
    made = cs.Contribution.load(path, trusted=site.study(study).trusted)
    charged = site.ledger.head() != head
    again = "" if charged else "It was paid for before. Nothing was charged now; see --anew.\n"
    made_of = {"file": str(path), "digest": made.digest, "guarantee": made.guarantee.as_dict()}
    return Answer(
        {**made_of, "charged": charged},
        f"{of_contribution(made).on_screen()}\n{again}Signed and kept: {path}\n"
        f"The file was not sent. Next: consilience site submit {study}",
    )


@commands.add("trust-keyholder", "site trust-keyholder heart 3f9a... 71c0...")
def trust_keyholder(
    study: StudyName,
    keys: Annotated[
        list[str] | None,
        Argument(help="Keys that the keyholders told you themselves.", metavar="KEY..."),
    ] = None,
    limit: Annotated[
        float | None,
        Option(help="What all trainings together may cost if everybody else colludes."),
    ] = None,
    folder: Folder = SITE,
) -> Answer:
    """Record that the data owner confirmed keyholders of a blind study, and trusts one of them."""
    site = cs.Site(folder)
    missing = site.trust_keyholders(study, keys or (), limit=limit)
    rest = (
        f"Not confirmed: {', '.join(missing)}. Until all are, a training is charged what it costs "
        "if everybody else colludes."
        if missing
        else "All keyholders of the study are confirmed. A training is charged what it costs if "
        "enough others follow the protocol; what it costs otherwise is kept in an account of its "
        "own."
    )
    return Answer(site.describe_blind(study), f"Recorded. {rest}")


@commands.add("count-on", 'site count-on heart "South clinic" "West clinic"')
def count_on(
    study: StudyName,
    sites: Annotated[list[str], Argument(help="Names of sites on the roster.", metavar="SITE...")],
    folder: Folder = SITE,
) -> Answer:
    """Count on these sites of a blind study's roster only; others do not make a batch large."""
    counted = cs.Site(folder).count_on(study, sites)
    return Answer(
        {"study": study, "counted": counted},
        f"Recorded. With itself this site counts on {counted} sites of {study}; its next file says "
        "so.",
    )


@commands.add("noise", "site noise heart")
def noise(
    study: StudyName,
    offline: Annotated[bool, Option("--offline", help="Ask no hub what it has.")] = False,
    skip: Annotated[
        list[str] | None, Option(help="A study whose hub is not asked that.", metavar="STUDY")
    ] = None,
    folder: Folder = SITE,
) -> Answer:
    """Make a file of noise only, so that a batch of others can be opened; it costs nothing."""
    path = cs.Site(folder).mask_noise(study, offline=offline, skip=skip or ())
    made = cs.Contribution.load(path)
    return Answer(
        {"file": str(path), "digest": made.digest},
        f"Signed and kept: {path}\nIt holds a share of the noise and no record; nothing was "
        f"charged. The file was not sent. Next: consilience site submit {study}",
    )


@commands.add("submit", "site submit heart")
def submit(
    study: StudyName,
    approved: Annotated[
        str | None,
        Option(help="Do not ask: send the file with this digest only.", metavar="DIGEST"),
    ] = None,
    offline: Annotated[
        bool, Option("--offline", help="Do not ask first what hubs have of this site.")
    ] = False,
    skip: Annotated[
        list[str] | None,
        Option(help="A study whose hub is not asked that; repeatable.", metavar="STUDY"),
    ] = None,
    folder: Folder = SITE,
    as_json: Json = False,
) -> Answer:
    """Show what leaves, ask, and send the newest contribution; twice changes nothing.

    Where nobody can be asked, the newest file is sent, unless --approved names another.
    """
    from consilience.files.certificate import of_contribution

    def approve(made: cs.Contribution) -> bool:
        if approved is not None:
            return approved == made.digest
        if not sys.stdin.isatty():
            return True  # its training was approved
        show(of_contribution(made).on_screen(), as_error=as_json)
        return typer.confirm("Send this file? It cannot be taken back.", err=as_json)

    site = cs.Site(folder)
    answer = site.submit(study, offline=offline, skip=skip or (), approve=approve)
    said = f"The hub says {quote(answer['state'])}."
    if site.is_in_folder(study):
        said = "It is in the shared folder."
    if answer["not_compared"]:
        said += (
            f"\nThe hub of {', '.join(answer['not_compared'])} did not say what it has of this "
            "site, so that nothing tells whether an older copy of this folder was in use."
        )
    return Answer(
        answer,
        f"Handed over, digest {answer['digest']}. {said}\n"
        f"Next, once enough sites have submitted: consilience site fetch {study}",
    )


@commands.add("fetch", "site fetch heart")
def fetch(
    study: StudyName,
    new_log: Annotated[
        bool,
        Option(
            "--new-log",
            help="Accept that the hub's releases are others than seen before, or carry no log.",
        ),
    ] = False,
    folder: Folder = SITE,
) -> Answer:
    """Fetch the current release, check it against study and log, and describe it."""
    from consilience.files.certificate import of_release

    site = cs.Site(folder)
    release = site.fetch(study, new_log=new_log)
    if release is None and site.is_in_folder(study):
        raise SettingsError(
            "The shared folder offers no release of this study at present. Nothing was changed. "
            "The coordinator makes one when enough sites have submitted: consilience release make"
        )
    if release is None:
        raise SettingsError(
            "The hub offers no release of this study at present. Nothing was changed. The study's "
            f"page says why: consilience site open {study}"
        )
    file = folder / "studies" / study / release.filename
    facts = {"file": str(file), "sequence": release.sequence, "digest": release.digest}
    own, log = site.describe_own_part(study, release), site.log(study)
    if log is not None and log.length > release.sequence:
        own += (
            f"\nThis site knows of {log.length} releases, and the hub offers this one and none "
            "after it: a hub does so when a site that is in the later ones withdraws."
        )
    return Answer(
        {**facts, "guarantee": release.guarantee.as_dict(), "own": own},
        f"{of_release(release).on_screen()}\n{own}\nChecked and kept: {file}\n"
        f"Next: consilience site adapt {study} TABLE, which fits it to this site's own exact "
        "records, compares it with this site's own model, costs nothing and sends nothing; or as "
        f"it is: consilience release predict {file} {folder} TABLE",
    )


@commands.add("watch", "site watch heart --adapt patients.csv")
def watch(
    study: StudyName,
    every: Annotated[float, Option(help="Minutes between two questions.", min=0.001)] = 15.0,
    times: Annotated[
        int | None, Option(help="How often to ask; by default until it is stopped.", min=1)
    ] = None,
    adapt: Annotated[
        Path | None, Option("--adapt", help="A table that each new release is adapted to.")
    ] = None,
    folder: Folder = SITE,
    as_json: Json = False,
) -> Answer:
    """Wait for new releases; check, keep and announce each. Ctrl-C ends it.

    With --adapt each one is adapted to the site's own records, which costs and sends nothing.
    Whatever goes wrong after the first question is told, and tried again at the next one.
    """
    site, found, is_new = cs.Site(folder), list[int](), False
    seen = set(site.seen(study).kept.values())
    try:
        for asked in itertools.count(1):
            try:
                release = site.fetch(study)
                if release is not None and release.digest not in seen:
                    seen.add(release.digest)
                    found.append(release.sequence)
                    show(f"Release {release.sequence} of {study} is here.", as_error=as_json)
                    is_new = True
                if is_new and adapt is not None:
                    made = site.adapt(study, site.open_table(study, adapt))
                    show(made.page.on_screen(), as_error=as_json)
                is_new = False
            except ConsilienceError as problem:
                # Perhaps another command is at work in the folder, or one release was refused.
                if asked == 1 and not isinstance(problem, HubUnavailable):
                    raise
                show(f"{problem} Asked again in {every:g} minutes.", as_error=True)
            if asked == times:
                break
            time.sleep(60 * every)
    except KeyboardInterrupt:
        pass  # between two steps that each leave the folder whole
    return Answer({"study": study, "releases": found}, f"Stopped. New releases: {len(found)}.")


@commands.add("adapt", "site adapt heart patients.csv")
def adapt(
    study: StudyName, table: OwnTable, mapping: MappingPath = None, folder: Folder = SITE
) -> Answer:
    """Fit the release to the site's own exact records, and show whether joining pays for it."""
    site = cs.Site(folder)
    made = site.adapt(study, site.open_table(study, table, mapping))
    comparison = made.model.comparison_
    facts = {"file": str(made.file), "page": str(made.page_file), "share": made.model.share_}
    if comparison is not None:
        facts["pays"] = comparison.joining.helps
        facts["measures"] = {
            name: found.as_dict()["measures"] for name, found in comparison.evaluations.items()
        }
    return Answer(
        facts,
        f"{made.page.on_screen()}\nKept for this site alone: {made.file}, and this page as "
        f"{made.page_file.name} beside it. Nothing was sent or charged.\n"
        f"Next: consilience site predict {study} TABLE",
    )


@commands.add("compare-summary", "site compare-summary heart patients.csv")
def compare_summary(
    study: StudyName, table: OwnTable, mapping: MappingPath = None, folder: Folder = SITE
) -> Answer:
    """Compare the site's own exact records with a released summary of all sites' records."""
    site = cs.Site(folder)
    made = site.compare_summary(study, site.open_table(study, table, mapping))
    found = made.comparison
    differences = [dict([each.row]) for each in found.differences]
    return Answer(
        {"page": str(made.file), "compared": found.n_compared, "differences": differences},
        f"{made.page.on_screen()}\nKept for this site alone: {made.file}. Nothing was sent or "
        "charged.",
    )


@commands.add("predict", "site predict heart new.csv")
def predict(
    study: StudyName,
    table: OwnTable,
    out: PredictionsPath = PREDICTIONS,
    ids: IdColumn = None,
    mapping: MappingPath = None,
    folder: Folder = SITE,
) -> Answer:
    """Predict with the adapted model; what it says is as exact as the site's own records."""
    from consilience.cli.files import WithIds, write_predictions

    site = cs.Site(folder)
    if site.shares(out):
        raise SettingsError(
            f"The file {str(out)!r} lies in a folder that this site shares with others, and what "
            "the adapted model predicts is as exact as the site's own records. Nothing was "
            "predicted. Name a file elsewhere."
        )
    check_out(out, ".csv", ".parquet", besides=table)
    records = WithIds(site.open_table(study, table, mapping), ids)
    return write_predictions(site.adapted(study), site.study(study).schema, records, out)


@commands.add("log", "site log heart --out north.json")
def write_log(
    study: StudyName,
    out: Annotated[
        Path | None, Option(help="A file to write, for another site to compare with its own.")
    ] = None,
    folder: Folder = SITE,
) -> Answer:
    """Print the log of the study's releases as this site saw it."""
    site = cs.Site(folder)
    seen = site.seen(study)
    log, numbers = seen.log, ", ".join(map(str, seen.kept))
    if not seen.digests:
        raise SettingsError(
            f"No release of {study!r} was fetched yet. Nothing was written. Fetch one first: "
            "consilience site fetch"
        )
    n_seen = len(seen.kept) if log is None else log.length
    facts = {"study": site.study(study).reference, "releases": n_seen, **seen.as_dict()}
    if out is not None:
        check_out(out, ".json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    text = f"Releases {numbers} of {study} are here; they carried no log."
    if log is not None:
        text = f"{log.length} releases of {study}; head {log.head_at(log.length)}"
    for earlier in seen.aside:
        text += (
            f"\nBefore that, the hub showed another history, of {max(earlier.digests, default=0)} "
            "releases; they are in a folder beside, and --new-log accepted the present one."
        )
    return Answer(facts, text)


@commands.add("compare", "site compare heart south.json")
def compare(
    study: StudyName,
    other: Annotated[
        Path, Argument(help="What another site wrote with 'site log', or its folder.")
    ],
    folder: Folder = SITE,
) -> Answer:
    """Tell whether another site saw the same releases; the exit code is 0 only if so."""
    from consilience.files.durable import read_regular
    from consilience.site.history import Seen

    site = cs.Site(folder)
    ours, agreed = site.seen(study), site.study(study).reference
    try:
        if other.is_dir():
            theirs, named = cs.Site(other).seen(study), cs.Site(other).study(study).reference
        else:
            facts = json.loads(read_regular(other, MOST_LOG))
            theirs, named = Seen.from_dict(facts), facts["study"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SettingsError(
            f"The file {str(other)!r} is no log of releases. Nothing was compared. Ask the other "
            "site for what it writes with: consilience site log STUDY --out FILE"
        ) from None
    if not (ours.digests and theirs.digests) or agreed != named:
        raise SettingsError(
            "One of the two has no release of this study, or one of another version of it. Nothing "
            "was compared. Both sites fetch a release of the same study first: consilience site "
            "fetch"
        )
    same, text = ours.compare(theirs)
    numbers = {"ours": max(ours.digests), "theirs": max(theirs.digests)}
    return Answer({"same": same, **numbers}, text, 1 - same)


@commands.add("withdraw", "site withdraw heart")
def withdraw(
    study: StudyName,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    folder: Folder = SITE,
    as_json: Json = False,
) -> Answer:
    """Take the site's contribution out of future releases, after asking."""
    question = f"Withdraw this site's contribution to {study}? Its charge stays."
    if not (yes or (sys.stdin.isatty() and typer.confirm(question, err=as_json))):
        raise SettingsError(
            "The withdrawal was not confirmed. Nothing was changed. Answer yes, or use --yes where "
            "nobody can be asked."
        )
    site = cs.Site(folder)
    answer = site.withdraw(study)
    done = "Withdrawn, as the hub confirms: it is to make future releases without it."
    if site.is_in_folder(study):
        done = (
            "Withdrawn: its file is gone from the shared folder, where a signed note of it stays."
        )
        if answer["left"]:
            done += (
                f" What no key here signed was left: {', '.join(answer['left'])}. If it is this "
                "site's, fetch it first (consilience site recover) and withdraw again; if not, ask "
                "the coordinator who put it there."
            )
    return Answer(
        answer,
        f"{done} Published releases stay with those who have them, and the ledger's charge stays, "
        "because the contribution was handed out.",
    )


@commands.add("open", "site open heart")
def open_page(study: StudyName, folder: Folder = SITE) -> Answer:
    """Print a link to the site's own page on the dashboard; it works once, for a few minutes."""
    link = cs.Site(folder).open_view(study)
    return Answer({"link": link}, link)


@commands.add("status", "site status")
def status(folder: Folder = SITE) -> Answer:
    """Show what the site has joined, trained, submitted and fetched, what is left, what is next."""
    from consilience.privacy.guarantee import show_left
    from consilience.site.client import FOLDER

    site = cs.Site(folder)
    balance = site.ledger.balance(site.dataset)
    left = None if balance.left.epsilon is None else float(balance.left.epsilon)
    rows = [site.status(name) for name in site.studies]
    facts = {"site": site.name, "dataset": site.dataset, "epsilon_left": left}
    budget = "no limit on epsilon" if left is None else f"epsilon {show_left(left)} left"
    lines = [f"{site.name}: {budget} for data set {site.dataset!r}"]
    for row in rows:
        sent, release = row["submitted"] or "none", row["release"] or "none"
        gone = " (withdrawn)" if row["withdrawn"] else ""
        done = f"{row['contributions']} trained, newest submitted: {sent}{gone}, release: {release}"
        where = f"at {row['hub']}"
        if row["in_folder"]:
            where = f"in folder {row['hub'].removeprefix(FOLDER)}"
        lines.append(f"  {row['study']} {where}: {'fetches only' if row['fetch_only'] else done}")
        if row["trainings_left"]:
            enough = (f"{n} at epsilon {each:.15g}" for each, n in row["trainings_left"].items())
            lines.append(f"    trainings that the budget is enough for: {', or '.join(enough)}")
        if row.get("blind"):
            lines += [f"    {said}" for said in row["blind"]["said"]]
        if row["unreadable"]:
            lines.append(
                f"    cannot be read, so that nothing is trained for this study: "
                f"{', '.join(row['unreadable'])}"
            )
        if row["next"]:
            lines.append(f"    next: {row['next']}")
    if not rows:
        lines.append("  no study yet: consilience site join HUB INVITATION")
    return Answer({**facts, "key": site.key.public, "studies": rows}, "\n".join(lines))


budget = Commands("Read and change what the data owner allows; the ledger keeps the reasons.")
commands.add_typer(budget, name="budget")

Reason = Annotated[str, Option(help="Who decided it and why; the ledger keeps this sentence.")]


@budget.add("show", "site budget show")
def show_budget(folder: Folder = SITE) -> Answer:
    """Show the limit, what is left of it, and every decision of the data owner."""
    site = cs.Site(folder)
    ledger = site.ledger
    balance = ledger.balance(site.dataset)
    exact, notes = ledger.permits_exact(site.dataset), ledger.notes(site.dataset)
    facts = {name: getattr(balance, name)._asdict() for name in ("limit", "spent", "left")}
    lines = [*describe_balance(balance), f"  exact    {'allowed' if exact else 'not allowed'}"]
    lines += [describe_note(note) for note in notes]
    decisions = [note._asdict() for note in notes]
    return Answer({**facts, "exact": exact, "decisions": decisions}, "\n".join(lines))


@budget.add("raise", 'site budget raise --epsilon 5 --reason "Board, 3 May"')
def raise_budget(
    reason: Reason,
    epsilon: Annotated[float | None, Option(help="The new lifetime limit, in total.")] = None,
    delta: Annotated[float | None, Option(help="The same for delta.")] = None,
    folder: Folder = SITE,
) -> Answer:
    """Raise the lifetime limit of the site's data set; what was spent stays spent."""
    from consilience.privacy.guarantee import show_bound, show_left

    balance = cs.Site(folder).raise_budget(epsilon=epsilon, delta=delta, reason=reason)
    left, limit = balance.left, balance.limit
    shown = f"epsilon {show_left(left.epsilon or 0.0)} of {show_bound(limit.epsilon or 0.0)}"
    return Answer({"left": left._asdict(), "limit": limit._asdict()}, f"Recorded. Left: {shown}")


@budget.add("allow-exact", 'site budget allow-exact --reason "Board, 3 May"')
def allow_exact(reason: Reason, folder: Folder = SITE) -> Answer:
    """Let exact models leave, for studies with a trusted hub; no limit bounds what they say."""
    cs.Site(folder).allow_exact(reason=reason)
    return Answer({"exact": True}, "Recorded: exact models may leave.")


@budget.add("forbid-exact", 'site budget forbid-exact --reason "Board, 4 May"')
def forbid_exact(reason: Reason, folder: Folder = SITE) -> Answer:
    """Let no further exact model leave."""
    cs.Site(folder).allow_exact(reason=reason, allowed=False)
    return Answer({"exact": False}, "Recorded: no further exact model may leave.")


@commands.add("rotate-key", "site rotate-key")
def rotate_key(
    anyway: Annotated[
        bool, Option("--anyway", help="Give up contributions that were not submitted.")
    ] = False,
    folder: Folder = SITE,
) -> Answer:
    """Replace the site's key, here and at every hub where it is enrolled."""
    site = cs.Site(folder)
    key, waiting = site.rotate_key(anyway=anyway), site.outdated
    text = f"The new public key is {key}"
    if waiting:
        text += (
            f"\nThe hub of {', '.join(waiting)} has not taken it, and accepts the old one. It is "
            "asked again with every command for that study. If somebody else may have the old key, "
            "ask the coordinator to revoke it."
        )
    return Answer({"key": key, "waiting": waiting}, text, int(bool(waiting)))


@commands.add("backup", "site backup ledger-2026-11.sqlite")
def backup(path: FilePath, folder: Folder = SITE) -> Answer:
    """Copy the ledger and print the head of its chain; note it outside this machine."""
    head = cs.Site(folder).backup(check_out(path))
    facts = {"file": str(path), "head": head}
    return Answer(facts, f"Copied to {path}. Head of the chain: {head}")


@commands.add("recover", "site recover ledger-2026-11.sqlite")
def recover(
    path: Annotated[
        Path | None, Argument(help="A backup, if the ledger is lost.", metavar="BACKUP")
    ] = None,
    epsilon: Annotated[
        float | None,
        Option(help="The data owner's limit, declared again, if there is no backup either."),
    ] = None,
    delta: Annotated[float, Option(help="The same for delta.")] = 0.0,
    neighbours: Annotated[Neighbours, Option(help="The same for neighbours.")] = "replace-one",
    unit: Annotated[Literal["record", "person"], Option(help="The same for the unit.")] = "record",
    lost_key: Annotated[
        bool, Option("--lost-key", help="Also enter contributions that a lost key signed.")
    ] = False,
    folder: Folder = SITE,
) -> Answer:
    """Enter charges that the ledger lacks, from contributions here and at the hubs."""
    from consilience.privacy.guarantee import Budget, Unit
    from consilience.privacy.guarantee import Neighbours as Relation

    limit = None
    if epsilon is not None:
        limit = Budget(
            epsilon=epsilon, delta=delta, unit=Unit(unit), neighbours=Relation(neighbours)
        )
    made = cs.Site(folder).recover(path, limit=limit, lost_key=lost_key)
    charges = "1 charge was" if made.entered == 1 else f"{made.entered} charges were"
    site = cs.Site(folder)
    lines = [f"The ledger is in place. {charges} missing and entered again."]
    if made.forgot:
        lines.append(
            "It lacked the data owner's last decision about the limit or about exact models. What "
            "is in force now is below; the owner can decide again: consilience site budget"
        )
    if made.forgot or made.decisions:
        exact = "allowed" if site.ledger.permits_exact(site.dataset) else "not allowed"
        lines += [*describe_balance(site.ledger.balance(site.dataset)), f"  exact    {exact}"]
        lines += [describe_note(note) for note in made.decisions]
    if made.unreached:
        lines.append(
            f"The hub or shared folder of {', '.join(made.unreached)} could not be asked, or what "
            "it said could not be used: consilience site fetch STUDY may say why. Run this again "
            "then."
        )
    if made.unproved:
        fix = "If you lost a key, run this again with --lost-key; otherwise ask the coordinator."
        if lost_key:
            fix = "They do not fit the study or this data set. Ask the coordinator whose they are."
        lines.append(
            f"The hub of {', '.join(made.unproved)} has contributions in this site's name that no "
            f"key here signed, and they were not charged. {fix}"
        )
    if made.gone:
        lines.append(
            f"The hub of {', '.join(made.gone)} lists contributions in this site's name whose "
            "files it does not send, so that nothing tells whether they are this site's, or what "
            "they cost. Restore a backup of the ledger, or ask the coordinator."
        )
    if made.unreadable:
        lines.append(
            f"In the site's folder, this cannot be read: {', '.join(made.unreadable)}. Nothing "
            "tells what it cost, and whether that is in the ledger. Put back a copy; if there is "
            "none, move it away: what was submitted of it has been fetched again, if its hub has "
            "it."
        )
    kinds = ("unreached", "unproved", "gone", "unreadable")
    more = {kind: list(getattr(made, kind)) for kind in kinds}
    decided = {"forgot": made.forgot, "decisions": [note._asdict() for note in made.decisions]}
    return Answer({"charges_made_again": made.entered, **more, **decided}, "\n".join(lines))
