"""Write a first study file for people to complete.

Only the names of the table's columns are read, unless the table is said to be public.
"""

from __future__ import annotations

import os
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from consilience.aggregators.base import Aggregator
from consilience.aggregators.registry import AGGREGATORS
from consilience.errors import ConsilienceError, SettingsError
from consilience.learners.base import PrivateLearner
from consilience.learners.registry import LEARNERS
from consilience.statistics.gradient_step import GradientStep
from consilience.statistics.total import Total
from consilience.study.check import TO_FILL_IN
from consilience.study.records import file_digest
from consilience.study.toml import VERSION, quote
from consilience.tables.inference import distinct_texts, list_categories, number_bounds
from consilience.tables.public import Public
from consilience.tables.reading import PlainTable, RowSource, read_table
from consilience.tables.schema import Schema
from consilience.tables.sources import open_table

MOST_CATEGORIES = 50
LEAST_PUBLIC = 30  # records that a model to start from is made of
LEAST_BLIND = 3  # sites that share noise: two shares, and one to spare
TOTAL = Total.__name__
_HEAD = """\
# A consilience study: what all sites agree on. Lines that begin with # are comments.
# Complete what is marked FILL IN, then run: consilience study check {file}
# Every number here is public. Take bounds and categories from a code book or from domain
# knowledge, never from records: the largest value in a table belongs to somebody.

[study]
name = {name}
purpose = {purpose}
version = {version}

[privacy]
# replace-one: the number of records of a site is public. add-remove: it is hidden.
neighbours = {neighbours}
# Each site chooses its own epsilon in this range; a smaller one is more private.
epsilon_min = 0.1
epsilon_max = 3.0
# 0 for pure epsilon; a small number such as 1e-6 allows less noise.
delta = {delta}
# No release is made of fewer sites.
min_sites = {min_sites}
# untrusted: what leaves a site is private already. trusted: sites hand the hub exact learners,
# and the aggregator adds the noise. blind: sites hand over masked sums, share their noise, and the
# hub opens totals only, together with the keyholders.
hub = {hub}

{method}
[schema]
label = {label}
{labels}
"""
_MODELS = """\
[learner]
{learners}
# Settings of the learner may follow its name, one per line.
name = {learner}

[aggregator]
{aggregators}
name = {aggregator}
"""
_SUMS = """\
# What sites add up instead of training models; the hub adds up their sums.
[statistic]
{statistics}
# Its settings may follow its name, one per line.
name = {statistic}
{settings}"""
_BLIND = """
# The noise of so many sites together is a whole; a batch needs so many more, who may collude with
# the hub. Compare each keyholder's public key with what it told you itself.
[blind]
shares = {shares}
spare = {spare}
keyholders = {keyholders}
"""
_TEST = """
# Labelled records that anyone may see, on which every release is measured.
[test]
file = {file}
sha256 = {sha256}
"""
_PUBLIC = """
# Labelled records that anyone may see, with the same columns as the sites' tables.
[public]
file = {file}
sha256 = {sha256}
"""


@dataclass(frozen=True)
class Draft:
    """What is known about a study before anyone looks at records.

    Parameters
    ----------
    name, label, purpose
        The study's name, the column to predict, and what the study is for.
    classes, numbers, categories
        Public facts of the columns: the classes of the label, the bounds of numbers and the lists
        of categories.
    drop
        Columns that are not learned from.
    learner
        What sites train, or add up. By default what did best on the tables of
        benchmarks/joining.md: `GradientStep` from a public table of classes, with keyholders
        `Moments`, otherwise a logistic regression.
    keyholders
        Public keys of keyholders: the hub is then blind, and sites share their noise.
    sites
        How many sites are expected, which decides how many shares of noise make a whole.
    is_public
        Anyone may see the table: what was not declared is taken from its values, and the table
        becomes the study's public records where the aggregator uses them.
    test
        A file of public records to measure releases on.
    schema
        All that is to be said about the columns, as a code book declares it, in place of `classes`,
        `numbers` and `categories`.
    file
        Name of the study file, for its comments.
    """

    name: str
    label: str
    purpose: str = ""
    classes: Sequence[str] = ()
    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    drop: Sequence[str] = ()
    learner: str | None = None
    is_public: bool = False
    test: str | os.PathLike[str] | None = None
    schema: Schema | None = None
    file: str = "study.toml"
    keyholders: Sequence[str] = ()
    sites: int = 10

    def write(self, table: str | os.PathLike[str]) -> str:
        """Return the text of a study for a table with these columns."""
        path = Path(table)
        source = open_table(path)
        values = read_table(source) if self.is_public else None
        names = list(values.column_names) if values is not None else _read_names(source)
        return self._write(names, path, values)

    def write_for(self, names: Sequence[str]) -> str:
        """Return the text of a study for a table that is not here, by the names of its columns."""
        return self._write(names, Path("table"), None)

    def _write(self, names: Sequence[str], path: Path, values: pa.Table | None) -> str:
        declared = () if self.schema is None else self.schema.table_columns
        for column in (self.label, *self.numbers, *self.categories, *self.drop, *declared):
            if column not in names:
                raise SettingsError(
                    f"The table {path.name!r} has no column {column!r}; it has "
                    f"{', '.join(names)}. Nothing was written."
                )
        if self.learner is not None and self.learner not in LEARNERS:
            raise SettingsError(
                f"There is no learner {self.learner!r}. Nothing was written. Use one of "
                f"{', '.join(LEARNERS)}."
            )
        learner = self._choose(values)
        if self.keyholders and learner.suits != TOTAL:
            raise SettingsError(
                f"Sites share the noise of sums, and {learner.__name__} is no statistic. Nothing "
                "was written. Name a statistic such as Moments, or no keyholder."
            )
        if self.keyholders and self.sites < LEAST_BLIND:
            raise SettingsError(
                f"Noise is shared by {LEAST_BLIND} sites or more, and {self.sites} are expected. "
                "Nothing was written. Leave out the keyholders, or find more sites."
            )
        aggregator = suggest_aggregator(learner, is_public=self.is_public)
        shares, spare = usual_shares(self.sites), max(1, self.sites // 20)
        text = _HEAD.format(
            file=self.file,
            name=quote(self.name),
            purpose=quote(
                self.purpose or f"{TO_FILL_IN}: what is learned, for whom, on what legal ground"
            ),
            version=VERSION,
            neighbours=quote(learner.default_neighbours),
            delta=1e-6 if learner.needs_delta else 0.0,
            min_sites=shares + spare if self.keyholders else 2,
            hub=quote("blind" if self.keyholders else "untrusted"),
            method=self._method_lines(learner, aggregator),
            label=quote(self.label),
            labels=self._label_lines(learner, values),
        )
        if self.schema is not None:
            text += _declared_lines(self.schema)
        else:
            for column in names:
                if column != self.label and column not in self.drop:
                    text += "\n" + self._column_lines(column, values)
        if aggregator.needs_public or (self.is_public and learner.suits == TOTAL):
            text += _PUBLIC.format(file=quote(path.name), sha256=quote(file_digest(path)))
        if self.test is not None:
            test = Path(self.test)
            text += _TEST.format(file=quote(test.name), sha256=quote(file_digest(test)))
        if self.keyholders:
            keys = quote(list(self.keyholders))
            text += _BLIND.format(shares=shares, spare=spare, keyholders=keys)
        return text if values is None else self._with_public(text, learner, values)

    def _choose(self, values: pa.Table | None) -> type[PrivateLearner[Any, Any]]:
        """Return the learner that was named, or what did best where it was measured."""
        if self.learner is not None:
            return LEARNERS[self.learner]
        numeric = self.schema is not None and self.schema.classes is None
        if numeric:
            return LEARNERS["MomentsRegressor" if self.keyholders else "PrivateRidge"]
        if values is not None and len(values) >= LEAST_PUBLIC:
            return GradientStep
        return LEARNERS["Moments" if self.keyholders else "PrivateLogisticRegression"]

    def _method_lines(
        self, learner: type[PrivateLearner[Any, Any]], aggregator: type[Aggregator]
    ) -> str:
        if learner.suits == TOTAL:
            names = [name for name, kind in LEARNERS.items() if kind.suits == TOTAL]
            return _SUMS.format(
                statistics=_comment(f"One of {', '.join(names)}."),
                statistic=quote(learner.__name__),
                settings=_unset(learner),
            )
        return _MODELS.format(
            learners=_comment(f"One of {', '.join(LEARNERS)}."),
            learner=quote(learner.__name__),
            aggregators="\n".join(map(_comment, _list_aggregators())),
            aggregator=quote(aggregator.__name__),
        )

    def _with_public(
        self, text: str, learner: type[PrivateLearner[Any, Any]], values: pa.Table
    ) -> str:
        """Return the text with what the statistic is made to start with from the public table."""
        if learner.from_public is None:
            return text
        name, words = learner.from_public
        schema = Schema.from_dict(tomllib.loads(text)["schema"])
        rows = schema.encode(values)
        value = find_start(learner, schema, Public(rows.X, np.asarray(schema.classes)[rows.y]))
        made = f"# {words[0].upper()}{words[1:]}.\n{name} = {quote(value)}\n"
        return text.replace(_unset(learner), made)

    def _label_lines(self, learner: type[PrivateLearner[Any, Any]], values: pa.Table | None) -> str:
        if self.schema is not None:
            facts = self.schema.to_dict()
            return "\n".join(_settings(facts, ("columns", "label")))
        if learner.predicts_number:
            return f"# label_bound = ...  # {TO_FILL_IN}: larger labels are clipped to it"
        classes = self.classes or (() if values is None else distinct_texts(values[self.label]))
        if len(classes) > MOST_CATEGORIES and not self.classes:
            raise SettingsError(
                f"The label {self.label!r} has more than {MOST_CATEGORIES} different values, too "
                "many for classes. Nothing was written. Declare them with --classes, or learn a "
                "number with --learner PrivateRidge."
            )
        if not classes:
            return f'classes = []  # {TO_FILL_IN}, such as ["no", "yes"]'
        return f"classes = {quote([_number_or_text(value) for value in classes])}"

    def _column_lines(self, name: str, values: pa.Table | None) -> str:
        bounds, categories = self.numbers.get(name), self.categories.get(name)
        if values is not None and bounds is None and categories is None:
            bounds, categories = _infer(name, values[name])
        if categories is not None:
            kind = ['kind = "categorical"', f"categories = {quote(list(categories))}"]
        elif bounds is not None:
            low, high = bounds
            kind = ['kind = "numeric"', f"low = {low!r}", f"high = {high!r}"]
        else:
            kind = [
                'kind = "numeric"  # or "categorical" with categories = ["...", "..."]',
                f"# low = ...   # {TO_FILL_IN}: the least value there can be, without looking",
                f"# high = ...  # {TO_FILL_IN}: the greatest",
            ]
        # What a site does with a missing value must not depend on other records: declare it.
        missing = "middle" if categories is None else "ignore"
        lines = [
            "[[schema.columns]]",
            f"name = {quote(name)}",
            *kind,
            f"missing = {quote(missing)}",
        ]
        return "\n".join(lines) + "\n"


def _unset(learner: type[PrivateLearner[Any, Any]]) -> str:
    """Return the line that is filled in from public records, or by people."""
    if learner.from_public is None:
        return ""
    name, words = learner.from_public
    return f"{name} = []  # {TO_FILL_IN}: {words}\n"


def _declared_lines(schema: Schema) -> str:
    """Return the columns of a schema as TOML."""
    columns = schema.to_dict()["columns"]
    return "".join(
        "\n" + "\n".join(["[[schema.columns]]", *_settings(column, ())]) + "\n"
        for column in columns
    )


def _settings(facts: Mapping[str, Any], without: Sequence[str]) -> list[str]:
    return [f"{name} = {quote(value)}" for name, value in facts.items() if name not in without]


# ------------------------------------------------------------------ methods


def find_start(learner: type[PrivateLearner[Any, Any]], schema: Schema, public: Public) -> object:
    """Return the setting that a statistic is made to start with from public records."""
    assert learner.from_public is not None
    asked: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "neighbours": "replace-one"}
    value = learner.for_schema(schema, **asked).public_settings(public)[learner.from_public[0]]
    if isinstance(value, str):
        return value
    # Coefficients: six digits are enough to start from.
    return [[float(f"{number:.6g}") for number in row] for row in value]


def usual_shares(n_sites: int) -> int:
    """Return how many shares of noise make a whole where nobody said: four fifths of the sites."""
    return max(1, 4 * n_sites // 5)


def suggest_aggregator(
    learner: type[PrivateLearner[Any, Any]], *, is_public: bool
) -> type[Aggregator]:
    """Return the first aggregator that suits a learner and draws no noise of its own.

    One that uses public records is preferred if there are some.
    """
    suitable = []
    for cls in AGGREGATORS.values():
        aggregator = _with_defaults(cls)
        if (
            aggregator is not None
            and not aggregator.draws_noise
            and aggregator.problem_with(learner, {}) is None
            and (is_public or not cls.needs_public)
        ):
            suitable.append(cls)
    # The first of the best; a learner that is made for one aggregator gets it.
    return max(suitable, key=lambda cls: (cls.__name__ == learner.suits, cls.needs_public))


def _with_defaults(cls: type[Aggregator]) -> Aggregator | None:
    try:
        return cls()
    except (TypeError, ConsilienceError):  # it has settings that somebody must choose
        return None


def _list_aggregators() -> Iterable[str]:
    """Say which aggregators there are, by the public records that they need."""
    for need, labels, title in (
        (False, False, "One of"),
        (True, True, "With labelled public records also"),
        (True, False, "With public records and a trusted hub also"),
    ):
        names = [
            name
            for name, cls in AGGREGATORS.items()
            if (cls.needs_public, cls.needs_labels) == (need, labels)
        ]
        if names:
            yield f"{title} {', '.join(names)}."


def _comment(text: str) -> str:
    return textwrap.fill(text, 98, initial_indent="# ", subsequent_indent="# ")


# ------------------------------------------------------------------ tables


def _infer(
    name: str, values: pa.ChunkedArray
) -> tuple[tuple[float, float] | None, list[str] | None]:
    """Return the bounds of a public column of numbers, or the categories of another one."""
    bounds = number_bounds(values)
    if bounds is None:
        return None, list_categories(name, values, MOST_CATEGORIES)
    low, high = bounds
    return (low, high if high > low else low + 1.0), None


def _read_names(source: object) -> list[str]:
    """Read the names of the columns, and nothing else."""
    table = source if isinstance(source, RowSource) else PlainTable(source)
    names = [name.strip() for name in table.list_columns()]
    if not names:
        raise SettingsError(
            "The table has no line with the names of its columns, or cannot be read. Nothing was "
            "written. Check the file."
        )
    return names


def _number_or_text(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value
