"""Audits of studies, and of learners that are attacked by sampling: trees and boosting."""

from dataclasses import replace

import pytest

from consilience import (
    Noise,
    PrivateAdaBoostClassifier,
    PrivateForestClassifier,
    PrivateTreeClassifier,
)
from consilience.auditing.audit import audit
from consilience.errors import SettingsError
from studies import study, study_text

SEEDED = Noise(seed=20240611)
# All trees see all records and spend all of epsilon on leaves: where an attack finds most.
OPEN = {
    "bounds": (0, 1),
    "classes": [0, 1],
    "splitter": "random",
    "assignment": "all",
    "n_trees": 2,
    "max_depth": 1,
    "random_state": 0,
}


def halve(plan):
    """Return a plan that draws half the noise it states."""
    halves = {}
    for name in ("scale", "sigma"):
        if hasattr(plan.leaves, name):
            halves[name] = getattr(plan.leaves, name) / 2
    return replace(
        plan,
        selections=tuple(replace(one, scale=one.scale / 2) for one in plan.selections),
        leaves=replace(plan.leaves, **halves),
    )


class HalfTheNoise(PrivateForestClassifier):
    """A forest that draws half the noise it is charged for."""

    def _plan(self, task):
        return halve(super()._plan(task))


class HalfTheNoiseBoosted(PrivateAdaBoostClassifier):
    """A boosted model that draws half the noise it is charged for."""

    def _plan(self, task):
        return halve(super()._plan(task))


class TellsItsSize(PrivateForestClassifier):
    """A forest that releases its exact number of records."""

    def _train(self, task, plan, source):
        super()._train(task, plan, source)
        self.public_size_ = len(task.y)


def attack(learner, runs=2000):
    return audit(learner, n_records=20, runs=runs, noise=SEEDED)


def test_a_study_is_audited_at_its_weakest_promise(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(study_text())
    report = audit(path, restarts=4, runs=50, noise=SEEDED)
    assert report.passed, str(report)
    assert report.attack == "exact density"
    assert report.claimed.epsilon == pytest.approx(3.0 * 0.99)
    assert report.epsilon_lower > 0.5 * report.claimed.epsilon
    stronger = audit(study(), epsilon=0.5, restarts=1, runs=0)
    assert stronger.claimed.epsilon == pytest.approx(0.5 * 0.99)


def test_a_study_of_trees_is_attacked_by_sampling():
    settings = "n_trees = 2\nmax_depth = 2\nrandom_state = 0"
    report = audit(
        study("PrivateForestClassifier", "WeightedVote", settings=settings),
        runs=300,
        n_records=20,
        noise=SEEDED,
    )
    assert report.passed, str(report)
    assert report.attack == "sample"
    assert report.claimed.epsilon == pytest.approx(3.0)
    assert "a unit " in report.worst


@pytest.mark.statistical
@pytest.mark.parametrize(
    "settings",
    [
        # Forests of records are audited exactly in test_trees.py, replaced ones by samples below.
        pytest.param({}, marks=pytest.mark.soak),
        {"unit": "person", "records_per_person": 2},
    ],
    ids=str,
)
def test_forests_keep_their_epsilon_and_half_the_noise_is_caught(settings):
    facts = {"epsilon": 2.0, **OPEN, **settings}
    sound, broken = (attack(kind(**facts)) for kind in (PrivateForestClassifier, HalfTheNoise))
    assert sound.passed, str(sound)
    assert sound.epsilon_lower > 0.4 * sound.claimed.epsilon, "the attack found too little"
    assert not broken.passed, str(broken)


@pytest.mark.statistical
def test_a_forest_with_delta_keeps_its_epsilon():
    assert attack(PrivateForestClassifier(epsilon=2.0, delta=1e-3, **OPEN), runs=500).passed


@pytest.mark.statistical
def test_replaced_records_of_half_the_noise_are_caught():
    facts = {**OPEN, "epsilon": 2.0, "n_trees": 1, "neighbours": "replace-one"}
    sound, broken = (attack(kind(**facts)) for kind in (PrivateForestClassifier, HalfTheNoise))
    assert sound.passed, str(sound)
    assert not broken.passed, str(broken)


@pytest.mark.statistical
def test_boosting_keeps_its_epsilon_and_half_the_noise_is_caught():
    facts = {"epsilon": 2.0, "bounds": (0, 1), "classes": [0, 1], "n_rounds": 1, "max_depth": 1}
    facts |= {"split_share": 0.05, "random_state": 0}
    sound, broken = (
        attack(kind(**facts), runs=1000)
        for kind in (PrivateAdaBoostClassifier, HalfTheNoiseBoosted)
    )
    assert sound.passed, str(sound)
    assert not broken.passed, str(broken)


@pytest.mark.statistical
def test_a_released_number_of_records_is_caught():
    facts = {"epsilon": 1.0, **OPEN}
    assert not attack(TellsItsSize(**facts), runs=500).passed
    assert attack(PrivateForestClassifier(**facts), runs=500).passed


@pytest.mark.parametrize(
    "kind", [PrivateTreeClassifier, PrivateForestClassifier, PrivateAdaBoostClassifier]
)
def test_learners_without_declared_classes_or_trees_are_attacked_as_they_are(kind):
    assert audit(kind(epsilon=1.0, bounds=(0, 1)), runs=60, n_records=10, noise=SEEDED).passed


def test_what_cannot_be_attacked_says_so():
    forest = PrivateForestClassifier(epsilon=1.0, bounds=(0, 1))
    with pytest.raises(SettingsError, match="kind='sample'"):
        audit(forest, kind="exact")
    with pytest.raises(SettingsError, match="for studies"):
        audit(forest, epsilon=1.0)
    with pytest.raises(SettingsError, match=r"from 0\.1 to 3"):
        audit(study(), epsilon=10.0)
