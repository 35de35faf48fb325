"""The commands of a collaboration: study, site, contribution, release and hub. Parse, call the library, print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from consilience.errors import SettingsError

study_app = typer.Typer(
    help="Write, check and read studies: what all sites agree on.", rich_markup_mode=None
)
site_app = typer.Typer(
    help="Take part: join a study, train under a budget, submit, fetch.", rich_markup_mode=None
)
contribution_app = typer.Typer(
    help="Read and check the file that a site hands over.", rich_markup_mode=None
)
release_app = typer.Typer(help="Read, check and use what a hub publishes.", rich_markup_mode=None)
hub_app = typer.Typer(
    help="Run the hub: invite sites, collect contributions, publish releases.",
    rich_markup_mode=None,
)

APPS = {
    "study": study_app,
    "site": site_app,
    "contribution": contribution_app,
    "release": release_app,
    "hub": hub_app,
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Folder = Annotated[
    Path, typer.Option("--folder", help="The site's folder.", envvar="CONSILIENCE_SITE")
]
FilePath = Annotated[Path, typer.Argument(help="The file.", metavar="FILE")]
TablePath = Annotated[Path, typer.Argument(help="CSV or Parquet.", metavar="TABLE")]
SITE = Path("site")


def _ask_for_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


for _app in APPS.values():
    _app.callback(invoke_without_command=True)(_ask_for_command)


def _say(facts: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(facts, indent=2, allow_nan=False, default=str) if as_json else text)


# ---------------------------------------------------------------------- study


@study_app.command(
    "new",
    epilog="Example: consilience study new ward.csv --label ill --number age:0:120 --category sex:f,m",
)
def study_new(
    table: TablePath,
    label: Annotated[str, typer.Option(help="The column to predict.")],
    name: Annotated[
        str, typer.Option(help="Short name: lower case, digits, hyphens.")
    ] = "my-study",
    purpose: Annotated[str, typer.Option(help="What it is for, in a sentence.")] = "",
    classes: Annotated[str, typer.Option(help="The labels, separated by commas.")] = "",
    number: Annotated[
        list[str] | None, typer.Option(help="A column of numbers and its bounds, NAME:LOW:HIGH.")
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option(help="A column of categories, NAME:A,B,C.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out.")] = None,
    learner: Annotated[str, typer.Option(help="What sites train.")] = "PrivateLogisticRegression",
    public: Annotated[
        bool,
        typer.Option(
            "--public",
            help="Anyone may see this table: read bounds and categories from its values.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="The study file to write.")] = Path("study.toml"),
    as_json: Json = False,
) -> None:
    """Write a commented study for a table with these columns; only their names are read."""
    from consilience.study.draft import draft
    from consilience.study.study import check

    if out.exists():
        raise SettingsError(
            f"The file {str(out)!r} is there already. Nothing was written. Name another with --out."
        )
    text = draft(
        table,
        name=name,
        label=label,
        purpose=purpose,
        classes=[part.strip() for part in classes.split(",") if part.strip()],
        numbers=dict(_bounds(each) for each in number or []),
        categories=dict(_categories(each) for each in category or []),
        drop=drop or [],
        learner=learner,
        is_public=public,
        file=out.name,
    )
    out.write_text(text, encoding="utf-8")
    problems = check(out)
    todo = "It is complete." if not problems else "\n  - ".join(["Still to do:", *problems])
    _say({"file": str(out), "problems": problems}, f"Written: {out}\n{todo}", as_json)


def _bounds(text: str) -> tuple[str, tuple[float, float]]:
    name, _, ends = text.rpartition(":")
    name, _, low = name.rpartition(":")
    try:
        return name, (float(low), float(ends))
    except ValueError:
        raise SettingsError(
            f"A column of numbers is declared as NAME:LOW:HIGH. Got {text!r} instead."
        ) from None


def _categories(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition(":")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not found:
        raise SettingsError(
            f"A column of categories is declared as NAME:A,B,C. Got {text!r} instead."
        )
    return name, found


@study_app.command("check", epilog="Example: consilience study check study.toml")
def study_check(study: FilePath, as_json: Json = False) -> None:
    """Tell everything that stands against a study, at once; exit code 1 if anything does."""
    from consilience.study.study import Study, check

    problems = check(study)
    if problems:
        _say(
            {"fits": False, "problems": problems},
            "This study cannot work yet:\n  - " + "\n  - ".join(problems),
            as_json,
        )
        raise typer.Exit(1)
    found = Study.load(study)
    _say(
        {"fits": True, "name": found.name, "digest": found.digest},
        f"{found.name} is complete. Digest {found.digest}",
        as_json,
    )


@study_app.command("show", epilog="Example: consilience study show study.toml")
def study_show(study: FilePath, as_json: Json = False) -> None:
    """Say in words what a study demands and promises."""
    from consilience.study.pages import of_study
    from consilience.study.study import Study

    found = Study.load(study)
    _say({**found.to_dict(), "digest": found.digest}, of_study(found).as_text(), as_json)


# ---------------------------------------------------------------------- site


@site_app.command(
    "init", epilog="Example: consilience site init --name north --dataset patients --epsilon 3"
)
def site_init(
    name: Annotated[str, typer.Option(help="The site's name, as others will see it.")],
    dataset: Annotated[
        str, typer.Option(help="What the site calls its table; the budget is for it.")
    ],
    epsilon: Annotated[
        float, typer.Option(help="What the data owner allows, in total and for ever.")
    ],
    delta: Annotated[float, typer.Option(help="Likewise; 0 allows only pure trainings.")] = 0.0,
    neighbours: Annotated[
        str, typer.Option(help="replace-one, or add-remove for trees.")
    ] = "replace-one",
    unit: Annotated[str, typer.Option(help="record or person.")] = "record",
    folder: Folder = SITE,
    as_json: Json = False,
) -> None:
    """Make a site: its key, its ledger, and the budget of its data owner."""
    from consilience.privacy.guarantee import Budget, Neighbours, Unit
    from consilience.site.site import Site

    budget = Budget(
        epsilon=epsilon, delta=delta, neighbours=Neighbours(neighbours), unit=Unit(unit)
    )
    site = Site.init(folder, name=name, dataset=dataset, budget=budget)
    facts = {"site": site.name, "folder": str(folder), "key": site.key.public}
    text = (
        f"Site {site.name!r} is ready in {folder}.\nIts public key is {site.key.public}\n"
        f"Back up {folder / 'key.pem'} and {folder / 'ledger.sqlite'}: the key speaks for the site, the ledger "
        "protects it."
    )
    _say(facts, text, as_json)


@site_app.command("join", epilog="Example: consilience site join https://hub.example 7Q2K-...")
def site_join(
    where: Annotated[
        str, typer.Argument(help="The hub's address, or a folder that is shared.", metavar="HUB")
    ],
    invitation: Annotated[
        str, typer.Argument(help="The one-time invitation, if WHERE is a hub.")
    ] = "",
    fetch_only: Annotated[
        bool, typer.Option("--fetch-only", help="Only to use releases, not to contribute.")
    ] = False,
    certificate: Annotated[
        str | None, typer.Option(help="The hub's certificate file, if it is not publicly known.")
    ] = None,
    folder: Folder = SITE,
    as_json: Json = False,
) -> None:
    """Join a study at a hub or through a shared folder, and say what it is."""
    from consilience.site.site import Site
    from consilience.study.pages import of_study

    site = Site(folder)
    if where.startswith(("http://", "https://")):
        study = site.join(where, invitation, fetch_only=fetch_only, certificate=certificate)
    else:
        study = site.join_folder(where)
    hint = f"consilience site train {study.name} TABLE --epsilon E --dry-run"
    text = f"{of_study(study).as_text()}\nJoined. Nothing was trained or sent. Next: {hint}"
    _say({**study.reference, "hub": where}, text, as_json)


@site_app.command("train", epilog="Example: consilience site train heart patients.csv --epsilon 1")
def site_train(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    table: TablePath,
    epsilon: Annotated[float, typer.Option(help="What this training may cost.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the page a data officer files; train nothing.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask; the approval is on file.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where --dry-run writes its page.")] = Path(
        "approval.html"
    ),
    folder: Folder = SITE,
    as_json: Json = False,
) -> None:
    """Show what will leave and what it costs, ask, charge the ledger, train, and sign the file."""
    from consilience.files.certificate import of_contribution
    from consilience.files.contribution import Contribution
    from consilience.site.site import Preview, Site

    site = Site(folder)
    if dry_run:
        preview = site.preview(study, epsilon=epsilon)
        out.write_text(preview.page.as_html(), encoding="utf-8")
        facts = {"page": str(out), "epsilon": epsilon, "left": preview.left, "fits": preview.fits}
        text = (
            f"{preview.page.as_text()}\nWritten for filing: {out}. Nothing was trained or charged."
        )
        _say(facts, text, as_json)
        return

    def approve(preview: Preview) -> bool:
        typer.echo(preview.page.as_text(), err=as_json)
        return yes or (
            sys.stdin.isatty() and typer.confirm("Train, and charge this to the ledger?")
        )

    path = site.train(study, table, epsilon=epsilon, approve=approve)
    if path is None:
        raise SettingsError(
            "The training was not approved. Nothing was trained or charged. Answer yes, or pass "
            "--yes where nobody can be asked and the approval is on file."
        )
    made = Contribution.load(path, trusted=site.study(study).trusted)
    hint = f"Nothing was sent. Next: consilience site submit {study}"
    text = f"{of_contribution(made).as_text()}\nSigned and kept: {path}\n{hint}"
    _say(
        {"file": str(path), "digest": made.digest, "guarantee": made.guarantee.as_dict()},
        text,
        as_json,
    )


@site_app.command("submit", epilog="Example: consilience site submit heart")
def site_submit(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    folder: Folder = SITE,
    as_json: Json = False,
) -> None:
    """Send the newest contribution; sending it twice changes nothing."""
    from consilience.site.site import Site

    answer = Site(folder).submit(study)
    text = f"The hub has it: {answer.get('state')}, digest {answer.get('digest')}"
    _say(
        answer,
        f"{text}\nNext, once enough sites have sent theirs: consilience site fetch {study}",
        as_json,
    )


@site_app.command("fetch", epilog="Example: consilience site fetch heart")
def site_fetch(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    folder: Folder = SITE,
    as_json: Json = False,
) -> None:
    """Fetch the newest release, check that the hub signed it, and say what it is."""
    from consilience.files.certificate import of_release
    from consilience.site.site import Site

    release = Site(folder).fetch(study)
    if release is None:
        raise SettingsError(
            "There is no release yet. Nothing was changed. Try again when enough sites have "
            "contributed."
        )
    facts = {
        "sequence": release.sequence,
        "digest": release.digest,
        "guarantee": release.guarantee.as_dict(),
    }
    file = folder / "studies" / study / release.filename
    kept = f"Checked and kept: {file}\nNext: consilience release predict {file} {folder} TABLE"
    _say({"file": str(file), **facts}, f"{of_release(release).as_text()}\n{kept}", as_json)


@site_app.command("withdraw", epilog="Example: consilience site withdraw heart")
def site_withdraw(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    folder: Folder = SITE,
    as_json: Json = False,
) -> None:
    """Take the site's contribution out of future releases."""
    from consilience.site.site import Site

    answer = Site(folder).withdraw(study)
    text = (
        "Withdrawn: releases from now on are made without it. Releases that were published stay "
        "with those who have them, and what the ledger was charged stays charged: both were "
        "handed out."
    )
    _say(answer, text, as_json)


@site_app.command("open", epilog="Example: consilience site open heart")
def site_open(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    folder: Folder = SITE,
    as_json: Json = False,
) -> None:
    """Print a link to the site's own page on the hub's dashboard; it works once, within minutes."""
    from consilience.site.site import Site

    link = Site(folder).open_view(study)
    _say({"link": link}, link, as_json)


@site_app.command("status", epilog="Example: consilience site status")
def site_status(folder: Folder = SITE, as_json: Json = False) -> None:
    """Say what the site has joined, trained, submitted and fetched, and what budget is left."""
    from consilience.site.site import Site

    site = Site(folder)
    balance = site.ledger.balance(site.dataset)
    rows = [site.status(name) for name in site.studies]
    left = None if balance.left.epsilon is None else float(balance.left.epsilon)
    facts = {
        "site": site.name,
        "dataset": site.dataset,
        "epsilon_left": left,
        "key": site.key.public,
        "studies": rows,
    }
    lines = [
        f"{site.name}: epsilon {'not limited' if left is None else f'{left:g}'} left of data set "
        f"{site.dataset!r}"
    ]
    for row in rows:
        sent, release = row["submitted"] or "none", row["release"] or "none"
        done = f"{row['contributions']} trained, newest submitted: {sent}, release: {release}"
        lines.append(
            f"  {row['study']} at {row['hub']}: {'fetches only' if row['fetch_only'] else done}"
        )
    _say(
        facts,
        "\n".join(
            lines if rows else [*lines, "  no study yet: consilience site join HUB INVITATION"]
        ),
        as_json,
    )


@site_app.command("rotate-key", epilog="Example: consilience site rotate-key")
def site_rotate_key(folder: Folder = SITE, as_json: Json = False) -> None:
    """Replace the site's key, here and at every hub it is enrolled at."""
    from consilience.site.site import Site

    key = Site(folder).rotate_key()
    _say({"key": key}, f"The new public key is {key}", as_json)


@site_app.command("backup", epilog="Example: consilience site backup ledger-2026-11.sqlite")
def site_backup(path: FilePath, folder: Folder = SITE, as_json: Json = False) -> None:
    """Copy the ledger, and print the head of its chain to be written down elsewhere."""
    from consilience.site.site import Site

    head = Site(folder).backup(path)
    _say({"file": str(path), "head": head}, f"Copied to {path}. Head of the chain: {head}", as_json)


@site_app.command("recover", epilog="Example: consilience site recover ledger-2026-11.sqlite")
def site_recover(path: FilePath, folder: Folder = SITE, as_json: Json = False) -> None:
    """Put a backup in place of a lost ledger; charges known from contributions are made again."""
    from consilience.site.site import Site

    missing = Site(folder).recover(path)
    text = f"Restored. {missing} charge{'' if missing == 1 else 's'} made since the backup had to be made again."
    _say({"charges_made_again": missing}, text, as_json)


# ---------------------------------------------------------------------- contribution and release


@contribution_app.command(
    "show", epilog="Example: consilience contribution show contribution-0001.safetensors"
)
def contribution_show(
    file: FilePath,
    html: Annotated[
        Path | None, typer.Option(help="Write the certificate as a web page, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a contribution's certificate."""
    from consilience.files.certificate import of_contribution
    from consilience.files.contribution import Contribution

    found = Contribution.load(file, trusted=True)
    page = of_contribution(found)
    if html is not None:
        html.write_text(page.as_html(), encoding="utf-8")
    _say({**found.sealed.facts, "digest": found.digest}, page.as_text(), as_json)


@contribution_app.command(
    "verify", epilog="Example: consilience contribution verify contribution-0001.safetensors"
)
def contribution_verify(
    file: FilePath,
    key: Annotated[
        str | None,
        typer.Option(help="The site's public key; without it, whoever signed is printed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check signature, digests and guarantee offline; exit code 0 only if all hold."""
    from consilience.files.contribution import Contribution

    found = Contribution.load(file, trusted=True).verify(key=key)
    facts = {
        "holds": True,
        "site": found.site,
        "key": found.sealed.key,
        "digest": found.digest,
        "guarantee": found.guarantee.as_dict(),
    }
    _say(
        facts,
        f"All holds: {found.guarantee!r}, signed by {found.site!r} with key {found.sealed.key}",
        as_json,
    )


@release_app.command("show", epilog="Example: consilience release show release-0001.safetensors")
def release_show(
    file: FilePath,
    html: Annotated[
        Path | None, typer.Option(help="Write the certificate as a web page, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a release's certificate."""
    from consilience.files.certificate import of_release
    from consilience.files.release import Release

    found = Release.load(file)
    page = of_release(found)
    if html is not None:
        html.write_text(page.as_html(), encoding="utf-8")
    _say({**found.sealed.facts, "digest": found.digest}, page.as_text(), as_json)


@release_app.command(
    "verify", epilog="Example: consilience release verify release-0001.safetensors --key 3f9a..."
)
def release_verify(
    file: FilePath,
    key: Annotated[
        str | None,
        typer.Option(help="The hub's public key; without it, whoever signed is printed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check signature, digests and guarantee offline; exit code 0 only if all hold."""
    from consilience.files.release import Release

    found = Release.load(file, key=key)
    facts = {
        "holds": True,
        "key": found.sealed.key,
        "digest": found.digest,
        "guarantee": found.guarantee.as_dict(),
    }
    _say(facts, f"All holds: {found.guarantee!r}, signed with key {found.sealed.key}", as_json)


@release_app.command(
    "predict",
    epilog="Example: consilience release predict release-0001.safetensors study.toml new.csv",
)
def release_predict(
    file: FilePath,
    study: Annotated[Path, typer.Argument(help="The study's file, or the site's folder.")],
    table: TablePath,
    out: Annotated[Path, typer.Option(help="CSV or Parquet to write: one row per record.")] = Path(
        "predictions.csv"
    ),
    as_json: Json = False,
) -> None:
    """Predict for the records of a table, here, with a release; nothing is sent anywhere."""
    import pyarrow as pa
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq

    from consilience.files.release import Release
    from consilience.site.site import Site
    from consilience.study.study import Study

    release = Release.load(file)
    found = Site(study).study(release.study["name"]) if study.is_dir() else Study.load(study)
    if found.reference != release.study:
        raise SettingsError(
            "The release was made for another study, or another version of it. Nothing was "
            "predicted."
        )
    X = found.schema.encode_features(table)
    columns: dict[str, Any] = {"prediction": release.predict(X)}
    if found.schema.classes is not None:
        said = release.predict_proba(X)
        columns |= {
            f"probability of {label}": said[:, k]
            for k, label in enumerate(release.ensemble.classes_.tolist())
        }
    result = pa.table(columns)
    if out.suffix == ".parquet":
        pq.write_table(result, out)
    else:
        pcsv.write_csv(result, out)
    _say({"file": str(out), "rows": len(result)}, f"Written: {out} ({len(result):,} rows)", as_json)


@release_app.command(
    "make", epilog="Example: consilience release make shared --key coordinator.pem"
)
def release_make(
    folder: Annotated[
        Path, typer.Argument(help="A shared folder with one study and the sites' contributions.")
    ],
    key: Annotated[
        Path, typer.Option(help="The key that signs releases; made if it is not there.")
    ],
    as_json: Json = False,
) -> None:
    """Combine the contributions in a shared folder into a signed release there: a collaboration without a hub."""
    from consilience.files.certificate import of_release
    from consilience.files.contribution import Contribution
    from consilience.files.sealed import SigningKey
    from consilience.study.collect import Publication, collect, read_records
    from consilience.study.study import Study

    study = Study.in_folder(folder)
    if study.draws_noise:
        raise SettingsError(
            "This study's aggregator draws noise, which must be charged: use a hub. Nothing was "
            "combined."
        )
    if not key.exists():
        SigningKey.generate().save(key)
    done = sorted(folder.glob("release-*.safetensors"))
    newest: dict[str, Contribution] = {}
    every: dict[str, list[Contribution]] = {}
    for file in sorted(set(folder.glob("*.safetensors")) - set(done)):
        found = study.accept(Contribution.load(file, trusted=study.trusted))
        every.setdefault(found.site, []).append(found)
        known = newest.get(found.site)
        if known is not None and known.sealed.key != found.sealed.key:
            raise SettingsError(
                f"Two different keys sign for {found.site!r}. Nothing was combined. Ask the site "
                "which is its."
            )
        if known is None or found.sequence > known.sequence:
            newest[found.site] = found
    earlier = {
        site: [one.guarantee for one in found if one is not newest[site]]
        for site, found in every.items()
    }
    public, test = read_records(study, folder)
    sequence = len(done) + 1
    release = collect(
        study,
        [newest[site] for site in sorted(newest)],
        public=public,
        test=test,
        publication=Publication(SigningKey.load(key), sequence, earlier),
    )
    path = folder / release.filename
    release.save(path)
    facts = {
        "file": str(path),
        "sequence": sequence,
        "digest": release.digest,
        "sites": sorted(newest),
    }
    _say(facts, f"{of_release(release).as_text()}\nWritten: {path}", as_json)


# ---------------------------------------------------------------------- hub

HubFolder = Annotated[
    Path, typer.Option("--folder", help="The hub's folder.", envvar="CONSILIENCE_HUB")
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="postgresql+psycopg://… instead of SQLite.",
        envvar="CONSILIENCE_DATABASE",
    ),
]
HUB = Path("hub")
Named = Annotated[str, typer.Argument(help="Name of the study.", metavar="STUDY")]


@hub_app.command("serve", epilog="Example: consilience hub serve --folder hub --port 8440")
def hub_serve(
    folder: HubFolder = HUB,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8440,
    certificate: Annotated[Path | None, typer.Option(help="Certificate file, for HTTPS.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy on this machine speaks HTTPS.")
    ] = False,
    database: Database = None,
) -> None:
    """Run the hub until it is stopped: API, dashboard and aggregation."""
    from consilience.hub.operating import serve

    scheme = "https" if certificate is not None else "http"
    typer.echo(
        f"The hub listens on {scheme}://{host}:{port}: the dashboard in a browser (log in as a "
        "coordinator made with 'consilience hub add-coordinator'), the API described at /docs. "
        "Stop it with Ctrl-C.",
        err=True,
    )
    serve(folder, host, port, url=database, cert=certificate, key=key, behind_proxy=behind_proxy)


@hub_app.command("add-coordinator", epilog="Example: consilience hub add-coordinator anna")
def hub_add_coordinator(
    name: Annotated[str, typer.Argument(help="The coordinator's name.")],
    password: Annotated[
        str | None,
        typer.Option(
            help="Asked for if it is not given.", envvar="CONSILIENCE_PASSWORD", show_envvar=True
        ),
    ] = None,
    folder: HubFolder = HUB,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Add a coordinator, or give one a new password."""
    from consilience.hub.operating import add_coordinator

    secret = (
        password
        if password is not None
        else typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    )
    add_coordinator(folder, name, secret, url=database)
    _say({"coordinator": name}, f"{name} can log in.", as_json)


@hub_app.command("add-study", epilog="Example: consilience hub add-study study.toml")
def hub_add_study(
    study: Annotated[
        Path,
        typer.Argument(help="The study's file; its public files lie beside it.", metavar="FILE"),
    ],
    folder: HubFolder = HUB,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Take a study, and the public files that lie beside it."""
    from consilience.hub.operating import add_study

    row = add_study(folder, study, url=database)
    _say(
        {"name": row["name"], "digest": row["digest"]},
        f"{row['name']} is open. Digest {row['digest']}",
        as_json,
    )


@hub_app.command("invite", epilog="Example: consilience hub invite heart-risk")
def hub_invite(
    study: Named,
    site: Annotated[str | None, typer.Option(help="Only for a site of this name.")] = None,
    fetch_only: Annotated[bool, typer.Option("--fetch-only", help="Only to use releases.")] = False,
    days: Annotated[float, typer.Option(help="How long it is good for.")] = 7.0,
    folder: HubFolder = HUB,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make a one-time invitation for one site."""
    from consilience.hub.operating import invite

    code, until = invite(folder, study, site=site, fetch_only=fetch_only, days=days, url=database)
    _say(
        {"invitation": code, "until": until},
        f"{code}\nGood once, until {until[:16]} UTC. It is not shown again.",
        as_json,
    )


@hub_app.command("allow", epilog="Example: consilience hub allow phones --epsilon 2")
def hub_allow(
    study: Named,
    epsilon: Annotated[
        float, typer.Option(help="What releases of this study may cost a site, in total.")
    ],
    delta: Annotated[float, typer.Option(help="Likewise.")] = 0.0,
    unit: Annotated[
        str, typer.Option(help="What releases hide: site (distillation), record or person.")
    ] = "site",
    folder: HubFolder = HUB,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Set what the hub may spend on a study whose aggregator draws noise."""
    from consilience.hub.operating import allow
    from consilience.privacy.guarantee import Budget, Unit

    balance = allow(
        folder, study, Budget(epsilon=epsilon, delta=delta, unit=Unit(unit)), url=database
    )
    _say(
        {"left": balance.left.epsilon},
        f"Left for {study}: epsilon = {balance.left.epsilon:g}",
        as_json,
    )


@hub_app.command("aggregate", epilog="Example: consilience hub aggregate heart-risk")
def hub_aggregate(
    study: Named,
    request: Annotated[
        str | None,
        typer.Option(
            help="Where noise is drawn: a name for this release; the same one never pays twice."
        ),
    ] = None,
    folder: HubFolder = HUB,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Combine a study's contributions now."""
    from consilience.hub.operating import aggregate

    row = aggregate(folder, study, request=request, url=database)
    _say(
        {"sequence": row["sequence"], "digest": row["digest"]},
        f"Release {row['sequence']}: {row['digest']}",
        as_json,
    )


@hub_app.command("verify", epilog="Example: consilience hub verify")
def hub_verify(folder: HubFolder = HUB, database: Database = None, as_json: Json = False) -> None:
    """Check the audit log's chain and every file; print its head, to be written down elsewhere."""
    from consilience.hub.operating import verify

    length, head = verify(folder, url=database)
    _say(
        {"entries": length, "head": head},
        f"All holds: {length:,} entries. Head of the chain: {head}",
        as_json,
    )


@hub_app.command("use-bucket", epilog="Example: consilience hub use-bucket s3://consortium/hub")
def hub_use_bucket(
    address: Annotated[
        str,
        typer.Argument(help="s3://NAME/PREFIX; credentials as boto3 finds them.", metavar="BUCKET"),
    ],
    folder: HubFolder = HUB,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Keep the hub's files in an S3-compatible bucket from now on; those it has are copied there."""
    from consilience.hub.operating import use_bucket

    moved = use_bucket(folder, address, url=database)
    text = f"{moved:,} files copied to {address}. Start the hub's workers again: they will use it."
    _say({"bucket": address, "files": moved}, text, as_json)


@hub_app.command("backup", epilog="Example: consilience hub backup copies/2026-11-16")
def hub_backup(
    path: FilePath, folder: HubFolder = HUB, database: Database = None, as_json: Json = False
) -> None:
    """Write a consistent copy of everything into a new folder while the hub runs."""
    from consilience.hub.operating import backup

    _, head = backup(folder, path, url=database)
    _say(
        {"folder": str(path), "head": head},
        f"Copied to {path}. Head of the audit log: {head}",
        as_json,
    )


@hub_app.command(
    "restore", epilog="Example: consilience hub restore copies/2026-11-16 --folder new-hub"
)
def hub_restore(
    path: FilePath, folder: HubFolder = HUB, database: Database = None, as_json: Json = False
) -> None:
    """Make a hub from a backup in a new folder; open invitations and sessions are void."""
    from consilience.hub.operating import restore

    length, head = restore(path, folder, url=database)
    text = f"Restored into {folder}: {length:,} entries, head {head}. Invite again whoever had not enrolled."
    _say({"folder": str(folder), "entries": length, "head": head}, text, as_json)
