import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.base import ClassifierMixin

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
from consilience.errors import ContributionRejected, GuaranteeVoid, SettingsError
from consilience.files.certificate import of_contribution
from consilience.files.contribution import Contribution, _add_up, _recompute_short, take_apart
from consilience.files.sealed import Sealed, SealedFile, SigningKey
from consilience.learners import registry
from consilience.learners.base import PrivateLearner
from consilience.privacy.accounting import Laplace, total
from consilience.privacy.guarantee import Neighbours, Unit
from consilience.privacy.mechanisms import laplace_counts
from forgery import Forge

KEY = SigningKey.generate()
STUDY = {"name": "heart-risk", "digest": "0" * 64}
NOW = "2026-11-18T08:00:00+00:00"
LEARNERS = [
    PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]),
    PrivateLogisticRegression(epsilon=1.0, delta=1e-6, classes=["a", "b", "c"]),
    PrivateLinearSVC(epsilon=1.0, classes=[True, False]),
    PrivateRidge(epsilon=1.0, label_bound=1.0),
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
    facts = {"study": STUDY, "site": "north", "sequence": 1, "key": KEY, **changes}
    return Contribution.make(learner, **facts)


def restated(file, *, times):
    facts = {name: file.sealed.facts[name] for name in file.sealed.facts if name != "key"}
    lower = {**facts["guarantee"], "epsilon": facts["guarantee"]["epsilon"] * times}
    return Sealed.seal("contribution", {**facts, "guarantee": lower}, file.sealed.tensors, KEY)


def test_an_epsilon_that_an_earlier_version_rounded_down_is_read_as_the_true_one(books):
    model, _ = fitted(PrivateLogisticRegression(epsilon=1.0, delta=1e-6, classes=[0, 1]), books)
    earlier = Contribution.load(restated(made(model), times=1 - 1e-13).to_bytes())
    assert earlier.sealed.facts["guarantee"]["epsilon"] < model.guarantee_.epsilon
    assert earlier.guarantee == earlier.learner.guarantee_ == model.guarantee_
    for times in (1 - 1e-5, 1 + 1e-13):
        with pytest.raises(ContributionRejected, match="not the one that its events have"):
            Contribution.load(restated(made(model), times=times).to_bytes())


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
    facts, state = take_apart(learner)
    facts |= {
        "study": STUDY,
        "site": "north",
        "sequence": 1,
        "receipt": None,
        "software": "0",
        "created": NOW,
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
    _, state = take_apart(model)
    with pytest.raises(ContributionRejected):
        Contribution.load(
            forged(model, tmp_path / "file", lambda facts: None, {name: tensor(state[name])})
        )


@pytest.mark.parametrize("learner", [LEARNERS[5], LEARNERS[7]], ids=["forest", "adaboost"])
def test_trees_without_any_number_are_refused(learner, books, tmp_path):
    model, _ = fitted(learner, books)
    none, counts = np.empty((3, 0), np.int64), np.empty((3, 0, 2), np.int64)
    facts, _ = take_apart(model)
    facts |= {"study": STUDY, "site": "north", "receipt": None, "software": "0", "created": NOW}
    tensors = {"feature": none, "last": none, "counts": counts}
    file = tmp_path / "file"
    Sealed.seal("contribution", {**facts, "sequence": 1}, tensors, KEY).save(file)
    with pytest.raises(ContributionRejected, match="refused"):
        Contribution.load(file)
    with pytest.raises(ContributionRejected, match="refused"):
        Contribution.inspect(SealedFile(file, "contribution"))


def test_a_file_of_another_key_is_told_apart(books):
    model, _ = fitted(LEARNERS[0], books)
    with pytest.raises(ContributionRejected, match="another key"):
        made(model).verify(key=SigningKey.generate().public)


class PrivateShare(ClassifierMixin, PrivateLearner):
    """The simplest learner: the noisy share of the second class, whatever the features."""

    def __init__(self, *, epsilon, delta=0.0, neighbours="replace-one", noise=None):
        self.epsilon = epsilon
        self.delta = delta
        self.neighbours = neighbours
        self.noise = noise

    def make_task(self, X, y, persons=None):
        self.n_features_in_, self.classes_ = X.shape[1], np.array([0, 1])
        return np.asarray(y), []

    def _plan(self, task):
        unit, neighbours = Unit.RECORD, Neighbours(self.neighbours)
        event = Laplace(sensitivity=1.0, scale=1 / self.epsilon, unit=unit, neighbours=neighbours)
        return SimpleNamespace(events=(event,), n_records=len(task))

    def _train(self, task, plan, source):
        ones = laplace_counts(np.array([task.sum()]), event=plan.events[0], source=source)
        self.share_ = np.clip(ones / plan.n_records, 0.0, 1.0)

    def released_state(self):
        return {"share": self.share_}

    def restore_state(self, state):
        self.share_ = state["share"]

    def check_state(self, state):
        share = state.get("share", np.zeros(0))
        return set(state) == {"share"} and share.shape == (1,) and 0 <= share[0] <= 1

    def predict_proba(self, X):
        return np.tile([1 - self.share_[0], self.share_[0]], (len(X), 1))


def test_a_learner_that_a_user_registers_travels_as_our_own(books, tmp_path, monkeypatch):
    model, X = fitted(PrivateShare(epsilon=1.0), books)
    with pytest.raises(ContributionRejected, match="learner this version knows"):
        made(model)
    monkeypatch.setitem(registry.LEARNERS, "PrivateShare", PrivateShare)  # taken away afterwards
    assert registry.register(PrivateShare) is PrivateShare
    made(model).save(tmp_path / "file")
    for found in (
        Contribution.load(tmp_path / "file"),
        Contribution.inspect(SealedFile(tmp_path / "file", "contribution")),
    ):
        np.testing.assert_array_equal(found.learner.predict_proba(X), model.predict_proba(X))
    outside = {"share": np.array([1.5])}
    with pytest.raises(ContributionRejected, match="tensors"):
        Contribution.load(forged(model, tmp_path / "forged", lambda facts: None, outside))
    with pytest.raises(ContributionRejected, match="tensors"):
        Contribution.inspect(SealedFile(tmp_path / "forged", "contribution"))


def test_two_learners_cannot_share_a_name_and_one_without_a_check_is_none():
    class PrivateRidge(PrivateLearner):
        def check_state(self, state):
            return True

    with pytest.raises(SettingsError, match="already registered"):
        registry.register(PrivateRidge)
    with pytest.raises(SettingsError, match="defines no check_state"):
        registry.register(type("Careless", (PrivateLearner,), {}))


# ------------------------------------------------------------------ text that a sender could choose


def with_facts(file, **changes):
    facts = {k: v for k, v in file.sealed.facts.items() if k not in ("key", "tensors")}
    return Sealed.seal("contribution", {**facts, **changes}, file.sealed.tensors, KEY).to_bytes()


def test_no_text_of_a_sender_travels_in_a_guarantee_or_a_receipt(books):
    model, _ = fitted(PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]), books)
    file = made(model)
    promise = {**file.sealed.facts["guarantee"], "assumptions": ["The hub has verified this."]}
    with pytest.raises(ContributionRejected, match="an assumption that no learner"):
        Contribution.load(with_facts(file, guarantee=promise))
    receipt = file.sealed.facts["receipt"]
    for forged in (
        {},
        {**receipt, "hash": "checked by the hub"},
        {**receipt, "key": "x" * 5000},
        {**receipt, "entry": 0},
        {**receipt, "entry": -(2**52)},
        {**receipt, "note": "approved"},
        {name: value for name, value in receipt.items() if name != "rho"},
        {**receipt, "epsilon": receipt["epsilon"] / 2},
        {**receipt, "events_hash": "0" * 64},
        {**receipt, "neighbours": "anything"},
    ):
        with pytest.raises(ContributionRejected, match=r"wrong kind|not one for its events"):
            Contribution.load(with_facts(file, receipt=forged))
    with pytest.raises(ContributionRejected, match="a fact is missing or of the wrong kind"):
        Contribution.load(with_facts(file, remark="x" * 65_536))
    words = ("", "0.1 approved", "0.1\n", "1." * 5000 + "0", "0.1+approved.by.us", "approved", 1)
    for name in ("software", "created"):
        for text in (*words, f"{NOW} approved", "2026-11-18", f"{NOW[:-6]}Z"):
            with pytest.raises(ContributionRejected, match="wrong kind"):
                Contribution.load(with_facts(file, **{name: text}))
    for version in ("0.1.0", "1.2rc1", "0.2.0.post1.dev3+g1a2b3c4.d20261118"):
        Contribution.load(with_facts(file, software=version))
    page = of_contribution(file).as_text(width=300)
    for name in ("made", "software", "ledger entry"):
        assert re.search(f"^{name} .*, as the site states$", page, re.MULTILINE)


def test_nothing_is_signed_that_no_reader_would_accept():
    with pytest.raises(SettingsError, match="no reader accepts"):
        Sealed.seal("release", {"sources": ["x" * 1000] * 5000}, {}, KEY)


def test_choices_are_recomputed_from_a_files_own_facts_whatever_came_before(books):
    files = [
        made(fitted(PrivateLogisticRegression(epsilon=e, delta=1e-6, classes=[0, 1]), books)[0])
        for e in (0.5, 2.0)
    ]
    one, other = (Contribution.load(file.sealed.to_bytes()).sealed for file in files)
    assert one.facts["chosen"] != other.facts["chosen"]
    for mine, foreign in ((one, other), (other, one)):
        facts = {name: value for name, value in mine.facts.items() if name != "key"}
        lie = Sealed.seal(
            "contribution", facts | {"chosen": foreign.facts["chosen"]}, mine.tensors, KEY
        )
        with pytest.raises(ContributionRejected, match="what its settings chose is not what they"):
            Contribution.load(lie.to_bytes())


def test_the_guarantee_of_a_file_is_that_of_its_own_events_whatever_was_read_before(books):
    stated = []
    for epsilon, relation in ((0.5, "replace-one"), (2.0, "replace-one"), (0.5, "add-remove")):
        settings = {"neighbours": relation, "public_size": 200, "classes": [0, 1], "delta": 1e-6}
        model, _ = fitted(PrivateLogisticRegression(epsilon=epsilon, **settings), books)
        content = made(model).sealed.to_bytes()
        found = [Contribution.load(content) for _ in range(2)]
        assert [each.guarantee for each in found] == [model.guarantee_] * 2
        stated.append(found[0].guarantee)
    assert len(set(stated)) == 3
    for events in (model.events_, model.events_ * 20):  # kept, and too many to be kept
        one, other = events, tuple(replace(each, unit=Unit.PERSON) for each in events)
        assert _add_up(one).unit is Unit.RECORD
        assert _add_up(other).unit is Unit.PERSON
        assert _add_up(one, "replace-one") == total(one, "replace-one") != _add_up(one)


def test_long_facts_stay_in_no_memory_once_their_file_was_refused(books):
    """Whoever may submit could otherwise fill the hub's memory, some megabytes with each file."""
    forge = Forge(made(fitted(LEARNERS[0], books)[0]).sealed, KEY)
    kept = []
    for n_more in (1, 1000):
        forge.tensors |= {f"unknown_{i}": np.zeros(1) for i in range(n_more)}
        before = _recompute_short.cache_info()
        with pytest.raises(ContributionRejected, match="shapes"):
            Contribution.load(forge.to_bytes())
        after = _recompute_short.cache_info()
        kept.append(after.misses - before.misses)
    assert kept == [1, 0]
