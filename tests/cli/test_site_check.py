"""A site checks its table before it files anything, and translates it by a mapping."""

import json

import openpyxl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import studies
from consilience.site.site import Site

TRAIN = ("site", "train", "heart-risk", "local.csv", "--epsilon", 1)
MAPPING = """
[columns.age]
from = "months"
factor = 0.08333333333333333
[columns.sex]
from = "Geschlecht"
codes = { 1 = "f", 2 = "m" }
"""


@pytest.fixture
def ward(tmp_path, monkeypatch, run):
    """A site that joined a study, with a table in the study's form and one in its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "study.toml").write_text(
        studies.study_text(settings="regularization = 0.05")
    )
    table = studies.table(60)
    pyarrow.csv.write_csv(table, "table.csv")
    sexes = pa.array([{"f": 1, "m": 2}[one] for one in table["sex"].to_pylist()])
    months = pa.compute.multiply(table["age"].cast(pa.float64()), 12.0)
    local = table.drop_columns(["age", "sex"]).append_column("months", months)
    local = local.append_column("Geschlecht", sexes)
    local = local.append_column("case", pa.array([f"case {i}" for i in range(60)]))
    pyarrow.csv.write_csv(local, "local.csv")
    (tmp_path / "mapping.toml").write_text(MAPPING)
    run("site", "init", "--name", "north", "--dataset", "ward", "--epsilon", 3)
    run("site", "join", "shared")
    return tmp_path


def files(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_site_check_lists_what_does_not_fit_and_writes_nothing(run, ward):
    text = (ward / "table.csv").read_text().replace('"m"', '"secret-w"', 1)
    (ward / "bad.csv").write_text(text)
    before, head = files(ward), Site("site").ledger.head()
    code, said, _ = run("site", "check", "heart-risk", "table.csv")
    assert (code, "All 60 records fit" in said) == (0, True)
    code, said, failed = run("site", "check", "heart-risk", "bad.csv")
    assert code == 1
    assert "column 'sex': “secret-w”; allowed is 'f', 'm'" in said
    assert "secret-w" not in failed
    code, said, _ = run("site", "check", "heart-risk", "bad.csv", "--json", "--most", 0)
    facts = json.loads(said)
    assert (facts["rows"], facts["misfits"]) == ([], {"sex": 1})
    assert files(ward) == before
    assert Site("site").ledger.head() == head


def test_a_draft_can_be_checked_against_before_it_is_a_study(run, ward):
    draft = (ward / "shared" / "study.toml").read_text().replace('"heart-risk"', '"Not A Name"')
    (ward / "draft.toml").write_text(draft.split("[learner]")[0])
    assert run("site", "check", "draft.toml", "table.csv")[0] == 0
    assert run("site", "check", "draft.toml", "local.csv", "--mapping", "mapping.toml")[0] == 0
    (ward / "draft.toml").write_text("[study]\n")
    code, _, failed = run("site", "check", "draft.toml", "table.csv")
    assert (code, "no part [schema]" in failed) == (1, True)


def test_a_dry_run_checks_the_table_and_files_no_record(run, ward):
    text = (ward / "table.csv").read_text().replace('"m"', '"secret-w"', 1)
    (ward / "local.csv").write_text(text)
    code, said, _ = run(*TRAIN, "--dry-run")
    assert code == 1
    assert "“secret-w”" in said
    assert "--approved" not in said
    assert "secret-w" not in (ward / "approval.html").read_text()
    assert "secret-w" not in run(*TRAIN, "--dry-run", "--json")[1]
    (ward / "local.csv").write_text((ward / "table.csv").read_text())
    code, said, _ = run(*TRAIN, "--dry-run")
    assert (code, "All 60 records fit" in said, "--approved" in said) == (0, True, True)


def test_an_approved_mapping_is_on_the_page_and_kept_for_later_commands(run, ward):
    code, said, _ = run("site", "check", "heart-risk", "local.csv")
    assert (code, "column 'age' is absent" in said) == (1, True)
    mapped = (*TRAIN, "--mapping", "mapping.toml")
    assert "All 60 records fit" in run("site", "check", *mapped[2:4], *mapped[-2:])[1]
    digest = json.loads(run(*mapped, "--dry-run", "--json")[1])["digest"]
    page = (ward / "approval.html").read_text()
    assert "Geschlecht" in page
    assert "numbers times 0.08333333333333333" in page
    (ward / "mapping.toml").write_text(MAPPING.replace("0.0833", "0.0834"))
    assert "not approved" in run(*mapped, "--approved", digest)[2]
    assert not (ward / "site/studies/heart-risk/mapping.toml").exists()
    (ward / "mapping.toml").write_text(MAPPING)
    assert run(*mapped, "--approved", digest)[0] == 0
    (ward / "mapping.toml").unlink()
    assert run("site", "check", "heart-risk", "local.csv")[0] == 0
    sent = b"".join(path.read_bytes() for path in (ward / "site/studies").rglob("*.safetensors"))
    assert b"Geschlecht" not in sent
    assert "paid for before" in run(*TRAIN)[1]  # by the mapping that was kept
    (ward / "other.toml").write_text(MAPPING.replace("0.0833", "0.0834"))
    refused = run(*TRAIN, "--mapping", "other.toml", "--approved", digest)[2]
    assert "not approved" in refused


def test_a_mapping_without_columns_gives_the_kept_one_up(run, ward):
    kept = ward / "site/studies/heart-risk/mapping.toml"
    kept.write_text(MAPPING)
    assert run("site", "check", "heart-risk", "table.csv")[0] == 1
    (ward / "none.toml").write_text("")
    assert run("site", "check", "heart-risk", "table.csv", "--mapping", "none.toml")[0] == 0
    train = ("site", "train", "heart-risk", "table.csv", "--epsilon", 1, "--mapping", "none.toml")
    digest = json.loads(run(*train, "--dry-run", "--json")[1])["digest"]
    assert run(*train, "--approved", digest)[0] == 0
    assert not kept.exists()


def test_workbook_mapping_and_ids_from_training_to_predictions(run, ward):
    book = openpyxl.Workbook()
    for row in zip(*pa.csv.read_csv("local.csv").to_pydict().values(), strict=True):
        book.active.append(row)
    book.active.insert_rows(1)
    for place, name in enumerate(pa.csv.read_csv("local.csv").column_names):
        book.active.cell(1, place + 1, name)
    book.save("local.xlsx")
    study = ward / "shared" / "study.toml"
    for name in ("site", "south"):
        folder = ("--folder", name)
        if name == "south":
            run("site", "init", "--name", name, "--dataset", "w", "--epsilon", 3, *folder)
            run("site", "join", "shared", *folder)
        train = ("site", "train", "heart-risk", "local.xlsx", "--epsilon", 1)
        train += ("--mapping", "mapping.toml", *folder)
        digest = json.loads(run(*train, "--dry-run", "--json")[1])["digest"]
        assert run(*train, "--approved", digest)[0] == 0
        assert run("site", "submit", "heart-risk", *folder)[0] == 0
    assert run("release", "make", "shared", "--key", "key.pem")[0] == 0
    assert run("site", "fetch", "heart-risk")[0] == 0
    assert run("site", "adapt", "heart-risk", "local.xlsx")[0] == 0
    code, _, failed = run("site", "predict", "heart-risk", "local.xlsx", "--id", "case")
    assert code == 0, failed
    written = pa.csv.read_csv("predictions.csv")
    assert written.column_names[:2] == ["case", "prediction"]
    assert written["case"].to_pylist()[:2] == ["case 0", "case 1"]
    file = "site/studies/heart-risk/release-0001.safetensors"
    predict = ("release", "predict", file, "site", "local.csv", "--id")
    assert run(*predict, "case", "--out", "p.parquet")[0] == 0
    made = pq.read_table("p.parquet")
    assert made.column_names == ["case", "prediction", "probability of 0", "probability of 1"]
    assert "no column 'cases'" in run(*predict, "cases")[2]
    plain = ("release", "predict", file, study, "local.csv", "--mapping", "mapping.toml")
    assert run(*plain, "--out", "q.parquet")[0] == 0
    assert pq.read_table("q.parquet").equals(made.drop_columns(["case"]))
