"""Write a first study file for people to complete: from column names alone, unless the table is said to be public."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from consilience.errors import SettingsError
from consilience.study.study import TO_FILL_IN, TREES, file_digest

MOST_CATEGORIES = 50
_HEAD = """\
# A consilience study: what all sites agree on. Lines that begin with # are comments.
# Complete what is marked FILL IN, then run: consilience study check {file}
# Every number here is public. Take bounds and categories from a code book or from domain knowledge, never from
# records: the largest value in a table is somebody's.

[study]
name = {name}
purpose = {purpose}

[privacy]
# replace-one: the number of records of a site is public. add-remove: it is hidden.
neighbours = {neighbours}
# Each site chooses its own epsilon in this range; less is more private.
epsilon_min = 0.1
epsilon_max = 3.0
# 0 for pure epsilon; a small number such as 1e-6 allows less noise.
delta = 0.0
# Fewer sites make no release.
min_sites = 2
# untrusted: what leaves a site is private already. trusted: sites hand the hub exact learners.
hub = "untrusted"

[learner]
# PrivateLogisticRegression, PrivateLinearSVC, PrivateTreeClassifier, PrivateForestClassifier,
# PrivateAdaBoostClassifier; settings of the learner may follow its name, one per line.
name = {learner}

[aggregator]
# Average, WeightedVote (any learner), PooledCounts (forests); with public records PublicBlend, FeatureMethod,
# SiteBoosting; with a trusted hub SoftLabelDistillation, VoteDistillation.
name = {aggregator}

[schema]
label = {label}
classes = {classes}
"""
_PUBLIC = """
# Labelled records that anyone may see, encoded like the sites'.
[public]
file = {file}
sha256 = {sha256}
"""


def draft(
    table: str | os.PathLike[str],
    *,
    name: str,
    label: str,
    purpose: str = "",
    classes: Sequence[str] = (),
    numbers: Mapping[str, tuple[float, float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    drop: Sequence[str] = (),
    learner: str = "PrivateLogisticRegression",
    is_public: bool = False,
    file: str = "study.toml",
) -> str:
    """Return the text of a study for a table with these columns.

    Of the table only the column names are read. With `is_public` the values are too, and bounds,
    categories and classes that were not declared are taken from them; the table becomes the study's
    public records.
    """
    path = Path(table)
    found = _values(path) if is_public else None
    names = list(found.column_names) if found is not None else _column_names(path)
    declared = {**(numbers or {}), **(categories or {})}
    for column in (label, *declared, *drop):
        if column not in names:
            raise SettingsError(
                f"The table {path.name!r} has no column {column!r}; it has {', '.join(names)}. "
                "Nothing was written."
            )
    if found is not None and not classes:
        classes = _distinct(found[label])
    text = _HEAD.format(
        file=file,
        name=_toml(name),
        purpose=_toml(purpose or f"{TO_FILL_IN}: what is learned, for whom, on what legal ground"),
        neighbours=_toml("add-remove" if learner in TREES else "replace-one"),
        learner=_toml(learner),
        aggregator=_toml(
            "WeightedVote" if learner in TREES else "PublicBlend" if is_public else "Average"
        ),
        label=_toml(label),
        classes=_toml([_number_or_text(value) for value in classes])
        if classes
        else '[]  # FILL IN, such as ["no", "yes"]',
    )
    for column in names:
        if column != label and column not in drop:
            text += "\n" + _column(column, numbers or {}, categories or {}, found)
    if is_public and learner not in TREES:
        text += _PUBLIC.format(file=_toml(path.name), sha256=_toml(file_digest(path)))
    return text


def _column(
    name: str, numbers: Mapping[str, Any], categories: Mapping[str, Any], table: Any
) -> str:
    lines = ["[[schema.columns]]", f"name = {_toml(name)}"]
    if name in numbers:
        low, high = numbers[name]
        lines += ['kind = "numeric"', f"low = {low!r}", f"high = {high!r}"]
    elif name in categories:
        lines += ['kind = "categorical"', f"categories = {_toml(list(categories[name]))}"]
    elif table is not None:
        values = table[name]
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            ends = pc.min_max(values)
            low, high = float(ends["min"].as_py() or 0.0), float(ends["max"].as_py() or 0.0)
            lines += [
                'kind = "numeric"',
                f"low = {low!r}",
                f"high = {high if high > low else low + 1.0!r}",
            ]
        else:
            lines += ['kind = "categorical"', f"categories = {_toml(_distinct(values))}"]
    else:
        lines += [
            'kind = "numeric"  # or "categorical" with categories = ["...", "..."]',
            "low = nan  # FILL IN",
            "high = nan  # FILL IN",
        ]
    # What a site does with an absent value must not depend on other records: declare it.
    missing = '"middle"' if any('kind = "numeric"' in line for line in lines) else '"ignore"'
    return "\n".join([*lines, f"missing = {missing}"]) + "\n"


def _distinct(values: Any) -> list[str]:
    found = sorted(str(value) for value in pc.unique(values).to_pylist() if value is not None)
    if len(found) > MOST_CATEGORIES:
        raise SettingsError(
            f"A column has more than {MOST_CATEGORIES} different values and is no list of "
            "categories. Nothing was written. Leave it out with --drop, or declare its "
            "categories."
        )
    return found


def _values(path: Path) -> pa.Table:
    """Read a public table, numbers as numbers."""
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq

    try:
        return (
            pq.read_table(path)
            if path.suffix.lower() in (".parquet", ".pq")
            else pcsv.read_csv(path)
        )
    except (OSError, pa.ArrowInvalid):
        raise SettingsError(
            f"The table {path.name!r} cannot be read. Nothing was written. Is it there?"
        ) from None


def _column_names(path: Path) -> list[str]:
    """Read the names of the columns, and nothing else."""
    import csv

    import pyarrow.parquet as pq

    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            return list(pq.read_schema(path).names)
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    except (OSError, UnicodeDecodeError, pa.ArrowInvalid):
        raise SettingsError(
            f"The table {path.name!r} cannot be read. Nothing was written. Check that it is there."
        ) from None


def _number_or_text(value: str) -> Any:
    try:
        return int(value)
    except ValueError:
        return value


def _toml(value: Any) -> str:
    """Return a text or a list of texts as TOML, of which JSON's are a part."""
    return json.dumps(value, ensure_ascii=False)
