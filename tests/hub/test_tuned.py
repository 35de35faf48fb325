"""The hub takes models whose settings sites chose as the study says, and no others."""

import json
from typing import Any

import pytest

from consilience.files.contribution import Contribution
from consilience.files.release import Release
from forgery import Forge

TUNING = "[tuning]\nregularization = [0.001, 0.1]\n"


def test_models_of_chosen_candidates_are_taken_and_combined(sqlite_world: Any, tools: Any) -> None:
    world = sqlite_world
    study = world.add_study(tools.study_text() + TUNING)
    world.fill(study, 3)
    world.combiner.run(at_once=True)
    _, path = world.hub.release_path("demo")
    release = Release.load(path, key=world.hub.key.public)
    assert len(release.sources) == 3
    assert release.guarantee.epsilon == pytest.approx(1.0)
    page = world.client.get(f"/api/studies/demo/releases/{release.sequence}")
    assert page.status_code < 500


def test_models_that_were_chosen_otherwise_or_for_less_are_refused(
    sqlite_world: Any, tools: Any
) -> None:
    world = sqlite_world
    study = world.add_study(tools.study_text() + TUNING)
    ward = world.ward("north")
    honest: Contribution = ward.train(study)
    facts = honest.sealed.facts
    other = {**facts["tuning"], "candidates": {"regularization": [0.001, 0.2]}}
    events = json.loads(facts["events"])
    events[0]["scale"] /= 2
    lies: list[dict[str, Any]] = [
        {"events": "[]"},
        {"events": json.dumps(events, sort_keys=True, separators=(",", ":"))},
        {"tuning": other},
        {"tuning": {**facts["tuning"], "selection": "[]"}},
        {"tuning": None},
        {"settings": {**facts["settings"], "regularization": 0.01}},
    ]
    for lie in lies:
        forge = Forge(honest.sealed, ward.key)
        forge.facts |= lie
        answer = world.submit(ward, forge.to_bytes())
        assert answer.status_code >= 400, answer.text
        assert tools.code(answer)
    assert world.submit(ward, honest).status_code == 201
