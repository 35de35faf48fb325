"""The commands of design.md section 3: parse, call the library, print; a collaboration's are in `commands.py`.

Everything heavy is imported inside the command that needs it: help loads no more than the package
itself does. Results go to standard output, progress and errors to standard error; the exit code is
0 only on success.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from consilience import __version__
from consilience.cli.commands import APPS
from consilience.errors import ConsilienceError, SettingsError
from consilience.progress import showing

app = typer.Typer(
    name="consilience",
    help="Learn one good classifier together without sharing records.",
    pretty_exceptions_enable=False,  # a traceback with local variables would show records
    rich_markup_mode=None,
)
ledger_app = typer.Typer(
    help="Read a site's ledger: what was allowed, charged and sealed.", rich_markup_mode=None
)
for _name, _commands in (*APPS.items(), ("ledger", ledger_app)):
    app.add_typer(_commands, name=_name)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
LedgerPath = Annotated[Path, typer.Argument(help="The ledger's file.", metavar="LEDGER")]


class Learner(StrEnum):
    """The learners that can be named on the command line."""

    LOGISTIC = "logistic"
    SVM = "svm"


class Mechanism(StrEnum):
    """Where a linear learner draws its noise."""

    OBJECTIVE = "objective"
    OUTPUT = "output"
    GENERALIZED = "generalized"


class Neighbours(StrEnum):
    """Which pairs of data sets must look alike."""

    REPLACE_ONE = "replace-one"
    ADD_REMOVE = "add-remove"


class Aggregator(StrEnum):
    """The aggregators that can be named on the command line."""

    AVERAGE = "average"
    AVERAGE_EQUAL = "average-equal"
    AVERAGE_SIZE = "average-size"
    FEATURE = "feature"
    BLEND = "blend"
    BOOSTING = "boosting"


class Backend(StrEnum):
    """Where cells of a simulation can run side by side."""

    LOKY = "loky"
    THREADING = "threading"
    RAY = "ray"
    DASK = "dask"


class Attack(StrEnum):
    """How an audit attacks."""

    EXACT = "exact"
    SAMPLE = "sample"


Epsilon = Annotated[float, typer.Option("--epsilon", help="The privacy budget of one training.")]
Delta = Annotated[float, typer.Option("--delta", help="0 for pure epsilon.")]
Which = Annotated[Learner, typer.Option("--learner", help="The learner.")]
Where = Annotated[Mechanism, typer.Option("--mechanism", help="Where the noise goes.")]
Ridge = Annotated[
    float, typer.Option("--regularization", help="Weight of the ridge in the mean objective.")
]
Relation = Annotated[
    Neighbours, typer.Option("--neighbours", help="Which data sets must look alike.")
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    if version:
        print(f"consilience {__version__}")
        raise typer.Exit()
    _ask_for_command(context)


@ledger_app.callback(invoke_without_command=True)
def _ask_for_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command(epilog="Example: consilience demo --folder demo-report")
def demo(
    folder: Annotated[Path, typer.Option(help="Where study, hub, sites and report go.")] = Path(
        "demo-report"
    ),
    as_json: Json = False,
) -> None:
    """Let six made-up hospitals learn together through a hub on this machine, and compare with each alone.

    The patients are computed from a formula and are about no one. Takes about a minute.
    """
    from consilience.demo import demo as run

    with showing("Six sites and a hub", None) as progress:
        report = run(folder, progress=progress)
    if as_json:
        _print_json(report.as_dict())
    else:
        print(f"{report}\n\nWritten in {report.seconds:.0f} s: {', '.join(report.files)}")
        print(f"The release: {report.release}\nThe dashboard: {report.dashboard}")


@app.command(
    epilog="Example: consilience plan --records 789 --features 50 --epsilon 0.1 --sites 10 --hub-records 200"
)
def plan(
    records: Annotated[int, typer.Option(help="Number of records at one site.")],
    epsilon: Epsilon,
    features: Annotated[
        int | None, typer.Option(help="Number of encoded features; not needed with --public.")
    ] = None,
    delta: Delta = 0.0,
    sites: Annotated[int, typer.Option(help="How many such sites would join.")] = 1,
    hub_records: Annotated[
        int | None, typer.Option(help="Public records at the hub; else those of --public.")
    ] = None,
    public: Annotated[
        Path | None, typer.Option(help="CSV or Parquet file of labelled public records.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Name of the label column in that file.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="A column of it that is no feature; once for each.")
    ] = None,
    target: Annotated[
        float, typer.Option(help="Excess loss whose requirements are reported.")
    ] = 0.01,
    learner: Which = Learner.LOGISTIC,
    mechanism: Where = Mechanism.OBJECTIVE,
    regularization: Ridge = 1e-2,
    neighbours: Relation = Neighbours.REPLACE_ONE,
    as_json: Json = False,
) -> None:
    """Tell what accuracy to expect at a number of records, features and an epsilon, before spending any budget.

    For several sites: of every aggregator, with what is recommended and how many sites, public
    records or how much epsilon a target needs. No private record is read. With public records like
    the sites' own the advice rests on them; without, it assumes a loss that bends equally in all
    directions.
    """
    from consilience.planning.plan import plan as advise
    from consilience.planning.plan import read_public

    if (public is None) != (label is None):
        raise SettingsError(
            "Advice from public records needs both --public and --label, and got one of the two. "
            "Nothing was computed. Give both, or --features alone."
        )
    advice = advise(
        n_records=records,
        n_features=features,
        epsilon=epsilon,
        delta=delta,
        n_sites=sites,
        n_public=hub_records,
        public=None
        if public is None or label is None
        else read_public(public, label, drop=drop or ()),
        target=target,
        learner=_learner_class(learner),
        mechanism=str(mechanism),
        regularization=regularization,
        neighbours=str(neighbours),
    )
    if as_json:
        _print_json(advice.as_dict())
    else:
        print(advice)


@app.command(
    epilog="Example: consilience simulate --data table.csv --label y --epsilon 0.1 --epsilon 1 --public 200"
)
def simulate(
    data: Annotated[Path, typer.Option(help="CSV or Parquet file of public records.")],
    label: Annotated[str, typer.Option(help="Name of the label column.")],
    epsilon: Annotated[
        list[float], typer.Option(help="A level to try; give it several times for several.")
    ],
    sites: Annotated[int, typer.Option(help="Number of sites of equal size.")] = 10,
    site_column: Annotated[
        str | None, typer.Option(help="Column with the site of each record, instead.")
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="Records of one site; once for each site, instead.")
    ] = None,
    label_skew: Annotated[
        float | None, typer.Option(help="Uneven classes: 0.1 very, 100 hardly.")
    ] = None,
    feature_skew: Annotated[
        float | None, typer.Option(help="Uneven features: from 0, not at all, to 1.")
    ] = None,
    aggregator: Annotated[
        list[Aggregator], typer.Option(help="How to join; give it several times for several.")
    ] = [  # noqa: B006
        Aggregator.AVERAGE
    ],
    public: Annotated[int, typer.Option(help="How many records the hub may see; 0 for none.")] = 0,
    test: Annotated[float, typer.Option(help="Share of the records to test on.")] = 0.3,
    repeats: Annotated[
        int, typer.Option(help="How often all is repeated, each time divided anew.")
    ] = 10,
    draws: Annotated[int, typer.Option(help="How often noise is drawn on each division.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Makes the numbers repeatable; voids all guarantees.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes side by side; -1 for one per core.")] = 1,
    backend: Annotated[
        Backend | None, typer.Option(help="Where they run; results do not depend on it.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder to keep what is done and go on from; needs --seed.")
    ] = None,
    delta: Delta = 0.0,
    learner: Which = Learner.LOGISTIC,
    mechanism: Where = Mechanism.OBJECTIVE,
    regularization: Ridge = 1e-2,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all numbers (CSV, Parquet) and a chart.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Play a collaboration through on public records: would joining help, at which epsilon, by which aggregator.

    Only for public records: it trains again and again without a ledger, shows errors, and reads
    bounds, categories and classes off the file. Every table has the honest baselines: public
    records alone, sites alone, all pooled.
    """
    from consilience.planning.plan import read_public
    from consilience.simulation.simulate import simulate as run
    from consilience.tables.schema import read_table

    table: Any = read_table(data)
    where: Any = sites
    if site_column is not None:
        if site_column not in table.column_names:
            raise SettingsError(
                f"The file {str(data)!r} has no column {site_column!r} to tell sites apart. "
                f"Nothing was trained. Name one of {table.column_names}."
            )
        where, table = table[site_column].to_pylist(), table.drop_columns([site_column])
    X, y = read_public(table, label)
    made = _learner_class(learner)(
        epsilon=epsilon[0], delta=delta, mechanism=str(mechanism), regularization=regularization
    )
    with showing("Simulating", None) as progress:
        report = run(
            made,
            {str(name): _aggregator(name) for name in aggregator},
            X,
            y,
            sites=where,
            public=public or None,
            test=test,
            repeats=repeats,
            seed=seed,
            epsilon=epsilon,
            sizes=size or None,
            label_skew=label_skew,
            feature_skew=feature_skew,
            draws=draws,
            n_jobs=jobs,
            backend=None if backend is None else str(backend),
            checkpoint=checkpoint,
            progress=progress,
        )
    files: list[str] = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        writers = {
            "results.csv": report.to_csv,
            "results.parquet": report.to_parquet,
            "errors.png": report.plot,
        }
        for name, write in writers.items():
            write(out / name)
            files.append(str(out / name))
    if as_json:
        _print_json({**report.as_dict(), "files": files})
    else:
        print(report)
        if files:
            print(f"\nWritten in {report.seconds:.1f} s: {', '.join(files)}")


@app.command(epilog="Example: consilience audit --epsilon 1 --mechanism output")
def audit(
    epsilon: Epsilon,
    delta: Delta = 0.0,
    learner: Which = Learner.LOGISTIC,
    mechanism: Where = Mechanism.OBJECTIVE,
    regularization: Ridge = 1e-2,
    neighbours: Relation = Neighbours.REPLACE_ONE,
    attack: Annotated[
        Attack, typer.Option(help="Search the exact density, or train many times.")
    ] = Attack.EXACT,
    records: Annotated[int, typer.Option(help="Records of the attacked, made-up data sets.")] = 100,
    as_json: Json = False,
) -> None:
    """Attack a learner's privacy on made-up records and report the largest epsilon that could be proven.

    Leaves with exit code 1 if the claim is false. That none was found is no proof; docs/guarantees/
    holds those.
    """
    from consilience.auditing.audit import audit as attack_learner

    made = _learner_class(learner)(
        epsilon=epsilon,
        delta=delta,
        mechanism=str(mechanism),
        regularization=regularization,
        neighbours=str(neighbours),
        public_size=records if neighbours is Neighbours.ADD_REMOVE else None,
    )
    with showing("Attacking", None):
        report = attack_learner(made, kind=attack.value, n_records=records)
    if as_json:
        _print_json(report.as_dict())
    else:
        print(report)
    if not report.passed:
        raise typer.Exit(1)


@ledger_app.command(
    "show", epilog="Example: consilience ledger show demo-report/ledgers/site-01.sqlite"
)
def ledger_show(
    path: LedgerPath,
    dataset: Annotated[
        str | None, typer.Option(help="Only this data set; needed if it was never charged.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what each data set's owner allowed, what was spent, and every charge."""
    ledger = _ledger(path)
    charges = ledger.charges(dataset)
    balances = [
        ledger.balance(name) for name in ([dataset] if dataset is not None else ledger.datasets())
    ]
    if as_json:
        amounts = ("limit", "spent", "left")
        shown = [
            {**asdict(b), **{name: getattr(b, name)._asdict() for name in amounts}}
            for b in balances
        ]
        listed = [
            {**c.receipt, "purpose": c.purpose, "state": c.state, "time": c.time} for c in charges
        ]
        _print_json({"balances": shown, "charges": listed})
        return
    if not balances:
        print("No owner has declared a limit yet.")
    for balance in balances:
        print(f"{balance.dataset} (per {balance.unit}, {balance.neighbours})")
        for name in ("epsilon", "delta", "rho"):
            limit, spent, left = (
                getattr(amounts, name) for amounts in (balance.limit, balance.spent, balance.left)
            )
            if limit is not None:
                print(f"  {name:<8} limit {limit:g}, spent {spent:g}, left {left:g}")
    for charge in charges:
        cost = f"epsilon={charge.epsilon:g} delta={charge.delta:g}"
        print(f"{charge.time}  {charge.dataset}  {charge.purpose}  {cost}  {charge.state}")


@ledger_app.command(
    "verify", epilog="Example: consilience ledger verify site.sqlite --head 4f0c..."
)
def ledger_verify(
    path: LedgerPath,
    head: Annotated[
        str | None, typer.Option(help="A head or receipt hash written down earlier.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Walk the whole chain of charges and print its head, to be written down outside the machine."""
    found = _ledger(path).verify(head)
    if as_json:
        _print_json({"valid": True, "head": found})
    else:
        print(f"The chain is whole. Its head is {found}")


def _ledger(path: Path) -> Any:
    from consilience.privacy.ledger import Ledger

    if not path.exists():  # opening would create an empty one
        raise SettingsError(
            f"There is no ledger at {str(path)!r}. Nothing was read or created. Check the path."
        )
    return Ledger(path)


def _learner_class(learner: Learner) -> Any:
    from consilience.learners.linear import PrivateLinearSVC, PrivateLogisticRegression

    return {Learner.LOGISTIC: PrivateLogisticRegression, Learner.SVM: PrivateLinearSVC}[learner]


def _aggregator(name: Aggregator) -> Any:
    from importlib import import_module

    module, kind, settings = {
        Aggregator.AVERAGE: ("average", "Average", {}),
        Aggregator.AVERAGE_EQUAL: ("average", "Average", {"weights": "equal"}),
        Aggregator.AVERAGE_SIZE: ("average", "Average", {"weights": "size"}),
        Aggregator.FEATURE: ("feature", "FeatureMethod", {}),
        Aggregator.BLEND: ("blend", "PublicBlend", {}),
        Aggregator.BOOSTING: ("boosting", "SiteBoosting", {}),
    }[name]
    return getattr(import_module(f"consilience.aggregators.{module}"), kind)(**settings)


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2, allow_nan=False))


def help_page() -> str:
    """Return docs/cli.md: the help of every command, as a terminal of 100 columns shows it."""
    parts = [
        "# Commands",
        "Generated from `--help` by `consilience.cli.app.help_page`; tests/cli/test_app.py compares the "
        "two.",
    ]
    root = typer.main.get_command(app)

    def visit(command: Any, path: str, parent: typer.Context | None) -> None:
        context = typer.Context(
            command, parent, info_name=path.split()[-1], terminal_width=100, max_content_width=100
        )
        parts.append(f"## `{path}`\n\n```text\n{command.get_help(context).strip()}\n```")
        for name, child in sorted(getattr(command, "commands", {}).items()):
            visit(child, f"{path} {name}", context)

    visit(root, "consilience", None)
    return "\n\n".join(parts) + "\n"


_UsageError: Any = typer.BadParameter.__mro__[
    1
]  # click's, or the copy of it that newer versions of Typer bring


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; every failure is one line on standard error and an exit code other than 0."""
    try:
        code = app(args=arguments, prog_name="consilience", standalone_mode=False)
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx else "consilience"
        code = _failed(f"{error.format_message().rstrip('.')}. See '{where} --help'.", 2)
    except (typer.Abort, KeyboardInterrupt):
        code = _failed("stopped. Charges made so far stand.", 130)
    except ConsilienceError as error:
        code = _failed(str(error), 1)
    except OSError as error:
        code = _failed(
            f"{error.strerror or type(error).__name__}: {error.filename or 'no file named'}", 1
        )
    except Exception as error:
        # Neither message nor values: a library's may quote a record. Where it happened is enough to
        # report it.
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        code = _failed(
            f"unexpected {type(error).__name__} at {where}. Charges made so far stand. Please "
            "report it.",
            1,
        )
    sys.exit(code)


def _failed(message: str, code: int) -> int:
    print(f"consilience: {message}", file=sys.stderr)
    return code
