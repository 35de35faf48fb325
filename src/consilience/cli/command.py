"""How functions become commands: their options, their help, and an answer as text or as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer
from typer import Option

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Function = TypeVar("Function", bound=Callable[..., "Answer | None"])

# Click's class, or that of the copy of Click that newer versions of Typer bring.
UsageError: Any = typer.BadParameter.__mro__[1]


class Answer(NamedTuple):
    """What a command prints: text, or with --json the facts; and the exit code it ends with."""

    facts: Mapping[str, object]
    text: str
    code: int = 0


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
        print(context.get_help())
        raise typer.Exit(2)


def as_command(function: Callable[..., Answer | None]) -> Callable[..., None]:
    """Return a function that Typer can turn into a command.

    Typer wants one parameter per option. A parameter whose type is a dataclass stands for all of
    its fields, so that commands can share options and pass them on together. A function that
    returns an `Answer` also gets the option --json.
    """
    hints = get_type_hints(function, include_extras=True)
    answers = hints.pop("return") is Answer
    groups = {n: hint for n, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}

    def run(**values: object) -> None:
        as_json = values.pop("as_json", False)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        answer = function(**values)
        if answer is None:
            return
        facts = json.dumps(answer.facts, indent=2, allow_nan=False, default=str)
        print(facts if as_json else answer.text)
        if answer.code:
            raise typer.Exit(answer.code)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            parameters += [
                _keyword(field.name, types[field.name], _default(field))
                for field in fields(groups[name])
            ]
        else:
            parameters.append(_keyword(name, hints[name], parameter.default))
    if answers:
        parameters.append(_keyword("as_json", Json, False))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = function.__doc__
    return run


def _keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _default(field: Field[object]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
