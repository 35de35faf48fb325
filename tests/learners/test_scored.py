"""Scores that sites hand over with their models: charged with the training, counted with noise."""

import copy
import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pyarrow.csv
import pytest
from sklearn.base import clone

import consilience as cs
from consilience import Budget, Ledger, Noise, PrivateLogisticRegression
from consilience.aggregators.members import as_members
from consilience.aggregators.votes import WeightedVote
from consilience.auditing.audit import audit
from consilience.cli.app import main
from consilience.errors import ContributionRejected, SettingsError
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.learners import scored as scored_module
from consilience.learners.scored import RightAnswers, scored
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.privacy.accounting import Laplace, events_to_json, total
from consilience.simulation.division import Division
from consilience.simulation.simulate import Runs
from consilience.study.check import StudyRefused, check_release
from consilience.study.collect import Publication
from consilience.study.study import Study
from forgery import Forge
from studies import records_parts, study_text, table

KEY = SigningKey.generate()
SCORED = {
    "PrivateLogisticRegression": "",
    "PrivateForestClassifier": "n_trees = 3\nmax_depth = 2\n",
    "PrivateAdaBoostClassifier": "n_rounds = 2\n",
}


def text(learner="PrivateLogisticRegression", share="score_share = 0.1\n", weights="accuracy-size"):
    settings = f"{share}{SCORED[learner]}"
    return study_text(learner, "WeightedVote", settings=settings, more=f'weights = "{weights}"')


def part(study, folder, number, **changes):
    ledger = Ledger(folder / f"{number}.sqlite")
    ledger.allow("ward", Budget(epsilon=3.0, neighbours=study.neighbours))
    whose = {"site": f"site {number}", "signing": KEY, "dataset": "ward", **changes}
    return study.train(table(400, seed=number), ledger, epsilon=1.0, **whose), ledger


@pytest.mark.parametrize("learner", SCORED)
def test_a_study_weighs_models_by_scores_that_sites_paid_for(learner, tmp_path):
    study = Study.from_text(text(learner))
    files, shares = [], []
    for number in range(3):
        made, ledger = part(study, tmp_path, number)
        assert made.guarantee.epsilon == pytest.approx(1.0)
        assert ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
        files.append(Contribution.load(made.sealed.to_bytes()))
        found = files[-1].learner.accuracy_
        assert isinstance(files[-1].events[-1], Laplace)
        assert files[-1].events[-1].epsilon == pytest.approx(0.1)
        shares.append(found)
    made = study.combine(files, publication=Publication(KEY))
    made.save(tmp_path / "release")
    again = check_release(study, Release.load(tmp_path / "release", key=KEY.public))
    values, noise = (
        np.array([getattr(one, name) for one in shares]) for name in ("value", "variance")
    )
    mean = np.average(values, weights=1 / noise)
    sizes = [file.learner.public_size_ for file in files]
    raw = (mean + (values - mean) * 0.05**2 / (0.05**2 + noise)) * sizes
    np.testing.assert_allclose(again.ensemble.weights, raw / raw.sum())
    assert [one.accuracy_.value for one in again.ensemble.members] == values.tolist()


def fitted(kind=PrivateLogisticRegression, epsilon=0.9, n=300, **settings):
    X, y = _records(n)
    settings = {"classes": [0, 1], "noise": Noise(seed=3), **settings}
    return scored(kind)(epsilon=epsilon, score_share=0.1, **settings).fit(X, y)


def _records(n, seed=0):
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(n, 3)) / 4
    return X, (X @ [2.0, -1.0, 0.5] + 0.1 * draw.normal(size=n) > 0).astype(int)


def test_a_score_is_the_exact_one_up_to_its_noise():
    model = fitted(n=2000)
    exact = np.mean(model.predict(_records(2000)[0]) == _records(2000)[1])
    # Noise of scale 10 among 2,000: more than 0.12 has a chance below 1e-10.
    assert abs(model.accuracy_.value - exact) < 0.12
    assert model.accuracy_.variance == pytest.approx(2 * 10.0**2 / 2000**2 + 0.25 / 2000)
    assert fitted(epsilon=math.inf, n=500).accuracy_.correct == np.sum(
        fitted(epsilon=math.inf, n=500).predict(_records(500)[0]) == _records(500)[1]
    )


def test_a_scored_learner_keeps_its_name_its_parameters_and_what_it_was_fitted_to():
    model = fitted()
    assert type(model).__name__ == "PrivateLogisticRegression"
    assert isinstance(model, PrivateLogisticRegression)
    assert clone(model).get_params() == model.get_params()
    for again in (copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert again.accuracy_ == model.accuracy_
        assert np.array_equal(again.predict(_records(9)[0]), model.predict(_records(9)[0]))
    assert clone(model).set_budget(2.0).epsilon == pytest.approx(1.8)
    assert clone(model).set_budget(2.0).total_epsilon == pytest.approx(2.0)
    (member,) = as_members([model])
    assert total(member.training_events).epsilon == pytest.approx(0.9)
    assert total(member.events).epsilon == pytest.approx(1.0)
    assert WeightedVote("accuracy").combine([model, model]).weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("share", [0, -0.1, 0.6, True, "a", math.nan])
def test_a_share_that_pays_for_no_score_is_refused(share):
    with pytest.raises(SettingsError, match="score_share"):
        scored(PrivateLogisticRegression)(epsilon=1.0, score_share=share).fit(*_records(50))


@pytest.mark.parametrize(
    ("study", "problem"),
    [
        (text(share=""), "needs accuracies"),
        (text(share="score_share = 0.9\n"), "score_share"),
        (study_text("PrivateRidge", settings="score_share = 0.1"), "score_share"),
        (study_text("Moments", "Total", settings="score_share = 0.1"), "score_share"),
    ],
)
def test_a_study_whose_scores_cannot_work_is_refused(study, problem):
    with pytest.raises(StudyRefused, match=problem):
        Study.from_text(study)


def test_public_records_can_take_the_place_of_scores(tmp_path):
    assert Study.from_text(text(share="") + records_parts(tmp_path)).public is not None


# ------------------------------------------------------------------------------- what it costs


class FixedModel(PrivateLogisticRegression):
    """A model that no record moves: what is left is the count, which is private given the model."""

    def _train(self, task, plan, source):
        self.restore_state({"coef": np.array([[1.0, 0.0, 0.0]]), "intercept": np.zeros(1)})


def count_exactly(monkeypatch, rows):
    """Return the exact counts that noise is added to, and its scale."""
    seen = []

    def look(counts, *, event, source):
        seen.append((counts.tolist(), event.scale))
        return counts

    with monkeypatch.context() as patched:
        patched.setattr(scored_module, "laplace_counts", look)
        settings = {"epsilon": 0.9, "score_share": 0.1, "classes": [0, 1], "noise": Noise(seed=4)}
        X, y = np.array([x for x, _ in rows]), np.array([label for _, label in rows])
        model = scored(FixedModel)(**settings).fit(X, y)
    assert model.events_[-1].epsilon == pytest.approx(0.1)
    return seen[-1]


def worst_loss(monkeypatch):
    """Return the largest log ratio of probabilities of counts, over neighbouring small tables."""
    kinds = [((at, 0.0, 0.0), label) for at in (0.5, -0.5) for label in (0, 1)]
    worst = 0.0
    for kept in kinds:
        found = [count_exactly(monkeypatch, [kept, kept, other]) for other in kinds]
        for one, scale in found:
            worst = max(worst, *(abs(one[0] - other[0]) / scale for other, _ in found))
    return worst


def test_one_record_moves_the_count_by_what_was_paid_for(monkeypatch):
    assert worst_loss(monkeypatch) == pytest.approx(0.1)


def test_a_count_with_half_the_noise_is_caught(monkeypatch):
    draw = RightAnswers.draw
    halved = lambda self, *given: draw(replace(self, epsilon=2 * self.epsilon), *given)  # noqa: E731
    monkeypatch.setattr(RightAnswers, "draw", halved)
    assert worst_loss(monkeypatch) == pytest.approx(0.2)


def test_a_retry_draws_nothing_and_another_score_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "books")
    ledger.allow("ward", Budget(epsilon=1.5))
    charged = {"ledger": ledger, "dataset": "ward", "key": "once"}
    make = scored(PrivateLogisticRegression)
    first = make(epsilon=0.9, score_share=0.1, classes=[0, 1]).fit(*_records(200), **charged)
    again = make(epsilon=0.9, score_share=0.1, classes=[0, 1]).fit(*_records(200), **charged)
    assert again.accuracy_.correct == first.accuracy_.correct
    assert ledger.balance("ward").spent.epsilon == pytest.approx(1.0)
    with pytest.raises((SettingsError, ValueError)):
        make(epsilon=0.9, score_share=0.2, classes=[0, 1]).fit(*_records(200), **charged)


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateForestClassifier])
@pytest.mark.filterwarnings("ignore:A column-vector y")
def test_labels_are_counted_as_the_training_reads_them(kind):
    settings = {"bounds": (-1, 1)} if kind is PrivateForestClassifier else {}
    X, y = _records(200)
    model = scored(kind)(
        epsilon=0.9, score_share=0.1, classes=[0, 1], noise=Noise(seed=3), **settings
    )
    plain = model.fit(X, y).accuracy_
    for labels in (y[:, None], y[:, None].tolist(), y.astype(float), y.astype(object)):
        assert model.fit(X, labels).accuracy_.correct == plain.correct


def test_persons_are_hidden_by_the_number_of_their_records():
    X, y = _records(300)
    settings = {"unit": "person", "records_per_person": 3, "classes": [0, 1]}
    model = scored(PrivateForestClassifier)(
        epsilon=0.9, score_share=0.1, bounds=(-2, 2), n_trees=2, max_depth=2, **settings
    ).fit(X, y, persons=np.arange(300) // 5)
    event = model.events_[-1]
    assert event.sensitivity == 3.0  # added or removed: three records
    assert set(model.released_state()) >= {"right", "wrong"}
    assert model.accuracy_.total < 180 + 40 * 30 * math.log(1e10)  # 60 persons with three each


def test_tables_in_chunks_are_refused_before_the_charge(tmp_path):
    pytest.importorskip("dask.array")
    import dask.array as da

    ledger = Ledger(tmp_path / "books")
    ledger.allow("ward", Budget(epsilon=1.5))
    X, y = (da.from_array(one, chunks=100) for one in _records(200))
    with pytest.raises(SettingsError, match="in memory"):
        scored(PrivateLogisticRegression)(epsilon=0.9, score_share=0.1, classes=[0, 1]).fit(
            X, y, ledger=ledger, dataset="ward"
        )
    assert ledger.balance("ward").spent.epsilon == 0


# ----------------------------------------------------------------------------- forged and shown


def test_forged_scores_are_refused(tmp_path):
    study = Study.from_text(text())
    made, _ = part(study, tmp_path, 1)

    def refused(change):
        forge = Forge(made.sealed, KEY)
        change(forge)
        try:
            study.accept(Contribution.load(forge.to_bytes()))
        except ContributionRejected:
            return True
        return False

    halved = replace(made.events[-1], scale=made.events[-1].scale / 2)

    def settings(**changes):
        return lambda forge: forge.facts["settings"].update(changes)

    lies = {
        "nothing": lambda forge: None,
        "more right than records": lambda forge: forge.tensors.update(right=np.array(10**6)),
        "far below none": lambda forge: forge.tensors.update(right=np.array(-(10**6))),
        "no count": lambda forge: forge.tensors.pop("right"),
        "wrong answers too": lambda forge: forge.tensors.update(wrong=np.array(3)),
        "a fraction": lambda forge: forge.tensors.update(right=np.array(0.5)),
        "two counts": lambda forge: forge.tensors.update(right=np.array([3, 4])),
        "another share": settings(score_share=0.2),
        "no share": lambda forge: forge.facts["settings"].pop("score_share"),
        "a share of nothing": settings(score_share=0),
        "a free count": lambda forge: forge.facts.update(events=events_to_json(made.events[:-1])),
        "half the noise": lambda forge: forge.facts.update(
            events=events_to_json([*made.events[:-1], halved])
        ),
    }
    assert [name for name, lie in lies.items() if not refused(lie)] == ["nothing"]


def test_the_command_line_shows_scores_and_the_page_what_they_cost(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        assert (leaving.value.code or 0) == 0, printed.err
        return printed.out

    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "study.toml").write_text(text())
    for i in range(2):
        pyarrow.csv.write_csv(table(500, seed=i), tmp_path / f"ward{i}.csv")
        site = ("--folder", f"site{i}")
        run("site", "init", "--name", f"north {i}", "--dataset", "ward", "--epsilon", 3, *site)
        run("site", "join", "shared", *site)
        train = ("site", "train", "heart-risk", f"ward{i}.csv", "--epsilon", 1, *site)
        shown = run(*train, "--dry-run")
        assert "10 % of the epsilon pay for" in " ".join(shown.split())
        digest = json.loads(run(*train, "--dry-run", "--json"))["digest"]
        run(*train, "--approved", digest)
        run("site", "submit", "heart-risk", *site)
    run("release", "make", "shared", "--key", "coordinator.pem")
    run("site", "fetch", "heart-risk", "--folder", "site0")
    file = "site0/studies/heart-risk/release-0001.safetensors"
    shown = run("release", "scores", file, "site0")
    assert "north 0" in shown
    assert "north 1" in shown
    assert shown.count("accuracy 0.") == 2


def test_scores_of_one_model_are_shown_site_by_site(tmp_path):
    from consilience.evaluation.own_records import describe_scores

    head = study_text(privacy="delta = 1e-6")
    model = "[[1.5, 0.0, 0.0, 1.5, 0.0]]"
    study = Study.from_text(
        f'{head[: head.index("[learner]")]}[statistic]\nname = "Score"\nmodel = {model}\n'
    )
    files = []
    for i in range(3):
        ledger = Ledger(tmp_path / f"{i}.sqlite")
        ledger.allow("ward", Budget(epsilon=3.0, delta=1e-5))
        whose = {"site": f"site {i}", "signing": KEY, "dataset": "ward"}
        files.append(study.train(table(500, seed=i), ledger, epsilon=1.0, **whose))
    release = study.combine(files, publication=Publication(KEY))
    again = check_release(study, Release.load(release.sealed.to_bytes()))
    parts = again.ensemble.sites
    own = [file.learner.summed().values for file in files]
    assert all(np.array_equal(p.counts.ravel(), o) for p, o in zip(parts, own, strict=True))
    shown = describe_scores(again.ensemble, study.schema, [one.site for one in again.sources])
    rows = dict(next(rows for heading, _, rows in shown if heading == "Site by site"))
    assert list(rows) == ["site 0", "site 1", "site 2"]
    assert rows["site 1"].startswith("accuracy 0.")
    for name, value in (("parts", lambda t: t * 1e6), ("part_variances", np.zeros_like)):
        forge = Forge(release.sealed, KEY)
        forge.tensors[name] = value(forge.tensors[name])
        with pytest.raises(ContributionRejected):
            check_release(study, Release.load(forge.to_bytes()))


def test_a_study_with_scores_is_simulated_and_audited_as_it_would_run():
    study = Study.from_text(text())
    report = cs.simulate(
        study,
        table(1200, seed=3),
        division=Division(sites=3, test=0.25),
        runs=Runs(repeats=1, seed=1),
        epsilon=[1.0],
    )
    errors = {row.method: row.value for row in report.rows if row.metric == "error"}
    assert min(errors.values()) < 0.45
    assert audit(study, runs=20).passed
