"""A study can name candidates for settings; each site chooses one, for one charge."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

import consilience as cs
import consilience.learners.tuned
from consilience import Budget, Ledger, Noise
from consilience.auditing.audit import audit
from consilience.cli.app import main
from consilience.errors import ContributionRejected, GuaranteeVoid, SettingsError
from consilience.files.certificate import of_contribution
from consilience.files.contribution import Contribution
from consilience.files.sealed import SigningKey
from consilience.learners.axes import PublicAxes
from consilience.learners.tuning import DISJOINT, PrivateTuning
from consilience.privacy.accounting import events_to_json
from consilience.simulation.division import Division
from consilience.simulation.simulate import Runs
from consilience.site.site import Site
from consilience.study.check import StudyRefused, check_release
from consilience.study.collect import Publication, read_records, read_submitted
from consilience.study.pages import of_study, of_training
from consilience.study.study import Study
from consilience.study.toml import write_projection
from forgery import Forge
from studies import TRUSTED, records_parts, study_text, table

KEY = SigningKey.generate()
TUNING = "[tuning]\nregularization = [0.0001, 0.01, 1.0]\n"
DEPTHS = "[tuning]\nmax_depth = [1, 2]\n"
DELTA = "delta = 1e-6"
PERSONS = 'label = "ill"\nperson = "who"\nmax_records_per_person = 2'
TODAY = "[study]\nversion = 2"


def text(name="logistic"):
    """Return the text of a study with candidates."""
    plain = study_text().replace("[study]", TODAY)
    approximate = study_text(privacy=DELTA).replace("[study]", TODAY)
    return {
        "logistic": study_text() + TUNING,
        "noisy gradients": approximate + '[tuning]\nregularization = ["auto", 0.1]\n',
        "three classes": approximate.replace("[0, 1]", "[0, 1, 2]")
        + "[tuning]\nintercept_scaling = [0.3, 1.0]\nregularization = [0.01, 0.1]\n",
        "add-remove": plain.replace("replace-one", "add-remove").replace(
            'name = "PrivateL', 'public_size = 400\nname = "PrivateL'
        )
        + TUNING,
        "persons": approximate.replace('label = "ill"', PERSONS)
        + '[tuning]\nmechanism = ["gradient", "objective"]\n',
        "votes": study_text("PrivateLinearSVC", "WeightedVote") + TUNING,
        "forest": study_text("PrivateForestClassifier", "WeightedVote", settings="n_trees = 2")
        + DEPTHS,
    }[name]


def rows(study, n, seed):
    made = table(n, seed=seed)
    if study.schema.person is None:
        return made
    return made.append_column("who", pa.array([f"p{i // 2}" for i in range(n)]))


def books(study, folder, number=0):
    ledger = Ledger(folder / f"{number}.sqlite")
    if not ledger.datasets():
        limit = Budget(epsilon=3.0, delta=1e-5, neighbours=study.neighbours, unit=study.unit)
        ledger.allow("ward", limit)
    return ledger


def trained(study, folder, number=0, **changes):
    whose = {"site": f"site {number}", "signing": KEY, "dataset": "ward", "epsilon": 1.0, **changes}
    made = rows(study, 400, number)
    return reload(study.train(made, books(study, folder, number), **whose))


def reload(contribution):
    return Contribution.load(contribution.sealed.to_bytes())


def run(*arguments):
    with pytest.raises(SystemExit) as leaving:
        main([*map(str, arguments)])
    return leaving.value.code or 0


def words(page):
    return " ".join(page.as_text().split())


def test_candidates_are_part_of_a_studys_facts():
    study = Study.from_text(text())
    assert Study.from_dict(study.to_dict()) == study
    assert study.to_dict()["tuning"] == {"regularization": [0.0001, 0.01, 1.0]}
    plain = Study.from_text(study_text())
    assert "tuning" not in plain.to_dict()
    assert study.digest != plain.digest
    assert "regularization = 0.0001 or 0.01 or 1.0" in words(of_study(study))


ALL = ("logistic", "noisy gradients", "three classes", "add-remove", "persons", "votes", "forest")


@pytest.mark.parametrize("name", ALL)
def test_a_study_with_candidates_goes_from_text_to_a_release(name, tmp_path):
    study = Study.from_text(text(name))
    files = [study.accept(trained(study, tmp_path, i)) for i in range(2)]
    for i, file in enumerate(files):
        facts, (charge,) = file.sealed.facts, books(study, tmp_path, i).charges()
        assert charge.epsilon == pytest.approx(1.0)
        assert file.guarantee.epsilon == pytest.approx(1.0, rel=1e-6)
        assert set(file.guarantee.assumptions) == {DISJOINT}
        assert facts["tuning"]["candidates"] == study.to_dict()["tuning"]
        chosen = {one: facts["settings"][one] for one in study.tuning.values}
        assert chosen in study.tuning.candidates
        assert file.learner.tuning.candidates[file.learner.best_index_] == chosen
        if study.learner != "PrivateForestClassifier":
            units = 200 if name == "persons" else 400
            assert facts["size"] == units // study.tuning.n_parts
    release = study.combine(files, publication=Publication(KEY))
    check_release(study, cs.Release.load(release.sealed.to_bytes()))
    said = release.ensemble.predict(study.schema.encode(rows(study, 300, 9)).X)
    assert set(said) <= set(study.schema.classes)


@pytest.mark.parametrize("name", ["logistic", "noisy gradients", "add-remove", "persons", "forest"])
def test_what_a_study_plans_is_what_a_site_is_charged(name, tmp_path):
    study = Study.from_text(text(name))
    file = trained(study, tmp_path)
    learner = study.build(1.0)
    learner.n_features_in_, learner.classes_ = study.schema.n_features, np.array([0, 1])
    planned = learner.planned(200 if name == "persons" else 400)
    assert events_to_json(planned) == file.sealed.facts["events"]
    # What is known of the model's own noise is that of the candidate that was chosen.
    alone = file.learner.without_tuning()
    assert file.learner.model_events() == tuple(alone.planned(file.learner.public_size_))


def test_a_retry_returns_the_first_choice_and_charges_nothing(tmp_path):
    study = Study.from_text(text("noisy gradients"))
    first, again = (trained(study, tmp_path, key="k") for _ in range(2))
    assert len(books(study, tmp_path).charges()) == 1
    same = ("settings", "size", "events", "chosen", "tuning", "receipt")
    assert [first.sealed.facts[name] for name in same] == [
        again.sealed.facts[name] for name in same
    ]
    assert np.array_equal(first.learner.coef_, again.learner.coef_)
    assert first.learner.model_events() == again.learner.model_events()


def test_the_pages_state_what_the_choice_costs_and_what_of_it_leaves(tmp_path):
    study = Study.from_text(text())
    balance = books(study, tmp_path).balance("ward")
    facts = {"site": "north", "epsilon": 1.0, "balance": balance, "number": 1, "head": "0" * 64}
    page = words(of_training(study, **facts))
    assert "the candidates that the study names" in page
    assert "| chosen at the site regularization = 0.0001 or 0.01 or 1.0" in page
    assert "this training epsilon = 1 the choice costs nothing beside the training" in page
    assert "which candidate was chosen, with noise" in page
    assert "no number of wrong answers" in page
    shown = words(of_contribution(trained(study, tmp_path)))
    assert "| chosen among regularization = 0.0001 or 0.01 or 1.0 | chosen regularization" in shown
    assert "cost of the choice nothing beside the training" in shown
    assert "size 100: the exact number of records, of one of 4 parts" in shown


def test_odds_of_a_model_that_was_chosen_have_no_intervals(tmp_path):
    study = Study.from_text(study_text(settings='mechanism = "output"') + TUNING)
    found = cs.odds_ratios(trained(study, tmp_path), study.schema)
    assert "chosen among candidates" in found.note
    assert all(row.low is None for row in found.rows)


def test_models_along_axes_that_all_know_have_candidates_too(tmp_path):
    parts = records_parts(tmp_path)
    plain = Study.from_text(study_text() + parts)
    public = cs.Public(plain.schema.encode(tmp_path / "public.csv").X)
    axes = write_projection(PublicAxes.among(public, 2, plain.public.sha256))
    study = Study.from_text(study_text() + parts + axes + TUNING)
    file = study.accept(trained(study, tmp_path))
    assert study.projection.span(file.learner.coef_)
    assert file.sealed.facts["projection"]["n_components"] == 2


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("parts", "tuning", "problem"),
    [
        ({}, "regularization = [0.1]", "2 to 10 combinations"),
        ({}, "regularization = []", "2 to 10 combinations"),
        ({}, "regularization = 0.1", "2 to 10 combinations"),
        ({}, "regularization = [0.1, 0.1]", "different numbers"),
        ({}, "regularization = [0.1, inf]", "different numbers"),
        ({}, "regularization = [[0.1], [0.2]]", "different numbers"),
        ({}, "regularization = [1, 2, 3, 4, 5, 6]\nintercept_scaling = [0.1, 1]", "2 to 10"),
        ({}, "epsilon = [0.5, 1.0]", "cannot choose 'epsilon'"),
        ({}, "public_size = [50, 100]", "cannot choose 'public_size'"),
        ({}, "data_norm = [0.5, 1.0]", "cannot choose 'data_norm'"),
        ({}, "tuning = [1, 2]", "cannot choose 'tuning'"),
        ({}, "depth = [1, 2]", "cannot choose 'depth'"),
        ({}, "regularization = [-1.0, 1.0]", "'regularization' parameter"),
        ({"settings": "regularization = 0.1"}, "regularization = [0.1, 1.0]", "both set"),
        ({"settings": "score_share = 0.1"}, "regularization = [0.1, 1.0]", "no score_share"),
        ({"privacy": DELTA}, 'mechanism = ["output", "generalized"]', "one 'mechanism'"),
        (
            {"learner": "PrivateAdaBoostClassifier", "aggregator": "WeightedVote"},
            "max_depth = [1, 2]",
            "limited number of records",
        ),
        (
            {"privacy": TRUSTED, "more": "epsilon = 1.0"},
            "regularization = [1, 2]",
            'not for hub = "t',
        ),
        (
            {"learner": "Moments", "aggregator": "Total", "privacy": DELTA},
            "n_bins = [1, 2]",
            "Moments is none",
        ),
    ],
)
def test_candidates_that_nobody_could_check_are_refused_with_the_study(parts, tuning, problem):
    with pytest.raises(StudyRefused, match=problem):
        Study.from_text(study_text(**parts) + f"[tuning]\n{tuning}\n")


def test_parts_of_a_study_that_cannot_go_with_candidates_are_refused():
    own = '[projection]\nkind = "private"\nn_components = 2\nshare = 0.5\n'
    with pytest.raises(StudyRefused, match="axes that all know"):
        Study.from_text(study_text(privacy=DELTA) + own + TUNING)
    kinds = "[alternatives.PrivateLinearSVC]\n"
    with pytest.raises(StudyRefused, match=r"drop \[alternatives\]"):
        Study.from_text(study_text(aggregator="WeightedVote") + kinds + TUNING)
    at = study_text(aggregator="FeatureMethod", more='at = "north"')
    with pytest.raises(StudyRefused, match="at, or leave it out"):
        Study.from_text(at + TUNING)
    blind = '[blind]\nshares = 2\nspare = 1\nkeyholders = ["' + "a" * 64 + '"]\n'
    with pytest.raises(StudyRefused):
        Study.from_text(study_text(privacy=DELTA + '\nhub = "blind"') + blind + TUNING)
    forest = study_text("PrivateForestClassifier", "WeightedVote", settings="n_trees = 2")
    persons = forest.replace("add-remove", "replace-one").replace('label = "ill"', PERSONS)
    with pytest.raises(StudyRefused, match="hidden number of persons"):
        Study.from_text(persons + DEPTHS)


def forged(study, foreign, folder, number):
    """Train by another study in the name of this one."""
    object.__setattr__(foreign, "_whole", study)
    return trained(foreign, folder, number)


def test_a_choice_among_other_candidates_or_among_none_is_refused(tmp_path):
    study, facts = Study.from_text(text()), Study.from_text(text()).to_dict()
    others = [[0.0001, 0.01], [0.01, 0.0001, 1.0], [0.0001, 0.01, 10.0]]
    foreign = [{**facts, "tuning": {"regularization": each}} for each in others]
    foreign.append({name: one for name, one in facts.items() if name != "tuning"})
    foreign[-1]["learner"] = {**facts["learner"], "regularization": 0.01}
    for number, parts in enumerate(foreign):
        with pytest.raises(ContributionRejected, match=r"among other candidates|other settings"):
            study.accept(forged(study, Study.from_dict(parts), tmp_path, number))
    plain = Study.from_text(study_text(settings="regularization = 0.01"))
    with pytest.raises(ContributionRejected, match=r"among other candidates|other settings"):
        plain.accept(forged(plain, study_of_one_value(), tmp_path, 9))


def study_of_one_value():
    """Return a study whose sites may well choose the setting that another one fixes."""
    return Study.from_text(study_text(settings="regularization = 0.01") + INTERCEPTS)


INTERCEPTS = "[tuning]\nintercept_scaling = [1.0, 1.001]\n"


def _events(change):
    def lie(facts):
        events = json.loads(facts["events"])
        facts["events"] = json.dumps(change(events), sort_keys=True, separators=(",", ":"))

    return lie


def _selection(change):
    def lie(facts):
        events = json.loads(facts["tuning"]["selection"])
        text = json.dumps(change(events), sort_keys=True, separators=(",", ":"))
        facts["tuning"] = {**facts["tuning"], "selection": text}

    return lie


def _scaled(factor):
    return lambda events: [{**events[0], "scale": events[0]["scale"] * factor}, *events[1:]]


def _tuning(**facts):
    return lambda stated: stated["tuning"].update(facts)


LIES = {
    "no event": _events(lambda events: []),
    "cheaper noise": _events(_scaled(0.5)),
    "one event less": _events(lambda events: events[:1]),
    "one event more": _events(lambda events: [*events, events[-1]]),
    "no choice": lambda facts: facts.pop("tuning"),
    "no noise of the choice": _selection(lambda events: []),
    "less noise of the choice": _selection(_scaled(0.5)),
    "more noise of the choice": _selection(_scaled(2.0)),
    "a choice of sums": _selection(lambda events: [{**events[0], "event": "Laplace"}]),
    "no candidate's setting": lambda facts: facts["settings"].update(regularization=0.5),
    "other candidates": _tuning(candidates={"regularization": [0.0001, 0.01, 2.0]}),
    "fewer candidates": _tuning(candidates={"regularization": [0.0001, 1.0]}),
    "candidates of epsilon": _tuning(candidates={"epsilon": [0.5, 1.0]}),
    "candidates of nothing": _tuning(candidates={"nothing": [0.5, 1.0]}),
    "no candidates": _tuning(candidates=7),
    "too many": _tuning(candidates={"regularization": list(range(1, 100))}),
    "more facts": _tuning(more=1),
    "no facts": lambda facts: facts.update(tuning=7),
    "no noise at all": _tuning(selection=7),
    "no assumption": lambda facts: facts["guarantee"].update(assumptions=["trust me"]),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    study = Study.from_text(text())
    return study, trained(study, tmp_path_factory.mktemp("honest"))


@pytest.mark.parametrize("name", LIES)
def test_files_that_lie_about_the_choice_are_refused(name, honest):
    study, file = honest
    forge = Forge(file.sealed, KEY)
    study.accept(Contribution.load(forge.to_bytes()))
    LIES[name](forge.facts)
    with pytest.raises((ContributionRejected, GuaranteeVoid)):
        study.accept(Contribution.load(forge.to_bytes()))


def test_a_size_that_no_part_can_have_is_refused(tmp_path):
    low = Study.from_text(study_text(privacy="max_size = 300") + TUNING)
    with pytest.raises(ContributionRejected, match="more records than the 75"):
        low.accept(trained(low, tmp_path))


def test_what_was_chosen_is_not_fitted_again_and_chunks_are_refused(tmp_path):
    study = Study.from_text(text())
    learner = trained(study, tmp_path).learner
    with pytest.raises(SettingsError, match="chosen among candidates already"):
        learner.fit(np.zeros((8, 4)), np.arange(8) % 2)
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(table(60), path)
    with pytest.raises(SettingsError, match="in chunks"):
        study.build(1.0).fit(cs.ParquetRows(path, study.schema))


def test_too_few_records_for_all_parts_are_refused_before_the_charge(tmp_path):
    study = Study.from_text(text())
    ledger = books(study, tmp_path)
    with pytest.raises(SettingsError, match="fewer candidates"):
        study.train(table(3), ledger, site="n", signing=KEY, dataset="ward", epsilon=1.0)
    assert ledger.charges() == []


# ------------------------------------------------------------------------------------------- audit


class ExactChoice(PrivateTuning):
    """A broken twin: it keeps the candidate with the fewest errors, and says that it drew."""

    def _train(self, task, plan, source):
        super()._train(task, replace(plan, selection=None), source)


class HalfTheNoise(PrivateTuning):
    """A broken twin: its choice has half the noise that its budget asks for."""

    def _plan(self, task):
        plan = super()._plan(task)
        return replace(plan, selection=replace(plan.selection, scale=plan.selection.scale / 2))


class Everyone(PrivateTuning):
    """A broken twin: every candidate sees all records, and one training is paid."""

    def _parts(self, task, n_parts, source):
        return [np.ones(len(task.y), dtype=bool)] * n_parts


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["logistic", "add-remove", "persons"])
@pytest.mark.parametrize("twin", [ExactChoice, HalfTheNoise, Everyone])
def test_the_audit_of_a_study_catches_a_choice_that_is_not_paid_for(twin, name, monkeypatch):
    study = Study.from_text(text(name).replace(", 1.0]", "]"))
    effort = {"epsilon": 0.5, "noise": Noise(seed=3), "restarts": 1, "runs": 40, "n_features": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if twin is ExactChoice:
            report = audit(study, **effort)
            assert report.passed, str(report)
            assert report.epsilon_lower == pytest.approx(0.5, rel=1e-6), (
                "the choice costs all of it"
            )
        monkeypatch.setattr(consilience.learners.tuned, "PrivateTuning", twin)
        assert not audit(study, **effort).passed


# ------------------------------------------------------------------------------------- all the way


def test_sites_of_a_shared_folder_choose_their_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "study.toml").write_text(text())
    for i, name in enumerate(("north", "south")):
        pyarrow.csv.write_csv(table(400, seed=i), f"{name}.csv")
        site = Site.init(tmp_path / name, name=name, dataset="ward", budget=Budget(epsilon=2.0))
        site.join_folder(shared)
        train = ["site", "train", "heart-risk", f"{name}.csv", "--epsilon", "1", "--folder", name]
        assert run(*train, "--dry-run") == 0
        shown = capsys.readouterr().out
        assert "the choice costs nothing beside the training" in " ".join(shown.split())
        assert run(*train, "--approved", shown.split("--approved ")[1].split()[0]) == 0
        assert run("site", "submit", "heart-risk", "--folder", name) == 0
        assert site.ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    study = Study.load(shared / "study.toml")
    files = [one.newest for one in read_submitted(study, shared).values()]
    release = study.combine(files, *read_records(study, shared), publication=Publication(KEY))
    check_release(study, release)


def test_a_study_with_candidates_is_simulated_and_planned_as_it_would_run(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(text())
    runs = Runs(repeats=1, seed=1)
    report = cs.simulate(
        path, table(900, seed=3), division=Division(sites=3, test=0.25), runs=runs, epsilon=[3.0]
    )
    assert {row.value for row in report.rows if row.method == "Average"}
    said = "Sites choose the settings of PrivateLogisticRegression among regularization"
    assert said in str(report)
    records = Study.from_text(study_text()).schema.encode(table(120, seed=98))
    public = cs.Public(records.X, records.y)
    advice = str(cs.plan(path, n_records=400, n_sites=2, public=public))
    assert said in advice
    assert "This costs nothing beside the training" in advice
