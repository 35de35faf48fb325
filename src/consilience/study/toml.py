"""Reading and writing a study: the layout of its TOML file."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from consilience.blind.roster import Rule
from consilience.errors import SchemaMismatch, SettingsError
from consilience.files.contribution import from_plain, to_plain
from consilience.files.durable import read_regular
from consilience.files.sealed import MOST_DIGITS
from consilience.learners.axes import Projection, read_projection
from consilience.learners.tuned import Tuning
from consilience.protocol import DIGEST
from consilience.study.records import PublicFile
from consilience.tables.schema import Schema
from consilience.tables.values import as_number
from consilience.text import quote as quoted
from consilience.text import shorten

if TYPE_CHECKING:
    from consilience.study.study import Study

Facts = dict[str, Any]

MOST_TEXT = 1 << 20
MOST_DEPTH = 20  # of parts within parts
MOST_PARTS = 32  # of a dotted key: the time to read one grows with their square
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_DEEP = re.compile(rf"(?<![\w-])(?:{_PART}){{{MOST_PARTS}}}")
PARTS = (
    *("study", "privacy", "schema", "learner", "alternatives", "aggregator", "statistic"),
    *("public", "test", "blind", "branches", "projection", "tuning"),
)
# Whose defaults a study means for what [learner] does not name. A file without a version is of the
# first one; what it means does not change.
VERSION = 2
HUBS = ("untrusted", "trusted", "blind")
RELATIONS = ("replace-one", "add-remove")


class Key(NamedTuple):
    """A setting of a study file: what it may be, what it means, and what holds without it."""

    form: str
    meaning: str
    default: object = None
    is_required: bool = False


def _one_of(values: Iterable[str]) -> str:
    return " or ".join(f'"{value}"' for value in values)


_SHA256 = Key(
    "text",
    "SHA-256 of the file, by which every copy is checked; `sha256sum` prints it.",
    is_required=True,
)
_LABELLED = Key("true or false", "Whether the file has the label column.", True)
# The settings of each part. [learner], [aggregator], [statistic], [projection] and [tuning] may
# have others: the classes that they name check them. Schema checks its own.
LAYOUT: Mapping[str, Mapping[str, Key]] = {
    "study": {
        "name": Key(
            "text",
            "A name of 2 to 64 lower-case letters, digits and hyphens; a hub has each name once.",
            is_required=True,
        ),
        "purpose": Key(
            "text", "What the study is for, in words for those who approve it at the sites.", ""
        ),
        "version": Key(
            f"a whole number from 1 to {VERSION}",
            "Whose defaults hold for settings of the learner that are not named: "
            f"{VERSION} means today's. `consilience study new` writes it.",
            1,
        ),
    },
    "privacy": {
        "neighbours": Key(
            _one_of(RELATIONS),
            "Which change of a table is hidden: a record (or person) replaced by another, so that "
            "the number of records is public; or one more or less, so that it is hidden.",
            "replace-one",
        ),
        "epsilon_min": Key(
            "a number above 0", "The smallest epsilon that a site may choose.", is_required=True
        ),
        "epsilon_max": Key(
            "a number of at least `epsilon_min`",
            "The largest epsilon that a site may choose.",
            is_required=True,
        ),
        "delta": Key(
            "a number in [0, 1)",
            "The delta that all sites use; 0 is pure epsilon. Statistics need a positive one.",
            0.0,
        ),
        "min_sites": Key("a whole number of at least 1", "No release is made of fewer sites.", 2),
        "hub": Key(
            _one_of(HUBS),
            "What the hub is given: numbers that are private already, exact models, or masked sums "
            "of which it can open totals only.",
            "untrusted",
        ),
        "max_size": Key(
            "a whole number of at least 1",
            "The largest number of records that a site may state.",
            1 << 31,
        ),
        "max_weight": Key(
            "a number in (0, 1]",
            "The largest weight that one member may have before labelled public records are used; "
            "with fewer members than its inverse all weigh the same.",
            1.0,
        ),
        "withhold_far": Key(
            "true or false",
            "Whether a release with a member that is unlike the others waits for a coordinator.",
            False,
        ),
    },
    "learner": {
        "name": Key("text", "What each site trains: one of the learners below.", is_required=True),
    },
    "aggregator": {
        "name": Key(
            "text", "How the hub combines models: one of the aggregators below.", is_required=True
        ),
        "at": Key(
            "text",
            "The name of a site that learns the members' weights on private records of its own and "
            "hands over no model; only for `FeatureMethod`. Without it the hub combines.",
        ),
    },
    "statistic": {
        "name": Key(
            "text", "What each site adds up: one of the statistics below.", is_required=True
        ),
    },
    "public": {
        "file": Key(
            "text",
            "Name of a file of public records, CSV or Parquet, without folders. It lies beside the "
            "study file, and the hub's coordinator uploads it.",
            is_required=True,
        ),
        "sha256": _SHA256,
        "labelled": _LABELLED,
    },
    "test": {
        "file": Key(
            "text",
            "Name of a file of public records, as in `[public]`, on which releases are measured.",
            is_required=True,
        ),
        "sha256": _SHA256,
        "labelled": _LABELLED,
    },
    "blind": {
        "shares": Key(
            "a whole number of at least 2",
            "The noise of this many sites together is what the guarantee needs.",
            is_required=True,
        ),
        "spare": Key(
            "a whole number of at least 1",
            "How many more sites than that a batch must have: so many may reveal their own noise "
            "to the hub, and the guarantee still holds.",
            is_required=True,
        ),
        "keyholders": Key(
            "a list of texts",
            "The public keys of the keyholders, as each of them told it to you.",
            is_required=True,
        ),
    },
    "branches": {
        "study": Key("text", "The digest of the branch's study.", is_required=True),
        "key": Key("text", "The public key of the branch's hub.", is_required=True),
    },
}
ALLOWED = {part: LAYOUT[part] for part in ("study", "privacy", "public", "test", "blind")}
REQUIRED = {
    part: [key for key, about in LAYOUT[part].items() if about.is_required]
    for part in ("study", "privacy", "learner", "aggregator")
}
# Settings that studies had no word for once: a default is not written, so that digests stay.
DEFAULTS: Facts = {
    name: LAYOUT["privacy"][name].default for name in ("max_size", "max_weight", "withhold_far")
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
    if study.tuning is not None:
        facts["tuning"] = study.tuning.as_dict()
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


def write(facts: Mapping[str, Any], comment: str = "") -> str:
    """Return a study file with these facts, in the layout of `to_facts`, under a comment."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for name in PARTS:
        part = facts.get(name)
        if part:
            lines += ["", *_part_lines(name, part)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _part_lines(name: str, part: Mapping[str, Any]) -> list[str]:
    """Return a part as TOML; tables and lists of tables in it follow its settings."""
    tables = {key: value for key, value in part.items() if isinstance(value, Mapping)}
    listed = {"columns": part["columns"]} if name == "schema" and part.get("columns") else {}
    plain = {key: value for key, value in part.items() if key not in {*tables, *listed}}
    lines = [f"[{name}]", *write_settings(plain)]
    for key, table in tables.items():
        lines += ["", f"[{name}.{_key(key)}]", *write_settings(table)]
    for key, rows in listed.items():
        for row in rows:
            lines += ["", f"[[{name}.{key}]]", *write_settings(row)]
    return lines


def write_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as lines of TOML."""
    return [f"{_key(key)} = {_value(value)}" for key, value in settings.items()]


def read_settings(text: str) -> Facts:
    """Return settings from lines of TOML, or refuse them."""
    if _DEEP.search(text):
        raise SettingsError(f"A setting has a name of more than {MOST_PARTS} parts.")
    try:
        facts = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise SettingsError(f"These are no settings ({problem}).") from None
    if not is_plain(facts):
        raise SettingsError("A setting is too large, or has too many parts within parts.")
    return facts


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else quote(name)


def _value(value: object) -> str:
    """Return a value as TOML, whose words for truth and for numbers are not all Python's."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value) if type(value) in (int, float) else quote(value)


def quote(value: object) -> str:
    """Return a text or a list of texts as TOML, which takes them as JSON writes them."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


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
    facts, problems = _load(text)
    return ({}, problems) if problems else to_arguments(facts)


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """Return the schema of a study file, whose other parts may still be missing."""
    facts, problems = _load(read_text(path))
    part, schema = facts.get("schema"), None
    if not problems and isinstance(part, Mapping) and is_plain(part):
        schema, problems = _read_schema(part)
    elif not problems:
        problems = ["it has no part [schema]"]
    if schema is None:
        raise SettingsError(
            f"The study file {Path(path).name!r} does not say yet what a table holds: "
            f"{'; '.join(problems)}. No record was read. Complete it; this lists all that is "
            "missing: consilience study check FILE"
        )
    return schema


def _load(text: str) -> tuple[Facts, list[str]]:
    """Return what a text in TOML says, or why it cannot be read."""
    if _DEEP.search(text):
        return {}, [f"the file has a key of more than {MOST_PARTS} parts"]
    try:
        return tomllib.loads(text), []
    except (ValueError, RecursionError) as problem:
        return {}, [f"the file is not valid TOML ({problem})"]


def _read_schema(part: Mapping[str, Any]) -> tuple[Schema | None, list[str]]:
    """Return a schema, or None and everything that is wrong with it, in the words of the file."""
    try:
        return Schema.from_dict(part), []
    except (SettingsError, SchemaMismatch) as problem:
        return None, _schema_problems(part) or [f"[schema]: {problem}"]
    except (TypeError, AttributeError):
        return None, ["[schema] does not have the layout of a schema"]


# Settings of a schema that are checked together, apart from all others.
_TOGETHER = (
    ("label", "classes", "label_bound", "unknown_label"),
    ("person", "max_records_per_person"),
    ("norm",),
    ("scale",),
)
_COLUMN = {"kind": "numeric", "name": " ", "low": 0, "high": 1}  # stands for any column


def _schema_problems(part: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with each column and each setting; empty if that is wrong together."""
    listed = part.get("columns", [])
    if not (isinstance(listed, list) and all(isinstance(one, Mapping) for one in listed)):
        return []
    columns = [_column_problem(number, column) for number, column in enumerate(listed, 1)]
    problems = [problem for problem in columns if problem]
    if not listed:
        problems.append("[schema] needs columns: one part [[schema.columns]] for each")
    plain = {"label": "  ", "classes": [0, 1], "columns": [_COLUMN]}
    for names in _TOGETHER:
        given = {name: part[name] for name in names if name in part}
        if "label" in names:
            if "label" not in part:
                problems.append("[schema] needs label, the name of the column to predict")
            if not {"classes", "label_bound"} & part.keys():
                problems.append("[schema] needs classes = [...], or label_bound for numbers")
                continue
            # What is not given is not made up: classes and a bound exclude one another.
            given = {"label": "  ", **given, "columns": [_COLUMN]}
        if wrong := _refusal({**(plain if "label" not in names else {}), **given}):
            problems.append(f"[schema] {wrong}")
    known = {"columns", *(name for names in _TOGETHER for name in names)}
    unknown = [quoted(name, 100) for name in part if name not in known]
    return problems + [f"[schema] has no setting {name}" for name in unknown]


def _column_problem(number: int, column: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a column, or None."""
    name = column.get("name")
    if not isinstance(name, str) or not name:
        return f"the {number}. [[schema.columns]] needs a name"
    where = f"[[schema.columns]] {shorten(name, 100)!r}"
    if column.get("kind") == "numeric":
        bounds = {side: as_number(column.get(side, math.nan)) for side in ("low", "high")}
        if lacking := [side for side, bound in bounds.items() if not math.isfinite(bound)]:
            return (
                f"{where} needs {' and '.join(lacking)}, from domain knowledge: bounds read from "
                "records would leak the most extreme ones"
            )
    elif column.get("kind") == "categorical" and not column.get("categories"):
        return (
            f"{where} needs categories = [...], from the code book: a list read from records "
            "would tell who is in it"
        )
    elif column.get("kind") not in ("numeric", "categorical"):
        return f'{where} needs kind = "numeric" or "categorical"'
    wrong = _refusal({"label": f"not {name}", "classes": [0, 1], "columns": [column]})
    return wrong and f"{where}: {wrong}"


def _refusal(facts: Mapping[str, Any]) -> str | None:
    """Return why there is no such schema, without what is meant for callers in Python."""
    try:
        Schema.from_dict(facts)
    except (SettingsError, SchemaMismatch) as problem:
        said = str(problem).partition(" No record was read")[0].rstrip(".")
        return said.replace("cannot be None: it must be", "is missing: it must be")
    except (TypeError, AttributeError):
        return "does not have the layout of a schema"
    return None


def to_arguments(facts: object) -> tuple[Facts, list[str]]:
    """Return the arguments of a `Study` from its facts, and every problem of the layout in words.

    There are no arguments if a part of the layout is missing or wrong. A bad schema alone leaves
    them in place, with None for the schema, so that the other settings can still be checked.
    """
    if not isinstance(facts, Mapping):
        return {}, ["a study has parts"]
    odd = [name for name, part in facts.items() if not is_plain(part)]
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
    tuning: Tuning | None = None
    try:
        tuning = Tuning.read(parts["tuning"]) if "tuning" in facts else None
    except SettingsError as problem:
        problems.append(f"[tuning]: {problem}")
    incomplete = bool(problems)
    schema, wrong = _read_schema(parts["schema"])
    problems += wrong
    if incomplete:
        return {}, problems
    privacy = parts["privacy"]
    arguments: Facts = {
        "name": parts["study"]["name"],
        "purpose": parts["study"].get("purpose", LAYOUT["study"]["purpose"].default),
        "version": parts["study"].get("version", LAYOUT["study"]["version"].default),
        "schema": schema,
        "learner": parts["learner"].pop("name"),
        "learner_settings": _from_plain(parts["learner"]),
        "alternatives": {name: _from_plain(one) for name, one in parts["alternatives"].items()},
        "aggregator": parts["aggregator"].pop("name"),
        "at": parts["aggregator"].pop("at", None),
        "aggregator_settings": _from_plain(parts["aggregator"]),
        "epsilon_range": (privacy["epsilon_min"], privacy["epsilon_max"]),
        "blind": blind,
        "branches": parts["branches"],
        "projection": projection,
        "tuning": tuning,
        **{
            name: privacy.get(name, about.default)
            for name, about in LAYOUT["privacy"].items()
            if not about.is_required
        },
    }
    return arguments | files, problems


def is_plain(value: object, depth: int = 0) -> bool:
    """Tell whether everyone can write and show a value, whoever made it up."""
    if isinstance(value, Mapping | list):
        inner = (*value, *value.values()) if isinstance(value, Mapping) else value
        return depth < MOST_DEPTH and all(is_plain(each, depth + 1) for each in inner)
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
