"""Reading and writing a study: the layout of its TOML file."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilience.blind.roster import Rule
from consilience.errors import SchemaMismatch, SettingsError
from consilience.files.contribution import from_plain, to_plain
from consilience.files.durable import read_regular
from consilience.files.sealed import MOST_DIGITS
from consilience.learners.axes import Projection, read_projection
from consilience.protocol import DIGEST
from consilience.study.records import PublicFile
from consilience.tables.schema import Schema
from consilience.text import quote as quoted

if TYPE_CHECKING:
    from consilience.study.study import Study

Facts = dict[str, Any]

MOST_TEXT = 1 << 20
MOST_DEPTH = 20  # of parts within parts
MOST_PARTS = 32  # of a dotted key: the time to read one grows with their square
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DEEP = re.compile(rf"(?<![\w-])(?:{_PART}){{{MOST_PARTS}}}")
PARTS = (
    *("study", "privacy", "schema", "learner", "alternatives", "aggregator", "statistic"),
    *("public", "test", "blind", "branches", "projection"),
)
# The settings of each part. [learner], [aggregator], [statistic] and [projection] may have any:
# the classes they name check them. Schema checks its own.
ALLOWED = {
    "study": {"name", "purpose", "version"},
    "privacy": {
        *("neighbours", "epsilon_min", "epsilon_max", "delta", "min_sites", "hub"),
        *("max_size", "max_weight", "withhold_far"),
    },
    "public": {"file", "sha256", "labelled"},
    "test": {"file", "sha256", "labelled"},
    "blind": {"shares", "spare", "keyholders"},
}
# Whose defaults a study means for what [learner] does not name. A file without a version is of the
# first one; what it means does not change.
VERSION = 2
# Settings that studies had no word for once: a default is not written, so that digests stay.
DEFAULTS: Facts = {"max_size": 1 << 31, "max_weight": 1.0, "withhold_far": False}
REQUIRED = {
    "study": ("name",),
    "privacy": ("epsilon_min", "epsilon_max"),
    "learner": ("name",),
    "aggregator": ("name",),
}
TOTAL = "Total"  # the aggregator of every statistic


# ------------------------------------------------------------------ writing


def to_facts(study: Study) -> Facts:
    """Return a study as plain values, in the layout of the file; its digest is that of these."""
    low, high = study.epsilon_range
    facts: Facts = {
        "study": {"name": study.name, "purpose": study.purpose},
        "privacy": {
            "neighbours": study.neighbours,
            "epsilon_min": low,
            "epsilon_max": high,
            "delta": study.delta,
            "min_sites": study.min_sites,
            "hub": study.hub,
        },
        "schema": study.schema.to_dict(),
    }
    method = {"name": study.learner, **_plain(study.learner_settings)}
    if study.aggregator == TOTAL and not study.aggregator_settings:
        facts["statistic"] = method
    else:
        facts["learner"] = method
        facts["aggregator"] = {"name": study.aggregator, **_plain(study.aggregator_settings)}
    if study.at is not None:
        facts["aggregator"]["at"] = study.at
    if study.alternatives:
        facts["alternatives"] = {name: _plain(one) for name, one in study.alternatives.items()}
    if study.version != 1:
        facts["study"]["version"] = study.version
    limits = {name: getattr(study, name) for name in DEFAULTS}
    facts["privacy"] |= {name: one for name, one in limits.items() if one != DEFAULTS[name]}
    for name, part in (("public", study.public), ("test", study.test)):
        if part is not None:
            facts[name] = {"file": part.file, "sha256": part.sha256, "labelled": part.labelled}
    if study.branches:
        facts["branches"] = {name: dict(rule) for name, rule in study.branches.items()}
    if study.blind is not None:
        facts["blind"] = study.blind.as_dict()
    if study.projection is not None:
        facts["projection"] = study.projection.as_dict()
    return facts


def _plain(settings: Mapping[str, Any]) -> Facts:
    return {name: to_plain(value) for name, value in settings.items()}


def _from_plain(settings: Facts) -> Facts:
    """Undo `_plain`, which writes infinity as text; tables are left to the class to refuse."""
    return {
        name: value if isinstance(value, Mapping) else from_plain(value)
        for name, value in settings.items()
    }


def write_projection(projection: Projection) -> str:
    """Return the part of a study file that names a projection."""
    facts = projection.as_dict()
    return "\n".join(["[projection]", *(f"{key} = {quote(one)}" for key, one in facts.items()), ""])


def quote(value: object) -> str:
    """Return a text or a list of texts as TOML, which takes them as JSON writes them."""
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------ reading


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a study file."""
    file = Path(path)
    try:
        return read_regular(file, MOST_TEXT).decode()
    except (OSError, UnicodeDecodeError):
        raise SettingsError(
            f"The study file {file.name!r} cannot be read. Check that it exists and is text."
        ) from None


def parse(text: str) -> tuple[Facts, list[str]]:
    """Return the arguments of a `Study` from TOML, and every problem of the layout in words."""
    if _DEEP.search(text):
        return {}, [f"the file has a key of more than {MOST_PARTS} parts"]
    try:
        facts = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        return {}, [f"the file is not valid TOML ({problem})"]
    return to_arguments(facts)


def to_arguments(facts: object) -> tuple[Facts, list[str]]:
    """Return the arguments of a `Study` from its facts, and every problem of the layout in words.

    There are no arguments if a part of the layout is missing or wrong. A bad schema alone leaves
    them in place, with None for the schema, so that the other settings can still be checked.
    """
    if not isinstance(facts, Mapping):
        return {}, ["a study has parts"]
    odd = [name for name, part in facts.items() if not _is_plain(part)]
    if odd:
        return {}, [
            f"{_part(name)} has a number that is too large, a text that cannot be written, or too "
            "many parts within parts"
            for name in odd
        ]
    parts, problems = _split(facts)
    files: dict[str, PublicFile | None] = {}
    for name in ("public", "test"):
        try:
            files[name] = _read_file(name, parts[name]) if parts[name] else None
        except SettingsError as problem:
            problems.append(str(problem))
    blind: Rule | None = None
    try:
        blind = Rule.from_dict(parts["blind"]) if "blind" in facts else None
    except SettingsError as problem:
        problems.append(f"[blind]: {problem}")
    projection: Projection | None = None
    try:
        projection = read_projection(parts["projection"]) if "projection" in facts else None
    except SettingsError as problem:
        problems.append(f"[projection]: {problem}")
    incomplete = bool(problems)
    schema: Schema | None = None
    try:
        schema = Schema.from_dict(parts["schema"])
    except (SettingsError, SchemaMismatch) as problem:
        problems.append(f"[schema]: {problem}")
    except (TypeError, AttributeError):
        problems.append("[schema] does not have the layout of a schema")
    if incomplete:
        return {}, problems
    privacy = parts["privacy"]
    arguments: Facts = {
        "name": parts["study"]["name"],
        "purpose": parts["study"].get("purpose", ""),
        "version": parts["study"].get("version", 1),
        "schema": schema,
        "learner": parts["learner"].pop("name"),
        "learner_settings": _from_plain(parts["learner"]),
        "alternatives": {name: _from_plain(one) for name, one in parts["alternatives"].items()},
        "aggregator": parts["aggregator"].pop("name"),
        "at": parts["aggregator"].pop("at", None),
        "aggregator_settings": _from_plain(parts["aggregator"]),
        "neighbours": privacy.get("neighbours", "replace-one"),
        "epsilon_range": (privacy["epsilon_min"], privacy["epsilon_max"]),
        "delta": privacy.get("delta", 0.0),
        "min_sites": privacy.get("min_sites", 2),
        "hub": privacy.get("hub", "untrusted"),
        "blind": blind,
        "branches": parts["branches"],
        "projection": projection,
        **{name: privacy.get(name, default) for name, default in DEFAULTS.items()},
    }
    return arguments | files, problems


def _is_plain(value: object, depth: int = 0) -> bool:
    """Tell whether everyone can write and show a value, whoever made it up."""
    if isinstance(value, Mapping | list):
        inner = (*value, *value.values()) if isinstance(value, Mapping) else value
        return depth < MOST_DEPTH and all(_is_plain(each, depth + 1) for each in inner)
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    # One digit less than in files, for a sign.
    return not isinstance(value, int) or abs(value) < 10 ** (MOST_DIGITS - 1)


def _split(facts: Mapping[str, Any]) -> tuple[dict[str, Facts], list[str]]:
    """Return the parts of a study, empty where they are missing, and what is wrong with them."""
    problems: list[str] = []
    parts: dict[str, Facts] = {}
    for name in PARTS:
        part = facts.get(name, {})
        if not isinstance(part, Mapping):
            problems.append(f"[{name}] must be a table")
            part = {}
        parts[name] = dict(part)
    problems += [f"there is no {_part(name)} in a study" for name in facts if name not in parts]
    for name, allowed in ALLOWED.items():
        unknown = (key for key in parts[name] if key not in allowed)
        problems += [f"[{name}] has no setting {quoted(key, 100)}" for key in unknown]
    odd = [name for name, one in parts["alternatives"].items() if not isinstance(one, Mapping)]
    problems += [f"[alternatives.{quoted(name, 100)}] must be a table" for name in odd]
    if "statistic" in facts:
        problems += _take_statistic(parts)
    for name, required in REQUIRED.items():
        missing = (key for key in required if key not in parts[name])
        problems += [f"[{name}] lacks {key!r}" for key in missing]
    return parts, problems


def _take_statistic(parts: dict[str, Facts]) -> list[str]:
    """Read a statistic as the learner that it is, whose sums the total adds up."""
    both = [f"[{name}]" for name in ("learner", "alternatives", "aggregator") if parts[name]]
    if both:
        return [f"[statistic] takes the place of [learner] and [aggregator]: drop {both[0]}"]
    if "name" not in parts["statistic"]:
        parts["learner"], parts["aggregator"] = {"name": ""}, {"name": TOTAL}
        return ["[statistic] lacks 'name'"]
    parts["learner"], parts["aggregator"] = parts["statistic"], {"name": TOTAL}
    return []


def _part(name: object) -> str:
    """Return the name of a part as a quotation, unless it is one of ours."""
    return f"part [{name}]" if name in PARTS else f"part {quoted(name, 100)}"


def _read_file(name: str, part: Facts) -> PublicFile:
    """Return a file of public records, or say what is wrong with its part."""
    file, sha256, labelled = part.get("file"), part.get("sha256"), part.get("labelled", True)
    plain = isinstance(file, str) and Path(file).name == file
    if not (plain and DIGEST.fullmatch(str(sha256))):
        raise SettingsError(
            f"[{name}] needs a file name without folders and the sha256 of that file"
        )
    if type(labelled) is not bool:
        raise SettingsError(f"[{name}] labelled must be true or false")
    return PublicFile(str(file), str(sha256), labelled)
