"""The command `consilience`: its groups of commands, and what happens when one fails.

A command parses its options, calls the library and prints. It imports what it needs when it runs,
so help loads nothing heavy. Results go to standard output, progress and errors to standard error.
The exit code is 0 only on success.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from consilience import __version__
from consilience.cli import accounts, files, keyholder, ledger, prepare, site, study
from consilience.cli.command import Commands, UsageError, ask_for_command, show
from consilience.errors import ConsilienceError, PrivacyLeakWarning, RecordsWarning

app = Commands("Learn one good classifier together without sharing records.")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        show(f"consilience {__version__}")
        raise typer.Exit()
    ask_for_command(context)


app.add("demo", "demo --folder demo-report")(prepare.demo)
app.add("plan", "plan study.toml --records 789 --sites 10")(prepare.plan)
app.add("simulate", "simulate study.toml --data table.csv --sites 10 --epsilon 0.1 --epsilon 1")(
    prepare.simulate
)
app.add("audit", "audit study.toml")(prepare.audit)
app.add_typer(study.commands, name="study")
app.add_typer(site.commands, name="site")
app.add_typer(files.contribution, name="contribution")
app.add_typer(files.release, name="release")
app.add_typer(accounts.commands, name="hub")  # with all other commands of the hub
app.add_typer(keyholder.commands, name="keyholder")
app.add_typer(ledger.commands, name="ledger")


def help_page() -> str:
    """Return docs/cli.md: the help of every command, as a terminal of 100 columns shows it."""
    parts = [
        "# Commands",
        "Generated from `--help` by `consilience.cli.app.help_page`; tests/cli/test_app.py "
        "compares the two.",
    ]

    def visit(command: Any, path: str, parent: typer.Context | None) -> None:
        context = typer.Context(
            command, parent, info_name=path.split()[-1], terminal_width=100, max_content_width=100
        )
        parts.append(f"## `{path}`\n\n```text\n{command.get_help(context).strip()}\n```")
        for name, child in sorted(getattr(command, "commands", {}).items()):
            visit(child, f"{path} {name}", context)

    visit(typer.main.get_command(app), "consilience", None)
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; every failure is one line on standard error and an exit code other than 0."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            code = app(args=arguments, prog_name="consilience", standalone_mode=False)
    except UsageError as error:
        where = error.ctx.command_path if error.ctx else "consilience"
        code = _fail(f"{error.format_message().rstrip('.')}. See '{where} --help'.", 2)
    except (typer.Abort, KeyboardInterrupt):
        code = _fail("stopped. Charges made so far remain.", 130)
    except ConsilienceError as error:
        code = _fail(str(error), 1)
    except ModuleNotFoundError as error:
        package = _name_package(error.name or "")
        code = _fail(
            f"this needs a package that is not installed here. Charges made so far remain. Install "
            f"it with: pip install '{package}'",
            1,
        )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        file = error.filename or "no file named"
        code = _fail(f"{reason}: {file}. Charges made so far remain.", 1)
    except Exception as error:
        # Neither message nor values are shown, because a library's message may quote a record.
        # Where it happened is enough for a report.
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        code = _fail(
            f"unexpected {type(error).__name__} at {where}. Charges made so far remain. Please "
            "report it.",
            1,
        )
    sys.exit(code)


def _name_package(module: str) -> str:
    """Return what pip has to install for a module: one of our extras, if it brings the module."""
    name = module.partition(".")[0].replace("_", "-").lower()
    for line in metadata.requires("consilience") or ():
        need = re.match(r"([\w.-]+).*\bextra == ['\"](\w+)['\"]", line)
        if need and need[1].lower() == name and need[2] != "dev":
            return f"consilience[{need[2]}]"
    return name


def _show_warning(
    other: Callable[..., None], message: Warning | str, category: type[Warning], *where: object
) -> None:
    """Show a warning of ours as one line on standard error, without a place in the source."""
    if issubclass(category, PrivacyLeakWarning | RecordsWarning):
        show(f"consilience: {message}", as_error=True)
    else:
        other(message, category, *where)


def _fail(message: str, code: int) -> int:
    show(f"consilience: {message}", as_error=True)
    return code
