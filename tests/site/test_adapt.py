"""What a site adapts is for the site alone: nothing takes the file, and nobody else can read it."""

import json
import shutil
import stat

import numpy as np
import pyarrow.csv
import pytest

from consilience import Average, Budget
from consilience.adapters.relay import Collection, Outbox
from consilience.cli.app import main
from consilience.errors import ContributionRejected, SettingsError
from consilience.evaluation.adaptation import ADAPTED as MODEL
from consilience.evaluation.adaptation import OWN, RELEASE
from consilience.files.contribution import Contribution
from consilience.files.log import ReleaseLog
from consilience.files.release import Release
from consilience.files.sealed import ADAPTED, Sealed, SigningKey
from consilience.site.adapt import VISIBLE
from consilience.site.site import Site
from consilience.study.collect import Publication
from consilience.study.study import Study
from federation import Consortium
from forgery import Forge
from studies import study_text, table

NAMES = ("north", "south", "west")
STAYS = "must not leave that site"


def joined(folder, text, names=NAMES, **budget):
    """Return sites that have joined, contributed through a folder and fetched a release of all."""
    shared = folder / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(text)
    sites = []
    for seed, name in enumerate(names):
        allowed = Budget(epsilon=3.0, **budget)
        site = Site.init(folder / name, name=name, dataset="ward", budget=allowed)
        site.join_folder(shared)
        site.train("heart-risk", table(300, seed=seed), epsilon=1.0)
        site.submit("heart-risk")
        sites.append(site)
    files = sorted(shared.glob("contribution-*.safetensors"))
    release = Study.from_text(text).combine(
        [Contribution.load(file) for file in files],
        publication=Publication(SigningKey.generate(), 1, log=ReleaseLog()),
    )
    release.save(shared / release.filename)
    for site in sites:
        site.fetch("heart-risk")
    return sites, shared


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Sites, their shared folder, and what the first of them made of the release."""
    folder = tmp_path_factory.mktemp("adapting")
    sites, shared = joined(folder, study_text())
    return sites, shared, sites[0].adapt("heart-risk", table(300, seed=0))


def test_the_files_are_for_the_sites_owner_alone(world):
    _, _, made = world
    assert made.file.name == "adapted-0001.safetensors"
    for file in (made.file, made.page_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_is_charged_and_nothing_is_sent(world, tmp_path):
    sites, shared, _ = world
    before = sorted(path.name for path in shared.iterdir()), sites[1].ledger.head()
    sites[1].adapt("heart-risk", table(300, seed=1))
    assert (sorted(path.name for path in shared.iterdir()), sites[1].ledger.head()) == before


def test_the_model_is_read_again_as_it_was(world):
    sites, _, made = world
    again = sites[0].adapted("heart-risk")
    assert np.array_equal(again.coef_, made.model.coef_)
    assert np.array_equal(again.own_.coef_, made.model.own_.coef_)
    rows = table(50, seed=9)
    assert np.array_equal(again.predict_proba(rows), made.model.predict_proba(rows))
    with pytest.raises(SettingsError, match="was not adapted here"):
        sites[2].adapted("heart-risk")


def test_a_file_of_another_site_or_release_is_not_used(world):
    sites, _, made = world
    place = sites[2].folder / "studies" / "heart-risk" / made.file.name
    shutil.copy(made.file, place)
    try:
        with pytest.raises(ContributionRejected, match="another site made it"):
            sites[2].adapted("heart-risk")
    finally:
        place.unlink()


def test_the_page_shows_three_models_and_says_what_stays(world):
    _, _, made = world
    text = " ".join(made.page.as_text(10_000).split())
    assert made.model.comparison_.sentence in text
    for name in (OWN, RELEASE, MODEL):
        assert f"{name} AUC 0." in text
    for said in ("coefficients", "predictions", "exact statements", "must not leave the site"):
        assert said in text
    assert VISIBLE in text
    assert "no epsilon is charged" in VISIBLE
    assert "That part was subtracted before the rest was adapted" in text
    assert "or its study began with a model, or with axes, of an earlier release" in text
    assert "that cost epsilon = 1 per record in all, which bounds" in text
    assert "must not leave the site" in made.page_file.read_text()


def test_the_others_part_of_an_average_is_what_is_adapted(world, monkeypatch):
    sites, _, _ = world
    seen = []
    whole = Average.leave_out

    def watched(self, *given):
        seen.append(whole(self, *given))
        return seen[-1]

    monkeypatch.setattr(Average, "leave_out", watched)
    sites[1].adapt("heart-risk", table(300, seed=1))
    members = [
        Contribution.load(site.contribution("heart-risk")).learner for site in (sites[0], sites[2])
    ]
    assert seen[0].coef == pytest.approx(Average().combine(members).coef)


def test_a_vote_of_forests_is_adapted_by_its_log_odds(tmp_path):
    text = study_text("PrivateForestClassifier", "WeightedVote")
    sites, _ = joined(tmp_path, text, neighbours="add-remove")
    made = sites[0].adapt("heart-risk", table(300, seed=0))
    assert not made.model.is_linear
    assert "that part cannot be subtracted" in made.page.as_text(10_000)
    again = sites[0].adapted("heart-risk")
    rows = table(40, seed=8)
    assert np.array_equal(again.predict_proba(rows), made.model.predict_proba(rows))


def test_a_site_that_only_fetches_adapts_too(world, tmp_path):
    _, shared, _ = world
    site = Site.init(tmp_path / "east", name="east", dataset="ward", budget=Budget(epsilon=1.0))
    site.join_folder(shared, fetch_only=True)
    with pytest.raises(SettingsError, match="No release"):
        site.adapt("heart-risk", table(100, seed=7))
    site.fetch("heart-risk")
    made = site.adapt("heart-risk", table(100, seed=7))
    assert made.file.exists()
    text = made.page.as_text(10_000)
    assert "The release states that nothing of this site is in it. If that is true" in text
    assert "This site handed nothing over to the study that was computed" in text


def test_what_a_release_is_made_of_is_told_as_its_signers_word(tmp_path):
    """The signer's own model can be another site's, and its list of members is only a list."""
    sites, shared = joined(tmp_path, study_text())
    key = SigningKey.generate()
    own = Contribution.load(sites[0].contribution("heart-risk")).learner
    honest = Release.load(shared / "release-0001.safetensors").sealed
    for keep, said in ((3, "that this site's contribution is in it"), (2, "that nothing of this")):
        forge = Forge(honest, key)
        forge.facts["sources"] = forge.facts["sources"][-keep:]
        for source in forge.facts["sources"]:
            source["weight"] = 1 / keep
        forge.tensors = {"coef": own.coef_, "intercept": own.intercept_}  # of nobody else
        (shared / "release-0001.safetensors").write_bytes(forge.to_bytes())
        folder = tmp_path / f"lied to about {keep}"
        shutil.copytree(sites[0].folder, folder)
        site = Site(folder)
        place = folder / "studies" / "heart-risk"
        for file in place.glob("release-*"):
            file.unlink()
        facts = json.loads((place / "study.json").read_text())
        facts |= {"hub_key": None, "log": None, "release": None}
        (place / "study.json").write_text(json.dumps(facts))
        site.fetch("heart-risk")
        text = site.adapt("heart-risk", table(300, seed=0)).page.as_text(10_000)
        seen = text[text.index("What the release has seen") :]
        assert f"The release states {said}" in seen
        assert "is true" in seen
        assert "that cost epsilon = 1 per record in all" in seen
        assert "but for what the release has seen of them" in text


# ------------------------------------------------------------------------------ who refuses it


def test_submit_refuses_it_under_the_name_of_a_contribution(world, tmp_path):
    sites, _, made = world
    folder = tmp_path / "copy"
    shutil.copytree(sites[0].folder, folder)
    place = folder / "studies" / "heart-risk"
    shutil.copy(made.file, place / "contribution-0002.safetensors")
    with pytest.raises(ContributionRejected, match=STAYS):
        Site(folder).submit("heart-risk")


def test_a_release_is_not_made_of_a_folder_that_holds_it(world, tmp_path, capsys):
    _, shared, made = world
    folder = tmp_path / "shared"
    shutil.copytree(shared, folder)
    shutil.copy(made.file, folder / "contribution-mole-0001.safetensors")
    with pytest.raises(SystemExit) as left:
        main(["release", "make", str(folder), "--key", str(tmp_path / "key.pem")])
    assert left.value.code != 0
    assert STAYS in " ".join(capsys.readouterr().err.split())
    assert not (folder / "release-0002.safetensors").exists()


def test_what_it_predicts_is_for_the_sites_owner_and_not_for_a_shared_folder(
    world, tmp_path, capsys
):
    sites, shared, _ = world
    records, folder = tmp_path / "records.csv", sites[0].folder
    pyarrow.csv.write_csv(table(20, seed=2), records)
    predict = ("site", "predict", "heart-risk", records, "--folder", folder, "--out")
    with pytest.raises(SystemExit) as left:
        main([*map(str, predict), str(shared / "predictions.csv")])
    assert left.value.code != 0
    assert "shares with others" in capsys.readouterr().err
    assert not (shared / "predictions.csv").exists()
    run(capsys, *predict, tmp_path / "predictions.csv")
    assert stat.S_IMODE((tmp_path / "predictions.csv").stat().st_mode) == 0o600


def test_no_folder_of_a_site_lies_in_what_it_shares(tmp_path):
    """Whatever carries a shared folder to others would carry models, ledger and key with it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(study_text())
    site = Site.init(shared / "north", name="north", dataset="ward", budget=Budget(epsilon=1.0))
    with pytest.raises(SettingsError, match="own folder lies inside the shared folder"):
        site.join_folder(shared)
    assert site.studies == []
    site.folder.rename(tmp_path / "north")
    site = Site(tmp_path / "north")
    site.join_folder(shared)
    site.folder.rename(shared / "north")
    with pytest.raises(SettingsError, match="own folder lies inside the shared folder"):
        Site(shared / "north").train("heart-risk", table(100), epsilon=1.0)


def test_no_reader_takes_it_for_something_else(world):
    _, _, made = world
    for load in (Contribution.load, Release.load):
        with pytest.raises(ContributionRejected, match=STAYS):
            load(made.file)


def test_a_relay_neither_sends_nor_takes_it(world, tmp_path):
    sites, _, made = world
    consortium = Consortium(tmp_path, NAMES, study_text())
    outbox = Outbox.find(consortium.nodes["north"]["outbox"], consortium.study.digest)
    shutil.copy(made.file, outbox.folder / "contribution-north-0001.safetensors")
    assert outbox.offer(()).files == {}
    listed = {site.name: site.key.public for site in sites}
    (consortium.heart / "sites.json").write_text(json.dumps(listed))
    with pytest.raises(ContributionRejected, match=STAYS):
        Collection(consortium.heart).keep("north", made.file.read_bytes())
    assert not list(consortium.heart.glob("contributions/*/*.safetensors"))
    with pytest.raises(ContributionRejected, match=STAYS):
        outbox.keep(made.file.read_bytes(), key=sites[0].key.public)


# ------------------------------------------------------------------------------- the commands


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(list(map(str, arguments)))
    printed = capsys.readouterr()
    assert not leaving.value.code, printed.err
    return printed.out


def test_fetching_says_how_to_adapt_and_adapting_shows_the_page(world, tmp_path, capsys):
    sites, _, _ = world
    folder = sites[2].folder
    records = tmp_path / "records.csv"
    pyarrow.csv.write_csv(table(300, seed=2), records)
    fetched = " ".join(run(capsys, "site", "fetch", "heart-risk", "--folder", folder).split())
    assert "consilience site adapt heart-risk TABLE" in fetched
    said = run(capsys, "site", "adapt", "heart-risk", records, "--folder", folder)
    assert "Does joining pay for this site?" in said
    assert "Nothing was sent or charged" in said
    facts = run(capsys, "site", "adapt", "heart-risk", records, "--folder", folder, "--json")
    answer = json.loads(facts)
    assert set(answer["measures"]) == {OWN, RELEASE, MODEL}
    out = tmp_path / "predictions.csv"
    said = run(capsys, "site", "predict", "heart-risk", records, "--out", out, "--folder", folder)
    assert "must not leave the site" in said
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    found = pyarrow.csv.read_csv(out)
    assert found.num_rows == 300
    model = sites[2].adapted("heart-risk")
    assert found["prediction"].to_pylist() == model.predict(table(300, seed=2)).tolist()


def test_the_file_holds_what_its_kind_says_and_no_more(world):
    _, _, made = world
    sealed = Sealed.load(made.file, ADAPTED)
    assert set(sealed.facts) == set(
        "classes linear share unit study sequence software created release key tensors".split()
    )
    assert set(sealed.tensors) == {"coef", "intercept", "own_coef", "own_intercept"}
