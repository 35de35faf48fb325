"""A study that is still being written: its facts so far, what is wrong with them, and its file.

The facts have the layout of a study file, complete or not; nothing here reads a record or trains.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from consilience.aggregators.registry import AGGREGATORS
from consilience.errors import SchemaMismatch, SettingsError
from consilience.learners.registry import LEARNERS
from consilience.study import toml
from consilience.study.check import (
    DECIDED_FOR_AGGREGATORS,
    DECIDED_FOR_LEARNERS,
    MOST_NAME,
    TO_FILL_IN,
    StudyRefused,
)
from consilience.study.draft import Draft
from consilience.study.study import Study
from consilience.tables.problems import quietly
from consilience.tables.schema import Schema
from consilience.tables.values import as_number
from consilience.text import printable, quote, shorten

Facts = dict[str, Any]

MOST_COLUMNS = 2000
MOST_FACTS = 1 << 19  # characters: half of what a study file may have
MOST_PROBLEMS = 100
PARTS = {  # of a page, in the order in which they are filled in
    "basics": "Name and purpose",
    "columns": "Columns",
    "files": "Public files",
    "method": "Method",
    "privacy": "Privacy",
}


class Problem(NamedTuple):
    """What is wrong with a part of the facts, in words of a page; `column` is a place in a list."""

    part: str
    text: str
    column: int | None = None


def begin(name: str, purpose: str, schema: Mapping[str, Any]) -> Facts:
    """Return the facts of a new study, with the usual method for the label of the schema."""
    numeric = "label_bound" in schema
    kind = next((key for key, each in LEARNERS.items() if each.predicts_number), None)
    label = str(schema.get("label", "")) or "label"
    draft = Draft(name or "study", label, learner=kind if numeric else None)
    facts = tomllib.loads(draft.write_for([label]))
    facts["study"] |= {"name": name, "purpose": purpose}
    facts["schema"] = {"label": "", "columns": [], **schema}
    return limited(facts)


def limited(facts: Facts) -> Facts:
    """Return facts that a hub can keep and show, or refuse them."""
    columns = facts["schema"]["columns"]
    if len(columns) > MOST_COLUMNS:
        raise SettingsError(
            f"There are {len(columns):,} columns, and a study can be built with at most "
            f"{MOST_COLUMNS:,}. Nothing was changed. Leave out columns, or write the study file."
        )
    text = quietly(lambda: json.dumps(facts))
    if text is None or not toml.is_plain(facts):
        raise SettingsError(
            "A value is neither text nor a number nor a list of these, or is too large. Nothing "
            "was changed. Correct it."
        )
    if len(text) > MOST_FACTS:
        raise SettingsError(
            f"The study has more than {MOST_FACTS:,} characters. Nothing was changed. Leave out "
            "columns or categories."
        )
    kept: Facts = json.loads(text)
    names = [column.get("name") for column in columns] + [facts["schema"].get("label", "")]
    for name in names:
        if not isinstance(name, str) or len(name) > MOST_NAME or name != printable(name):
            raise SettingsError(
                f"A column cannot be named {quote(name, 50)}: a name has at most {MOST_NAME} "
                "characters, all of which can be seen. Nothing was changed."
            )
    return kept


def write(facts: Facts, comment: str = "") -> str:
    """Return the study file."""
    return toml.write(facts, comment)


def read(facts: Facts) -> Study:
    """Return the study, or refuse facts that have problems."""
    return Study.from_text(write(facts))


# ------------------------------------------------------------------ what is wrong


def find_problems(facts: Facts) -> list[Problem]:
    """Return every problem, in the order of the parts; an empty list if the study is valid."""
    return list(_find_problems(json.dumps(facts)))


@lru_cache(maxsize=16)  # thousands of features take seconds, and every page of a draft asks
def _find_problems(text: str) -> tuple[Problem, ...]:
    facts, order = json.loads(text), list(PARTS)
    found = [*_basics(facts), *_columns(facts["schema"]), *_study(facts)]
    return tuple(sorted(found, key=lambda problem: order.index(problem.part))[:MOST_PROBLEMS])


def _basics(facts: Facts) -> Iterator[Problem]:
    purpose = facts["study"].get("purpose", "")
    if not purpose.strip() or TO_FILL_IN in purpose:
        text = "Say what the study is for: the people who approve it read this first."
        yield Problem("basics", text)


def _columns(schema: Facts) -> Iterator[Problem]:
    """Yield what is wrong with the label and the columns, one by one."""
    columns: Sequence[Facts] = schema["columns"]
    if not columns:
        yield Problem("columns", "There is no column to learn from: add one, or use a code book.")
    known = [problem for place, each in enumerate(columns) for problem in _column(each, place)]
    yield from known
    names = [*(each["name"] for each in columns), schema.get("label"), schema.get("person")]
    for name, count in Counter(name for name in names if name).items():
        if count > 1:
            text = f"{quote(name)} is named {count} times: each column is declared once."
            known.append(Problem("columns", text))
            yield known[-1]
    label = list(_label(schema))
    yield from label
    if not (label or known) and columns:
        reason = _refusal(schema)
        if reason:
            yield Problem("privacy" if "person" in reason else "columns", _reword(reason))


def _column(column: Facts, place: int) -> Iterator[Problem]:
    name, kind = column["name"], column.get("kind")
    if not name:
        yield Problem("columns", f"Column {place + 1} has no name.", place)
    elif kind == "numeric":
        low, high = as_number(column.get("low")), as_number(column.get("high"))
        if not (math.isfinite(low) and math.isfinite(high)):
            text = "needs a lowest and a highest value, from a code book and never from records."
            yield Problem("columns", f"{quote(name)} {text}", place)
        elif low >= high:
            text = f"{quote(name)} has a lowest value that is not below its highest value."
            yield Problem("columns", text, place)
        elif reason := _refusal_of(column):
            yield Problem("columns", reason, place)
    elif kind == "categorical":
        if not column.get("categories"):
            yield Problem("columns", f"{quote(name)} needs a list of its categories.", place)
        elif reason := _refusal_of(column):
            yield Problem("columns", reason, place)
    else:
        yield Problem("columns", f"{quote(name)} holds neither numbers nor categories.", place)


def _label(schema: Facts) -> Iterator[Problem]:
    if not schema.get("label"):
        yield Problem("columns", "Name the column that is to be predicted.")
    if "label_bound" in schema:
        bound = as_number(schema["label_bound"])
        if not 0 < bound < math.inf:
            text = "A label that is a number needs a bound above 0; larger ones count as the bound."
            yield Problem("columns", text)
    elif len(schema.get("classes", ())) < 2:
        yield Problem("columns", "List at least two classes of the column that is predicted.")


def _refusal_of(column: Facts) -> str | None:
    return _refusal({"columns": [column], "label": f"{column['name']}?", "classes": [0, 1]})


def _refusal(schema: Facts) -> str | None:
    """Return why a schema is refused, without what is said to programmers."""
    try:
        Schema.from_dict(schema)
    except (SettingsError, SchemaMismatch) as problem:
        return shorten(str(problem).partition(" No record was read.")[0], 500)
    except (TypeError, AttributeError, ValueError):
        return "A setting of a column has a value that it cannot have."
    return None


def _study(facts: Facts) -> Iterator[Problem]:
    """Yield what is wrong with everything but the columns, in words of a page."""
    try:
        arguments, problems = toml.parse(write(facts))
        if arguments:
            Study(**arguments)
    except StudyRefused as refused:
        problems = [*problems, *refused.problems]
    except (TypeError, ValueError, AttributeError, KeyError):
        problems = ["[learner]: a setting has a value that it cannot have"]
    lacking = list(_lacking(facts))
    yield from lacking
    said = (
        "[schema]",
        "[[schema.columns]]",
        "the purpose is still",
        *(("[learner]", "[aggregator]") if lacking else ()),
    )
    for problem in problems:
        if not problem.startswith(said):
            text = _reword(problem)
            yield Problem(_part_of(problem), f"{text[:1].upper()}{text[1:].rstrip('.')}.")


def _lacking(facts: Facts) -> Iterator[Problem]:
    """Yield the settings that a method needs, and that nobody has chosen yet."""
    method = facts.get("statistic") or facts.get("learner", {})
    for settings, known, decided in (
        (method, LEARNERS, DECIDED_FOR_LEARNERS),
        (facts.get("aggregator", {}), AGGREGATORS, DECIDED_FOR_AGGREGATORS),
    ):
        name, kind = settings.get("name"), known.get(settings.get("name", ""))
        if kind is None:
            continue
        start = getattr(kind, "from_public", None)
        if start is not None and start[0] not in settings:
            text = f"{name} needs the setting {start[0]}: {start[1]}."
            yield Problem("method", f"{text} Upload public records; then compute it here.")
        for each in inspect.signature(kind).parameters.values():
            if each.default is each.empty and each.name not in {*settings, *decided}:
                text = f"{name} needs a value of {each.name}: write it among its settings."
                yield Problem("method", text)


_PLACES = (  # where a problem belongs, by how it begins in the words of the study file
    (
        r"\[(learner|aggregator|statistic|alternatives|projection|tuning)|the learner|the aggr",
        "method",
    ),
    (r"\[(public|test)|the file |\S+ needs (labelled )?public records", "files"),
    (r"\[(privacy|blind)|epsilon_|delta|min_sites|max_|withhold|hub|neighbours", "privacy"),
    (r"the name |the purpose |\[study|version", "basics"),
    (r"the column |a class |there are more than .* classes", "columns"),
)
_WORDS = (  # of the study file, and of a page
    (r"\[public\] and \[test\] name", "the public file and the test file have"),
    (r" Nothing was (computed|trained)\.", ""),
    (r"\[(learner|aggregator|public|test|privacy|study)\]:? ?(part)?", r"\1: "),
    (r"max_records_per_person cannot be None", "the records of a person are not limited"),
    (r"max_records_per_person", "the limit on records of a person"),
    (r"epsilon_min=(\S+)", r"the smallest ε (\1)"),
    (r"epsilon_max=(\S+)", r"the largest ε (\1)"),
    (r"delta=(\S+)", r"δ (\1)"),
    (r"\bdelta\b", "δ"),
    (r"min_sites=(\S+)", r"the least number of sites (\1)"),
    (r'hub = "trusted"', "a trusted hub"),
    (r'neighbours = "add-remove"', "hidden numbers of records"),
    (r'neighbours = "replace-one"', "public numbers of records"),
    (r": add a public: ", ": add a public file"),
)


def _part_of(problem: str) -> str:
    return next((part for form, part in _PLACES if re.match(form, problem)), "method")


def _reword(problem: str) -> str:
    for form, words in _WORDS:
        problem = re.sub(form, words, problem)
    return shorten(problem, 500)
