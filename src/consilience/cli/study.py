"""The commands `consilience study …`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

import consilience as cs
from consilience.cli.command import Answer, Commands
from consilience.cli.options import FilePath, OwnTable, find_learner
from consilience.errors import SettingsError

if TYPE_CHECKING:
    from consilience.learners.axes import KnownAxes

commands = Commands("Write, check and read studies: what all sites agree on.")


@dataclass(frozen=True)
class Columns:
    """What a study says about the columns of a table."""

    label: Annotated[str, Option(help="The column to predict; a code book names it too.")] = ""
    codebook: Annotated[
        Path | None,
        Option(help="A CSV or YAML file of each column's name, kind, bounds or categories."),
    ] = None
    classes: Annotated[str, Option(help="The labels, separated by commas.")] = ""
    number: Annotated[
        list[str] | None,
        Option(help="A column of numbers and its bounds, NAME:LOW:HIGH. Repeatable."),
    ] = None
    category: Annotated[
        list[str] | None, Option(help="A column of categories, NAME:A,B,C. Repeatable.")
    ] = None
    drop: Annotated[list[str] | None, Option(help="A column to ignore. Repeatable.")] = None
    public: Annotated[
        bool,
        Option(
            "--public",
            help="Anyone may see this table: read bounds and categories from its values.",
        ),
    ] = False
    test: Annotated[
        Path | None,
        Option(help="A table that anyone may see, to measure releases on; beside the study file."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """What sites train or add up, and who keeps the hub from seeing it."""

    learner: Annotated[
        str,
        Option(
            help="What sites train or add up: a class name, or a short name such as svm. By "
            "default a gradient step from a public table, moments with keyholders, otherwise a "
            "logistic regression."
        ),
    ] = ""
    keyholder: Annotated[
        list[str] | None,
        Option(
            help="The public key of a keyholder: sites then share their noise, and the hub sees "
            "totals only. Repeatable."
        ),
    ] = None
    sites: Annotated[
        int, Option(help="How many sites are expected, where there are keyholders.")
    ] = 10


@commands.add("new", "study new ward.csv --label ill --number age:0:120 --category sex:f,m")
def new(
    table: OwnTable,
    columns: Columns,
    method: Method,
    name: Annotated[
        str, Option(help="A short name: lower-case letters, digits, hyphens.")
    ] = "my-study",
    purpose: Annotated[str, Option(help="What the study is for, in a sentence.")] = "",
    out: Annotated[Path, Option(help="The study file to write.")] = Path("study.toml"),
) -> Answer:
    """Write a commented study file for a table; only the names of its columns are read."""
    from consilience.study.draft import Draft
    from consilience.study.study import check
    from consilience.tables.schema import Schema

    if out.exists():
        raise SettingsError(
            f"The file {str(out)!r} is there already. Nothing was written. Name another with --out."
        )
    schema = None if columns.codebook is None else Schema.from_codebook(columns.codebook)
    label = columns.label or (schema.label if schema else "")
    if not label or (schema and label != schema.label):
        raise SettingsError(
            "The column to predict is not named, or the code book names another. Nothing was "
            "written. Name it with --label, or as the label of the code book."
        )
    draft = Draft(
        name=name,
        label=label,
        schema=schema,
        purpose=purpose,
        classes=[part.strip() for part in columns.classes.split(",") if part.strip()],
        numbers=dict(_read_bounds(text) for text in columns.number or []),
        categories=dict(_read_categories(text) for text in columns.category or []),
        drop=columns.drop or [],
        learner=find_learner(method.learner).__name__ if method.learner else None,
        keyholders=method.keyholder or (),
        sites=method.sites,
        is_public=columns.public,
        test=columns.test,
        file=out.name,
    )
    out.write_text(draft.write(table), encoding="utf-8")
    problems = check(out)
    todo = "It is complete." if not problems else "\n  - ".join(["Still to do:", *problems])
    return Answer({"file": str(out), "problems": problems}, f"Written: {out}\n{todo}")


@commands.add("check", "study check study.toml")
def check(study: FilePath) -> Answer:
    """List all problems of a study together; the exit code is 1 if there are any."""
    from consilience.study.study import check as find_problems
    from consilience.study.withholding import describe_waiting

    problems = find_problems(study)
    if problems:
        text = "\n  - ".join(["This study cannot work yet:", *problems])
        return Answer({"fits": False, "problems": problems}, text, code=1)
    valid = cs.Study.load(study)
    facts = {"fits": True, "name": valid.name, "digest": valid.digest}
    text = f"{valid.name} is complete. Digest {valid.digest}"
    if valid.test is not None and (study.parent / valid.test.file).exists():
        test = valid.test.read(valid.schema, study.parent)
        text = "\n".join([text, *describe_waiting(valid, test.X.shape[0])])
    return Answer(facts, text)


@commands.add("show", "study show study.toml")
def show(study: FilePath) -> Answer:
    """Say in words what a study demands and promises."""
    from consilience.study.pages import of_study

    loaded = cs.Study.load(study)
    return Answer({**loaded.to_dict(), "digest": loaded.digest}, of_study(loaded).on_screen())


@commands.add("axes", "study axes study.toml --components 5 >> study.toml")
def axes(
    study: FilePath,
    components: Annotated[int, Option(help="How many axes models are trained along.")],
    release: Annotated[
        Path | None,
        Option(help="Take the axes of the moments behind this release; FILE is its study."),
    ] = None,
    contribution: Annotated[
        list[Path] | None,
        Option(help="A contribution of that release, unless its hub was blind. Repeatable."),
    ] = None,
) -> Answer:
    """Write the part [projection] of a study: axes of public records, or of released moments."""
    from consilience.study.axes import axes_of_public, axes_of_release
    from consilience.study.toml import write_projection

    loaded = cs.Study.load(study)
    if release is None:
        found: KnownAxes = axes_of_public(loaded, study.parent, components)
    else:
        files = [cs.Contribution.load(path) for path in contribution or []]
        found = axes_of_release(loaded, cs.Release.load(release), files, components)
    return Answer({"projection": found.as_dict()}, write_projection(found))


def _read_bounds(text: str) -> tuple[str, tuple[float, float]]:
    name, _, high = text.rpartition(":")
    name, _, low = name.rpartition(":")
    try:
        return name, (float(low), float(high))
    except ValueError:
        raise SettingsError(
            f"A column of numbers is declared as NAME:LOW:HIGH. Got {text!r} instead."
        ) from None


def _read_categories(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition(":")
    categories = [value.strip() for value in values.split(",") if value.strip()]
    if not categories:
        raise SettingsError(
            f"A column of categories is declared as NAME:A,B,C. Got {text!r} instead."
        )
    return name, categories
