"""A study can have models trained along axes: public ones, or each site's own for a charge."""

import json
import math

import numpy as np
import pyarrow.csv
import pytest

import consilience as cs
from consilience import Budget, Ledger
from consilience.cli.app import main
from consilience.errors import ContributionRejected, SettingsError
from consilience.files.certificate import of_contribution
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.hub.operating import add_study
from consilience.learners.axes import PublicAxes, read_projection
from consilience.learners.projection import mean_square
from consilience.privacy.accounting import events_to_json, total
from consilience.simulation.division import Division
from consilience.simulation.simulate import Runs
from consilience.site.site import Site
from consilience.study.axes import axes_of_release
from consilience.study.check import StudyRefused, check_release
from consilience.study.collect import Publication, read_records, read_submitted
from consilience.study.pages import of_study, of_training
from consilience.study.records import file_digest
from consilience.study.study import Study, check
from consilience.study.toml import write_projection
from forgery import Forge
from studies import records_parts, study_text, table
from wards import ROWS, Wards

KEY = SigningKey.generate()
PRIVATE = '[projection]\nkind = "private"\nn_components = 3\nshare = 0.25\n'
DELTA = "delta = 1e-6"


def public_part(folder, n_components=3):
    """Return the parts of a study that name public records in a folder, and their axes."""
    parts = records_parts(folder)
    records = Study.from_text(study_text()).schema.encode(folder / "public.csv")
    source = file_digest(folder / "public.csv")
    axes = PublicAxes.among(cs.Public(records.X), n_components, source)
    return parts + write_projection(axes)


def moments(folder):
    """Return a study of moments, its sites' files and its release."""
    head = study_text(privacy=DELTA).replace("heart-risk", "before")
    text = head[: head.index("[learner]")] + '[statistic]\nname = "Moments"\n'
    study = Study.from_text(text)
    files = [trained(study, folder, f"before-{i}", seed=i) for i in range(2)]
    return text, files, study.combine(files, publication=Publication(KEY))


def moment_part(folder, n_components=3):
    """Return the part of a study that names axes of moments that were released before."""
    text, files, release = moments(folder)
    found = axes_of_release(Study.from_text(text), release, files, n_components)
    return write_projection(found)


def study_with(kind, folder, **parts):
    """Return the text of the usual study with a projection."""
    parts_of = {"private": lambda _: PRIVATE, "public": public_part, "moments": moment_part}
    more = parts_of[kind](folder)
    return study_text(**{"privacy": DELTA, **parts}) + more


def trained(study, folder, number=0, epsilon=1.0, seed=None, **changes):
    ledger = Ledger(folder / f"{number}.sqlite")
    ledger.allow("ward", Budget(epsilon=3.0, delta=1e-5))
    own = SigningKey.generate()
    whose = {"site": f"site {number}", "signing": own, "dataset": "ward", **changes}
    return study.train(
        table(400, seed=number if seed is None else seed), ledger, epsilon=epsilon, **whose
    )


def released(study, files, folder):
    public, test = read_records(study, folder)
    return study.combine(files, public, test, publication=Publication(KEY))


def run(*arguments):
    with pytest.raises(SystemExit) as leaving:
        main([*map(str, arguments)])
    return leaving.value.code or 0


def reload(contribution):
    return Contribution.load(contribution.sealed.to_bytes())


KINDS = pytest.mark.parametrize("kind", ["public", "private", "moments"])


@KINDS
def test_a_projection_is_part_of_a_studys_facts(kind, tmp_path):
    study = Study.from_text(study_with(kind, tmp_path))
    assert Study.from_dict(study.to_dict()) == study
    assert study.projection == read_projection(json.loads(json.dumps(study.projection.as_dict())))
    plain = Study.from_text(study_text(privacy=DELTA))
    assert "projection" not in plain.to_dict()
    assert study.digest != plain.digest
    said = " ".join(of_study(study).as_text().split())
    assert "3 principal axes" in said
    assert ("0.25 of its epsilon" if kind == "private" else "they cost nothing") in said
    assert ("by the word of the study's authors" in said) is (kind == "moments")


@KINDS
@pytest.mark.parametrize("privacy", [DELTA, ""])
@pytest.mark.parametrize("aggregator", ["Average", "WeightedVote"])
def test_a_study_with_axes_goes_from_text_to_a_release(kind, privacy, aggregator, tmp_path):
    text = study_with(kind, tmp_path, privacy=privacy, aggregator=aggregator)
    study = Study.from_text(text)
    files = [reload(trained(study, tmp_path, i)) for i in range(3)]
    for file in files:
        study.accept(file)
        learner = file.learner
        assert learner.coef_.shape == (1, 4)
        assert file.guarantee.epsilon == pytest.approx(1.0)
        stated = file.sealed.facts["projection"]
        assert stated["kind"] == kind
        assert stated["n_components"] == 3
        assert ("trained along" in of_contribution(file).as_text()) is True
    release = released(study, files, tmp_path)
    check_release(study, release)
    X = study.schema.encode(table(300, seed=9)).X
    assert (release.ensemble.predict(X) == table(300, seed=9)["ill"].to_numpy()).mean() > 0.6


@KINDS
def test_members_with_axes_of_their_own_are_comparable_in_the_schemas_columns(kind, tmp_path):
    study = Study.from_text(study_with(kind, tmp_path))
    members = [trained(study, tmp_path, i).learner for i in range(2)]
    within = [study.projection.span(one.coef_) for one in members]
    assert all(within)
    release = released(study, [trained(study, tmp_path, i) for i in (2, 3)], tmp_path)
    assert release.ensemble.coef.shape == (1, 4)


@pytest.mark.parametrize("learner", ["PrivateLinearSVC", "PrivateRidge", "three classes"])
@KINDS
def test_every_linear_learner_trains_along_axes(learner, kind, tmp_path):
    text = study_with(kind, tmp_path, learner="PrivateLogisticRegression")
    if learner == "PrivateRidge":
        text = text.replace("classes = [0, 1]", "label_bound = 2.0")
    if learner == "three classes":
        text = text.replace("classes = [0, 1]", "classes = [0, 1, 2]")
    else:
        text = text.replace("PrivateLogisticRegression", learner)
    study = Study.from_text(text)
    file = study.accept(reload(trained(study, tmp_path)))
    assert file.guarantee.epsilon == pytest.approx(1.0)
    assert file.guarantee.delta <= 1e-6


def test_the_pages_state_what_axes_cost_before_anybody_is_charged(tmp_path):
    balance = Ledger(tmp_path / "books.sqlite").allow("ward", Budget(epsilon=3.0, delta=1e-5))
    facts = {"site": "north", "epsilon": 1.0, "balance": balance, "number": 1, "head": "0" * 64}
    (tmp_path / "files").mkdir()
    pages = {
        kind: of_training(Study.from_text(study_with(kind, tmp_path / "files")), **facts).as_text()
        for kind in ("public", "private")
    }
    assert "they stay at the site" in pages["private"]
    assert "of this, for the axes epsilon = 0.25, delta = 2.5e-07" in " ".join(
        pages["private"].split()
    )
    assert "of this, for the axes" not in pages["public"]
    for page in pages.values():
        assert "how many axes the model was trained along" in " ".join(page.split())
    # A ledger that counts by another relation charges more, also for the axes.
    text = study_with("private", tmp_path / "files").replace("replace-one", "add-remove")
    hidden = Study.from_text(text.replace("[learner]", "[learner]\npublic_size = 400"))
    said = " ".join(of_training(hidden, **facts).as_text().split())
    assert "this training epsilon = 2, delta" in said
    assert "of this, for the axes epsilon = 0.5, delta = 5.71007e-07 of what is charged" in said
    study = Study.from_text(study_with("private", tmp_path / "files"))
    shown = " ".join(of_contribution(trained(study, tmp_path)).as_text().split())
    assert "cost of the axes epsilon = 0.25" in shown


@KINDS
@pytest.mark.parametrize("privacy", [DELTA, ""])
def test_what_a_study_plans_is_what_a_training_is_charged(kind, privacy, tmp_path):
    study = Study.from_text(study_with(kind, tmp_path, privacy=privacy))
    file = trained(study, tmp_path)
    learner = study.build(1.0)
    learner.n_features_in_ = study.schema.n_features
    assert events_to_json(learner.planned(400)) == file.sealed.facts["events"]
    charged = file.sealed.facts["receipt"]["epsilon"]
    assert charged == pytest.approx(total(file.events).epsilon)
    names = [type(event).__name__ for event in file.events]
    assert len(names) == 2 + (2 if kind == "private" else 0)
    assert math.isclose(file.guarantee.epsilon, 1.0, rel_tol=1e-6)


# ----------------------------------------------------------------------------------------- refused


AXES = {"kind": "public", "n_components": 1, "source": "a" * 64, "axes": [[1000000, 0, 0, 0]]}
WRONG = [
    ({"kind": "oracle"}, "kind must be one of public, private, moments"),
    ({"kind": ["private"]}, "kind must be one of"),
    ({"kind": "private", "n_components": 2}, "lacks some"),
    ({"kind": "private", "n_components": 2, "share": 1.0}, "below 1"),
    ({"kind": "private", "n_components": 2, "share": "half"}, "below 1"),
    ({"kind": "private", "n_components": 0, "share": 0.5}, "above 0"),
    ({"kind": "private", "n_components": 5, "share": 0.5}, "more than the 4 columns"),
    ({"kind": "private", "n_components": 2, "share": 0.5, "axes": []}, "other settings"),
    (AXES, "source is not the sha256"),
    ({**AXES, "source": "x"}, "SHA-256"),
    ({**AXES, "axes": "b" * 64}, "source is not the sha256|states the axes themselves"),
    ({**AXES, "axes": [[1000000, 0, 0, 0]] * 2}, "1 rows"),
    ({**AXES, "n_components": 2, "axes": [[999999, 0, 0, 0]] * 2}, "orthogonal"),
    ({**AXES, "axes": [[1048576, 0, 0, 0]]}, "shorter than 1"),
    ({**AXES, "axes": [[1.5, 0, 0, 0]]}, "whole numbers"),
    ({**AXES, "axes": 7}, "whole numbers"),
    ({**AXES, "axes": [[]]}, "whole numbers"),
]


@pytest.mark.parametrize(("facts", "problem"), WRONG)
def test_a_projection_that_cannot_work_is_refused_with_the_study(facts, problem):
    part = "\n".join(f"{name} = {json.dumps(value)}" for name, value in facts.items())
    with pytest.raises(StudyRefused, match=problem):
        Study.from_text(study_text(privacy=DELTA) + f"[projection]\n{part}\n")


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"learner": "PrivateForestClassifier"}, "is for linear learners"),
        ({"learner": "Moments", "aggregator": "Total"}, "is for linear learners"),
        ({"privacy": 'hub = "trusted"', "more": "epsilon = 1.0"}, 'is not for hub = "trusted"'),
    ],
)
def test_combinations_that_nobody_could_check_are_refused_with_the_study(parts, problem):
    with pytest.raises(StudyRefused, match=problem):
        Study.from_text(study_text(**{"privacy": DELTA, **parts}) + PRIVATE)


def test_axes_that_are_not_those_of_the_public_records_are_refused(tmp_path, tmp_path_factory):
    good = public_part(tmp_path)
    (tmp_path / "study.toml").write_text(study_text() + good)
    assert check(tmp_path / "study.toml") == []
    study = Study.load(tmp_path / "study.toml")
    other = PublicAxes.of(np.eye(4)[1:], study.public.sha256).as_dict()["axes"]
    parts = {**study.to_dict(), "projection": {**study.projection.as_dict(), "axes": other}}
    forged = Study.from_dict(parts)
    text = (tmp_path / "study.toml").read_text()
    text = text[: text.index("[projection]")] + write_projection(forged.projection)
    (tmp_path / "study.toml").write_text(text)
    (problem,) = check(tmp_path / "study.toml")
    assert "not the principal axes of the public records" in problem
    with pytest.raises(StudyRefused, match="not the principal axes"):
        add_study(tmp_path / "hub", tmp_path / "study.toml")
    place = tmp_path_factory.mktemp("north")
    site = Site.init(place, name="North", dataset="ward", budget=Budget(epsilon=2.0))
    with pytest.raises(SettingsError, match="was not joined"):
        site.join_folder(tmp_path)
    assert site.studies == []


def forged(study, foreign, folder, number=0, **changes):
    """Train by another study in the name of this one."""
    object.__setattr__(foreign, "_whole", study)
    return trained(foreign, folder, number, **changes)


def test_a_model_along_other_axes_or_along_none_is_refused(tmp_path):
    study = Study.from_text(study_with("public", tmp_path))
    facts = study.to_dict()
    turned = PublicAxes.of(np.eye(4)[1:], study.public.sha256).as_dict()["axes"]
    foreign = {
        "other axes": {**facts, "projection": {**facts["projection"], "axes": turned}},
        "or along none": {name: one for name, one in facts.items() if name != "projection"},
        "its own": {**facts, "projection": {"kind": "private", "n_components": 3, "share": 0.5}},
    }
    for number, parts in enumerate(foreign.values()):
        with pytest.raises(ContributionRejected, match="along other axes"):
            study.accept(reload(forged(study, Study.from_dict(parts), tmp_path, number)))
    honest = trained(study, tmp_path, 7)
    forge = Forge(honest.sealed, KEY)
    forge.tensors["coef"] = forge.tensors["coef"] + np.array([[0.0, 1e-3, -1e-3, 0.0]])
    lie = Contribution.load(forge.to_bytes())
    with pytest.raises(ContributionRejected, match="do not lie along"):
        study.accept(lie)


def test_axes_that_were_charged_less_or_not_at_all_are_refused(tmp_path):
    study = Study.from_text(study_with("private", tmp_path))
    honest = trained(study, tmp_path)

    def lie(change):
        forge = Forge(honest.sealed, KEY)
        change(forge.facts)
        with pytest.raises(ContributionRejected):
            study.accept(Contribution.load(forge.to_bytes()))

    def drop_events(facts):
        events = json.loads(facts["events"])
        facts["events"] = json.dumps(events[2:], sort_keys=True, separators=(",", ":"))

    def narrow_noise(facts):
        events = json.loads(facts["events"])
        events[0]["sigma"] /= 2
        facts["events"] = json.dumps(events, sort_keys=True, separators=(",", ":"))

    lie(drop_events)
    lie(narrow_noise)
    lie(lambda facts: facts["projection"].update(share=0.1))
    lie(lambda facts: facts["projection"].update(n_components=2))
    lie(lambda facts: facts["projection"].update(kind="oracle"))
    lie(lambda facts: facts["projection"].update(more=1))
    lie(lambda facts: facts.update(projection=7))
    lie(lambda facts: facts.pop("projection"))
    cheaper = Study.from_text(
        study_with("private", tmp_path).replace("share = 0.25", "share = 0.05")
    )
    with pytest.raises(ContributionRejected, match="along other axes"):
        study.accept(reload(forged(study, cheaper, tmp_path, 1)))


# ------------------------------------------------------------------------------------- all the way


@KINDS
def test_sites_of_a_shared_folder_train_along_axes(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(study_with(kind, shared))
    for i, name in enumerate(("north", "south")):
        pyarrow.csv.write_csv(table(400, seed=i), f"{name}.csv")
        budget = Budget(epsilon=2.0, delta=1e-5)
        Site.init(tmp_path / name, name=name, dataset="ward", budget=budget).join_folder(shared)
        train = ["site", "train", "heart-risk", f"{name}.csv", "--epsilon", "1", "--folder", name]
        assert run(*train, "--dry-run") == 0
        shown = capsys.readouterr().out
        said = " ".join(shown.split())
        assert ("of this, for the axes epsilon = 0.25" in said) == (kind == "private")
        assert run(*train, "--approved", shown.split("--approved ")[1].split()[0]) == 0
        assert run("site", "submit", "heart-risk", "--folder", name) == 0
    study = Study.load(shared / "study.toml")
    files = [one.newest for one in read_submitted(study, shared).values()]
    assert len(files) == 2
    check_release(study, released(study, files, shared))


@KINDS
def test_a_study_with_axes_is_simulated_and_planned_as_it_would_run(kind, tmp_path):
    (tmp_path / "study.toml").write_text(study_with(kind, tmp_path))
    report = cs.simulate(
        tmp_path / "study.toml",
        table(1200, seed=3),
        division=Division(sites=3, test=0.25),
        runs=Runs(repeats=1, seed=1),
        epsilon=[1.0],
    )
    errors = {row.method: row.value for row in report.rows if row.metric == "error"}
    assert errors["Average"] < 0.45
    assert "is trained along 3 principal axes" in str(report)
    if kind == "private":
        records = Study.from_text(study_text()).schema.encode(table(200, seed=98))
        public = cs.Public(records.X, records.y)
        advice = cs.plan(tmp_path / "study.toml", n_records=400, n_sites=3, public=public)
        assert "0.25 of its epsilon and delta" in str(advice)
    elif kind == "public":
        advice = cs.plan(tmp_path / "study.toml", n_records=400, n_sites=3)
        assert "they cost nothing" in str(advice)


def test_a_command_writes_the_axes_of_moments_that_were_released(tmp_path, capsys):
    text, files, release = moments(tmp_path)
    (tmp_path / "before.toml").write_text(text)
    release.save(tmp_path / "release")
    command = ["study", "axes", tmp_path / "before.toml", "--components", "3"]
    command += ["--release", tmp_path / "release"]
    for i, file in enumerate(files):
        assert run(*command) == 1  # not all files are named
        file.save(tmp_path / f"file-{i}")
        command += ["--contribution", tmp_path / f"file-{i}"]
    capsys.readouterr()
    assert run(*command) == 0
    (tmp_path / "study.toml").write_text(study_text() + capsys.readouterr().out)
    projection = Study.load(tmp_path / "study.toml").projection
    assert (projection.kind, projection.source) == ("moments", release.digest)
    with pytest.raises(SettingsError, match="none of study"):
        axes_of_release(Study.from_text(study_text()), release, files, 3)


def test_the_total_that_a_blind_hub_opened_has_axes_too(tmp_path):
    wards = Wards(tmp_path, n=3)
    release = wards.release([wards.mask(i) for i in range(3)])
    found = axes_of_release(wards.study, release, [], 2)
    rows = np.vstack([wards.study.schema.encode(table(ROWS, seed=i)).X for i in range(3)])
    best, kept = (
        mean_square(rows, one)
        for one in (cs.PublicPCA(2).fit(rows).components_, found.known.directions)
    )
    assert kept > 0.9 * best
    assert found.source == release.digest


def test_the_axes_of_exact_moments_are_the_principal_axes():
    rows = Study.from_text(study_text()).schema.encode(table(400))
    exact = cs.Moments(epsilon=math.inf, classes=[0, 1]).fit(rows.X, rows.y)
    found = exact.principal_axes(exact.summed(), 3)
    known = cs.PublicPCA(3).fit(rows.X)
    assert np.abs(found.components_ @ known.components_.T) == pytest.approx(np.eye(3), abs=1e-3)
    noisy = cs.PublicPCA.of_moment(np.diag([3.0, -1.0, 1.0]), 3)
    assert noisy.explained_ratio_[-1] == 0


def test_a_command_writes_the_axes_of_public_records(tmp_path, capsys):
    parts = records_parts(tmp_path)
    path = tmp_path / "study.toml"
    path.write_text(study_text() + parts)
    assert run("study", "axes", path, "--components", "2") == 0
    path.write_text(path.read_text() + capsys.readouterr().out)
    assert check(path) == []
    assert Study.load(path).projection.kind == "public"
    path.write_text(study_text())
    assert run("study", "axes", path, "--components", "2") == 1
