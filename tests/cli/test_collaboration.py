"""The commands of a collaboration, as people type them."""

import json

import pyarrow.csv
import pytest

from consilience.cli.app import main
from consilience.files.release import Release
from consilience.files.sealed import Sealed, SigningKey
from consilience.site.site import Site
from studies import records_parts, study_text, table


@pytest.fixture
def run(capsys):
    def run(*arguments, fails=0):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        assert (leaving.value.code or 0) == fails, printed.err
        return printed.err if fails else printed.out

    return run


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        pyarrow.csv.write_csv(table(500, seed=i), tmp_path / f"ward{i}.csv")
    return tmp_path


DECLARED = [
    "--number",
    "age:0:120",
    "--number",
    "pressure:50:250",
    "--category",
    "sex:f,m",
    "--classes",
    "0,1",
]
DECLARED += ["--purpose", "who falls ill"]


def test_two_sites_and_a_folder_from_nothing_to_predictions(run, tables):
    todo = run("study", "new", "ward0.csv", "--label", "ill", "--out", "first.toml")
    assert all(
        part in todo for part in ("Still to do", "[schema]", "the purpose is still to be filled in")
    )
    assert "FILL IN" in (tables / "first.toml").read_text()
    made = json.loads(
        run("study", "new", "ward0.csv", "--label", "ill", *DECLARED, "--name", "heart", "--json")
    )
    assert made == {"file": "study.toml", "problems": []}
    assert "heart is complete" in run("study", "check", "study.toml")
    assert "The hub is not trusted" in run("study", "show", "study.toml")
    (tables / "shared").mkdir()
    (tables / "study.toml").rename(tables / "shared" / "study.toml")
    for i in range(2):
        site = ("--folder", f"site{i}")
        run("site", "init", "--name", f"north {i}", "--dataset", "ward", "--epsilon", 3, *site)
        assert "Nothing was sent. Nothing was trained." in run("site", "join", "shared", *site)
        assert "Nothing was trained or recorded" in run(
            "site", "train", "heart", f"ward{i}.csv", "--epsilon", 1, "--dry-run", *site
        )
        assert "What will leave this site" in (tables / "approval.html").read_text()
        # Nobody can be asked here, so nothing happens without the digest of the page.
        assert "not approved" in run(
            "site", "train", "heart", f"ward{i}.csv", "--epsilon", 1, *site, fails=1
        )
        train = ("site", "train", "heart", f"ward{i}.csv", "--epsilon", 1, "--json", *site)
        shown = json.loads(run(*train, "--dry-run"))
        assert shown["digest"] in (tables / "approval.html").read_text()
        assert "not approved" in run(*train, "--approved", "0" * 64, fails=1)
        trained = json.loads(run(*train, "--approved", shown["digest"]))
        assert trained["guarantee"]["epsilon"] == pytest.approx(1.0)
        assert json.loads(run("contribution", "verify", trained["file"], "--json"))["holds"]
        assert "73.2 of 100" in run("contribution", "show", trained["file"], "--html", "page.html")
        assert (
            json.loads(run("site", "submit", "heart", "--json", *site))["digest"]
            == trained["digest"]
        )
        assert "offers no release" in run("site", "fetch", "heart", *site, fails=1)
    made = json.loads(run("release", "make", "shared", "--key", "coordinator.pem", "--json"))
    assert made["sites"] == ["north 0", "north 1"]
    assert "Release 1 of heart" in run("site", "fetch", "heart", "--folder", "site0")
    assert (
        json.loads(run("site", "status", "--folder", "site0", "--json"))["studies"][0]["release"]
        == 1
    )
    own = json.loads(run("site", "fetch", "heart", "--folder", "site1", "--json"))["own"]
    assert own.startswith("It lists this site's contribution 1.")
    run("site", "log", "heart", "--out", "log1.json", "--folder", "site1")
    for other in ("log1.json", "site1"):
        assert "the same 1 release" in run("site", "compare", "heart", other, "--folder", "site0")
    facts = json.loads((tables / "log1.json").read_text())
    facts["log"]["digests"] = ["0" * 64]
    (tables / "log2.json").write_text(json.dumps(facts))
    run("site", "compare", "heart", "log2.json", "--folder", "site0", fails=1)
    (tables / "log3.json").write_text("[]")
    refusal = run("site", "compare", "heart", "log3.json", "--folder", "site0", fails=1)
    assert "no log of releases" in refusal
    file = "site0/studies/heart/release-0001.safetensors"
    assert json.loads(run("release", "verify", file, "--json"))["digest"] == made["digest"]
    assert "Whose contributions" in run("release", "show", file, "--html", "release.html")
    predict = ("release", "predict", file, "site0", "ward2.csv")
    for out in ("ward2.csv", "site0/predictions.csv", "coordinator.pem"):
        assert "Nothing was written" in run(*predict, "--out", out, fails=1)
    run("site", "log", "heart", "--out", "site1/site.json", "--folder", "site1", fails=1)
    for out in ("predictions.csv", "predictions.parquet"):
        assert "500 rows" in run("release", "predict", file, "site0", "ward2.csv", "--out", out)
    for to, ending in (("json", ".json"), ("python", ".py"), ("onnx", ".onnx")):
        assert "Written" in run("release", "export", file, "site0", "--to", to)
        assert (tables / "release-0001").with_suffix(ending).stat().st_size > 500
    card = json.loads((tables / "release-0001.json").read_text())
    assert card["release digest"] == made["digest"]
    assert [one["column"] for one in card["scores"][0]["columns"]] == ["age", "sex", "pressure"]
    assert "Nothing was written" in run("release", "export", file, "site0", "--out", file, fails=1)
    ratios = run("release", "odds", file, "site0")
    assert "sex: m against f" in ratios
    assert "before models were combined" in ratios
    shown = run("release", "card", file, "site0", "--html", "card.html")
    for part in ("who falls ill", "What it promises", "north 1", "Nothing was released", "Limits"):
        assert part in shown
        assert part in (tables / "card.html").read_text()
    dear = ("--cost-false-negative", 99, "--out", "dear.csv")
    run("release", "predict", file, "site0", "ward2.csv", *dear)
    named = pyarrow.csv.read_csv(tables / "dear.csv")
    chances = named["probability of 1"].to_numpy()
    assert (named["prediction"].to_numpy() == (chances >= 0.01)).all()
    forged = Release.load(tables / file).sealed
    facts = {k: v for k, v in forged.facts.items() if k not in ("key", "tensors")}
    Sealed.seal("release", facts, forged.tensors, SigningKey.generate()).save(tables / "forged")
    refusal = run("release", "predict", "forged", "site0", "ward2.csv", fails=1)
    assert "key" in refusal
    verified = run("contribution", "verify", "site0/studies/heart/contribution-0001.safetensors")
    assert "signed in the name of “north 0”, by whoever has key" in verified
    predicted = pyarrow.csv.read_csv(tables / "predictions.csv")
    truth = table(500, seed=2)["ill"].to_numpy()
    assert (predicted["prediction"].to_numpy() == truth).mean() > 0.6
    run("site", "backup", "copy.sqlite", "--folder", "site0")
    assert "not confirmed" in run("site", "withdraw", "heart", "--folder", "site0", fails=1)
    assert "Withdrawn" in run("site", "withdraw", "heart", "--yes", "--folder", "site0")
    assert "at least 2 sites" in run(
        "release", "make", "shared", "--key", "coordinator.pem", fails=1
    )


def test_the_page_for_approval_is_standard_output_unless_json_is(run, tables, capsys):
    run("study", "new", "ward0.csv", "--label", "ill", *DECLARED, "--name", "heart")
    (tables / "shared").mkdir()
    (tables / "study.toml").rename(tables / "shared" / "study.toml")
    run("site", "init", "--name", "north", "--dataset", "ward", "--epsilon", 3)
    run("site", "join", "shared")
    for json_option, page_on, empty in (([], "out", "err"), (["--json"], "err", "out")):
        with pytest.raises(SystemExit):
            main(["site", "train", "heart", "ward0.csv", "--epsilon", "1", *json_option])
        printed = capsys.readouterr()
        assert "What will leave this site" in getattr(printed, page_on)
        assert "What will leave this site" not in getattr(printed, empty)


def test_no_output_replaces_what_a_site_or_a_person_needs(run, tables):
    (tables / "shared").mkdir()
    (tables / "shared" / "study.toml").write_text(study_text())
    run("site", "init", "--name", "north", "--dataset", "ward", "--epsilon", 3)
    run("site", "join", "shared")
    train = ("site", "train", "heart-risk", "ward0.csv", "--epsilon", 1)
    (tables / "linked.html").symlink_to(tables / "site" / "ledger.sqlite")
    kept = {path: path.read_bytes() for path in tables.rglob("*") if path.is_file()}
    for out in ("site/ledger.sqlite", "site/new.html", "ward0.csv", "linked.html"):
        assert "Nothing was written" in run(*train, "--dry-run", "--out", out, fails=1)
    shown = json.loads(run(*train, "--dry-run", "--json"))
    assert shown["digest"] == json.loads(run(*train, "--dry-run", "--json"))["digest"]
    trained = json.loads(run(*train, "--json", "--approved", shown["digest"]))["file"]
    run("contribution", "show", trained, "--html", "site/key.pem", fails=1)
    run("contribution", "show", trained, "--html", "page.html")
    run("contribution", "show", trained, "--html", "page.html")
    for path, content in kept.items():
        if path.name not in ("ledger.sqlite", "study.json", "linked.html"):
            assert path.read_bytes() == content
    assert json.loads(run("site", "budget", "show", "--json"))["spent"]["epsilon"] == 1


def test_a_table_without_records_is_refused_in_words(run, tables):
    (tables / "shared").mkdir()
    (tables / "shared" / "study.toml").write_text(study_text())
    (tables / "empty.csv").write_text("age,sex,pressure,ill\n")
    run("site", "init", "--name", "north", "--dataset", "ward", "--epsilon", 3)
    run("site", "join", "shared")
    train = ("site", "train", "heart-risk", "empty.csv", "--epsilon", 1)
    run(*train, "--dry-run", fails=1)
    said = run(*train, "--approved", Site("site").preview("heart-risk", epsilon=1).digest, fails=1)
    assert "Found array with 0 sample(s)" in said
    assert "Check that the table has records" in said
    assert json.loads(run("site", "budget", "show", "--json"))["spent"]["epsilon"] == 0


def test_a_study_can_name_its_learner_in_short(run, tables):
    run("study", "new", "ward0.csv", "--label", "ill", *DECLARED, "--learner", "svm")
    assert 'name = "PrivateLinearSVC"' in (tables / "study.toml").read_text()
    assert "is complete" in run("study", "check", "study.toml")


def test_a_release_made_in_a_folder_is_measured_beside_its_baselines(run, tables):
    shared = tables / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(study_text() + records_parts(shared))
    for i in range(2):
        site = ("--folder", f"site{i}")
        run("site", "init", "--name", f"north {i}", "--dataset", "ward", "--epsilon", 3, *site)
        run("site", "join", "shared", *site)
        train = ("site", "train", "heart-risk", f"ward{i}.csv", "--epsilon", 1, *site)
        shown = json.loads(run(*train, "--dry-run", "--json"))
        run(*train, "--approved", shown["digest"])
        run("site", "submit", "heart-risk", *site)
    said = run("release", "make", "shared", "--key", "coordinator.pem")
    assert "public records alone" in said
    quality = Release.load(shared / "release-0001.safetensors").sealed.facts["quality"]
    assert [row["kind"] for row in quality[:4]] == ["study", "baseline", "baseline", "baseline"]
    (shared / "test.csv").unlink()
    refusal = run("release", "make", "shared", "--key", "coordinator.pem", fails=1)
    assert "'test.csv' is not there" in refusal


def test_a_study_with_problems_says_all_of_them_and_fails(run, tables):
    run("study", "new", "ward0.csv", "--label", "ill", "--out", "first.toml")
    with pytest.raises(SystemExit) as leaving:
        main(["study", "check", "first.toml"])
    assert leaving.value.code == 1


def test_a_study_names_the_class_of_a_learner_given_by_its_short_name(run, tables):
    run("study", "new", "ward0.csv", "--label", "ill", *DECLARED, "--learner", "svm")
    assert 'name = "PrivateLinearSVC"' in (tables / "study.toml").read_text()
    new = ("study", "new", "ward0.csv", "--label", "ill", "--out", "second.toml")
    assert "'magic' is not one of" in run(*new, "--learner", "magic", fails=2)
    assert not (tables / "second.toml").exists()


def test_a_file_that_is_there_is_never_overwritten(run, tables):
    (tables / "study.toml").write_text("mine")
    assert "there already" in run("study", "new", "ward0.csv", "--label", "ill", fails=1)
    assert (tables / "study.toml").read_text() == "mine"


def test_the_operator_runs_a_hub_from_the_command_line(run, tables):
    hub = ("--folder", "hub")
    run("study", "new", "ward0.csv", "--label", "ill", *DECLARED, "--name", "heart")
    assert "anna can log in" in run(
        "hub", "add-coordinator", "anna", "--password", "a long enough password", *hub
    )
    assert json.loads(run("hub", "add-study", "study.toml", "--json", *hub))["name"] == "heart"
    first, second = (
        json.loads(run("hub", "invite", "heart", "--json", *hub))["invitation"] for _ in range(2)
    )
    assert first != second
    assert "A release needs 2 contributions" in run("hub", "aggregate", "heart", *hub, fails=1)
    assert json.loads(run("hub", "verify", "--json", *hub))["entries"] >= 3
    run("hub", "backup", "copy", *hub)
    assert "Restored" in run("hub", "restore", "copy", "--folder", "again", "--yes")
    assert "not empty" in run("hub", "restore", "copy", "--folder", "again", "--yes", fails=1)
