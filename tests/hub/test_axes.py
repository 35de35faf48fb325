"""The hub takes models that were trained along axes, and nothing that only says so."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilience import Public
from consilience.files.contribution import Contribution
from consilience.files.release import Release
from consilience.learners.axes import PublicAxes
from consilience.study.study import Study
from consilience.study.toml import write_projection
from forgery import Forge

PRIVATE = '[projection]\nkind = "private"\nn_components = 1\nshare = 0.5\n'


def add_study(world: Any, tools: Any, kind: str) -> Study:
    """Add a study with a projection and, if its axes are public, the records that they are of."""
    if kind == "private":
        study: Study = world.add_study(tools.study_text() + PRIVATE)
        return study
    path = Path(world.folder) / "public.csv"
    sha256 = tools.write_csv(path, tools.table(100, 50))
    text = tools.study_text(public=sha256)
    records = Study.from_text(text).schema.encode(path)
    text += write_projection(PublicAxes.among(Public(records.X), 1, sha256))
    study = world.add_study(text)
    kept = world.client.put(
        "/api/studies/demo/files/public.csv", content=path.read_bytes(), headers=world.coordinator
    )
    assert kept.status_code in (200, 201), kept.text
    return study


@pytest.mark.parametrize("kind", ["public", "private"])
def test_models_along_axes_are_taken_and_combined(kind: str, sqlite_world: Any, tools: Any) -> None:
    world = sqlite_world
    study = add_study(world, tools, kind)
    world.fill(study, 3)
    world.combiner.run(at_once=True)
    _, path = world.hub.release_path("demo")
    release = Release.load(path, key=world.hub.key.public)
    assert len(release.sources) == 3
    assert release.guarantee.epsilon == pytest.approx(1.0)
    assert study.projection is not None
    if kind == "public":
        assert study.projection.span(release.ensemble.coef)
    page = world.client.get(f"/api/studies/demo/releases/{release.sequence}")
    assert page.status_code < 500


def refused(world: Any, tools: Any, ward: Any, forge: Forge) -> None:
    answer = world.submit(ward, forge.to_bytes())
    assert answer.status_code >= 400, answer.text
    assert tools.code(answer)


def test_models_along_other_axes_or_for_less_are_refused(sqlite_world: Any, tools: Any) -> None:
    world = sqlite_world
    study = add_study(world, tools, "private")
    ward = world.ward("north")
    honest: Contribution = ward.train(study)
    lies: list[dict[str, Any]] = [
        {"events": "[]"},
        {"events": json.dumps(json.loads(honest.sealed.facts["events"])[2:])},
        {"projection": {"kind": "private", "n_components": 1, "share": 0.1}},
        {"projection": {"kind": "oracle"}},
        {"projection": None},
    ]
    for lie in lies:
        forge = Forge(honest.sealed, ward.key)
        forge.facts |= lie
        refused(world, tools, ward, forge)
    assert world.submit(ward, honest).status_code == 201


def test_coefficients_beside_the_public_axes_are_refused(sqlite_world: Any, tools: Any) -> None:
    world = sqlite_world
    study = add_study(world, tools, "public")
    ward = world.ward("north")
    honest = ward.train(study)
    forge = Forge(honest.sealed, ward.key)
    forge.tensors["coef"] = forge.tensors["coef"] + np.array([[0.01, 0.0]])
    refused(world, tools, ward, forge)
    assert world.submit(ward, honest).status_code == 201
