"""Pages about drafts: writing a study, trying it on made-up records, freezing it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import Response

from consilience.aggregators.registry import AGGREGATORS
from consilience.errors import ConsilienceError, SettingsError
from consilience.hub.dashboard.queries import Paged
from consilience.hub.dashboard.studies import unpacked
from consilience.hub.dashboard.visits import Visit, download
from consilience.hub.drafts import DraftDesk
from consilience.hub.store import Row
from consilience.hub.store.drafts import MOST_DRAFTS, PUBLIC_PARTS, name_of
from consilience.hub.trials import LEAST_RECORDS, LEAST_SITES, MOST_RECORDS, MOST_SITES, Trials
from consilience.learners.registry import LEARNERS
from consilience.protocol import Refusal
from consilience.study import building, toml
from consilience.study.building import Facts, find_problems
from consilience.study.toml import TOTAL
from consilience.tables.codebook import MOST_TEXT, read_facts, read_number
from consilience.text import printable

ROWS = 20  # columns on a page
FIELDS = 9 * ROWS  # of the form of a page of columns
MOST_TYPED = 5000  # characters of a field of one line
REFRESH_SECONDS = 2
MISSING = {
    "error": "not allowed",
    "middle": "middle",
    "ignore": "no category",
    "indicator": "marked",
}
# What a rule becomes if the kind of its column changes.
_OTHER_RULE = {"numeric": {"ignore": "middle"}, "categorical": {"middle": "ignore"}}
_OF_KIND = {
    "numeric": ("low", "high", "transform", "cuts"),
    "categorical": ("categories", "unseen"),
}
KINDS = {"numeric": "numbers", "categorical": "categories"}


class Choice(NamedTuple):
    """A learner, a statistic or an aggregator that can be chosen, in a sentence or two."""

    name: str
    text: str
    hint: str = ""


def desk_of(visit: Visit) -> DraftDesk:
    """Return what a visitor's account can ask about drafts."""
    account = visit.someone.account
    assert account is not None
    return DraftDesk(visit.hub, account)


def _draft(visit: Visit) -> Row:
    return desk_of(visit).get(visit["draft"])


def _page(
    visit: Visit, template: str, row: Row, problems: Sequence[str] = (), /, **more: object
) -> Response:
    """Show a page of a draft; what its form said is wrong stands first."""
    facts = row["facts"]
    common = {"row": row, "facts": facts, "called": name_of(row), "problems": list(problems)}
    status = 422 if problems else 200
    return visit.page(template, status, (), **common, **more)


def _change(visit: Visit, part: str, new: Facts) -> None:
    desk_of(visit).change(visit["draft"], _version(visit), part, new)


def _version(visit: Visit) -> int:
    text = visit.form.get("version", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1


def _line(visit: Visit, name: str) -> str:
    """Return a field of one line, of which every character can be seen."""
    return " ".join(printable(visit.form.get(name, "")[:MOST_TYPED]).split())


def _number(text: str) -> Any:
    """Return a number, or the text if it is none: the page then says so."""
    try:
        return read_number(text[:50])
    except SettingsError:  # it is larger than a file may state
        return text[:50]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split("|") if part.strip()]


# ------------------------------------------------------------------------------- list and overview


def show_drafts(visit: Visit) -> Response:
    """List the drafts that an account may see."""
    rows = desk_of(visit).list()
    return visit.page("drafts.html", drafts=[(row, name_of(row)) for row in rows])


def show_new_draft(visit: Visit, problems: Sequence[str] = ()) -> Response:
    """Ask for a name, a purpose and the columns."""
    status = 422 if problems else 200
    return visit.page(
        "new_draft.html", status, asked=visit.form, problems=problems, most=MOST_DRAFTS
    )


def add_draft(visit: Visit) -> Response:
    """Begin a draft, from a code book, typed names, or nothing."""
    try:
        facts = building.begin(_line(visit, "name"), _line(visit, "purpose"), _read_columns(visit))
    except ConsilienceError as problem:
        return show_new_draft(visit, [str(problem)])
    return visit.redirect(f"/drafts/{desk_of(visit).add(facts)}")


def _read_columns(visit: Visit) -> Facts:
    """Return the facts of a schema from the code book of a form, uploaded or typed."""
    uploaded, typed = visit.form.get("codebook", ""), visit.form.get("typed", "")
    text = uploaded if uploaded.strip() else typed
    if not text.strip():
        return {"label": "", "classes": [], "columns": []}
    if len(text) > MOST_TEXT:
        raise SettingsError("The code book is too large. Nothing was changed.")
    first = text.lstrip("\ufeff \r\n")
    if "name" not in first.splitlines()[0] and not first.startswith(("-", "[", "#")):
        return {"label": "", "classes": [], "columns": _typed_columns(text)}
    ending = ".yaml" if first.startswith(("-", "[", "#")) else ".csv"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"codebook{ending}")
        path.write_text(text, encoding="utf-8", errors="replace", newline="")
        facts = read_facts(path)
    for column in facts["columns"]:
        column["name"] = printable(str(column.get("name", "")))
    return {"label": "", **({} if "label_bound" in facts else {"classes": []}), **facts}


def _typed_columns(text: str) -> list[Facts]:
    """Return columns of which only the names are known, in lines or separated by commas."""
    names = [name.strip() for line in text.splitlines() for name in line.split(",")]
    return [{"kind": "numeric", "name": name, "missing": "middle"} for name in names if name]


def show_draft(visit: Visit, problems: Sequence[str] = ()) -> Response:
    """Show a draft: its parts, what is wrong with it, and what can be done with it."""
    row = _draft(visit)
    known = [
        (part, visit.hub.store.file(row["facts"][part]["sha256"]))
        for part in PUBLIC_PARTS
        if part in row["facts"]
    ]
    found = desk_of(visit).find_problems(row["facts"])
    grouped = [
        (title, part, [each for each in found if each.part == part])
        for part, title in building.PARTS.items()
    ]
    shown = {"found": found, "grouped": grouped, "files": dict(known), "link": None}
    return _page(visit, "draft.html", row, problems, **shown)


def change_basics(visit: Visit) -> Response:
    """Change the name and the purpose."""
    study = _draft(visit)["facts"]["study"]
    basics = {"name": _line(visit, "name"), "purpose": _line(visit, "purpose")}
    try:
        _change(visit, "basics", {"study": {**study, **basics}})
    except ConsilienceError as problem:
        return show_draft(visit, [str(problem)])
    return visit.redirect(f"/drafts/{visit['draft']}")


def show_draft_text(visit: Visit) -> Response:
    """Return the study file of a draft."""
    row = _draft(visit)
    text = desk_of(visit).text(row, f"{visit.request.base_url}drafts/{row['id']}")
    return download(text.encode(), "application/toml", "study.toml")


# ----------------------------------------------------------------------------------------- columns


def show_columns(visit: Visit, problems: Sequence[str] = ()) -> Response:
    """Show the columns in a table that can be changed."""
    row = _draft(visit)
    columns = row["facts"]["schema"]["columns"]
    page = min(visit.number(), max(1, -(-len(columns) // ROWS)))
    first = (page - 1) * ROWS
    listed = [
        (place, columns[place], _fields(columns[place]))
        for place in range(first, min(first + ROWS, len(columns)))
    ]
    paged = Paged([], page, ROWS, len(columns))
    found = [each for each in find_problems(row["facts"]) if each.part == "columns"]
    by_place = {each.column: each.text for each in found if each.column is not None}
    shown = {"listed": listed, "paged": paged, "found": found, "by_place": by_place}
    return _page(visit, "draft_columns.html", row, problems, **shown, **_WORDS)


_WORDS = {"kinds": KINDS, "rules": MISSING}


def _fields(column: Facts) -> dict[str, str | None]:
    """Return a column as the fields of a form; what cannot be edited there is None."""
    categories = column.get("categories", ())
    listed = isinstance(categories, list | tuple)
    plain = listed and not any("|" in str(each) for each in categories)
    rule = column.get("missing", "error")
    shown = ("name", "kind", "low", "high", "categories", "missing")
    more = {name: value for name, value in column.items() if name not in shown}
    return {
        "low": str(column.get("low", "")),
        "high": str(column.get("high", "")),
        "categories": " | ".join(map(str, categories)) if plain else None,
        "missing": rule if rule in MISSING else None,
        "more": "; ".join(f"{name}: {value}" for name, value in more.items()),
    }


def change_columns(visit: Visit) -> Response:
    """Take the columns of a page as its form has them."""
    schema = _draft(visit)["facts"]["schema"]
    columns: list[Facts] = []
    for place, column in enumerate(schema["columns"]):
        if f"name-{place}" not in visit.form:
            columns.append(column)
        elif not visit.form.get(f"remove-{place}"):
            columns.append(_read_column(visit, str(place), column))
    if _line(visit, "name-new"):
        columns.append(_read_column(visit, "new", {}))
    try:
        _change(visit, "columns", {"schema": {**schema, "columns": columns}})
    except ConsilienceError as problem:
        return show_columns(visit, [str(problem)])
    return visit.redirect(f"/drafts/{visit['draft']}/columns?page={visit.number()}")


def _read_column(visit: Visit, place: str, before: Facts) -> Facts:
    """Return a column as its row of the form has it; what did not change there stays as it was."""
    kind = visit.form.get(f"kind-{place}", "numeric")
    kind = kind if kind in KINDS else "numeric"
    others = {name for other, names in _OF_KIND.items() if other != kind for name in names}
    column = {name: value for name, value in before.items() if name not in others}
    column |= {"name": _line(visit, f"name-{place}"), "kind": kind}
    old = _fields(before)
    for name in ("low", "high") if kind == "numeric" else ("categories",):
        text = _line(visit, f"{name}-{place}")
        if f"{name}-{place}" not in visit.form or text == old[name]:
            continue
        column.pop(name, None)
        if text:
            column[name] = _parts(text) if name == "categories" else _number(text)
    rule = visit.form.get(f"missing-{place}", "")
    if rule in MISSING:
        column["missing"] = _OTHER_RULE[kind].get(rule, rule)
    return column


def change_label(visit: Visit) -> Response:
    """Change the column that is predicted, and its classes or its bound."""
    schema = dict(_draft(visit)["facts"]["schema"])
    before, text = schema.pop("classes", []), _line(visit, "classes")
    bound = schema.pop("label_bound", None)
    schema["label"] = _line(visit, "label")
    if visit.form.get("of") == "number":
        given = _line(visit, "bound")
        schema["label_bound"] = bound if given == str(bound) else _number(given)
    else:
        schema["classes"] = before if text == " | ".join(map(str, before)) else _parts(text)
    try:
        _change(visit, "columns", {"schema": schema})
    except ConsilienceError as problem:
        return show_columns(visit, [str(problem)])
    return visit.redirect(f"/drafts/{visit['draft']}/columns")


def change_codebook(visit: Visit) -> Response:
    """Take all columns from a code book."""
    schema = _draft(visit)["facts"]["schema"]
    try:
        facts = _read_columns(visit)
        if not facts["columns"]:
            raise SettingsError("The code book has no columns. Nothing was changed.")
        whole = ("label", "classes", "label_bound", "person", "max_records_per_person")
        keep = {name: one for name, one in schema.items() if name not in (*whole, "columns")}
        if not facts["label"]:
            facts |= {name: schema[name] for name in whole if name in schema}
        _change(visit, "columns", {"schema": {**keep, **facts}})
    except ConsilienceError as problem:
        return show_columns(visit, [str(problem)])
    return visit.redirect(f"/drafts/{visit['draft']}/columns")


# ------------------------------------------------------------------------------------------- files


def take_draft_file(visit: Visit, arrived: Path) -> Response:
    """Take a public file from the form that `arrived` on disk, and name it in the draft."""
    with unpacked(visit, arrived) as (inside, sha256, name):
        facts = {"file": name.replace("\\", "/").rpartition("/")[2], "sha256": sha256}
        try:
            desk_of(visit).keep_file(visit["draft"], _version(visit), visit["part"], inside, facts)
        except ConsilienceError as problem:
            return show_draft(visit, [str(problem)])
    return visit.redirect(f"/drafts/{visit['draft']}#files")


def remove_file(visit: Visit) -> Response:
    """Name a public file no more."""
    part = visit["part"]
    if part not in PUBLIC_PARTS:
        raise Refusal("not-found", "A draft has no such file.")
    _change(visit, part, {part: None})
    return visit.redirect(f"/drafts/{visit['draft']}#files")


# ------------------------------------------------------------------------------ method and privacy


def _learner_choices(schema: Facts) -> tuple[list[Choice], list[Choice]]:
    """Return the learners and the statistics for labels of this kind."""
    numeric = "label_bound" in schema
    models: list[Choice] = []
    sums: list[Choice] = []
    for name, kind in LEARNERS.items():
        if kind.predicts_number == numeric:
            (sums if kind.suits == TOTAL else models).append(Choice(name, kind.summary()))
    return models, sums


def _aggregator_choices() -> list[Choice]:
    choices = []
    for name, kind in AGGREGATORS.items():
        if name == TOTAL:
            continue
        hints = ["Needs public records."] if kind.needs_public else []
        with suppress(TypeError, ConsilienceError):  # it has settings that somebody must choose
            hints.insert(0, kind().describe().weighing)
        choices.append(Choice(name, kind.summary(), " ".join(hints)))
    return choices


def _settings(part: Facts) -> str:
    return "\n".join(toml.write_settings({k: v for k, v in part.items() if k != "name"}))


def show_method(visit: Visit, problems: Sequence[str] = ()) -> Response:
    """Show what sites can train or add up, and how the hub can combine it."""
    row = _draft(visit)
    facts = row["facts"]
    models, sums = _learner_choices(facts["schema"])
    learner = facts.get("statistic") or facts.get("learner", {})
    shown = {
        "models": models,
        "sums": sums,
        "aggregators": _aggregator_choices(),
        "learner": learner.get("name"),
        "learner_settings": _settings(learner),
        "aggregator": facts.get("aggregator", {}).get("name"),
        "aggregator_settings": _settings(facts.get("aggregator", {})),
        "found": [each for each in find_problems(facts) if each.part == "method"],
        "can_prepare": _can_prepare(facts),
    }
    return _page(visit, "draft_method.html", row, problems, **shown)


def change_method(visit: Visit) -> Response:
    """Change the learner and the aggregator; another learner comes with its usual privacy."""
    facts = _draft(visit)["facts"]
    before = facts.get("statistic") or facts.get("learner", {})
    name = visit.form.get("learner", "")
    try:
        learner = _method(visit, "learner", before, LEARNERS)
        new: Facts = {"statistic": None, "learner": None, "aggregator": None}
        if LEARNERS[name].suits == TOTAL:
            new["statistic"] = learner
        else:
            own = facts.get("aggregator", {})
            new |= {
                "learner": learner,
                "aggregator": _method(visit, "aggregator", own, AGGREGATORS),
            }
        if name != before.get("name"):
            new["privacy"] = _usual_privacy(facts["privacy"], name)
        _change(visit, "method", new)
    except ConsilienceError as problem:
        return show_method(visit, [str(problem)])
    return visit.redirect(f"/drafts/{visit['draft']}/method")


def _method(visit: Visit, part: str, before: Facts, known: Mapping[str, object]) -> Facts:
    """Return a name and settings from a form; settings of another name are left behind."""
    name, text = visit.form.get(part, ""), visit.form.get(f"{part}_settings", "")
    if name not in known:
        raise SettingsError(f"Choose one of the {part}s in the list. Nothing was changed.")
    text = text.replace("\r\n", "\n").strip()
    if name != before.get("name") and text == _settings(before).strip():
        text = ""
    settings = toml.read_settings(text)
    settings.pop("name", None)
    return {"name": name, **settings}


def _usual_privacy(privacy: Facts, learner: str) -> Facts:
    kind = LEARNERS[learner]
    delta = privacy.get("delta", 0.0)
    delta = 1e-6 if kind.needs_delta and not delta else delta
    return {**privacy, "neighbours": str(kind.default_neighbours), "delta": delta}


def show_privacy(visit: Visit, problems: Sequence[str] = ()) -> Response:
    """Show what is promised, and to whom."""
    row = _draft(visit)
    found = [each for each in find_problems(row["facts"]) if each.part == "privacy"]
    return _page(visit, "draft_privacy.html", row, problems, found=found)


def change_privacy(visit: Visit) -> Response:
    """Change what is promised."""
    facts = _draft(visit)["facts"]
    numbers = ("epsilon_min", "epsilon_max", "delta", "min_sites")
    chosen = {name: _number(_line(visit, name)) for name in numbers}
    chosen |= {name: _line(visit, name)[:50] for name in ("neighbours", "hub")}
    schema = dict(facts["schema"])
    for name in ("person", "max_records_per_person"):
        schema.pop(name, None)
    if visit.form.get("unit") == "person":
        schema["person"] = _line(visit, "person")
        schema["max_records_per_person"] = _number(_line(visit, "records"))
    try:
        new = {"privacy": {**facts["privacy"], **chosen}, "schema": schema}
        _change(visit, "privacy", new)
    except ConsilienceError as problem:
        return show_privacy(visit, [str(problem)])
    return visit.redirect(f"/drafts/{visit['draft']}/privacy")


# ------------------------------------------------------------------------------------ trying it out


def show_trial(visit: Visit) -> Response:
    """Show how far a trial is, or what it found."""
    row = _draft(visit)
    trial: Row = row["trial"] or {}
    running = trial.get("state") == "running"
    if running and not visit.hub.store.is_trying(row["id"]):  # its worker was stopped
        trial, running = {"state": "failed", "problem": "It was interrupted. Try again."}, False
    limits = (LEAST_SITES, MOST_SITES, LEAST_RECORDS, MOST_RECORDS)
    refresh = REFRESH_SECONDS if running else None
    return _page(
        visit,
        "draft_trial.html",
        row,
        trial=trial,
        limits=limits,
        refresh=refresh,
        found=find_problems(row["facts"]),
    )


def start_trial(visit: Visit) -> Response:
    """Begin to try a draft on made-up records."""
    row, trials = _draft(visit), _trials(visit)
    if find_problems(row["facts"]):
        raise Refusal("study-invalid", "The draft has problems, so it cannot be tried yet.")
    asked = [_number(_line(visit, name)) for name in ("sites", "records")]
    if not all(type(number) is int for number in asked):
        raise Refusal("malformed", "Sites and records are whole numbers.")
    trials.start(row, _version(visit), asked[0], asked[1], visit.someone.actor)
    return visit.redirect(f"/drafts/{row['id']}/trial")


def prepare(visit: Visit) -> Response:
    """Begin to compute what the statistic starts from."""
    row = _draft(visit)
    if not _can_prepare(row["facts"]):
        raise Refusal(
            "study-invalid",
            "This is for a statistic that starts from public records, once these are uploaded and "
            "the columns are complete.",
        )
    _trials(visit).prepare(row, _version(visit), visit.someone.actor)
    return visit.redirect(f"/drafts/{row['id']}/trial")


def _can_prepare(facts: Facts) -> bool:
    kind = LEARNERS.get(facts.get("statistic", {}).get("name", ""))
    is_ready = not any(each.part == "columns" for each in find_problems(facts))
    return is_ready and kind is not None and kind.from_public is not None and "public" in facts


def end_trial(visit: Visit) -> Response:
    """End a trial."""
    row = _draft(visit)
    _trials(visit).end(row)
    return visit.redirect(f"/drafts/{row['id']}/trial")


def _trials(visit: Visit) -> Trials:
    trials: Trials = visit.request.app.state.trials
    return trials


# -------------------------------------------------------------------- sharing, freezing, deleting


def share(visit: Visit) -> Response:
    """Make a link for sites, and show it once."""
    row = _draft(visit)
    token = desk_of(visit).share(row["id"])
    link = f"{visit.request.base_url}api/drafts/{token}"
    return _page(visit, "draft_link.html", row, link=link)


def unshare(visit: Visit) -> Response:
    """End the link for sites."""
    desk_of(visit).unshare(visit["draft"])
    return visit.redirect(f"/drafts/{visit['draft']}#share")


def show_freeze(visit: Visit) -> Response:
    """Ask whether to freeze a draft."""
    row = _draft(visit)
    found = desk_of(visit).find_problems(row["facts"])
    return _page(visit, "draft_freeze.html", row, found=found)


def freeze(visit: Visit) -> Response:
    """Make a study of a draft."""
    name = desk_of(visit).freeze(visit["draft"], _version(visit))
    return visit.redirect(f"/studies/{name}?done=created")


def show_delete(visit: Visit) -> Response:
    """Ask whether to delete a draft."""
    return _page(visit, "draft_delete.html", _draft(visit))


def delete(visit: Visit) -> Response:
    """Delete a draft."""
    desk_of(visit).delete(visit["draft"])
    return visit.redirect("/drafts")
