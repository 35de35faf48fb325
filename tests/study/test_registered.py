"""A learner and an aggregator that only this file knows work in a study once registered."""

import pytest

from consilience import Average, Budget, Ledger, PrivateLogisticRegression
from consilience.aggregators.base import Description
from consilience.aggregators.registry import AGGREGATORS
from consilience.files.release import Release
from consilience.files.sealed import SigningKey
from consilience.learners.registry import LEARNERS
from consilience.study.collect import Publication
from consilience.study.draft import Draft
from consilience.study.pages import of_study, of_training
from consilience.study.study import check
from studies import study, study_text, table

KEY = SigningKey.generate()


class ToyLearner(PrivateLogisticRegression):
    @classmethod
    def describe_state(cls, schema):
        return f"toy numbers for {schema.n_features} features"


class ToyAverage(Average):
    def describe(self):
        return Description("Toy", "Every toy counts the same.")

    def problem_with(self, learner, settings):
        return None if learner is ToyLearner else "ToyAverage combines toys only"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(LEARNERS, "ToyLearner", ToyLearner)
    monkeypatch.setitem(AGGREGATORS, "ToyAverage", ToyAverage)


def test_a_study_of_toys_goes_from_text_to_a_release(tmp_path):
    toys = study("ToyLearner", "ToyAverage")
    parts = []
    for i in range(2):
        ledger = Ledger(tmp_path / f"{i}.sqlite")
        ledger.allow("ward", Budget(epsilon=3.0))
        facts = {"site": f"site {i}", "signing": KEY, "dataset": "ward"}
        parts.append(toys.train(table(300, seed=i), ledger, epsilon=1.0, **facts))
    toys.combine(parts, publication=Publication(KEY)).save(tmp_path / "release")
    again = Release.load(tmp_path / "release", key=KEY.public)
    assert again.guarantee.epsilon == pytest.approx(1.0)
    X = toys.schema.encode(table(300, seed=7)).X
    assert (again.predict(X) == table(300, seed=7)["ill"].to_numpy()).mean() > 0.6


def test_pages_and_drafts_say_what_toys_say_of_themselves(tmp_path):
    toys = study("ToyLearner", "ToyAverage")
    assert "Every toy counts the same." in of_study(toys).as_text()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    balance = ledger.allow("ward", Budget(epsilon=3.0))
    page = of_training(toys, site="north", epsilon=1.0, balance=balance, number=1, head="0" * 64)
    assert "toy numbers for 4 features" in page.as_text()
    (tmp_path / "ward.csv").write_text("age,ill\n")
    text = Draft("first", "ill", learner="ToyLearner").write(tmp_path / "ward.csv")
    assert "ToyAverage" in text
    assert 'name = "ToyLearner"' in text


def test_a_toys_own_reason_is_a_problem_of_the_study(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(study_text("PrivateLinearSVC", "ToyAverage"))
    assert check(path) == ["ToyAverage combines toys only"]
