import json
import math

import numpy as np
import pytest

from consilience import (
    Bins,
    Budget,
    Ledger,
    Noise,
    PrivateAdaBoostClassifier,
    PrivateForestClassifier,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateRidge,
    PrivateTreeClassifier,
)
from consilience.errors import ContributionRejected, GuaranteeVoid
from consilience.files.contribution import Contribution, released
from consilience.files.sealed import Sealed, SigningKey

KEY = SigningKey.generate()
STUDY = {"name": "heart-risk", "digest": "0" * 64}
LEARNERS = [
    PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]),
    PrivateLogisticRegression(epsilon=1.0, delta=1e-6, classes=["a", "b", "c"]),
    PrivateLinearSVC(epsilon=1.0, classes=[True, False]),
    PrivateRidge(epsilon=1.0),
    PrivateTreeClassifier(
        epsilon=1.0, bins=Bins([[0.0], [], [-0.5, 0.5]], [False, False, True]), classes=[0, 1]
    ),
    PrivateForestClassifier(epsilon=1.0, bounds=(-1, 1), classes=[0, 1, 2]),
    PrivateForestClassifier(
        epsilon=1.0, delta=1e-6, bounds=[(-1, 1)] * 3, classes=[0, 1], splitter="random"
    ),
    PrivateAdaBoostClassifier(epsilon=1.0, bounds=(-1, 1), classes=[0, 1]),
]


def fitted(learner, ledger):
    source = Noise(seed=1).open()
    X = source.normal(600).reshape(200, 3) / 4
    y = (X[:, 0] > 0).astype(int)
    y = np.asarray(learner.classes)[y] if getattr(learner, "classes", None) is not None else y
    dataset = f"{learner.neighbours} ward"
    ledger.allow(dataset, Budget(epsilon=100.0, delta=1e-3, neighbours=learner.neighbours))
    return learner.fit(X, y, ledger=ledger, dataset=dataset), X


@pytest.fixture
def books(tmp_path):
    return Ledger(tmp_path / "books.sqlite")


def made(learner, **changes):
    facts = {"study": STUDY, "site": "north", "sequence": 1, "key": KEY, "software": "0", **changes}
    return Contribution.make(learner, **facts)


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: type(learner).__name__)
def test_a_learner_comes_back_from_its_file_and_predicts_the_same(learner, books, tmp_path):
    model, X = fitted(learner, books)
    made(model).save(tmp_path / "file")
    found = Contribution.load(tmp_path / "file")
    np.testing.assert_array_equal(found.learner.predict(X), model.predict(X))
    if hasattr(model, "predict_proba"):
        np.testing.assert_array_equal(found.learner.predict_proba(X), model.predict_proba(X))
    assert found.guarantee == model.guarantee_
    assert found.events == model.events_
    assert found.verify(key=KEY.public) is found
    assert found.sealed.facts["receipt"] == model.receipt_


def test_what_no_ledger_was_charged_for_cannot_leave():
    X = Noise(seed=1).open().normal(60).reshape(30, 2) / 4
    y = (X[:, 0] > 0).astype(int)
    with pytest.raises(GuaranteeVoid, match="no ledger was charged"):
        made(PrivateLogisticRegression(epsilon=1.0).fit(X, y))
    with pytest.raises(GuaranteeVoid, match="seeded"):
        made(PrivateLogisticRegression(epsilon=1.0, noise=Noise(seed=3)).fit(X, y))


def test_an_exact_learner_leaves_only_for_a_trusted_hub(tmp_path):
    X = Noise(seed=1).open().normal(60).reshape(30, 2) / 4
    exact = PrivateLogisticRegression(epsilon=math.inf).fit(X, (X[:, 0] > 0).astype(int))
    with pytest.raises(ContributionRejected, match="trusted hub"):
        made(exact)
    made(exact, trusted=True).save(tmp_path / "file")
    assert math.isinf(Contribution.load(tmp_path / "file", trusted=True).guarantee.epsilon)
    with pytest.raises(ContributionRejected, match="trusted hub"):
        Contribution.load(tmp_path / "file")


def forged(learner, path, change, tensors=None):
    """Sign a changed file correctly: what a hostile site can do."""
    facts, state = released(learner)
    facts |= {
        "study": STUDY,
        "site": "north",
        "sequence": 1,
        "receipt": None,
        "software": "0",
        "created": "now",
    }
    facts = json.loads(json.dumps(facts))
    change(facts)
    Sealed.seal("contribution", facts, {**state, **(tensors or {})}, KEY).save(path)
    return path


def lower(facts):
    facts["guarantee"]["epsilon"] = 0.1


def other_unit(facts):
    facts["guarantee"]["unit"] = "site"


def less_noise(facts):
    facts["events"] = facts["events"].replace('"scale":', '"scale":0')


def no_events(facts):
    facts["events"] = "[]"


def other_learner(facts):
    facts["learner"] = "Pipeline"


def other_settings(facts):
    facts["settings"]["base_estimator"] = 1


def many_features(facts):
    facts["n_features"] = 1 << 40


def no_classes(facts):
    facts["classes"] = []


def deep_events(facts):
    facts["events"] = "[" * 5000 + "]" * 5000


def no_site(facts):
    facts["site"] = ""


def no_sequence(facts):
    facts["sequence"] = True


@pytest.mark.parametrize(
    "change",
    [
        lower,
        other_unit,
        less_noise,
        no_events,
        other_learner,
        other_settings,
        many_features,
        no_classes,
        deep_events,
        no_site,
        no_sequence,
    ],
)
@pytest.mark.parametrize("learner", [LEARNERS[0], LEARNERS[5]], ids=["linear", "forest"])
def test_a_correctly_signed_lie_is_refused(change, learner, books, tmp_path):
    model, _ = fitted(learner, books)
    Contribution.load(forged(model, tmp_path / "honest", lambda facts: None))
    with pytest.raises(ContributionRejected):
        Contribution.load(forged(model, tmp_path / "file", change))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("feature", lambda one: one + 1000),
        ("feature", lambda one: one - 1000),
        ("last", lambda one: one + 255),
        ("last", lambda one: one - 255),
        ("counts", lambda one: one[:, :-1]),
        ("counts", lambda one: one.astype(np.float64)),
        ("counts", lambda one: one + 2**61),
        ("feature", lambda one: one[:, :3]),
        ("variance", lambda one: one - 1e9),
        ("size", lambda one: one - 10**9),
    ],
)
def test_trees_that_would_lead_compiled_code_astray_are_refused(name, tensor, books, tmp_path):
    model, _ = fitted(LEARNERS[5], books)
    _, state = released(model)
    with pytest.raises(ContributionRejected):
        Contribution.load(
            forged(model, tmp_path / "file", lambda facts: None, {name: tensor(state[name])})
        )


def test_a_file_of_another_key_is_told_apart(books):
    model, _ = fitted(LEARNERS[0], books)
    with pytest.raises(ContributionRejected, match="another key"):
        made(model).verify(key=SigningKey.generate().public)
