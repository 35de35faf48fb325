"""Sites of one study can train learners of different kinds, where its aggregator combines them."""

from dataclasses import replace

import pyarrow.csv
import pytest

from consilience import Budget, Ledger
from consilience.cli.app import main
from consilience.errors import ContributionRejected, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.privacy.spending import Account
from consilience.site.site import Site
from consilience.study.check import StudyRefused, check_release
from consilience.study.collect import Publication, read_records
from consilience.study.pages import of_study, of_training
from consilience.study.study import Study
from studies import records_parts, study_text, table

KEY = SigningKey.generate()
FOREST = "[alternatives.PrivateForestClassifier]\nn_trees = 4\nmax_depth = 3\n"
SVC = "[alternatives.PrivateLinearSVC]\nhuber = 0.5\n"


def mixed_text(aggregator="WeightedVote", end="", **parts):
    return study_text(aggregator=aggregator, **parts) + FOREST + SVC + end


def trained(study, folder, learner, number, **changes):
    ledger = Ledger(folder / f"{number}.sqlite")
    ledger.allow("ward", Budget(epsilon=3.0))
    whose = {"site": f"site {number}", "signing": KEY, "dataset": "ward", **changes}
    return study.choose(learner).train(table(400, seed=number), ledger, epsilon=1.0, **whose)


@pytest.fixture
def study():
    return Study.from_text(mixed_text())


def test_what_a_study_lets_sites_choose_is_part_of_its_facts(study):
    assert list(study.learners) == [
        "PrivateLogisticRegression",
        "PrivateForestClassifier",
        "PrivateLinearSVC",
    ]
    assert Study.from_dict(study.to_dict()) == study
    plain = Study.from_text(study_text(aggregator="WeightedVote"))
    assert "alternatives" not in plain.to_dict()
    assert study.digest != plain.digest
    assert {choice.digest for choice in study.choices} == {study.digest}
    shown = of_study(study).as_text()
    assert "PrivateForestClassifier with n_trees = 4, max_depth = 3" in shown


def test_the_page_to_approve_says_that_no_choice_may_follow_from_the_records(study, tmp_path):
    ledger = Ledger(tmp_path / "books")
    ledger.allow("ward", Budget(epsilon=3.0))
    facts = {"site": "north", "epsilon": 1.0, "number": 1, "head": "0" * 64}
    one = Study.from_text(study_text(aggregator="WeightedVote"))
    pages = [
        " ".join(of_training(each, balance=ledger.balance("ward"), **facts).as_text(200).split())
        for each in (study.choose("PrivateLinearSVC"), one)
    ]
    assert "if the epsilon and learner were not chosen by trying out on these records" in pages[0]
    assert "chosen here among PrivateLogisticRegression, PrivateForestClassifier, P" in pages[0]
    assert "if the epsilon was not chosen by trying out on these records" in pages[1]
    assert "chosen here among" not in pages[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (mixed_text("Average"), "Average combines models of one kind"),
        (mixed_text().replace("n_trees = 4", "n_trees = -4"), r"\[learner\]: .*n_trees"),
        (mixed_text().replace("PrivateLinearSVC", "PrivateRidge"), "cannot predict"),
        (mixed_text().replace("PrivateLinearSVC", "Oracle"), "the learner “Oracle” is none of"),
        (mixed_text().replace("huber", "epsilon"), "may not set epsilon"),
        (mixed_text().replace("PrivateLinearSVC", "PrivateLogisticRegression"), "itself"),
        (study_text() + "[alternatives]\nPrivateRidge = 3\n", "must be a table"),
    ],
)
def test_alternatives_that_cannot_work_are_refused_with_the_study(text, problem):
    with pytest.raises(StudyRefused, match=problem):
        Study.from_text(text)


def test_members_of_different_kinds_become_one_release(study, tmp_path):
    files = [trained(study, tmp_path, name, i) for i, name in enumerate(study.learners)]
    read = [Contribution.load(file.sealed.to_bytes()) for file in files]
    assert [type(each.learner).__name__ for each in read] == list(study.learners)
    release = study.combine(read, publication=Publication(KEY))
    check_release(study, release)
    assert len(release.ensemble.members) == 3
    found = release.ensemble.predict(study.schema.encode(table(300, seed=9)).X)
    assert (found == table(300, seed=9)["ill"].to_numpy()).mean() > 0.6


def test_a_learner_or_setting_that_the_study_does_not_name_is_refused(study, tmp_path):
    with pytest.raises(SettingsError, match="does not let sites train “PrivateTreeClassifier”"):
        study.choose("PrivateTreeClassifier")
    other = Study.from_text(mixed_text().replace("n_trees = 4", "n_trees = 5"))
    stranger = trained(other, tmp_path, "PrivateForestClassifier", 0)
    with pytest.raises(ContributionRejected, match="another study"):
        study.accept(stranger)

    def forge(foreign, learner, number):
        """Train by the settings of another study, in the name of this one."""
        choice = replace(foreign.choose(learner), stored=True)
        object.__setattr__(choice, "_whole", study)
        return trained(choice, tmp_path, choice.learner, number)

    with pytest.raises(ContributionRejected, match="other settings"):
        study.accept(forge(other, "PrivateForestClassifier", 1))
    tree = Study.from_text(study_text("PrivateTreeClassifier", "WeightedVote"))
    with pytest.raises(ContributionRejected, match="not one that the study names"):
        study.accept(forge(tree, None, 2))


def test_a_trusted_hub_distils_models_of_different_kinds(tmp_path):
    text = mixed_text(
        "SoftLabelDistillation",
        records_parts(tmp_path),
        more="epsilon = 4.0",
        privacy='hub = "trusted"',
    )
    study = Study.from_text(text)
    whose = {"signing": KEY, "dataset": "ward"}
    members = [
        study.choose(name).train(table(400, seed=i), None, epsilon=1.0, site=f"site {i}", **whose)
        for i, name in enumerate(study.learners)
    ]
    ledger = Ledger(tmp_path / "hub.sqlite")
    ledger.allow("sites", Budget(epsilon=5.0, unit="site"))
    public, test = read_records(study, tmp_path)
    publication = Publication(KEY, account=Account(ledger, "sites"))
    release = study.combine(members, public, test, publication=publication)
    check_release(study, release)
    assert release.guarantee.unit == "site"


def test_a_site_chooses_on_the_command_line_and_an_interrupted_choice_is_the_same_choice(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(mixed_text())
    pyarrow.csv.write_csv(table(400), "ward.csv")
    site = Site.init(tmp_path / "site", name="North", dataset="ward", budget=Budget(epsilon=2.0))
    site.join_folder(shared)
    train = ["site", "train", "heart-risk", "ward.csv", "--epsilon", "1", "--folder", "site"]
    forest = [*train, "--learner", "PrivateForestClassifier"]

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        return leaving.value.code or 0, capsys.readouterr().out

    assert run(*train, "--learner", "PrivateRidge", "--dry-run")[0] != 0
    code, said = run(*forest, "--dry-run")
    assert code == 0
    assert "PrivateForestClassifier" in said
    page = said.split("--approved ")[1].split()[0]
    assert run(*train, "--approved", page)[0] != 0  # another learner makes another page
    code, said = run(*forest, "--approved", page)
    assert code == 0
    assert "PrivateForestClassifier" in said
    # The same training again is reported and not charged; another one needs its own approval.
    assert "It was paid for before" in run(*forest)[1]
    assert run(*train)[0] != 0
    assert Site(tmp_path / "site").ledger.balance("ward").left.epsilon == pytest.approx(1.0)
