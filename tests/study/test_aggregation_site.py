"""A site weighs the models of the others on private records of its own, and pays for that."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.csv
import pytest

from consilience import Budget, Ledger, Noise
from consilience.aggregators.feature import FeatureMethod
from consilience.auditing.audit import audit
from consilience.cli.app import main
from consilience.errors import ContributionRejected, GuaranteeVoid, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.privacy.accounting import events_to_json
from consilience.study.check import StudyRefused, check_release
from consilience.study.collect import Publication
from consilience.study.pages import of_study
from consilience.study.study import Study
from consilience.tables.public import Public
from disclosed import TABLES
from forgery import Forge
from studies import PUBLIC_PART, TRUSTED, study_text, table

KEY = SigningKey.generate()
AT = 'at = "centre"\n'


def text(more="", **parts):
    return study_text(aggregator="FeatureMethod", more=AT + more, **parts)


def sender(folder, name):
    ledger = Ledger(folder / f"{name}.sqlite")
    ledger.allow("ward", Budget(epsilon=3.0))
    return ledger, {"site": name, "signing": KEY, "dataset": "ward"}


@pytest.fixture
def members(tmp_path):
    study, made = Study.from_text(text()), []
    for i in range(3):
        ledger, whose = sender(tmp_path, f"site {i}")
        made.append(study.train(table(400, seed=i), ledger, epsilon=0.5 + i / 2, **whose))
    return study, made


def weigh(study, members, folder, epsilon=2.0, **changes):
    ledger, whose = sender(folder, "centre")
    return study.aggregate(table(600, seed=9), members, ledger, epsilon=epsilon, **whose | changes)


def test_a_release_lists_the_members_and_the_site_that_weighed_them(members, tmp_path):
    study, made = members
    weighed = weigh(study, made, tmp_path)
    assert Ledger(tmp_path / "centre.sqlite").balance("ward").spent.epsilon == pytest.approx(2.0)
    assert weighed.weighs == tuple(one.digest for one in made)
    files = [Contribution.load(one.sealed.to_bytes()) for one in [weighed, *made]]
    study.combine(files, publication=Publication(KEY)).save(tmp_path / "release")
    release = check_release(study, Release.load(tmp_path / "release", key=KEY.public))
    promised = {source.site: source.guarantee.epsilon for source in release.sources}
    assert list(promised) == ["site 0", "site 1", "site 2", "centre"]
    assert list(promised.values()) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert release.guarantee.epsilon == pytest.approx(2.0)
    assert any("at two sites" in one for one in release.guarantee.assumptions)
    assert release.ensemble.weights[-1] == 0
    X, y = study.schema.encode(table(1000, seed=77)).X, table(1000, seed=77)["ill"].to_numpy()
    assert (release.predict(X) == y).mean() > 0.7


def test_it_is_the_feature_method_on_private_records(members):
    """The same noise gives the same model: the audits of one are the audits of the other."""
    study, made = members
    models = [one.learner for one in made]
    encoded = study.schema.encode(table(600, seed=9))
    labels = np.asarray(study.schema.classes)[encoded.y]
    method = FeatureMethod(epsilon=2.0, data_norm=study.schema.norm, classes=[0, 1])
    method.noise = Noise(seed=5)
    whole = method.combine(models, Public(encoded.X, labels))
    aggregator, weigher = study.build_aggregator(), study.build_weigher(2.0)
    rows = aggregator.weighed_rows(models, encoded.X)
    assert np.linalg.norm(rows, axis=1).max() <= 1
    # The method draws the seed of its learner from its own.
    seed = int(Noise(seed=5).open().words(1)[0])
    weigher.set_params(noise=Noise(seed=seed)).fit(rows, labels)
    parts = aggregator.combine_weighed(models, weigher)
    np.testing.assert_allclose(parts.coef, whole.coef)
    np.testing.assert_allclose(parts.weights, whole.weights)
    assert audit(study.build_weigher(1.0), runs=20).passed


def test_weights_that_were_learned_with_half_the_noise_are_caught(members, tmp_path):
    study, made = members
    weighed = weigh(study, made, tmp_path)
    first, *rest = weighed.events
    changed = {"scale": first.scale / 2} if hasattr(first, "scale") else {"sigma": first.sigma / 2}
    forge = Forge(weighed.sealed, KEY)
    forge.facts["events"] = events_to_json([replace(first, **changed), *rest])
    with pytest.raises(ContributionRejected):
        Contribution.load(forge.to_bytes())


def test_forged_weights_are_refused(members, tmp_path):
    study, made = members
    honest = weigh(study, made, tmp_path)

    def refused(change, sealed=honest.sealed):
        forge = Forge(sealed, KEY)
        change(forge.facts, forge.tensors)
        try:
            study.accept(Contribution.load(forge.to_bytes()))
        except ContributionRejected:
            return True
        return False

    lies = {
        "nothing": lambda facts, _: None,
        "another site": lambda facts, _: facts.update(site="site 7"),
        "a model": lambda facts, _: facts.pop("members"),
        "fewer members": lambda facts, _: facts["members"].pop(),
        "a member twice": lambda facts, _: facts["members"].__setitem__(0, facts["members"][1]),
        "no digests": lambda facts, _: facts.update(members=["x"] * 3),
        "words": lambda facts, _: facts.update(members="said"),
        "another ridge": lambda facts, _: facts["settings"].update(regularization=1.0),
        "another epsilon": lambda facts, _: facts["settings"].update(epsilon=1.0),
        "huge weights": lambda _, tensors: tensors.update(coef=tensors["coef"] * 1e9),
    }
    assert [name for name, lie in lies.items() if not refused(lie)] == ["nothing"]
    assert refused(lambda facts, _: facts.update(members=["a" * 64]), made[0].sealed)
    assert refused(lambda facts, _: facts.update(site="centre"), made[0].sealed)


def test_a_release_waits_until_the_members_that_are_there_are_weighed(members, tmp_path):
    study, made = members
    publish = {"publication": Publication(KEY)}
    with pytest.raises(SettingsError, match="has not done so"):
        study.combine(made, **publish)
    weighed = weigh(study, made, tmp_path)
    with pytest.raises(SettingsError, match="withdrawn or replaced"):
        study.combine([*made[1:], weighed], **publish)
    late, whose = sender(tmp_path, "late")
    more = study.train(table(300, seed=5), late, epsilon=1.0, **whose)
    release = study.combine([more, *made, weighed], **publish)
    assert [source.site for source in release.sources][-1] == "centre"
    assert "late" not in [source.site for source in release.sources]
    forge = Forge(release.sealed, KEY)
    forge.facts["sources"] = forge.facts["sources"][:-1]
    with pytest.raises(ContributionRejected):
        check_release(study, Release.load(forge.to_bytes()))


def test_who_may_weigh_and_what(members, tmp_path):
    study, made = members
    with pytest.raises(SettingsError, match="does not let"):
        weigh(study, made, tmp_path, site="site 0")
    with pytest.raises(SettingsError, match="at least 2 sites"):
        weigh(study, made[:1], tmp_path)
    ledger, whose = sender(tmp_path, "centre")
    with pytest.raises(SettingsError, match="site aggregate"):
        study.train(table(300, seed=5), ledger, epsilon=1.0, **whose)
    exact = study.build(1.0).set_params(epsilon=math.inf)
    exact.fit(*study.schema.encode(table(300, seed=5))[:2])
    with pytest.raises(GuaranteeVoid):
        study.build_aggregator().weighed_rows([exact], np.zeros((3, 4)))
    assert ledger.balance("ward").spent.epsilon == 0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (text("epsilon = 1.0"), "epsilon of its own"),
        (text("max_members = 2"), "max_members"),
        (study_text(more=AT), "weighs no members at a site"),
        (text(privacy=TRUSTED), "untrusted"),
        (text().replace("centre", "x" * 200), "name of a site"),
        (text() + PUBLIC_PART, "no .public. part"),
    ],
)
def test_a_study_that_cannot_work_is_refused(changed, problem):
    with pytest.raises(StudyRefused, match=problem):
        Study.from_text(changed)


def test_sites_share_a_folder_and_one_weighs_what_the_others_sent(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, fails=False):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        assert bool(leaving.value.code) == fails, printed.err
        return printed.err if fails else printed.out

    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "study.toml").write_text(text())
    for name, seed in (("north", 0), ("south", 1), ("centre", 2)):
        pyarrow.csv.write_csv(table(500, seed=seed), tmp_path / f"{name}.csv")
        run("site", "init", "--name", name, "--dataset", "ward", "--epsilon", 3, "--folder", name)
        run("site", "join", "shared", "--folder", name)
    refused = run("site", "aggregate", "heart-risk", "north.csv", "--epsilon", 1, "--folder",
                  "north", fails=True)  # fmt: skip
    assert "does not name this site" in " ".join(refused.split())

    def train(name, verb):
        asked = ("site", verb, "heart-risk", f"{name}.csv", "--epsilon", 1, "--folder", name)
        shown = json.loads(run(*asked, "--dry-run", "--json"))
        page = " ".join((tmp_path / "approval.html").read_text().split())
        done = json.loads(run(*asked, "--approved", shown["digest"], "--json"))
        again = json.loads(run(*asked, "--approved", shown["digest"], "--json"))
        assert (done["charged"], again["charged"]) == (True, False)
        run("site", "submit", "heart-risk", "--folder", name)
        return page

    assert "one other site, which weighs the models: centre" in train("north", "train")
    train("south", "train")
    page = train("centre", "aggregate")
    assert "2 weights of the models of the sites below" in page
    assert "north" in page
    run("release", "make", "shared", "--key", "coordinator.pem")
    shown = run("site", "fetch", "heart-risk", "--folder", "centre")
    assert "centre" in shown
    assert "weighed at" in of_study(Study.from_text(text())).as_text()


def test_files_of_neighbouring_tables_differ_in_chance_and_noise_alone(members, tmp_path):
    study, made = members
    changed = table(600, seed=9).to_pydict()
    changed["age"][0], changed["ill"][0] = 18.0, 1 - changed["ill"][0]
    facts = []
    for name, records in (("one", table(600, seed=9)), ("other", changed)):
        (tmp_path / name).mkdir()
        ledger, whose = sender(tmp_path / name, "centre")
        made_of = study.aggregate(records, made, ledger, epsilon=1.0, **whose)
        facts.append(made_of.sealed.facts)
    chance = {"receipt", "created", "nonce", "tensors"}
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} <= chance
    assert facts[0].keys() - made[0].sealed.facts.keys() == {"members"}
    assert set(TABLES["A contribution of weights"]) == {"members"}
