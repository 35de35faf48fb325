"""A learner and an aggregator defined here work everywhere, because everything asks the object.

The acceptance test of the registries: nothing in the package knows these two by name.
"""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

import consilience as cs
from consilience.aggregators.base import Aggregator, Description
from consilience.aggregators.members import (
    LinearEnsemble,
    align_members,
    as_members,
    joint_guarantee,
)
from consilience.aggregators.registry import AGGREGATORS
from consilience.aggregators.registry import register as register_aggregator
from consilience.cli.app import main
from consilience.files.certificate import of_contribution, of_release
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.learners.base import PrivateLearner
from consilience.learners.registry import LEARNERS
from consilience.learners.registry import register as register_learner
from consilience.privacy.accounting import Laplace
from consilience.privacy.guarantee import Budget
from consilience.privacy.ledger import Ledger
from consilience.privacy.mechanisms import laplace_counts
from consilience.simulation.division import Division
from consilience.simulation.simulate import Runs
from consilience.study.check import find_problems
from consilience.study.collect import Publication
from consilience.study.study import Study
from studies import records_parts, study_text, table

WEIGHING = "Every coefficient is the median of the members' own."


class ToyMedian(Aggregator):
    """The median of each coefficient."""

    shorthands = {"toy-median": {}}
    combines_coefficients = True

    def __init__(self, *, classes=None):
        self.classes = classes

    def describe(self):
        return Description("ToyMedian", WEIGHING)

    @classmethod
    def alternatives(cls, learner=None):
        return [{}]

    def combine(self, members, public=None, *, ledger=None, dataset=None, key=None):
        found = as_members(members)
        classes, coef, intercept, _ = align_members(found, self.classes)
        own = tuple(member.guarantee for member in found)
        return LinearEnsemble(
            classes,
            np.median(coef, axis=0),
            np.median(intercept, axis=0),
            np.full(len(found), 1 / len(found)),
            joint_guarantee(found),
            own,
        )


class ToyPlan:
    def __init__(self, events):
        self.events = events


class ToyPrior(ClassifierMixin, PrivateLearner):
    """A linear model that knows nothing but how frequent its two classes are, from noisy counts."""

    is_linear = True
    shorthand = "toy-prior"

    def __init__(
        self,
        *,
        epsilon,
        delta=0.0,
        classes=None,
        neighbours="replace-one",
        unit="record",
        records_per_person=None,
        noise=None,
    ):
        self.epsilon = epsilon
        self.delta = delta
        self.classes = classes
        self.neighbours = neighbours
        self.unit = unit
        self.records_per_person = records_per_person
        self.noise = noise

    def make_task(self, X, y, persons=None):
        self._check_privacy(("counts",))
        X, y = np.asarray(X), np.asarray(y)
        self.n_features_in_, self.public_size_ = X.shape[1], len(y)
        self.classes_ = np.asarray(self.classes if self.classes is not None else np.unique(y))
        counts = np.array([(y == label).sum() for label in self.classes_], dtype=np.int64)
        return counts, []

    def _plan(self, task):
        if math.isinf(self.epsilon):
            return ToyPlan([])
        facts = {"unit": self.unit, "neighbours": self.neighbours}
        return ToyPlan([Laplace(sensitivity=2.0, scale=2 / self.epsilon, **facts)])

    def _train(self, task, plan, source):
        for event in plan.events:
            task = laplace_counts(task, event=event, source=source)
        no, yes = np.maximum(task, 1)
        self.coef_ = np.zeros((1, self.n_features_in_))
        self.intercept_ = np.array([math.log(yes / no)])

    def released_state(self):
        return {"coef": self.coef_, "intercept": self.intercept_}

    def restore_state(self, state):
        self.coef_, self.intercept_ = state["coef"], state["intercept"]

    def check_state(self, state):
        shapes = {name: tensor.shape for name, tensor in state.items()}
        return shapes == {"coef": (1, self.n_features_in_), "intercept": (1,)}

    @classmethod
    def describe_state(cls, schema):
        return "the toy's one number"

    def predict_proba(self, X):
        check_is_fitted(self)
        yes = 1 / (1 + np.exp(-(np.asarray(X) @ self.coef_[0] + self.intercept_[0])))
        return np.stack([1 - yes, yes], axis=1)

    def predict(self, X):
        return self.classes_[(self.predict_proba(X)[:, 1] > 0.5).astype(int)]


@pytest.fixture(autouse=True)
def registered():
    register_aggregator(ToyMedian)
    register_learner(ToyPrior)
    yield
    AGGREGATORS.pop("ToyMedian")
    LEARNERS.pop("ToyPrior")


TOYS = [
    ("ToyPrior", "ToyMedian"),
    ("ToyPrior", "Average"),
    ("ToyPrior", "WeightedVote"),
    ("PrivateLogisticRegression", "ToyMedian"),
]


@pytest.fixture
def run(capsys):
    def run(*arguments, fails=0):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        printed = capsys.readouterr()
        assert (leaving.value.code or 0) == fails, printed.err
        return printed.err if fails else printed.out

    return run


def contributions(study, folder, n_sites=3):
    ledger = Ledger(folder / "site.ledger")
    ledger.allow("ward", Budget(epsilon=100.0))
    key = SigningKey.generate()
    return [
        study.train(
            table(200, seed=i), ledger, epsilon=1.0, site=f"w{i}", signing=key, dataset="ward"
        )
        for i in range(n_sites)
    ]


@pytest.mark.parametrize(("learner", "aggregator"), TOYS)
def test_a_study_checks_trains_combines_and_certifies(learner, aggregator, tmp_path):
    parts = records_parts(tmp_path)
    study = Study.from_text(study_text(learner, aggregator) + parts)
    assert find_problems(study) == []
    public, test = (
        study.public.read(study.schema, tmp_path),
        study.test.read(study.schema, tmp_path),
    )
    made = contributions(study, tmp_path)
    publication = Publication(SigningKey.generate())
    release = study.combine(made, public, test, publication=publication)
    release.save(tmp_path / release.filename)
    loaded = Release.load(tmp_path / release.filename)
    assert set(loaded.predict(test.X)) <= {0, 1}
    page = of_release(loaded).as_html()
    assert aggregator in page
    assert learner in of_contribution(made[0]).as_text()
    rows = [row["method"] for row in loaded.sealed.facts["quality"]]
    assert rows[0].startswith(aggregator)
    assert "ToyMedian" in rows
    assert any(row.startswith("Average") for row in rows)


def test_what_the_toys_cannot_do_is_said_by_them():
    assert any("linear" in p for p in problems("PrivateForestClassifier", "ToyMedian"))
    assert any("PooledCounts" in p for p in problems("ToyPrior", "PooledCounts"))


def problems(learner, aggregator):
    with pytest.raises(cs.errors.SettingsError) as refused:
        Study.from_text(study_text(learner, aggregator))
    return refused.value.problems


def test_a_simulation_takes_them_in_both_forms(tmp_path):
    study = Study.from_text(study_text("ToyPrior", "ToyMedian"))
    report = cs.simulate(
        study, table(400), division=Division(sites=3), runs=Runs(repeats=2, seed=1), epsilon=1.0
    )
    assert "ToyMedian" in {row.method for row in report.rows}
    rows = study.schema.encode(table(400))
    short = cs.simulate(
        ToyPrior(epsilon=1.0), ToyMedian(), rows.X, rows.y, sites=3, repeats=2, seed=1
    )
    assert len(short.values("ToyPrior", "1", "ToyMedian")) == 2


@pytest.mark.parametrize(("learner", "aggregator"), TOYS)
def test_the_command_line_takes_them(learner, aggregator, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyarrow.csv.write_csv(table(300), tmp_path / "table.csv")
    (tmp_path / "study.toml").write_text(study_text(learner, aggregator))
    assert "is complete" in run("study", "check", "study.toml")
    assert aggregator in run("study", "show", "study.toml")
    asked = ("--sites", "3", "--repeats", "2", "--seed", "1")
    found = json.loads(
        run("simulate", "study.toml", "--data", "table.csv", "--epsilon", "1", *asked, "--json")
    )
    assert aggregator in json.dumps(found)


def test_the_command_line_knows_their_short_names(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyarrow.csv.write_csv(table(300), tmp_path / "table.csv")
    asked = ("--sites", "3", "--repeats", "2", "--seed", "1", "--epsilon", "1")
    text = run(
        "simulate", "--data", "table.csv", "--label", "ill", *asked, "--learner", "toy-prior",
        "--aggregator", "toy-median",
    )  # fmt: skip
    assert "toy-median" in text


@pytest.mark.parametrize(("learner", "aggregator"), TOYS)
def test_a_hub_takes_their_contributions_and_shows_the_release(learner, aggregator, tmp_path):
    hub = hub_tools()
    sha = hub.write_csv(tmp_path / "test.csv", hub.table(120, 99))
    text = hub.study_text(aggregator=f'name = "{aggregator}"', test=sha)
    text = text.replace("PrivateLogisticRegression", learner)
    with hub.Client(hub.create_app(hub.quick(tmp_path / "hub"))) as client:
        world = hub.World(client, tmp_path)
        study = world.add_study(text)
        arrived = world.hub.store.files.new()
        arrived.write_bytes((tmp_path / "test.csv").read_bytes())
        world.hub.keep_public_file("demo", "test.csv", arrived, sha, "coordinator:ann")
        world.fill(study, 3)
        world.combiner.run(at_once=True)
        _, path = world.hub.release_path("demo")
        release = Release.load(path, key=world.hub.key.public)
        assert release.sealed.facts["aggregator"]["name"] == aggregator
        token, _ = hub.new_token(world.hub.store, "ann", hours=1, kind="test")
        headers = {"cookie": f"consilience={token}"}
        for address in ("/studies", "/studies/demo", "/studies/demo/releases/1"):
            page = client.get(address, headers=headers)
            assert page.status_code == 200, page.text
        assert aggregator in page.text
        if aggregator == "ToyMedian":
            assert WEIGHING.replace("'", "&#39;") in page.text
        certified = client.get("/studies/demo/releases/1/certificate.html", headers=headers)
        assert certified.status_code == 200
        assert aggregator in certified.text


def hub_tools():
    """The hub's test tools: fixtures of another folder cannot be imported under importlib mode."""
    path = Path(__file__).parents[1] / "hub" / "conftest.py"
    spec = importlib.util.spec_from_file_location("hub_tools_for_toys", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
