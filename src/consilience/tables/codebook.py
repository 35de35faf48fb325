"""Reading a schema from a code book: the list of variables that most data sets come with.

A code book is a CSV file with one row for each variable, or a YAML file with one entry for each::

    name,kind,low,high,categories
    age,numeric,0,120,
    sex,categorical,,,f|m
    ill,label,,,no|yes

`kind` is ``numeric``, ``categorical``, ``label``, ``person`` (the id column; `records` says how
many records of each person are used) or ``skip``. A label has `categories`, or `low` and `high` if
it is a number. All further columns are settings of `Numeric` and `Categorical`. Lists are separated
by ``|`` in CSV.
"""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilience.errors import SettingsError
from consilience.tables.problems import quietly, require
from consilience.tables.schema import Schema
from consilience.tables.values import as_number

MOST_TEXT = 1 << 22
_COLUMNS = ("numeric", "categorical")
_KINDS = (*_COLUMNS, "label", "person", "skip")
_LISTS = ("categories", "missing_values", "cuts")
_NUMBERS = ("low", "high", "records", "missing", "cuts")


def read_codebook(path: str | os.PathLike[str], **settings: Any) -> Schema:
    """Return the schema that a code book declares; `settings` are further ones of `Schema`."""
    facts: dict[str, Any] = {"columns": []}
    for entry in _entries(Path(path)):
        name, kind = entry.pop("name", None), entry.pop("kind", None)
        require(kind in _KINDS, f"kind of {name!r} in the code book", kind, f"one of {_KINDS}")
        if kind in _COLUMNS:
            facts["columns"].append({"kind": kind, "name": name, **entry})
        elif kind == "label":
            require("label" not in facts, "a second label of the code book", name, "left out")
            facts |= {"label": name, **_label_facts(entry)}
        elif kind == "person":
            facts |= {"person": name, "max_records_per_person": entry.get("records")}
    if "label" not in facts and "label" not in settings:
        raise SettingsError(
            f"The code book {Path(path).name!r} has no variable of the kind 'label'. No schema was "
            "made. Say which column is to be predicted."
        )
    return Schema.from_dict(facts | settings)


def _label_facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    if "categories" in entry:
        return {"classes": entry["categories"]}
    return {"label_bound": max(abs(as_number(entry.get(end))) for end in ("low", "high"))}


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
    rows = quietly(lambda: list(csv.DictReader(io.StringIO(text), strict=True)))
    if not rows or not {"name", "kind"} <= rows[0].keys():
        raise SettingsError(
            f"The code book {path.name!r} is no table with the columns 'name' and 'kind'. No "
            "schema was made. Its first line must name its columns."
        )
    return [_from_row(row) for row in rows]


def _from_yaml(text: str, name: str) -> list[dict[str, Any]]:
    import yaml  # type: ignore[import-untyped]

    listed = quietly(lambda: yaml.safe_load(text))
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise SettingsError(
            f"The code book {name!r} is no list of variables. No schema was made. Write one entry "
            "for each: '- {name: age, kind: numeric, low: 0, high: 120}'."
        )
    return [{str(key): value for key, value in one.items()} for one in listed]


def _from_row(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """Return a row of a CSV file with lists as lists and numbers as numbers."""
    entry: dict[str, Any] = {}
    for key, text in row.items():
        require(key is not None, "a row of the code book", text, "no longer than the first line")
        if text is None or not text.strip():
            continue
        parts = [part.strip() for part in text.split("|")]
        if key in _NUMBERS:
            parts = list(map(_number, parts))
        is_list = key in _LISTS and (len(parts) > 1 or key not in _NUMBERS)
        entry[str(key).strip()] = parts if is_list else parts[0]
    return entry


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
