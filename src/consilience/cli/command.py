"""How functions become commands: their options, their help, and an answer as text or as JSON."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer
from typer import Option

from consilience.text import printable

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Function = TypeVar("Function", bound=Callable[..., "Answer | None"])

# Click's class, or that of the copy of Click that newer versions of Typer bring.
UsageError: Any = typer.BadParameter.__mro__[1]


class Answer(NamedTuple):
    """What a command prints: text, or with --json the facts; and the exit code it ends with."""

    facts: Mapping[str, object]
    text: str
    code: int = 0


def show(text: str, *, as_error: bool = False) -> None:
    """Print text for people: all that commands print, which may repeat text of others."""
    print(printable(text, lines=True), file=sys.stderr if as_error else sys.stdout)


class Commands(typer.Typer):
    """A group of commands."""

    def __init__(self, help: str) -> None:
        super().__init__(
            help=help,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,  # they show local variables, which may be records
        )
        self.callback(invoke_without_command=True)(ask_for_command)

    def add(self, name: str, example: str) -> Callable[[Function], Function]:
        """Return a decorator that adds a function as a command, with an example below its help."""

        def register(function: Function) -> Function:
            self.command(name, epilog=f"Example: consilience {example}")(as_command(function))
            return function

        return register


def ask_for_command(context: typer.Context) -> None:
    """Print the help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        show(context.get_help())
        raise typer.Exit(2)


def as_command(function: Callable[..., Answer | None]) -> Callable[..., None]:
    """Return a function that Typer can turn into a command.

    Typer wants one parameter per option. A parameter whose type is a dataclass stands for all of
    its fields, so that commands can share options and pass them on together. A function that
    returns an `Answer` also gets the option --json, and its value if it has a parameter `as_json`.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {n: hint for n, hint in hints.items() if is_dataclass(hint)}

    def run(*, as_json: bool = False, **values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        answer = function(**values, **({"as_json": as_json} if "as_json" in hints else {}))
        if answer is not None:
            facts = json.dumps(answer.facts, indent=2, allow_nan=False, default=str)
            show(facts if as_json else answer.text)
            raise typer.Exit(answer.code)

    options = {option.name: option for option in _options(function)}
    if hints["return"] is Answer:
        json_option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)
        options["as_json"] = json_option.replace(annotation=Json)
    run.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in options.items()}
    run.__doc__ = function.__doc__
    return run


def _options(function: Callable[..., object]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function or of a dataclass, with the fields of dataclasses."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            yield from _options(hints[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
