"""Reading a schema from a code book: the list of variables that most data sets come with.

A code book is a CSV file with one row for each variable, or a YAML file with one entry for each::

    name,kind,low,high,categories
    age,numeric,0,120,
    sex,categorical,,,f|m
    ill,label,,,no|yes

`kind` is ``numeric``, ``categorical``, ``label``, ``person`` (the id column; `records` says how
many records of each person are used) or ``skip``, of which nothing else is read. A label has
`categories`, or `low` and `high` if it is a number. All further columns are settings of `Numeric`
and `Categorical`. Lists are separated by ``|`` in CSV; `cuts` are ``6 bins`` or places such as
``18|40|65``, one alone with a bar behind it (``65|``). In YAML only ``true`` and ``false`` are
truth values, and only plain decimal numbers are numbers: ``no``, ``010`` and ``2020-07-31`` are
texts.
"""

import csv
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilience.errors import SettingsError
from consilience.tables.problems import quietly, require
from consilience.tables.schema import Schema
from consilience.tables.values import as_number
from consilience.text import shorten

MOST_TEXT = 1 << 22
MOST_WHOLE = 10**19
_COLUMNS = ("numeric", "categorical")
_KINDS = (*_COLUMNS, "label", "person", "skip")
_LISTS = ("categories", "missing_values", "cuts")
_PLAIN = {  # what is no text in YAML
    "null": r"^(~|null|)$",
    "bool": r"^(true|True|TRUE|false|False|FALSE)$",
    "int": r"^[-+]?(0|[1-9][0-9]*)$",
    "float": r"^[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$",
}
_NUMBERS = ("low", "high", "records", "missing")


def read_codebook(path: str | os.PathLike[str], **settings: Any) -> Schema:
    """Return the schema that a code book declares; `settings` are further ones of `Schema`."""
    facts = read_facts(path)
    if "label" not in facts and "label" not in settings:
        raise SettingsError(
            f"The code book {Path(path).name!r} has no variable of the kind 'label'. No schema was "
            "made. Say which column is to be predicted."
        )
    return Schema.from_dict(facts | settings)


def read_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a code book says of a schema, which may be incomplete or wrong."""
    facts: dict[str, Any] = {"columns": []}
    for entry in _entries(Path(path)):
        name, kind = entry.pop("name", None), entry.pop("kind", None)
        require(kind in _KINDS, f"kind of {name!r} in the code book", kind, f"one of {_KINDS}")
        if kind in _COLUMNS:
            facts["columns"].append({"kind": kind, "name": name, **entry})
        elif kind != "skip":
            require(kind not in facts, f"a second {kind} of the code book", name, "left out")
            facts |= {
                kind: name,
                **(_label_facts if kind == "label" else _person_facts)(name, entry),
            }
    return facts


def _label_facts(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if "categories" in entry:
        _require_only(name, entry, ["categories"])
        return {"classes": entry["categories"]}
    _require_only(name, entry, ["low", "high"])
    return {"label_bound": max(abs(as_number(entry[end])) for end in ("low", "high"))}


def _person_facts(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    _require_only(name, entry, ["records"])
    return {"max_records_per_person": entry["records"]}


def _require_only(name: str, entry: Mapping[str, Any], settings: list[str]) -> None:
    """Refuse what would otherwise be dropped in silence, and what is absent."""
    wish = f"{' and '.join(settings)}, and nothing else"
    require(sorted(entry) == sorted(settings), f"settings of {name!r}", sorted(entry), wish)


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return one dictionary for each variable, without what was left empty."""
    try:
        if path.stat().st_size > MOST_TEXT:
            raise SettingsError(f"The code book {path.name!r} is too large. No schema was made.")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise SettingsError(
            f"The code book {path.name!r} cannot be read. No schema was made. Check that it exists "
            "and is text."
        ) from None
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return _from_yaml(text, path.name)
    reader = csv.DictReader(io.StringIO(text), strict=True)
    rows = quietly(lambda: list(reader))
    columns = reader.fieldnames or ()
    if not rows or not {"name", "kind"} <= set(columns) or len(set(columns)) < len(columns):
        raise SettingsError(
            f"The code book {path.name!r} is no table with the columns 'name' and 'kind'. No "
            "schema was made. Its first line must name its columns, each once."
        )
    return [_from_row(row) for row in rows]


def _from_yaml(text: str, name: str) -> list[dict[str, Any]]:
    listed = quietly(lambda: _load_yaml(text))
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise SettingsError(
            f"The code book {name!r} is no list of variables, or says something twice or by an "
            "alias. No schema was made. Write one entry for each: '- {name: age, kind: numeric, "
            "low: 0, high: 120}'."
        )
    _require_small(listed)
    return [{str(key): value for key, value in one.items()} for one in listed]


def _require_small(value: object) -> None:
    """Refuse whole numbers beyond all that a file of a study may state."""
    if isinstance(value, dict | list):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _require_small(each)
    elif isinstance(value, int) and abs(value) >= MOST_WHOLE:
        require(False, "a number in the code book", "one of many digits", f"below {MOST_WHOLE:g}")


def _load_yaml(text: str) -> Any:
    """Read YAML as it looks: its older rules take no, 010 and 1:30 for False, 8 and 90."""
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

        def compose_node(self, parent: object, index: object) -> object:
            if self.check_event(yaml.AliasEvent):
                raise ValueError  # a few of them stand for more than a machine can hold
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            if len(set(keys)) < len(keys):
                raise ValueError  # the last one would win
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    for tag, form in _PLAIN.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(form), None)
    return yaml.load(text, Loader)  # noqa: S506


def _from_row(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """Return a row of a CSV file with lists as lists and numbers as numbers."""
    entry: dict[str, Any] = {}
    for key, text in row.items():
        require(key is not None, "a row of the code book", text, "no longer than the first line")
        if text is None or not text.strip():
            continue
        entry[key := str(key).strip()] = _read_cuts(text) if key == "cuts" else _read(key, text)
    return entry


def _read(key: str, text: str) -> Any:
    parts: list[Any] = [part.strip() for part in text.split("|")]
    if key in _NUMBERS:
        parts = list(map(read_number, parts))
    if key in _LISTS:
        return parts
    require(len(parts) == 1, f"{key} in the code book", shorten(text), "one value, without a bar")
    return parts[0]


def _read_cuts(text: str) -> Any:
    """Return a number of bins or a list of places: a number alone might be meant as either."""
    number, _, unit = text.strip().partition(" ")
    if unit == "bins":
        return read_number(number)
    wish = "a number of bins ('6 bins') or places ('18|40|65', or one alone: '65|')"
    require("|" in text, "cuts in the code book", text, wish)
    return [read_number(part.strip()) for part in text.strip().removesuffix("|").split("|")]


def read_number(text: str) -> Any:
    """Return a number, or the text if it is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        _require_small(number)
        return number
    return text
