"""Promises that every registered aggregator keeps: it behaves as its capabilities say."""

import dataclasses
import inspect
import math

import numpy as np
import pytest

from consilience import Budget, Ledger, Noise, adapt
from consilience.aggregators.accuracy import private_accuracy
from consilience.aggregators.base import Aggregator
from consilience.aggregators.members import as_members
from consilience.aggregators.registry import AGGREGATORS, from_shorthand, register, shorthands
from consilience.errors import ConsilienceError, SettingsError
from consilience.files.release import Combination, Release, Source
from consilience.files.sealed import SigningKey
from consilience.learners.linear import PrivateLogisticRegression, PrivateRidge
from consilience.learners.registry import LEARNERS
from consilience.learners.trees.forest import PrivateForestClassifier
from consilience.privacy.accounting import total
from consilience.privacy.guarantee import Unit
from consilience.statistics.moments import Moments
from consilience.tables.public import Public
from consilience.tables.schema import Numeric, Schema

FOREST = {"splitter": "random", "random_state": 7, "n_trees": 3, "max_depth": 2, "bounds": (-1, 1)}
KINDS = {
    PrivateLogisticRegression: {},
    PrivateForestClassifier: {**FOREST, "neighbours": "replace-one"},
    Moments: {"delta": 1e-6},
}


def takes(cls, name):
    return name in inspect.signature(cls).parameters


def variants():
    """Every aggregator with its default settings and, where it can draw noise, with an epsilon."""
    for name, cls in AGGREGATORS.items():
        parameter = inspect.signature(cls).parameters.get("epsilon")
        required = parameter is not None and parameter.default is inspect.Parameter.empty
        if not required:
            yield pytest.param(cls, {}, id=name)
        if parameter is not None:
            yield pytest.param(cls, {"epsilon": 1.0}, id=f"{name}, epsilon")
        if takes(cls, "mechanism") and takes(cls, "max_members"):
            noisy = {"epsilon": 1.0, "mechanism": "output"}
            yield pytest.param(cls, noisy, id=f"{name}, output")


every_variant = pytest.mark.parametrize(("cls", "settings"), list(variants()))
every_aggregator = pytest.mark.parametrize("cls", AGGREGATORS.values(), ids=list(AGGREGATORS))


def table(n, seed):
    source = Noise(seed=seed).open()
    X = source.uniform(n * 3).reshape(n, 3) - 0.5
    return X, np.where(X[:, 0] - X[:, 1] + 0.1 * source.normal(n) > 0, "yes", "no")


def members(made, *, epsilon=None, n_sites=3):
    """Sites' learners of a kind that it combines: exact if it asks for that, private otherwise."""
    kind, settings = next(
        (kind, more) for kind, more in KINDS.items() if made.problem_with(kind, more) is None
    )
    if epsilon is None:
        epsilon = math.inf if made.needs_exact_members else 2.0
    fitted = kind(epsilon=epsilon, classes=["no", "yes"], **settings)
    return [type(fitted)(**fitted.get_params()).fit(*table(80, seed)) for seed in range(n_sites)]


def records(made, *, labelled=None):
    """Public records as it needs them, or None."""
    X, y = table(60, 99)
    labelled = made.needs_labels if labelled is None else labelled
    return Public(X, y if labelled else None) if made.needs_public else None


def open_ledger(folder, made):
    ledger = Ledger(folder / "hub.sqlite")
    unit, relation = made.hidden_unit or Unit.RECORD, made.hidden_neighbours or "replace-one"
    ledger.allow("study", Budget(epsilon=1.0, delta=1e-3, unit=unit, neighbours=relation))
    return ledger


def hidden(made, ensemble):
    """The guarantee of what the aggregator's own noise hides."""
    own = getattr(ensemble, "aggregation_guarantee", None)
    return ensemble.guarantee if own is None or made.needs_exact_members else own


@every_variant
def test_public_records_and_labels_are_needed_exactly_where_it_says_so(cls, settings):
    made = cls(**settings)
    fitted = members(made)
    assert made.combine(fitted, records(made)).predict(table(20, 5)[0]).shape == (20,)
    if made.needs_public:
        with pytest.raises(SettingsError):
            made.combine(fitted)
    if made.needs_labels:
        assert made.needs_public
        with pytest.raises(SettingsError):
            made.combine(fitted, records(made, labelled=False))


@every_variant
def test_what_draws_noise_is_charged_and_stated_and_nothing_else_is(cls, settings, tmp_path):
    made = cls(**settings)
    ledger = open_ledger(tmp_path, made)
    where = {"ledger": ledger, "dataset": "study", "key": "once"}
    fitted, public = members(made), records(made)
    first, again = (made.combine(fitted, public, **where) for _ in range(2))
    np.testing.assert_array_equal(first.weights, again.weights)
    X = table(40, 5)[0]
    np.testing.assert_array_equal(first.predict(X), again.predict(X))
    charges = ledger.charges("study")
    assert made.draws_noise == bool(charges) == (settings.get("epsilon") is not None)
    if made.draws_noise:
        (charge,) = charges
        stated = hidden(made, first)
        assert stated.holds
        assert stated.epsilon == pytest.approx(total(charge.events).epsilon, rel=1e-9)
        assert stated.epsilon <= 1.0 + 1e-9
        assert stated.unit == (made.hidden_unit or Unit.RECORD)
        assert stated.neighbours == (made.hidden_neighbours or "replace-one")
    else:
        assert first.guarantee.epsilon == pytest.approx(2.0)
        assert not made.needs_exact_members


@every_variant
def test_only_what_is_trusted_with_exact_members_protects_them(cls, settings):
    """A release of exact members has a finite epsilon only if the aggregator asks for them."""
    made = cls(**settings)
    try:
        ensemble = made.combine(members(made, epsilon=math.inf), records(made))
    except ConsilienceError:
        assert made.draws_noise
        assert not made.needs_exact_members
    else:
        assert math.isfinite(ensemble.guarantee.epsilon) == made.needs_exact_members


@every_variant
def test_it_describes_itself_in_plain_sentences(cls, settings):
    described = cls(**settings).describe()
    assert described.title.startswith(cls.__name__)
    assert described.weighing[0].isupper()
    assert described.weighing.endswith(".")
    assert len(described.weighing.split()) >= 5
    assert not any(name in described.weighing for name in (*AGGREGATORS, "_", "`"))


@every_variant
def test_a_schema_decides_its_classes(cls, settings):
    columns = [Numeric(name, low=0, high=1) for name in "abc"]
    made = cls.for_schema(Schema(columns, label="y", classes=("no", "yes")), **settings)
    assert isinstance(made, cls)
    if takes(cls, "classes"):
        assert made.classes == ["no", "yes"]
    regression = Schema(columns, label="y", label_bound=1.0)
    assert getattr(cls.for_schema(regression, **settings), "classes", None) is None


@every_variant
def test_an_ensemble_comes_back_from_a_release_as_it_was(cls, settings, tmp_path):
    made = cls(**settings)
    ledger, fitted = open_ledger(tmp_path, made), members(made)
    ensemble = made.combine(fitted, records(made), ledger=ledger, dataset="study")
    charges = ledger.charges("study")
    sources = [
        Source(f"site {i}", "0" * 64, 1, learner.guarantee_, learner.public_size_)
        for i, learner in enumerate(fitted)
    ]
    events = charges[0].events if charges else ()
    combination = Combination(ensemble, {"name": cls.__name__, **settings}, events)
    release = Release.make(
        combination,
        sources,
        study={"name": "demo", "digest": "0" * 64},
        sequence=1,
        key=SigningKey.generate(),
    )
    release.save(tmp_path / "release.safetensors")
    rebuilt = Release.load(tmp_path / "release.safetensors").ensemble
    X = table(50, 3)[0]
    np.testing.assert_array_equal(rebuilt.predict(X), ensemble.predict(X))
    np.testing.assert_array_equal(rebuilt.predict_proba(X), ensemble.predict_proba(X))
    np.testing.assert_array_equal(rebuilt.weights, ensemble.weights)
    np.testing.assert_array_equal(rebuilt.classes_, ensemble.classes_)
    assert rebuilt.kind == ensemble.kind


@every_variant
def test_budgets_and_noise_are_set_on_copies(cls, settings):
    made = cls(**settings)
    before = dict(vars(made))
    spent, exact = made.with_budget([0.5, 0.25, 2.0]), made.with_budget([math.inf] * 3)
    seeded = made.with_noise(Noise(seed=3), 5)
    assert vars(made) == before
    assert spent.draws_noise == made.draws_noise
    assert not exact.draws_noise
    if made.draws_noise:
        assert np.min(spent.epsilon) == 0.25
    ensemble = seeded.combine(members(made), records(made))
    assert hidden(made, ensemble).holds != made.draws_noise


@every_variant
def test_votes_that_were_counted_before_give_the_same_ensemble(cls, settings):
    made = cls(**settings)
    public = records(made)
    question = None if public is None else made.question(public)
    assert (question is not None) == made.asks_votes
    if question is not None:
        fitted, seeded = members(made), made.with_noise(Noise(seed=3), 5)
        asked = seeded.combine(question.ask(fitted, public), public)
        np.testing.assert_array_equal(asked.coef, seeded.combine(fitted, public).coef)


@every_aggregator
def test_learners_that_it_cannot_combine_are_named_with_what_to_use(cls):
    made = cls(epsilon=1.0) if takes(cls, "epsilon") else cls()
    problems = {name: made.problem_with(kind, {}) for name, kind in LEARNERS.items()}
    assert not all(problems.values()) or made.problem_with(*list(KINDS.items())[1]) is None
    for problem in filter(None, problems.values()):
        assert problem.startswith(cls.__name__)
        assert "use" in problem or "needs" in problem
    if problems["PrivateRidge"]:
        X, y = table(40, 1)
        fitted = PrivateRidge(epsilon=math.inf, label_bound=1.0).fit(
            X, np.where(y == "yes", 1.0, 0.0)
        )
        with pytest.raises(ConsilienceError):
            made.combine([fitted] * 2, records(made))


@every_aggregator
def test_what_a_release_is_compared_with_draws_no_noise(cls):
    for settings in cls.alternatives():
        made = cls(**settings)
        assert not made.draws_noise
        assert not made.needs_exact_members
    titles = [cls(**settings).describe().title for settings in cls.alternatives()]
    assert len(set(titles)) == len(titles)


@every_aggregator
@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize("epsilons", [[0.5], [0.5, 2.0]])
def test_what_a_plan_proposes_can_be_predicted(cls, public, epsilons):
    learner = PrivateLogisticRegression(epsilon=1.0)
    for name, made in cls.planned(learner, epsilons, public=public).items():
        assert name
        assert made.is_predictable(learner, public=public)
        assert made.needs_public <= public


def test_names_on_the_command_line_are_those_of_one_aggregator():
    found = shorthands()
    assert len(found) == sum(len(cls.shorthands) for cls in AGGREGATORS.values())
    for name, cls in found.items():
        assert type(from_shorthand(name)) is cls
        assert not from_shorthand(name).draws_noise
    assert from_shorthand("average-size").weights == "size"
    with pytest.raises(SettingsError, match="no aggregator 'mean'"):
        from_shorthand("mean")


def test_a_name_is_registered_once():
    class Average(Aggregator):
        def combine(self, members, public=None, *, ledger=None, dataset=None, key=None):
            return None

    with pytest.raises(SettingsError, match="already"):
        register(Average)
    assert AGGREGATORS["Average"] is not Average
    assert register(AGGREGATORS["Average"]) is AGGREGATORS["Average"]


# ---------------------------------------------------------------- what a third attack had found


@every_variant
@pytest.mark.parametrize("spoiled", ["X", "y"])
def test_no_error_of_combine_repeats_a_value(cls, settings, spoiled):
    made = cls(**settings)
    if not made.needs_public or (spoiled == "y" and not made.needs_labels):
        pytest.skip("it is given no such records")
    fitted, public = members(made), records(made)
    values = np.array(getattr(public, spoiled), dtype=object)
    values[3 if spoiled == "y" else (3, 1)] = "SECRET-71"
    with pytest.raises(ValueError, match=r".") as caught:
        made.combine(fitted, dataclasses.replace(public, **{spoiled: values}))
    problem = caught.value
    while problem is not None:
        assert "SECRET" not in repr(problem)
        problem = problem.__cause__ or problem.__context__


@every_variant
def test_no_adapted_model_is_a_member(cls, settings):
    """It follows a release, so that one site's records move it at all sites.

    Noise that hides one site would not hide them: 12 of 20 members moved where one may.
    """
    made = cls(**settings)
    fitted, public = members(made), records(made)
    linear = PrivateLogisticRegression(epsilon=9.0, classes=["no", "yes"]).fit(*table(60, 9))
    adapted = adapt(linear, table(60, 8), compare=False)
    known = dataclasses.replace(as_members(fitted)[0], learner=adapted)
    for one in (adapted, known):
        with pytest.raises(SettingsError, match="stay at their site"):
            made.combine([*fitted[1:], one], public)


def test_no_accuracy_of_an_adapted_model_is_counted():
    """It was fitted to the very records, exactly: one of them may change every answer."""
    linear = PrivateLogisticRegression(epsilon=9.0, classes=["no", "yes"]).fit(*table(60, 9))
    adapted = adapt(linear, table(60, 8), compare=False)
    with pytest.raises(SettingsError, match="stay at their site"):
        private_accuracy(adapted, *table(60, 8), epsilon=1.0, neighbours="replace-one")
