"""Drafts: from a code book to a frozen study, in the pages and at their addresses."""

import hashlib
import io
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from consilience.hub import trials
from consilience.hub.auth import new_token
from consilience.hub.children import TookTooLong
from consilience.hub.drafts import DraftDesk
from consilience.hub.outages import Ended
from consilience.hub.roles import Account, Role
from consilience.hub.store import drafts as rows
from consilience.simulation.made_up import make_table
from consilience.study import building
from consilience.study.study import Study
from consilience.study.toml import read_schema
from consilience.tables.check import check_table
from consilience.tables.schema import Categorical, Numeric, Schema

CODEBOOK = """\
name,kind,low,high,categories,missing
age,numeric,0,120,,middle
sex,categorical,,,f|m,ignore
ill,label,,,no|yes,
"""


class Coordinator:
    """An account at a browser; sends each form with the token and the version of its last page."""

    def __init__(self, world: Any, name: str = "ann") -> None:
        self.world = world
        self.secret, _ = new_token(world.hub.store, name, hours=1, kind="test")
        self.hidden: dict[str, str] = {}
        self.text = ""

    def ask(self, method: str, path: str, **content: Any) -> Any:
        headers = {"cookie": f"consilience={self.secret}"}
        answer = self.world.client.request(method, path, headers=headers, **content)
        if answer.headers.get("content-type", "").startswith("text/html"):
            self.text = answer.text
            for name in ("token", "version"):
                found = re.search(f'name="{name}" value="([^"]*)"', answer.text)
                self.hidden |= {name: found[1]} if found else {}
        assert answer.status_code in (503, *range(500)), answer.text
        return answer

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def post(self, path: str, files: Any = None, **fields: str) -> Any:
        return self.ask("POST", path, data={**self.hidden, **fields}, files=files)

    def begin(self, codebook: str = CODEBOOK, **fields: str) -> str:
        """Begin a draft and return its address."""
        self.get("/new-draft")
        fields = {"name": "heart", "purpose": "To learn.", "typed": codebook, **fields}
        answer = self.post("/new-draft", **fields)
        assert answer.status_code == 303, answer.text
        self.get(answer.headers["location"])
        return str(answer.headers["location"])


@pytest.fixture
def ann(sqlite_world: Any) -> Coordinator:
    return Coordinator(sqlite_world)


def test_a_code_book_becomes_a_study_without_a_file_written_by_hand(
    ann: Coordinator, tmp_path: Path
) -> None:
    at = ann.begin()
    assert "The draft is complete" in ann.text
    text = ann.get(f"{at}/text").text
    draft = Study.from_text(text)
    (tmp_path / "study.toml").write_text(text)
    table = {"age": [1, 500], "sex": ["f", "x"], "ill": ["no", "yes"]}
    found = check_table(read_schema(tmp_path / "study.toml"), table)  # as a site does
    assert not found.fits
    assert (draft.name, draft.schema.feature_names) == ("heart", ("age", "sex=f", "sex=m"))
    ann.get(f"{at}/privacy")
    more = {"delta": "0", "neighbours": "replace-one", "hub": "untrusted", "unit": "record"}
    answer = ann.post(f"{at}/privacy", epsilon_min="0.5", epsilon_max="2", min_sites="3", **more)
    assert answer.status_code == 303
    ann.get(f"{at}/freeze")
    answer = ann.post(f"{at}/freeze")
    assert answer.headers["location"] == "/studies/heart?done=created"
    study = ann.world.hub.agreed("heart")
    assert (study.epsilon_range, study.min_sites) == ((0.5, 2.0), 3)
    assert "Invite its sites next" in ann.get("/studies/heart?done=created").text
    assert ann.get(at).status_code == 404
    actions = [entry["action"] for entry in ann.world.hub.store.audit(limit=1000)]
    assert actions[-4:] == ["draft created", "draft changed", "study created", "draft frozen"]
    ann.world.hub.store.verify()


def test_columns_are_changed_added_and_removed_row_by_row(ann: Coordinator) -> None:
    at = ann.begin("age, sex\nill\n")
    assert "needs a lowest and a highest value" in ann.text
    ann.get(f"{at}/columns")
    same = {"kind-0": "numeric", "missing-0": "indicator", "name-0": "age"}
    other = {
        "name-1": "sex",
        "kind-1": "categorical",
        "categories-1": "f | m",
        "missing-1": "middle",
    }
    new = {"name-new": "bmi", "kind-new": "numeric", "low-new": "10", "high-new": "60.5"}
    fields = {**same, "low-0": "0", "high-0": "120", **other, "name-2": "ill", "remove-2": "yes"}
    assert ann.post(f"{at}/columns", **fields, **new).status_code == 303
    ann.get(f"{at}/columns")
    assert "Name the column that is to be predicted" in ann.text
    assert ann.post(f"{at}/label", label="ill", of="class", classes="no | yes").status_code == 303
    columns = Study.from_text(ann.get(f"{at}/text").text).schema.columns
    assert [column.name for column in columns] == ["age", "sex", "bmi"]
    assert [column.missing for column in columns] == ["indicator", "ignore", "error"]
    assert (columns[1].categories, columns[2].high) == (("f", "m"), 60.5)


def test_what_a_table_cannot_show_stays_as_the_code_book_has_it(ann: Coordinator) -> None:
    book = """\
- {name: dose, kind: numeric, low: 1, high: 100, transform: log, cuts: 5, missing: 3}
- {name: ward, kind: categorical, categories: ["a|b", c], unseen: ignore}
- {name: ill, kind: label, categories: [0, 1]}
"""
    at = ann.begin(book)
    before = ann.get(f"{at}/text").text
    page = ann.get(f"{at}/columns").text
    assert "transform: log; cuts: 5" in page
    rows = {"name-0": "dose", "kind-0": "numeric", "low-0": "1", "high-0": "100"}
    ann.post(f"{at}/columns", **rows, **{"name-1": "ward", "kind-1": "categorical"})
    ann.post(f"{at}/label", label="ill", of="class", classes="0 | 1")
    assert ann.get(f"{at}/text").text == before


def test_problems_are_said_in_words_of_the_page(ann: Coordinator) -> None:
    at = ann.begin(CODEBOOK.replace("0,120", "120,0"), purpose="", name="Bad Name")
    shown = ann.text
    assert "a lowest value that is not below its highest value" in shown
    assert "Say what the study is for" in shown
    assert "lower-case letters, digits and hyphens" in shown
    more = {"neighbours": "replace-one", "hub": "trusted", "unit": "person", "person": "id"}
    ann.post(f"{at}/privacy", epsilon_min="9", epsilon_max="x", delta="2", min_sites="0", **more)
    page = ann.get(f"{at}/privacy").text
    for words in ("the smallest ε (9)", "Δ (2) must lie in [0, 1)", "least number of sites (0)"):
        assert words.lower() in page.lower()
    for name in ("epsilon_min=", "min_sites=", "Numeric("):
        assert name not in page
    assert ann.post(f"{at}/freeze").status_code == 422
    ann.begin(CODEBOOK.replace("0,120", "0,"), name="other")
    assert "needs a lowest and a highest value" in ann.text
    assert "[[schema" not in ann.text  # the same, in words of the file


def test_learner_and_aggregator_come_from_the_registries_with_their_privacy(
    ann: Coordinator,
) -> None:
    at = ann.begin()
    page = ann.get(f"{at}/method").text
    assert "Fit a forest of greedy or random trees under differential privacy." in page
    assert "PrivateRidge" not in page  # the label is a class
    fields = {"aggregator": "WeightedVote", "learner_settings": "", "aggregator_settings": ""}
    ann.post(f"{at}/method", learner="PrivateForestClassifier", **fields)
    study = Study.from_text(ann.get(f"{at}/text").text)
    assert (study.learner, study.neighbours) == ("PrivateForestClassifier", "add-remove")
    ann.get(f"{at}/method")
    ann.post(f"{at}/method", learner="Moments", **fields)
    study = Study.from_text(ann.get(f"{at}/text").text)
    assert (study.learner, study.aggregator, study.delta) == ("Moments", "Total", 1e-6)
    ann.get(f"{at}/method")
    answer = ann.post(f"{at}/method", learner="Moments", **fields | {"learner_settings": "a = ["})
    assert answer.status_code == 422
    assert "These are no settings" in answer.text
    assert ann.post(f"{at}/method", learner="os.system", **fields).status_code == 422


def test_files_are_kept_with_their_digests_and_go_with_the_last_draft(
    world: Any, tools: Any, tmp_path: Path
) -> None:
    ann = Coordinator(world)
    at, store = ann.begin(), ann.world.hub.store
    sha256 = tools.write_csv(tmp_path / "t.csv", {"age": [1], "sex": ["f"], "ill": ["no"]})
    content = (tmp_path / "t.csv").read_bytes()
    answer = ann.post(f"{at}/files/test", files={"file": ("tested.csv", content)})
    assert answer.status_code == 303, answer.text
    assert sha256 in ann.get(at).text
    assert store.file_path(sha256).read_bytes() == content
    for name in ("../up.csv", "é.csv", "x.toml", ""):
        ann.get(at)
        answer = ann.post(f"{at}/files/public", files={"file": (name, content)})
        assert answer.status_code in (303 if name.startswith("..") else 400, 400), name
    other = ann.begin(name="other")
    ann.post(f"{other}/files/test", files={"file": ("same.csv", content)})
    for address, is_there in ((at, True), (other, False)):
        ann.get(f"{address}/delete")
        assert ann.post(f"{address}/delete").headers["location"] == "/drafts"
        assert (store.file(sha256) is not None) == is_there
    assert not store.files.path(sha256).exists()


def test_a_file_that_a_draft_has_no_room_for_leaves_no_bytes(
    ann: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, store = ann.begin(), ann.world.hub.store
    content = {"file": ("t.csv", b"age,sex,ill\n1,f,no\n")}
    sha256 = hashlib.sha256(content["file"][1]).hexdigest()
    with monkeypatch.context() as limits:
        limits.setattr(building, "MOST_FACTS", len(str(store.drafts()[0]["facts"])) + 20)
        answer = ann.post(f"{at}/files/public", files=content)
    assert answer.status_code == 422
    assert "Leave out" in answer.text
    assert not store.files.path(sha256).exists()
    change = store.change_draft

    def change_late(*arguments: Any) -> list[str]:  # another page was faster meanwhile
        monkeypatch.undo()
        desk = DraftDesk(ann.world.hub, Account("ann", Role.COORDINATOR))
        study = {**store.draft(arguments[0])["facts"]["study"], "purpose": "Another one."}
        desk.change(arguments[0], arguments[1].version, "basics", {"study": study})
        return list(change(*arguments))

    monkeypatch.setattr(store, "change_draft", change_late)
    ann.get(at)
    assert ann.post(f"{at}/files/public", files=content).status_code == 409
    assert not store.files.path(sha256).exists()


def test_a_study_keeps_the_files_of_its_draft(ann: Coordinator, tmp_path: Any, tools: Any) -> None:
    at = ann.begin()
    tools.write_csv(tmp_path / "t.csv", {"age": [1], "sex": ["f"], "ill": ["no"]})
    ann.post(f"{at}/files/test", files={"file": ("t.csv", (tmp_path / "t.csv").read_bytes())})
    ann.get(f"{at}/freeze")
    ann.post(f"{at}/freeze")
    assert ann.get("/studies/heart/files/t.csv").content == (tmp_path / "t.csv").read_bytes()


def test_a_form_of_an_older_page_changes_nothing(ann: Coordinator) -> None:
    at = ann.begin()
    old = dict(ann.hidden)
    assert ann.post(at, name="first", purpose="x").status_code == 303
    for path, fields in (
        ("", {"name": "second"}),
        ("/label", {"label": "x", "of": "number"}),
        ("/freeze", {}),
        ("/trial", {"sites": "2", "records": "20"}),
    ):
        ann.hidden = old
        assert ann.post(at + path, **fields).status_code == 409, path
    assert "Draft first" in ann.get(at).text


def test_drafts_are_seen_by_their_account_auditors_and_operators(sqlite_world: Any) -> None:
    store = sqlite_world.hub.store
    people = {"cara": Role.COORDINATOR, "aud": Role.AUDITOR, "oda": Role.OPERATOR}
    for name, role in people.items():
        store.add_account(name, "scrypt:none", "operator", role=role)
    sqlite_world.add_study()
    store.add_account("few", "scrypt:none", "operator", only=["demo"])
    cara = Coordinator(sqlite_world, "cara")
    at = cara.begin()
    for name, seen, changed in (("oda", 200, 303), ("ann", 404, 404), ("aud", 200, 403)):
        person = Coordinator(sqlite_world, name)
        assert (at in person.get("/drafts").text) == (seen == 200), name
        person.hidden |= {"version": cara.hidden["version"]}
        assert person.get(at).status_code == seen
        for page in ("/columns", "/method", "/privacy", "/trial", "/text"):
            assert person.get(at + page).status_code == seen
            shows_form = "<button" in person.text.partition("<main")[2]
            assert shows_form == (name == "oda") or page == "/text", (name, page)
        assert person.post(at, name="heart", purpose="To learn.").status_code == changed, name
    assert Coordinator(sqlite_world, "few").get("/drafts").status_code == 403


def test_a_link_shows_the_study_file_until_it_is_ended(ann: Coordinator) -> None:
    at = ann.begin()
    page = ann.post(f"{at}/share").text
    link = re.search(r"http://hub(/api/drafts/[0-9a-f]{48})", page)[1]
    answer = ann.world.client.get(link)
    assert Study.from_text(answer.text).name == "heart"
    assert "Nobody has agreed to it" in answer.text
    assert answer.headers["content-type"].startswith("application/toml")
    ann.get(at)
    ann.post(f"{at}/unshare")
    assert ann.world.client.get(link).status_code == 404
    assert ann.world.client.get("/api/drafts/" + "x" * 5000).status_code == 404


@pytest.mark.parametrize(
    "typed",
    [
        ",".join(f"c{i}" for i in range(2001)),
        "name,kind,low,high\n" + "x" * 101 + ",numeric,0,1\n",
        "- {name: a, kind: numeric, low: !!timestamp 2020-01-01, high: 2}",
        "- {name: a, kind: categorical, categories: " + "[" * 30 + "]" * 30 + "}",
        "- &a {name: a, kind: skip}\n- *a",
        "- {name: a, kind: numeric, low: 99999999999999999999, high: 2}",
        "name,kind\na,weird\n",
        'name,kind\n"a',
        "- {name: a, kind: categorical, categories: [" + "'" + "x" * 600_000 + "']}",
    ],
    ids=["wide", "long", "time", "deep", "alias", "large", "kind", "quote", "huge"],
)
def test_hostile_code_books_are_refused_in_words(ann: Coordinator, typed: str) -> None:
    ann.get("/new-draft")
    answer = ann.post("/new-draft", name="x", typed=typed, files={"none": b""})
    assert answer.status_code == 422
    assert (
        "Nothing was changed" in answer.text
        or "No schema was made" in answer.text
        or ("No record was read" in answer.text)
    )
    assert ann.world.hub.store.drafts() == []


def test_control_characters_are_shown_and_kept_out_of_files(ann: Coordinator) -> None:
    ann.get("/new-draft")
    assert ann.post("/new-draft", typed="a\x1b[2Jb\u202e, c\x7f").status_code == 422
    book = '- {name: a, kind: categorical, categories: ["\\e[2J", "\\x7f", b]}'
    at = ann.begin(book, name="x\x00y", purpose="a\x7fb\r\nname = 'z'")
    text = ann.get(f"{at}/text").text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "\x1b" not in ann.get(at).text


def test_a_trial_says_what_sites_would_get() -> None:
    columns = [{"kind": "numeric", "name": "age", "low": 0, "high": 120, "missing": "middle"}]
    columns += [{"kind": "categorical", "name": "sex", "categories": ["f", "m"]}]
    schema = {"label": "ill", "classes": ["no", "yes"], "columns": columns}
    told: list[tuple[int, int]] = []
    found = trials.try_draft(
        building.begin("heart", "To learn.", schema), 2, 50, lambda *each: told.append(each)
    )
    assert told[-1] == (trials.REPEATS, trials.REPEATS)
    (table,) = found["tables"]
    assert table["levels"] == ["0.1", "0.548", "3"]
    rows = {row["title"]: row["cells"] for row in table["rows"] if row["joined"]}
    assert set(rows) == {"joined: Average"}
    assert all(0 <= mean <= 1 for mean, _ in rows["joined: Average"])


@pytest.mark.parametrize("person", [None, "id"])
@pytest.mark.parametrize("label", [{"classes": ["a", "b", "c"]}, {"label_bound": 5.0}])
def test_made_up_tables_fit_their_schema(person: str | None, label: Any) -> None:
    more = {"person": person, "max_records_per_person": 3} if person else {}
    columns = [Numeric("x", 1, 9, transform="log"), Categorical("c", ("u", "v"))]
    schema = Schema(columns, "y", **label, **more)
    table = make_table(schema, 60, seed=3)
    rows = schema.encode(table)
    assert rows.X.shape == (60, 3)
    assert len(set(rows.y.tolist())) >= 3
    assert person is None or len(set(table["id"])) == 20
    assert list(make_table(schema, 60, seed=3)["y"]) == list(table["y"])


def test_a_trial_runs_in_a_process_of_its_own_one_at_a_time(ann: Coordinator) -> None:
    at, other = ann.begin(), ann.begin(name="other")
    ann.get(f"{at}/trial")
    fields = {"sites": "2", "records": "20"}
    assert ann.post(f"{at}/trial", sites="999", records="20").status_code == 400
    assert ann.post(f"{at}/trial", **fields).status_code == 303
    page = ann.get(f"{at}/trial").text
    assert 'http-equiv="refresh"' in page
    ann.get(f"{other}/trial")
    assert ann.post(f"{other}/trial", **fields).status_code == 409
    assert "<h1>Drafts are tried one at a time</h1>" in ann.text
    threads = [thread for _, thread in ann.world.app.state.trials._running.values()]
    for thread in threads:
        thread.join(120)
    page = ann.get(f"{at}/trial").text
    assert "joined: Average" in page
    assert 'http-equiv="refresh"' not in page
    ann.get(f"{at}/privacy")
    fields = {"neighbours": "replace-one", "hub": "untrusted", "epsilon_min": "1"}
    ann.post(f"{at}/privacy", **fields, epsilon_max="1", delta="0", min_sites="2")
    assert "What it found" not in ann.get(f"{at}/trial").text  # it was of the draft before


def test_what_a_statistic_starts_from_is_computed_from_the_public_records(
    ann: Coordinator,
) -> None:
    at = ann.begin()
    rows = "".join(f"{20 + i},{'fm'[i % 2]},{'no yes'.split()[i // 20]}\n" for i in range(40))
    content = f"age,sex,ill\n{rows}".encode()
    assert ann.post(f"{at}/prepare").status_code == 422
    ann.post(f"{at}/files/public", files={"file": ("public.csv", content)})
    ann.get(f"{at}/method")
    ann.post(f"{at}/method", learner="GradientStep")
    assert "GradientStep needs the setting start" in ann.get(f"{at}/method").text
    assert ann.post(f"{at}/prepare").status_code == 303
    assert "What the statistic starts from" in ann.get(f"{at}/trial").text
    for _, thread in list(ann.world.app.state.trials._running.values()):
        thread.join(120)
    assert "The draft is complete" in ann.get(at).text
    start = Study.from_text(ann.get(f"{at}/text").text).learner_settings["start"]
    assert [len(row) for row in start] == [4]


def test_a_trial_can_be_ended_and_its_hub_stopped(ann: Coordinator) -> None:
    at = ann.begin()
    for _ in range(2):
        ann.get(f"{at}/trial")
        assert ann.post(f"{at}/trial", sites="30", records="2000").status_code == 303
        ann.get(f"{at}/trial")
        assert ann.post(f"{at}/trial/end").status_code == 303
        assert "The trial was ended" in ann.get(f"{at}/trial").text
        for _, thread in list(ann.world.app.state.trials._running.values()):
            thread.join(30)
    assert ann.world.app.state.trials._running == {}


def test_a_trial_of_a_draft_that_was_changed_or_deleted_ends_when_the_next_begins(
    ann: Coordinator,
) -> None:
    running, begun = ann.world.app.state.trials._running, []
    at, fields = ann.begin(), {"sites": "30", "records": "2000"}
    for turn in range(3):
        ann.get(f"{at}/trial")
        assert ann.post(f"{at}/trial", **fields).status_code == 303
        begun.append([each for each in running.values() if each not in begun][-1])
        assert [children._is_stopped for children, _ in begun] == [True] * turn + [False]
        ann.get(at)
        if turn == 0:
            assert ann.post(at, name="other", purpose="To learn.").status_code == 303
        elif turn == 1:
            assert ann.post(f"{at}/delete").status_code == 303
            at = ann.begin()
    ann.get(f"{at}/trial")
    ann.post(f"{at}/trial/end")
    for _, thread in begun:
        thread.join(30)
    assert running == {}


def test_no_account_has_more_drafts_than_allowed(
    ann: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_DRAFTS", 2)
    for _ in range(2):
        ann.begin()
    answer = ann.post("/new-draft", name="x")
    assert answer.status_code == 409
    assert "An account can have 2 drafts" in answer.text


def test_a_form_of_many_columns_is_read_and_one_of_too_many_fields_is_refused(
    ann: Coordinator,
) -> None:
    at = ann.begin(", ".join(f"c{i}" for i in range(45)))
    page = ann.get(f"{at}/columns?page=2").text
    assert 'name="name-20"' in page
    assert 'name="name-40"' not in page
    parts = {"name": "d{}", "kind": "numeric", "low": "0", "high": "1", "missing": "error"}
    fields = {f"{k}-{i}": v.format(i) for i in range(20, 40) for k, v in parts.items()}
    assert ann.post(f"{at}/columns?page=2", **fields).status_code == 303
    columns = DraftDesk(ann.world.hub, Account("ann", Role.OPERATOR)).get(at[8:])["facts"]["schema"]
    names = [column["name"] for column in columns["columns"]]
    assert names[19:21] + names[39:41] == ["c19", "d20", "d39", "c40"]
    many = {f"name-{i}": "x" for i in range(500)}
    assert ann.post(f"{at}/columns", **many).status_code == 400


def end_trials(ann: Coordinator) -> None:
    for _, thread in list(ann.world.app.state.trials._running.values()):
        thread.join(120)


def test_computing_again_what_the_draft_has_already_ends(ann: Coordinator) -> None:
    at = ann.begin()
    rows = "".join(f"{20 + i},{'fm'[i % 2]},{'no yes'.split()[i // 20]}\n" for i in range(40))
    ann.post(f"{at}/files/public", files={"file": ("p.csv", f"age,sex,ill\n{rows}".encode())})
    ann.get(f"{at}/method")
    ann.post(f"{at}/method", learner="GradientStep")
    for _ in range(2):
        ann.get(f"{at}/method")
        assert ann.post(f"{at}/prepare").status_code == 303
        end_trials(ann)
        assert "The trial is running" not in ann.get(f"{at}/trial").text
    assert "is in the draft" in ann.text
    assert not ann.world.hub.store.is_trying(at.rpartition("/")[2])


class Clock:
    """The clock of the rows of drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead, now = 0.0, rows.now
        monkeypatch.setattr(rows, "now", lambda seconds=0.0: now(seconds=seconds + self.ahead))


def test_who_was_refused_a_trial_is_the_next_to_begin_one(
    sqlite_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = sqlite_world.hub.store, Clock(monkeypatch)
    trial = {"token": "t"}
    made = [store.add_draft("ann", {"study": {}}, "ann") for _ in range(2)]

    def begin(actor: str, draft: str = made[0]) -> bool:
        return store.begin_trial(draft, 1, trial, actor) is None

    def end(draft: str = made[0]) -> None:
        store.note_trial(draft, "t", {"state": "done"})

    assert begin("ann")
    assert not begin("ann", made[1])  # takes no turn beside the own trial
    assert not begin("bob")
    assert not begin("cid")
    end()
    assert not begin("ann")
    assert not begin("cid")
    assert begin("bob")
    end()
    assert begin("ann")  # nobody else has asked
    assert not begin("bob")
    end()
    clock.ahead = rows.TURN_SECONDS - 1
    assert not begin("ann")
    clock.ahead = rows.TURN_SECONDS + 1
    assert begin("ann")  # bob did not come


def test_a_trial_whose_worker_was_killed_keeps_nobody_waiting(
    sqlite_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = sqlite_world.hub.store, Clock(monkeypatch)
    trial = {"token": "t"}
    draft = store.add_draft("ann", {"study": {}}, "ann")
    store.begin_trial(draft, 1, trial, "ann")
    clock.ahead = rows.LEASE_SECONDS - 1
    assert store.is_trying(draft)
    assert store.begin_trial(draft, 1, trial, "bob") is not None  # is the next
    store.renew_trial(draft, "t")
    clock.ahead = 2 * rows.LEASE_SECONDS - 2
    assert store.is_trying(draft)
    clock.ahead = 2 * rows.LEASE_SECONDS
    assert not store.is_trying(draft)
    assert store.begin_trial(draft, 1, trial, "ann") is not None
    clock.ahead += rows.TURN_SECONDS
    store.renew_trial(draft, "t")  # another one may go on by now
    assert not store.is_trying(draft)


def test_a_clock_that_was_wrong_keeps_nobody_from_trying_a_draft(
    sqlite_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = sqlite_world.hub.store, Clock(monkeypatch)
    draft = store.add_draft("ann", {"study": {}}, "ann")
    clock.ahead = 86_400.0
    assert store.begin_trial(draft, 1, {"token": "t"}, "ann") is None
    assert store.begin_trial(draft, 1, {"token": "t"}, "bob") is not None
    clock.ahead = 0.0
    assert not store.is_trying(draft)
    assert store.begin_trial(draft, 1, {"token": "t"}, "cid") is None


def test_why_a_trial_failed_is_said_of_what_was_tried() -> None:
    for problem in (MemoryError(), TookTooLong(), Ended("It ended.")):
        assert "fewer sites" in trials._describe(problem, is_trial=True)
        assert "public records" in trials._describe(problem, is_trial=False)
    assert "the hub allows" not in trials._describe(Ended("It ended."), is_trial=True)


def parquet(**columns: list[Any]) -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table({name: pa.array(each) for name, each in columns.items()}), target)
    return target.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", b"foo,bar\n1,2\n"),
        ("t.csv", b"age,sex,ill\n1,f,maybe\n"),
        ("t.csv", b"age,sex,ill\n"),
        ("t.csv", b"\x00\x01"),
        ("t.csv.gz", b"no gzip"),
        ("t.parquet", b"no parquet"),
        ("t.parquet", parquet(foo=[1])),
        ("t.parquet", parquet(age=[], sex=[], ill=[])),
        ("t.csv", b"age,sex,ill\n" + b"1,f,no\n" * 100_000),
    ],
    ids=["columns", "labels", "empty", "binary", "gzip", "parquet", "other", "none", "good"],
)
def test_a_draft_whose_public_file_does_not_fit_is_not_complete(
    ann: Coordinator, name: str, content: bytes
) -> None:
    at, is_good = ann.begin(), len(content) > 1000
    assert ann.post(f"{at}/files/test", files={"file": (name, content)}).status_code == 303
    page = ann.get(at).text
    assert ("The draft is complete" in page) == is_good
    assert ("cannot be used" in page) != is_good
    assert "first.csv" not in page
    ann.get(f"{at}/freeze")
    assert ann.post(f"{at}/freeze").status_code == (303 if is_good else 422)


def test_a_draft_whose_name_is_taken_is_not_complete(ann: Coordinator) -> None:
    at = ann.begin(name="heart-risk")
    ann.get(f"{at}/freeze")
    ann.post(f"{at}/freeze")
    ann.begin(name="heart-risk", purpose="Another.")
    assert "The draft is complete" not in ann.text
    assert "which is taken" in ann.text
    ann.begin(name="heart-rlsk")
    assert "which is taken" in ann.text


def test_a_link_works_as_long_as_its_account_may_add_studies(ann: Coordinator) -> None:
    store, at = ann.world.hub.store, ann.begin()
    page = ann.post(f"{at}/share").text
    link = re.search(r"http://hub(/api/drafts/[0-9a-f]{48})", page)[1]

    def is_there() -> bool:
        return bool(ann.world.client.get(link).status_code == 200)

    assert is_there()
    store.set_role("ann", "operator", role=Role.COORDINATOR, only=[])
    assert not is_there()
    store.set_role("ann", "operator", role=Role.AUDITOR)
    assert not is_there()
    store.set_role("ann", "operator", role=Role.OPERATOR)
    assert is_there()
    store.set_status("ann", "operator", active=False)
    assert not is_there()


def test_a_file_that_comes_with_a_draft_is_one_that_studies_wait_for(
    ann: Coordinator, tools: Any
) -> None:
    at, store = ann.begin(), ann.world.hub.store
    content = b"age,sex,ill\n1,f,no\n"
    ann.post(f"{at}/files/test", files={"file": ("t.csv", content)})
    text = ann.get(f"{at}/text").text
    ann.get(at)
    ann.post(f"{at}/files/test/remove")
    assert store.file(hashlib.sha256(content).hexdigest()) is None
    ann.world.hub.add_study(text, "ann")
    store.claim("heart", "worker", 10.0)
    store.give_up("heart", 0, "worker", "The public file t.csv is missing.")
    ann.get(at)
    ann.post(f"{at}/files/public", files={"file": ("other.csv", content)})
    row = store.study("heart")
    assert (row["problem"], row["changes"]) == (None, 1)


def test_the_files_of_an_accounts_drafts_have_a_limit_together(
    ann: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, store = ann.begin(), ann.world.hub.store
    kept, late = b"age,sex,ill\n1,f,no\n", b"age,sex,ill\n2,f,no\n"
    assert ann.post(f"{at}/files/test", files={"file": ("t.csv", kept)}).status_code == 303
    monkeypatch.setattr(rows, "MOST_FILED", 2 * len(kept) - 1)
    other = ann.begin(name="other")
    answer = ann.post(f"{other}/files/public", files={"file": ("t.csv", late)})
    assert answer.status_code == 413
    assert not store.files.path(hashlib.sha256(late).hexdigest()).exists()
    ann.get(at)
    assert ann.post(f"{at}/files/test", files={"file": ("t.csv", late)}).status_code == 303
    ann.get(other)
    assert ann.post(f"{other}/files/test", files={"file": ("t.csv", late)}).status_code == 303


def test_no_draft_names_a_file_that_was_removed_while_it_arrived(
    ann: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, store = ann.begin(), ann.world.hub.store
    content = b"age,sex,ill\n1,f,no\n"
    sha256, change = hashlib.sha256(content).hexdigest(), store.change_draft

    def change_late(*arguments: Any) -> list[str]:  # the last other draft with it went meanwhile
        store.remove_unnamed(sha256)
        return list(change(*arguments))

    monkeypatch.setattr(store, "change_draft", change_late)
    answer = ann.post(f"{at}/files/test", files={"file": ("t.csv", content)})
    assert answer.status_code == 503
    assert "test" not in store.draft(at.rpartition("/")[2])["facts"]
