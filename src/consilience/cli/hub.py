"""The commands `consilience hub …`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from consilience.cli.command import Answer, Commands, show
from consilience.cli.options import FilePath, StudyName, Yes, confirm, read_config

if TYPE_CHECKING:
    from consilience.hub.hub import Hub
    from consilience.hub.signon import SignOn

OPERATOR = "operator"  # who acts here, as the audit log names them
commands = Commands("Run the hub: invite sites, collect contributions, publish releases.")


@dataclass(frozen=True)
class Place:
    """Where a hub keeps its files and its tables."""

    folder: Annotated[Path, Option(help="The hub's folder.", envvar="CONSILIENCE_HUB")] = Path(
        "hub"
    )
    database: Annotated[
        str | None,
        Option(help="postgresql+psycopg://… instead of SQLite.", envvar="CONSILIENCE_DATABASE"),
    ] = None
    config: Annotated[
        Path | None,
        Option(
            help="A TOML file with options of the hub's commands; flags and environment "
            "variables override it.",
            envvar="CONSILIENCE_CONFIG",
            is_eager=True,
            callback=read_config,
        ),
    ] = None

    def open(self) -> AbstractContextManager[Hub]:
        """Open the hub for one command."""
        from consilience.hub.operating import opened

        return opened(self.folder, self.database)


@dataclass(frozen=True)
class Listening:
    """How a hub is reached."""

    host: Annotated[str, Option(help="Address to listen on.", envvar="CONSILIENCE_HOST")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option(help="Port to listen on.", envvar="CONSILIENCE_PORT")] = 8440
    cert: Annotated[
        Path | None,
        Option(
            "--certificate", help="Certificate file, for HTTPS.", envvar="CONSILIENCE_CERTIFICATE"
        ),
    ] = None
    key: Annotated[
        Path | None,
        Option(help="The private key of the certificate.", envvar="CONSILIENCE_CERTIFICATE_KEY"),
    ] = None
    behind_proxy: Annotated[
        bool,
        Option(
            "--behind-proxy",
            help="A proxy on this machine provides HTTPS.",
            envvar="CONSILIENCE_BEHIND_PROXY",
        ),
    ] = False
    proxy: Annotated[
        list[str] | None,
        Option(
            help="Network address of a proxy on another machine; can be repeated.",
            envvar="CONSILIENCE_PROXY",
        ),
    ] = None
    log_format: Annotated[
        Literal["text", "json"],
        Option(
            help="Lines for people, or a JSON object for each event and request.",
            envvar="CONSILIENCE_LOG_FORMAT",
        ),
    ] = "text"
    metrics_token: Annotated[
        str | None,
        Option(
            help="Lets other machines read /metrics.",
            envvar="CONSILIENCE_METRICS_TOKEN",
            show_envvar=True,
        ),
    ] = None

    @property
    def proxies(self) -> list[str]:
        """The addresses of all proxies."""
        return [*(("127.0.0.1", "::1") if self.behind_proxy else ()), *(self.proxy or ())]


@dataclass(frozen=True)
class SigningOn:
    """How people log in: an identity provider beside passwords, and second factors."""

    public_url: Annotated[
        str | None,
        Option(
            help="The hub's address as browsers see it, as in https://hub.example.org; needed for "
            "single sign-on.",
            envvar="CONSILIENCE_PUBLIC_URL",
        ),
    ] = None
    oidc_issuer: Annotated[
        str | None,
        Option(
            help="The issuer of an OpenID Connect provider whose people may log in.",
            envvar="CONSILIENCE_OIDC_ISSUER",
        ),
    ] = None
    oidc_client_id: Annotated[
        str | None,
        Option(help="What the provider calls this hub.", envvar="CONSILIENCE_OIDC_CLIENT_ID"),
    ] = None
    oidc_secret_file: Annotated[
        Path | None,
        Option(
            help="A file that only the hub's user can read, with the client secret; or put the "
            "secret itself into the environment as CONSILIENCE_OIDC_SECRET.",
            envvar="CONSILIENCE_OIDC_SECRET_FILE",
        ),
    ] = None
    oidc_email_domain: Annotated[
        list[str] | None,
        Option(
            help="At their first login, people with a verified e-mail address of this domain are "
            "bound to the account whose name is that address; can be repeated.",
            envvar="CONSILIENCE_OIDC_EMAIL_DOMAIN",
        ),
    ] = None
    require_second_factor: Annotated[
        bool,
        Option(
            "--require-second-factor",
            help="Accounts that log in with a password can do nothing before they have a second "
            "factor.",
            envvar="CONSILIENCE_REQUIRE_SECOND_FACTOR",
        ),
    ] = False
    oidc_name: Annotated[
        str,
        Option(help="What the login page calls the provider.", envvar="CONSILIENCE_OIDC_NAME"),
    ] = "single sign-on"

    def settings(self) -> SignOn | None:
        """Return the provider, if there is one."""
        from consilience.hub.operating import read_secret
        from consilience.hub.signon import SignOn

        if self.oidc_issuer is None:
            return None
        return SignOn(
            self.oidc_issuer,
            self.oidc_client_id or "",
            self.public_url or "",
            read_secret("CONSILIENCE_OIDC_SECRET", self.oidc_secret_file),
            tuple(self.oidc_email_domain or ()),
            self.oidc_name,
        )


@commands.add("serve", "hub serve --folder hub --port 8440")
def serve(
    *,
    listening: Listening,
    combine_seconds: Annotated[
        float,
        Option(
            help="How long combining a study may take before it is stopped.",
            envvar="CONSILIENCE_COMBINE_SECONDS",
            show_envvar=True,
            min=1.0,
        ),
    ] = 600.0,
    combine_memory: Annotated[
        int | None,
        Option(
            help="MiB of memory that combining a study may take; by default a fifth of what "
            "the machine, or the hub's control group, has.",
            envvar="CONSILIENCE_COMBINE_MEMORY",
            show_envvar=True,
            min=512,
        ),
    ] = None,
    signing_on: SigningOn,
    place: Place,
) -> None:
    """Run the hub until you stop it: API, dashboard and aggregation."""
    from consilience.hub import operating
    from consilience.hub.hub import Settings

    sign_on = signing_on.settings()
    scheme = "https" if listening.cert is not None else "http"
    show(
        f"Starting the hub on {scheme}://{listening.host}:{listening.port}. Open it in a browser "
        "for the dashboard (log in as a coordinator; 'consilience hub add-coordinator' makes "
        "one). The API is described at /docs. Stop the hub with Ctrl-C.",
        as_error=True,
    )
    operating.serve(
        Settings(
            place.folder,
            place.database,
            sign_on=sign_on,
            all_need_factors=signing_on.require_second_factor,
            log_format=listening.log_format,
            metrics_token=listening.metrics_token,
            combine_seconds=combine_seconds,
            combine_bytes=None if combine_memory is None else combine_memory << 20,
        ),
        host=listening.host,
        port=listening.port,
        cert=listening.cert,
        key=listening.key,
        proxies=listening.proxies,
    )


@commands.add("add-coordinator", "hub add-coordinator anna")
def add_coordinator(
    *,
    name: Annotated[str, Argument(help="The coordinator's name.")],
    password: Annotated[
        str | None,
        Option(
            help="You are asked for it if you do not give it.",
            envvar="CONSILIENCE_PASSWORD",
            show_envvar=True,
        ),
    ] = None,
    place: Place,
) -> Answer:
    """Add a coordinator of every study, or give an account a new password."""
    from consilience.hub import operating

    if password is None:
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    operating.add_coordinator(place.folder, name, str(password), url=place.database)
    return Answer({"coordinator": name}, f"{name} can log in.")


@commands.add("add-study", "hub add-study study.toml")
def add_study(
    study: Annotated[
        Path,
        Argument(
            help="The study file; its public files must be in the same folder.", metavar="FILE"
        ),
    ],
    place: Place,
) -> Answer:
    """Add a study together with its public files."""
    from consilience.hub import operating

    row = operating.add_study(place.folder, study, url=place.database)
    facts = {"name": row["name"], "digest": row["digest"]}
    return Answer(facts, f"{row['name']} is open. Digest {row['digest']}")


@commands.add("invite", "hub invite heart-risk")
def invite(
    *,
    study: StudyName,
    site: Annotated[str | None, Option(help="Only a site of this name may use it.")] = None,
    fetch_only: Annotated[
        bool, Option("--fetch-only", help="The site may fetch releases, not contribute.")
    ] = False,
    days: Annotated[float, Option(help="How many days it is valid.")] = 7.0,
    place: Place,
) -> Answer:
    """Make a one-time invitation for one site."""
    with place.open() as hub:
        code, until = hub.invite(study, OPERATOR, site=site, fetch_only=fetch_only, days=days)
    return Answer(
        {"invitation": code, "until": until},
        f"{code}\nIt can be used once, until {until[:16]} UTC. It will not be shown again.",
    )


@commands.add("roster", "hub roster heart-risk --checked-by 'Dr. Miller, by phone'")
def freeze_roster(
    *,
    study: StudyName,
    checked_by: Annotated[
        str | None,
        Option(help="Freeze it: who compared the keys with what the sites themselves said."),
    ] = None,
    checked: Annotated[
        list[str] | None,
        Option(help="The same for one site, as SITE=WHO; can be repeated.", metavar="SITE=WHO"),
    ] = None,
    yes: Yes = False,
    place: Place,
) -> Answer:
    """Show the sites of a study whose hub is blind, and their keys; or freeze that roster.

    Without who compared the keys, nothing is changed. Once the roster is frozen, no site can be
    enrolled and no key changed.
    """
    from consilience.hub.blind import require_blind
    from consilience.protocol import Refusal

    who = dict(each.split("=", 1) for each in checked or () if "=" in each)
    with place.open() as hub:
        agreed = hub.study(study)[1]
        require_blind(agreed)
        keys = hub.store.enrolled_keys(study)
        is_frozen = hub.store.roster(study) is not None
        if unknown := sorted(set(who) - set(keys)):
            raise Refusal("not-found", f"No site named {unknown[0]!r} is enrolled.")
        if checked_by is None and not who and not is_frozen:
            listed = "".join(f"\n  {site}\n    {key}" for site, key in sorted(keys.items()))
            return Answer(
                {"frozen": False, "sites": keys},
                f"Enrolled, and not frozen yet:{listed}\nCompare each key with what the site told "
                "you, then name who did: --checked-by NAME.",
            )
        if not is_frozen:
            confirm(f"Freeze the roster of {study!r} for good?", yes=yes)
        named = {site: who.get(site, checked_by or "") for site in keys}
        roster = hub.blind.freeze(agreed, named, OPERATOR)
    sites = roster.sealed.facts["sites"]
    lines = "".join(
        f"\n  {one['name']}\n    {one['key']}\n    compared by {one['checked_by']}" for one in sites
    )
    return Answer(
        {"frozen": True, "digest": roster.digest, "sites": sites},
        f"Frozen, digest {roster.digest}:{lines}\nNow every keyholder countersigns it.",
    )


@commands.add("batch", "hub batch heart-risk")
def list_batch(
    *,
    study: StudyName,
    leave_out: Annotated[
        int | None,
        Option(help="Instead, leave the batch with this number out of all later releases."),
    ] = None,
    yes: Yes = False,
    place: Place,
) -> Answer:
    """List a batch of all files that keyholders can open together now; do not wait for others."""
    with place.open() as hub:
        if leave_out is None:
            row = hub.blind.list_batch(hub.study(study)[1], OPERATOR)
            said = "is listed to the keyholders"
        else:
            confirm(f"Leave batch {leave_out} of {study!r} out for good?", yes=yes)
            row = hub.store.leave_out_batch(study, leave_out, OPERATOR)
            said = "is left out"
    facts = {"number": row["number"], "digest": row["digest"], "state": row["state"]}
    return Answer(facts, f"Batch {row['number']} {said}: {row['digest']}")


@commands.add("allow", "hub allow phones --epsilon 2")
def allow(
    *,
    study: StudyName,
    epsilon: Annotated[
        float, Option(help="What all releases of this study may cost a site in total.")
    ],
    delta: Annotated[float, Option(help="The same for delta.")] = 0.0,
    unit: Annotated[
        Literal["site", "record", "person"] | None,
        Option(help="What releases hide. Only the unit of the study's own noise is accepted."),
    ] = None,
    place: Place,
) -> Answer:
    """Set how much the hub may spend on a study whose aggregator draws noise."""
    from consilience.privacy.guarantee import Budget, Unit, show_left

    with place.open() as hub:
        hidden, neighbours = hub.study(study)[1].hidden
        asked = hidden if unit is None else Unit(unit)
        budget = Budget(epsilon=epsilon, delta=delta, unit=asked, neighbours=neighbours)
        left = hub.allow(study, budget, OPERATOR).left.epsilon
    return Answer({"left": left}, f"Left for {study}: epsilon = {show_left(left or 0.0)}")


@commands.add("aggregate", "hub aggregate heart-risk")
def aggregate(
    *,
    study: StudyName,
    request: Annotated[
        str | None,
        Option(
            help="If the aggregator draws noise: a name for this release. Asking again under the "
            "same name returns the same release, and nothing is charged twice under it."
        ),
    ] = None,
    change: Annotated[
        int | None,
        Option(help="Publish the release that was withheld as this change, for the reasons given."),
    ] = None,
    place: Place,
) -> Answer:
    """Combine a study's contributions now."""
    from consilience.hub.combining import Combiner

    with place.open() as hub:
        combiner = Combiner(hub)
        row = combiner.combine(study, request=request, change=change, actor=OPERATOR)
    facts = {"sequence": row["sequence"], "digest": row["digest"]}
    return Answer(facts, f"Release {row['sequence']}: {row['digest']}")


@commands.add("audit", "hub audit --csv")
def show_audit(
    *,
    csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    study: Annotated[str | None, Option(help="Only what is about this study, as CSV.")] = None,
    place: Place,
) -> Answer:
    """Show the audit log, oldest first."""
    with place.open() as hub:
        if csv or study is not None:
            if study is not None:
                hub.study(study)
            return Answer({}, "".join(hub.store.audit_csv(study)).replace("\r\n", "\n").rstrip())
        rows = hub.store.audit(limit=sys.maxsize)
    lines = [f"{row['number']} {row['time'][:19]} {row['actor']}: {row['action']}" for row in rows]
    return Answer({"entries": rows}, "\n".join(lines))


@commands.add("verify", "hub verify")
def verify(place: Place) -> Answer:
    """Check the audit log and all files, and print the log's head; note it outside this machine."""
    with place.open() as hub:
        length, head = hub.store.verify()
    facts = {"entries": length, "head": head}
    return Answer(facts, f"All is valid: {length:,} entries. Head of the audit log: {head}")


@commands.add("use-bucket", "hub use-bucket s3://consortium/hub")
def use_bucket(
    address: Annotated[
        str,
        Argument(help="s3://NAME/PREFIX; boto3 finds the credentials as usual.", metavar="BUCKET"),
    ],
    place: Place,
) -> Answer:
    """Keep the hub's files in an S3-compatible bucket from now on; existing files are copied."""
    with place.open() as hub:
        copied = hub.store.use_bucket(address, OPERATOR)
    return Answer(
        {"bucket": address, "files": copied},
        f"{copied:,} files were copied to {address}. Restart the hub's workers to use it.",
    )


@commands.add("backup", "hub backup copies/2026-11-16")
def backup(path: FilePath, place: Place) -> Answer:
    """Write a consistent copy of everything into a new folder; the hub may keep running."""
    from consilience.hub import operating

    _, head = operating.backup(place.folder, path, url=place.database)
    facts = {"folder": str(path), "head": head}
    return Answer(facts, f"Copied to {path}. Head of the audit log: {head}")


@commands.add("restore", "hub restore copies/2026-11-16 --folder new-hub")
def restore(path: FilePath, place: Place, *, yes: Yes = False) -> Answer:
    """Restore a backup into a new folder; open invitations, sessions and links become void."""
    from consilience.hub import operating

    confirm("Does the hub of this backup run nowhere else, and never will again?", yes=yes)
    length, head = operating.restore(path, place.folder, url=place.database)
    return Answer(
        {"folder": str(place.folder), "entries": length, "head": head},
        f"Restored into {place.folder}: {length:,} entries, head {head}. Sites that had not "
        "enrolled yet need a new invitation. Keys and accounts are those of the backup: revoke, "
        "disable and change again what was revoked, disabled or changed since.",
    )
