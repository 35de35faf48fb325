"""Options and arguments that several commands share."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer import Argument, Option

from consilience.cli.command import UsageError
from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.aggregators.base import Aggregator
    from consilience.learners.base import PrivateLearner
    from consilience.tables.schema import Schema

Value = TypeVar("Value")
Neighbours = Literal["replace-one", "add-remove"]

FilePath = Annotated[Path, Argument(help="The file.", metavar="FILE")]
OwnTable = Annotated[
    Path,
    Argument(
        help="A CSV, Parquet or Excel file, or a TOML file that describes a sheet or a query.",
        metavar="TABLE",
    ),
]
MappingPath = Annotated[
    Path | None,
    Option(
        help="A TOML file that translates the table's names, units and codes into the study's; by "
        "default the one that was approved last.",
        metavar="FILE",
    ),
]
StudyName = Annotated[str, Argument(help="The name of the study.", metavar="STUDY")]
StudyPath = Annotated[
    Path | None, Argument(help="The study file. Without one, options say it.", metavar="STUDY")
]
PredictionsPath = Annotated[
    Path, Option(help="CSV or Parquet file to write, with one row per record.")
]
IdColumn = Annotated[
    str | None,
    Option("--id", help="A column of the table that is written beside the predictions."),
]
PREDICTIONS = Path("predictions.csv")
Yes = Annotated[bool, Option("--yes", help="Do not ask.")]
TrainingEpsilon = Annotated[
    float | None,
    Option(help="The budget of one training; by default the largest that the study allows."),
]


def check_out(path: Path, *endings: str, besides: Path | None = None) -> Path:
    """Return a file to write; refuse one that would replace what no command can make again.

    Files with one of the `endings` are replaced, but never one in a site's folder, nor `besides`,
    which is read.
    """
    file = path.resolve()
    of_site = any((folder / "site.json").exists() for folder in file.parents)
    read = besides is not None and file == besides.resolve()
    if of_site or read or (file.exists() and file.suffix not in endings):
        raise SettingsError(
            f"The file {str(path)!r} is in a site's folder, or is no file that this command may "
            "replace. Nothing was written. Name another one."
        )
    return path


def open_mapped(table: Path, schema: Schema, mapping: Path | None) -> object:
    """Return somebody's own table as a schema sees it, by a mapping file if there is one."""
    from consilience.tables.mapping import Mapped, TableMapping
    from consilience.tables.sources import open_table

    source = open_table(table)
    return source if mapping is None else Mapped(source, TableMapping.load(mapping, schema))


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone; stop without a yes, or without anybody to ask."""
    if not (yes or (sys.stdin.isatty() and typer.confirm(question, err=True))):
        raise SettingsError(
            f"{question} Nobody said yes. Nothing was changed. Pass --yes if you mean it."
        )


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take options from a TOML file; the environment and flags go before it."""
    if path is None:
        return None
    try:
        stated = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SettingsError(
            f"The settings file {path.name!r} cannot be read as TOML. Nothing was started."
        ) from None
    group = context.parent.command if context.parent else context.command
    commands = getattr(group, "commands", {"": context.command}).values()
    known = {option for command in commands for option in _long_options(command)}
    if unknown := sorted(set(stated) - known):
        raise SettingsError(
            f"The settings file {path.name!r} has {unknown[0]!r}, which is no option of these "
            "commands. Nothing was started. Write options as in --help, without the dashes."
        )
    own = _long_options(context.command)
    context.default_map = {own[name]: value for name, value in stated.items() if name in own}
    return path


def _long_options(command: object) -> dict[str, str]:
    """Return the options of a command that a file may hold, and the names of their parameters."""
    return {
        option[2:]: parameter.name
        for parameter in getattr(command, "params", ())
        for option in parameter.opts
        if option.startswith("--") and parameter.name not in ("config", "password", "yes")
    }


def list_learners() -> list[str]:
    """Return what --learner takes: short names, then class names."""
    from consilience.learners.registry import LEARNERS

    return [*(cls.shorthand for cls in LEARNERS.values() if cls.shorthand), *LEARNERS]


def list_aggregators() -> list[str]:
    """Return what --aggregator takes: short names, then class names."""
    from consilience.aggregators.registry import AGGREGATORS, shorthands

    return [*shorthands(), *AGGREGATORS]


def find_learner(name: str) -> type[PrivateLearner[Any, Any]]:
    """Return the learner with this short name or class name."""
    from consilience.learners.registry import LEARNERS

    _check_name("--learner", name, list_learners())
    return next(cls for cls in LEARNERS.values() if name in (cls.shorthand, cls.__name__))


def build_aggregator(name: str) -> Aggregator:
    """Return the aggregator with this short name, or of the class with this name."""
    from consilience.aggregators.registry import from_shorthand

    _check_name("--aggregator", name, list_aggregators())
    return from_shorthand(name)


def _check_name(option: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}.", param_hint=option)


def require(value: Value | None, option: str) -> Value:
    """Return the value of an option that is needed unless a study is given."""
    if value is None:
        raise UsageError(f"Missing option '{option}', which is needed without a study file")
    return value


@contextmanager
def as_typed(*groups: type) -> Iterator[None]:
    """Let problems with settings name the options of a command, and not Python's parameters."""
    typed = {}
    for group in groups:
        for name, hint in get_type_hints(group, include_extras=True).items():
            option = hint.__metadata__[0]  # Typer takes the first of its names for a default
            typed[name] = option.default if isinstance(option.default, str) else f"--{name}"

    def name_option(found: re.Match[str]) -> str:
        return f"{typed.get(found[1], f'--{found[1]}').replace('_', '-')} must"

    try:
        yield
    except SettingsError as problem:
        raise SettingsError(PARAMETER.sub(name_option, str(problem))) from None


PARAMETER = re.compile(r"The '(\w+)' parameter of (?:plan|simulate) must")


def refuse_beside_study(*groups: Any) -> None:
    """Refuse options that describe what the study file says already."""
    for group in groups:
        for field in fields(group):
            if getattr(group, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise UsageError(f"The study file decides '{option}': leave the option out")


@dataclass(frozen=True, kw_only=True)
class LearnerOptions:
    """A learner described by options instead of a study file."""

    delta: Annotated[float, Option(help="0 for pure epsilon.")] = 0.0
    learner: Annotated[
        str,
        Option(
            help="What sites train: a short name such as logistic or svm, or a class name.",
            autocompletion=list_learners,
        ),
    ] = "logistic"
    mechanism: Annotated[
        Literal["auto", "objective", "output", "generalized", "gradient"] | None,
        Option(help="Where the noise is added; by default as the learner does."),
    ] = None
    regularization: Annotated[
        float | None,
        Option(
            help="Weight of the ridge in the mean objective; by default from public facts alone."
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the learner's class, and those settings that it has."""
        cls = find_learner(self.learner)
        known = inspect.signature(cls).parameters
        settings: dict[str, Any] = {"learner": cls}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "regularization" and value is None and field.name in known:
                value = "auto"
            if field.name in known and value is not None:
                settings[field.name] = value
            elif value != field.default and field.name != "learner":
                raise typer.BadParameter(
                    f"{cls.__name__} has no such setting.", param_hint=f"--{field.name}"
                )
        return settings

    def build(self, *, epsilon: float, **more: Any) -> PrivateLearner[Any, Any]:
        """Return the learner, with `more` settings than the options have."""
        settings = self.settings()
        cls: type[PrivateLearner[Any, Any]] = settings.pop("learner")
        return cls(epsilon=epsilon, **settings, **more)


@dataclass(frozen=True, kw_only=True)
class RelatedLearnerOptions(LearnerOptions):
    """The same, with the neighbour relation."""

    neighbours: Annotated[
        Neighbours | None,
        Option(help="Which data sets must be hard to distinguish; by default the learner's usual."),
    ] = None
