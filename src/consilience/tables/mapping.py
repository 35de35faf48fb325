"""A site's own names, units and codes: how the columns of its table become those of a study.

A mapping is declared before anyone looks at records, and each value is changed by itself: what
becomes of a record depends on the mapping and on that record alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from consilience.errors import SettingsError
from consilience.tables.reading import PlainTable, RowSource
from consilience.tables.schema import Categorical, Numeric, Schema
from consilience.tables.values import Value, as_number, as_texts, is_readable, read_numbers, spell

MOST_TEXT = 1 << 20  # bytes of a file
SETTINGS = ("from", "factor", "offset", "codes")


@dataclass(frozen=True)
class ColumnRule:
    """Say where one column of a study comes from: a local column, whose values are translated.

    Parameters
    ----------
    source
        The local column's name.
    factor, offset
        A number becomes itself times `factor`, plus `offset`.
    codes
        What becomes of single values, by their local spelling; an empty text makes a value absent.
        They come before the factor, which leaves what they make alone.

    Examples
    --------
    >>> rule = ColumnRule("alter_monate", factor=1 / 12, codes={"-9": ""})
    >>> rule.translate(pa.array(["600", "-9", "?"])).to_pylist()
    ['50', None, '?']
    """

    source: str
    factor: float = 1.0
    offset: float = 0.0
    codes: Mapping[Value, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spelled = {spell(one): str(other) and spell(other) for one, other in self.codes.items()}
        object.__setattr__(self, "codes", spelled)

    @property
    def scales(self) -> bool:
        """Whether numbers become others."""
        return (self.factor, self.offset) != (1.0, 0.0)

    def translate(self, values: pa.Array) -> pa.Array:
        """Return the values as the study has them; what is no number is not scaled."""
        if not (self.scales or self.codes) or not is_readable(values.type, as_number=False):
            return values
        texts = as_texts(values)
        coded = pc.index_in(texts, value_set=pa.array(list(self.codes), pa.large_string()))
        if self.scales:
            with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell of a record
                numbers = read_numbers(texts) * self.factor + self.offset
            scaled = as_texts(pa.array(numbers, pa.float64()))
            texts = pc.if_else(pa.array(np.isnan(numbers)), texts, scaled)
        if self.codes:
            made = pa.array(self.codes.values(), pa.large_string()).take(coded)
            texts = pc.if_else(pc.is_valid(coded), made, texts)
        return pc.if_else(pc.equal(texts, ""), None, texts)

    def describe(self) -> str:
        """Say it in words."""
        said = [f"column {self.source!r}"]
        if self.scales:
            said.append(f"numbers times {self.factor!r} plus {self.offset!r}")
        said += [f"{one!r} becomes {other!r}" for one, other in self.codes.items()]
        return "; ".join(said)


@dataclass(frozen=True)
class TableMapping:
    """How a site's table becomes one of a study, column by column of the study."""

    columns: Mapping[str, ColumnRule] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str], schema: Schema) -> TableMapping:
        """Read a TOML file with one part ``[columns.NAME]`` for each column that is mapped."""
        file = Path(path)
        try:
            with file.open("rb") as opened:
                facts = tomllib.loads(opened.read(MOST_TEXT).decode())
        except (OSError, ValueError, RecursionError):
            raise _wrong(
                file.name, ["the file cannot be read, or is no TOML"], "Check that it exists."
            ) from None
        return cls.from_dict(facts, schema, where=file.name)

    @classmethod
    def from_dict(
        cls, facts: Mapping[str, Any], schema: Schema, *, where: str = "mapping"
    ) -> TableMapping:
        """Return the mapping that these facts describe, or list everything that is wrong."""
        listed = facts.get("columns", {})
        unknown = [f"there is no part [{name}]" for name in facts if name != "columns"]
        if not isinstance(listed, Mapping):
            raise _wrong(where, ["[columns] is no table"])
        rules, problems = {}, unknown
        for name, settings in listed.items():
            wrong = _find_problems(name, settings, schema)
            problems += [f"[columns.{name}] {problem}" for problem in wrong]
            if not wrong:
                source, numbers = settings.get("from", name), {}
                for key in ("factor", "offset"):
                    if key in settings:
                        numbers[key] = as_number(settings[key])
                rules[name] = ColumnRule(source, codes=settings.get("codes", {}), **numbers)
        if problems:
            raise _wrong(where, problems)
        return cls(rules)

    def find_source(self, name: str) -> str:
        """Return the local column that a column of the study comes from."""
        return self.columns[name].source if name in self.columns else name

    def apply(self, batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
        """Return the columns of these names that there are, made of local ones."""
        pairs = [
            (name, place)
            for name in names
            for place, local in enumerate(batch.schema.names)
            if local == self.find_source(name)
        ]
        arrays = [
            self.columns[name].translate(batch.column(place))
            if name in self.columns
            else batch.column(place)
            for name, place in pairs
        ]
        if not arrays:
            return batch.select([])
        return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in pairs])

    def describe(self) -> list[tuple[str, str]]:
        """Return each column of the study that is mapped, and what it is made of."""
        return [(name, rule.describe()) for name, rule in self.columns.items()]

    def to_toml(self) -> str:
        """Return the file that says this."""
        lines = []
        for name, rule in self.columns.items():
            lines += [f"[columns.{_quote(name)}]", f"from = {_quote(rule.source)}"]
            lines += [f"factor = {rule.factor!r}", f"offset = {rule.offset!r}"] * rule.scales
            codes = (f"{_quote(one)} = {_quote(other)}" for one, other in rule.codes.items())
            lines += [f"codes = {{ {', '.join(codes)} }}"] * bool(rule.codes)
        return "".join(f"{line}\n" for line in lines)

    @property
    def digest(self) -> str:
        """SHA-256 of the mapping: equal digests make equal tables of equal ones."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()


class Mapped(RowSource):
    """A site's table as the study sees it."""

    def __init__(self, table: object, mapping: TableMapping) -> None:
        self.table, self.mapping = table, mapping
        self._source = table if isinstance(table, RowSource) else PlainTable(table)

    def list_columns(self) -> list[str]:
        """Return the names of the study's columns that there are, and of all local ones."""
        local = self._source.list_columns()
        made = [name for name, rule in self.mapping.columns.items() if rule.source in local]
        return [*made, *(name for name in local if name not in self.mapping.columns)]

    def read_batches(self, names: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the records, mapped."""
        chosen = self.list_columns() if names is None else list(names)
        local = {self.mapping.find_source(name) for name in chosen}
        for batch in self._source.read_batches(local):
            yield self.mapping.apply(batch, chosen)


def _find_problems(name: str, settings: object, schema: Schema) -> list[str]:
    """Return what is wrong with the mapping of one column."""
    if name not in schema.table_columns:
        return [f"is no column of the study; it has {', '.join(schema.table_columns)}"]
    if not isinstance(settings, Mapping):
        return ["is no table"]
    problems = [
        f"has no setting {key!r}, but {', '.join(SETTINGS)}"
        for key in settings
        if key not in SETTINGS
    ]
    declared = {column.name: column for column in schema.columns}.get(name)
    is_label = name == schema.label
    is_number = isinstance(declared, Numeric) or (is_label and schema.classes is None)
    if not isinstance(settings.get("from", name), str):
        problems.append('needs from = "…", the name of a local column')
    for key in ("factor", "offset"):
        if key in settings and not is_number:
            problems.append(f"has a {key}, but is no column of numbers")
        elif key in settings and not math.isfinite(as_number(settings[key])):
            problems.append(f"needs a finite number as {key}")
    if as_number(settings.get("factor", 1)) == 0:
        problems.append("has the factor 0, which makes all numbers the same")
    codes = settings.get("codes", {})
    if not isinstance(codes, Mapping):
        return [*problems, 'needs codes = { local = "declared", … }']
    known = schema.classes if is_label else getattr(declared, "categories", None)
    return problems + _code_problems(codes, known, declared)


def _code_problems(
    codes: Mapping[str, object],
    known: Sequence[Value] | None,
    declared: Numeric | Categorical | None,
) -> list[str]:
    """Return what is wrong with the codes of a column with `known` categories or classes."""
    absent = () if declared is None else declared.missing_values
    allowed = None if known is None else {*map(spell, known), *absent, ""}
    problems, made = [], dict[str, str]()
    for one, other in codes.items():
        spelled = spell(other) if isinstance(other, str | int | float) and other != "" else ""
        if not isinstance(other, str | int | float) or one.strip() == "":
            problems.append(f"has a code {one!r} that is blank, or becomes no text or number")
        elif allowed is not None and spelled not in allowed:
            problems.append(f"makes {spelled!r} of {one!r}, which the study does not declare")
        elif known is None and spelled and math.isnan(read_numbers(pa.array([spelled]))[0]):
            problems.append(f"makes {spelled!r} of {one!r}, which is no number")
        if one.strip() and made.setdefault(spell(one), spelled) != spelled:
            problems.append(f"makes two different values of {spell(one)!r}, also spelled {one!r}")
    return problems


def _wrong(where: str, problems: Sequence[str], fix: str = "Correct the file.") -> SettingsError:
    return SettingsError(
        f"The mapping {where!r} does not fit the study: {'; '.join(problems)}. No record was read. "
        f"{fix}"
    )


def _quote(text: object) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
