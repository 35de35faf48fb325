"""Several levels: releases of branch studies are members of a parent that names their hubs."""

import json

import numpy as np
import pyarrow.csv
import pytest

from consilience import Budget, Ledger
from consilience.cli.app import main
from consilience.errors import ContributionRejected, SettingsError
from consilience.files.certificate import of_release
from consilience.files.log import ReleaseLog
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.site.site import Site
from consilience.study.branches import BranchFile, accept_branch, find_repeated, leaves_of
from consilience.study.check import StudyRefused, check_release
from consilience.study.collect import Publication
from consilience.study.study import Study
from forgery import Forge
from studies import TRUSTED, study_text, table

HUBS = {"north": SigningKey.generate(), "south": SigningKey.generate()}
PARENT = SigningKey.generate()


def branch_study(name):
    return Study.from_text(study_text().replace("heart-risk", f"heart-{name}"))


def parent_text(names=("north", "south"), more='weights = "size"', hubs=HUBS):
    parts = "".join(
        f'[branches."{name}"]\nstudy = "{branch_study(name).digest}"\nkey = "{hubs[name].public}"\n'
        for name in names
    )
    return study_text(more=more) + parts


@pytest.fixture(scope="module")
def keys():
    return {f"{name} {i}": SigningKey.generate() for name in (*HUBS, "own") for i in range(2)}


def contributions(study, folder, name, keys, epsilon=1.0, seed=0):
    made = []
    for i in range(2):
        ledger = Ledger(folder / f"{name} {i} {study.name}.sqlite")
        ledger.allow("ward", Budget(epsilon=3.0))
        site = f"{name} {i}"
        whose = {"site": site, "signing": keys[site], "dataset": "ward"}
        made.append(study.train(table(400, seed=seed + i), ledger, epsilon=epsilon, **whose))
    return made


@pytest.fixture
def releases(tmp_path, keys):
    """A release of each branch, at different epsilons."""
    made = {}
    for seed, (name, key) in enumerate(HUBS.items()):
        study = branch_study(name)
        parts = contributions(study, tmp_path, name, keys, 0.5 + seed, seed=10 * seed)
        made[name] = study.combine(parts, publication=Publication(key))
    return made


def branches(study, releases):
    return [accept_branch(study, name, release) for name, release in releases.items()]


def test_releases_of_branches_become_one_that_carries_what_they_promise(releases, tmp_path, keys):
    parent = Study.from_text(parent_text())
    assert Study.from_dict(parent.to_dict()) == parent
    own = contributions(parent, tmp_path, "own", keys, 2.0, seed=40)
    whole = parent.combine([*own, *branches(parent, releases)], publication=Publication(PARENT))
    whole.save(tmp_path / "release")
    again = check_release(parent, Release.load(tmp_path / "release", key=PARENT.public))
    assert [one.site for one in again.sources] == ["own 0", "own 1", "north", "south"]
    promised = {leaf.site: leaf.guarantee.epsilon for leaf in leaves_of(again.sources)}
    expected = [2.0, 2.0, 0.5, 0.5, 1.5, 1.5]
    assert list(promised.values()) == pytest.approx(expected)
    assert again.guarantee.epsilon == pytest.approx(2.0)
    assert {leaf.key for leaf in leaves_of(again.sources)} == {key.public for key in keys.values()}
    sizes = np.array([400, 400, 800, 800])
    np.testing.assert_allclose(again.ensemble.weights, sizes / sizes.sum())
    expected = np.average([m.ensemble.coef for m in releases.values()], axis=0)
    alone = parent.combine(branches(parent, releases), publication=Publication(PARENT))
    np.testing.assert_allclose(alone.ensemble.coef, expected)
    assert "north" in of_release(again).as_text()


def test_a_parent_is_a_branch_of_another_one(releases):
    parent = Study.from_text(parent_text())
    whole = parent.combine(branches(parent, releases), publication=Publication(PARENT))
    rule = f'[branches.all]\nstudy = "{parent.digest}"\nkey = "{PARENT.public}"\n'
    text = study_text(more='weights = "size"', privacy="min_sites = 1") + rule
    top = Study.from_text(text.replace("heart-risk", "top"))
    made = top.combine([accept_branch(top, "all", whole)], publication=Publication(PARENT))
    found = check_release(top, Release.load(made.sealed.to_bytes()))
    assert [leaf.site for leaf in leaves_of(found.sources)] == [
        "north 0", "north 1", "south 0", "south 1",
    ]  # fmt: skip
    assert found.guarantee.epsilon == pytest.approx(1.5)


def test_a_site_in_two_branches_is_refused_by_its_key_and_by_its_name(releases, tmp_path, keys):
    parent = Study.from_text(parent_text())
    twice = {**keys, "south 0": keys["north 1"]}
    study = branch_study("south")
    (tmp_path / "again").mkdir()
    same = study.combine(
        contributions(study, tmp_path / "again", "south", twice),
        publication=Publication(HUBS["south"]),
    )
    with pytest.raises(SettingsError, match="in two branches"):
        parent.combine(
            branches(parent, {**releases, "south": same}), publication=Publication(PARENT)
        )
    sources = [one.as_source() for one in branches(parent, releases)]
    assert find_repeated(sources) is None
    assert find_repeated([*sources, sources[0]]) == "north 0"
    assert find_repeated([*sources, leaves_of(sources)[3]]) == "south 1"


def test_releases_of_others_are_refused(releases):
    parent = Study.from_text(parent_text())
    for name, release, problem in (
        ("south", releases["north"], "another study"),
        ("west", releases["north"], "no such branch"),
    ):
        with pytest.raises(ContributionRejected, match=problem):
            accept_branch(parent, name, release)
    stolen = Forge(releases["north"].sealed, SigningKey.generate()).to_bytes()
    with pytest.raises(ContributionRejected, match="another key"):
        accept_branch(parent, "north", Release.load(stolen))


def test_forged_sources_of_a_parents_release_are_refused(releases):
    parent = Study.from_text(parent_text())
    made = parent.combine(branches(parent, releases), publication=Publication(PARENT))

    def refused(change):
        forge = Forge(made.sealed, PARENT)
        change(forge.facts["sources"])
        try:
            check_release(parent, Release.load(forge.to_bytes()))
        except ContributionRejected:
            return True
        return False

    lies = {
        "nothing": lambda rows: None,
        "a site left out below": lambda rows: rows[1]["below"].clear(),
        "no branch": lambda rows: rows[0].pop("below"),
        "less below": lambda rows: [b["guarantee"].update(epsilon=0.1) for b in rows[1]["below"]],
        "less above": lambda rows: rows[1]["guarantee"].update(epsilon=0.1),
        "another delta below": lambda rows: rows[1]["below"][0]["guarantee"].update(delta=1e-3),
        "another unit below": lambda rows: rows[1]["below"][0]["guarantee"].update(unit="person"),
        "nothing promised below": lambda rows: rows[1]["below"][0]["guarantee"].update(
            void_reason="none"
        ),
        "a key twice": lambda rows: rows[0]["below"][0].update(key=rows[1]["below"][0]["key"]),
        "a name twice": lambda rows: rows[0]["below"][0].update(site="South 1"),
        "prose": lambda rows: rows[0]["below"][0].update(site="call me: now!"),
        "more prose": lambda rows: rows[0]["below"][0].update(words="x"),
        "a key of words": lambda rows: rows[0]["below"][0].update(key="x"),
    }
    assert [name for name, lie in lies.items() if not refused(lie)] == ["nothing"]


def test_a_site_below_a_branch_is_told_that_a_parents_release_has_seen_its_records(
    releases, tmp_path, keys
):
    """It fetches that release as a site of the parent study to which it handed over nothing."""
    site = Site.init(tmp_path / "ward", name="a ward", dataset="ward", budget=Budget(epsilon=3.0))
    (tmp_path / "own").mkdir()
    known = {**keys, "north 0": site.key}
    parts = contributions(branch_study("north"), tmp_path / "own", "north", known)
    mine = branch_study("north").combine(parts, publication=Publication(HUBS["north"]))
    parent, shared = Study.from_text(parent_text()), tmp_path / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(parent_text())
    parts = branches(parent, {**releases, "north": mine})
    made = parent.combine(parts, publication=Publication(PARENT, log=ReleaseLog()))
    made.save(shared / made.filename)
    site.join_folder(shared, fetch_only=True)
    fetched = site.fetch(parent.name)
    assert "below its branch 'north'" in site.describe_own_part(parent.name, fetched)
    page = " ".join(site.adapt(parent.name, table(400, seed=0)).page.as_text().split())
    assert "a branch of it was made with what this site handed over" in page
    assert "nothing of this site" not in page


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (parent_text(more=""), "cannot weigh a branch"),
        (parent_text().replace("key =", "lock ="), "each part of .branches."),
        (parent_text().replace(HUBS["north"].public, "x"), "each part of .branches."),
        (parent_text(more="epsilon = 1.0").replace("[privacy]", f"[privacy]\n{TRUSTED}"), "untrus"),
    ],
)
def test_a_parent_study_that_cannot_work_is_refused(text, problem):
    with pytest.raises(StudyRefused, match=problem):
        Study.from_text(text)


def test_branches_hand_over_through_a_folder(releases, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, fails=False):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        assert bool(leaving.value.code) == fails, printed.err
        return printed.err if fails else printed.out

    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "parent.toml").write_text(parent_text())
    for name, release in releases.items():
        release.save(tmp_path / f"{name}.safetensors")
        asked = ("release", "hand-over", f"{name}.safetensors", "shared/parent.toml", name)
        assert "branch-" in run(*asked, "shared")
    said = " ".join(run("release", "hand-over", "north.safetensors", "shared/parent.toml",
                        "south", "shared", fails=True).split())  # fmt: skip
    assert "another study" in said
    made = json.loads(run("release", "make", "shared", "--key", "parent.pem", "--json"))
    assert made["branches"] == ["north", "south"]
    pyarrow.csv.write_csv(table(50, seed=3), tmp_path / "new.csv")
    run("release", "predict", made["file"], "shared/parent.toml", "new.csv")
    assert isinstance(branches(Study.from_text(parent_text()), releases)[0], BranchFile)
